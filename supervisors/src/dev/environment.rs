//! `.dev/env`: the addresses and credentials of a running environment, for a shell to source.

use std::path::{Path, PathBuf};

use wire::bundle::env_file::quote;

use local_servers::private_files;

/// The variables, in the order in which they are written.
#[derive(Default)]
pub struct EnvironmentVariables {
    variables: Vec<(String, String)>,
}

impl EnvironmentVariables {
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.variables.push((name.into(), value.into()));
    }

    /// `NAME` for the one that a caller should use, and `NAME_1` … `NAME_n` for each.
    pub fn set_all(&mut self, name: &str, shared: Option<String>, each: impl IntoIterator<Item = String>) {
        if let Some(shared) = shared {
            self.set(name, shared);
        }
        for (number, value) in (1..).zip(each) {
            self.set(format!("{name}_{number}"), value);
        }
    }

    /// Writes the file, readable by this user alone. It is removed when the returned value is dropped.
    pub fn write(&self, path: &Path) -> anyhow::Result<EnvironmentFile> {
        let mut text = String::from("# Written by `gpuaas dev`, removed when it stops. It holds passwords.\n");
        for (name, value) in &self.variables {
            text.push_str(&format!("export {name}={}\n", quote(value)));
        }
        private_files::write_private(path, text.as_bytes())?;
        Ok(EnvironmentFile { path: path.to_owned() })
    }
}

/// A written file.
#[derive(Debug)]
pub struct EnvironmentFile {
    path: PathBuf,
}

impl EnvironmentFile {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for EnvironmentFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_file_is_read_back_by_a_shell_and_executes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("env");
        let hostile = "it's \"$(touch hostile)\" `touch hostile`; \\ \n end";
        let mut environment = EnvironmentVariables::default();
        environment.set_all("SVC_BASE_URL", Some("https://a".to_owned()), ["https://b".to_owned(), hostile.to_owned()]);
        let written = environment.write(&path).unwrap();
        let output = std::process::Command::new("sh")
            .args(["-c", r#". ./env && printf '%s|%s|%s' "$SVC_BASE_URL" "$SVC_BASE_URL_1" "$SVC_BASE_URL_2""#])
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("https://a|https://b|{hostile}"));
        assert!(!dir.path().join("hostile").exists());
        drop(written);
        assert!(!path.exists());
    }
}
