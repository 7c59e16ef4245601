# shellcheck shell=bash
# The programs that tests run beside this project's own, most of them unpacked below .dev/tools and not installed. Sourced by deploy/lib.sh.

# What the gate needs beside that. What takes minutes is made beside the parts that follow; `finish_tools` waits for it.
ensure_gate_tools() {
    local missing=()
    start_tools ensure_nextest ensure_machine ensure_loads
    have chromium || have chromium-browser || have google-chrome || missing+=(chromium)
    # For the executor that makes Linux users, its door, its rules of the network, and the units.
    [ -x /usr/sbin/sshd ] || missing+=(openssh-server openssh-client)
    [ -x /usr/sbin/nft ] || missing+=(nftables)
    have visudo || missing+=(sudo)
    have systemd-analyze || missing+=(systemd)
    have curl || missing+=(curl)
    have shellcheck || missing+=(shellcheck)
    need_python
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
    ensure_mail_server
    ensure_nvml_client
    ensure_processor
    ensure_faketime
    ensure_console_tools
    from_npm browser playwright-core "what drives the browser"
    ensure_mdbook
}

# What the proofs need beside that of the gate.
ensure_proof_tools() {
    local missing=()
    # The Debian packages, their repository, and the rules that they are held against.
    have lintian || missing+=(lintian)
    have apt-ftparchive || missing+=(apt-utils)
    have gpg || missing+=(gnupg)
    have dpkg-shlibdeps || missing+=(dpkg-dev)
    start_tools ensure_deny ensure_cargo_deb ensure_auditable2cdx
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
    ensure_contract_tools
    ensure_maas_client
    ensure_foreign_provider
    ensure_kubernetes_validate
    ensure_kubectl
    ensure_containers
    ensure_proxies
    ensure_netdata
    ensure_prometheus
    ensure_pgbackrest
    ensure_etcd
    ensure_patroni
    ensure_pgbouncer
    ensure_registry
    ensure_skopeo
    ensure_musl
    from_npm grafana-schema @grafana/schema "Grafana's types of a dashboard"
    from_npm log-clients winston-loki "two clients of the push API for logs"
}

# What the console's tests have from npm, beside what its build has: in edge/console/node_modules, where its developers have it.
ensure_console_tools() {
    local folder=$root/edge/console
    ! cmp -s "$folder/package-lock.json" "$folder/node_modules/.installed-lock.json" || return 0
    say "taking what the console and its tests are made of from npm"
    install_modules "$folder" edge/console || unavailable "the tests of the console cannot run. $instead_of_npm"
    cp "$folder/package-lock.json" "$folder/node_modules/.installed-lock.json"
}

# The programs that look at the API's contract from outside.
ensure_contract_tools() { from_pypi contract deploy/pins/contract-tools.txt "The tests of the API's contract need"; }

# The mail server that takes notifications in the tests.
ensure_mail_server() { from_pypi aiosmtpd deploy/pins/aiosmtpd.txt "The tests of e-mail need"; }

# A client of NVIDIA's management library that is not ours, for the library's fake.
ensure_nvml_client() { from_pypi nvml deploy/pins/nvml.txt "The test of the fake NVML needs"; }

# A client of MAAS that is not ours, for the provider's fake.
ensure_maas_client() { from_pypi libmaas deploy/pins/libmaas.txt "The test of the fake MAAS needs"; }

# What checks the resources of deploy/kubernetes against the schemas of Kubernetes' releases.
ensure_kubernetes_validate() {
    from_pypi kubernetes-validate deploy/pins/kubernetes-validate.txt "The tests of deploy/kubernetes need"
}

# The payment processor of the tests and of deploy/up. What its source is built with is pinned as well, so nothing is taken beside it.
ensure_processor() {
    local missing=() pins=(deploy/pins/localstripe.txt deploy/pins/localstripe-source.txt) content
    need_python
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
    content="$(cd "$root" && cat "${pins[@]}") $(python_version)"
    cached localstripe "$content" "Payments need what ${pins[0]} lists: PyPI, or an index that PIP_INDEX_URL names, must be reachable." \
        make_processor "${pins[@]}"
    link_tool "$entry" localstripe
}
make_processor() {
    make_environment "$1" && environment_pip "$2" --no-deps --no-build-isolation --no-binary :all:
}

# A foreign identity provider, for the one test that logs a user in with it.
ensure_foreign_provider() { from_npm oidc-provider oidc-provider "the foreign identity provider"; }

# A clock that a test can put on and back for one process.
ensure_faketime() {
    local library=libfaketimeMT.so.1
    compgen -G "/usr/lib/*/faketime/$library" >/dev/null || files_from_debian faketime "usr/lib/*/faketime/$library" -- libfaketime
}

# The loads of a node's validation: stress-ng and fio out of Debian's packages, with the libraries that this machine lacks, unpacked and not
# installed. Their libraries are beside them, so each is started by a script of its name.
ensure_loads() {
    local packages
    ! is_own_tool loads/bin/fio || return 0
    if [ -x /usr/bin/stress-ng ] && [ -x /usr/bin/fio ]; then
        [ ! -L "$tools/loads" ] || rm "$tools/loads"
        link_tool /usr/bin/stress-ng loads/bin/stress-ng
        link_tool /usr/bin/fio loads/bin/fio
        return
    fi
    cached_loads "stress-ng fio"
    # A machine that shares the cache may lack more libraries than the one that the loads were taken for.
    if ! "$entry/bin/stress-ng" --version >/dev/null 2>&1 || ! "$entry/bin/fio" --version >/dev/null 2>&1; then
        packages=$(missing_for stress-ng fio)
        cached_loads "$packages"
    fi
    link_tool "$entry" loads
}
cached_loads() { cached loads "$1" "Debian's archive must be reachable; or install stress-ng and fio." make_loads; }
make_loads() {
    local name packages
    packages=$(missing_for stress-ng fio)
    # A machine that was never updated knows no packages.
    [ -n "$packages" ] || { [ "$(id -u)" -ne 0 ] || locked apt update_apt && packages=$(missing_for stress-ng fio); }
    [ -n "$packages" ] || return
    say "taking stress-ng and fio out of Debian's packages"
    # shellcheck disable=SC2086
    unpack_debian "$entry" $packages && mkdir -p "$entry/bin" || return
    for name in stress-ng fio; do
        cat >"$entry/bin/$name" <<SCRIPT || return
#!/bin/sh
here=\$(dirname "\$(dirname "\$(readlink -f "\$0")")")
for folder in "\$here"/usr/lib/*-linux-gnu "\$here"/lib/*-linux-gnu "\$here"/usr/lib/*-linux-gnu/ceph; do
    LD_LIBRARY_PATH=\${LD_LIBRARY_PATH:+\$LD_LIBRARY_PATH:}\$folder
done
export LD_LIBRARY_PATH
program=\$here/usr/bin/$name
[ -x "\$program" ] || program=/usr/bin/$name
exec "\$program" "\$@"
SCRIPT
        chmod 0755 "$entry/bin/$name" || return
    done
}

# A Debian for systemd-nspawn to boot, in which tests run the units of deploy/systemd: this machine's own release, since it runs the
# programs that are built here, with systemd and Postgres, and what an image for nodes has: sshd, sudo, cloud-init, the loads of a validation;
# neither curl nor wget. systemd-nspawn and mmdebstrap come out of Debian's packages, unpacked and not installed. It takes two minutes and
# 550 MB. Tests write into an overlay of it.
machine_packages=systemd-sysv,libnss-systemd,dbus,openssh-server,sudo,cloud-init,stress-ng,fio,postgresql,e2fsprogs,procps
ensure_machine() {
    local suite
    suite=$(. /etc/os-release && printf '%s' "${ID:-}:${VERSION_CODENAME:-}")
    if [ "$(id -u)" -ne 0 ] || [[ $suite != debian:?* ]]; then
        say "no machine for the tests of the units: making one needs root and Debian"
        return 0
    fi
    cached machine "$machine_packages" "Debian's archive must be reachable. Tests of the units need a tree of its ${suite#debian:}." \
        make_machine "${suite#debian:}"
    link_tool "$entry" machine
}
make_machine() {
    local suite=$1 cluster
    say "making a Debian $suite for the tests of the units"
    # mmdebstrap is a program in Perl.
    have perl || apt perl
    unpack_debian "$entry/programs" systemd-container libsystemd-shared mmdebstrap &&
        try_seconds=3600 tries "mmdebstrap $suite" bootstrap "$suite" || return
    # The tests share the host's network: the socket is the only way to this Postgres.
    for cluster in "$entry"/tree/etc/postgresql/*/main; do
        printf "listen_addresses = ''\n" >"$cluster/conf.d/socket-only.conf" || return
    done
    # For the same reason port 22 and the interfaces are not theirs. A machine that has user data removes the last file.
    ln -s /dev/null "$entry/tree/etc/systemd/system/ssh.service" &&
        printf 'datasource_list: [NoCloud]\nnetwork: {config: disabled}\nlocale: false\n' >"$entry/tree/etc/cloud/cloud.cfg.d/90-tests.cfg" &&
        : >"$entry/tree/etc/cloud/cloud-init.disabled" &&
        # By which tests know that it is there.
        printf '%s %s\n' "$suite" "$machine_packages" >"$entry/made-of"
}
bootstrap() {
    local isolated=()
    # The mounts of one that is killed end with it.
    ! unshare --mount true 2>/dev/null || isolated=(unshare --mount --propagation private)
    rm -rf --one-file-system "$entry/tree"
    PATH=$entry/programs/usr/bin:$PATH bounded "${isolated[@]}" mmdebstrap --quiet --variant=minbase --include="$machine_packages" \
        --aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' \
        --aptopt='Acquire::Retries "3"' --aptopt='Acquire::http::Timeout "30"' --aptopt='Acquire::https::Timeout "30"' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/lib/postgresql/*/lib/bitcode/*' \
        "$1" "$entry/tree"
}
