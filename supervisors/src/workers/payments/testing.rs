//! Test support: one payment in a host of its own, and a fake processor.

use super::payment_updater::PaymentUpdater;
use actors::shell_dependencies::Store as _;
use chrono::{DateTime, Utc};
use domain::authz::TokenRole;
use domain::billing_account::Holder;
use domain::money::Currency;
use domain::payment::{Command, Fact, Payment, Request};
use domain::state_machine::RequestOrigin;
use domain::{BillingAccountId, EntityKind, EntityRef, PaymentId, Principal, RefundId};
use edge::payment_processor::{
    Checkout, CheckoutMethod, Dispute, OpenedCheckout, Processor, ProcessorError, ProcessorFuture, ProcessorListing,
    ProcessorPayment, ProcessorPaymentStatus, ProcessorRefundRecord, ProcessorRefundStatus, RefundRequest,
};
use futures::FutureExt as _;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use test_host::{MemoryStore, TestHost, caller, system};
use uuid::Uuid;

pub(super) const PAYMENT: PaymentId = PaymentId(Uuid::from_u128(7));
pub(super) const REFUND: RefundId = RefundId(Uuid::from_u128(8));
/// The processor's id of the payment.
pub(super) const INTENT: &str = "pi_1";

pub(super) fn eur() -> Currency {
    Currency::parse("EUR").unwrap()
}

/// A payment of 1000 minor units.
pub(super) struct Bench {
    pub(super) processor: Arc<FakeProcessor>,
    host: TestHost,
    store: Arc<MemoryStore>,
}

impl Bench {
    /// The payment is created, and not known to be open at the processor.
    pub(super) async fn created() -> Self {
        let (host, store) = TestHost::in_memory().await;
        let bench = Self { processor: Arc::default(), host, store };
        let create = Request::Create {
            account_id: BillingAccountId(Uuid::from_u128(9)),
            holder: Holder::User("ann".into()),
            payer: "ann".into(),
            amount_minor: 1000,
            currency: eur(),
            success_url: "https://a.test/done".to_owned(),
            cancel_url: "https://a.test/back".to_owned(),
        };
        bench.send(&ann(), create).await;
        bench
    }

    /// The payment is open: its payer can pay.
    pub(super) async fn open() -> Self {
        let bench = Self::created().await;
        bench.send(&system(), Fact::Opened { processor_id: INTENT.to_owned() }).await;
        bench.processor.set_status(ProcessorPaymentStatus::Open);
        bench
    }

    /// The payment is deposited in the account.
    pub(super) async fn deposited() -> Self {
        let bench = Self::open().await;
        let charge_id = Some("ch_1".to_owned());
        let processor_id = INTENT.to_owned();
        bench
            .send(
                &system(),
                Fact::Paid { processor_id, amount_minor: 1000, currency: eur(), charge_id, presented: None },
            )
            .await;
        bench.send(&system(), Fact::Deposited).await;
        bench.processor.set_status(ProcessorPaymentStatus::Paid { charge_id: None });
        bench
    }

    /// A refund of `amount_minor` is debited from the account, and owed by the processor.
    pub(super) async fn refunding(amount_minor: i64) -> Self {
        let bench = Self::deposited().await;
        let reason = "not needed".to_owned();
        bench.send(&ann(), Request::Refund { refund_id: REFUND, amount_minor: Some(amount_minor), reason }).await;
        bench.send(&system(), Fact::RefundTaken { refund_id: REFUND, amount_minor }).await;
        bench
    }

    async fn send(&self, by: &Principal, command: impl Into<Command>) {
        self.host.ask::<Payment>(by, PAYMENT.0, command).await.unwrap();
    }

    pub(super) fn updater(&self, cause: u128) -> PaymentUpdater {
        let processor = Arc::clone(&self.processor) as Arc<dyn Processor>;
        PaymentUpdater::new(self.host.directory.clone(), processor, "test")
            .unwrap()
            .for_cause(Uuid::from_u128(cause), RequestOrigin::untraced("test"))
    }

    /// The payment as it is stored.
    pub(super) async fn payment(&self) -> Payment {
        let entity = EntityRef { kind: EntityKind::Payment, id: PAYMENT.0 };
        let snapshot = self.store.load(entity).await.unwrap().unwrap();
        serde_json::from_str(&snapshot.body).unwrap()
    }
}

fn ann() -> Principal {
    caller("ann", TokenRole::User)
}

/// A processor with the objects that a test gives it.
#[derive(Default)]
pub(super) struct FakeProcessor {
    pub(super) record: Mutex<Option<ProcessorPayment>>,
    /// What was ordered under the payment.
    pub(super) order: Mutex<Option<ProcessorPayment>>,
    pub(super) refunds: Mutex<Vec<ProcessorRefundRecord>>,
    pub(super) disputes: Mutex<Vec<Dispute>>,
    /// The requests that it received.
    pub(super) asked: Mutex<Vec<String>>,
    /// The start times of the listings of refunds.
    pub(super) refunds_asked_since: Mutex<Vec<DateTime<Utc>>>,
    /// The ids of refunds that cannot be parsed, and whether the listing is cut off.
    pub(super) unread: Mutex<(Vec<String>, bool)>,
    fails: Mutex<VecDeque<ProcessorError>>,
    loses: Mutex<bool>,
    refuses: Mutex<bool>,
    silent_on: Mutex<Option<String>>,
}

impl FakeProcessor {
    pub(super) fn set_status(&self, status: ProcessorPaymentStatus) {
        *self.record.lock().unwrap() = Some(ProcessorPayment {
            processor_id: INTENT.to_owned(),
            payment_id: Some(PAYMENT),
            amount_minor: 1000,
            currency: eur(),
            presented: None,
            status,
        });
    }

    /// Answers the next request with this error.
    pub(super) fn fail_next(&self, error: ProcessorError) {
        self.fails.lock().unwrap().push_back(error);
    }

    /// Makes the next refund, and loses its answer.
    pub(super) fn lose_next_reply(&self) {
        *self.loses.lock().unwrap() = true;
    }

    /// Refuses refunds from here on.
    pub(super) fn refuse_refunds(&self) {
        *self.refuses.lock().unwrap() = true;
    }

    pub(super) fn time_out_for(&self, processor_id: &str) {
        *self.silent_on.lock().unwrap() = Some(processor_id.to_owned());
    }

    pub(super) fn requests(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    fn answer<'a, T: Send + 'a>(
        &self,
        answer: impl FnOnce(&Self) -> Result<T, ProcessorError>,
    ) -> ProcessorFuture<'a, T> {
        let failed = self.fails.lock().unwrap().pop_front();
        let answer = failed.map_or_else(|| answer(self), Err);
        std::future::ready(answer).boxed()
    }

    fn current(&self) -> Option<ProcessorPayment> {
        self.record.lock().unwrap().clone()
    }
}

impl Processor for FakeProcessor {
    fn checkout<'a>(&'a self, _: &'a Checkout) -> ProcessorFuture<'a, OpenedCheckout> {
        self.answer(|_| Err(ProcessorError::Later("this fake opens nothing".to_owned())))
    }

    fn find_payment(&self, payment_id: PaymentId, _: DateTime<Utc>) -> ProcessorFuture<'_, Option<OpenedCheckout>> {
        self.answer(|it| {
            let found = it.current().filter(|record| record.payment_id == Some(payment_id));
            Ok(found.map(|record| OpenedCheckout { processor_id: record.processor_id, way: CheckoutMethod::Closed }))
        })
    }

    fn payment<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.answer(|it| {
            if it.silent_on.lock().unwrap().as_deref() == Some(processor_id) {
                return Err(ProcessorError::Later("no answer".to_owned()));
            }
            Ok(it.current().filter(|_| [INTENT, "ch_1"].contains(&processor_id)))
        })
    }

    fn order<'a>(&'a self, _: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.answer(|it| Ok(it.order.lock().unwrap().clone()))
    }

    fn cancel<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        self.answer(|it| {
            it.asked.lock().unwrap().push(format!("cancel {processor_id}"));
            let current = it.current();
            if let Some(ProcessorPayment {
                status: ProcessorPaymentStatus::Open | ProcessorPaymentStatus::Declined { .. },
                ..
            }) = current
            {
                it.set_status(ProcessorPaymentStatus::Canceled);
            }
            Ok(it.current())
        })
    }

    fn refund<'a>(&'a self, wanted: &'a RefundRequest) -> ProcessorFuture<'a, ProcessorRefundRecord> {
        self.answer(|it| {
            it.asked.lock().unwrap().push(format!("refund {} of {}", wanted.amount_minor, wanted.processor_id));
            if *it.refuses.lock().unwrap() {
                return Err(ProcessorError::Refused { code: None, why: "not this one".to_owned() });
            }
            let mut refunds = it.refunds.lock().unwrap();
            let record = ProcessorRefundRecord {
                processor_refund_id: format!("re_{}", refunds.len() + 1),
                refund_id: Some(wanted.refund_id),
                of: Some(wanted.processor_id.clone()),
                amount_minor: wanted.amount_minor,
                currency: eur(),
                status: ProcessorRefundStatus::Succeeded,
            };
            refunds.push(record.clone());
            if std::mem::take(&mut *it.loses.lock().unwrap()) {
                return Err(ProcessorError::Unknown("lost".to_owned()));
            }
            Ok(record)
        })
    }

    fn refunds_of<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Vec<ProcessorRefundRecord>> {
        self.answer(|it| {
            let refunds = it.refunds.lock().unwrap();
            Ok(refunds.iter().filter(|refund| refund.of.as_deref() == Some(processor_id)).cloned().collect())
        })
    }

    fn payments_since(&self, _: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorPayment>> {
        self.answer(|it| Ok(ProcessorListing::of(it.current().into_iter().collect())))
    }

    fn refunds_since(&self, since: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorRefundRecord>> {
        self.refunds_asked_since.lock().unwrap().push(since);
        let (unread, is_cut) = self.unread.lock().unwrap().clone();
        self.answer(|it| Ok(ProcessorListing { found: it.refunds.lock().unwrap().clone(), unread, is_cut }))
    }

    fn disputes_since(&self, _: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<Dispute>> {
        self.answer(|it| Ok(ProcessorListing::of(it.disputes.lock().unwrap().clone())))
    }
}
