//! The certificate's renewal, from half of its lifetime on.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tracing::{info, warn};
use wire::enroll::{NonceAnswer, RenewRequest};

use super::enroll::Applicant;
use super::{Agent, BACKOFF_BASE, Fatal, UnstoredFile, report_failure};
use crate::atomic_file::FileError;
use crate::chain;
use crate::config::AgentConfig;
use crate::full_jitter::Backoff;
use crate::identity::{AgentIdentity, IdentityError, IdentityStore};
use crate::node_api_client::{ClientError, NodeApiClient, NodeApiError};
use crate::server_clock::ServerClock;

const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// A session younger than this is not abandoned because of one refused certificate.
const SESSION_SETTLE_TIME: Duration = Duration::from_secs(2);

/// A certificate that was not valid when it came is not replaced before: the next one would not be valid either, and recoveries are counted.
const RECOVERY_INTERVAL: Duration = Duration::from_secs(3600);

/// A certificate that is due when it comes is not renewed before.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(1);

/// How soon the control plane is asked again about a refused certificate.
const RECHECK_INTERVAL: Duration = Duration::from_secs(5);

/// What was done about refused certificates.
#[derive(Default)]
pub(super) struct RefusalChecks {
    checked_at: Option<Instant>,
    /// The last recovery of a certificate that the control plane does not have.
    recovered_at: Option<Instant>,
}

/// Why there is no new certificate yet.
enum RenewalError {
    Call(NodeApiError),
    /// The disk does not take the key or the certificate; the one in use is valid meanwhile.
    Storage(FileError),
    Fatal(Fatal),
}

impl From<Fatal> for RenewalError {
    fn from(fatal: Fatal) -> Self {
        Self::Fatal(fatal)
    }
}

impl From<IdentityError> for RenewalError {
    fn from(error: IdentityError) -> Self {
        match error {
            IdentityError::Store(error) => Self::Storage(error),
            IdentityError::Unreadable { .. }
            | IdentityError::KeyMismatch { .. }
            | IdentityError::ForeignCertificate { .. }
            | IdentityError::Key(_)
            | IdentityError::Verifiers(_) => Self::Fatal(error.into()),
        }
    }
}

impl Agent {
    pub(super) async fn renew(&self) {
        loop {
            let due_at = self.identity().renew_at(rand::random());
            tokio::select! {
                () = self.clock.sleep_until(due_at) => {}
                () = self.early_renewal_due() => {}
                () = self.stop.cancelled() => return,
            }
            self.renew_within.send_replace(None);
            if !self.renew_once().await || !self.pause(RENEWAL_INTERVAL).await {
                return;
            }
        }
    }

    /// Resolves when the control plane wants the certificate renewed early, after a random part of the window that it grants the fleet.
    async fn early_renewal_due(&self) {
        let mut wanted = self.renew_within.subscribe();
        let Ok(within) = wanted.wait_for(Option::is_some).await.map(|within| within.unwrap_or_default()) else {
            return std::future::pending().await;
        };
        info!(within_seconds = within.as_secs(), "the certificate's authority goes: renewing");
        tokio::time::sleep(within.mul_f64(rand::random())).await;
    }

    /// Retries until there is a new certificate. Returns whether the agent continues.
    async fn renew_once(&self) -> bool {
        let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
        loop {
            let not_after = self.identity().not_after;
            if !self.ensure_valid_certificate().await {
                return false;
            }
            let alone = self.recovering.lock().await;
            if self.identity().not_after != not_after {
                // It was recovered in between.
                return true;
            }
            let api = self.api();
            let renewed = tokio::select! {
                renewed = self.request_renewal(&api) => renewed,
                // The key stays on disk for the next start.
                () = self.stop.cancelled() => return false,
            };
            drop(alone);
            match renewed {
                Ok(identity) => {
                    info!(certificate_not_after = %identity.not_after, "certificate renewed");
                    return true;
                }
                Err(RenewalError::Call(error)) => {
                    if !self.retry_after_failure(&api, error, "renewing the certificate", &mut backoff).await {
                        return false;
                    }
                }
                Err(RenewalError::Storage(error)) => {
                    let error = chain(&error);
                    if self.unstored.is_to_be_logged(UnstoredFile::Certificate, &error) {
                        warn!(
                            error_code = "node_storage",
                            error, "the next certificate cannot be stored; trying again"
                        );
                    }
                    if !self.pause(backoff.next(rand::random(), None)).await {
                        return false;
                    }
                }
                Err(RenewalError::Fatal(fatal)) => {
                    self.fail(fatal);
                    return false;
                }
            }
        }
    }

    async fn request_renewal(&self, api: &NodeApiClient) -> Result<AgentIdentity, RenewalError> {
        let pending = self.with_stored_identity(|identities| identities.pending_renewal()).await?;
        let request = RenewRequest { csr_pem: pending.csr_pem.clone() };
        let mut answer = api.renew(&request).await.map_err(RenewalError::Call)?;
        let (sets, now) = (std::mem::take(&mut answer.verifier_sets), self.clock.now());
        let identity = self.with_stored_identity(move |identities| identities.commit(&pending, &answer, now)).await?;
        self.unstored.retain(|file| *file != UnstoredFile::Certificate);
        self.replace_identity(identity.clone()).map_err(Fatal::from)?;
        self.follow_verifiers(sets).await;
        Ok(identity)
    }

    /// In a thread of its own: the disk may not answer.
    async fn with_stored_identity<T: Send + 'static>(
        &self,
        work: impl FnOnce(&IdentityStore) -> Result<T, IdentityError> + Send + 'static,
    ) -> Result<T, RenewalError> {
        let identities = self.identities.clone();
        let worked = tokio::task::spawn_blocking(move || work(&identities)).await;
        Ok(worked.map_err(|error| Fatal::Runtime(std::io::Error::other(error)))??)
    }

    /// Checks the certificate's expiry before it is presented, and recovers an identity that has expired by the control plane's time. Returns
    /// whether the agent continues.
    pub(super) async fn ensure_valid_certificate(&self) -> bool {
        if !self.identity().is_expired(self.clock.now()) {
            return true;
        }
        let _alone = self.recovering.lock().await;
        let identity = self.identity();
        let has_expired = tokio::select! {
            has_expired = has_expired(&self.config, &self.clock, &identity) => has_expired,
            () = self.stop.cancelled() => return false,
        };
        match has_expired {
            Ok(true) if self.may_recover(&identity) => {}
            Ok(_) => return true,
            Err(error) => return self.handle_recovery(Err(error.into())),
        }
        let recovered = tokio::select! {
            recovered = self.recover(identity.not_after) => recovered,
            () = self.stop.cancelled() => return false,
        };
        self.handle_recovery(recovered)
    }

    /// A peer refused the certificate that `api` presents. If the control plane itself would refuse it, because its authority is not
    /// trusted any more or it is not valid by the control plane's clock, the identity is recovered like an expired one: it cannot be
    /// renewed. Returns whether the agent continues.
    pub(super) async fn replace_refused_certificate(&self, api: &NodeApiClient, refused: &NodeApiError) -> bool {
        // Another loop renews or recovers, and may wait for the disk: the refused request is sent again.
        let Ok(mut checks) = self.recovering.try_lock() else { return true };
        let (identity, is_in_use, age) = {
            let session = self.session.read().unwrap_or_else(PoisonError::into_inner);
            (session.identity.clone(), session.api.has_same_certificate(api), session.since.elapsed())
        };
        // The refused certificate is the previous one, or a replica does not know the new authority yet: resending the request decides
        // it.
        if self.config.enrollment_token.is_none() || !is_in_use || age < SESSION_SETTLE_TIME {
            return true;
        }
        if checks.checked_at.is_some_and(|at| at.elapsed() < RECHECK_INTERVAL) {
            return true;
        }
        checks.checked_at = Some(Instant::now());
        let answer = match NodeApiClient::anonymous(&self.config, &self.clock) {
            Ok(anonymous) => tokio::select! {
                answer = anonymous.nonce() => answer,
                () = self.stop.cancelled() => return false,
            },
            Err(error) => return self.handle_recovery(Err(error.into())),
        };
        match answer {
            Ok(answer) if is_accepted(&identity, &answer, refused) => {
                if refused.is_certificate_forgotten() {
                    return self.replace_forgotten_certificate(&identity, &mut checks).await;
                }
                warn!(
                    error_code = "certificate_not_replaced",
                    "the control plane trusts the certificate's authority, so that recovering would not help: either the certificate was \
                     revoked, and the node's enrollment is to be reissued, or a proxy in front does not know the authority, and is to \
                     be given what `gpuaas node-ca` prints"
                );
                true
            }
            Ok(_) if !self.may_recover(&identity) => true,
            Ok(_) => {
                warn!(
                    certificate_not_after = %identity.not_after,
                    "the control plane refuses the certificate: its authority is not trusted, or it has expired or is not valid yet"
                );
                let recovered = tokio::select! {
                    recovered = self.recover(identity.not_after) => recovered,
                    () = self.stop.cancelled() => return false,
                };
                self.handle_recovery(recovered)
            }
            // The refused call is retried, and then this check runs again.
            Err(_) => true,
        }
    }

    /// The control plane's state lacks the certificate, which is valid: the state was restored from a backup, the certificate is revoked, or a
    /// copy of this machine has recovered. A recovery decides it; one that is refused is no reason to end, since the certificate of a node
    /// whose enrollment was reissued is revoked until the restart command is run. Returns whether the agent continues.
    async fn replace_forgotten_certificate(&self, identity: &AgentIdentity, checks: &mut RefusalChecks) -> bool {
        if checks.recovered_at.is_some_and(|at| at.elapsed() < RECOVERY_INTERVAL) {
            return true;
        }
        checks.recovered_at = Some(Instant::now());
        let recovered = tokio::select! {
            recovered = self.recover(identity.not_after) => recovered,
            () = self.stop.cancelled() => return false,
        };
        match recovered {
            Err(Fatal::EnrollmentRefused(error)) => {
                warn!(
                    error_code = "certificate_not_replaced",
                    error = chain(&error),
                    "the control plane does not have the certificate, and refuses another one: ask an administrator to reissue the node's \
                     enrollment, then run the restart command that comes with it; trying again in an hour"
                );
                true
            }
            recovered => self.handle_recovery(recovered),
        }
    }

    fn may_recover(&self, identity: &AgentIdentity) -> bool {
        let age = self.session.read().unwrap_or_else(PoisonError::into_inner).since.elapsed();
        !identity.arrived_invalid() || age >= RECOVERY_INTERVAL
    }

    fn handle_recovery(&self, recovered: Result<(), Fatal>) -> bool {
        recovered.map_err(|fatal| self.fail(fatal)).is_ok()
    }

    async fn recover(&self, not_after: DateTime<Utc>) -> Result<(), Fatal> {
        if self.config.enrollment_token.is_none() {
            return Err(Fatal::CertificateExpired { not_after });
        }
        warn!(certificate_not_after = %not_after, "recovering the identity");
        let applicant = Applicant {
            config: &self.config,
            clock: &self.clock,
            identities: &self.identities,
            recovery_key: &self.recovery_key,
            boot_id: self.boot_id,
            inventory: self.inventory.clone(),
            verifier_set_version: super::locked(&self.verifiers).version(),
        };
        let issued = applicant.apply().await?;
        self.replace_identity(issued.identity)?;
        self.follow_verifiers(issued.verifier_sets).await;
        Ok(())
    }
}

/// Whether the certificate has expired by the control plane's time, which is requested where it is not known.
pub(super) async fn has_expired(
    config: &AgentConfig,
    clock: &ServerClock,
    identity: &AgentIdentity,
) -> Result<bool, ClientError> {
    if !identity.is_expired(clock.now()) {
        return Ok(false);
    }
    let api = NodeApiClient::anonymous(config, clock)?;
    let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
    while !clock.is_known() {
        // An answer has the time in its header, or in its message where something in between has removed the header.
        let failed = match api.server_time().await {
            Ok(Some(_)) => continue,
            Ok(None) => api.nonce().await.err(),
            Err(error) => Some(error),
        };
        let pause = backoff.next(rand::random(), failed.as_ref().and_then(NodeApiError::retry_after));
        if let Some(error) = &failed {
            report_failure(error, "asking for the time, by which the certificate may have expired,", pause);
        }
        tokio::time::sleep(pause).await;
    }
    Ok(identity.is_expired(clock.now()))
}

/// Whether the control plane would accept the certificate, as far as its authority and validity go. A certificate that was issued while a
/// clock was ahead is not valid yet.
fn is_accepted(identity: &AgentIdentity, answer: &NonceAnswer, refused: &NodeApiError) -> bool {
    if answer.server_time.is_some_and(|now| !identity.is_in_force(now)) {
        return false;
    }
    match (&answer.node_authorities, &identity.authority) {
        (Some(trusted), Some(authority)) => trusted.contains(authority),
        // A control plane older than proxy support does not send its authorities: an alert is its own.
        (Some(_) | None, _) => !matches!(refused, NodeApiError::CertificateRefused(_)),
    }
}
