//! The first identity: a single-use token against a certificate.

use std::time::Duration;

use ed25519_dalek::SigningKey;
use reqwest::StatusCode;
use tracing::{info, warn};
use uuid::Uuid;
use wire::enroll::{EnrollAnswer, EnrollRequest};
use wire::inventory::Inventory;
use wire::{PROTOCOL, PublicKey, VerifierSet, Verifiers};

use super::{BACKOFF_BASE, Fatal, report_failure};
use crate::api::{Api, ApiError};
use crate::backoff::Backoff;
use crate::chain;
use crate::config::Config;
use crate::identity::{Identity, IdentityStore};

const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// A node that has no identity yet.
pub(super) struct Newcomer<'a> {
    pub(super) config: &'a Config,
    pub(super) identities: &'a IdentityStore,
    pub(super) recovery_key: &'a SigningKey,
    pub(super) boot_id: Uuid,
    pub(super) inventory: Inventory,
}

impl Newcomer<'_> {
    /// Enrolls, for as long as it takes. The key and the CSR are on disk before the token leaves the machine, and are the
    /// same in every attempt, so that an answer that was lost is given again.
    pub(super) async fn enroll(&self, verifiers: &mut Verifiers) -> Result<Identity, Fatal> {
        let token = self.config.enrollment_token.as_ref().ok_or(Fatal::NoEnrollmentToken)?;
        let pending = self.identities.pending_enrollment(token)?;
        let api = Api::anonymous(self.config)?;
        let request = EnrollRequest {
            enrollment_token: token.clone(),
            csr_pem: pending.csr_pem.clone(),
            recovery_public_key: PublicKey::from(self.recovery_key),
            boot_id: self.boot_id,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL,
            verifier_set_version: verifiers.version(),
            inventory: self.inventory.clone(),
        };
        let answer = self.ask_until_answered(&api, &request).await?;
        let identity = self.identities.commit(&pending, &answer)?;
        follow(self.identities, &self.config.verifier_set, verifiers, &answer.verifier_sets)?;
        info!(
            identity_generation = answer.recovery.identity_generation,
            certificate_not_after = %identity.not_after,
            "enrolled"
        );
        Ok(identity)
    }

    async fn ask_until_answered(&self, api: &Api, request: &EnrollRequest) -> Result<EnrollAnswer, Fatal> {
        let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
        loop {
            let error = match api.enroll(request).await {
                Ok(answer) => return Ok(answer),
                Err(error) => Fatal::of(error).map_or_else(Ok, Err)?,
            };
            if is_final(&error) {
                return Err(Fatal::EnrollmentRefused(error));
            }
            let pause = backoff.next(rand::random(), error.retry_after());
            report_failure(&error, "enrolling", pause);
            tokio::time::sleep(pause).await;
        }
    }
}

/// Whether asking again with the same token cannot help.
fn is_final(error: &ApiError) -> bool {
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
