//! Load of every kind that a disaster can hit: rentals, payments, terminals and the catalog. It records what was acknowledged to its clients, and
//! when: a record is made after the answer, so that the transition behind it was committed before.

use chrono::{DateTime, Utc};
use local_servers::payment_processor::intent_in;
use rand::RngExt as _;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tests::cluster::client::Client;
use tests::cluster::payments::{ProcessorClient, RESEND_TIMEOUT, checkout};
use tests::cluster::terminal::{Terminal, TerminalGateway, TerminalRequest};
use tests::cluster::{AllocationHandle, REGION, id_of, sku_body};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use uuid::Uuid;

/// Rentals at once. A node without users of its own takes one tenant at a time, and one node has the terminals.
pub(super) const RENTALS: usize = 2;

/// A transition that a client knows of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Acknowledgement {
    pub(super) entity: Uuid,
    /// The state that it led to; `None`: the entity exists.
    pub(super) state: Option<&'static str>,
    pub(super) at: DateTime<Utc>,
}

/// How far a rental has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RentalProgress {
    Requested,
    Active,
    /// Its release was requested: its tenant may be there or not.
    Ending,
    Released,
}

/// What the clients know.
#[derive(Clone, Debug, Default)]
pub(super) struct LoadRecords {
    pub(super) acknowledged: Vec<Acknowledgement>,
    pub(super) rentals: BTreeMap<Uuid, RentalProgress>,
    /// All payments that were begun, and those that the processor has the money of.
    pub(super) payments: BTreeSet<Uuid>,
    pub(super) paid: BTreeSet<Uuid>,
    /// Requests for a rental without an answer.
    pub(super) unanswered_rentals: usize,
    /// Terminals that have shown what was typed.
    pub(super) terminals: usize,
    pub(super) secrets: Vec<String>,
}

impl LoadRecords {
    /// Forgets what a disaster has taken: later rounds do not expect it.
    pub(super) fn retain(&mut self, is_there: impl Fn(&Acknowledgement) -> bool) {
        self.acknowledged.retain(is_there);
    }

    fn acknowledge(&mut self, entity: Uuid, state: Option<&'static str>) {
        self.acknowledged.push(Acknowledgement { entity, state, at: Utc::now() });
    }
}

type SharedRecords = Arc<Mutex<LoadRecords>>;

/// Load in progress.
pub(super) struct DrillLoad {
    records: SharedRecords,
    tasks: Vec<JoinHandle<()>>,
}

/// The clients of the load.
pub(super) struct LoadClients {
    pub(super) admin: Client,
    pub(super) user: Client,
    pub(super) gateway: TerminalGateway,
    pub(super) processor: ProcessorClient,
    /// The rental whose node has the terminals.
    pub(super) terminals_on: Uuid,
    pub(super) sku: &'static str,
}

impl DrillLoad {
    /// Starts the load, which adds to these records.
    pub(super) fn start(clients: &LoadClients, records: LoadRecords) -> Self {
        let records = Arc::new(Mutex::new(records));
        let LoadClients { admin, user, gateway, processor, terminals_on, sku } = clients;
        let shared = || Arc::clone(&records);
        let mut tasks: Vec<_> = (0..RENTALS).map(|_| tokio::spawn(rent(user.clone(), sku, shared()))).collect();
        tasks.push(tokio::spawn(pay(user.clone(), processor.clone(), shared())));
        tasks.push(tokio::spawn(use_terminals(user.clone(), gateway.clone(), *terminals_on, shared())));
        tasks.push(tokio::spawn(create_skus(admin.clone(), shared())));
        Self { records, tasks }
    }

    /// Lets the load go on for this while, and until each kind of it has some acknowledgements of its end.
    pub(super) async fn go_on(&self, least: Duration) {
        let count = || {
            let records = self.records.lock().unwrap();
            let released = records.rentals.values().filter(|it| **it == RentalProgress::Released).count();
            let deposited = records.acknowledged.iter().filter(|it| it.state == Some("deposited")).count();
            [released, deposited, records.terminals]
        };
        let before = count();
        sleep(least).await;
        let until = std::time::Instant::now() + Duration::from_secs(120);
        while count().iter().zip(&before).any(|(now, before)| now <= before) {
            self.expect_alive();
            assert!(std::time::Instant::now() < until, "the load stands still: {before:?}, {:?}", count());
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// # Panics
    /// Where a client has failed.
    pub(super) fn expect_alive(&self) {
        assert!(!self.tasks.iter().any(JoinHandle::is_finished), "a client failed; see its panic above");
    }

    /// Ends the load where it is, after the loss of everything: a client may have failed since.
    pub(super) async fn stop(self) -> LoadRecords {
        for task in &self.tasks {
            task.abort();
        }
        for task in self.tasks {
            let _ = task.await;
        }
        self.records.lock().unwrap().clone()
    }
}

async fn rent(user: Client, sku: &'static str, records: SharedRecords) {
    let wanted = json!({ "sku": sku, "region_code": REGION, "gpu_count": 1, "queue_seconds": 60 });
    loop {
        records.lock().unwrap().unanswered_rentals += 1;
        let id = id_of(&user.post("/api/v1/allocations", &wanted).await.created());
        let came_to = |progress, state| {
            let mut records = records.lock().unwrap();
            records.rentals.insert(id, progress);
            records.acknowledge(id, state);
        };
        came_to(RentalProgress::Requested, None);
        records.lock().unwrap().unanswered_rentals -= 1;
        let rental = AllocationHandle::new(id, user.clone());
        rental.expect_state("active").await;
        came_to(RentalProgress::Active, Some("active"));
        let pause = rand::rng().random_range(200..1500);
        sleep(Duration::from_millis(pause)).await;
        records.lock().unwrap().rentals.insert(id, RentalProgress::Ending);
        rental.release().await;
        came_to(RentalProgress::Ending, Some("releasing"));
        rental.expect_state("released").await;
        came_to(RentalProgress::Released, Some("released"));
    }
}

async fn pay(user: Client, processor: ProcessorClient, records: SharedRecords) {
    loop {
        let begun = user.post("/api/v1/billing/checkout-sessions", &checkout(1_000)).await.created();
        let (id, url) = (id_of(&begun), begun["url"].as_str().expect("a payment has a page"));
        {
            let mut records = records.lock().unwrap();
            records.payments.insert(id);
            records.acknowledge(id, None);
            records.secrets.push(url.split_once('#').expect("the page is ours").1.to_owned());
        }
        let paid = processor.pay(&intent_in(url).expect("the page is of an intent")).await.ok();
        assert_eq!(paid["status"], "succeeded");
        records.lock().unwrap().paid.insert(id);
        let path = format!("/api/v1/billing/payments/{id}");
        user.wait_within(RESEND_TIMEOUT, &path, "it is deposited", |payment| payment["state"] == "deposited").await;
        records.lock().unwrap().acknowledge(id, Some("deposited"));
        sleep(Duration::from_millis(300)).await;
    }
}

async fn use_terminals(user: Client, gateway: TerminalGateway, allocation: Uuid, records: SharedRecords) {
    let path = format!("/api/v1/allocations/{allocation}/terminal-tokens");
    loop {
        let issued = user.post(&path, &json!({})).await.created();
        let session = issued["session_id"].as_str().and_then(|id| id.parse().ok()).expect("a session");
        let token = issued["token"].as_str().expect("a token").to_owned();
        {
            let mut records = records.lock().unwrap();
            records.acknowledge(session, None);
            records.secrets.push(token.clone());
        }
        let request = TerminalRequest { token: Some(token), ..TerminalRequest::default() };
        // Where the service cannot open it, or ends it, the next one is tried, as a page does.
        if let Ok(mut terminal) = gateway.connect(&request).await {
            receive_until(&mut terminal, |terminal| !terminal.unread.is_empty()).await;
            if terminal.closed.is_none() {
                terminal.enter("echo it is $((6 * 7)); exit\n").await;
                receive_until(&mut terminal, |_| false).await;
            }
            if terminal.text().contains("it is 42") {
                records.lock().unwrap().terminals += 1;
            }
        }
        sleep(Duration::from_millis(500)).await;
    }
}

async fn receive_until(terminal: &mut Terminal, is_enough: impl Fn(&Terminal) -> bool) {
    while terminal.closed.is_none() && !is_enough(terminal) {
        terminal.receive(Duration::from_millis(200)).await;
    }
}

/// Small transitions, so that the time of the last one that is there is known to a fraction of a second.
async fn create_skus(admin: Client, records: SharedRecords) {
    loop {
        let body = sku_body(&format!("sku-{}", Uuid::new_v4().simple()), 8);
        let id = id_of(&admin.post("/api/v1/admin/skus", &body).await.created());
        records.lock().unwrap().acknowledge(id, None);
        sleep(Duration::from_millis(150)).await;
    }
}
