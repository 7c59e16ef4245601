//! The transitions of one statement, and the reading of its result.

use super::Sequences;
use super::acknowledged_commits::{AcknowledgedCommits, Acknowledgement, LostCommits};
use super::in_flight::{InFlightCommit, InFlightCommits};
use crate::entity_sums::SumColumns;
use crate::outbox::OutboxRow;
use crate::snapshot_seal::SnapshotSealer;
use domain::audit::AuditRecord;
use domain::commit::{CommandRecord, Commit, CommitOutcome, CompletedCommand, Precondition};
use domain::event::Event;
use domain::id::{EventId, MemberId, Shard};
use domain::ledger::Posting;
use domain::summand::Summand;
use sqlx::PgConnection;
use sqlx::Row;
use sqlx::postgres::{PgBindIterExt, PgRow};
use std::collections::{BTreeSet, HashSet, VecDeque};
use tokio::sync::oneshot;
use uuid::Uuid;

/// The statement.
pub(super) const BATCH: &str = include_str!("batch.sql");

/// A transition that waits for its commit.
pub(super) struct Job {
    commit: Commit,
    /// The events and the audit rows' metadata as JSON. The caller encodes them, so that the worker only moves bytes.
    events: Vec<String>,
    metadata: Vec<String>,
    /// The MAC that binds the snapshot to this member.
    seal: Option<Vec<u8>>,
    /// The first of its sequence numbers: the history row's; audit rows and events follow.
    seq: i64,
    answer: oneshot::Sender<CommitOutcome>,
    _in_flight: InFlightCommit,
}

impl Job {
    /// # Errors
    /// [`CommitOutcome::Refused`] where an event or an audit row cannot be written as JSON, or the snapshot is none.
    pub(super) fn new(
        commit: Commit,
        answer: oneshot::Sender<CommitOutcome>,
        seals: Option<&SnapshotSealer>,
        in_flight: &InFlightCommits,
    ) -> Result<Self, CommitOutcome> {
        let refused = |error: serde_json::Error| CommitOutcome::Refused { constraint: format!("not JSON: {error}") };
        let events = commit.outbox.iter().map(|(_, event)| serde_json::to_string(event));
        let events = events.collect::<Result<_, _>>().map_err(refused)?;
        let metadata = commit.audit.iter().map(|audit| serde_json::to_string(&audit.metadata));
        let metadata = metadata.collect::<Result<_, _>>().map_err(refused)?;
        let version = commit.expected_version + 1;
        let seal =
            seals.map(|seals| seals.seal(commit.entity, version, &commit.snapshot)).transpose().map_err(refused)?;
        let _in_flight = in_flight.enter(commit.entity.id);
        Ok(Self { commit, events, metadata, seal, seq: 0, answer, _in_flight })
    }

    pub(super) fn answer(self, outcome: CommitOutcome) {
        // The caller may have stopped waiting.
        let _ = self.answer.send(outcome);
    }

    fn acknowledgement(&self) -> Acknowledgement {
        let Commit { entity, shard, expected_version, epoch, at, .. } = self.commit;
        Acknowledgement { entity, shard, version: expected_version + 1, epoch, seq: self.seq, at }
    }

    fn command(&self) -> Option<&CommandRecord> {
        self.commit.command.as_ref()
    }

    fn into_rows(self, rows: &mut Vec<OutboxRow>) {
        let Commit { outbox, audit, shard, epoch, origin, at, .. } = self.commit;
        let first = self.seq + 1 + count(audit.len());
        for (n, (id, event)) in outbox.into_iter().enumerate() {
            rows.push(OutboxRow {
                id,
                shard,
                epoch,
                seq: first + count(n),
                event,
                origin: origin.clone(),
                created_at: at,
            });
        }
        let _ = self.answer.send(CommitOutcome::Applied);
    }
}

/// The limits of one statement.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchLimit {
    pub(super) transitions: usize,
    /// One transition may have more: it is then written alone.
    pub(super) postings: usize,
}

/// The most correlation ids of a batch in one log line.
const LOGGED_REQUESTS_MAX: usize = 16;

/// An audit row or event of a transition.
struct ExtraRow<'a, T> {
    /// The transition's index in the statement's arrays, from 1.
    ord: i64,
    seq: i64,
    row: &'a T,
    json: &'a str,
}

fn extra_rows<'a, T>(ord: i64, first: i64, rows: &'a [T], json: &'a [String]) -> impl Iterator<Item = ExtraRow<'a, T>> {
    let numbered = (first..).zip(rows.iter().zip(json));
    numbered.map(move |(seq, (row, json))| ExtraRow { ord, seq, row, json })
}

/// Transitions of different entities and different commands, sorted by entity id and numbered.
pub(super) struct Batch {
    jobs: Vec<Job>,
}

impl Batch {
    /// Takes from the queue, oldest first, up to the limit. A second transition of an entity, or a second use of a command id, stays
    /// for the next batch; one whose caller no longer waits is dropped.
    pub(super) fn take(waiting: &mut VecDeque<Job>, limit: BatchLimit, sequences: &Sequences) -> Self {
        let mut jobs = Vec::with_capacity(waiting.len().min(limit.transitions));
        let mut postings = 0;
        let mut entities = HashSet::with_capacity(jobs.capacity());
        let mut commands = HashSet::with_capacity(jobs.capacity());
        let mut stay = VecDeque::new();
        while let Some(job) = waiting.pop_front() {
            postings += job.commit.postings.len();
            if jobs.len() == limit.transitions || (postings > limit.postings && !jobs.is_empty()) {
                stay.push_back(job);
                break;
            }
            if job.answer.is_closed() {
                continue;
            }
            let command = job.command().map(|command| command.id);
            // Later transitions of an entity that stays keep their order behind it.
            let first = entities.insert(job.commit.entity.id);
            if first && command.is_none_or(|id| commands.insert(id)) {
                jobs.push(job);
            } else {
                stay.push_back(job);
            }
        }
        stay.append(waiting);
        *waiting = stay;
        jobs.sort_unstable_by_key(|job| job.commit.entity.id);
        for job in &mut jobs {
            let rows = 1 + job.commit.audit.len() + job.commit.outbox.len();
            job.seq = sequences.take(job.commit.shard, job.commit.epoch, rows);
        }
        Self { jobs }
    }

    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// The two halves, in order.
    pub(super) fn halve(mut self) -> (Self, Self) {
        let right = self.jobs.split_off(self.jobs.len() / 2);
        (self, Self { jobs: right })
    }

    /// The same answer for all.
    pub(super) fn answer(self, outcome: &CommitOutcome) {
        for job in self.jobs {
            job.answer(outcome.clone());
        }
    }

    /// For the log: the requests that its transitions go back to, the first few of them.
    pub(super) fn correlation_ids(&self) -> String {
        let ids: BTreeSet<&str> = self.jobs.iter().map(|job| job.commit.origin.correlation_id.as_str()).collect();
        ids.into_iter().take(LOGGED_REQUESTS_MAX).collect::<Vec<_>>().join(" ")
    }

    /// Runs the statement.
    pub(super) async fn write(
        &self,
        member: MemberId,
        connection: &mut PgConnection,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let shards: BTreeSet<Shard> = self.jobs.iter().map(|job| job.commit.shard).collect();
        sqlx::query(BATCH)
            .bind(member.0)
            .bind(shards.iter().map(|shard| i16::from(shard.0)).bind_iter())
            .bind(self.column(|job| job.commit.entity.id).bind_iter())
            .bind(self.column(|job| job.commit.entity.kind.as_str()).bind_iter())
            .bind(self.column(|job| i16::from(job.commit.shard.0)).bind_iter())
            .bind(self.column(|job| job.commit.epoch.0).bind_iter())
            .bind(self.column(|job| job.seq).bind_iter())
            .bind(self.column(|job| job.commit.expected_version).bind_iter())
            .bind(self.column(|job| job.commit.snapshot.as_str()).bind_iter())
            .bind(self.column(|job| job.commit.from_state).bind_iter())
            .bind(self.column(|job| job.commit.to_state).bind_iter())
            .bind(self.column(|job| job.commit.keys.owner.as_deref()).bind_iter())
            .bind(self.column(|job| job.commit.keys.sku).bind_iter())
            .bind(self.column(|job| job.commit.keys.unique_name.as_deref()).bind_iter())
            .bind(self.column(|job| job.commit.timer.as_ref().map(|timer| timer.wake_at)).bind_iter())
            .bind(self.column(|job| job.commit.timer.as_ref().and_then(|timer| timer.deadline_at)).bind_iter())
            .bind(self.column(|job| job.commit.timer.as_ref().map(|timer| timer.reason.as_str())).bind_iter())
            .bind(self.column(|job| job.commit.at).bind_iter())
            .bind(self.column(|job| job.commit.command_name).bind_iter())
            .bind(self.column(|job| job.command().map(|command| command.id.0)).bind_iter())
            .bind(self.column(|job| job.command().map(|command| command.digest.as_slice())).bind_iter())
            .bind(self.column(|job| job.command().and_then(|command| command.reply.as_deref())).bind_iter())
            .bind(self.column(|job| job.command().and_then(|command| command.consumes).map(|id| id.0)).bind_iter())
            .bind(self.column(|job| job.commit.why.as_str()).bind_iter())
            .bind(self.column(|job| job.commit.actor.as_str()).bind_iter())
            .bind(self.column(|job| job.commit.origin.correlation_id.as_str()).bind_iter())
            .bind(self.column(|job| job.commit.origin.traceparent.as_deref()).bind_iter())
            .bind(self.audits().map(|audit| audit.ord).bind_iter())
            .bind(self.audits().map(|audit| audit.seq).bind_iter())
            .bind(self.audits().map(|audit| audit.row.action.as_str()).bind_iter())
            .bind(self.audits().map(|audit| audit.row.target.kind.as_str()).bind_iter())
            .bind(self.audits().map(|audit| audit.row.target.id).bind_iter())
            .bind(self.audits().map(|audit| audit.json).bind_iter())
            .bind(self.events().map(|event| event.ord).bind_iter())
            .bind(self.events().map(|event| event.row.0.0).bind_iter())
            .bind(self.events().map(|event| event.seq).bind_iter())
            .bind(self.events().map(|event| event.row.1.subject()).bind_iter())
            .bind(self.events().map(|event| event.json).bind_iter())
            .bind(self.without_timer().bind_iter())
            .bind(self.column(|job| job.commit.origin.tracestate.as_deref()).bind_iter())
            .bind(self.preconditions().map(|(ord, _)| ord).bind_iter())
            .bind(self.preconditions().map(|(_, required)| required.entity).bind_iter())
            .bind(self.preconditions().map(|(_, required)| required.version).bind_iter())
            .bind(self.postings().map(|(ord, _)| ord).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.number).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.kind.name()).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.kind.books().0.name()).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.kind.books().1.name()).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.amount.get()).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.currency.as_str()).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.balance.get()).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.usage.map(|usage| usage.allocation_id.0)).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.charged_from()).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.usage.map(|usage| usage.until)).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.usage.map(|usage| usage.cost.get())).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.reason.as_deref()).bind_iter())
            .bind(self.postings().map(|(_, posting)| posting.source.as_ref()?.payment_id.map(|id| id.0)).bind_iter())
            .bind(self.postings().map(|(_, posting)| Some(posting.source.as_ref()?.reference.as_str())).bind_iter())
            .bind(self.names_of(|commit| &commit.claims.added).map(|(ord, ..)| ord).bind_iter())
            .bind(self.names_of(|commit| &commit.claims.added).map(|(.., name)| name).bind_iter())
            .bind(self.names_of(|commit| &commit.claims.dropped).map(|(ord, ..)| ord).bind_iter())
            .bind(self.names_of(|commit| &commit.claims.dropped).map(|(.., name)| name).bind_iter())
            .bind(self.column(|job| job.seal.as_deref()).bind_iter())
            .bind(self.names_of(|commit| &commit.terms.added).map(|(ord, ..)| ord).bind_iter())
            .bind(self.names_of(|commit| &commit.terms.added).map(|(.., term)| term).bind_iter())
            .bind(self.names_of(|commit| &commit.terms.dropped).map(|(ord, ..)| ord).bind_iter())
            .bind(self.names_of(|commit| &commit.terms.dropped).map(|(.., term)| term).bind_iter())
            .bind(self.names_of(|commit| &commit.terms.dropped).map(|(_, entity, _)| entity).bind_iter())
            .bind(self.column(|job| job.command().and_then(|command| command.resolved.as_deref())).bind_iter())
            .bind(self.summands().map(|(ord, _)| ord).bind_iter())
            .bind(self.summands().map(|(_, it)| SumColumns::of(&it.group).sku).bind_iter())
            .bind(self.summands().map(|(_, it)| SumColumns::of(&it.group).sku_name).bind_iter())
            .bind(self.summands().map(|(_, it)| SumColumns::of(&it.group).region).bind_iter())
            .bind(self.summands().map(|(_, it)| SumColumns::of(&it.group).gpus_free).bind_iter())
            .bind(self.summands().map(|(_, it)| SumColumns::of(&it.group).currency).bind_iter())
            .bind(self.summands().map(|(_, it)| SumColumns::of(&it.group).state).bind_iter())
            .bind(self.summands().map(|(_, it)| it.amounts.entities).bind_iter())
            .bind(self.summands().map(|(_, it)| it.amounts.gpus_total).bind_iter())
            .bind(self.summands().map(|(_, it)| it.amounts.gpus_sold).bind_iter())
            .bind(self.summands().map(|(_, it)| it.amounts.gpus_held).bind_iter())
            .bind(self.summands().map(|(_, it)| it.amounts.balance).bind_iter())
            .fetch_all(connection)
            .await
    }

    /// A column of the transitions.
    fn column<'a, T>(&'a self, value: impl Fn(&'a Job) -> T) -> impl Iterator<Item = T> {
        self.jobs.iter().map(value)
    }

    fn audits(&self) -> impl Iterator<Item = ExtraRow<'_, AuditRecord>> {
        (1..).zip(&self.jobs).flat_map(|(ord, job)| extra_rows(ord, job.seq + 1, &job.commit.audit, &job.metadata))
    }

    fn events(&self) -> impl Iterator<Item = ExtraRow<'_, (EventId, Event)>> {
        (1..).zip(&self.jobs).flat_map(|(ord, job)| {
            let first = job.seq + 1 + count(job.commit.audit.len());
            extra_rows(ord, first, &job.commit.outbox, &job.events)
        })
    }

    /// Entities without a timer that may have had one before.
    fn without_timer(&self) -> impl Iterator<Item = Uuid> {
        let rests = |job: &&Job| job.commit.timer.is_none() && job.commit.expected_version > 0;
        self.jobs.iter().filter(rests).map(|job| job.commit.entity.id)
    }

    fn preconditions(&self) -> impl Iterator<Item = (i64, &Precondition)> {
        (1..).zip(&self.jobs).flat_map(|(ord, job)| job.commit.requires.iter().map(move |required| (ord, required)))
    }

    /// The claims or terms of the transitions, each with its transition's index and entity.
    fn names_of(&self, names: impl Fn(&Commit) -> &[String] + Copy) -> impl Iterator<Item = (i64, Uuid, &str)> {
        (1..).zip(&self.jobs).flat_map(move |(ord, job)| {
            names(&job.commit).iter().map(move |name| (ord, job.commit.entity.id, name.as_str()))
        })
    }

    fn postings(&self) -> impl Iterator<Item = (i64, &Posting)> {
        (1..).zip(&self.jobs).flat_map(|(ord, job)| job.commit.postings.iter().map(move |posting| (ord, posting)))
    }

    fn summands(&self) -> impl Iterator<Item = (i64, &Summand)> {
        (1..).zip(&self.jobs).flat_map(|(ord, job)| job.commit.summands.iter().map(move |summand| (ord, summand)))
    }

    /// Without the transitions of entities whose commits were lost: these were decided from a state that the database does not have.
    pub(super) fn without_lost(self, lost: &LostCommits) -> Self {
        let mut jobs = Vec::with_capacity(self.jobs.len());
        for job in self.jobs {
            if lost.has(job.commit.entity.id) {
                let reason =
                    "commits of this entity were lost in a failover; an operator decides how it goes on".to_owned();
                job.answer(CommitOutcome::NotApplied { reason });
            } else {
                jobs.push(job);
            }
        }
        Self { jobs }
    }

    /// Sends every caller its outcome, and returns the events to be published.
    pub(super) fn settle(self, answer: &[PgRow], acknowledged: &mut AcknowledgedCommits) -> Vec<OutboxRow> {
        let mut outcomes: Vec<Option<CommitOutcome>> = vec![None; self.jobs.len()];
        for row in answer {
            let read = read(row).unwrap_or_else(|error| {
                tracing::error!(error = %error, "a row of the store's answer to a batch cannot be read");
                Vec::new()
            });
            for (ord, outcome) in read {
                let place = usize::try_from(ord - 1).unwrap_or(usize::MAX);
                if let Some(slot) = outcomes.get_mut(place) {
                    *slot = Some(outcome);
                }
            }
        }
        let mut published = Vec::new();
        for (job, outcome) in self.jobs.into_iter().zip(outcomes) {
            match outcome {
                Some(CommitOutcome::Applied) => {
                    acknowledged.record(job.acknowledgement());
                    job.into_rows(&mut published);
                }
                Some(outcome) => job.answer(outcome),
                None => job.answer(CommitOutcome::Unknown { reason: "the store's answer cannot be read".to_owned() }),
            }
        }
        published
    }
}

/// A row of the result: indexes in the batch, from 1, and the outcomes of these transitions.
fn read(row: &PgRow) -> Result<Vec<(i64, CommitOutcome)>, sqlx::Error> {
    if let Some(applied) = row.try_get::<Option<Vec<i64>>, _>(0)? {
        return Ok(applied.into_iter().map(|ord| (ord, CommitOutcome::Applied)).collect());
    }
    // Without applied transitions that row is empty.
    let Some(ord) = row.try_get::<Option<i64>, _>(1)? else { return Ok(Vec::new()) };
    // Of `fencing_check` in the statement.
    let outcome = if !row.try_get::<bool, _>(2)? {
        CommitOutcome::Fenced
    } else if let Some(entity) = row.try_get::<Option<Uuid>, _>(3)? {
        CommitOutcome::Duplicate(CompletedCommand { entity, digest: row.try_get(4)?, reply: row.try_get(5)? })
    } else if let Some(names) = row.try_get::<Option<Vec<String>>, _>(6)? {
        CommitOutcome::Claimed { holders: names.into_iter().zip(row.try_get::<Vec<Uuid>, _>(7)?).collect() }
    } else {
        CommitOutcome::Conflict
    };
    Ok(vec![(ord, outcome)])
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX / 2)
}
