//! The node's life and its tenants as tables, and the sentences that the tables do not say.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;
use crate::authz::{Caller, Principal, Role};
use crate::invariant;
use crate::machine::Effect;
use crate::policy::{Key, PolicyBook, Scope, Value};
use chrono::TimeDelta;
use std::fmt::Write as _;
use uuid::Uuid;

const NODE: NodeId = NodeId(Uuid::from_u128(0xA));
const TENANT: AllocationId = AllocationId(Uuid::from_u128(0x100));
const OTHER: AllocationId = AllocationId(Uuid::from_u128(0x200));
const SERIAL: &str = "01";
const HASH: [u8; 32] = [7; 32];
const GPUS: u32 = 4;

fn start() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn admin() -> Principal {
    Principal::Caller(Caller {
        user_id: "root".into(),
        roles: [Role::Admin].into(),
        org_id: None,
        project_id: None,
        plan: None,
    })
}

fn agent() -> Principal {
    Principal::Node(NODE)
}

fn worker() -> Principal {
    Principal::system("provisioning")
}

fn registration() -> Registration {
    Registration {
        host: "node-a".into(),
        port: 22,
        ssh_username: "ops".into(),
        ssh_public_key: "ssh-ed25519 AAAA".into(),
        ssh_key_fingerprint: "SHA256:x".into(),
        sku: Promise {
            sku_id: SkuId(Uuid::from_u128(1)),
            name: "h100x4".into(),
            gpu_model: "H100".into(),
            gpu_memory_mib: 80_000,
            gpu_count: GPUS,
            allowed_regions: vec!["eu".into()],
        },
        region_code: "eu".into(),
        gpus_total: GPUS,
        onboarding_mode: OnboardingMode::Manual,
    }
}

fn inventory(gpus: u32) -> Inventory {
    Inventory {
        gpus: (0..gpus)
            .map(|index| Gpu { index, uuid: format!("GPU-{index}"), model: "H100".into(), memory_mib: 79_000 })
            .collect(),
        gpu_source: "simulated".into(),
        executor: "sandbox".into(),
        isolates_devices: true,
        cpu_cores: 64,
        memory_mib: 512_000,
        storage_gib: 4_000,
    }
}

fn seen(boot_id: &str) -> Box<Seen> {
    Box::new(Seen {
        boot_id: boot_id.into(),
        agent_version: "1".into(),
        protocol: 3,
        last_seen_at: start(),
        silent_at: start(),
    })
}

fn heartbeat(status: HealthStatus, inventory: Inventory) -> Command {
    Command::Heartbeat {
        serial: SERIAL.into(),
        seen: seen("boot-1"),
        inventory: Box::new(inventory),
        health: Box::new(Health { status, alerts: Vec::new() }),
    }
}

fn certificate(serial: &str) -> Certificate {
    Certificate { serial: serial.into(), not_after: start() + TimeDelta::days(30), generation: 0 }
}

fn enrollment() -> Command {
    Command::Enroll(Box::new(Enrollment {
        token_sha256: HASH,
        issued: certificate(SERIAL),
        recovery_public_key: "k".into(),
        boot_id: "boot-1".into(),
        agent_version: "1".into(),
        protocol: 3,
        inventory: inventory(GPUS),
    }))
}

fn issue_token() -> Command {
    Command::IssueToken { token_id: TokenId(Uuid::from_u128(5)), token_sha256: HASH, ttl_seconds: None }
}

fn poll() -> Command {
    Command::Poll { serial: SERIAL.into() }
}

fn reserve(allocation_id: AllocationId, gpu_count: u32) -> Command {
    Command::Reserve { allocation_id, gpu_count, keys: Vec::new() }
}

fn retire(drain: bool) -> Command {
    Command::Retire { reason: "r".into(), drain }
}

/// A node at an instant, under a policy, with what its last step said.
#[derive(Clone)]
struct Story {
    node: Node,
    now: Timestamp,
    policy: PolicyBook,
    said: Vec<Event>,
    effects: Vec<Effect>,
    reply: Reply,
    wrote: bool,
}

fn ctx<'a>(now: Timestamp, policy: &'a PolicyBook, by: &'a Principal) -> Ctx<'a> {
    Ctx { now, policy, by, correlation_id: "c", seed: 7, id: NODE.0, version: 3 }
}

fn register(registration: Registration) -> Result<Step<Node>, Rejection> {
    let policy = PolicyBook::default();
    let command = Command::Register { registration: Box::new(registration), probe: None };
    Node::decide(None, command, &ctx(start(), &policy, &admin()))
}

/// A registered node.
fn node() -> Story {
    let step = register(registration()).unwrap();
    Story {
        node: step.next.unwrap(),
        now: start(),
        policy: PolicyBook::default(),
        said: step.events,
        effects: step.effects,
        reply: step.reply,
        wrote: true,
    }
}

impl Story {
    fn policy(mut self, key: Key, value: i64) -> Self {
        self.policy.set(key, Scope::Global, start(), Value::Int(value)).unwrap();
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

    fn ask(&self, by: &Principal, command: Command) -> Result<Step<Node>, Rejection> {
        Node::decide(Some(&self.node), command, &ctx(self.now, &self.policy, by))
    }

    #[track_caller]
    fn by(mut self, by: &Principal, command: Command) -> Self {
        let step = self.ask(by, command).unwrap();
        self.wrote = step.next.is_some();
        assert!(self.wrote || (step.events.is_empty() && step.audit.is_empty()), "what is not written is lost");
        self.node = step.next.unwrap_or(self.node);
        self.said = step.events;
        self.effects = step.effects;
        self.reply = step.reply;
        self
    }

    #[track_caller]
    fn admin(self, command: Command) -> Self {
        self.by(&admin(), command)
    }

    #[track_caller]
    fn agent(self, command: Command) -> Self {
        self.by(&agent(), command)
    }

    #[track_caller]
    fn told(self, command: Command) -> Self {
        self.by(&worker(), command)
    }

    fn ticked(self) -> Self {
        self.told(Command::Tick)
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

    fn heard(self) -> Self {
        self.agent(heartbeat(HealthStatus::Ok, inventory(GPUS)))
    }

    fn offline(self) -> Self {
        self.at_its_timer().ticked()
    }

    fn quarantined(self) -> Self {
        self.admin(Command::Quarantine { reason: "r".into() })
    }

    fn retired(self) -> Self {
        self.admin(retire(false))
    }

    fn removing(self) -> Self {
        self.admin(Command::Remove { reason: "r".into() })
    }

    // The tenant's way.

    fn reserved(self) -> Self {
        self.told(reserve(TENANT, 1))
    }

    fn provisioning(self) -> Self {
        let deadline_at = self.now + TimeDelta::seconds(600);
        self.reserved().told(Command::Provision { allocation_id: TENANT, deadline_at })
    }

    fn ready(self) -> Self {
        self.provisioning().reports(Verdict::Succeeded { proof: None })
    }

    fn setup_failed(self) -> Self {
        self.provisioning().reports(failed())
    }

    fn cleaning(self, attempt: u32) -> Self {
        let deadline_at = self.now + TimeDelta::seconds(600);
        self.told(Command::Clean { allocation_id: TENANT, attempt, deadline_at })
    }

    fn releasing(self) -> Self {
        self.ready().cleaning(1)
    }

    fn release_failed(self) -> Self {
        self.releasing().reports(failed())
    }

    fn fenced(self) -> Self {
        self.release_failed().told(Command::Fence { allocation_id: TENANT, attempt: 1 })
    }

    fn abandoned(self) -> Self {
        self.release_failed().told(Command::Abandon { allocation_id: TENANT })
    }

    /// The tenant's task and its attempt; a task that does not exist where there is none.
    fn task(&self) -> (TaskId, u32) {
        let work = match self.node.holds.get(&TENANT).map(|hold| &hold.phase) {
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

    fn report(&self, attempt: u32, verdict: Verdict) -> Command {
        Command::Report { serial: SERIAL.into(), task_id: self.task().0, attempt, verdict }
    }

    #[track_caller]
    fn reports(self, verdict: Verdict) -> Self {
        let report = self.report(self.task().1, verdict);
        self.agent(report)
    }

    #[track_caller]
    fn expect(self, state: &str) -> Self {
        assert_eq!(self.node.state(), state, "{:?}", self.node.reason);
        self
    }

    #[track_caller]
    fn says(self, subjects: &[&str]) -> Self {
        let said: Vec<_> = self.said.iter().map(Event::subject).collect();
        assert_eq!(said, subjects);
        self
    }

    #[track_caller]
    fn unmoved(self) -> Self {
        assert!(!self.wrote, "something was written");
        self
    }

    #[track_caller]
    fn refuses(&self, by: &Principal, command: Command) -> Rejection {
        self.ask(by, command).map(|step| step.why).unwrap_err()
    }

    fn orders(&self) -> Vec<&'static str> {
        let step = self.ask(&agent(), poll()).unwrap();
        let Reply::Work { orders } = step.reply else { panic!("{:?}", step.reply) };
        let what = |order: Order| match order.what {
            What::Provision { .. } => "provision",
            What::Release => "release",
        };
        orders.into_iter().map(what).collect()
    }
}

fn failed() -> Verdict {
    Verdict::Failed { code: "c".into(), message: "m".into() }
}

const PROVED: Verdict = Verdict::Succeeded { proof: Some(TENANT) };

fn lives() -> Vec<(&'static str, Story)> {
    vec![
        ("registered", node()),
        ("bootstrap_issued", node().invited()),
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

fn life_commands() -> Vec<(&'static str, Principal, Command)> {
    let revise = |if_version| Command::Revise { host: Some("b".into()), port: None, ssh_username: None, if_version };
    let reason = || "r".to_owned();
    vec![
        ("register", admin(), Command::Register { registration: Box::new(registration()), probe: None }),
        ("revise", admin(), revise(None)),
        ("revise another version", admin(), revise(Some(2))),
        ("issue_token", admin(), issue_token()),
        ("retire", admin(), retire(false)),
        ("retire, draining", admin(), retire(true)),
        ("reactivate", admin(), Command::Reactivate { reason: reason() }),
        ("remove", admin(), Command::Remove { reason: reason() }),
        ("quarantine", admin(), Command::Quarantine { reason: reason() }),
        ("release_quarantine", admin(), Command::ReleaseQuarantine { reason: reason() }),
        ("enroll", agent(), enrollment()),
        ("enroll by another node", Principal::Node(NodeId(Uuid::from_u128(0xB))), enrollment()),
        ("renew", agent(), Command::Renew { serial: SERIAL.into(), issued: certificate("02") }),
        ("poll", agent(), poll()),
        ("poll, unknown certificate", agent(), Command::Poll { serial: "ff".into() }),
        ("heartbeat", agent(), heartbeat(HealthStatus::Ok, inventory(GPUS))),
        ("heartbeat, critical", agent(), heartbeat(HealthStatus::Critical, inventory(GPUS))),
        ("heartbeat, a GPU less", agent(), heartbeat(HealthStatus::Ok, inventory(GPUS - 1))),
        ("reserve", worker(), reserve(OTHER, 1)),
        ("reserve too many", worker(), reserve(OTHER, GPUS + 1)),
        ("tick before its time", worker(), Command::Tick),
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
        ("reserve again".to_owned(), worker(), reserve(TENANT, 1)),
        ("unreserve".to_owned(), worker(), Command::Unreserve { allocation_id }),
        ("provision".to_owned(), worker(), Command::Provision { allocation_id, deadline_at }),
    ];
    for attempt in 1..=2 {
        let clean = Command::Clean { allocation_id, attempt, deadline_at };
        commands.push((format!("clean {attempt}"), worker(), clean));
        let mark = Command::MarkReleaseFailed { allocation_id, attempt };
        commands.push((format!("mark_release_failed {attempt}"), worker(), mark));
        commands.push((format!("fence {attempt}"), worker(), Command::Fence { allocation_id, attempt }));
        commands.push((format!("report {attempt} failed"), agent(), story.report(attempt, failed())));
        let unproven = Verdict::Succeeded { proof: None };
        commands.push((format!("report {attempt} succeeded"), agent(), story.report(attempt, unproven)));
        commands.push((format!("report {attempt} proved"), agent(), story.report(attempt, PROVED)));
        let foreign = Verdict::Succeeded { proof: Some(OTHER) };
        commands.push((format!("report {attempt} proved another's"), agent(), story.report(attempt, foreign)));
    }
    commands.push(("abandon".to_owned(), worker(), Command::Abandon { allocation_id }));
    commands
}

fn held(node: &Node) -> String {
    let phase = match node.holds.get(&TENANT).map(|hold| &hold.phase) {
        None => "nothing".to_owned(),
        Some(HoldPhase::Reserved) => "reserved".to_owned(),
        Some(HoldPhase::Provisioning { work }) => format!("provisioning {}", work.attempt),
        Some(HoldPhase::Ready) => "ready".to_owned(),
        Some(HoldPhase::SetupFailed { .. }) => "setup_failed".to_owned(),
        Some(HoldPhase::Releasing { work }) => format!("releasing {}", work.attempt),
        Some(HoldPhase::ReleaseFailed { work }) => format!("release_failed {}", work.attempt),
        Some(HoldPhase::Abandoned { work }) => format!("abandoned {}", work.attempt),
    };
    if node.fenced_by.is_empty() { phase } else { format!("{phase}, fenced") }
}

fn outcome(from: &Node, step: Result<Step<Node>, Rejection>, name: impl Fn(&Node) -> String) -> String {
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
            assert!(invariant::i8_what_is_transient_has_an_end(next, invariant::node_is_transient(next)), "{next:?}");
            assert!(invariant::each_gpu_is_held_once(next));
            let kept = serde_json::to_string(next).unwrap();
            assert_eq!(&serde_json::from_str::<Node>(&kept).unwrap(), next);
            match (next == from, name(next) == name(from)) {
                (true, _) => "stays, and says it".to_owned(),
                (false, true) => "noted".to_owned(),
                (false, false) => format!("-> {}", name(next)),
            }
        }
    };
    let said: Vec<_> = step.events.iter().map(Event::subject).collect();
    let audited: Vec<_> = step.audit.iter().map(|audit| audit.action).collect();
    for (what, list) in [("", said), ("audit ", audited)] {
        if !list.is_empty() {
            write!(line, " | {what}{}", list.join(", ")).unwrap();
        }
    }
    for effect in step.effects {
        let effect = match effect {
            Effect::WakeNode(_) => "wake",
            Effect::CloseNode(_) => "close",
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
        for (said, by, command) in life_commands() {
            writeln!(table, "    {said}: {}", outcome(&story.node, story.ask(&by, command), state)).unwrap();
        }
        if story.node.timer().is_some() {
            let due = story.at_its_timer();
            let ticked = due.ask(&worker(), Command::Tick);
            writeln!(table, "    tick in time: {}", outcome(&due.node, ticked, state)).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

#[test]
fn every_order_and_report_in_every_phase_of_a_tenant_does_what_was_reviewed() {
    let mut table = String::new();
    for (name, story) in holds() {
        writeln!(table, "{name}").unwrap();
        for (said, by, command) in hold_commands(&story) {
            writeln!(table, "    {said}: {}", outcome(&story.node, story.ask(&by, command), held)).unwrap();
        }
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

#[test]
fn what_does_not_exist_can_only_be_registered() {
    let policy = PolicyBook::default();
    for (said, by, command) in life_commands().into_iter().skip(1) {
        assert_eq!(Node::decide(None, command, &ctx(start(), &policy, &by)).err(), Some(Rejection::NotFound), "{said}");
    }
}

#[test]
fn a_registration_must_agree_with_its_sku() {
    let wrong = Registration { gpus_total: 3, ..registration() };
    assert_eq!(register(wrong).err(), Some(Rejection::GpusDiffer { given: 3, promised: GPUS }));
    let abroad = Registration { region_code: "mars".into(), ..registration() };
    assert_eq!(register(abroad).err(), Some(Rejection::RegionNotAllowed { region_code: "mars".into() }));
}

#[test]
fn a_node_is_onboarded() {
    let active = node().expect("registered").invited().expect("bootstrap_issued").agent(enrollment());
    let active = active.expect("enrolling").agent(poll()).expect("active").says(&["node.state_changed"]);
    assert_eq!(active.node.gpus_free(), GPUS);
}

#[test]
fn a_token_buys_one_enrollment() {
    let enrolled = node().enrolled();
    let refused = |cause| Rejection::TokenRefused { cause };
    assert_eq!(enrolled.refuses(&agent(), enrollment()), refused(TokenCause::Consumed));
    assert_eq!(node().refuses(&agent(), enrollment()), refused(TokenCause::NoneIssued));
    let late = node().invited().at_its_timer();
    assert_eq!(late.refuses(&agent(), enrollment()), refused(TokenCause::Expired));
    let other = Command::IssueToken { token_id: TokenId(Uuid::nil()), token_sha256: [8; 32], ttl_seconds: None };
    assert_eq!(node().invited().admin(other).refuses(&agent(), enrollment()), refused(TokenCause::Mismatch));
}

#[test]
fn a_token_that_nobody_uses_expires_with_its_time_to_live() {
    let short = Command::IssueToken { token_id: TokenId(Uuid::nil()), token_sha256: HASH, ttl_seconds: Some(5) };
    let story = node().admin(short);
    assert_eq!(story.node.timer(), Some(start() + TimeDelta::seconds(5)));
    let expired = story.at_its_timer().ticked().expect("registered");
    assert_eq!(expired.node.identity.token, None);
}

#[test]
fn an_enrollment_that_comes_to_nothing_voids_its_certificate() {
    let expired = node().enrolled().at_its_timer().ticked().expect("bootstrap_issued");
    assert_eq!(expired.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    assert_eq!(expired.effects, [Effect::CloseNode(NODE)]);
    expired.ticked().expect("registered").invited().agent(enrollment()).expect("enrolling");
}

#[test]
fn an_inventory_that_is_not_the_skus_keeps_the_node_from_becoming_active() {
    let short = node().enrolled().agent(heartbeat(HealthStatus::Ok, inventory(GPUS - 1))).expect("enrolling");
    assert_eq!(short.node.reason.code, "inventory_mismatch");
    short.heard().expect("active");
}

#[test]
fn what_the_inventory_lacks_is_said_in_a_sentence() {
    let mut node = node().active().node;
    let mut table = String::new();
    let mut look = |inventory: Option<Inventory>| {
        node.inventory = inventory;
        writeln!(table, "{}", node.mismatch().unwrap_or_else(|| "as promised".into())).unwrap();
    };
    let changed = |change: &dyn Fn(&mut Gpu)| {
        let mut inventory = inventory(GPUS);
        change(&mut inventory.gpus[1]);
        Some(inventory)
    };
    look(None);
    look(Some(inventory(GPUS)));
    look(Some(inventory(GPUS + 1)));
    look(changed(&|gpu| gpu.model = "A100".into()));
    look(changed(&|gpu| gpu.model = " h100 ".into()));
    look(changed(&|gpu| gpu.memory_mib = 75_999));
    look(changed(&|gpu| gpu.memory_mib = 76_000));
    look(changed(&|gpu| gpu.uuid = "GPU-0".into()));
    insta::assert_snapshot!(table, @r"
    No inventory was reported.
    as promised
    The SKU h100x4 has 4 GPUs, the machine reports 5.
    GPU 1 is a A100, the SKU promises H100.
    as promised
    GPU 1 has 75999 MiB of memory, the SKU promises 80000.
    as promised
    Two of the GPUs report the same UUID.
    ");
}

#[test]
fn a_certificate_counts_in_its_own_generation_and_time_and_for_its_own_node() {
    let active = node().active();
    assert_eq!(active.clone().after(TimeDelta::days(30)).refuses(&agent(), poll()), Rejection::CertificateExpired);
    assert_eq!(active.refuses(&Principal::Node(NodeId(Uuid::nil())), poll()), Rejection::ForeignNode { id: NODE });
    assert_eq!(active.refuses(&admin(), poll()), Rejection::ForeignNode { id: NODE });
    let mut cloned = active.clone();
    cloned.node.identity.generation += 1;
    assert_eq!(cloned.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    let renewed = active.agent(Command::Renew { serial: SERIAL.into(), issued: certificate("02") });
    // The agent keeps the old one until the new one is stored.
    assert_eq!(renewed.node.identity.certificates.len(), 2);
    renewed.agent(Command::Poll { serial: "02".into() }).agent(poll());
}

#[test]
fn a_removed_node_gets_nothing_from_the_moment_of_the_answer() {
    let removing = node().active().retired().removing().expect("removing");
    assert_eq!(removing.effects, [Effect::CloseNode(NODE)]);
    let removed = removing.clone().at_its_timer().ticked().expect("removed");
    for story in [removing, removed] {
        let renew = Command::Renew { serial: SERIAL.into(), issued: certificate("02") };
        for command in [poll(), heartbeat(HealthStatus::Ok, inventory(GPUS)), enrollment(), renew] {
            assert_eq!(story.refuses(&agent(), command), Rejection::Removed);
        }
    }
}

#[test]
fn a_silent_node_goes_offline_keeps_its_tenants_and_comes_back_when_heard() {
    let silent = node().active().ready().offline().expect("offline");
    assert_eq!(silent.now - start(), TimeDelta::seconds(90));
    assert_eq!(silent.node.holds.len(), 1);
    assert_eq!(silent.node.gpus_free(), 0);
    let back = silent.agent(poll()).expect("active");
    assert_eq!(back.node.timer(), Some(back.now + TimeDelta::seconds(90)));
}

#[test]
fn a_contact_is_written_only_where_the_last_one_grows_old() {
    let active = node().active();
    active.clone().after(TimeDelta::seconds(29)).agent(poll()).unmoved();
    let noted = active.after(TimeDelta::seconds(30)).agent(poll());
    assert!(noted.wrote);
    assert_eq!(noted.node.timer(), Some(noted.now + TimeDelta::seconds(90)));
}

#[test]
fn critical_health_quarantines_and_repair_brings_back_what_was() {
    let critical = || heartbeat(HealthStatus::Critical, inventory(GPUS));
    for story in [node().enrolled(), node().active(), node().active().retired()] {
        let was = story.node.state();
        let sick = story.agent(critical()).expect("quarantined");
        assert_eq!(sick.node.reason.code, "health_critical");
        let release = Command::ReleaseQuarantine { reason: "repaired".into() };
        assert!(matches!(sick.refuses(&admin(), release.clone()), Rejection::NotInOrder { .. }));
        sick.heard().expect("quarantined").admin(release).expect(was);
    }
}

#[test]
fn a_machine_that_changes_in_service_is_quarantined() {
    let drifted = node().active().ready().agent(heartbeat(HealthStatus::Ok, inventory(GPUS - 1)));
    let drifted = drifted.expect("quarantined");
    assert_eq!(drifted.node.reason.code, "inventory_drift");
    assert_eq!(drifted.node.holds.len(), 1);
}

#[test]
fn a_quarantine_of_what_was_never_enrolled_can_be_released() {
    let release = Command::ReleaseQuarantine { reason: "r".into() };
    node().quarantined().admin(release.clone()).expect("registered");
    node().invited().quarantined().admin(release).expect("bootstrap_issued");
    // And it cannot slip into service from there.
    assert!(matches!(node().quarantined().refuses(&admin(), retire(false)), Rejection::WrongState { .. }));
}

#[test]
fn a_quarantined_machine_that_is_beyond_repair_can_be_removed() {
    let used = node().active().ready().quarantined();
    assert_eq!(used.refuses(&admin(), retire(false)), Rejection::InUse { allocation_id: TENANT });
    let dead = node().active().abandoned().expect("quarantined").retired().expect("retired");
    let refused = dead.refuses(&admin(), Command::Reactivate { reason: "r".into() });
    assert!(matches!(refused, Rejection::NotInOrder { .. }), "what is left on it keeps it from coming back");
    let gone = dead.removing().at_its_timer().ticked().expect("removed");
    assert!(gone.node.holds.is_empty());
}

#[test]
fn a_node_in_use_is_not_retired_but_drained() {
    for story in [
        node().active().reserved(),
        node().active().provisioning(),
        node().active().ready(),
        node().active().releasing(),
        node().active().release_failed(),
    ] {
        assert_eq!(story.refuses(&admin(), retire(false)), Rejection::InUse { allocation_id: TENANT });
        let draining = story.admin(retire(true)).expect("draining");
        assert_eq!(draining.node.gpus_free(), 0);
    }
    let last = node().active().ready().admin(retire(true)).cleaning(1).reports(PROVED);
    last.expect("retired").says(&["node.state_changed", "node.tenant_gone"]);
}

#[test]
fn a_drain_that_ended_in_quarantine_is_a_retirement() {
    let draining = node().active().ready().admin(retire(true)).quarantined();
    let emptied = draining.cleaning(1).reports(PROVED).expect("quarantined");
    emptied.admin(Command::ReleaseQuarantine { reason: "r".into() }).expect("retired");
}

#[test]
fn a_retired_node_comes_back_only_in_order() {
    let reactivate = || Command::Reactivate { reason: "r".into() };
    let retired = node().active().retired();
    retired.clone().admin(reactivate()).expect("active");
    let silent = retired.after(TimeDelta::seconds(90));
    assert!(matches!(silent.refuses(&admin(), reactivate()), Rejection::NotInOrder { .. }));
    silent.heard().expect("retired").admin(reactivate()).expect("active");
}

#[test]
fn gpus_are_given_away_by_uuid_and_never_twice() {
    let full = node().active().told(reserve(TENANT, 3)).told(reserve(OTHER, 1));
    assert_eq!(full.node.gpus_free(), 0);
    let third = AllocationId(Uuid::from_u128(0x300));
    assert_eq!(full.refuses(&worker(), reserve(third, 1)), Rejection::NotEnoughGpus { free: 0, wanted: 1 });
    let uuids: BTreeSet<_> =
        full.node.holds.values().flat_map(|hold| &hold.placed.devices).map(|device| &device.uuid).collect();
    assert_eq!(uuids.len(), 4);
}

#[test]
fn asking_twice_for_a_reservation_gives_the_same_devices() {
    let first = node().active().reserved();
    let again = first.clone().reserved();
    assert_eq!(first.reply, again.reply);
    assert_eq!(first.node, again.node);
    again.says(&["node.devices_reserved"]);
}

#[test]
fn a_node_that_cannot_keep_tenants_apart_takes_one_at_a_time() {
    let open = Inventory { isolates_devices: false, ..inventory(GPUS) };
    let story = node().active().agent(heartbeat(HealthStatus::Ok, open)).reserved();
    assert!(matches!(story.refuses(&worker(), reserve(OTHER, 1)), Rejection::NotSchedulable { .. }));
}

#[test]
fn a_tenant_that_could_not_be_set_up_is_never_said_to_be_ready() {
    let failed = node().active().setup_failed().says(&["node.tenant_failed"]);
    let deadline_at = failed.now + TimeDelta::seconds(600);
    failed.told(Command::Provision { allocation_id: TENANT, deadline_at }).says(&["node.tenant_failed"]);
}

#[test]
fn gpus_come_back_only_with_the_proof_of_the_clean_up() {
    let releasing = node().active().releasing();
    assert_eq!(releasing.orders(), ["release"]);
    let unproven = releasing.clone().reports(Verdict::Succeeded { proof: None }).says(&["node.tenant_remains"]);
    assert_eq!(unproven.node.gpus_free(), 0);
    let proved = releasing.reports(PROVED).says(&["node.tenant_gone"]);
    assert_eq!(proved.node.gpus_free(), GPUS);
}

#[test]
fn a_node_with_an_unproven_clean_up_gets_every_task_but_provision() {
    let two = node().active().ready();
    let deadline_at = two.now + TimeDelta::seconds(600);
    let two = two.told(reserve(OTHER, 1)).told(Command::Provision { allocation_id: OTHER, deadline_at });
    assert_eq!(two.orders(), ["provision"]);
    let unproven = two.cleaning(1).reports(failed());
    assert_eq!(unproven.orders(), Vec::<&str>::new());
    assert_eq!(unproven.cleaning(2).reports(PROVED).orders(), ["provision"]);
}

#[test]
fn a_fence_keeps_tasks_away_and_lets_everything_else_pass() {
    let fenced = node().active().fenced();
    assert_eq!(fenced.refuses(&agent(), poll()), Rejection::Fenced { allocation_id: TENANT });
    let heard = fenced.heard().agent(Command::Renew { serial: SERIAL.into(), issued: certificate("02") });
    // An outstanding result still counts.
    let proved = heard.clone().reports(PROVED).says(&["node.tenant_gone"]);
    assert!(proved.node.fenced_by.is_empty());
    // So does the operator's order to try again.
    assert_eq!(heard.cleaning(2).orders(), ["release"]);
}

#[test]
fn facts_of_an_attempt_that_was_succeeded_say_nothing() {
    let second = node().active().release_failed().cleaning(2);
    second.clone().told(Command::MarkReleaseFailed { allocation_id: TENANT, attempt: 1 }).unmoved();
    second.clone().told(Command::Fence { allocation_id: TENANT, attempt: 1 }).unmoved();
    let stale = second.report(1, failed());
    assert_eq!(second.refuses(&agent(), stale), Rejection::StaleAttempt { given: 1, current: 2 });
    // A proof is a proof, whichever attempt it came from.
    let proof = second.report(1, PROVED);
    second.agent(proof).says(&["node.tenant_gone"]);
}

#[test]
fn an_order_that_was_overtaken_by_its_own_failure_does_not_open_the_node() {
    let ready = node().active().ready();
    let failed = ready.told(Command::Fence { allocation_id: TENANT, attempt: 1 });
    assert_eq!(held(&failed.node), "release_failed 1, fenced");
    let late = failed.cleaning(1).unmoved();
    assert_eq!(late.node.gpus_free(), 0);
    late.cleaning(2).reports(PROVED).says(&["node.tenant_gone"]);
}

#[test]
fn a_release_by_force_quarantines_until_the_agent_proves_the_clean_up() {
    let forced = node().active().fenced().told(Command::Abandon { allocation_id: TENANT }).expect("quarantined");
    assert_eq!(forced.orders(), ["release"]);
    let release = Command::ReleaseQuarantine { reason: "r".into() };
    assert!(matches!(forced.refuses(&admin(), release.clone()), Rejection::NotInOrder { .. }));
    let tried = forced.reports(failed());
    assert_eq!(tried.orders(), ["release"], "it stays offered");
    tried.reports(PROVED).admin(release).expect("active");
}

#[test]
fn devices_that_were_set_up_for_nobody_are_cleaned_up_without_being_asked_again() {
    for story in [node().active().provisioning(), node().active().ready(), node().active().release_failed()] {
        let unwanted = story.told(Command::Unreserve { allocation_id: TENANT }).expect("active");
        assert_eq!(unwanted.node.gpus_free(), 0);
        assert_eq!(unwanted.orders(), ["release"]);
        assert_eq!(unwanted.reports(PROVED).node.gpus_free(), GPUS);
    }
}

#[test]
fn an_unwanted_reservation_that_is_then_forced_still_quarantines() {
    let unwanted = node().active().ready().told(Command::Unreserve { allocation_id: TENANT });
    let forced = unwanted.told(Command::Abandon { allocation_id: TENANT }).expect("quarantined");
    forced.told(Command::Abandon { allocation_id: TENANT }).unmoved();
}

#[test]
fn work_is_offered_oldest_first() {
    let story = node().active().ready().after(TimeDelta::seconds(1)).cleaning(1).after(TimeDelta::seconds(1));
    let deadline_at = story.now + TimeDelta::seconds(600);
    let story = story.told(reserve(OTHER, 1)).told(Command::Provision { allocation_id: OTHER, deadline_at });
    assert_eq!(story.orders(), ["release", "provision"]);
}

#[test]
fn a_result_of_a_task_that_is_not_here_is_refused() {
    let ready = node().active().ready();
    let report = ready.report(1, failed());
    assert_eq!(ready.refuses(&agent(), report), Rejection::TaskUnknown);
    assert_eq!(ready.refuses(&worker(), ready.report(1, failed())), Rejection::ForeignNode { id: NODE });
}

#[test]
fn how_long_silence_may_last_is_policy() {
    let story = node().policy(Key::NodeOfflineAfter, 10).active();
    assert_eq!(story.node.timer(), Some(start() + TimeDelta::seconds(10)));
    let Reply::Heard { next_heartbeat_seconds } = story.heard().reply else { panic!("no answer") };
    assert_eq!(next_heartbeat_seconds, 3);
}

#[test]
fn a_login_is_short_and_its_allocations_own() {
    let name = user_name(TENANT);
    assert_eq!(name.len(), 20);
    assert_ne!(name, user_name(OTHER));
}
