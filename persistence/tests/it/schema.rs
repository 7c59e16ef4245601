//! The schema, its partitions, the sweeps and the sealed secrets.

use crate::test_store::{TestStore, create};
use domain::commit::{Commit, CommitOutcome};
use local_servers::test_database::TestDatabase;
use persistence::Secrets;
use persistence::envelope_encryption::KeyRing;
use persistence::secrets::SecretError;
use persistence::table_maintenance;
use secrecy::{ExposeSecret, SecretSlice};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

#[tokio::test]
async fn partitions_are_made_ahead_and_once() {
    let db = TestDatabase::fresh().await;
    assert_eq!(table_maintenance::make_partitions(&db.pool, 2).await.unwrap(), 0, "the template has them");
    let made = futures::future::join_all((0..4).map(|_| table_maintenance::make_partitions(&db.pool, 4))).await;
    let made: u32 = made.into_iter().map(Result::unwrap).sum();
    assert_eq!(made, 4, "two months of two tables");
}

#[tokio::test]
async fn rows_of_a_month_without_a_partition_are_stored_and_block_nothing() {
    let store = TestStore::new().await;
    let later = Commit { at: chrono::Utc::now() + chrono::TimeDelta::days(200), ..create(1) };
    assert_eq!(store.commit(&later).await, CommitOutcome::Applied);
    assert_eq!(store.count("history_default").await, 1);
    // That month stays in the default partition; its neighbours are created.
    assert_eq!(table_maintenance::make_partitions(store.pool(), 8).await.unwrap(), 10);
    assert_eq!(store.count("history").await, 1);
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[tokio::test]
async fn commands_are_deleted_after_their_retention_in_small_batches() {
    let store = TestStore::new().await;
    let commits: Vec<Commit> = (0..30).map(create).collect();
    store.commit_all(&commits).await;
    assert_eq!(table_maintenance::delete_commands(store.pool(), DAY, 100).await.unwrap(), 0);
    sqlx::query("UPDATE command SET created_at = created_at - interval '25 hours' WHERE shard < 25")
        .execute(store.pool())
        .await
        .unwrap();
    assert_eq!(table_maintenance::delete_commands(store.pool(), DAY, 20).await.unwrap(), 20);
    assert_eq!(table_maintenance::delete_commands(store.pool(), DAY, 20).await.unwrap(), 5);
    assert_eq!(store.count("command").await, 5);
}

#[tokio::test]
async fn placed_allocations_without_their_nodes_term_get_it_page_by_page() {
    let db = TestDatabase::fresh().await;
    let insert = "INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at)
                  VALUES ($1, 'allocation', 0, 1, $2, $3::jsonb, now() - make_interval(days => $4), now())";
    for (n, state, body, days) in [
        (1, "active", r#"{"phase": {"node_id": "a"}}"#, 5),
        (2, "released", r#"{"phase": {"last": ["b", {}]}}"#, 4),
        (3, "released", r#"{"phase": {"last": null}}"#, 3),
        (4, "provisioning", r#"{"phase": {"node_id": "c"}}"#, 2),
        (5, "active", r#"{"phase": {"node_id": "d"}}"#, 1),
        (6, "active", r#"{"phase": {"node_id": "e"}}"#, 9),
    ] {
        let query = sqlx::query(insert).bind(Uuid::from_u128(n)).bind(state).bind(body).bind(days);
        query.execute(&db.pool).await.unwrap();
    }
    for _ in 0..2 {
        let (mut after, mut pages) = (None, 0);
        loop {
            after = table_maintenance::store_node_terms(&db.pool, after, 2).await.unwrap();
            if after.is_none() {
                break;
            }
            pages += 1;
        }
        assert_eq!(pages, 3);
        let terms: Vec<(Uuid, String)> =
            sqlx::query_as("SELECT entity, term FROM term ORDER BY entity").fetch_all(&db.pool).await.unwrap();
        let expected = [(1, "node/a"), (2, "node/b"), (5, "node/d")];
        assert_eq!(terms, expected.map(|(n, term)| (Uuid::from_u128(n), term.to_owned())));
    }
}

#[tokio::test]
async fn the_outbox_is_settled_by_id() {
    let store = TestStore::new().await;
    let commits: Vec<Commit> = (0..5).map(create).collect();
    store.commit_all(&commits).await;
    let outbox = persistence::Outbox::new(store.pool().clone());
    let ids: Vec<_> = commits[1..].iter().map(|commit| commit.outbox[0].0).collect();
    assert_eq!(outbox.settle(&ids).await.unwrap(), 4);
    assert_eq!(outbox.settle(&ids).await.unwrap(), 0);
    assert_eq!(outbox.settle(&[]).await.unwrap(), 0);
    assert_eq!(store.count("outbox").await, 1);
}

fn ring(byte: &str) -> Arc<KeyRing> {
    // 32 equal bytes in base64.
    Arc::new(KeyRing::parse(&format!("active k\nkey k {}=", byte.repeat(43))).unwrap())
}

#[tokio::test]
async fn concurrent_creations_of_a_secret_get_the_same() {
    let db = TestDatabase::fresh().await;
    let secrets = Secrets::new(db.pool.clone(), ring("A"));
    assert!(secrets.get("node-ca/1").await.unwrap().is_none());
    let made = futures::future::join_all((0..8_u8).map(|n| {
        let secrets = secrets.clone();
        async move {
            let make = || (SecretSlice::from(vec![n; 4]), serde_json::json!({"n": n}));
            secrets.get_or_create("node-ca/1", make).await.unwrap()
        }
    }))
    .await;
    let first = made[0].value.expose_secret();
    assert!(made.iter().all(|secret| secret.value.expose_secret() == first));
    assert_eq!(made[0].public, serde_json::json!({"n": first[0]}));

    secrets.get_or_create("node-ca/2", || (SecretSlice::from(vec![9]), serde_json::json!({}))).await.unwrap();
    secrets.get_or_create("task-signer/1", || (SecretSlice::from(vec![9]), serde_json::json!({}))).await.unwrap();
    let names: Vec<String> = secrets.list("node-ca/").await.unwrap().into_iter().map(|secret| secret.name).collect();
    assert_eq!(names, ["node-ca/1", "node-ca/2"]);
}

#[tokio::test]
async fn a_secret_opens_neither_under_another_key_nor_in_another_row() {
    let db = TestDatabase::fresh().await;
    let secrets = Secrets::new(db.pool.clone(), ring("A"));
    for name in ["one", "two"] {
        secrets
            .get_or_create(name, || (SecretSlice::from(name.as_bytes().to_vec()), serde_json::json!({})))
            .await
            .unwrap();
    }
    let other = Secrets::new(db.pool.clone(), ring("E"));
    assert!(matches!(other.get("one").await, Err(SecretError::Sealed { .. })));
    sqlx::query("UPDATE secret SET sealed = (SELECT sealed FROM secret WHERE name = 'two') WHERE name = 'one'")
        .execute(&db.pool)
        .await
        .unwrap();
    assert!(matches!(secrets.get("one").await, Err(SecretError::Sealed { .. })));
    let stored: Vec<u8> =
        sqlx::query_scalar("SELECT sealed FROM secret WHERE name = 'two'").fetch_one(&db.pool).await.unwrap();
    assert!(!stored.windows(3).any(|window| window == b"two"));
}

#[tokio::test]
async fn sealed_columns_of_the_specification_exist_in_storage() {
    let store = TestStore::new().await;
    let allocation = create(1);
    let entity = domain::id::EntityRef { kind: domain::EntityKind::Allocation, ..allocation.entity };
    let snapshot = r#"{"asked": {"scheduler_request_enc": "c2VhbGVk"}}"#.to_owned();
    assert_eq!(store.commit(&Commit { entity, snapshot, ..allocation }).await, CommitOutcome::Applied);
    let metadata: serde_json::Value =
        sqlx::query_scalar("SELECT scheduler_metadata FROM allocation_scheduling WHERE allocation_id = $1")
            .bind(entity.id)
            .fetch_one(store.pool())
            .await
            .unwrap();
    assert_eq!(metadata, serde_json::json!({ "scheduler_request_enc": "c2VhbGVk" }));
    let private: Option<Vec<u8>> = sqlx::query_scalar("SELECT ssh_private_key_enc FROM entity WHERE id = $1")
        .bind(entity.id)
        .fetch_one(store.pool())
        .await
        .unwrap();
    assert_eq!(private, None, "nothing is imported, and nothing else writes it");
}

/// The claims of nodes of the release before, duplicates among them.
#[tokio::test]
async fn claims_are_filled_from_existing_nodes_and_the_older_one_of_two_has_the_gpu() {
    let store = TestStore::new().await;
    let node = |n: u32, state: &'static str, gpus: &[&str]| {
        let gpus: Vec<_> = gpus.iter().map(|uuid| serde_json::json!({ "uuid": uuid })).collect();
        let made = create(n);
        Commit {
            entity: domain::id::EntityRef { kind: domain::EntityKind::Node, ..made.entity },
            snapshot: serde_json::json!({ "inventory": { "gpus": gpus } }).to_string(),
            to_state: state,
            at: made.at + chrono::TimeDelta::milliseconds(n.into()),
            ..made
        }
    };
    let bare = Commit { snapshot: r#"{"inventory": null}"#.to_owned(), ..node(5, "active", &[]) };
    let nodes = [
        node(1, "active", &["GPU-A", "GPU-B"]),
        node(2, "offline", &["gpu-b", "GPU-C"]),
        node(3, "enrolling", &["GPU-D"]),
        node(4, "removed", &["GPU-E"]),
        bare,
    ];
    store.commit_all(&nodes).await;
    sqlx::raw_sql("DROP TABLE claim").execute(store.pool()).await.unwrap();
    sqlx::raw_sql(include_str!("../../../migrations/0036_unique_name_claims.sql")).execute(store.pool()).await.unwrap();
    let claims: Vec<(String, Uuid)> =
        sqlx::query_as("SELECT name, entity FROM claim ORDER BY name").fetch_all(store.pool()).await.unwrap();
    let [one, two] = [nodes[0].entity.id, nodes[1].entity.id];
    assert_eq!(claims, [("gpu/gpu-a".into(), one), ("gpu/gpu-b".into(), one), ("gpu/gpu-c".into(), two)]);
    let listed: serde_json::Value = sqlx::query_scalar("SELECT body->'claimed_gpus' FROM entity WHERE id = $1")
        .bind(two)
        .fetch_one(store.pool())
        .await
        .unwrap();
    assert_eq!(listed, serde_json::json!(["GPU-C"]));
}
