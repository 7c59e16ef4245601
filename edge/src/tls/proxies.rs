//! The trusted proxies in front of the node API.

use std::{net::IpAddr, sync::Arc};

use arc_swap::ArcSwap;
use axum::http::HeaderMap;
use ipnet::IpNet;
use rustls::{
    CertificateError,
    pki_types::{CertificateDer, UnixTime},
    server::danger::ClientCertVerifier,
};

use super::forwarded_client::ForwardedClient;
use super::forwarded_client_certificate::{ForwardedCertificateError, Forwarding, strip};
use super::ingress::{ClientAddressHeader, Ingress, is_within};
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
    fn trusted_identity(&self, peer: &Peer, headers: &HeaderMap, header: ClientAddressHeader) -> Peer {
        let certificate = self.forwarding.read(headers).and_then(|forwarded| match forwarded {
            Some(certificate) => self.verify(&certificate).map(|()| Some(certificate)),
            None => Ok(None),
        });
        named_client(peer, headers, header, |address| self.trusts(address)).with_forwarded_certificate(certificate)
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

/// The client that the proxy of this connection names. One that it names unreadably counts against the proxy's own address: no bound is
/// switched off.
fn named_client(
    proxy: &Peer,
    headers: &HeaderMap,
    header: ClientAddressHeader,
    is_proxy: impl Fn(IpAddr) -> bool,
) -> Peer {
    match ForwardedClient::of(headers, header, is_proxy) {
        ForwardedClient::Address(address) => proxy.forwarded_for(Some(address)),
        ForwardedClient::Unnamed => proxy.forwarded_for(None),
        ForwardedClient::Unreadable(entry) => {
            ForwardedClient::note_unreadable(&entry, proxy.address.ip(), header);
            proxy.clone()
        }
    }
}

/// The peer of a request: on a trusted proxy's connection the forwarded client, else the peer of the connection. Certificate headers are
/// removed.
pub(crate) fn peer_of(proxies: Option<&Proxies>, ingress: &Ingress, peer: &Peer, headers: &mut HeaderMap) -> Peer {
    let address = peer.address.ip();
    let notified = match proxies {
        Some(proxies) if proxies.trusts(address) => proxies.trusted_identity(peer, headers, ingress.header),
        Some(_) | None if ingress.is_proxy(address) => {
            named_client(peer, headers, ingress.header, |address| ingress.is_proxy(address))
        }
        Some(_) | None => peer.clone(),
    };
    strip(headers);
    notified
}
