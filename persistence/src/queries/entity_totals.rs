//! What concerns the nodes of some shards, for metrics. No answer grows with the number of nodes: rows are by finding.

use super::Reads;
use crate::error::{OperationContext, StoreError};
use crate::shard_numbers::numbers;
use domain::finding::FindingRule;
use domain::id::Shard;
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::collections::BTreeMap;

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
