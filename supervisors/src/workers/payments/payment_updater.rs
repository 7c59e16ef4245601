//! Turns the processor's state of a payment, a refund or a dispute into a command to our payment, from every source: a webhook, a processor
//! call or a reconciliation. Repetitions are harmless, since the payment records a fact once, under the processor's own id.

use actors::sharding::command_id;
use actors::{AskError, CommandContext, CommandKey, Directory};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::payment::{self, Fact, Payment, PaymentFailure, Rejection, ReversalStep};
use domain::state_machine::RequestOrigin;
use domain::{Action, PaymentId, Permit, Principal};
use edge::payment_processor::{
    Dispute, DisputeStatus, Processor, ProcessorError, ProcessorPayment, ProcessorPaymentStatus, ProcessorRefundRecord,
    ProcessorRefundStatus,
};
use std::sync::Arc;
use thiserror::Error;
use uuid::Uuid;

/// The timeout of a command to a payment.
const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(5);

/// Updates our payments from the processor's objects, once for each cause.
#[derive(Clone)]
pub struct PaymentUpdater {
    pub(super) directory: Directory,
    pub(super) processor: Arc<dyn Processor>,
    permit: Permit,
    /// The id of the source: a command is applied once for each.
    cause: Uuid,
    origin: RequestOrigin,
}

/// The outcome of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpdateOutcome {
    /// Our payment has recorded it; `is_new` where it had not before.
    Done { is_new: bool },
    /// It concerns no payment of this service.
    NotOurs,
    /// It contradicts our payment, and always will: an operator has to look at it.
    Rejected(String),
}

/// Why a payment could not be updated now. It can be retried.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UpdateError {
    #[error("the owner of the payment cannot be looked up: {0}")]
    Processor(#[source] ProcessorError),
    #[error("payment {payment_id} does not answer: {why}")]
    Payment { payment_id: PaymentId, why: String },
}

impl PaymentUpdater {
    /// As the system's `worker`.
    ///
    /// # Errors
    /// Never in practice: a worker may advance the machines.
    pub fn new(directory: Directory, processor: Arc<dyn Processor>, worker: &str) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system(worker), Action::Advance)?;
        let (cause, origin) = (Uuid::now_v7(), RequestOrigin::untraced(""));
        Ok(Self { directory, processor, permit, cause, origin })
    }

    /// For updates from the source `cause`: sent twice, a command is applied once.
    #[must_use]
    pub fn for_cause(&self, cause: Uuid, origin: RequestOrigin) -> Self {
        Self { cause, origin, ..self.clone() }
    }

    /// Sends a fact to a payment of ours; `about` is the processor's id of the object it concerns. A cause that is tried again may report what has
    /// changed since: that is another command.
    pub(super) async fn ask(
        &self,
        payment_id: PaymentId,
        about: &str,
        fact: Fact,
    ) -> Result<Result<PaymentReply, Rejection>, UpdateError> {
        let fact_json =
            serde_json::to_vec(&fact).map_err(|error| UpdateError::Payment { payment_id, why: error.to_string() })?;
        let parts = [b"told", self.cause.as_bytes().as_slice(), about.as_bytes(), fact_json.as_slice()];
        let key =
            CommandKey { id: command_id(&parts), digest: [0; 32], keep_reply: false, resolved: None, consumes: None };
        let context = CommandContext::from_origin(&self.permit, self.origin.clone(), Utc::now() + COMMAND_TIMEOUT)
            .with_key(key)
            .urgent();
        match self.directory.ask::<Payment>(&self.permit, payment_id.0, fact.into(), context).await {
            Ok(answered) => Ok(Ok(PaymentReply { is_new: answered.written, reply: Some(answered.reply) })),
            Err(AskError::AlreadyDone) => Ok(Ok(PaymentReply { is_new: false, reply: None })),
            Err(AskError::Rejected(rejection)) => Ok(Err(rejection)),
            Err(error) => Err(UpdateError::Payment { payment_id, why: error.to_string() }),
        }
    }

    async fn update(&self, payment_id: PaymentId, about: &str, fact: Fact) -> Result<UpdateOutcome, UpdateError> {
        Ok(match self.ask(payment_id, about, fact).await? {
            Ok(answer) => UpdateOutcome::Done { is_new: answer.is_new },
            Err(rejection) => rejected(payment_id, &rejection),
        })
    }

    /// The payment of ours that the object belongs to, if any: the processor stores our id beside its own.
    async fn find_payment(&self, of: Option<&str>) -> Result<PaymentLookup, UpdateError> {
        let Some(of) = of else { return Ok(PaymentLookup::NotOurs) };
        match self.processor.payment(of).await {
            Ok(Some(ProcessorPayment { payment_id: Some(payment_id), processor_id, .. })) => {
                Ok(PaymentLookup::Ours { payment_id, processor_id })
            }
            Ok(Some(_) | None) => Ok(PaymentLookup::NotOurs),
            // A retry would be refused too.
            Err(ProcessorError::Refused { why, .. }) => Ok(PaymentLookup::Refused(why)),
            Err(error) => Err(UpdateError::Processor(error)),
        }
    }
}

/// The outcome of a rejection. The processor named the payment by an id of ours. So where there is none it is not foreign: it was lost
/// here, by restoring a backup for example, and with it the record of that money.
fn rejected(payment_id: PaymentId, why: &Rejection) -> UpdateOutcome {
    match why {
        Rejection::NotFound => UpdateOutcome::Rejected(format!("payment {payment_id}, which it names, is not here")),
        why => UpdateOutcome::Rejected(why.to_string()),
    }
}

/// A payment's reply.
pub(super) struct PaymentReply {
    pub(super) is_new: bool,
    /// None where the command was applied before under the same cause.
    pub(super) reply: Option<payment::Reply>,
}

enum PaymentLookup {
    Ours {
        payment_id: PaymentId,
        /// The processor's id of the money.
        processor_id: String,
    },
    NotOurs,
    Refused(String),
}

/// # Errors
/// Where it has to be retried.
pub async fn payment(updater: &PaymentUpdater, record: ProcessorPayment) -> Result<UpdateOutcome, UpdateError> {
    let Some(payment_id) = record.payment_id else { return Ok(UpdateOutcome::NotOurs) };
    let ProcessorPayment { processor_id, amount_minor, currency, presented, status, .. } = record;
    let about = processor_id.clone();
    let not_paid = |outcome, why| Fact::NotPaid { processor_id: processor_id.clone(), outcome, why };
    let command = match status {
        // The request that opens a payment reports that.
        ProcessorPaymentStatus::Open | ProcessorPaymentStatus::Processing => {
            return Ok(UpdateOutcome::Done { is_new: false });
        }
        ProcessorPaymentStatus::Paid { charge_id } => {
            Fact::Paid { processor_id, amount_minor, currency, charge_id, presented }
        }
        ProcessorPaymentStatus::Declined { why } => not_paid(PaymentFailure::Declined, why),
        ProcessorPaymentStatus::Canceled => not_paid(PaymentFailure::Canceled, "canceled at the processor".to_owned()),
        ProcessorPaymentStatus::Expired => not_paid(PaymentFailure::Expired, "not paid in time".to_owned()),
    };
    match updater.ask(payment_id, &about, command.clone()).await? {
        Ok(answer) => Ok(UpdateOutcome::Done { is_new: answer.is_new }),
        // No money has moved: it is the business of the service that created it.
        Err(Rejection::NotFound) if matches!(command, Fact::NotPaid { .. }) => Ok(UpdateOutcome::NotOurs),
        Err(rejection) => {
            if let (
                Rejection::Differs { .. } | Rejection::Reviewed { .. },
                Fact::Paid { processor_id, amount_minor, currency, .. },
            ) = (&rejection, command)
            {
                let otherwise = Fact::PaidOtherwise { processor_id, amount_minor, currency };
                return paid_otherwise(updater, payment_id, &about, otherwise, &rejection).await;
            }
            Ok(rejected(payment_id, &rejection))
        }
    }
}

/// What was charged is not what was ordered. The processor may have converted the order, which its own order shows; where that is not what
/// was ordered either, the payment is under review, and its event waits for an operator. So it is with money in terms of the order whose
/// review has ended: it is not credited beside what an operator has done about it.
async fn paid_otherwise(
    updater: &PaymentUpdater,
    payment_id: PaymentId,
    about: &str,
    otherwise: Fact,
    rejection: &Rejection,
) -> Result<UpdateOutcome, UpdateError> {
    let order = updater.processor.order(about).await.map_err(UpdateError::Processor)?;
    if let Some(order) = order.filter(|order| order.payment_id == Some(payment_id))
        && let ProcessorPaymentStatus::Paid { charge_id } = order.status
    {
        let ProcessorPayment { processor_id, amount_minor, currency, presented, .. } = order;
        let paid = Fact::Paid { processor_id, amount_minor, currency, charge_id, presented };
        if let Ok(answer) = updater.ask(payment_id, &format!("the order of {about}"), paid).await? {
            return Ok(UpdateOutcome::Done { is_new: answer.is_new });
        }
    }
    match updater.ask(payment_id, about, otherwise).await? {
        Ok(_) => Ok(rejected(payment_id, rejection)),
        Err(rejection) => Ok(rejected(payment_id, &rejection)),
    }
}

/// An operator has dismissed the processor's report of this payment: the review of its money is dismissed.
///
/// # Errors
/// Where it has to be retried.
pub(super) async fn dismissed(updater: &PaymentUpdater, record: ProcessorPayment) -> Result<(), UpdateError> {
    let Some(payment_id) = record.payment_id else { return Ok(()) };
    let about = format!("dismissed {}", record.processor_id);
    updater.ask(payment_id, &about, Fact::EventDismissed { processor_id: record.processor_id }).await.map(drop)
}

/// # Errors
/// Where it has to be retried.
pub async fn refund(updater: &PaymentUpdater, record: ProcessorRefundRecord) -> Result<UpdateOutcome, UpdateError> {
    match updater.find_payment(record.of.as_deref()).await? {
        PaymentLookup::Ours { payment_id, processor_id } => refund_of(updater, payment_id, processor_id, record).await,
        PaymentLookup::NotOurs => Ok(UpdateOutcome::NotOurs),
        PaymentLookup::Refused(why) => Ok(UpdateOutcome::Rejected(why)),
    }
}

/// Records a refund of a payment of ours; `of` is the processor's id of the money.
pub(super) async fn refund_of(
    updater: &PaymentUpdater,
    payment_id: PaymentId,
    of: String,
    record: ProcessorRefundRecord,
) -> Result<UpdateOutcome, UpdateError> {
    let ProcessorRefundRecord { processor_refund_id, refund_id, amount_minor, currency, status, .. } = record;
    let about = processor_refund_id.clone();
    if let Some(refund_id) = refund_id {
        let status = match status {
            ProcessorRefundStatus::Pending => payment::RefundStatus::Pending,
            ProcessorRefundStatus::Succeeded => payment::RefundStatus::Succeeded,
            ProcessorRefundStatus::Failed => payment::RefundStatus::Failed,
        };
        let processor_refund_id = processor_refund_id.clone();
        let command = Fact::RefundAt { refund_id, processor_refund_id, status, amount_minor };
        match updater.ask(payment_id, &about, command).await? {
            Ok(answer) => return Ok(UpdateOutcome::Done { is_new: answer.is_new }),
            // Our id, but no refund that was requested here, or a second one under it: that money has been paid out as well.
            Err(Rejection::RefundUnknown | Rejection::PaidTwice { .. }) => {}
            Err(rejection) => return Ok(rejected(payment_id, &rejection)),
        }
    }
    let what = match status {
        ProcessorRefundStatus::Pending | ProcessorRefundStatus::Succeeded => ReversalStep::Refund,
        ProcessorRefundStatus::Failed => ReversalStep::RefundFailed,
    };
    let reversed = Fact::Reversed { reversal_id: processor_refund_id, what, amount_minor, currency, of: Some(of) };
    updater.update(payment_id, &about, reversed).await
}

/// # Errors
/// Where it has to be retried.
pub async fn dispute(updater: &PaymentUpdater, dispute: Dispute) -> Result<UpdateOutcome, UpdateError> {
    let what = match dispute.status {
        // No money has moved.
        DisputeStatus::Inquiry => return Ok(UpdateOutcome::Done { is_new: false }),
        DisputeStatus::Opened => ReversalStep::DisputeOpened,
        DisputeStatus::Won => ReversalStep::DisputeWon,
    };
    let (payment_id, of) = match updater.find_payment(dispute.of.as_deref()).await? {
        PaymentLookup::Ours { payment_id, processor_id } => (payment_id, processor_id),
        PaymentLookup::NotOurs => return Ok(UpdateOutcome::NotOurs),
        PaymentLookup::Refused(why) => return Ok(UpdateOutcome::Rejected(why)),
    };
    let Dispute { dispute_id, amount_minor, currency, .. } = dispute;
    let about = dispute_id.clone();
    let reversed = Fact::Reversed { reversal_id: dispute_id, what, amount_minor, currency, of: Some(of) };
    updater.update(payment_id, &about, reversed).await
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Bench, INTENT, PAYMENT, REFUND, eur};
    use super::*;
    use domain::RefundId;

    fn paid(amount_minor: i64) -> ProcessorPayment {
        ProcessorPayment {
            processor_id: INTENT.to_owned(),
            payment_id: Some(PAYMENT),
            amount_minor,
            currency: eur(),
            presented: None,
            status: ProcessorPaymentStatus::Paid { charge_id: Some("ch_1".to_owned()) },
        }
    }

    fn refund_record(id: &str, refund_id: Option<RefundId>, status: ProcessorRefundStatus) -> ProcessorRefundRecord {
        ProcessorRefundRecord {
            processor_refund_id: id.to_owned(),
            refund_id,
            of: Some(INTENT.to_owned()),
            amount_minor: 400,
            currency: eur(),
            status,
        }
    }

    fn disputed(status: DisputeStatus) -> Dispute {
        let (dispute_id, of) = ("dp_1".to_owned(), Some("ch_1".to_owned()));
        Dispute { dispute_id, of, amount_minor: 1000, currency: eur(), status }
    }

    const NEWS: Result<UpdateOutcome, UpdateError> = Ok(UpdateOutcome::Done { is_new: true });
    const KNOWN: Result<UpdateOutcome, UpdateError> = Ok(UpdateOutcome::Done { is_new: false });

    #[tokio::test]
    async fn paid_status_is_applied_once_for_every_source_and_repetition() {
        let bench = Bench::open().await;
        assert_eq!(
            payment(&bench.updater(1), ProcessorPayment { status: ProcessorPaymentStatus::Processing, ..paid(1000) })
                .await,
            KNOWN
        );
        assert_eq!(bench.payment().await.paid_at(), None);
        assert_eq!(payment(&bench.updater(1), paid(1000)).await, NEWS);
        assert_eq!(payment(&bench.updater(1), paid(1000)).await, KNOWN, "the same update again");
        assert_eq!(payment(&bench.updater(2), paid(1000)).await, KNOWN, "from another source");
        let payment = bench.payment().await;
        assert!(payment.paid_at().is_some());
        assert_eq!(payment.charge_id.as_deref(), Some("ch_1"));
    }

    #[tokio::test]
    async fn unpaid_payment_records_the_reason() {
        let bench = Bench::open().await;
        let declined = ProcessorPaymentStatus::Declined { why: "card_declined".to_owned() };
        assert_eq!(payment(&bench.updater(1), ProcessorPayment { status: declined, ..paid(1000) }).await, NEWS);
        assert_eq!(bench.payment().await.declined.as_deref(), Some("card_declined"));
        assert_eq!(
            payment(&bench.updater(2), ProcessorPayment { status: ProcessorPaymentStatus::Expired, ..paid(1000) })
                .await,
            NEWS
        );
        assert!(matches!(bench.payment().await.phase, payment::Phase::Expired { .. }));
    }

    #[tokio::test]
    async fn foreign_payment_is_not_ours_and_a_different_amount_is_rejected() {
        let bench = Bench::open().await;
        let outcome = payment(&bench.updater(1), ProcessorPayment { payment_id: None, ..paid(1000) }).await;
        assert_eq!(outcome, Ok(UpdateOutcome::NotOurs));
        assert!(
            matches!(payment(&bench.updater(1), paid(999)).await, Ok(UpdateOutcome::Rejected(why)) if why.contains("9.99 EUR"))
        );
        assert_eq!(bench.payment().await.paid_at(), None);
    }

    #[tokio::test]
    async fn charge_in_another_currency_is_applied_by_its_order_and_else_under_review_until_it_is_dismissed() {
        let gbp = domain::money::Currency::parse("GBP").unwrap();
        let charged = || ProcessorPayment { amount_minor: 840, currency: gbp.clone(), ..paid(1000) };
        let bench = Bench::open().await;
        let presented = payment::Presentment { amount_minor: 840, currency: gbp.clone(), is_charged: true };
        bench.processor.objects().order = Some(ProcessorPayment { presented: Some(presented), ..paid(1000) });
        assert_eq!(payment(&bench.updater(1), charged()).await, NEWS);
        assert_eq!(bench.payment().await.presented.unwrap().amount_minor, 840);
        assert_eq!(payment(&bench.updater(2), charged()).await, KNOWN);

        // The order does not explain it.
        for order in [None, Some(ProcessorPayment { amount_minor: 999, ..paid(1000) })] {
            let bench = Bench::open().await;
            bench.processor.objects().order = order;
            for cause in 1..3 {
                let outcome = payment(&bench.updater(cause), charged()).await;
                assert!(matches!(outcome, Ok(UpdateOutcome::Rejected(why)) if why.contains("GBP")));
                assert!(matches!(bench.payment().await.phase, payment::Phase::UnderReview { amount_minor: 840, .. }));
            }
            dismissed(&bench.updater(3), charged()).await.unwrap();
            assert!(matches!(bench.payment().await.phase, payment::Phase::Canceled { .. }));
            // Reconciliation sees it again and again.
            assert_eq!(payment(&bench.updater(4), charged()).await, KNOWN);
            assert!(matches!(bench.payment().await.phase, payment::Phase::Canceled { .. }));
            // In the terms of the order it is reviewed again, until that is decided, too.
            for cause in 5..7 {
                let outcome = payment(&bench.updater(cause), paid(1000)).await;
                assert!(matches!(outcome, Ok(UpdateOutcome::Rejected(why)) if why.contains(INTENT)));
                assert!(matches!(bench.payment().await.phase, payment::Phase::UnderReview { amount_minor: 1000, .. }));
            }
            dismissed(&bench.updater(7), paid(1000)).await.unwrap();
            assert_eq!(payment(&bench.updater(8), paid(1000)).await, KNOWN);
            assert_eq!(bench.payment().await.paid_at(), None);
            // It goes back, as was decided; that it comes back again waits for an operator.
            bench.set_status(ProcessorPaymentStatus::Paid { charge_id: None });
            assert_eq!(dispute(&bench.updater(9), disputed(DisputeStatus::Opened)).await, KNOWN);
            let won = dispute(&bench.updater(10), disputed(DisputeStatus::Won)).await;
            assert!(matches!(won, Ok(UpdateOutcome::Rejected(why)) if why.contains("dismissed")));
        }
    }

    #[tokio::test]
    async fn refund_of_money_beside_the_payment_is_rejected_for_an_operator() {
        let bench = Bench::deposited().await;
        bench.processor.objects().payments.get_mut(INTENT).unwrap().processor_id = "pi_2".to_owned();
        let outcome = refund(&bench.updater(1), refund_record("re_1", None, ProcessorRefundStatus::Succeeded)).await;
        assert!(matches!(outcome, Ok(UpdateOutcome::Rejected(why)) if why.contains("pi_2")));
        assert_eq!(bench.payment().await.left_minor(), 1000);
    }

    #[tokio::test]
    async fn paid_status_of_a_lost_payment_is_rejected_for_an_operator() {
        let bench = Bench::deposited().await;
        let lost = Some(PaymentId(Uuid::from_u128(99)));
        let is_rejected = |outcome| matches!(outcome, Ok(UpdateOutcome::Rejected(why)) if why.contains("is not here"));
        assert!(is_rejected(payment(&bench.updater(1), ProcessorPayment { payment_id: lost, ..paid(1000) }).await));
        // A payment that was not paid may be unknown.
        let expired = ProcessorPayment { payment_id: lost, status: ProcessorPaymentStatus::Expired, ..paid(1000) };
        assert_eq!(payment(&bench.updater(2), expired).await, Ok(UpdateOutcome::NotOurs));
        bench.processor.objects().payments.get_mut(INTENT).unwrap().payment_id = lost;
        assert!(is_rejected(
            refund(&bench.updater(3), refund_record("re_1", None, ProcessorRefundStatus::Succeeded)).await
        ));
        assert!(is_rejected(
            refund(&bench.updater(4), refund_record("re_1", Some(REFUND), ProcessorRefundStatus::Pending)).await
        ));
        assert!(is_rejected(dispute(&bench.updater(5), disputed(DisputeStatus::Opened)).await));
    }

    #[tokio::test]
    async fn own_refund_is_matched_by_our_id_and_a_foreign_one_by_the_processors_id() {
        let bench = Bench::refunding(400).await;
        let pending = refund_record("re_1", Some(REFUND), ProcessorRefundStatus::Pending);
        assert_eq!(refund(&bench.updater(1), pending).await, NEWS);
        let done = refund_record("re_1", Some(REFUND), ProcessorRefundStatus::Succeeded);
        assert_eq!(refund(&bench.updater(2), done.clone()).await, NEWS);
        assert_eq!(refund(&bench.updater(3), done).await, KNOWN);
        assert_eq!(
            refund(&bench.updater(4), refund_record("re_2", None, ProcessorRefundStatus::Succeeded)).await,
            NEWS
        );
        let payment = bench.payment().await;
        assert_eq!(payment.left_minor(), 200);
        assert_eq!(payment.reversals.keys().collect::<Vec<_>>(), ["re_2"]);
        assert_eq!(refund(&bench.updater(5), refund_record("re_2", None, ProcessorRefundStatus::Failed)).await, NEWS);
        assert_eq!(bench.payment().await.left_minor(), 600);
    }

    #[tokio::test]
    async fn status_that_changed_between_two_attempts_of_one_event_is_recorded() {
        let bench = Bench::refunding(400).await;
        for (status, is_new) in [
            (ProcessorRefundStatus::Pending, NEWS),
            (ProcessorRefundStatus::Pending, KNOWN),
            (ProcessorRefundStatus::Failed, NEWS),
        ] {
            assert_eq!(
                refund(&bench.updater(1), refund_record("re_1", Some(REFUND), status)).await,
                is_new,
                "{status:?}"
            );
        }
    }

    #[tokio::test]
    async fn second_refund_under_our_id_is_recorded_as_a_reversal() {
        let bench = Bench::refunding(400).await;
        for id in ["re_1", "re_2"] {
            let record = refund_record(id, Some(REFUND), ProcessorRefundStatus::Succeeded);
            assert_eq!(refund(&bench.updater(1), record).await, NEWS);
        }
        let unknown = refund_record("re_3", Some(RefundId(Uuid::from_u128(77))), ProcessorRefundStatus::Pending);
        assert_eq!(refund(&bench.updater(1), ProcessorRefundRecord { amount_minor: 100, ..unknown }).await, NEWS);
        let payment = bench.payment().await;
        assert_eq!(payment.left_minor(), 100);
        assert_eq!(payment.reversals.keys().collect::<Vec<_>>(), ["re_2", "re_3"]);
    }

    #[tokio::test]
    async fn dispute_debits_and_a_won_one_credits_and_an_inquiry_does_neither() {
        let bench = Bench::deposited().await;
        assert_eq!(dispute(&bench.updater(1), disputed(DisputeStatus::Inquiry)).await, KNOWN);
        assert_eq!(dispute(&bench.updater(1), disputed(DisputeStatus::Opened)).await, NEWS);
        assert_eq!(bench.payment().await.left_minor(), 0);
        assert_eq!(dispute(&bench.updater(2), disputed(DisputeStatus::Won)).await, NEWS);
        assert_eq!(dispute(&bench.updater(3), disputed(DisputeStatus::Opened)).await, KNOWN, "late");
        assert_eq!(bench.payment().await.left_minor(), 1000);
    }

    #[tokio::test]
    async fn payment_of_an_object_is_looked_up_at_the_processor_or_the_update_is_retried() {
        let bench = Bench::deposited().await;
        let of_nobody =
            ProcessorRefundRecord { of: None, ..refund_record("re_1", None, ProcessorRefundStatus::Succeeded) };
        assert_eq!(refund(&bench.updater(1), of_nobody).await, Ok(UpdateOutcome::NotOurs));
        let of_another = Some("pi_theirs".to_owned());
        let of_another =
            ProcessorRefundRecord { of: of_another, ..refund_record("re_1", None, ProcessorRefundStatus::Succeeded) };
        assert_eq!(refund(&bench.updater(1), of_another).await, Ok(UpdateOutcome::NotOurs));
        let gone = ProcessorError::Later("gone".to_owned());
        bench.processor.fail_next(gone.clone());
        let outcome = refund(&bench.updater(1), refund_record("re_1", None, ProcessorRefundStatus::Succeeded)).await;
        assert_eq!(outcome, Err(UpdateError::Processor(gone)));
        bench.processor.fail_next(ProcessorError::Refused { code: None, why: "no id".to_owned() });
        let outcome = dispute(&bench.updater(1), disputed(DisputeStatus::Opened)).await;
        assert_eq!(outcome, Ok(UpdateOutcome::Rejected("no id".to_owned())));
        assert!(bench.payment().await.reversals.is_empty());
    }
}
