//! What users and administrators ask of an allocation.

use super::AllocationRequest;
use crate::authz::Action;
use crate::id::SshKeyId;
use crate::metadata::MetadataPatch;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine;
use serde::{Deserialize, Serialize};

/// What users and administrators ask of an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[derive(strum::IntoStaticStr, strum::VariantNames, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(CommandName),
    doc = "The name of a request.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    #[serde(rename = "request")]
    #[strum(serialize = "request")]
    #[strum_discriminants(serde(rename = "request"))]
    #[strum_discriminants(strum(serialize = "request"))]
    Create(Box<AllocationRequest>),
    Release {
        issue: Option<String>,
    },
    /// The user or an administrator changes its name or its labels.
    Revise {
        metadata: MetadataPatch,
        if_version: Option<i64>,
    },
    RetryRelease {
        reason: String,
    },
    ForceRelease {
        reason: String,
    },
    /// The user or an administrator chooses the keys that open it; `None`: the user's default key. `keys` are those of them that the user
    /// has at that revision.
    ChooseLogins {
        chosen: Option<Vec<SshKeyId>>,
        keys: Vec<AuthorizedKey>,
        logins_revision: u64,
    },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Create(_) => Action::Rent,
            Self::Release { .. } => Action::Release,
            Self::Revise { .. } => Action::ReviseAllocations,
            Self::ChooseLogins { .. } => Action::KeepKeys,
            Self::RetryRelease { .. } | Self::ForceRelease { .. } => Action::RescueAllocations,
        }
    }

    fn creates(&self) -> bool {
        matches!(self, Self::Create(_))
    }
}
