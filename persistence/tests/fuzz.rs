//! Fuzz targets for what is stored sealed, which another writer of the database may alter (`deploy/docs/src/contribute/testing.md`).

#![allow(clippy::unwrap_used)]

use domain::{EntityKind, EntityRef};
use persistence::SnapshotSealer;
use persistence::envelope_encryption::{KeyRing, SealContext};
use secrecy::{ExposeSecret as _, SecretSlice};
use std::panic::AssertUnwindSafe;
use std::time::Duration;
use uuid::Uuid;

/// The time of a target in an ordinary run; `BOLERO_RANDOM_TEST_TIME_MS` sets another.
const BUDGET: Duration = Duration::from_millis(400);

const RING: &str = "key a AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\nkey b AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\nactive a\n";
const CONTEXT: SealContext<'_> = SealContext { table: "secret", column: "value_enc", row: "1" };

/// Another text of the same or another length: bytes are changed, added or cut off. `None` where nothing changed.
fn altered(sealed: &[u8], change: &[u8]) -> Option<Vec<u8>> {
    let [kind, high, low, byte, ..] = change else { return None };
    let at = usize::from(u16::from_be_bytes([*high, *low])) % sealed.len();
    let mut altered = sealed.to_vec();
    match kind % 4 {
        0 => altered[at] ^= (*byte).max(1),
        1 => altered.truncate(at),
        2 => altered.insert(at, *byte),
        _ => altered.push(*byte),
    }
    (altered != sealed).then_some(altered)
}

#[test]
fn fuzz_sealed_value_opens_as_it_was_and_any_other_bytes_do_not() {
    let ring = KeyRing::parse(RING).unwrap();
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let (change, plain) = input.split_at(input.len().min(4));
        let sealed = ring.seal(&CONTEXT, plain).unwrap();
        assert_eq!(ring.open(&CONTEXT, &sealed).unwrap().expose_secret(), plain);
        if let Some(altered) = altered(&sealed, change) {
            assert!(ring.open(&CONTEXT, &altered).is_err(), "{change:?}");
        }
        let row = format!("1{}", change.len());
        assert!(ring.open(&SealContext { row: &row, ..CONTEXT }, &sealed).is_err(), "in another place");
        assert!(ring.open(&CONTEXT, input).is_err(), "what no ring has sealed");

        let (key, key_enc) = ring.make_data_key(&CONTEXT).unwrap();
        let part = key.seal(&CONTEXT, plain).unwrap();
        let repeated = ring.open_data_key(&CONTEXT, &key_enc).unwrap();
        assert_eq!(repeated.open(&CONTEXT, &part).unwrap().expose_secret(), plain);
        if let Some(altered) = altered(&part, change) {
            assert!(repeated.open(&CONTEXT, &altered).is_err(), "{change:?}");
        }
    });
}

#[test]
fn fuzz_key_ring_of_any_text_has_its_active_key() {
    const TOKENS: [&str; 10] = [
        "key ",
        "active ",
        "a",
        "b",
        "\n",
        " ",
        "#",
        "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=",
        "key a AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\n",
        "active a\n",
    ];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let tokens = input.iter().skip(1).take(usize::from(*input.first().unwrap_or(&0)) % 24);
        let text: String = tokens.map(|byte| TOKENS[usize::from(*byte) % TOKENS.len()]).collect();
        if let Ok(ring) = KeyRing::parse(&text) {
            assert!(ring.has(ring.active()), "{text:?}");
            let sealed = ring.seal(&CONTEXT, b"x").unwrap();
            assert!(sealed.starts_with(&ring.active_prefix()));
            assert_eq!(ring.open(&CONTEXT, &sealed).unwrap().expose_secret(), b"x");
        }
    });
}

/// A JSON value of a few tokens; `None` where they make none.
fn json_of(input: &[u8]) -> Option<serde_json::Value> {
    const TOKENS: [&str; 14] =
        ["{", "}", "[", "]", ",", ":", "\"a\"", "\"ä\"", "1", "-2.50", "1e16", "null", "true", "{\"b\":1}"];
    let tokens = input.iter().take(7).map(|byte| TOKENS[usize::from(*byte) % TOKENS.len()]);
    serde_json::from_str(&tokens.collect::<String>()).ok()
}

#[test]
fn fuzz_snapshot_seal_holds_for_its_content_alone() {
    let sealer = SnapshotSealer::new(&SecretSlice::from(vec![7; 32]), None).unwrap();
    // The counters of the sealer are not marked as unwind safe.
    let sealer = AssertUnwindSafe(sealer);
    let entity = EntityRef { kind: EntityKind::Node, id: Uuid::from_u128(1) };
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let sealer = &*sealer;
        let (change, rest) = input.split_at(input.len().min(4));
        let (first, second) = rest.split_at(rest.len() / 2);
        let [body, other] = [first, second].map(|half| json_of(half).unwrap_or_else(|| half.len().into()));
        let text = body.to_string();
        let seal = sealer.seal(entity, 3, &text).unwrap();
        // In another spelling, as Postgres gives it back.
        let spaced = serde_json::to_string_pretty(&body).unwrap();
        assert_eq!(sealer.check(entity, 3, &spaced, Some(&seal)), Ok(()));
        if let Some(altered) = altered(&seal, change) {
            assert!(sealer.check(entity, 3, &text, Some(&altered)).is_err(), "{change:?}");
        }
        assert!(sealer.check(entity, 4, &text, Some(&seal)).is_err(), "of another version");
        let neighbour = EntityRef { id: Uuid::from_u128(2), ..entity };
        assert!(sealer.check(neighbour, 3, &text, Some(&seal)).is_err(), "of another entity");
        if other != body {
            assert!(sealer.check(entity, 3, &other.to_string(), Some(&seal)).is_err(), "{body} and {other}");
        }
    });
}
