//! Public keys that log in.

use crate::id::SshKeyId;
use serde::{Deserialize, Serialize};

/// The bound of the keys that open one allocation, in bytes of their text and their fingerprints: thirty RSA keys of 4,096 bits, or 180
/// keys of Ed25519. The allocation stores them, and so does its node, for each of its tenants.
pub const MAX_LOGIN_BYTES: usize = 24 * 1024;

/// A public key that opens the allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorizedKey {
    pub id: SshKeyId,
    /// OpenSSH text form, without options.
    pub public_key: String,
    /// OpenSSH `SHA256:` form.
    pub fingerprint: String,
}

impl AuthorizedKey {
    /// The part of [`MAX_LOGIN_BYTES`] that it takes.
    const fn login_bytes(&self) -> usize {
        self.public_key.len() + self.fingerprint.len()
    }
}

/// True where these keys together are within [`MAX_LOGIN_BYTES`].
#[must_use]
pub fn are_within_bound(keys: &[AuthorizedKey]) -> bool {
    keys.iter().map(AuthorizedKey::login_bytes).sum::<usize>() <= MAX_LOGIN_BYTES
}

/// The first of these keys that are within [`MAX_LOGIN_BYTES`] together. An allocation of the release before may have more: a key that is
/// left out opens nothing.
#[must_use]
pub fn within_bound(mut keys: Vec<AuthorizedKey>) -> Vec<AuthorizedKey> {
    while !are_within_bound(&keys) {
        keys.pop();
    }
    keys
}
