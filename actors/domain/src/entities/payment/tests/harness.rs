//! Payments of one account, and the messages between them.

use super::*;

/// Ann's account, her payments, and the messages between them.
pub(super) struct PaymentHarness {
    pub(super) payments: BTreeMap<PaymentId, Payment>,
    pub(super) account: Option<BillingAccount>,
    pub(super) ledger: Vec<Posting>,
    /// Messages in flight.
    pub(super) bus: Vec<Event>,
    pub(super) calls: Vec<ProcessorCall>,
    pub(super) policy: PolicyBook,
    pub(super) now: Timestamp,
}

impl PaymentHarness {
    pub(super) fn new() -> Self {
        Self {
            payments: BTreeMap::new(),
            account: None,
            ledger: Vec::new(),
            bus: Vec::new(),
            calls: Vec::new(),
            policy: PolicyBook::default(),
            now: Timestamp::from_timestamp(1_800_000_000, 0).unwrap(),
        }
    }

    /// With an open payment.
    pub(super) fn open(amount_minor: i64) -> Self {
        let mut world = Self::new();
        world.create(0, amount_minor);
        world
    }

    /// With a deposited payment.
    pub(super) fn deposited(amount_minor: i64) -> Self {
        let mut world = Self::open(amount_minor);
        world.pay(0);
        world.hear_all();
        world
    }

    pub(super) fn ctx<'a>(&'a self, by: &'a Principal, id: Uuid) -> TransitionContext<'a> {
        TransitionContext { seed: 7, id, ..TransitionContext::in_test(self.now, &self.policy, by) }
    }

    pub(super) fn ask(&mut self, by: &Principal, id: PaymentId, command: impl Into<Command>) -> Result<(), Rejection> {
        let step = Payment::decide(self.payments.get(&id), command.into(), &self.ctx(by, id.0))?;
        assert!(step.postings.is_empty());
        let Some(next) = step.next else {
            assert!(step.events.is_empty(), "what is not written is lost");
            return Ok(());
        };
        assert!(next.has_deadline_where_transient(), "{next:#?}");
        assert!(next.refunds_no_more_than_was_paid(), "{next:#?}");
        self.bus.extend(step.events);
        self.payments.insert(id, next);
        Ok(())
    }

    pub(super) fn send(&mut self, n: u128, command: impl Into<Command>) -> Result<(), Rejection> {
        self.ask(&Principal::system("test"), payment_id(n), command)
    }

    pub(super) fn tell_account(
        &mut self,
        command: impl Into<billing_account::Command>,
    ) -> Result<(), billing_account::Rejection> {
        let by = Principal::system("test");
        let step = BillingAccount::decide(self.account.as_ref(), command.into(), &self.ctx(&by, Uuid::from_u128(9)))?;
        if step.next.is_none() {
            assert!(step.events.is_empty() && step.postings.is_empty(), "what is not written is lost");
            return Ok(());
        }
        self.ledger.extend(step.postings);
        self.bus.extend(step.events);
        self.account = step.next;
        assert!(invariants::i3_the_balance_is_the_sum_of_its_entries(self.account.as_ref().unwrap(), &self.ledger));
        Ok(())
    }

    pub(super) fn deliver(&mut self, event: &Event) {
        match event.reaction() {
            Reaction::Payment(id, fact) => self.ask(&Principal::system("test"), id, fact).unwrap(),
            Reaction::Billing { instruction, .. } => self.tell_account(instruction).unwrap(),
            Reaction::CallProcessor(call) => self.calls.push(call),
            Reaction::Nothing => {}
            // Allocations are not simulated here.
            Reaction::Allocation(..) => {}
            Reaction::Place(_)
            | Reaction::Node(..)
            | Reaction::Terminal(..)
            | Reaction::DriveMachine(_)
            | Reaction::ResolveSshKeys { .. }
            | Reaction::SendSshKeys { .. }
            | Reaction::CloseTerminals { .. }
            | Reaction::CloseNodeTerminals { .. }
            | Reaction::CloseBrowserTerminals { .. }
            | Reaction::ApplyProcessorEvent(_)
            | Reaction::Rollout(..)
            | Reaction::FindRolloutNodes(_)
            | Reaction::Tenant { .. } => panic!("not of this world: {event:?}"),
        }
    }

    pub(super) fn hear_all(&mut self) {
        while !self.bus.is_empty() {
            let event = self.bus.remove(0);
            self.deliver(&event);
        }
    }

    pub(super) fn create_as(&mut self, n: u128, amount_minor: i64) -> Result<(), Rejection> {
        let create = Request::Create {
            account_id: BillingAccountId(Uuid::from_u128(9)),
            holder: Holder::User("ann".into()),
            payer: "ann".into(),
            amount_minor,
            currency: eur(),
            success_url: "https://a.test/done".into(),
            cancel_url: "https://a.test/back".into(),
        };
        self.ask(&ann(), payment_id(n), create)
    }

    pub(super) fn create(&mut self, n: u128, amount_minor: i64) {
        self.create_as(n, amount_minor).unwrap();
        self.send(n, Fact::Opened { processor_id: intent(payment_id(n)) }).unwrap();
    }

    pub(super) fn paid(&self, n: u128) -> Fact {
        let payment = &self.payments[&payment_id(n)];
        Fact::Paid {
            processor_id: intent(payment.id),
            amount_minor: payment.amount_minor,
            currency: eur(),
            charge_id: Some("ch_1".into()),
            presented: None,
        }
    }

    pub(super) fn pay(&mut self, n: u128) {
        let paid = self.paid(n);
        self.send(n, paid).unwrap();
    }

    pub(super) fn refund(&mut self, n: u128, amount_minor: Option<i64>) -> Result<(), Rejection> {
        let refund = Request::Refund { refund_id: refund_id(n), amount_minor, reason: "r".into() };
        self.ask(&ann(), payment_id(0), refund)
    }

    pub(super) fn refund_at(&mut self, n: u128, status: RefundStatus, amount_minor: i64) -> Result<(), Rejection> {
        let processor_refund_id = format!("re_{n}");
        self.send(0, Fact::RefundAt { refund_id: refund_id(n), processor_refund_id, status, amount_minor })
    }

    /// The money that the account cannot have.
    pub(super) fn paid_back(&mut self, status: RefundStatus) {
        let id = payment_id(0);
        let back = Fact::RefundAt {
            refund_id: RefundId(id.0),
            processor_refund_id: "re_0".into(),
            status,
            amount_minor: self.it().amount_minor,
        };
        self.send(0, back).unwrap();
    }

    pub(super) fn reversed(&mut self, id: &str, what: ReversalStep, amount_minor: i64) {
        let of = Some(intent(payment_id(0)));
        let command = Fact::Reversed { reversal_id: id.into(), what, amount_minor, currency: eur(), of };
        self.send(0, command).unwrap();
    }

    pub(super) fn it(&self) -> &Payment {
        &self.payments[&payment_id(0)]
    }

    pub(super) fn balance(&self) -> i64 {
        self.account.as_ref().unwrap().balance.minor()
    }

    pub(super) fn taking(&self, n: u128) -> &RefundDebit {
        &self.it().refunds[&refund_id(n)].taking
    }

    pub(super) fn pass(&mut self, time: TimeDelta) {
        self.now += time;
        let ids: Vec<_> = self.payments.keys().copied().collect();
        for id in ids {
            self.ask(&Principal::system("test"), id, Command::TICK).unwrap();
        }
    }

    pub(super) fn use_up(&mut self, minor: i64) {
        let reason = "used".to_owned();
        self.tell_account(billing_account::Request::Adjust { amount_minor: -minor, currency: eur(), reason }).unwrap();
    }

    /// Adds an allocation with this cost per hour.
    pub(super) fn rent(&mut self, n: u128, price: i64) {
        let allocation_id = AllocationId(Uuid::from_u128(n));
        let hold = billing_account::Instruction::Hold {
            holder: Holder::User("ann".into()),
            allocation_id,
            user_id: "ann".into(),
            price: Price::new("EUR", price).unwrap(),
            gpu_count: 1,
            plan: None,
        };
        self.tell_account(hold).unwrap();
        let from = Some(self.now);
        self.tell_account(billing_account::Instruction::MeterUsage { allocation_id, from, until: None }).unwrap();
    }
}
