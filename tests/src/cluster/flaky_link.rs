//! A TCP proxy between a replica and a server, which a test can cut and restore, and which can drop responses.

use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The link. Dropping it closes it.
pub struct FlakyLink {
    address: SocketAddr,
    state: watch::Sender<LinkState>,
    accept_task: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinkState {
    Everything,
    /// Requests with this text arrive and are executed; their responses are held back.
    NoResponseTo(&'static str),
    Nothing,
}

impl FlakyLink {
    /// A link to `server` that forwards everything.
    pub async fn to(server: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (state, seen) = watch::channel(LinkState::Everything);
        let accept_task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward_connection(client, server, seen.clone()));
            }
        });
        Ok(Self { address, state, accept_task })
    }

    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every connection and accepts no other.
    pub fn cut(&self) {
        self.state.send_replace(LinkState::Nothing);
    }

    /// Holds back the responses to requests that contain this text, unencrypted.
    pub fn drop_responses_to(&self, text: &'static str) {
        self.state.send_replace(LinkState::NoResponseTo(text));
    }

    pub fn restore(&self) {
        self.state.send_replace(LinkState::Everything);
    }
}

impl Drop for FlakyLink {
    fn drop(&mut self) {
        self.accept_task.abort();
    }
}

async fn forward_connection(client: TcpStream, server: SocketAddr, mut state: watch::Receiver<LinkState>) {
    if *state.borrow() == LinkState::Nothing {
        return;
    }
    let Ok(server) = TcpStream::connect(server).await else { return };
    // Without this a message that follows another waits 40 ms for an acknowledgement, and the tests measure the link.
    if client.set_nodelay(true).and_then(|()| server.set_nodelay(true)).is_err() {
        return;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let (waits, waiting) = watch::channel(false);
    let requests = forward_requests(from_client, to_server, state.clone(), waits);
    let responses = forward_responses(from_server, to_client, state.clone(), waiting);
    tokio::select! {
        _ = async { tokio::join!(requests, responses) } => {}
        _ = state.wait_for(|state| *state == LinkState::Nothing) => {}
    }
}

/// `waits` becomes true with a request whose response is to be held back.
async fn forward_requests(
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    state: watch::Receiver<LinkState>,
    waits: watch::Sender<bool>,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = client.read(&mut buffer).await.unwrap_or_default();
        let request = &buffer[..read];
        if let LinkState::NoResponseTo(text) = *state.borrow()
            && request.windows(text.len()).any(|window| window == text.as_bytes())
        {
            waits.send_replace(true);
        }
        if read == 0 || server.write_all(request).await.is_err() {
            let _ = server.shutdown().await;
            return;
        }
    }
}

async fn forward_responses(
    mut server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    mut state: watch::Receiver<LinkState>,
    waits: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = server.read(&mut buffer).await.unwrap_or_default();
        let waited = *waits.borrow();
        if waited && state.wait_for(|state| !matches!(state, LinkState::NoResponseTo(_))).await.is_err() {
            return;
        }
        if read == 0 || client.write_all(&buffer[..read]).await.is_err() {
            let _ = client.shutdown().await;
            return;
        }
    }
}
