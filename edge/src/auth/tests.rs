mod hostile;
mod openid;
mod provider_tokens;

use axum::{Router, body::Body, extract::Request, routing::get};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::{AlgorithmFamily, EncodingKey};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PKCS_RSA_SHA256, PublicKeyData};
use serde_json::{Value, json};
use tower::ServiceExt;
use wiremock::{Mock, MockServer, ResponseTemplate, matchers::path};
use x509_parser::{prelude::FromDer, public_key::PublicKey, x509::SubjectPublicKeyInfo};

use super::{jwks::JwksSettings, *};
use crate::http::correlation::{RequestScope, Service};
use crate::testing::{body_json, install_crypto};
use test_host::CapturedLog;

/// A key of the provider: what it publishes and what it signs with.
struct Key {
    kid: &'static str,
    algorithm: Algorithm,
    jwk: Value,
    encoding: EncodingKey,
}

fn b64(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn key(kid: &'static str, algorithm: Algorithm) -> Key {
    let kind = match algorithm.family() {
        AlgorithmFamily::Ec => &PKCS_ECDSA_P256_SHA256,
        AlgorithmFamily::Ed => &PKCS_ED25519,
        AlgorithmFamily::Rsa | AlgorithmFamily::Hmac => &PKCS_RSA_SHA256,
    };
    let pair = KeyPair::generate_for(kind).unwrap();
    let (pem, raw) = (pair.serialize_pem(), pair.public_key_raw());
    let (mut jwk, encoding) = match algorithm.family() {
        AlgorithmFamily::Ec => {
            let jwk = json!({"kty": "EC", "crv": "P-256", "x": b64(&raw[1..33]), "y": b64(&raw[33..])});
            (jwk, EncodingKey::from_ec_pem(pem.as_bytes()))
        }
        AlgorithmFamily::Ed => {
            (json!({"kty": "OKP", "crv": "Ed25519", "x": b64(raw)}), EncodingKey::from_ed_pem(pem.as_bytes()))
        }
        AlgorithmFamily::Rsa | AlgorithmFamily::Hmac => {
            let spki = pair.subject_public_key_info();
            let (_, spki) = SubjectPublicKeyInfo::from_der(&spki).unwrap();
            let PublicKey::RSA(rsa) = spki.parsed().unwrap() else { panic!("no RSA key") };
            let modulus: Vec<u8> = rsa.modulus.iter().copied().skip_while(|byte| *byte == 0).collect();
            (
                json!({"kty": "RSA", "n": b64(&modulus), "e": b64(rsa.exponent)}),
                EncodingKey::from_rsa_pem(pem.as_bytes()),
            )
        }
    };
    jwk["kid"] = kid.into();
    jwk["use"] = "sig".into();
    Key { kid, algorithm, jwk, encoding: encoding.unwrap() }
}

fn sign(header: &Value, claims: &Value, key: &Key) -> String {
    let signed = format!("{}.{}", b64(header.to_string().as_bytes()), b64(claims.to_string().as_bytes()));
    let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &key.encoding, key.algorithm).unwrap();
    format!("{signed}.{signature}")
}

fn header_of(key: &Key) -> Value {
    json!({"typ": "JWT", "alg": format!("{:?}", key.algorithm), "kid": key.kid})
}

/// An identity provider on loopback.
struct Provider {
    server: MockServer,
    keys: Vec<Key>,
}

impl Provider {
    async fn with(keys: Vec<Key>) -> Self {
        install_crypto();
        let provider = Self { server: MockServer::start().await, keys };
        provider.publish(provider.keys.iter().map(|key| key.jwk.clone()).collect()).await;
        provider
    }

    async fn publish(&self, keys: Vec<Value>) {
        self.server.reset().await;
        self.mock_discovery(&self.issuer()).await;
        Mock::given(path("/realms/gpu/certs"))
            .respond_with(ResponseTemplate::new(200).set_body_json(json!({"keys": keys})))
            .mount(&self.server)
            .await;
    }

    async fn mock_discovery(&self, issuer: &str) {
        let document = json!({"issuer": issuer, "jwks_uri": format!("{}/certs", self.issuer())});
        Mock::given(path("/realms/gpu/.well-known/openid-configuration"))
            .respond_with(ResponseTemplate::new(200).set_body_json(document))
            .mount(&self.server)
            .await;
    }

    fn issuer(&self) -> String {
        format!("{}/realms/gpu", self.server.uri())
    }

    fn settings(&self) -> JwksSettings {
        JwksSettings {
            min_refresh_gap: std::time::Duration::from_millis(200),
            min_forced_gap: std::time::Duration::ZERO,
            ..JwksSettings::new(self.issuer())
        }
    }

    fn authenticator(&self) -> Authenticator {
        Authenticator::new(TokenRules::new(self.issuer(), "gpuaas"), Jwks::new(self.settings()).unwrap())
    }

    fn claims(&self) -> Value {
        self.claims_at(Utc::now().timestamp())
    }

    fn claims_at(&self, now: i64) -> Value {
        json!({
            "iss": self.issuer(), "aud": ["account", "gpuaas"], "sub": "ann", "typ": "Bearer",
            "iat": now, "exp": now + 300, "org_id": "acme", "project_id": "p1", "plan": "gold",
            "realm_access": {"roles": ["user"]},
        })
    }

    fn token(&self, change: impl FnOnce(&mut Value)) -> String {
        self.token_at(Utc::now().timestamp(), change)
    }

    /// Issued at that second.
    fn token_at(&self, now: i64, change: impl FnOnce(&mut Value)) -> String {
        let mut claims = self.claims_at(now);
        change(&mut claims);
        sign(&header_of(&self.keys[0]), &claims, &self.keys[0])
    }

    async fn fetches(&self) -> usize {
        self.server
            .received_requests()
            .await
            .unwrap()
            .iter()
            .filter(|request| request.url.path().ends_with("/certs"))
            .count()
    }
}

/// The most fetches that a gap allows since then: the first one, and one after each gap.
fn allowed_fetches(began: std::time::Instant, gap: std::time::Duration) -> usize {
    1 + usize::try_from(began.elapsed().as_millis() / gap.as_millis()).unwrap()
}

async fn verdict(authenticator: &Authenticator, token: &str) -> Result<Caller, String> {
    authenticator.verify(token, Utc::now()).await.map_err(|fault| fault.to_string())
}

#[tokio::test]
async fn token_of_each_algorithm_authenticates_its_caller() {
    let algorithms =
        [("r", Algorithm::RS256), ("p", Algorithm::PS256), ("e", Algorithm::ES256), ("d", Algorithm::EdDSA)];
    let provider = Provider::with(algorithms.map(|(kid, algorithm)| key(kid, algorithm)).into()).await;
    let authenticator = provider.authenticator();
    for key in &provider.keys {
        let caller = verdict(&authenticator, &sign(&header_of(key), &provider.claims(), key)).await.unwrap();
        assert_eq!(
            (caller.user_id.as_str(), caller.org_id.as_deref(), caller.plan.as_deref()),
            ("ann", Some("acme"), Some("gold"))
        );
        assert_eq!(caller.roles, [TokenRole::User].into());
        assert!(caller.token_expires_at > Utc::now());
    }
    assert_eq!(provider.fetches().await, 1);
}

#[tokio::test]
async fn token_with_invalid_claims_is_refused() {
    let provider = Provider::with(vec![key("k", Algorithm::ES256)]).await;
    let authenticator = provider.authenticator();
    // One instant for all checks, so that one second over a limit is so for each of them.
    let now = Utc::now().timestamp();
    let at = DateTime::from_timestamp(now, 0).unwrap();
    let set = |name: &'static str, value: Value| {
        provider.token_at(now, |claims| {
            claims[name] = value;
        })
    };
    let without = |name: &'static str| {
        provider.token_at(now, |claims| {
            claims.as_object_mut().unwrap().remove(name);
        })
    };
    for (what, token) in [
        ("expired", set("exp", json!(now - 1))),
        ("expired this second", set("exp", json!(now))),
        ("no exp", without("exp")),
        ("exp as text", set("exp", json!((now + 300).to_string()))),
        ("exp null", set("exp", Value::Null)),
        ("exp huge", set("exp", json!(1e300))),
        ("exp beyond i64 milliseconds", set("exp", json!(i64::MAX))),
        ("nbf ahead", set("nbf", json!(now + 120))),
        ("nbf as text", set("nbf", json!("0"))),
        ("iat ahead", set("iat", json!(now + 120))),
        ("over 24 hours", set("exp", json!(now + 86_401))),
        (
            "over 24 hours without iat",
            provider.token_at(now, |claims| {
                claims.as_object_mut().unwrap().remove("iat");
                claims["exp"] = json!(now + 86_461);
            }),
        ),
        (
            "older than it may live",
            provider.token_at(now, |claims| {
                claims["iat"] = json!(now - 90_000);
            }),
        ),
        ("foreign issuer", set("iss", json!("https://evil.example/realms/gpu"))),
        ("issuer with a slash", set("iss", json!(format!("{}/", provider.issuer())))),
        ("no issuer", without("iss")),
        ("foreign audience", set("aud", json!("another"))),
        ("no audience", without("aud")),
        ("audience of a wrong type", set("aud", json!({"gpuaas": true}))),
        ("no sub", without("sub")),
        ("empty sub", set("sub", json!(""))),
        ("sub as number", set("sub", json!(7))),
        ("long sub", set("sub", json!("x".repeat(256)))),
        ("sub with a control character", set("sub", json!("ann\u{0}"))),
        ("sub with a line end", set("sub", json!("ann\nadmin"))),
        ("org of a wrong type", set("org_id", json!([["acme"]]))),
        ("several orgs", set("org_id", json!(["acme", "other"]))),
        ("several orgs as an object", set("org_id", json!({"acme": {}, "other": {}}))),
        ("an id token", set("typ", json!("ID"))),
        ("a refresh token", set("typ", json!("Refresh"))),
        ("an id token of Cognito", set("token_use", json!("id"))),
    ] {
        assert!(authenticator.verify(&token, at).await.is_err(), "{what}");
    }
    for (what, token) in [
        ("audience as text", set("aud", json!("gpuaas"))),
        ("no roles", without("realm_access")),
        ("roles of another type", set("realm_access", json!({"roles": 7}))),
        ("a role of another type", set("realm_access", json!({"roles": [1]}))),
        (
            "empty organization and plan",
            provider.token_at(now, |claims| {
                claims["org_id"] = json!("");
                claims["plan"] = json!("");
            }),
        ),
        ("exp with a fraction", set("exp", json!(now as f64 + 300.5))),
        ("exactly 24 hours", set("exp", json!(now + 86_400))),
        ("nbf within the leeway", set("nbf", json!(now + 30))),
        ("the last second", set("exp", json!(now + 1))),
    ] {
        assert!(authenticator.verify(&token, at).await.is_ok(), "{what}");
    }
}

#[tokio::test]
async fn token_with_hostile_header_is_refused() {
    let provider = Provider::with(vec![key("k", Algorithm::RS256)]).await;
    let authenticator = provider.authenticator();
    let (key, claims) = (&provider.keys[0], provider.claims());
    let attacker = self::key("k", Algorithm::RS256);
    let with = |name: &str, value: Value| {
        let mut header = header_of(key);
        header[name] = value;
        header
    };
    let mut embedded = header_of(&attacker);
    embedded["jwk"] = attacker.jwk.clone();
    embedded["jku"] = "http://127.0.0.1:1/keys".into();
    embedded["x5u"] = "http://127.0.0.1:1/cert".into();
    let unsigned = format!(
        "{}.{}.",
        b64(json!({"alg": "none", "kid": "k"}).to_string().as_bytes()),
        b64(claims.to_string().as_bytes())
    );
    let hmac = {
        let signed = format!(
            "{}.{}",
            b64(json!({"alg": "HS256", "kid": "k"}).to_string().as_bytes()),
            b64(claims.to_string().as_bytes())
        );
        let secret = EncodingKey::from_secret(key.jwk["n"].as_str().unwrap().as_bytes());
        format!("{signed}.{}", jsonwebtoken::crypto::sign(signed.as_bytes(), &secret, Algorithm::HS256).unwrap())
    };
    let good = sign(&header_of(key), &claims, key);
    let mut parts = good.split('.');
    let (head, _, signature) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
    let altered = format!("{head}.{}.{signature}", b64(json!({"sub": "root"}).to_string().as_bytes()));
    for (what, token) in [
        ("unsigned", unsigned),
        ("hmac under the public key", hmac),
        ("signed by the key it brings along", sign(&embedded, &claims, &attacker)),
        ("another algorithm named", sign(&with("alg", json!("ES256")), &claims, key)),
        ("algorithm outside the allowlist", sign(&with("alg", json!("RS1")), &claims, key)),
        ("no kid", sign(&json!({"alg": "RS256"}), &claims, key)),
        ("kid that is no text", sign(&with("kid", json!(7)), &claims, key)),
        ("kid with a control character", sign(&with("kid", json!("k\u{0}")), &claims, key)),
        ("empty kid", sign(&with("kid", json!("")), &claims, key)),
        ("critical extension", sign(&with("crit", json!(["exp"])), &claims, key)),
        ("logout token", sign(&with("typ", json!("logout+jwt")), &claims, key)),
        ("altered claims", altered),
        ("four parts", format!("{good}.x")),
        ("two parts", "a.b".into()),
        ("nothing", ".".into()),
        ("claims that are no object", format!("{head}.{}.{signature}", b64(b"[]"))),
    ] {
        assert!(verdict(&authenticator, &token).await.is_err(), "{what}");
    }
    assert!(verdict(&authenticator, &good).await.is_ok());
}

#[tokio::test]
async fn keys_that_may_not_sign_are_ignored() {
    let provider = Provider::with(vec![key("k", Algorithm::RS256), key("e", Algorithm::ES256)]).await;
    let (rsa, ec) = (&provider.keys[0], &provider.keys[1]);
    let altered = |key: &Key, name: &str, value: Value| {
        let mut jwk = key.jwk.clone();
        jwk[name] = value;
        jwk
    };
    let weak = altered(rsa, "n", json!(b64(&[0xff; 128])));
    for (what, key, jwk) in [
        ("for encryption", rsa, altered(rsa, "use", json!("enc"))),
        ("not for verifying", rsa, altered(rsa, "key_ops", json!(["encrypt"]))),
        ("for another algorithm", rsa, altered(rsa, "alg", json!("RS512"))),
        ("weak", rsa, weak),
        ("without a kid", rsa, altered(rsa, "kid", Value::Null)),
        ("on another curve", ec, altered(ec, "crv", json!("secp256k1"))),
        ("symmetric", rsa, json!({"kty": "oct", "kid": "k", "k": "c2VjcmV0"})),
    ] {
        let another = self::key("other", Algorithm::EdDSA);
        provider.publish(vec![jwk, another.jwk]).await;
        assert!(
            verdict(&provider.authenticator(), &sign(&header_of(key), &provider.claims(), key)).await.is_err(),
            "{what}"
        );
    }
}

/// In base64 with padding.
fn padded(encoded: &str, prefix: &[u8]) -> String {
    use base64::engine::general_purpose::STANDARD;
    STANDARD.encode([prefix, &URL_SAFE_NO_PAD.decode(encoded).unwrap()].concat())
}

#[tokio::test]
async fn keys_in_the_encodings_of_some_providers_verify_their_tokens() {
    let mut short = std::iter::repeat_with(|| key("e", Algorithm::ES256));
    let is_short = |key: &Key| URL_SAFE_NO_PAD.decode(key.jwk["x"].as_str().unwrap()).unwrap()[0] == 0;
    let provider = Provider::with(vec![key("r", Algorithm::RS256), short.find(is_short).unwrap()]).await;
    let altered = |key: &Key, alter: &dyn Fn(&str) -> String, names: [&str; 2]| {
        let mut jwk = key.jwk.clone();
        for name in names {
            jwk[name] = alter(jwk[name].as_str().unwrap()).into();
        }
        jwk
    };
    let (rsa, ec) = (&provider.keys[0], &provider.keys[1]);
    let without_zeros = |text: &str| {
        let bytes = URL_SAFE_NO_PAD.decode(text).unwrap();
        b64(&bytes.into_iter().skip_while(|byte| *byte == 0).collect::<Vec<_>>())
    };
    for (what, key, jwk) in [
        ("base64 with padding", rsa, altered(rsa, &|text| padded(text, &[]), ["n", "e"])),
        ("a zero byte in front, as a signed number has", rsa, altered(rsa, &|text| padded(text, &[0]), ["n", "e"])),
        ("a coordinate in base64", ec, altered(ec, &|text| padded(text, &[]), ["x", "y"])),
        ("a zero byte in front of a coordinate", ec, altered(ec, &|text| padded(text, &[0]), ["x", "y"])),
        ("a coordinate without its zero byte", ec, altered(ec, &without_zeros, ["x", "y"])),
    ] {
        provider.publish(vec![jwk]).await;
        let token = sign(&header_of(key), &provider.claims(), key);
        assert!(verdict(&provider.authenticator(), &token).await.is_ok(), "{what}");
    }
}

#[tokio::test]
async fn unknown_key_is_fetched_once_per_gap_for_all_requests() {
    let provider = Provider::with(vec![key("old", Algorithm::EdDSA)]).await;
    let authenticator = Arc::new(provider.authenticator());
    assert!(verdict(&authenticator, &provider.token(|_| ())).await.is_ok());
    let new = key("new", Algorithm::EdDSA);
    let token = sign(&header_of(&new), &provider.claims(), &new);
    tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    provider.publish(vec![provider.keys[0].jwk.clone(), new.jwk.clone()]).await;
    let began = std::time::Instant::now();
    let many: Vec<_> = (0..50)
        .map(|_| {
            let (authenticator, token) = (Arc::clone(&authenticator), token.clone());
            tokio::spawn(async move { verdict(&authenticator, &token).await })
        })
        .collect();
    for one in many {
        assert!(one.await.unwrap().is_ok());
    }
    assert_eq!(provider.fetches().await, 1);
    let bogus = Key { kid: "bogus", ..key("bogus", Algorithm::EdDSA) };
    for _ in 0..20 {
        assert!(verdict(&authenticator, &sign(&header_of(&bogus), &provider.claims(), &bogus)).await.is_err());
    }
    // One alone, unless the machine was paused for longer than the gap.
    let (fetches, allowed) = (provider.fetches().await, allowed_fetches(began, provider.settings().min_refresh_gap));
    assert!((1..=allowed).contains(&fetches), "the gap allows {allowed} fetches, and there were {fetches}");
}

#[tokio::test]
async fn cached_keys_stay_while_the_provider_is_unreachable_or_invalid() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let authenticator = provider.authenticator();
    let token = provider.token(|_| ());
    assert!(verdict(&authenticator, &token).await.is_ok());
    let certs = |answer: ResponseTemplate| Mock::given(path("/realms/gpu/certs")).respond_with(answer);
    for answer in [
        ResponseTemplate::new(500),
        ResponseTemplate::new(302).insert_header("location", "http://127.0.0.1:1/"),
        ResponseTemplate::new(200).set_body_string("no json"),
        ResponseTemplate::new(200).set_body_json(json!({"keys": []})),
        ResponseTemplate::new(200).set_body_bytes(vec![b' '; 300 * 1024]),
    ] {
        provider.server.reset().await;
        provider.mock_discovery(&provider.issuer()).await;
        certs(answer).mount(&provider.server).await;
        assert!(authenticator.jwks().refresh().await.is_err());
        assert!(verdict(&authenticator, &token).await.is_ok());
    }
    provider.server.reset().await;
    provider.mock_discovery("https://evil.example").await;
    assert!(authenticator.jwks().refresh().await.unwrap_err().to_string().contains("issuer"));
    assert!(verdict(&authenticator, &token).await.is_ok());
}

/// Requests with such a token are answered 503, and 401 where it is wrong.
async fn code_for(authenticator: &Authenticator, token: &str) -> Result<(), Code> {
    authenticator.verify_token(token).await.map(drop).map_err(|error| error.code())
}

#[tokio::test]
async fn token_of_a_new_key_is_not_refused_while_the_keys_cannot_be_fetched() {
    let provider = Provider::with(vec![key("old", Algorithm::EdDSA)]).await;
    let authenticator = provider.authenticator();
    code_for(&authenticator, &provider.token(|_| ())).await.unwrap();
    let new = key("new", Algorithm::EdDSA);
    let token = sign(&header_of(&new), &provider.claims(), &new);
    let of_client = |more: &Value| {
        let mut claims = provider.claims();
        claims["aud"] = "console".into();
        claims.as_object_mut().unwrap().remove("typ");
        claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        sign(&header_of(&new), &claims, &new)
    };
    let id_token = of_client(&json!({"nonce": "n"}));
    let events = json!({"http://schemas.openid.net/event/backchannel-logout": {}});
    let logout_token = of_client(&json!({"jti": "j", "events": events}));
    tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    let unusable = [
        ResponseTemplate::new(503),
        ResponseTemplate::new(200).set_body_string("<html>Maintenance</html>"),
        ResponseTemplate::new(200).set_body_json(json!({"keys": []})),
    ];
    for answer in unusable {
        provider.server.reset().await;
        provider.mock_discovery(&provider.issuer()).await;
        Mock::given(path("/realms/gpu/certs")).respond_with(answer).mount(&provider.server).await;
        assert_eq!(code_for(&authenticator, &token).await, Err(Code::ServiceUnavailable));
        let login = authenticator.verify_id_token(&id_token, "console", "n", Utc::now()).await.unwrap_err();
        assert!(login.to_string().contains("cannot be fetched"), "{login}");
        let logout = authenticator.verify_logout_token(&logout_token, "console", Utc::now()).await.unwrap_err();
        assert!(logout.to_string().contains("cannot be fetched"), "{logout}");
        code_for(&authenticator, &provider.token(|_| ())).await.unwrap();
    }
    // The last attempt was a moment ago: the next one is waited for.
    provider.publish(vec![provider.keys[0].jwk.clone(), new.jwk.clone()]).await;
    assert_eq!(code_for(&authenticator, &token).await, Ok(()));
}

#[tokio::test]
async fn token_of_a_key_that_a_complete_fetch_lacks_is_refused_and_repeated_without_a_wait() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let settings = JwksSettings { min_refresh_gap: std::time::Duration::from_secs(3), ..provider.settings() };
    let authenticator = Authenticator::new(TokenRules::new(provider.issuer(), "gpuaas"), Jwks::new(settings).unwrap());
    let unknown = key("unknown", Algorithm::EdDSA);
    let token = sign(&header_of(&unknown), &provider.claims(), &unknown);
    let began = std::time::Instant::now();
    for _ in 0..50 {
        assert_eq!(code_for(&authenticator, &token).await, Err(Code::Unauthenticated));
    }
    // Each of them would wait for the gap.
    assert!(began.elapsed() < std::time::Duration::from_secs(30), "{:?}", began.elapsed());
    // The token that follows the fetch by less than the gap waits for the next one.
    let rotated = key("rotated", Algorithm::EdDSA);
    provider.publish(vec![provider.keys[0].jwk.clone(), rotated.jwk.clone()]).await;
    let token = sign(&header_of(&rotated), &provider.claims(), &rotated);
    assert_eq!(code_for(&authenticator, &token).await, Ok(()));
}

#[tokio::test]
async fn withdrawn_key_is_refused_after_the_next_refresh() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let authenticator = provider.authenticator();
    let token = provider.token(|_| ());
    assert!(verdict(&authenticator, &token).await.is_ok());
    provider.publish(vec![key("next", Algorithm::EdDSA).jwk]).await;
    authenticator.jwks().refresh().await.unwrap();
    assert!(verdict(&authenticator, &token).await.is_err());
}

#[tokio::test]
async fn hanging_provider_times_out_with_service_unavailable() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    provider.server.reset().await;
    Mock::given(path("/realms/gpu/.well-known/openid-configuration"))
        .respond_with(ResponseTemplate::new(200).set_delay(std::time::Duration::from_secs(30)))
        .mount(&provider.server)
        .await;
    let settings = JwksSettings { timeout: std::time::Duration::from_millis(100), ..provider.settings() };
    let authenticator = Authenticator::new(TokenRules::new(provider.issuer(), "gpuaas"), Jwks::new(settings).unwrap());
    let mut headers = HeaderMap::new();
    headers.insert(header::AUTHORIZATION, format!("Bearer {}", provider.token(|_| ())).parse().unwrap());
    assert_eq!(authenticator.authenticate(&headers).await.unwrap_err().code(), Code::ServiceUnavailable);
}

#[test]
fn provider_without_tls_is_refused_except_on_loopback() {
    install_crypto();
    for bad in ["http://idp.example/realms/gpu", "ftp://idp.example", "idp.example", "http://127.0.0.1.evil.example/"] {
        assert!(Jwks::new(JwksSettings::new(bad)).is_err(), "{bad}");
    }
    for good in [
        "https://idp.example/realms/gpu",
        "http://127.0.0.1:8080/realms/gpu",
        "http://[::1]:8080/",
        "http://localhost:8080/",
    ] {
        assert!(Jwks::new(JwksSettings::new(good)).is_ok(), "{good}");
    }
}

#[derive(Clone)]
struct App(Arc<Authenticator>);

impl FromRef<App> for Arc<Authenticator> {
    fn from_ref(app: &App) -> Self {
        Arc::clone(&app.0)
    }
}

#[tokio::test]
async fn routes_answer_401_with_a_challenge_and_403_to_callers_without_the_admin_role() {
    let provider = Provider::with(vec![key("k", Algorithm::EdDSA)]).await;
    let app = App(Arc::new(provider.authenticator()));
    let router = Router::new()
        .route("/me", get(|caller: Caller| async move { caller.user_id.0 }))
        .route("/admin", get(|Admin(caller): Admin| async move { caller.user_id.0 }))
        .with_state(app)
        .layer(RequestScope(crate::testing::scope_settings(Service { name: "api", shows_route: false })));
    let send = |path: &str, authorization: Option<String>| {
        let mut request = Request::get(path);
        if let Some(authorization) = authorization {
            request = request.header("authorization", authorization);
        }
        router.clone().oneshot(request.body(Body::empty()).unwrap())
    };
    let token = provider.token(|_| ());
    let admin = provider.token(|claims| claims["realm_access"]["roles"] = json!(["user", "admin"]));
    let expired = provider.token(|claims| claims["exp"] = json!(1));
    for bad in [
        None,
        Some(String::new()),
        Some("Bearer".into()),
        Some("Bearer ".into()),
        Some(format!("Basic {token}")),
        Some("Bearer x".into()),
        Some(format!("Bearer {expired}")),
        Some(format!("Bearer {}", "x".repeat(17_000))),
    ] {
        let response = send("/me", bad).await.unwrap();
        assert_eq!(response.status(), 401);
        assert!(response.headers()["www-authenticate"].to_str().unwrap().starts_with("Bearer"));
        let body = body_json(response).await;
        assert_eq!(body["code"], "unauthenticated");
        assert!(body["correlation_id"].is_string());
    }
    assert_eq!(send("/me", Some(format!("bearer {token}"))).await.unwrap().status(), 200);
    let refused = send("/admin", Some(format!("Bearer {token}"))).await.unwrap();
    assert_eq!((refused.status().as_u16(), body_json(refused).await["code"].clone()), (403, json!("forbidden")));
    assert_eq!(send("/admin", Some(format!("Bearer {admin}"))).await.unwrap().status(), 200);
}

#[test]
fn a_claim_path_may_be_a_name_with_dots() {
    let claims = json!({
        "iss": "i", "aud": "a", "exp": Utc::now().timestamp() + 60, "sub": "ann",
        "https://gpu.example/roles": ["admin"], "nested": {"org": {"id": "acme"}},
        "https://gpu.example/app": {"my.plan": {"name": "gold"}},
    });
    let mut rules = TokenRules::new("i", "a");
    rules.claims.roles = "https://gpu.example/roles".into();
    rules.claims.org_id = "nested.org.id".into();
    rules.claims.plan = "https://gpu.example/app.my.plan.name".into();
    let (caller, remark) = claims::read(claims.as_object().unwrap(), &rules, Utc::now()).unwrap();
    assert!(caller.is_admin() && remark.is_none());
    assert_eq!((caller.org_id.as_deref(), caller.plan.as_deref()), (Some("acme"), Some("gold")));
}
