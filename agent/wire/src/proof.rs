//! The clean-up proof: what a node looked for after a tenant left, and what it found.
//!
//! A node is schedulable again only with this report, signed by the Ed25519 key that its agent made at enrollment.

use chrono::{DateTime, Utc};
use ed25519_dalek::SigningKey;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::envelope::{Envelope, SignatureError};
use crate::inventory::ExecutorKind;
use crate::keys::PublicKey;

/// Payload type of clean-up reports.
pub const CLEANUP_REPORT_TYPE: &str = "application/vnd.gpuaas.cleanup-report+json";

/// The findings of one release on one node in one boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CleanupReport {
    pub node_id: Uuid,
    pub allocation_id: Uuid,
    pub task_id: Uuid,
    pub attempt: u32,
    pub boot_id: Uuid,
    pub checked_at: DateTime<Utc>,
    pub findings: Vec<Finding>,
}

/// One thing that was looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub what: Checked,
    /// Path, name or pattern.
    pub looked_for: String,
    pub outcome: Outcome,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// What a look found. Only `gone` is clean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Gone,
    Present,
    /// It could not be looked at.
    Unknown,
}

/// Where a tenant can leave traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checked {
    PasswdEntry,
    GroupEntry,
    SubuidEntry,
    SudoersFile,
    Home,
    AuthorizedKeys,
    Mail,
    Cron,
    At,
    Tmp,
    VarTmp,
    DevShm,
    SysvIpc,
    PosixIpc,
    Processes,
    GpuProcesses,
    GpuMemory,
    /// The agent's own record of who holds which GPU.
    DeviceReservation,
    /// Runtime folders, lock files, crash dumps, and what sudo and systemd remember of a user.
    SessionFiles,
}

impl Checked {
    /// What every executor has to look at, whatever it can enforce.
    pub const REQUIRED: [Self; 10] = [
        Self::Home,
        Self::AuthorizedKeys,
        Self::Tmp,
        Self::VarTmp,
        Self::DevShm,
        Self::SysvIpc,
        Self::PosixIpc,
        Self::Processes,
        Self::GpuProcesses,
        Self::DeviceReservation,
    ];

    /// What an executor that makes users has to look at beyond that.
    pub const REQUIRED_OF_SYSTEM: [Self; 9] = [
        Self::PasswdEntry,
        Self::GroupEntry,
        Self::SubuidEntry,
        Self::SudoersFile,
        Self::Mail,
        Self::Cron,
        Self::At,
        Self::GpuMemory,
        Self::SessionFiles,
    ];

    /// Everything that a node with this executor has to look at.
    pub fn required(executor: ExecutorKind) -> impl Iterator<Item = Self> {
        let more = match executor {
            ExecutorKind::Sandbox => &[][..],
            ExecutorKind::System => &Self::REQUIRED_OF_SYSTEM[..],
        };
        Self::REQUIRED.into_iter().chain(more.iter().copied())
    }

    /// What is told by a tenant's uid, and so is nowhere where no uid was given.
    pub fn of_an_account() -> impl Iterator<Item = Self> {
        [
            Self::PasswdEntry,
            Self::GroupEntry,
            Self::SubuidEntry,
            Self::Home,
            Self::Mail,
            Self::Cron,
            Self::At,
            Self::Tmp,
            Self::VarTmp,
            Self::DevShm,
            Self::SysvIpc,
            Self::PosixIpc,
            Self::Processes,
            Self::SessionFiles,
        ]
        .into_iter()
    }
}

/// Why an envelope is no report of this node.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    #[error("the clean-up report is not signed with the node's recovery key")]
    Signature(#[from] SignatureError),
    #[error("the signed payload is of type {found:?}, not {CLEANUP_REPORT_TYPE}")]
    NotAReport { found: String },
    #[error("the signed clean-up report does not parse")]
    Malformed(#[source] serde_json::Error),
}

impl CleanupReport {
    /// Whether everything that a node with this executor must look for was looked for, and everything that was is gone.
    #[must_use]
    pub fn is_clean(&self, executor: ExecutorKind) -> bool {
        self.leftovers().next().is_none() && self.not_looked_for(executor).next().is_none()
    }

    /// Findings other than `gone`.
    pub fn leftovers(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.outcome != Outcome::Gone)
    }

    /// What the report leaves out of [`Checked::required`].
    pub fn not_looked_for(&self, executor: ExecutorKind) -> impl Iterator<Item = Checked> {
        Checked::required(executor).filter(|what| !self.findings.iter().any(|finding| finding.what == *what))
    }

    /// Signs the report with the node's recovery key.
    ///
    /// # Errors
    /// The report does not serialise, which no value of these types does.
    pub fn seal(&self, key: &SigningKey) -> Result<Envelope, serde_json::Error> {
        let key_id = PublicKey::from(key).key_id();
        Ok(Envelope::sign(key, &key_id, CLEANUP_REPORT_TYPE, serde_json::to_vec(self)?))
    }

    /// Verifies the signature of the node whose recovery key is `key`, and reads the report. The caller compares node,
    /// allocation, task, attempt and boot with what it asked for.
    ///
    /// # Errors
    /// [`ProofError`] when it is not signed by that key, of another type, or does not parse.
    pub fn open(envelope: &Envelope, key: &PublicKey) -> Result<Self, ProofError> {
        let bytes = envelope.verify_with(key.verifying_key())?;
        if envelope.payload_type != CLEANUP_REPORT_TYPE {
            return Err(ProofError::NotAReport { found: envelope.payload_type.clone() });
        }
        serde_json::from_slice(bytes).map_err(ProofError::Malformed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use super::*;

    fn report() -> CleanupReport {
        CleanupReport {
            node_id: Uuid::from_u128(1),
            allocation_id: Uuid::from_u128(2),
            task_id: Uuid::from_u128(3),
            attempt: 1,
            boot_id: Uuid::from_u128(4),
            checked_at: DateTime::from_timestamp(1_800_000_000, 0).unwrap(),
            findings: Checked::REQUIRED
                .into_iter()
                .map(|what| Finding { what, looked_for: "x".into(), outcome: Outcome::Gone, detail: None })
                .collect(),
        }
    }

    #[test]
    fn a_report_is_clean_only_when_everything_was_looked_for_and_is_gone() {
        let sandbox = ExecutorKind::Sandbox;
        assert!(report().is_clean(sandbox));
        for outcome in [Outcome::Present, Outcome::Unknown] {
            let mut dirty = report();
            dirty.findings[3].outcome = outcome;
            assert!(!dirty.is_clean(sandbox));
            assert_eq!(dirty.leftovers().count(), 1);
        }
        for index in 0..Checked::REQUIRED.len() {
            let mut partial = report();
            partial.findings.remove(index);
            assert!(!partial.is_clean(sandbox));
            assert_eq!(partial.not_looked_for(sandbox).collect::<Vec<_>>(), [Checked::REQUIRED[index]]);
        }
        let mut empty = report();
        empty.findings.clear();
        assert!(!empty.is_clean(sandbox));
    }

    #[test]
    fn an_executor_that_makes_users_has_to_look_for_users_too() {
        let missing: Vec<_> = report().not_looked_for(ExecutorKind::System).collect();
        assert_eq!(missing, Checked::REQUIRED_OF_SYSTEM);
        assert!(!report().is_clean(ExecutorKind::System));
    }

    #[test]
    fn a_report_opens_only_with_the_key_that_sealed_it() {
        let key = SigningKey::from_bytes(&[5; 32]);
        let sealed = report().seal(&key).unwrap();
        assert_eq!(CleanupReport::open(&sealed, &PublicKey::from(&key)).unwrap(), report());

        let other = PublicKey::from(&SigningKey::from_bytes(&[6; 32]));
        assert!(matches!(CleanupReport::open(&sealed, &other), Err(ProofError::Signature(_))));
        let mut altered = sealed;
        altered.payload[20] ^= 1;
        assert!(matches!(CleanupReport::open(&altered, &PublicKey::from(&key)), Err(ProofError::Signature(_))));
    }

    #[test]
    fn a_signed_message_of_another_type_is_no_report() {
        let key = SigningKey::from_bytes(&[5; 32]);
        let bytes = serde_json::to_vec(&report()).unwrap();
        let other = Envelope::sign(&key, "k", "application/json", bytes);
        assert!(matches!(CleanupReport::open(&other, &PublicKey::from(&key)), Err(ProofError::NotAReport { .. })));
    }
}
