//! The settings of payments: the processor, its account, and the page where users pay.

use super::outside_service::authorities_pem;
use super::variables::{Variables, items};
use anyhow::Context;
use domain::money::Currency;
use edge::app_state::PaymentPage;
use edge::payment_processor::signature::WebhookSecrets;
use edge::payment_processor::stripe::{CheckoutPage, Stripe, StripeSettings, takes_amounts_in};
use secrecy::SecretString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use wire::address::ServiceUrl;

const SECRET_KEY: &str = "SVC_PAYMENTS_SECRET_KEY";
const WEBHOOK_SECRETS: &str = "SVC_PAYMENTS_WEBHOOK_SECRETS";
const API_BASE: &str = "SVC_PAYMENTS_API_BASE";
const CHECKOUT: &str = "SVC_PAYMENTS_CHECKOUT";
const PUBLISHABLE_KEY: &str = "SVC_PAYMENTS_PUBLISHABLE_KEY";
const SCRIPT_URL: &str = "SVC_PAYMENTS_SCRIPT_URL";
const CURRENCY: &str = "SVC_PAYMENTS_CURRENCY";
const CA: &str = "SVC_PAYMENTS_CA_PATH";
const RECONCILE: &str = "SVC_PAYMENTS_RECONCILE_SECONDS";

/// The default interval of the reconciliation with the processor.
const RECONCILE_SECONDS: u64 = 300;

/// The payment processor. Without it the service runs, and payments are disabled.
#[derive(Debug)]
pub struct PaymentsConfig {
    pub secret_key: SecretString,
    pub webhook_secrets: WebhookSecrets,
    pub api_base: String,
    pub checkout: CheckoutPage,
    pub publishable_key: Option<String>,
    pub script_url: String,
    /// The currency of accounts that are opened by their first payment.
    pub currency: Currency,
    /// The file of its authorities, where its certificate is not by one of the system's.
    pub ca: Option<PathBuf>,
    /// The interval of the reconciliation.
    pub reconciles_every: Duration,
}

impl PaymentsConfig {
    /// The processor's client, ready for requests.
    ///
    /// # Errors
    /// Names the setting that cannot be used.
    pub fn open(&self) -> anyhow::Result<edge::app_state::Payments> {
        let authorities_pem = authorities_pem(CA, self.ca.as_deref())?;
        let processor = Stripe::new(StripeSettings {
            api_base: self.api_base.clone(),
            secret_key: self.secret_key.clone(),
            checkout: self.checkout,
            authorities_pem,
        });
        let origin_of = |url: &str| reqwest::Url::parse(url).map(|url| url.origin().ascii_serialization());
        let page = match &self.publishable_key {
            Some(publishable_key) => Some(PaymentPage {
                publishable_key: publishable_key.clone(),
                script_url: self.script_url.clone(),
                api_origin: origin_of(&self.api_base).context(API_BASE)?,
            }),
            None => None,
        };
        Ok(edge::app_state::Payments {
            processor: Arc::new(processor.context(API_BASE)?),
            webhook_secrets: self.webhook_secrets.clone(),
            currency: self.currency.clone(),
            page: page.filter(|_| self.checkout == CheckoutPage::Ours),
        })
    }
}

/// All of it, or nothing.
pub(super) fn payments(variables: &mut Variables<'_>) -> Option<PaymentsConfig> {
    let Some(secret_key) = variables.optional(SECRET_KEY) else {
        let rest = [WEBHOOK_SECRETS, API_BASE, CHECKOUT, PUBLISHABLE_KEY, SCRIPT_URL, CURRENCY, CA, RECONCILE];
        if let Some(name) = rest.into_iter().find(|name| variables.optional(name).is_some()) {
            variables.wrong(format!("{name} is set, but {SECRET_KEY} is not: no user could pay"));
        }
        return None;
    };
    if secret_key.contains(|c: char| !c.is_ascii_graphic()) {
        variables.wrong(format!("{SECRET_KEY} is no key: it holds what no header may hold"));
    }
    let webhook_secrets = webhook_secrets(variables);
    let checkout = match variables.optional(CHECKOUT).as_deref() {
        None | Some("sessions") => CheckoutPage::Sessions,
        Some("page") => CheckoutPage::Ours,
        Some(other) => {
            variables
                .wrong(format!("{CHECKOUT} is {other:?}; it must be sessions (the processor's page) or page (ours)"));
            CheckoutPage::Sessions
        }
    };
    let publishable_key = variables.credential(PUBLISHABLE_KEY);
    if checkout == CheckoutPage::Ours && publishable_key.is_none() {
        variables
            .wrong(format!("{CHECKOUT} is page; {PUBLISHABLE_KEY} must hold the key that browsers show the processor"));
    }
    let code = variables.optional(CURRENCY).unwrap_or_else(|| "EUR".to_owned());
    let currency = Currency::parse(&code).ok();
    if currency.is_none() {
        variables.wrong(format!("{CURRENCY} is {code:?}; it must be a code such as EUR"));
    }
    if currency.as_ref().is_some_and(|currency| !takes_amounts_in(currency)) {
        variables.wrong(format!(
            "{CURRENCY} is {code}, whose amounts the processor takes with other decimals; name another one"
        ));
    }
    let payments = PaymentsConfig {
        secret_key: secret_key.into(),
        webhook_secrets: webhook_secrets?,
        api_base: variables.optional(API_BASE).unwrap_or_else(|| "https://api.stripe.com".to_owned()),
        checkout,
        publishable_key,
        script_url: script_url(variables),
        ca: variables.optional_certificates(CA),
        reconciles_every: reconciles_every(variables),
        currency: currency?,
    };
    if variables.check_address(API_BASE, &payments.api_base, ServiceUrl::parse).is_some()
        && let Err(error) = payments.open()
    {
        variables.wrong(format!("{error:#}"));
    }
    Some(payments)
}

fn webhook_secrets(variables: &mut Variables<'_>) -> Option<WebhookSecrets> {
    let secrets =
        variables.required(WEBHOOK_SECRETS, "the secret of the webhook endpoint (two with commas while it is rolled)");
    let list: Vec<SecretString> = items(&secrets).into_iter().map(SecretString::from).collect();
    let parsed = WebhookSecrets::new(&list);
    if !secrets.is_empty() && parsed.is_none() {
        variables.wrong(format!("{WEBHOOK_SECRETS} cannot be used: each secret needs 16 characters or more"));
    }
    parsed
}

/// As it is written: a script's address may end in a slash.
fn script_url(variables: &mut Variables<'_>) -> String {
    let Some(text) = variables.optional(SCRIPT_URL) else { return "https://js.stripe.com/v3/".to_owned() };
    variables.check_address(SCRIPT_URL, &text, ServiceUrl::parse);
    text
}

fn reconciles_every(variables: &mut Variables<'_>) -> Duration {
    let seconds = match variables.optional(RECONCILE).map(|text| (text.parse(), text)) {
        None => RECONCILE_SECONDS,
        Some((Ok(seconds @ 1..=86_400), _)) => seconds,
        Some((Ok(_) | Err(_), text)) => {
            variables.wrong(format!("{RECONCILE} is {text:?}; it must be a number of seconds, a day at most"));
            RECONCILE_SECONDS
        }
    };
    Duration::from_secs(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::{ConfigError, read_from};

    const KEY: (&str, &str) = (SECRET_KEY, "sk_test_0123456789");
    const HOOK: (&str, &str) = (WEBHOOK_SECRETS, "whsec_0123456789abcdef, whsec_fedcba9876543210");

    fn read(variables: &[(&str, &str)]) -> Result<Option<PaymentsConfig>, ConfigError> {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        read_from(variables, payments)
    }

    #[test]
    fn payments_need_a_processor_and_its_own_page_is_the_default() {
        assert!(read(&[]).unwrap().is_none());
        let plain = read(&[KEY, HOOK]).unwrap().unwrap();
        assert_eq!((plain.checkout, plain.currency.as_str()), (CheckoutPage::Sessions, "EUR"));
        assert_eq!(plain.api_base, "https://api.stripe.com");
        let shown = format!("{plain:?}");
        assert!(!shown.contains("sk_test") && !shown.contains("whsec"), "{shown}");
        let ours = [KEY, HOOK, (CHECKOUT, "page"), (PUBLISHABLE_KEY, "pk_test_1"), (CURRENCY, "USD")];
        let ours = read(&ours).unwrap().unwrap();
        assert_eq!((ours.checkout, ours.currency.as_str()), (CheckoutPage::Ours, "USD"));
    }

    #[test]
    fn own_payment_page_gets_the_url_of_the_processor() {
        let at = (API_BASE, "http://127.0.0.1:8420/");
        let ours = [KEY, HOOK, at, (CHECKOUT, "page"), (PUBLISHABLE_KEY, "pk_test_1")];
        let page = read(&ours).unwrap().unwrap().open().unwrap().page.unwrap();
        assert_eq!(page.api_origin, "http://127.0.0.1:8420");
        assert!(read(&[KEY, HOOK, (PUBLISHABLE_KEY, "pk_test_1")]).unwrap().unwrap().open().unwrap().page.is_none());
        for base in ["http://api.stripe.example", "nowhere"] {
            let error = read(&[KEY, HOOK, (API_BASE, base)]).unwrap_err().to_string();
            assert!(error.contains(API_BASE), "{error}");
        }
    }

    #[test]
    fn incomplete_processor_settings_are_refused_and_the_missing_one_is_named() {
        for (variables, named) in [
            (vec![HOOK], SECRET_KEY),
            (vec![(CHECKOUT, "page")], SECRET_KEY),
            (vec![KEY], WEBHOOK_SECRETS),
            (vec![KEY, (WEBHOOK_SECRETS, " , ")], WEBHOOK_SECRETS),
            (vec![KEY, (WEBHOOK_SECRETS, "whsec_0123456789abcdef,short")], WEBHOOK_SECRETS),
            (vec![(SECRET_KEY, "sk_test_\n0123"), HOOK], SECRET_KEY),
            (vec![KEY, HOOK, (CHECKOUT, "popup")], CHECKOUT),
            (vec![KEY, HOOK, (CHECKOUT, "page")], PUBLISHABLE_KEY),
            (vec![KEY, HOOK, (CURRENCY, "euro")], CURRENCY),
            (vec![KEY, HOOK, (CURRENCY, "ISK")], CURRENCY),
            (vec![KEY, HOOK, (RECONCILE, "0")], RECONCILE),
            (vec![KEY, HOOK, (RECONCILE, "soon")], RECONCILE),
        ] {
            let error = read(&variables).unwrap_err().to_string();
            assert!(error.contains(named) && !error.contains("0123"), "{error}");
        }
    }
}
