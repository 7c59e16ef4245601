//! Test support: one payment in a host of its own, and a fake processor.

#[path = "../../../../edge/src/payment_processor/fake.rs"]
#[allow(dead_code, reason = "it is written for the tests of `edge`, too")]
mod fake;

use super::payment_updater::PaymentUpdater;
use actors::shell_dependencies::Store as _;
use domain::authz::TokenRole;
use domain::billing_account::Holder;
use domain::money::Currency;
use domain::payment::{Command, Fact, Payment, Request};
use domain::state_machine::RequestOrigin;
use domain::{BillingAccountId, EntityKind, EntityRef, PaymentId, Principal, RefundId};
use edge::payment_processor::{ProcessorPayment, ProcessorPaymentStatus};
use fake::FakeProcessor;
use std::sync::Arc;
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
    pub(super) processor: FakeProcessor,
    host: TestHost,
    store: Arc<MemoryStore>,
}

impl Bench {
    /// The payment is created, and not known to be open at the processor.
    pub(super) async fn created() -> Self {
        let (host, store) = TestHost::in_memory().await;
        let bench = Self { processor: FakeProcessor::default(), host, store };
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
        bench.set_status(ProcessorPaymentStatus::Open);
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
        bench.set_status(ProcessorPaymentStatus::Paid { charge_id: None });
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

    /// Sets the payment's state at the processor.
    pub(super) fn set_status(&self, status: ProcessorPaymentStatus) {
        let (payment_id, currency) = (Some(PAYMENT), eur());
        let processor_id = INTENT.to_owned();
        let payment =
            ProcessorPayment { processor_id, payment_id, amount_minor: 1000, currency, presented: None, status };
        self.processor.objects().payments.insert(INTENT.to_owned(), payment);
    }

    async fn send(&self, by: &Principal, command: impl Into<Command>) {
        self.host.ask::<Payment>(by, PAYMENT.0, command).await.unwrap();
    }

    pub(super) fn updater(&self, cause: u128) -> PaymentUpdater {
        PaymentUpdater::new(self.host.directory.clone(), Arc::new(self.processor.clone()), "test")
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
