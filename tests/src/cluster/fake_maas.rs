//! A bare-metal provider for a test, with the parts of MAAS's API 2.0 that the service uses. It has machines in memory, whose deployments
//! and releases end when the test says so, and fails as the test configures.

mod description;
mod form;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::stream;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

/// The API key of the service's user.
pub const API_KEY: &str = "consumer-of-a-test:token-of-a-test:secret-of-a-test";
/// The user of that key.
pub const USER: &str = "gpuaas";

/// How requests fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaasFault {
    Status(u16),
    /// A page of a proxy, with status 200.
    Page,
    /// No answer within any timeout.
    Slow,
    /// An answer that ends in the middle.
    Cut,
}

/// A machine, as the provider has it.
#[derive(Clone, Debug)]
pub struct ProviderMachine {
    pub hostname: String,
    pub status: &'static str,
    pub power: &'static str,
    pub owner: String,
    /// The user data of each deployment.
    pub deployments: Vec<String>,
    /// The image of each deployment; empty where none was named.
    pub images: Vec<String>,
    /// Releases with their disks erased.
    pub erasures: usize,
    pub marked_broken: usize,
}

#[derive(Default)]
struct ProviderState {
    machines: BTreeMap<String, ProviderMachine>,
    fault: Option<MaasFault>,
    /// By operation and machine.
    operation_faults: BTreeMap<(String, String), MaasFault>,
    failed_operations: BTreeSet<(String, String)>,
    /// Of the next requests for the user of the key, one each.
    user_faults: VecDeque<MaasFault>,
    /// The next deployment is not answered.
    holds_answer: bool,
    /// How long after its request a deployment begins.
    deploy_delay: Duration,
    /// How long after its request a machine is allocated.
    allocation_delay: Duration,
    allocation_requests: usize,
    deploy_requests: usize,
    deploys_at_once: usize,
    most_deploys_at_once: usize,
    /// A permit for each reading of a machine that is answered; `None`: all are.
    answered_reads: Option<Arc<Semaphore>>,
    held_reads: usize,
}

/// A running provider. Dropping it stops it.
pub struct FakeMaas {
    address: String,
    state: Arc<Mutex<ProviderState>>,
    serving: AbortHandle,
}

impl Drop for FakeMaas {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl FakeMaas {
    pub async fn start() -> Self {
        let state = Arc::new(Mutex::new(ProviderState::default()));
        // MAAS limits no upload (`DATA_UPLOAD_MAX_MEMORY_SIZE` of its settings), and user data with a package's first program is long.
        let router =
            Router::new().fallback(answer_detached).layer(DefaultBodyLimit::disable()).with_state(Arc::clone(&state));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("there is a port");
        let address = format!("http://{}/MAAS", listener.local_addr().expect("it listens"));
        let serving = tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle();
        Self { address, state, serving }
    }

    /// The value of `MAAS_API_BASE_URL`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.address
    }

    /// A machine in the pool, switched off.
    pub fn add(&self, system_id: &str, hostname: &str) {
        let machine = ProviderMachine {
            hostname: hostname.to_owned(),
            status: "Ready",
            power: "off",
            owner: String::new(),
            deployments: Vec::new(),
            images: Vec::new(),
            erasures: 0,
            marked_broken: 0,
        };
        self.state().machines.insert(system_id.to_owned(), machine);
    }

    /// Changes a machine, as the provider or its operators do.
    pub fn change(&self, system_id: &str, change: impl FnOnce(&mut ProviderMachine)) {
        change(self.state().machines.get_mut(system_id).expect("there is such a machine"));
    }

    /// Deletes a machine, as the provider's operators do.
    pub fn delete(&self, system_id: &str) {
        self.state().machines.remove(system_id).expect("there is such a machine");
    }

    #[must_use]
    pub fn machine(&self, system_id: &str) -> ProviderMachine {
        self.state().machines[system_id].clone()
    }

    /// Waits until a machine is so.
    pub async fn wait_for(
        &self,
        system_id: &str,
        what: &str,
        wanted: impl Fn(&ProviderMachine) -> bool,
    ) -> ProviderMachine {
        for _ in 0..1200 {
            let machine = self.machine(system_id);
            if wanted(&machine) {
                return machine;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("not within two minutes: {what}; {:?}", self.machine(system_id))
    }

    pub fn fail(&self, fault: Option<MaasFault>) {
        self.state().fault = fault;
    }

    /// This operation (`op`) on this machine fails so until it is restored by `None`: it is refused and not done, or it is done and its
    /// answer is slow or cut.
    pub fn fail_operation(&self, operation: &str, system_id: &str, fault: Option<MaasFault>) {
        let of = (operation.to_owned(), system_id.to_owned());
        let mut state = self.state();
        match fault {
            Some(fault) => state.operation_faults.insert(of, fault),
            None => state.operation_faults.remove(&of),
        };
    }

    /// Waits until this operation on this machine has failed as [`Self::fail_operation`] configured.
    pub async fn expect_failed_operation(&self, operation: &str, system_id: &str) {
        let of = (operation.to_owned(), system_id.to_owned());
        for _ in 0..1200 {
            if self.state().failed_operations.contains(&of) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("not within two minutes: {operation} of {system_id}")
    }

    /// The next requests for the user of the key fail, each in one of these ways.
    pub fn fail_user_requests(&self, faults: impl IntoIterator<Item = MaasFault>) {
        self.state().user_faults.extend(faults);
    }

    /// The next deployment begins, and its answer never comes.
    pub fn hold_next_answer(&self) {
        self.state().holds_answer = true;
    }

    /// From now on a deployment begins, and is answered, so long after its request. Until then the machine's status is that of before.
    pub fn delay_deployments(&self, delay: Duration) {
        self.state().deploy_delay = delay;
    }

    /// From now on a machine is allocated, and that is answered, so long after the request.
    pub fn delay_allocations(&self, delay: Duration) {
        self.state().allocation_delay = delay;
    }

    /// From now on a reading of a machine is held until [`Self::answer_reads`] lets it be answered, with the status of then.
    pub fn hold_reads(&self) {
        self.state().answered_reads = Some(Arc::new(Semaphore::new(0)));
    }

    /// Answers so many of the readings that are held, or that come.
    pub fn answer_reads(&self, many: usize) {
        let answered = self.state().answered_reads.clone().expect("readings are held");
        answered.add_permits(many);
    }

    /// Waits until a reading is held.
    pub async fn expect_held_read(&self) {
        self.expect_held_reads(1).await;
    }

    /// Waits until so many readings are held.
    pub async fn expect_held_reads(&self, many: usize) {
        for _ in 0..1200 {
            if self.state().held_reads >= many {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("{many} machines are not read within two minutes: {}", self.state().held_reads)
    }

    /// The requests for allocations, also those that were refused.
    #[must_use]
    pub fn allocation_requests(&self) -> usize {
        self.state().allocation_requests
    }

    /// The most requests for deployments that were not answered at one time.
    #[must_use]
    pub fn most_deploys_at_once(&self) -> usize {
        self.state().most_deploys_at_once
    }

    /// The requests for deployments, also those that were refused.
    #[must_use]
    pub fn deploy_requests(&self) -> usize {
        self.state().deploy_requests
    }

    fn state(&self) -> MutexGuard<'_, ProviderState> {
        locked(&self.state)
    }
}

fn locked(state: &Mutex<ProviderState>) -> MutexGuard<'_, ProviderState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The provider ends what was requested, also where the client does not wait for it.
async fn answer_detached(
    State(state): State<Arc<Mutex<ProviderState>>>,
    method: Method,
    uri: Uri,
    Query(query): Query<HashMap<String, String>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    tokio::spawn(answer(state, method, uri, query, headers, body)).await.expect("no request panics")
}

async fn answer(
    state: Arc<Mutex<ProviderState>>,
    method: Method,
    uri: Uri,
    query: HashMap<String, String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let fault = locked(&state).fault;
    if let Some(fault) = fault {
        return answer_wrongly(fault).await;
    }
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
    // Clients read it without a key.
    if uri.path() == "/MAAS/api/2.0/describe/" {
        return axum::Json(description::describe(&format!("http://{host}/MAAS"))).into_response();
    }
    let signed = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !signed.contains("oauth_token=\"token-of-a-test\"")
        || !signed.contains("oauth_signature=\"%26secret-of-a-test\"")
    {
        return (StatusCode::UNAUTHORIZED, "Invalid access token").into_response();
    }
    let form = form::fields(&headers, &body);
    let op = query.get("op").map(String::as_str);
    let path = uri.path().strip_prefix("/MAAS/api/2.0/").unwrap_or_default();
    let fault = operation_fault(&mut locked(&state), op, form.get("system_id").map_or(path, String::as_str));
    if op == Some("allocate") {
        let delay = {
            let mut state = locked(&state);
            state.allocation_requests += 1;
            state.allocation_delay
        };
        tokio::time::sleep(delay).await;
    }
    if op == Some("deploy") {
        let delay = {
            let mut state = locked(&state);
            state.deploy_requests += 1;
            state.deploys_at_once += 1;
            state.most_deploys_at_once = state.most_deploys_at_once.max(state.deploys_at_once);
            state.deploy_delay
        };
        tokio::time::sleep(delay).await;
        locked(&state).deploys_at_once -= 1;
    }
    if let Some(refusal @ (MaasFault::Status(_) | MaasFault::Page)) = fault {
        return answer_wrongly(refusal).await;
    }
    if method == Method::GET && path.strip_prefix("machines/").is_some_and(|id| !id.is_empty()) {
        hold_read(&state).await;
    }
    let (response, holds) = {
        let mut state = locked(&state);
        let response = match (method.as_str(), path, op) {
            ("GET", "users/", Some("whoami")) => axum::Json(json!({ "username": USER })).into_response(),
            ("GET", "machines/", None) => list(&state, query.get("hostname").map_or("", String::as_str)),
            ("POST", "machines/", Some("allocate")) => {
                allocate(&mut state, form.get("system_id").map_or("", String::as_str))
            }
            (verb, path, op) => match path.strip_prefix("machines/").and_then(|rest| rest.strip_suffix('/')) {
                Some(system_id) => on_machine(&mut state, verb, system_id, op, &form),
                None => StatusCode::NOT_FOUND.into_response(),
            },
        };
        let holds = op == Some("deploy") && std::mem::take(&mut state.holds_answer);
        (response, holds)
    };
    if holds {
        std::future::pending::<()>().await;
    }
    match fault {
        Some(fault) => answer_wrongly(fault).await,
        None => response,
    }
}

/// How this operation fails on the machine of this id or path.
fn operation_fault(state: &mut ProviderState, op: Option<&str>, machine: &str) -> Option<MaasFault> {
    let op = op?;
    if op == "whoami" {
        return state.user_faults.pop_front();
    }
    let system_id = machine.trim_start_matches("machines/").trim_end_matches('/');
    let of = (op.to_owned(), system_id.to_owned());
    let fault = state.operation_faults.get(&of).copied()?;
    state.failed_operations.insert(of);
    Some(fault)
}

async fn answer_wrongly(fault: MaasFault) -> Response {
    match fault {
        MaasFault::Status(status) => (StatusCode::from_u16(status).expect("it is a status"), "not now").into_response(),
        MaasFault::Page => ([(header::CONTENT_TYPE, "text/html")], "<html>Log in</html>").into_response(),
        MaasFault::Slow => std::future::pending().await,
        MaasFault::Cut => cut(),
    }
}

async fn hold_read(state: &Mutex<ProviderState>) {
    let Some(answered) = locked(state).answered_reads.clone() else { return };
    locked(state).held_reads += 1;
    answered.acquire().await.expect("it is not closed").forget();
    locked(state).held_reads -= 1;
}

/// The beginning of an answer, and then the end of the connection.
fn cut() -> Response {
    let beginning = stream::iter([Ok(Bytes::from_static(b"[{\"system_id\": ")), Err(std::io::Error::other("cut"))]);
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(beginning)).into_response()
}

fn list(state: &ProviderState, hostname: &str) -> Response {
    let found = state.machines.iter().filter(|(_, machine)| machine.hostname == hostname);
    axum::Json(found.map(|(id, machine)| record(id, machine)).collect::<Vec<_>>()).into_response()
}

fn allocate(state: &mut ProviderState, system_id: &str) -> Response {
    match state.machines.get_mut(system_id) {
        Some(machine) if machine.status == "Ready" => {
            (machine.status, machine.owner) = ("Allocated", USER.to_owned());
            axum::Json(record(system_id, machine)).into_response()
        }
        Some(_) | None => (StatusCode::CONFLICT, "No available machine matches constraints").into_response(),
    }
}

fn on_machine(
    state: &mut ProviderState,
    verb: &str,
    system_id: &str,
    op: Option<&str>,
    form: &HashMap<String, String>,
) -> Response {
    let Some(machine) = state.machines.get_mut(system_id) else {
        return (StatusCode::NOT_FOUND, "Not Found").into_response();
    };
    match (verb, op, machine.status) {
        ("GET", None, _) => {}
        ("POST", Some("deploy"), "Allocated") => {
            let user_data = form.get("user_data").and_then(|data| STANDARD.decode(data).ok()).unwrap_or_default();
            machine.deployments.push(String::from_utf8_lossy(&user_data).into_owned());
            machine.images.push(form.get("distro_series").cloned().unwrap_or_default());
            (machine.status, machine.power) = ("Deploying", "on");
        }
        (
            "POST",
            Some("release"),
            "Allocated" | "Deploying" | "Deployed" | "Failed deployment" | "Failed disk erasing",
        ) => {
            machine.erasures += usize::from(form.get("erase").is_some_and(|erase| erase == "true"));
            machine.status = "Disk erasing";
        }
        ("POST", Some("mark_broken"), _) => {
            machine.marked_broken += 1;
            machine.status = "Broken";
        }
        (_, op, status) => {
            let text = format!("Cannot {} a machine that is {status}", op.unwrap_or("read"));
            return (StatusCode::CONFLICT, text).into_response();
        }
    }
    axum::Json(record(system_id, machine)).into_response()
}

fn record(system_id: &str, machine: &ProviderMachine) -> Value {
    json!({
        "system_id": system_id,
        "hostname": machine.hostname,
        "fqdn": format!("{}.maas", machine.hostname),
        "status_name": machine.status,
        "power_state": machine.power,
        "owner": machine.owner,
    })
}
