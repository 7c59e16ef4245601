//! Stripe's objects, as far as they are read, and their meaning here.

use domain::PaymentId;
use domain::money::Currency;
use domain::payment::Presentment;
use secrecy::SecretString;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use crate::payment_processor::{
    CheckoutMethod, DisputeStatus, OpenedCheckout, ProcessorError, ProcessorPayment, ProcessorPaymentStatus,
    ProcessorRefundRecord, ProcessorRefundStatus,
};

/// No id of the processor's is longer.
const MAX_ID: usize = 255;

/// An id of the processor: one word.
pub(crate) fn is_id(text: &str) -> bool {
    (1..=MAX_ID).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

pub(crate) fn is_session(processor_id: &str) -> bool {
    processor_id.starts_with("cs_")
}

/// A charge, of a card or of something else.
pub(crate) fn is_charge(processor_id: &str) -> bool {
    processor_id.starts_with("ch_") || processor_id.starts_with("py_")
}

/// The id and creation time of a listed object of any type.
#[derive(Deserialize)]
pub(super) struct ListEntry {
    pub(super) id: String,
    #[serde(default)]
    pub(super) created: i64,
}

impl ListEntry {
    pub(super) fn of(object: &Value) -> Result<Self, ProcessorError> {
        Self::deserialize(object).map_err(|_| ProcessorError::Later("a list holds what has no id".to_owned()))
    }
}

#[derive(Deserialize)]
pub(super) struct List<T> {
    pub(super) data: Vec<T>,
    #[serde(default)]
    pub(super) has_more: bool,
}

#[derive(Deserialize)]
pub(super) struct Envelope {
    pub(super) error: Failure,
}

#[derive(Deserialize)]
pub(super) struct Failure {
    pub(super) code: Option<String>,
    pub(super) message: Option<String>,
}

/// Another object: its id, or the whole of it.
pub(crate) enum Ref<T> {
    Id(String),
    Whole(Box<T>),
}

/// By its form, without serde's buffer of untagged types, which would read a list as an object.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ref<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RefVisitor(PhantomData))
    }
}

struct RefVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for RefVisitor<T> {
    type Value = Ref<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object or its id")
    }

    fn visit_str<E>(self, id: &str) -> Result<Ref<T>, E> {
        Ok(Ref::Id(id.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<Ref<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(object)).map(|object| Ref::Whole(Box::new(object)))
    }
}

/// The id of an object whose content is not needed.
#[derive(Deserialize)]
pub(crate) struct ObjectId {
    id: String,
}

impl<T: HasId> Ref<T> {
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Id(id) => id,
            Self::Whole(object) => object.id(),
        }
    }
}

pub(crate) trait HasId {
    fn id(&self) -> &str;
}

impl HasId for ObjectId {
    fn id(&self) -> &str {
        &self.id
    }
}

type Metadata = BTreeMap<String, String>;

/// Identifies an object as ours. Other users of the account may have written anything there.
fn ours<T: std::str::FromStr>(metadata: &Option<Metadata>, name: &str) -> Option<T> {
    metadata.as_ref()?.get(name)?.parse().ok()
}

/// The payment of an object. One of another user of the account that cannot be read as a payment is none: a session that sets up a payment
/// method, or an amount in a currency that is none of ISO 4217.
pub(super) fn payment_of(
    payment_id: Option<PaymentId>,
    record: Result<ProcessorPayment, ProcessorError>,
) -> Result<Option<ProcessorPayment>, ProcessorError> {
    match (payment_id, record) {
        (None, Err(_)) => Ok(None),
        (_, record) => record.map(Some),
    }
}

fn currency(code: &str) -> Result<Currency, ProcessorError> {
    Currency::parse(&code.to_ascii_uppercase())
        .map_err(|_| ProcessorError::Later("the processor names a currency that is none".to_owned()))
}

#[derive(Deserialize)]
pub(crate) struct Intent {
    pub(crate) id: String,
    amount: i64,
    /// The amount received, where the processor reports it separately.
    amount_received: Option<i64>,
    pub(crate) currency: String,
    status: String,
    client_secret: Option<SecretString>,
    metadata: Option<Metadata>,
    presentment_details: Option<PresentmentDetails>,
    latest_charge: Option<Ref<ObjectId>>,
    last_payment_error: Option<PaymentError>,
}

#[derive(Deserialize)]
pub(crate) struct PaymentError {
    code: Option<String>,
}

impl Intent {
    pub(crate) fn payment_id(&self) -> Option<PaymentId> {
        ours(&self.metadata, "payment_id")
    }

    pub(super) fn into_checkout(self) -> Result<OpenedCheckout, ProcessorError> {
        let way = match (self.status(), self.client_secret) {
            (ProcessorPaymentStatus::Canceled | ProcessorPaymentStatus::Paid { .. }, _) => CheckoutMethod::Closed,
            (_, Some(client_secret)) => CheckoutMethod::Page { client_secret },
            (_, None) => return Err(ProcessorError::Later(format!("{} has no client secret", self.id))),
        };
        Ok(OpenedCheckout { processor_id: self.id, way })
    }

    pub(crate) fn into_record(self) -> Result<ProcessorPayment, ProcessorError> {
        let status = self.status();
        let amount_minor = match (&status, self.amount_received) {
            (ProcessorPaymentStatus::Paid { .. }, Some(received)) => received,
            _ => self.amount,
        };
        let (payment_id, currency) = (self.payment_id(), currency(&self.currency)?);
        let presented = presented(self.presentment_details, amount_minor, &currency)?;
        Ok(ProcessorPayment { processor_id: self.id, payment_id, amount_minor, currency, presented, status })
    }

    /// Why the last attempt to pay failed: a code, never a sentence, since it is stored and shown.
    pub(crate) fn declined(&self) -> String {
        let code = self.last_payment_error.as_ref().and_then(|error| error.code.clone());
        code.filter(|code| is_id(code)).unwrap_or_else(|| "declined".to_owned())
    }

    fn status(&self) -> ProcessorPaymentStatus {
        match (self.status.as_str(), &self.last_payment_error) {
            ("succeeded", _) => ProcessorPaymentStatus::Paid {
                charge_id: self.latest_charge.as_ref().map(|charge| charge.id().to_owned()),
            },
            ("canceled", _) => ProcessorPaymentStatus::Canceled,
            ("processing", _) => ProcessorPaymentStatus::Processing,
            ("requires_payment_method", Some(_)) => ProcessorPaymentStatus::Declined { why: self.declined() },
            _ => ProcessorPaymentStatus::Open,
        }
    }
}

#[derive(Deserialize)]
pub(crate) struct Session {
    pub(crate) id: String,
    /// A session that sets up a payment method has neither an amount nor a currency; ours have both.
    amount_total: Option<i64>,
    currency: Option<String>,
    status: Option<String>,
    payment_status: String,
    url: Option<String>,
    metadata: Option<Metadata>,
    currency_conversion: Option<CurrencyConversion>,
    presentment_details: Option<PresentmentDetails>,
    pub(super) payment_intent: Option<Ref<ObjectId>>,
}

/// The order of a session whose amount and currency are those that the payer chose: sessions that were created before 2025-03-31.
#[derive(Deserialize)]
struct CurrencyConversion {
    amount_total: i64,
    source_currency: String,
}

/// What a payer saw of an amount that is in the currency of the order: sessions that were created since then.
#[derive(Deserialize)]
struct PresentmentDetails {
    presentment_amount: i64,
    presentment_currency: String,
}

/// `None` where the payer saw the order's own amount.
fn presented(
    details: Option<PresentmentDetails>,
    amount_minor: i64,
    ordered: &Currency,
) -> Result<Option<Presentment>, ProcessorError> {
    let Some(PresentmentDetails { presentment_amount, presentment_currency }) = details else { return Ok(None) };
    let currency = currency(&presentment_currency)?;
    let is_same = (presentment_amount, &currency) == (amount_minor, ordered);
    Ok((!is_same).then_some(Presentment { amount_minor: presentment_amount, currency, is_charged: false }))
}

impl Session {
    /// By the metadata alone: other users of the account write ids of their own into `client_reference_id`.
    pub(super) fn payment_id(&self) -> Option<PaymentId> {
        ours(&self.metadata, "payment_id")
    }

    pub(super) fn into_checkout(self) -> Result<OpenedCheckout, ProcessorError> {
        let way = match (self.status(), self.url) {
            (ProcessorPaymentStatus::Open, Some(url)) => CheckoutMethod::Hosted { url },
            (ProcessorPaymentStatus::Open, None) => {
                return Err(ProcessorError::Later(format!("{} has no url", self.id)));
            }
            _ => CheckoutMethod::Closed,
        };
        Ok(OpenedCheckout { processor_id: self.id, way })
    }

    pub(crate) fn into_record(mut self) -> Result<ProcessorPayment, ProcessorError> {
        let nothing = || ProcessorError::Later(format!("{} is a session without an amount", self.id));
        let own_currency = currency(self.currency.as_deref().ok_or_else(nothing)?)?;
        let (payment_id, own_amount) = (self.payment_id(), self.amount_total.ok_or_else(nothing)?);
        let (amount_minor, currency, presented) = match &self.currency_conversion {
            Some(CurrencyConversion { amount_total, source_currency }) => {
                let charged = Presentment { amount_minor: own_amount, currency: own_currency, is_charged: true };
                (*amount_total, currency(source_currency)?, Some(charged))
            }
            None => {
                let presented = presented(self.presentment_details.take(), own_amount, &own_currency)?;
                (own_amount, own_currency, presented)
            }
        };
        let status = self.status();
        let processor_id = match (&status, self.payment_intent) {
            (ProcessorPaymentStatus::Paid { .. }, Some(intent)) => intent.id().to_owned(),
            _ => self.id,
        };
        Ok(ProcessorPayment { processor_id, payment_id, amount_minor, currency, presented, status })
    }

    fn status(&self) -> ProcessorPaymentStatus {
        match (self.status.as_deref(), self.payment_status.as_str()) {
            (_, "paid") => ProcessorPaymentStatus::Paid { charge_id: None },
            (Some("complete"), _) => ProcessorPaymentStatus::Processing,
            (Some("expired"), _) => ProcessorPaymentStatus::Expired,
            _ => ProcessorPaymentStatus::Open,
        }
    }
}

#[derive(Deserialize)]
pub(crate) struct Charge {
    id: String,
    amount: i64,
    currency: String,
    status: String,
    metadata: Option<Metadata>,
    pub(crate) payment_intent: Option<Ref<Intent>>,
}

impl Charge {
    pub(super) fn payment_id(&self) -> Option<PaymentId> {
        ours(&self.metadata, "payment_id")
    }

    pub(super) fn is_paid(&self) -> bool {
        self.status == "succeeded"
    }

    /// A charge that was made without an intent is not ours.
    pub(super) fn into_record(self) -> Result<ProcessorPayment, ProcessorError> {
        let (payment_id, currency) = (self.payment_id(), currency(&self.currency)?);
        let status = ProcessorPaymentStatus::Paid { charge_id: Some(self.id.clone()) };
        Ok(ProcessorPayment {
            processor_id: self.id,
            payment_id,
            amount_minor: self.amount,
            currency,
            presented: None,
            status,
        })
    }
}

#[derive(Deserialize)]
pub(crate) struct Refund {
    id: String,
    amount: i64,
    currency: String,
    /// Absent from processors whose refunds succeed at once.
    status: Option<String>,
    metadata: Option<Metadata>,
    payment_intent: Option<Ref<ObjectId>>,
    charge: Option<Ref<ObjectId>>,
}

impl Refund {
    pub(crate) fn into_record(self) -> Result<ProcessorRefundRecord, ProcessorError> {
        let status = match self.status.as_deref() {
            Some("succeeded") | None => ProcessorRefundStatus::Succeeded,
            Some("failed" | "canceled") => ProcessorRefundStatus::Failed,
            Some(_) => ProcessorRefundStatus::Pending,
        };
        Ok(ProcessorRefundRecord {
            refund_id: ours(&self.metadata, "refund_id"),
            of: self.payment_intent.or(self.charge).map(|of| of.id().to_owned()),
            amount_minor: self.amount,
            currency: currency(&self.currency)?,
            processor_refund_id: self.id,
            status,
        })
    }
}

#[derive(Deserialize)]
pub(crate) struct Dispute {
    id: String,
    amount: i64,
    currency: String,
    status: String,
    payment_intent: Option<Ref<ObjectId>>,
    charge: Option<Ref<ObjectId>>,
}

impl Dispute {
    pub(crate) fn into_record(self) -> Result<crate::payment_processor::Dispute, ProcessorError> {
        let status = match self.status.as_str() {
            "won" => DisputeStatus::Won,
            "needs_response" | "under_review" | "lost" => DisputeStatus::Opened,
            // An inquiry, or settled before it became a dispute.
            "warning_needs_response" | "warning_under_review" | "warning_closed" | "prevented" => {
                DisputeStatus::Inquiry
            }
            // An operator has to determine whether it moves money.
            _ => return Err(ProcessorError::Later("a dispute has a status that is not known here".to_owned())),
        };
        Ok(crate::payment_processor::Dispute {
            of: self.payment_intent.or(self.charge).map(|of| of.id().to_owned()),
            amount_minor: self.amount,
            currency: currency(&self.currency)?,
            dispute_id: self.id,
            status,
        })
    }
}
