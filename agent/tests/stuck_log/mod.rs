//! A log that nothing reads, as of a journald whose disk does not answer: the agent goes on without it.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Command;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use uuid::Uuid;

use super::{FakeControlPlane, SpawnedAgent, eventually};

/// Some lines of the log.
const PIPE_BYTES: i32 = 4096;

#[tokio::test]
async fn agent_whose_log_is_not_read_goes_on_with_heartbeats_tasks_and_its_end() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let path = folder.path().join("log");
    nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
    let mut log = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    fcntl(&log, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES)).unwrap();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"exec "$@" 2>"$0""#]).arg(&path).arg(env!("CARGO_BIN_EXE_gpuaas-agent"));
    let mut agent =
        SpawnedAgent::start_by(command, folder.path(), &fake.bundle(folder.path()), &["--simulate-gpus", "2"]);
    eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
    for _ in 0..10 {
        let tenant = Uuid::now_v7();
        fake.set_up(tenant).await;
        fake.end(tenant).await;
    }
    let sent = fake.calls().heartbeats.len();
    eventually(|| (fake.calls().heartbeats.len() > sent + 1).then_some(())).await;
    let mut text = vec![0; 8192];
    let length = log.read(&mut text).unwrap();
    let first = text[..length].split(|byte| *byte == b'\n').next().unwrap();
    let first: serde_json::Value = serde_json::from_slice(first).unwrap();
    assert_eq!(first["service"], "node-agent");
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.exit().await.code(), Some(0));
}
