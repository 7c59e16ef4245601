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
use serde::de::DeserializeOwned;
use serde_json::Value;
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
    /// The seal of the scope's row holds: otherwise the value is not one that was committed, and not in force.
    pub is_intact: bool,
}

/// Every value that is not superseded at an instant, which goes before the second part; a condition on the entities goes before the third.
/// A malformed body is left out here; the book warns of it.
const VALUES: [&str; 3] = ["
    SELECT entity, scope, value, written_at, id FROM (
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
        WHERE entity.kind = 'policy'", "
    ) AS values
    WHERE effective_at >= coalesce(in_force_since, effective_at)"];

impl Reads {
    /// Every policy value. A key that only another release knows, and a value that this one does not admit, are left out with a
    /// warning: the default applies there.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn policy_book(&self) -> Result<PolicyBook, StoreError> {
        let scopes = self.intact_bodies(EntityKind::Policy, "", "reading policy values").await?;
        let mut book = PolicyBook::default();
        for (_, body) in scopes {
            match serde_json::from_str::<ScopeValues>(&body) {
                Ok(values) => {
                    for key in values.enter(&mut book) {
                        tracing::warn!(
                            policy.key = key,
                            "a policy value of {key} is not admitted by this release, and is ignored"
                        );
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the policy values of one scope cannot be read, and are ignored");
                }
            }
        }
        if let Some(overrides) = self.health_rules().await? {
            book.set_health_rules(overrides);
        }
        self.enter_sku_requirements(&mut book).await?;
        Ok(book)
    }

    /// The overrides of health findings; `None` where there are none, or where they cannot be read: the table of this release holds.
    async fn health_rules(&self) -> Result<Option<RuleOverrides>, StoreError> {
        let mut found =
            self.intact_bodies(EntityKind::HealthRules, "", "reading the overrides of health findings").await?;
        let Some((_, body)) = found.pop() else { return Ok(None) };
        match serde_json::from_str::<HealthRules>(&body) {
            Ok(rules) => Ok(Some(rules.overrides)),
            Err(error) => {
                tracing::warn!(%error, "the overrides of health findings cannot be read, and are ignored");
                Ok(None)
            }
        }
    }

    /// What the machines of each SKU must have, and what a validation must measure on them. A requirement that cannot be read is ignored.
    async fn enter_sku_requirements(&self, book: &mut PolicyBook) -> Result<(), StoreError> {
        const WITH_REQUIREMENTS: &str = " AND (body -> 'spec' ? 'expected_hardware' OR body ? 'validation')";
        let skus = self.intact_bodies(EntityKind::Sku, WITH_REQUIREMENTS, "reading the requirements of SKUs").await?;
        let mut all_expected = BTreeMap::new();
        for (id, body) in skus {
            let body: Value = serde_json::from_str(&body).map_err(damaged).doing("reading the requirements of SKUs")?;
            let (expected, minimums) = (body.pointer("/spec/expected_hardware"), body.get("validation"));
            if let Some(expected) =
                expected.and_then(|value| requirement::<ExpectedHardware>(id, "expected hardware", value))
            {
                all_expected.insert(SkuId(id), expected);
            }
            if let Some(minimums) = minimums.and_then(|value| requirement::<ValidationMinimums>(id, "minimums", value))
            {
                book.set_minimums(SkuId(id), minimums);
            }
        }
        book.set_expected_hardware(all_expected);
        Ok(())
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
        let rows = match self.policy_rows(filter, now, after, limit, None).await {
            // An altered row may fail the whole statement; of those whose seals hold none does.
            Err(error) if !error.is_unavailable() => {
                let intact = self.intact_bodies(EntityKind::Policy, "", "listing policy values").await?;
                let intact: Vec<Uuid> = intact.into_iter().map(|(entity, _)| entity).collect();
                self.policy_rows(filter, now, after, limit, Some(&intact)).await?
            }
            rows => rows?,
        };
        let intact = self.intact(EntityKind::Policy, &rows.iter().map(|(entity, _)| *entity).collect()).await?;
        let checked = |(entity, row): (Uuid, PolicyRow)| PolicyRow { is_intact: intact.contains(&entity), ..row };
        let place = |row: &PolicyRow| Cursor { created_at: row.written.written_at, id: row.written.id.0 };
        Ok(RowPage::of(rows.into_iter().map(checked).collect(), limit, place))
    }

    /// The values, of these entities or of all.
    async fn policy_rows(
        &self,
        filter: &PolicyFilter,
        now: Timestamp,
        after: Option<Cursor>,
        limit: u32,
        entities: Option<&[Uuid]>,
    ) -> Result<Vec<(Uuid, PolicyRow)>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(VALUES[0]);
        query.push_bind(now).push(VALUES[1]);
        if let Some(entities) = entities {
            query.push(" AND entity.id = ANY (").push_bind(entities).push(")");
        }
        query.push(VALUES[2]);
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
        rows.and_then(|rows| rows.iter().map(policy_row).collect()).doing("listing policy values")
    }
}

fn requirement<T: DeserializeOwned>(sku_id: Uuid, what: &str, value: &Value) -> Option<T> {
    let read = T::deserialize(value);
    read.inspect_err(|error| {
        tracing::warn!(%error, sku.id = %sku_id, "the {what} of SKU {sku_id} cannot be read, and is ignored");
    })
    .ok()
}

fn policy_row(row: &PgRow) -> Result<(Uuid, PolicyRow), sqlx::Error> {
    let (Json(scope), Json(value)): (Json<Value>, Json<Value>) = (row.try_get("scope")?, row.try_get("value")?);
    let scope = serde_json::from_value(scope).map_err(damaged)?;
    let written = serde_json::from_value(value).map_err(damaged)?;
    Ok((row.try_get("entity")?, PolicyRow { scope, written, is_intact: false }))
}
