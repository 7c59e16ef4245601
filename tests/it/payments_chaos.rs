//! Money from end to end while everything goes wrong: people pay in at the processor, rent, give back and ask for refunds; what the processor
//! says is repeated, reordered and forged, at two replicas at once; replicas, NATS and Postgres die, clocks are wrong, answers are lost,
//! and prices, windows and the grace change. In the end the processor's books and ours say the same to the millionth.
//!
//! Chance is seeded, and the seed is printed: `CHAOS_SEED` repeats its choices, though not the machine's pace.

use crate::billing::{
    BALANCE, dear_sku, expect_exact, expect_verified_by_the_program, micro, owed, said, short_windows, wanted,
};
use chrono::TimeDelta;
use domain::RefundId;
use domain::payment::{Payment, RefundStatus, Taking};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom as _, SliceRandom as _};
use rand::{RngExt as _, SeedableRng as _};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use supervisors::dev::processor::intent_in;
use tests::world::client::{Answer, Client};
use tests::world::desk::event;
use tests::world::payments::{Outside, SAID_AGAIN_WITHIN, checkout};
use tests::world::tenants::Rented;
use tests::world::{CURRENCY, PATIENCE, World, id_of};
use uuid::Uuid;

const REPLICAS: usize = 2;
/// The one whose clock is put on and back.
const MISTAKEN: usize = 1;
/// A node that enforces nothing takes one tenant at a time, and each of the people has one.
const PEOPLE: [&str; 3] = ["user", "user2", "admin"];
/// What a GPU costs an hour, in turns; 1 and 2 minor units a second.
const PRICES: [i64; 2] = [3_600, 7_200];

/// Asks until there is an answer that is about what was asked, and not about the moment: a replica whose clock is wrong holds good tokens for
/// bad ones, and one that cannot reach the processor says so.
async fn ask(by: &Client, method: Method, path: &str, body: Option<&Value>) -> Answer {
    let key = Uuid::new_v4().to_string();
    let until = Instant::now() + PATIENCE;
    loop {
        let request = by.request(method.clone(), path).header("Idempotency-Key", &key);
        let request = if let Some(body) = body { request.json(body) } else { request };
        let why = match by.try_send(request).await {
            Ok(answer) if is_of_the_moment(&answer) => answer.to_string(),
            Ok(answer) => return answer,
            Err(error) => error.to_string(),
        };
        assert!(Instant::now() < until, "{method} {path}: no answer within {PATIENCE:?}; the last: {why}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn is_of_the_moment(answer: &Answer) -> bool {
    let statuses = [
        StatusCode::UNAUTHORIZED,
        StatusCode::TOO_MANY_REQUESTS,
        StatusCode::BAD_GATEWAY,
        StatusCode::SERVICE_UNAVAILABLE,
    ];
    statuses.contains(&answer.status) || answer.code() == "idempotency_in_progress"
}

/// Somebody who pays and rents, and what came of it.
struct Person {
    by: Client,
    outside: Outside,
    chance: StdRng,
    /// Pays in little, rents much and never gives it back.
    is_careless: bool,
    rented: Vec<Rented>,
    /// By payment: what it is called at the processor.
    payments: BTreeMap<Uuid, String>,
    paid: Vec<Uuid>,
    secrets: Vec<String>,
    refunds_asked: usize,
}

impl Person {
    async fn live(mut self, enough: Arc<AtomicBool>) -> Self {
        self.pay_in().await;
        while !enough.load(Ordering::SeqCst) {
            match self.chance.random_range(0..10_u8) {
                0..3 => self.pay_in().await,
                3..5 => self.ask_back().await,
                5.. => self.rent().await,
            }
            let pause = self.chance.random_range(50..400);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
        self
    }

    /// Asked twice under one key now and then, which is once; one in eight turns back before the card.
    async fn pay_in(&mut self) {
        let amount =
            if self.is_careless { self.chance.random_range(50..90) } else { self.chance.random_range(2_000..9_000) };
        let body = checkout(amount);
        let key = Uuid::new_v4().to_string();
        let times = if self.chance.random_bool(0.3) { 2 } else { 1 };
        let asked = (0..times).map(|_| begin(&self.by, &key, &body));
        let begun: BTreeSet<_> = futures::future::join_all(asked).await.into_iter().collect();
        assert_eq!(begun.len(), 1, "one key, one payment: {begun:?}");
        for (id, url) in begun {
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

    async fn ask_back(&mut self) {
        let Some(of) = self.paid.choose(&mut self.chance) else { return };
        let mut wanted = json!({ "payment_id": of, "reason": "a test needs it" });
        // A part of it; or all that is left, now and then.
        if self.chance.random_bool(0.8) {
            wanted["amount_minor"] = json!(self.chance.random_range(1..900));
        }
        let answer = ask(&self.by, Method::POST, "/api/v1/billing/refunds", Some(&wanted)).await;
        // Not there yet, spent, more than is left: said, and nothing is done.
        assert!([201, 400, 402, 409].contains(&answer.status.as_u16()), "{answer}");
        self.refunds_asked += usize::from(answer.status == StatusCode::CREATED);
    }

    async fn rent(&mut self) {
        let gpus = if self.is_careless { 8 } else { self.chance.random_range(1..=2) };
        let answer = ask(&self.by, Method::POST, "/api/v1/allocations", Some(&wanted(gpus))).await;
        if answer.status == StatusCode::CREATED {
            let rented = Rented::new(id_of(&answer.body), self.by.clone());
            self.rented.push(rented.clone());
            self.use_up(&rented).await;
        } else {
            assert!([402, 409].contains(&answer.status.as_u16()), "{answer}");
        }
    }

    /// Has it for a while; who is careless, until the money is gone.
    async fn use_up(&mut self, rented: &Rented) {
        let seconds = if self.is_careless { 12 } else { self.chance.random_range(2..5) };
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until {
            let seen = ask(&self.by, Method::GET, &rented.path(), None).await.ok();
            if ["releasing", "release_failed", "released"].contains(&seen["state"].as_str().unwrap_or_default()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        give_back(&self.by, rented).await;
    }
}

async fn give_back(by: &Client, rented: &Rented) {
    ask(by, Method::POST, &format!("{}/release", rented.path()), Some(&json!({}))).await.accepted();
}

/// Begins a payment, or finds it begun under this key: its id and its page. A replica whose clock is behind refuses the amount, since the policy
/// that admits it does not hold yet there. That refusal is stored under the key, so the next attempt has the next key.
async fn begin(by: &Client, key: &str, body: &Value) -> (Uuid, String) {
    let until = Instant::now() + PATIENCE;
    let mut refused = 0;
    loop {
        let key = format!("{key}-{refused}");
        let request = by.request(Method::POST, "/api/v1/billing/checkout-sessions").header("Idempotency-Key", key);
        let why = match by.try_send(request.json(body)).await {
            Ok(answer) if is_of_the_moment(&answer) => answer.to_string(),
            Ok(answer) if answer.body["details"]["policy_key"] == "billing.minimum_deposit_minor" => {
                refused += 1;
                answer.to_string()
            }
            Ok(answer) => {
                let begun = answer.created();
                return (id_of(&begun), begun["url"].as_str().expect("a payment has a page").to_owned());
            }
            Err(error) => error.to_string(),
        };
        assert!(Instant::now() < until, "a payment does not begin: {why}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Repeats, in the processor's name, what it has said and what it never says in this order, at all replicas at once; and says what is not
/// true, which nobody can sign.
async fn repeat_and_forge(outside: Outside, mut chance: StdRng, enough: Arc<AtomicBool>) -> Told {
    let mut told = Told::default();
    // By the event's id: what is said again is said in the same words.
    let mut said: BTreeMap<String, String> = BTreeMap::new();
    while !enough.load(Ordering::SeqCst) {
        for intent in outside.all("payment_intents").await {
            let id = intent["id"].as_str().expect("an intent has an id");
            match intent["status"].as_str() {
                Some("succeeded") => remember(&mut said, "payment_intent.succeeded", id, &intent),
                Some("canceled") => remember(&mut said, "payment_intent.canceled", id, &intent),
                Some(_) | None => told.forged += forge(&outside, &intent, chance.random_range(0..4)).await,
            }
        }
        for refund in outside.all("refunds").await {
            let id = refund["id"].as_str().expect("a refund has an id");
            ["refund.updated", "refund.created"].into_iter().for_each(|what| remember(&mut said, what, id, &refund));
        }
        let mut order: Vec<&String> = said.values().collect();
        order.shuffle(&mut chance);
        for body in order.into_iter().take(12) {
            let at_all = (0..2 * outside.replicas()).map(|turn| outside.say(turn % outside.replicas(), body));
            let answers = futures::future::join_all(at_all).await;
            told.taken += answers.iter().flatten().filter(|answer| answer.status.is_success()).count();
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    told
}

fn remember(said: &mut BTreeMap<String, String>, what: &str, object_id: &str, object: &Value) {
    let id = format!("evt_{}_{object_id}", what.replace('.', "_"));
    said.entry(id.clone()).or_insert_with(|| event(&id, what, object));
}

/// How often an event was taken in, and how often somebody said in vain that a payment was made.
#[derive(Default)]
struct Told {
    taken: usize,
    forged: usize,
}

/// Says of what nobody has paid that it was paid, badly signed. Answers how often that was refused as such.
async fn forge(outside: &Outside, intent: &Value, how: usize) -> usize {
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
        let Ok(answer) = outside.say_under(replica, &signature, &body).await else { continue };
        assert!(!answer.status.is_success(), "{signature}: {answer}");
        refused += usize::from(answer.status == StatusCode::BAD_REQUEST);
    }
    refused
}

/// What goes wrong, and what is changed meanwhile.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    ReplicaDies(usize),
    AllReplicasDie,
    NatsDies,
    PostgresDies,
    ProcessorIsAway,
    /// What it was asked is done, and nobody hears.
    ProcessorsAnswersAreLost,
    ServicesClock,
    PostgresClock,
    Price,
    Window,
    Grace,
}

const TROUBLES: [Trouble; 12] = [
    Trouble::ReplicaDies(0),
    Trouble::ReplicaDies(1),
    Trouble::AllReplicasDie,
    Trouble::NatsDies,
    Trouble::PostgresDies,
    Trouble::ProcessorIsAway,
    Trouble::ProcessorsAnswersAreLost,
    Trouble::ServicesClock,
    Trouble::PostgresClock,
    Trouble::Price,
    Trouble::Window,
    Trouble::Grace,
];

impl Trouble {
    async fn befall(self, world: &mut World, chance: &mut StdRng) {
        let mut pause = Duration::from_millis(chance.random_range(300..1_500));
        match self {
            Self::ReplicaDies(replica) => {
                world.kill9_replica(replica);
                tokio::time::sleep(pause).await;
                world.restart_replica(replica).await;
            }
            Self::AllReplicasDie => {
                (0..REPLICAS).for_each(|replica| world.kill9_replica(replica));
                tokio::time::sleep(pause).await;
                for replica in 0..REPLICAS {
                    world.restart_replica(replica).await;
                }
            }
            Self::NatsDies => {
                world.nats.kill9();
                tokio::time::sleep(pause).await;
                world.nats.start_again().await.expect("NATS starts");
            }
            Self::PostgresDies => {
                world.postgres.kill9();
                tokio::time::sleep(pause).await;
                world.postgres.start_again().await.expect("Postgres starts");
            }
            Self::ProcessorIsAway => {
                world.payments().line.cut();
                tokio::time::sleep(pause).await;
                world.payments().line.mend();
            }
            Self::ProcessorsAnswersAreLost => {
                world.payments().line.lose_answers_to("POST /v1/");
                tokio::time::sleep(pause).await;
                world.payments().line.cut();
                world.payments().line.mend();
            }
            Self::ServicesClock | Self::PostgresClock => {
                let clock =
                    if matches!(self, Self::ServicesClock) { &world.service_clock } else { &world.postgres_clock };
                let clock = clock.as_ref().expect("the plan has it");
                pause += Duration::from_secs(1);
                for ahead in [TimeDelta::hours(1), TimeDelta::zero(), TimeDelta::minutes(-20), TimeDelta::zero()] {
                    clock.put(ahead);
                    tokio::time::sleep(pause).await;
                }
            }
            Self::Price => set_price(world, *PRICES.choose(chance).expect("there are prices")).await,
            Self::Window => world.set_policy("billing.window_seconds", chance.random_range(1..4)).await,
            Self::Grace => world.set_policy("billing.depletion_grace_seconds", chance.random_range(0..4)).await,
        }
    }
}

async fn set_price(world: &mut World, minor: i64) {
    let sku = world.offer("dear", 8).await;
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": minor } });
    world.admin.insist(Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price)).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_goes_wrong_while_people_pay_the_processors_books_and_ours_say_the_same() {
    let seed = std::env::var("CHAOS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(rand::random::<u64>);
    eprintln!("CHAOS_SEED={seed}");
    let mut chance = StdRng::seed_from_u64(seed);
    let plan = short_windows().replicas(REPLICAS).with_processor().clock_of(MISTAKEN).postgres_clock();
    let plan = plan.policy("billing.minimum_deposit_minor", 50).variable("SVC_PAYMENTS_RECONCILE_SECONDS", "3");
    let mut world = plan.start().await;
    dear_sku(&mut world).await;
    set_price(&mut world, PRICES[0]).await;
    for _ in PEOPLE {
        world.node("dear").await;
    }
    let enough = Arc::new(AtomicBool::new(false));
    let people = people(&world, &mut chance).map(|person| tokio::spawn(person.live(Arc::clone(&enough))));
    let forging = repeat_and_forge(world.outside(), StdRng::from_rng(&mut chance), Arc::clone(&enough));
    let forging = tokio::spawn(forging);

    // Each of them twice, in any order.
    let mut troubles = [TROUBLES, TROUBLES].concat();
    troubles.shuffle(&mut chance);
    for trouble in troubles {
        let began = Instant::now();
        trouble.befall(&mut world, &mut chance).await;
        eprintln!("{trouble:?} took {:?}", began.elapsed());
        let quiet = chance.random_range(1_000..2_500);
        tokio::time::sleep(Duration::from_millis(quiet)).await;
    }
    enough.store(true, Ordering::SeqCst);
    let told = forging.await.expect("what is forged is refused");
    let mut lived = Vec::new();
    for person in people {
        lived.push(person.await.expect("nobody is refused for good"));
    }
    eprintln!("{} webhooks were taken in, and {} forged ones refused", told.taken, told.forged);
    assert!(told.taken >= 50, "{}", told.taken);
    for person in &lived {
        person.secrets.iter().for_each(|secret| world.keep_secret("a client secret", secret));
    }

    for person in &lived {
        let (balance, spent) = expect_settled(&world, person).await;
        eprintln!(
            "{} payments, {} of them paid; {} refunds; {} allocations at {spent}; {balance} are left",
            person.payments.len(),
            person.paid.len(),
            person.refunds_asked,
            person.rented.len()
        );
    }
    assert!(lived.iter().all(|person| !person.paid.is_empty() && !person.rented.is_empty()));
    assert!(lived.iter().any(|person| person.refunds_asked > 0), "something was asked back");
    assert!(said(&world, "billing.balance_depleted").await > 0, "somebody's money was used up");
    let dead = world.admin.get("/api/v1/admin/billing/processor-events?state=dead").await.ok();
    assert_eq!(dead["items"], json!([]));
    expect_verified_by_the_program(&world).await;
    expect_figures(&world).await;
    world.end().await;
}

fn people(world: &World, chance: &mut StdRng) -> [Person; PEOPLE.len()] {
    let callers = [&world.user, &world.other_user, &world.admin];
    std::array::from_fn(|index| Person {
        by: callers[index].clone(),
        outside: world.outside(),
        chance: StdRng::from_rng(chance),
        is_careless: index == 1,
        rented: Vec::new(),
        payments: BTreeMap::new(),
        paid: Vec::new(),
        secrets: Vec::new(),
        refunds_asked: 0,
    })
}

/// Everything of this person's is over, and adds up: what was paid was deposited once, what was paid back was taken once, each allocation cost
/// what its time cost, and the rest is the balance. Answers that and what was spent.
async fn expect_settled(world: &World, person: &Person) -> (i64, i64) {
    let mut over = Vec::new();
    for rented in &person.rented {
        if rented.get().await["state"] != "released" {
            give_back(&person.by, rented).await;
        }
        over.push(rented.expect_state_within(SAID_AGAIN_WITHIN, "released").await);
    }
    person.by.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0 && it["held_minor"] == 0).await;
    let (mut deposits, mut refunds) = (BTreeMap::new(), BTreeMap::new());
    for (id, intent) in &person.payments {
        let payment = expect_agreed(world, *id, intent).await;
        if person.paid.contains(id) {
            deposits.insert(id.to_string(), payment.amount_minor * 1_000_000);
            refunds.insert(id.to_string(), paid_back(&payment) * 1_000_000);
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

/// What it has cost its user. With what was written off that is its price from the beginning to the end.
fn expect_cost(all: &[Value], allocation: &Value) -> i64 {
    let (paid, written_off) = crate::billing::cost(all, id_of(allocation));
    let price = micro(&allocation["price"]["amount_minor_per_gpu_hour"]) * micro(&allocation["gpu_count"]);
    let expected = if allocation["active_at"].is_null() { 0 } else { owed(allocation, price).max(0) };
    assert_eq!(paid + written_off, expected, "{allocation}");
    assert!(written_off >= 0, "{allocation}");
    paid
}

fn paid_back(payment: &Payment) -> i64 {
    let paid = payment.refunds.values().filter(|refund| is_paid(refund));
    paid.filter_map(|refund| match refund.taking {
        Taking::Taken { amount_minor } => Some(amount_minor),
        _ => None,
    })
    .sum()
}

fn is_paid(refund: &domain::payment::Refund) -> bool {
    refund.at_processor.as_ref().is_some_and(|at| at.status == RefundStatus::Succeeded)
}

/// The processor's books and the payment say the same: who paid has it deposited, and each refund that was taken was paid back there, once.
async fn expect_agreed(world: &World, id: Uuid, intent: &str) -> Payment {
    let outside = world.outside();
    let until = Instant::now() + SAID_AGAIN_WITHIN;
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
        let payment = world.stored_payment(id).await.expect("it was begun");
        let ours = payment.refunds.iter().filter(|(_, refund)| is_paid(refund));
        let ours: BTreeMap<RefundId, i64> = ours
            .filter_map(|(id, refund)| match refund.taking {
                Taking::Taken { amount_minor } => Some((*id, amount_minor)),
                _ => None,
            })
            .collect();
        let is_over = payment.refunds.values().all(|refund| match &refund.taking {
            Taking::Taken { .. } => is_paid(refund),
            Taking::Refused { .. } | Taking::GivenBack { .. } => true,
            Taking::Asked { .. } => false,
        });
        let is_deposited = domain::Machine::state(&payment) == "deposited";
        if is_over && is_deposited != paid.is_empty() && ours == there {
            return payment;
        }
        assert!(Instant::now() < until, "not the same: {paid:?} {there:?} {payment:#?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Nothing was ever seen broken, and what accounts believe is what the ledger says.
async fn expect_figures(world: &World) {
    for replica in &world.replicas {
        let page = reqwest::get(format!("{}/metrics", replica.operations_url())).await.expect("figures are shown");
        let page = page.text().await.expect("figures are text");
        let of = |name: &str| page.lines().filter(|line| line.starts_with(name)).map(str::to_owned).collect::<Vec<_>>();
        for name in ["invariant_violations_total{", "billing_ledger_difference_micro "] {
            let lines = of(name);
            assert!(!lines.is_empty() && lines.iter().all(|line| line.ends_with(" 0")), "{name}: {lines:?}");
        }
    }
}
