//! The requests are those that Stripe documents, and its documented responses are understood; so are those of compatible services.

use super::stripe::{CheckoutPage, Stripe, StripeError, StripeSettings};
use super::*;
use serde_json::{Value, json};
use uuid::Uuid;
use wiremock::matchers::{method, path, query_param, query_param_is_missing};
use wiremock::{Match, Mock, MockServer, Request, ResponseTemplate};

const PAYMENT: PaymentId = PaymentId(Uuid::from_u128(7));
const REFUND: RefundId = RefundId(Uuid::from_u128(8));

fn client(server: &MockServer, checkout: CheckoutPage) -> Stripe {
    client_at(&server.uri(), checkout)
}

fn client_at(address: &str, checkout: CheckoutPage) -> Stripe {
    crate::testing::install_crypto();
    let settings = StripeSettings {
        api_base: address.to_owned(),
        secret_key: "sk_test_0123456789".into(),
        checkout,
        authorities_pem: None,
    };
    Stripe::new(settings).unwrap()
}

fn wanted() -> Checkout {
    Checkout {
        payment_id: PAYMENT,
        amount_minor: 2500,
        currency: Currency::parse("EUR").unwrap(),
        success_url: "https://shop.example/paid?a=1&b=2".into(),
        cancel_url: "https://shop.example/later".into(),
        before: PriorCheckout::Nothing,
    }
}

fn intent(id: &str, status: &str) -> Value {
    json!({
        "id": id, "object": "payment_intent", "amount": 2500, "amount_received": 0, "currency": "eur", "status": status,
        "created": 1_700_000_000, "client_secret": format!("{id}_secret_x"), "metadata": {"payment_id": PAYMENT},
        "latest_charge": null, "last_payment_error": null,
    })
}

fn list(data: &[Value], has_more: bool) -> Value {
    json!({"object": "list", "data": data, "has_more": has_more, "url": "/v1/things"})
}

async fn answers(server: &MockServer, verb: &str, at: &str, status: u16, body: &Value) {
    let answer = ResponseTemplate::new(status).set_body_json(body);
    Mock::given(method(verb)).and(path(at)).respond_with(answer).mount(server).await;
}

/// The request's form, sorted for comparison.
async fn form_of_only_request(server: &MockServer) -> (Request, Vec<(String, String)>) {
    let request = server.received_requests().await.unwrap().pop().unwrap();
    let mut form: Vec<(String, String)> =
        reqwest::Url::parse(&format!("http://x/?{}", String::from_utf8(request.body.clone()).unwrap()))
            .unwrap()
            .query_pairs()
            .into_owned()
            .collect();
    form.sort();
    (request, form)
}

fn pairs(of: &[(&str, &str)]) -> Vec<(String, String)> {
    of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[tokio::test]
async fn an_intent_is_opened_as_documented_with_our_id_and_a_key() {
    let server = MockServer::start().await;
    answers(&server, "POST", "/v1/payment_intents", 200, &intent("pi_1", "requires_payment_method")).await;
    let opened = client(&server, CheckoutPage::Ours).checkout(&wanted()).await.unwrap();
    assert_eq!(opened.processor_id, "pi_1");
    assert!(matches!(opened.way, CheckoutMethod::Page { .. }));
    assert!(!format!("{opened:?}").contains("secret_x"), "the payer's secret is not for logs");
    let url = opened.url("https://gpu.example/", PAYMENT).unwrap();
    assert_eq!(url, format!("https://gpu.example/billing/checkout/{PAYMENT}#pi_1_secret_x"));
    let (request, form) = form_of_only_request(&server).await;
    let id = PAYMENT.to_string();
    let expected =
        [("amount", "2500"), ("currency", "eur"), ("metadata[payment_id]", &id), ("payment_method_types[0]", "card")];
    assert_eq!(form, pairs(&expected));
    assert_eq!(request.headers["authorization"], "Bearer sk_test_0123456789");
    assert_eq!(request.headers["idempotency-key"], format!("payment-{id}").as_str());
    assert_eq!(request.headers["stripe-version"], "2024-06-20");
}

#[tokio::test]
async fn payment_in_a_currency_of_other_decimals_is_not_opened() {
    let server = MockServer::start().await;
    answers(&server, "POST", "/v1/payment_intents", 200, &intent("pi_1", "requires_payment_method")).await;
    // A charge of 2500 would be 25 of them, and 2500 in the account.
    for code in ["ISK", "UGX"] {
        let wanted = Checkout { currency: Currency::parse(code).unwrap(), ..wanted() };
        let refused = client(&server, CheckoutPage::Ours).checkout(&wanted).await.unwrap_err();
        assert!(matches!(&refused, ProcessorError::Refused { why, .. } if why.contains("decimals")), "{refused}");
    }
    assert_eq!(server.received_requests().await.unwrap().len(), 0);
}

#[tokio::test]
async fn session_is_opened_as_documented_and_its_intent_has_our_id() {
    let server = MockServer::start().await;
    // As Stripe's reference shows the answer to *Create a Session*, shortened.
    let session = json!({
        "id": "cs_test_a11YYufWQzNY63zpQ6QSNRQhkUpVph4WRmzW0zWJO2znZKdVujZ0N0S22u", "object": "checkout.session",
        "amount_total": 2500, "client_reference_id": PAYMENT, "created": 1_679_600_215, "currency": "eur",
        "metadata": {"payment_id": PAYMENT}, "mode": "payment", "payment_intent": null, "payment_status": "unpaid",
        "status": "open", "success_url": "https://shop.example/paid?a=1&b=2",
        "url": "https://checkout.stripe.com/c/pay/cs_test_a11YYufWQzNY63zpQ6QSNRQhkUpVph4WRmzW0zWJO2znZKdVujZ0N0S22u",
    });
    answers(&server, "POST", "/v1/checkout/sessions", 200, &session).await;
    let opened = client(&server, CheckoutPage::Sessions).checkout(&wanted()).await.unwrap();
    assert!(
        matches!(opened.way, CheckoutMethod::Hosted { url } if url.starts_with("https://checkout.stripe.com/c/pay/cs_"))
    );
    let (_, form) = form_of_only_request(&server).await;
    let id = PAYMENT.to_string();
    let expected = [
        ("cancel_url", "https://shop.example/later"),
        ("client_reference_id", &id),
        ("line_items[0][price_data][currency]", "eur"),
        ("line_items[0][price_data][product_data][name]", "Prepaid GPU time"),
        ("line_items[0][price_data][unit_amount]", "2500"),
        ("line_items[0][quantity]", "1"),
        ("metadata[payment_id]", &id),
        ("mode", "payment"),
        ("payment_intent_data[metadata][payment_id]", &id),
        ("success_url", "https://shop.example/paid?a=1&b=2"),
    ];
    assert_eq!(form, pairs(&expected));
}

#[tokio::test]
async fn payment_status_follows_its_intent() {
    let with = |status: &str, more: Value| {
        let mut intent = intent("pi_1", status);
        intent.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        intent
    };
    let declined = json!({"last_payment_error": {"code": "card_declined", "message": "Your card was declined."}});
    let charged = json!({"latest_charge": "ch_1", "amount_received": 2400});
    // localstripe returns the whole charge there, without the amount received.
    let expanded = json!({"latest_charge": {"id": "ch_1", "object": "charge"}, "amount_received": null});
    let paid = || ProcessorPaymentStatus::Paid { charge_id: Some("ch_1".into()) };
    for (intent, status, amount_minor) in [
        (with("requires_payment_method", json!({})), ProcessorPaymentStatus::Open, 2500),
        (with("requires_action", json!({})), ProcessorPaymentStatus::Open, 2500),
        (
            with("requires_payment_method", declined),
            ProcessorPaymentStatus::Declined { why: "card_declined".into() },
            2500,
        ),
        (with("processing", json!({})), ProcessorPaymentStatus::Processing, 2500),
        (with("canceled", json!({})), ProcessorPaymentStatus::Canceled, 2500),
        (with("succeeded", charged), paid(), 2400),
        (with("succeeded", expanded), paid(), 2500),
    ] {
        let server = MockServer::start().await;
        answers(&server, "GET", "/v1/payment_intents/pi_1", 200, &intent).await;
        let standing = client(&server, CheckoutPage::Ours).payment("pi_1").await.unwrap().unwrap();
        assert_eq!((standing.status, standing.amount_minor), (status, amount_minor), "{intent}");
        assert_eq!((standing.payment_id, standing.currency.as_str()), (Some(PAYMENT), "EUR"));
    }
}

#[tokio::test]
async fn session_intent_and_charge_ids_lead_to_one_payment() {
    let server = MockServer::start().await;
    let mut paid = intent("pi_1", "succeeded");
    paid["latest_charge"] = "ch_1".into();
    answers(&server, "GET", "/v1/payment_intents/pi_1", 200, &paid).await;
    let charge =
        json!({"id": "ch_1", "amount": 2500, "currency": "eur", "status": "succeeded", "payment_intent": paid});
    Mock::given(path("/v1/charges/ch_1"))
        .and(query_param("expand[]", "payment_intent"))
        .respond_with(ResponseTemplate::new(200).set_body_json(charge))
        .mount(&server)
        .await;
    let session = |status: &str, payment_status: &str| {
        json!({
            "id": "cs_1", "amount_total": 2500, "currency": "eur", "status": status, "payment_status": payment_status,
            "client_reference_id": PAYMENT, "metadata": {"payment_id": PAYMENT}, "payment_intent": "pi_1", "url": null,
        })
    };
    answers(&server, "GET", "/v1/checkout/sessions/cs_1", 200, &session("complete", "paid")).await;
    let ours = client(&server, CheckoutPage::Sessions);
    for id in ["pi_1", "ch_1", "cs_1"] {
        let standing = ours.payment(id).await.unwrap().unwrap();
        assert_eq!((standing.processor_id.as_str(), standing.payment_id), ("pi_1", Some(PAYMENT)), "{id}");
        assert!(matches!(standing.status, ProcessorPaymentStatus::Paid { .. }), "{id}");
    }
    for (status, payment_status, expected) in [
        ("open", "unpaid", ProcessorPaymentStatus::Open),
        ("complete", "unpaid", ProcessorPaymentStatus::Processing),
        ("expired", "unpaid", ProcessorPaymentStatus::Expired),
    ] {
        let server = MockServer::start().await;
        answers(&server, "GET", "/v1/checkout/sessions/cs_1", 200, &session(status, payment_status)).await;
        let standing = client(&server, CheckoutPage::Sessions).payment("cs_1").await.unwrap().unwrap();
        assert_eq!((standing.processor_id.as_str(), standing.status), ("cs_1", expected));
    }
}

#[tokio::test]
async fn open_checkout_is_found_and_not_opened_twice() {
    let server = MockServer::start().await;
    let ours = intent("pi_1", "requires_payment_method");
    answers(&server, "GET", "/v1/payment_intents", 200, &list(&[ours], false)).await;
    answers(&server, "GET", "/v1/payment_intents/pi_2", 200, &intent("pi_2", "canceled")).await;
    answers(&server, "POST", "/v1/payment_intents", 200, &intent("pi_new", "requires_payment_method")).await;
    let client = client(&server, CheckoutPage::Ours);
    for (before, of, is_open) in [
        (PriorCheckout::Nothing, "pi_new", true),
        (PriorCheckout::Since(DateTime::UNIX_EPOCH), "pi_1", true),
        (PriorCheckout::Since(DateTime::from_timestamp(1_700_000_001, 0).unwrap()), "pi_new", true),
        (PriorCheckout::Known("pi_2".into()), "pi_2", false),
    ] {
        let opened = client.checkout(&Checkout { before: before.clone(), ..wanted() }).await.unwrap();
        let url = opened.url("https://gpu.example", PAYMENT);
        assert_eq!((opened.processor_id.as_str(), url.is_some()), (of, is_open), "{before:?}");
    }
    let gone = Checkout { before: PriorCheckout::Known("pi_3".into()), ..wanted() };
    assert!(matches!(client.checkout(&gone).await, Err(ProcessorError::Refused { .. })));
}

#[tokio::test]
async fn missing_object_is_none_and_ids_cannot_change_the_path() {
    let server = MockServer::start().await;
    let missing = json!({"error": {"code": "resource_missing", "message": "No such payment_intent", "type": "invalid_request_error"}});
    answers(&server, "GET", "/v1/payment_intents/pi_none", 404, &missing).await;
    let client = client(&server, CheckoutPage::Ours);
    assert_eq!(client.payment("pi_none").await, Ok(None));
    for id in ["", "../charges", "pi_1/cancel", "pi_1?expand[]=x", "pi_é", &"p".repeat(256)] {
        assert!(matches!(client.payment(id).await, Err(ProcessorError::Refused { .. })), "{id}");
    }
    assert_eq!(server.received_requests().await.unwrap().len(), 1);
}

#[tokio::test]
async fn payment_is_found_by_our_id_on_any_page() {
    let other = |n: i64, created: i64| json!({"id": format!("pi_o{n}"), "amount": 1, "currency": "eur", "status": "canceled", "created": created});
    let mut ours = intent("pi_1", "requires_payment_method");
    for newest_first in [true, false] {
        let server = MockServer::start().await;
        let begin = 1_700_000_000;
        let step = if newest_first { -1 } else { 1 };
        ours["created"] = json!(begin + 2 * step);
        let first = list(&[other(1, begin), other(2, begin + step)], true);
        Mock::given(path("/v1/payment_intents"))
            .and(query_param_is_missing("starting_after"))
            .respond_with(ResponseTemplate::new(200).set_body_json(first))
            .mount(&server)
            .await;
        let second = list(&[ours.clone(), other(3, begin + 3 * step)], true);
        Mock::given(path("/v1/payment_intents"))
            .and(query_param("starting_after", "pi_o2"))
            .respond_with(ResponseTemplate::new(200).set_body_json(second))
            .mount(&server)
            .await;
        let third = list(&[other(4, begin + 4 * step)], false);
        Mock::given(path("/v1/payment_intents"))
            .and(query_param("starting_after", "pi_o3"))
            .respond_with(ResponseTemplate::new(200).set_body_json(third))
            .mount(&server)
            .await;
        let client = client(&server, CheckoutPage::Ours);
        let since = |seconds: i64| DateTime::from_timestamp(seconds, 0).unwrap();
        let found = client.find_payment(PAYMENT, since(begin - 2)).await.unwrap();
        assert_eq!(found.unwrap().processor_id, "pi_1");
        let nobodys = client.find_payment(PaymentId(Uuid::nil()), since(begin - 2)).await.unwrap();
        assert!(nobodys.is_none());
        if newest_first {
            let asked = server.received_requests().await.unwrap().len();
            assert!(client.find_payment(PAYMENT, since(begin + 1)).await.unwrap().is_none());
            assert_eq!(
                server.received_requests().await.unwrap().len(),
                asked + 1,
                "what is older is not looked through"
            );
        }
    }
}

#[tokio::test]
async fn a_refund_names_the_intent_our_id_and_a_key_and_no_reason() {
    let server = MockServer::start().await;
    let refund = json!({
        "id": "re_1", "object": "refund", "amount": 400, "currency": "eur", "status": "pending", "charge": "ch_1",
        "payment_intent": "pi_1", "metadata": {"refund_id": REFUND}, "created": 1,
    });
    answers(&server, "POST", "/v1/refunds", 200, &refund).await;
    let asked = RefundRequest { refund_id: REFUND, processor_id: "pi_1".into(), amount_minor: 400 };
    let standing = client(&server, CheckoutPage::Ours).refund(&asked).await.unwrap();
    assert_eq!((standing.status, standing.refund_id), (ProcessorRefundStatus::Pending, Some(REFUND)));
    assert_eq!((standing.of.as_deref(), standing.amount_minor), (Some("pi_1"), 400));
    let (request, form) = form_of_only_request(&server).await;
    let id = REFUND.to_string();
    assert_eq!(form, pairs(&[("amount", "400"), ("metadata[refund_id]", &id), ("payment_intent", "pi_1")]));
    assert_eq!(request.headers["idempotency-key"], format!("refund-{id}").as_str());
}

#[tokio::test]
async fn payment_that_ended_otherwise_is_reported_and_not_cancelled() {
    let server = MockServer::start().await;
    let unexpected =
        json!({"error": {"code": "payment_intent_unexpected_state", "message": "You cannot cancel this."}});
    answers(&server, "POST", "/v1/payment_intents/pi_1/cancel", 400, &unexpected).await;
    answers(&server, "GET", "/v1/payment_intents/pi_1", 200, &intent("pi_1", "succeeded")).await;
    let standing = client(&server, CheckoutPage::Ours).cancel("pi_1").await.unwrap().unwrap();
    assert_eq!(standing.status, ProcessorPaymentStatus::Paid { charge_id: None });
    // Under a key, a payment that becomes cancelable is refused for a day.
    let requests = server.received_requests().await.unwrap();
    assert!(requests.iter().all(|request| !request.headers.contains_key("idempotency-key")), "{requests:?}");
}

#[tokio::test]
async fn inquiries_are_distinguished_from_disputes() {
    let server = MockServer::start().await;
    let dispute = |n: i64, status: &str| {
        json!({"id": format!("dp_{n}"), "amount": 2500, "currency": "eur", "status": status, "charge": "ch_1",
            "payment_intent": "pi_1", "created": 10 - n})
    };
    let all =
        [dispute(1, "warning_needs_response"), dispute(2, "needs_response"), dispute(3, "won"), dispute(4, "lost")];
    let client_of = |server: &MockServer| client(server, CheckoutPage::Ours);
    let all = [&all[..], &[dispute(5, "prevented"), dispute(6, "of_next_year")]].concat();
    answers(&server, "GET", "/v1/disputes", 200, &list(&all, false)).await;
    let listing = client_of(&server).disputes_since(DateTime::UNIX_EPOCH).await.unwrap();
    let statuses: Vec<_> = listing.found.iter().map(|dispute| dispute.status).collect();
    use DisputeStatus::{Inquiry, Opened, Won};
    assert_eq!(statuses, [Inquiry, Opened, Won, Opened, Inquiry]);
    assert_eq!((listing.unread, listing.is_cut), (vec!["dp_6".to_owned()], false));
    // A compatible service without disputes has none.
    let bare = MockServer::start().await;
    assert_eq!(client_of(&bare).disputes_since(DateTime::UNIX_EPOCH).await, Ok(ProcessorListing::of(Vec::new())));
}

struct Expanded;

impl Match for Expanded {
    fn matches(&self, request: &Request) -> bool {
        let query: Vec<_> = request.url.query_pairs().collect();
        query.iter().any(|(name, value)| name == "expand[]" && value == "data.payment_intent")
            && query.iter().any(|(name, value)| name == "created[gt]" && value == "99")
    }
}

#[tokio::test]
async fn payments_are_listed_by_creation_time_including_foreign_ones() {
    let server = MockServer::start().await;
    let charge = |id: &str, status: &str, intent: Value| json!({"id": id, "amount": 2500, "currency": "eur", "status": status, "created": 100, "payment_intent": intent});
    let mut foreign = intent("pi_2", "succeeded");
    foreign["metadata"] = json!({"payment_id": "'; drop table payment"});
    let charges = [
        charge("ch_1", "succeeded", intent("pi_1", "succeeded")),
        charge("ch_2", "failed", intent("pi_3", "requires_payment_method")),
        charge("ch_3", "succeeded", foreign),
        charge("ch_4", "succeeded", Value::Null),
    ];
    Mock::given(path("/v1/charges"))
        .and(Expanded)
        .respond_with(ResponseTemplate::new(200).set_body_json(list(&charges, false)))
        .mount(&server)
        .await;
    let since = DateTime::from_timestamp(100, 0).unwrap();
    let listing = client(&server, CheckoutPage::Ours).payments_since(since).await.unwrap();
    let found: Vec<_> = listing.found.iter().map(|paid| (paid.processor_id.as_str(), paid.payment_id)).collect();
    assert_eq!(found, [("pi_1", Some(PAYMENT)), ("pi_2", None), ("ch_4", None)]);
}

/// An endless list, newest first.
struct Endless;

impl wiremock::Respond for Endless {
    fn respond(&self, request: &Request) -> ResponseTemplate {
        let after = request.url.query_pairs().find(|(name, _)| name == "starting_after");
        let n: i64 = after.map_or(0, |(_, id)| id.strip_prefix("re_").unwrap().parse().unwrap());
        let mut refund =
            json!({"id": format!("re_{}", n + 1), "amount": 1, "currency": "eur", "payment_intent": "pi_1"});
        refund["created"] = (1_700_000_000 - n).into();
        if n == 1 {
            refund["amount"] = "one".into();
        }
        ResponseTemplate::new(200).set_body_json(list(&[refund], true))
    }
}

#[tokio::test]
async fn endless_list_and_unreadable_entries_do_not_hide_the_rest() {
    let server = MockServer::start().await;
    Mock::given(path("/v1/refunds")).respond_with(Endless).mount(&server).await;
    let client = client(&server, CheckoutPage::Ours);
    let listing = client.refunds_since(DateTime::UNIX_EPOCH).await.unwrap();
    assert_eq!((listing.found.len(), listing.unread, listing.is_cut), (999, vec!["re_2".to_owned()], true));
    // Whether a refund already exists is another question: an incomplete list does not answer it.
    assert!(matches!(client.refunds_of("pi_1").await, Err(ProcessorError::Later(_))));
}

#[tokio::test]
async fn uncertain_outcome_is_distinguished_from_a_failed_request() {
    let error_body = |text: &str| json!({"error": {"message": text, "type": "api_error"}});
    let (refused, later, unknown) = ("refused", "later", "unknown");
    let kind = |error: &ProcessorError| match error {
        ProcessorError::Refused { .. } => refused,
        ProcessorError::Later(_) => later,
        ProcessorError::Unknown(_) => unknown,
    };
    for (status, of_post, of_get) in [
        (400, refused, refused),
        (402, refused, refused),
        (401, later, later),
        (403, later, later),
        (429, later, later),
        (409, unknown, later),
        // A proxy that timed out, and a failed request of the processor itself.
        (408, unknown, later),
        (424, unknown, later),
        (425, unknown, later),
        (302, unknown, later),
        (500, unknown, later),
        (503, unknown, later),
    ] {
        let server = MockServer::start().await;
        let answer = ResponseTemplate::new(status).set_body_json(error_body("no\nline of its own"));
        Mock::given(wiremock::matchers::any()).respond_with(answer).mount(&server).await;
        let client = client(&server, CheckoutPage::Ours);
        let posted = client.checkout(&wanted()).await.unwrap_err();
        let got = client.payment("pi_1").await.unwrap_err();
        assert_eq!((kind(&posted), kind(&got)), (of_post, of_get), "{status}");
        assert!(
            posted.to_string().contains("noline of its own") && !posted.to_string().contains("sk_test"),
            "{posted}"
        );
    }
    // Carried out, but in a response that cannot be understood, or is too large.
    for body in ["{}".to_owned(), "no json".to_owned(), " ".repeat(5 * 1024 * 1024)] {
        let server = MockServer::start().await;
        let answer = ResponseTemplate::new(200).set_body_string(body);
        Mock::given(wiremock::matchers::any()).respond_with(answer).mount(&server).await;
        let error = client(&server, CheckoutPage::Ours).checkout(&wanted()).await.unwrap_err();
        assert_eq!(kind(&error), unknown, "{error}");
    }
    // No server there: nothing was carried out.
    let client = client_at("http://127.0.0.1:1", CheckoutPage::Ours);
    assert_eq!(kind(&client.checkout(&wanted()).await.unwrap_err()), later);
}

#[test]
fn processor_without_tls_is_refused() {
    crate::testing::install_crypto();
    for address in ["http://api.stripe.example", "ftp://api.stripe.example", "api.stripe.example", ""] {
        let settings = StripeSettings {
            api_base: address.into(),
            secret_key: "sk_test_0123456789".into(),
            checkout: CheckoutPage::Ours,
            authorities_pem: None,
        };
        assert!(matches!(Stripe::new(settings), Err(StripeError::Address(_))), "{address}");
    }
}
