//! Every outcome of a commit, and that nothing is written of a transition that was not applied.

use crate::test_store::{TestStore, at, bare, command, create, event, next};
use domain::commit::{Commit, CommitOutcome, CompletedCommand, Epoch, Precondition, SetChange};
use domain::id::{EntityKind, EventId, MemberId, Shard};
use domain::state_machine::IndexKeys;
use local_servers::test_database::TestDatabase;
use persistence::loader::LoadError;
use persistence::queries::{WaitingFilter, WaitingPosition};
use persistence::snapshot_seal::SealRefusal;
use persistence::{CommitterConfig, Loader, SnapshotSealer};
use secrecy::SecretSlice;
use sqlx::Row;
use std::time::Duration;
use uuid::Uuid;

#[tokio::test]
async fn transition_is_committed_with_all_its_rows() {
    let mut store = TestStore::new().await;
    let commit = create(1);
    assert_eq!(store.commit(&commit).await, CommitOutcome::Applied);
    assert_eq!(store.rows().await, [1; 6]);

    let row = store.reads().entity(commit.entity).await.unwrap().unwrap();
    assert_eq!((row.version, row.state.as_str(), row.created_at, row.updated_at), (1, "draft", commit.at, commit.at));
    assert_eq!(row.body, commit.snapshot);
    let history = store.reads().history(commit.entity.id, None, 10).await.unwrap().items;
    assert_eq!(history.len(), 1);
    assert_eq!((history[0].version, history[0].epoch, history[0].seq), (1, Epoch(1), 1));
    assert_eq!(history[0].command_id, commit.command.as_ref().map(|command| command.id));
    let audit = store.reads().audit(&Default::default(), None, 10).await.unwrap().items;
    assert_eq!((audit[0].action.as_str(), audit[0].place.seq, audit[0].actor.as_str()), ("skus.create", 2, "user:ann"));
    let waiting = store.waiting(commit.entity).await;
    assert_eq!(
        (waiting.deadline_at, waiting.reason.as_deref()),
        (commit.timer.unwrap().deadline_at, Some("an approval"))
    );

    // The relay receives exactly what a poll of the table would read.
    let published = store.published.recv().await.unwrap();
    assert_eq!(published.seq, 3);
    assert_eq!(
        [published].as_slice(),
        store.reads().orphaned_events(&[commit.shard], Duration::ZERO, &[], 10).await.unwrap().rows
    );

    let command = commit.command.unwrap();
    let stored = store.reads().idempotency_records().find(command.id).await.unwrap().unwrap();
    assert_eq!((stored.digest, &stored.resolved, &stored.answer), (command.digest, &command.resolved, &None));
    let reply = store.reads().reply_at(commit.entity.id, 1).await.unwrap();
    assert_eq!((&reply, &stored.reply), (&command.reply, &command.reply));
    assert_eq!(store.reads().reply_at(commit.entity.id, 2).await.unwrap(), None, "there is no such version");

    let subject: String = sqlx::query_scalar("SELECT subject FROM outbox").fetch_one(store.pool()).await.unwrap();
    assert_eq!(subject, "sku.state_changed");
}

#[tokio::test]
async fn the_next_transition_raises_the_version_and_moves_the_deadline() {
    let store = TestStore::new().await;
    let first = create(1);
    let second = Commit {
        timer: first.timer.clone().map(|timer| domain::commit::Timer { wake_at: at(99), ..timer }),
        ..next(&first)
    };
    assert_eq!(store.commit(&first).await, CommitOutcome::Applied);
    assert_eq!(store.commit(&second).await, CommitOutcome::Applied);
    let row = store.reads().entity(first.entity).await.unwrap().unwrap();
    assert_eq!((row.version, row.state.as_str(), row.body.as_str()), (2, "active", r#"{"version": 2}"#));
    assert_eq!(store.waiting(first.entity).await.wake_at, second.timer.as_ref().map(|timer| timer.wake_at));

    // A state without a timer has no deadline row.
    assert_eq!(store.commit(&Commit { timer: None, ..next(&second) }).await, CommitOutcome::Applied);
    let resting = store.waiting(first.entity).await;
    assert_eq!((resting.wake_at, resting.deadline_at, resting.reason), (None, None, None));
    assert_eq!(store.reads().history(first.entity.id, None, 10).await.unwrap().items.len(), 3);
}

#[tokio::test]
async fn pages_of_waiting_entities_have_each_once_the_nearest_deadline_first() {
    let store = TestStore::new().await;
    let commits: Vec<_> = (1..=9).map(create).collect();
    let [soon, later, last] = [98, 99, 100].map(|deadline| Some(at(deadline)));
    let deadlines = [last, last, later, later, soon, soon, None, None, None];
    for (commit, deadline_at) in commits.iter().zip(deadlines) {
        let timer = commit.timer.clone().map(|timer| domain::commit::Timer { deadline_at, ..timer });
        assert_eq!(store.commit(&Commit { timer, ..commit.clone() }).await, CommitOutcome::Applied);
    }
    let kind = Some(commits[0].entity.kind);
    let whole = store.reads().waiting(&WaitingFilter { kind, ..WaitingFilter::default() }, 100).await.unwrap();
    let listed: Vec<_> = whole.iter().map(|row| row.deadline_at).collect();
    assert_eq!(listed, [soon, soon, later, later, last, last, None, None, None]);
    for size in 1..=4 {
        let (mut paged, mut after) = (Vec::new(), None);
        loop {
            let page =
                store.reads().waiting(&WaitingFilter { kind, after, ..WaitingFilter::default() }, size).await.unwrap();
            let Some(row) = page.last() else { break };
            after = Some(WaitingPosition { deadline_at: row.deadline_at, id: row.entity.id });
            paged.extend(page);
        }
        assert_eq!(paged, whole, "pages of {size}");
    }
}

#[tokio::test]
async fn another_version_is_a_conflict_and_writes_nothing() {
    let store = TestStore::new().await;
    let first = create(1);
    store.commit(&first).await;
    let before = store.rows().await;
    let repeated = Commit { command: Some(command(None)), ..first.clone() };
    assert_eq!(store.commit(&repeated).await, CommitOutcome::Conflict, "created twice");
    let stale = Commit { expected_version: 7, ..next(&first) };
    assert_eq!(store.commit(&stale).await, CommitOutcome::Conflict);
    let nowhere = Commit { expected_version: 1, ..next(&create(2)) };
    assert_eq!(store.commit(&nowhere).await, CommitOutcome::Conflict, "never created");
    let mut foreign = next(&first);
    foreign.entity.kind = EntityKind::Node;
    assert_eq!(store.commit(&foreign).await, CommitOutcome::Conflict, "another kind under the id");
    assert_eq!(store.rows().await, before);
    assert_eq!((store.counted("applied"), store.counted("conflict")), (1, 4));
}

#[tokio::test]
async fn precondition_holds_only_while_the_other_entity_has_its_version() {
    let store = TestStore::new().await;
    let right = create(1);
    store.commit(&right).await;
    let on = |version: i64| vec![Precondition { entity: right.entity.id, version }];
    let before = store.rows().await;
    for gone in [on(0), on(2), vec![Precondition { entity: Uuid::new_v4(), version: 1 }], [on(1), on(2)].concat()] {
        assert_eq!(store.commit(&Commit { requires: gone, ..create(2) }).await, CommitOutcome::Conflict);
    }
    assert_eq!(store.rows().await, before);
    assert_eq!(store.commit(&Commit { requires: on(1), ..create(2) }).await, CommitOutcome::Applied);
    store.commit(&next(&right)).await;
    assert_eq!(store.commit(&Commit { requires: on(1), ..create(3) }).await, CommitOutcome::Conflict);
    // In one batch with others, it fails alone.
    let together = [create(4), Commit { requires: on(1), ..create(5) }, Commit { requires: on(2), ..create(6) }];
    let outcomes = store.commit_all(&together).await;
    assert_eq!(outcomes, [CommitOutcome::Applied, CommitOutcome::Conflict, CommitOutcome::Applied]);
}

fn seals() -> SnapshotSealer {
    SnapshotSealer::new(&SecretSlice::from(vec![7; 32]), None).unwrap()
}

#[tokio::test]
async fn altered_row_is_not_loaded_for_a_decision() {
    let store = TestStore::with(TestDatabase::fresh().await, |config| config.seals = Some(seals())).await;
    let snapshot = r#"{"keys": ["a"], "share": 2.50, "big": 1e16, "tiny": 1e-7, "text": "\u00e4 \" \\"}"#.to_owned();
    let keys = IndexKeys { unique_name: Some("h100".to_owned()), ..IndexKeys::default() };
    let (first, other) = (Commit { snapshot, keys, ..create(1) }, create(2));
    assert_eq!(
        store.commit_all(&[first.clone(), other.clone()]).await,
        [CommitOutcome::Applied, CommitOutcome::Applied]
    );
    let reads = store.reads().sealed(seals());
    let second = next(&first);
    assert_eq!(reads.snapshot(first.entity).await.unwrap().unwrap().version, 1);
    assert_eq!(store.commit(&second).await, CommitOutcome::Applied);
    assert_eq!(reads.snapshot(first.entity).await.unwrap().unwrap().version, 2);
    for (altered, why) in [
        ("UPDATE entity SET body = jsonb_set(body, '{version}', '7') WHERE id = $1", SealRefusal::Altered),
        ("UPDATE entity SET version = 3 WHERE id = $1", SealRefusal::Unsealed),
        ("UPDATE entity SET seal = NULL WHERE id = $1", SealRefusal::Unsealed),
    ] {
        let before: (serde_json::Value, i64, Option<Vec<u8>>) =
            sqlx::query_as("SELECT body, version, seal FROM entity WHERE id = $1")
                .bind(first.entity.id)
                .fetch_one(store.pool())
                .await
                .unwrap();
        sqlx::query(altered).bind(first.entity.id).execute(store.pool()).await.unwrap();
        assert_eq!(reads.snapshot(first.entity).await.unwrap_err().seal_refused(), Some(why), "{altered}");
        assert_eq!(reads.entity(first.entity).await.unwrap_err().seal_refused(), Some(why), "{altered}");
        for key in ["h100", &first.entity.id.to_string()] {
            let found = reads.find_by_name(first.entity.kind, key).await;
            assert_eq!(found.unwrap_err().seal_refused(), Some(why), "{altered}");
        }
        // No other load of the same query fails.
        let loader = Loader::start(&reads);
        let (refused, read) = tokio::join!(loader.load(first.entity), loader.load(other.entity));
        assert!(matches!(refused, Err(LoadError::Store(error)) if error.seal_refused() == Some(why)), "{altered}");
        assert_eq!(read.unwrap().unwrap().version, 1);
        sqlx::query("UPDATE entity SET body = $2, version = $3, seal = $4 WHERE id = $1")
            .bind(first.entity.id)
            .bind(before.0)
            .bind(before.1)
            .bind(before.2)
            .execute(store.pool())
            .await
            .unwrap();
        assert_eq!(reads.snapshot(first.entity).await.unwrap().unwrap().version, 2, "put back");
    }
}

#[tokio::test]
async fn operator_seals_rows_of_an_older_release_and_single_entities() {
    let old = TestStore::new().await;
    let commits: Vec<Commit> = (0..7).map(create).collect();
    old.commit_all(&commits).await;
    let reads = old.reads().sealed(seals());
    assert_eq!(reads.snapshot(commits[0].entity).await.unwrap_err().seal_refused(), Some(SealRefusal::Unsealed));
    assert_eq!(seals().adopt(old.pool(), None).await.unwrap(), 7);
    assert_eq!(seals().adopt(old.pool(), None).await.unwrap(), 0);
    assert!(reads.snapshot(commits[0].entity).await.is_ok());
    let altered = commits[1].entity;
    sqlx::query("UPDATE entity SET body = '{}' WHERE id = $1").bind(altered.id).execute(old.pool()).await.unwrap();
    assert_eq!(seals().adopt(old.pool(), None).await.unwrap(), 0, "what was altered is not sealed with the others");
    assert_eq!(reads.snapshot(altered).await.unwrap_err().seal_refused(), Some(SealRefusal::Altered));
    assert_eq!(seals().adopt(old.pool(), Some(altered.id)).await.unwrap(), 1);
    assert!(reads.snapshot(altered).await.is_ok());
}

fn claims(names: &[&str]) -> SetChange {
    SetChange { added: names.iter().map(|name| (*name).to_owned()).collect(), dropped: Vec::new() }
}

#[tokio::test]
async fn name_that_another_entity_claims_is_refused_with_its_holder_until_it_is_dropped() {
    let store = TestStore::new().await;
    let first = Commit { claims: claims(&["gpu/a", "gpu/b"]), ..create(1) };
    assert_eq!(store.commit(&first).await, CommitOutcome::Applied);
    let before = store.rows().await;
    let second = Commit { claims: claims(&["gpu/b", "gpu/c"]), ..create(2) };
    let holders = [("gpu/b".to_owned(), first.entity.id)].into();
    assert_eq!(store.commit(&second).await, CommitOutcome::Claimed { holders });
    assert_eq!(store.rows().await, before);
    // An entity may claim again what it holds, and what it drops is free.
    let dropped = SetChange { added: vec!["gpu/a".to_owned()], dropped: vec!["gpu/b".to_owned()] };
    assert_eq!(store.commit(&Commit { claims: dropped, ..next(&first) }).await, CommitOutcome::Applied);
    assert_eq!(store.commit(&second).await, CommitOutcome::Applied);
    // No entity drops another's claim.
    let foreign = SetChange { added: Vec::new(), dropped: vec!["gpu/a".to_owned()] };
    assert_eq!(store.commit(&Commit { claims: foreign, ..next(&second) }).await, CommitOutcome::Applied);
    let held: Vec<(String, Uuid)> =
        sqlx::query_as("SELECT name, entity FROM claim ORDER BY name").fetch_all(store.pool()).await.unwrap();
    let [one, two] = [first.entity.id, second.entity.id];
    assert_eq!(held, [("gpu/a".to_owned(), one), ("gpu/b".to_owned(), two), ("gpu/c".to_owned(), two)]);
}

#[tokio::test]
async fn terms_of_an_entity_are_those_that_its_commits_added_and_did_not_drop() {
    let store = TestStore::new().await;
    let change = |added: &[&str], dropped: &[&str]| SetChange { dropped: claims(dropped).added, ..claims(added) };
    let first = Commit { terms: change(&["name/a", "label/env"], &[]), ..create(1) };
    let second = Commit { terms: change(&["label/env"], &[]), ..create(2) };
    let outcomes = store.commit_all(&[first.clone(), second.clone()]).await;
    assert_eq!(outcomes, [CommitOutcome::Applied, CommitOutcome::Applied]);
    // At another version nothing of it is written.
    let stale = Commit { terms: change(&["name/stale"], &["label/env"]), ..first.clone() };
    assert_ne!(store.commit(&stale).await, CommitOutcome::Applied);
    let renamed = Commit { terms: change(&["name/b"], &["name/a", "label/never"]), ..next(&first) };
    assert_eq!(store.commit(&renamed).await, CommitOutcome::Applied);
    let repeated = Commit { terms: change(&["label/env"], &[]), ..next(&second) };
    assert_eq!(store.commit(&repeated).await, CommitOutcome::Applied, "what is there already");
    let terms: Vec<(Uuid, String)> =
        sqlx::query_as("SELECT entity, term FROM term ORDER BY entity, term").fetch_all(store.pool()).await.unwrap();
    let expected = [(&first, "label/env"), (&first, "name/b"), (&second, "label/env")];
    let mut expected = expected.map(|(commit, term)| (commit.entity.id, term.to_owned()));
    expected.sort();
    assert_eq!(terms, expected);
}

#[tokio::test]
async fn claims_of_one_name_at_once_leave_one_holder() {
    let store = TestStore::new().await;
    for round in 0..20_u32 {
        let name = format!("gpu/{round}");
        // Some are in one batch, the others in two lanes.
        let commits: Vec<_> =
            (0..8).map(|n| Commit { claims: claims(&[&name]), ..create(1000 + round * 8 + n) }).collect();
        let outcomes = store.commit_all(&commits).await;
        let won: Vec<_> = (0..8).filter(|n| outcomes[*n] == CommitOutcome::Applied).collect();
        let [winner] = won.as_slice() else { panic!("{outcomes:?}") };
        let holders = [(name, commits[*winner].entity.id)].into();
        let notified = CommitOutcome::Claimed { holders };
        assert!((0..8).all(|n| n == *winner || outcomes[n] == notified), "{outcomes:?}");
    }
}

#[tokio::test]
async fn commit_waits_for_an_uncommitted_change_of_its_precondition() {
    let store = TestStore::new().await;
    let right = create(1);
    store.commit(&right).await;
    let requires = vec![Precondition { entity: right.entity.id, version: 1 }];
    // Another member revokes the right and has not committed yet.
    let mut revoking = store.pool().begin().await.unwrap();
    sqlx::query("UPDATE entity SET version = version + 1 WHERE id = $1")
        .bind(right.entity.id)
        .execute(&mut *revoking)
        .await
        .unwrap();
    let committer = store.committer.clone();
    let acting = tokio::spawn(async move { committer.commit(Commit { requires, ..create(2) }).await });
    store.until_blocked(1).await;
    revoking.commit().await.unwrap();
    assert_eq!(acting.await.unwrap(), CommitOutcome::Conflict);
}

#[tokio::test]
async fn a_command_id_counts_once_and_answers_with_the_first_reply() {
    let store = TestStore::new().await;
    let first = create(1);
    store.commit(&first).await;
    let before = store.rows().await;
    let repeated = Commit { command: first.command.clone(), ..next(&first) };
    let done = CompletedCommand { entity: first.entity.id, digest: [7; 32], reply: Some(r#"{"ok": true}"#.to_owned()) };
    assert_eq!(store.commit(&repeated).await, CommitOutcome::Duplicate(done.clone()));
    assert_eq!(store.reads().command(first.command.as_ref().unwrap().id).await.unwrap(), Some(done.clone()));
    // Also where it is used for another entity of another shard.
    let elsewhere = Commit { command: first.command.clone(), ..create(2) };
    assert_eq!(store.commit(&elsewhere).await, CommitOutcome::Duplicate(done));
    assert_eq!(store.rows().await, before);
}

#[tokio::test]
async fn concurrent_uses_of_a_command_id_apply_once() {
    let store = TestStore::new().await;
    let command = command(None);
    let commits: Vec<Commit> = (0..40).map(|n| Commit { command: Some(command.clone()), ..create(n) }).collect();
    let outcomes = store.commit_all(&commits).await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == CommitOutcome::Applied).count(), 1);
    assert_eq!(outcomes.iter().filter(|outcome| matches!(outcome, CommitOutcome::Duplicate(_))).count(), 39);
    assert_eq!(store.rows().await, [1; 6]);
}

#[tokio::test]
async fn commit_under_another_owner_or_epoch_is_fenced() {
    let store = TestStore::new().await;
    let old = Commit { epoch: Epoch(0), ..create(1) };
    assert_eq!(store.commit(&old).await, CommitOutcome::Fenced, "an older epoch");
    assert_eq!(store.commit(&Commit { epoch: Epoch(2), ..create(1) }).await, CommitOutcome::Fenced, "a newer epoch");
    let other = MemberId(Uuid::new_v4());
    store.cluster().handover(store.me, Some(other), &[(Shard(1), Epoch(1))]).await.unwrap();
    assert_eq!(store.commit(&create(1)).await, CommitOutcome::Fenced, "handed over");
    assert_eq!(store.commit(&Commit { epoch: Epoch(2), ..create(1) }).await, CommitOutcome::Fenced, "another's epoch");
    assert_eq!(store.rows().await, [0; 6]);
    assert_eq!(store.commit(&create(2)).await, CommitOutcome::Applied, "the other shards are untouched");
}

#[tokio::test]
async fn fenced_stale_and_repeated_transitions_fail_alone_in_their_batch() {
    let store = TestStore::new().await;
    let old = create(3);
    store.commit(&old).await;
    let holder = store.hold_shards().await;
    let commits = [
        create(1),
        Commit { epoch: Epoch(0), ..create(5) },
        Commit { command: Some(command(None)), ..old.clone() },
        Commit { command: old.command.clone(), ..create(7) },
        create(9),
    ];
    let outcomes = {
        let all = store.commit_all(&commits);
        let release = async {
            store.until_blocked(1).await;
            holder.rollback().await.unwrap();
        };
        futures::future::join(all, release).await.0
    };
    assert_eq!(outcomes[0], CommitOutcome::Applied);
    assert_eq!(outcomes[1], CommitOutcome::Fenced);
    assert_eq!(outcomes[2], CommitOutcome::Conflict);
    assert!(matches!(outcomes[3], CommitOutcome::Duplicate(_)));
    assert_eq!(outcomes[4], CommitOutcome::Applied);
    assert_eq!(store.rows().await, [3; 6]);
}

#[tokio::test]
async fn transition_waits_for_at_most_one_batch_of_patient_ones() {
    let one_worker = |config: &mut CommitterConfig| (config.workers, config.batch) = (1, 16);
    let store = TestStore::with(TestDatabase::fresh().await, one_worker).await;
    let patient = |n| Commit { patient: true, ..create(n) };
    let first = patient(0);
    let holder = store.hold_shards().await;
    let held = async {
        store.until_blocked(1).await;
        let many: Vec<_> = (1..=160).map(patient).chain([create(500)]).collect();
        let release = async {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            holder.rollback().await.unwrap();
        };
        futures::join!(store.commit_all(&many), release).0
    };
    let (outcome, outcomes) = futures::join!(store.commit(&first), held);
    assert!(outcomes.into_iter().chain([outcome]).all(|outcome| outcome == CommitOutcome::Applied));
    assert_eq!(store.rows().await, [162; 6]);
    // Compared by the transactions that wrote them: the order of the responses depends on the machine's load.
    let before: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM entity
         WHERE xmin::text::bigint < (SELECT xmin::text::bigint FROM entity WHERE id = $1)",
    )
    .bind(create(500).entity.id)
    .fetch_one(store.pool())
    .await
    .unwrap();
    assert!((1..=17).contains(&before), "{before} were written before it");
}

#[tokio::test]
async fn taken_name_is_refused_alone_and_the_rest_of_its_batch_commits() {
    let store = TestStore::new().await;
    let named = |n: u32, name: &str| Commit {
        keys: IndexKeys { unique_name: Some(name.to_owned()), ..IndexKeys::default() },
        ..create(n)
    };
    assert_eq!(store.commit(&named(1000, "h100")).await, CommitOutcome::Applied);
    let mut commits: Vec<Commit> = (0..200).map(|n| named(n, &format!("sku-{n}"))).collect();
    for n in [3, 77, 150] {
        commits[n] = named(u32::try_from(n).unwrap(), "h100");
    }
    let outcomes = store.commit_all(&commits).await;
    for (n, outcome) in outcomes.iter().enumerate() {
        if [3, 77, 150].contains(&n) {
            assert_eq!(*outcome, CommitOutcome::Refused { constraint: "entity_unique_name".to_owned() });
        } else {
            assert_eq!(*outcome, CommitOutcome::Applied, "{n}");
        }
    }
    assert_eq!(store.rows().await, [198; 6]);
}

#[tokio::test]
async fn value_out_of_range_is_refused_alone() {
    let store = TestStore::new().await;
    let mut commits: Vec<Commit> = (0..20).map(create).collect();
    commits[4].why = "a \0 byte".to_owned();
    commits[9].snapshot = r#"{"name": "\u0000"}"#.to_owned();
    commits[15].snapshot = "{not json".to_owned();
    let outcomes = store.commit_all(&commits).await;
    for (n, outcome) in outcomes.iter().enumerate() {
        assert_eq!(matches!(outcome, CommitOutcome::Refused { .. }), [4, 9, 15].contains(&n), "{n}: {outcome:?}");
    }
    assert_eq!(store.rows().await, [17; 6]);
}

#[tokio::test]
async fn concurrent_creations_of_an_entity_leave_one() {
    let store = TestStore::new().await;
    let commits: Vec<Commit> = (0..20).map(|_| create(1)).collect();
    let outcomes = store.commit_all(&commits).await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == CommitOutcome::Applied).count(), 1);
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == CommitOutcome::Conflict).count(), 19);
    assert_eq!(store.rows().await, [1; 6]);
}

#[tokio::test]
async fn a_second_transition_of_an_entity_waits_for_the_next_batch() {
    let store = TestStore::new().await;
    let chain = {
        let mut chain = vec![create(1)];
        for _ in 0..5 {
            let following = next(chain.last().unwrap());
            chain.push(following);
        }
        chain
    };
    let holder = store.hold_shards().await;
    let all = async {
        // In the order of the mailbox, without waiting for outcomes.
        let mut answers = Vec::new();
        for commit in &chain {
            let mut answer = Box::pin(store.commit(commit));
            assert!(futures::poll!(&mut answer).is_pending());
            answers.push(answer);
        }
        store.until_blocked(1).await;
        holder.rollback().await.unwrap();
        futures::future::join_all(answers).await
    };
    assert_eq!(all.await, vec![CommitOutcome::Applied; 6]);
    assert_eq!(store.batches(), (6, 6.0), "one statement for each");
    assert_eq!(store.reads().entity(chain[0].entity).await.unwrap().unwrap().version, 6);
}

#[tokio::test]
async fn waiting_transitions_are_committed_in_one_batch() {
    let store = TestStore::new().await;
    let holder = store.hold_shards().await;
    // One shard, so one worker: the first goes alone and is blocked, the rest fills the next batches.
    let commits: Vec<Commit> = (0..1000).map(|n| create(n * 256)).collect();
    let all = async {
        let release = async {
            store.until_blocked(1).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
            holder.rollback().await.unwrap();
        };
        futures::future::join(store.commit_all(&commits), release).await.0
    };
    assert!(all.await.iter().all(|outcome| *outcome == CommitOutcome::Applied));
    let (statements, transitions) = store.batches();
    assert!(statements <= 3 && transitions == 1000.0, "{statements} statements for {transitions} transitions");
    assert_eq!(store.rows().await, [1000; 6]);
}

#[tokio::test]
async fn a_batch_of_512_changes_commits_whole() {
    let store = TestStore::new().await;
    let created: Vec<Commit> = (0..512).map(|n| create(n * 2)).collect();
    assert!(store.commit_all(&created).await.iter().all(|outcome| *outcome == CommitOutcome::Applied));
    let changed: Vec<Commit> = created.iter().map(next).collect();
    assert!(store.commit_all(&changed).await.iter().all(|outcome| *outcome == CommitOutcome::Applied));
    assert_eq!(store.rows().await, [512, 1024, 1024, 1024, 1024, 512]);
    let versions: (i64, i64) =
        sqlx::query_as("SELECT min(version), max(version) FROM entity").fetch_one(store.pool()).await.unwrap();
    assert_eq!(versions, (2, 2));
}

#[tokio::test]
async fn consumed_event_is_deleted_with_its_reaction_and_only_with_it() {
    let store = TestStore::new().await;
    let cause = create(1);
    store.commit(&cause).await;
    let consumed = Some(cause.outbox[0].0);
    let stale = Commit { expected_version: 5, command: Some(command(consumed)), ..bare(next(&create(2))) };
    assert_eq!(store.commit(&stale).await, CommitOutcome::Conflict);
    assert_eq!(store.count("outbox").await, 1, "an effect that did not pass leaves its cause");
    let effect = Commit { command: Some(command(consumed)), ..bare(create(2)) };
    assert_eq!(store.commit(&effect).await, CommitOutcome::Applied);
    assert_eq!(store.count("outbox").await, 0);
}

#[tokio::test]
async fn numbers_rise_in_the_order_of_commits_within_each_epoch() {
    let store = TestStore::new().await;
    for round in 0..3_u32 {
        let commits: Vec<Commit> = (0..50).map(|n| create((round * 50 + n) * 256)).collect();
        store.commit_all(&commits).await;
    }
    // Sequence numbers of one transition are consecutive, and a later transaction has only higher ones.
    let rows = sqlx::query("SELECT seq, xmin::text::bigint AS tx FROM outbox ORDER BY seq")
        .fetch_all(store.pool())
        .await
        .unwrap();
    let numbers: Vec<i64> = rows.iter().map(|row| row.get("seq")).collect();
    assert_eq!(numbers, (0..150).map(|n| 3 * n + 3).collect::<Vec<_>>());
    let transactions: Vec<i64> = rows.iter().map(|row| row.get("tx")).collect();
    assert!(transactions.is_sorted());

    let back = store.cluster();
    let epochs = back.handover(store.me, Some(store.me), &[(Shard(0), Epoch(1))]).await.unwrap();
    assert_eq!(epochs[&Shard(0)], Epoch(2));
    assert_eq!(store.commit(&Commit { epoch: Epoch(2), ..create(999_936) }).await, CommitOutcome::Applied);
    let first: i64 =
        sqlx::query_scalar("SELECT min(seq) FROM history WHERE epoch = 2").fetch_one(store.pool()).await.unwrap();
    assert_eq!(first, 1);
}

#[tokio::test]
async fn transition_may_have_many_events_or_none() {
    let store = TestStore::new().await;
    let mut talkative = create(1);
    talkative.outbox = (0..5).map(|_| (EventId(Uuid::now_v7()), event(talkative.entity.id))).collect();
    talkative.audit = talkative.audit.iter().cycle().take(3).cloned().collect();
    assert_eq!(store.commit_all(&[talkative, bare(create(2))]).await, vec![CommitOutcome::Applied; 2]);
    assert_eq!(store.rows().await, [2, 2, 3, 5, 1, 1]);
    let seqs: Vec<i64> =
        sqlx::query_scalar("SELECT seq FROM outbox ORDER BY seq").fetch_all(store.pool()).await.unwrap();
    assert_eq!(seqs, [5, 6, 7, 8, 9]);
}

#[tokio::test]
async fn events_over_the_bound_of_the_relay_are_left_to_the_outbox_poll() {
    let db = local_servers::test_database::TestDatabase::fresh().await;
    let store = TestStore::with(db, |_| {}).await;
    let commits: Vec<Commit> = (0..1100).map(|n| create(n * 256)).collect();
    // Whatever the batch size: the bound of 1000 is one of events.
    assert_eq!(store.commit_all(&commits).await, vec![CommitOutcome::Applied; 1100]);
    assert_eq!(store.published.len(), 1000);
    assert_eq!(store.reads().orphaned_events(&[Shard(0)], Duration::ZERO, &[], 2000).await.unwrap().rows.len(), 1100);
}
