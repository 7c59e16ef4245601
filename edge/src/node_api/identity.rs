//! Node identity: the client certificate that was verified by TLS in this process or by a trusted proxy in front of it
//! ([`crate::tls::proxies`]).
//!
//! TLS verified the chain when the connection began, or long before when it was resumed; so the end of the certificate
//! and the node in the path are checked at each request. The node's state and its identity generation are the
//! handler's to check, from the store.

use axum::{
    extract::{ConnectInfo, FromRef, FromRequestParts, RawPathParams},
    http::request,
};
use chrono::{DateTime, Utc};
use uuid::Uuid;
use wire::error::reason;

use crate::http::correlation::Scope;
use crate::http::error::{ApiError, Code};
use crate::tls::{Peer, forwarded_client_certificate::ForwardedCertificateError};
use crate::trust::current_keys::CurrentKeys;
use crate::trust::node_certificate::{NodeCertificate, TrustDomain};

/// Why a node's request is refused with `invalid_node_identity`; `details.reason` of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdentityRefusal {
    CertificateMissing,
    CertificateUnknown,
    CertificateExpired,
    NodeFenced,
    NodeRemoved,
}

impl IdentityRefusal {
    #[must_use]
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::CertificateMissing => reason::CERTIFICATE_MISSING,
            Self::CertificateUnknown => reason::CERTIFICATE_UNKNOWN,
            Self::CertificateExpired => reason::CERTIFICATE_EXPIRED,
            Self::NodeFenced => reason::NODE_FENCED,
            Self::NodeRemoved => reason::NODE_REMOVED,
        }
    }
}

/// The response to a node that is not authenticated.
#[must_use]
pub(crate) fn refuse(reason: IdentityRefusal) -> ApiError {
    let message = match reason {
        IdentityRefusal::CertificateMissing => {
            "This route needs the node's client certificate; connect with the one from enrollment."
        }
        IdentityRefusal::CertificateUnknown => {
            "The client certificate is not this node's current one; enroll again or recover."
        }
        IdentityRefusal::CertificateExpired => "The node's certificate has expired; recover with the enrollment token.",
        IdentityRefusal::NodeFenced => {
            "The node is fenced until the release of its allocation is settled; ask the operator for retry-release."
        }
        IdentityRefusal::NodeRemoved => "The node has been removed; register the machine as a new node.",
    };
    ApiError::new(Code::InvalidNodeIdentity, message).detail("reason", reason.as_str())
}

/// The response to a node whose forwarded certificate is not accepted.
fn refuse_forwarded(why: &ForwardedCertificateError) -> ApiError {
    let refused = match why {
        ForwardedCertificateError::Expired => refuse(IdentityRefusal::CertificateExpired),
        ForwardedCertificateError::Unverified(_) => refuse(IdentityRefusal::CertificateUnknown),
        // The node can do nothing about it: its operator reads the cause in the log.
        ForwardedCertificateError::Twice
        | ForwardedCertificateError::HopByHop
        | ForwardedCertificateError::TooLong
        | ForwardedCertificateError::NotText
        | ForwardedCertificateError::NotAByteSequence
        | ForwardedCertificateError::NotOneElement
        | ForwardedCertificateError::NoCertificate
        | ForwardedCertificateError::NotEncoded
        | ForwardedCertificateError::NotOneCertificate => {
            let message = "The proxy in front did not forward exactly one client certificate; its operator compares its \
                           configuration with deploy/ingress.";
            ApiError::new(Code::InvalidNodeIdentity, message)
                .detail("reason", IdentityRefusal::CertificateUnknown.as_str())
        }
    };
    refused.because(why.clone())
}

/// The node that makes a request: certified, not expired now, and the one that the path names (as `id` or `node_id`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeIdentity {
    pub(crate) node_id: Uuid,
    pub(crate) serial: String,
    pub(crate) not_after: DateTime<Utc>,
    /// As [`NodeCertificate::authority`].
    pub(crate) authority: String,
}

impl<S> FromRequestParts<S> for NodeIdentity
where
    S: Send + Sync,
    TrustDomain: FromRef<S>,
    CurrentKeys: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let shown = match parts.extensions.get::<ConnectInfo<Peer>>() {
            Some(ConnectInfo(peer)) => peer.certificate(&TrustDomain::from_ref(state)).map_err(refuse_forwarded)?,
            None => return Err(ApiError::internal("a node route is served without TLS")),
        };
        let certificate = shown
            .ok_or_else(|| refuse(IdentityRefusal::CertificateMissing))?
            .map_err(|cause| refuse(IdentityRefusal::CertificateUnknown).because(cause))?;
        let params = RawPathParams::from_request_parts(parts, state).await.map_err(ApiError::internal)?;
        let named = params.iter().find(|(key, _)| matches!(*key, "id" | "node_id")).map(|(_, value)| value.to_owned());
        let named = named.ok_or_else(|| ApiError::internal("a node route names no node"))?;
        // A session that began while its authority was trusted is not verified again.
        if !CurrentKeys::from_ref(state).load().node.trusts(&certificate.authority) {
            return Err(refuse(IdentityRefusal::CertificateUnknown).because("its authority is retired"));
        }
        let identity = admit(certificate, &named, Utc::now())?;
        if let Some(scope) = parts.extensions.get::<Scope>() {
            scope.record_resource(format_args!("node/{}", identity.node_id));
        }
        Ok(identity)
    }
}

fn admit(certificate: NodeCertificate, named: &str, now: DateTime<Utc>) -> Result<NodeIdentity, ApiError> {
    let named = Uuid::try_parse(named).map_err(|_| {
        ApiError::invalid_request("The node id in the path cannot be read: expected a UUID.").detail("field", "id")
    })?;
    if named != certificate.node_id {
        return Err(refuse(IdentityRefusal::CertificateUnknown)
            .because(format!("certificate of {} used for {named}", certificate.node_id)));
    }
    if now >= certificate.not_after {
        return Err(refuse(IdentityRefusal::CertificateExpired));
    }
    if now < certificate.not_before {
        return Err(refuse(IdentityRefusal::CertificateUnknown).because("the certificate is not valid yet"));
    }
    let NodeCertificate { node_id, serial, not_after, authority, .. } = certificate;
    Ok(NodeIdentity { node_id, serial, not_after, authority })
}

#[cfg(test)]
mod tests {
    use chrono::Duration;

    use super::*;

    fn certificate(node_id: Uuid) -> NodeCertificate {
        let now = Utc::now();
        NodeCertificate {
            node_id,
            serial: "0a".into(),
            not_before: now - Duration::minutes(1),
            not_after: now + Duration::hours(24),
            authority: "0b".into(),
        }
    }

    fn reason(result: Result<NodeIdentity, ApiError>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.code(), Code::InvalidNodeIdentity);
        error.details()["reason"].as_str().unwrap().to_owned()
    }

    #[test]
    fn node_is_admitted_on_its_own_path_while_its_certificate_is_valid() {
        let node_id = Uuid::now_v7();
        let good = certificate(node_id);
        assert_eq!(admit(good.clone(), &node_id.to_string(), Utc::now()).unwrap().node_id, node_id);
        assert_eq!(reason(admit(good.clone(), &Uuid::now_v7().to_string(), Utc::now())), "certificate_unknown");
        assert_eq!(reason(admit(good.clone(), &node_id.to_string(), good.not_after)), "certificate_expired");
        assert_eq!(
            reason(admit(good.clone(), &node_id.to_string(), good.not_before - Duration::seconds(1))),
            "certificate_unknown"
        );
        assert_eq!(admit(good, "17", Utc::now()).unwrap_err().code(), Code::InvalidRequest);
    }
}
