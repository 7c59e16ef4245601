//! The TLS acceptor of nodes, which follows the rotation of their authorities without a restart.

use arc_swap::ArcSwap;
use edge::tls::tickets::SharedTickets;
use edge::tls::{ServerTls, TlsConfigError, server_config};
use edge::trust::keys_in_force::Keys;
use rustls::ServerConfig;
use std::sync::Arc;

/// The TLS acceptor of nodes: it admits certificates of the trusted authorities.
pub struct NodeAcceptor {
    certificate_chain_pem: String,
    key_pem: String,
    tickets: SharedTickets,
    config: Arc<ArcSwap<ServerConfig>>,
}

impl NodeAcceptor {
    /// # Errors
    /// Where certificates or keys cannot be used.
    pub fn new(
        certificate_chain_pem: String,
        key_pem: String,
        tickets: SharedTickets,
        keys: &Keys,
    ) -> Result<Self, TlsConfigError> {
        let config =
            Arc::new(ArcSwap::from_pointee(server_config_for(&certificate_chain_pem, &key_pem, &tickets, keys)?));
        Ok(Self { certificate_chain_pem, key_pem, tickets, config })
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
        let config = server_config_for(&self.certificate_chain_pem, &self.key_pem, &self.tickets, keys)?;
        self.config.store(Arc::new(config));
        Ok(())
    }
}

fn server_config_for(
    chain: &str,
    key: &str,
    tickets: &SharedTickets,
    keys: &Keys,
) -> Result<ServerConfig, TlsConfigError> {
    server_config(&ServerTls {
        certificate_chain_pem: chain,
        key_pem: key,
        client_authorities_pem: Some(&keys.node.bundle_pem()),
        tickets: Some(Arc::new(tickets.under(keys.node.fingerprint()))),
    })
}
