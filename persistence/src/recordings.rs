//! Recordings of terminal sessions: sealed chunks, each stored once, in their order.
//!
//! They are bulk data and no state: who may read one, and under which terms it is made, is decided by its session's machine. A
//! recording has a data key of its own ([`DataKey`]), sealed under the key ring beside it; deleting that key destroys the recording.

use crate::envelope_encryption::{DataKey, EnvelopeError, KeyRing, SealContext};
use crate::error::{OperationContext, StoreError};
use crate::queries::Cursor;
use domain::state_machine::Timestamp;
use domain::{AllocationId, NodeId, TerminalSessionId};
use secrecy::{ExposeSecret as _, SecretSlice};
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Postgres, QueryBuilder, Row};
use std::sync::Arc;

/// The metadata of a recording, without its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    pub session: TerminalSessionId,
    pub owner: String,
    pub allocation: AllocationId,
    pub node: NodeId,
    pub chunks: u32,
    pub bytes: u64,
    pub lost_bytes: u64,
    /// The time of the last frame, since the session began.
    pub micros: u64,
    /// No chunk follows.
    pub ended: bool,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// The session and owner of a chunk.
#[derive(Clone, Debug)]
pub struct ChunkOwner<'a> {
    pub session: TerminalSessionId,
    pub owner: &'a str,
    pub allocation: AllocationId,
    pub node: NodeId,
}

/// A chunk as the agent uploads it.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    pub seq: u32,
    pub frames: &'a [u8],
    /// As its frames report.
    pub lost_bytes: u64,
    pub micros: u64,
    pub ends: bool,
}

impl Chunk<'_> {
    /// The bytes that it is charged, with an overhead: many small chunks are not free.
    #[must_use]
    pub const fn cost(&self) -> u64 {
        self.frames.len() as u64 + CHUNK_OVERHEAD
    }
}

/// The result of storing a chunk: it is stored, once, in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkOutcome {
    New,
    Duplicate,
}

/// Why a chunk is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkRejected {
    #[error("another chunk {seq} is stored")]
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
    Rejected(#[from] ChunkRejected),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the recording of session {session} does not open")]
    Sealed {
        session: TerminalSessionId,
        #[source]
        source: EnvelopeError,
    },
}

/// A filter of recordings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordingFilter {
    pub owner: Option<String>,
    pub allocation: Option<AllocationId>,
    /// The newest first, in place of the oldest.
    pub is_newest_first: bool,
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

/// The overhead of a chunk beside its frames.
pub const CHUNK_OVERHEAD: u64 = 128;

/// The most lost bytes that are counted: what JSON readers can represent.
const LOST_BYTES_MAX: u64 = 1 << 53;

/// The attempts to store a chunk that races with itself.
const TRIES: u32 = 5;

impl Recordings {
    pub(crate) const fn new(pool: PgPool, ring: Arc<KeyRing>) -> Self {
        Self { pool, ring }
    }

    /// Stores a chunk, where it is the next one and the recording does not exceed `most` bytes. A stored one is accepted again.
    ///
    /// # Errors
    /// [`RecordingError`]
    pub async fn store_chunk(
        &self,
        of: &ChunkOwner<'_>,
        chunk: &Chunk<'_>,
        most: u64,
    ) -> Result<ChunkOutcome, RecordingError> {
        for _ in 0..TRIES {
            let Some((found, key)) = self.find(of.session).await? else {
                self.begin(of).await?;
                continue;
            };
            if chunk.seq < found.chunks {
                return self.check_duplicate(of.session, &key, chunk).await;
            }
            if found.ended {
                return Err(ChunkRejected::Ended.into());
            }
            if chunk.seq > found.chunks {
                return Err(ChunkRejected::OutOfOrder { next: found.chunks }.into());
            }
            if found.bytes.saturating_add(chunk.cost()) > most {
                return Err(ChunkRejected::Full.into());
            }
            if self.add(of.session, &key, chunk, most).await? {
                return Ok(ChunkOutcome::New);
            }
        }
        // The competing writer each time is the same agent.
        Err(ChunkRejected::OutOfOrder { next: chunk.seq }.into())
    }

    async fn find(&self, session: TerminalSessionId) -> Result<Option<(Recording, DataKey)>, RecordingError> {
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
        let key = self.ring.open_data_key(&key_context(&id), &sealed);
        let key = key.map_err(|source| RecordingError::Sealed { session, source })?;
        Ok(Some((recording(&row).doing(DOING)?, key)))
    }

    async fn begin(&self, of: &ChunkOwner<'_>) -> Result<(), RecordingError> {
        let id = of.session.to_string();
        let sealed = |source| RecordingError::Sealed { session: of.session, source };
        let (_, key_enc) = self.ring.make_data_key(&key_context(&id)).map_err(sealed)?;
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

    /// All in one statement, so that it is atomic. `false`: another was faster.
    async fn add(
        &self,
        session: TerminalSessionId,
        key: &DataKey,
        chunk: &Chunk<'_>,
        most: u64,
    ) -> Result<bool, RecordingError> {
        let row = chunk_row(session, chunk.seq);
        let sealed = key.seal(&chunk_context(&row), chunk.frames);
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
        .bind(whole(chunk.lost_bytes.min(LOST_BYTES_MAX)))
        .bind(whole(chunk.micros))
        .bind(chunk.ends)
        .bind(whole(most))
        .bind(sealed)
        .bind(whole(LOST_BYTES_MAX))
        .execute(&self.pool)
        .await
        .doing("keeping a chunk of a recording")?;
        Ok(added.rows_affected() == 1)
    }

    async fn check_duplicate(
        &self,
        session: TerminalSessionId,
        key: &DataKey,
        chunk: &Chunk<'_>,
    ) -> Result<ChunkOutcome, RecordingError> {
        let stored = self.open_chunks(session, key, chunk.seq, 1).await?;
        match stored.first() {
            Some(stored) if stored.expose_secret() == chunk.frames => Ok(ChunkOutcome::Duplicate),
            Some(_) | None => Err(ChunkRejected::Differs { seq: chunk.seq }.into()),
        }
    }

    async fn open_chunks(
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
            key.open(&chunk_context(&row), &sealed).map_err(|source| RecordingError::Sealed { session, source })
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
        match self.find(session).await? {
            Some((_, key)) => self.open_chunks(session, &key, from, limit).await,
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

    /// A page of them, in the filter's order: at most `limit`.
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
            query.push(" AND (created_at, session_id) ").push(if filter.is_newest_first { "< (" } else { "> (" });
            query.push_bind(after.created_at).push(", ").push_bind(after.id).push(")");
        }
        let order = if filter.is_newest_first { "created_at DESC, session_id DESC" } else { "created_at, session_id" };
        query.push(" ORDER BY ").push(order).push(" LIMIT ").push_bind(limit);
        let rows = query.build().fetch_all(&self.pool).await.doing("listing recordings")?;
        rows.iter().map(recording).collect::<Result<_, _>>().doing("listing recordings")
    }

    /// The bytes that are stored: of the owner, or altogether.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn bytes(&self, owner: Option<&str>) -> Result<u64, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new("SELECT coalesce(sum(bytes), 0)::bigint FROM recording");
        if let Some(owner) = owner {
            query.push(" WHERE owner = ").push_bind(owner);
        }
        let sum: i64 = query.build_query_scalar().fetch_one(&self.pool).await.doing("adding up recordings")?;
        Ok(sum.unsigned_abs())
    }

    /// Deletes a recording. A missing one is no error.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn delete(&self, session: TerminalSessionId) -> Result<(), StoreError> {
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

/// The seal context of a recording's own key.
pub(crate) const fn key_context(session: &str) -> SealContext<'_> {
    SealContext { table: "recording", column: "key_enc", row: session }
}

const fn chunk_context(row: &str) -> SealContext<'_> {
    SealContext { table: "recording_chunk", column: "frames_enc", row }
}

fn chunk_row(session: TerminalSessionId, seq: u32) -> String {
    format!("{session}/{seq}")
}

/// No such number comes near the column's maximum.
fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn column(seq: u32) -> i32 {
    i32::try_from(seq).unwrap_or(i32::MAX)
}
