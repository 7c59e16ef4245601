use super::*;
use crate::authz::{CallerIdentity, TokenRole};
use crate::invariants::i4_terminal_token_admits_one_connection;
use crate::policy::PolicyBook;
use crate::state_machine::Command as _;
use chrono::TimeDelta;
use proptest::prelude::*;
use std::collections::BTreeMap;
use uuid::Uuid;

const SESSION: Uuid = Uuid::from_u128(1);
const ALLOCATION: AllocationId = AllocationId(Uuid::from_u128(2));
const NODE: NodeId = NodeId(Uuid::from_u128(3));
const GATEWAY: MemberId = MemberId(Uuid::from_u128(4));
const REVOKE: Instruction = Instruction::Revoke { allocation_id: None };
const CUT_OFF: Instruction = Instruction::CutOff { node_id: None };
const ACTIVE: Precondition = Precondition { entity: Uuid::from_u128(2), version: 4 };

fn user(name: &str) -> Principal {
    Principal::Caller(CallerIdentity::new(name, [TokenRole::User]))
}

fn gateway() -> Principal {
    Principal::system("terminal-gateway")
}

fn token(n: u8) -> TokenDigest {
    TokenDigest([n; 32])
}

/// A session, and the time of its world.
struct Story {
    session: Option<TerminalSession>,
    now: Timestamp,
    policy: PolicyBook,
}

impl Story {
    fn new() -> Self {
        Self { session: None, now: Timestamp::from_timestamp(1_800_000_000, 0).unwrap(), policy: PolicyBook::default() }
    }

    fn opened() -> Self {
        let mut story = Self::new();
        story.ask(&user("u"), open(token(1))).unwrap();
        story
    }

    fn ask(&mut self, by: &Principal, command: impl Into<Command>) -> Result<Transition<TerminalSession>, Rejection> {
        let ctx = TransitionContext {
            seed: 7,
            id: SESSION,
            version: i64::from(self.session.is_some()),
            ..TransitionContext::in_test(self.now, &self.policy, by)
        };
        let step = TerminalSession::decide(self.session.as_ref(), command.into(), &ctx)?;
        if let Some(next) = &step.next {
            self.session = Some(next.clone());
        }
        Ok(step)
    }

    fn attach(&mut self, shown: TokenDigest) -> Result<Transition<TerminalSession>, Rejection> {
        self.ask(&gateway(), Instruction::Attach { token_sha256: shown, active: ACTIVE, gateway: Some(GATEWAY) })
    }

    fn pass(&mut self, seconds: i64) {
        self.now += TimeDelta::seconds(seconds);
    }

    fn state(&self) -> &'static str {
        self.session.as_ref().map_or("none", Machine::state)
    }

    fn reason(&self) -> Option<&CloseReason> {
        self.session.as_ref().and_then(TerminalSession::closed)
    }
}

fn open(token_sha256: TokenDigest) -> Request {
    Request::Open { allocation_id: ALLOCATION, node_id: NODE, token_sha256, active: ACTIVE }
}

fn issue(token_sha256: TokenDigest) -> Request {
    Request::IssueToken { token_sha256, active: ACTIVE }
}

fn refused(cause: TerminalTokenFault) -> Rejection {
    Rejection::TokenRefused { cause }
}

#[test]
fn session_is_opened_attached_detached_reattached_and_ended() {
    let mut story = Story::new();
    let opened = story.ask(&user("u"), open(token(1))).unwrap();
    assert_eq!(opened.events.len(), 1);
    assert_eq!(opened.requires, [ACTIVE], "an allocation that is no longer active opens nothing");
    assert_eq!(story.state(), "opened");
    let attached = story.attach(token(1)).unwrap();
    assert!(matches!(attached.reply, Reply::Attached { attachment: 1, .. }));
    assert_eq!(attached.audit[0].action, AuditAction::TerminalsAttach);
    story.ask(&gateway(), Instruction::Detach { attachment: 1 }).unwrap();
    assert_eq!(story.state(), "detached");
    story.ask(&user("u"), issue(token(2))).unwrap();
    story.attach(token(2)).unwrap();
    // The first connection's end arrives late and does not affect the second.
    story.ask(&gateway(), Instruction::Detach { attachment: 1 }).unwrap();
    assert_eq!(story.state(), "attached");
    let ended = story.ask(&Principal::Node(NODE), Request::End { exit: ShellExit::Code(3) }).unwrap();
    assert_eq!(ended.effects, [Effect::WakeTerminal(TerminalSessionId(SESSION))]);
    assert_eq!(story.reason(), Some(&CloseReason::Exited { exit: ShellExit::Code(3) }));
}

#[test]
fn terminal_token_admits_once_in_time_and_until_the_next_token() {
    let mut story = Story::opened();
    assert_eq!(story.attach(token(9)).unwrap_err(), refused(TerminalTokenFault::Mismatch));
    story.attach(token(1)).unwrap();
    assert_eq!(story.attach(token(1)).unwrap_err(), refused(TerminalTokenFault::Spent));
    story.ask(&user("u"), issue(token(2))).unwrap();
    story.ask(&user("u"), issue(token(3))).unwrap();
    assert_eq!(story.attach(token(2)).unwrap_err(), refused(TerminalTokenFault::Mismatch), "a later one voids it");
    story.pass(60);
    assert_eq!(story.attach(token(3)).unwrap_err(), refused(TerminalTokenFault::Expired));
}

#[test]
fn only_the_owner_gets_another_token_and_only_the_node_reports_the_exit() {
    let mut story = Story::opened();
    assert_eq!(story.ask(&user("other"), issue(token(2))).unwrap_err(), Rejection::NotFound);
    let other = Principal::Node(NodeId(Uuid::from_u128(9)));
    assert_eq!(story.ask(&other, Request::End { exit: ShellExit::Code(0) }).unwrap_err(), Rejection::NotFound);
    story.ask(&gateway(), Instruction::Fail { node_id: NodeId(Uuid::from_u128(9)), code: "x".into() }).unwrap();
    assert_eq!(story.state(), "opened");
}

#[test]
fn unattached_or_expired_session_is_closed_at_its_deadline() {
    let mut story = Story::opened();
    story.pass(59);
    story.ask(&gateway(), Command::TICK).unwrap();
    assert_eq!(story.state(), "opened");
    story.pass(1);
    story.ask(&gateway(), Command::TICK).unwrap();
    assert_eq!(story.reason(), Some(&CloseReason::NeverAttached));

    let mut story = Story::opened();
    story.attach(token(1)).unwrap();
    story.pass(14_399);
    story.ask(&user("u"), issue(token(2))).unwrap();
    let ends_at = story.session.as_ref().unwrap().ends_at;
    assert_eq!(story.session.as_ref().unwrap().token.as_ref().unwrap().expires_at, ends_at);
    story.pass(1);
    // Its deadline was not processed yet, and no connection is admitted any more.
    assert_eq!(story.attach(token(2)).unwrap_err(), Rejection::Closed { reason: CloseCode::Lifetime });
    story.ask(&gateway(), Command::TICK).unwrap();
    assert_eq!(story.reason(), Some(&CloseReason::Lifetime));
}

#[test]
fn detached_session_ends_after_the_policys_time_unless_a_connection_comes_back() {
    let mut story = Story::opened();
    story.attach(token(1)).unwrap();
    story.ask(&gateway(), Instruction::Detach { attachment: 1 }).unwrap();
    let deadline = story.session.as_ref().unwrap().deadline().unwrap().at;
    assert_eq!(deadline, story.now + TimeDelta::seconds(900));
    story.pass(890);
    // A token that was issued in time is valid until its expiry.
    story.ask(&user("u"), issue(token(2))).unwrap();
    story.pass(30);
    story.ask(&gateway(), Command::TICK).unwrap();
    story.attach(token(2)).unwrap();
    story.ask(&gateway(), Instruction::Detach { attachment: 2 }).unwrap();
    story.pass(899);
    story.ask(&gateway(), Command::TICK).unwrap();
    assert_eq!(story.state(), "detached");
    story.pass(1);
    assert_eq!(
        story.ask(&user("u"), issue(token(3))).unwrap_err(),
        Rejection::Closed { reason: CloseCode::DetachedExpired }
    );
    story.ask(&gateway(), Command::TICK).unwrap();
    assert_eq!(story.reason(), Some(&CloseReason::DetachedExpired));
}

#[test]
fn connection_of_a_session_names_its_gateway_and_none_in_an_earlier_release() {
    let mut story = Story::opened();
    story.attach(token(1)).unwrap();
    let phase = story.session.as_ref().unwrap().phase.clone();
    assert_eq!(phase, Phase::Attached { since: story.now, gateway: Some(GATEWAY) });
    let stored = serde_json::to_value(&phase).unwrap();
    assert_eq!(stored["gateway"], json!(GATEWAY), "the worker that looks for ended gateways reads it there");
    let terms = |story: &Story| story.session.as_ref().unwrap().terms();
    assert_eq!(terms(&story), [gateway_term(GATEWAY)].into(), "and finds it by this");
    assert_eq!(gateway_of_term(&gateway_term(GATEWAY)), Some(GATEWAY));
    assert_eq!(serde_json::from_value::<Phase>(stored).unwrap(), phase);
    story.ask(&gateway(), Instruction::Detach { attachment: 1 }).unwrap();
    assert_eq!(terms(&story), BTreeSet::new());
    let earlier = json!({ "state": "attached", "since": "2027-01-15T08:00:00Z" });
    let phase: Phase = serde_json::from_value(earlier.clone()).unwrap();
    assert!(matches!(phase, Phase::Attached { gateway: None, .. }));
    assert_eq!(serde_json::to_value(&phase).unwrap(), earlier);
}

#[test]
fn detached_session_of_an_earlier_release_ends_with_its_lifetime() {
    let phase: Phase = serde_json::from_value(json!({ "state": "detached", "since": "2027-01-15T08:00:00Z" })).unwrap();
    let mut story = Story::opened();
    let session = story.session.as_mut().unwrap();
    session.phase = phase;
    assert_eq!(session.deadline().unwrap().at, session.ends_at);
}

#[test]
fn owner_alone_ends_a_session_and_one_without_a_client_makes_room() {
    let mut story = Story::opened();
    for command in [Request::EndByUser, Request::Displace] {
        assert_eq!(story.ask(&user("other"), command).unwrap_err(), Rejection::NotFound);
    }
    story.attach(token(1)).unwrap();
    assert_eq!(story.ask(&user("u"), Request::Displace).unwrap_err(), Rejection::NotDetached);
    story.ask(&gateway(), Instruction::Detach { attachment: 1 }).unwrap();
    story.ask(&user("u"), Request::Displace).unwrap();
    assert_eq!(story.reason(), Some(&CloseReason::Displaced));

    // Its token was never used, and is void.
    let mut story = Story::opened();
    story.ask(&user("u"), Request::Displace).unwrap();
    assert_eq!(story.reason(), Some(&CloseReason::Displaced));
    assert!(story.attach(token(1)).is_err());

    let mut story = Story::opened();
    story.attach(token(1)).unwrap();
    let ended = story.ask(&user("u"), Request::EndByUser).unwrap();
    assert_eq!(ended.effects, [Effect::WakeTerminal(TerminalSessionId(SESSION))]);
    assert!(matches!(ended.reply, Reply::Session { .. }));
    assert_eq!(story.reason(), Some(&CloseReason::EndedByUser));
}

#[test]
fn closed_session_keeps_its_first_reason() {
    let mut story = Story::opened();
    let killed = story.ask(&user("admin"), Request::Kill { reason: "abuse".into() }).unwrap();
    assert_eq!(killed.audit[0].action, AuditAction::TerminalsKill);
    for command in [REVOKE.into(), CUT_OFF.into(), Command::TICK, Instruction::Detach { attachment: 0 }.into()] {
        let step = story.ask(&gateway(), command).unwrap();
        assert!(step.next.is_none() && step.effects.is_empty());
    }
    assert_eq!(story.reason(), Some(&CloseReason::Killed));
    assert_eq!(story.attach(token(1)).unwrap_err(), Rejection::Closed { reason: CloseCode::Killed });
    assert_eq!(story.ask(&user("u"), issue(token(2))).unwrap_err(), Rejection::Closed { reason: CloseCode::Killed });
}

#[test]
fn revocation_that_names_an_allocation_or_node_closes_its_session_alone() {
    let (other_allocation, other_node) = (AllocationId(Uuid::from_u128(0xBAD)), NodeId(Uuid::from_u128(0xBAD)));
    let mut story = Story::opened();
    for others in [
        Instruction::Revoke { allocation_id: Some(other_allocation) },
        Instruction::CutOff { node_id: Some(other_node) },
    ] {
        let step = story.ask(&gateway(), others).unwrap();
        assert!(step.next.is_none() && step.effects.is_empty());
    }
    let session = story.session.clone().unwrap();
    story.ask(&gateway(), Instruction::Revoke { allocation_id: Some(session.allocation_id) }).unwrap();
    assert_eq!(story.reason(), Some(&CloseReason::AllocationEnded));
    let mut story = Story::opened();
    story.ask(&gateway(), Instruction::CutOff { node_id: Some(session.node_id) }).unwrap();
    assert_eq!(story.reason(), Some(&CloseReason::Killed));
}

#[test]
fn revocation_that_names_nothing_is_the_command_of_the_previous_release() {
    for (instruction, command) in [(REVOKE, json!({ "command": "revoke" })), (CUT_OFF, json!({ "command": "cut_off" }))]
    {
        assert_eq!(serde_json::to_value(&instruction).unwrap(), command);
        assert_eq!(serde_json::from_value::<Instruction>(command).unwrap(), instruction);
    }
}

#[test]
fn revoking_node_certificates_closes_its_sessions() {
    let mut story = Story::opened();
    let step = story.ask(&gateway(), CUT_OFF).unwrap();
    assert_eq!(step.audit[0].metadata["cause"], "the certificates of its node were revoked");
    assert_eq!(story.reason(), Some(&CloseReason::Killed));
}

/// The user by the browser session of this number.
fn logged_in(n: u128) -> Principal {
    let Principal::Caller(caller) = user("u") else { unreachable!() };
    Principal::Caller(CallerIdentity { browser_session: Some(BrowserSessionId(Uuid::from_u128(n))), ..caller })
}

/// A session with a connection of the browser session 1, and a token that another login has requested.
fn with_token_of(other: &Principal) -> Story {
    let mut story = Story::new();
    story.ask(&logged_in(1), open(token(1))).unwrap();
    story.attach(token(1)).unwrap();
    story.ask(other, issue(token(2))).unwrap();
    story
}

fn log_out(story: &mut Story, n: u128) -> Transition<TerminalSession> {
    let log_out = Instruction::LogOut { browser_session_id: BrowserSessionId(Uuid::from_u128(n)) };
    story.ask(&gateway(), log_out).unwrap()
}

#[test]
fn terminal_ends_with_the_login_that_connected_it_although_another_requested_a_token() {
    for other in [logged_in(1), logged_in(2), user("u")] {
        let mut story = with_token_of(&other);
        let closed = log_out(&mut story, 1);
        assert_eq!(closed.effects, [Effect::WakeTerminal(TerminalSessionId(SESSION))]);
        assert_eq!(story.reason(), Some(&CloseReason::LoggedOut));
    }
    // One without a connection ends with the login that would connect it.
    let mut story = Story::opened();
    story.ask(&logged_in(2), issue(token(2))).unwrap();
    log_out(&mut story, 2);
    assert_eq!(story.reason(), Some(&CloseReason::LoggedOut));
}

#[test]
fn login_that_only_requested_a_token_takes_the_token_with_it_and_not_the_terminal() {
    let mut story = with_token_of(&logged_in(2));
    assert!(story.session.as_ref().unwrap().is_of_login(BrowserSessionId(Uuid::from_u128(2))));
    log_out(&mut story, 2);
    assert_eq!(story.state(), "attached");
    assert_eq!(story.attach(token(2)).unwrap_err(), refused(TerminalTokenFault::Mismatch));
    assert!(log_out(&mut story, 2).next.is_none(), "it is over");

    // The login that connects last is the one that counts.
    let mut story = with_token_of(&logged_in(2));
    story.attach(token(2)).unwrap();
    assert!(log_out(&mut story, 1).next.is_none(), "its connection was replaced");
    log_out(&mut story, 2);
    assert_eq!(story.reason(), Some(&CloseReason::LoggedOut));
}

#[test]
fn a_hash_never_shows_in_debug_output() {
    let story = Story::opened();
    assert!(!format!("{:?}", story.session).contains("[1, 1"));
}

#[derive(Clone, Debug)]
enum SessionStep {
    Issue,
    Show(u8),
    Detach(u32),
    Pass(i64),
    Tick,
    End,
    Kill,
    Revoke,
}

fn a_move() -> impl Strategy<Value = SessionStep> {
    prop_oneof![
        4 => Just(SessionStep::Issue),
        6 => (0..12_u8).prop_map(SessionStep::Show),
        2 => (0..6_u32).prop_map(SessionStep::Detach),
        2 => prop_oneof![0..70_i64, 3000..9000_i64].prop_map(SessionStep::Pass),
        2 => Just(SessionStep::Tick),
        1 => Just(SessionStep::End),
        1 => Just(SessionStep::Kill),
        1 => Just(SessionStep::Revoke),
    ]
}

proptest! {
    /// Any tokens at any time: an issued token admits once, every session has a deadline, and a closed session admits no connection.
    #[test]
    fn any_sequence_admits_each_token_once_and_every_session_has_a_deadline(moves in prop::collection::vec(a_move(), 0..80)) {
        let mut story = Story::opened();
        // Tokens are random: no two are equal.
        let (mut generation, mut issued) = (1_u8, BTreeMap::from([(1_u8, 0_u32)]));
        for step in moves {
            let was_closed = story.state() == "closed";
            match step {
                SessionStep::Issue => {
                    generation = generation.saturating_add(1);
                    if story.ask(&user("u"), issue(token(generation))).is_ok() {
                        issued.insert(generation, 0);
                    }
                }
                SessionStep::Show(back) => {
                    let shown = generation.saturating_sub(back);
                    if story.attach(token(shown)).is_ok() {
                        prop_assert!(!was_closed);
                        *issued.get_mut(&shown).unwrap() += 1;
                    }
                }
                SessionStep::Detach(attachment) => drop(story.ask(&gateway(), Instruction::Detach { attachment })),
                SessionStep::Pass(seconds) => story.pass(seconds),
                SessionStep::Tick => drop(story.ask(&gateway(), Command::TICK)),
                SessionStep::End => drop(story.ask(&Principal::Node(NODE), Request::End { exit: ShellExit::Signal(9) })),
                SessionStep::Kill => drop(story.ask(&user("a"), Request::Kill { reason: "r".into() })),
                SessionStep::Revoke => drop(story.ask(&gateway(), REVOKE)),
            }
            let session = story.session.as_ref().unwrap();
            prop_assert!(i4_terminal_token_admits_one_connection(session, &issued));
            prop_assert_eq!(session.violations(&[]), []);
            prop_assert!(!was_closed || story.state() == "closed");
            let stored = serde_json::to_string(session).unwrap();
            prop_assert_eq!(&serde_json::from_str::<TerminalSession>(&stored).unwrap(), session);
        }
        story.pass(14_400);
        story.ask(&gateway(), Command::TICK).unwrap();
        prop_assert_eq!(story.state(), "closed");
    }
}

#[test]
fn session_lost_with_its_agent_is_closed_by_its_own_node_only() {
    let mut story = Story::opened();
    story.attach(token(1)).unwrap();
    let stranger = Principal::Node(NodeId(Uuid::from_u128(0xBAD)));
    assert_eq!(story.ask(&stranger, Request::Lose).unwrap_err(), Rejection::NotFound);
    let lost = story.ask(&Principal::Node(NODE), Request::Lose).unwrap();
    assert_eq!(lost.audit[0].metadata["failure_code"], AGENT_RESTARTED);
    assert_eq!(story.reason(), Some(&CloseReason::Failed { code: AGENT_RESTARTED.to_owned() }));
    assert_eq!(story.ask(&user("u"), issue(token(2))).unwrap_err(), Rejection::Closed { reason: CloseCode::Failed });
}

mod recorded {
    use super::*;
    use crate::policy::{PolicyKey, PolicyScope, PolicyValue};
    use crate::recording::RecordingMode;

    fn admin() -> Principal {
        let Principal::Caller(caller) = user("boss") else { unreachable!() };
        Principal::Caller(CallerIdentity { roles: [TokenRole::Admin].into(), ..caller })
    }

    fn actions(step: &Transition<TerminalSession>) -> Vec<AuditAction> {
        step.audit.iter().map(|audit| audit.action).collect()
    }

    fn mode(story: &Story) -> RecordingMode {
        story.session.as_ref().unwrap().recording.mode
    }

    #[test]
    fn session_is_recorded_by_default_and_the_token_reply_says_so() {
        let mut story = Story::new();
        let opened = story.ask(&user("u"), open(token(1))).unwrap();
        let Reply::Issued { recording, .. } = opened.reply else { panic!() };
        assert_eq!((recording.mode, recording.most_bytes), (RecordingMode::BestEffort, 64 << 20));
        assert_eq!(opened.audit[0].metadata["recording"], "best-effort");
    }

    #[test]
    fn policy_change_updates_an_open_session_once_and_is_audited() {
        let mut story = Story::opened();
        assert!(
            story.ask(&gateway(), Instruction::ApplyRecordingPolicy).unwrap().next.is_none(),
            "nothing has changed"
        );
        let begun = story.now;
        story
            .policy
            .set(PolicyKey::TerminalRecordingMode, PolicyScope::Global, begun, PolicyValue::Text("strict".into()))
            .unwrap();
        let changed = story.ask(&gateway(), Instruction::ApplyRecordingPolicy).unwrap();
        assert_eq!(
            (actions(&changed), mode(&story)),
            (vec![AuditAction::TerminalsChangeRecording], RecordingMode::Strict)
        );
        assert_eq!(changed.effects, [Effect::WakeTerminal(TerminalSessionId(SESSION))]);
        story
            .policy
            .set(PolicyKey::TerminalRecordingEnabled, PolicyScope::Global, begun, PolicyValue::Bool(false))
            .unwrap();
        story.ask(&gateway(), Instruction::ApplyRecordingPolicy).unwrap();
        assert_eq!(mode(&story), RecordingMode::Off);
        assert!(story.session.as_ref().unwrap().has_recording(), "what was recorded before stays");
    }

    #[test]
    fn owner_and_administrators_read_the_recording_audited_and_others_find_nothing() {
        let mut story = Story::opened();
        for by in [user("u"), admin(), admin()] {
            let read = story.ask(&by, Request::ReadRecording).unwrap();
            assert_eq!(actions(&read), [AuditAction::TerminalsReadRecording]);
            assert!(read.next.is_some(), "without a state there is no commit, and no row");
        }
        assert_eq!(story.ask(&user("stranger"), Request::ReadRecording).unwrap_err(), Rejection::NotFound);
    }

    #[test]
    fn recording_is_removed_once_and_only_after_the_session() {
        let mut story = Story::opened();
        assert!(story.ask(&gateway(), Maintenance::ForgetRecording).unwrap().next.is_none(), "it still grows");
        story.ask(&gateway(), REVOKE).unwrap();
        let forgotten = story.ask(&gateway(), Maintenance::ForgetRecording).unwrap();
        assert_eq!(actions(&forgotten), [AuditAction::TerminalsForgetRecording]);
        assert!(story.ask(&gateway(), Maintenance::ForgetRecording).unwrap().next.is_none());
        assert_eq!(story.ask(&admin(), Request::ReadRecording).unwrap_err(), Rejection::NotFound);
    }

    #[test]
    fn session_of_the_previous_release_is_read_without_recording() {
        let mut stored = serde_json::to_value(Story::opened().session.unwrap()).unwrap();
        stored.as_object_mut().unwrap().retain(|field, _| !["recording", "tape"].contains(&field.as_str()));
        let session: TerminalSession = serde_json::from_value(stored).unwrap();
        assert!(!session.has_recording() && !session.recording.is_on());
    }
}
