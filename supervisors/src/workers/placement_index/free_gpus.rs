//! The index of free GPUs, the search for a node in it, and its comparison with Postgres.

use crate::mutex::lock;
use dashmap::DashMap;
use domain::node::Node;
use domain::placement::{IndexUpdate, IndexedVersion, NodeCapacity, PlacementIndex, PlacementRequest};
use domain::{NodeId, SkuId};
use persistence::queries::NodeRow;
use persistence::{Reads, StoreError};
use prometheus::{IntCounter, IntGauge, Registry};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The state of nodes that may take a tenant.
const SCHEDULABLE: &str = "active";

/// Nodes that a search asks from memory alone. Where so many refuse, the index is compared with Postgres first.
const MAX_ASKED_FROM_MEMORY: usize = 8;
/// Comparisons with the database before a request is refused: more than one where other searches put nodes in doubt meanwhile.
const MAX_CHECKS: usize = 4;

/// Nodes that are read and parsed at once.
const PAGE: usize = 256;

/// Nodes whose versions are copied at once: searches wait meanwhile.
const VERSIONS_PAGE: usize = 4096;

/// The pause between two comparisons of a SKU is as long as the last one took, and no longer than this: refusals of a large SKU do not keep
/// Postgres busy alone.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Refusals within this time are read together.
const COALESCE_FOR: Duration = Duration::from_millis(5);

/// The index of this process. All that it says is a proposal: the node's actor alone reserves.
pub struct FreeGpuIndex {
    index: Mutex<PlacementIndex>,
    reads: Reads,
    comparisons: DashMap<SkuId, Arc<tokio::sync::Mutex<LastComparison>>>,
    doubted: Mutex<BTreeSet<NodeId>>,
    doubt_noted: Notify,
    check_wanted: Notify,
    metrics: IndexMetrics,
}

#[derive(Default)]
struct LastComparison {
    began: Option<Instant>,
    /// Before this time no other one begins.
    pause_until: Option<Instant>,
}

struct IndexMetrics {
    differences: IntCounter,
    gaps: IntCounter,
    nodes: IntGauge,
}

/// What became of a search.
#[derive(Debug, PartialEq, Eq)]
pub enum SearchOutcome<T> {
    Reserved {
        reservation: T,
        /// How many nodes were asked.
        asked: usize,
    },
    /// By a read of Postgres that began after the search, no node has room.
    NoRoom { suggestion: String, asked: usize },
}

impl FreeGpuIndex {
    /// An empty index.
    ///
    /// # Errors
    /// Where the metrics are registered already.
    pub fn new(registry: &Registry, reads: Reads) -> Result<Self, prometheus::Error> {
        let metrics = IndexMetrics {
            differences: IntCounter::new(
                "provisioning_index_differences_total",
                "Nodes of which the index of free GPUs lacked a commit for more than a second, found by a comparison with the database.",
            )?,
            gaps: IntCounter::new(
                "provisioning_index_gaps_total",
                "Times that messages to the index of free GPUs were missing; it was compared with the database at once.",
            )?,
            nodes: IntGauge::new("provisioning_index_nodes", "Nodes in this process's index of free GPUs.")?,
        };
        registry.register(Box::new(metrics.differences.clone()))?;
        registry.register(Box::new(metrics.gaps.clone()))?;
        registry.register(Box::new(metrics.nodes.clone()))?;
        Ok(Self {
            index: Mutex::default(),
            reads,
            comparisons: DashMap::new(),
            doubted: Mutex::default(),
            doubt_noted: Notify::new(),
            check_wanted: Notify::new(),
            metrics,
        })
    }

    /// Asks nodes with `reserve` until one reserves. No request is refused by memory alone: before that the SKU's nodes are compared with
    /// Postgres, in a read that began after this search, and that simultaneous searches share.
    ///
    /// # Errors
    /// Those of `reserve`, and where Postgres cannot be read.
    pub async fn place<T, E: From<StoreError>, R: Future<Output = Result<Option<T>, E>>>(
        &self,
        wanted: &PlacementRequest<'_>,
        reserve: impl Fn(NodeId) -> R,
    ) -> Result<SearchOutcome<T>, E> {
        let mut began = Instant::now();
        let mut asked = BTreeSet::new();
        while asked.len() < MAX_ASKED_FROM_MEMORY
            && let Some(node_id) = self.next(wanted, &asked)
        {
            asked.insert(node_id);
            match self.ask(wanted, node_id, &reserve).await? {
                Some(reservation) => return Ok(SearchOutcome::Reserved { reservation, asked: asked.len() }),
                None => self.doubt(node_id),
            }
        }
        let mut before = 0;
        for _ in 0..MAX_CHECKS {
            self.check(wanted.sku_id, began).await?;
            before += asked.len();
            asked.clear();
            while let Some(node_id) = self.next(wanted, &asked) {
                asked.insert(node_id);
                if let Some(reservation) = self.ask(wanted, node_id, &reserve).await? {
                    return Ok(SearchOutcome::Reserved { reservation, asked: before + asked.len() });
                }
            }
            // Another request's search may have put a node in doubt that has room for this one.
            if !self.lock().is_room_doubted(wanted, &asked) {
                break;
            }
            began = Instant::now();
        }
        let suggestion = self.lock().suggestion(wanted);
        Ok(SearchOutcome::NoRoom { suggestion, asked: before + asked.len() })
    }

    fn next(&self, wanted: &PlacementRequest<'_>, asked: &BTreeSet<NodeId>) -> Option<NodeId> {
        self.lock().next(wanted, asked)
    }

    async fn ask<T, E, R: Future<Output = Result<Option<T>, E>>>(
        &self,
        wanted: &PlacementRequest<'_>,
        node_id: NodeId,
        reserve: &impl Fn(NodeId) -> R,
    ) -> Result<Option<T>, E> {
        let reservation = reserve(node_id).await;
        match &reservation {
            Ok(Some(_)) => self.lock().record_reservation(node_id, wanted.allocation_id, wanted.gpu_count),
            Ok(None) => {}
            // It may have reserved: the next attempt has to find it as the holder.
            Err(_) => self.doubt(node_id),
        }
        reservation
    }

    /// Notes what commits have made of nodes: their versions and capacities.
    pub fn apply(&self, committed: impl IntoIterator<Item = (i64, NodeCapacity)>) {
        let mut index = self.lock();
        for (version, capacity) in committed {
            index.apply(version, capacity);
        }
    }

    fn doubt(&self, node_id: NodeId) {
        self.lock().doubt(node_id);
        lock(&self.doubted).insert(node_id);
        self.doubt_noted.notify_one();
    }

    /// Reads nodes that have refused unexpectedly, until it is dropped.
    pub async fn reread_doubted(&self) {
        loop {
            self.doubt_noted.notified().await;
            let doubted: Vec<NodeId> = std::mem::take(&mut *lock(&self.doubted)).into_iter().collect();
            let known = self.versions_of(&doubted);
            if let Err(error) = self.read(&doubted, &known, true).await {
                // The next comparison of their SKU reads them.
                tracing::debug!(%error, "could not read nodes that have refused");
            }
            tokio::time::sleep(COALESCE_FOR).await;
        }
    }

    fn versions_of(&self, nodes: &[NodeId]) -> BTreeMap<NodeId, IndexedVersion> {
        let index = self.lock();
        nodes.iter().filter_map(|node_id| index.version(*node_id)).map(|known| (known.node_id, known)).collect()
    }

    /// Messages are missing: all SKUs are compared soon.
    pub fn note_gap(&self) {
        self.metrics.gaps.inc();
        self.request_check();
    }

    /// All SKUs are compared soon.
    pub fn request_check(&self) {
        self.check_wanted.notify_one();
    }

    /// Waits for [`Self::request_check`].
    pub async fn check_requested(&self) {
        self.check_wanted.notified().await;
    }

    /// Compares the nodes of all SKUs with Postgres.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn check_all(&self) -> Result<(), StoreError> {
        let since = Instant::now();
        for sku in self.reads.sku_ids().await? {
            self.check(sku, since).await?;
        }
        Ok(())
    }

    /// Compares the nodes of a SKU with Postgres, in a read that began after `since`. Simultaneous callers share one.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn check(&self, sku: SkuId, since: Instant) -> Result<(), StoreError> {
        let last = Arc::clone(&self.comparisons.entry(sku).or_default());
        let mut last = last.lock().await;
        if last.began.is_some_and(|began| began >= since) {
            return Ok(());
        }
        if let Some(pause_until) = last.pause_until {
            tokio::time::sleep_until(pause_until).await;
        }
        let began = Instant::now();
        self.compare(sku, last.began.is_some()).await?;
        self.metrics.nodes.set(i64::try_from(self.lock().len()).unwrap_or(i64::MAX));
        last.began = Some(began);
        last.pause_until = Some(Instant::now() + began.elapsed().min(LONGEST_PAUSE));
        Ok(())
    }

    /// `is_loaded`: the SKU was read before, and what it lacks is a difference.
    async fn compare(&self, sku: SkuId, is_loaded: bool) -> Result<(), StoreError> {
        // Before the read: a database that has an earlier version has gone back.
        let known = self.versions_of_sku(sku);
        let rows = self.reads.node_versions(sku, SCHEDULABLE).await?;
        let is_same = |node: &NodeId, version: i64| {
            known.get(node).is_some_and(|known| known.is_certain && known.version == version)
        };
        let mut to_read: Vec<_> =
            rows.iter().filter(|row| !is_same(&row.node, row.version)).map(|row| row.node).collect();
        // Those that have left service, or are removed. Where nothing is left to show of one, it is forgotten until it is active again.
        let active: BTreeSet<_> = rows.iter().map(|row| row.node).collect();
        let is_empty = |known: &&IndexedVersion| known.is_certain && !known.has_gpus && !known.is_held;
        let gone = known.values().filter(|known| !active.contains(&known.node_id));
        let (forgotten, left): (Vec<&IndexedVersion>, Vec<_>) = gone.partition(is_empty);
        forgotten.iter().for_each(|known| self.lock().remove(known.node_id, known.version));
        to_read.extend(left.iter().map(|known| known.node_id));
        self.read(&to_read, &known, is_loaded).await
    }

    fn versions_of_sku(&self, sku: SkuId) -> BTreeMap<NodeId, IndexedVersion> {
        let mut versions = BTreeMap::new();
        loop {
            let last = versions.last_key_value().map(|(node_id, _)| *node_id);
            let page: Vec<_> = self.lock().versions(sku, last).take(VERSIONS_PAGE).collect();
            let is_last = page.len() < VERSIONS_PAGE;
            versions.extend(page.into_iter().map(|known| (known.node_id, known)));
            if is_last {
                return versions;
            }
        }
    }

    /// Reads these nodes into the index.
    async fn read(
        &self,
        nodes: &[NodeId],
        known: &BTreeMap<NodeId, IndexedVersion>,
        is_loaded: bool,
    ) -> Result<(), StoreError> {
        for page in nodes.chunks(PAGE) {
            let rows = self.reads.node_rows(page).await?;
            self.update(page, &rows, known, is_loaded);
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Notes what was read of the nodes of a page.
    fn update(&self, page: &[NodeId], rows: &[NodeRow], known: &BTreeMap<NodeId, IndexedVersion>, is_loaded: bool) {
        let parsed: Vec<_> = rows.iter().map(|row| (row, capacity(row))).collect();
        let mut missing: BTreeSet<_> = page.iter().copied().collect();
        let mut index = self.lock();
        for (row, capacity) in parsed {
            missing.remove(&row.node);
            let before = index.version(row.node).map_or(0, |it| it.version);
            if known.get(&row.node).is_some_and(|known| row.version < known.version) {
                index.reset(row.version, capacity);
            } else if index.apply(row.version, capacity) == IndexUpdate::Changed
                && (is_loaded && row.is_settled && before < row.version)
            {
                self.metrics.differences.inc();
            }
        }
        for node_id in missing {
            if let Some(known) = known.get(&node_id) {
                index.remove(node_id, known.version);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, PlacementIndex> {
        lock(&self.index)
    }
}

/// What placement knows of the node. One that cannot be parsed is parked and shown; the others can be rented.
pub(super) fn capacity(row: &NodeRow) -> NodeCapacity {
    let node = serde_json::from_str::<Node>(&row.body);
    node.map_or_else(|_| NodeCapacity::none(row.node, row.sku), |node| NodeCapacity::of(&node))
}

#[cfg(test)]
mod tests;
