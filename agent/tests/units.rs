//! The units under `deploy/systemd`, as systemd's own tools read them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The units, with programs that are there on every machine.
fn units() -> (tempfile::TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy/systemd");
    let units = fs::read_dir(from).unwrap().map(|entry| {
        let entry = entry.unwrap();
        let text = fs::read_to_string(entry.path()).unwrap();
        let programs = ["/usr/local/bin/gpuaas-agent", "/usr/local/bin/gpuaas"];
        let text = programs.iter().fold(text, |text, program| text.replace(&format!("={program} "), "=/bin/true "));
        let path = folder.path().join(entry.file_name());
        fs::write(&path, text).unwrap();
        path
    });
    let units = units.collect();
    (folder, units)
}

fn analyze(args: &[&str], unit: &Path) -> (bool, String) {
    let ran = Command::new("systemd-analyze").args(args).arg(unit).output().expect("systemd-analyze is installed");
    let said = [ran.stdout, ran.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    (ran.status.success(), said)
}

#[test]
fn systemd_reads_every_unit_without_a_complaint() {
    let (_folder, units) = units();
    assert_eq!(units.len(), 2);
    for unit in units {
        let (ok, said) = analyze(&["verify"], &unit);
        assert!(ok && said.is_empty(), "{}: {said}", unit.display());
    }
}

#[test]
fn no_unit_is_more_exposed_than_its_work_demands() {
    let (_folder, units) = units();
    for unit in units {
        // In tenths: a control plane needs its sockets alone; an agent is root among tenants and may have no mounts of its own.
        let limit = if unit.ends_with("gpuaas.service") { "15" } else { "70" };
        let (ok, said) = analyze(&["security", "--offline=yes", &format!("--threshold={limit}")], &unit);
        assert!(ok, "{}", said.lines().last().unwrap_or_default());
    }
}
