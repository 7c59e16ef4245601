//! Logins to the web console at providers whose tokens have the forms that Keycloak, Entra ID, Okta, Cognito and Dex document, with the settings
//! of the operator's page. With one of the settings wrong, there is no login, and the log names the setting.

use super::console_login::{Browser, SESSION, provider};
use super::harness::ApiHarness;
use crate::auth::TokenRules;
use domain::authz::TokenRole;
use local_servers::identity::browser_login::{CONSOLE_CLIENT_ID, LoginFaults};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use test_host::CapturedLog;

/// A provider's tokens, the settings for them, and the user id in them.
struct ProviderShape {
    /// Claims of the access token in place of the development provider's; null removes one.
    access_token: Value,
    id_token: Value,
    settings: fn(&mut TokenRules),
    user_id: &'static str,
}

/// What is wrong with the settings.
type Mistake = fn(&mut TokenRules);

/// A provider, what is wrong with the settings, and the status and the setting that follow.
type RefusedLogin = (&'static str, ProviderShape, Mistake, u16, &'static str);

/// The development provider's own form, which the others do not have.
const WITHOUT_KEYCLOAK: [&str; 3] = ["typ", "realm_access", "preferred_username"];

impl ProviderShape {
    fn faults(&self) -> LoginFaults {
        let of = |claims: &Value| claims.as_object().unwrap().clone().into_iter().collect::<BTreeMap<_, _>>();
        LoginFaults { access_token: of(&self.access_token), id_token: of(&self.id_token), ..LoginFaults::default() }
    }

    /// Without what the development provider has of Keycloak.
    fn alone(mut self) -> Self {
        let claims = self.access_token.as_object_mut().unwrap();
        for name in WITHOUT_KEYCLOAK {
            claims.entry(name).or_insert(Value::Null);
        }
        self
    }
}

fn map_groups(rules: &mut TokenRules) {
    let pairs = [("gpu-admins", TokenRole::Admin), ("gpu-users", TokenRole::User)];
    rules.roles.mapping = pairs.map(|(name, role)| (name.to_owned(), [role].into())).into();
}

fn keycloak() -> ProviderShape {
    ProviderShape {
        access_token: json!({
            "sub": "2f9e1c4e-8c0f-4f0e-9d8e-0c7f5b3a1d11", "aud": ["gpuaas", "account"], "acr": "1", "scope": "openid email profile",
            "realm_access": {"roles": ["default-roles-gpu", "offline_access", "user"]},
            "resource_access": {"account": {"roles": ["manage-account"]}}, "email_verified": true,
        }),
        id_token: json!({"sub": "2f9e1c4e-8c0f-4f0e-9d8e-0c7f5b3a1d11", "typ": "ID"}),
        settings: |rules| rules.audiences = vec!["gpuaas".into()],
        user_id: "2f9e1c4e-8c0f-4f0e-9d8e-0c7f5b3a1d11",
    }
}

fn entra() -> ProviderShape {
    let shape = ProviderShape {
        access_token: json!({
            "aud": "66666666-7777-4888-9999-000000000000", "oid": "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee", "roles": ["user"], "scp": "use",
            "sub": "the-subject-for-the-api", "tid": "11111111-2222-4333-8444-555555555555", "ver": "2.0", "azpacr": "1",
        }),
        id_token: json!({"sub": "the-subject-for-the-console", "oid": "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee", "ver": "2.0"}),
        settings: |rules| {
            rules.audiences = vec!["66666666-7777-4888-9999-000000000000".into()];
            (rules.claims.user_id, rules.claims.roles) = ("oid".into(), "roles".into());
        },
        user_id: "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee",
    };
    shape.alone()
}

fn okta() -> ProviderShape {
    let shape = ProviderShape {
        access_token: json!({
            "ver": 1, "aud": "api://default", "cid": CONSOLE_CLIENT_ID, "uid": "00uid4BxXw6I6TV4m0g3", "scp": ["openid", "offline_access"],
            "sub": "ann@example.com", "groups": ["Everyone", "gpu-users"], "azp": null,
        }),
        id_token: json!({"sub": "00uid4BxXw6I6TV4m0g3", "ver": 1}),
        settings: |rules| {
            rules.audiences = vec!["api://default".into()];
            (rules.claims.user_id, rules.claims.roles) = ("uid".into(), "groups".into());
            map_groups(rules);
        },
        user_id: "00uid4BxXw6I6TV4m0g3",
    };
    shape.alone()
}

fn cognito() -> ProviderShape {
    let shape = ProviderShape {
        access_token: json!({
            "aud": null, "azp": null, "client_id": CONSOLE_CLIENT_ID, "token_use": "access", "cognito:groups": ["gpu-users"], "version": 2,
            "sub": "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee", "username": "ann", "scope": "openid profile email",
        }),
        id_token: json!({"sub": "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee", "token_use": "id", "cognito:groups": ["gpu-users"]}),
        settings: |rules| {
            rules.audiences = vec![CONSOLE_CLIENT_ID.into()];
            (rules.claims.audience, rules.claims.roles) = ("client_id".into(), "cognito:groups".into());
            map_groups(rules);
        },
        user_id: "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee",
    };
    shape.alone()
}

fn dex() -> ProviderShape {
    let shape = ProviderShape {
        access_token: json!({
            "aud": CONSOLE_CLIENT_ID, "azp": null, "sub": "CgcyMzQyNzQ5EgZnaXRodWI", "at_hash": "qdXVrcBqBqBqBqBqBqBqBg",
            "groups": ["gpu-users"], "email": "ann@example.com", "email_verified": true, "name": "Ann", "jti": null, "nbf": null,
        }),
        id_token: json!({"sub": "CgcyMzQyNzQ5EgZnaXRodWI", "sid": null, "groups": ["gpu-users"]}),
        settings: |rules| {
            rules.audiences = vec!["gpuctl".into(), CONSOLE_CLIENT_ID.into()];
            rules.claims.roles = "groups".into();
            map_groups(rules);
        },
        user_id: "CgcyMzQyNzQ5EgZnaXRodWI",
    };
    shape.alone()
}

async fn logs_in(shape: ProviderShape) {
    let provider = provider().await;
    let mut rules = TokenRules::new(provider.issuer(), "");
    (shape.settings)(&mut rules);
    let api = ApiHarness::with_console_by(&provider, rules).await;
    provider.set_login_faults(shape.faults());
    let browser = Browser::logged_in(&api, &provider, "user").await;
    let me = browser.get("/api/v1/me").send().await.is(200).clone();
    assert_eq!((&me["user_id"], &me["roles"]), (&json!(shape.user_id), &json!(["user"])), "{me}");
}

/// The log of a login with one setting wrong, which is refused.
async fn log_of_refusal(shape: ProviderShape, mistake: Mistake, status: u16) -> String {
    let provider = provider().await;
    let mut rules = TokenRules::new(provider.issuer(), "");
    (shape.settings)(&mut rules);
    mistake(&mut rules);
    let api = ApiHarness::with_console_by(&provider, rules).await;
    provider.set_login_faults(shape.faults());
    let mut browser = Browser::new(&api, &provider);
    let (log, guard) = CapturedLog::start();
    let refused = browser.log_in("user").await;
    drop(guard);
    assert_eq!(refused.status, status, "{}", refused.body);
    assert!(!browser.cookies.contains_key(SESSION));
    log.text()
}

#[tokio::test]
async fn user_of_keycloak_logs_in() {
    logs_in(keycloak()).await;
}

#[tokio::test]
async fn user_of_entra_id_logs_in() {
    logs_in(entra()).await;
}

#[tokio::test]
async fn user_of_okta_logs_in() {
    logs_in(okta()).await;
}

#[tokio::test]
async fn user_of_cognito_logs_in() {
    logs_in(cognito()).await;
}

#[tokio::test]
async fn user_of_dex_logs_in() {
    logs_in(dex()).await;
}

#[tokio::test]
async fn refused_login_names_the_setting_in_the_log() {
    let audience = |rules: &mut TokenRules| rules.audiences = vec!["another".into()];
    let user_id = |rules: &mut TokenRules| rules.claims.user_id = "sub".into();
    let audience_claim = |rules: &mut TokenRules| rules.claims.audience = "aud".into();
    let roles = |rules: &mut TokenRules| rules.claims.roles = "realm_access.roles".into();
    let mapping = |rules: &mut TokenRules| rules.roles = crate::auth::role_claims::RoleRules::default();
    let cases: [RefusedLogin; 6] = [
        ("Keycloak", keycloak(), audience, 401, "SVC_OIDC_AUDIENCE"),
        ("Entra ID", entra(), user_id, 401, "SVC_OIDC_CLAIM_USER_ID"),
        ("Okta", okta(), user_id, 401, "SVC_OIDC_CLAIM_USER_ID"),
        ("Cognito", cognito(), audience_claim, 401, "SVC_OIDC_CLAIM_AUDIENCE"),
        ("Entra ID", entra(), roles, 403, "SVC_OIDC_CLAIM_ROLES"),
        ("Dex", dex(), mapping, 403, "SVC_OIDC_ROLE_MAPPING"),
    ];
    for (name, shape, mistake, status, setting) in cases {
        let log = log_of_refusal(shape, mistake, status).await;
        assert!(log.contains(setting), "{name}: {log}");
        assert!(!log.contains("eyJ") && !log.contains("ann@example.com"), "{name}: {log}");
    }
}
