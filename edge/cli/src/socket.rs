//! A WebSocket of the service: begun as a request of the client that calls the API, so that authorities, proxies and time-outs are those
//! of every other call.

use crate::api::Api;
use crate::failure::{Ended, Failure, chain};
use crate::web;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{
    CONNECTION, HeaderMap, HeaderValue, RETRY_AFTER, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use reqwest::{StatusCode, Upgraded, Url};
use serde_json::Value;
use std::time::Duration;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

const CONNECTS_WITHIN: Duration = Duration::from_secs(25);
/// The longest refusal that is read, and the longest message.
const LONGEST: usize = 1024 * 1024;

pub(crate) type Socket = WebSocketStream<Upgraded>;

/// What is to be opened.
pub(crate) struct Asked<'a> {
    /// As a person calls it.
    pub(crate) what: &'a str,
    pub(crate) url: Url,
    /// What is spoken then.
    pub(crate) protocol: &'a str,
    /// With what lets one in.
    pub(crate) headers: HeaderMap,
}

pub(crate) async fn open(api: &Api, asked: Asked<'_>) -> Result<Socket, Failure> {
    let Asked { what, url, protocol, headers } = asked;
    let key = STANDARD.encode(rand::random::<[u8; 16]>());
    let request = api
        .streams
        .get(url.clone())
        .headers(headers)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_VERSION, "13")
        .header(SEC_WEBSOCKET_KEY, &key);
    let unreached = |why: String| Failure::new(Ended::Network, format!("no {what} at {url}: {why}"));
    let answer = tokio::time::timeout(CONNECTS_WITHIN, request.send())
        .await
        .map_err(|_| unreached("no answer".to_owned()))?
        .map_err(|error| unreached(chain(&error)))?;
    let said =
        |name| answer.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or_default();
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let status = answer.status();
        let after = said(RETRY_AFTER).parse().ok().map(Duration::from_secs);
        let body = web::body(answer, LONGEST).await.unwrap_or_default();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        return Err(Failure::of_answer(status, &body, after));
    }
    if said(SEC_WEBSOCKET_ACCEPT) != derive_accept_key(key.as_bytes()) || said(SEC_WEBSOCKET_PROTOCOL) != protocol {
        return Err(Failure::new(Ended::Server, format!("the server has a {what} that does not speak as one")));
    }
    let stream = answer.upgrade().await.map_err(|error| unreached(chain(&error)))?;
    let config = WebSocketConfig::default().max_message_size(Some(LONGEST)).max_frame_size(Some(LONGEST));
    Ok(WebSocketStream::from_raw_socket(stream, Role::Client, Some(config)).await)
}
