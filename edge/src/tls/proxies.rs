//! The trusted proxies in front of the node API.

use std::{net::IpAddr, net::SocketAddr, sync::Arc};

use arc_swap::ArcSwap;
use axum::http::HeaderMap;
use ipnet::IpNet;
use rustls::{
    CertificateError,
    pki_types::{CertificateDer, UnixTime},
    server::danger::ClientCertVerifier,
};

use super::forwarded_client_certificate::{ForwardedCertificateError, Forwarding, strip};
use super::ingress::{Ingress, forwarded_client, is_within};
use crate::tls::{Peer, TlsConfigError, client_verifier};

/// Proxies by their networks, and how they forward a client's certificate.
///
/// A connection from one of the networks is a proxy's: the certificate is the one in its header, and no other. A connection from anywhere
/// else is a node's own, and certificate headers on it are dropped.
#[derive(Debug)]
pub struct Proxies {
    forwarding: Forwarding,
    networks: Vec<IpNet>,
    /// The authorities of node certificates: a proxy may trust others.
    verifier: ArcSwap<Arc<dyn ClientCertVerifier>>,
}

impl Proxies {
    /// # Errors
    /// Where the authorities cannot be read.
    pub fn new(
        forwarding: Forwarding,
        networks: Vec<IpNet>,
        client_authorities_pem: &str,
    ) -> Result<Self, TlsConfigError> {
        let verifier = ArcSwap::from_pointee(client_verifier(client_authorities_pem)?);
        Ok(Self { forwarding, networks, verifier })
    }

    /// Verifies against these authorities from now on.
    ///
    /// # Errors
    /// Where they cannot be read: then those of before hold.
    pub fn trust(&self, client_authorities_pem: &str) -> Result<(), TlsConfigError> {
        self.verifier.store(Arc::new(client_verifier(client_authorities_pem)?));
        Ok(())
    }

    /// The peer of a request with these headers over the connection of `peer`.
    fn trusted_identity(&self, peer: &Peer, headers: &HeaderMap) -> Peer {
        let certificate = self.forwarding.read(headers).and_then(|forwarded| match forwarded {
            Some(certificate) => self.verify(&certificate).map(|()| Some(certificate)),
            None => Ok(None),
        });
        // The proxy's connections carry many clients: its port identifies none.
        let address = forwarded_client(headers, |address| self.trusts(address))
            .map_or(peer.address, |address| SocketAddr::new(address, 0));
        peer.behind_a_proxy(address, certificate)
    }

    pub(crate) fn trusts(&self, address: IpAddr) -> bool {
        is_within(&self.networks, address)
    }

    fn verify(&self, certificate: &CertificateDer<'_>) -> Result<(), ForwardedCertificateError> {
        let verified = self.verifier.load().verify_client_cert(certificate, &[], UnixTime::now());
        match verified {
            Ok(_) => Ok(()),
            Err(rustls::Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            )) => Err(ForwardedCertificateError::Expired),
            Err(error) => Err(ForwardedCertificateError::Unverified(error.to_string())),
        }
    }
}

/// The peer of a request: on a trusted proxy's connection the forwarded client, else the peer of the connection. Certificate headers are
/// removed.
pub(crate) fn peer_of(proxies: Option<&Proxies>, ingress: &Ingress, peer: &Peer, headers: &mut HeaderMap) -> Peer {
    let address = peer.address.ip();
    let notified = match proxies {
        Some(proxies) if proxies.trusts(address) => proxies.trusted_identity(peer, headers),
        Some(_) | None if ingress.is_proxy(address) => {
            peer.forwarded_for(forwarded_client(headers, |address| ingress.is_proxy(address)))
        }
        Some(_) | None => peer.clone(),
    };
    strip(headers);
    notified
}
