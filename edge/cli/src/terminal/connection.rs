//! Connecting to a terminal session: a terminal token, then a WebSocket with it (the book, `user/terminals.md`).

use crate::allocations;
use crate::api::Api;
use crate::failure::{ExitStatus, Failure};
use crate::http_client;
use crate::websocket::{self, Socket, WebSocketRequest};
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::json;
use uuid::Uuid;

const PROTOCOL: &str = "gpu.terminal.v1";

/// The outcome of one attempt. The session exists once the token is issued, even if the connection fails.
pub(crate) struct ConnectionAttempt {
    pub(crate) session: Option<Uuid>,
    pub(crate) socket: Result<Socket, Failure>,
}

#[derive(Deserialize)]
struct TerminalToken {
    token: SecretString,
    session_id: Uuid,
    websocket_url: String,
}

/// Connects to the session, or to a new one, with the output from position `from` on.
pub(crate) async fn connect_session(
    api: &Api,
    allocation: Uuid,
    session: Option<Uuid>,
    from: Option<u64>,
) -> ConnectionAttempt {
    let token = match token(api, allocation, session).await {
        Ok(token) => token,
        Err(failure) => return ConnectionAttempt { session, socket: Err(failure) },
    };
    ConnectionAttempt { session: Some(token.session_id), socket: connect(api, &token, from).await }
}

async fn token(api: &Api, allocation: Uuid, session: Option<Uuid>) -> Result<TerminalToken, Failure> {
    let body = session.map_or_else(|| json!({}), |session| json!({ "session_id": session }));
    let path = format!("{}/terminal-tokens", allocations::path(allocation));
    let issued = api.post(&path, &body).await?;
    serde_json::from_value(issued).map_err(|_| Failure::unusable_answer("the server's answer is no terminal token"))
}

async fn connect(api: &Api, token: &TerminalToken, from: Option<u64>) -> Result<Socket, Failure> {
    let mut offered = format!("{PROTOCOL}, token.{}", token.token.expose_secret());
    if let Some(from) = from {
        offered.push_str(&format!(", from.{from}"));
    }
    let mut offered = HeaderValue::from_str(&offered)
        .map_err(|_| Failure::unusable_answer("the server gave a terminal token that cannot be sent"))?;
    offered.set_sensitive(true);
    let headers = HeaderMap::from_iter([(SEC_WEBSOCKET_PROTOCOL, offered)]);
    let url = address(&token.websocket_url)?;
    websocket::open(api, WebSocketRequest { what: "terminal", url, protocol: PROTOCOL, headers }).await
}

/// The `http(s)` form of a `ws(s)` address.
fn address(websocket_url: &str) -> Result<Url, Failure> {
    let http = match websocket_url.split_once("://") {
        Some(("wss", rest)) => format!("https://{rest}"),
        Some(("ws", rest)) => format!("http://{rest}"),
        _ => websocket_url.to_owned(),
    };
    http_client::address(&http).map_err(|failure| Failure { exit_status: ExitStatus::Server, ..failure })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_token_is_never_sent_in_clear_text() {
        assert_eq!(address("wss://gpu.example/ws/v1/terminal").unwrap().as_str(), "https://gpu.example/ws/v1/terminal");
        assert!(address("ws://127.0.0.1:1/ws/v1/terminal").is_ok());
        assert_eq!(address("ws://gpu.example/ws/v1/terminal").unwrap_err().exit_status, ExitStatus::Server);
    }
}
