use super::*;
use crate::cluster::ClusterState;
use chrono::Utc;
use domain::policy::{PolicyKey, ValueBounds};
use ed25519_dalek::SigningKey;
use edge::trust::current_keys::{Keys, MemberKeys, NodeAuthorities, ServiceKeys, TaskKeys};
use edge::trust::node_ca::NodeCa;
use edge::trust::node_certificate::TrustDomain;
use persistence::membership::{Member, MemberHeartbeat};
use serde_json::json;

const PAYLOAD: &[u8] = b"{\"command\":\"release\"}";

fn keys(seed: u8) -> CurrentKeys {
    let (signer, now) = (|byte| SigningKey::from_bytes(&[byte; 32]), Utc::now());
    let domain = TrustDomain::parse("gpuaas").unwrap();
    let ca = NodeCa::create(domain, now, now + TimeDelta::days(1)).unwrap().ca;
    CurrentKeys::new(Keys {
        task: TaskKeys::with_first_key(signer(1), now).unwrap(),
        node: NodeAuthorities::with_first_key(ca, now).unwrap(),
        service: ServiceKeys::with_first_key(signer(2), now),
        member: MemberKeys::with_first_key(signer(seed), now),
    })
}

fn member(id: u128, details: serde_json::Value) -> Member {
    Member { id: MemberId(Uuid::from_u128(id)), name: id.to_string(), started_at: Utc::now(), details }
}

/// A member of a cluster whose keys are made of `seed`, at the shared time `at` (in seconds).
fn at_time(id: u128, seed: u8, at: i64) -> MemberAuthenticator {
    let view = ClusterView::new(member(id, json!({ "authenticates": true })));
    view.clock.measure(Instant::now(), Timestamp::from_timestamp(1_800_000_000 + at, 0).unwrap());
    MemberAuthenticator::register(&Registry::new(), Arc::new(view), keys(seed)).unwrap()
}

fn one(id: u128, seed: u8) -> MemberAuthenticator {
    at_time(id, seed, 0)
}

fn id(id: u128) -> Option<MemberId> {
    Some(MemberId(Uuid::from_u128(id)))
}

const fn request() -> MacInput<'static> {
    MacInput {
        purpose: MessagePurpose::Request,
        subject: "gpuaas.shard.7",
        reply: Some("_INBOX.a.1"),
        payload: PAYLOAD,
    }
}

#[test]
fn stamped_message_is_accepted_once_and_names_its_sender() {
    let (sender, receiver) = (one(1, 3), one(2, 3));
    let (header, tag) = sender.stamp(&request(), id(2)).unwrap();
    let Ok(MessageOrigin::Stamped(stamp)) = receiver.check(&request(), Some(&header)) else { panic!("{header}") };
    assert_eq!((Some(stamp.sender), stamp.recipient, stamp.tag), (id(1), id(2), tag));
    assert_eq!(receiver.check(&request(), Some(&header)), Err(MessageRefusal::Repeated));
    let (again, _) = sender.stamp(&request(), id(2)).unwrap();
    assert!(receiver.check(&request(), Some(&again)).is_ok(), "another message with the same bytes");
}

#[test]
fn message_with_any_change_is_refused_as_forged() {
    let (sender, receiver) = (one(1, 3), one(2, 3));
    let (header, _) = sender.stamp(&request(), id(2)).unwrap();
    for changed in [
        MacInput { payload: b"{\"command\":\"remove\"}", ..request() },
        MacInput { subject: "gpuaas.shard.8", ..request() },
        MacInput { reply: Some("_INBOX.stranger.1"), ..request() },
        MacInput { reply: None, ..request() },
        MacInput { purpose: MessagePurpose::Notice, ..request() },
        MacInput { purpose: MessagePurpose::Answer { to: [0; 32] }, ..request() },
    ] {
        assert_eq!(receiver.check(&changed, Some(&header)), Err(MessageRefusal::Forged), "{changed:?}");
    }
    // Each part of the stamp itself.
    let parts: Vec<&str> = header.split(';').collect();
    let stranger = Uuid::from_u128(9).simple().to_string();
    let flipped = parts[6].chars().map(|digit| if digit == '0' { '1' } else { '0' }).collect::<String>();
    for (part, value) in [(2, stranger.as_str()), (3, "*"), (4, "99"), (5, "1"), (6, flipped.as_str())] {
        let mut other = parts.clone();
        other[part] = value;
        assert_eq!(receiver.check(&request(), Some(&other.join(";"))), Err(MessageRefusal::Forged), "{part}");
    }
    assert!(receiver.check(&request(), Some(&header)).is_ok());
}

#[test]
fn message_of_another_cluster_to_another_process_or_without_a_readable_stamp_is_refused() {
    let receiver = one(2, 3);
    let (of_strangers, _) = one(1, 4).stamp(&request(), id(2)).unwrap();
    assert_eq!(receiver.check(&request(), Some(&of_strangers)), Err(MessageRefusal::UnknownKey));
    let (to_another, _) = one(1, 3).stamp(&request(), id(5)).unwrap();
    assert_eq!(receiver.check(&request(), Some(&to_another)), Err(MessageRefusal::ForAnother));
    let (good, _) = one(1, 3).stamp(&request(), id(2)).unwrap();
    for unreadable in
        ["", "v1", "v2;a;b", &good.replace("v1;", "v2;"), &format!("{good};more"), &good[..good.len() - 2]]
    {
        assert_eq!(receiver.check(&request(), Some(unreadable)), Err(MessageRefusal::Unreadable), "{unreadable}");
    }
    assert_eq!(receiver.check(&request(), None), Err(MessageRefusal::Unstamped));
}

#[test]
fn answer_to_one_request_is_refused_for_another() {
    let (sender, owner) = (one(1, 3), one(2, 3));
    let (_, first) = sender.stamp(&request(), id(2)).unwrap();
    let (_, second) = sender.stamp(&request(), id(2)).unwrap();
    let answer =
        |to| MacInput { purpose: MessagePurpose::Answer { to }, subject: "_INBOX.a.1", reply: None, payload: b"done" };
    let (header, _) = owner.stamp(&answer(first), id(1)).unwrap();
    assert_eq!(sender.check(&answer(second), Some(&header)), Err(MessageRefusal::Forged));
    assert!(sender.check(&answer(first), Some(&header)).is_ok());
}

#[test]
fn broadcast_is_stale_after_30_seconds_and_an_event_after_23_hours() {
    let notice =
        MacInput { purpose: MessagePurpose::Notice, subject: "gpuaas.node.wake", reply: None, payload: b"node" };
    let event = MacInput { purpose: MessagePurpose::Event, subject: "node.trust_changed", ..notice };
    let sender = one(1, 3);
    let stamped = |message: &MacInput<'_>| sender.stamp(message, None).unwrap().0;
    let late = |message: &MacInput<'_>, at| at_time(2, 3, at).check(message, Some(&stamped(message)));
    assert!(late(&notice, 29).is_ok());
    assert_eq!(late(&notice, 32), Err(MessageRefusal::Stale));
    assert!(late(&event, 22 * 3600).is_ok());
    assert_eq!(late(&event, 24 * 3600), Err(MessageRefusal::Stale));
    let (header, receiver) = (stamped(&event), one(2, 3));
    assert!(receiver.check(&event, Some(&header)).is_ok() && receiver.check(&event, Some(&header)).is_ok());
}

#[test]
fn message_before_the_shared_time_is_known_is_undated_and_a_replay_of_it_is_repeated() {
    let starting = || {
        let view = Arc::new(ClusterView::new(member(1, json!({ "authenticates": true }))));
        MemberAuthenticator::register(&Registry::new(), view, keys(3)).unwrap()
    };
    let notice =
        MacInput { purpose: MessagePurpose::Notice, subject: "gpuaas.node.wake", reply: None, payload: b"node" };
    let event = MacInput { purpose: MessagePurpose::Event, subject: "node.trust_changed", ..notice };
    let receiver = one(2, 3);
    let (of_starting, _) = starting().stamp(&event, None).unwrap();
    assert_eq!(receiver.check(&event, Some(&of_starting)), Err(MessageRefusal::Undated));
    let (to_starting, _) = receiver.stamp(&event, None).unwrap();
    assert_eq!(starting().check(&event, Some(&to_starting)), Err(MessageRefusal::Undated));
    assert_eq!(receiver.undated.get(), 1);
    let refused = |reason| receiver.refused.with_label_values(&[reason]).get();
    assert_eq!((refused("stale"), refused("repeated")), (0, 0), "a restart looks like no attack");

    let (of_starting, _) = starting().stamp(&notice, None).unwrap();
    assert_eq!(receiver.check(&notice, Some(&of_starting)), Err(MessageRefusal::Undated));
    assert_eq!(receiver.check(&notice, Some(&of_starting)), Err(MessageRefusal::Repeated));
    assert_eq!(refused("repeated"), 1);
}

#[test]
fn unstamped_message_is_accepted_only_while_a_member_of_an_earlier_release_lives() {
    let receiver = one(2, 3);
    let live = |others: Vec<Member>| {
        let heartbeat = |member| MemberHeartbeat {
            member,
            heartbeat_at: domain::Timestamp::UNIX_EPOCH,
            silent_for: Duration::ZERO,
        };
        let living = others.into_iter().map(heartbeat).collect();
        receiver.view.change_state(|state| *state = ClusterState { living, ..ClusterState::default() });
        receiver.check(&request(), None)
    };
    let of_this_release = || member(3, json!({ "authenticates": true }));
    assert_eq!(live(vec![of_this_release()]), Err(MessageRefusal::Unstamped));
    assert_eq!(
        live(vec![of_this_release(), member(4, json!({ "roles": ["api"] }))]),
        Ok(MessageOrigin::OfEarlierRelease)
    );
    assert_eq!(live(vec![of_this_release()]), Err(MessageRefusal::Unstamped), "the upgrade is over");
    // A stamp that is there is checked in any case.
    let (header, _) = one(1, 4).stamp(&request(), id(2)).unwrap();
    live(vec![member(4, json!({}))]).unwrap();
    assert_eq!(receiver.check(&request(), Some(&header)), Err(MessageRefusal::UnknownKey));
}

#[test]
fn time_in_transit_is_counted_by_the_shared_time() {
    let (header, _) = one(1, 3).stamp(&request(), id(2)).unwrap();
    let receiver = at_time(2, 3, 5);
    let origin = receiver.check(&request(), Some(&header)).unwrap();
    let passed = receiver.in_transit(&origin);
    assert!(passed > Duration::from_secs(4) && passed < Duration::from_secs(60), "{passed:?}");
    let ahead = at_time(2, 3, -5);
    let origin = ahead.check(&request(), Some(&header)).unwrap();
    assert_eq!(ahead.in_transit(&origin), Duration::ZERO);
}

#[test]
fn command_ids_are_stored_for_longer_than_events_are_accepted_whatever_the_policy() {
    let ValueBounds::Int { min, .. } = PolicyKey::RetentionCommandIds.bounds() else { panic!("hours are a number") };
    assert!(TimeDelta::hours(min) > MAX_EVENT_AGE, "{min} hours");
}
