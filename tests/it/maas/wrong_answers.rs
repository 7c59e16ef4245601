//! Each way in which the provider fails, at each operation that changes a machine and where it names the user of the key.

use super::{LONG, builder, expect_status, expect_step, maas_node, start};
use tests::cluster::fake_maas::{FakeMaas, MaasFault};
use tests::cluster::{NodeHandle, TestCluster};

/// With what an operator is shown; `None` where the operation is done and its answer alone is lost, so that the next look finds it done.
const FAULTS: [(MaasFault, Option<&str>); 6] = [
    (MaasFault::Status(401), Some("refuses the API key")),
    (MaasFault::Status(409), Some("status does not allow it")),
    (MaasFault::Status(503), Some("busy or being maintained")),
    (MaasFault::Page, Some("web page")),
    (MaasFault::Slow, None),
    (MaasFault::Cut, None),
];

/// A machine on which one operation fails in one way.
struct FailingMachine {
    id: String,
    node: NodeHandle,
    operation: &'static str,
    shown: Option<&'static str>,
}

impl FailingMachine {
    async fn all(cluster: &TestCluster, maas: &FakeMaas) -> Vec<Self> {
        let mut all = Vec::new();
        for operation in ["allocate", "deploy", "release", "mark_broken"] {
            for (index, (fault, shown)) in FAULTS.into_iter().enumerate() {
                // In a path of the API other characters would be escaped, which the fake does not undo.
                let id = format!("{}{index}", operation.replace('_', ""));
                maas.add(&id, &id);
                maas.fail_operation(operation, &id, Some(fault));
                let node = cluster.admin.post("/api/v1/admin/nodes", &maas_node(&id)).await.created();
                let node = NodeHandle::of(&node, cluster.admin.clone());
                all.push(Self { id, node, operation, shown });
            }
        }
        all
    }

    async fn expect_deploying(&self, maas: &FakeMaas) {
        maas.wait_for(&self.id, "its deployment began", |machine| machine.deployments.len() == 1).await;
    }

    /// The operation has failed, which is shown, and from here on it does not fail.
    async fn expect_shown_and_restore(&self, cluster: &TestCluster, maas: &FakeMaas) {
        maas.expect_failed_operation(self.operation, &self.id).await;
        if let Some(shown) = self.shown {
            expect_status(cluster, &self.node, shown).await;
        }
        maas.fail_operation(self.operation, &self.id, None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_operation_that_fails_in_any_way_is_shown_and_done_once_by_a_later_pass() {
    let maas = FakeMaas::start().await;
    let mut cluster = start(&maas, builder(&maas)).await;
    // Before a machine is deployed the user of the key has to be known, so that each of these comes first.
    maas.fail_user_requests(FAULTS.map(|(fault, _)| fault));
    let all = FailingMachine::all(&cluster, &maas).await;
    let of = |operation: &'static str| all.iter().filter(move |it| it.operation == operation);

    for machine in of("release") {
        machine.expect_deploying(&maas).await;
        machine.node.order("retire").await.ok();
        machine.node.order("remove").await.accepted();
    }
    for machine in of("mark_broken") {
        machine.expect_deploying(&maas).await;
        maas.change(&machine.id, |machine| machine.status = "Failed deployment");
    }
    for machine in &all {
        machine.expect_shown_and_restore(&cluster, &maas).await;
    }
    for machine in of("allocate").chain(of("deploy")) {
        machine.expect_deploying(&maas).await;
    }
    for machine in of("release") {
        maas.wait_for(&machine.id, "it is released", |machine| machine.status == "Disk erasing").await;
        maas.change(&machine.id, |machine| (machine.status, machine.owner) = ("Ready", String::new()));
    }
    for machine in of("release") {
        let path = machine.node.path();
        cluster.admin.wait_within(LONG, &path, "it is removed", |node| node["state"] == "removed").await;
    }
    for machine in of("mark_broken") {
        expect_step(&cluster, &machine.node, "failed").await;
    }
    for FailingMachine { id, operation, .. } in &all {
        let machine = maas.machine(id);
        let done = (machine.deployments.len(), machine.erasures, machine.marked_broken);
        let wanted = (1, usize::from(*operation == "release"), usize::from(*operation == "mark_broken"));
        assert_eq!(done, wanted, "{id}: {machine:?}");
    }
    cluster.allow_error("node_removed");
    cluster.shutdown().await;
}
