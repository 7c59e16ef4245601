//! A thousand random commits against a model that fits on a page.

use crate::test_store::{TestStore, bare, command, create, next};
use domain::commit::{CommandRecord, Commit, CommitOutcome, Epoch};
use domain::id::EventId;
use domain::state_machine::IndexKeys;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// The fault of a commit.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Stale,
    Fenced,
    TakenName,
    UsedCommand,
    BadJson,
}

#[derive(Clone, Debug)]
struct CommitAttempt {
    entity: u32,
    fault: Fault,
    bare: bool,
    consumes: bool,
    rests: bool,
}

#[derive(Default)]
struct Model {
    last: BTreeMap<u32, Commit>,
    history: i64,
    audit: i64,
    outbox: BTreeSet<Uuid>,
    commands: Vec<CommandRecord>,
    deadlines: BTreeSet<u32>,
}

fn tries() -> impl Strategy<Value = Vec<Vec<CommitAttempt>>> {
    let fault = prop_oneof![
        6 => Just(Fault::None), 1 => Just(Fault::Stale), 1 => Just(Fault::Fenced), 1 => Just(Fault::TakenName),
        1 => Just(Fault::UsedCommand), 1 => Just(Fault::BadJson),
    ];
    let one = (fault, any::<bool>(), any::<bool>(), any::<bool>());
    // A round has at most one transition of each of 24 entities.
    let round = prop::collection::btree_map(0..24_u32, one, 1..24).prop_map(|round| {
        let tries = round.into_iter();
        tries
            .map(|(entity, (fault, bare, consumes, rests))| CommitAttempt { entity, fault, bare, consumes, rests })
            .collect()
    });
    prop::collection::vec(round, 1..8)
}

impl Model {
    fn commit(&self, attempt: &CommitAttempt, free: &mut BTreeSet<Uuid>) -> (Commit, &'static str) {
        let mut commit = self.last.get(&attempt.entity).map_or_else(|| create(attempt.entity), next);
        let creates = commit.expected_version == 0;
        commit.keys = IndexKeys { unique_name: Some(format!("name-{}", attempt.entity)), ..IndexKeys::default() };
        if attempt.bare {
            commit = bare(commit);
        }
        if attempt.rests {
            commit.timer = None;
        }
        if let Some(consumed) = attempt.consumes.then(|| free.pop_first()).flatten() {
            commit.command = Some(command(Some(EventId(consumed))));
        }
        let outcome = match attempt.fault {
            Fault::Stale => {
                commit.expected_version += 1;
                "conflict"
            }
            Fault::Fenced => {
                commit.epoch = Epoch(0);
                "fenced"
            }
            // Taken by an entity outside the model.
            Fault::TakenName if creates => {
                commit.keys.unique_name = Some("taken".to_owned());
                "refused"
            }
            Fault::UsedCommand => match self.commands.first() {
                Some(used) => {
                    commit.command = Some(CommandRecord { id: used.id, ..command(None) });
                    "duplicate"
                }
                None => "applied",
            },
            Fault::BadJson => {
                commit.snapshot = "{".to_owned();
                "refused"
            }
            Fault::None | Fault::TakenName => "applied",
        };
        (commit, outcome)
    }

    fn apply(&mut self, entity: u32, commit: Commit) {
        self.history += 1;
        self.audit += i64::try_from(commit.audit.len()).unwrap();
        if let Some(consumed) = commit.command.as_ref().and_then(|command| command.consumes) {
            self.outbox.remove(&consumed.0);
        }
        self.outbox.extend(commit.outbox.iter().map(|(id, _)| id.0));
        self.commands.extend(commit.command.clone());
        if commit.timer.is_some() {
            self.deadlines.insert(entity);
        } else {
            self.deadlines.remove(&entity);
        }
        self.last.insert(entity, commit);
    }
}

async fn play(rounds: Vec<Vec<CommitAttempt>>) {
    let store = TestStore::new().await;
    let taken = Commit {
        keys: IndexKeys { unique_name: Some("taken".to_owned()), ..IndexKeys::default() },
        ..bare(create(9999))
    };
    assert_eq!(store.commit(&taken).await, CommitOutcome::Applied);
    let mut model = Model { history: 1, ..Model::default() };
    for round in rounds {
        let mut free = model.outbox.clone();
        let planned: Vec<_> = round.iter().map(|attempt| model.commit(attempt, &mut free)).collect();
        let commits: Vec<Commit> = planned.iter().map(|(commit, _)| commit.clone()).collect();
        let outcomes = store.commit_all(&commits).await;
        for ((attempt, (commit, expected)), outcome) in round.iter().zip(planned).zip(outcomes) {
            assert_eq!(outcome.into_str(), expected, "{attempt:?}: {outcome:?}");
            if outcome == CommitOutcome::Applied {
                model.apply(attempt.entity, commit);
            }
        }
        let counted = |n: usize| i64::try_from(n).unwrap();
        let expected = [
            counted(model.last.len()) + 1,
            model.history,
            model.audit,
            counted(model.outbox.len()),
            counted(model.commands.len()),
            counted(model.deadlines.len()),
        ];
        assert_eq!(store.rows().await, expected);
        let outbox: BTreeSet<Uuid> =
            sqlx::query_scalar("SELECT id FROM outbox").fetch_all(store.pool()).await.unwrap().into_iter().collect();
        assert_eq!(outbox, model.outbox);
        for commit in model.last.values() {
            let row = store.reads().entity(commit.entity).await.unwrap().unwrap();
            assert_eq!(
                (row.version, row.state.as_str(), &row.body),
                (commit.expected_version + 1, commit.to_state, &commit.snapshot)
            );
        }
    }
    let doubled: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM (SELECT FROM history GROUP BY entity, version HAVING count(*) > 1
         UNION ALL SELECT FROM history GROUP BY shard, epoch, seq HAVING count(*) > 1) AS twice",
    )
    .fetch_one(store.pool())
    .await
    .unwrap();
    assert_eq!(doubled, 0);
}

#[test]
fn stored_rows_match_the_applied_transitions() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // The server runs as long as this database is held.
    let keep = runtime.block_on(local_servers::test_database::TestDatabase::fresh());
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&tries(), |rounds| {
            runtime.block_on(play(rounds));
            Ok(())
        })
        .unwrap();
    drop(keep);
}
