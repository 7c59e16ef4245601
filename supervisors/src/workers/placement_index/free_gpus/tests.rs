//! Searches over a real database. The nodes decide as their actors do; their messages arrive, or are lost, late and repeated.

use super::super::{CHECK_INTERVAL, check_periodically};
use super::*;
use chrono::Utc;
use domain::node::{Command, HoldPhase, Instruction, Phase};
use domain::policy::PolicyBook;
use domain::state_machine::TransitionContext;
use domain::{AllocationId, Machine as _, Principal};
use futures::StreamExt as _;
use futures::stream;
use local_servers::test_database::TestDatabase;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::PgPool;
use std::collections::VecDeque;
use test_host::{registered_node, registration, reported_inventory};
use uuid::Uuid;

const SKU: SkuId = SkuId(Uuid::from_u128(0x5000));

/// Requests that a consumer of events processes at once.
const AT_ONCE: usize = 256;

/// Nodes with the actors that decide for them, and their rows.
struct Nodes {
    db: TestDatabase,
    committed: tokio::sync::Mutex<BTreeMap<NodeId, (i64, Node)>>,
    /// What the commits have published, oldest first.
    published: Mutex<VecDeque<(i64, NodeCapacity)>>,
}

impl Nodes {
    /// Active nodes with so many GPUs each, all free.
    async fn with_gpus(gpus: &[u32]) -> Self {
        let db = TestDatabase::fresh().await;
        insert(&db.pool, SKU.0, "sku", "active", "{}", 1).await;
        let mut committed = BTreeMap::new();
        for (n, gpus) in (1..).zip(gpus) {
            let node = active_node(NodeId(Uuid::from_u128(n)), *gpus);
            assert_eq!(node.gpus_free(), *gpus, "{:?}", node.not_schedulable());
            insert(&db.pool, node.id.0, "node", node.state(), &serde_json::to_string(&node).unwrap(), 1).await;
            committed.insert(node.id, (1, node));
        }
        Self { db, committed: tokio::sync::Mutex::new(committed), published: Mutex::default() }
    }

    fn index(&self) -> FreeGpuIndex {
        FreeGpuIndex::new(&Registry::new(), Reads::new(self.db.pool.clone())).unwrap()
    }

    /// As the node's actor: it reserves, or refuses.
    async fn reserve(
        &self,
        node_id: NodeId,
        allocation_id: AllocationId,
        gpu_count: u32,
    ) -> Result<Option<NodeId>, StoreError> {
        let mut committed = self.committed.lock().await;
        let (version, node) = &committed[&node_id];
        let reserve = Instruction::Reserve { allocation_id, gpu_count, keys: Vec::new(), revision: 0, reimages: false };
        let (policy, by) = (PolicyBook::default(), Principal::system("test"));
        let Ok(step) = Node::decide(Some(node), Command::from(reserve), &context(&policy, &by, node_id, *version))
        else {
            return Ok(None);
        };
        let next = (version + 1, step.next.unwrap());
        self.commit(&mut committed, next).await;
        Ok(Some(node_id))
    }

    async fn commit(&self, committed: &mut BTreeMap<NodeId, (i64, Node)>, (version, node): (i64, Node)) {
        let statement =
            "UPDATE entity SET version = $2, state = $3, body = $4::jsonb, updated_at = now() WHERE id = $1";
        sqlx::query(statement)
            .bind(node.id.0)
            .bind(version)
            .bind(node.state())
            .bind(serde_json::to_string(&node).unwrap())
            .execute(&self.db.pool)
            .await
            .unwrap();
        self.published.lock().unwrap().push_back((version, NodeCapacity::of(&node)));
        committed.insert(node.id, (version, node));
    }

    async fn change(&self, node_id: NodeId, change: impl FnOnce(&mut Node)) {
        let mut committed = self.committed.lock().await;
        let (version, mut node) = committed[&node_id].clone();
        change(&mut node);
        self.commit(&mut committed, (version + 1, node)).await;
    }

    /// The commits lie so far back that their messages cannot be on their way.
    async fn age(&self) {
        let statement = "UPDATE entity SET updated_at = now() - interval '1 minute'";
        sqlx::query(statement).execute(&self.db.pool).await.unwrap();
    }

    async fn place(&self, index: &FreeGpuIndex, allocation: u128, gpu_count: u32) -> SearchOutcome<NodeId> {
        let allocation_id = AllocationId(Uuid::from_u128(allocation));
        let reserve = |node_id| self.reserve(node_id, allocation_id, gpu_count);
        index.place(&wanted(allocation_id, gpu_count), reserve).await.unwrap()
    }
}

fn wanted(allocation_id: AllocationId, gpu_count: u32) -> PlacementRequest<'static> {
    PlacementRequest { allocation_id, sku_id: SKU, node_id: None, region_code: None, gpu_count, reimages: false }
}

fn context<'a>(policy: &'a PolicyBook, by: &'a Principal, id: NodeId, version: i64) -> TransitionContext<'a> {
    let trace = domain::state_machine::TraceContext::default();
    TransitionContext { now: Utc::now(), policy, by, correlation_id: "test", trace, seed: 7, id: id.0, version }
}

fn active_node(id: NodeId, gpus: u32) -> Node {
    let mut node = registered_node(id, registration(SKU, gpus), Utc::now());
    (node.lifecycle.phase, node.machine.inventory) = (Phase::Active, Some(reported_inventory(id, gpus)));
    node
}

async fn insert(pool: &PgPool, id: Uuid, kind: &str, state: &str, body: &str, version: i64) {
    sqlx::query(
        "INSERT INTO entity (id, kind, shard, version, state, body, sku, created_at, updated_at)
         VALUES ($1, $2, 1, $3, $4, $5::jsonb, $6, now(), now())",
    )
    .bind(id)
    .bind(kind)
    .bind(version)
    .bind(state)
    .bind(body)
    .bind(SKU.0)
    .execute(pool)
    .await
    .unwrap();
}

const fn node_id(n: u128) -> NodeId {
    NodeId(Uuid::from_u128(n))
}

fn is_refused(outcome: &SearchOutcome<NodeId>) -> bool {
    matches!(outcome, SearchOutcome::NoRoom { .. })
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_requests_for_the_last_gpu_reserve_it_once_and_are_each_answered_within_a_second() {
    let nodes = Nodes::with_gpus(&[1]).await;
    let index = nodes.index();
    index.check_all().await.unwrap();
    let (nodes, index) = (&nodes, &index);
    let search = |n| async move {
        let began = Instant::now();
        (nodes.place(index, n, 1).await, began.elapsed())
    };
    let answers: Vec<_> = stream::iter(0..10_000).map(search).buffer_unordered(AT_ONCE).collect().await;
    let reserved = answers.iter().filter(|(outcome, _)| !is_refused(outcome)).count();
    let slowest = answers.iter().map(|(_, took)| *took).max().unwrap();
    assert_eq!((answers.len(), reserved), (10_000, 1));
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_arrive_together_fill_every_node_without_a_refusal() {
    let nodes = Nodes::with_gpus(&[4; 32]).await;
    let index = nodes.index();
    index.check_all().await.unwrap();
    let (nodes, index) = (&nodes, &index);
    let search = |n| async move { nodes.place(index, n, 2).await };
    let answers: Vec<_> = stream::iter(0..64).map(search).buffer_unordered(AT_ONCE).collect().await;
    assert_eq!(answers.iter().filter(|outcome| is_refused(outcome)).count(), 0);
    assert!(is_refused(&nodes.place(index, 1000, 1).await), "every GPU is held");
}

#[tokio::test(flavor = "multi_thread")]
async fn capacity_whose_message_was_lost_is_found_before_a_request_is_refused() {
    let nodes = Nodes::with_gpus(&[8]).await;
    let index = nodes.index();
    assert!(!is_refused(&nodes.place(&index, 1, 8).await), "an empty index is filled by its first request");
    assert!(is_refused(&nodes.place(&index, 2, 1).await));
    nodes.change(node_id(1), |node| node.tenancy.holds.clear()).await;
    assert!(!is_refused(&nodes.place(&index, 3, 8).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn request_with_an_outdated_index_is_placed_after_a_bounded_number_of_refusals() {
    let nodes = Nodes::with_gpus(&[8; 20]).await;
    let (index, paused) = (nodes.index(), nodes.index());
    paused.check_all().await.unwrap();
    for n in 0..19 {
        assert!(!is_refused(&nodes.place(&index, n, 8).await));
    }
    // Its index has all of them as free.
    let outcome = nodes.place(&paused, 100, 8).await;
    let SearchOutcome::Reserved { asked, .. } = outcome else { panic!("{outcome:?}") };
    assert!(asked <= MAX_ASKED_FROM_MEMORY + 1, "{asked} nodes were asked");
    assert!(is_refused(&nodes.place(&paused, 101, 8).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn check_corrects_the_index_and_counts_what_it_lacked_for_more_than_a_second() {
    let nodes = Nodes::with_gpus(&[8, 8, 8]).await;
    let index = nodes.index();
    index.check_all().await.unwrap();
    assert_eq!(index.metrics.differences.get(), 0, "the first read compares with nothing");
    nodes.change(node_id(1), |node| node.lifecycle.phase = Phase::Offline).await;
    index.check_all().await.unwrap();
    assert_eq!(index.metrics.differences.get(), 0, "its message may be on its way");
    nodes.change(node_id(2), |node| node.lifecycle.phase = Phase::Offline).await;
    sqlx::query("DELETE FROM entity WHERE id = $1").bind(node_id(3).0).execute(&nodes.db.pool).await.unwrap();
    nodes.age().await;
    index.check_all().await.unwrap();
    assert_eq!(index.metrics.differences.get(), 1);
    assert_eq!(index.metrics.nodes.get(), 1, "one does not exist any more, and one was known to be out of service");
    index.check_all().await.unwrap();
    assert_eq!(index.metrics.nodes.get(), 0, "what is out of service, and holds nothing, is forgotten");
    assert_eq!(index.next(&wanted(AllocationId(Uuid::nil()), 1), &BTreeSet::new()), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn index_that_lacks_a_message_is_corrected_before_the_next_periodic_check() {
    let nodes = Nodes::with_gpus(&[8, 8]).await;
    let index = nodes.index();
    let corrected = async {
        while index.metrics.nodes.get() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Its message is lost. The next one of its member arrives, and says by its number that one is missing.
        nodes.change(node_id(1), |node| node.lifecycle.phase = Phase::Offline).await;
        index.note_gap();
        while index.lock().version(node_id(1)).is_none_or(|known| known.version < 2) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        () = check_periodically(&index, || true) => unreachable!("it runs until it is dropped"),
        corrected = tokio::time::timeout(CHECK_INTERVAL, corrected) => corrected.unwrap(),
    }
    assert_eq!(index.metrics.gaps.get(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_refused_is_read_again_at_once() {
    let nodes = Nodes::with_gpus(&[8, 4]).await;
    let index = nodes.index();
    index.check_all().await.unwrap();
    nodes.change(node_id(2), |node| node.lifecycle.phase = Phase::Offline).await;
    let outcome = nodes.place(&index, 1, 4).await;
    assert_eq!(outcome, SearchOutcome::Reserved { reservation: node_id(1), asked: 2 });
    let is_known = async {
        while !index.lock().version(node_id(2)).is_some_and(|known| known.is_certain && known.version == 2) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        () = index.reread_doubted() => unreachable!("it runs until it is dropped"),
        known = tokio::time::timeout(Duration::from_secs(1), is_known) => known.unwrap(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn database_that_has_gone_back_is_followed() {
    let nodes = Nodes::with_gpus(&[8]).await;
    let index = nodes.index();
    index.check_all().await.unwrap();
    // A commit that was published, and that the database lost in a failover.
    let full = NodeCapacity { gpus_free: 0, ..NodeCapacity::of(&active_node(node_id(1), 8)) };
    index.apply([(7, full)]);
    assert!(!is_refused(&nodes.place(&index, 1, 8).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_cannot_be_parsed_is_passed_over_and_the_others_are_rented() {
    let nodes = Nodes::with_gpus(&[8, 8]).await;
    let index = nodes.index();
    let alter = "UPDATE entity SET body = '{\"id\": 7}' WHERE id = $1";
    sqlx::query(alter).bind(node_id(1).0).execute(&nodes.db.pool).await.unwrap();
    let outcome = nodes.place(&index, 1, 8).await;
    assert_eq!(outcome, SearchOutcome::Reserved { reservation: node_id(2), asked: 1 });
    assert!(is_refused(&nodes.place(&index, 2, 8).await));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_refused_only_without_room_whatever_becomes_of_the_messages() {
    let nodes = Nodes::with_gpus(&[8, 4, 4, 2, 1]).await;
    let indexes = [nodes.index(), nodes.index()];
    let mut chance = StdRng::seed_from_u64(36);
    let (mut held, mut published) = (Vec::new(), Vec::new());
    let (mut reserved, mut refused) = (0, 0);
    for n in 0..400_u128 {
        published.extend(nodes.published.lock().unwrap().drain(..));
        // Some messages arrive, some late, some twice, and some never.
        for index in &indexes {
            for _ in 0..chance.random_range(0..3) {
                if !published.is_empty() {
                    let late = chance.random_range(0..published.len());
                    index.apply([published[late].clone()]);
                }
            }
        }
        if chance.random_bool(0.45) && !held.is_empty() {
            let (node, allocation) = held.swap_remove(chance.random_range(0..held.len()));
            nodes.change(node, |node| drop(node.tenancy.holds.remove(&allocation))).await;
            continue;
        }
        let gpu_count = chance.random_range(1..=8);
        let most = nodes.committed.lock().await.values().map(|(_, node)| node.gpus_free()).max().unwrap();
        match nodes.place(&indexes[chance.random_range(0..2)], n, gpu_count).await {
            SearchOutcome::Reserved { reservation, .. } => {
                held.push((reservation, AllocationId(Uuid::from_u128(n))));
                reserved += 1;
            }
            SearchOutcome::NoRoom { .. } => {
                assert!(most < gpu_count, "{gpu_count} GPUs were refused, and {most} of one node are free");
                refused += 1;
            }
        }
        for (_, node) in nodes.committed.lock().await.values() {
            let gpus: Vec<_> =
                node.tenancy.holds.values().flat_map(|hold| &hold.placed.devices).map(|it| &it.uuid).collect();
            assert_eq!(gpus.iter().collect::<BTreeSet<_>>().len(), gpus.len(), "a GPU is held twice");
        }
    }
    assert!(reserved > 50 && refused > 20, "{reserved} were reserved, {refused} refused");
    let is_reserved = |node: &Node| node.tenancy.holds.values().all(|hold| hold.phase == HoldPhase::Reserved);
    assert!(nodes.committed.lock().await.values().all(|(_, node)| is_reserved(node)));
}
