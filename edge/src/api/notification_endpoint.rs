//! Where users and organizations are told of events outside of the API: webhooks and e-mail addresses, what waits for them, and their dead
//! letters (deploy/decisions/0034).

use actors::Answered;
use actors::place::id_of_name;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::billing_account::Holder;
use domain::notification_endpoint::{
    Attempt, Change, Command, Disabled, NotificationEndpoint, PRESENT, Phase, Reply, Target, Waiting,
};
use domain::{Kind, Machine as _};
use persistence::read::ListFilter;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::asking::{Asking, ByAdmin, ByUser, replayed};
use super::field::{ClaimId, EventName, Reason, ReceiverUrl, set_or_none};
use super::stored::{self, current, find};
use crate::body::{self, NoBody, Path};
use crate::correlation::no_store;
use crate::delivery::webhook::{new_secret, shown_secret};
use crate::error::{ApiError, Code};
use crate::idempotency::keyed::Once;
use crate::page::{Items, Listing, Order, PageQuery};
use crate::services::Services;

/// More endpoints than a holder can have.
const ALL: u32 = 200;
/// Events in one list.
const EVENTS_MOST: usize = 64;
/// How long the introduction of an address may take: nobody waits for it in vain.
const INTRODUCED_WITHIN: Duration = Duration::from_secs(2);

/// What messages are sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = NotificationEndpointKind)]
#[serde(rename_all = "snake_case")]
pub(super) enum EndpointKind {
    Webhook,
    Email,
}

/// Whose events an endpoint is told of: your own, or those of the organization that your access token names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = NotificationHolder)]
#[serde(rename_all = "snake_case")]
pub(super) enum HolderKind {
    #[default]
    User,
    Org,
}

/// Where an endpoint stands. One that is `failing` has failed since its last success, or has dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
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
enum DisabledBecause {
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
    /// Of a webhook: where messages are posted. An e-mail goes to the address that your identity provider has verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    url: Option<ReceiverUrl>,
    /// The types of events that it is told of; all where it is left out or null.
    #[serde(default, deserialize_with = "set_or_none::<_, _, EVENTS_MOST>")]
    #[schema(max_items = 64)]
    events: Option<Vec<EventName>>,
    /// `user` where it is left out.
    #[serde(default)]
    holder: HolderKind,
}

/// What changes of an endpoint. What is left out stays as it is.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NotificationEndpointChange {
    /// Of a webhook.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    url: Option<ReceiverUrl>,
    /// The types of events that it is told of; null: all.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<EventName>>, max_items = 64)]
    events: Option<Option<Vec<EventName>>>,
    /// A disabled endpoint is told of nothing. When it is enabled again, what waits is sent at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = true)]
    enabled: Option<bool>,
}

fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<Vec<EventName>>>, D::Error> {
    set_or_none::<_, _, EVENTS_MOST>(deserializer).map(Some)
}

/// Which dead letters, and why.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DeadLetters {
    /// One of them; all where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    message_id: Option<Uuid>,
    /// Kept in the audit log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
}

/// Whose endpoints.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct OwnFilter {
    /// `user` where it is left out.
    #[param(inline)]
    holder: Option<HolderKind>,
}

/// Which endpoints.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AllFilter {
    state: Option<EndpointState>,
    /// Of this user.
    #[param(inline)]
    user_id: Option<ClaimId>,
}

/// Where somebody is told of events, and what waits for it.
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
    /// Whose events it is told of; null of an organization's.
    user_id: Option<String>,
    /// Null of a user's.
    org_id: Option<String>,
    /// The types of events that it is told of; null: all.
    events: Option<Vec<String>>,
    state: EndpointState,
    /// Null unless it is disabled.
    disabled_because: Option<DisabledBecause>,
    /// Since when every attempt has failed; null where the last one succeeded.
    failing_since: Option<DateTime<Utc>>,
    /// Messages that wait.
    waiting: usize,
    /// When the next message is tried; null where none waits.
    next_attempt_at: Option<DateTime<Utc>>,
    /// Messages that were tried in vain too often: `GET …/dead-letters` shows them.
    dead_letters: usize,
    /// Dead letters that were forgotten, since there is room for 50.
    forgotten: u64,
    /// The last attempts, newest first.
    attempts: Vec<AttemptView>,
    created_by: String,
    created_at: DateTime<Utc>,
}

/// What came of an attempt at a message.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NotificationAttempt)]
pub(super) struct AttemptView {
    /// Also its header `webhook-id`.
    message_id: Uuid,
    #[schema(example = "billing.balance_low")]
    event: String,
    at: DateTime<Utc>,
    /// Null where the receiver has it.
    error: Option<String>,
}

/// A message that was tried in vain too often.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NotificationDeadLetter)]
pub(super) struct DeadLetterView {
    message_id: Uuid,
    event: String,
    /// Since when it waited.
    queued_at: DateTime<Utc>,
    attempts: u32,
    last_error: Option<String>,
}

/// What signs the messages of a webhook.
#[derive(Serialize, ToSchema)]
pub(super) struct NotificationSecret {
    /// `whsec_` and the key in base64 (Standard Webhooks).
    secret: String,
}

/// Your endpoints, or your organization's, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, OwnFilter),
    responses((status = 200, description = "A page of endpoints.", body = Items<EndpointView>)),
)]
pub(super) async fn list(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    listing: Listing<OwnFilter>,
) -> Result<Json<Items<EndpointView>>, ApiError> {
    introduce(&services, &asking).await;
    let holder = holder_of(&asking, listing.filter.holder.unwrap_or_default())?.to_string();
    let page = listing.page("notification-endpoints", &holder, Order::OldestFirst)?;
    let filter = ListFilter { owner: Some(holder), states: present(), ..ListFilter::default() };
    let rows = stored::list::<NotificationEndpoint>(&services, &filter, &page).await?;
    let Items { items, next_page } = stored::answer(&page, rows, |stored| EndpointView::of(&stored.it));
    Ok(Json(Items { items: items.into_iter().flatten().collect(), next_page }))
}

/// Everybody's endpoints, oldest first. Those in state `failing` want a look.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, AllFilter),
    responses((status = 200, description = "A page of endpoints.", body = Items<EndpointView>)),
)]
pub(super) async fn list_all(
    _: ByAdmin,
    State(services): State<Services>,
    listing: Listing<AllFilter>,
) -> Result<Json<Items<EndpointView>>, ApiError> {
    let page = listing.page("admin/notification-endpoints", "", Order::OldestFirst)?;
    let filter = ListFilter {
        owner: listing.filter.user_id.as_deref().map(|id| Holder::User(id.to_owned()).to_string()),
        states: listing.filter.state.map_or_else(present, |state| vec![state.name().to_owned()]),
        ..ListFilter::default()
    };
    let rows = stored::list::<NotificationEndpoint>(&services, &filter, &page).await?;
    let Items { items, next_page } = stored::answer(&page, rows, |stored| EndpointView::of(&stored.it));
    Ok(Json(Items { items: items.into_iter().flatten().collect(), next_page }))
}

/// Makes an endpoint. From then on it is told of events.
///
/// A webhook is sent each event as a CloudEvent in a POST, signed as Standard Webhooks 1.0.0 has it; `GET …/secret` shows its secret. Any 2xx
/// within 15 s acknowledges it. Everything else is tried again for days; 410 disables the endpoint.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewNotificationEndpoint,
    responses((status = 201, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn create(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Once(body::Json(new)): Once<body::Json<NewNotificationEndpoint>>,
) -> Result<Response, ApiError> {
    let id = asking.id_of_new();
    let answered = match asking.carried_out::<NotificationEndpoint>()? {
        Some(answered) => answered,
        None => asking.ask::<NotificationEndpoint>(id, wanted(&services, &asking, id, &new).await?).await?,
    };
    let replayed = replayed(&answered);
    Ok((StatusCode::CREATED, replayed, Json(shown(answered)?)).into_response())
}

async fn wanted(
    services: &Services,
    asking: &Asking,
    id: Uuid,
    new: &NewNotificationEndpoint,
) -> Result<Command, ApiError> {
    let holder = holder_of(asking, new.holder)?;
    let (target, secret_enc) = match (new.kind, &new.url) {
        (EndpointKind::Webhook, Some(url)) => {
            let url = receiver(services, url)?;
            let sealed = services.delivery.seal(id, &new_secret()).map_err(ApiError::internal)?;
            (Target::Webhook { url }, Some(sealed))
        }
        (EndpointKind::Webhook, None) => return Err(wrong("A webhook needs a `url`.", "url")),
        (EndpointKind::Email, Some(_)) => {
            let message = "An e-mail goes to the address that your identity provider has verified; leave `url` out.";
            return Err(wrong(message, "url"));
        }
        (EndpointKind::Email, None) => (Target::Email { address: address_of(services, asking)? }, None),
    };
    let place = free_place(services, &holder).await?;
    Ok(Command::Create { holder, target, secret_enc, events: names(new.events.as_deref()), place })
}

/// The first of the holder's places that no endpoint has. Of two who take the same one, the commit admits one.
async fn free_place(services: &Services, holder: &Holder) -> Result<u16, ApiError> {
    let mut taken = BTreeSet::new();
    let filter = ListFilter { owner: Some(holder.to_string()), states: present(), ..ListFilter::default() };
    for row in &services.reads.list(Kind::NotificationEndpoint, &filter, None, ALL).await?.items {
        taken.extend(stored::Stored::<NotificationEndpoint>::of(row)?.it.place);
    }
    Ok((0..u16::MAX).find(|place| !taken.contains(place)).unwrap_or(u16::MAX))
}

/// One endpoint.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    responses((status = 200, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn get(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Json<EndpointView>, ApiError> {
    let endpoint = own(&services, &asking, id).await?;
    EndpointView::of(&endpoint).map(Json).ok_or_else(not_there)
}

/// Changes an endpoint.
#[utoipa::path(
    patch,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    request_body = NotificationEndpointChange,
    responses((status = 200, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn revise(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    body::Json(change): body::Json<NotificationEndpointChange>,
) -> Result<Json<EndpointView>, ApiError> {
    let change = Change {
        url: change.url.as_ref().map(|url| receiver(&services, url)).transpose()?,
        events: change.events.map(|events| names(events.as_deref())),
        is_enabled: change.enabled,
    };
    if change == Change::default() {
        return Err(ApiError::invalid_request("Nothing is to be changed; give `url`, `events` or `enabled`."));
    }
    shown(asking.ask::<NotificationEndpoint>(id, Command::Change { change }).await?).map(Json)
}

/// Deletes an endpoint, with the messages that wait for it.
#[utoipa::path(
    delete,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    responses((status = 204, description = "It is gone.")),
)]
pub(super) async fn delete(ByUser(asking): ByUser, Path(id): Path<Uuid>) -> Result<StatusCode, ApiError> {
    asking.ask::<NotificationEndpoint>(id, Command::Delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The secret that signs a webhook's messages. It is shown to its holder alone.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    responses((status = 200, description = "The secret. `Cache-Control: no-store`.", body = NotificationSecret)),
)]
pub(super) async fn secret(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Response, ApiError> {
    let endpoint = held(&services, &asking, id).await?;
    secret_of(&services, &endpoint)
}

/// Gives a webhook another secret.
///
/// For 24 hours messages are signed with both, so that its receiver can be changed without a gap. A repetition makes another secret, whatever its `Idempotency-Key`.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    responses((status = 201, description = "The secret. `Cache-Control: no-store`.", body = NotificationSecret)),
)]
pub(super) async fn rotate_secret(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    _: NoBody,
) -> Result<Response, ApiError> {
    held(&services, &asking, id).await?;
    let secret_enc = services.delivery.seal(id, &new_secret()).map_err(ApiError::internal)?;
    let answered = asking.ask_unstored::<NotificationEndpoint>(id, Command::RotateSecret { secret_enc }).await?;
    let (Reply::Shown { endpoint } | Reply::Letters { endpoint, .. }) = answered.reply else {
        return Err(unexpected());
    };
    let response = secret_of(&services, &endpoint)?;
    Ok((StatusCode::CREATED, response).into_response())
}

/// Sends the endpoint a message of type `notification.test`.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    responses((status = 202, description = "The endpoint; the message waits.", body = EndpointView)),
)]
pub(super) async fn test(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    _: Once<NoBody>,
) -> Result<Response, ApiError> {
    let body = crate::notifications::test_message(id, services.world.now());
    let answered = asking.ask::<NotificationEndpoint>(id, Command::Test { body }).await?;
    let replayed = replayed(&answered);
    Ok((StatusCode::ACCEPTED, replayed, Json(shown(answered)?)).into_response())
}

/// The messages that were tried in vain too often, oldest first: at most 50.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    responses((status = 200, description = "The dead letters.", body = Items<DeadLetterView>)),
)]
pub(super) async fn dead_letters(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Json<Items<DeadLetterView>>, ApiError> {
    let endpoint = own(&services, &asking, id).await?;
    Ok(Json(Items { items: endpoint.queue.dead.iter().map(DeadLetterView::of).collect(), next_page: None }))
}

/// Sends dead letters again: one, or all. Each has as many attempts as a new message.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    request_body = DeadLetters,
    responses((status = 200, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn resend(
    ByUser(asking): ByUser,
    Path(id): Path<Uuid>,
    Once(body::Json(which)): Once<body::Json<DeadLetters>>,
) -> Result<Response, ApiError> {
    let command = Command::Resend { message_id: which.message_id, reason: which.reason.map(|it| it.to_string()) };
    settled(&asking, id, command).await
}

/// Gives dead letters up: one, or all.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The endpoint's id")),
    request_body = DeadLetters,
    responses((status = 200, description = "The endpoint.", body = EndpointView)),
)]
pub(super) async fn dismiss(
    ByUser(asking): ByUser,
    Path(id): Path<Uuid>,
    Once(body::Json(which)): Once<body::Json<DeadLetters>>,
) -> Result<Response, ApiError> {
    let command = Command::Dismiss { message_id: which.message_id, reason: which.reason.map(|it| it.to_string()) };
    settled(&asking, id, command).await
}

async fn settled(asking: &Asking, id: Uuid, command: Command) -> Result<Response, ApiError> {
    let answered = asking.ask::<NotificationEndpoint>(id, command).await?;
    let replayed = replayed(&answered);
    Ok((replayed, Json(shown(answered)?)).into_response())
}

/// Tells the caller's own e-mail endpoint which address the identity provider has verified, so that who rents or pays is warned without having
/// asked for it. Where it cannot be told, the next request tells it.
pub(super) async fn introduce(services: &Services, asking: &Asking) {
    let (Some(address), true) = (asking.verified_email.clone(), services.delivery.mailer.is_some()) else { return };
    let user_id = asking.caller.user_id.clone();
    let id = id_of_name(Kind::NotificationEndpoint, &format!("email:{user_id}"));
    let is_known = async {
        let found = find::<NotificationEndpoint>(services, id).await.ok().flatten();
        found.is_some_and(|stored| stored.it.is_at(&address) || !stored.it.exists())
    };
    if is_known.await {
        return;
    }
    let command = Command::Introduce { user_id, address };
    let told = asking.tell_as_system::<NotificationEndpoint>("notification-endpoints", id, command);
    if !matches!(tokio::time::timeout(INTRODUCED_WITHIN, told).await, Ok(Ok(_))) {
        tracing::info!(user.id = asking.caller.user_id, "an e-mail address could not be introduced yet");
    }
}

/// The states of those that are not deleted.
fn present() -> Vec<String> {
    PRESENT.map(str::to_owned).into()
}

async fn own(services: &Services, asking: &Asking, id: Uuid) -> Result<NotificationEndpoint, ApiError> {
    let found = current::<NotificationEndpoint>(services, id).await?;
    let found = found.filter(|found| found.it.is_for(&asking.principal()));
    found.map(|found| NotificationEndpoint::clone(&found.it)).ok_or_else(not_there)
}

/// The caller's own, or their organization's: a secret is nobody else's, not even an administrator's.
async fn held(services: &Services, asking: &Asking, id: Uuid) -> Result<NotificationEndpoint, ApiError> {
    let endpoint = own(services, asking, id).await?;
    let is_theirs = match &endpoint.holder {
        Holder::User(id) => *id == asking.caller.user_id,
        Holder::Org(id) => asking.caller.org_id.as_ref() == Some(id),
    };
    is_theirs.then_some(endpoint).ok_or_else(|| ApiError::not_found("secret of yours"))
}

fn secret_of(services: &Services, endpoint: &NotificationEndpoint) -> Result<Response, ApiError> {
    let secrets = services.delivery.secrets(endpoint, services.world.now()).map_err(ApiError::internal)?;
    let Some(newest) = secrets.first() else {
        return Err(wrong("An e-mail address has no secret.", "id"));
    };
    let secret = shown_secret(newest).expose_secret().to_owned();
    Ok((no_store(), Json(NotificationSecret { secret })).into_response())
}

fn holder_of(asking: &Asking, kind: HolderKind) -> Result<Holder, ApiError> {
    match (kind, &asking.caller.org_id) {
        (HolderKind::User, _) => Ok(Holder::User(asking.caller.user_id.clone())),
        (HolderKind::Org, Some(id)) => Ok(Holder::Org(id.clone())),
        (HolderKind::Org, None) => Err(wrong("Your access token names no organization; leave `holder` out.", "holder")),
    }
}

fn receiver(services: &Services, url: &ReceiverUrl) -> Result<String, ApiError> {
    let checked = services.delivery.webhooks.check(url);
    checked.map(|()| url.to_string()).map_err(|why| wrong(&format!("`url` is refused: {why}."), "url"))
}

fn address_of(services: &Services, asking: &Asking) -> Result<String, ApiError> {
    if services.delivery.mailer.is_none() {
        let message = "No mail server is configured; the operator sets SVC_SMTP_URL (see the README, E-mail).";
        return Err(ApiError::new(Code::StateConflict, message));
    }
    asking.verified_email.clone().ok_or_else(|| {
        let message = "Your access token has no e-mail address that your identity provider has verified (claims `email` and \
                       `email_verified`); verify one there and log in again.";
        ApiError::new(Code::StateConflict, message).detail("field", "kind")
    })
}

fn names(events: Option<&[EventName]>) -> Option<BTreeSet<String>> {
    events.map(|events| events.iter().map(|event| event.to_string()).collect())
}

fn wrong(message: &str, field: &str) -> ApiError {
    ApiError::invalid_request(message.to_owned()).detail("field", field)
}

fn not_there() -> ApiError {
    ApiError::not_found("notification endpoint")
}

fn unexpected() -> ApiError {
    ApiError::internal("the notification endpoint's machine answered another question")
}

fn shown(answered: Answered<Reply>) -> Result<EndpointView, ApiError> {
    match answered.reply {
        Reply::Shown { endpoint } | Reply::Letters { endpoint, .. } => {
            EndpointView::of(&endpoint).ok_or_else(not_there)
        }
        Reply::Done => Err(unexpected()),
    }
}

impl EndpointView {
    /// `None` of one that is deleted.
    fn of(it: &NotificationEndpoint) -> Option<Self> {
        let (kind, url, address) = match it.target.clone() {
            Target::Webhook { url } => (EndpointKind::Webhook, Some(url), None),
            Target::Email { address } => (EndpointKind::Email, None, Some(address)),
        };
        let (user_id, org_id) = match it.holder.clone() {
            Holder::User(id) => (Some(id), None),
            Holder::Org(id) => (None, Some(id)),
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
            disabled_because: DisabledBecause::of(&it.phase),
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

    /// As the machine calls it.
    const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Failing => "failing",
            Self::Disabled => "disabled",
        }
    }
}

impl DisabledBecause {
    const fn of(phase: &Phase) -> Option<Self> {
        match phase {
            Phase::Disabled { because, .. } => Some(match because {
                Disabled::ByOwner => Self::ByOwner,
                Disabled::Gone => Self::Gone,
                Disabled::Failing => Self::Failing,
            }),
            Phase::Active | Phase::Deleted { .. } => None,
        }
    }
}

impl AttemptView {
    fn of(it: &Attempt) -> Self {
        let Attempt { message_id, event, at, error } = it.clone();
        Self { message_id, event, at, error }
    }
}

impl DeadLetterView {
    fn of(it: &Waiting) -> Self {
        Self {
            message_id: it.message.id,
            event: it.message.event.clone(),
            queued_at: it.since,
            attempts: it.attempts,
            last_error: it.last_error.clone(),
        }
    }
}
