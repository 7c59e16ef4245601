//! The page on which users pay, where the payment processor has none: its script takes the card, and this service sees none of it.
//!
//! The page holds nothing of anybody. What opens the payment at the processor stands in the fragment of its address, which browsers keep to
//! themselves; what is to be paid is asked for by the processor's name of it, which is as hard to guess.

use std::sync::LazyLock;

use axum::Json;
use axum::extract::State;
use axum::http::{Extensions, HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use domain::Machine as _;
use domain::payment::Payment;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::browser_page::{Files, SCRIPT, STYLE, shown};
use super::stored::current;
use crate::body::Path;
use crate::correlation::no_store;
use crate::error::ApiError;
use crate::services::{PaymentPage, Services};
use crate::websocket::origin_of;

const PAGE: &str = include_str!("../../payment-page/index.html");
const RETURNED: &str = include_str!("../../payment-page/returned.html");

/// What the page loads of ours.
const FILES: [(&str, &str, &str); 4] = [
    ("main.js", SCRIPT, include_str!("../../payment-page/main.js")),
    ("paying.js", SCRIPT, include_str!("../../payment-page/paying.js")),
    ("terms.js", SCRIPT, include_str!("../../payment-page/terms.js")),
    ("style.css", STYLE, include_str!("../../payment-page/style.css")),
];

/// What Stripe's script loads and shows beside its own origin (docs.stripe.com/security/guide, *Content security policy*).
const STRIPE: &str = "https://js.stripe.com";
const BESIDE_STRIPE: [&str; 2] = [" https://*.js.stripe.com", " https://*.js.stripe.com https://hooks.stripe.com"];

/// A page that shows words.
const RETURNED_MAY: &str =
    "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The longest name by which a processor calls a payment.
const LONGEST_NAME: usize = 255;

/// What is to be paid.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CheckoutTerms)]
pub(super) struct TermsView {
    amount_minor: i64,
    currency: String,
    /// As the payment's own `state`.
    state: &'static str,
    /// Where the payer is sent once it is paid, and where when they turn back.
    success_url: String,
    cancel_url: String,
}

static LOADED: LazyLock<Files> = LazyLock::new(|| Files::built_in(&FILES));

/// The page on which a payment is made.
///
/// It is there where the payment processor has no page of its own. Its address, with what opens the payment, comes from
/// `POST /api/v1/billing/checkout-sessions`.
#[utoipa::path(
    get,
    path = "/",
    params(("payment_id" = Uuid, Path, description = "The payment's id")),
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
)]
pub(super) async fn page(State(services): State<Services>, Path(_payment): Path<Uuid>) -> Result<Response, ApiError> {
    let page = page_of(&services)?;
    let html = PAGE
        .replace("{{script_url}}", &escaped(&page.script_url))
        .replace("{{publishable_key}}", &escaped(&page.publishable_key));
    Ok(shown(html, may(page)?))
}

/// Where somebody's browser goes after they paid, or turned back, where they have no page of their own.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
)]
pub(super) async fn returned() -> Response {
    shown(RETURNED, HeaderValue::from_static(RETURNED_MAY))
}

/// What is to be paid, for whoever was given the page's address.
#[utoipa::path(
    get,
    path = "/",
    params(
        ("payment_id" = Uuid, Path, description = "The payment's id"),
        ("processor_id" = String, Path, description = "What the processor calls it, as in the page's address", example = "pi_1"),
    ),
    responses((status = 200, description = "What is to be paid.", body = TermsView)),
)]
pub(super) async fn terms(
    State(services): State<Services>,
    connection: Extensions,
    Path((payment, processor_id)): Path<(Uuid, String)>,
) -> Result<impl IntoResponse, ApiError> {
    page_of(&services)?;
    services.limiter.asked_by_nobody(&connection, &services.world.policy(), services.world.now())?;
    let found = if processor_id.len() <= LONGEST_NAME { current::<Payment>(&services, payment).await? } else { None };
    let found = found.filter(|found| found.it.processor_id.as_deref() == Some(processor_id.as_str()));
    let it = found.ok_or_else(|| ApiError::not_found("payment"))?.it;
    let view = TermsView {
        amount_minor: it.amount_minor,
        currency: it.currency.as_str().to_owned(),
        state: it.state(),
        success_url: it.success_url.clone(),
        cancel_url: it.cancel_url.clone(),
    };
    Ok((no_store(), Json(view)))
}

/// A script or style sheet of the page on which payments are made.
#[utoipa::path(
    get,
    path = "/",
    params(("name" = String, Path, description = "The file's name, as the page asks for it", example = "main.js")),
    responses(
        (status = 200, description = "The file.", content((String = "text/javascript"), (String = "text/css"))),
        (status = 304, description = "The file is the one that `If-None-Match` names."),
    ),
)]
pub(super) async fn asset(Path(name): Path<String>, asked: HeaderMap) -> Result<Response, ApiError> {
    LOADED.answer(&name, &asked)
}

fn page_of(services: &Services) -> Result<&PaymentPage, ApiError> {
    let page = services.payments.as_ref().and_then(|payments| payments.page.as_ref());
    page.ok_or_else(|| ApiError::not_found("page: the payment processor has one of its own, or none is configured"))
}

/// Run its own script and the processor's, show what that shows, and talk to the two.
fn may(page: &PaymentPage) -> Result<HeaderValue, ApiError> {
    let script = origin_of(&page.script_url);
    let [scripts, frames] = if script == STRIPE { BESIDE_STRIPE } else { [""; 2] };
    let api = &page.api_origin;
    // It may ask where it came from, too.
    let api = if *api == script { api.clone() } else { format!("{api} {script}") };
    let may = format!(
        "default-src 'none'; script-src 'self' {script}{scripts}; connect-src 'self' {api}; frame-src {script}{frames}; \
         style-src 'self' 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    HeaderValue::from_str(&may).map_err(|_| ApiError::internal("the payment processor's address is no header's text"))
}

/// As the value of an attribute.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}
