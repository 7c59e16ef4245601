//! A listener behind TLS, for servers of a test.

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// A listener that terminates TLS.
pub struct TlsListener {
    listener: TcpListener,
    tls: TlsAcceptor,
}

impl TlsListener {
    /// Listens on a free port of this machine.
    ///
    /// # Errors
    /// If certificate or key cannot be read, or there is no free port.
    pub async fn bind(certificate: &Path, key: &Path) -> anyhow::Result<Self> {
        let chain = CertificateDer::pem_file_iter(certificate)?.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(key)?;
        let tls = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        Ok(Self { listener, tls: TlsAcceptor::from(Arc::new(tls)) })
    }

    /// # Errors
    /// If it is closed.
    pub fn port(&self) -> std::io::Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, address)) = self.listener.accept().await else { continue };
            let _ = stream.set_nodelay(true);
            if let Ok(stream) = self.tls.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
