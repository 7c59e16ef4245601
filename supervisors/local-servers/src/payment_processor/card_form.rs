//! The card form of a development environment: the processor's script, and the part of its API that a browser reaches with the publishable
//! key.
//!
//! Stripe's script sends the card, the publishable key and the payment's client secret to `POST /v1/payment_intents/{id}/confirm`.
//! localstripe takes a confirmation from the holder of its secret key alone, and its script sends no card: a person cannot pay there. This
//! server has the same request for two test cards, and makes the payment at localstripe with the secret key. No card's number is typed
//! anywhere.
//!
//! Plain HTTP on loopback, which browsers load into a page of HTTPS too. A replica uses it where `SVC_PAYMENTS_SCRIPT_URL` names it.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::rejection::FormRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Form, Json, Router};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex;

use super::{CARD, PaymentProcessor, ProcessorApi};
use crate::settings::SavedSettings;

/// The script, which has the shape of Stripe.js.
const SCRIPT: &str = include_str!("card_form.js");
const SCRIPT_PATH: &str = "/v3/";
/// A card whose bank asks its holder, who does not answer: the payment fails, and may be tried again. By Stripe's name of it.
const DECLINED_CARD: &str = "pm_card_authenticationRequired";
/// The same card for localstripe, which does not know this name.
const DECLINED_CARD_FIELDS: [(&str, &str); 5] = [
    ("type", "card"),
    ("card[number]", "4000002760003184"),
    ("card[exp_month]", "12"),
    ("card[exp_year]", "2030"),
    ("card[cvc]", "123"),
];
const MAX_BODY_BYTES: usize = 4096;
const MAX_ID_LEN: usize = 255;

/// A running card form. Dropping it closes it.
#[derive(Debug)]
pub struct CardForm {
    address: SocketAddr,
    server: tokio::task::JoinHandle<()>,
}

struct Payments {
    processor: ProcessorApi,
    publishable_key: String,
    /// The origin of the payment page.
    page: HeaderValue,
    /// One confirmation at a time, since localstripe makes a charge for each.
    confirming: Mutex<()>,
}

/// The fields of Stripe's request that are used here.
#[derive(Deserialize)]
struct Confirmation {
    key: String,
    client_secret: SecretString,
    payment_method: String,
}

/// Why a confirmation is refused, for the payer.
struct Refusal(StatusCode, String);

impl CardForm {
    /// Starts the form for the payment page of the service at this URL, on the port of an earlier start, where there was one.
    pub async fn restore(processor: &PaymentProcessor, page_url: &str, saved: &SavedSettings) -> anyhow::Result<Self> {
        let port = saved.port("the card form's port")?;
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.number)).await?;
        let address = listener.local_addr()?;
        let payments = Payments {
            processor: processor.api(),
            publishable_key: processor.publishable_key().to_owned(),
            page: HeaderValue::from_str(&reqwest::Url::parse(page_url)?.origin().ascii_serialization())?,
            confirming: Mutex::new(()),
        };
        let routes = Router::new()
            .route(SCRIPT_PATH, get(script))
            .route("/v1/payment_intents/{id}/confirm", post(confirm))
            .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
            .with_state(Arc::new(payments));
        let server = tokio::spawn(async move {
            // It ends when the listener fails, which one on loopback does not.
            let _ = axum::serve(listener, routes).await;
        });
        Ok(Self { address, server })
    }

    /// The address of its script.
    pub fn script_url(&self) -> String {
        format!("http://{}{SCRIPT_PATH}", self.address)
    }
}

impl Drop for CardForm {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn script() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/javascript; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, SCRIPT).into_response()
}

async fn confirm(
    State(payments): State<Arc<Payments>>,
    Path(id): Path<String>,
    confirmation: Result<Form<Confirmation>, FormRejection>,
) -> Response {
    let confirmed = match confirmation {
        Ok(Form(confirmation)) => payments.confirm(&id, &confirmation).await,
        Err(rejection) => Err(Refusal(rejection.status(), rejection.body_text())),
    };
    let answer = match confirmed {
        Ok(intent) => Json(intent).into_response(),
        Err(Refusal(status, message)) => (status, Json(json!({ "error": { "message": message } }))).into_response(),
    };
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_ORIGIN, payments.page.clone()),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    (headers, answer).into_response()
}

impl Payments {
    /// Confirms a payment with a test card. A repetition after a success has no effect.
    async fn confirm(&self, id: &str, confirmation: &Confirmation) -> Result<Value, Refusal> {
        let refusal = |status, message: &str| Err(Refusal(status, message.to_owned()));
        if confirmation.key != self.publishable_key {
            return refusal(StatusCode::UNAUTHORIZED, "The publishable key is another one.");
        }
        if ![CARD, DECLINED_CARD].contains(&confirmation.payment_method.as_str()) {
            return refusal(StatusCode::BAD_REQUEST, "There is no such test card.");
        }
        let is_id = id.len() <= MAX_ID_LEN
            && id.strip_prefix("pi_").is_some_and(|rest| rest.chars().all(|letter| letter.is_ascii_alphanumeric()));
        if !is_id {
            return refusal(StatusCode::NOT_FOUND, "There is no such payment.");
        }
        let path = format!("/v1/payment_intents/{id}");
        let _one = self.confirming.lock().await;
        let intent = self.processor.get(&path).await.map_err(|error| processor_failure(&error))?;
        let secret = confirmation.client_secret.expose_secret();
        if intent["client_secret"].as_str().map(Sha256::digest) != Some(Sha256::digest(secret)) {
            return refusal(StatusCode::UNAUTHORIZED, "The client secret is of another payment.");
        }
        match intent["status"].as_str() {
            Some("succeeded") => return Ok(public_part(&intent)),
            Some("canceled") => return refusal(StatusCode::BAD_REQUEST, "This payment was canceled."),
            _ => {}
        }
        let is_interrupted = intent["status"] == "requires_action";
        self.pay(&path, confirmation, is_interrupted).await.map_err(|error| processor_failure(&error))
    }

    async fn pay(&self, path: &str, confirmation: &Confirmation, is_interrupted: bool) -> anyhow::Result<Value> {
        let secret = confirmation.client_secret.expose_secret();
        if is_interrupted {
            // The browser left in the middle of a payment with the declined card.
            self.decline(path, secret).await?;
        }
        let is_declined = confirmation.payment_method == DECLINED_CARD;
        let card = if is_declined {
            self.processor.post("/v1/payment_methods", &DECLINED_CARD_FIELDS).await?["id"].take()
        } else {
            json!(CARD)
        };
        self.processor.post(path, &[("payment_method", card.as_str().unwrap_or_default())]).await?;
        let confirmed = self.processor.post(&format!("{path}/confirm"), &[]).await?;
        let intent = if is_declined { self.decline(path, secret).await? } else { confirmed };
        Ok(public_part(&intent))
    }

    /// The card's holder does not confirm the payment to the bank.
    async fn decline(&self, path: &str, client_secret: &str) -> anyhow::Result<Value> {
        let form = [("client_secret", client_secret), ("success", "false")];
        self.processor.post(&format!("{path}/_authenticate"), &form).await
    }
}

fn processor_failure(error: &anyhow::Error) -> Refusal {
    Refusal(StatusCode::BAD_GATEWAY, format!("{error:#}"))
}

/// What of an intent the script of the page uses.
fn public_part(intent: &Value) -> Value {
    json!({ "id": intent["id"], "status": intent["status"], "last_payment_error": intent["last_payment_error"] })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "https://console.example";

    struct Running {
        processor: PaymentProcessor,
        form: CardForm,
        _folder: tempfile::TempDir,
    }

    impl Running {
        async fn start() -> Self {
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
            let folder = tempfile::tempdir().unwrap();
            let log = folder.path().join("localstripe.log");
            let state = folder.path().join("localstripe");
            let processor = PaymentProcessor::start(&state, &log, std::path::Path::new("/dev/null")).await.unwrap();
            let url = format!("{PAGE}/console/");
            let form = CardForm::restore(&processor, &url, &SavedSettings::ephemeral()).await.unwrap();
            Self { processor, form, _folder: folder }
        }

        /// An open payment: its id and its client secret.
        async fn payment(&self) -> (String, String) {
            let fields = [("amount", "2500"), ("currency", "usd")];
            let intent = self.processor.post("/v1/payment_intents", &fields).await.unwrap();
            let text = |name: &str| intent[name].as_str().unwrap().to_owned();
            (text("id"), text("client_secret"))
        }

        async fn confirm(&self, id: &str, [key, client_secret, card]: [&str; 3]) -> (u16, Value) {
            let at = format!("http://{}/v1/payment_intents/{id}/confirm", self.form.address);
            let fields = [("key", key), ("client_secret", client_secret), ("payment_method", card)];
            let answer = reqwest::Client::new().post(at).form(&fields).send().await.unwrap();
            assert_eq!(answer.headers()[header::ACCESS_CONTROL_ALLOW_ORIGIN], PAGE);
            (answer.status().as_u16(), answer.json().await.unwrap())
        }

        async fn charges(&self) -> usize {
            self.processor.get("/v1/charges").await.unwrap()["data"].as_array().unwrap().len()
        }
    }

    #[tokio::test]
    async fn holder_of_the_client_secret_alone_pays_with_a_test_card() {
        let there = Running::start().await;
        let key = there.processor.publishable_key();
        let (id, secret) = there.payment().await;
        let (_, other_secret) = there.payment().await;
        for (fields, expected) in [
            ([key, &other_secret, CARD], 401),
            ([key, "", CARD], 401),
            (["pk_test_another", &secret, CARD], 401),
            ([key, &secret, "pm_card_mastercard"], 400),
        ] {
            let (status, body) = there.confirm(&id, fields).await;
            assert!(status == expected && body["error"]["message"].is_string(), "{fields:?}: {status} {body}");
        }
        // An id is no path at the processor.
        for foreign in [format!("..%2Fpayment_intents%2F{id}"), "ch_1".to_owned()] {
            assert_eq!(there.confirm(&foreign, [key, &secret, CARD]).await.0, 404, "{foreign}");
        }
        assert_eq!(there.charges().await, 0);

        for _ in 0..2 {
            let (status, intent) = there.confirm(&id, [key, &secret, CARD]).await;
            assert_eq!((status, intent["status"].as_str()), (200, Some("succeeded")), "{intent}");
            assert_eq!(intent.get("client_secret"), None, "{intent}");
        }
        assert_eq!(there.charges().await, 1, "a repetition charges nothing");
    }

    #[tokio::test]
    async fn declined_card_charges_nothing_and_the_payment_can_be_tried_again() {
        let there = Running::start().await;
        let key = there.processor.publishable_key();
        let (id, secret) = there.payment().await;
        for _ in 0..2 {
            let (status, intent) = there.confirm(&id, [key, &secret, DECLINED_CARD]).await;
            assert_eq!((status, intent["status"].as_str()), (200, Some("requires_payment_method")), "{intent}");
            assert!(intent["last_payment_error"]["message"].is_string(), "{intent}");
        }
        assert_eq!(there.charges().await, 0);
        // A browser left in the middle of a payment.
        let card = there.processor.post("/v1/payment_methods", &DECLINED_CARD_FIELDS).await.unwrap();
        let path = format!("/v1/payment_intents/{id}");
        there.processor.post(&path, &[("payment_method", card["id"].as_str().unwrap())]).await.unwrap();
        there.processor.post(&format!("{path}/confirm"), &[]).await.unwrap();
        let (status, intent) = there.confirm(&id, [key, &secret, CARD]).await;
        assert_eq!((status, intent["status"].as_str()), (200, Some("succeeded")), "{intent}");

        let (id, secret) = there.payment().await;
        there.processor.post(&format!("/v1/payment_intents/{id}/cancel"), &[]).await.unwrap();
        assert_eq!(there.confirm(&id, [key, &secret, CARD]).await.0, 400, "it is canceled");
    }
}
