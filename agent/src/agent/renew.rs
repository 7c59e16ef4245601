//! The certificate's renewal, from half of its life on.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tracing::{info, warn};
use wire::enroll::{NonceAnswer, RenewRequest};

use super::enroll::{Applicant, Way};
use super::{Agent, BACKOFF_BASE, Fatal};
use crate::api::{Api, ApiError};
use crate::backoff::Backoff;
use crate::identity::Identity;

const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// A session so young is not given up because of one refused certificate.
const SETTLED: Duration = Duration::from_secs(2);

/// How soon the control plane is asked again about a certificate that somebody refuses.
const ASKS_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Why there is no new certificate yet.
enum Failed {
    Call(ApiError),
    Fatal(Fatal),
}

impl From<Fatal> for Failed {
    fn from(fatal: Fatal) -> Self {
        Self::Fatal(fatal)
    }
}

impl Agent {
    pub(super) async fn renew(&self) {
        loop {
            let identity = self.identity();
            let wait = (identity.renew_at(rand::random()) - Utc::now()).to_std().unwrap_or(Duration::ZERO);
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.authority_goes() => {}
                () = self.stop.cancelled() => return,
            }
            self.renew_within.send_replace(None);
            if !self.renew_once().await {
                return;
            }
        }
    }

    /// Until the control plane wants the certificate renewed before its time, and a random part of the time that it gives a fleet for it.
    async fn authority_goes(&self) {
        let mut wanted = self.renew_within.subscribe();
        let Ok(within) = wanted.wait_for(Option::is_some).await.map(|within| within.unwrap_or_default()) else {
            return std::future::pending().await;
        };
        info!(within_seconds = within.as_secs(), "the certificate's authority goes: renewing");
        tokio::time::sleep(within.mul_f64(rand::random())).await;
    }

    /// Tries until there is a new certificate. Returns whether the agent goes on.
    async fn renew_once(&self) -> bool {
        let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
        loop {
            let not_after = self.identity().not_after;
            if !self.certificate_holds().await {
                return false;
            }
            if self.identity().not_after != not_after {
                // It had expired and was recovered meanwhile.
                return true;
            }
            let api = self.api();
            let asked = tokio::select! {
                asked = self.ask_for_renewal(&api) => asked,
                // The key waits on disk for the next start.
                () = self.stop.cancelled() => return false,
            };
            match asked {
                Ok(identity) => {
                    info!(certificate_not_after = %identity.not_after, "certificate renewed");
                    return true;
                }
                Err(Failed::Call(error)) => {
                    if !self.recover_from(&api, error, "renewing the certificate", &mut backoff).await {
                        return false;
                    }
                }
                Err(Failed::Fatal(fatal)) => {
                    self.fail(fatal);
                    return false;
                }
            }
        }
    }

    async fn ask_for_renewal(&self, api: &Api) -> Result<Identity, Failed> {
        let pending = self.identities.pending_renewal().map_err(Fatal::from)?;
        let request = RenewRequest { csr_pem: pending.csr_pem.clone() };
        let answer = api.renew(&request).await.map_err(Failed::Call)?;
        let identity = self.identities.commit(&pending, &answer).map_err(Fatal::from)?;
        self.take_identity(identity.clone()).map_err(Fatal::from)?;
        self.follow_verifiers(&answer.verifier_sets);
        Ok(identity)
    }

    /// Looks at the certificate's end before it is shown to anybody, and recovers an identity that has ended. Returns whether the
    /// agent goes on.
    pub(super) async fn certificate_holds(&self) -> bool {
        if !self.identity().is_expired(Utc::now()) {
            return true;
        }
        let _alone = self.recovering.lock().await;
        let identity = self.identity();
        if !identity.is_expired(Utc::now()) {
            return true;
        }
        let recovered = tokio::select! {
            recovered = self.recover(identity.not_after) => recovered,
            () = self.stop.cancelled() => return false,
        };
        self.goes_on_after(recovered)
    }

    /// Somebody did not take the certificate that `api` shows. Where the control plane itself would not, since its authority is not trusted
    /// any more or it is not in force by the control plane's clock, the identity is recovered as an expired one is: there is no way to
    /// renew it. Returns whether the agent goes on.
    pub(super) async fn replace_refused_certificate(&self, api: &Api, refused: &ApiError) -> bool {
        let mut asked_at = self.recovering.lock().await;
        let (identity, is_in_use, age) = {
            let session = self.session.read().unwrap_or_else(PoisonError::into_inner);
            (session.identity.clone(), session.api.is(api), session.since.elapsed())
        };
        // What was refused is the one before, or a replica has not heard of the new authority: the same request decides it.
        if self.config.enrollment_token.is_none() || !is_in_use || age < SETTLED {
            return true;
        }
        if asked_at.is_some_and(|at| at.elapsed() < ASKS_AGAIN_AFTER) {
            return true;
        }
        *asked_at = Some(Instant::now());
        let said = match Api::anonymous(&self.config) {
            Ok(anonymous) => tokio::select! {
                said = anonymous.nonce() => said,
                () = self.stop.cancelled() => return false,
            },
            Err(error) => return self.goes_on_after(Err(error.into())),
        };
        match said {
            Ok(said) if is_good(&identity, &said, refused) => {
                warn!(
                    error_code = "certificate_not_replaced",
                    "the control plane trusts the certificate's authority, so that recovering would not help: either the certificate was \
                     revoked, and the node's enrollment is to be reissued, or a proxy in front does not know the authority, and is to \
                     be given what `gpuaas node-ca` prints"
                );
                true
            }
            Ok(_) => {
                warn!(
                    certificate_not_after = %identity.not_after,
                    "the control plane does not take the certificate: its authority is not trusted, or its time is over or to come"
                );
                let recovered = tokio::select! {
                    recovered = self.recover(identity.not_after) => recovered,
                    () = self.stop.cancelled() => return false,
                };
                self.goes_on_after(recovered)
            }
            // The call that was refused is made again, and then this is asked again.
            Err(_) => true,
        }
    }

    fn goes_on_after(&self, recovered: Result<(), Fatal>) -> bool {
        recovered.map_err(|fatal| self.fail(fatal)).is_ok()
    }

    async fn recover(&self, not_after: DateTime<Utc>) -> Result<(), Fatal> {
        if self.config.enrollment_token.is_none() {
            return Err(Fatal::CertificateExpired { not_after });
        }
        warn!(certificate_not_after = %not_after, "recovering the identity");
        let applicant = Applicant {
            config: &self.config,
            identities: &self.identities,
            recovery_key: &self.recovery_key,
            boot_id: self.boot_id,
            inventory: self.inventory.clone(),
            verifier_set_version: super::held(&self.verifiers).version(),
        };
        let obtained = applicant.apply(Way::Recover).await?;
        self.take_identity(obtained.identity)?;
        self.follow_verifiers(&obtained.verifier_sets);
        Ok(())
    }
}

/// Whether the control plane would take the certificate, as far as its authority and its time go. One that was made under a clock
/// that was ahead is not in force yet.
fn is_good(identity: &Identity, said: &NonceAnswer, refused: &ApiError) -> bool {
    if said.server_time.is_some_and(|now| !identity.is_in_force(now)) {
        return false;
    }
    match (&said.node_authorities, &identity.authority) {
        (Some(trusted), Some(authority)) => trusted.contains(authority),
        // A control plane of before proxies were thought of does not say: an alert is its own.
        (Some(_) | None, _) => !matches!(refused, ApiError::CertificateRefused(_)),
    }
}
