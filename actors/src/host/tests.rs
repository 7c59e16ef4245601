#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;
use crate::ask::{Answered, CommandKey};
use crate::host::EntityStatus::{Awake, BackingOff, Parked};
use crate::testing::{
    Clockwork, Count, Counter, Fault, Ledger, Performed, Refusal, asked, key, panics_are_short, term,
};
use domain::commit::{Epoch, Snapshot};
use domain::{Effect, Kind, NodeId};
use std::collections::BTreeSet;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

const COUNTER: Uuid = Uuid::from_u128(7);
const SECOND: Duration = Duration::from_secs(1);

/// A host over a store in memory.
struct Bench {
    host: Arc<Host>,
    store: Arc<Ledger>,
    effects: Arc<Performed>,
    world: Arc<Clockwork>,
}

impl Bench {
    /// With the shards of `ids` open.
    async fn of(config: HostConfig, ids: impl IntoIterator<Item = Uuid>) -> Self {
        panics_are_short();
        let (store, effects, world) = (Arc::<Ledger>::default(), Arc::<Performed>::default(), Clockwork::new());
        let world = Arc::new(world);
        let host = Host::new(config, store.clone(), effects.clone(), world.clone());
        for shard in ids.into_iter().map(shard_of).collect::<BTreeSet<_>>() {
            host.open(term(shard, 1), None).await.unwrap();
        }
        Self { host, store, effects, world }
    }

    async fn ready() -> Self {
        Self::of(HostConfig::default(), [COUNTER]).await
    }

    async fn ask(&self, id: Uuid, command: Count) -> Answer<Counter> {
        self.host.ask::<Counter>(id, command, asked(self.world.now() + 5 * SECOND)).await
    }

    async fn ask_once(&self, id: Uuid, command: Count, key: CommandKey) -> Answer<Counter> {
        self.host.ask::<Counter>(id, command, asked(self.world.now() + 5 * SECOND).once(key)).await
    }

    fn asking(&self, id: Uuid, command: Count, about: impl FnOnce(Asked) -> Asked) -> JoinHandle<Answer<Counter>> {
        let (host, asked) = (Arc::clone(&self.host), about(asked(self.world.now() + 5 * SECOND)));
        tokio::spawn(async move { host.ask::<Counter>(id, command, asked).await })
    }

    fn row(&self, id: Uuid) -> EntityRow {
        self.host.entity(counter(id)).unwrap()
    }

    /// `None`: it sleeps.
    fn status(&self, id: Uuid) -> Option<EntityStatus> {
        self.host.entity(counter(id)).map(|row| row.status)
    }

    fn loaded(&self) -> usize {
        *self.store.loaded.lock().unwrap()
    }

    /// No place is taken and no command is under way.
    fn is_at_rest(&self) -> bool {
        self.host.in_flight.is_empty()
            && self.host.shards().iter().all(|shard| shard.mailbox_depth == 0)
            && self.host.entities().iter().all(|entity| entity.mailbox_depth == 0)
    }
}

const fn counter(id: Uuid) -> EntityRef {
    EntityRef { kind: Kind::Sku, id }
}

const fn first<R>(reply: R) -> Answered<R> {
    Answered { reply, replayed: false, written: true, version: 1 }
}

async fn eventually(what: impl Fn() -> bool) {
    let seen = async {
        while !what() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(10 * SECOND, seen).await.expect("it never came to be");
}

/// Two entities of one shard.
fn neighbours() -> (Uuid, Uuid) {
    let other = (8..).map(Uuid::from_u128).find(|id| shard_of(*id) == shard_of(COUNTER)).unwrap();
    (COUNTER, other)
}

#[tokio::test(start_paused = true)]
async fn an_entity_is_woken_by_the_first_command_sleeps_and_is_woken_again() {
    let bench = Bench::ready().await;
    assert_eq!(bench.status(COUNTER), None);
    assert_eq!(bench.ask(COUNTER, Count::Add(1)).await, Ok(first(1)));
    assert_eq!(bench.effects.0.lock().unwrap().as_slice(), [Effect::WakeNode(NodeId(Uuid::from_u128(1)))]);
    let row = bench.row(COUNTER);
    assert_eq!((row.status, row.state.as_deref(), row.version), (Awake, Some("counting"), 1));

    sleep(59 * SECOND).await;
    bench.host.rest();
    sleep(SECOND / 2).await;
    assert_eq!(bench.status(COUNTER), Some(Awake), "it was needed less than sleep_after ago");
    sleep(SECOND).await;
    bench.host.rest();
    eventually(|| bench.status(COUNTER).is_none()).await;

    assert_eq!(bench.ask(COUNTER, Count::Read).await.unwrap().reply, 1);
    assert_eq!(bench.loaded(), 2);
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn what_is_remembered_is_what_was_committed_last_and_nothing_while_that_may_change() {
    let bench = Bench::ready().await;
    let remembered = || bench.host.remembered::<Counter>(COUNTER).map(|(it, version)| (it.tickets.clone(), version));
    assert_eq!(remembered(), None, "it is asleep");
    bench.ask(COUNTER, Count::Add(1)).await.unwrap();
    assert_eq!(remembered(), Some((vec![1], 1)));

    let held = bench.store.commits.write().await;
    let asking = bench.asking(COUNTER, Count::Add(2), |asked| asked);
    sleep(SECOND).await;
    assert_eq!(remembered(), None, "the store may have more");
    drop(held);
    asking.await.unwrap().unwrap();
    assert_eq!(remembered(), Some((vec![1, 2], 2)));

    *bench.world.lease_is_over.lock().unwrap() = true;
    assert_eq!(remembered(), None, "the shard may be another's");
    *bench.world.lease_is_over.lock().unwrap() = false;
    bench.host.lose(shard_of(COUNTER));
    assert_eq!(remembered(), None);
}

#[tokio::test(start_paused = true)]
async fn an_entity_with_work_in_its_hands_does_not_sleep() {
    let bench = Bench::ready().await;
    let held = bench.store.commits.write().await;
    let asking =
        bench.asking(COUNTER, Count::Add(1), |asked| Asked { deadline: asked.deadline + 100 * SECOND, ..asked });
    sleep(61 * SECOND).await;
    bench.host.rest();
    sleep(SECOND).await;
    assert_eq!(bench.status(COUNTER), Some(Awake));
    drop(held);
    assert_eq!(asking.await.unwrap(), Ok(first(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn those_who_wake_it_at_once_meet_one_actor() {
    let ids: Vec<_> = (0..20).map(Uuid::from_u128).collect();
    let bench = Bench::of(HostConfig::default(), ids.clone()).await;
    let mut asking = JoinSet::new();
    for (id, ticket) in ids.iter().flat_map(|id| (0..10).map(move |ticket| (*id, ticket))) {
        asking.spawn(bench.asking(id, Count::Add(ticket), |asked| asked));
    }
    while let Some(answer) = asking.join_next().await {
        answer.unwrap().unwrap().unwrap();
    }
    assert_eq!(bench.loaded(), ids.len());
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn what_stands_in_front_of_an_entity_is_bounded_and_the_urgent_have_places_of_their_own() {
    let bench = Bench::of(HostConfig { per_entity: 2, ..HostConfig::default() }, [COUNTER]).await;
    let held = bench.store.commits.write().await;
    let mut asking = Vec::new();
    for ticket in 0..2 {
        asking.push(bench.asking(COUNTER, Count::Add(ticket), |asked| asked));
    }
    sleep(SECOND).await;
    assert_eq!(bench.row(COUNTER).mailbox_depth, 2);
    assert_eq!(bench.ask_once(COUNTER, Count::Add(9), key("k")).await, Err(AskError::Overloaded));
    assert!(bench.host.in_flight.is_empty(), "who is turned away leaves nothing behind");
    for ticket in 2..4 {
        asking.push(bench.asking(COUNTER, Count::Add(ticket), Asked::urgently));
    }
    sleep(SECOND).await;
    assert_eq!(bench.asking(COUNTER, Count::Add(9), Asked::urgently).await.unwrap(), Err(AskError::Overloaded));
    drop(held);
    for answer in asking {
        answer.await.unwrap().unwrap();
    }
    assert_eq!(bench.store.books.lock().unwrap().counter(COUNTER).tickets, [0, 1, 2, 3]);
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn what_waits_in_a_shard_is_bounded_and_who_is_turned_away_wakes_nobody() {
    let (one, other) = neighbours();
    let bench = Bench::of(HostConfig { per_shard: 1, ..HostConfig::default() }, [one]).await;
    let held = bench.store.commits.write().await;
    let asking = bench.asking(one, Count::Add(1), |asked| asked);
    sleep(SECOND).await;
    assert_eq!(bench.ask(other, Count::Add(1)).await, Err(AskError::Overloaded));
    assert_eq!(bench.status(other), None);
    let urgent = bench.asking(other, Count::Add(1), Asked::urgently);
    sleep(SECOND).await;
    drop(held);
    assert_eq!((asking.await.unwrap(), urgent.await.unwrap()), (Ok(first(1)), Ok(first(1))));
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn the_same_command_is_in_progress_until_it_is_answered_and_replayed_after_that() {
    let bench = Bench::ready().await;
    let held = bench.store.commits.write().await;
    let asking = bench.asking(COUNTER, Count::Add(1), |asked| asked.once(key("k")));
    sleep(SECOND).await;
    assert_eq!(bench.ask_once(COUNTER, Count::Add(1), key("k")).await, Err(AskError::InProgress));
    drop(held);
    assert_eq!(asking.await.unwrap(), Ok(first(1)));
    let again = Answered { replayed: true, written: false, ..first(1) };
    assert_eq!(bench.ask_once(COUNTER, Count::Add(1), key("k")).await, Ok(again));
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn a_command_whose_asker_went_away_is_in_progress_until_its_outcome_is_known() {
    let bench = Bench::ready().await;
    let held = bench.store.commits.write().await;
    let patience = asked(bench.world.now() + SECOND).once(key("k"));
    let answer = bench.host.ask::<Counter>(COUNTER, Count::Add(1), patience).await;
    assert_eq!(answer, Err(AskError::Unknown { reason: "no answer in time".to_owned() }));
    assert_eq!(bench.ask_once(COUNTER, Count::Add(1), key("k")).await, Err(AskError::InProgress));
    drop(held);
    eventually(|| bench.is_at_rest()).await;
    assert!(bench.ask_once(COUNTER, Count::Add(1), key("k")).await.unwrap().replayed);
    assert_eq!(bench.store.books.lock().unwrap().counter(COUNTER).tickets, [1]);
}

#[tokio::test(start_paused = true)]
async fn who_asks_too_late_is_told_so_and_wakes_nobody() {
    let bench = Bench::ready().await;
    let late = asked(bench.world.now() - SECOND);
    let answer = bench.host.ask::<Counter>(COUNTER, Count::Add(1), late).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    assert_eq!(bench.status(COUNTER), None);
}

#[tokio::test(start_paused = true)]
async fn a_shard_that_is_not_here_is_somebody_elses() {
    let bench = Bench::of(HostConfig::default(), []).await;
    assert_eq!(bench.ask(COUNTER, Count::Read).await, Err(AskError::NotOwner));
    assert!(bench.host.terms().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_closing_shard_answers_what_it_has_and_takes_nothing_new() {
    let bench = Bench::ready().await;
    let held = bench.store.commits.write().await;
    let asking = bench.asking(COUNTER, Count::Add(1), |asked| asked);
    sleep(SECOND).await;
    let host = Arc::clone(&bench.host);
    let closing = tokio::spawn(async move { host.close(shard_of(COUNTER), 60 * SECOND).await });
    sleep(SECOND).await;
    assert!(bench.host.shards()[0].closing);
    assert_eq!(bench.host.term(shard_of(COUNTER)), None);
    assert_eq!(bench.ask(COUNTER, Count::Add(2)).await, Err(AskError::NotOwner));
    drop(held);
    assert_eq!(asking.await.unwrap(), Ok(first(1)));
    closing.await.unwrap();
    assert_eq!((bench.host.shards().len(), bench.host.entities().len()), (0, 0));
    assert_eq!(bench.ask(COUNTER, Count::Add(2)).await, Err(AskError::NotOwner));
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn a_closing_shard_waits_no_longer_than_its_grace() {
    let bench = Bench::ready().await;
    let _held = bench.store.commits.write().await;
    let asking = bench.asking(COUNTER, Count::Add(1), |asked| asked.once(key("k")));
    sleep(SECOND).await;
    bench.host.close(shard_of(COUNTER), SECOND).await;
    let answer = asking.await.unwrap();
    assert!(matches!(answer, Err(AskError::Unknown { .. })), "{answer:?}");
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn a_lost_shard_leaves_at_once_and_its_late_commits_are_fenced() {
    let bench = Bench::ready().await;
    let shard = shard_of(COUNTER);
    let held = bench.store.commits.write().await;
    let asking = bench.asking(COUNTER, Count::Add(1), |asked| asked.once(key("k")));
    sleep(SECOND).await;
    bench.store.books.lock().unwrap().epochs.insert(shard, Epoch(2));
    bench.host.lose(shard);
    let answer = asking.await.unwrap();
    assert!(matches!(answer, Err(AskError::Unknown { .. })), "{answer:?}");
    assert_eq!((bench.host.shards().len(), bench.host.entities().len()), (0, 0));
    drop(held);

    bench.host.open(term(shard, 2), None).await.unwrap();
    assert_eq!(bench.ask_once(COUNTER, Count::Add(1), key("k")).await, Ok(first(1)));
    assert_eq!(bench.store.books.lock().unwrap().commits[0].epoch, Epoch(2));
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn a_new_term_over_a_shard_that_was_never_closed_wakes_its_entities_anew() {
    let bench = Bench::ready().await;
    assert_eq!(bench.ask(COUNTER, Count::Add(1)).await, Ok(first(1)));
    let shard = shard_of(COUNTER);
    bench.store.books.lock().unwrap().epochs.insert(shard, Epoch(2));
    bench.host.open(term(shard, 2), None).await.unwrap();
    assert_eq!(bench.host.entities().len(), 0);
    assert_eq!(bench.ask(COUNTER, Count::Add(2)).await.unwrap().reply, 2);
    assert_eq!(bench.store.books.lock().unwrap().commits[1].epoch, Epoch(2));
}

#[tokio::test(start_paused = true)]
async fn a_fenced_entity_sends_its_asker_to_the_owner() {
    let bench = Bench::ready().await;
    bench.store.books.lock().unwrap().epochs.insert(shard_of(COUNTER), Epoch(2));
    assert_eq!(bench.ask(COUNTER, Count::Add(1)).await, Err(AskError::NotOwner));
    eventually(|| bench.status(COUNTER).is_none()).await;
    assert_eq!(bench.host.failures_total(), 0, "losing an epoch is no failure");
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_panics_on_a_state_backs_off_and_is_parked_while_a_hundred_others_go_on() {
    let others: Vec<_> = (100..200).map(Uuid::from_u128).collect();
    let config = HostConfig { intensity: 3, ..HostConfig::default() };
    let bench = Bench::of(config.clone(), others.iter().copied().chain([COUNTER])).await;
    bench.ask(COUNTER, Count::Poison).await.unwrap();
    let mut pause = config.backoff;
    for failures in 1..=3 {
        let answer = bench.ask(COUNTER, Count::Add(failures)).await;
        assert_eq!(answer, Err(AskError::Broken { reason: "add panicked: poisoned".to_owned() }));
        let row = bench.row(COUNTER);
        assert_eq!((row.restarts, row.last_error.as_deref()), (failures, Some("add panicked: poisoned")));
        if failures < 3 {
            assert_eq!(row.status, BackingOff);
            let answer = bench.ask(COUNTER, Count::Read).await;
            assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
            sleep(pause).await;
            pause *= 2;
        }
        for id in &others {
            bench.ask(*id, Count::Add(failures)).await.unwrap();
        }
    }
    let row = bench.row(COUNTER);
    assert_eq!((row.status, row.restarts), (Parked, 3));
    assert_eq!(row.waits_for.as_deref(), Some("an operator: add panicked: poisoned"));
    sleep(100 * SECOND).await;
    bench.host.rest();
    eventually(|| bench.host.entities().len() == 1).await;
    let parked = Err(AskError::Parked { reason: "add panicked: poisoned".to_owned() });
    assert_eq!(bench.ask(COUNTER, Count::Read).await, parked, "time alone does not unpark it");
    for id in &others {
        assert_eq!(bench.ask(*id, Count::Read).await.unwrap().reply, 3);
    }
    assert_eq!(bench.host.failures_total(), 3);
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_owner_parked_stays_parked_until_an_operator_restarts_it() {
    let bench = Bench::ready().await;
    bench.host.keep_parked(counter(COUNTER), "cannot be read".to_owned());
    let parked = Err(AskError::Parked { reason: "cannot be read".to_owned() });
    assert_eq!(bench.ask(COUNTER, Count::Add(1)).await, parked);
    assert_eq!((bench.row(COUNTER).status, bench.loaded()), (Parked, 0));
    assert!(bench.host.restart(counter(COUNTER)));
    bench.ask(COUNTER, Count::Add(1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_breaks_leaves_no_entity_waiting_for_it() {
    let bench = Bench::ready().await;
    bench.ask(COUNTER, Count::Add(1)).await.unwrap();
    bench.store.meets([Fault::Panics]);
    let answer = bench.ask(COUNTER, Count::Add(1)).await;
    assert!(matches!(answer, Err(AskError::Unknown { .. })), "{answer:?}");
    sleep(SECOND).await;
    assert_eq!(bench.ask(COUNTER, Count::Add(1)).await.unwrap().reply, 2);
}

#[tokio::test(start_paused = true)]
async fn an_operator_restarts_what_is_parked() {
    let bench = Bench::ready().await;
    bench.store.books.lock().unwrap().entities.insert(counter(COUNTER), Snapshot { version: 4, body: "no".to_owned() });
    for _ in 0..2 {
        let answer = bench.ask(COUNTER, Count::Read).await;
        assert!(matches!(answer, Err(AskError::Parked { .. } | AskError::NotOwner)), "{answer:?}");
    }
    let row = bench.row(COUNTER);
    assert_eq!(row.status, Parked, "it would end the same way a second time");
    assert!(row.last_error.unwrap().contains("the snapshot of version 4 cannot be read"));
    assert_eq!(bench.loaded(), 1);

    let body = serde_json::to_string(&Counter::default()).unwrap();
    bench.store.books.lock().unwrap().entities.insert(counter(COUNTER), Snapshot { version: 4, body });
    assert!(bench.host.restart(counter(COUNTER)));
    assert_eq!(bench.ask(COUNTER, Count::Add(1)).await, Ok(Answered { version: 5, ..first(1) }));
    assert!(!bench.host.restart(counter(Uuid::from_u128(99))), "nothing is known of it");
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn a_restart_leaves_whoever_asked_uncertain_and_the_next_is_served() {
    let bench = Bench::ready().await;
    let held = bench.store.commits.write().await;
    let asking = bench.asking(COUNTER, Count::Add(1), |asked| asked.once(key("k")));
    sleep(SECOND).await;
    assert!(bench.host.restart(counter(COUNTER)));
    let answer = asking.await.unwrap();
    assert!(matches!(answer, Err(AskError::Unknown { .. })), "{answer:?}");
    assert!(bench.is_at_rest());
    drop(held);
    assert!(bench.ask_once(COUNTER, Count::Add(1), key("k")).await.unwrap().replayed, "the commit was under way");
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_is_found_out_by_asking_the_same_again() {
    for (fault, replayed) in [(Fault::LostAfter, true), (Fault::LostBefore, false)] {
        let bench = Bench::ready().await;
        bench.store.meets([Fault::None, fault]);
        let answer = bench.ask_once(COUNTER, Count::Add(1), key("k")).await;
        assert!(matches!(answer, Err(AskError::Unknown { .. })), "{answer:?}");
        assert_eq!(bench.status(COUNTER), Some(BackingOff));
        sleep(SECOND).await;
        let again = bench.ask_once(COUNTER, Count::Add(1), key("k")).await.unwrap();
        assert_eq!((again.reply, again.replayed), (1, replayed));
        assert_eq!(bench.store.books.lock().unwrap().counter(COUNTER).tickets, [1]);
        assert!(bench.is_at_rest());
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_is_said_to_be_and_what_is_behind_waits_for_the_back_off() {
    let bench = Bench::ready().await;
    bench.store.meets([Fault::Unreachable]);
    let answer = bench.ask(COUNTER, Count::Add(1)).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    sleep(SECOND).await;
    bench.store.meets([Fault::None, Fault::Unreachable]);
    let answer = bench.ask(COUNTER, Count::Add(1)).await;
    assert_eq!(answer, Err(AskError::Unavailable { reason: "unreachable".to_owned() }));
    bench.store.meets([Fault::Disturbed]);
    assert_eq!(bench.ask(COUNTER, Count::Add(1)).await.unwrap().version, 2, "it was decided again");
    bench.store.meets([Fault::Forbidden]);
    let answer = bench.ask(COUNTER, Count::Add(2)).await;
    assert_eq!(answer, Err(AskError::Taken { constraint: "unique_name".to_owned() }));
    assert_eq!(bench.ask(COUNTER, Count::AddOnce(1)).await, Err(AskError::Rejected(Refusal::Counted(1))));
}

#[tokio::test(start_paused = true)]
async fn however_often_the_store_is_away_nobody_is_parked_for_it_and_all_are_served_when_it_is_back() {
    let bench = Bench::ready().await;
    bench.ask(COUNTER, Count::Add(0)).await.unwrap();
    for outage in 1..=5 {
        // One loses its commit, and for the rest of the outage nobody can load it.
        bench.store.meets(std::iter::once(Fault::LostAfter).chain(vec![Fault::Unreachable; 20]));
        let answer = bench.ask_once(COUNTER, Count::Add(outage), key(&outage.to_string())).await;
        assert!(matches!(answer, Err(AskError::Unknown { .. })), "{answer:?}");
        for _ in 0..40 {
            let answer = bench.ask(COUNTER, Count::Read).await;
            assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
            assert_eq!(bench.status(COUNTER), Some(BackingOff));
            sleep(SECOND / 10).await;
        }
        bench.store.faults.lock().unwrap().clear();
        sleep(bench.host.config.longest_backoff).await;
        assert!(bench.ask_once(COUNTER, Count::Add(outage), key(&outage.to_string())).await.unwrap().replayed);
    }
    assert_eq!(bench.store.books.lock().unwrap().counter(COUNTER).tickets, [0, 1, 2, 3, 4, 5]);
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn failures_that_are_long_past_are_forgotten() {
    let bench = Bench::ready().await;
    bench.store.meets([Fault::Unreachable]);
    let _ = bench.ask(COUNTER, Count::Read).await;
    assert_eq!(bench.status(COUNTER), Some(BackingOff));
    sleep(601 * SECOND).await;
    bench.host.rest();
    assert_eq!(bench.status(COUNTER), None);
    assert_eq!(bench.host.failures_total(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_operator_sees_until_when_an_entity_waits_and_for_what() {
    let bench = Bench::ready().await;
    let until = bench.world.now() + 60 * SECOND;
    bench.ask(COUNTER, Count::Wait(until)).await.unwrap();
    let row = bench.row(COUNTER);
    assert_eq!((row.deadline_at, row.waits_for.as_deref()), (Some(until), Some("nobody has counted")));
    assert_eq!(bench.host.entities().len(), 1);
    assert_eq!((row.shard, row.mailbox_depth, row.restarts), (shard_of(COUNTER), 0, 0));
}

struct Breaking;

impl Effects for Breaking {
    fn perform(&self, _: Effect) {
        panic!("broken effect");
    }
}

#[tokio::test(start_paused = true)]
async fn an_actor_that_breaks_outside_of_a_decision_is_noted_by_its_supervisor() {
    panics_are_short();
    let (store, world) = (Arc::<Ledger>::default(), Arc::new(Clockwork::new()));
    let host = Host::new(HostConfig::default(), store.clone(), Arc::new(Breaking), world.clone());
    host.open(term(shard_of(COUNTER), 1), None).await.unwrap();
    let bench = Bench { host, store, effects: Arc::default(), world };
    assert_eq!(bench.ask(COUNTER, Count::Add(1)).await, Ok(first(1)), "the answer stands before the effect");
    eventually(|| bench.status(COUNTER) == Some(BackingOff)).await;
    assert_eq!(bench.row(COUNTER).last_error.as_deref(), Some("broken effect"));
    assert!(bench.is_at_rest());
}

#[tokio::test(start_paused = true)]
async fn entities_whose_supervisor_was_killed_are_not_taken_for_alive() {
    let bench = Bench::ready().await;
    bench.ask(COUNTER, Count::Add(1)).await.unwrap();
    let supervisor = bench.host.shards.get(&shard_of(COUNTER)).unwrap().supervisor.clone();
    supervisor.kill_and_wait(None).await.unwrap();
    eventually(|| bench.host.awake.get(&counter(COUNTER)).unwrap().cell.get_status() == ActorStatus::Stopped).await;
    assert_eq!(bench.ask(COUNTER, Count::Add(2)).await, Err(AskError::NotOwner));
    assert_eq!(bench.status(COUNTER), None);
    bench.host.open(term(shard_of(COUNTER), 2), None).await.unwrap();
    assert_eq!(bench.ask(COUNTER, Count::Add(2)).await.unwrap().reply, 2);
    assert!(bench.is_at_rest());
}

/// A small generator, so that a failing run can be had again.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Many ask, in any order, while the store fails, entities are put to sleep and restarted and shards move: whoever asks until
/// there is an answer gets one, once (I1), and nothing is left behind.
async fn commotion(seed: u64) {
    let ids: Vec<_> = (0..8).map(Uuid::from_u128).collect();
    let window = Duration::from_millis(20);
    let backoff = Duration::from_millis(1);
    let config = HostConfig { intensity: usize::MAX, window, backoff, ..HostConfig::default() };
    let bench = Arc::new(Bench::of(config, ids.clone()).await);
    let mut dice = Dice(seed);
    let faults = [Fault::Disturbed, Fault::Unreachable, Fault::LostBefore, Fault::LostAfter];
    bench.store.meets((0..400).map(|_| match dice.roll(5) {
        0 => faults[usize::try_from(dice.roll(4)).unwrap()],
        _ => Fault::None,
    }));
    *bench.store.delay.lock().unwrap() = Duration::from_millis(1);
    let mut asking = JoinSet::new();
    for ticket in 0..160_u64 {
        let (id, bench) = (ids[usize::try_from(ticket % 8).unwrap()], Arc::clone(&bench));
        let start = Duration::from_millis(dice.roll(60));
        asking.spawn(async move {
            sleep(start).await;
            loop {
                match bench.ask_once(id, Count::Add(ticket), key(&format!("{seed}/{ticket}"))).await {
                    Ok(_) => return,
                    Err(
                        AskError::NotOwner
                        | AskError::Unavailable { .. }
                        | AskError::Unknown { .. }
                        | AskError::InProgress,
                    ) => sleep(Duration::from_millis(3)).await,
                    Err(
                        error @ (AskError::Rejected(_)
                        | AskError::Denied
                        | AskError::AlreadyDone
                        | AskError::Reused
                        | AskError::Taken { .. }
                        | AskError::Overloaded
                        | AskError::Parked { .. }
                        | AskError::Broken { .. }),
                    ) => panic!("ticket {ticket}: {error}"),
                }
            }
        });
    }
    for epoch in 2..12 {
        sleep(Duration::from_millis(5 + dice.roll(10))).await;
        let id = ids[usize::try_from(dice.roll(8)).unwrap()];
        let shard = shard_of(id);
        match dice.roll(4) {
            0 => drop(bench.host.restart(counter(id))),
            1 => bench.host.close(shard, SECOND).await,
            2 => bench.host.lose(shard),
            _ => {}
        }
        bench.store.books.lock().unwrap().epochs.insert(shard, Epoch(epoch));
        bench.host.open(term(shard, epoch), None).await.unwrap();
        for awake in &bench.host.awake {
            (awake.put_to_sleep)(&*awake.mailbox);
        }
    }
    let all = async {
        while let Some(done) = asking.join_next().await {
            done.unwrap();
        }
    };
    timeout(60 * SECOND, all).await.unwrap_or_else(|_| panic!("seed {seed}: somebody was never answered"));
    eventually(|| bench.is_at_rest()).await;
    for (n, id) in (0_u64..).zip(&ids) {
        let mut tickets = bench.store.books.lock().unwrap().counter(*id).tickets;
        tickets.sort_unstable();
        assert_eq!(tickets, (0..20).map(|round| round * 8 + n).collect::<Vec<_>>(), "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn in_any_commotion_every_command_is_carried_out_once_and_nothing_is_left_behind() {
    for seed in 0..40 {
        commotion(seed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn so_it_is_on_several_threads() {
    for seed in 0..5 {
        commotion(seed).await;
    }
}
