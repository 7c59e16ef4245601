//! An allocation's transitions as they happen: server-sent events (WHATWG HTML, section 9.2) out of its history.

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use chrono::{DateTime, Utc};
use domain::allocation::Allocation;
use domain::{EntityRef, Kind};
use futures::Stream;
use persistence::read::HistoryRow;
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::Instant;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{last_event_id, visible};
use crate::api::asking::ByUser;
use crate::api::stored::Changes;
use crate::auth::Acting;
use crate::body::Path;
use crate::error::ApiError;
use crate::places::{Open, Place};
use crate::services::Services;

/// Comments that keep idle connections open, and show that the stream lives.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// The longest pause between two looks at an allocation that lives on another member.
const LOOK_LAST: Duration = Duration::from_secs(1);
const ROWS_AT_ONCE: u32 = 200;

/// One server-sent event.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AllocationStreamEvent)]
pub(in crate::api) struct Streamed {
    /// The allocation's generation; `Last-Event-ID` of the next request.
    #[schema(example = "3")]
    id: String,
    /// Always `transition`.
    #[schema(example = "transition")]
    event: String,
    /// One `AllocationEvent` as JSON.
    #[schema(content_media_type = "application/json")]
    data: String,
}

/// The `data` of one event of an allocation's stream; its `id` is the generation.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AllocationEvent)]
pub(in crate::api) struct Transition {
    allocation_id: Uuid,
    generation: i64,
    at: DateTime<Utc>,
    /// Null for the first.
    from_state: Option<String>,
    state: String,
    /// What moved it, in words.
    reason: String,
}

/// The allocation's transitions as server-sent events.
///
/// Those of the past come first, each named `transition`. The stream goes on after `Last-Event-ID`. It ends after `released`, and
/// when the access token ends or is revoked.
#[utoipa::path(
    get,
    path = "/",
    params(
        ("id" = Uuid, Path, description = "The allocation's id"),
        ("Last-Event-ID" = Option<i64>, Header, description = "The id of the last event that was received", minimum = 0),
    ),
    responses((
        status = 200,
        description = "The events; the data of each is one `AllocationEvent`.",
        content_type = "text/event-stream",
        body = Streamed,
    )),
)]
pub(in crate::api) async fn events(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    visible(&services, &asking, id).await?;
    let after = last_event_id(&headers)?;
    let most = services.world.policy().int(Open::Events.key(), &asking.scopes(), services.world.now());
    let place = services.places.take(Open::Events, &asking.caller.user_id, most).await?;
    let left = (asking.token_expires_at - Utc::now()).to_std().unwrap_or_default();
    let end = Instant::now() + left;
    let acting = asking.acting;
    let telling = Telling { services, id, after, end, acting, ready: VecDeque::new(), over: false, _place: place };
    let keep_alive = KeepAlive::new().interval(HEARTBEAT).text("waiting");
    Ok(Sse::new(futures::stream::unfold(telling, Telling::next)).keep_alive(keep_alive))
}

struct Telling {
    services: Services,
    id: Uuid,
    /// The version that was told last.
    after: i64,
    end: Instant,
    /// Looked at again before anything is told: the key may have been revoked since.
    acting: Option<Acting>,
    ready: VecDeque<HistoryRow>,
    over: bool,
    _place: Place,
}

impl Telling {
    async fn next(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        let services = self.services.clone();
        let entity = EntityRef { kind: Kind::Allocation, id: self.id };
        let mut changes = Changes::of(&services, entity).patiently(LOOK_LAST);
        loop {
            if let Some(row) = self.ready.pop_front() {
                self.over = row.to_state == "released";
                return Some((Ok(self.event(row)), self));
            }
            if self.over || Instant::now() >= self.end {
                return None;
            }
            let change = changes.next();
            // Where the history cannot be read now, the client comes again with the last id.
            self.ready =
                self.unseen().await.inspect_err(|error| tracing::warn!(%error, "an event stream ends")).ok()?;
            if !self.ready.is_empty() && !self.may_hear().await {
                return None;
            }
            if self.ready.is_empty() {
                tokio::select! {
                    () = change.wait(self.end) => {}
                    () = services.stopping.cancelled() => return None,
                }
            }
        }
    }

    async fn may_hear(&self) -> bool {
        match &self.acting {
            Some(acting) => self.services.authenticator.still_acts(acting).await.unwrap_or(false),
            None => true,
        }
    }

    /// What came after the last event: the changes of state, oldest first.
    async fn unseen(&mut self) -> Result<VecDeque<HistoryRow>, ApiError> {
        let remembered = self.services.directory.host().remembered::<Allocation>(self.id);
        if remembered.is_some_and(|(_, version)| version <= self.after) {
            return Ok(VecDeque::new());
        }
        let (mut unseen, mut before, mut newest) = (VecDeque::new(), None, self.after);
        loop {
            let page = self.services.reads.history(self.id, before, ROWS_AT_ONCE).await?;
            for row in page.items {
                if row.version <= self.after {
                    self.after = newest;
                    return Ok(unseen);
                }
                newest = newest.max(row.version);
                if row.from_state.as_deref() != Some(row.to_state.as_str()) {
                    unseen.push_front(row);
                }
            }
            before = page.next;
            if before.is_none() {
                self.after = newest;
                return Ok(unseen);
            }
        }
    }

    fn event(&self, row: HistoryRow) -> Event {
        let id = row.version.to_string();
        let transition = Transition {
            allocation_id: self.id,
            generation: row.version,
            at: row.at,
            from_state: row.from_state,
            state: row.to_state,
            reason: row.why,
        };
        // Plain fields only: it can be written.
        let data = serde_json::to_string(&transition).unwrap_or_default();
        Event::default().event("transition").id(id).data(data)
    }
}
