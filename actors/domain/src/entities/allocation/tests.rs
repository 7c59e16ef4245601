//! The allocation's saga as a table, and tests of what the table does not show.

mod release;
mod ssh_keys;

use super::*;
use crate::authz::{CallerIdentity, Principal, TokenRole};
use crate::event::Event;
use crate::hardware::GpuDevice;
use crate::metadata::MetadataPatch;
use crate::metadata::{MAX_LABELS, PatchValue};
use crate::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue};
use crate::state_machine::Command as _;
use chrono::TimeDelta;
use std::fmt::Write as _;
use uuid::Uuid;

const NODE: NodeId = NodeId(Uuid::from_u128(0xA));
const ELSEWHERE: NodeId = NodeId(Uuid::from_u128(0xB));
const ANN: &str = "ann";

fn start() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn person(user_id: &str, role: TokenRole) -> Principal {
    Principal::Caller(CallerIdentity::new(user_id, [role]))
}

fn ann() -> Principal {
    person(ANN, TokenRole::User)
}

fn admin() -> Principal {
    person("root", TokenRole::Admin)
}

fn worker() -> Principal {
    Principal::system("provisioning")
}

const KEY: u128 = 0xC;

fn key(n: u128) -> AuthorizedKey {
    AuthorizedKey {
        id: SshKeyId(Uuid::from_u128(n)),
        public_key: format!("ssh-ed25519 {n}"),
        fingerprint: format!("SHA256:{n}"),
    }
}

/// A key of RSA with 16,384 bits, the longest that is registered.
fn long_key(n: u128) -> AuthorizedKey {
    AuthorizedKey { public_key: format!("ssh-rsa {n:02764}"), fingerprint: format!("SHA256:{n:043}"), ..key(n) }
}

fn choose(keys: &[u128]) -> Request {
    let keys: Vec<_> = keys.iter().map(|n| key(*n)).collect();
    Request::ChooseLogins { chosen: Some(keys.iter().map(|key| key.id).collect()), keys, logins_revision: 0 }
}

/// The keys that the default resolves to.
fn adopt(keys: &[u128], logins_revision: u64) -> Fact {
    Fact::LoginsResolved { chosen: None, keys: keys.iter().map(|n| key(*n)).collect(), logins_revision }
}

fn placed() -> Placement {
    Placement {
        devices: vec![GpuDevice { index: 0, uuid: "GPU-0".into() }],
        host: "node-a".into(),
        port: 22,
        user_name: "gpu-1".into(),
        region_code: "eu".into(),
        host_fingerprint: None,
    }
}

fn request() -> AllocationRequest {
    AllocationRequest {
        owner: ResourceOwner { user_id: ANN.into(), org_id: None, project_id: None, plan: None },
        sku_id: SkuId(Uuid::from_u128(1)),
        sku: "h100".into(),
        region_code: None,
        node_id: None,
        gpu_count: 1,
        ssh_keys: Vec::new(),
        follows_default: true,
        logins_revision: 0,
        isolation_model: "user-revoke".into(),
        price: Price::new("EUR", 250).unwrap(),
        queue_seconds: None,
        scheduler_request_enc: Some("sealed".into()),
        metadata: Metadata::default(),
    }
}

fn queued() -> AllocationRequest {
    AllocationRequest { queue_seconds: Some(60), ..request() }
}

/// An allocation at an instant, under a policy, with its last transition.
#[derive(Clone)]
struct Story {
    allocation: Allocation,
    now: Timestamp,
    policy: PolicyBook,
    published: Vec<Event>,
    why: String,
    wrote: bool,
}

fn ctx<'a>(now: Timestamp, policy: &'a PolicyBook, by: &'a Principal) -> TransitionContext<'a> {
    TransitionContext { seed: 7, id: Uuid::from_u128(0x1), ..TransitionContext::in_test(now, policy, by) }
}

fn asked_for(request: AllocationRequest) -> Story {
    let policy = PolicyBook::default();
    let step =
        Allocation::decide(None, Request::Create(Box::new(request)).into(), &ctx(start(), &policy, &ann())).unwrap();
    Story { allocation: step.next.unwrap(), now: start(), policy, published: step.events, why: step.why, wrote: true }
}

fn allocation() -> Story {
    asked_for(request())
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

    fn at_its_deadline(mut self) -> Self {
        self.now = self.allocation.deadline().unwrap().at;
        self
    }

    fn at_its_timer(mut self) -> Self {
        self.now = self.allocation.timer().unwrap();
        self
    }

    fn ask(&self, by: &Principal, command: impl Into<Command>) -> Result<Transition<Allocation>, Rejection> {
        Allocation::decide(Some(&self.allocation), command.into(), &ctx(self.now, &self.policy, by))
    }

    fn by(mut self, by: &Principal, command: impl Into<Command>) -> Self {
        let step = self.ask(by, command).unwrap();
        self.wrote = step.next.is_some();
        assert!(self.wrote || (step.events.is_empty() && step.audit.is_empty()), "what is not written is lost");
        self.allocation = step.next.unwrap_or(self.allocation);
        self.published = step.events;
        self.why = step.why;
        self
    }

    fn after_fact(self, command: impl Into<Command>) -> Self {
        self.by(&worker(), command)
    }

    fn ticked(self) -> Self {
        self.after_fact(Command::TICK)
    }

    fn reserved(self) -> Self {
        self.after_fact(Fact::Reserved { node_id: NODE, placed: placed() })
    }

    fn provisioned(self) -> Self {
        self.after_fact(Fact::Provisioned { node_id: NODE })
    }

    fn active(self) -> Self {
        self.reserved().provisioned()
    }

    fn released_by_ann(self) -> Self {
        self.by(&ann(), Request::Release { issue: None })
    }

    fn clean_up_failed(self) -> Self {
        let attempt = self.allocation.attempt();
        self.after_fact(Fact::CleanupFailed { node_id: NODE, attempt, reason: "remains".into(), detail: String::new() })
    }

    fn cleaned(self) -> Self {
        let attempt = self.allocation.attempt();
        self.after_fact(Fact::Cleaned { node_id: NODE, attempt })
    }

    fn exhausted(self) -> Self {
        self.policy(PolicyKey::AllocationReleaseMaxAttempts, 1).clean_up_failed()
    }

    #[track_caller]
    fn expect(self, state: &str) -> Self {
        assert_eq!(self.allocation.state(), state, "{}", self.why);
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
        assert!(!self.wrote, "something was written: {}", self.why);
        self
    }

    fn failure_code(&self) -> Option<&str> {
        self.allocation.failure.as_ref().map(|failure| failure.code.as_str())
    }
}

/// Every state that behaves differently, under a name for the table.
fn states() -> Vec<(&'static str, Story)> {
    vec![
        ("requested", allocation()),
        ("requested, queued", asked_for(queued())),
        ("provisioning", allocation().reserved()),
        ("active", allocation().active()),
        ("releasing", allocation().active().released_by_ann()),
        ("release_failed, will retry", allocation().active().released_by_ann().clean_up_failed()),
        ("release_failed, for an operator", allocation().active().released_by_ann().exhausted()),
        ("released", allocation().active().released_by_ann().cleaned()),
        ("released, never placed", allocation().released_by_ann()),
    ]
}

fn labelled(count: usize) -> MetadataPatch {
    let labels = (0..count).map(|n| (format!("key-{n}"), Some(String::new()))).collect();
    MetadataPatch { name: PatchValue::Keep, labels: PatchValue::Set(labels) }
}

fn commands(attempt: u32) -> Vec<(&'static str, Principal, Command)> {
    let failed = |node_id| Fact::ProvisionFailed { node_id, reason: "r".into() };
    let remains = |attempt| Fact::CleanupFailed { node_id: NODE, attempt, reason: "r".into(), detail: String::new() };
    let release = || Request::Release { issue: None };
    let label = |count, if_version| Request::Revise { metadata: labelled(count), if_version };
    vec![
        ("request", ann(), Request::Create(Box::new(request())).into()),
        ("release by its user", ann(), release().into()),
        ("release by a stranger", person("bob", TokenRole::User), release().into()),
        ("release by an admin", admin(), release().into()),
        ("revise by its user", ann(), label(1, None).into()),
        ("revise by a stranger", person("bob", TokenRole::User), label(1, None).into()),
        ("revise by an admin", admin(), label(1, None).into()),
        ("revise another version", ann(), label(1, Some(2)).into()),
        ("revise, too many labels", ann(), label(MAX_LABELS + 1, None).into()),
        ("revise, nothing", ann(), label(0, None).into()),
        ("retry_release", admin(), Request::RetryRelease { reason: "r".into() }.into()),
        ("force_release", admin(), Request::ForceRelease { reason: "r".into() }.into()),
        ("reserved", worker(), Fact::Reserved { node_id: NODE, placed: placed() }.into()),
        ("reserved elsewhere", worker(), Fact::Reserved { node_id: ELSEWHERE, placed: placed() }.into()),
        ("no_capacity", worker(), Fact::NoCapacity { suggestion: None }.into()),
        ("over_quota", worker(), Fact::OverQuota { limit: 1 }.into()),
        ("provisioned", worker(), Fact::Provisioned { node_id: NODE }.into()),
        ("provisioned elsewhere", worker(), Fact::Provisioned { node_id: ELSEWHERE }.into()),
        ("provision_failed", worker(), failed(NODE).into()),
        ("provision_failed elsewhere", worker(), failed(ELSEWHERE).into()),
        ("cleaned", worker(), Fact::Cleaned { node_id: NODE, attempt }.into()),
        ("cleaned elsewhere", worker(), Fact::Cleaned { node_id: ELSEWHERE, attempt }.into()),
        ("cleanup_failed", worker(), remains(attempt).into()),
        ("cleanup_failed, older attempt", worker(), remains(attempt.wrapping_sub(1)).into()),
        ("unaffordable", worker(), Fact::Unaffordable { message: "m".into() }.into()),
        ("uncover", worker(), Fact::Uncovered.into()),
        ("faulted", worker(), Fact::Faulted { node_id: NODE, at: start(), reason: "r".into() }.into()),
        ("faulted elsewhere", worker(), Fact::Faulted { node_id: ELSEWHERE, at: start(), reason: "r".into() }.into()),
        ("still_metered, and running", worker(), Fact::StillMetered { is_running: true }.into()),
        ("still_metered, and held", worker(), Fact::StillMetered { is_running: false }.into()),
        ("still_counted", worker(), Fact::StillCounted { logins_revision: 0 }.into()),
        ("still_counted, with other keys", worker(), Fact::StillCounted { logins_revision: 1 }.into()),
        ("choose_logins by its user", ann(), choose(&[KEY]).into()),
        ("choose_logins by a stranger", person("bob", TokenRole::User), choose(&[KEY]).into()),
        ("adopt_logins", worker(), adopt(&[KEY], 1).into()),
        ("logins_written, never changed", worker(), Fact::LoginsWritten { node_id: NODE, revision: 1 }.into()),
        ("reseal", worker(), Maintenance::Reseal { scheduler_request_enc: "resealed".into() }.into()),
        ("tick before its time", worker(), Command::TICK),
    ]
}

fn outcome(from: &Story, step: Result<Transition<Allocation>, Rejection>) -> String {
    let step = match step {
        Err(rejection) => return format!("refused: {rejection}"),
        Ok(step) => step,
    };
    let Some(next) = step.next else { return "stays".to_owned() };
    assert_eq!(next.violations(&[]), [], "{next:?}");
    let stored = serde_json::to_string(&next).unwrap();
    assert_eq!(serde_json::from_str::<Allocation>(&stored).unwrap(), next);
    let to = if next == from.allocation { "stays, and publishes".to_owned() } else { format!("-> {}", next.state()) };
    let published: Vec<_> = step.events.iter().map(Event::subject).collect();
    let audited: Vec<_> = step.audit.iter().map(|audit| audit.action).collect();
    let mut line = to;
    if !published.is_empty() {
        write!(line, " | {}", published.join(", ")).unwrap();
    }
    if !audited.is_empty() {
        write!(line, " | audit {}", audited.iter().map(|action| action.as_str()).collect::<Vec<_>>().join(", "))
            .unwrap();
    }
    line
}

#[test]
fn later_read_of_the_users_keys_wins_in_any_order() {
    let second = allocation().active().after_fact(adopt(&[2], 2)).publishes(&["provisioning.logins_changed"]);
    let late = second.after_fact(adopt(&[1], 1)).unmoved();
    assert_eq!(late.allocation.ssh_access().keys, [key(2)]);
    // The same holds for a choice that was made from an earlier read.
    let chosen = Request::ChooseLogins { chosen: None, keys: vec![key(1)], logins_revision: 1 };
    assert_eq!(late.ask(&ann(), chosen).unwrap_err(), Rejection::KeysMoved);
}

#[test]
fn allocation_is_found_by_its_node_from_its_placement_on_and_after_its_end() {
    let term = node_term(NODE);
    let requested = allocation();
    assert!(!requested.allocation.terms().contains(&term));
    let reserved = allocation().reserved();
    assert!(reserved.allocation.terms().contains(&term));
    let released = reserved.after_fact(Fact::Faulted { node_id: NODE, at: start(), reason: "health_critical".into() });
    let released = released.provisioned().cleaned().expect("released");
    assert!(released.allocation.terms().contains(&term));
}

#[test]
fn fault_before_activation_ends_the_allocation_unbilled_in_any_order() {
    let faulted = || Fact::Faulted { node_id: NODE, at: start(), reason: "health_critical".into() };
    let first = allocation().reserved().after_fact(faulted()).expect("releasing");
    assert_eq!(first.failure_code(), Some("health_critical"));
    let first = first.provisioned().expect("releasing").unmoved().cleaned().expect("released");
    assert_eq!((first.allocation.active_at, first.allocation.billed_to()), (None, None));
    // In the opposite order it is not billed either.
    let then = allocation().active().after_fact(faulted()).expect("active");
    assert_eq!(then.allocation.billed_to(), then.allocation.active_at);
}

/// A heartbeat is later than the fault that it reports.
#[test]
fn fault_and_release_in_one_second_end_the_meter_at_the_earlier_one() {
    let active = allocation().active().after(TimeDelta::seconds(60));
    let fault = |millis| Fact::Faulted {
        node_id: NODE,
        at: active.now - TimeDelta::milliseconds(millis),
        reason: "gpu_fault".into(),
    };
    let released_at = active.now;
    let faulted = active.clone().after_fact(fault(300)).released_by_ann();
    assert_eq!(faulted.allocation.billed_to(), Some(released_at - TimeDelta::milliseconds(300)));
    // The release was first: it ended the meter, and the account has the end.
    let released = active.clone().released_by_ann().after_fact(fault(300)).unmoved();
    assert_eq!(released.allocation.billed_to(), Some(released_at));
    // Another fault moves nothing.
    let twice = active.clone().after_fact(fault(300)).after_fact(fault(900)).unmoved();
    assert_eq!(twice.allocation.billed_to(), Some(released_at - TimeDelta::milliseconds(300)));
}

#[test]
fn every_command_in_every_state_does_what_was_reviewed() {
    let mut table = String::new();
    for (name, story) in states() {
        writeln!(table, "{name}").unwrap();
        for (case, by, command) in commands(story.allocation.attempt()) {
            writeln!(table, "    {case}: {}", outcome(&story, story.ask(&by, command))).unwrap();
        }
        if story.allocation.timer().is_some() {
            let due = story.clone().at_its_timer();
            let ticked = due.ask(&worker(), Command::TICK);
            writeln!(table, "    tick in time: {}", outcome(&due, ticked)).unwrap();
        }
        if story.allocation.deadline().is_some() {
            let late = story.at_its_deadline();
            let ticked = late.ask(&worker(), Command::TICK);
            writeln!(table, "    tick at the deadline: {}", outcome(&late, ticked)).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

#[test]
fn every_state_that_must_end_says_until_when_and_why() {
    let mut table = String::new();
    for (name, story) in states() {
        let seconds = |at: Timestamp| (at - story.now).num_seconds();
        let deadline = story.allocation.deadline();
        let wakes = story.allocation.timer().map_or("never".to_owned(), |at| format!("in {} s", seconds(at)));
        let ends = deadline.map_or("no end".to_owned(), |it| format!("ends in {} s: {}", seconds(it.at), it.reason));
        writeln!(table, "{name}: wakes {wakes}; {ends}").unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn nonexistent_allocation_can_only_be_requested() {
    let policy = PolicyBook::default();
    for (case, by, command) in commands(1).into_iter().skip(1) {
        let answer = Allocation::decide(None, command, &ctx(start(), &policy, &by));
        assert_eq!(answer.err(), Some(Rejection::NotFound), "{case}");
    }
}

#[test]
fn allocation_is_provisioned_and_released() {
    allocation()
        .expect("requested")
        .publishes(&["provisioning.requested"])
        .reserved()
        .expect("provisioning")
        .publishes(&["provisioning.started"])
        .provisioned()
        .expect("active")
        .publishes(&["provisioning.active", "billing.usage_changed"])
        .released_by_ann()
        .expect("releasing")
        .publishes(&["provisioning.release_requested", "terminal.unwanted", "billing.usage_changed"])
        .cleaned()
        .expect("released")
        .publishes(&["provisioning.released"]);
}

#[test]
fn other_users_get_not_found() {
    let bob = person("bob", TokenRole::User);
    for (_, story) in states() {
        assert_eq!(story.ask(&bob, Request::Release { issue: None }).err(), Some(Rejection::NotFound));
    }
}

#[test]
fn gpu_count_or_queue_time_beyond_the_bounds_is_rejected() {
    let policy = PolicyBook::default();
    let refused = |request| {
        Allocation::decide(None, Request::Create(Box::new(request)).into(), &ctx(start(), &policy, &ann())).err()
    };
    for gpu_count in [0, MAX_GPUS + 1, u32::MAX] {
        assert_eq!(refused(AllocationRequest { gpu_count, ..request() }), Some(Rejection::GpuCount { max: MAX_GPUS }));
    }
    let endless = AllocationRequest { queue_seconds: Some(u32::MAX), ..request() };
    assert_eq!(refused(endless), Some(Rejection::QueueSeconds { max: 86_400 }));
    assert_eq!(refused(AllocationRequest { gpu_count: MAX_GPUS, queue_seconds: Some(86_400), ..request() }), None);
}

#[test]
fn evacuated_allocation_is_released_by_the_normal_path_and_only_for_its_own_node() {
    let evacuate = |node_id| Fact::EvacuationDue { node_id, reason: "gpu_maintenance".into() };
    allocation().active().after_fact(evacuate(ELSEWHERE)).unmoved().expect("active");
    allocation().reserved().after_fact(evacuate(NODE)).unmoved().expect("provisioning");
    let step = allocation().active().ask(&worker(), evacuate(NODE)).unwrap();
    assert_eq!(step.audit.iter().map(|it| it.action.as_str()).collect::<Vec<_>>(), ["allocations.evacuate"]);
    let story = allocation().active().after_fact(evacuate(NODE)).expect("releasing").publishes(&[
        "provisioning.release_requested",
        "terminal.unwanted",
        "billing.usage_changed",
    ]);
    assert_eq!(story.allocation.history.last().unwrap().reason, StatusReason::Evacuated);
    let repeated = story.after_fact(evacuate(NODE)).unmoved();
    repeated.cleaned().expect("released").after_fact(evacuate(NODE)).unmoved();
}

#[test]
fn failed_provisioning_is_cleaned_up_and_ends_with_its_failure() {
    let story = allocation()
        .reserved()
        .after_fact(Fact::ProvisionFailed { node_id: NODE, reason: "disk_full".into() })
        .expect("releasing")
        .publishes(&["provisioning.release_requested", "provisioning.failed", "billing.usage_changed"])
        .cleaned()
        .expect("released");
    let failure = story.allocation.failure.clone().unwrap();
    assert_eq!((failure.phase, failure.code.as_str(), failure.retryable), (PhaseName::Provisioning, "disk_full", true));
    assert_eq!(story.allocation.active_at, None);
}

#[test]
fn provisioning_timeout_is_a_failure() {
    let late = allocation().reserved().at_its_deadline().ticked().expect("releasing");
    assert_eq!(late.failure_code(), Some("provisioning_timeout"));
    assert_eq!(late.now - start(), TimeDelta::seconds(600));
}

#[test]
fn tenant_ready_after_the_deadline_is_not_activated() {
    allocation().reserved().at_its_deadline().ticked().provisioned().expect("releasing").unmoved();
}

#[test]
fn request_without_capacity_fails_at_once_with_a_suggestion() {
    let story = allocation().after_fact(Fact::NoCapacity { suggestion: Some("Region b has room.".into()) });
    let published = ["provisioning.released", "provisioning.failed", "billing.usage_changed"];
    let story = story.expect("released").publishes(&published);
    let failure = story.allocation.failure.unwrap();
    assert_eq!((failure.code.as_str(), failure.message.as_str()), ("insufficient_capacity", "Region b has room."));
}

#[test]
fn first_answer_to_the_user_is_stored_with_its_version_and_no_later_reply() {
    let no_capacity = || Fact::NoCapacity { suggestion: None };
    for (asked, fact) in [
        (request(), Fact::Reserved { node_id: NODE, placed: placed() }),
        (request(), no_capacity()),
        (queued(), no_capacity()),
    ] {
        let story = asked_for(asked);
        assert!(story.allocation.is_unanswered() && story.allocation.answered_in.is_none());
        let resent = story.clone().at_its_timer().ask(&worker(), Maintenance::Tick).unwrap();
        assert!(!resent.stores_reply && resent.next.unwrap().answered_in.is_none());
        let step = story.ask(&worker(), fact).unwrap();
        let next = step.next.unwrap();
        assert_eq!((step.stores_reply, next.answered_in), (true, Some(2)), "decided from version 1");
        assert_eq!(*step.reply, next);
    }
    let later = allocation().reserved().ask(&worker(), Fact::Provisioned { node_id: NODE }).unwrap();
    assert_eq!((later.stores_reply, later.next.unwrap().answered_in), (false, Some(2)));
}

#[test]
fn queued_request_retries_until_its_queue_time_ends() {
    let mut story = asked_for(queued());
    let mut looks = 0;
    while story.allocation.state() == "requested" {
        story = story.after_fact(Fact::NoCapacity { suggestion: None });
        if story.allocation.state() == "requested" {
            story = story.at_its_timer().ticked();
            looks += 1;
        }
    }
    assert_eq!(story.now - start(), TimeDelta::seconds(60));
    assert_eq!(looks, 30);
    assert_eq!(story.failure_code(), Some("insufficient_capacity"));
}

#[test]
fn exhausted_quota_fails_even_a_queued_request() {
    let story = asked_for(queued()).after_fact(Fact::OverQuota { limit: 3 }).expect("released");
    assert_eq!(story.failure_code(), Some("concurrency_limit_exceeded"));
}

#[test]
fn second_reservation_is_rejected() {
    let second = allocation().reserved().after_fact(Fact::Reserved { node_id: ELSEWHERE, placed: placed() });
    let second = second.expect("provisioning").publishes(&["provisioning.reservation_unwanted"]);
    assert_eq!(
        second.published[0],
        Event::ReservationUnwanted { allocation_id: second.allocation.id, node_id: ELSEWHERE }
    );
}

#[test]
fn late_placement_frees_the_devices_and_the_quota() {
    let over = allocation().released_by_ann().expect("released");
    over.clone()
        .reserved()
        .expect("released")
        .publishes(&["provisioning.reservation_unwanted", "provisioning.released"]);
    over.after_fact(Fact::NoCapacity { suggestion: None }).expect("released").publishes(&["provisioning.released"]);
}

#[test]
fn history_records_every_transition_and_is_bounded() {
    let mut story = allocation().active().released_by_ann().policy(PolicyKey::AllocationReleaseMaxAttempts, 1000);
    for _ in 0..100 {
        story = story.clean_up_failed().at_its_timer().ticked();
    }
    let history = story.cleaned().allocation.history;
    assert!(history.len() <= 32);
    assert_eq!(history.first().map(|entry| entry.state), Some(PhaseName::Requested));
    assert_eq!(history.last().map(|entry| entry.state), Some(PhaseName::Released));
}

#[test]
fn provisioning_timeout_follows_the_scoped_policy() {
    let short = allocation().policy(PolicyKey::AllocationProvisioningTimeout, 5).reserved();
    assert_eq!(short.allocation.timer(), Some(short.now + TimeDelta::seconds(5)));
}

#[test]
fn failure_of_an_earlier_release_whose_code_nothing_makes_is_read_and_written_as_it_was() {
    let mut stored =
        serde_json::to_value(&allocation().by(&worker(), Fact::NoCapacity { suggestion: None }).allocation).unwrap();
    stored["failure"]["code"] = "isolation_model_unavailable".into();
    let read: Allocation = serde_json::from_value(stored.clone()).unwrap();
    assert_eq!(read.failure.as_ref().unwrap().code, FailureCode::Reported("isolation_model_unavailable".into()));
    assert_eq!(serde_json::to_value(&read).unwrap(), stored);
}
