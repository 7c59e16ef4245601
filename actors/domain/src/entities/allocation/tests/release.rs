//! Releases: clean-up on the node, its failures, and messages that are lost or repeated.

use super::*;

#[test]
fn allocation_is_released_only_by_its_own_nodes_proof() {
    let releasing = allocation().active().released_by_ann();
    let stays = releasing.clone().after_fact(Fact::Cleaned { node_id: ELSEWHERE, attempt: 1 });
    stays.unmoved().expect("releasing");
    let late = releasing.at_its_deadline().ticked().expect("release_failed");
    late.after_fact(Fact::Cleaned { node_id: NODE, attempt: 1 }).expect("released");
}

#[test]
fn failed_clean_up_is_retried_with_capped_backoff() {
    let mut story = allocation().active().released_by_ann().policy(PolicyKey::AllocationReleaseBackoffMax, 5);
    let mut pauses = Vec::new();
    for attempt in 1..=5 {
        assert_eq!(story.allocation.attempt(), attempt);
        story = story.clean_up_failed().expect("release_failed").publishes(&["provisioning.release_failed"]);
        pauses.push((story.allocation.timer().unwrap() - story.now).num_seconds());
        story = story.at_its_timer().ticked().expect("releasing").publishes(&["provisioning.release_requested"]);
    }
    assert_eq!(pauses, [1, 2, 4, 5, 5]);
}

#[test]
fn exhausted_clean_ups_fence_the_node_and_await_an_operator() {
    let stuck = allocation().active().released_by_ann().exhausted().expect("release_failed");
    let stuck = stuck.publishes(&["provisioning.release_failed", "provisioning.release_exhausted"]);
    assert!(stuck.allocation.deadline().unwrap().reason.contains("retry-release or force-release"));
    // Only an operator ends this state; the fence is resent, in case it was lost.
    let days_later = stuck.clone().after(TimeDelta::days(9)).ticked().publishes(&["provisioning.release_exhausted"]);
    assert_eq!(days_later.allocation.phase, stuck.allocation.phase);

    let retried = stuck.clone().by(&admin(), Request::RetryRelease { reason: "repaired".into() }).expect("releasing");
    assert_eq!(retried.allocation.attempt(), 2);
    retried.cleaned().expect("released");

    let forced = stuck.by(&admin(), Request::ForceRelease { reason: "burnt".into() });
    forced.expect("released").publishes(&["provisioning.released", "provisioning.release_forced"]);
}

#[test]
fn clean_up_timeout_is_a_failure() {
    let late = allocation().active().released_by_ann().at_its_deadline().ticked().expect("release_failed");
    let Phase::ReleaseFailed { reason, .. } = &late.allocation.phase else {
        panic!("{late:?}", late = late.allocation)
    };
    assert_eq!(reason, "release_timeout");
}

#[test]
fn failed_release_says_in_its_state_reason_what_is_left_and_where() {
    let releasing = allocation().active().released_by_ann();
    let (reason, detail) = ("cleanup_incomplete".to_owned(), "Tmp files of uid 70001 in /tmp (/tmp/x: EIO)".to_owned());
    let failed = releasing.after_fact(Fact::CleanupFailed { node_id: NODE, attempt: 1, reason, detail });
    let failed = failed.expect("release_failed");
    let state_reason = &failed.allocation.history.last().unwrap().reason;
    assert_eq!(state_reason.as_str(), "cleanup_incomplete: Tmp files of uid 70001 in /tmp (/tmp/x: EIO)");
    // The counted and published reason stays a code.
    let Phase::ReleaseFailed { reason, .. } = &failed.allocation.phase else { panic!("{:?}", failed.allocation) };
    assert_eq!(reason, "cleanup_incomplete");
}

#[test]
fn failure_of_an_abandoned_attempt_is_ignored() {
    let second = allocation().active().released_by_ann().clean_up_failed().at_its_timer().ticked();
    assert_eq!(second.allocation.attempt(), 2);
    second
        .after_fact(Fact::CleanupFailed { node_id: NODE, attempt: 1, reason: "r".into(), detail: String::new() })
        .unmoved()
        .expect("releasing");
}

#[test]
fn repeated_release_has_no_effect() {
    allocation().active().released_by_ann().released_by_ann().unmoved().expect("releasing");
}

#[test]
fn early_tick_resends_what_may_have_been_lost() {
    allocation().ticked().publishes(&["provisioning.requested"]);
    allocation().reserved().ticked().publishes(&["provisioning.started"]);
    allocation().active().released_by_ann().ticked().publishes(&["provisioning.release_requested"]);
    allocation().active().ticked().unmoved();
}

#[test]
fn unanswered_event_is_resent_with_backoff_before_the_deadline() {
    let mut story = allocation().reserved();
    let begin = story.now;
    let mut published = Vec::new();
    while story.allocation.state() == "provisioning" {
        story = story.at_its_timer().ticked();
        published.push((story.now - begin).num_seconds());
    }
    assert_eq!(published, [10, 20, 40, 80, 160, 320, 600]);
    story.expect("releasing");
}

#[test]
fn tenant_that_still_counts_a_released_allocation_is_notified_again() {
    let counted = || Fact::StillCounted { logins_revision: 0 };
    allocation().active().after_fact(counted()).unmoved();
    allocation().released_by_ann().after_fact(counted()).publishes(&["provisioning.released"]);
}

#[test]
fn forced_release_is_resent_to_a_node_that_missed_it() {
    let forced = allocation().active().released_by_ann().exhausted();
    let forced = forced.by(&admin(), Request::ForceRelease { reason: "burnt".into() });
    let asked = forced.after_fact(Fact::Reserved { node_id: NODE, placed: placed() });
    asked.expect("released").publishes(&["provisioning.release_forced"]);
}

#[test]
fn snapshot_after_a_thousand_failed_clean_ups_is_below_16_kib() {
    let mut story = allocation().active().released_by_ann().policy(PolicyKey::AllocationReleaseMaxAttempts, 100);
    for _ in 0..1_000 {
        let detail = "not certainly gone: a file system below /home ".repeat(4);
        let attempt = story.allocation.attempt();
        let failed = Fact::CleanupFailed { node_id: NODE, attempt, reason: "cleanup_incomplete".into(), detail };
        story = story.after_fact(failed);
        let is_exhausted =
            matches!(story.allocation.phase, Phase::ReleaseFailed { next: ReleaseRetry::Operator(_), .. });
        story = match is_exhausted {
            true => story.by(&admin(), Request::RetryRelease { reason: "repaired".into() }),
            false => story.at_its_timer().ticked(),
        };
    }
    let size = serde_json::to_string(&story.cleaned().expect("released").allocation).unwrap().len();
    assert!(size < 16 * 1024, "{size}");
}
