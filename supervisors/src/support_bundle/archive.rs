//! The archive: a tar, compressed by gzip, that appears as a whole or not at all, and that its owner alone reads.

use super::items::Collected;
use anyhow::Context as _;
use chrono::{DateTime, Utc};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The bound on one file. Of a log the end is taken.
pub(super) const LONGEST_ITEM: usize = 8 * 1024 * 1024;

/// The files of a bundle, and what it is without.
pub(super) struct Bundle {
    at: DateTime<Utc>,
    is_anonymous: bool,
    max_bytes: u64,
    bytes: u64,
    files: Vec<(&'static str, Vec<u8>)>,
    contents: Vec<Value>,
    omissions: Vec<(&'static str, String)>,
}

impl Bundle {
    pub(super) fn new(at: DateTime<Utc>, is_anonymous: bool, max_bytes: u64) -> Self {
        let (files, contents, omissions) = (Vec::new(), Vec::new(), Vec::new());
        Self { at, is_anonymous, max_bytes, bytes: 0, files, contents, omissions }
    }

    /// Adds an item, or the reason why it is omitted.
    pub(super) fn add(&mut self, item: Collected) {
        let Collected { name, what, content, mut notes } = item;
        let mut content = match content {
            Ok(content) => content,
            Err(why) => return self.omissions.push((name, why)),
        };
        if content.len() > LONGEST_ITEM {
            notes.push(format!("cut: it had {} bytes", content.len()));
            content.truncate(LONGEST_ITEM);
        }
        let length = content.len() as u64;
        if self.bytes + length > self.max_bytes {
            let why = format!("its {length} bytes do not fit into the bundle's {}; raise --max-mib", self.max_bytes);
            return self.omissions.push((name, why));
        }
        self.bytes += length;
        self.contents.push(json!({ "file": name, "what": what, "bytes": length, "notes": notes }));
        self.files.push((name, content));
    }

    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    pub(super) fn omissions(&self) -> Vec<(&'static str, String)> {
        self.omissions.clone()
    }

    fn manifest(&self) -> Value {
        let omissions: Vec<_> =
            self.omissions.iter().map(|(file, reason)| json!({ "file": file, "reason": reason })).collect();
        json!({
            "format": 1,
            "program": "gpuaas",
            "version": env!("CARGO_PKG_VERSION"),
            "at": self.at,
            "anonymous": self.is_anonymous,
            "contents": self.contents,
            "omissions": omissions,
        })
    }

    /// Writes the archive, and returns its length.
    ///
    /// # Errors
    /// Where it cannot be written; nothing is left of it then.
    pub(super) fn write(&self, path: &Path) -> anyhow::Result<u64> {
        let unfinished = Unfinished::create(path)?;
        let written = self.write_into(&unfinished.file).and_then(|()| unfinished.file.sync_all());
        written.map_err(|error| {
            let why = match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                    "no space is left there; name a file on another disk with --output"
                }
                _ => "nothing is left of it",
            };
            anyhow::Error::from(error).context(format!("{} cannot be written: {why}", path.display()))
        })?;
        let bytes = unfinished.file.metadata()?.len();
        unfinished.publish(path)?;
        Ok(bytes)
    }

    /// Writes the archive to a stream, which may end at any byte of it, and returns its length.
    ///
    /// # Errors
    /// Where the stream takes no more.
    pub(super) fn write_to(&self, mut stream: impl Write) -> anyhow::Result<u64> {
        // Complete before its first byte is written: a reader does not see an archive that the end of this process has cut.
        let mut archive = Vec::new();
        self.write_into(&mut archive)?;
        let written = stream.write_all(&archive).and_then(|()| stream.flush());
        written.context("standard output does not take the archive")?;
        Ok(archive.len() as u64)
    }

    fn write_into(&self, file: impl Write) -> io::Result<()> {
        let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
        let folder = format!("gpuaas-support-{}", self.at.format("%Y%m%dT%H%M%SZ"));
        let mut append = |name: &str, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o600);
            header.set_size(content.len() as u64);
            header.set_mtime(u64::try_from(self.at.timestamp()).unwrap_or_default());
            archive.append_data(&mut header, format!("{folder}/{name}"), content)
        };
        append("manifest.json", format!("{:#}\n", self.manifest()).as_bytes())?;
        for (name, content) in &self.files {
            append(name, content)?;
        }
        archive.into_inner()?.finish()?.flush()
    }
}

/// A file that is removed unless it is published.
struct Unfinished {
    file: File,
    path: PathBuf,
}

impl Unfinished {
    fn create(path: &Path) -> anyhow::Result<Self> {
        let name = path.file_name().context("--output names no file")?.to_string_lossy();
        let unfinished = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
        let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished);
        let file = opened.with_context(|| {
            format!("{} cannot be made; name a folder that this user may write to with --output", unfinished.display())
        })?;
        Ok(Self { file, path: unfinished })
    }

    /// Gives it its name, unless another file has it.
    fn publish(self, path: &Path) -> anyhow::Result<()> {
        let linked = std::fs::hard_link(&self.path, path).or_else(|error| match error.kind() {
            // A file system without hard links, as those of USB sticks.
            io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported if !path.exists() => {
                std::fs::rename(&self.path, path)
            }
            _ => Err(error),
        });
        linked.with_context(|| format!("{} cannot be made, or exists; name another file with --output", path.display()))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // A file that stays is empty or incomplete, and hidden.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn at() -> DateTime<Utc> {
        DateTime::from_timestamp(1_800_000_000, 0).unwrap()
    }

    fn item(name: &'static str, content: Result<Vec<u8>, String>) -> Collected {
        Collected::new(name, "a test", content)
    }

    fn read(path: &Path) -> Vec<(String, Vec<u8>)> {
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(File::open(path).unwrap()));
        let read = |entry: io::Result<tar::Entry<'_, _>>| {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            io::copy(&mut entry, &mut content).unwrap();
            (entry.path().unwrap().display().to_string(), content)
        };
        archive.entries().unwrap().map(read).collect()
    }

    #[test]
    fn archive_is_its_owners_and_has_a_manifest_of_contents_and_omissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bundle.tar.gz");
        let mut bundle = Bundle::new(at(), false, 100);
        bundle.add(item("one.json", Ok(b"{}".to_vec())));
        bundle.add(item("two.json", Err("it is down".to_owned())));
        bundle.add(item("large.json", Ok(vec![b'x'; 99])));
        let bytes = bundle.write(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), bytes);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let entries = read(&path);
        let names: Vec<_> = entries.iter().map(|(name, _)| name.rsplit('/').next().unwrap()).collect();
        assert_eq!(names, ["manifest.json", "one.json"]);
        let manifest: Value = serde_json::from_slice(&entries[0].1).unwrap();
        assert_eq!(manifest["contents"][0]["file"], "one.json");
        assert_eq!(manifest["omissions"][0], json!({ "file": "two.json", "reason": "it is down" }));
        assert!(manifest["omissions"][1]["reason"].as_str().unwrap().contains("--max-mib"), "{manifest}");
        let again = bundle.write(&path).unwrap_err().to_string();
        assert!(again.contains("exists"), "{again}");
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(left, ["bundle.tar.gz"], "nothing else is left");
    }

    #[test]
    fn item_over_the_bound_is_cut_and_noted() {
        let mut bundle = Bundle::new(at(), false, u64::MAX);
        bundle.add(item("log.jsonl", Ok(vec![b'x'; LONGEST_ITEM + 1])));
        assert_eq!(bundle.files[0].1.len(), LONGEST_ITEM);
        assert!(bundle.contents[0]["notes"][0].as_str().unwrap().starts_with("cut"));
    }
}
