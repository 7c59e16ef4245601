//! SSH keys of an allocation.

use super::*;

#[test]
fn chosen_keys_override_the_default_and_deleted_keys_are_dropped() {
    let story = allocation().active();
    let step = story.ask(&ann(), choose(&[1, 2])).unwrap();
    assert_eq!(step.audit[0].metadata["result"], "ok");
    let chosen = story.by(&ann(), choose(&[1, 2])).publishes(&["provisioning.logins_changed"]);
    // An allocation that follows the default needs no change.
    let other = chosen.after_fact(adopt(&[3], 1)).publishes(&["provisioning.logins_stale"]);
    let ids = other.allocation.ssh_access().chosen;
    let gone = Fact::LoginsResolved { chosen: ids, keys: vec![key(2)], logins_revision: 1 };
    let gone = other.after_fact(gone).publishes(&["provisioning.logins_changed"]);
    assert_eq!((gone.allocation.ssh_access().keys, gone.allocation.ssh_access().revision), (vec![key(2)], 2));
    // The same choice changes nothing.
    let same =
        Request::ChooseLogins { chosen: gone.allocation.ssh_access().chosen, keys: vec![key(2)], logins_revision: 1 };
    assert!(gone.ask(&ann(), same).is_err(), "a key that is not there is not chosen");
}

#[test]
fn keys_over_the_bound_are_refused_and_those_within_it_fit_the_snapshot() {
    let keys = |numbers: std::ops::RangeInclusive<u128>| numbers.map(long_key).collect::<Vec<_>>();
    let asked = |keys| AllocationRequest { ssh_keys: keys, follows_default: false, ..request() };
    let choose = |keys: Vec<AuthorizedKey>| Request::ChooseLogins {
        chosen: Some(keys.iter().map(|key| key.id).collect()),
        keys,
        logins_revision: 0,
    };
    let refused = Some(Rejection::KeysTooLong { max: crate::ssh_key::MAX_LOGIN_BYTES });
    let (policy, by) = (PolicyBook::default(), ann());
    let create = Request::Create(Box::new(asked(keys(1..=9))));
    assert_eq!(Allocation::decide(None, create.into(), &ctx(start(), &policy, &by)).err(), refused);
    let story = asked_for(asked(keys(1..=8)));
    assert_eq!(story.ask(&ann(), choose(keys(1..=9))).err(), refused);
    let most = story.by(&ann(), choose(keys(11..=18))).allocation;
    let size = serde_json::to_string(&most).unwrap().len();
    assert!(size < Allocation::SNAPSHOT_MOST / 2, "{size}");
}

#[test]
fn foreign_key_is_rejected_and_audited_once_a_minute() {
    let story = allocation().active();
    let wrong = Request::ChooseLogins { chosen: Some(vec![key(7).id]), keys: Vec::new(), logins_revision: 0 };
    let wrong = Command::from(wrong);
    let rejection = story.ask(&ann(), wrong.clone()).unwrap_err();
    assert_eq!(rejection, Rejection::KeyUnknown { id: key(7).id });
    let by = ann();
    let refused = story.allocation.audit_refusal(&wrong, &rejection, &ctx(story.now, &story.policy, &by)).unwrap();
    assert_eq!(
        (refused.audit.action.as_str(), &refused.audit.metadata["result"]),
        ("ssh_keys.choose", &"refused".into())
    );
    assert!(refused.next.audit_refusal(&wrong, &rejection, &ctx(story.now, &story.policy, &by)).is_none());
}

#[test]
fn active_allocation_resends_its_keys_until_they_are_written() {
    let notified = allocation().active().after_fact(adopt(&[1], 1));
    let repeated = notified.at_its_timer().after_fact(Command::TICK).publishes(&["provisioning.logins_changed"]);
    let written = repeated.after_fact(Fact::LoginsWritten { node_id: NODE, revision: 1 });
    assert!(!written.allocation.ssh_access().are_pending());
    assert_eq!(written.allocation.timer(), None);
    written.after_fact(Fact::LoginsWritten { node_id: ELSEWHERE, revision: 1 }).unmoved();
}

#[test]
fn allocation_of_the_previous_release_keeps_its_requested_keys() {
    let mut stored = serde_json::to_value(allocation().active().allocation).unwrap();
    let asked = stored["asked"].as_object_mut().unwrap();
    asked.remove("follows_default");
    asked.remove("logins_revision");
    asked.insert("ssh_keys".into(), serde_json::to_value([key(1)]).unwrap());
    let read: Allocation = serde_json::from_value(stored).unwrap();
    let logins = read.ssh_access();
    assert_eq!((logins.chosen, logins.keys, logins.revision), (Some(vec![key(1).id]), vec![key(1)], 0));
}
