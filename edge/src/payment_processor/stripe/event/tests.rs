//! Events in Stripe's shape, and what each of them tells.

use super::*;
use crate::payment_processor::{DisputeStatus, ProcessorRefundStatus};
use domain::PaymentId;
use domain::money::Currency;
use domain::payment::Presentment;
use serde_json::json;
use uuid::Uuid;

const OURS: Uuid = Uuid::from_u128(7);

fn event(event_type: &str, object: Value) -> StripeEvent {
    let event = json!({
        "id": "evt_1", "object": "event", "api_version": "2024-06-20", "created": 1_700_000_000, "livemode": false,
        "pending_webhooks": 1, "request": { "id": null, "idempotency_key": null }, "type": event_type, "data": { "object": object },
    });
    StripeEvent::read(event.to_string().as_bytes()).unwrap()
}

fn update(event_type: &str, object: Value) -> ProcessorUpdate {
    event(event_type, object).update().unwrap()
}

fn intent(status: &str) -> Value {
    json!({
        "id": "pi_1", "object": "payment_intent", "amount": 5_000, "amount_received": 5_000, "currency": "eur", "status": status,
        "latest_charge": "ch_1", "metadata": { "payment_id": OURS.to_string() }, "shipping": { "name": "Ann" },
    })
}

fn session(status: &str, payment_status: &str) -> Value {
    json!({
        "id": "cs_1", "object": "checkout.session", "amount_total": 5_000, "currency": "eur", "status": status,
        "payment_status": payment_status, "payment_intent": "pi_1", "client_reference_id": OURS.to_string(),
        "metadata": { "payment_id": OURS.to_string() },
    })
}

fn refund(status: &str) -> Value {
    json!({
        "id": "re_1", "object": "refund", "amount": 500, "currency": "eur", "status": status, "charge": "ch_1",
        "payment_intent": "pi_1", "metadata": {},
    })
}

fn dispute(status: &str) -> Value {
    json!({
        "id": "dp_1", "object": "dispute", "amount": 5_000, "currency": "eur", "status": status, "charge": "ch_1",
        "payment_intent": "pi_1", "evidence": { "customer_name": "Ann" },
    })
}

fn payment_update(processor_id: &str, status: ProcessorPaymentStatus) -> ProcessorUpdate {
    let currency = Currency::parse("EUR").unwrap();
    let payment_id = Some(PaymentId(OURS));
    ProcessorUpdate::Payment(ProcessorPayment {
        processor_id: processor_id.into(),
        payment_id,
        amount_minor: 5_000,
        currency,
        presented: None,
        status,
    })
}

/// Sessions of Adaptive Pricing, created before and after 2025-03-31.
#[test]
fn converted_session_is_read_in_the_terms_of_its_order() {
    let session = |more: Value| {
        let mut session = json!({
            "id": "cs_1", "object": "checkout.session", "status": "complete", "payment_status": "paid",
            "payment_intent": "pi_1", "metadata": { "payment_id": OURS.to_string() },
        });
        session.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        update("checkout.session.completed", session)
    };
    let presented =
        |is_charged| Presentment { amount_minor: 4_200, currency: Currency::parse("GBP").unwrap(), is_charged };
    let expected = |presented| {
        let ProcessorUpdate::Payment(order) = payment_update("pi_1", ProcessorPaymentStatus::Paid { charge_id: None })
        else {
            unreachable!("it is a payment")
        };
        ProcessorUpdate::Payment(ProcessorPayment { presented, ..order })
    };
    let before = json!({
        "amount_total": 4_200, "currency": "gbp",
        "currency_conversion": {
            "amount_subtotal": 5_000, "amount_total": 5_000, "fx_rate": "0.84", "source_currency": "eur",
        },
    });
    assert_eq!(session(before), expected(Some(presented(true))));
    let details = json!({ "presentment_amount": 4_200, "presentment_currency": "gbp" });
    let after = json!({ "amount_total": 5_000, "currency": "eur", "presentment_details": details });
    assert_eq!(session(after), expected(Some(presented(false))));
    let same = json!({ "presentment_amount": 5_000, "presentment_currency": "eur" });
    let unconverted = json!({
        "amount_total": 5_000, "currency": "eur", "currency_conversion": null, "presentment_details": same,
    });
    assert_eq!(session(unconverted), expected(None));
}

#[test]
fn payment_event_carries_the_state_of_that_time() {
    let paid = || ProcessorPaymentStatus::Paid { charge_id: Some("ch_1".into()) };
    assert_eq!(update("payment_intent.succeeded", intent("succeeded")), payment_update("pi_1", paid()));
    assert_eq!(
        update("payment_intent.processing", intent("processing")),
        payment_update("pi_1", ProcessorPaymentStatus::Processing)
    );
    assert_eq!(
        update("payment_intent.canceled", intent("canceled")),
        payment_update("pi_1", ProcessorPaymentStatus::Canceled)
    );
    let mut declined = intent("requires_payment_method");
    let failed = |intent| update("payment_intent.payment_failed", intent);
    assert_eq!(
        failed(declined.clone()),
        payment_update("pi_1", ProcessorPaymentStatus::Declined { why: "declined".into() })
    );
    declined["last_payment_error"] = json!({ "code": "card_declined", "message": "Ann's card was declined." });
    assert_eq!(
        failed(declined),
        payment_update("pi_1", ProcessorPaymentStatus::Declined { why: "card_declined".into() })
    );
}

#[test]
fn checkout_is_paid_under_its_intent_and_ended_under_its_own_id() {
    let session_update = |event_type: &str, object| update(&format!("checkout.session.{event_type}"), object);
    let paid = || ProcessorPaymentStatus::Paid { charge_id: None };
    assert_eq!(session_update("completed", session("complete", "paid")), payment_update("pi_1", paid()));
    assert_eq!(session_update("async_payment_succeeded", session("complete", "paid")), payment_update("pi_1", paid()));
    // A bank takes days.
    assert_eq!(
        session_update("completed", session("complete", "unpaid")),
        payment_update("cs_1", ProcessorPaymentStatus::Processing)
    );
    assert_eq!(
        session_update("async_payment_failed", session("complete", "unpaid")),
        payment_update("cs_1", ProcessorPaymentStatus::Canceled)
    );
    assert_eq!(
        session_update("expired", session("expired", "unpaid")),
        payment_update("cs_1", ProcessorPaymentStatus::Expired)
    );
}

#[test]
fn refunds_are_read_from_the_event_or_looked_up() {
    let currency = Currency::parse("EUR").unwrap();
    let refund_update = |status| {
        ProcessorUpdate::Refunds(vec![ProcessorRefundRecord {
            processor_refund_id: "re_1".into(),
            refund_id: None,
            of: Some("pi_1".into()),
            amount_minor: 500,
            currency: currency.clone(),
            status,
        }])
    };
    assert_eq!(update("refund.created", refund("pending")), refund_update(ProcessorRefundStatus::Pending));
    assert_eq!(update("refund.updated", refund("succeeded")), refund_update(ProcessorRefundStatus::Succeeded));
    assert_eq!(update("charge.refund.updated", refund("succeeded")), refund_update(ProcessorRefundStatus::Succeeded));
    assert_eq!(update("refund.failed", refund("failed")), refund_update(ProcessorRefundStatus::Failed));
    let mut charge = json!({ "id": "ch_1", "object": "charge", "amount_refunded": 500, "payment_intent": "pi_1" });
    assert_eq!(update("charge.refunded", charge.clone()), ProcessorUpdate::RefundsOf("pi_1".into()));
    charge["refunds"] = json!({ "object": "list", "has_more": false, "data": [refund("succeeded")] });
    assert_eq!(update("charge.refunded", charge.clone()), refund_update(ProcessorRefundStatus::Succeeded));
    charge["refunds"]["has_more"] = json!(true);
    assert_eq!(update("charge.refunded", charge.clone()), ProcessorUpdate::RefundsOf("pi_1".into()));
    // One that was made without an intent.
    charge["payment_intent"] = Value::Null;
    assert_eq!(update("charge.refunded", charge), ProcessorUpdate::Refunds(Vec::new()));
}

#[test]
fn dispute_status_follows_the_money() {
    for (event_type, status, expected) in [
        ("created", "warning_needs_response", DisputeStatus::Inquiry),
        ("updated", "warning_under_review", DisputeStatus::Inquiry),
        ("closed", "warning_closed", DisputeStatus::Inquiry),
        ("closed", "prevented", DisputeStatus::Inquiry),
        ("created", "needs_response", DisputeStatus::Opened),
        ("funds_withdrawn", "needs_response", DisputeStatus::Opened),
        ("updated", "under_review", DisputeStatus::Opened),
        ("closed", "lost", DisputeStatus::Opened),
        ("closed", "won", DisputeStatus::Won),
        ("funds_reinstated", "won", DisputeStatus::Won),
    ] {
        let ProcessorUpdate::Dispute(dispute) = update(&format!("charge.dispute.{event_type}"), dispute(status)) else {
            panic!()
        };
        assert_eq!(
            (dispute.status, dispute.of.as_deref(), dispute.amount_minor),
            (expected, Some("pi_1"), 5_000),
            "{event_type}"
        );
    }
}

/// Whether the update is about a payment of ours.
fn is_ours(update: &ProcessorUpdate) -> bool {
    matches!(update, ProcessorUpdate::Payment(ProcessorPayment { payment_id: Some(_), .. }))
}

#[test]
fn objects_of_another_application_of_the_account_are_not_ours() {
    let changed = |base: &Value, change: Value| {
        let mut object = base.clone();
        object.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        object
    };
    let (intent, session) = (intent("succeeded"), session("complete", "paid"));
    let id = Uuid::from_u128(8).to_string();
    for (event_type, object) in [
        // It sets up a payment method.
        (
            "checkout.session.completed",
            json!({ "id": "cs_2", "mode": "setup", "amount_total": null, "currency": null, "status": "complete",
                "payment_status": "no_payment_required", "setup_intent": "seti_1", "payment_intent": null, "metadata": {} }),
        ),
        ("checkout.session.expired", json!({ "id": "cs_2", "mode": "setup", "payment_status": "unpaid" })),
        ("checkout.session.async_payment_failed", json!({ "id": "cs_2", "payment_status": "unpaid" })),
        ("checkout.session.completed", changed(&session, json!({ "client_reference_id": id, "metadata": {} }))),
        (
            "checkout.session.completed",
            changed(&session, json!({ "client_reference_id": id, "metadata": { "order": id } })),
        ),
        ("payment_intent.succeeded", changed(&intent, json!({ "currency": "usdc", "metadata": {} }))),
        ("payment_intent.payment_failed", changed(&intent, json!({ "currency": "usdc", "metadata": null }))),
    ] {
        let update = event(event_type, object.clone()).update().unwrap_or_else(|error| panic!("{object}: {error}"));
        assert!(!is_ours(&update), "{event_type} {object}: {update:?}");
    }
    assert!(is_ours(&update("checkout.session.completed", session)));
}

#[test]
fn other_event_types_have_no_effect() {
    for event_type in ["customer.created", "payment_intent.created", "charge.succeeded", "payout.paid", "x"] {
        assert!(!event(event_type, json!({})).has_effect());
        assert_eq!(update(event_type, json!({ "anything": [1, 2] })), ProcessorUpdate::Nothing);
    }
}

#[test]
fn unexpected_object_is_reported_without_its_content() {
    for (event_type, object) in [
        ("payment_intent.succeeded", json!({ "id": "pi_1", "name": "Ann" })),
        ("payment_intent.succeeded", json!({ "id": "pi_1", "amount": "5000", "currency": "eur", "status": "Ann" })),
        ("payment_intent.succeeded", json!({ "id": "pi_1", "amount": 1e300, "currency": "eur", "status": "Ann" })),
        (
            "checkout.session.completed",
            json!({ "id": "cs_1", "payment_status": "paid", "name": "Ann", "metadata": { "payment_id": OURS.to_string() } }),
        ),
        ("refund.created", json!({ "id": "re_1", "amount": 1, "currency": "Ann is no currency" })),
        ("charge.dispute.created", json!({ "name": "Ann" })),
        ("charge.dispute.updated", dispute("Ann's own")),
        ("charge.refunded", json!({ "id": "ch_1", "payment_intent": 5, "name": "Ann" })),
    ] {
        let error = event(event_type, object).update().unwrap_err().to_string();
        assert!(!error.contains("Ann"), "{error}");
    }
}

#[test]
fn event_digest_is_stable_across_deliveries() {
    let first = event("refund.created", refund("pending")).digest();
    let repeated = r#"{"type": "refund.created", "pending_webhooks": 3, "id": "evt_1", "data": {"object": {"status": "pending",
        "payment_intent": "pi_1", "metadata": {}, "object": "refund", "id": "re_1", "amount": 500, "currency": "eur", "charge": "ch_1"}}}"#;
    assert_eq!(StripeEvent::read(repeated.as_bytes()).unwrap().digest(), first);
    assert_ne!(event("refund.updated", refund("pending")).digest(), first);
    assert_ne!(event("refund.created", refund("succeeded")).digest(), first);
    let of = event("refund.created", refund("pending"));
    assert_eq!((of.object_id().as_deref(), of.occurred_at.unwrap().timestamp()), (Some("re_1"), 1_700_000_000));
}

#[test]
fn body_that_is_not_an_event_is_refused() {
    let whole = json!({ "id": "evt_1", "object": "event", "type": "a.b", "data": { "object": {} } });
    let without = |name: &str| {
        let mut event = whole.clone();
        event.as_object_mut().unwrap().remove(name);
        event
    };
    let with = |name: &str, value: Value| {
        let mut event = whole.clone();
        event[name] = value;
        event
    };
    assert!(StripeEvent::read(whole.to_string().as_bytes()).is_ok());
    for wrong in [
        without("id"),
        without("type"),
        without("data"),
        with("id", json!("evt 1")),
        with("id", json!("e".repeat(256))),
        with("id", json!("evt_\u{0}")),
        with("type", json!("")),
        with("type", json!("Ann's\n")),
        with("type", json!("a".repeat(101))),
        with("object", json!("v2.core.event")),
        with("data", json!({ "object": [] })),
        with("data", json!({ "object": null })),
        json!([]),
        json!(null),
    ] {
        assert!(StripeEvent::read(wrong.to_string().as_bytes()).is_err(), "{wrong}");
    }
    for wrong in ["", "{", "\u{feff}{}", "{\"id\":"] {
        assert!(StripeEvent::read(wrong.as_bytes()).is_err(), "{wrong}");
    }
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(StripeEvent::read(deep.as_bytes()).is_err());
}
