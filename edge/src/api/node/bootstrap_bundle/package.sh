#!/bin/sh
# Installs the agent on this machine and sets it up as the node of the bundle above. Run it as root, as often as needed. It
# needs systemd, coreutils and gzip alone: it carries the program that pulls and verifies the package. It holds the node's enrollment
# token: keep it to yourself, and remove it afterwards.
set -eu
umask 077

fail() { printf 'gpuaas: %s\n' "$*" >&2; exit 1; }

# put FILE MODE TEXT: the whole text or nothing.
put() {
    mkdir -p -- "$(dirname -- "$1")"
    printf '%s' "$3" >"$1.new"
    chmod "$2" "$1.new"
    mv -f -- "$1.new" "$1"
}

# In a function, which a script that was cut does not end: then nothing is run.
main() {
    [ "$(id -u)" -eq 0 ] || fail "run this as root"
    for program in base64 gzip sha256sum systemctl uname; do
        command -v "$program" >/dev/null || fail "$program is missing: this needs systemd, coreutils and gzip"
    done
    [ "$(uname -m)" = "$machine" ] || fail "the package is for $machine, and this machine is $(uname -m)"

    found=sha256:$(printf '%s' "$ca_pem" | sha256sum | cut -d ' ' -f 1)
    [ "$found" = "$ca_fingerprint" ] || fail "the CA bundle is not the one that was issued: its fingerprint is $found"

    # Where the package will be, since /tmp may forbid programs.
    mkdir -p -- "$install_root"
    chmod 755 -- "$install_root"
    folder=$(mktemp -d -- "$install_root/.bootstrap.XXXXXXXX") || fail "nothing can be written in $install_root"
    trap 'rm -rf -- "$folder"' EXIT
    trap 'exit 1' HUP INT TERM
    { first_program | base64 -d | gzip -dc >"$folder/gpuaas-installer"; } ||
        fail "the first program cannot be unpacked in $install_root: make room, or fetch this script again"
    found=$(sha256sum <"$folder/gpuaas-installer" | cut -d ' ' -f 1)
    [ "$found" = "$first_program_sha256" ] || fail "the first program is not whole: fetch this script again"
    chmod 700 "$folder/gpuaas-installer"

    # Until the package is installed, nothing that an agent of before uses is touched.
    printf '%s' "$environment" >"$folder/agent.env"
    "$folder/gpuaas-installer" --env-file "$folder/agent.env" --first-install </dev/null ||
        fail "node $node_id was not set up: the package was not installed"

    put "$ca_path" 644 "$ca_pem"
    put "$env_file" 600 "$environment"
    # An identity of before would be taken for the one that the token is for.
    rm -f -- "$cert_path" "$key_path"

    systemctl daemon-reload
    systemctl enable --quiet -- "$unit"
    systemctl restart -- "$unit"
    printf 'gpuaas: node %s is set up; %s was restarted\n' "$node_id" "$unit"
}

main
