//! Where a setting without a flag comes from.

use std::path::PathBuf;

use wire::bundle::{Variables, names};

use super::{AgentConfigError, Flags};
use crate::atomic_file;

/// The environment, then the environment file. An empty value counts as missing.
pub(crate) struct Sources<'a> {
    environment: &'a dyn Fn(&str) -> Option<String>,
    pub(super) env_file: Option<PathBuf>,
    file: Variables,
}

impl<'a> Sources<'a> {
    pub(crate) fn open(
        flags: &Flags,
        environment: &'a dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, AgentConfigError> {
        let named = flags.env_file.clone().or_else(|| environment(names::ENV_FILE).map(PathBuf::from));
        let Some(path) = named else {
            return Ok(Self { environment, env_file: None, file: Variables::default() });
        };
        let text = atomic_file::read_if_there(&path)?.ok_or_else(|| AgentConfigError::NoEnvFile(path.clone()))?;
        let file =
            Variables::parse(&text).map_err(|source| AgentConfigError::EnvFile { path: path.clone(), source })?;
        Ok(Self { environment, env_file: Some(path), file })
    }

    pub(crate) fn get(&self, name: &str) -> Option<String> {
        let from_file = || self.file.get(name).map(str::to_owned);
        (self.environment)(name).filter(|value| !value.is_empty()).or_else(from_file).filter(|value| !value.is_empty())
    }

    pub(super) fn require(&self, name: &'static str) -> Result<String, AgentConfigError> {
        self.get(name).ok_or(AgentConfigError::Missing { name })
    }

    pub(super) fn flag_or(&self, flag: Option<&String>, name: &'static str) -> Result<String, AgentConfigError> {
        flag.map_or_else(|| self.require(name), |value| Ok(value.clone()))
    }
}
