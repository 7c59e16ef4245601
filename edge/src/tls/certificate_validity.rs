//! What a file of certificates says of itself, for operators' checks: whose they are, when they end, and whether a client accepts them.

use super::{TlsConfigError, certificates};
use chrono::{DateTime, Utc};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{ServerName, UnixTime};
use std::sync::Arc;

/// One certificate of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateValidity {
    pub subject: String,
    pub begins_at: DateTime<Utc>,
    pub ends_at: DateTime<Utc>,
}

/// The certificates of a file, in its order.
///
/// # Errors
/// Where one of them cannot be read, or there is none.
pub fn validities(pem: &str) -> Result<Vec<CertificateValidity>, TlsConfigError> {
    let read = |der: &rustls::pki_types::CertificateDer<'_>| {
        let (_, read) = x509_parser::parse_x509_certificate(der).map_err(|_| TlsConfigError::Unreadable)?;
        let at = |seconds| DateTime::from_timestamp(seconds, 0).ok_or(TlsConfigError::Unreadable);
        Ok(CertificateValidity {
            subject: read.subject().to_string(),
            begins_at: at(read.validity().not_before.timestamp())?,
            ends_at: at(read.validity().not_after.timestamp())?,
        })
    };
    certificates(pem, TlsConfigError::Certificates)?.iter().map(read).collect()
}

/// Whether a client that trusts these authorities alone accepts the chain for the host, at this time.
///
/// # Errors
/// Why it does not.
pub fn accepts(authorities_pem: &str, chain_pem: &str, host: &str, at: DateTime<Utc>) -> Result<(), TlsConfigError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(authorities_pem, TlsConfigError::Certificates)? {
        roots.add(authority)?;
    }
    let chain = certificates(chain_pem, TlsConfigError::Certificates)?;
    let (leaf, intermediates) = chain.split_first().ok_or(TlsConfigError::NoCertificate)?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map_err(TlsConfigError::Verifier)?;
    let host = host.trim_matches(['[', ']']).to_owned();
    let name = ServerName::try_from(host).map_err(|_| TlsConfigError::Unreadable)?;
    let seconds = u64::try_from(at.timestamp()).unwrap_or_default();
    let at = UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
    verifier.verify_server_cert(leaf, intermediates, &name, &[], at)?;
    Ok(())
}
