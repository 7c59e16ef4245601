//! Tasks of the node itself: ordered, dispatched, finished, or left to an operator.

use super::*;

fn ordered(story: Story, task_type: TaskType) -> (Story, TaskId) {
    let story = story.admin(order_task(task_type));
    let Reply::Task { task_id, .. } = story.reply.clone() else { panic!("{:?}", story.reply) };
    (story, task_id)
}

fn report(task_id: TaskId, attempt: u32, verdict: TaskOutcome) -> Request {
    let output = Some(json!({ "n": attempt }));
    Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output, unproved: None }
}

fn resume(task_id: TaskId) -> Request {
    Request::ResumeTask { task_id, reason: "looked".into() }
}

const DONE: TaskOutcome = TaskOutcome::Succeeded { proof: None };

fn phase(story: &Story, task_id: TaskId) -> (u32, &NodeTaskPhase) {
    let task = &story.node.tasks.by_id[&task_id];
    (task.work.attempt, &task.phase)
}

#[test]
fn ordered_task_is_dispatched_until_its_result_which_is_stored() {
    for task_type in TaskType::ORDERED {
        let (story, task_id) = ordered(node().active(), task_type);
        assert_eq!(story.effects, [Effect::WakeNode(NODE)]);
        assert_eq!(story.pending_tasks(), [task_type.name()]);
        let done = story.agent(report(task_id, 1, DONE)).expect("active");
        assert_eq!(done.pending_tasks(), Vec::<&str>::new());
        let NodeTaskPhase::Ended { verdict, output, .. } = phase(&done, task_id).1 else { panic!("it has not ended") };
        assert_eq!((verdict, output), (&DONE, &Some(json!({ "n": 1 }))));
        assert_eq!(done.refuses(&agent(), report(task_id, 1, DONE)), Rejection::StaleAttempt { given: 1, current: 1 });
    }
}

#[test]
fn repeatable_task_without_result_is_requeued_with_a_higher_attempt() {
    let (story, task_id) = ordered(node().active().ready(), TaskType::DiagnosticsCollect);
    assert_eq!(story.node.deadline(), None, "it waits for no operator");
    let mut story = story.after(TimeDelta::seconds(600)).after_heartbeat().ticked();
    assert_eq!(phase(&story, task_id), (2, &NodeTaskPhase::Open));
    assert!(story.effects.contains(&Effect::WakeNode(NODE)));
    assert_eq!(story.refuses(&agent(), report(task_id, 1, DONE)), Rejection::StaleAttempt { given: 1, current: 2 });
    story = story.agent(report(task_id, 2, DONE));
    assert!(matches!(phase(&story, task_id), (2, NodeTaskPhase::Ended { .. })));
}

#[test]
fn unrepeatable_task_without_result_awaits_an_operator_and_is_overdue() {
    let (story, task_id) = ordered(node().active(), TaskType::NodeReboot);
    let until = start() + TimeDelta::seconds(600);
    assert_eq!(story.node.deadline().unwrap().at, until);
    assert!(matches!(story.refuses(&admin(), resume(task_id)), Rejection::TaskDoesNotWait { .. }));
    let waiting = story.after(TimeDelta::seconds(600)).after_heartbeat().ticked();
    assert_eq!(phase(&waiting, task_id), (1, &NodeTaskPhase::AwaitsOperator { since: until }));
    assert_eq!(waiting.node.deadline().unwrap().reason, "node.reboot was not reported on: look and resume it");
    assert_eq!(waiting.pending_tasks(), Vec::<&str>::new());
    // Time alone does not change its phase.
    let waiting = waiting.after(TimeDelta::seconds(6000)).after_heartbeat().ticked();
    assert_eq!(phase(&waiting, task_id), (1, &NodeTaskPhase::AwaitsOperator { since: until }));
    let resumed = waiting.clone().admin(resume(task_id));
    assert_eq!(resumed.pending_tasks(), ["node.reboot"]);
    let done = resumed.agent(report(task_id, 2, DONE));
    assert_eq!(done.node.deadline(), None);
    assert!(matches!(done.refuses(&admin(), resume(task_id)), Rejection::TaskDoesNotWait { .. }));
    // A late result resolves the unknown outcome.
    let late = waiting.agent(report(task_id, 1, failed()));
    assert!(matches!(phase(&late, task_id), (1, NodeTaskPhase::Ended { .. })));
}

#[test]
fn failed_validation_quarantines_the_node_with_the_reason() {
    let (story, task_id) = ordered(node().active().ready(), TaskType::NodeValidate);
    let unfit =
        TaskOutcome::Failed { code: "device_guard".into(), message: "the devices are open to everybody".into() };
    let unfit = story.agent(report(task_id, 1, unfit)).expect("quarantined").publishes(&["node.state_changed"]);
    assert_eq!(unfit.node.lifecycle.reason.code.as_str(), "validation_failed");
    assert!(
        unfit.node.lifecycle.reason.message.ends_with("the devices are open to everybody"),
        "{:?}",
        unfit.node.lifecycle.reason
    );
    assert_eq!(unfit.node.tenancy.holds.len(), 1, "its tenants stay");
}

#[test]
fn open_tasks_and_remembered_results_are_bounded() {
    let mut story = node().active();
    for _ in 0..8 {
        story = ordered(story.after(TimeDelta::milliseconds(1)), TaskType::DiagnosticsCollect).0;
    }
    assert_eq!(story.refuses(&admin(), order_task(TaskType::NodeValidate)), Rejection::TooManyTasks { limit: 8 });
    let mut last = None;
    for _ in 0..20 {
        story = story.after(TimeDelta::milliseconds(1));
        let task_id = *story.node.tasks.by_id.iter().find(|(_, task)| task.phase == NodeTaskPhase::Open).unwrap().0;
        story = story.agent(report(task_id, 1, DONE));
        (story, last) = {
            let (story, id) = ordered(story, TaskType::DiagnosticsCollect);
            (story, Some(id))
        };
    }
    assert_eq!(story.node.tasks.by_id.len(), 16);
    assert!(story.node.tasks.by_id.contains_key(&last.unwrap()));
}

#[test]
fn unknown_task_is_neither_resumed_nor_reported() {
    let (story, _) = ordered(node().active(), TaskType::NodeReboot);
    let other = TaskId(Uuid::from_u128(77));
    assert_eq!(story.refuses(&admin(), resume(other)), Rejection::TaskUnknown);
    assert_eq!(story.refuses(&agent(), report(other, 1, DONE)), Rejection::TaskUnknown);
    assert_eq!(story.retired().removing().node.tasks.by_id.len(), 0);
}

/// The story's agent after a heartbeat with `protocol` and these supported task types.
fn after_heartbeat_of(story: Story, protocol: u16, task_types: Option<&[&str]>) -> Story {
    let Request::Heartbeat { serial, mut seen, inventory, health } = heartbeat(NodeHealthStatus::Ok, inventory(GPUS))
    else {
        unreachable!("a heartbeat is one")
    };
    seen.protocol = protocol;
    seen.task_types = task_types.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
    story.agent(Request::Heartbeat { serial, seen, inventory, health })
}

#[test]
fn unsupported_task_is_not_dispatched_and_shows_why_it_waits() {
    for (protocol, says, knows) in [
        (1, None, &["node.validate"][..]),
        (2, None, &["node.validate"]),
        (3, None, &["node.validate", "diagnostics.collect", "node.reboot"]),
        (3, Some(&["diagnostics.collect", "node.sing"][..]), &["diagnostics.collect"]),
        (3, Some(&[]), &[]),
    ] {
        for task_type in TaskType::ORDERED {
            let (story, _) = ordered(after_heartbeat_of(node().active(), protocol, says), task_type);
            let is_known = knows.contains(&task_type.name());
            assert_eq!(
                story.pending_tasks().len(),
                usize::from(is_known),
                "{task_type} of protocol {protocol}, {says:?}"
            );
            assert_eq!(story.node.agent.lacks_task_type(task_type).is_some(), !is_known);
            let why = story.node.deadline().map(|deadline| deadline.reason).unwrap_or_default();
            assert_eq!(why.contains("upgrade it"), !is_known, "{why}");
        }
    }
}

#[test]
fn unsupported_task_is_dispatched_after_an_upgrade_or_ends_without_one() {
    let old = after_heartbeat_of(node().active(), 2, None);
    let (waiting, task_id) = ordered(old, TaskType::DiagnosticsCollect);
    let upgraded = after_heartbeat_of(waiting.clone(), 3, Some(&["diagnostics.collect"]));
    assert_eq!(upgraded.pending_tasks(), ["diagnostics.collect"]);
    assert_eq!(upgraded.node.deadline(), None);

    let ended = waiting.after(TimeDelta::seconds(600)).ticked();
    let NodeTaskPhase::Ended { verdict: TaskOutcome::Failed { code, message }, .. } = phase(&ended, task_id).1 else {
        panic!("it was never handed out, and is not offered for ever: {:?}", ended.node.tasks.by_id)
    };
    assert_eq!(code, "task_type_unknown");
    assert!(message.contains("protocol 2") && message.ends_with("upgrade it"), "{message}");

    let (rebooting, task_id) = ordered(after_heartbeat_of(node().active(), 1, None), TaskType::NodeReboot);
    let stalled = after_heartbeat_of(rebooting, 1, None).after(TimeDelta::seconds(600)).ticked();
    assert!(matches!(phase(&stalled, task_id), (1, NodeTaskPhase::AwaitsOperator { .. })));
    assert!(stalled.node.deadline().unwrap().reason.ends_with("upgrade it"));
}

/// A session's first token was issued.
fn open_terminal(story: Story) -> Story {
    let open = Instruction::OpenTerminal {
        session_id: TerminalSessionId(Uuid::from_u128(9)),
        allocation_id: TENANT,
        ends_at: story.now + TimeDelta::hours(4),
        begin_until: story.now + TimeDelta::seconds(60),
        recording: crate::recording::RecordingTerms::default(),
    };
    story.after_fact(open)
}

#[test]
fn terminal_that_no_agent_begins_in_time_fails_once() {
    let is_failure = |event: &&Event| matches!(event, Event::TerminalFailed { reason, .. } if reason == "not_begun");
    let failures = |story: &Story| story.published.iter().filter(is_failure).count();
    let opened = open_terminal(node().active().ready().after_heartbeat());
    let task_id = opened.node.tenancy.holds[&TENANT].terminals.values().next().unwrap().work.task_id;
    // Its agent may report a session that it began at the last moment.
    let late = opened.clone().after(TimeDelta::seconds(61)).after_heartbeat().ticked();
    assert_eq!(failures(&late), 0);
    let reported = late.agent(report(task_id, 1, DONE));
    assert_eq!(failures(&reported.after(TimeDelta::minutes(2)).after_heartbeat().ticked()), 0);

    let failed = opened.clone().after(TimeDelta::seconds(120)).after_heartbeat().ticked();
    assert_eq!((failures(&failed), failed.pending_tasks()), (1, Vec::<&str>::new()));
    assert_eq!(failures(&failed.clone().after(TimeDelta::seconds(1)).after_heartbeat().ticked()), 0);
    // A late result is accepted: the agent would send it again.
    failed.agent(report(task_id, 1, DONE));

    // The timer brings it about where the agent stays away.
    let (due_at, mut away, mut count) = (opened.now + TimeDelta::seconds(120), opened, 0);
    for _ in 0..20 {
        if away.now < due_at {
            away = away.at_its_timer().ticked();
            count += failures(&away);
        }
    }
    assert_eq!(count, 1);
}

#[test]
fn terminal_fails_at_once_where_the_agent_does_not_support_it() {
    let ready = node().active().ready();
    let opened = open_terminal(ready.clone());
    assert_eq!(opened.pending_tasks(), ["open terminal"]);
    let failed = open_terminal(after_heartbeat_of(ready, 2, None));
    assert!(matches!(&failed.published[..], [Event::TerminalFailed { reason, .. }] if reason == "agent_outdated"));
    assert_eq!(failed.pending_tasks(), Vec::<&str>::new());
}
