//! Tasks of the node itself: ordered, offered, reported on, or left to an operator.

use super::*;

fn ordered(story: Story, task_type: TaskType) -> (Story, TaskId) {
    let story = story.admin(order_task(task_type));
    let Reply::Task { task_id, .. } = story.reply.clone() else { panic!("{:?}", story.reply) };
    (story, task_id)
}

fn report(task_id: TaskId, attempt: u32, verdict: Verdict) -> Command {
    let output = Some(json!({ "n": attempt }));
    Command::Report { serial: SERIAL.into(), task_id, attempt, verdict, output }
}

fn resume(task_id: TaskId) -> Command {
    Command::ResumeTask { task_id, reason: "looked".into() }
}

const DONE: Verdict = Verdict::Succeeded { proof: None };

fn phase(story: &Story, task_id: TaskId) -> (u32, &TaskPhase) {
    let task = &story.node.tasks[&task_id];
    (task.work.attempt, &task.phase)
}

#[test]
fn what_an_administrator_orders_is_offered_until_the_agent_reports_and_its_outcome_is_kept() {
    for task_type in TaskType::ORDERED {
        let (story, task_id) = ordered(node().active(), task_type);
        assert_eq!(story.effects, [Effect::WakeNode(NODE)]);
        assert_eq!(story.orders(), [task_type.name()]);
        let done = story.agent(report(task_id, 1, DONE)).expect("active");
        assert_eq!(done.orders(), Vec::<&str>::new());
        let TaskPhase::Ended { verdict, output, .. } = phase(&done, task_id).1 else { panic!("it has not ended") };
        assert_eq!((verdict, output), (&DONE, &Some(json!({ "n": 1 }))));
        assert_eq!(done.refuses(&agent(), report(task_id, 1, DONE)), Rejection::StaleAttempt { given: 1, current: 1 });
    }
}

#[test]
fn what_may_happen_twice_is_offered_again_under_a_higher_attempt() {
    let (story, task_id) = ordered(node().active().ready(), TaskType::DiagnosticsCollect);
    assert_eq!(story.node.deadline(), None, "it needs nobody");
    let mut story = story.after(TimeDelta::seconds(600)).heard().ticked();
    assert_eq!(phase(&story, task_id), (2, &TaskPhase::Open));
    assert!(story.effects.contains(&Effect::WakeNode(NODE)));
    assert_eq!(story.refuses(&agent(), report(task_id, 1, DONE)), Rejection::StaleAttempt { given: 1, current: 2 });
    story = story.agent(report(task_id, 2, DONE));
    assert!(matches!(phase(&story, task_id), (2, TaskPhase::Ended { .. })));
}

#[test]
fn what_must_not_happen_twice_waits_overdue_for_an_operators_resume() {
    let (story, task_id) = ordered(node().active(), TaskType::NodeReboot);
    let until = start() + TimeDelta::seconds(600);
    assert_eq!(story.node.deadline().unwrap().at, until);
    assert!(matches!(story.refuses(&admin(), resume(task_id)), Rejection::TaskDoesNotWait { .. }));
    let waiting = story.after(TimeDelta::seconds(600)).heard().ticked();
    assert_eq!(phase(&waiting, task_id), (1, &TaskPhase::AwaitsOperator { since: until }));
    assert_eq!(waiting.node.deadline().unwrap().reason, "node.reboot was not reported on: look and resume it");
    assert_eq!(waiting.orders(), Vec::<&str>::new());
    // Time alone moves it nowhere.
    let waiting = waiting.after(TimeDelta::seconds(6000)).heard().ticked();
    assert_eq!(phase(&waiting, task_id), (1, &TaskPhase::AwaitsOperator { since: until }));
    let resumed = waiting.clone().admin(resume(task_id));
    assert_eq!(resumed.orders(), ["node.reboot"]);
    let done = resumed.agent(report(task_id, 2, DONE));
    assert_eq!(done.node.deadline(), None);
    assert!(matches!(done.refuses(&admin(), resume(task_id)), Rejection::TaskDoesNotWait { .. }));
    // A report that comes late says what nobody knew.
    let late = waiting.agent(report(task_id, 1, failed()));
    assert!(matches!(phase(&late, task_id), (1, TaskPhase::Ended { .. })));
}

#[test]
fn a_machine_that_is_found_unfit_is_quarantined_with_the_reason() {
    let (story, task_id) = ordered(node().active().ready(), TaskType::NodeValidate);
    let unfit = Verdict::Failed { code: "device_guard".into(), message: "the devices are open to everybody".into() };
    let unfit = story.agent(report(task_id, 1, unfit)).expect("quarantined").says(&["node.state_changed"]);
    assert_eq!(unfit.node.reason.code, "validation_failed");
    assert!(unfit.node.reason.message.ends_with("the devices are open to everybody"), "{:?}", unfit.node.reason);
    assert_eq!(unfit.node.holds.len(), 1, "its tenants stay");
}

#[test]
fn a_node_takes_a_few_tasks_at_once_and_remembers_a_few_outcomes() {
    let mut story = node().active();
    for _ in 0..8 {
        story = ordered(story.after(TimeDelta::milliseconds(1)), TaskType::DiagnosticsCollect).0;
    }
    assert_eq!(story.refuses(&admin(), order_task(TaskType::NodeValidate)), Rejection::TooManyTasks { limit: 8 });
    let mut last = None;
    for _ in 0..20 {
        story = story.after(TimeDelta::milliseconds(1));
        let task_id = *story.node.tasks.iter().find(|(_, task)| task.phase == TaskPhase::Open).unwrap().0;
        story = story.agent(report(task_id, 1, DONE));
        (story, last) = {
            let (story, id) = ordered(story, TaskType::DiagnosticsCollect);
            (story, Some(id))
        };
    }
    assert_eq!(story.node.tasks.len(), 16);
    assert!(story.node.tasks.contains_key(&last.unwrap()));
}

#[test]
fn a_task_that_is_not_here_is_neither_resumed_nor_reported() {
    let (story, _) = ordered(node().active(), TaskType::NodeReboot);
    let other = TaskId(Uuid::from_u128(77));
    assert_eq!(story.refuses(&admin(), resume(other)), Rejection::TaskUnknown);
    assert_eq!(story.refuses(&agent(), report(other, 1, DONE)), Rejection::TaskUnknown);
    assert_eq!(story.retired().removing().node.tasks.len(), 0);
}

/// The story's agent, heard again as one that speaks `protocol` and says that it does these tasks.
fn heard_as(story: Story, protocol: u16, task_types: Option<&[&str]>) -> Story {
    let Command::Heartbeat { serial, mut seen, inventory, health } = heartbeat(HealthStatus::Ok, inventory(GPUS))
    else {
        unreachable!("a heartbeat is one")
    };
    seen.protocol = protocol;
    seen.task_types = task_types.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
    story.agent(Command::Heartbeat { serial, seen, inventory, health })
}

#[test]
fn what_an_agent_does_not_know_is_not_handed_to_it_and_says_why_it_waits() {
    for (protocol, says, knows) in [
        (1, None, &["node.validate"][..]),
        (2, None, &["node.validate"]),
        (3, None, &["node.validate", "diagnostics.collect", "node.reboot"]),
        (3, Some(&["diagnostics.collect", "node.sing"][..]), &["diagnostics.collect"]),
        (3, Some(&[]), &[]),
    ] {
        for task_type in TaskType::ORDERED {
            let (story, _) = ordered(heard_as(node().active(), protocol, says), task_type);
            let is_known = knows.contains(&task_type.name());
            assert_eq!(story.orders().len(), usize::from(is_known), "{task_type} of protocol {protocol}, {says:?}");
            assert_eq!(story.node.withholds(task_type).is_some(), !is_known);
            let why = story.node.deadline().map(|deadline| deadline.reason).unwrap_or_default();
            assert_eq!(why.contains("upgrade it"), !is_known, "{why}");
        }
    }
}

#[test]
fn a_task_that_waits_for_an_upgrade_is_handed_out_after_it_and_ends_where_none_comes() {
    let old = heard_as(node().active(), 2, None);
    let (waiting, task_id) = ordered(old, TaskType::DiagnosticsCollect);
    let upgraded = heard_as(waiting.clone(), 3, Some(&["diagnostics.collect"]));
    assert_eq!(upgraded.orders(), ["diagnostics.collect"]);
    assert_eq!(upgraded.node.deadline(), None);

    let ended = waiting.after(TimeDelta::seconds(600)).ticked();
    let TaskPhase::Ended { verdict: Verdict::Failed { code, message }, .. } = phase(&ended, task_id).1 else {
        panic!("it was never handed out, and is not offered for ever: {:?}", ended.node.tasks)
    };
    assert_eq!(code, "task_type_unknown");
    assert!(message.contains("protocol 2") && message.ends_with("upgrade it"), "{message}");

    let (rebooting, task_id) = ordered(heard_as(node().active(), 1, None), TaskType::NodeReboot);
    let stalled = heard_as(rebooting, 1, None).after(TimeDelta::seconds(600)).ticked();
    assert!(matches!(phase(&stalled, task_id), (1, TaskPhase::AwaitsOperator { .. })));
    assert!(stalled.node.deadline().unwrap().reason.ends_with("upgrade it"));
}

#[test]
fn a_terminal_is_not_waited_for_where_the_agent_has_none() {
    let open = |story: &Story| Command::OpenTerminal {
        session_id: TerminalSessionId(Uuid::from_u128(9)),
        allocation_id: TENANT,
        ends_at: story.now + TimeDelta::hours(4),
        begin_until: story.now + TimeDelta::seconds(60),
    };
    let ready = node().active().ready();
    let opened = ready.clone().told(open(&ready));
    assert_eq!(opened.orders(), ["open terminal"]);
    let old = heard_as(ready, 2, None);
    let failed = old.clone().told(open(&old));
    assert!(matches!(&failed.said[..], [Event::TerminalFailed { reason, .. }] if reason == "agent_outdated"));
    assert_eq!(failed.orders(), Vec::<&str>::new());
}
