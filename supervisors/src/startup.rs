//! The stages of a process's start. Each is built from the ones before; `serve.rs` lists them in their order.

pub mod actors;
pub mod keys;
pub mod listener_certificate;
pub mod listeners;
pub mod membership;
pub mod node_acceptor;
pub mod services;
pub mod storage;

use crate::config::Config;
use crate::traces::TraceExporter;
use prometheus::Registry;
use std::sync::Arc;

/// A process that is ready to start its workers.
pub struct Stages {
    pub config: Config,
    pub registry: Registry,
    pub traces: Option<Arc<TraceExporter>>,
    pub storage: storage::StorageStage,
    pub keys: keys::KeyStage,
    pub membership: membership::MembershipStage,
    pub actors: actors::ActorStage,
    pub services: services::ServiceStage,
    pub listeners: listeners::ListenerStage,
}
