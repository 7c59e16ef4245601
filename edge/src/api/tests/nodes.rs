//! Onboarding of nodes and the inventory.

use super::harness::{ApiHarness, TestResponse, node_body};
use axum::http::Method;
use chrono::TimeDelta;
use domain::node::{Command, FindingReport, Instruction, Node, NodeHealth, Phase, Reply, ReportedFinding, Request};
use domain::policy::PolicyKey;
use domain::state_machine::Command as _;
use domain::{AllocationId, Principal};
use serde_json::{Value, json};
use uuid::Uuid;

fn reason_body() -> Value {
    json!({"reason": "a test wants it"})
}

#[tokio::test]
async fn node_is_registered_read_changed_and_listed() {
    let api = ApiHarness::new().await;
    let sku = api.sku("h100x4", 4).await;
    let created = api.post("/api/v1/admin/nodes").admin().json(&node_body(&sku, 4)).send().await;
    let node = created.is(201).clone();
    assert_eq!(created.headers["etag"], "\"1\"");
    let mut shown = node.clone();
    for field in ["id", "state_entered_at", "created_at", "updated_at"] {
        assert!(shown[field].is_string());
        shown[field] = "<varies>".into();
    }
    insta::assert_json_snapshot!("node", shown);

    let path = format!("/api/v1/admin/nodes/{}", node["id"].as_str().unwrap());
    let read = api.get(&path).admin().send().await;
    assert_eq!((read.is(200), &read.headers["etag"]), (&node, &created.headers["etag"]));
    let change = |etag: &str| {
        api.call(Method::PATCH, &path)
            .admin()
            .header("if-match", etag)
            .json(&json!({"port": 2222, "host": "GPU-18.internal."}))
    };
    let stale = change("\"7\"").send().await;
    assert_eq!(stale.refused(409, "state_conflict")["field"], "If-Match");
    change("7").send().await.refused(400, "invalid_request");
    let changed = change("\"1\"").send().await;
    assert_eq!((&changed.is(200)["port"], &changed.body["host"]), (&json!(2222), &json!("gpu-18.internal")));
    assert_eq!((&changed.body["generation"], &changed.headers["etag"].to_str().unwrap()), (&json!(2), &"\"2\""));
    assert!(changed.body["updated_at"].as_str() > node["updated_at"].as_str());
    assert_eq!(changed.body["created_at"], node["created_at"]);
    change("*").send().await.is(200);

    api.node("h100x4", 4).await;
    let count = async |query: &str| {
        let page = api.get(&format!("/api/v1/admin/nodes{query}")).admin().send().await;
        (page.is(200)["items"].as_array().unwrap().len(), page.body["next_page"].as_str().map(str::to_owned))
    };
    let (first, next) = count("?limit=1&sku=h100x4").await;
    assert_eq!(first, 1);
    let next = next.unwrap();
    assert_eq!(count(&format!("?limit=1&sku=h100x4&page_token={next}")).await, (1, None));
    assert_eq!(count("?state=active").await, (0, None));
    let foreign = api.get(&format!("/api/v1/admin/nodes?page_token={next}")).admin().send().await;
    assert_eq!(foreign.refused(400, "invalid_request")["field"], "page_token");
    api.get("/api/v1/admin/nodes?sku=unknown").admin().send().await.refused(400, "invalid_request");
}

#[tokio::test]
async fn enrollment_token_is_shown_once_and_not_stored() {
    let api = ApiHarness::with_sku().await;
    let id = api.node("h100x4", 4).await;
    let path = format!("/api/v1/admin/nodes/{id}/enrollment-token");
    let issue = async |body: Option<Value>| -> TestResponse {
        let call = api.post(&path).admin().key("the same");
        match body {
            Some(body) => call.json(&body).send().await,
            None => call.send().await,
        }
    };
    let first = issue(None).await;
    assert_eq!(
        first.is(201)["bootstrap_bundle"]["node_id"]
            .as_str()
            .or(first.body["bootstrap_bundle"]["SVC_NODE_ID"].as_str()),
        Some(id.to_string().as_str())
    );
    assert_eq!(first.headers["cache-control"], "no-store");
    let second = issue(Some(json!({"ttl_seconds": 60}))).await;
    second.is(201);
    assert!(!second.is_replayed());
    assert_ne!(second.body["token_id"], first.body["token_id"]);
    assert_ne!(second.body["bootstrap_bundle"], first.body["bootstrap_bundle"]);
    let left = second.body["expires_at"].as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>().unwrap()
        - chrono::Utc::now();
    assert!(left <= TimeDelta::seconds(60) && left > TimeDelta::seconds(50));
    for ttl in [json!(4), json!(86_401), json!("60"), json!(-5)] {
        issue(Some(json!({"ttl_seconds": ttl}))).await.refused(400, "invalid_request");
    }
    let Reply::Node { node } = api
        .ask::<Node>(&Principal::Caller(root_caller()), id.0, Request::Quarantine { reason: "x".into() })
        .await
        .unwrap()
        .reply
    else {
        panic!("no node")
    };
    assert!(!serde_json::to_string(&node).unwrap().contains("gpuenr_"));
    issue(None).await.refused(400, "invalid_request");
}

fn root_caller() -> domain::authz::CallerIdentity {
    domain::authz::CallerIdentity::new("root", [domain::authz::TokenRole::Admin])
}

/// The health of an agent that reports these findings: probe, code and GPU.
pub(super) fn findings(found: &[(&str, &str, Option<String>)]) -> NodeHealth {
    let at = chrono::Utc::now();
    let finding = |(probe, code, gpu_uuid): &(&str, &str, Option<String>)| ReportedFinding {
        probe: (*probe).to_owned(),
        gpu_uuid: gpu_uuid.clone(),
        code: (*code).to_owned(),
        count: 1,
        first_at: at,
        last_at: at,
        boot_id: "boot".into(),
        detail: "detail".into(),
    };
    let findings = found.iter().map(finding).collect();
    NodeHealth { report: Some(FindingReport { sent_at: at, findings, is_truncated: false }), ..NodeHealth::default() }
}

#[tokio::test]
async fn finding_is_shown_with_its_consequences_and_cleared_by_an_administrator() {
    let api = ApiHarness::with_sku().await;
    let id = api.enrolled_node("h100x4", 4, "sick").await;
    api.poll(id).await;
    let path = format!("/api/v1/admin/nodes/{id}");
    let show = async || api.get(&path).admin().send().await.is(200).clone();
    let gpu = "GPU-sick-3".to_owned();
    api.heartbeat_with(id, "sick", 4, findings(&[("xid", "64", Some(gpu.clone())), ("xid", "31", None)])).await;
    let node = show().await;
    assert_eq!((&node["gpus_free"], &node["health"]["status"]), (&json!(3), &json!("critical")));
    let finding = &node["health"]["findings"][0];
    assert_eq!(finding["classes"], json!(["prevent_allocation", "evacuate", "billing_credit"]));
    let judged = ["probe", "code", "cause", "repair"].map(|field| finding[field].as_str().unwrap());
    assert_eq!((judged, &finding["gpu_uuid"]), (["xid", "64", "hardware", "operator"], &json!(gpu)));
    assert_eq!(node["health"]["alerts"][0]["probe_id"], "xid.64", "in the form of before");

    let clear = format!("{path}/findings/{}/clear", finding["id"].as_str().unwrap());
    api.post(&clear).user("ann").json(&reason_body()).send().await.refused(403, "forbidden");
    api.post(&clear).admin().json(&json!({})).send().await.refused(400, "invalid_request");
    let cleared = api.post(&clear).admin().json(&reason_body()).send().await;
    assert_eq!((&cleared.is(200)["gpus_free"], &cleared.body["health"]["status"]), (&json!(4), &json!("warning")));
    assert_eq!(cleared.body["health"]["findings"][0]["classes"], json!([]));
    assert!(cleared.body["health"]["findings"][0]["cleared_reason"].is_string());
    let unknown = format!("{path}/findings/{}/clear", Uuid::nil());
    api.post(&unknown).admin().json(&reason_body()).send().await.refused(404, "not_found");
}

#[tokio::test]
async fn quarantine_is_shown_with_all_of_its_holds() {
    let api = ApiHarness::with_sku().await;
    let id = api.enrolled_node("h100x4", 4, "hung").await;
    api.poll(id).await;
    let path = format!("/api/v1/admin/nodes/{id}");
    api.heartbeat_with(id, "hung", 4, findings(&[("driver", "hung", None)])).await;
    api.post(&format!("{path}/quarantine")).admin().json(&reason_body()).send().await.is(200);
    let authors = async || {
        let node = api.get(&path).admin().send().await.is(200).clone();
        let holds = node["quarantine_holds"].as_array().unwrap().clone();
        let authors: Vec<_> = holds.iter().map(|hold| hold["author"].as_str().unwrap().to_owned()).collect();
        (node["state"].as_str().unwrap().to_owned(), node["state_reason"]["code"].as_str().unwrap().to_owned(), authors)
    };
    let strings = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let both = ("quarantined".to_owned(), "health_critical".to_owned(), strings(&["health", "administrator"]));
    assert_eq!(authors().await, both);
    api.heartbeat_with(id, "hung", 4, findings(&[])).await;
    let left = ("quarantined".to_owned(), "quarantined".to_owned(), strings(&["administrator"]));
    assert_eq!(authors().await, left, "recovery takes back its own");
    api.post(&format!("{path}/release-quarantine")).admin().json(&reason_body()).send().await.is(200);
    assert_eq!(authors().await.2, Vec::<String>::new());
}

#[tokio::test]
async fn node_goes_through_its_lifecycle_by_administrators_requests() {
    let api = ApiHarness::with_sku().await;
    let id = api.active_node("h100x4", 4).await;
    let path = format!("/api/v1/admin/nodes/{id}");
    let order =
        async |action: &str, body: Value| api.post(&format!("{path}/{action}")).admin().json(&body).send().await;
    let active = api.get(&path).admin().send().await;
    assert_eq!((&active.is(200)["state"], &active.body["gpus_free"]), (&json!("active"), &json!(4)));
    assert_eq!(active.body["agent"]["protocol"], 3);

    let allocation_id = AllocationId(Uuid::now_v7());
    api.ask_as_system::<Node>(
        id.0,
        Instruction::Reserve { allocation_id, gpu_count: 1, keys: Vec::new(), revision: 0, reimages: false },
    )
    .await;
    let deadline_at = chrono::Utc::now() + TimeDelta::minutes(10);
    api.ask_as_system::<Node>(id.0, Instruction::Provision { allocation_id, deadline_at }).await;
    let in_use = order("retire", reason_body()).await;
    assert_eq!(in_use.refused(409, "node_in_use")["allocation_id"], allocation_id.to_string());
    order("remove", reason_body()).await.refused(400, "invalid_request");
    let tasks = api.get(&format!("{path}/tasks")).admin().send().await;
    assert_eq!(tasks.is(200)["open"][0]["type"], "allocation.provision");
    assert_eq!(tasks.body["open"][0]["allocation_id"], allocation_id.to_string());
    assert_eq!(order("retire", json!({"reason": "swap", "drain": true})).await.is(200)["state"], "draining");
    api.ask_as_system::<Node>(id.0, Instruction::Abandon { allocation_id }).await;
    let mut lines = vec![order("remove", reason_body()).await.line(), order("reactivate", reason_body()).await.line()];

    let other = api.active_node("h100x4", 4).await;
    let path = format!("/api/v1/admin/nodes/{other}");
    let order =
        async |action: &str, body: Value| api.post(&format!("{path}/{action}")).admin().json(&body).send().await;
    assert_eq!(order("quarantine", reason_body()).await.is(200)["state"], "quarantined");
    assert_eq!(order("release-quarantine", reason_body()).await.is(200)["state"], "active");
    assert_eq!(order("retire", reason_body()).await.is(200)["state"], "retired");
    assert_eq!(order("reactivate", reason_body()).await.is(200)["state"], "active");
    lines.push(order("reactivate", reason_body()).await.line());
    lines.push(order("release-quarantine", reason_body()).await.line());
    lines.push(order("remove", reason_body()).await.line());
    lines.push(order("retire", json!({})).await.line());
    lines.push(order("retire", json!({"reason": ""})).await.line());
    lines.push(order("retire", json!({"reason": "x".repeat(501)})).await.line());
    lines.push(order("retire", json!({"reason": "x", "drain": "yes"})).await.line());
    insta::assert_snapshot!(lines.join("\n"));
    order("retire", reason_body()).await.is(200);
    // No timer runs, so the removal stays incomplete.
    let began = std::time::Instant::now();
    let going = order("remove", reason_body()).await;
    assert_eq!(going.is(202)["state"], "removing");
    assert!(began.elapsed() >= std::time::Duration::from_secs(5));
    let began = std::time::Instant::now();
    let ticking = async {
        api.ask_as_system::<Node>(other.0, Command::TICK).await;
        began.elapsed()
    };
    let (removed, ticked_after) = tokio::join!(order("remove", reason_body()), ticking);
    // A removal is waited for 5 s, and a pause of the machine may delay the tick for longer.
    let in_time = ticked_after < std::time::Duration::from_secs(4);
    let removed = if in_time { removed } else { order("remove", reason_body()).await };
    assert_eq!(removed.is(200)["state"], "removed");
    let Reply::Node { node } = api
        .ask::<Node>(&Principal::Caller(root_caller()), other.0, Request::Remove { reason: "x".into() })
        .await
        .unwrap()
        .reply
    else {
        panic!("no node")
    };
    assert_eq!(node.lifecycle.phase, Phase::Removed);
    // The machine is registered again as another node.
    let repeated = api.post("/api/v1/admin/nodes").admin().json(&node_body("h100x4", 4)).send().await;
    assert_eq!((&repeated.is(201)["host"], &repeated.body["state"]), (&removed.body["host"], &json!("registered")));
    assert_ne!(repeated.body["id"], removed.body["id"]);
    api.call(Method::PATCH, &path).admin().json(&json!({"port": 23})).send().await.refused(400, "invalid_request");
}

#[tokio::test]
async fn invalid_node_is_refused() {
    let api = ApiHarness::with_sku().await;
    api.post("/api/v1/admin/skus").admin().json(&super::harness::sku_body("draft", 4)).send().await.is(201);
    let mut lines = Vec::new();
    let mut refuse = async |field: &str, value: Value| {
        let mut body = node_body("h100x4", 4);
        body[field] = value;
        let answer = api.post("/api/v1/admin/nodes").admin().json(&body).send().await;
        assert!(answer.status >= 400, "{field}: {}", answer.body);
        lines.push(answer.line());
    };
    for host in ["", "a b", "-oProxyCommand=x", "localhost", "2130706433", "0x7f.1", "127.0.0.01", "[::1]:22", "a_b"] {
        refuse("host", json!(host)).await;
    }
    refuse("host", json!("x".repeat(254))).await;
    refuse("host", json!(7)).await;
    for port in [json!(0), json!(65_536), json!(-1), json!(22.5), json!("22"), json!(null)] {
        refuse("port", port).await;
    }
    refuse("ssh_username", json!("root; rm")).await;
    refuse("ssh_username", json!("-x")).await;
    refuse("ssh_public_key", json!("ssh-rsa AAAA")).await;
    refuse("sku", json!("draft")).await;
    refuse("sku", json!("h100x5")).await;
    refuse("sku", json!("any text")).await;
    refuse("gpus_total", json!(3)).await;
    refuse("gpus_total", json!(65)).await;
    refuse("region_code", json!("mars")).await;
    refuse("region_code", json!("../eu")).await;
    refuse("onboarding_mode", json!("maas")).await;
    refuse("onboarding_mode", json!("magic")).await;
    refuse("probe", json!(true)).await;
    refuse("id", json!("mine")).await;
    insta::assert_snapshot!(lines.join("\n"));
    assert!(api.get("/api/v1/admin/nodes").admin().send().await.is(200)["items"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn disabled_or_missing_bare_metal_provider_refuses_maas_onboarding() {
    let api = ApiHarness::with_sku().await;
    let mut body = node_body("h100x4", 4);
    body["onboarding_mode"] = json!("maas");
    let register = async || api.post("/api/v1/admin/nodes").admin().json(&body).send().await;
    let message = |answer: &TestResponse| answer.body["message"].as_str().unwrap().to_owned();
    let off = register().await;
    assert_eq!(off.refused(503, "service_unavailable")["policy_key"], "maas.enabled");
    assert!(off.headers.contains_key("retry-after") && message(&off).contains("switched off"), "{}", off.body);

    api.set_switch(PolicyKey::MaasEnabled, true);
    let missing = register().await;
    missing.refused(503, "service_unavailable");
    assert!(message(&missing).contains("has no bare-metal provider"), "{}", missing.body);
    assert!(api.get("/api/v1/admin/nodes").admin().send().await.is(200)["items"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn probe_is_denied_by_address_and_its_result_is_stored() {
    let api = ApiHarness::with_sku().await;
    let register = async |host: &str| {
        let mut body = node_body("h100x4", 4);
        body["host"] = host.into();
        body["port"] = 1.into();
        body["probe"] = true.into();
        api.post("/api/v1/admin/nodes").admin().json(&body).send().await
    };
    for host in [
        "127.0.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "224.0.0.1",
        "169.254.1.1",
        "::1",
        "::ffff:127.0.0.1",
        "fe80::1",
        "gpu-17.internal",
    ] {
        register(host).await.refused(400, "probe_target_denied");
    }
    // TEST-NET-1 (RFC 5737): nothing answers there.
    let probed = register("192.0.2.1").await;
    assert_eq!(probed.is(201)["probe"]["result"], "unreachable");
    assert!(probed.body["probe"]["error"].is_string());
}

#[tokio::test]
async fn node_reports_are_paginated_with_their_tasks() {
    let api = ApiHarness::with_sku().await;
    let node = api.active_node("h100x4", 4).await;
    let path = format!("/api/v1/admin/nodes/{node}/tasks");
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let order = json!({"type": "diagnostics.collect", "reason": "x"});
        let ordered = api.post(&path).admin().json(&order).send().await.is(201).clone();
        let report = domain::node::Request::Report {
            serial: "01".into(),
            task_id: domain::TaskId(ordered["task_id"].as_str().unwrap().parse().unwrap()),
            attempt: u32::try_from(ordered["attempt"].as_u64().unwrap()).unwrap(),
            verdict: domain::node::TaskOutcome::Succeeded { proof: None },
            output: None,
            unproved: None,
        };
        api.ask::<domain::node::Node>(&domain::Principal::Node(node), node.0, report).await.unwrap();
        tasks.insert(0, ordered["task_id"].clone());
    }
    let read = async |query: &str| api.get(&format!("{path}{query}")).admin().send().await.is(200).clone();
    let ids =
        |page: &Value| page["reports"].as_array().unwrap().iter().map(|it| it["task_id"].clone()).collect::<Vec<_>>();
    let first = read("?limit=2").await;
    assert_eq!(
        (ids(&first), &first["reports"][0]["outcome"]),
        (tasks[..2].to_vec(), &json!("the agent did diagnostics.collect"))
    );
    let token = first["next_page"].as_str().unwrap();
    let last = read(&format!("?limit=2&page_token={token}")).await;
    assert_eq!((ids(&last), &last["next_page"]), (tasks[2..].to_vec(), &Value::Null));
    assert_eq!(last["ended"], first["ended"]);
    assert_eq!(read("").await["next_page"], Value::Null);
}

#[tokio::test]
async fn changed_address_is_probed_and_an_unresolvable_name_is_reported() {
    let api = ApiHarness::with_sku().await;
    let mut body = node_body("h100x4", 4);
    (body["host"], body["port"], body["probe"]) = ("192.0.2.1".into(), 1.into(), true.into());
    let probed = api.post("/api/v1/admin/nodes").admin().json(&body).send().await;
    let path = format!("/api/v1/admin/nodes/{}", probed.is(201)["id"].as_str().unwrap());
    let change = async |change: Value| api.call(Method::PATCH, &path).admin().json(&change).send().await;
    let moved = change(json!({ "host": "nowhere.example" })).await;
    assert_eq!(moved.is(200)["probe"]["result"], "unreachable");
    assert_eq!(moved.body["probe"]["error"], "the name does not resolve");
    let denied = change(json!({ "host": "127.0.0.1" })).await;
    assert_eq!(denied.refused(400, "probe_target_denied")["field"], "host");
    assert_eq!(
        api.get(&path).admin().send().await.is(200)["host"],
        "nowhere.example",
        "a refused change changes nothing"
    );
    let unprobed = change(json!({ "host": "192.0.2.2", "probe": false })).await;
    assert_eq!(unprobed.is(200)["probe"], Value::Null, "what was found of the old address is gone");
    let repeated = change(json!({ "probe": true })).await;
    assert!(repeated.is(200)["probe"]["checked_at"].is_string());
    change(json!({ "probe": false })).await.refused(400, "invalid_request");
}

#[tokio::test]
async fn node_that_was_never_active_is_removed_after_retirement() {
    let api = ApiHarness::with_sku().await;
    let id = api.node("h100x4", 4).await;
    let path = format!("/api/v1/admin/nodes/{id}");
    let order = async |verb: &str| {
        api.post(&format!("{path}/{verb}")).admin().json(&json!({ "reason": "never needed" })).send().await
    };
    let early = order("remove").await;
    assert_eq!(early.refused(400, "invalid_request")["state"], "registered");
    assert!(early.body["message"].as_str().unwrap().contains("retire it first"), "{}", early.body);
    api.post(&format!("{path}/enrollment-token")).admin().send().await.is(201);
    order("remove").await.refused(400, "invalid_request");
    assert_eq!(order("retire").await.is(200)["state"], "retired");
    let removed = order("remove").await;
    assert!([200, 202].contains(&removed.status), "{}", removed.body);
}

#[tokio::test]
async fn second_node_with_the_same_gpus_is_quarantined_with_the_id_of_the_first() {
    let api = ApiHarness::with_sku().await;
    let (one, other) = (api.enrolled_node("h100x4", 4, "same").await, api.enrolled_node("h100x4", 4, "same").await);
    futures::future::join(api.poll(one), api.poll(other)).await;
    let node =
        async |id: domain::NodeId| api.get(&format!("/api/v1/admin/nodes/{id}")).admin().send().await.is(200).clone();
    let (mut first, mut second) = (one, other);
    if node(one).await["state"] != "active" {
        (first, second) = (other, one);
    }
    assert_eq!(node(first).await["state"], "active");
    let quarantined = node(second).await;
    assert_eq!((&quarantined["state"], &quarantined["gpus_free"]), (&json!("quarantined"), &json!(0)));
    assert_eq!(quarantined["state_reason"]["code"], "gpu_of_another_node");
    let message = quarantined["state_reason"]["message"].as_str().unwrap();
    assert!(message.contains(&first.to_string()), "{message}");
    let audited = api.get("/api/v1/admin/audit-log?action=nodes.quarantine").admin().send().await;
    assert_eq!(audited.is(200)["items"].as_array().unwrap().len(), 1, "{}", audited.body);

    let order = async |id: domain::NodeId, verb: &str| {
        let path = format!("/api/v1/admin/nodes/{id}/{verb}");
        api.post(&path).admin().json(&json!({ "reason": "one is a copy" })).send().await
    };
    let early = order(second, "release-quarantine").await;
    early.refused(409, "state_conflict");
    assert!(early.body["message"].as_str().unwrap().contains(&first.to_string()), "{}", early.body);
    order(first, "retire").await.is(200);
    order(second, "release-quarantine").await.refused(409, "state_conflict");
    let removed = order(first, "remove").await;
    assert!([200, 202].contains(&removed.status), "{}", removed.body);
    assert_eq!(order(second, "release-quarantine").await.is(200)["state"], "active");
}
