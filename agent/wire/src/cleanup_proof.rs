//! The clean-up proof: what a node checked after a tenant was released, and what it found.
//!
//! A node is schedulable again only with this report, signed by the Ed25519 key that its agent created at enrollment.

use chrono::{DateTime, Utc};
use ed25519_dalek::SigningKey;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::envelope::{EnvelopeSignatureError, SignedEnvelope};
use crate::inventory::ExecutorKind;
use crate::verifier_set::PublicKey;

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
    pub findings: Vec<CleanupFinding>,
}

/// The finding of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CleanupFinding {
    pub what: CleanupCheck,
    /// Path, name or pattern.
    pub looked_for: String,
    pub outcome: FindingOutcome,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// The outcome of a check. Only `gone` is clean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingOutcome {
    Gone,
    Present,
    /// It could not be checked.
    Unknown,
}

/// What is checked for leftovers of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CleanupCheck {
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
    /// The agent's own record of the GPUs that the allocation holds.
    DeviceReservation,
    /// Runtime folders, lock files, crash dumps, and what sudo and systemd store of a user.
    SessionFiles,
}

impl CleanupCheck {
    /// The checks of every executor, whatever isolation it enforces.
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

    /// The further checks of an executor that creates users.
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

    /// All checks of a node with this executor.
    pub fn required(executor: ExecutorKind) -> impl Iterator<Item = Self> {
        let more = match executor {
            ExecutorKind::Sandbox => &[][..],
            ExecutorKind::System => &Self::REQUIRED_OF_SYSTEM[..],
        };
        Self::REQUIRED.into_iter().chain(more.iter().copied())
    }

    /// The checks by a tenant's uid, which find nothing if no uid was given.
    pub fn account_checks() -> impl Iterator<Item = Self> {
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

/// Why an envelope is not a report of this node.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    #[error("the clean-up report is not signed with the node's recovery key")]
    Signature(#[from] EnvelopeSignatureError),
    #[error("the signed payload is of type {found:?}, not {CLEANUP_REPORT_TYPE}")]
    NotAReport { found: String },
    #[error("the signed clean-up report does not parse")]
    Malformed(#[source] serde_json::Error),
}

impl CleanupReport {
    /// Whether every check of a node with this executor was made, and found nothing.
    #[must_use]
    pub fn is_clean(&self, executor: ExecutorKind) -> bool {
        self.leftovers().next().is_none() && self.missing_checks(executor).next().is_none()
    }

    /// Findings other than `gone`.
    pub fn leftovers(&self) -> impl Iterator<Item = &CleanupFinding> {
        self.findings.iter().filter(|finding| finding.outcome != FindingOutcome::Gone)
    }

    /// The checks of [`CleanupCheck::required`] that the report lacks.
    pub fn missing_checks(&self, executor: ExecutorKind) -> impl Iterator<Item = CleanupCheck> {
        CleanupCheck::required(executor).filter(|what| !self.findings.iter().any(|finding| finding.what == *what))
    }

    /// Signs the report with the node's recovery key.
    ///
    /// # Errors
    /// The report does not serialise, which never happens for these types.
    pub fn seal(&self, key: &SigningKey) -> Result<SignedEnvelope, serde_json::Error> {
        let key_id = PublicKey::from(key).key_id();
        Ok(SignedEnvelope::sign(key, &key_id, CLEANUP_REPORT_TYPE, serde_json::to_vec(self)?))
    }

    /// Verifies the signature of the node whose recovery key is `key`, and reads the report. The caller compares node, allocation, task,
    /// attempt and boot with its request.
    ///
    /// # Errors
    /// [`ProofError`] when it is not signed by that key, of another type, or does not parse.
    pub fn open(envelope: &SignedEnvelope, key: &PublicKey) -> Result<Self, ProofError> {
        let bytes = envelope.verify_with(key.verifying_key())?;
        if envelope.payload_type != CLEANUP_REPORT_TYPE {
            return Err(ProofError::NotAReport { found: envelope.payload_type.clone() });
        }
        serde_json::from_slice(bytes).map_err(ProofError::Malformed)
    }
}

#[cfg(test)]
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
            findings: CleanupCheck::REQUIRED
                .into_iter()
                .map(|what| CleanupFinding {
                    what,
                    looked_for: "x".into(),
                    outcome: FindingOutcome::Gone,
                    detail: None,
                })
                .collect(),
        }
    }

    #[test]
    fn report_is_clean_only_if_every_check_was_made_and_found_nothing() {
        let sandbox = ExecutorKind::Sandbox;
        assert!(report().is_clean(sandbox));
        for outcome in [FindingOutcome::Present, FindingOutcome::Unknown] {
            let mut dirty = report();
            dirty.findings[3].outcome = outcome;
            assert!(!dirty.is_clean(sandbox));
            assert_eq!(dirty.leftovers().count(), 1);
        }
        for index in 0..CleanupCheck::REQUIRED.len() {
            let mut partial = report();
            partial.findings.remove(index);
            assert!(!partial.is_clean(sandbox));
            assert_eq!(partial.missing_checks(sandbox).collect::<Vec<_>>(), [CleanupCheck::REQUIRED[index]]);
        }
        let mut empty = report();
        empty.findings.clear();
        assert!(!empty.is_clean(sandbox));
    }

    #[test]
    fn system_executor_requires_account_checks() {
        let missing: Vec<_> = report().missing_checks(ExecutorKind::System).collect();
        assert_eq!(missing, CleanupCheck::REQUIRED_OF_SYSTEM);
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
        let other = SignedEnvelope::sign(&key, "k", "application/json", bytes);
        assert!(matches!(CleanupReport::open(&other, &PublicKey::from(&key)), Err(ProofError::NotAReport { .. })));
    }
}
