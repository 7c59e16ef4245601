//! Validations with load: who orders them, how the SKU's minimums judge them, and what follows.

use super::health::xid;
use super::*;
use crate::validation::{Measurement, ValidationLevel, ValidationMinimums};
use serde_json::json;

/// Of the SKU of these tests, for the disk.
const MINIMUM: u64 = 500;

impl Story {
    /// The SKU wants this much of the disk from now on; `None`: nothing.
    fn wants(mut self, minimum: Option<u64>) -> Self {
        let minimums = minimum.map(|minimum| (Measurement::DiskRead, minimum)).into_iter().collect();
        self.policy.set_minimums(registration().sku.sku_id, ValidationMinimums(minimums));
        self
    }

    fn validation(self, level: ValidationLevel) -> Self {
        self.admin(Request::Validate { level, reason: "r".into() })
    }

    fn quick(self) -> Self {
        self.validation(ValidationLevel::Quick)
    }

    /// The agent reports that it has measured this of the disk.
    #[track_caller]
    fn measures(self, disk_read: u64) -> Self {
        self.answers(json!({ "measurements": { "disk_read_mib_per_second": disk_read } }))
    }

    /// The agent reports this output of the open validation.
    #[track_caller]
    fn answers(self, output: serde_json::Value) -> Self {
        let request = self.validation_report(TaskOutcome::Succeeded { proof: None }, output);
        self.agent(request)
    }

    #[track_caller]
    fn validation_report(&self, verdict: TaskOutcome, output: serde_json::Value) -> Request {
        let is_it = |task: &&NodeTask| task.task_type == TaskType::NodeValidate && task.phase == NodeTaskPhase::Open;
        let work = &self.node.tasks.values().find(is_it).expect("a validation is open").work;
        let (task_id, attempt) = (work.task_id, work.attempt);
        Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output: Some(output) }
    }

    fn authors(&self) -> Vec<HoldAuthor> {
        self.node.quarantine_holds().into_iter().map(|hold| hold.author).collect()
    }

    #[track_caller]
    fn expect_free(self) -> Self {
        assert_eq!(self.node.not_schedulable(), None);
        assert_eq!(self.node.gpus_free(), GPUS);
        self
    }
}

#[test]
fn machine_below_a_minimum_is_held_with_the_reason_and_lifted_by_the_next_validation_that_it_passes() {
    let below = node().active().wants(Some(MINIMUM)).quick().measures(MINIMUM - 1).expect("quarantined");
    assert_eq!(below.authors(), [HoldAuthor::Validation]);
    let hold = below.node.quarantine_holds().remove(0);
    assert!(hold.message.contains("disk_read_mib_per_second is 499, and the SKU wants at least 500"), "{hold:?}");
    let known = below.node.validation.as_ref().unwrap();
    assert_eq!((known.level, known.is_passed(), known.measurements.len()), (ValidationLevel::Quick, false, 1));
    let passed = below.quick().measures(MINIMUM).expect("active").expect_free();
    assert!(passed.node.validation.as_ref().unwrap().is_passed());
}

#[test]
fn minimums_are_those_of_the_moment_of_the_report() {
    let below = node().active().wants(Some(MINIMUM)).quick().measures(100).expect("quarantined");
    let lowered = below.wants(Some(100)).quick().measures(100).expect("active");
    lowered.quick().wants(Some(MINIMUM)).measures(100).expect("quarantined");
}

#[test]
fn validation_that_is_passed_takes_back_no_hold_of_another() {
    let held = node().active().wants(Some(MINIMUM)).quarantined().quick().measures(1);
    assert_eq!(held.authors(), [HoldAuthor::Administrator, HoldAuthor::Validation]);
    let passed = held.quick().measures(MINIMUM).expect("quarantined");
    assert_eq!(passed.authors(), [HoldAuthor::Administrator]);
}

#[test]
fn check_without_load_shows_nothing_where_the_sku_has_minimums() {
    let order = || Request::OrderTask { task_type: TaskType::NodeValidate, reason: "r".into() };
    let held = node().active().wants(Some(MINIMUM)).quick().measures(1).expect("quarantined");
    let checked = held.admin(order()).answers(json!({})).expect("quarantined");
    checked.wants(None).admin(order()).answers(json!({})).expect("active");
}

#[test]
fn failed_tool_is_a_hold_and_a_missing_one_only_where_the_sku_wants_it() {
    let failed = json!({ "failed": { "disk_read_mib_per_second": "fio hung" } });
    let held = node().active().quick().answers(failed).expect("quarantined");
    assert!(held.node.reason.message.contains("fio hung"), "{:?}", held.node.reason);
    let missing = json!({ "not_tested": { "disk_read_mib_per_second": "fio is not installed" } });
    let free = node().active().quick().answers(missing.clone()).expect("active").expect_free();
    assert_eq!(free.node.validation.as_ref().unwrap().not_tested.len(), 1);
    let held = node().active().wants(Some(1)).quick().answers(missing).expect("quarantined");
    assert!(held.node.reason.message.contains("fio is not installed"), "{:?}", held.node.reason);
}

#[test]
fn load_is_refused_while_a_tenant_is_there_and_no_tenant_comes_while_it_is_applied() {
    for story in [node().active().ready(), node().active().reserved(), node().active().releasing()] {
        for level in [ValidationLevel::Quick, ValidationLevel::Deep] {
            let refused = story.refuses(&admin(), Request::Validate { level, reason: "r".into() });
            assert_eq!(refused, Rejection::InUse { allocation_id: TENANT });
        }
    }
    let open = node().active().validation(ValidationLevel::Deep);
    assert_eq!(open.node.gpus_free(), 0);
    let refused = open.refuses(&worker(), reserve(TENANT, 1));
    assert_eq!(refused, Rejection::NotSchedulable { why: "it is being validated".into() });
    open.answers(json!({})).expect_free();
}

#[test]
fn deep_validation_has_as_much_longer_as_its_load_takes_also_when_it_is_sent_again() {
    let quick = node().active().quick();
    let deep = node().policy(PolicyKey::NodeDeepValidation, 1200).active().validation(ValidationLevel::Deep);
    let time = |story: &Story| story.node.tasks.values().next().unwrap().work.deadline_at - story.now;
    let longest = time(&deep);
    assert_eq!(longest - time(&quick), TimeDelta::seconds(1200));
    let again = deep.after(longest).ticked();
    assert_eq!((time(&again), again.node.tasks.values().next().unwrap().work.attempt), (longest, 2));
}

#[test]
fn node_of_a_sku_with_minimums_is_active_only_after_it_passed() {
    let enrolled = node().wants(Some(MINIMUM)).enrolled().agent(poll()).expect("enrolling");
    assert_eq!(enrolled.pending_tasks(), ["node.validate"]);
    assert_eq!(enrolled.node.deadline().unwrap().reason, "the machine has not passed its first validation");
    let same = enrolled.clone().agent(poll()).after_heartbeat().expect("enrolling");
    assert_eq!(same.pending_tasks(), ["node.validate"], "one, not one for each contact");
    enrolled.clone().measures(MINIMUM).publishes(&["node.state_changed"]).expect("active").expect_free();
    let held = enrolled.measures(1).expect("quarantined").agent(poll()).after_heartbeat().expect("quarantined");
    held.quick().measures(MINIMUM).expect("active").expect_free();
    // No minimum: active at once, as before there were any.
    assert_eq!(node().active().expect("active").pending_tasks(), Vec::<&str>::new());
}

#[test]
fn node_that_is_released_before_it_was_active_is_validated_again_and_has_time_for_it() {
    let held = node().wants(Some(MINIMUM)).enrolled().agent(poll()).measures(1).expect("quarantined");
    let late = held.after(TimeDelta::days(2)).after_heartbeat();
    let released = late.admin(Request::ReleaseQuarantine { reason: "r".into() }).ticked().expect("enrolling");
    assert_eq!(released.pending_tasks(), ["node.validate"]);
    released.measures(MINIMUM).expect("active").expect_free();
}

#[test]
fn first_validation_is_of_the_machine_that_enrolled_last() {
    let enrolled = node().wants(Some(MINIMUM)).enrolled().agent(poll());
    let other = enrolled.agent(heartbeat(NodeHealthStatus::Ok, inventory(GPUS - 1))).measures(MINIMUM);
    assert!(other.node.validation.as_ref().unwrap().is_passed());
    let again = other.expect("enrolling").invited().agent(enrollment()).agent(poll()).expect("enrolling");
    assert_eq!(again.pending_tasks(), ["node.validate"]);
}

#[test]
fn release_of_its_hold_is_tried_by_another_validation() {
    let held = node().active().wants(Some(MINIMUM)).quick().measures(1).expect("quarantined");
    let release = || Request::ReleaseQuarantine { reason: "r".into() };
    let released = held.after_heartbeat().admin(release()).expect("active");
    assert_eq!((released.pending_tasks(), released.node.gpus_free()), (vec!["node.validate"], 0));
    assert!(released.effects.contains(&Effect::WakeNode(NODE)));
    released.clone().measures(1).expect("quarantined");
    released.measures(MINIMUM).expect("active").expect_free();
    // The hold of another says nothing about the machine's speed.
    let other = node().active().quarantined().after_heartbeat().admin(release()).expect("active").expect_free();
    assert_eq!(other.pending_tasks(), Vec::<&str>::new());
}

#[test]
fn repair_ends_with_a_validation_that_the_minimums_judge() {
    let lost = node().wants(Some(MINIMUM)).enrolled().agent(poll()).measures(MINIMUM).beats("boot-1", &[xid(79, 3)]);
    let rebooted = lost.ends(TaskType::NodeReboot, TaskOutcome::Succeeded { proof: None }).beats("boot-2", &[]);
    assert!(rebooted.node.tasks.values().any(|task| task.validation.is_some()));
    let slow = rebooted.clone().measures(1).expect("quarantined").beats("boot-2", &[]);
    assert_eq!(slow.node.repair.as_ref().unwrap().phase.name(), "awaits_operator");
    let repaired = slow.quick().measures(MINIMUM).beats("boot-2", &[]).expect("active").expect_free();
    assert!(repaired.node.repair.is_none());
    rebooted.measures(MINIMUM).beats("boot-2", &[]).expect("active").expect_free();
}

#[test]
fn old_report_of_a_validation_that_was_sent_again_is_refused() {
    let open = node().active().wants(Some(MINIMUM)).quick();
    let old = open.validation_report(TaskOutcome::Succeeded { proof: None }, json!({}));
    let again = open.after(TimeDelta::days(1)).ticked();
    assert!(matches!(again.refuses(&agent(), old), Rejection::StaleAttempt { given: 1, current: 2 }));
    again.measures(MINIMUM);
}
