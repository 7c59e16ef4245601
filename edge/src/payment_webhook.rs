//! The payment processor's webhooks, on a listener of their own (decisions 6, *Webhook*).
//!
//! A body is verified by its signature, stored under the processor's id for the event, and acknowledged; it is processed after that. Any
//! failure before it is stored has a response that makes the processor retry, so that nothing is lost; a duplicate is acknowledged like the
//! first delivery and has no effect.

mod body;
mod webhook_metrics;

pub use body::{body_of, seal_body};
pub use webhook_metrics::{COUNTERS, WebhookCounters};

use actors::AskError;
use actors::sharding::id_of_name;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::routing::post;
use axum::{Json, Router};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::processor_event::{Fact, ProcessorEvent, Rejection};
use domain::{Action, EntityKind, Principal};
use serde::Serialize;
use std::time::Duration;
use uuid::Uuid;

use crate::app_state::AppState;
use crate::http::correlation::{Scope, Service};
use crate::http::error::{ApiError, Code};
use crate::http::request_body::read_body;
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded, with_common_layers};
use crate::limits::body_admission::{BodyAdmission, BodyAdmissionLimits, admit_bodies};
use crate::payment_processor::signature::SignatureError;
use crate::payment_processor::stripe::event::StripeEvent;
use crate::tls::serve::ListenerLimits;

/// The path that the processor sends its events to.
pub const PATH: &str = "/webhooks/payments";

/// The header with the signature.
const SIGNATURE: &str = "stripe-signature";
/// The longest body, in bytes. The processor's own events are under 64 KiB.
const BODY_BYTES: usize = 256 * 1024;
/// Requests at once. Over it the processor is asked to retry, which it does for days.
const MAX_CONCURRENT: usize = 256;
/// How many connections there are. The processor has a few; the rest is room in which strangers do not crowd it out.
const MAX_CONNECTIONS: usize = 8192;
const CONNECTIONS_PER_ADDRESS: u32 = 256;
/// Timeout for storing. The processor waits longer than that.
const STORE_TIMEOUT: TimeDelta = TimeDelta::seconds(6);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The acknowledgement: the processor need not retry.
#[derive(Debug, Serialize)]
struct WebhookReceipt {
    received: bool,
}

/// The route, ready to be served.
pub fn router(app: AppState) -> Router {
    let scope_settings = app.scope_settings(Service { name: "webhook", shows_route: false });
    let route = Router::new().route(PATH, post(receive));
    let route = bounded(route, RequestTimeout(REQUEST_TIMEOUT), Concurrency::at_most(MAX_CONCURRENT));
    let admission = BodyAdmission::new(BodyAdmissionLimits::of_bodies_up_to(BODY_BYTES)).counting_refusals(|| {
        COUNTERS.received.inc();
        COUNTERS.invalid_payload.inc();
    });
    with_common_layers(admit_bodies(route, admission).with_state(app), scope_settings)
}

/// The bounds of its listener: it is open to the internet, for one client that needs little.
#[must_use]
pub fn listener_limits() -> ListenerLimits {
    ListenerLimits {
        connections: MAX_CONNECTIONS,
        pending: MAX_CONNECTIONS / 2,
        pending_per_address: CONNECTIONS_PER_ADDRESS / 2,
        open_per_address: CONNECTIONS_PER_ADDRESS,
        header_read_timeout: Duration::from_secs(10),
        ..ListenerLimits::default()
    }
}

async fn receive(
    State(app): State<AppState>,
    scope: Scope,
    request: Request,
) -> Result<Json<WebhookReceipt>, ApiError> {
    COUNTERS.received.inc();
    let secrets = &app.payments()?.webhook_secrets;
    let signature = signature(request.headers());
    let body = read_body(request).await.inspect_err(|_| COUNTERS.invalid_payload.inc())?;
    signature
        .and_then(|signature| secrets.verify(&signature, &body, app.environment.now()))
        .map_err(signature_refused)?;
    let event = StripeEvent::read(&body)
        .map_err(|error| payload_refused(ApiError::invalid_request(format!("The body is signed, but {error}."))))?;
    let id = id_of_event(&event.id);
    scope.record_resource(format_args!("{}/{id}", EntityKind::ProcessorEvent));
    store(&app, &scope, id, event, &body).await?;
    Ok(Json(WebhookReceipt { received: true }))
}

/// The id of the entity that stores the processor's event of this id.
#[must_use]
pub fn id_of_event(event_id: &str) -> Uuid {
    id_of_name(EntityKind::ProcessorEvent, event_id)
}

fn signature(headers: &HeaderMap) -> Result<String, SignatureError> {
    let mut given = headers.get_all(SIGNATURE).iter();
    let (Some(signature), None) = (given.next(), given.next()) else { return Err(SignatureError::NoHeader) };
    signature.to_str().map(str::to_owned).map_err(|_| SignatureError::Unreadable)
}

/// Stores the event once, however many deliveries arrive at this moment; an event without effect ends here.
async fn store(app: &AppState, scope: &Scope, id: Uuid, event: StripeEvent, body: &[u8]) -> Result<(), ApiError> {
    let body_enc = seal_body(&app.trust.at_rest, id, body).map_err(|error| store_failed(ApiError::internal(error)))?;
    let nothing_follows = !event.has_effect();
    let receive = Fact::Received {
        digest: hex::encode(event.digest()),
        object_id: event.object_id(),
        occurred_at: event.occurred_at,
        event_id: event.id,
        event_type: event.event_type,
        body_enc,
        nothing_follows,
    };
    let permit = authorize(&Principal::system("webhook"), Action::Advance).map_err(ApiError::internal)?;
    let context = scope.command_context(&permit, app.environment.now() + STORE_TIMEOUT);
    match app.directory.ask::<ProcessorEvent>(&permit, id, receive.into(), context).await {
        Ok(answered) => {
            if nothing_follows && answered.written {
                COUNTERS.processed();
            }
            Ok(())
        }
        Err(AskError::Rejected(Rejection::Differs)) => {
            let message = "Another event with this id is stored already; an event's id is never used twice.";
            Err(payload_refused(ApiError::invalid_request(message).detail("field", "id")))
        }
        Err(AskError::Overloaded) => Err(store_failed(ApiError::overloaded())),
        Err(error) => {
            let message = "The event is not stored; send it again after the time in Retry-After.";
            Err(store_failed(ApiError::new(Code::ServiceUnavailable, message).because(error)))
        }
    }
}

/// A body that is not the processor's gets only that answer; one with an old signature also the limit on its age.
fn signature_refused(error: SignatureError) -> ApiError {
    COUNTERS.signature_failures.inc();
    let (reason, message) = match error {
        SignatureError::NoHeader => ("signature_missing", "Send the header Stripe-Signature, once."),
        SignatureError::Unreadable => {
            ("signature_unreadable", "The header Stripe-Signature cannot be read; send it as the processor makes it.")
        }
        SignatureError::NoV1 => {
            ("signature_scheme", "The header Stripe-Signature has no signature of the scheme v1; others prove nothing.")
        }
        SignatureError::Wrong => (
            "signature_wrong",
            "No signature fits the body. Send it as it came, byte for byte, and give the service this endpoint's secret \
             (SVC_PAYMENTS_WEBHOOK_SECRETS).",
        ),
        SignatureError::TooOld => (
            "signature_too_old",
            "The signature was made more than five minutes ago; sign it again, and check both machines' clocks.",
        ),
        SignatureError::TooNew => {
            ("signature_too_new", "The signature is more than five minutes ahead; see to both machines' clocks.")
        }
    };
    ApiError::invalid_request(message).detail("reason", reason).because(error)
}

fn payload_refused(error: ApiError) -> ApiError {
    COUNTERS.invalid_payload.inc();
    error
}

fn store_failed(error: ApiError) -> ApiError {
    COUNTERS.persist_failures.inc();
    error
}
