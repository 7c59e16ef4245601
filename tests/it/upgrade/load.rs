//! Load that does not wait for its answers: reads and rentals at fixed rates up to a bound of those in flight, a terminal that prints, a
//! subscriber to notifications, and a look at the nodes.

use futures::FutureExt as _;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tests::cluster::client::Client;
use tests::cluster::notifications::NotificationSubscriber;
use tests::cluster::terminal::{Terminal, TerminalGateway, TerminalRequest};
use tests::cluster::{AllocationHandle, REGION, TestCluster, id_of};
use tokio::task::JoinHandle;
use uuid::Uuid;

const READ_INTERVAL: Duration = Duration::from_millis(100);
const RENTAL_INTERVAL: Duration = Duration::from_millis(500);
const NODE_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Calls of one kind that are in flight at most: a slow machine has fewer of them, not a longer queue.
const MAX_READS: usize = 12;
/// Nodes without users of their own take one tenant at a time, and one has the terminal.
const MAX_RENTALS: usize = super::NODES - 2;
/// Replicas start one after the other meanwhile.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(120);
const RETRY_PAUSE: Duration = Duration::from_millis(100);
const RECEIVE_WITHIN: Duration = Duration::from_millis(200);
/// Prints its line number for as long as the terminal is open.
const PRINTER: &str = "i=0; while :; do i=$((i+1)); echo line-$i; sleep 0.02; done\n";

/// Load in progress.
pub(super) struct Load {
    counters: Arc<Counters>,
    user: Client,
    loops: Vec<JoinHandle<()>>,
    terminal: JoinHandle<TerminalTranscript>,
}

#[derive(Default)]
struct Counters {
    stopped: AtomicBool,
    reads: AtomicUsize,
    rentals: AtomicUsize,
    /// Requests that were sent again: refused with 503, or their connection ended.
    retried: AtomicUsize,
    notifications: AtomicUsize,
    reconnections: AtomicUsize,
    slowest_read: Mutex<Duration>,
    failures: Mutex<Vec<String>>,
}

/// What a terminal showed, across its connections.
struct TerminalTranscript {
    shown: Vec<u8>,
    connections: usize,
}

/// The result of the load.
pub(super) struct LoadReport {
    counters: Arc<Counters>,
    lines: usize,
    connections: usize,
    pub(super) failures: Vec<String>,
}

impl Load {
    /// Starts the load: a terminal on a node of this SKU, and rentals.
    pub(super) async fn start(cluster: &mut TestCluster, sku: &str) -> Self {
        let counters = Arc::new(Counters::default());
        let shown = cluster.rent_active(sku, 1).await;
        let (terminal, session) = cluster.terminal(shown.id).await;
        let terminal = TerminalUser {
            user: cluster.user.clone(),
            gateway: cluster.gateway(),
            allocation: shown.id,
            session,
            counters: Arc::clone(&counters),
        }
        .read_all(terminal);
        let token = cluster.identity.token_of("user").expect("the provider signs");
        let subscriber = subscribe(cluster.gateway(), token.expose_secret().to_owned(), Arc::clone(&counters));
        let loops = vec![
            tokio::spawn(every(READ_INTERVAL, MAX_READS, Arc::clone(&counters), {
                let (user, path) = (cluster.user.clone(), shown.path());
                move |counters| read(user.clone(), path.clone(), counters)
            })),
            tokio::spawn(every(RENTAL_INTERVAL, MAX_RENTALS, Arc::clone(&counters), {
                let (user, sku) = (cluster.user.clone(), sku.to_owned());
                move |counters| rent_and_release(user.clone(), sku.clone(), counters)
            })),
            tokio::spawn(every(NODE_CHECK_INTERVAL, MAX_READS, Arc::clone(&counters), {
                let admin = cluster.admin.clone();
                move |counters| expect_no_node_offline(admin.clone(), counters)
            })),
            tokio::spawn(subscriber),
        ];
        let load = Self { counters, user: cluster.user.clone(), loops, terminal: tokio::spawn(terminal) };
        load.expect_progress().await;
        load
    }

    /// Waits until requests, rentals and notifications of after this call have succeeded.
    pub(super) async fn expect_progress(&self) {
        let counters = &self.counters;
        let count =
            || [&counters.reads, &counters.rentals, &counters.notifications].map(|count| count.load(Ordering::Relaxed));
        let (before, until) = (count(), Instant::now() + PROGRESS_TIMEOUT);
        while count().iter().zip(&before).any(|(now, before)| *now < before + 2) {
            if Instant::now() > until {
                let allocations = self.user.get("/api/v1/allocations?limit=200").await.ok();
                let unfinished = allocations["items"].as_array().into_iter().flatten();
                let unfinished: Vec<_> = unfinished.filter(|allocation| allocation["state"] != "released").collect();
                panic!("the load stands still: {before:?}, {:?}; {unfinished:#?}", count());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until a read has been answered after this call.
    pub(super) async fn expect_read(&self) {
        let reads = || self.counters.reads.load(Ordering::Relaxed);
        let (before, until) = (reads(), Instant::now() + PROGRESS_TIMEOUT);
        while reads() == before {
            assert!(Instant::now() < until, "no read is answered while a replica is away");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends the load, and waits for the requests in flight.
    pub(super) async fn stop(self) -> LoadReport {
        self.counters.stopped.store(true, Ordering::Relaxed);
        for each in self.loops {
            each.await.expect("a loop of the load ends");
        }
        let transcript = self.terminal.await.expect("the terminal's loop ends");
        let mut failures = std::mem::take(&mut *self.counters.failures.lock().unwrap());
        let lines = numbers_of(&transcript.shown);
        if let Some(gap) = lines.windows(2).find(|pair| pair[1] != pair[0] + 1) {
            failures.push(format!("the terminal lost or repeated output: line {} after {}", gap[1], gap[0]));
        }
        LoadReport { counters: self.counters, lines: lines.len(), connections: transcript.connections, failures }
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        writeln!(
            f,
            "{} reads (the slowest {:.1?}) and {} rentals; {} requests were sent again",
            count(&counters.reads),
            counters.slowest_read.lock().unwrap(),
            count(&counters.rentals),
            count(&counters.retried)
        )?;
        writeln!(f, "the terminal showed {} lines over {} connections", self.lines, self.connections)?;
        let (notifications, reconnections) = (count(&counters.notifications), count(&counters.reconnections));
        writeln!(f, "{notifications} notifications, after {reconnections} reconnections")?;
        self.failures.iter().try_for_each(|failure| writeln!(f, "FAILED: {failure}"))
    }
}

/// Begins a call at each interval while less than `most` are in flight, and waits for all of them at the end. A call that panics
/// has failed.
async fn every<F: Future<Output = ()> + Send + 'static>(
    interval: Duration,
    most: usize,
    counters: Arc<Counters>,
    call: impl Fn(Arc<Counters>) -> F,
) {
    let mut calls = tokio::task::JoinSet::new();
    let mut ticks = tokio::time::interval(interval);
    while !counters.stopped.load(Ordering::Relaxed) {
        ticks.tick().await;
        while calls.try_join_next().is_some() {}
        if calls.len() >= most {
            continue;
        }
        let (call, counters) = (call(Arc::clone(&counters)), Arc::clone(&counters));
        calls.spawn(async move {
            if let Err(panic) = AssertUnwindSafe(call).catch_unwind().await {
                let why = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a call panicked".to_owned());
                counters.failures.lock().unwrap().push(why);
            }
        });
    }
    calls.join_all().await;
}

/// Sends a request as a careful client does: a refusal with `Retry-After` and a broken connection are followed by the same request, under
/// the same key. Any other failure is one.
async fn call(client: &Client, counters: &Counters, method: Method, path: &str, body: Option<&Value>) -> Value {
    let key = Uuid::new_v4().to_string();
    let until = Instant::now() + PROGRESS_TIMEOUT;
    loop {
        let mut request = client.request(method.clone(), path);
        if let Some(body) = body {
            request = request.header("Idempotency-Key", &key).json(body);
        }
        let why = match client.try_send(request).await {
            Ok(answer) if answer.is_transient() => answer.to_string(),
            Ok(answer) => return answer.ok(),
            Err(error) => format!("{error:?}"),
        };
        counters.retried.fetch_add(1, Ordering::Relaxed);
        assert!(Instant::now() < until, "{method} {path}: not answered within {PROGRESS_TIMEOUT:?}; the last: {why}");
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

async fn read(user: Client, path: String, counters: Arc<Counters>) {
    let began = Instant::now();
    let seen = call(&user, &counters, Method::GET, &path, None).await;
    assert_eq!(seen["state"], "active", "{seen}");
    counters.reads.fetch_add(1, Ordering::Relaxed);
    let mut slowest = counters.slowest_read.lock().unwrap();
    *slowest = slowest.max(began.elapsed());
}

async fn rent_and_release(user: Client, sku: String, counters: Arc<Counters>) {
    let wanted = json!({ "sku": sku, "region_code": REGION, "gpu_count": 1, "queue_seconds": 60 });
    let created = call(&user, &counters, Method::POST, "/api/v1/allocations", Some(&wanted)).await;
    let allocation = AllocationHandle::new(id_of(&created), user.clone());
    allocation.expect_state_within(PROGRESS_TIMEOUT, "active").await;
    let path = format!("{}/release", allocation.path());
    call(&user, &counters, Method::POST, &path, Some(&json!({}))).await;
    allocation.expect_state_within(PROGRESS_TIMEOUT, "released").await;
    counters.rentals.fetch_add(1, Ordering::Relaxed);
}

async fn expect_no_node_offline(admin: Client, counters: Arc<Counters>) {
    let offline = call(&admin, &counters, Method::GET, "/api/v1/admin/nodes?state=offline", None).await;
    assert_eq!(offline["items"], json!([]), "agents are in contact throughout");
}

/// Receives notifications until the load stops, and connects again where the connection ends.
async fn subscribe(gateway: TerminalGateway, token: String, counters: Arc<Counters>) {
    let offered = [tests::cluster::notifications::PROTOCOL.to_owned(), format!("bearer.{token}")];
    while !counters.stopped.load(Ordering::Relaxed) {
        let connecting = AssertUnwindSafe(NotificationSubscriber::connect(&gateway, "", &offered, &[])).catch_unwind();
        let Ok(Ok(mut subscriber)) = connecting.await else {
            tokio::time::sleep(RETRY_PAUSE).await;
            continue;
        };
        while subscriber.closed.is_none() && !counters.stopped.load(Ordering::Relaxed) {
            subscriber.receive(RECEIVE_WITHIN).await;
            let of_rentals =
                subscriber.unread.drain(..).filter(|message| message["type"] != "notifications.ready").count();
            counters.notifications.fetch_add(of_rentals, Ordering::Relaxed);
        }
        if subscriber.closed.is_some() {
            counters.reconnections.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The user of a terminal whose connection may end.
struct TerminalUser {
    user: Client,
    gateway: TerminalGateway,
    allocation: Uuid,
    session: Uuid,
    counters: Arc<Counters>,
}

impl TerminalUser {
    /// Reads all output until the load stops. After an end of the connection it goes on at the byte where that one ended.
    async fn read_all(self, mut terminal: Terminal) -> TerminalTranscript {
        let mut transcript = TerminalTranscript { shown: Vec::new(), connections: 1 };
        terminal.enter(PRINTER).await;
        while !self.counters.stopped.load(Ordering::Relaxed) {
            terminal.receive(RECEIVE_WITHIN).await;
            transcript.shown.append(&mut terminal.shown);
            if terminal.closed.is_some() {
                terminal = self.resume(terminal.position).await;
                transcript.connections += 1;
            }
        }
        transcript.shown.append(&mut terminal.shown);
        transcript
    }

    async fn resume(&self, position: u64) -> Terminal {
        let (path, body) =
            (format!("/api/v1/allocations/{}/terminal-tokens", self.allocation), json!({ "session_id": self.session }));
        let until = Instant::now() + PROGRESS_TIMEOUT;
        loop {
            let issued = call(&self.user, &self.counters, Method::POST, &path, Some(&body)).await;
            let request = TerminalRequest {
                token: issued["token"].as_str().map(str::to_owned),
                from: Some(position),
                ..TerminalRequest::default()
            };
            // Its replica may be the next one that stops, at any moment until it is attached.
            let attaching = async {
                let mut terminal = self.gateway.connect(&request).await.ok()?;
                let attached = terminal.attached().await;
                Some((terminal, attached))
            };
            if let Ok(Some((terminal, attached))) = AssertUnwindSafe(attaching).catch_unwind().await {
                if attached["lost_bytes"] != 0 || attached["position"] != position {
                    self.counters.failures.lock().unwrap().push(format!("resumed at {position}: {attached}"));
                }
                return terminal;
            }
            assert!(Instant::now() < until, "the terminal cannot be resumed");
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

/// The numbers of the whole lines that the terminal showed.
fn numbers_of(shown: &[u8]) -> Vec<u64> {
    let text = String::from_utf8_lossy(shown);
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| line.trim_end().strip_prefix("line-")?.parse().ok()).collect()
}
