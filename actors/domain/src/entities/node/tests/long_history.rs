//! The snapshot of a node that has been in use for a year: it does not grow with what is over.

use super::*;

const LARGEST: usize = 16 * 1024;

/// The agent reports that it carried out the tenant's task.
fn succeeds(story: Story, serial: &str, allocation_id: AllocationId, proof: Option<AllocationId>) -> Story {
    let Some(HoldPhase::Provisioning { work } | HoldPhase::Releasing { work }) =
        story.node.tenancy.holds.get(&allocation_id).map(|hold| hold.phase.clone())
    else {
        panic!("there is no task: {:?}", story.node.tenancy.holds)
    };
    story.agent(Request::Report {
        serial: serial.into(),
        task_id: work.task_id,
        attempt: work.attempt,
        verdict: TaskOutcome::Succeeded { proof },
        output: None,
        unproved: None,
    })
}

/// An allocation from its reservation to the proof of its clean-up.
fn rented(story: Story, serial: &str, allocation_id: AllocationId) -> Story {
    let deadline_at = story.now + TimeDelta::seconds(600);
    let story =
        story.after_fact(reserve(allocation_id, 2)).after_fact(Instruction::Provision { allocation_id, deadline_at });
    let story = succeeds(story, serial, allocation_id, None).after(TimeDelta::hours(1));
    let deadline_at = story.now + TimeDelta::seconds(600);
    let story = story.after_fact(Instruction::Clean { allocation_id, attempt: 1, deadline_at });
    succeeds(story, serial, allocation_id, Some(allocation_id))
}

fn with_task(story: Story, serial: &str) -> Story {
    let story = story.admin(order_task(TaskType::DiagnosticsCollect));
    let Reply::Task { task_id, .. } = story.reply.clone() else { panic!("{:?}", story.reply) };
    let output = Some(json!({ "archive": "d".repeat(200) }));
    let verdict = TaskOutcome::Succeeded { proof: None };
    story.agent(Request::Report { serial: serial.into(), task_id, attempt: 1, verdict, output, unproved: None })
}

/// A heartbeat of this moment.
fn after_heartbeat(story: Story, serial: &str) -> Story {
    let contact = AgentContact {
        last_seen_at: story.now,
        silent_at: story.now + TimeDelta::minutes(2),
        ..AgentContact::clone(&seen("boot-1"))
    };
    let health = NodeHealth { status: NodeHealthStatus::Ok, alerts: Vec::new(), ..Default::default() };
    story.agent(Request::Heartbeat {
        serial: serial.into(),
        seen: Box::new(contact),
        inventory: Box::new(inventory(GPUS)),
        health: Box::new(health),
    })
}

#[test]
fn snapshot_after_a_thousand_allocations_with_tasks_renewals_and_quarantines_is_below_16_kib() {
    let (mut story, mut serial, mut largest) = (node().active(), SERIAL.to_owned(), 0);
    for n in 0..1_000_u32 {
        story = after_heartbeat(story.after(TimeDelta::hours(8)), &serial);
        story = rented(story, &serial, AllocationId(Uuid::from_u128(n.into())));
        let renewed = format!("{n:040x}");
        let issued = CertificateRecord { not_after: story.now + TimeDelta::days(1), ..certificate(&renewed) };
        story = story.agent(Request::Renew { serial, issued });
        serial = renewed;
        if n % 10 == 0 {
            story = with_task(after_heartbeat(story, &serial), &serial).quarantined();
            story = story.admin(Request::ReleaseQuarantine { reason: "r".into() });
        }
        largest = largest.max(serde_json::to_string(&story.node).unwrap().len());
    }
    assert!(story.node.tenancy.holds.is_empty(), "{:?}", story.node.tenancy.holds);
    assert!(largest < LARGEST, "{largest}");
}
