//! What an environment keeps from one start to the next beside its data: ports, passwords and keys, in one file that only its user reads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use secrecy::SecretString;

use super::files;
use super::process::free_port;

/// The programs of a start that was killed may still be ending: longer than their watcher gives them.
const ENDS_WITHIN: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Values by name. Each is made when it is first asked for.
#[derive(Debug, Default)]
pub struct Kept {
    path: Option<PathBuf>,
    values: Mutex<BTreeMap<String, String>>,
}

/// A port, and whether clients of an earlier start know it.
#[derive(Debug, Clone, Copy)]
pub struct Port {
    pub number: u16,
    pub is_known: bool,
}

impl Kept {
    /// Of an environment that is thrown away: every value is new, and so is the data of each part.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// What an earlier start wrote to the file, or nothing yet.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let values = match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{} cannot be read; begin anew with --fresh", path.display()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(error).with_context(|| format!("{} cannot be read", path.display())),
        };
        Ok(Self { path: Some(path.to_owned()), values: Mutex::new(values) })
    }

    /// Whether parts keep their data.
    pub fn keeps(&self) -> bool {
        self.path.is_some()
    }

    /// The value of this name, made by `make` where there is none.
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

    /// Notes a value, and writes the file before it is used.
    pub fn set(&self, name: &str, value: &str) -> anyhow::Result<()> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        values.insert(name.to_owned(), value.to_owned());
        match &self.path {
            Some(path) => files::write_private(path, &serde_json::to_vec_pretty(&*values)?),
            None => Ok(()),
        }
    }

    /// `bytes` random bytes as hexadecimal text, after `prefix`.
    pub fn secret(&self, name: &str, prefix: &str, bytes: usize) -> anyhow::Result<SecretString> {
        Ok(self.value(name, || Ok(format!("{prefix}{}", files::random_hex(bytes))))?.into())
    }

    /// A port of 127.0.0.1: the one of an earlier start, or one that was free a moment ago.
    pub fn port(&self, name: &str) -> anyhow::Result<Port> {
        self.port_within(name, ENDS_WITHIN)
    }

    fn port_within(&self, name: &str, limit: Duration) -> anyhow::Result<Port> {
        if let Some(text) = self.get(name) {
            let number = text.parse().with_context(|| format!("{name} is no port; begin anew with --fresh"))?;
            let until = Instant::now() + limit;
            let is_free = || std::net::TcpListener::bind(("127.0.0.1", number)).is_ok();
            while !is_free() && Instant::now() < until {
                std::thread::sleep(LOOK_EVERY);
            }
            if !is_free() {
                bail!(
                    "port {number}, which this environment has for {name}, is taken by another program: stop that one, or begin anew with \
                     --fresh"
                );
            }
            return Ok(Port { number, is_known: true });
        }
        let number = free_port()?;
        self.set(name, &number.to_string())?;
        Ok(Port { number, is_known: false })
    }

    /// Another port than the last one, which somebody took before its server bound it.
    pub fn another_port(&self, name: &str) -> anyhow::Result<Port> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        self.port(name)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret as _;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn second_start_has_the_ports_and_secrets_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kept.json");
        let first = Kept::open(&path).unwrap();
        let (secret, port) = (first.secret("password", "p_", 8).unwrap(), first.port("postgres").unwrap());
        assert!(!port.is_known);
        let second = Kept::open(&path).unwrap();
        assert_eq!(second.secret("password", "p_", 8).unwrap().expose_secret(), secret.expose_secret());
        let again = second.port("postgres").unwrap();
        assert_eq!((again.number, again.is_known), (port.number, true));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn kept_port_that_is_taken_is_refused_with_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let kept = Kept::open(&dir.path().join("kept.json")).unwrap();
        let port = kept.port("public API").unwrap().number;
        let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
        let error = kept.port_within("public API", Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("--fresh"), "{error}");
    }
}
