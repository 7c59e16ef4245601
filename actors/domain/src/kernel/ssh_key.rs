//! Public keys that log in.

use crate::id::SshKeyId;
use serde::{Deserialize, Serialize};

/// A public key that opens the allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorizedKey {
    pub id: SshKeyId,
    /// OpenSSH text form, without options.
    pub public_key: String,
    /// OpenSSH `SHA256:` form.
    pub fingerprint: String,
}
