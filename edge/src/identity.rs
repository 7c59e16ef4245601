//! Node identity: the client certificate that was verified by TLS in this process or by a trusted proxy in front of it ([`proxies`]).
//!
//! TLS verified the chain when the connection began, or long before when it was resumed; so the end of the certificate
//! and the node in the path are checked at each request. The node's state and its identity generation are the
//! handler's to check, from the store.

pub mod forwarded;
#[cfg(test)]
mod fuzz;
pub mod ingress;
pub mod proxies;

use std::{fmt, sync::Arc};

use axum::{
    extract::{ConnectInfo, FromRef, FromRequestParts, RawPathParams},
    http::request,
};
use chrono::{DateTime, Utc};
use thiserror::Error;
use uuid::Uuid;
use wire::error::reason;
use x509_parser::{
    certificate::X509Certificate,
    extensions::{GeneralName, ParsedExtension},
    prelude::FromDer,
};

use crate::{
    correlation::Scope,
    error::{ApiError, Code},
    identity::forwarded::ForwardedCertificateError,
    keys::KeysInForce,
    tls::Peer,
};

/// The SPIFFE trust domain of this installation, such as `gpu.example` (SPIFFE-ID, section 2.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustDomain(Arc<str>);

impl TrustDomain {
    /// Lower-case letters, digits, dots, dashes and underscores, at most 255 of them.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let acceptable = (1..=255).contains(&text.len())
            && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_'));
        acceptable.then(|| Self(text.into()))
    }

    /// The name of a node in its certificate.
    #[must_use]
    pub fn node_uri(&self, node_id: Uuid) -> String {
        format!("spiffe://{self}/node/{node_id}")
    }

    fn node_of(&self, uri: &str) -> Option<Uuid> {
        let id = uri.strip_prefix("spiffe://")?.strip_prefix(&*self.0)?.strip_prefix("/node/")?;
        let node_id = Uuid::try_parse(id).ok()?;
        // One id has one spelling.
        (self.node_uri(node_id) == uri).then_some(node_id)
    }
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The content of a node's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeCertificate {
    pub node_id: Uuid,
    /// Lower-case hexadecimal.
    pub serial: String,
    pub not_before: DateTime<Utc>,
    pub not_after: DateTime<Utc>,
    /// The key identifier of the authority that certified it (RFC 5280, section 4.2.1.1), lower-case hexadecimal.
    pub authority: String,
}

/// Why a verified certificate is not a node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NodeCertificateError {
    #[error("the certificate cannot be read")]
    Malformed,
    #[error("the certificate does not name exactly one node of this trust domain")]
    Name,
}

impl NodeCertificate {
    /// Reads a certificate that TLS has verified.
    ///
    /// # Errors
    /// Where it is not one of this trust domain's node certificates.
    pub fn parse(der: &[u8], trust_domain: &TrustDomain) -> Result<Self, NodeCertificateError> {
        let (rest, certificate) = X509Certificate::from_der(der).map_err(|_| NodeCertificateError::Malformed)?;
        if !rest.is_empty() {
            return Err(NodeCertificateError::Malformed);
        }
        let names = certificate
            .subject_alternative_name()
            .map_err(|_| NodeCertificateError::Malformed)?
            .ok_or(NodeCertificateError::Name)?;
        let [GeneralName::URI(uri)] = names.value.general_names.as_slice() else {
            return Err(NodeCertificateError::Name);
        };
        let time = |seconds| DateTime::from_timestamp(seconds, 0).ok_or(NodeCertificateError::Malformed);
        Ok(Self {
            node_id: trust_domain.node_of(uri).ok_or(NodeCertificateError::Name)?,
            serial: hex::encode(certificate.raw_serial()),
            not_before: time(certificate.validity().not_before.timestamp())?,
            not_after: time(certificate.validity().not_after.timestamp())?,
            authority: authority_of(&certificate).unwrap_or_default(),
        })
    }
}

fn authority_of(certificate: &X509Certificate<'_>) -> Option<String> {
    certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::AuthorityKeyIdentifier(authority) => {
            authority.key_identifier.as_ref().map(|id| hex::encode(id.0))
        }
        _ => None,
    })
}

/// Why a node's request is refused with `invalid_node_identity`; `details.reason` of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityRefusal {
    CertificateMissing,
    CertificateUnknown,
    CertificateExpired,
    NodeFenced,
    NodeRemoved,
}

impl IdentityRefusal {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
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
pub fn refuse(reason: IdentityRefusal) -> ApiError {
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
pub struct NodeIdentity {
    pub node_id: Uuid,
    pub serial: String,
    pub not_after: DateTime<Utc>,
    /// As [`NodeCertificate::authority`].
    pub authority: String,
}

impl<S> FromRequestParts<S> for NodeIdentity
where
    S: Send + Sync,
    TrustDomain: FromRef<S>,
    KeysInForce: FromRef<S>,
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
        if !KeysInForce::from_ref(state).load().node.trusts(&certificate.authority) {
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
#[allow(clippy::unwrap_used, clippy::expect_used)]
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

    #[test]
    fn only_canonical_node_uris_of_this_trust_domain_are_accepted() {
        let domain = TrustDomain::parse("gpu.example").unwrap();
        let node_id = Uuid::now_v7();
        assert_eq!(domain.node_of(&domain.node_uri(node_id)), Some(node_id));
        for other in [
            format!("spiffe://gpu.example.evil/node/{node_id}"),
            format!("spiffe://evil/node/{node_id}"),
            format!("spiffe://gpu.example/user/{node_id}"),
            format!("spiffe://gpu.example/node/{node_id}/x"),
            format!("spiffe://gpu.example/node/{}", node_id.simple()),
            format!("spiffe://gpu.example/node/{}", node_id.to_string().to_uppercase()),
            format!("https://gpu.example/node/{node_id}"),
            "spiffe://gpu.example/node/".into(),
        ] {
            assert_eq!(domain.node_of(&other), None, "{other}");
        }
        for bad in ["", "Upper.example", "a/b", "a b", "a:b"] {
            assert_eq!(TrustDomain::parse(bad), None);
        }
    }
}
