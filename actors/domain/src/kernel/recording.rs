//! The terms on which a terminal session is recorded (decisions 5, *Terminal*; 7, `terminal.recording_*`).

use crate::policy::{PolicyBook, PolicyKey, Scopes};
use crate::time::Timestamp;
use serde::{Deserialize, Serialize};

/// Whether a session is recorded, and what happens where the recording fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[serde(rename_all = "kebab-case")]
pub enum RecordingMode {
    #[default]
    Off,
    /// The session continues, and the recording says how much of it is missing.
    BestEffort,
    /// No output is shown before it is recorded: the session waits, and ends where a wait has no prospect.
    Strict,
}

impl RecordingMode {
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

/// The recording terms of a session, from the policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordingTerms {
    pub mode: RecordingMode,
    /// The longest recording; 0 where there is none.
    pub most_bytes: u64,
}

const MIB: u64 = 1024 * 1024;

impl RecordingTerms {
    /// The terms by the policies at `now`.
    #[must_use]
    pub fn from_policy(policy: &PolicyBook, scopes: &Scopes, now: Timestamp) -> Self {
        if !policy.is_on(PolicyKey::TerminalRecordingEnabled, scopes, now) {
            return Self::default();
        }
        let strict = policy.text(PolicyKey::TerminalRecordingMode, scopes, now) == RecordingMode::Strict.name();
        let mode = if strict { RecordingMode::Strict } else { RecordingMode::BestEffort };
        let most = policy.int(PolicyKey::TerminalRecordingMaxSession, scopes, now).unsigned_abs();
        Self { mode, most_bytes: most * MIB }
    }

    #[must_use]
    pub fn is_on(self) -> bool {
        self.mode != RecordingMode::Off
    }
}
