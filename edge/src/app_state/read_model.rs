//! The read model: committed entities, read from the store or from memory without passing through a mailbox.

use axum::http::{HeaderName, HeaderValue, header};
use chrono::{DateTime, Utc};
use domain::{EntityRef, Machine};
use persistence::queries::{Cursor, EntityRow, ListFilter, ListedEntity};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use utoipa::IntoParams;
use uuid::Uuid;

use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Order, Page, Position};

/// The pause between two polls of an entity that another member owns: the first and the longest.
const FIRST_POLL_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_POLL_PAUSE: Duration = Duration::from_millis(50);

/// An entity as it is stored, with its version.
#[derive(Clone, Debug)]
pub(crate) struct StoredEntity<M> {
    pub(crate) it: M,
    pub(crate) version: i64,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
}

impl<M: Machine> StoredEntity<M> {
    pub(crate) fn of(row: &EntityRow) -> Result<Self, ApiError> {
        let it = serde_json::from_str(&row.body)
            .map_err(|error| ApiError::internal(format!("{} cannot be read: {error}", row.entity)))?;
        Ok(Self { it, version: row.version, created_at: row.created_at, updated_at: row.updated_at })
    }

    /// An entity of a list; `None` where it cannot be decoded, which is logged, or where its seal does not hold, which the read has logged.
    pub(crate) fn of_listed(listed: &ListedEntity) -> Option<Self> {
        let read = Self::of(listed.row.as_ref().ok()?).inspect_err(|error| {
            let entity = listed.entity;
            tracing::warn!(entity.kind = %entity.kind, entity.id = %entity.id, %error, "an entity is left out of a list");
        });
        read.ok()
    }
}

/// The stored entity; `None` where it was never created.
pub(crate) async fn find<M: Machine>(app: &AppState, id: Uuid) -> Result<Option<StoredEntity<M>>, ApiError> {
    let row = app.reads.entity(EntityRef { kind: M::KIND, id }).await?;
    row.as_ref().map(StoredEntity::of).transpose()
}

/// The last committed state of an entity, with its version, from memory or from the store.
#[derive(Clone, Debug)]
pub(crate) struct CurrentEntity<M> {
    pub(crate) it: Arc<M>,
    pub(crate) version: i64,
}

/// The last committed state of an entity: from memory where this process is the owner, else from the store.
pub(crate) async fn current<M: Machine>(app: &AppState, id: Uuid) -> Result<Option<CurrentEntity<M>>, ApiError> {
    if let Some((it, version)) = app.directory.host().committed_state::<M>(id) {
        return Ok(Some(CurrentEntity { it, version }));
    }
    let found = find::<M>(app, id).await?;
    Ok(found.map(|StoredEntity { it, version, .. }| CurrentEntity { it: Arc::new(it), version }))
}

/// The rows of one page, in its order, with their positions. An entity that cannot be decoded, or whose seal does not hold, is left out and
/// logged: its owner parks it, and the others stay visible. Where the filter names an owner, the entities of others are left out.
pub(crate) async fn list<M: Machine>(
    app: &AppState,
    filter: &ListFilter,
    page: &Page,
) -> Result<Vec<(Position, Option<StoredEntity<M>>)>, ApiError> {
    let after = page.after.map(|at| Cursor { created_at: at.created_at, id: at.id });
    let rows = u32::try_from(page.rows_to_read()).unwrap_or(u32::MAX);
    let filter = ListFilter { is_newest_first: page.order == Order::NewestFirst, ..filter.clone() };
    let found = app.reads.list(M::KIND, &filter, after, rows).await?;
    let position = |listed: &ListedEntity| Position { created_at: listed.created_at, id: listed.entity.id };
    // The column by which it was found is not sealed.
    let is_of_owner = |stored: &StoredEntity<M>| filter.owner.is_none() || stored.it.keys().owner == filter.owner;
    let shown = |listed: &ListedEntity| StoredEntity::of_listed(listed).filter(is_of_owner);
    Ok(found.items.iter().map(|listed| (position(listed), shown(listed))).collect())
}

/// One page of a list's response.
pub(crate) fn to_page<M, V>(
    page: &Page,
    rows: Vec<(Position, Option<StoredEntity<M>>)>,
    show: impl Fn(StoredEntity<M>) -> V,
) -> Items<V> {
    let Items { items, next_page } = page.answer(rows, |(position, _)| *position, |(_, stored)| stored.map(&show));
    Items { items: items.into_iter().flatten().collect(), next_page }
}

/// Waits until `condition` holds for the entity, at most for `limit`, and returns the entity as it is then.
pub(crate) async fn wait_until<M: Machine>(
    app: &AppState,
    id: Uuid,
    limit: Duration,
    condition: impl Fn(&M) -> bool,
) -> Result<Option<CurrentEntity<M>>, ApiError> {
    let end = Instant::now() + limit;
    let mut changes = EntityChanges::of(app, EntityRef { kind: M::KIND, id });
    loop {
        let next = changes.next();
        let found = current::<M>(app, id).await?;
        if found.as_ref().is_some_and(|found| condition(&found.it)) || Instant::now() >= end {
            return Ok(found);
        }
        next.wait(end).await;
    }
}

/// The changes of an entity: notified where this process is the owner, polled where another member is.
pub(crate) struct EntityChanges {
    watch: actors::EntityWatch,
    pause: Duration,
    last: Duration,
}

impl EntityChanges {
    pub(crate) fn of(app: &AppState, entity: EntityRef) -> Self {
        let host = app.directory.host();
        let here = host.term(actors::sharding::shard_of(entity.id)).is_some();
        Self {
            watch: host.watch(entity),
            // Also where this process is the owner, since ownership may move.
            pause: if here { LONGEST_POLL_PAUSE } else { FIRST_POLL_PAUSE },
            last: LONGEST_POLL_PAUSE,
        }
    }

    /// As [`EntityChanges::of`], for waits that last for days.
    pub(crate) fn with_longest_pause(mut self, last: Duration) -> Self {
        self.last = last;
        self
    }

    /// To be called before the entity is read, so that no change is missed between the read and the wait.
    pub(crate) fn next(&mut self) -> ChangeWait<'_> {
        let pause = self.pause;
        self.pause = (pause * 2).min(self.last);
        let mut changed = Box::pin(self.watch.changed());
        changed.as_mut().enable();
        ChangeWait { changed, pause }
    }
}

pub(crate) struct ChangeWait<'a> {
    changed: std::pin::Pin<Box<tokio::sync::futures::Notified<'a>>>,
    pause: Duration,
}

impl ChangeWait<'_> {
    /// Waits until the entity has changed, the poll pause is over, or `end` has come. The caller then reads again.
    pub(crate) async fn wait(self, end: Instant) {
        let left = end.saturating_duration_since(Instant::now());
        let _ = timeout(self.pause.min(left), self.changed).await;
    }
}

/// The entity's version as an `ETag`.
pub(crate) fn etag(version: i64) -> [(HeaderName, HeaderValue); 1] {
    let value = HeaderValue::from_str(&format!("\"{version}\"")).unwrap_or(HeaderValue::from_static("\"\""));
    [(header::ETAG, value)]
}

/// The header of a request that changes what was read before, for the API's description.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
pub(crate) struct IfMatch {
    /// The `ETag` that the change is based on
    #[param(rename = "If-Match", pattern = r#"^"[0-9]{1,18}"$"#)]
    #[allow(dead_code)]
    etag: Option<String>,
}

/// The version that `If-Match` requires; `None` where any matches.
///
/// # Errors
/// `invalid_request` where it is not the one `ETag` of a response.
pub(crate) fn if_match(headers: &axum::http::HeaderMap) -> Result<Option<i64>, ApiError> {
    let mut given = headers.get_all(header::IF_MATCH).iter();
    let (value, more) = (given.next(), given.next());
    let Some(value) = value else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" && more.is_none() {
        return Ok(None);
    }
    let version = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let version =
        version.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit())).and_then(|text| text.parse().ok());
    match version {
        Some(version) if more.is_none() => Ok(Some(version)),
        Some(_) | None => {
            Err(ApiError::invalid_request("Header `If-Match` must be the ETag of one answer, with its quotes, or *.")
                .detail("field", "If-Match"))
        }
    }
}
