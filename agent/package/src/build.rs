//! Makes the package: an OCI image layout in a folder, with the package under the tag of its version and its signature under the
//! signature's tag. The same files, version and key give the same bytes.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ed25519_dalek::SigningKey;
use serde::{Deserialize, Serialize};
use wire::package::Digest;

use crate::archive::{self, Files};
use crate::contents::{PROGRAM_FOLDER, PROGRAMS, UNIT_FOLDER, UNITS};
use crate::manifest::{
    ARCHIVE_TYPE, Descriptor, FILE_LIST_TYPE, FileEntry, FileList, FileMode, INDEX_TYPE, ImageManifest, MANIFEST_TYPE,
};
use crate::signature::sign;

/// Of the tag in an OCI image layout.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
const LAYOUT_VERSION: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;

/// What a package is made of.
#[derive(Debug)]
pub struct Inputs<'a> {
    pub version: &'a str,
    /// As `uname -m` prints it.
    pub architecture: &'a str,
    /// The programs of [`PROGRAMS`], in any order and place.
    pub programs: Vec<PathBuf>,
    /// The folder with the units of [`UNITS`].
    pub units: PathBuf,
}

/// Why a package could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error("{0} is not among the programs that were named; name it with --program")]
    NoProgram(&'static str),
    #[error("{} is no version: letters, digits, `.`, `_` and `-`", .0)]
    Version(String),
    #[error("could not read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("could not write the layout in {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("a document of the package cannot be written")]
    Json(#[from] serde_json::Error),
}

/// The index of an OCI image layout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    schema_version: u8,
    media_type: String,
    pub manifests: Vec<Descriptor>,
}

impl Index {
    /// The images of the layout, by their tags.
    pub fn tags(&self) -> impl Iterator<Item = (&str, &Descriptor)> {
        self.manifests.iter().filter_map(|image| Some((image.annotations.get(REF_NAME)?.as_str(), image)))
    }
}

/// Writes the layout into `out`, and returns the digest by which the package is pulled.
///
/// # Errors
/// [`BuildError`].
pub fn build(inputs: &Inputs<'_>, key: Option<&SigningKey>, out: &Path) -> Result<Digest, BuildError> {
    let is_tag = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if !inputs.version.bytes().all(is_tag) || !inputs.version.starts_with(|first: char| first.is_ascii_alphanumeric()) {
        return Err(BuildError::Version(inputs.version.to_owned()));
    }
    let mut archive = Vec::new();
    let files = gather(inputs)?;
    archive::write(&files, &mut archive).map_err(|source| BuildError::Write { path: out.to_owned(), source })?;
    let list = FileList {
        version: inputs.version.to_owned(),
        architecture: inputs.architecture.to_owned(),
        files: files.iter().map(entry).collect(),
    };
    let list = serde_json::to_vec_pretty(&list)?;
    let layout = Layout::create(out)?;
    layout.blob(&archive)?;
    layout.blob(&list)?;
    let list = Descriptor::of(FILE_LIST_TYPE, &list);
    let archive = Descriptor::of(ARCHIVE_TYPE, &archive);
    let manifest = serde_json::to_vec(&ImageManifest::of_package(inputs.version, list, archive))?;
    let digest = Digest::of(&manifest);
    let mut images = vec![layout.image(&manifest, inputs.version)?];
    if let Some(key) = key {
        let signature = sign(key, digest)?;
        layout.blob(&signature.config)?;
        layout.blob(&signature.payload)?;
        images.push(layout.image(&signature.manifest, &digest.signature_tag())?);
    }
    layout.finish(images)?;
    Ok(digest)
}

fn entry((path, (mode, content)): (&String, &(FileMode, Vec<u8>))) -> FileEntry {
    FileEntry { path: path.clone(), mode: *mode, size: content.len() as u64, sha256: Digest::of(content) }
}

/// The files of the package by their paths in it.
fn gather(inputs: &Inputs<'_>) -> Result<Files, BuildError> {
    let read = |path: &Path| fs::read(path).map_err(|source| BuildError::Read { path: path.to_owned(), source });
    let mut files = BTreeMap::new();
    for name in PROGRAMS {
        let has_name = |path: &&PathBuf| path.file_name().is_some_and(|found| found == *name);
        let program = inputs.programs.iter().find(has_name).ok_or(BuildError::NoProgram(name))?;
        files.insert(format!("{PROGRAM_FOLDER}/{name}"), (FileMode::Program, read(program)?));
    }
    for unit in UNITS {
        let text = read(&inputs.units.join(unit.name))?;
        files.insert(format!("{UNIT_FOLDER}/{}", unit.name), (FileMode::Data, text));
    }
    Ok(files)
}

/// An OCI image layout that is being written.
struct Layout<'a> {
    folder: &'a Path,
}

impl<'a> Layout<'a> {
    fn create(folder: &'a Path) -> Result<Self, BuildError> {
        let it = Self { folder };
        fs::create_dir_all(folder.join("blobs/sha256")).map_err(|source| it.failed(source))?;
        it.write("oci-layout", LAYOUT_VERSION.as_bytes())?;
        Ok(it)
    }

    fn failed(&self, source: io::Error) -> BuildError {
        BuildError::Write { path: self.folder.to_owned(), source }
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), BuildError> {
        fs::write(self.folder.join(name), bytes).map_err(|source| self.failed(source))
    }

    fn blob(&self, bytes: &[u8]) -> Result<(), BuildError> {
        self.write(&format!("blobs/sha256/{}", Digest::of(bytes).hex()), bytes)
    }

    /// Stores a manifest under a tag.
    fn image(&self, manifest: &[u8], tag: &str) -> Result<Descriptor, BuildError> {
        self.blob(manifest)?;
        let mut image = Descriptor::of(MANIFEST_TYPE, manifest);
        image.annotations.insert(REF_NAME.to_owned(), tag.to_owned());
        Ok(image)
    }

    fn finish(&self, manifests: Vec<Descriptor>) -> Result<(), BuildError> {
        let index = Index { schema_version: 2, media_type: INDEX_TYPE.to_owned(), manifests };
        self.write("index.json", &serde_json::to_vec(&index)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// Every file of a folder by its path, with its content.
    fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
            if path.is_dir() {
                found.extend(files(&path).into_iter().map(|(inner, content)| (format!("{name}/{inner}"), content)));
            } else {
                found.insert(name, fs::read(&path).unwrap());
            }
        }
        found
    }

    /// The inputs in a new folder, with this mode on disk and written in this order.
    fn layout(
        agent: &[u8],
        mode: u32,
        reversed: bool,
        key: Option<&SigningKey>,
    ) -> (Digest, BTreeMap<String, Vec<u8>>) {
        let folder = tempfile::tempdir().unwrap();
        let mut programs: Vec<PathBuf> = PROGRAMS.iter().map(|name| folder.path().join(name)).collect();
        for path in &programs {
            let content = if path.ends_with("gpuaas-agent") { agent } else { b"installer".as_slice() };
            fs::write(path, content).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        if reversed {
            programs.reverse();
        }
        for unit in UNITS {
            fs::write(folder.path().join(unit.name), format!("[Unit]\nDescription={}\n", unit.name)).unwrap();
        }
        let inputs = Inputs { version: "1.0.0", architecture: "x86_64", programs, units: folder.path().to_owned() };
        let out = tempfile::tempdir().unwrap();
        let digest = build(&inputs, key, out.path()).unwrap();
        (digest, files(out.path()))
    }

    #[test]
    fn same_inputs_give_the_same_layout_and_digest() {
        let key = SigningKey::from_bytes(&[7; 32]);
        let first = layout(b"agent", 0o755, false, Some(&key));
        std::thread::sleep(std::time::Duration::from_millis(1100));
        let second = layout(b"agent", 0o600, true, Some(&key));
        assert_eq!(first, second);
        assert_ne!(first.0, layout(b"other", 0o755, false, Some(&key)).0);
        assert_eq!(first.0, layout(b"agent", 0o755, false, None).0, "the signature does not change the digest");
    }

    #[test]
    fn every_blob_has_its_digest_for_a_name_and_both_images_their_tags() {
        let key = SigningKey::from_bytes(&[7; 32]);
        let (digest, files) = layout(b"agent", 0o755, false, Some(&key));
        for (name, content) in &files {
            if let Some(hex) = name.strip_prefix("blobs/sha256/") {
                assert_eq!(Digest::of(content).hex(), hex);
            }
        }
        let index: Index = serde_json::from_slice(&files["index.json"]).unwrap();
        let tags: Vec<_> = index.tags().map(|(tag, image)| (tag.to_owned(), image.digest)).collect();
        assert_eq!(tags[0], ("1.0.0".to_owned(), digest));
        assert_eq!(tags[1].0, digest.signature_tag());
        let (_, list, _) = ImageManifest::parse_package(&files[&format!("blobs/sha256/{}", digest.hex())]).unwrap();
        let list = FileList::parse(&files[&format!("blobs/sha256/{}", list.digest.hex())]).unwrap();
        assert_eq!(list.files.len(), PROGRAMS.len() + UNITS.len());
    }

    #[test]
    fn program_that_was_not_named_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let inputs = Inputs { version: "1", architecture: "x86_64", programs: vec![], units: folder.path().to_owned() };
        assert!(matches!(build(&inputs, None, folder.path()), Err(BuildError::NoProgram("gpuaas-agent"))));
        let inputs = Inputs { version: "../1", ..inputs };
        assert!(matches!(build(&inputs, None, folder.path()), Err(BuildError::Version(_))));
    }
}
