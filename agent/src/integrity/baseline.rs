//! The state of the last accepted moment, stored so that it survives a power failure and shows when it was damaged.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::bounded_file::{self, digest};
use super::privileges::{Entries, PrivilegeKind, Privileges};
use crate::atomic_file::{self, FileError, PRIVATE};

const FILE: &str = "privileges.json";
const VERSION: u32 = 1;
/// Far above what the bounds of its entries admit.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

/// What the machine is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Baseline {
    /// When it was recorded last.
    pub recorded_at: DateTime<Utc>,
    pub privileges: Privileges,
    /// Kinds that only a later release knows, as it has written them.
    pub newer: BTreeMap<String, Value>,
}

/// As it is written: a kind that is not known is no damage.
#[derive(Serialize, Deserialize)]
struct Body {
    recorded_at: DateTime<Utc>,
    privileges: BTreeMap<String, Value>,
}

impl Baseline {
    fn of(body: Body) -> Option<Self> {
        let (mut privileges, mut newer) = (Privileges::new(), BTreeMap::new());
        for (code, entries) in body.privileges {
            match PrivilegeKind::of(&code) {
                Some(kind) => {
                    privileges.insert(kind, serde_json::from_value::<Entries>(entries).ok()?);
                }
                None => {
                    newer.insert(code, entries);
                }
            }
        }
        Some(Self { recorded_at: body.recorded_at, privileges, newer })
    }

    fn body(&self) -> Result<Body, serde_json::Error> {
        let mut privileges = self.newer.clone();
        for (kind, entries) in &self.privileges {
            privileges.insert(kind.code().to_owned(), serde_json::to_value(entries)?);
        }
        Ok(Body { recorded_at: self.recorded_at, privileges })
    }
}

/// What is stored.
#[derive(Debug, PartialEq, Eq)]
pub enum StoredBaseline {
    /// The machine was never recorded.
    None,
    Of(Baseline),
    /// It was altered, or written only in part.
    Damaged {
        why: String,
    },
    /// A later release has written it, in a form that is not known.
    Newer {
        version: u32,
    },
}

#[derive(Serialize, Deserialize)]
struct Document<'a> {
    version: u32,
    sha256: String,
    #[serde(borrow)]
    baseline: &'a RawValue,
}

/// What all versions have.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Where it is stored.
#[derive(Debug)]
pub struct BaselineFile(PathBuf);

impl BaselineFile {
    /// In the agent's state folder.
    #[must_use]
    pub fn in_folder(state_dir: &Path) -> Self {
        Self(state_dir.join(FILE))
    }

    #[must_use]
    pub fn load(&self) -> StoredBaseline {
        match bounded_file::read(&self.0, MAX_BYTES) {
            Ok(None) => StoredBaseline::None,
            Ok(Some((content, _))) => parse(&content),
            Err(error) => StoredBaseline::Damaged { why: error.to_string() },
        }
    }

    /// # Errors
    /// [`FileError`]; what was stored is unchanged.
    pub fn store(&self, baseline: &Baseline) -> Result<(), FileError> {
        let text = render(baseline).map_err(|error| FileError::at("write", &self.0)(error.into()))?;
        atomic_file::write_atomically(&self.0, text.as_bytes(), PRIVATE)
    }
}

fn render(baseline: &Baseline) -> Result<String, serde_json::Error> {
    let body = serde_json::value::to_raw_value(&baseline.body()?)?;
    serde_json::to_string(&Document { version: VERSION, sha256: digest(body.get().as_bytes()), baseline: &body })
}

fn parse(content: &[u8]) -> StoredBaseline {
    let damaged = |why: &str| StoredBaseline::Damaged { why: why.to_owned() };
    let Ok(text) = std::str::from_utf8(content) else { return damaged("it is no text") };
    let Ok(Versioned { version }) = serde_json::from_str(text) else { return damaged("it is no baseline") };
    if version > VERSION {
        return StoredBaseline::Newer { version };
    }
    let Ok(document) = serde_json::from_str::<Document<'_>>(text) else { return damaged("it is no baseline") };
    let body = document.baseline.get();
    if digest(body.as_bytes()) != document.sha256 {
        return damaged("its checksum differs");
    }
    let baseline = serde_json::from_str(body).ok().and_then(Baseline::of);
    baseline.map_or_else(|| damaged("its content is not understood"), StoredBaseline::Of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn baseline() -> Baseline {
        let entries = [("/usr/bin/su".to_owned(), "4755".to_owned())].into();
        let privileges = [(PrivilegeKind::Setuid, entries)].into();
        Baseline { recorded_at: DateTime::UNIX_EPOCH, privileges, newer: BTreeMap::new() }
    }

    #[test]
    fn baseline_is_read_as_it_was_stored() {
        let folder = tempfile::tempdir().unwrap();
        let file = BaselineFile::in_folder(folder.path());
        assert_eq!(file.load(), StoredBaseline::None);
        file.store(&baseline()).unwrap();
        assert_eq!(file.load(), StoredBaseline::Of(baseline()));
        let path = folder.path().join(FILE);
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        // What is there and cannot be read is not taken for a machine that was never recorded.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(file.load(), StoredBaseline::Damaged { .. }));
    }

    #[test]
    fn every_altered_or_truncated_byte_shows() {
        let text = render(&baseline()).unwrap();
        for cut in 0..text.len() {
            assert!(matches!(parse(&text.as_bytes()[..cut]), StoredBaseline::Damaged { .. }), "cut at {cut}");
        }
        let altered = text.replace("/usr/bin/su", "/usr/bin/sx");
        assert!(matches!(parse(altered.as_bytes()), StoredBaseline::Damaged { .. }));
    }

    #[test]
    fn later_version_and_unknown_kind_are_no_damage_and_a_cut_file_of_either_is() {
        let later = r#"{"version":2,"kinds":[{"name":"boot"}]}"#;
        assert_eq!(parse(later.as_bytes()), StoredBaseline::Newer { version: 2 });
        let newer = BTreeMap::from([("boot".to_owned(), serde_json::json!([1, { "a": "b" }]))]);
        let with_more = Baseline { newer, ..baseline() };
        let text = render(&with_more).unwrap();
        assert_eq!(parse(text.as_bytes()), StoredBaseline::Of(with_more), "what is not known stays stored");
        for text in [later, text.as_str()] {
            let cut = &text.as_bytes()[..text.len() - 1];
            assert!(matches!(parse(cut), StoredBaseline::Damaged { .. }), "{text}");
        }
        let unknown_state = render(&baseline()).unwrap().replace("\"4755\"", "[4755]");
        assert!(matches!(parse(unknown_state.as_bytes()), StoredBaseline::Damaged { .. }));
    }
}
