//! The payment processor of a world, and people who pay.

use super::client::{Answer, answer_to};
use super::desk::signature_under;
use super::line::Line;
use super::{World, id_of};
use domain::payment::Payment;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use supervisors::dev::balancer::Balancer;
use supervisors::dev::pki::Authority;
use supervisors::dev::processor::{CARD, PaymentProcessor, intent_in};
use supervisors::dev::replica::Replica;
use uuid::Uuid;

/// What nobody tells a payment it asks for after 10, 20, 40 and 80 seconds.
pub const SAID_AGAIN_WITHIN: Duration = Duration::from_secs(150);

/// Where a payer comes back to.
const SHOP: &str = "https://shop.example";

/// A processor, and the replicas' line to it.
pub struct Payments {
    pub processor: PaymentProcessor,
    pub line: Line,
    /// Where its webhooks go.
    webhooks: Option<Balancer>,
}

/// A payment that its payer has begun.
#[derive(Clone, Debug)]
pub struct Begun {
    pub id: Uuid,
    /// What the processor calls it.
    pub intent: String,
}

/// Whoever deals with the processor past us, and speaks in its name: can be taken along into a task of its own while the world is broken.
#[derive(Clone)]
pub struct Outside {
    http: reqwest::Client,
    processor: String,
    secret_key: SecretString,
    webhook_secret: SecretString,
    /// Where each replica takes webhooks in.
    webhooks: Vec<String>,
}

impl Payments {
    pub(super) async fn start(folder: &Path, authority: &Authority) -> anyhow::Result<Self> {
        let log = folder.with_extension("txt");
        let processor = PaymentProcessor::start(folder, &log, authority.certificate_path()).await?;
        let line = Line::to(processor.address()).await?;
        Ok(Self { processor, line, webhooks: None })
    }

    /// Has it tell these replicas, in turns, what happens there.
    pub(super) async fn tell(&mut self, replicas: &[Replica]) -> anyhow::Result<()> {
        let balancer = Balancer::start(replicas.iter().map(|replica| replica.listens().webhook).collect()).await?;
        self.processor.send_webhooks_to(&format!("https://{}{}", balancer.address(), edge::webhook::PATH)).await?;
        self.webhooks = Some(balancer);
        Ok(())
    }

    /// What replicas are told of it. They reach it by the line; browsers do not.
    pub(super) fn variables(&self) -> Vec<(String, String)> {
        let line = ("SVC_PAYMENTS_API_BASE".to_owned(), format!("http://{}", self.line.address()));
        self.processor.variables(super::CURRENCY).into_iter().chain([line]).collect()
    }

    pub(super) fn secrets(&self) -> Vec<(String, String)> {
        [
            ("the processor's secret key", self.processor.secret_key()),
            ("the secret of webhooks", self.processor.webhook_secret()),
        ]
        .map(|(what, secret)| (what.to_owned(), secret.expose_secret().to_owned()))
        .to_vec()
    }
}

impl World {
    /// The payment processor and the line to it, where the plan has one.
    pub fn payments(&mut self) -> &mut Payments {
        self.payments.as_mut().expect("the plan has a processor")
    }

    /// The payment processor, where the plan has one.
    #[must_use]
    pub fn processor(&self) -> &PaymentProcessor {
        &self.payments.as_ref().expect("the plan has a processor").processor
    }

    /// A hold on the processor from outside.
    #[must_use]
    pub fn outside(&self) -> Outside {
        let processor = self.processor();
        Outside {
            http: self.admin.http().clone(),
            processor: processor.url(),
            secret_key: processor.secret_key().clone(),
            webhook_secret: processor.webhook_secret().clone(),
            webhooks: self.replicas.iter().map(supervisors::dev::replica::Replica::webhook_url).collect(),
        }
    }

    /// `user` begins a payment.
    pub async fn begin_payment(&mut self, amount_minor: i64) -> Begun {
        let wanted = checkout(amount_minor);
        let begun = self.user.post("/api/v1/billing/checkout-sessions", &wanted).await.created();
        let url = begun["url"].as_str().expect("a payment has a page");
        self.keep_secret("a client secret", url.split_once('#').expect("the page is ours").1);
        Begun { id: id_of(&begun), intent: intent_in(url).expect("the page is of an intent") }
    }

    /// Pays it with a card that works.
    pub async fn pay(&self, begun: &Begun) {
        self.processor().pay(&begun.intent, CARD).await.expect("the processor takes the card");
    }

    /// `user` pays so much into their account.
    pub async fn top_up(&mut self, amount_minor: i64) -> Begun {
        let begun = self.begin_payment(amount_minor).await;
        self.pay(&begun).await;
        self.expect_payment(&begun, "deposited").await;
        begun
    }

    /// Until the payment is in this state, as its payer sees it.
    pub async fn expect_payment(&self, begun: &Begun, state: &str) -> Value {
        let path = format!("/api/v1/billing/payments/{}", begun.id);
        let what = format!("the payment is {state}");
        self.user.wait_within(SAID_AGAIN_WITHIN, &path, &what, |payment| payment["state"] == state).await
    }

    /// What the payer has in their account, in micro-units.
    pub async fn balance_micro(&self) -> i64 {
        let account = self.user.get("/api/v1/billing/balance").await.ok();
        account["balance_micro"].as_i64().expect("an account has a balance")
    }

    /// A payment as it is stored.
    pub async fn stored_payment(&self, id: Uuid) -> Option<Payment> {
        let entity = domain::EntityRef { kind: domain::Kind::Payment, id };
        let snapshot = persistence::Reads::new(self.pool.clone()).snapshot(entity).await.expect("the database answers");
        snapshot.map(|snapshot| serde_json::from_str(&snapshot.body).expect("a payment can be read"))
    }
}

impl Outside {
    /// Pays an intent with a card that works, as a browser does.
    pub async fn pay(&self, intent: &str) -> Answer {
        let path = format!("/v1/payment_intents/{intent}");
        self.post(&path, &[("payment_method", CARD)]).await;
        self.post(&format!("{path}/confirm"), &[]).await
    }

    async fn post(&self, path: &str, form: &[(&str, &str)]) -> Answer {
        let request = self.http.post(format!("{}{path}", self.processor)).form(form);
        answer_to(request.bearer_auth(self.secret_key.expose_secret())).await.expect("the processor answers")
    }

    /// The processor's own books: all that it has of a kind.
    pub async fn all(&self, kind: &str) -> Vec<Value> {
        const MOST: usize = 100;
        let request = self.http.get(format!("{}/v1/{kind}?limit={MOST}", self.processor));
        let list =
            answer_to(request.bearer_auth(self.secret_key.expose_secret())).await.expect("the processor answers").ok();
        let objects = list["data"].as_array().expect("a list has objects").clone();
        assert!(objects.len() < MOST, "there may be more {kind} than one page has");
        objects
    }

    /// How many replicas take webhooks in.
    #[must_use]
    pub const fn replicas(&self) -> usize {
        self.webhooks.len()
    }

    /// Says it to a replica in the processor's name, under the signature that it would have.
    ///
    /// # Errors
    /// Where no whole answer came.
    pub async fn say(&self, replica: usize, body: &str) -> Result<Answer, reqwest::Error> {
        let signature = signature_under(self.webhook_secret.expose_secret(), "v1", 0, body);
        self.say_under(replica, &signature, body).await
    }

    /// The same under any signature; see [`Outside::signature`].
    ///
    /// # Errors
    /// Where no whole answer came.
    pub async fn say_under(&self, replica: usize, signature: &str, body: &str) -> Result<Answer, reqwest::Error> {
        let request = self.http.post(&self.webhooks[replica]).header("content-type", "application/json");
        answer_to(request.header("stripe-signature", signature).body(body.to_owned())).await
    }

    /// The header for a body, by the processor's own secret.
    #[must_use]
    pub fn signature(&self, scheme: &str, seconds_ago: i64, body: &str) -> String {
        signature_under(self.webhook_secret.expose_secret(), scheme, seconds_ago, body)
    }
}

/// The body that begins a payment.
#[must_use]
pub fn checkout(amount_minor: i64) -> Value {
    json!({ "amount_minor": amount_minor, "success_url": format!("{SHOP}/paid"), "cancel_url": format!("{SHOP}/later") })
}
