//! An event of the processor under adverse conditions: it arrives often, is processed twice, fails, is given up, and is settled by an
//! operator.

use super::*;
use crate::authz::{CallerIdentity, PlatformRole, Principal, TokenRole};
use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
use crate::state_machine::Command as _;
use proptest::prelude::*;
use std::fmt::Write as _;
use uuid::Uuid;

const ID: Uuid = Uuid::from_u128(9);

fn start() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn receive(digest: &str) -> Fact {
    Fact::Received {
        event_id: "evt_1".into(),
        event_type: "payment_intent.succeeded".into(),
        object_id: Some("pi_1".into()),
        occurred_at: Some(start()),
        digest: digest.into(),
        body_enc: "c2VhbGVk".into(),
        nothing_follows: false,
    }
}

fn failed() -> Fact {
    Fact::Failed { why: "it differs".into() }
}

fn retry() -> Request {
    Request::Retry { reason: "the account is open again".into() }
}

fn dismiss() -> Request {
    Request::Dismiss { reason: "paid back by hand".into() }
}

fn processed() -> Fact {
    Fact::Processed { outcome: ProcessingOutcome::Applied }
}

fn worker() -> Principal {
    Principal::system("test")
}

fn operator() -> Principal {
    Principal::Caller(CallerIdentity {
        grant: Some(crate::authz::Grant {
            roles: [PlatformRole::BillingOperations].into(),
            from: crate::precondition::Precondition { entity: ID, version: 1 },
        }),
        ..CallerIdentity::new("ann", [TokenRole::User])
    })
}

/// One event and the clock.
#[derive(Clone)]
struct Story {
    event: Option<ProcessorEvent>,
    now: Timestamp,
    policy: PolicyBook,
}

impl Story {
    fn new() -> Self {
        Self { event: None, now: start(), policy: PolicyBook::default() }
    }

    fn received() -> Self {
        let mut story = Self::new();
        story.send(receive("d"));
        story
    }

    /// Sets the bound of attempts.
    fn at_most(mut self, attempts: i64) -> Self {
        let (key, since) = (PolicyKey::BillingWebhookMaxAttempts, Timestamp::UNIX_EPOCH);
        self.policy.set(key, PolicyScope::Global, since, PolicyValue::Int(attempts)).unwrap();
        self
    }

    fn dead() -> Self {
        let mut story = Self::received().at_most(1);
        story.send(failed());
        story
    }

    fn ask(&self, command: impl Into<Command>) -> Result<Transition<ProcessorEvent>, Rejection> {
        let command = command.into();
        let by = if command.action() == Action::Advance { worker() } else { operator() };
        let ctx = TransitionContext { id: ID, version: 0, ..TransitionContext::in_test(self.now, &self.policy, &by) };
        ProcessorEvent::decide(self.event.as_ref(), command, &ctx)
    }

    fn send(&mut self, command: impl Into<Command>) -> Transition<ProcessorEvent> {
        let step = self.ask(command).unwrap();
        if let Some(next) = &step.next {
            self.event = Some(next.clone());
        }
        step
    }

    fn state(&self) -> &'static str {
        self.event.as_ref().unwrap().state()
    }

    fn until_the_timer(&mut self) {
        self.now = self.event.as_ref().unwrap().timer().unwrap();
    }
}

#[test]
fn event_without_consequence_is_processed_on_receipt_and_its_body_removed() {
    let mut story = Story::new();
    let Fact::Received { event_id, object_id, occurred_at, digest, body_enc, .. } = receive("d") else { panic!() };
    let event_type = "invoice.updated".to_owned();
    let step = story.send(Fact::Received {
        event_id,
        event_type,
        object_id,
        occurred_at,
        digest,
        body_enc,
        nothing_follows: true,
    });
    assert!(step.events.is_empty(), "nobody has to work on it");
    assert_eq!(story.state(), "processed");
    assert!(story.send(receive("d")).next.is_none(), "sent again it is the same");
    assert_eq!(story.ask(receive("other")).unwrap_err(), Rejection::Differs);
    story.until_the_timer();
    assert!(story.send(Command::TICK).next.unwrap().body_enc.is_none());
}

#[test]
fn repeated_event_is_stored_and_published_once() {
    let mut story = Story::new();
    let first = story.send(receive("d"));
    assert_eq!(first.reply, Reply::Stored { is_new: true });
    assert_eq!(first.events, [Event::ProcessorEventDue { processor_event_id: ProcessorEventId(ID) }]);
    for _ in 0..100 {
        let repeated = story.send(receive("d"));
        assert_eq!(
            (repeated.reply, repeated.next, repeated.events),
            (Reply::Stored { is_new: false }, None, Vec::new())
        );
    }
    assert_eq!(story.ask(receive("another")).unwrap_err(), Rejection::Differs);
    story.send(processed());
    assert_eq!(story.send(receive("d")).reply, Reply::Stored { is_new: false });
}

#[test]
fn unprocessed_event_is_resent_with_backoff() {
    let mut story = Story::received();
    let mut published = Vec::new();
    for _ in 0..6 {
        story.until_the_timer();
        published.push((story.now - start()).num_seconds());
        assert_eq!(story.send(Command::TICK).events.len(), 1);
        assert!(story.send(Command::TICK).next.is_none(), "not twice at once");
    }
    assert_eq!(published, [10, 20, 40, 80, 160, 320]);
    assert_eq!(story.state(), "received");
}

#[test]
fn failing_event_is_retried_for_hours_and_then_awaits_an_operator() {
    let mut story = Story::received();
    let mut attempts = 0;
    while story.state() != "dead" {
        story.send(failed());
        attempts += 1;
        if story.state() == "retrying" {
            story.until_the_timer();
            assert_eq!(story.send(Command::TICK).events.len(), 1);
        }
    }
    let event = story.event.clone().unwrap();
    assert_eq!((attempts, event.attempts, event.last_error.as_deref()), (16, 16, Some("it differs")));
    let tried_for = (story.now - start()).num_minutes();
    assert!((180..=600).contains(&tried_for), "{tried_for} minutes");
    assert_eq!(event.timer(), None, "nothing goes on by itself");
    assert!(event.deadline().unwrap().at <= story.now, "it is overdue at once");
}

#[test]
fn operator_retries_or_dismisses_a_dead_event_and_both_are_audited() {
    let mut story = Story::dead();
    let mut dismissed = story.clone();
    let step = story.send(retry());
    assert_eq!((step.events.len(), step.audit[0].action), (1, AuditAction::ProcessorEventsRetry));
    assert_eq!(step.audit[0].metadata["reason"], "the account is open again");
    assert_eq!((story.state(), story.event.as_ref().unwrap().attempts), ("retrying", 0));
    story.send(processed());
    assert_eq!(story.state(), "processed");

    let step = dismissed.send(dismiss());
    assert_eq!((step.events.len(), step.audit[0].action), (1, AuditAction::ProcessorEventsDismiss));
    assert_eq!(dismissed.state(), "dismissed");
    // A late success: a dismissed event stays dismissed.
    assert!(dismissed.send(processed()).next.is_none());
    assert!(dismissed.send(failed()).next.is_none());
}

#[test]
fn overdue_event_whose_processing_neither_succeeds_nor_fails_is_ended_by_an_operator() {
    let mut story = Story::received();
    for order in [retry(), dismiss()] {
        assert_eq!(story.ask(order).unwrap_err(), Rejection::WrongState { state: PhaseName::Received });
    }
    story.now += OVERDUE_AFTER;
    let mut retried = story.clone();
    retried.send(retry());
    assert_eq!(retried.state(), "retrying");
    story.send(dismiss());
    assert_eq!((story.state(), story.event.unwrap().deadline()), ("dismissed", None));
}

/// What may happen to an event, and how many seconds pass before.
fn happenings() -> impl Strategy<Value = Vec<(Command, i64)>> {
    let command = prop_oneof![
        2 => Just(Command::from(receive("d"))),
        1 => Just(Command::from(receive("another"))),
        3 => Just(Command::from(failed())),
        1 => Just(Command::from(processed())),
        1 => Just(Command::from(retry())),
        1 => Just(Command::from(dismiss())),
        3 => Just(Command::TICK),
    ];
    prop::collection::vec((command, 0_i64..10_000), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Deliveries, outcomes and an operator's orders arrive in any order, and each of them twice.
    #[test]
    fn event_ends_once_in_any_order_and_an_operator_can_end_it_at_any_time(happenings in happenings()) {
        let mut story = Story::received();
        for (command, seconds) in happenings {
            story.now += TimeDelta::seconds(seconds);
            for _ in 0..2 {
                let before = story.event.clone().unwrap();
                let Ok(step) = story.ask(command.clone()) else { continue };
                if let Some(next) = step.next {
                    prop_assert!(before.is_open() || !next.is_open(), "what has ended stays ended: {:?}", next.phase);
                    prop_assert!(next.is_open() || before.is_open() || next.phase == before.phase);
                    prop_assert!(next.violations(&[]).is_empty());
                    story.event = Some(next);
                }
            }
        }
        story.now += OVERDUE_AFTER;
        if story.event.as_ref().unwrap().is_open() {
            story.send(dismiss());
        }
        prop_assert!(!story.event.unwrap().is_open());
    }
}

#[test]
fn event_body_is_removed_after_its_retention() {
    for end in [Command::from(processed()), dismiss().into()] {
        let mut story = Story::received();
        story.send(failed());
        story.send(end);
        let over = story.now;
        story.until_the_timer();
        assert_eq!(story.now - over, BODY_RETENTION);
        story.send(Command::TICK);
        let event = story.event.clone().unwrap();
        assert_eq!((event.body_enc.as_deref(), event.timer()), (None, None));
        // Its id stays known.
        assert_eq!(story.send(receive("d")).reply, Reply::Stored { is_new: false });
        assert!(story.send(Maintenance::Reseal { body_enc: "resealed".into() }).next.is_none());
    }
}

#[test]
fn stored_error_text_is_bounded() {
    let mut story = Story::received();
    story.send(Fact::Failed { why: "ü".repeat(10_000) });
    assert_eq!(story.event.unwrap().last_error.unwrap().chars().count(), 500);
}

#[test]
fn every_command_in_every_state_does_what_was_reviewed() {
    let story = |commands: Vec<Command>| {
        let mut story = Story::received();
        commands.into_iter().for_each(|command| drop(story.send(command)));
        story
    };
    let states = [
        ("nothing", Story::new()),
        ("received", Story::received()),
        ("retrying", story(vec![failed().into()])),
        ("dead", Story::dead()),
        ("processed", story(vec![processed().into()])),
        ("dismissed", story(vec![failed().into(), dismiss().into()])),
    ];
    let commands = || {
        [
            ("receive", Command::from(receive("d"))),
            ("receive, another under its id", receive("another").into()),
            ("processed", processed().into()),
            ("failed", failed().into()),
            ("retry", retry().into()),
            ("dismiss", dismiss().into()),
            ("reseal", Maintenance::Reseal { body_enc: "resealed".into() }.into()),
            ("tick before its time", Command::TICK),
        ]
    };
    let mut table = String::new();
    for (name, story) in &states {
        writeln!(table, "{name}").unwrap();
        for (command, what) in commands() {
            writeln!(table, "    {command}: {}", outcome(story.ask(what))).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

fn outcome(step: Result<Transition<ProcessorEvent>, Rejection>) -> String {
    let step = match step {
        Err(rejection) => return format!("refused: {rejection}"),
        Ok(step) => step,
    };
    let Some(next) = step.next else { return "stays".to_owned() };
    assert!(next.violations(&[]).is_empty(), "{next:?}");
    let stored = serde_json::to_string(&next).unwrap();
    assert_eq!(serde_json::from_str::<ProcessorEvent>(&stored).unwrap(), next);
    let published: Vec<_> = step.events.iter().map(Event::subject).collect();
    let audited: Vec<_> = step.audit.iter().map(|audit| audit.action.as_str()).collect();
    let mut line = format!("-> {}", next.state());
    if !published.is_empty() {
        write!(line, " | {}", published.join(", ")).unwrap();
    }
    if !audited.is_empty() {
        write!(line, " | audit {}", audited.join(", ")).unwrap();
    }
    line
}
