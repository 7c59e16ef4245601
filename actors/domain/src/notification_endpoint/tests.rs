//! An endpoint whose receiver is down, comes back, refuses, is gone, and is told of more than it can take.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::authz::Role;
use crate::machine::Trace;
use crate::policy::{PolicyBook, Scope, Value as PolicyValue};
use proptest::prelude::*;
use std::collections::BTreeSet;

const ID: Uuid = Uuid::from_u128(9);

fn start() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn worker() -> Principal {
    Principal::system("notification-delivery")
}

fn person(user_id: &str, org_id: Option<&str>) -> Principal {
    Principal::Caller(Caller {
        user_id: user_id.into(),
        roles: [Role::User].into(),
        org_id: org_id.map(str::to_owned),
        project_id: None,
        plan: None,
        grant: None,
        service_account: None,
    })
}

fn webhook() -> Target {
    Target::Webhook { url: "https://receiver.example/hooks/7f3a".into() }
}

fn create(holder: Holder, events: Option<&[&str]>, place: u16) -> Command {
    let events = events.map(|events| events.iter().map(|event| (*event).to_owned()).collect());
    Command::Create { holder, target: webhook(), secret_enc: Some("c2VhbGVk".into()), events, place }
}

fn message(n: u128) -> Message {
    Message { id: Uuid::from_u128(n), event: "billing.balance_low".into(), body: format!("{{\"id\":{n}}}") }
}

fn failure() -> Failure {
    Failure { why: "500 Internal Server Error".into(), is_final: false, is_gone: false, retry_after_seconds: None }
}

fn failed(n: u128) -> Command {
    Command::Failed { message_id: Uuid::from_u128(n), failure: failure() }
}

fn delivered(n: u128) -> Command {
    Command::Delivered { message_id: Uuid::from_u128(n) }
}

/// One endpoint, and the time.
#[derive(Clone)]
struct Story {
    endpoint: Option<NotificationEndpoint>,
    now: Timestamp,
    policy: PolicyBook,
    version: i64,
}

impl Story {
    fn new() -> Self {
        Self { endpoint: None, now: start(), policy: PolicyBook::default(), version: 0 }
    }

    /// Of ann's, and told of everything.
    fn of_ann() -> Self {
        let mut story = Self::new();
        story.by(&person("ann", None), create(Holder::User("ann".into()), None, 0)).unwrap();
        story
    }

    fn by(&mut self, by: &Principal, command: Command) -> Result<Step<NotificationEndpoint>, Rejection> {
        let ctx = Ctx {
            now: self.now,
            policy: &self.policy,
            by,
            correlation_id: "c",
            trace: Trace::default(),
            seed: u128::from(self.version.unsigned_abs()) * 77,
            id: ID,
            version: self.version,
        };
        let step = NotificationEndpoint::decide(self.endpoint.as_ref(), command, &ctx)?;
        if let Some(next) = &step.next {
            self.version += 1;
            self.endpoint = Some(next.clone());
        }
        Ok(step)
    }

    fn tell(&mut self, command: Command) -> bool {
        self.by(&worker(), command).unwrap().next.is_some()
    }

    fn enqueue(&mut self, n: u128) -> bool {
        self.tell(Command::Enqueue { message: message(n) })
    }

    fn it(&self) -> &NotificationEndpoint {
        self.endpoint.as_ref().unwrap()
    }

    fn due(&self) -> Option<u128> {
        self.it().queue.due(self.now).map(|waiting| waiting.message.id.as_u128())
    }

    /// To the end of the endpoint's pause.
    fn rest(&mut self) {
        if let Some(until) = self.it().queue.paused_until {
            self.now = self.now.max(until);
        }
    }

    /// To when the next attempt is due.
    fn wait(&mut self) -> i64 {
        let at = self.it().timer().unwrap();
        let seconds = (at - self.now).num_seconds();
        self.now = self.now.max(at);
        seconds
    }
}

#[test]
fn message_is_due_at_once_and_gone_when_the_receiver_has_it() {
    let mut story = Story::of_ann();
    assert_eq!((story.it().state(), story.it().timer()), ("active", None));
    assert!(story.enqueue(1));
    assert_eq!((story.due(), story.it().timer()), (Some(1), Some(story.now)));
    assert!(story.tell(delivered(1)));
    assert_eq!((story.due(), story.it().timer()), (None, None));
    assert!(!story.tell(delivered(1)), "an answer that is repeated changes nothing");
    assert!(!story.enqueue(1), "an event that is repeated is not told again");
}

#[test]
fn failures_are_tried_again_ever_more_seldom_until_the_message_is_a_dead_letter() {
    let mut story = Story::of_ann();
    story.enqueue(1);
    let mut pauses = Vec::new();
    while story.it().queue.dead.is_empty() {
        assert!(story.tell(failed(1)));
        if !story.it().queue.waiting.is_empty() {
            pauses.push(story.wait());
        }
    }
    let expected = [5, 300, 1800, 7200, 18_000, 36_000, 50_400];
    for (pause, expected) in pauses.iter().zip(expected) {
        assert!((pause - expected).abs() <= expected / 10 + 1, "{pauses:?}");
    }
    assert_eq!((pauses.len(), story.it().state()), (7, "failing"));
    let letter = story.it().queue.dead[0].clone();
    assert_eq!((letter.attempts, letter.last_error.as_deref()), (8, Some("500 Internal Server Error")));
}

#[test]
fn receiver_that_is_down_is_asked_once_per_pause_and_not_once_per_message() {
    let mut story = Story::of_ann();
    for n in 1..=20 {
        story.enqueue(n);
    }
    story.tell(failed(1));
    assert_eq!(story.due(), None, "the others wait with it");
    story.rest();
    // The first one is due again within a tenth of the endpoint's pause.
    let next = story.due().unwrap();
    story.tell(failed(next));
    assert_eq!(story.due(), None);
    story.rest();
    let next = story.due().unwrap();
    story.tell(delivered(next));
    assert!(story.due().is_some(), "it is back: everything that is due is tried");
}

#[test]
fn dead_letters_are_sent_again_or_given_up_by_their_owner() {
    let ann = person("ann", None);
    let mut story = Story::of_ann();
    story.policy.set(Key::NotificationDeliveryMaxAttempts, Scope::Global, start(), PolicyValue::Int(1)).unwrap();
    for n in 1..=3 {
        story.enqueue(n);
        story.tell(failed(n));
        story.rest();
    }
    assert_eq!(story.it().queue.dead.len(), 3);
    let one = |n| Some(Uuid::from_u128(n));
    let none = Command::Resend { message_id: one(7), reason: None };
    assert_eq!(story.by(&ann, none).unwrap_err(), Rejection::NoSuchLetter);
    let resend = Command::Resend { message_id: one(2), reason: None };
    assert_eq!(story.by(&ann, resend).unwrap().audit.len(), 1);
    assert_eq!((story.due(), story.it().queue.waiting[0].attempts), (Some(2), 0));
    story.tell(delivered(2));
    story.by(&ann, Command::Dismiss { message_id: None, reason: Some("too late".into()) }).unwrap();
    assert_eq!((story.it().queue.dead.len(), story.it().state()), (0, "active"));
}

#[test]
fn receiver_that_is_gone_or_fails_for_days_is_disabled_and_its_owner_enables_it() {
    let ann = person("ann", None);
    let mut gone = Story::of_ann();
    gone.enqueue(1);
    let failure = Failure { is_gone: true, ..failure() };
    gone.tell(Command::Failed { message_id: Uuid::from_u128(1), failure });
    assert_eq!(gone.it().phase, Phase::Disabled { since: gone.now, because: Disabled::Gone });
    assert_eq!((gone.it().state(), gone.it().timer()), ("disabled", None));
    assert!(!gone.enqueue(2), "nothing is queued meanwhile");
    let enable = Command::Change { change: Change { is_enabled: Some(true), ..Change::default() } };
    gone.by(&ann, enable).unwrap();
    assert_eq!(gone.due(), Some(1), "what waited is tried at once");

    let mut fails = Story::of_ann();
    for n in 1.. {
        fails.enqueue(n);
        if !fails.it().is_enabled() {
            break;
        }
        fails.wait();
        fails.tell(failed(fails.due().unwrap()));
        fails.now += TimeDelta::hours(3);
    }
    assert!(matches!(fails.it().phase, Phase::Disabled { because: Disabled::Failing, .. }));
    assert!(fails.now - start() >= TimeDelta::days(5));
}

#[test]
fn final_failure_is_a_dead_letter_and_the_others_are_tried_at_once() {
    let mut story = Story::of_ann();
    story.enqueue(1);
    story.enqueue(2);
    let failure = Failure { is_final: true, ..failure() };
    story.tell(Command::Failed { message_id: Uuid::from_u128(1), failure });
    assert_eq!((story.it().queue.dead.len(), story.due()), (1, Some(2)));
}

#[test]
fn receiver_may_ask_for_time_within_a_day() {
    for (asked, expected) in [(120, 120), (1_000_000, 86_400)] {
        let mut story = Story::of_ann();
        story.enqueue(1);
        let failure = Failure { retry_after_seconds: Some(asked), ..failure() };
        story.tell(Command::Failed { message_id: Uuid::from_u128(1), failure });
        assert_eq!(story.wait(), expected);
    }
}

#[test]
fn endpoint_is_told_of_the_events_that_it_wants() {
    let mut story = Story::new();
    let ann = person("ann", None);
    story.by(&ann, create(Holder::User("ann".into()), Some(&["provisioning.failed"]), 0)).unwrap();
    assert!(!story.enqueue(1));
    story.by(&ann, Command::Test { body: "{}".into() }).unwrap();
    assert_eq!(story.it().queue.waiting[0].message.event, TEST);
    let all = Change { events: Some(None), ..Change::default() };
    story.by(&ann, Command::Change { change: all }).unwrap();
    assert!(story.enqueue(1));
}

#[test]
fn endpoint_is_its_holder_s_alone() {
    let (ann, bob) = (person("ann", Some("acme")), person("bob", Some("acme")));
    let stranger = person("carl", Some("other"));
    let others = create(Holder::Org("other".into()), None, 0);
    assert_eq!(Story::new().by(&ann, others).unwrap_err(), Rejection::NotFound);
    let mut own = Story::of_ann();
    for who in [&bob, &stranger] {
        assert_eq!(own.by(who, Command::Delete).unwrap_err(), Rejection::NotFound);
    }
    let mut org = Story::new();
    org.by(&ann, create(Holder::Org("acme".into()), None, 0)).unwrap();
    assert_eq!(org.by(&stranger, Command::Delete).unwrap_err(), Rejection::NotFound);
    org.by(&bob, Command::Delete).unwrap();
    assert_eq!(org.by(&bob, Command::Delete).unwrap_err(), Rejection::NotFound, "it is gone");
    assert_eq!((org.it().claims(), org.it().secret_enc.clone()), (BTreeSet::new(), None));
}

#[test]
fn there_are_as_many_as_policy_admits() {
    let ann = person("ann", None);
    let of_ann = || Holder::User("ann".into());
    assert!(Story::new().by(&ann, create(of_ann(), None, 4)).is_ok());
    assert_eq!(Story::new().by(&ann, create(of_ann(), None, 5)).unwrap_err(), Rejection::TooMany { limit: 5 });
    let places: BTreeSet<_> = (0..2)
        .map(|place| {
            let mut story = Story::new();
            story.by(&ann, create(of_ann(), None, place)).unwrap();
            story.it().claims()
        })
        .collect();
    assert_eq!(places.len(), 2, "each place is claimed once");
}

#[test]
fn secret_before_signs_for_a_day() {
    let ann = person("ann", None);
    let mut story = Story::of_ann();
    story.by(&ann, Command::RotateSecret { secret_enc: "bmV3".into() }).unwrap();
    let secrets = |story: &Story| story.it().secrets(story.now).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(secrets(&story), ["bmV3", "c2VhbGVk"]);
    story.now += TimeDelta::hours(24);
    assert_eq!(secrets(&story), ["bmV3"]);
}

#[test]
fn address_of_the_token_is_followed_and_a_deleted_one_does_not_come_back() {
    let ann = person("ann", None);
    let introduce = |address: &str| Command::Introduce { user_id: "ann".into(), address: address.into() };
    let mut story = Story::new();
    assert!(story.tell(introduce("ann@example.com")));
    assert!(!story.tell(introduce("ann@example.com")));
    assert!(story.it().wants("billing.balance_low") && !story.it().wants("terminal.opened"));
    let off = Change { is_enabled: Some(false), ..Change::default() };
    story.by(&ann, Command::Change { change: off }).unwrap();
    assert!(story.tell(introduce("ann@example.org")));
    assert!(!story.it().is_enabled(), "another address is the same choice");
    let url = Change { url: Some("https://example.com".into()), ..Change::default() };
    assert_eq!(story.by(&ann, Command::Change { change: url }).unwrap_err(), Rejection::NotAWebhook);
    story.by(&ann, Command::Delete).unwrap();
    assert!(!story.tell(introduce("ann@example.net")));
}

#[derive(Clone, Debug)]
enum Happening {
    Event(usize),
    Delivered,
    Failed { is_final: bool },
    Later(i64),
    Resend,
    Switch(bool),
}

fn happenings() -> impl Strategy<Value = Vec<Happening>> {
    let one = prop_oneof![
        4 => (0..BODY_MOST + 50).prop_map(Happening::Event),
        2 => Just(Happening::Delivered),
        3 => any::<bool>().prop_map(|is_final| Happening::Failed { is_final }),
        2 => (0..40_000_i64).prop_map(Happening::Later),
        1 => Just(Happening::Resend),
        1 => any::<bool>().prop_map(Happening::Switch),
    ];
    proptest::collection::vec(one, 1..300)
}

proptest! {
    // A queue that is full takes milliseconds to check, and most cases fill it.
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Each message that was taken waits, was delivered, is a dead letter, or was counted as forgotten; and the snapshot is bounded.
    #[test]
    fn whatever_happens_no_message_is_lost_uncounted_and_the_queue_is_bounded(happenings in happenings()) {
        let ann = person("ann", None);
        let mut story = Story::of_ann();
        let (mut taken, mut received) = (0_u64, 0_u64);
        for (n, happening) in happenings.into_iter().enumerate() {
            match happening {
                Happening::Event(bytes) => {
                    let message = Message { body: "\"".repeat(bytes), ..message(n as u128 + 1) };
                    taken += u64::from(story.tell(Command::Enqueue { message }));
                }
                Happening::Delivered => {
                    if let Some(n) = story.due() {
                        prop_assert!(story.tell(delivered(n)));
                        received += 1;
                    }
                }
                Happening::Failed { is_final } => {
                    if let Some(n) = story.due() {
                        let failure = Failure { is_final, why: "\u{1}".repeat(1000), ..failure() };
                        let was_heard = story.tell(Command::Failed { message_id: Uuid::from_u128(n), failure });
                        prop_assert!(was_heard);
                    }
                }
                Happening::Later(seconds) => story.now += TimeDelta::seconds(seconds),
                Happening::Resend => {
                    let _ = story.by(&ann, Command::Resend { message_id: None, reason: None });
                }
                Happening::Switch(is_enabled) => {
                    let change = Change { is_enabled: Some(is_enabled), ..Change::default() };
                    story.by(&ann, Command::Change { change }).unwrap();
                }
            }
            let it = story.it();
            let there = (it.queue.waiting.len() + it.queue.dead.len()) as u64;
            prop_assert_eq!(taken, there + received + it.queue.forgotten);
            prop_assert!(serde_json::to_string(it).unwrap().len() < NotificationEndpoint::SNAPSHOT_MOST);
            prop_assert_eq!(it.timer().is_some(), it.is_enabled() && !it.queue.waiting.is_empty());
        }
    }
}
