//! Recordings of terminal sessions (decisions 5, *Terminal*), for the sessions' owners and for administrators.

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::terminal_session::{Reply, Request, TerminalSession};
use domain::{AllocationId, TerminalSessionId};
use futures::stream::{self, Stream};
use persistence::Recordings;
use persistence::queries::Cursor;
use persistence::recordings::{Recording, RecordingError, RecordingFilter};
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::allocation::visible;
use super::request_context::{AdminRequest, RequestContext, UserRequest};
use super::request_fields::ClaimId;
use crate::app_state::AppState;
use crate::app_state::read_model::find;
use crate::http::correlation::no_store;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, OrderQuery, Page, PageQuery, Position};
use crate::http::request_body::Path;
use crate::terminal::recording::asciicast::{Cast, MEDIA_TYPE};

/// The number of chunks that a download has in memory.
const CHUNKS_IN_MEMORY: u32 = 4;

/// The recorded output of a terminal session, with its times. Input is not in it, unless the terminal echoed it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Recording)]
pub(super) struct RecordingView {
    /// The terminal session's id, which is the recording's too.
    id: Uuid,
    allocation_id: Uuid,
    node_id: Uuid,
    user_id: String,
    /// Whether it is complete: the node has reported the end.
    complete: bool,
    /// Its stored size, in bytes.
    bytes: u64,
    /// Output that could not be recorded. Where it is missing, the recording has a marker.
    lost_bytes: u64,
    /// From the session's beginning to the last that was recorded.
    duration_ms: u64,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

/// A filter of recordings.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RecordingQuery {
    /// Whose.
    user_id: Option<ClaimId>,
    /// Recordings of this allocation's sessions.
    allocation_id: Option<Uuid>,
    /// The order of the list; the oldest first where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    order: Option<Order>,
}

/// The recordings of an allocation's terminal sessions.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, OrderQuery),
    responses((status = 200, description = "A page of recordings.", body = Items<RecordingView>)),
)]
pub(super) async fn of_allocation(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    listing: Listing<OrderQuery>,
) -> Result<Json<Items<RecordingView>>, ApiError> {
    visible(&app, &context, id).await?;
    let order = listing.filter.order.unwrap_or_default();
    let page = listing.page("recordings-of-allocation", &id.to_string(), order)?;
    let filter = RecordingFilter { allocation: Some(AllocationId(id)), ..RecordingFilter::default() };
    page_of(&app, &filter, &page).await
}

/// Everybody's recordings.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, RecordingQuery),
    responses((status = 200, description = "A page of recordings.", body = Items<RecordingView>)),
)]
pub(super) async fn list(
    _: AdminRequest,
    State(app): State<AppState>,
    listing: Listing<RecordingQuery>,
) -> Result<Json<Items<RecordingView>>, ApiError> {
    let page = listing.page("recordings", "", listing.filter.order.unwrap_or_default())?;
    let filter = RecordingFilter {
        owner: listing.filter.user_id.as_deref().map(str::to_owned),
        allocation: listing.filter.allocation_id.map(AllocationId),
        ..RecordingFilter::default()
    };
    page_of(&app, &filter, &page).await
}

async fn page_of(
    app: &AppState,
    filter: &RecordingFilter,
    page: &Page,
) -> Result<Json<Items<RecordingView>>, ApiError> {
    let after = page.after.map(|at| Cursor { created_at: at.created_at, id: at.id });
    let filter = RecordingFilter { is_newest_first: page.order == Order::NewestFirst, ..filter.clone() };
    let rows = app.trust.secrets.recordings().list(&filter, after, page.rows_to_read()).await?;
    let position = |row: &Recording| Position { created_at: row.created_at, id: row.session.0 };
    Ok(Json(page.answer(rows, position, view)))
}

/// The recording of a terminal session, without its content.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The recording, without what it shows.", body = RecordingView)),
    extensions(("x-without-console" = json!("the document of the recording reads it"))),
)]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<RecordingView>, ApiError> {
    let (_, recording) = own(&app, &context, id).await?;
    Ok(Json(view(recording)))
}

/// The recording, to play it back: asciicast v2, as asciinema and its player read it.
///
/// That you read it is audited first. A recording that still grows ends where it is at this moment. Markers (`m`) stand where something is
/// missing. A service account reads none: what a terminal shows may be a secret.
#[utoipa::path(
    get,
    path = "/",
    responses((
        status = 200,
        description = "The recording, one JSON value a line. `Cache-Control: no-store`.",
        content_type = "application/x-asciicast",
        body = String,
    )),
    extensions(("x-without-console" = json!("the document of the recording reads it"))),
)]
pub(super) async fn download(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Response, ApiError> {
    let (session, _) = own(&app, &context, id).await?;
    let answered = context.ask_unstored::<TerminalSession>(id, Request::ReadRecording).await?;
    let Reply::Done = answered.reply else {
        return Err(ApiError::internal("the terminal session's machine answered another question"));
    };
    let title = format!("terminal session {id} on allocation {}", session.allocation_id);
    let download_state = RecordingDownload {
        recordings: app.trust.secrets.recordings(),
        session: session.id,
        next: 0,
        cast: Some(Cast::new(session.opened_at, title)),
    };
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    let name = format!("attachment; filename=\"{id}.cast\"");
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::try_from(name).map_err(ApiError::internal)?);
    Ok((headers, no_store(), Body::from_stream(download_state.lines())).into_response())
}

/// The recording, where it is the caller's own or the caller is an administrator; `not_found` otherwise.
async fn own(app: &AppState, context: &RequestContext, id: Uuid) -> Result<(TerminalSession, Recording), ApiError> {
    let none = || ApiError::not_found("recording");
    let found = find::<TerminalSession>(app, id).await?;
    let may = |session: &TerminalSession| context.is_admin() || session.owner.user_id == context.caller.user_id;
    let session = found.map(|stored| stored.it).filter(|session| may(session) && session.has_recording());
    let session = session.ok_or_else(none)?;
    let recording = app.trust.secrets.recordings().get(TerminalSessionId(id)).await?.ok_or_else(none)?;
    Ok((session, recording))
}

fn view(recording: Recording) -> RecordingView {
    RecordingView {
        id: recording.session.0,
        allocation_id: recording.allocation.0,
        node_id: recording.node.0,
        user_id: recording.owner,
        complete: recording.ended,
        bytes: recording.bytes,
        lost_bytes: recording.lost_bytes,
        duration_ms: recording.micros / 1000,
        created_at: recording.created_at,
        updated_at: recording.updated_at,
    }
}

/// A download in progress. It reads a few chunks at a time, as fast as the client takes them.
struct RecordingDownload {
    recordings: Recordings,
    session: TerminalSessionId,
    next: u32,
    /// `None` once the whole recording is written.
    cast: Option<Cast>,
}

impl RecordingDownload {
    fn lines(self) -> impl Stream<Item = Result<Bytes, RecordingError>> {
        stream::try_unfold(self, |mut download_state| async move {
            let Some(cast) = &mut download_state.cast else { return Ok(None) };
            let read =
                download_state.recordings.read(download_state.session, download_state.next, CHUNKS_IN_MEMORY).await;
            let chunks = read.inspect_err(|error| {
                // The client sees a broken connection, and not a recording that seems complete.
                tracing::warn!(%error, "a recording cannot be read to its end");
            })?;
            let mut lines: String = chunks.iter().map(|chunk| cast.write(chunk.expose_secret())).collect();
            download_state.next = download_state.next.saturating_add(CHUNKS_IN_MEMORY);
            if u32::try_from(chunks.len()).unwrap_or(u32::MAX) < CHUNKS_IN_MEMORY {
                lines += &cast.finish();
                download_state.cast = None;
            }
            Ok(Some((Bytes::from(lines), download_state)))
        })
    }
}
