//! Validations with load: who orders them, how the SKU's minimums judge them, and what follows.

use super::health::xid;
use super::*;
use crate::validation::{Measurement, ValidationLevel, ValidationMinimums};
use serde_json::json;

/// Of the SKU of these tests, for the disk.
const MINIMUM: u64 = 500;

/// A report that has measured this of the disk, and nothing else, as a machine without most tools.
pub(super) fn report(disk_read: u64) -> serde_json::Value {
    json!({ "measurements": { "disk_read_mib_per_second": disk_read }, "not_tested": not_tested(&[Measurement::DiskRead]) })
}

/// Why nothing was measured but these.
fn not_tested(measured: &[Measurement]) -> serde_json::Value {
    let others = Measurement::ALL.iter().filter(|it| !measured.contains(it));
    others.map(|it| (it.name().to_owned(), json!("no tool"))).collect::<serde_json::Map<_, _>>().into()
}

impl Story {
    /// The SKU wants this much of the disk from now on; `None`: nothing.
    fn wants(mut self, minimum: Option<u64>) -> Self {
        let minimums = minimum.map(|minimum| (Measurement::DiskRead, minimum)).into_iter().collect();
        self.policy.set_minimums(registration().sku.sku_id, ValidationMinimums(minimums));
        self
    }

    fn validation(self, level: ValidationLevel) -> Self {
        // Tasks of one moment would have one id.
        self.after(TimeDelta::milliseconds(1)).admin(Request::Validate { level, reason: "r".into() })
    }

    fn quick(self) -> Self {
        self.validation(ValidationLevel::Quick)
    }

    /// The agent reports that it has measured this of the disk.
    #[track_caller]
    fn measures(self, disk_read: u64) -> Self {
        self.answers(report(disk_read))
    }

    /// The agent reports this output of the open validation.
    #[track_caller]
    fn answers(self, output: serde_json::Value) -> Self {
        let request = self.validation_report(TaskOutcome::Succeeded { proof: None }, output);
        self.agent(request)
    }

    /// The agent reports that it has measured this of the disk, in the open validation of this level.
    #[track_caller]
    pub(super) fn ends_validation(self, level: ValidationLevel, disk_read: u64) -> Self {
        let is_it = |task: &&NodeTask| !task.has_ended() && task.validation.is_some_and(|order| order.level == level);
        let work = &self.node.tasks.by_id.values().find(is_it).expect("a validation of the level is open").work;
        let (task_id, attempt) = (work.task_id, work.attempt);
        let (verdict, output) = (TaskOutcome::Succeeded { proof: None }, Some(report(disk_read)));
        self.agent(Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output, unproved: None })
    }

    #[track_caller]
    fn validation_report(&self, verdict: TaskOutcome, output: serde_json::Value) -> Request {
        let is_it = |task: &&NodeTask| task.task_type == TaskType::NodeValidate && task.phase == NodeTaskPhase::Open;
        let work = &self.node.tasks.by_id.values().find(is_it).expect("a validation is open").work;
        let (task_id, attempt) = (work.task_id, work.attempt);
        Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output: Some(output), unproved: None }
    }

    fn authors(&self) -> Vec<HoldAuthor> {
        self.node.lifecycle.quarantine_holds().into_iter().map(|hold| hold.author).collect()
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
    let hold = below.node.lifecycle.quarantine_holds().remove(0);
    assert!(hold.message.contains("disk_read_mib_per_second is 499, and the SKU wants at least 500"), "{hold:?}");
    let known = below.node.validation.last.as_ref().unwrap();
    assert_eq!((known.level, known.is_passed(), known.measurements.len()), (ValidationLevel::Quick, false, 1));
    let passed = below.quick().measures(MINIMUM).expect("active").expect_free();
    assert!(passed.node.validation.last.as_ref().unwrap().is_passed());
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
fn check_without_load_shows_nothing_of_a_machine_that_failed_one_with_load() {
    let order = || Request::OrderTask { task_type: TaskType::NodeValidate, reason: "r".into() };
    let held = node().active().wants(Some(MINIMUM)).quick().measures(1).expect("quarantined");
    let checked = held.admin(order()).answers(json!({})).expect("quarantined");
    let checked = checked.wants(None).admin(order()).answers(json!({})).expect("quarantined");
    checked.quick().measures(1).expect("active");
    // It ends what a check without load began, unless the SKU has minimums.
    let failed = |story: &Story| story.validation_report(failed(), json!({}));
    let story = node().active().admin(order());
    let request = failed(&story);
    let held = story.agent(request).expect("quarantined");
    held.clone().wants(Some(MINIMUM)).admin(order()).answers(json!({})).expect("quarantined");
    held.admin(order()).answers(json!({})).expect("active");
}

#[test]
fn failed_tool_is_a_hold_and_a_missing_one_only_where_the_sku_wants_it() {
    let failed = json!({ "failed": { "disk_read_mib_per_second": "fio hung" } });
    let held = node().active().quick().answers(failed).expect("quarantined");
    assert!(held.node.lifecycle.reason.message.contains("fio hung"), "{:?}", held.node.lifecycle.reason);
    let mut missing = json!({ "not_tested": not_tested(&[]) });
    missing["not_tested"]["disk_read_mib_per_second"] = json!("fio is not installed");
    let free = node().active().quick().answers(missing.clone()).expect("active").expect_free();
    assert_eq!(free.node.validation.last.as_ref().unwrap().not_tested.len(), Measurement::ALL.len());
    let held = node().active().wants(Some(1)).quick().answers(missing).expect("quarantined");
    assert!(held.node.lifecycle.reason.message.contains("fio is not installed"), "{:?}", held.node.lifecycle.reason);
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
    open.measures(1).expect_free();
}

#[test]
fn deep_validation_has_as_much_longer_as_its_load_takes_also_when_it_is_sent_again() {
    let quick = node().active().quick();
    let deep = node().policy(PolicyKey::NodeDeepValidation, 1200).active().validation(ValidationLevel::Deep);
    let time = |story: &Story| story.node.tasks.by_id.values().next().unwrap().work.deadline_at - story.now;
    let longest = time(&deep);
    assert_eq!(longest - time(&quick), TimeDelta::seconds(1200));
    let repeated = deep.after(longest).ticked();
    assert_eq!((time(&repeated), repeated.node.tasks.by_id.values().next().unwrap().work.attempt), (longest, 2));
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
    assert!(other.node.validation.last.as_ref().unwrap().is_passed());
    let repeated = other.expect("enrolling").invited().agent(enrollment()).agent(poll()).expect("enrolling");
    assert_eq!(repeated.pending_tasks(), ["node.validate"]);
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
    let lost =
        node().wants(Some(MINIMUM)).enrolled().agent(poll()).measures(MINIMUM).after_report("boot-1", &[xid(79, 3)]);
    let rebooted = lost.ends(TaskType::NodeReboot, TaskOutcome::Succeeded { proof: None }).after_report("boot-2", &[]);
    assert!(rebooted.node.tasks.by_id.values().any(|task| task.validation.is_some()));
    let slow = rebooted.clone().measures(1).expect("quarantined").after_report("boot-2", &[]);
    assert_eq!(slow.node.repair.of_machine.as_ref().unwrap().phase.name(), "awaits_operator");
    let repaired = slow.quick().measures(MINIMUM).after_report("boot-2", &[]).expect("active").expect_free();
    assert!(repaired.node.repair.of_machine.is_none());
    rebooted.measures(MINIMUM).after_report("boot-2", &[]).expect("active").expect_free();
}

#[test]
fn old_report_of_a_validation_that_was_sent_again_is_refused() {
    let open = node().active().wants(Some(MINIMUM)).quick();
    let old = open.validation_report(TaskOutcome::Succeeded { proof: None }, json!({}));
    let repeated = open.after(TimeDelta::days(1)).ticked();
    assert!(matches!(repeated.refuses(&agent(), old), Rejection::StaleAttempt { given: 1, current: 2 }));
    repeated.measures(MINIMUM);
}

fn deep_failed() -> Story {
    node().active().wants(Some(MINIMUM)).validation(ValidationLevel::Deep).measures(1).expect("quarantined")
}

#[test]
fn hold_of_a_deep_validation_is_lifted_by_a_deep_one_alone() {
    let held = deep_failed();
    assert!(
        held.node.lifecycle.reason.message.ends_with("until it passes a deep validation"),
        "{:?}",
        held.node.lifecycle.reason
    );
    let quick = held.quick().measures(MINIMUM).expect("quarantined");
    assert_eq!(
        (quick.authors(), quick.node.failed_level()),
        (vec![HoldAuthor::Validation], Some(ValidationLevel::Deep))
    );
    // A quick one that fails as well does not replace what has to be passed.
    let repeated = quick.quick().measures(1).quick().measures(MINIMUM).expect("quarantined");
    let passed = repeated.validation(ValidationLevel::Deep).measures(MINIMUM).expect("active").expect_free();
    assert_eq!(passed.node.failed_level(), None);
    // A deep one is at least as strict as a quick one.
    let quick = node().active().wants(Some(MINIMUM)).quick().measures(1).expect("quarantined");
    quick.validation(ValidationLevel::Deep).measures(MINIMUM).expect("active").expect_free();
}

#[test]
fn release_of_the_hold_of_a_deep_validation_is_tried_by_a_deep_one() {
    let release = || Request::ReleaseQuarantine { reason: "r".into() };
    let released = deep_failed().after_heartbeat().admin(release()).expect("active");
    let order =
        |story: &Story| story.node.tasks.by_id.values().find_map(|task| task.validation.filter(|_| !task.has_ended()));
    assert_eq!(order(&released).map(|order| order.level), Some(ValidationLevel::Deep));
    let quick = released.quick();
    let quick = quick.ends_validation(ValidationLevel::Quick, MINIMUM).expect("active");
    assert_eq!(quick.node.gpus_free(), 0, "the deep one is open");
    quick.measures(MINIMUM).expect("active").expect_free();
}

#[test]
fn machine_that_failed_gets_no_tenant_where_its_hold_ended_without_a_validation() {
    let retired = deep_failed().admin(Request::Retire { reason: "r".into(), drain: false }).expect("retired");
    let back = retired.after_heartbeat().admin(Request::Reactivate { reason: "r".into() }).expect("active");
    let why = "it failed a deep validation, and has passed none of that level since: validate it again";
    assert_eq!(back.node.not_schedulable().as_deref(), Some(why));
    assert_eq!(back.node.gpus_free(), 0);
    let quick = back.quick().measures(MINIMUM);
    assert_eq!(quick.node.not_schedulable().as_deref(), Some(why));
    quick.validation(ValidationLevel::Deep).measures(MINIMUM).expect_free();
}

#[test]
fn node_of_an_earlier_release_has_the_level_of_its_last_validation() {
    let stored = |story: Story| {
        let mut body = serde_json::to_value(&story.node).unwrap();
        body.as_object_mut().unwrap().remove("failed_validation").expect("it is stored");
        Story { node: serde_json::from_value(body).unwrap(), ..story }
    };
    let held = stored(deep_failed());
    assert_eq!(held.node.failed_level(), Some(ValidationLevel::Deep));
    let quick = held.clone().quick().measures(MINIMUM).expect("quarantined");
    quick.validation(ValidationLevel::Deep).measures(MINIMUM).expect("active").expect_free();
    let released = held.after_heartbeat().admin(Request::ReleaseQuarantine { reason: "r".into() }).expect("active");
    assert_eq!(released.node.failed_level(), Some(ValidationLevel::Deep));
    released.measures(MINIMUM).expect_free();
    let passed = node().active().quick().measures(1);
    assert_eq!(passed.node.failed_level(), None);
}

#[test]
fn report_without_an_answer_for_every_test_is_a_failure() {
    for level in [ValidationLevel::Quick, ValidationLevel::Deep] {
        let of_the_disk = json!({ "measurements": { "disk_read_mib_per_second": 1 } });
        for output in [json!({}), of_the_disk, json!({ "not_tested": { "cpu_bogo_ops_per_second": "no tool" } })] {
            let held = node().active().validation(level).answers(output).expect("quarantined");
            let message = &held.node.lifecycle.reason.message;
            assert!(message.contains("has nothing about") && message.contains("memory_mib_per_second"), "{message}");
            let ended = held.node.tasks.by_id.values().find_map(NodeTask::failure).unwrap();
            assert_eq!(ended.0, "validation_incomplete");
        }
    }
}

#[test]
fn validation_that_measured_nothing_ends_no_hold() {
    let held = node().active().quick().answers(json!({ "failed": { "disk_read_mib_per_second": "I/O error" } }));
    let nothing = json!({ "not_tested": not_tested(&[]) });
    let held = held.expect("quarantined").quick().answers(nothing).expect("quarantined");
    assert!(held.node.lifecycle.reason.message.contains("nothing was measured"), "{:?}", held.node.lifecycle.reason);
    held.quick().measures(1).expect("active");
}

#[test]
fn repair_of_a_machine_that_failed_a_deep_validation_is_validated_as_strictly() {
    let lost = deep_failed().after_report("boot-1", &[xid(79, 3)]);
    let rebooted = lost.ends(TaskType::NodeReboot, TaskOutcome::Succeeded { proof: None }).after_report("boot-2", &[]);
    let order = rebooted.node.tasks.by_id.values().find_map(|task| task.validation.filter(|_| !task.has_ended()));
    assert_eq!(order.map(|order| order.level), Some(ValidationLevel::Deep));
    rebooted.measures(MINIMUM).after_report("boot-2", &[]).expect("active").expect_free();
}

#[test]
fn deep_validation_that_fails_while_a_repair_is_validated_holds_the_machine() {
    let lost =
        node().wants(Some(MINIMUM)).enrolled().agent(poll()).measures(MINIMUM).after_report("boot-1", &[xid(79, 3)]);
    let rebooted = lost.ends(TaskType::NodeReboot, TaskOutcome::Succeeded { proof: None }).after_report("boot-2", &[]);
    let failed = rebooted.validation(ValidationLevel::Deep).ends_validation(ValidationLevel::Deep, 1);
    let repaired = failed.measures(MINIMUM).after_report("boot-2", &[]).expect("quarantined");
    assert_eq!(repaired.authors(), [HoldAuthor::Validation]);
    repaired
        .validation(ValidationLevel::Deep)
        .measures(MINIMUM)
        .after_report("boot-2", &[])
        .expect("active")
        .expect_free();
}

#[test]
fn node_that_failed_a_deep_validation_is_active_for_the_first_time_only_after_another() {
    let enrolled = node().wants(Some(MINIMUM)).enrolled().agent(poll());
    let held =
        enrolled.validation(ValidationLevel::Deep).ends_validation(ValidationLevel::Deep, 1).expect("quarantined");
    let held = held.measures(MINIMUM).expect("quarantined").after_heartbeat();
    let released = held.wants(None).admin(Request::ReleaseQuarantine { reason: "r".into() }).expect("enrolling");
    let Phase::Enrolling { until } = released.node.lifecycle.phase else { unreachable!() };
    // The default of policy `node.deep_validation_seconds`.
    assert!(until >= released.now + TimeDelta::seconds(300));
    released.measures(1).expect("active").expect_free();
}
