//! The folder of a development environment.

use std::fs::{File, OpenOptions};
use std::path::Path;

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};

/// What an environment has in its folder; and, in the checkout's `.dev`, what deploy/ installs and builds beside it.
const OWN_ENTRIES: [&str; 19] = [
    "lock",
    "kept",
    "key-ring",
    "env",
    "run",
    "logs",
    "pki",
    "postgres",
    "nats",
    "localstripe",
    "once",
    "tools",
    "not-run",
    "book",
    "debian",
    "cache",
    "parts",
    "test",
    "previous-release",
];

/// Refuses a folder that holds anything else: an environment writes and removes files there.
pub(super) fn refuse_foreign(dir: &Path) -> anyhow::Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("{} cannot be read", dir.display())),
    };
    for entry in entries {
        let name = entry?.file_name();
        let text = name.to_string_lossy();
        if !OWN_ENTRIES
            .iter()
            .any(|own| text.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
        {
            bail!(
                "{} holds other files, such as {}: name an empty folder, or one of an earlier start, with --dir FOLDER",
                dir.display(),
                name.display()
            );
        }
    }
    Ok(())
}

/// Two environments in one folder would remove each other's data. The lock ends with this process.
pub(super) fn lock(folder: &Path) -> anyhow::Result<Flock<File>> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(folder.join("lock"))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|_| {
            anyhow::anyhow!(
                "another environment is up in {}: stop it (Ctrl-C where it runs), or start this one in another folder with --dir FOLDER",
                folder.display()
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_with_foreign_files_is_refused_and_an_environments_own_is_not() {
        let dir = tempfile::tempdir().unwrap();
        assert!(refuse_foreign(&dir.path().join("new")).is_ok());
        for own in ["lock", "kept.json", "env.0a1b2c3d.new", "tools", "postgres"] {
            std::fs::write(dir.path().join(own), "").unwrap();
        }
        assert!(refuse_foreign(dir.path()).is_ok());
        std::fs::write(dir.path().join("environment"), "").unwrap();
        let error = refuse_foreign(dir.path()).unwrap_err().to_string();
        assert!(error.contains("such as environment") && error.contains("--dir"), "{error}");
    }

    #[test]
    fn folder_in_which_the_scripts_of_deploy_have_installed_and_built_is_not_refused() {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
        let is_script = |path: &Path| path.is_file() && path.extension().is_none_or(|kind| kind == "sh");
        let folders = ["", "lib", "debian", "images"].map(|folder| std::fs::read_dir(deploy.join(folder)).unwrap());
        let scripts = folders.into_iter().flatten().map(|entry| entry.unwrap().path()).filter(|path| is_script(path));
        let mut names = std::collections::BTreeSet::new();
        for script in scripts {
            let text = std::fs::read_to_string(&script).unwrap();
            for after in text.split("/.dev/").skip(1) {
                let name =
                    after.split(|letter: char| !letter.is_ascii_alphanumeric() && !"-._".contains(letter)).next();
                names.extend(name.filter(|name| !name.is_empty()).map(str::to_owned));
            }
        }
        assert!(names.contains("tools") && names.contains("previous-release"), "{names:?}");
        let dir = tempfile::tempdir().unwrap();
        for name in &names {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        refuse_foreign(dir.path()).unwrap();
    }
}
