#![allow(clippy::unwrap_used)]

use super::*;
use crate::cluster::Seen;
use chrono::Utc;
use ed25519_dalek::SigningKey;
use edge::identity::TrustDomain;
use edge::keys::{Keys, MemberKeys, NodeAuthorities, ServiceKeys, TaskKeys};
use edge::node_ca::NodeCa;
use persistence::cluster::{Heard, Member};
use serde_json::json;

const PAYLOAD: &[u8] = b"{\"command\":\"release\"}";

fn keys(seed: u8) -> KeysInForce {
    let (signer, now) = (|byte| SigningKey::from_bytes(&[byte; 32]), Utc::now());
    let domain = TrustDomain::parse("gpuaas").unwrap();
    let ca = NodeCa::create(domain, now, now + TimeDelta::days(1)).unwrap().ca;
    KeysInForce::new(Keys {
        task: TaskKeys::founded(signer(1), now).unwrap(),
        node: NodeAuthorities::founded(ca, now).unwrap(),
        service: ServiceKeys::founded(signer(2), now),
        member: MemberKeys::founded(signer(seed), now),
    })
}

fn member(id: u128, details: serde_json::Value) -> Member {
    Member { id: MemberId(Uuid::from_u128(id)), name: id.to_string(), started_at: Utc::now(), details }
}

/// A member of a cluster whose keys are made of `seed`, at the shared time `at` (in seconds).
fn at_time(id: u128, seed: u8, at: i64) -> MemberAuthenticator {
    let view = View::new(member(id, json!({ "authenticates": true })));
    view.clock.measure(Instant::now(), Timestamp::from_timestamp(1_800_000_000 + at, 0).unwrap());
    MemberAuthenticator::register(&Registry::new(), Arc::new(view), keys(seed)).unwrap()
}

fn one(id: u128, seed: u8) -> MemberAuthenticator {
    at_time(id, seed, 0)
}

fn id(id: u128) -> Option<MemberId> {
    Some(MemberId(Uuid::from_u128(id)))
}

const fn request() -> Message<'static> {
    Message { purpose: Purpose::Request, subject: "gpuaas.shard.7", reply: Some("_INBOX.a.1"), payload: PAYLOAD }
}

#[test]
fn stamped_message_is_believed_once_and_says_who_sent_it() {
    let (sender, receiver) = (one(1, 3), one(2, 3));
    let (header, tag) = sender.stamp(&request(), id(2)).unwrap();
    let Ok(Believed::Stamped(stamp)) = receiver.check(&request(), Some(&header)) else { panic!("{header}") };
    assert_eq!((Some(stamp.sender), stamp.recipient, stamp.tag), (id(1), id(2), tag));
    assert_eq!(receiver.check(&request(), Some(&header)), Err(Refusal::Repeated));
    let (again, _) = sender.stamp(&request(), id(2)).unwrap();
    assert!(receiver.check(&request(), Some(&again)).is_ok(), "another message with the same bytes");
}

#[test]
fn message_with_anything_changed_is_forged() {
    let (sender, receiver) = (one(1, 3), one(2, 3));
    let (header, _) = sender.stamp(&request(), id(2)).unwrap();
    for changed in [
        Message { payload: b"{\"command\":\"remove\"}", ..request() },
        Message { subject: "gpuaas.shard.8", ..request() },
        Message { reply: Some("_INBOX.stranger.1"), ..request() },
        Message { reply: None, ..request() },
        Message { purpose: Purpose::Notice, ..request() },
        Message { purpose: Purpose::Answer { to: [0; 32] }, ..request() },
    ] {
        assert_eq!(receiver.check(&changed, Some(&header)), Err(Refusal::Forged), "{changed:?}");
    }
    // Each part of the stamp itself.
    let parts: Vec<&str> = header.split(';').collect();
    let stranger = Uuid::from_u128(9).simple().to_string();
    let flipped = parts[6].chars().map(|digit| if digit == '0' { '1' } else { '0' }).collect::<String>();
    for (part, value) in [(2, stranger.as_str()), (3, "*"), (4, "99"), (5, "1"), (6, flipped.as_str())] {
        let mut other = parts.clone();
        other[part] = value;
        assert_eq!(receiver.check(&request(), Some(&other.join(";"))), Err(Refusal::Forged), "{part}");
    }
    assert!(receiver.check(&request(), Some(&header)).is_ok());
}

#[test]
fn message_of_another_cluster_to_another_process_or_without_a_readable_stamp_is_refused() {
    let receiver = one(2, 3);
    let (of_strangers, _) = one(1, 4).stamp(&request(), id(2)).unwrap();
    assert_eq!(receiver.check(&request(), Some(&of_strangers)), Err(Refusal::UnknownKey));
    let (to_another, _) = one(1, 3).stamp(&request(), id(5)).unwrap();
    assert_eq!(receiver.check(&request(), Some(&to_another)), Err(Refusal::ForAnother));
    let (good, _) = one(1, 3).stamp(&request(), id(2)).unwrap();
    for unreadable in
        ["", "v1", "v2;a;b", &good.replace("v1;", "v2;"), &format!("{good};more"), &good[..good.len() - 2]]
    {
        assert_eq!(receiver.check(&request(), Some(unreadable)), Err(Refusal::Unreadable), "{unreadable}");
    }
    assert_eq!(receiver.check(&request(), None), Err(Refusal::Unstamped));
}

#[test]
fn answer_to_one_request_is_none_to_another() {
    let (asker, owner) = (one(1, 3), one(2, 3));
    let (_, first) = asker.stamp(&request(), id(2)).unwrap();
    let (_, second) = asker.stamp(&request(), id(2)).unwrap();
    let answer = |to| Message { purpose: Purpose::Answer { to }, subject: "_INBOX.a.1", reply: None, payload: b"done" };
    let (header, _) = owner.stamp(&answer(first), id(1)).unwrap();
    assert_eq!(asker.check(&answer(second), Some(&header)), Err(Refusal::Forged));
    assert!(asker.check(&answer(first), Some(&header)).is_ok());
}

#[test]
fn notice_is_stale_after_a_while_and_an_event_after_a_day() {
    let notice = Message { purpose: Purpose::Notice, subject: "gpuaas.node.wake", reply: None, payload: b"node" };
    let event = Message { purpose: Purpose::Event, subject: "node.trust_changed", ..notice };
    let sender = one(1, 3);
    let stamped = |message: &Message<'_>| sender.stamp(message, None).unwrap().0;
    let late = |message: &Message<'_>, at| at_time(2, 3, at).check(message, Some(&stamped(message)));
    assert!(late(&notice, 29).is_ok());
    assert_eq!(late(&notice, 32), Err(Refusal::Stale));
    assert!(late(&event, 22 * 3600).is_ok());
    assert_eq!(late(&event, 24 * 3600), Err(Refusal::Stale));
    let (header, receiver) = (stamped(&event), one(2, 3));
    assert!(receiver.check(&event, Some(&header)).is_ok() && receiver.check(&event, Some(&header)).is_ok());
}

#[test]
fn unstamped_message_is_believed_only_while_a_member_of_an_earlier_release_lives() {
    let receiver = one(2, 3);
    let live = |others: Vec<Member>| {
        let heard = |member| Heard { member, beat_at: domain::Timestamp::UNIX_EPOCH, silent_for: Duration::ZERO };
        let living = others.into_iter().map(heard).collect();
        receiver.view.note(|seen| *seen = Seen { living, ..Seen::default() });
        receiver.check(&request(), None)
    };
    let of_this_release = || member(3, json!({ "authenticates": true }));
    assert_eq!(live(vec![of_this_release()]), Err(Refusal::Unstamped));
    assert_eq!(live(vec![of_this_release(), member(4, json!({ "roles": ["api"] }))]), Ok(Believed::OfEarlierRelease));
    assert_eq!(live(vec![of_this_release()]), Err(Refusal::Unstamped), "the upgrade is over");
    // A stamp that is there is checked in any case.
    let (header, _) = one(1, 4).stamp(&request(), id(2)).unwrap();
    live(vec![member(4, json!({}))]).unwrap();
    assert_eq!(receiver.check(&request(), Some(&header)), Err(Refusal::UnknownKey));
}

#[test]
fn time_in_transit_is_counted_by_the_shared_time() {
    let (header, _) = one(1, 3).stamp(&request(), id(2)).unwrap();
    let receiver = at_time(2, 3, 5);
    let believed = receiver.check(&request(), Some(&header)).unwrap();
    let passed = receiver.in_transit(&believed);
    assert!(passed > Duration::from_secs(4) && passed < Duration::from_secs(15), "{passed:?}");
    let ahead = at_time(2, 3, -5);
    let believed = ahead.check(&request(), Some(&header)).unwrap();
    assert_eq!(ahead.in_transit(&believed), Duration::ZERO);
}
