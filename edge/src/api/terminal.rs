//! Terminals (decisions 5): the tokens with which users connect to what they rent, and the sessions, for administrators.

use actors::AskError;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::allocation::{Allocation, Phase};
use domain::commit::Footing;
use domain::recording::Mode;
use domain::tenant::{self, AskedScopes, Tenant};
use domain::terminal_session::{self, CloseReason, Command, Digest, Exit, Reply, TerminalSession};
use domain::{AllocationId, Kind, Machine as _, TerminalSessionId};
use persistence::read::ListFilter;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::allocation::visible;
use super::asking::{Asking, ByAdmin, ByUser, replayed};
use super::field::{Because, ClaimId};
use super::ssh_key::tenant_of;
use super::stored::{self, Stored, find};
use crate::answer::not_answered;
use crate::body::{self, JsonOrDefault, Path};
use crate::correlation::no_store;
use crate::error::{ApiError, Code};
use crate::idempotency::keyed::Once;
use crate::page::{Items, Listing, Order, PageQuery, Position};
use crate::services::Services;
use crate::terminal::mint;

/// More live sessions than any limit admits.
const ALL: u32 = 1000;

/// Which session a token is for.
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
    /// As far as that can be done; where something is missing, the recording says so.
    BestEffort,
    /// All of it: the terminal waits where it cannot be recorded.
    Strict,
}

impl From<Mode> for RecordingMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Off => Self::Off,
            Mode::BestEffort => Self::BestEffort,
            Mode::Strict => Self::Strict,
        }
    }
}

/// The states of a terminal session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
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
        match self {
            Self::Opened => "opened",
            Self::Attached => "attached",
            Self::Detached => "detached",
            Self::Closed => "closed",
        }
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
    /// Why it is over: `exited`, `failed`, `never_attached`, `killed`, `allocation_ended`,
    /// `lifetime`, `detached_expired`, `displaced` or `ended_by_user`; null while it is not.
    close_reason: Option<String>,
    /// How its program ended; null where it did not by itself.
    exit: Option<TerminalExitView>,
    /// How many connections were let in.
    attachments: u32,
    recording: RecordingMode,
    opened_at: DateTime<Utc>,
    /// Since when nobody is connected; null while somebody is.
    detached_at: Option<DateTime<Utc>>,
    /// When it is closed: at the end of its lifetime, or earlier where nobody comes back to it.
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

/// Which sessions.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TerminalSessionFilter {
    state: Option<StateName>,
    /// Whose.
    user_id: Option<ClaimId>,
}

/// No filter but the page's.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Unfiltered {}

/// Makes a token that opens a terminal on your active allocation.
///
/// It lets one connection in, once, for a short time. With `session_id` the connection goes on with that session: with the output that
/// it missed, as far as that is kept, and in place of a connection that is still there. The answer is a secret: it is stored nowhere, so a
/// repetition makes another token whatever its `Idempotency-Key`.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The allocation's id")),
    request_body(content = NewTerminalToken, description = "May be left out."),
    responses((status = 201, description = "The token. `Cache-Control: no-store`.", body = IssuedTerminalToken)),
)]
pub(super) async fn issue_token(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    JsonOrDefault(new): JsonOrDefault<NewTerminalToken>,
) -> Result<Response, ApiError> {
    // From the store: the commit rests on the version that is read here.
    let allocation = find::<Allocation>(&services, id).await?;
    let allocation = allocation.filter(|found| found.it.asked.user_id == asking.caller.user_id);
    let allocation = allocation.ok_or_else(|| ApiError::not_found("allocation"))?;
    let Phase::Active { node_id, .. } = allocation.it.phase else { return Err(not_active(&allocation)) };
    let active = Footing { entity: id, version: allocation.version };
    let session = match new.session_id {
        Some(session) => of_allocation(&services, &asking, session, allocation.it.id).await?,
        None => {
            let session = asking.id_of_new();
            take_place(&services, &asking, allocation.it.id, TerminalSessionId(session)).await?;
            session
        }
    };
    let (token, hash) = mint(session);
    let token_sha256 = Digest(hash.to_bytes());
    let command = match new.session_id {
        Some(_) => Command::IssueToken { token_sha256, active },
        None => Command::Open { allocation_id: allocation.it.id, node_id, token_sha256, active },
    };
    let answered = asking.ask_unstored::<TerminalSession>(session, command).await?;
    let Reply::Issued { expires_at, recording } = answered.reply else { return Err(unexpected()) };
    let issued = IssuedTerminalToken {
        token: token.expose_secret().to_owned(),
        session_id: session,
        expires_at,
        websocket_url: services.addresses.terminal_url.clone(),
        recording: recording.mode.into(),
    };
    Ok((StatusCode::CREATED, no_store(), Json(issued)).into_response())
}

fn not_active(allocation: &Stored<Allocation>) -> ApiError {
    let state = allocation.it.state();
    ApiError::new(
        Code::StateConflict,
        format!("An allocation that is {state} has no terminal; only an active one has."),
    )
    .detail("state", state)
}

/// The session, where it is the caller's and of this allocation.
async fn of_allocation(
    services: &Services,
    asking: &Asking,
    session: Uuid,
    allocation: AllocationId,
) -> Result<Uuid, ApiError> {
    let found = find::<TerminalSession>(services, session).await?;
    let own = |found: &Stored<TerminalSession>| {
        found.it.allocation_id == allocation && found.it.owner.user_id == asking.caller.user_id
    };
    let found = found.filter(own).ok_or_else(|| ApiError::not_found("terminal session"))?;
    Ok(found.it.id.0)
}

/// Takes a place among the sessions that policy `terminal.sessions_per_allocation` admits. Those that are there are read; those that are
/// being opened the tenant's mailbox knows, and it decides. Where there is none, the session that is detached for longest makes room.
async fn take_place(
    services: &Services,
    asking: &Asking,
    allocation_id: AllocationId,
    session: TerminalSessionId,
) -> Result<(), ApiError> {
    let open = open_on(services, allocation_id, &asking.caller.user_id).await?;
    let mut there: BTreeSet<_> = open.iter().map(|stored| stored.it.id).collect();
    let Err(refused) = expect_place(asking, allocation_id, session, &there, BTreeSet::new()).await else {
        return Ok(());
    };
    if refused.code() != Code::StateConflict {
        return Err(refused);
    }
    // A place is kept for a minute for each session that was opened, also for one that is over by now.
    let mut over = expected_and_over(services, asking, allocation_id).await?;
    if over.is_empty() {
        over.extend(displace_oldest(asking, &open).await?);
        there.retain(|id| !over.contains(id));
    }
    if over.is_empty() { Err(refused) } else { expect_place(asking, allocation_id, session, &there, over).await }
}

async fn expect_place(
    asking: &Asking,
    allocation_id: AllocationId,
    session: TerminalSessionId,
    there: &BTreeSet<TerminalSessionId>,
    over: BTreeSet<TerminalSessionId>,
) -> Result<(), ApiError> {
    let caller = &asking.caller;
    let scopes =
        AskedScopes { org_id: caller.org_id.clone(), project_id: caller.project_id.clone(), plan: caller.plan.clone() };
    let (user_id, there) = (caller.user_id.clone(), there.clone());
    let command = tenant::Command::ExpectTerminal { user_id, allocation_id, session, there, over, scopes };
    asking.ask_unstored::<Tenant>(tenant_of(asking), command).await?;
    Ok(())
}

/// The sessions for which the caller's tenant keeps a place although they are over.
async fn expected_and_over(
    services: &Services,
    asking: &Asking,
    allocation_id: AllocationId,
) -> Result<BTreeSet<TerminalSessionId>, ApiError> {
    let mut over = BTreeSet::new();
    let tenant = find::<Tenant>(services, tenant_of(asking)).await?;
    let expected = tenant.and_then(|mut tenant| tenant.it.expected_terminals.remove(&allocation_id));
    for session in expected.unwrap_or_default().into_keys() {
        let found = find::<TerminalSession>(services, session.0).await?;
        if found.is_some_and(|found| found.it.closed().is_some()) {
            over.insert(session);
        }
    }
    Ok(over)
}

/// Closes the session that is detached for longest. `None` where none is.
async fn displace_oldest(
    asking: &Asking,
    open: &[Stored<TerminalSession>],
) -> Result<Option<TerminalSessionId>, ApiError> {
    let mut detached: Vec<_> =
        open.iter().filter_map(|stored| Some((detached_at(&stored.it)?, stored.it.id))).collect();
    detached.sort_unstable();
    for (_, session) in detached {
        match asking.try_ask_unstored::<TerminalSession>(session.0, Command::Displace).await? {
            Ok(_) => return Ok(Some(session)),
            // Somebody connected to it in this moment: the next one.
            Err(AskError::Rejected(terminal_session::Rejection::NotDetached)) => {}
            Err(error) => return Err(not_answered(error)),
        }
    }
    Ok(None)
}

const fn detached_at(session: &TerminalSession) -> Option<DateTime<Utc>> {
    match session.phase {
        terminal_session::Phase::Detached { since, .. } => Some(since),
        terminal_session::Phase::Opened { .. }
        | terminal_session::Phase::Attached { .. }
        | terminal_session::Phase::Closed { .. } => None,
    }
}

/// An allocation's sessions that are not over, oldest first. Whoever rents it has opened them all.
async fn open_on(
    services: &Services,
    allocation: AllocationId,
    owner: &str,
) -> Result<Vec<Stored<TerminalSession>>, ApiError> {
    let states = terminal_session::Phase::LIVE.map(str::to_owned).into();
    let own = ListFilter { owner: Some(owner.to_owned()), states, ..ListFilter::default() };
    let rows = services.reads.list(Kind::TerminalSession, &own, None, ALL).await?.items;
    let sessions = rows.iter().filter_map(|row| Stored::<TerminalSession>::of(row).ok());
    Ok(sessions.filter(|stored| stored.it.allocation_id == allocation).collect())
}

/// Where it stands in a list. A position is kept in microseconds.
const fn place(session: &Stored<TerminalSession>) -> (i64, Uuid) {
    (session.created_at.timestamp_micros(), session.it.id.0)
}

/// The terminal sessions of an allocation that are not over, oldest first: each can be connected to again.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The allocation's id"), PageQuery),
    responses((status = 200, description = "A page of sessions.", body = Items<TerminalSessionView>)),
)]
pub(super) async fn list_open(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    listing: Listing<Unfiltered>,
) -> Result<Json<Items<TerminalSessionView>>, ApiError> {
    let allocation = visible(&services, &asking, id).await?;
    let page = listing.page("terminal-sessions-of-allocation", &id.to_string(), Order::OldestFirst)?;
    let mut open = open_on(&services, allocation.it.id, &allocation.it.asked.user_id).await?;
    let after = page.after.map(|at| (at.created_at.timestamp_micros(), at.id));
    open.retain(|session| after.is_none_or(|after| place(session) > after));
    open.truncate(usize::try_from(page.rows_to_read()).unwrap_or(usize::MAX));
    let position = |stored: &Stored<TerminalSession>| Position { created_at: stored.created_at, id: stored.it.id.0 };
    Ok(Json(page.answer(open, position, |stored| view(&stored.it))))
}

/// Ends a terminal session of yours: its connection, and its shell on the node. One that is over stays as it is.
#[utoipa::path(
    delete,
    path = "/",
    params(
        ("id" = Uuid, Path, description = "The allocation's id"),
        ("session_id" = Uuid, Path, description = "The session's id"),
    ),
    responses((status = 200, description = "The session, which is over.", body = TerminalSessionView)),
)]
pub(super) async fn end(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path((id, session_id)): Path<(Uuid, Uuid)>,
) -> Result<Json<TerminalSessionView>, ApiError> {
    let session = of_allocation(&services, &asking, session_id, AllocationId(id)).await?;
    let answered = asking.urgently().ask_unstored::<TerminalSession>(session, Command::EndByUser).await?;
    let Reply::Session { session } = answered.reply else { return Err(unexpected()) };
    Ok(Json(view(&session)))
}

/// Everybody's terminal sessions, oldest first, ended ones too.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, TerminalSessionFilter),
    responses((status = 200, description = "A page of sessions.", body = Items<TerminalSessionView>)),
)]
pub(super) async fn list(
    _: ByAdmin,
    State(services): State<Services>,
    listing: Listing<TerminalSessionFilter>,
) -> Result<Json<Items<TerminalSessionView>>, ApiError> {
    let owner = listing.filter.user_id.as_deref().map(str::to_owned);
    let page = listing.page("terminal-sessions", owner.as_deref().unwrap_or_default(), Order::OldestFirst)?;
    let states = listing.filter.state.map(|state| state.name().to_owned()).into_iter().collect();
    let filter = ListFilter { owner, states, ..ListFilter::default() };
    let rows = stored::list::<TerminalSession>(&services, &filter, &page).await?;
    Ok(Json(stored::answer(&page, rows, |stored| view(&stored.it))))
}

/// One terminal session.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The session's id")),
    responses((status = 200, description = "The session.", body = TerminalSessionView)),
)]
pub(super) async fn get(
    _: ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Json<TerminalSessionView>, ApiError> {
    let found = find::<TerminalSession>(&services, id).await?;
    found.map(|stored| Json(view(&stored.it))).ok_or_else(|| ApiError::not_found("terminal session"))
}

/// Closes a terminal session at once: its connection, and its shell on the node.
///
/// The shell and what is in its process group is told to hang up, and killed where it has not ended 2 s later. What its user has put into
/// the background and told not to mind goes on until the allocation is released.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The session's id")),
    request_body = Because,
    responses((status = 200, description = "The session, which is over.", body = TerminalSessionView)),
)]
pub(super) async fn kill(
    ByAdmin(asking): ByAdmin,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<Response, ApiError> {
    let command = Command::Kill { reason: why.reason.to_string() };
    let answered = asking.urgently().ask::<TerminalSession>(id, command).await?;
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
        Some(CloseReason::Exited { exit: Exit::Code(code) }) => {
            Some(TerminalExitView { code: Some(*code), signal: None })
        }
        Some(CloseReason::Exited { exit: Exit::Signal(signal) }) => {
            Some(TerminalExitView { code: None, signal: Some(*signal) })
        }
        Some(_) | None => None,
    };
    TerminalSessionView {
        id: session.id.0,
        allocation_id: session.allocation_id.0,
        node_id: session.node_id.0,
        user_id: session.owner.user_id.clone(),
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
