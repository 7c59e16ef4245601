//! An endpoint whose receiver fails, recovers, refuses, is gone, or gets more messages than it can take.

use super::*;
use crate::authz::TokenRole;
use crate::id::OrgId;
use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
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
    Principal::Caller(CallerIdentity {
        org_id: org_id.map(OrgId::from),
        ..CallerIdentity::new(user_id, [TokenRole::User])
    })
}

fn webhook() -> Target {
    Target::Webhook { url: "https://receiver.example/hooks/7f3a".into() }
}

fn create(holder: Holder, events: Option<&[&str]>, place: u16) -> Request {
    let events = events.map(|events| events.iter().map(|event| (*event).to_owned()).collect());
    Request::Create { holder, target: webhook(), secret_enc: Some("c2VhbGVk".into()), events, place }
}

fn message(n: u128) -> QueuedNotification {
    QueuedNotification { id: Uuid::from_u128(n), event: "billing.balance_low".into(), body: format!("{{\"id\":{n}}}") }
}

fn failure() -> DeliveryFailure {
    DeliveryFailure {
        why: "500 Internal Server Error".into(),
        is_final: false,
        is_gone: false,
        retry_after_seconds: None,
    }
}

fn failed(n: u128) -> Fact {
    Fact::Failed { message_id: Uuid::from_u128(n), failure: failure() }
}

fn delivered(n: u128) -> Fact {
    Fact::Delivered { message_id: Uuid::from_u128(n) }
}

/// One endpoint and the clock.
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

    /// An endpoint of ann with all events.
    fn of_ann() -> Self {
        let mut story = Self::new();
        story.by(&person("ann", None), create(Holder::User("ann".into()), None, 0)).unwrap();
        story
    }

    fn by(
        &mut self,
        by: &Principal,
        command: impl Into<Command>,
    ) -> Result<Transition<NotificationEndpoint>, Rejection> {
        let ctx = TransitionContext {
            seed: u128::from(self.version.unsigned_abs()) * 77,
            id: ID,
            version: self.version,
            ..TransitionContext::in_test(self.now, &self.policy, by)
        };
        let step = NotificationEndpoint::decide(self.endpoint.as_ref(), command.into(), &ctx)?;
        if let Some(next) = &step.next {
            self.version += 1;
            self.endpoint = Some(next.clone());
        }
        Ok(step)
    }

    fn send(&mut self, command: impl Into<Command>) -> bool {
        self.by(&worker(), command).unwrap().next.is_some()
    }

    fn enqueue(&mut self, n: u128) -> bool {
        self.send(Fact::NotificationDue { message: message(n) })
    }

    fn it(&self) -> &NotificationEndpoint {
        self.endpoint.as_ref().unwrap()
    }

    fn due(&self) -> Option<u128> {
        self.it().queue.due(self.now).map(|waiting| waiting.message.id.as_u128())
    }

    /// Advances to the end of the endpoint's pause.
    fn rest(&mut self) {
        if let Some(until) = self.it().queue.paused_until {
            self.now = self.now.max(until);
        }
    }

    /// Advances to the next attempt.
    fn wait(&mut self) -> i64 {
        let at = self.it().timer().unwrap();
        let seconds = (at - self.now).num_seconds();
        self.now = self.now.max(at);
        seconds
    }
}

#[test]
fn message_is_due_at_once_and_removed_when_delivered() {
    let mut story = Story::of_ann();
    assert_eq!((story.it().state(), story.it().timer()), ("active", None));
    assert!(story.enqueue(1));
    assert_eq!((story.due(), story.it().timer()), (Some(1), Some(story.now)));
    assert!(story.send(delivered(1)));
    assert_eq!((story.due(), story.it().timer()), (None, None));
    assert!(!story.send(delivered(1)), "an answer that is repeated changes nothing");
    assert!(!story.enqueue(1), "a repeated event is not queued again");
}

#[test]
fn failed_message_is_retried_with_backoff_until_it_is_a_dead_letter() {
    let mut story = Story::of_ann();
    story.enqueue(1);
    let mut pauses = Vec::new();
    while story.it().queue.dead.is_empty() {
        assert!(story.send(failed(1)));
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
fn failing_receiver_gets_one_attempt_per_pause() {
    let mut story = Story::of_ann();
    for n in 1..=20 {
        story.enqueue(n);
    }
    story.send(failed(1));
    assert_eq!(story.due(), None, "the others wait with it");
    story.rest();
    // The first one is due again within a tenth of the endpoint's pause.
    let next = story.due().unwrap();
    story.send(failed(next));
    assert_eq!(story.due(), None);
    story.rest();
    let next = story.due().unwrap();
    story.send(delivered(next));
    assert!(story.due().is_some(), "it is back: everything that is due is tried");
}

#[test]
fn dead_letters_are_resent_or_dismissed_by_their_owner() {
    let ann = person("ann", None);
    let mut story = Story::of_ann();
    story
        .policy
        .set(PolicyKey::NotificationDeliveryMaxAttempts, PolicyScope::Global, start(), PolicyValue::Int(1))
        .unwrap();
    for n in 1..=3 {
        story.enqueue(n);
        story.send(failed(n));
        story.rest();
    }
    assert_eq!(story.it().queue.dead.len(), 3);
    let one = |n| Some(Uuid::from_u128(n));
    let none = Request::Resend { message_id: one(7), reason: None };
    assert_eq!(story.by(&ann, none).unwrap_err(), Rejection::NoSuchLetter);
    let resend = Request::Resend { message_id: one(2), reason: None };
    assert_eq!(story.by(&ann, resend).unwrap().audit.len(), 1);
    assert_eq!((story.due(), story.it().queue.waiting[0].attempts), (Some(2), 0));
    story.send(delivered(2));
    story.by(&ann, Request::Dismiss { message_id: None, reason: Some("too late".into()) }).unwrap();
    assert_eq!((story.it().queue.dead.len(), story.it().state()), (0, "active"));
}

#[test]
fn gone_or_failing_receiver_is_disabled_and_enabled_by_its_owner() {
    let ann = person("ann", None);
    let mut gone = Story::of_ann();
    gone.enqueue(1);
    let failure = DeliveryFailure { is_gone: true, ..failure() };
    gone.send(Fact::Failed { message_id: Uuid::from_u128(1), failure });
    assert_eq!(gone.it().phase, Phase::Disabled { since: gone.now, because: DisableCause::Gone });
    assert_eq!((gone.it().state(), gone.it().timer()), ("disabled", None));
    assert!(!gone.enqueue(2), "nothing is queued meanwhile");
    let enable = Request::Change { change: EndpointChange { is_enabled: Some(true), ..EndpointChange::default() } };
    gone.by(&ann, enable).unwrap();
    assert_eq!(gone.due(), Some(1), "what waited is tried at once");

    let mut fails = Story::of_ann();
    for n in 1.. {
        fails.enqueue(n);
        if !fails.it().is_enabled() {
            break;
        }
        fails.wait();
        fails.send(failed(fails.due().unwrap()));
        fails.now += TimeDelta::hours(3);
    }
    assert!(matches!(fails.it().phase, Phase::Disabled { because: DisableCause::Failing, .. }));
    assert!(fails.now - start() >= TimeDelta::days(5));
}

#[test]
fn final_failure_is_a_dead_letter_and_does_not_pause_the_endpoint() {
    let mut story = Story::of_ann();
    story.enqueue(1);
    story.enqueue(2);
    let failure = DeliveryFailure { is_final: true, ..failure() };
    story.send(Fact::Failed { message_id: Uuid::from_u128(1), failure });
    assert_eq!((story.it().queue.dead.len(), story.due()), (1, Some(2)));
}

#[test]
fn retry_after_is_honored_up_to_a_day() {
    for (asked, expected) in [(120, 120), (1_000_000, 86_400)] {
        let mut story = Story::of_ann();
        story.enqueue(1);
        let failure = DeliveryFailure { retry_after_seconds: Some(asked), ..failure() };
        story.send(Fact::Failed { message_id: Uuid::from_u128(1), failure });
        assert_eq!(story.wait(), expected);
    }
}

#[test]
fn endpoint_gets_the_events_that_it_selects() {
    let mut story = Story::new();
    let ann = person("ann", None);
    story.by(&ann, create(Holder::User("ann".into()), Some(&["provisioning.failed"]), 0)).unwrap();
    assert!(!story.enqueue(1));
    story.by(&ann, Request::Test { body: "{}".into() }).unwrap();
    assert_eq!(story.it().queue.waiting[0].message.event, TEST);
    let all = EndpointChange { events: Some(None), ..EndpointChange::default() };
    story.by(&ann, Request::Change { change: all }).unwrap();
    assert!(story.enqueue(1));
}

#[test]
fn endpoint_is_visible_to_its_holder_only() {
    let (ann, bob) = (person("ann", Some("acme")), person("bob", Some("acme")));
    let stranger = person("carl", Some("other"));
    let others = create(Holder::Org("other".into()), None, 0);
    assert_eq!(Story::new().by(&ann, others).unwrap_err(), Rejection::NotFound);
    let mut own = Story::of_ann();
    for who in [&bob, &stranger] {
        assert_eq!(own.by(who, Request::Delete).unwrap_err(), Rejection::NotFound);
    }
    let mut org = Story::new();
    org.by(&ann, create(Holder::Org("acme".into()), None, 0)).unwrap();
    assert_eq!(org.by(&stranger, Request::Delete).unwrap_err(), Rejection::NotFound);
    org.by(&bob, Request::Delete).unwrap();
    assert_eq!(org.by(&bob, Request::Delete).unwrap_err(), Rejection::NotFound, "it is gone");
    assert_eq!((org.it().claims(), org.it().secret_enc.clone()), (BTreeSet::new(), None));
}

#[test]
fn endpoints_are_bounded_by_policy() {
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
fn former_secret_signs_for_a_day() {
    let ann = person("ann", None);
    let mut story = Story::of_ann();
    story.by(&ann, Request::RotateSecret { secret_enc: "bmV3".into() }).unwrap();
    let secrets = |story: &Story| story.it().secrets(story.now).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(secrets(&story), ["bmV3", "c2VhbGVk"]);
    story.now += TimeDelta::hours(24);
    assert_eq!(secrets(&story), ["bmV3"]);
}

#[test]
fn address_follows_the_token_and_a_deleted_endpoint_stays_deleted() {
    let ann = person("ann", None);
    let introduce =
        |address: &str| Fact::AddressVerified { user_id: "ann".into(), address: address.into(), claims: None };
    let mut story = Story::new();
    assert!(story.send(introduce("ann@example.com")));
    assert!(!story.send(introduce("ann@example.com")));
    assert!(story.it().wants("billing.balance_low") && !story.it().wants("terminal.opened"));
    let off = EndpointChange { is_enabled: Some(false), ..EndpointChange::default() };
    story.by(&ann, Request::Change { change: off }).unwrap();
    assert!(story.send(introduce("ann@example.org")));
    assert!(!story.it().is_enabled(), "another address is the same choice");
    let url = EndpointChange { url: Some("https://example.com".into()), ..EndpointChange::default() };
    assert_eq!(story.by(&ann, Request::Change { change: url }).unwrap_err(), Rejection::NotAWebhook);
    story.by(&ann, Request::Delete).unwrap();
    assert!(!story.send(introduce("ann@example.net")));
}

#[test]
fn policies_follow_the_recipient_as_the_last_token_names_it() {
    let ann = |org_id: Option<&str>, plan: Option<&str>| {
        let Principal::Caller(caller) = person("ann", org_id) else { unreachable!() };
        Principal::Caller(CallerIdentity { plan: plan.map(str::to_owned), ..caller })
    };
    let mut story = Story::new();
    let limit = PolicyKey::NotificationEndpoints;
    story.policy.set(limit, PolicyScope::Plan("free".into()), start(), PolicyValue::Int(0)).unwrap();
    let webhook = || create(Holder::User("ann".into()), None, 0);
    assert_eq!(story.by(&ann(None, Some("free")), webhook()).unwrap_err(), Rejection::TooMany { limit: 0 });
    story.by(&ann(Some("acme"), Some("pro")), webhook()).unwrap();
    let named = |org_id: Option<&str>, plan: Option<&str>| Scopes {
        user_id: Some("ann".into()),
        org_id: org_id.map(OrgId::from),
        project_id: None,
        plan: plan.map(str::to_owned),
    };
    assert_eq!(story.it().scopes(), named(Some("acme"), Some("pro")));
    // An administrator's token is not the recipient's.
    let Principal::Caller(root) = person("root", Some("ops")) else { unreachable!() };
    let root = Principal::Caller(CallerIdentity { roles: [TokenRole::Admin].into(), ..root });
    let change = |events: &str| {
        let events = Some(Some([events.to_owned()].into()));
        Request::Change { change: EndpointChange { events, ..EndpointChange::default() } }
    };
    story.by(&root, change("billing.balance_low")).unwrap();
    assert_eq!(story.it().scopes(), named(Some("acme"), Some("pro")));
    story.by(&ann(None, Some("free")), change("billing.balance_depleted")).unwrap();
    assert_eq!(story.it().scopes(), named(None, Some("free")));

    let mut story = Story::new();
    let introduce = |plan: Option<&str>| Fact::AddressVerified {
        user_id: "ann".into(),
        address: "ann@example.com".into(),
        claims: plan.map(|plan| RecipientClaims { org_id: None, plan: Some(plan.into()) }),
    };
    assert!(story.send(introduce(Some("pro"))));
    assert!(!story.send(introduce(None)), "a member of an earlier release does not name it");
    assert_eq!(story.it().scopes(), named(None, Some("pro")));
    assert!(story.send(introduce(Some("free"))));
    assert_eq!(story.it().scopes(), named(None, Some("free")));

    let mut story = Story::new();
    story.by(&ann(Some("acme"), Some("pro")), create(Holder::Org("acme".into()), None, 0)).unwrap();
    assert_eq!(story.it().scopes(), Scopes { user_id: None, ..named(Some("acme"), Some("pro")) });
}

#[derive(Clone, Debug)]
enum EndpointStep {
    Event(usize),
    Delivered,
    Failed { is_final: bool },
    Later(i64),
    Resend,
    Switch(bool),
}

/// The bytes of all bodies and errors of a queue.
fn text_bytes(queue: &DeliveryQueue) -> usize {
    let entries = queue.waiting.iter().chain(&queue.dead);
    let of_entries = entries.map(|entry| entry.message.body.len() + entry.last_error.as_ref().map_or(0, String::len));
    of_entries.sum::<usize>()
        + queue.attempts.iter().filter_map(|attempt| attempt.error.as_ref()).map(String::len).sum::<usize>()
}

fn happenings() -> impl Strategy<Value = Vec<EndpointStep>> {
    let one = prop_oneof![
        4 => (0..BODY_MOST + 50).prop_map(EndpointStep::Event),
        2 => Just(EndpointStep::Delivered),
        3 => any::<bool>().prop_map(|is_final| EndpointStep::Failed { is_final }),
        2 => (0..40_000_i64).prop_map(EndpointStep::Later),
        1 => Just(EndpointStep::Resend),
        1 => any::<bool>().prop_map(EndpointStep::Switch),
    ];
    proptest::collection::vec(one, 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Each accepted message is queued, delivered, a dead letter, or counted as dropped; and the snapshot is bounded.
    #[test]
    fn any_sequence_counts_every_message_and_bounds_the_queue(happenings in happenings()) {
        let ann = person("ann", None);
        let mut story = Story::of_ann();
        let (mut taken, mut received, mut most_text) = (0_u64, 0_u64, 0);
        for (n, happening) in happenings.into_iter().enumerate() {
            match happening {
                EndpointStep::Event(bytes) => {
                    let message = QueuedNotification { body: "\"".repeat(bytes), ..message(n as u128 + 1) };
                    taken += u64::from(story.send(Fact::NotificationDue { message }));
                }
                EndpointStep::Delivered => {
                    if let Some(n) = story.due() {
                        prop_assert!(story.send(delivered(n)));
                        received += 1;
                    }
                }
                EndpointStep::Failed { is_final } => {
                    if let Some(n) = story.due() {
                        let failure = DeliveryFailure { is_final, why: "\u{1}".repeat(1000), ..failure() };
                        let was_processed = story.send(Fact::Failed { message_id: Uuid::from_u128(n), failure });
                        prop_assert!(was_processed);
                    }
                }
                EndpointStep::Later(seconds) => story.now += TimeDelta::seconds(seconds),
                EndpointStep::Resend => {
                    let _ = story.by(&ann, Request::Resend { message_id: None, reason: None });
                }
                EndpointStep::Switch(is_enabled) => {
                    let change = EndpointChange { is_enabled: Some(is_enabled), ..EndpointChange::default() };
                    story.by(&ann, Request::Change { change }).unwrap();
                }
            }
            let it = story.it();
            let there = (it.queue.waiting.len() + it.queue.dead.len()) as u64;
            prop_assert_eq!(taken, there + received + it.queue.forgotten);
            // The text is what grows: a snapshot with less of it is smaller, and a full one takes milliseconds to write.
            if text_bytes(&it.queue) > most_text {
                most_text = text_bytes(&it.queue);
                prop_assert!(serde_json::to_string(it).unwrap().len() < NotificationEndpoint::SNAPSHOT_MOST);
            }
            prop_assert_eq!(it.timer().is_some(), it.is_enabled() && !it.queue.waiting.is_empty());
        }
    }
}
