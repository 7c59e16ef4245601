//! The first rental, through the public API alone: a SKU, an onboarded node, an allocation on it, and its release.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::money::{Currency, MicroAmount};
use serde_json::{Value, json};
use wire::bundle::BootstrapBundle;

use super::agents::{AgentProcess, AgentSettings};
use super::api::{DevApi, unreachable_state_error};
use local_servers::payment_processor::{CARD, PaymentProcessor, intent_in};
use local_servers::private_files;

const REGION: &str = "dev-1";
/// The platform roles whose holders approve SKUs together.
const OPERATIONS: &str = "platform_operations";
const OWNER: &str = "inventory_owner";
/// The platform role whose holders administer billing accounts.
const BILLING: &str = "billing_operations";
/// The currency of all prices and payments.
pub const CURRENCY: &str = "USD";
/// The amount that the user pays in, in minor units.
const DEPOSIT_MINOR: i64 = 10_000;
/// The timeout of enrollment, the first poll and the check of the inventory.
const ONBOARDING_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of a payment: a webhook, or the first reconciliation.
const PAYMENT_TIMEOUT: Duration = Duration::from_secs(60);
const ACTIVATION_TIMEOUT: Duration = Duration::from_secs(60);
const PROVISIONING_TIMEOUT: Duration = Duration::from_secs(60);
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);

/// Is notified of each completed step with its duration.
pub trait StepListener {
    fn done(&self, step: &str, took: Duration);
}

/// The users of the first rental, and the listener to its steps.
pub struct FirstRental<'a> {
    pub admin: &'a DevApi,
    /// A SKU needs the approval of a second administrator.
    pub second_admin: &'a DevApi,
    /// The tokens' `sub` of the two administrators.
    pub admin_subjects: [String; 2],
    pub user: &'a DevApi,
    /// The payment processor where the user pays.
    pub processor: &'a PaymentProcessor,
    pub listener: &'a dyn StepListener,
}

impl FirstRental<'_> {
    /// Puts a SKU for these agents into the catalog and has it activated by both administrators. Returns its name.
    pub async fn publish_sku(&self, agents: &AgentSettings) -> anyhow::Result<String> {
        let begin = Instant::now();
        let gpus = &agents.gpus;
        let name = format!("{}x{}-{}", gpus.model.to_lowercase(), gpus.count, private_files::random_hex(3));
        let sku = json!({
            "name": name,
            "gpu": { "vendor": "NVIDIA", "model": gpus.model, "memory_mib": gpus.memory_mib, "count": gpus.count },
            // What any machine has that the agents are simulated on.
            "cpu": { "model": "any", "cores": 1 },
            "memory_mib": 512,
            "storage_gib": 1,
            "interconnect": "nvlink",
            "allowed_regions": [REGION],
            "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 250 },
        });
        let created = self.admin.post("/api/v1/admin/skus", &sku).await?;
        let id = text(&created, "id")?;
        self.listener.done(&format!("SKU {name} created ({id})"), begin.elapsed());

        self.bind_roles().await?;
        let begin = Instant::now();
        let path = format!("/api/v1/admin/skus/{id}/activate");
        for (approver, role) in [(self.admin, OPERATIONS), (self.second_admin, OWNER)] {
            let approval = json!({ "reason": "the first rental needs it", "role": role });
            let sku = approver.post(&path, &approval).await?;
            let status = text(&sku, "status")?;
            self.listener.done(&format!("SKU {name} approved in role {role}: {status}"), begin.elapsed());
        }
        let begin = Instant::now();
        self.admin
            .wait_for(&format!("/api/v1/admin/skus/{id}"), "the SKU is active", ACTIVATION_TIMEOUT, |sku| {
                Ok((sku["status"] == "active").then_some(()))
            })
            .await?;
        self.listener.done(&format!("SKU {name} active"), begin.elapsed());
        Ok(name)
    }

    /// Gives each administrator the platform role in which they approve SKUs, and one of them the accounts.
    async fn bind_roles(&self) -> anyhow::Result<()> {
        let [first, second] = &self.admin_subjects;
        for (subject, role) in [(first, OPERATIONS), (second, OWNER), (first, BILLING)] {
            let begin = Instant::now();
            let binding = json!({ "subject": subject, "role": role, "reason": "the first rental needs it" });
            self.admin.post("/api/v1/admin/platform-roles/bindings", &binding).await?;
            self.listener.done(&format!("platform role {role} bound to {subject}"), begin.elapsed());
        }
        Ok(())
    }

    /// Registers a node, issues its enrollment token, starts its agent and waits until the node is active.
    pub async fn onboard(
        &self,
        name: &str,
        sku: &str,
        agents: &AgentSettings,
    ) -> anyhow::Result<(String, AgentProcess)> {
        let begin = Instant::now();
        // An agent with an sshd of its own is reached on this machine.
        let ssh_port = agents.system.as_ref().and_then(|system| system.ssh_port);
        let host = if ssh_port.is_some() { "127.0.0.1".to_owned() } else { format!("{name}.internal") };
        let node = json!({
            "name": name,
            "host": host,
            "port": ssh_port.unwrap_or(22),
            "ssh_username": "gpuaas",
            "ssh_public_key": ssh_public_key(name),
            "sku": sku,
            "gpus_total": agents.gpus.count,
            "region_code": REGION,
            "onboarding_mode": "manual",
            "probe": false,
        });
        let id = text(&self.admin.post("/api/v1/admin/nodes", &node).await?, "id")?;
        self.listener.done(&format!("{name} registered ({id})"), begin.elapsed());

        let begin = Instant::now();
        let path = format!("/api/v1/admin/nodes/{id}");
        let issued = self.admin.post(&format!("{path}/enrollment-token"), &json!({})).await?;
        let bundle: BootstrapBundle = strict_json::from_value(issued["bootstrap_bundle"].clone())
            .context("the bootstrap bundle cannot be read")?;
        self.listener.done(&format!("{name} has its bootstrap bundle"), begin.elapsed());

        let begin = Instant::now();
        let mut agent = AgentProcess::start(name, agents, &bundle)?;
        let what = format!("{name} is active");
        let waiting = self.admin.wait_for(&path, &what, ONBOARDING_TIMEOUT, |node| {
            if node["state"] == "quarantined" {
                return Err(unreachable_state_error(name, node));
            }
            if let Some(status) = agent.exit_status() {
                bail!("the agent of {name} ended ({status})");
            }
            Ok((node["state"] == "active").then_some(()))
        });
        if let Err(error) = waiting.await {
            let tail = local_servers::process::tail(agent.log(), 5);
            return Err(error.context(format!("{name} did not become active; its agent's log ends with:\n{tail}")));
        }
        self.listener.done(&format!("{name} enrolled by its agent, active"), begin.elapsed());
        Ok((id, agent))
    }

    /// The user pays in what the job needs, as they would in a browser.
    pub async fn pay_in(&self) -> anyhow::Result<()> {
        top_up(self.user, "user", self.processor, self.listener).await
    }

    /// Rents GPUs of the SKU, waits until the allocation is active, releases it, and checks that all GPUs of the node are free again.
    pub async fn rent_and_release(&self, sku: &str, gpu_count: u32) -> anyhow::Result<()> {
        let begin = Instant::now();
        let key = json!({ "name": format!("first rental {}", private_files::random_hex(3)), "public_key": ssh_public_key("user") });
        let key = self.user.post("/api/v1/ssh-keys", &key).await?;
        let key_id = text(&key, "id")?;
        self.listener.done(&format!("SSH key {} added", key["fingerprint"].as_str().unwrap_or("-")), begin.elapsed());

        let begin = Instant::now();
        let wanted = json!({ "sku": sku, "region_code": REGION, "gpu_count": gpu_count, "ssh_key_ids": [key_id] });
        let id = text(&self.user.post("/api/v1/allocations", &wanted).await?, "id")?;
        self.listener.done(&format!("allocation {id} requested"), begin.elapsed());

        let path = format!("/api/v1/allocations/{id}");
        let active = self
            .user
            .wait_for(&path, "the allocation is active", PROVISIONING_TIMEOUT, |allocation| {
                match allocation["state"].as_str() {
                    Some("active") => Ok(Some(allocation.clone())),
                    Some("requested" | "provisioning") => Ok(None),
                    _ => Err(unreachable_state_error("the allocation", allocation)),
                }
            })
            .await?;
        let devices = active["devices"].as_array().map_or(0, Vec::len);
        if devices != gpu_count as usize {
            bail!("the allocation has {devices} devices, {gpu_count} were asked for");
        }
        let node_id = text(&active, "node_id")?;
        let ssh = &active["ssh"];
        let login = format!("{}@{}", ssh["username"].as_str().unwrap_or("-"), ssh["host"].as_str().unwrap_or("-"));
        let login = match ssh["host_key_fingerprint"].as_str() {
            Some(fingerprint) => format!("ssh -p {} {login} (host key {fingerprint})", ssh["port"]),
            None => format!("ssh {login}"),
        };
        self.listener.done(&format!("allocation active: {devices} GPUs, {login}"), begin.elapsed());

        let begin = Instant::now();
        self.user.post(&format!("{path}/release"), &json!({})).await?;
        self.listener.done("release accepted", begin.elapsed());
        self.user
            .wait_for(&path, "the allocation is released", RELEASE_TIMEOUT, |allocation| {
                match allocation["state"].as_str() {
                    Some("released") => Ok(Some(())),
                    Some("active" | "releasing") => Ok(None),
                    _ => Err(unreachable_state_error("the allocation", allocation)),
                }
            })
            .await?;
        self.listener.done("allocation released, on the node's clean-up proof", begin.elapsed());

        let begin = Instant::now();
        let paid = self
            .user
            .wait_for("/api/v1/billing/balance", "the allocation is paid for", RELEASE_TIMEOUT, |account| {
                Ok((account["running"] == 0).then(|| account.clone()))
            })
            .await?;
        let left = paid["balance_micro"].as_i64().context("the account has a balance")?;
        let cost = MicroAmount::of_minor(DEPOSIT_MINOR).unwrap_or_default().minus(MicroAmount::of(left));
        let currency = Currency::parse(CURRENCY)?;
        if cost <= MicroAmount::ZERO {
            bail!("the allocation has cost nothing: {paid}");
        }
        self.listener.done(
            &format!("paid: {} for the time from active to the release", cost.in_currency(&currency)),
            begin.elapsed(),
        );

        let begin = Instant::now();
        self.admin
            .wait_for(&format!("/api/v1/admin/nodes/{node_id}"), "all GPUs free again", RELEASE_TIMEOUT, |node| {
                if node["state"] != "active" {
                    return Err(unreachable_state_error("the node", node));
                }
                Ok((node["gpus_free"] == node["gpus_total"]).then_some(()))
            })
            .await?;
        self.listener.done("node clean, all its GPUs free again", begin.elapsed());
        Ok(())
    }
}

/// Pays into a user's account, and waits until the payment is deposited.
pub async fn top_up(
    user: &DevApi,
    name: &str,
    processor: &PaymentProcessor,
    listener: &dyn StepListener,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    let wanted = json!({
        "amount_minor": DEPOSIT_MINOR, "success_url": "https://shop.example/paid", "cancel_url": "https://shop.example/later",
    });
    let begun = user.post("/api/v1/billing/checkout-sessions", &wanted).await?;
    let (id, url) = (text(&begun, "id")?, text(&begun, "url")?);
    processor.pay(&intent_in(&url)?, CARD).await?;
    let deposit = MicroAmount::of_minor(DEPOSIT_MINOR).unwrap_or_default();
    listener.done(
        &format!("{name} has paid {} at the processor ({id})", deposit.in_currency(&Currency::parse(CURRENCY)?)),
        begin.elapsed(),
    );

    let begin = Instant::now();
    user.wait_for(
        &format!("/api/v1/billing/payments/{id}"),
        "the payment is in the account",
        PAYMENT_TIMEOUT,
        |payment| match payment["state"].as_str() {
            Some("deposited") => Ok(Some(())),
            Some("created" | "open" | "paid") => Ok(None),
            _ => Err(unreachable_state_error("the payment", payment)),
        },
    )
    .await?;
    listener.done(&format!("{name} has it in their account"), begin.elapsed());
    Ok(())
}

fn text(resource: &Value, name: &str) -> anyhow::Result<String> {
    resource[name].as_str().map(str::to_owned).with_context(|| format!("the answer has no {name}"))
}

/// The public key of a fresh Ed25519 pair in OpenSSH's text form (RFC 8709). Its private key is discarded, so that it opens nothing.
fn ssh_public_key(comment: &str) -> String {
    let secret: [u8; 32] = rand::random();
    let public = ed25519_dalek::SigningKey::from_bytes(&secret).verifying_key();
    let mut blob = Vec::new();
    for part in [b"ssh-ed25519".as_slice(), public.as_bytes()] {
        blob.extend_from_slice(&u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
        blob.extend_from_slice(part);
    }
    format!("ssh-ed25519 {} {comment}", STANDARD.encode(blob))
}
