//! The event stream of an allocation: its transitions, from its history, as server-sent events (WHATWG HTML, section 9.2).

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use chrono::{DateTime, Utc};
use domain::allocation::Allocation;
use domain::notification::Channel;
use domain::{EntityKind, EntityRef};
use futures::Stream;
use persistence::queries::HistoryRow;
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::Instant;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::visible;
use crate::api::request_context::UserRequest;
use crate::app_state::AppState;
use crate::app_state::read_model::EntityChanges;
use crate::auth::RevocableLogin;
use crate::http::error::ApiError;
use crate::http::request_body::Path;
use crate::limits::connection_quota::{ConnectionKind, QuotaSlot};
use crate::notifications::Subscription;

/// Comments keep idle connections open and show that the stream is alive.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// The longest pause between two polls of an allocation that another member owns.
const LONGEST_POLL_PAUSE: Duration = Duration::from_secs(1);
const ROWS_PER_READ: u32 = 200;

/// One server-sent event.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AllocationStreamEvent)]
pub(in crate::api) struct StreamedEvent {
    /// The allocation's generation; `Last-Event-ID` of the next request.
    #[schema(example = "3")]
    id: String,
    /// `transition`, or `history_removed`, which has no id.
    #[schema(example = "transition")]
    event: String,
    /// One `AllocationEvent` as JSON; of `history_removed` the allocation's id, and the generation `kept_from` of the first transition that is
    /// kept.
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
    /// The reason of the transition, as text.
    reason: String,
}

/// The header with which a stream resumes, for the API's description.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
pub(in crate::api) struct LastEventId {
    /// The id of the last event that was received
    #[param(rename = "Last-Event-ID", minimum = 0)]
    #[allow(dead_code)]
    id: Option<i64>,
}

/// The allocation's transitions as server-sent events.
///
/// Past transitions come first, each named `transition`. The stream resumes after `Last-Event-ID`. Where transitions after that one were
/// removed, since they were older than policy `retention.history_months`, it begins with an event named `history_removed`. It ends after
/// `released`, and when the access token ends or is revoked.
#[utoipa::path(
    get,
    path = "/",
    params(LastEventId),
    responses((
        status = 200,
        description = "The events; the data of each is one `AllocationEvent`.",
        content_type = "text/event-stream",
        body = StreamedEvent,
    )),
    extensions(("x-without-console" = json!("the shared stream reports changes of all allocations; the page shows the same history"))),
)]
pub(in crate::api) async fn events(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    visible(&app, &context, id).await?;
    let after = last_event_id(&headers)?;
    let most = app.environment.policy().int(ConnectionKind::Events.key(), &context.scopes(), app.environment.now());
    let place = app.connection_quotas.acquire(ConnectionKind::Events, &context.caller.user_id, most).await?;
    let left = (context.token_expires_at - Utc::now()).to_std().unwrap_or_default();
    let end = Instant::now() + left;
    let login = context.revocable;
    // The end of a browser session is announced to its user, so that the stream ends with it.
    let ends = match login {
        Some(RevocableLogin::BrowserSession(_)) => {
            Some(app.notifications.listen(vec![Channel::User(context.caller.user_id.clone())]).await)
        }
        Some(RevocableLogin::ServiceAccount(_)) | None => None,
    };
    let transitions = TransitionStream {
        app,
        id,
        after,
        end,
        login,
        ends,
        ready: VecDeque::new(),
        oldest_stored: None,
        over: false,
        _place: place,
    };
    let keep_alive = KeepAlive::new().interval(HEARTBEAT).text("waiting");
    Ok(Sse::new(futures::stream::unfold(transitions, TransitionStream::next)).keep_alive(keep_alive))
}

/// The version after which a stream resumes.
fn last_event_id(headers: &HeaderMap) -> Result<i64, ApiError> {
    let Some(value) = headers.get("last-event-id") else { return Ok(0) };
    let version = value.to_str().ok().and_then(|text| text.trim().parse().ok()).filter(|version| *version >= 0);
    version.ok_or_else(|| {
        ApiError::invalid_request("Header `Last-Event-ID` must be the id of an event of this stream.")
            .detail("field", "Last-Event-ID")
    })
}

struct TransitionStream {
    app: AppState,
    id: Uuid,
    /// The version that was sent last.
    after: i64,
    end: Instant,
    /// Checked again before each event: it may have been revoked since.
    login: Option<RevocableLogin>,
    /// The notifications of the user of a browser session.
    ends: Option<Subscription>,
    ready: VecDeque<HistoryRow>,
    /// The first generation that is stored, where earlier ones that the client does not have were removed.
    oldest_stored: Option<i64>,
    over: bool,
    _place: QuotaSlot,
}

impl TransitionStream {
    async fn next(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        let app = self.app.clone();
        let entity = EntityRef { kind: EntityKind::Allocation, id: self.id };
        let mut changes = EntityChanges::of(&app, entity).with_longest_pause(LONGEST_POLL_PAUSE);
        loop {
            if let Some(oldest) = self.oldest_stored.take() {
                let data = serde_json::json!({ "allocation_id": self.id, "kept_from": oldest });
                return Some((Ok(Event::default().event("history_removed").data(data.to_string())), self));
            }
            if let Some(row) = self.ready.pop_front() {
                self.over = row.to_state == "released";
                return Some((Ok(self.event(row)), self));
            }
            if self.over || Instant::now() >= self.end {
                return None;
            }
            let change = changes.next();
            // Where the history cannot be read, the stream ends, and the client reconnects with the last id.
            self.ready = self
                .read_new_transitions()
                .await
                .inspect_err(|error| tracing::warn!(%error, "an event stream ends"))
                .ok()?;
            let has_news = !self.ready.is_empty() || self.oldest_stored.is_some();
            if has_news && !self.is_still_authorized().await {
                return None;
            }
            if !has_news && !self.over {
                let notified = async {
                    match &mut self.ends {
                        Some(subscription) => subscription.notified_within(HEARTBEAT).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = change.wait(self.end) => {}
                    () = notified => {
                        if !self.is_still_authorized().await {
                            return None;
                        }
                    }
                    () = app.stopping.cancelled() => return None,
                }
            }
        }
    }

    async fn is_still_authorized(&self) -> bool {
        match &self.login {
            Some(login) => self.app.authenticator.is_still_authorized(login).await.unwrap_or(false),
            None => true,
        }
    }

    /// The changes of state after the last event, oldest first.
    async fn read_new_transitions(&mut self) -> Result<VecDeque<HistoryRow>, ApiError> {
        let remembered = self.app.directory.host().committed_state::<Allocation>(self.id);
        if remembered.is_some_and(|(_, version)| version <= self.after) {
            return Ok(VecDeque::new());
        }
        let (mut fresh, mut before, mut newest) = (VecDeque::new(), None, self.after);
        let mut oldest = None;
        loop {
            let page = self.app.reads.history(self.id, before, ROWS_PER_READ).await?;
            for row in page.items {
                if row.version <= self.after {
                    self.after = newest;
                    return Ok(fresh);
                }
                newest = newest.max(row.version);
                oldest = Some(row.version);
                if row.from_state.as_deref() != Some(row.to_state.as_str()) {
                    fresh.push_front(row);
                }
            }
            before = page.next;
            if before.is_none() {
                self.note_removed(oldest, newest).await?;
                return Ok(fresh);
            }
        }
    }

    /// Each version has one transition: where the one after the last that was sent is missing, it was removed. `oldest` is the first that is
    /// kept; without any, the stream goes on after the present version.
    async fn note_removed(&mut self, oldest: Option<i64>, newest: i64) -> Result<(), ApiError> {
        let sent = std::mem::replace(&mut self.after, newest);
        let oldest = match oldest {
            Some(oldest) => oldest,
            None => {
                let entity = EntityRef { kind: EntityKind::Allocation, id: self.id };
                let Some(row) = self.app.reads.entity(entity).await? else { return Ok(()) };
                // What is committed meanwhile was not removed: the next read has it.
                if !self.app.reads.history(self.id, None, 1).await?.items.is_empty() {
                    self.after = sent;
                    return Ok(());
                }
                self.over = row.state == "released" && row.version > sent;
                self.after = newest.max(row.version);
                row.version + 1
            }
        };
        self.oldest_stored = (oldest > sent + 1).then_some(oldest);
        Ok(())
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
        // It has plain fields only, so that serialization cannot fail.
        let data = serde_json::to_string(&transition).unwrap_or_default();
        Event::default().event("transition").id(id).data(data)
    }
}
