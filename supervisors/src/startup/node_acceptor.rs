//! The TLS acceptor of nodes, which follows the rotation of their authorities and the renewal of the server's certificate without a restart.

use super::listener_certificate::ListenerCertificate;
use arc_swap::ArcSwap;
use edge::tls::tickets::SharedTickets;
use edge::tls::{ServerTls, TlsConfigError, server_config};
use edge::trust::current_keys::Keys;
use rustls::ServerConfig;
use std::sync::{Arc, Mutex, PoisonError};

/// The TLS acceptor of nodes: it admits certificates of the trusted authorities.
pub struct NodeAcceptor {
    tickets: Arc<SharedTickets>,
    /// What the configuration was made of. Its lock is held until the configuration is stored, so that neither change undoes the other.
    parts: Mutex<AcceptorParts>,
    config: Arc<ArcSwap<ServerConfig>>,
}

#[derive(Clone)]
struct AcceptorParts {
    certificate: ListenerCertificate,
    authorities_pem: String,
    fingerprint: [u8; 32],
}

impl NodeAcceptor {
    /// # Errors
    /// Where certificates or keys cannot be used.
    pub fn new(
        certificate: ListenerCertificate,
        tickets: Arc<SharedTickets>,
        keys: &Keys,
    ) -> Result<Self, TlsConfigError> {
        let (authorities_pem, fingerprint) = (keys.node.bundle_pem(), keys.node.fingerprint());
        let parts = AcceptorParts { certificate, authorities_pem, fingerprint };
        let config = Arc::new(ArcSwap::from_pointee(parts.config(&tickets)?));
        Ok(Self { tickets, parts: Mutex::new(parts), config })
    }

    /// Read by the listener at each handshake.
    #[must_use]
    pub fn config(&self) -> Arc<ArcSwap<ServerConfig>> {
        Arc::clone(&self.config)
    }

    /// Admits the certificates of the authorities that these keys trust, from the next handshake on.
    ///
    /// # Errors
    /// As [`NodeAcceptor::new`].
    pub fn update(&self, keys: &Keys) -> Result<(), TlsConfigError> {
        self.change(|parts| {
            (parts.authorities_pem, parts.fingerprint) = (keys.node.bundle_pem(), keys.node.fingerprint());
        })
    }

    /// Presents this certificate, from the next handshake on.
    ///
    /// # Errors
    /// As [`NodeAcceptor::new`]; the certificate of before stays.
    pub fn present(&self, certificate: ListenerCertificate) -> Result<(), TlsConfigError> {
        self.change(|parts| parts.certificate = certificate)
    }

    fn change(&self, change: impl FnOnce(&mut AcceptorParts)) -> Result<(), TlsConfigError> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = parts.clone();
        change(&mut changed);
        self.config.store(Arc::new(changed.config(&self.tickets)?));
        *parts = changed;
        Ok(())
    }
}

impl AcceptorParts {
    fn config(&self, tickets: &SharedTickets) -> Result<ServerConfig, TlsConfigError> {
        server_config(&ServerTls {
            certificate_chain_pem: &self.certificate.chain_pem,
            key_pem: &self.certificate.key_pem,
            client_authorities_pem: Some(&self.authorities_pem),
            tickets: Some(Arc::new(tickets.under(self.fingerprint))),
        })
    }
}
