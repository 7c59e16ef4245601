//! The agent's end of terminals: a shell on a pseudo-terminal for each session, as the allocation's user, and the stream on which the
//! control plane reaches it.
//!
//! The shell, the count of its output and what is kept of it live here and nowhere else, so that no replica that dies takes anything of
//! a session along. The session ends with its program, when the control plane says so, or at its lifetime, which the agent keeps to by
//! itself. An agent that is stopped says of each that it is lost; one that was killed is followed by one that says it.

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
use wire::recording::Mode;
use wire::task::OpenTerminal;

use crate::executor::Failure;
use crate::login;
use recording::{Recorder, Upload};

pub use recording::Spools;
pub use stream::{NoStream, NotSent, Socket, Way};

/// Sessions of one allocation at once, whatever the control plane says.
const OF_ONE_ALLOCATION: usize = 64;

/// Sessions of before that are spoken of at once.
const LOST_AT_ONCE: usize = 16;

/// The size of a terminal whose user has not said theirs.
const ROWS: u16 = 24;
const COLUMNS: u16 = 80;

/// Recordings that are sent at once.
const SENDS_AT_ONCE: usize = 4;

/// Messages to a session that are on their way.
const QUEUE: usize = 16;
/// Messages from a session that are on their way: few, so that what comes meanwhile becomes one long message and not many short ones.
const SAID: usize = 2;

/// How a tenant's shell is begun: with this environment and no other, since the agent's own holds its secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shell {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// Root's command that goes before it and becomes it, such as one that puts it into a slice. Empty: none.
    pub launcher: Vec<String>,
    /// Uid and gid; `None`: the agent's own.
    pub user: Option<u32>,
    pub folder: PathBuf,
    pub environment: Vec<(String, String)>,
}

impl Shell {
    /// Begun like a login, launched, and only then the user's.
    fn words(&self) -> Vec<String> {
        let mut words: Vec<String> = login::words().map(str::to_owned).into();
        words.extend(self.launcher.iter().cloned());
        if let Some(id) = self.user {
            // A tool, since who has become somebody else cannot do what goes before. Without root's groups.
            let becomes = ["setpriv", &format!("--reuid={id}"), &format!("--regid={id}"), "--clear-groups", "--"];
            words.extend(becomes.map(str::to_owned));
        }
        words.push(self.program.to_string_lossy().into_owned());
        words.extend(self.arguments.iter().cloned());
        words
    }
}

/// By session.
type Live = Arc<Mutex<BTreeMap<Uuid, Running>>>;

struct Running {
    allocation_id: Uuid,
    /// Cancelled when the allocation is being given back.
    given_back: CancellationToken,
}

/// The sessions that run.
#[derive(Clone)]
pub struct Terminals {
    live: Live,
    spools: Spools,
    sends: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Terminals {
    #[must_use]
    pub fn new(spools: Spools, tasks: TaskTracker, stop: CancellationToken) -> Self {
        Self { live: Arc::default(), spools, sends: Arc::new(Semaphore::new(SENDS_AT_ONCE)), tasks, stop }
    }

    /// Sends what an earlier agent has recorded and not sent. To be called before any session begins.
    pub fn send_what_is_left(&self, way: &Arc<dyn Way>) {
        for session_id in self.spools.left() {
            let (spools, way, sends) = (self.spools.clone(), Arc::clone(way), Arc::clone(&self.sends));
            let stop = self.stop.clone();
            self.tasks.spawn(async move {
                match Upload::of_left(&spools, session_id, way, sends, stop).await {
                    Ok(upload) => upload.run().await,
                    Err(error) => {
                        warn!(terminal_session_id = %session_id, error = %error, "a recording that was left cannot be read");
                    }
                }
            });
        }
    }

    /// Begins a session: its shell runs when this returns.
    ///
    /// # Errors
    /// `too_many_terminals`, `terminal_over`, `recording_unavailable`, `terminal_shell`.
    pub async fn begin(&self, task: &OpenTerminal, shell: &Shell, way: Arc<dyn Way>) -> Result<(), Failure> {
        let left = (task.ends_at - Utc::now()).to_std();
        let left = left.map_err(|_| Failure::new("terminal_over", "the session's lifetime is over"))?;
        let place = Place::take(self, task.session_id, task.allocation_id)?;
        let (recorder, upload) = self.record(task, &way).await?;
        let failed = |error: pty_process::Error| Failure::new("terminal_shell", format!("no shell: {error}"));
        let (pty, child) = spawn(shell).map_err(failed)?;
        let (to_session, from_stream) = mpsc::channel(QUEUE);
        let (to_stream, from_session) = mpsc::channel(SAID);
        let over = CancellationToken::new();
        let stream = stream::Stream { session_id: task.session_id, way, to_session, from_session, over: over.clone() };
        let stop = self.stop.clone();
        let ends = session::Ends { over, stop, given_back: place.given_back.clone() };
        let session = session::Session::new(pty, child, recorder, from_stream, to_stream, left, ends);
        self.tasks.spawn(stream.run().in_current_span());
        self.tasks.spawn(upload.run().in_current_span());
        self.tasks.spawn(
            async move {
                session.run().await;
                drop(place);
                info!("the terminal session is over");
            }
            .in_current_span(),
        );
        info!(terminal_session_id = %task.session_id, "a terminal session begins");
        Ok(())
    }
}

impl Terminals {
    /// The allocation is about to be given back: that its shells end from now on is no word of their programs.
    pub fn give_back(&self, allocation_id: Uuid) {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.values().filter(|it| it.allocation_id == allocation_id).for_each(|it| it.given_back.cancel());
    }

    /// A session that must be recorded and cannot be does not begin.
    async fn record(&self, task: &OpenTerminal, way: &Arc<dyn Way>) -> Result<(Recorder, Upload), Failure> {
        let spools = self.spools.clone();
        let (session_id, terms) = (task.session_id, task.recording);
        let begin = move || {
            let spool = spools.begin(session_id);
            let mut recorder = Recorder::new(Arc::clone(&spool), terms, (COLUMNS, ROWS));
            let begun = recorder.begin();
            (spool, recorder, begun)
        };
        let begun = tokio::task::spawn_blocking(begin).await;
        let unavailable = |why: String| Failure::new("recording_unavailable", format!("no recording: {why}"));
        let (spool, recorder, begun) = begun.map_err(|error| unavailable(error.to_string()))?;
        if let Err(why) = begun {
            if terms.mode == Mode::Strict {
                return Err(unavailable(why.to_string()));
            }
            warn!(terminal_session_id = %session_id, %why, "a terminal session begins without its recording");
        }
        Ok((recorder, Upload::new(spool, Arc::clone(way), Arc::clone(&self.sends), self.stop.clone())))
    }

    /// Says of sessions that an earlier life of the agent began that they are lost.
    pub async fn say_lost(&self, sessions: Vec<OpenTerminal>, way: &dyn Way) {
        let say = |session: OpenTerminal| async move {
            let until = tokio::time::Instant::now() + (session.ends_at - Utc::now()).to_std().unwrap_or_default();
            stream::say_lost(session.session_id, way, until).await;
        };
        let all = futures::stream::iter(sessions).for_each_concurrent(LOST_AT_ONCE, say);
        tokio::select! {
            () = all => {}
            () = self.stop.cancelled() => {}
        }
    }
}

/// A session's place among those of its allocation; given back when it is dropped.
struct Place {
    session_id: Uuid,
    given_back: CancellationToken,
    live: Live,
}

impl Place {
    fn take(terminals: &Terminals, session_id: Uuid, allocation_id: Uuid) -> Result<Self, Failure> {
        let mut live = terminals.live.lock().unwrap_or_else(PoisonError::into_inner);
        if live.values().filter(|it| it.allocation_id == allocation_id).count() >= OF_ONE_ALLOCATION {
            return Err(Failure::new("too_many_terminals", "the allocation has too many terminals"));
        }
        let given_back = CancellationToken::new();
        live.insert(session_id, Running { allocation_id, given_back: given_back.clone() });
        Ok(Self { session_id, given_back, live: Arc::clone(&terminals.live) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.session_id);
    }
}

fn spawn(shell: &Shell) -> pty_process::Result<(pty_process::Pty, Child)> {
    let (pty, pts) = pty_process::open()?;
    pty.resize(pty_process::Size::new(ROWS, COLUMNS))?;
    let words = shell.words();
    let (program, arguments) = words.split_first().ok_or_else(|| std::io::Error::other("there is no shell"))?;
    let command = pty_process::Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(shell.environment.iter().map(|(name, value)| (name, value)))
        .current_dir(&shell.folder)
        .kill_on_drop(true);
    if let Some(id) = shell.user {
        let owner = (nix::unistd::Uid::from_raw(id), nix::unistd::Gid::from_raw(id));
        // Its programs open the terminal by name, too.
        nix::unistd::fchown(pts.as_fd(), Some(owner.0), Some(owner.1)).map_err(std::io::Error::from)?;
    }
    let child = command.spawn(pts)?;
    Ok((pty, child))
}

#[cfg(test)]
#[path = "../tests/not_run/mod.rs"]
mod not_run;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use nix::sys::stat::{Mode as Permissions, umask};
    use nix::unistd::{Gid, Uid, setgroups};
    use tokio::io::AsyncReadExt as _;

    /// What a shell that runs this script says on its terminal.
    async fn said(shell: &Shell, script: &str) -> String {
        let shell = Shell { arguments: vec!["-c".to_owned(), script.to_owned()], ..shell.clone() };
        let (mut pty, mut child) = spawn(&shell).unwrap();
        let (mut said, mut part) = (Vec::new(), [0; 4096]);
        // EIO: the last one who had the terminal has closed it.
        while let Ok(read @ 1..) = pty.read(&mut part).await {
            said.extend_from_slice(&part[..read]);
        }
        assert!(child.wait().await.unwrap().success());
        String::from_utf8(said).unwrap()
    }

    fn shell(user: Option<u32>) -> Shell {
        let environment = vec![("PATH".to_owned(), "/usr/bin:/bin:/usr/sbin:/sbin".to_owned())];
        let launcher = Vec::new();
        Shell { program: "/bin/sh".into(), arguments: Vec::new(), launcher, user, folder: "/".into(), environment }
    }

    #[tokio::test]
    async fn a_shell_has_a_logins_mask_and_chance_to_survive_and_not_the_agents() {
        umask(Permissions::from_bits_truncate(0o077));
        std::fs::write("/proc/self/oom_score_adj", "500").unwrap();
        let said = said(&shell(None), "umask; cat /proc/self/oom_score_adj").await;
        assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["0022", "0"]);
    }

    #[tokio::test]
    async fn whatever_launches_a_tenants_shell_it_and_its_terminal_are_the_tenants_without_roots_groups() {
        if !Uid::effective().is_root() {
            return not_run::not_run("it needs root, to begin the shell of another user");
        }
        setgroups(&[Gid::from_raw(4), Gid::from_raw(0)]).unwrap();
        let launched = ["env", "IN_SLICE=yes"].map(str::to_owned).into();
        for (launcher, in_slice) in [(Vec::new(), "no"), (launched, "yes")] {
            let shell = Shell { launcher, ..shell(Some(70_001)) };
            let said = said(&shell, "id -u; id -G; stat -c %u:%g $(tty); echo ${IN_SLICE:-no}; tty > $(tty)").await;
            let said: Vec<&str> = said.split_whitespace().collect();
            assert_eq!(&said[..4], ["70001", "70001", "70001:70001", in_slice]);
            assert!(said[4].starts_with("/dev/pts/"), "it opens its terminal by name: {said:?}");
        }
    }
}
