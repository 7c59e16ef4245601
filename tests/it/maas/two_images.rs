//! A fleet in which the image changes: each machine has to show the image that its own deployment was ordered with.

use super::{
    GPUS, MACHINE, come_up, delivered_bundle, deploying, enroll, enroll_with, expect_step, reinstall, with_settings,
};
use serde_json::{Value, json};
use tests::cluster::fake_maas::FakeMaas;

/// The name of the image in the settings of [`with_settings`] at first, and that of the one after it, with its digest.
const FIRST: &str = "gpu-node-1";
const SECOND: &str = "gpu-node-2";
const SECOND_DIGEST: &str = "sha256:of-the-second-image";

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_reinstalled_with_the_image_of_the_changed_settings_and_an_order_before_them_keeps_its_own() {
    let maas = FakeMaas::start().await;
    let plan = with_settings(&maas).policy("maas.enabled", true).variable("MAAS_IMAGE", FIRST);
    let (mut cluster, node) = deploying(&maas, plan).await;
    come_up(&mut cluster, &maas, &node, "system 1").await.wait(1).await;
    node.expect_state("active").await;
    expect_step(&cluster, &node, "deployed").await;

    // Ordered with the first image; the settings change before the system comes up.
    node.order("reimage").await.ok();
    reinstall(&maas, 2).await;
    cluster.kill9_replica(0);
    cluster.replicas[0].set_variable("MAAS_IMAGE", SECOND);
    cluster.replicas[0].set_variable("MAAS_IMAGE_DIGEST", SECOND_DIGEST);
    cluster.restart_replica(0).await;
    let agent = come_up(&mut cluster, &maas, &node, "system 2").await;
    let validate = agent.next_task().await;
    agent.report(validate.task_id, &agent.success(&validate)).await.ok();
    node.expect_state("active").await;
    expect_step(&cluster, &node, "deployed").await;

    // Registered with the first image, and reinstalled with the second one: the first is refused then.
    node.order("reimage").await.ok();
    reinstall(&maas, 3).await;
    maas.change(MACHINE, |machine| machine.status = "Deployed");
    let bundle = delivered_bundle(&mut cluster, &maas, node.id).await;
    let (refused, _) = enroll(&bundle, "system 3").await;
    refused.expect_error(401, "enrollment_rejected");
    let shows_both = |node: &Value| {
        let message = node["state_reason"]["message"].as_str().unwrap_or_default();
        node["state_reason"]["code"] == "system_refused" && message.contains(SECOND_DIGEST)
    };
    cluster.admin.wait_until(&node.path(), "the image before is refused", shows_both).await;

    node.order("reimage").await.ok();
    reinstall(&maas, 4).await;
    maas.change(MACHINE, |machine| machine.status = "Deployed");
    let bundle = delivered_bundle(&mut cluster, &maas, node.id).await;
    let (enrolled, agent) = enroll_with(&bundle, "system 4", SECOND_DIGEST).await;
    let agent = agent(enrolled.created());
    let validate = agent.next_task().await;
    agent.report(validate.task_id, &agent.success(&validate)).await.ok();
    let active = node.expect_state("active").await;
    assert_eq!(active["gpus_free"], json!(GPUS));
    assert_eq!(maas.machine(MACHINE).images, [FIRST, FIRST, SECOND, SECOND]);
    cluster.shutdown().await;
}
