//! The payment processor of a cluster (localstripe), and payments at it.

use super::client::{ApiResponse, send_request};
use super::fake_processor::signature_under;
use super::flaky_link::FlakyLink;
use super::{TestCluster, id_of};
use domain::payment::Payment;
use local_servers::balancer::Balancer;
use local_servers::payment_processor::{CARD, PaymentProcessor, intent_in};
use local_servers::pki::Authority;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use supervisors::dev::replica::Replica;
use uuid::Uuid;

/// Longer than the backoff of a payment's queries at the processor: 10, 20, 40 and 80 seconds, and the time of each of them.
pub const RESEND_TIMEOUT: Duration = Duration::from_secs(210);

/// The site to which a payer returns.
const SHOP: &str = "https://shop.example";

/// A payment processor, and the replicas' link to it.
pub struct LinkedProcessor {
    pub processor: PaymentProcessor,
    pub link: FlakyLink,
    /// The balancer to which it sends webhooks.
    webhooks: Option<Balancer>,
}

/// A payment that its payer has started.
#[derive(Clone, Debug)]
pub struct StartedPayment {
    pub id: Uuid,
    /// Its payment intent at the processor.
    pub intent: String,
}

/// A direct client of the processor, which also sends webhooks in its name. It can be moved into a task of its own while faults are
/// injected.
#[derive(Clone)]
pub struct ProcessorClient {
    http: reqwest::Client,
    processor: String,
    secret_key: SecretString,
    webhook_secret: SecretString,
    /// The webhook URL of each replica.
    webhooks: Vec<String>,
}

impl LinkedProcessor {
    pub(super) async fn start(folder: &Path, authority: &Authority) -> anyhow::Result<Self> {
        let log = folder.with_extension("txt");
        let processor = PaymentProcessor::start(folder, &log, authority.certificate_path()).await?;
        let link = FlakyLink::to(processor.address()).await?;
        Ok(Self { processor, link, webhooks: None })
    }

    /// Registers the replicas, in turns, as the receivers of its webhooks.
    pub(super) async fn register_webhooks(&mut self, replicas: &[Replica]) -> anyhow::Result<()> {
        let balancer = Balancer::start(replicas.iter().map(|replica| replica.listens().webhook).collect()).await?;
        self.processor
            .send_webhooks_to(&format!("https://{}{}", balancer.address(), edge::payment_webhook::PATH))
            .await?;
        self.webhooks = Some(balancer);
        Ok(())
    }

    /// The variables of replicas. They reach it over the link; browsers do not.
    pub(super) fn variables(&self) -> Vec<(String, String)> {
        let line = ("SVC_PAYMENTS_API_BASE".to_owned(), format!("http://{}", self.link.address()));
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

impl TestCluster {
    /// The payment processor and the link to it, if the cluster has one.
    pub fn payments(&mut self) -> &mut LinkedProcessor {
        self.payments.as_mut().expect("the cluster has a processor")
    }

    /// The payment processor, if the cluster has one.
    #[must_use]
    pub fn processor(&self) -> &PaymentProcessor {
        &self.payments.as_ref().expect("the cluster has a processor").processor
    }

    /// A direct client of the processor.
    #[must_use]
    pub fn processor_client(&self) -> ProcessorClient {
        let processor = self.processor();
        ProcessorClient {
            http: self.admin.http().clone(),
            processor: processor.url(),
            secret_key: processor.secret_key().clone(),
            webhook_secret: processor.webhook_secret().clone(),
            webhooks: self.replicas.iter().map(supervisors::dev::replica::Replica::webhook_url).collect(),
        }
    }

    /// Starts a payment of `user`.
    pub async fn begin_payment(&mut self, amount_minor: i64) -> StartedPayment {
        let wanted = checkout(amount_minor);
        let begun = self.user.post("/api/v1/billing/checkout-sessions", &wanted).await.created();
        let url = begun["url"].as_str().expect("a payment has a page");
        self.register_secret("a client secret", url.split_once('#').expect("the page is ours").1);
        StartedPayment { id: id_of(&begun), intent: intent_in(url).expect("the page is of an intent") }
    }

    /// Pays it with a valid card.
    pub async fn pay(&self, begun: &StartedPayment) {
        self.processor().pay(&begun.intent, CARD).await.expect("the processor takes the card");
    }

    /// Tops up the account of `user`.
    pub async fn top_up(&mut self, amount_minor: i64) -> StartedPayment {
        let begun = self.begin_payment(amount_minor).await;
        self.pay(&begun).await;
        self.expect_payment(&begun, "deposited").await;
        begun
    }

    /// Waits until the payment is in this state, as its payer sees it.
    pub async fn expect_payment(&self, begun: &StartedPayment, state: &str) -> Value {
        let path = format!("/api/v1/billing/payments/{}", begun.id);
        let what = format!("the payment is {state}");
        self.user.wait_within(RESEND_TIMEOUT, &path, &what, |payment| payment["state"] == state).await
    }

    /// The balance of the payer's account, in micro-units.
    pub async fn balance_micro(&self) -> i64 {
        let account = self.user.get("/api/v1/billing/balance").await.ok();
        account["balance_micro"].as_i64().expect("an account has a balance")
    }

    /// A payment as it is stored.
    pub async fn stored_payment(&self, id: Uuid) -> Option<Payment> {
        let entity = domain::EntityRef { kind: domain::EntityKind::Payment, id };
        let snapshot = persistence::Reads::new(self.pool.clone()).snapshot(entity).await.expect("the database answers");
        snapshot.map(|snapshot| serde_json::from_str(&snapshot.body).expect("a payment can be read"))
    }
}

impl ProcessorClient {
    /// Pays an intent with a valid card, as a browser does.
    pub async fn pay(&self, intent: &str) -> ApiResponse {
        let path = format!("/v1/payment_intents/{intent}");
        self.post(&path, &[("payment_method", CARD)]).await;
        self.post(&format!("{path}/confirm"), &[]).await
    }

    async fn post(&self, path: &str, form: &[(&str, &str)]) -> ApiResponse {
        let request = self.http.post(format!("{}{path}", self.processor)).form(form);
        send_request(request.bearer_auth(self.secret_key.expose_secret())).await.expect("the processor answers")
    }

    /// All objects of a kind at the processor, page by page.
    pub async fn all(&self, kind: &str) -> Vec<Value> {
        let mut objects: Vec<Value> = Vec::new();
        loop {
            let after = objects.last().and_then(|last| last["id"].as_str());
            let after = after.map(|id| format!("&starting_after={id}")).unwrap_or_default();
            let request = self.http.get(format!("{}/v1/{kind}?limit=100{after}", self.processor));
            let page = send_request(request.bearer_auth(self.secret_key.expose_secret()))
                .await
                .expect("the processor answers")
                .ok();
            objects.extend(page["data"].as_array().expect("a list has objects").iter().cloned());
            if page["has_more"] != true {
                return objects;
            }
        }
    }

    /// The number of replicas that receive webhooks.
    #[must_use]
    pub const fn replicas(&self) -> usize {
        self.webhooks.len()
    }

    /// Sends a webhook to a replica in the processor's name, with a valid signature.
    ///
    /// # Errors
    /// If no complete response is received.
    pub async fn send_webhook(&self, replica: usize, body: &str) -> Result<ApiResponse, reqwest::Error> {
        let signature = signature_under(self.webhook_secret.expose_secret(), "v1", 0, body);
        self.send_webhook_with_signature(replica, &signature, body).await
    }

    /// As [`ProcessorClient::send_webhook`], with any signature; see [`ProcessorClient::signature`].
    ///
    /// # Errors
    /// If no complete response is received.
    pub async fn send_webhook_with_signature(
        &self,
        replica: usize,
        signature: &str,
        body: &str,
    ) -> Result<ApiResponse, reqwest::Error> {
        let request = self.http.post(&self.webhooks[replica]).header("content-type", "application/json");
        send_request(request.header("stripe-signature", signature).body(body.to_owned())).await
    }

    /// The signature header of a body under the processor's secret.
    #[must_use]
    pub fn signature(&self, scheme: &str, seconds_ago: i64, body: &str) -> String {
        signature_under(self.webhook_secret.expose_secret(), scheme, seconds_ago, body)
    }
}

/// The body of the request that starts a payment.
#[must_use]
pub fn checkout(amount_minor: i64) -> Value {
    json!({ "amount_minor": amount_minor, "success_url": format!("{SHOP}/paid"), "cancel_url": format!("{SHOP}/later") })
}
