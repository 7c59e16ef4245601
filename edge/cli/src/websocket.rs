//! A WebSocket of the service. The handshake is a request of the API's HTTP client, so that authorities, proxies and timeouts are the
//! same.

use crate::api::Api;
use crate::failure::{ExitStatus, Failure, chain};
use crate::http_client;
use crate::retry_after;
use crate::text_encoding;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{
    CONNECTION, HeaderMap, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use reqwest::{StatusCode, Upgraded, Url};
use serde_json::Value;
use std::time::Duration;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(25);
/// The longest error response that is read, and the longest message.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

pub(crate) type Socket = WebSocketStream<Upgraded>;

/// The parameters of a WebSocket.
pub(crate) struct WebSocketRequest<'a> {
    /// Its name in messages to the user.
    pub(crate) what: &'a str,
    pub(crate) url: Url,
    /// The subprotocol.
    pub(crate) protocol: &'a str,
    /// The headers, with the credentials.
    pub(crate) headers: HeaderMap,
}

pub(crate) async fn open(api: &Api, request_options: WebSocketRequest<'_>) -> Result<Socket, Failure> {
    let WebSocketRequest { what, url, protocol, headers } = request_options;
    let key = STANDARD.encode(rand::random::<[u8; 16]>());
    let request = api
        .streams
        .get(url.clone())
        .headers(headers)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_VERSION, "13")
        .header(SEC_WEBSOCKET_KEY, &key);
    let unreached = |why: String| {
        Failure::new(ExitStatus::Network, format!("no {what} at {url}: {why}"))
            .next("Check the network, and whether a proxy before the server passes WebSockets on.")
    };
    let answer = tokio::time::timeout(CONNECT_TIMEOUT, request.send())
        .await
        .map_err(|_| unreached("no answer".to_owned()))?
        .map_err(|error| unreached(chain(&error)))?;
    let header_text =
        |name| answer.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or_default();
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let status = answer.status();
        let after = retry_after::of(answer.headers());
        let body = http_client::body(answer, MAX_MESSAGE_BYTES).await.unwrap_or_default();
        let body: Value = serde_json::from_slice(text_encoding::without_mark(&body)).unwrap_or_default();
        return Err(Failure::of_answer(status, &body, after));
    }
    if header_text(SEC_WEBSOCKET_ACCEPT) != derive_accept_key(key.as_bytes())
        || header_text(SEC_WEBSOCKET_PROTOCOL) != protocol
    {
        return Err(Failure::unusable_answer(format!("the server has a {what} that does not speak as one")));
    }
    let stream = answer.upgrade().await.map_err(|error| unreached(chain(&error)))?;
    let config =
        WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE_BYTES)).max_frame_size(Some(MAX_MESSAGE_BYTES));
    Ok(WebSocketStream::from_raw_socket(stream, Role::Client, Some(config)).await)
}
