//! How the node gets an identity with its token: by enrollment the first time, by recovery once the token is spent.
//!
//! Which of the two it is only the control plane knows for certain: the answer to an enrollment may have been lost, and an administrator
//! may have issued the token anew. So what is refused the one way is tried the other way, once.

use std::time::Duration;

use ed25519_dalek::SigningKey;
use reqwest::StatusCode;
use tracing::{info, warn};
use uuid::Uuid;
use wire::enroll::{EnrollAnswer, EnrollRequest, RecoverRequest};
use wire::inventory::Inventory;
use wire::{PROTOCOL, PublicKey, Token, VerifierSet, Verifiers};

use super::{BACKOFF_BASE, Fatal, report_failure};
use crate::api::{Api, ApiError};
use crate::backoff::Backoff;
use crate::chain;
use crate::config::Config;
use crate::identity::{Identity, IdentityStore, Pending};

const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// A node without an identity that holds.
pub(super) struct Applicant<'a> {
    pub(super) config: &'a Config,
    pub(super) identities: &'a IdentityStore,
    pub(super) recovery_key: &'a SigningKey,
    pub(super) boot_id: Uuid,
    pub(super) inventory: Inventory,
    pub(super) verifier_set_version: u64,
}

/// The way to a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Enroll,
    Recover,
}

impl Way {
    const fn other(self) -> Self {
        match self {
            Self::Enroll => Self::Recover,
            Self::Recover => Self::Enroll,
        }
    }

    const fn done(self) -> &'static str {
        match self {
            Self::Enroll => "enrolled",
            Self::Recover => "recovered",
        }
    }
}

/// An identity, and the verifier sets that came with it.
pub(super) struct Obtained {
    pub(super) identity: Identity,
    pub(super) verifier_sets: Vec<VerifierSet>,
}

/// An answer, and the key that it is for.
type Answered = (Pending, EnrollAnswer);

impl Applicant<'_> {
    /// Gets an identity, for as long as it takes. The key and the CSR are on disk before the token leaves the machine, and are the
    /// same in every attempt, so that an answer that was lost is given again.
    pub(super) async fn apply(&self, first: Way) -> Result<Obtained, Fatal> {
        let token = self.config.enrollment_token.as_ref().ok_or(Fatal::NoEnrollmentToken)?;
        let api = Api::anonymous(self.config)?;
        let (way, (pending, answer)) = match self.go(first, &api, token).await? {
            Ok(answered) => (first, answered),
            Err(refused) if refused.status() == Some(StatusCode::UNAUTHORIZED) => {
                info!("the token is refused to {first:?}; trying to {:?}", first.other());
                let answered = self.go(first.other(), &api, token).await?;
                // What was wanted first is what the operator is told about.
                (first.other(), answered.map_err(|_| Fatal::EnrollmentRefused(refused))?)
            }
            Err(refused) => return Err(Fatal::EnrollmentRefused(refused)),
        };
        let identity = self.identities.commit(&pending, &answer)?;
        info!(
            identity_generation = answer.recovery.identity_generation,
            recoveries_left = answer.recovery.remaining,
            certificate_not_after = %identity.not_after,
            "{}",
            way.done()
        );
        Ok(Obtained { identity, verifier_sets: answer.verifier_sets })
    }

    async fn go(&self, way: Way, api: &Api, token: &Token) -> Result<Result<Answered, ApiError>, Fatal> {
        let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
        loop {
            let answered = match way {
                Way::Enroll => self.enroll(api, token).await?,
                Way::Recover => self.recover(api, token).await?,
            };
            let error = match answered {
                Ok(answered) => return Ok(Ok(answered)),
                Err(error) => Fatal::of(error).map_or_else(Ok, Err)?,
            };
            if is_final(&error) {
                return Ok(Err(error));
            }
            let pause = backoff.next(rand::random(), error.retry_after());
            report_failure(&error, "getting an identity", pause);
            tokio::time::sleep(pause).await;
        }
    }

    async fn enroll(&self, api: &Api, token: &Token) -> Result<Result<Answered, ApiError>, Fatal> {
        let pending = self.identities.pending_enrollment(token)?;
        let request = EnrollRequest {
            enrollment_token: token.clone(),
            csr_pem: pending.csr_pem.clone(),
            recovery_public_key: PublicKey::from(self.recovery_key),
            boot_id: self.boot_id,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL,
            verifier_set_version: self.verifier_set_version,
            inventory: self.inventory.clone(),
        };
        Ok(api.enroll(&request).await.map(|answer| (pending, answer)))
    }

    async fn recover(&self, api: &Api, token: &Token) -> Result<Result<Answered, ApiError>, Fatal> {
        // Where no answer ever came the identity is in its first generation, if there is one.
        let identity_generation = self.identities.recovery()?.map_or(1, |recovery| recovery.identity_generation);
        let pending = self.identities.pending_recovery(identity_generation)?;
        let nonce = match api.nonce().await {
            Ok(answer) => answer.nonce,
            Err(error) => return Ok(Err(error)),
        };
        let mut request = RecoverRequest {
            enrollment_token: token.clone(),
            identity_generation,
            nonce,
            csr_pem: pending.csr_pem.clone(),
            nonce_signature: Vec::new(),
            boot_id: self.boot_id,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL,
            verifier_set_version: self.verifier_set_version,
        };
        request.sign(self.config.node_id, self.recovery_key);
        Ok(api.recover(&request).await.map(|answer| (pending, answer)))
    }
}

/// Whether asking again with the same token cannot help.
fn is_final(error: &ApiError) -> bool {
    // Another replica, or this one in a moment, is upgraded.
    if error.is_of_an_older_control_plane() {
        return false;
    }
    match error.status() {
        Some(status) => {
            status.is_client_error()
                && !matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS | StatusCode::CONFLICT)
        }
        None => false,
    }
}

/// Takes newer verifier sets over and keeps them. A set that is refused is the operator's to look at; the trust that was
/// there stays.
pub(super) fn follow(
    identities: &IdentityStore,
    bundle: &VerifierSet,
    verifiers: &mut Verifiers,
    sets: &[VerifierSet],
) -> Result<(), Fatal> {
    let before = verifiers.version();
    if let Err(error) = verifiers.follow(sets) {
        warn!(error_code = "verifier_set_refused", error = chain(&error), "a set of task-signing keys is refused");
    }
    if verifiers.version() > before {
        identities.store_verifiers(bundle, verifiers.current())?;
        info!(version = verifiers.version(), "task-signing keys rotated");
    }
    Ok(())
}
