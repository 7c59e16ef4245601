//! The ledger: committed with the transition or not at all, never changed, and summed.

use crate::test_store::{TestStore, bare, create, next};
use domain::commit::{Commit, CommitOutcome};
use domain::id::{AllocationId, BillingAccountId, EntityKind, EntityRef, PaymentId};
use domain::ledger::{Posting, PostingKind, PostingSource, UsagePeriod};
use domain::money::{Currency, MicroAmount};
use domain::state_machine::Timestamp;
use local_servers::test_database::TestDatabase;
use persistence::queries::{LedgerFilter, LedgerPosition, LedgerSum};
use persistence::{CommitterConfig, Reads};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use std::time::Duration;
use uuid::Uuid;

fn allocation(n: u128) -> AllocationId {
    AllocationId(Uuid::from_u128(0xA110_C000 + n))
}

fn second(n: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + n, 0).unwrap()
}

fn posting(number: i64, kind: PostingKind, amount: i64, balance: i64) -> Posting {
    let currency = Currency::parse("EUR").unwrap();
    Posting {
        number,
        kind,
        amount: MicroAmount::of(amount),
        currency,
        balance: MicroAmount::of(balance),
        usage: None,
        source: None,
        reason: None,
    }
}

fn usage(number: i64, amount: i64, balance: i64, of: u128, window: i64) -> Posting {
    let (from, until) = (second(window), second(window + 1));
    let usage =
        Some(UsagePeriod { allocation_id: allocation(of), from, until, cost: MicroAmount::of(amount * (window + 1)) });
    Posting { usage, ..posting(number, PostingKind::Usage, amount, balance) }
}

/// The first transition of account `n`, with its own balance after its postings.
fn account(n: u32, balance: i64, postings: Vec<Posting>) -> Commit {
    let made = bare(create(n));
    let entity = EntityRef { kind: EntityKind::BillingAccount, id: made.entity.id };
    let snapshot = format!(r#"{{"balance": {balance}, "postings": {}}}"#, postings.len());
    Commit { entity, snapshot, to_state: "open", postings, ..made }
}

fn then(before: &Commit, balance: i64, count: i64, postings: Vec<Posting>) -> Commit {
    let snapshot = format!(r#"{{"balance": {balance}, "postings": {count}}}"#);
    Commit { snapshot, postings, ..bare(next(before)) }
}

#[tokio::test]
async fn patient_transitions_are_written_with_a_bound_of_postings_per_statement() {
    let change = |config: &mut CommitterConfig| (config.workers, config.patient_postings) = (1, 5);
    let store = TestStore::with(TestDatabase::fresh().await, change).await;
    let two = || vec![posting(1, PostingKind::Credit, 1, 1), posting(2, PostingKind::Credit, 1, 2)];
    let patient = |n| Commit { patient: true, ..account(n, 2, two()) };
    let holder = store.hold_shards().await;
    let (first, rest) = (patient(0), (1..10).map(patient).collect::<Vec<_>>());
    let release = async {
        store.until_blocked(1).await;
        let release = async {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            holder.rollback().await.unwrap();
        };
        futures::future::join(store.commit_all(&rest), release).await
    };
    let (first, (rest, ())) = futures::future::join(store.commit(&first), release).await;
    assert!(rest.iter().chain([&first]).all(|outcome| *outcome == CommitOutcome::Applied), "{rest:?}");
    assert_eq!((store.batches(), store.count("ledger").await), ((6, 10.0), 20), "one, and then two by two");
}

#[tokio::test]
async fn postings_are_committed_with_their_transition_and_add_up() {
    let store = TestStore::new().await;
    let given = Posting { reason: Some("a gift".into()), ..posting(1, PostingKind::Credit, 1_000, 1_000) };
    let first = account(1, 1_000, vec![given]);
    assert_eq!(store.commit(&first).await, CommitOutcome::Applied);
    let second = then(&first, 700, 3, vec![usage(2, 100, 900, 1, 0), usage(3, 200, 700, 2, 0)]);
    assert_eq!(store.commit(&second).await, CommitOutcome::Applied);
    let others = account(2, 0, Vec::new());
    assert_eq!(store.commit(&others).await, CommitOutcome::Applied);

    let reads = store.reads();
    let report = reads.verify_ledger().await.unwrap();
    assert!(report.holds() && report.difference() == 0, "{report:?}");
    assert_eq!((report.accounts, report.postings), (2, 3));
    let books = &report.books["EUR"];
    assert_eq!((books["prepaid"], books["revenue"], books["adjustments"]), (700, 300, -1_000));

    let account = BillingAccountId(first.entity.id);
    let page = reads.ledger(account, &LedgerFilter::default(), None, 2).await.unwrap();
    let seen: Vec<_> = page.items.iter().map(|row| (row.number, row.effect.get(), row.balance.get())).collect();
    assert_eq!((seen, page.next), (vec![(3, -200, 700), (2, -100, 900)], Some(2)));
    let last = reads.ledger(account, &LedgerFilter::default(), page.next, 2).await.unwrap();
    assert_eq!((last.items[0].reason.as_deref(), last.items.len(), last.next), (Some("a gift"), 1, None));
    let versions: Vec<i64> =
        sqlx::query_scalar("SELECT version FROM ledger ORDER BY number").fetch_all(store.pool()).await.unwrap();
    assert_eq!(versions, [1, 2, 2]);
}

#[tokio::test]
async fn window_that_is_charged_twice_is_refused_alone() {
    let store = TestStore::new().await;
    let first = account(1, -100, vec![usage(1, 100, -100, 1, 0)]);
    assert_eq!(store.commit(&first).await, CommitOutcome::Applied);
    let repeated = then(&first, -200, 2, vec![usage(2, 100, -200, 1, 0)]);
    let (twice, other) = tokio::join!(store.commit(&repeated), async {
        let other = account(2, -7, vec![usage(1, 7, -7, 2, 0)]);
        store.commit(&other).await
    });
    assert_eq!((twice, other), (CommitOutcome::Refused { constraint: "ledger_window".into() }, CommitOutcome::Applied));
    // A refused transition has written nothing.
    let number = then(&first, -200, 1, vec![usage(1, 100, -200, 1, 1)]);
    assert_eq!(store.commit(&number).await, CommitOutcome::Refused { constraint: "ledger_pkey".into() });
    let stale = Commit { expected_version: 7, ..then(&first, -200, 2, vec![usage(2, 100, -200, 1, 1)]) };
    assert_eq!(store.commit(&stale).await, CommitOutcome::Conflict);
    assert_eq!(store.count("ledger").await, 2);
    assert!(store.reads().verify_ledger().await.unwrap().holds());
}

#[tokio::test]
async fn postings_cannot_be_changed_and_unbalanced_ones_not_be_written() {
    let store = TestStore::new().await;
    store.commit(&account(1, 100, vec![posting(1, PostingKind::Credit, 100, 100)])).await;
    for statement in ["UPDATE ledger SET amount = 1", "DELETE FROM ledger", "TRUNCATE ledger"] {
        let error = sqlx::query(statement).execute(store.pool()).await.unwrap_err();
        assert!(error.to_string().contains("append-only"), "{statement}: {error}");
    }
    for (debit, credit, amount) in
        [("prepaid", "prepaid", 1), ("prepaid", "revenue", 0), ("prepaid", "revenue", -1), ("prepaid", "pocket", 1)]
    {
        let insert = sqlx::query(
            "INSERT INTO ledger (account, number, version, kind, debit, credit, amount, currency, balance, at)
             VALUES (gen_random_uuid(), 1, 1, 'usage', $1, $2, $3, 'EUR', 0, now())",
        );
        let error = insert.bind(debit).bind(credit).bind(amount).execute(store.pool()).await.unwrap_err();
        assert!(error.to_string().contains("check constraint"), "{debit} {credit} {amount}: {error}");
    }
    assert_eq!(store.count("ledger").await, 1);
}

#[tokio::test]
async fn ledger_discrepancy_is_found() {
    let store = TestStore::new().await;
    let right = account(1, 100, vec![posting(1, PostingKind::Credit, 100, 100)]);
    let richer = account(2, 150, vec![posting(1, PostingKind::Credit, 100, 100)]);
    let out_of_line =
        account(3, 100, vec![posting(1, PostingKind::Credit, 60, 60), posting(2, PostingKind::Credit, 40, 99)]);
    for commit in [&right, &richer, &out_of_line] {
        assert_eq!(store.commit(commit).await, CommitOutcome::Applied);
    }
    let reads = store.reads();
    let report = reads.verify_ledger().await.unwrap();
    assert!(!report.holds());
    assert_eq!(report.difference(), 50);
    let found: Vec<_> = report.disagreements.iter().map(|it| (it.account, it.out_of_line)).collect();
    assert_eq!(found, [(richer.entity.id, 0), (out_of_line.entity.id, 1)]);
    let shards: Vec<_> = domain::Shard::all().collect();
    assert_eq!(reads.ledger_difference(&shards).await.unwrap(), 51);
    let mut inspection = reads.inspect().await.unwrap();
    let sum = inspection.sum_of_entries(BillingAccountId(out_of_line.entity.id)).await.unwrap();
    assert_eq!(sum, (MicroAmount::of(100), 2));
}

/// The same database, with a short timeout for reads.
fn reads_with_short_timeout(store: &TestStore) -> Reads {
    let options = PgConnectOptions::clone(&store.pool().connect_options()).options([("statement_timeout", "1000")]);
    Reads::new(PgPoolOptions::new().max_connections(4).connect_lazy_with(options))
}

#[tokio::test]
async fn sums_of_a_large_ledger_outlast_the_timeout_of_other_reads() {
    let store = TestStore::new().await;
    let made = account(1, 100, vec![posting(1, PostingKind::Credit, 100, 100)]);
    store.commit(&made).await;
    let (reads, id) = (reads_with_short_timeout(&store), BillingAccountId(made.entity.id));
    let mut held = store.pool().begin().await.unwrap();
    sqlx::query("LOCK TABLE ledger IN ACCESS EXCLUSIVE MODE").execute(&mut *held).await.unwrap();
    let (verifying, adding) = (reads.clone(), reads.clone());
    let verifying = tokio::spawn(async move { verifying.verify_ledger().await });
    let adding = tokio::spawn(async move { adding.ledger_sums(id, 0, 1, 10).await });
    let given_up = reads.ledger(id, &LedgerFilter::default(), None, 10).await.unwrap_err();
    assert!(given_up.took_too_long() && given_up.is_unavailable(), "{given_up:?}");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!verifying.is_finished() && !adding.is_finished());
    held.rollback().await.unwrap();
    assert!(verifying.await.unwrap().unwrap().holds());
    assert_eq!(adding.await.unwrap().unwrap().len(), 1);
}

#[tokio::test]
async fn account_whose_sum_times_out_does_not_end_the_inspection() {
    let store = TestStore::new().await;
    let made = account(1, 100, vec![posting(1, PostingKind::Credit, 100, 100)]);
    store.commit(&made).await;
    let (reads, id) = (reads_with_short_timeout(&store), BillingAccountId(made.entity.id));
    let mut held = store.pool().begin().await.unwrap();
    sqlx::query("LOCK TABLE ledger IN ACCESS EXCLUSIVE MODE").execute(&mut *held).await.unwrap();
    let mut inspection = reads.inspect().await.unwrap();
    assert!(inspection.sum_of_entries(id).await.unwrap_err().took_too_long());
    held.rollback().await.unwrap();
    let sum = loop {
        match inspection.sum_of_entries(id).await {
            Ok(sum) => break sum,
            // On a busy machine also where no lock is in its way.
            Err(error) => assert!(error.took_too_long(), "{error:?}"),
        }
    };
    assert_eq!(sum, (MicroAmount::of(100), 1));
}

#[tokio::test]
async fn cost_of_an_allocation_is_in_its_last_posting() {
    let store = TestStore::new().await;
    let first = account(1, -200, vec![usage(1, 100, -100, 1, 0), usage(2, 100, -200, 1, 1)]);
    store.commit(&first).await;
    let reads = store.reads();
    let ids = [allocation(1).0, allocation(2).0];
    let costs = reads.allocation_costs(&ids).await.unwrap();
    assert_eq!((costs.len(), costs[&ids[0]].cost), (1, MicroAmount::of(200)));
    // It ended before the last charge.
    let end = second(1);
    let given_back = UsagePeriod { allocation_id: allocation(1), from: end, until: end, cost: MicroAmount::of(150) };
    let credit = Posting { usage: Some(given_back), ..posting(3, PostingKind::UsageCredit, 50, -150) };
    assert_eq!(store.commit(&then(&first, -150, 3, vec![credit])).await, CommitOutcome::Applied);
    let cost = reads.allocation_costs(&ids).await.unwrap()[&ids[0]];
    assert_eq!((cost.cost, cost.billed_until), (MicroAmount::of(150), Some(end)));
    assert!(reads.verify_ledger().await.unwrap().holds());
}

/// An account whose postings were made at these instants, a minor unit each.
async fn posted_at(store: &TestStore, instants: &[Timestamp]) -> BillingAccountId {
    let mut commit = account(1, 0, Vec::new());
    assert_eq!(store.commit(&commit).await, CommitOutcome::Applied);
    for (number, at) in (1..).zip(instants) {
        let given = posting(number, PostingKind::Credit, 1, number);
        commit = Commit { at: *at, ..then(&commit, number, number, vec![given]) };
        assert_eq!(store.commit(&commit).await, CommitOutcome::Applied);
    }
    BillingAccountId(commit.entity.id)
}

#[tokio::test]
async fn position_of_an_instant_in_the_ledger_is_stable() {
    let store = TestStore::new().await;
    let account = posted_at(&store, &[0, 1, 1, 2, 5, 4, 9].map(second)).await;
    let reads = store.reads();
    let numbers = async |instants: &[i64]| -> Vec<i64> {
        let instants: Vec<_> = instants.iter().copied().map(second).collect();
        let found = reads.ledger_positions(account, &instants).await.unwrap();
        // Each posting gave one millionth.
        assert!(found.iter().all(|place| place.balance.get() == place.number), "{found:?}");
        found.iter().map(|place| place.number).collect()
    };
    assert_eq!(numbers(&[0, 1, 2, 3, 9, 10]).await, [0, 1, 3, 4, 6, 7], "before the instant, not at it");
    assert!(numbers(&[]).await.is_empty());
    // A clock went back from 5 to 4: the instant between them has one position, and later postings do not move it.
    let before = numbers(&[5]).await;
    assert!(before == [4] || before == [6], "{before:?}");
    let unknown_account = reads.ledger_positions(BillingAccountId(Uuid::from_u128(9)), &[second(1)]).await.unwrap();
    assert_eq!(unknown_account, [LedgerPosition::default()]);
}

#[tokio::test]
async fn range_of_the_ledger_is_summed_by_allocation_and_kind_within_a_limit() {
    let store = TestStore::new().await;
    let postings = vec![
        posting(1, PostingKind::Credit, 1_000, 1_000),
        usage(2, 100, 900, 1, 0),
        usage(3, 200, 700, 2, 0),
        usage(4, 100, 600, 1, 1),
        usage(5, 7, 593, 3, 0),
        Posting { usage: usage(0, 1, 0, 2, 1).usage, ..posting(6, PostingKind::WriteOff, 11, 593) },
    ];
    let commit = account(1, 593, postings);
    assert_eq!(store.commit(&commit).await, CommitOutcome::Applied);
    let (reads, id) = (store.reads(), BillingAccountId(commit.entity.id));
    let shown = async |after, until, most| {
        let sums = reads.ledger_sums(id, after, until, most).await.unwrap();
        let short = |sum: &LedgerSum| {
            let of = sum.allocation.map_or("-".to_owned(), |id| (id.0.as_u128() - 0xA110_C000).to_string());
            format!(
                "{} {of} +{}: {} in {}, {}",
                sum.kind,
                sum.together,
                sum.effect.get(),
                sum.postings,
                sum.amount.get()
            )
        };
        sums.iter().map(short).collect::<Vec<_>>()
    };
    let all = [
        "credit - +0: 1000 in 1, 1000",
        "usage 1 +0: -200 in 2, 200",
        "usage 2 +0: -200 in 1, 200",
        "usage 3 +0: -7 in 1, 7",
        "write_off 2 +0: 0 in 1, 11",
    ];
    assert_eq!(shown(0, 6, 10).await, all);
    assert_eq!(shown(1, 3, 10).await, ["usage 1 +0: -100 in 1, 100", "usage 2 +0: -200 in 1, 200"]);
    let folded = [
        "credit - +0: 1000 in 1, 1000",
        "usage 1 +0: -200 in 2, 200",
        "usage - +2: -207 in 2, 207",
        "write_off - +1: 0 in 1, 11",
    ];
    assert_eq!(shown(0, 6, 2).await, folded, "the largest, then the rest by kind");
    let stretch = reads.ledger_stretch(id, 1, 5, 3).await.unwrap();
    assert_eq!(stretch.iter().map(|row| row.number).collect::<Vec<_>>(), [2, 3, 4]);

    let found = async |filter: LedgerFilter| {
        let page = reads.ledger(id, &filter, None, 10).await.unwrap();
        page.items.iter().map(|row| row.number).collect::<Vec<_>>()
    };
    let any = LedgerFilter::default();
    assert_eq!(found(LedgerFilter { kind: Some(PostingKind::Usage), ..any }).await, [5, 4, 3, 2]);
    assert_eq!(found(LedgerFilter { kind: Some(PostingKind::Credit), ..any }).await, [1]);
    assert_eq!(found(LedgerFilter { allocation: Some(allocation(1)), ..any }).await, [4, 2]);
    assert_eq!(found(LedgerFilter { after: Some(2), until: Some(4), ..any }).await, [4, 3]);
}

#[tokio::test]
async fn postings_other_than_usage_are_found_without_reading_usage() {
    let store = TestStore::new().await;
    let mut connection = store.pool().acquire().await.unwrap();
    sqlx::query("SET enable_seqscan = off").execute(&mut *connection).await.unwrap();
    let plan: Vec<String> = sqlx::query_scalar(
        "EXPLAIN SELECT number FROM ledger WHERE account = gen_random_uuid() AND kind = 'credit' AND kind <> 'usage'
         ORDER BY number DESC LIMIT 50",
    )
    .fetch_all(&mut *connection)
    .await
    .unwrap();
    assert!(plan.iter().any(|line| line.contains("ledger_beside_usage")), "{plan:#?}");
}

#[tokio::test]
async fn payment_is_posted_once_with_its_reference() {
    let store = TestStore::new().await;
    let of = |reference: &str, posting: Posting| {
        let source =
            Some(PostingSource { payment_id: Some(PaymentId(Uuid::from_u128(7))), reference: reference.into() });
        Posting { source, ..posting }
    };
    let first = account(1, 100, vec![of("p", posting(1, PostingKind::Deposit, 100, 100))]);
    assert_eq!(store.commit(&first).await, CommitOutcome::Applied);
    // Also into another account.
    for twice in [
        then(&first, 200, 2, vec![of("p", posting(2, PostingKind::Deposit, 100, 200))]),
        account(2, 100, vec![of("p", posting(1, PostingKind::Deposit, 100, 100))]),
    ] {
        assert_eq!(store.commit(&twice).await, CommitOutcome::Refused { constraint: "ledger_reference".into() });
    }
    let has = async |account: u128, kind| {
        store.reads().has_posting(BillingAccountId(Uuid::from_u128(account)), kind, "p").await.unwrap()
    };
    let account_of_first = first.entity.id.as_u128();
    assert!(has(account_of_first, PostingKind::Deposit).await);
    assert!(!has(account_of_first, PostingKind::Refund).await);
    assert!(!has(account_of_first + 1, PostingKind::Deposit).await, "another account's");
    let back = then(&first, 70, 2, vec![of("p", posting(2, PostingKind::Refund, 30, 70))]);
    assert_eq!(store.commit(&back).await, CommitOutcome::Applied);
    let page =
        store.reads().ledger(BillingAccountId(first.entity.id), &LedgerFilter::default(), None, 10).await.unwrap();
    let seen: Vec<_> = page.items.iter().map(|row| (row.effect.get(), row.payment, row.reference.as_deref())).collect();
    let payment = Some(PaymentId(Uuid::from_u128(7)));
    assert_eq!(seen, [(-30, payment, Some("p")), (100, payment, Some("p"))]);
    let report = store.reads().verify_ledger().await.unwrap();
    assert!(report.holds());
    assert_eq!((report.books["EUR"]["processor_clearing"], report.books["EUR"]["refunds"]), (-100, 30));
}

#[tokio::test]
async fn refund_by_an_operator_is_no_part_of_the_cost() {
    let store = TestStore::new().await;
    let first = account(1, -100, vec![usage(1, 100, -100, 1, 0)]);
    let refund = Posting {
        usage: Some(UsagePeriod {
            allocation_id: allocation(1),
            from: second(9),
            until: second(9),
            cost: MicroAmount::of(1),
        }),
        ..posting(2, PostingKind::AllocationRefund, 40, -60)
    };
    assert_eq!(store.commit(&first).await, CommitOutcome::Applied);
    assert_eq!(store.commit(&then(&first, -60, 2, vec![refund])).await, CommitOutcome::Applied);
    let costs = store.reads().allocation_costs(&[allocation(1).0]).await.unwrap();
    assert_eq!(costs[&allocation(1).0].cost, MicroAmount::of(100));
}
