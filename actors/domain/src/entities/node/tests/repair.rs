//! Repair by itself: what begins it, its steps, and when an operator takes over.

use super::health::{found, xid};
use super::*;
use crate::finding::{FindingClass, FindingScope, Repair, TABLE};

/// A fault that a reboot repairs.
const LOST: u32 = 79;

const DONE: TaskOutcome = TaskOutcome::Succeeded { proof: None };

impl Story {
    /// A heartbeat of this boot.
    #[track_caller]
    pub(super) fn after_report(self, boot_id: &str, findings: &[ReportedFinding]) -> Self {
        let findings = findings.iter().map(|it| ReportedFinding { boot_id: boot_id.into(), ..it.clone() }).collect();
        let report = Some(FindingReport { sent_at: self.now, findings, is_truncated: false });
        self.agent(Request::Heartbeat {
            serial: SERIAL.into(),
            seen: seen(boot_id),
            inventory: Box::new(inventory(GPUS)),
            health: Box::new(NodeHealth { report, ..NodeHealth::default() }),
        })
    }

    /// The agent reports on the open task of this type.
    #[track_caller]
    pub(super) fn ends(self, task_type: TaskType, verdict: TaskOutcome) -> Self {
        let is_it = |task: &&NodeTask| task.task_type == task_type && task.phase == NodeTaskPhase::Open;
        let work = self.node.tasks.by_id.values().find(is_it).expect("such a task is open").work.clone();
        let (task_id, attempt) = (work.task_id, work.attempt);
        let output = (task_type == TaskType::NodeValidate).then(|| super::validation::report(1));
        self.agent(Request::Report { serial: SERIAL.into(), task_id, attempt, verdict, output, unproved: None })
    }

    /// A reboot after which the agent reports these findings, and a validation.
    #[track_caller]
    fn reboots(self, boot_id: &str, findings: &[ReportedFinding]) -> Self {
        let rebooted = self.ends(TaskType::NodeReboot, TaskOutcome::Succeeded { proof: None });
        let validating = rebooted.after_report(boot_id, findings);
        assert_eq!(validating.pending_tasks(), ["node.validate"]);
        validating.ends(TaskType::NodeValidate, TaskOutcome::Succeeded { proof: None }).after_report(boot_id, findings)
    }

    fn repair_phase(&self) -> &'static str {
        self.node.repair.of_machine.as_ref().map_or("none", |repair| repair.phase.name())
    }
}

#[test]
fn machine_without_tenants_is_rebooted_validated_and_back_in_service() {
    let lost = node().active().after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!((lost.pending_tasks(), lost.repair_phase()), (vec!["node.reboot"], "rebooting"));
    assert!(lost.node.not_schedulable().unwrap().contains("being rebooted"));
    let same = lost.clone().after_report("boot-1", &[xid(LOST, 3)]).unmoved();
    assert_eq!(same.pending_tasks(), ["node.reboot"], "one reboot, not one for each heartbeat");
    let rebooted = lost.ends(TaskType::NodeReboot, TaskOutcome::Succeeded { proof: None }).after_report("boot-2", &[]);
    assert_eq!((rebooted.pending_tasks(), rebooted.node.gpus_free()), (vec!["node.validate"], 0));
    let validated =
        rebooted.ends(TaskType::NodeValidate, TaskOutcome::Succeeded { proof: None }).after_report("boot-2", &[]);
    assert_eq!((validated.repair_phase(), validated.node.gpus_free()), ("succeeded", GPUS));
    assert_eq!(validated.after_report("boot-2", &[]).pending_tasks(), Vec::<&str>::new());
}

#[test]
fn every_row_that_a_reboot_repairs_begins_a_repair_and_no_other_row_does() {
    for rule in TABLE {
        let gpu = (rule.scope == FindingScope::Gpu).then_some(3);
        let story = node().active().after_report("boot-1", &[found(rule.probe, rule.code, gpu)]);
        let wanted = matches!(rule.repair, Repair::Reset | Repair::Reboot) && rule.has(FindingClass::PreventAllocation);
        assert_eq!(!story.pending_tasks().is_empty(), wanted, "{}/{}", rule.probe, rule.code);
    }
}

#[test]
fn repair_waits_until_the_last_tenant_is_gone() {
    let tenants = node().active().ready().after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(tenants.pending_tasks(), Vec::<&str>::new());
    let cleaning = tenants.cleaning(1).after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(cleaning.pending_tasks(), ["release"]);
    let gone = cleaning.reports(PROVED).after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(gone.pending_tasks(), ["node.reboot"]);
}

#[test]
fn operator_takes_over_after_the_attempts_and_gets_no_further_reboot() {
    let first = node().active().after_report("boot-1", &[xid(LOST, 3)]).reboots("boot-2", &[xid(LOST, 3)]);
    assert_eq!(
        (first.pending_tasks(), first.node.repair.of_machine.as_ref().unwrap().attempts),
        (vec!["node.reboot"], 2)
    );
    let over = first.reboots("boot-3", &[xid(LOST, 3)]);
    assert_eq!((over.pending_tasks(), over.repair_phase()), (vec![], "awaits_operator"));
    let deadline = over.node.deadline().unwrap();
    assert_eq!(deadline.at, over.now);
    assert!(deadline.reason.contains("2 repairs have not ended xid/79"), "{}", deadline.reason);
    assert_eq!(over.node.gpus_free(), GPUS - 1, "the other GPUs are in rent");
    let later = over.after(TimeDelta::days(3)).after_report("boot-3", &[xid(LOST, 3)]);
    assert_eq!(later.pending_tasks(), Vec::<&str>::new(), "not by itself again");
    let cleared = later.clears(0).after_report("boot-3", &[xid(LOST, 3)]);
    assert_eq!((cleared.repair_phase(), cleared.node.deadline()), ("none", None));
}

#[test]
fn fault_that_returns_within_a_day_counts_as_the_same_and_later_as_another() {
    let repaired = node().active().after_report("boot-1", &[xid(LOST, 3)]).reboots("boot-2", &[]);
    let repeated = repaired.clone().after(TimeDelta::hours(2)).after_report("boot-2", &[xid(LOST, 3)]);
    assert_eq!(repeated.node.repair.of_machine.as_ref().unwrap().attempts, 2);
    let third = repeated.reboots("boot-3", &[]).after(TimeDelta::hours(2)).after_report("boot-3", &[xid(LOST, 3)]);
    assert_eq!((third.pending_tasks(), third.repair_phase()), (vec![], "awaits_operator"));
    let later = repaired.after(TimeDelta::hours(25)).after_report("boot-2", &[xid(LOST, 3)]);
    assert_eq!(later.node.repair.of_machine.as_ref().unwrap().attempts, 1);
}

#[test]
fn hold_of_an_administrator_stops_no_repair_and_is_not_lifted() {
    let held = node().active().quarantined().after_report("boot-1", &[found("memory", "uncorrectable", None)]);
    assert_eq!(held.pending_tasks(), ["node.reboot"]);
    let repaired = held.reboots("boot-2", &[]).expect("quarantined");
    let authors: Vec<_> = repaired.node.lifecycle.quarantine_holds().into_iter().map(|hold| hold.author).collect();
    assert_eq!((authors, repaired.repair_phase()), (vec![HoldAuthor::Administrator], "succeeded"));
}

#[test]
fn machine_that_fails_its_validation_is_held_for_an_operator() {
    let lost = node().active().after_report("boot-1", &[xid(LOST, 3)]);
    let rebooted = lost.ends(TaskType::NodeReboot, TaskOutcome::Succeeded { proof: None }).after_report("boot-2", &[]);
    let failed = rebooted.ends(TaskType::NodeValidate, failed()).expect("quarantined").after_report("boot-2", &[]);
    assert_eq!((failed.repair_phase(), failed.pending_tasks()), ("awaits_operator", vec![]));
    let released =
        failed.admin(Request::ReleaseQuarantine { reason: "r".into() }).expect("active").after_report("boot-2", &[]);
    assert_eq!(released.repair_phase(), "none");
}

#[test]
fn reboot_that_fails_is_an_attempt_and_one_without_a_result_waits() {
    let lost = node().active().after_report("boot-1", &[xid(LOST, 3)]);
    let refused = lost.clone().ends(TaskType::NodeReboot, failed()).after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(refused.node.repair.of_machine.as_ref().unwrap().attempts, 2);
    let refused = refused.ends(TaskType::NodeReboot, failed()).after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(refused.repair_phase(), "awaits_operator");
    let silent = lost.after(TimeDelta::seconds(601)).ticked().after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!((silent.pending_tasks(), silent.repair_phase()), (vec![], "rebooting"));
    assert!(silent.node.deadline().unwrap().reason.contains("look and resume"));
}

#[test]
fn policy_of_no_attempts_leaves_all_repairs_to_operators() {
    let story = node().policy(PolicyKey::NodeRepairAttempts, 0).active().after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!((story.pending_tasks(), story.repair_phase(), story.node.deadline()), (vec![], "none", None));
}

#[test]
fn retired_node_and_one_that_is_not_active_are_not_repaired() {
    let retired = node().active().retired().after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(retired.repair_phase(), "none");
    let enrolling = node().enrolled().after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(enrolling.repair_phase(), "none");
}

#[test]
fn repair_begins_when_the_finding_is_still_there_after_the_pause() {
    let paused = || node().policy(PolicyKey::NodeRepairDelay, 60).active();
    let second = |story: Story, seconds: i64| story.after(TimeDelta::seconds(seconds));
    let first = paused().after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!((first.pending_tasks(), first.node.gpus_free()), (vec![], GPUS - 1), "out of rent at once");
    let early = second(first, 59).after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(early.pending_tasks(), Vec::<&str>::new());
    // Time alone is no second look.
    let waited = second(early.clone(), 1).ticked();
    assert_eq!(waited.pending_tasks(), Vec::<&str>::new());
    assert_eq!(waited.after_report("boot-1", &[xid(LOST, 3)]).pending_tasks(), ["node.reboot"]);
    let over = second(early.clone(), 1).after_report("boot-1", &[]);
    assert_eq!((over.pending_tasks(), over.node.gpus_free()), (vec![], GPUS));
    // What ends and returns is looked at from then on, as is what occurs again in another boot.
    let returned = second(over, 1).after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(second(returned, 59).after_report("boot-1", &[xid(LOST, 3)]).pending_tasks(), Vec::<&str>::new());
    let rebooted = second(early.clone(), 1).after_report("boot-2", &[xid(LOST, 3)]);
    assert_eq!(second(rebooted, 59).after_report("boot-2", &[xid(LOST, 3)]).pending_tasks(), Vec::<&str>::new());
    // One that occurs again and again does not postpone its repair.
    let again = ReportedFinding { count: 2, ..xid(LOST, 3) };
    assert_eq!(second(early, 1).after_report("boot-1", &[again]).pending_tasks(), ["node.reboot"]);
}

#[test]
fn fault_of_long_ago_is_looked_at_twice_all_the_same() {
    // The agent was silent for hours, and dates the fault to its beginning.
    let silent = node().policy(PolicyKey::NodeRepairDelay, 60).active().after(TimeDelta::hours(4));
    let first = silent.after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(first.pending_tasks(), Vec::<&str>::new());
    let second = first.after(TimeDelta::seconds(60)).after_report("boot-1", &[xid(LOST, 3)]);
    assert_eq!(second.pending_tasks(), ["node.reboot"]);
}

#[test]
fn second_reboot_waits_for_a_second_look_as_well() {
    let beats = |story: Story, boot: &str, seconds: i64| {
        story.after(TimeDelta::seconds(seconds)).after_report(boot, &[xid(LOST, 3)])
    };
    let story = beats(node().policy(PolicyKey::NodeRepairDelay, 60).active(), "boot-1", 0);
    let rebooted = beats(story, "boot-1", 60).ends(TaskType::NodeReboot, DONE);
    let validated = beats(rebooted, "boot-2", 0).ends(TaskType::NodeValidate, DONE);
    let waits = beats(validated, "boot-2", 59);
    assert_eq!((waits.pending_tasks(), waits.repair_phase()), (vec![], "validating"));
    let over = waits.clone().after(TimeDelta::seconds(1)).after_report("boot-2", &[]);
    assert_eq!(over.repair_phase(), "succeeded");
    assert_eq!(beats(waits, "boot-2", 1).pending_tasks(), ["node.reboot"]);
}

#[test]
fn reboot_that_failed_is_not_repeated_once_its_finding_is_over() {
    let refused = node().active().after_report("boot-1", &[xid(LOST, 3)]).ends(TaskType::NodeReboot, failed());
    let over = refused.after_report("boot-1", &[]);
    assert_eq!((over.pending_tasks(), over.repair_phase()), (vec!["node.validate"], "validating"));
    let valid = over.ends(TaskType::NodeValidate, DONE).after_report("boot-1", &[]);
    assert_eq!((valid.repair_phase(), valid.node.gpus_free()), ("succeeded", GPUS));
}

#[test]
fn replaced_driver_is_rebooted_once_its_last_tenant_is_gone_who_pays_until_then() {
    let replaced = found("driver", "restart_needed", None);
    let rented = node().active().ready().finds(std::slice::from_ref(&replaced)).expect("active");
    assert_eq!((rented.node.gpus_free(), rented.pending_tasks()), (0, vec![]), "no new tenant, and no reboot");
    assert!(rented.published.iter().all(|it| !matches!(it, Event::TenantFaulted { .. })), "{:?}", rented.published);
    assert_eq!(rented.node.health.evacuation_reason(&rented.node.tenancy.holds[&TENANT].placed.devices), None);
    let gone = rented.cleaning(1).reports(PROVED).after_report("boot-1", &[replaced]);
    assert_eq!(gone.pending_tasks(), ["node.reboot"]);
    let rebooted = gone.ends(TaskType::NodeReboot, DONE).after_report("boot-2", &[]);
    let valid = rebooted.ends(TaskType::NodeValidate, DONE).after_report("boot-2", &[]);
    assert_eq!((valid.repair_phase(), valid.node.gpus_free()), ("succeeded", GPUS));
}
