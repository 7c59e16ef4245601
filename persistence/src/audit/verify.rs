//! Recomputes the chains from the database, and compares them with heads that are stored elsewhere.
//!
//! Everything is read in one snapshot. Of each shard the first bad row is reported: rows after it prove nothing any more.

use super::chain::{AuditKeys, COLUMNS, Hash, HashedRow, RowPosition, SignedHead, array, genesis, link};
use super::retention::Checkpoint;
use crate::error::{OperationContext, StoreError};
use crate::pool::begin;
use chrono::TimeDelta;
use domain::id::Shard;
use domain::state_machine::Timestamp;
use futures::TryStreamExt;
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, PgPool, Row};
use std::collections::BTreeMap;

/// The parameters of a verification.
#[derive(Clone, Debug)]
pub struct AuditVerification {
    /// Every shard, or these.
    pub shards: Vec<Shard>,
    pub keys: AuditKeys,
    /// Heads that were stored outside the database.
    pub heads: Vec<SignedHead>,
    /// A row that is older and not sealed is a finding.
    pub unsealed_after: TimeDelta,
    pub now: Timestamp,
}

/// The kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// A row, or its seal, differs from what was sealed.
    Altered,
    /// A sealed row is missing, and later ones are there.
    Removed,
    /// A row among sealed ones has no seal.
    Inserted,
    /// The end of the chain is missing.
    CutOff,
    /// A head is older than the seals that were written with a newer one.
    HeadRemoved,
    /// A row waits too long for its seal.
    UnsealedTooLong,
    /// A head or checkpoint is not signed by the audit key.
    HeadSignature,
}

/// The first finding of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditFinding {
    pub shard: Shard,
    pub kind: FindingKind,
    /// The row's number in the chain, where it has or had one.
    pub number: Option<i64>,
    /// The row's position, where it is known.
    pub epoch: Option<i64>,
    pub seq: Option<i64>,
    pub says: String,
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AuditReport {
    pub findings: Vec<AuditFinding>,
    /// Rows that match their seals.
    pub verified: u64,
    /// Rows that wait for their seal, not too long.
    pub unsealed: u64,
    /// Heads with a valid signature, in the database and elsewhere.
    pub heads: u64,
}

/// Verifies.
///
/// # Errors
/// [`StoreError`] where the database cannot be read: then nothing was verified.
pub async fn verify(pool: &PgPool, verification: &AuditVerification) -> Result<AuditReport, StoreError> {
    const DOING: &str = "verifying the audit log";
    let mut transaction = begin(pool, "BEGIN").await.doing(DOING)?;
    // Without a timeout; nothing waits for a reader.
    for set in ["SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY", "SET LOCAL statement_timeout = 0"] {
        sqlx::query(set).execute(&mut *transaction).await.doing(DOING)?;
    }
    let mut report = AuditReport::default();
    for shard in &verification.shards {
        match verify_shard(&mut transaction, *shard, verification, &mut report).await.doing(DOING)? {
            Ok(()) => {}
            Err(finding) => report.findings.push(finding),
        }
    }
    Ok(report)
}

/// A shard's chain. The outer result is the database's, the inner one the chain's.
async fn verify_shard(
    connection: &mut PgConnection,
    shard: Shard,
    verification: &AuditVerification,
    report: &mut AuditReport,
) -> Result<Result<(), AuditFinding>, sqlx::Error> {
    let checkpoint = Checkpoint::last(connection, shard).await?;
    let stored = heads_of(connection, shard).await?;
    if let Some(checkpoint) = &checkpoint
        && let Err(finding) = verify_checkpoint(connection, shard, checkpoint, verification, report).await?
    {
        return Ok(Err(finding));
    }
    let start = checkpoint.map_or((0, RowPosition { epoch: -1, seq: -1 }, genesis(shard)), |at| {
        (at.number, RowPosition { epoch: at.epoch, seq: at.seq }, at.hash)
    });
    let mut walk = ChainWalk::new(shard, start, &stored, verification);
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
        if let Err(finding) = walk.step(&ChainEntry::of(&row)?) {
            return Ok(Err(finding));
        }
    }
    drop(rows);
    let end = walk.finish(stored.last());
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

/// Verifies the rows before a checkpoint: exactly those that it lists.
async fn verify_checkpoint(
    connection: &mut PgConnection,
    shard: Shard,
    checkpoint: &Checkpoint,
    verification: &AuditVerification,
    report: &mut AuditReport,
) -> Result<Result<(), AuditFinding>, sqlx::Error> {
    let finding = |kind, place: RowPosition, says: &str| {
        let (epoch, seq) = (Some(place.epoch), Some(place.seq));
        Ok(Err(AuditFinding { shard, kind, number: None, epoch, seq, says: says.to_owned() }))
    };
    let at = RowPosition { epoch: checkpoint.epoch, seq: checkpoint.seq };
    if !checkpoint.is_signed(&verification.keys) {
        return finding(FindingKind::HeadSignature, at, "the signature of the checkpoint is wrong");
    }
    let query =
        format!("SELECT {COLUMNS} FROM audit WHERE shard = $1 AND (epoch, seq) <= ($2, $3) ORDER BY epoch, seq");
    let rows = sqlx::query(sqlx::AssertSqlSafe(query)).bind(i16::from(shard.0)).bind(at.epoch).bind(at.seq);
    let mut rows = rows.fetch(connection);
    let mut missing: BTreeMap<RowPosition, Hash> =
        checkpoint.retained.iter().map(|row| (row.place, row.digest)).collect();
    while let Some(row) = rows.try_next().await? {
        let row = HashedRow::of(&row)?;
        match missing.remove(&row.place) {
            Some(digest) if digest == row.digest() => report.verified += 1,
            Some(_) => return finding(FindingKind::Altered, row.place, "the row is not what the checkpoint names"),
            None => return finding(FindingKind::Inserted, row.place, "the checkpoint names no row here"),
        }
    }
    match missing.into_keys().next() {
        Some(place) => finding(FindingKind::Removed, place, "the checkpoint names this row, and it is gone"),
        None => Ok(Ok(())),
    }
}

/// A seal, a row, or both at one position.
struct ChainEntry {
    place: RowPosition,
    seal: Option<(i64, Hash)>,
    row: Option<HashedRow>,
}

impl ChainEntry {
    fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        let number: Option<i64> = row.try_get("number")?;
        let written: Option<i16> = row.try_get("shard")?;
        Ok(Self {
            place: RowPosition { epoch: row.try_get("epoch")?, seq: row.try_get("seq")? },
            seal: match number {
                Some(number) => Some((number, array(row.try_get("hash")?))),
                None => None,
            },
            row: match written {
                Some(_) => Some(HashedRow::of(row)?),
                None => None,
            },
        })
    }
}

/// A walk along one chain.
struct ChainWalk<'a> {
    shard: Shard,
    verification: &'a AuditVerification,
    /// The last link.
    number: i64,
    hash: Hash,
    /// The last position of a row or its seal.
    last: RowPosition,
    /// The signed heads by number, which the chain must match.
    anchors: BTreeMap<i64, Vec<&'a SignedHead>>,
    /// The first sealed position without its row.
    missing_row: Option<(i64, RowPosition)>,
    /// The first row without a seal.
    unsealed_row: Option<(RowPosition, Timestamp)>,
    verified: u64,
    unsealed: u64,
    heads: u64,
}

impl<'a> ChainWalk<'a> {
    fn new(
        shard: Shard,
        (number, last, hash): (i64, RowPosition, Hash),
        kept: &'a [SignedHead],
        verification: &'a AuditVerification,
    ) -> Self {
        let mut anchors: BTreeMap<i64, Vec<&SignedHead>> = BTreeMap::new();
        let elsewhere = verification.heads.iter().filter(|head| head.head.shard == shard);
        for head in kept.iter().chain(elsewhere).filter(|head| head.head.number >= number) {
            anchors.entry(head.head.number).or_default().push(head);
        }
        Self {
            shard,
            verification,
            number,
            hash,
            last,
            anchors,
            missing_row: None,
            unsealed_row: None,
            verified: 0,
            unsealed: 0,
            heads: 0,
        }
    }

    fn finding(
        &self,
        kind: FindingKind,
        number: Option<i64>,
        place: Option<RowPosition>,
        says: impl Into<String>,
    ) -> AuditFinding {
        let (epoch, seq) = (place.map(|place| place.epoch), place.map(|place| place.seq));
        AuditFinding { shard: self.shard, kind, number, epoch, seq, says: says.into() }
    }

    fn step(&mut self, at: &ChainEntry) -> Result<(), AuditFinding> {
        match (&at.seal, &at.row) {
            (Some((number, hash)), row) => {
                self.check_no_unsealed_before()?;
                if *number != self.number + 1 {
                    let (kind, says) = if *number > self.number + 1 {
                        (FindingKind::Removed, "the row's seal is gone")
                    } else {
                        (FindingKind::Altered, "the seals' numbers do not rise with their places")
                    };
                    return Err(self.finding(kind, Some(self.number + 1), None, says));
                }
                match row {
                    None => {
                        self.missing_row.get_or_insert((*number, at.place));
                    }
                    Some(row) => self.check_row(*number, hash, row)?,
                }
                (self.number, self.hash, self.last) = (*number, *hash, at.place);
                self.check_heads()
            }
            (None, Some(row)) => {
                self.unsealed += 1;
                self.unsealed_row.get_or_insert((at.place, row.at));
                Ok(())
            }
            (None, None) => Ok(()),
        }
    }

    /// A row must match its seal, and no row before it may be missing.
    fn check_row(&mut self, number: i64, hash: &Hash, row: &HashedRow) -> Result<(), AuditFinding> {
        if let Some((number, place)) = self.missing_row {
            return Err(self.finding(
                FindingKind::Removed,
                Some(number),
                Some(place),
                "the row was sealed and is gone",
            ));
        }
        if link(&self.hash, number, &row.digest()) != *hash || row.place == self.last {
            return Err(self.finding(
                FindingKind::Altered,
                Some(number),
                Some(row.place),
                "the row is not what was sealed",
            ));
        }
        self.verified += 1;
        Ok(())
    }

    fn check_no_unsealed_before(&self) -> Result<(), AuditFinding> {
        let Some((place, _)) = self.unsealed_row else { return Ok(()) };
        Err(self.finding(
            FindingKind::Inserted,
            None,
            Some(place),
            "the row stands among sealed ones and is not sealed",
        ))
    }

    /// Every head of this number must match the chain.
    fn check_heads(&mut self) -> Result<(), AuditFinding> {
        let Some(heads) = self.anchors.remove(&self.number) else { return Ok(()) };
        for head in heads {
            self.check_signature(head)?;
            if head.head.hash != self.hash {
                let says = "rows and seals up to here were rewritten: a signed head of this number says otherwise";
                return Err(self.finding(FindingKind::Altered, Some(self.number), Some(head.head.position()), says));
            }
            self.heads += 1;
        }
        Ok(())
    }

    fn check_signature(&self, head: &SignedHead) -> Result<(), AuditFinding> {
        if self.verification.keys.signed(head) {
            return Ok(());
        }
        let says = format!("no audit key that is known here has signed the head (key {})", head.key_id);
        Err(self.finding(FindingKind::HeadSignature, Some(head.head.number), Some(head.head.position()), says))
    }

    fn finish(&mut self, newest: Option<&SignedHead>) -> Result<(), AuditFinding> {
        if let Some((number, place)) = self.missing_row {
            let says = "this row and all that were sealed after it are gone";
            return Err(self.finding(FindingKind::CutOff, Some(number), Some(place), says));
        }
        // A checkpoint's own number may also be a head's.
        self.check_heads()?;
        if let Some(number) = self.anchors.keys().copied().filter(|number| *number > self.number).min() {
            for head in self.anchors.remove(&number).unwrap_or_default() {
                self.check_signature(head)?;
            }
            let says = format!("the chain ends at {}, and a signed head says {number}", self.number);
            return Err(self.finding(FindingKind::CutOff, Some(self.number + 1), None, says));
        }
        let ends_at = newest.map_or(0, |head| head.head.number);
        if ends_at < self.number {
            let says = format!("the newest head says {ends_at}, and there are seals up to {}", self.number);
            return Err(self.finding(FindingKind::HeadRemoved, Some(self.number), Some(self.last), says));
        }
        match self.unsealed_row {
            Some((place, at)) if self.verification.now - at > self.verification.unsealed_after => {
                let says = format!("the row was written at {} and is not sealed", at.to_rfc3339());
                Err(self.finding(FindingKind::UnsealedTooLong, None, Some(place), says))
            }
            Some(_) | None => Ok(()),
        }
    }
}
