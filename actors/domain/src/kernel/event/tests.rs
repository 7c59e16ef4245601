//! The events, with their streams, subjects and reactions: the table that is reviewed.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::machine::Command as _;
use crate::reactions::Reaction;
use crate::recording::RecordingMode;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use uuid::Uuid;

/// One event of each variant, with all options set.
pub(crate) fn every_event() -> Vec<Event> {
    let allocation_id = AllocationId(Uuid::from_u128(1));
    let node_id = NodeId(Uuid::from_u128(2));
    let deadline_at = Timestamp::UNIX_EPOCH;
    let text = || "x".to_owned();
    let session_id = TerminalSessionId(Uuid::from_u128(6));
    let account_id = BillingAccountId(Uuid::from_u128(7));
    let holder = || Holder::Org(text());
    let (payment_id, refund_id) = (PaymentId(Uuid::from_u128(8)), RefundId(Uuid::from_u128(9)));
    let euro = || Currency::parse("EUR").unwrap();
    let placed = Placement {
        devices: vec![GpuDevice { index: 0, uuid: text() }],
        host: text(),
        port: 22,
        user_name: text(),
        region_code: text(),
        host_fingerprint: None,
    };
    vec![
        Event::AllocationRequested { allocation_id },
        Event::ProvisioningStarted { allocation_id, node_id, deadline_at },
        Event::AllocationActive { allocation_id, node_id },
        Event::ProvisioningFailed { allocation_id, node_id: Some(node_id), reason: text() },
        Event::ReservationUnwanted { allocation_id, node_id },
        Event::ReleaseRequested { allocation_id, node_id, attempt: 1, deadline_at },
        Event::ReleaseFailed { allocation_id, node_id, attempt: 1, reason: text() },
        Event::ReleaseExhausted { allocation_id, node_id, attempt: 1 },
        Event::ReleaseForced { allocation_id, node_id },
        Event::AllocationReleased { allocation_id, user_id: text(), node_id: Some(node_id), reason: text() },
        Event::NodeStateChanged { node_id, from: Some(text()), to: text(), reason: text() },
        Event::DevicesReserved { node_id, allocation_id, placed },
        Event::TenantReady { node_id, allocation_id },
        Event::TenantFailed { node_id, allocation_id, reason: text() },
        Event::TenantGone { node_id, allocation_id, attempt: 1 },
        Event::TenantRemains { node_id, allocation_id, attempt: 1, reason: text(), detail: text() },
        Event::SkuStateChanged { sku_id: SkuId(Uuid::from_u128(3)), from: Some(text()), to: text() },
        Event::AllocationCounted { allocation_id, logins_revision: 1 },
        Event::PolicyWritten {
            policy_id: PolicyId(Uuid::from_u128(4)),
            value_id: PolicyValueId(Uuid::from_u128(5)),
            policy: policy::PolicyKey::RateLimitApi,
            effective_at: deadline_at,
        },
        Event::TrustChanged { set_id: KeySetId(Uuid::from_u128(6)), purpose: KeySetPurpose::NodeCa, version: 1 },
        Event::TerminalsUnwanted { allocation_id, user_id: text() },
        Event::TerminalFailed { session_id, node_id, reason: text() },
        Event::TerminalOpened {
            session_id,
            allocation_id,
            node_id,
            ends_at: deadline_at,
            begin_until: deadline_at,
            recording: RecordingTerms { mode: RecordingMode::Strict, most_bytes: 1 },
        },
        Event::TerminalClosed { session_id, allocation_id, node_id, reason: text() },
        Event::UsageChanged { allocation_id, holder: holder(), from: Some(deadline_at), until: Some(deadline_at) },
        Event::BalanceLow { account_id, holder: holder() },
        Event::BalanceDepleted { account_id, holder: holder(), release_at: deadline_at },
        Event::AllocationUncovered { account_id, allocation_id },
        Event::AllocationMetered { account_id, allocation_id, is_running: true },
        Event::TenantFaulted { node_id, allocation_id, at: deadline_at, reason: text() },
        Event::LoginsStale { allocation_id, user_id: text() },
        Event::LoginsChanged { allocation_id, node_id, revision: 1 },
        Event::LoginsWritten { node_id, allocation_id, revision: 1 },
        Event::PaymentDeposited { payment_id, account_id, is_again: false },
        Event::RefundTaken { payment_id, refund_id, account_id, amount_minor: 1 },
        Event::RefundRefused { payment_id, refund_id, account_id, reason: text(), is_again: false },
        Event::RefundGivenBack { payment_id, refund_id, account_id, is_again: false },
        Event::ReversalPosted { payment_id, reversal_id: text(), account_id, is_undone: true, is_again: false },
        Event::PaymentOpeningDue { payment_id },
        Event::PaymentCheckDue { payment_id, processor_id: text(), is_over: true },
        Event::PaymentPaid { payment_id, holder: holder(), currency: euro(), amount_minor: 1 },
        Event::RefundRequested { payment_id, refund_id, holder: holder(), amount_minor: 1, is_exact: true },
        Event::RefundDue { payment_id, refund_id, processor_id: text(), amount_minor: 1, currency: euro() },
        Event::RefundFailed { payment_id, refund_id, holder: holder(), amount_minor: 1 },
        Event::PaymentReversed { payment_id, holder: holder(), reversal_id: text(), is_dispute: true, amount_minor: 1 },
        Event::ReversalUndone { payment_id, holder: holder(), reversal_id: text(), is_dispute: false, amount_minor: 1 },
        Event::Announced { announcement_id: AnnouncementId(Uuid::from_u128(8)) },
        Event::ProcessorEventDue { processor_event_id: ProcessorEventId(Uuid::from_u128(10)) },
        Event::RefundSucceeded { payment_id, refund_id },
        Event::TerminalsCutOff { node_id },
        Event::DepositRefused { payment_id, account_id, reason: text(), is_again: false },
    ]
}

/// The index of each variant in [`every_event`]: a new variant must be added there.
const fn place(event: &Event) -> usize {
    match event {
        Event::AllocationRequested { .. } => 0,
        Event::ProvisioningStarted { .. } => 1,
        Event::AllocationActive { .. } => 2,
        Event::ProvisioningFailed { .. } => 3,
        Event::ReservationUnwanted { .. } => 4,
        Event::ReleaseRequested { .. } => 5,
        Event::ReleaseFailed { .. } => 6,
        Event::ReleaseExhausted { .. } => 7,
        Event::ReleaseForced { .. } => 8,
        Event::AllocationReleased { .. } => 9,
        Event::NodeStateChanged { .. } => 10,
        Event::DevicesReserved { .. } => 11,
        Event::TenantReady { .. } => 12,
        Event::TenantFailed { .. } => 13,
        Event::TenantGone { .. } => 14,
        Event::TenantRemains { .. } => 15,
        Event::SkuStateChanged { .. } => 16,
        Event::AllocationCounted { .. } => 17,
        Event::PolicyWritten { .. } => 18,
        Event::TrustChanged { .. } => 19,
        Event::TerminalsUnwanted { .. } => 20,
        Event::TerminalFailed { .. } => 21,
        Event::TerminalOpened { .. } => 22,
        Event::TerminalClosed { .. } => 23,
        Event::UsageChanged { .. } => 24,
        Event::BalanceLow { .. } => 25,
        Event::BalanceDepleted { .. } => 26,
        Event::AllocationUncovered { .. } => 27,
        Event::AllocationMetered { .. } => 28,
        Event::TenantFaulted { .. } => 29,
        Event::LoginsStale { .. } => 30,
        Event::LoginsChanged { .. } => 31,
        Event::LoginsWritten { .. } => 32,
        Event::PaymentDeposited { .. } => 33,
        Event::RefundTaken { .. } => 34,
        Event::RefundRefused { .. } => 35,
        Event::RefundGivenBack { .. } => 36,
        Event::ReversalPosted { .. } => 37,
        Event::PaymentOpeningDue { .. } => 38,
        Event::PaymentCheckDue { .. } => 39,
        Event::PaymentPaid { .. } => 40,
        Event::RefundRequested { .. } => 41,
        Event::RefundDue { .. } => 42,
        Event::RefundFailed { .. } => 43,
        Event::PaymentReversed { .. } => 44,
        Event::ReversalUndone { .. } => 45,
        Event::Announced { .. } => 46,
        Event::ProcessorEventDue { .. } => 47,
        Event::RefundSucceeded { .. } => 48,
        Event::TerminalsCutOff { .. } => 49,
        Event::DepositRefused { .. } => 50,
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
    for event in every_event() {
        let json = serde_json::to_value(&event).unwrap();
        let follows = match event.reaction() {
            Reaction::Nothing => "nothing".to_owned(),
            Reaction::Place(_) => "place".to_owned(),
            Reaction::Node(_, command) => format!("node {}", command.name()),
            Reaction::Allocation(_, command) => format!("allocation {}", command.name()),
            Reaction::Tenant { command, .. } => format!("tenant {}", command.name()),
            Reaction::Terminal(_, command) => format!("terminal session {}", command.name()),
            Reaction::Billing { command, .. } => format!("billing account {}", command.name()),
            Reaction::Payment(_, command) => format!("payment {}", command.name()),
            Reaction::CallProcessor(call) => format!("processor {}", call.name()),
            Reaction::ApplyProcessorEvent(_) => "heed the processor".to_owned(),
            Reaction::ResolveSshKeys { .. } => "resolve logins".to_owned(),
            Reaction::SendSshKeys { .. } => "tell logins".to_owned(),
            Reaction::CloseTerminals { .. } => "close terminals".to_owned(),
            Reaction::CloseNodeTerminals { .. } => "cut terminals".to_owned(),
        };
        let fact = json["fact"].as_str().unwrap();
        let (subject, stream) = event.row();
        writeln!(table, "{fact}: {subject} in {}, about {} -> {follows}", stream.name(), event.about().kind).unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn every_variant_is_in_the_table_and_has_its_own_subject() {
    let events = every_event();
    let places: Vec<_> = events.iter().map(place).collect();
    assert_eq!(places, (0..events.len()).collect::<Vec<_>>());
    let subjects: BTreeSet<_> = events.iter().map(Event::subject).collect();
    assert_eq!(subjects.len(), events.len());
}

#[test]
fn every_subject_is_stored_by_exactly_its_own_stream() {
    let keeps = |stream: &Stream, subject: &str| {
        stream.subjects().iter().any(|pattern| subject.starts_with(pattern.trim_end_matches('>')))
    };
    for event in every_event() {
        let kept: Vec<_> = Stream::ALL.into_iter().filter(|stream| keeps(stream, event.subject())).collect();
        assert_eq!(kept, [event.row().1], "{}", event.subject());
    }
}

#[test]
fn no_event_has_a_field_that_could_hold_a_secret() {
    for event in every_event() {
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
    for event in every_event() {
        let kept = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&kept).unwrap(), event);
    }
}
