//! What the payment processor said: for operators who look after what could not be carried out (decisions 6, *Webhook*).

use actors::Answered;
use axum::Json;
use axum::extract::State;
use axum::response::IntoResponse;
use chrono::{DateTime, Utc};
use domain::Machine as _;
use domain::Timestamp;
use domain::processor_event::{Command, Outcome, Phase, ProcessorEvent, Reply};
use persistence::read::ListFilter;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::asking::{May, SeeBilling, SettleProcessorEvents, replayed};
use super::field::{Because, ProcessorId};
use super::stored::{self, current};
use crate::body::{self, Path};
use crate::error::ApiError;
use crate::idempotency::keyed::Once;
use crate::page::{Items, Listing, Order, PageQuery};
use crate::services::Services;
use crate::webhook::id_of_event;

/// Which events.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventFilter {
    state: Option<EventState>,
    /// The one that the processor calls so.
    #[param(inline)]
    event_id: Option<ProcessorId>,
}

/// Where an event stands. One that is `dead` was tried in vain too often, and waits for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = ProcessorEventState)]
#[serde(rename_all = "snake_case")]
pub(super) enum EventState {
    Received,
    Retrying,
    Dead,
    Processed,
    Dismissed,
}

/// What an event came to: a payment was told of it, it concerns something that was not made here, or nothing follows from its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ProcessorEventOutcome)]
#[serde(rename_all = "snake_case")]
enum EventOutcome {
    Told,
    NotOurs,
    NothingToDo,
}

/// What the payment processor said, once. Its body is kept sealed, and not shown: the processor shows it under `event_id`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ProcessorEvent)]
pub(super) struct EventView {
    id: Uuid,
    /// The processor's own id of the event.
    event_id: String,
    /// As the processor calls it, such as `payment_intent.succeeded`.
    event_type: String,
    /// What it is about, by the processor's id; null where the event names none.
    object_id: Option<String>,
    state: EventState,
    /// Null until it is processed.
    outcome: Option<EventOutcome>,
    /// How often it was tried in vain, since it came or an operator had it tried anew.
    attempts: u32,
    /// Why the last attempt came to nothing.
    last_error: Option<String>,
    /// When it is tried next; null where nothing goes on by itself.
    next_attempt_at: Option<DateTime<Utc>>,
    /// When the processor says it came about.
    occurred_at: Option<DateTime<Utc>>,
    received_at: DateTime<Utc>,
    /// When it was processed or dismissed.
    ended_at: Option<DateTime<Utc>>,
    /// Why an operator dismissed it.
    dismissed_because: Option<String>,
    /// The end that its state must not outlive.
    deadline_at: Option<DateTime<Utc>>,
    /// True past that end.
    overdue: bool,
}

/// What the payment processor said, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, EventFilter),
    responses((status = 200, description = "A page of events.", body = Items<EventView>)),
)]
pub(super) async fn list(
    _: May<SeeBilling>,
    State(services): State<Services>,
    listing: Listing<EventFilter>,
) -> Result<Json<Items<EventView>>, ApiError> {
    let page = listing.page("admin/billing/processor-events", "", Order::OldestFirst)?;
    let (filter, now) = (&listing.filter, services.world.now());
    if let Some(event_id) = &filter.event_id {
        let found = current::<ProcessorEvent>(&services, id_of_event(event_id)).await?;
        let views = found.iter().map(|found| EventView::of(&found.it, now));
        let items = views.filter(|view| filter.state.is_none_or(|state| state == view.state)).collect();
        return Ok(Json(Items { items, next_page: None }));
    }
    let states = filter.state.map(|state| state.name().to_owned()).into_iter().collect();
    let filter = ListFilter { states, ..ListFilter::default() };
    let rows = stored::list::<ProcessorEvent>(&services, &filter, &page).await?;
    Ok(Json(stored::answer(&page, rows, |stored| EventView::of(&stored.it, now))))
}

/// One event.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The event's id here")),
    responses((status = 200, description = "The event.", body = EventView)),
)]
pub(super) async fn get(
    _: May<SeeBilling>,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Json<EventView>, ApiError> {
    let found = current::<ProcessorEvent>(&services, id).await?;
    let found = found.ok_or_else(|| ApiError::not_found("event of the payment processor"))?;
    Ok(Json(EventView::of(&found.it, services.world.now())))
}

/// Has a dead event tried again, or one that waits for its next attempt at once.
///
/// It has as many attempts as a new one.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The event's id here")),
    request_body = Because,
    responses((status = 200, description = "The event.", body = EventView)),
)]
pub(super) async fn retry(
    may: May<SettleProcessorEvents>,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<impl IntoResponse, ApiError> {
    let command = Command::Retry { reason: why.reason.to_string() };
    let asking = may.asking.urgently();
    shown(&services, asking.ask::<ProcessorEvent>(id, command).await?)
}

/// Says of an event that could not be carried out that nothing is to follow from it.
///
/// What it told of the money is put right by other means first, by an adjustment for example. It cannot be taken back.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The event's id here")),
    request_body = Because,
    responses((status = 200, description = "The event.", body = EventView)),
)]
pub(super) async fn dismiss(
    may: May<SettleProcessorEvents>,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<impl IntoResponse, ApiError> {
    let command = Command::Dismiss { reason: why.reason.to_string() };
    let asking = may.asking.urgently();
    shown(&services, asking.ask::<ProcessorEvent>(id, command).await?)
}

fn shown(services: &Services, answered: Answered<Reply>) -> Result<impl IntoResponse + use<>, ApiError> {
    let replayed = replayed(&answered);
    let Reply::Shown { event } = answered.reply else {
        return Err(ApiError::internal("the machine of the processor's events answered another question"));
    };
    Ok((replayed, Json(EventView::of(&event, services.world.now()))))
}

impl EventView {
    fn of(it: &ProcessorEvent, now: Timestamp) -> Self {
        let deadline = it.deadline();
        let (outcome, ended_at, dismissed_because) = match &it.phase {
            Phase::Processed { at, outcome } => (Some(EventOutcome::of(*outcome)), Some(*at), None),
            Phase::Dismissed { at, reason } => (None, Some(*at), Some(reason.clone())),
            Phase::Received { .. } | Phase::Retrying { .. } | Phase::Dead { .. } => (None, None, None),
        };
        Self {
            id: it.id.0,
            event_id: it.event_id.clone(),
            event_type: it.event_type.clone(),
            object_id: it.object_id.clone(),
            state: EventState::of(&it.phase),
            outcome,
            attempts: it.attempts,
            last_error: it.last_error.clone(),
            next_attempt_at: if it.is_open() { it.timer() } else { None },
            occurred_at: it.occurred_at,
            received_at: it.received_at,
            ended_at,
            dismissed_because,
            overdue: deadline.as_ref().is_some_and(|deadline| deadline.at <= now),
            deadline_at: deadline.map(|deadline| deadline.at),
        }
    }
}

impl EventState {
    const fn of(phase: &Phase) -> Self {
        match phase {
            Phase::Received { .. } => Self::Received,
            Phase::Retrying { .. } => Self::Retrying,
            Phase::Dead { .. } => Self::Dead,
            Phase::Processed { .. } => Self::Processed,
            Phase::Dismissed { .. } => Self::Dismissed,
        }
    }

    /// As the machine calls it.
    const fn name(self) -> &'static str {
        match self {
            Self::Received => "received",
            Self::Retrying => "retrying",
            Self::Dead => "dead",
            Self::Processed => "processed",
            Self::Dismissed => "dismissed",
        }
    }
}

impl EventOutcome {
    const fn of(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Told => Self::Told,
            Outcome::NotOurs => Self::NotOurs,
            Outcome::NothingToDo => Self::NothingToDo,
        }
    }
}
