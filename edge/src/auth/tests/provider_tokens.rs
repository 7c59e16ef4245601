//! Tokens in the forms that providers give them, beside the samples of the operator's page (`supervisors/src/config/identity/provider_pages.rs`).

use super::*;

/// Signed with the provider's first key, under a header of this `typ`.
fn typed(provider: &Provider, kind: Option<&str>) -> String {
    let mut header = header_of(&provider.keys[0]);
    match kind {
        Some(kind) => header["typ"] = kind.into(),
        None => drop(header.as_object_mut().unwrap().remove("typ")),
    }
    sign(&header, &provider.claims(), &provider.keys[0])
}

#[tokio::test]
async fn type_in_the_header_is_of_an_access_token_or_absent() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    for kind in [None, Some("JWT"), Some("jwt"), Some("at+jwt"), Some("AT+JWT"), Some("application/at+jwt")] {
        assert!(verdict(&authenticator, &typed(&provider, kind)).await.is_ok(), "{kind:?}");
    }
    for kind in ["application/okta-internal-at+jwt", "id+jwt", "logout+jwt", "dpop+jwt", "node-log+jwt", ""] {
        let why = verdict(&authenticator, &typed(&provider, Some(kind))).await.unwrap_err();
        assert!(why.contains("`typ`"), "{kind}: {why}");
    }
}

#[tokio::test]
async fn claims_of_odd_types_that_are_not_used_refuse_no_token() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    for (name, value) in [
        ("scope", json!(["openid", "gpu"])),
        ("scope", json!({"openid": true})),
        ("scp", json!("use")),
        ("azp", json!(["gpuctl"])),
        ("azp", json!(null)),
        ("acr", json!(1)),
        ("typ", json!(null)),
        ("jti", json!(7)),
        ("auth_time", json!("yesterday")),
        ("preferred_username", json!(["ann"])),
        ("email", json!(["ann@example.com"])),
        ("groups", json!({"a": [{"b": null}]})),
        ("cnf", json!([])),
        ("https://gpu.example/x", json!(1e300)),
    ] {
        let token = provider.token(|claims| claims[name] = value.clone());
        let read = verdict(&authenticator, &token).await;
        assert!(read.is_ok(), "{name} {value}: {read:?}");
    }
}

#[tokio::test]
async fn address_counts_as_verified_where_the_provider_writes_so_in_either_type() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    for (verified, expected) in [
        (json!(true), Some("ann@example.com")),
        (json!("true"), Some("ann@example.com")),
        (json!("false"), None),
        (json!(false), None),
        (json!(""), None),
        (json!(1), None),
        (json!("yes"), None),
        (json!(["true"]), None),
        (Value::Null, None),
    ] {
        let token = provider.token(|claims| {
            claims["email"] = json!("ann@example.com");
            claims["email_verified"] = verified.clone();
        });
        let caller = verdict(&authenticator, &token).await.unwrap();
        assert_eq!(caller.verified_email.as_deref(), expected, "{verified}");
    }
}

#[tokio::test]
async fn audience_by_another_claim_admits_no_token_for_another_service() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let mut rules = TokenRules::new(provider.issuer(), "client-1");
    rules.claims.audience = "client_id".into();
    let authenticator = Authenticator::new(rules, Jwks::new(provider.settings()).unwrap());
    let with = |client_id: Value, audience: Value| {
        provider.token(move |claims| {
            for (name, value) in [("client_id", client_id), ("aud", audience)] {
                claims[name] = value;
                if claims[name].is_null() {
                    claims.as_object_mut().unwrap().remove(name);
                }
            }
        })
    };
    let ours = json!("client-1");
    for token in
        [with(ours.clone(), Value::Null), with(ours.clone(), ours.clone()), with(json!(["x", "client-1"]), Value::Null)]
    {
        verdict(&authenticator, &token).await.unwrap();
    }
    for (what, token, setting) in [
        ("an ID token", with(Value::Null, ours.clone()), "SVC_OIDC_CLAIM_AUDIENCE"),
        ("another client", with(json!("client-2"), Value::Null), "SVC_OIDC_AUDIENCE"),
        ("another service", with(ours, json!("https://other.example/api")), "SVC_OIDC_AUDIENCE"),
        ("an object", with(json!({"client-1": true}), Value::Null), "SVC_OIDC_AUDIENCE"),
        ("neither", with(Value::Null, Value::Null), "SVC_OIDC_CLAIM_AUDIENCE"),
    ] {
        let why = verdict(&authenticator, &token).await.unwrap_err();
        assert!(why.contains("another audience") && why.contains(setting), "{what}: {why}");
    }
}

#[tokio::test]
async fn issuer_that_looks_alike_is_refused_and_the_log_says_in_what_it_differs() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    for (issuer, why) in [
        (json!(format!("{}/", provider.issuer())), "slash"),
        (json!("https://sts.windows.net/11111111-2222-4333-8444-555555555555/"), "version 1"),
        (json!("https://other.example"), "is not SVC_OIDC_ISSUER"),
        (json!(["x"]), "missing, or no text"),
    ] {
        let token = provider.token(|claims| claims["iss"] = issuer.clone());
        let refused = verdict(&authenticator, &token).await.unwrap_err();
        assert!(refused.contains("another issuer") && refused.contains(why), "{issuer}: {refused}");
        assert!(!refused.contains("other.example"), "{refused}");
    }
}

#[tokio::test]
async fn valid_token_without_a_role_is_admitted_and_logged_once_a_minute_without_its_values() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    let token = provider.token(|claims| claims["realm_access"]["roles"] = json!("gpuaas-admin"));
    let (log, guard) = CapturedLog::start();
    for _ in 0..20 {
        assert!(verdict(&authenticator, &token).await.unwrap().roles.is_empty());
    }
    drop(guard);
    let text = log.text();
    let lines: Vec<_> = text.lines().filter(|line| line.contains("roles in a valid token")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(lines[0].contains("`realm_access.roles`") && lines[0].contains("SVC_OIDC_ROLE_MAPPING"), "{text}");
    assert!(!text.contains("gpuaas-admin"), "{text}");
}

#[tokio::test]
async fn token_that_is_too_long_says_what_to_leave_out() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let groups: Vec<_> = (0..1000).map(|n| format!("aaaaaaaa-bbbb-4ccc-8ddd-{n:012}")).collect();
    let token = provider.token(|claims| claims["groups"] = json!(groups));
    let headers: HeaderMap =
        [(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap())].into_iter().collect();
    let refused = provider.authenticator().authenticate(&headers).await.unwrap_err();
    assert!(refused.cause().is_some_and(|why| why.contains("groups")), "{refused:?}");
}

#[tokio::test]
async fn organization_may_be_a_list_or_an_object_of_one_as_keycloak_writes_it() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let mut rules = TokenRules::new(provider.issuer(), "gpuaas");
    rules.claims.org_id = "organization".to_owned();
    let authenticator = Authenticator::new(rules, Jwks::new(provider.settings()).unwrap());
    let read = async |value: Value| {
        let token = provider.token(|claims| claims["organization"] = value);
        verdict(&authenticator, &token).await.map(|caller| caller.org_id.map(|id| id.0))
    };
    for (value, expected) in [
        (json!("acme"), Some("acme")),
        (json!(["acme"]), Some("acme")),
        (json!({"acme": {}}), Some("acme")),
        (json!({"acme": {"id": null}}), Some("acme")),
        (json!({"acme": {"id": "42c3e46f-2477-44d7-a85b-d3b43f6b31fa"}}), Some("42c3e46f-2477-44d7-a85b-d3b43f6b31fa")),
        (json!([]), None),
        (json!({}), None),
        (json!(null), None),
    ] {
        assert_eq!(read(value.clone()).await.unwrap().as_deref(), expected, "{value}");
    }
    for value in [
        json!(["acme", "other"]),
        json!({"acme": {}, "other": {}}),
        json!([["acme"]]),
        json!([{"id": "acme"}]),
        json!({"acme": {"id": 7}}),
        json!({"ac\nme": {}}),
        json!(7),
    ] {
        let why = read(value.clone()).await.unwrap_err();
        assert!(why.contains("`organization`") && why.contains("SVC_OIDC_CLAIM_ORG_ID"), "{value}: {why}");
    }
}
