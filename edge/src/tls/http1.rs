//! hyper answers what it cannot parse with a bare status line, which is not configurable. This stream replaces that answer on its way out
//! with the router's own, so that it has the envelope, and is logged and counted like every other.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{ConnectInfo, Request},
};
use futures::{FutureExt, future::BoxFuture};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};
use tower::ServiceExt;

use super::Peer;
use crate::http::malformed_request::MalformedRequest;

/// The longest envelope.
const MAX_BODY: usize = 64 * 1024;
/// The client's remaining bytes are read for a while and discarded: a connection that is closed over unread bytes is reset, and the answer
/// is lost.
const DRAIN_BYTES: usize = 4 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// An HTTP/1.1 connection.
pub(super) struct Http1Stream<IO> {
    io: IO,
    router: Router,
    peer: Peer,
    /// What 414 and 431 mean here.
    too_many: MalformedRequest,
    /// Set where the connection was upgraded to another protocol.
    switched: Arc<AtomicBool>,
    stage: Stage,
}

enum Stage {
    /// Writes pass through.
    Watching,
    /// The router makes an answer that replaces hyper's.
    Rendering(BoxFuture<'static, Bytes>),
    Replacing(Bytes),
    Closing,
    Draining {
        left: usize,
        until: Pin<Box<Sleep>>,
    },
    Over,
}

impl<IO> Http1Stream<IO> {
    pub(super) fn new(
        io: IO,
        router: Router,
        peer: Peer,
        too_many: MalformedRequest,
        switched: Arc<AtomicBool>,
    ) -> Self {
        Self { io, router, peer, too_many, switched, stage: Stage::Watching }
    }

    /// It is the last that is written on a connection.
    fn find_refusal(&self, bytes: &[u8]) -> Option<Refusal> {
        if !bytes.ends_with(b"\r\n\r\n") || self.switched.load(Ordering::Relaxed) {
            return None;
        }
        const BEGIN: &[u8] = b"HTTP/1.1 4";
        let begin = bytes.windows(BEGIN.len()).rposition(|window| window == BEGIN)?;
        let head = std::str::from_utf8(&bytes[begin..]).ok()?;
        // Every answer of the router has a correlation id.
        let lines = || head.lines().skip(1);
        let is_ours = lines().any(|line| line.starts_with("x-correlation-id:"));
        let is_empty = lines().any(|line| line.eq_ignore_ascii_case("content-length: 0"));
        let why = match head.get(9..12)? {
            "400" => MalformedRequest::Malformed,
            "414" | "431" => self.too_many,
            _ => return None,
        };
        let date = lines().find(|line| line.starts_with("date: ")).unwrap_or_default().to_owned();
        (!is_ours && is_empty).then_some(Refusal { begin, why, date })
    }

    fn replacement(&self, Refusal { why, date, .. }: Refusal) -> Stage {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(why);
        request.extensions_mut().insert(ConnectInfo(self.peer.clone()));
        Stage::Rendering(answer(self.router.clone(), request, date).boxed())
    }
}

/// hyper's own refusal in its output.
struct Refusal {
    /// Where it begins; the end of the previous response may come before it.
    begin: usize,
    why: MalformedRequest,
    /// The header, whole.
    date: String,
}

/// The router's answer as HTTP/1.1 writes it.
async fn answer(router: Router, request: Request, date: String) -> Bytes {
    let Ok(response) = router.oneshot(request).await;
    let (head, body) = response.into_parts();
    let body = to_bytes(body, MAX_BODY).await.unwrap_or_default();
    let reason = head.status.canonical_reason().unwrap_or_default();
    let mut written = format!("HTTP/1.1 {} {reason}\r\n", head.status.as_u16()).into_bytes();
    for (name, value) in &head.headers {
        written.extend_from_slice(name.as_str().as_bytes());
        written.extend_from_slice(b": ");
        written.extend_from_slice(value.as_bytes());
        written.extend_from_slice(b"\r\n");
    }
    if !date.is_empty() {
        written.extend_from_slice(format!("{date}\r\n").as_bytes());
    }
    written.extend_from_slice(format!("connection: close\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes());
    written.extend_from_slice(&body);
    written.into()
}

impl<IO: AsyncRead + AsyncWrite + Unpin> Http1Stream<IO> {
    /// Writes the replacement of hyper's answer, and drains the client.
    fn poll_replacement(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            self.stage = match &mut self.stage {
                Stage::Watching | Stage::Over => return Poll::Ready(Ok(())),
                Stage::Rendering(answer) => Stage::Replacing(ready!(answer.poll_unpin(context))),
                Stage::Replacing(answer) if answer.is_empty() => {
                    ready!(Pin::new(&mut self.io).poll_flush(context))?;
                    Stage::Closing
                }
                Stage::Replacing(answer) => {
                    let written = ready!(Pin::new(&mut self.io).poll_write(context, answer))?;
                    if written == 0 {
                        return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                    }
                    Stage::Replacing(answer.slice(written..))
                }
                Stage::Closing => {
                    ready!(Pin::new(&mut self.io).poll_shutdown(context))?;
                    Stage::Draining { left: DRAIN_BYTES, until: Box::pin(sleep(DRAIN_TIME)) }
                }
                Stage::Draining { left, until } => {
                    let mut thrown_away = [0; 4096];
                    let mut buffer = ReadBuf::new(&mut thrown_away);
                    let is_over = match Pin::new(&mut self.io).poll_read(context, &mut buffer) {
                        Poll::Ready(Ok(())) => buffer.filled().is_empty(),
                        Poll::Ready(Err(_)) => true,
                        Poll::Pending => {
                            ready!(until.poll_unpin(context));
                            true
                        }
                    };
                    *left = left.saturating_sub(buffer.filled().len());
                    if !is_over && *left > 0 {
                        continue;
                    }
                    Stage::Over
                }
            };
        }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Http1Stream<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Http1Stream<IO> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if matches!(self.stage, Stage::Watching) {
            match self.find_refusal(bytes) {
                None => return Pin::new(&mut self.io).poll_write(context, bytes),
                // First the previous response, which is still in flight.
                Some(Refusal { begin: begin @ 1.., .. }) => {
                    return Pin::new(&mut self.io).poll_write(context, &bytes[..begin]);
                }
                Some(refusal) => self.stage = self.replacement(refusal),
            }
        }
        ready!(self.poll_replacement(context))?;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Some(last) = slices.iter().rposition(|slice| !slice.is_empty()) else {
            return Pin::new(&mut self.io).poll_write_vectored(context, slices);
        };
        let is_plain = matches!(self.stage, Stage::Watching) && self.find_refusal(&slices[last]).is_none();
        let is_alone = slices[..last].iter().all(|slice| slice.is_empty());
        match (is_plain, is_alone) {
            (true, _) => Pin::new(&mut self.io).poll_write_vectored(context, slices),
            (false, true) => self.poll_write(context, &slices[last]),
            (false, false) => Pin::new(&mut self.io).poll_write_vectored(context, &slices[..last]),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
