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

    /// An id or a secret that another system has issued. A blank at an end, a line end among them, is none of it: `echo` writes one into a
    /// Kubernetes Secret. The value may be a secret, and is not quoted.
    pub(super) fn credential(&mut self, name: &str) -> Option<String> {
        let value = self.optional(name)?;
        self.check_credential(name, &value);
        Some(value)
    }

    fn check_credential(&mut self, name: &str, value: &str) {
        let why = if value.ends_with(['\n', '\r']) {
            "ends in a line end, as `echo` writes it; write the value with `printf %s`"
        } else if value.trim() != value || value.starts_with(BYTE_ORDER_MARK) {
            "begins or ends with a blank or a byte-order mark; leave it out"
        } else if value.contains(char::is_control) {
            "holds a control character, such as a line end; it must be the value alone"
        } else {
            return;
        };
        self.wrong(format!("{name} {why}"));
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
        let text = if path.as_os_str().is_empty() { String::new() } else { self.pem_of(name, &path, what) };
        (path, text)
    }

    /// An optional file of certificates.
    pub(super) fn optional_certificates(&mut self, name: &str) -> Option<PathBuf> {
        let path = PathBuf::from(self.optional(name)?);
        let text = self.pem_of(name, &path, "a file of certificates, PEM");
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

    /// A secret, as a value or in a file; `None` where neither is set. A file's last line may have an end, and its first one a byte-order mark,
    /// as editors write it on Windows.
    pub(super) fn secret(&mut self, name: &str, path_name: &str) -> Option<SecretString> {
        let Some(path) = self.optional(path_name) else { return self.credential(name).map(Into::into) };
        if self.optional(name).is_some() {
            self.wrong(format!("{name} and {path_name} are both set; set one of them"));
        }
        let text = SecretString::from(self.text_of(path_name, path.as_ref(), "a file with the secret alone"));
        let secret = text.expose_secret().trim_start_matches(BYTE_ORDER_MARK).trim_end_matches(['\r', '\n']);
        self.check_credential(path_name, secret);
        (!secret.is_empty()).then(|| secret.into())
    }

    /// The text of a file that libraries read from its path. With a byte-order mark they do not find its first certificate.
    fn pem_of(&mut self, name: &str, path: &Path, what: &str) -> String {
        let text = self.text_of(name, path, what);
        if text.starts_with(BYTE_ORDER_MARK) {
            let at = path.display();
            self.wrong(format!("{name} is {at}, which begins with a byte-order mark; save it as UTF-8 without one"));
        }
        text
    }

    fn text_of(&mut self, name: &str, path: &Path, what: &str) -> String {
        let at = path.display();
        let read = std::fs::read(path).map_err(|error| error.to_string()).and_then(|bytes| {
            let is_utf16 = bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]);
            String::from_utf8(bytes).map_err(|_| match is_utf16 {
                true => "it is in UTF-16; save it as UTF-8".to_owned(),
                false => "it is no text in UTF-8".to_owned(),
            })
        });
        match read {
            Ok(text) if text.trim_start_matches(BYTE_ORDER_MARK).trim().is_empty() => {
                self.wrong(format!("{name} is {at}, which is empty; it must be {what}"));
            }
            Ok(text) => return text,
            Err(error) => self.wrong(format!("{name} is {at}, which cannot be read ({error}); it must be {what}")),
        }
        String::new()
    }
}

pub(super) const BYTE_ORDER_MARK: char = '\u{feff}';

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

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWORD: &str = "SVC_LOG_STORE_PASSWORD";
    const PASSWORD_PATH: &str = "SVC_LOG_STORE_PASSWORD_PATH";

    fn secret_in(bytes: &[u8]) -> Result<Option<SecretString>, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        read_from(&[(PASSWORD_PATH, file.path().to_str().unwrap())], |it| it.secret(PASSWORD, PASSWORD_PATH))
    }

    #[test]
    fn secret_in_a_file_of_a_windows_editor_is_read_without_its_mark_and_utf_16_is_named() {
        for text in ["hunter2", "hunter2\n", "hunter2\r\n", "\u{feff}hunter2\r\n", "\u{feff}hunter2"] {
            assert_eq!(secret_in(text.as_bytes()).unwrap().unwrap().expose_secret(), "hunter2", "{text:?}");
        }
        let utf16 = "\u{feff}hunter2\r\n".encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
        let error = secret_in(&utf16).unwrap_err().to_string();
        assert!(error.contains("UTF-16") && error.contains(PASSWORD_PATH), "{error}");
        for text in ["\u{feff}", "\u{feff}\r\n", "hunter2 \n", " hunter2", "hunter2\nhunter3\n"] {
            let error = secret_in(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(PASSWORD_PATH) && !error.contains("hunter"), "{text:?}: {error}");
        }
    }

    #[test]
    fn file_of_certificates_with_a_byte_order_mark_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let authority = local_servers::pki::Authority::create(folder.path()).unwrap();
        let path = folder.path().join("marked.pem");
        std::fs::write(&path, format!("\u{feff}{pem}{pem}", pem = authority.certificate_pem())).unwrap();
        let variables = [("SVC_NATS_CA_PATH", path.to_str().unwrap())];
        let error = read_from(&variables, |it| it.optional_certificates("SVC_NATS_CA_PATH")).unwrap_err().to_string();
        assert!(error.contains("SVC_NATS_CA_PATH") && error.contains("byte-order mark"), "{error}");
    }
}
