//! ID tokens, logout tokens and the provider's metadata, as the client of the web console reads them.

use super::*;
use crate::auth::openid_provider::{LoginSettings, OpenIdProvider, ProviderFault};
use secrecy::ExposeSecret as _;

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

/// Reads the metadata of a provider that writes a field of it like this.
async fn read_metadata_with(name: &str, value: impl FnOnce(&str) -> Value) -> Result<(), String> {
    install_crypto();
    let server = MockServer::start().await;
    let issuer = server.uri();
    let mut document = json!({
        "issuer": issuer, "authorization_endpoint": format!("{issuer}/authorize"), "token_endpoint": format!("{issuer}/token"),
        "end_session_endpoint": format!("{issuer}/logout"),
    });
    document[name] = value(&issuer);
    let answer = ResponseTemplate::new(200).set_body_json(document);
    Mock::given(path("/.well-known/openid-configuration")).respond_with(answer).mount(&server).await;
    let settings =
        LoginSettings { client_id: "console".into(), client_secret: None, scope: "openid".into(), resource: None };
    let client = OpenIdProvider::new(issuer, "https://gpu.example/console/callback", None, settings).unwrap();
    client.metadata().await.map(drop).map_err(|fault| fault.to_string())
}

#[tokio::test]
async fn metadata_of_another_issuer_or_with_addresses_without_tls_is_refused() {
    read_metadata_with("issuer", |issuer| json!(issuer)).await.unwrap();
    let plain = "http://idp.example/x";
    for (name, value, why) in [
        ("issuer", "https://other.example", "another issuer"),
        ("authorization_endpoint", plain, "no https address"),
        ("token_endpoint", plain, "no https address"),
        ("end_session_endpoint", plain, "no https address"),
    ] {
        let refused = read_metadata_with(name, |_| json!(value)).await.unwrap_err();
        assert!(refused.contains(why), "{name}: {refused}");
    }
}

#[tokio::test]
async fn metadata_whose_optional_fields_have_other_forms_is_used_without_them() {
    for (name, odd) in [
        ("end_session_endpoint", json!("")),
        ("end_session_endpoint", json!(null)),
        ("authorization_response_iss_parameter_supported", json!(null)),
        ("authorization_response_iss_parameter_supported", json!("false")),
        ("token_endpoint_auth_methods_supported", json!("client_secret_post")),
        ("token_endpoint_auth_methods_supported", json!({})),
    ] {
        let read = read_metadata_with(name, |_| odd.clone()).await;
        assert_eq!(read, Ok(()), "{name} {odd}");
    }
}

/// A client of a provider whose token endpoint gives these answers, the last one again and again.
async fn client_of_answers(answers: &[(u16, String)]) -> (MockServer, OpenIdProvider) {
    client_of(answers, None, "a~b-c.d_e+f:g").await
}

/// As there, of a provider whose metadata lists these methods of client authentication.
async fn client_of(
    answers: &[(u16, String)],
    methods: Option<&[&str]>,
    client_secret: &str,
) -> (MockServer, OpenIdProvider) {
    install_crypto();
    let server = MockServer::start().await;
    let issuer = server.uri();
    let document = json!({
        "issuer": issuer, "authorization_endpoint": format!("{issuer}/authorize"), "token_endpoint": format!("{issuer}/token"),
        "token_endpoint_auth_methods_supported": methods,
    });
    let discovery = ResponseTemplate::new(200).set_body_json(document);
    Mock::given(path("/.well-known/openid-configuration")).respond_with(discovery).mount(&server).await;
    for (at, (status, body)) in answers.iter().enumerate() {
        let answer = ResponseTemplate::new(*status).set_body_string(body);
        let mock = Mock::given(path("/token")).respond_with(answer);
        match at + 1 == answers.len() {
            true => mock.mount(&server).await,
            false => mock.up_to_n_times(1).mount(&server).await,
        }
    }
    let settings = LoginSettings {
        client_id: "console".into(),
        client_secret: Some(client_secret.to_owned().into()),
        scope: "openid".into(),
        resource: None,
    };
    let client = OpenIdProvider::new(issuer, "https://gpu.example/console/callback", None, settings).unwrap();
    (server, client)
}

#[tokio::test]
async fn unreserved_characters_of_a_clients_credentials_are_sent_as_they_are() {
    let (server, client) = client_of_answers(&[(200, json!({"access_token": "a"}).to_string())]).await;
    client.refresh(&"r".to_owned().into()).await.unwrap();
    let requests = server.received_requests().await.unwrap();
    let header = requests.iter().find_map(|request| request.headers.get("authorization")).unwrap();
    let credentials = header.to_str().unwrap().strip_prefix("Basic ").unwrap();
    let credentials = base64::engine::general_purpose::STANDARD.decode(credentials).unwrap();
    assert_eq!(String::from_utf8(credentials).unwrap(), "console:a~b-c.d_e%2Bf%3Ag");
}

async fn sent(server: &MockServer) -> usize {
    let requests = server.received_requests().await.unwrap();
    requests.iter().filter(|request| request.url.path() == "/token").count()
}

#[tokio::test]
async fn issued_tokens_are_read_as_providers_write_them() {
    for (answer, seconds) in [
        (json!({"access_token": "a", "refresh_token": "r", "token_type": "Bearer", "expires_in": 3599}), Some(3599)),
        (json!({"access_token": "a", "refresh_token": "r", "expires_in": "3599"}), Some(3599)),
        (json!({"access_token": "a", "refresh_token": "r", "expires_in": 3599.5, "scope": ["openid"]}), Some(3599)),
        (json!({"access_token": "a", "refresh_token": "r", "expires_in": "3599.5", "scope": null}), Some(3599)),
        (json!({"access_token": "a", "refresh_token": "r", "expires_in": 1e30}), Some(366 * 24 * 3600)),
        (json!({"access_token": "a", "refresh_token": "r", "expires_in": 0}), None),
        (json!({"access_token": "a", "refresh_token": "r", "expires_in": -5}), None),
        (json!({"access_token": "a", "refresh_token": "r", "expires_in": "soon", "error": null}), None),
        (json!({"access_token": "a", "refresh_token": "r", "expires_in": "NaN"}), None),
    ] {
        let (_server, client) = client_of_answers(&[(200, format!("\u{feff}{answer}"))]).await;
        for issued in [client.exchange("code", "verifier").await, client.refresh(&"spent".to_owned().into()).await] {
            let issued = issued.unwrap_or_else(|fault| panic!("{answer}: {fault}"));
            assert_eq!(issued.access_token.expose_secret(), "a", "{answer}");
            assert_eq!(issued.refresh_token.unwrap().expose_secret(), "r", "{answer}");
            assert_eq!(issued.expires_in.map(|life| life.as_secs()), seconds, "{answer}");
        }
    }
}

#[tokio::test]
async fn code_is_exchanged_again_after_a_passing_fault_and_a_refresh_token_is_sent_once() {
    for (status, body) in [
        (502, "<html>Bad Gateway</html>"),
        (503, ""),
        (429, "{}"),
        (200, "<html>Maintenance</html>"),
        (400, r#"{"error": "temporarily_unavailable"}"#),
    ] {
        let answers = [(status, body.to_owned()), (200, json!({"access_token": "a"}).to_string())];
        let (server, client) = client_of_answers(&answers).await;
        client.exchange("code", "verifier").await.unwrap_or_else(|fault| panic!("{status} {body}: {fault}"));
        assert_eq!(sent(&server).await, 2, "{status} {body}");
        let (server, client) = client_of_answers(&answers).await;
        let fault = client.refresh(&"r".to_owned().into()).await.err().unwrap();
        assert!(matches!(fault, ProviderFault::Away(_)) && sent(&server).await == 1, "{status} {body}: {fault}");
    }
}

#[tokio::test]
async fn refusals_of_the_user_and_of_the_client_differ_by_their_error() {
    let refused = |fault: &ProviderFault| matches!(fault, ProviderFault::Refused(_));
    let of_client = |fault: &ProviderFault| matches!(fault, ProviderFault::Client(_));
    let unreadable = |fault: &ProviderFault| matches!(fault, ProviderFault::Unreadable);
    type Check<'a> = &'a dyn Fn(&ProviderFault) -> bool;
    let cases: [(u16, &str, Check<'_>); 9] = [
        (400, r#"{"error": "invalid_grant"}"#, &refused),
        (403, r#"{"error": "invalid_grant", "error_description": "Unknown or invalid refresh token."}"#, &refused),
        (400, r#"{"error": "interaction_required", "suberror": "basic_action"}"#, &refused),
        (200, r#"{"error": "invalid_grant"}"#, &refused),
        (401, r#"{"error": "invalid_client"}"#, &of_client),
        (400, r#"{"error": "unauthorized_client"}"#, &of_client),
        (403, "<html>Forbidden</html>", &of_client),
        (200, r#"{"id_token": "x", "expires_in": "3599"}"#, &unreadable),
        (200, r#"{"access_token": ["a"]}"#, &unreadable),
    ];
    for (status, body, is_expected) in cases {
        let (server, client) = client_of_answers(&[(status, body.to_owned())]).await;
        let fault = client.exchange("code", "verifier").await.err().unwrap();
        assert!(is_expected(&fault) && sent(&server).await == 1, "{status} {body}: {fault}");
    }
}

#[tokio::test]
async fn spent_refresh_token_ends_the_login_whatever_the_provider_calls_it() {
    let claimed = "Refresh token is invalid or has already been claimed by another client.";
    for (status, body) in [
        // Dex, Zitadel.
        (400, json!({"error": "invalid_request", "error_description": claimed})),
        (400, json!({"error": "invalid_request", "error_description": "Errors.OIDCSession.RefreshTokenInvalid"})),
        (401, json!({"error": "invalid_token"})),
        (401, json!({"error": "token_inactive"})),
        (
            400,
            json!({"error": "access_denied", "error_description": "The resource owner or server denied the request."}),
        ),
    ] {
        let (_server, client) = client_of_answers(&[(status, body.to_string())]).await;
        let fault = client.refresh(&"r".to_owned().into()).await.err().unwrap();
        assert!(matches!(fault, ProviderFault::Refused(_)), "{status} {body}: {fault}");
    }
    // About the client: an operator corrects that, and no login is lost.
    for error in ["invalid_client", "unauthorized_client", "unsupported_grant_type", "invalid_scope", "invalid_target"]
    {
        let (_server, client) = client_of_answers(&[(400, json!({"error": error}).to_string())]).await;
        let fault = client.refresh(&"r".to_owned().into()).await.err().unwrap();
        assert!(matches!(fault, ProviderFault::Client(_)), "{error}: {fault}");
    }
    // A code is exchanged with an address and a verifier, which may be what is wrong.
    let (_server, client) = client_of_answers(&[(400, json!({"error": "invalid_request"}).to_string())]).await;
    let fault = client.exchange("code", "verifier").await.err().unwrap();
    assert!(matches!(fault, ProviderFault::Client(_)), "{fault}");
}

#[tokio::test]
async fn providers_description_and_the_setting_to_correct_are_shown_on_one_bounded_line() {
    for (error, setting) in [
        ("invalid_client", "SVC_OIDC_CONSOLE_CLIENT_SECRET"),
        ("unauthorized_client", "SVC_OIDC_CONSOLE_CLIENT_ID"),
        ("invalid_scope", "SVC_OIDC_CONSOLE_SCOPE"),
        ("invalid_target", "SVC_OIDC_CONSOLE_RESOURCE"),
        ("invalid_resource", "SVC_OIDC_CONSOLE_RESOURCE"),
        ("redirect_uri_mismatch", "SVC_PUBLIC_URL"),
    ] {
        let text = format!("AADSTS7000215: Invalid client secret provided.\r\nTrace ID: 1\u{202e}{}", "x".repeat(1000));
        let body = json!({"error": error, "error_description": text});
        let (_server, client) = client_of_answers(&[(401, body.to_string())]).await;
        let shown = client.exchange("code", "verifier").await.err().unwrap().to_string();
        assert!(shown.contains("AADSTS7000215: Invalid client secret provided. Trace ID: 1 x"), "{shown}");
        assert!(shown.contains(setting) && shown.chars().count() < 700, "{shown}");
    }
    let refused = json!({"error": "invalid_grant", "error_description": "AADSTS50173: The grant is expired"});
    let (_server, client) = client_of_answers(&[(400, refused.to_string())]).await;
    let shown = client.refresh(&"r".to_owned().into()).await.err().unwrap().to_string();
    assert!(shown.contains("AADSTS50173"), "{shown}");
    // Some providers repeat what they were sent.
    let secret = "a-refresh-token-of-some-length";
    let repeated = json!({"error": "invalid_client", "error_description": format!("{secret} is unknown")});
    let (_server, client) = client_of_answers(&[(400, repeated.to_string())]).await;
    let shown = client.refresh(&secret.to_owned().into()).await.err().unwrap().to_string();
    assert!(shown.contains("invalid_client") && !shown.contains(secret), "{shown}");
}

#[tokio::test]
async fn client_that_is_registered_for_the_secret_in_the_form_is_tried_so_where_the_provider_lists_both() {
    let unknown = (401, json!({"error": "invalid_client"}).to_string());
    let issued = (200, json!({"access_token": "a"}).to_string());
    let both: &[&str] = &["client_secret_basic", "client_secret_post"];
    let by_form = async |server: &MockServer| {
        let requests = server.received_requests().await.unwrap();
        let requests = requests.iter().filter(|request| request.url.path() == "/token");
        requests.map(|request| String::from_utf8_lossy(&request.body).contains("client_secret=")).collect::<Vec<_>>()
    };
    let (server, client) = client_of(&[unknown.clone(), issued.clone()], Some(both), "secret").await;
    client.exchange("code", "verifier").await.unwrap();
    client.refresh(&"r".to_owned().into()).await.unwrap();
    assert_eq!(by_form(&server).await, [false, true, true], "it is remembered");
    // A wrong secret is wrong in both ways, and is tried once in each.
    let (server, client) = client_of(std::slice::from_ref(&unknown), Some(both), "secret").await;
    let fault = client.exchange("code", "verifier").await.err().unwrap();
    assert!(matches!(fault, ProviderFault::Client(_)), "{fault}");
    assert_eq!(by_form(&server).await, [false, true]);
    for methods in [None, Some(&["client_secret_basic"][..])] {
        let (server, client) = client_of(&[unknown.clone(), issued.clone()], methods, "secret").await;
        client.exchange("code", "verifier").await.err().unwrap();
        assert_eq!(by_form(&server).await, [false], "{methods:?}");
    }
}
