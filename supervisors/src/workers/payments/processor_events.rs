//! Processes the webhooks of the payment processor, after they were stored and answered: each is parsed and applied to its payment.
//!
//! This worker holds no state: it can stop anywhere, and the event is processed again; a repetition has no effect. Where the processor or
//! a payment cannot be reached, the event waits for as long as that lasts; where its content is contradicted, it is retried for some
//! hours, in case it was only early, and then waits for an operator.

use super::payment_updater::{self, PaymentUpdater, UpdateError, UpdateOutcome};
use crate::workers::event_delivery::{Disposition, EventDelivery, ReactionContext};
use actors::{AskError, CommandKey};
use domain::processor_event::{Fact, Phase, ProcessingOutcome, ProcessorEvent};
use domain::state_machine::CommandSort as _;
use domain::{EntityKind, EntityRef, EventId, ProcessorEventId};
use edge::payment_processor::stripe::event::{ProcessorUpdate, StripeEvent};
use edge::payment_processor::{ProcessorError, ProcessorRefundRecord};
use edge::payment_webhook::{COUNTERS, body_of};
use persistence::envelope_encryption::KeyRing;
use secrecy::ExposeSecret as _;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Events with requests to the processor in flight at once in this process: far fewer than the events without requests.
const MAX_CONCURRENT: usize = 32;
/// How long an event waits for a permit.
const PERMIT_TIMEOUT: Duration = Duration::from_millis(500);
/// The timeout of an event's requests, all together.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// Processes the processor's events.
#[derive(Clone)]
pub struct ProcessorEventHandler {
    updater: PaymentUpdater,
    ring: Arc<KeyRing>,
    permits: Arc<Semaphore>,
    counted_failures: Arc<Mutex<CountedFailures>>,
}

/// Failed attempts that were counted. While an event waits it is redelivered several times a second.
#[derive(Default)]
struct CountedFailures(BTreeSet<EventId>);

impl CountedFailures {
    /// How many attempts are remembered; beyond that one may be counted twice.
    const CAPACITY: usize = 4096;

    /// Whether the attempt is counted for the first time.
    fn is_first(&mut self, attempt: EventId) -> bool {
        if self.0.len() >= Self::CAPACITY {
            self.0.clear();
        }
        self.0.insert(attempt)
    }
}

/// Why an event could not be processed.
enum ProcessingError {
    /// The processor or a payment cannot be reached at the moment.
    Later(String),
    /// Its content cannot be applied.
    Failed(String),
}

impl ProcessorEventHandler {
    #[must_use]
    pub fn new(updater: PaymentUpdater, ring: Arc<KeyRing>) -> Self {
        Self { updater, ring, permits: Arc::new(Semaphore::new(MAX_CONCURRENT)), counted_failures: Arc::default() }
    }

    /// The reaction to an event of the processor.
    pub(in crate::workers) async fn process(
        &self,
        by: &ReactionContext,
        delivery: &EventDelivery,
        id: ProcessorEventId,
    ) -> Disposition {
        let event = match read(by, id).await {
            Ok(event) => event,
            Err(why) => return Disposition::Later { why },
        };
        if !event.is_open() {
            return match self.dismiss_review(delivery, &event).await {
                Ok(()) => by.settle(delivery).await,
                Err(why) => Disposition::Later { why },
            };
        }
        let fact = match self.apply(delivery, &event).await {
            Ok(outcome) => Fact::Processed { outcome },
            Err(ProcessingError::Failed(why)) => Fact::Failed { why },
            Err(ProcessingError::Later(why)) => {
                if self.counted_failures.lock().unwrap_or_else(PoisonError::into_inner).is_first(delivery.id) {
                    COUNTERS.processing_failed();
                }
                return Disposition::Later { why };
            }
        };
        conclude(by, delivery, &event, fact).await
    }

    /// An event that an operator has dismissed ends the review of its payment.
    async fn dismiss_review(&self, delivery: &EventDelivery, event: &ProcessorEvent) -> Result<(), String> {
        let Phase::Dismissed { .. } = event.phase else { return Ok(()) };
        let Some(body) = body_of(&self.ring, event) else { return Ok(()) };
        let body = match body {
            Ok(body) => body,
            // The review is ended at the payment.
            Err(error) => {
                let event_id = &event.event_id;
                tracing::warn!(%error, event_id, "a dismissed event of the payment processor cannot be opened");
                return Ok(());
            }
        };
        match StripeEvent::read(body.expose_secret()).and_then(StripeEvent::update) {
            Ok(ProcessorUpdate::Payment(record)) => {
                let updater = self.updater.for_cause(event.id.0, delivery.origin.clone());
                payment_updater::dismissed(&updater, record).await.map_err(|error| error.to_string())
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Applies the event to the payment that it concerns.
    async fn apply(
        &self,
        delivery: &EventDelivery,
        event: &ProcessorEvent,
    ) -> Result<ProcessingOutcome, ProcessingError> {
        let body =
            body_of(&self.ring, event).ok_or_else(|| ProcessingError::Failed("its body was forgotten".to_owned()))?;
        let body = body.map_err(|error| ProcessingError::Later(format!("its body cannot be opened: {error}")))?;
        let sent = StripeEvent::read(body.expose_secret());
        let update = sent.and_then(StripeEvent::update).map_err(|error| ProcessingError::Failed(error.to_string()))?;
        let updater = self.updater.for_cause(event.id.0, delivery.origin.clone());
        let outcome = match update {
            ProcessorUpdate::Payment(record) => payment_updater::payment(&updater, record).await?,
            ProcessorUpdate::Dispute(dispute) => {
                self.with_permit(async {
                    payment_updater::dispute(&updater, dispute).await.map_err(ProcessingError::from)
                })
                .await?
            }
            ProcessorUpdate::Refunds(refunds) => self.with_permit(apply_refunds(&updater, refunds)).await?,
            ProcessorUpdate::RefundsOf(of) => {
                let refunds = async {
                    let refunds = updater.processor.refunds_of(&of).await.map_err(ProcessingError::from)?;
                    apply_refunds(&updater, refunds).await
                };
                self.with_permit(refunds).await?
            }
            ProcessorUpdate::NotOurs => UpdateOutcome::NotOurs,
            ProcessorUpdate::Nothing => return Ok(ProcessingOutcome::NothingToDo),
        };
        match outcome {
            UpdateOutcome::Done { .. } => Ok(ProcessingOutcome::Applied),
            UpdateOutcome::NotOurs => Ok(ProcessingOutcome::NotOurs),
            UpdateOutcome::Rejected(why) => Err(ProcessingError::Failed(why)),
        }
    }

    /// Runs requests to the processor, with a permit and a timeout of their own.
    async fn with_permit(
        &self,
        asking: impl Future<Output = Result<UpdateOutcome, ProcessingError>>,
    ) -> Result<UpdateOutcome, ProcessingError> {
        let busy = || ProcessingError::Later("the payment processor is asked by many others at the moment".to_owned());
        let permit = timeout(PERMIT_TIMEOUT, self.permits.acquire()).await.map_err(|_| busy())?;
        let _permit = permit.map_err(|_| busy())?;
        let slow = |_| ProcessingError::Later("the payment processor does not answer in time".to_owned());
        timeout(CALL_TIMEOUT, asking).await.map_err(slow)?
    }
}

/// Applies each refund; one that is rejected does not stop the others.
async fn apply_refunds(
    updater: &PaymentUpdater,
    refunds: Vec<ProcessorRefundRecord>,
) -> Result<UpdateOutcome, ProcessingError> {
    let mut all = UpdateOutcome::NotOurs;
    for refund in refunds {
        let outcome = payment_updater::refund(updater, refund).await?;
        all = match (all, outcome) {
            (UpdateOutcome::Rejected(why), _) | (_, UpdateOutcome::Rejected(why)) => UpdateOutcome::Rejected(why),
            (UpdateOutcome::Done { is_new: one }, UpdateOutcome::Done { is_new: other }) => {
                UpdateOutcome::Done { is_new: one || other }
            }
            (UpdateOutcome::NotOurs, outcome) | (outcome, UpdateOutcome::NotOurs) => outcome,
        };
    }
    Ok(all)
}

/// Records the outcome, in the commit that deletes the outbox row; the member that commits it counts it.
async fn conclude(by: &ReactionContext, delivery: &EventDelivery, event: &ProcessorEvent, fact: Fact) -> Disposition {
    let context = by.context_for(delivery).with_key(CommandKey::for_event(delivery.id, fact.tag()));
    match by.directory.ask::<ProcessorEvent>(&by.permit, event.id.0, fact.clone().into(), context).await {
        Ok(answered) if answered.written => {
            count(event, &fact);
            Disposition::Settled
        }
        Ok(_) | Err(AskError::AlreadyDone) => by.settle(delivery).await,
        Err(error) => Disposition::Later { why: error.to_string() },
    }
}

fn count(event: &ProcessorEvent, fact: &Fact) {
    let (event_id, event_type) = (&event.event_id, &event.event_type);
    match fact {
        Fact::Failed { why } => {
            COUNTERS.processing_failed();
            tracing::warn!(event_id, event_type, why, "an event of the payment processor cannot be applied");
        }
        Fact::Processed { outcome } => {
            COUNTERS.processed();
            if *outcome == ProcessingOutcome::NotOurs {
                COUNTERS.not_ours();
            }
            tracing::debug!(
                event_id,
                event_type,
                outcome = outcome.name(),
                "an event of the payment processor was processed"
            );
        }
        Fact::Received { .. } => {}
    }
}

async fn read(by: &ReactionContext, id: ProcessorEventId) -> Result<Arc<ProcessorEvent>, String> {
    if let Some((event, _)) = by.directory.host().committed_state::<ProcessorEvent>(id.0) {
        return Ok(event);
    }
    let entity = EntityRef { kind: EntityKind::ProcessorEvent, id: id.0 };
    let snapshot = by.reads.snapshot(entity).await.map_err(|error| error.to_string())?;
    let snapshot = snapshot.ok_or_else(|| "the event is not there".to_owned())?;
    serde_json::from_str(&snapshot.body).map(Arc::new).map_err(|error| format!("the event cannot be read: {error}"))
}

impl From<UpdateError> for ProcessingError {
    fn from(error: UpdateError) -> Self {
        Self::Later(error.to_string())
    }
}

impl From<ProcessorError> for ProcessingError {
    fn from(error: ProcessorError) -> Self {
        match error {
            ProcessorError::Refused { .. } => Self::Failed(error.to_string()),
            ProcessorError::Later(_) | ProcessorError::Unknown(_) => Self::Later(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Bench, INTENT, PAYMENT, eur};
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use chrono::Utc;
    use domain::Event;
    use domain::processor_event::Phase;
    use domain::resend_timer::ResendTimer;
    use domain::state_machine::RequestOrigin;
    use edge::payment_processor::{ProcessorPaymentStatus, ProcessorRefundStatus};
    use edge::payment_webhook::seal_body;
    use serde_json::{Value, json};
    use uuid::Uuid;

    fn ring() -> Arc<KeyRing> {
        Arc::new(KeyRing::parse(&format!("key a {}\nactive a\n", STANDARD.encode([7; 32]))).unwrap())
    }

    /// A stored event, under an id of its own.
    fn stored(n: u128, event_type: &str, object: &Value) -> ProcessorEvent {
        let id = Uuid::from_u128(n);
        let body = json!({ "id": format!("evt_{n}"), "type": event_type, "data": { "object": object } }).to_string();
        ProcessorEvent {
            id: ProcessorEventId(id),
            event_id: format!("evt_{n}"),
            event_type: event_type.to_owned(),
            object_id: None,
            occurred_at: None,
            received_at: Utc::now(),
            digest: String::new(),
            body_enc: Some(seal_body(&ring(), id, body.as_bytes()).unwrap()),
            attempts: 0,
            last_error: None,
            phase: Phase::Received { again: ResendTimer::first(Utc::now()) },
        }
    }

    /// The outcome as text, or the error with whether the event waits or has failed.
    async fn outcome_of(bench: &Bench, event: &ProcessorEvent) -> String {
        let delivery = EventDelivery {
            id: EventId(Uuid::nil()),
            event: Event::ProcessorEventDue { processor_event_id: event.id },
            origin: RequestOrigin::untraced("test"),
        };
        match ProcessorEventHandler::new(bench.updater(1), ring()).apply(&delivery, event).await {
            Ok(outcome) => outcome.name().to_owned(),
            Err(ProcessingError::Later(why)) => format!("later: {why}"),
            Err(ProcessingError::Failed(why)) => format!("failed: {why}"),
        }
    }

    fn intent(amount: i64) -> Value {
        json!({
            "id": INTENT, "amount": amount, "currency": "eur", "status": "succeeded", "latest_charge": "ch_1",
            "metadata": { "payment_id": PAYMENT.to_string() },
        })
    }

    fn refund(id: &str, amount: i64, of: &str) -> Value {
        json!({ "id": id, "amount": amount, "currency": "eur", "status": "succeeded", "payment_intent": of })
    }

    #[tokio::test]
    async fn paid_event_is_applied_once_and_a_contradicting_one_fails() {
        let bench = Bench::open().await;
        let failed = outcome_of(&bench, &stored(1, "payment_intent.succeeded", &intent(999))).await;
        assert!(failed.starts_with("failed: ") && failed.contains("9.99 EUR"), "{failed}");
        assert_eq!(bench.payment().await.paid_at(), None);
        let paid = stored(2, "payment_intent.succeeded", &intent(1000));
        for _ in 0..2 {
            assert_eq!(outcome_of(&bench, &paid).await, "applied");
        }
        assert!(bench.payment().await.paid_at().is_some());
        let theirs = json!({ "id": "pi_9", "amount": 1, "currency": "eur", "status": "succeeded" });
        assert_eq!(outcome_of(&bench, &stored(3, "payment_intent.succeeded", &theirs)).await, "not_ours");
        assert_eq!(outcome_of(&bench, &stored(4, "customer.created", &json!({}))).await, "nothing_to_do");
    }

    #[tokio::test]
    async fn each_of_several_refunds_is_applied_and_a_rejected_one_is_reported() {
        let bench = Bench::deposited().await;
        let list =
            |data: Vec<Value>| json!({ "payment_intent": INTENT, "refunds": { "data": data, "has_more": false } });
        let refunds = list(vec![refund("re_1", 0, INTENT), refund("re_2", 300, INTENT), refund("re_3", 1, "pi_9")]);
        let failed = outcome_of(&bench, &stored(1, "charge.refunded", &refunds)).await;
        assert!(failed.starts_with("failed: "), "{failed}");
        assert_eq!(bench.payment().await.reversals.keys().collect::<Vec<_>>(), ["re_2"]);
        // The charge alone: its refunds are looked up.
        bench.processor.objects().refunds.push(ProcessorRefundRecord {
            processor_refund_id: "re_4".to_owned(),
            refund_id: None,
            of: Some(INTENT.to_owned()),
            amount_minor: 200,
            currency: eur(),
            status: ProcessorRefundStatus::Succeeded,
        });
        let charge = json!({ "id": "ch_1", "payment_intent": INTENT });
        assert_eq!(outcome_of(&bench, &stored(2, "charge.refunded", &charge)).await, "applied");
        assert_eq!(bench.payment().await.left_minor(), 500);
    }

    #[test]
    fn redelivered_attempt_is_counted_once() {
        let (mut failures, attempt) = (CountedFailures::default(), |n| EventId(Uuid::from_u128(n)));
        let counted = (0..100).filter(|_| failures.is_first(attempt(1))).count();
        assert_eq!(counted, 1);
        assert!(failures.is_first(attempt(2)), "resent by the event itself, it is another attempt");
        (3..10_000).for_each(|n| assert!(failures.is_first(attempt(n))));
        assert!(failures.0.len() <= CountedFailures::CAPACITY);
    }

    #[tokio::test]
    async fn event_waits_while_the_processor_is_unreachable_and_an_unreadable_one_fails() {
        let bench = Bench::deposited().await;
        bench.set_status(ProcessorPaymentStatus::Paid { charge_id: None });
        bench.processor.fail_next(ProcessorError::Later("gone".to_owned()));
        let event = stored(1, "refund.created", &refund("re_1", 100, INTENT));
        assert!(outcome_of(&bench, &event).await.starts_with("later: "));
        assert_eq!(outcome_of(&bench, &event).await, "applied");
        let unreadable = stored(2, "refund.created", &json!({ "id": "re_2" }));
        assert!(outcome_of(&bench, &unreadable).await.starts_with("failed: "));
        let forgotten = ProcessorEvent { body_enc: None, ..event.clone() };
        assert!(outcome_of(&bench, &forgotten).await.starts_with("failed: "));
        // Under another id it cannot be opened: it may be openable again when the right key is back.
        let moved = ProcessorEvent { id: ProcessorEventId(Uuid::from_u128(3)), ..event };
        assert!(outcome_of(&bench, &moved).await.starts_with("later: "));
    }
}
