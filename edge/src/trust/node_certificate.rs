//! The certificate of a node: its content, and the SPIFFE trust domain in which it names the node.

use std::{fmt, sync::Arc};

use chrono::{DateTime, Utc};
use thiserror::Error;
use uuid::Uuid;
use x509_parser::{
    certificate::X509Certificate,
    extensions::{GeneralName, ParsedExtension},
    prelude::FromDer,
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

#[cfg(test)]
mod tests {
    use super::*;

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
