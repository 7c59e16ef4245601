//! The state of the last accepted moment, stored so that it survives a power failure and shows when it was damaged.

use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::bounded_file::{self, digest};
use super::privileges::Privileges;
use crate::atomic_file::{self, FileError, PRIVATE};

const FILE: &str = "privileges.json";
const VERSION: u32 = 1;
/// Far above what the bounds of its entries admit.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

/// What the machine is compared with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Baseline {
    /// When it was recorded last.
    pub recorded_at: DateTime<Utc>,
    pub privileges: Privileges,
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
    /// A later release has written it.
    Foreign {
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
    let body = serde_json::value::to_raw_value(baseline)?;
    serde_json::to_string(&Document { version: VERSION, sha256: digest(body.get().as_bytes()), baseline: &body })
}

fn parse(content: &[u8]) -> StoredBaseline {
    let damaged = |why: &str| StoredBaseline::Damaged { why: why.to_owned() };
    let Ok(text) = std::str::from_utf8(content) else { return damaged("it is no text") };
    let Ok(document) = serde_json::from_str::<Document<'_>>(text) else { return damaged("it is no baseline") };
    if document.version > VERSION {
        return StoredBaseline::Foreign { version: document.version };
    }
    let body = document.baseline.get();
    if digest(body.as_bytes()) != document.sha256 {
        return damaged("its checksum differs");
    }
    serde_json::from_str(body).map_or_else(|_| damaged("its content is not understood"), StoredBaseline::Of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integrity::privileges::PrivilegeKind;

    fn baseline() -> Baseline {
        let entries = [("/usr/bin/su".to_owned(), "4755".to_owned())].into();
        Baseline { recorded_at: DateTime::UNIX_EPOCH, privileges: [(PrivilegeKind::Setuid, entries)].into() }
    }

    #[test]
    fn baseline_is_read_as_it_was_stored() {
        let folder = tempfile::tempdir().unwrap();
        let file = BaselineFile::in_folder(folder.path());
        assert_eq!(file.load(), StoredBaseline::None);
        file.store(&baseline()).unwrap();
        assert_eq!(file.load(), StoredBaseline::Of(baseline()));
    }

    #[test]
    fn every_altered_or_truncated_byte_shows() {
        let text = render(&baseline()).unwrap();
        for cut in 0..text.len() {
            assert!(matches!(parse(&text.as_bytes()[..cut]), StoredBaseline::Damaged { .. }), "cut at {cut}");
        }
        let altered = text.replace("/usr/bin/su", "/usr/bin/sx");
        assert!(matches!(parse(altered.as_bytes()), StoredBaseline::Damaged { .. }));
        let later = text.replace("\"version\":1", "\"version\":2");
        assert_eq!(parse(later.as_bytes()), StoredBaseline::Foreign { version: 2 });
    }
}
