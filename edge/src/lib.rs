//! Every byte that comes in over HTTP and TLS: the public API and the node API.
//!
//! This crate ends TLS, authenticates, reads and checks what was sent, asks the actors or reads the store, and answers;
//! whatever goes wrong is answered with one envelope ([`error::Envelope`]). Nothing is decided here that a machine of
//! `domain` decides.

#![forbid(unsafe_code)]

pub mod answer;
pub mod api;
pub mod auth;
pub mod body;
mod buckets;
pub mod bundle;
pub mod correlation;
pub mod delivery;
pub mod error;
pub mod figures;
pub mod host;
pub mod idempotency;
pub mod identity;
pub mod keys;
pub mod limits;
pub mod node_api;
pub mod node_ca;
pub mod notifications;
mod outward;
pub mod page;
pub mod places;
pub mod platform_roles;
pub mod polls;
pub mod probe;
pub mod processor;
pub mod rate_limit;
mod reception;
pub(crate) mod recording;
pub mod runtime;
pub mod secret_shape;
pub mod services;
pub mod ssh_public_key;
mod statement;
pub mod tasks;
pub mod terminal;
pub mod tls;
pub mod token;
mod unreadable;
pub mod webhook;
mod websocket;

#[cfg(test)]
mod testing;
