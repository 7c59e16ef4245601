//! A GPU belongs to one node in the cluster.

use super::*;

const FIRST: Uuid = Uuid::from_u128(0xB);

fn holders(index: u32) -> BTreeMap<String, Uuid> {
    BTreeMap::from([(format!("gpu/gpu-{index}"), FIRST)])
}

impl Story {
    /// The store has rejected the claim: another node has the GPU with this index.
    fn refused_by_the_store(
        &self,
        by: &Principal,
        index: u32,
        command: impl Into<Command>,
    ) -> Result<Transition<Node>, Rejection> {
        Node::decide_without(Some(&self.node), command.into(), &holders(index), &ctx(self.now, &self.policy, by))
    }

    fn contested(mut self, index: u32, command: impl Into<Command>) -> Self {
        let step = self.refused_by_the_store(&agent(), index, command).unwrap();
        self.node = step.next.unwrap();
        self.published = step.events;
        self
    }
}

#[test]
fn node_claims_its_gpus_from_its_first_poll_until_it_is_removed() {
    let all: BTreeSet<_> = (0..GPUS).map(|index| format!("gpu/gpu-{index}")).collect();
    assert_eq!(node().enrolled().node.claims(), BTreeSet::new());
    assert_eq!(node().active().node.claims(), all);
    assert_eq!(node().active().offline().node.claims(), all);
    assert_eq!(node().active().quarantined().node.claims(), all);
    assert_eq!(node().active().retired().node.claims(), all);
    assert_eq!(node().active().retired().removing().node.claims(), BTreeSet::new());
}

#[test]
fn node_that_reports_a_claimed_gpu_is_quarantined_with_the_holders_id() {
    let contested = node().enrolled().contested(1, poll());
    assert_eq!(contested.node.lifecycle.phase, Phase::Quarantined { was: Box::new(Phase::Active) });
    assert_eq!(contested.node.lifecycle.reason.code.as_str(), "gpu_of_another_node");
    assert!(
        contested.node.lifecycle.reason.message.contains(&FIRST.to_string()),
        "{}",
        contested.node.lifecycle.reason.message
    );
    assert_eq!(contested.node.claims().len(), 3, "its other GPUs are its own");
    let from_to = contested.published.iter().filter_map(|event| {
        if let Event::NodeStateChanged { from, to, .. } = event { Some((from.as_deref(), to.as_str())) } else { None }
    });
    let from_to: Vec<_> = from_to.collect();
    assert_eq!(from_to, [(Some("enrolling"), "quarantined")]);
    let step = node().enrolled().refused_by_the_store(&agent(), 1, poll()).unwrap();
    let actions: Vec<_> = step.audit.iter().map(|audit| audit.action).collect();
    assert_eq!(actions, [AuditAction::NodesQuarantine]);
}

#[test]
fn active_node_that_loses_a_gpu_claim_is_quarantined_and_keeps_its_tenants() {
    let contested = node().active().reserved().contested(0, heartbeat(NodeHealthStatus::Ok, inventory(GPUS)));
    assert_eq!(contested.node.state(), "quarantined");
    assert_eq!(contested.node.tenancy.holds.len(), 1);
}

#[test]
fn no_tenant_is_placed_on_a_contested_gpu() {
    let refused = node().active().refused_by_the_store(&worker(), 0, reserve(TENANT, 1)).unwrap_err();
    let Rejection::NotSchedulable { why } = refused else { panic!("{refused}") };
    assert!(why.contains(&FIRST.to_string()), "{why}");
}

#[test]
fn quarantine_is_released_only_when_no_other_node_has_the_gpu() {
    let contested = node().enrolled().contested(1, poll());
    let release = Request::ReleaseQuarantine { reason: "r".into() };
    let refused = contested.refused_by_the_store(&admin(), 1, release.clone()).unwrap_err();
    let Rejection::NotInOrder { why } = refused else { panic!("{refused}") };
    assert!(why.contains(&FIRST.to_string()), "{why}");
    let released = contested.admin(release).node;
    assert_eq!(
        (released.lifecycle.phase.clone(), released.claims().len()),
        (Phase::Active, 4),
        "the store takes the claims"
    );
}

#[test]
fn conflict_ends_when_the_node_reports_other_gpus() {
    let mut other = inventory(GPUS);
    other.gpus[1].uuid = "GPU-9".into();
    let corrected = node().enrolled().contested(1, poll()).agent(heartbeat(NodeHealthStatus::Ok, other)).node;
    assert_eq!((corrected.machine.contested_gpus.len(), corrected.state()), (0, "quarantined"));
    assert!(corrected.claims().contains("gpu/gpu-9"));
}
