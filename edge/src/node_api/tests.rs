//! The node API over real TLS, with real certificates and the real machines; where results are proved, on a real Postgres.

pub(crate) mod agent;
mod enrollment;
mod forwarding;
mod generations;
mod harness;
mod identity;
mod long_poll;
mod package;
mod recovery;
mod results;
