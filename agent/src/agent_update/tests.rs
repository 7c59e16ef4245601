//! What an agent decides by the files of an update.

#![allow(clippy::unwrap_used)]

use agent_package::update::{FailedVersion, RollbackReason};

use super::*;

const TASK: Uuid = Uuid::from_u128(7);

struct Node {
    _folder: tempfile::TempDir,
    updates: AgentUpdates,
    files: UpdateFolder,
}

fn digest(text: &str) -> Digest {
    Digest::of(text.as_bytes())
}

fn node() -> Node {
    let folder = tempfile::tempdir().unwrap();
    let installation = Installation { root: folder.path().to_owned(), digest: digest("old") };
    let files = UpdateFolder::of(folder.path());
    let updates = AgentUpdates {
        installation: Some(installation),
        env_file: None,
        cert_path: "node.pem".into(),
        key_path: "node.key".into(),
        systemctl: folder.path().join("systemctl"),
        proved: Mutex::default(),
    };
    Node { _folder: folder, updates, files }
}

fn order(to: &str, force: bool) -> UpdateAgent {
    UpdateAgent { digest: digest(to), force, commit_seconds: 60 }
}

fn record(to: &str, nonce: u128) -> UpdateRecord {
    UpdateRecord {
        nonce: Uuid::from_u128(nonce),
        task_id: TASK,
        from: digest("old"),
        to: digest(to),
        version: "2".into(),
        unit: "gpuaas-agent.service".into(),
        env_file: "/etc/gpuaas/agent.env".into(),
        commit_seconds: 60,
        stage: Stage::Prepared,
    }
}

fn reason() -> RollbackReason {
    RollbackReason { code: "no_heartbeat".into(), message: "no answer".into() }
}

fn refusal(node: &Node, order: &UpdateAgent) -> &'static str {
    node.updates.begin(TASK, order).unwrap_err().code
}

#[test]
fn version_in_use_needs_no_update_and_one_that_failed_needs_force() {
    let node = node();
    assert_eq!(node.updates.begin(TASK, &order("old", false)), Ok(Begun::InUse));
    assert_eq!(refusal(&node, &order("new", false)), "update_unsupported", "there is no bundle");
    node.files.remember_failed(FailedVersion { digest: digest("new"), reason: reason(), at: 0 }).unwrap();
    assert_eq!(refusal(&node, &order("new", false)), "failed_before");
    assert_eq!(refusal(&node, &order("other", false)), "update_unsupported");
    assert_eq!(refusal(&node, &order("new", true)), "update_unsupported");
    assert_eq!(node.files.failed().unwrap().len(), 1, "it is forgotten when the update begins");
}

#[test]
fn second_update_is_refused_while_one_is_in_progress() {
    let node = node();
    node.files.set_record(&record("new", 1)).unwrap();
    assert!(node.updates.is_updating());
    assert_eq!(refusal(&node, &order("other", true)), "update_in_progress");
    node.files.remove_record().unwrap();
    assert!(!node.updates.is_updating());
}

#[test]
fn agent_that_no_package_installed_is_not_updated() {
    let node = Node { updates: AgentUpdates { installation: None, ..node().updates }, ..node() };
    assert_eq!(refusal(&node, &order("new", true)), "update_unsupported");
    assert_eq!((node.updates.digest(), node.updates.is_updating()), (None, false));
    assert!(node.updates.prove().is_ok());
}

#[test]
fn update_begins_with_its_record_on_the_disk_and_ends_where_no_finalizer_starts() {
    use std::os::unix::fs::PermissionsExt as _;
    let node = node();
    let root = node._folder.path();
    let program = version_folder(root, digest("old")).join("bin/gpuaas-finalizer");
    let installation = node.updates.installation.clone().unwrap();
    let start = || node.updates.start(&node.files, &installation, &record("new", 1)).map_err(|failure| failure.code);
    assert_eq!(start(), Err("update_unsupported"), "the version in use has no finalizer");
    std::fs::create_dir_all(program.parent().unwrap()).unwrap();
    std::fs::write(&program, "").unwrap();
    assert_eq!(start(), Err("finalizer_not_started"), "there is no systemd");
    let script =
        "#!/bin/sh\necho \"$@\" >>\"$(dirname \"$0\")/asked\"\ntest -e \"$(dirname \"$0\")/update/record.json\"\n";
    std::fs::write(&node.updates.systemctl, script).unwrap();
    std::fs::set_permissions(&node.updates.systemctl, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(start(), Ok(()));
    assert_eq!(std::fs::read_to_string(root.join("asked")).unwrap(), "start -- gpuaas-finalizer.service\n");
    assert_eq!(node.files.record().unwrap(), Some(record("new", 1)));
    assert!(root.join("update/reserve").exists() && root.join("finalizer/bin/gpuaas-finalizer").exists());
}

#[test]
fn tool_that_is_missing_and_one_that_fails_are_named_with_their_reason() {
    use std::os::unix::fs::PermissionsExt as _;
    let node = node();
    let message = || node.updates.start_finalizer().unwrap_err().message;
    assert!(message().starts_with("systemctl start: systemctl cannot be run"), "{}", message());
    std::fs::write(&node.updates.systemctl, "#!/bin/sh\necho 'no such unit' >&2; exit 5\n").unwrap();
    std::fs::set_permissions(&node.updates.systemctl, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(message(), "systemctl start: systemctl ended with status 5: no such unit");
}

#[test]
fn outcome_of_a_task_is_its_own_updates() {
    let node = node();
    let code = |node: &Node| node.updates.outcome(TASK).unwrap_err().code;
    assert_eq!(code(&node), "update_interrupted", "it never began");
    node.files.set_record(&record("new", 1)).unwrap();
    assert_eq!(node.updates.outcome(TASK), Ok(None));
    assert_eq!(node.updates.outcome(Uuid::from_u128(8)).unwrap_err().code, "update_interrupted");
    let mut last = AgentUpdateOutcome {
        task_id: TASK,
        from: digest("old"),
        to: digest("new"),
        version: "2".into(),
        rolled_back: None,
    };
    node.files.set_last(&last).unwrap();
    node.files.remove_record().unwrap();
    let output = node.updates.outcome(TASK).unwrap().unwrap();
    assert_eq!((&output["version"], &output["package_digest"]), (&"2".into(), &digest("new").to_string().into()));
    last.rolled_back = Some(reason());
    node.files.set_last(&last).unwrap();
    assert_eq!(code(&node), "rolled_back");
    last.task_id = Uuid::from_u128(8);
    node.files.set_last(&last).unwrap();
    assert_eq!(code(&node), "update_interrupted", "the last outcome is another task's");
}

#[test]
fn only_the_new_agent_proves_itself_and_once_for_each_update() {
    let node = node();
    node.updates.prove().unwrap();
    node.files.set_record(&record("new", 1)).unwrap();
    node.updates.prove().unwrap();
    assert_eq!(node.files.proof(), None, "this agent is of the previous version");
    node.files.set_record(&record("old", 2)).unwrap();
    node.updates.prove().unwrap();
    let proof = node.files.proof().unwrap();
    assert_eq!((proof.nonce, proof.pid), (Uuid::from_u128(2), std::process::id()));
    node.files.set_proof(&Proof { at: 1, ..proof }).unwrap();
    node.updates.prove().unwrap();
    assert_eq!(node.files.proof().unwrap().at, 1, "it is not written twice");
    node.files.set_record(&record("old", 4)).unwrap();
    node.updates.prove().unwrap();
    assert_eq!(node.files.proof().unwrap().nonce, Uuid::from_u128(4));
}
