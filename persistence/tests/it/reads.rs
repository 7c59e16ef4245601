//! Reads return what was committed.

use crate::test_store::{TestStore, at, bare, create, event, next};
use domain::authz::PlatformRole;
use domain::commit::{Commit, CommitOutcome, SetChange, Snapshot, Timer};
use domain::id::{BindingId, EntityKind, EntityRef, EventId, NodeId, PolicyId, Shard, SkuId};
use domain::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue, Scopes};
use domain::role_bindings::{RoleBinding, RoleBindings};
use domain::state_machine::IndexKeys;
use local_servers::test_database::TestDatabase;
use persistence::queries::{AuditFilter, BindingFilter, Cursor, ListFilter, PolicyFilter};
use persistence::{Loader, Reads, SnapshotSealer, table_maintenance};
use secrecy::SecretSlice;
use sqlx::postgres::PgPoolOptions;
use std::time::Duration;
use uuid::Uuid;

#[tokio::test]
async fn a_list_pages_through_everything_once_oldest_first() {
    let store = TestStore::new().await;
    // Several have the same instant: the id decides.
    let when = at(0);
    let commits: Vec<Commit> = (0..25)
        .map(|n| Commit { at: when + chrono::TimeDelta::milliseconds(i64::from(n / 10)), ..create(n) })
        .collect();
    store.commit_all(&commits).await;
    let (mut ids, mut after): (Vec<Uuid>, Option<Cursor>) = (Vec::new(), None);
    loop {
        let page = store.reads().list(EntityKind::Sku, &ListFilter::default(), after, 10).await.unwrap();
        ids.extend(page.items.iter().map(|row| row.entity.id));
        assert!(page.items.len() <= 10);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(ids, commits.iter().map(|commit| commit.entity.id).collect::<Vec<_>>());
    let none = store.reads().list(EntityKind::Node, &ListFilter::default(), None, 10).await.unwrap();
    assert_eq!((none.items.len(), none.next), (0, None));
}

#[tokio::test]
async fn a_list_is_filtered_by_owner_state_and_sku() {
    let store = TestStore::new().await;
    let sku = Uuid::new_v4();
    let mine = Commit { keys: IndexKeys { owner: Some("ann".into()), sku: Some(sku), unique_name: None }, ..create(1) };
    let active = next(&mine);
    let other = Commit { keys: IndexKeys { owner: Some("bob".into()), ..IndexKeys::default() }, ..create(2) };
    for commit in [&mine, &other, &active] {
        store.commit(commit).await;
    }
    let filters = [
        (ListFilter { owner: Some("ann".into()), ..ListFilter::default() }, 1),
        (ListFilter { owner: Some("ann".into()), states: vec!["draft".into()], ..ListFilter::default() }, 0),
        (ListFilter { states: vec!["active".into()], sku: Some(sku), ..ListFilter::default() }, 1),
        (ListFilter { states: vec!["active".into(), "draft".into()], ..ListFilter::default() }, 2),
        (ListFilter { owner: Some("bob".into()), sku: Some(sku), ..ListFilter::default() }, 0),
        (ListFilter::default(), 2),
    ];
    for (filter, count) in filters {
        assert_eq!(
            store.reads().list(EntityKind::Sku, &filter, None, 10).await.unwrap().items.len(),
            count,
            "{filter:?}"
        );
    }
    // Keys are fixed at creation.
    let row = store.reads().entity(mine.entity).await.unwrap().unwrap();
    assert_eq!((row.owner.as_deref(), row.sku, row.version), (Some("ann"), Some(sku), 2));
}

#[tokio::test]
async fn list_by_terms_has_the_entities_with_all_of_them() {
    let store = TestStore::new().await;
    let when = at(0);
    let commits: Vec<Commit> = (0..30)
        .map(|n| {
            let added = ["label/env".to_owned(), format!("label/env={}", n % 3), format!("name/it's {n}%")];
            let terms = SetChange { added: added.into(), dropped: Vec::new() };
            Commit { at: when + chrono::TimeDelta::milliseconds(i64::from(n)), terms, ..create(n) }
        })
        .collect();
    store.commit_all(&commits).await;
    let of = |terms: &[&str]| ListFilter {
        terms: terms.iter().map(|term| (*term).to_owned()).collect(),
        ..ListFilter::default()
    };
    let mut expected: Vec<Uuid> = commits.iter().skip(1).step_by(3).map(|commit| commit.entity.id).collect();
    for is_newest_first in [false, true] {
        let filter = ListFilter { is_newest_first, ..of(&["label/env", "label/env=1"]) };
        let (mut ids, mut after): (Vec<Uuid>, Option<Cursor>) = (Vec::new(), None);
        loop {
            let page = store.reads().list(EntityKind::Sku, &filter, after, 4).await.unwrap();
            ids.extend(page.items.iter().map(|row| row.entity.id));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(ids, expected, "newest first: {is_newest_first}");
        expected.reverse();
    }
    for (terms, count) in [
        (&["name/it's 7%"][..], 1),
        (&["name/it's 7%", "label/env=1"], 1),
        (&["name/it's 7%", "label/env=2"], 0),
        (&["name/%"], 0),
        (&["label/en_"], 0),
    ] {
        let found = store.reads().list(EntityKind::Sku, &of(terms), None, 50).await.unwrap();
        assert_eq!(found.items.len(), count, "{terms:?}");
    }
    assert_eq!(store.reads().list(EntityKind::Node, &of(&["label/env"]), None, 50).await.unwrap().items.len(), 0);
}

#[tokio::test]
async fn the_shell_loads_version_and_body_of_its_own_kind() {
    let store = TestStore::new().await;
    let commit = create(1);
    store.commit(&commit).await;
    let snapshot = store.reads().snapshot(commit.entity).await.unwrap();
    assert_eq!(snapshot, Some(Snapshot { version: 1, body: commit.snapshot.clone() }));
    let mut other = commit.entity;
    other.kind = EntityKind::Node;
    assert_eq!(store.reads().snapshot(other).await.unwrap(), None);
}

#[tokio::test]
async fn concurrent_loads_get_their_own_snapshot_or_none() {
    let store = TestStore::new().await;
    let commits: Vec<Commit> =
        (0..1000).map(|n| Commit { snapshot: format!(r#"{{"n": {n}}}"#), ..create(n) }).collect();
    store.commit_all(&commits[..900]).await;
    let loader = Loader::start(&store.reads());
    let loaded = futures::future::join_all(commits.iter().map(|commit| loader.load(commit.entity))).await;
    for (n, (loaded, commit)) in loaded.into_iter().zip(&commits).enumerate() {
        let expected = (n < 900).then(|| Snapshot { version: 1, body: commit.snapshot.clone() });
        assert_eq!(loaded.unwrap(), expected, "{n}");
    }
    let of_another_kind = EntityRef { kind: EntityKind::Node, ..commits[0].entity };
    assert_eq!(loader.load(of_another_kind).await.unwrap(), None);
}

#[tokio::test]
async fn a_name_or_an_id_finds_the_same_entity() {
    let store = TestStore::new().await;
    let named = Commit { keys: IndexKeys { unique_name: Some("h100".into()), ..IndexKeys::default() }, ..create(1) };
    store.commit(&named).await;
    for key in ["h100", &named.entity.id.to_string()] {
        let row = store.reads().find_by_name(EntityKind::Sku, key).await.unwrap().unwrap();
        assert_eq!(row.entity, named.entity);
    }
    for key in ["H100", "", "a100", &Uuid::new_v4().to_string()] {
        assert_eq!(store.reads().find_by_name(EntityKind::Sku, key).await.unwrap(), None);
    }
}

#[tokio::test]
async fn placement_reads_the_versions_of_a_skus_active_nodes_and_the_nodes_that_it_names() {
    let store = TestStore::new().await;
    let sku = SkuId(Uuid::new_v4());
    let node = |n: u32, state: &'static str| {
        let mut commit =
            Commit { to_state: state, keys: IndexKeys { sku: Some(sku.0), ..IndexKeys::default() }, ..bare(create(n)) };
        commit.entity.kind = EntityKind::Node;
        commit
    };
    let commits = [node(1, "active"), node(2, "retired"), node(3, "active"), create(4)];
    store.commit_all(&commits).await;
    let id = |n: usize| NodeId(commits[n].entity.id);
    let mut versions = store.reads().node_versions(sku, "active").await.unwrap();
    versions.sort_by_key(|row| row.node);
    let mut expected = [id(0), id(2)];
    expected.sort();
    assert_eq!(versions.iter().map(|row| (row.node, row.version)).collect::<Vec<_>>(), expected.map(|it| (it, 1)));
    assert_eq!(store.reads().node_versions(SkuId(Uuid::new_v4()), "active").await.unwrap(), []);
    // In whatever state: one that left service is known to have done so.
    let mut rows = store.reads().node_rows(&[id(1), id(0), id(3), NodeId(Uuid::new_v4())]).await.unwrap();
    rows.sort_by_key(|row| row.node != id(0));
    let found: Vec<_> = rows.iter().map(|row| (row.node, row.sku, row.version)).collect();
    assert_eq!(found, [(id(0), sku, 1), (id(1), sku, 1)]);
    assert!(rows.iter().all(|row| serde_json::from_str::<serde_json::Value>(&row.body).is_ok()));
    assert_eq!(store.reads().sku_ids().await.unwrap(), [SkuId(commits[3].entity.id)]);
}

#[tokio::test]
async fn version_is_settled_a_second_after_its_commit() {
    let store = TestStore::new().await;
    let sku = SkuId(Uuid::new_v4());
    for (n, age) in [(1_i64, "0 seconds"), (2, "2 seconds")] {
        sqlx::query(
            "INSERT INTO entity (id, kind, shard, version, state, body, sku, created_at, updated_at)
             VALUES ($1, 'node', 1, $2, 'active', '{}', $3, now(), now() - $4::interval)",
        )
        .bind(Uuid::new_v4())
        .bind(n)
        .bind(sku.0)
        .bind(age)
        .execute(store.pool())
        .await
        .unwrap();
    }
    let versions = store.reads().node_versions(sku, "active").await.unwrap();
    let nodes: Vec<_> = versions.iter().map(|row| row.node).collect();
    let mut rows = store.reads().node_rows(&nodes).await.unwrap();
    rows.sort_by_key(|row| row.version);
    assert_eq!(rows.iter().map(|row| row.is_settled).collect::<Vec<_>>(), [false, true]);
}

#[tokio::test]
async fn entities_are_counted_by_kind_and_state_during_compaction() {
    let store = TestStore::new().await;
    let counts = async || {
        let counts = store.reads().counts().await.unwrap();
        counts.iter().map(|count| (count.kind, count.state.clone(), count.count)).collect::<Vec<_>>()
    };
    let draft = |n| (EntityKind::Sku, "draft".to_owned(), n);
    let commits: Vec<_> = (0..40).map(create).collect();
    store.commit_all(&commits).await;
    assert_eq!(counts().await, [draft(40)]);
    // A repeated commit counts once, and a refused one does not.
    store.commit(&commits[0]).await;
    let active = Commit { to_state: "active", ..next(&commits[1]) };
    store.commit(&active).await;
    store.commit(&Commit { to_state: "active", ..next(&commits[1]) }).await;
    let expected = [(EntityKind::Sku, "active".to_owned(), 1), draft(39)];
    assert_eq!(counts().await, expected);
    let pool = store.pool();
    let adding = (0..8).map(|n| async move {
        if n % 2 == 0 {
            table_maintenance::compact_counts(pool).await
        } else {
            table_maintenance::correct_counts(pool).await.map(|differences| assert_eq!(differences, []))
        }
    });
    let more: Vec<_> = (100..140).map(create).collect();
    let (added, _) = tokio::join!(futures::future::join_all(adding), store.commit_all(&more));
    assert!(added.iter().all(Result::is_ok));
    assert_eq!(counts().await, [(EntityKind::Sku, "active".to_owned(), 1), draft(79)]);
    table_maintenance::compact_counts(store.pool()).await.unwrap();
    assert_eq!(store.count("entity_count").await, 2);
    // Commits of another release that append no count are found.
    sqlx::query("UPDATE entity SET state = 'inactive' WHERE state = 'active'").execute(store.pool()).await.unwrap();
    assert_eq!(table_maintenance::correct_counts(store.pool()).await.unwrap().len(), 2);
    assert_eq!(counts().await, [draft(79), (EntityKind::Sku, "inactive".to_owned(), 1)]);
}

#[tokio::test]
async fn a_history_pages_from_the_newest_back() {
    let store = TestStore::new().await;
    let mut last = create(1);
    store.commit(&last).await;
    for _ in 0..6 {
        last = next(&last);
        store.commit(&last).await;
    }
    let newest = store.reads().history(last.entity.id, None, 4).await.unwrap();
    assert_eq!(newest.items.iter().map(|row| row.version).collect::<Vec<_>>(), [7, 6, 5, 4]);
    let oldest = store.reads().history(last.entity.id, newest.next, 4).await.unwrap();
    assert_eq!(oldest.items.iter().map(|row| row.version).collect::<Vec<_>>(), [3, 2, 1]);
    assert_eq!((oldest.next, oldest.items[2].from_state.as_deref()), (None, None));
    assert_eq!(newest.items[0].command, "activate");
}

#[tokio::test]
async fn due_timers_are_listed_by_shard_longest_due_first() {
    let store = TestStore::new().await;
    let now = at(0);
    let waiting = |n: u32, wake: i64, end: Option<i64>| {
        let after = |ms| now + chrono::TimeDelta::milliseconds(ms);
        let timer = Timer { wake_at: after(wake), deadline_at: end.map(after), reason: format!("reason {n}") };
        Commit { timer: Some(timer), ..bare(create(n)) }
    };
    let commits = [
        waiting(1, -10, None),
        waiting(2, -20, Some(-5)),
        waiting(3, 0, Some(5)),
        waiting(4, 1, None),
        waiting(5, -9, Some(-8)),
    ];
    store.commit_all(&commits).await;
    let shards = [Shard(1), Shard(2), Shard(3), Shard(4)];
    let due = store.reads().due_timers(&shards, EntityKind::ALL, now, &[], 10).await.unwrap();
    assert_eq!(due.iter().map(|due| due.reason.as_str()).collect::<Vec<_>>(), ["reason 2", "reason 1", "reason 3"]);
    assert_eq!(store.reads().due_timers(&shards, EntityKind::ALL, now, &[], 1).await.unwrap().len(), 1);
    let without = store.reads().due_timers(&shards, EntityKind::ALL, now, &[commits[1].entity.id], 1).await.unwrap();
    assert_eq!(without[0].reason, "reason 1", "skipped entities do not count towards the limit");
    let overdue = store.reads().overdue(now, 1).await.unwrap();
    assert_eq!((overdue.count, overdue.rows[0].entity), (2, commits[4].entity));
    assert_eq!(store.reads().overdue(now - chrono::TimeDelta::hours(1), 1).await.unwrap().count, 0);
}

#[tokio::test]
async fn orphaned_events_are_in_commit_order_and_unreadable_ones_are_skipped() {
    let store = TestStore::new().await;
    let mut commit = create(0);
    commit.outbox = (0..6).map(|_| (EventId(Uuid::now_v7()), event(commit.entity.id))).collect();
    // Ids do not follow the order.
    commit.outbox.reverse();
    store.commit_all(&[commit.clone(), create(1), create(2)]).await;
    sqlx::query("UPDATE outbox SET event = '{\"fact\": \"of_tomorrow\"}' WHERE shard = 1")
        .execute(store.pool())
        .await
        .unwrap();
    let shards = [Shard(0), Shard(1)];
    let foreign = store.reads().orphaned_events(&[Shard(1)], Duration::ZERO, &[], 1).await.unwrap();
    assert_eq!((foreign.rows.len(), foreign.foreign.len()), (0, 1), "it counts towards the limit");
    let behind = store.reads().orphaned_events(&[Shard(1)], Duration::ZERO, &foreign.foreign, 1).await.unwrap();
    assert!(behind.foreign.is_empty(), "once it is named it does not: {behind:?}");
    let orphans = store.reads().orphaned_events(&shards, Duration::ZERO, &[], 100).await.unwrap().rows;
    assert_eq!(
        orphans.iter().map(|row| row.id).collect::<Vec<_>>(),
        commit.outbox.iter().map(|(id, _)| *id).collect::<Vec<_>>()
    );
    assert_eq!(store.reads().orphaned_events(&shards, Duration::ZERO, &[], 2).await.unwrap().rows.len(), 2);
    let without = store.reads().orphaned_events(&shards, Duration::ZERO, &[orphans[0].id], 2).await.unwrap().rows;
    assert_eq!(without, orphans[1..3]);
    assert_eq!(store.reads().orphaned_events(&shards, Duration::from_secs(60), &[], 100).await.unwrap().rows.len(), 0);
}

#[tokio::test]
async fn the_audit_log_is_filtered_and_pages_from_the_newest_back() {
    let store = TestStore::new().await;
    let when = at(0);
    let commits: Vec<Commit> = (0..12)
        .map(|n| Commit {
            at: when + chrono::TimeDelta::milliseconds(i64::from(n / 4)),
            actor: if n % 2 == 0 { "user:ann".into() } else { "user:bob".into() },
            ..create(n)
        })
        .collect();
    store.commit_all(&commits).await;
    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        let page = store.reads().audit(&AuditFilter::default(), before, 5).await.unwrap();
        seen.extend(page.items.iter().map(|row| (row.place.at, row.place.shard)));
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!(seen.len(), 12);
    assert!(seen.is_sorted_by(|a, b| a > b));
    let filters = [
        (AuditFilter { actor: Some("user:bob".into()), ..AuditFilter::default() }, 6),
        (AuditFilter { action: Some("skus.create".into()), ..AuditFilter::default() }, 12),
        (AuditFilter { action: Some("nodes.remove".into()), ..AuditFilter::default() }, 0),
        (AuditFilter { target: Some(commits[3].entity.id), ..AuditFilter::default() }, 1),
        (AuditFilter { target_kind: Some("sku".into()), ..AuditFilter::default() }, 12),
        (AuditFilter { target_kind: Some("node".into()), ..AuditFilter::default() }, 0),
        (AuditFilter { correlation_id: Some("corr-5".into()), ..AuditFilter::default() }, 1),
        (AuditFilter { from: Some(when + chrono::TimeDelta::milliseconds(1)), ..AuditFilter::default() }, 8),
        (AuditFilter { until: Some(when + chrono::TimeDelta::milliseconds(1)), ..AuditFilter::default() }, 4),
    ];
    for (filter, count) in filters {
        assert_eq!(store.reads().audit(&filter, None, 100).await.unwrap().items.len(), count, "{filter:?}");
    }
}

/// The values of a scope as an entity, to be created.
pub(crate) fn policies(n: u32, scope: PolicyScope, values: &[(&str, serde_json::Value, i64)]) -> Commit {
    let base = create(n);
    let written = values.iter().enumerate().map(|(at_, (key, value, effective_at))| {
        serde_json::json!({
            "id": Uuid::from_u128(u128::from(n) * 100 + at_ as u128), "key": key, "value": value,
            "effective_at": at(*effective_at), "reason": "r", "old_value": null, "written_by": "w", "written_at": at(i64::from(n)),
        })
    });
    let body = serde_json::json!({ "scope": scope, "values": written.collect::<Vec<_>>() });
    let entity = EntityRef { kind: EntityKind::Policy, ..base.entity };
    Commit { entity, snapshot: body.to_string(), ..base }
}

#[tokio::test]
async fn policy_book_has_the_admitted_values() {
    let store = TestStore::new().await;
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let everybody = [
        ("node.offline_after_seconds", json("30"), -2000),
        ("node.offline_after_seconds", json("40"), -1000),
        ("maas.enabled", json("true"), -1000),
        // Out of bounds for this release, or unknown to it.
        ("node.drain_overdue_seconds", json("1"), -1000),
        ("of.another_release", json("7"), -1000),
    ];
    let ann = PolicyScope::UserId("ann".into());
    let unreadable = Commit { snapshot: r#"{"values": 7}"#.into(), ..policies(3, PolicyScope::Global, &[]) };
    for commit in [
        policies(1, PolicyScope::Global, &everybody),
        policies(2, ann.clone(), &[("allocation.max_concurrent_per_user", json("7"), -1000)]),
        unreadable,
    ] {
        store.commit(&commit).await;
    }
    let book = store.reads().policy_book().await.unwrap();
    let scopes = Scopes { user_id: Some("ann".into()), ..Scopes::default() };
    assert_eq!(book.int(PolicyKey::NodeOfflineAfter, &scopes, at(0)), 40);
    assert_eq!(book.resolve(PolicyKey::AllocationMaxConcurrent, &scopes, at(0)), (PolicyValue::Int(7), Some(ann)));
    assert_eq!(book.resolve(PolicyKey::MaasEnabled, &scopes, at(0)).0, PolicyValue::Bool(true));
    assert_eq!(book.resolve(PolicyKey::NodeDrainOverdue, &scopes, at(0)).1, None);
}

#[tokio::test]
async fn altered_policy_value_and_requirement_of_a_sku_hold_nowhere() {
    let seals = SnapshotSealer::new(&SecretSlice::from(vec![7; 32]), None).unwrap();
    let store = TestStore::with(TestDatabase::fresh().await, |config| config.seals = Some(seals.clone())).await;
    let value = ("node.offline_after_seconds", serde_json::json!(30), -1000);
    let sku = Commit { snapshot: r#"{"spec": {"expected_hardware": {"cpu_cores": 8}}}"#.into(), ..create(2) };
    for commit in [&policies(1, PolicyScope::Global, &[value]), &sku] {
        assert_eq!(store.commit(commit).await, CommitOutcome::Applied);
    }
    let reads = store.reads().sealed(seals);
    let in_force = async || {
        let book = reads.policy_book().await.unwrap();
        let seconds = book.int(PolicyKey::NodeOfflineAfter, &Scopes::default(), at(0));
        (seconds, book.expected_hardware(SkuId(sku.entity.id)).is_some())
    };
    assert_eq!(in_force().await, (30, true));
    for altered in [
        "UPDATE entity SET body = jsonb_set(body, '{values,0,value}', '31') WHERE kind = 'policy'",
        "UPDATE entity SET body = jsonb_set(body, '{spec,expected_hardware,cpu_cores}', '9') WHERE kind = 'sku'",
    ] {
        assert_eq!(sqlx::query(altered).execute(store.pool()).await.unwrap().rows_affected(), 1);
    }
    let default = PolicyBook::default().int(PolicyKey::NodeOfflineAfter, &Scopes::default(), at(0));
    assert_eq!(in_force().await, (default, false));
}

#[tokio::test]
async fn policy_values_are_listed_by_key_and_scope_without_superseded_ones() {
    let store = TestStore::new().await;
    let value = |seconds| ("billing.window_seconds", serde_json::json!(seconds), seconds);
    // In seconds from now on: two in the past, of which one is in force, and two in the future.
    let everybody = [value(-20_000), value(-10_000), value(3_600_000), value(7_200_000)];
    let ann = PolicyScope::UserId(">".into());
    let hers = policies(2, ann.clone(), &[value(-5000), ("maas.enabled", serde_json::json!(true), -10)]);
    for commit in [&policies(1, PolicyScope::Global, &everybody), &hers] {
        store.commit(commit).await;
    }
    let list = async |filter: PolicyFilter| {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = store.reads().policy_values(&filter, at(0), after, 2).await.unwrap();
            found.extend(page.items.into_iter().map(|row| (row.scope, row.written.value)));
            after = page.next;
            if after.is_none() {
                return found;
            }
        }
    };
    let of = |scope: &PolicyScope, values: &[i64]| {
        values.iter().map(|value| (scope.clone(), PolicyValue::Int(*value))).collect::<Vec<_>>()
    };
    let global = of(&PolicyScope::Global, &[-10_000, 3_600_000, 7_200_000]);
    let all = [global.clone(), of(&ann, &[-5000]), vec![(ann.clone(), PolicyValue::Bool(true))]].concat();
    assert_eq!(list(PolicyFilter::default()).await, all);
    let of_key = PolicyFilter { key: Some("billing.window_seconds".into()), ..PolicyFilter::default() };
    assert_eq!(list(of_key.clone()).await, all[..4]);
    let of_ann = PolicyFilter { scope: Some(PolicyId(hers.entity.id)), ..of_key };
    assert_eq!(list(of_ann).await, all[3..4]);
    let of_kind = |kind: &str| PolicyFilter { scope_kind: Some(kind.into()), ..PolicyFilter::default() };
    assert_eq!(list(of_kind("global")).await, global);
    assert_eq!(list(of_kind("user_id")).await, all[3..]);
    assert_eq!(list(of_kind("plan")).await, []);
}

#[tokio::test]
async fn bindings_are_listed_one_by_one_filtered_and_the_oldest_first() {
    let store = TestStore::new().await;
    let now = at(0);
    let binding = |n: u128, ms: i64| RoleBinding {
        id: BindingId(Uuid::from_u128(n)),
        bound_by: "user:root".into(),
        bound_at: now + chrono::TimeDelta::milliseconds(ms),
        reason: "r".into(),
    };
    let commit = |n: u32, subject: &str, roles: &[(PlatformRole, RoleBinding)]| {
        let bindings = RoleBindings { subject: subject.into(), roles: roles.iter().cloned().collect() };
        let mut commit = Commit {
            snapshot: serde_json::to_string(&bindings).unwrap(),
            keys: IndexKeys { owner: Some(subject.to_owned()), ..IndexKeys::default() },
            ..bare(create(n))
        };
        commit.entity.kind = EntityKind::Bindings;
        commit
    };
    let (auditor, owner) = (PlatformRole::Auditor, PlatformRole::InventoryOwner);
    store
        .commit_all(&[
            commit(1, "ann", &[(auditor, binding(1, 5)), (owner, binding(2, 0))]),
            commit(2, "bob", &[(auditor, binding(3, 0))]),
            commit(3, "eve", &[]),
        ])
        .await;
    // What a newer release wrote is left out.
    sqlx::query(
        "UPDATE entity SET body = jsonb_set(body, '{roles,king}', body->'roles'->'auditor') WHERE owner = 'bob'",
    )
    .execute(store.pool())
    .await
    .unwrap();
    let listed = async |filter: BindingFilter| {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page = store.reads().bindings(&filter, after, 1).await.unwrap();
            all.extend(page.items.into_iter().map(|row| (row.subject, row.role, row.binding.id.0.as_u128())));
            after = page.next;
            if after.is_none() {
                break all;
            }
        }
    };
    let (ann, bob) = (|| "ann".to_owned(), || "bob".to_owned());
    let everything = [(ann(), owner, 2), (bob(), auditor, 3), (ann(), auditor, 1)];
    assert_eq!(listed(BindingFilter::default()).await, everything);
    let of_ann = BindingFilter { subject: Some(ann()), ..BindingFilter::default() };
    assert_eq!(listed(of_ann).await, [(ann(), owner, 2), (ann(), auditor, 1)]);
    let auditors = BindingFilter { role: Some(auditor), ..BindingFilter::default() };
    assert_eq!(listed(auditors).await, [(bob(), auditor, 3), (ann(), auditor, 1)]);
}

/// The first reader is dropped while its connection opens. It is opened all the same, and the next reader, which waits for a millisecond only, gets it.
#[tokio::test]
async fn connection_of_a_dropped_reader_serves_the_next() {
    let store = TestStore::new().await;
    let options = (*store.pool().connect_options()).clone();
    let hasty =
        PgPoolOptions::new().max_connections(1).acquire_timeout(Duration::from_millis(1)).connect_lazy_with(options);
    let reads = Reads::new(hasty);
    let missing = EntityRef { kind: EntityKind::Node, id: Uuid::nil() };
    let dropped = tokio::time::timeout(Duration::ZERO, reads.entity(missing)).await;
    assert!(!matches!(dropped, Ok(Ok(_))), "no connection opens within one poll");
    let found = async {
        while reads.entity(missing).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(90), found).await.expect("a reader finds a connection");
}
