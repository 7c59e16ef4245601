//! A rollout, step by step. Any order, loss and repetition of its messages is in `tests/rollout.rs`.

use super::*;
use crate::authz::Principal;
use crate::event::Event;
use crate::policy::PolicyBook;
use crate::rollout_outcome::{RolloutOutcome, SkipReason};
use crate::state_machine::{Command as _, Rejection as _};

const ROLLOUT: RolloutId = RolloutId(Uuid::from_u128(0xB));

fn start() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn node(n: usize) -> NodeId {
    NodeId(Uuid::from_u128(0x100 + n as u128))
}

fn order(canary: u32, max_unavailable: u32) -> Request {
    soaking_order(canary, max_unavailable, 0)
}

fn soaking_order(canary: u32, max_unavailable: u32, soak_seconds: u32) -> Request {
    Request::Create {
        order: Box::new(RolloutOrder {
            digest: format!("sha256:{}", "a".repeat(64)).parse().unwrap(),
            canary,
            max_unavailable,
            soak_seconds,
            includes_held: false,
            selector: NodeSelector::default(),
            reason: "a release".into(),
        }),
    }
}

fn decide_at(now: Timestamp, state: Option<&Rollout>, command: Command) -> Result<Transition<Rollout>, Rejection> {
    let (policy, by) = (PolicyBook::default(), Principal::system("an administrator"));
    let ctx = TransitionContext { id: ROLLOUT.0, version: 0, ..TransitionContext::in_test(now, &policy, &by) };
    Rollout::decide(state, command, &ctx)
}

/// A rollout and the events of its last step.
#[derive(Clone)]
struct Story {
    rollout: Rollout,
    events: Vec<Event>,
    audited: Vec<&'static str>,
    now: Timestamp,
}

impl Story {
    fn of(canary: u32, max_unavailable: u32) -> Self {
        Self::soaking(canary, max_unavailable, 0)
    }

    fn soaking(canary: u32, max_unavailable: u32, soak_seconds: u32) -> Self {
        let step = decide_at(start(), None, soaking_order(canary, max_unavailable, soak_seconds).into()).unwrap();
        Self { rollout: step.next.unwrap(), events: step.events, audited: names(&step.audit), now: start() }
    }

    #[track_caller]
    fn then(mut self, command: impl Into<Command>) -> Self {
        let step = decide_at(self.now, Some(&self.rollout), command.into()).unwrap();
        assert!(step.next.is_some() || step.events.is_empty(), "what is not written is lost");
        self.rollout = step.next.unwrap_or(self.rollout);
        (self.events, self.audited) = (step.events, names(&step.audit));
        assert!(self.rollout.has_deadline_where_transient(), "{:?}", self.rollout);
        self
    }

    fn found(self, nodes: std::ops::Range<usize>, is_last: bool) -> Self {
        let position = |n: usize| FeedPosition { created_at: start(), node_id: node(n) };
        let after = self.rollout.feed.after;
        let next = (!is_last).then(|| position(nodes.end));
        let nodes = nodes.map(|n| RolloutCandidate { node_id: node(n), skip: None }).collect();
        self.then(Fact::NodesFound { page: Box::new(NodesPage { after, nodes, next }) })
    }

    fn ended(self, n: usize, outcome: RolloutOutcome) -> Self {
        self.then(Fact::NodeEnded { node_id: node(n), outcome })
    }

    fn updated(self, n: usize) -> Self {
        self.ended(n, RolloutOutcome::Updated)
    }

    fn failed(self, n: usize) -> Self {
        self.ended(n, RolloutOutcome::Failed { reason: "rolled_back".into() })
    }

    fn soaked(self, n: usize, fault: Option<&str>) -> Self {
        self.then(Fact::NodeSoaked { node_id: node(n), fault: fault.map(str::to_owned) })
    }

    /// The time of the timer has come.
    fn woken(mut self) -> Self {
        self.now = self.rollout.timer().expect("it has a timer");
        self.then(Command::TICK)
    }

    /// The nodes that the last step asked.
    fn asked(&self) -> Vec<usize> {
        let of = |event: &Event| {
            let Event::RolloutCheckDue { node_id, .. } = event else { return None };
            (0..1000).find(|n| node(*n) == *node_id)
        };
        self.events.iter().filter_map(of).collect()
    }

    /// The nodes whose update the last step ordered.
    fn ordered(&self) -> Vec<usize> {
        let of = |event: &Event| {
            let Event::RolloutUpdateDue { node_id, .. } = event else { return None };
            (0..1000).find(|n| node(*n) == *node_id)
        };
        self.events.iter().filter_map(of).collect()
    }

    #[track_caller]
    fn expect(self, state: &str, ordered: &[usize]) -> Self {
        assert_eq!((self.rollout.state(), self.ordered()), (state, ordered.to_vec()));
        self
    }

    fn publishes(&self, subject: &str) -> bool {
        self.events.iter().any(|event| event.subject() == subject)
    }
}

fn names(audit: &[AuditRecord]) -> Vec<&'static str> {
    audit.iter().map(|record| record.action.as_str()).collect()
}

fn pause() -> Request {
    Request::Pause { reason: "wait".into() }
}

fn resume() -> Request {
    Request::Resume { reason: "go on".into() }
}

fn abort() -> Request {
    Request::Abort { reason: "enough".into() }
}

#[test]
fn canaries_succeed_before_the_others_begin_and_the_bound_holds() {
    let story = Story::of(2, 3);
    assert!(story.publishes("node.rollout_started") && story.publishes("node.rollout_nodes_due"));
    assert_eq!(story.audited, ["rollouts.create"]);
    let story = story.found(0..8, true).expect("running", &[0, 1]);
    let story = story.updated(0).expect("running", &[]).updated(1).expect("running", &[2, 3, 4]);
    let story = story.updated(3).expect("running", &[5]).updated(2).expect("running", &[6]);
    let story = story.updated(4).updated(5).updated(6).expect("running", &[]).updated(7).expect("completed", &[]);
    assert!(story.publishes("node.rollout_completed"));
    assert_eq!((story.rollout.updated, story.rollout.timer(), story.rollout.deadline()), (8, None, None));
}

#[test]
fn skipped_canary_is_replaced_and_is_named() {
    let offline = RolloutOutcome::Skipped { reason: SkipReason::Offline };
    let story = Story::of(1, 2).found(0..3, true).expect("running", &[0]).ended(0, offline).expect("running", &[1]);
    let expected = EndedNode { node_id: node(0), reason: "offline".into() };
    assert_eq!((story.rollout.skipped, &story.rollout.skips), (1, &vec![expected]));
    story.updated(1).expect("running", &[2]).updated(2).expect("completed", &[]);
}

#[test]
fn first_failure_stops_it_and_resume_goes_on_with_the_others() {
    let story = Story::of(0, 2).found(0..5, true).expect("running", &[0, 1]).failed(1).expect("stopped", &[]);
    assert!(story.publishes("node.rollout_stopped"));
    assert_eq!(story.audited, ["rollouts.stop"]);
    // It is overdue at once: only an administrator moves it on.
    assert_eq!(story.rollout.deadline().map(|deadline| deadline.at), Some(story.now));
    // What was in flight ends and starts nothing; its failure is counted and changes nothing.
    let story = story.failed(0).expect("stopped", &[]);
    assert!(!story.publishes("node.rollout_stopped"));
    let refused = decide_at(start(), Some(&story.rollout), pause().into()).unwrap_err();
    assert_eq!(refused, Rejection::WrongState { state: PhaseName::Stopped, command: CommandName::Pause });
    let story = story.then(resume()).expect("running", &[2, 3]).updated(2).updated(3).updated(4);
    let rollout = story.expect("completed", &[]).rollout;
    assert_eq!((rollout.updated, rollout.failed, rollout.failures.len()), (3, 2, 2));
}

#[test]
fn failure_of_the_last_node_waits_for_an_administrator() {
    let story = Story::of(1, 1).found(0..1, true).failed(0).expect("stopped", &[]);
    story.clone().then(resume()).expect("completed", &[]);
    story.then(abort()).expect("aborted", &[]);
}

#[test]
fn paused_one_starts_nothing_and_stops_where_an_update_in_flight_fails() {
    let story = Story::of(0, 2).found(0..5, true).then(pause()).expect("paused", &[]);
    assert_eq!(story.audited, ["rollouts.pause"]);
    let story = story.updated(0).expect("paused", &[]);
    story.clone().then(resume()).expect("running", &[2]);
    story.failed(1).expect("stopped", &[]);
}

#[test]
fn aborted_one_ends_with_the_updates_in_flight() {
    let story = Story::of(0, 2).found(0..5, true).then(abort()).expect("aborting", &[]);
    assert_eq!(story.audited, ["rollouts.abort"]);
    let refused = decide_at(start(), Some(&story.rollout), resume().into()).unwrap_err();
    assert!(refused.clone().explain().message.contains("cannot be resumed"), "{refused}");
    let story = story.failed(0).expect("aborting", &[]).updated(1).expect("aborted", &[]);
    assert!(story.publishes("node.rollout_aborted") && story.rollout.claims().is_empty());
    assert!(decide_at(start(), Some(&story.rollout), resume().into()).is_err());
}

#[test]
fn late_and_repeated_messages_change_nothing() {
    let story = Story::of(0, 1).found(0..3, true).updated(0).expect("running", &[1]);
    let repeated = story.clone().updated(0).expect("running", &[]);
    assert_eq!(repeated.rollout, story.rollout);
    // A page that was resent comes twice.
    let first = Story::of(0, 1).found(0..2, false);
    let page = NodesPage { after: None, nodes: vec![RolloutCandidate { node_id: node(0), skip: None }], next: None };
    let repeated = first.clone().then(Fact::NodesFound { page: Box::new(page) });
    assert_eq!(repeated.rollout, first.rollout);
}

#[test]
fn orders_and_pages_are_resent_until_they_are_answered() {
    let mut story = Story::of(0, 2);
    story.now = story.rollout.timer().unwrap();
    let mut story = story.then(Command::TICK);
    assert!(story.publishes("node.rollout_nodes_due"));
    story = story.found(0..2, true).expect("running", &[0, 1]);
    // Also while it is paused: the node may have the order.
    story = story.then(pause());
    story.now = story.rollout.timer().unwrap();
    let story = story.then(Command::TICK).expect("paused", &[0, 1]).then(Command::TICK).expect("paused", &[]);
    let deadline = story.rollout.deadline().unwrap();
    // Policies `node.task_timeout_seconds` and `node.update_commit_seconds`, and two minutes.
    assert_eq!(deadline.at - start(), TimeDelta::seconds(600 + 120 + 120) + crate::resend_timer::FIRST);
}

#[test]
fn one_rollout_at_a_time_has_not_ended() {
    let first = Story::of(1, 1);
    assert_eq!(first.rollout.claims().len(), 1);
    let holders = [(CLAIM.to_owned(), ROLLOUT.0)].into();
    let (policy, by) = (PolicyBook::default(), Principal::system("an administrator"));
    let ctx =
        TransitionContext { id: Uuid::from_u128(0xC), version: 0, ..TransitionContext::in_test(start(), &policy, &by) };
    let refused = Rollout::decide_without(None, order(1, 1).into(), &holders, &ctx).err().unwrap();
    assert_eq!(refused, Rejection::OtherUnfinished { rollout_id: ROLLOUT });
    assert!(refused.explain().message.contains("abort it"));
}

#[test]
fn snapshot_is_bounded_with_ten_thousand_nodes() {
    let selector = NodeSelector {
        sku_id: Some(SkuId(ROLLOUT.0)),
        region_code: Some("r".repeat(64)),
        node_ids: Some((0..MAX_NODE_IDS).map(node).collect()),
    };
    let Request::Create { mut order } = order(0, MAX_UNAVAILABLE) else { unreachable!() };
    (order.selector, order.reason) = (selector, "ä".repeat(500));
    let step = decide_at(start(), None, Request::Create { order }.into()).unwrap();
    let mut story = Story { rollout: step.next.unwrap(), events: step.events, audited: Vec::new(), now: start() };
    let (mut most, mut next_end) = (0, 0);
    for n in 0..100 {
        while story.rollout.feed.due.is_some() && !story.rollout.feed.is_exhausted {
            let from = story.rollout.feed.after.map_or(0, |after| (after.node_id.0.as_u128() - 0x100) as usize);
            let (to, is_last) = (from + PAGE, from + PAGE >= 10_000);
            story = story.found(from..to, is_last);
        }
        most = most.max(serde_json::to_string(&story.rollout).unwrap().len());
        // Failures stop it, and it is resumed, so that as many as possible are named.
        for _ in 0..100 {
            story = if n % 2 == 0 {
                story.failed(next_end).then(resume())
            } else {
                story.ended(next_end, RolloutOutcome::Skipped { reason: SkipReason::UpdateInProgress })
            };
            next_end += 1;
        }
    }
    let rollout = story.expect("completed", &[]).rollout;
    assert_eq!((rollout.failed, rollout.skipped), (5_000, 5_000));
    assert_eq!((rollout.failures.len(), rollout.skips.len()), (MAX_NAMED, MAX_NAMED));
    assert!(most < Rollout::SNAPSHOT_MOST * 3 / 4, "{most}");
}

#[test]
fn nothing_begins_in_the_soak_after_the_canaries_and_after_each_wave() {
    let story = Story::soaking(1, 2, 600).found(0..6, true).expect("running", &[0]).updated(0).expect("running", &[]);
    assert_eq!(story.rollout.soaks_until(), Some(start() + TimeDelta::seconds(600)));
    assert!(story.rollout.is_in_canary());
    let story = story.woken();
    assert_eq!((story.now - start(), story.asked()), (TimeDelta::seconds(600), vec![0]));
    let story = story.soaked(0, None).expect("running", &[1, 2]);
    // A wave, and no window: the place of a node that has ended is taken by none.
    let story = story.updated(1).expect("running", &[]).updated(2).expect("running", &[]).woken();
    assert_eq!(story.asked(), [1, 2]);
    let story = story.soaked(2, None).expect("running", &[]).soaked(1, None).expect("running", &[3, 4]);
    let story = story.updated(3).updated(4).woken().soaked(3, None).soaked(4, None).expect("running", &[5]);
    // The last wave is watched as well.
    let story = story.updated(5).expect("running", &[]).woken().soaked(5, None).expect("completed", &[]);
    assert_eq!((story.rollout.updated, story.rollout.timer(), story.rollout.deadline()), (6, None, None));
}

#[test]
fn fault_in_the_soak_stops_it_with_the_node_named() {
    let soaking = Story::soaking(1, 2, 600).found(0..4, true).updated(0);
    let stopped = soaking.clone().soaked(0, Some("privilege/setuid")).expect("stopped", &[]);
    assert!(stopped.publishes("node.rollout_stopped"));
    assert_eq!(stopped.audited, ["rollouts.stop"]);
    let expected = Phase::Stopped { node_id: node(0), reason: "privilege/setuid".into() };
    assert_eq!((&stopped.rollout.phase, stopped.rollout.timer()), (&expected, None));
    assert_eq!((stopped.rollout.updated, stopped.rollout.failed), (0, 1));
    // No node is asked, and the canary is missing: another node is the canary after the resume.
    let story = stopped.then(resume()).expect("running", &[1]).updated(1).expect("running", &[]);
    story.woken().soaked(1, None).expect("running", &[2, 3]);
    // The fault shows only in the answer.
    soaking.woken().soaked(0, Some("offline")).expect("stopped", &[]);
}

#[test]
fn fault_of_one_node_of_a_wave_leaves_the_soak_of_the_others_as_it_is() {
    let story = Story::soaking(0, 3, 600).found(0..9, true).updated(0).updated(1);
    // Before the wave is complete.
    let story = story.soaked(1, Some("offline")).expect("stopped", &[]).updated(2).expect("stopped", &[]);
    let story = story.then(resume()).expect("running", &[3]).updated(3).woken();
    assert_eq!(story.asked(), [0, 2, 3]);
    let story = story.soaked(0, None).soaked(2, Some("xid/79")).expect("stopped", &[]).soaked(3, None);
    assert_eq!((story.rollout.updated, story.rollout.failed), (2, 2));
    story.expect("stopped", &[]).then(resume()).expect("running", &[4, 5, 6]);
}

#[test]
fn fault_that_arrives_before_the_result_of_the_update_is_counted_once() {
    let story = Story::soaking(1, 1, 600).found(0..2, true).soaked(0, Some("offline")).expect("stopped", &[]);
    assert_eq!((story.rollout.updated, story.rollout.failed, story.rollout.in_flight.len()), (0, 1, 0));
    let late = story.clone().updated(0).soaked(0, Some("offline")).soaked(0, None);
    assert_eq!(late.rollout, story.rollout);
}

#[test]
fn answers_that_were_not_asked_for_end_no_soak() {
    let soaking = Story::soaking(1, 1, 600).found(0..2, true).updated(0);
    let early = soaking.clone().soaked(0, None).soaked(1, None).soaked(1, Some("offline"));
    assert_eq!(early.rollout, soaking.rollout);
    // A node of a wave that has ended is watched no longer.
    let next = soaking.woken().soaked(0, None).expect("running", &[1]);
    assert_eq!(next.clone().soaked(0, Some("offline")).rollout, next.rollout);
}

#[test]
fn question_is_resent_until_it_is_answered_and_is_overdue_then() {
    let story = Story::soaking(1, 1, 600).found(0..2, true).updated(0).woken().woken();
    assert_eq!(story.asked(), [0]);
    let deadline = story.rollout.deadline().unwrap();
    assert!(deadline.reason.contains("has not answered"), "{deadline:?}");
    assert_eq!(deadline.at - start(), TimeDelta::seconds(600) + TimeDelta::minutes(10));
}

#[test]
fn soak_goes_on_while_it_is_paused_and_asks_after_the_resume() {
    let story = Story::soaking(1, 1, 600).found(0..2, true).updated(0).then(pause());
    assert_eq!(story.rollout.timer(), None);
    let mut story = story.expect("paused", &[]);
    story.now += TimeDelta::seconds(900);
    let story = story.then(Command::TICK).then(resume()).expect("running", &[]);
    assert!(story.rollout.timer().is_some_and(|at| at <= story.now), "it is due at once");
    let asked = story.then(Command::TICK);
    assert_eq!(asked.asked(), [0]);
    asked.then(pause()).soaked(0, None).expect("paused", &[]).then(resume()).expect("running", &[1]);
    // A fault stops a paused one, and an aborted one ends without the soak.
    let paused = Story::soaking(1, 1, 600).found(0..2, true).updated(0).then(pause());
    paused.clone().soaked(0, Some("offline")).expect("stopped", &[]).then(abort()).expect("aborted", &[]);
    let aborted = paused.then(abort()).expect("aborted", &[]);
    assert_eq!((aborted.rollout.timer(), aborted.rollout.deadline()), (None, None));
}

#[test]
fn soak_is_the_same_after_its_snapshot_was_read_again() {
    let restored = |story: Story| {
        let body = serde_json::to_string(&story.rollout).unwrap();
        Story { rollout: serde_json::from_str(&body).unwrap(), ..story }
    };
    let watching = restored(Story::soaking(1, 1, 600).found(0..2, true).updated(0));
    assert_eq!(watching.rollout.timer(), Some(start() + TimeDelta::seconds(600)));
    let asking = restored(watching.woken());
    asking.soaked(0, None).expect("running", &[1]);
    // A rollout of an earlier release has none.
    let mut body = serde_json::to_value(Story::of(1, 2).found(0..3, true).rollout).unwrap();
    body["order"].as_object_mut().unwrap().remove("soak_seconds").unwrap();
    let rollout = serde_json::from_value(body).unwrap();
    Story { rollout, ..Story::of(1, 2) }.updated(0).expect("running", &[1, 2]);
}

#[test]
fn snapshot_is_bounded_while_the_largest_wave_is_asked() {
    let Request::Create { mut order } = soaking_order(0, MAX_UNAVAILABLE, 1) else { unreachable!() };
    order.selector.node_ids = Some((0..MAX_NODE_IDS).map(node).collect());
    order.reason = "ä".repeat(500);
    let step = decide_at(start(), None, Request::Create { order }.into()).unwrap();
    let mut story = Story { rollout: step.next.unwrap(), events: step.events, audited: Vec::new(), now: start() };
    for n in 0..4 {
        story = story.found(n * PAGE..(n + 1) * PAGE, n == 3);
    }
    for n in 0..200 {
        story = story.updated(n);
    }
    let story = story.woken();
    assert_eq!(story.asked().len(), 200);
    let most = serde_json::to_string(&story.rollout).unwrap().len();
    assert!(most < Rollout::SNAPSHOT_MOST * 3 / 4, "{most}");
}
