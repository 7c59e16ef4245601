//! The settings of notifications by e-mail: the mail server and the sender.

use super::outside_service::authorities_pem;
use super::variables::Variables;
use edge::notifications::delivery::email::{MailConfig, MailConfigError, Mailer};
use secrecy::SecretString;
use std::path::{Path, PathBuf};

const URL: &str = "SVC_SMTP_URL";
const FROM: &str = "SVC_SMTP_FROM";
const CA: &str = "SVC_NOTIFICATION_CA_PATH";

/// The mail server. Without it the service runs, and sends no notifications by e-mail.
#[derive(Debug)]
pub struct MailSettings {
    /// It may hold a password.
    pub url: SecretString,
    /// The sender's mailbox.
    pub from: String,
    /// Authorities beside the system's.
    pub ca: Option<PathBuf>,
    /// The URL of the public API.
    pub public_url: String,
}

impl MailSettings {
    /// The mailer, ready to send.
    ///
    /// # Errors
    /// Names the variable that cannot be used.
    pub fn open(&self) -> anyhow::Result<Mailer> {
        let authorities_pem = authorities_pem(CA, self.ca.as_deref())?;
        self.mailer(authorities_pem)
    }

    fn mailer(&self, authorities_pem: Option<String>) -> anyhow::Result<Mailer> {
        let (url, from, public_url) = (self.url.clone(), self.from.clone(), self.public_url.clone());
        let config = MailConfig { url, from, authorities_pem, public_url };
        Mailer::new(&config).map_err(|error| {
            let variable = match error {
                MailConfigError::Url(_) => URL,
                MailConfigError::From(_) => FROM,
                MailConfigError::Authorities(_) => CA,
            };
            anyhow::Error::new(error).context(variable)
        })
    }
}

/// The authorities of mail servers and of webhooks' receivers, beside the system's.
pub(super) fn notification_ca(variables: &mut Variables<'_>) -> Option<PathBuf> {
    variables.optional_certificates(CA)
}

/// Both variables, or neither. `ca` is the result of [`notification_ca`].
pub(super) fn mail(variables: &mut Variables<'_>, ca: Option<&Path>, public_url: &str) -> Option<MailSettings> {
    let Some(url) = variables.optional(URL) else {
        if variables.optional(FROM).is_some() {
            variables.wrong(format!("{FROM} is set, but {URL} is not: no mail could be sent"));
        }
        return None;
    };
    let from = variables.required(FROM, "the mailbox that mails are from, such as GPUaaS <no-reply@example.com>");
    if from.is_empty() {
        return None;
    }
    let mail = MailSettings { url: url.into(), from, ca: ca.map(Path::to_owned), public_url: public_url.to_owned() };
    // An unreadable file is recorded already.
    if let Err(error) = mail.mailer(ca.and_then(|path| std::fs::read_to_string(path).ok())) {
        variables.wrong(format!("{error:#}"));
    }
    Some(mail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::{ConfigError, read_from};

    const TLS: (&str, &str) = (URL, "smtps://user:hunter2@mail.example");
    const SENDER: (&str, &str) = (FROM, "GPUaaS <no-reply@example.com>");

    fn read(variables: &[(&str, &str)]) -> Result<Option<MailSettings>, ConfigError> {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        read_from(variables, |variables| {
            let ca = notification_ca(variables);
            mail(variables, ca.as_deref(), "https://gpu.example")
        })
    }

    #[test]
    fn mail_is_optional_and_its_password_is_redacted() {
        assert!(read(&[]).unwrap().is_none());
        let mail = read(&[TLS, SENDER]).unwrap().unwrap();
        assert_eq!((mail.from.as_str(), &mail.ca), ("GPUaaS <no-reply@example.com>", &None));
        let shown = format!("{mail:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(read(&[(URL, "smtp://mail.example?tls=required"), SENDER]).unwrap().is_some());
        assert!(read(&[(URL, "smtp://localhost:2525"), SENDER]).unwrap().is_some());
    }

    #[test]
    fn missing_and_wrong_mail_settings_are_named_without_the_password() {
        for (variables, named) in [
            (vec![SENDER], URL),
            (vec![TLS], FROM),
            (vec![TLS, (FROM, "GPUaaS")], FROM),
            (vec![(URL, "smtp://user:hunter2@mail.example"), SENDER], "?tls=required"),
            (vec![(URL, "hunter2"), SENDER], URL),
            (vec![TLS, SENDER, (CA, "/nowhere/ca.pem")], CA),
            (vec![(CA, "/nowhere/ca.pem")], CA),
        ] {
            let error = read(&variables).unwrap_err().to_string();
            assert!(error.contains(named) && !error.contains("hunter2"), "{error}");
            assert_eq!(error.lines().count(), 2, "{error}");
        }
    }
}
