//! What the processor says of a payment, a refund or a dispute becomes a command of our payment, whoever heard it: the webhook, an errand
//! or a reconciliation. Each tells it again without harm, since the payment keeps a fact once, under the processor's own id.

use actors::place::command_id;
use actors::{AskError, Asked, CommandKey, Directory};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::machine::Command as _;
use domain::payment::{self, Command, Outcome, Payment, Rejection, What};
use domain::{Action, PaymentId, Permit, Principal};
use edge::processor::{
    Dispute, DisputeStatus, Processor, ProcessorError, RefundStanding, RefundStatus, Standing, Status,
};
use std::sync::Arc;
use thiserror::Error;
use uuid::Uuid;

/// How long a payment may take to take note.
const PATIENCE: TimeDelta = TimeDelta::seconds(5);

/// Tells our payments what the processor says, each cause once.
#[derive(Clone)]
pub struct Teller {
    pub(super) directory: Directory,
    pub(super) processor: Arc<dyn Processor>,
    permit: Permit,
    /// Where it was heard.
    cause: Uuid,
    correlation_id: String,
    traceparent: Option<String>,
    tracestate: Option<String>,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// Our payment knows it; `is_news` where it did not before.
    Done { is_news: bool },
    /// It is about no payment that was made here.
    NotOurs,
    /// Our payment contradicts it, and will again: somebody has to look.
    Rejected(String),
}

/// Why it could not be told now. It can be told again.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Untold {
    #[error("whose payment it is cannot be asked: {0}")]
    Processor(#[source] ProcessorError),
    #[error("payment {payment_id} does not answer: {why}")]
    Payment { payment_id: PaymentId, why: String },
}

impl Teller {
    /// As the system's `worker`.
    ///
    /// # Errors
    /// Never in practice: a worker may advance the machines.
    pub fn new(directory: Directory, processor: Arc<dyn Processor>, worker: &str) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system(worker), Action::Advance)?;
        let (cause, correlation_id) = (Uuid::now_v7(), String::new());
        Ok(Self { directory, processor, permit, cause, correlation_id, traceparent: None, tracestate: None })
    }

    /// For what was heard under `cause`: told twice, a command of it is carried out once.
    #[must_use]
    pub fn for_cause(&self, cause: Uuid, correlation_id: impl Into<String>) -> Self {
        Self { cause, correlation_id: correlation_id.into(), ..self.clone() }
    }

    /// As part of this trace.
    #[must_use]
    pub fn traced(mut self, traceparent: Option<String>, tracestate: Option<String>) -> Self {
        (self.traceparent, self.tracestate) = (traceparent, tracestate);
        self
    }

    /// Asks it of a payment of ours; `about` is the processor's id of what it is about.
    pub(super) async fn ask(
        &self,
        payment_id: PaymentId,
        about: &str,
        command: Command,
    ) -> Result<Result<Heard, Rejection>, Untold> {
        let parts = [b"told", self.cause.as_bytes().as_slice(), about.as_bytes(), command.name().as_bytes()];
        let key = CommandKey { id: command_id(&parts), digest: [0; 32], keep_reply: false, consumes: None };
        let asked = Asked::new(&self.permit, self.correlation_id.clone(), Utc::now() + PATIENCE)
            .traced(self.traceparent.clone(), self.tracestate.clone())
            .once(key)
            .urgently();
        match self.directory.ask::<Payment>(&self.permit, payment_id.0, command, asked).await {
            Ok(answered) => Ok(Ok(Heard { is_news: answered.written, reply: Some(answered.reply) })),
            Err(AskError::AlreadyDone) => Ok(Ok(Heard { is_news: false, reply: None })),
            Err(AskError::Rejected(rejection)) => Ok(Err(rejection)),
            Err(error) => Err(Untold::Payment { payment_id, why: error.to_string() }),
        }
    }

    async fn tell(&self, payment_id: PaymentId, about: &str, command: Command) -> Result<Told, Untold> {
        Ok(match self.ask(payment_id, about, command).await? {
            Ok(heard) => Told::Done { is_news: heard.is_news },
            Err(rejection) => rejected(payment_id, &rejection),
        })
    }

    /// Of which payment of ours it is, where it is of one: the processor says so, who keeps our id beside its own.
    async fn whose(&self, of: Option<&str>) -> Result<Whose, Untold> {
        let Some(of) = of else { return Ok(Whose::NotOurs) };
        match self.processor.payment(of).await {
            Ok(standing) => Ok(standing.and_then(|it| it.payment_id).map_or(Whose::NotOurs, Whose::Ours)),
            // It will not be said later either.
            Err(ProcessorError::Refused { why, .. }) => Ok(Whose::Unsaid(why)),
            Err(error) => Err(Untold::Processor(error)),
        }
    }
}

/// The processor named the payment by an id of our making. So where there is none it is not somebody else's: it was lost here, by going back
/// to a backup for example, and with it the way of that money.
fn rejected(payment_id: PaymentId, why: &Rejection) -> Told {
    match why {
        Rejection::NotFound => Told::Rejected(format!("payment {payment_id}, which it names, is not here")),
        why => Told::Rejected(why.to_string()),
    }
}

/// A payment's answer.
pub(super) struct Heard {
    pub(super) is_news: bool,
    /// None where it was told before under the same cause.
    pub(super) reply: Option<payment::Reply>,
}

enum Whose {
    Ours(PaymentId),
    NotOurs,
    Unsaid(String),
}

/// # Errors
/// Where it has to be told again.
pub async fn payment(teller: &Teller, standing: Standing) -> Result<Told, Untold> {
    let Some(payment_id) = standing.payment_id else { return Ok(Told::NotOurs) };
    let Standing { processor_id, amount_minor, currency, status, .. } = standing;
    let about = processor_id.clone();
    let not_paid = |outcome, why| Command::NotPaid { processor_id: processor_id.clone(), outcome, why };
    let command = match status {
        // Whether it is open is for whoever opens it to say.
        Status::Open | Status::Processing => return Ok(Told::Done { is_news: false }),
        Status::Paid { charge_id } => Command::Paid { processor_id, amount_minor, currency, charge_id },
        Status::Declined { why } => not_paid(Outcome::Declined, why),
        Status::Canceled => not_paid(Outcome::Canceled, "canceled at the processor".to_owned()),
        Status::Expired => not_paid(Outcome::Expired, "not paid in time".to_owned()),
    };
    match teller.ask(payment_id, &about, command.clone()).await? {
        Ok(heard) => Ok(Told::Done { is_news: heard.is_news }),
        // No money has moved: whoever made it has to know of it.
        Err(Rejection::NotFound) if matches!(command, Command::NotPaid { .. }) => Ok(Told::NotOurs),
        Err(rejection) => Ok(rejected(payment_id, &rejection)),
    }
}

/// # Errors
/// Where it has to be told again.
pub async fn refund(teller: &Teller, standing: RefundStanding) -> Result<Told, Untold> {
    match teller.whose(standing.of.as_deref()).await? {
        Whose::Ours(payment_id) => refund_of(teller, payment_id, standing).await,
        Whose::NotOurs => Ok(Told::NotOurs),
        Whose::Unsaid(why) => Ok(Told::Rejected(why)),
    }
}

/// A refund of a payment of ours.
pub(super) async fn refund_of(
    teller: &Teller,
    payment_id: PaymentId,
    standing: RefundStanding,
) -> Result<Told, Untold> {
    let RefundStanding { processor_refund_id, refund_id, amount_minor, currency, status, .. } = standing;
    let about = processor_refund_id.clone();
    if let Some(refund_id) = refund_id {
        let status = match status {
            RefundStatus::Pending => payment::RefundStatus::Pending,
            RefundStatus::Succeeded => payment::RefundStatus::Succeeded,
            RefundStatus::Failed => payment::RefundStatus::Failed,
        };
        let processor_refund_id = processor_refund_id.clone();
        let command = Command::RefundAt { refund_id, processor_refund_id, status, amount_minor };
        match teller.ask(payment_id, &about, command).await? {
            Ok(heard) => return Ok(Told::Done { is_news: heard.is_news }),
            // Our id, but none that was asked for here, or a second one under it: that money has left as well.
            Err(Rejection::RefundUnknown | Rejection::PaidTwice { .. }) => {}
            Err(rejection) => return Ok(rejected(payment_id, &rejection)),
        }
    }
    let what = match status {
        RefundStatus::Pending | RefundStatus::Succeeded => What::Refund,
        RefundStatus::Failed => What::RefundFailed,
    };
    let reversed = Command::Reversed { reversal_id: processor_refund_id, what, amount_minor, currency };
    teller.tell(payment_id, &about, reversed).await
}

/// # Errors
/// Where it has to be told again.
pub async fn dispute(teller: &Teller, dispute: Dispute) -> Result<Told, Untold> {
    let what = match dispute.status {
        // No money has moved.
        DisputeStatus::Inquiry => return Ok(Told::Done { is_news: false }),
        DisputeStatus::Opened => What::DisputeOpened,
        DisputeStatus::Won => What::DisputeWon,
    };
    let payment_id = match teller.whose(dispute.of.as_deref()).await? {
        Whose::Ours(payment_id) => payment_id,
        Whose::NotOurs => return Ok(Told::NotOurs),
        Whose::Unsaid(why) => return Ok(Told::Rejected(why)),
    };
    let Dispute { dispute_id, amount_minor, currency, .. } = dispute;
    let about = dispute_id.clone();
    let reversed = Command::Reversed { reversal_id: dispute_id, what, amount_minor, currency };
    teller.tell(payment_id, &about, reversed).await
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::testing::{Bench, INTENT, PAYMENT, REFUND, eur};
    use super::*;
    use domain::RefundId;

    fn paid(amount_minor: i64) -> Standing {
        Standing {
            processor_id: INTENT.to_owned(),
            payment_id: Some(PAYMENT),
            amount_minor,
            currency: eur(),
            status: Status::Paid { charge_id: Some("ch_1".to_owned()) },
        }
    }

    fn given_back(id: &str, refund_id: Option<RefundId>, status: RefundStatus) -> RefundStanding {
        RefundStanding {
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

    const NEWS: Result<Told, Untold> = Ok(Told::Done { is_news: true });
    const KNOWN: Result<Told, Untold> = Ok(Told::Done { is_news: false });

    #[tokio::test]
    async fn what_was_paid_is_told_once_whoever_says_it_how_often() {
        let bench = Bench::open().await;
        assert_eq!(payment(&bench.teller(1), Standing { status: Status::Processing, ..paid(1000) }).await, KNOWN);
        assert_eq!(bench.payment().await.paid_at(), None);
        assert_eq!(payment(&bench.teller(1), paid(1000)).await, NEWS);
        assert_eq!(payment(&bench.teller(1), paid(1000)).await, KNOWN, "the same word again");
        assert_eq!(payment(&bench.teller(2), paid(1000)).await, KNOWN, "another who has heard it");
        let payment = bench.payment().await;
        assert!(payment.paid_at().is_some());
        assert_eq!(payment.charge_id.as_deref(), Some("ch_1"));
    }

    #[tokio::test]
    async fn what_was_not_paid_says_why() {
        let bench = Bench::open().await;
        let declined = Status::Declined { why: "card_declined".to_owned() };
        assert_eq!(payment(&bench.teller(1), Standing { status: declined, ..paid(1000) }).await, NEWS);
        assert_eq!(bench.payment().await.declined.as_deref(), Some("card_declined"));
        assert_eq!(payment(&bench.teller(2), Standing { status: Status::Expired, ..paid(1000) }).await, NEWS);
        assert!(matches!(bench.payment().await.phase, payment::Phase::Expired { .. }));
    }

    #[tokio::test]
    async fn a_payment_of_somebody_else_is_not_ours_and_another_amount_is_contradicted() {
        let bench = Bench::open().await;
        let told = payment(&bench.teller(1), Standing { payment_id: None, ..paid(1000) }).await;
        assert_eq!(told, Ok(Told::NotOurs));
        assert!(matches!(payment(&bench.teller(1), paid(999)).await, Ok(Told::Rejected(why)) if why.contains("999")));
        assert_eq!(bench.payment().await.paid_at(), None);
    }

    #[tokio::test]
    async fn what_was_paid_for_a_payment_that_was_lost_here_is_for_somebody_to_look_at() {
        let bench = Bench::deposited().await;
        let lost = Some(PaymentId(Uuid::from_u128(99)));
        let is_rejected = |told| matches!(told, Ok(Told::Rejected(why)) if why.contains("is not here"));
        assert!(is_rejected(payment(&bench.teller(1), Standing { payment_id: lost, ..paid(1000) }).await));
        // Nobody has paid it: that may be said of anything.
        let expired = Standing { payment_id: lost, status: Status::Expired, ..paid(1000) };
        assert_eq!(payment(&bench.teller(2), expired).await, Ok(Told::NotOurs));
        bench.processor.standing.lock().unwrap().as_mut().unwrap().payment_id = lost;
        assert!(is_rejected(refund(&bench.teller(3), given_back("re_1", None, RefundStatus::Succeeded)).await));
        assert!(is_rejected(refund(&bench.teller(4), given_back("re_1", Some(REFUND), RefundStatus::Pending)).await));
        assert!(is_rejected(dispute(&bench.teller(5), disputed(DisputeStatus::Opened)).await));
    }

    #[tokio::test]
    async fn a_refund_of_ours_goes_by_our_id_and_another_by_the_processors() {
        let bench = Bench::refunding(400).await;
        let pending = given_back("re_1", Some(REFUND), RefundStatus::Pending);
        assert_eq!(refund(&bench.teller(1), pending).await, NEWS);
        let done = given_back("re_1", Some(REFUND), RefundStatus::Succeeded);
        assert_eq!(refund(&bench.teller(2), done.clone()).await, NEWS);
        assert_eq!(refund(&bench.teller(3), done).await, KNOWN);
        assert_eq!(refund(&bench.teller(4), given_back("re_2", None, RefundStatus::Succeeded)).await, NEWS);
        let payment = bench.payment().await;
        assert_eq!(payment.left_minor(), 200);
        assert_eq!(payment.reversals.keys().collect::<Vec<_>>(), ["re_2"]);
        assert_eq!(refund(&bench.teller(5), given_back("re_2", None, RefundStatus::Failed)).await, NEWS);
        assert_eq!(bench.payment().await.left_minor(), 600);
    }

    #[tokio::test]
    async fn a_second_refund_under_our_id_has_taken_money_too() {
        let bench = Bench::refunding(400).await;
        for id in ["re_1", "re_2"] {
            let standing = given_back(id, Some(REFUND), RefundStatus::Succeeded);
            assert_eq!(refund(&bench.teller(1), standing).await, NEWS);
        }
        let unheard_of = given_back("re_3", Some(RefundId(Uuid::from_u128(77))), RefundStatus::Pending);
        assert_eq!(refund(&bench.teller(1), RefundStanding { amount_minor: 100, ..unheard_of }).await, NEWS);
        let payment = bench.payment().await;
        assert_eq!(payment.left_minor(), 100);
        assert_eq!(payment.reversals.keys().collect::<Vec<_>>(), ["re_2", "re_3"]);
    }

    #[tokio::test]
    async fn a_dispute_takes_and_gives_back_and_an_inquiry_does_neither() {
        let bench = Bench::deposited().await;
        assert_eq!(dispute(&bench.teller(1), disputed(DisputeStatus::Inquiry)).await, KNOWN);
        assert_eq!(dispute(&bench.teller(1), disputed(DisputeStatus::Opened)).await, NEWS);
        assert_eq!(bench.payment().await.left_minor(), 0);
        assert_eq!(dispute(&bench.teller(2), disputed(DisputeStatus::Won)).await, NEWS);
        assert_eq!(dispute(&bench.teller(3), disputed(DisputeStatus::Opened)).await, KNOWN, "late");
        assert_eq!(bench.payment().await.left_minor(), 1000);
    }

    #[tokio::test]
    async fn whose_it_is_the_processor_says_or_it_has_to_be_told_again() {
        let bench = Bench::deposited().await;
        let of_nobody = RefundStanding { of: None, ..given_back("re_1", None, RefundStatus::Succeeded) };
        assert_eq!(refund(&bench.teller(1), of_nobody).await, Ok(Told::NotOurs));
        let of_another = Some("pi_theirs".to_owned());
        let of_another = RefundStanding { of: of_another, ..given_back("re_1", None, RefundStatus::Succeeded) };
        assert_eq!(refund(&bench.teller(1), of_another).await, Ok(Told::NotOurs));
        let gone = ProcessorError::Later("gone".to_owned());
        bench.processor.fails(gone.clone());
        let told = refund(&bench.teller(1), given_back("re_1", None, RefundStatus::Succeeded)).await;
        assert_eq!(told, Err(Untold::Processor(gone)));
        bench.processor.fails(ProcessorError::Refused { code: None, why: "no id".to_owned() });
        let told = dispute(&bench.teller(1), disputed(DisputeStatus::Opened)).await;
        assert_eq!(told, Ok(Told::Rejected("no id".to_owned())));
        assert!(bench.payment().await.reversals.is_empty());
    }
}
