//! A payment processor in the test's own process: it has the payments that were opened or that the test adds, and fails as the test wants. The
//! tests of `supervisors` have this file as a module.

use chrono::{DateTime, Utc};
use domain::PaymentId;
use domain::money::Currency;
use edge::payment_processor::{
    Checkout, CheckoutMethod, Dispute, OpenedCheckout, PriorCheckout, Processor, ProcessorError, ProcessorFuture,
    ProcessorListing, ProcessorPayment, ProcessorPaymentStatus, ProcessorRefundRecord, ProcessorRefundStatus,
    RefundRequest,
};
use futures::FutureExt as _;
use secrecy::SecretString;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

/// Shared by the test and the service.
#[derive(Clone, Default)]
pub(crate) struct FakeProcessor(Arc<Mutex<ProcessorObjects>>);

/// What the processor has, and how it answers.
#[derive(Default)]
pub(crate) struct ProcessorObjects {
    /// By the ids under which they are looked up (`pi_…`). The charge of `pi_1` is `ch_1`.
    pub(crate) payments: BTreeMap<String, ProcessorPayment>,
    /// What was ordered under any payment.
    pub(crate) order: Option<ProcessorPayment>,
    pub(crate) refunds: Vec<ProcessorRefundRecord>,
    pub(crate) disputes: Vec<Dispute>,
    /// The ids of refunds that cannot be parsed, and whether their listing is cut off.
    pub(crate) unread: (Vec<String>, bool),
    /// The prior checkout that each request for one named.
    pub(crate) checkouts: Vec<PriorCheckout>,
    /// The requests to cancel or to refund.
    pub(crate) requests: Vec<String>,
    /// The start times of the listings of refunds.
    pub(crate) refunds_listed_since: Vec<DateTime<Utc>>,
    pub(crate) refuses_refunds: bool,
    /// The payment for which it does not answer.
    pub(crate) silent_on: Option<String>,
    failures: VecDeque<ProcessorError>,
    loses_next_answer: bool,
    is_hosted: bool,
}

impl FakeProcessor {
    /// A processor with a checkout page of its own.
    pub(crate) fn hosted() -> Self {
        let processor = Self::default();
        processor.objects().is_hosted = true;
        processor
    }

    pub(crate) fn is_hosted(&self) -> bool {
        self.objects().is_hosted
    }

    pub(crate) fn objects(&self) -> MutexGuard<'_, ProcessorObjects> {
        self.0.lock().unwrap()
    }

    /// Answers the next request with this error, and does not execute it.
    pub(crate) fn fail_next(&self, error: ProcessorError) {
        self.objects().failures.push_back(error);
    }

    /// Executes the next request that changes something, and loses its answer.
    pub(crate) fn lose_next_answer(&self) {
        self.objects().loses_next_answer = true;
    }

    /// The payment was made, and no webhook has arrived yet.
    pub(crate) fn set_paid(&self, processor_id: &str) {
        let paid = ProcessorPaymentStatus::Paid { charge_id: None };
        self.objects().payments.get_mut(processor_id).unwrap().status = paid;
    }

    /// How many payments were opened, and how many of them were canceled.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let objects = self.objects();
        let canceled = objects.payments.values().filter(|it| it.status == ProcessorPaymentStatus::Canceled);
        (objects.payments.len(), canceled.count())
    }

    /// The processor's id of what was opened for a payment, and its amount.
    pub(crate) fn opened_for(&self, id: PaymentId) -> Option<(String, i64)> {
        self.objects().of(id).map(|it| (it.processor_id.clone(), it.amount_minor))
    }

    fn answer<'a, T: Send + 'a>(
        &self,
        execute: impl FnOnce(&mut ProcessorObjects) -> Result<T, ProcessorError>,
    ) -> ProcessorFuture<'a, T> {
        let mut objects = self.objects();
        let answer = objects.failures.pop_front().map_or_else(|| execute(&mut objects), Err);
        std::future::ready(answer).boxed()
    }

    fn change<'a, T: Send + 'a>(
        &self,
        execute: impl FnOnce(&mut ProcessorObjects) -> Result<T, ProcessorError>,
    ) -> ProcessorFuture<'a, T> {
        self.answer(|objects| {
            let changed = execute(objects)?;
            match std::mem::take(&mut objects.loses_next_answer) {
                true => Err(ProcessorError::Unknown("the answer was lost".to_owned())),
                false => Ok(changed),
            }
        })
    }
}

impl ProcessorObjects {
    fn of(&self, id: PaymentId) -> Option<&ProcessorPayment> {
        self.payments.values().find(|it| it.payment_id == Some(id))
    }

    fn open(&mut self, wanted: &Checkout) -> OpenedCheckout {
        let known = match &wanted.before {
            PriorCheckout::Nothing => None,
            PriorCheckout::Since(_) => self.of(wanted.payment_id).map(|it| it.processor_id.clone()),
            PriorCheckout::Known(id) => Some(id.clone()),
        };
        let processor_id = known.unwrap_or_else(|| format!("pi_{}", self.payments.len() + 1));
        let payment = self.payments.entry(processor_id.clone()).or_insert_with(|| ProcessorPayment {
            processor_id,
            payment_id: Some(wanted.payment_id),
            amount_minor: wanted.amount_minor,
            currency: wanted.currency.clone(),
            presented: None,
            status: ProcessorPaymentStatus::Open,
        });
        opened(payment, self.is_hosted)
    }
}

fn can_be_paid(payment: &ProcessorPayment) -> bool {
    matches!(payment.status, ProcessorPaymentStatus::Open | ProcessorPaymentStatus::Declined { .. })
}

fn opened(payment: &ProcessorPayment, is_hosted: bool) -> OpenedCheckout {
    let id = &payment.processor_id;
    let way = match can_be_paid(payment) {
        false => CheckoutMethod::Closed,
        true if is_hosted => CheckoutMethod::Hosted { url: format!("https://pay.processor.example/{id}") },
        true => CheckoutMethod::Page { client_secret: SecretString::from(format!("{id}_secret_x")) },
    };
    OpenedCheckout { processor_id: id.clone(), way }
}

impl Processor for FakeProcessor {
    fn checkout<'a>(&'a self, wanted: &'a Checkout) -> ProcessorFuture<'a, OpenedCheckout> {
        self.objects().checkouts.push(wanted.before.clone());
        self.change(|objects| Ok(objects.open(wanted)))
    }

    fn find_payment(&self, payment_id: PaymentId, _: DateTime<Utc>) -> ProcessorFuture<'_, Option<OpenedCheckout>> {
        self.answer(|objects| Ok(objects.of(payment_id).map(|it| opened(it, objects.is_hosted))))
    }

    fn payment<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.answer(|objects| match objects.silent_on.as_deref() == Some(processor_id) {
            true => Err(ProcessorError::Later("no answer".to_owned())),
            false => Ok(objects.payments.get(&processor_id.replace("ch_", "pi_")).cloned()),
        })
    }

    fn order<'a>(&'a self, _: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.answer(|objects| Ok(objects.order.clone()))
    }

    fn cancel<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.change(|objects| {
            objects.requests.push(format!("cancel {processor_id}"));
            let mut payment = objects.payments.get_mut(processor_id);
            if let Some(payment) = payment.as_mut().filter(|payment| can_be_paid(payment)) {
                payment.status = ProcessorPaymentStatus::Canceled;
            }
            Ok(payment.cloned())
        })
    }

    fn refund<'a>(&'a self, wanted: &'a RefundRequest) -> ProcessorFuture<'a, ProcessorRefundRecord> {
        self.change(|objects| {
            objects.requests.push(format!("refund {} of {}", wanted.amount_minor, wanted.processor_id));
            if objects.refuses_refunds {
                return Err(ProcessorError::Refused { code: None, why: "not this one".to_owned() });
            }
            let record = ProcessorRefundRecord {
                processor_refund_id: format!("re_{}", objects.refunds.len() + 1),
                refund_id: Some(wanted.refund_id),
                of: Some(wanted.processor_id.clone()),
                amount_minor: wanted.amount_minor,
                currency: Currency::parse("EUR").unwrap(),
                status: ProcessorRefundStatus::Succeeded,
            };
            objects.refunds.push(record.clone());
            Ok(record)
        })
    }

    fn refunds_of<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Vec<ProcessorRefundRecord>> {
        self.answer(|objects| {
            let refunds = objects.refunds.iter().filter(|refund| refund.of.as_deref() == Some(processor_id));
            Ok(refunds.cloned().collect())
        })
    }

    fn payments_since(&self, _: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorPayment>> {
        self.answer(|objects| Ok(ProcessorListing::of(objects.payments.values().cloned().collect())))
    }

    fn refunds_since(&self, since: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorRefundRecord>> {
        self.objects().refunds_listed_since.push(since);
        self.answer(|objects| {
            let (unread, is_cut) = objects.unread.clone();
            Ok(ProcessorListing { found: objects.refunds.clone(), unread, is_cut })
        })
    }

    fn disputes_since(&self, _: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<Dispute>> {
        self.answer(|objects| Ok(ProcessorListing::of(objects.disputes.clone())))
    }
}
