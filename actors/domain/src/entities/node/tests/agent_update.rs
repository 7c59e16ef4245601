//! The update of a node's agent.

use super::*;

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
    let expected = AgentUpdate { digest: digest('a'), force: false, commit_seconds: 120 };
    assert_eq!(story.node.tasks[&task_id].update, Some(expected));
    // The wait for the proof is added to the time of other tasks.
    assert_eq!(story.node.deadline().unwrap().at, start() + TimeDelta::seconds(720));
    let done = story.clone().agent(report(task_id, 1, DONE)).says(&["node.agent_updated"]);
    assert!(done.node.latest_update().unwrap().failure().is_none());
    let verdict = TaskOutcome::Failed { code: "rolled_back".into(), message: "no heartbeat".into() };
    let failed = story.agent(report(task_id, 1, verdict)).says(&["node.agent_update_failed"]).expect("active");
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
