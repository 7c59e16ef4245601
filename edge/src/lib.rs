//! The HTTP and TLS edge: the public API, the node API, and the clients of external services.
//!
//! This crate terminates TLS, authenticates, parses and validates requests, sends commands to the actors or reads the store, and responds.
//! Every failure has the same envelope ([`http::error::Envelope`]). Decisions belong to the state machines of `domain`; none is made here.
//!
//! | module | what |
//! | --- | --- |
//! | [`api`] | the public API: its table of routes, and a file for each noun |
//! | [`node_api`], [`agent_package`] | the API of the nodes' agents; the package of the agent that nodes get |
//! | [`console_login`], `console_session` | the login to the web console; from the cookie of a browser session to the caller of a request |
//! | [`terminal`], [`terminal_gateway`] | the two ends of a terminal session in this process; the route at which users connect |
//! | [`notifications`] | notifications of clients over WebSockets, and their delivery to webhooks and e-mail addresses |
//! | [`payment_processor`], [`payment_webhook`] | the port of the payment processor, with Stripe's API behind it; the processor's webhooks |
//! | [`log_gateway`], [`fleet_telemetry`] | logs of nodes, on their way to the log store; the load of nodes, in memory |
//! | `statement` | an account's month as JSON, CSV and PDF |
//! | [`app_state`] | what handlers depend on |
//! | [`auth`], [`limits`] | access tokens; rates, connections and memory for bodies |
//! | [`trust`], [`tls`] | the service's own keys and what they certify; TLS termination and the proxies in front of it |
//! | [`http`], [`outbound`] | what all listeners share: errors, bodies, pages, correlation; requests to hosts that others name |

#![forbid(unsafe_code)]

// By this name the fake payment processor knows it, which the tests of `supervisors` share.
#[cfg(test)]
extern crate self as edge;

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
