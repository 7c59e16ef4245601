#![allow(clippy::unwrap_used)]

use super::*;

/// A package of two files, as its list and its archive.
fn package() -> (FileList, Files) {
    let files = BTreeMap::from([
        ("bin/agent".to_owned(), (FileMode::Program, b"#!/bin/sh\n".to_vec())),
        ("units/agent.service".to_owned(), (FileMode::Data, b"[Unit]\n".to_vec())),
    ]);
    (list_of(&files), files)
}

fn list_of(files: &Files) -> FileList {
    let entry = |(path, (mode, content)): (&String, &(FileMode, Vec<u8>))| FileEntry {
        path: path.clone(),
        mode: *mode,
        size: content.len() as u64,
        sha256: Digest::of(content),
    };
    FileList { version: "1".into(), architecture: "x86_64".into(), files: files.iter().map(entry).collect() }
}

fn archive_of(files: &Files) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(files, &mut bytes).unwrap();
    bytes
}

/// The good files, and then an entry of this type and name, which a writer that checks nothing has added.
fn archive_with(entry_type: EntryType, path: &[u8], target: Option<&str>, content: &[u8]) -> Vec<u8> {
    let mut archive = Builder::new(flate2::write::GzEncoder::new(Vec::new(), Compression::fast()));
    for (path, (mode, content)) in package().1 {
        let mut header = Header::new_ustar();
        header.set_path(path).unwrap();
        header.set_mode(mode.bits());
        header.set_size(content.len() as u64);
        header.set_cksum();
        archive.append(&header, content.as_slice()).unwrap();
    }
    let mut header = Header::new_ustar();
    header.as_mut_bytes()[..path.len()].copy_from_slice(path);
    header.set_entry_type(entry_type);
    if let Some(target) = target {
        header.set_link_name(target).unwrap();
    }
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    header.set_cksum();
    archive.append(&header, content).unwrap();
    archive.into_inner().unwrap().finish().unwrap()
}

#[test]
fn same_files_give_the_same_archive_and_come_back_unaltered() {
    let (list, files) = package();
    let archive = archive_of(&files);
    assert_eq!(archive, archive_of(&files));
    let folder = tempfile::tempdir().unwrap();
    unpack(archive.as_slice(), &list, folder.path()).unwrap();
    verify(&list, folder.path()).unwrap();
    let mode = fs::metadata(folder.path().join("bin/agent")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o755);
}

#[test]
fn entries_that_are_no_listed_regular_file_are_refused() {
    let list = package().0;
    let unpacked = |archive: Vec<u8>| {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("version");
        fs::create_dir(&folder).unwrap();
        let refused = unpack(archive.as_slice(), &list, &folder).unwrap_err();
        assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 1, "nothing beside the folder: {refused}");
        refused
    };
    for path in ["../outside", "/tmp/outside", "bin/../../outside", "bin/more", "units"] {
        let refused = unpacked(archive_with(EntryType::Regular, path.as_bytes(), None, b"x"));
        assert!(matches!(&refused, ArchiveError::Unlisted(found) if found == path), "{path}: {refused}");
    }
    for (entry_type, target, named) in [
        (EntryType::Symlink, Some("../../etc"), "symbolic link"),
        (EntryType::Symlink, Some("bin/agent"), "symbolic link"),
        (EntryType::Link, Some("/etc/passwd"), "hard link"),
        (EntryType::Char, None, "device"),
        (EntryType::Block, None, "device"),
        (EntryType::Fifo, None, "named pipe"),
        (EntryType::Directory, None, "folder"),
        (EntryType::GNULongName, None, "another type"),
        (EntryType::XHeader, None, "another type"),
        (EntryType::GNUSparse, None, "another type"),
    ] {
        let refused = unpacked(archive_with(entry_type, b"bin/agent", target, b""));
        assert!(matches!(refused, ArchiveError::NotAFile { .. }) && refused.to_string().contains(named), "{refused}");
    }
    let refused = unpacked(archive_with(EntryType::Regular, b"bin/agent", None, b"#!/bin/sh\n"));
    assert!(matches!(refused, ArchiveError::Twice(_)), "{refused}");
}

#[test]
fn archive_that_differs_from_its_list_is_refused() {
    let (list, files) = package();
    let with = |change: &dyn Fn(&mut Files)| {
        let mut files = files.clone();
        change(&mut files);
        let folder = tempfile::tempdir().unwrap();
        unpack(archive_of(&files).as_slice(), &list, folder.path()).unwrap_err()
    };
    let path = || "bin/agent".to_owned();
    let content = with(&|files| files.insert(path(), (FileMode::Program, b"#!/bin/no\n".to_vec())).map(drop).unwrap());
    assert!(matches!(content, ArchiveError::Differs { difference: "its content", .. }), "{content}");
    let longer = with(&|files| files.insert(path(), (FileMode::Program, vec![0; 11])).map(drop).unwrap());
    let mode = with(&|files| files.insert(path(), (FileMode::Data, b"#!/bin/sh\n".to_vec())).map(drop).unwrap());
    for refused in [longer, mode] {
        assert!(matches!(refused, ArchiveError::Differs { difference: "its size or its mode", .. }), "{refused}");
    }
    let fewer = with(&|files| files.remove(&path()).map(drop).unwrap());
    assert!(matches!(fewer, ArchiveError::Missing(_)), "{fewer}");
    let archive = archive_of(&files);
    let folder = tempfile::tempdir().unwrap();
    let cut = unpack(&archive[..archive.len() / 2], &list, folder.path()).unwrap_err();
    assert!(matches!(cut, ArchiveError::Read(_) | ArchiveError::Missing(_)), "{cut}");
}

#[test]
fn altered_installation_is_found() {
    let (list, files) = package();
    let folder = tempfile::tempdir().unwrap();
    unpack(archive_of(&files).as_slice(), &list, folder.path()).unwrap();
    let path = folder.path().join("bin/agent");
    let restore = || {
        let _ = fs::remove_file(&path);
        fs::write(&path, b"#!/bin/sh\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    let alterations: [&dyn Fn(); 4] = [
        &|| fs::write(&path, b"#!/bin/no\n").unwrap(),
        &|| fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap(),
        &|| fs::remove_file(&path).unwrap(),
        &|| {
            fs::rename(&path, folder.path().join("elsewhere")).unwrap();
            std::os::unix::fs::symlink("../elsewhere", &path).unwrap();
        },
    ];
    for alter in alterations {
        restore();
        verify(&list, folder.path()).unwrap();
        alter();
        assert_eq!(verify(&list, folder.path()), Err("bin/agent".to_owned()));
    }
}
