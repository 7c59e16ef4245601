//! The first contact of a node whose clock is off by more than the control plane's certificate is valid.
//!
//! A certificate that is valid at another time proves everything but the time. So the node asks its owner for the time, with a request that has
//! no secret and no certificate of the node, and takes it over where the certificate is valid at that time, and where the time is not before the
//! last one that the node has known. An attacker with an old key of the control plane, whose certificate has expired, can set no node back by this.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::{
    ClientError, NodeApiClient, NodeApiError, TimeDoubt, client_config, date_bounds, http_client, transport_error,
};
use crate::chain;
use crate::server_clock::{ClockReading, FixedTime, TimeBounds, since_boot};

/// A chain has as many certificates at most, each with a validity of its own.
const LONGEST_CHAIN: usize = 4;
/// The machine's clock is tried where it says something else.
const SAME_TIME: TimeDelta = TimeDelta::seconds(10);

impl NodeApiClient {
    /// Corrects the clock by which the control plane's certificate is not valid.
    ///
    /// # Errors
    /// Why the certificate is refused all the same.
    pub(super) async fn correct_clock(
        &self,
        refused: NodeApiError,
        requested_at: Duration,
    ) -> Result<(), NodeApiError> {
        let NodeApiError::CertificateTime { validity, source, .. } = refused else { return Err(refused) };
        let _alone = self.clock.correction().await;
        if self.clock.has_learned_since(requested_at) {
            return Ok(());
        }
        let corrected = match self.time_by_machine_clock().await {
            Some(answer) => Ok(answer),
            None => self.time_by_certificate(validity.nearest()).await,
        };
        match corrected {
            Ok((bounds, at)) => {
                self.clock.adopt(bounds, at);
                Ok(())
            }
            Err(Doubt::OfTime(why)) => Err(NodeApiError::CertificateTime { validity, why, source }),
            Err(Doubt::OfPeer(error)) => Err(error),
        }
    }

    /// A certificate that is valid by the machine's own clock needs no other proof of the time. The node may have known a wrong one, of a
    /// control plane whose clock was ahead.
    async fn time_by_machine_clock(&self) -> Option<ServerAnswer> {
        let local = Utc::now();
        if (local - self.clock.now()).abs() <= SAME_TIME {
            return None;
        }
        let answer = self.answer_at(local).await.ok().flatten()?;
        self.answer_at(answer.0.earliest).await.ok().flatten().map(|_| answer)
    }

    /// `nearest` is within the validity of the certificate that was refused.
    async fn time_by_certificate(&self, nearest: Option<DateTime<Utc>>) -> Result<ServerAnswer, Doubt> {
        let mut at = nearest;
        for _ in 0..LONGEST_CHAIN {
            let Some(time) = at else { break };
            match self.answer_at(time).await {
                Ok(Some(answer)) => return self.verify(answer).await,
                // Another certificate of the chain.
                Err(NodeApiError::CertificateTime { validity, .. }) => at = validity.nearest(),
                Err(error @ NodeApiError::Untrusted(_)) => return Err(Doubt::OfPeer(error)),
                Ok(None) | Err(_) => break,
            }
        }
        Err(Doubt::OfTime(TimeDoubt::NoTime))
    }

    async fn verify(&self, answer: ServerAnswer) -> Result<ServerAnswer, Doubt> {
        let (server, latest) = (answer.0.earliest, answer.0.latest);
        if let Some(last) = self.clock.earliest().filter(|last| latest < *last) {
            return Err(Doubt::OfTime(TimeDoubt::TooEarly { server, last }));
        }
        match self.answer_at(server).await {
            Ok(Some(_)) => Ok(answer),
            Err(NodeApiError::CertificateTime { .. }) => Err(Doubt::OfTime(TimeDoubt::ByServerTime(server))),
            Err(error @ NodeApiError::Untrusted(_)) => Err(Doubt::OfPeer(error)),
            Ok(None) | Err(_) => Err(Doubt::OfTime(TimeDoubt::NoTime)),
        }
    }

    /// The header `Date` of an answer over a connection of its own, whose certificate is verified at this time.
    async fn answer_at(&self, time: DateTime<Utc>) -> Result<Option<ServerAnswer>, NodeApiError> {
        let unusable = |error: ClientError| NodeApiError::Unreadable { why: chain(&error) };
        let tls = client_config(&self.authorities_pem, Arc::new(FixedTime(time))).map_err(unusable)?;
        let client = http_client(tls.with_no_client_auth()).map_err(unusable)?;
        let requested_at = since_boot();
        let response = client.get(&self.base).send().await.map_err(transport_error)?;
        Ok(date_bounds(response.headers(), requested_at).map(|bounds| (bounds, ClockReading::take())))
    }
}

/// The time of an answer, and when it came.
type ServerAnswer = (TimeBounds, ClockReading);

/// Why the time is not corrected.
enum Doubt {
    OfTime(TimeDoubt),
    /// The certificate is refused for another reason, at whatever time.
    OfPeer(NodeApiError),
}
