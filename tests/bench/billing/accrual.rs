//! The accounts, and the part of a replica that charges them.

use super::OF_ONE;
use actors::shell_dependencies::Environment;
use actors::{CommandContext, Host, sharding};
use anyhow::{Context, ensure};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::billing_account::{BillingAccount, Holder, HolderPlan, Instruction, MeterRun, UsageMeter, Window};
use domain::commit::{Commit, CommitOutcome, Epoch, Timer};
use domain::ledger::{Posting, PostingKind};
use domain::money::{HourlyRate, MicroAmount, Price};
use domain::policy::{PolicyKey, PolicyValue};
use domain::resend_timer::ResendTimer;
use domain::state_machine::RequestOrigin;
use domain::{
    Action, AllocationId, BillingAccountId, EntityKind, EntityRef, Machine, PaymentId, Permit, Principal, Timestamp,
};
use futures::StreamExt;
use hdrhistogram::Histogram;
use persistence::membership::Member;
use persistence::{Cluster, Committer, Loader, Reads};
use prometheus::Registry;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use supervisors::cluster::ClusterView;
use supervisors::entity_store::PgStore;
use supervisors::metrics::EventMetrics;
use supervisors::workers::accrual::Accrual;
use test_host::{NoEffects, PgMember, TestEnvironment, TestHost};
use tokio::sync::Notify;
use uuid::Uuid;

/// Longer than it takes to open a million accounts, so that no window ends by itself; all windows are less than the hour after which an
/// account queries its allocations.
const WINDOW: TimeDelta = TimeDelta::seconds(WINDOW_SECONDS);
const WINDOW_SECONDS: i64 = 300;

/// Minor units: more than all the windows cost.
const BALANCE: i64 = 50_000_000;

/// Accounts that get other commands meanwhile, and the pause between two of these.
const ASKERS: usize = 16;
const PAUSE: Duration = Duration::from_millis(2);

/// The timeout of a window.
const WAIT_TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) struct AccrualBench {
    pool: PgPool,
    committer: Committer,
    host: Arc<Host>,
    environment: Arc<TestEnvironment>,
    registry: Registry,
    accounts: usize,
    windows: AtomicU64,
    askers: Vec<BillingAccount>,
    deposits: AtomicI64,
    permit: Permit,
}

/// Latencies of commands, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitTimes {
    pub p50: f64,
    pub p99: f64,
}

impl AccrualBench {
    pub(crate) async fn prepare(pool: PgPool, accounts: usize) -> anyhow::Result<Self> {
        let member = PgMember::start(&pool).await;
        let (me, registry, committer) = (member.id, member.registry.clone(), member.committer.clone());
        let terms: Vec<_> = member.terms().collect();
        member.drop_published();
        let reads = Reads::new(pool.clone());
        let store = PgStore {
            committer: committer.clone(),
            reads: reads.clone(),
            loader: Loader::start(&reads),
            fenced: Arc::new(Notify::new()),
            metrics: EventMetrics::register(&registry)?,
            cluster: Cluster::new(pool.clone()),
        };
        let environment = Arc::new(TestEnvironment::default());
        environment.set_policy(PolicyKey::BillingWindow, PolicyValue::Int(WINDOW_SECONDS));
        let host = TestHost::start(Arc::new(store), terms, Arc::clone(&environment), Arc::new(NoEffects)).await;
        let directory = host.directory;
        let host = Arc::clone(directory.host());
        let began_at = environment.now();
        let mut all = funded(accounts, began_at)?;
        let askers: Vec<_> = funded(ASKERS, began_at)?.into_iter().map(without_meters).collect();
        all.extend(askers.iter().cloned());
        let opened = futures::stream::iter(all.iter().map(|account| open(&committer, &host, account)));
        let opened: Vec<_> = opened.buffer_unordered(1024).collect().await;
        opened.into_iter().collect::<anyhow::Result<()>>()?;
        sqlx::query("VACUUM ANALYZE").execute(&pool).await?;
        sqlx::query("CHECKPOINT").execute(&pool).await?;
        let member = Member { id: me, name: "bench".into(), started_at: Utc::now(), details: serde_json::Value::Null };
        let view = Arc::new(ClusterView::new(member));
        let accrual =
            Accrual::register(&registry, directory, view, reads, Arc::clone(&environment) as Arc<dyn Environment>)?;
        tokio::spawn(accrual.run());
        let permit = authorize(&Principal::system("bench"), Action::Advance)?;
        let (windows, deposits) = (AtomicU64::new(0), AtomicI64::new(0));
        Ok(Self { pool, committer, host, environment, registry, accounts, windows, askers, deposits, permit })
    }

    /// Ends a window and returns the time until the last account is charged.
    pub(crate) async fn window(&self) -> anyhow::Result<Duration> {
        let windows = self.windows.fetch_add(1, Ordering::SeqCst) + 1;
        let charged = windows * self.accounts as u64;
        let began = Instant::now();
        self.environment.advance(WINDOW);
        while self.count("billing_accrual_late_seconds").0 < charged {
            ensure!(began.elapsed() < WAIT_TIMEOUT, "the window of {} accounts does not end", self.accounts);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(began.elapsed())
    }

    /// The latencies of commands while nothing is due.
    pub(crate) async fn measure_requests(&self, each: Duration) -> anyhow::Result<WaitTimes> {
        let enough = AtomicBool::new(false);
        let (waited, ()) = tokio::try_join!(self.send_requests_until(&enough), async {
            tokio::time::sleep(each).await;
            enough.store(true, Ordering::SeqCst);
            anyhow::Ok(())
        })?;
        Ok(waited)
    }

    pub(crate) async fn measure_requests_during_a_window(&self) -> anyhow::Result<WaitTimes> {
        let enough = AtomicBool::new(false);
        let (waited, ()) = tokio::try_join!(self.send_requests_until(&enough), async {
            self.window().await?;
            enough.store(true, Ordering::SeqCst);
            anyhow::Ok(())
        })?;
        Ok(waited)
    }

    async fn send_requests_until(&self, enough: &AtomicBool) -> anyhow::Result<WaitTimes> {
        let asking = self.askers.iter().map(|account| async move {
            let mut micros = Histogram::<u64>::new(3)?;
            while !enough.load(Ordering::SeqCst) {
                let asked = Instant::now();
                self.deposit(account).await?;
                micros.record(u64::try_from(asked.elapsed().as_micros())?)?;
                tokio::time::sleep(PAUSE).await;
            }
            anyhow::Ok(micros)
        });
        let mut micros = Histogram::<u64>::new(3)?;
        for one in futures::future::try_join_all(asking).await? {
            micros.add(one)?;
        }
        let milliseconds = |quantile| micros.value_at_quantile(quantile) as f64 / 1000.0;
        Ok(WaitTimes { p50: milliseconds(0.5), p99: milliseconds(0.99) })
    }

    async fn deposit(&self, account: &BillingAccount) -> anyhow::Result<()> {
        let command = Instruction::Deposit {
            payment_id: PaymentId(Uuid::now_v7()),
            holder: account.holder.clone(),
            currency: account.currency.clone(),
            amount_minor: 1,
        };
        // Measured without the fake clock, which is set forward by a window meanwhile.
        let until = self.environment.now() + WINDOW + TimeDelta::seconds(10);
        let asked = CommandContext::new(&self.permit, "bench", until);
        self.host.ask::<BillingAccount>(account.id.0, command.into(), asked).await?;
        self.deposits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Asserts that every allocation was charged for each window, and that the ledger is balanced.
    pub(crate) async fn check(&self) -> anyhow::Result<()> {
        let windows = i64::try_from(self.windows.load(Ordering::SeqCst))?;
        let charged: (i64, i64) =
            sqlx::query_as("SELECT count(*), count(DISTINCT (allocation, used_from)) FROM ledger WHERE kind = 'usage'")
                .fetch_one(&self.pool)
                .await?;
        let expected = windows * i64::try_from(self.accounts * OF_ONE)?;
        ensure!(charged == (expected, expected), "{charged:?} postings of {windows} windows, not {expected}");
        let report = Reads::new(self.pool.clone()).verify_ledger().await?;
        ensure!(report.holds(), "the ledger: {:?}", report.disagreements.first());
        let paid_in = i64::try_from(self.accounts + ASKERS)? + self.deposits.load(Ordering::SeqCst);
        ensure!(i64::try_from(report.postings)? == expected + paid_in, "{} postings in all", report.postings);
        self.committer.close().await;
        Ok(())
    }

    pub(crate) async fn server_version(&self) -> anyhow::Result<String> {
        Ok(sqlx::query_scalar("SHOW server_version").fetch_one(&self.pool).await?)
    }

    /// The mean number of transitions in one statement.
    pub(crate) fn batch_mean(&self) -> f64 {
        let (statements, transitions) = self.count("commit_batch_transitions");
        transitions / (statements as f64).max(1.0)
    }

    /// Count and sum of a histogram.
    fn count(&self, name: &str) -> (u64, f64) {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let histogram =
            family.and_then(|family| family.get_metric().first().map(|metric| metric.get_histogram().clone()));
        histogram.map_or((0, 0.0), |histogram| (histogram.get_sample_count(), histogram.get_sample_sum()))
    }
}

/// Accounts with allocations that have just become active, in mixed order, as in operation.
fn funded(accounts: usize, began_at: Timestamp) -> anyhow::Result<Vec<BillingAccount>> {
    let price = Price::new("EUR", 249)?;
    let balance = MicroAmount::of_minor(BALANCE).context("so much can be counted")?;
    let mut allocations: Vec<Vec<AllocationId>> = vec![Vec::new(); accounts];
    for n in 0..accounts * OF_ONE {
        allocations[n % accounts].push(AllocationId(Uuid::now_v7()));
    }
    let account = |allocations: Vec<AllocationId>| {
        let meter = |id| {
            let run = MeterRun {
                from: began_at,
                billed_until: began_at,
                charged: MicroAmount::ZERO,
                written_off: MicroAmount::ZERO,
                cut_at: None,
            };
            let rate = HourlyRate::of(&price, 1);
            (id, UsageMeter { user_id: None, rate, held: MicroAmount::ZERO, run: Some(run) })
        };
        let meters: BTreeMap<_, _> = allocations.into_iter().map(meter).collect();
        BillingAccount {
            id: BillingAccountId(Uuid::new_v4()),
            holder: Holder::User(Uuid::new_v4().to_string().into()),
            plan: HolderPlan::default(),
            currency: price.currency.clone(),
            balance,
            credit_left: MicroAmount::ZERO,
            credit_spent: MicroAmount::ZERO,
            postings: 1,
            meters,
            ended: BTreeMap::new(),
            window: Some(Window { began_at, ends_at: began_at + WINDOW }),
            is_low: false,
            depletion: None,
            // An account with old allocations queries them once an hour.
            again: Some(ResendTimer::first(began_at - TimeDelta::days(2)).next(began_at)),
            moved: BTreeMap::new(),
            refunded: BTreeMap::new(),
            opened_at: began_at,
        }
    };
    Ok(allocations.into_iter().map(account).collect())
}

fn without_meters(account: BillingAccount) -> BillingAccount {
    BillingAccount { meters: BTreeMap::new(), window: None, again: None, ..account }
}

/// Commits the account with its balance.
async fn open(committer: &Committer, host: &Host, account: &BillingAccount) -> anyhow::Result<()> {
    let shard = sharding::shard_of(account.id.0);
    let given = Posting {
        number: 1,
        kind: PostingKind::Credit,
        amount: account.balance,
        currency: account.currency.clone(),
        balance: account.balance,
        usage: None,
        source: None,
        reason: Some("to spend".to_owned()),
    };
    let commit = Commit {
        entity: EntityRef { kind: EntityKind::BillingAccount, id: account.id.0 },
        shard,
        epoch: host.term(shard).map_or(Epoch(0), |term| term.epoch),
        expected_version: 0,
        snapshot: serde_json::to_string(account)?,
        from_state: None,
        to_state: account.state(),
        keys: account.keys(),
        claims: domain::commit::SetChange::default(),
        terms: domain::commit::SetChange::default(),
        timer: account.timer().map(|wake_at| Timer { wake_at, deadline_at: None, reason: String::new() }),
        at: account.opened_at,
        command_name: "open",
        why: "opened by an operator".to_owned(),
        actor: "system:bench".to_owned(),
        origin: RequestOrigin::untraced("bench"),
        audit: Vec::new(),
        outbox: Vec::new(),
        postings: vec![given],
        summands: Vec::new(),
        command: None,
        requires: Vec::new(),
        patient: false,
    };
    let outcome = committer.commit(commit).await;
    ensure!(outcome == CommitOutcome::Applied, "{outcome:?}");
    Ok(())
}
