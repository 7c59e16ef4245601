//! Every role of the specification in a process of its own.

use crate::billing::{allocation_request, expect_exact, expensive_sku};
use local_servers::process::free_port;
use serde_json::Value;
use std::time::{Duration, Instant};
use supervisors::process_roles::ProcessRole;
use tests::cluster::{AllocationHandle, TestCluster, WAIT_TIMEOUT, id_of};

/// The roles that listen where another role does, and the variable of their address.
const LISTENERS: [(ProcessRole, &str); 2] =
    [(ProcessRole::TerminalGateway, "SVC_PUBLIC_LISTEN"), (ProcessRole::NodeLogGateway, "SVC_NODE_LISTEN")];

#[tokio::test(flavor = "multi_thread")]
async fn roles_in_processes_of_their_own_rent_and_bill_together_and_serve_metrics() {
    let mut builder = TestCluster::builder().replicas(ProcessRole::ALL.len()).policy("billing.window_seconds", 1);
    for (index, role) in ProcessRole::ALL.iter().enumerate() {
        builder = builder.variable_of(index, "SVC_ROLES", role.name());
    }
    // These listeners are not behind the balancers of the public API and the node API.
    for (role, variable) in LISTENERS {
        let index = ProcessRole::ALL.iter().position(|other| *other == role).unwrap();
        // No other test's process takes it before the replica binds it.
        let elsewhere = format!("127.0.0.1:{}", free_port().unwrap());
        builder = builder.variable_of(index, variable, &elsewhere);
    }
    let mut cluster = builder.start().await;
    expensive_sku(&mut cluster).await;
    cluster.node("dear").await;
    let rented = cluster.user.post("/api/v1/allocations", &allocation_request(1)).await.created();
    let rented = AllocationHandle::new(id_of(&rented), cluster.user.clone());
    rented.expect_state("active").await;

    // The account is owned by the process with the entities, which does not run accrual; the relay has no entities, and publishes.
    let charged = |page: &Value| {
        page["items"].as_array().is_some_and(|items| {
            items.iter().filter(|posting| posting["allocation_id"] == rented.id.to_string()).count() >= 3
        })
    };
    cluster.user.wait_until("/api/v1/billing/ledger?limit=50", "three windows are charged", charged).await;
    rented.release().await;
    rented.expect_state("released").await;
    expect_exact(&cluster.user).await;

    let report = cluster.admin.get("/api/v1/admin/runtime/cluster").await.ok();
    let members = report["members"].as_array().unwrap();
    for (replica, role) in cluster.replicas.iter().zip(ProcessRole::ALL) {
        let sees = |page: &str, role: &ProcessRole| {
            let line = format!("cluster_role_members{{role=\"{}\"}} 1", role.name());
            page.lines().any(|at| at == line)
        };
        // A member that was paused is seen again with its next heartbeat.
        let until = Instant::now() + WAIT_TIMEOUT;
        let page = loop {
            let page =
                reqwest::get(format!("{}/metrics", replica.operations_url())).await.unwrap().text().await.unwrap();
            if ProcessRole::ALL.iter().all(|other| sees(&page, other)) || Instant::now() > until {
                break page;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let has = |line: &str| page.lines().any(|at| at == line);
        assert!(page.contains(&format!("roles=\"{}\"", role.name())), "{role:?}: {page}");
        for other in ProcessRole::ALL {
            assert!(sees(&page, &other), "{role:?} sees {other:?}: {page}");
        }
        let owns = if role == ProcessRole::Entities { "256" } else { "0" };
        assert!(has(&format!("shards_owned {owns}")), "{role:?}");
        let reported = members.iter().find(|member| member["name"] == replica.name()).unwrap();
        assert_eq!(reported["roles"], serde_json::json!([role.name()]));
    }
    cluster.shutdown().await;
}
