//! The agent's way to an identity against the node's state machine: whatever is lost and whenever the agent is killed, the node is not taken for
//! a clone, and has an identity in the end.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::Path;

use chrono::{DateTime, TimeDelta, Utc};
use domain::node::{CertificateRecord, Enrollment, IdentityRecovery, Node, Nonce, Reissue, Rejection, Reply, Request};
use domain::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue};
use domain::state_machine::TraceContext;
use domain::{Machine as _, NodeId, Principal, SkuId, TransitionContext};
use proptest::prelude::*;
use rcgen::{BasicConstraints, CertificateParams, CertificateSigningRequestParams, IsCa, Issuer, KeyPair, SanType};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use tokio::sync::Notify;
use wire::bundle::{BootstrapBundle, fingerprint};
use wire::enroll::RecoveryState;
use wire::error::ErrorEnvelope;
use wire::inventory::{ExecutorKind, GpuInfo, GpuSource, GpuTopology};

use super::*;
use crate::atomic_file::kill_points;
use crate::config::Flags;

#[path = "../../../../tests/test-host/src/node_fixture.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is written for tests of other crates, too")]
mod node_fixture;

const NODE: Uuid = Uuid::from_u128(5);

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallFate {
    Answered,
    RequestLost,
    AnswerLost,
    KilledBefore,
    KilledAfter,
    /// The nonce of the recovery has expired.
    Late,
    /// The network delays the recovery, and the agent has no answer.
    Delayed,
}

/// A run of the agent. It is killed after so many changes of files, if it lives so long.
#[derive(Debug, Clone)]
struct AgentRun {
    calls: Vec<CallFate>,
    killed_after: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Happening {
    /// The agent starts, with whatever identity it has.
    Starts,
    /// A proxy refuses the certificate, which the control plane accepts.
    RefusedByProxy,
    /// The control plane does not accept the certificate any more.
    CertificateVoid,
    RenewalDue,
    /// `installed`: the restart command is run.
    Reissued {
        revokes: bool,
        installed: bool,
    },
    /// The certificate and its key are lost.
    KeyLost,
    /// The last answer was stored by a release that has not recorded its token.
    EarlierRelease,
    /// What the network has delayed arrives.
    DelayedArrive,
}

/// How a run ended.
#[derive(Debug, PartialEq, Eq)]
enum RunEnd {
    InForce,
    Killed,
    Refused,
}

/// The control plane's state of one node.
struct ControlPlane {
    node: RefCell<Node>,
    policy: PolicyBook,
    issuer: Issuer<'static, KeyPair>,
    /// By certificate, PEM.
    serials: RefCell<BTreeMap<String, String>>,
    /// Makes serials and nonces unique.
    count: Cell<u64>,
    fates: RefCell<VecDeque<CallFate>>,
    delayed: RefCell<Vec<Request>>,
    killed: Notify,
}

fn now() -> DateTime<Utc> {
    DateTime::from_timestamp(1_800_000_000, 0).unwrap()
}

fn sha256(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

fn recovery_key() -> SigningKey {
    SigningKey::from_bytes(&[3; 32])
}

fn rejected() -> NodeApiError {
    let error = ErrorEnvelope {
        code: "enrollment_rejected".into(),
        message: "no".into(),
        correlation_id: "c".into(),
        details: serde_json::Map::new(),
    };
    NodeApiError::Refused { status: StatusCode::UNAUTHORIZED, error: Some(error), retry_after: None }
}

fn lost() -> NodeApiError {
    NodeApiError::Refused { status: StatusCode::SERVICE_UNAVAILABLE, error: None, retry_after: None }
}

impl ControlPlane {
    fn new(token: &str) -> Self {
        let mut policy = PolicyBook::default();
        policy.set(PolicyKey::NodeMaxRecoveries, PolicyScope::Global, now(), PolicyValue::Int(1000)).unwrap();
        let mut ca = CertificateParams::new(vec![]).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let registration = node_fixture::registration(SkuId(Uuid::from_u128(1)), 1);
        let this = Self {
            node: RefCell::new(node_fixture::registered_node(NodeId(NODE), registration, now())),
            policy,
            issuer: Issuer::new(ca, KeyPair::generate().unwrap()),
            serials: RefCell::default(),
            count: Cell::new(0),
            fates: RefCell::default(),
            delayed: RefCell::default(),
            killed: Notify::new(),
        };
        let token_id = domain::TokenId(Uuid::from_u128(9));
        this.decide(Request::IssueToken { token_id, token_sha256: sha256(token), ttl_seconds: None }).unwrap();
        this
    }

    fn decide(&self, request: Request) -> Result<Reply, Rejection> {
        let by_node =
            matches!(request, Request::Enroll(_) | Request::Recover(_) | Request::Renew { .. } | Request::Poll { .. });
        let by = if by_node { Principal::Node(NodeId(NODE)) } else { Principal::system("test") };
        let (policy, by, correlation_id, trace) = (&self.policy, &by, "c", TraceContext::default());
        let ctx = TransitionContext { now: now(), policy, by, correlation_id, trace, seed: 7, id: NODE, version: 1 };
        let decided = Node::decide(Some(&self.node.borrow()), request.into(), &ctx)?;
        assert_ne!(decided.reply, Reply::CloneSuspected, "a healthy machine is taken for a clone");
        if let Some(next) = decided.next {
            *self.node.borrow_mut() = next;
        }
        Ok(decided.reply)
    }

    fn next_count(&self) -> u64 {
        self.count.set(self.count.get() + 1);
        self.count.get()
    }

    fn record(&self) -> CertificateRecord {
        let (serial, not_after) = (self.next_count().to_string(), now() + TimeDelta::days(1));
        CertificateRecord { serial, not_after, generation: 0, authority: None }
    }

    fn answer(&self, csr_pem: &str, serial: String, reply: &Reply) -> EnrollAnswer {
        let Reply::Enrolled { identity_generation, recoveries_left } = reply else { panic!("{reply:?}") };
        let mut request = CertificateSigningRequestParams::from_pem(csr_pem).unwrap();
        request.params.subject_alt_names = vec![SanType::URI(format!("spiffe://test/node/{NODE}").try_into().unwrap())];
        let certificate_pem = request.signed_by(&self.issuer).unwrap().pem();
        self.serials.borrow_mut().insert(certificate_pem.trim_end().to_owned(), serial);
        let recovery =
            RecoveryState { identity_generation: (*identity_generation).into(), remaining: *recoveries_left };
        let (chain_pem, not_after) = (String::new(), now() + TimeDelta::days(1));
        EnrollAnswer {
            certificate_pem,
            chain_pem,
            not_after,
            recovery,
            verifier_sets: vec![],
            node_ca_bundle_pem: Some("authorities".into()),
        }
    }

    fn serial_of(&self, identity: &AgentIdentity) -> String {
        self.serials.borrow()[identity.certificate_chain_pem.trim_end()].clone()
    }

    fn accepts(&self, identity: &AgentIdentity) -> bool {
        self.decide(Request::Poll { serial: self.serial_of(identity) }).is_ok()
    }

    /// A call with its fate.
    async fn call<T>(&self, execute: impl FnOnce(CallFate) -> Result<T, NodeApiError>) -> Result<T, NodeApiError> {
        let fate = self.fates.borrow_mut().pop_front().unwrap_or(CallFate::Answered);
        match fate {
            CallFate::Answered | CallFate::Late | CallFate::Delayed => execute(fate),
            CallFate::RequestLost => Err(lost()),
            CallFate::AnswerLost => execute(fate).and_then(|_| Err(lost())),
            CallFate::KilledBefore => self.end().await,
            CallFate::KilledAfter => {
                let _ = execute(fate);
                self.end().await
            }
        }
    }

    async fn end<T>(&self) -> T {
        self.killed.notify_one();
        std::future::pending().await
    }

    fn renewed(&self, identity: &AgentIdentity, csr_pem: &str) -> Result<EnrollAnswer, NodeApiError> {
        let issued = self.record();
        let serial = issued.serial.clone();
        let renew = Request::Renew { serial: self.serial_of(identity), issued };
        self.decide(renew).map(|reply| self.answer(csr_pem, serial, &reply)).map_err(|_| rejected())
    }
}

impl EnrollmentApi for ControlPlane {
    async fn enroll(&self, request: &EnrollRequest) -> Result<EnrollAnswer, NodeApiError> {
        let read_by_an_earlier_release = request.inventory.clone().without_later_fields();
        assert_eq!(request.inventory, read_by_an_earlier_release, "a control plane of an earlier release refuses it");
        self.call(|_| {
            let issued = self.record();
            let serial = issued.serial.clone();
            let enroll = Request::Enroll(Box::new(Enrollment {
                token_sha256: sha256(request.enrollment_token.expose()),
                csr_sha256: sha256(&request.csr_pem),
                issued,
                recovery_public_key: request.recovery_public_key.to_string(),
                boot_id: "boot".into(),
                agent_version: "1".into(),
                protocol: 3,
                inventory: node_fixture::reported_inventory("a", 1),
            }));
            self.decide(enroll).map(|reply| self.answer(&request.csr_pem, serial, &reply)).map_err(|_| rejected())
        })
        .await
    }

    async fn nonce(&self) -> Result<NonceAnswer, NodeApiError> {
        let nonce = self.next_count().to_string();
        Ok(NonceAnswer { nonce, expires_at: now() + TimeDelta::minutes(5), server_time: None, node_authorities: None })
    }

    async fn recover(&self, request: &RecoverRequest) -> Result<EnrollAnswer, NodeApiError> {
        self.call(|fate| {
            let issued = self.record();
            let serial = issued.serial.clone();
            let given_out_at = now() + TimeDelta::microseconds(request.nonce.parse().unwrap());
            let until = if fate == CallFate::Late { now() } else { given_out_at + TimeDelta::minutes(5) };
            let recover = Request::Recover(Box::new(IdentityRecovery {
                token_sha256: sha256(request.enrollment_token.expose()),
                identity_generation: request.identity_generation.try_into().unwrap(),
                verified_with: PublicKey::from(&recovery_key()).to_string(),
                nonce: Nonce { value: request.nonce.clone(), until },
                csr_sha256: sha256(&request.csr_pem),
                issued,
                boot_id: "boot".into(),
                agent_version: "1".into(),
                protocol: 3,
            }));
            if fate == CallFate::Delayed {
                self.delayed.borrow_mut().push(recover);
                return Err(lost());
            }
            self.decide(recover).map(|reply| self.answer(&request.csr_pem, serial, &reply)).map_err(|_| rejected())
        })
        .await
    }
}

/// A machine with its agent's files, and the control plane.
struct Machine {
    /// Keeps the files.
    _folder: TempDir,
    config: AgentConfig,
    control_plane: ControlPlane,
    /// That of the control plane; the configuration has it once it is installed.
    token: String,
}

impl Machine {
    fn new() -> Self {
        let (folder, token) = (tempfile::tempdir().unwrap(), "token-0".to_owned());
        let config = config(folder.path(), &token);
        let control_plane = ControlPlane::new(&token);
        Self { _folder: folder, config, control_plane, token }
    }

    fn install_token(&mut self) {
        self.config.enrollment_token = Some(SecretToken::new(&self.token));
        self.lose_key();
    }

    fn lose_key(&self) {
        for path in [&self.config.cert_path, &self.config.key_path] {
            if let Err(error) = fs::remove_file(path) {
                assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
            }
        }
    }

    /// The record as an earlier release has stored it, where its answer was the last.
    fn forget_token_of_record(&self) {
        let folder = self.config.state_dir.join("identity");
        let is_pending = ["pending.json", "pending-enrollment.json"].iter().any(|file| folder.join(file).exists());
        let Ok(text) = fs::read_to_string(folder.join("recovery.json")) else { return };
        if !is_pending {
            let mut record: serde_json::Value = serde_json::from_str(&text).unwrap();
            record.as_object_mut().unwrap().remove("token_sha256");
            fs::write(folder.join("recovery.json"), record.to_string()).unwrap();
        }
    }

    /// Something happens, and the agent runs.
    async fn goes_on(&mut self, happening: Happening, run: &AgentRun) -> RunEnd {
        match happening {
            Happening::Starts | Happening::RenewalDue | Happening::RefusedByProxy => {}
            Happening::CertificateVoid => self.control_plane.node.borrow_mut().identity.certificates.clear(),
            Happening::KeyLost => self.lose_key(),
            Happening::DelayedArrive => {
                for request in self.control_plane.delayed.take() {
                    // The agent does not wait for the answer any more.
                    let _ = self.control_plane.decide(request);
                }
            }
            Happening::EarlierRelease => self.forget_token_of_record(),
            Happening::Reissued { revokes, installed } => {
                self.token = format!("token-{}", self.control_plane.next_count());
                let reissue = Request::Reissue(Box::new(Reissue {
                    token_id: domain::TokenId(Uuid::from_u128(9)),
                    token_sha256: sha256(&self.token),
                    ttl_seconds: None,
                    reason: "r".into(),
                    revoke_current_certificate: revokes,
                }));
                self.control_plane.decide(reissue).unwrap();
                if installed {
                    self.install_token();
                }
            }
        }
        *self.control_plane.fates.borrow_mut() = run.calls.clone().into();
        kill_points::kill_after(run.killed_after);
        let end = tokio::select! {
            biased;
            () = self.control_plane.killed.notified() => RunEnd::Killed,
            end = self.run_agent(happening) => end,
        };
        kill_points::kill_after(None);
        end
    }

    async fn run_agent(&self, happening: Happening) -> RunEnd {
        // Each start reads the files again.
        let identities = IdentityStore::new(&self.config);
        let ended = async {
            let found = identities.load()?;
            let is_refused = matches!(happening, Happening::RefusedByProxy);
            if let Some(identity) = found.filter(|identity| !is_refused && self.control_plane.accepts(identity)) {
                if !matches!(happening, Happening::RenewalDue) {
                    return Ok(());
                }
                // As the agent renews: with the certificate that it has, and until an answer is final.
                let pending = identities.pending_renewal()?;
                let renewing = self.control_plane.call(|_| self.control_plane.renewed(&identity, &pending.csr_pem));
                return match renewing.await {
                    Ok(answer) => Ok(identities.commit(&pending, &answer, now()).map(|_| ())?),
                    Err(error) => Err(Fatal::EnrollmentRefused(error)),
                };
            }
            self.applicant(&identities).apply_to(&self.control_plane).await.map(|_| ())
        };
        match ended.await {
            Ok(()) => {
                let identity = identities.load().unwrap().unwrap();
                assert!(self.control_plane.accepts(&identity), "the identity that was stored last is in force");
                RunEnd::InForce
            }
            Err(_) if kill_points::is_killed() => RunEnd::Killed,
            Err(Fatal::EnrollmentRefused(_)) => RunEnd::Refused,
            Err(other) => panic!("{other:?}"),
        }
    }

    fn applicant<'a>(&'a self, identities: &'a IdentityStore) -> Applicant<'a> {
        static KEY: std::sync::LazyLock<SigningKey> = std::sync::LazyLock::new(recovery_key);
        static CLOCK: std::sync::LazyLock<ServerClock> = std::sync::LazyLock::new(ServerClock::unknown);
        Applicant {
            config: &self.config,
            clock: &CLOCK,
            identities,
            recovery_key: &KEY,
            boot_id: Uuid::nil(),
            inventory: inventory(),
            verifier_set_version: 0,
        }
    }
}

fn config(folder: &Path, token: &str) -> AgentConfig {
    let at = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let bundle = BootstrapBundle {
        node_id: NODE,
        enrollment_token: SecretToken::new(token),
        api_url: "https://nodes.example.com".into(),
        task_signing_pubkeys: PublicKey::from(&recovery_key()).to_string(),
        ca_bundle_path: at("ca.pem"),
        node_cert_ca_bundle_path: at("node-ca.pem"),
        cert_path: at("node.pem"),
        key_path: at("node.key"),
        ca_bundle_pem: "authority".into(),
        ca_bundle_fingerprint: fingerprint("authority"),
        package: Default::default(),
    };
    let env_file = folder.join("agent.env");
    fs::write(&env_file, bundle.to_env_file().unwrap()).unwrap();
    let state_dir = Some(folder.join("state"));
    AgentConfig::gather(&Flags { env_file: Some(env_file), state_dir, ..Flags::default() }, |_| None).unwrap()
}

fn inventory() -> NodeInventory {
    NodeInventory {
        hostname: "a".into(),
        kernel: "6".into(),
        cpu_model: "c".into(),
        cpu_cores: 1,
        memory_mib: 1,
        storage_gib: 1,
        gpus: vec![GpuInfo {
            index: 0,
            uuid: "GPU-0".into(),
            vendor: "NVIDIA".into(),
            model: "H100".into(),
            memory_mib: 1,
            topology: GpuTopology { numa_node: Some(0), nvlink_domain: Some(0) },
        }],
        gpu_source: GpuSource::Simulated,
        driver_version: None,
        executor: ExecutorKind::Sandbox,
        ssh_host_key_fingerprint: None,
        system: None,
        tenant_devices: vec!["/dev/fuse".into()],
    }
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        3 => Just(Happening::Starts),
        3 => Just(Happening::RefusedByProxy),
        2 => Just(Happening::CertificateVoid),
        3 => Just(Happening::RenewalDue),
        3 => any::<(bool, bool)>().prop_map(|(revokes, installed)| Happening::Reissued { revokes, installed }),
        1 => Just(Happening::KeyLost),
        1 => Just(Happening::EarlierRelease),
        2 => Just(Happening::DelayedArrive),
    ]
}

fn agent_run() -> impl Strategy<Value = AgentRun> {
    let fate = prop_oneof![
        3 => Just(CallFate::Answered),
        1 => Just(CallFate::RequestLost),
        3 => Just(CallFate::AnswerLost),
        1 => Just(CallFate::KilledBefore),
        3 => Just(CallFate::KilledAfter),
        2 => Just(CallFate::Delayed),
    ];
    // A nonce expires seldom: of two in a row the agent takes the second for another fault.
    let calls = (prop::collection::vec(fate, 0..4), prop::option::weighted(0.2, 0..4_usize));
    let calls = calls.prop_map(|(mut calls, late)| {
        if let Some(call) = late.and_then(|at| calls.get_mut(at)) {
            *call = CallFate::Late;
        }
        calls
    });
    (calls, prop::option::weighted(0.4, 0..9_usize)).prop_map(|(calls, killed_after)| AgentRun { calls, killed_after })
}

/// Runs them, and then the operator installs the token, and nothing fails.
fn run_all(happenings: &[(Happening, AgentRun)]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut machine = Machine::new();
        for (happening, run) in happenings {
            machine.goes_on(*happening, run).await;
        }
        let installed = machine.config.enrollment_token.as_ref().map(SecretToken::expose);
        if installed != Some(machine.token.as_str()) {
            machine.install_token();
        }
        let undisturbed = AgentRun { calls: Vec::new(), killed_after: None };
        assert_eq!(machine.goes_on(Happening::Starts, &undisturbed).await, RunEnd::InForce);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn healthy_machine_is_never_taken_for_a_clone(happenings in prop::collection::vec((happening(), agent_run()), 1..10)) {
        run_all(&happenings);
    }
}

/// Each of the ways to get an identity, killed at each of its calls and changes, and then the same again.
#[test]
fn machine_that_is_killed_at_any_point_has_its_identity_after_the_next_start() {
    let undisturbed = AgentRun { calls: Vec::new(), killed_after: None };
    let mut disturbed: Vec<_> =
        (0..9).map(|changes| AgentRun { calls: Vec::new(), killed_after: Some(changes) }).collect();
    for fate in [CallFate::RequestLost, CallFate::AnswerLost, CallFate::KilledBefore, CallFate::KilledAfter] {
        for before in 0..3 {
            let calls = [vec![CallFate::Answered; before], vec![fate]].concat();
            disturbed.push(AgentRun { calls, killed_after: None });
        }
    }
    let reissued = Happening::Reissued { revokes: false, installed: true };
    for second in [reissued, Happening::RefusedByProxy, Happening::RenewalDue, Happening::CertificateVoid] {
        for run in &disturbed {
            // The second generation: the first one is what a node presents that knows none.
            let before = [Happening::Starts, Happening::CertificateVoid].map(|it| (it, undisturbed.clone()));
            let after = [(second, run.clone()), (Happening::RenewalDue, run.clone()), (second, run.clone())];
            run_all(&[&before[..], &after[..]].concat());
        }
    }
}
