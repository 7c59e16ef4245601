//! How the node gets an identity with its token: by enrollment the first time, by recovery once the token is spent.
//!
//! Only the control plane knows for certain which of the two applies: the answer to an enrollment may have been lost, and an
//! administrator may have reissued the token. So a request that is refused by one method is tried once with the other.

use std::time::Duration;

use ed25519_dalek::SigningKey;
use reqwest::StatusCode;
use tracing::{info, warn};
use uuid::Uuid;
use wire::enroll::{EnrollAnswer, EnrollRequest, NonceAnswer, RecoverRequest};
use wire::inventory::NodeInventory;
use wire::{PROTOCOL, PublicKey, SecretToken, VerifierSet, Verifiers};

use super::{BACKOFF_BASE, Fatal, report_failure};
use crate::chain;
use crate::config::AgentConfig;
use crate::full_jitter::Backoff;
use crate::identity::{AgentIdentity, IdentityStore, PendingKey};
use crate::node_api_client::{NodeApiClient, NodeApiError};
use crate::server_clock::ServerClock;

const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// A node without a valid identity.
pub(super) struct Applicant<'a> {
    pub(super) config: &'a AgentConfig,
    pub(super) clock: &'a ServerClock,
    pub(super) identities: &'a IdentityStore,
    pub(super) recovery_key: &'a SigningKey,
    pub(super) boot_id: Uuid,
    pub(super) inventory: NodeInventory,
    pub(super) verifier_set_version: u64,
}

/// The calls of a node without a certificate.
trait EnrollmentApi {
    async fn enroll(&self, request: &EnrollRequest) -> Result<EnrollAnswer, NodeApiError>;
    async fn nonce(&self) -> Result<NonceAnswer, NodeApiError>;
    async fn recover(&self, request: &RecoverRequest) -> Result<EnrollAnswer, NodeApiError>;
}

impl EnrollmentApi for NodeApiClient {
    async fn enroll(&self, request: &EnrollRequest) -> Result<EnrollAnswer, NodeApiError> {
        self.enroll(request).await
    }

    async fn nonce(&self) -> Result<NonceAnswer, NodeApiError> {
        self.nonce().await
    }

    async fn recover(&self, request: &RecoverRequest) -> Result<EnrollAnswer, NodeApiError> {
        self.recover(request).await
    }
}

/// The two methods to get a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EnrollmentMethod {
    Enroll,
    Recover,
}

impl EnrollmentMethod {
    const fn fallback(self) -> Self {
        match self {
            Self::Enroll => Self::Recover,
            Self::Recover => Self::Enroll,
        }
    }

    const fn completed(self) -> &'static str {
        match self {
            Self::Enroll => "enrolled",
            Self::Recover => "recovered",
        }
    }
}

/// An issued identity, and the verifier sets that came with it.
pub(super) struct IssuedIdentity {
    pub(super) identity: AgentIdentity,
    pub(super) verifier_sets: Vec<VerifierSet>,
}

/// An answer, and the key that it certifies.
type CertificateAnswer = (PendingKey, EnrollAnswer);

impl Applicant<'_> {
    /// Requests an identity until the answer is final. The key and the CSR are on disk before the token leaves the machine, and are the
    /// same in every attempt, so that a lost answer is answered again.
    pub(super) async fn apply(&self) -> Result<IssuedIdentity, Fatal> {
        self.apply_to(&NodeApiClient::anonymous(self.config, self.clock)?).await
    }

    async fn apply_to(&self, api: &impl EnrollmentApi) -> Result<IssuedIdentity, Fatal> {
        let token = self.config.enrollment_token.as_ref().ok_or(Fatal::NoEnrollmentToken)?;
        let first =
            if self.identities.has_spent(token)? { EnrollmentMethod::Recover } else { EnrollmentMethod::Enroll };
        let (method, (pending, answer)) = match self.request_until_final(first, api, token).await? {
            Ok(answered) => (first, answered),
            Err(refused) if refused.status() == Some(StatusCode::UNAUTHORIZED) => {
                info!("the token is refused to {first:?}; trying to {:?}", first.fallback());
                let answered = self.request_until_final(first.fallback(), api, token).await?;
                // The refusal of the first method is reported to the operator.
                (first.fallback(), answered.map_err(|_| Fatal::EnrollmentRefused(refused))?)
            }
            Err(refused) => return Err(Fatal::EnrollmentRefused(refused)),
        };
        let identity = self.identities.commit(&pending, &answer, self.clock.now())?;
        if identity.arrived_invalid() {
            warn!(
                error_code = "certificate_invalid",
                certificate_not_before = %identity.not_before,
                certificate_not_after = %identity.not_after,
                "the control plane has issued a certificate that is not valid by its own time; it is used all the same, and not replaced \
                 before an hour"
            );
        }
        info!(
            identity_generation = answer.recovery.identity_generation,
            recoveries_left = answer.recovery.remaining,
            certificate_not_after = %identity.not_after,
            "{}",
            method.completed()
        );
        Ok(IssuedIdentity { identity, verifier_sets: answer.verifier_sets })
    }

    async fn request_until_final(
        &self,
        method: EnrollmentMethod,
        api: &impl EnrollmentApi,
        token: &SecretToken,
    ) -> Result<Result<CertificateAnswer, NodeApiError>, Fatal> {
        let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
        // A nonce that has expired on its way is refused as any other fault is: a machine that slept, or a clock that was set.
        let mut may_have_expired = method == EnrollmentMethod::Recover;
        loop {
            let answered = match method {
                EnrollmentMethod::Enroll => self.enroll(api, token).await?,
                EnrollmentMethod::Recover => self.recover(api, token).await?,
            };
            let error = match answered {
                Ok(answered) => return Ok(Ok(answered)),
                Err(error) => Fatal::of(error).map_or_else(Ok, Err)?,
            };
            if is_final(&error) && !std::mem::take(&mut may_have_expired) {
                return Ok(Err(error));
            }
            let pause = backoff.next(rand::random(), error.retry_after());
            report_failure(&error, "getting an identity", pause);
            tokio::time::sleep(pause).await;
        }
    }

    async fn enroll(
        &self,
        api: &impl EnrollmentApi,
        token: &SecretToken,
    ) -> Result<Result<CertificateAnswer, NodeApiError>, Fatal> {
        let pending = self.identities.pending_enrollment(token)?;
        let request = EnrollRequest {
            enrollment_token: token.clone(),
            csr_pem: pending.csr_pem.clone(),
            recovery_public_key: PublicKey::from(self.recovery_key),
            boot_id: self.boot_id,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL,
            verifier_set_version: self.verifier_set_version,
            inventory: self.inventory.clone().without_later_fields(),
        };
        Ok(api.enroll(&request).await.map(|answer| (pending, answer)))
    }

    async fn recover(
        &self,
        api: &impl EnrollmentApi,
        token: &SecretToken,
    ) -> Result<Result<CertificateAnswer, NodeApiError>, Fatal> {
        let (identity_generation, pending) = self.identities.pending_recovery(token)?;
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

/// Whether a retry with the same token cannot help.
fn is_final(error: &NodeApiError) -> bool {
    // Another replica is upgraded already, or this one will be shortly. The page of a proxy in between says nothing of the token.
    if error.is_from_older_control_plane() || !error.is_from_control_plane() {
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

/// Follows newer verifier sets. A refused set is left to the operator; the trusted set does not change. Returns the set that is trusted from here
/// on, where it is another one, to be stored.
pub(super) fn follow_verifier_sets(verifiers: &mut Verifiers, sets: &[VerifierSet]) -> Option<VerifierSet> {
    let before = verifiers.version();
    if let Err(error) = verifiers.follow(sets) {
        warn!(error_code = "verifier_set_refused", error = chain(&error), "a set of task-signing keys is refused");
    }
    (verifiers.version() > before).then(|| verifiers.current().clone())
}

/// Stores the trusted set. The next agent begins with the stored one, and the control plane sends it those that follow.
pub(super) fn store_verifier_set(identities: &IdentityStore, bundle: &VerifierSet, current: &VerifierSet) {
    if let Err(error) = identities.store_verifiers(bundle, current) {
        warn!(error_code = "node_storage", error = chain(&error), "the task-signing keys cannot be stored");
    }
    info!(version = current.version, "task-signing keys rotated");
}

#[cfg(test)]
mod tests;
