//! The settings that an environment saves between starts beside its data: ports, passwords and keys, in one file that only its user reads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use secrecy::SecretString;

use crate::ports::free_port;
use crate::private_files;

/// How long a saved port may stay in use: the programs of a killed start may still be ending. Longer than their watcher waits.
const PORT_RELEASE_TIMEOUT: Duration = Duration::from_secs(30);
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Saved values by name. Each is created at its first use.
#[derive(Debug, Default)]
pub struct SavedSettings {
    path: Option<PathBuf>,
    values: Mutex<BTreeMap<String, String>>,
}

/// A port, and whether clients of an earlier start know it.
#[derive(Debug, Clone, Copy)]
pub struct SavedPort {
    pub number: u16,
    pub is_known: bool,
}

impl SavedSettings {
    /// The settings of a temporary environment: every value is new, and so is the data of each part.
    pub fn ephemeral() -> Self {
        Self::default()
    }

    /// The settings that an earlier start wrote to the file, or none.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let values = match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{} cannot be read; start over with --fresh", path.display()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(error).with_context(|| format!("{} cannot be read", path.display())),
        };
        Ok(Self { path: Some(path.to_owned()), values: Mutex::new(values) })
    }

    /// Whether the settings and the data of the parts are kept.
    pub fn is_persistent(&self) -> bool {
        self.path.is_some()
    }

    /// The value of this name, created by `make` where there is none.
    pub fn value(&self, name: &str, make: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<String> {
        if let Some(value) = self.get(name) {
            return Ok(value);
        }
        let value = make()?;
        self.set(name, &value)?;
        Ok(value)
    }

    pub fn get(&self, name: &str) -> Option<String> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Saves a value, before it is used.
    pub fn set(&self, name: &str, value: &str) -> anyhow::Result<()> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        values.insert(name.to_owned(), value.to_owned());
        match &self.path {
            Some(path) => private_files::write_private(path, &serde_json::to_vec_pretty(&*values)?),
            None => Ok(()),
        }
    }

    /// `bytes` random bytes as hexadecimal text, after `prefix`.
    pub fn secret(&self, name: &str, prefix: &str, bytes: usize) -> anyhow::Result<SecretString> {
        Ok(self.value(name, || Ok(format!("{prefix}{}", private_files::random_hex(bytes))))?.into())
    }

    /// A port of 127.0.0.1: the one of an earlier start, or a free one, which this process has until it ends.
    pub fn port(&self, name: &str) -> anyhow::Result<SavedPort> {
        self.port_within(name, PORT_RELEASE_TIMEOUT)
    }

    fn port_within(&self, name: &str, limit: Duration) -> anyhow::Result<SavedPort> {
        if let Some(text) = self.get(name) {
            let number = text.parse().with_context(|| format!("{name} is no port; start over with --fresh"))?;
            let until = Instant::now() + limit;
            let is_free = || std::net::TcpListener::bind(("127.0.0.1", number)).is_ok();
            while !is_free() && Instant::now() < until {
                std::thread::sleep(CHECK_INTERVAL);
            }
            if !is_free() {
                bail!(
                    "port {number}, which this environment has for {name}, is taken by another program: stop that one, or start over with \
                     --fresh"
                );
            }
            return Ok(SavedPort { number, is_known: true });
        }
        let number = free_port()?;
        self.set(name, &number.to_string())?;
        Ok(SavedPort { number, is_known: false })
    }

    /// Another port than the last one, which another process took before its server bound it.
    pub fn another_port(&self, name: &str) -> anyhow::Result<SavedPort> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        self.port(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret as _;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn second_start_has_the_ports_and_secrets_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kept.json");
        let first = SavedSettings::open(&path).unwrap();
        let (secret, port) = (first.secret("password", "p_", 8).unwrap(), first.port("postgres").unwrap());
        assert!(!port.is_known);
        let second = SavedSettings::open(&path).unwrap();
        assert_eq!(second.secret("password", "p_", 8).unwrap().expose_secret(), secret.expose_secret());
        let repeated = second.port("postgres").unwrap();
        assert_eq!((repeated.number, repeated.is_known), (port.number, true));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn saved_port_in_use_is_refused_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let saved = SavedSettings::open(&dir.path().join("kept.json")).unwrap();
        let port = saved.port("public API").unwrap().number;
        let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
        let error = saved.port_within("public API", Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("--fresh"), "{error}");
    }
}
