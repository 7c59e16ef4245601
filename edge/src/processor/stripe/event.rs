//! Stripe's events, as its webhooks bring them: what kind, about what, and what that means to us (Stripe, *Types of events*).
//!
//! An event shows its object as it was when the event came about. Events come late and in any order, so that it may be old when it is read:
//! whoever is told of it takes what is new to them and passes over the rest.

use actors::place::digest_of;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::objects::{self, Intent, List, Named, Ref, Session, is_id};
use crate::processor::{Dispute, ProcessorError, RefundStanding, Standing, Status};

/// No type of an event is longer, by far.
const LONGEST_TYPE: usize = 100;

/// One event.
#[derive(Clone, Debug)]
pub struct StripeEvent {
    pub id: String,
    pub event_type: String,
    pub occurred_at: Option<DateTime<Utc>>,
    object: Value,
}

/// What it tells us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    Payment(Standing),
    Refunds(Vec<RefundStanding>),
    /// Something was given back of the payment of this id; the event does not say what.
    RefundsOf(String),
    Dispute(Dispute),
    /// Nothing follows from events of its type.
    Nothing,
}

/// The body is no event, or its object not what its type promises. It says nothing of what stands there: there may be names in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(String);

#[derive(Deserialize)]
struct Sent {
    id: String,
    object: Option<String>,
    #[serde(rename = "type")]
    event_type: String,
    created: Option<i64>,
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    object: Value,
}

impl StripeEvent {
    /// Reads a body.
    ///
    /// # Errors
    /// [`Unreadable`]
    pub fn read(body: &[u8]) -> Result<Self, Unreadable> {
        let unreadable = |what: &str| Unreadable(what.to_owned());
        let sent: Sent = serde_json::from_slice(body).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            Unreadable(format!("it is no event with `id`, `type` and `data.object` (line {line}, column {column})"))
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

    /// What it is about, by the processor's id.
    #[must_use]
    pub fn object_id(&self) -> Option<String> {
        self.object.get("id").and_then(Value::as_str).filter(|id| is_id(id)).map(str::to_owned)
    }

    /// SHA-256 of what it says: its type and its object. How often it was tried to deliver it, for example, stands beside that, and differs
    /// from one delivery to the next.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut object = self.object.clone();
        object.sort_all_objects();
        digest_of(&[self.event_type.as_bytes(), object.to_string().as_bytes()])
    }

    /// True where something follows from events of its type.
    #[must_use]
    pub fn is_of_consequence(&self) -> bool {
        Says::by(&self.event_type).is_some()
    }

    /// What it tells us.
    ///
    /// # Errors
    /// [`Unreadable`] where its object is not what its type promises.
    pub fn news(self) -> Result<News, Unreadable> {
        let Self { event_type, object, .. } = self;
        let Some(says) = Says::by(&event_type) else { return Ok(News::Nothing) };
        Ok(match says {
            Says::Intent => News::Payment(of::<Intent>(object)?.standing()?),
            Says::IntentFailed => {
                let intent: Intent = of(object)?;
                let why = intent.declined();
                let standing = intent.standing()?;
                let declined = standing.status == Status::Open;
                News::Payment(if declined {
                    Standing { status: Status::Declined { why }, ..standing }
                } else {
                    standing
                })
            }
            Says::Session => News::Payment(of::<Session>(object)?.standing()?),
            // It is complete, and nobody can pay by it any more.
            Says::SessionFailed => {
                News::Payment(Standing { status: Status::Canceled, ..of::<Session>(object)?.standing()? })
            }
            Says::Refunded => refunded(of(object)?)?,
            Says::Refund => News::Refunds(vec![of::<objects::Refund>(object)?.standing()?]),
            Says::Dispute => News::Dispute(of::<objects::Dispute>(object)?.standing()?),
        })
    }
}

/// What events of a type speak of.
#[derive(Clone, Copy)]
enum Says {
    Intent,
    IntentFailed,
    Session,
    SessionFailed,
    Refunded,
    Refund,
    Dispute,
}

impl Says {
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

/// A charge of which something was given back. Later versions of the API leave the list out.
#[derive(Deserialize)]
struct Refunded {
    payment_intent: Option<Ref<Named>>,
    refunds: Option<List<objects::Refund>>,
}

fn refunded(charge: Refunded) -> Result<News, Unreadable> {
    match charge.refunds {
        Some(list) if !list.has_more && !list.data.is_empty() => {
            let refunds = list.data.into_iter().map(|refund| refund.standing().map_err(Unreadable::from));
            Ok(News::Refunds(refunds.collect::<Result<_, _>>()?))
        }
        Some(_) | None => {
            // A charge that was made without an intent is none of ours.
            let of = charge.payment_intent.as_ref().map(|intent| intent.id()).filter(|id| is_id(id));
            Ok(of.map_or_else(|| News::Refunds(Vec::new()), |id| News::RefundsOf(id.to_owned())))
        }
    }
}

fn of<T: DeserializeOwned>(object: Value) -> Result<T, Unreadable> {
    serde_json::from_value(object).map_err(|_| Unreadable("its object is not what its type promises".to_owned()))
}

impl From<ProcessorError> for Unreadable {
    fn from(error: ProcessorError) -> Self {
        Self(format!("its object cannot be used: {error}"))
    }
}

fn is_type(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b'.';
    (1..=LONGEST_TYPE).contains(&text.len()) && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests;
