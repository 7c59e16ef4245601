//! The way to a session: a token, then a WebSocket that is made with it (README, *Terminals*).

use crate::allocations;
use crate::api::Api;
use crate::failure::{Ended, Failure};
use crate::socket::{self, Asked, Socket};
use crate::web;
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::json;
use uuid::Uuid;

const PROTOCOL: &str = "gpu.terminal.v1";

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
    let mut offered = format!("{PROTOCOL}, token.{}", ticket.token.expose_secret());
    if let Some(from) = from {
        offered.push_str(&format!(", from.{from}"));
    }
    let mut offered = HeaderValue::from_str(&offered)
        .map_err(|_| Failure::new(Ended::Server, "the server gave a terminal token that cannot be sent"))?;
    offered.set_sensitive(true);
    let headers = HeaderMap::from_iter([(SEC_WEBSOCKET_PROTOCOL, offered)]);
    let url = address(&ticket.websocket_url)?;
    socket::open(api, Asked { what: "terminal", url, protocol: PROTOCOL, headers }).await
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
