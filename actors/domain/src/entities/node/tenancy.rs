//! The allocations on the node's GPUs, and the tasks that set tenants up and clean them up.

use super::{
    AgentUpdate, Evacuation, HoldAuthor, HoldSshAccess, Node, NodeHealth, PREVENT_ALLOCATION, Phase, Rejection, Reply,
    StateCode, TerminalTask, ValidationOrder,
};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::hardware::Placement;
use crate::id::{AllocationId, TaskId, TerminalSessionId};
use crate::recording::RecordingTerms;
use crate::retry::RetryTimer;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{Effect, RequestOrigin, Timestamp, Transition, TransitionContext};
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Why a tenant that the agent has set up is not admitted.
const CRITICAL_FAULT: &str = "the machine has a critical fault";

/// The bound of the tenants' public keys in bytes, with one more tenant.
const MAX_KEYS_BYTES: usize = 24 * 1024;

/// One allocation's hold on GPUs of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub placed: Placement,
    pub keys: Vec<AuthorizedKey>,
    /// The revision of the keys, and what the agent has written of it.
    #[serde(default)]
    pub logins: HoldSshAccess,
    pub phase: HoldPhase,
    /// When the node asks the allocation again whether it wants the hold.
    #[serde(default)]
    pub again: Option<RetryTimer>,
    /// Terminal sessions that the agent is to start.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub terminals: BTreeMap<TerminalSessionId, TerminalTask>,
    /// What the last clean-up attempt left, as the agent describes it.
    #[serde(default)]
    pub remains: Option<String>,
    /// The machine is reinstalled after this tenant.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reimages: bool,
    /// Its tenant is asked to leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuation: Option<Evacuation>,
}

impl Hold {
    /// No allocation is asked about an abandoned tenant: its clean-up stays dispatched to the agent.
    const fn active_resend_timer(&self) -> Option<RetryTimer> {
        match self.phase {
            HoldPhase::Abandoned { .. } => None,
            HoldPhase::Reserved
            | HoldPhase::Provisioning { .. }
            | HoldPhase::Ready
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. } => self.again,
        }
    }
}

/// The phase of a tenant on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum HoldPhase {
    /// The devices are reserved; the agent has no task yet.
    Reserved,
    Provisioning {
        work: PendingTask,
    },
    Ready,
    /// The agent could not set the tenant up. What it did stays until the allocation requests the clean-up.
    SetupFailed {
        reason: String,
        detail: String,
    },
    Releasing {
        work: PendingTask,
    },
    /// The clean-up failed; the next attempt comes from the allocation.
    ReleaseFailed {
        work: PendingTask,
    },
    /// A tenant without an allocation, and without a clean-up proof: released by force, or set up for an allocation that does not want it.
    /// The clean-up stays dispatched to the agent.
    Abandoned {
        work: PendingTask,
    },
}

/// A task without a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingTask {
    pub task_id: TaskId,
    pub attempt: u32,
    pub ordered_at: Timestamp,
    pub deadline_at: Timestamp,
    /// The request that caused it: the agent's log lines and its result carry its ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<RequestOrigin>,
}

/// A task as the edge signs it for the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentTask {
    pub work: PendingTask,
    pub what: TaskKind,
}

impl AgentTask {
    /// The allocation of the task, if any.
    #[must_use]
    pub const fn allocation_id(&self) -> Option<AllocationId> {
        match &self.what {
            TaskKind::Provision { place, .. }
            | TaskKind::ReconcileLogins { place, .. }
            | TaskKind::Release { place }
            | TaskKind::OpenTerminal { place, .. } => Some(place.allocation_id),
            TaskKind::OfNode { .. } => None,
        }
    }
}

/// A tenant's place on the node, as the agent creates and removes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSlot {
    pub allocation_id: AllocationId,
    pub placed: Placement,
    pub sku: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum TaskKind {
    Provision {
        place: TenantSlot,
        keys: Vec<AuthorizedKey>,
    },
    ReconcileLogins {
        place: TenantSlot,
        keys: Vec<AuthorizedKey>,
    },
    Release {
        place: TenantSlot,
    },
    /// A task of the node itself, ordered by an administrator while the machine was in this boot.
    OfNode {
        task_type: TaskType,
        boot_id: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        update: Option<AgentUpdate>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        validation: Option<ValidationOrder>,
    },
    OpenTerminal {
        place: TenantSlot,
        session_id: TerminalSessionId,
        ends_at: Timestamp,
        #[serde(default)]
        recording: RecordingTerms,
    },
}

/// The outcome of a task, as the agent reports it. The edge has verified the signature of a clean-up proof before it passes `proof`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum TaskOutcome {
    Succeeded {
        /// A release succeeds only with a verified proof that nothing is left.
        proof: Option<AllocationId>,
    },
    Failed {
        code: String,
        message: String,
    },
}

impl Node {
    pub(super) fn reserve(
        &self,
        (allocation_id, gpu_count): (AllocationId, u32),
        keys: Vec<AuthorizedKey>,
        revision: u64,
        reimages: bool,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if let Some(hold) = self.holds.get(&allocation_id) {
            return Ok(self.already_reserved(allocation_id, hold));
        }
        if let Some(why) = self.not_schedulable() {
            return Err(Rejection::NotSchedulable { why });
        }
        if let Some(why) = self.not_isolable(gpu_count).filter(|_| reimages) {
            return Err(Rejection::NotSchedulable { why });
        }
        let held = self.holds.values().flat_map(|hold| &hold.keys).chain(&keys);
        if held.map(|key| key.public_key.len() + key.fingerprint.len()).sum::<usize>() > MAX_KEYS_BYTES {
            return Err(Rejection::NotSchedulable { why: "its tenants' SSH keys leave no room for more".to_owned() });
        }
        let devices: Vec<_> = self.free_devices().take(gpu_count as usize).collect();
        if devices.len() < gpu_count as usize {
            return Err(Rejection::NotEnoughGpus { free: self.gpus_free(), wanted: gpu_count });
        }
        let placed = Placement {
            devices,
            host: self.registration.host.clone(),
            port: self.registration.port,
            user_name: user_name(allocation_id),
            region_code: self.registration.region_code.clone(),
            host_fingerprint: self.inventory.as_ref().and_then(|inventory| inventory.host_fingerprint.clone()),
        };
        let mut next = self.clone();
        let again = Some(RetryTimer::first(ctx.now));
        next.holds.insert(
            allocation_id,
            Hold {
                placed: placed.clone(),
                keys,
                logins: HoldSshAccess::initial(revision),
                phase: HoldPhase::Reserved,
                again,
                remains: None,
                evacuation: None,
                terminals: BTreeMap::new(),
                reimages,
            },
        );
        debug_assert!(next.holds_each_gpu_once());
        let event = Event::DevicesReserved { node_id: self.id, allocation_id, placed: placed.clone() };
        let why = format!("{gpu_count} GPUs reserved for allocation {allocation_id}");
        Ok(Transition::to(next, Reply::Reserved { placed }, why).event(event))
    }

    /// Why it cannot be one tenant's alone and be reinstalled afterwards; `None` where it can.
    fn not_isolable(&self, gpu_count: u32) -> Option<String> {
        if gpu_count != self.registration.gpus_total {
            return Some(format!(
                "an allocation that is isolated by reimage has all {} GPUs of a node",
                self.registration.gpus_total
            ));
        }
        self.not_reimageable()
    }

    /// The allocation has the hold already: the event is published again.
    fn already_reserved(&self, allocation_id: AllocationId, hold: &Hold) -> Transition<Self> {
        let placed = hold.placed.clone();
        let event = Event::DevicesReserved { node_id: self.id, allocation_id, placed: placed.clone() };
        Transition::to(self.clone(), Reply::Reserved { placed }, "asked again for the same reservation").event(event)
    }

    /// Why it takes no new allocation; `None` where it does.
    #[must_use]
    pub fn not_schedulable(&self) -> Option<String> {
        self.unfit().or_else(|| self.withheld()).or_else(|| self.occupied())
    }

    /// Why no allocation can be placed on it, regardless of its tenants.
    fn unfit(&self) -> Option<String> {
        if self.life != Phase::Active {
            return Some(format!("it is {}", self.life.name()));
        }
        self.mismatch().or_else(|| self.under_repair()).or_else(|| self.under_validation())
    }

    /// What of its health prevents new allocations on all of its GPUs.
    fn withheld(&self) -> Option<String> {
        self.withheld_by_finding().or_else(|| self.withheld_by_alert())
    }

    /// The alert of an older agent that prevents new allocations.
    fn withheld_by_alert(&self) -> Option<String> {
        let alert = self.health.alerts.iter().find(|alert| NodeHealth::is_of_class(alert, PREVENT_ALLOCATION))?;
        let text = |field: &str| alert.get(field).and_then(Value::as_str).unwrap_or_default();
        let (probe, target, message) = (text("probe_id"), text("target"), text("message"));
        Some(format!("an alert of its agent prevents new allocations: {probe} on {target}: {message}"))
    }

    /// Why its present or past tenants exclude another one.
    fn occupied(&self) -> Option<String> {
        let unproven = self
            .holds
            .iter()
            .find(|(_, hold)| matches!(hold.phase, HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }));
        if let Some((allocation_id, hold)) = unproven {
            let remains = hold.remains.as_ref().map(|remains| format!(": {remains}")).unwrap_or_default();
            return Some(format!("the clean-up of allocation {allocation_id} is not proved{remains}"));
        }
        let isolates = self.inventory.as_ref().is_some_and(|inventory| inventory.isolates_devices);
        if !isolates && !self.holds.is_empty() {
            return Some("it cannot keep tenants' GPUs apart and has a tenant".to_owned());
        }
        None
    }

    /// How many GPUs a new allocation could get now.
    #[must_use]
    pub fn gpus_free(&self) -> u32 {
        if self.not_schedulable().is_some() {
            return 0;
        }
        u32::try_from(self.free_devices().count()).unwrap_or(0)
    }

    /// How many more GPUs a new allocation could get, if the node's health did not prevent it.
    #[must_use]
    pub fn gpus_withheld(&self) -> u32 {
        if self.unfit().is_some() || self.occupied().is_some() {
            return 0;
        }
        let withheld =
            if self.withheld().is_some() { self.unheld_devices().count() } else { self.withheld_free_gpus() };
        u32::try_from(withheld).unwrap_or(0)
    }

    pub(super) fn unreserve(&self, allocation_id: AllocationId, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match self.holds.get(&allocation_id) {
            // The agent never had a task for it: there is nothing to clean up.
            Some(Hold { phase: HoldPhase::Reserved, .. }) => {
                self.release_hold(allocation_id, "the reservation is not wanted", ctx)
            }
            // A late request came in between. The allocation will never be here, so that no other request for the clean-up follows.
            Some(
                hold @ Hold {
                    phase:
                        HoldPhase::Provisioning { .. }
                        | HoldPhase::Ready
                        | HoldPhase::SetupFailed { .. }
                        | HoldPhase::Releasing { .. }
                        | HoldPhase::ReleaseFailed { .. },
                    ..
                },
            ) => {
                let work = self.abandoned_clean_up(hold, ctx);
                let mut step = self
                    .with_phase(
                        allocation_id,
                        HoldPhase::Abandoned { work },
                        format!("allocation {allocation_id} does not want its tenant: it is to be cleaned up"),
                    )
                    .effect(Effect::WakeNode(self.id));
                if let Some(next) = &mut step.next {
                    next.fenced_by.remove(&allocation_id);
                }
                step
            }
            Some(Hold { phase: HoldPhase::Abandoned { .. }, .. }) | None => Transition::stay(Reply::Done),
        }
    }

    pub(super) fn provision(
        &self,
        allocation_id: AllocationId,
        deadline_at: Timestamp,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let failed = |reason: &str, detail: &str| {
            Transition::to(self.clone(), Reply::Done, detail).event(Event::TenantFailed {
                node_id: self.id,
                allocation_id,
                reason: reason.to_owned(),
            })
        };
        match self.holds.get(&allocation_id).map(|hold| &hold.phase) {
            Some(HoldPhase::Reserved) if self.in_service() => {
                let work = PendingTask {
                    task_id: TaskId(ctx.new_id(0)),
                    attempt: 1,
                    ordered_at: ctx.now,
                    deadline_at,
                    origin: Some(ctx.origin()),
                };
                self.with_phase(allocation_id, HoldPhase::Provisioning { work }, "the tenant is to be set up")
                    .effect(Effect::WakeNode(self.id))
            }
            Some(HoldPhase::Reserved) => failed("node_not_available", "the node is not in service any more"),
            // An allocation that requests it is not active yet, and must not become active on a machine with a fault.
            Some(HoldPhase::Ready) if let Some(fault) = self.fault_of(allocation_id) => failed(fault, CRITICAL_FAULT),
            Some(HoldPhase::Ready) => Transition::to(self.clone(), Reply::Done, "the tenant is set up already")
                .event(Event::TenantReady { node_id: self.id, allocation_id }),
            Some(HoldPhase::SetupFailed { reason, detail }) => failed(reason, detail),
            Some(HoldPhase::Provisioning { .. }) => Transition::stay(Reply::Done).effect(Effect::WakeNode(self.id)),
            Some(HoldPhase::Releasing { .. } | HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }) => {
                Transition::stay(Reply::Done)
            }
            None => failed("reservation_lost", "the node holds no devices for the allocation"),
        }
    }

    pub(super) fn clean(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        deadline_at: Timestamp,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else {
            // Proved before, or never here: in both cases nothing of it is held.
            return Transition::to(self.clone(), Reply::Done, "nothing is held for the allocation")
                .event(Event::TenantGone { node_id: self.id, allocation_id, attempt });
        };
        let task_id = match &hold.phase {
            // The clean-up of an abandoned tenant has no bound of attempts and ends only with the proof.
            HoldPhase::Abandoned { .. } => return Transition::stay(Reply::Done).effect(Effect::WakeNode(self.id)),
            HoldPhase::Releasing { work } if work.attempt >= attempt => {
                return Transition::stay(Reply::Done).effect(Effect::WakeNode(self.id));
            }
            // A request that was overtaken by the failure of a later attempt.
            HoldPhase::ReleaseFailed { work } if work.attempt > attempt => return Transition::stay(Reply::Done),
            // The attempt has failed already, and the allocation did not receive it.
            HoldPhase::ReleaseFailed { work } if work.attempt == attempt => {
                let (reason, detail) = ("clean_up_failed".to_owned(), hold.remains.clone().unwrap_or_default());
                return Transition::to(self.clone(), Reply::Done, "asked again for a clean-up that has failed")
                    .event(Event::TenantRemains { node_id: self.id, allocation_id, attempt, reason, detail });
            }
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => work.task_id,
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                TaskId(ctx.new_id(0))
            }
        };
        let work = PendingTask { task_id, attempt, ordered_at: ctx.now, deadline_at, origin: Some(ctx.origin()) };
        let mut step = self
            .with_phase(
                allocation_id,
                HoldPhase::Releasing { work },
                format!("the tenant is to be cleaned up (attempt {attempt})"),
            )
            .effect(Effect::WakeNode(self.id));
        if let Some(next) = &mut step.next {
            next.fenced_by.remove(&allocation_id);
        }
        step
    }

    /// The allocation has given up its clean-up attempt: no new allocation until a proof arrives. Facts of an attempt that was followed by
    /// another are ignored.
    pub(super) fn mark_release_failed(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        match self.release_failed_phase(allocation_id, attempt, ctx) {
            Some(phase) if !self.is_in(allocation_id, &phase) => self.with_phase(
                allocation_id,
                phase,
                format!("clean-up attempt {attempt} failed: no new allocation until it is proved"),
            ),
            Some(_) | None => Transition::stay(Reply::Done),
        }
    }

    pub(super) fn fence(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        if !self.holds.contains_key(&allocation_id) {
            // The proof arrived after all, and the allocation did not receive it.
            return Transition::to(self.clone(), Reply::Done, "nothing is held for the allocation")
                .event(Event::TenantGone { node_id: self.id, allocation_id, attempt });
        }
        match self.release_failed_phase(allocation_id, attempt, ctx) {
            Some(phase) if self.fenced_by.contains(&allocation_id) && self.is_in(allocation_id, &phase) => {
                Transition::stay(Reply::Done)
            }
            Some(phase) => {
                let why = format!("fenced by the failed release of allocation {allocation_id}");
                let mut step = self.with_phase(allocation_id, phase, why);
                if let Some(next) = &mut step.next {
                    next.fenced_by.insert(allocation_id);
                }
                // A waiting long poll is answered.
                step.effect(Effect::WakeNode(self.id))
            }
            None => Transition::stay(Reply::Done),
        }
    }

    /// The hold's phase after clean-up attempt `attempt` has failed; `None` where a later one runs, or none can fail.
    fn release_failed_phase(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        ctx: &TransitionContext<'_>,
    ) -> Option<HoldPhase> {
        let work = match &self.holds.get(&allocation_id)?.phase {
            HoldPhase::Abandoned { .. } => return None,
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } if work.attempt > attempt => return None,
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => {
                PendingTask { attempt, ..work.clone() }
            }
            // The request of that attempt has not arrived yet.
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                PendingTask {
                    task_id: TaskId(ctx.new_id(0)),
                    attempt,
                    ordered_at: ctx.now,
                    deadline_at: ctx.now,
                    origin: Some(ctx.origin()),
                }
            }
        };
        Some(HoldPhase::ReleaseFailed { work })
    }

    /// Released by force: the node is quarantined until the agent proves that nothing is left.
    pub(super) fn abandon(&self, allocation_id: AllocationId, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else { return Transition::stay(Reply::Done) };
        let closed = self.is_held_by(HoldAuthor::Release) || self.life.is_gone();
        if closed && matches!(hold.phase, HoldPhase::Abandoned { .. }) {
            return Transition::stay(Reply::Done);
        }
        let mut next = self.clone();
        next.fenced_by.remove(&allocation_id);
        let work = self.abandoned_clean_up(hold, ctx);
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.phase = HoldPhase::Abandoned { work };
        }
        let event = (!closed).then_some(()).and_then(|()| {
            let message = "An allocation was released by force, without proof of clean-up.";
            next.enter_quarantine(StateCode::ForcedRelease, message, ctx)
        });
        let step = Transition::to(next, Reply::Done, format!("allocation {allocation_id} was released by force"))
            .effect(Effect::WakeNode(self.id));
        event.into_iter().fold(step, Transition::event)
    }

    /// A clean-up without an allocation. It has no deadline: it stays dispatched until the proof arrives.
    fn abandoned_clean_up(&self, hold: &Hold, ctx: &TransitionContext<'_>) -> PendingTask {
        let (task_id, attempt) = match &hold.phase {
            HoldPhase::Abandoned { work } => return work.clone(),
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => {
                (work.task_id, work.attempt.saturating_add(1))
            }
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                (TaskId(ctx.new_id(0)), 1)
            }
        };
        PendingTask {
            task_id,
            attempt,
            ordered_at: ctx.now,
            deadline_at: Timestamp::MAX_UTC,
            origin: Some(ctx.origin()),
        }
    }

    /// The pending tasks of types that the agent supports, oldest first.
    pub(super) fn pending_tasks(&self) -> Vec<AgentTask> {
        let of_tenants = self.holds.iter().filter_map(|(id, hold)| self.tenant_task(*id, hold));
        let mut orders: Vec<_> = of_tenants.chain(self.ssh_keys_tasks()).chain(self.node_tasks()).collect();
        if self.in_service() {
            orders.extend(self.terminal_tasks());
        }
        orders.retain(|order| self.lacks_task_type(order.what.task_type()).is_none());
        orders.sort_by_key(|order| (order.work.ordered_at, order.work.task_id));
        orders
    }

    fn tenant_task(&self, allocation_id: AllocationId, hold: &Hold) -> Option<AgentTask> {
        let place =
            || TenantSlot { allocation_id, placed: hold.placed.clone(), sku: self.registration.sku.name.clone() };
        let (work, what) = match &hold.phase {
            // A node that is out of service, or waits for a clean-up proof, gets every task but this one.
            HoldPhase::Provisioning { work } if self.in_service() && !self.has_unproven() => {
                (work, TaskKind::Provision { place: place(), keys: hold.keys.clone() })
            }
            HoldPhase::Releasing { work } | HoldPhase::Abandoned { work } => {
                (work, TaskKind::Release { place: place() })
            }
            HoldPhase::Provisioning { .. }
            | HoldPhase::Reserved
            | HoldPhase::Ready
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::ReleaseFailed { .. } => return None,
        };
        Some(AgentTask { work: work.clone(), what })
    }

    /// Whether it serves its tenants. A quarantined node only cleans up.
    const fn in_service(&self) -> bool {
        matches!(self.life, Phase::Active | Phase::Offline | Phase::Draining { .. })
    }

    /// The first allocation that is on the node. An abandoned tenant belongs to none.
    pub(super) fn in_use(&self) -> Option<AllocationId> {
        self.holds
            .iter()
            .find(|(_, hold)| !matches!(hold.phase, HoldPhase::Abandoned { .. }))
            .map(|(allocation_id, _)| *allocation_id)
    }

    fn has_unproven(&self) -> bool {
        self.holds
            .values()
            .any(|hold| matches!(hold.phase, HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }))
    }

    pub(super) fn report(
        &self,
        serial: &str,
        (task_id, attempt): (TaskId, u32),
        verdict: TaskOutcome,
        output: Option<Value>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_certificate(serial, ctx)?;
        if let Some(of_a_terminal) = self.terminal_reported(task_id, attempt, &verdict) {
            return of_a_terminal;
        }
        if let Some(of_logins) = self.ssh_keys_reported(task_id, attempt, &verdict, ctx) {
            return of_logins;
        }
        if self.tasks.contains_key(&task_id) {
            return self.task_reported(task_id, attempt, verdict, output, ctx);
        }
        let found = self.holds.iter().find_map(|(id, hold)| match &hold.phase {
            HoldPhase::Provisioning { work }
            | HoldPhase::Releasing { work }
            | HoldPhase::ReleaseFailed { work }
            | HoldPhase::Abandoned { work }
                if work.task_id == task_id =>
            {
                Some((*id, hold, work.attempt))
            }
            HoldPhase::Provisioning { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. }
            | HoldPhase::Reserved
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Ready => None,
        });
        let Some((allocation_id, hold, current)) = found else { return Err(Rejection::TaskUnknown) };
        let proves = verdict == (TaskOutcome::Succeeded { proof: Some(allocation_id) });
        match &hold.phase {
            HoldPhase::Provisioning { .. } if attempt == current => Ok(self.tenant_reported(allocation_id, &verdict)),
            // A proof of an earlier attempt is as good as any.
            HoldPhase::Releasing { .. } | HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }
                if proves && attempt <= current =>
            {
                let gone = Event::TenantGone { node_id: self.id, allocation_id, attempt };
                Ok(self.release_hold(allocation_id, "the agent proved the clean-up", ctx).event(gone))
            }
            HoldPhase::Releasing { .. } | HoldPhase::Abandoned { .. } if attempt == current => {
                Ok(self.clean_up_failed(allocation_id, attempt, &verdict))
            }
            // The allocation gave the attempt up before this result, and has reacted to that.
            HoldPhase::ReleaseFailed { .. } if attempt == current => Ok(Transition::stay(Reply::Done)),
            HoldPhase::Provisioning { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. }
            | HoldPhase::Reserved
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Ready => Err(Rejection::StaleAttempt { given: attempt, current }),
        }
    }

    fn tenant_reported(&self, allocation_id: AllocationId, verdict: &TaskOutcome) -> Transition<Self> {
        match verdict {
            // The fault was published once, when it was detected, and the allocation may not have received its reservation by then.
            TaskOutcome::Succeeded { .. } if let Some(fault) = self.fault_of(allocation_id) => {
                let phase = HoldPhase::SetupFailed { reason: fault.to_owned(), detail: CRITICAL_FAULT.to_owned() };
                let failed = Event::TenantFailed { node_id: self.id, allocation_id, reason: fault.to_owned() };
                self.with_phase(allocation_id, phase, CRITICAL_FAULT).event(failed)
            }
            TaskOutcome::Succeeded { .. } => {
                let step = self
                    .with_phase(allocation_id, HoldPhase::Ready, "the agent set the tenant up")
                    .event(Event::TenantReady { node_id: self.id, allocation_id });
                self.ssh_keys_of_setup(step, allocation_id)
            }
            // Devices stay held: what was set up must be cleaned up, and the allocation has to request that.
            TaskOutcome::Failed { code, message } => self
                .with_phase(
                    allocation_id,
                    HoldPhase::SetupFailed { reason: code.clone(), detail: message.clone() },
                    format!("the agent could not set the tenant up: {message}"),
                )
                .event(Event::TenantFailed { node_id: self.id, allocation_id, reason: reason_code(code) }),
        }
    }

    fn clean_up_failed(&self, allocation_id: AllocationId, attempt: u32, verdict: &TaskOutcome) -> Transition<Self> {
        let (reason, detail) = match verdict {
            TaskOutcome::Succeeded { .. } => {
                ("proof_missing".to_owned(), "the agent gave no valid clean-up proof".to_owned())
            }
            TaskOutcome::Failed { code, message } => (code.clone(), message.clone()),
        };
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.remains = Some(detail.clone());
            hold.phase = match &hold.phase {
                HoldPhase::Releasing { work } => HoldPhase::ReleaseFailed { work: work.clone() },
                // No allocation will retry: it is dispatched again.
                HoldPhase::Abandoned { work } => HoldPhase::Abandoned {
                    work: PendingTask { attempt: work.attempt.saturating_add(1), ..work.clone() },
                },
                other @ (HoldPhase::Reserved
                | HoldPhase::Provisioning { .. }
                | HoldPhase::Ready
                | HoldPhase::SetupFailed { .. }
                | HoldPhase::ReleaseFailed { .. }) => other.clone(),
            };
        }
        let why = format!("clean-up attempt {attempt} failed: {detail}");
        let reason = reason_code(&reason);
        let remains = Event::TenantRemains { node_id: self.id, allocation_id, attempt, reason, detail };
        Transition::to(next, Reply::Done, why).event(remains)
    }

    fn release_hold(&self, allocation_id: AllocationId, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        let hold = next.holds.remove(&allocation_id);
        next.fenced_by.remove(&allocation_id);
        // A tenant that was never set up has left nothing.
        if hold.is_some_and(|hold| hold.reimages && hold.phase != HoldPhase::Reserved) && next.machine.is_some() {
            let (events, audit) = next.begin_reimage(&format!("allocation {allocation_id} has ended"), ctx);
            let step = Transition::to(next, Reply::Done, format!("allocation {allocation_id}: {why}")).audit(audit);
            return events.into_iter().fold(step, Transition::event).effect(Effect::CloseNode(self.id));
        }
        let retired = next.retire_if_drained(ctx);
        let step = Transition::to(next, Reply::Done, format!("allocation {allocation_id}: {why}"));
        match retired {
            Some(event) => step.event(event).audit(self.audit(AuditAction::NodesDrained, json!({}))),
            None => step,
        }
    }

    /// When it asks next whether one of its holds is still wanted.
    pub(super) fn next_resend_at(&self) -> Option<Timestamp> {
        self.holds.values().filter_map(Hold::active_resend_timer).map(|again| again.at).min()
    }

    /// Messages between a node and an allocation may have been lost. So the node periodically publishes its holds; the allocation answers
    /// if it does not want them.
    pub(super) fn confirm_holds(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = step.next.clone().unwrap_or_else(|| self.clone());
        let mut asked = Vec::new();
        for (allocation_id, hold) in &mut next.holds {
            if let Some(again) = hold.active_resend_timer().filter(|again| again.is_due(ctx.now)) {
                hold.again = Some(again.next(ctx.now));
                let (allocation_id, placed) = (*allocation_id, hold.placed.clone());
                asked.push(Event::DevicesReserved { node_id: self.id, allocation_id, placed });
            }
        }
        if asked.is_empty() {
            return step;
        }
        let why =
            if step.next.is_some() { step.why.clone() } else { "asking whether its tenants are wanted".to_owned() };
        asked.into_iter().fold(Transition { next: Some(next), why, ..step }, Transition::event)
    }

    fn is_in(&self, allocation_id: AllocationId, phase: &HoldPhase) -> bool {
        self.holds.get(&allocation_id).is_some_and(|hold| hold.phase == *phase)
    }

    pub(super) fn with_phase(
        &self,
        allocation_id: AllocationId,
        phase: HoldPhase,
        why: impl Into<String>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.phase = phase;
        }
        Transition::to(next, Reply::Done, why)
    }
}

/// The agent's cause, where it is a code: an event carries no free text of an agent. That is in the history.
pub(super) fn reason_code(code: &str) -> String {
    let is_code =
        !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    if is_code { code.to_owned() } else { "agent_error".to_owned() }
}

/// The login of an allocation on its node: short enough for every system, and derived from the id alone so that it is unique.
#[must_use]
pub fn user_name(allocation_id: AllocationId) -> String {
    let id = allocation_id.0.as_simple().to_string();
    format!("gpu-{}", &id[id.len() - 16..])
}
