//! What nodes and accounts add up to, for metrics.

use crate::test_store::TestStore;
use domain::id::Shard;
use persistence::queries::{AccountSum, GpuUse};
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

/// A node with eight GPUs and these tenants: the phase and the number of GPUs of each.
fn node(tenants: &[(&str, usize)]) -> Value {
    let holds = tenants.iter().map(|(phase, gpus)| {
        let hold = json!({ "phase": { "phase": phase }, "placed": { "devices": vec!["GPU"; *gpus] } });
        (Uuid::new_v4().to_string(), hold)
    });
    json!({
        "registration": { "sku": { "name": "h100" }, "region_code": "eu", "gpus_total": 8 },
        "holds": holds.collect::<serde_json::Map<_, _>>(),
        "inventory": { "gpus": vec!["GPU"; 8], "isolates_devices": true },
        "identity": { "certificates": {} },
    })
}

#[tokio::test]
async fn gpus_are_added_up_by_use_for_the_shards_that_are_asked_for() {
    let store = TestStore::new().await;
    let pool = store.pool();
    insert(pool, "node", 1, "active", &node(&[("ready", 3), ("provisioning", 2)])).await;
    // Its free GPUs are not given out: a clean-up is not proved, or the node is offline.
    insert(pool, "node", 1, "active", &node(&[("release_failed", 1)])).await;
    insert(pool, "node", 2, "offline", &node(&[("ready", 1)])).await;
    insert(pool, "node", 3, "active", &node(&[("ready", 8)])).await;
    insert(pool, "node", 1, "removed", &node(&[])).await;
    let found = store.reads().gpu_use(&[Shard(1), Shard(2)]).await.unwrap();
    let expected = GpuUse { sku: "h100".into(), region_code: "eu".into(), total: 24, sold: 4, held: 3, free: 3 };
    assert_eq!(found, [expected]);
    assert_eq!(store.reads().gpu_use(&[]).await.unwrap(), []);
}

#[tokio::test]
async fn findings_are_counted_by_the_table_until_they_are_cleared_and_certificates_before_they_end() {
    let store = TestStore::new().await;
    let pool = store.pool();
    let finding = |probe: &str, code: &str, cleared: Value| json!({ "reported": { "probe": probe, "code": code }, "cleared": cleared });
    let mut first = node(&[]);
    first["findings"] = json!([
        finding("privilege", "authorized_keys", Value::Null),
        finding("xid", "79", json!({ "by": "admin" })),
        // An agent names what it likes.
        finding("made", "up-1", Value::Null),
    ]);
    let until = |minutes: i64| (chrono::Utc::now() + chrono::TimeDelta::minutes(minutes)).to_rfc3339();
    first["identity"]["certificates"] = json!({ "0a": { "not_after": until(10) }, "0b": { "not_after": until(600) } });
    insert(pool, "node", 1, "active", &first).await;
    let mut second = node(&[]);
    second["findings"] = json!([{ "reported": { "probe": "made", "code": "up-2" } }]);
    second["identity"]["certificates"] = json!({ "0c": { "not_after": until(10) } });
    insert(pool, "node", 1, "active", &second).await;
    insert(pool, "node", 1, "offline", &second).await;
    let concerns = store.reads().node_concerns(&[Shard(1)]).await.unwrap();
    let findings: Vec<_> = concerns.findings.into_iter().collect();
    assert_eq!(findings, [(("other", "other"), 3), (("privilege", "authorized_keys"), 1)]);
    assert_eq!(concerns.certificates_ending, 1, "the first node has renewed, and the last one is offline");
}

#[tokio::test]
async fn sums_of_a_hundred_thousand_entities_have_as_many_rows_as_those_of_a_few() {
    let store = TestStore::new().await;
    let pool = store.pool();
    let fill = async |accounts: i64, nodes: i64| {
        sqlx::query(
            "INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at)
             SELECT gen_random_uuid(), 'billing_account', n % 256, 1, 'open', '{\"currency\": \"usd\", \"balance\": 1000000}', now(), now()
             FROM generate_series(1, $1) AS n
             UNION ALL
             SELECT gen_random_uuid(), 'node', n % 256, 1, 'active', $3, now(), now() FROM generate_series(1, $2) AS n",
        )
        .bind(accounts)
        .bind(nodes)
        .bind(node(&[("ready", 8)]))
        .execute(pool)
        .await
        .unwrap();
    };
    fill(10, 10).await;
    let shards: Vec<Shard> = (0..=255).map(Shard).collect();
    let few = (store.reads().account_sums(&shards).await.unwrap(), store.reads().gpu_use(&shards).await.unwrap());
    fill(90_000, 10_000).await;
    let many = (store.reads().account_sums(&shards).await.unwrap(), store.reads().gpu_use(&shards).await.unwrap());
    assert_eq!((few.0.len(), few.1.len()), (1, 1));
    assert_eq!((many.0.len(), many.1.len()), (1, 1));
    let AccountSum { accounts, balance, .. } = &many.0[0];
    assert_eq!((*accounts, balance.minor(), many.1[0].sold), (90_010, 90_010, 80_080));
}
