//! The schema, its partitions, the sweeps and the sealed secrets.

use crate::postgres::Database;
use crate::world::{World, create};
use domain::commit::{Commit, Outcome};
use persistence::Secrets;
use persistence::envelope::KeyRing;
use persistence::migrate::{self, SchemaError};
use persistence::secrets::SecretError;
use persistence::sweep;
use secrecy::{ExposeSecret, SecretSlice};
use std::sync::Arc;

#[tokio::test]
async fn several_members_that_start_at_once_migrate_once() {
    let db = Database::fresh().await;
    sqlx::query("CREATE SCHEMA other").execute(&db.pool).await.unwrap();
    let runs = futures::future::join_all((0..4).map(|_| migrate::run(&db.pool))).await;
    assert!(runs.iter().all(Result::is_ok), "{runs:?}");
}

#[tokio::test]
async fn a_newer_schema_is_refused_by_name() {
    let db = Database::fresh().await;
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (9999, 'from the future', true, '', 0)",
    )
    .execute(&db.pool)
    .await
    .unwrap();
    let error = migrate::run(&db.pool).await.unwrap_err();
    assert!(matches!(error, SchemaError::Newer { found: 9999, known } if known == migrate::known()), "{error}");
}

#[tokio::test]
async fn partitions_are_made_ahead_and_once() {
    let db = Database::fresh().await;
    assert_eq!(sweep::make_partitions(&db.pool, 2).await.unwrap(), 0, "the template has them");
    let made = futures::future::join_all((0..4).map(|_| sweep::make_partitions(&db.pool, 4))).await;
    let made: u32 = made.into_iter().map(Result::unwrap).sum();
    assert_eq!(made, 4, "two months of two tables");
}

#[tokio::test]
async fn rows_of_a_month_without_a_partition_are_kept_and_block_nothing() {
    let world = World::new().await;
    let later = Commit { at: chrono::Utc::now() + chrono::TimeDelta::days(200), ..create(1) };
    assert_eq!(world.commit(&later).await, Outcome::Applied);
    assert_eq!(world.count("history_default").await, 1);
    // That month stays in the default partition, its neighbours are made.
    assert_eq!(sweep::make_partitions(world.pool(), 8).await.unwrap(), 10);
    assert_eq!(world.count("history").await, 1);
}

#[tokio::test]
async fn commands_are_forgotten_after_their_day_in_small_steps() {
    let world = World::new().await;
    let commits: Vec<Commit> = (0..30).map(create).collect();
    world.commit_all(&commits).await;
    assert_eq!(sweep::forget_commands(world.pool(), sweep::COMMANDS_KEPT, 100).await.unwrap(), 0);
    sqlx::query("UPDATE command SET created_at = created_at - interval '25 hours' WHERE shard < 25")
        .execute(world.pool())
        .await
        .unwrap();
    assert_eq!(sweep::forget_commands(world.pool(), sweep::COMMANDS_KEPT, 20).await.unwrap(), 20);
    assert_eq!(sweep::forget_commands(world.pool(), sweep::COMMANDS_KEPT, 20).await.unwrap(), 5);
    assert_eq!(world.count("command").await, 5);
}

#[tokio::test]
async fn the_outbox_is_settled_by_id() {
    let world = World::new().await;
    let commits: Vec<Commit> = (0..5).map(create).collect();
    world.commit_all(&commits).await;
    let outbox = persistence::Outbox::new(world.pool().clone());
    let ids: Vec<_> = commits[1..].iter().map(|commit| commit.outbox[0].0).collect();
    assert_eq!(outbox.settle(&ids).await.unwrap(), 4);
    assert_eq!(outbox.settle(&ids).await.unwrap(), 0);
    assert_eq!(outbox.settle(&[]).await.unwrap(), 0);
    assert_eq!(world.count("outbox").await, 1);
}

fn ring(byte: &str) -> Arc<KeyRing> {
    // 32 equal bytes in base64.
    Arc::new(KeyRing::parse(&format!("active k\nkey k {}=", byte.repeat(43))).unwrap())
}

#[tokio::test]
async fn of_many_that_make_a_secret_at_once_all_get_the_same() {
    let db = Database::fresh().await;
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
    let db = Database::fresh().await;
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
    let world = World::new().await;
    let allocation = create(1);
    let entity = domain::id::EntityRef { kind: domain::Kind::Allocation, ..allocation.entity };
    let snapshot = r#"{"asked": {"scheduler_request_enc": "c2VhbGVk"}}"#.to_owned();
    assert_eq!(world.commit(&Commit { entity, snapshot, ..allocation }).await, Outcome::Applied);
    let metadata: serde_json::Value =
        sqlx::query_scalar("SELECT scheduler_metadata FROM allocation_scheduling WHERE allocation_id = $1")
            .bind(entity.id)
            .fetch_one(world.pool())
            .await
            .unwrap();
    assert_eq!(metadata, serde_json::json!({ "scheduler_request_enc": "c2VhbGVk" }));
    let private: Option<Vec<u8>> = sqlx::query_scalar("SELECT ssh_private_key_enc FROM entity WHERE id = $1")
        .bind(entity.id)
        .fetch_one(world.pool())
        .await
        .unwrap();
    assert_eq!(private, None, "nothing is imported, and nothing else writes it");
}

/// The claims that nodes of the release before have, duplicates among them.
#[tokio::test]
async fn claims_are_filled_from_the_nodes_that_there_are_and_of_two_the_older_one_has_the_gpu() {
    let world = World::new().await;
    let node = |n: u32, state: &'static str, gpus: &[&str]| {
        let gpus: Vec<_> = gpus.iter().map(|uuid| serde_json::json!({ "uuid": uuid })).collect();
        let made = create(n);
        Commit {
            entity: domain::id::EntityRef { kind: domain::Kind::Node, ..made.entity },
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
    world.commit_all(&nodes).await;
    sqlx::raw_sql("DROP TABLE claim").execute(world.pool()).await.unwrap();
    sqlx::raw_sql(include_str!("../../../migrations/0036_claim.sql")).execute(world.pool()).await.unwrap();
    let claims: Vec<(String, uuid::Uuid)> =
        sqlx::query_as("SELECT name, entity FROM claim ORDER BY name").fetch_all(world.pool()).await.unwrap();
    let [one, two] = [nodes[0].entity.id, nodes[1].entity.id];
    assert_eq!(claims, [("gpu/gpu-a".into(), one), ("gpu/gpu-b".into(), one), ("gpu/gpu-c".into(), two)]);
    let listed: serde_json::Value = sqlx::query_scalar("SELECT body->'claimed_gpus' FROM entity WHERE id = $1")
        .bind(two)
        .fetch_one(world.pool())
        .await
        .unwrap();
    assert_eq!(listed, serde_json::json!(["GPU-C"]));
}
