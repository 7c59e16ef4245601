//! The finalizer as a process: over a real installation, with a `systemctl` that starts the current version's agent, and kills the
//! finalizer where a test wants it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../tests/skipped_tests/mod.rs"]
mod skipped_tests;

use std::fs;
use std::io::BufReader;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use agent_package::archive;
use agent_package::build::{Inputs, build};
use agent_package::contents::{AGENT, PROGRAMS};
use agent_package::install::version_folder;
use agent_package::manifest::{FileList, ImageManifest};
use agent_package::update::{Proof, RollbackReason, Stage, UpdateFolder, UpdateRecord};
use serde_json::Value;
use uuid::Uuid;
use wire::package::Digest;

const UNIT: &str = "rented.service";
const ENDS_WITHIN: Duration = Duration::from_secs(120);
/// For a new agent that is answered as soon as it is started. One that is not is given a second.
const ANSWERED_WITHIN: u32 = 90;

/// systemd as far as the finalizer uses it. `$W/kill` names a call, by its number, before or after which the caller is killed.
const SYSTEMCTL: &str = r#"#!/bin/sh
W=$(dirname "$0")
number=$(($(cat "$W/calls" 2>/dev/null || echo 0) + 1))
echo "$number" >"$W/calls"
[ "$(cat "$W/kill" 2>/dev/null)" != "$number before" ] || { kill -9 "$PPID"; exit 1; }
if [ "$1" = restart ]; then
    [ ! -s "$W/pid" ] || kill -9 "$(cat "$W/pid")" 2>/dev/null
    version=$(readlink -f "$W/opt/current")
    "$version/bin/gpuaas-agent" 600 >/dev/null 2>&1 &
    echo $! >"$W/pid"
    echo "$version" >>"$W/started"
    [ ! -e "$W/proof-of/$(basename "$version")" ] ||
        sed "s/\"pid\":0/\"pid\":$!/" "$W/proof-of/$(basename "$version")" >"$W/opt/update/proof.json"
fi
[ "$(cat "$W/kill" 2>/dev/null)" != "$number after" ] || kill -9 "$PPID"
exit 0
"#;

struct Machine {
    folder: tempfile::TempDir,
    old: Digest,
    new: Digest,
}

impl Machine {
    /// With the old version in use, and the new one prepared.
    fn new(commit_seconds: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("opt");
        let [old, new] = ["1", "2"].map(|version| put_version(&root, version));
        let it = Self { folder, old, new };
        for name in ["current", "finalizer"] {
            symlink(Path::new("versions").join(old.name()), it.root().join(name)).unwrap();
        }
        fs::create_dir(it.path("proof-of")).unwrap();
        fs::write(it.path("systemctl"), SYSTEMCTL).unwrap();
        fs::set_permissions(it.path("systemctl"), fs::Permissions::from_mode(0o755)).unwrap();
        it.updates().take_reserve().unwrap();
        it.updates().set_record(&it.record(commit_seconds)).unwrap();
        it
    }

    fn record(&self, commit_seconds: u32) -> UpdateRecord {
        UpdateRecord {
            nonce: Uuid::from_u128(1),
            task_id: Uuid::from_u128(2),
            from: self.old,
            to: self.new,
            version: "2".into(),
            unit: UNIT.into(),
            env_file: "/etc/other/agent.env".into(),
            commit_seconds,
            stage: Stage::Prepared,
        }
    }

    /// The new agent's heartbeats are answered.
    fn new_agent_is_answered(&self) {
        let proof = Proof { nonce: Uuid::from_u128(1), digest: self.new, pid: 0, at: 0 };
        fs::write(self.path("proof-of").join(self.new.name()), serde_json::to_vec(&proof).unwrap()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn root(&self) -> PathBuf {
        self.path("opt")
    }

    fn updates(&self) -> UpdateFolder {
        UpdateFolder::of(&self.root())
    }

    fn finalizer(&self) -> Output {
        let mut finalizer = Command::new(env!("CARGO_BIN_EXE_gpuaas-finalizer"));
        finalizer.arg("--install-root").arg(self.root()).arg("--unit-folder").arg(self.path("units"));
        finalizer.arg("--runtime-unit-folder").arg(self.path("run"));
        finalizer.env("PATH", format!("{}:/usr/bin:/bin", self.folder.path().display())).output().unwrap()
    }

    /// As its unit does: started again until it ends by itself.
    fn finalizers(&self) -> u32 {
        let until = Instant::now() + ENDS_WITHIN;
        for started in 1.. {
            let output = self.finalizer();
            if output.status.success() {
                return started;
            }
            assert!(Instant::now() < until, "{}", String::from_utf8_lossy(&output.stderr));
        }
        unreachable!("it returns or panics")
    }

    /// The lines of a run's log, each of which has the fields of every line.
    fn logged(output: &Output) -> Vec<Value> {
        let text = String::from_utf8(output.stderr.clone()).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
        for line in &lines {
            for field in ["timestamp", "level", "service", "host_role", "host_name", "target", "message"] {
                assert!(line[field].is_string(), "{field}: {line}");
            }
        }
        lines
    }

    fn calls(&self) -> u32 {
        fs::read_to_string(self.path("calls")).unwrap().trim().parse().unwrap()
    }

    fn expect_in_use(&self, digest: Digest, what: &str) {
        let version = fs::canonicalize(version_folder(&self.root(), digest)).unwrap();
        assert_eq!(fs::canonicalize(self.root().join("current")).unwrap(), version, "{what}");
        let started = fs::read_to_string(self.path("started")).unwrap();
        assert_eq!(started.lines().last(), version.to_str(), "{what}");
        let unit = fs::read_to_string(self.path("units").join(UNIT)).unwrap();
        let root = self.root();
        assert!(unit.contains(&format!("ExecStart={}/current/bin/gpuaas-agent", root.display())), "{what}: {unit}");
        assert!(unit.contains(&format!("# version {}", if digest == self.new { 2 } else { 1 })), "{what}: {unit}");
        let finalizer = fs::read_to_string(self.path("units/gpuaas-finalizer.service")).unwrap();
        assert!(finalizer.contains(&format!("ExecStart={}/finalizer/bin/gpuaas-finalizer", root.display())), "{what}");
        assert!(finalizer.contains(&format!("ConditionPathExists={}/update/record.json", root.display())), "{what}");
        assert!(!self.updates().is_updating(), "{what}");
        let last = self.updates().last().unwrap().unwrap();
        assert_eq!(last.rolled_back.is_none(), digest == self.new, "{what}");
        let failed: Vec<_> = self.updates().failed().unwrap().iter().map(|version| version.digest).collect();
        assert_eq!(failed, if digest == self.new { vec![] } else { vec![self.new] }, "{what}");
        assert!(!self.path("run").join(format!("{UNIT}.d/zz-gpuaas-update.conf")).exists(), "{what}");
        assert!(!root.join("update/reserve").exists(), "{what}");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Ok(pid) = fs::read_to_string(self.path("pid")) {
            let _ = Command::new("kill").args(["-9", pid.trim()]).status();
        }
    }
}

/// Puts a version in place as an installation does. Its agent is a program of which the kernel knows where it came from.
fn put_version(root: &Path, version: &str) -> Digest {
    let made = tempfile::tempdir().unwrap();
    let (units, layout) = (made.path().join("units"), made.path().join("layout"));
    fs::create_dir(&units).unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/systemd");
    for unit in agent_package::contents::UNITS {
        let text = fs::read_to_string(shipped.join(unit.name)).unwrap();
        fs::write(units.join(unit.name), format!("# version {version}\n{text}")).unwrap();
    }
    let programs: Vec<PathBuf> = PROGRAMS.iter().map(|name| made.path().join(name)).collect();
    for program in &programs {
        fs::copy("/bin/sleep", program).unwrap();
    }
    let inputs = Inputs { version, architecture: std::env::consts::ARCH, programs, units };
    let digest = build(&inputs, None, &layout).unwrap();
    let blob = |digest: Digest| fs::read(layout.join("blobs/sha256").join(digest.hex())).unwrap();
    let manifest = blob(digest);
    let (_, files, archive) = ImageManifest::parse_package(&manifest).unwrap();
    let list = blob(files.digest);
    let folder = version_folder(root, digest);
    fs::create_dir_all(&folder).unwrap();
    let archive = fs::File::open(layout.join("blobs/sha256").join(archive.digest.hex())).unwrap();
    archive::unpack(BufReader::new(archive), &FileList::parse(&list).unwrap(), &folder).unwrap();
    fs::write(folder.join(".manifest.json"), manifest).unwrap();
    fs::write(folder.join(".files.json"), list).unwrap();
    assert!(folder.join("bin").join(AGENT).exists());
    digest
}

#[test]
fn answered_agent_is_in_use_and_only_the_version_before_it_stays() {
    let machine = Machine::new(ANSWERED_WITHIN);
    machine.new_agent_is_answered();
    let older = put_version(&machine.root(), "0");
    assert_eq!(machine.finalizers(), 1);
    machine.expect_in_use(machine.new, "answered");
    assert!(!version_folder(&machine.root(), older).exists());
    assert!(version_folder(&machine.root(), machine.old).exists());
    // Without an update there is nothing to do.
    let calls = machine.calls();
    assert_eq!((machine.finalizers(), machine.calls()), (1, calls));
}

#[test]
fn agent_without_an_answer_is_rolled_back_and_remembered() {
    let machine = Machine::new(1);
    assert_eq!(machine.finalizers(), 1);
    machine.expect_in_use(machine.old, "silent");
    assert!(version_folder(&machine.root(), machine.new).exists(), "an operator may want to look at it");
}

#[test]
fn proof_of_another_process_or_update_is_none() {
    let good = Proof { nonce: Uuid::from_u128(1), digest: Digest::of(b""), pid: 0, at: 0 };
    for (what, forge) in [
        ("nonce", (|proof| Proof { nonce: Uuid::from_u128(9), ..proof }) as fn(Proof) -> Proof),
        ("version", |proof| Proof { digest: Digest::of(b"other"), ..proof }),
        // A process of another program: this one.
        ("process", |proof| Proof { pid: std::process::id(), ..proof }),
    ] {
        let machine = Machine::new(1);
        let proof = forge(Proof { digest: machine.new, ..good.clone() });
        let path = machine.path("proof-of").join(machine.new.name());
        fs::write(path, serde_json::to_vec(&proof).unwrap()).unwrap();
        machine.finalizers();
        machine.expect_in_use(machine.old, what);
    }
}

#[test]
fn finalizer_killed_at_any_of_its_calls_of_systemd_is_continued() {
    for is_answered in [true, false] {
        let commit_seconds = if is_answered { ANSWERED_WITHIN } else { 1 };
        let machine = Machine::new(commit_seconds);
        if is_answered {
            machine.new_agent_is_answered();
        }
        machine.finalizers();
        let calls = machine.calls();
        assert!(calls >= 3, "{calls}");
        for call in 1..=calls {
            for when in ["before", "after"] {
                let machine = Machine::new(commit_seconds);
                if is_answered {
                    machine.new_agent_is_answered();
                }
                fs::write(machine.path("kill"), format!("{call} {when}\n")).unwrap();
                let what = format!("killed {when} call {call}, answered: {is_answered}");
                assert_eq!(machine.finalizers(), 2, "{what}");
                machine.expect_in_use(if is_answered { machine.new } else { machine.old }, &what);
            }
        }
    }
}

#[test]
fn second_finalizer_does_nothing_while_one_is_at_work() {
    let machine = Machine::new(1);
    let lock = fs::File::create(machine.root().join(".finalizer.lock")).unwrap();
    lock.lock().unwrap();
    assert_eq!(machine.finalizer().status.code(), Some(1));
    assert!(!machine.path("calls").exists());
    drop(lock);
    machine.finalizers();
    machine.expect_in_use(machine.old, "alone");
}

/// A roll back in an installation on a disk of its own that is full.
fn on_a_full_disk(machine: &Machine, has_reserve: bool) -> Option<(bool, String)> {
    if !Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success()) {
        skipped_tests::report_skipped("it needs root, for a mount namespace of its own");
        return None;
    }
    let stage = Stage::RollingBack { reason: RollbackReason { code: "no_heartbeat".into(), message: "m".into() } };
    machine.updates().set_record(&UpdateRecord { stage, ..machine.record(1) }).unwrap();
    let current = machine.root().join("current");
    fs::remove_file(&current).unwrap();
    symlink(Path::new("versions").join(machine.new.name()), &current).unwrap();
    if !has_reserve {
        machine.updates().release_reserve().unwrap();
    }
    let script = format!(
        "set -eu; cd '{folder}'; mv opt template; mkdir opt; mount -t tmpfs -o size=6m tmpfs opt; cp -a template/. opt/\n\
         dd if=/dev/zero of=opt/fill bs=4096 2>/dev/null || true\n\
         ! echo more >opt/more 2>/dev/null || [ ! -s opt/more ]\n\
         status=0; PATH='{folder}':$PATH '{finalizer}' --install-root '{folder}/opt' --unit-folder '{folder}/units' \\\n\
         --runtime-unit-folder '{folder}/run' 2>printed || status=$?\n\
         if [ $status -ne 0 ]; then rm opt/fill; PATH='{folder}':$PATH '{finalizer}' --install-root '{folder}/opt' \\\n\
         --unit-folder '{folder}/units' --runtime-unit-folder '{folder}/run'; fi\n\
         rm -f opt/fill opt/more; mkdir after; cp -a opt/. after/; umount -l opt; rmdir opt; mv after opt; exit $status\n",
        folder = machine.folder.path().display(),
        finalizer = env!("CARGO_BIN_EXE_gpuaas-finalizer"),
    );
    let output = Command::new("unshare").args(["-m", "sh", "-c", &script]).output().unwrap();
    let printed = fs::read_to_string(machine.path("printed")).unwrap_or_default();
    Some((output.status.success(), printed + &String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn roll_back_on_a_full_disk_has_its_reserve_and_otherwise_waits_for_room() {
    let machine = Machine::new(1);
    let Some((ended, printed)) = on_a_full_disk(&machine, true) else { return };
    assert!(ended, "{printed}");
    machine.expect_in_use(machine.old, &printed);
    let machine = Machine::new(1);
    let Some((ended, printed)) = on_a_full_disk(&machine, false) else { return };
    assert!(!ended && printed.contains("the update is not at its end"), "{printed}");
    machine.expect_in_use(machine.old, "after room was made");
}

#[test]
fn log_is_json_with_the_task_and_the_reason_of_a_roll_back() {
    let machine = Machine::new(ANSWERED_WITHIN);
    machine.new_agent_is_answered();
    let committed = Machine::logged(&machine.finalizer());
    assert_eq!((committed.len(), &committed[0]["level"]), (1, &"INFO".into()), "{committed:?}");
    assert_eq!(committed[0]["task_id"], Uuid::from_u128(2).to_string());
    assert_eq!(committed[0]["digest"], machine.new.to_string());
    let idle = Machine::logged(&machine.finalizer());
    assert_eq!(idle[0]["message"], "no update is in progress");

    let machine = Machine::new(1);
    let rolled_back = Machine::logged(&machine.finalizer());
    let last = rolled_back.last().unwrap();
    assert_eq!((&last["level"], &last["error_code"]), (&"WARN".into(), &"no_heartbeat".into()), "{last}");
    assert!(last["message"].as_str().unwrap().contains("is rolled back to"), "{last}");
}
