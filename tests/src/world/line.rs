//! A TCP line between a replica and a server, which a test can cut and mend, and which can lose answers.

use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The line. Dropping it ends it.
pub struct Line {
    address: SocketAddr,
    carries: watch::Sender<Carries>,
    carrying: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carries {
    Everything,
    /// What is asked with these words arrives, and is done; its answer waits.
    NoAnswerTo(&'static str),
    Nothing,
}

impl Line {
    /// A whole line to `server`.
    pub async fn to(server: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (carries, seen) = watch::channel(Carries::Everything);
        let carrying = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, server, seen.clone()));
            }
        });
        Ok(Self { address, carries, carrying })
    }

    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Breaks every connection and takes no other.
    pub fn cut(&self) {
        self.carries.send_replace(Carries::Nothing);
    }

    /// Keeps the answers back to whatever is asked with these words, in clear.
    pub fn lose_answers_to(&self, words: &'static str) {
        self.carries.send_replace(Carries::NoAnswerTo(words));
    }

    pub fn mend(&self) {
        self.carries.send_replace(Carries::Everything);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.carrying.abort();
    }
}

async fn carry(client: TcpStream, server: SocketAddr, mut carries: watch::Receiver<Carries>) {
    if *carries.borrow() == Carries::Nothing {
        return;
    }
    let Ok(server) = TcpStream::connect(server).await else { return };
    // Without this a word that follows another waits 40 ms for an acknowledgement, and the tests measure the line.
    if client.set_nodelay(true).and_then(|()| server.set_nodelay(true)).is_err() {
        return;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let (waits, waiting) = watch::channel(false);
    let questions = questions(from_client, to_server, carries.clone(), waits);
    let answers = answers(from_server, to_client, carries.clone(), waiting);
    tokio::select! {
        _ = async { tokio::join!(questions, answers) } => {}
        _ = carries.wait_for(|carries| *carries == Carries::Nothing) => {}
    }
}

/// `waits` becomes true with a question whose answer is to wait.
async fn questions(
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    carries: watch::Receiver<Carries>,
    waits: watch::Sender<bool>,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = client.read(&mut buffer).await.unwrap_or_default();
        let question = &buffer[..read];
        if let Carries::NoAnswerTo(words) = *carries.borrow()
            && question.windows(words.len()).any(|window| window == words.as_bytes())
        {
            waits.send_replace(true);
        }
        if read == 0 || server.write_all(question).await.is_err() {
            let _ = server.shutdown().await;
            return;
        }
    }
}

async fn answers(
    mut server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    mut carries: watch::Receiver<Carries>,
    waits: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = server.read(&mut buffer).await.unwrap_or_default();
        let waited = *waits.borrow();
        if waited && carries.wait_for(|carries| !matches!(carries, Carries::NoAnswerTo(_))).await.is_err() {
            return;
        }
        if read == 0 || client.write_all(&buffer[..read]).await.is_err() {
            let _ = client.shutdown().await;
            return;
        }
    }
}
