//! A way to Postgres on which nothing waits.
//!
//! The client library leaves Nagle's algorithm on and offers no way to turn it off: a statement that needs more than one segment then
//! waits for the server's delayed acknowledgement, up to 40 ms, and every batch of the committer is such a statement. So the library
//! is given a Unix socket of this process, and what it says there is copied to a connection without delay. TLS goes through
//! unchanged, from the library to the server; the hop in between never sees a clear byte.

use socket2::{SockRef, TcpKeepalive};
use sqlx::postgres::PgConnectOptions;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use uuid::Uuid;

/// A server that is gone without a word (its machine has lost power, its address has moved) is given up after so long. Without that a
/// statement would wait for a quarter of an hour, and every reader with it.
const GONE_AFTER: Duration = Duration::from_secs(10);

/// The same options, by way of a socket of our own. A way that is a Unix socket already is left as it is.
pub(super) fn undelayed(options: PgConnectOptions) -> io::Result<PgConnectOptions> {
    if options.get_socket().is_some() || options.get_host().starts_with('/') {
        return Ok(options);
    }
    let folder = Folder::make()?;
    let server: Arc<str> = options.get_host().trim_matches(['[', ']']).into();
    let port = options.get_port();
    let listener = UnixListener::bind(folder.0.join(format!(".s.PGSQL.{port}")))?;
    let options = options.socket(&folder.0);
    tokio::spawn(async move {
        // The folder goes with the task, and the task with the runtime.
        let _folder = folder;
        loop {
            match listener.accept().await {
                Ok((inside, _)) => {
                    let server = Arc::clone(&server);
                    tokio::spawn(async move { carry(inside, &server, port).await });
                }
                // Out of descriptors: those that are open will be given back.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
            }
        }
    });
    Ok(options)
}

/// Until either side is done. An end on one side is an end on the other, and that is all the library has to know.
async fn carry(mut inside: UnixStream, server: &str, port: u16) {
    let connected = TcpStream::connect((server, port)).await;
    let ready = connected.and_then(|outside| prepare(&outside).map(|()| outside));
    match ready {
        // How it ends is the library's to judge: it sees the same end on its side.
        Ok(mut outside) => drop(tokio::io::copy_bidirectional(&mut inside, &mut outside).await),
        // Said here, since the library only sees that its own socket was closed.
        Err(error) => tracing::warn!(%error, server, port, "Postgres cannot be reached"),
    }
}

fn prepare(outside: &TcpStream) -> io::Result<()> {
    outside.set_nodelay(true)?;
    let socket = SockRef::from(outside);
    // What was sent must be acknowledged in that time, and where nothing was sent it is asked whether anybody is there.
    socket.set_tcp_user_timeout(Some(GONE_AFTER))?;
    let asking = TcpKeepalive::new().with_time(GONE_AFTER / 2).with_interval(GONE_AFTER / 5).with_retries(3);
    socket.set_tcp_keepalive(&asking)
}

/// A folder that nobody else may enter.
struct Folder(PathBuf);

impl Folder {
    fn make() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("gpuaas-{}", Uuid::new_v4().simple()));
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Left behind at worst: an empty folder in the place for such.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_server_that_is_gone_without_a_word_is_given_up_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let outside = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        prepare(&outside).unwrap();
        let socket = SockRef::from(&outside);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(GONE_AFTER));
        assert!(socket.keepalive().unwrap() && outside.nodelay().unwrap());
        assert!(socket.tcp_keepalive_time().unwrap() < GONE_AFTER);
    }
}
