//! Reads of the dependents of keys.

use super::Reads;
use crate::error::{OperationContext, StoreError};
use domain::id::NodeId;
use domain::state_machine::Timestamp;
use sqlx::Row;

/// A node that would lose access with an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DependentNode {
    pub node: NodeId,
    pub name: Option<String>,
    pub host: String,
    /// The end of its last certificate by this authority.
    pub not_after: Timestamp,
}

impl Reads {
    /// The nodes whose live certificates are all issued by the authority `id`, those first whose certificate lasts longest, and their
    /// number; at most `limit` are listed. Where the agent has presented one of its live certificates, that one counts alone: it may
    /// never have stored another. `founding`: certificates without an authority count as its own.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn dependents(
        &self,
        id: &str,
        founding: bool,
        now: Timestamp,
        limit: u32,
    ) -> Result<(Vec<DependentNode>, u64), StoreError> {
        let rows = sqlx::query(
            "SELECT entity.id, body #>> '{registration,metadata,name}' AS name, body #>> '{registration,host}' AS host,
                    live.not_after, count(*) OVER () AS count
             FROM entity
             CROSS JOIN LATERAL (
                 SELECT max(one.not_after) AS not_after, bool_and(one.by_this) AS by_this_alone
                 FROM (
                     SELECT (certificate.value->>'not_after')::timestamptz AS not_after,
                            coalesce(certificate.value->>'authority' = $1, $2) AS by_this,
                            certificate.key IS NOT DISTINCT FROM body #>> '{identity,shown}' AS is_shown,
                            bool_or(certificate.key IS NOT DISTINCT FROM body #>> '{identity,shown}') OVER () AS one_is
                     FROM jsonb_each(body #> '{identity,certificates}') AS certificate
                     WHERE (certificate.value->>'not_after')::timestamptz > $3
                       AND certificate.value->>'generation' = body #>> '{identity,generation}'
                 ) AS one
                 WHERE one.is_shown OR NOT one.one_is
             ) AS live
             WHERE kind = 'node' AND state NOT IN ('removing', 'removed') AND live.by_this_alone
             ORDER BY live.not_after DESC, entity.id LIMIT $4",
        )
        .bind(id)
        .bind(founding)
        .bind(now)
        .bind(i64::from(limit.max(1)))
        .fetch_all(&self.pool)
        .await
        .doing("counting nodes by authority")?;
        let dependent = |row: &sqlx::postgres::PgRow| {
            Ok(DependentNode {
                node: NodeId(row.try_get("id")?),
                name: row.try_get("name")?,
                host: row.try_get("host")?,
                not_after: row.try_get("not_after")?,
            })
        };
        let all = rows.iter().map(dependent).collect::<Result<Vec<_>, sqlx::Error>>();
        let count = rows.first().map_or(Ok(0), |row| row.try_get::<i64, _>("count"));
        let count = count.doing("counting nodes by authority")?.unsigned_abs();
        Ok((all.doing("counting nodes by authority")?, count))
    }
}
