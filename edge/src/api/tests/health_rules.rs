//! Overrides of the table of health findings.

use super::harness::{ApiHarness, POLLS, TestResponse, pause_before_poll};
use super::nodes::findings;
use axum::http::Method;
use serde_json::{Value, json};

const RULES: &str = "/api/v1/admin/health-rules";

impl ApiHarness {
    async fn override_rule(&self, change: &[(&str, Value)]) -> TestResponse {
        let mut body = json!({
            "pattern": "xid/4711",
            "classes": ["prevent_allocation"],
            "repair": "operator",
            "tenant_message": "Leave the GPU.",
            "reason": "the vendor's advisory",
        });
        for (field, value) in change {
            body[*field] = value.clone();
        }
        self.post(RULES).admin().json(&body).send().await
    }
}

#[tokio::test]
async fn new_xid_is_classified_without_a_release_and_taken_back() {
    let api = ApiHarness::with_sku().await;
    let id = api.enrolled_node("h100x4", 4, "new").await;
    api.poll(id).await;
    let beat = async || {
        api.heartbeat_with(id, "new", 4, findings(&[("xid", "4711", Some("GPU-new-3".to_owned()))])).await;
        api.get(&format!("/api/v1/admin/nodes/{id}")).admin().send().await.is(200).clone()
    };
    /// Every process reads the overrides again within a second.
    async fn becomes(beat: impl AsyncFn() -> Value, free: u32) -> Value {
        let mut last = Value::Null;
        for n in 0..POLLS {
            let node = beat().await;
            if node["gpus_free"] == free {
                return node;
            }
            last = node;
            tokio::time::sleep(pause_before_poll(n)).await;
        }
        panic!("gpus_free does not become {free}: {last}");
    }
    assert_eq!(becomes(&beat, 4).await["health"]["findings"][0]["classes"], json!(["warn"]));
    let written = api.override_rule(&[]).await;
    assert_eq!((&written.is(201)["written_by"], &written.body["repair"]), (&json!("user:root"), &json!("operator")));
    let withheld = becomes(&beat, 3).await;
    let finding = &withheld["health"]["findings"][0];
    let judged = (&finding["classes"], &finding["repair"], &finding["overridden_by"]);
    assert_eq!(judged, (&json!(["prevent_allocation"]), &json!("operator"), &json!("xid/4711")));

    let query = format!("{RULES}?pattern=xid/4711&reason=in+the+table");
    assert_eq!(api.call(Method::DELETE, &query).admin().send().await.status, 204);
    becomes(&beat, 4).await;
    api.call(Method::DELETE, &query).admin().send().await.refused(404, "not_found");
    let log = api.get("/api/v1/admin/audit-log?target_kind=health_rules").admin().send().await;
    let actions: Vec<_> = log.is(200)["items"].as_array().unwrap().iter().map(|row| row["action"].clone()).collect();
    assert_eq!(actions.len(), 2, "{actions:?}");
}

#[tokio::test]
async fn table_is_shown_with_its_overrides_and_their_authors() {
    let api = ApiHarness::new().await;
    api.override_rule(&[("pattern", json!("xid/79")), ("classes", json!(["warn", "warn"]))]).await.is(201);
    let table = api.get(RULES).admin().send().await.is(200).clone();
    let row = |code: &str| {
        let rows = table["items"].as_array().unwrap();
        rows.iter().find(|row| row["probe"] == "xid" && row["code"] == code).unwrap().clone()
    };
    assert_eq!((&row("79")["classes"], &row("79")["overridden_by"]), (&json!(["warn"]), &json!("xid/79")));
    assert_eq!((&row("13")["cause"], &row("13")["overridden_by"]), (&json!("tenant"), &Value::Null));
    assert_eq!(table["overrides"][0]["reason"], "the vendor's advisory");
    api.get(RULES).user("ann").send().await.refused(403, "forbidden");
}

#[tokio::test]
async fn invalid_override_is_refused_with_its_remedy() {
    let api = ApiHarness::new().await;
    for (change, field) in [
        (("pattern", json!("79")), "pattern"),
        (("pattern", json!("xid/7*9")), "pattern"),
        (("pattern", json!(format!("xid/{}", "1".repeat(80)))), "pattern"),
        (("classes", json!([])), "classes"),
        (("classes", json!(["explode"])), "classes"),
        (("tenant_message", json!("x".repeat(301))), "tenant_message"),
        (("reason", json!(" ")), "reason"),
    ] {
        let refused = api.override_rule(std::slice::from_ref(&change)).await;
        let details = refused.refused(400, "invalid_request");
        assert!(details["field"] == field || refused.body["message"].as_str().unwrap().contains(field), "{change:?}");
    }
    let silent = json!({ "pattern": "xid/4711", "classes": ["evacuate"], "reason": "r" });
    let silent = api.post(RULES).admin().json(&silent).send().await;
    assert_eq!(silent.refused(400, "invalid_request")["field"], "tenant_message");
    for pattern in ["xid/13", "xid/*", "xid/4*"] {
        let refused = api.override_rule(&[("pattern", json!(pattern)), ("classes", json!(["billing_credit"]))]).await;
        let details = refused.refused(400, "invalid_request").clone();
        assert!(!details["rows"].as_array().unwrap().is_empty(), "{pattern}");
        assert!(refused.body["message"].as_str().unwrap().contains("never stops a meter"), "{pattern}");
    }
}
