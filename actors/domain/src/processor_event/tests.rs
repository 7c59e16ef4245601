//! An event of the processor's in hostile hands: it comes often, is worked on twice, fails, is given up, and is kept by an operator's word.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::authz::{Caller, PlatformRole, Principal, Role};
use crate::invariant;
use crate::machine::{Command as _, Trace};
use crate::policy::{PolicyBook, Scope, Value};
use std::fmt::Write as _;
use uuid::Uuid;

const ID: Uuid = Uuid::from_u128(9);

fn start() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn receive(digest: &str) -> Command {
    Command::Receive {
        event_id: "evt_1".into(),
        event_type: "payment_intent.succeeded".into(),
        object_id: Some("pi_1".into()),
        occurred_at: Some(start()),
        digest: digest.into(),
        body_enc: "c2VhbGVk".into(),
        nothing_follows: false,
    }
}

fn failed() -> Command {
    Command::Failed { why: "it differs".into() }
}

fn retry() -> Command {
    Command::Retry { reason: "the account is open again".into() }
}

fn dismiss() -> Command {
    Command::Dismiss { reason: "paid back by hand".into() }
}

fn processed() -> Command {
    Command::Processed { outcome: Outcome::Told }
}

fn worker() -> Principal {
    Principal::system("test")
}

fn operator() -> Principal {
    Principal::Caller(Caller {
        user_id: "ann".into(),
        roles: [Role::User].into(),
        org_id: None,
        project_id: None,
        plan: None,
        grant: Some(crate::authz::Grant {
            roles: [PlatformRole::BillingOperations].into(),
            from: crate::commit::Footing { entity: ID, version: 1 },
        }),
        service_account: None,
    })
}

/// One event, and the time.
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
        story.tell(receive("d"));
        story
    }

    /// At most so many attempts.
    fn at_most(mut self, attempts: i64) -> Self {
        let (key, since) = (Key::BillingWebhookMaxAttempts, Timestamp::UNIX_EPOCH);
        self.policy.set(key, Scope::Global, since, Value::Int(attempts)).unwrap();
        self
    }

    fn dead() -> Self {
        let mut story = Self::received().at_most(1);
        story.tell(failed());
        story
    }

    fn ask(&self, command: Command) -> Result<Step<ProcessorEvent>, Rejection> {
        let by = if command.action() == Action::Advance { worker() } else { operator() };
        let ctx = Ctx {
            now: self.now,
            policy: &self.policy,
            by: &by,
            correlation_id: "c",
            trace: Trace::default(),
            seed: 1,
            id: ID,
            version: 0,
        };
        ProcessorEvent::decide(self.event.as_ref(), command, &ctx)
    }

    fn tell(&mut self, command: Command) -> Step<ProcessorEvent> {
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
fn an_event_from_which_nothing_follows_is_processed_as_it_comes_in_and_forgotten_like_any_other() {
    let mut story = Story::new();
    let Command::Receive { event_id, object_id, occurred_at, digest, body_enc, .. } = receive("d") else { panic!() };
    let event_type = "invoice.updated".to_owned();
    let step = story.tell(Command::Receive {
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
    assert!(story.tell(receive("d")).next.is_none(), "sent again it is the same");
    assert_eq!(story.ask(receive("other")).unwrap_err(), Rejection::Differs);
    story.until_the_timer();
    assert!(story.tell(Command::Tick).next.unwrap().body_enc.is_none());
}

#[test]
fn what_comes_a_hundred_times_is_kept_once_and_said_once() {
    let mut story = Story::new();
    let first = story.tell(receive("d"));
    assert_eq!(first.reply, Reply::Kept { is_new: true });
    assert_eq!(first.events, [Event::ProcessorEventDue { processor_event_id: ProcessorEventId(ID) }]);
    for _ in 0..100 {
        let again = story.tell(receive("d"));
        assert_eq!((again.reply, again.next, again.events), (Reply::Kept { is_new: false }, None, Vec::new()));
    }
    assert_eq!(story.ask(receive("another")).unwrap_err(), Rejection::Differs);
    story.tell(processed());
    assert_eq!(story.tell(receive("d")).reply, Reply::Kept { is_new: false });
}

#[test]
fn what_nobody_heeds_is_said_again_and_ever_more_seldom() {
    let mut story = Story::received();
    let mut said = Vec::new();
    for _ in 0..6 {
        story.until_the_timer();
        said.push((story.now - start()).num_seconds());
        assert_eq!(story.tell(Command::Tick).events.len(), 1);
        assert!(story.tell(Command::Tick).next.is_none(), "not twice at once");
    }
    assert_eq!(said, [10, 20, 40, 80, 160, 320]);
    assert_eq!(story.state(), "received");
}

#[test]
fn what_cannot_be_carried_out_is_tried_for_hours_and_then_waits_for_an_operator() {
    let mut story = Story::received();
    let mut attempts = 0;
    while story.state() != "dead" {
        story.tell(failed());
        attempts += 1;
        if story.state() == "retrying" {
            story.until_the_timer();
            assert_eq!(story.tell(Command::Tick).events.len(), 1);
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
fn an_operator_has_a_dead_one_tried_anew_or_dismisses_it_and_both_are_audited() {
    let mut story = Story::dead();
    let mut dismissed = story.clone();
    let step = story.tell(retry());
    assert_eq!((step.events.len(), step.audit[0].action), (1, AuditAction::ProcessorEventsRetry));
    assert_eq!(step.audit[0].metadata["reason"], "the account is open again");
    assert_eq!((story.state(), story.event.as_ref().unwrap().attempts), ("retrying", 0));
    story.tell(processed());
    assert_eq!(story.state(), "processed");

    let step = dismissed.tell(dismiss());
    assert_eq!((step.events.len(), step.audit[0].action), (0, AuditAction::ProcessorEventsDismiss));
    assert_eq!(dismissed.state(), "dismissed");
    // Somebody was still at it, and is through: what was dismissed stays so.
    assert!(dismissed.tell(processed()).next.is_none());
    assert!(dismissed.tell(failed()).next.is_none());
}

#[test]
fn its_body_is_forgotten_when_the_processor_forgets_it_too() {
    for end in [processed(), dismiss()] {
        let mut story = Story::received();
        story.tell(failed());
        story.tell(end);
        let over = story.now;
        story.until_the_timer();
        assert_eq!(story.now - over, BODY_KEPT_FOR);
        story.tell(Command::Tick);
        let event = story.event.clone().unwrap();
        assert_eq!((event.body_enc.as_deref(), event.timer()), (None, None));
        // It is known for ever.
        assert_eq!(story.tell(receive("d")).reply, Reply::Kept { is_new: false });
        assert!(story.tell(Command::Reseal { body_enc: "anew".into() }).next.is_none());
    }
}

#[test]
fn what_is_kept_of_an_error_is_bounded() {
    let mut story = Story::received();
    story.tell(Command::Failed { why: "ü".repeat(10_000) });
    assert_eq!(story.event.unwrap().last_error.unwrap().chars().count(), 500);
}

#[test]
fn every_command_in_every_state_does_what_was_reviewed() {
    let story = |commands: Vec<Command>| {
        let mut story = Story::received();
        commands.into_iter().for_each(|command| drop(story.tell(command)));
        story
    };
    let states = [
        ("nothing", Story::new()),
        ("received", Story::received()),
        ("retrying", story(vec![failed()])),
        ("dead", Story::dead()),
        ("processed", story(vec![processed()])),
        ("dismissed", story(vec![failed(), dismiss()])),
    ];
    let commands = || {
        [
            ("receive", receive("d")),
            ("receive, another under its id", receive("another")),
            ("processed", processed()),
            ("failed", failed()),
            ("retry", retry()),
            ("dismiss", dismiss()),
            ("reseal", Command::Reseal { body_enc: "anew".into() }),
            ("tick before its time", Command::Tick),
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

fn outcome(step: Result<Step<ProcessorEvent>, Rejection>) -> String {
    let step = match step {
        Err(rejection) => return format!("refused: {rejection}"),
        Ok(step) => step,
    };
    let Some(next) = step.next else { return "stays".to_owned() };
    assert!(invariant::i8_what_is_transient_has_an_end(&next, next.is_open()), "{next:?}");
    let kept = serde_json::to_string(&next).unwrap();
    assert_eq!(serde_json::from_str::<ProcessorEvent>(&kept).unwrap(), next);
    let said: Vec<_> = step.events.iter().map(Event::subject).collect();
    let audited: Vec<_> = step.audit.iter().map(|audit| audit.action.as_str()).collect();
    let mut line = format!("-> {}", next.state());
    if !said.is_empty() {
        write!(line, " | {}", said.join(", ")).unwrap();
    }
    if !audited.is_empty() {
        write!(line, " | audit {}", audited.join(", ")).unwrap();
    }
    line
}
