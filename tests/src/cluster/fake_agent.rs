//! A fake node agent: it uses the node API over mutual TLS as the real one does, and does exactly what a test wants, also what is
//! invalid. With [`FakeAgent::serve`] it is the cheapest simulated node, of which benchmarks run many.

use super::WAIT_TIMEOUT;
use super::client::{ApiResponse, send_request};
use rcgen::KeyPair;
use reqwest::{Method, StatusCode};
use rustls::ClientConfig;
use serde_json::Value;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};
use test_host::simulated_machine::{CertificateRequest, SimulatedMachine, client_tls};
use uuid::Uuid;
use wire::VerifierSet;
use wire::bundle::BootstrapBundle;
use wire::task::{SignedEnvelope, TaskPayload, TaskResult, Verifiers, open};

/// Beyond the service's own timeouts, and pauses of a busy machine.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// A fake agent with an identity.
pub struct FakeAgent {
    pub machine: SimulatedMachine,
    pub bundle: BootstrapBundle,
    pub certificate_pem: String,
    pub chain_pem: String,
    pub key_pem: String,
    session: Uuid,
    verifiers: Verifiers,
    http: reqwest::Client,
}

/// What an agent sends to enroll.
#[derive(Clone)]
pub struct EnrollmentAttempt {
    /// Its node is that in the request's path.
    pub machine: SimulatedMachine,
    pub bundle: BootstrapBundle,
    pub csr_pem: String,
}

impl EnrollmentAttempt {
    /// A valid attempt of a new machine.
    #[must_use]
    pub fn valid(bundle: &BootstrapBundle, gpus: u32) -> (Self, KeyPair) {
        let CertificateRequest { key, csr_pem } = CertificateRequest::generate();
        let machine = SimulatedMachine::new(bundle.node_id, gpus);
        (Self { machine, bundle: bundle.clone(), csr_pem }, key)
    }

    #[must_use]
    pub fn body(&self) -> Value {
        self.machine.enrollment_body(self.bundle.enrollment_token.expose(), &self.csr_pem)
    }

    /// Sends the request.
    pub async fn enroll(&self) -> ApiResponse {
        let http = anonymous(&self.bundle);
        let url = format!("{}/internal/v1/nodes/{}/enroll", self.bundle.api_url, self.machine.node_id);
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            match send_request(http.post(&url).json(&self.body())).await {
                Ok(answer) => return answer,
                // A connection that is not made is made again: nothing was sent.
                Err(error) => assert!(error.is_connect() && Instant::now() < until, "no answer: {error:?}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Deref for FakeAgent {
    type Target = SimulatedMachine;

    fn deref(&self) -> &SimulatedMachine {
        &self.machine
    }
}

impl FakeAgent {
    /// Enrolls with the bundle's token, and sends a first heartbeat and poll.
    pub async fn onboard(bundle: &BootstrapBundle, gpus: u32) -> Self {
        let agent = Self::enroll(bundle, gpus).await;
        agent.heartbeat().await.ok();
        assert!(agent.wait(1).await.is_none(), "a new node has nothing to do");
        agent
    }

    /// Enrolls with the bundle's token and sends nothing else.
    pub async fn enroll(bundle: &BootstrapBundle, gpus: u32) -> Self {
        let (enrollment, key) = EnrollmentAttempt::valid(bundle, gpus);
        let until = Instant::now() + WAIT_TIMEOUT;
        let mut answer = enrollment.enroll().await;
        // As an agent does.
        while answer.is_transient() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(100)).await;
            answer = enrollment.enroll().await;
        }
        Self::with_identity(&enrollment, &key, &answer.created())
    }

    /// The agent with the identity of this response.
    #[must_use]
    pub fn with_identity(enrollment: &EnrollmentAttempt, key: &KeyPair, answer: &Value) -> Self {
        let text = |name: &str| answer[name].as_str().unwrap_or_else(|| panic!("no {name} in {answer}")).to_owned();
        let keys =
            VerifierSet::from_env_value(&enrollment.bundle.task_signing_pubkeys).expect("the bundle's keys parse");
        let (certificate_pem, chain_pem, key_pem) = (text("certificate_pem"), text("chain_pem"), key.serialize_pem());
        let chain = format!("{certificate_pem}\n{chain_pem}");
        let http = client(client_tls(&enrollment.bundle.ca_bundle_pem, Some((&chain, &key_pem))), true);
        Self {
            machine: enrollment.machine.clone(),
            bundle: enrollment.bundle.clone(),
            certificate_pem,
            chain_pem,
            key_pem,
            session: Uuid::new_v4(),
            verifiers: Verifiers::trusting(keys).expect("the bundle's keys can be trusted"),
            http,
        }
    }

    /// A client with this node's certificate that opens a new connection for every request: the first handshake is a full one, the later
    /// ones resume its TLS session.
    #[must_use]
    pub fn client_without_pool(&self) -> reqwest::Client {
        let chain = format!("{}\n{}", self.certificate_pem, self.chain_pem);
        client(client_tls(&self.bundle.ca_bundle_pem, Some((&chain, &self.key_pem))), false)
    }

    /// A client with this node's certificate over HTTP/1.1, or with another certificate and its key (PEM).
    #[must_use]
    pub fn client_over_http1(&self, other: Option<(&str, &str)>) -> reqwest::Client {
        let identity = other.unwrap_or((&self.certificate_pem, &self.key_pem));
        over_http1(client_tls(&self.bundle.ca_bundle_pem, Some(identity)))
    }

    /// A request at this node's path of the node API.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.request_with(&self.http, self.node_id, method, path)
    }

    /// A request with this client, at the path of this node.
    pub fn request_with(
        &self,
        http: &reqwest::Client,
        node: Uuid,
        method: Method,
        path: &str,
    ) -> reqwest::RequestBuilder {
        http.request(method, format!("{}/internal/v1/nodes/{node}/{path}", self.bundle.api_url))
    }

    /// Sends a request, and sends it again, as an agent does, where the connection was closed: the control plane closes a node's connections
    /// when its identity changes. A connection that is not made is made again.
    pub async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> ApiResponse {
        let until = Instant::now() + WAIT_TIMEOUT;
        let mut closed = 0;
        loop {
            let request = self.request(method.clone(), path);
            let request = body.iter().fold(request, |request, body| request.json(body));
            match send_request(request).await {
                Ok(response) => return response,
                Err(error) => {
                    closed += u32::from(!error.is_connect());
                    assert!(closed < 3 && Instant::now() < until, "{path}: no answer: {error:?}");
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Polls for a task and returns the response, whatever it is.
    pub async fn poll(&self, seconds: u32) -> Result<ApiResponse, reqwest::Error> {
        let path = format!("tasks/wait?timeout_seconds={seconds}&session={}", self.session);
        let timeout = REQUEST_TIMEOUT + Duration::from_secs(seconds.into());
        send_request(self.request(Method::GET, &path).timeout(timeout)).await
    }

    /// The next task, with its signature verified. A transient refusal is retried.
    pub async fn wait(&self, seconds: u32) -> Option<TaskPayload> {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let answer = self.poll(seconds).await;
            let answer = answer.unwrap_or_else(|error| panic!("no answer to the task wait: {error:?}"));
            if answer.status == StatusCode::NO_CONTENT {
                return None;
            }
            if !answer.is_transient() || Instant::now() >= until {
                return Some(self.opened(answer));
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }

    /// The task in the response to a poll, with its signature verified.
    #[must_use]
    pub fn opened(&self, answer: ApiResponse) -> TaskPayload {
        let envelope: SignedEnvelope = serde_json::from_value(answer.ok()).expect("a task is an envelope");
        open(&envelope, &self.verifiers).expect("a task is signed by a key of the bundle")
    }

    /// The next task; fails if there is none. As an agent does, it polls again after an answer that is transient.
    pub async fn next_task(&self) -> TaskPayload {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let seen = match self.poll(5).await {
                Ok(answer) if answer.status == StatusCode::NO_CONTENT || answer.is_transient() => answer.to_string(),
                Ok(answer) => return self.opened(answer),
                Err(error) => format!("{error:?}"),
            };
            assert!(
                Instant::now() < until,
                "no task for node {} within {WAIT_TIMEOUT:?}; the last: {seen}",
                self.node_id
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn heartbeat(&self) -> ApiResponse {
        self.post_until_final("heartbeat", || self.heartbeat_body()).await
    }

    pub async fn report(&self, task_id: Uuid, result: &TaskResult) -> ApiResponse {
        let body = serde_json::to_value(result).unwrap();
        self.post_until_final(&format!("tasks/{task_id}/result"), || body.clone()).await
    }

    /// Retries, as an agent does, until the response is not transient.
    pub async fn post_until_final(&self, path: &str, body: impl Fn() -> Value) -> ApiResponse {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let answer = self.send(Method::POST, path, Some(&body())).await;
            if !answer.is_transient() || Instant::now() >= until {
                return answer;
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }

    /// Executes every task at once and sends heartbeats, until it is dropped.
    pub async fn serve(self: Arc<Self>) {
        let heartbeats = Arc::clone(&self);
        tokio::join!(async move { self.execute_tasks().await }, async move {
            loop {
                heartbeats.heartbeat().await;
                tokio::time::sleep(Duration::from_secs(20)).await;
            }
        });
    }

    async fn execute_tasks(self: &Arc<Self>) {
        loop {
            let Some(task) = self.wait(30).await else { continue };
            // The next poll is sent before the result: a machine executes tasks concurrently.
            let this = Arc::clone(self);
            tokio::spawn(async move { this.report(task.task_id, &this.success(&task)).await.ok() });
        }
    }
}

/// A client without a certificate.
#[must_use]
pub fn anonymous(bundle: &BootstrapBundle) -> reqwest::Client {
    client(client_tls(&bundle.ca_bundle_pem, None), false)
}

/// A client without a certificate over HTTP/1.1.
#[must_use]
pub fn anonymous_over_http1(bundle: &BootstrapBundle) -> reqwest::Client {
    over_http1(client_tls(&bundle.ca_bundle_pem, None))
}

/// A client with a connection for every request, over HTTP/1.1.
fn over_http1(mut tls: ClientConfig) -> reqwest::Client {
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    client(tls, false)
}

fn client(tls: ClientConfig, pooled: bool) -> reqwest::Client {
    let builder = reqwest::Client::builder().tls_backend_preconfigured(tls).no_proxy().timeout(REQUEST_TIMEOUT);
    let builder = if pooled { builder } else { builder.pool_max_idle_per_host(0) };
    builder.build().unwrap()
}
