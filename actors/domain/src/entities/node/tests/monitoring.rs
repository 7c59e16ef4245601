//! Nodes whose agents poll for tasks and send no heartbeats.

use super::*;
use proptest::prelude::*;

/// The default of policy `node.offline_after_seconds`.
const OFFLINE_AFTER: i64 = 90;
/// A heartbeat may be so much later than the one that is stored.
const LAG: i64 = OFFLINE_AFTER / 3;

fn seconds(count: i64) -> TimeDelta {
    TimeDelta::seconds(count)
}

/// It polls every so many seconds, for this long, and sends no heartbeat.
fn polling(mut story: Story, every: i64, until: i64) -> Story {
    for _ in 0..until / every {
        story = story.after(seconds(every)).agent(poll());
    }
    story
}

fn unmonitored() -> Story {
    polling(node().active().after_heartbeat(), 10, OFFLINE_AFTER + LAG)
}

#[test]
fn node_that_polls_without_heartbeats_gets_no_new_tenant_until_its_next_heartbeat() {
    let story = polling(node().active().ready().after_heartbeat(), 10, OFFLINE_AFTER + LAG - 10);
    assert_eq!((story.node.not_schedulable(), story.node.deadline()), (None, None), "a heartbeat may be late");
    let story = polling(story, 10, 10).expect("active");
    let why = story.node.not_schedulable().unwrap();
    assert!(why.contains("has sent no heartbeat since 2027-01-15T08:00:00Z: its monitoring hangs"), "{why}");
    let refused = story.refuses(&worker(), reserve(OTHER, 1));
    assert_eq!(refused, Rejection::NotSchedulable { why: why.clone() });
    assert_eq!((story.node.gpus_free(), story.node.tenancy.holds.len()), (0, 1), "its tenant stays");
    let deadline = story.node.deadline().unwrap();
    assert!(deadline.at <= story.now && deadline.reason == why, "it is shown as overdue: {deadline:?}");
    let back = story.after_heartbeat().expect("active");
    assert_eq!((back.node.not_schedulable(), back.node.deadline(), back.node.gpus_free()), (None, None, GPUS - 1));
}

#[test]
fn first_poll_after_the_heartbeats_time_is_written_although_the_last_contact_is_recent() {
    let story = polling(node().active().after_heartbeat(), 10, OFFLINE_AFTER + LAG - 10);
    let story = story.after(seconds(9)).agent(poll());
    let shows = story.after(seconds(1)).agent(poll());
    assert!(shows.wrote && shows.node.agent.unmonitored_since().is_some());
    shows.after(seconds(1)).agent(poll()).unmoved();
}

#[test]
fn poll_after_a_silence_has_as_long_for_its_heartbeat_as_a_new_agent() {
    let story = node().active().after_heartbeat().offline().after(TimeDelta::hours(1)).agent(poll()).expect("active");
    assert_eq!(story.node.not_schedulable(), None, "the heartbeat follows");
    let story = polling(story, 10, OFFLINE_AFTER + LAG - 10);
    assert_eq!(story.node.not_schedulable(), None);
    let story = polling(story, 10, 10);
    assert_eq!(story.node.agent.unmonitored_since(), Some(start()), "since the last heartbeat of all");
}

#[test]
fn agent_that_enrolls_and_never_sends_a_heartbeat_gets_no_tenant() {
    let story = polling(node().active(), 10, OFFLINE_AFTER + LAG);
    assert_eq!(story.node.agent.unmonitored_since(), Some(start()));
}

#[test]
fn snapshot_of_an_earlier_release_counts_from_its_last_contact() {
    let mut story = node().active().after_heartbeat();
    let seen = story.node.agent.contact.as_mut().unwrap();
    seen.last_heartbeat = None;
    let last_seen_at = seen.last_seen_at;
    let stored = serde_json::to_value(&story.node).unwrap();
    assert!(stored["seen"].get("last_heartbeat").is_none());
    story.node = serde_json::from_value(stored).unwrap();
    assert_eq!(story.node.agent.unmonitored_since(), None);
    let story = polling(story, 10, OFFLINE_AFTER + LAG);
    assert_eq!(story.node.agent.unmonitored_since(), Some(last_seen_at));
    assert_eq!(story.after_heartbeat().node.agent.unmonitored_since(), None);
}

#[test]
fn node_that_is_not_monitored_is_overdue_while_it_has_an_agent_in_service() {
    let of = |story: Story| story.node.deadline().map(|deadline| deadline.reason);
    assert!(of(unmonitored()).is_some());
    assert!(of(unmonitored().quarantined()).is_some());
    assert_eq!(of(unmonitored().retired()), None, "out of service");
    assert_eq!(of(unmonitored().offline().expect("offline")), None, "silent, which its state says");
    let reactivate = Request::Reactivate { reason: "r".into() };
    let refused = unmonitored().retired().refuses(&admin(), reactivate);
    assert!(matches!(refused, Rejection::NotInOrder { why } if why.contains("no heartbeat since")));
}

proptest! {
    /// Whatever the order of polls and heartbeats: with a heartbeat in time the node is monitored, and without one for longer than the
    /// policy and the lag allow it is not, from the next poll on.
    #[test]
    fn node_is_monitored_exactly_while_its_heartbeats_are_in_time(
        contacts in proptest::collection::vec((1_i64..40, any::<bool>()), 1..60),
    ) {
        let mut story = node().active().after_heartbeat();
        let mut last = story.now;
        for (pause, is_heartbeat) in contacts {
            story = story.after(seconds(pause));
            story = if is_heartbeat { story.after_heartbeat() } else { story.agent(poll()) };
            if is_heartbeat {
                last = story.now;
            }
            let age = (story.now - last).num_seconds();
            let is_unmonitored = story.node.agent.unmonitored_since().is_some();
            prop_assert!(!is_unmonitored || age >= OFFLINE_AFTER, "{age} s after a heartbeat");
            prop_assert!(is_unmonitored || age < OFFLINE_AFTER + LAG, "{age} s after a heartbeat");
            prop_assert_eq!(story.node.not_schedulable().is_some(), is_unmonitored);
        }
    }
}
