//! The page about the identity provider, tried: what it says to set for each provider is accepted, and then its sample of an access token, with
//! a signature, is read.

use super::{IdentityConfig, identity};
use crate::config::env_file::EnvFile;
use crate::config::settings_table;
use crate::config::variables::{ConfigError, Variables};
use axum::http::{HeaderMap, header};
use chrono::Utc;
use domain::authz::TokenRole;
use edge::auth::jwks::{Jwks, JwksSettings};
use edge::auth::{Authenticator, Caller};
use local_servers::identity::IdentityProvider;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};

const PAGE: &str = include_str!("../../../../deploy/docs/src/operator/identity-provider.md");

/// A setting that no token of the page satisfies.
const AUDIENCE: (&str, &str) = ("SVC_OIDC_AUDIENCE", "another");

/// What is changed in a token.
type Change<'a> = &'a dyn Fn(&mut Value);

/// A section, changes of its settings and of its token, and what the log says.
type RefusedToken<'a> = (&'a str, &'a [(&'a str, &'a str)], Change<'a>, &'a [&'a str]);

/// The sections with a sample, the user id in it, and the address that its provider has verified.
const SECTIONS: [(&str, &str, Option<&str>); 9] = [
    ("Keycloak", "2f9e1c4e-8c0f-4f0e-9d8e-0c7f5b3a1d11", Some("ann@example.com")),
    ("Entra ID", "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee", None),
    ("Okta", "00uid4BxXw6I6TV4m0g3", None),
    ("Auth0", "auth0|5f7c8ec7c33c6c004bbafe82", None),
    ("Amazon Cognito", "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee", None),
    ("Zitadel", "275000000000000009", None),
    ("Authentik", "6b0d2a3e9a4f1c7f2f4be60c3f6ad3cf3c6b7f9f28b4a4d3b0a2d8b1c4e5f601", None),
    ("Dex", "CgcyMzQyNzQ5EgZnaXRodWI", Some("ann@example.com")),
    ("Other providers", "5ba552d67", None),
];

/// The text below a heading.
fn section(title: &str) -> &'static str {
    let (_, rest) = PAGE.split_once(&format!("\n## {title}\n")).unwrap_or_else(|| panic!("no section {title}"));
    rest.split("\n## ").next().unwrap()
}

fn block(title: &str, language: &str) -> &'static str {
    let fence = format!("```{language}\n");
    let (_, rest) = section(title).split_once(&fence).unwrap_or_else(|| panic!("{title} has no block of {language}"));
    rest.split_once("```").unwrap().0
}

/// The settings of a section, with others in place of some; an empty one is left out.
fn config(title: &str, changed: &[(&str, &str)]) -> Result<IdentityConfig, ConfigError> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut file = EnvFile::parse(block(title, "env"));
    assert!(file.problems.is_empty(), "{title}: {:?}", file.problems);
    for name in file.values.keys() {
        assert!(settings_table::is_known(name), "{title}: {name} is no setting");
    }
    file.values.extend(changed.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    file.values.retain(|_, value| !value.is_empty());
    let find = |name: &str| file.values.get(name).cloned();
    let mut variables = Variables::new(&find);
    let config = identity(&mut variables);
    variables.finish(Some(config))
}

/// The sample of a section, issued now, for as long as it lives there and at most a day.
fn sample(title: &str) -> Value {
    let mut claims: Value =
        strict_json::from_str(block(title, "json")).unwrap_or_else(|error| panic!("{title}: {error}"));
    let life = claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap();
    let now = Utc::now().timestamp();
    claims["iat"] = json!(now);
    claims["exp"] = json!(now + life.min(86_400));
    if !claims["nbf"].is_null() {
        claims["nbf"] = json!(now);
    }
    claims
}

/// The caller of a request with this access token, or the operator's half of the refusal.
async fn caller(provider: &IdentityProvider, config: IdentityConfig, token: &str) -> Result<Caller, String> {
    let authenticator = Authenticator::new(config.rules, Jwks::new(JwksSettings::new(provider.issuer())).unwrap());
    let headers: HeaderMap =
        [(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap())].into_iter().collect();
    authenticator.authenticate(&headers).await.map_err(|error| error.cause().unwrap_or_default())
}

async fn signed(provider: &IdentityProvider, config: IdentityConfig, claims: &Value) -> Result<Caller, String> {
    let token = provider.mint(claims).unwrap();
    caller(provider, config, token.expose_secret()).await
}

#[tokio::test]
async fn sample_of_each_provider_is_read_with_the_settings_of_its_section() {
    let provider = IdentityProvider::start().await.unwrap();
    for (title, user_id, email) in SECTIONS {
        let claims = sample(title);
        let read = signed(&provider, config(title, &[]).unwrap(), &claims).await;
        let read = read.unwrap_or_else(|why| panic!("{title}: {why}"));
        assert_eq!(read.user_id, *user_id, "{title}");
        assert_eq!(read.roles, [TokenRole::User].into(), "{title}");
        assert_eq!(read.verified_email.as_deref(), email, "{title}");

        let administrator =
            claims.to_string().replace("\"user\"", "\"admin\"").replace("\"gpu-users\"", "\"gpu-admins\"");
        let administrator: Value = strict_json::from_str(&administrator).unwrap();
        let read = signed(&provider, config(title, &[]).unwrap(), &administrator).await.unwrap();
        assert_eq!(read.roles, [TokenRole::Admin].into(), "{title}");
    }
}

#[tokio::test]
async fn refused_token_of_each_provider_names_the_claim_and_the_setting() {
    let provider = IdentityProvider::start().await.unwrap();
    let keep = |_: &mut Value| {};
    let id_token = |claims: &mut Value| claims["token_use"] = json!("id");
    let keycloak_id_token = |claims: &mut Value| claims["typ"] = json!("ID");
    let version_1 =
        |claims: &mut Value| claims["iss"] = json!("https://sts.windows.net/11111111-2222-4333-8444-555555555555/");
    let text_of_seconds = |claims: &mut Value| claims["exp"] = json!(claims["exp"].to_string());
    let cases: [RefusedToken<'_>; 11] = [
        ("Keycloak", &[AUDIENCE], &keep, &["`aud`", "SVC_OIDC_AUDIENCE"]),
        ("Keycloak", &[], &keycloak_id_token, &["`typ`", "ID token"]),
        ("Entra ID", &[], &version_1, &["`iss`", "requestedAccessTokenVersion"]),
        ("Entra ID", &[AUDIENCE], &keep, &["`aud`", "SVC_OIDC_AUDIENCE"]),
        ("Okta", &[("SVC_OIDC_CLAIM_USER_ID", "oid")], &keep, &["`oid` is missing", "SVC_OIDC_CLAIM_USER_ID"]),
        ("Okta", &[("SVC_OIDC_CLAIM_ORG_ID", "scp")], &keep, &["`scp` is a list", "SVC_OIDC_CLAIM_ORG_ID"]),
        (
            "Auth0",
            &[("SVC_OIDC_ISSUER", "https://example.eu.auth0.com")],
            &keep,
            &["`iss`", "SVC_OIDC_ISSUER", "slash"],
        ),
        ("Amazon Cognito", &[("SVC_OIDC_CLAIM_AUDIENCE", "")], &keep, &["`aud` is missing", "SVC_OIDC_CLAIM_AUDIENCE"]),
        ("Amazon Cognito", &[], &id_token, &["`token_use`", "ID token"]),
        ("Dex", &[("SVC_OIDC_AUDIENCE", "gpuaas")], &keep, &["`aud`", "SVC_OIDC_AUDIENCE"]),
        ("Dex", &[], &text_of_seconds, &["`exp` is a text", "number of seconds"]),
    ];
    for (title, changed, change, parts) in cases {
        let mut claims = sample(title);
        change(&mut claims);
        let why = signed(&provider, config(title, changed).unwrap(), &claims).await.unwrap_err();
        assert!(parts.iter().all(|part| why.contains(part)), "{title}: {why}");
        // No value of the token is in it.
        for value in ["ann@", "sts.windows.net", "0oa2", "2example", "CgcyM"] {
            assert!(!why.contains(value), "{title}: {why}");
        }
    }
}

#[tokio::test]
async fn opaque_token_and_id_token_of_google_are_refused_with_the_reason() {
    let provider = IdentityProvider::start().await.unwrap();
    assert!(section("Google").contains("opaque"));
    let issuer = [("SVC_OIDC_ISSUER", "https://accounts.google.com")];
    let why = caller(&provider, config("Keycloak", &issuer).unwrap(), "ya29.a0AfH6SMBx-example").await.unwrap_err();
    assert!(why.contains("no signed JSON Web Token") && why.contains("SVC_OIDC_AUDIENCE"), "{why}");
    let now = Utc::now().timestamp();
    let id_token = json!({
        "iss": "https://accounts.google.com", "azp": "1234987819200.apps.googleusercontent.com",
        "aud": "1234987819200.apps.googleusercontent.com", "sub": "10769150350006150715113082367", "at_hash": "HK6E_P6Dh8Y93mRNtsDB1Q",
        "email": "jsmith@example.com", "email_verified": "true", "iat": now, "exp": now + 3600, "nonce": "0394852-3190485-2490358",
    });
    let why = signed(&provider, config("Keycloak", &issuer).unwrap(), &id_token).await.unwrap_err();
    assert!(why.contains("another audience"), "{why}");
}

#[test]
fn every_section_of_a_provider_is_tried_and_says_how_users_log_in() {
    let with_settings = PAGE.split("\n## ").filter(|section| section.contains("```env\n"));
    let titles: Vec<_> = with_settings.map(|section| section.lines().next().unwrap()).collect();
    assert_eq!(titles, SECTIONS.map(|(title, ..)| title));
    for title in titles.into_iter().filter(|title| *title != "Other providers") {
        assert!(section(title).contains("Users log in with `gpuctl login"), "{title}");
    }
}
