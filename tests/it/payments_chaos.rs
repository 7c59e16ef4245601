//! Money from end to end under faults of every kind: users top up at the processor, rent, release and request refunds; the processor's
//! webhooks are repeated, reordered and forged, at two replicas at once; replicas, NATS and Postgres crash, clocks are wrong, responses are
//! lost, and prices, windows and the grace period change. In the end the ledger agrees with the processor to the millionth.
//!
//! The random choices are seeded, and the seed is printed: `CHAOS_SEED` repeats the choices, though not their timing.

use crate::billing::{
    BALANCE, allocation_request, count_events, expect_exact, expect_ledger_verify_succeeds, expected_cost,
    expensive_sku, micro, short_windows,
};
use chrono::TimeDelta;
use domain::RefundId;
use domain::payment::{Payment, RefundDebit, RefundStatus};
use local_servers::payment_processor::intent_in;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom as _, SliceRandom as _};
use rand::{RngExt as _, SeedableRng as _};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, Client};
use tests::cluster::fake_processor::event;
use tests::cluster::payments::{ProcessorClient, RESEND_TIMEOUT, checkout};
use tests::cluster::resource_handles::AllocationHandle;
use tests::cluster::{CURRENCY, TestCluster, id_of};
use uuid::Uuid;

const REPLICAS: usize = 2;
/// The replica whose clock is set forward and back.
const SKEWED_REPLICA: usize = 1;
/// A node without isolation takes one tenant at a time, and each user has a node.
const PEOPLE: [&str; 3] = ["user", "user2", "admin"];
/// The alternating prices of a GPU per hour: 1 and 2 minor units a second.
const PRICES: [i64; 2] = [3_600, 7_200];

/// Retries until the response is not transient: a replica whose clock is wrong takes valid tokens for invalid
/// ones, and one that cannot reach the processor responds so.
async fn request_with_retries(by: &Client, method: Method, path: &str, body: Option<&Value>) -> ApiResponse {
    let key = Uuid::new_v4().to_string();
    let until = Instant::now() + RESEND_TIMEOUT;
    loop {
        let request = by.request(method.clone(), path).header("Idempotency-Key", &key);
        let request = if let Some(body) = body { request.json(body) } else { request };
        let why = match by.try_send(request).await {
            Ok(answer) if is_transient(&answer) => answer.to_string(),
            Ok(answer) => return answer,
            Err(error) => error.to_string(),
        };
        assert!(Instant::now() < until, "{method} {path}: no answer within {RESEND_TIMEOUT:?}; the last: {why}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn is_transient(answer: &ApiResponse) -> bool {
    let statuses = [
        StatusCode::UNAUTHORIZED,
        StatusCode::TOO_MANY_REQUESTS,
        StatusCode::BAD_GATEWAY,
        StatusCode::SERVICE_UNAVAILABLE,
    ];
    statuses.contains(&answer.status) || answer.code() == "idempotency_in_progress"
}

/// A user who pays and rents, and the outcome.
struct Person {
    by: Client,
    outside: ProcessorClient,
    chance: StdRng,
    /// Tops up little, rents much and never releases.
    is_careless: bool,
    rented: Vec<AllocationHandle>,
    /// By payment: its id at the processor.
    payments: BTreeMap<Uuid, String>,
    paid: Vec<Uuid>,
    secrets: Vec<String>,
    refunds_asked: usize,
}

impl Person {
    async fn live(mut self, enough: Arc<AtomicBool>) -> Self {
        self.top_up().await;
        while !enough.load(Ordering::SeqCst) {
            match self.chance.random_range(0..10_u8) {
                0..3 => self.top_up().await,
                3..5 => self.request_refund().await,
                5.. => self.rent().await,
            }
            let pause = self.chance.random_range(50..400);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
        // Chance, or a slow machine, may have refused every rental and refund: what the test is about happens at least once.
        let until = Instant::now() + RESEND_TIMEOUT;
        while self.rented.is_empty() || !self.is_careless && self.refunds_asked == 0 {
            assert!(Instant::now() < until, "{} rentals, {} refunds", self.rented.len(), self.refunds_asked);
            if self.rented.is_empty() {
                self.rent().await;
            } else {
                self.request_refund().await;
            }
            tokio::time::sleep(Duration::from_millis(400)).await;
        }
        self
    }

    /// Sometimes sent twice under one idempotency key, which is one payment; one in eight is abandoned before the card is entered.
    async fn top_up(&mut self) {
        let amount =
            if self.is_careless { self.chance.random_range(50..90) } else { self.chance.random_range(2_000..9_000) };
        let body = checkout(amount);
        let key = Uuid::new_v4().to_string();
        let times = if self.chance.random_bool(0.3) { 2 } else { 1 };
        let asked = (0..times).map(|_| begin(&self.by, &key, &body));
        let started: BTreeSet<_> = futures::future::join_all(asked).await.into_iter().collect();
        assert_eq!(started.len(), 1, "one key, one payment: {started:?}");
        for (id, url) in started {
            let intent = intent_in(&url).expect("the page is of an intent");
            self.secrets.push(url.split_once('#').expect("the page is ours").1.to_owned());
            if self.payments.is_empty() || self.chance.random_bool(0.875) {
                let paid = self.outside.pay(&intent).await;
                assert_eq!(paid.ok()["status"], "succeeded");
                self.paid.push(id);
            }
            self.payments.insert(id, intent);
        }
    }

    async fn request_refund(&mut self) {
        let Some(of) = self.paid.choose(&mut self.chance) else { return };
        let mut wanted = json!({ "payment_id": of, "reason": "a test needs it" });
        // A part of it, or sometimes the rest.
        if self.chance.random_bool(0.8) {
            wanted["amount_minor"] = json!(self.chance.random_range(1..900));
        }
        let answer = request_with_retries(&self.by, Method::POST, "/api/v1/billing/refunds", Some(&wanted)).await;
        // Not deposited yet, spent, more than the rest: refused without an effect.
        assert!([201, 400, 402, 409].contains(&answer.status.as_u16()), "{answer}");
        self.refunds_asked += usize::from(answer.status == StatusCode::CREATED);
    }

    async fn rent(&mut self) {
        let gpus = if self.is_careless { 8 } else { self.chance.random_range(1..=2) };
        let answer =
            request_with_retries(&self.by, Method::POST, "/api/v1/allocations", Some(&allocation_request(gpus))).await;
        if answer.status == StatusCode::CREATED {
            let rented = AllocationHandle::new(id_of(&answer.body), self.by.clone());
            self.rented.push(rented.clone());
            self.use_up(&rented).await;
        } else {
            assert!([402, 409].contains(&answer.status.as_u16()), "{answer}");
        }
    }

    /// Uses the allocation for a while; a careless user, until the balance is depleted.
    async fn use_up(&mut self, rented: &AllocationHandle) {
        let seconds = if self.is_careless { 12 } else { self.chance.random_range(2..5) };
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until {
            let seen = request_with_retries(&self.by, Method::GET, &rented.path(), None).await.ok();
            if ["releasing", "release_failed", "released"].contains(&seen["state"].as_str().unwrap_or_default()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        release(&self.by, rented).await;
    }
}

async fn release(by: &Client, rented: &AllocationHandle) {
    request_with_retries(by, Method::POST, &format!("{}/release", rented.path()), Some(&json!({}))).await.accepted();
}

/// Starts a payment under this key, once: its id and its page. A replica whose clock is behind refuses the amount, since the policy
/// that admits it does not apply there yet. That refusal is stored under the key, so the next attempt has another key.
async fn begin(by: &Client, key: &str, body: &Value) -> (Uuid, String) {
    let until = Instant::now() + RESEND_TIMEOUT;
    let mut refused = 0;
    loop {
        let key = format!("{key}-{refused}");
        let request = by.request(Method::POST, "/api/v1/billing/checkout-sessions").header("Idempotency-Key", key);
        let why = match by.try_send(request.json(body)).await {
            Ok(answer) if is_transient(&answer) => answer.to_string(),
            Ok(answer) if answer.body["details"]["policy_key"] == "billing.minimum_deposit_minor" => {
                refused += 1;
                answer.to_string()
            }
            Ok(answer) => {
                let started = answer.created();
                return (id_of(&started), started["url"].as_str().expect("a payment has a page").to_owned());
            }
            Err(error) => error.to_string(),
        };
        assert!(Instant::now() < until, "a payment does not begin: {why}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Replays the processor's webhooks in its name, in orders in which it never sends them, to all replicas at once; and sends forged ones,
/// which it cannot sign.
async fn replay_and_forge_webhooks(
    outside: ProcessorClient,
    mut chance: StdRng,
    enough: Arc<AtomicBool>,
) -> WebhookCounts {
    let mut counts = WebhookCounts::default();
    // By the event's id: a repeated event has the same body.
    let mut webhooks: BTreeMap<String, String> = BTreeMap::new();
    while !enough.load(Ordering::SeqCst) {
        for intent in outside.all("payment_intents").await {
            let id = intent["id"].as_str().expect("an intent has an id");
            match intent["status"].as_str() {
                Some("succeeded") => record_event(&mut webhooks, "payment_intent.succeeded", id, &intent),
                Some("canceled") => record_event(&mut webhooks, "payment_intent.canceled", id, &intent),
                Some(_) | None => {
                    counts.forged += send_forged_webhook(&outside, &intent, chance.random_range(0..4)).await;
                }
            }
        }
        for refund in outside.all("refunds").await {
            let id = refund["id"].as_str().expect("a refund has an id");
            ["refund.updated", "refund.created"]
                .into_iter()
                .for_each(|what| record_event(&mut webhooks, what, id, &refund));
        }
        let mut order: Vec<&String> = webhooks.values().collect();
        order.shuffle(&mut chance);
        for body in order.into_iter().take(12) {
            let at_all = (0..2 * outside.replicas()).map(|turn| outside.send_webhook(turn % outside.replicas(), body));
            let answers = futures::future::join_all(at_all).await;
            counts.accepted += answers.iter().flatten().filter(|answer| answer.status.is_success()).count();
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    counts
}

fn record_event(webhooks: &mut BTreeMap<String, String>, what: &str, object_id: &str, object: &Value) {
    let id = format!("evt_{}_{object_id}", what.replace('.', "_"));
    webhooks.entry(id.clone()).or_insert_with(|| event(&id, what, object));
}

/// The number of accepted webhooks, and of refused forgeries.
#[derive(Default)]
struct WebhookCounts {
    accepted: usize,
    forged: usize,
}

/// Sends events of payments that were not made, with invalid signatures. Returns the number that was refused for that reason.
async fn send_forged_webhook(outside: &ProcessorClient, intent: &Value, how: usize) -> usize {
    let mut paid = intent.clone();
    paid["status"] = json!("succeeded");
    paid["amount_received"] = intent["amount"].clone();
    let body = event(&format!("evt_forged_{}", Uuid::new_v4().simple()), "payment_intent.succeeded", &paid);
    let good = outside.signature("v1", 0, &body);
    let signature = [
        good.replace("v1=", "v1=00"),
        outside.signature("v0", 0, &body),
        outside.signature("v1", 2 * 3_600, &body),
        outside.signature("v1", 0, &intent.to_string()),
    ][how]
        .clone();
    let mut refused = 0;
    for replica in 0..outside.replicas() {
        let Ok(answer) = outside.send_webhook_with_signature(replica, &signature, &body).await else { continue };
        assert!(!answer.status.is_success(), "{signature}: {answer}");
        refused += usize::from(answer.status == StatusCode::BAD_REQUEST);
    }
    refused
}

/// A fault, or a change of a setting.
#[derive(Clone, Copy, Debug)]
enum Fault {
    ReplicaDies(usize),
    AllReplicasDie,
    NatsDies,
    PostgresDies,
    ProcessorIsDown,
    /// Requests are executed, and their responses are dropped.
    ProcessorResponsesAreLost,
    ServicesClock,
    PostgresClock,
    Price,
    Window,
    Grace,
}

const FAULTS: [Fault; 12] = [
    Fault::ReplicaDies(0),
    Fault::ReplicaDies(1),
    Fault::AllReplicasDie,
    Fault::NatsDies,
    Fault::PostgresDies,
    Fault::ProcessorIsDown,
    Fault::ProcessorResponsesAreLost,
    Fault::ServicesClock,
    Fault::PostgresClock,
    Fault::Price,
    Fault::Window,
    Fault::Grace,
];

impl Fault {
    async fn inject(self, cluster: &mut TestCluster, chance: &mut StdRng) {
        let mut pause = Duration::from_millis(chance.random_range(300..1_500));
        match self {
            Self::ReplicaDies(replica) => {
                cluster.kill9_replica(replica);
                tokio::time::sleep(pause).await;
                cluster.restart_replica(replica).await;
            }
            Self::AllReplicasDie => {
                (0..REPLICAS).for_each(|replica| cluster.kill9_replica(replica));
                tokio::time::sleep(pause).await;
                for replica in 0..REPLICAS {
                    cluster.restart_replica(replica).await;
                }
            }
            Self::NatsDies => {
                cluster.nats.kill9();
                tokio::time::sleep(pause).await;
                cluster.nats.start_again().await.expect("NATS starts");
            }
            Self::PostgresDies => {
                cluster.postgres.kill9().await;
                tokio::time::sleep(pause).await;
                cluster.postgres.start_again().await;
            }
            Self::ProcessorIsDown => {
                cluster.payments().link.cut();
                tokio::time::sleep(pause).await;
                cluster.payments().link.restore();
            }
            Self::ProcessorResponsesAreLost => {
                cluster.payments().link.drop_responses_to("POST /v1/");
                tokio::time::sleep(pause).await;
                cluster.payments().link.cut();
                cluster.payments().link.restore();
            }
            Self::ServicesClock | Self::PostgresClock => {
                let clock =
                    if matches!(self, Self::ServicesClock) { &cluster.service_clock } else { &cluster.postgres_clock };
                let clock = clock.as_ref().expect("the builder has it");
                pause += Duration::from_secs(1);
                for ahead in [TimeDelta::hours(1), TimeDelta::zero(), TimeDelta::minutes(-20), TimeDelta::zero()] {
                    clock.set_offset(ahead);
                    tokio::time::sleep(pause).await;
                }
            }
            Self::Price => set_price(cluster, *PRICES.choose(chance).expect("there are prices")).await,
            Self::Window => cluster.set_policy("billing.window_seconds", chance.random_range(1..4)).await,
            Self::Grace => cluster.set_policy("billing.depletion_grace_seconds", chance.random_range(0..4)).await,
        }
    }
}

async fn set_price(cluster: &mut TestCluster, minor: i64) {
    let sku = cluster.offer_sku("dear", 8).await;
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": minor } });
    cluster.admin.request_until_final(Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price)).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn ledger_agrees_with_the_processor_after_faults_of_every_kind() {
    let seed = std::env::var("CHAOS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(rand::random::<u64>);
    eprintln!("CHAOS_SEED={seed}");
    let mut chance = StdRng::seed_from_u64(seed);
    let builder = short_windows().replicas(REPLICAS).with_processor().clock_of(SKEWED_REPLICA).postgres_clock();
    let builder = builder.policy("billing.minimum_deposit_minor", 50).variable("SVC_PAYMENTS_RECONCILE_SECONDS", "3");
    let mut cluster = builder.start().await;
    expensive_sku(&mut cluster).await;
    set_price(&mut cluster, PRICES[0]).await;
    for _ in PEOPLE {
        cluster.node("dear").await;
    }
    let enough = Arc::new(AtomicBool::new(false));
    let people = people(&cluster, &mut chance).map(|person| tokio::spawn(person.live(Arc::clone(&enough))));
    let forging =
        replay_and_forge_webhooks(cluster.processor_client(), StdRng::from_rng(&mut chance), Arc::clone(&enough));
    let forging = tokio::spawn(forging);

    // Each of them twice, in any order.
    let mut faults = [FAULTS, FAULTS].concat();
    faults.shuffle(&mut chance);
    for fault in faults {
        let began = Instant::now();
        fault.inject(&mut cluster, &mut chance).await;
        eprintln!("{fault:?} took {:?}", began.elapsed());
        let quiet = chance.random_range(1_000..2_500);
        tokio::time::sleep(Duration::from_millis(quiet)).await;
    }
    enough.store(true, Ordering::SeqCst);
    let counts = forging.await.expect("what is forged is refused");
    let mut users = Vec::new();
    for person in people {
        users.push(person.await.expect("no user is refused permanently"));
    }
    eprintln!("{} webhooks were taken in, and {} forged ones refused", counts.accepted, counts.forged);
    assert!(counts.accepted >= 50, "{}", counts.accepted);
    for person in &users {
        person.secrets.iter().for_each(|secret| cluster.register_secret("a client secret", secret));
    }

    for person in &users {
        let (balance, spent) = expect_settled(&cluster, person).await;
        eprintln!(
            "{} payments, {} of them paid; {} refunds; {} allocations at {spent}; {balance} are left",
            person.payments.len(),
            person.paid.len(),
            person.refunds_asked,
            person.rented.len()
        );
    }
    assert!(users.iter().all(|person| !person.paid.is_empty() && !person.rented.is_empty()));
    assert!(users.iter().any(|person| person.refunds_asked > 0), "something was asked back");
    // Not with every seed: it depends on the order of the faults.
    eprintln!("{} balances were depleted", count_events(&cluster, "billing.balance_depleted").await);
    let dead = cluster.admin.get("/api/v1/admin/billing/processor-events?state=dead").await.ok();
    assert_eq!(dead["items"], json!([]));
    expect_ledger_verify_succeeds(&cluster).await;
    expect_metrics(&cluster).await;
    cluster.shutdown().await;
}

fn people(cluster: &TestCluster, chance: &mut StdRng) -> [Person; PEOPLE.len()] {
    let callers = [&cluster.user, &cluster.other_user, &cluster.admin];
    std::array::from_fn(|index| Person {
        by: callers[index].clone(),
        outside: cluster.processor_client(),
        chance: StdRng::from_rng(chance),
        is_careless: index == 1,
        rented: Vec::new(),
        payments: BTreeMap::new(),
        paid: Vec::new(),
        secrets: Vec::new(),
        refunds_asked: 0,
    })
}

/// Asserts that everything of this user is final and exact: payments are deposited once, refunds are debited once, each allocation cost
/// what its time costs, and the rest is the balance. Returns the balance and the charges.
async fn expect_settled(cluster: &TestCluster, person: &Person) -> (i64, i64) {
    let mut over = Vec::new();
    for rented in &person.rented {
        if rented.get().await["state"] != "released" {
            release(&person.by, rented).await;
        }
        over.push(rented.expect_state_within(RESEND_TIMEOUT, "released").await);
    }
    person.by.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0 && it["held_minor"] == 0).await;
    let (mut deposits, mut refunds) = (BTreeMap::new(), BTreeMap::new());
    for (id, intent) in &person.payments {
        let payment = expect_agreement_with_processor(cluster, *id, intent).await;
        if person.paid.contains(id) {
            deposits.insert(id.to_string(), payment.amount_minor * 1_000_000);
            refunds.insert(id.to_string(), refunded_amount(&payment) * 1_000_000);
        }
    }
    let all = expect_exact(&person.by).await;
    let posted = |kinds: &[&str]| {
        let mut by_payment: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for it in all.iter().filter(|it| kinds.contains(&it["kind"].as_str().expect("a posting has a kind"))) {
            let payment = it["payment_id"].as_str().expect("it names its payment").to_owned();
            by_payment.entry(payment).or_default().push(micro(&it["change_micro"]));
        }
        by_payment
    };
    let once = posted(&["deposit"]);
    assert!(once.values().all(|postings| postings.len() == 1), "each was deposited once: {once:?}");
    assert_eq!(once.into_iter().map(|(id, it)| (id, it[0])).collect::<BTreeMap<_, _>>(), deposits);
    let taken = posted(&["refund", "refund_returned", "reversal", "reversal_undone"]);
    let taken = |id: &String| -> i64 { -taken.get(id).map_or(0, |postings| postings.iter().sum::<i64>()) };
    refunds.iter().for_each(|(id, minor)| assert_eq!(taken(id), *minor, "what was paid back of {id}"));

    let spent: i64 = over.iter().map(|allocation| expect_cost(&all, allocation)).sum();
    let balance = micro(&person.by.get(BALANCE).await.ok()["balance_micro"]);
    assert_eq!(balance, deposits.values().sum::<i64>() - refunds.values().sum::<i64>() - spent);
    (balance, spent)
}

/// What an allocation has cost its user. Together with the write-off that is its price from start to end.
fn expect_cost(all: &[Value], allocation: &Value) -> i64 {
    let (paid, written_off) = crate::billing::cost(all, id_of(allocation));
    let price = micro(&allocation["price"]["amount_minor_per_gpu_hour"]) * micro(&allocation["gpu_count"]);
    let expected = if allocation["active_at"].is_null() { 0 } else { expected_cost(allocation, price).max(0) };
    assert_eq!(paid + written_off, expected, "{allocation}");
    assert!(written_off >= 0, "{allocation}");
    paid
}

fn refunded_amount(payment: &Payment) -> i64 {
    let paid = payment.refunds.values().filter(|refund| is_paid(refund));
    paid.filter_map(|refund| match refund.taking {
        RefundDebit::Taken { amount_minor } => Some(amount_minor),
        _ => None,
    })
    .sum()
}

fn is_paid(refund: &domain::payment::Refund) -> bool {
    refund.at_processor.as_ref().is_some_and(|at| at.status == RefundStatus::Succeeded)
}

/// Asserts that the payment agrees with the processor: what was paid is deposited, and each debited refund was paid there, once.
async fn expect_agreement_with_processor(cluster: &TestCluster, id: Uuid, intent: &str) -> Payment {
    let outside = cluster.processor_client();
    let until = Instant::now() + RESEND_TIMEOUT;
    loop {
        let intents = outside.all("payment_intents").await;
        let of_it = |it: &&Value| it["metadata"]["payment_id"] == id.to_string() && it["status"] == "succeeded";
        let paid: Vec<&Value> = intents.iter().filter(of_it).collect();
        assert!(paid.len() <= 1 && paid.iter().all(|it| it["id"] == intent), "one intent can be paid: {paid:?}");
        let mut there: BTreeMap<RefundId, i64> = BTreeMap::new();
        for refund in outside.all("refunds").await.iter().filter(|refund| refund["payment_intent"] == intent) {
            let id = refund["metadata"]["refund_id"].as_str().expect("we asked for it").parse().expect("it is an id");
            let before = there.insert(RefundId(id), micro(&refund["amount"]));
            assert_eq!(before, None, "it is paid back once: {refund}");
        }
        let payment = cluster.stored_payment(id).await.expect("it was begun");
        let ours = payment.refunds.iter().filter(|(_, refund)| is_paid(refund));
        let ours: BTreeMap<RefundId, i64> = ours
            .filter_map(|(id, refund)| match refund.taking {
                RefundDebit::Taken { amount_minor } => Some((*id, amount_minor)),
                _ => None,
            })
            .collect();
        let is_over = payment.refunds.values().all(|refund| match &refund.taking {
            RefundDebit::Taken { .. } => is_paid(refund),
            RefundDebit::Refused { .. } | RefundDebit::GivenBack { .. } => true,
            RefundDebit::Asked { .. } => false,
        });
        let is_deposited = domain::Machine::state(&payment) == "deposited";
        if is_over && is_deposited != paid.is_empty() && ours == there {
            return payment;
        }
        assert!(Instant::now() < until, "not the same: {paid:?} {there:?} {payment:#?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Asserts by the metrics that no invariant was violated, and that balances agree with the ledger.
async fn expect_metrics(cluster: &TestCluster) {
    for replica in 0..cluster.replicas.len() {
        let page = cluster.metrics_of(replica).await;
        for name in ["invariant_violations_total", "billing_ledger_difference_micro"] {
            assert_eq!(page.value(name, &[]), Some(0.0), "{name}: {}", page.text);
        }
    }
}
