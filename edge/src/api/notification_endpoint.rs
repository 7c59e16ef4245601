//! Notification endpoints of users and organizations: webhooks and e-mail addresses, their queued messages and their dead letters
//! (deploy/decisions/0031).

use actors::CommandReply;
use actors::sharding::id_of_name;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::billing_account::Holder;
use domain::notification_endpoint::{
    DeliveryAttempt, DisableCause, EndpointChange, Fact, NotificationEndpoint, PRESENT, Phase, QueueEntry,
    RecipientClaims, Reply, Request, Target,
};
use domain::{EntityKind, Machine as _};
use persistence::queries::ListFilter;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::request_context::{AdminRequest, RequestContext, UserRequest, replayed};
use super::request_fields::{ClaimId, EventName, Reason, ReceiverUrl, set_or_none};
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, current, find};
use crate::http::correlation::no_store;
use crate::http::error::{ApiError, Code};
use crate::http::pagination::{Items, Listing, Order, PageQuery};
use crate::http::request_body::{self, NoBody, Path};
use crate::notifications::delivery::outbound_webhook::{new_secret, shown_secret};

/// A bound above the number of endpoints that a holder can have.
const ABOVE_ANY_LIMIT: u32 = 200;
/// The most event types in one list.
const MAX_EVENTS: usize = 64;
/// The timeout of introducing an e-mail address, so that no request waits for it for long.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(2);

/// The kind of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = NotificationEndpointKind)]
#[serde(rename_all = "snake_case")]
pub(super) enum EndpointKind {
    Webhook,
    Email,
}

/// Whose events an endpoint receives: your own, or those of the organization that your access token names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = NotificationHolder)]
#[serde(rename_all = "snake_case")]
pub(super) enum HolderKind {
    #[default]
    User,
    Org,
}

/// The state of an endpoint. One that is `failing` has failed since its last success, or has dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[schema(as = NotificationEndpointState)]
#[serde(rename_all = "snake_case")]
pub(super) enum EndpointState {
    Active,
    Failing,
    Disabled,
}

/// Why an endpoint is disabled: its owner did it, it answered 410 Gone, or it failed for five days.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = NotificationEndpointDisabled)]
#[serde(rename_all = "snake_case")]
enum DisabledReason {
    ByOwner,
    Gone,
    Failing,
}

/// An endpoint to be made.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "kind": "webhook", "url": "https://receiver.example/hooks" }))]
pub(super) struct NewNotificationEndpoint {
    kind: EndpointKind,
    /// For a webhook: where messages are posted. An e-mail goes to the address that your identity provider has verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    url: Option<ReceiverUrl>,
    /// The types of events that it receives; all where it is left out or null.
    #[serde(default, deserialize_with = "set_or_none::<_, _, MAX_EVENTS>")]
    #[schema(max_items = 64)]
    events: Option<Vec<EventName>>,
    /// `user` where it is left out.
    #[serde(default)]
    holder: HolderKind,
}

/// A change of an endpoint. Absent fields stay as they are.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NotificationEndpointChange {
    /// Of a webhook.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    url: Option<ReceiverUrl>,
    /// The types of events that it receives; null: all.
    #[serde(default, deserialize_with = "present_events", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<EventName>>, max_items = 64)]
    events: Option<Option<Vec<EventName>>>,
    /// A disabled endpoint receives nothing. When it is enabled again, queued messages are sent at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = true)]
    enabled: Option<bool>,
}

fn present_events<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<Vec<EventName>>>, D::Error> {
    set_or_none::<_, _, MAX_EVENTS>(deserializer).map(Some)
}

/// A choice of dead letters, with a reason.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DeadLetters {
    /// One of them; all where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_id: Option<Uuid>,
    /// Recorded in the audit log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
}

/// A filter of endpoints by holder.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct OwnEndpointFilter {
    /// `user` where it is left out.
    #[param(inline)]
    holder: Option<HolderKind>,
}

/// A filter of endpoints.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EndpointFilter {
    state: Option<EndpointState>,
    /// Endpoints of this user.
    #[param(inline)]
    user_id: Option<ClaimId>,
}

/// An endpoint that receives events, and its queue.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NotificationEndpoint)]
pub(super) struct EndpointView {
    id: Uuid,
    kind: EndpointKind,
    /// Of a webhook.
    #[schema(example = "https://receiver.example/hooks")]
    url: Option<String>,
    /// Of an e-mail.
    address: Option<String>,
    /// The user whose events it receives; null for an organization's.
    user_id: Option<String>,
    /// Null of a user's.
    org_id: Option<String>,
    /// The types of events that it receives; null: all.
    events: Option<Vec<String>>,
    state: EndpointState,
    /// Null unless it is disabled.
    disabled_because: Option<DisabledReason>,
    /// When the first of the consecutive failures was; null where the last attempt succeeded.
    failing_since: Option<DateTime<Utc>>,
    /// Queued messages.
    waiting: usize,
    /// When the next attempt is due; null where no message is queued.
    next_attempt_at: Option<DateTime<Utc>>,
    /// Messages whose last attempt failed: `GET …/dead-letters` shows them.
    dead_letters: usize,
    /// Dead letters that were dropped, since at most 50 are stored.
    forgotten: u64,
    /// The last attempts, newest first.
    attempts: Vec<AttemptView>,
    created_by: String,
    created_at: DateTime<Utc>,
}

/// The outcome of an attempt to deliver a message.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NotificationAttempt)]
pub(super) struct AttemptView {
    /// Also the header `webhook-id` of the message.
    message_id: Uuid,
    #[schema(example = "billing.balance_low")]
    event: String,
    at: DateTime<Utc>,
    /// Null where the receiver has acknowledged it.
    error: Option<String>,
}

/// A message whose last attempt failed.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NotificationDeadLetter)]
pub(super) struct DeadLetterView {
    message_id: Uuid,
    event: String,
    /// When it was queued.
    queued_at: DateTime<Utc>,
    attempts: u32,
    last_error: Option<String>,
}

/// The secret that signs the messages of a webhook.
#[derive(Serialize, ToSchema)]
pub(super) struct NotificationSecret {
    /// `whsec_` and the key in base64 (Standard Webhooks).
    secret: String,
}

/// Your endpoints, or your organization's, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, OwnEndpointFilter),
    responses((status = 200, description = "A page of endpoints.", body = Items<EndpointView>)),
)]
pub(super) async fn list(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    listing: Listing<OwnEndpointFilter>,
) -> Result<Json<Items<EndpointView>>, ApiError> {
    let holder = holder_of(&context, listing.filter.holder.unwrap_or_default())?.to_string();
    let page = listing.page("notification-endpoints", &holder, Order::OldestFirst)?;
    let filter = ListFilter { owner: Some(holder), states: existing_states(), ..ListFilter::default() };
    let rows = read_model::list::<NotificationEndpoint>(&app, &filter, &page).await?;
    let Items { items, next_page } = read_model::to_page(&page, rows, |stored| EndpointView::of(&stored.it));
    Ok(Json(Items { items: items.into_iter().flatten().collect(), next_page }))
}

/// All endpoints, oldest first. Those in state `failing` need attention.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, EndpointFilter),
    responses((status = 200, description = "A page of endpoints.", body = Items<EndpointView>)),
)]
pub(super) async fn list_all(
    _: AdminRequest,
    State(app): State<AppState>,
    listing: Listing<EndpointFilter>,
) -> Result<Json<Items<EndpointView>>, ApiError> {
    let page = listing.page("admin/notification-endpoints", "", Order::OldestFirst)?;
    let filter = ListFilter {
        owner: listing.filter.user_id.as_deref().map(|id| Holder::User(id.into()).to_string()),
        states: listing.filter.state.map_or_else(existing_states, |state| vec![state.name().to_owned()]),
        ..ListFilter::default()
    };
    let rows = read_model::list::<NotificationEndpoint>(&app, &filter, &page).await?;
    let Items { items, next_page } = read_model::to_page(&page, rows, |stored| EndpointView::of(&stored.it));
    Ok(Json(Items { items: items.into_iter().flatten().collect(), next_page }))
}

/// Creates an endpoint. From then on it receives events.
///
/// A webhook is sent each event as a CloudEvent in a POST, signed as Standard Webhooks 1.0.0 has it; `GET …/secret` shows its secret. Any
/// 2xx within 15 s acknowledges it. Every other response is retried for days; 410 disables the endpoint.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewNotificationEndpoint,
    responses((status = 201, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn create(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewNotificationEndpoint>>,
) -> Result<Response, ApiError> {
    let id = context.new_id();
    let answered = match context.committed_reply::<NotificationEndpoint>()? {
        Some(answered) => answered,
        None => context.ask::<NotificationEndpoint>(id, create_command(&app, &context, id, &new).await?).await?,
    };
    let replayed = replayed(&answered);
    Ok((StatusCode::CREATED, replayed, Json(shown(answered)?)).into_response())
}

async fn create_command(
    app: &AppState,
    context: &RequestContext,
    id: Uuid,
    new: &NewNotificationEndpoint,
) -> Result<Request, ApiError> {
    let holder = holder_of(context, new.holder)?;
    let (target, secret_enc) = match (new.kind, &new.url) {
        (EndpointKind::Webhook, Some(url)) => {
            let url = receiver(app, url)?;
            let sealed = app.delivery.seal(id, &new_secret()).map_err(ApiError::internal)?;
            (Target::Webhook { url }, Some(sealed))
        }
        (EndpointKind::Webhook, None) => return Err(invalid("A webhook needs a `url`.", "url")),
        (EndpointKind::Email, Some(_)) => {
            let message = "An e-mail goes to the address that your identity provider has verified; leave `url` out.";
            return Err(invalid(message, "url"));
        }
        (EndpointKind::Email, None) => (Target::Email { address: address_of(app, context)? }, None),
    };
    let place = free_place(app, &holder).await?;
    Ok(Request::Create { holder, target, secret_enc, events: names(new.events.as_deref()), place })
}

/// The holder's first slot that no endpoint has. Where two requests take the same slot, the commit admits one.
async fn free_place(app: &AppState, holder: &Holder) -> Result<u16, ApiError> {
    let taken: BTreeSet<_> = endpoints_of(app, holder).await?.into_iter().filter_map(|it| it.place).collect();
    Ok((0..u16::MAX).find(|place| !taken.contains(place)).unwrap_or(u16::MAX))
}

/// The holder's endpoints that are not deleted.
async fn endpoints_of(app: &AppState, holder: &Holder) -> Result<Vec<NotificationEndpoint>, ApiError> {
    let filter = ListFilter { owner: Some(holder.to_string()), states: existing_states(), ..ListFilter::default() };
    let listed = app.reads.list(EntityKind::NotificationEndpoint, &filter, None, ABOVE_ANY_LIMIT).await?;
    let endpoints = listed.items.into_iter().map(|listed| {
        let row = listed.row.map_err(ApiError::unavailable)?;
        Ok(read_model::StoredEntity::<NotificationEndpoint>::of(&row)?.it)
    });
    endpoints.collect()
}

/// One endpoint.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The endpoint.", body = EndpointView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<EndpointView>, ApiError> {
    let endpoint = own(&app, &context, id).await?;
    EndpointView::of(&endpoint).map(Json).ok_or_else(not_found)
}

/// Changes an endpoint.
#[utoipa::path(
    patch,
    path = "/",
    request_body = NotificationEndpointChange,
    responses((status = 200, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn revise(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    request_body::Json(change): request_body::Json<NotificationEndpointChange>,
) -> Result<Json<EndpointView>, ApiError> {
    let change = EndpointChange {
        url: change.url.as_ref().map(|url| receiver(&app, url)).transpose()?,
        events: change.events.map(|events| names(events.as_deref())),
        is_enabled: change.enabled,
    };
    if change == EndpointChange::default() {
        return Err(ApiError::invalid_request("Nothing is to be changed; give `url`, `events` or `enabled`."));
    }
    shown(context.ask::<NotificationEndpoint>(id, Request::Change { change }).await?).map(Json)
}

/// Deletes an endpoint, with its queued messages.
#[utoipa::path(
    delete,
    path = "/",
    responses((status = 204, description = "It is gone.")),
)]
pub(super) async fn delete(UserRequest(context): UserRequest, Path(id): Path<Uuid>) -> Result<StatusCode, ApiError> {
    context.ask::<NotificationEndpoint>(id, Request::Delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The secret that signs a webhook's messages. It is shown to its holder alone.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The secret. `Cache-Control: no-store`.", body = NotificationSecret)),
)]
pub(super) async fn secret(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Response, ApiError> {
    let endpoint = own_as_holder(&app, &context, id).await?;
    secret_of(&app, &endpoint)
}

/// Gives a webhook another secret.
///
/// For 24 hours messages are signed with both, so that its receiver can be changed without a gap. A repetition makes another secret, whatever its `Idempotency-Key`.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 201, description = "The secret. `Cache-Control: no-store`.", body = NotificationSecret)),
)]
pub(super) async fn rotate_secret(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    _: NoBody,
) -> Result<Response, ApiError> {
    own_as_holder(&app, &context, id).await?;
    let secret_enc = app.delivery.seal(id, &new_secret()).map_err(ApiError::internal)?;
    let answered = context.ask_unstored::<NotificationEndpoint>(id, Request::RotateSecret { secret_enc }).await?;
    let (Reply::Shown { endpoint } | Reply::Letters { endpoint, .. }) = answered.reply else {
        return Err(unexpected());
    };
    let response = secret_of(&app, &endpoint)?;
    Ok((StatusCode::CREATED, response).into_response())
}

/// Sends the endpoint a message of type `notification.test`.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 202, description = "The endpoint; the message waits.", body = EndpointView)),
)]
pub(super) async fn test(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    _: Idempotent<NoBody>,
) -> Result<Response, ApiError> {
    let body = crate::notifications::test_message(id, app.environment.now());
    let answered = context.ask::<NotificationEndpoint>(id, Request::Test { body }).await?;
    let replayed = replayed(&answered);
    Ok((StatusCode::ACCEPTED, replayed, Json(shown(answered)?)).into_response())
}

/// The dead letters of an endpoint, oldest first: at most 50.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The dead letters.", body = Items<DeadLetterView>)),
)]
pub(super) async fn dead_letters(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<Items<DeadLetterView>>, ApiError> {
    let endpoint = own(&app, &context, id).await?;
    Ok(Json(Items { items: endpoint.queue.dead.iter().map(DeadLetterView::of).collect(), next_page: None }))
}

/// Resends dead letters: one, or all. Each has as many attempts as a new message.
#[utoipa::path(
    post,
    path = "/",
    request_body = DeadLetters,
    responses((status = 200, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn resend(
    UserRequest(context): UserRequest,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(which)): Idempotent<request_body::Json<DeadLetters>>,
) -> Result<Response, ApiError> {
    let command = Request::Resend { message_id: which.message_id, reason: which.reason.map(|it| it.to_string()) };
    settle(&context, id, command).await
}

/// Discards dead letters: one, or all.
#[utoipa::path(
    post,
    path = "/",
    request_body = DeadLetters,
    responses((status = 200, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn dismiss(
    UserRequest(context): UserRequest,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(which)): Idempotent<request_body::Json<DeadLetters>>,
) -> Result<Response, ApiError> {
    let command = Request::Dismiss { message_id: which.message_id, reason: which.reason.map(|it| it.to_string()) };
    settle(&context, id, command).await
}

async fn settle(context: &RequestContext, id: Uuid, request: Request) -> Result<Response, ApiError> {
    let answered = context.ask::<NotificationEndpoint>(id, request).await?;
    let replayed = replayed(&answered);
    Ok((replayed, Json(shown(answered)?)).into_response())
}

/// Sets the address that the identity provider has verified at the caller's own e-mail endpoint, so that users who rent or pay are warned
/// without setting it up; one who has made an e-mail endpoint gets no other. Where that fails, the next rental or payment retries it. No
/// read does it, and no request that is refused (deploy/decisions/0101).
pub(super) async fn introduce(app: &AppState, context: &RequestContext) {
    let (Some(address), true) = (context.verified_email.clone(), app.delivery.mailer.is_some()) else { return };
    let user_id = context.caller.user_id.clone();
    let id = id_of_name(EntityKind::NotificationEndpoint, &format!("email:{user_id}"));
    let claims = RecipientClaims { org_id: context.caller.org_id.clone(), plan: context.caller.plan.clone() };
    let is_known = async {
        match find::<NotificationEndpoint>(app, id).await.ok().flatten() {
            Some(stored) => stored.it.is_at(&address) && stored.it.claims == claims || !stored.it.exists(),
            None => {
                let own = endpoints_of(app, &Holder::User(user_id.clone())).await;
                own.map_or(true, |own| own.iter().any(|it| matches!(it.target, Target::Email { .. })))
            }
        }
    };
    if is_known.await {
        return;
    }
    let command = Fact::AddressVerified { user_id, address, claims: Some(claims.clone()) };
    let notified = context.ask_as_system::<NotificationEndpoint>("notification-endpoints", id, command);
    if !matches!(tokio::time::timeout(INTRODUCTION_TIMEOUT, notified).await, Ok(Ok(_))) {
        tracing::info!(user.id = %context.caller.user_id, "the first e-mail to an address could not be sent yet");
    }
}

/// The states of endpoints that are not deleted.
fn existing_states() -> Vec<String> {
    PRESENT.map(str::to_owned).into()
}

async fn own(app: &AppState, context: &RequestContext, id: Uuid) -> Result<NotificationEndpoint, ApiError> {
    let found = current::<NotificationEndpoint>(app, id).await?;
    let found = found.filter(|found| found.it.is_for(&context.principal()));
    found.map(|found| NotificationEndpoint::clone(&found.it)).ok_or_else(not_found)
}

/// The caller's endpoint, or their organization's. Secrets are shown to no other caller, administrators included.
async fn own_as_holder(app: &AppState, context: &RequestContext, id: Uuid) -> Result<NotificationEndpoint, ApiError> {
    let endpoint = own(app, context, id).await?;
    let is_theirs = match &endpoint.holder {
        Holder::User(id) => *id == context.caller.user_id,
        Holder::Org(id) => context.caller.org_id.as_ref() == Some(id),
    };
    is_theirs.then_some(endpoint).ok_or_else(|| ApiError::not_found("secret of yours"))
}

fn secret_of(app: &AppState, endpoint: &NotificationEndpoint) -> Result<Response, ApiError> {
    let secrets = app.delivery.secrets(endpoint, app.environment.now()).map_err(ApiError::internal)?;
    let Some(newest) = secrets.first() else {
        return Err(invalid("An e-mail address has no secret.", "id"));
    };
    let secret = shown_secret(newest).expose_secret().to_owned();
    Ok((no_store(), Json(NotificationSecret { secret })).into_response())
}

fn holder_of(context: &RequestContext, kind: HolderKind) -> Result<Holder, ApiError> {
    match (kind, &context.caller.org_id) {
        (HolderKind::User, _) => Ok(Holder::User(context.caller.user_id.clone())),
        (HolderKind::Org, Some(id)) => Ok(Holder::Org(id.clone())),
        (HolderKind::Org, None) => {
            Err(invalid("Your access token names no organization; leave `holder` out.", "holder"))
        }
    }
}

fn receiver(app: &AppState, url: &ReceiverUrl) -> Result<String, ApiError> {
    let checked = app.delivery.webhooks.check(url);
    checked.map(|()| url.to_string()).map_err(|why| invalid(&format!("`url` is refused: {why}."), "url"))
}

fn address_of(app: &AppState, context: &RequestContext) -> Result<String, ApiError> {
    if app.delivery.mailer.is_none() {
        let message = "No mail server is configured; the operator sets SVC_SMTP_URL (see the book, operator/email.md).";
        return Err(ApiError::new(Code::StateConflict, message));
    }
    context.verified_email.clone().ok_or_else(|| {
        let message = "Your access token has no e-mail address that your identity provider has verified (claims `email` and \
                       `email_verified`); verify one there and log in again.";
        ApiError::new(Code::StateConflict, message).detail("field", "kind")
    })
}

fn names(events: Option<&[EventName]>) -> Option<BTreeSet<String>> {
    events.map(|events| events.iter().map(|event| event.to_string()).collect())
}

fn invalid(message: &str, field: &str) -> ApiError {
    ApiError::invalid_request(message.to_owned()).detail("field", field)
}

fn not_found() -> ApiError {
    ApiError::not_found("notification endpoint")
}

fn unexpected() -> ApiError {
    ApiError::internal("the notification endpoint's machine answered another question")
}

fn shown(answered: CommandReply<Reply>) -> Result<EndpointView, ApiError> {
    match answered.reply {
        Reply::Shown { endpoint } | Reply::Letters { endpoint, .. } => {
            EndpointView::of(&endpoint).ok_or_else(not_found)
        }
        Reply::Done => Err(unexpected()),
    }
}

impl EndpointView {
    /// `None` for a deleted endpoint.
    fn of(it: &NotificationEndpoint) -> Option<Self> {
        let (kind, url, address) = match it.target.clone() {
            Target::Webhook { url } => (EndpointKind::Webhook, Some(url), None),
            Target::Email { address } => (EndpointKind::Email, None, Some(address)),
        };
        let (user_id, org_id) = match it.holder.clone() {
            Holder::User(id) => (Some(id.0), None),
            Holder::Org(id) => (None, Some(id.0)),
        };
        Some(Self {
            id: it.id.0,
            kind,
            url,
            address,
            user_id,
            org_id,
            events: it.events.clone().map(|events| events.into_iter().collect()),
            state: EndpointState::of(it)?,
            disabled_because: DisabledReason::of(&it.phase),
            failing_since: it.queue.failing_since,
            waiting: it.queue.waiting.len(),
            next_attempt_at: it.timer(),
            dead_letters: it.queue.dead.len(),
            forgotten: it.queue.forgotten,
            attempts: it.queue.attempts.iter().rev().map(AttemptView::of).collect(),
            created_by: it.created_by.clone(),
            created_at: it.created_at,
        })
    }
}

impl EndpointState {
    fn of(it: &NotificationEndpoint) -> Option<Self> {
        [Self::Active, Self::Failing, Self::Disabled].into_iter().find(|state| state.name() == it.state())
    }

    /// The name of the state in the state machine.
    const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl DisabledReason {
    const fn of(phase: &Phase) -> Option<Self> {
        match phase {
            Phase::Disabled { because, .. } => Some(match because {
                DisableCause::ByOwner => Self::ByOwner,
                DisableCause::Gone => Self::Gone,
                DisableCause::Failing => Self::Failing,
            }),
            Phase::Active | Phase::Deleted { .. } => None,
        }
    }
}

impl AttemptView {
    fn of(it: &DeliveryAttempt) -> Self {
        let DeliveryAttempt { message_id, event, at, error } = it.clone();
        Self { message_id, event, at, error }
    }
}

impl DeadLetterView {
    fn of(it: &QueueEntry) -> Self {
        Self {
            message_id: it.message.id,
            event: it.message.event.clone(),
            queued_at: it.since,
            attempts: it.attempts,
            last_error: it.last_error.clone(),
        }
    }
}
