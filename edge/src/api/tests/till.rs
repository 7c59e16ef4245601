//! A payment processor of the test's own: it opens what it is asked to, and fails as it is told.

use crate::processor::signature::WebhookSecrets;
use crate::processor::{
    Answer, Before, Checkout, Dispute, Listing, Opened, Processor, ProcessorError, RefundRequest, RefundStanding,
    Standing, Way,
};
use crate::services::{PaymentPage, Payments};
use chrono::{DateTime, Utc};
use domain::PaymentId;
use domain::money::Currency;
use futures::FutureExt as _;
use secrecy::SecretString;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Shared by the test and the service.
#[derive(Clone, Default)]
pub(super) struct Till(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// What was opened, by the processor's ids.
    opened: BTreeMap<String, Object>,
    asked: Vec<Before>,
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

/// What becomes of a request.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// Nothing is done.
    Fails(ProcessorError),
    /// It is done, and the answer is lost.
    LosesItsAnswer,
}

impl Till {
    /// One with a page of its own.
    pub(super) fn hosted() -> Self {
        let till = Self::default();
        till.0.lock().unwrap().is_hosted = true;
        till
    }

    pub(super) fn fails(&self, failure: Failure) {
        self.0.lock().unwrap().failures.push_back(failure);
    }

    /// It was paid or canceled, and nobody was told yet.
    pub(super) fn closes(&self, processor_id: &str) {
        self.0.lock().unwrap().opened.get_mut(processor_id).unwrap().is_closed = true;
    }

    /// How many were opened, and how many of them canceled.
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.0.lock().unwrap();
        (state.opened.len(), state.opened.values().filter(|object| object.is_canceled).count())
    }

    /// What was opened for a payment, and for how much.
    pub(super) fn opened_for(&self, id: PaymentId) -> Option<(String, i64)> {
        let state = self.0.lock().unwrap();
        state.opened.iter().find(|(_, it)| it.of == id).map(|(id, it)| (id.clone(), it.amount_minor))
    }

    /// What was said to be there before, each time.
    pub(super) fn asked(&self) -> Vec<Before> {
        self.0.lock().unwrap().asked.clone()
    }

    /// As the service is given it.
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
    fn checkout(&mut self, wanted: &Checkout) -> Result<Opened, ProcessorError> {
        self.asked.push(wanted.before.clone());
        let failure = self.failures.pop_front();
        if let Some(Failure::Fails(error)) = failure {
            return Err(error);
        }
        let known = match &wanted.before {
            Before::Nothing => None,
            Before::Since(_) => self.opened.iter().find(|(_, it)| it.of == wanted.payment_id).map(|(id, _)| id.clone()),
            Before::Known(id) => Some(id.clone()),
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

    fn shown(&self, id: &str) -> Opened {
        let way = if self.opened[id].is_canceled || self.opened[id].is_closed {
            Way::Closed
        } else if self.is_hosted {
            Way::Hosted { url: format!("https://pay.processor.example/{id}") }
        } else {
            Way::Page { client_secret: SecretString::from(format!("{id}_secret_x")) }
        };
        Opened { processor_id: id.to_owned(), way }
    }
}

impl Processor for Till {
    fn checkout<'a>(&'a self, wanted: &'a Checkout) -> Answer<'a, Opened> {
        async { self.0.lock().unwrap().checkout(wanted) }.boxed()
    }

    fn find_payment(&self, payment_id: PaymentId, _: DateTime<Utc>) -> Answer<'_, Option<Opened>> {
        async move {
            let state = self.0.lock().unwrap();
            Ok(state.opened.iter().find(|(_, it)| it.of == payment_id).map(|(id, _)| state.shown(id)))
        }
        .boxed()
    }

    fn cancel<'a>(&'a self, processor_id: &'a str) -> Answer<'a, Option<Standing>> {
        async {
            self.0.lock().unwrap().opened.get_mut(processor_id).unwrap().is_canceled = true;
            Ok(None)
        }
        .boxed()
    }

    // The routes open payments and ask for nothing else: what follows is the workers'.
    fn payment<'a>(&'a self, _: &'a str) -> Answer<'a, Option<Standing>> {
        unreachable!("no route asks how a payment stands")
    }

    fn refund<'a>(&'a self, _: &'a RefundRequest) -> Answer<'a, RefundStanding> {
        unreachable!("no route refunds at the processor")
    }

    fn refunds_of<'a>(&'a self, _: &'a str) -> Answer<'a, Vec<RefundStanding>> {
        unreachable!("no route looks for refunds")
    }

    fn payments_since(&self, _: DateTime<Utc>) -> Answer<'_, Listing<Standing>> {
        unreachable!("no route reconciles")
    }

    fn refunds_since(&self, _: DateTime<Utc>) -> Answer<'_, Listing<RefundStanding>> {
        unreachable!("no route reconciles")
    }

    fn disputes_since(&self, _: DateTime<Utc>) -> Answer<'_, Listing<Dispute>> {
        unreachable!("no route reconciles")
    }
}
