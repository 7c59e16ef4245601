//! HTTP for every listener: errors, bodies, queries and pages, correlation, timeouts, metrics and WebSockets.

pub mod correlation;
pub mod error;
pub mod long_poll;
pub(crate) mod malformed_request;
pub mod pagination;
pub mod request_body;
pub mod request_rates;
pub mod router_layers;
pub(crate) mod visible_text;
pub(crate) mod websocket;
