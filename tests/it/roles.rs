//! Every role of the specification in a process of its own.

use crate::billing::{dear_sku, expect_exact, wanted};
use serde_json::Value;
use std::net::TcpListener;
use std::time::Duration;
use supervisors::config::Role;
use tests::world::{Rented, World, id_of};

const GATEWAY: usize = 2;

#[tokio::test(flavor = "multi_thread")]
async fn every_role_runs_in_a_process_of_its_own_rents_and_bills_together_and_shows_its_figures() {
    let mut plan = World::plan().replicas(Role::ALL.len()).policy("billing.window_seconds", 1);
    for (index, role) in Role::ALL.iter().enumerate() {
        plan = plan.variable_of(index, "SVC_ROLES", role.name());
    }
    assert_eq!(Role::ALL[GATEWAY], Role::TerminalGateway);
    // The gateway's listener is not behind the balancer of the public API.
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut world = plan.variable_of(GATEWAY, "SVC_PUBLIC_LISTEN", &elsewhere.to_string()).start().await;
    dear_sku(&mut world).await;
    world.node("dear").await;
    let rented = world.user.post("/api/v1/allocations", &wanted(1)).await.created();
    let rented = Rented::new(id_of(&rented), world.user.clone());
    rented.expect_state("active").await;

    // The account lives with the entities, which do not charge; the relay has no entities, and publishes.
    let charged = |page: &Value| {
        page["items"].as_array().is_some_and(|items| {
            items.iter().filter(|posting| posting["allocation_id"] == rented.id.to_string()).count() >= 3
        })
    };
    let limit = Duration::from_secs(30);
    world.user.wait_within(limit, "/api/v1/billing/ledger?limit=50", "three windows are charged", charged).await;
    rented.release().await;
    rented.expect_state("released").await;
    expect_exact(&world.user).await;

    let report = world.admin.get("/api/v1/admin/runtime/cluster").await.ok();
    let members = report["members"].as_array().unwrap();
    for (replica, role) in world.replicas.iter().zip(Role::ALL) {
        let page = reqwest::get(format!("{}/metrics", replica.operations_url())).await.unwrap().text().await.unwrap();
        let has = |line: &str| page.lines().any(|at| at == line);
        assert!(page.contains(&format!("roles=\"{}\"", role.name())), "{role:?}: {page}");
        for other in Role::ALL {
            assert!(has(&format!("cluster_role_members{{role=\"{}\"}} 1", other.name())), "{role:?} sees {other:?}");
        }
        let owns = if role == Role::Entities { "256" } else { "0" };
        assert!(has(&format!("shards_owned {owns}")), "{role:?}");
        let reported = members.iter().find(|member| member["name"] == replica.name()).unwrap();
        assert_eq!(reported["roles"], serde_json::json!([role.name()]));
    }
    world.end().await;
}
