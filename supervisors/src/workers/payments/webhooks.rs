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
use domain::{EntityRef, Kind, ProcessorEventId};
use edge::processor::stripe::event::{News, StripeEvent};
use edge::processor::{ProcessorError, RefundStanding};
use edge::webhook::{COUNTERS, body_of};
use persistence::envelope::KeyRing;
use secrecy::ExposeSecret as _;
use std::sync::Arc;
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
        Self { teller, ring, places: Arc::new(Semaphore::new(AT_ONCE)) }
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
                COUNTERS.processing_failed();
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
