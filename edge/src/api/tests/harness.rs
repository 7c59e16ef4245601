//! The harness of the API tests: the router over the actors and Postgres, an identity provider, and a scripted saga.

mod exchange;
mod identity_provider;
mod inventory;
mod scripted_saga;

pub(super) use exchange::{TestRequest, TestResponse, without_ids};
pub(super) use inventory::{ANNS_KEY, node_body, sku_body};
pub(super) use scripted_saga::PlacementOutcome;

use crate::api;
use crate::app_state::{AppState, Parts, PaymentPage, Payments, Trust};
use crate::auth::browser_session::SessionReader;
use crate::auth::internal_route_auth::InternalToken;
use crate::auth::jwks::{Jwks, JwksSettings};
use crate::auth::openid_provider::{LoginSettings, OpenIdProvider};
use crate::auth::signed_tokens::service_account::ServiceTokens;
use crate::auth::{Authenticator, TokenRules};
use crate::notifications::delivery::NotificationSender;
use crate::notifications::delivery::email::{MailConfig, Mailer};
use crate::outbound::alertmanager::Alertmanager;
use crate::outbound::node_probe::{Probe, ProbeTargets, Resolve};
use crate::payment_processor::fake::FakeProcessor;
use crate::payment_processor::signature::WebhookSecrets;
use crate::testing::install_crypto;
use crate::trust::current_keys::Keys;
use actors::AskResult;
use axum::Router;
use axum::http::Method;
use domain::money::Currency;
use domain::payment::Payment;
use domain::policy::{PolicyKey, PolicyValue};
use domain::{Machine, PaymentId, Principal};
use identity_provider::IdentityProvider;
use local_servers::identity::IdentityProvider as ConsoleProvider;
use local_servers::identity::browser_login::CONSOLE_CLIENT_ID;
use local_servers::test_database::TestDatabase;
use persistence::retention::{self, Month, MonthlyLog};
use persistence::table_maintenance;
use persistence::{FleetHistory, Reads, Secrets};
use scripted_saga::{EffectRunner, run_placements};
use secrecy::SecretString;
use serde_json::json;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use test_host::{PgMember, TestEnvironment, TestHost, system};
use uuid::Uuid;

/// The operator's token.
pub(super) const STATS_TOKEN: &str = "stats-stats-stats-stats-stats-stats-stats";

/// The token for the forced refresh of the provider's keys.
pub(super) const REFRESH_TOKEN: &str = "refresh-refresh-refresh-refresh-refresh";

/// For what follows without a further request, on a machine that may pause.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Requests that wait for a state, a minute in all.
pub(super) const POLLS: u32 = 150;

/// Soon at first, and then as seldom as the rate limit of a caller admits.
pub(super) const fn pause_before_poll(nth: u32) -> Duration {
    Duration::from_millis(if nth < 40 { 20 } else { 550 })
}

pub(super) struct ApiHarness {
    pub(super) app: AppState,
    router: Router,
    identities: IdentityProvider,
    placement: Arc<Mutex<PlacementOutcome>>,
    environment: Arc<TestEnvironment>,
    postgres: TestDatabase,
}

/// The settings with which the service uses this processor.
pub(super) fn payments_at(processor: &FakeProcessor) -> Payments {
    let page = PaymentPage {
        publishable_key: "pk_test_1".into(),
        script_url: "https://js.processor.example/v3/".into(),
        api_origin: "https://api.processor.example".into(),
    };
    Payments {
        processor: Arc::new(processor.clone()),
        webhook_secrets: WebhookSecrets::new(&[SecretString::from("whsec_0123456789abcdef")]).unwrap(),
        currency: Currency::parse("EUR").unwrap(),
        page: (!processor.is_hosted()).then_some(page),
    }
}

/// The services outside that a harness has.
#[derive(Default)]
struct HarnessOptions<'a> {
    targets: ProbeTargets,
    payments: Option<Payments>,
    console: Option<&'a ConsoleProvider>,
    /// How tokens of the console's provider are read, where it is not as the development provider issues them.
    rules: Option<TokenRules>,
    alertmanager: Option<Alertmanager>,
    mailer: Option<Mailer>,
}

impl ApiHarness {
    pub(super) async fn new() -> Self {
        Self::with_targets(ProbeTargets::default()).await
    }

    pub(super) async fn with_targets(targets: ProbeTargets) -> Self {
        Self::with(TestDatabase::fresh().await, HarnessOptions { targets, ..HarnessOptions::default() }).await
    }

    /// A harness with payments.
    pub(super) async fn with_payments(payments: Payments) -> Self {
        Self::with(
            TestDatabase::fresh().await,
            HarnessOptions { payments: Some(payments), ..HarnessOptions::default() },
        )
        .await
    }

    /// A harness with this payment processor.
    pub(super) async fn with_processor(processor: &FakeProcessor) -> Self {
        Self::with_payments(payments_at(processor)).await
    }

    /// A harness with a payment processor that the test controls.
    pub(super) async fn with_fake_processor() -> (FakeProcessor, Self) {
        let processor = FakeProcessor::default();
        let api = Self::with_processor(&processor).await;
        (processor, api)
    }

    /// A harness with a Postgres of its own, which the test may stop, and with payments.
    pub(super) async fn with_own_postgres(payments: Option<Payments>) -> Self {
        Self::with(TestDatabase::alone().await, HarnessOptions { payments, ..HarnessOptions::default() }).await
    }

    /// A harness with the login to the web console at this provider, whose tokens alone it accepts.
    pub(super) async fn with_console(provider: &ConsoleProvider) -> Self {
        Self::with(TestDatabase::fresh().await, HarnessOptions { console: Some(provider), ..HarnessOptions::default() })
            .await
    }

    /// The same, with a Postgres of its own, which the test may stop.
    pub(super) async fn with_console_and_own_postgres(provider: &ConsoleProvider) -> Self {
        let console = Some(provider);
        Self::with(TestDatabase::alone().await, HarnessOptions { console, ..HarnessOptions::default() }).await
    }

    /// The same, with a provider whose tokens are read by these rules.
    pub(super) async fn with_console_by(provider: &ConsoleProvider, rules: TokenRules) -> Self {
        let (console, rules) = (Some(provider), Some(rules));
        Self::with(TestDatabase::fresh().await, HarnessOptions { console, rules, ..HarnessOptions::default() }).await
    }

    /// A harness with this Alertmanager.
    pub(super) async fn with_alertmanager(alertmanager: Alertmanager) -> Self {
        Self::with(
            TestDatabase::fresh().await,
            HarnessOptions { alertmanager: Some(alertmanager), ..HarnessOptions::default() },
        )
        .await
    }

    /// A harness with a mail server, which nothing is sent to: no worker delivers here.
    pub(super) async fn with_mail() -> Self {
        install_crypto();
        let mailer = Mailer::new(&MailConfig {
            url: "smtp://localhost".to_owned().into(),
            from: "GPUaaS <no-reply@example.com>".to_owned(),
            authorities_pem: None,
            public_url: "https://api.gpu.example".to_owned(),
        });
        let options = HarnessOptions { mailer: Some(mailer.unwrap()), ..HarnessOptions::default() };
        Self::with(TestDatabase::fresh().await, options).await
    }

    async fn with(postgres: TestDatabase, options: HarnessOptions<'_>) -> Self {
        let HarnessOptions { targets, payments, console, rules, alertmanager, mailer } = options;
        install_crypto();
        let pool = persistence::pool::open(&postgres.pool_config()).unwrap();
        let member = PgMember::start(&pool).await;
        let (reads, secrets) = (Reads::new(pool.clone()), Secrets::new(pool, crate::testing::key_ring()));
        let trust = trust(&reads, secrets).await;
        let environment = Arc::new(TestEnvironment::default());
        let keys = (trust.keys.clone(), trust.secrets.clone(), trust.domain.clone());
        let (reading, environment_of_effects) = (Arc::default(), Arc::clone(&environment));
        let effects = EffectRunner { reads: reads.clone(), environment: environment_of_effects, keys, reading };
        let store = Arc::new(member.store(&reads));
        let host = TestHost::start(store, member.terms(), environment, Arc::new(effects)).await;
        let identities = IdentityProvider::start().await;
        let service_tokens = ServiceTokens::new("https://api.gpu.example", trust.keys.clone(), reads.clone());
        let authenticator = match console {
            Some(provider) => {
                let jwks = Jwks::new(JwksSettings::new(provider.issuer())).unwrap();
                let usual = || TokenRules::new(provider.issuer(), local_servers::identity::AUDIENCE);
                Authenticator::new(rules.unwrap_or_else(usual), jwks)
            }
            None => identities.authenticator(),
        };
        let sessions = SessionReader::new(reads.clone(), crate::testing::key_ring());
        let authenticator = authenticator.with_service_tokens(service_tokens).with_browser_sessions(sessions);
        let console_provider = console.map(|provider| {
            let settings = LoginSettings {
                client_id: CONSOLE_CLIENT_ID.into(),
                client_secret: Some(provider.console_secret().clone()),
                scope: "openid profile email".into(),
                resource: None,
            };
            let redirect_uri = "https://api.gpu.example/console/callback";
            Arc::new(OpenIdProvider::new(provider.issuer(), redirect_uri, None, settings).unwrap())
        });
        let placement = Arc::new(Mutex::new(PlacementOutcome::Silent));
        let app = AppState::new(Parts {
            jwks_refresh_token: InternalToken::new(REFRESH_TOKEN),
            probe: Probe::new(targets, Arc::new(TestResolver), Duration::from_secs(1)),
            stats_token: InternalToken::new(STATS_TOKEN),
            payments,
            console_provider,
            alertmanager,
            delivery: NotificationSender { mailer, ..crate::testing::delivery() },
            ..crate::testing::parts(&host, reads, authenticator, trust)
        });
        let router = crate::console_login::beside(api::router(app.clone()), app.clone());
        // Rate limits are the subject of their own tests alone: most tests send all requests as one user.
        host.environment.set_policy(PolicyKey::RateLimitApi, PolicyValue::Int(1_000_000));
        host.environment.set_policy(PolicyKey::RateLimitFinancial, PolicyValue::Int(100_000));
        tokio::spawn(run_placements(app.clone(), Arc::clone(&placement), member.published));
        Self { app, router, identities, placement, environment: host.environment, postgres }
    }

    /// What the worker `fleet-history` writes, and the API reads.
    pub(super) fn fleet_history(&self) -> FleetHistory {
        FleetHistory::new(self.postgres.pool.clone())
    }

    /// Removes all history that there is, as the retention does with old months.
    pub(super) async fn remove_history(&self) {
        let month = Month::of(chrono::Utc::now());
        retention::detach_month(&self.postgres.pool, month).await.unwrap();
        retention::drop_detached(&self.postgres.pool, MonthlyLog::History, month).await.unwrap();
        table_maintenance::make_partitions(&self.postgres.pool, 0).await.unwrap();
    }

    pub(super) fn call(&self, method: Method, path: &str) -> TestRequest<'_> {
        TestRequest::new(self, method, path)
    }

    pub(super) fn get(&self, path: &str) -> TestRequest<'_> {
        self.call(Method::GET, path)
    }

    pub(super) fn post(&self, path: &str) -> TestRequest<'_> {
        self.call(Method::POST, path)
    }

    /// A token as the identity provider issues it.
    pub(super) fn token(&self, user: &str, roles: &[&str]) -> String {
        self.identities.token(user, "acme", roles)
    }

    /// The same, for a user with a verified address.
    pub(super) fn token_with_email(&self, user: &str, address: &str) -> String {
        self.identities.token_with_email(user, address)
    }

    /// The same, for a user of this organisation.
    pub(super) fn token_of(&self, user: &str, org: &str) -> String {
        self.identities.token(user, org, &["user"])
    }

    /// Stores the oldest browser session in a form that no release can read; its entity has it in memory.
    pub(super) async fn make_oldest_session_unreadable(&self) {
        let oldest = "UPDATE entity SET body = body - 'subject' WHERE id =
                      (SELECT id FROM entity WHERE kind = 'browser_session' ORDER BY created_at, id LIMIT 1)";
        self.postgres.execute(oldest).await;
    }

    /// Stores the nodes in a form that no release can read; their entities have them in memory.
    pub(super) async fn make_nodes_unreadable(&self) {
        self.postgres.execute("UPDATE entity SET body = body - 'registration' WHERE kind = 'node'").await;
    }

    /// Alters the column, which no seal holds, that says whose each allocation is.
    pub(super) async fn give_all_allocations_to_bob(&self) {
        self.postgres.execute("UPDATE entity SET owner = 'bob' WHERE kind = 'allocation'").await;
    }

    /// Kills Postgres: nothing can be read or written until it is started again.
    pub(super) async fn kill_postgres(&self) {
        self.postgres.kill9().await;
    }

    /// Starts the Postgres that was killed.
    pub(super) async fn start_postgres_again(&self) {
        self.postgres.start_again().await;
    }

    /// Sets the service's clock forward.
    pub(super) fn advance_clock(&self, by: chrono::TimeDelta) {
        self.environment.advance(by);
    }

    /// A dump of the database, as text.
    pub(super) fn database_dump(&self) -> String {
        self.postgres.dump()
    }

    /// Keeps the commits of all requests and removes their stored responses, as if the process had been killed between the two.
    pub(super) async fn lose_responses(&self) {
        self.postgres.execute("UPDATE command SET answer = NULL WHERE reply IS NOT NULL").await;
    }

    /// Stores the response to the command of this name that an entity carried out, as the release before this one does.
    pub(super) async fn store_response_of(&self, entity: Uuid, command: &str, response: &serde_json::Value) {
        let of_command = format!("SELECT command_id FROM history WHERE entity = '{entity}' AND command = '{command}'");
        let statement = format!("UPDATE command SET answer = $answer${response}$answer$ WHERE id = ({of_command})");
        self.postgres.execute_raw(&statement).await;
    }

    /// Leaves of the commands what the release before this one stores.
    pub(super) async fn forget_what_was_resolved(&self) {
        self.postgres.execute("UPDATE command SET resolved = NULL").await;
    }

    pub(super) fn set_placement(&self, placement: PlacementOutcome) {
        *self.placement.lock().unwrap() = placement;
    }

    pub(super) fn set_policy(&self, key: PolicyKey, value: i64) {
        self.set_value(key, PolicyValue::Int(value));
    }

    /// Stops the service's clock at this instant.
    pub(super) fn stop_clock_at(&self, at: &str) {
        self.environment.stop_clock_at(at.parse().unwrap());
    }

    pub(super) fn set_switch(&self, key: PolicyKey, on: bool) {
        self.set_value(key, PolicyValue::Bool(on));
    }

    fn set_value(&self, key: PolicyKey, value: PolicyValue) {
        self.environment.set_policy(key, value);
    }

    /// Stops the identity provider.
    pub(super) async fn stop_provider(&self) {
        self.identities.server.reset().await;
    }

    /// Binds a platform role, as `root`.
    pub(super) async fn bind(&self, subject: &str, role: &str) -> TestResponse {
        let binding = json!({"subject": subject, "role": role, "reason": "a test"});
        self.post("/api/v1/admin/platform-roles/bindings").admin().json(&binding).send().await
    }

    pub(super) async fn ask<M: Machine>(
        &self,
        by: &Principal,
        id: Uuid,
        command: impl Into<M::Command>,
    ) -> AskResult<M> {
        test_host::ask::<M>(&self.app.directory, self.environment.as_ref(), by, id, command).await
    }

    /// Waits until the condition holds for the entity.
    pub(super) async fn wait_until<M: Machine>(&self, id: Uuid, is_so: impl Fn(&M) -> bool) {
        let found = crate::app_state::read_model::wait_until::<M>(&self.app, id, WAIT_TIMEOUT, &is_so).await.unwrap();
        let is_there = found.is_some_and(|found| is_so(&found.it));
        assert!(is_there, "{} {id} did not come to that within {WAIT_TIMEOUT:?}", M::KIND);
    }

    pub(super) async fn wait_until_payment(&self, id: PaymentId, state: &str) {
        self.wait_until::<Payment>(id.0, |payment| payment.state() == state).await;
    }

    /// Sends a command with the system as the principal, as the saga's workers do.
    pub(super) async fn ask_as_system<M: Machine>(&self, id: Uuid, command: impl Into<M::Command>) {
        self.ask::<M>(&system(), id, command).await.unwrap();
    }
}

async fn trust(reads: &Reads, secrets: Secrets) -> Trust {
    let domain = crate::testing::trust_domain();
    let keys = Keys::read(&secrets, reads, &domain).await.unwrap();
    let api_ca_pem = keys.node.bundle_pem();
    crate::testing::trust(keys, secrets, api_ca_pem)
}

/// `nowhere.example` does not resolve. Every other name resolves to loopback, which may not be probed.
struct TestResolver;

impl Resolve for TestResolver {
    fn resolve<'a>(
        &'a self,
        name: &'a str,
    ) -> std::pin::Pin<Box<dyn Future<Output = std::io::Result<Vec<IpAddr>>> + Send + 'a>> {
        if name == "nowhere.example" {
            return Box::pin(async { Err(std::io::Error::other("no such name")) });
        }
        Box::pin(async { Ok(vec![IpAddr::from([127, 0, 0, 1])]) })
    }
}
