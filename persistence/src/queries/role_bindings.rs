//! Reads of platform role bindings.

use super::entity::Cursor;
use super::{Reads, RowPage, one_more};
use crate::error::{OperationContext, StoreError};
use domain::authz::PlatformRole;
use domain::id::{BindingId, EntityKind};
use domain::role_bindings::RoleBinding;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{Postgres, QueryBuilder, Row};
use uuid::Uuid;

/// One role of one subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingRow {
    pub subject: String,
    pub role: PlatformRole,
    pub binding: RoleBinding,
    /// The seal of the subject's row holds: otherwise the binding is not one that was committed.
    pub is_intact: bool,
}

/// A filter of them. A field that is `None` admits all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindingFilter {
    pub id: Option<BindingId>,
    pub subject: Option<String>,
    pub role: Option<PlatformRole>,
}

impl Reads {
    /// Bindings, the oldest first. A role that a newer release knows is left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn bindings(
        &self,
        filter: &BindingFilter,
        after: Option<Cursor>,
        limit: u32,
    ) -> Result<RowPage<BindingRow, Cursor>, StoreError> {
        let rows = match self.binding_rows(filter, after, limit, None).await {
            // An altered row may fail the whole statement; of those whose seals hold none does.
            Err(error) if !error.is_unavailable() => {
                let intact = self.intact_bodies(EntityKind::Bindings, "", "listing platform role bindings").await?;
                let intact: Vec<Uuid> = intact.into_iter().map(|(entity, _)| entity).collect();
                self.binding_rows(filter, after, limit, Some(&intact)).await?
            }
            rows => rows?,
        };
        let intact = self.intact(EntityKind::Bindings, &rows.iter().map(|(entity, _)| *entity).collect()).await?;
        let checked = |(entity, row): (Uuid, BindingRow)| BindingRow { is_intact: intact.contains(&entity), ..row };
        let place = |row: &BindingRow| Cursor { created_at: row.binding.bound_at, id: row.binding.id.0 };
        Ok(RowPage::of(rows.into_iter().map(checked).collect(), limit, place))
    }

    /// The bindings, of these entities or of all.
    async fn binding_rows(
        &self,
        filter: &BindingFilter,
        after: Option<Cursor>,
        limit: u32,
        entities: Option<&[Uuid]>,
    ) -> Result<Vec<(Uuid, BindingRow)>, StoreError> {
        let roles: Vec<_> = filter.role.map_or(PlatformRole::ALL.to_vec(), |role| vec![role]);
        let roles: Vec<_> = roles.into_iter().map(PlatformRole::name).collect();
        let mut query = QueryBuilder::<Postgres>::new(
            "SELECT entity, subject, role, binding FROM (
                 SELECT entity.id AS entity, owner, body->>'subject' AS subject, held.key AS role, held.value AS binding,
                        (held.value->>'bound_at')::timestamptz AS bound_at, (held.value->>'id')::uuid AS id
                 FROM entity CROSS JOIN LATERAL jsonb_each(body->'roles') AS held
                 WHERE kind = 'bindings' AND owner IS NOT NULL",
        );
        if let Some(entities) = entities {
            query.push(" AND entity.id = ANY (").push_bind(entities).push(")");
        }
        query.push(") AS bound WHERE role = ANY (").push_bind(roles).push(")");
        if let Some(BindingId(id)) = filter.id {
            query.push(" AND id = ").push_bind(id);
        }
        if let Some(subject) = &filter.subject {
            query.push(" AND owner = ").push_bind(subject);
        }
        if let Some(after) = after {
            query.push(" AND (bound_at, id) > (").push_bind(after.created_at).push(", ").push_bind(after.id).push(")");
        }
        query.push(" ORDER BY bound_at, id LIMIT ").push_bind(one_more(limit));
        let rows = query.build().fetch_all(&self.pool).await;
        rows.and_then(|rows| rows.iter().map(binding_row).collect()).doing("listing platform role bindings")
    }
}

fn binding_row(row: &PgRow) -> Result<(Uuid, BindingRow), sqlx::Error> {
    let role: String = row.try_get("role")?;
    let role = PlatformRole::ALL.into_iter().find(|known| known.name() == role).ok_or(sqlx::Error::RowNotFound)?;
    let Json(binding) = row.try_get("binding")?;
    Ok((row.try_get("entity")?, BindingRow { subject: row.try_get("subject")?, role, binding, is_intact: false }))
}
