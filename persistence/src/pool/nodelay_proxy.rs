//! A local proxy to Postgres that sets TCP_NODELAY.
//!
//! The client library leaves Nagle's algorithm on and has no option to turn it off: a statement that needs more than one segment then
//! waits for the server's delayed acknowledgement, up to 40 ms, and every batch of the committer is such a statement. So the library
//! connects to a Unix socket of this process, whose bytes are copied to a connection without delay. TLS goes through unchanged, from
//! the library to the server; the proxy never sees clear text. A socket that others have removed is made again.

use super::socket_folder::SocketFolder;
use crate::outage_log::RetryLog;
use socket2::{SockRef, TcpKeepalive};
use sqlx::postgres::PgConnectOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

/// A server that is unreachable without a reset (its machine has lost power, its address has moved) is given up after so long. Without
/// that a statement would wait for a quarter of an hour, and every reader with it.
const UNRESPONSIVE_AFTER: Duration = Duration::from_secs(10);

/// How often a listener looks for its socket.
const SOCKET_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The same options, through the proxy. An address that is a Unix socket already stays as it is.
pub(super) fn through_nodelay_proxy(options: PgConnectOptions) -> io::Result<PgConnectOptions> {
    if options.get_socket().is_some() || options.get_host().starts_with('/') {
        return Ok(options);
    }
    let mut route = Route::create(options)?;
    route.open()?;
    let options = route.options().clone();
    // For as long as the runtime runs; the folder is removed with it.
    tokio::spawn(async move {
        let _route = route;
        std::future::pending::<()>().await;
    });
    Ok(options)
}

/// One server's proxy. While it is closed, connections are refused, which the library takes for a server that is starting.
pub(super) struct Route {
    folder: Arc<SocketFolder>,
    options: PgConnectOptions,
    server: Arc<str>,
    port: u16,
    /// The listener and its connections; dropped, they are closed.
    forwarding: Option<JoinSet<()>>,
    /// The same of the second socket, for the monitor. It is never closed.
    watching: Option<JoinSet<()>>,
}

impl Route {
    /// A closed proxy to the server that the options name.
    pub(super) fn create(options: PgConnectOptions) -> io::Result<Self> {
        let folder = Arc::new(SocketFolder::create()?);
        let server: Arc<str> = options.get_host().trim_matches(['[', ']']).into();
        let port = options.get_port();
        let options = options.socket(folder.path());
        let route = Self { folder, options, server, port, forwarding: None, watching: None };
        // A socket without a listener refuses connections; where there is none, the library gives up at once.
        drop(UnixListener::bind(route.socket())?);
        Ok(route)
    }

    /// The options of a connection through it.
    pub(super) const fn options(&self) -> &PgConnectOptions {
        &self.options
    }

    pub(super) fn is_open(&self) -> bool {
        self.forwarding.is_some()
    }

    /// Accepts connections from here on.
    pub(super) fn open(&mut self) -> io::Result<()> {
        if !self.is_open() {
            self.folder.restore()?;
            match std::fs::remove_file(self.socket()) {
                // Others have removed it.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => self.forwarding = Some(self.listen(self.socket())?),
            }
        }
        Ok(())
    }

    /// The options of a connection that is forwarded whether or not the proxy is open.
    pub(super) fn watch(&mut self) -> io::Result<PgConnectOptions> {
        let folder = self.folder.path().join("monitor");
        if self.watching.is_none() {
            self.watching = Some(self.listen(folder.join(socket_name(self.port)))?);
        }
        Ok(self.options.clone().socket(folder))
    }

    fn listen(&self, socket: PathBuf) -> io::Result<JoinSet<()>> {
        let folder = Arc::clone(&self.folder);
        let mut listener = folder.restore_socket(&socket)?.ok_or(io::ErrorKind::AddrInUse)?;
        let (server, port) = (Arc::clone(&self.server), self.port);
        let mut forwarding = JoinSet::new();
        forwarding.spawn(async move {
            // Dropped with this task, and so with its connections.
            let mut connections = JoinSet::new();
            let mut check = interval(SOCKET_CHECK_INTERVAL);
            check.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut is_missing = false;
            loop {
                while connections.try_join_next().is_some() {}
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    _ = check.tick() => {
                        restore(&mut listener, &folder, &socket, &mut is_missing);
                        continue;
                    }
                };
                match accepted {
                    Ok((inside, _)) => {
                        let server = Arc::clone(&server);
                        connections.spawn(async move { forward(inside, &server, port).await });
                    }
                    // Out of file descriptors: some will be closed.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        });
        Ok(forwarding)
    }

    /// Closes the listener and every connection.
    pub(super) fn close(&mut self) {
        self.forwarding = None;
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join(socket_name(self.port))
    }
}

/// Listens again where the socket was removed. Open connections stay. `is_missing` after a failed attempt, which is logged once.
fn restore(listener: &mut UnixListener, folder: &SocketFolder, socket: &Path, is_missing: &mut bool) {
    match folder.restore_socket(socket) {
        Ok(None) => *is_missing = false,
        Ok(Some(made)) => {
            (*listener, *is_missing) = (made, false);
            tracing::warn!(path = %socket.display(), "the socket to the database was removed by another program, and is made again");
        }
        Err(error) if !*is_missing => {
            *is_missing = true;
            tracing::error!(%error, path = %socket.display(), "the socket to the database was removed and cannot be made again");
        }
        Err(_) => {}
    }
}

fn socket_name(port: u16) -> String {
    format!(".s.PGSQL.{port}")
}

/// Copies until either side closes. The end of one side ends the other, which is all that the library has to know.
async fn forward(mut inside: UnixStream, server: &str, port: u16) {
    static RETRIES: RetryLog = RetryLog::new("reach Postgres");
    let connected = TcpStream::connect((server, port)).await;
    let ready = connected.and_then(|outside| set_socket_options(&outside).map(|()| outside));
    match ready {
        // The library sees the same end on its side, and handles it.
        Ok(mut outside) => {
            RETRIES.succeeded();
            drop(tokio::io::copy_bidirectional(&mut inside, &mut outside).await);
        }
        // Logged here, since the library only sees that its own socket was closed.
        Err(error) => RETRIES.failed(&format!("{server}:{port}: {error}")),
    }
}

fn set_socket_options(outside: &TcpStream) -> io::Result<()> {
    outside.set_nodelay(true)?;
    let socket = SockRef::from(outside);
    // Sent data must be acknowledged in that time, and an idle peer is probed.
    socket.set_tcp_user_timeout(Some(UNRESPONSIVE_AFTER))?;
    let asking =
        TcpKeepalive::new().with_time(UNRESPONSIVE_AFTER / 2).with_interval(UNRESPONSIVE_AFTER / 5).with_retries(3);
    socket.set_tcp_keepalive(&asking)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn unresponsive_server_is_given_up_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let outside = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        set_socket_options(&outside).unwrap();
        let socket = SockRef::from(&outside);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNRESPONSIVE_AFTER));
        assert!(socket.keepalive().unwrap() && outside.nodelay().unwrap());
        assert!(socket.tcp_keepalive_time().unwrap() < UNRESPONSIVE_AFTER);
    }
}
