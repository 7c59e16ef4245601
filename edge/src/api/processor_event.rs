//! Events of the payment processor, for operators who handle those that failed (decisions 6, *Webhook*).

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use chrono::{DateTime, Utc};
use domain::Machine as _;
use domain::Timestamp;
use domain::processor_event::{Phase, ProcessingOutcome, ProcessorEvent, Reply, Request};
use persistence::queries::ListFilter;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::commands_with_reason::reason_commands;
use super::request_context::{Authorized, RequestContext, SeeBilling, SettleProcessorEvents, replayed};
use super::request_fields::{ProcessorId, ReasonBody};
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, current};
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery};
use crate::http::request_body::{self, Path};
use crate::payment_webhook::id_of_event;

/// A filter of events.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventFilter {
    state: Option<EventState>,
    /// The event with this id of the processor.
    #[param(inline)]
    event_id: Option<ProcessorId>,
    /// The order of the list; the oldest first where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    order: Option<Order>,
}

/// The state of an event. One that is `dead` has failed in its last attempt, and waits for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[schema(as = ProcessorEventState)]
#[serde(rename_all = "snake_case")]
pub(super) enum EventState {
    Received,
    Retrying,
    Dead,
    Processed,
    Dismissed,
}

/// The outcome of an event: it was applied to a payment, it concerns an object that was not created here, or its type has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ProcessorEventOutcome)]
#[serde(rename_all = "snake_case")]
enum EventOutcome {
    // The name of release 0.1.0, which its clients read.
    #[serde(rename = "told")]
    Applied,
    NotOurs,
    NothingToDo,
}

/// An event of the payment processor. Its body is stored sealed, and not shown: the processor shows it under `event_id`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ProcessorEvent)]
pub(super) struct EventView {
    id: Uuid,
    /// The processor's own id of the event.
    event_id: String,
    /// Its type at the processor, such as `payment_intent.succeeded`.
    event_type: String,
    /// The processor's id of its object; null where the event names none.
    object_id: Option<String>,
    state: EventState,
    /// Null until it is processed.
    outcome: Option<EventOutcome>,
    /// The failed attempts since it was received, or since an operator retried it.
    attempts: u32,
    /// Why the last attempt failed.
    last_error: Option<String>,
    /// When the next attempt is due; null where there is none.
    next_attempt_at: Option<DateTime<Utc>>,
    /// When it occurred, as the processor says.
    occurred_at: Option<DateTime<Utc>>,
    received_at: DateTime<Utc>,
    /// When it was processed or dismissed.
    ended_at: Option<DateTime<Utc>>,
    /// Why an operator dismissed it.
    dismissed_because: Option<String>,
    /// The deadline of its state.
    deadline_at: Option<DateTime<Utc>>,
    /// True after the deadline.
    overdue: bool,
}

/// The events of the payment processor.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, EventFilter),
    responses((status = 200, description = "A page of events.", body = Items<EventView>)),
)]
pub(super) async fn list(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    listing: Listing<EventFilter>,
) -> Result<Json<Items<EventView>>, ApiError> {
    let order = listing.filter.order.unwrap_or_default();
    let page = listing.page("admin/billing/processor-events", "", order)?;
    let (filter, now) = (&listing.filter, app.environment.now());
    if let Some(event_id) = &filter.event_id {
        let found = current::<ProcessorEvent>(&app, id_of_event(event_id)).await?;
        let views = found.iter().map(|found| EventView::of(&found.it, now));
        let items = views.filter(|view| filter.state.is_none_or(|state| state == view.state)).collect();
        return Ok(Json(Items { items, next_page: None }));
    }
    let states = filter.state.map(|state| state.name().to_owned()).into_iter().collect();
    let filter = ListFilter { states, ..ListFilter::default() };
    let rows = read_model::list::<ProcessorEvent>(&app, &filter, &page).await?;
    Ok(Json(read_model::to_page(&page, rows, |stored| EventView::of(&stored.it, now))))
}

/// One event.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The event.", body = EventView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get(
    _: Authorized<SeeBilling>,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<EventView>, ApiError> {
    let found = current::<ProcessorEvent>(&app, id).await?;
    let found = found.ok_or_else(|| ApiError::not_found("event of the payment processor"))?;
    Ok(Json(EventView::of(&found.it, app.environment.now())))
}

reason_commands! {
    Authorized<SettleProcessorEvents>, execute => 200 "The event." EventView;

    /// Retries a dead event, or one that waits for its next attempt or is overdue, at once.
    ///
    /// It has as many attempts as a new one.
    retry: Retry;

    /// Dismisses an event that could not be applied: nothing follows from it.
    ///
    /// Correct its effect on the money by other means first, by an adjustment for example. It cannot be undone.
    dismiss: Dismiss;
}

async fn execute(app: &AppState, context: RequestContext, id: Uuid, request: Request) -> Result<Response, ApiError> {
    let answered = context.prioritized().ask::<ProcessorEvent>(id, request).await?;
    let replayed = replayed(&answered);
    let Reply::Shown { event } = answered.reply else {
        return Err(ApiError::internal("the machine of the processor's events answered another question"));
    };
    Ok((replayed, Json(EventView::of(&event, app.environment.now()))).into_response())
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

    /// The name of the state in the state machine.
    const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl EventOutcome {
    const fn of(outcome: ProcessingOutcome) -> Self {
        match outcome {
            ProcessingOutcome::Applied => Self::Applied,
            ProcessingOutcome::NotOurs => Self::NotOurs,
            ProcessingOutcome::NothingToDo => Self::NothingToDo,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_have_the_names_of_the_first_release() {
        let names = ProcessingOutcome::ALL.map(|outcome| serde_json::to_value(EventOutcome::of(outcome)).unwrap());
        assert_eq!(names, ["told", "not_ours", "nothing_to_do"]);
    }
}
