//! Compares the payment processor's books with ours, again and again: what it did and nobody told us of, we tell ourselves.
//!
//! Webhooks are the quick way, and lose nothing that this would not find. Each turn begins where the last one that went through ended,
//! whoever did it, less some time for what was under way; now and then it goes back far, since a refund may fail, and a dispute be won,
//! months after it was made.

use super::told::{self, Teller, Told, Untold};
use chrono::{DateTime, TimeDelta, Utc};
use edge::processor::{Listing, ProcessorError};
use persistence::{Leases, StoreError};
use prometheus::{IntCounter, Registry};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use thiserror::Error;
use tokio::time::{Instant, MissedTickBehavior, interval};
use uuid::Uuid;

/// Of the books in which it is kept how far they were compared, and of the turn.
const BOOKS: &str = "payment processor";

/// What is looked at again each turn: clocks differ, and objects are listed a while after they were made.
const AGAIN: TimeDelta = TimeDelta::hours(1);

/// How far a first turn goes back.
const FIRST: TimeDelta = TimeDelta::days(1);

/// How far refunds and disputes are looked at now and then, and how often.
const FAR: TimeDelta = TimeDelta::days(120);
const FAR_EVERY: Duration = Duration::from_secs(6 * 60 * 60);

/// What is remembered of what our payments know already; beyond it all of it is told anew, which costs time and no more.
const REMEMBERED: usize = 100_000;

/// See the module.
pub struct Reconciler {
    teller: Teller,
    leases: Leases,
    every: Duration,
    failed: IntCounter,
    missed: IntCounter,
    contradicted: IntCounter,
    passed_over: IntCounter,
    memory: Mutex<Memory>,
}

/// What this process has told, so that it is not told again each turn. Losing it costs nothing.
#[derive(Default)]
struct Memory {
    told: BTreeSet<String>,
    went_far: Option<Instant>,
}

#[derive(Debug, Error)]
pub enum Incomplete {
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{count} could not be told, the last one because: {why}")]
    Untold { count: usize, why: Untold },
}

impl Reconciler {
    /// # Errors
    /// Where the metrics are registered already.
    pub fn register(registry: &Registry, teller: Teller, leases: Leases, every: Duration) -> anyhow::Result<Self> {
        let counter = |name, help| -> anyhow::Result<IntCounter> {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        Ok(Self {
            teller,
            leases,
            every,
            failed: counter(
                "payments_reconcile_failed_total",
                "Comparisons with the payment processor's books that did not go through.",
            )?,
            missed: counter(
                "payments_reconcile_missed_total",
                "What the payment processor did and only a comparison of the books has told.",
            )?,
            contradicted: counter(
                "payments_reconcile_contradicted_total",
                "What the payment processor did and a payment here contradicts.",
            )?,
            passed_over: counter(
                "payments_reconcile_passed_over_total",
                "What the payment processor lists and cannot be read, and lists that are too long to be looked through.",
            )?,
            memory: Mutex::default(),
        })
    }

    /// Works, turn by turn; of several members one does each.
    ///
    /// # Errors
    /// Never; what fails is done again in the next turn.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut clock = interval(self.every);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Short of the pause, so that the next one finds it over.
        let lasts = self.every.mul_f32(0.9);
        loop {
            clock.tick().await;
            match self.leases.acquire(BOOKS, lasts).await {
                // Not released: it lapses before the next comparison is due.
                Ok(Some(_lease)) => self.turn().await,
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "the lease for comparing the payment processor's books cannot be acquired")
                }
            }
        }
    }

    async fn turn(&self) {
        match self.compare().await {
            Ok(0) => {}
            Ok(missed) => tracing::warn!(missed, "nobody had told of what the payment processor did"),
            Err(error) => {
                self.failed.inc();
                tracing::warn!(error = %error, "the payment processor's books could not be compared");
            }
        }
    }

    async fn compare(&self) -> Result<u64, Incomplete> {
        let began = Utc::now();
        let since = self.leases.compared(BOOKS).await?.map_or(began - FIRST, |until| until - AGAIN);
        let missed = self.look_back(began, since).await?;
        self.leases.store_compared(BOOKS, began).await?;
        self.leases.forget().await?;
        Ok(missed)
    }

    /// Looks since then, and now and then far back for refunds and disputes; a far look that broke off is made again in the next turn.
    async fn look_back(&self, now: DateTime<Utc>, since: DateTime<Utc>) -> Result<u64, Incomplete> {
        let goes_far = self.memory().went_far.is_none_or(|at| at.elapsed() >= FAR_EVERY);
        let far = if goes_far { since.min(now - FAR) } else { since };
        let missed = self.look(since, far).await?;
        if goes_far {
            self.memory().went_far = Some(Instant::now());
        }
        Ok(missed)
    }

    /// Tells what the processor has made since, and how many our payments had not heard of. A list that cannot be had keeps no other from being
    /// told.
    async fn look(&self, since: DateTime<Utc>, far: DateTime<Utc>) -> Result<u64, Incomplete> {
        let cause = Uuid::now_v7();
        let teller = self.teller.for_cause(cause, cause.to_string());
        let mut found = Found::default();
        // Payments first: what was taken back of one that nobody had heard of follows it.
        for standing in self.listed(&mut found, "payments", teller.processor.payments_since(since).await) {
            let name = (standing.processor_id.clone(), said(&standing.status));
            self.tell(&mut found, "payment", name, told::payment(&teller, standing)).await;
        }
        for standing in self.listed(&mut found, "refunds", teller.processor.refunds_since(far).await) {
            let name = (standing.processor_refund_id.clone(), said(&standing.status));
            self.tell(&mut found, "refund", name, told::refund(&teller, standing)).await;
        }
        for dispute in self.listed(&mut found, "disputes", teller.processor.disputes_since(far).await) {
            let name = (dispute.dispute_id.clone(), said(&dispute.status));
            self.tell(&mut found, "dispute", name, told::dispute(&teller, dispute)).await;
        }
        match (found.unlisted, found.why) {
            (Some(error), _) => Err(error.into()),
            (None, Some(why)) => Err(Incomplete::Untold { count: found.untold, why }),
            (None, None) => Ok(found.missed),
        }
    }

    /// What of a list can be told. What cannot, and would not in the next turn either, is said and counted, each once.
    fn listed<T>(&self, found: &mut Found, what: &'static str, listing: Result<Listing<T>, ProcessorError>) -> Vec<T> {
        let listing = match listing {
            Ok(listing) => listing,
            Err(error) => {
                found.unlisted = Some(error);
                return Vec::new();
            }
        };
        if listing.is_cut {
            self.passed_over.inc();
            tracing::warn!("the {what} at the payment processor are too many to be looked through to their end");
        }
        for id in listing.unread {
            let name = format!("{id} unread");
            if !self.memory().told.contains(&name) {
                self.passed_over.inc();
                tracing::warn!(processor.id = id, "one of the {what} at the payment processor cannot be read");
                self.memory().remember(name);
            }
        }
        listing.found
    }

    async fn tell(
        &self,
        found: &mut Found,
        what: &'static str,
        (id, status): (String, String),
        telling: impl Future<Output = Result<Told, Untold>>,
    ) {
        let name = format!("{id} {status}");
        if self.memory().told.contains(&name) {
            return;
        }
        match telling.await {
            Ok(Told::Done { is_news: true }) => {
                found.missed += 1;
                self.missed.inc();
                tracing::warn!(processor.id = id, status, "a {what} at the payment processor that nobody had told of");
            }
            Ok(Told::Done { is_news: false } | Told::NotOurs) => {}
            Ok(Told::Rejected(why)) => {
                self.contradicted.inc();
                tracing::warn!(
                    processor.id = id,
                    status,
                    why,
                    "a {what} at the payment processor contradicts the payment"
                );
            }
            Err(why) => {
                found.untold += 1;
                found.why = Some(why);
                return;
            }
        }
        self.memory().remember(name);
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    fn remember(&mut self, name: String) {
        if self.told.len() >= REMEMBERED {
            self.told.clear();
        }
        self.told.insert(name);
    }
}

#[derive(Default)]
struct Found {
    missed: u64,
    untold: usize,
    why: Option<Untold>,
    /// Why a list was not to be had.
    unlisted: Option<ProcessorError>,
}

fn said(status: &impl Debug) -> String {
    format!("{status:?}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::testing::{Bench, INTENT, eur};
    use super::*;
    use edge::processor::{Dispute, DisputeStatus, RefundStanding, RefundStatus, Status};

    fn reconciler(bench: &Bench) -> Reconciler {
        let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy("postgres://nobody@127.0.0.1:1/none").unwrap();
        let every = Duration::from_secs(300);
        Reconciler::register(
            &Registry::new(),
            bench.teller(0),
            Leases::new(pool, domain::MemberId(uuid::Uuid::new_v4())),
            every,
        )
        .unwrap()
    }

    async fn missed(reconciler: &Reconciler) -> Result<u64, Incomplete> {
        reconciler.look(Utc::now(), Utc::now()).await
    }

    fn reversal(id: &str) -> RefundStanding {
        RefundStanding {
            processor_refund_id: id.to_owned(),
            refund_id: None,
            of: Some(INTENT.to_owned()),
            amount_minor: 100,
            currency: eur(),
            status: RefundStatus::Succeeded,
        }
    }

    #[tokio::test]
    async fn what_nobody_told_of_is_told_and_counted_once() {
        let bench = Bench::open().await;
        bench.processor.knows(Status::Paid { charge_id: Some("ch_1".to_owned()) });
        bench.processor.refunds.lock().unwrap().push(reversal("re_1"));
        let (dispute_id, of) = ("dp_1".to_owned(), Some("ch_1".to_owned()));
        let (amount_minor, currency, status) = (200, eur(), DisputeStatus::Opened);
        let dispute = Dispute { dispute_id, of, amount_minor, currency, status };
        bench.processor.disputes.lock().unwrap().push(dispute);
        let reconciler = reconciler(&bench);
        assert_eq!(missed(&reconciler).await.unwrap(), 3);
        assert_eq!(missed(&reconciler).await.unwrap(), 0);
        assert_eq!(bench.payment().await.left_minor(), 700);
        bench.processor.disputes.lock().unwrap()[0].status = DisputeStatus::Won;
        assert_eq!(missed(&reconciler).await.unwrap(), 1, "months later");
        assert_eq!(bench.payment().await.left_minor(), 900);
        assert_eq!(reconciler.missed.get(), 4);
    }

    #[tokio::test]
    async fn what_cannot_be_told_is_told_in_the_next_turn_and_holds_nothing_else_up() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        assert_eq!(missed(&reconciler).await.unwrap(), 0, "all of it is known");
        let mut refunds = [reversal("re_1"), reversal("re_2")];
        // Whose it is cannot be asked, since nobody answers.
        refunds[0].of = Some("pi_slow".to_owned());
        bench.processor.refunds.lock().unwrap().extend(refunds);
        bench.processor.never_answers_for("pi_slow");
        assert!(matches!(missed(&reconciler).await, Err(Incomplete::Untold { count: 1, .. })));
        assert_eq!(bench.payment().await.left_minor(), 900);
        bench.processor.fails(ProcessorError::Later("down".to_owned()));
        assert!(matches!(missed(&reconciler).await, Err(Incomplete::Processor(_))));
    }

    #[tokio::test]
    async fn a_contradiction_is_counted_and_goes_on() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        bench.processor.standing.lock().unwrap().as_mut().unwrap().processor_id = "pi_2".to_owned();
        assert_eq!(missed(&reconciler).await.unwrap(), 0);
        assert_eq!(reconciler.contradicted.get(), 1, "paid twice");
    }

    #[tokio::test]
    async fn refunds_and_disputes_are_looked_at_far_back_until_it_succeeds_and_then_now_and_then() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        let now = Utc::now();
        let asked_for = || bench.processor.refunds_asked_since.lock().unwrap().clone();
        bench.processor.fails(ProcessorError::Later("down".to_owned()));
        assert!(reconciler.look_back(now, now).await.is_err());
        for _ in 0..2 {
            reconciler.look_back(now, now).await.unwrap();
        }
        assert_eq!(asked_for(), [now - FAR, now - FAR, now], "the one that broke off is made again");
    }

    #[tokio::test]
    async fn what_cannot_be_read_and_lists_without_end_are_counted_and_keep_nothing_else_from_being_told() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        bench.processor.refunds.lock().unwrap().push(reversal("re_1"));
        *bench.processor.unread.lock().unwrap() = (vec!["re_odd".to_owned()], true);
        let (dispute_id, of) = ("dp_1".to_owned(), Some("ch_1".to_owned()));
        let (amount_minor, currency, status) = (200, eur(), DisputeStatus::Opened);
        bench.processor.disputes.lock().unwrap().push(Dispute { dispute_id, of, amount_minor, currency, status });
        let now = Utc::now();
        assert_eq!(reconciler.look_back(now, now).await.unwrap(), 2, "the turn goes through");
        assert_eq!(bench.payment().await.left_minor(), 700);
        assert_eq!(reconciler.passed_over.get(), 2);
        reconciler.look_back(now, now).await.unwrap();
        assert_eq!(reconciler.passed_over.get(), 3, "one is known, the list is as long as before");
        assert_eq!(*bench.processor.refunds_asked_since.lock().unwrap(), [now - FAR, now]);
    }

    #[tokio::test]
    async fn a_list_that_cannot_be_had_keeps_no_other_from_being_told() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        bench.processor.refunds.lock().unwrap().push(reversal("re_1"));
        bench.processor.fails(ProcessorError::Later("payments cannot be listed".to_owned()));
        assert!(matches!(missed(&reconciler).await, Err(Incomplete::Processor(_))));
        assert_eq!(bench.payment().await.left_minor(), 900);
    }
}
