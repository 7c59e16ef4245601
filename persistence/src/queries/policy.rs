//! Reads of policy values: as a book for machines, and as a list.

use super::{Cursor, Reads, RowPage, one_more};
use crate::error::{OperationContext, StoreError, damaged};
use domain::finding::RuleOverrides;
use domain::hardware::ExpectedHardware;
use domain::health_rules::HealthRules;
use domain::id::{EntityKind, PolicyId, SkuId};
use domain::policy::{PolicyBook, PolicyScope};
use domain::policy_values::{PolicyVersion, ScopeValues};
use domain::state_machine::Timestamp;
use domain::validation::ValidationMinimums;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{Postgres, QueryBuilder, Row};
use std::collections::BTreeMap;
use uuid::Uuid;

/// A filter of values. A field that is `None` admits all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyFilter {
    /// Of one value.
    pub id: Option<Uuid>,
    pub key: Option<String>,
    /// Of one scope.
    pub scope: Option<PolicyId>,
    /// Of one kind of scopes, as [`PolicyScope::kind`] names it.
    pub scope_kind: Option<String>,
}

/// A value that is in force in its scope, or will be.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyRow {
    pub scope: PolicyScope,
    pub written: PolicyVersion,
}

/// Every value that is not superseded at an instant, which goes between the two halves. A malformed body is left out here; the book
/// warns of it.
const VALUES: [&str; 2] = ["
    SELECT scope, value, written_at, id FROM (
        SELECT entity.id AS entity, entity.body -> 'scope' AS scope, value, value ->> 'key' AS key,
               (value ->> 'effective_at')::timestamptz AS effective_at, (value ->> 'written_at')::timestamptz AS written_at,
               (value ->> 'id')::uuid AS id,
               max((value ->> 'effective_at')::timestamptz)
                   FILTER (WHERE (value ->> 'effective_at')::timestamptz <= ", ")
                   OVER (PARTITION BY entity.id, value ->> 'key') AS in_force_since
        FROM entity
        CROSS JOIN LATERAL jsonb_array_elements(
            CASE jsonb_typeof(entity.body -> 'values') WHEN 'array' THEN entity.body -> 'values' ELSE '[]' END
        ) AS value
        WHERE entity.kind = 'policy'
    ) AS values
    WHERE effective_at >= coalesce(in_force_since, effective_at)"];

impl Reads {
    /// Every policy value. A key that only another release knows, and a value that this one does not admit, are left out with a
    /// warning: the default applies there.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn policy_book(&self) -> Result<PolicyBook, StoreError> {
        let bodies: Vec<String> = sqlx::query_scalar("SELECT body::text FROM entity WHERE kind = $1")
            .bind(EntityKind::Policy.as_str())
            .fetch_all(&self.pool)
            .await
            .doing("reading policy values")?;
        let mut book = PolicyBook::default();
        for body in bodies {
            match serde_json::from_str::<ScopeValues>(&body) {
                Ok(values) => {
                    for key in values.enter(&mut book) {
                        tracing::warn!(
                            policy.key = key,
                            "a policy value of {key} is not admitted by this release: it holds nowhere"
                        );
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the policy values of one scope cannot be read: they hold nowhere");
                }
            }
        }
        if let Some(overrides) = self.health_rules().await? {
            book.set_health_rules(overrides);
        }
        book.set_expected_hardware(self.expected_hardware().await?);
        for (sku_id, minimums) in self.minimums().await? {
            book.set_minimums(sku_id, minimums);
        }
        Ok(book)
    }

    /// The overrides of health findings; `None` where there are none, or where they cannot be read: the table of this release holds.
    async fn health_rules(&self) -> Result<Option<RuleOverrides>, StoreError> {
        let body: Option<String> = sqlx::query_scalar("SELECT body::text FROM entity WHERE kind = $1")
            .bind(EntityKind::HealthRules.as_str())
            .fetch_optional(&self.pool)
            .await
            .doing("reading the overrides of health findings")?;
        let Some(body) = body else { return Ok(None) };
        match serde_json::from_str::<HealthRules>(&body) {
            Ok(rules) => Ok(Some(rules.overrides)),
            Err(error) => {
                tracing::warn!(%error, "the overrides of health findings cannot be read: they hold nowhere");
                Ok(None)
            }
        }
    }

    /// What the machines of each SKU must have. What cannot be read expects nothing.
    async fn expected_hardware(&self) -> Result<BTreeMap<SkuId, ExpectedHardware>, StoreError> {
        let rows: Vec<(Uuid, String)> = sqlx::query_as(
            "SELECT id, (body -> 'spec' -> 'expected_hardware')::text FROM entity
             WHERE kind = $1 AND body -> 'spec' ? 'expected_hardware'",
        )
        .bind(EntityKind::Sku.as_str())
        .fetch_all(&self.pool)
        .await
        .doing("reading the expected hardware of SKUs")?;
        let mut expected = BTreeMap::new();
        for (id, text) in rows {
            match serde_json::from_str(&text) {
                Ok(hardware) => {
                    expected.insert(SkuId(id), hardware);
                }
                Err(error) => {
                    tracing::warn!(%error, sku.id = %id, "the expected hardware of SKU {id} cannot be read: it expects nothing");
                }
            }
        }
        Ok(expected)
    }

    /// What each SKU that has minimums wants of a validation. Those that cannot be read hold nowhere.
    async fn minimums(&self) -> Result<Vec<(SkuId, ValidationMinimums)>, StoreError> {
        let found: Vec<(Uuid, String)> = sqlx::query_as(
            "SELECT id, (body -> 'validation')::text FROM entity WHERE kind = $1 AND body ? 'validation'",
        )
        .bind(EntityKind::Sku.as_str())
        .fetch_all(&self.pool)
        .await
        .doing("reading the minimums of SKUs")?;
        let read = |(id, text): (Uuid, String)| match serde_json::from_str(&text) {
            Ok(minimums) => Some((SkuId(id), minimums)),
            Err(error) => {
                tracing::warn!(%error, "the minimums of SKU {id} cannot be read: they hold nowhere");
                None
            }
        };
        Ok(found.into_iter().filter_map(read).collect())
    }

    /// The values that are in force at `now` or will be, in the order in which they were written.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn policy_values(
        &self,
        filter: &PolicyFilter,
        now: Timestamp,
        after: Option<Cursor>,
        limit: u32,
    ) -> Result<RowPage<PolicyRow, Cursor>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(VALUES[0]);
        query.push_bind(now).push(VALUES[1]);
        if let Some(id) = filter.id {
            query.push(" AND id = ").push_bind(id);
        }
        if let Some(key) = &filter.key {
            query.push(" AND key = ").push_bind(key);
        }
        if let Some(PolicyId(scope)) = filter.scope {
            query.push(" AND entity = ").push_bind(scope);
        }
        if let Some(kind) = &filter.scope_kind {
            query.push(" AND scope ? ").push_bind(kind);
        }
        if let Some(after) = after {
            query.push(" AND (written_at, id) > (").push_bind(after.created_at).push(", ");
            query.push_bind(after.id).push(")");
        }
        query.push(" ORDER BY written_at, id LIMIT ").push_bind(one_more(limit));
        let rows = query.build().fetch_all(&self.pool).await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(policy_row).collect());
        let place = |row: &PolicyRow| Cursor { created_at: row.written.written_at, id: row.written.id.0 };
        Ok(RowPage::of(rows.doing("listing policy values")?, limit, place))
    }
}

fn policy_row(row: &PgRow) -> Result<PolicyRow, sqlx::Error> {
    let (Json(scope), Json(value)): (Json<serde_json::Value>, Json<serde_json::Value>) =
        (row.try_get("scope")?, row.try_get("value")?);
    let scope = serde_json::from_value(scope).map_err(damaged)?;
    Ok(PolicyRow { scope, written: serde_json::from_value(value).map_err(damaged)? })
}
