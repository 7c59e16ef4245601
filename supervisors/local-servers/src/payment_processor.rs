//! The payment processor: localstripe, a third-party server with Stripe's API (deploy/lib.sh takes it from PyPI).
//!
//! It has PaymentIntents, charges and refunds, and sends each `payment_intent.*` webhook once. It has no Checkout Sessions, so our own
//! page is used with it. Plain HTTP on loopback. Its script confirms no payment with a card of the browser's: [`card_form`] stands in for it.

pub mod card_form;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;

use crate::private_files;
use crate::process::{ChildProcess, Launch, tail};
use crate::settings::SavedSettings;

const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// The unchanged server, on loopback alone, with its state in a file of its own: by default it listens on all addresses, and stores its
/// state in one file in /tmp for all users.
const SERVER: &str = r"
import logging, os, pickle, sys
from aiohttp import web
from localstripe import resources

port, path = int(sys.argv[1]), sys.argv[2]

def dump(store):
    with open(path + '.new', 'wb') as file:
        pickle.dump(dict(store), file)
    os.replace(path + '.new', path)

if os.path.exists(path):
    with open(path, 'rb') as file:
        resources.store.update(pickle.load(file))
resources.Store.dump_to_disk = dump
from localstripe.server import app
logging.basicConfig(level=logging.INFO)
web.run_app(app, host='127.0.0.1', port=port, print=None)
";

/// A card that pays, by Stripe's name of it.
pub const CARD: &str = "pm_card_visa";

/// The variable with the address of the script that the payment page loads.
pub const SCRIPT_URL: &str = "SVC_PAYMENTS_SCRIPT_URL";

/// The processor's API under its secret key.
#[derive(Debug, Clone)]
pub struct ProcessorApi {
    http: reqwest::Client,
    url: String,
    secret_key: SecretString,
}

impl ProcessorApi {
    pub async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.send(path, self.http.get(format!("{}{path}", self.url))).await
    }

    pub async fn post(&self, path: &str, form: &[(&str, &str)]) -> anyhow::Result<Value> {
        self.send(path, self.http.post(format!("{}{path}", self.url)).form(form)).await
    }

    async fn send(&self, path: &str, request: reqwest::RequestBuilder) -> anyhow::Result<Value> {
        let answer = request.bearer_auth(self.secret_key.expose_secret()).send().await;
        let answer = answer.with_context(|| format!("the payment processor does not answer {path}"))?;
        let (status, body) = (answer.status(), answer.text().await?);
        if !status.is_success() {
            bail!("the payment processor answers {path} with {status}: {body}");
        }
        serde_json::from_str(&body).with_context(|| format!("the payment processor answers {path} with no JSON"))
    }
}

/// A running processor. Dropping it stops it; its state stays in its folder.
pub struct PaymentProcessor {
    python: PathBuf,
    store: PathBuf,
    log: PathBuf,
    /// The secret that signs its webhooks.
    ca_path: PathBuf,
    port: u16,
    secret_key: SecretString,
    publishable_key: String,
    webhook_secret: SecretString,
    webhook_url: Option<String>,
    http: reqwest::Client,
    process: Option<ChildProcess>,
}

impl PaymentProcessor {
    /// Starts a processor without state.
    pub async fn start(folder: &Path, log: &Path, ca_path: &Path) -> anyhow::Result<Self> {
        Self::restore(folder, log, ca_path, &SavedSettings::ephemeral()).await
    }

    /// The same, with the state, the port and the keys of an earlier start, where there was one.
    pub async fn restore(folder: &Path, log: &Path, ca_path: &Path, saved: &SavedSettings) -> anyhow::Result<Self> {
        const PORT: &str = "the payment processor's port";
        let python = private_files::find_programs("localstripe/bin/python").into_iter().next().context(
            "no localstripe in $GPUAAS_TOOLS_DIR or in .dev/tools; `deploy/up` and `deploy/test --tools` install it",
        )?;
        private_files::private_folder(folder)?;
        let mut processor = Self {
            python,
            store: folder.canonicalize()?.join("store"),
            log: log.to_owned(),
            ca_path: ca_path.to_owned(),
            port: 0,
            secret_key: saved.secret("the payment processor's secret key", "sk_test_", 16)?,
            publishable_key: saved.value("the payment processor's publishable key", || {
                Ok(format!("pk_test_{}", private_files::random_hex(16)))
            })?,
            webhook_secret: saved.secret("secret of the payment processor's webhooks", "whsec_", 16)?,
            webhook_url: None,
            http: reqwest::Client::builder().no_proxy().timeout(RESPONSE_TIMEOUT).build()?,
            process: None,
        };
        if !saved.is_persistent() {
            let _ = std::fs::remove_file(&processor.store);
        }
        let mut attempts = 0;
        let mut port = saved.port(PORT)?;
        loop {
            processor.port = port.number;
            attempts += 1;
            match processor.start_again().await {
                Ok(()) => return Ok(processor),
                // Another process took the port between the check and the bind.
                Err(_)
                    if attempts < 5 && !port.is_known && tail(&processor.log, 5).contains("address already in use") =>
                {
                    port = saved.another_port(PORT)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Starts a stopped or killed processor on its port, with its state.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        if self.is_running() {
            return Ok(());
        }
        let process = Launch::new("localstripe", &self.python, &self.log)
            .arguments(["-c", SERVER])
            .argument(self.port.to_string())
            .argument(&self.store)
            .variable("SSL_CERT_FILE", &self.ca_path)
            .variable("PYTHONUNBUFFERED", "1")
            .spawn()?;
        let process = self.process.insert(process);
        let until = Instant::now() + START_TIMEOUT;
        while tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            if let Some(status) = process.exit_status() {
                bail!("localstripe ended while starting ({status}); its log ends with:\n{}", process.log_tail());
            }
            if Instant::now() > until {
                bail!("localstripe does not answer; its log is {}", self.log.display());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        match self.webhook_url.clone() {
            Some(url) => self.send_webhooks_to(&url).await,
            None => Ok(()),
        }
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    pub fn secret_key(&self) -> &SecretString {
        &self.secret_key
    }

    pub fn publishable_key(&self) -> &str {
        &self.publishable_key
    }

    /// Signs webhooks.
    pub fn webhook_secret(&self) -> &SecretString {
        &self.webhook_secret
    }

    /// The variables with which a control plane uses this processor in this currency.
    pub fn variables(&self, currency: &str) -> Vec<(String, String)> {
        [
            ("SVC_PAYMENTS_SECRET_KEY", self.secret_key.expose_secret()),
            ("SVC_PAYMENTS_WEBHOOK_SECRETS", self.webhook_secret.expose_secret()),
            ("SVC_PAYMENTS_API_BASE", &self.url()),
            ("SVC_PAYMENTS_CHECKOUT", "page"),
            ("SVC_PAYMENTS_PUBLISHABLE_KEY", &self.publishable_key),
            (SCRIPT_URL, &format!("{}/js.stripe.com/v3/", self.url())),
            ("SVC_PAYMENTS_CURRENCY", currency),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
    }

    /// Registers a webhook endpoint: from here on each event is sent once to `url`.
    pub async fn send_webhooks_to(&mut self, url: &str) -> anyhow::Result<()> {
        let webhook = serde_json::json!({ "url": url, "secret": self.webhook_secret.expose_secret() });
        let request = self.http.post(format!("{}/_config/webhooks/gpuaas", self.url())).json(&webhook);
        request.send().await?.error_for_status()?;
        self.webhook_url = Some(url.to_owned());
        Ok(())
    }

    /// Pays an intent with a card, as the processor's script does in a browser. (Stripe itself would take the card with the confirmation.)
    pub async fn pay(&self, intent: &str, card: &str) -> anyhow::Result<Value> {
        let path = format!("/v1/payment_intents/{intent}");
        self.post(&path, &[("payment_method", card)]).await?;
        self.post(&format!("{path}/confirm"), &[]).await
    }

    /// Its API past this service, with the secret key.
    pub fn api(&self) -> ProcessorApi {
        ProcessorApi { http: self.http.clone(), url: self.url(), secret_key: self.secret_key.clone() }
    }

    pub async fn post(&self, path: &str, form: &[(&str, &str)]) -> anyhow::Result<Value> {
        self.api().post(path, form).await
    }

    pub async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.api().get(path).await
    }

    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(ChildProcess::is_running)
    }

    /// Suspends it: it accepts connections and answers nothing, until it is resumed.
    pub fn suspend(&mut self) {
        self.signal(Signal::SIGSTOP);
    }

    pub fn resume(&mut self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&mut self, signal: Signal) {
        if let Some(process) = &mut self.process {
            process.signal(signal);
        }
    }

    /// SIGKILL, as a crash.
    pub fn kill9(&mut self) {
        if let Some(process) = &mut self.process {
            process.kill9();
        }
    }

    /// An orderly end.
    pub async fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.stop(STOP_TIMEOUT).await;
        }
    }
}

/// The intent that a page of ours lets a browser pay: the client secret in the address begins with its id.
pub fn intent_in(page_url: &str) -> anyhow::Result<String> {
    let secret = page_url.split_once('#').and_then(|(_, secret)| secret.split_once("_secret_"));
    secret.map(|(intent, _)| intent.to_owned()).with_context(|| "the page's address names no intent".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::Utc;
    use domain::money::Currency;
    use domain::{PaymentId, RefundId};
    use edge::payment_processor::stripe::{CheckoutPage, Stripe, StripeSettings};
    use edge::payment_processor::{
        Checkout, PriorCheckout, Processor as _, ProcessorPaymentStatus, ProcessorRefundStatus, RefundRequest,
    };
    use uuid::Uuid;

    async fn started(folder: &Path) -> (PaymentProcessor, Stripe) {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let log = folder.join("localstripe.log");
        let there = PaymentProcessor::start(&folder.join("localstripe"), &log, Path::new("/dev/null")).await.unwrap();
        let settings = StripeSettings {
            api_base: there.url(),
            secret_key: there.secret_key().clone(),
            checkout: CheckoutPage::Ours,
            authorities_pem: None,
        };
        (there, Stripe::new(settings).unwrap())
    }

    fn checkout(payment_id: PaymentId) -> Checkout {
        Checkout {
            payment_id,
            amount_minor: 2500,
            currency: Currency::parse("EUR").unwrap(),
            success_url: "https://shop.example/paid".to_owned(),
            cancel_url: "https://shop.example/later".to_owned(),
            before: PriorCheckout::Nothing,
        }
    }

    #[tokio::test]
    async fn third_party_processor_accepts_open_pay_and_refund_requests() {
        let folder = tempfile::tempdir().unwrap();
        let (mut there, client) = started(folder.path()).await;
        let (payment_id, refund_id) = (PaymentId(Uuid::now_v7()), RefundId(Uuid::now_v7()));
        let since = Utc::now() - chrono::TimeDelta::minutes(1);
        assert!(client.find_payment(payment_id, since).await.unwrap().is_none());
        let opened = client.checkout(&checkout(payment_id)).await.unwrap();
        let found = client.find_payment(payment_id, since).await.unwrap().unwrap();
        assert_eq!(found.processor_id, opened.processor_id);
        let intent = intent_in(&opened.url("https://here.example", payment_id).unwrap()).unwrap();
        assert_eq!(intent, opened.processor_id);
        assert_eq!(client.payment(&intent).await.unwrap().unwrap().status, ProcessorPaymentStatus::Open);

        there.pay(&intent, CARD).await.unwrap();
        // Its state outlives it.
        there.kill9();
        assert!(client.payment(&intent).await.is_err());
        there.start_again().await.unwrap();
        let paid = client.payment(&intent).await.unwrap().unwrap();
        assert!(matches!(&paid.status, ProcessorPaymentStatus::Paid { charge_id: Some(_) }));
        assert_eq!((paid.payment_id, paid.amount_minor), (Some(payment_id), 2500));
        assert_eq!(client.payments_since(since).await.unwrap().found, [paid]);

        let wanted = RefundRequest { refund_id, processor_id: intent.clone(), amount_minor: 400 };
        let refund = client.refund(&wanted).await.unwrap();
        assert_eq!((refund.refund_id, refund.status), (Some(refund_id), ProcessorRefundStatus::Succeeded));
        let refunds = [refund];
        assert_eq!(client.refunds_of(&intent).await.unwrap(), refunds);
        assert_eq!(client.refunds_since(since).await.unwrap().found, refunds);
        assert_eq!(client.disputes_since(since).await.unwrap().found, []);
        there.stop().await;
    }

    #[tokio::test]
    async fn third_party_processor_declines_and_cancels() {
        let folder = tempfile::tempdir().unwrap();
        let (there, client) = started(folder.path()).await;
        let payment_id = PaymentId(Uuid::now_v7());
        let intent = client.checkout(&checkout(payment_id)).await.unwrap().processor_id;
        assert!(there.pay(&intent, "pm_card_chargeCustomerFail").await.is_err());
        let declined = client.payment(&intent).await.unwrap().unwrap().status;
        assert!(matches!(declined, ProcessorPaymentStatus::Declined { .. }), "{declined:?}");
        assert_eq!(client.cancel(&intent).await.unwrap().unwrap().status, ProcessorPaymentStatus::Canceled);
        assert!(there.pay(&intent, CARD).await.is_err(), "it cannot be paid any more");
    }
}
