//! A machine that another user of the provider has is touched in no step.

use super::{LONG, LOOKS, MACHINE, builder, come_up, deploying, expect_status, expect_step};
use tests::cluster::fake_maas::FakeMaas;

const OTHER: &str = "somebody";

fn take(maas: &FakeMaas) {
    maas.change(MACHINE, |machine| (machine.status, machine.owner) = ("Allocated", OTHER.to_owned()));
}

fn give_back(maas: &FakeMaas) {
    maas.change(MACHINE, |machine| (machine.status, machine.owner) = ("Ready", String::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_of_another_user_is_neither_deployed_nor_marked_nor_released() {
    let maas = FakeMaas::start().await;
    let (mut cluster, node) = deploying(&maas, builder(&maas)).await;
    take(&maas);
    expect_step(&cluster, &node, "failed").await;
    let failed = node.get().await;
    assert!(failed["state_reason"]["message"].as_str().unwrap().contains("another user"), "{failed}");
    let machine = maas.machine(MACHINE);
    assert_eq!((machine.deployments.len(), machine.marked_broken, machine.status), (1, 0, "Allocated"));

    // It is to be erased before it is deployed again, and is not this user's to erase.
    node.order("reimage").await.ok();
    expect_status(&cluster, &node, "another user").await;
    tokio::time::sleep(LOOKS).await;
    let machine = maas.machine(MACHINE);
    assert_eq!((machine.deployments.len(), machine.erasures, machine.status), (1, 0, "Allocated"));
    give_back(&maas);
    maas.wait_for(MACHINE, "it is deployed again", |machine| machine.deployments.len() == 2).await;
    let agent = come_up(&mut cluster, &maas, &node, "first").await;
    agent.wait(1).await;
    node.expect_state("active").await;
    expect_step(&cluster, &node, "deployed").await;

    take(&maas);
    node.order("retire").await.ok();
    node.order("remove").await.accepted();
    cluster.admin.wait_within(LONG, &node.path(), "it is removed", |node| node["state"] == "removed").await;
    let machine = maas.machine(MACHINE);
    assert_eq!((machine.erasures, machine.status, machine.owner.as_str()), (0, "Allocated", OTHER));
    cluster.allow_error("node_removed");
    cluster.shutdown().await;
}
