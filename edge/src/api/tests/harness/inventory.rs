//! SKUs and nodes of the harness, and what the agents of its nodes send.

use super::{ApiHarness, PlacementOutcome, TestResponse};
use crate::auth::opaque_token::{TokenPurpose, read};
use actors::shell_dependencies::Environment as _;
use chrono::TimeDelta;
use domain::node::{self, CertificateRecord, Enrollment, Node, ReportedInventory};
use domain::{NodeId, Principal};
use secrecy::SecretString;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use test_host::reported_inventory;
use uuid::Uuid;

impl ApiHarness {
    /// A harness with the active SKU `h100x4`.
    pub(in crate::api::tests) async fn with_sku() -> Self {
        let api = Self::new().await;
        api.sku("h100x4", 4).await;
        api
    }

    /// The same, with an active node on which allocations are placed.
    pub(in crate::api::tests) async fn with_free_node() -> (Self, NodeId) {
        let api = Self::with_sku().await;
        let node = api.active_node("h100x4", 4).await;
        api.set_placement(PlacementOutcome::On(node));
        (api, node)
    }

    /// An active SKU, by id.
    pub(in crate::api::tests) async fn sku(&self, name: &str, gpus: u32) -> String {
        self.sku_with(name, gpus, &json!({})).await
    }

    /// An active SKU in which these fields differ from those of [`sku_body`].
    pub(in crate::api::tests) async fn sku_with(&self, name: &str, gpus: u32, fields: &Value) -> String {
        let mut body = sku_body(name, gpus);
        for (field, value) in fields.as_object().unwrap() {
            body[field] = value.clone();
        }
        let created = self.post("/api/v1/admin/skus").admin().json(&body).send().await;
        let id = created.is(201)["id"].as_str().unwrap().to_owned();
        self.decide(&format!("/api/v1/admin/skus/{id}/activate"), &json!({"reason": "a test"})).await.is(200);
        id
    }

    /// Both approvals of a SKU's change: of `root` in role `platform_operations` and of `owner` in role `inventory_owner`.
    pub(in crate::api::tests) async fn decide(&self, path: &str, decision: &Value) -> TestResponse {
        self.bind("root", "platform_operations").await;
        self.bind("owner", "inventory_owner").await;
        self.post(path).admin().json(decision).send().await.is(202);
        self.post(path).user("owner").json(decision).send().await
    }

    /// A registered node of the SKU.
    pub(in crate::api::tests) async fn node(&self, sku: &str, gpus: u32) -> NodeId {
        let created = self.post("/api/v1/admin/nodes").admin().json(&node_body(sku, gpus)).send().await;
        created.is(201)["id"].as_str().unwrap().parse().unwrap()
    }

    /// The same, with an agent that has enrolled and polled.
    pub(in crate::api::tests) async fn active_node(&self, sku: &str, gpus: u32) -> NodeId {
        let id = self.enrolled_node(sku, gpus, &Uuid::new_v4().to_string()).await;
        self.poll(id).await;
        id
    }

    /// The first poll of the node's agent.
    pub(in crate::api::tests) async fn poll(&self, id: NodeId) {
        self.ask::<Node>(&Principal::Node(id), id.0, node::Request::Poll { serial: "01".into() }).await.unwrap();
    }

    /// A heartbeat of such a node.
    pub(in crate::api::tests) async fn heartbeat(&self, id: NodeId, machine: &str, gpus: u32, alerts: Vec<Value>) {
        let status = node::NodeHealthStatus::Warning;
        self.heartbeat_with(id, machine, gpus, node::NodeHealth { status, alerts, ..Default::default() }).await;
    }

    /// A heartbeat of such a node with this health.
    pub(in crate::api::tests) async fn heartbeat_with(
        &self,
        id: NodeId,
        machine: &str,
        gpus: u32,
        health: node::NodeHealth,
    ) {
        self.heartbeat_of(id, machine, gpus, health, None).await;
    }

    /// A heartbeat of an agent that supports these tasks.
    pub(in crate::api::tests) async fn heartbeat_of(
        &self,
        id: NodeId,
        machine: &str,
        gpus: u32,
        health: node::NodeHealth,
        task_types: Option<BTreeSet<String>>,
    ) {
        let now = self.environment.now();
        let seen = node::AgentContact {
            boot_id: "boot".into(),
            agent_version: "1.0.0".into(),
            protocol: 3,
            last_seen_at: now,
            silent_at: now,
            task_types,
            package_digest: None,
            session: None,
            last_heartbeat: None,
        };
        let command = node::Request::Heartbeat {
            serial: "01".into(),
            seen: Box::new(seen),
            inventory: Box::new(inventory(machine, gpus)),
            health: Box::new(health),
        };
        self.ask::<Node>(&Principal::Node(id), id.0, command).await.unwrap();
    }

    /// An enrolled node whose GPUs' UUIDs contain this name.
    pub(in crate::api::tests) async fn enrolled_node(&self, sku: &str, gpus: u32, machine: &str) -> NodeId {
        let id = self.node(sku, gpus).await;
        let issued = self.post(&format!("/api/v1/admin/nodes/{id}/enrollment-token")).admin().send().await;
        let token = issued.is(201)["bootstrap_bundle"]["SVC_ENROLLMENT_TOKEN"].as_str();
        let token = token.or(issued.body["bootstrap_bundle"]["enrollment_token"].as_str()).expect("a token").to_owned();
        let hash = read(TokenPurpose::Enrollment, &SecretString::from(token)).unwrap();
        let now = self.environment.now();
        let agent = Principal::Node(id);
        let enrollment = Enrollment {
            token_sha256: hash.to_bytes(),
            csr_sha256: [0; 32],
            issued: CertificateRecord {
                serial: "01".into(),
                not_after: now + TimeDelta::days(1),
                generation: 0,
                authority: None,
            },
            recovery_public_key: "key".into(),
            boot_id: "boot".into(),
            agent_version: "1.0.0".into(),
            protocol: 3,
            inventory: inventory(machine, gpus),
        };
        self.ask::<Node>(&agent, id.0, node::Request::Enroll(Box::new(enrollment))).await.unwrap();
        id
    }
}

pub(in crate::api::tests) fn sku_body(name: &str, gpus: u32) -> Value {
    json!({
        "name": name,
        "gpu": {"vendor": "NVIDIA", "model": "H100", "memory_mib": 80_000, "count": gpus},
        "cpu": {"model": "any", "cores": 64},
        "memory_mib": 512_000,
        "storage_gib": 4_000,
        "interconnect": "nvlink",
        "allowed_regions": ["eu-1", "us-1"],
        "price": {"currency": "EUR", "amount_minor_per_gpu_hour": 250},
    })
}

pub(in crate::api::tests) const ANNS_KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINEoqqkY4e7bJe1Jl4MhWXVh60tJIaoDRJGRhDuzPvaA ann@laptop";

pub(in crate::api::tests) fn node_body(sku: &str, gpus: u32) -> Value {
    json!({
        "host": "gpu-17.internal",
        "port": 22,
        "ssh_username": "ops",
        "ssh_public_key": ANNS_KEY,
        "sku": sku,
        "gpus_total": gpus,
        "region_code": "eu-1",
        "onboarding_mode": "manual",
    })
}

fn inventory(machine: &str, gpus: u32) -> ReportedInventory {
    ReportedInventory { tenant_devices: vec!["/dev/fuse".into()], ..reported_inventory(machine, gpus) }
}
