//! TLS termination: the configuration here, the listener in [`serve`], session tickets in [`tickets`], and the open connections in
//! [`connections`]. What proxies and balancers in front of it pass on is in [`ingress`], [`proxies`], [`forwarded_client`] and
//! [`forwarded_client_certificate`].
//!
//! | module | what |
//! | --- | --- |
//! | `serve`, `admission`, `connections` | the listener; the admission of connections; the open ones by node |
//! | `tickets`, `certificate_validity` | session tickets; what a file of certificates says of itself |
//! | `ingress`, `proxies`, `forwarded_client`, `forwarded_client_certificate`, `client_network` | what is in front of the listeners, and what it passes on of clients |
//! | `http1` | answers to what hyper cannot parse |

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use chrono::{DateTime, Utc};
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::{NoServerSessionStorage, ProducesTickets, WebPkiClientVerifier, danger::ClientCertVerifier},
};
use thiserror::Error;

use crate::trust::node_certificate::{NodeCertificate, NodeCertificateError, TrustDomain};
use client_network::network_of;
use forwarded_client_certificate::ForwardedCertificateError;
use ingress::Ingress;

pub mod admission;
pub mod certificate_validity;
pub(crate) mod client_network;
pub mod connections;
pub mod forwarded_client;
pub mod forwarded_client_certificate;
#[cfg(test)]
mod fuzz;
mod http1;
pub mod ingress;
pub mod proxies;
pub mod serve;
pub mod tickets;

/// The peer of a request; handlers take it as `ConnectInfo<Peer>`.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Of the client; without its port where it came through a proxy.
    pub address: SocketAddr,
    /// The address is that of a load balancer or proxy which does not name its client: many clients share it.
    is_shared: bool,
    shown: CertificateSource,
    /// Whether the session was resumed from a ticket, in which case the certificate comes out of the ticket.
    pub resumed: bool,
}

/// The source of the client's certificate.
#[derive(Clone, Debug)]
enum CertificateSource {
    /// As TLS verified it when the session began. It is parsed once: the parsed form is a third of the size, and is stored as long as the
    /// connection.
    InTls(Option<Arc<Result<NodeCertificate, NodeCertificateError>>>),
    /// As a trusted proxy forwards it, for this one request.
    ToAProxy(Result<Option<CertificateDer<'static>>, ForwardedCertificateError>),
}

impl Peer {
    /// The peer of a connection; `shown` is its certificate, where nodes use the listener.
    pub(crate) fn new(
        address: SocketAddr,
        shown: Option<Result<NodeCertificate, NodeCertificateError>>,
        resumed: bool,
    ) -> Self {
        Self { address, is_shared: false, shown: CertificateSource::InTls(shown.map(Arc::new)), resumed }
    }

    /// The peer of a connection to a listener behind `ingress`.
    pub(crate) fn connected(
        address: SocketAddr,
        shown: Option<Result<NodeCertificate, NodeCertificateError>>,
        resumed: bool,
        ingress: &Ingress,
    ) -> Self {
        Self { is_shared: ingress.is_balancer(address.ip()), ..Self::new(address, shown, resumed) }
    }

    /// The client that an HTTP proxy in front of this connection names, or all its clients where it names none. The proxy's connections
    /// carry many clients: its port identifies none.
    pub(crate) fn forwarded_for(&self, client: Option<IpAddr>) -> Self {
        let address = client.map_or(self.address, |client| SocketAddr::new(client, 0));
        Self { address, is_shared: client.is_none(), ..self.clone() }
    }

    /// The network that the per-address bounds count this peer against; `None` where many clients share the address.
    pub(crate) fn network(&self) -> Option<IpAddr> {
        (!self.is_shared).then(|| network_of(self.address.ip()))
    }

    /// The peer with the certificate that a proxy forwards for it.
    pub(crate) fn with_forwarded_certificate(
        self,
        certificate: Result<Option<CertificateDer<'static>>, ForwardedCertificateError>,
    ) -> Self {
        Self { shown: CertificateSource::ToAProxy(certificate), ..self }
    }

    /// The client's own certificate; `None` where it presented none.
    ///
    /// # Errors
    /// Where forwarded certificates are not accepted.
    pub(crate) fn certificate(
        &self,
        trust_domain: &TrustDomain,
    ) -> Result<Option<Result<NodeCertificate, NodeCertificateError>>, &ForwardedCertificateError> {
        match &self.shown {
            CertificateSource::InTls(certificate) => Ok(certificate.as_deref().cloned()),
            CertificateSource::ToAProxy(forwarded) => {
                let forwarded = forwarded.as_ref()?;
                Ok(forwarded.as_ref().map(|certificate| NodeCertificate::parse(certificate, trust_domain)))
            }
        }
    }
}

/// Why TLS cannot be set up.
#[derive(Debug, Error)]
pub enum TlsConfigError {
    #[error("the server's certificates cannot be read")]
    Certificates(#[source] rustls::pki_types::pem::Error),
    #[error("the server's private key cannot be read")]
    Key(#[source] rustls::pki_types::pem::Error),
    #[error("the authorities for client certificates cannot be read")]
    ClientAuthorities(#[source] rustls::pki_types::pem::Error),
    #[error("a certificate cannot be read, or its end is not a valid time")]
    Unreadable,
    #[error("the PEM text has no certificate")]
    NoCertificate,
    #[error("the client certificate verifier cannot be set up")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
    #[error("the TLS settings are refused")]
    Settings(#[from] rustls::Error),
}

/// The settings of a listener.
pub struct ServerTls<'a> {
    /// The server's certificate and its intermediates.
    pub certificate_chain_pem: &'a str,
    pub key_pem: &'a str,
    /// Authorities of client certificates (the node CA, and its predecessor while nodes still hold its certificates); without them no
    /// client certificate is requested. A client without one is accepted all the same: routes decide.
    pub client_authorities_pem: Option<&'a str>,
    /// Without it no session is resumed.
    pub tickets: Option<Arc<dyn ProducesTickets>>,
}

/// Builds the settings for rustls.
///
/// # Errors
/// Where certificates or keys cannot be used.
pub fn server_config(settings: &ServerTls<'_>) -> Result<ServerConfig, TlsConfigError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let chain = certificates(settings.certificate_chain_pem, TlsConfigError::Certificates)?;
    let key = PrivateKeyDer::from_pem_slice(settings.key_pem.as_bytes()).map_err(TlsConfigError::Key)?;
    let verifier = match settings.client_authorities_pem {
        None => WebPkiClientVerifier::no_client_auth(),
        Some(pem) => client_verifier(pem)?,
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // Sessions are resumed by tickets alone: another replica cannot see this one's memory.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    match &settings.tickets {
        Some(tickets) => config.ticketer = Arc::clone(tickets),
        None => config.send_tls13_tickets = 0,
    }
    Ok(config)
}

/// When the first certificate of a chain ends: the leaf or one of its intermediates.
///
/// # Errors
/// Where a certificate of the chain cannot be read.
pub fn chain_end(certificate_chain_pem: &str) -> Result<DateTime<Utc>, TlsConfigError> {
    let chain = certificates(certificate_chain_pem, TlsConfigError::Certificates)?;
    let end_of = |certificate: &CertificateDer<'_>| {
        let (_, read) = x509_parser::parse_x509_certificate(certificate).map_err(|_| TlsConfigError::Unreadable)?;
        DateTime::from_timestamp(read.validity().not_after.timestamp(), 0).ok_or(TlsConfigError::Unreadable)
    };
    let ends: Vec<_> = chain.iter().map(end_of).collect::<Result<_, _>>()?;
    ends.into_iter().min().ok_or(TlsConfigError::NoCertificate)
}

/// The verifier of client certificates against these authorities, PEM. A client without a certificate is accepted.
pub(crate) fn client_verifier(authorities_pem: &str) -> Result<Arc<dyn ClientCertVerifier>, TlsConfigError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(authorities_pem, TlsConfigError::ClientAuthorities)? {
        roots.add(authority)?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .allow_unauthenticated()
        .build()
        .map_err(TlsConfigError::Verifier)
}

fn certificates(
    pem: &str,
    unreadable: fn(rustls::pki_types::pem::Error) -> TlsConfigError,
) -> Result<Vec<CertificateDer<'static>>, TlsConfigError> {
    let read: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().map_err(unreadable)?;
    if read.is_empty() { Err(TlsConfigError::NoCertificate) } else { Ok(read) }
}
