#!/bin/sh
# Sets this machine up as the node of the bundle above. Run it as root, as often as needed. It holds the node's enrollment
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

[ "$(id -u)" -eq 0 ] || fail "run this as root"
command -v sha256sum >/dev/null || fail "sha256sum is missing: install coreutils"

found=sha256:$(printf '%s' "$ca_pem" | sha256sum | cut -d ' ' -f 1)
[ "$found" = "$ca_fingerprint" ] || fail "the CA bundle is not the one that was issued: its fingerprint is $found"

put "$ca_path" 644 "$ca_pem"
put "$env_file" 600 "$environment"
# An identity of before would be taken for the one that the token is for.
rm -f -- "$cert_path" "$key_path"

if command -v systemctl >/dev/null && systemctl cat -- "$unit" >/dev/null 2>&1; then
    systemctl enable --quiet -- "$unit"
    systemctl restart -- "$unit"
    printf 'gpuaas: node %s is set up; %s was restarted\n' "$node_id" "$unit"
else
    printf 'gpuaas: node %s is set up; start the agent: gpuaas-agent --env-file %s --executor system\n' "$node_id" "$env_file"
fi
