//! Reads environment variables, and collects every problem with them.

use super::settings_table;
use secrecy::{ExposeSecret as _, SecretString};
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use wire::address::AddressError;

/// One variable that is missing or wrong, with what it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem(String);

impl Problem {
    pub(super) fn of(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A configuration that cannot be used. It lists every problem, since an operator corrects them in one go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    pub problems: Vec<Problem>,
}

impl ConfigError {
    /// An error with one problem.
    pub fn of(problem: impl Into<String>) -> Self {
        Self { problems: vec![Problem(problem.into())] }
    }

    /// The problems of both.
    #[must_use]
    pub fn and(mut self, more: Self) -> Self {
        self.problems.extend(more.problems);
        self
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.problems.len();
        write!(f, "the configuration has {count} {}:", if count == 1 { "problem" } else { "problems" })?;
        self.problems.iter().try_for_each(|problem| write!(f, "\n  {}", problem.0))
    }
}

impl std::error::Error for ConfigError {}

/// Reads variables and collects the problems. A method returns a placeholder for an unusable value; [`Self::finish`] refuses
/// the configuration that contains it. A blank value counts as not set.
pub(super) struct Variables<'a> {
    find: &'a dyn Fn(&str) -> Option<String>,
    problems: Vec<Problem>,
}

impl<'a> Variables<'a> {
    pub(super) fn new(find: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { find, problems: Vec::new() }
    }

    /// The value, or all problems. There is no value where a problem without a placeholder was recorded.
    pub(super) fn finish<T>(self, value: Option<T>) -> Result<T, ConfigError> {
        match value {
            Some(value) if self.problems.is_empty() => Ok(value),
            Some(_) | None => Err(ConfigError { problems: self.problems }),
        }
    }

    /// `problem` begins with the variable's name.
    pub(super) fn wrong(&mut self, problem: impl Into<String>) {
        self.problems.push(Problem(problem.into()));
    }

    pub(super) fn optional(&self, name: &str) -> Option<String> {
        debug_assert!(settings_table::is_known(name), "{name} has no row in the table of settings");
        (self.find)(name).filter(|value| !value.trim().is_empty())
    }

    /// The value, a blank one included: for a setting where a blank one is a mistake.
    pub(super) fn assigned(&self, name: &str) -> Option<String> {
        debug_assert!(settings_table::is_known(name), "{name} has no row in the table of settings");
        (self.find)(name)
    }

    /// `what` describes a valid value, for the message.
    pub(super) fn required(&mut self, name: &str, what: &str) -> String {
        self.optional(name).unwrap_or_else(|| {
            self.wrong(format!("{name} is not set; it must be {what}"));
            String::new()
        })
    }

    /// The value of `result`; on a problem, records it and returns a placeholder.
    pub(super) fn take<T: Default, E: fmt::Display>(&mut self, result: Result<T, E>) -> T {
        result.unwrap_or_else(|problem| {
            self.wrong(format!("{problem:#}"));
            T::default()
        })
    }

    /// Off where it is not set.
    pub(super) fn switch(&mut self, name: &str) -> bool {
        match self.optional(name).as_deref() {
            Some("true") => true,
            Some("false") | None => false,
            Some(other) => {
                self.wrong(format!("{name} is {other:?}; it must be true or false"));
                false
            }
        }
    }

    /// The items of a list with commas.
    pub(super) fn list(&self, name: &str) -> Vec<String> {
        items(&self.optional(name).unwrap_or_default())
    }

    pub(super) fn address(&mut self, name: &str, default: &str) -> SocketAddr {
        let text = self.optional(name).unwrap_or_else(|| default.to_owned());
        text.parse().unwrap_or_else(|_| {
            self.wrong(format!("{name} is {text:?}; it must be an address and a port, for example {default}"));
            SocketAddr::from(([0, 0, 0, 0], 0))
        })
    }

    pub(super) fn networks(&mut self, name: &str) -> Vec<ipnet::IpNet> {
        let mut networks = Vec::new();
        for text in self.list(name) {
            match text.parse() {
                Ok(network) => networks.push(network),
                Err(_) => self.wrong(format!(
                    "{name}: {text:?} is no network such as 10.0.0.0/8, or 10.0.0.7/32 for one address"
                )),
            }
        }
        networks
    }

    /// An address of the kind that `parse` reads; `None` where it is missing or wrong, which is a problem.
    pub(super) fn required_address<T>(&mut self, name: &str, what: &str, parse: AddressParser<T>) -> Option<T> {
        let text = self.required(name, what);
        if text.is_empty() { None } else { self.check_address(name, &text, parse) }
    }

    /// As there, where it may be missing.
    pub(super) fn optional_address<T>(&mut self, name: &str, parse: AddressParser<T>) -> Option<T> {
        let text = self.optional(name)?;
        self.check_address(name, &text, parse)
    }

    pub(super) fn check_address<T>(&mut self, name: &str, text: &str, parse: AddressParser<T>) -> Option<T> {
        parse(text).map_err(|error| self.wrong(format!("{name}: {error}"))).ok()
    }

    /// The path of a file and its text. The text is empty where the file cannot be read.
    pub(super) fn file(&mut self, name: &str, what: &str) -> (PathBuf, String) {
        let path = PathBuf::from(self.required(name, what));
        let text = if path.as_os_str().is_empty() { String::new() } else { self.text_of(name, &path, what) };
        (path, text)
    }

    /// An optional file of certificates.
    pub(super) fn optional_certificates(&mut self, name: &str) -> Option<PathBuf> {
        let path = PathBuf::from(self.optional(name)?);
        let text = self.text_of(name, &path, "a file of certificates, PEM");
        self.check_certificates(name, &path, &text);
        Some(path)
    }

    pub(super) fn check_certificates(&mut self, name: &str, path: &Path, text: &str) {
        use rustls::pki_types::CertificateDer;
        use rustls::pki_types::pem::PemObject as _;
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
        if !text.is_empty() && !read.is_ok_and(|certificates| !certificates.is_empty()) {
            self.wrong(format!("{name} is {}, which holds no certificate, PEM", path.display()));
        }
    }

    /// A secret, as a value or in a file; `None` where neither is set. A file's last line may have an end.
    pub(super) fn secret(&mut self, name: &str, path_name: &str) -> Option<SecretString> {
        let Some(path) = self.optional(path_name) else { return self.optional(name).map(Into::into) };
        if self.optional(name).is_some() {
            self.wrong(format!("{name} and {path_name} are both set; set one of them"));
        }
        let text = SecretString::from(self.text_of(path_name, path.as_ref(), "a file with the secret alone"));
        let secret = text.expose_secret().trim_end_matches(['\r', '\n']);
        (!secret.is_empty()).then(|| secret.into())
    }

    fn text_of(&mut self, name: &str, path: &Path, what: &str) -> String {
        let at = path.display();
        match std::fs::read_to_string(path) {
            Ok(text) if text.trim().is_empty() => {
                self.wrong(format!("{name} is {at}, which is empty; it must be {what}"));
            }
            Ok(text) => return text,
            Err(error) => self.wrong(format!("{name} is {at}, which cannot be read ({error}); it must be {what}")),
        }
        String::new()
    }
}

/// Reads an address of one kind.
pub(super) type AddressParser<T> = fn(&str) -> Result<T, AddressError>;

/// The items of a list with commas.
pub(super) fn items(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(ToOwned::to_owned).collect()
}

/// The result of `read` with these variables alone.
#[cfg(test)]
pub(super) fn read_from<T>(
    variables: &[(&str, &str)],
    read: impl FnOnce(&mut Variables<'_>) -> T,
) -> Result<T, ConfigError> {
    let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    let mut variables = Variables::new(&find);
    let value = read(&mut variables);
    variables.finish(Some(value))
}
