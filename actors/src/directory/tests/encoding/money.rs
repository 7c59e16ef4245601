//! Billing accounts, payments and the events of their processor.

use super::*;

#[test]
fn of_a_billing_account() {
    use domain::authz::ResourceOwner;
    use domain::billing_account::{BillingAccount, Command, Holder, Instruction, PlanClaim, Rejection, Reply, Request};
    use domain::money::{Currency, MicroAmount};
    let currency = Currency::parse("EUR").unwrap();
    let holder = Holder::Org(text().into());
    let (payment_id, refund_id) = (domain::PaymentId(ALLOCATION), domain::RefundId(ALLOCATION));
    let open = Request::Open { holder: holder.clone(), currency: currency.clone() };
    let (_, reply) = decided::<BillingAccount>(None, open.clone(), &user("root", &[TokenRole::Admin]), ALLOCATION);
    let price = Price::new("EUR", 250).unwrap();
    let hold = |holder| Instruction::Hold {
        holder,
        allocation_id: TENANT,
        user_id: "ann".into(),
        price: price.clone(),
        gpu_count: 4,
        plan: Some(PlanClaim { plan: Some(text()), seen_at: at() }),
    };
    let renter = ResourceOwner {
        user_id: text().into(),
        org_id: Some(text().into()),
        project_id: Some(text().into()),
        plan: Some(text()),
    };
    let usage = |from, until| Instruction::MeterUsage { allocation_id: TENANT, from, until };
    let commands: Vec<Command> = vec![
        open.into(),
        hold(holder).into(),
        hold(Holder::User("ann".into())).into(),
        usage(Some(at()), Some(at())).into(),
        usage(None, None).into(),
        Request::Adjust { amount_minor: -7, currency: currency.clone(), reason: text() }.into(),
        Instruction::Deposit { payment_id, holder: Holder::User(text().into()), currency, amount_minor: 7 }.into(),
        Instruction::TakeRefund { refund_id, payment_id, amount_minor: 7, is_exact: true }.into(),
        Instruction::GiveBackRefund { refund_id, payment_id, amount_minor: 7 }.into(),
        Instruction::Reverse { reversal_id: text(), payment_id, is_dispute: true, amount_minor: i64::MAX }.into(),
        Instruction::UndoReversal { reversal_id: text(), payment_id, is_dispute: false, amount_minor: 7 }.into(),
        Request::RefundAllocation {
            refund_id,
            allocation_id: TENANT,
            cost: Some(MicroAmount::of(7)),
            ended_at: Some(at()),
            renter: Some(renter),
            amount_minor: Some(7),
            reason: text(),
        }
        .into(),
        Command::TICK,
    ];
    let rejections = [
        Rejection::NotFound,
        Rejection::InsufficientBalance {
            needed: MicroAmount::of(7),
            available: MicroAmount::of(i64::MIN),
            currency: Currency::parse("EUR").ok(),
        },
        Rejection::CurrencyDiffers { account: "EUR".into(), given: "USD".into() },
        Rejection::Amount { max: 7, currency: None },
        Rejection::Amount { max: 7, currency: Currency::parse("EUR").ok() },
        Rejection::Full { currency: None },
        Rejection::Full { currency: Currency::parse("EUR").ok() },
        Rejection::MoreThanCost { left: MicroAmount::of(7), currency: None },
        Rejection::TooLate { days: 7 },
        Rejection::TooManyRefunds,
        Rejection::Moved,
    ];
    survives::<BillingAccount>(commands, [reply, Reply::Done], rejections);
}

#[test]
fn of_a_payment() {
    use domain::billing_account::Holder;
    use domain::money::Currency;
    use domain::payment::{
        Command, Fact, Payment, PaymentFailure, RefundStatus, Rejection, Reply, Request, ReversalStep, ReviewDecision,
        ReviewId,
    };
    let (currency, refund_id) = (Currency::parse("EUR").unwrap(), domain::RefundId(ALLOCATION));
    let create = Request::Create {
        account_id: domain::BillingAccountId(ALLOCATION),
        holder: Holder::Org(text().into()),
        payer: "ann".into(),
        amount_minor: 5_000,
        currency: currency.clone(),
        success_url: "https://a.test/done".into(),
        cancel_url: "https://a.test/back".into(),
    };
    let (_, reply) = decided::<Payment>(None, create.clone(), &ann(), ALLOCATION);
    let not_paid = |outcome| Fact::NotPaid { processor_id: "pi_1".into(), outcome, why: text() };
    let reversed = |what| {
        let (currency, of) = (currency.clone(), Some("pi_1".into()));
        Fact::Reversed { reversal_id: "dp_1".into(), what, amount_minor: 7, currency, of }
    };
    let review = ReviewId { processor_id: text(), amount_minor: 7, currency: currency.clone() };
    let mut commands: Vec<Command> = vec![
        create.into(),
        Fact::Opened { processor_id: "pi_1".into() }.into(),
        Fact::NotOpened { why: text() }.into(),
        Fact::Paid {
            processor_id: "pi_1".into(),
            amount_minor: i64::MAX,
            currency: currency.clone(),
            charge_id: Some("ch_1".into()),
            presented: None,
        }
        .into(),
        Fact::PaidOtherwise { processor_id: "pi_1".into(), amount_minor: 7, currency: currency.clone() }.into(),
        Fact::EventDismissed { processor_id: "pi_1".into() }.into(),
        Fact::Deposited.into(),
        Request::Cancel { closed: Some(text()) }.into(),
        Request::Refund { refund_id, amount_minor: None, reason: text() }.into(),
        Request::SettleReview { review: Some(text()), reason: text() }.into(),
        Request::DismissReview { review: None, reason: text() }.into(),
        Fact::DepositRefused { why: text() }.into(),
        Fact::RefundTaken { refund_id, amount_minor: 7 }.into(),
        Fact::RefundRefused { refund_id, why: text() }.into(),
        Fact::GivenBack { refund_id }.into(),
        Fact::ReversalPosted { reversal_id: "dp_1".into(), is_undone: true }.into(),
        Command::TICK,
    ];
    commands.extend(
        [PaymentFailure::Declined, PaymentFailure::Canceled, PaymentFailure::Expired].map(not_paid).map(Command::from),
    );
    commands.extend(
        [ReversalStep::Refund, ReversalStep::RefundFailed, ReversalStep::DisputeOpened, ReversalStep::DisputeWon]
            .map(reversed)
            .map(Command::from),
    );
    commands.extend(
        [RefundStatus::Pending, RefundStatus::Succeeded, RefundStatus::Failed]
            .map(|status| Fact::RefundAt { refund_id, processor_refund_id: "re_1".into(), status, amount_minor: 7 })
            .map(Command::from),
    );
    let rejections = [
        Rejection::NotFound,
        Rejection::Exists,
        Rejection::Amount { min: 1, max: 7, currency: Some(currency.clone()) },
        Rejection::Amount { min: 1, max: 7, currency: None },
        Rejection::Over { state: domain::payment::PhaseName::Expired },
        Rejection::Differs { expected: text(), given: text() },
        Rejection::PaidTwice { as_of: text(), again: text() },
        Rejection::AlreadyPaid { state: domain::payment::PhaseName::Paid },
        Rejection::StillOpen,
        Rejection::NotPaid { state: domain::payment::PhaseName::Open },
        Rejection::TooLate { days: 7 },
        Rejection::MoreThanLeft { left: 7, currency: Some(currency.clone()) },
        Rejection::TooManyRefunds,
        Rejection::RefundUnknown,
        Rejection::LessThanCharged { least: 7, currency: currency.clone(), paid: Some(currency.clone()) },
        Rejection::Reviewed { processor_id: text(), decision: ReviewDecision::Settled },
        Rejection::NotUnderReview { state: domain::payment::PhaseName::Open },
        Rejection::ReviewEnded { decision: ReviewDecision::Refunded },
        Rejection::OtherReview { current: review },
        Rejection::TooManyReviews,
    ];
    survives::<Payment>(commands, [reply, Reply::Done], rejections);
}

#[test]
fn of_a_processor_event() {
    use domain::processor_event::{
        Command, Fact, Maintenance, ProcessingOutcome, ProcessorEvent, Rejection, Reply, Request,
    };
    let receive = Fact::Received {
        event_id: "evt_1".into(),
        event_type: text(),
        object_id: Some("pi_1".into()),
        occurred_at: Some(at()),
        digest: "00".into(),
        body_enc: "AA==".into(),
        nothing_follows: true,
    };
    let worker = crate::testing::worker();
    let (event, kept) = decided::<ProcessorEvent>(None, receive.clone(), &worker, ALLOCATION);
    let mut commands: Vec<Command> = vec![
        receive.into(),
        Fact::Failed { why: text() }.into(),
        Request::Retry { reason: text() }.into(),
        Request::Dismiss { reason: text() }.into(),
        Maintenance::Reseal { body_enc: "AA==".into() }.into(),
        Command::TICK,
    ];
    commands.extend(ProcessingOutcome::ALL.map(|outcome| Command::from(Fact::Processed { outcome })));
    let replies = [kept, Reply::Shown { event: Box::new(event) }, Reply::Done];
    let rejections = [
        Rejection::NotFound,
        Rejection::Differs,
        Rejection::WrongState { state: domain::processor_event::PhaseName::Processed },
    ];
    survives::<ProcessorEvent>(commands, replies, rejections);
}
