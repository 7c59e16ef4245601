# shellcheck shell=bash
# The cache of what is downloaded and of what is compiled from that: one for all checkouts of a user, outside of them. .dev/tools has links into it.
# Sourced by deploy/lib.sh.
#
#   $cache/NAME/HASH             an entry: one tool, of the content that HASH is made of
#   $cache/NAME/HASH.complete    written when the entry is made; without it the entry is half-made, and is made again
#   $cache/NAME/lock             held by the run that makes an entry of this name
#   $cache/npm, $cache/pip       the caches of npm and pip

# Prints the home folder of the user where the cache can be in it: HOME, or else that of the user's entry in passwd.
find_home() {
    local home folder
    for home in "${HOME:-}" "$(getent passwd "$(id -u)" 2>/dev/null | cut -d : -f 6)"; do
        [[ $home == /* ]] && [ -d "$home" ] || continue
        for folder in "$home" "$home/.cache" "$home/.cache/gpuaas"; do
            # Others than these are made.
            [ ! -e "$folder" ] || { [ -d "$folder" ] && [ -w "$folder" ]; } || continue 2
        done
        printf '%s\n' "$home"
        return
    done
    return 1
}

# Sets `cache`. The programs that a script starts have the same one.
choose_cache() {
    local home
    if [ -n "${GPUAAS_CACHE_DIR:-}" ]; then
        cache=$(realpath -m -- "$GPUAAS_CACHE_DIR")
    elif [[ ${XDG_CACHE_HOME:-} == /* ]]; then
        cache=$XDG_CACHE_HOME/gpuaas
    elif home=$(find_home); then
        cache=$home/.cache/gpuaas
        # The caches of other programs are in it, too.
        [ "$home" = "${HOME:-}" ] || { export HOME=$home && printf 'gpuaas: HOME is empty or cannot be written; it is %s in this run\n' "$home" >&2; }
    else
        cache=$root/.dev/cache
        printf 'gpuaas: .cache/gpuaas can be written in no home folder: the cache is %s, for this checkout alone. GPUAAS_CACHE_DIR names another one.\n' \
            "$cache" >&2
    fi
    export GPUAAS_CACHE_DIR=$cache
}
choose_cache

# What a compiled program depends on beside its version.
platform=$(
    # shellcheck disable=SC1091
    . /etc/os-release 2>/dev/null || true
    printf '%s %s %s' "${ID:-}" "${VERSION_CODENAME:-${VERSION_ID:-}}" "$(uname -m)"
)

# How long one attempt of a download may take, and the pauses between the attempts, in seconds.
try_seconds=${GPUAAS_TRY_SECONDS:-900}
try_pauses=${GPUAAS_TRY_PAUSES:-2 8}
export PIP_CACHE_DIR=${PIP_CACHE_DIR:-$cache/pip} PIP_RETRIES=${PIP_RETRIES:-2} PIP_DEFAULT_TIMEOUT=${PIP_DEFAULT_TIMEOUT:-30}
export npm_config_cache=${npm_config_cache:-$cache/npm} npm_config_fetch_timeout=${npm_config_fetch_timeout:-60000}
export npm_config_fetch_retry_mintimeout=${npm_config_fetch_retry_mintimeout:-1000}
export CARGO_NET_RETRY=${CARGO_NET_RETRY:-5} CARGO_HTTP_TIMEOUT=${CARGO_HTTP_TIMEOUT:-30}

# tries WHAT COMMAND...: runs a command until it succeeds, up to three times. It prints why an attempt failed.
tries() {
    local what=$1 number=0 pause output status
    shift
    for pause in $try_pauses ''; do
        number=$((number + 1)) status=0
        output=$("$@" 2>&1) || status=$?
        [ "$status" -ne 0 ] || return 0
        # Those of `timeout`.
        [[ $status != @(124|137) ]] || output+="${output:+$'\n'}no end within $try_seconds s"
        printf 'gpuaas: attempt %d: %s failed\n' "$number" "$what" >&2
        tail -n 4 <<<"${output:-exit status $status}" | cut -c 1-240 | sed 's/^/        /' >&2
        if [[ $output == *'No space left on device'* || $output == *ENOSPC* ]]; then
            disk_is_full=yes
            return 1
        fi
        [ -z "$pause" ] || sleep "$pause"
    done
    return 1
}
disk_is_full=

# bounded COMMAND...: ends a program that takes too long, and those that it has started. `tries` runs it, in a shell of its own.
bounded() {
    local run=(timeout --kill-after=10 "$try_seconds" "$@")
    # It has a process group of its own, which neither Ctrl-C reaches nor a signal to this run's: it gets one when this shell has ended.
    ! setpriv --pdeathsig TERM true 2>/dev/null || run=(setpriv --pdeathsig TERM "${run[@]}")
    "${run[@]}" &
    # In the background, since a shell that waits for a program in the foreground does not end by a signal.
    wait $!
}

# Sets `full_disks`: what is free on the file systems that have less than 100 MB, of those that are written here.
find_full_disks() {
    local folder size free found=()
    for folder in "$cache" "$root" "${TMPDIR:-/tmp}"; do
        while [ ! -e "$folder" ]; do
            folder=$(dirname "$folder")
        done
        # Of file systems that store files.
        read -r size free < <(df --output=size,avail -B 1M -- "$folder" 2>/dev/null | tail -n 1) || continue
        ! [[ $size =~ ^[1-9][0-9]*$ && $free =~ ^[0-9]+$ ]] || [ "$free" -ge 100 ] || found+=("$free MB are free for $folder")
    done
    full_disks=$(printf '%s\n' "${found[@]}" | sort -u | sed '/^$/d')
}
full_disks=

# unavailable TEXT: ends a run that the environment lacks something for: the network, the disk, a program. TEXT says what serves instead.
unavailable() {
    printf 'gpuaas: %s\n' "$*" >&2
    [ -n "$full_disks" ] || find_full_disks
    [ -z "$disk_is_full$full_disks" ] || printf 'gpuaas: the disk is full: %s\n' "${full_disks:-no space was left}" >&2
    exit 2
}

# cached NAME CONTENT INSTEAD MAKE...: sets `entry` to the folder of the cache for a tool of this content. Where it is not there, MAKE makes it: a
# function that fills the folder `entry`. Where that fails, the run ends, and says INSTEAD.
cached() {
    local name=$1 content=$2 instead=$3
    shift 3
    entry=$cache/$name/$(printf '%s\n' "$platform" "$content" | sha256sum | cut -c 1-16)
    if ! is_complete; then
        mkdir -p "$cache/$name" 2>/dev/null && : 2>/dev/null >>"$cache/$name/lock" ||
            unavailable "the cache cannot be written: $cache/$name. Name another folder with GPUAAS_CACHE_DIR"
        # The programs that MAKE runs have this lock, too: when a run is killed, none of them still writes while the next run makes the entry again.
        exec 8>>"$cache/$name/lock"
        flock --nonblock 8 || { say "waiting for another run, which makes $name" && flock --timeout 3600 8; } ||
            unavailable "another run has made $name for an hour: end it, and remove $cache/$name"
        # Or that other run has made it.
        if ! is_complete; then
            remove_unused "$cache/$name"
            mkdir "$entry" && "$@" && printf '%s\n' "$platform" "$content" >"$entry.complete" || {
                find_full_disks
                [ -z "$disk_is_full$full_disks" ] || instead="Free some space, or name a folder on another disk with GPUAAS_CACHE_DIR."
                rm -rf --one-file-system "$entry" "$entry.complete"
                unavailable "$name cannot be made. $instead"
            }
        fi
        exec 8>&-
    fi
    # The time of its last use. The cache may be another user's.
    touch -c "$entry.complete" 2>/dev/null || true
}
is_complete() { [ -e "$entry.complete" ] && [ -d "$entry" ]; }

# Removes the entries in FOLDER that were not used for 60 days, and those that are half-made. The caller has its lock.
remove_unused() {
    local folder
    find "$1" -maxdepth 1 -name '*.complete' -mtime +60 -delete
    for folder in "$1"/*/; do
        # A system tree may have mounts of the run that was killed.
        [ ! -d "$folder" ] || [ -e "${folder%/}.complete" ] || rm -rf --one-file-system "${folder%/}" ||
            unavailable "$folder is half-made and cannot be removed. Remove it, and start again"
    done
}

# link_tool FILE NAME: has .dev/tools/NAME link to a file or folder of the cache, in one step.
link_tool() {
    local link=$tools/$2
    [ "$(readlink "$link" || true)" != "$1" ] || return 0
    # A folder that an earlier release made.
    [ ! -d "$link" ] || [ -L "$link" ] || rm -rf --one-file-system "$link"
    mkdir -p "${link%/*}" && ln -sfn "$1" "$link.$BASHPID" && mv -fT "$link.$BASHPID" "$link" || unavailable "$link cannot be written"
}

# Whether .dev/tools/NAME was put there by hand: no link leads to it.
is_own_tool() { [ -e "$tools/$1" ] && [ "$(realpath -- "$tools/$1")" = "$(realpath -- "$tools")/$1" ]; }

# locked NAME COMMAND...: runs a function while no other run of this user has the lock NAME. Programs that it starts do not have the lock, since one may
# be a daemon.
locked() {
    local status=0
    if [ -n "$has_lock" ]; then
        "${@:2}"
        return
    fi
    mkdir -p "$cache" 2>/dev/null && : 2>/dev/null >>"$cache/$1.lock" ||
        unavailable "the cache cannot be written: $cache. Name another folder with GPUAAS_CACHE_DIR"
    exec 9>>"$cache/$1.lock"
    flock --nonblock 9 || { say "waiting for another run, which has the lock of $1" && flock 9; }
    has_lock=yes
    "${@:2}" 8>&- 9>&- || status=$?
    has_lock=
    exec 9>&-
    return "$status"
}
has_lock=
