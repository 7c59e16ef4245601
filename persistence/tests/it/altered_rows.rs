//! Lists of rows that were altered in Postgres without a member: what is not as it was committed is not shown, and hides nothing else.

use crate::reads::policies;
use crate::test_store::{TestStore, at, bare, create};
use domain::authz::PlatformRole;
use domain::commit::{Commit, CommitOutcome};
use domain::id::{BindingId, EntityKind, NodeId};
use domain::policy::PolicyScope;
use domain::role_bindings::{RoleBinding, RoleBindings};
use domain::state_machine::IndexKeys;
use local_servers::test_database::TestDatabase;
use persistence::SnapshotSealer;
use persistence::queries::{BindingFilter, ListFilter, PolicyFilter};
use persistence::snapshot_seal::SealRefusal;
use secrecy::SecretSlice;
use uuid::Uuid;

fn seals() -> SnapshotSealer {
    SnapshotSealer::new(&SecretSlice::from(vec![7; 32]), None).unwrap()
}

/// A database with these sealed entities.
async fn stored(commits: &[Commit]) -> TestStore {
    let store = TestStore::with(TestDatabase::fresh().await, |config| config.seals = Some(seals())).await;
    for commit in commits {
        assert_eq!(store.commit(commit).await, CommitOutcome::Applied);
    }
    store
}

async fn alter(store: &TestStore, statement: &'static str) {
    assert_eq!(sqlx::query(statement).execute(store.pool()).await.unwrap().rows_affected(), 1);
}

#[tokio::test]
async fn altered_row_is_shown_in_no_list_and_the_pages_are_complete() {
    let commits: Vec<_> =
        (0..5).map(|n| Commit { at: at(0) + chrono::TimeDelta::milliseconds(n.into()), ..create(n) }).collect();
    let store = stored(&commits).await;
    alter(&store, "UPDATE entity SET body = '{\"n\": 7}' WHERE body ->> 'n' = '1'").await;
    alter(&store, "UPDATE entity SET seal = NULL WHERE body ->> 'n' = '2'").await;
    let reads = store.reads().sealed(seals());
    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let page = reads.list(EntityKind::Sku, &ListFilter::default(), after, 2).await.unwrap();
        listed.extend(page.items);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    let ids: Vec<_> = commits.iter().map(|commit| commit.entity.id).collect();
    assert_eq!(listed.iter().map(|listed| listed.entity.id).collect::<Vec<_>>(), ids);
    let refusals: Vec<_> = listed.iter().map(|listed| listed.row.as_ref().err().copied()).collect();
    assert_eq!(refusals, [None, Some(SealRefusal::Altered), Some(SealRefusal::Unsealed), None, None]);
    let mut found: Vec<_> =
        reads.entities(EntityKind::Sku, &ids).await.unwrap().into_iter().map(|row| row.entity.id).collect();
    found.sort_unstable();
    assert_eq!(found, [ids[0], ids[3], ids[4]]);
}

/// The subject has the role of an auditor.
fn auditor(n: u32, subject: &str) -> Commit {
    let binding = RoleBinding {
        id: BindingId(Uuid::from_u128(n.into())),
        bound_by: "user:root".into(),
        bound_at: at(0),
        reason: "r".into(),
    };
    let roles = [(PlatformRole::Auditor, binding)].into();
    let mut commit = Commit {
        snapshot: serde_json::to_string(&RoleBindings { subject: subject.into(), roles }).unwrap(),
        keys: IndexKeys { owner: Some(subject.to_owned()), ..IndexKeys::default() },
        ..bare(create(n))
    };
    commit.entity.kind = EntityKind::Bindings;
    commit
}

#[tokio::test]
async fn altered_role_binding_is_marked_under_the_subject_that_was_committed() {
    let store = stored(&[auditor(1, "ann"), auditor(2, "bob"), auditor(3, "eve")]).await;
    alter(
        &store,
        "UPDATE entity SET body = replace(body::text, 'auditor', 'platform_operations')::jsonb WHERE owner = 'ann'",
    )
    .await;
    // The column is not sealed.
    alter(&store, "UPDATE entity SET owner = 'ann' WHERE owner = 'eve'").await;
    let page = store.reads().sealed(seals()).bindings(&BindingFilter::default(), None, 10).await.unwrap();
    let shown: Vec<_> = page.items.iter().map(|row| (row.subject.as_str(), row.is_intact)).collect();
    assert_eq!(shown, [("ann", false), ("bob", true), ("eve", true)]);
}

#[tokio::test]
async fn altered_policy_value_is_marked_in_its_list() {
    let value = |seconds: i64| [("node.offline_after_seconds", serde_json::json!(seconds), -1000)];
    let commits =
        [policies(1, PolicyScope::Global, &value(30)), policies(2, PolicyScope::UserId("ann".into()), &value(40))];
    let store = stored(&commits).await;
    alter(
        &store,
        "UPDATE entity SET body = jsonb_set(body, '{values,0,value}', '31') WHERE body -> 'scope' ? 'user_id'",
    )
    .await;
    let reads = store.reads().sealed(seals());
    let page = reads.policy_values(&PolicyFilter::default(), at(0), None, 10).await.unwrap();
    let shown: Vec<_> = page.items.iter().map(|row| (row.scope.clone(), row.is_intact)).collect();
    assert_eq!(shown, [(PolicyScope::Global, true), (PolicyScope::UserId("ann".into()), false)]);
}

#[tokio::test]
async fn altered_row_that_fails_the_statement_hides_no_other_policy_value_or_role_binding() {
    let value = |seconds: i64| [("node.offline_after_seconds", serde_json::json!(seconds), -1000)];
    let commits = [
        policies(1, PolicyScope::Global, &value(30)),
        policies(2, PolicyScope::UserId("ann".into()), &value(40)),
        auditor(3, "bob"),
        auditor(4, "eve"),
    ];
    let store = stored(&commits).await;
    // No instant, and no object of roles.
    alter(
        &store,
        "UPDATE entity SET body = jsonb_set(body, '{values,0,effective_at}', '\"soon\"') WHERE body -> 'scope' ? 'user_id'",
    )
    .await;
    alter(&store, "UPDATE entity SET body = jsonb_set(body, '{roles}', '7') WHERE owner = 'bob'").await;
    let reads = store.reads().sealed(seals());
    let page = reads.policy_values(&PolicyFilter::default(), at(0), None, 10).await.unwrap();
    let shown: Vec<_> = page.items.iter().map(|row| (row.scope.clone(), row.is_intact)).collect();
    assert_eq!(shown, [(PolicyScope::Global, true)]);
    let page = reads.bindings(&BindingFilter::default(), None, 10).await.unwrap();
    let shown: Vec<_> = page.items.iter().map(|row| (row.subject.as_str(), row.is_intact)).collect();
    assert_eq!(shown, [("eve", true)]);
}

/// A node with eight free GPUs.
fn node(n: u32) -> Commit {
    let snapshot = serde_json::json!({
        "registration": { "sku": { "name": "h100" }, "region_code": "eu-1", "gpus_total": 8 },
        "holds": {},
        "inventory": { "gpus": vec!["GPU"; 8], "isolates_devices": true },
    });
    let keys = IndexKeys { sku: Some(Uuid::from_u128(1)), ..IndexKeys::default() };
    let mut commit = Commit { snapshot: snapshot.to_string(), keys, to_state: "active", ..bare(create(n)) };
    commit.entity.kind = EntityKind::Node;
    commit
}

#[tokio::test]
async fn altered_node_hides_no_other_node_of_the_fleet_and_is_counted_as_refused() {
    let commits: Vec<_> = (1..=4).map(node).collect();
    let store = stored(&commits).await;
    let (seals, registry) = (seals(), prometheus::Registry::new());
    seals.register(&registry).unwrap();
    let reads = store.reads().sealed(seals);
    let refused = || {
        let families = registry.gather();
        families[0].get_metric().iter().map(|metric| metric.get_counter().get_value() as u64).sum::<u64>()
    };
    let ids: Vec<_> = commits.iter().map(|commit| NodeId(commit.entity.id)).collect();
    let alterations = [
        "body - 'registration'",
        "jsonb_set(body, '{registration,region_code}', 'null')",
        "jsonb_set(body, '{registration,sku,name}', '7')",
    ];
    for (n, alteration) in alterations.into_iter().enumerate() {
        let statement = format!("UPDATE entity SET body = {alteration} WHERE id = $1");
        let altered = sqlx::query(sqlx::AssertSqlSafe(statement)).bind(ids[n].0).execute(store.pool()).await.unwrap();
        assert_eq!(altered.rows_affected(), 1);
        let before = refused();
        let mut listed: Vec<_> = reads.fleet_nodes(&ids).await.unwrap().into_iter().map(|row| row.node).collect();
        listed.sort_unstable();
        assert_eq!(refused() - before, n as u64 + 1, "each altered node");
        assert_eq!(listed, ids[n + 1..], "{alteration}");
    }
}
