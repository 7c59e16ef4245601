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

impl CleanupFinding {
    /// Whether it leaves nothing of the tenant on the machine, but for a GPU that is not proved.
    #[must_use]
    pub fn is_no_leftover(&self) -> bool {
        self.outcome == FindingOutcome::Gone || self.unproved_gpu().is_some()
    }

    /// The UUID of the GPU that the check did not prove to be free, where the rest of the machine does not depend on it: the driver did not
    /// answer, or has not freed the memory. Such a GPU alone gets no other tenant. A process that uses a GPU is a leftover on the machine.
    #[must_use]
    pub fn unproved_gpu(&self) -> Option<&str> {
        let is_of_hardware = matches!(
            (self.what, self.outcome),
            (CleanupCheck::GpuProcesses, FindingOutcome::Unknown)
                | (CleanupCheck::GpuMemory, FindingOutcome::Unknown | FindingOutcome::Present)
        );
        // Earlier agents name all GPUs of the allocation in one finding.
        let names_one = !self.looked_for.is_empty() && !self.looked_for.contains(' ');
        (is_of_hardware && names_one).then_some(self.looked_for.as_str())
    }
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
    /// Whether every check of a node with this executor was made, and found nothing of the tenant on the machine. GPUs may be unproved.
    #[must_use]
    pub fn is_clean(&self, executor: ExecutorKind) -> bool {
        self.leftovers().next().is_none() && self.missing_checks(executor).next().is_none()
    }

    /// Findings other than `gone`, but for those of [`CleanupReport::unproved_gpus`].
    pub fn leftovers(&self) -> impl Iterator<Item = &CleanupFinding> {
        self.findings.iter().filter(|finding| !finding.is_no_leftover())
    }

    /// The GPUs that get no other tenant until the agent has proved them, with the findings that say why.
    pub fn unproved_gpus(&self) -> impl Iterator<Item = (&str, &CleanupFinding)> {
        self.findings.iter().filter_map(|finding| Some((finding.unproved_gpu()?, finding)))
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
        strict_json::from_slice(bytes).map_err(ProofError::Malformed)
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
    fn gpu_that_the_driver_does_not_show_to_be_free_is_unproved_and_no_leftover() {
        let finding = |what, outcome, looked_for: &str| CleanupFinding {
            what,
            looked_for: looked_for.into(),
            outcome,
            detail: None,
        };
        use CleanupCheck::{GpuMemory, GpuProcesses, Processes};
        use FindingOutcome::{Gone, Present, Unknown};
        let table = [
            (GpuProcesses, Unknown, "GPU-1", true),
            (GpuMemory, Unknown, "GPU-1", true),
            (GpuMemory, Present, "GPU-1", true),
            // A process is on the machine, whatever it uses.
            (GpuProcesses, Present, "GPU-1", false),
            (Processes, Unknown, "GPU-1", false),
            // As earlier agents name the GPUs of an allocation.
            (GpuMemory, Unknown, "GPU-1 GPU-2", false),
            (GpuMemory, Unknown, "", false),
        ];
        for (what, outcome, looked_for, is_unproved) in table {
            let mut with = report();
            with.findings.push(finding(what, outcome, looked_for));
            assert_eq!(with.unproved_gpus().count(), usize::from(is_unproved), "{what:?} {outcome:?} {looked_for}");
            assert_eq!(with.is_clean(ExecutorKind::Sandbox), is_unproved, "{what:?} {outcome:?} {looked_for}");
        }
        assert_eq!(finding(GpuMemory, Gone, "GPU-1").unproved_gpu(), None);
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
