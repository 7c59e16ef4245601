//! The payment processor, as this service asks it: one port, spoken to in Stripe's API ([`stripe`]).
//!
//! The processor knows our ids: they stand in the `metadata` of whatever we make there. So an answer that was lost is looked for before
//! anything is asked again, whether or not the processor heeds an `Idempotency-Key`.

use chrono::{DateTime, Utc};
use domain::money::Currency;
use domain::{PaymentId, RefundId};
use futures::future::BoxFuture;
use secrecy::{ExposeSecret as _, SecretString};
use thiserror::Error;

pub mod signature;
pub mod stripe;

/// What is asked of a payment processor. Each request has an end in time, and an answer of bounded length.
pub trait Processor: Send + Sync + 'static {
    /// Opens a payment there, or finds it open: however often it is asked for the same payment, it is the same one.
    fn checkout<'a>(&'a self, wanted: &'a Checkout) -> Answer<'a, Opened>;

    /// What was opened for a payment of ours, at or after `since`.
    fn find_payment(&self, payment_id: PaymentId, since: DateTime<Utc>) -> Answer<'_, Option<Opened>>;

    /// How a payment stands there, by any id that the processor has for it; `None` where it knows none of that id.
    fn payment<'a>(&'a self, processor_id: &'a str) -> Answer<'a, Option<Standing>>;

    /// Ends a payment that nobody has made: how it stands then, which may be paid.
    fn cancel<'a>(&'a self, processor_id: &'a str) -> Answer<'a, Option<Standing>>;

    /// Gives money back to whoever paid. The balance is the business of whoever asks: the processor may cap nothing.
    fn refund<'a>(&'a self, wanted: &'a RefundRequest) -> Answer<'a, RefundStanding>;

    /// All that was given back of a payment there, by us or by somebody at the processor.
    fn refunds_of<'a>(&'a self, processor_id: &'a str) -> Answer<'a, Vec<RefundStanding>>;

    /// Payments that were made at or after `since`.
    fn payments_since(&self, since: DateTime<Utc>) -> Answer<'_, Listing<Standing>>;

    /// Refunds that were made at or after `since`.
    fn refunds_since(&self, since: DateTime<Utc>) -> Answer<'_, Listing<RefundStanding>>;

    /// Disputes that were opened at or after `since`.
    fn disputes_since(&self, since: DateTime<Utc>) -> Answer<'_, Listing<Dispute>>;
}

/// What becomes of a request to the processor.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, ProcessorError>>;

/// What was made since then. Whoever shares the account at the processor may have made anything there, and any number of it: what cannot be
/// read, or is too much, is named and does not hide the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing<T> {
    pub found: Vec<T>,
    /// By the processor's ids.
    pub unread: Vec<String>,
    /// More is listed than is looked through: the oldest of it, where the newest comes first.
    pub is_cut: bool,
}

impl<T> Listing<T> {
    /// All that there is.
    #[must_use]
    pub const fn of(found: Vec<T>) -> Self {
        Self { found, unread: Vec::new(), is_cut: false }
    }
}

/// A payment that somebody wants to make.
#[derive(Clone, Debug)]
pub struct Checkout {
    pub payment_id: PaymentId,
    pub amount_minor: i64,
    pub currency: Currency,
    /// Where the user comes back to when it is paid, or not.
    pub success_url: String,
    pub cancel_url: String,
    /// What was asked before.
    pub before: Before,
}

/// What may be at the processor when a payment is to be opened.
#[derive(Clone, Debug)]
pub enum Before {
    /// Nobody has asked before.
    Nothing,
    /// Somebody has, then or later, and did not hear the answer.
    Since(DateTime<Utc>),
    /// It is open under this id.
    Known(String),
}

/// A payment that is open at the processor.
#[derive(Clone, Debug)]
pub struct Opened {
    pub processor_id: String,
    pub way: Way,
}

/// How its user pays.
#[derive(Clone, Debug)]
pub enum Way {
    /// On the processor's own page.
    Hosted { url: String },
    /// On a page of ours, whose script shows the processor this secret. It is the payer's alone.
    Page { client_secret: SecretString },
    /// It is closed there: nobody can pay any more.
    Closed,
}

impl Opened {
    /// Where its user pays; none where nobody can pay any more. It may hold a secret of the payer's: it is shown to them, and not kept.
    #[must_use]
    pub fn url(&self, public_url: &str, payment_id: PaymentId) -> Option<String> {
        match &self.way {
            Way::Hosted { url } => Some(url.clone()),
            // In the fragment, which no server sees.
            Way::Page { client_secret } => {
                let (here, secret) = (public_url.trim_end_matches('/'), client_secret.expose_secret());
                Some(format!("{here}/billing/checkout/{payment_id}#{secret}"))
            }
            Way::Closed => None,
        }
    }
}

/// A payment, as the processor has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Of what the money is under once it is paid (`pi_…`); until then it may be that of the page (`cs_…`).
    pub processor_id: String,
    /// Ours; none where it was made at the processor.
    pub payment_id: Option<PaymentId>,
    pub amount_minor: i64,
    pub currency: Currency,
    pub status: Status,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Its user may pay.
    Open,
    /// The last attempt was declined; the user may try another way.
    Declined {
        why: String,
    },
    /// Under way at the processor.
    Processing,
    Paid {
        charge_id: Option<String>,
    },
    Canceled,
    Expired,
}

/// Money to be given back.
#[derive(Clone, Debug)]
pub struct RefundRequest {
    pub refund_id: RefundId,
    /// Of the payment.
    pub processor_id: String,
    pub amount_minor: i64,
}

/// A refund, as the processor has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefundStanding {
    pub processor_refund_id: String,
    /// Ours; none where it was made at the processor.
    pub refund_id: Option<RefundId>,
    /// By which the processor names the payment.
    pub of: Option<String>,
    pub amount_minor: i64,
    pub currency: Currency,
    pub status: RefundStatus,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefundStatus {
    Pending,
    Succeeded,
    /// The money stays with us.
    Failed,
}

/// A payer's bank wants the money of a payment back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dispute {
    pub dispute_id: String,
    /// By which the processor names the payment.
    pub of: Option<String>,
    pub amount_minor: i64,
    pub currency: Currency,
    pub status: DisputeStatus,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisputeStatus {
    /// The bank asks; no money has moved.
    Inquiry,
    /// The money was taken.
    Opened,
    /// It was given back to us.
    Won,
}

/// Why the processor did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProcessorError {
    /// It understood, and does not do it; asking again is no use.
    #[error("the payment processor refused: {why}")]
    Refused {
        /// In the processor's words.
        code: Option<String>,
        why: String,
    },
    /// It was not done; it may be asked again.
    #[error("the payment processor cannot be asked at the moment: {0}")]
    Later(String),
    /// It may have been done: look before asking again.
    #[error("the payment processor gave no answer to rely on: {0}")]
    Unknown(String),
}

#[cfg(test)]
mod tests;
