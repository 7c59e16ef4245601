//! Resets of single GPUs: beside the tenants of others, never beside their own, once, and what is left to the reboot.

use super::health::{found, xid};
use super::*;
use crate::finding::{FindingClass, FindingScope, Repair, TABLE};
use crate::validation::{Measurement, ValidationLevel, ValidationMinimums};
use proptest::prelude::*;
use serde_json::Value;

/// An event that a reset ends: the agent reports it until the next boot.
const EVENT: u32 = 63;
/// A fault that a reboot ends.
const LOST: u32 = 79;

const DONE: TaskOutcome = TaskOutcome::Succeeded { proof: None };

fn pending_remap(gpu: u32) -> ReportedFinding {
    found("row_remap", "pending", Some(gpu))
}

impl Story {
    /// A heartbeat of an agent that supports every task.
    #[track_caller]
    fn senses(self, findings: &[ReportedFinding]) -> Self {
        let contact = AgentContact { task_types: Some(all_task_types()), ..*seen("boot-1") };
        self.senses_by(contact, inventory(GPUS), findings)
    }

    #[track_caller]
    fn senses_by(self, seen: AgentContact, inventory: ReportedInventory, findings: &[ReportedFinding]) -> Self {
        let findings = findings.iter().map(|it| ReportedFinding { boot_id: seen.boot_id.clone(), ..it.clone() });
        let report = Some(FindingReport { sent_at: self.now, findings: findings.collect(), is_truncated: false });
        self.agent(Request::Heartbeat {
            serial: SERIAL.into(),
            seen: Box::new(seen),
            inventory: Box::new(inventory),
            health: Box::new(NodeHealth { report, ..NodeHealth::default() }),
        })
    }

    fn reset_phase(&self, gpu: u32) -> &'static str {
        self.node.repair.gpu_resets.get(&uuid(gpu)).map_or("none", |reset| reset.phase.name())
    }

    /// The open tasks about one GPU, with that GPU.
    fn gpu_tasks(&self) -> Vec<(&'static str, String)> {
        let open = self.node.tasks.by_id.values().filter(|task| task.phase == NodeTaskPhase::Open);
        open.filter_map(|task| Some((task.task_type.name(), task.gpu_uuid.clone()?))).collect()
    }

    /// The GPU's reset and its validation succeed. Meanwhile and afterwards the agent reports these findings.
    #[track_caller]
    fn resets(self, meanwhile: &[ReportedFinding], afterwards: &[ReportedFinding]) -> Self {
        let reset = self.ends(TaskType::NodeGpuReset, DONE).senses(meanwhile);
        reset.ends(TaskType::NodeValidate, DONE).senses(afterwards)
    }
}

fn uuid(gpu: u32) -> String {
    format!("GPU-{gpu}")
}

fn all_task_types() -> BTreeSet<String> {
    TaskType::ALL.iter().map(|it| it.name().to_owned()).collect()
}

#[test]
fn gpu_is_reset_validated_and_back_in_rent_beside_the_tenant_of_another() {
    // The tenant has GPU 0.
    let faulty = node().active().ready().senses(&[pending_remap(3)]);
    assert_eq!((faulty.gpu_tasks(), faulty.reset_phase(3)), (vec![("node.gpu_reset", uuid(3))], "resetting"));
    assert!(faulty.effects.contains(&Effect::WakeNode(NODE)), "the agent's poll is answered");
    let same = faulty.clone().senses(&[pending_remap(3)]);
    assert_eq!(same.gpu_tasks().len(), 1, "one reset, not one for each heartbeat");
    // The fault may be over before the reset: the GPU gets no tenant all the same.
    let over = faulty.clone().senses(&[]);
    assert_eq!((over.node.gpus_free(), over.reset_phase(3)), (GPUS - 2, "resetting"));
    let reset = faulty.ends(TaskType::NodeGpuReset, DONE).senses(&[]);
    assert_eq!((reset.gpu_tasks(), reset.reset_phase(3)), (vec![("node.validate", uuid(3))], "validating"));
    assert_eq!(reset.node.gpus_free(), GPUS - 2, "the other GPUs stay in rent, this one waits for its validation");
    let valid = reset.ends(TaskType::NodeValidate, DONE).senses(&[]);
    assert_eq!((valid.node.gpus_free(), valid.reset_phase(3)), (GPUS - 1, "succeeded"));
    assert_eq!((valid.gpu_tasks(), valid.node.repair.of_machine.is_none()), (vec![], true));
}

#[test]
fn every_row_that_a_reset_repairs_begins_one_and_no_other_row_does() {
    for rule in TABLE {
        let gpu = (rule.scope == FindingScope::Gpu).then_some(3);
        let story = node().active().senses(&[found(rule.probe, rule.code, gpu)]);
        let wanted = rule.repair == Repair::Reset && rule.has(FindingClass::PreventAllocation);
        assert_eq!(story.pending_tasks() == ["node.gpu_reset"], wanted, "{}/{}", rule.probe, rule.code);
    }
}

#[test]
fn reset_begins_when_the_finding_is_still_there_after_the_pause() {
    let first = node().policy(PolicyKey::NodeRepairDelay, 60).active().senses(&[pending_remap(3)]);
    assert_eq!((first.gpu_tasks(), first.node.gpus_free()), (vec![], GPUS - 1));
    let waited = first.after(TimeDelta::seconds(60));
    assert_eq!(waited.clone().senses(&[]).gpu_tasks(), vec![]);
    // The finding of another GPU has its own pause.
    let both = waited.senses(&[pending_remap(2), pending_remap(3)]);
    assert_eq!(both.gpu_tasks(), [("node.gpu_reset", uuid(3))]);
}

#[test]
fn mode_that_a_reset_has_brought_withholds_the_gpu_and_begins_no_repair() {
    let mode = found("gpu_mode", "mig", Some(3));
    let reset = node().active().senses(&[pending_remap(3)]).resets(&[], std::slice::from_ref(&mode));
    let later = reset.after(TimeDelta::minutes(5)).senses(std::slice::from_ref(&mode));
    assert_eq!((later.node.gpus_free(), later.reset_phase(3), later.pending_tasks()), (GPUS - 1, "succeeded", vec![]));
    assert_eq!(later.senses(&[]).node.gpus_free(), GPUS, "the operator has run the command");
}

#[test]
fn line_that_says_it_is_not_fatal_repairs_nothing_and_a_fatal_one_costs_its_tenant_nothing() {
    let line = |code: &str| found("xid", code, Some(0));
    let nonfatal = node().active().ready().senses(&[line("145.nonfatal.rlw_rxpipe")]);
    assert_eq!((nonfatal.node.gpus_free(), nonfatal.published.len()), (GPUS - 1, 0));
    let gone = nonfatal.cleaning(1).reports(PROVED).senses(&[line("145.nonfatal.rlw_rxpipe")]);
    assert_eq!((gone.gpu_tasks(), gone.node.gpus_free()), (vec![], GPUS), "in rent again, without a repair");
    let fatal = node().active().ready().senses(&[line("149.fatal.netir_link_evt")]);
    let devices = &fatal.node.tenancy.holds[&TENANT].placed.devices;
    assert_eq!(fatal.node.health.evacuation_reason(devices), Some("gpu_maintenance"));
    assert_eq!(fatal.node.fault_of(TENANT), Some("gpu_fault"));
    assert_eq!(fatal.gpu_tasks(), vec![], "its tenant is still there");
    let gone = fatal.cleaning(1).reports(PROVED).senses(&[line("149.fatal.netir_link_evt")]);
    assert_eq!(gone.gpu_tasks(), [("node.gpu_reset", uuid(0))]);
    // A summary of other findings, whatever action it names.
    let summary = ReportedFinding {
        detail: "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)".into(),
        ..line("154")
    };
    assert_eq!(node().active().senses(&[summary]).pending_tasks(), Vec::<&str>::new());
}

#[test]
fn gpu_of_a_tenant_is_reset_only_after_the_clean_up_proof() {
    let held = node().active().ready().senses(&[pending_remap(0)]);
    assert_eq!((held.gpu_tasks(), held.reset_phase(0)), (vec![], "none"));
    let cleaning = held.cleaning(1).senses(&[pending_remap(0)]);
    assert_eq!(cleaning.gpu_tasks(), vec![], "the tenant is being cleaned up");
    let failed_release = cleaning.clone().reports(failed()).senses(&[pending_remap(0)]);
    assert_eq!(failed_release.gpu_tasks(), vec![], "its clean-up is not proved");
    let abandoned =
        failed_release.after_fact(Instruction::Abandon { allocation_id: TENANT }).senses(&[pending_remap(0)]);
    assert_eq!(abandoned.gpu_tasks(), vec![], "nor after a release by force");
    let gone = cleaning.reports(PROVED).senses(&[pending_remap(0)]);
    assert_eq!(gone.gpu_tasks(), [("node.gpu_reset", uuid(0))]);
}

#[test]
fn reservation_and_fault_in_the_same_second_never_meet() {
    let reserved = node().active().reserved().senses(&[pending_remap(0)]);
    assert_eq!(reserved.gpu_tasks(), vec![], "the reservation was first");
    let resetting = node().active().senses(&[pending_remap(0)]).senses(&[]);
    let rented = resetting.after_fact(reserve(TENANT, GPUS - 1));
    assert!(!rented.node.tenancy.holds_gpu(&uuid(0)), "the reset was first: the tenant has the other GPUs");
    assert_eq!(
        rented.refuses(&worker(), reserve(OTHER, 1)).to_string(),
        "0 GPUs are free, 1 are wanted",
        "the GPU that is being reset is not free"
    );
}

#[test]
fn machine_that_does_not_isolate_its_gpus_resets_none_beside_a_tenant() {
    let shared = || ReportedInventory { isolates_devices: false, ..inventory(GPUS) };
    let contact = || AgentContact { task_types: Some(all_task_types()), ..*seen("boot-1") };
    let held = node().active().ready().senses_by(contact(), shared(), &[pending_remap(3)]);
    assert_eq!(held.gpu_tasks(), vec![]);
    let gone = held.cleaning(1).reports(PROVED).senses_by(contact(), shared(), &[pending_remap(3)]);
    assert_eq!(gone.gpu_tasks(), [("node.gpu_reset", uuid(3))]);
}

#[test]
fn event_is_over_with_the_reset_although_the_agent_reports_it_until_the_next_boot() {
    let faulty = node().active().senses(&[xid(EVENT, 3)]);
    let done = faulty.resets(&[xid(EVENT, 3)], &[xid(EVENT, 3)]);
    assert_eq!((done.node.gpus_free(), done.reset_phase(3), done.pending_tasks()), (GPUS, "succeeded", vec![]));
    let cleared = done.node.health.findings[0].cleared.clone().unwrap();
    assert_eq!(cleared.reason.as_deref(), Some("the GPU was reset"));
    let later = done.after(TimeDelta::minutes(5)).senses(&[xid(EVENT, 3)]);
    assert_eq!((later.node.gpus_free(), later.pending_tasks()), (GPUS, vec![]));
    let repeated = later.senses(&[ReportedFinding { count: 2, ..xid(EVENT, 3) }]);
    assert_eq!((repeated.pending_tasks(), repeated.reset_phase(3)), (vec!["node.reboot"], "failed"));
}

#[test]
fn reset_that_fails_is_followed_by_a_reboot_once_all_tenants_are_gone() {
    let faulty = node().active().ready().senses(&[pending_remap(3)]);
    let unsupported = TaskOutcome::Failed { code: "reset_unsupported".into(), message: "Not Supported".into() };
    let unreset = faulty.ends(TaskType::NodeGpuReset, unsupported).senses(&[pending_remap(3)]);
    assert_eq!((unreset.gpu_tasks(), unreset.reset_phase(3)), (vec![], "failed"));
    assert_eq!(unreset.node.repair.gpu_resets[&uuid(3)].phase.error(), Some("reset_unsupported: Not Supported"));
    assert_eq!(unreset.pending_tasks(), Vec::<&str>::new(), "a tenant is on the machine");
    let gone = unreset.after(TimeDelta::seconds(1)).cleaning(1).reports(PROVED).senses(&[pending_remap(3)]);
    assert_eq!(gone.pending_tasks(), ["node.reboot"]);
}

#[test]
fn reset_that_does_not_end_the_fault_is_followed_by_a_reboot_and_then_by_an_operator() {
    let done = node().active().senses(&[pending_remap(3)]).resets(&[pending_remap(3)], &[pending_remap(3)]);
    assert_eq!((done.reset_phase(3), done.pending_tasks()), ("succeeded", vec![]), "the report may be of before");
    assert_eq!(done.node.gpus_free(), GPUS - 1);
    let soon = done.after(TimeDelta::seconds(59)).senses(&[pending_remap(3)]);
    assert_eq!((soon.reset_phase(3), soon.pending_tasks()), ("succeeded", vec![]));
    let later = soon.after(TimeDelta::seconds(1)).senses(&[pending_remap(3)]);
    assert_eq!((later.reset_phase(3), later.pending_tasks()), ("failed", vec!["node.reboot"]));
    let rebooted = |story: Story| {
        let rebooted = story.ends(TaskType::NodeReboot, DONE).senses(&[pending_remap(3)]);
        rebooted.ends(TaskType::NodeValidate, DONE).senses(&[pending_remap(3)])
    };
    let twice = rebooted(rebooted(later));
    assert_eq!((twice.pending_tasks(), twice.reset_phase(3)), (vec![], "failed"));
    let deadline = twice.node.deadline().unwrap();
    assert!(deadline.reason.contains("2 repairs have not ended row_remap/pending"), "{}", deadline.reason);
    let next_week = twice.after(TimeDelta::days(7)).senses(&[pending_remap(3)]);
    assert_eq!((next_week.pending_tasks(), next_week.reset_phase(3)), (vec![], "failed"), "nothing by itself again");
}

#[test]
fn gpu_that_fails_its_validation_is_withheld_until_the_machine_has_passed_one() {
    let reset = node().active().ready().senses(&[xid(EVENT, 3)]).ends(TaskType::NodeGpuReset, DONE).senses(&[]);
    let unfit = reset.ends(TaskType::NodeValidate, failed()).expect("active").senses(&[]);
    assert_eq!((unfit.reset_phase(3), unfit.node.gpus_free()), ("unfit", GPUS - 2));
    assert_eq!(unfit.pending_tasks(), Vec::<&str>::new(), "a tenant is on the machine");
    let days = unfit.after(TimeDelta::days(3)).senses(&[]);
    assert_eq!((days.reset_phase(3), days.node.gpus_free()), ("unfit", GPUS - 2));
    let gone = days.cleaning(1).reports(PROVED).senses(&[]);
    assert_eq!(gone.pending_tasks(), ["node.reboot"]);
    let rebooted = gone.ends(TaskType::NodeReboot, DONE).senses(&[]);
    assert_eq!((rebooted.pending_tasks(), rebooted.gpu_tasks()), (vec!["node.validate"], vec![]), "of all GPUs");
    let valid = rebooted.ends(TaskType::NodeValidate, DONE).senses(&[]);
    assert_eq!((valid.reset_phase(3), valid.node.gpus_free()), ("none", GPUS));
}

#[test]
fn validation_of_a_gpu_is_judged_by_the_minimums_of_gpus_alone() {
    let mut faulty = node().active().ready().senses(&[pending_remap(3)]);
    let minimums = [(Measurement::Cpu, 1_000), (Measurement::GpuPcieLanes, 16)];
    let minimums = ValidationMinimums(minimums.into_iter().collect());
    faulty.policy.set_minimums(registration().sku.sku_id, minimums);
    let reset = faulty.ends(TaskType::NodeGpuReset, DONE).senses(&[]);
    let measured = |lanes: u32| {
        let task = reset.node.tasks.by_id.values().find(|task| task.task_type == TaskType::NodeValidate).unwrap();
        let (task_id, attempt) = (task.work.task_id, task.work.attempt);
        let output: Value = json!({ "measurements": { "gpu_pcie_lanes": lanes } });
        let report = Request::Report {
            serial: SERIAL.into(),
            task_id,
            attempt,
            verdict: DONE,
            output: Some(output),
            unproved: None,
        };
        reset.clone().agent(report).expect("active").senses(&[])
    };
    assert_eq!(measured(16).reset_phase(3), "succeeded");
    let short = measured(8);
    assert_eq!(short.reset_phase(3), "unfit");
    assert!(short.node.repair.gpu_resets[&uuid(3)].phase.error().unwrap().contains("gpu_pcie_lanes is 8"));
    assert_eq!(short.node.validation.last, None, "it is no validation of the machine");
}

#[test]
fn agent_without_the_task_and_a_driver_that_hangs_are_left_to_the_reboot() {
    let old = node().active().after_report("boot-1", &[pending_remap(3)]);
    assert_eq!((old.pending_tasks(), old.reset_phase(3)), (vec!["node.reboot"], "none"));
    let hung = node().active().senses(&[pending_remap(3), found("driver", "hung", None)]);
    assert_eq!((hung.pending_tasks(), hung.reset_phase(3)), (vec!["node.reboot"], "none"));
    let both = node().active().senses(&[pending_remap(3), xid(LOST, 3)]);
    assert_eq!((both.pending_tasks(), both.reset_phase(3)), (vec!["node.reboot"], "none"), "its own reboot ends both");
}

#[test]
fn gpu_that_also_needs_a_reboot_waits_for_that_beside_a_tenant() {
    let waits = node().active().ready().senses(&[pending_remap(3), xid(LOST, 3)]);
    assert_eq!((waits.gpu_tasks(), waits.reset_phase(3)), (vec![], "none"));
}

#[test]
fn reset_waits_for_a_validation_that_an_administrator_has_ordered() {
    let order = Request::Validate { level: ValidationLevel::Quick, reason: "r".into() };
    let waits = node().active().senses(&[]).admin(order).senses(&[pending_remap(3)]);
    assert_eq!((waits.pending_tasks(), waits.reset_phase(3)), (vec!["node.validate"], "none"));
    let next = waits.ends(TaskType::NodeValidate, DONE).senses(&[pending_remap(3)]);
    assert_eq!(next.gpu_tasks(), [("node.gpu_reset", uuid(3))]);
}

#[test]
fn policy_of_no_attempts_resets_nothing() {
    let never = node().policy(PolicyKey::NodeRepairAttempts, 0).active().senses(&[pending_remap(3)]);
    assert_eq!((never.pending_tasks(), never.reset_phase(3)), (vec![], "none"));
}

#[test]
fn gpu_that_the_machine_does_not_have_is_not_reset() {
    let foreign = node().active().senses(&[pending_remap(9)]);
    assert_eq!((foreign.reset_phase(9), foreign.gpu_tasks()), ("none", vec![]));
}

#[test]
fn gpus_are_reset_one_after_another_and_never_during_a_reboot() {
    let faulty = node().active().senses(&[pending_remap(1), pending_remap(2)]);
    assert_eq!(faulty.gpu_tasks(), [("node.gpu_reset", uuid(1))]);
    let second = faulty.resets(&[pending_remap(2)], &[pending_remap(2)]);
    assert_eq!((second.gpu_tasks(), second.reset_phase(1)), (vec![("node.gpu_reset", uuid(2))], "succeeded"));
    // GPU 3 needs a reboot, which waits for the reset.
    let lost = [pending_remap(2), xid(LOST, 3)];
    let waits = second.senses(&lost);
    assert_eq!(waits.pending_tasks(), ["node.gpu_reset"]);
    let after = waits.resets(&lost[1..], &lost[1..]);
    assert_eq!(after.pending_tasks(), ["node.reboot"]);
    let meanwhile = after.senses(&[xid(LOST, 3), pending_remap(0)]);
    assert_eq!((meanwhile.pending_tasks(), meanwhile.reset_phase(0)), (vec!["node.reboot"], "none"));
    let rebooted = meanwhile.ends(TaskType::NodeReboot, DONE).senses(&[pending_remap(0)]);
    assert_eq!((rebooted.pending_tasks(), rebooted.reset_phase(0)), (vec!["node.validate"], "none"));
}

#[test]
fn gpu_is_reset_once_a_day() {
    let done = node().active().senses(&[pending_remap(3)]).resets(&[], &[]);
    let repeated = done.clone().after(TimeDelta::hours(2)).senses(&[pending_remap(3)]);
    assert_eq!((repeated.pending_tasks(), repeated.reset_phase(3)), (vec!["node.reboot"], "failed"));
    let next_day = done.after(TimeDelta::hours(25)).senses(&[]);
    assert_eq!(next_day.reset_phase(3), "none");
    assert_eq!(next_day.senses(&[pending_remap(3)]).gpu_tasks(), [("node.gpu_reset", uuid(3))]);
}

#[test]
fn reset_without_a_result_is_dispatched_again_and_reported_results_of_before_are_refused() {
    let faulty = node().active().senses(&[pending_remap(3)]);
    let work = faulty.node.tasks.by_id.values().next().unwrap().work.clone();
    let repeated = faulty.after(TimeDelta::seconds(601)).ticked();
    assert_eq!((repeated.gpu_tasks(), repeated.reset_phase(3)), (vec![("node.gpu_reset", uuid(3))], "resetting"));
    let attempts: Vec<_> = repeated.node.tasks.by_id.values().map(|task| task.work.attempt).collect();
    assert_eq!(attempts, [2]);
    let late = Request::Report {
        serial: SERIAL.into(),
        task_id: work.task_id,
        attempt: work.attempt,
        verdict: DONE,
        output: None,
        unproved: None,
    };
    assert!(matches!(repeated.refuses(&agent(), late), Rejection::StaleAttempt { .. }));
}

fn reset(gpu: u32) -> Request {
    Request::ResetGpu { gpu_uuid: uuid(gpu), reason: "slow".into() }
}

#[test]
fn administrator_orders_a_reset_without_a_finding_beside_the_tenant_of_another() {
    let ordered = node().active().ready().senses(&[]).admin(reset(3));
    let Reply::Task { task_id, .. } = ordered.reply.clone() else { panic!("{:?}", ordered.reply) };
    assert_eq!((ordered.gpu_tasks(), ordered.reset_phase(3)), (vec![("node.gpu_reset", uuid(3))], "resetting"));
    assert_eq!((ordered.node.gpus_free(), ordered.effects.clone()), (GPUS - 2, vec![Effect::WakeNode(NODE)]));
    // The same order, with and without the first answer.
    let same = ordered.clone().admin(reset(3));
    assert!(matches!(same.reply, Reply::Task { task_id: other, .. } if other == task_id));
    assert_eq!(same.node, ordered.node);
    let validating = ordered.ends(TaskType::NodeGpuReset, DONE).senses(&[]);
    let same = validating.clone().admin(reset(3));
    assert_eq!((same.node == validating.node, same.reset_phase(3)), (true, "validating"));
    let done = validating.ends(TaskType::NodeValidate, DONE).senses(&[]);
    assert_eq!((done.reset_phase(3), done.node.gpus_free()), ("succeeded", GPUS - 1));
    // By itself it would be reset once a day.
    let next = done.after(TimeDelta::minutes(5)).admin(reset(3));
    assert_eq!((next.gpu_tasks(), next.reset_phase(3)), (vec![("node.gpu_reset", uuid(3))], "resetting"));
    let never = node().policy(PolicyKey::NodeRepairAttempts, 0).active().senses(&[pending_remap(3)]).admin(reset(3));
    assert_eq!(never.reset_phase(3), "resetting", "the policy is about resets by itself");
}

#[test]
fn ordered_reset_is_refused_while_a_tenant_holds_the_gpu() {
    let refused = |story: Story, gpu: u32| story.senses(&[]).refuses(&admin(), reset(gpu));
    let in_use = Rejection::InUse { allocation_id: TENANT };
    assert_eq!(refused(node().active().reserved(), 0), in_use);
    assert_eq!(refused(node().active().ready(), 0), in_use);
    let cleaning = node().active().ready().cleaning(1);
    assert_eq!(refused(cleaning.clone(), 0), in_use);
    assert_eq!(refused(cleaning.clone().reports(failed()), 0), in_use, "its clean-up is not proved");
    let gone = cleaning.reports(PROVED).senses(&[]).admin(reset(0));
    assert_eq!(gone.gpu_tasks(), [("node.gpu_reset", uuid(0))]);
    assert_eq!(
        gone.refuses(&worker(), reserve(OTHER, GPUS)).to_string(),
        format!("{} GPUs are free, {GPUS} are wanted", GPUS - 1)
    );
    // A tenant of a machine that does not isolate its GPUs can use each of them.
    let shared = ReportedInventory { isolates_devices: false, ..inventory(GPUS) };
    let contact = AgentContact { task_types: Some(all_task_types()), ..*seen("boot-1") };
    let shared = node().active().ready().senses_by(contact, shared, &[]);
    assert_eq!(shared.refuses(&admin(), reset(3)), in_use);
}

#[test]
fn ordered_reset_is_refused_with_the_reason_where_something_has_to_end_first() {
    let why = |story: &Story| {
        let refused = story.refuses(&admin(), reset(3));
        let Rejection::GpuNotReset { why, gpu_uuid } = refused else { panic!("{refused:?}") };
        assert_eq!(gpu_uuid, uuid(3));
        why
    };
    let free = node().active().senses(&[]);
    assert!(matches!(node().refuses(&admin(), reset(3)), Rejection::WrongState { .. }));
    let removing = free.clone().retired().removing();
    assert!(matches!(removing.refuses(&admin(), reset(3)), Rejection::WrongState { .. }));
    let unknown = free.refuses(&admin(), reset(9));
    assert!(
        matches!(&unknown, Rejection::GpuUnknown { reported, .. } if reported.len() == GPUS as usize),
        "{unknown:?}"
    );
    assert!(why(&node().active()).contains("upgrade it"), "an agent without the task");
    assert!(why(&free.clone().admin(reset(1))).contains("node.gpu_reset"), "another GPU");
    let order = Request::Validate { level: ValidationLevel::Quick, reason: "r".into() };
    assert!(why(&free.clone().admin(order)).contains("node.validate"));
    assert!(why(&node().active().senses(&[xid(LOST, 3)])).contains("node.reboot"), "it is being repaired");
    let hung = node().policy(PolicyKey::NodeRepairAttempts, 0).active().senses(&[found("driver", "hung", None)]);
    assert!(why(&hung).contains("critical fault"));
    let unfit = free.admin(reset(1)).ends(TaskType::NodeGpuReset, DONE).senses(&[]);
    let unfit = unfit.policy(PolicyKey::NodeRepairAttempts, 0).ends(TaskType::NodeValidate, failed()).senses(&[]);
    assert_eq!(unfit.reset_phase(1), "unfit");
    assert!(why(&unfit).contains("validate the machine first"));
    let message = crate::state_machine::Rejection::explain(unknown).message;
    assert!(message.contains("GPU-9") && message.contains("GPU-0, GPU-1"), "{message}");
}

#[test]
fn snapshot_of_an_earlier_release_has_no_resets() {
    let mut stored = serde_json::to_value(&node().active().ready().node).unwrap();
    assert!(stored.as_object_mut().unwrap().remove("gpu_resets").is_none(), "nothing is stored of none");
    let read: Node = serde_json::from_value(stored).unwrap();
    assert_eq!(read.repair.gpu_resets, BTreeMap::new());
}

/// What happens next to a node with tenants and faults.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// The agent reports the faults of this set, by GPU: none, one that a reset ends, or one that a reboot ends.
    Faults([u8; GPUS as usize]),
    Reserve(u8, u32),
    Provision(u8),
    Clean(u8),
    Unreserve(u8),
    Abandon(u8),
    /// The agent reports on its oldest task.
    Report {
        is_success: bool,
    },
    Clear,
    /// An administrator orders the reset of this GPU.
    Reset(u32),
    Wait(i64),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => proptest::array::uniform4(prop_oneof![4 => Just(0_u8), 3 => Just(1), 1 => Just(2), 1 => Just(3)])
            .prop_map(Happening::Faults),
        3 => (0..4_u8, 1..3_u32).prop_map(|(tenant, gpus)| Happening::Reserve(tenant, gpus)),
        2 => (0..4_u8).prop_map(Happening::Provision),
        2 => (0..4_u8).prop_map(Happening::Clean),
        1 => (0..4_u8).prop_map(Happening::Unreserve),
        1 => (0..4_u8).prop_map(Happening::Abandon),
        6 => prop::bool::weighted(0.8).prop_map(|is_success| Happening::Report { is_success }),
        1 => Just(Happening::Clear),
        2 => (0..GPUS).prop_map(Happening::Reset),
        2 => (1..4_000_i64).prop_map(Happening::Wait),
    ]
}

impl Story {
    fn tries(self, by: &Principal, command: impl Into<Command>) -> Self {
        let command = command.into();
        if self.ask(by, command.clone()).is_ok() { self.by(by, command) } else { self }
    }

    fn meets(self, happening: Happening) -> Self {
        let tenant = |n: u8| AllocationId(Uuid::from_u128(0x100 + u128::from(n)));
        let deadline_at = self.now + TimeDelta::seconds(600);
        match happening {
            Happening::Faults(faults) => {
                let of = |(gpu, fault): (u32, u8)| match fault {
                    1 => Some(pending_remap(gpu)),
                    2 => Some(xid(LOST, gpu)),
                    3 => Some(xid(EVENT, gpu)),
                    _ => None,
                };
                let found: Vec<_> = (0..).zip(faults).filter_map(of).collect();
                self.senses(&found)
            }
            Happening::Reserve(n, gpus) => self.tries(&worker(), reserve(tenant(n), gpus)),
            Happening::Provision(n) => {
                self.tries(&worker(), Instruction::Provision { allocation_id: tenant(n), deadline_at })
            }
            Happening::Clean(n) => {
                self.tries(&worker(), Instruction::Clean { allocation_id: tenant(n), attempt: 1, deadline_at })
            }
            Happening::Unreserve(n) => self.tries(&worker(), Instruction::Unreserve { allocation_id: tenant(n) }),
            Happening::Abandon(n) => self.tries(&worker(), Instruction::Abandon { allocation_id: tenant(n) }),
            Happening::Report { is_success } => self.reports_on_the_oldest(is_success),
            Happening::Reset(gpu) => self.tries(&admin(), reset(gpu)),
            Happening::Clear if self.node.health.findings.is_empty() => self,
            Happening::Clear => self.clears(0),
            Happening::Wait(seconds) => self.after(TimeDelta::seconds(seconds)).ticked(),
        }
    }

    fn reports_on_the_oldest(self, is_success: bool) -> Self {
        let step = self.ask(&agent(), poll()).unwrap();
        let Reply::Work { orders } = step.reply else { return self };
        let Some(order) = orders.into_iter().next() else { return self };
        let proof = match &order.what {
            TaskKind::Release { place } => Some(place.allocation_id),
            TaskKind::Provision { .. }
            | TaskKind::ReconcileLogins { .. }
            | TaskKind::OfNode { .. }
            | TaskKind::OpenTerminal { .. } => None,
        };
        let verdict = if is_success { TaskOutcome::Succeeded { proof } } else { failed() };
        let (task_id, attempt) = (order.work.task_id, order.work.attempt);
        self.tries(
            &agent(),
            Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output: None, unproved: None },
        )
    }

    /// The GPUs that the open tasks reset or put a load on.
    fn gpus_of_tasks(&self) -> Vec<String> {
        let Reply::Work { orders } = self.ask(&agent(), poll()).unwrap().reply else { return Vec::new() };
        let gpu = |order: AgentTask| match order.what {
            TaskKind::OfNode { gpu_uuid, .. } => gpu_uuid,
            TaskKind::Provision { .. }
            | TaskKind::ReconcileLogins { .. }
            | TaskKind::Release { .. }
            | TaskKind::OpenTerminal { .. } => None,
        };
        orders.into_iter().filter_map(gpu).collect()
    }
}

/// How often something happened in all cases of the property.
#[derive(Debug, Default)]
struct Seen {
    resets: u32,
    successes: u32,
    resets_beside_tenants: u32,
}

impl Seen {
    const fn is_enough(&self) -> bool {
        self.resets > 100 && self.successes > 10 && self.resets_beside_tenants > 20
    }
}

#[test]
fn no_gpu_is_reset_while_a_tenant_has_it_whatever_happens() {
    let totals = std::cell::RefCell::new(Seen::default());
    // As many cases as it takes: chance decides what happens in them.
    for _ in 0..5 {
        property_of_resets(&totals);
        if totals.borrow().is_enough() {
            return;
        }
    }
    panic!("the property saw too little: {:?}", totals.into_inner());
}

fn property_of_resets(totals: &std::cell::RefCell<Seen>) {
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig { cases: 400, ..ProptestConfig::default() });
    let happenings = prop::collection::vec(happening(), 1..60);
    runner
        .run(&happenings, |happenings| {
            let mut story = node().active().senses(&[]);
            for happening in happenings {
                let before = story.node.repair.gpu_resets.clone();
                // Ids of tasks are distinct by the time of their order.
                story = story.after(TimeDelta::milliseconds(1)).meets(happening);
                let node = &story.node;
                let in_reset: BTreeSet<String> = node.repair.gpus_in_reset().map(str::to_owned).collect();
                prop_assert!(node.has_one_tenant_on_each_gpu());
                prop_assert!(in_reset.len() <= 1, "{in_reset:?}");
                for gpu in story.gpus_of_tasks() {
                    prop_assert!(in_reset.contains(&gpu), "{gpu} is not withheld");
                    prop_assert!(!node.tenancy.holds_gpu(&gpu), "{gpu} has a tenant");
                }
                for gpu in node.free_gpus() {
                    prop_assert!(!in_reset.contains(&gpu.uuid), "{} is free", gpu.uuid);
                }
                let is_rebooted =
                    node.tasks.by_id.values().any(|task| task.task_type == TaskType::NodeReboot && !task.has_ended());
                prop_assert!(!is_rebooted || in_reset.is_empty() && node.tenancy.holds.is_empty());
                let mut seen = totals.borrow_mut();
                let is_new = in_reset.iter().any(|uuid| !before.contains_key(uuid));
                seen.resets += u32::from(is_new);
                seen.resets_beside_tenants += u32::from(is_new && !node.tenancy.holds.is_empty());
                let is_done = |reset: &GpuReset| matches!(reset.phase, GpuResetPhase::Succeeded { .. });
                seen.successes +=
                    u32::from(node.repair.gpu_resets.values().any(is_done) && !before.values().any(is_done));
            }
            Ok(())
        })
        .unwrap();
}
