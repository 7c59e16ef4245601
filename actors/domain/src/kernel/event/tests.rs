//! The events, with their streams, subjects and reactions: the table that is reviewed.

use super::*;
use crate::choreography::Reaction;
use crate::recording::RecordingMode;
use crate::state_machine::CommandSort as _;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use uuid::Uuid;

/// A value of a field's type, for [`Event::samples`].
pub(crate) trait Sample {
    fn sample() -> Self;
}

macro_rules! samples {
    ($($type:ty: $value:expr;)+) => {$(
        impl Sample for $type {
            fn sample() -> Self {
                $value
            }
        }
    )+};
}

samples! {
    AllocationId: Self(Uuid::from_u128(1));
    NodeId: Self(Uuid::from_u128(2));
    SkuId: Self(Uuid::from_u128(3));
    PolicyId: Self(Uuid::from_u128(4));
    PolicyValueId: Self(Uuid::from_u128(5));
    TerminalSessionId: Self(Uuid::from_u128(6));
    BillingAccountId: Self(Uuid::from_u128(7));
    PaymentId: Self(Uuid::from_u128(8));
    RefundId: Self(Uuid::from_u128(9));
    ProcessorEventId: Self(Uuid::from_u128(10));
    KeySetId: Self(Uuid::from_u128(11));
    BrowserSessionId: Self(Uuid::from_u128(12));
    AnnouncementId: Self(Uuid::from_u128(12));
    HealthRulesId: Self(Uuid::from_u128(13));
    RolloutId: Self(Uuid::from_u128(14));
    Timestamp: Self::UNIX_EPOCH;
    String: "x".to_owned();
    // A flag marks an exception, as a resent event.
    bool: false;
    u32: 1;
    u64: 1;
    i64: 1;
    UserId: "x".into();
    Holder: Self::Org("x".into());
    Currency: Self::parse("EUR").unwrap();
    PolicyKey: Self::RateLimitApi;
    KeySetPurpose: Self::NodeCa;
    PackageDigest: format!("sha256:{}", "0f".repeat(32)).parse().unwrap();
    RolloutOutcome: Self::Failed { reason: String::sample() };
    RecordingTerms: Self { mode: RecordingMode::Strict, most_bytes: 1 };
    Placement: Self {
        devices: vec![GpuDevice { index: 0, uuid: String::sample() }],
        host: String::sample(),
        port: 22,
        user_name: String::sample(),
        region_code: String::sample(),
        host_fingerprint: None,
    };
}

impl<T: Sample> Sample for Option<T> {
    fn sample() -> Self {
        Some(T::sample())
    }
}

fn keys_of(value: &serde_json::Value, keys: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                keys.insert(key.clone());
                keys_of(value, keys);
            }
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| keys_of(item, keys)),
        serde_json::Value::Null
        | serde_json::Value::Bool(_)
        | serde_json::Value::Number(_)
        | serde_json::Value::String(_) => {}
    }
}

#[test]
fn the_event_table_is_as_reviewed() {
    let mut table = String::new();
    for event in Event::samples() {
        let json = serde_json::to_value(&event).unwrap();
        let follows = match event.reaction() {
            Reaction::Nothing => "nothing".to_owned(),
            Reaction::Place(_) => "place".to_owned(),
            Reaction::Node(_, instruction) => format!("node {}", instruction.tag()),
            Reaction::Allocation(_, fact) => format!("allocation {}", fact.tag()),
            Reaction::Tenant { instruction, .. } => format!("tenant {}", instruction.tag()),
            Reaction::Terminal(_, instruction) => format!("terminal session {}", instruction.tag()),
            Reaction::Billing { instruction, .. } => format!("billing account {}", instruction.tag()),
            Reaction::Payment(_, fact) => format!("payment {}", fact.tag()),
            Reaction::CallProcessor(call) => format!("processor {}", call.name()),
            Reaction::ApplyProcessorEvent(_) => "apply the processor's event".to_owned(),
            Reaction::DriveMachine(_) => "drive machine".to_owned(),
            Reaction::ResolveSshKeys { .. } => "resolve logins".to_owned(),
            Reaction::SendSshKeys { .. } => "send logins".to_owned(),
            Reaction::CloseTerminals { .. } => "close terminals".to_owned(),
            Reaction::CloseNodeTerminals { .. } => "cut terminals".to_owned(),
            Reaction::CloseBrowserTerminals { .. } => "log terminals out".to_owned(),
            Reaction::Rollout(_, fact) => format!("rollout {}", fact.tag()),
            Reaction::FindRolloutNodes(_) => "find rollout nodes".to_owned(),
        };
        let fact = json["fact"].as_str().unwrap();
        let (subject, stream) = (event.subject(), event.row().stream);
        writeln!(table, "{fact}: {subject} in {}, about {} -> {follows}", stream.name(), event.about().kind).unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn every_event_has_its_own_subject() {
    let subjects: BTreeSet<_> = Event::ROWS.iter().map(|row| row.subject).collect();
    assert_eq!(subjects.len(), Event::ROWS.len());
    for (event, row) in Event::samples().iter().zip(Event::ROWS) {
        assert_eq!(event.row(), *row);
        assert!(event.subject().starts_with(row.subject.trim_end_matches('>')), "{}", event.subject());
    }
}

#[test]
fn every_subject_is_stored_by_exactly_its_own_stream() {
    let keeps = |stream: &Stream, subject: &str| {
        stream.subjects().iter().any(|pattern| subject.starts_with(pattern.trim_end_matches('>')))
    };
    for event in Event::samples() {
        let stored: Vec<_> = Stream::ALL.into_iter().filter(|stream| keeps(stream, event.subject())).collect();
        assert_eq!(stored, [event.row().stream], "{}", event.subject());
    }
}

#[test]
fn no_event_has_a_field_that_could_hold_a_secret() {
    for event in Event::samples() {
        let mut keys = BTreeSet::new();
        keys_of(&serde_json::to_value(&event).unwrap(), &mut keys);
        for key in keys {
            let lower = key.to_lowercase();
            let suspect = ["secret", "token", "key", "password"].into_iter().find(|word| lower.contains(word));
            assert_eq!(suspect, None, "{} says {key}", event.subject());
        }
    }
}

#[test]
fn an_event_decodes_to_itself() {
    for event in Event::samples() {
        let stored = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&stored).unwrap(), event);
    }
}

/// The event with this text in place of each of its reasons.
fn with_reason(event: &Event, text: &str) -> Option<Event> {
    fn replace(value: &mut serde_json::Value, text: &str) -> bool {
        let serde_json::Value::Object(fields) = value else { return false };
        fields.iter_mut().fold(false, |found, (name, value)| {
            let is_reason = (name == "reason" || name == "fault") && value.is_string();
            if is_reason {
                *value = text.into();
            }
            replace(value, text) || is_reason || found
        })
    }
    let mut json = serde_json::to_value(event).unwrap();
    replace(&mut json, text).then(|| serde_json::from_value(json).unwrap())
}

#[test]
fn reason_of_every_event_is_a_code() {
    let sentences: Vec<_> = Event::samples()
        .iter()
        .filter_map(|event| with_reason(event, "It smells of smoke."))
        .filter(Event::has_valid_reason)
        .map(|event| event.subject())
        .collect();
    assert_eq!(sentences, ["billing.deposit_refused", "billing.refund_refused"]);
    let codes: Vec<_> = Event::samples().iter().filter_map(|event| with_reason(event, "silent")).collect();
    assert!(codes.len() > 15 && codes.iter().all(Event::has_valid_reason), "{codes:?}");
}
