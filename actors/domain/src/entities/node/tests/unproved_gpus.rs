//! GPUs that a clean-up proof leaves out: the tenant is gone, and each of them waits for its own proof.

use super::health::{found, report_of};
use super::*;

fn gap(story: &Story, gpus: &[u32]) -> Option<Box<ProofGap>> {
    let gpus = gpus.iter().map(|gpu| (format!("GPU-{gpu}"), "the GPU is lost".to_owned())).collect();
    Some(Box::new(ProofGap { checked_at: story.now, gpus }))
}

impl Story {
    /// The clean-up proof of the tenant, which has GPU 0, leaves out these GPUs.
    #[track_caller]
    fn proves_all_but(self, gpus: &[u32]) -> Self {
        let (task_id, attempt) = self.task();
        let unproved = gap(&self, gpus);
        self.agent(Request::Report { serial: SERIAL.into(), task_id, attempt, verdict: PROVED, output: None, unproved })
    }
}

/// A node that nothing reboots or resets by itself.
fn unrepaired() -> Story {
    node().active().policy(PolicyKey::NodeRepairAttempts, 0)
}

fn unproved(gpu: u32) -> ReportedFinding {
    found("clean_up", "unproved", Some(gpu))
}

#[test]
fn tenant_is_gone_and_its_gpu_alone_gets_no_other_one_until_it_is_proved() {
    let released = unrepaired().releasing().proves_all_but(&[0]).publishes(&["node.tenant_gone"]);
    assert_eq!(
        (released.node.tenancy.holds.len(), released.node.gpus_free(), released.node.gpus_withheld()),
        (0, GPUS - 1, 1)
    );
    let rented = released.clone().after_fact(reserve(OTHER, GPUS - 1));
    assert!(!rented.node.tenancy.holds_gpu("GPU-0") && rented.node.has_one_tenant_on_each_gpu());
    let later = released.after(TimeDelta::seconds(10)).finds(&[unproved(0)]);
    assert_eq!(later.node.gpus_free(), GPUS - 1, "the agent waits for it");
    let proved = later.after(TimeDelta::seconds(10)).finds(&[]);
    assert_eq!((proved.node.gpus_free(), proved.node.tenancy.unproved_gpus.len()), (GPUS, 0));
}

#[test]
fn report_that_was_sent_before_the_proof_frees_nothing() {
    let released = unrepaired().releasing().after(TimeDelta::seconds(10)).proves_all_but(&[0]);
    let before = released.now - TimeDelta::seconds(1);
    for sent_at in [before, released.now] {
        let overtaken = released.clone().agent(report_of(vec![], sent_at, inventory(GPUS)));
        assert_eq!(overtaken.node.gpus_free(), GPUS - 1);
    }
    let truncated = FindingReport { sent_at: released.now + TimeDelta::hours(1), findings: vec![], is_truncated: true };
    let health = NodeHealth { report: Some(truncated), ..NodeHealth::default() };
    let (serial, seen, inventory) = (SERIAL.into(), seen("boot-1"), Box::new(inventory(GPUS)));
    let heartbeat = Request::Heartbeat { serial, seen, inventory, health: Box::new(health) };
    assert_eq!(released.agent(heartbeat).node.gpus_free(), GPUS - 1, "nor does one that leaves findings out");
}

#[test]
fn gpu_of_another_tenant_is_never_withheld_by_a_proof() {
    let both = unrepaired().releasing().after_fact(reserve(OTHER, 1));
    let released = both.proves_all_but(&[0, 1, 2]);
    assert_eq!(released.node.tenancy.unproved_gpus.keys().collect::<Vec<_>>(), ["GPU-0"]);
    assert!(released.node.tenancy.holds_gpu("GPU-1") && released.node.has_one_tenant_on_each_gpu());
}

#[test]
fn clearing_the_finding_proves_nothing() {
    let released = unrepaired().releasing().proves_all_but(&[0]).after(TimeDelta::seconds(10)).finds(&[unproved(0)]);
    let cleared = released.clears(0);
    assert_eq!(cleared.node.gpus_free(), GPUS - 1);
}

#[test]
fn missing_gpu_that_an_operator_has_cleared_belongs_to_the_machine_no_more() {
    let missing = found("gpu", "missing", Some(GPUS - 1));
    let beat = |story: Story| {
        let sent_at = story.now;
        story.agent(report_of(vec![missing.clone()], sent_at, inventory(GPUS - 1)))
    };
    let lost = beat(unrepaired());
    assert_eq!((lost.node.state(), lost.node.gpus_free()), ("active", GPUS - 1), "a fault is no drift");
    assert_eq!(beat(lost.clears(0)).node.state(), "quarantined", "the machine has fewer GPUs than its SKU promises");
}
