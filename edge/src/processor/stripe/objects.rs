//! Stripe's objects, as far as they are read here, and what they mean to us.

use domain::PaymentId;
use domain::money::Currency;
use secrecy::SecretString;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

use crate::processor::{DisputeStatus, Opened, ProcessorError, RefundStanding, RefundStatus, Standing, Status, Way};

/// No id of the processor's is longer.
const LONGEST_ID: usize = 255;

/// An id of the processor's: a word.
pub(crate) fn is_id(text: &str) -> bool {
    (1..=LONGEST_ID).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

pub(crate) fn is_session(processor_id: &str) -> bool {
    processor_id.starts_with("cs_")
}

/// A charge, of a card or of something else.
pub(crate) fn is_charge(processor_id: &str) -> bool {
    processor_id.starts_with("ch_") || processor_id.starts_with("py_")
}

/// Where an object stands in a list, whatever it is.
#[derive(Deserialize)]
pub(super) struct Place {
    pub(super) id: String,
    #[serde(default)]
    pub(super) created: i64,
}

impl Place {
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
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum Ref<T> {
    Id(String),
    Whole(Box<T>),
}

/// The id of an object that is not looked into.
#[derive(Deserialize)]
pub(crate) struct Named {
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

impl HasId for Named {
    fn id(&self) -> &str {
        &self.id
    }
}

type Metadata = BTreeMap<String, String>;

/// What tells that an object is ours. Somebody at the processor may have written anything there.
fn ours<T: std::str::FromStr>(metadata: &Option<Metadata>, name: &str) -> Option<T> {
    metadata.as_ref()?.get(name)?.parse().ok()
}

fn currency(code: &str) -> Result<Currency, ProcessorError> {
    Currency::parse(&code.to_ascii_uppercase())
        .map_err(|_| ProcessorError::Later("the processor names a currency that is none".to_owned()))
}

#[derive(Deserialize)]
pub(crate) struct Intent {
    pub(crate) id: String,
    amount: i64,
    /// What came in, where the processor tells it apart.
    amount_received: Option<i64>,
    pub(crate) currency: String,
    status: String,
    client_secret: Option<SecretString>,
    metadata: Option<Metadata>,
    latest_charge: Option<Ref<Named>>,
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

    pub(super) fn opened(self) -> Result<Opened, ProcessorError> {
        let way = match (self.status(), self.client_secret) {
            (Status::Canceled | Status::Paid { .. }, _) => Way::Closed,
            (_, Some(client_secret)) => Way::Page { client_secret },
            (_, None) => return Err(ProcessorError::Later(format!("{} has no client secret", self.id))),
        };
        Ok(Opened { processor_id: self.id, way })
    }

    pub(crate) fn standing(self) -> Result<Standing, ProcessorError> {
        let status = self.status();
        let amount_minor = match (&status, self.amount_received) {
            (Status::Paid { .. }, Some(received)) => received,
            _ => self.amount,
        };
        let (payment_id, currency) = (self.payment_id(), currency(&self.currency)?);
        Ok(Standing { processor_id: self.id, payment_id, amount_minor, currency, status })
    }

    /// Why the last attempt to pay has failed: a code, never a sentence, since it is kept and shown.
    pub(crate) fn declined(&self) -> String {
        let code = self.last_payment_error.as_ref().and_then(|error| error.code.clone());
        code.filter(|code| is_id(code)).unwrap_or_else(|| "declined".to_owned())
    }

    fn status(&self) -> Status {
        match (self.status.as_str(), &self.last_payment_error) {
            ("succeeded", _) => {
                Status::Paid { charge_id: self.latest_charge.as_ref().map(|charge| charge.id().to_owned()) }
            }
            ("canceled", _) => Status::Canceled,
            ("processing", _) => Status::Processing,
            ("requires_payment_method", Some(_)) => Status::Declined { why: self.declined() },
            _ => Status::Open,
        }
    }
}

#[derive(Deserialize)]
pub(crate) struct Session {
    pub(crate) id: String,
    /// Stripe allows a session without an amount; ours have one.
    amount_total: Option<i64>,
    currency: Option<String>,
    status: Option<String>,
    payment_status: String,
    url: Option<String>,
    client_reference_id: Option<String>,
    metadata: Option<Metadata>,
    pub(super) payment_intent: Option<Ref<Named>>,
}

impl Session {
    pub(super) fn payment_id(&self) -> Option<PaymentId> {
        ours(&self.metadata, "payment_id").or_else(|| self.client_reference_id.as_ref()?.parse().ok())
    }

    pub(super) fn opened(self) -> Result<Opened, ProcessorError> {
        let way = match (self.status(), self.url) {
            (Status::Open, Some(url)) => Way::Hosted { url },
            (Status::Open, None) => return Err(ProcessorError::Later(format!("{} has no url", self.id))),
            _ => Way::Closed,
        };
        Ok(Opened { processor_id: self.id, way })
    }

    pub(crate) fn standing(self) -> Result<Standing, ProcessorError> {
        let nothing = || ProcessorError::Later(format!("{} is a session without an amount", self.id));
        let currency = currency(self.currency.as_deref().ok_or_else(nothing)?)?;
        let (payment_id, amount_minor) = (self.payment_id(), self.amount_total.ok_or_else(nothing)?);
        let status = self.status();
        let processor_id = match (&status, self.payment_intent) {
            (Status::Paid { .. }, Some(intent)) => intent.id().to_owned(),
            _ => self.id,
        };
        Ok(Standing { processor_id, payment_id, amount_minor, currency, status })
    }

    fn status(&self) -> Status {
        match (self.status.as_deref(), self.payment_status.as_str()) {
            (_, "paid") => Status::Paid { charge_id: None },
            (Some("complete"), _) => Status::Processing,
            (Some("expired"), _) => Status::Expired,
            _ => Status::Open,
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
    pub(super) fn is_paid(&self) -> bool {
        self.status == "succeeded"
    }

    /// One that was made without an intent is none of ours.
    pub(super) fn standing(self) -> Result<Standing, ProcessorError> {
        let (payment_id, currency) = (ours(&self.metadata, "payment_id"), currency(&self.currency)?);
        let status = Status::Paid { charge_id: Some(self.id.clone()) };
        Ok(Standing { processor_id: self.id, payment_id, amount_minor: self.amount, currency, status })
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
    payment_intent: Option<Ref<Named>>,
    charge: Option<Ref<Named>>,
}

impl Refund {
    pub(crate) fn standing(self) -> Result<RefundStanding, ProcessorError> {
        let status = match self.status.as_deref() {
            Some("succeeded") | None => RefundStatus::Succeeded,
            Some("failed" | "canceled") => RefundStatus::Failed,
            Some(_) => RefundStatus::Pending,
        };
        Ok(RefundStanding {
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
    payment_intent: Option<Ref<Named>>,
    charge: Option<Ref<Named>>,
}

impl Dispute {
    pub(crate) fn standing(self) -> Result<crate::processor::Dispute, ProcessorError> {
        let status = match self.status.as_str() {
            "won" => DisputeStatus::Won,
            "needs_response" | "under_review" | "lost" => DisputeStatus::Opened,
            // Asked about, or settled before it became a dispute.
            "warning_needs_response" | "warning_under_review" | "warning_closed" | "prevented" => {
                DisputeStatus::Inquiry
            }
            // Whether it moves money somebody has to find out.
            _ => return Err(ProcessorError::Later("a dispute has a status that is not known here".to_owned())),
        };
        Ok(crate::processor::Dispute {
            of: self.payment_intent.or(self.charge).map(|of| of.id().to_owned()),
            amount_minor: self.amount,
            currency: currency(&self.currency)?,
            dispute_id: self.id,
            status,
        })
    }
}
