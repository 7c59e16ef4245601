//! Health findings: what follows from each row of the table for each GPU, and the holds of a quarantine.

use super::*;
use crate::finding::{FindingCause, FindingClass, FindingRule, FindingScope, Repair, TABLE};
use crate::id::FindingId;
use crate::money::HourlyRate;
use proptest::prelude::*;

/// A finding on the GPU of that number, or on the machine.
pub(super) fn found(probe: &str, code: &str, gpu: Option<u32>) -> ReportedFinding {
    ReportedFinding {
        probe: probe.into(),
        gpu_uuid: gpu.map(|gpu| format!("GPU-{gpu}")),
        code: code.into(),
        count: 1,
        first_at: start(),
        last_at: start(),
        boot_id: "boot-1".into(),
        detail: "d".into(),
    }
}

pub(super) fn xid(code: u32, gpu: u32) -> ReportedFinding {
    found("xid", &code.to_string(), Some(gpu))
}

pub(super) fn report_of(findings: Vec<ReportedFinding>, sent_at: Timestamp, inventory: ReportedInventory) -> Request {
    let report = Some(FindingReport { sent_at, findings, is_truncated: false });
    Request::Heartbeat {
        serial: SERIAL.into(),
        seen: seen("boot-1"),
        inventory: Box::new(inventory),
        health: Box::new(NodeHealth { report, ..NodeHealth::default() }),
    }
}

impl Story {
    #[track_caller]
    pub(super) fn finds(self, findings: &[ReportedFinding]) -> Self {
        let sent_at = self.now;
        self.agent(report_of(findings.to_vec(), sent_at, inventory(GPUS)))
    }

    fn faults(&self) -> Vec<(&str, Timestamp)> {
        let mut found = Vec::new();
        for event in &self.published {
            if let Event::TenantFaulted { reason, at, .. } = event {
                found.push((reason.as_str(), *at));
            }
        }
        found
    }

    pub(super) fn finding(&self, n: usize) -> FindingId {
        self.node.health.findings[n].id
    }

    pub(super) fn clears(self, n: usize) -> Self {
        let finding_id = self.finding(n);
        self.admin(Request::ClearFinding { finding_id, reason: "looked".into() })
    }
}

/// A node whose findings operators repair.
fn without_repair() -> Story {
    node().policy(PolicyKey::NodeRepairAttempts, 0)
}

/// The number of the GPU that the tenant has.
const TENANTS: u32 = 0;

#[test]
fn every_row_has_its_consequences_for_its_gpu_and_for_no_other() {
    for rule in TABLE {
        let name = format!("{}/{}", rule.probe, rule.code);
        let on = |gpu: u32| match rule.scope {
            FindingScope::Gpu => found(rule.probe, rule.code, Some(gpu)),
            FindingScope::Machine => found(rule.probe, rule.code, None),
        };
        let of_tenant = node().active().ready().finds(&[on(TENANTS)]);
        let of_other = node().active().ready().finds(&[on(3)]);
        let is_credited = rule.has(FindingClass::BillingCredit);
        let is_machine = rule.scope == FindingScope::Machine;
        assert_eq!(!of_tenant.faults().is_empty(), is_credited, "{name}");
        assert_eq!(!of_other.faults().is_empty(), is_credited && is_machine, "{name}");
        let withheld = match (rule.has(FindingClass::PreventAllocation), is_machine) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => GPUS - 1,
        };
        assert_eq!(of_other.node.gpus_free(), GPUS - 1 - withheld, "{name}");
        let is_quarantined = is_machine && is_credited || rule.has(FindingClass::Quarantine);
        let state = if is_quarantined { "quarantined" } else { "active" };
        assert_eq!(of_other.node.state(), state, "{name}");
        let free: Vec<_> = of_other.node.free_gpus().map(|gpu| gpu.index).collect();
        let is_gpu_withheld = !is_machine && withheld > 0;
        assert_eq!(free.contains(&3), !is_gpu_withheld, "{name}");
        let devices = &of_tenant.node.tenancy.holds[&TENANT].placed.devices;
        let messages = of_tenant.node.tenant_messages(devices, start());
        assert_eq!(messages.first().map_or("", String::as_str), rule.tenant_message, "{name}");
        let foreign = of_other.node.tenant_messages(devices, start());
        assert_eq!(foreign.is_empty(), !is_machine || rule.tenant_message.is_empty(), "{name}");
    }
}

#[test]
fn unknown_xid_is_shown_and_has_no_other_consequence() {
    let story = node().active().ready().finds(&[xid(4711, TENANTS)]).expect("active");
    assert_eq!((story.faults(), story.node.gpus_free()), (vec![], GPUS - 1));
    assert_eq!(story.node.health.reported.status, NodeHealthStatus::Warning);
    assert_eq!(story.node.health.alerts()[0]["classifications"], serde_json::json!(["warn"]));
}

#[test]
fn gpu_that_the_agent_cannot_name_is_withheld_with_its_node_and_credits_no_tenant() {
    let story = node().active().ready().finds(&[found("xid", "79", None)]).expect("active");
    assert_eq!((story.faults(), story.node.gpus_free()), (vec![], 0));
    assert!(story.node.not_schedulable().unwrap().contains("xid/79"));
}

#[test]
fn heartbeat_with_the_same_findings_writes_nothing() {
    let findings = [xid(79, 3), xid(31, TENANTS)];
    let first = node().active().finds(&findings);
    assert!(first.wrote);
    let repeated = first.after(TimeDelta::seconds(5)).finds(&findings);
    assert!(!repeated.wrote, "a fleet's databases would be busy with it");
}

#[test]
fn two_findings_on_one_gpu_and_one_cleared_leave_the_other() {
    let both = without_repair().active().finds(&[xid(79, 3), xid(95, 3)]);
    assert_eq!(both.node.gpus_free(), GPUS - 1);
    let one = both.clears(0);
    assert_eq!(one.node.gpus_free(), GPUS - 1, "the other one still withholds it");
    let none = one.clears(1);
    assert_eq!((none.node.gpus_free(), none.node.health.reported.status), (GPUS, NodeHealthStatus::Ok));
    // The agent goes on reporting what was cleared.
    let repeated = none.finds(&[xid(79, 3), xid(95, 3)]);
    assert_eq!(repeated.node.gpus_free(), GPUS);
    let occurred = repeated.finds(&[ReportedFinding { count: 2, ..xid(79, 3) }, xid(95, 3)]);
    assert_eq!(occurred.node.gpus_free(), GPUS - 1, "it occurred again");
    let rebooted = occurred.clears(0).finds(&[ReportedFinding { boot_id: "boot-2".into(), ..xid(79, 3) }]);
    assert_eq!(rebooted.node.gpus_free(), GPUS - 1, "it occurred in another boot");
}

#[test]
fn clearing_is_audited_and_repeatable_and_of_known_findings() {
    let story = node().active().finds(&[xid(79, 3)]);
    let clear = |finding_id| Request::ClearFinding { finding_id, reason: "r".into() };
    let step = story.ask(&admin(), clear(story.finding(0))).unwrap();
    assert_eq!(step.audit.iter().map(|it| it.action.as_str()).collect::<Vec<_>>(), ["nodes.clear_finding"]);
    assert_eq!(
        (&step.audit[0].metadata["finding_code"], &step.audit[0].metadata["reason"]),
        (&"79".into(), &"r".into())
    );
    assert_eq!(story.refuses(&admin(), clear(FindingId(Uuid::nil()))), Rejection::FindingUnknown);
    story.clears(0).clears(0).unmoved();
}

#[test]
fn finding_that_ends_has_no_consequence_unless_only_an_operator_can_repair_it() {
    for rule in TABLE.iter().filter(|rule| rule.has(FindingClass::PreventAllocation)) {
        let gpu = (rule.scope == FindingScope::Gpu).then_some(3);
        let over = without_repair().active().finds(&[found(rule.probe, rule.code, gpu)]).finds(&[]);
        let free = if rule.repair == Repair::Operator { GPUS - 1 } else { GPUS };
        assert_eq!(over.node.gpus_free(), free, "{}/{}", rule.probe, rule.code);
        over.expect("active");
    }
}

#[test]
fn truncated_report_ends_nothing() {
    let story = without_repair().active().finds(&[xid(79, 3)]);
    let report = Some(FindingReport { sent_at: story.now, findings: vec![], is_truncated: true });
    let health = Box::new(NodeHealth { report, ..NodeHealth::default() });
    let beat = Request::Heartbeat {
        serial: SERIAL.into(),
        seen: seen("boot-1"),
        inventory: Box::new(inventory(GPUS)),
        health,
    };
    assert_eq!(story.agent(beat).node.gpus_free(), GPUS - 1);
}

#[test]
fn missing_gpu_is_a_fault_of_that_gpu_and_no_drift() {
    let mut without = inventory(GPUS);
    without.gpus.remove(3);
    let beat = |story: &Story, findings| report_of(findings, story.now, without.clone());
    let story = node().active().ready();
    let lost = story.clone().agent(beat(&story, vec![found("gpu", "lost", Some(3))])).expect("active");
    assert_eq!((lost.faults(), lost.node.gpus_free()), (vec![], GPUS - 2));
    // Without the finding, a machine with a GPU less is another machine than the SKU promises.
    let drift = story.clone().agent(beat(&story, vec![])).expect("quarantined");
    assert_eq!(drift.node.lifecycle.reason.code, StateCode::InventoryDrift);
    // A node that never had all of its GPUs does not become active.
    let enrolling = node().enrolled();
    let short = enrolling.clone().agent(beat(&enrolling, vec![found("gpu", "lost", Some(3))]));
    short.expect("enrolling");
}

#[test]
fn gpu_that_the_agent_has_never_read_withholds_no_other_and_is_no_drift() {
    let of_place = |probe: &str, code: &str| {
        let found = found(probe, code, Some(0));
        ReportedFinding { gpu_uuid: Some("PCI-0000:3b:00".into()), ..found }
    };
    let mut without = inventory(GPUS);
    without.gpus.remove(3);
    let story = without_repair().active();
    let findings = vec![of_place("gpu", "unreadable"), of_place("xid", "79")];
    let short = story.clone().agent(report_of(findings, story.now, without)).expect("active");
    assert_eq!((short.node.gpus_free(), short.faults()), (GPUS - 1, vec![]));
    short.after_fact(reserve(TENANT, GPUS - 1));
}

#[test]
fn meter_stops_at_the_time_of_the_fault_by_the_control_planes_clock() {
    // The machine's clock is an hour behind; it reports a fault of ten seconds ago.
    let story = node().active().ready().after(TimeDelta::seconds(100));
    let sent_at = story.now - TimeDelta::hours(1);
    let at = sent_at - TimeDelta::seconds(10);
    let fault = ReportedFinding { first_at: at, last_at: at, ..xid(79, TENANTS) };
    let wanted = story.now - TimeDelta::seconds(10);
    let faulted = story.agent(report_of(vec![fault.clone()], sent_at, inventory(GPUS)));
    assert_eq!(faulted.faults(), [("gpu_fault", wanted)]);
    // It is published once.
    let later = faulted.after(TimeDelta::seconds(5));
    let sent_at = sent_at + TimeDelta::seconds(5);
    assert_eq!(later.agent(report_of(vec![fault], sent_at, inventory(GPUS))).faults(), []);
    // A clock that runs ahead of its own report does not move the fault into the future.
    let story = node().active().ready();
    let ahead = ReportedFinding { first_at: story.now + TimeDelta::hours(1), ..xid(79, TENANTS) };
    let now = story.now;
    assert_eq!(story.finds(&[ahead]).faults(), [("gpu_fault", now)]);
}

#[test]
fn fault_that_is_dated_before_the_last_contact_stops_the_meter_no_earlier() {
    let story = node().active().ready().after(TimeDelta::hours(5)).finds(&[]).after(TimeDelta::seconds(10));
    let seen_at = story.node.agent.contact.as_ref().unwrap().last_seen_at;
    let wrong = ReportedFinding { first_at: Timestamp::UNIX_EPOCH, ..xid(79, TENANTS) };
    let at = story.finds(&[wrong]).faults()[0].1;
    assert_eq!(seen_at - at, TimeDelta::seconds(90));
    // After a silence of the agent, all of it may be the fault's.
    let silent = node().active().ready().after(TimeDelta::hours(5));
    let fault = ReportedFinding { first_at: silent.now - TimeDelta::hours(4), ..xid(79, TENANTS) };
    let wanted = silent.now - TimeDelta::hours(4);
    assert_eq!(silent.finds(&[fault]).faults(), [("gpu_fault", wanted)]);
}

#[test]
fn findings_are_bounded_and_those_without_consequences_go_first() {
    let shown = (0..100).map(|n| xid(10_000 + n, 1));
    let all: Vec<_> = std::iter::once(xid(79, 3)).chain(shown).collect();
    let story = without_repair().active().finds(&all);
    assert_eq!((story.node.health.findings.len(), story.node.gpus_free()), (MAX_STORED_FINDINGS, GPUS - 1));
    let size = serde_json::to_string(&story.node).unwrap().len();
    assert!(size < Node::SNAPSHOT_MOST / 2, "{size}");
}

#[test]
fn older_agent_is_judged_by_its_own_health() {
    let story = node().active().ready().finds(&[xid(79, 3)]);
    let older = story.agent(heartbeat(NodeHealthStatus::Critical, inventory(GPUS))).expect("quarantined");
    assert_eq!(older.faults()[0].0, "health_critical");
    assert_eq!(older.node.health.alerts(), Vec::<serde_json::Value>::new());
}

// The holds of a quarantine.

fn authors(story: &Story) -> Vec<HoldAuthor> {
    story.node.lifecycle.quarantine_holds().into_iter().map(|hold| hold.author).collect()
}

fn hung() -> ReportedFinding {
    found("driver", "hung", None)
}

#[test]
fn recovery_takes_back_its_own_hold_and_no_other() {
    let hung_node = node().active().finds(&[hung()]).expect("quarantined");
    assert_eq!(authors(&hung_node), [HoldAuthor::Health]);
    let recovered = hung_node.clone().finds(&[]).expect("active").publishes(&["node.state_changed"]);
    assert_eq!((authors(&recovered), recovered.node.gpus_free()), (vec![], GPUS));
    // An administrator's hold stays, whichever came first.
    let both = hung_node.quarantined().expect("quarantined");
    assert_eq!(authors(&both), [HoldAuthor::Health, HoldAuthor::Administrator]);
    assert_eq!(both.node.lifecycle.reason.code, StateCode::HealthCritical);
    let left = both.finds(&[]).expect("quarantined");
    assert_eq!(
        (authors(&left), left.node.lifecycle.reason.code.as_str()),
        (vec![HoldAuthor::Administrator], "quarantined")
    );
    let administrators = node().active().quarantined().finds(&[hung()]);
    assert_eq!(authors(&administrators), [HoldAuthor::Administrator, HoldAuthor::Health]);
    let left = administrators.finds(&[]).expect("quarantined");
    assert_eq!(authors(&left), [HoldAuthor::Administrator]);
    left.admin(Request::ReleaseQuarantine { reason: "r".into() }).expect("active");
}

#[test]
fn drift_and_health_are_held_at_once_and_end_one_by_one() {
    let story = node().active();
    let beat = |gpus, findings| report_of(findings, start(), inventory(gpus));
    let both = story.agent(beat(GPUS - 1, vec![hung()])).agent(beat(GPUS - 1, vec![hung()]));
    assert_eq!(authors(&both), [HoldAuthor::Health, HoldAuthor::Drift]);
    let drift = both.agent(beat(GPUS - 1, vec![])).expect("quarantined");
    assert_eq!(
        (authors(&drift), &drift.node.lifecycle.reason.code),
        (vec![HoldAuthor::Drift], &StateCode::InventoryDrift)
    );
    drift.agent(beat(GPUS, vec![])).expect("active");
}

#[test]
fn administrator_who_clears_the_finding_lifts_the_hold_of_health() {
    let cleared = node().active().finds(&[hung()]).expect("quarantined").clears(0);
    cleared.expect("active").finds(&[hung()]).expect("active");
}

#[test]
fn quarantine_of_an_earlier_release_has_the_hold_of_its_reason() {
    let mut story = node().active().finds(&[hung()]);
    story.node.lifecycle.quarantine_holds.clear();
    assert_eq!(authors(&story), [HoldAuthor::Health]);
    story.finds(&[]).expect("active");
}

#[test]
fn hold_of_a_node_that_leaves_quarantine_is_gone() {
    let retired = node().active().finds(&[hung()]).admin(retire(false)).expect("retired");
    assert_eq!(retired.node.lifecycle.quarantine_holds, []);
}

proptest! {
    /// Whatever a tenant's programs do, in whatever order it is reported: the tenant pays to the micro-unit, and the GPUs stay in rent.
    #[test]
    fn tenant_who_crashes_kernels_in_a_loop_pays_for_all_of_it(
        crashes in prop::collection::vec((0..TABLE.len(), 0..GPUS, 1..1_000_u64, 0..30_i64), 1..40),
        rate in 1..100_000_i64,
    ) {
        let of_tenants: Vec<&FindingRule> = TABLE.iter().filter(|rule| rule.cause == FindingCause::Tenant).collect();
        let begun = start();
        let mut story = node().active().ready();
        let mut reported: BTreeMap<(&str, u32), ReportedFinding> = BTreeMap::new();
        let mut stopped_at = None;
        for (row, gpu, count, seconds) in crashes {
            let rule = of_tenants[row % of_tenants.len()];
            story = story.after(TimeDelta::seconds(seconds));
            let now = story.now;
            let finding = reported.entry((rule.code, gpu)).or_insert_with(|| {
                ReportedFinding { count: 0, first_at: now, ..found(rule.probe, rule.code, Some(gpu)) }
            });
            finding.count += count;
            finding.last_at = now;
            let all: Vec<_> = reported.values().cloned().collect();
            story = story.finds(&all);
            stopped_at = stopped_at.or(story.faults().first().map(|fault| fault.1));
            prop_assert_eq!(story.node.state(), "active");
            prop_assert_eq!(story.node.gpus_free(), GPUS - 1);
        }
        let rate = serde_json::from_value::<HourlyRate>(rate.into()).unwrap();
        let paid = rate.over(begun, stopped_at.unwrap_or(story.now));
        prop_assert_eq!(paid, rate.over(begun, story.now));
    }
}
