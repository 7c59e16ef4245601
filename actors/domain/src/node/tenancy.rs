//! Who holds the node's GPUs, and the work that sets tenants up and takes them down.

use super::{Health, HeldLogins, Life, Node, PREVENT_ALLOCATION, Rejection, Reply, TerminalOrder};
use crate::again::Again;
use crate::allocation::{AuthorizedKey, Placed};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::{AllocationId, TaskId, TerminalSessionId};
use crate::machine::{Ctx, Effect, Origin, Step, Timestamp};
use crate::recording::Terms;
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Why nobody is let in, whom the agent has set up.
const BROKEN: &str = "the machine has a critical fault";

/// Bytes of its tenants' public keys with which a node takes one more tenant.
const KEYS_BYTES: usize = 24 * 1024;

/// One allocation's hold on GPUs of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub placed: Placed,
    pub keys: Vec<AuthorizedKey>,
    /// Which change of the keys that is, and how far the agent is with it.
    #[serde(default)]
    pub logins: HeldLogins,
    pub phase: HoldPhase,
    /// When the node asks again whether the allocation wants it.
    #[serde(default)]
    pub again: Option<Again>,
    /// Terminal sessions that the agent is to begin.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub terminals: BTreeMap<TerminalSessionId, TerminalOrder>,
    /// What the last clean-up attempt left, in the agent's words.
    #[serde(default)]
    pub remains: Option<String>,
}

impl Hold {
    /// Nobody is asked about an abandoned tenant: its clean-up stays offered to the agent.
    const fn asks_again(&self) -> Option<Again> {
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

/// How far the node is with a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum HoldPhase {
    /// The devices are set aside; the agent has not heard of it.
    Reserved,
    Provisioning {
        work: Work,
    },
    Ready,
    /// The agent could not set the tenant up. What it did of it is there until the allocation asks for the clean-up.
    SetupFailed {
        reason: String,
        detail: String,
    },
    Releasing {
        work: Work,
    },
    /// The clean-up failed; the next attempt comes from the allocation.
    ReleaseFailed {
        work: Work,
    },
    /// Nobody's tenant, and still unproven: released by force, or set up for an allocation that does not want it. The clean-up
    /// stays offered to the agent.
    Abandoned {
        work: Work,
    },
}

/// Something that the agent is to do and has not reported on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    pub task_id: TaskId,
    pub attempt: u32,
    pub ordered_at: Timestamp,
    pub deadline_at: Timestamp,
    /// The request that it goes back to: the agent's log lines and its report belong to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// Work as the edge signs it for the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub work: Work,
    pub what: What,
}

impl Order {
    /// The allocation that it is about, if any.
    #[must_use]
    pub const fn allocation_id(&self) -> Option<AllocationId> {
        match &self.what {
            What::Provision { place, .. }
            | What::ReconcileLogins { place, .. }
            | What::Release { place }
            | What::OpenTerminal { place, .. } => Some(place.allocation_id),
            What::OfNode { .. } => None,
        }
    }
}

/// A tenant's place on the node, as the agent makes it and removes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub allocation_id: AllocationId,
    pub placed: Placed,
    pub sku: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    Provision {
        place: Place,
        keys: Vec<AuthorizedKey>,
    },
    ReconcileLogins {
        place: Place,
        keys: Vec<AuthorizedKey>,
    },
    Release {
        place: Place,
    },
    /// Of the node itself, ordered by an administrator while the machine was in this boot.
    OfNode {
        task_type: TaskType,
        boot_id: Option<String>,
    },
    OpenTerminal {
        place: Place,
        session_id: TerminalSessionId,
        ends_at: Timestamp,
        #[serde(default)]
        recording: Terms,
    },
}

/// What the agent says came of a task. The edge has verified the signature of a clean-up proof before it says `clean`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    Succeeded {
        /// A release succeeded only with a verified proof that nothing is left.
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
        allocation_id: AllocationId,
        gpu_count: u32,
        keys: Vec<AuthorizedKey>,
        revision: u64,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        if let Some(hold) = self.holds.get(&allocation_id) {
            return Ok(self.again(allocation_id, hold));
        }
        if let Some(why) = self.not_schedulable() {
            return Err(Rejection::NotSchedulable { why });
        }
        let held = self.holds.values().flat_map(|hold| &hold.keys).chain(&keys);
        if held.map(|key| key.public_key.len() + key.fingerprint.len()).sum::<usize>() > KEYS_BYTES {
            return Err(Rejection::NotSchedulable { why: "its tenants' SSH keys leave no room for more".to_owned() });
        }
        let devices: Vec<_> = self.free_devices().take(gpu_count as usize).collect();
        if devices.len() < gpu_count as usize {
            return Err(Rejection::NotEnoughGpus { free: self.gpus_free(), wanted: gpu_count });
        }
        let placed = Placed {
            devices,
            host: self.registration.host.clone(),
            port: self.registration.port,
            user_name: user_name(allocation_id),
            region_code: self.registration.region_code.clone(),
            host_fingerprint: self.inventory.as_ref().and_then(|inventory| inventory.host_fingerprint.clone()),
        };
        let mut next = self.clone();
        let again = Some(Again::first(ctx.now));
        next.holds.insert(
            allocation_id,
            Hold {
                placed: placed.clone(),
                keys,
                logins: HeldLogins::asked_with(revision),
                phase: HoldPhase::Reserved,
                again,
                remains: None,
                terminals: BTreeMap::new(),
            },
        );
        debug_assert!(crate::invariant::each_gpu_is_held_once(&next));
        let event = Event::DevicesReserved { node_id: self.id, allocation_id, placed: placed.clone() };
        let why = format!("{gpu_count} GPUs reserved for allocation {allocation_id}");
        Ok(Step::to(next, Reply::Reserved { placed }, why).event(event))
    }

    /// The allocation holds them already: it is told so again.
    fn again(&self, allocation_id: AllocationId, hold: &Hold) -> Step<Self> {
        let placed = hold.placed.clone();
        let event = Event::DevicesReserved { node_id: self.id, allocation_id, placed: placed.clone() };
        Step::to(self.clone(), Reply::Reserved { placed }, "asked again for the same reservation").event(event)
    }

    /// Why it takes no new allocation, where it does not.
    #[must_use]
    pub fn not_schedulable(&self) -> Option<String> {
        self.unfit().or_else(|| self.withheld_by_alert()).or_else(|| self.occupied())
    }

    /// Why it is no machine to place on, whoever is on it.
    fn unfit(&self) -> Option<String> {
        if self.life != Life::Active {
            return Some(format!("it is {}", self.life.name()));
        }
        self.mismatch()
    }

    /// The alert that keeps new tenants from it.
    fn withheld_by_alert(&self) -> Option<String> {
        let alert = self.health.alerts.iter().find(|alert| Health::is_of_class(alert, PREVENT_ALLOCATION))?;
        let text = |field: &str| alert.get(field).and_then(Value::as_str).unwrap_or_default();
        let (probe, target, message) = (text("probe_id"), text("target"), text("message"));
        Some(format!("an alert of its agent prevents new allocations: {probe} on {target}: {message}"))
    }

    /// Why nobody can join who is on it, or was.
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

    /// How many GPUs a new allocation could get, if no alert of the node's agent prevented it.
    #[must_use]
    pub fn gpus_withheld(&self) -> u32 {
        if self.withheld_by_alert().is_none() || self.unfit().is_some() || self.occupied().is_some() {
            return 0;
        }
        u32::try_from(self.free_devices().count()).unwrap_or(0)
    }

    pub(super) fn unreserve(&self, allocation_id: AllocationId, ctx: &Ctx<'_>) -> Step<Self> {
        match self.holds.get(&allocation_id) {
            // The agent never heard of it: there is nothing to clean up.
            Some(Hold { phase: HoldPhase::Reserved, .. }) => {
                self.freed(allocation_id, "the reservation is not wanted", ctx)
            }
            // A stray order came between. The allocation is not here and never will be, so that nobody else asks for the clean-up.
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
                let work = self.last_clean_up(hold, ctx);
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
            Some(Hold { phase: HoldPhase::Abandoned { .. }, .. }) | None => Step::stay(Reply::Done),
        }
    }

    pub(super) fn provision(&self, allocation_id: AllocationId, deadline_at: Timestamp, ctx: &Ctx<'_>) -> Step<Self> {
        let failed = |reason: &str, detail: &str| {
            Step::to(self.clone(), Reply::Done, detail).event(Event::TenantFailed {
                node_id: self.id,
                allocation_id,
                reason: reason.to_owned(),
            })
        };
        match self.holds.get(&allocation_id).map(|hold| &hold.phase) {
            Some(HoldPhase::Reserved) if self.in_service() => {
                let work = Work {
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
            // An allocation that asks for it has not become active, and is not to become so on a broken machine.
            Some(HoldPhase::Ready) if let Some(fault) = self.fault_of(allocation_id) => failed(fault, BROKEN),
            Some(HoldPhase::Ready) => Step::to(self.clone(), Reply::Done, "the tenant is set up already")
                .event(Event::TenantReady { node_id: self.id, allocation_id }),
            Some(HoldPhase::SetupFailed { reason, detail }) => failed(reason, detail),
            Some(HoldPhase::Provisioning { .. }) => Step::stay(Reply::Done).effect(Effect::WakeNode(self.id)),
            Some(HoldPhase::Releasing { .. } | HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }) => {
                Step::stay(Reply::Done)
            }
            None => failed("reservation_lost", "the node holds no devices for the allocation"),
        }
    }

    pub(super) fn clean(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        deadline_at: Timestamp,
        ctx: &Ctx<'_>,
    ) -> Step<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else {
            // Proved before, or never here: either way nothing of it is held.
            return Step::to(self.clone(), Reply::Done, "nothing is held for the allocation")
                .event(Event::TenantGone { node_id: self.id, allocation_id, attempt });
        };
        let task_id = match &hold.phase {
            // The clean-up of an abandoned tenant has no attempts to be counted and does not end but with the proof.
            HoldPhase::Abandoned { .. } => return Step::stay(Reply::Done).effect(Effect::WakeNode(self.id)),
            HoldPhase::Releasing { work } if work.attempt >= attempt => {
                return Step::stay(Reply::Done).effect(Effect::WakeNode(self.id));
            }
            // An order that was overtaken by the failure of a later attempt.
            HoldPhase::ReleaseFailed { work } if work.attempt > attempt => return Step::stay(Reply::Done),
            // The attempt has failed already, and the allocation has not heard of it.
            HoldPhase::ReleaseFailed { work } if work.attempt == attempt => {
                let (reason, detail) = ("clean_up_failed".to_owned(), hold.remains.clone().unwrap_or_default());
                return Step::to(self.clone(), Reply::Done, "asked again for a clean-up that has failed")
                    .event(Event::TenantRemains { node_id: self.id, allocation_id, attempt, reason, detail });
            }
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => work.task_id,
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                TaskId(ctx.new_id(0))
            }
        };
        let work = Work { task_id, attempt, ordered_at: ctx.now, deadline_at, origin: Some(ctx.origin()) };
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

    /// The allocation has given up its clean-up attempt: no new allocation until a proof comes. Facts of an attempt that has
    /// been succeeded by another say nothing.
    pub(super) fn mark_release_failed(&self, allocation_id: AllocationId, attempt: u32, ctx: &Ctx<'_>) -> Step<Self> {
        match self.failed_at(allocation_id, attempt, ctx) {
            Some(phase) if !self.is_in(allocation_id, &phase) => self.with_phase(
                allocation_id,
                phase,
                format!("clean-up attempt {attempt} failed: no new allocation until it is proved"),
            ),
            Some(_) | None => Step::stay(Reply::Done),
        }
    }

    pub(super) fn fence(&self, allocation_id: AllocationId, attempt: u32, ctx: &Ctx<'_>) -> Step<Self> {
        if !self.holds.contains_key(&allocation_id) {
            // The proof came after all, and the allocation has not heard of it.
            return Step::to(self.clone(), Reply::Done, "nothing is held for the allocation")
                .event(Event::TenantGone { node_id: self.id, allocation_id, attempt });
        }
        match self.failed_at(allocation_id, attempt, ctx) {
            Some(phase) if self.fenced_by.contains(&allocation_id) && self.is_in(allocation_id, &phase) => {
                Step::stay(Reply::Done)
            }
            Some(phase) => {
                let why = format!("fenced by the failed release of allocation {allocation_id}");
                let mut step = self.with_phase(allocation_id, phase, why);
                if let Some(next) = &mut step.next {
                    next.fenced_by.insert(allocation_id);
                }
                // A wait that is parked is told.
                step.effect(Effect::WakeNode(self.id))
            }
            None => Step::stay(Reply::Done),
        }
    }

    /// The hold's phase once clean-up attempt `attempt` has failed; `None` where a later one runs, or nothing is to fail.
    fn failed_at(&self, allocation_id: AllocationId, attempt: u32, ctx: &Ctx<'_>) -> Option<HoldPhase> {
        let work = match &self.holds.get(&allocation_id)?.phase {
            HoldPhase::Abandoned { .. } => return None,
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } if work.attempt > attempt => return None,
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => Work { attempt, ..work.clone() },
            // The order of that attempt is still on its way.
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                Work {
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
    pub(super) fn abandon(&self, allocation_id: AllocationId, ctx: &Ctx<'_>) -> Step<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else { return Step::stay(Reply::Done) };
        let closed = matches!(self.life, Life::Quarantined { .. }) || self.life.is_gone();
        if closed && matches!(hold.phase, HoldPhase::Abandoned { .. }) {
            return Step::stay(Reply::Done);
        }
        let mut next = self.clone();
        next.fenced_by.remove(&allocation_id);
        let work = self.last_clean_up(hold, ctx);
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.phase = HoldPhase::Abandoned { work };
        }
        let event = (!closed).then(|| {
            let was = Box::new(next.life.clone());
            next.enter(
                Life::Quarantined { was },
                "forced_release",
                "An allocation was released by force, without proof of clean-up.",
                ctx,
            )
        });
        let step = Step::to(next, Reply::Done, format!("allocation {allocation_id} was released by force"))
            .effect(Effect::WakeNode(self.id));
        event.into_iter().fold(step, Step::event)
    }

    /// A clean-up that nobody asks for again. It has no end: it is offered until the proof is there.
    fn last_clean_up(&self, hold: &Hold, ctx: &Ctx<'_>) -> Work {
        let (task_id, attempt) = match &hold.phase {
            HoldPhase::Abandoned { work } => return work.clone(),
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => {
                (work.task_id, work.attempt.saturating_add(1))
            }
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                (TaskId(ctx.new_id(0)), 1)
            }
        };
        Work { task_id, attempt, ordered_at: ctx.now, deadline_at: Timestamp::MAX_UTC, origin: Some(ctx.origin()) }
    }

    /// The work that waits for the agent and is of types that it does, oldest first.
    pub(super) fn orders(&self) -> Vec<Order> {
        let of_tenants = self.holds.iter().filter_map(|(id, hold)| self.order(*id, hold));
        let mut orders: Vec<_> = of_tenants.chain(self.login_orders()).chain(self.own_orders()).collect();
        if self.in_service() {
            orders.extend(self.terminal_orders());
        }
        orders.retain(|order| self.withholds(order.what.task_type()).is_none());
        orders.sort_by_key(|order| (order.work.ordered_at, order.work.task_id));
        orders
    }

    fn order(&self, allocation_id: AllocationId, hold: &Hold) -> Option<Order> {
        let place = || Place { allocation_id, placed: hold.placed.clone(), sku: self.registration.sku.name.clone() };
        let (work, what) = match &hold.phase {
            // A node that is out of service, or waits for a clean-up proof, gets every task but this one.
            HoldPhase::Provisioning { work } if self.in_service() && !self.has_unproven() => {
                (work, What::Provision { place: place(), keys: hold.keys.clone() })
            }
            HoldPhase::Releasing { work } | HoldPhase::Abandoned { work } => (work, What::Release { place: place() }),
            HoldPhase::Provisioning { .. }
            | HoldPhase::Reserved
            | HoldPhase::Ready
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::ReleaseFailed { .. } => return None,
        };
        Some(Order { work: work.clone(), what })
    }

    /// Does it do what tenants ask of it? Quarantined, it only cleans up.
    const fn in_service(&self) -> bool {
        matches!(self.life, Life::Active | Life::Offline | Life::Draining { .. })
    }

    /// The first allocation that is on the node. An abandoned tenant is nobody's.
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
        verdict: Verdict,
        output: Option<Value>,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        self.known(serial, ctx)?;
        if let Some(of_a_terminal) = self.terminal_reported(task_id, attempt, &verdict) {
            return of_a_terminal;
        }
        if let Some(of_logins) = self.logins_reported(task_id, attempt, &verdict, ctx) {
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
        let proves = verdict == (Verdict::Succeeded { proof: Some(allocation_id) });
        match &hold.phase {
            HoldPhase::Provisioning { .. } if attempt == current => Ok(self.tenant_reported(allocation_id, &verdict)),
            // A proof of an earlier attempt proves the same thing.
            HoldPhase::Releasing { .. } | HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }
                if proves && attempt <= current =>
            {
                let gone = Event::TenantGone { node_id: self.id, allocation_id, attempt };
                Ok(self.freed(allocation_id, "the agent proved the clean-up", ctx).event(gone))
            }
            HoldPhase::Releasing { .. } | HoldPhase::Abandoned { .. } if attempt == current => {
                Ok(self.remains(allocation_id, attempt, &verdict))
            }
            // The allocation gave the attempt up before this came, and has drawn its consequence.
            HoldPhase::ReleaseFailed { .. } if attempt == current => Ok(Step::stay(Reply::Done)),
            HoldPhase::Provisioning { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. }
            | HoldPhase::Reserved
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Ready => Err(Rejection::StaleAttempt { given: attempt, current }),
        }
    }

    fn tenant_reported(&self, allocation_id: AllocationId, verdict: &Verdict) -> Step<Self> {
        match verdict {
            // It was said when it was noticed, once, to an allocation that may not have heard of its reservation by then.
            Verdict::Succeeded { .. } if let Some(fault) = self.fault_of(allocation_id) => {
                let phase = HoldPhase::SetupFailed { reason: fault.to_owned(), detail: BROKEN.to_owned() };
                let failed = Event::TenantFailed { node_id: self.id, allocation_id, reason: fault.to_owned() };
                self.with_phase(allocation_id, phase, BROKEN).event(failed)
            }
            Verdict::Succeeded { .. } => {
                let step = self
                    .with_phase(allocation_id, HoldPhase::Ready, "the agent set the tenant up")
                    .event(Event::TenantReady { node_id: self.id, allocation_id });
                self.logins_of_setup(step, allocation_id)
            }
            // Devices stay held: what was done of it must be cleaned up, and that is the allocation's to ask.
            Verdict::Failed { code, message } => self
                .with_phase(
                    allocation_id,
                    HoldPhase::SetupFailed { reason: code.clone(), detail: message.clone() },
                    format!("the agent could not set the tenant up: {message}"),
                )
                .event(Event::TenantFailed { node_id: self.id, allocation_id, reason: reason_code(code) }),
        }
    }

    fn remains(&self, allocation_id: AllocationId, attempt: u32, verdict: &Verdict) -> Step<Self> {
        let (reason, detail) = match verdict {
            Verdict::Succeeded { .. } => {
                ("proof_missing".to_owned(), "the agent gave no valid clean-up proof".to_owned())
            }
            Verdict::Failed { code, message } => (code.clone(), message.clone()),
        };
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.remains = Some(detail.clone());
            hold.phase = match &hold.phase {
                HoldPhase::Releasing { work } => HoldPhase::ReleaseFailed { work: work.clone() },
                // Nobody will ask again: it is offered anew.
                HoldPhase::Abandoned { work } => {
                    HoldPhase::Abandoned { work: Work { attempt: work.attempt.saturating_add(1), ..work.clone() } }
                }
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
        Step::to(next, Reply::Done, why).event(remains)
    }

    fn freed(&self, allocation_id: AllocationId, why: &str, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        next.holds.remove(&allocation_id);
        next.fenced_by.remove(&allocation_id);
        let retired = next.retire_if_drained(ctx);
        let step = Step::to(next, Reply::Done, format!("allocation {allocation_id}: {why}"));
        match retired {
            Some(event) => step.event(event).audit(self.audit(AuditAction::NodesDrained, json!({}))),
            None => step,
        }
    }

    /// When it asks next whether one of its tenants is still wanted.
    pub(super) fn asks_again_at(&self) -> Option<Timestamp> {
        self.holds.values().filter_map(Hold::asks_again).map(|again| again.at).min()
    }

    /// Whatever was said between a node and an allocation may have been lost. So the node says now and then whom it holds devices for;
    /// the allocation says if it does not want them.
    pub(super) fn ask_again(&self, step: Step<Self>, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = step.next.clone().unwrap_or_else(|| self.clone());
        let mut asked = Vec::new();
        for (allocation_id, hold) in &mut next.holds {
            if let Some(again) = hold.asks_again().filter(|again| again.is_due(ctx.now)) {
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
        asked.into_iter().fold(Step { next: Some(next), why, ..step }, Step::event)
    }

    fn is_in(&self, allocation_id: AllocationId, phase: &HoldPhase) -> bool {
        self.holds.get(&allocation_id).is_some_and(|hold| hold.phase == *phase)
    }

    pub(super) fn with_phase(
        &self,
        allocation_id: AllocationId,
        phase: HoldPhase,
        why: impl Into<String>,
    ) -> Step<Self> {
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.phase = phase;
        }
        Step::to(next, Reply::Done, why)
    }
}

/// What an agent calls the cause, as far as it is a code: an event is no place for an agent's own words. Those are in the history.
pub(super) fn reason_code(code: &str) -> String {
    let is_code =
        !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    if is_code { code.to_owned() } else { "agent_error".to_owned() }
}

/// The login of an allocation on its node: short enough for every system, derived from the id alone so that it is never another's.
#[must_use]
pub fn user_name(allocation_id: AllocationId) -> String {
    let id = allocation_id.0.as_simple().to_string();
    format!("gpu-{}", &id[id.len() - 16..])
}
