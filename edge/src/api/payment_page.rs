//! The page on which users pay, where the payment processor has none: its script takes the card, and this service sees none of it.
//!
//! The page contains no user's data. The secret that opens the payment at the processor is in the fragment of its address, which browsers
//! do not send; the terms are requested by the processor's id of the payment, which is as hard to guess.

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

use super::browser_page::{PAGE_STYLES, PageFiles, SCRIPT, STYLE, page_response, page_with_styles};
use crate::app_state::read_model::current;
use crate::app_state::{AppState, PaymentPage};
use crate::http::correlation::no_store;
use crate::http::error::ApiError;
use crate::http::request_body::Path;
use crate::http::websocket::origin_of;

const PAGE: &str = include_str!("../../payment-page/index.html");
const RETURNED: &str = include_str!("../../payment-page/returned.html");

/// The page's own assets.
const FILES: [(&str, &str, &str); 5] = [
    ("page-styles.js", SCRIPT, PAGE_STYLES),
    ("main.js", SCRIPT, include_str!("../../payment-page/main.js")),
    ("card_payment.js", SCRIPT, include_str!("../../payment-page/card_payment.js")),
    ("checkout_terms.js", SCRIPT, include_str!("../../payment-page/checkout_terms.js")),
    ("style.css", STYLE, include_str!("../../payment-page/style.css")),
];

/// The sources that Stripe's script loads beside its own origin (docs.stripe.com/security/guide, *Content security policy*).
const STRIPE: &str = "https://js.stripe.com";
const STRIPE_EXTRA_SOURCES: [&str; 2] =
    [" https://*.js.stripe.com", " https://*.js.stripe.com https://hooks.stripe.com"];

/// The policy of a page of text alone.
const RETURNED_CSP: &str =
    "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The longest id of a payment at a processor.
const MAX_PROCESSOR_ID_LEN: usize = 255;

/// The terms of a payment: its amount, currency and state.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CheckoutTerms)]
pub(super) struct TermsView {
    amount_minor: i64,
    currency: String,
    /// The `state` of the payment.
    state: &'static str,
    /// Where the payer is redirected after paying, and after canceling.
    success_url: String,
    cancel_url: String,
}

static PAGE_FILES: LazyLock<PageFiles> = LazyLock::new(|| PageFiles::built_in(&FILES));

/// The page on which a payment is made.
///
/// It is there where the payment processor has no page of its own. Its address, with what opens the payment, comes from
/// `POST /api/v1/billing/checkout-sessions`.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
    extensions(
        ("x-without-gpuctl" = json!("a page; `billing top-up` opens it")),
        ("x-without-console" = json!("a document of its own, to which a payment leads")),
    ),
)]
pub(super) async fn page(State(app): State<AppState>, Path(_payment): Path<Uuid>) -> Result<Response, ApiError> {
    let page = page_of(&app)?;
    let html = PAGE
        .replace("{{script_url}}", &escaped(&page.script_url))
        .replace("{{publishable_key}}", &escaped(&page.publishable_key));
    page_with_styles(&html, &content_security_policy(page))
}

/// The page after paying or canceling, for payers without a page of their own.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
    extensions(
        ("x-without-gpuctl" = json!("a page")),
        ("x-without-console" = json!("a document of its own, to which the payment processor returns")),
    ),
)]
pub(super) async fn returned() -> Response {
    page_response(RETURNED, HeaderValue::from_static(RETURNED_CSP))
}

/// The terms of a payment, for a client that has the page's address.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "What is to be paid.", body = TermsView)),
    extensions(
        ("x-without-gpuctl" = json!("for the page of a payment")),
        ("x-without-console" = json!("the document of the payment reads it")),
    ),
)]
pub(super) async fn terms(
    State(app): State<AppState>,
    connection: Extensions,
    Path((payment, processor_id)): Path<(Uuid, String)>,
) -> Result<impl IntoResponse, ApiError> {
    page_of(&app)?;
    app.limiter.admit_unauthenticated(&connection, &app.environment.policy(), app.environment.now())?;
    let found =
        if processor_id.len() <= MAX_PROCESSOR_ID_LEN { current::<Payment>(&app, payment).await? } else { None };
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
    responses(
        (status = 200, description = "The file.", content((String = "text/javascript"), (String = "text/css"))),
        (status = 304, description = "The file is the one that `If-None-Match` names."),
    ),
    extensions(
        ("x-without-gpuctl" = json!("a part of a page")),
        ("x-without-console" = json!("a part of a document")),
    ),
)]
pub(super) async fn asset(Path(name): Path<String>, request_headers: HeaderMap) -> Result<Response, ApiError> {
    PAGE_FILES.response(&name, &request_headers)
}

fn page_of(app: &AppState) -> Result<&PaymentPage, ApiError> {
    let page = app.payments.as_ref().and_then(|payments| payments.page.as_ref());
    page.ok_or_else(|| ApiError::not_found("page: the payment processor has one of its own, or none is configured"))
}

/// The policy of the payment page: it runs its own script and the processor's, shows the processor's frames, and connects to both.
fn content_security_policy(page: &PaymentPage) -> String {
    let script = origin_of(&page.script_url);
    let [scripts, frames] = if script == STRIPE { STRIPE_EXTRA_SOURCES } else { [""; 2] };
    let api = &page.api_origin;
    // It may connect to its own origin, too.
    let api = if *api == script { api.clone() } else { format!("{api} {script}") };
    format!(
        "default-src 'none'; script-src 'self' {script}{scripts}; connect-src 'self' {api}; frame-src {script}{frames}; \
         style-src 'self' 'nonce-{{{{nonce}}}}'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}

/// Escapes the text for an attribute's value.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}
