//! Stripe's events, as its webhooks deliver them: type, object, and their meaning here (Stripe, *Types of events*).
//!
//! An event contains its object as it was when the event was created. Events arrive late and in any order, so that the object may be stale:
//! the recipient takes what is new to it and ignores the rest.

use actors::sharding::digest_of;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::objects::{self, Intent, List, ObjectId, Ref, Session, is_id, payment_of};
use crate::payment_processor::{
    Dispute, ProcessorError, ProcessorPayment, ProcessorPaymentStatus, ProcessorRefundRecord,
};

/// No type of an event is longer, by far.
const MAX_TYPE: usize = 100;

/// One event.
#[derive(Clone, Debug)]
pub struct StripeEvent {
    pub id: String,
    pub event_type: String,
    pub occurred_at: Option<DateTime<Utc>>,
    object: Value,
}

/// The update that an event carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessorUpdate {
    Payment(ProcessorPayment),
    Refunds(Vec<ProcessorRefundRecord>),
    /// Part of the payment of this id was refunded; the event does not contain the refund.
    RefundsOf(String),
    Dispute(Dispute),
    /// It concerns an object of another user of the account.
    NotOurs,
    /// Nothing follows from events of its type.
    Nothing,
}

/// The body is not an event, or its object does not fit its type. The message does not quote the body, which may contain names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StripeEventError(String);

#[derive(Deserialize)]
struct RawEvent {
    id: String,
    object: Option<String>,
    #[serde(rename = "type")]
    event_type: String,
    created: Option<i64>,
    data: EventData,
}

#[derive(Deserialize)]
struct EventData {
    object: Value,
}

impl StripeEvent {
    /// Reads a body.
    ///
    /// # Errors
    /// [`StripeEventError`]
    pub fn read(body: &[u8]) -> Result<Self, StripeEventError> {
        let unreadable = |what: &str| StripeEventError(what.to_owned());
        let sent: RawEvent = strict_json::from_slice(body).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            StripeEventError(format!(
                "it is no event with `id`, `type` and `data.object` (line {line}, column {column})"
            ))
        })?;
        if sent.object.is_some_and(|object| object != "event") {
            return Err(unreadable("it is no event in the form of API v1; choose snapshot events for this endpoint"));
        }
        if !is_id(&sent.id) {
            return Err(unreadable("its `id` is no id"));
        }
        if !is_type(&sent.event_type) {
            return Err(unreadable("its `type` is no type of events"));
        }
        if !sent.data.object.is_object() {
            return Err(unreadable("its `data.object` is no object"));
        }
        Ok(Self {
            id: sent.id,
            event_type: sent.event_type,
            occurred_at: sent.created.and_then(|seconds| DateTime::from_timestamp(seconds, 0)),
            object: sent.data.object,
        })
    }

    /// The processor's id of its object.
    #[must_use]
    pub fn object_id(&self) -> Option<String> {
        self.object.get("id").and_then(Value::as_str).filter(|id| is_id(id)).map(str::to_owned)
    }

    /// SHA-256 of its content: its type and its object. Delivery metadata, for example the number of attempts, lies outside and differs
    /// between deliveries.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut object = self.object.clone();
        object.sort_all_objects();
        digest_of(&[self.event_type.as_bytes(), object.to_string().as_bytes()])
    }

    /// True where something follows from events of its type.
    #[must_use]
    pub fn has_effect(&self) -> bool {
        EventSubject::by(&self.event_type).is_some()
    }

    /// The update that it carries.
    ///
    /// # Errors
    /// [`StripeEventError`] where its object does not fit its type.
    pub fn update(self) -> Result<ProcessorUpdate, StripeEventError> {
        let Self { event_type, object, .. } = self;
        let Some(says) = EventSubject::by(&event_type) else { return Ok(ProcessorUpdate::Nothing) };
        let payment = |record: ProcessorPayment| ProcessorUpdate::Payment(record);
        Ok(match says {
            EventSubject::Intent => {
                let intent: Intent = of(object)?;
                payment_of(intent.payment_id(), intent.into_record())?.map_or(ProcessorUpdate::NotOurs, payment)
            }
            EventSubject::IntentFailed => {
                let intent: Intent = of(object)?;
                let why = intent.declined();
                let declined = |standing: ProcessorPayment| match standing.status {
                    ProcessorPaymentStatus::Open => {
                        payment(ProcessorPayment { status: ProcessorPaymentStatus::Declined { why }, ..standing })
                    }
                    _ => payment(standing),
                };
                payment_of(intent.payment_id(), intent.into_record())?.map_or(ProcessorUpdate::NotOurs, declined)
            }
            EventSubject::Session => {
                let session: Session = of(object)?;
                payment_of(session.payment_id(), session.into_record())?.map_or(ProcessorUpdate::NotOurs, payment)
            }
            // It is complete, and can no longer be paid.
            EventSubject::SessionFailed => {
                let session: Session = of(object)?;
                let canceled = |standing: ProcessorPayment| {
                    payment(ProcessorPayment { status: ProcessorPaymentStatus::Canceled, ..standing })
                };
                payment_of(session.payment_id(), session.into_record())?.map_or(ProcessorUpdate::NotOurs, canceled)
            }
            EventSubject::Refunded => refunded(of(object)?)?,
            EventSubject::Refund => ProcessorUpdate::Refunds(vec![of::<objects::Refund>(object)?.into_record()?]),
            EventSubject::Dispute => ProcessorUpdate::Dispute(of::<objects::Dispute>(object)?.into_record()?),
        })
    }
}

/// The object of an event type.
#[derive(Clone, Copy)]
enum EventSubject {
    Intent,
    IntentFailed,
    Session,
    SessionFailed,
    Refunded,
    Refund,
    Dispute,
}

impl EventSubject {
    fn by(event_type: &str) -> Option<Self> {
        Some(match event_type {
            "payment_intent.succeeded" | "payment_intent.canceled" | "payment_intent.processing" => Self::Intent,
            "payment_intent.payment_failed" => Self::IntentFailed,
            "checkout.session.completed" | "checkout.session.async_payment_succeeded" | "checkout.session.expired" => {
                Self::Session
            }
            "checkout.session.async_payment_failed" => Self::SessionFailed,
            "charge.refunded" => Self::Refunded,
            "refund.created" | "refund.updated" | "refund.failed" | "charge.refund.updated" => Self::Refund,
            "charge.dispute.created"
            | "charge.dispute.updated"
            | "charge.dispute.funds_withdrawn"
            | "charge.dispute.funds_reinstated"
            | "charge.dispute.closed" => Self::Dispute,
            _ => return None,
        })
    }
}

/// A charge that was refunded in part or whole. Later versions of the API leave the list out.
#[derive(Deserialize)]
struct RefundedCharge {
    payment_intent: Option<Ref<ObjectId>>,
    refunds: Option<List<objects::Refund>>,
}

fn refunded(charge: RefundedCharge) -> Result<ProcessorUpdate, StripeEventError> {
    match charge.refunds {
        Some(list) if !list.has_more && !list.data.is_empty() => {
            let refunds = list.data.into_iter().map(|refund| refund.into_record().map_err(StripeEventError::from));
            Ok(ProcessorUpdate::Refunds(refunds.collect::<Result<_, _>>()?))
        }
        Some(_) | None => {
            // A charge that was made without an intent is not ours.
            let of = charge.payment_intent.as_ref().map(|intent| intent.id()).filter(|id| is_id(id));
            Ok(of.map_or_else(|| ProcessorUpdate::Refunds(Vec::new()), |id| ProcessorUpdate::RefundsOf(id.to_owned())))
        }
    }
}

fn of<T: DeserializeOwned>(object: Value) -> Result<T, StripeEventError> {
    strict_json::from_value(object).map_err(|_| StripeEventError("its object is not what its type promises".to_owned()))
}

impl From<ProcessorError> for StripeEventError {
    fn from(error: ProcessorError) -> Self {
        Self(format!("its object cannot be used: {error}"))
    }
}

fn is_type(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b'.';
    (1..=MAX_TYPE).contains(&text.len()) && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests;
