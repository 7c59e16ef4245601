//! Reconciliation: periodically compares the payment processor's objects with our payments, and applies what no webhook has reported.
//!
//! Webhooks are the fast way; whatever they lose is found here. Each run begins where the last successful one of any member ended, less
//! some overlap for objects in flight; some runs go back far, since a refund may fail, and a dispute be won, months after it was made.

use super::payment_updater::{self, PaymentUpdater, UpdateError, UpdateOutcome};
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use crate::workers::WorkerDependencies;
use chrono::{DateTime, TimeDelta, Utc};
use domain::state_machine::RequestOrigin;
use edge::payment_processor::{ProcessorError, ProcessorListing};
use persistence::metrics::registered;
use persistence::{Leases, StoreError};
use prometheus::{IntCounter, Registry};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use thiserror::Error;
use tokio::time::{Instant, MissedTickBehavior, interval};
use uuid::Uuid;

/// The name of the watermark up to which objects were compared, and of the lease for a run.
const WATERMARK_NAME: &str = "payment processor";

/// The overlap of two runs: clocks differ, and objects are listed some time after they were made.
const OVERLAP: TimeDelta = TimeDelta::hours(1);

/// How far the first run goes back.
const FIRST_LOOKBACK: TimeDelta = TimeDelta::days(1);

/// How far a long run goes back for refunds and disputes, and how often there is one.
const LONG_LOOKBACK: TimeDelta = TimeDelta::days(120);
const LONG_LOOKBACK_INTERVAL: Duration = Duration::from_secs(6 * 60 * 60);

/// How many objects are remembered as applied; beyond it the cache is cleared, and all are applied again, which only costs time.
const CACHE_CAPACITY: usize = 100_000;

/// `None` where no payment processor is configured.
pub(in crate::workers) fn start(parts: &WorkerDependencies) -> anyhow::Result<Option<WorkerTask>> {
    let Stages { config, registry, .. } = &parts.stages;
    let (Some(updater), Some(payments)) = (&parts.payments, &config.payments) else { return Ok(None) };
    let leases = parts.leases.clone();
    let reconciler = Reconciler::register(registry, updater.clone(), leases, payments.reconciles_every)?;
    Ok(Some(task(&Arc::new(reconciler), |reconciler| async move { reconciler.run().await })))
}

/// Reconciles our payments with the processor's.
pub struct Reconciler {
    updater: PaymentUpdater,
    leases: Leases,
    every: Duration,
    failed: IntCounter,
    missed: IntCounter,
    contradicted: IntCounter,
    skipped: IntCounter,
    seen: Mutex<SeenObjects>,
}

/// The objects that this process has applied, so that a run does not repeat them. Losing the cache costs nothing but time.
#[derive(Default)]
struct SeenObjects {
    applied: BTreeSet<String>,
    long_lookback_at: Option<Instant>,
}

#[derive(Debug, Error)]
pub enum ReconciliationError {
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{count} updates could not be delivered, the last one because: {why}")]
    Update { count: usize, why: UpdateError },
}

impl Reconciler {
    /// # Errors
    /// Where the metrics are registered already.
    pub fn register(
        registry: &Registry,
        updater: PaymentUpdater,
        leases: Leases,
        every: Duration,
    ) -> anyhow::Result<Self> {
        let counter = |name, help| registered(registry, IntCounter::new(name, help));
        Ok(Self {
            updater,
            leases,
            every,
            failed: counter(
                "payments_reconcile_failed_total",
                "Reconciliations with the payment processor that failed.",
            )?,
            missed: counter(
                "payments_reconcile_missed_total",
                "Facts of the payment processor that only reconciliation has found.",
            )?,
            contradicted: counter(
                "payments_reconcile_contradicted_total",
                "Facts of the payment processor that contradict a payment.",
            )?,
            skipped: counter(
                "payments_reconcile_passed_over_total",
                "Listed objects of the payment processor that cannot be read, and lists that are too long to be read.",
            )?,
            seen: Mutex::default(),
        })
    }

    /// Reconciles, periodically; of several members one makes each run.
    ///
    /// # Errors
    /// Never; what fails is retried in the next run.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut clock = interval(self.every);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Shorter than the interval, so that the next run finds the lease expired.
        let lasts = self.every.mul_f32(0.9);
        loop {
            clock.tick().await;
            match self.leases.acquire(WATERMARK_NAME, lasts).await {
                // Not released: it lapses before the next comparison is due.
                Ok(Some(_lease)) => self.reconcile_once().await,
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "the lease for comparing the payment processor's books cannot be acquired");
                }
            }
        }
    }

    async fn reconcile_once(&self) {
        match self.compare().await {
            Ok(0) => {}
            Ok(missed) => tracing::warn!(missed, "events of the payment processor were missed"),
            Err(error) => {
                self.failed.inc();
                tracing::warn!(error = %error, "the payment processor's books could not be compared");
            }
        }
    }

    async fn compare(&self) -> Result<u64, ReconciliationError> {
        let began = Utc::now();
        let since =
            self.leases.reconciled_until(WATERMARK_NAME).await?.map_or(began - FIRST_LOOKBACK, |until| until - OVERLAP);
        let missed = self.look_back(began, since).await?;
        self.leases.store_reconciled_until(WATERMARK_NAME, began).await?;
        self.leases.delete_expired().await?;
        Ok(missed)
    }

    /// Reconciles since then, and sometimes far back for refunds and disputes; a long run that failed is repeated by the next one.
    async fn look_back(&self, now: DateTime<Utc>, since: DateTime<Utc>) -> Result<u64, ReconciliationError> {
        let goes_far = self.seen().long_lookback_at.is_none_or(|at| at.elapsed() >= LONG_LOOKBACK_INTERVAL);
        let far = if goes_far { since.min(now - LONG_LOOKBACK) } else { since };
        let missed = self.reconcile_since(since, far).await?;
        if goes_far {
            self.seen().long_lookback_at = Some(Instant::now());
        }
        Ok(missed)
    }

    /// Applies the processor's objects since then, and returns how many our payments had not recorded. A list that fails does not stop the
    /// others.
    async fn reconcile_since(&self, since: DateTime<Utc>, far: DateTime<Utc>) -> Result<u64, ReconciliationError> {
        let cause = Uuid::now_v7();
        let updater = self.updater.for_cause(cause, RequestOrigin::untraced(cause.to_string()));
        let mut run = ReconciliationRun::default();
        // Payments first: the refunds and disputes of a payment that was not known follow it.
        for record in self.usable_items(&mut run, "payments", updater.processor.payments_since(since).await) {
            let name = (record.processor_id.clone(), status_text(&record.status));
            self.apply(&mut run, "payment", name, payment_updater::payment(&updater, record)).await;
        }
        for record in self.usable_items(&mut run, "refunds", updater.processor.refunds_since(far).await) {
            let name = (record.processor_refund_id.clone(), status_text(&record.status));
            self.apply(&mut run, "refund", name, payment_updater::refund(&updater, record)).await;
        }
        for dispute in self.usable_items(&mut run, "disputes", updater.processor.disputes_since(far).await) {
            let name = (dispute.dispute_id.clone(), status_text(&dispute.status));
            self.apply(&mut run, "dispute", name, payment_updater::dispute(&updater, dispute)).await;
        }
        match (run.unlisted, run.why) {
            (Some(error), _) => Err(error.into()),
            (None, Some(why)) => Err(ReconciliationError::Update { count: run.failed_updates, why }),
            (None, None) => Ok(run.missed),
        }
    }

    /// The objects of a list that can be parsed. One that cannot, and will not be in the next run either, is logged and counted once.
    fn usable_items<T>(
        &self,
        run: &mut ReconciliationRun,
        what: &'static str,
        listing: Result<ProcessorListing<T>, ProcessorError>,
    ) -> Vec<T> {
        let listing = match listing {
            Ok(listing) => listing,
            Err(error) => {
                run.unlisted = Some(error);
                return Vec::new();
            }
        };
        if listing.is_cut {
            self.skipped.inc();
            tracing::warn!("the {what} at the payment processor are too many to be looked through to their end");
        }
        for id in listing.unread {
            let name = format!("{id} unread");
            if !self.seen().applied.contains(&name) {
                self.skipped.inc();
                tracing::warn!(processor.id = id, "one of the {what} at the payment processor cannot be read");
                self.seen().remember(name);
            }
        }
        listing.found
    }

    async fn apply(
        &self,
        run: &mut ReconciliationRun,
        what: &'static str,
        (id, status): (String, String),
        update: impl Future<Output = Result<UpdateOutcome, UpdateError>>,
    ) {
        let name = format!("{id} {status}");
        if self.seen().applied.contains(&name) {
            return;
        }
        match update.await {
            Ok(UpdateOutcome::Done { is_new: true }) => {
                run.missed += 1;
                self.missed.inc();
                tracing::warn!(
                    processor.id = id,
                    status,
                    "a {what} at the payment processor of which no event arrived"
                );
            }
            Ok(UpdateOutcome::Done { is_new: false } | UpdateOutcome::NotOurs) => {}
            Ok(UpdateOutcome::Rejected(why)) => {
                self.contradicted.inc();
                tracing::warn!(
                    processor.id = id,
                    status,
                    why,
                    "a {what} at the payment processor contradicts the payment"
                );
            }
            Err(why) => {
                run.failed_updates += 1;
                run.why = Some(why);
                return;
            }
        }
        self.seen().remember(name);
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, SeenObjects> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SeenObjects {
    fn remember(&mut self, name: String) {
        if self.applied.len() >= CACHE_CAPACITY {
            self.applied.clear();
        }
        self.applied.insert(name);
    }
}

#[derive(Default)]
struct ReconciliationRun {
    missed: u64,
    failed_updates: usize,
    why: Option<UpdateError>,
    /// Why a list could not be read.
    unlisted: Option<ProcessorError>,
}

fn status_text(status: &impl Debug) -> String {
    format!("{status:?}")
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Bench, INTENT, eur};
    use super::*;
    use edge::payment_processor::{
        Dispute, DisputeStatus, ProcessorPaymentStatus, ProcessorRefundRecord, ProcessorRefundStatus,
    };

    fn reconciler(bench: &Bench) -> Reconciler {
        let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy("postgres://nobody@127.0.0.1:1/none").unwrap();
        let every = Duration::from_secs(300);
        Reconciler::register(
            &Registry::new(),
            bench.updater(0),
            Leases::new(pool, domain::MemberId(uuid::Uuid::new_v4())),
            every,
        )
        .unwrap()
    }

    async fn missed(reconciler: &Reconciler) -> Result<u64, ReconciliationError> {
        reconciler.reconcile_since(Utc::now(), Utc::now()).await
    }

    fn reversal(id: &str) -> ProcessorRefundRecord {
        ProcessorRefundRecord {
            processor_refund_id: id.to_owned(),
            refund_id: None,
            of: Some(INTENT.to_owned()),
            amount_minor: 100,
            currency: eur(),
            status: ProcessorRefundStatus::Succeeded,
        }
    }

    #[tokio::test]
    async fn unreported_objects_are_applied_and_counted_once() {
        let bench = Bench::open().await;
        bench.set_status(ProcessorPaymentStatus::Paid { charge_id: Some("ch_1".to_owned()) });
        bench.processor.objects().refunds.push(reversal("re_1"));
        let (dispute_id, of) = ("dp_1".to_owned(), Some("ch_1".to_owned()));
        let (amount_minor, currency, status) = (200, eur(), DisputeStatus::Opened);
        let dispute = Dispute { dispute_id, of, amount_minor, currency, status };
        bench.processor.objects().disputes.push(dispute);
        let reconciler = reconciler(&bench);
        assert_eq!(missed(&reconciler).await.unwrap(), 3);
        assert_eq!(missed(&reconciler).await.unwrap(), 0);
        assert_eq!(bench.payment().await.left_minor(), 700);
        bench.processor.objects().disputes[0].status = DisputeStatus::Won;
        assert_eq!(missed(&reconciler).await.unwrap(), 1, "months later");
        assert_eq!(bench.payment().await.left_minor(), 900);
        assert_eq!(reconciler.missed.get(), 4);
    }

    #[tokio::test]
    async fn object_that_cannot_be_applied_is_retried_by_the_next_run_and_delays_no_other() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        assert_eq!(missed(&reconciler).await.unwrap(), 0, "all of it is known");
        let mut refunds = [reversal("re_1"), reversal("re_2")];
        // Its payment cannot be looked up, since the processor does not answer.
        refunds[0].of = Some("pi_slow".to_owned());
        bench.processor.objects().refunds.extend(refunds);
        bench.processor.objects().silent_on = Some("pi_slow".to_owned());
        assert!(matches!(missed(&reconciler).await, Err(ReconciliationError::Update { count: 1, .. })));
        assert_eq!(bench.payment().await.left_minor(), 900);
        bench.processor.fail_next(ProcessorError::Later("down".to_owned()));
        assert!(matches!(missed(&reconciler).await, Err(ReconciliationError::Processor(_))));
    }

    #[tokio::test]
    async fn contradiction_is_counted_and_does_not_stop_the_run() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        bench.processor.objects().payments.get_mut(INTENT).unwrap().processor_id = "pi_2".to_owned();
        assert_eq!(missed(&reconciler).await.unwrap(), 0);
        assert_eq!(reconciler.contradicted.get(), 1, "paid twice");
    }

    #[tokio::test]
    async fn money_paid_otherwise_of_which_no_event_arrived_is_under_review() {
        let bench = Bench::open().await;
        let reconciler = reconciler(&bench);
        bench.set_status(ProcessorPaymentStatus::Paid { charge_id: None });
        bench.processor.objects().payments.get_mut(INTENT).unwrap().amount_minor = 840;
        assert_eq!(missed(&reconciler).await.unwrap(), 0);
        assert_eq!(reconciler.contradicted.get(), 1);
        let phase = bench.payment().await.phase;
        assert!(matches!(phase, domain::payment::Phase::UnderReview { amount_minor: 840, .. }), "{phase:?}");
    }

    #[tokio::test]
    async fn long_lookback_is_repeated_until_it_succeeds_and_then_periodically() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        let now = Utc::now();
        let asked_for = || bench.processor.objects().refunds_listed_since.clone();
        bench.processor.fail_next(ProcessorError::Later("down".to_owned()));
        assert!(reconciler.look_back(now, now).await.is_err());
        for _ in 0..2 {
            reconciler.look_back(now, now).await.unwrap();
        }
        assert_eq!(
            asked_for(),
            [now - LONG_LOOKBACK, now - LONG_LOOKBACK, now],
            "the one that broke off is made again"
        );
    }

    #[tokio::test]
    async fn unreadable_objects_and_cut_off_lists_are_counted_and_do_not_stop_the_run() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        bench.processor.objects().refunds.push(reversal("re_1"));
        bench.processor.objects().unread = (vec!["re_odd".to_owned()], true);
        let (dispute_id, of) = ("dp_1".to_owned(), Some("ch_1".to_owned()));
        let (amount_minor, currency, status) = (200, eur(), DisputeStatus::Opened);
        bench.processor.objects().disputes.push(Dispute { dispute_id, of, amount_minor, currency, status });
        let now = Utc::now();
        assert_eq!(reconciler.look_back(now, now).await.unwrap(), 2, "the turn goes through");
        assert_eq!(bench.payment().await.left_minor(), 700);
        assert_eq!(reconciler.skipped.get(), 2);
        reconciler.look_back(now, now).await.unwrap();
        assert_eq!(reconciler.skipped.get(), 3, "one is known, the list is as long as before");
        assert_eq!(bench.processor.objects().refunds_listed_since, [now - LONG_LOOKBACK, now]);
    }

    #[tokio::test]
    async fn failed_list_does_not_stop_the_other_lists() {
        let bench = Bench::deposited().await;
        let reconciler = reconciler(&bench);
        bench.processor.objects().refunds.push(reversal("re_1"));
        bench.processor.fail_next(ProcessorError::Later("payments cannot be listed".to_owned()));
        assert!(matches!(missed(&reconciler).await, Err(ReconciliationError::Processor(_))));
        assert_eq!(bench.payment().await.left_minor(), 900);
    }
}
