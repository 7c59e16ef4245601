use super::*;
use crate::authz::Principal;
use crate::policy::{PolicyBook, ValueBounds};
use chrono::TimeDelta;
use proptest::prelude::*;
use uuid::Uuid;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

fn decide(
    state: Option<&KeySet>,
    command: impl Into<Command>,
    now: Timestamp,
) -> Result<Transition<KeySet>, Rejection> {
    let (policy, by) = (PolicyBook::default(), Principal::system("test"));
    let id = Uuid::from_u128(5);
    KeySet::decide(
        state,
        command.into(),
        &TransitionContext { id, version: 0, ..TransitionContext::in_test(now, &policy, &by) },
    )
}

fn key(id: &str) -> NewKey {
    NewKey { id: id.to_owned(), public: format!("public half of {id}") }
}

fn on(purpose: KeySetPurpose, version: u64) -> ChangeBasis {
    let signatures = vec![KeySetSignature { by: "one".into(), value: "AAAA".into() }];
    ChangeBasis { purpose, version, founding: key("one"), founded_at: at(-60), signatures }
}

fn rotate(change: KeySetChange, purpose: KeySetPurpose, version: u64) -> Request {
    Request::Rotate { change, on: on(purpose, version), reason: "a year has passed".into() }
}

fn stage(id: &str) -> KeySetChange {
    KeySetChange::Stage { key: key(id) }
}

fn activate(id: &str) -> KeySetChange {
    KeySetChange::Activate { id: id.to_owned() }
}

fn retire(id: &str, dependents: u64, force: bool) -> KeySetChange {
    KeySetChange::Retire { id: id.to_owned(), dependents, force }
}

/// Applies the changes, each a minute after the one before.
fn rotated(purpose: KeySetPurpose, changes: &[KeySetChange]) -> KeySet {
    let mut set = None::<KeySet>;
    for (minute, change) in changes.iter().enumerate() {
        let version = set.as_ref().map_or(0, |set| set.version);
        let now = at(60 * i64::try_from(minute).unwrap());
        set = decide(set.as_ref(), rotate(change.clone(), purpose, version), now).unwrap().next;
    }
    set.unwrap()
}

fn phases(set: &KeySet) -> Vec<(&str, Phase)> {
    set.keys.iter().map(|key| (key.id.as_str(), key.state.phase())).collect()
}

#[test]
fn key_passes_every_state_and_each_change_is_published_and_audited() {
    let staged = decide(None, rotate(stage("two"), KeySetPurpose::TaskSigning, 0), at(0)).unwrap();
    assert_eq!(staged.audit[0].action, AuditAction::KeysStage);
    assert_eq!(staged.effects, [Effect::ReadKeys]);
    let staged = staged.next.unwrap();
    assert_eq!(phases(&staged), [("one", Phase::Active), ("two", Phase::Staged)]);
    assert_eq!((staged.version, staged.chain[0].version, staged.state()), (1, 1, "rotating"));
    let active =
        decide(Some(&staged), rotate(activate("two"), KeySetPurpose::TaskSigning, 1), at(60)).unwrap().next.unwrap();
    assert_eq!(phases(&active), [("one", Phase::Grace), ("two", Phase::Active)]);
    let early = decide(Some(&active), rotate(retire("one", 0, false), KeySetPurpose::TaskSigning, 2), at(3659));
    assert_eq!(early.err(), Some(Rejection::InGrace { id: "one".into(), until: at(3660) }));
    let done = decide(Some(&active), rotate(retire("one", 0, false), KeySetPurpose::TaskSigning, 2), at(3660)).unwrap();
    assert_eq!(
        (done.audit[0].action, done.audit[0].metadata["forced"].clone()),
        (AuditAction::KeysRetire, json!(false))
    );
    let done = done.next.unwrap();
    assert_eq!((done.state(), done.listed().len(), done.chain.len()), ("settled", 1, 3));
}

#[test]
fn leaked_key_is_retired_by_force_within_its_grace() {
    let set = rotated(KeySetPurpose::TaskSigning, &[stage("two"), activate("two"), retire("one", 0, true)]);
    assert_eq!(phases(&set), [("one", Phase::Retired), ("two", Phase::Active)]);
}

#[test]
fn a_signer_of_tokens_is_trusted_as_long_as_any_token_may_live() {
    let set = rotated(KeySetPurpose::ServiceTokens, &[stage("two"), activate("two")]);
    assert_eq!(phases(&set), [("one", Phase::Grace), ("two", Phase::Active)]);
    let ValueBounds::Int { max, .. } = policy::PolicyKey::AuthServiceAccountTokenTtl.bounds() else {
        panic!("it is a number")
    };
    let end = 60 + max;
    let retired =
        |force, when| decide(Some(&set), rotate(retire("one", 0, force), KeySetPurpose::ServiceTokens, 2), at(when));
    assert_eq!(retired(false, end - 1).err(), Some(Rejection::InGrace { id: "one".into(), until: at(end) }));
    assert_eq!(phases(&retired(false, end).unwrap().next.unwrap())[0], ("one", Phase::Retired));
    let leaked = retired(true, 61).unwrap();
    assert_eq!((leaked.audit[0].action, &leaked.audit[0].metadata["forced"]), (AuditAction::KeysRetire, &json!(true)));
}

#[test]
fn an_authority_that_a_node_needs_is_retired_by_force_alone_and_the_log_says_how_many_it_cut_off() {
    let set = rotated(KeySetPurpose::NodeCa, &[stage("two"), activate("two")]);
    let refused = decide(Some(&set), rotate(retire("one", 3, false), KeySetPurpose::NodeCa, 2), at(999_999)).err();
    assert_eq!(refused, Some(Rejection::InUse { id: "one".into(), dependents: 3 }));
    let free = decide(Some(&set), rotate(retire("one", 0, false), KeySetPurpose::NodeCa, 2), at(200));
    assert!(free.is_ok(), "an authority waits for its certificates, not for a time");
    let forced = decide(Some(&set), rotate(retire("one", 3, true), KeySetPurpose::NodeCa, 2), at(200)).unwrap();
    assert_eq!((&forced.audit[0].metadata["cut_off"], &forced.audit[0].metadata["forced"]), (&json!(3), &json!(true)));
}

#[test]
fn invalid_key_change_is_rejected_with_its_reason() {
    let set = rotated(KeySetPurpose::TaskSigning, &[stage("two")]);
    let refused =
        |change, version| decide(Some(&set), rotate(change, KeySetPurpose::TaskSigning, version), at(1)).err();
    assert_eq!(refused(stage("three"), 1), Some(Rejection::AlreadyStaged { id: "two".into() }));
    assert_eq!(refused(stage("one"), 1), Some(Rejection::Exists { id: "one".into() }));
    assert_eq!(refused(activate("nine"), 1), Some(Rejection::NotFound { id: "nine".into() }));
    let wrong = Rejection::WrongPhase { id: "one".into(), phase: Phase::Active };
    assert_eq!(refused(activate("one"), 1), Some(wrong));
    assert_eq!(refused(retire("one", 0, true), 1), Some(Rejection::StillActive { id: "one".into() }));
    assert_eq!(refused(activate("two"), 0), Some(Rejection::Moved));
    assert_eq!(decide(Some(&set), Fact::Emptied { id: "one".into() }, at(1)).err(), Some(Rejection::OtherPurpose));
}

#[test]
fn pending_rotation_shows_as_overdue() {
    let set = rotated(KeySetPurpose::TaskSigning, &[stage("two")]);
    let waits = set.deadline().unwrap();
    assert_eq!(waits.at, at(0) + TimeDelta::days(7));
    assert!(waits.reason.contains("task_signing") && waits.reason.contains("two"), "{}", waits.reason);
    let set = rotated(KeySetPurpose::NodeCa, &[stage("two"), activate("two")]);
    assert_eq!(set.deadline().unwrap().at, at(60) + TimeDelta::days(1));
}

#[test]
fn adopted_key_retires_the_others_once_they_are_empty() {
    let adopt = |id: &str, outgoing: &[&str]| Request::Adopt {
        id: id.to_owned(),
        outgoing: outgoing.iter().map(|id| (*id).to_owned()).collect(),
        reason: "a year has passed".into(),
    };
    let set = decide(None, adopt("b", &["a"]), at(0)).unwrap().next.unwrap();
    assert_eq!(phases(&set), [("b", Phase::Active), ("a", Phase::Grace)]);
    assert!(decide(Some(&set), adopt("b", &["a"]), at(1)).unwrap().next.is_none(), "asking twice is asking once");
    let empty = decide(Some(&set), Fact::Emptied { id: "a".into() }, at(2)).unwrap().next.unwrap();
    assert_eq!((phases(&empty), empty.state()), (vec![("b", Phase::Active), ("a", Phase::Retired)], "settled"));
    assert!(decide(Some(&empty), Fact::Emptied { id: "b".into() }, at(3)).unwrap().next.is_none());
    let repeated = decide(Some(&empty), adopt("a", &["b"]), at(4)).unwrap().next.unwrap();
    assert_eq!(phases(&repeated), [("b", Phase::Grace), ("a", Phase::Active)]);
    let rotated = decide(Some(&set), rotate(stage("c"), KeySetPurpose::AtRest, set.version), at(5));
    assert_eq!(rotated.err(), Some(Rejection::OtherPurpose));
}

proptest! {
    #[test]
    fn any_changes_keep_one_active_key_and_every_version_signed_by_the_one_before(
        asked in prop::collection::vec((0_u8..4, 0_usize..12, any::<bool>(), 0_i64..5000), 0..80)
    ) {
        let ids: Vec<String> = (0..12).map(|n| format!("k{n}")).collect();
        let mut set = KeySet::founded(KeySetPurpose::TaskSigning, key("one"), at(0));
        let mut now = at(0);
        for (what, which, force, later) in asked {
            now += TimeDelta::seconds(later);
            let id = ids[which].clone();
            let change = match what {
                0 => KeySetChange::Stage { key: key(&id) },
                1 => KeySetChange::Activate { id },
                _ => KeySetChange::Retire { id: if which == 11 { "one".into() } else { id }, dependents: 0, force },
            };
            let foreseen = set.listed_after(&change);
            let step = decide(Some(&set), rotate(change.clone(), KeySetPurpose::TaskSigning, set.version), now);
            let Ok(step) = step else { continue };
            let next = step.next.unwrap();
            prop_assert_eq!(foreseen.unwrap(), next.listed(), "what was signed is what is published");
            prop_assert_eq!(next.version, set.version + 1);
            prop_assert_eq!(next.listed().iter().filter(|key| key.phase == Phase::Active).count(), 1);
            let link = next.chain.last().unwrap();
            prop_assert_eq!((link.version, &link.keys), (next.version, &next.listed()));
            let trusted_before = set.listed();
            let active = next.listed().into_iter().find(|key| key.phase == Phase::Active).unwrap();
            prop_assert!(trusted_before.iter().any(|key| key.id == active.id), "no key signs that was never trusted");
            prop_assert_eq!((step.audit.len(), step.events.len()), (1, 1));
            prop_assert!(next.chain.len() <= MAX_LINKS);
            prop_assert_eq!(next.state() == "settled", next.deadline().is_none());
            let stored = serde_json::to_string(&next).unwrap();
            prop_assert_eq!(&serde_json::from_str::<KeySet>(&stored).unwrap(), &next);
            set = next;
        }
    }
}

#[test]
fn stored_key_has_the_names_of_earlier_releases() {
    let stored = r#"{"id":"k1","public":"p","standing":{"phase":"active"},"made_at":"2027-01-15T08:00:00Z","entered_at":"2027-01-15T08:00:00Z"}"#;
    let key: KeyEntry = serde_json::from_str(stored).unwrap();
    assert_eq!(serde_json::to_string(&key).unwrap(), stored);
}
