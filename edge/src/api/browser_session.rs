//! Browser sessions: logins to the web console, their list and their end.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::BrowserSessionId;
use domain::browser_session::{BrowserSession, Reply, Request};
use persistence::queries::ListFilter;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::request_context::{AdminRequest, RequestContext, UserRequest, replayed};
use super::request_fields::{ClaimId, ReasonBody};
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery};
use crate::http::request_body::{self, NoBody, Path};

/// The states of a browser session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
#[schema(as = BrowserSessionState)]
pub(super) enum StateName {
    Active,
    Ended,
}

/// One login to the web console.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = BrowserSession)]
pub(super) struct BrowserSessionView {
    id: Uuid,
    user_id: String,
    state: StateName,
    /// Whether it is the one that makes this request.
    is_current: bool,
    /// Where the browser was at the login, as this service saw it.
    address: String,
    /// The browser, as it names itself.
    user_agent: String,
    created_at: DateTime<Utc>,
    /// Of its last request, to within some minutes.
    last_seen_at: DateTime<Utc>,
    /// When it ends without a further request.
    idle_ends_at: DateTime<Utc>,
    /// When it ends in any case.
    ends_at: DateTime<Utc>,
    ended_at: Option<DateTime<Utc>>,
    /// Why it has ended: `logged_out`, `ended_by_user`, `ended_by_administrator`, `idle`, `lifetime`, `provider_logout`, `provider_refused` or
    /// `displaced`; null while it is active.
    end_reason: Option<String>,
}

/// A filter of one's own sessions.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct OwnSessionFilter {
    state: Option<StateName>,
}

/// A filter of sessions.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct BrowserSessionFilter {
    state: Option<StateName>,
    /// Whose.
    user_id: Option<ClaimId>,
    /// The order of the list; the oldest first where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    order: Option<Order>,
}

/// Your logins to the web console, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, OwnSessionFilter),
    responses((status = 200, description = "A page of sessions.", body = Items<BrowserSessionView>)),
)]
pub(super) async fn list_own(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    listing: Listing<OwnSessionFilter>,
) -> Result<Json<Items<BrowserSessionView>>, ApiError> {
    let owner = context.caller.user_id.to_string();
    let page = listing.page("me/sessions", &owner, Order::OldestFirst)?;
    let filter = ListFilter { owner: Some(owner), states: states(listing.filter.state), ..ListFilter::default() };
    let rows = read_model::list::<BrowserSession>(&app, &filter, &page).await?;
    let current = context.caller.browser_session;
    Ok(Json(read_model::to_page(&page, rows, |stored| view(&stored.it, current))))
}

/// Ends one of your logins to the web console, with its terminals and connections. One that has ended stays as it is.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 200, description = "The session, which has ended.", body = BrowserSessionView)),
)]
pub(super) async fn end_own(
    UserRequest(context): UserRequest,
    Path(id): Path<Uuid>,
    _: Idempotent<NoBody>,
) -> Result<Response, ApiError> {
    ended(context, id, Request::EndByUser).await
}

/// All logins to the web console.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, BrowserSessionFilter),
    responses((status = 200, description = "A page of sessions.", body = Items<BrowserSessionView>)),
)]
pub(super) async fn list(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    listing: Listing<BrowserSessionFilter>,
) -> Result<Json<Items<BrowserSessionView>>, ApiError> {
    let owner = listing.filter.user_id.as_deref().map(str::to_owned);
    let order = listing.filter.order.unwrap_or_default();
    let page = listing.page("admin/browser-sessions", owner.as_deref().unwrap_or_default(), order)?;
    let filter = ListFilter { owner, states: states(listing.filter.state), ..ListFilter::default() };
    let rows = read_model::list::<BrowserSession>(&app, &filter, &page).await?;
    let current = context.caller.browser_session;
    Ok(Json(read_model::to_page(&page, rows, |stored| view(&stored.it, current))))
}

/// Ends a user's login to the web console, with its terminals and connections. One that has ended stays as it is.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReasonBody,
    responses((status = 200, description = "The session, which has ended.", body = BrowserSessionView)),
)]
pub(super) async fn end(
    AdminRequest(context): AdminRequest,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(why)): Idempotent<request_body::Json<ReasonBody>>,
) -> Result<Response, ApiError> {
    ended(context, id, Request::EndByAdministrator { reason: why.reason.to_string() }).await
}

async fn ended(context: RequestContext, id: Uuid, command: Request) -> Result<Response, ApiError> {
    let context = context.prioritized();
    let answered = context.ask::<BrowserSession>(id, command).await?;
    let replayed = replayed(&answered);
    let Reply::Session { session } = answered.reply else {
        return Err(ApiError::internal("the browser session's machine answered another question"));
    };
    Ok((StatusCode::OK, replayed, Json(view(&session, context.caller.browser_session))).into_response())
}

fn states(wanted: Option<StateName>) -> Vec<String> {
    wanted.map(|state| <&'static str>::from(state).to_owned()).into_iter().collect()
}

pub(super) fn view(session: &BrowserSession, current: Option<BrowserSessionId>) -> BrowserSessionView {
    BrowserSessionView {
        id: session.id.0,
        user_id: session.owner.user_id.to_string(),
        state: if session.is_active() { StateName::Active } else { StateName::Ended },
        is_current: current == Some(session.id),
        address: session.place.address.clone(),
        user_agent: session.place.user_agent.clone(),
        created_at: session.created_at,
        last_seen_at: session.last_seen_at,
        idle_ends_at: session.idle_ends_at,
        ends_at: session.ends_at,
        ended_at: session.ended.as_ref().map(|end| end.at),
        end_reason: session.ended.as_ref().map(|end| end.reason.code().to_owned()),
    }
}
