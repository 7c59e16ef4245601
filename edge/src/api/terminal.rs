//! Terminals (decisions 5): the tokens with which users connect to their allocations, and the terminal sessions.

use actors::AskError;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, TimeDelta, Utc};
use domain::allocation::{Allocation, Phase};
use domain::commit::Precondition;
use domain::recording::RecordingMode as PolicyMode;
use domain::tenant::{self, QuotaScopes, Tenant};
use domain::terminal_session::{self, CloseReason, Reply, Request, ShellExit, TerminalSession, TokenDigest};
use domain::{AllocationId, EntityKind, Machine as _, TerminalSessionId};
use persistence::queries::ListFilter;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::allocation::visible;
use super::request_context::{AdminRequest, RequestContext, UserRequest, replayed};
use super::request_fields::{ClaimId, ReasonBody};
use super::ssh_key::tenant_of;
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::rejection_response::not_answered;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, StoredEntity, find};
use crate::http::correlation::no_store;
use crate::http::error::{ApiError, Code};
use crate::http::pagination::{Items, Listing, Order, PageQuery, Position};
use crate::http::request_body::{self, JsonOrDefault, Path};
use crate::terminal::mint;

/// A bound above every limit of live sessions.
const ABOVE_ANY_LIMIT: u32 = 1000;

/// In which a client connects with a token that it has just got.
const TIME_TO_CONNECT: TimeDelta = TimeDelta::seconds(5);

/// The session that a token is for.
#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewTerminalToken {
    /// A session of this allocation that is to be connected to again; a new one where it is left out.
    session_id: Option<Uuid>,
}

/// A token that was made: the only time that it is shown.
#[derive(Serialize, ToSchema)]
pub(super) struct IssuedTerminalToken {
    /// Offer it as the subprotocol `token.<token>`, beside `gpu.terminal.v1`. It lets one connection in.
    token: String,
    session_id: Uuid,
    /// Until when it can be used.
    expires_at: DateTime<Utc>,
    websocket_url: String,
    recording: RecordingMode,
}

/// Whether what a terminal shows is recorded. What is typed never is, unless the terminal shows it.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RecordingMode {
    Off,
    /// Recorded as far as possible; the recording marks gaps.
    BestEffort,
    /// All of it: the terminal waits where it cannot be recorded.
    Strict,
}

impl From<PolicyMode> for RecordingMode {
    fn from(mode: PolicyMode) -> Self {
        match mode {
            PolicyMode::Off => Self::Off,
            PolicyMode::BestEffort => Self::BestEffort,
            PolicyMode::Strict => Self::Strict,
        }
    }
}

/// The states of a terminal session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
#[schema(as = TerminalSessionState)]
pub(super) enum StateName {
    Opened,
    Attached,
    Detached,
    Closed,
}

impl StateName {
    const fn name(self) -> &'static str {
        self.into_str()
    }
}

/// One shell on an allocation's machine, and who is connected to it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = TerminalSession)]
pub(super) struct TerminalSessionView {
    id: Uuid,
    allocation_id: Uuid,
    node_id: Uuid,
    user_id: String,
    state: StateName,
    /// Why it is closed: `exited`, `failed`, `never_attached`, `killed`, `allocation_ended`, `lifetime`, `detached_expired`, `displaced`,
    /// `ended_by_user` or `logged_out`; null while it is not.
    close_reason: Option<String>,
    /// How its program ended; null where it did not by itself.
    exit: Option<TerminalExitView>,
    /// How many connections were let in.
    attachments: u32,
    recording: RecordingMode,
    opened_at: DateTime<Utc>,
    /// Since when no client is connected; null while one is.
    detached_at: Option<DateTime<Utc>>,
    /// When it is closed: at the end of its lifetime, or earlier where no client reconnects.
    ends_at: DateTime<Utc>,
    closed_at: Option<DateTime<Utc>>,
}

/// How a program ended: by itself with a code, or by a signal.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = TerminalExit)]
pub(super) struct TerminalExitView {
    code: Option<i32>,
    signal: Option<i32>,
}

/// A filter of sessions.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TerminalSessionFilter {
    state: Option<StateName>,
    /// Whose.
    user_id: Option<ClaimId>,
    /// The order of the list; the oldest first where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    order: Option<Order>,
}

/// No filter but the page's.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Unfiltered {}

/// Makes a token that opens a terminal on your active allocation.
///
/// It lets one connection in, once, for a short time. With `session_id` the connection goes on with that session: with the output that it
/// missed, as far as that is stored, and in place of a connection that is still open. The response is a secret: it is not stored, so a
/// repetition makes another token whatever its `Idempotency-Key`.
#[utoipa::path(
    post,
    path = "/",
    request_body(content = NewTerminalToken, description = "May be left out."),
    responses((status = 201, description = "The token. `Cache-Control: no-store`.", body = IssuedTerminalToken)),
    extensions(("x-without-console" = json!("the document of the terminal asks for its tokens"))),
)]
pub(super) async fn issue_token(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    JsonOrDefault(new): JsonOrDefault<NewTerminalToken>,
) -> Result<Response, ApiError> {
    // Read from the store: the commit requires the version that is read here.
    let allocation = find::<Allocation>(&app, id).await?;
    let allocation = allocation.filter(|found| found.it.asked.owner.user_id == context.caller.user_id);
    let allocation = allocation.ok_or_else(|| ApiError::not_found("allocation"))?;
    let Phase::Active { node_id, .. } = allocation.it.phase else { return Err(not_active(&allocation)) };
    let active = Precondition { entity: id, version: allocation.version };
    let session = match new.session_id {
        Some(session) => of_allocation(&app, &context, session, allocation.it.id).await?,
        None => {
            let session = context.new_id();
            reserve_session(&app, &context, allocation.it.id, TerminalSessionId(session)).await?;
            session
        }
    };
    let (token, hash) = mint(session);
    let token_sha256 = TokenDigest(hash.to_bytes());
    let command = match new.session_id {
        Some(_) => Request::IssueToken { token_sha256, active },
        None => Request::Open { allocation_id: allocation.it.id, node_id, token_sha256, active },
    };
    let answered = context.ask_unstored::<TerminalSession>(session, command).await?;
    let Reply::Issued { expires_at, recording } = answered.reply else { return Err(unexpected()) };
    let issued = IssuedTerminalToken {
        token: token.expose_secret().to_owned(),
        session_id: session,
        expires_at,
        websocket_url: app.addresses.terminal_url.clone(),
        recording: recording.mode.into(),
    };
    Ok((StatusCode::CREATED, no_store(), Json(issued)).into_response())
}

fn not_active(allocation: &StoredEntity<Allocation>) -> ApiError {
    let state = allocation.it.state();
    ApiError::new(
        Code::StateConflict,
        format!("An allocation that is {state} has no terminal; only an active one has."),
    )
    .detail("state", state)
}

/// The session, where it belongs to the caller and to this allocation.
async fn of_allocation(
    app: &AppState,
    context: &RequestContext,
    session: Uuid,
    allocation: AllocationId,
) -> Result<Uuid, ApiError> {
    let found = find::<TerminalSession>(app, session).await?;
    let own = |found: &StoredEntity<TerminalSession>| {
        found.it.allocation_id == allocation && found.it.owner.user_id == context.caller.user_id
    };
    let found = found.filter(own).ok_or_else(|| ApiError::not_found("terminal session"))?;
    Ok(found.it.id.0)
}

/// Reserves a slot in the quota of policy `terminal.sessions_per_allocation`. Open sessions are read here; the tenant entity knows those
/// that are being opened, and it decides. Where no slot is free, a session without a client makes room.
async fn reserve_session(
    app: &AppState,
    context: &RequestContext,
    allocation_id: AllocationId,
    session: TerminalSessionId,
) -> Result<(), ApiError> {
    let open = live_sessions(app, allocation_id, &context.caller.user_id).await?;
    let mut there: BTreeSet<_> = open.iter().map(|stored| stored.it.id).collect();
    let Err(refused) = expect_session(context, allocation_id, session, &there, BTreeSet::new()).await else {
        return Ok(());
    };
    if refused.code() != Code::StateConflict {
        return Err(refused);
    }
    // The tenant holds a slot for a minute for each session that was opened, also for one that has closed since.
    let mut over = expected_but_closed(app, context, allocation_id).await?;
    if over.is_empty() {
        over.extend(displace_oldest(context, &open, app.environment.now()).await?);
        // Read again: simultaneous requests have made room, too.
        let open = live_sessions(app, allocation_id, &context.caller.user_id).await?;
        there = open.iter().map(|stored| stored.it.id).filter(|id| !over.contains(id)).collect();
    }
    if over.is_empty() { Err(refused) } else { expect_session(context, allocation_id, session, &there, over).await }
}

async fn expect_session(
    context: &RequestContext,
    allocation_id: AllocationId,
    session: TerminalSessionId,
    there: &BTreeSet<TerminalSessionId>,
    over: BTreeSet<TerminalSessionId>,
) -> Result<(), ApiError> {
    let caller = &context.caller;
    let scopes =
        QuotaScopes { org_id: caller.org_id.clone(), project_id: caller.project_id.clone(), plan: caller.plan.clone() };
    let (user_id, there) = (caller.user_id.clone(), there.clone());
    let command = tenant::Request::ExpectTerminal { user_id, allocation_id, session, there, over, scopes };
    context.ask_unstored::<Tenant>(tenant_of(context), command).await?;
    Ok(())
}

/// The sessions for which the caller's tenant still holds a slot although they are closed.
async fn expected_but_closed(
    app: &AppState,
    context: &RequestContext,
    allocation_id: AllocationId,
) -> Result<BTreeSet<TerminalSessionId>, ApiError> {
    let mut over = BTreeSet::new();
    let tenant = find::<Tenant>(app, tenant_of(context)).await?;
    let expected = tenant.and_then(|mut tenant| tenant.it.expected_terminals.remove(&allocation_id));
    for session in expected.unwrap_or_default().into_keys() {
        let found = find::<TerminalSession>(app, session.0).await?;
        if found.is_some_and(|found| found.it.closed().is_some()) {
            over.insert(session);
        }
    }
    Ok(over)
}

/// Closes a session without a client. `None` where each has one.
async fn displace_oldest(
    context: &RequestContext,
    open: &[StoredEntity<TerminalSession>],
    now: DateTime<Utc>,
) -> Result<Option<TerminalSessionId>, ApiError> {
    for session in displaceable(open, now) {
        match context.try_ask_unstored::<TerminalSession>(session.0, Request::Displace).await? {
            Ok(_) => return Ok(Some(session)),
            // A client has just connected to it: try the next one.
            Err(AskError::Rejected(terminal_session::Rejection::NotDetached)) => {}
            Err(error) => return Err(not_answered(error)),
        }
    }
    Ok(None)
}

/// The sessions without a client, in the order in which they make room: those whose token a client had time to use and did not, which holds no
/// place; then detached ones, longest first; at last those whose token was issued a moment ago, which a client may be about to use.
fn displaceable(open: &[StoredEntity<TerminalSession>], now: DateTime<Utc>) -> Vec<TerminalSessionId> {
    let mut ranked: Vec<_> = open
        .iter()
        .filter_map(|stored| {
            let it = &stored.it;
            let (rank, since) = match it.phase {
                terminal_session::Phase::Opened { .. } if now - it.opened_at >= TIME_TO_CONNECT => (0, it.opened_at),
                terminal_session::Phase::Detached { since, .. } => (1, since),
                terminal_session::Phase::Opened { .. } => (2, it.opened_at),
                terminal_session::Phase::Attached { .. } | terminal_session::Phase::Closed { .. } => return None,
            };
            Some((rank, since, it.id))
        })
        .collect();
    ranked.sort_unstable();
    ranked.into_iter().map(|(_, _, id)| id).collect()
}

const fn detached_at(session: &TerminalSession) -> Option<DateTime<Utc>> {
    match session.phase {
        terminal_session::Phase::Detached { since, .. } => Some(since),
        terminal_session::Phase::Opened { .. }
        | terminal_session::Phase::Attached { .. }
        | terminal_session::Phase::Closed { .. } => None,
    }
}

/// An allocation's live sessions, oldest first. Its user has opened all of them.
async fn live_sessions(
    app: &AppState,
    allocation: AllocationId,
    owner: &str,
) -> Result<Vec<StoredEntity<TerminalSession>>, ApiError> {
    let states = terminal_session::Phase::LIVE.map(str::to_owned).into();
    let own = ListFilter { owner: Some(owner.to_owned()), states, ..ListFilter::default() };
    let rows = app.reads.list(EntityKind::TerminalSession, &own, None, ABOVE_ANY_LIMIT).await?.items;
    let sessions = rows.iter().filter_map(StoredEntity::<TerminalSession>::of_listed);
    Ok(sessions.filter(|stored| stored.it.allocation_id == allocation).collect())
}

/// The position of a session in a list. Page tokens have microseconds.
const fn list_position(session: &StoredEntity<TerminalSession>) -> (i64, Uuid) {
    (session.created_at.timestamp_micros(), session.it.id.0)
}

/// The terminal sessions of an allocation that are not over, oldest first: each can be connected to again.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery),
    responses((status = 200, description = "A page of sessions.", body = Items<TerminalSessionView>)),
)]
pub(super) async fn list_open(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    listing: Listing<Unfiltered>,
) -> Result<Json<Items<TerminalSessionView>>, ApiError> {
    let allocation = visible(&app, &context, id).await?;
    let page = listing.page("terminal-sessions-of-allocation", &id.to_string(), Order::OldestFirst)?;
    let mut open = live_sessions(&app, allocation.it.id, &allocation.it.asked.owner.user_id).await?;
    let after = page.after.map(|at| (at.created_at.timestamp_micros(), at.id));
    open.retain(|session| after.is_none_or(|after| list_position(session) > after));
    open.truncate(usize::try_from(page.rows_to_read()).unwrap_or(usize::MAX));
    let position =
        |stored: &StoredEntity<TerminalSession>| Position { created_at: stored.created_at, id: stored.it.id.0 };
    Ok(Json(page.answer(open, position, |stored| view(&stored.it))))
}

/// Ends a terminal session of yours: its connection, and its shell on the node. One that is over stays as it is.
#[utoipa::path(
    delete,
    path = "/",
    responses((status = 200, description = "The session, which is over.", body = TerminalSessionView)),
)]
pub(super) async fn end(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path((id, session_id)): Path<(Uuid, Uuid)>,
) -> Result<Json<TerminalSessionView>, ApiError> {
    let session = of_allocation(&app, &context, session_id, AllocationId(id)).await?;
    let answered = context.prioritized().ask_unstored::<TerminalSession>(session, Request::EndByUser).await?;
    let Reply::Session { session } = answered.reply else { return Err(unexpected()) };
    Ok(Json(view(&session)))
}

/// Everybody's terminal sessions, ended ones too.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, TerminalSessionFilter),
    responses((status = 200, description = "A page of sessions.", body = Items<TerminalSessionView>)),
)]
pub(super) async fn list(
    _: AdminRequest,
    State(app): State<AppState>,
    listing: Listing<TerminalSessionFilter>,
) -> Result<Json<Items<TerminalSessionView>>, ApiError> {
    let owner = listing.filter.user_id.as_deref().map(str::to_owned);
    let order = listing.filter.order.unwrap_or_default();
    let page = listing.page("terminal-sessions", owner.as_deref().unwrap_or_default(), order)?;
    let states = listing.filter.state.map(|state| state.name().to_owned()).into_iter().collect();
    let filter = ListFilter { owner, states, ..ListFilter::default() };
    let rows = read_model::list::<TerminalSession>(&app, &filter, &page).await?;
    Ok(Json(read_model::to_page(&page, rows, |stored| view(&stored.it))))
}

/// One terminal session.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The session.", body = TerminalSessionView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get(
    _: AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<TerminalSessionView>, ApiError> {
    let found = find::<TerminalSession>(&app, id).await?;
    found.map(|stored| Json(view(&stored.it))).ok_or_else(|| ApiError::not_found("terminal session"))
}

/// Closes a terminal session at once: its connection, and its shell on the node.
///
/// The shell and its process group get SIGHUP, and SIGKILL where they have not ended 2 s later. Background processes that ignore SIGHUP
/// run on until the allocation is released.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReasonBody,
    responses((status = 200, description = "The session, which is over.", body = TerminalSessionView)),
)]
pub(super) async fn kill(
    AdminRequest(context): AdminRequest,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(why)): Idempotent<request_body::Json<ReasonBody>>,
) -> Result<Response, ApiError> {
    let command = Request::Kill { reason: why.reason.to_string() };
    let answered = context.prioritized().ask::<TerminalSession>(id, command).await?;
    let replayed = replayed(&answered);
    let Reply::Session { session } = answered.reply else { return Err(unexpected()) };
    Ok((StatusCode::OK, replayed, Json(view(&session))).into_response())
}

fn unexpected() -> ApiError {
    ApiError::internal("the terminal session's machine answered another question")
}

fn view(session: &TerminalSession) -> TerminalSessionView {
    use domain::terminal_session::Phase as P;
    let (state, closed_at) = match &session.phase {
        P::Opened { .. } => (StateName::Opened, None),
        P::Attached { .. } => (StateName::Attached, None),
        P::Detached { .. } => (StateName::Detached, None),
        P::Closed { at, .. } => (StateName::Closed, Some(*at)),
    };
    let exit = match session.closed() {
        Some(CloseReason::Exited { exit: ShellExit::Code(code) }) => {
            Some(TerminalExitView { code: Some(*code), signal: None })
        }
        Some(CloseReason::Exited { exit: ShellExit::Signal(signal) }) => {
            Some(TerminalExitView { code: None, signal: Some(*signal) })
        }
        Some(_) | None => None,
    };
    TerminalSessionView {
        id: session.id.0,
        allocation_id: session.allocation_id.0,
        node_id: session.node_id.0,
        user_id: session.owner.user_id.to_string(),
        state,
        close_reason: session.closed().map(|reason| reason.code().to_owned()),
        exit,
        attachments: session.attachments,
        recording: session.recording.mode.into(),
        opened_at: session.opened_at,
        detached_at: detached_at(session),
        ends_at: session.deadline().map_or(session.ends_at, |deadline| deadline.at),
        closed_at,
    }
}
