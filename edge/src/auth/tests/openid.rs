//! ID tokens, logout tokens and the provider's metadata, as the client of the web console reads them.

use super::*;
use crate::auth::openid_provider::{LoginSettings, OpenIdProvider, ProviderFault};
use secrecy::{ExposeSecret as _, SecretString};

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

/// A client of a provider whose token endpoint answers this.
async fn answered(status: u16, body: &str) -> (OpenIdProvider, MockServer) {
    install_crypto();
    let server = MockServer::start().await;
    let issuer = server.uri();
    let document = json!({
        "issuer": issuer, "authorization_endpoint": format!("{issuer}/authorize"), "token_endpoint": format!("{issuer}/token"),
    });
    for (at, answer) in [
        ("/.well-known/openid-configuration", ResponseTemplate::new(200).set_body_json(document)),
        ("/token", ResponseTemplate::new(status).set_body_string(body)),
    ] {
        Mock::given(path(at)).respond_with(answer).mount(&server).await;
    }
    let settings = LoginSettings {
        client_id: "console".into(),
        client_secret: Some("a~b-c.d_e+f:g".into()),
        scope: "openid".into(),
        resource: None,
    };
    (OpenIdProvider::new(issuer, "https://gpu.example/console/callback", None, settings).unwrap(), server)
}

#[tokio::test]
async fn issued_tokens_are_not_lost_by_the_form_of_their_lifetime() {
    for (expires_in, seconds) in [
        ("3599", Some(3599)),
        ("3599.7", Some(3599)),
        ("\"3599\"", Some(3599)),
        ("null", None),
        ("\"soon\"", None),
        ("-1", None),
        ("1e300", None),
        ("[]", None),
    ] {
        let body = format!(
            r#"{{"access_token": "a", "refresh_token": "r", "expires_in": {expires_in}, "scope": ["openid"]}}"#
        );
        let (client, server) = answered(200, &body).await;
        let issued = client.refresh(&"old".into()).await.unwrap_or_else(|fault| panic!("{expires_in}: {fault}"));
        let refresh = issued.refresh_token.map(|token| token.expose_secret().to_owned());
        assert_eq!((issued.expires_in, refresh.as_deref()), (seconds, Some("r")), "{expires_in}");
        // Unreserved characters are as they are: not every provider decodes its clients' credentials.
        let requests = server.received_requests().await.unwrap();
        let credentials = requests.iter().find_map(|request| request.headers.get("authorization")).unwrap();
        let credentials = credentials.to_str().unwrap().strip_prefix("Basic ").unwrap();
        let credentials = base64::engine::general_purpose::STANDARD.decode(credentials).unwrap();
        assert_eq!(String::from_utf8(credentials).unwrap(), "console:a~b-c.d_e%2Bf%3Ag");
    }
    let (client, _server) = answered(200, r#"{"access_token": "a"}"#).await;
    assert_eq!(client.refresh(&SecretString::from("old")).await.unwrap().expires_in, None);
}

#[tokio::test]
async fn refusal_is_a_decision_on_the_user_by_its_code_and_not_by_its_status() {
    for (status, body, is_decision) in [
        (400, r#"{"error": "invalid_grant"}"#, true),
        (403, r#"{"error": "invalid_grant", "error_description": "Unknown or invalid refresh token."}"#, true),
        (400, r#"{"error": "interaction_required", "suberror": "basic_action"}"#, true),
        (401, r#"{"error": "invalid_client"}"#, false),
        (400, r#"{"error": "invalid_scope"}"#, false),
        (429, "slow down", false),
        (502, "<html>Bad Gateway</html>", false),
        (500, r#"{"error": "invalid_grant"}"#, false),
    ] {
        let (client, _server) = answered(status, body).await;
        let fault = client.refresh(&"old".into()).await.map(drop).unwrap_err();
        assert_eq!(matches!(fault, ProviderFault::Refused(_)), is_decision, "{status} {body}: {fault}");
        assert!(fault.to_string().len() < 200, "{fault}");
    }
}
