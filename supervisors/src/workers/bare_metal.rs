//! Has the bare-metal provider do what nodes want of it: deploy, release, mark as broken.
//!
//! The machine's status at the provider is read first, and says what is left to do: a call whose answer was lost, or whose worker was
//! killed before the record of it, is not repeated. The provider may take long to answer: right before a call that changes the machine the
//! node is read again as it is committed, and a deployment is preceded by the commit of its token. A lease lets one worker at a time act
//! for a node, so that two do not deploy it with two tokens. Calls are not stored here; the node publishes what is outstanding again, with
//! growing pauses, until it is reported as done.

#[cfg(test)]
mod tests;

use super::event_delivery::{Disposition, EventDelivery, ReactionContext};
use actors::sharding::command_id;
use actors::{AskError, CommandKey};
use domain::node::{Fact, Node, OrderedImage, ProvidedMachine, ProviderReport, ProviderStep};
use domain::state_machine::{CommandSort as _, Timestamp};
use domain::{EntityKind, EntityRef, NodeId, TokenId};
use edge::api::machine_provider::{UserDataError, user_data};
use edge::app_state::AppState;
use edge::outbound::maas::{Maas, MaasError, MaasMachine, MachineStatus};
use persistence::{Leases, Reads, StoreError};
use secrecy::ExposeSecret as _;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use uuid::Uuid;

/// Machines that are looked at at once in this process.
const MAX_CONCURRENT: usize = 32;
/// How long one waits for its turn.
const PERMIT_TIMEOUT: Duration = Duration::from_millis(500);
/// For all requests of one pass. Each has a timeout of its own.
const PASS_TIMEOUT: Duration = Duration::from_secs(25);
/// Longer than a pass, so that a request that may be in flight has ended when the next worker acts.
const LEASE: Duration = Duration::from_secs(30);
const _: () = assert!(LEASE.as_secs() > PASS_TIMEOUT.as_secs(), "a worker would act beside the request of another");

/// See the module.
#[derive(Clone)]
pub struct BareMetalWorker {
    services: AppState,
    leases: Leases,
    permits: Arc<Semaphore>,
}

/// Why a pass ended early. The node comes again.
#[derive(Debug, Error)]
enum PassError {
    #[error("the bare-metal provider: {0}")]
    Provider(#[from] MaasError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the node cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    #[error(transparent)]
    UserData(#[from] UserDataError),
    #[error("the node was not reached: {0}")]
    Node(String),
    /// What it wants of its machine has its own event.
    #[error("the node's request for its machine has changed since the pass began")]
    Changed,
}

/// What a pass does with one machine.
struct Pass<'a> {
    by: &'a ReactionContext,
    delivery: &'a EventDelivery,
    services: &'a AppState,
    maas: &'a Maas,
    node_id: NodeId,
    system_id: &'a str,
    /// When the machine's step began.
    since: Timestamp,
}

impl BareMetalWorker {
    #[must_use]
    pub fn new(services: AppState, leases: Leases) -> Self {
        Self { services, leases, permits: Arc::new(Semaphore::new(MAX_CONCURRENT)) }
    }

    /// One pass over the node's machine.
    pub(super) async fn drive(&self, by: &ReactionContext, delivery: &EventDelivery, node_id: NodeId) -> Disposition {
        let Some(maas) = self.services.maas.as_deref() else {
            tracing::warn!("no bare-metal provider is configured: what node {node_id} wants of it has to wait");
            return by.settle(delivery).await;
        };
        let Ok(Ok(_permit)) = timeout(PERMIT_TIMEOUT, self.permits.acquire()).await else {
            tracing::warn!("the bare-metal provider has as many requests in flight as are allowed");
            return by.settle(delivery).await;
        };
        let lease = match self.leases.acquire(&format!("machine/{node_id}"), LEASE).await {
            Ok(Some(lease)) => lease,
            // It is another worker's turn; the node comes again.
            Ok(None) => return by.settle(delivery).await,
            Err(error) => return Disposition::Later { why: error.to_string() },
        };
        let passed = timeout(PASS_TIMEOUT, self.pass(by, delivery, maas, node_id)).await;
        // A request that may be in flight keeps the lease until it cannot be any more; so does a worker that dies.
        if passed.is_ok()
            && let Err(error) = self.leases.release(lease).await
        {
            tracing::warn!(%error, "a lease was not released; it lapses");
        }
        match passed {
            Ok(Ok(())) => {}
            Ok(Err(PassError::Node(why))) => return Disposition::Later { why },
            Ok(Err(error @ PassError::Changed)) => {
                tracing::info!(%error, "node {node_id}: the machine was left as it is");
            }
            Ok(Err(error)) => tracing::warn!(%error, "node {node_id}: the machine was not advanced"),
            Err(_) => tracing::warn!("node {node_id}: the bare-metal provider did not answer in time"),
        }
        by.settle(delivery).await
    }

    async fn pass(
        &self,
        by: &ReactionContext,
        delivery: &EventDelivery,
        maas: &Maas,
        node_id: NodeId,
    ) -> Result<(), PassError> {
        let Some(node) = committed_node(&by.reads, node_id).await? else { return Ok(()) };
        let Some(machine) = &node.machine.provided else { return Ok(()) };
        let (system_id, since) = (machine.system_id.as_str(), machine.since);
        let pass = Pass { by, delivery, services: &self.services, maas, node_id, system_id, since };
        let report = match pass.advance(machine, node.machine.reimage.is_some()).await {
            Ok(report) => report,
            // Shown to the operator where the machine is.
            Err(PassError::Provider(error)) => {
                tracing::warn!(%error, "node {node_id}: the bare-metal provider has to be asked again");
                Some(ProviderReport::Waiting { status: error.to_string() })
            }
            Err(error) => return Err(error),
        };
        let Some(report) = report else { return Ok(()) };
        pass.report(Fact::MachineReported { since, report }).await.map(|_| ())
    }
}

/// As it is committed, and not as it may be in the memory of a member that another one has replaced.
async fn committed_node(reads: &Reads, node_id: NodeId) -> Result<Option<Node>, PassError> {
    let snapshot = reads.snapshot(EntityRef { kind: EntityKind::Node, id: node_id.0 }).await?;
    Ok(snapshot.map(|snapshot| serde_json::from_str(&snapshot.body)).transpose()?)
}

impl Pass<'_> {
    /// Ends the pass where the machine's step has changed since it began. Before each call that changes the machine.
    async fn expect_unchanged(&self) -> Result<(), PassError> {
        let node = committed_node(&self.by.reads, self.node_id).await?;
        let is_unchanged =
            node.and_then(|node| node.machine.provided).is_some_and(|machine| machine.since == self.since);
        if is_unchanged { Ok(()) } else { Err(PassError::Changed) }
    }

    /// Makes the next call, and returns what there is to report; `None` where the step is over, or all is as it was.
    async fn advance(&self, machine: &ProvidedMachine, reimages: bool) -> Result<Option<ProviderReport>, PassError> {
        let found = match &machine.step {
            ProviderStep::Failed { .. } | ProviderStep::Released => return Ok(None),
            ProviderStep::Deploying
            | ProviderStep::Deployed
            | ProviderStep::Failing { .. }
            | ProviderStep::Releasing { .. } => self.maas.machine(self.system_id).await?,
        };
        let Some(found) = found else { return Ok(absent(&machine.step)) };
        let ours = match found.owner {
            Some(_) => self.maas.is_ours(&found).await?,
            None => false,
        };
        match &machine.step {
            ProviderStep::Deploying => self.deploy(found, ours).await.map(Some),
            ProviderStep::Deployed => Ok(lost(&found, ours)),
            ProviderStep::Failing { why } => self.mark_broken(&found, ours, why).await.map(Some),
            ProviderStep::Releasing { then_deploy } => {
                self.release(&found, ours, *then_deploy || reimages).await.map(Some)
            }
            ProviderStep::Failed { .. } | ProviderStep::Released => Ok(None),
        }
    }

    async fn deploy(&self, mut found: MaasMachine, mut ours: bool) -> Result<ProviderReport, PassError> {
        if found.status == MachineStatus::Ready {
            self.expect_unchanged().await?;
            found = self.maas.allocate(self.system_id, &self.node_id.to_string()).await?;
            ours = self.maas.is_ours(&found).await?;
        }
        let failed = |why: String| Ok(ProviderReport::Failed { why });
        match found.status {
            MachineStatus::Allocated | MachineStatus::Deploying | MachineStatus::Deployed if !ours => {
                failed(format!("the machine is {} by another user of the provider", found.status_name))
            }
            MachineStatus::Allocated => {
                let prepared = user_data(self.services, self.node_id)?;
                let token_id = TokenId(Uuid::now_v7());
                // Of the settings by which the call below names the image.
                let image = Some(OrderedImage { digest: self.maas.image_digest().map(str::to_owned) });
                // The node knows the token before any machine has it.
                let ordered = Fact::MachineTokenMade { token_id, token_sha256: prepared.token_sha256, image };
                if !self.report(ordered).await? {
                    return Ok(waiting(&found));
                }
                let deploying = self.maas.deploy(self.system_id, prepared.script.expose_secret().as_bytes()).await?;
                Ok(waiting(&deploying))
            }
            MachineStatus::Deployed => Ok(ProviderReport::Done),
            MachineStatus::FailedDeployment => failed("Failed deployment".to_owned()),
            MachineStatus::Broken => failed("the machine is marked as broken".to_owned()),
            MachineStatus::Ready
            | MachineStatus::Deploying
            | MachineStatus::Releasing
            | MachineStatus::FailedReleasing
            | MachineStatus::Other => Ok(waiting(&found)),
        }
    }

    /// A machine that is another user's is not touched.
    async fn mark_broken(&self, found: &MaasMachine, ours: bool, why: &str) -> Result<ProviderReport, PassError> {
        let is_anothers = found.owner.is_some() && !ours;
        if found.status != MachineStatus::Broken && !is_anothers {
            self.expect_unchanged().await?;
            self.maas.mark_broken(self.system_id, &format!("gpuaas node {}: {why}", self.node_id)).await?;
        }
        Ok(ProviderReport::Done)
    }

    async fn release(&self, found: &MaasMachine, ours: bool, deploys_again: bool) -> Result<ProviderReport, PassError> {
        match found.status {
            MachineStatus::Ready => Ok(ProviderReport::Done),
            // It is in no pool, and an operator of the provider has to repair it.
            MachineStatus::Broken if !deploys_again => Ok(ProviderReport::Done),
            MachineStatus::Broken | MachineStatus::Releasing => Ok(waiting(found)),
            _ if found.owner.is_some() && !ours && !deploys_again => Ok(ProviderReport::Done),
            _ if found.owner.is_some() && !ours => {
                let status = format!("the machine is {} by another user of the provider", found.status_name);
                Ok(ProviderReport::Waiting { status })
            }
            MachineStatus::Allocated
            | MachineStatus::Deploying
            | MachineStatus::Deployed
            | MachineStatus::FailedDeployment
            | MachineStatus::FailedReleasing
            | MachineStatus::Other => {
                self.expect_unchanged().await?;
                let released = self.maas.release(self.system_id, &format!("gpuaas node {}", self.node_id)).await?;
                Ok(waiting(&released))
            }
        }
    }

    /// Whether the node has taken the fact in.
    async fn report(&self, fact: Fact) -> Result<bool, PassError> {
        // One delivery may send several facts, and a repetition of it other ones: each has an id of its own. The outbox row is settled
        // after the pass.
        let id = command_id(&[
            b"bare-metal",
            self.delivery.id.0.as_bytes(),
            fact.tag().as_bytes(),
            Uuid::now_v7().as_bytes(),
        ]);
        let key = CommandKey { id, consumes: None, ..CommandKey::for_event(self.delivery.id, fact.tag()) };
        let context = self.by.context_for(self.delivery).with_key(key);
        match self.by.directory.ask::<Node>(&self.by.permit, self.node_id.0, fact.into(), context).await {
            Ok(_) | Err(AskError::AlreadyDone) => Ok(true),
            Err(AskError::Rejected(rejection)) => {
                tracing::warn!("node {} does not take a fact of its machine: {rejection}", self.node_id);
                Ok(false)
            }
            Err(error) => Err(PassError::Node(error.to_string())),
        }
    }
}

fn waiting(found: &MaasMachine) -> ProviderReport {
    ProviderReport::Waiting { status: found.status_name.clone() }
}

/// What a step reports where the provider has no such machine.
fn absent(step: &ProviderStep) -> Option<ProviderReport> {
    let why = || "The provider has no such machine any more.".to_owned();
    match step {
        ProviderStep::Deploying => Some(ProviderReport::Failed { why: why() }),
        ProviderStep::Deployed => Some(ProviderReport::Lost { why: why() }),
        ProviderStep::Releasing { then_deploy: true } => Some(ProviderReport::Waiting { status: why() }),
        ProviderStep::Failing { .. } | ProviderStep::Releasing { then_deploy: false } => Some(ProviderReport::Done),
        ProviderStep::Failed { .. } | ProviderStep::Released => None,
    }
}

/// Whether the deployed machine is not the node's any more.
fn lost(found: &MaasMachine, ours: bool) -> Option<ProviderReport> {
    let status = &found.status_name;
    match found.status {
        MachineStatus::Ready | MachineStatus::Releasing | MachineStatus::FailedReleasing => {
            Some(ProviderReport::Lost { why: format!("The provider has released the machine: it is {status}.") })
        }
        _ if found.owner.is_some() && !ours => Some(ProviderReport::Lost {
            why: format!("The provider has given the machine to another user: it is {status}."),
        }),
        // Rescue mode, tests and the like, of the provider's operators.
        MachineStatus::Allocated
        | MachineStatus::Deploying
        | MachineStatus::Deployed
        | MachineStatus::FailedDeployment
        | MachineStatus::Broken
        | MachineStatus::Other => None,
    }
}
