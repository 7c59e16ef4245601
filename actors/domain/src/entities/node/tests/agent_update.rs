//! The update of a node's agent.

use super::*;
use crate::choreography::Reaction;
use crate::id::RolloutId;
use crate::rollout;
use crate::rollout_outcome::{RolloutOutcome, SkipReason};

const DONE: TaskOutcome = TaskOutcome::Succeeded { proof: None };

fn digest(digit: char) -> PackageDigest {
    format!("sha256:{}", digit.to_string().repeat(64)).parse().unwrap()
}

fn update(digit: char) -> Request {
    Request::UpdateAgent { digest: digest(digit), force: false, reason: "a new release".into() }
}

fn ordered(story: Story, digit: char) -> (Story, TaskId) {
    let types = ["agent.update".to_owned(), "node.validate".to_owned()].into();
    let Request::Heartbeat { serial, mut seen, inventory, health } = heartbeat(NodeHealthStatus::Ok, inventory(GPUS))
    else {
        unreachable!("a heartbeat is one")
    };
    seen.task_types = Some(types);
    let story = story.agent(Request::Heartbeat { serial, seen, inventory, health }).admin(update(digit));
    let Reply::Task { task_id, .. } = story.reply.clone() else { panic!("{:?}", story.reply) };
    (story, task_id)
}

fn report(task_id: TaskId, attempt: u32, verdict: TaskOutcome) -> Request {
    Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output: None, unproved: None }
}

#[test]
fn update_carries_its_digest_and_time_and_ends_with_an_event() {
    let (story, task_id) = ordered(node().active(), 'a');
    assert_eq!((story.effects.clone(), story.pending_tasks()), (vec![Effect::WakeNode(NODE)], vec!["agent.update"]));
    let expected = AgentUpdate { digest: digest('a'), force: false, commit_seconds: 120, rollout_id: None };
    assert_eq!(story.node.tasks.by_id[&task_id].update, Some(expected));
    // The wait for the proof is added to the time of other tasks.
    assert_eq!(story.node.deadline().unwrap().at, start() + TimeDelta::seconds(720));
    let done = story.clone().agent(report(task_id, 1, DONE)).publishes(&["node.agent_updated"]);
    assert!(done.node.tasks.latest_update().unwrap().failure().is_none());
    let verdict = TaskOutcome::Failed { code: "rolled_back".into(), message: "no heartbeat".into() };
    let failed = story.agent(report(task_id, 1, verdict)).publishes(&["node.agent_update_failed"]).expect("active");
    assert_eq!(failed.node.tasks.latest_update().unwrap().failure(), Some(("rolled_back", "no heartbeat")));
}

#[test]
fn agent_is_updated_once_at_a_time() {
    let (story, task_id) = ordered(node().active(), 'a');
    assert_eq!(story.refuses(&admin(), update('b')), Rejection::UpdateInProgress { task_id });
    let stale = story.after(TimeDelta::seconds(720)).after_heartbeat().ticked();
    assert!(matches!(stale.node.tasks.by_id[&task_id].phase, NodeTaskPhase::AwaitsOperator { .. }));
    assert_eq!(stale.refuses(&admin(), update('b')), Rejection::UpdateInProgress { task_id });
    let resumed = stale.admin(Request::ResumeTask { task_id, reason: "looked".into() });
    assert_eq!(resumed.node.tasks.by_id[&task_id].work.deadline_at - resumed.now, TimeDelta::seconds(720));
    let ended = resumed.agent(report(task_id, 2, DONE));
    let (next, other) = ordered(ended.after(TimeDelta::milliseconds(1)), 'b');
    assert_eq!(next.node.tasks.latest_update().unwrap().work.task_id, other);
}

#[test]
fn node_without_an_agent_is_not_updated() {
    assert!(matches!(node().refuses(&admin(), update('a')), Rejection::WrongState { .. }));
    assert!(matches!(
        node().active().retired().removing().refuses(&admin(), update('a')),
        Rejection::WrongState { .. }
    ));
}

#[test]
fn version_of_the_agent_is_recorded_at_once() {
    let beat = |digit: Option<char>| {
        let Request::Heartbeat { serial, mut seen, inventory, health } =
            heartbeat(NodeHealthStatus::Ok, inventory(GPUS))
        else {
            unreachable!("a heartbeat is one")
        };
        seen.package_digest = digit.map(digest);
        Request::Heartbeat { serial, seen, inventory, health }
    };
    let known = |story: &Story| story.node.agent.contact.as_ref().unwrap().package_digest.clone();
    let story = node().active().agent(beat(Some('a')));
    assert_eq!(known(&story), Some(digest('a')));
    let story = story.after(TimeDelta::seconds(1)).agent(poll());
    assert_eq!(known(&story), Some(digest('a')), "a poll says nothing of it");
    let story = story.agent(beat(Some('b')));
    assert_eq!(known(&story), Some(digest('b')));
    assert_eq!(known(&story.agent(beat(None))), None);
}

const ROLLOUT: RolloutId = RolloutId(uuid::Uuid::from_u128(0xB));

/// The order of a rollout that watches the node afterwards.
fn of_soaking_rollout(digit: char) -> Instruction {
    Instruction::UpdateForRollout { rollout_id: ROLLOUT, digest: digest(digit), soaks: true, includes_held: false }
}

fn check() -> Instruction {
    Instruction::CheckForRollout { rollout_id: ROLLOUT }
}

/// What the node has reported of the soak.
fn soaked(story: &Story) -> Option<Option<String>> {
    story.published.iter().find_map(|event| {
        let Reaction::Rollout(ROLLOUT, rollout::Fact::NodeSoaked { fault, .. }) = event.reaction() else { return None };
        Some(fault)
    })
}

/// A heartbeat of an agent that can be updated, with this finding.
fn after_updatable_heartbeat(story: Story, finding: &ReportedFinding) -> Story {
    let Request::Heartbeat { serial, mut seen, inventory, health } =
        health::report_of(vec![finding.clone()], story.now, inventory(GPUS))
    else {
        unreachable!("a heartbeat is one")
    };
    seen.task_types = Some(["agent.update".to_owned()].into());
    seen.package_digest = Some(digest('9'));
    story.agent(Request::Heartbeat { serial, seen, inventory, health })
}

/// A node that has the version of a rollout, which watches it.
fn soaking() -> Story {
    let story = updatable().after_fact(of_soaking_rollout('a'));
    let task_id = story.node.tasks.latest_update().unwrap().work.task_id;
    let story = story.after(TimeDelta::seconds(5)).agent(report(task_id, 1, DONE));
    assert_eq!((outcome(&story), soaked(&story)), (Some(RolloutOutcome::Updated), None));
    story
}

fn of_rollout(rollout_id: RolloutId, digit: char) -> Instruction {
    Instruction::UpdateForRollout { rollout_id, digest: digest(digit), soaks: false, includes_held: false }
}

/// An active node whose agent can be updated.
fn updatable() -> Story {
    of_package(Some('9'))
}

/// An active node whose agent has the task, and is of this package.
fn of_package(digit: Option<char>) -> Story {
    let Request::Heartbeat { serial, mut seen, inventory, health } = heartbeat(NodeHealthStatus::Ok, inventory(GPUS))
    else {
        unreachable!("a heartbeat is one")
    };
    seen.task_types = Some(["agent.update".to_owned()].into());
    seen.package_digest = digit.map(digest);
    node().active().agent(Request::Heartbeat { serial, seen, inventory, health })
}

fn outcome(story: &Story) -> Option<RolloutOutcome> {
    story.published.iter().find_map(|event| {
        let Reaction::Rollout(ROLLOUT, rollout::Fact::NodeEnded { outcome, .. }) = event.reaction() else {
            return None;
        };
        Some(outcome)
    })
}

#[test]
fn rollout_orders_one_update_however_often_it_repeats_itself() {
    let story = updatable().after_fact(of_rollout(ROLLOUT, 'a'));
    let task_id = story.node.tasks.latest_update().unwrap().work.task_id;
    assert_eq!(story.effects, vec![Effect::WakeNode(NODE)]);
    let story = story.after_fact(of_rollout(ROLLOUT, 'a')).unmoved();
    let story = story.agent(report(task_id, 1, DONE)).publishes(&["node.agent_updated"]);
    assert_eq!(outcome(&story), Some(RolloutOutcome::Updated));
    // The answer was lost: the order comes again.
    let story = story.after_fact(of_rollout(ROLLOUT, 'a')).publishes(&["node.rollout_node_ended"]);
    assert_eq!((outcome(&story), story.node.tasks.by_id.len()), (Some(RolloutOutcome::Updated), 1));
    // Another rollout has updated it since then: a late order of the first begins nothing.
    let other = RolloutId(uuid::Uuid::from_u128(0xA));
    let story = story.after(TimeDelta::seconds(1)).after_fact(of_rollout(other, 'b'));
    let story = story.after_fact(of_rollout(ROLLOUT, 'a')).publishes(&["node.rollout_node_ended"]);
    assert_eq!(story.node.tasks.by_id.len(), 2);
}

#[test]
fn rollout_skips_what_it_cannot_update_and_remembers_that() {
    let skipped = |story: Story, digit: char| {
        let story = story.after_fact(of_rollout(ROLLOUT, digit)).publishes(&["node.rollout_node_ended"]);
        let Some(RolloutOutcome::Skipped { reason }) = outcome(&story) else { panic!("{:?}", story.published) };
        (story, reason.name())
    };
    assert_eq!(skipped(node(), 'a').1, "not_active");
    assert_eq!(skipped(updatable(), '9').1, "up_to_date");
    assert_eq!(skipped(updatable().quarantined(), 'a').1, "quarantined");
    assert_eq!(skipped(updatable().retired(), 'a').1, "retired");
    assert_eq!(skipped(updatable().retired().removing(), 'a').1, "removed");
    assert_eq!(skipped(updatable().ready().admin(retire(true)), 'a').1, "draining");
    assert_eq!(skipped(updatable().admin(update('b')), 'a').1, "update_in_progress");
    let old = updatable().agent(heartbeat(NodeHealthStatus::Ok, inventory(GPUS)));
    assert_eq!(skipped(old, 'a').1, "unsupported");
    let (by_hand, reason) = skipped(of_package(None), 'a');
    assert_eq!((reason, by_hand.node.tasks.by_id.len()), ("unsupported", 0), "its agent would refuse the task");
    let (story, reason) = skipped(updatable().offline(), 'a');
    assert_eq!(reason, "offline");
    // A repetition of the order that comes after the node is back begins nothing.
    let (story, reason) = skipped(story.after_heartbeat().expect("active"), 'a');
    assert_eq!((reason, story.node.tasks.by_id.len()), ("offline", 0));
}

/// The order of a rollout that includes held nodes.
fn of_rollout_with_held(digit: char) -> Instruction {
    Instruction::UpdateForRollout { rollout_id: ROLLOUT, digest: digest(digit), soaks: true, includes_held: true }
}

/// A node that can be updated, in quarantine for a setuid file that the agent found.
fn altered() -> Story {
    let story = updatable();
    let setuid =
        ReportedFinding { first_at: story.now, last_at: story.now, ..health::found("privilege", "setuid", None) };
    after_updatable_heartbeat(story, &setuid).expect("quarantined").after(TimeDelta::seconds(5))
}

#[test]
fn rollout_updates_a_node_that_a_fault_holds_where_held_nodes_are_included() {
    let skipped = altered().after_fact(of_rollout(ROLLOUT, 'a'));
    assert_eq!(outcome(&skipped), Some(RolloutOutcome::Skipped { reason: SkipReason::Quarantined }));
    let ordered = altered().after_fact(of_rollout_with_held('a')).expect("quarantined");
    let task_id = ordered.node.tasks.latest_update().expect("it is updated").work.task_id;
    assert_eq!(ordered.pending_tasks(), ["agent.update"]);
    let updated = ordered.agent(report(task_id, 1, DONE)).expect("quarantined");
    assert_eq!(outcome(&updated), Some(RolloutOutcome::Updated));
    // What held it before the update is no fault of the soak, and the version that does not find it ends the hold.
    assert_eq!(soaked(&updated.clone().after_fact(check())), Some(None));
    let cured = updated.after(TimeDelta::seconds(30)).finds(&[]).expect("active");
    assert_eq!(soaked(&cured.after_fact(check())), Some(None));
}

#[test]
fn rollout_skips_held_nodes_that_an_update_cannot_cure_or_that_are_silent() {
    let reason = |story: Story| {
        let story = story.after_fact(of_rollout_with_held('a'));
        assert!(story.node.tasks.latest_update().is_none(), "no update begins");
        let Some(RolloutOutcome::Skipped { reason }) = outcome(&story) else { panic!("{:?}", story.published) };
        reason.name()
    };
    assert_eq!(reason(updatable().quarantined()), "quarantined", "an administrator holds it");
    assert_eq!(reason(altered().quarantined()), "quarantined", "and of several holds one is an administrator's");
    assert_eq!(reason(altered().after(TimeDelta::hours(1))), "offline");
    assert_eq!(reason(altered().admin(retire(false))), "retired");
    // It was offline when it was held, and is back.
    let back = updatable().offline();
    let setuid =
        ReportedFinding { first_at: back.now, last_at: back.now, ..health::found("privilege", "setuid", None) };
    let back = after_updatable_heartbeat(back, &setuid).expect("quarantined").after_fact(of_rollout_with_held('a'));
    assert_eq!(back.pending_tasks(), ["agent.update"]);
}

#[test]
fn rolled_back_and_stalled_updates_are_failures_of_the_rollout() {
    let story = updatable().after_fact(of_rollout(ROLLOUT, 'a'));
    let task_id = story.node.tasks.latest_update().unwrap().work.task_id;
    let verdict = TaskOutcome::Failed { code: "rolled_back".into(), message: "m".into() };
    let failed = story.clone().agent(report(task_id, 1, verdict)).publishes(&["node.agent_update_failed"]);
    assert_eq!(outcome(&failed), Some(RolloutOutcome::Failed { reason: "rolled_back".into() }));
    // Its agent cannot update itself, which shows only at the order: it is skipped as one that no package installed.
    let verdict = TaskOutcome::Failed { code: "update_unsupported".into(), message: "m".into() };
    let refused = story.clone().agent(report(task_id, 1, verdict)).publishes(&["node.agent_update_failed"]);
    assert_eq!(outcome(&refused), Some(RolloutOutcome::Skipped { reason: SkipReason::Unsupported }));
    let stalled = story.clone().after(TimeDelta::seconds(720)).after_heartbeat().ticked();
    let no_result = Some(RolloutOutcome::Failed { reason: "no_result".into() });
    assert_eq!(outcome(&stalled), no_result);
    assert_eq!(outcome(&stalled.after_fact(of_rollout(ROLLOUT, 'a'))), no_result, "the message was lost");
    // The node is removed in the meantime, and its task with it.
    let removed = story.retired().removing().after_fact(of_rollout(ROLLOUT, 'a'));
    assert_eq!(outcome(&removed), Some(RolloutOutcome::Skipped { reason: SkipReason::Removed }));
}

#[test]
fn node_that_is_offline_in_the_soak_reports_that_once_and_when_it_is_asked() {
    let offline = soaking().offline().expect("offline");
    assert_eq!(soaked(&offline), Some(Some("offline".into())));
    let back = offline.after_heartbeat().expect("active");
    assert_eq!(soaked(&back), None, "once");
    // The report was lost, and the node is back: its answer has it still, as often as it is asked.
    let asked = back.after_fact(check());
    assert_eq!(soaked(&asked), Some(Some("offline".into())));
    assert_eq!(soaked(&asked.after_fact(check())), Some(Some("offline".into())));
}

#[test]
fn new_findings_of_the_stopping_classes_are_faults_of_the_soak_and_others_are_none() {
    let found = |probe: &str, code: &str, gpu: Option<u32>| {
        let story = soaking().after(TimeDelta::seconds(5));
        let now = story.now;
        story.finds(&[ReportedFinding { first_at: now, last_at: now, ..health::found(probe, code, gpu) }])
    };
    let altered = found("privilege", "setuid", None).expect("quarantined");
    assert_eq!(soaked(&altered), Some(Some("privilege/setuid".into())));
    assert_eq!(soaked(&found("privilege", "incomplete", None)), None, "it is only shown");
    assert_eq!(soaked(&found("xid", "79", Some(0))), Some(Some("xid/79".into())));
    assert_eq!(soaked(&found("xid", "13", Some(0))), None, "a tenant's program");
}

#[test]
fn finding_from_before_the_update_is_no_fault_of_the_soak() {
    let story = updatable();
    let evacuates = ReportedFinding { first_at: story.now, last_at: story.now, ..health::xid(79, 0) };
    let story = after_updatable_heartbeat(story.policy(PolicyKey::NodeRepairAttempts, 0), &evacuates);
    let story = story.after(TimeDelta::seconds(30)).after_fact(of_soaking_rollout('a'));
    let task_id = story.node.tasks.latest_update().expect("it is updated").work.task_id;
    let story = after_updatable_heartbeat(story.agent(report(task_id, 1, DONE)), &evacuates);
    assert_eq!(soaked(&story), None);
    assert_eq!(soaked(&story.after_fact(check())), Some(None));
}

#[test]
fn node_that_is_in_order_is_watched_no_longer_after_its_answer() {
    let asked = soaking().after_heartbeat().after_fact(check());
    assert_eq!(soaked(&asked), Some(None));
    assert_eq!(soaked(&asked.clone().after_fact(check())), Some(None), "its answer was lost");
    assert_eq!(soaked(&asked.offline()), None);
    // A rollout without a soak gets no reports.
    let story = updatable().after_fact(of_rollout(ROLLOUT, 'a'));
    let task_id = story.node.tasks.latest_update().unwrap().work.task_id;
    assert_eq!(soaked(&story.agent(report(task_id, 1, DONE)).offline()), None);
    // An administrator took it out of service.
    assert_eq!(soaked(&soaking().quarantined()), None);
    assert_eq!(soaked(&soaking().retired().after_fact(check())), Some(None));
}

#[test]
fn silence_shows_at_the_check_also_where_no_timer_watches_the_node() {
    let draining = soaking().quarantined().after(TimeDelta::hours(1)).after_fact(check());
    assert_eq!(soaked(&draining), Some(Some("offline".into())));
}

#[test]
fn late_result_of_an_update_without_one_changes_nothing_for_the_rollout() {
    let story = updatable().after_fact(of_soaking_rollout('a'));
    let task_id = story.node.tasks.latest_update().unwrap().work.task_id;
    let stalled = story.after(TimeDelta::seconds(720)).after_heartbeat().ticked();
    assert_eq!(outcome(&stalled), Some(RolloutOutcome::Failed { reason: "no_result".into() }));
    // It is offline meanwhile, and its result comes late.
    let offline = stalled.offline();
    assert_eq!(soaked(&offline), None, "it has failed already");
    let late = offline.agent(report(task_id, 1, DONE));
    let recorded = late.node.agent.rollouts.last().unwrap().outcome.clone();
    assert_eq!(recorded, Some(RolloutOutcome::Updated), "the node's own record");
}
