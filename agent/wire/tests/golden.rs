//! Every message as JSON, reviewed as text. A change here is a change of the protocol: an older agent or control plane has to understand
//! it, otherwise `PROTOCOL` is incremented.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use chrono::{DateTime, TimeDelta, Utc};
use ed25519_dalek::SigningKey;
use insta::assert_json_snapshot;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use uuid::Uuid;
use wire::bundle::{BootstrapBundle, Package, fingerprint};
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, CleanupReport, FindingOutcome};
use wire::enroll::{EnrollAnswer, EnrollRequest, NonceAnswer, RecoverRequest, RecoveryState, RenewRequest};
use wire::finding::{AcceptedFinding, Finding};
use wire::heartbeat::{
    Alert, Classification, GpuTelemetry, HealthLevel, HealthReport, Heartbeat, HeartbeatAnswer, PollSettings,
    RunningTask, Telemetry,
};
use wire::inventory::{ExecutorKind, GpuInfo, GpuSource, GpuTopology, NodeInventory};
use wire::recording::{RecordMode, RecordTerms};
use wire::task::{
    DeviceRef, OpenTerminal, Provision, ReconcileSshKeys, Release, ResultAnswer, ResultReceipt, Task, TaskError,
    TaskPayload, TaskResult, TaskStatus,
};
use wire::verifier_set::{KeyStatus, VerifierKey};
use wire::{PROTOCOL, PublicKey, SecretToken, VerifierSet};

/// Serialising, reading back and serialising again gives the same text.
fn round_trips<T: Serialize + DeserializeOwned>(message: &T) {
    let text = serde_json::to_string(message).unwrap();
    let repeated: T = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&repeated).unwrap(), text);
}

macro_rules! golden {
    ($message:expr) => {{
        let message = $message;
        round_trips(&message);
        assert_json_snapshot!(message);
    }};
}

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(1_795_219_200, 0).unwrap() + TimeDelta::seconds(seconds)
}

fn id(n: u128) -> Uuid {
    Uuid::from_u128(0x0193_5000_0000_7000_8000_0000_0000_0000 + n)
}

fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

fn inventory() -> NodeInventory {
    NodeInventory {
        hostname: "node-1".into(),
        kernel: "6.1.0".into(),
        cpu_model: "AMD EPYC 9654".into(),
        cpu_cores: 192,
        memory_mib: 1_547_264,
        storage_gib: 30_720,
        gpus: vec![GpuInfo {
            index: 0,
            uuid: "GPU-4f7d2a6e-0000-0000-0000-000000000000".into(),
            vendor: "NVIDIA".into(),
            model: "H100".into(),
            memory_mib: 81_920,
            topology: GpuTopology::default(),
        }],
        gpu_source: GpuSource::Simulated,
        driver_version: Some("570.86.15".into()),
        executor: ExecutorKind::Sandbox,
        ssh_host_key_fingerprint: None,
        system: None,
        tenant_devices: vec!["/dev/fuse".into()],
    }
}

fn device() -> DeviceRef {
    DeviceRef { index: 0, uuid: "GPU-4f7d2a6e-0000-0000-0000-000000000000".into() }
}

fn verifier_set() -> VerifierSet {
    let keys = vec![
        VerifierKey::new(PublicKey::from(&key(2)), KeyStatus::Active),
        VerifierKey::new(PublicKey::from(&key(3)), KeyStatus::Staged),
        VerifierKey::new(PublicKey::from(&key(1)), KeyStatus::Grace),
    ];
    VerifierSet::sign(1, keys, &[(&PublicKey::from(&key(1)).key_id(), &key(1))]).unwrap()
}

fn payload(task: Task) -> TaskPayload {
    TaskPayload {
        node_id: id(1),
        task_id: id(2),
        attempt: 1,
        issued_at: at(0),
        expires_at: at(600),
        origin: None,
        task,
    }
}

fn report() -> CleanupReport {
    CleanupReport {
        node_id: id(1),
        allocation_id: id(3),
        task_id: id(2),
        attempt: 1,
        boot_id: id(9),
        checked_at: at(5),
        findings: vec![
            CleanupFinding {
                what: CleanupCheck::Home,
                looked_for: "allocations/a/home".into(),
                outcome: FindingOutcome::Gone,
                detail: None,
            },
            CleanupFinding {
                what: CleanupCheck::DevShm,
                looked_for: "/dev/shm".into(),
                outcome: FindingOutcome::Unknown,
                detail: Some("permission denied".into()),
            },
        ],
    }
}

#[test]
fn enroll_request() {
    golden!(EnrollRequest {
        enrollment_token: SecretToken::new("token"),
        csr_pem: "-----BEGIN CERTIFICATE REQUEST-----\n".into(),
        recovery_public_key: PublicKey::from(&key(5)),
        boot_id: id(9),
        agent_version: "0.1.0".into(),
        protocol: PROTOCOL,
        verifier_set_version: 0,
        inventory: inventory(),
    });
}

#[test]
fn enroll_answer() {
    golden!(EnrollAnswer {
        certificate_pem: "-----BEGIN CERTIFICATE-----\n".into(),
        chain_pem: String::new(),
        not_after: at(86_400),
        recovery: RecoveryState { identity_generation: 1, remaining: 5 },
        verifier_sets: vec![verifier_set()],
        node_ca_bundle_pem: Some("-----BEGIN CERTIFICATE-----\n".into()),
    });
}

#[test]
fn nonce_answer() {
    golden!(NonceAnswer {
        nonce: "AQID".into(),
        expires_at: at(300),
        server_time: Some(at(0)),
        node_authorities: Some(vec!["0a1b".into()]),
    });
}

#[test]
fn recover_request() {
    let mut request = RecoverRequest {
        enrollment_token: SecretToken::new("token"),
        identity_generation: 1,
        nonce: "AQID".into(),
        csr_pem: "-----BEGIN CERTIFICATE REQUEST-----\n".into(),
        nonce_signature: Vec::new(),
        boot_id: id(9),
        agent_version: "0.1.0".into(),
        protocol: PROTOCOL,
        verifier_set_version: 0,
    };
    request.sign(id(1), &key(5));
    golden!(request);
}

#[test]
fn renew_request() {
    golden!(RenewRequest { csr_pem: "-----BEGIN CERTIFICATE REQUEST-----\n".into() });
}

#[test]
fn heartbeat() {
    golden!(Heartbeat {
        boot_id: id(9),
        session: None,
        agent_version: "0.1.0".into(),
        package_digest: Some(wire::package::Digest::of(b"a manifest")),
        protocol: PROTOCOL,
        sent_at: at(1),
        inventory: inventory(),
        telemetry: Telemetry {
            cpu_percent: Some(12.5),
            memory_used_mib: Some(4096),
            storage_used_gib: None,
            gpus: vec![GpuTelemetry {
                uuid: device().uuid,
                utilization_percent: Some(97),
                memory_used_mib: Some(70_000),
                temperature_celsius: Some(64),
                power_milliwatts: None,
            }],
        },
        health: HealthReport {
            status: HealthLevel::Critical,
            alerts: vec![Alert {
                probe_id: "gpu.ecc".into(),
                target: device().uuid,
                since: at(0),
                classifications: vec![Classification::PreventAllocation, Classification::BillingCredit],
                message: "uncorrectable ECC errors".into(),
                tenant_message: "a GPU of this node is faulty".into(),
            }],
        },
        verifier_set_version: 1,
        running: vec![RunningTask { task_id: id(2), attempt: 1 }],
        task_types: Some(vec!["allocation.provision".into(), "node.validate".into()]),
        node_ca_bundle_fingerprint: Some(fingerprint("-----BEGIN CERTIFICATE-----\n")),
        findings: Some(vec![
            Finding {
                probe: "xid".into(),
                gpu_uuid: Some(device().uuid),
                code: "79".into(),
                count: 2,
                first_at: at(0),
                last_at: at(1),
                boot_id: id(9),
                detail: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.".into(),
            },
            Finding {
                probe: "disk".into(),
                gpu_uuid: None,
                code: "full".into(),
                count: 1,
                first_at: at(0),
                last_at: at(0),
                boot_id: id(9),
                detail: "/var/lib/gpuaas-agent: 12 MiB left".into(),
            },
        ]),
    });
}

#[test]
fn heartbeat_answer() {
    golden!(HeartbeatAnswer {
        later_fields: Vec::new(),
        server_time: at(1),
        next_heartbeat_seconds: 15,
        verifier_sets: vec![],
        poll: PollSettings::default(),
        node_ca_bundle_pem: Some("-----BEGIN CERTIFICATE-----\n".into()),
        renew_within_seconds: Some(600),
        accepted_findings: vec![AcceptedFinding {
            probe: "privilege".into(),
            code: "setuid".into(),
            boot_id: id(9),
            count: 2,
        }],
    });
}

#[test]
fn provision_payload() {
    golden!(payload(Task::Provision(Provision {
        allocation_id: id(3),
        user_name: "u-3".into(),
        authorized_keys: vec!["ssh-ed25519 AAAA user@host".into()],
        devices: vec![device()],
        sku: "h100".into(),
        deadline_at: at(600),
    })));
}

#[test]
fn release_payload() {
    golden!(payload(Task::Release(Release { allocation_id: id(3), user_name: "u-3".into(), devices: vec![device()] })));
}

#[test]
fn reconcile_ssh_keys_payload() {
    golden!(payload(Task::ReconcileSshKeys(ReconcileSshKeys {
        allocation_id: id(3),
        user_name: "u-3".into(),
        authorized_keys: vec!["ssh-ed25519 AAAA".into()],
    })));
}

#[test]
fn validate_payload() {
    golden!(payload(Task::Validate { load: None }));
}

#[test]
fn validate_with_load_payload() {
    let load = wire::validation::ValidationLoad {
        level: wire::validation::LoadLevel::Deep,
        load_seconds: 300,
        gpu_uuid: None,
    };
    golden!(payload(Task::Validate { load: Some(load) }));
}

#[test]
fn open_terminal_payload() {
    golden!(payload(Task::OpenTerminal(OpenTerminal {
        session_id: id(6),
        allocation_id: id(3),
        user_name: "gpu-3f2a".into(),
        ends_at: at(14_400),
        recording: RecordTerms { mode: RecordMode::Strict, most_bytes: 67_108_864 },
    })));
}

#[test]
fn diagnose_payload() {
    golden!(payload(Task::Diagnose {}));
}

#[test]
fn reboot_payload() {
    golden!(payload(Task::Reboot(wire::task::Reboot { boot_id: id(7) })));
}

#[test]
fn reset_gpu_payload() {
    golden!(payload(Task::ResetGpu(wire::task::ResetGpu { gpu_uuid: "GPU-1".into() })));
}

#[test]
fn validate_gpu_payload() {
    let level = wire::validation::LoadLevel::Quick;
    let load = wire::validation::ValidationLoad { level, load_seconds: 0, gpu_uuid: Some("GPU-1".into()) };
    golden!(payload(Task::Validate { load: Some(load) }));
}

#[test]
fn update_agent_payload() {
    let digest = wire::package::Digest::of(b"a manifest");
    golden!(payload(Task::UpdateAgent(wire::task::UpdateAgent { digest, force: false, commit_seconds: 120 })));
}

#[test]
fn payload_with_its_origin() {
    let origin = wire::task::TaskOrigin {
        correlation_id: "job-17".into(),
        traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        tracestate: Some("vendor=1".into()),
    };
    golden!(TaskPayload { origin: Some(origin), ..payload(Task::Validate { load: None }) });
}

#[test]
fn task_envelope() {
    golden!(
        wire::task::sign(&key(1), &PublicKey::from(&key(1)).key_id(), &payload(Task::Validate { load: None })).unwrap()
    );
}

#[test]
fn succeeded_result() {
    golden!(TaskResult {
        attempt: 1,
        status: TaskStatus::Succeeded,
        output: json!({"user_name": "u-3"}).as_object().unwrap().clone(),
        error: None,
        proof: Some(report().seal(&key(5)).unwrap()),
        started_at: at(1),
        finished_at: at(2),
    });
}

#[test]
fn failed_result() {
    golden!(TaskResult {
        attempt: 2,
        status: TaskStatus::Failed,
        output: serde_json::Map::new(),
        error: Some(TaskError { code: "device_in_use".into(), message: "GPU 0 is held by another allocation".into() }),
        proof: None,
        started_at: at(1),
        finished_at: at(2),
    });
}

#[test]
fn result_answers() {
    golden!([ResultAnswer { recorded: ResultReceipt::New }, ResultAnswer { recorded: ResultReceipt::Already }]);
}

#[test]
fn cleanup_report() {
    golden!(report());
}

#[test]
fn error_envelope() {
    let error = wire::error::ErrorEnvelope {
        code: wire::error::INVALID_NODE_IDENTITY.into(),
        message: "This node was removed. Register it as a new node.".into(),
        correlation_id: "c-1".into(),
        details: json!({"service": "node-api", "reason": "node_removed"}).as_object().unwrap().clone(),
    };
    assert_eq!(error.reason(), Some(wire::error::reason::NODE_REMOVED));
    golden!(error);
}

fn bundle() -> BootstrapBundle {
    let ca = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
    BootstrapBundle {
        node_id: id(1),
        enrollment_token: SecretToken::new("it's a $ecret"),
        api_url: "https://nodes.example.com".into(),
        task_signing_pubkeys: VerifierSet { version: 0, ..verifier_set() }.to_env_value(),
        ca_bundle_path: "/etc/gpuaas/ca.pem".into(),
        node_cert_ca_bundle_path: "/etc/gpuaas/node-ca.pem".into(),
        cert_path: "/etc/gpuaas/node.pem".into(),
        key_path: "/etc/gpuaas/node.key".into(),
        ca_bundle_pem: ca.into(),
        ca_bundle_fingerprint: fingerprint(ca),
        package: Package {
            oci_ref: Some("registry.example.com/gpuaas/agent:1".into()),
            digest: Some("sha256:00".into()),
            pull_delivery_mode: Some("bundle".into()),
            install_root: Some("/opt/gpuaas".into()),
            env_file_path: Some("/etc/gpuaas/agent.env".into()),
            systemd_unit_name: Some("gpuaas-agent.service".into()),
            release_keys: Some("AQ==".into()),
            registry_ca_pem: Some(ca.into()),
            pull_account: Some(SecretToken::new("puller:another $ecret")),
        },
    }
}

#[test]
fn bootstrap_bundle() {
    golden!(bundle());
}

#[test]
fn bootstrap_bundle_without_a_package() {
    golden!(BootstrapBundle { package: Package::default(), ..bundle() });
}

#[test]
fn bundle_env_file() {
    for bundle in [bundle(), BootstrapBundle { package: Package::default(), ..bundle() }] {
        let repeated = BootstrapBundle::from_env_file(&bundle.to_env_file().unwrap()).unwrap();
        assert_eq!(serde_json::to_value(&repeated).unwrap(), serde_json::to_value(&bundle).unwrap());
    }
    insta::assert_snapshot!(bundle().to_env_file().unwrap());
}

#[test]
fn no_secret_shows_when_a_message_is_debugged() {
    assert!(!format!("{:?}", bundle()).contains("ecret"));
}
