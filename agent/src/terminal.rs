//! The agent's end of terminal sessions: a shell on a pseudo-terminal for each session, as the allocation's user, and the stream on which
//! the control plane reaches it.
//!
//! The shell, its output position and the buffered output live here and nowhere else, so that no replica that fails takes anything of a
//! session with it. The session ends with its program, on request of the control plane, or at its lifetime, which the agent enforces by
//! itself. An agent that is stopped reports each session as lost; after a kill, the next agent reports it.

mod output;
mod recording;
mod session;
mod stream;

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use chrono::Utc;
use futures::StreamExt as _;
use tokio::process::Child;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument as _, info, warn};
use uuid::Uuid;
use wire::recording::RecordMode;
use wire::task::OpenTerminal;

use crate::executor::TaskFailure;
use crate::process_attributes;
use recording::{Recorder, Upload};

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
    sends: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl TerminalSessions {
    #[must_use]
    pub fn new(spools: Spools, tasks: TaskTracker, stop: CancellationToken) -> Self {
        Self { live: Arc::default(), spools, sends: Arc::new(Semaphore::new(CONCURRENT_UPLOADS)), tasks, stop }
    }

    /// Uploads what an earlier agent has recorded and not uploaded. To be called before any session is started.
    pub fn upload_leftovers(&self, transport: &Arc<dyn TerminalTransport>) {
        for session_id in self.spools.leftover_sessions() {
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
        let left = (task.ends_at - Utc::now()).to_std();
        let left = left.map_err(|_| TaskFailure::new("terminal_over", "the session's lifetime is over"))?;
        let slot = SessionSlot::take(self, task.session_id, task.allocation_id)?;
        let (recorder, upload) = self.record(task, &transport).await?;
        let failed = |error: pty_process::Error| TaskFailure::new("terminal_shell", format!("no shell: {error}"));
        let (pty, child) = spawn(shell).map_err(failed)?;
        let (to_session, from_stream) = mpsc::channel(INBOUND_QUEUE);
        let (to_stream, from_session) = mpsc::channel(OUTBOUND_QUEUE);
        let over = CancellationToken::new();
        let stream =
            stream::Stream { session_id: task.session_id, transport, to_session, from_session, over: over.clone() };
        let stop = self.stop.clone();
        let ends = session::SessionCancellation { over, stop, released: slot.released.clone() };
        let session = session::Session::new(pty, child, recorder, from_stream, to_stream, left, ends);
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
        info!(terminal_session_id = %task.session_id, "a terminal session begins");
        Ok(())
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
            let until = tokio::time::Instant::now() + (session.ends_at - Utc::now()).to_std().unwrap_or_default();
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

fn spawn(shell: &ShellCommand) -> pty_process::Result<(pty_process::Pty, Child)> {
    let (pty, pts) = pty_process::open()?;
    pty.resize(pty_process::Size::new(ROWS, COLUMNS))?;
    let words = shell.command_line();
    let (program, arguments) = words.split_first().ok_or_else(|| std::io::Error::other("there is no shell"))?;
    let command = pty_process::Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(shell.environment.iter().map(|(name, value)| (name, value)))
        .current_dir(&shell.folder)
        .kill_on_drop(true);
    if let Some(id) = shell.user {
        let owner = (nix::unistd::Uid::from_raw(id), nix::unistd::Gid::from_raw(id));
        // Its programs also open the terminal by name.
        nix::unistd::fchown(pts.as_fd(), Some(owner.0), Some(owner.1)).map_err(std::io::Error::from)?;
    }
    let child = command.spawn(pts)?;
    Ok((pty, child))
}

#[cfg(test)]
#[path = "../tests/skipped/mod.rs"]
mod skipped;

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::{Mode as Permissions, umask};
    use nix::unistd::{Gid, Uid, setgroups};
    use tokio::io::AsyncReadExt as _;

    /// The output of a shell that runs this script on its terminal.
    async fn said(shell: &ShellCommand, script: &str) -> String {
        let shell = ShellCommand { arguments: vec!["-c".to_owned(), script.to_owned()], ..shell.clone() };
        let (mut pty, mut child) = spawn(&shell).unwrap();
        let (mut said, mut part) = (Vec::new(), [0; 4096]);
        // EIO: the last process that had the terminal has closed it.
        while let Ok(read @ 1..) = pty.read(&mut part).await {
            said.extend_from_slice(&part[..read]);
        }
        assert!(child.wait().await.unwrap().success());
        String::from_utf8(said).unwrap()
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
        let said = said(&shell(None), "umask; cat /proc/self/oom_score_adj").await;
        assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["0022", "0"]);
    }

    #[tokio::test]
    async fn launched_shell_and_terminal_belong_to_the_tenant_without_root_groups() {
        if !Uid::effective().is_root() {
            return skipped::report_skipped("it needs root, to begin the shell of another user");
        }
        setgroups(&[Gid::from_raw(4), Gid::from_raw(0)]).unwrap();
        let launched = ["env", "IN_SLICE=yes"].map(str::to_owned).into();
        for (launcher, in_slice) in [(Vec::new(), "no"), (launched, "yes")] {
            let shell = ShellCommand { launcher, ..shell(Some(70_001)) };
            let said = said(&shell, "id -u; id -G; stat -c %u:%g $(tty); echo ${IN_SLICE:-no}; tty > $(tty)").await;
            let said: Vec<&str> = said.split_whitespace().collect();
            assert_eq!(&said[..4], ["70001", "70001", "70001:70001", in_slice]);
            assert!(said[4].starts_with("/dev/pts/"), "it opens its terminal by name: {said:?}");
        }
    }
}
