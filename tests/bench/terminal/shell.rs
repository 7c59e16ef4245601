//! A shell behind a terminal, ours or terminado's.

use anyhow::{Context, bail, ensure};
use futures::{SinkExt as _, StreamExt as _};
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

/// Commands that both run first, so that both are the same program in the same state.
const SAME: &str = "exec bash --noprofile --norc\n";
const PLAIN: &str = "PS1='$ '; bind 'set enable-bracketed-paste off'; unset PROMPT_COMMAND; echo rea''dy\n";
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Longer than the echo of any input takes.
const QUIET: Duration = Duration::from_millis(50);
/// After this many characters the line is cleared, so that it never wraps.
const LINE: usize = 60;
/// The pause between two keystrokes: faster than typing, and slow enough that each wakes all processes up.
const BETWEEN: Duration = Duration::from_millis(3);

pub(crate) enum Shell {
    Ours(Box<WebSocketStream<TlsStream<TcpStream>>>),
    Terminado(Box<WebSocketStream<TcpStream>>),
}

impl Shell {
    /// Brings the shell into the state that is measured.
    pub(crate) async fn made_plain(mut self) -> anyhow::Result<Self> {
        self.enter(SAME).await?;
        self.silence().await?;
        self.enter(PLAIN).await?;
        self.until(b"ready").await?;
        self.silence().await?;
        Ok(self)
    }

    pub(crate) async fn enter(&mut self, text: &str) -> anyhow::Result<()> {
        match self {
            Self::Ours(socket) => socket.send(Message::Binary(text.as_bytes().to_vec().into())).await?,
            Self::Terminado(socket) => socket.send(Message::Text(json!(["stdin", text]).to_string().into())).await?,
        }
        Ok(())
    }

    /// The next bytes of output.
    pub(crate) async fn receive(&mut self) -> anyhow::Result<Vec<u8>> {
        loop {
            let message = match self {
                Self::Ours(socket) => socket.next().await,
                Self::Terminado(socket) => socket.next().await,
            };
            match message.context("the shell is gone")?? {
                Message::Binary(bytes) => return Ok(bytes.into()),
                Message::Text(text) => {
                    let message: Value = serde_json::from_str(&text)?;
                    if let Some(output) = message[1].as_str().filter(|_| message[0] == "stdout") {
                        return Ok(output.as_bytes().to_vec());
                    }
                }
                Message::Close(frame) => bail!("the shell was closed: {frame:?}"),
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }

    /// Reads until the output ends with this; returns the number of bytes.
    pub(crate) async fn until(&mut self, marker: &[u8]) -> anyhow::Result<u64> {
        let (mut tail, mut count): (Vec<u8>, u64) = (Vec::new(), 0);
        loop {
            let chunk = timeout(WAIT_TIMEOUT, self.receive()).await;
            let chunk =
                chunk.with_context(|| format!("no end after {count} bytes: {}", String::from_utf8_lossy(&tail)))??;
            count += chunk.len() as u64;
            tail.extend_from_slice(&chunk);
            if tail.windows(marker.len()).any(|window| window == marker) {
                return Ok(count);
            }
            tail.drain(..tail.len().saturating_sub(marker.len()));
        }
    }

    /// Reads until there is no more output.
    async fn silence(&mut self) -> anyhow::Result<()> {
        while let Ok(chunk) = timeout(QUIET, self.receive()).await {
            chunk?;
        }
        Ok(())
    }

    /// The times from a keystroke to its echo, in nanoseconds, one after the other.
    pub(crate) async fn echoes(&mut self, during: Duration) -> anyhow::Result<Histogram<u64>> {
        let mut times = Histogram::<u64>::new(3)?;
        let began = Instant::now();
        for n in 1.. {
            if began.elapsed() >= during {
                break;
            }
            if n % LINE == 0 {
                self.enter("\u{15}").await?;
                self.silence().await?;
            }
            tokio::time::sleep(BETWEEN).await;
            let typed = Instant::now();
            self.enter("x").await?;
            let echo = self.receive().await?;
            times.record(u64::try_from(typed.elapsed().as_nanos())?)?;
            ensure!(echo == b"x", "x is echoed as {:?}", String::from_utf8_lossy(&echo));
        }
        self.enter("\u{15}").await?;
        self.silence().await?;
        Ok(times)
    }

    /// The throughput of a file's output, in megabytes a second.
    pub(crate) async fn cat(&mut self, path: &str, bytes: u64) -> anyhow::Result<f64> {
        let began = Instant::now();
        self.enter(&format!("cat {path}; echo all''shown\n")).await?;
        let count = self.until(b"allshown").await?;
        let took = began.elapsed();
        ensure!(count >= bytes, "{count} of {bytes} bytes were shown");
        self.silence().await?;
        Ok(bytes as f64 / 1e6 / took.as_secs_f64())
    }
}
