//! The payment processor over Stripe's API, and over any service with the same API.
//!
//! Requests are forms, responses JSON. Only the fields in use are read; the rest is optional, so that another processor with the same API,
//! or another version of it, works.

use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::FutureExt as _;
use reqwest::{Client, Method, StatusCode, Url};
use secrecy::{ExposeSecret as _, SecretString};
use serde::de::DeserializeOwned;
use thiserror::Error;
use wire::address::{AddressError, ServiceUrl};

use super::{
    Checkout, Dispute, OpenedCheckout, PriorCheckout, Processor, ProcessorError, ProcessorFuture, ProcessorListing,
    ProcessorPayment, ProcessorRefundRecord, RefundRequest,
};
use crate::outbound::http_client::{client_builder, error_chain, read_bounded_body};
use domain::PaymentId;
use domain::money::Currency;
use objects::{Charge, Envelope, Failure, Intent, List, ListEntry, Session, payment_of};
use serde_json::Value;

pub mod event;
pub(crate) mod objects;

/// The version of the API that these shapes are of.
const VERSION: &str = "2024-06-20";

/// For a whole request. The processor's own timeout is longer; the caller retries.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// A page of a hundred objects, with room to spare.
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// The processor's maximum page size.
const PAGE: &str = "100";
/// The bound on one listing: a hundred thousand objects.
const MAX_PAGES: usize = 1_000;

/// Currencies without decimals (ISO 4217) whose amounts the API takes with two, for compatibility: what is shown as 5000 would be charged
/// as 50.
const OTHER_DECIMALS: [&str; 2] = ["ISK", "UGX"];

/// Where and how payments are made.
#[derive(Clone, Debug)]
pub struct StripeSettings {
    /// Where the API is; HTTPS, or HTTP on this machine.
    pub api_base: String,
    pub secret_key: SecretString,
    pub checkout: CheckoutPage,
    /// Authorities for the processor's certificate in PEM, where the system does not trust it.
    pub authorities_pem: Option<String>,
}

/// Where a user pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckoutPage {
    /// On the processor's own page (Checkout Sessions).
    Sessions,
    /// On our own page (PaymentIntents), where the processor has none.
    Ours,
}

/// Why the client could not be built.
#[derive(Debug, Error)]
pub enum StripeError {
    #[error("{0}")]
    Address(AddressError),
    #[error("the client for the payment processor cannot be made: {0}")]
    Client(String),
}

/// A client of Stripe, or of a service with the same API.
pub struct Stripe {
    base: Url,
    secret_key: SecretString,
    checkout: CheckoutPage,
    client: Client,
}

impl Stripe {
    /// # Errors
    /// Where the address is not on HTTPS, or the authorities cannot be read.
    pub fn new(settings: StripeSettings) -> Result<Self, StripeError> {
        let base = ServiceUrl::parse(&settings.api_base).map_err(StripeError::Address)?;
        let base = Url::parse(base.as_str()).map_err(|error| StripeError::Client(error.to_string()))?;
        let client = client_builder(settings.authorities_pem.as_deref()).map_err(StripeError::Client)?;
        let client = client.timeout(REQUEST_TIMEOUT).connect_timeout(CONNECT_TIMEOUT).build();
        let client = client.map_err(|error| StripeError::Client(error.to_string()))?;
        Ok(Self { base, secret_key: settings.secret_key, checkout: settings.checkout, client })
    }

    async fn open(&self, wanted: &Checkout) -> Result<OpenedCheckout, ProcessorError> {
        let before = match &wanted.before {
            PriorCheckout::Nothing => None,
            PriorCheckout::Since(since) => self.find_checkout(wanted.payment_id, *since).await?,
            PriorCheckout::Known(processor_id) => Some(self.open_existing(processor_id).await?),
        };
        match before {
            Some(opened) => Ok(opened),
            None => self.create_checkout(wanted).await,
        }
    }

    async fn open_existing(&self, processor_id: &str) -> Result<OpenedCheckout, ProcessorError> {
        let opened = if objects::is_session(processor_id) {
            let session: Option<Session> = self.get_one("/v1/checkout/sessions", processor_id, &[]).await?;
            session.map(Session::into_checkout).transpose()?
        } else {
            let intent: Option<Intent> = self.get_one("/v1/payment_intents", processor_id, &[]).await?;
            intent.map(Intent::into_checkout).transpose()?
        };
        opened.ok_or_else(|| refused(Some(RESOURCE_MISSING.to_owned()), format!("{processor_id} is not there")))
    }

    async fn create_checkout(&self, wanted: &Checkout) -> Result<OpenedCheckout, ProcessorError> {
        let (payment_id, amount) = (wanted.payment_id.to_string(), wanted.amount_minor.to_string());
        let currency = wanted.currency.as_str().to_lowercase();
        if !takes_amounts_in(&wanted.currency) {
            return Err(refused(None, format!("its amounts in {currency} have other decimals than those of ISO 4217")));
        }
        // Repeated within a day, the same object is answered.
        let once = format!("payment-{payment_id}");
        match self.checkout {
            CheckoutPage::Ours => {
                let form = [
                    ("amount", amount.as_str()),
                    ("currency", &currency),
                    ("payment_method_types[0]", "card"),
                    ("metadata[payment_id]", &payment_id),
                ];
                self.post::<Intent>("/v1/payment_intents", &form, Some(&once)).await?.into_checkout()
            }
            CheckoutPage::Sessions => {
                let form = [
                    ("mode", "payment"),
                    ("client_reference_id", payment_id.as_str()),
                    ("success_url", &wanted.success_url),
                    ("cancel_url", &wanted.cancel_url),
                    ("line_items[0][quantity]", "1"),
                    ("line_items[0][price_data][currency]", &currency),
                    ("line_items[0][price_data][unit_amount]", &amount),
                    ("line_items[0][price_data][product_data][name]", "Prepaid GPU time"),
                    ("metadata[payment_id]", &payment_id),
                    ("payment_intent_data[metadata][payment_id]", &payment_id),
                ];
                self.post::<Session>("/v1/checkout/sessions", &form, Some(&once)).await?.into_checkout()
            }
        }
    }

    async fn find_checkout(
        &self,
        payment_id: PaymentId,
        since: DateTime<Utc>,
    ) -> Result<Option<OpenedCheckout>, ProcessorError> {
        let is_it = |found: Option<PaymentId>| found == Some(payment_id);
        let listing = match self.checkout {
            CheckoutPage::Ours => {
                let opened = |it: Intent| is_it(it.payment_id()).then(|| it.into_checkout()).transpose();
                self.all("/v1/payment_intents", &[], since, opened).await?
            }
            CheckoutPage::Sessions => {
                let opened = |it: Session| is_it(it.payment_id()).then(|| it.into_checkout()).transpose();
                self.all("/v1/checkout/sessions", &[], since, opened).await?
            }
        };
        // Where a payment was opened twice, the first in the list is used consistently; only an empty result requires the complete list.
        if listing.found.is_empty() { Ok(listing.complete()?.pop()) } else { Ok(listing.found.into_iter().next()) }
    }

    async fn fetch_payment(&self, processor_id: &str) -> Result<Option<ProcessorPayment>, ProcessorError> {
        if objects::is_session(processor_id) {
            let session: Option<Session> = self.get_one("/v1/checkout/sessions", processor_id, &[]).await?;
            return session.map_or(Ok(None), |session| payment_of(session.payment_id(), session.into_record()));
        }
        if objects::is_charge(processor_id) {
            let expand = [("expand[]", "payment_intent")];
            let charge: Option<Charge> = self.get_one("/v1/charges", processor_id, &expand).await?;
            return charge.map_or(Ok(None), of_charge);
        }
        let intent: Option<Intent> = self.get_one("/v1/payment_intents", processor_id, &[]).await?;
        intent.map_or(Ok(None), |intent| payment_of(intent.payment_id(), intent.into_record()))
    }

    /// The session of an intent. Intents that we make on a page of our own have none, and no conversion.
    async fn find_order(&self, processor_id: &str) -> Result<Option<ProcessorPayment>, ProcessorError> {
        let query = [("payment_intent", segment(processor_id)?), ("limit", "1")];
        match self.get::<List<Session>>("/v1/checkout/sessions", &query).await {
            Ok(page) => {
                let session = page.data.into_iter().next();
                session.map_or(Ok(None), |session| payment_of(session.payment_id(), session.into_record()))
            }
            Err(ProcessorError::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn cancel_or_expire(&self, processor_id: &str) -> Result<Option<ProcessorPayment>, ProcessorError> {
        let (of, how) = if objects::is_session(processor_id) {
            ("/v1/checkout/sessions", "expire")
        } else {
            ("/v1/payment_intents", "cancel")
        };
        let path = format!("{of}/{}/{how}", segment(processor_id)?);
        // No key: the request has the same effect however often it arrives, and under a key a refusal would be answered again for a day,
        // although the payment can be canceled by then.
        match self.post::<serde_json::Value>(&path, &[], None).await {
            // It may be paid, or ended before: its state is fetched.
            Ok(_) | Err(ProcessorError::Refused { .. }) => self.fetch_payment(processor_id).await,
            Err(error) => Err(error),
        }
    }

    /// The intent that the money of a payment is under.
    async fn intent_of(&self, processor_id: &str) -> Result<String, ProcessorError> {
        if !objects::is_session(processor_id) {
            return Ok(processor_id.to_owned());
        }
        let session: Option<Session> = self.get_one("/v1/checkout/sessions", processor_id, &[]).await?;
        session.and_then(|session| session.payment_intent).map(|intent| intent.id().to_owned()).ok_or_else(|| {
            let why = format!("nothing was paid under {processor_id}");
            ProcessorError::Refused { code: None, why }
        })
    }

    async fn create_refund(&self, wanted: &RefundRequest) -> Result<ProcessorRefundRecord, ProcessorError> {
        let (refund_id, amount) = (wanted.refund_id.to_string(), wanted.amount_minor.to_string());
        let intent = self.intent_of(&wanted.processor_id).await?;
        // No reason: the processor has its own list of them, and ours may be anything.
        let form = [("payment_intent", intent.as_str()), ("amount", &amount), ("metadata[refund_id]", &refund_id)];
        let once = format!("refund-{refund_id}");
        let refund = self.post::<objects::Refund>("/v1/refunds", &form, Some(&once)).await?;
        refund.into_record()
    }

    async fn list_refunds(&self, processor_id: &str) -> Result<Vec<ProcessorRefundRecord>, ProcessorError> {
        let intent = self.intent_of(processor_id).await?;
        let query = [("payment_intent", intent.as_str())];
        self.all("/v1/refunds", &query, DateTime::UNIX_EPOCH, refund_record).await?.complete()
    }

    async fn list_payments(&self, since: DateTime<Utc>) -> Result<ProcessorListing<ProcessorPayment>, ProcessorError> {
        let after = since.timestamp().saturating_sub(1).to_string();
        let query = [("created[gt]", after.as_str()), ("expand[]", "data.payment_intent")];
        let paid = |charge: Charge| if charge.is_paid() { of_charge(charge) } else { Ok(None) };
        self.all("/v1/charges", &query, since, paid).await
    }

    async fn list_disputes(&self, since: DateTime<Utc>) -> Result<ProcessorListing<Dispute>, ProcessorError> {
        let disputed = |dispute: objects::Dispute| dispute.into_record().map(Some);
        match self.all("/v1/disputes", &[], since, disputed).await {
            // A processor without disputes has none.
            Err(ProcessorError::Refused { code: Some(code), .. }) if code == NO_SUCH_ROUTE => {
                Ok(ProcessorListing::of(Vec::new()))
            }
            listing => listing,
        }
    }

    /// Lists the objects that were created at or after `since` and that `read` selects, page after page. Processors list the newest first,
    /// and some the oldest. The creation time is not a query parameter: not every processor supports it on every list, and an ordered list
    /// ends in time.
    async fn all<T: DeserializeOwned, U>(
        &self,
        path: &str,
        query: &[(&str, &str)],
        since: DateTime<Utc>,
        read: impl Fn(T) -> Result<Option<U>, ProcessorError>,
    ) -> Result<ProcessorListing<U>, ProcessorError> {
        let (mut listing, mut after) = (ProcessorListing::of(Vec::new()), None::<String>);
        for _ in 0..MAX_PAGES {
            let mut query = query.to_vec();
            query.push(("limit", PAGE));
            query.extend(after.as_deref().map(|after| ("starting_after", after)));
            let page: List<Value> = self.get(path, &query).await?;
            let entries = page.data.iter().map(ListEntry::of).collect::<Result<Vec<_>, _>>()?;
            let (Some(first), Some(last)) = (entries.first(), entries.last()) else { return Ok(listing) };
            after = Some(last.id.clone());
            let is_past = last.created < since.timestamp() && last.created < first.created;
            for (entry, object) in entries.into_iter().zip(page.data) {
                if entry.created < since.timestamp() {
                    continue;
                }
                match strict_json::from_value(object).map(&read) {
                    Ok(Ok(meant)) => listing.found.extend(meant),
                    Ok(Err(_)) | Err(_) => listing.unread.push(entry.id),
                }
            }
            if is_past || !page.has_more {
                return Ok(listing);
            }
        }
        Ok(ProcessorListing { is_cut: true, ..listing })
    }

    async fn get_one<T: DeserializeOwned>(
        &self,
        path: &str,
        id: &str,
        query: &[(&str, &str)],
    ) -> Result<Option<T>, ProcessorError> {
        match self.get(&format!("{path}/{}", segment(id)?), query).await {
            Ok(object) => Ok(Some(object)),
            Err(ProcessorError::Refused { code: Some(code), .. }) if code == RESOURCE_MISSING => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, &str)]) -> Result<T, ProcessorError> {
        let request = self.request(Method::GET, path).query(query);
        self.send(request, false).await
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        form: &[(&str, &str)],
        once: Option<&str>,
    ) -> Result<T, ProcessorError> {
        let request = self.request(Method::POST, path).form(form);
        let request = match once {
            Some(once) => request.header("idempotency-key", once),
            None => request,
        };
        self.send(request, true).await
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let mut url = self.base.clone();
        url.set_path(&format!("{}{path}", self.base.path().trim_end_matches('/')));
        self.client.request(method, url).bearer_auth(self.secret_key.expose_secret()).header("stripe-version", VERSION)
    }

    /// `acts`: whether something may have been done by the time that the answer is lost.
    async fn send<T: DeserializeOwned>(
        &self,
        request: reqwest::RequestBuilder,
        acts: bool,
    ) -> Result<T, ProcessorError> {
        let unsure = |why: String| if acts { ProcessorError::Unknown(why) } else { ProcessorError::Later(why) };
        let response = match request.send().await {
            Ok(response) => response,
            Err(error) if error.is_connect() => return Err(ProcessorError::Later(error_chain(error))),
            Err(error) => return Err(unsure(error_chain(error))),
        };
        let status = response.status();
        let body = read_bounded_body(response, MAX_BYTES).await.map_err(unsure)?;
        if status.is_success() {
            return strict_json::from_slice(&body)
                .map_err(|error| unsure(format!("the answer cannot be read: {error}")));
        }
        let Failure { code, message } = match strict_json::from_slice::<Envelope>(&body) {
            Ok(envelope) => envelope.error,
            Err(_) => Failure { code: None, message: None },
        };
        let why = format!("status {}: {}", status.as_u16(), printable(&message));
        Err(match status {
            // Another request under this key is in flight; or an intermediary, or a backend of the processor, gave up on it.
            StatusCode::CONFLICT
            | StatusCode::REQUEST_TIMEOUT
            | StatusCode::FAILED_DEPENDENCY
            | StatusCode::TOO_EARLY => unsure(why),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                ProcessorError::Later(format!("it does not admit SVC_PAYMENTS_SECRET_KEY: {why}"))
            }
            StatusCode::TOO_MANY_REQUESTS => ProcessorError::Later(why),
            StatusCode::NOT_FOUND if message.is_none() => refused(Some(NO_SUCH_ROUTE.to_owned()), why),
            StatusCode::NOT_FOUND => refused(code.or_else(|| Some(RESOURCE_MISSING.to_owned())), why),
            _ if status.is_client_error() => refused(code, why),
            _ => unsure(why),
        })
    }
}

impl<T> ProcessorListing<T> {
    /// For callers that need the complete list.
    fn complete(self) -> Result<Vec<T>, ProcessorError> {
        match (self.unread.first(), self.is_cut) {
            (None, false) => Ok(self.found),
            (Some(id), _) => Err(ProcessorError::Later(format!("{id} of a list cannot be read"))),
            (None, true) => Err(ProcessorError::Later("a list is too long to be looked through".to_owned())),
        }
    }
}

fn refund_record(refund: objects::Refund) -> Result<Option<ProcessorRefundRecord>, ProcessorError> {
    refund.into_record().map(Some)
}

/// The payment of a charge; its intent was requested with it.
fn of_charge(charge: Charge) -> Result<Option<ProcessorPayment>, ProcessorError> {
    match charge.payment_intent {
        Some(objects::Ref::Whole(intent)) => payment_of(intent.payment_id(), intent.into_record()),
        Some(objects::Ref::Id(_)) => Err(ProcessorError::Later("an intent was not expanded".to_owned())),
        None => payment_of(charge.payment_id(), charge.into_record()),
    }
}

/// As Stripe names it.
const RESOURCE_MISSING: &str = "resource_missing";
/// A service with Stripe's API may not have all of its routes.
const NO_SUCH_ROUTE: &str = "no_such_route";

fn refused(code: Option<String>, why: String) -> ProcessorError {
    ProcessorError::Refused { code, why }
}

/// Whether an amount in minor units (ISO 4217) is one of the API, too.
#[must_use]
pub fn takes_amounts_in(currency: &Currency) -> bool {
    !OTHER_DECIMALS.contains(&currency.as_str())
}

/// The processor's message, for a log line: bounded, on one line.
fn printable(message: &Option<String>) -> String {
    let message = message.as_deref().unwrap_or("no reason given");
    message.chars().filter(|c| !c.is_control()).take(300).collect()
}

/// An id as one segment of a path. Ids come from webhooks, too.
fn segment(id: &str) -> Result<&str, ProcessorError> {
    if objects::is_id(id) { Ok(id) } else { Err(refused(None, "that is no id of the processor's".to_owned())) }
}

impl Processor for Stripe {
    fn checkout<'a>(&'a self, wanted: &'a Checkout) -> ProcessorFuture<'a, OpenedCheckout> {
        self.open(wanted).boxed()
    }

    fn find_payment(&self, payment_id: PaymentId, since: DateTime<Utc>) -> ProcessorFuture<'_, Option<OpenedCheckout>> {
        self.find_checkout(payment_id, since).boxed()
    }

    fn payment<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.fetch_payment(processor_id).boxed()
    }

    fn order<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.find_order(processor_id).boxed()
    }

    fn cancel<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.cancel_or_expire(processor_id).boxed()
    }

    fn refund<'a>(&'a self, wanted: &'a RefundRequest) -> ProcessorFuture<'a, ProcessorRefundRecord> {
        self.create_refund(wanted).boxed()
    }

    fn refunds_of<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Vec<ProcessorRefundRecord>> {
        self.list_refunds(processor_id).boxed()
    }

    fn payments_since(&self, since: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorPayment>> {
        self.list_payments(since).boxed()
    }

    fn refunds_since(&self, since: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorRefundRecord>> {
        self.all("/v1/refunds", &[], since, refund_record).boxed()
    }

    fn disputes_since(&self, since: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<Dispute>> {
        self.list_disputes(since).boxed()
    }
}
