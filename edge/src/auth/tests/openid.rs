//! ID tokens, logout tokens and the provider's metadata, as the client of the web console reads them.

use super::*;
use crate::auth::openid_provider::{LoginSettings, OpenIdProvider};

/// With the claims of an ID token, a logout token, or both.
fn signed(provider: &Provider, kind: Option<&str>, more: &Value) -> String {
    let mut header = header_of(&provider.keys[0]);
    match kind {
        Some(kind) => header["typ"] = kind.into(),
        None => drop(header.as_object_mut().unwrap().remove("typ")),
    }
    let now = Utc::now().timestamp();
    let mut claims = json!({"iss": provider.issuer(), "aud": "console", "sub": "ann", "iat": now, "exp": now + 120});
    claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    sign(&header, &claims, &provider.keys[0])
}

#[tokio::test]
async fn token_of_another_type_is_no_id_token_and_no_logout_token() {
    let provider = Provider::with(vec![key("one", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    let logout = json!({"jti": "j", "events": {"http://schemas.openid.net/event/backchannel-logout": {}}});
    for (kind, is_id, is_logout) in [
        (None, true, true),
        (Some("JWT"), true, true),
        (Some("logout+jwt"), false, true),
        (Some("application/logout+jwt"), false, true),
        (Some("at+jwt"), false, false),
        (Some("dpop+jwt"), false, false),
    ] {
        let token = signed(&provider, kind, &json!({"nonce": "n"}));
        let read = authenticator.verify_id_token(&token, "console", "n", Utc::now()).await;
        assert_eq!(read.is_ok(), is_id, "{kind:?}: {read:?}");
        let token = signed(&provider, kind, &logout);
        let read = authenticator.verify_logout_token(&token, "console", Utc::now()).await;
        assert_eq!(read.is_ok(), is_logout, "{kind:?}: {read:?}");
    }
}

#[tokio::test]
async fn id_and_logout_tokens_that_another_key_signed_are_refused() {
    let provider = Provider::with(vec![key("one", Algorithm::ES256)]).await;
    // It has the key's name.
    let forger = Provider { server: MockServer::start().await, keys: vec![key("one", Algorithm::ES256)] };
    let authenticator = provider.authenticator();
    let logout = json!({"jti": "j", "events": {"http://schemas.openid.net/event/backchannel-logout": {}}});
    let claims = |more: &Value| {
        let mut claims = more.clone();
        claims["iss"] = provider.issuer().into();
        claims
    };
    let id_token = signed(&forger, Some("JWT"), &claims(&json!({"nonce": "n"})));
    assert!(authenticator.verify_id_token(&id_token, "console", "n", Utc::now()).await.is_err());
    let logout_token = signed(&forger, Some("JWT"), &claims(&logout));
    assert!(authenticator.verify_logout_token(&logout_token, "console", Utc::now()).await.is_err());
}

#[tokio::test]
async fn metadata_of_another_issuer_or_with_addresses_without_tls_is_refused() {
    install_crypto();
    let server = MockServer::start().await;
    let (issuer, plain) = (server.uri(), "http://idp.example/x");
    let good = json!({
        "issuer": issuer, "authorization_endpoint": format!("{issuer}/authorize"), "token_endpoint": format!("{issuer}/token"),
        "end_session_endpoint": format!("{issuer}/logout"),
    });
    let read = async |name: &str, value: &str| {
        server.reset().await;
        let mut document = good.clone();
        document[name] = value.into();
        let answer = ResponseTemplate::new(200).set_body_json(document);
        Mock::given(path("/.well-known/openid-configuration")).respond_with(answer).mount(&server).await;
        let settings =
            LoginSettings { client_id: "console".into(), client_secret: None, scope: "openid".into(), resource: None };
        let client = OpenIdProvider::new(issuer.clone(), "https://gpu.example/console/callback", None, settings);
        client.unwrap().metadata().await.map(drop).map_err(|fault| fault.to_string())
    };
    read("issuer", &issuer).await.unwrap();
    for (name, value, why) in [
        ("issuer", "https://other.example", "another issuer"),
        ("authorization_endpoint", plain, "no https address"),
        ("token_endpoint", plain, "no https address"),
        ("end_session_endpoint", plain, "no https address"),
    ] {
        let refused = read(name, value).await.unwrap_err();
        assert!(refused.contains(why), "{name}: {refused}");
    }
}
