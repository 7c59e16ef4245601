//! What the payment processor tells us, on a listener of its own (decisions 6, *Webhook*).
//!
//! A body is believed by its signature, stored under the processor's id for the event, and answered; what follows from it is worked on after
//! that. Whatever goes wrong before it is stored is answered so that the processor sends it again, and nothing is lost; what came before is
//! answered as if it had come for the first time, and does nothing.

mod body;
mod counters;

pub use body::{body_of, kept};
pub use counters::{COUNTERS, Counters};

use actors::AskError;
use actors::place::id_of_name;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::routing::post;
use axum::{Json, Router};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::processor_event::{Command, ProcessorEvent, Rejection};
use domain::{Action, Kind, Principal};
use serde::Serialize;
use std::time::Duration;
use uuid::Uuid;

use crate::body::read_body;
use crate::correlation::{Outermost, Scope, Service};
use crate::error::{ApiError, Code};
use crate::limits::{Concurrency, RequestTimeout, bounded, finished};
use crate::processor::signature::SignatureError;
use crate::processor::stripe::event::StripeEvent;
use crate::reception::{Reception, ReceptionLimits, received};
use crate::services::Services;
use crate::tls::serve::ListenerLimits;

/// Where the processor is told to send its events.
pub const PATH: &str = "/webhooks/payments";

/// The header that shows who sent it.
const SIGNATURE: &str = "stripe-signature";
/// The longest body, in bytes. The processor's own events are under 64 KiB.
const BODY_BYTES: usize = 256 * 1024;
/// How many are taken in at once. Over it the processor is told to send again, which it does for days.
const AT_ONCE: usize = 256;
/// How many connections there are. The processor has a few; the rest is room in which strangers do not crowd it out.
const CONNECTIONS: usize = 8192;
const CONNECTIONS_PER_ADDRESS: u32 = 256;
/// How long storing may take. The processor waits longer than that.
const STORED_WITHIN: TimeDelta = TimeDelta::seconds(6);
const REQUEST_WITHIN: Duration = Duration::from_secs(10);

/// What the processor reads of it: that it need not send it again.
#[derive(Debug, Serialize)]
struct Received {
    received: bool,
}

/// The route, ready to be served.
pub fn router(services: Services) -> Router {
    let outermost = Outermost::of(Service { name: "webhook", tells_route: false }, &services);
    let route = Router::new().route(PATH, post(receive));
    let route = bounded(route, RequestTimeout(REQUEST_WITHIN), Concurrency::at_most(AT_ONCE));
    let reception = Reception::new(ReceptionLimits::of_bodies_up_to(BODY_BYTES)).counting_refusals(|| {
        COUNTERS.received.inc();
        COUNTERS.invalid_payload.inc();
    });
    finished(received(route, reception).with_state(services), outermost)
}

/// The bounds of its listener: it is reached from anywhere, by one who needs little.
#[must_use]
pub fn listener_limits() -> ListenerLimits {
    ListenerLimits {
        connections: CONNECTIONS,
        pending: CONNECTIONS / 2,
        pending_per_address: CONNECTIONS_PER_ADDRESS / 2,
        open_per_address: CONNECTIONS_PER_ADDRESS,
        header_read_timeout: Duration::from_secs(10),
        ..ListenerLimits::default()
    }
}

async fn receive(State(services): State<Services>, scope: Scope, request: Request) -> Result<Json<Received>, ApiError> {
    COUNTERS.received.inc();
    let secrets = &services.payments()?.webhook_secrets;
    let signature = signature(request.headers());
    let body = read_body(request).await.inspect_err(|_| COUNTERS.invalid_payload.inc())?;
    signature.and_then(|signature| secrets.verify(&signature, &body, services.world.now())).map_err(not_believed)?;
    let event = StripeEvent::read(&body)
        .map_err(|error| not_kept(ApiError::invalid_request(format!("The body is signed, but {error}."))))?;
    let id = id_of_event(&event.id);
    scope.record_resource(format_args!("{}/{id}", Kind::ProcessorEvent));
    store(&services, &scope, id, event, &body).await?;
    Ok(Json(Received { received: true }))
}

/// The id of the entity that keeps the processor's event of this id.
#[must_use]
pub fn id_of_event(event_id: &str) -> Uuid {
    id_of_name(Kind::ProcessorEvent, event_id)
}

fn signature(headers: &HeaderMap) -> Result<String, SignatureError> {
    let mut given = headers.get_all(SIGNATURE).iter();
    let (Some(signature), None) = (given.next(), given.next()) else { return Err(SignatureError::NoHeader) };
    signature.to_str().map(str::to_owned).map_err(|_| SignatureError::Unreadable)
}

/// Kept once, whoever else takes it in at this moment; and where nothing follows from its type, that is all.
async fn store(services: &Services, scope: &Scope, id: Uuid, event: StripeEvent, body: &[u8]) -> Result<(), ApiError> {
    let body_enc = kept(&services.trust.at_rest, id, body).map_err(|error| not_stored(ApiError::internal(error)))?;
    let nothing_follows = !event.is_of_consequence();
    let receive = Command::Receive {
        digest: hex::encode(event.digest()),
        object_id: event.object_id(),
        occurred_at: event.occurred_at,
        event_id: event.id,
        event_type: event.event_type,
        body_enc,
        nothing_follows,
    };
    let permit = authorize(&Principal::system("webhook"), Action::Advance).map_err(ApiError::internal)?;
    let asked = scope.asked(&permit, services.world.now() + STORED_WITHIN);
    match services.directory.ask::<ProcessorEvent>(&permit, id, receive, asked).await {
        Ok(answered) => {
            if nothing_follows && answered.written {
                COUNTERS.processed();
            }
            Ok(())
        }
        Err(AskError::Rejected(Rejection::Differs)) => {
            let message =
                "Another event came under this id before, and that one is kept; an event's id is never used twice.";
            Err(not_kept(ApiError::invalid_request(message).detail("field", "id")))
        }
        Err(AskError::Overloaded) => Err(not_stored(ApiError::overloaded())),
        Err(error) => {
            let message = "The event is not stored; send it again after the time in Retry-After.";
            Err(not_stored(ApiError::new(Code::ServiceUnavailable, message).because(error)))
        }
    }
}

/// Nothing is told of what is not the processor's but that it is not; of an old one, how old it may be.
fn not_believed(error: SignatureError) -> ApiError {
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
            "The signature was made more than five minutes ago; sign it anew, and see to both machines' clocks.",
        ),
        SignatureError::TooNew => {
            ("signature_too_new", "The signature is more than five minutes ahead; see to both machines' clocks.")
        }
    };
    ApiError::invalid_request(message).detail("reason", reason).because(error)
}

fn not_kept(error: ApiError) -> ApiError {
    COUNTERS.invalid_payload.inc();
    error
}

fn not_stored(error: ApiError) -> ApiError {
    COUNTERS.persist_failures.inc();
    error
}
