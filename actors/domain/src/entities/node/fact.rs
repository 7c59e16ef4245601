//! What the worker for bare-metal machines reports to a node.

use super::{OrderedImage, ProviderReport};
use crate::id::TokenId;
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};

/// What the worker for bare-metal machines reports to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// The token that the worker puts into the user data of the machine's next deployment was made. Its name between members is that of earlier
    /// releases.
    #[serde(rename = "machine_token")]
    #[strum(serialize = "machine_token")]
    MachineTokenMade {
        token_id: TokenId,
        token_sha256: [u8; 32],
        /// The image that is ordered; absent where the worker is of a release that does not name it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<OrderedImage>,
    },
    /// What the worker found at the bare-metal provider, of the step that began then.
    MachineReported { since: Timestamp, report: ProviderReport },
}
