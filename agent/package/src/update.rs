//! The update of an installed agent, as files in the installation's folder: they are the only memory of agent and finalizer, and each is
//! written whole or not at all.
//!
//! | file in `update/` | writer | what |
//! | --- | --- | --- |
//! | `record.json` | the agent before, then the finalizer | the update in progress and its stage; there is none otherwise |
//! | `proof.json` | the new agent | the control plane has answered one of its heartbeats |
//! | `last.json` | the finalizer | the outcome of the last update |
//! | `failed.json` | the finalizer | the versions that were rolled back, which are not tried again |
//! | `reserve` | the agent before | disk that the finalizer gives back where a roll back has none |
//!
//! ```text
//! prepared -> switching <-> waiting -> committing -> (committed)
//!     |           |            `-----> rolling_back -> (rolled_back)
//!     `-----------^-------------------------^
//! ```

mod finalizer;
mod installed_machine;
#[cfg(test)]
mod tests;
mod update_folder;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire::package::Digest;

use crate::contents::{AGENT, PROGRAM_FOLDER};
use crate::install::VERSIONS;

pub use finalizer::{FinalizeError, UpdateMachine, finalize};
pub use installed_machine::{InstalledMachine, SystemFolders};
pub use update_folder::{UpdateFileError, UpdateFolder};

/// An update, from the moment when its package is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRecord {
    /// Of this update alone: a proof that names it is not one of an earlier update.
    pub nonce: Uuid,
    /// The task that ordered it.
    pub task_id: Uuid,
    /// The version that is in use, whose finalizer carries the update out.
    pub from: Digest,
    pub to: Digest,
    /// What the package calls its version.
    pub version: String,
    /// The agent's unit and its environment file, as they are installed.
    pub unit: String,
    pub env_file: PathBuf,
    /// How long the new agent may take to be answered by the control plane.
    pub commit_seconds: u32,
    pub stage: Stage,
}

/// How far an update is. Each stage is entered before the first of its effects, and its effects may be repeated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "snake_case")]
pub enum Stage {
    /// The new version is there; nothing has changed.
    Prepared,
    /// The new version is being put in place and started, in this boot.
    Switching {
        boot_id: Uuid,
        /// How many boots have tried it, with this one.
        boots: u8,
    },
    /// The new agent has been started and has not proved itself.
    Waiting {
        boot_id: Uuid,
        /// When the wait began, in seconds of that boot.
        since_uptime: u64,
        boots: u8,
    },
    /// The new agent has proved itself. This does not change any more.
    Committing,
    /// The previous version is being put back. This does not change any more.
    RollingBack { reason: RollbackReason },
}

/// Why an update is rolled back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackReason {
    /// `no_heartbeat`, `too_many_boots` or `version_altered`.
    pub code: String,
    pub message: String,
}

/// The outcome of an update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentUpdateOutcome {
    pub task_id: Uuid,
    pub from: Digest,
    pub to: Digest,
    pub version: String,
    /// Why it was rolled back; the new version is in use where it was not.
    pub rolled_back: Option<RollbackReason>,
}

/// What the new agent writes after the control plane has answered one of its heartbeats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    pub nonce: Uuid,
    pub digest: Digest,
    pub pid: u32,
    /// Seconds since 1970, for people.
    pub at: u64,
}

/// A version that was rolled back on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedVersion {
    pub digest: Digest,
    pub reason: RollbackReason,
    /// Seconds since 1970.
    pub at: u64,
}

/// The installation that a running program is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    pub root: PathBuf,
    pub digest: Digest,
}

impl Installation {
    /// That of the agent's program at this path, which no link is part of. `None` for a program that no package installed.
    #[must_use]
    pub fn of_agent(program: &Path) -> Option<Self> {
        let folder = program.parent().filter(|_| program.file_name().is_some_and(|name| name == AGENT))?;
        let version = folder.parent().filter(|_| folder.file_name().is_some_and(|name| name == PROGRAM_FOLDER))?;
        let versions = version.parent().filter(|versions| versions.file_name().is_some_and(|name| name == VERSIONS))?;
        let digest = version.file_name()?.to_str()?.strip_prefix("sha256-")?;
        let digest = format!("sha256:{digest}").parse().ok()?;
        Some(Self { root: versions.parent()?.to_owned(), digest })
    }
}

/// Seconds since 1970.
#[must_use]
pub fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
