//! One payment of ours in a host of its own, and a processor that a test writes.

#![allow(clippy::unwrap_used)]

use super::told::Teller;
use actors::ports::{Effects, Remote, RemoteError, Store, StoreError, Term, World};
use actors::{Asked, Directory, Host, HostConfig};
use chrono::{DateTime, TimeDelta, Utc};
use domain::authz::{Caller, Role, authorize};
use domain::billing_account::Holder;
use domain::commit::{Done, Epoch, Snapshot};
use domain::machine::Command as _;
use domain::money::Currency;
use domain::payment::{Command, Payment};
use domain::policy::PolicyBook;
use domain::{
    BillingAccountId, CommandId, Commit, Effect, EntityRef, Kind, Outcome, PaymentId, Principal, RefundId, Shard,
    Timestamp,
};
use edge::processor::{
    Answer, Checkout, Dispute, Listing, Opened, Processor, ProcessorError, RefundRequest, RefundStanding, RefundStatus,
    Standing, Status, Way,
};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

pub(super) const PAYMENT: PaymentId = PaymentId(Uuid::from_u128(7));
pub(super) const REFUND: RefundId = RefundId(Uuid::from_u128(8));
/// What the processor calls the payment.
pub(super) const INTENT: &str = "pi_1";

pub(super) fn eur() -> Currency {
    Currency::parse("EUR").unwrap()
}

/// A payment of 1000 minor units.
pub(super) struct Bench {
    pub(super) processor: Arc<Scripted>,
    pub(super) directory: Directory,
    books: Arc<Books>,
}

impl Bench {
    /// Nobody has opened it at the processor, as far as we know.
    pub(super) async fn created() -> Self {
        let books = Arc::new(Books::default());
        let host = Host::new(
            HostConfig::default(),
            Arc::clone(&books) as Arc<dyn Store>,
            Arc::new(Unperformed),
            Arc::new(RealTime),
        );
        for shard in Shard::all() {
            host.open(Term { shard, epoch: Epoch(1) }, None).await.unwrap();
        }
        let bench =
            Self { processor: Arc::default(), directory: Directory::new(Arc::clone(&host), Arc::new(Nobody)), books };
        let create = Command::Create {
            account_id: BillingAccountId(Uuid::from_u128(9)),
            holder: Holder::User("ann".to_owned()),
            payer: "ann".to_owned(),
            amount_minor: 1000,
            currency: eur(),
            success_url: "https://a.test/done".to_owned(),
            cancel_url: "https://a.test/back".to_owned(),
        };
        bench.asks(&ann(), create).await;
        bench
    }

    /// Its payer can pay.
    pub(super) async fn open() -> Self {
        let bench = Self::created().await;
        bench.asks(&system(), Command::Opened { processor_id: INTENT.to_owned() }).await;
        bench.processor.knows(Status::Open);
        bench
    }

    /// It is in the account.
    pub(super) async fn deposited() -> Self {
        let bench = Self::open().await;
        let charge_id = Some("ch_1".to_owned());
        let processor_id = INTENT.to_owned();
        bench.asks(&system(), Command::Paid { processor_id, amount_minor: 1000, currency: eur(), charge_id }).await;
        bench.asks(&system(), Command::Deposited).await;
        bench.processor.knows(Status::Paid { charge_id: None });
        bench
    }

    /// So much of it was taken from the account, for the processor to pay back.
    pub(super) async fn refunding(amount_minor: i64) -> Self {
        let bench = Self::deposited().await;
        let reason = "not needed".to_owned();
        bench.asks(&ann(), Command::Refund { refund_id: REFUND, amount_minor: Some(amount_minor), reason }).await;
        bench.asks(&system(), Command::RefundTaken { refund_id: REFUND, amount_minor }).await;
        bench
    }

    async fn asks(&self, by: &Principal, command: Command) {
        let permit = authorize(by, command.action()).unwrap();
        let asked = Asked::new(&permit, "test", Utc::now() + TimeDelta::seconds(5));
        self.directory.ask::<Payment>(&permit, PAYMENT.0, command, asked).await.unwrap();
    }

    pub(super) fn teller(&self, cause: u128) -> Teller {
        let processor = Arc::clone(&self.processor) as Arc<dyn Processor>;
        Teller::new(self.directory.clone(), processor, "test").unwrap().for_cause(Uuid::from_u128(cause), "test")
    }

    /// As it is stored.
    pub(super) async fn payment(&self) -> Payment {
        let entity = EntityRef { kind: Kind::Payment, id: PAYMENT.0 };
        let snapshot = self.books.load(entity).await.unwrap().unwrap();
        serde_json::from_str(&snapshot.body).unwrap()
    }
}

fn system() -> Principal {
    Principal::system("test")
}

fn ann() -> Principal {
    Principal::Caller(Caller {
        user_id: "ann".to_owned(),
        roles: [Role::User].into(),
        org_id: None,
        project_id: None,
        plan: None,
        grant: None,
        service_account: None,
    })
}

/// A processor that has what a test gives it, and does what it is asked.
#[derive(Default)]
pub(super) struct Scripted {
    pub(super) standing: Mutex<Option<Standing>>,
    pub(super) refunds: Mutex<Vec<RefundStanding>>,
    pub(super) disputes: Mutex<Vec<Dispute>>,
    /// What it was asked to do.
    pub(super) asked: Mutex<Vec<String>>,
    /// From when on refunds were asked for.
    pub(super) refunds_asked_since: Mutex<Vec<DateTime<Utc>>>,
    /// Which of its refunds cannot be read, and whether there are more than are looked through.
    pub(super) unread: Mutex<(Vec<String>, bool)>,
    fails: Mutex<VecDeque<ProcessorError>>,
    loses: Mutex<bool>,
    refuses: Mutex<bool>,
    silent_on: Mutex<Option<String>>,
}

impl Scripted {
    pub(super) fn knows(&self, status: Status) {
        *self.standing.lock().unwrap() = Some(Standing {
            processor_id: INTENT.to_owned(),
            payment_id: Some(PAYMENT),
            amount_minor: 1000,
            currency: eur(),
            status,
        });
    }

    /// Answers the next question so.
    pub(super) fn fails(&self, error: ProcessorError) {
        self.fails.lock().unwrap().push_back(error);
    }

    /// Does the next refund, and its answer is lost.
    pub(super) fn loses_the_answer(&self) {
        *self.loses.lock().unwrap() = true;
    }

    /// Makes no refund from here on.
    pub(super) fn refuses_refunds(&self) {
        *self.refuses.lock().unwrap() = true;
    }

    pub(super) fn never_answers_for(&self, processor_id: &str) {
        *self.silent_on.lock().unwrap() = Some(processor_id.to_owned());
    }

    pub(super) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    fn answer<'a, T: Send + 'a>(&self, answer: impl FnOnce(&Self) -> Result<T, ProcessorError>) -> Answer<'a, T> {
        let failed = self.fails.lock().unwrap().pop_front();
        let answer = failed.map_or_else(|| answer(self), Err);
        std::future::ready(answer).boxed()
    }

    fn has(&self) -> Option<Standing> {
        self.standing.lock().unwrap().clone()
    }
}

impl Processor for Scripted {
    fn checkout<'a>(&'a self, _: &'a Checkout) -> Answer<'a, Opened> {
        self.answer(|_| Err(ProcessorError::Later("nobody opens anything here".to_owned())))
    }

    fn find_payment(&self, payment_id: PaymentId, _: DateTime<Utc>) -> Answer<'_, Option<Opened>> {
        self.answer(|it| {
            let found = it.has().filter(|standing| standing.payment_id == Some(payment_id));
            Ok(found.map(|standing| Opened { processor_id: standing.processor_id, way: Way::Closed }))
        })
    }

    fn payment<'a>(&'a self, processor_id: &'a str) -> Answer<'a, Option<Standing>> {
        self.answer(|it| {
            if it.silent_on.lock().unwrap().as_deref() == Some(processor_id) {
                return Err(ProcessorError::Later("no answer".to_owned()));
            }
            Ok(it.has().filter(|_| [INTENT, "ch_1"].contains(&processor_id)))
        })
    }

    fn cancel<'a>(&'a self, processor_id: &'a str) -> Answer<'a, Option<Standing>> {
        self.answer(|it| {
            it.asked.lock().unwrap().push(format!("cancel {processor_id}"));
            let has = it.has();
            if let Some(Standing { status: Status::Open | Status::Declined { .. }, .. }) = has {
                it.knows(Status::Canceled);
            }
            Ok(it.has())
        })
    }

    fn refund<'a>(&'a self, wanted: &'a RefundRequest) -> Answer<'a, RefundStanding> {
        self.answer(|it| {
            it.asked.lock().unwrap().push(format!("refund {} of {}", wanted.amount_minor, wanted.processor_id));
            if *it.refuses.lock().unwrap() {
                return Err(ProcessorError::Refused { code: None, why: "not this one".to_owned() });
            }
            let mut refunds = it.refunds.lock().unwrap();
            let standing = RefundStanding {
                processor_refund_id: format!("re_{}", refunds.len() + 1),
                refund_id: Some(wanted.refund_id),
                of: Some(wanted.processor_id.clone()),
                amount_minor: wanted.amount_minor,
                currency: eur(),
                status: RefundStatus::Succeeded,
            };
            refunds.push(standing.clone());
            if std::mem::take(&mut *it.loses.lock().unwrap()) {
                return Err(ProcessorError::Unknown("lost".to_owned()));
            }
            Ok(standing)
        })
    }

    fn refunds_of<'a>(&'a self, processor_id: &'a str) -> Answer<'a, Vec<RefundStanding>> {
        self.answer(|it| {
            let refunds = it.refunds.lock().unwrap();
            Ok(refunds.iter().filter(|refund| refund.of.as_deref() == Some(processor_id)).cloned().collect())
        })
    }

    fn payments_since(&self, _: DateTime<Utc>) -> Answer<'_, Listing<Standing>> {
        self.answer(|it| Ok(Listing::of(it.has().into_iter().collect())))
    }

    fn refunds_since(&self, since: DateTime<Utc>) -> Answer<'_, Listing<RefundStanding>> {
        self.refunds_asked_since.lock().unwrap().push(since);
        let (unread, is_cut) = self.unread.lock().unwrap().clone();
        self.answer(|it| Ok(Listing { found: it.refunds.lock().unwrap().clone(), unread, is_cut }))
    }

    fn disputes_since(&self, _: DateTime<Utc>) -> Answer<'_, Listing<Dispute>> {
        self.answer(|it| Ok(Listing::of(it.disputes.lock().unwrap().clone())))
    }
}

/// What Postgres would hold.
#[derive(Default)]
struct Books {
    entities: Mutex<BTreeMap<EntityRef, Snapshot>>,
    commands: Mutex<BTreeMap<CommandId, Done>>,
}

impl Store for Books {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreError>> {
        std::future::ready(Ok(self.entities.lock().unwrap().get(&entity).cloned())).boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Outcome> {
        let (mut entities, mut commands) = (self.entities.lock().unwrap(), self.commands.lock().unwrap());
        if let Some(command) = &commit.command {
            if let Some(done) = commands.get(&command.id) {
                return std::future::ready(Outcome::Duplicate(done.clone())).boxed();
            }
            let done = Done { entity: commit.entity.id, digest: command.digest, reply: command.reply.clone() };
            commands.insert(command.id, done);
        }
        let version = commit.expected_version + 1;
        entities.insert(commit.entity, Snapshot { version, body: commit.snapshot.clone() });
        std::future::ready(Outcome::Applied).boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<Done>, StoreError>> {
        std::future::ready(Ok(self.commands.lock().unwrap().get(&id).cloned())).boxed()
    }
}

struct Unperformed;

impl Effects for Unperformed {
    fn perform(&self, _: Effect) {}
}

struct RealTime;

impl World for RealTime {
    fn now(&self) -> Timestamp {
        Utc::now()
    }

    fn seed(&self) -> u128 {
        7
    }

    fn policy(&self) -> Arc<PolicyBook> {
        Arc::default()
    }
}

/// No other members.
struct Nobody;

impl Remote for Nobody {
    fn request(&self, _: Shard, _: Vec<u8>, _: Duration) -> BoxFuture<'_, Result<Vec<u8>, RemoteError>> {
        std::future::ready(Err(RemoteError::NoResponders)).boxed()
    }
}
