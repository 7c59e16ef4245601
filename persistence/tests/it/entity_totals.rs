//! What concerns nodes, for metrics.

use crate::test_store::TestStore;
use domain::id::Shard;
use serde_json::{Value, json};
use sqlx::PgPool;
use uuid::Uuid;

async fn insert(pool: &PgPool, kind: &str, shard: i16, state: &str, body: &Value) {
    sqlx::query(
        "INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at) VALUES ($1, $2, $3, 1, $4, $5, now(), now())",
    )
    .bind(Uuid::new_v4())
    .bind(kind)
    .bind(shard)
    .bind(state)
    .bind(body)
    .execute(pool)
    .await
    .unwrap();
}

fn node() -> Value {
    json!({ "identity": { "certificates": {} } })
}

#[tokio::test]
async fn findings_are_counted_by_the_table_until_they_are_cleared_and_certificates_before_they_end() {
    let store = TestStore::new().await;
    let pool = store.pool();
    let finding = |probe: &str, code: &str, cleared: Value| json!({ "reported": { "probe": probe, "code": code }, "cleared": cleared });
    let mut first = node();
    first["findings"] = json!([
        finding("privilege", "authorized_keys", Value::Null),
        finding("xid", "79", json!({ "by": "admin" })),
        // An agent names what it likes.
        finding("made", "up-1", Value::Null),
    ]);
    let until = |minutes: i64| (chrono::Utc::now() + chrono::TimeDelta::minutes(minutes)).to_rfc3339();
    first["identity"]["certificates"] = json!({ "0a": { "not_after": until(10) }, "0b": { "not_after": until(600) } });
    insert(pool, "node", 1, "active", &first).await;
    let mut second = node();
    second["findings"] = json!([{ "reported": { "probe": "made", "code": "up-2" } }]);
    second["identity"]["certificates"] = json!({ "0c": { "not_after": until(10) } });
    insert(pool, "node", 1, "active", &second).await;
    insert(pool, "node", 1, "offline", &second).await;
    let concerns = store.reads().node_concerns(&[Shard(1)]).await.unwrap();
    let findings: Vec<_> = concerns.findings.into_iter().collect();
    assert_eq!(findings, [(("other", "other"), 3), (("privilege", "authorized_keys"), 1)]);
    assert_eq!(concerns.certificates_ending, 1, "the first node has renewed, and the last one is offline");
}
