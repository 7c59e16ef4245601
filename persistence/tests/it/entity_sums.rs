//! Sums of GPUs and money: commits maintain them, whatever becomes of the commits, and what is wrong is named and corrected.

use crate::test_store::{TestStore, at, bare, command, create};
use domain::Machine;
use domain::account_holder::Holder;
use domain::billing_account::{BillingAccount, Depletion, HolderPlan};
use domain::commit::{Commit, CommitOutcome, Epoch};
use domain::id::{BillingAccountId, EntityKind, EntityRef, NodeId, Shard, SkuId, UserId};
use domain::money::{Currency, MicroAmount};
use domain::node::{Node, Phase};
use domain::state_machine::IndexKeys;
use domain::summand::{Amounts, SumGroup, differences};
use futures::future::join_all;
use persistence::entity_sums::{SumDifference, correct};
use persistence::queries::{AccountSum, GpuCount};
use persistence::table_maintenance::{self, CountDifference, compact_sums, correct_counts};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sqlx::Executor as _;
use std::collections::{BTreeMap, BTreeSet};
use test_host::{registered_node, registration, reported_inventory};
use uuid::Uuid;

/// Region, nodes, GPUs, and those that are free.
type GpuRows = Vec<(String, u64, u64, u64)>;
/// Currency, state, accounts, and their balance.
type MoneyRows = Vec<(String, String, u64, i64)>;

const SKU: SkuId = SkuId(Uuid::from_u128(0x5000));

fn all_shards() -> Vec<Shard> {
    Shard::all().collect()
}

/// An active node with so many GPUs, all free.
fn node(n: u32, region: &str, gpus_free: u32) -> Node {
    let id = create(n).entity.id;
    let mut registration = registration(SKU, gpus_free);
    (registration.sku.name, registration.region_code) = ("h100".to_owned(), region.to_owned());
    registration.sku.allowed_regions = vec!["eu".into(), "us".into()];
    let mut node = registered_node(NodeId(id), registration, at(0));
    node.machine.inventory = Some(reported_inventory(id, gpus_free));
    node.lifecycle.phase = Phase::Active;
    assert_eq!(node.gpus_free(), gpus_free, "{:?}", node.not_schedulable());
    node
}

fn account(n: u32, balance: i64) -> BillingAccount {
    BillingAccount {
        id: BillingAccountId(create(n).entity.id),
        holder: Holder::User(UserId(format!("user-{n}"))),
        plan: HolderPlan::default(),
        currency: Currency::parse(if n % 4 == 1 { "EUR" } else { "USD" }).unwrap(),
        balance: MicroAmount::of(balance),
        credit_left: MicroAmount::ZERO,
        credit_spent: MicroAmount::ZERO,
        postings: 0,
        meters: BTreeMap::new(),
        ended: BTreeMap::new(),
        window: None,
        is_low: true,
        depletion: None,
        again: None,
        moved: BTreeMap::new(),
        refunded: BTreeMap::new(),
        opened_at: at(0),
    }
}

/// The commit that leads from `before`, at its version, to `next`, as the shell makes it.
fn transition<M: Machine>(n: u32, before: Option<&M>, version: i64, next: &M) -> Commit {
    let base = create(n);
    let entity = EntityRef { kind: M::KIND, id: base.entity.id };
    Commit {
        entity,
        expected_version: version,
        snapshot: serde_json::to_string(next).unwrap(),
        from_state: before.map(Machine::state),
        to_state: next.state(),
        keys: IndexKeys::default(),
        summands: differences(before.and_then(Machine::summand), next.summand()),
        ..bare(base)
    }
}

fn creation<M: Machine>(n: u32, next: &M) -> Commit {
    transition(n, None, 0, next)
}

/// Entities with the numbers of nodes (even) and accounts.
#[derive(Clone, Debug)]
enum Entity {
    Node(Box<Node>),
    Account(Box<BillingAccount>),
}

impl Entity {
    fn new(n: u32, value: u32) -> Self {
        if n.is_multiple_of(2) {
            let mut node = node(n, if n.is_multiple_of(4) { "eu" } else { "us" }, value % 9);
            node.lifecycle.phase = [Phase::Active, Phase::Active, Phase::Offline, Phase::Retired, Phase::Removed]
                [value as usize / 9 % 5]
                .clone();
            Self::Node(Box::new(node))
        } else {
            let mut account = account(n, i64::from(value) * 1000 - 9000);
            let is_over = value.is_multiple_of(2);
            account.depletion = (value % 5 < 2).then(|| Depletion { at: at(0), release_at: at(9), is_over });
            Self::Account(Box::new(account))
        }
    }

    fn commit(&self, n: u32, before: Option<&Self>, version: i64) -> Commit {
        match (self, before) {
            (Self::Node(next), Some(Self::Node(before))) => transition(n, Some(&**before), version, &**next),
            (Self::Account(next), Some(Self::Account(before))) => transition(n, Some(&**before), version, &**next),
            (Self::Node(next), _) => transition(n, None, version, &**next),
            (Self::Account(next), _) => transition(n, None, version, &**next),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Stale,
    Fenced,
    UsedCommand,
    BadJson,
}

fn rounds() -> impl Strategy<Value = Vec<BTreeMap<u32, (u32, Fault)>>> {
    let fault = prop_oneof![
        6 => Just(Fault::None), 1 => Just(Fault::Stale), 1 => Just(Fault::Fenced), 1 => Just(Fault::UsedCommand),
        1 => Just(Fault::BadJson),
    ];
    prop::collection::vec(prop::collection::btree_map(0..16_u32, (0..45_u32, fault), 1..12), 1..6)
}

/// The sums of the model, as the overview shows them.
fn expected(entities: &BTreeMap<u32, (i64, Entity)>) -> (GpuRows, MoneyRows) {
    let (mut gpus, mut money) = (BTreeMap::<_, (u64, u64, u64)>::new(), BTreeMap::<_, (u64, i64)>::new());
    for (_, entity) in entities.values() {
        match entity {
            Entity::Node(node) if node.lifecycle.phase.is_gone() => {}
            Entity::Node(node) => {
                let sum = gpus.entry(node.machine.registration.region_code.clone()).or_default();
                (sum.0, sum.1, sum.2) = (
                    sum.0 + 1,
                    sum.1 + u64::from(node.machine.registration.gpus_total),
                    sum.2 + u64::from(node.gpus_free()),
                );
            }
            Entity::Account(account) => {
                let sum = money.entry((account.currency.as_str().to_owned(), account.state().to_owned())).or_default();
                (sum.0, sum.1) = (sum.0 + 1, sum.1 + account.balance.get());
            }
        }
    }
    let gpus = gpus.into_iter().map(|(region, (nodes, total, free))| (region, nodes, total, free)).collect();
    (gpus, money.into_iter().map(|((currency, state), (n, balance))| (currency, state, n, balance)).collect())
}

async fn read(store: &TestStore) -> (GpuRows, MoneyRows) {
    let reads = store.reads();
    let gpus = reads.gpus().await.unwrap().into_iter();
    let money = reads.account_sums(&all_shards()).await.unwrap().into_iter();
    (
        gpus.map(|it| (it.region_code, it.nodes, it.total, it.free)).collect(),
        money.map(|it| (it.currency, it.state, it.accounts, it.balance.get())).collect(),
    )
}

async fn play(rounds: Vec<BTreeMap<u32, (u32, Fault)>>) {
    let store = TestStore::new().await;
    let used = Commit { command: Some(command(None)), ..bare(create(9999)) };
    assert_eq!(store.commit(&used).await, CommitOutcome::Applied);
    let mut committed: BTreeMap<u32, (i64, Entity)> = BTreeMap::new();
    let shards = all_shards();
    for round in rounds {
        let attempt = |(n, (value, fault)): (&u32, &(u32, Fault))| {
            let (before, next) = (committed.get(n), Entity::new(*n, *value));
            let version = before.map_or(0, |(version, _)| *version);
            let mut commit = next.commit(*n, before.map(|(_, entity)| entity), version);
            match fault {
                Fault::None => {}
                Fault::Stale => commit.expected_version += 1,
                Fault::Fenced => commit.epoch = Epoch(0),
                Fault::UsedCommand => commit.command.clone_from(&used.command),
                Fault::BadJson => commit.snapshot = "{".to_owned(),
            }
            (*n, version, next, commit)
        };
        let attempts: Vec<_> = round.iter().map(attempt).collect();
        let commits: Vec<_> = attempts.iter().map(|(.., commit)| commit.clone()).collect();
        let (outcomes, compacted, found) =
            tokio::join!(store.commit_all(&commits), compact_sums(store.pool()), correct(store.pool(), &shards));
        compacted.unwrap();
        assert_eq!(found.unwrap().differences, [], "beside the commits");
        for ((n, version, next, _), outcome) in attempts.into_iter().zip(outcomes) {
            if outcome == CommitOutcome::Applied {
                committed.insert(n, (version + 1, next));
            }
        }
        assert_eq!(read(&store).await, expected(&committed));
        assert_eq!(correct(store.pool(), &shards).await.unwrap().differences, []);
        assert_eq!(correct_counts(store.pool()).await.unwrap(), []);
    }
    compact_sums(store.pool()).await.unwrap();
    assert_eq!(read(&store).await, expected(&committed));
    let zero =
        "SELECT count(*) FROM entity_sum WHERE (entities, gpus_total, gpus_sold, gpus_held, balance) = (0, 0, 0, 0, 0)";
    let zeros: i64 = sqlx::query_scalar(zero).fetch_one(store.pool()).await.unwrap();
    assert_eq!(zeros, 0);
}

#[test]
fn sums_equal_a_full_scan_after_any_commits() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // The server runs as long as this database is held.
    let keep = runtime.block_on(local_servers::test_database::TestDatabase::fresh());
    let mut runner = TestRunner::new(Config { cases: 12, failure_persistence: None, ..Config::default() });
    runner
        .run(&rounds(), |rounds| {
            runtime.block_on(play(rounds));
            Ok(())
        })
        .unwrap();
    drop(keep);
}

#[tokio::test]
async fn manipulated_sum_is_named_and_corrected_once() {
    let store = TestStore::new().await;
    let commits = [creation(2, &node(2, "eu", 5)), creation(5, &account(5, 7_000)), creation(9, &account(9, 1_000))];
    store.commit_all(&commits).await;
    compact_sums(store.pool()).await.unwrap();
    let before = read(&store).await;
    store.pool().execute("UPDATE entity_sum SET balance = balance + 5 WHERE shard = 5").await.unwrap();
    store.pool().execute("DELETE FROM entity_sum WHERE kind = 'node'").await.unwrap();
    // Several members at once, one of which may wait in vain.
    let found = join_all((0..4).map(|_| correct(store.pool(), &[Shard(2), Shard(5)]))).await;
    let found: Vec<_> = found.into_iter().filter_map(Result::ok).flat_map(|report| report.differences).collect();
    let nothing = Amounts::default();
    let group = SumGroup::Gpus { sku_id: SKU, sku: "h100".into(), region_code: "eu".into(), gpus_free: 5 };
    let gpus = SumDifference {
        shard: Shard(2),
        group,
        stored: nothing,
        actual: Amounts { entities: 1, gpus_total: 5, ..nothing },
    };
    let group = SumGroup::Money { currency: "EUR".into(), state: "open".into() };
    let money = |balance| Amounts { entities: 1, balance, ..nothing };
    let balance = SumDifference { shard: Shard(5), group, stored: money(7_005), actual: money(7_000) };
    assert_eq!(found, [gpus, balance.clone()]);
    assert_eq!(balance.group.to_string(), "balances in EUR, accounts in state open");
    assert_eq!(read(&store).await, before);
    // Even one that no number can have fails no reader.
    let insert = format!(
        "INSERT INTO entity_sum SELECT shard, kind, sku, sku_name, region, gpus_free, currency, state, 0, 0, 0, 0, {} FROM entity_sum",
        i64::MAX
    );
    sqlx::query(sqlx::AssertSqlSafe(insert)).execute(store.pool()).await.unwrap();
    read(&store).await;
    while !correct(store.pool(), &all_shards()).await.unwrap().differences.is_empty() {}
    compact_sums(store.pool()).await.unwrap();
    assert_eq!(read(&store).await, before);
}

#[tokio::test]
async fn commits_of_the_release_before_are_counted_when_their_shard_is_compared() {
    let store = TestStore::new().await;
    store.pool().execute("DELETE FROM counted_shard").await.unwrap();
    let silent = |commit: Commit| Commit { summands: Vec::new(), ..commit };
    store.commit(&silent(creation(4, &node(4, "eu", 8)))).await;
    store.commit(&silent(creation(7, &account(7, 3_000)))).await;
    // Until each shard was compared, the entities themselves are read.
    let right = read(&store).await;
    assert_eq!(right.0, [("eu".to_owned(), 1, 8, 8)]);
    assert_eq!(right.1, [("USD".to_owned(), "open".to_owned(), 1, 3_000)]);
    assert_eq!(store.reads().account_sums(&[Shard(8)]).await.unwrap(), []);
    let report = correct(store.pool(), &all_shards()).await.unwrap();
    assert_eq!((report.differences.len(), report.entities, report.unreadable), (2, 2, Vec::new()));
    assert_eq!((read(&store).await, store.count("counted_shard").await), (right, 256));
    assert_eq!(store.count("entity_sum").await, 2);
}

#[tokio::test]
async fn commit_whose_worker_died_is_in_the_sums_exactly_if_it_is_in_the_table() {
    let store = TestStore::new().await;
    for killed_after in 0..6_u64 {
        let commits: Vec<_> = (0..40)
            .map(|n| creation(u32::try_from(killed_after).unwrap() * 512 + 2 * n + 1, &account(1, 100)))
            .collect();
        let kill = async {
            tokio::time::sleep(std::time::Duration::from_millis(killed_after)).await;
            let committers = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                              WHERE application_name LIKE '%committer%' AND datname = current_database()";
            store.pool().execute(committers).await.unwrap();
        };
        let (outcomes, ()) = tokio::join!(store.commit_all(&commits), kill);
        // Sent again, as a client does that does not know.
        let again = store.commit_all(&commits).await;
        assert_eq!(outcomes.len(), again.len());
    }
    assert_eq!(correct(store.pool(), &all_shards()).await.unwrap().differences, []);
    let accounts: i64 = store.count("entity").await;
    let sums = store.reads().account_sums(&all_shards()).await.unwrap();
    assert_eq!(sums.iter().map(|it| it.accounts).sum::<u64>(), accounts.unsigned_abs());
    assert_eq!(sums.iter().map(|it| it.balance.get()).sum::<i64>(), 100 * accounts);
}

#[tokio::test]
async fn entity_that_cannot_be_read_is_named_and_in_no_sum() {
    let store = TestStore::new().await;
    store.commit_all(&[creation(2, &node(2, "eu", 8)), creation(6, &node(6, "eu", 3))]).await;
    store.pool().execute("UPDATE entity SET body = body - 'registration' WHERE shard = 6").await.unwrap();
    let report = correct(store.pool(), &all_shards()).await.unwrap();
    assert_eq!(report.unreadable, [EntityRef { kind: EntityKind::Node, id: create(6).entity.id }]);
    assert_eq!(report.differences.len(), 1);
    let [GpuCount { nodes: 1, free: 8, largest_free: 8, is_rentable: false, .. }] =
        &store.reads().gpus().await.unwrap()[..]
    else {
        panic!("the other node alone")
    };
}

#[tokio::test]
async fn gpus_are_rentable_by_the_state_of_their_sku_and_the_largest_part_is_of_one_node() {
    let store = TestStore::new().await;
    let sku = bare(create(1));
    let sku = Commit { entity: EntityRef { id: SKU.0, ..sku.entity }, to_state: "active", ..sku };
    store.commit_all(&[sku, creation(2, &node(2, "eu", 3)), creation(4, &node(4, "eu", 2))]).await;
    let gpus = store.reads().gpus().await.unwrap();
    let [GpuCount { nodes: 2, total: 5, held: 0, free: 5, largest_free: 3, is_rentable: true, .. }] = &gpus[..] else {
        panic!("{gpus:?}")
    };
    // By shard, as a process exports them.
    let used = store.reads().gpu_use(&[Shard(4)]).await.unwrap();
    assert_eq!(used.iter().map(|it| (it.total, it.sold, it.held, it.free)).collect::<Vec<_>>(), [(2, 0, 0, 2)]);
    assert_eq!(store.reads().gpu_use(&[Shard(5)]).await.unwrap(), []);
}

#[tokio::test]
async fn manipulated_count_of_entities_is_named_and_corrected() {
    let store = TestStore::new().await;
    store.commit_all(&[create(1), create(2), creation(5, &account(5, 1))]).await;
    assert_eq!(correct_counts(store.pool()).await.unwrap(), []);
    store.pool().execute("INSERT INTO entity_count VALUES ('sku', 'draft', 3), ('node', 'active', 1)").await.unwrap();
    let more = [create(3), create(4)];
    let (found, ..) = tokio::join!(
        correct_counts(store.pool()),
        async { table_maintenance::compact_counts(store.pool()).await.unwrap() },
        store.commit_all(&more)
    );
    let found: BTreeSet<_> = found.unwrap().into_iter().map(|it| (it.kind, it.state, it.missing)).collect();
    let wrong = |kind: &str, state: &str, missing| (kind.to_owned(), state.to_owned(), missing);
    assert_eq!(found, BTreeSet::from([wrong("sku", "draft", -3), wrong("node", "active", -1)]));
    let none: [CountDifference; 0] = [];
    assert_eq!(correct_counts(store.pool()).await.unwrap(), none);
    let states: Vec<_> = store.reads().counts().await.unwrap().into_iter().map(|it| (it.state, it.count)).collect();
    assert_eq!(states, [("open".to_owned(), 1), ("draft".to_owned(), 4)]);
}

#[tokio::test]
async fn sums_of_many_entities_are_as_few_rows_as_those_of_a_few() {
    let store = TestStore::new().await;
    for first in [0, 2_000] {
        let commits: Vec<_> = (first..first + 2_000).map(|n| creation(2 * n + 1, &account(1, 10))).collect();
        store.commit_all(&commits).await;
        compact_sums(store.pool()).await.unwrap();
        assert_eq!(store.count("entity_sum").await, 128, "one for each shard that has accounts");
    }
    let sums = store.reads().account_sums(&all_shards()).await.unwrap();
    let [AccountSum { accounts: 4_000, .. }] = &sums[..] else { panic!("{sums:?}") };
}
