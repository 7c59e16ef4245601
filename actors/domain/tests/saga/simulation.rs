//! The simulation: entities, the messages between them, and the operations of users, agents and the clock.

use crate::agent::{Agent, LUCKY};
use crate::bus::{BusMessage, PlacementProgress};
use crate::steps::SimulationStep;
use chrono::TimeDelta;
use domain::allocation::{self, Allocation};
use domain::authz::{CallerIdentity, ResourceOwner, TokenRole};
use domain::billing_account::{self, BillingAccount, Holder};
use domain::ledger::Posting;
use domain::metadata::{Metadata, MetadataPatch, PatchValue};
use domain::money::{Currency, Price};
use domain::node::{self, HoldPhase, Node, NodeHealthStatus, Phase};
use domain::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue};
use domain::state_machine::{Command as _, Machine, Timestamp};
use domain::tenant::{self, Tenant};
use domain::validation::{Measurement, ValidationLevel, ValidationMinimums};
use domain::{
    AllocationId, BillingAccountId, Event, NodeId, Principal, SkuId, TokenId, Transition, TransitionContext, UserId,
    invariants,
};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

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
}

pub(crate) fn admin() -> Principal {
    person(&"root".into(), TokenRole::Admin)
}

fn person(user_id: &UserId, role: TokenRole) -> Principal {
    Principal::Caller(CallerIdentity {
        user_id: user_id.clone(),
        roles: [role].into(),
        org_id: None,
        project_id: None,
        plan: None,
        grant: None,
        service_account: None,
        browser_session: None,
    })
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
        let step = M::decide(state, command.into(), &ctx)?;
        let Transition { next, events, audit, postings, effects: _, requires: _, reply, why } = step;
        let Some(next) = next else {
            let nothing = events.is_empty() && audit.is_empty() && postings.is_empty();
            assert!(nothing, "what is not written is lost");
            return Ok((None, reply));
        };
        assert!(!why.is_empty(), "the history says why");
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
            let is_validated = state.as_ref().is_some_and(|node| node.tasks.values().any(is_open_load));
            let has_another =
                next.holds.keys().any(|it| state.as_ref().is_none_or(|node| !node.holds.contains_key(it)));
            assert!(!(is_validated && has_another), "a tenant came while a load was applied: {next:?}");
            if is_validated {
                self.reached.insert("node validated".to_owned());
            }
            for hold in next.holds.values() {
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
            if !next.fenced_by.is_empty() {
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

    // ---- Steps ----

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

    fn request(&mut self, user: u8, gpus: u8, queue: u8, wish: u8) {
        if self.allocations.values().filter(|it| it.state() != "released").count() >= MOST_LIVE {
            return;
        }
        let user_id = UserId(format!("user-{}", user % USERS));
        let id = AllocationId(Uuid::from_u128(0xA000_0000 + u128::from(self.next())));
        let request = allocation::AllocationRequest {
            owner: ResourceOwner { user_id: user_id.clone(), org_id: None, project_id: None, plan: None },
            sku_id: SkuId(Uuid::nil()),
            sku: "h100x4".into(),
            region_code: (wish % 8 == 7).then(|| "mars".into()),
            node_id: (wish % 8 == 6).then(|| self.node(wish)),
            gpu_count: 1 + u32::from(gpus) % (GPUS + 1),
            ssh_keys: self.tenants.get(&user_id).map(|tenant| tenant.authorized_keys(None)).unwrap_or_default(),
            follows_default: true,
            logins_revision: self.tenants.get(&user_id).map_or(0, |tenant| tenant.logins_revision),
            isolation_model: "user-revoke".into(),
            price: Price::new("EUR", 100).unwrap(),
            queue_seconds: queue.is_multiple_of(3).then_some(u32::from(queue) / 4),
            scheduler_request_enc: None,
            metadata: Metadata::default(),
        };
        let command = allocation::Request::Create(Box::new(request));
        self.tell_allocation(id, &person(&user_id, TokenRole::User), command).unwrap();
    }

    /// A user adds a key, deletes one, or makes another the default.
    fn change_keys(&mut self, user: u8, how: u8) {
        let user_id = UserId(format!("user-{}", user % USERS));
        let keys: Vec<_> = self.tenants.get(&user_id).iter().flat_map(|it| it.keys.keys()).copied().collect();
        let nth = keys.get(usize::from(how / 3) % keys.len().max(1)).copied();
        let command = match (how % 3, nth) {
            (1, Some(key)) => tenant::Request::DeleteKey { key },
            (2, Some(key)) => tenant::Request::MakeDefault { key },
            _ => {
                let n = self.next();
                tenant::Request::AddKey {
                    user_id: user_id.clone(),
                    name: format!("key {n}"),
                    key_type: "ssh-ed25519".into(),
                    public_key: format!("ssh-ed25519 {n}"),
                    fingerprint: format!("SHA256:{n}"),
                }
            }
        };
        self.tell_tenant(&user_id, command).unwrap();
    }

    /// The user chooses keys for one allocation after a read; a stale read is rejected.
    fn choose_logins(&mut self, which: u8, how: u8) {
        let Some(id) = self.pick_allocation(which, |_| true) else { return };
        let user_id = self.allocations[&id].asked.owner.user_id.clone();
        let Some(tenant) = self.tenants.get(&user_id) else { return };
        let chosen = (!how.is_multiple_of(4)).then(|| tenant.keys.keys().take(usize::from(how % 4)).copied().collect());
        let chosen: Option<Vec<_>> = chosen;
        let (keys, logins_revision) = (tenant.authorized_keys(chosen.as_deref()), tenant.logins_revision);
        let command = allocation::Request::ChooseLogins { chosen, keys, logins_revision };
        match self.tell_allocation(id, &person(&user_id, TokenRole::User), command) {
            Ok(()) | Err(allocation::Rejection::WrongState { .. } | allocation::Rejection::KeysMoved) => {}
            Err(other) => panic!("{other}"),
        }
    }

    /// A label comes or goes; of the saga nothing changes by it.
    fn label(&mut self, which: u8, how: u8) {
        let Some(id) = self.pick_allocation(which, |_| true) else { return };
        let before = self.allocations[&id].clone();
        let value = how.is_multiple_of(2).then(|| format!("v{}", how % 8));
        let labels = PatchValue::Set([(format!("k{}", how % 3), value)].into());
        let metadata = MetadataPatch { name: PatchValue::Keep, labels };
        let by = person(&before.asked.owner.user_id, TokenRole::User);
        self.tell_allocation(id, &by, allocation::Request::Revise { metadata, if_version: None }).unwrap();
        let after = Allocation { metadata: before.metadata.clone(), ..self.allocations[&id].clone() };
        assert_eq!(after, before, "a label changes nothing else");
    }

    pub(crate) fn release(&mut self, id: AllocationId) {
        let user_id = self.allocations[&id].asked.owner.user_id.clone();
        self.tell_allocation(id, &person(&user_id, TokenRole::User), allocation::Request::Release { issue: None })
            .unwrap();
    }

    // ---- Time ----

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

    // ---- Nodes and their agents ----

    fn register(&mut self, id: NodeId) {
        let registration = node::Registration {
            host: format!("node-{id}"),
            port: 22,
            ssh_username: "ops".into(),
            ssh_public_key: "ssh-ed25519 AAAA".into(),
            ssh_key_fingerprint: "SHA256:x".into(),
            sku: node::PromisedHardware {
                sku_id: SkuId(Uuid::nil()),
                name: "h100x4".into(),
                gpu_model: "H100".into(),
                gpu_memory_mib: 80_000,
                gpu_count: GPUS,
                allowed_regions: vec!["eu".into()],
                machine: None,
            },
            region_code: "eu".into(),
            gpus_total: GPUS,
            onboarding_mode: node::OnboardingMode::Manual,
            metadata: Metadata::default(),
        };
        let command = node::Request::Register { registration: Box::new(registration), probe: None, machine: None };
        self.tell_node(id, &admin(), command).unwrap();
    }

    pub(crate) fn onboard(&mut self, id: NodeId) {
        self.invite(id);
        self.enroll(id, false);
        self.poll(id);
    }

    /// A new identity for a node that lost the one it had.
    pub(crate) fn reinstate(&mut self, id: NodeId) {
        let mut token_sha256 = [0; 32];
        token_sha256[..8].copy_from_slice(&self.next().to_be_bytes());
        let command = node::Request::Reissue(Box::new(node::Reissue {
            token_id: TokenId(Uuid::from_u128(self.counter.into())),
            token_sha256,
            ttl_seconds: None,
            reason: "r".into(),
            revoke_current_certificate: false,
        }));
        self.tell_node(id, &admin(), command).unwrap();
        self.agents.get_mut(&id).unwrap().token = Some(token_sha256);
        self.enroll(id, false);
        self.healthy(id);
    }

    fn invite(&mut self, id: NodeId) {
        let mut token_sha256 = [0; 32];
        token_sha256[..8].copy_from_slice(&self.next().to_be_bytes());
        let token_id = TokenId(Uuid::from_u128(self.counter.into()));
        let command = node::Request::IssueToken { token_id, token_sha256, ttl_seconds: None };
        if self.tell_node(id, &admin(), command).is_ok() {
            self.agents.get_mut(&id).unwrap().token = Some(token_sha256);
        }
    }

    fn enroll(&mut self, id: NodeId, stale: bool) {
        let Some(token_sha256) = self.agents[&id].token else { return };
        let token_sha256 = if stale { [9; 32] } else { token_sha256 };
        let serial = format!("{:x}", self.next());
        let command = node::Request::Enroll(Box::new(node::Enrollment {
            token_sha256,
            csr_sha256: [1; 32],
            issued: node::CertificateRecord {
                serial: serial.clone(),
                not_after: self.now + TimeDelta::days(3650),
                generation: 0,
                authority: None,
            },
            recovery_public_key: "k".into(),
            boot_id: "boot".into(),
            agent_version: "1".into(),
            protocol: 3,
            inventory: inventory(id, GPUS),
        }));
        if self.tell_node(id, &Principal::Node(id), command).is_ok() {
            assert!(!stale, "a token that was never issued buys nothing");
            *self.bought.entry(token_sha256).or_default() += 1;
            self.agents.get_mut(&id).unwrap().serial = serial;
        }
    }

    fn poll(&mut self, id: NodeId) {
        let serial = self.agents[&id].serial.clone();
        if let Ok(node::Reply::Work { orders }) =
            self.tell_node(id, &Principal::Node(id), node::Request::Poll { serial })
        {
            self.agents.get_mut(&id).unwrap().take(orders);
        }
    }

    pub(crate) fn want_at_least(&mut self, minimum: u8) {
        let wanted = (minimum > 0).then(|| (Measurement::Cpu, minimum.into()));
        self.policy.set_minimums(SkuId(Uuid::nil()), ValidationMinimums(wanted.into_iter().collect()));
    }

    pub(crate) fn heartbeat(&mut self, id: NodeId, status: NodeHealthStatus, gpus: u32) {
        self.heartbeat_with(id, node::NodeHealth { status, ..Default::default() }, gpus);
    }

    /// A finding whose tenant has to leave the machine.
    pub(crate) fn heartbeat_with_finding(&mut self, id: NodeId) {
        let found = node::ReportedFinding {
            probe: "disk".into(),
            gpu_uuid: None,
            code: "read_only".into(),
            count: 1,
            first_at: self.now,
            last_at: self.now,
            boot_id: "boot".into(),
            detail: String::new(),
        };
        self.heartbeat_with_findings(id, vec![found]);
    }

    fn heartbeat_with_findings(&mut self, id: NodeId, findings: Vec<node::ReportedFinding>) {
        let report = node::FindingReport { sent_at: self.now, findings, is_truncated: false };
        self.heartbeat_with(id, node::NodeHealth { report: Some(report), ..Default::default() }, GPUS);
    }

    fn heartbeat_with(&mut self, id: NodeId, health: node::NodeHealth, gpus: u32) {
        let command = node::Request::Heartbeat {
            serial: self.agents[&id].serial.clone(),
            seen: Box::new(node::AgentContact {
                boot_id: "boot".into(),
                agent_version: "1".into(),
                protocol: 3,
                last_seen_at: self.now,
                silent_at: self.now,
                task_types: None,
                package_digest: None,
                last_heartbeat: None,
            }),
            inventory: Box::new(inventory(id, gpus)),
            health: Box::new(health),
        };
        // A node without an identity is refused; no other command follows.
        let _ = self.tell_node(id, &Principal::Node(id), command);
    }

    pub(crate) fn healthy(&mut self, id: NodeId) {
        self.heartbeat_with_findings(id, Vec::new());
        self.diligent(id, LUCKY);
    }

    fn report(&mut self, id: NodeId, which: usize, again: bool) {
        let agent = self.agents.get_mut(&id).unwrap();
        if agent.results.is_empty() {
            return;
        }
        let (task_id, attempt, verdict) = agent.results.remove(which % agent.results.len());
        if again {
            agent.results.push((task_id, attempt, verdict.clone()));
        }
        let serial = agent.serial.clone();
        let before = self.nodes[&id].clone();
        // What a validation measures is below the minimum now and then.
        let others = Measurement::ALL.iter().filter(|it| **it != Measurement::Cpu);
        let not_tested: serde_json::Map<_, _> = others.map(|it| (it.name().to_owned(), json!("no tool"))).collect();
        let measurements = json!({ "cpu_bogo_ops_per_second": self.counter % 16 });
        let output = Some(json!({ "measurements": measurements, "not_tested": not_tested }));
        // Now and then the driver does not show the first GPU of a tenant who has left.
        let gap = match &verdict {
            node::TaskOutcome::Succeeded { proof: Some(tenant) } if self.counter.is_multiple_of(4) => {
                before.holds.get(tenant)
            }
            _ => None,
        };
        let unproved = gap.and_then(|hold| hold.placed.devices.first()).map(|device| {
            let gpus = BTreeMap::from([(device.uuid.clone(), "lost".to_owned())]);
            Box::new(node::ProofGap { checked_at: self.now - TimeDelta::seconds(1), gpus })
        });
        let command = node::Request::Report { serial, task_id, attempt, verdict, output, unproved };
        match self.tell_node(id, &Principal::Node(id), command) {
            Ok(_) => {}
            // Reported twice, or too late: the agent drops it in both cases.
            // An enrollment that expires during the first validation voids the certificate.
            Err(
                node::Rejection::TaskUnknown
                | node::Rejection::StaleAttempt { .. }
                | node::Rejection::Removed
                | node::Rejection::CertificateUnknown,
            ) => {
                assert_eq!(self.nodes[&id], before, "a rejection changes nothing");
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn diligent(&mut self, id: NodeId, luck: u8) {
        self.poll(id);
        let now = self.now;
        let agent = self.agents.get_mut(&id).unwrap();
        while !agent.taken.is_empty() {
            agent.work(0, luck, now);
        }
        while !self.agents[&id].results.is_empty() {
            self.report(id, 0, false);
        }
    }

    // ---- Invariants ----

    pub(crate) fn the_books_add_up(&self) {
        for (holder, it) in &self.accounts {
            let postings = self.ledger.get(&it.id).map_or(&[][..], Vec::as_slice);
            assert!(invariants::i3_the_balance_is_the_sum_of_its_entries(it, postings), "I3 {holder} {it:?}");
        }
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        assert!(invariants::i2_a_gpu_has_one_tenant(&self.nodes, &self.allocations), "I2\n{}", self.picture());
        assert!(invariants::i4_a_token_is_consumed_once(&self.bought), "I4");
        for node in self.nodes.values() {
            assert!(node.has_deadline_where_transient(), "I8 {node:?}");
        }
        for it in self.allocations.values() {
            assert!(it.has_deadline_where_transient(), "I8 {it:?}");
        }
        for (holder, it) in &self.accounts {
            let postings = self.ledger.get(&it.id).map_or(&[][..], Vec::as_slice);
            // All of them are summed when the simulation is idle.
            let last = postings.last().map(|last| (last.number, last.balance)).unwrap_or_default();
            assert_eq!((it.postings, it.balance), last, "I3 {holder}");
            assert!(it.has_deadline_where_transient(), "I8 {it:?}");
        }
        self.failures_close_their_nodes();
        for (id, agent) in &self.agents {
            assert!(invariants::i5_a_task_takes_effect_once(&agent.effects), "I5");
            let node = &self.nodes[id];
            if node.life.is_gone() {
                continue;
            }
            // A tenant of an active allocation is set up on its GPUs.
            for it in self.allocations.values().filter(|it| it.state() == "active") {
                let here = it.placement().is_some_and(|(node_id, _)| node_id == *id);
                assert!(!here || agent.ready.contains(&it.id), "active and not set up\n{}", self.picture());
            }
            // I2 on the machine: every tenant on it has a hold, on its own GPUs.
            for (tenant, gpus) in &agent.tenants {
                let held: Option<Vec<_>> = node
                    .holds
                    .get(tenant)
                    .map(|hold| hold.placed.devices.iter().map(|device| device.uuid.clone()).collect());
                assert_eq!(held.as_ref(), Some(gpus), "a tenant without an allocation\n{}", self.picture());
            }
        }
    }

    /// A node with a failed release takes no new tenant, once it has received all events about it.
    #[track_caller]
    fn failures_close_their_nodes(&self) {
        for it in self.allocations.values().filter(|it| it.state() == "release_failed") {
            let open = it.placement().is_some_and(|(node_id, _)| self.nodes[&node_id].gpus_free() > 0);
            let id = it.id.to_string();
            let unheard = || {
                let on_their_way = self.bus.iter().chain(&self.stranded).chain(&self.lost);
                on_their_way.into_iter().any(|message| format!("{:?}", message.event).contains(&id))
            };
            assert!(!open || unheard(), "a failed release on an open node\n{}", self.picture());
        }
    }

    /// Loses the oldest message of that subject, if there is one.
    pub(crate) fn lose_a(&mut self, subject: &str) -> bool {
        let found = self.bus.iter().position(|message| message.event.subject() == subject);
        self.lost.extend(found.map(|which| self.bus.remove(which)));
        found.is_some()
    }

    /// Releases the delayed messages.
    pub(crate) fn find_all(&mut self) {
        self.bus.append(&mut self.stranded);
    }

    /// The states of the `n`th allocation, in order.
    pub(crate) fn history(&self, n: usize) -> impl Iterator<Item = &str> {
        self.allocations.values().nth(n).unwrap().history.iter().map(|entry| entry.state.into_str())
    }

    pub(crate) fn picture(&self) -> String {
        let nodes = self.nodes.values().map(|node| {
            let holds: Vec<_> = node.holds.iter().map(|(id, hold)| format!("    {id} {:?}", hold.phase)).collect();
            let life = if let Phase::Quarantined { was } = &node.life {
                format!("quarantined, was {}", was.name())
            } else {
                node.state().to_owned()
            };
            format!("{} {life} fenced by {:?}\n{}", node.id, node.fenced_by, holds.join("\n"))
        });
        let allocations = self
            .allocations
            .values()
            .filter(|it| it.state() != "released")
            .map(|it| format!("{} {:?} {:?}", it.id, it.phase, it.history));
        let bus = self.bus.iter().map(|message| format!("{:?}", message.event));
        nodes.chain(allocations).chain(bus).collect::<Vec<_>>().join("\n")
    }
}

fn is_open_load(task: &node::NodeTask) -> bool {
    task.validation.is_some() && task.phase == node::NodeTaskPhase::Open
}

fn inventory(id: NodeId, gpus: u32) -> node::ReportedInventory {
    node::ReportedInventory {
        gpus: (0..gpus)
            .map(|index| node::ReportedGpu {
                index,
                uuid: format!("GPU-{}-{index}", id.0.as_u128()),
                model: "H100".into(),
                memory_mib: 80_000,
            })
            .collect(),
        gpu_source: "simulated".into(),
        executor: "sandbox".into(),
        // One of the machines has no device isolation.
        isolates_devices: id.0.as_u128() != 2,
        cpu_model: None,
        cpu_cores: 64,
        memory_mib: 512_000,
        storage_gib: 4_000,
        driver_version: None,
        host_fingerprint: None,
        system: None,
    }
}
