"""Reads names of changed files, and prints the expression of cargo-nextest for the tests of their crates and of those that depend on them.

    git diff --name-only REV | changed_crates.py CHECKOUT
"""

import json
import subprocess
import sys
from pathlib import Path

# A change of these may concern every crate.
OF_ALL = {"Cargo.toml", "Cargo.lock", "rust-toolchain.toml", "clippy.toml", ".config/nextest.toml"}
# Folders that are compiled into a crate, or that its tests read, and are not in it.
READ_BY = {"migrations": "persistence"}
# The crate whose tests read all other files: pages, scripts, units.
CRATE_OF_THE_REST = "tests"


def main(checkout):
    command = ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"]
    metadata = json.loads(subprocess.run(command, cwd=checkout, check=True, capture_output=True).stdout)
    root = Path(metadata["workspace_root"])
    crates = {str(Path(it["manifest_path"]).parent.relative_to(root)): it["name"] for it in metadata["packages"]}
    changed = {line.strip() for line in sys.stdin if line.strip()}
    if changed & OF_ALL:
        return "all()"
    names = {crate_of(file, crates) for file in changed}
    return " | ".join(f"rdeps(={name})" for name in sorted(names)) or "none()"


def crate_of(file, crates):
    folders = [str(folder) for folder in Path(file).parents]
    return next((crates[folder] for folder in folders if folder in crates), READ_BY.get(file.split("/")[0], CRATE_OF_THE_REST))


if __name__ == "__main__":
    print(main(sys.argv[1]))
