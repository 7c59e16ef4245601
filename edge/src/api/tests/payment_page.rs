//! The page on which payments are made, as it is served; what it does in a browser is tested in `tests/it/payment_page.rs`.

use super::harness::ApiHarness;
use super::payments::{checkout, checkout_body, id_of, pay};
use super::terminal_page::without_nonce;
use crate::payment_processor::fake::FakeProcessor;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};
use uuid::Uuid;

async fn text(response: Response) -> String {
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test]
async fn payment_page_policy_admits_its_own_scripts_and_the_processor_alone() {
    let (_, api) = ApiHarness::with_fake_processor().await;
    let page = api.get(&format!("/billing/checkout/{}", Uuid::from_u128(1))).response().await;
    assert_eq!(page.status(), StatusCode::OK);
    let header = |name: &str| page.headers()[name].to_str().unwrap().to_owned();
    let may = header("content-security-policy");
    for rule in [
        "default-src 'none';",
        "script-src 'self' https://js.processor.example;",
        "connect-src 'self' https://api.processor.example https://js.processor.example;",
        "frame-src https://js.processor.example;",
        "form-action 'none';",
        "frame-ancestors 'none'",
    ] {
        assert!(may.contains(rule), "{may}");
    }
    assert_eq!((header("referrer-policy"), header("x-content-type-options")), ("no-referrer".into(), "nosniff".into()));
    let page = text(page).await;
    assert!(
        page.contains("src=\"https://js.processor.example/v3/\"")
            && page.contains("\"pk_test_1\"")
            && !page.contains("{{")
    );
    assert_eq!(page.matches("<script").count(), 3);
    assert!(!page.contains(" onload="));
    // It is the same for every payment, also for one that does not exist.
    let other = api.get(&format!("/billing/checkout/{}", Uuid::from_u128(2))).response().await;
    assert_eq!(without_nonce(&text(other).await), without_nonce(&page));
    api.get("/billing/checkout/somewhere").send().await.refused(400, "invalid_request");

    let mut wanted: Vec<String> =
        page.split("\"/billing/assets/").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()).collect();
    let mut served = 0;
    while let Some(name) = wanted.pop() {
        let answer = api.get(&format!("/billing/assets/{name}")).response().await;
        assert_eq!(answer.status(), StatusCode::OK, "{name}");
        let etag = answer.headers()["etag"].to_str().unwrap().to_owned();
        let repeated = api.get(&format!("/billing/assets/{name}")).header("if-none-match", &etag).response().await;
        assert_eq!(repeated.status(), StatusCode::NOT_MODIFIED, "{name}");
        wanted.extend(
            text(answer).await.split("from \"./").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()),
        );
        served += 1;
    }
    assert_eq!(served, 5);
    let returned = api.get("/billing/returned").response().await;
    assert!(
        returned.headers()["content-security-policy"]
            .to_str()
            .unwrap()
            .starts_with("default-src 'none'; style-src 'self';")
    );
    assert!(!text(returned).await.contains("<script"));
    api.get("/billing/assets/card_payment.test.js").send().await.refused(404, "not_found");
}

#[tokio::test]
async fn payment_terms_are_shown_to_a_client_with_the_address() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let id = id_of(&checkout(&api, "k", &checkout_body(5_000)).await);
    let terms =
        async |payment: &str, name: &str| api.get(&format!("/billing/checkout/{payment}/terms/{name}")).send().await;
    let known = terms(&id.to_string(), "pi_1").await;
    let expected = json!({
        "amount_minor": 5_000, "currency": "EUR", "state": "open",
        "success_url": "https://console.example/paid?of=1", "cancel_url": "http://localhost:3000/billing",
    });
    assert_eq!((known.is(200), &known.headers["cache-control"]), (&expected, &"no-store".parse().unwrap()));
    for (payment, name) in
        [(id.to_string(), "pi_2"), (Uuid::from_u128(7).to_string(), "pi_1"), (id.to_string(), "pi_1_secret_x")]
    {
        terms(&payment, name).await.refused(404, "not_found");
    }
    pay(&api, &processor, id).await;
    assert_eq!(terms(&id.to_string(), "pi_1").await.is(200)["state"], Value::from("deposited"));
}

#[tokio::test]
async fn guesses_at_payment_ids_are_rate_limited_by_address() {
    let api = ApiHarness::with_processor(&FakeProcessor::default()).await;
    api.set_policy(domain::policy::PolicyKey::RateLimitAuthenticationFailures, 10);
    let guess = async |last: u8| {
        let path = format!("/billing/checkout/{}/terms/pi_1", Uuid::new_v4());
        api.get(&path).from([192, 0, 2, last]).send().await
    };
    for _ in 0..10 {
        guess(7).await.refused(404, "not_found");
    }
    let slowed = guess(7).await;
    assert_eq!(slowed.refused(429, "rate_limited")["policy_key"], "rate_limit.authentication_failures_per_minute");
    guess(8).await.refused(404, "not_found");
}

#[tokio::test]
async fn payment_page_is_not_found_where_the_processor_has_one() {
    let hosted = ApiHarness::with_processor(&FakeProcessor::hosted()).await;
    for api in [&hosted, &ApiHarness::new().await] {
        for path in ["", "/terms/pi_1"] {
            let path = format!("/billing/checkout/{}{path}", Uuid::from_u128(1));
            api.get(&path).send().await.refused(404, "not_found");
        }
    }
}
