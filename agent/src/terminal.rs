//! The agent's end of terminal sessions: a shell on a pseudo-terminal for each session, as the allocation's user, and the stream on which
//! the control plane reaches it.
//!
//! The shell, its output position and the buffered output live here and nowhere else, so that no replica that fails takes anything of a
//! session with it. The session ends with its program, on request of the control plane, or at its lifetime, which the agent enforces by
//! itself. Where a service manager keeps descriptors, a session outlives the agent's process, and the next one continues it
//! ([`handover`]). Otherwise an agent that is stopped reports each session as lost; after a kill, the next agent reports it.

mod output;
mod pty;
mod recording;
mod session;
pub mod session_handover;
mod stream;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures::StreamExt as _;
use tokio::process::Child;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument as _, info, warn};
use uuid::Uuid;
use wire::recording::RecordMode;
use wire::task::OpenTerminal;
use wire::terminal::RETAINED_OUTPUT;

use crate::process_attributes;
use crate::server_clock::ServerClock;
use crate::service_manager::ServiceManager;
use crate::task_outcome::TaskFailure;
use output::OutputBuffer;
use pty::PtyMaster;
use recording::{Recorder, Upload};
use session::{Program, ReadBuffer, SessionParts, StoredSession};
use session_handover::{Adopted, OutputLog, SessionStore};

pub use recording::Spools;
pub use stream::{StreamError, TerminalSocket, TerminalTransport, UploadError};

/// The most concurrent sessions of one allocation, independent of the control plane's own limit.
const MAX_PER_ALLOCATION: usize = 64;

/// How many lost sessions are reported concurrently.
const CONCURRENT_LOST_REPORTS: usize = 16;

/// The size of a terminal until its user sets it.
const ROWS: u16 = 24;
const COLUMNS: u16 = 80;

/// How many recordings are uploaded concurrently.
const CONCURRENT_UPLOADS: usize = 4;

/// The capacity of the channel to a session.
const INBOUND_QUEUE: usize = 16;
/// The capacity of the channel from a session: small, so that output in between becomes one long message instead of many short ones.
const OUTBOUND_QUEUE: usize = 2;

/// How a tenant's shell is started: with this environment only, since the agent's own holds its secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShellCommand {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// A command of root that precedes the shell and executes it, such as one that puts it into a slice. Empty: none.
    pub launcher: Vec<String>,
    /// Uid and gid; `None`: the agent's own.
    pub user: Option<u32>,
    pub folder: PathBuf,
    pub environment: Vec<(String, String)>,
}

impl ShellCommand {
    /// With the defaults of a login first, then the launcher, then the change of user.
    fn command_line(&self) -> Vec<String> {
        let mut words: Vec<String> = process_attributes::command_prefix().map(str::to_owned).into();
        words.extend(self.launcher.iter().cloned());
        if let Some(id) = self.user {
            // A tool, since a process that has changed its user cannot do what precedes. Without root's groups.
            let becomes = ["setpriv", &format!("--reuid={id}"), &format!("--regid={id}"), "--clear-groups", "--"];
            words.extend(becomes.map(str::to_owned));
        }
        words.push(self.program.to_string_lossy().into_owned());
        words.extend(self.arguments.iter().cloned());
        words
    }
}

/// By session.
type LiveSessions = Arc<Mutex<BTreeMap<Uuid, LiveSession>>>;

struct LiveSession {
    allocation_id: Uuid,
    /// Cancelled when the allocation is released.
    released: CancellationToken,
}

/// The running sessions.
#[derive(Clone)]
pub struct TerminalSessions {
    live: LiveSessions,
    spools: Spools,
    store: SessionStore,
    clock: ServerClock,
    sends: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl TerminalSessions {
    #[must_use]
    pub fn new(
        spools: Spools,
        manager: Arc<ServiceManager>,
        clock: ServerClock,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let (store, sends) = (SessionStore::new(manager), Arc::new(Semaphore::new(CONCURRENT_UPLOADS)));
        Self { live: Arc::default(), spools, store, clock, sends, tasks, stop }
    }

    /// Continues the sessions that an earlier process of the agent left, and returns which these are. To be called before any session is
    /// started.
    pub fn adopt(&self, transport: &Arc<dyn TerminalTransport>) -> BTreeSet<Uuid> {
        let mut continued = BTreeSet::new();
        for left in self.store.adopt() {
            let session_id = left.task.session_id;
            match self.resume(left, transport) {
                Ok(()) => {
                    info!(terminal_session_id = %session_id, "a terminal session from before the restart continues");
                    continued.insert(session_id);
                }
                Err(error) => {
                    warn!(terminal_session_id = %session_id, error = %error, "a terminal session cannot be continued, and is ended");
                    self.store.remove(session_id);
                }
            }
        }
        continued
    }

    fn resume(&self, left: Adopted, transport: &Arc<dyn TerminalTransport>) -> io::Result<()> {
        let Adopted { task, pty, program, mut log, record, acknowledged, input, recording } = left;
        let (spool, committed) = self.spools.adopt(task.session_id, recording.before, recording.after)?;
        let bounds = (log.read_from(0)?, log.end());
        let (recorder, from) = Recorder::adopt(Arc::clone(&spool), committed, recording, record.clone(), bounds);
        log.read_from(from)?;
        let output = OutputBuffer::over_log(log.tail()?, RETAINED_OUTPUT, from);
        let stored = StoredSession { session_id: task.session_id, record, store: self.store.clone() };
        let parts = SessionParts {
            pty,
            program: Program::Held(program),
            recorder,
            read_buffer: ReadBuffer::new(Some(log)),
            output,
            acknowledged: acknowledged.min(from),
            typed: input.into(),
            stored: Some(stored),
        };
        let upload = Upload::new(spool, Arc::clone(transport), Arc::clone(&self.sends), self.stop.clone());
        let slot = SessionSlot::take(self, task.session_id, task.allocation_id).map_err(io::Error::other)?;
        self.run(&task, slot, parts, upload, Arc::clone(transport));
        Ok(())
    }

    /// Uploads what an earlier agent has recorded and not uploaded, of sessions that are not `continued`. To be called before any session is
    /// started.
    pub fn upload_leftovers(&self, continued: &BTreeSet<Uuid>, transport: &Arc<dyn TerminalTransport>) {
        for session_id in self.spools.leftover_sessions().into_iter().filter(|it| !continued.contains(it)) {
            let (spools, transport, sends) = (self.spools.clone(), Arc::clone(transport), Arc::clone(&self.sends));
            let stop = self.stop.clone();
            self.tasks.spawn(async move {
                match Upload::of_leftover(&spools, session_id, transport, sends, stop).await {
                    Ok(upload) => upload.run().await,
                    Err(error) => {
                        warn!(terminal_session_id = %session_id, error = %error, "a recording that was left cannot be read");
                    }
                }
            });
        }
    }

    /// Whether the session runs here.
    #[must_use]
    pub fn is_live(&self, session_id: Uuid) -> bool {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&session_id)
    }

    /// Starts a session: its shell runs when this returns.
    ///
    /// # Errors
    /// `too_many_terminals`, `terminal_over`, `recording_unavailable`, `terminal_shell`.
    pub async fn begin(
        &self,
        task: &OpenTerminal,
        shell: &ShellCommand,
        transport: Arc<dyn TerminalTransport>,
    ) -> Result<(), TaskFailure> {
        if task.ends_at <= self.clock.now() {
            return Err(TaskFailure::new("terminal_over", "the session's lifetime is over"));
        }
        let slot = SessionSlot::take(self, task.session_id, task.allocation_id)?;
        let (recorder, upload) = self.record(task, &transport).await?;
        let parts = if self.store.reserve() {
            self.start_stored(task, shell, recorder).await
        } else {
            start_child(shell, recorder).map_err(|error| error.to_string())
        };
        let parts = parts.map_err(|why| TaskFailure::new("terminal_shell", format!("no shell: {why}")))?;
        self.run(task, slot, parts, upload, transport);
        info!(terminal_session_id = %task.session_id, "a terminal session begins");
        Ok(())
    }

    /// A session that outlives this process of the agent.
    async fn start_stored(
        &self,
        task: &OpenTerminal,
        shell: &ShellCommand,
        mut recorder: Recorder,
    ) -> Result<SessionParts, String> {
        let (session_id, point) = (task.session_id, recorder.point());
        let failed = |error: io::Error| {
            self.store.remove(session_id);
            error.to_string()
        };
        let terminal = open_terminal(shell).map_err(|error| failed(io::Error::other(error)))?;
        let log = OutputLog::create().map_err(failed)?;
        let begun = self.store.begin(task, shell, terminal, log, point).await;
        let begun = begun.map_err(|error| crate::chain(&error))?;
        recorder.announce_in(begun.record.clone());
        let output = begun.log.tail().map_err(failed)?;
        Ok(SessionParts {
            pty: begun.pty,
            program: Program::Held(begun.program),
            recorder,
            output: OutputBuffer::over_log(output, RETAINED_OUTPUT, 0),
            read_buffer: ReadBuffer::new(Some(begun.log)),
            acknowledged: 0,
            typed: VecDeque::new(),
            stored: Some(StoredSession { session_id, record: begun.record, store: self.store.clone() }),
        })
    }

    /// Runs a session, its stream and its upload.
    fn run(
        &self,
        task: &OpenTerminal,
        slot: SessionSlot,
        parts: SessionParts,
        upload: Upload,
        transport: Arc<dyn TerminalTransport>,
    ) {
        let left = (task.ends_at - self.clock.now()).to_std().unwrap_or_default();
        let (to_session, from_stream) = mpsc::channel(INBOUND_QUEUE);
        let (to_stream, from_session) = mpsc::channel(OUTBOUND_QUEUE);
        let over = CancellationToken::new();
        let stream =
            stream::Stream { session_id: task.session_id, transport, to_session, from_session, over: over.clone() };
        let stop = self.stop.clone();
        let ends = session::SessionCancellation { over, stop, released: slot.released.clone() };
        let session = session::Session::new(parts, from_stream, to_stream, left, ends);
        self.tasks.spawn(stream.run().in_current_span());
        self.tasks.spawn(upload.run().in_current_span());
        self.tasks.spawn(
            async move {
                session.run().await;
                drop(slot);
                info!("the terminal session is over");
            }
            .in_current_span(),
        );
    }
}

impl TerminalSessions {
    /// The allocation is about to be released: the exit of its shells from now on is not their programs' own.
    pub fn release_allocation(&self, allocation_id: Uuid) {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.values().filter(|it| it.allocation_id == allocation_id).for_each(|it| it.released.cancel());
    }

    /// Starts the recording. A session that must be recorded and cannot be does not start.
    async fn record(
        &self,
        task: &OpenTerminal,
        transport: &Arc<dyn TerminalTransport>,
    ) -> Result<(Recorder, Upload), TaskFailure> {
        let spools = self.spools.clone();
        let (session_id, terms) = (task.session_id, task.recording);
        let begin = move || {
            let spool = spools.begin(session_id);
            let mut recorder = Recorder::new(Arc::clone(&spool), terms, (COLUMNS, ROWS));
            let begun = recorder.begin();
            (spool, recorder, begun)
        };
        let begun = tokio::task::spawn_blocking(begin).await;
        let unavailable = |why: String| TaskFailure::new("recording_unavailable", format!("no recording: {why}"));
        let (spool, recorder, begun) = begun.map_err(|error| unavailable(error.to_string()))?;
        if let Err(why) = begun {
            if terms.mode == RecordMode::Strict {
                return Err(unavailable(why.to_string()));
            }
            warn!(terminal_session_id = %session_id, %why, "a terminal session begins without its recording");
        }
        Ok((recorder, Upload::new(spool, Arc::clone(transport), Arc::clone(&self.sends), self.stop.clone())))
    }

    /// Reports the sessions that an earlier process of the agent started as lost.
    pub async fn report_lost(&self, sessions: Vec<OpenTerminal>, transport: &dyn TerminalTransport) {
        let say = |session: OpenTerminal| async move {
            let until = tokio::time::Instant::now() + (session.ends_at - self.clock.now()).to_std().unwrap_or_default();
            stream::report_lost(session.session_id, transport, until).await;
        };
        let all = futures::stream::iter(sessions).for_each_concurrent(CONCURRENT_LOST_REPORTS, say);
        tokio::select! {
            () = all => {}
            () = self.stop.cancelled() => {}
        }
    }
}

/// A session's slot within the limit of its allocation; freed when it is dropped.
struct SessionSlot {
    session_id: Uuid,
    released: CancellationToken,
    live: LiveSessions,
}

impl SessionSlot {
    fn take(terminals: &TerminalSessions, session_id: Uuid, allocation_id: Uuid) -> Result<Self, TaskFailure> {
        let mut live = terminals.live.lock().unwrap_or_else(PoisonError::into_inner);
        if live.values().filter(|it| it.allocation_id == allocation_id).count() >= MAX_PER_ALLOCATION {
            return Err(TaskFailure::new("too_many_terminals", "the allocation has too many terminals"));
        }
        let released = CancellationToken::new();
        live.insert(session_id, LiveSession { allocation_id, released: released.clone() });
        Ok(Self { session_id, released, live: Arc::clone(&terminals.live) })
    }
}

impl Drop for SessionSlot {
    fn drop(&mut self) {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.session_id);
    }
}

/// A session that ends with this process of the agent.
fn start_child(shell: &ShellCommand, recorder: Recorder) -> pty_process::Result<SessionParts> {
    let (pty, child) = spawn(shell)?;
    Ok(SessionParts {
        pty,
        program: Program::Child(child),
        recorder,
        read_buffer: ReadBuffer::new(None),
        output: OutputBuffer::with_capacity(RETAINED_OUTPUT),
        acknowledged: 0,
        typed: VecDeque::new(),
        stored: None,
    })
}

fn spawn(shell: &ShellCommand) -> pty_process::Result<(PtyMaster, Child)> {
    let (pty, pts) = open_pair(shell)?;
    let words = shell.command_line();
    let (program, arguments) = words.split_first().ok_or_else(|| io::Error::other("there is no shell"))?;
    let command = pty_process::Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(shell.environment.iter().map(|(name, value)| (name, value)))
        .current_dir(&shell.folder)
        .kill_on_drop(true);
    let child = command.spawn(pts)?;
    Ok((PtyMaster::new(pty.into())?, child))
}

/// Both ends of a terminal for a program that another process starts.
fn open_terminal(shell: &ShellCommand) -> pty_process::Result<(PtyMaster, OwnedFd)> {
    let (pty, pts) = open_pair(shell)?;
    Ok((PtyMaster::new(pty.into())?, pts.as_fd().try_clone_to_owned()?))
}

fn open_pair(shell: &ShellCommand) -> pty_process::Result<(pty_process::Pty, pty_process::Pts)> {
    let (pty, pts) = pty_process::open()?;
    pty.resize(pty_process::Size::new(ROWS, COLUMNS))?;
    if let Some(id) = shell.user {
        let owner = (nix::unistd::Uid::from_raw(id), nix::unistd::Gid::from_raw(id));
        // Its programs also open the terminal by name.
        nix::unistd::fchown(pts.as_fd(), Some(owner.0), Some(owner.1)).map_err(io::Error::from)?;
    }
    Ok((pty, pts))
}

#[cfg(test)]
#[path = "../tests/skipped_tests/mod.rs"]
pub(crate) mod skipped_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::{Mode as Permissions, umask};
    use nix::unistd::{Gid, Uid, setgroups};

    /// The output of a shell that runs this script on its terminal.
    async fn shell_output(shell: &ShellCommand, script: &str) -> String {
        let shell = ShellCommand { arguments: vec!["-c".to_owned(), script.to_owned()], ..shell.clone() };
        let (pty, mut child) = spawn(&shell).unwrap();
        let (mut output, mut part) = (Vec::new(), [0; 4096]);
        // EIO: the last process that had the terminal has closed it.
        while let Ok(read @ 1..) = pty.read(&mut part).await {
            output.extend_from_slice(&part[..read]);
        }
        assert!(child.wait().await.unwrap().success());
        String::from_utf8(output).unwrap()
    }

    fn shell(user: Option<u32>) -> ShellCommand {
        let environment = vec![("PATH".to_owned(), "/usr/bin:/bin:/usr/sbin:/sbin".to_owned())];
        let launcher = Vec::new();
        ShellCommand {
            program: "/bin/sh".into(),
            arguments: Vec::new(),
            launcher,
            user,
            folder: "/".into(),
            environment,
        }
    }

    #[tokio::test]
    async fn shell_has_login_umask_and_oom_score_not_the_agents() {
        umask(Permissions::from_bits_truncate(0o077));
        std::fs::write("/proc/self/oom_score_adj", "500").unwrap();
        let output = shell_output(&shell(None), "umask; cat /proc/self/oom_score_adj").await;
        assert_eq!(output.split_whitespace().collect::<Vec<_>>(), ["0022", "0"]);
    }

    #[tokio::test]
    async fn launched_shell_and_terminal_belong_to_the_tenant_without_root_groups() {
        if !Uid::effective().is_root() {
            return skipped_tests::report_skipped("it needs root, to begin the shell of another user");
        }
        setgroups(&[Gid::from_raw(4), Gid::from_raw(0)]).unwrap();
        let launched = ["env", "IN_SLICE=yes"].map(str::to_owned).into();
        for (launcher, in_slice) in [(Vec::new(), "no"), (launched, "yes")] {
            let shell = ShellCommand { launcher, ..shell(Some(70_001)) };
            let output =
                shell_output(&shell, "id -u; id -G; stat -c %u:%g $(tty); echo ${IN_SLICE:-no}; tty > $(tty)").await;
            let output: Vec<&str> = output.split_whitespace().collect();
            assert_eq!(&output[..4], ["70001", "70001", "70001:70001", in_slice]);
            assert!(output[4].starts_with("/dev/pts/"), "it opens its terminal by name: {output:?}");
        }
    }
}
