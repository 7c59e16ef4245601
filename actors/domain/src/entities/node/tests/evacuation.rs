//! Tenants that are asked to leave: who is, until when, and what ends it.

use super::health::{found, report_of, xid};
use super::*;
use crate::finding::{FindingClass, FindingScope, TABLE};

const LIMIT: TimeDelta = TimeDelta::seconds(86_400);
/// An error that its tenant works on with, and that takes the GPU out of service.
const TO_LEAVE: u32 = 46;

impl Story {
    fn release_at(&self) -> Option<Timestamp> {
        self.node.evacuation_of(TENANT).map(|evacuation| evacuation.release_at)
    }

    fn at(mut self, now: Timestamp) -> Self {
        self.now = now;
        self
    }
}

/// A tenant of the first GPU that is asked to leave it.
fn evacuated() -> Story {
    node().active().ready().finds(&[xid(TO_LEAVE, 0)])
}

#[test]
fn every_row_that_evacuates_gives_its_tenant_the_time_of_the_policy_and_no_other_row_does() {
    for rule in TABLE {
        let name = format!("{}/{}", rule.probe, rule.code);
        let on = |gpu: u32| found(rule.probe, rule.code, (rule.scope == FindingScope::Gpu).then_some(gpu));
        let story = node().active().ready();
        let release_at = rule.has(FindingClass::Evacuate).then(|| story.now + LIMIT);
        assert_eq!(story.clone().finds(&[on(0)]).release_at(), release_at, "{name}");
        let of_another = release_at.filter(|_| rule.scope == FindingScope::Machine);
        assert_eq!(story.finds(&[on(3)]).release_at(), of_another, "{name}");
    }
}

#[test]
fn tenant_is_notified_once_and_released_at_the_deadline() {
    let begun = evacuated().publishes(&["node.evacuation_begun"]);
    let release_at = begun.release_at().unwrap();
    let later = begun.after(TimeDelta::hours(1)).finds(&[xid(TO_LEAVE, 0)]).publishes(&[]);
    assert_eq!(later.release_at(), Some(release_at), "another heartbeat moves no deadline");
    let early = later.clone().at(release_at - TimeDelta::seconds(1)).ticked();
    assert!(!early.published.iter().any(|event| matches!(event, Event::EvacuationDue { .. })));
    let due = later.at(release_at).ticked();
    let is_due = |story: &Story| story.published.iter().any(|event| matches!(event, Event::EvacuationDue { .. }));
    assert!(is_due(&due));
    // The release may have been lost: it is requested again, ever more rarely, until the clean-up begins.
    let repeated = due.at_its_timer().ticked();
    assert!(is_due(&repeated) && repeated.now > release_at);
    let releasing = repeated.cleaning(1);
    assert_eq!(releasing.release_at(), None);
    assert!(!is_due(&releasing.after(LIMIT).ticked()));
}

#[test]
fn lost_release_is_requested_again_also_after_the_finding_has_ended() {
    let begun = evacuated();
    let release_at = begun.release_at().unwrap();
    let ended = begun.at(release_at).ticked().finds(&[]);
    assert_eq!(ended.release_at(), Some(release_at), "the release is on its way");
    let repeated = ended.at_its_timer().ticked();
    assert!(
        repeated.published.iter().any(|event| matches!(event, Event::EvacuationDue { .. })),
        "{:?}",
        repeated.published
    );
    assert!(
        repeated.node.timer().is_some_and(|at| at > repeated.now),
        "a timer in the past would wake the node without end"
    );
}

#[test]
fn node_wakes_for_the_deadline_whatever_its_state() {
    let release_at = evacuated().release_at().unwrap();
    let quarantined = evacuated().quarantined();
    let due: Vec<_> = std::iter::successors(Some(quarantined), |story| {
        let at = story.node.timer().filter(|at| *at <= release_at)?;
        Some(story.clone().at(at).ticked())
    })
    .take(40)
    .collect();
    let last = due.last().unwrap();
    assert_eq!(last.now, release_at);
    assert!(last.published.iter().any(|event| matches!(event, Event::EvacuationDue { .. })));
}

#[test]
fn finding_that_ends_or_is_cleared_before_the_deadline_releases_nothing() {
    let release_at = evacuated().release_at().unwrap();
    let cleared = evacuated().clears(0).publishes(&["node.evacuation_ended"]);
    let ended = evacuated().finds(&[]).publishes(&["node.evacuation_ended"]);
    for story in [cleared, ended] {
        assert_eq!(story.release_at(), None);
        let over = story.at(release_at + LIMIT).ticked();
        assert!(
            !over.published.iter().any(|event| matches!(event, Event::EvacuationDue { .. })),
            "{:?}",
            over.published
        );
    }
    // One of two that ends leaves the other one.
    let one = node().active().ready().finds(&[xid(TO_LEAVE, 0), xid(109, 0)]).finds(&[xid(109, 0)]).publishes(&[]);
    assert_eq!(one.release_at(), Some(release_at));
}

#[test]
fn tenant_that_is_set_up_later_is_asked_to_leave_by_the_next_heartbeat() {
    let provisioning = node().active().provisioning().finds(&[xid(TO_LEAVE, 0)]).publishes(&[]);
    let ready = provisioning.reports(TaskOutcome::Succeeded { proof: None });
    ready.finds(&[xid(TO_LEAVE, 0)]).publishes(&["node.evacuation_begun"]);
}

#[test]
fn changed_policy_moves_no_deadline_that_a_tenant_knows() {
    let begun = evacuated();
    let release_at = begun.release_at();
    let shorter = begun.policy(PolicyKey::NodeEvacuate, 5).finds(&[xid(TO_LEAVE, 0)]);
    assert_eq!(shorter.release_at(), release_at);
    let short = node().policy(PolicyKey::NodeEvacuate, 5).active().ready().finds(&[xid(TO_LEAVE, 0)]);
    assert_eq!(short.release_at(), Some(short.now + TimeDelta::seconds(5)));
}

#[test]
fn heartbeat_while_a_tenant_is_to_leave_writes_nothing() {
    let story = evacuated();
    let sent_at = story.now;
    story.agent(report_of(vec![xid(TO_LEAVE, 0)], sent_at, inventory(GPUS))).unmoved();
}
