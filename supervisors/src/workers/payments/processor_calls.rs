//! Makes the calls to the payment processor that payments owe. Each call looks first whether it was made before, and its answer lost.
//!
//! Calls are not stored here. One that fails is resent by its payment with a growing backoff (`domain::retry`), so that a
//! processor that is down or slow costs little, and delays only what waits for it.

use super::payment_updater::{self, PaymentUpdater, UpdateError, UpdateOutcome};
use crate::workers::event_delivery::{Disposition, EventDelivery, ReactionContext};
use chrono::{DateTime, TimeDelta, Utc};
use domain::PaymentId;
use domain::payment::{Fact, NEVER_MADE, OPEN_FOR, PaymentFailure, ProcessorCall, Reply};
use edge::payment_processor::{ProcessorError, ProcessorPaymentStatus, ProcessorRefundRecord, RefundRequest};
use persistence::{Leases, StoreError};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Calls in flight at once in this process: far fewer than the events without calls that are processed at once.
const MAX_CONCURRENT: usize = 64;
/// How long a call waits for a permit.
const PERMIT_TIMEOUT: Duration = Duration::from_millis(500);
/// The timeout of a call, all its requests together.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// The lease under which a refund is requested by one worker at a time: longer than a request can be in flight. The processor may ignore
/// the `Idempotency-Key`, and limit no refund.
const REFUND_LEASE: Duration = Duration::from_secs(30);

/// The assumed difference between the processor's clock and ours.
const CLOCK_SKEW: TimeDelta = TimeDelta::minutes(10);

/// Makes processor calls.
#[derive(Clone)]
pub struct ProcessorCalls {
    updater: PaymentUpdater,
    leases: Leases,
    permits: Arc<Semaphore>,
}

/// Why a call failed.
#[derive(Debug, Error)]
enum ProcessorCallError {
    /// The payment resends the call.
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    #[error("another member holds the lease of this refund")]
    HeldByAnother,
    /// The call succeeded, and its payment has to be updated.
    #[error(transparent)]
    Update(#[from] UpdateError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ProcessorCalls {
    #[must_use]
    pub fn new(updater: PaymentUpdater, leases: Leases) -> Self {
        Self { updater, leases, permits: Arc::new(Semaphore::new(MAX_CONCURRENT)) }
    }

    pub(in crate::workers) async fn run(
        &self,
        by: &ReactionContext,
        delivery: &EventDelivery,
        call: &ProcessorCall,
    ) -> Disposition {
        let updater = self.updater.for_cause(delivery.id.0, delivery.origin.clone());
        let Ok(Ok(_permit)) = timeout(PERMIT_TIMEOUT, self.permits.acquire()).await else {
            tracing::warn!("the payment processor has as many requests in flight as are allowed");
            return by.settle(delivery).await;
        };
        match timeout(CALL_TIMEOUT, self.execute(&updater, call)).await {
            Ok(Ok(UpdateOutcome::Done { .. })) => {}
            Ok(Ok(UpdateOutcome::NotOurs)) => tracing::warn!("a processor call names an unknown payment"),
            Ok(Ok(UpdateOutcome::Rejected(why))) => {
                tracing::warn!(why, "the payment processor's report contradicts the payment");
            }
            Ok(Err(ProcessorCallError::Update(UpdateError::Payment { why, .. }))) => return Disposition::Later { why },
            Ok(Err(ProcessorCallError::HeldByAnother)) => {
                tracing::info!("another member holds the lease of this refund");
            }
            Ok(Err(error)) => {
                tracing::warn!(error = %error, call = call.name(), "a call to the payment processor failed");
            }
            Err(_) => tracing::warn!(call = call.name(), "a call to the payment processor timed out"),
        }
        by.settle(delivery).await
    }

    async fn execute(
        &self,
        updater: &PaymentUpdater,
        call: &ProcessorCall,
    ) -> Result<UpdateOutcome, ProcessorCallError> {
        match call {
            ProcessorCall::Open { payment_id } => open(updater, *payment_id).await,
            ProcessorCall::Check { payment_id, processor_id, is_over } => {
                check(updater, *payment_id, processor_id, *is_over).await
            }
            ProcessorCall::Refund { payment_id, refund_id, processor_id, amount_minor, .. } => {
                let wanted = RefundRequest {
                    refund_id: *refund_id,
                    processor_id: processor_id.clone(),
                    amount_minor: *amount_minor,
                };
                self.refund_under_lease(updater, *payment_id, &wanted).await
            }
        }
    }

    async fn refund_under_lease(
        &self,
        updater: &PaymentUpdater,
        payment_id: PaymentId,
        wanted: &RefundRequest,
    ) -> Result<UpdateOutcome, ProcessorCallError> {
        let name = format!("refund/{}", wanted.refund_id);
        let Some(lease) = self.leases.acquire(&name, REFUND_LEASE).await? else {
            return Err(ProcessorCallError::HeldByAnother);
        };
        let done = refund(updater, payment_id, wanted).await;
        // A request that may be in flight keeps the lease until it cannot be any more; so does a holder that dies or takes too long.
        if !matches!(done, Err(ProcessorCallError::Processor(ProcessorError::Unknown(_)))) {
            self.leases.release(lease).await?;
        }
        done
    }
}

/// Looks for a payment that was not reported as opened: it may have been, and the answer lost.
async fn open(updater: &PaymentUpdater, payment_id: PaymentId) -> Result<UpdateOutcome, ProcessorCallError> {
    let Some(found) = updater.processor.find_payment(payment_id, created_before(payment_id)).await? else {
        // The payment knows whether a request may still open it.
        let why = "it was not opened at the payment processor".to_owned();
        return Ok(outcome_of(updater.ask(payment_id, "open", Fact::NotOpened { why }).await?));
    };
    let processor_id = found.processor_id;
    let opened = Fact::Opened { processor_id: processor_id.clone() };
    let opens_another = match updater.ask(payment_id, &processor_id, opened).await? {
        Ok(answer) => matches!(&answer.reply, Some(Reply::Payment { payment })
            if payment.is_to_be_paid() && payment.processor_id.as_ref() != Some(&processor_id)),
        Err(domain::payment::Rejection::Over { .. }) => true,
        Err(rejection) => return Ok(outcome_of(Err(rejection))),
    };
    // A second payment that must not be paid is canceled, or reports that it was paid.
    check(updater, payment_id, &processor_id, opens_another).await
}

/// The earliest time at which the processor may have the payment. The id contains its creation time.
fn created_before(payment_id: PaymentId) -> DateTime<Utc> {
    let made = payment_id.0.get_timestamp().map(|at| at.to_unix());
    let made = made.and_then(|(seconds, nanos)| DateTime::from_timestamp(i64::try_from(seconds).ok()?, nanos));
    made.unwrap_or_else(|| Utc::now() - OPEN_FOR) - CLOCK_SKEW
}

async fn check(
    updater: &PaymentUpdater,
    payment_id: PaymentId,
    processor_id: &str,
    is_over: bool,
) -> Result<UpdateOutcome, ProcessorCallError> {
    let record = match is_over {
        true => updater.processor.cancel(processor_id).await?,
        false => updater.processor.payment(processor_id).await?,
    };
    let Some(mut record) = record else {
        tracing::warn!(
            processor.id = processor_id,
            "the payment processor does not know a payment that was opened there"
        );
        if !is_over {
            return Ok(UpdateOutcome::Done { is_new: false });
        }
        let why = "the payment processor does not know it".to_owned();
        let gone = Fact::NotPaid { processor_id: processor_id.to_owned(), outcome: PaymentFailure::Expired, why };
        return Ok(outcome_of(updater.ask(payment_id, processor_id, gone).await?));
    };
    if is_over && record.status == ProcessorPaymentStatus::Canceled {
        record.status = ProcessorPaymentStatus::Expired;
    }
    // It was opened for this payment, whatever its metadata says by now.
    record.payment_id = Some(payment_id);
    Ok(payment_updater::payment(updater, record).await?)
}

async fn refund(
    updater: &PaymentUpdater,
    payment_id: PaymentId,
    wanted: &RefundRequest,
) -> Result<UpdateOutcome, ProcessorCallError> {
    let mut last = None;
    for found in existing_refunds(updater, wanted).await? {
        last = Some(payment_updater::refund_of(updater, payment_id, wanted.processor_id.clone(), found).await?);
    }
    if let Some(outcome) = last {
        return Ok(outcome);
    }
    let record = match updater.processor.refund(wanted).await {
        Ok(record) => record,
        Err(ProcessorError::Refused { code, why }) => {
            tracing::warn!(code, why, refund.id = %wanted.refund_id, "the payment processor refused a refund");
            return Ok(outcome_of(updater.ask(payment_id, NEVER_MADE, failed_refund(wanted)).await?));
        }
        Err(error) => return Err(error.into()),
    };
    Ok(payment_updater::refund_of(updater, payment_id, wanted.processor_id.clone(), record).await?)
}

/// The refunds at the processor under this refund's id.
async fn existing_refunds(
    updater: &PaymentUpdater,
    wanted: &RefundRequest,
) -> Result<Vec<ProcessorRefundRecord>, ProcessorError> {
    let is_it = |refund: &ProcessorRefundRecord| refund.refund_id == Some(wanted.refund_id);
    match updater.processor.refunds_of(&wanted.processor_id).await {
        Ok(refunds) => Ok(refunds.into_iter().filter(is_it).collect()),
        // The processor has no refunds of a payment that it does not know, and makes none.
        Err(ProcessorError::Refused { why, .. }) => match updater.processor.payment(&wanted.processor_id).await? {
            None => Ok(Vec::new()),
            Some(_) => Err(ProcessorError::Later(format!("refunds cannot be looked for: {why}"))),
        },
        Err(error) => Err(error),
    }
}

fn failed_refund(wanted: &RefundRequest) -> Fact {
    let RefundRequest { refund_id, amount_minor, .. } = *wanted;
    let (processor_refund_id, status) = (NEVER_MADE.to_owned(), domain::payment::RefundStatus::Failed);
    Fact::RefundAt { refund_id, processor_refund_id, status, amount_minor }
}

fn outcome_of(answer: Result<payment_updater::PaymentReply, domain::payment::Rejection>) -> UpdateOutcome {
    match answer {
        Ok(answer) => UpdateOutcome::Done { is_new: answer.is_new },
        Err(domain::payment::Rejection::NotFound) => UpdateOutcome::NotOurs,
        Err(rejection) => UpdateOutcome::Rejected(rejection.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Bench, INTENT, PAYMENT, REFUND};
    use super::*;
    use domain::payment::{Phase, RefundDebit};

    const NEWS: UpdateOutcome = UpdateOutcome::Done { is_new: true };
    const KNOWN: UpdateOutcome = UpdateOutcome::Done { is_new: false };

    fn wanted(amount_minor: i64) -> RefundRequest {
        RefundRequest { refund_id: REFUND, processor_id: INTENT.to_owned(), amount_minor }
    }

    #[tokio::test]
    async fn opened_payment_whose_answer_was_lost_is_found() {
        let bench = Bench::created().await;
        assert_eq!(open(&bench.updater(1), PAYMENT).await.unwrap(), KNOWN, "a request may still open it");
        assert!(matches!(bench.payment().await.phase, Phase::Created { .. }));
        bench.set_status(ProcessorPaymentStatus::Open);
        open(&bench.updater(2), PAYMENT).await.unwrap();
        let payment = bench.payment().await;
        assert!(matches!(payment.phase, Phase::Open { .. }));
        assert_eq!(payment.processor_id.as_deref(), Some(INTENT));
    }

    #[tokio::test]
    async fn payment_that_was_paid_before_it_was_known_as_open_becomes_paid() {
        let bench = Bench::created().await;
        bench.set_status(ProcessorPaymentStatus::Paid { charge_id: None });
        assert_eq!(open(&bench.updater(1), PAYMENT).await.unwrap(), NEWS);
        assert!(bench.payment().await.paid_at().is_some());
    }

    #[tokio::test]
    async fn check_applies_missed_updates_and_cancels_an_ended_payment() {
        let bench = Bench::open().await;
        assert_eq!(check(&bench.updater(1), PAYMENT, INTENT, false).await.unwrap(), KNOWN);
        assert!(bench.processor.objects().requests.is_empty());
        assert_eq!(check(&bench.updater(2), PAYMENT, INTENT, true).await.unwrap(), NEWS);
        assert_eq!(bench.processor.objects().requests, ["cancel pi_1"]);
        assert!(matches!(bench.payment().await.phase, Phase::Expired { .. }));

        let bench = Bench::open().await;
        bench.set_status(ProcessorPaymentStatus::Paid { charge_id: None });
        assert_eq!(check(&bench.updater(1), PAYMENT, INTENT, true).await.unwrap(), NEWS, "paid at the last moment");
        assert!(bench.payment().await.paid_at().is_some());
    }

    #[tokio::test]
    async fn refund_whose_answer_was_lost_is_found_and_not_requested_again() {
        let bench = Bench::refunding(400).await;
        bench.processor.lose_next_answer();
        let lost = refund(&bench.updater(1), PAYMENT, &wanted(400)).await;
        assert!(matches!(lost, Err(ProcessorCallError::Processor(ProcessorError::Unknown(_)))), "{lost:?}");
        assert_eq!(refund(&bench.updater(2), PAYMENT, &wanted(400)).await.unwrap(), NEWS);
        assert_eq!(refund(&bench.updater(3), PAYMENT, &wanted(400)).await.unwrap(), KNOWN);
        assert_eq!(bench.processor.objects().requests, ["refund 400 of pi_1"]);
        assert_eq!(bench.payment().await.left_minor(), 600);
        assert!(bench.payment().await.is_settled());
    }

    #[tokio::test]
    async fn refused_refund_fails_and_an_unavailable_processor_does_not_fail_it() {
        let bench = Bench::refunding(400).await;
        bench.processor.fail_next(ProcessorError::Later("busy".to_owned()));
        assert!(refund(&bench.updater(1), PAYMENT, &wanted(400)).await.is_err());
        assert!(!bench.payment().await.is_settled());
        bench.processor.objects().refuses_refunds = true;
        assert_eq!(refund(&bench.updater(2), PAYMENT, &wanted(400)).await.unwrap(), NEWS);
        let payment = bench.payment().await;
        assert!(matches!(payment.refunds[&REFUND].taking, RefundDebit::Taken { amount_minor: 400 }));
        assert!(
            matches!(&payment.refunds[&REFUND].at_processor, Some(at)
            if at.status == domain::payment::RefundStatus::Failed),
            "the account is to have it again"
        );
    }

    #[test]
    fn payment_search_starts_before_its_creation() {
        let made = PaymentId(uuid::Uuid::now_v7());
        let since = created_before(made);
        assert!((Utc::now() - since - CLOCK_SKEW).num_seconds().abs() < 60);
        assert!(created_before(PAYMENT) < Utc::now());
    }

    #[test]
    fn processor_call_times_out_before_its_lease_expires() {
        // Its last request is answered or lost by then.
        assert!(CALL_TIMEOUT + Duration::from_secs(10) <= REFUND_LEASE);
    }
}
