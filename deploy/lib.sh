# shellcheck shell=bash
# What deploy/up, deploy/test and deploy/bench share: finding what is installed, installing what is missing, and
# saying so. Sourced, never run. Sets `root` (the checkout) and exports GPUAAS_TOOLS_DIR, and GPUAAS_CACHE_DIR (lib/cache.sh).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools=$root/.dev/tools
export GPUAAS_TOOLS_DIR=$tools

postgres_at_least=15
nats_at_least=2.10
# Builds the pages for browsers (edge/build.rs, which has the same bounds), and runs what the tests have from npm. Of 20, from 20.19 on.
node_at_least=22.12
node_20_at_least=20.19
mdbook_version=0.5.4
nextest_version=0.9.143
deny_version=0.20.2
cargo_deb_version=3.8.0
cargo_auditable_version=0.7.7
auditable2cdx_version=0.1.0

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'gpuaas: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# at_least HAVE WANT: compares dotted versions.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

# Everything that building and running need.
ensure_all() {
    ensure_rust
    ensure_packages
    ensure_node
    ensure_nats
    ensure_crates
    say "rust $(cargo --version | cut -d' ' -f2) · node $(node --version) · postgres in $(find_postgres) · nats-server at $(find_nats)"
}

# The rest, by what it installs or makes.
# shellcheck source=lib/cache.sh
. "$root/deploy/lib/cache.sh"
# shellcheck source=lib/install.sh
. "$root/deploy/lib/install.sh"
# shellcheck source=lib/toolchain.sh
. "$root/deploy/lib/toolchain.sh"
# shellcheck source=lib/test_tools.sh
. "$root/deploy/lib/test_tools.sh"
# shellcheck source=lib/test_servers.sh
. "$root/deploy/lib/test_servers.sh"
# shellcheck source=lib/release_build.sh
. "$root/deploy/lib/release_build.sh"
