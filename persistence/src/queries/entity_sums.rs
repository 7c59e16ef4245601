//! What nodes and accounts add up to, from the sums that their commits maintain: GPUs by SKU and region, balances by currency.

use super::Reads;
use crate::entity_sums::{Scanned, amounts, group, without_shards};
use crate::error::{OperationContext, StoreError};
use crate::shard_numbers::numbers;
use domain::id::{EntityKind, Shard, SkuId};
use domain::money::MicroAmount;
use domain::summand::{Amounts, SumGroup, Sums};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// The GPUs of one SKU in one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuCount {
    pub sku_id: SkuId,
    pub sku: String,
    pub region_code: String,
    /// Neither removed nor being removed.
    pub nodes: u64,
    pub total: u64,
    /// Held by an allocation, or without a clean-up proof after one.
    pub held: u64,
    /// The GPUs that new allocations can get in total.
    pub free: u64,
    /// The most that one of them can get: the most free GPUs of one node.
    pub largest_free: u64,
    /// Whether new allocations may use this SKU: it is active or deprecated.
    pub is_rentable: bool,
}

/// What the GPUs of one SKU in one region are used for. Their nodes are neither removed nor being removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuUse {
    pub sku: String,
    pub region_code: String,
    pub total: u64,
    /// Of allocations whose tenant is set up.
    pub sold: u64,
    /// Of the other tenants: they are being set up or cleaned up, or their clean-up is not proved.
    pub held: u64,
    /// The GPUs that new allocations can get.
    pub free: u64,
}

/// All accounts in one currency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrepaidTotal {
    pub currency: String,
    pub accounts: u64,
    /// Accounts whose next window is not covered.
    pub depleted: u64,
    /// The sum of their balances.
    pub balance: MicroAmount,
}

/// The billing accounts in one currency and state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountSum {
    pub currency: String,
    pub state: String,
    pub accounts: u64,
    /// The sum of their balances.
    pub balance: MicroAmount,
}

/// The nodes of one SKU in one region.
#[derive(Clone, Copy, Debug, Default)]
struct NodesOfSku {
    amounts: Amounts,
    free: i64,
    largest_free: u32,
}

impl Reads {
    /// GPUs by SKU and region, of all nodes that are neither removed nor being removed, in the order of the SKUs' names.
    ///
    /// A node's free GPUs are those that its machine would allocate (`Node::gpus_free`).
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn gpus(&self) -> Result<Vec<GpuCount>, StoreError> {
        let mut nodes: BTreeMap<_, NodesOfSku> = BTreeMap::new();
        for (group, amounts) in self.sums(EntityKind::Node, &Shard::all().collect::<Vec<_>>()).await? {
            if let SumGroup::Gpus { sku_id, sku, region_code, gpus_free } = group {
                nodes.entry((sku, region_code, sku_id)).or_default().add(gpus_free, amounts);
            }
        }
        let skus: BTreeSet<Uuid> = nodes.keys().map(|(.., sku_id)| sku_id.0).collect();
        let rentable: Vec<Uuid> = sqlx::query_scalar(
            "SELECT id FROM entity WHERE id = ANY ($1) AND kind = 'sku' AND state IN ('active', 'deprecated')",
        )
        .bind(skus.into_iter().collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await
        .doing("reading the states of SKUs")?;
        let count = |((sku, region_code, sku_id), of): ((String, String, SkuId), NodesOfSku)| GpuCount {
            sku_id,
            sku,
            region_code,
            nodes: positive(of.amounts.entities),
            total: positive(of.amounts.gpus_total),
            held: positive(of.amounts.gpus_sold.saturating_add(of.amounts.gpus_held)),
            free: positive(of.free),
            largest_free: of.largest_free.into(),
            is_rentable: rentable.contains(&sku_id.0),
        };
        Ok(nodes.into_iter().filter(|(_, of)| of.amounts.entities > 0).map(count).collect())
    }

    /// The GPUs of these shards' nodes, by SKU and region. What is free is counted as in [`Reads::gpus`].
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn gpu_use(&self, shards: &[Shard]) -> Result<Vec<GpuUse>, StoreError> {
        let mut nodes: BTreeMap<_, NodesOfSku> = BTreeMap::new();
        for (group, amounts) in self.sums(EntityKind::Node, shards).await? {
            if let SumGroup::Gpus { sku, region_code, gpus_free, .. } = group {
                nodes.entry((sku, region_code)).or_default().add(gpus_free, amounts);
            }
        }
        let used = |((sku, region_code), of): ((String, String), NodesOfSku)| GpuUse {
            sku,
            region_code,
            total: positive(of.amounts.gpus_total),
            sold: positive(of.amounts.gpus_sold),
            held: positive(of.amounts.gpus_held),
            free: positive(of.free),
        };
        Ok(nodes.into_iter().filter(|(_, of)| of.amounts.entities > 0).map(used).collect())
    }

    /// The prepaid balances, by currency.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn prepaid_totals(&self) -> Result<Vec<PrepaidTotal>, StoreError> {
        let mut totals: BTreeMap<String, PrepaidTotal> = BTreeMap::new();
        for it in self.account_sums(&Shard::all().collect::<Vec<_>>()).await? {
            let total = totals.entry(it.currency.clone()).or_insert_with(|| PrepaidTotal {
                currency: it.currency,
                accounts: 0,
                depleted: 0,
                balance: MicroAmount::of(0),
            });
            total.accounts += it.accounts;
            total.depleted += if it.state == "open" { 0 } else { it.accounts };
            total.balance = MicroAmount::of(total.balance.get().saturating_add(it.balance.get()));
        }
        Ok(totals.into_values().collect())
    }

    /// The billing accounts of these shards, by currency and state.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn account_sums(&self, shards: &[Shard]) -> Result<Vec<AccountSum>, StoreError> {
        let sum = |(group, amounts): (SumGroup, Amounts)| match group {
            SumGroup::Money { currency, state } if amounts.entities > 0 => Some(AccountSum {
                currency,
                state,
                accounts: positive(amounts.entities),
                balance: MicroAmount::of(amounts.balance),
            }),
            SumGroup::Money { .. } | SumGroup::Gpus { .. } => None,
        };
        Ok(self.sums(EntityKind::BillingAccount, shards).await?.into_iter().filter_map(sum).collect())
    }

    /// The sums of a kind's entities in these shards. Before each of the shards was counted, the entities themselves are added up.
    async fn sums(&self, kind: EntityKind, shards: &[Shard]) -> Result<Sums, StoreError> {
        const DOING: &str = "reading the sums of entities";
        let numbers = numbers(shards);
        let counted: i64 = sqlx::query_scalar("SELECT count(*) FROM counted_shard WHERE shard = ANY ($1)")
            .bind(&numbers)
            .fetch_one(&self.pool)
            .await
            .doing(DOING)?;
        if usize::try_from(counted).unwrap_or_default() < shards.len() {
            let mut scanned = Scanned::default();
            scanned.add(&self.pool, kind, shards).await?;
            return Ok(without_shards(scanned.sums));
        }
        let rows = sqlx::query(
            "SELECT kind, sku, sku_name, region, gpus_free, currency, state, sum(entities)::text, sum(gpus_total)::text,
                    sum(gpus_sold)::text, sum(gpus_held)::text, sum(balance)::text
             FROM entity_sum WHERE kind = $1 AND shard = ANY ($2)
             GROUP BY kind, sku, sku_name, region, gpus_free, currency, state",
        )
        .bind(kind.as_str())
        .bind(&numbers)
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        let mut sums = Sums::new();
        for row in &rows {
            if let Some(group) = group(row).doing(DOING)? {
                sums.insert(group, amounts(row, 7).doing(DOING)?);
            }
        }
        Ok(sums)
    }
}

impl NodesOfSku {
    fn add(&mut self, gpus_free: u32, amounts: Amounts) {
        self.amounts.add(amounts);
        self.free = self.free.saturating_add(i64::from(gpus_free).saturating_mul(amounts.entities));
        if amounts.entities > 0 {
            self.largest_free = self.largest_free.max(gpus_free);
        }
    }
}

/// A sum below zero is a manipulated one, until it is corrected.
fn positive(sum: i64) -> u64 {
    u64::try_from(sum).unwrap_or_default()
}
