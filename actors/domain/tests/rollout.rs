//! A rollout with real nodes: any order, loss and repetition of the messages between them.

#![allow(clippy::unwrap_used)]

#[path = "../../../tests/test-host/src/node_fixture.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is written for tests of other crates, too")]
mod node_fixture;

use domain::authz::Principal;
use domain::choreography::Reaction;
use domain::event::Event;
use domain::node::{
    self, AgentContact, CertificateRecord, Enrollment, FindingReport, Node, NodeHealth, NodeTaskPhase, ReportedFinding,
    TaskOutcome,
};
use domain::policy::PolicyBook;
use domain::rollout::{
    Fact, FeedPosition, NodeSelector, NodesPage, Phase, Request, Rollout, RolloutCandidate, RolloutOrder,
};
use domain::state_machine::{Command as _, TraceContext, TransitionContext};
use domain::{Machine, NodeId, PackageDigest, RolloutId, SkuId, Timestamp, TokenId, Transition};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

const ROLLOUT: RolloutId = RolloutId(Uuid::from_u128(0xB));
const SERIAL: &str = "01";
/// Small, so that a few nodes are several pages.
const PAGE: usize = 3;

fn start() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn digest() -> PackageDigest {
    format!("sha256:{}", "a".repeat(64)).parse().unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A message arrives; `again`: it stays, for another delivery.
    Deliver {
        which: usize,
        again: bool,
    },
    Lose {
        which: usize,
    },
    /// An agent reports on its update.
    Report {
        which: usize,
        succeeds: bool,
    },
    Pause,
    Resume,
    Abort,
    Retire {
        which: usize,
    },
    /// A node that has the version shows a fault.
    Alter {
        which: usize,
    },
    /// The rollout's owner crashes, and another member reads the snapshot.
    Restart,
    Pass {
        seconds: i64,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (any::<usize>(), any::<bool>()).prop_map(|(which, again)| Step::Deliver { which, again }),
        1 => any::<usize>().prop_map(|which| Step::Lose { which }),
        5 => (any::<usize>(), prop::bool::weighted(0.85))
            .prop_map(|(which, succeeds)| Step::Report { which, succeeds }),
        1 => Just(Step::Pause),
        2 => Just(Step::Resume),
        1 => prop::bool::weighted(0.2).prop_map(|abort| if abort { Step::Abort } else { Step::Resume }),
        1 => any::<usize>().prop_map(|which| Step::Retire { which }),
        1 => any::<usize>().prop_map(|which| Step::Alter { which }),
        1 => Just(Step::Restart),
        2 => (1_i64..60).prop_map(|seconds| Step::Pass { seconds }),
        1 => Just(Step::Pass { seconds: 700 }),
    ];
    prop::collection::vec(step, 0..120)
}

struct World {
    rollout: Rollout,
    nodes: BTreeMap<NodeId, Node>,
    /// Messages in transit.
    bus: Vec<Event>,
    now: Timestamp,
    /// How often each node has begun an update.
    begun: BTreeMap<NodeId, u32>,
    /// When the soak of the last wave began.
    soaks_since: Option<Timestamp>,
    /// When each node showed a fault.
    altered: BTreeMap<NodeId, Timestamp>,
    seed: u128,
}

fn decide<M: Machine>(
    state: Option<&M>,
    command: M::Command,
    (now, id, seed): (Timestamp, Uuid, u128),
    by: &Principal,
) -> Result<Transition<M>, M::Rejection> {
    let policy = PolicyBook::default();
    let trace = TraceContext::default();
    M::decide(
        state,
        command,
        &TransitionContext { now, policy: &policy, by, correlation_id: "c", trace, seed, id, version: 1 },
    )
}

fn worker() -> Principal {
    Principal::system("provisioning")
}

impl World {
    fn new(nodes: usize, canary: u32, max_unavailable: u32, soak_seconds: u32) -> Self {
        let order = RolloutOrder {
            digest: digest(),
            canary,
            max_unavailable,
            soak_seconds,
            includes_held: false,
            selector: NodeSelector::default(),
            reason: "r".into(),
        };
        let create = Request::Create { order: Box::new(order) };
        let step = decide::<Rollout>(None, create.into(), (start(), ROLLOUT.0, 1), &worker()).unwrap();
        let nodes = (0..nodes).map(|n| active_node(NodeId(Uuid::from_u128(0x100 + n as u128))));
        Self {
            rollout: step.next.unwrap(),
            nodes: nodes.map(|node| (node.id, node)).collect(),
            bus: step.events,
            now: start(),
            begun: BTreeMap::new(),
            soaks_since: None,
            altered: BTreeMap::new(),
            seed: 1,
        }
    }

    fn tell_rollout(&mut self, command: impl Into<domain::rollout::Command>) {
        self.seed += 1;
        let Ok(step) = decide(Some(&self.rollout), command.into(), (self.now, ROLLOUT.0, self.seed), &worker()) else {
            return;
        };
        let Some(next) = step.next else { return };
        let before: BTreeSet<_> = self.rollout.in_flight.keys().copied().collect();
        let started = next.in_flight.keys().filter(|node_id| !before.contains(node_id)).count();
        assert!(
            started == 0 || next.phase == Phase::Running,
            "{started} updates were ordered while it is {}",
            next.state()
        );
        let most = if next.is_in_canary() { next.order.canary - next.updated } else { u32::MAX };
        let most = most.min(next.order.max_unavailable) as usize;
        assert!(started == 0 || next.in_flight.len() <= most, "{} in flight, {most} may be", next.in_flight.len());
        if started > 0 {
            self.check_soak_has_ended(&next);
        }
        // The last node of the wave that was watched has failed.
        if next.soak.is_none() && next.soaking.is_empty() && matches!(next.phase, Phase::Stopped { .. }) {
            self.soaks_since = None;
        }
        if next.soaks_until().is_some() && self.rollout.soaks_until().is_none() {
            self.soaks_since = Some(self.now);
        }
        assert!(next.violations(&[]).is_empty(), "{next:?}");
        self.rollout = next;
        self.bus.extend(step.events);
    }

    /// Nothing begins before the nodes of the last wave were watched for the time, and those that showed a fault in it have stopped the rollout.
    fn check_soak_has_ended(&self, next: &Rollout) {
        assert!(next.soak.is_none(), "an update began in a soak: {next:?}");
        let Some(since) = self.soaks_since else { return };
        let until = since + chrono::TimeDelta::seconds(next.order.soak_seconds.into());
        assert!(self.now >= until, "an update began {} before the end of the soak", until - self.now);
        let named: BTreeSet<_> = next.failures.iter().map(|ended| ended.node_id).collect();
        let unseen = self.altered.iter().find(|(id, at)| **at < until && !named.contains(*id));
        assert!(unseen.is_none(), "{unseen:?} showed a fault in the soak, and the next wave began");
    }

    fn tell_node(&mut self, id: NodeId, by: &Principal, command: impl Into<node::Command>) {
        self.seed += 1;
        let Ok(step) = decide(Some(&self.nodes[&id]), command.into(), (self.now, id.0, self.seed), by) else { return };
        let Some(next) = step.next else { return };
        let began = step.audit.iter().filter(|record| record.action.as_str() == "nodes.update_agent").count();
        *self.begun.entry(id).or_default() += u32::try_from(began).unwrap();
        self.nodes.insert(id, next);
        self.bus.extend(step.events);
        let under_update = self.nodes.keys().filter(|id| self.open_update(**id).is_some()).count();
        assert!(under_update <= self.rollout.order.max_unavailable as usize, "{under_update} nodes are under update");
        assert!(self.begun.values().all(|count| *count <= 1), "a node began twice: {:?}", self.begun);
    }

    fn open_update(&self, id: NodeId) -> Option<(domain::TaskId, u32)> {
        let tasks = self.nodes[&id].tasks.by_id.values();
        let task = tasks.filter(|task| matches!(task.phase, NodeTaskPhase::Open)).find(|task| task.update.is_some())?;
        Some((task.work.task_id, task.work.attempt))
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Deliver { which, again } if !self.bus.is_empty() => {
                let index = which % self.bus.len();
                let event = if again { self.bus[index].clone() } else { self.bus.swap_remove(index) };
                self.deliver(&event);
            }
            Step::Lose { which } if !self.bus.is_empty() => {
                self.bus.swap_remove(which % self.bus.len());
            }
            Step::Report { which, succeeds } => {
                let ids: Vec<_> = self.nodes.keys().copied().filter(|id| self.open_update(*id).is_some()).collect();
                if !ids.is_empty() {
                    self.report(ids[which % ids.len()], succeeds);
                }
            }
            Step::Pause => self.tell_rollout(Request::Pause { reason: "r".into() }),
            Step::Resume => self.tell_rollout(Request::Resume { reason: "r".into() }),
            Step::Abort => self.tell_rollout(Request::Abort { reason: "r".into() }),
            Step::Retire { which } if !self.nodes.is_empty() => {
                let id = *self.nodes.keys().nth(which % self.nodes.len()).unwrap();
                self.tell_node(id, &administrator(), node::Request::Retire { reason: "r".into(), drain: false });
            }
            Step::Alter { which } => {
                let soaking: Vec<_> = self.rollout.soaking.iter().copied().collect();
                if !soaking.is_empty() {
                    self.alter(soaking[which % soaking.len()]);
                }
            }
            Step::Restart => {
                let snapshot = serde_json::to_string(&self.rollout).unwrap();
                self.rollout = serde_json::from_str(&snapshot).unwrap();
            }
            Step::Pass { seconds } => {
                self.now += chrono::TimeDelta::seconds(seconds);
                self.tick();
            }
            Step::Deliver { .. } | Step::Lose { .. } | Step::Retire { .. } => {}
        }
    }

    fn tick(&mut self) {
        if self.rollout.timer().is_some_and(|at| at <= self.now) {
            self.tell_rollout(domain::rollout::Command::TICK);
        }
        for id in self.nodes.keys().copied().collect::<Vec<_>>() {
            if self.nodes[&id].timer().is_some_and(|at| at <= self.now) {
                self.tell_node(id, &worker(), node::Command::TICK);
            }
        }
    }

    /// A heartbeat with a finding that the machine was altered.
    fn alter(&mut self, id: NodeId) {
        let is_watched = self.nodes[&id].agent.rollouts.iter().any(|known| known.soak.is_some());
        let found = ReportedFinding {
            probe: "privilege".into(),
            code: "setuid".into(),
            gpu_uuid: None,
            count: 1,
            first_at: self.now,
            last_at: self.now,
            boot_id: "boot-1".into(),
            detail: "a file".into(),
        };
        let report = FindingReport { sent_at: self.now, findings: vec![found], is_truncated: false };
        let node = &self.nodes[&id];
        let heartbeat = node::Request::Heartbeat {
            serial: SERIAL.into(),
            seen: Box::new(node.agent.contact.clone().unwrap()),
            inventory: Box::new(node.machine.inventory.clone().unwrap()),
            health: Box::new(NodeHealth { report: Some(report), ..NodeHealth::default() }),
        };
        self.tell_node(id, &Principal::Node(id), heartbeat);
        if is_watched && self.nodes[&id].state() == "quarantined" {
            self.altered.entry(id).or_insert(self.now);
        }
    }

    fn report(&mut self, id: NodeId, succeeds: bool) {
        let Some((task_id, attempt)) = self.open_update(id) else { return };
        let verdict = if succeeds {
            TaskOutcome::Succeeded { proof: None }
        } else {
            TaskOutcome::Failed { code: "rolled_back".into(), message: "m".into() }
        };
        let report =
            node::Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output: None, unproved: None };
        self.tell_node(id, &Principal::Node(id), report);
    }

    fn deliver(&mut self, event: &Event) {
        match event.reaction() {
            Reaction::Node(id, instruction) => self.tell_node(id, &worker(), instruction),
            Reaction::Rollout(_, fact) => self.tell_rollout(fact),
            Reaction::FindRolloutNodes(_) => {
                let page = self.page();
                self.tell_rollout(Fact::NodesFound { page: Box::new(page) });
            }
            Reaction::Nothing => {}
            other => panic!("not of this world: {other:?}"),
        }
    }

    /// As the worker reads it.
    fn page(&self) -> NodesPage {
        let after = self.rollout.feed.after;
        let rest: Vec<_> =
            self.nodes.values().filter(|node| after.is_none_or(|after| node.id > after.node_id)).collect();
        let page = &rest[..rest.len().min(PAGE)];
        let position = |node: &&Node| FeedPosition { created_at: start(), node_id: node.id };
        NodesPage {
            after,
            nodes: page
                .iter()
                .map(|node| RolloutCandidate {
                    node_id: node.id,
                    skip: node.rollout_skip(&digest(), self.rollout.order.includes_held),
                })
                .collect(),
            next: if rest.len() > PAGE { page.last().map(position) } else { None },
        }
    }

    /// Everything works from now on: the rollout ends.
    fn converge(&mut self) {
        for _ in 0..400 {
            if self.rollout.has_ended() {
                return;
            }
            for event in std::mem::take(&mut self.bus) {
                self.deliver(&event);
            }
            for id in self.nodes.keys().copied().collect::<Vec<_>>() {
                self.report(id, true);
            }
            self.tell_rollout(Request::Resume { reason: "r".into() });
            if self.bus.is_empty()
                && let Some(at) = self.rollout.timer()
            {
                self.now = self.now.max(at);
                self.tick();
            }
        }
        panic!("it does not end: {:?}", self.rollout);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn rollout_updates_each_node_once_within_its_bound_and_ends(
        steps in steps(), nodes in 0_usize..12, canary in 0_u32..4, max_unavailable in 1_u32..5,
        soak_seconds in prop_oneof![Just(0), Just(30), Just(300)],
    ) {
        let mut world = World::new(nodes, canary, max_unavailable, soak_seconds);
        for step in steps {
            world.take(step);
        }
        world.converge();
        let rollout = &world.rollout;
        let ended = (rollout.updated + rollout.failed + rollout.skipped) as usize;
        match rollout.phase {
            Phase::Completed => prop_assert_eq!(ended, nodes, "{:?}", rollout),
            _ => prop_assert!(ended <= nodes && rollout.in_flight.is_empty(), "{:?}", rollout),
        }
        // What comes late changes nothing.
        for event in std::mem::take(&mut world.bus) {
            world.deliver(&event);
        }
        prop_assert!(world.rollout.has_ended());
    }
}

fn administrator() -> Principal {
    let user = r#"{"caller":{"user_id":"u","roles":["admin"],"org_id":null,"project_id":null,"plan":null}}"#;
    serde_json::from_str(user).unwrap()
}

/// An active node whose agent can be updated, and that is in contact for a year.
fn active_node(id: NodeId) -> Node {
    let registration = node_fixture::registration(SkuId(Uuid::from_u128(1)), 0);
    let inventory = node_fixture::reported_inventory(id, 0);
    let year = start() + chrono::TimeDelta::days(365);
    let issued = CertificateRecord { serial: SERIAL.into(), not_after: year, generation: 0, authority: None };
    let register = node::Request::Register { registration: Box::new(registration), probe: None, machine: None };
    let token = node::Request::IssueToken { token_id: TokenId(id.0), token_sha256: [7; 32], ttl_seconds: None };
    let enroll = node::Request::Enroll(Box::new(Enrollment {
        token_sha256: [7; 32],
        csr_sha256: [1; 32],
        issued,
        recovery_public_key: "k".into(),
        boot_id: "boot-1".into(),
        agent_version: "1".into(),
        protocol: 3,
        inventory: inventory.clone(),
    }));
    let seen = AgentContact {
        boot_id: "boot-1".into(),
        agent_version: "1".into(),
        protocol: 3,
        last_seen_at: start(),
        silent_at: year,
        task_types: Some(["agent.update".to_owned()].into()),
        package_digest: format!("sha256:{}", "0".repeat(64)).parse().ok(),
        session: None,
        last_heartbeat: None,
    };
    let heartbeat = node::Request::Heartbeat {
        serial: SERIAL.into(),
        seen: Box::new(seen),
        inventory: Box::new(inventory),
        health: Box::new(NodeHealth::default()),
    };
    let (admin, agent) = (administrator(), Principal::Node(id));
    let poll = node::Request::Poll { serial: SERIAL.into() };
    let commands = [(&admin, register), (&admin, token), (&agent, enroll), (&agent, poll), (&agent, heartbeat)];
    let mut node: Option<Node> = None;
    for (by, request) in commands {
        let step = decide(node.as_ref(), request.into(), (start(), id.0, 3), by).unwrap();
        node = step.next.or(node);
    }
    let mut node = node.unwrap();
    // The heartbeat's time is set by the machine.
    if let Some(seen) = &mut node.agent.contact {
        seen.silent_at = year;
    }
    assert_eq!(node.state(), "active");
    node
}
