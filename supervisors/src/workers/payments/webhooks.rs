//! What the payment processor said is read and told to the payment that it concerns, after it was stored and answered.
//!
//! Nothing is held here: it can stop anywhere, and the event is worked on again; what was told before does nothing twice. Where somebody
//! cannot be asked, the event waits for as long as that lasts; where what it says cannot be, it is tried for some hours more, in case it was
//! only early, and then waits for an operator.

use super::told::{self, Teller, Told, Untold};
use crate::workers::reactor::{Effect, Heard, Reactor};
use actors::{AskError, CommandKey};
use domain::machine::Command as _;
use domain::processor_event::{Command, Outcome, ProcessorEvent};
use domain::{EntityRef, EventId, Kind, ProcessorEventId};
use edge::processor::stripe::event::{News, StripeEvent};
use edge::processor::{ProcessorError, RefundStanding};
use edge::webhook::{COUNTERS, body_of};
use persistence::envelope::KeyRing;
use secrecy::ExposeSecret as _;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Events of which something is asked of the processor, under way at once in this process: the places of events that wait for nothing
/// outside are many more.
const AT_ONCE: usize = 32;
/// How long one waits for one of them.
const WAITS: Duration = Duration::from_millis(500);
/// How long asking may take, all its requests together.
const WITHIN: Duration = Duration::from_secs(20);

/// Works on what the processor said.
#[derive(Clone)]
pub struct Webhooks {
    teller: Teller,
    ring: Arc<KeyRing>,
    places: Arc<Semaphore>,
    vain: Arc<Mutex<Vain>>,
}

/// What was worked on in vain and is counted. While it waits the bus brings it again, several times a second.
#[derive(Default)]
struct Vain(BTreeSet<EventId>);

impl Vain {
    /// So many are told apart; beyond that one may be counted twice.
    const REMEMBERED: usize = 4096;

    /// True the first time.
    fn is_news(&mut self, attempt: EventId) -> bool {
        if self.0.len() >= Self::REMEMBERED {
            self.0.clear();
        }
        self.0.insert(attempt)
    }
}

/// Why an event could not be carried out.
enum Hindered {
    /// Somebody cannot be asked at the moment.
    Later(String),
    /// What it says cannot be.
    Failed(String),
}

impl Webhooks {
    #[must_use]
    pub fn new(teller: Teller, ring: Arc<KeyRing>) -> Self {
        Self { teller, ring, places: Arc::new(Semaphore::new(AT_ONCE)), vain: Arc::default() }
    }

    /// What follows from an event of the processor's.
    pub(in crate::workers) async fn heed(&self, by: &Reactor, heard: &Heard, id: ProcessorEventId) -> Effect {
        let event = match read(by, id).await {
            Ok(event) => event,
            Err(why) => return Effect::Later { why },
        };
        if !event.is_open() {
            return by.settle(heard).await;
        }
        let command = match self.tell(heard, &event).await {
            Ok(outcome) => Command::Processed { outcome },
            Err(Hindered::Failed(why)) => Command::Failed { why },
            Err(Hindered::Later(why)) => {
                if self.vain.lock().unwrap_or_else(PoisonError::into_inner).is_news(heard.id) {
                    COUNTERS.processing_failed();
                }
                return Effect::Later { why };
            }
        };
        conclude(by, heard, &event, command).await
    }

    /// Tells whoever it concerns.
    async fn tell(&self, heard: &Heard, event: &ProcessorEvent) -> Result<Outcome, Hindered> {
        let body = body_of(&self.ring, event).ok_or_else(|| Hindered::Failed("its body was forgotten".to_owned()))?;
        let body = body.map_err(|error| Hindered::Later(format!("its body cannot be opened: {error}")))?;
        let sent = StripeEvent::read(body.expose_secret());
        let news = sent.and_then(StripeEvent::news).map_err(|error| Hindered::Failed(error.to_string()))?;
        let teller = self.teller.for_cause(event.id.0, heard.correlation_id.clone());
        let teller = teller.traced(heard.traceparent.clone(), heard.tracestate.clone());
        let told = match news {
            News::Payment(standing) => told::payment(&teller, standing).await?,
            News::Dispute(dispute) => {
                self.outside(async { told::dispute(&teller, dispute).await.map_err(Hindered::from) }).await?
            }
            News::Refunds(refunds) => self.outside(tell_all(&teller, refunds)).await?,
            News::RefundsOf(of) => {
                let refunds = async {
                    let refunds = teller.processor.refunds_of(&of).await.map_err(Hindered::from)?;
                    tell_all(&teller, refunds).await
                };
                self.outside(refunds).await?
            }
            News::Nothing => return Ok(Outcome::NothingToDo),
        };
        match told {
            Told::Done { .. } => Ok(Outcome::Told),
            Told::NotOurs => Ok(Outcome::NotOurs),
            Told::Rejected(why) => Err(Hindered::Failed(why)),
        }
    }

    /// What asks the processor, at its own pace.
    async fn outside(&self, asking: impl Future<Output = Result<Told, Hindered>>) -> Result<Told, Hindered> {
        let busy = || Hindered::Later("the payment processor is asked by many others at the moment".to_owned());
        let place = timeout(WAITS, self.places.acquire()).await.map_err(|_| busy())?;
        let _place = place.map_err(|_| busy())?;
        let slow = |_| Hindered::Later("the payment processor does not answer in time".to_owned());
        timeout(WITHIN, asking).await.map_err(slow)?
    }
}

/// One that is refused does not keep the others from being told.
async fn tell_all(teller: &Teller, refunds: Vec<RefundStanding>) -> Result<Told, Hindered> {
    let mut all = Told::NotOurs;
    for refund in refunds {
        let told = told::refund(teller, refund).await?;
        all = match (all, told) {
            (Told::Rejected(why), _) | (_, Told::Rejected(why)) => Told::Rejected(why),
            (Told::Done { is_news: one }, Told::Done { is_news: other }) => Told::Done { is_news: one || other },
            (Told::NotOurs, told) | (told, Told::NotOurs) => told,
        };
    }
    Ok(all)
}

/// Keeps what became of it, in the commit that takes the outbox row with it; counted by whoever wrote it.
async fn conclude(by: &Reactor, heard: &Heard, event: &ProcessorEvent, command: Command) -> Effect {
    let asked = by.asked(heard).once(CommandKey::of_event(heard.id, command.name()));
    match by.directory.ask::<ProcessorEvent>(&by.permit, event.id.0, command.clone(), asked).await {
        Ok(answered) if answered.written => {
            count(event, &command);
            Effect::Settled
        }
        Ok(_) | Err(AskError::AlreadyDone) => by.settle(heard).await,
        Err(error) => Effect::Later { why: error.to_string() },
    }
}

fn count(event: &ProcessorEvent, command: &Command) {
    let (event_id, event_type) = (&event.event_id, &event.event_type);
    match command {
        Command::Failed { why } => {
            COUNTERS.processing_failed();
            tracing::warn!(event_id, event_type, why, "what the payment processor said could not be carried out");
        }
        Command::Processed { outcome } => {
            COUNTERS.processed();
            if *outcome == Outcome::NotOurs {
                COUNTERS.not_ours();
            }
            tracing::debug!(
                event_id,
                event_type,
                outcome = outcome.name(),
                "what the payment processor said was heeded"
            );
        }
        Command::Receive { .. }
        | Command::Retry { .. }
        | Command::Dismiss { .. }
        | Command::Reseal { .. }
        | Command::Tick => {}
    }
}

async fn read(by: &Reactor, id: ProcessorEventId) -> Result<Arc<ProcessorEvent>, String> {
    if let Some((event, _)) = by.directory.host().remembered::<ProcessorEvent>(id.0) {
        return Ok(event);
    }
    let entity = EntityRef { kind: Kind::ProcessorEvent, id: id.0 };
    let snapshot = by.reads.snapshot(entity).await.map_err(|error| error.to_string())?;
    let snapshot = snapshot.ok_or_else(|| "the event is not there".to_owned())?;
    serde_json::from_str(&snapshot.body).map(Arc::new).map_err(|error| format!("the event cannot be read: {error}"))
}

impl From<Untold> for Hindered {
    fn from(error: Untold) -> Self {
        Self::Later(error.to_string())
    }
}

impl From<ProcessorError> for Hindered {
    fn from(error: ProcessorError) -> Self {
        match error {
            ProcessorError::Refused { .. } => Self::Failed(error.to_string()),
            ProcessorError::Later(_) | ProcessorError::Unknown(_) => Self::Later(error.to_string()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::testing::{Bench, INTENT, PAYMENT, eur};
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use chrono::Utc;
    use domain::Event;
    use domain::again::Again;
    use domain::processor_event::Phase;
    use edge::processor::{RefundStatus, Status};
    use edge::webhook::kept;
    use serde_json::{Value, json};
    use uuid::Uuid;

    fn ring() -> Arc<KeyRing> {
        Arc::new(KeyRing::parse(&format!("key a {}\nactive a\n", STANDARD.encode([7; 32]))).unwrap())
    }

    /// As it is stored, under an id of its own.
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
            body_enc: Some(kept(&ring(), id, body.as_bytes()).unwrap()),
            attempts: 0,
            last_error: None,
            phase: Phase::Received { again: Again::first(Utc::now()) },
        }
    }

    /// What it came to: an outcome, or why not, with whether it waits or has failed.
    async fn told(bench: &Bench, event: &ProcessorEvent) -> String {
        let heard = Heard {
            id: EventId(Uuid::nil()),
            event: Event::ProcessorEventDue { processor_event_id: event.id },
            correlation_id: "test".to_owned(),
            traceparent: None,
            tracestate: None,
        };
        match Webhooks::new(bench.teller(1), ring()).tell(&heard, event).await {
            Ok(outcome) => outcome.name().to_owned(),
            Err(Hindered::Later(why)) => format!("later: {why}"),
            Err(Hindered::Failed(why)) => format!("failed: {why}"),
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
    async fn what_was_paid_is_told_once_and_what_contradicts_it_fails() {
        let bench = Bench::open().await;
        let failed = told(&bench, &stored(1, "payment_intent.succeeded", &intent(999))).await;
        assert!(failed.starts_with("failed: ") && failed.contains("999"), "{failed}");
        assert_eq!(bench.payment().await.paid_at(), None);
        let paid = stored(2, "payment_intent.succeeded", &intent(1000));
        for _ in 0..2 {
            assert_eq!(told(&bench, &paid).await, "told");
        }
        assert!(bench.payment().await.paid_at().is_some());
        let theirs = json!({ "id": "pi_9", "amount": 1, "currency": "eur", "status": "succeeded" });
        assert_eq!(told(&bench, &stored(3, "payment_intent.succeeded", &theirs)).await, "not_ours");
        assert_eq!(told(&bench, &stored(4, "customer.created", &json!({}))).await, "nothing_to_do");
    }

    #[tokio::test]
    async fn of_several_refunds_each_is_told_and_one_that_is_refused_is_said() {
        let bench = Bench::deposited().await;
        let list =
            |data: Vec<Value>| json!({ "payment_intent": INTENT, "refunds": { "data": data, "has_more": false } });
        let refunds = list(vec![refund("re_1", 0, INTENT), refund("re_2", 300, INTENT), refund("re_3", 1, "pi_9")]);
        let failed = told(&bench, &stored(1, "charge.refunded", &refunds)).await;
        assert!(failed.starts_with("failed: "), "{failed}");
        assert_eq!(bench.payment().await.reversals.keys().collect::<Vec<_>>(), ["re_2"]);
        // The charge alone: what was given back of it is looked up.
        bench.processor.refunds.lock().unwrap().push(RefundStanding {
            processor_refund_id: "re_4".to_owned(),
            refund_id: None,
            of: Some(INTENT.to_owned()),
            amount_minor: 200,
            currency: eur(),
            status: RefundStatus::Succeeded,
        });
        let charge = json!({ "id": "ch_1", "payment_intent": INTENT });
        assert_eq!(told(&bench, &stored(2, "charge.refunded", &charge)).await, "told");
        assert_eq!(bench.payment().await.left_minor(), 500);
    }

    #[test]
    fn an_attempt_that_the_bus_brings_again_and_again_is_counted_once() {
        let (mut vain, attempt) = (Vain::default(), |n| EventId(Uuid::from_u128(n)));
        let counted = (0..100).filter(|_| vain.is_news(attempt(1))).count();
        assert_eq!(counted, 1);
        assert!(vain.is_news(attempt(2)), "said again by the event itself, it is another attempt");
        (3..10_000).for_each(|n| assert!(vain.is_news(attempt(n))));
        assert!(vain.0.len() <= Vain::REMEMBERED);
    }

    #[tokio::test]
    async fn while_the_processor_cannot_be_asked_it_waits_and_what_cannot_be_read_fails() {
        let bench = Bench::deposited().await;
        bench.processor.knows(Status::Paid { charge_id: None });
        bench.processor.fails(ProcessorError::Later("gone".to_owned()));
        let event = stored(1, "refund.created", &refund("re_1", 100, INTENT));
        assert!(told(&bench, &event).await.starts_with("later: "));
        assert_eq!(told(&bench, &event).await, "told");
        let unreadable = stored(2, "refund.created", &json!({ "id": "re_2" }));
        assert!(told(&bench, &unreadable).await.starts_with("failed: "));
        let forgotten = ProcessorEvent { body_enc: None, ..event.clone() };
        assert!(told(&bench, &forgotten).await.starts_with("failed: "));
        // Under another id it is nobody's: it may open again when the right key is back.
        let moved = ProcessorEvent { id: ProcessorEventId(Uuid::from_u128(3)), ..event };
        assert!(told(&bench, &moved).await.starts_with("later: "));
    }
}
