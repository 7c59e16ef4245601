# shellcheck shell=bash
# How the programs of packages, images and bare machines are compiled, and those of the release before this one. Sourced by deploy/lib.sh.

# The version of the workspace.
workspace_version() { sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' "$root/Cargo.toml"; }
# previous_release version | commit: that of deploy/releases.toml.
previous_release() { sed -n "s/^$1 = \"\(.*\)\"\$/\1/p" "$root/deploy/releases.toml"; }

# For CARGO_ENCODED_RUSTFLAGS, whose options may have spaces: no path of this machine is in what is compiled.
remapped_paths() {
    local paths IFS=$'\x1f'
    # Where the standard library's sources are installed, rustc names them, and otherwise the commit that they are of.
    paths=("$root=/gpuaas" "${CARGO_HOME:-${HOME:-}/.cargo}=/cargo"
        "$(rustc --print sysroot)/lib/rustlib/src/rust=/rustc/$(rustc -vV | sed -n 's/^commit-hash: //p')")
    [ -z "${CARGO_TARGET_DIR:-}" ] || paths+=("$(realpath -m -- "$CARGO_TARGET_DIR")=/gpuaas/target")
    printf '%s' "${paths[*]/#/--remap-path-prefix=}"
}

# The same for the compiler of C: the sources of the allocator and of the cryptography name their own files, some of them in the target folder.
remapped_paths_of_c() {
    printf -- '-ffile-prefix-map=%s=/gpuaas -ffile-prefix-map=%s=/cargo' "$root" "${CARGO_HOME:-${HOME:-}/.cargo}"
    [ -z "${CARGO_TARGET_DIR:-}" ] || printf -- ' -ffile-prefix-map=%s=/gpuaas/target' "$(realpath -m -- "$CARGO_TARGET_DIR")"
}

# The programs of the Debian packages and of the image, which are the same ones. No path of this machine is in them, and their dependencies are
# (section .dep-v0, for `cargo audit bin` and scanners of images).
compile_packages() {
    # The console is built with Node.js (edge/build.rs).
    ensure_node
    ensure_cargo_auditable
    say "compiling gpuaas, the programs of a node, and gpuctl"
    CARGO_ENCODED_RUSTFLAGS="$(remapped_paths)" CFLAGS="$(remapped_paths_of_c)" CARGO_INCREMENTAL=0 cargo auditable build --locked \
        --profile packages "${package_features[@]}" --package supervisors --package agent --package gpuctl --bins
}
# Without default features: `gpuaas dev` is not in a package.
package_features=(--no-default-features --features supervisors/console)
compiled_packages() { printf '%s/packages' "${CARGO_TARGET_DIR:-target}"; }

# bound_of PROGRAM: the most bytes that this program of the packages may have without symbols; nothing where it has no bound.
bound_of() {
    case $1 in
        gpuaas) echo 40000000 ;;
    esac
}

# print_size FILE: says how large an installed program is. It fails where the program is over its bound, and says by how much.
print_size() {
    local program=${1##*/} bytes bound
    bytes=$(stat --format %s -- "$1")
    bound=$(bound_of "$program")
    say "$program has $(in_megabytes "$bytes")${bound:+, of $(in_megabytes "$bound") at most}"
    if [ -n "$bound" ] && [ "$bytes" -gt "$bound" ]; then
        printf 'gpuaas: TOO LARGE: %s has %s more than its bound (bound_of in deploy/lib/release_build.sh)\n' \
            "$program" "$(in_megabytes $((bytes - bound)))" >&2
        return 1
    fi
}
# As sizes of files are given: rounded up, in millions of bytes.
in_megabytes() { awk -v bytes="$1" 'BEGIN { tenths = int((bytes + 99999) / 100000); printf "%d.%d MB", tenths / 10, tenths % 10 }'; }

# bill_of_materials PROGRAM FILE: the dependencies that are in a program, as CycloneDX, JSON. It fails where the program has no list of them.
bill_of_materials() {
    has_dependencies "$1" || return
    auditable2cdx "$1" >"$2" || fail "auditable2cdx cannot read the dependencies of $1"
}
has_dependencies() { readelf --section-headers --wide "$1" | grep ' \.dep-v0 ' >/dev/null; }

# Imports an OpenPGP secret key into a key ring of its own, and sets `signer`. The caller ends with release_signing_key.
import_signing_key() {
    GNUPGHOME=$(mktemp -d)
    export GNUPGHOME
    gpg --batch --quiet --import "$1" || fail "--key: $1 is no OpenPGP key"
    signer=$(gpg --batch --with-colons --list-secret-keys | sed -n '/^sec/,/^fpr/s/^fpr:*\([0-9A-F]*\):$/\1/p' | head -n 1)
    [ -n "$signer" ] || fail "--key: $1 has no secret key"
}
# Its agent holds the key in memory until it is stopped.
release_signing_key() {
    [ -n "${GNUPGHOME:-}" ] || return 0
    gpgconf --kill all 2>/dev/null || true
    rm -rf "$GNUPGHOME"
}

# expect_no_paths PROGRAM...: fails where a program names a folder of this machine. Two machines, or two checkouts, would make different
# programs of the same sources, and packages with different digests.
expect_no_paths() {
    local program folder
    for program; do
        for folder in "$root" "${CARGO_HOME:-${HOME:-}/.cargo}" "${RUSTUP_HOME:-${HOME:-}/.rustup}" "$(realpath -m -- "${CARGO_TARGET_DIR:-$root/target}")"; do
            # A folder with the name that it is mapped to is in the programs of all machines.
            case $folder in /gpuaas | /gpuaas/target | /cargo | /) continue ;; esac
            ! LC_ALL=C grep -qaF -- "$folder/" "$program" ||
                fail "$program names the folder $folder of this machine, so its digest holds for this machine alone: map the folder (remapped_paths in deploy/lib.sh)"
        done
    done
}

installer_path() { printf '%s/%s-unknown-linux-musl/installer/gpuaas-installer' "${CARGO_TARGET_DIR:-target}" "$(uname -m)"; }

# The static first program of a bare machine, which bootstrap scripts carry, and the finalizer beside it.
compile_installer() {
    local triple
    triple=$(uname -m)-unknown-linux-musl
    say "compiling the static installer"
    # Only the compiler for C differs, for this one target.
    env "CC_${triple//-/_}=musl-gcc" CARGO_ENCODED_RUSTFLAGS="$(remapped_paths)" CARGO_INCREMENTAL=0 \
        cargo build --locked --profile installer --target "$triple" --package agent-package --bin gpuaas-installer --bin gpuaas-finalizer
    expect_no_paths "$(installer_path)" "$(dirname "$(installer_path)")/gpuaas-finalizer"
}

# The programs of the release before this one (deploy/releases.toml), which tests upgrade from and roll back to. They are built from their commit
# in the same target folder, with the features and the optimisation of this workspace, so that dependencies which both have are compiled once.
ensure_previous_release() {
    local commit folder source version
    commit=$(previous_release commit)
    [[ $commit =~ ^[0-9a-f]{40}$ ]] || fail "deploy/releases.toml names no commit of the previous release"
    # Both are compiled into one target folder, in which Cargo distinguishes them by their versions alone.
    version=$(previous_release version)
    [ "$version" != "$(workspace_version)" ] ||
        fail "the version in Cargo.toml is that of the previous release in deploy/releases.toml: raise it"
    folder=$root/.dev/previous-release
    export GPUAAS_PREVIOUS_RELEASE=$folder/$commit
    [ ! -x "$GPUAAS_PREVIOUS_RELEASE/gpuaas-agent" ] || return 0
    if ! git -C "$root" cat-file -e "$commit^{commit}" 2>/dev/null; then
        say "the commit $commit of the previous release is not in this checkout: fetch its history"
        return 0
    fi
    source=$folder/source
    rm -rf "$folder"
    mkdir -p "$source" "$folder/$commit"
    # With the time of this moment on each file: what was compiled before is then older than its source, and is compiled from this one.
    git -C "$root" archive "$commit" | tar --extract --touch --directory "$source"
    sed -n '/^\[profile\.dev\]/,/^\[profile\.fuzz\]/p' "$root/Cargo.toml" | sed '/^\[profile\.fuzz\]/d' >"$folder/profile.toml"
    (cd "$source" && CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target} \
        cargo --config "$folder/profile.toml" build --locked --workspace --bin gpuaas --bin gpuaas-agent)
    cp "${CARGO_TARGET_DIR:-$root/target}"/debug/{gpuaas,gpuaas-agent} "$folder/$commit/"
    rm -rf "$source"
}
