//! The way to a session: a token, then a WebSocket that is made with it (README, *Terminals*).

use crate::allocations;
use crate::api::Api;
use crate::failure::{Ended, Failure, chain};
use crate::web;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{
    CONNECTION, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION,
    UPGRADE,
};
use reqwest::{StatusCode, Upgraded, Url};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Duration;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use uuid::Uuid;

const PROTOCOL: &str = "gpu.terminal.v1";
const CONNECTS_WITHIN: Duration = Duration::from_secs(25);
/// The longest refusal that is read, and the longest message.
const LONGEST: usize = 1024 * 1024;

pub(crate) type Socket = WebSocketStream<Upgraded>;

/// What one attempt has come to. The session is there from the token on, whatever becomes of the connection.
pub(crate) struct Attempt {
    pub(crate) session: Option<Uuid>,
    pub(crate) socket: Result<Socket, Failure>,
}

#[derive(Deserialize)]
struct Ticket {
    token: SecretString,
    session_id: Uuid,
    websocket_url: String,
}

/// Connects to the session, or to a new one; with the output from `from` on.
pub(crate) async fn attempt(api: &Api, allocation: Uuid, session: Option<Uuid>, from: Option<u64>) -> Attempt {
    let ticket = match ticket(api, allocation, session).await {
        Ok(ticket) => ticket,
        Err(failure) => return Attempt { session, socket: Err(failure) },
    };
    Attempt { session: Some(ticket.session_id), socket: connect(api, &ticket, from).await }
}

async fn ticket(api: &Api, allocation: Uuid, session: Option<Uuid>) -> Result<Ticket, Failure> {
    let body = session.map_or_else(|| json!({}), |session| json!({ "session_id": session }));
    let path = format!("{}/terminal-tokens", allocations::path(allocation));
    let issued = api.post(&path, &body).await?;
    serde_json::from_value(issued).map_err(|_| Failure::new(Ended::Server, "the server's answer is no terminal token"))
}

async fn connect(api: &Api, ticket: &Ticket, from: Option<u64>) -> Result<Socket, Failure> {
    let url = address(&ticket.websocket_url)?;
    let mut offered = format!("{PROTOCOL}, token.{}", ticket.token.expose_secret());
    if let Some(from) = from {
        offered.push_str(&format!(", from.{from}"));
    }
    let wrong = |why: &str| Failure::new(Ended::Server, format!("the terminal gateway {why}"));
    let mut offered = HeaderValue::from_str(&offered).map_err(|_| wrong("gave a token that cannot be sent"))?;
    offered.set_sensitive(true);
    let key = STANDARD.encode(rand::random::<[u8; 16]>());
    let request = api
        .streams
        .get(url.clone())
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_VERSION, "13")
        .header(SEC_WEBSOCKET_KEY, &key)
        .header(SEC_WEBSOCKET_PROTOCOL, offered);
    let unreached = |why: String| Failure::new(Ended::Network, format!("no terminal at {url}: {why}"));
    let answer = tokio::time::timeout(CONNECTS_WITHIN, request.send())
        .await
        .map_err(|_| unreached("no answer".to_owned()))?
        .map_err(|error| unreached(chain(&error)))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let status = answer.status();
        let body = web::body(answer, LONGEST).await.unwrap_or_default();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        return Err(Failure::of_answer(status, &body, None));
    }
    let said = |name| answer.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if said(SEC_WEBSOCKET_ACCEPT) != derive_accept_key(key.as_bytes()) || said(SEC_WEBSOCKET_PROTOCOL) != PROTOCOL {
        return Err(wrong("does not speak as one"));
    }
    let stream = answer.upgrade().await.map_err(|error| unreached(chain(&error)))?;
    let config = WebSocketConfig::default().max_message_size(Some(LONGEST)).max_frame_size(Some(LONGEST));
    Ok(WebSocketStream::from_raw_socket(stream, Role::Client, Some(config)).await)
}

/// `wss://…` as HTTP knows it.
fn address(websocket_url: &str) -> Result<Url, Failure> {
    let http = match websocket_url.split_once("://") {
        Some(("wss", rest)) => format!("https://{rest}"),
        Some(("ws", rest)) => format!("http://{rest}"),
        _ => websocket_url.to_owned(),
    };
    web::address(&http).map_err(|failure| Failure { ended: Ended::Server, ..failure })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_token_goes_nowhere_in_clear() {
        assert_eq!(address("wss://gpu.example/ws/v1/terminal").unwrap().as_str(), "https://gpu.example/ws/v1/terminal");
        assert!(address("ws://127.0.0.1:1/ws/v1/terminal").is_ok());
        assert_eq!(address("ws://gpu.example/ws/v1/terminal").unwrap_err().ended, Ended::Server);
    }
}
