//! Signed packages whose archive or list of files would write outside of the package's folder.

use super::{Fixture, units};
use agent_package::archive;
use agent_package::manifest::{ARCHIVE_TYPE, Descriptor, FILE_LIST_TYPE, FileEntry, FileList, FileMode, ImageManifest};
use tests::package_registry::{PackageLayout, release_key};
use wire::package::Digest;

/// A signed package whose archive has one more entry, or whose list has another path.
fn hostile(entry_type: tar::EntryType, path: &str, target: Option<&str>, is_listed: bool) -> PackageLayout {
    let mut layout = PackageLayout::small("6.6.6", &units(), None);
    let (_, list, archive) = ImageManifest::parse_package(&layout.blob(layout.digest)).unwrap();
    let mut list = FileList::parse(&layout.blob(list.digest)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    archive::unpack(layout.blob(archive.digest).as_slice(), &list, folder.path()).unwrap();
    let content = b"hostile".as_slice();
    if is_listed {
        list.files.push(FileEntry {
            path: path.to_owned(),
            mode: FileMode::Data,
            size: content.len() as u64,
            sha256: Digest::of(content),
        });
    }
    let mut builder = tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
    for file in list.files.iter().filter(|file| folder.path().join(&file.path).is_file()) {
        let bytes = std::fs::read(folder.path().join(&file.path)).unwrap();
        let mut header = tar::Header::new_ustar();
        header.set_path(&file.path).unwrap();
        header.set_mode(file.mode.bits());
        header.set_size(bytes.len() as u64);
        header.set_cksum();
        builder.append(&header, bytes.as_slice()).unwrap();
    }
    let mut header = tar::Header::new_ustar();
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.set_entry_type(entry_type);
    if let Some(target) = target {
        header.set_link_name(target).unwrap();
    }
    header.set_mode(0o644);
    header.set_size(if entry_type.is_file() { content.len() as u64 } else { 0 });
    header.set_cksum();
    builder.append(&header, if entry_type.is_file() { content } else { b"" }).unwrap();
    let archive = builder.into_inner().unwrap().finish().unwrap();
    let list = serde_json::to_vec(&list).unwrap();
    let manifest = ImageManifest::of_package(
        "6.6.6",
        Descriptor::of(FILE_LIST_TYPE, &list),
        Descriptor::of(ARCHIVE_TYPE, &archive),
    );
    layout.replace(&serde_json::to_vec(&manifest).unwrap(), &[&list, &archive], &release_key());
    layout
}

#[tokio::test(flavor = "multi_thread")]
async fn archive_that_would_write_elsewhere_is_refused_even_if_it_is_signed() {
    use tar::EntryType;
    let it = Fixture::start().await;
    let old = it.publish("1.0.0").await;
    it.installed(old.digest).await;
    let outside = it.machine.path().join("outside");
    let absolute = outside.display().to_string();
    for (entry_type, path, target, is_listed, code) in [
        (EntryType::Regular, "../../../outside", None, false, "archive_refused"),
        (EntryType::Regular, "../../../outside", None, true, "manifest_refused"),
        (EntryType::Regular, absolute.as_str(), None, false, "archive_refused"),
        (EntryType::Regular, absolute.as_str(), None, true, "manifest_refused"),
        (EntryType::Symlink, "bin/link", Some("../../../../outside"), false, "archive_refused"),
        (EntryType::Symlink, "bin/link", Some("gpuaas-agent"), true, "archive_refused"),
        (EntryType::Link, "bin/link", Some("/etc/hostname"), true, "archive_refused"),
        (EntryType::Block, "bin/device", None, true, "archive_refused"),
        (EntryType::Char, "bin/device", None, true, "archive_refused"),
        (EntryType::Regular, "bin/gpuaas-agent", None, false, "archive_refused"),
        (EntryType::Regular, "bin/gpuaas-agent", None, true, "manifest_refused"),
        (EntryType::Regular, "bin/unlisted", None, false, "archive_refused"),
    ] {
        let layout = hostile(entry_type, path, target, is_listed);
        it.registry.push(layout.folder.path()).await;
        it.refuses(it.command(&it.bundle(layout.digest, it.registry.port)), code).await;
        assert!(!outside.exists(), "{path}");
    }
}
