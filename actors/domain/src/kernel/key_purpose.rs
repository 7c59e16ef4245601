//! The purposes of the control plane's keys.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The purpose of a key set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum KeySetPurpose {
    /// They sign tasks for agents.
    TaskSigning,
    /// They sign nodes' certificates.
    NodeCa,
    /// They sign the access tokens of service accounts.
    ServiceTokens,
    /// They authenticate messages between members.
    MemberMessages,
    /// They seal stored values that must be readable again; the keys themselves are in the operator's key ring alone.
    AtRest,
}

impl KeySetPurpose {
    pub const ALL: [Self; 5] =
        [Self::TaskSigning, Self::NodeCa, Self::ServiceTokens, Self::MemberMessages, Self::AtRest];

    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl fmt::Display for KeySetPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
