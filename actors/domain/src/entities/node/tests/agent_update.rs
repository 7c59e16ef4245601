//! The update of a node's agent.

use super::*;
use crate::id::RolloutId;
use crate::reactions::Reaction;
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
    Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output: None }
}

#[test]
fn update_carries_its_digest_and_time_and_ends_with_an_event() {
    let (story, task_id) = ordered(node().active(), 'a');
    assert_eq!((story.effects.clone(), story.pending_tasks()), (vec![Effect::WakeNode(NODE)], vec!["agent.update"]));
    let expected = AgentUpdate { digest: digest('a'), force: false, commit_seconds: 120, rollout_id: None };
    assert_eq!(story.node.tasks[&task_id].update, Some(expected));
    // The wait for the proof is added to the time of other tasks.
    assert_eq!(story.node.deadline().unwrap().at, start() + TimeDelta::seconds(720));
    let done = story.clone().agent(report(task_id, 1, DONE)).publishes(&["node.agent_updated"]);
    assert!(done.node.latest_update().unwrap().failure().is_none());
    let verdict = TaskOutcome::Failed { code: "rolled_back".into(), message: "no heartbeat".into() };
    let failed = story.agent(report(task_id, 1, verdict)).publishes(&["node.agent_update_failed"]).expect("active");
    assert_eq!(failed.node.latest_update().unwrap().failure(), Some(("rolled_back", "no heartbeat")));
}

#[test]
fn agent_is_updated_once_at_a_time() {
    let (story, task_id) = ordered(node().active(), 'a');
    assert_eq!(story.refuses(&admin(), update('b')), Rejection::UpdateInProgress { task_id });
    let stale = story.after(TimeDelta::seconds(720)).after_heartbeat().ticked();
    assert!(matches!(stale.node.tasks[&task_id].phase, NodeTaskPhase::AwaitsOperator { .. }));
    assert_eq!(stale.refuses(&admin(), update('b')), Rejection::UpdateInProgress { task_id });
    let resumed = stale.admin(Request::ResumeTask { task_id, reason: "looked".into() });
    assert_eq!(resumed.node.tasks[&task_id].work.deadline_at - resumed.now, TimeDelta::seconds(720));
    let ended = resumed.agent(report(task_id, 2, DONE));
    let (next, other) = ordered(ended.after(TimeDelta::milliseconds(1)), 'b');
    assert_eq!(next.node.latest_update().unwrap().work.task_id, other);
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
    let known = |story: &Story| story.node.seen.as_ref().unwrap().package_digest.clone();
    let story = node().active().agent(beat(Some('a')));
    assert_eq!(known(&story), Some(digest('a')));
    let story = story.after(TimeDelta::seconds(1)).agent(poll());
    assert_eq!(known(&story), Some(digest('a')), "a poll says nothing of it");
    let story = story.agent(beat(Some('b')));
    assert_eq!(known(&story), Some(digest('b')));
    assert_eq!(known(&story.agent(beat(None))), None);
}

const ROLLOUT: RolloutId = RolloutId(uuid::Uuid::from_u128(0xB));

fn of_rollout(rollout_id: RolloutId, digit: char) -> Fact {
    Fact::UpdateForRollout { rollout_id, digest: digest(digit) }
}

/// An active node whose agent can be updated.
fn updatable() -> Story {
    let Request::Heartbeat { serial, mut seen, inventory, health } = heartbeat(NodeHealthStatus::Ok, inventory(GPUS))
    else {
        unreachable!("a heartbeat is one")
    };
    seen.task_types = Some(["agent.update".to_owned()].into());
    seen.package_digest = Some(digest('9'));
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
    let task_id = story.node.latest_update().unwrap().work.task_id;
    assert_eq!(story.effects, vec![Effect::WakeNode(NODE)]);
    let story = story.after_fact(of_rollout(ROLLOUT, 'a')).unmoved();
    let story = story.agent(report(task_id, 1, DONE)).publishes(&["node.agent_updated"]);
    assert_eq!(outcome(&story), Some(RolloutOutcome::Updated));
    // The answer was lost: the order comes again.
    let story = story.after_fact(of_rollout(ROLLOUT, 'a')).publishes(&["node.rollout_node_ended"]);
    assert_eq!((outcome(&story), story.node.tasks.len()), (Some(RolloutOutcome::Updated), 1));
    // Another rollout has updated it since then: a late order of the first begins nothing.
    let other = RolloutId(uuid::Uuid::from_u128(0xA));
    let story = story.after(TimeDelta::seconds(1)).after_fact(of_rollout(other, 'b'));
    let story = story.after_fact(of_rollout(ROLLOUT, 'a')).publishes(&["node.rollout_node_ended"]);
    assert_eq!(story.node.tasks.len(), 2);
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
    let (story, reason) = skipped(updatable().offline(), 'a');
    assert_eq!(reason, "offline");
    // A repetition of the order that comes after the node is back begins nothing.
    let (story, reason) = skipped(story.after_heartbeat().expect("active"), 'a');
    assert_eq!((reason, story.node.tasks.len()), ("offline", 0));
}

#[test]
fn rolled_back_and_stalled_updates_are_failures_of_the_rollout() {
    let story = updatable().after_fact(of_rollout(ROLLOUT, 'a'));
    let task_id = story.node.latest_update().unwrap().work.task_id;
    let verdict = TaskOutcome::Failed { code: "rolled_back".into(), message: "m".into() };
    let failed = story.clone().agent(report(task_id, 1, verdict)).publishes(&["node.agent_update_failed"]);
    assert_eq!(outcome(&failed), Some(RolloutOutcome::Failed { reason: "rolled_back".into() }));
    let stalled = story.clone().after(TimeDelta::seconds(720)).after_heartbeat().ticked();
    let no_result = Some(RolloutOutcome::Failed { reason: "no_result".into() });
    assert_eq!(outcome(&stalled), no_result);
    assert_eq!(outcome(&stalled.after_fact(of_rollout(ROLLOUT, 'a'))), no_result, "the message was lost");
    // The node is removed in the meantime, and its task with it.
    let removed = story.retired().removing().after_fact(of_rollout(ROLLOUT, 'a'));
    assert_eq!(outcome(&removed), Some(RolloutOutcome::Skipped { reason: SkipReason::Removed }));
}
