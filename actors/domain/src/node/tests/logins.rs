//! Who may log in to a tenant that is set up.

use super::*;

fn key(n: u128) -> AuthorizedKey {
    AuthorizedKey {
        id: crate::id::SshKeyId(Uuid::from_u128(n)),
        public_key: format!("ssh-ed25519 {n}"),
        fingerprint: format!("SHA256:{n}"),
    }
}

fn wish(revision: u64) -> Command {
    Command::ReconcileLogins { allocation_id: TENANT, revision, keys: vec![key(revision.into())] }
}

fn order(story: &Story) -> LoginOrder {
    story.node.holds[&TENANT].logins.order.clone().unwrap()
}

fn report(story: &Story, attempt: u32, verdict: Verdict) -> Command {
    let task_id = order(story).work.task_id;
    Command::Report { serial: SERIAL.into(), task_id, attempt, verdict, output: None }
}

const DONE: Verdict = Verdict::Succeeded { proof: None };

/// The keys that the agent is offered.
fn offered(story: &Story) -> Vec<AuthorizedKey> {
    let step = story.ask(&agent(), poll()).unwrap();
    let Reply::Work { orders } = step.reply else { panic!("{:?}", step.reply) };
    let keys = orders.into_iter().find_map(|order| match order.what {
        What::ReconcileLogins { keys, .. } => Some(keys),
        What::Provision { .. } | What::Release { .. } | What::OfNode { .. } | What::OpenTerminal { .. } => None,
    });
    keys.unwrap_or_default()
}

#[test]
fn a_change_of_keys_is_a_task_and_the_allocation_hears_that_it_is_done() {
    let told = node().active().ready().told(wish(1));
    assert_eq!((told.orders(), offered(&told)), (vec!["reconcile logins"], vec![key(1)]));
    let done = report(&told, 1, DONE);
    let step = told.ask(&agent(), done.clone()).unwrap();
    assert_eq!(
        (step.audit[0].action.as_str(), &step.audit[0].metadata["result"]),
        ("ssh_keys.reconcile", &json!("ok"))
    );
    let done = told.agent(done).says(&["node.logins_written"]);
    assert_eq!(done.orders(), Vec::<&str>::new());
    // Asked again, it says so again; an older wish is nobody's any more.
    done.clone().told(wish(1)).says(&["node.logins_written"]);
    assert_eq!(done.told(wish(0)).orders(), Vec::<&str>::new());
}

#[test]
fn of_two_wishes_the_later_one_wins_though_the_result_of_the_first_comes_late() {
    let first = node().active().ready().told(wish(1));
    let late = report(&first, 1, DONE);
    let second = first.told(wish(2));
    assert_eq!((order(&second).work.attempt, offered(&second)), (2, vec![key(2)]));
    assert_eq!(second.refuses(&agent(), late), Rejection::StaleAttempt { given: 1, current: 2 });
    second.clone().told(wish(1)).unmoved();
    let done = report(&second, 2, DONE);
    assert_eq!(second.agent(done).node.holds[&TENANT].logins.written, 2);
}

#[test]
fn while_the_tenant_is_set_up_a_wish_waits_and_before_that_it_comes_with_the_rest() {
    let early = node().active().reserved().told(wish(1));
    assert!(early.node.holds[&TENANT].logins.order.is_none());
    let waits = node().active().provisioning().after(TimeDelta::seconds(1)).told(wish(1));
    assert_eq!(waits.orders(), ["provision"]);
    assert_eq!(waits.reports(DONE).says(&["node.tenant_ready"]).orders(), ["reconcile logins"]);
    let deadline_at = early.now + TimeDelta::seconds(600);
    let set_up = early.told(Command::Provision { allocation_id: TENANT, deadline_at }).reports(DONE);
    assert_eq!(set_up.says(&["node.tenant_ready", "node.logins_written"]).orders(), Vec::<&str>::new());
}

#[test]
fn what_failed_or_was_not_reported_on_is_offered_again_later_and_later_and_shows_as_overdue() {
    let told = node().active().ready().told(wish(1));
    assert!(told.node.deadline().unwrap().reason.contains("are not written yet"));
    let rests = report(&told, 1, failed());
    let rests = told.agent(rests);
    assert_eq!(rests.orders(), Vec::<&str>::new());
    let again = rests.after(again::FIRST).ticked();
    assert_eq!((order(&again).work.attempt, again.orders()), (2, vec!["reconcile logins"]));
    let silent = again.clone().after(TimeDelta::seconds(601)).ticked();
    assert_eq!(order(&silent).work.attempt, 3);
    let rests = report(&again, 2, failed());
    let rests = again.after(TimeDelta::seconds(30)).agent(rests);
    assert_eq!(order(&rests).rests_until.unwrap() - rests.now, TimeDelta::seconds(40));
}

#[test]
fn an_agent_that_does_not_know_the_task_is_offered_it_once_it_does() {
    let mut told = node().active().ready().told(wish(1));
    told.node.seen.as_mut().unwrap().protocol = 2;
    assert_eq!(told.orders(), Vec::<&str>::new());
    told.node.seen.as_mut().unwrap().protocol = 3;
    assert_eq!(told.orders(), ["reconcile logins"]);
}

#[test]
fn a_tenant_that_goes_is_told_nothing_more_and_a_late_report_of_it_is_taken() {
    let told = node().active().ready().told(wish(1));
    let late = report(&told, 1, DONE);
    let leaving = told.cleaning(1);
    assert_eq!(leaving.orders(), ["release"]);
    leaving.clone().told(wish(2)).unmoved();
    leaving.agent(late).reports(PROVED).says(&["node.tenant_gone"]);
}

#[test]
fn of_two_tenants_each_has_its_own() {
    let two = node().active().ready().told(reserve(OTHER, 1)).told(wish(1));
    assert!(two.node.holds[&OTHER].logins.order.is_none());
    assert_eq!(two.node.holds[&OTHER].keys, []);
}
