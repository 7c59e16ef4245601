//! Recordings of terminal sessions: sealed chunks, each kept once, in the order in which they were made.
//!
//! They are bulk and no state: who may have one, and on which terms it is made, is said by its session's machine. A recording has a key
//! of its own ([`DataKey`]), sealed under the key ring beside it; with that key it is gone.

use crate::envelope::{DataKey, EnvelopeError, KeyRing, Place};
use crate::error::{Doing, StoreError};
use crate::read::Cursor;
use domain::machine::Timestamp;
use domain::{AllocationId, NodeId, TerminalSessionId};
use secrecy::{ExposeSecret as _, SecretSlice};
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Postgres, QueryBuilder, Row};
use std::sync::Arc;

/// What can be known of a recording without opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    pub session: TerminalSessionId,
    pub owner: String,
    pub allocation: AllocationId,
    pub node: NodeId,
    pub chunks: u32,
    pub bytes: u64,
    pub lost_bytes: u64,
    /// The time of the last frame, since the session's beginning.
    pub micros: u64,
    /// No chunk follows.
    pub ended: bool,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// Whose a chunk is.
#[derive(Clone, Debug)]
pub struct Of<'a> {
    pub session: TerminalSessionId,
    pub owner: &'a str,
    pub allocation: AllocationId,
    pub node: NodeId,
}

/// A chunk as it came in.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    pub seq: u32,
    pub frames: &'a [u8],
    /// What its frames say.
    pub lost_bytes: u64,
    pub micros: u64,
    pub ends: bool,
}

impl Chunk<'_> {
    /// What it takes, with what stands around it: many small ones are not for nothing.
    #[must_use]
    pub const fn cost(&self) -> u64 {
        self.frames.len() as u64 + AROUND
    }
}

/// Both are good: the chunk is there, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    New,
    Already,
}

/// Why a chunk is not taken, now or ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    #[error("another chunk {seq} is kept")]
    Differs { seq: u32 },
    #[error("chunk {next} comes next")]
    OutOfOrder { next: u32 },
    #[error("the recording has ended")]
    Ended,
    #[error("the recording is as long as it may be")]
    Full,
}

#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    #[error(transparent)]
    NotTaken(#[from] NotTaken),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the recording of session {session} does not open")]
    Sealed {
        session: TerminalSessionId,
        #[source]
        source: EnvelopeError,
    },
}

/// Which recordings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordingFilter {
    pub owner: Option<String>,
    pub allocation: Option<AllocationId>,
}

/// See the module; cheap to clone.
#[derive(Clone, Debug)]
pub struct Recordings {
    pool: PgPool,
    ring: Arc<KeyRing>,
}

const COLUMNS: &str =
    "SELECT session_id, owner, allocation_id, node_id, chunks, bytes, lost_bytes, micros, ended, created_at, updated_at
                       FROM recording";

/// What a chunk takes beside its frames.
pub const AROUND: u64 = 128;

/// Nothing more is counted as lost than a reader of JSON can count.
const LOST_MOST: u64 = 1 << 53;

/// How often a chunk is tried that meets itself.
const TRIES: u32 = 5;

impl Recordings {
    pub(crate) const fn new(pool: PgPool, ring: Arc<KeyRing>) -> Self {
        Self { pool, ring }
    }

    /// Keeps a chunk, where it is the next one and the recording does not grow over `most` bytes. One that is there already is fine.
    ///
    /// # Errors
    /// [`RecordingError`]
    pub async fn keep(&self, of: &Of<'_>, chunk: &Chunk<'_>, most: u64) -> Result<Kept, RecordingError> {
        for _ in 0..TRIES {
            let Some((found, key)) = self.found(of.session).await? else {
                self.begin(of).await?;
                continue;
            };
            if chunk.seq < found.chunks {
                return self.same(of.session, &key, chunk).await;
            }
            if found.ended {
                return Err(NotTaken::Ended.into());
            }
            if chunk.seq > found.chunks {
                return Err(NotTaken::OutOfOrder { next: found.chunks }.into());
            }
            if found.bytes.saturating_add(chunk.cost()) > most {
                return Err(NotTaken::Full.into());
            }
            if self.add(of.session, &key, chunk, most).await? {
                return Ok(Kept::New);
            }
        }
        // Whoever came in between each time is the same agent.
        Err(NotTaken::OutOfOrder { next: chunk.seq }.into())
    }

    async fn found(&self, session: TerminalSessionId) -> Result<Option<(Recording, DataKey)>, RecordingError> {
        const DOING: &str = "reading a recording";
        let row = sqlx::query(
            "SELECT session_id, owner, allocation_id, node_id, chunks, bytes, lost_bytes, micros, ended, created_at, updated_at, key_enc
             FROM recording WHERE session_id = $1",
        )
        .bind(session.0)
        .fetch_optional(&self.pool)
        .await
        .doing(DOING)?;
        let Some(row) = row else { return Ok(None) };
        let sealed: Vec<u8> = row.try_get("key_enc").doing(DOING)?;
        let id = session.to_string();
        let key = self.ring.open_data_key(&key_place(&id), &sealed);
        let key = key.map_err(|source| RecordingError::Sealed { session, source })?;
        Ok(Some((recording(&row).doing(DOING)?, key)))
    }

    async fn begin(&self, of: &Of<'_>) -> Result<(), RecordingError> {
        let id = of.session.to_string();
        let sealed = |source| RecordingError::Sealed { session: of.session, source };
        let (_, key_enc) = self.ring.make_data_key(&key_place(&id)).map_err(sealed)?;
        sqlx::query(
            "INSERT INTO recording (session_id, owner, allocation_id, node_id, key_id, key_enc)
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (session_id) DO NOTHING",
        )
        .bind(of.session.0)
        .bind(of.owner)
        .bind(of.allocation.0)
        .bind(of.node.0)
        .bind(self.ring.active())
        .bind(key_enc)
        .execute(&self.pool)
        .await
        .doing("beginning a recording")?;
        Ok(())
    }

    /// All in one statement, so that it happens whole or not at all. `false`: another was faster.
    async fn add(
        &self,
        session: TerminalSessionId,
        key: &DataKey,
        chunk: &Chunk<'_>,
        most: u64,
    ) -> Result<bool, RecordingError> {
        let row = chunk_row(session, chunk.seq);
        let sealed = key.seal(&chunk_place(&row), chunk.frames);
        let sealed = sealed.map_err(|source| RecordingError::Sealed { session, source })?;
        let added = sqlx::query(
            "WITH next AS (
                 UPDATE recording SET chunks = chunks + 1, bytes = bytes + $3, lost_bytes = least(lost_bytes + $4, $9),
                     micros = greatest(micros, $5), ended = $6, updated_at = clock_timestamp()
                 WHERE session_id = $1 AND chunks = $2 AND NOT ended AND bytes + $3 <= $7
                 RETURNING session_id)
             INSERT INTO recording_chunk (session_id, seq, frames_enc) SELECT session_id, $2, $8 FROM next",
        )
        .bind(session.0)
        .bind(column(chunk.seq))
        .bind(whole(chunk.cost()))
        .bind(whole(chunk.lost_bytes.min(LOST_MOST)))
        .bind(whole(chunk.micros))
        .bind(chunk.ends)
        .bind(whole(most))
        .bind(sealed)
        .bind(whole(LOST_MOST))
        .execute(&self.pool)
        .await
        .doing("keeping a chunk of a recording")?;
        Ok(added.rows_affected() == 1)
    }

    async fn same(&self, session: TerminalSessionId, key: &DataKey, chunk: &Chunk<'_>) -> Result<Kept, RecordingError> {
        let kept = self.opened(session, key, chunk.seq, 1).await?;
        match kept.first() {
            Some(kept) if kept.expose_secret() == chunk.frames => Ok(Kept::Already),
            Some(_) | None => Err(NotTaken::Differs { seq: chunk.seq }.into()),
        }
    }

    async fn opened(
        &self,
        session: TerminalSessionId,
        key: &DataKey,
        from: u32,
        limit: u32,
    ) -> Result<Vec<SecretSlice<u8>>, RecordingError> {
        const DOING: &str = "reading chunks of a recording";
        let rows = sqlx::query(
            "SELECT seq, frames_enc FROM recording_chunk WHERE session_id = $1 AND seq >= $2 ORDER BY seq LIMIT $3",
        )
        .bind(session.0)
        .bind(column(from))
        .bind(i64::from(limit))
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        let open = |row: &PgRow| {
            let seq: i32 = row.try_get("seq").doing(DOING)?;
            let sealed: Vec<u8> = row.try_get("frames_enc").doing(DOING)?;
            let row = chunk_row(session, seq.unsigned_abs());
            key.open(&chunk_place(&row), &sealed).map_err(|source| RecordingError::Sealed { session, source })
        };
        rows.iter().map(open).collect()
    }

    /// The frames of at most `limit` chunks from `from` on.
    ///
    /// # Errors
    /// [`RecordingError`]
    pub async fn read(
        &self,
        session: TerminalSessionId,
        from: u32,
        limit: u32,
    ) -> Result<Vec<SecretSlice<u8>>, RecordingError> {
        match self.found(session).await? {
            Some((_, key)) => self.opened(session, &key, from, limit).await,
            None => Ok(Vec::new()),
        }
    }

    /// # Errors
    /// [`StoreError`]
    pub async fn get(&self, session: TerminalSessionId) -> Result<Option<Recording>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(COLUMNS);
        query.push(" WHERE session_id = ").push_bind(session.0);
        let row = query.build().fetch_optional(&self.pool).await.doing("reading a recording")?;
        row.as_ref().map(recording).transpose().doing("reading a recording")
    }

    /// Oldest first, at most `limit`.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn list(
        &self,
        filter: &RecordingFilter,
        after: Option<Cursor>,
        limit: i64,
    ) -> Result<Vec<Recording>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(COLUMNS);
        query.push(" WHERE true");
        if let Some(owner) = &filter.owner {
            query.push(" AND owner = ").push_bind(owner);
        }
        if let Some(allocation) = filter.allocation {
            query.push(" AND allocation_id = ").push_bind(allocation.0);
        }
        if let Some(after) = after {
            query.push(" AND (created_at, session_id) > (").push_bind(after.created_at).push(", ").push_bind(after.id);
            query.push(")");
        }
        query.push(" ORDER BY created_at, session_id LIMIT ").push_bind(limit);
        let rows = query.build().fetch_all(&self.pool).await.doing("listing recordings")?;
        rows.iter().map(recording).collect::<Result<_, _>>().doing("listing recordings")
    }

    /// How many bytes are kept: of the owner, or altogether.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn bytes(&self, owner: Option<&str>) -> Result<u64, StoreError> {
        let sum: i64 = sqlx::query_scalar(
            "SELECT coalesce(sum(bytes), 0)::bigint FROM recording WHERE $1::text IS NULL OR owner = $1",
        )
        .bind(owner)
        .fetch_one(&self.pool)
        .await
        .doing("adding up recordings")?;
        Ok(sum.unsigned_abs())
    }

    /// Deletes a recording. One that is not there is fine.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn forget(&self, session: TerminalSessionId) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM recording WHERE session_id = $1")
            .bind(session.0)
            .execute(&self.pool)
            .await
            .doing("deleting a recording")?;
        Ok(())
    }
}

fn recording(row: &PgRow) -> Result<Recording, sqlx::Error> {
    let count = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
    Ok(Recording {
        session: TerminalSessionId(row.try_get("session_id")?),
        owner: row.try_get("owner")?,
        allocation: AllocationId(row.try_get("allocation_id")?),
        node: NodeId(row.try_get("node_id")?),
        chunks: row.try_get::<i32, _>("chunks")?.unsigned_abs(),
        bytes: count("bytes")?,
        lost_bytes: count("lost_bytes")?,
        micros: count("micros")?,
        ended: row.try_get("ended")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}

/// Where a recording's own key is sealed.
pub(crate) const fn key_place(session: &str) -> Place<'_> {
    Place { table: "recording", column: "key_enc", row: session }
}

const fn chunk_place(row: &str) -> Place<'_> {
    Place { table: "recording_chunk", column: "frames_enc", row }
}

fn chunk_row(session: TerminalSessionId, seq: u32) -> String {
    format!("{session}/{seq}")
}

/// Nothing of this kind comes near the end of the column.
fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn column(seq: u32) -> i32 {
    i32::try_from(seq).unwrap_or(i32::MAX)
}
