# shellcheck shell=bash
# The programs that tests run beside this project's own, most of them unpacked below .dev/tools and not installed. Sourced by deploy/lib.sh.

# What the tests need beside that: a browser, sudo, systemd's analyzer, curl, other shells, Python for the contract's tools, and the proxies of
# deploy/ingress.
ensure_test_tools() {
    local missing=()
    have chromium || have chromium-browser || have google-chrome || missing+=(chromium)
    # For the executor that makes Linux users, its door, and the units.
    [ -x /usr/sbin/sshd ] || missing+=(openssh-server openssh-client)
    have visudo || missing+=(sudo)
    have systemd-analyze || missing+=(systemd)
    # Shells that must understand gpuctl's completions.
    have zsh || missing+=(zsh)
    have fish || missing+=(fish)
    # The book's recipes, which are run word by word.
    have curl || missing+=(curl)
    have shellcheck || missing+=(shellcheck)
    # The Debian packages, their repository, and the rules that they are held against.
    have lintian || missing+=(lintian)
    have apt-ftparchive || missing+=(apt-utils)
    have gpg || missing+=(gnupg)
    have dpkg-shlibdeps || missing+=(dpkg-dev)
    need_python
    start_cargo_tools
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
    ensure_contract_tools
    ensure_mail_server
    ensure_nvml_client
    ensure_maas_client
    ensure_kubernetes_validate
    ensure_kubectl
    ensure_containers
    ensure_processor
    ensure_proxies
    ensure_netdata
    ensure_prometheus
    ensure_pgbackrest
    ensure_etcd
    ensure_patroni
    ensure_faketime
    ensure_machine
    ensure_registry
    ensure_skopeo
    ensure_loads
    ensure_musl
    ensure_console_tools
    from_npm browser playwright-core "what drives the browser"
    from_npm grafana-schema @grafana/schema "Grafana's types of a dashboard"
    from_npm log-clients winston-loki "two clients of the push API for logs"
    ensure_mdbook
    finish_cargo_tools
}

# What the console's tests have from npm, beside what its build has: in edge/console/node_modules, where its developers have it.
ensure_console_tools() {
    local folder=$root/edge/console
    ! cmp -s "$folder/package-lock.json" "$folder/node_modules/.installed-lock.json" || return 0
    say "taking what the console and its tests are made of from npm"
    (cd "$folder" && npm ci --silent --ignore-scripts --no-audit --no-fund) || fail "npm cannot install edge/console; its registry must be reachable."
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
    local missing=() source=$root/deploy/pins/localstripe-source.txt folder=$tools/localstripe
    need_python
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
    from_pypi localstripe deploy/pins/localstripe.txt "Payments need"
    ! cmp -s "$source" "$folder/source.txt" || return 0
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: \
        --require-hashes --requirement "$source" || fail "PyPI cannot be reached. Payments need localstripe."
    cp "$source" "$folder/source.txt"
}

# A foreign identity provider, for the one test that logs a user in with it.
ensure_foreign_provider() { from_npm oidc-provider oidc-provider "the foreign identity provider"; }

# The baselines of the benchmark of terminals: a terminal server from PyPI, and OpenSSH.
ensure_terminals() {
    local missing=()
    [ -x /usr/sbin/sshd ] && have ssh || missing+=(openssh-server openssh-client)
    need_python
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
    from_pypi terminado deploy/pins/terminado.txt "The benchmark of terminals needs"
}

# A clock that a test can put on and back for one process.
ensure_faketime() {
    local library=libfaketimeMT.so.1
    ! compgen -G "/usr/lib/*/faketime/$library" >/dev/null && [ ! -e "$tools/faketime/$library" ] || return 0
    files_from_debian faketime "usr/lib/*/faketime/$library" -- libfaketime
}

# The loads of a node's validation: stress-ng and fio out of Debian's packages, with the libraries that this machine lacks, unpacked and not
# installed. Their libraries are beside them, so each is started by a script of its name.
ensure_loads() {
    local name packages
    [ ! -x "$tools/loads/bin/fio" ] || return 0
    if [ -x /usr/bin/stress-ng ] && [ -x /usr/bin/fio ]; then
        mkdir -p "$tools/loads/bin"
        ln -s /usr/bin/stress-ng /usr/bin/fio "$tools/loads/bin"
        return
    fi
    # A machine that was never updated knows no packages.
    packages=$(missing_for stress-ng fio)
    [ -n "$packages" ] || { apt ca-certificates && packages=$(missing_for stress-ng fio); }
    # shellcheck disable=SC2086
    unpack_debian "$tools/loads.new" $packages
    mkdir -p "$tools/loads.new/bin"
    for name in stress-ng fio; do
        cat >"$tools/loads.new/bin/$name" <<SCRIPT
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
        chmod 0755 "$tools/loads.new/bin/$name"
    done
    rm -rf "$tools/loads"
    mv "$tools/loads.new" "$tools/loads"
}

# A Debian for systemd-nspawn to boot, in which tests run the units of deploy/systemd: this machine's own release, since it runs the
# programs that are built here, with systemd and Postgres, and what an image for nodes has: sshd, sudo, cloud-init, the loads of a validation;
# neither curl nor wget. systemd-nspawn and mmdebstrap come out of Debian's packages, unpacked and not installed. It takes two minutes and
# 550 MB. A tree of other packages than these is made again.
machine_packages=systemd-sysv,libnss-systemd,dbus,openssh-server,sudo,cloud-init,stress-ng,fio,postgresql,e2fsprogs,procps
ensure_machine() {
    local folder=$tools/machine suite stamp
    suite=$(. /etc/os-release && printf '%s' "${ID:-}:${VERSION_CODENAME:-}")
    if [ "$(id -u)" -ne 0 ] || [[ $suite != debian:?* ]]; then
        say "no machine for the tests of the units: making one needs root and Debian"
        return 0
    fi
    suite=${suite#debian:}
    stamp="$suite $machine_packages"
    [ "$(cat "$folder/made-of" 2>/dev/null)" != "$stamp" ] || return 0
    say "making a Debian $suite for the tests of the units in .dev/tools/machine"
    rm -rf "$folder"
    # mmdebstrap is a program in Perl.
    have perl || apt perl
    unpack_debian "$folder/programs" systemd-container libsystemd-shared mmdebstrap
    PATH=$folder/programs/usr/bin:$PATH mmdebstrap --quiet --variant=minbase --include="$machine_packages" \
        --aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/lib/postgresql/*/lib/bitcode/*' \
        "$suite" "$folder/tree" || fail "mmdebstrap cannot make a Debian $suite; its archive must be reachable."
    # The tests share the host's network: the socket is the only way to this Postgres.
    local cluster
    for cluster in "$folder"/tree/etc/postgresql/*/main; do
        printf "listen_addresses = ''\n" >"$cluster/conf.d/socket-only.conf"
    done
    # For the same reason port 22 and the interfaces are not theirs.
    ln -s /dev/null "$folder/tree/etc/systemd/system/ssh.service"
    printf 'datasource_list: [NoCloud]\nnetwork: {config: disabled}\nlocale: false\n' >"$folder/tree/etc/cloud/cloud.cfg.d/90-tests.cfg"
    # A machine that has user data takes this away.
    : >"$folder/tree/etc/cloud/cloud-init.disabled"
    # Last, so that a half-made one is made again.
    printf '%s\n' "$stamp" >"$folder/made-of"
}
