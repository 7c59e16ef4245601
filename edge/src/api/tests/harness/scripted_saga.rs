//! The workers of the harness: a saga that places allocations as a test has set, payments without a processor, and effects.

use crate::app_state::AppState;
use crate::trust::current_keys::{CurrentKeys, Keys};
use crate::trust::node_certificate::TrustDomain;
use actors::sharding::id_of_name;
use actors::shell_dependencies::Effects;
use domain::allocation::{self, Allocation, Placement};
use domain::billing_account::BillingAccount;
use domain::choreography::Reaction;
use domain::event::{Event, GpuDevice};
use domain::payment::Payment;
use domain::{AllocationId, Effect, EntityKind, Machine, NodeId, node};
use persistence::{OutboxRow, Reads, Secrets};
use std::sync::{Arc, Mutex};
use test_host::{TestEnvironment, system};
use uuid::Uuid;

/// The outcome of placing an allocation, as the scripted saga reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api::tests) enum PlacementOutcome {
    Silent,
    On(NodeId),
    NoCapacity,
    OverQuota,
    Unaffordable,
}

/// Replies to allocation requests with the outcome that the test has set.
pub(super) async fn run_placements(
    app: AppState,
    placement: Arc<Mutex<PlacementOutcome>>,
    mut published: tokio::sync::mpsc::Receiver<OutboxRow>,
) {
    while let Some(row) = published.recv().await {
        let Event::AllocationRequested { allocation_id } = row.event else {
            run_payments(&app, row.event).await;
            continue;
        };
        let placement = *placement.lock().unwrap();
        let command = match placement {
            PlacementOutcome::Silent => continue,
            PlacementOutcome::On(node_id) => allocation::Fact::Reserved { node_id, placed: placed(allocation_id) },
            PlacementOutcome::NoCapacity => {
                allocation::Fact::NoCapacity { suggestion: Some("Region us-1 has room for 4 GPUs.".into()) }
            }
            PlacementOutcome::OverQuota => allocation::Fact::OverQuota { limit: 50 },
            PlacementOutcome::Unaffordable => {
                allocation::Fact::Unaffordable { message: "There is nothing to pay it from.".into() }
            }
        };
        ask_as_system::<Allocation>(&app, allocation_id.0, command).await;
    }
}

/// Forwards events between payments and their accounts. There is no processor.
async fn run_payments(app: &AppState, event: Event) {
    match event.reaction() {
        Reaction::Payment(id, fact) => {
            ask_as_system::<Payment>(app, id.0, fact).await;
        }
        Reaction::Billing { holder, instruction }
            if matches!(
                event,
                Event::PaymentPaid { .. }
                    | Event::RefundRequested { .. }
                    | Event::RefundFailed { .. }
                    | Event::PaymentReversed { .. }
            ) =>
        {
            let account = id_of_name(EntityKind::BillingAccount, &holder.to_string());
            ask_as_system::<BillingAccount>(app, account, instruction).await;
        }
        _ => {}
    }
}

async fn ask_as_system<M: Machine>(app: &AppState, id: Uuid, command: impl Into<M::Command>) {
    test_host::ask::<M>(&app.directory, app.environment.as_ref(), &system(), id, command).await.unwrap();
}

fn placed(allocation_id: AllocationId) -> Placement {
    Placement {
        devices: vec![GpuDevice { index: 0, uuid: "GPU-0".into() }],
        host: "gpu-17.internal".into(),
        port: 22,
        user_name: node::user_name(allocation_id),
        region_code: "eu-1".into(),
        host_fingerprint: None,
    }
}

pub(super) struct EffectRunner {
    pub(super) reads: Reads,
    pub(super) environment: Arc<TestEnvironment>,
    pub(super) keys: (CurrentKeys, Secrets, TrustDomain),
    /// Held from a read to what follows from it: of two reads, the later one holds.
    pub(super) reading: Arc<tokio::sync::Mutex<()>>,
}

impl Effects for EffectRunner {
    fn perform(&self, effect: Effect) {
        let (reads, environment, keys) = (self.reads.clone(), Arc::clone(&self.environment), self.keys.clone());
        let reading = Arc::clone(&self.reading);
        tokio::spawn(async move {
            let _reading = reading.lock().await;
            match effect {
                Effect::ReadPolicy => environment.policy.store(Arc::new(reads.policy_book().await.unwrap())),
                Effect::ReadKeys => {
                    let (current, secrets, domain) = keys;
                    current.replace(Keys::read(&secrets, &reads, &domain).await.unwrap());
                }
                Effect::WakeNode(_) | Effect::CloseNode(_) | Effect::WakeTerminal(_) => {}
            }
        });
    }
}
