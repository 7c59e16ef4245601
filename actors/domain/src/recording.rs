//! On which terms a terminal session is recorded (decisions 5, *Terminal*; 7, `terminal.recording_*`).

use crate::machine::Timestamp;
use crate::policy::{Key, PolicyBook, Scopes};
use serde::{Deserialize, Serialize};

/// Whether a session is recorded, and what happens where it cannot be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    #[default]
    Off,
    /// The session goes on, and the recording says how much of it is missing.
    BestEffort,
    /// Nothing is shown that is not recorded: the session waits, and ends where there is nothing to wait for.
    Strict,
}

impl Mode {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::BestEffort => "best-effort",
            Self::Strict => "strict",
        }
    }
}

/// What the policies say of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    pub mode: Mode,
    /// The longest recording; 0 where there is none.
    pub most_bytes: u64,
}

const MIB: u64 = 1024 * 1024;

impl Terms {
    /// As the policies are at `now`.
    #[must_use]
    pub fn by_policy(policy: &PolicyBook, scopes: &Scopes, now: Timestamp) -> Self {
        if !policy.is_on(Key::TerminalRecordingEnabled, scopes, now) {
            return Self::default();
        }
        let strict = policy.text(Key::TerminalRecordingMode, scopes, now) == "strict";
        let mode = if strict { Mode::Strict } else { Mode::BestEffort };
        let most = policy.int(Key::TerminalRecordingMaxSession, scopes, now).unsigned_abs();
        Self { mode, most_bytes: most * MIB }
    }

    #[must_use]
    pub fn is_on(self) -> bool {
        self.mode != Mode::Off
    }
}
