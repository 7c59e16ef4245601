//! The catalog.

use super::world::{World, sku_body};
use axum::http::Method;
use serde_json::json;

#[tokio::test]
async fn a_sku_is_drafted_activated_repriced_and_taken_out_of_the_offer() {
    let world = World::new().await;
    let created = world.post("/api/v1/admin/skus").admin().json(&sku_body("h100x4", 4)).send().await;
    let sku = created.is(201).clone();
    let offered =
        async || world.get("/api/v1/skus").user("ann").send().await.is(200)["items"].as_array().unwrap().len();
    assert_eq!((sku["status"].as_str(), offered().await), (Some("draft"), 0));
    let path = format!("/api/v1/admin/skus/{}", sku["id"].as_str().unwrap());
    let decision =
        json!({"reason": "tested", "role": "inventory_owner", "impact_review": "none\nat all", "rollback_plan": "x"});
    let active = world.post(&format!("{path}/activate")).admin().json(&decision).send().await;
    assert_eq!((active.is(200)["status"].as_str(), offered().await), (Some("active"), 1));
    assert_eq!(active.body["approvals"][0]["actor"], "user:root");
    let dearer = json!({"price": {"currency": "EUR", "amount_minor_per_gpu_hour": 300}, "allowed_regions": ["eu-2"]});
    let revised = world.call(Method::PATCH, &path).admin().json(&dearer).send().await;
    assert_eq!(revised.is(200)["price"]["amount_minor_per_gpu_hour"], 300);
    assert_eq!(world.get(&path).admin().send().await.is(200), &revised.body);
    world.post(&format!("{path}/deactivate")).admin().json(&json!({"reason": "old"})).send().await.is(200);
    assert_eq!(offered().await, 0);
    let inactive = world.get("/api/v1/admin/skus?status=inactive").admin().send().await;
    assert_eq!(inactive.is(200)["items"][0]["id"], sku["id"]);
    let mut shown = inactive.body["items"][0].clone();
    for field in ["id", "created_at"] {
        shown[field] = "<varies>".into();
    }
    shown["approvals"].as_array_mut().unwrap().iter_mut().for_each(|approval| approval["at"] = "<varies>".into());
    insta::assert_json_snapshot!("sku", shown);
}

#[tokio::test]
async fn what_is_no_sku_is_refused() {
    let world = World::new().await;
    world.post("/api/v1/admin/skus").admin().json(&sku_body("taken", 4)).send().await.is(201);
    let draft =
        world.get("/api/v1/admin/skus").admin().send().await.is(200)["items"][0]["id"].as_str().unwrap().to_owned();
    let mut lines = Vec::new();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut body = sku_body("new", 4);
        change(&mut body);
        body
    };
    for body in [
        sku_body("taken", 4),
        sku_body("018f4e2a-7c1b-7000-8000-000000000001", 4),
        sku_body("with space", 4),
        sku_body(&"x".repeat(65), 4),
        sku_body("new", 0),
        sku_body("new", 65),
        with(&|body| body["gpu"]["memory_mib"] = json!(-1)),
        with(&|body| body["gpu"]["memory_mib"] = json!(u64::MAX)),
        with(&|body| body["price"]["currency"] = json!("euro")),
        with(&|body| body["price"]["amount_minor_per_gpu_hour"] = json!(-1)),
        with(&|body| body["price"]["amount_minor_per_gpu_hour"] = json!(2.5)),
        with(&|body| body["allowed_regions"] = json!((0..65).map(|n| format!("r{n}")).collect::<Vec<_>>())),
        with(&|body| body["gpu"]["colour"] = json!("green")),
        with(&|body| body["status"] = json!("active")),
        with(&|body| body["interconnect"] = json!("a\u{0}b")),
    ] {
        lines.push(world.post("/api/v1/admin/skus").admin().json(&body).send().await.line());
    }
    let path = format!("/api/v1/admin/skus/{draft}");
    lines.push(world.call(Method::PATCH, &path).admin().json(&json!({})).send().await.line());
    lines.push(world.post(&format!("{path}/deactivate")).admin().json(&json!({"reason": "x"})).send().await.line());
    lines.push(world.post(&format!("{path}/activate")).admin().json(&json!({})).send().await.line());
    lines.push(
        world
            .post(&format!("{path}/activate"))
            .admin()
            .json(&json!({"reason": "x", "role": "king"}))
            .send()
            .await
            .line(),
    );
    let nowhere = "/api/v1/admin/skus/018f4e2a-7c1b-7000-8000-000000000001";
    lines.push(world.get(nowhere).admin().send().await.line());
    lines.push(world.post(&format!("{nowhere}/activate")).admin().json(&json!({"reason": "x"})).send().await.line());
    lines.push(world.get("/api/v1/admin/skus?status=gone").admin().send().await.line());
    lines.push(world.get("/api/v1/skus?status=active").user("ann").send().await.line());
    insta::assert_snapshot!(lines.join("\n"));
}
