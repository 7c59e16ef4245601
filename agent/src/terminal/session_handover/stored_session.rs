//! Sessions in the service manager's store.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FileType, fstat};
use tracing::warn;
use uuid::Uuid;
use wire::task::OpenTerminal;

use super::output_log::OutputLog;
use super::record::{RecordError, RecordFile, RecordingPoint};
use super::{HeldProgram, holder};
use crate::service_manager::{MAX_DESCRIPTORS, ServiceManager, StoredDescriptor};
use crate::terminal::ShellCommand;
use crate::terminal::pty::PtyMaster;

/// The descriptors of a session, all of another type.
const DESCRIPTORS: usize = 4;
/// The sessions that the store has room for.
const MAX_SESSIONS: usize = MAX_DESCRIPTORS / DESCRIPTORS;
const NAME: &str = "terminal-";

/// The store, as far as sessions use it; cheap to clone.
#[derive(Debug, Clone)]
pub(in crate::terminal) struct SessionStore {
    manager: Arc<ServiceManager>,
    sessions: Arc<AtomicUsize>,
}

/// A session that an earlier process of the agent left.
#[derive(Debug)]
pub(in crate::terminal) struct Adopted {
    pub(in crate::terminal) task: OpenTerminal,
    pub(in crate::terminal) pty: PtyMaster,
    pub(in crate::terminal) program: HeldProgram,
    pub(in crate::terminal) log: OutputLog,
    pub(in crate::terminal) record: RecordFile,
    pub(in crate::terminal) acknowledged: u64,
    /// Input that the program has not taken.
    pub(in crate::terminal) input: Vec<u8>,
    pub(in crate::terminal) recording: RecordingPoint,
}

/// Why a session of the store cannot be continued.
#[derive(Debug, thiserror::Error)]
pub(in crate::terminal) enum AdoptError {
    #[error("it has not one terminal, one pipe, one file and one socket")]
    Incomplete,
    #[error("its record cannot be used")]
    Record(#[from] RecordError),
    #[error("the record is another session's")]
    OtherSession,
    #[error("its descriptors cannot be used")]
    Descriptors(#[from] io::Error),
}

/// A session as it begins, in the store.
pub(in crate::terminal) struct Begun {
    pub(in crate::terminal) pty: PtyMaster,
    pub(in crate::terminal) program: HeldProgram,
    pub(in crate::terminal) log: OutputLog,
    pub(in crate::terminal) record: RecordFile,
}

impl SessionStore {
    pub(in crate::terminal) fn new(manager: Arc<ServiceManager>) -> Self {
        Self { manager, sessions: Arc::default() }
    }

    /// Reserves the room of a session. Without it the session ends with this process of the agent.
    pub(in crate::terminal) fn reserve(&self) -> bool {
        if !self.manager.keeps_descriptors() {
            return false;
        }
        let more = |stored| (stored < MAX_SESSIONS).then_some(stored + 1);
        let reserved = self.sessions.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        if !reserved {
            warn!(
                sessions = MAX_SESSIONS,
                "the store of terminal sessions is full: this one ends with the agent's process"
            );
        }
        reserved
    }

    /// Starts the program of a session whose room is reserved, then stores the session. An agent that is killed between the two leaves
    /// nothing: the holder ends a program that is in no store.
    ///
    /// # Errors
    /// It cannot be started, and is not stored.
    pub(in crate::terminal) async fn begin(
        &self,
        task: &OpenTerminal,
        shell: &ShellCommand,
        (pty, terminal): (PtyMaster, OwnedFd),
        log: OutputLog,
        recording: RecordingPoint,
    ) -> Result<Begun, AdoptError> {
        let begun = self.begin_in(task, shell, (pty, terminal), log, recording).await;
        if begun.is_err() {
            self.remove(task.session_id);
        }
        begun
    }

    async fn begin_in(
        &self,
        task: &OpenTerminal,
        shell: &ShellCommand,
        (pty, terminal): (PtyMaster, OwnedFd),
        log: OutputLog,
        recording: RecordingPoint,
    ) -> Result<Begun, AdoptError> {
        let record = RecordFile::create(log.file(), task.clone(), recording)?;
        let mut program = HeldProgram::prepare(terminal)?;
        let command = holder::HeldCommand {
            arguments: shell.command_line(),
            environment: shell.environment.clone(),
            folder: shell.folder.clone(),
        };
        program.start(&command).await?;
        let file = log.file();
        self.manager.store(&name(task.session_id), &[pty.as_fd(), log.staging(), file.as_fd(), program.socket()]);
        Ok(Begun { pty, program, log, record })
    }

    /// Removes a session that is over.
    pub(in crate::terminal) fn remove(&self, session_id: Uuid) {
        self.manager.remove(&name(session_id));
        let fewer = |stored: usize| stored.checked_sub(1);
        let _ = self.sessions.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
    }

    /// Whether sessions continue after the stop that is in progress.
    pub(in crate::terminal) async fn outlives_stop(&self) -> bool {
        self.manager.starts_again().await
    }

    /// The sessions that an earlier process left. What cannot be continued is removed, which ends its program.
    pub(in crate::terminal) fn adopt(&self) -> Vec<Adopted> {
        let mut by_name = BTreeMap::<String, Vec<OwnedFd>>::new();
        for StoredDescriptor { name, descriptor } in self.manager.take_stored() {
            by_name.entry(name).or_default().push(descriptor);
        }
        let mut adopted = Vec::new();
        for (stored_name, descriptors) in by_name {
            let session_id = stored_name.strip_prefix(NAME).and_then(|id| Uuid::try_parse(id).ok());
            let found = session_id.ok_or(AdoptError::OtherSession).and_then(|id| Adopted::of(id, descriptors));
            match found {
                Ok(session) => {
                    self.sessions.fetch_add(1, Ordering::Relaxed);
                    adopted.push(session);
                }
                Err(error) => {
                    warn!(
                        error_code = "terminal_not_adopted",
                        error = crate::chain(&error),
                        name = stored_name,
                        "what an earlier process of the agent stored cannot be continued, and is ended"
                    );
                    self.manager.remove(&stored_name);
                }
            }
        }
        adopted
    }
}

impl Adopted {
    fn of(session_id: Uuid, descriptors: Vec<OwnedFd>) -> Result<Self, AdoptError> {
        let (mut terminal, mut staging, mut file, mut socket) = (None, None, None, None);
        if descriptors.len() != DESCRIPTORS {
            return Err(AdoptError::Incomplete);
        }
        for descriptor in descriptors {
            let status = fstat(&descriptor).map_err(io::Error::from)?;
            match FileType::from_raw_mode(status.st_mode) {
                FileType::CharacterDevice => terminal = Some(descriptor),
                FileType::Fifo => staging = Some(descriptor),
                FileType::RegularFile => file = Some(File::from(descriptor)),
                FileType::Socket => socket = Some(UnixStream::from(descriptor)),
                _ => {}
            }
        }
        let (Some(terminal), Some(staging), Some(file), Some(socket)) = (terminal, staging, file, socket) else {
            return Err(AdoptError::Incomplete);
        };
        let log = OutputLog::adopt(file, staging)?;
        let (record, found) = RecordFile::read(log.file())?;
        if found.task.session_id != session_id {
            return Err(AdoptError::OtherSession);
        }
        Ok(Self {
            pty: PtyMaster::new(terminal)?,
            program: HeldProgram::adopt(socket)?,
            input: record.take_input(),
            acknowledged: found.acknowledged.min(log.end()),
            recording: found.recording,
            task: found.task,
            log,
            record,
        })
    }
}

fn name(session_id: Uuid) -> String {
    format!("{NAME}{}", session_id.simple())
}
