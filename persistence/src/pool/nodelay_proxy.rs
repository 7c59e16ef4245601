//! A local proxy to Postgres that sets TCP_NODELAY.
//!
//! The client library leaves Nagle's algorithm on and has no option to turn it off: a statement that needs more than one segment then
//! waits for the server's delayed acknowledgement, up to 40 ms, and every batch of the committer is such a statement. So the library
//! connects to a Unix socket of this process, whose bytes are copied to a connection without delay. TLS goes through unchanged, from
//! the library to the server; the proxy never sees clear text.

use socket2::{SockRef, TcpKeepalive};
use sqlx::postgres::PgConnectOptions;
use std::fs::File;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use uuid::Uuid;

/// A server that is unreachable without a reset (its machine has lost power, its address has moved) is given up after so long. Without
/// that a statement would wait for a quarter of an hour, and every reader with it.
const UNRESPONSIVE_AFTER: Duration = Duration::from_secs(10);

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
    folder: SocketFolder,
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
        let folder = SocketFolder::make_in_first(&[&std::env::temp_dir(), Path::new(SHARED_MEMORY)])?;
        let server: Arc<str> = options.get_host().trim_matches(['[', ']']).into();
        let port = options.get_port();
        let options = options.socket(&folder.path);
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
            std::fs::remove_file(self.socket())?;
            self.forwarding = Some(self.listen(&self.socket())?);
        }
        Ok(())
    }

    /// The options of a connection that is forwarded whether or not the proxy is open.
    pub(super) fn watch(&mut self) -> io::Result<PgConnectOptions> {
        let folder = self.folder.path.join("monitor");
        if self.watching.is_none() {
            std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
            self.watching = Some(self.listen(&folder.join(socket_name(self.port)))?);
        }
        Ok(self.options.clone().socket(folder))
    }

    fn listen(&self, socket: &Path) -> io::Result<JoinSet<()>> {
        let listener = UnixListener::bind(socket)?;
        let (server, port) = (Arc::clone(&self.server), self.port);
        let mut forwarding = JoinSet::new();
        forwarding.spawn(async move {
            // Dropped with this task, and so with its connections.
            let mut connections = JoinSet::new();
            loop {
                while connections.try_join_next().is_some() {}
                match listener.accept().await {
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
        self.folder.path.join(socket_name(self.port))
    }
}

fn socket_name(port: u16) -> String {
    format!(".s.PGSQL.{port}")
}

/// Copies until either side closes. The end of one side ends the other, which is all that the library has to know.
async fn forward(mut inside: UnixStream, server: &str, port: u16) {
    let connected = TcpStream::connect((server, port)).await;
    let ready = connected.and_then(|outside| set_socket_options(&outside).map(|()| outside));
    match ready {
        // The library sees the same end on its side, and handles it.
        Ok(mut outside) => drop(tokio::io::copy_bidirectional(&mut inside, &mut outside).await),
        // Logged here, since the library only sees that its own socket was closed.
        Err(error) => tracing::warn!(%error, server, port, "Postgres cannot be reached"),
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

/// Where a container has a file system of its own that can be written, even if it has no temporary folder.
const SHARED_MEMORY: &str = "/dev/shm";

/// The names of the folders, in the temporary directory.
const FOLDER_PREFIX: &str = "gpuaas-postgres-";

/// A folder that only its owner may enter. Its lock file is locked while its process lives: the kernel unlocks it, however that ends.
struct SocketFolder {
    path: PathBuf,
    lock: File,
}

impl SocketFolder {
    /// In the first of these folders that can be used.
    fn make_in_first(folders: &[&Path]) -> io::Result<Self> {
        let mut refused = Vec::new();
        for folder in folders {
            match Self::make(folder) {
                Ok(made) => return Ok(made),
                Err(error) => refused.push(format!("{}: {error}", folder.display())),
            }
        }
        let refused = refused.join("; ");
        Err(io::Error::other(format!(
            "there is no folder for its socket ({refused}): mount one, and name it in TMPDIR"
        )))
    }

    fn make(temporary: &Path) -> io::Result<Self> {
        remove_abandoned(temporary);
        let id = Uuid::new_v4().simple();
        // It gets its name when it is locked, so that no other process takes it for an abandoned one.
        let unlocked = temporary.join(format!("new-{FOLDER_PREFIX}{id}"));
        std::fs::DirBuilder::new().mode(0o700).create(&unlocked)?;
        let lock = File::create_new(unlocked.join("lock"))?;
        lock.lock()?;
        let path = temporary.join(format!("{FOLDER_PREFIX}{id}"));
        std::fs::rename(&unlocked, &path)?;
        Ok(Self { path, lock })
    }
}

impl Drop for SocketFolder {
    fn drop(&mut self) {
        // At worst it stays until another process starts.
        let _ = self.lock.unlock();
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Removes the folders of processes that were killed. What cannot be read or removed belongs to another user.
fn remove_abandoned(temporary: &Path) {
    for folder in std::fs::read_dir(temporary).into_iter().flatten().flatten() {
        if folder.file_name().to_string_lossy().starts_with(FOLDER_PREFIX)
            && let Ok(lock) = File::open(folder.path().join("lock"))
            && lock.try_lock().is_ok()
        {
            let _ = std::fs::remove_dir_all(folder.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[test]
    fn folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays() {
        let temporary = tempfile::tempdir().unwrap();
        let alive = SocketFolder::make(temporary.path()).unwrap();
        let killed = SocketFolder::make(temporary.path()).unwrap();
        killed.lock.unlock().unwrap();
        let next = SocketFolder::make(temporary.path()).unwrap();
        assert!(!killed.path.exists() && alive.path.exists() && next.path.exists());
    }

    #[test]
    fn without_a_temporary_folder_the_socket_is_in_the_next_one() {
        let (next, absent) = (tempfile::tempdir().unwrap(), Path::new("/proc/absent"));
        let made = SocketFolder::make_in_first(&[absent, next.path()]).unwrap();
        assert!(made.path.starts_with(next.path()));
        let error = SocketFolder::make_in_first(&[absent]).err().unwrap().to_string();
        assert!(error.contains("/proc/absent: ") && error.contains("TMPDIR"), "{error}");
    }

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
