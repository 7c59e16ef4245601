//! The fake provider is one to a client of MAAS that is not ours: what the service's own client is tested with is MAAS's API.

use super::MACHINE;
use crate::external_tools::{installed, root, run};
use serde_json::{Value, json};
use std::process::Command;
use tests::cluster::fake_maas::{API_KEY, FakeMaas, USER};

#[tokio::test(flavor = "multi_thread")]
async fn another_client_allocates_deploys_and_releases_a_machine() {
    let maas = FakeMaas::start().await;
    maas.add(MACHINE, "gpu-1");
    maas.add("other", "gpu-2");
    let mut client = Command::new(installed("libmaas/bin/python"));
    client.arg(root().join("tests/it/maas/python_libmaas.py")).args([maas.url(), API_KEY, MACHINE, "gpu-1"]);
    let seen: Value = serde_json::from_str(run(client).await.lines().last().unwrap()).unwrap();
    let expected = json!({
        "user": USER,
        "stranger": 401,
        "listed": [MACHINE],
        "not_allocated": 409,
        "allocated": "Allocated",
        "taken": 409,
        "deployed": "Deploying",
        "again": 409,
        "read": USER,
        "unknown": 404,
        "released": "Disk erasing",
        "broken": "Broken",
    });
    assert_eq!(seen, expected);
    let machine = maas.machine(MACHINE);
    let user_data = format!("#!/bin/sh\necho {}\n", "x".repeat(10_000));
    assert_eq!(machine.deployments, [user_data]);
    assert_eq!((machine.erasures, machine.marked_broken), (1, 1));
}
