//! The node's lifecycle and tenants as tables; tests of what the tables do not show are in the files beside.

mod agent_update;
mod evacuation;
mod gpu_claims;
mod gpu_reset;
mod gpu_summand;
mod hardware_drift;
mod health;
mod health_rules;
mod integrity;
mod lifecycle;
mod long_history;
mod monitoring;
mod provided_machine;
mod recovery;
mod reimage;
mod repair;
mod sku_minimums;
mod ssh_access;
mod stored_form;
mod tasks;
mod tenants;
mod unproved_gpus;
mod validation;

use super::*;
use crate::authz::{CallerIdentity, Principal, TokenRole};
use crate::event::Event;
use crate::hardware::GpuLocality;
use crate::id::SkuId;
use crate::id::{TerminalSessionId, TokenId};
use crate::metadata::MetadataPatch;
use crate::metadata::{MAX_LABELS, PatchValue};
use crate::node_fixture;
use crate::package_digest::PackageDigest;
use crate::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue};
use crate::resend_timer;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::Command as _;
use crate::state_machine::{Effect, Machine as _};
use chrono::TimeDelta;
use std::fmt::Write as _;
use uuid::Uuid;

const NODE: NodeId = NodeId(Uuid::from_u128(0xA));
const TENANT: AllocationId = AllocationId(Uuid::from_u128(0x100));
const OTHER: AllocationId = AllocationId(Uuid::from_u128(0x200));
const SERIAL: &str = "01";
const HASH: [u8; 32] = [7; 32];
const GPUS: u32 = 4;

pub(super) fn start() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn admin() -> Principal {
    Principal::Caller(CallerIdentity::new("root", [TokenRole::Admin]))
}

fn agent() -> Principal {
    Principal::Node(NODE)
}

fn worker() -> Principal {
    Principal::system("provisioning")
}

pub(super) fn registration() -> Registration {
    node_fixture::registration(SkuId(Uuid::from_u128(1)), GPUS)
}

pub(super) fn inventory(gpus: u32) -> ReportedInventory {
    let mut inventory = node_fixture::reported_inventory("", gpus);
    for gpu in &mut inventory.gpus {
        (gpu.uuid, gpu.memory_mib) = (format!("GPU-{}", gpu.index), 79_000);
    }
    inventory
}

pub(super) fn seen(boot_id: &str) -> Box<AgentContact> {
    Box::new(AgentContact {
        boot_id: boot_id.into(),
        agent_version: "1".into(),
        protocol: 3,
        last_seen_at: start(),
        silent_at: start(),
        task_types: None,
        package_digest: None,
        session: None,
        last_heartbeat: None,
    })
}

fn heartbeat(status: NodeHealthStatus, inventory: ReportedInventory) -> Request {
    Request::Heartbeat {
        serial: SERIAL.into(),
        seen: seen("boot-1"),
        inventory: Box::new(inventory),
        health: Box::new(NodeHealth { status, alerts: Vec::new(), ..Default::default() }),
    }
}

pub(super) fn certificate(serial: &str) -> CertificateRecord {
    CertificateRecord {
        serial: serial.into(),
        not_after: start() + TimeDelta::days(30),
        generation: 0,
        authority: None,
    }
}

fn enrollment() -> Request {
    Request::Enroll(Box::new(Enrollment {
        token_sha256: HASH,
        csr_sha256: [1; 32],
        issued: certificate(SERIAL),
        recovery_public_key: "k".into(),
        boot_id: "boot-1".into(),
        agent_version: "1".into(),
        protocol: 3,
        inventory: inventory(GPUS),
    }))
}

fn issue_token() -> Request {
    Request::IssueToken { token_id: TokenId(Uuid::from_u128(5)), token_sha256: HASH, ttl_seconds: None }
}

fn reissue(revoke_current_certificate: bool) -> Request {
    Request::Reissue(Box::new(Reissue {
        token_id: TokenId(Uuid::from_u128(6)),
        token_sha256: [8; 32],
        ttl_seconds: None,
        reason: "r".into(),
        revoke_current_certificate,
    }))
}

/// A recovery as the node's own agent would ask for it in its first generation, with nonce and certificate number `n`.
fn recovery(n: u8) -> IdentityRecovery {
    IdentityRecovery {
        token_sha256: HASH,
        identity_generation: 1,
        verified_with: "k".into(),
        nonce: Nonce { value: format!("nonce-{n}"), until: start() + TimeDelta::days(60) },
        csr_sha256: [n; 32],
        issued: certificate(&format!("r{n}")),
        boot_id: "boot-1".into(),
        agent_version: "1".into(),
        protocol: 3,
    }
}

fn recover(recovery: IdentityRecovery) -> Request {
    Request::Recover(Box::new(recovery))
}

fn poll() -> Request {
    Request::Poll { serial: SERIAL.into() }
}

fn reserve(allocation_id: AllocationId, gpu_count: u32) -> Instruction {
    Instruction::Reserve { allocation_id, gpu_count, keys: Vec::new(), revision: 0, reimages: false }
}

fn order_task(task_type: TaskType) -> Request {
    Request::OrderTask { task_type, reason: "r".into() }
}

fn retire(drain: bool) -> Request {
    Request::Retire { reason: "r".into(), drain }
}

/// A node at an instant, under a policy, with the events of its last step.
#[derive(Clone)]
struct Story {
    node: Node,
    now: Timestamp,
    policy: PolicyBook,
    published: Vec<Event>,
    effects: Vec<Effect>,
    reply: Reply,
    wrote: bool,
}

fn ctx<'a>(now: Timestamp, policy: &'a PolicyBook, by: &'a Principal) -> TransitionContext<'a> {
    TransitionContext { seed: 7, id: NODE.0, version: 3, ..TransitionContext::in_test(now, policy, by) }
}

/// What a part decides at this time, by the default policies.
pub(super) fn decided_at<T>(now: Timestamp, decide: impl FnOnce(&TransitionContext<'_>) -> T) -> T {
    let (policy, by) = (PolicyBook::default(), worker());
    decide(&ctx(now, &policy, &by))
}

fn register(registration: Registration) -> Result<Transition<Node>, Rejection> {
    let policy = PolicyBook::default();
    let command = Request::Register { registration: Box::new(registration), probe: None, machine: None };
    Node::decide(None, command.into(), &ctx(start(), &policy, &admin()))
}

/// A registered node.
fn node() -> Story {
    let step = register(registration()).unwrap();
    let story = Story {
        node: step.next.unwrap(),
        now: start(),
        policy: PolicyBook::default(),
        published: step.events,
        effects: step.effects,
        reply: step.reply,
        wrote: true,
    };
    // The pause before a repair has tests of its own.
    story.policy(PolicyKey::NodeRepairDelay, 0)
}

impl Story {
    fn policy(mut self, key: PolicyKey, value: i64) -> Self {
        self.policy.set(key, PolicyScope::Global, start(), PolicyValue::Int(value)).unwrap();
        self
    }

    fn after(mut self, time: TimeDelta) -> Self {
        self.now += time;
        self
    }

    fn at_its_timer(mut self) -> Self {
        self.now = self.node.timer().unwrap();
        self
    }

    fn ask(&self, by: &Principal, command: impl Into<Command>) -> Result<Transition<Node>, Rejection> {
        Node::decide(Some(&self.node), command.into(), &ctx(self.now, &self.policy, by))
    }

    #[track_caller]
    fn by(mut self, by: &Principal, command: impl Into<Command>) -> Self {
        let step = self.ask(by, command).unwrap();
        self.wrote = step.next.is_some();
        assert!(self.wrote || (step.events.is_empty() && step.audit.is_empty()), "what is not written is lost");
        self.node = step.next.unwrap_or(self.node);
        self.published = step.events;
        self.effects = step.effects;
        self.reply = step.reply;
        self
    }

    #[track_caller]
    fn admin(self, command: impl Into<Command>) -> Self {
        self.by(&admin(), command)
    }

    #[track_caller]
    fn agent(self, command: impl Into<Command>) -> Self {
        self.by(&agent(), command)
    }

    #[track_caller]
    fn after_fact(self, command: impl Into<Command>) -> Self {
        self.by(&worker(), command)
    }

    fn ticked(self) -> Self {
        self.after_fact(Command::TICK)
    }

    fn invited(self) -> Self {
        self.admin(issue_token())
    }

    fn enrolled(self) -> Self {
        self.invited().agent(enrollment())
    }

    fn active(self) -> Self {
        self.enrolled().agent(poll())
    }

    fn after_heartbeat(self) -> Self {
        self.agent(heartbeat(NodeHealthStatus::Ok, inventory(GPUS)))
    }

    fn offline(mut self) -> Self {
        self.now = self.node.agent.contact.as_ref().unwrap().silent_at;
        self.ticked()
    }

    fn quarantined(self) -> Self {
        self.admin(Request::Quarantine { reason: "r".into() })
    }

    fn retired(self) -> Self {
        self.admin(retire(false))
    }

    fn removing(self) -> Self {
        self.admin(Request::Remove { reason: "r".into() })
    }

    // The states of a tenant.

    fn reserved(self) -> Self {
        self.after_fact(reserve(TENANT, 1))
    }

    fn provisioning(self) -> Self {
        let deadline_at = self.now + TimeDelta::seconds(600);
        self.reserved().after_fact(Instruction::Provision { allocation_id: TENANT, deadline_at })
    }

    fn ready(self) -> Self {
        self.provisioning().reports(TaskOutcome::Succeeded { proof: None })
    }

    fn setup_failed(self) -> Self {
        self.provisioning().reports(failed())
    }

    fn cleaning(self, attempt: u32) -> Self {
        let deadline_at = self.now + TimeDelta::seconds(600);
        self.after_fact(Instruction::Clean { allocation_id: TENANT, attempt, deadline_at })
    }

    fn releasing(self) -> Self {
        self.ready().cleaning(1)
    }

    fn release_failed(self) -> Self {
        self.releasing().reports(failed())
    }

    fn fenced(self) -> Self {
        self.release_failed().after_fact(Instruction::Fence { allocation_id: TENANT, attempt: 1 })
    }

    fn abandoned(self) -> Self {
        self.release_failed().after_fact(Instruction::Abandon { allocation_id: TENANT })
    }

    /// The tenant's task and its attempt; an unknown task where there is none.
    fn task(&self) -> (TaskId, u32) {
        let work = match self.node.tenancy.holds.get(&TENANT).map(|hold| &hold.phase) {
            Some(
                HoldPhase::Provisioning { work }
                | HoldPhase::Releasing { work }
                | HoldPhase::ReleaseFailed { work }
                | HoldPhase::Abandoned { work },
            ) => Some(work),
            Some(HoldPhase::Reserved | HoldPhase::Ready | HoldPhase::SetupFailed { .. }) | None => None,
        };
        work.map_or((TaskId(Uuid::from_u128(9)), 1), |work| (work.task_id, work.attempt))
    }

    fn report(&self, attempt: u32, verdict: TaskOutcome) -> Request {
        Request::Report {
            serial: SERIAL.into(),
            task_id: self.task().0,
            attempt,
            verdict,
            output: None,
            unproved: None,
        }
    }

    #[track_caller]
    fn reports(self, verdict: TaskOutcome) -> Self {
        let report = self.report(self.task().1, verdict);
        self.agent(report)
    }

    #[track_caller]
    fn expect(self, state: &str) -> Self {
        assert_eq!(self.node.state(), state, "{:?}", self.node.lifecycle.reason);
        self
    }

    #[track_caller]
    fn publishes(self, subjects: &[&str]) -> Self {
        let published: Vec<_> = self.published.iter().map(Event::subject).collect();
        assert_eq!(published, subjects);
        self
    }

    #[track_caller]
    fn unmoved(self) -> Self {
        assert!(!self.wrote, "something was written");
        self
    }

    #[track_caller]
    fn refuses(&self, by: &Principal, command: impl Into<Command>) -> Rejection {
        self.ask(by, command).map(|step| step.why).unwrap_err()
    }

    fn pending_tasks(&self) -> Vec<&'static str> {
        let step = self.ask(&agent(), poll()).unwrap();
        let Reply::Work { orders } = step.reply else { panic!("{:?}", step.reply) };
        let what = |order: AgentTask| match order.what {
            TaskKind::Provision { .. } => "provision",
            TaskKind::ReconcileLogins { .. } => "reconcile logins",
            TaskKind::Release { .. } => "release",
            TaskKind::OfNode { task_type, .. } => task_type.name(),
            TaskKind::OpenTerminal { .. } => "open terminal",
        };
        orders.into_iter().map(what).collect()
    }
}

fn failed() -> TaskOutcome {
    TaskOutcome::Failed { code: "c".into(), message: "m".into() }
}

const PROVED: TaskOutcome = TaskOutcome::Succeeded { proof: Some(TENANT) };

fn lives() -> Vec<(&'static str, Story)> {
    vec![
        ("registered", node()),
        ("bootstrap-issued", node().invited()),
        ("enrolling", node().enrolled()),
        ("active", node().active()),
        ("active, with a tenant", node().active().ready()),
        ("offline", node().active().offline()),
        ("offline, with a tenant", node().active().ready().offline()),
        ("draining", node().active().ready().admin(retire(true))),
        ("quarantined", node().active().quarantined()),
        ("quarantined, with a tenant", node().active().ready().quarantined()),
        ("quarantined by force", node().active().abandoned()),
        ("fenced", node().active().fenced()),
        ("retired", node().active().retired()),
        ("removing", node().active().retired().removing()),
        ("removed", node().active().retired().removing().at_its_timer().ticked()),
    ]
}

/// Metadata with so many labels and a name.
fn labelled(count: usize) -> MetadataPatch {
    let labels = (0..count).map(|n| (format!("key-{n}"), Some(String::new()))).collect();
    MetadataPatch { name: PatchValue::Set("name".into()), labels: PatchValue::Set(labels) }
}

fn life_commands() -> Vec<(&'static str, Principal, Command)> {
    let revise = |if_version| Request::Revise {
        host: Some("b".into()),
        port: None,
        ssh_username: None,
        probe: None,
        metadata: MetadataPatch::default(),
        if_version,
    };
    let label = |count| Request::Revise {
        host: None,
        port: None,
        ssh_username: None,
        probe: None,
        metadata: labelled(count),
        if_version: None,
    };
    let reason = || "r".to_owned();
    vec![
        (
            "register",
            admin(),
            Request::Register { registration: Box::new(registration()), probe: None, machine: None }.into(),
        ),
        ("revise", admin(), revise(None).into()),
        ("revise another version", admin(), revise(Some(2)).into()),
        ("revise its labels", admin(), label(1).into()),
        ("revise its labels, too many", admin(), label(MAX_LABELS + 1).into()),
        ("issue_token", admin(), issue_token().into()),
        ("reissue", admin(), reissue(false).into()),
        ("reissue, revoking", admin(), reissue(true).into()),
        ("retire", admin(), retire(false).into()),
        ("retire, draining", admin(), retire(true).into()),
        ("reactivate", admin(), Request::Reactivate { reason: reason() }.into()),
        ("remove", admin(), Request::Remove { reason: reason() }.into()),
        ("quarantine", admin(), Request::Quarantine { reason: reason() }.into()),
        ("release_quarantine", admin(), Request::ReleaseQuarantine { reason: reason() }.into()),
        (
            "validate",
            admin(),
            Request::Validate { level: crate::validation::ValidationLevel::Quick, reason: reason() }.into(),
        ),
        ("order_task", admin(), order_task(TaskType::NodeReboot).into()),
        ("order_task that follows from something", admin(), order_task(TaskType::AllocationProvision).into()),
        ("enroll", agent(), enrollment().into()),
        ("enroll by another node", Principal::Node(NodeId(Uuid::from_u128(0xB))), enrollment().into()),
        ("recover", agent(), recover(recovery(2)).into()),
        ("renew", agent(), Request::Renew { serial: SERIAL.into(), issued: certificate("02") }.into()),
        ("poll", agent(), poll().into()),
        ("poll, unknown certificate", agent(), Request::Poll { serial: "ff".into() }.into()),
        ("heartbeat", agent(), heartbeat(NodeHealthStatus::Ok, inventory(GPUS)).into()),
        ("heartbeat, critical", agent(), heartbeat(NodeHealthStatus::Critical, inventory(GPUS)).into()),
        ("heartbeat, a GPU less", agent(), heartbeat(NodeHealthStatus::Ok, inventory(GPUS - 1)).into()),
        ("reserve", worker(), reserve(OTHER, 1).into()),
        ("reserve too many", worker(), reserve(OTHER, GPUS + 1).into()),
        ("tick before its time", worker(), Command::TICK),
    ]
}

fn holds() -> Vec<(&'static str, Story)> {
    vec![
        ("nothing held", node().active()),
        ("reserved", node().active().reserved()),
        ("provisioning", node().active().provisioning()),
        ("ready", node().active().ready()),
        ("setup_failed", node().active().setup_failed()),
        ("releasing, attempt 1", node().active().releasing()),
        ("releasing, attempt 2", node().active().release_failed().cleaning(2)),
        ("release_failed, attempt 1", node().active().release_failed()),
        ("fenced", node().active().fenced()),
        ("abandoned by force", node().active().abandoned()),
        ("reserved, quarantined", node().active().reserved().quarantined()),
    ]
}

fn hold_commands(story: &Story) -> Vec<(String, Principal, Command)> {
    let allocation_id = TENANT;
    let deadline_at = story.now + TimeDelta::seconds(600);
    let mut commands = vec![
        ("reserve again".to_owned(), worker(), Command::from(reserve(TENANT, 1))),
        ("unreserve".to_owned(), worker(), Instruction::Unreserve { allocation_id }.into()),
        ("provision".to_owned(), worker(), Instruction::Provision { allocation_id, deadline_at }.into()),
    ];
    for attempt in 1..=2 {
        let clean = Instruction::Clean { allocation_id, attempt, deadline_at };
        commands.push((format!("clean {attempt}"), worker(), clean.into()));
        let mark = Instruction::MarkReleaseFailed { allocation_id, attempt };
        commands.push((format!("mark_release_failed {attempt}"), worker(), mark.into()));
        commands.push((format!("fence {attempt}"), worker(), Instruction::Fence { allocation_id, attempt }.into()));
        commands.push((format!("report {attempt} failed"), agent(), story.report(attempt, failed()).into()));
        let unproven = TaskOutcome::Succeeded { proof: None };
        commands.push((format!("report {attempt} succeeded"), agent(), story.report(attempt, unproven).into()));
        commands.push((format!("report {attempt} proved"), agent(), story.report(attempt, PROVED).into()));
        let foreign = TaskOutcome::Succeeded { proof: Some(OTHER) };
        commands.push((format!("report {attempt} proved another's"), agent(), story.report(attempt, foreign).into()));
    }
    commands.push(("abandon".to_owned(), worker(), Instruction::Abandon { allocation_id }.into()));
    commands
}

fn held(node: &Node) -> String {
    let phase = match node.tenancy.holds.get(&TENANT).map(|hold| &hold.phase) {
        None => "nothing".to_owned(),
        Some(HoldPhase::Reserved) => "reserved".to_owned(),
        Some(HoldPhase::Provisioning { work }) => format!("provisioning {}", work.attempt),
        Some(HoldPhase::Ready) => "ready".to_owned(),
        Some(HoldPhase::SetupFailed { .. }) => "setup_failed".to_owned(),
        Some(HoldPhase::Releasing { work }) => format!("releasing {}", work.attempt),
        Some(HoldPhase::ReleaseFailed { work }) => format!("release_failed {}", work.attempt),
        Some(HoldPhase::Abandoned { work }) => format!("abandoned {}", work.attempt),
    };
    if node.tenancy.fenced_by.is_empty() { phase } else { format!("{phase}, fenced") }
}

fn outcome(from: &Node, step: Result<Transition<Node>, Rejection>, name: impl Fn(&Node) -> String) -> String {
    let step = match step {
        Err(rejection) => return format!("refused: {rejection}"),
        Ok(step) => step,
    };
    let mut line = match &step.next {
        None => {
            assert!(step.events.is_empty() && step.audit.is_empty(), "what is not written is lost");
            "stays".to_owned()
        }
        Some(next) => {
            assert!(next.has_deadline_where_transient(), "{next:?}");
            assert!(next.tenancy.holds_each_gpu_once());
            let stored = serde_json::to_string(next).unwrap();
            assert_eq!(&serde_json::from_str::<Node>(&stored).unwrap(), next);
            match (next == from, name(next) == name(from)) {
                (true, _) => "stays, and publishes".to_owned(),
                (false, true) => "noted".to_owned(),
                (false, false) => format!("-> {}", name(next)),
            }
        }
    };
    let published: Vec<_> = step.events.iter().map(Event::subject).collect();
    let audited: Vec<_> = step.audit.iter().map(|audit| audit.action.as_str()).collect();
    for (what, list) in [("", published), ("audit ", audited)] {
        if !list.is_empty() {
            write!(line, " | {what}{}", list.join(", ")).unwrap();
        }
    }
    for effect in step.effects {
        let effect = match effect {
            Effect::WakeNode(_) => "wake",
            Effect::CloseNode(_) => "close",
            Effect::WakeTerminal(_) => "wake terminal",
            Effect::ReadPolicy => "read policy",
            Effect::ReadKeys => "read keys",
        };
        write!(line, " | {effect}").unwrap();
    }
    line
}

#[test]
fn every_command_in_every_state_does_what_was_reviewed() {
    let mut table = String::new();
    let state = |node: &Node| node.state().to_owned();
    for (name, story) in lives() {
        writeln!(table, "{name}").unwrap();
        for (case, by, command) in life_commands() {
            writeln!(table, "    {case}: {}", outcome(&story.node, story.ask(&by, command), state)).unwrap();
        }
        if story.node.timer().is_some() {
            let due = story.clone().at_its_timer();
            let ticked = due.ask(&worker(), Command::TICK);
            writeln!(table, "    tick in time: {}", outcome(&due.node, ticked, state)).unwrap();
        }
        if let Some(seen) = &story.node.agent.contact {
            let later = Story { now: seen.silent_at, ..story.clone() };
            let ticked = later.ask(&worker(), Command::TICK);
            writeln!(table, "    tick when it was silent: {}", outcome(&later.node, ticked, state)).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

#[test]
fn every_order_and_report_in_every_phase_of_a_tenant_does_what_was_reviewed() {
    let mut table = String::new();
    for (name, story) in holds() {
        writeln!(table, "{name}").unwrap();
        for (case, by, command) in hold_commands(&story) {
            writeln!(table, "    {case}: {}", outcome(&story.node, story.ask(&by, command), held)).unwrap();
        }
        let later = story.after(resend_timer::FIRST);
        writeln!(table, "    tick later: {}", outcome(&later.node, later.ask(&worker(), Command::TICK), held)).unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn every_state_that_must_end_says_until_when_and_why() {
    let mut table = String::new();
    for (name, story) in lives() {
        let seconds = |at: Timestamp| (at - story.now).num_seconds();
        let wakes = story.node.timer().map_or("never".to_owned(), |at| format!("in {} s", seconds(at)));
        let ends = story
            .node
            .deadline()
            .map_or("no end".to_owned(), |it| format!("ends in {} s: {}", seconds(it.at), it.reason));
        writeln!(table, "{name}: wakes {wakes}; {ends}").unwrap();
    }
    insta::assert_snapshot!(table);
}
