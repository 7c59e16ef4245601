//! Files of a development environment: private ones, and the tools it starts.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rand::Rng as _;

/// Makes a folder, and those above it, that only this user can enter. One that exists stays as it is.
pub fn private_folder(path: &Path) -> anyhow::Result<()> {
    make_folder(path, 0o700)
}

/// The same for a folder that other users can traverse, without listing it.
pub fn traversable_folder(path: &Path) -> anyhow::Result<()> {
    make_folder(path, 0o711)
}

fn make_folder(path: &Path, mode: u32) -> anyhow::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .with_context(|| format!("cannot make the folder {}", path.display()))
}

/// Writes a file that only this user can read, whole or not at all: readers see the old content or the new.
pub fn write_private(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    write_atomically(path, content, 0o600)
}

/// The same for a file that all users may read.
pub fn write_public(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    write_atomically(path, content, 0o644)
}

/// Removes a folder with its content; a missing one is no error. Retried for some seconds: the programs of a run that was
/// killed may still be ending in it.
pub fn remove_folder(path: &Path) -> anyhow::Result<()> {
    let mut attempts = 0;
    loop {
        match std::fs::remove_dir_all(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.exists() => return Ok(()),
            Err(_) if attempts < 50 => attempts += 1,
            Err(error) => return Err(error).with_context(|| format!("cannot remove {}", path.display())),
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}

/// Removes a file; one that is not there is no error.
pub fn remove_file(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A program of this project: beside `program`, or in the parent folder (test programs are one level deeper).
pub fn find_sibling(program: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let folders = program.ancestors().skip(1).take(2);
    let mut candidates = folders.map(|folder| folder.join(name));
    candidates
        .find(|candidate| is_executable(candidate))
        .with_context(|| format!("there is no {name} beside {}; build it with: cargo build --bins", program.display()))
}

fn write_atomically(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let beside = path.with_extension(format!("{}.new", random_hex(4)));
    let write = || -> std::io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    };
    write()
        .inspect_err(|_| drop(std::fs::remove_file(&beside)))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// `bytes` random bytes from the operating system's generator, as hexadecimal text: a password that no quoting can break.
pub fn random_hex(bytes: usize) -> String {
    let mut random = vec![0_u8; bytes];
    rand::rng().fill_bytes(&mut random);
    hex::encode(random)
}

/// Finds an installed program: on `PATH`, in `$GPUAAS_TOOLS_DIR`, then in the nearest `.dev/tools` above this executable or the
/// working directory (where `deploy/up` puts what it installs).
pub fn find_programs(name: &str) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    if let Some(path) = std::env::var_os("PATH") {
        folders.extend(std::env::split_paths(&path));
    }
    folders.extend(std::env::var_os("GPUAAS_TOOLS_DIR").map(PathBuf::from));
    for start in [std::env::current_exe().ok(), std::env::current_dir().ok()].into_iter().flatten() {
        folders.extend(start.ancestors().map(|folder| folder.join(".dev/tools")));
    }
    folders.into_iter().map(|folder| folder.join(name)).filter(|program| is_executable(program)).collect()
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// The version in the output of `PROGRAM --version`, as numbers: `postgres (PostgreSQL) 15.18 (Debian …)` is `[15, 18]`.
pub fn version_of(program: &Path) -> Option<Vec<u32>> {
    let output = std::process::Command::new(program).arg("--version").output().ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

fn parse_version(text: &str) -> Option<Vec<u32>> {
    text.split_whitespace().find_map(|word| {
        let word = word.trim_start_matches('v');
        let numbers: String = word.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let parsed: Result<Vec<u32>, _> = numbers.trim_end_matches('.').split('.').map(str::parse).collect();
        parsed.ok()
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn versions_of_real_programs_are_read() {
        assert_eq!(parse_version("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"), Some(vec![15, 18]));
        assert_eq!(parse_version("postgres (PostgreSQL) 18beta1"), Some(vec![18]));
        assert_eq!(parse_version("nats-server: v2.15.1"), Some(vec![2, 15, 1]));
        assert_eq!(parse_version("no version here"), None);
    }

    #[test]
    fn private_file_is_readable_by_its_owner_only_and_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("env");
        write_private(&path, b"first").unwrap();
        write_private(&path, b"2").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"2");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
