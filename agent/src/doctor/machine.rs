//! The machine: driver, control groups, programs, limits, disks.

use super::{DISK, variable};
use crate::bounded_reading::{BoundedReading, Reading, WAIT};
use crate::config::{AgentConfig, ExecutorChoice, Flags};
use crate::gpu_probe::{GpuError, GpuProbe, GpuSurvey, ProcessFault};
use crate::health::gpu_conditions::modes;
use crate::system_executor::device_guard::{DeviceFilesFault, check_driver_parameters};
use nix::sys::resource::{Resource, getrlimit};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;
use telemetry::diagnosis::{DiagnosticFinding, machine};

/// What systemd needs to bound units: memory of the log collector, processes of tenants' sessions.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];
/// Four descriptors for each terminal session, of which 128 are stored, and those of polls and tasks.
const LEAST_OPEN_FILES: u64 = 1024;

pub(super) fn driver(flags: &Flags) -> Vec<DiagnosticFinding> {
    let deadline = Duration::from_secs(flags.gpu_deadline_seconds);
    let survey = GpuProbe::of_this_program(deadline).survey(false);
    let mut findings = judge_driver(&survey);
    // The sandbox guards no device.
    if flags.executor == ExecutorChoice::System && survey.is_ok_and(|survey| !survey.gpus.is_empty()) {
        findings.push(judge_device_files(check_driver_parameters(Path::new("/")).err().as_ref()));
    }
    findings
}

fn judge_device_files(fault: Option<&DeviceFilesFault>) -> DiagnosticFinding {
    match fault {
        None => DiagnosticFinding::ok("the driver leaves the owners of device files alone"),
        Some(fault) => DiagnosticFinding::error(
            format!("no tenant can be set up: {}", crate::chain(fault)),
            "echo 'options nvidia NVreg_ModifyDeviceFiles=0' >/etc/modprobe.d/gpuaas.conf; update-initramfs -u; then reboot",
        ),
    }
}

fn judge_driver(survey: &Result<GpuSurvey, GpuError>) -> Vec<DiagnosticFinding> {
    let reboot =
        "look at the kernel's log for Xids (`journalctl -k`), then reboot the machine; see Troubleshooting nodes";
    let survey = match survey {
        Ok(survey) => survey,
        Err(error) => {
            let action = match error {
                GpuError::NotInstalled { .. } => {
                    let action = "install the driver with its libraries (nvidia-driver, libnvidia-ml1); without it the node has no GPU";
                    return vec![DiagnosticFinding::warning(error.to_string(), action)];
                }
                GpuError::NotLoaded => "modprobe nvidia; after an upgrade of the kernel or the driver, reboot",
                GpuError::NotReady { .. } => "start nvidia-fabricmanager in the driver's own version",
                GpuError::Process { fault: ProcessFault::DriverReplaced, .. } => {
                    "reboot the machine once its last tenant is gone: their programs go on until then"
                }
                GpuError::Hung { .. } | GpuError::Driver { .. } | GpuError::Process { .. } => reboot,
            };
            return vec![DiagnosticFinding::error(error.to_string(), action)];
        }
    };
    let version = survey.driver_version.as_deref().unwrap_or("unknown");
    let mut findings = Vec::new();
    if survey.lost > 0 {
        findings.push(DiagnosticFinding::error(format!("{} GPUs have fallen off the bus", survey.lost), reboot));
    }
    findings.extend(
        survey
            .unreadable
            .iter()
            .map(|gpu| DiagnosticFinding::error(format!("a GPU cannot be read: {}", gpu.why), reboot)),
    );
    for gpu in &survey.gpus {
        let uuid = &gpu.info.uuid;
        findings.extend(
            gpu.condition.unreported.iter().map(|what| {
                DiagnosticFinding::error(format!("the driver does not report {what} (GPU {uuid})"), reboot)
            }),
        );
        // The detail ends in the command.
        findings.extend(modes(gpu).into_iter().map(|mode| {
            let (what, action) = mode.detail.split_once("; ").unwrap_or((mode.detail.as_str(), reboot));
            DiagnosticFinding::error(format!("{what} (GPU {uuid})"), action)
        }));
    }
    let broken = survey.gpus.iter().filter(|gpu| gpu.condition.remap_failed == Some(true)).count();
    if broken > 0 {
        let summary = format!("{broken} GPUs could not remap a row of their memory");
        findings.push(DiagnosticFinding::error(summary, "have them replaced"));
    }
    findings.push(match survey.gpus.len() {
        0 => DiagnosticFinding::warning(
            format!("the driver {version} reports no GPU"),
            "lspci | grep -i nvidia: is it there?",
        ),
        1 => DiagnosticFinding::ok(format!("driver {version}, 1 GPU")),
        count => DiagnosticFinding::ok(format!("driver {version}, {count} GPUs")),
    });
    findings
}

pub(super) fn cgroups(_: &Flags) -> Vec<DiagnosticFinding> {
    vec![judge_cgroups(std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").ok().as_deref())]
}

fn judge_cgroups(controllers: Option<&str>) -> DiagnosticFinding {
    let Some(controllers) = controllers else {
        return DiagnosticFinding::warning(
            "the machine has no unified control groups (version 2)",
            "boot with systemd.unified_cgroup_hierarchy=1: the bounds of units do not hold otherwise",
        );
    };
    let there: Vec<_> = controllers.split_whitespace().collect();
    let missing: Vec<_> = CONTROLLERS.into_iter().filter(|name| !there.contains(name)).collect();
    match missing.is_empty() {
        true => DiagnosticFinding::ok(format!("control groups of version 2 with {}", CONTROLLERS.join(", "))),
        false => DiagnosticFinding::warning(
            format!("control groups lack {}", missing.join(", ")),
            "remove cgroup_disable from the kernel's command line, or give this container its controllers",
        ),
    }
}

pub(super) fn tools(flags: &Flags) -> Vec<DiagnosticFinding> {
    let system = AgentConfig::peek(flags, variable).ok().and_then(|config| config.system);
    let has_sudo_commands = system.is_some_and(|system| !system.sudo_commands.is_empty());
    needed_tools(flags, has_sudo_commands)
        .into_iter()
        .map(|(path, consequence, action)| judge_tool(&path, path.exists(), consequence, action))
        .collect()
}

/// The programs of tasks, what is lost without each, and what brings it in.
fn needed_tools(flags: &Flags, has_sudo_commands: bool) -> Vec<(PathBuf, &'static str, &'static str)> {
    let sshd = PathBuf::from("/usr/sbin/sshd");
    let mut needed = vec![
        (
            flags.driver_tools.join("nvidia-smi"),
            "node.gpu_reset fails",
            "install nvidia-smi, or set SVC_NODE_AGENT_DRIVER_TOOLS",
        ),
        (flags.validation_tools.join("stress-ng"), "node.validate loads no processor", "apt install stress-ng"),
        (flags.validation_tools.join("fio"), "node.validate tests no disk", "apt install fio"),
    ];
    if flags.executor == ExecutorChoice::System {
        needed.push((sshd, "tenants cannot log in by SSH", "apt install openssh-server"));
        let reached = "tenants reach what their neighbours listen on at loopback addresses";
        needed.push((PathBuf::from("/usr/sbin/nft"), reached, "apt install nftables"));
    }
    if has_sudo_commands {
        let refused = "tenants may run none of SVC_NODE_AGENT_SUDO_COMMANDS";
        needed.push((PathBuf::from("/usr/sbin/visudo"), refused, "apt install sudo"));
    }
    needed
}

fn judge_tool(path: &Path, is_there: bool, consequence: &str, action: &str) -> DiagnosticFinding {
    let at = path.display();
    match is_there {
        true => DiagnosticFinding::ok(format!("{at} is there")),
        false => DiagnosticFinding::warning(format!("{at} is not there: {consequence}"), action),
    }
}

pub(super) fn ssh_port(flags: &Flags) -> Vec<DiagnosticFinding> {
    let config = AgentConfig::peek(flags, variable).ok();
    let state_dir = config.as_ref().map(|config| config.state_dir.clone()).unwrap_or_default();
    let address = config.and_then(|config| config.system).and_then(|system| system.ssh_listen);
    vec![match address {
        None => {
            DiagnosticFinding::ok("the agent runs no sshd of its own (SVC_NODE_AGENT_SSH_LISTEN, --executor system)")
        }
        Some(address) => {
            let bound = TcpListener::bind(address).map(drop).map_err(|error| error.kind());
            judge_port(address, bound, &PortHolder::of(address.port(), &state_dir))
        }
    }]
}

/// Who listens on the port of tenants' logins.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PortHolder {
    /// The sshd that the agent has started, which outlives it for a moment.
    Agent,
    /// Another program, by its name and the id of its process.
    Another(String, i32),
    /// A process that this user may not see.
    Hidden,
}

impl PortHolder {
    fn of(port: u16, state_dir: &Path) -> Self {
        let Some((program, pid)) = machine::port_holder(port) else { return Self::Hidden };
        // The configuration of the agent's sshd, which its command line names, is that of this state folder.
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let config = state_dir.join("ssh/sshd_config").display().to_string();
        match String::from_utf8_lossy(&command).contains(&config) {
            true => Self::Agent,
            false => Self::Another(program, pid),
        }
    }
}

fn judge_port(address: SocketAddr, bound: Result<(), ErrorKind>, holder: &PortHolder) -> DiagnosticFinding {
    match bound {
        Ok(()) => DiagnosticFinding::ok(format!("{address} is free (the agent does not run)")),
        Err(ErrorKind::AddrInUse) => match holder {
            PortHolder::Agent => DiagnosticFinding::ok(format!("{address} is held by the agent's sshd")),
            PortHolder::Another(program, pid) => DiagnosticFinding::error(
                format!("{address} is held by {program} (process {pid}): tenants cannot log in by SSH"),
                format!("stop {program}, or set SVC_NODE_AGENT_SSH_LISTEN to another address, and restart the agent"),
            ),
            PortHolder::Hidden => DiagnosticFinding::warning(
                format!("{address} is held by a process that this user may not see"),
                "run this command as root to see which",
            ),
        },
        Err(ErrorKind::AddrNotAvailable) => DiagnosticFinding::error(
            format!("this machine has no address {}", address.ip()),
            "set SVC_NODE_AGENT_SSH_LISTEN to one of its addresses",
        ),
        Err(kind) => DiagnosticFinding::error(
            format!("cannot listen on {address}: {kind}"),
            "run the agent as root, or take another port",
        ),
    }
}

pub(super) fn open_files(_: &Flags) -> Vec<DiagnosticFinding> {
    vec![judge_open_files(getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard))]
}

fn judge_open_files(limit: u64) -> DiagnosticFinding {
    let summary = format!("this command, and so an agent started from here, may have {limit} files open");
    match limit < LEAST_OPEN_FILES {
        true => {
            DiagnosticFinding::warning(summary, "set LimitNOFILE=65536 in the unit (`systemctl edit gpuaas-agent`)")
        }
        false => DiagnosticFinding::ok(summary),
    }
}

pub(super) fn disks(flags: &Flags) -> Vec<DiagnosticFinding> {
    let state = AgentConfig::peek(flags, variable).ok().map(|config| config.state_dir);
    let folders = [Some(PathBuf::from("/")), Some(PathBuf::from("/var/log")), Some(PathBuf::from("/tmp")), state];
    judge_disks(folders.into_iter().flatten())
}

/// Each file system once; one that does not answer keeps no other from being judged.
fn judge_disks(folders: impl Iterator<Item = PathBuf>) -> Vec<DiagnosticFinding> {
    use std::os::unix::fs::MetadataExt as _;
    let mut seen = std::collections::BTreeSet::new();
    let judge = |folder: PathBuf| {
        let asked = folder.clone();
        let look = move || Some((std::fs::metadata(&asked).ok()?.dev(), machine::disk(&asked)));
        match BoundedReading::of(folder.display().to_string()).read_within(WAIT, look) {
            Reading::Fresh(found) => found.filter(|(device, _)| seen.insert(*device)).map(|(_, finding)| finding),
            Reading::Late { .. } => {
                let summary = format!("{}: its file system does not answer", folder.display());
                Some(DiagnosticFinding::error(summary, DISK))
            }
        }
    };
    folders.filter_map(judge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounded_reading::hanging_mount::OwnMounts;
    use crate::gpu_probe::{GpuCondition, SurveyedGpu};
    use crate::terminal::skipped_tests;
    use telemetry::diagnosis::DiagnosticLevel::{Error, Ok as Fine, Warning};
    use wire::inventory::{GpuInfo, GpuTopology};

    #[test]
    fn each_fault_of_the_driver_is_named_with_its_remedy() {
        let judge = |survey: Result<GpuSurvey, GpuError>| judge_driver(&survey).remove(0);
        assert_eq!(judge(Err(GpuError::NotInstalled { why: "no library".to_owned() })).level, Warning);
        let not_loaded = judge(Err(GpuError::NotLoaded));
        assert!(not_loaded.level == Error && not_loaded.action.unwrap().starts_with("modprobe nvidia"));
        assert!(judge(Err(GpuError::Hung { seconds: 10 })).action.unwrap().contains("reboot"));
        let replaced = GpuError::Process { message: "m".to_owned(), fault: ProcessFault::DriverReplaced };
        assert!(judge(Err(replaced)).action.unwrap().contains("once its last tenant is gone"));
        let info = GpuInfo {
            index: 0,
            uuid: "GPU-1".into(),
            vendor: "v".into(),
            model: "m".into(),
            memory_mib: 1,
            topology: GpuTopology::default(),
        };
        let condition = GpuCondition { mig: Some((true, true)), ..GpuCondition::default() };
        let pci_address = Some("0000:3b:00".to_owned());
        let gpus = vec![SurveyedGpu { info, pci_address, load: None, condition }];
        let divided = judge(Ok(GpuSurvey { gpus, ..GpuSurvey::default() }));
        assert_eq!(divided.action.as_deref(), Some("run: nvidia-smi -i 0000:3b:00.0 -mig 0"), "{divided:?}");
        assert_eq!(judge(Ok(GpuSurvey { lost: 1, ..GpuSurvey::default() })).level, Error);
        assert_eq!(judge(Ok(GpuSurvey::default())).level, Warning, "no GPU");
    }

    #[test]
    fn driver_that_opens_device_files_to_all_users_is_an_error() {
        assert_eq!(judge_device_files(None).level, Fine);
        let opens = judge_device_files(Some(&DeviceFilesFault::Modified { value: "1".to_owned() }));
        assert!(opens.level == Error && opens.action.unwrap().contains("NVreg_ModifyDeviceFiles=0"));
        assert!(!opens.summary.contains("NVreg"), "the remedy is shown once: {}", opens.summary);
    }

    #[test]
    fn control_groups_need_their_controllers() {
        assert_eq!(judge_cgroups(Some("cpuset cpu io memory pids\n")).level, Fine);
        let lacking = judge_cgroups(Some("cpu io"));
        assert!(lacking.level == Warning && lacking.summary.ends_with("memory, pids"), "{lacking:?}");
        assert_eq!(judge_cgroups(None).level, Warning);
    }

    #[test]
    fn visudo_is_needed_where_tenants_may_run_commands_as_root() {
        let names = |has_sudo_commands| {
            let flags = Flags { executor: ExecutorChoice::System, ..Flags::default() };
            let tools = needed_tools(&flags, has_sudo_commands).into_iter();
            tools.filter_map(|(path, ..)| Some(path.file_name()?.to_str()?.to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(names(false), ["nvidia-smi", "stress-ng", "fio", "sshd", "nft"]);
        assert_eq!(names(true), ["nvidia-smi", "stress-ng", "fio", "sshd", "nft", "visudo"]);
    }

    #[test]
    fn missing_program_and_low_limit_are_warnings() {
        assert_eq!(judge_tool(Path::new("/usr/bin/fio"), false, "no test", "apt install fio").level, Warning);
        assert_eq!(judge_open_files(512).level, Warning);
        assert_eq!(judge_open_files(65_536).level, Fine);
        let address: SocketAddr = "192.0.2.1:2222".parse().unwrap();
        let judge = |kind, holder: PortHolder| judge_port(address, Err(kind), &holder);
        assert_eq!(judge(ErrorKind::AddrNotAvailable, PortHolder::Hidden).level, Error);
        assert_eq!(judge(ErrorKind::AddrInUse, PortHolder::Agent).level, Fine);
        assert_eq!(judge(ErrorKind::AddrInUse, PortHolder::Hidden).level, Warning);
    }

    #[test]
    fn port_of_logins_that_another_program_has_is_an_error_with_its_name() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let holder = PortHolder::of(address.port(), Path::new("/var/lib/gpuaas-agent"));
        let PortHolder::Another(program, pid) = &holder else { panic!("{holder:?}") };
        assert_eq!(*pid, i32::try_from(std::process::id()).unwrap());
        let found = judge_port(address, Err(ErrorKind::AddrInUse), &holder);
        assert!(found.level == Error && found.summary.contains(program.as_str()), "{found:?}");
        drop(listener);
    }

    #[test]
    fn folder_that_hangs_is_an_error_and_the_others_are_judged() {
        let folder = tempfile::tempdir().unwrap();
        let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
        let _hanging = mounts.hang(folder.path());
        let found = judge_disks([folder.path().to_owned(), PathBuf::from("/"), PathBuf::from("/etc")].into_iter());
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].level == Error && found[0].summary.ends_with("does not answer"), "{found:?}");
    }
}
