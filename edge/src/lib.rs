//! The HTTP and TLS edge: the public API, the node API, and the clients of external services.
//!
//! This crate terminates TLS, authenticates, parses and validates requests, sends commands to the actors or reads the store, and responds.
//! Every failure has the same envelope ([`error::Envelope`]). Decisions belong to the state machines of `domain`; none is made here.

#![forbid(unsafe_code)]

pub mod api;
pub mod auth;
mod body_admission;
pub mod bootstrap_bundle;
pub mod connection_quota;
pub mod correlation;
pub mod delivery;
mod email_address;
pub mod error;
pub mod host_address;
pub mod http_metrics;
pub mod idempotency;
pub mod identity;
pub mod keys_in_force;
pub mod log_gateway;
pub mod long_poll;
mod malformed_request;
pub mod node_api;
pub mod node_ca;
pub mod node_certificate;
pub mod node_probe;
pub mod notifications;
pub mod operator_view;
mod outbound_http;
pub mod pagination;
pub mod payment_processor;
pub mod payment_webhook;
pub mod platform_roles;
pub mod rate_limit;
mod read_model;
pub(crate) mod recording;
pub mod recovery_nonce;
pub mod rejection_response;
pub mod request_body;
pub mod router_layers;
pub mod secret_detection;
pub mod services;
pub mod ssh_public_key;
mod statement;
pub mod task_signing;
pub mod terminal;
pub mod terminal_gateway;
pub mod tls;
pub mod token;
mod token_bucket;
mod websocket;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod testing;
