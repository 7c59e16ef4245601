//! What a node adds to the sums of GPUs, from its registration to its removal.

use super::*;
use crate::summand::SumGroup;

/// Its free GPUs, and those that are registered, sold and held.
fn counted(story: &Story) -> Option<(u32, i64, i64, i64)> {
    let summand = story.node.summand()?;
    let SumGroup::Gpus { gpus_free, sku, region_code, .. } = summand.group else { panic!("{summand:?}") };
    assert_eq!((sku.as_str(), region_code.as_str(), summand.amounts.entities), ("h100x4", "eu", 1));
    Some((gpus_free, summand.amounts.gpus_total, summand.amounts.gpus_sold, summand.amounts.gpus_held))
}

#[test]
fn gpus_are_held_until_their_tenant_is_set_up_and_again_until_its_clean_up_is_proved() {
    let (all, left) = (i64::from(GPUS), GPUS - 1);
    let cases = [
        ("registered", node(), (0, all, 0, 0)),
        ("active", node().active(), (GPUS, all, 0, 0)),
        ("reserved", node().active().reserved(), (left, all, 0, 1)),
        ("being set up", node().active().provisioning(), (left, all, 0, 1)),
        ("not set up", node().active().setup_failed(), (left, all, 0, 1)),
        ("ready", node().active().ready(), (left, all, 1, 0)),
        ("cleaned up", node().active().releasing(), (left, all, 0, 1)),
        ("not cleaned up", node().active().release_failed(), (0, all, 0, 1)),
        ("abandoned", node().active().abandoned(), (0, all, 0, 1)),
        ("proved", node().active().releasing().reports(PROVED), (GPUS, all, 0, 0)),
        ("offline with a tenant", node().active().ready().offline(), (0, all, 1, 0)),
        ("quarantined", node().active().quarantined(), (0, all, 0, 0)),
        ("retired", node().active().retired(), (0, all, 0, 0)),
    ];
    for (name, story, expected) in cases {
        assert_eq!(counted(&story), Some(expected), "{name}");
    }
    assert_eq!(counted(&node().active().retired().removing()), None);
}

#[test]
fn snapshot_adds_what_its_node_adds() {
    for (name, story) in holds() {
        let stored: Node = serde_json::from_str(&serde_json::to_string(&story.node).unwrap()).unwrap();
        assert_eq!(stored.summand(), story.node.summand(), "{name}");
    }
}
