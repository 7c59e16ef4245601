//! HTTP for every listener: errors, bodies, queries and pages, correlation, timeouts, metrics and WebSockets.
//!
//! | module | what |
//! | --- | --- |
//! | `error`, `malformed_request` | the envelope of errors; bytes that are no request |
//! | `request_body`, `pagination`, `visible_text` | bodies and queries; lists in pages; text that can be seen |
//! | `correlation`, `request_rates`, `router_layers` | the scope of a request; metrics; the layers of every router |
//! | `long_poll`, `websocket` | requests that wait for an event; what all WebSockets share |

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
