//! Settings from files, where no service manager reads them: in a container. `SVC_ENV_FILE` names them, and the program starts itself once more
//! with what they set, as systemd does by `EnvironmentFile=`. So a secret is in a file that a pod mounts, and not in the pod's description, and
//! a command in a running container has the same settings.
//!
//! A file goes before the environment, as in a unit; what it overrides is named at the start. Only the settings for which a pod's probes, its Service and
//! its Deployment are made (`OF_THE_POD`), such as the address of its operators' port, are refused where the two differ.

use crate::config::{ConfigError, env_file, settings_table};
use anyhow::Context;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

/// Files, with colons.
pub const VARIABLE: &str = "SVC_ENV_FILE";

/// What the shipped manifests are made for: another value in a file would have a pod that answers no probe, or one with the work of another.
const OF_THE_POD: [&str; 4] = ["SVC_MEMBER_NAME", "SVC_MIGRATE_ON_START", "SVC_OPERATIONS_LISTEN", "SVC_ROLES"];

/// Replaces this process by one with the settings of the files. Without the variable it does nothing.
///
/// # Errors
/// [`ConfigError`] where a file cannot be used.
pub fn apply() -> anyhow::Result<()> {
    let Some(paths) = std::env::var_os(VARIABLE).filter(|paths| !paths.is_empty()) else { return Ok(()) };
    let settings = read(std::env::split_paths(&paths), |name| std::env::var(name).ok())?;
    if !settings.overrides.is_empty() && std::env::args_os().nth(1).is_some_and(|command| command == "serve") {
        // The process that is started next logs; it does not know the overridden environment any more.
        let names = settings.overrides.join(", ");
        let _ = writeln!(std::io::stderr(), "gpuaas: the files of {VARIABLE} override the environment: {names}");
    }
    let mut arguments = std::env::args_os();
    let mut again = Command::new(own_program());
    if let Some(name) = arguments.next() {
        again.arg0(name);
    }
    // A variable of a file goes before the one of the environment, as in a unit.
    let error = again.args(arguments).envs(settings.values).env_remove(VARIABLE).exec();
    Err(error).context("the program cannot start itself again with the settings of SVC_ENV_FILE; /proc must be mounted")
}

/// The path of this program, by which the kernel names the process: `gpuaas`, not `exe`. Where the file was replaced, the one that runs.
fn own_program() -> PathBuf {
    std::env::current_exe().ok().filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
}

/// What the files set.
#[derive(Debug)]
struct FileSettings {
    values: BTreeMap<String, String>,
    /// The settings of this service to which the environment gives another value, by name.
    overrides: Vec<String>,
}

/// What the files set; of two with one name the one of the later file. `environment` has what is set without them.
/// A setting of this service that is blank counts as not set.
fn read(
    paths: impl Iterator<Item = PathBuf>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<FileSettings, ConfigError> {
    let (mut values, mut problems) = (BTreeMap::<String, String>::new(), Vec::new());
    for path in paths {
        match env_file::read(&path) {
            Ok(text) => {
                let file = env_file::EnvFile::parse(&text);
                problems.extend(file.problems.iter().map(|problem| format!("{}: {problem}", path.display())));
                values.extend(file.values);
            }
            Err(error) => problems.extend(error.problems.iter().map(|problem| format!("{VARIABLE}: {problem}"))),
        }
    }
    values.retain(|name, value| !settings_table::is_known(name) || !value.trim().is_empty());
    let differs = |name: &str, value: &str| {
        let other = environment(name).filter(|other| !other.trim().is_empty());
        settings_table::is_known(name) && other.is_some_and(|other| other != value)
    };
    let different = values.iter().filter(|(name, value)| differs(name, value)).map(|(name, _)| name.clone());
    let (refused, overrides): (Vec<_>, Vec<_>) = different.partition(|name| OF_THE_POD.contains(&name.as_str()));
    if !refused.is_empty() {
        problems.push(format!(
            "{VARIABLE}: its files and the environment (the pod's description) set {} to different values; remove it from one of them",
            refused.join(", ")
        ));
    }
    let error = problems.into_iter().map(ConfigError::of).reduce(ConfigError::and);
    error.map_or(Ok(FileSettings { values, overrides }), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_file_overrides_an_earlier_one_and_every_problem_is_named_with_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let (all, own) = (file("all.env", "A=1\nB=1\n"), file("own.env", "B='2 3'\n"));
        let nothing = |_: &str| None;
        let settings = read([all.clone(), own].into_iter(), nothing).unwrap().values;
        let expected = [("A", "1"), ("B", "2 3")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(settings, expected.into());

        let bad = file("bad.env", "export A=hunter2\n");
        let error = read([all, bad, folder.path().join("absent.env")].into_iter(), nothing).unwrap_err().to_string();
        assert!(
            error.contains("bad.env: line 1 ")
                && error.contains("SVC_ENV_FILE: ")
                && error.contains("absent.env cannot be read")
        );
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn setting_for_which_a_pod_is_made_is_refused_by_its_name_unless_both_agree() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gpuaas.env");
        let text = "SVC_OPERATIONS_LISTEN=127.0.0.1:9464\nSVC_ROLES=hunter2\nSVC_KEK_FILE=/srv/kek\nPATH=/bin\n";
        std::fs::write(&file, text).unwrap();
        let pod = |name: &str| match name {
            "SVC_OPERATIONS_LISTEN" => Some("0.0.0.0:9464".to_owned()),
            "SVC_ROLES" => Some("api".to_owned()),
            "SVC_KEK_FILE" => Some("/etc/gpuaas/kek".to_owned()),
            "PATH" => Some("/usr/bin".to_owned()),
            _ => None,
        };
        let error = read([file.clone()].into_iter(), pod).unwrap_err().to_string();
        assert!(error.contains("set SVC_OPERATIONS_LISTEN, SVC_ROLES to different values"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
        std::fs::write(&file, "SVC_OPERATIONS_LISTEN=0.0.0.0:9464\nSVC_ROLES=\nPATH=/bin\n").unwrap();
        let agreed = read([file].into_iter(), pod).unwrap();
        assert_eq!(agreed.values.keys().collect::<Vec<_>>(), ["PATH", "SVC_OPERATIONS_LISTEN"]);
        assert_eq!(agreed.overrides, Vec::<String>::new());
    }

    #[test]
    fn file_overrides_other_settings_of_the_environment_and_a_blank_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gpuaas.env");
        let text = "SVC_KEK_FILE=/srv/kek\nSVC_TLS_CA_PATH=\nSVC_OIDC_AUDIENCE=gpuaas\nPATH=/bin\n";
        std::fs::write(&file, text).unwrap();
        let pod = |name: &str| match name {
            "SVC_KEK_FILE" => Some("/etc/gpuaas/kek".to_owned()),
            "SVC_TLS_CA_PATH" => Some("/etc/gpuaas/ca.pem".to_owned()),
            "SVC_OIDC_AUDIENCE" => Some(" ".to_owned()),
            "PATH" => Some("/usr/bin".to_owned()),
            _ => None,
        };
        let settings = read([file].into_iter(), pod).unwrap();
        assert_eq!(settings.overrides, ["SVC_KEK_FILE"]);
        assert_eq!(settings.values.keys().collect::<Vec<_>>(), ["PATH", "SVC_KEK_FILE", "SVC_OIDC_AUDIENCE"]);
    }
}
