//! Messages of older protocol generations, as they were recorded (`protocol/README.md`): all of them parse, and what is written today has
//! every field that an older peer reads.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use wire::cleanup_proof::CleanupReport;
use wire::enroll::{EnrollAnswer, EnrollRequest, NonceAnswer, RecoverRequest, RenewRequest};
use wire::heartbeat::{Heartbeat, HeartbeatAnswer};
use wire::task::{ResultAnswer, SignedEnvelope, TaskPayload, TaskResult};
use wire::{OLDEST_PROTOCOL, PROTOCOL};

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// The messages of a generation, by name.
fn recorded(generation: u16) -> BTreeMap<String, Value> {
    let folder = tests().join("protocol").join(generation.to_string());
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let message = |path: PathBuf| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        (name, serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap())
    };
    files.map(|file| message(file.unwrap().path())).collect()
}

/// Those of the current generation.
fn in_force() -> BTreeMap<String, Value> {
    let files = fs::read_dir(tests().join("snapshots")).unwrap().map(|file| file.unwrap().path());
    let read = |path: PathBuf| {
        let name = path.file_stem()?.to_str()?.strip_prefix("golden__")?.to_owned();
        let text = fs::read_to_string(&path).unwrap();
        let (_, body) = text.strip_prefix("---\n")?.split_once("\n---\n")?;
        // The environment file is not JSON.
        Some((name, serde_json::from_str(body).ok()?))
    };
    files.filter_map(read).collect()
}

/// Parses a message with the current types and serialises it again.
fn understood<T: Serialize + DeserializeOwned>(message: &Value) -> Value {
    let read: T = serde_json::from_value(message.clone()).unwrap_or_else(|error| panic!("{error}: {message:#}"));
    serde_json::to_value(read).unwrap()
}

fn reading(name: &str) -> Option<fn(&Value) -> Value> {
    Some(match name {
        "enroll_request" => understood::<EnrollRequest>,
        "enroll_answer" => understood::<EnrollAnswer>,
        "renew_request" => understood::<RenewRequest>,
        "nonce_answer" => understood::<NonceAnswer>,
        "recover_request" => understood::<RecoverRequest>,
        "heartbeat" => understood::<Heartbeat>,
        "heartbeat_answer" => understood::<HeartbeatAnswer>,
        "task_envelope" => understood::<SignedEnvelope>,
        "succeeded_result" | "failed_result" => understood::<TaskResult>,
        "result_answers" => understood::<Vec<ResultAnswer>>,
        "cleanup_report" => understood::<CleanupReport>,
        "error_envelope" => understood::<wire::error::ErrorEnvelope>,
        payload if payload.ends_with("_payload") => understood::<TaskPayload>,
        // Parsed by the node API's own type; see `generations.rs` there.
        "wait_query" => return None,
        other => panic!("nothing here reads {other}"),
    })
}

/// Fields that `newer` lacks of `older`, or has in another form.
fn lost(older: &Value, newer: &Value, at: &str, same_values: bool) -> Vec<String> {
    match (older, newer) {
        (Value::Object(older), Value::Object(newer)) => older
            .iter()
            .flat_map(|(key, value)| match newer.get(key) {
                Some(kept) => lost(value, kept, &format!("{at}.{key}"), same_values),
                None => vec![format!("{at}.{key} is gone")],
            })
            .collect(),
        (Value::Array(older), Value::Array(newer)) => {
            let pairs = older.iter().zip(newer).enumerate();
            pairs
                .flat_map(|(index, (older, newer))| lost(older, newer, &format!("{at}[{index}]"), same_values))
                .collect()
        }
        (older, newer) if same_values && older != newer => vec![format!("{at} was {older} and is {newer}")],
        (older, newer) if std::mem::discriminant(older) != std::mem::discriminant(newer) => {
            vec![format!("{at} was {older} and is {newer}")]
        }
        (
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_),
            _,
        ) => Vec::new(),
    }
}

#[test]
fn the_two_generations_before_are_recorded_and_no_others() {
    let folders = fs::read_dir(tests().join("protocol")).unwrap().map(|entry| entry.unwrap());
    let folders = folders.filter(|entry| entry.path().is_dir()).map(|entry| entry.file_name().into_string().unwrap());
    let mut found: Vec<u16> = folders.map(|name| name.parse().unwrap()).collect();
    found.sort_unstable();
    assert_eq!(found, (OLDEST_PROTOCOL..PROTOCOL).collect::<Vec<_>>());
    assert_eq!(PROTOCOL - OLDEST_PROTOCOL, 2);
    for generation in found {
        for (name, message) in recorded(generation) {
            let notified = message.get("protocol").and_then(Value::as_u64);
            assert!(notified.is_none_or(|notified| notified == u64::from(generation)), "{generation}/{name}");
        }
    }
}

#[test]
fn every_message_of_the_two_generations_before_is_understood_and_nothing_of_it_is_lost() {
    for generation in OLDEST_PROTOCOL..PROTOCOL {
        for (name, message) in recorded(generation) {
            let Some(read) = reading(&name) else { continue };
            let lost = lost(&message, &read(&message), &format!("{generation}/{name}"), true);
            assert!(lost.is_empty(), "{lost:#?}");
        }
    }
}

#[test]
fn generation_only_adds_to_the_previous_one() {
    for generation in OLDEST_PROTOCOL..PROTOCOL {
        let newer = if generation + 1 == PROTOCOL { in_force() } else { recorded(generation + 1) };
        for (name, older) in recorded(generation) {
            // The agent's own request is the record of the current generation.
            if name == "wait_query" && generation + 1 == PROTOCOL {
                continue;
            }
            let newer = newer.get(&name).unwrap_or_else(|| panic!("{name} of generation {generation} is gone"));
            let lost = lost(&older, newer, &format!("{name} of generation {}", generation + 1), false);
            assert!(lost.is_empty(), "{lost:#?}");
        }
    }
}
