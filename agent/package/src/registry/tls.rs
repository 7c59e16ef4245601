//! TLS of the client: one provider of cryptography, one trust anchor, and the node's certificate where it has one.

use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// The node's certificate and key, PEM.
#[derive(Debug)]
pub struct ClientIdentity {
    pub certificate_pem: Vec<u8>,
    pub key_pem: secrecy::SecretSlice<u8>,
}

/// A certificate or key that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{0} holds no certificate, PEM")]
    NoCertificate(&'static str),
    #[error("the node's key cannot be read, PEM; install the bootstrap bundle again")]
    Key(#[source] ureq::Error),
}

pub(super) fn config(authorities_pem: &str, identity: Option<&ClientIdentity>) -> Result<TlsConfig, TlsError> {
    let authorities = certificates(authorities_pem.as_bytes(), "the trust anchor of the bundle")?;
    let client = identity.map(client_certificate).transpose()?;
    let config = TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(aws_lc_rs::default_provider()))
        .root_certs(RootCerts::new_with_certs(&authorities))
        .client_cert(client);
    Ok(config.build())
}

fn client_certificate(identity: &ClientIdentity) -> Result<ClientCert, TlsError> {
    use secrecy::ExposeSecret as _;
    let chain = certificates(&identity.certificate_pem, "the node's certificate")?;
    let key = PrivateKey::from_pem(identity.key_pem.expose_secret()).map_err(TlsError::Key)?;
    Ok(ClientCert::new_with_certs(&chain, key))
}

fn certificates(pem: &[u8], what: &'static str) -> Result<Vec<Certificate<'static>>, TlsError> {
    let found = parse_pem(pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let found: Vec<_> = found.collect();
    if found.is_empty() { Err(TlsError::NoCertificate(what)) } else { Ok(found) }
}
