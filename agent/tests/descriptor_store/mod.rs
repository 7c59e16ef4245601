//! A service manager as far as an agent sees it: it receives notifications and descriptors on a real socket, and passes the descriptors to
//! the next process (sd_notify(3), sd_pid_notify_with_fds(3), sd_listen_fds(3)).

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use command_fds::{CommandFdExt as _, FdMapping};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// systemd's first descriptor (SD_LISTEN_FDS_START).
const FIRST: i32 = 3;

pub struct DescriptorStore {
    path: PathBuf,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    stored: Vec<(String, OwnedFd)>,
    notifications: Vec<String>,
    on_notification: Option<NotificationHook>,
}

type NotificationHook = Box<dyn FnMut(&str) + Send>;

impl DescriptorStore {
    pub fn start(folder: &Path) -> Self {
        let path = folder.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            loop {
                receive(&socket, &shared);
            }
        });
        Self { path, state }
    }

    /// The agent's program as systemd starts it: with the socket, and with everything that is stored.
    pub fn command(&self, program: &Path) -> Command {
        let state = self.state.lock().unwrap();
        let mut command = Command::new("/bin/sh");
        command.env_clear().env("NOTIFY_SOCKET", &self.path).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(program);
        if !state.stored.is_empty() {
            let names: Vec<&str> = state.stored.iter().map(|(name, _)| name.as_str()).collect();
            command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
            // `$$` is expanded, but only exported variables reach the agent.
            command.env("LISTEN_PID", "");
            let numbered = (FIRST..).zip(&state.stored);
            let mappings =
                numbered.map(|(child_fd, (_, stored))| FdMapping { parent_fd: stored.try_clone().unwrap(), child_fd });
            command.fd_mappings(mappings.collect()).unwrap();
        }
        command
    }

    /// The stored descriptors with that name.
    pub fn stored(&self, name: &str) -> Vec<OwnedFd> {
        let state = self.state.lock().unwrap();
        let named = state.stored.iter().filter(|(stored, _)| stored == name);
        named.map(|(_, descriptor)| descriptor.try_clone().unwrap()).collect()
    }

    pub fn len(&self) -> usize {
        self.state.lock().unwrap().stored.len()
    }

    /// Closes everything, as systemd does with a service that stays stopped.
    pub fn drop_all(&self) {
        self.state.lock().unwrap().stored.clear();
    }

    pub fn count(&self, line: &str) -> usize {
        let state = self.state.lock().unwrap();
        state.notifications.iter().filter(|sent| sent.lines().any(|sent| sent == line)).count()
    }

    /// Waits until everything that was sent is received.
    pub fn settle(&self) {
        const LAST: &str = "STATUS=the last one";
        let before = self.count(LAST);
        UnixDatagram::unbound().unwrap().send_to(LAST.as_bytes(), &self.path).unwrap();
        while self.count(LAST) == before {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Calls this at each notification, before anything is stored.
    pub fn on_notification(&self, act: impl FnMut(&str) + Send + 'static) {
        self.state.lock().unwrap().on_notification = Some(Box::new(act));
    }
}

fn receive(socket: &UnixDatagram, state: &Mutex<State>) {
    let mut text = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    let received: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    let text = String::from_utf8(text[..got.bytes].to_vec()).unwrap();
    let mut state = state.lock().unwrap();
    if let Some(act) = &mut state.on_notification {
        act(&text);
    }
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or("stored").to_owned();
    if text.lines().any(|line| line == "FDSTORE=1") {
        assert!(text.lines().any(|line| line == "FDPOLL=0"), "systemd drops a terminal that hangs up: {text}");
        state.stored.extend(received.into_iter().map(|descriptor| (name.clone(), descriptor)));
    } else if text.lines().any(|line| line == "FDSTOREREMOVE=1") {
        state.stored.retain(|(stored, _)| *stored != name);
    }
    state.notifications.push(text);
}
