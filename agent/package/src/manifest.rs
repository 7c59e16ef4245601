//! The documents of the artifact. The image manifest is named by its digest, and names the list of files and the archive by theirs, so
//! that one verified digest covers everything.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use wire::package::Digest;

pub const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// Of the artifact.
pub const ARTIFACT_TYPE: &str = "application/vnd.gpuaas.agent-package.v1";
/// Of the list of files.
pub const FILE_LIST_TYPE: &str = "application/vnd.gpuaas.agent-package.files.v1+json";
/// Of the archive: the type of ordinary layers, which every registry stores.
pub const ARCHIVE_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// The largest list of files, archive and package, and the number of its files.
pub const FILE_LIST_BYTES: u64 = 1024 * 1024;
pub const ARCHIVE_BYTES: u64 = 512 * 1024 * 1024;
pub const PACKAGE_BYTES: u64 = 2 * 1024 * 1024 * 1024;
pub const FILES: usize = 1000;
/// Longer paths need extensions of the archive's format, which are refused.
const PATH_BYTES: usize = 100;

/// An OCI image manifest, as far as it matters here.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageManifest {
    pub schema_version: u8,
    pub media_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// A blob's name, and what must be found under it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// Of these bytes.
    #[must_use]
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }

    #[must_use]
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self { media_type: media_type.to_owned(), digest, size, annotations: BTreeMap::new() }
    }
}

/// The files of a package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileList {
    /// Of the agent.
    pub version: String,
    /// Of the machines on which the programs run, as `uname -m` prints it.
    pub architecture: String,
    /// In the order of the archive.
    pub files: Vec<FileEntry>,
}

/// One file of a package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Relative to the package's folder.
    pub path: String,
    pub mode: FileMode,
    pub size: u64,
    pub sha256: Digest,
}

/// The modes that a packaged file may have. Owner and group are root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileMode {
    #[serde(rename = "0755")]
    Program,
    #[serde(rename = "0644")]
    Data,
}

impl FileMode {
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Program => 0o755,
            Self::Data => 0o644,
        }
    }
}

/// Why a document of the artifact is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("it is not JSON of the expected form")]
    Json(#[source] serde_json::Error),
    #[error("it is not a package of the agent: {0}")]
    Kind(&'static str),
    #[error("it declares {declared} bytes for {what}, more than the {most} that are accepted")]
    TooLarge { what: &'static str, declared: u64, most: u64 },
    #[error("it lists {0} files, more than the {FILES} that are accepted")]
    TooManyFiles(usize),
    #[error("it lists a path that is not accepted: {0:?}")]
    Path(String),
    #[error("it lists {0:?} twice")]
    Twice(String),
}

impl ImageManifest {
    /// The manifest of a package: its file list and its archive.
    #[must_use]
    pub fn of_package(version: &str, files: Descriptor, archive: Descriptor) -> Self {
        let version = ("org.opencontainers.image.version".to_owned(), version.to_owned());
        Self {
            schema_version: 2,
            media_type: MANIFEST_TYPE.to_owned(),
            artifact_type: Some(ARTIFACT_TYPE.to_owned()),
            config: files,
            layers: vec![archive],
            annotations: BTreeMap::from([version]),
        }
    }

    /// Reads a package's manifest, and checks what it declares.
    ///
    /// # Errors
    /// [`ManifestError`]; nothing that it names should be pulled then.
    pub fn parse_package(bytes: &[u8]) -> Result<(Self, Descriptor, Descriptor), ManifestError> {
        let manifest: Self = strict_json::from_slice(bytes).map_err(ManifestError::Json)?;
        if manifest.schema_version != 2 || manifest.config.media_type != FILE_LIST_TYPE {
            return Err(ManifestError::Kind("it has no list of files"));
        }
        let [archive] = manifest.layers.as_slice() else { return Err(ManifestError::Kind("it has not one archive")) };
        if archive.media_type != ARCHIVE_TYPE {
            return Err(ManifestError::Kind("its archive has another type"));
        }
        within("the list of files", manifest.config.size, FILE_LIST_BYTES)?;
        within("the archive", archive.size, ARCHIVE_BYTES)?;
        let (files, archive) = (manifest.config.clone(), archive.clone());
        Ok((manifest, files, archive))
    }
}

impl FileList {
    /// Reads the list and checks every entry.
    ///
    /// # Errors
    /// [`ManifestError`] for a path that could lead out of the package's folder, and for more than the bounds.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let list: Self = strict_json::from_slice(bytes).map_err(ManifestError::Json)?;
        if list.files.len() > FILES {
            return Err(ManifestError::TooManyFiles(list.files.len()));
        }
        let total = list.files.iter().fold(0_u64, |total, file| total.saturating_add(file.size));
        within("all files", total, PACKAGE_BYTES)?;
        let mut seen = BTreeSet::new();
        for FileEntry { path, .. } in &list.files {
            if !is_plain(path) {
                return Err(ManifestError::Path(path.chars().take(PATH_BYTES).collect()));
            }
            // A file is no folder of another one.
            let folders = path.match_indices('/').map(|(at, _)| &path[..at]);
            if !seen.insert(path.as_str()) || folders.into_iter().any(|folder| seen.contains(folder)) {
                return Err(ManifestError::Twice(path.clone()));
            }
        }
        let is_folder_of_one = |path: &&str| seen.iter().any(|other| other.starts_with(&format!("{path}/")));
        if let Some(path) = seen.iter().copied().find(|path| is_folder_of_one(path)) {
            return Err(ManifestError::Twice(path.to_owned()));
        }
        Ok(list)
    }
}

fn within(what: &'static str, declared: u64, most: u64) -> Result<(), ManifestError> {
    if declared > most { Err(ManifestError::TooLarge { what, declared, most }) } else { Ok(()) }
}

/// Whether a path is relative and made of ordinary names alone: letters, digits, `.`, `_`, `-` and `@`, and none begins with a dot.
fn is_plain(path: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte);
    let is_name = |name: &str| !name.is_empty() && !name.starts_with('.') && name.bytes().all(allowed);
    path.len() <= PATH_BYTES && path.split('/').all(is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(paths: &[&str]) -> Vec<u8> {
        let entry =
            |path: &&str| FileEntry { path: (*path).into(), mode: FileMode::Data, size: 1, sha256: Digest::of(b"x") };
        let files = paths.iter().map(entry).collect();
        serde_json::to_vec(&FileList { version: "1".into(), architecture: "x86_64".into(), files }).unwrap()
    }

    #[test]
    fn paths_that_could_leave_the_folder_are_refused() {
        assert_eq!(FileList::parse(&list(&["bin/a", "bin/b", "units/x@.service"])).unwrap().files.len(), 3);
        for path in ["../a", "bin/../../a", "/etc/passwd", "bin//a", "", ".", "bin/.hidden", "a\0b", "a b", "a\\b"] {
            assert!(matches!(FileList::parse(&list(&[path])), Err(ManifestError::Path(_))), "{path:?}");
        }
        let long = "a".repeat(PATH_BYTES + 1);
        assert!(matches!(FileList::parse(&list(&[&long])), Err(ManifestError::Path(_))));
    }

    #[test]
    fn duplicates_and_too_much_are_refused() {
        for twice in [["bin/a", "bin/a"], ["bin", "bin/a"], ["bin/a", "bin"]] {
            assert!(matches!(FileList::parse(&list(&twice)), Err(ManifestError::Twice(_))), "{twice:?}");
        }
        let names: Vec<String> = (0..=FILES).map(|number| format!("f{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert!(matches!(FileList::parse(&list(&names)), Err(ManifestError::TooManyFiles(_))));
        let large = String::from_utf8(list(&["a"])).unwrap().replace("\"size\":1", &format!("\"size\":{}", u64::MAX));
        assert!(matches!(FileList::parse(large.as_bytes()), Err(ManifestError::TooLarge { .. })));
        let mode = String::from_utf8(list(&["a"])).unwrap().replace("0644", "4755");
        assert!(matches!(FileList::parse(mode.as_bytes()), Err(ManifestError::Json(_))), "setuid");
    }

    #[test]
    fn manifest_of_another_kind_or_of_too_much_is_refused() {
        let files = Descriptor::of(FILE_LIST_TYPE, b"{}");
        let archive = Descriptor::of(ARCHIVE_TYPE, b"");
        let parse = |manifest: &ImageManifest| ImageManifest::parse_package(&serde_json::to_vec(manifest).unwrap());
        let good = ImageManifest::of_package("1", files, archive.clone());
        assert!(parse(&good).is_ok());
        let none = ImageManifest { layers: vec![], ..good.clone() };
        let two = ImageManifest { layers: vec![archive.clone(), archive.clone()], ..good.clone() };
        let image =
            ImageManifest { config: Descriptor::of("application/vnd.oci.image.config.v1+json", b"{}"), ..good.clone() };
        for other in [none, two, image] {
            assert!(matches!(parse(&other), Err(ManifestError::Kind(_))));
        }
        let large = ImageManifest { layers: vec![Descriptor { size: ARCHIVE_BYTES + 1, ..archive }], ..good };
        assert!(matches!(parse(&large), Err(ManifestError::TooLarge { .. })));
    }
}
