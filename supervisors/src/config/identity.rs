//! The settings of the identity provider and its tokens.

#[cfg(test)]
mod provider_pages;
mod token_claims;

use super::variables::Variables;
use edge::auth::internal_route_auth::InternalToken;
use edge::auth::jwks::{Jwks, JwksSettings};
use edge::auth::openid_provider::LoginSettings;
use edge::auth::{Algorithm, TokenRules};
use std::path::PathBuf;

const CA: &str = "SVC_OIDC_CA_PATH";

/// The settings of the identity provider and its tokens.
#[derive(Debug)]
pub struct IdentityConfig {
    /// The file of its authorities, where its certificate is not by one of the system's.
    pub ca: Option<PathBuf>,
    pub rules: TokenRules,
    /// As what people log in to the web console; without it there is no such login.
    pub console: Option<LoginSettings>,
    /// The token for `POST /internal/auth/jwks/refresh`; without it that route does not exist.
    pub jwks_refresh_token: Option<InternalToken>,
}

pub(super) fn identity(variables: &mut Variables<'_>) -> IdentityConfig {
    let issuer = variables.required(
        "SVC_OIDC_ISSUER",
        "the identity provider's issuer URL, exactly as tokens name it, for example https://login.example/realms/gpu",
    );
    check_issuer(variables, &issuer);
    let audiences =
        variables.required("SVC_OIDC_AUDIENCE", "the audience that tokens must name, or several with commas");
    let is_set = !audiences.is_empty();
    let audiences = super::variables::items(&audiences);
    if is_set && audiences.is_empty() {
        variables.wrong("SVC_OIDC_AUDIENCE names no audience; it must be one, or several with commas");
    }
    let mut rules = TokenRules::new(issuer, String::new());
    rules.audiences = audiences;
    let named = variables.list("SVC_OIDC_ALGORITHMS");
    if !named.is_empty() {
        rules.algorithms = named.iter().filter_map(|name| algorithm(variables, name)).collect();
    }
    token_claims::paths(variables, &mut rules.claims);
    rules.roles = token_claims::roles(variables);
    if let Some(client_id) = variables.credential("SVC_OIDC_CLIENT_ID") {
        rules.client_id = client_id;
    }
    let jwks_refresh_token = internal_token(variables, "INTERNAL_JWKS_REFRESH_TOKEN");
    let console = console(variables);
    IdentityConfig { ca: variables.optional_certificates(CA), rules, console, jwks_refresh_token }
}

/// Refuses addresses that no token has in `iss`.
fn check_issuer(variables: &mut Variables<'_>, issuer: &str) {
    const NAME: &str = "SVC_OIDC_ISSUER";
    if issuer.is_empty() {
        return;
    }
    if let Err(error) = Jwks::new(JwksSettings::new(issuer)) {
        return variables.wrong(format!("{NAME} cannot be used: {error}"));
    }
    if let Some((issuer, _)) = issuer.split_once("/.well-known/") {
        return variables.wrong(format!(
            "{NAME} is the address of the discovery document; it must be the `issuer` in that document, probably {issuer:?}"
        ));
    }
    if issuer.contains(['?', '#']) || issuer.contains(char::is_whitespace) {
        return variables.wrong(format!("{NAME} is {issuer:?}; an issuer has no query, no fragment and no blanks"));
    }
    // Entra ID's addresses for every tenant: their discovery document has the issuer `…/{tenantid}/v2.0`, which no token has, and whose tokens
    // any organization's users get.
    let url = reqwest::Url::parse(issuer).ok();
    let is_entra = url.as_ref().and_then(reqwest::Url::host_str).is_some_and(|host| host.contains("microsoftonline."));
    let tenant = url.as_ref().and_then(|url| url.path_segments()?.next()).unwrap_or_default();
    if is_entra && (["common", "organizations", "consumers"].contains(&tenant) || issuer.contains('{')) {
        variables.wrong(format!(
            "{NAME} is {issuer:?}, which is the address of every tenant of Entra ID; it must be that of your own, \
             https://login.microsoftonline.com/TENANT-ID/v2.0 with the id of the tenant"
        ));
    }
}

/// The client as which people log in to the web console.
fn console(variables: &mut Variables<'_>) -> Option<LoginSettings> {
    let client_id = variables.credential("SVC_OIDC_CONSOLE_CLIENT_ID");
    let client_secret = variables.credential("SVC_OIDC_CONSOLE_CLIENT_SECRET");
    let scope = variables.credential("SVC_OIDC_CONSOLE_SCOPE");
    let resource = variables.credential("SVC_OIDC_CONSOLE_RESOURCE");
    let Some(client_id) = client_id else {
        if client_secret.is_some() || scope.is_some() || resource.is_some() {
            variables
                .wrong("SVC_OIDC_CONSOLE_CLIENT_ID is missing, which the other settings of the console's login need");
        }
        return None;
    };
    let scope = scope.unwrap_or_else(|| "openid profile email".to_owned());
    if !scope.split(' ').any(|one| one == "openid") {
        variables.wrong("SVC_OIDC_CONSOLE_SCOPE must name `openid`, by which the identity provider issues an ID token");
    }
    Some(LoginSettings { client_id, client_secret: client_secret.map(Into::into), scope, resource })
}

/// The value is a secret and is not quoted.
pub(super) fn internal_token(variables: &mut Variables<'_>, name: &str) -> Option<InternalToken> {
    let token = InternalToken::new(&variables.optional(name)?);
    if token.is_none() {
        variables.wrong(format!("{name} cannot be used; it needs 32 characters or more, no spaces"));
    }
    token
}

/// Parses a signature algorithm of a provider. A shared secret is refused: a verifier could sign with it, too.
fn algorithm(variables: &mut Variables<'_>, name: &str) -> Option<Algorithm> {
    let known = [
        Algorithm::RS256,
        Algorithm::RS384,
        Algorithm::RS512,
        Algorithm::PS256,
        Algorithm::PS384,
        Algorithm::PS512,
        Algorithm::ES256,
        Algorithm::ES384,
        Algorithm::EdDSA,
    ];
    let found = known.into_iter().find(|algorithm| format!("{algorithm:?}") == name);
    if found.is_none() {
        let known = known.map(|algorithm| format!("{algorithm:?}")).join(", ");
        variables.wrong(format!("SVC_OIDC_ALGORITHMS: {name:?} is not one of {known}"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::{ConfigError, read_from};

    fn identity_of(variables: &[(&str, &str)]) -> Result<IdentityConfig, ConfigError> {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let needed = [("SVC_OIDC_ISSUER", "https://idp.example"), ("SVC_OIDC_AUDIENCE", "gpu, https://gpu.example")];
        read_from(&[variables, &needed].concat(), identity)
    }

    #[test]
    fn claims_of_another_provider_than_keycloak_are_configurable() {
        let plain = identity_of(&[]).unwrap();
        assert_eq!(plain.rules.audiences, ["gpu", "https://gpu.example"]);
        assert_eq!(plain.rules.claims.roles, "realm_access.roles");
        assert!(plain.jwks_refresh_token.is_none());
        let notified = identity_of(&[
            ("SVC_OIDC_CLAIM_ROLES", "https://gpu.example/roles"),
            ("SVC_OIDC_CLAIM_USER_ID", "uid"),
            ("SVC_OIDC_CLAIM_PROJECT_ID", "tenancy.project"),
            ("SVC_OIDC_ALGORITHMS", "ES256, EdDSA"),
            ("INTERNAL_JWKS_REFRESH_TOKEN", "0123456789abcdef0123456789abcdef"),
        ])
        .unwrap();
        let claims = &notified.rules.claims;
        assert_eq!(
            (claims.roles.as_str(), claims.user_id.as_str(), claims.project_id.as_str(), claims.org_id.as_str()),
            ("https://gpu.example/roles", "uid", "tenancy.project", "org_id")
        );
        assert_eq!(notified.rules.algorithms, [Algorithm::ES256, Algorithm::EdDSA]);
        assert!(notified.jwks_refresh_token.is_some());
    }

    #[test]
    fn console_login_is_configured_by_its_client() {
        assert!(identity_of(&[]).unwrap().console.is_none());
        let login = identity_of(&[
            ("SVC_OIDC_CONSOLE_CLIENT_ID", "console"),
            ("SVC_OIDC_CONSOLE_CLIENT_SECRET", "secret"),
            ("SVC_OIDC_CONSOLE_RESOURCE", "https://gpu.example/api"),
        ]);
        let login = login.unwrap().console.unwrap();
        assert_eq!((login.client_id.as_str(), login.scope.as_str()), ("console", "openid profile email"));
        assert!(!format!("{login:?}").contains("secret\""), "{login:?}");
        assert_eq!(login.resource.as_deref(), Some("https://gpu.example/api"));
        let incomplete = identity_of(&[("SVC_OIDC_CONSOLE_CLIENT_SECRET", "changeme")]).unwrap_err().to_string();
        assert!(incomplete.contains("SVC_OIDC_CONSOLE_CLIENT_ID") && !incomplete.contains("changeme"), "{incomplete}");
        let wrong = identity_of(&[("SVC_OIDC_CONSOLE_CLIENT_ID", "c"), ("SVC_OIDC_CONSOLE_SCOPE", "profile")]);
        assert!(wrong.unwrap_err().to_string().contains("SVC_OIDC_CONSOLE_SCOPE"));
    }

    #[test]
    fn id_or_secret_with_a_line_end_is_refused_by_name_and_not_quoted() {
        const ID: (&str, &str) = ("SVC_OIDC_CONSOLE_CLIENT_ID", "console");
        for value in
            ["hunter2\n", "hunter2\r\n", " hunter2", "hunter2\t", "hunter2\u{a0}", "hun\u{0}ter2", "\u{feff}hunter2"]
        {
            for name in ["SVC_OIDC_CONSOLE_CLIENT_SECRET", "SVC_OIDC_CONSOLE_RESOURCE", "SVC_OIDC_CLIENT_ID"] {
                let error = identity_of(&[ID, (name, value)]).unwrap_err().to_string();
                assert!(error.contains(name) && !error.contains("hunter2"), "{value:?}: {error}");
            }
            let error = identity_of(&[(ID.0, value)]).unwrap_err().to_string();
            assert!(error.contains(ID.0) && !error.contains("hunter2"), "{value:?}: {error}");
        }
        let error = identity_of(&[ID, ("SVC_OIDC_CONSOLE_CLIENT_SECRET", "hunter2\n")]).unwrap_err().to_string();
        assert!(error.contains("printf %s"), "{error}");
        let inner = identity_of(&[ID, ("SVC_OIDC_CONSOLE_CLIENT_SECRET", "a secret with blanks")]).unwrap();
        assert!(inner.console.is_some());
    }

    #[test]
    fn unusable_issuer_shared_secret_and_guessable_token_are_refused_by_name() {
        for (name, value) in [
            ("SVC_OIDC_ISSUER", "http://idp.example"),
            ("SVC_OIDC_ALGORITHMS", "HS256"),
            ("SVC_OIDC_ALGORITHMS", "none"),
            ("SVC_OIDC_ALGORITHMS", "ES256,es256"),
            ("SVC_OIDC_ISSUER", "https://idp.example/realms/gpu/.well-known/openid-configuration"),
            ("SVC_OIDC_ISSUER", "https://idp.example/?realm=gpu"),
            ("SVC_OIDC_ISSUER", "https://login.microsoftonline.com/common/v2.0"),
            ("SVC_OIDC_ISSUER", "https://login.microsoftonline.com/organizations/v2.0"),
            ("SVC_OIDC_ISSUER", "https://login.microsoftonline.com/{tenantid}/v2.0"),
            ("SVC_OIDC_AUDIENCE", " , "),
            ("SVC_OIDC_CA_PATH", "/nowhere/ca.pem"),
            ("INTERNAL_JWKS_REFRESH_TOKEN", "changeme"),
        ] {
            let error = identity_of(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && !error.contains("changeme"), "{error}");
        }
    }
}
