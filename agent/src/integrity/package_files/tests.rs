use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use agent_package::manifest::{ARCHIVE_TYPE, Descriptor, FILE_LIST_TYPE, FileMode, ImageManifest};
use wire::package::Digest;

use super::*;

const FILES: [(&str, &str); 3] =
    [("bin/gpuaas-agent", "agent"), ("bin/gpuaas-finalizer", "finalizer"), ("units/a", "unit")];

/// An installation of a package with these files.
struct Installed {
    root: tempfile::TempDir,
    digest: Digest,
}

impl Installed {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let entry = |(path, content): &(&str, &str)| FileEntry {
            path: (*path).to_owned(),
            mode: FileMode::Program,
            size: content.len() as u64,
            sha256: Digest::of(content.as_bytes()),
        };
        let list = FileList {
            version: "1".into(),
            architecture: std::env::consts::ARCH.into(),
            files: FILES.iter().map(entry).collect(),
        };
        let list = serde_json::to_vec(&list).unwrap();
        let (files, archive) = (Descriptor::of(FILE_LIST_TYPE, &list), Descriptor::of(ARCHIVE_TYPE, b"archive"));
        let manifest = serde_json::to_vec(&ImageManifest::of_package("1", files, archive)).unwrap();
        let installed = Self { root, digest: Digest::of(&manifest) };
        for (path, content) in FILES {
            installed.write(path, content);
        }
        installed.write(".manifest.json", std::str::from_utf8(&manifest).unwrap());
        installed.write(".files.json", std::str::from_utf8(&list).unwrap());
        installed
    }

    fn path(&self, path: &str) -> PathBuf {
        version_folder(self.root.path(), self.digest).join(path)
    }

    fn write(&self, path: &str, content: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn watched(&self) -> PackageFiles {
        PackageFiles::of(Installation { root: self.root.path().to_owned(), digest: self.digest })
    }
}

fn altered(watched: &mut PackageFiles) -> Option<String> {
    watched.check(false).map(|condition| condition.detail)
}

#[test]
fn each_way_to_alter_a_file_is_found_without_hashing_what_did_not_change() {
    let ways: [fn(&Installed, &Path); 6] = [
        |installed, _| installed.write("bin/gpuaas-finalizer", "FINALIZER"),
        |installed, _| installed.write("bin/gpuaas-finalizer", "finalizer2"),
        |_, path| fs::remove_file(path).unwrap(),
        |_, path| fs::set_permissions(path, fs::Permissions::from_mode(0o4755)).unwrap(),
        |_, path| {
            fs::rename(path, path.with_extension("aside")).unwrap();
            symlink(path.with_extension("aside"), path).unwrap();
        },
        |installed, path| {
            // With the modification time of before.
            let modified = fs::metadata(path).unwrap().modified().unwrap();
            installed.write("bin/gpuaas-finalizer", "FINALIZER");
            fs::File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
        },
    ];
    for (n, alter) in ways.into_iter().enumerate() {
        let installed = Installed::new();
        let mut watched = installed.watched();
        assert_eq!(altered(&mut watched), None, "{n}");
        alter(&installed, &installed.path("bin/gpuaas-finalizer"));
        let found = altered(&mut watched).unwrap_or_else(|| panic!("{n}"));
        assert!(found.starts_with("1 of sha256-") && found.ends_with(": bin/gpuaas-finalizer"), "{n}: {found}");
        let path = installed.path("bin/gpuaas-finalizer");
        let _ = fs::remove_file(&path);
        installed.write("bin/gpuaas-finalizer", "finalizer");
        assert_eq!(altered(&mut watched), None, "{n}: it was installed again");
    }
}

#[test]
fn unchanged_files_are_hashed_only_at_times() {
    let installed = Installed::new();
    let mut watched = installed.watched();
    assert_eq!(altered(&mut watched), None);
    // As if it had been hashed with this content: only a hash shows that it is another.
    let path = installed.path("units/a");
    installed.write("units/a", "UNIT");
    watched.unaltered.insert("units/a".into(), FileStamp::of(&fs::symlink_metadata(&path).unwrap()));
    assert_eq!(altered(&mut watched), None);
    assert!(watched.check(true).is_some());
}

#[test]
fn altered_list_and_manifest_are_named() {
    for document in [".files.json", ".manifest.json"] {
        let installed = Installed::new();
        let text = fs::read_to_string(installed.path(document)).unwrap();
        installed.write(document, &text.replace('1', "2"));
        assert!(altered(&mut installed.watched()).unwrap().ends_with(document));
        fs::remove_file(installed.path(document)).unwrap();
        assert!(altered(&mut installed.watched()).unwrap().ends_with(document));
    }
}

#[test]
fn update_in_progress_is_no_difference() {
    let installed = Installed::new();
    fs::remove_file(installed.path("units/a")).unwrap();
    let mut watched = installed.watched();
    assert!(altered(&mut watched).is_some());
    fs::create_dir_all(installed.root.path().join("update")).unwrap();
    fs::write(installed.root.path().join("update/record.json"), "{}").unwrap();
    assert_eq!(altered(&mut watched), None);
}

#[test]
fn other_altered_files_are_another_occurrence() {
    let installed = Installed::new();
    let mut watched = installed.watched();
    let mut state = || watched.check(false).map(|condition| condition.state.unwrap());
    installed.write("units/a", "UNIT");
    let first = state();
    assert_eq!(state(), first);
    installed.write("bin/gpuaas-agent", "AGENT");
    let second = state();
    assert!(first.is_some() && second.is_some() && first != second);
    // As many files as before.
    installed.write("units/a", "unit");
    installed.write("bin/gpuaas-finalizer", "FINALIZER");
    assert_ne!(state(), second);
}
