//! Hostile tokens and providers (RFC 8725 names most of the attacks). Keys are fetched over HTTP, as in service.

use super::*;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Signed with a shared secret, under a header that declares it.
fn hmac(header: &Value, claims: &Value, secret: &[u8], algorithm: Algorithm) -> String {
    let signed = format!("{}.{}", b64(header.to_string().as_bytes()), b64(claims.to_string().as_bytes()));
    let signature =
        jsonwebtoken::crypto::sign(signed.as_bytes(), &EncodingKey::from_secret(secret), algorithm).unwrap();
    format!("{signed}.{signature}")
}

/// Why it is refused. Everything about the token is valid except what is tested.
async fn reason(provider: &Provider, token: &str) -> String {
    verdict(&provider.authenticator(), token).await.expect_err("it must be refused")
}

#[tokio::test]
async fn unsigned_token_is_refused_in_every_spelling_of_none() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    for none in ["none", "None", "NONE", "nOnE", ""] {
        let header = json!({"typ": "JWT", "alg": none, "kid": "k"});
        for signature in ["", "AA", "bm9uZQ"] {
            let claims = provider.claims();
            let token =
                format!("{}.{}.{signature}", b64(header.to_string().as_bytes()), b64(claims.to_string().as_bytes()));
            assert!(verdict(&provider.authenticator(), &token).await.is_err(), "{none:?} {signature:?}");
        }
    }
}

#[tokio::test]
async fn public_key_is_never_accepted_as_an_hmac_secret() {
    let pair = KeyPair::generate_for(&PKCS_RSA_SHA256).unwrap();
    let provider = Provider::with(vec![key("k", Algorithm::RS256)]).await;
    let published = &provider.keys[0].jwk;
    let modulus = published["n"].as_str().unwrap();
    let forms: [Vec<u8>; 5] = [
        modulus.as_bytes().to_vec(),
        URL_SAFE_NO_PAD.decode(modulus).unwrap(),
        published.to_string().into_bytes(),
        pair.public_key_pem().into_bytes(),
        pair.subject_public_key_info(),
    ];
    for algorithm in [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512] {
        let header = json!({"typ": "JWT", "alg": format!("{algorithm:?}"), "kid": "k"});
        for secret in &forms {
            let why = reason(&provider, &hmac(&header, &provider.claims(), secret, algorithm)).await;
            assert!(why.contains("allowlist"), "{why}");
        }
    }
    // Not even where it is configured.
    let mut rules = TokenRules::new(provider.issuer(), "gpuaas");
    rules.algorithms = vec![Algorithm::HS256, Algorithm::RS256];
    let careless = Authenticator::new(rules, Jwks::new(provider.settings()).unwrap());
    let token = hmac(&json!({"alg": "HS256", "kid": "k"}), &provider.claims(), &forms[0], Algorithm::HS256);
    assert!(verdict(&careless, &token).await.is_err());
}

#[tokio::test]
async fn key_in_or_referenced_by_the_token_is_never_fetched() {
    let provider = Provider::with(vec![key("k", Algorithm::RS256)]).await;
    let attacker = key("k", Algorithm::RS256);
    let evil = MockServer::start().await;
    Mock::given(wiremock::matchers::any())
        .respond_with(ResponseTemplate::new(200).set_body_json(json!({"keys": [attacker.jwk]})))
        .mount(&evil)
        .await;
    let url = format!("{}/keys", evil.uri());
    for (name, value) in [
        ("jwk", attacker.jwk.clone()),
        ("jku", json!(url)),
        ("x5u", json!(url)),
        ("x5c", json!(["MIIB"])),
        ("x5t", json!("AAAA")),
        ("url", json!(url)),
    ] {
        let mut header = header_of(&attacker);
        header[name] = value.clone();
        let why = reason(&provider, &sign(&header, &provider.claims(), &attacker)).await;
        assert!(why.contains("signature"), "{name}: {why}");
        // Beside a true signature it is passed over: nothing of it is read.
        let mut honest = header_of(&provider.keys[0]);
        honest[name] = value;
        let token = sign(&honest, &provider.claims(), &provider.keys[0]);
        assert!(verdict(&provider.authenticator(), &token).await.is_ok(), "{name}");
    }
    assert_eq!(evil.received_requests().await.unwrap().len(), 0);
}

#[tokio::test]
async fn key_id_is_only_a_lookup_key() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let long = "k".repeat(10_000);
    for kid in [
        "../../../../dev/null",
        "/etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1:1/k",
        "k' OR '1'='1",
        "'; DROP TABLE secret; --",
        "*",
        ">",
        "k.*",
        "k k",
        "K",
        "k\u{0}",
        "k\n",
        "${jndi:ldap://127.0.0.1/k}",
        &long,
    ] {
        let mut header = header_of(&provider.keys[0]);
        header["kid"] = kid.into();
        let why = reason(&provider, &sign(&header, &provider.claims(), &provider.keys[0])).await;
        let short: String = kid.chars().take(40).collect();
        assert!(why.contains("key"), "{short}: {why}");
        assert!(!why.contains(&short) || short == "k", "the reason repeats {short}");
    }
    let asked = provider.server.received_requests().await.unwrap();
    let paths: BTreeSet<_> = asked.iter().map(|request| request.url.path().to_owned()).collect();
    assert_eq!(paths.len(), 2, "only discovery and the key set were fetched: {paths:?}");
}

#[tokio::test]
async fn invalid_time_claims_are_refused() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    let now = Utc::now().timestamp();
    let bad = [
        json!(now.to_string()),
        json!(-1),
        json!(-1.5),
        json!(i64::MIN),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(1e308),
        json!(true),
        json!([now]),
        json!({"at": now}),
        Value::Null,
    ];
    for name in ["exp", "nbf", "iat"] {
        for value in &bad {
            let token = provider.token(|claims| claims[name] = value.clone());
            let refused = verdict(&authenticator, &token).await;
            assert!(refused.is_err(), "{name} = {value}");
        }
    }
    let without = |name: &str| {
        provider.token(|claims| {
            claims.as_object_mut().unwrap().remove(name);
        })
    };
    assert!(verdict(&authenticator, &without("exp")).await.is_err(), "a token without an end");
    // RFC 7519 requires neither of them in a token, and most providers send no `nbf`.
    assert!(verdict(&authenticator, &without("nbf")).await.is_ok());
    assert!(verdict(&authenticator, &without("iat")).await.is_ok());
    // Of two the last counts (RFC 7519, section 4).
    let (late, early) = (format!("\"exp\":{}", now + 300), "\"exp\":1".to_owned());
    for (first, last, admitted) in [(&early, &late, true), (&late, &early, false)] {
        let text = provider.claims().to_string().replacen(&late, &format!("{first},{last}"), 1);
        let signed = format!("{}.{}", b64(header_of(&provider.keys[0]).to_string().as_bytes()), b64(text.as_bytes()));
        let key = &provider.keys[0];
        let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &key.encoding, key.algorithm).unwrap();
        assert_eq!(verdict(&authenticator, &format!("{signed}.{signature}")).await.is_ok(), admitted, "{text}");
    }
}

#[tokio::test]
async fn audience_must_include_ours_and_the_issuer_must_match_exactly() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    let with = |name: &'static str, value: Value| provider.token(|claims| claims[name] = value);
    for audience in [json!("gpuaas"), json!(["gpuaas"]), json!(["other", "gpuaas"])] {
        assert!(verdict(&authenticator, &with("aud", audience.clone())).await.is_ok(), "{audience}");
    }
    for audience in [
        json!([]),
        json!(""),
        json!("gpuaas2"),
        json!("GPUAAS"),
        json!("*"),
        json!(["other", ["gpuaas"]]),
        json!("other gpuaas"),
        json!(null),
    ] {
        assert!(verdict(&authenticator, &with("aud", audience.clone())).await.is_err(), "{audience}");
    }
    let issuer = provider.issuer();
    let upper = issuer.to_uppercase();
    for wrong in [json!([issuer]), json!(upper), json!(format!("{issuer}.evil.example")), json!(null)] {
        assert!(verdict(&authenticator, &with("iss", wrong.clone())).await.is_err(), "{wrong}");
    }
}

#[tokio::test]
async fn subject_is_bounded_and_has_no_line_breaks() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    let with = |sub: &str| {
        let sub = sub.to_owned();
        provider.token(move |claims| claims["sub"] = sub.into())
    };
    let long = "x".repeat(10_000);
    for bad in
        ["", "a\nb", "a\r\nb", "a\u{0}", "a\u{85}b", "a\u{2028}b", "a\u{2029}b", "\u{202e}nna", "a\u{2066}b", &long]
    {
        assert!(verdict(&authenticator, &with(bad)).await.is_err(), "{bad:?}");
    }
    // Wildcards of NATS and of SQL are names like others: no subject or statement is built of them.
    for odd in [">", "*", "a.*.>", "%", "'; --", "${x}", "../..", "auth0|5f7c", "Åse", &"x".repeat(255)] {
        assert_eq!(verdict(&authenticator, &with(odd)).await.unwrap().user_id, odd);
    }
}

#[tokio::test]
async fn hundred_unknown_keys_cause_one_fetch_per_gap() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let gap = Duration::from_secs(1);
    let settings = JwksSettings { min_refresh_gap: gap, ..provider.settings() };
    let rules = TokenRules::new(provider.issuer(), "gpuaas");
    let authenticator = Arc::new(Authenticator::new(rules, Jwks::new(settings).unwrap()));
    let began = Instant::now();
    assert!(verdict(&authenticator, &provider.token(|_| ())).await.is_ok());
    let flood = async |round: usize| {
        let tokens = (0..100).map(|n| {
            let mut header = header_of(&provider.keys[0]);
            header["kid"] = format!("unknown-{round}-{n}").into();
            sign(&header, &provider.claims(), &provider.keys[0])
        });
        let asked = tokens.map(|token| {
            let authenticator = Arc::clone(&authenticator);
            tokio::spawn(async move { verdict(&authenticator, &token).await })
        });
        for verdict in futures::future::join_all(asked).await {
            assert!(verdict.unwrap().is_err());
        }
    };
    // One fetch after each gap alone, of which more pass where the machine is paused.
    let fetches_after = async |round: usize| {
        flood(round).await;
        let (fetches, allowed) = (provider.fetches().await, allowed_fetches(began, gap));
        assert!(fetches <= allowed, "round {round}: the gap allows {allowed} fetches, and there were {fetches}");
        fetches
    };
    // The first fetch was a moment ago: the cool-down runs.
    let first = fetches_after(1).await;
    tokio::time::sleep(gap + Duration::from_millis(50)).await;
    let second = fetches_after(2).await;
    assert!(second > first, "the cool-down ends: {first} and {second} fetches");
    fetches_after(3).await;
    assert!(verdict(&authenticator, &provider.token(|_| ())).await.is_ok(), "known keys serve meanwhile");
}

/// A provider whose responses never end: a byte now and then, for as long as the client reads.
async fn dripping() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let issuer = format!("http://{}/realms/gpu", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut read = [0; 2048];
                let _ = stream.read(&mut read).await;
                let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"issuer\": ";
                let mut listens = stream.write_all(head.as_bytes()).await.is_ok();
                while listens {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    listens = stream.write_all(b" ").await.is_ok();
                }
            });
        }
    });
    issuer
}

#[tokio::test]
async fn slow_provider_times_out_and_few_requests_wait_for_it() {
    install_crypto();
    let issuer = dripping().await;
    let settings = JwksSettings {
        timeout: Duration::from_millis(300),
        max_waiting: 4,
        min_refresh_gap: Duration::ZERO,
        ..JwksSettings::new(&issuer)
    };
    let authenticator = Arc::new(Authenticator::new(TokenRules::new(&issuer, "gpuaas"), Jwks::new(settings).unwrap()));
    let began = Instant::now();
    let many = (0..50).map(|n| {
        let authenticator = Arc::clone(&authenticator);
        let header = json!({"alg": "ES256", "kid": format!("k{n}")}).to_string();
        let token = format!("{}.{}.AAAA", b64(header.as_bytes()), b64(b"{}"));
        tokio::spawn(async move {
            let fault = authenticator.verify(&token, Utc::now()).await.unwrap_err();
            std::error::Error::source(&fault).map(ToString::to_string).unwrap_or_default()
        })
    });
    let whys: Vec<_> = futures::future::join_all(many).await.into_iter().map(Result::unwrap).collect();
    assert!(whys.iter().all(|why| why.contains("too many") || why.contains("could not be fetched")), "{whys:?}");
    assert_eq!(whys.iter().filter(|why| !why.contains("too many")).count(), 4, "{whys:?}");
    // Without a timeout they would wait for good.
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[tokio::test]
async fn unknown_key_is_no_wrong_one_where_too_many_wait() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let unknown = key("unknown", Algorithm::EdDSA);
    let token_of = |jti: u32| {
        let mut claims = provider.claims();
        claims["jti"] = jti.into();
        sign(&header_of(&unknown), &claims, &unknown)
    };
    // One that was there before a fetch is refused by it.
    let (token, later) = (token_of(1), token_of(2));
    let with_max_age = |max_age| {
        let settings = JwksSettings { max_waiting: 0, max_age, ..provider.settings() };
        Authenticator::new(TokenRules::new(provider.issuer(), "gpuaas"), Jwks::new(settings).unwrap())
    };
    // Made-up key ids beside young keys are no outage.
    for (max_age, expected) in
        [(Duration::from_secs(3600), Code::RateLimited), (Duration::ZERO, Code::ServiceUnavailable)]
    {
        let authenticator = with_max_age(max_age);
        assert_eq!(code_for(&authenticator, &token).await, Err(Code::ServiceUnavailable), "no keys are cached");
        authenticator.jwks().refresh().await.unwrap();
        assert_eq!(code_for(&authenticator, &later).await, Err(expected), "{max_age:?}");
        assert_eq!(code_for(&authenticator, &provider.token(|_| ())).await, Ok(()), "its key is cached");
        let issued = authenticator.verify_issued_token(&token).await.map(drop).map_err(|error| error.code());
        assert_eq!(issued, Err(Code::ServiceUnavailable), "the provider itself has issued it");
    }
}

#[tokio::test]
async fn token_of_a_new_key_is_accepted_although_its_key_id_was_guessed_before() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let settings = JwksSettings { min_refresh_gap: Duration::from_secs(3), ..provider.settings() };
    let authenticator = Authenticator::new(TokenRules::new(provider.issuer(), "gpuaas"), Jwks::new(settings).unwrap());
    let (next, attacker) = (key("next", Algorithm::EdDSA), key("next", Algorithm::EdDSA));
    let guessed = sign(&header_of(&attacker), &provider.claims(), &attacker);
    assert_eq!(code_for(&authenticator, &guessed).await, Err(Code::Unauthenticated));
    provider.publish(vec![provider.keys[0].jwk.clone(), next.jwk.clone()]).await;
    // It follows the fetch by less than the gap.
    let token = sign(&header_of(&next), &provider.claims(), &next);
    assert_eq!(code_for(&authenticator, &token).await, Ok(()));
    assert_eq!(code_for(&authenticator, &guessed).await, Err(Code::Unauthenticated), "its signature");
}

#[tokio::test]
async fn token_that_the_provider_has_just_issued_is_accepted_although_its_key_id_was_guessed_before() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let authenticator = provider.authenticator();
    let next = key("next", Algorithm::EdDSA);
    let token = sign(&header_of(&next), &provider.claims(), &next);
    assert_eq!(code_for(&authenticator, &token).await, Err(Code::Unauthenticated));
    provider.publish(vec![provider.keys[0].jwk.clone(), next.jwk.clone()]).await;
    assert!(authenticator.verify_issued_token(&token).await.is_ok());
}

/// The provider writes its next response with its present keys, and delivers it later.
async fn publish_slowly(provider: &Provider) {
    provider.server.reset().await;
    provider.mock_discovery(&provider.issuer()).await;
    let written = json!({"keys": provider.keys.iter().map(|key| &key.jwk).collect::<Vec<_>>()});
    let response = ResponseTemplate::new(200).set_body_json(written).set_delay(Duration::from_secs(1));
    Mock::given(path("/realms/gpu/certs")).respond_with(response).mount(&provider.server).await;
}

/// A token of a key that is not published causes a fetch, whose response is written when this returns.
async fn begin_fetch(provider: &Provider, authenticator: &Arc<Authenticator>) -> JoinHandle<Result<(), Code>> {
    let unknown = key("unknown", Algorithm::EdDSA);
    let token = sign(&header_of(&unknown), &provider.claims(), &unknown);
    let authenticator = Arc::clone(authenticator);
    let begun = tokio::spawn(async move { code_for(&authenticator, &token).await });
    while provider.fetches().await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    begun
}

#[tokio::test]
async fn token_of_a_new_key_that_joins_a_fetch_whose_response_was_written_before_is_accepted() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let authenticator = Arc::new(provider.authenticator());
    publish_slowly(&provider).await;
    let unknown = begin_fetch(&provider, &authenticator).await;
    let next = key("next", Algorithm::EdDSA);
    provider.publish(vec![provider.keys[0].jwk.clone(), next.jwk.clone()]).await;
    let token = sign(&header_of(&next), &provider.claims(), &next);
    assert_eq!(code_for(&authenticator, &token).await, Ok(()));
    assert_eq!(unknown.await.unwrap(), Err(Code::Unauthenticated));
}

#[tokio::test]
async fn repeated_token_of_an_unknown_key_is_refused_by_one_fetch_and_a_later_one_is_not_refused_by_it() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    // The next fetch is further off than a request waits.
    let settings = JwksSettings { min_refresh_gap: Duration::from_secs(600), ..provider.settings() };
    let rules = TokenRules::new(provider.issuer(), "gpuaas");
    let authenticator = Arc::new(Authenticator::new(rules, Jwks::new(settings).unwrap()));
    publish_slowly(&provider).await;
    let (unknown, other) = (key("unknown", Algorithm::EdDSA), key("other", Algorithm::EdDSA));
    let token = sign(&header_of(&unknown), &provider.claims(), &unknown);
    let many = (0..50).map(|_| {
        let (authenticator, token) = (Arc::clone(&authenticator), token.clone());
        tokio::spawn(async move { code_for(&authenticator, &token).await })
    });
    let many: Vec<_> = many.collect();
    while provider.fetches().await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let later = sign(&header_of(&other), &provider.claims(), &other);
    assert_eq!(code_for(&authenticator, &later).await, Err(Code::ServiceUnavailable));
    for code in many {
        assert_eq!(code.await.unwrap(), Err(Code::Unauthenticated));
    }
    assert_eq!(provider.fetches().await, 1);
}

#[tokio::test]
async fn withdrawn_key_is_refused_after_a_forced_refresh_that_found_a_fetch_in_flight() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let authenticator = Arc::new(provider.authenticator());
    let token = provider.token(|_| ());
    assert_eq!(code_for(&authenticator, &token).await, Ok(()));
    publish_slowly(&provider).await;
    let unknown = begin_fetch(&provider, &authenticator).await;
    provider.publish(vec![key("next", Algorithm::EdDSA).jwk]).await;
    assert_eq!(authenticator.jwks().refresh().await.unwrap(), 1);
    assert_eq!(code_for(&authenticator, &token).await, Err(Code::Unauthenticated));
    assert_eq!(unknown.await.unwrap(), Err(Code::Unauthenticated));
}

#[tokio::test]
async fn cached_keys_serve_at_once_while_the_provider_misbehaves() {
    // One that misbehaves is waited for once, for as long as this.
    const PROVIDER_TIMEOUT: Duration = Duration::from_secs(10);
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let settings = JwksSettings {
        timeout: PROVIDER_TIMEOUT,
        // Stale at once, so that each use refreshes in the background.
        max_age: Duration::ZERO,
        min_refresh_gap: Duration::ZERO,
        ..provider.settings()
    };
    let rules = TokenRules::new(provider.issuer(), "gpuaas");
    let authenticator = Authenticator::new(rules, Jwks::new(settings).unwrap());
    let token = provider.token(|_| ());
    assert!(verdict(&authenticator, &token).await.is_ok());
    let evil = MockServer::start().await;
    for answer in [
        ResponseTemplate::new(200).set_delay(Duration::from_secs(60)),
        ResponseTemplate::new(307).insert_header("location", format!("{}/certs", evil.uri()).as_str()),
        ResponseTemplate::new(200).set_body_bytes(vec![b'a'; 8 << 20]),
        ResponseTemplate::new(200).set_body_json(json!({"keys": vec![json!({"kty": "oct", "kid": "k"}); 10_000]})),
        ResponseTemplate::new(200).set_body_string("[".repeat(200_000)),
    ] {
        provider.server.reset().await;
        provider.mock_discovery(&provider.issuer()).await;
        Mock::given(path("/realms/gpu/certs")).respond_with(answer).mount(&provider.server).await;
        let began = Instant::now();
        assert!(verdict(&authenticator, &token).await.is_ok());
        assert!(began.elapsed() < PROVIDER_TIMEOUT, "{:?}", began.elapsed());
        assert!(authenticator.jwks().refresh().await.is_err());
    }
    assert_eq!(evil.received_requests().await.unwrap().len(), 0, "a redirect was followed");
    drop(provider.server);
    assert!(verdict(&authenticator, &token).await.is_ok(), "the provider is gone");
}

#[tokio::test]
async fn forced_refresh_has_its_own_gap() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let settings = JwksSettings {
        min_forced_gap: Duration::from_millis(500),
        min_refresh_gap: Duration::from_secs(60),
        ..provider.settings()
    };
    let gap = settings.min_forced_gap;
    let authenticator = Authenticator::new(TokenRules::new(provider.issuer(), "gpuaas"), Jwks::new(settings).unwrap());
    assert!(verdict(&authenticator, &provider.token(|_| ())).await.is_ok());
    let next = key("next", Algorithm::EdDSA);
    provider.publish(vec![provider.keys[0].jwk.clone(), next.jwk.clone()]).await;
    let token = sign(&header_of(&next), &provider.claims(), &next);
    assert!(verdict(&authenticator, &token).await.is_err(), "the cool-down of unknown keys runs");
    let began = Instant::now();
    assert_eq!(authenticator.jwks().refresh().await.unwrap(), 2);
    let soon = authenticator.jwks().refresh().await;
    // The machine may have been paused in between.
    assert!(matches!(soon, Err(jwks::JwksError::TooSoon)) || began.elapsed() >= gap, "{soon:?}");
    assert!(verdict(&authenticator, &token).await.is_ok());
    tokio::time::sleep(gap + Duration::from_millis(50)).await;
    assert_eq!(authenticator.jwks().refresh().await.unwrap(), 2);
}

#[tokio::test]
async fn request_has_one_authorization_header_with_one_bounded_token() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let authenticator = provider.authenticator();
    let good = format!("Bearer {}", provider.token(|_| ()));
    let with = |values: &[&str]| -> HeaderMap {
        values.iter().map(|value| (header::AUTHORIZATION, value.parse().unwrap())).collect()
    };
    assert!(authenticator.authenticate(&with(&[&good])).await.is_ok());
    let huge = format!("Bearer {}", "a".repeat(1 << 20));
    for (what, headers) in [
        ("twice the same", with(&[&good, &good])),
        ("a good one and rubbish", with(&[&good, "Bearer x"])),
        ("another scheme first", with(&["Basic eDp5", &good])),
        ("a megabyte", with(&[&huge])),
        ("two in one", with(&[&format!("{good}, {good}")])),
    ] {
        let refused = authenticator.authenticate(&headers).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated, "{what}");
        assert!(refused.cause().is_some_and(|why| why.len() < 200), "{what}: the log says why");
    }
}

#[tokio::test]
async fn a_failed_authentication_is_logged_at_warn_with_its_reason_and_without_the_token() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let router = Router::new()
        .route("/me", get(|caller: Caller| async move { caller.user_id.0 }))
        .with_state(App(Arc::new(provider.authenticator())))
        .layer(RequestScope(crate::testing::scope_settings(Service { name: "api", shows_route: false })));
    let expired = provider.token(|claims| claims["exp"] = json!(1));
    let foreign = provider.token(|claims| claims["aud"] = json!("another"));
    let attacker = key("k", Algorithm::EdDSA);
    let forged = sign(&header_of(&attacker), &provider.claims(), &attacker);
    let without_subject = provider.token(|claims| claims["sub"] = json!({"secret": "hunter2"}));
    let encrypted = format!("{}.x.x.x.x", b64(br#"{"alg":"dir","enc":"A256GCM"}"#));
    for (token, reason) in [
        (&expired, "the token has expired"),
        (&foreign, "another audience: claim `aud` has none of SVC_OIDC_AUDIENCE"),
        (&without_subject, "claim `sub` is an object, and has to be a text (SVC_OIDC_CLAIM_USER_ID)"),
        (&encrypted, "the token is encrypted"),
        (&forged, "signature does not verify"),
        (&"not-even-a-token".to_owned(), "no signed JSON Web Token"),
    ] {
        let request =
            Request::get("/me").header("authorization", format!("Bearer {token}")).body(Body::empty()).unwrap();
        let (log, guard) = CapturedLog::start();
        let answer = router.clone().oneshot(request).await.unwrap();
        drop(guard);
        assert_eq!(answer.status(), 401);
        let text = log.text();
        let line = text
            .lines()
            .find(|line| line.contains("unauthenticated"))
            .unwrap_or_else(|| panic!("nothing logged: {text}"));
        assert!(line.contains("\"WARN\"") && line.contains(reason) && line.contains("401"), "{line}");
        assert!(!text.contains(token.as_str()) && !text.contains("hunter2"), "{text}");
    }
}
