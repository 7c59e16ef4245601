//! How requests to a service outside authenticate, and for which of its tenants they are.

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use secrecy::{ExposeSecret as _, SecretString};
use thiserror::Error;

/// The header by which Loki, Mimir and their Alertmanager tell tenants apart.
pub const TENANT_HEADER: HeaderName = HeaderName::from_static("x-scope-orgid");
/// The longest id of a tenant that these take.
const TENANT_BYTES: usize = 150;

/// What a service outside admits requests by. Nothing, where all is unset.
#[derive(Clone, Debug, Default)]
pub struct ServiceAccess {
    /// The value of [`TENANT_HEADER`].
    pub tenant: Option<String>,
    pub credential: Option<ServiceCredential>,
}

/// One way to authenticate.
#[derive(Clone, Debug)]
pub enum ServiceCredential {
    Basic { user: String, password: SecretString },
    Bearer(SecretString),
}

/// Why no request can carry it. It shows no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ServiceAccessError {
    #[error(
        "the tenant is no id of one tenant: it has at most {TENANT_BYTES} letters, digits and !-_.*'(), and is neither . nor .."
    )]
    Tenant,
    #[error("the user has a colon or a control character, which basic authentication cannot carry")]
    User,
    #[error("the password has a control character, such as a line's end")]
    Password,
    #[error(
        "the token has a blank, a control character or a letter beyond ASCII; it goes there alone, without the word Bearer"
    )]
    Token,
}

impl ServiceAccess {
    /// # Errors
    /// Where a part of it cannot be carried.
    pub fn check(&self) -> Result<(), ServiceAccessError> {
        self.headers().map(drop)
    }

    /// The headers of every request.
    ///
    /// # Errors
    /// Where one of them cannot be carried.
    pub(crate) fn headers(&self) -> Result<HeaderMap, ServiceAccessError> {
        let mut headers = HeaderMap::new();
        if let Some(tenant) = &self.tenant {
            let value = HeaderValue::from_str(tenant).ok().filter(|_| is_tenant(tenant));
            headers.insert(TENANT_HEADER, value.ok_or(ServiceAccessError::Tenant)?);
        }
        if let Some(credential) = &self.credential {
            headers.insert(AUTHORIZATION, credential.header()?);
        }
        Ok(headers)
    }
}

/// As Loki checks it: several tenants with `|` are for queries alone.
fn is_tenant(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"!-_.*'()".contains(&byte);
    (1..=TENANT_BYTES).contains(&text.len()) && text.bytes().all(allowed) && !matches!(text, "." | "..")
}

impl ServiceCredential {
    fn header(&self) -> Result<HeaderValue, ServiceAccessError> {
        let (text, wrong) = match self {
            Self::Basic { user, .. } if user.is_empty() || user.contains(|it: char| it == ':' || it.is_control()) => {
                return Err(ServiceAccessError::User);
            }
            Self::Basic { password, .. } if password.expose_secret().contains(char::is_control) => {
                return Err(ServiceAccessError::Password);
            }
            Self::Basic { user, password } => {
                use base64::Engine as _;
                let pair = format!("{user}:{}", password.expose_secret());
                let pair = base64::engine::general_purpose::STANDARD.encode(pair);
                (format!("Basic {pair}"), ServiceAccessError::Password)
            }
            Self::Bearer(token) => {
                let token = token.expose_secret();
                if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                    return Err(ServiceAccessError::Token);
                }
                (format!("Bearer {token}"), ServiceAccessError::Token)
            }
        };
        let mut value = HeaderValue::from_str(&text).map_err(|_| wrong)?;
        value.set_sensitive(true);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_is_carried_in_headers_and_what_cannot_be_carried_is_refused_without_the_secret() {
        assert!(ServiceAccess::default().headers().unwrap().is_empty());
        let basic = |user: &str, password: &str| ServiceCredential::Basic {
            user: user.to_owned(),
            password: SecretString::from(password),
        };
        let access = |tenant: Option<&str>, credential| ServiceAccess { tenant: tenant.map(str::to_owned), credential };
        let both = access(Some("fleet-1"), Some(basic("ops", "pa:ss wörd"))).headers().unwrap();
        assert_eq!(both[TENANT_HEADER], "fleet-1");
        assert_eq!(both[AUTHORIZATION], "Basic b3BzOnBhOnNzIHfDtnJk");
        assert!(both[AUTHORIZATION].is_sensitive());
        let bearer = access(None, Some(ServiceCredential::Bearer("t0ken".into()))).headers().unwrap();
        assert_eq!(bearer[AUTHORIZATION], "Bearer t0ken");
        for tenant in ["", ".", "..", "a|b", "a/b", "a b", "a\n", "ü", &"a".repeat(151)] {
            let refused = access(Some(tenant), None).headers();
            assert_eq!(refused.unwrap_err(), ServiceAccessError::Tenant, "{tenant:?}");
        }
        for (credential, error) in [
            (basic("a:b", "hunter2"), ServiceAccessError::User),
            (basic("", "hunter2"), ServiceAccessError::User),
            (basic("ops", "hunter2\n"), ServiceAccessError::Password),
            (ServiceCredential::Bearer("Bearer hunter2".into()), ServiceAccessError::Token),
            (ServiceCredential::Bearer("".into()), ServiceAccessError::Token),
        ] {
            let refused = access(None, Some(credential)).headers().unwrap_err();
            assert_eq!(refused, error);
            assert!(!refused.to_string().contains("hunter2"));
        }
    }
}
