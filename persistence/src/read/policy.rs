//! Policy values, as a book that machines read.

use super::Reads;
use crate::error::{Doing, StoreError};
use domain::machine::Timestamp;
use domain::policy::{Key, PolicyBook, Scope, Value};
use sqlx::types::Json;

impl Reads {
    /// Every policy value there is. A key that only another release knows, and a value that this one does not admit, are left
    /// out with a warning: the default holds there.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn policy_book(&self) -> Result<PolicyBook, StoreError> {
        let rows: Vec<(String, String, String, Timestamp, Json<serde_json::Value>)> = sqlx::query_as(
            "SELECT key, scope_kind, scope_id, effective_at, value FROM policy_value ORDER BY effective_at, written_at",
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading policy values")?;
        let mut book = PolicyBook::default();
        for (name, scope_kind, scope_id, effective_at, Json(value)) in rows {
            let known = Key::parse(&name).zip(scope(&scope_kind, scope_id));
            let value = serde_json::from_value::<Value>(value).ok();
            let entered = known.zip(value).map(|((key, scope), value)| book.set(key, scope, effective_at, value));
            if !matches!(entered, Some(Ok(()))) {
                tracing::warn!(
                    policy.key = name,
                    "policy value of {name} is not admitted by this release: the default holds"
                );
            }
        }
        Ok(book)
    }
}

fn scope(kind: &str, id: String) -> Option<Scope> {
    match kind {
        "global" => Some(Scope::Global),
        "user_id" => Some(Scope::UserId(id)),
        "project_id" => Some(Scope::ProjectId(id)),
        "org_id" => Some(Scope::OrgId(id)),
        "plan" => Some(Scope::Plan(id)),
        _ => None,
    }
}
