//! Recomputes the chains from what the database holds, and compares them with heads that are kept elsewhere.
//!
//! Everything is read in one snapshot. Of each shard the first bad row is named: what stands behind it says nothing any more.

use super::chain::{AuditKeys, COLUMNS, Hash, RowPlace, Sealable, SignedHead, array, genesis, link};
use super::forget::Checkpoint;
use crate::error::{Doing, StoreError};
use crate::pool::begin;
use chrono::TimeDelta;
use domain::id::Shard;
use domain::machine::Timestamp;
use futures::TryStreamExt;
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool, Row};
use std::collections::BTreeMap;

/// What is to be verified.
#[derive(Clone, Debug)]
pub struct Verify {
    /// Every shard, or these.
    pub shards: Vec<Shard>,
    pub keys: AuditKeys,
    /// Heads that were kept outside the database.
    pub heads: Vec<SignedHead>,
    /// A row that is older and not sealed is a finding.
    pub unsealed_after: TimeDelta,
    pub now: Timestamp,
}

/// What is wrong with a row or a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A row, or its seal, is not what was sealed.
    Altered,
    /// A sealed row is gone, and later ones are there.
    Removed,
    /// A row stands among sealed ones and is not sealed.
    Inserted,
    /// The end of the chain is gone.
    CutOff,
    /// A head is older than the seals that were written with a newer one.
    HeadRemoved,
    /// A row waits too long for its seal.
    UnsealedTooLong,
    /// A head or checkpoint is not signed by the audit key.
    HeadSignature,
}

/// The first thing that is wrong in a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub shard: Shard,
    pub kind: Kind,
    /// The row's number in the chain, where it has or had one.
    pub number: Option<i64>,
    /// The row's place, where it is known.
    pub epoch: Option<i64>,
    pub seq: Option<i64>,
    pub says: String,
}

/// What came of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// Rows that are what was sealed.
    pub verified: u64,
    /// Rows that wait for their seal, not too long.
    pub unsealed: u64,
    /// Heads whose signature holds, kept here and elsewhere.
    pub heads: u64,
}

/// Verifies.
///
/// # Errors
/// [`StoreError`] where the database cannot be read: then nothing is known.
pub async fn verify(pool: &PgPool, what: &Verify) -> Result<Report, StoreError> {
    const DOING: &str = "verifying the audit log";
    let mut transaction = begin(pool, "BEGIN").await.doing(DOING)?;
    // As long as it takes; nothing waits for a reader.
    for set in ["SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY", "SET LOCAL statement_timeout = 0"] {
        sqlx::query(set).execute(&mut *transaction).await.doing(DOING)?;
    }
    let mut report = Report::default();
    for shard in &what.shards {
        match one(&mut transaction, *shard, what, &mut report).await.doing(DOING)? {
            Ok(()) => {}
            Err(finding) => report.findings.push(finding),
        }
    }
    Ok(report)
}

/// A shard's chain. The outer result is the database's, the inner one the chain's.
async fn one(
    connection: &mut PgConnection,
    shard: Shard,
    what: &Verify,
    report: &mut Report,
) -> Result<Result<(), Finding>, sqlx::Error> {
    let checkpoint = Checkpoint::last(connection, shard).await?;
    let kept = heads_of(connection, shard).await?;
    if let Some(checkpoint) = &checkpoint
        && let Err(finding) = before(connection, shard, checkpoint, what, report).await?
    {
        return Ok(Err(finding));
    }
    let start = checkpoint.map_or((0, RowPlace { epoch: -1, seq: -1 }, genesis(shard)), |at| {
        (at.number, RowPlace { epoch: at.epoch, seq: at.seq }, at.hash)
    });
    let mut walk = Walk::new(shard, start, &kept, what);
    let query = format!(
        "SELECT coalesce(seal.epoch, written.epoch) AS epoch, coalesce(seal.seq, written.seq) AS seq, seal.number, seal.hash,
                written.shard, written.actor, written.action, written.target_kind, written.target_id,
                written.correlation_id, written.metadata, written.at
         FROM (SELECT number, epoch, seq, hash FROM audit_seal WHERE shard = $1 AND number > $2) AS seal
         FULL JOIN (SELECT {COLUMNS} FROM audit WHERE shard = $1 AND (epoch, seq) > ($3, $4)) AS written
           ON written.epoch = seal.epoch AND written.seq = seal.seq
         ORDER BY 1, 2, seal.number"
    );
    let rows = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(i16::from(shard.0))
        .bind(start.0)
        .bind(start.1.epoch)
        .bind(start.1.seq);
    let mut rows = rows.fetch(connection);
    while let Some(row) = rows.try_next().await? {
        if let Err(finding) = walk.step(&Joined::of(&row)?) {
            return Ok(Err(finding));
        }
    }
    drop(rows);
    let end = walk.end(kept.last());
    report.verified += walk.verified;
    report.unsealed += walk.unsealed;
    if end.is_ok() {
        report.heads += walk.heads;
    }
    Ok(end)
}

async fn heads_of(connection: &mut PgConnection, shard: Shard) -> Result<Vec<SignedHead>, sqlx::Error> {
    let query = format!("SELECT {} FROM audit_head WHERE shard = $1 ORDER BY number", SignedHead::COLUMNS);
    let rows = sqlx::query(sqlx::AssertSqlSafe(query)).bind(i16::from(shard.0)).fetch_all(connection).await?;
    rows.iter().map(SignedHead::of).collect()
}

/// What stands before a checkpoint: exactly the rows that it names.
async fn before(
    connection: &mut PgConnection,
    shard: Shard,
    checkpoint: &Checkpoint,
    what: &Verify,
    report: &mut Report,
) -> Result<Result<(), Finding>, sqlx::Error> {
    let finding = |kind, place: RowPlace, says: &str| {
        let (epoch, seq) = (Some(place.epoch), Some(place.seq));
        Ok(Err(Finding { shard, kind, number: None, epoch, seq, says: says.to_owned() }))
    };
    let at = RowPlace { epoch: checkpoint.epoch, seq: checkpoint.seq };
    if !checkpoint.is_signed(&what.keys) {
        return finding(Kind::HeadSignature, at, "the signature of the checkpoint is wrong");
    }
    let query =
        format!("SELECT {COLUMNS} FROM audit WHERE shard = $1 AND (epoch, seq) <= ($2, $3) ORDER BY epoch, seq");
    let rows = sqlx::query(sqlx::AssertSqlSafe(query)).bind(i16::from(shard.0)).bind(at.epoch).bind(at.seq);
    let mut rows = rows.fetch(connection);
    let mut missing: BTreeMap<RowPlace, Hash> = checkpoint.kept.iter().map(|kept| (kept.place, kept.digest)).collect();
    while let Some(row) = rows.try_next().await? {
        let row = Sealable::of(&row)?;
        match missing.remove(&row.place) {
            Some(digest) if digest == row.digest() => report.verified += 1,
            Some(_) => return finding(Kind::Altered, row.place, "the row is not what the checkpoint names"),
            None => return finding(Kind::Inserted, row.place, "the checkpoint names no row here"),
        }
    }
    match missing.into_keys().next() {
        Some(place) => finding(Kind::Removed, place, "the checkpoint names this row, and it is gone"),
        None => Ok(Ok(())),
    }
}

/// A seal, a row, or both at one place.
struct Joined {
    place: RowPlace,
    seal: Option<(i64, Hash)>,
    row: Option<Sealable>,
}

impl Joined {
    fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        let number: Option<i64> = row.try_get("number")?;
        let written: Option<i16> = row.try_get("shard")?;
        Ok(Self {
            place: RowPlace { epoch: row.try_get("epoch")?, seq: row.try_get("seq")? },
            seal: match number {
                Some(number) => Some((number, array(row.try_get("hash")?))),
                None => None,
            },
            row: match written {
                Some(_) => Some(Sealable::of(row)?),
                None => None,
            },
        })
    }
}

/// A walk along one chain.
struct Walk<'a> {
    shard: Shard,
    what: &'a Verify,
    /// The last link.
    number: i64,
    hash: Hash,
    /// The last place at which a row or its seal stood.
    last: RowPlace,
    /// What the chain must be at a number, and who says so.
    anchors: BTreeMap<i64, Vec<&'a SignedHead>>,
    /// The first sealed place without its row.
    gone: Option<(i64, RowPlace)>,
    /// The first row without a seal.
    loose: Option<(RowPlace, Timestamp)>,
    verified: u64,
    unsealed: u64,
    heads: u64,
}

impl<'a> Walk<'a> {
    fn new(
        shard: Shard,
        (number, last, hash): (i64, RowPlace, Hash),
        kept: &'a [SignedHead],
        what: &'a Verify,
    ) -> Self {
        let mut anchors: BTreeMap<i64, Vec<&SignedHead>> = BTreeMap::new();
        let elsewhere = what.heads.iter().filter(|head| head.head.shard == shard);
        for head in kept.iter().chain(elsewhere).filter(|head| head.head.number >= number) {
            anchors.entry(head.head.number).or_default().push(head);
        }
        Self { shard, what, number, hash, last, anchors, gone: None, loose: None, verified: 0, unsealed: 0, heads: 0 }
    }

    fn finding(&self, kind: Kind, number: Option<i64>, place: Option<RowPlace>, says: impl Into<String>) -> Finding {
        let (epoch, seq) = (place.map(|place| place.epoch), place.map(|place| place.seq));
        Finding { shard: self.shard, kind, number, epoch, seq, says: says.into() }
    }

    fn step(&mut self, at: &Joined) -> Result<(), Finding> {
        match (&at.seal, &at.row) {
            (Some((number, hash)), row) => {
                self.no_loose_row_before()?;
                if *number != self.number + 1 {
                    let (kind, says) = if *number > self.number + 1 {
                        (Kind::Removed, "the row's seal is gone")
                    } else {
                        (Kind::Altered, "the seals' numbers do not rise with their places")
                    };
                    return Err(self.finding(kind, Some(self.number + 1), None, says));
                }
                match row {
                    None => {
                        self.gone.get_or_insert((*number, at.place));
                    }
                    Some(row) => self.follow(*number, hash, row)?,
                }
                (self.number, self.hash, self.last) = (*number, *hash, at.place);
                self.anchored()
            }
            (None, Some(row)) => {
                self.unsealed += 1;
                self.loose.get_or_insert((at.place, row.at));
                Ok(())
            }
            (None, None) => Ok(()),
        }
    }

    /// A row must be what its seal says, and nothing before it may be gone.
    fn follow(&mut self, number: i64, hash: &Hash, row: &Sealable) -> Result<(), Finding> {
        if let Some((number, place)) = self.gone {
            return Err(self.finding(Kind::Removed, Some(number), Some(place), "the row was sealed and is gone"));
        }
        if link(&self.hash, number, &row.digest()) != *hash || row.place == self.last {
            return Err(self.finding(Kind::Altered, Some(number), Some(row.place), "the row is not what was sealed"));
        }
        self.verified += 1;
        Ok(())
    }

    fn no_loose_row_before(&self) -> Result<(), Finding> {
        let Some((place, _)) = self.loose else { return Ok(()) };
        Err(self.finding(Kind::Inserted, None, Some(place), "the row stands among sealed ones and is not sealed"))
    }

    /// Every head of this number must say what the chain says.
    fn anchored(&mut self) -> Result<(), Finding> {
        let Some(heads) = self.anchors.remove(&self.number) else { return Ok(()) };
        for head in heads {
            self.signed(head)?;
            if head.head.hash != self.hash {
                let says = "rows and seals up to here were written anew: a signed head of this number says otherwise";
                return Err(self.finding(Kind::Altered, Some(self.number), Some(head.head.place()), says));
            }
            self.heads += 1;
        }
        Ok(())
    }

    fn signed(&self, head: &SignedHead) -> Result<(), Finding> {
        if self.what.keys.signed(head) {
            return Ok(());
        }
        let says = format!("no audit key that is known here has signed the head (key {})", head.key_id);
        Err(self.finding(Kind::HeadSignature, Some(head.head.number), Some(head.head.place()), says))
    }

    fn end(&mut self, newest: Option<&SignedHead>) -> Result<(), Finding> {
        if let Some((number, place)) = self.gone {
            let says = "this row and all that were sealed after it are gone";
            return Err(self.finding(Kind::CutOff, Some(number), Some(place), says));
        }
        // A checkpoint's own number may be a head's too.
        self.anchored()?;
        if let Some(number) = self.anchors.keys().copied().filter(|number| *number > self.number).min() {
            for head in self.anchors.remove(&number).unwrap_or_default() {
                self.signed(head)?;
            }
            let says = format!("the chain ends at {}, and a signed head says {number}", self.number);
            return Err(self.finding(Kind::CutOff, Some(self.number + 1), None, says));
        }
        let ends_at = newest.map_or(0, |head| head.head.number);
        if ends_at < self.number {
            let says = format!("the newest head says {ends_at}, and there are seals up to {}", self.number);
            return Err(self.finding(Kind::HeadRemoved, Some(self.number), Some(self.last), says));
        }
        match self.loose {
            Some((place, at)) if self.what.now - at > self.what.unsealed_after => {
                let says = format!("the row was written at {} and is not sealed", at.to_rfc3339());
                Err(self.finding(Kind::UnsealedTooLong, None, Some(place), says))
            }
            Some(_) | None => Ok(()),
        }
    }
}
