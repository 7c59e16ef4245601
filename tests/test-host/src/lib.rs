//! A host of entities in the test's own process, without NATS and other members: the test world of the crates `edge`, `supervisors` and
//! `persistence`. `tests::cluster` is the other one, of real processes.
//!
//! A test chooses the store: Postgres through a committer ([`PgMember`] and [`PgTestStore`]), or memory ([`MemoryStore`]). [`TestHost`]
//! owns every shard over it, in a [`TestEnvironment`] whose clock and policy the test sets. [`simulated_machine`] is what both worlds have of an agent.

// A step of the test world that fails is a failed test: it panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc)]

mod captured_log;
mod environment;
mod member;
mod memory;
mod node_fixture;
pub mod simulated_machine;
mod tls_listener;

pub use captured_log::CapturedLog;
pub use environment::{NoEffects, NoPeers, TestEnvironment};
pub use member::{PgMember, PgTestStore};
pub use memory::MemoryStore;
pub use node_fixture::{registered_node, registration, reported_inventory, sku_spec};
pub use tls_listener::TlsListener;

use actors::shell_dependencies::{Effects, Environment, Remote, Store, Term};
use actors::{AskResult, CommandContext, Directory, Host, HostConfig};
use chrono::TimeDelta;
use domain::authz::{CallerIdentity, TokenRole, authorize};
use domain::commit::Epoch;
use domain::state_machine::Command as _;
use domain::{Machine, Principal, Shard};
use std::sync::Arc;
use uuid::Uuid;

/// A host with its directory and its environment.
pub struct TestHost {
    pub directory: Directory,
    pub environment: Arc<TestEnvironment>,
}

impl TestHost {
    /// A host of these terms, without other members.
    pub async fn start(
        store: Arc<dyn Store>,
        terms: impl IntoIterator<Item = Term>,
        environment: Arc<TestEnvironment>,
        effects: Arc<dyn Effects>,
    ) -> Self {
        Self::start_with_peers(store, terms, environment, effects, Arc::new(NoPeers)).await
    }

    /// As [`TestHost::start`], with other members that own the other shards.
    pub async fn start_with_peers(
        store: Arc<dyn Store>,
        terms: impl IntoIterator<Item = Term>,
        environment: Arc<TestEnvironment>,
        effects: Arc<dyn Effects>,
        peers: Arc<dyn Remote>,
    ) -> Self {
        let of_host = Arc::clone(&environment) as Arc<dyn Environment>;
        let host = Host::new(HostConfig::default(), store, effects, of_host);
        for term in terms {
            host.open(term, None).await.unwrap();
        }
        Self { directory: Directory::new(host, peers), environment }
    }

    /// A host of every shard over memory, whose effects have no receiver.
    pub async fn in_memory() -> (Self, Arc<MemoryStore>) {
        let store = Arc::new(MemoryStore::default());
        let host =
            Self::start(Arc::clone(&store) as Arc<dyn Store>, first_terms(), Arc::default(), Arc::new(NoEffects)).await;
        (host, store)
    }

    /// Sends a command as this principal, and waits for its reply.
    pub async fn ask<M: Machine>(&self, by: &Principal, id: Uuid, command: impl Into<M::Command>) -> AskResult<M> {
        ask::<M>(&self.directory, self.environment.as_ref(), by, id, command).await
    }
}

/// Sends a command as this principal, good for ten seconds, and waits for its reply.
pub async fn ask<M: Machine>(
    directory: &Directory,
    environment: &dyn Environment,
    by: &Principal,
    id: Uuid,
    command: impl Into<M::Command>,
) -> AskResult<M> {
    let command = command.into();
    let permit = authorize(by, command.action()).unwrap();
    let context = CommandContext::new(&permit, "test", environment.now() + TimeDelta::seconds(10));
    directory.ask::<M>(&permit, id, command, context).await
}

/// The first term of every shard.
pub fn first_terms() -> impl Iterator<Item = Term> {
    Shard::all().map(|shard| Term { shard, epoch: Epoch(1) })
}

/// The system, as its workers act.
#[must_use]
pub fn system() -> Principal {
    Principal::system("test")
}

/// A user or an administrator, as a token names them.
#[must_use]
pub fn caller(user_id: &str, role: TokenRole) -> Principal {
    Principal::Caller(CallerIdentity::new(user_id, [role]))
}
