//! Overrides of the table of findings: what follows from them, from the next heartbeat on.

use super::health::{found, xid};
use super::*;
use crate::finding::{CodePattern, FindingCause, FindingClass, Judgement, Repair, RuleOverride, RuleOverrides};

/// An Xid that no row has.
const NEW: u32 = 4711;

fn judgement(pattern: &str, classes: &[FindingClass]) -> Judgement {
    Judgement {
        pattern: CodePattern::parse(pattern).unwrap(),
        classes: classes.iter().copied().collect(),
        cause: FindingCause::Hardware,
        repair: Repair::Operator,
        tenant_message: "Leave the GPU.".into(),
    }
}

impl Story {
    fn overridden(mut self, judgements: &[Judgement]) -> Self {
        let written = judgements.iter().map(|judgement| {
            let (reason, written_by) = ("r".to_owned(), "user:root".to_owned());
            let written = RuleOverride { judgement: judgement.clone(), reason, written_by, written_at: start() };
            (judgement.pattern.clone(), written)
        });
        self.policy.set_health_rules(RuleOverrides(written.collect()));
        self
    }

    fn is_credited(&self) -> bool {
        self.published.iter().any(|event| matches!(event, Event::TenantFaulted { .. }))
    }
}

const FAILED: [FindingClass; 3] =
    [FindingClass::PreventAllocation, FindingClass::Evacuate, FindingClass::BillingCredit];

#[test]
fn new_xid_is_classified_for_findings_that_are_stored_already() {
    let shown = node().active().ready().finds(&[xid(NEW, 0)]);
    assert!(!shown.is_credited());
    let failed = shown.overridden(&[judgement("xid/4711", &FAILED)]).finds(&[xid(NEW, 0)]);
    assert!(failed.is_credited() && failed.node.evacuation_of(TENANT).is_some());
    let devices = &failed.node.tenancy.holds[&TENANT].placed.devices;
    assert_eq!(failed.node.tenant_messages(devices, start()), ["Leave the GPU."]);
    assert_eq!(failed.node.health.findings[0].repair(), Repair::Operator);
    // Taken back: the row holds again, and the tenant may stay.
    let over = failed.overridden(&[]).finds(&[xid(NEW, 0)]).publishes(&["node.evacuation_ended"]);
    assert_eq!(over.node.health.alerts()[0]["classifications"], serde_json::json!(["warn"]));
}

#[test]
fn row_of_the_table_is_weakened_and_strengthened_for_its_gpu_alone() {
    let weak = node().active().overridden(&[judgement("xid/79", &[FindingClass::Warn])]).finds(&[xid(79, 3)]);
    assert_eq!(weak.node.gpus_free(), GPUS);
    let all = [judgement("xid/*", &[FindingClass::Warn]), judgement("xid/63", &FAILED)];
    let strong = node().active().ready().overridden(&all).finds(&[xid(63, 3), xid(79, 2)]);
    assert_eq!((strong.node.gpus_free(), strong.is_credited()), (GPUS - 2, false));
    let slow = judgement("slowdown/*", &[FindingClass::PreventAllocation]);
    let withheld = node().active().overridden(&[slow]).finds(&[found("slowdown", "thermal", Some(1))]);
    assert_eq!(withheld.node.gpus_free(), GPUS - 1);
}

#[test]
fn override_of_what_a_tenant_can_cause_stops_no_meter_and_withholds_nothing() {
    // As a release may have stored it that did not know the cause.
    let story = node().active().ready().overridden(&[judgement("xid/13", &FAILED), judgement("xid/*", &FAILED)]);
    let crashed = story.finds(&[xid(13, 0), xid(31, 3)]).expect("active");
    assert!(!crashed.is_credited());
    assert_eq!(crashed.node.gpus_free(), GPUS - 1);
}

#[test]
fn finding_that_an_override_leaves_to_operators_does_not_end_by_itself() {
    let withheld = judgement("pcie/width", &[FindingClass::PreventAllocation]);
    let story = node().active().overridden(&[withheld]).finds(&[found("pcie", "width", Some(2))]);
    let unreported = story.finds(&[]);
    assert_eq!(unreported.node.gpus_free(), GPUS - 1);
    assert_eq!(unreported.clears(0).node.gpus_free(), GPUS);
}
