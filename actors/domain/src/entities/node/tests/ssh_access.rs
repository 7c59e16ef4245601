//! The SSH keys of a tenant that is set up.

use super::*;
use crate::state_machine::RequestOrigin;

fn key(n: u128) -> AuthorizedKey {
    AuthorizedKey {
        id: crate::id::SshKeyId(Uuid::from_u128(n)),
        public_key: format!("ssh-ed25519 {n}"),
        fingerprint: format!("SHA256:{n}"),
    }
}

/// A key of RSA with 16,384 bits, the longest that is registered.
fn long_keys(count: u128) -> Vec<AuthorizedKey> {
    let long = |n| AuthorizedKey {
        public_key: format!("ssh-rsa {n:02764}"),
        fingerprint: format!("SHA256:{n:043}"),
        ..key(n)
    };
    (0..count).map(long).collect()
}

fn wish(revision: u64) -> Instruction {
    Instruction::ReconcileLogins { allocation_id: TENANT, revision, keys: vec![key(revision.into())] }
}

fn order(story: &Story) -> SshKeysTask {
    story.node.tenancy.holds[&TENANT].logins.order.clone().unwrap()
}

fn report(story: &Story, attempt: u32, verdict: TaskOutcome) -> Request {
    let task_id = order(story).work.task_id;
    Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output: None, unproved: None }
}

const DONE: TaskOutcome = TaskOutcome::Succeeded { proof: None };

/// The keys in the agent's task.
fn offered(story: &Story) -> Vec<AuthorizedKey> {
    let step = story.ask(&agent(), poll()).unwrap();
    let Reply::Work { orders } = step.reply else { panic!("{:?}", step.reply) };
    let keys = orders.into_iter().find_map(|order| match order.what {
        TaskKind::ReconcileLogins { keys, .. } => Some(keys),
        TaskKind::Provision { .. }
        | TaskKind::Release { .. }
        | TaskKind::OfNode { .. }
        | TaskKind::OpenTerminal { .. } => None,
    });
    keys.unwrap_or_default()
}

#[test]
fn key_change_becomes_a_task_and_its_result_is_published() {
    let notified = node().active().ready().after_fact(wish(1));
    assert_eq!((notified.pending_tasks(), offered(&notified)), (vec!["reconcile logins"], vec![key(1)]));
    let done = report(&notified, 1, DONE);
    let step = notified.ask(&agent(), done.clone()).unwrap();
    assert_eq!(
        (step.audit[0].action.as_str(), &step.audit[0].metadata["result"]),
        ("ssh_keys.reconcile", &json!("ok"))
    );
    let done = notified.agent(done).publishes(&["node.logins_written"]);
    assert_eq!(done.pending_tasks(), Vec::<&str>::new());
    // A repeated request is confirmed again; an older revision is ignored.
    done.clone().after_fact(wish(1)).publishes(&["node.logins_written"]);
    assert_eq!(done.after_fact(wish(0)).pending_tasks(), Vec::<&str>::new());
}

#[test]
fn later_key_change_wins_although_the_first_result_arrives_late() {
    let first = node().active().ready().after_fact(wish(1));
    let late = report(&first, 1, DONE);
    let second = first.after_fact(wish(2));
    assert_eq!((order(&second).work.attempt, offered(&second)), (2, vec![key(2)]));
    assert_eq!(second.refuses(&agent(), late), Rejection::StaleAttempt { given: 1, current: 2 });
    second.clone().after_fact(wish(1)).unmoved();
    let done = report(&second, 2, DONE);
    assert_eq!(second.agent(done).node.tenancy.holds[&TENANT].logins.written, 2);
}

#[test]
fn key_change_waits_during_set_up_and_joins_the_set_up_before_it() {
    let early = node().active().reserved().after_fact(wish(1));
    assert!(early.node.tenancy.holds[&TENANT].logins.order.is_none());
    let waits = node().active().provisioning().after(TimeDelta::seconds(1)).after_fact(wish(1));
    assert_eq!(waits.pending_tasks(), ["provision"]);
    assert_eq!(waits.reports(DONE).publishes(&["node.tenant_ready"]).pending_tasks(), ["reconcile logins"]);
    let deadline_at = early.now + TimeDelta::seconds(600);
    let set_up = early.after_fact(Instruction::Provision { allocation_id: TENANT, deadline_at }).reports(DONE);
    assert_eq!(set_up.publishes(&["node.tenant_ready", "node.logins_written"]).pending_tasks(), Vec::<&str>::new());
}

#[test]
fn failed_or_unreported_key_task_is_retried_with_backoff_and_shows_as_overdue() {
    let notified = node().active().ready().after_fact(wish(1));
    assert!(notified.node.deadline().unwrap().reason.contains("are not written yet"));
    let rests = report(&notified, 1, failed());
    let rests = notified.agent(rests);
    assert_eq!(rests.pending_tasks(), Vec::<&str>::new());
    let repeated = rests.after(resend_timer::FIRST).ticked();
    assert_eq!((order(&repeated).work.attempt, repeated.pending_tasks()), (2, vec!["reconcile logins"]));
    let silent = repeated.clone().after(TimeDelta::seconds(601)).ticked();
    assert_eq!(order(&silent).work.attempt, 3);
    let rests = report(&repeated, 2, failed());
    let rests = repeated.after(TimeDelta::seconds(30)).agent(rests);
    assert_eq!(order(&rests).rests_until.unwrap() - rests.now, TimeDelta::seconds(40));
}

#[test]
fn key_task_is_dispatched_once_the_agent_supports_it() {
    let mut notified = node().active().ready().after_fact(wish(1));
    notified.node.agent.contact.as_mut().unwrap().protocol = 2;
    assert_eq!(notified.pending_tasks(), Vec::<&str>::new());
    notified.node.agent.contact.as_mut().unwrap().protocol = 3;
    assert_eq!(notified.pending_tasks(), ["reconcile logins"]);
}

#[test]
fn releasing_tenant_gets_no_key_task_and_its_late_result_is_accepted() {
    let notified = node().active().ready().after_fact(wish(1));
    let late = report(&notified, 1, DONE);
    let leaving = notified.cleaning(1);
    assert_eq!(leaving.pending_tasks(), ["release"]);
    leaving.clone().after_fact(wish(2)).unmoved();
    leaving.agent(late).reports(PROVED).publishes(&["node.tenant_gone"]);
}

#[test]
fn key_tasks_of_two_tenants_are_independent() {
    let two = node().active().ready().after_fact(reserve(OTHER, 1)).after_fact(wish(1));
    assert!(two.node.tenancy.holds[&OTHER].logins.order.is_none());
    assert_eq!(two.node.tenancy.holds[&OTHER].keys, []);
}

#[test]
fn keys_of_one_tenant_are_bounded_and_take_no_room_of_another() {
    let with_keys = |allocation_id| Instruction::Reserve {
        allocation_id,
        gpu_count: 1,
        keys: long_keys(8),
        revision: 0,
        reimages: false,
    };
    let two = node().active().after_fact(with_keys(TENANT)).after_fact(with_keys(OTHER));
    assert_eq!(two.node.tenancy.holds[&OTHER].keys, long_keys(8));
    // Of an allocation of the release before, the keys that fit remain.
    let more = two.after_fact(Instruction::ReconcileLogins { allocation_id: TENANT, revision: 1, keys: long_keys(32) });
    assert_eq!(more.node.tenancy.holds[&TENANT].keys, long_keys(8));
    let size = serde_json::to_string(&more.node).unwrap().len();
    assert!(size < 80 * 1024, "{size}");
}

#[test]
fn node_with_a_tenant_on_each_gpu_and_all_that_a_tenant_may_store_is_within_its_bound() {
    let mut story = node().active().ready();
    let origin = RequestOrigin::untraced("c".repeat(128)).traced(Some("0".repeat(55)), Some("t".repeat(512)));
    for n in 0..64 {
        let until = story.now + TimeDelta::seconds(60);
        story = story.after_fact(Instruction::OpenTerminal {
            session_id: TerminalSessionId(Uuid::from_u128(n)),
            allocation_id: TENANT,
            ends_at: until,
            begin_until: until,
            recording: crate::recording::RecordingTerms::default(),
        });
    }
    let mut hold = story.node.tenancy.holds[&TENANT].clone();
    assert_eq!(hold.terminals.len(), 64);
    hold.terminals.values_mut().for_each(|order| order.work.origin = Some(origin.clone()));
    hold.keys = long_keys(8);
    hold.remains = Some("\u{1f511}".repeat(500));
    story.node.tenancy.holds = (0..64).map(|n| (AllocationId(Uuid::from_u128(n)), hold.clone())).collect();
    let size = serde_json::to_string(&story.node).unwrap().len();
    assert!(size < Node::SNAPSHOT_MOST, "{size}");
}
