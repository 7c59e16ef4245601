//! Recordings: stored once, in order, sealed, and gone when they are deleted.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::{AllocationId, NodeId, TerminalSessionId};
use local_servers::test_database::TestDatabase;
use persistence::envelope_encryption::KeyRing;
use persistence::queries::Cursor;
use persistence::recordings::{Chunk, ChunkOutcome, ChunkOwner, ChunkRejected, RecordingError, RecordingFilter};
use persistence::{Recordings, Secrets};
use secrecy::ExposeSecret as _;
use std::sync::Arc;
use uuid::Uuid;

const MOST: u64 = 1 << 20;

fn ring(keys: &[(&str, u8)]) -> Arc<KeyRing> {
    let line = |(id, byte): &(&str, u8)| format!("key {id} {}\n", STANDARD.encode([*byte; 32]));
    let lines: String = keys.iter().map(line).collect();
    Arc::new(KeyRing::parse(&format!("{lines}active {}\n", keys[0].0)).unwrap())
}

async fn store() -> (TestDatabase, Recordings) {
    let db = TestDatabase::fresh().await;
    let recordings = Secrets::new(db.pool.clone(), ring(&[("a", 1)])).recordings();
    (db, recordings)
}

fn session(n: u128) -> TerminalSessionId {
    TerminalSessionId(Uuid::from_u128(n))
}

fn of(n: u128, owner: &str) -> ChunkOwner<'_> {
    let (allocation, node) = (AllocationId(Uuid::from_u128(100 + n)), NodeId(Uuid::from_u128(200)));
    ChunkOwner { session: session(n), owner, allocation, node }
}

fn chunk(seq: u32, frames: &[u8]) -> Chunk<'_> {
    Chunk { seq, frames, lost_bytes: 1, micros: u64::from(seq) * 10, ends: false }
}

fn rejection(result: Result<ChunkOutcome, RecordingError>) -> ChunkRejected {
    match result {
        Err(RecordingError::Rejected(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn chunk_is_stored_once_in_order_and_none_after_the_last() {
    let (_db, recordings) = store().await;
    let keep = async |chunk: &Chunk<'_>, most| recordings.store_chunk(&of(1, "ann"), chunk, most).await;
    assert_eq!(rejection(keep(&chunk(1, b"early"), MOST).await), ChunkRejected::OutOfOrder { next: 0 });
    assert_eq!(keep(&chunk(0, b"zero"), MOST).await.unwrap(), ChunkOutcome::New);
    assert_eq!(keep(&chunk(0, b"zero"), MOST).await.unwrap(), ChunkOutcome::Duplicate);
    assert_eq!(rejection(keep(&chunk(0, b"other"), MOST).await), ChunkRejected::Differs { seq: 0 });
    assert_eq!(rejection(keep(&chunk(2, b"late"), MOST).await), ChunkRejected::OutOfOrder { next: 1 });
    assert_eq!(rejection(keep(&chunk(1, b"one"), 140).await), ChunkRejected::Full);
    let last = Chunk { ends: true, lost_bytes: u64::MAX, ..chunk(1, b"one") };
    assert_eq!(keep(&last, MOST).await.unwrap(), ChunkOutcome::New);
    assert_eq!(rejection(keep(&chunk(2, b"more"), MOST).await), ChunkRejected::Ended);
    assert_eq!(keep(&last, MOST).await.unwrap(), ChunkOutcome::Duplicate, "its answer may have been lost");
    let stored = recordings.get(session(1)).await.unwrap().unwrap();
    assert_eq!((stored.chunks, stored.bytes, stored.micros, stored.ended), (2, 7 + 2 * 128, 10, true));
    assert_eq!(stored.lost_bytes, 1 << 53);
    let read = recordings.read(session(1), 0, 10).await.unwrap();
    assert_eq!(read.iter().map(|part| part.expose_secret()).collect::<Vec<_>>(), [b"zero".as_slice(), b"one"]);
    assert_eq!(recordings.read(session(1), 1, 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn concurrent_uploads_of_a_chunk_store_it_once() {
    let (db, recordings) = store().await;
    let sending = (0..8).map(|_| {
        let recordings = recordings.clone();
        tokio::spawn(async move { recordings.store_chunk(&of(1, "ann"), &chunk(0, b"zero"), MOST).await.unwrap() })
    });
    let stored = futures::future::join_all(sending.collect::<Vec<_>>()).await;
    let new = stored.into_iter().filter(|stored| *stored.as_ref().unwrap() == ChunkOutcome::New).count();
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM recording_chunk").fetch_one(&db.pool).await.unwrap();
    assert_eq!((new, rows, recordings.get(session(1)).await.unwrap().unwrap().chunks), (1, 1, 1));
}

#[tokio::test]
async fn recordings_are_listed_by_owner_and_allocation_and_their_bytes_summed() {
    let (_db, recordings) = store().await;
    for (n, owner) in [(1, "ann"), (2, "bob"), (3, "ann")] {
        recordings.store_chunk(&of(n, owner), &chunk(0, b"x"), MOST).await.unwrap();
    }
    let list = async |filter: RecordingFilter, after: Option<Cursor>, limit| {
        let found = recordings.list(&filter, after, limit).await.unwrap();
        found.iter().map(|it| (it.session.0.as_u128(), it.created_at)).collect::<Vec<_>>()
    };
    let numbers = |found: &[(u128, _)]| found.iter().map(|(n, _)| *n).collect::<Vec<_>>();
    let ann = RecordingFilter { owner: Some("ann".into()), ..RecordingFilter::default() };
    let all = list(RecordingFilter::default(), None, 2).await;
    assert_eq!(numbers(&all), [1, 2]);
    let after = Cursor { created_at: all[1].1, id: Uuid::from_u128(2) };
    assert_eq!(numbers(&list(RecordingFilter::default(), Some(after), 2).await), [3]);
    assert_eq!(numbers(&list(ann.clone(), None, 9).await), [1, 3]);
    let newest = RecordingFilter { is_newest_first: true, ..ann.clone() };
    let first = list(newest.clone(), None, 1).await;
    assert_eq!(numbers(&first), [3]);
    let after = Cursor { created_at: first[0].1, id: Uuid::from_u128(3) };
    assert_eq!(numbers(&list(newest, Some(after), 9).await), [1]);
    let allocation = Some(AllocationId(Uuid::from_u128(103)));
    assert_eq!(numbers(&list(RecordingFilter { allocation, ..ann }, None, 9).await), [3]);
    assert_eq!((recordings.bytes(Some("ann")).await.unwrap(), recordings.bytes(None).await.unwrap()), (258, 387));
    recordings.delete(session(3)).await.unwrap();
    recordings.delete(session(3)).await.unwrap();
    assert_eq!(recordings.bytes(Some("ann")).await.unwrap(), 129);
    assert!(recordings.read(session(3), 0, 9).await.unwrap().is_empty());
}

#[tokio::test]
async fn chunks_are_sealed_at_rest_bound_to_their_context_and_readable_after_a_rotation() {
    let (db, recordings) = store().await;
    for n in [1, 2] {
        recordings.store_chunk(&of(n, "ann"), &chunk(0, b"shown on a screen"), MOST).await.unwrap();
    }
    let plain: Vec<Vec<u8>> =
        sqlx::query_scalar("SELECT frames_enc FROM recording_chunk").fetch_all(&db.pool).await.unwrap();
    assert!(plain.iter().all(|row| !row.windows(5).any(|part| part == b"shown")));
    let both = Secrets::new(db.pool.clone(), ring(&[("bb", 2), ("a", 1)]));
    let rewrap = both.rewrap();
    assert_eq!(rewrap.sealed().await.unwrap(), [("a".to_owned(), 2)].into());
    assert_eq!((rewrap.recordings().await.unwrap(), rewrap.recordings().await.unwrap()), (2, 0));
    assert_eq!(rewrap.sealed().await.unwrap(), [("bb".to_owned(), 2)].into());
    let alone = Secrets::new(db.pool.clone(), ring(&[("bb", 2)])).recordings();
    assert_eq!(alone.read(session(1), 0, 1).await.unwrap()[0].expose_secret(), b"shown on a screen");
    assert!(matches!(recordings.read(session(1), 0, 1).await, Err(RecordingError::Sealed { .. })));
    // A chunk that an attacker has moved into another recording.
    sqlx::query(
        "UPDATE recording_chunk SET frames_enc = (SELECT frames_enc FROM recording_chunk WHERE session_id = $1)",
    )
    .bind(session(1).0)
    .execute(&db.pool)
    .await
    .unwrap();
    assert!(matches!(alone.read(session(2), 0, 1).await, Err(RecordingError::Sealed { .. })));
}
