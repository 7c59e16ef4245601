//! What all WebSockets have in common: the origins that may open one, how it is closed, and the bound on control messages.

use crate::http::error::ApiError;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket};
use axum::http::{HeaderMap, header};
use std::time::Duration;
use tokio::time::Instant;
use tokio_tungstenite::tungstenite;

/// Timeout for the close frame of a connection.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Control messages and pings per second, on average and as a burst; no person sends more.
const CONTROLS_PER_SECOND: u64 = 50;
const CONTROL_BURST: u64 = 200;

/// A close code with its reason phrase.
pub(crate) type Close = (u16, &'static str);

pub(crate) const TOKEN: Close = (4401, "token_invalid");
pub(crate) const REVOKED: Close = (4403, "revoked");
pub(crate) const MISUSED: Close = (1008, "not understood, or too much of it");
pub(crate) const TOO_BIG: Close = (1009, "a message is too long");

pub(crate) fn frame((code, reason): Close) -> Message {
    Message::Close(Some(CloseFrame { code, reason: reason.into() }))
}

pub(crate) async fn close_now(socket: &mut WebSocket, why: Close) {
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, socket.send(frame(why))).await;
}

/// The response to a request that is not a WebSocket upgrade.
pub(crate) fn no_upgrade(error: WebSocketUpgradeRejection) -> ApiError {
    ApiError::new(
        crate::http::error::Code::UpgradeRequired,
        "This is a WebSocket: connect with one (RFC 6455, over HTTP/1.1).",
    )
    .because(error)
}

/// A browser sends the origin of its page; a client without one is not a browser. Admitted are the origin of `public_url`, and `others`.
pub(crate) fn check_origin(public_url: &str, others: &[String], headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let own = origin_of(public_url);
    let origin = origin.to_str().unwrap_or_default();
    let known = origin == own || others.iter().any(|known| known == origin);
    if known {
        return Ok(());
    }
    Err(ApiError::forbidden("Pages of this origin may not connect; an operator can allow it (SVC_TERMINAL_ORIGINS)."))
}

/// Scheme, host and port of a URL (RFC 6454).
pub(crate) fn origin_of(url: &str) -> String {
    reqwest::Url::parse(url).map(|url| url.origin().ascii_serialization()).unwrap_or_default()
}

/// The subprotocols that the client offers, in order.
pub(crate) fn offered(headers: &HeaderMap) -> Result<Vec<&str>, ApiError> {
    let mut offered = Vec::new();
    for value in headers.get_all(header::SEC_WEBSOCKET_PROTOCOL) {
        let text = value.to_str().map_err(|_| ApiError::invalid_request("Sec-WebSocket-Protocol is no text."))?;
        offered.extend(text.split(',').map(str::trim));
    }
    Ok(offered)
}

/// The bucket of control messages that a client may still send.
pub(crate) struct Controls {
    left: u64,
    at: Instant,
}

impl Default for Controls {
    fn default() -> Self {
        Self { left: CONTROL_BURST, at: Instant::now() }
    }
}

impl Controls {
    pub(crate) fn take(&mut self) -> bool {
        let passed = u64::try_from(self.at.elapsed().as_millis()).unwrap_or(u64::MAX);
        let refilled = passed.saturating_mul(CONTROLS_PER_SECOND) / 1000;
        if refilled > 0 {
            self.left = self.left.saturating_add(refilled).min(CONTROL_BURST);
            self.at = Instant::now();
        }
        self.left.checked_sub(1).map(|left| self.left = left).is_some()
    }
}

pub(crate) fn is_too_big(error: &axum::Error) -> bool {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let mut protocol = causes.filter_map(|cause| cause.downcast_ref::<tungstenite::Error>());
    protocol.any(|error| matches!(error, tungstenite::Error::Capacity(_)))
}
