//! A fake payment processor: it opens checkouts, and fails as the test wants.

use crate::app_state::{PaymentPage, Payments};
use crate::payment_processor::signature::WebhookSecrets;
use crate::payment_processor::{
    Checkout, CheckoutMethod, Dispute, OpenedCheckout, PriorCheckout, Processor, ProcessorError, ProcessorFuture,
    ProcessorListing, ProcessorPayment, ProcessorPaymentStatus, ProcessorRefundRecord, RefundRequest,
};
use chrono::{DateTime, Utc};
use domain::PaymentId;
use domain::money::Currency;
use futures::FutureExt as _;
use secrecy::SecretString;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Shared by the test and the service.
#[derive(Clone, Default)]
pub(super) struct FakeProcessor(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The opened checkouts, by the processor's ids.
    opened: BTreeMap<String, Object>,
    asked: Vec<PriorCheckout>,
    failures: VecDeque<Failure>,
    is_hosted: bool,
}

#[derive(Clone, Debug)]
struct Object {
    of: PaymentId,
    amount_minor: i64,
    is_canceled: bool,
    is_closed: bool,
}

/// The failure of a request.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The request is not executed.
    Error(ProcessorError),
    /// The request is executed, and the response is lost.
    LostResponse,
}

impl FakeProcessor {
    /// A processor with a checkout page of its own.
    pub(super) fn hosted() -> Self {
        let processor = Self::default();
        processor.0.lock().unwrap().is_hosted = true;
        processor
    }

    pub(super) fn fail_next(&self, failure: Failure) {
        self.0.lock().unwrap().failures.push_back(failure);
    }

    /// The checkout was paid or canceled, and no webhook has arrived yet.
    pub(super) fn close(&self, processor_id: &str) {
        self.0.lock().unwrap().opened.get_mut(processor_id).unwrap().is_closed = true;
    }

    /// How many checkouts were opened, and how many of them were canceled.
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.0.lock().unwrap();
        (state.opened.len(), state.opened.values().filter(|object| object.is_canceled).count())
    }

    /// The checkout that was opened for a payment, and its amount.
    pub(super) fn opened_for(&self, id: PaymentId) -> Option<(String, i64)> {
        let state = self.0.lock().unwrap();
        state.opened.iter().find(|(_, it)| it.of == id).map(|(id, it)| (id.clone(), it.amount_minor))
    }

    /// The prior checkout that each request named.
    pub(super) fn checkouts_requested(&self) -> Vec<PriorCheckout> {
        self.0.lock().unwrap().asked.clone()
    }

    /// The settings with which the service uses this processor.
    pub(super) fn payments(&self) -> Payments {
        let page = PaymentPage {
            publishable_key: "pk_test_1".into(),
            script_url: "https://js.processor.example/v3/".into(),
            api_origin: "https://api.processor.example".into(),
        };
        Payments {
            processor: Arc::new(self.clone()),
            webhook_secrets: WebhookSecrets::new(&[SecretString::from("whsec_0123456789abcdef")]).unwrap(),
            currency: Currency::parse("EUR").unwrap(),
            page: (!self.0.lock().unwrap().is_hosted).then_some(page),
        }
    }
}

impl State {
    fn checkout(&mut self, wanted: &Checkout) -> Result<OpenedCheckout, ProcessorError> {
        self.asked.push(wanted.before.clone());
        let failure = self.failures.pop_front();
        if let Some(Failure::Error(error)) = failure {
            return Err(error);
        }
        let known = match &wanted.before {
            PriorCheckout::Nothing => None,
            PriorCheckout::Since(_) => {
                self.opened.iter().find(|(_, it)| it.of == wanted.payment_id).map(|(id, _)| id.clone())
            }
            PriorCheckout::Known(id) => Some(id.clone()),
        };
        let id = known.unwrap_or_else(|| format!("pi_{}", self.opened.len() + 1));
        self.opened.entry(id.clone()).or_insert(Object {
            of: wanted.payment_id,
            amount_minor: wanted.amount_minor,
            is_canceled: false,
            is_closed: false,
        });
        match failure {
            Some(_) => Err(ProcessorError::Unknown("the answer was lost".into())),
            None => Ok(self.shown(&id)),
        }
    }

    fn shown(&self, id: &str) -> OpenedCheckout {
        let way = if self.opened[id].is_canceled || self.opened[id].is_closed {
            CheckoutMethod::Closed
        } else if self.is_hosted {
            CheckoutMethod::Hosted { url: format!("https://pay.processor.example/{id}") }
        } else {
            CheckoutMethod::Page { client_secret: SecretString::from(format!("{id}_secret_x")) }
        };
        OpenedCheckout { processor_id: id.to_owned(), way }
    }
}

impl Processor for FakeProcessor {
    fn checkout<'a>(&'a self, wanted: &'a Checkout) -> ProcessorFuture<'a, OpenedCheckout> {
        async { self.0.lock().unwrap().checkout(wanted) }.boxed()
    }

    fn find_payment(&self, payment_id: PaymentId, _: DateTime<Utc>) -> ProcessorFuture<'_, Option<OpenedCheckout>> {
        async move {
            let state = self.0.lock().unwrap();
            Ok(state.opened.iter().find(|(_, it)| it.of == payment_id).map(|(id, _)| state.shown(id)))
        }
        .boxed()
    }

    fn cancel<'a>(&'a self, processor_id: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        async {
            let mut state = self.0.lock().unwrap();
            if let Some(Failure::Error(error)) = state.failures.pop_front() {
                return Err(error);
            }
            let object = state.opened.get_mut(processor_id).unwrap();
            let status = if object.is_closed {
                ProcessorPaymentStatus::Paid { charge_id: None }
            } else {
                object.is_canceled = true;
                ProcessorPaymentStatus::Canceled
            };
            Ok(Some(ProcessorPayment {
                processor_id: processor_id.to_owned(),
                payment_id: Some(object.of),
                amount_minor: object.amount_minor,
                currency: Currency::parse("EUR").unwrap(),
                presented: None,
                status,
            }))
        }
        .boxed()
    }

    // The routes open checkouts alone; the other calls are the workers'.
    fn payment<'a>(&'a self, _: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        unreachable!("no route asks how a payment stands")
    }

    fn order<'a>(&'a self, _: &'a str) -> ProcessorFuture<'a, Option<ProcessorPayment>> {
        unreachable!("no route asks for an order")
    }

    fn refund<'a>(&'a self, _: &'a RefundRequest) -> ProcessorFuture<'a, ProcessorRefundRecord> {
        unreachable!("no route refunds at the processor")
    }

    fn refunds_of<'a>(&'a self, _: &'a str) -> ProcessorFuture<'a, Vec<ProcessorRefundRecord>> {
        unreachable!("no route looks for refunds")
    }

    fn payments_since(&self, _: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorPayment>> {
        unreachable!("no route reconciles")
    }

    fn refunds_since(&self, _: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<ProcessorRefundRecord>> {
        unreachable!("no route reconciles")
    }

    fn disputes_since(&self, _: DateTime<Utc>) -> ProcessorFuture<'_, ProcessorListing<Dispute>> {
        unreachable!("no route reconciles")
    }
}
