//! The HTTP and TLS edge: the public API, the node API, and the clients of external services.
//!
//! This crate terminates TLS, authenticates, parses and validates requests, sends commands to the actors or reads the store, and responds.
//! Every failure has the same envelope ([`http::error::Envelope`]). Decisions belong to the state machines of `domain`; none is made here.

#![forbid(unsafe_code)]

pub mod agent_package;
pub mod api;
pub mod app_state;
pub mod auth;
pub mod console_login;
mod console_session;
pub mod fleet_telemetry;
pub mod http;
pub mod limits;
pub mod log_gateway;
pub mod node_api;
pub mod notifications;
pub mod outbound;
pub mod payment_processor;
pub mod payment_webhook;
mod statement;
pub mod terminal;
pub mod terminal_gateway;
pub mod tls;
pub mod trust;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod testing;
