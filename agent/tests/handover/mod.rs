//! Terminal sessions across restarts of the agent's process, with a service manager that keeps descriptors.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::time::sleep;
use uuid::Uuid;
use wire::recording::{RecordMode, RecordTerms, RecordingEnd};
use wire::task::{OpenTerminal, Task, TaskStatus};
use wire::terminal::ProgramExit;

use crate::descriptor_store::DescriptorStore;
use crate::fake_control_plane::terminal::SeenTerminal;
use crate::fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};

const PROGRAM: &str = env!("CARGO_BIN_EXE_gpuaas-agent");
/// 60,000 numbered lines, somewhat less than a megabyte a second.
const LINES: usize = 60_000;
const WRITER: &str =
    "for k in $(seq 0 29); do seq -f 'line %09.0f' $((k*2000+1)) $((k*2000+2000)); sleep 0.05; done; exit 7\n";

/// An agent's machine: the folder and the descriptors outlive its process.
struct Machine {
    fake: FakeControlPlane,
    store: DescriptorStore,
    allocation_id: Uuid,
    agent: Option<SpawnedAgent>,
    folder: TempDir,
}

impl Machine {
    async fn start() -> Self {
        let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
        let store = DescriptorStore::start(folder.path());
        let mut it = Self { fake, store, allocation_id: Uuid::now_v7(), agent: None, folder };
        it.start_agent(Path::new(PROGRAM));
        eventually(|| (!it.fake.calls().heartbeats.is_empty()).then_some(())).await;
        it.fake.set_up(it.allocation_id).await;
        it
    }

    fn start_agent(&mut self, program: &Path) {
        let bundle = self.fake.bundle(self.folder.path());
        self.agent = Some(SpawnedAgent::start_by(
            self.store.command(program),
            self.folder.path(),
            &bundle,
            &["--simulate-gpus", "2"],
        ));
    }

    fn agent(&self) -> &SpawnedAgent {
        self.agent.as_ref().unwrap()
    }

    /// Ends the process, and returns when it is gone.
    async fn end_agent(&mut self, signal: Signal) {
        let mut agent = self.agent.take().unwrap();
        agent.signal(signal);
        agent.exit().await;
        self.store.settle();
    }

    /// Dispatches a session, and returns it with its task.
    fn dispatch_terminal(&self, mode: RecordMode) -> (Uuid, Uuid) {
        let session_id = Uuid::now_v7();
        let task = self.fake.payload(Task::OpenTerminal(OpenTerminal {
            session_id,
            allocation_id: self.allocation_id,
            user_name: "tenant".into(),
            ends_at: Utc::now() + TimeDelta::minutes(10),
            recording: RecordTerms { mode, most_bytes: 64 << 20 },
        }));
        self.fake.dispatch(&task);
        (session_id, task.task_id)
    }

    async fn open_terminal(&self, mode: RecordMode) -> Uuid {
        let (session_id, task_id) = self.dispatch_terminal(mode);
        let result = self.fake.result_of(task_id).await;
        assert_eq!(result.status, TaskStatus::Succeeded, "{result:?}");
        session_id
    }

    fn enter(&self, session_id: Uuid, text: &str) {
        self.fake.calls().terminals.entry(session_id).or_default().input.push_back(text.into());
    }

    async fn wait_for<T>(&self, session_id: Uuid, mut look: impl FnMut(&SeenTerminal) -> Option<T>) -> T {
        eventually(|| self.fake.calls().terminals.get(&session_id).and_then(&mut look)).await
    }

    /// The number after `what` in the output.
    async fn number(&self, session_id: Uuid, what: &str) -> i32 {
        self.wait_for(session_id, |seen| {
            let text = String::from_utf8_lossy(&seen.output).into_owned();
            let (_, rest) = text.rsplit_once(what)?;
            let (number, _) = rest.split_once('.')?;
            number.parse().ok()
        })
        .await
    }
}

fn lines(output: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(output);
    text.lines().filter(|line| line.starts_with("line ")).map(str::to_owned).collect()
}

fn expected_lines() -> Vec<String> {
    (1..=LINES).map(|number| format!("line {number:09}")).collect()
}

fn is_alive(pid: i32) -> bool {
    kill(Pid::from_raw(pid), None).is_ok()
}

/// The other program of an update: the same content at another place.
fn other_program(folder: &Path) -> PathBuf {
    let path = folder.join("gpuaas-agent-next");
    std::fs::copy(PROGRAM, &path).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn session_outlives_restarts_kills_and_an_update_without_losing_a_byte() {
    for mode in [RecordMode::Strict, RecordMode::BestEffort, RecordMode::Off] {
        let mut machine = Machine::start().await;
        let other = other_program(machine.folder.path());
        let session_id = machine.open_terminal(mode).await;
        machine.enter(session_id, "stty -echo; PS1=\n");
        machine.enter(session_id, WRITER);
        machine.wait_for(session_id, |seen| (!lines(&seen.output).is_empty()).then_some(())).await;
        let programs = [Path::new(PROGRAM), other.as_path()];
        let ends =
            [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGKILL, Signal::SIGKILL, Signal::SIGTERM, Signal::SIGKILL];
        for (round, signal) in ends.into_iter().enumerate() {
            sleep(Duration::from_millis(90 + 37 * round as u64)).await;
            machine.end_agent(signal).await;
            machine.start_agent(programs[round % 2]);
            let streams = round as u32 + 2;
            machine.wait_for(session_id, |seen| (seen.streams >= streams).then_some(())).await;
        }
        let exit = machine.wait_for(session_id, |seen| seen.exit).await;
        assert_eq!(exit, ProgramExit::Code(7));
        eventually(|| (machine.store.len() == 0).then_some(())).await;
        if mode != RecordMode::Off {
            machine.wait_for(session_id, |seen| seen.recording().2).await;
        }
        let calls = machine.fake.calls();
        let seen = &calls.terminals[&session_id];
        assert_eq!((seen.missing, seen.is_lost, seen.has_conflict), (0, false, false), "{mode:?}");
        assert!(lines(&seen.output) == expected_lines(), "{mode:?}: {} lines", lines(&seen.output).len());
        if mode != RecordMode::Off {
            let (recorded, gaps, end) = seen.recording();
            assert_eq!((gaps, end), (0, Some(RecordingEnd::Session)), "{mode:?}");
            assert!(recorded == seen.output, "{mode:?}: {} bytes recorded of {}", recorded.len(), seen.output.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn program_that_ends_without_an_agent_reports_its_own_exit() {
    let mut machine = Machine::start().await;
    let session_id = machine.open_terminal(RecordMode::Strict).await;
    let signalled = machine.open_terminal(RecordMode::Strict).await;
    // They end once there is no agent.
    let gate = machine.folder.path().join("go");
    let waits = format!("echo shell-is $$.; while [ ! -e {} ]; do sleep 0.05; done", gate.display());
    machine.enter(session_id, &format!("{waits}; echo af''ter; exit 5\n"));
    machine.enter(signalled, &format!("{waits}; kill -SEGV $$\n"));
    let shells = [machine.number(session_id, "shell-is ").await, machine.number(signalled, "shell-is ").await];
    machine.end_agent(Signal::SIGKILL).await;
    std::fs::write(&gate, "").unwrap();
    eventually(|| shells.iter().all(|shell| !is_alive(*shell)).then_some(())).await;
    machine.start_agent(Path::new(PROGRAM));
    assert_eq!(machine.wait_for(session_id, |seen| seen.exit).await, ProgramExit::Code(5));
    assert_eq!(machine.wait_for(signalled, |seen| seen.exit).await, ProgramExit::Signal(11));
    let output = machine.wait_for(session_id, |seen| Some(seen.output.clone())).await;
    assert!(String::from_utf8_lossy(&output).contains("after\r"), "{}", String::from_utf8_lossy(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_killed_as_it_begins_a_session_leaves_it_to_the_next_or_leaves_nothing() {
    let mut machine = Machine::start().await;
    let pid = Arc::new(Mutex::new(None::<i32>));
    let victim = Arc::clone(&pid);
    machine.store.on_notification(move |text| {
        if let Some(pid) = victim.lock().unwrap().take_if(|_| text.contains("FDSTORE=1")) {
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        }
    });
    let mut continued = 0;
    for round in 0..14 {
        let (session_id, task_id) = machine.dispatch_terminal(RecordMode::Strict);
        if round < 4 {
            // Before the session's task is done in the journal.
            *pid.lock().unwrap() = Some(machine.agent().pid());
            machine.agent.as_mut().unwrap().exit().await;
            machine.store.settle();
        } else {
            machine.agent().wait_for_message("task started").await;
            sleep(Duration::from_millis(round - 4)).await;
            machine.end_agent(Signal::SIGKILL).await;
        }
        let is_stored = machine.store.len() > 0;
        machine.start_agent(Path::new(PROGRAM));
        let result = machine.fake.result_of(task_id).await;
        if is_stored {
            continued += 1;
            assert_eq!(result.status, TaskStatus::Succeeded, "{result:?}");
            machine.enter(session_id, "exit 3\n");
            assert_eq!(machine.wait_for(session_id, |seen| seen.exit).await, ProgramExit::Code(3));
        } else {
            assert_eq!(result.error.unwrap().code, "outcome_unknown");
        }
        eventually(|| (machine.store.len() == 0).then_some(())).await;
        eventually(|| programs_in(&machine.folder).is_empty().then_some(())).await;
    }
    assert!(continued >= 4, "{continued}");
}

/// The tenant's processes, whose homes are in the machine's folder.
fn programs_in(folder: &TempDir) -> Vec<PathBuf> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let is_of = |process: &PathBuf| {
        let folder = folder.path();
        std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder))
    };
    processes.filter(is_of).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn session_of_an_unknown_version_is_lost_and_its_program_ends() {
    let mut machine = Machine::start().await;
    let [unknown, known] =
        [machine.open_terminal(RecordMode::Strict).await, machine.open_terminal(RecordMode::Strict).await];
    for session_id in [unknown, known] {
        machine.enter(session_id, "echo shell-is $$.\n");
    }
    let (unknown_shell, known_shell) =
        (machine.number(unknown, "shell-is ").await, machine.number(known, "shell-is ").await);
    machine.end_agent(Signal::SIGKILL).await;
    let name = format!("terminal-{}", unknown.simple());
    let stored = machine.store.stored(&name).into_iter().map(std::fs::File::from);
    let file = stored.into_iter().find(|file| file.metadata().unwrap().is_file()).unwrap();
    file.write_all_at(&[0xff, 0xfe], 8).unwrap();
    drop(file);
    machine.start_agent(Path::new(PROGRAM));
    machine.agent().wait_for_error_code("terminal_not_adopted").await;
    machine.wait_for(unknown, |seen| seen.is_lost.then_some(())).await;
    eventually(|| (!is_alive(unknown_shell)).then_some(())).await;
    machine.enter(known, "echo still-here $((6*7)).\n");
    assert_eq!(machine.number(known, "still-here ").await, 42);
    assert!(is_alive(known_shell));
    eventually(|| (machine.store.len() == 4).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn program_ends_when_the_service_manager_drops_its_session() {
    let mut machine = Machine::start().await;
    let session_id = machine.open_terminal(RecordMode::Off).await;
    // It neither reads the terminal nor ends when it hangs up.
    machine.enter(session_id, "trap '' HUP; echo shell-is $$.; exec sleep 1000 < /dev/null > /dev/null 2>&1\n");
    let shell = machine.number(session_id, "shell-is ").await;
    machine.end_agent(Signal::SIGTERM).await;
    sleep(Duration::from_secs(1)).await;
    assert!(is_alive(shell), "it waits for the next agent");
    machine.store.drop_all();
    eventually(|| (!is_alive(shell)).then_some(())).await;
    machine.start_agent(Path::new(PROGRAM));
    machine.wait_for(session_id, |seen| seen.is_lost.then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn service_manager_is_notified_of_the_start_without_a_control_plane() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeControlPlane::start().await;
    let store = DescriptorStore::start(folder.path());
    let mut bundle = fake.bundle(folder.path());
    // Nothing listens on the port of `tcpmux`.
    bundle.api_url = "https://127.0.0.1:1".into();
    let mut agent =
        SpawnedAgent::start_by(store.command(Path::new(PROGRAM)), folder.path(), &bundle, &["--simulate-gpus", "2"]);
    eventually(|| (store.count("READY=1") == 1).then_some(())).await;
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.exit().await.code(), Some(0));
    store.settle();
    assert_eq!(store.count("STOPPING=1"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn watchdog_of_the_service_manager_is_fed_while_the_agent_makes_progress() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeControlPlane::start().await;
    let store = DescriptorStore::start(folder.path());
    let mut program = store.command(Path::new(PROGRAM));
    program.env("WATCHDOG_USEC", "300000");
    let bundle = fake.bundle(folder.path());
    let mut agent = SpawnedAgent::start_by(program, folder.path(), &bundle, &["--simulate-gpus", "2"]);
    let fed = |least| {
        let store = &store;
        move || (store.count("WATCHDOG=1") >= least).then_some(())
    };
    eventually(fed(5)).await;
    agent.signal(Signal::SIGSTOP);
    let status = format!("/proc/{}/status", agent.pid());
    eventually(|| std::fs::read_to_string(&status).unwrap().contains("State:\tT").then_some(())).await;
    store.settle();
    let before = store.count("WATCHDOG=1");
    sleep(Duration::from_millis(500)).await;
    store.settle();
    assert_eq!(store.count("WATCHDOG=1"), before);
    agent.signal(Signal::SIGCONT);
    eventually(fed(before + 1)).await;
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.exit().await.code(), Some(0));
}
