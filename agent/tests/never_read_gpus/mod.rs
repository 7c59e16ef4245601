//! A GPU that the driver has never named to the agent: it alone is out of rent.

use uuid::Uuid;
use wire::heartbeat::Heartbeat;

use super::GpuMachine;
use super::fake_control_plane::eventually;

/// `NVML_ERROR_UNKNOWN`.
const UNKNOWN: u32 = 999;

#[tokio::test]
async fn gpu_that_was_never_read_is_a_fault_of_its_place_and_the_others_are_provisioned() {
    let mut node = GpuMachine::with_gpus(3).await;
    node.change(|machine| machine.gpus[1].errors = [("nvmlDeviceGetUUID".to_owned(), UNKNOWN)].into());
    node.log_xid(10, 1, 79);
    let _agent = node.agent(&[]);
    // Its address ends in 0.
    let found = node.finds(&["gpu/unreadable 0", "xid/79 0"]).await;
    let sent = node.fake.calls().heartbeats.len();
    assert!(found.iter().all(|it| it.gpu_uuid.as_deref() == Some("PCI-0000:11:00")), "{found:?}");
    assert!(found.iter().all(|it| it.detail.contains("0000:11:00")), "{found:?}");
    eventually(|| node.heartbeat().filter(|it| it.inventory.gpus.len() == 2)).await;
    node.fake.set_up(Uuid::now_v7()).await;
    // What has occurred on it is of the GPU once that has a name.
    node.change(|machine| machine.gpus[1].errors.clear());
    let found = node.finds(&["xid/79 1"]).await;
    assert_eq!((found[0].gpu_uuid.as_ref(), found[0].count), (Some(&node.machine.gpus[1].uuid), 1));
    // As a control plane counts them.
    let unlisted = |it: &Heartbeat| it.findings.iter().flatten().filter(|it| it.probe == "gpu").count();
    let counted = |it: &Heartbeat| it.inventory.gpus.len() + unlisted(it);
    let counts: Vec<_> = node.fake.calls().heartbeats[sent..].iter().map(counted).collect();
    assert!(counts.iter().all(|count| *count == 3), "{counts:?}");
}
