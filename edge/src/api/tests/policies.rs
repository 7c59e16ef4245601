//! Policy values: bounds, scopes, concurrent writes and resolution.

use super::harness::{ApiHarness, POLLS, TestResponse, pause_before_poll};
use axum::http::Method;
use domain::policy::PolicyKey;
use serde_json::{Value, json};

const VALUES: &str = "/api/v1/admin/policy-values";
const QUOTA: &str = "allocation.max_concurrent_per_user";

impl ApiHarness {
    async fn write(&self, change: &[(&str, Value)]) -> TestResponse {
        let mut body = json!({ "key": QUOTA, "value": 7, "reason": "a test" });
        for (field, value) in change {
            body[*field] = value.clone();
        }
        self.post(VALUES).admin().json(&body).send().await
    }

    /// Waits until the key resolves to this value, and checks its source.
    async fn resolves(&self, query: &str, value: &Value, source: &str) -> Value {
        let path = format!("{VALUES}/resolve?key={QUOTA}{query}");
        let mut last = Value::Null;
        for n in 0..POLLS {
            let resolved = self.get(&path).admin().send().await.is(200).clone();
            if resolved["value"] == *value && resolved["source"] == source {
                return resolved;
            }
            last = resolved;
            tokio::time::sleep(pause_before_poll(n)).await;
        }
        panic!("{path} does not become {value} by {source}: {last}");
    }
}

#[tokio::test]
async fn policy_catalog_lists_every_key_with_its_type_bounds_default_and_meaning() {
    let api = ApiHarness::new().await;
    let catalog = api.get("/api/v1/admin/policies").admin().send().await.is(200)["items"].clone();
    assert_eq!(catalog.as_array().unwrap().len(), PolicyKey::ALL.len());
    let entry = |key: &str| catalog.as_array().unwrap().iter().find(|entry| entry["key"] == key).unwrap().clone();
    let window = entry("billing.window_seconds");
    assert_eq!((&window["type"], &window["default"]), (&json!("int"), &json!(60)));
    assert_eq!(window["bounds"], json!({ "min": 1, "max": 3600 }));
    assert_eq!(entry("terminal.recording_mode")["bounds"], json!({ "enum": ["best-effort", "strict"] }));
    assert_eq!(entry("maas.enabled")["type"], "bool");
    assert_eq!(window["scopes"], json!(["user_id", "org_id", "plan", "global"]));
    assert_eq!(entry(QUOTA)["scopes"], json!(["user_id", "project_id", "org_id", "plan", "global"]));
    assert_eq!(entry("node.max_recoveries")["scopes"], json!(["global"]));
    assert!(catalog.as_array().unwrap().iter().all(|entry| entry["meaning"].as_str().unwrap().len() > 5));
}

#[tokio::test]
async fn most_specific_scope_wins_and_is_named() {
    let api = ApiHarness::new().await;
    api.resolves("", &json!(50), "default").await;
    let scopes = ["plan", "org_id", "project_id", "user_id"];
    assert_eq!(api.write(&[("scope", json!({}))]).await.is(201)["scope"], json!({}));
    for (n, scope) in scopes.into_iter().enumerate() {
        let written = api.write(&[("scope", json!({ scope: ">" })), ("value", json!(10 + n))]).await;
        assert_eq!(written.is(201)["scope"], json!({ scope: ">" }));
    }
    let mut query = String::new();
    api.resolves(&query, &json!(7), "global").await;
    for (n, scope) in scopes.into_iter().enumerate() {
        query.push_str(&format!("&{scope}=%3E"));
        let resolved = api.resolves(&query, &json!(10 + n), scope).await;
        assert_eq!(resolved["scope"], json!({ scope: ">" }));
        assert!(resolved["effective_at"].is_string());
    }
    api.resolves("&user_id=ann", &json!(7), "global").await;
}

#[tokio::test]
async fn value_in_a_scope_of_the_wrong_kind_is_refused_with_the_valid_kinds() {
    let api = ApiHarness::new().await;
    let window = |scope: Value| [("key", json!("billing.window_seconds")), ("value", json!(120)), ("scope", scope)];
    let refused = api.write(&window(json!({ "project_id": "x" }))).await;
    let details = refused.refused(400, "invalid_request");
    let valid = json!(["user_id", "org_id", "plan", "global"]);
    assert_eq!((&details["field"], &details["scopes"]), (&json!("scope"), &valid));
    let outage =
        [("key", json!("node.offline_after_seconds")), ("value", json!(30)), ("scope", json!({ "user_id": "ann" }))];
    assert_eq!(api.write(&outage).await.refused(400, "invalid_request")["scopes"], json!(["global"]));
    // An organization's account uses the organization's value, whichever member rents.
    api.write(&window(json!({ "user_id": "ann" }))).await.is(201);
    api.write(&[window(json!({ "org_id": "acme" })).to_vec(), vec![("value", json!(90))]].concat()).await.is(201);
    let path = format!("{VALUES}/resolve?key=billing.window_seconds&user_id=ann&org_id=acme&plan=gold");
    let mut last = Value::Null;
    for n in 0..POLLS {
        let resolved = api.get(&path).admin().send().await.is(200).clone();
        if (&resolved["value"], &resolved["scope"]) == (&json!(90), &json!({ "org_id": "acme" })) {
            return;
        }
        last = resolved;
        tokio::time::sleep(pause_before_poll(n)).await;
    }
    panic!("the organization's value does not win: {last}");
}

#[tokio::test]
async fn policy_write_is_listed_and_audited_with_old_and_new_value_and_reason() {
    let api = ApiHarness::new().await;
    let first = api.write(&[("old_value", Value::Null)]).await;
    assert_eq!(first.is(201)["old_value"], Value::Null);
    let second = api.write(&[("value", json!(8)), ("old_value", json!(7)), ("reason", json!("more"))]).await;
    assert_eq!((&second.is(201)["old_value"], &second.body["written_by"]), (&json!(7), &json!("user:root")));
    let ann = json!({ "user_id": "ann" });
    let ahead = api.write(&[("scope", ann.clone()), ("effective_at", json!("2035-01-01T00:00:00Z"))]).await;
    ahead.is(201);
    let list = async |query: &str| {
        let listed = api.get(&format!("{VALUES}?{query}")).admin().send().await;
        let ids = listed.is(200)["items"].as_array().unwrap().iter().map(|item| item["id"].clone()).collect::<Vec<_>>();
        (ids, listed.body["next_page"].clone())
    };
    let (second_id, ahead_id) = (second.body["id"].clone(), ahead.body["id"].clone());
    assert_eq!(list("").await.0, [second_id.clone(), ahead_id.clone()], "what was superseded is gone");
    assert_eq!(list("scope=global").await.0, std::slice::from_ref(&second_id));
    assert_eq!(list("user_id=ann").await.0, std::slice::from_ref(&ahead_id));
    assert!(list("key=billing.window_seconds").await.0.is_empty());
    let (page, next) = list("limit=1").await;
    assert_eq!(page, [second_id]);
    assert_eq!(list(&format!("limit=1&page_token={}", next.as_str().unwrap())).await.0, [ahead_id]);

    let rows = api.app.reads.audit(&Default::default(), None, 10).await.unwrap().items;
    let row = rows.iter().find(|row| row.metadata["reason"] == "more").unwrap();
    assert_eq!((row.action.as_str(), row.actor.as_str()), ("policies.write", "user:root"));
    assert_eq!(row.metadata["policy_key"], QUOTA);
    assert_eq!((&row.metadata["old_value"], &row.metadata["new_value"]), (&json!(7), &json!(8)));
}

#[tokio::test]
async fn revoked_override_restores_the_less_specific_value() {
    let api = ApiHarness::new().await;
    let ann = json!({ "user_id": "ann" });
    api.write(&[]).await.is(201);
    api.write(&[("scope", ann.clone()), ("value", json!(9))]).await.is(201);
    let ahead = [("scope", ann), ("value", json!(11)), ("effective_at", json!("2035-01-01T00:00:00Z"))];
    api.write(&ahead).await.is(201);
    api.resolves("&user_id=ann", &json!(9), "user_id").await;
    let take_back = async |query: &str| {
        let path = format!("{VALUES}?key={QUOTA}{query}");
        api.call(Method::DELETE, &path).admin().send().await
    };
    let of_ann = "&user_id=ann&reason=trial%20over";
    let differs = take_back(&format!("{of_ann}&old_value=8")).await;
    assert_eq!(differs.refused(409, "state_conflict")["current_value"], 9);
    take_back(&format!("{of_ann}&old_value=9")).await.is(204);
    api.resolves("&user_id=ann", &json!(7), "global").await;
    take_back(of_ann).await.refused(404, "not_found");
    take_back(&format!("{of_ann}&effective_at=2035-01-01T00:00:00Z")).await.is(204);
    assert!(
        api.get(&format!("{VALUES}?user_id=ann")).admin().send().await.is(200)["items"].as_array().unwrap().is_empty()
    );
    take_back("&reason=r").await.is(204);
    api.resolves("", &json!(50), "default").await;

    let rows = api.app.reads.audit(&Default::default(), None, 10).await.unwrap().items;
    let row = rows.iter().find(|row| row.metadata["reason"] == "trial over").unwrap();
    assert_eq!((row.action.as_str(), row.actor.as_str()), ("policies.take_back", "user:root"));

    for bad in [
        "",
        "&user_id=a&org_id=b&reason=r",
        "&reason=",
        "&reason=r&old_value=",
        "&reason=r&effective_at=now",
        "&reason=r&team=a",
    ] {
        take_back(bad).await.refused(400, "invalid_request");
    }
    api.call(Method::DELETE, &format!("{VALUES}?key=of.nobody&reason=r"))
        .admin()
        .send()
        .await
        .refused(400, "invalid_request");
    api.call(Method::DELETE, &format!("{VALUES}?key={QUOTA}&reason=r"))
        .user("ann")
        .send()
        .await
        .refused(403, "forbidden");
}

#[tokio::test]
async fn policies_apply_by_the_scopes_of_the_owner() {
    let (api, _) = ApiHarness::with_free_node().await;
    let ttl = [("key", json!("node.enrollment_token_ttl_seconds")), ("value", json!(60))];
    api.write(&ttl).await.is(201);
    // A later write is read together with the earlier ones.
    api.write(&[]).await.is(201);
    api.resolves("", &json!(7), "global").await;

    let body = json!({ "sku": "h100x4", "gpu_count": 1 });
    let rented = api.post("/api/v1/allocations").user("bob").key("bob").json(&body).send().await;
    assert_eq!(rented.is(201)["isolation_model"], "user-revoke");
    let other = api.node("h100x4", 4).await;
    let issued = api.post(&format!("/api/v1/admin/nodes/{other}/enrollment-token")).admin().send().await;
    let expires: chrono::DateTime<chrono::Utc> = issued.is(201)["expires_at"].as_str().unwrap().parse().unwrap();
    let left = (expires - chrono::Utc::now()).num_seconds();
    assert!((0..=60).contains(&left), "it holds for {left} s more");
}

#[tokio::test]
async fn isolation_model_is_written_and_taken_back() {
    let api = ApiHarness::new().await;
    let isolation = [("key", json!("allocation.isolation_model")), ("value", json!("full-reimage"))];
    api.write(&isolation).await.is(201);

    let weaker = [("key", json!("allocation.isolation_model")), ("value", json!("user-revoke"))];
    api.write(&weaker).await.is(201);
}

#[tokio::test]
async fn exactly_one_of_twenty_writers_with_the_same_old_value_wins() {
    let api = ApiHarness::new().await;
    api.write(&[]).await.is(201);
    let values: Vec<Value> = (100..120).map(|value| json!(value)).collect();
    let changes: Vec<_> = values.iter().map(|value| [("value", value.clone()), ("old_value", json!(7))]).collect();
    let answers = futures::future::join_all(changes.iter().map(|change| api.write(change))).await;
    let won: Vec<&TestResponse> = answers.iter().filter(|answer| answer.status == 201).collect();
    assert_eq!(won.len(), 1);
    for lost in answers.iter().filter(|answer| answer.status != 201) {
        assert_eq!(lost.refused(409, "state_conflict")["current_value"], won[0].body["value"]);
    }
}

#[tokio::test]
async fn repeated_policy_write_is_executed_once() {
    let api = ApiHarness::new().await;
    let body = json!({ "key": QUOTA, "value": 9, "reason": "a test", "old_value": null });
    let send = async |body: &Value| api.post(VALUES).admin().key("k-1").json(body).send().await;
    let first = send(&body).await;
    first.is(201);
    let repeated = send(&body).await;
    assert!(repeated.is_replayed());
    assert_eq!(repeated.is(201), &first.body);
    send(&json!({ "key": QUOTA, "value": 10, "reason": "a test" })).await.refused(422, "idempotency_key_reused");
}

#[tokio::test]
async fn value_out_of_bounds_is_refused_with_the_bounds_and_default() {
    let api = ApiHarness::new().await;
    let long = "x".repeat(10_000);
    for value in [
        json!(-1),
        json!(10_001),
        json!(i64::MAX),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(true),
        json!("7"),
        json!(long),
        json!(null),
        json!([7]),
        json!({ "value": 7 }),
        json!(7.5),
    ] {
        let details = api.write(&[("value", value)]).await.refused(400, "policy_out_of_bounds").clone();
        assert_eq!((&details["key"], &details["default"]), (&json!(QUOTA), &json!(50)));
        assert_eq!(details["bounds"], json!({ "min": 0, "max": 10_000 }));
    }
    for written in ["1.5", "1e-1", "1e5", "123456789012345678901234567890", "-1.0"] {
        let body = format!(r#"{{"key":"{QUOTA}","value":{written},"reason":"r"}}"#);
        api.post(VALUES).admin().text(body).send().await.refused(400, "policy_out_of_bounds");
    }
    for (key, value) in [
        ("maas.enabled", json!(1)),
        ("maas.enabled", json!("true")),
        ("terminal.recording_mode", json!("STRICT")),
        ("terminal.recording_mode", json!(0)),
        ("billing.minimum_deposit_minor", json!(49)),
        ("billing.minimum_deposit_minor", json!(100_001)),
        ("billing.maximum_deposit_minor", json!(999)),
    ] {
        api.write(&[("key", json!(key)), ("value", value)]).await.refused(400, "policy_out_of_bounds");
    }
    for (key, value) in [
        (QUOTA, json!(0)),
        (QUOTA, json!(10_000)),
        ("maas.enabled", json!(true)),
        ("billing.minimum_deposit_minor", json!(100_000)),
        ("terminal.recording_mode", json!("strict")),
    ] {
        api.write(&[("key", json!(key)), ("value", value)]).await.is(201);
    }
}

#[tokio::test]
async fn invalid_policy_key_scope_or_time_is_refused_with_its_reason() {
    let api = ApiHarness::new().await;
    let long = "x".repeat(10_000);
    let two = json!({ "user_id": "ann", "org_id": "acme" });
    let soon = (chrono::Utc::now() - chrono::TimeDelta::seconds(90)).to_rfc3339();
    let mut refusals = Vec::new();
    for (field, value) in [
        ("key", json!("of.nobody")),
        ("key", json!("KEY")),
        ("key", json!("a\u{0}b.c")),
        ("key", json!(long)),
        ("scope", two),
        ("scope", json!({ "team": "a" })),
        ("scope", json!({ "user_id": "" })),
        ("scope", json!({ "user_id": long })),
        ("scope", json!({ "user_id": "a\u{0}b" })),
        ("scope", json!({ "user_id": 7 })),
        ("scope", json!("global")),
        ("effective_at", json!("tomorrow")),
        ("effective_at", json!(1_800_000_000)),
        ("effective_at", json!(soon)),
        ("effective_at", json!("9999-12-31T23:59:59Z")),
        ("effective_at", json!("2026-02-30T00:00:00Z")),
        ("reason", json!("")),
        ("old_value", json!(1.5)),
        ("old_value", json!({})),
        ("other", json!(1)),
    ] {
        let answer = api.write(&[(field, value)]).await;
        answer.refused(400, "invalid_request");
        refusals.push(answer.line().split(" (it is 20").next().unwrap().split(" at 20").next().unwrap().to_owned());
    }
    for query in ["", "key=of.nobody", "key=billing.window_seconds&user_id=", "key=billing.window_seconds&team=a"] {
        let answer = api.get(&format!("{VALUES}/resolve?{query}")).admin().send().await;
        answer.refused(400, "invalid_request");
        refusals.push(answer.line());
    }
    for query in ["key=of.nobody", "scope=team", "user_id=a&org_id=b", "user_id=%00"] {
        let answer = api.get(&format!("{VALUES}?{query}")).admin().send().await;
        answer.refused(400, "invalid_request");
        refusals.push(answer.line());
    }
    insta::assert_snapshot!(refusals.join("\n"));
    assert!(
        api.get(VALUES).admin().send().await.is(200)["items"].as_array().unwrap().is_empty(),
        "nothing was written"
    );
}

#[tokio::test]
async fn null_or_empty_scope_is_refused_and_writes_nothing() {
    let api = ApiHarness::new().await;
    let write = |scope: Value| {
        let body = json!({"key": "billing.window_seconds", "value": 30, "reason": "x", "scope": scope});
        api.post("/api/v1/admin/policy-values").admin().json(&body).send()
    };
    for (scope, field) in [
        (json!({"user_id": null}), "scope.user_id"),
        (json!({"plan": null, "org_id": "acme"}), "scope.plan"),
        (json!({"project_id": ""}), "scope.project_id"),
        (Value::Null, "scope"),
    ] {
        assert_eq!(write(scope).await.refused(400, "invalid_request")["field"], field);
    }
    let none = api.get("/api/v1/admin/policy-values").admin().send().await;
    assert_eq!(none.is(200)["items"], json!([]));
    write(json!({})).await.is(201);
}

#[tokio::test]
async fn policy_value_is_read_by_id_while_it_holds() {
    let api = ApiHarness::new().await;
    let body = json!({"key": "billing.window_seconds", "value": 30, "reason": "x"});
    let written = api.post("/api/v1/admin/policy-values").admin().json(&body).send().await;
    let path = format!("/api/v1/admin/policy-values/{}", written.is(201)["id"].as_str().unwrap());
    assert_eq!(api.get(&path).admin().send().await.is(200), &written.body);
    let back = "/api/v1/admin/policy-values?key=billing.window_seconds&reason=x";
    api.call(Method::DELETE, back).admin().send().await.is(204);
    api.get(&path).admin().send().await.refused(404, "not_found");
}
