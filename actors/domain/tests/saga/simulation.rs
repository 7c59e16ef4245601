//! The simulation: entities, the messages between them, and the operations of the clock. Those of users and agents are below it.

use crate::agent::Agent;
use crate::bus::{BusMessage, PlacementProgress};
use crate::steps::SimulationStep;
use chrono::TimeDelta;
use domain::allocation::{self, Allocation};
use domain::authz::{CallerIdentity, TokenRole};
use domain::billing_account::{self, BillingAccount, Holder};
use domain::ledger::Posting;
use domain::money::Currency;
use domain::node::{self, HoldPhase, Node, NodeHealthStatus};
use domain::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue};
use domain::state_machine::{Command as _, Machine, Timestamp};
use domain::tenant::{self, Tenant};
use domain::validation::ValidationLevel;
use domain::{
    AllocationId, BillingAccountId, EntityKind, Event, NodeId, Principal, Transition, TransitionContext, UserId,
};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

#[path = "simulation/checks.rs"]
mod checks;
#[path = "simulation/machines.rs"]
mod machines;
#[path = "simulation/users.rs"]
mod users;

pub(crate) const NODES: u128 = 3;
const GPUS: u32 = 4;
const USERS: u8 = 4;
const QUOTA: i64 = 4;
/// Bounds that keep a run readable.
const MOST_LIVE: usize = 14;

/// Whether an event's command is applied once per event, as the store ensures, or at each delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Once,
    Again,
    /// As `Again`, and what is withheld never arrives.
    Lossy,
}

pub(crate) struct Simulation {
    pub(crate) now: Timestamp,
    policy: PolicyBook,
    pub(crate) delivery: Delivery,
    pub(crate) nodes: BTreeMap<NodeId, Node>,
    pub(crate) allocations: BTreeMap<AllocationId, Allocation>,
    pub(crate) tenants: BTreeMap<UserId, Tenant>,
    pub(crate) accounts: BTreeMap<Holder, BillingAccount>,
    ledger: BTreeMap<BillingAccountId, Vec<Posting>>,
    pub(crate) agents: BTreeMap<NodeId, Agent>,
    pub(crate) bus: Vec<BusMessage>,
    /// Delayed messages.
    stranded: Vec<BusMessage>,
    /// Lost messages.
    lost: Vec<BusMessage>,
    /// The next event of this subject is lost.
    pub(crate) to_be_lost: Option<&'static str>,
    /// The commands of events that were applied, with their entities.
    pub(crate) applied: BTreeSet<(u64, Uuid, &'static str)>,
    /// The number of enrollments with each token.
    bought: BTreeMap<[u8; 32], u32>,
    counter: u64,
    pub(crate) reached: BTreeSet<String>,
    /// The commits so far: the entity's kind, and the command.
    pub(crate) commits: Vec<(EntityKind, &'static str)>,
}

pub(crate) fn admin() -> Principal {
    person(&"root".into(), TokenRole::Admin)
}

fn person(user_id: &UserId, role: TokenRole) -> Principal {
    Principal::Caller(CallerIdentity::new(user_id.clone(), [role]))
}

fn pick<K: Copy + Ord, V>(map: &BTreeMap<K, V>, which: u8) -> Option<K> {
    map.keys().nth(usize::from(which) % map.len().max(1)).copied()
}

impl Simulation {
    pub(crate) fn new(delivery: Delivery) -> Self {
        let now = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let mut policy = PolicyBook::default();
        policy.set(PolicyKey::AllocationMaxConcurrent, PolicyScope::Global, now, PolicyValue::Int(QUOTA)).unwrap();
        policy.set(PolicyKey::AllocationReleaseMaxAttempts, PolicyScope::Global, now, PolicyValue::Int(3)).unwrap();
        policy.set(PolicyKey::NodeEvacuate, PolicyScope::Global, now, PolicyValue::Int(30)).unwrap();
        policy.set(PolicyKey::BillingLowBalanceThreshold, PolicyScope::Global, now, PolicyValue::Int(8)).unwrap();
        policy.set(PolicyKey::AllocationReleaseTimeout, PolicyScope::Global, now, PolicyValue::Int(120)).unwrap();
        let mut world = Self {
            now,
            policy,
            delivery,
            nodes: BTreeMap::new(),
            allocations: BTreeMap::new(),
            tenants: BTreeMap::new(),
            accounts: BTreeMap::new(),
            ledger: BTreeMap::new(),
            agents: BTreeMap::new(),
            bus: Vec::new(),
            stranded: Vec::new(),
            lost: Vec::new(),
            to_be_lost: None,
            applied: BTreeSet::new(),
            bought: BTreeMap::new(),
            counter: 0,
            reached: BTreeSet::new(),
            commits: Vec::new(),
        };
        // The last user has little money.
        for (user, amount_minor) in (0..USERS).zip([100_000, 100_000, 100_000, 12]) {
            world.give(user, amount_minor);
        }
        for n in 1..=NODES {
            let id = NodeId(Uuid::from_u128(n));
            world.agents.insert(id, Agent::default());
            world.register(id);
            // The last node is onboarded by the steps.
            if n < NODES {
                world.onboard(id);
            }
        }
        world
    }

    /// The time until the deadline of the allocation's state, and what that policy allows it.
    pub(crate) fn time_left(&self, id: AllocationId, policy: PolicyKey) -> (Option<TimeDelta>, TimeDelta) {
        let allocation = &self.allocations[&id];
        let left = allocation.deadline().map(|deadline| deadline.at - self.now);
        (left, self.policy.seconds(policy, &allocation.scopes(), self.now))
    }

    fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// Decides a command and applies its transition.
    fn decide<M: Machine + PartialEq>(
        &mut self,
        id: Uuid,
        state: Option<&M>,
        by: &Principal,
        command: impl Into<M::Command>,
    ) -> Result<(Option<M>, M::Reply), M::Rejection> {
        let seed = u128::from(self.next()).wrapping_mul(0xD134_2543_DE82_EF95_A0B1_C2D3_E4F5_0617);
        let ctx = TransitionContext {
            now: self.now,
            policy: &self.policy,
            by,
            correlation_id: "saga",
            trace: domain::state_machine::TraceContext::default(),
            seed,
            id,
            version: i64::from(state.is_some()),
        };
        let command = command.into();
        let name = command.name();
        let step = M::decide(state, command, &ctx)?;
        let Transition { next, events, audit, postings, effects: _, requires: _, reply, why, stores_reply: _ } = step;
        let Some(next) = next else {
            let nothing = events.is_empty() && audit.is_empty() && postings.is_empty();
            assert!(nothing, "what is not written is lost");
            return Ok((None, reply));
        };
        assert!(!why.is_empty(), "the history says why");
        self.commits.push((M::KIND, name));
        let stored = serde_json::to_string(&next).unwrap();
        assert_eq!(serde_json::from_str::<M>(&stored).unwrap(), next, "a snapshot decodes to what was decided");
        self.reached.insert(format!("{} {}", M::KIND, next.state()));
        for posting in postings {
            self.reached.insert(format!("posting {}", posting.kind.name()));
            self.ledger.entry(BillingAccountId(id)).or_default().push(posting);
        }
        for event in events {
            let stored = serde_json::to_string(&event).unwrap();
            assert_eq!(serde_json::from_str::<Event>(&stored).unwrap(), event);
            self.reached.insert(format!("event {}", event.subject()));
            let id = self.next();
            self.bus.push(BusMessage { id, event, placing: PlacementProgress::Admit });
        }
        Ok((Some(next), reply))
    }

    pub(crate) fn tell_node(
        &mut self,
        id: NodeId,
        by: &Principal,
        command: impl Into<node::Command>,
    ) -> Result<node::Reply, node::Rejection> {
        let state = self.nodes.get(&id).cloned();
        let (next, reply) = self.decide(id.0, state.as_ref(), by, command)?;
        if let Some(next) = next {
            let is_validated = state.as_ref().is_some_and(|node| node.tasks.by_id.values().any(is_open_load));
            let has_another = next
                .tenancy
                .holds
                .keys()
                .any(|it| state.as_ref().is_none_or(|node| !node.tenancy.holds.contains_key(it)));
            assert!(!(is_validated && has_another), "a tenant came while a load was applied: {next:?}");
            if is_validated {
                self.reached.insert("node validated".to_owned());
            }
            for hold in next.tenancy.holds.values() {
                let phase = match hold.phase {
                    HoldPhase::Reserved => "reserved",
                    HoldPhase::Provisioning { .. } => "provisioning",
                    HoldPhase::Ready => "ready",
                    HoldPhase::SetupFailed { .. } => "setup_failed",
                    HoldPhase::Releasing { .. } => "releasing",
                    HoldPhase::ReleaseFailed { .. } => "release_failed",
                    HoldPhase::Abandoned { .. } => "abandoned",
                };
                self.reached.insert(format!("hold {phase}"));
            }
            if !next.tenancy.fenced_by.is_empty() {
                self.reached.insert("node fenced".to_owned());
            }
            self.nodes.insert(id, next);
        }
        Ok(reply)
    }

    pub(crate) fn tell_allocation(
        &mut self,
        id: AllocationId,
        by: &Principal,
        command: impl Into<allocation::Command>,
    ) -> Result<(), allocation::Rejection> {
        let state = self.allocations.get(&id).cloned();
        let (next, _) = self.decide(id.0, state.as_ref(), by, command)?;
        if let Some(next) = next {
            self.allocations.insert(id, next);
        }
        Ok(())
    }

    pub(crate) fn tell_tenant(
        &mut self,
        user_id: &UserId,
        command: impl Into<tenant::Command>,
    ) -> Result<(), tenant::Rejection> {
        let state = self.tenants.get(user_id).cloned();
        let (next, _) = self.decide(Uuid::nil(), state.as_ref(), &Principal::system("worker"), command)?;
        if let Some(next) = next {
            self.tenants.insert(user_id.clone(), next);
        }
        Ok(())
    }

    pub(crate) fn tell_account(
        &mut self,
        holder: &Holder,
        command: impl Into<billing_account::Command>,
    ) -> Result<(), billing_account::Rejection> {
        let state = self.accounts.get(holder).cloned();
        // As in production, the id is derived from the name.
        let bytes = holder.to_string().into_bytes();
        let id = Uuid::from_u128(bytes.iter().fold(0, |id, byte| (id << 8) | u128::from(*byte)));
        let (next, _) = self.decide(id, state.as_ref(), &Principal::system("worker"), command)?;
        if let Some(next) = next {
            self.accounts.insert(holder.clone(), next);
        }
        Ok(())
    }

    fn give(&mut self, user: u8, amount_minor: i64) {
        let (holder, currency) = (Holder::User(UserId(format!("user-{user}"))), Currency::parse("EUR").unwrap());
        let open = billing_account::Request::Open { holder: holder.clone(), currency: currency.clone() };
        self.tell_account(&holder, open).unwrap();
        let give = billing_account::Request::Adjust { amount_minor, currency, reason: "r".into() };
        self.tell_account(&holder, give).unwrap();
    }

    pub(crate) fn make(&mut self, step: SimulationStep) {
        match step {
            SimulationStep::Deliver { which, again } => self.deliver(usize::from(which), again),
            SimulationStep::DeliverAll => self.deliver_all(),
            SimulationStep::WorkerDies { which } => {
                let count = self.bus.len().max(1);
                if let Some(message) = self.bus.get_mut(usize::from(which) % count) {
                    message.placing = PlacementProgress::Admit;
                }
            }
            SimulationStep::Strand { which } => {
                if !self.bus.is_empty() {
                    let message = self.bus.remove(usize::from(which) % self.bus.len());
                    match self.delivery {
                        Delivery::Once | Delivery::Again => self.stranded.push(message),
                        Delivery::Lossy => self.lost.push(message),
                    }
                }
            }
            SimulationStep::Find { which } => {
                if !self.stranded.is_empty() {
                    let message = self.stranded.remove(usize::from(which) % self.stranded.len());
                    self.bus.push(message);
                }
            }
            SimulationStep::Pass { seconds } => self.pass(TimeDelta::seconds(seconds.into())),
            SimulationStep::PassToTimer { slack } => {
                if let Some(timer) = self.next_timer() {
                    self.pass((timer - self.now).max(TimeDelta::zero()) + TimeDelta::seconds(slack.into()));
                }
            }
            SimulationStep::TickAllocation { which } => {
                if let Some(id) = pick(&self.allocations, which) {
                    self.tick_allocation(id);
                }
            }
            SimulationStep::TickNode { which } => {
                if let Some(id) = pick(&self.nodes, which) {
                    self.tick_node(id);
                }
            }
            SimulationStep::Request { user, gpus, queue, wish } => self.request(user, gpus, queue, wish),
            SimulationStep::ChangeKeys { user, how } => self.change_keys(user, how),
            SimulationStep::ChooseLogins { which, how } => self.choose_logins(which, how),
            SimulationStep::Label { which, how } => self.label(which, how),
            SimulationStep::Release { which } => {
                if let Some(id) = self.pick_allocation(which, |_| true) {
                    self.release(id);
                }
            }
            SimulationStep::RetryRelease { which } => {
                if let Some(id) = self.pick_allocation(which, |it| it.state() == "release_failed") {
                    self.tell_allocation(id, &admin(), allocation::Request::RetryRelease { reason: "r".into() })
                        .unwrap();
                }
            }
            SimulationStep::ForceRelease { which } => {
                if let Some(id) = self.pick_allocation(which, |it| it.state() == "release_failed") {
                    self.tell_allocation(id, &admin(), allocation::Request::ForceRelease { reason: "r".into() })
                        .unwrap();
                }
            }
            SimulationStep::Invite { node } => self.invite(self.node(node)),
            SimulationStep::Enroll { node, stale } => self.enroll(self.node(node), stale),
            SimulationStep::Retire { node, drain } => {
                self.admin(node, node::Request::Retire { reason: "r".into(), drain });
            }
            SimulationStep::Reactivate { node } => self.admin(node, node::Request::Reactivate { reason: "r".into() }),
            SimulationStep::Remove { node } => self.admin(node, node::Request::Remove { reason: "r".into() }),
            SimulationStep::Quarantine { node } => self.admin(node, node::Request::Quarantine { reason: "r".into() }),
            SimulationStep::ReleaseQuarantine { node } => {
                self.admin(node, node::Request::ReleaseQuarantine { reason: "r".into() });
            }
            SimulationStep::Validate { node, deep } => {
                let level = if deep { ValidationLevel::Deep } else { ValidationLevel::Quick };
                self.admin(node, node::Request::Validate { level, reason: "r".into() });
            }
            SimulationStep::WantAtLeast { minimum } => self.want_at_least(minimum),
            SimulationStep::Poll { node } => self.poll(self.node(node)),
            SimulationStep::Heartbeat { node, mood } => {
                let (health, gpus) = match mood {
                    41..=49 => return self.heartbeat_with_finding(self.node(node)),
                    50..=65 => return self.heartbeat_with_findings(self.node(node), Vec::new()),
                    0..=9 => (NodeHealthStatus::Critical, GPUS),
                    10..=14 => (NodeHealthStatus::Ok, GPUS - 1),
                    15..=40 => (NodeHealthStatus::Warning, GPUS),
                    66.. => (NodeHealthStatus::Ok, GPUS),
                };
                self.heartbeat(self.node(node), health, gpus);
            }
            SimulationStep::Work { node, which, luck } => {
                let (id, now) = (self.node(node), self.now);
                self.agents.get_mut(&id).unwrap().work(usize::from(which), luck, now);
            }
            SimulationStep::Report { node, which, again } => self.report(self.node(node), usize::from(which), again),
            SimulationStep::Diligent { node, luck } => {
                let id = self.node(node);
                self.diligent(id, luck);
            }
        }
    }

    fn node(&self, which: u8) -> NodeId {
        pick(&self.nodes, which).unwrap()
    }

    /// An allocation that is not released and matches, if there is one.
    fn pick_allocation(&self, which: u8, wanted: impl Fn(&Allocation) -> bool) -> Option<AllocationId> {
        let found: Vec<_> =
            self.allocations.values().filter(|it| it.state() != "released" && wanted(it)).map(|it| it.id).collect();
        found.get(usize::from(which) % found.len().max(1)).copied()
    }

    fn admin(&mut self, node: u8, command: impl Into<node::Command>) {
        let id = self.node(node);
        let before = self.nodes[&id].clone();
        if self.tell_node(id, &admin(), command).is_err() {
            assert_eq!(self.nodes[&id], before, "a rejection changes nothing");
        }
    }

    pub(crate) fn pass(&mut self, time: TimeDelta) {
        self.now += time;
        let due = |timer: Option<Timestamp>| timer.is_some_and(|at| at <= self.now);
        let nodes: Vec<_> = self.nodes.values().filter(|it| due(it.timer())).map(|it| it.id).collect();
        let allocations: Vec<_> = self.allocations.values().filter(|it| due(it.timer())).map(|it| it.id).collect();
        let due_tenants = self.tenants.values().filter(|it| due(it.timer())).map(|it| it.user_id.clone());
        let tenants: Vec<_> = due_tenants.collect();
        let due_accounts = self.accounts.iter().filter(|(_, it)| due(it.timer())).map(|(holder, _)| holder.clone());
        let accounts: Vec<_> = due_accounts.collect();
        for user_id in tenants {
            self.tell_tenant(&user_id, tenant::Command::TICK).unwrap();
        }
        for holder in accounts {
            self.tell_account(&holder, billing_account::Command::TICK).unwrap();
        }
        nodes.into_iter().for_each(|id| self.tick_node(id));
        allocations.into_iter().for_each(|id| self.tick_allocation(id));
    }

    pub(crate) fn next_timer(&self) -> Option<Timestamp> {
        let nodes = self.nodes.values().filter_map(Machine::timer);
        let tenants = self.tenants.values().filter_map(Machine::timer);
        // Windows end all the time, and no step waits for them.
        let asking = self.accounts.values().filter_map(|it| it.again.map(|again| again.at));
        nodes.chain(tenants).chain(asking).chain(self.allocations.values().filter_map(Machine::timer)).min()
    }

    fn tick_node(&mut self, id: NodeId) {
        self.tell_node(id, &Principal::system("timer"), node::Command::TICK).unwrap();
    }

    fn tick_allocation(&mut self, id: AllocationId) {
        self.tell_allocation(id, &Principal::system("timer"), allocation::Command::TICK).unwrap();
    }
}

fn is_open_load(task: &node::NodeTask) -> bool {
    task.validation.is_some() && task.phase == node::NodeTaskPhase::Open
}
