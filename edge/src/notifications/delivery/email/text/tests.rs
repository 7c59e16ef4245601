use super::*;
use crate::notifications::{EventHeader, encoded};
use domain::announcement::Severity;
use domain::notification::{Channel, live_subjects};
use domain::{
    AllocationId, AnnouncementId, BillingAccountId, NodeId, PaymentId, RefundId, RolloutId, TerminalSessionId,
};
use serde_json::json;

const ENDPOINT: &str = "00000000-0000-0000-0000-0000000000ee";
const SERVICE: &str = "https://gpu.example";

fn id(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

/// All fields of an event of this type.
fn data_of(kind: &str) -> domain::notification::NotificationDetails {
    type Data = domain::notification::NotificationDetails;
    let in_state = |state: &str| Data { state: Some(state.to_owned()), ..Data::default() };
    let allocation = |data: Data| Data { allocation_id: Some(AllocationId(id(1))), ..data };
    let reason = |code: &str, data: Data| Data { reason: Some(code.to_owned()), ..data };
    let node = |data: Data| Data { node_id: Some(NodeId(id(2))), ..data };
    let session = |data: Data| allocation(Data { session_id: Some(TerminalSessionId(id(3))), ..data });
    let account = |data: Data| Data { account_id: Some(BillingAccountId(id(4))), ..data };
    let payment = |data: Data| account(Data { payment_id: Some(PaymentId(id(5))), ..data });
    let refund = |data: Data| payment(Data { refund_id: Some(RefundId(id(6))), ..data });
    let rollout = |data: Data| Data { rollout_id: Some(RolloutId(id(8))), ..data };
    match kind {
        "provisioning.requested" => allocation(in_state("requested")),
        "provisioning.started" => allocation(in_state("provisioning")),
        "provisioning.release_requested" => allocation(in_state("releasing")),
        "provisioning.active" => node(allocation(in_state("active"))),
        "provisioning.failed" => reason("insufficient_capacity", allocation(Data::default())),
        "provisioning.released" => reason("user_request", allocation(in_state("released"))),
        "provisioning.release_failed" => {
            reason("agent_error", allocation(Data { attempt: Some(2), ..in_state("release_failed") }))
        }
        "provisioning.release_exhausted" => node(allocation(Data { attempt: Some(10), ..Data::default() })),
        "node.state_changed" => {
            reason("heartbeat_missed", node(Data { from_state: Some("active".into()), ..in_state("offline") }))
        }
        "node.agent_update_failed" => reason("rolled_back", node(Data::default())),
        "node.rollout_stopped" => rollout(reason("rolled_back", node(in_state("stopped")))),
        "node.rollout_completed" => rollout(in_state("completed")),
        "node.tenant_faulted" => reason("health_critical", node(allocation(Data::default()))),
        "node.evacuation_begun" => Data {
            release_at: Some(DateTime::UNIX_EPOCH),
            ..reason("gpu_maintenance", node(allocation(Data::default())))
        },
        "node.evacuation_ended" => node(allocation(Data::default())),
        "terminal.opened" => session(in_state("opened")),
        "terminal.closed" => reason("ended_by_user", session(in_state("closed"))),
        "billing.balance_low" => account(Data::default()),
        "billing.balance_depleted" => account(Data { release_at: Some(DateTime::UNIX_EPOCH), ..Data::default() }),
        "billing.payment_deposited" => payment(in_state("deposited")),
        "billing.deposit_refused" => reason("currency_mismatch", payment(in_state("refused"))),
        "billing.refund_succeeded" => refund(in_state("succeeded")),
        "billing.refund_refused" => refund(in_state("refused")),
        "billing.refund_given_back" => refund(in_state("returned")),
        "billing.reversal_posted" => payment(in_state("reversed")),
        "notification.announced" => Data {
            announcement_id: Some(AnnouncementId(id(7))),
            severity: Some(Severity::Warning),
            message: Some("Region eu-1 is maintained from noon on.".to_owned()),
            ..Data::default()
        },
        _ => Data::default(),
    }
}

fn letter_of(kind: &str, data: &domain::notification::NotificationDetails) -> Letter {
    let about = EventHeader { id: id(9), kind, subject: "x/y", time: DateTime::UNIX_EPOCH, correlation_id: "c" };
    letter_in(&encoded(&about, &Channel::User("u".into()), data))
}

fn letter_in(body: &str) -> Letter {
    letter(&serde_json::from_str(body).unwrap(), ENDPOINT, SERVICE)
}

/// The commands of gpuctl with their flags, as its own test has them.
const COMMANDS: &str = include_str!("../../../../../cli/src/snapshots/gpuctl__tests__commands_are_as_reviewed.snap");

/// The words of a command without its values, and its flags.
fn command(line: &str) -> (Vec<&str>, Vec<&str>) {
    let is_word = |word: &&str| word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-') && !is_flag(word);
    let words = line.split_whitespace().take_while(is_word).collect();
    (words, line.split_whitespace().filter(is_flag).collect())
}

fn is_flag(word: &&str) -> bool {
    word.starts_with("--")
}

/// Every type of event that can be notified.
fn kinds() -> Vec<&'static str> {
    live_subjects().into_values().flatten().chain(["notification.test"]).collect()
}

#[test]
fn every_event_that_is_notified_has_a_subject_and_a_text_of_its_own() {
    let mut subjects = std::collections::BTreeSet::new();
    for kind in kinds() {
        let letter = letter_of(kind, &data_of(kind));
        assert_ne!(letter.subject, unknown(kind).subject, "{kind} has no row in `content`");
        assert!(subjects.insert(letter.subject.clone()), "{kind} has the subject of another type: {}", letter.subject);
        assert!(letter.subject.chars().count() <= 90, "{}", letter.subject);
        assert!(letter.text.ends_with(&format!("gpuctl notification-endpoints set {ENDPOINT} --disable\n")), "{kind}");
        for placeholder in ["ALLOCATION", "NODE", "SESSION", "PAYMENT"] {
            assert!(!letter.text.contains(placeholder), "{kind} lacks an id: {}", letter.text);
        }
    }
}

#[test]
fn the_texts_are_as_reviewed() {
    let mut page = String::new();
    let renter =
        domain::notification::NotificationDetails { from_state: None, reason: None, ..data_of("node.state_changed") };
    let undone = data_of("billing.reversal_posted");
    let undone = domain::notification::NotificationDetails { state: Some("reversal_undone".into()), ..undone };
    let variants = [("node.state_changed", renter), ("billing.reversal_posted", undone)];
    let all = kinds().into_iter().map(|kind| (kind, data_of(kind))).chain(variants);
    for (kind, data) in all.chain([("weather.changed", data_of("provisioning.active"))]) {
        let letter = letter_of(kind, &data);
        let _ = write!(page, "===== {kind}\nSubject: {}\n\n{}\n", letter.subject, letter.text);
    }
    insta::assert_snapshot!(page);
}

#[test]
fn every_command_in_a_text_is_one_of_gpuctl() {
    let known: Vec<_> = COMMANDS.lines().filter(|line| line.starts_with("gpuctl ")).map(command).collect();
    for kind in kinds() {
        let letter = letter_of(kind, &data_of(kind));
        for line in letter.text.lines().filter_map(|line| Some(&line[line.find("gpuctl ")?..])) {
            let (words, flags) = command(line);
            let is_known = known.iter().any(|(of, with)| *of == words && flags.iter().all(|flag| with.contains(flag)));
            assert!(is_known, "{kind}: {line}");
        }
    }
}

#[test]
fn a_value_cannot_begin_a_line_or_a_header() {
    let hostile = "x\r\nBcc: victim@example.com\r\n\r\n.\r\n\u{202e}evil\u{0}\u{1b}[2J\u{85}y";
    for kind in kinds().into_iter().chain([hostile]) {
        let body = json!({
            "id": hostile, "type": kind, "time": DateTime::UNIX_EPOCH,
            "data": { "state": hostile, "from_state": hostile, "reason": hostile, "severity": hostile, "message": hostile },
        });
        let letter = letter(&serde_json::from_value(body).unwrap(), hostile, hostile);
        assert!(!letter.subject.contains(char::is_control), "{:?}", letter.subject);
        assert!(!letter.text.contains(|c: char| c.is_control() && c != '\n'), "{:?}", letter.text);
        assert!(!letter.text.contains('\u{202e}'), "{:?}", letter.text);
        assert!(letter.text.lines().all(|line| !line.starts_with("Bcc") && line != "."), "{}", letter.text);
    }
}

#[test]
fn invalid_notification_has_no_text() {
    for body in ["", "null", "{}", r#"{"id":"1","type":"billing.balance_low"}"#, "[1]"] {
        assert!(serde_json::from_str::<Notification>(body).is_err(), "{body}");
    }
    let bare = letter_in(r#"{"id":"1","type":"billing.balance_low","time":"2026-11-23T08:00:00Z"}"#);
    assert!(bare.text.contains("Time: 2026-11-23 08:00:00 UTC"), "{}", bare.text);
}

#[test]
fn prose_is_wrapped_and_a_long_word_has_a_line_of_its_own() {
    let long = "w".repeat(100);
    let lines = wrapped(&format!("{}{long} end\n\nsecond", "word ".repeat(20)));
    assert!(lines.lines().filter(|line| **line != *long).all(|line| line.len() <= COLUMNS), "{lines}");
    assert!(lines.contains(&format!("\n{long}\nend\n\nsecond\n")), "{lines}");
}
