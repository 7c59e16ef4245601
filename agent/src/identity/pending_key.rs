//! Keys whose certificates are requested, in a file for each purpose: none replaces the key of another purpose.

use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use wire::SecretToken;

use super::{IdentityError, IdentityStore, RecoveryRecord};
use crate::atomic_file;

/// The key of a recovery, where an earlier release looks for it. That release has its keys of any purpose here.
const RECOVERY: &str = "pending.json";
const ENROLLMENT: &str = "pending-enrollment.json";
const RENEWAL: &str = "pending-renewal.json";

/// What a node presents that has had no answer with its token. The control plane takes it for the generation of the enrollment with that token.
const FIRST_GENERATION: u64 = 1;

/// The purpose of a new key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "for", rename_all = "snake_case")]
enum Purpose {
    /// An identity with the token of this SHA-256, which is not spent.
    Enroll {
        token_sha256: String,
    },
    /// The next identity after the one of this generation.
    Recover {
        identity_generation: u64,
        /// The token that the generation belongs to; `None` where an earlier release has recorded it, of whichever token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token_sha256: Option<String>,
    },
    Renew,
}

impl Purpose {
    const fn file(&self) -> &'static str {
        match self {
            Self::Enroll { .. } => ENROLLMENT,
            Self::Recover { .. } => RECOVERY,
            Self::Renew => RENEWAL,
        }
    }
}

/// A key whose certificate is requested.
#[derive(Serialize, Deserialize)]
pub struct PendingKey {
    #[serde(flatten)]
    purpose: Purpose,
    #[serde(serialize_with = "expose")]
    pub(super) key_pem: SecretString,
    /// PKCS #10; resent unchanged.
    pub csr_pem: String,
    /// SHA-256 of the token that is presented with the request; `None` for a renewal.
    #[serde(skip)]
    pub(super) presented_sha256: Option<String>,
}

/// The generation of an identity, and the token that it belongs to; `None` where an earlier release has recorded it.
#[derive(Clone)]
struct KnownGeneration {
    identity_generation: u64,
    token_sha256: Option<String>,
}

fn expose<S: serde::Serializer>(secret: &SecretString, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(secret.expose_secret())
}

fn digest(token: &SecretToken) -> String {
    hex::encode(Sha256::digest(token.expose().as_bytes()))
}

impl IdentityStore {
    /// The key and CSR for an enrollment: those that were sent with this token before, otherwise new ones, stored.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn pending_enrollment(&self, token: &SecretToken) -> Result<PendingKey, IdentityError> {
        let token_sha256 = digest(token);
        let pending = self.pending(Purpose::Enroll { token_sha256: token_sha256.clone() })?;
        Ok(PendingKey { presented_sha256: Some(token_sha256), ..pending })
    }

    /// The generation, key and CSR for a recovery with this token: those that were sent before without an answer, otherwise the generation of
    /// the last answer, and a new key, stored.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn pending_recovery(&self, token: &SecretToken) -> Result<(u64, PendingKey), IdentityError> {
        let token_sha256 = digest(token);
        let KnownGeneration { identity_generation, token_sha256: of_token } =
            self.known_generation(&token_sha256)?.unwrap_or(KnownGeneration {
                identity_generation: FIRST_GENERATION,
                token_sha256: Some(token_sha256.clone()),
            });
        let pending = self.pending(Purpose::Recover { identity_generation, token_sha256: of_token })?;
        Ok((identity_generation, PendingKey { presented_sha256: Some(token_sha256), ..pending }))
    }

    /// The key and CSR for a renewal: those that were sent before, otherwise new ones, stored.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn pending_renewal(&self) -> Result<PendingKey, IdentityError> {
        self.pending(Purpose::Renew)
    }

    /// Whether this node has spent the token, as far as it knows: then it recovers, and enrolls otherwise.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn has_spent(&self, token: &SecretToken) -> Result<bool, IdentityError> {
        Ok(self.known_generation(&digest(token))?.is_some())
    }

    /// The generation to recover from with this token, if there is one.
    fn known_generation(&self, token_sha256: &str) -> Result<Option<KnownGeneration>, IdentityError> {
        let sent = match self.read_pending(RECOVERY)?.map(|pending| pending.purpose) {
            Some(Purpose::Recover { identity_generation, token_sha256 }) => {
                Some(KnownGeneration { identity_generation, token_sha256 })
            }
            Some(Purpose::Enroll { .. } | Purpose::Renew) | None => None,
        };
        let recorded = self.recovery_record()?.map(|RecoveryRecord { state, token_sha256 }| KnownGeneration {
            identity_generation: state.identity_generation,
            token_sha256,
        });
        let of_token = |known: &&KnownGeneration| known.token_sha256.as_deref() == Some(token_sha256);
        let answered = recorded.as_ref().filter(of_token);
        // A control plane that was restored from a backup, and has let the node enroll again, knows nothing of a later generation.
        let is_reached = |sent: &&KnownGeneration| {
            answered.is_none_or(|answered| sent.identity_generation <= answered.identity_generation)
        };
        if let Some(known) = sent.as_ref().filter(of_token).filter(is_reached).or(answered) {
            return Ok(Some(known.clone()));
        }
        // What an earlier release has recorded is of this token, unless the control plane has refused it: then an enrollment was tried.
        let enrollment = Purpose::Enroll { token_sha256: token_sha256.to_owned() };
        if self.find_pending(&enrollment)?.is_some() {
            return Ok(None);
        }
        Ok([sent, recorded].into_iter().flatten().find(|known| known.token_sha256.is_none()))
    }

    fn pending(&self, purpose: Purpose) -> Result<PendingKey, IdentityError> {
        if let Some(pending) = self.find_pending(&purpose)? {
            return Ok(pending);
        }
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(IdentityError::Key)?;
        // The control plane uses the public key only and writes the names itself.
        let request = CertificateParams::default().serialize_request(&key).map_err(IdentityError::Key)?;
        let csr_pem = request.pem().map_err(IdentityError::Key)?;
        let (file, key_pem) = (purpose.file(), SecretString::from(key.serialize_pem()));
        let pending = PendingKey { purpose, key_pem, csr_pem, presented_sha256: None };
        self.write_json(file, &pending)?;
        Ok(pending)
    }

    fn find_pending(&self, purpose: &Purpose) -> Result<Option<PendingKey>, IdentityError> {
        for file in [purpose.file(), RECOVERY] {
            let found = self.read_pending(file)?.filter(|pending| pending.purpose == *purpose);
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The requested keys of all purposes.
    pub(super) fn pending_keys(&self) -> Result<Vec<PendingKey>, IdentityError> {
        let read = [RECOVERY, ENROLLMENT, RENEWAL].map(|file| self.read_pending(file).transpose());
        read.into_iter().flatten().collect()
    }

    /// Forgets a key that has its certificate. The token is spent then, if one was presented.
    pub(super) fn forget_pending(&self, certified: &PendingKey) -> Result<(), IdentityError> {
        for file in [RECOVERY, ENROLLMENT, RENEWAL] {
            let pending = self.read_pending(file)?;
            let is_over = |pending: PendingKey| match &pending.purpose {
                Purpose::Enroll { .. } if certified.purpose != Purpose::Renew => true,
                Purpose::Enroll { .. } | Purpose::Recover { .. } | Purpose::Renew => {
                    pending.csr_pem == certified.csr_pem
                }
            };
            if pending.is_some_and(is_over) {
                atomic_file::remove(&self.folder.join(file))?;
            }
        }
        Ok(())
    }

    fn read_pending(&self, file: &str) -> Result<Option<PendingKey>, IdentityError> {
        self.read_json(file, "the key that is being certified")
    }
}
