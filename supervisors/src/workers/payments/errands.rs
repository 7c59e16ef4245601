//! Does at the processor what a payment wants done there. Whoever does it looks first: it may have been done, and the answer lost.
//!
//! No errand is kept here. One that comes to nothing is said again by its payment, ever more seldom (`domain::again`), so that a
//! processor that is down or slow costs little, and holds up nothing but what waits for it.

use super::told::{self, Teller, Told, Untold};
use crate::workers::reactor::{Effect, Heard, Reactor};
use chrono::{DateTime, TimeDelta, Utc};
use domain::PaymentId;
use domain::payment::{Command, Errand, OPEN_FOR, Outcome, Reply};
use edge::processor::{ProcessorError, RefundRequest, RefundStanding, Status};
use persistence::{Leases, StoreError};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Errands that are under way at once in this process: the places of events that wait for nothing outside are many more.
const AT_ONCE: usize = 64;
/// How long an errand waits for one of them.
const WAITS: Duration = Duration::from_millis(500);
/// How long it may take, all its requests together.
const WITHIN: Duration = Duration::from_secs(20);

/// How long nobody else asks for a refund that was asked for: longer than what was asked can be on its way. The processor may heed no
/// `Idempotency-Key`, and cap no refund.
const LEASE: Duration = Duration::from_secs(30);

/// Between the processor's clock and ours.
const SKEW: TimeDelta = TimeDelta::minutes(10);

/// What stands for the processor's id of a refund that it refused to make.
const NEVER_MADE: &str = "never_made";

/// Runs errands.
#[derive(Clone)]
pub struct Errands {
    teller: Teller,
    leases: Leases,
    places: Arc<Semaphore>,
}

/// Why an errand came to nothing.
#[derive(Debug, Error)]
enum Undone {
    /// Its payment says it again.
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    #[error("another member holds the lease of this refund")]
    HeldByAnother,
    /// It was done, and is to be told.
    #[error(transparent)]
    Untold(#[from] Untold),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Errands {
    #[must_use]
    pub fn new(teller: Teller, leases: Leases) -> Self {
        Self { teller, leases, places: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    pub(in crate::workers) async fn run(&self, by: &Reactor, heard: &Heard, errand: &Errand) -> Effect {
        let teller = self
            .teller
            .for_cause(heard.id.0, heard.correlation_id.clone())
            .traced(heard.traceparent.clone(), heard.tracestate.clone());
        let Ok(Ok(_place)) = timeout(WAITS, self.places.acquire()).await else {
            tracing::warn!("the payment processor is asked as much as it may be at once");
            return by.settle(heard).await;
        };
        match timeout(WITHIN, self.on(&teller, errand)).await {
            Ok(Ok(Told::Done { .. })) => {}
            Ok(Ok(Told::NotOurs)) => tracing::warn!("the payment of an errand is not there"),
            Ok(Ok(Told::Rejected(why))) => {
                tracing::warn!(why, "the payment processor's word contradicts the payment");
            }
            Ok(Err(Undone::Untold(Untold::Payment { why, .. }))) => return Effect::Later { why },
            Ok(Err(Undone::HeldByAnother)) => tracing::info!("another member holds the lease of this refund"),
            Ok(Err(error)) => {
                tracing::warn!(error = %error, errand = errand.name(), "an errand to the payment processor came to nothing");
            }
            Err(_) => tracing::warn!(errand = errand.name(), "an errand to the payment processor took too long"),
        }
        by.settle(heard).await
    }

    async fn on(&self, teller: &Teller, errand: &Errand) -> Result<Told, Undone> {
        match errand {
            Errand::Open { payment_id } => open(teller, *payment_id).await,
            Errand::Check { payment_id, processor_id, is_over } => {
                check(teller, *payment_id, processor_id, *is_over).await
            }
            Errand::Refund { payment_id, refund_id, processor_id, amount_minor, .. } => {
                let wanted = RefundRequest {
                    refund_id: *refund_id,
                    processor_id: processor_id.clone(),
                    amount_minor: *amount_minor,
                };
                self.refund_under_lease(teller, *payment_id, &wanted).await
            }
        }
    }

    async fn refund_under_lease(
        &self,
        teller: &Teller,
        payment_id: PaymentId,
        wanted: &RefundRequest,
    ) -> Result<Told, Undone> {
        let name = format!("refund/{}", wanted.refund_id);
        let Some(lease) = self.leases.acquire(&name, LEASE).await? else {
            return Err(Undone::HeldByAnother);
        };
        let done = refund(teller, payment_id, wanted).await;
        // What may still be on its way keeps the lease until it cannot be any more; so does a holder that dies or takes too long.
        if !matches!(done, Err(Undone::Processor(ProcessorError::Unknown(_)))) {
            self.leases.release(lease).await?;
        }
        done
    }
}

/// Nobody said that it was opened: it may have been, and the answer lost.
async fn open(teller: &Teller, payment_id: PaymentId) -> Result<Told, Undone> {
    let Some(found) = teller.processor.find_payment(payment_id, created_before(payment_id)).await? else {
        // The payment knows whether somebody may still come to open it.
        let why = "nobody opened it at the payment processor".to_owned();
        return Ok(settled(teller.ask(payment_id, "open", Command::Lapse { why }).await?));
    };
    let processor_id = found.processor_id;
    let opened = Command::Opened { processor_id: processor_id.clone() };
    let opens_another = match teller.ask(payment_id, &processor_id, opened).await? {
        Ok(heard) => matches!(&heard.reply, Some(Reply::Payment { payment })
            if payment.is_to_be_paid() && payment.processor_id.as_ref() != Some(&processor_id)),
        Err(domain::payment::Rejection::Over { .. }) => true,
        Err(rejection) => return Ok(settled(Err(rejection))),
    };
    // One that nobody is to pay is ended, or says that it was paid.
    check(teller, payment_id, &processor_id, opens_another).await
}

/// From when on the processor may have it. The id tells when it was made.
fn created_before(payment_id: PaymentId) -> DateTime<Utc> {
    let made = payment_id.0.get_timestamp().map(|at| at.to_unix());
    let made = made.and_then(|(seconds, nanos)| DateTime::from_timestamp(i64::try_from(seconds).ok()?, nanos));
    made.unwrap_or_else(|| Utc::now() - OPEN_FOR) - SKEW
}

async fn check(teller: &Teller, payment_id: PaymentId, processor_id: &str, is_over: bool) -> Result<Told, Undone> {
    let standing = match is_over {
        true => teller.processor.cancel(processor_id).await?,
        false => teller.processor.payment(processor_id).await?,
    };
    let Some(mut standing) = standing else {
        tracing::warn!(
            processor.id = processor_id,
            "the payment processor does not know a payment that was opened there"
        );
        if !is_over {
            return Ok(Told::Done { is_news: false });
        }
        let why = "the payment processor does not know it".to_owned();
        let gone = Command::NotPaid { processor_id: processor_id.to_owned(), outcome: Outcome::Expired, why };
        return Ok(settled(teller.ask(payment_id, processor_id, gone).await?));
    };
    if is_over && standing.status == Status::Canceled {
        standing.status = Status::Expired;
    }
    // It was opened for this one, whatever somebody wrote beside it since.
    standing.payment_id = Some(payment_id);
    Ok(told::payment(teller, standing).await?)
}

async fn refund(teller: &Teller, payment_id: PaymentId, wanted: &RefundRequest) -> Result<Told, Undone> {
    let mut last = None;
    for found in made(teller, wanted).await? {
        last = Some(told::refund_of(teller, payment_id, found).await?);
    }
    if let Some(told) = last {
        return Ok(told);
    }
    let standing = match teller.processor.refund(wanted).await {
        Ok(standing) => standing,
        Err(ProcessorError::Refused { code, why }) => {
            tracing::warn!(code, why, refund.id = %wanted.refund_id, "the payment processor refused a refund");
            return Ok(settled(teller.ask(payment_id, NEVER_MADE, never_made(wanted)).await?));
        }
        Err(error) => return Err(error.into()),
    };
    Ok(told::refund_of(teller, payment_id, standing).await?)
}

/// What the processor has of this refund already.
async fn made(teller: &Teller, wanted: &RefundRequest) -> Result<Vec<RefundStanding>, ProcessorError> {
    let is_it = |refund: &RefundStanding| refund.refund_id == Some(wanted.refund_id);
    match teller.processor.refunds_of(&wanted.processor_id).await {
        Ok(refunds) => Ok(refunds.into_iter().filter(is_it).collect()),
        // Of a payment that it does not have it has no refunds either, and makes none.
        Err(ProcessorError::Refused { why, .. }) => match teller.processor.payment(&wanted.processor_id).await? {
            None => Ok(Vec::new()),
            Some(_) => Err(ProcessorError::Later(format!("refunds cannot be looked for: {why}"))),
        },
        Err(error) => Err(error),
    }
}

fn never_made(wanted: &RefundRequest) -> Command {
    let RefundRequest { refund_id, amount_minor, .. } = *wanted;
    let (processor_refund_id, status) = (NEVER_MADE.to_owned(), domain::payment::RefundStatus::Failed);
    Command::RefundAt { refund_id, processor_refund_id, status, amount_minor }
}

fn settled(answer: Result<told::Heard, domain::payment::Rejection>) -> Told {
    match answer {
        Ok(heard) => Told::Done { is_news: heard.is_news },
        Err(domain::payment::Rejection::NotFound) => Told::NotOurs,
        Err(rejection) => Told::Rejected(rejection.to_string()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::testing::{Bench, INTENT, PAYMENT, REFUND};
    use super::*;
    use domain::payment::{Phase, Taking};

    const NEWS: Told = Told::Done { is_news: true };
    const KNOWN: Told = Told::Done { is_news: false };

    fn wanted(amount_minor: i64) -> RefundRequest {
        RefundRequest { refund_id: REFUND, processor_id: INTENT.to_owned(), amount_minor }
    }

    #[tokio::test]
    async fn what_was_opened_and_not_heard_of_is_found() {
        let bench = Bench::created().await;
        assert_eq!(open(&bench.teller(1), PAYMENT).await.unwrap(), KNOWN, "somebody may still come to open it");
        assert!(matches!(bench.payment().await.phase, Phase::Created { .. }));
        bench.processor.knows(Status::Open);
        open(&bench.teller(2), PAYMENT).await.unwrap();
        let payment = bench.payment().await;
        assert!(matches!(payment.phase, Phase::Open { .. }));
        assert_eq!(payment.processor_id.as_deref(), Some(INTENT));
    }

    #[tokio::test]
    async fn what_was_paid_before_anybody_heard_that_it_was_open_is_paid() {
        let bench = Bench::created().await;
        bench.processor.knows(Status::Paid { charge_id: None });
        assert_eq!(open(&bench.teller(1), PAYMENT).await.unwrap(), NEWS);
        assert!(bench.payment().await.paid_at().is_some());
    }

    #[tokio::test]
    async fn a_check_tells_what_was_not_heard_and_ends_what_is_over() {
        let bench = Bench::open().await;
        assert_eq!(check(&bench.teller(1), PAYMENT, INTENT, false).await.unwrap(), KNOWN);
        assert!(bench.processor.asked().is_empty());
        assert_eq!(check(&bench.teller(2), PAYMENT, INTENT, true).await.unwrap(), NEWS);
        assert_eq!(bench.processor.asked(), ["cancel pi_1"]);
        assert!(matches!(bench.payment().await.phase, Phase::Expired { .. }));

        let bench = Bench::open().await;
        bench.processor.knows(Status::Paid { charge_id: None });
        assert_eq!(check(&bench.teller(1), PAYMENT, INTENT, true).await.unwrap(), NEWS, "paid at the last moment");
        assert!(bench.payment().await.paid_at().is_some());
    }

    #[tokio::test]
    async fn a_refund_whose_answer_was_lost_is_found_and_not_asked_for_again() {
        let bench = Bench::refunding(400).await;
        bench.processor.loses_the_answer();
        let lost = refund(&bench.teller(1), PAYMENT, &wanted(400)).await;
        assert!(matches!(lost, Err(Undone::Processor(ProcessorError::Unknown(_)))), "{lost:?}");
        assert_eq!(refund(&bench.teller(2), PAYMENT, &wanted(400)).await.unwrap(), NEWS);
        assert_eq!(refund(&bench.teller(3), PAYMENT, &wanted(400)).await.unwrap(), KNOWN);
        assert_eq!(bench.processor.asked(), ["refund 400 of pi_1"]);
        assert_eq!(bench.payment().await.left_minor(), 600);
        assert!(bench.payment().await.is_settled());
    }

    #[tokio::test]
    async fn a_refund_that_the_processor_refuses_has_failed_and_one_that_it_cannot_make_now_has_not() {
        let bench = Bench::refunding(400).await;
        bench.processor.fails(ProcessorError::Later("busy".to_owned()));
        assert!(refund(&bench.teller(1), PAYMENT, &wanted(400)).await.is_err());
        assert!(!bench.payment().await.is_settled());
        bench.processor.refuses_refunds();
        assert_eq!(refund(&bench.teller(2), PAYMENT, &wanted(400)).await.unwrap(), NEWS);
        let payment = bench.payment().await;
        assert!(matches!(payment.refunds[&REFUND].taking, Taking::Taken { amount_minor: 400 }));
        assert!(
            matches!(&payment.refunds[&REFUND].at_processor, Some(at)
            if at.status == domain::payment::RefundStatus::Failed),
            "the account is to have it again"
        );
    }

    #[test]
    fn a_payment_is_looked_for_from_before_it_was_made() {
        let made = PaymentId(uuid::Uuid::now_v7());
        let since = created_before(made);
        assert!((Utc::now() - since - SKEW).num_seconds().abs() < 5);
        assert!(created_before(PAYMENT) < Utc::now());
    }

    #[test]
    fn an_errand_ends_before_its_turn_does() {
        // What it asked last is answered or lost by then.
        assert!(WITHIN + Duration::from_secs(10) <= LEASE);
    }
}
