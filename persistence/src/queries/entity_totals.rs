//! What the nodes and accounts of some shards add up to, for metrics. No answer grows with the number of entities: rows are by SKU and region,
//! by finding, by currency and state.

use super::Reads;
use super::shard::numbers;
use crate::error::{OperationContext, StoreError};
use domain::finding::FindingRule;
use domain::id::Shard;
use domain::money::MicroAmount;
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::collections::BTreeMap;

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

/// The billing accounts in one currency and state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountSum {
    pub currency: String,
    pub state: String,
    pub accounts: u64,
    /// The sum of their balances.
    pub balance: MicroAmount,
}

/// What concerns the trust in nodes that are in service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeConcerns {
    /// How many nodes have a finding that is not cleared, by its probe and code. Those that no row of the table of findings has are counted
    /// under `other`, since agents name them.
    pub findings: BTreeMap<(&'static str, &'static str), u64>,
    /// Nodes in service whose last certificate ends within [`RENEWAL_OVERDUE_SECONDS`], or has ended.
    pub certificates_ending: u64,
}

/// A node renews its certificate long before: after two thirds of its life, which is a day by default.
pub const RENEWAL_OVERDUE_SECONDS: f64 = 3600.0;

/// The probe and code of findings that the table of findings does not have.
const OTHER: (&str, &str) = ("other", "other");

impl Reads {
    /// The GPUs of these shards' nodes, by SKU and region. What is free is counted as in [`Reads::gpus`].
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn gpu_use(&self, shards: &[Shard]) -> Result<Vec<GpuUse>, StoreError> {
        let rows = sqlx::query(
            "SELECT body #>> '{registration,sku,name}' AS sku, body #>> '{registration,region_code}' AS region,
                    sum((body #>> '{registration,gpus_total}')::bigint)::bigint AS total,
                    sum(tenants.sold)::bigint AS sold, sum(tenants.devices - tenants.sold)::bigint AS held,
                    coalesce(sum(greatest(inventory.gpus - tenants.devices, 0)) FILTER (
                        WHERE state = 'active' AND tenants.unproven = 0 AND (tenants.count = 0 OR inventory.isolates)
                    ), 0)::bigint AS free
             FROM entity
             CROSS JOIN LATERAL (
                 SELECT count(*) AS count,
                        count(*) FILTER (WHERE hold.value #>> '{phase,phase}' IN ('release_failed', 'abandoned')) AS unproven,
                        coalesce(sum(jsonb_array_length(hold.value #> '{placed,devices}')), 0) AS devices,
                        coalesce(sum(jsonb_array_length(hold.value #> '{placed,devices}')) FILTER (
                            WHERE hold.value #>> '{phase,phase}' = 'ready'
                        ), 0) AS sold
                 FROM jsonb_each(body->'holds') AS hold
             ) AS tenants
             CROSS JOIN LATERAL (
                 SELECT coalesce(jsonb_array_length(nullif(body #> '{inventory,gpus}', 'null')), 0) AS gpus,
                        coalesce((body #>> '{inventory,isolates_devices}')::boolean, false) AS isolates
             ) AS inventory
             WHERE kind = 'node' AND shard = ANY ($1) AND state NOT IN ('removing', 'removed')
             GROUP BY 1, 2 ORDER BY 1, 2",
        )
        .bind(numbers(shards))
        .fetch_all(&self.pool)
        .await;
        let row = |row: &PgRow| {
            Ok(GpuUse {
                sku: row.try_get("sku")?,
                region_code: row.try_get("region")?,
                total: count(row, "total")?,
                sold: count(row, "sold")?,
                held: count(row, "held")?,
                free: count(row, "free")?,
            })
        };
        rows.and_then(|rows| rows.iter().map(row).collect()).doing("adding up the use of GPUs")
    }

    /// The billing accounts of these shards, by currency and state.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn account_sums(&self, shards: &[Shard]) -> Result<Vec<AccountSum>, StoreError> {
        let rows = sqlx::query(
            "SELECT body->>'currency' AS currency, state, count(*) AS accounts, sum((body->>'balance')::bigint)::bigint AS balance
             FROM entity WHERE kind = 'billing_account' AND shard = ANY ($1) GROUP BY 1, 2 ORDER BY 1, 2",
        )
        .bind(numbers(shards))
        .fetch_all(&self.pool)
        .await;
        let row = |row: &PgRow| {
            Ok(AccountSum {
                currency: row.try_get("currency")?,
                state: row.try_get("state")?,
                accounts: count(row, "accounts")?,
                balance: MicroAmount::of(row.try_get("balance")?),
            })
        };
        rows.and_then(|rows| rows.iter().map(row).collect()).doing("adding up the accounts")
    }

    /// The findings and ending certificates of these shards' nodes, but for removed ones.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn node_concerns(&self, shards: &[Shard]) -> Result<NodeConcerns, StoreError> {
        let findings = sqlx::query(
            "SELECT finding.value #>> '{reported,probe}' AS probe, finding.value #>> '{reported,code}' AS code,
                    count(DISTINCT entity.id) AS nodes
             FROM entity CROSS JOIN LATERAL jsonb_array_elements(coalesce(body->'findings', '[]')) AS finding
             WHERE kind = 'node' AND shard = ANY ($1) AND state NOT IN ('removing', 'removed')
               AND coalesce(finding.value->'cleared', 'null') = 'null'
             GROUP BY 1, 2",
        )
        .bind(numbers(shards))
        .fetch_all(&self.pool)
        .await
        .doing("counting the findings of nodes")?;
        let certificates_ending: i64 = sqlx::query_scalar(
            "SELECT count(*)
             FROM entity CROSS JOIN LATERAL (
                 SELECT max((certificate.value->>'not_after')::timestamptz) AS ends
                 FROM jsonb_each(body #> '{identity,certificates}') AS certificate
             ) AS last
             WHERE kind = 'node' AND shard = ANY ($1) AND state IN ('active', 'draining', 'quarantined')
               AND last.ends < now() + make_interval(secs => $2)",
        )
        .bind(numbers(shards))
        .bind(RENEWAL_OVERDUE_SECONDS)
        .fetch_one(&self.pool)
        .await
        .doing("counting the certificates of nodes")?;
        let mut concerns =
            NodeConcerns { certificates_ending: certificates_ending.unsigned_abs(), ..NodeConcerns::default() };
        for row in &findings {
            let read =
                || Ok((row.try_get::<String, _>("probe")?, row.try_get::<String, _>("code")?, count(row, "nodes")?));
            let (probe, code, nodes) = read().doing("counting the findings of nodes")?;
            let rule = FindingRule::of(&probe, &code);
            let name = if rule.code.is_empty() { OTHER } else { (rule.probe, rule.code) };
            *concerns.findings.entry(name).or_default() += nodes;
        }
        Ok(concerns)
    }
}

fn count(row: &PgRow, name: &str) -> Result<u64, sqlx::Error> {
    row.try_get::<i64, _>(name).map(i64::unsigned_abs)
}
