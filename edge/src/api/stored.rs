//! Entities as they were committed, read past the mailboxes.

use axum::http::{HeaderName, HeaderValue, header};
use chrono::{DateTime, Utc};
use domain::{EntityRef, Machine};
use persistence::read::{Cursor, EntityRow, ListFilter};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use crate::error::ApiError;
use crate::page::{Items, Page, Position};
use crate::services::Services;

/// The pause between two looks at an entity that changes elsewhere: the first and the longest.
const LOOK_FIRST: Duration = Duration::from_millis(2);
const LOOK_LAST: Duration = Duration::from_millis(50);

/// An entity with its version.
#[derive(Clone, Debug)]
pub(crate) struct Stored<M> {
    pub(crate) it: M,
    pub(crate) version: i64,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
}

impl<M: Machine> Stored<M> {
    pub(crate) fn of(row: &EntityRow) -> Result<Self, ApiError> {
        let it = serde_json::from_str(&row.body)
            .map_err(|error| ApiError::internal(format!("{} cannot be read: {error}", row.entity)))?;
        Ok(Self { it, version: row.version, created_at: row.created_at, updated_at: row.updated_at })
    }
}

/// `None` where it was never created.
pub(crate) async fn find<M: Machine>(services: &Services, id: Uuid) -> Result<Option<Stored<M>>, ApiError> {
    let row = services.reads.entity(EntityRef { kind: M::KIND, id }).await?;
    row.as_ref().map(Stored::of).transpose()
}

/// An entity with its version, wherever that could be had.
#[derive(Clone, Debug)]
pub(crate) struct Current<M> {
    pub(crate) it: Arc<M>,
    pub(crate) version: i64,
}

/// The entity as it was committed last: from the memory of its owner where that is this process, else as it is stored.
pub(crate) async fn current<M: Machine>(services: &Services, id: Uuid) -> Result<Option<Current<M>>, ApiError> {
    if let Some((it, version)) = services.directory.host().remembered::<M>(id) {
        return Ok(Some(Current { it, version }));
    }
    let found = find::<M>(services, id).await?;
    Ok(found.map(|Stored { it, version, .. }| Current { it: Arc::new(it), version }))
}

/// The rows of one page, oldest first, with their positions. What cannot be read is left out and logged: it is parked where it
/// lives, and the others can be seen.
pub(crate) async fn list<M: Machine>(
    services: &Services,
    filter: &ListFilter,
    page: &Page,
) -> Result<Vec<(Position, Option<Stored<M>>)>, ApiError> {
    let after = page.after.map(|at| Cursor { created_at: at.created_at, id: at.id });
    let rows = u32::try_from(page.rows_to_read()).unwrap_or(u32::MAX);
    let found = services.reads.list(M::KIND, filter, after, rows).await?;
    let read = |row: EntityRow| {
        let position = Position { created_at: row.created_at, id: row.entity.id };
        let stored = Stored::of(&row).inspect_err(|error| {
            let entity = row.entity;
            tracing::warn!(entity.kind = %entity.kind, entity.id = %entity.id, %error, "an entity is left out of a list");
        });
        (position, stored.ok())
    };
    Ok(found.items.into_iter().map(read).collect())
}

/// One page as it is answered.
pub(crate) fn answer<M, V>(
    page: &Page,
    rows: Vec<(Position, Option<Stored<M>>)>,
    show: impl Fn(Stored<M>) -> V,
) -> Items<V> {
    let Items { items, next_page } = page.answer(rows, |(position, _)| *position, |(_, stored)| stored.map(&show));
    Items { items: items.into_iter().flatten().collect(), next_page }
}

/// Waits until `is_there` is true of the entity, at most for `within`, and answers with the entity as it is then.
pub(crate) async fn wait_until<M: Machine>(
    services: &Services,
    id: Uuid,
    within: Duration,
    is_there: impl Fn(&M) -> bool,
) -> Result<Option<Current<M>>, ApiError> {
    let end = Instant::now() + within;
    let mut changes = Changes::of(services, EntityRef { kind: M::KIND, id });
    loop {
        let next = changes.next();
        let found = current::<M>(services, id).await?;
        if found.as_ref().is_some_and(|found| is_there(&found.it)) || Instant::now() >= end {
            return Ok(found);
        }
        next.wait(end).await;
    }
}

/// The changes of an entity: heard of where it lives here, looked for where it lives elsewhere.
pub(crate) struct Changes {
    watch: actors::Watch,
    pause: Duration,
    last: Duration,
}

impl Changes {
    pub(crate) fn of(services: &Services, entity: EntityRef) -> Self {
        let host = services.directory.host();
        let here = host.term(actors::place::shard_of(entity.id)).is_some();
        Self {
            watch: host.watch(entity),
            // Also where it lives here, since it may move.
            pause: if here { LOOK_LAST } else { LOOK_FIRST },
            last: LOOK_LAST,
        }
    }

    /// As [`Changes::of`], for one who may wait for days.
    pub(crate) fn patiently(mut self, last: Duration) -> Self {
        self.last = last;
        self
    }

    /// To be called before looking, so that no change is missed between looking and waiting.
    pub(crate) fn next(&mut self) -> Change<'_> {
        let pause = self.pause;
        self.pause = (pause * 2).min(self.last);
        let mut changed = Box::pin(self.watch.changed());
        changed.as_mut().enable();
        Change { changed, pause }
    }
}

pub(crate) struct Change<'a> {
    changed: std::pin::Pin<Box<tokio::sync::futures::Notified<'a>>>,
    pause: Duration,
}

impl Change<'_> {
    /// Until it has changed, a while has passed, or `end` has come: look again.
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

/// The version that `If-Match` asks for; `None` where any will do.
///
/// # Errors
/// `invalid_request` where it is not the one `ETag` of an answer.
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
