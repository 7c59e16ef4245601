//! The finalizer on a machine that is a value, and dies before or after any of its effects.

#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::collections::BTreeSet;

use super::*;
use std::time::Duration;

const COMMIT_SECONDS: u32 = 60;
const UNIT: &str = "rented.service";

/// The behaviour of the new agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NewAgent {
    /// Answered after so many seconds.
    Answered(u64),
    /// It crashes, hangs, or is refused: its heartbeats have no answer.
    Silent,
    /// It exits with a status after which its unit is not restarted.
    ExitsForGood,
}

/// What happens at an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    KilledBefore,
    KilledAfter,
    PowerOffBefore,
    PowerOffAfter,
}

/// Everything that outlives a finalizer.
#[derive(Clone, Debug)]
struct World {
    new_agent: NewAgent,
    record: Option<UpdateRecord>,
    last: Option<AgentUpdateOutcome>,
    failed: BTreeSet<Digest>,
    versions: BTreeSet<Digest>,
    is_altered: bool,
    /// The link and the units; and the units that systemd has read.
    current: Digest,
    units: Digest,
    loaded: Digest,
    is_held: bool,
    running: Option<Digest>,
    /// Whether the descriptor store of the unit still has the terminals.
    terminals: bool,
    boot: u128,
    uptime: u64,
    started_at: u64,
    restarts: u32,
    /// A proof of before the agent's present process, by its number.
    has_old_proof: bool,
}

fn digest(text: &str) -> Digest {
    Digest::of(text.as_bytes())
}

fn record() -> UpdateRecord {
    UpdateRecord {
        nonce: Uuid::from_u128(9),
        task_id: Uuid::from_u128(7),
        from: digest("old"),
        to: digest("new"),
        version: "2".into(),
        unit: UNIT.into(),
        env_file: "/etc/gpuaas/agent.env".into(),
        commit_seconds: COMMIT_SECONDS,
        stage: Stage::Prepared,
    }
}

impl World {
    fn new(new_agent: NewAgent) -> Self {
        let old = digest("old");
        Self {
            new_agent,
            record: Some(record()),
            last: None,
            failed: BTreeSet::new(),
            versions: BTreeSet::from([digest("older"), old, digest("new")]),
            is_altered: false,
            current: old,
            units: old,
            loaded: old,
            is_held: false,
            running: Some(old),
            terminals: true,
            boot: 1,
            uptime: 1000,
            started_at: 0,
            restarts: 0,
            has_old_proof: false,
        }
    }

    fn start_agent(&mut self) {
        self.started_at = self.uptime;
        self.running = Some(self.current);
        if self.current == digest("new") && self.new_agent == NewAgent::ExitsForGood && !self.is_held {
            (self.running, self.terminals) = (None, false);
        }
    }

    /// Tenants' terminals end with the boot, which is not the update's doing.
    fn power_off(&mut self) {
        (self.boot, self.uptime, self.is_held, self.loaded) = (self.boot + 1, 10, false, self.units);
        self.start_agent();
        self.terminals = true;
    }
}

/// A finalizer's view of the world, until it dies.
struct Finalizer<'a> {
    world: &'a mut World,
    effects: Cell<usize>,
    death: Option<(usize, Death)>,
    elapsed: Cell<u64>,
}

impl Finalizer<'_> {
    fn died() -> FinalizeError {
        FinalizeError::Locked
    }

    fn effect(&mut self, happen: impl FnOnce(&mut World)) -> Result<(), FinalizeError> {
        let number = self.effects.get();
        self.effects.set(number + 1);
        let death = self.death.filter(|(at, _)| *at == number).map(|(_, death)| death);
        self.world.uptime += self.elapsed.take() / 1000;
        match death {
            None => happen(self.world),
            Some(Death::KilledBefore) => return Err(Self::died()),
            Some(Death::PowerOffBefore) => {
                self.world.power_off();
                return Err(Self::died());
            }
            Some(Death::KilledAfter) => {
                happen(self.world);
                return Err(Self::died());
            }
            Some(Death::PowerOffAfter) => {
                happen(self.world);
                self.world.power_off();
                return Err(Self::died());
            }
        }
        Ok(())
    }
}

impl UpdateMachine for Finalizer<'_> {
    fn record(&self) -> Result<Option<UpdateRecord>, FinalizeError> {
        Ok(self.world.record.clone())
    }
    fn set_record(&mut self, record: &UpdateRecord) -> Result<(), FinalizeError> {
        self.effect(|world| world.record = Some(record.clone()))
    }
    fn has_version(&self, digest: Digest) -> bool {
        self.world.versions.contains(&digest) && !self.world.is_altered
    }
    fn hold_terminals(&mut self, unit: &str) -> Result<(), FinalizeError> {
        assert_eq!(unit, UNIT);
        self.effect(|world| world.is_held = true)
    }
    fn end_hold(&mut self, unit: &str) -> Result<(), FinalizeError> {
        assert_eq!(unit, UNIT);
        self.effect(|world| world.is_held = false)
    }
    fn activate(&mut self, digest: Digest, _: &UpdateRecord) -> Result<(), FinalizeError> {
        self.effect(|world| world.units = digest)?;
        self.effect(|world| world.current = digest)
    }
    fn reload(&mut self) -> Result<(), FinalizeError> {
        self.effect(|world| world.loaded = world.units)
    }
    fn restart(&mut self, unit: &str) -> Result<(), FinalizeError> {
        assert_eq!(unit, UNIT);
        self.effect(|world| {
            world.restarts += 1;
            world.start_agent();
        })
    }
    fn proof(&self) -> Option<Proof> {
        let uptime = self.world.uptime + self.elapsed.get() / 1000;
        let is_answered = match self.world.new_agent {
            NewAgent::Answered(after) => uptime >= self.world.started_at + after,
            NewAgent::Silent | NewAgent::ExitsForGood => self.world.has_old_proof,
        };
        (self.world.running == Some(digest("new")) && is_answered).then(|| Proof {
            nonce: Uuid::from_u128(9),
            digest: digest("new"),
            pid: 1,
            at: 0,
        })
    }
    fn forget_proof(&mut self) -> Result<(), FinalizeError> {
        self.effect(|world| world.has_old_proof = false)
    }
    fn runs(&self, pid: u32, digest: Digest) -> bool {
        pid == 1 && self.world.running == Some(digest)
    }
    fn remember_failed(&mut self, digest: Digest, _: &RollbackReason) -> Result<(), FinalizeError> {
        self.effect(|world| {
            world.failed.insert(digest);
        })
    }
    fn set_last(&mut self, outcome: &AgentUpdateOutcome) -> Result<(), FinalizeError> {
        let before = self.world.last.clone();
        assert!(before.is_none_or(|last| last == *outcome), "an outcome that an agent may have reported changed");
        self.effect(|world| world.last = Some(outcome.clone()))
    }
    fn remove_other_versions(&mut self, but: [Digest; 2]) -> Result<(), FinalizeError> {
        self.effect(|world| world.versions.retain(|version| but.contains(version)))
    }
    fn remove_record(&mut self) -> Result<(), FinalizeError> {
        assert!(self.world.last.is_some(), "the record goes before the outcome is on the disk");
        self.effect(|world| world.record = None)
    }
    fn uptime(&self) -> Result<(Uuid, u64), FinalizeError> {
        Ok((Uuid::from_u128(self.world.boot), self.world.uptime + self.elapsed.get() / 1000))
    }
    fn sleep(&self, time: Duration) {
        self.elapsed.set(self.elapsed.get() + u64::try_from(time.as_millis()).unwrap());
    }
}

/// Runs finalizers until one ends by itself, the first of which dies as given. Returns how many effects the first had.
fn run(world: &mut World, mut death: Option<(usize, Death)>) -> usize {
    let mut first = None;
    for _ in 0..10 {
        let mut finalizer = Finalizer { world, effects: Cell::new(0), death: death.take(), elapsed: Cell::new(0) };
        let ended = finalize(&mut finalizer);
        first.get_or_insert(finalizer.effects.get());
        if ended.is_ok() {
            return first.unwrap();
        }
    }
    panic!("it does not end: {world:?}");
}

fn expect_end(world: &World, is_committed: bool, what: &str) {
    let in_use = digest(if is_committed { "new" } else { "old" });
    assert_eq!((world.current, world.units, world.loaded), (in_use, in_use, in_use), "{what}: {world:?}");
    assert_eq!(world.running, Some(in_use), "{what}");
    assert!(world.record.is_none() && !world.is_held && world.terminals, "{what}: {world:?}");
    let last = world.last.as_ref().unwrap();
    assert_eq!((last.task_id, last.rolled_back.is_none()), (Uuid::from_u128(7), is_committed), "{what}");
    assert_eq!(world.failed.contains(&digest("new")), !is_committed, "{what}");
    let stored = world.versions.contains(&digest("old")) && world.versions.contains(&digest("new"));
    assert!(stored && world.versions.contains(&digest("older")) != is_committed, "{what}: {:?}", world.versions);
}

#[test]
fn update_ends_alike_wherever_the_finalizer_is_killed_or_the_power_fails() {
    for (new_agent, is_committed) in
        [(NewAgent::Answered(5), true), (NewAgent::Silent, false), (NewAgent::ExitsForGood, false)]
    {
        let mut world = World::new(new_agent);
        let effects = run(&mut world, None);
        assert!(effects > 8, "{effects}");
        assert_eq!(world.restarts, if is_committed { 1 } else { 2 });
        expect_end(&world, is_committed, "undisturbed");
        for at in 0..effects {
            for death in [Death::KilledBefore, Death::KilledAfter, Death::PowerOffBefore, Death::PowerOffAfter] {
                let mut world = World::new(new_agent);
                run(&mut world, Some((at, death)));
                expect_end(&world, is_committed, &format!("{new_agent:?}, {death:?} at effect {at}"));
            }
        }
    }
}

#[test]
fn new_agent_has_the_whole_time_and_not_a_second_more() {
    let seconds = u64::from(COMMIT_SECONDS);
    for (after, is_committed) in [(seconds - 1, true), (seconds + 1, false)] {
        let mut world = World::new(NewAgent::Answered(after));
        run(&mut world, None);
        expect_end(&world, is_committed, &format!("answered after {after} s"));
        if !is_committed {
            assert_eq!(world.last.unwrap().rolled_back.unwrap().code, "no_heartbeat");
        }
    }
}

#[test]
fn machine_that_restarts_again_and_again_is_rolled_back() {
    // The power fails at the same effect in each boot: such as that which starts the new agent.
    for at in 0..6 {
        let mut world = World::new(NewAgent::Silent);
        let mut boots = 0;
        loop {
            let death = Some((at, Death::PowerOffAfter));
            let mut finalizer = Finalizer { world: &mut world, effects: Cell::new(0), death, elapsed: Cell::new(0) };
            if finalize(&mut finalizer).is_ok() {
                break;
            }
            boots += 1;
            let is_over = world.record.as_ref().is_some_and(|record| matches!(record.stage, Stage::RollingBack { .. }));
            if is_over {
                run(&mut world, None);
                break;
            }
            assert!(boots < 20, "{at}: {world:?}");
        }
        expect_end(&world, false, &format!("restarted at effect {at}"));
    }
}

#[test]
fn proof_from_before_the_agents_last_start_is_refused() {
    let mut world = World::new(NewAgent::Silent);
    world.has_old_proof = true;
    run(&mut world, None);
    expect_end(&world, false, "an old proof");
}

#[test]
fn version_that_was_altered_after_its_verification_is_never_started() {
    let mut world = World::new(NewAgent::Answered(1));
    world.is_altered = true;
    run(&mut world, None);
    expect_end(&world, false, "altered");
    assert_eq!(world.last.unwrap().rolled_back.unwrap().code, "version_altered");
}

#[test]
fn installation_is_known_by_the_path_of_the_agent_alone() {
    let name = digest("x").name();
    let found = Installation::of_agent(Path::new(&format!("/opt/gpuaas/versions/{name}/bin/gpuaas-agent")));
    assert_eq!(found, Some(Installation { root: "/opt/gpuaas".into(), digest: digest("x") }));
    for other in [
        "/usr/local/bin/gpuaas-agent".to_owned(),
        format!("/opt/gpuaas/versions/{name}/bin/gpuaas-agent (deleted)"),
        format!("/opt/gpuaas/versions/{name}/sbin/gpuaas-agent"),
        format!("/opt/gpuaas/{name}/bin/gpuaas-agent"),
        "/opt/gpuaas/versions/sha256-0/bin/gpuaas-agent".to_owned(),
        "/gpuaas-agent".to_owned(),
    ] {
        assert_eq!(Installation::of_agent(Path::new(&other)), None, "{other}");
    }
}

#[test]
fn failed_versions_are_remembered_within_a_bound_and_forgotten_by_order() {
    let root = tempfile::tempdir().unwrap();
    let folder = UpdateFolder::of(root.path());
    let reason = RollbackReason { code: "no_heartbeat".into(), message: "m".repeat(200) };
    let version =
        |number: u64| FailedVersion { digest: digest(&number.to_string()), reason: reason.clone(), at: number };
    for number in 0..100 {
        folder.remember_failed(version(number)).unwrap();
        folder.remember_failed(version(number)).unwrap();
    }
    let failed = folder.failed().unwrap();
    assert_eq!((failed.len(), failed[0].at, failed[63].at), (64, 36, 99));
    folder.forget_failed(digest("99")).unwrap();
    assert_eq!(folder.failed().unwrap().len(), 63);
    std::fs::write(root.path().join("update/failed.json"), "[{").unwrap();
    assert!(folder.failed().is_err(), "a damaged list is not an empty one");
}
