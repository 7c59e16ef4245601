//! The port of the payment processor; its adapter is Stripe's API ([`stripe`]).
//!
//! The processor stores our ids in the `metadata` of the objects that we create. A request whose response was lost is therefore looked up
//! before it is retried, whether or not the processor honours an `Idempotency-Key`.

use chrono::{DateTime, Utc};
use domain::money::Currency;
use domain::payment::Presentment;
use domain::{PaymentId, RefundId};
use futures::future::BoxFuture;
use secrecy::{ExposeSecret as _, SecretString};
use thiserror::Error;

#[cfg(test)]
#[allow(dead_code, reason = "it is written for the tests of `supervisors`, too")]
pub(crate) mod fake;
#[cfg(test)]
mod fuzz;
pub mod signature;
pub mod stripe;

/// The operations of a payment processor. Each request has a timeout, and a response of bounded length.
pub trait Processor: Send + Sync + 'static {
    /// Opens a payment at the processor, or finds it open: repeated calls for one payment lead to the same object.
    fn checkout<'a>(&'a self, wanted: &'a Checkout) -> ProcessorFuture<'a, OpenedCheckout>;

    /// The object that was opened for a payment of ours, at or after `since`.
    fn find_payment(&self, payment_id: PaymentId, since: DateTime<Utc>) -> ProcessorFuture<'_, Option<OpenedCheckout>>;

    /// The state of a payment, by any id that the processor has for it; `None` where the id is unknown.
    fn payment<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>>;

    /// What was ordered under the payment of this id, in the terms of the order: the processor may have charged another currency for it.
    /// `None` where it has no order of its own.
    fn order<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>>;

    /// Cancels an unpaid payment and returns its state, which may be paid.
    fn cancel<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>>;

    /// Refunds money to the payer. The caller checks the balance: the processor may not cap refunds.
    fn refund<'a>(&'a self, wanted: &'a RefundRequest) -> ProcessorFuture<'a, ProcessorRefundRecord>;

    /// All refunds of a payment, by us or by an operator at the processor.
    fn refunds_of<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Vec<ProcessorRefundRecord>>;

    /// Payments that were made at or after `since`.
    fn payments_since(&self, since: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorPayment>>;

    /// Refunds that were made at or after `since`.
    fn refunds_since(&self, since: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorRefundRecord>>;

    /// Disputes that were opened at or after `since`.
    fn disputes_since(&self, since: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<Dispute>>;
}

/// The result of a request to the processor.
pub type ProcessorFuture<'a, T> = BoxFuture<'a, Result<T, ProcessorError>>;

/// The objects created since then. Other users of the account at the processor may have created any objects there, in any number: those
/// that cannot be read, or are too many, are named and do not hide the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessorListing<T> {
    pub found: Vec<T>,
    /// By the processor's ids.
    pub unread: Vec<String>,
    /// The list is longer than what was read: the oldest is missing, where the newest comes first.
    pub is_cut: bool,
}

impl<T> ProcessorListing<T> {
    /// All that there is.
    #[must_use]
    pub const fn of(found: Vec<T>) -> Self {
        Self { found, unread: Vec::new(), is_cut: false }
    }
}

/// A payment to be opened.
#[derive(Clone, Debug)]
pub struct Checkout {
    pub payment_id: PaymentId,
    pub amount_minor: i64,
    pub currency: Currency,
    /// Where the user returns to after paying, or cancelling.
    pub success_url: String,
    pub cancel_url: String,
    /// The result of earlier attempts.
    pub before: PriorCheckout,
}

/// What may exist at the processor when a payment is to be opened.
#[derive(Clone, Debug)]
pub enum PriorCheckout {
    /// Nothing was requested before.
    Nothing,
    /// A request was sent at or after this time, and its response was lost.
    Since(DateTime<Utc>),
    /// It is open under this id.
    Known(String),
}

/// A payment that is open at the processor.
#[derive(Clone, Debug)]
pub struct OpenedCheckout {
    pub processor_id: String,
    pub way: CheckoutMethod,
}

/// How its user pays.
#[derive(Clone, Debug)]
pub enum CheckoutMethod {
    /// On the processor's own page.
    Hosted { url: String },
    /// On a page of ours, whose script presents this secret to the processor. It is the payer's alone.
    Page { client_secret: SecretString },
    /// It is closed: it can no longer be paid.
    Closed,
}

impl OpenedCheckout {
    /// Where the user pays; `None` where it can no longer be paid. It may contain a secret of the payer: it is shown to them, and not
    /// stored.
    #[must_use]
    pub fn url(&self, public_url: &str, payment_id: PaymentId) -> Option<String> {
        match &self.way {
            CheckoutMethod::Hosted { url } => Some(url.clone()),
            // In the fragment, which no server sees.
            CheckoutMethod::Page { client_secret } => {
                let (here, secret) = (public_url.trim_end_matches('/'), client_secret.expose_secret());
                Some(format!("{here}/billing/checkout/{payment_id}#{secret}"))
            }
            CheckoutMethod::Closed => None,
        }
    }
}

/// A payment, as the processor has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessorPayment {
    /// The id that the money is under once it is paid (`pi_…`); until then it may be that of the checkout session (`cs_…`).
    pub processor_id: String,
    /// Ours; `None` where it was created at the processor.
    pub payment_id: Option<PaymentId>,
    pub amount_minor: i64,
    pub currency: Currency,
    /// What the payer saw and paid, where the processor has converted the amount.
    pub presented: Option<Presentment>,
    pub status: ProcessorPaymentStatus,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessorPaymentStatus {
    /// Its user may pay.
    Open,
    /// The last attempt was declined; the user may try another payment method.
    Declined {
        why: String,
    },
    /// In flight at the processor.
    Processing,
    Paid {
        charge_id: Option<String>,
    },
    Canceled,
    Expired,
}

/// A refund to be made.
#[derive(Clone, Debug)]
pub struct RefundRequest {
    pub refund_id: RefundId,
    /// Of the payment.
    pub processor_id: String,
    pub amount_minor: i64,
}

/// A refund, as the processor has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessorRefundRecord {
    pub processor_refund_id: String,
    /// Ours; `None` where it was created at the processor.
    pub refund_id: Option<RefundId>,
    /// By which the processor names the payment.
    pub of: Option<String>,
    pub amount_minor: i64,
    pub currency: Currency,
    pub status: ProcessorRefundStatus,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessorRefundStatus {
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
    /// The bank inquires; no money has moved.
    Inquiry,
    /// The money was taken.
    Opened,
    /// The money was returned to us.
    Won,
}

/// Why the processor did not carry out a request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProcessorError {
    /// It refused; a retry has no use.
    #[error("the payment processor refused: {why}")]
    Refused {
        /// As the processor states it.
        code: Option<String>,
        why: String,
    },
    /// It was not carried out; it may be retried.
    #[error("the payment processor cannot be asked at the moment: {0}")]
    Later(String),
    /// It may have been carried out: look it up before a retry.
    #[error("the payment processor gave no answer to rely on: {0}")]
    Unknown(String),
}

#[cfg(test)]
mod tests;
