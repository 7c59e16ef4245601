//! Dependents of authorities, and sealed values by key of the key ring.

use crate::test_store::{TestStore, at, create};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::commit::Commit;
use domain::id::{EntityKind, EntityRef};
use persistence::Secrets;
use persistence::envelope_encryption::{KeyRing, SealContext};
use persistence::key_rewrap::{
    KeyRingMismatch, SEALED_FIELDS, body_context, session_tokens_context, webhook_secret_context,
};
use secrecy::{ExposeSecret as _, SecretSlice};
use serde_json::json;
use std::sync::Arc;

/// A ring of the keys `a`, `b` and `c` of these bytes, sealing with the first.
fn ring(keys: &[(&str, u8)]) -> Arc<KeyRing> {
    let line = |(id, byte): &(&str, u8)| format!("key {id} {}\n", STANDARD.encode([*byte; 32]));
    let lines: String = keys.iter().map(line).collect();
    Arc::new(KeyRing::parse(&format!("{lines}active {}\n", keys[0].0)).unwrap())
}

fn node(n: u32, state: &'static str, certificates: &[(&str, Option<&str>, i64, u32)]) -> Commit {
    let base = create(n);
    let certificates: serde_json::Map<_, _> = certificates
        .iter()
        .map(|(serial, authority, ends, generation)| {
            let certificate = json!({ "serial": serial, "not_after": at(*ends), "generation": generation });
            let mut certificate = certificate.as_object().unwrap().clone();
            certificate.extend(authority.map(|id| ("authority".to_owned(), json!(id))));
            ((*serial).to_owned(), json!(certificate))
        })
        .collect();
    let body = json!({
        "registration": { "host": format!("host-{n}"), "metadata": { "name": format!("name-{n}") } },
        "identity": { "generation": 2, "certificates": certificates },
    });
    let entity = EntityRef { kind: EntityKind::Node, ..base.entity };
    Commit { entity, snapshot: body.to_string(), to_state: state, ..base }
}

/// The same node, whose agent has presented this certificate last.
fn with_presented_certificate(commit: Commit, serial: &str) -> Commit {
    let mut body: serde_json::Value = serde_json::from_str(&commit.snapshot).unwrap();
    body["identity"]["shown"] = serial.into();
    Commit { snapshot: body.to_string(), ..commit }
}

#[tokio::test]
async fn certificate_counts_once_its_agent_has_presented_it() {
    let store = TestStore::new().await;
    let (live, over) = (3_600_000, -1);
    let both = [("a", Some("old"), live, 2), ("b", Some("new"), live, 2)];
    for commit in [
        with_presented_certificate(node(1, "active", &both), "a"),
        with_presented_certificate(node(2, "active", &both), "b"),
        // The presented certificate has expired, or is of an earlier identity: the stored ones count.
        with_presented_certificate(
            node(3, "offline", &[("a", Some("old"), over, 2), ("b", Some("new"), live, 2)]),
            "a",
        ),
        with_presented_certificate(node(4, "active", &[("b", Some("old"), live, 2)]), "gone"),
    ] {
        store.commit(&commit).await;
    }
    let of = async |id: &str| {
        let (nodes, count) = store.reads().dependents(id, false, at(0), 9).await.unwrap();
        let name_of = |host: &str| host.replace("host", "name");
        assert!(nodes.iter().all(|node| node.name == Some(name_of(&node.host))), "{nodes:?}");
        let mut hosts: Vec<_> = nodes.into_iter().map(|node| node.host).collect();
        hosts.sort();
        assert_eq!(hosts.len() as u64, count);
        hosts
    };
    assert_eq!(of("old").await, ["host-1", "host-4"]);
    assert_eq!(of("new").await, ["host-2", "host-3"]);
}

#[tokio::test]
async fn node_depends_on_an_authority_without_a_live_certificate_by_another() {
    let store = TestStore::new().await;
    let (live, later, over) = (3_600_000, 7_200_000, -1);
    for commit in [
        node(1, "active", &[("a", Some("old"), live, 2)]),
        node(2, "active", &[("a", Some("old"), live, 2), ("b", Some("new"), live, 2)]),
        node(3, "offline", &[("a", None, later, 2)]),
        node(4, "active", &[("a", Some("old"), over, 2)]),
        node(5, "active", &[("a", Some("old"), live, 1), ("b", Some("new"), live, 2)]),
        node(6, "removed", &[("a", Some("old"), live, 2)]),
        node(7, "registered", &[]),
    ] {
        store.commit(&commit).await;
    }
    let of = async |id: &str, founding: bool, limit: u32| {
        let (nodes, count) = store.reads().dependents(id, founding, at(0), limit).await.unwrap();
        (nodes.into_iter().map(|node| node.host).collect::<Vec<_>>(), count)
    };
    assert_eq!(of("old", true, 9).await, (vec!["host-3".into(), "host-1".into()], 2));
    assert_eq!(of("old", true, 1).await, (vec!["host-3".into()], 2), "all are counted");
    assert_eq!(of("old", false, 9).await, (vec!["host-1".into()], 1));
    assert_eq!(of("new", false, 9).await, (vec!["host-5".into()], 1));
    assert_eq!(of("none", false, 9).await, (vec![], 0));
}

fn allocation(n: u32, ring: &KeyRing) -> Commit {
    let base = create(n);
    let id = base.entity.id.to_string();
    let place = SealContext { table: "entity", column: "scheduler_request_enc", row: &id };
    let sealed = STANDARD.encode(ring.seal(&place, format!("request {n}").as_bytes()).unwrap());
    let entity = EntityRef { kind: EntityKind::Allocation, ..base.entity };
    Commit { entity, snapshot: json!({ "asked": { "scheduler_request_enc": sealed } }).to_string(), ..base }
}

/// A webhook endpoint, with its current and its former secret.
fn webhook(n: u32, ring: &KeyRing) -> Commit {
    let base = create(n);
    let place = base.entity.id.to_string();
    let seal = |secret: &[u8]| STANDARD.encode(ring.seal(&webhook_secret_context(&place), secret).unwrap());
    let body = json!({ "secret_enc": seal(b"present"), "former_secret": { "secret_enc": seal(b"former") } });
    let entity = EntityRef { kind: EntityKind::NotificationEndpoint, ..base.entity };
    Commit { entity, snapshot: body.to_string(), ..base }
}

/// An event of the payment processor.
fn processor_event(n: u32, ring: &KeyRing) -> Commit {
    let base = create(n);
    let place = base.entity.id.to_string();
    let sealed = ring.seal(&body_context(&place), format!("body {n} ").repeat(100).as_bytes()).unwrap();
    let entity = EntityRef { kind: EntityKind::ProcessorEvent, ..base.entity };
    Commit { entity, snapshot: json!({ "body_enc": STANDARD.encode(sealed) }).to_string(), ..base }
}

/// A login to the web console.
fn browser_session(n: u32, ring: &KeyRing) -> Commit {
    let base = create(n);
    let place = base.entity.id.to_string();
    let sealed = ring.seal(&session_tokens_context(&place), b"tokens").unwrap();
    let entity = EntityRef { kind: EntityKind::BrowserSession, ..base.entity };
    Commit { entity, snapshot: json!({ "tokens_enc": STANDARD.encode(sealed) }).to_string(), ..base }
}

#[tokio::test]
async fn sealed_values_of_all_tables_are_found_counted_and_rewrapped() {
    let store = TestStore::new().await;
    let (old, both) = (ring(&[("a", 1)]), ring(&[("bb", 2), ("a", 1)]));
    let secrets = Secrets::new(store.pool().clone(), Arc::clone(&old));
    for name in ["one", "two"] {
        secrets.create(name, &SecretSlice::from(name.as_bytes().to_vec()), json!({})).await.unwrap();
    }
    assert!(secrets.create("one", &SecretSlice::from(vec![1]), json!({})).await.is_err(), "a secret is not replaced");
    let none =
        Commit { snapshot: json!({ "asked": { "scheduler_request_enc": null } }).to_string(), ..allocation(9, &old) };
    for commit in [allocation(1, &old), allocation(2, &both), allocation(3, &old), none] {
        store.commit(&commit).await;
    }
    for commit in [processor_event(4, &old), processor_event(5, &both), webhook(6, &old), browser_session(7, &old)] {
        store.commit(&commit).await;
    }
    let secrets = Secrets::new(store.pool().clone(), Arc::clone(&both));
    let rewrap = secrets.rewrap();
    rewrap.check().await.unwrap();
    assert_eq!(rewrap.sealed().await.unwrap(), [("a".to_owned(), 8), ("bb".to_owned(), 2)].into());
    assert_eq!((rewrap.secrets().await.unwrap(), rewrap.secrets().await.unwrap()), (2, 0));
    assert_eq!(secrets.get("two").await.unwrap().unwrap().value.expose_secret(), b"two");

    let [requests, bodies, present, former, tokens] = SEALED_FIELDS;
    let outdated = rewrap.outdated(requests, None, 9).await.unwrap();
    let of = |n: u32| create(n).entity.id;
    assert_eq!(outdated.iter().map(|it| it.entity.id).collect::<Vec<_>>(), [of(1), of(3)]);
    assert_eq!(rewrap.outdated(requests, Some(of(1)), 9).await.unwrap(), outdated[1..]);
    let rewrapped = STANDARD.decode(rewrap.reseal(requests, &outdated[0]).unwrap()).unwrap();
    let id = outdated[0].entity.id.to_string();
    let place = SealContext { table: "entity", column: "scheduler_request_enc", row: &id };
    assert_eq!(ring(&[("bb", 2)]).open(&place, &rewrapped).unwrap().expose_secret(), b"request 1");
    let outdated = rewrap.outdated(bodies, None, 9).await.unwrap();
    assert_eq!(outdated.iter().map(|it| it.entity.id).collect::<Vec<_>>(), [of(4)]);
    let rewrapped = STANDARD.decode(rewrap.reseal(bodies, &outdated[0]).unwrap()).unwrap();
    let opened = ring(&[("bb", 2)]).open(&body_context(&of(4).to_string()), &rewrapped).unwrap();
    assert_eq!(opened.expose_secret(), "body 4 ".repeat(100).as_bytes());
    for (field, secret) in [(present, b"present".as_slice()), (former, b"former")] {
        let outdated = rewrap.outdated(field, None, 9).await.unwrap();
        assert_eq!(outdated.iter().map(|it| it.entity.id).collect::<Vec<_>>(), [of(6)]);
        let rewrapped = STANDARD.decode(rewrap.reseal(field, &outdated[0]).unwrap()).unwrap();
        let opened = ring(&[("bb", 2)]).open(&webhook_secret_context(&of(6).to_string()), &rewrapped).unwrap();
        assert_eq!(opened.expose_secret(), secret);
    }
    let outdated = rewrap.outdated(tokens, None, 9).await.unwrap();
    assert_eq!(outdated.iter().map(|it| it.entity.id).collect::<Vec<_>>(), [of(7)]);
    let rewrapped = STANDARD.decode(rewrap.reseal(tokens, &outdated[0]).unwrap()).unwrap();
    let opened = ring(&[("bb", 2)]).open(&session_tokens_context(&of(7).to_string()), &rewrapped).unwrap();
    assert_eq!(opened.expose_secret(), b"tokens");
    secrets.destroy("one").await.unwrap();
    secrets.destroy("one").await.unwrap();
    assert!(secrets.get("one").await.unwrap().is_none());
}

#[tokio::test]
async fn key_ring_mismatch_names_the_missing_or_wrong_key() {
    let store = TestStore::new().await;
    let old = ring(&[("a", 1)]);
    let secrets = Secrets::new(store.pool().clone(), Arc::clone(&old));
    secrets.create("one", &SecretSlice::from(vec![1]), json!({})).await.unwrap();
    let check = async |keys: &[(&str, u8)]| Secrets::new(store.pool().clone(), ring(keys)).rewrap().check().await;
    assert!(check(&[("b", 2), ("a", 1)]).await.is_ok());
    assert!(matches!(check(&[("b", 2)]).await, Err(KeyRingMismatch::Missing { id, count: 1 }) if id == "a"));
    assert!(
        matches!(check(&[("a", 2)]).await, Err(KeyRingMismatch::Wrong { id, name }) if (id.as_str(), name.as_str()) == ("a", "one"))
    );
    // The request of an allocation counts, too.
    secrets.destroy("one").await.unwrap();
    store.commit(&allocation(1, &old)).await;
    assert!(matches!(check(&[("b", 2)]).await, Err(KeyRingMismatch::Missing { count: 1, .. })));
}
