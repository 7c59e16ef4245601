//! Every outcome of a commit, and that nothing is written beside a transition that did not pass.

use crate::postgres::Database;
use crate::world::{World, at, bare, command, create, event, next};
use domain::commit::{Commit, Done, Epoch, Footing, Outcome, SetChange};
use domain::id::{EventId, Kind, MemberId, Shard};
use domain::machine::Keys;
use persistence::loader::LoadError;
use persistence::seal::Refused;
use persistence::{CommitterConfig, Loader, Seals};
use secrecy::SecretSlice;
use sqlx::Row;
use std::time::Duration;
use uuid::Uuid;

#[tokio::test]
async fn a_transition_is_written_with_everything_beside_it() {
    let mut world = World::new().await;
    let commit = create(1);
    assert_eq!(world.commit(&commit).await, Outcome::Applied);
    assert_eq!(world.rows().await, [1; 6]);

    let row = world.reads().entity(commit.entity).await.unwrap().unwrap();
    assert_eq!((row.version, row.state.as_str(), row.created_at, row.updated_at), (1, "draft", commit.at, commit.at));
    assert_eq!(row.body, commit.snapshot);
    let history = world.reads().history(commit.entity.id, None, 10).await.unwrap().items;
    assert_eq!(history.len(), 1);
    assert_eq!((history[0].version, history[0].epoch, history[0].seq), (1, Epoch(1), 1));
    assert_eq!(history[0].command_id, commit.command.as_ref().map(|command| command.id));
    let audit = world.reads().audit(&Default::default(), None, 10).await.unwrap().items;
    assert_eq!((audit[0].action.as_str(), audit[0].place.seq, audit[0].actor.as_str()), ("skus.create", 2, "user:ann"));
    let waiting = world.waiting(commit.entity).await;
    assert_eq!(
        (waiting.deadline_at, waiting.reason.as_deref()),
        (commit.timer.unwrap().deadline_at, Some("an approval"))
    );

    // The relay is handed exactly what a poll of the table would read.
    let published = world.published.recv().await.unwrap();
    assert_eq!(published.seq, 3);
    assert_eq!(
        [published].as_slice(),
        world.reads().orphans(&[commit.shard], Duration::ZERO, &[], 10).await.unwrap().rows
    );

    let subject: String = sqlx::query_scalar("SELECT subject FROM outbox").fetch_one(world.pool()).await.unwrap();
    assert_eq!(subject, "sku.state_changed");
}

#[tokio::test]
async fn the_next_transition_raises_the_version_and_moves_the_deadline() {
    let world = World::new().await;
    let first = create(1);
    let second = Commit {
        timer: first.timer.clone().map(|timer| domain::commit::Timer { wake_at: at(99), ..timer }),
        ..next(&first)
    };
    assert_eq!(world.commit(&first).await, Outcome::Applied);
    assert_eq!(world.commit(&second).await, Outcome::Applied);
    let row = world.reads().entity(first.entity).await.unwrap().unwrap();
    assert_eq!((row.version, row.state.as_str(), row.body.as_str()), (2, "active", r#"{"version": 2}"#));
    assert_eq!(world.waiting(first.entity).await.wake_at, second.timer.as_ref().map(|timer| timer.wake_at));

    // A state that waits for nothing has no deadline.
    assert_eq!(world.commit(&Commit { timer: None, ..next(&second) }).await, Outcome::Applied);
    let resting = world.waiting(first.entity).await;
    assert_eq!((resting.wake_at, resting.deadline_at, resting.reason), (None, None, None));
    assert_eq!(world.reads().history(first.entity.id, None, 10).await.unwrap().items.len(), 3);
}

#[tokio::test]
async fn another_version_is_a_conflict_and_writes_nothing() {
    let world = World::new().await;
    let first = create(1);
    world.commit(&first).await;
    let before = world.rows().await;
    let again = Commit { command: Some(command(None)), ..first.clone() };
    assert_eq!(world.commit(&again).await, Outcome::Conflict, "created twice");
    let stale = Commit { expected_version: 7, ..next(&first) };
    assert_eq!(world.commit(&stale).await, Outcome::Conflict);
    let nowhere = Commit { expected_version: 1, ..next(&create(2)) };
    assert_eq!(world.commit(&nowhere).await, Outcome::Conflict, "never created");
    let mut foreign = next(&first);
    foreign.entity.kind = Kind::Node;
    assert_eq!(world.commit(&foreign).await, Outcome::Conflict, "another kind under the id");
    assert_eq!(world.rows().await, before);
    assert_eq!((world.counted("applied"), world.counted("conflict")), (1, 4));
}

#[tokio::test]
async fn what_rests_on_another_passes_only_while_the_other_is_as_it_was_read() {
    let world = World::new().await;
    let right = create(1);
    world.commit(&right).await;
    let on = |version: i64| vec![Footing { entity: right.entity.id, version }];
    let before = world.rows().await;
    for gone in [on(0), on(2), vec![Footing { entity: Uuid::new_v4(), version: 1 }], [on(1), on(2)].concat()] {
        assert_eq!(world.commit(&Commit { rests_on: gone, ..create(2) }).await, Outcome::Conflict);
    }
    assert_eq!(world.rows().await, before);
    assert_eq!(world.commit(&Commit { rests_on: on(1), ..create(2) }).await, Outcome::Applied);
    world.commit(&next(&right)).await;
    assert_eq!(world.commit(&Commit { rests_on: on(1), ..create(3) }).await, Outcome::Conflict);
    // In one batch with others, it falls alone.
    let together = [create(4), Commit { rests_on: on(1), ..create(5) }, Commit { rests_on: on(2), ..create(6) }];
    let outcomes = world.commit_all(&together).await;
    assert_eq!(outcomes, [Outcome::Applied, Outcome::Conflict, Outcome::Applied]);
}

fn seals() -> Seals {
    Seals::new(&SecretSlice::from(vec![7; 32]), None).unwrap()
}

#[tokio::test]
async fn row_that_is_altered_beside_the_committer_is_not_read_to_be_decided_from() {
    let world = World::with(Database::fresh().await, |config| config.seals = Some(seals())).await;
    let snapshot = r#"{"keys": ["a"], "share": 2.50, "big": 1e16, "tiny": 1e-7, "text": "\u00e4 \" \\"}"#.to_owned();
    let (first, other) = (Commit { snapshot, ..create(1) }, create(2));
    assert_eq!(world.commit_all(&[first.clone(), other.clone()]).await, [Outcome::Applied, Outcome::Applied]);
    let reads = world.reads().sealed(seals());
    let second = next(&first);
    assert_eq!(reads.snapshot(first.entity).await.unwrap().unwrap().version, 1);
    assert_eq!(world.commit(&second).await, Outcome::Applied);
    assert_eq!(reads.snapshot(first.entity).await.unwrap().unwrap().version, 2);
    for (altered, why) in [
        ("UPDATE entity SET body = jsonb_set(body, '{version}', '7') WHERE id = $1", Refused::Altered),
        ("UPDATE entity SET version = 3 WHERE id = $1", Refused::Unsealed),
        ("UPDATE entity SET seal = NULL WHERE id = $1", Refused::Unsealed),
    ] {
        let before: (serde_json::Value, i64, Option<Vec<u8>>) =
            sqlx::query_as("SELECT body, version, seal FROM entity WHERE id = $1")
                .bind(first.entity.id)
                .fetch_one(world.pool())
                .await
                .unwrap();
        sqlx::query(altered).bind(first.entity.id).execute(world.pool()).await.unwrap();
        assert_eq!(reads.snapshot(first.entity).await.unwrap_err().seal_refused(), Some(why), "{altered}");
        // It takes no other with it that is loaded in the same query.
        let loader = Loader::start(&reads);
        let (refused, read) = tokio::join!(loader.load(first.entity), loader.load(other.entity));
        assert!(matches!(refused, Err(LoadError::Store(error)) if error.seal_refused() == Some(why)), "{altered}");
        assert_eq!(read.unwrap().unwrap().version, 1);
        sqlx::query("UPDATE entity SET body = $2, version = $3, seal = $4 WHERE id = $1")
            .bind(first.entity.id)
            .bind(before.0)
            .bind(before.1)
            .bind(before.2)
            .execute(world.pool())
            .await
            .unwrap();
        assert_eq!(reads.snapshot(first.entity).await.unwrap().unwrap().version, 2, "put back");
    }
}

#[tokio::test]
async fn operator_seals_what_an_older_release_wrote_and_what_they_looked_at_themselves() {
    let old = World::new().await;
    let commits: Vec<Commit> = (0..7).map(create).collect();
    old.commit_all(&commits).await;
    let reads = old.reads().sealed(seals());
    assert_eq!(reads.snapshot(commits[0].entity).await.unwrap_err().seal_refused(), Some(Refused::Unsealed));
    assert_eq!(seals().adopt(old.pool(), None).await.unwrap(), 7);
    assert_eq!(seals().adopt(old.pool(), None).await.unwrap(), 0);
    assert!(reads.snapshot(commits[0].entity).await.is_ok());
    let altered = commits[1].entity;
    sqlx::query("UPDATE entity SET body = '{}' WHERE id = $1").bind(altered.id).execute(old.pool()).await.unwrap();
    assert_eq!(seals().adopt(old.pool(), None).await.unwrap(), 0, "what was altered is not sealed with the others");
    assert_eq!(reads.snapshot(altered).await.unwrap_err().seal_refused(), Some(Refused::Altered));
    assert_eq!(seals().adopt(old.pool(), Some(altered.id)).await.unwrap(), 1);
    assert!(reads.snapshot(altered).await.is_ok());
}

fn claims(names: &[&str]) -> SetChange {
    SetChange { added: names.iter().map(|name| (*name).to_owned()).collect(), dropped: Vec::new() }
}

#[tokio::test]
async fn name_that_another_entity_claims_is_refused_with_its_holder_until_it_is_dropped() {
    let world = World::new().await;
    let first = Commit { claims: claims(&["gpu/a", "gpu/b"]), ..create(1) };
    assert_eq!(world.commit(&first).await, Outcome::Applied);
    let before = world.rows().await;
    let second = Commit { claims: claims(&["gpu/b", "gpu/c"]), ..create(2) };
    let holders = [("gpu/b".to_owned(), first.entity.id)].into();
    assert_eq!(world.commit(&second).await, Outcome::Claimed { holders });
    assert_eq!(world.rows().await, before);
    // What an entity has it may claim again, and what it drops is free.
    let dropped = SetChange { added: vec!["gpu/a".to_owned()], dropped: vec!["gpu/b".to_owned()] };
    assert_eq!(world.commit(&Commit { claims: dropped, ..next(&first) }).await, Outcome::Applied);
    assert_eq!(world.commit(&second).await, Outcome::Applied);
    // Nobody drops another entity's claim.
    let foreign = SetChange { added: Vec::new(), dropped: vec!["gpu/a".to_owned()] };
    assert_eq!(world.commit(&Commit { claims: foreign, ..next(&second) }).await, Outcome::Applied);
    let held: Vec<(String, Uuid)> =
        sqlx::query_as("SELECT name, entity FROM claim ORDER BY name").fetch_all(world.pool()).await.unwrap();
    let [one, two] = [first.entity.id, second.entity.id];
    assert_eq!(held, [("gpu/a".to_owned(), one), ("gpu/b".to_owned(), two), ("gpu/c".to_owned(), two)]);
}

#[tokio::test]
async fn terms_of_an_entity_are_those_that_its_commits_added_and_did_not_drop() {
    let world = World::new().await;
    let change = |added: &[&str], dropped: &[&str]| SetChange { dropped: claims(dropped).added, ..claims(added) };
    let first = Commit { terms: change(&["name/a", "label/env"], &[]), ..create(1) };
    let second = Commit { terms: change(&["label/env"], &[]), ..create(2) };
    let outcomes = world.commit_all(&[first.clone(), second.clone()]).await;
    assert_eq!(outcomes, [Outcome::Applied, Outcome::Applied]);
    // Of another version: nothing of it is written.
    let stale = Commit { terms: change(&["name/stale"], &["label/env"]), ..first.clone() };
    assert_ne!(world.commit(&stale).await, Outcome::Applied);
    let renamed = Commit { terms: change(&["name/b"], &["name/a", "label/never"]), ..next(&first) };
    assert_eq!(world.commit(&renamed).await, Outcome::Applied);
    let again = Commit { terms: change(&["label/env"], &[]), ..next(&second) };
    assert_eq!(world.commit(&again).await, Outcome::Applied, "what is there already");
    let terms: Vec<(Uuid, String)> =
        sqlx::query_as("SELECT entity, term FROM term ORDER BY entity, term").fetch_all(world.pool()).await.unwrap();
    let expected = [(&first, "label/env"), (&first, "name/b"), (&second, "label/env")];
    let mut expected = expected.map(|(commit, term)| (commit.entity.id, term.to_owned()));
    expected.sort();
    assert_eq!(terms, expected);
}

#[tokio::test]
async fn claims_of_one_name_at_once_leave_one_holder() {
    let world = World::new().await;
    for round in 0..20_u32 {
        let name = format!("gpu/{round}");
        // Some meet in one batch, the others in the two lanes.
        let commits: Vec<_> =
            (0..8).map(|n| Commit { claims: claims(&[&name]), ..create(1000 + round * 8 + n) }).collect();
        let outcomes = world.commit_all(&commits).await;
        let won: Vec<_> = (0..8).filter(|n| outcomes[*n] == Outcome::Applied).collect();
        let [winner] = won.as_slice() else { panic!("{outcomes:?}") };
        let holders = [(name, commits[*winner].entity.id)].into();
        let told = Outcome::Claimed { holders };
        assert!((0..8).all(|n| n == *winner || outcomes[n] == told), "{outcomes:?}");
    }
}

#[tokio::test]
async fn a_change_of_what_is_rested_on_that_is_under_way_is_waited_for() {
    let world = World::new().await;
    let right = create(1);
    world.commit(&right).await;
    let rests_on = vec![Footing { entity: right.entity.id, version: 1 }];
    // Another member takes the right away and has not committed yet.
    let mut revoking = world.pool().begin().await.unwrap();
    sqlx::query("UPDATE entity SET version = version + 1 WHERE id = $1")
        .bind(right.entity.id)
        .execute(&mut *revoking)
        .await
        .unwrap();
    let committer = world.committer.clone();
    let acting = tokio::spawn(async move { committer.commit(Commit { rests_on, ..create(2) }).await });
    world.until_blocked(1).await;
    revoking.commit().await.unwrap();
    assert_eq!(acting.await.unwrap(), Outcome::Conflict);
}

#[tokio::test]
async fn a_command_id_counts_once_and_answers_with_the_first_reply() {
    let world = World::new().await;
    let first = create(1);
    world.commit(&first).await;
    let before = world.rows().await;
    let repeated = Commit { command: first.command.clone(), ..next(&first) };
    let done = Done { entity: first.entity.id, digest: [7; 32], reply: Some(r#"{"ok": true}"#.to_owned()) };
    assert_eq!(world.commit(&repeated).await, Outcome::Duplicate(done.clone()));
    assert_eq!(world.reads().command(first.command.as_ref().unwrap().id).await.unwrap(), Some(done.clone()));
    // Also where it is used for another entity of another shard.
    let elsewhere = Commit { command: first.command.clone(), ..create(2) };
    assert_eq!(world.commit(&elsewhere).await, Outcome::Duplicate(done));
    assert_eq!(world.rows().await, before);
}

#[tokio::test]
async fn of_many_uses_of_a_command_id_at_once_one_passes() {
    let world = World::new().await;
    let command = command(None);
    let commits: Vec<Commit> = (0..40).map(|n| Commit { command: Some(command.clone()), ..create(n) }).collect();
    let outcomes = world.commit_all(&commits).await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Outcome::Applied).count(), 1);
    assert_eq!(outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Duplicate(_))).count(), 39);
    assert_eq!(world.rows().await, [1; 6]);
}

#[tokio::test]
async fn a_shard_that_is_not_ours_under_the_epoch_is_fenced() {
    let world = World::new().await;
    let old = Commit { epoch: Epoch(0), ..create(1) };
    assert_eq!(world.commit(&old).await, Outcome::Fenced, "an older epoch");
    assert_eq!(world.commit(&Commit { epoch: Epoch(2), ..create(1) }).await, Outcome::Fenced, "a newer epoch");
    let other = MemberId(Uuid::new_v4());
    world.cluster().hand_over(world.me, Some(other), &[(Shard(1), Epoch(1))]).await.unwrap();
    assert_eq!(world.commit(&create(1)).await, Outcome::Fenced, "handed over");
    assert_eq!(world.commit(&Commit { epoch: Epoch(2), ..create(1) }).await, Outcome::Fenced, "another's epoch");
    assert_eq!(world.rows().await, [0; 6]);
    assert_eq!(world.commit(&create(2)).await, Outcome::Applied, "the other shards are untouched");
}

#[tokio::test]
async fn in_one_batch_the_fenced_the_stale_and_the_repeated_stop_nobody_else() {
    let world = World::new().await;
    let old = create(3);
    world.commit(&old).await;
    let holder = world.hold_shards().await;
    let commits = [
        create(1),
        Commit { epoch: Epoch(0), ..create(5) },
        Commit { command: Some(command(None)), ..old.clone() },
        Commit { command: old.command.clone(), ..create(7) },
        create(9),
    ];
    let outcomes = {
        let all = world.commit_all(&commits);
        let release = async {
            world.until_blocked(1).await;
            holder.rollback().await.unwrap();
        };
        futures::future::join(all, release).await.0
    };
    assert_eq!(outcomes[0], Outcome::Applied);
    assert_eq!(outcomes[1], Outcome::Fenced);
    assert_eq!(outcomes[2], Outcome::Conflict);
    assert!(matches!(outcomes[3], Outcome::Duplicate(_)));
    assert_eq!(outcomes[4], Outcome::Applied);
    assert_eq!(world.rows().await, [3; 6]);
}

#[tokio::test]
async fn what_somebody_waits_for_is_behind_one_batch_of_what_can_wait_at_most() {
    let one_worker = |config: &mut CommitterConfig| (config.workers, config.batch) = (1, 16);
    let world = World::with(Database::fresh().await, one_worker).await;
    let patient = |n| Commit { patient: true, ..create(n) };
    let first = patient(0);
    let holder = world.hold_shards().await;
    let held = async {
        world.until_blocked(1).await;
        let many: Vec<_> = (1..=160).map(patient).chain([create(500)]).collect();
        let release = async {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            holder.rollback().await.unwrap();
        };
        futures::join!(world.commit_all(&many), release).0
    };
    let (outcome, outcomes) = futures::join!(world.commit(&first), held);
    assert!(outcomes.into_iter().chain([outcome]).all(|outcome| outcome == Outcome::Applied));
    assert_eq!(world.rows().await, [162; 6]);
    // By the transactions that wrote them: in which order the answers are read is up to the machine's load.
    let before: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM entity
         WHERE xmin::text::bigint < (SELECT xmin::text::bigint FROM entity WHERE id = $1)",
    )
    .bind(create(500).entity.id)
    .fetch_one(world.pool())
    .await
    .unwrap();
    assert!((1..=17).contains(&before), "{before} were written before it");
}

#[tokio::test]
async fn a_taken_name_is_refused_alone_and_its_whole_batch_commits() {
    let world = World::new().await;
    let named = |n: u32, name: &str| Commit {
        keys: Keys { unique_name: Some(name.to_owned()), ..Keys::default() },
        ..create(n)
    };
    assert_eq!(world.commit(&named(1000, "h100")).await, Outcome::Applied);
    let mut commits: Vec<Commit> = (0..200).map(|n| named(n, &format!("sku-{n}"))).collect();
    for n in [3, 77, 150] {
        commits[n] = named(u32::try_from(n).unwrap(), "h100");
    }
    let outcomes = world.commit_all(&commits).await;
    for (n, outcome) in outcomes.iter().enumerate() {
        if [3, 77, 150].contains(&n) {
            assert_eq!(*outcome, Outcome::Refused { constraint: "entity_unique_name".to_owned() });
        } else {
            assert_eq!(*outcome, Outcome::Applied, "{n}");
        }
    }
    assert_eq!(world.rows().await, [198; 6]);
}

#[tokio::test]
async fn a_value_that_no_column_takes_is_refused_alone() {
    let world = World::new().await;
    let mut commits: Vec<Commit> = (0..20).map(create).collect();
    commits[4].why = "a \0 byte".to_owned();
    commits[9].snapshot = r#"{"name": "\u0000"}"#.to_owned();
    commits[15].snapshot = "{not json".to_owned();
    let outcomes = world.commit_all(&commits).await;
    for (n, outcome) in outcomes.iter().enumerate() {
        assert_eq!(matches!(outcome, Outcome::Refused { .. }), [4, 9, 15].contains(&n), "{n}: {outcome:?}");
    }
    assert_eq!(world.rows().await, [17; 6]);
}

#[tokio::test]
async fn two_creations_of_one_entity_at_once_leave_one() {
    let world = World::new().await;
    let commits: Vec<Commit> = (0..20).map(|_| create(1)).collect();
    let outcomes = world.commit_all(&commits).await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Outcome::Applied).count(), 1);
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Outcome::Conflict).count(), 19);
    assert_eq!(world.rows().await, [1; 6]);
}

#[tokio::test]
async fn a_second_transition_of_an_entity_waits_for_the_next_batch() {
    let world = World::new().await;
    let chain = {
        let mut chain = vec![create(1)];
        for _ in 0..5 {
            let following = next(chain.last().unwrap());
            chain.push(following);
        }
        chain
    };
    let holder = world.hold_shards().await;
    let all = async {
        // In the order of the mailbox, without waiting for answers.
        let mut answers = Vec::new();
        for commit in &chain {
            let mut answer = Box::pin(world.commit(commit));
            assert!(futures::poll!(&mut answer).is_pending());
            answers.push(answer);
        }
        world.until_blocked(1).await;
        holder.rollback().await.unwrap();
        futures::future::join_all(answers).await
    };
    assert_eq!(all.await, vec![Outcome::Applied; 6]);
    assert_eq!(world.batches(), (6, 6.0), "one statement for each");
    assert_eq!(world.reads().entity(chain[0].entity).await.unwrap().unwrap().version, 6);
}

#[tokio::test]
async fn what_waits_together_is_committed_together() {
    let world = World::new().await;
    let holder = world.hold_shards().await;
    // One shard, so one worker: the first goes alone and is blocked, the rest fills the next batches.
    let commits: Vec<Commit> = (0..1000).map(|n| create(n * 256)).collect();
    let all = async {
        let release = async {
            world.until_blocked(1).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
            holder.rollback().await.unwrap();
        };
        futures::future::join(world.commit_all(&commits), release).await.0
    };
    assert!(all.await.iter().all(|outcome| *outcome == Outcome::Applied));
    let (statements, transitions) = world.batches();
    assert!(statements <= 3 && transitions == 1000.0, "{statements} statements for {transitions} transitions");
    assert_eq!(world.rows().await, [1000; 6]);
}

#[tokio::test]
async fn a_batch_of_512_changes_commits_whole() {
    let world = World::new().await;
    let created: Vec<Commit> = (0..512).map(|n| create(n * 2)).collect();
    assert!(world.commit_all(&created).await.iter().all(|outcome| *outcome == Outcome::Applied));
    let changed: Vec<Commit> = created.iter().map(next).collect();
    assert!(world.commit_all(&changed).await.iter().all(|outcome| *outcome == Outcome::Applied));
    assert_eq!(world.rows().await, [512, 1024, 1024, 1024, 1024, 512]);
    let versions: (i64, i64) =
        sqlx::query_as("SELECT min(version), max(version) FROM entity").fetch_one(world.pool()).await.unwrap();
    assert_eq!(versions, (2, 2));
}

#[tokio::test]
async fn the_consumed_event_goes_with_its_effect_and_only_with_it() {
    let world = World::new().await;
    let cause = create(1);
    world.commit(&cause).await;
    let consumed = Some(cause.outbox[0].0);
    let stale = Commit { expected_version: 5, command: Some(command(consumed)), ..bare(next(&create(2))) };
    assert_eq!(world.commit(&stale).await, Outcome::Conflict);
    assert_eq!(world.count("outbox").await, 1, "an effect that did not pass leaves its cause");
    let effect = Commit { command: Some(command(consumed)), ..bare(create(2)) };
    assert_eq!(world.commit(&effect).await, Outcome::Applied);
    assert_eq!(world.count("outbox").await, 0);
}

#[tokio::test]
async fn numbers_rise_in_the_order_of_commits_within_each_epoch() {
    let world = World::new().await;
    for round in 0..3_u32 {
        let commits: Vec<Commit> = (0..50).map(|n| create((round * 50 + n) * 256)).collect();
        world.commit_all(&commits).await;
    }
    // Numbered rows of one transition are neighbours, and a later transaction has only higher numbers.
    let rows = sqlx::query("SELECT seq, xmin::text::bigint AS tx FROM outbox ORDER BY seq")
        .fetch_all(world.pool())
        .await
        .unwrap();
    let numbers: Vec<i64> = rows.iter().map(|row| row.get("seq")).collect();
    assert_eq!(numbers, (0..150).map(|n| 3 * n + 3).collect::<Vec<_>>());
    let transactions: Vec<i64> = rows.iter().map(|row| row.get("tx")).collect();
    assert!(transactions.is_sorted());

    let back = world.cluster();
    let epochs = back.hand_over(world.me, Some(world.me), &[(Shard(0), Epoch(1))]).await.unwrap();
    assert_eq!(epochs[&Shard(0)], Epoch(2));
    assert_eq!(world.commit(&Commit { epoch: Epoch(2), ..create(999_936) }).await, Outcome::Applied);
    let first: i64 =
        sqlx::query_scalar("SELECT min(seq) FROM history WHERE epoch = 2").fetch_one(world.pool()).await.unwrap();
    assert_eq!(first, 1);
}

#[tokio::test]
async fn a_transition_may_tell_many_things_or_nothing() {
    let world = World::new().await;
    let mut talkative = create(1);
    talkative.outbox = (0..5).map(|_| (EventId(Uuid::now_v7()), event(talkative.entity.id))).collect();
    talkative.audit = talkative.audit.iter().cycle().take(3).cloned().collect();
    assert_eq!(world.commit_all(&[talkative, bare(create(2))]).await, vec![Outcome::Applied; 2]);
    assert_eq!(world.rows().await, [2, 2, 3, 5, 1, 1]);
    let seqs: Vec<i64> =
        sqlx::query_scalar("SELECT seq FROM outbox ORDER BY seq").fetch_all(world.pool()).await.unwrap();
    assert_eq!(seqs, [5, 6, 7, 8, 9]);
}

#[tokio::test]
async fn events_that_the_relay_has_no_room_for_are_left_to_the_poll() {
    let db = crate::postgres::Database::fresh().await;
    let world = World::with(db, |_| {}).await;
    let commits: Vec<Commit> = (0..1100).map(|n| create(n * 256)).collect();
    // However large the batches are: the bound of 1000 is one of events.
    assert_eq!(world.commit_all(&commits).await, vec![Outcome::Applied; 1100]);
    assert_eq!(world.published.len(), 1000);
    assert_eq!(world.reads().orphans(&[Shard(0)], Duration::ZERO, &[], 2000).await.unwrap().rows.len(), 1100);
}
