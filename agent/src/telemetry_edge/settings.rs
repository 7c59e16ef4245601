//! The edge's configuration, from the environment alone.

use crate::atomic_file::{self, FileError};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

const LISTEN: &str = "SVC_TELEMETRY_EDGE_LISTEN";
const UPSTREAM: &str = "SVC_TELEMETRY_EDGE_UPSTREAM";
const CERT_FILE: &str = "SVC_TELEMETRY_EDGE_CERT_FILE";
const KEY_FILE: &str = "SVC_TELEMETRY_EDGE_KEY_FILE";
const CLIENT_CA_FILE: &str = "SVC_TELEMETRY_EDGE_CLIENT_CA_FILE";
const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 19999);
const DEFAULT_UPSTREAM: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 19998);

/// A complete configuration.
#[derive(Clone, Debug)]
pub struct EdgeConfig {
    pub listen: SocketAddr,
    /// The machine's telemetry agent.
    pub upstream: SocketAddr,
    /// `None`: clear text.
    pub tls: Option<Arc<ServerConfig>>,
    /// Whether everything but the health is for clients with a certificate alone.
    pub requires_client: bool,
}

/// Why the edge cannot start, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum EdgeConfigError {
    #[error("{name} is no address with a port, as {example}")]
    Address { name: &'static str, example: SocketAddr },
    #[error("{UPSTREAM} is {0}, which is not on this machine; the telemetry agent listens on the loopback")]
    ForeignUpstream(SocketAddr),
    #[error(
        "{missing} is not set; client certificates need TLS, and TLS needs {CERT_FILE} and {KEY_FILE}: a certificate for this machine's \
         name, and its key"
    )]
    Incomplete { missing: &'static str },
    #[error("{name} names {}, which is not there", path.display())]
    NoFile { name: &'static str, path: PathBuf },
    #[error("{name} holds nothing that can be used: {why}")]
    Unusable { name: &'static str, why: String },
    #[error(transparent)]
    Store(#[from] FileError),
}

impl EdgeConfig {
    /// # Errors
    /// [`EdgeConfigError`] says what is missing or wrong, and what to do.
    pub fn gather(environment: impl Fn(&str) -> Option<String>) -> Result<Self, EdgeConfigError> {
        let get = |name: &str| environment(name).filter(|value| !value.is_empty());
        let address = |name: &'static str, example: SocketAddr| match get(name) {
            Some(text) => text.parse().map_err(|_| EdgeConfigError::Address { name, example }),
            None => Ok(example),
        };
        let (listen, upstream) = (address(LISTEN, DEFAULT_LISTEN)?, address(UPSTREAM, DEFAULT_UPSTREAM)?);
        if !upstream.ip().is_loopback() {
            return Err(EdgeConfigError::ForeignUpstream(upstream));
        }
        let file = |name: &'static str| match get(name).map(PathBuf::from) {
            None => Ok(None),
            Some(path) => match atomic_file::read_if_there(&path)? {
                Some(text) => Ok(Some(text)),
                None => Err(EdgeConfigError::NoFile { name, path }),
            },
        };
        let (cert, key, client_ca) = (file(CERT_FILE)?, file(KEY_FILE)?, file(CLIENT_CA_FILE)?);
        let requires_client = client_ca.is_some();
        let tls = match (cert, key, client_ca) {
            (None, None, None) => None,
            (Some(cert), Some(key), client_ca) => Some(Arc::new(server(&cert, &key, client_ca.as_deref())?)),
            (None, _, _) => return Err(EdgeConfigError::Incomplete { missing: CERT_FILE }),
            (Some(_), None, _) => return Err(EdgeConfigError::Incomplete { missing: KEY_FILE }),
        };
        Ok(Self { listen, upstream, tls, requires_client })
    }
}

fn server(cert: &str, key: &str, client_ca: Option<&str>) -> Result<ServerConfig, EdgeConfigError> {
    let unusable = |name: &'static str| move |why: String| EdgeConfigError::Unusable { name, why };
    let chain = certificates(cert).map_err(unusable(CERT_FILE))?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| unusable(KEY_FILE)(error.to_string()))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| unusable(CERT_FILE)(error.to_string()))?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(authorities) => {
            let unusable = unusable(CLIENT_CA_FILE);
            let mut roots = RootCertStore::empty();
            for authority in certificates(authorities).map_err(&unusable)? {
                roots.add(authority).map_err(|error| unusable(error.to_string()))?;
            }
            // Health is for everyone, so the certificate is asked for here, and required where the request is known.
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .allow_unauthenticated()
                .build()
                .map_err(|error| unusable(error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut server = builder.with_single_cert(chain, key).map_err(|error| unusable(CERT_FILE)(error.to_string()))?;
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(server)
}

fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match all {
        Ok(all) if all.is_empty() => Err("there is no certificate in it".to_owned()),
        Ok(all) => Ok(all),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn gather(variables: &[(&str, &str)]) -> Result<EdgeConfig, EdgeConfigError> {
        let variables: BTreeMap<_, _> = variables.iter().copied().collect();
        EdgeConfig::gather(|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn addresses_have_the_specified_defaults_and_the_agent_is_on_this_machine() {
        let config = gather(&[]).unwrap();
        assert_eq!(
            (config.listen.to_string(), config.upstream.to_string()),
            ("0.0.0.0:19999".into(), "127.0.0.1:19998".into())
        );
        assert!(config.tls.is_none() && !config.requires_client);
        assert!(gather(&[(LISTEN, "[::1]:1")]).is_ok());
        assert!(matches!(gather(&[(LISTEN, "19999")]), Err(EdgeConfigError::Address { name: LISTEN, .. })));
        for foreign in ["10.0.0.1:80", "169.254.169.254:80", "0.0.0.0:1"] {
            assert!(matches!(gather(&[(UPSTREAM, foreign)]), Err(EdgeConfigError::ForeignUpstream(_))), "{foreign}");
        }
    }

    #[test]
    fn client_authority_without_a_certificate_of_its_own_is_refused() {
        let here = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let missing = gather(&[(CLIENT_CA_FILE, here)]).unwrap_err();
        assert!(matches!(missing, EdgeConfigError::Incomplete { missing: CERT_FILE }), "{missing}");
        let missing = gather(&[(CERT_FILE, here)]).unwrap_err();
        assert!(matches!(missing, EdgeConfigError::Incomplete { missing: KEY_FILE }), "{missing}");
        let unusable = gather(&[(CERT_FILE, here), (KEY_FILE, here)]).unwrap_err();
        assert!(matches!(unusable, EdgeConfigError::Unusable { name: CERT_FILE, .. }), "{unusable}");
        assert!(matches!(gather(&[(CLIENT_CA_FILE, "/nowhere")]), Err(EdgeConfigError::NoFile { .. })));
    }
}
