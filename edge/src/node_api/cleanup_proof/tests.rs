use super::*;
use chrono::{DateTime, Utc};
use domain::allocation::Placement;
use domain::node::{AgentContact, PendingTask};
use domain::{SkuId, Timestamp};
use ed25519_dalek::SigningKey;
use serde_json::Map;
use std::collections::BTreeMap;
use test_host::{registered_node, registration};
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding};
use wire::task::TaskError;

const NODE: NodeId = NodeId(Uuid::from_u128(1));
const ALLOCATION: AllocationId = AllocationId(Uuid::from_u128(2));
const TASK: TaskId = TaskId(Uuid::from_u128(3));
const BOOT: Uuid = Uuid::from_u128(4);

fn key() -> SigningKey {
    SigningKey::from_bytes(&[5; 32])
}

/// A node that cleans up one tenant.
fn node() -> Node {
    let mut node = registered_node(NODE, registration(SkuId(Uuid::nil()), 2), Timestamp::UNIX_EPOCH);
    node.identity.recovery_public_key = Some(PublicKey::from(&key()).to_string());
    node.agent.contact = Some(AgentContact {
        boot_id: BOOT.to_string(),
        agent_version: "0".into(),
        protocol: 3,
        last_seen_at: Timestamp::UNIX_EPOCH,
        silent_at: Timestamp::UNIX_EPOCH,
        task_types: None,
        package_digest: None,
        session: None,
        last_heartbeat: None,
    });
    let at = Timestamp::UNIX_EPOCH;
    let work = PendingTask { task_id: TASK, attempt: 7, ordered_at: at, deadline_at: at, origin: None };
    let placed = Placement {
        devices: Vec::new(),
        host: String::new(),
        port: 22,
        user_name: "gpu-2".into(),
        region_code: String::new(),
        host_fingerprint: None,
    };
    let hold = Hold {
        logins: domain::node::HoldSshAccess::default(),
        placed,
        keys: Vec::new(),
        phase: HoldPhase::Releasing { work },
        again: None,
        remains: None,
        reimages: false,
        evacuation: None,
        terminals: BTreeMap::new(),
    };
    node.tenancy.holds.insert(ALLOCATION, hold);
    node
}

fn report() -> CleanupReport {
    let finding = |what| CleanupFinding { what, looked_for: "x".into(), outcome: FindingOutcome::Gone, detail: None };
    CleanupReport {
        node_id: NODE.0,
        allocation_id: ALLOCATION.0,
        task_id: TASK.0,
        attempt: 7,
        boot_id: BOOT,
        checked_at: DateTime::UNIX_EPOCH,
        findings: CleanupCheck::REQUIRED.into_iter().map(finding).collect(),
    }
}

fn result(status: TaskStatus, proof: Option<SignedEnvelope>, error: Option<TaskError>) -> TaskResult {
    let at: DateTime<Utc> = DateTime::UNIX_EPOCH;
    TaskResult { attempt: 7, status, output: Map::new(), error, proof, started_at: at, finished_at: at }
}

fn of(report: &CleanupReport, node: Option<&Node>) -> TaskOutcome {
    let proof = report.seal(&key()).unwrap();
    verdict(&result(TaskStatus::Succeeded, Some(proof), None), NODE, TASK, node).0
}

fn failure(verdict: TaskOutcome) -> (String, String) {
    match verdict {
        TaskOutcome::Failed { code, message } => (code, message),
        TaskOutcome::Succeeded { .. } => panic!("{verdict:?}"),
    }
}

#[test]
fn report_of_a_node_whose_identity_two_agents_use_proves_nothing() {
    let mut node = node();
    let sessions = serde_json::json!({ "present": "a", "replaced": ["b"], "returns": 3 });
    node.identity.sessions = serde_json::from_value(sessions).unwrap();
    let (code, message) = failure(of(&report(), Some(&node)));
    assert_eq!(code, "proof_invalid");
    assert!(message.contains("two agents use"), "{message}");
}

#[test]
fn complete_clean_report_proves_the_clean_up_of_its_allocation() {
    assert_eq!(of(&report(), Some(&node())), TaskOutcome::Succeeded { proof: Some(ALLOCATION) });
}

#[test]
fn report_of_another_subject_is_refused() {
    type Change = fn(&mut CleanupReport);
    let changes: [(Change, &str); 5] = [
        (|report| report.node_id = Uuid::nil(), "another node"),
        (|report| report.task_id = Uuid::nil(), "another task"),
        (|report| report.attempt = 6, "another attempt"),
        (|report| report.allocation_id = Uuid::nil(), "another allocation"),
        (|report| report.boot_id = Uuid::nil(), "another boot"),
    ];
    for (change, words) in changes {
        let mut report = report();
        change(&mut report);
        let (code, message) = failure(of(&report, Some(&node())));
        assert_eq!(code, "proof_invalid");
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn foreign_signature_other_message_or_missing_key_is_refused() {
    let strangers = report().seal(&SigningKey::from_bytes(&[6; 32])).unwrap();
    let another = SignedEnvelope::sign(&key(), "k", "application/json", serde_json::to_vec(&report()).unwrap());
    let unreadable = SignedEnvelope::sign(&key(), "k", wire::cleanup_proof::CLEANUP_REPORT_TYPE, b"{}".to_vec());
    for proof in [strangers, another, unreadable] {
        let (given, _) = verdict(&result(TaskStatus::Succeeded, Some(proof), None), NODE, TASK, Some(&node()));
        assert_eq!(failure(given).0, "proof_invalid");
    }
    let mut keyless = node();
    keyless.identity.recovery_public_key = None;
    for node in [None, Some(&keyless)] {
        assert_eq!(failure(of(&report(), node)).0, "proof_invalid");
    }
}

#[test]
fn leftovers_and_unchecked_resources_are_named() {
    let mut left = report();
    for finding in &mut left.findings {
        finding.outcome = FindingOutcome::Unknown;
    }
    left.findings[0].outcome = FindingOutcome::Present;
    let (code, message) = failure(of(&left, Some(&node())));
    assert_eq!(code, "leftovers");
    assert!(message.contains("Home x is present") && message.contains("and 4 more"), "{message}");
    let mut partial = report();
    partial.findings.remove(0);
    let (code, message) = failure(of(&partial, Some(&node())));
    assert_eq!((code.as_str(), message.contains("Home")), ("proof_invalid", true));
}

#[test]
fn setup_needs_no_proof_and_a_failure_stays_one_with_any_proof() {
    let mut setting_up = node();
    let hold = setting_up.tenancy.holds.get_mut(&ALLOCATION).unwrap();
    let HoldPhase::Releasing { work } = hold.phase.clone() else { panic!() };
    hold.phase = HoldPhase::Provisioning { work };
    assert_eq!(of(&report(), Some(&setting_up)), TaskOutcome::Succeeded { proof: None });
    let bare = result(TaskStatus::Succeeded, None, None);
    assert_eq!(verdict(&bare, NODE, TASK, None).0, TaskOutcome::Succeeded { proof: None });
    let error = TaskError { code: "user_busy".into(), message: "a\tb".into() };
    let failed = result(TaskStatus::Failed, Some(report().seal(&key()).unwrap()), Some(error));
    let expected = TaskOutcome::Failed { code: "user_busy".into(), message: "a b".into() };
    assert_eq!(verdict(&failed, NODE, TASK, Some(&node())).0, expected);
    for other in ["", "Busy", "user-busy", "a b", "ü", "a/b", &"a".repeat(65)] {
        let error = TaskError { code: other.into(), message: "m".into() };
        let failed = result(TaskStatus::Failed, None, Some(error));
        assert_eq!(failure(verdict(&failed, NODE, TASK, None).0).0, "failed", "{other}");
    }
    let silent = result(TaskStatus::Failed, None, None);
    assert_eq!(failure(verdict(&silent, NODE, TASK, None).0).0, "failed");
}

#[test]
fn gpu_that_the_driver_does_not_show_is_left_out_of_the_proof_of_its_tenant() {
    let mut partial = report();
    for (outcome, uuid) in [(FindingOutcome::Unknown, "GPU-1"), (FindingOutcome::Gone, "GPU-2")] {
        let detail = Some("a\tlost GPU".to_owned());
        partial.findings.push(CleanupFinding {
            what: CleanupCheck::GpuMemory,
            looked_for: uuid.into(),
            outcome,
            detail,
        });
    }
    let proof = partial.seal(&key()).unwrap();
    let (outcome, gap) = verdict(&result(TaskStatus::Succeeded, Some(proof), None), NODE, TASK, Some(&node()));
    assert_eq!(outcome, TaskOutcome::Succeeded { proof: Some(ALLOCATION) });
    let gap = gap.unwrap();
    assert_eq!(gap.gpus, BTreeMap::from([("GPU-1".to_owned(), "a lost GPU".to_owned())]));
    assert_eq!(gap.checked_at, partial.checked_at);
}
