//! Nodes and their agents.

use super::{GPUS, Simulation, admin};
use crate::agent::LUCKY;
use crate::node_fixture;
use chrono::TimeDelta;
use domain::node::{self, NodeHealthStatus};
use domain::validation::{Measurement, ValidationMinimums};
use domain::{NodeId, Principal, SkuId, TokenId};
use serde_json::json;
use std::collections::BTreeMap;
use uuid::Uuid;

impl Simulation {
    pub(super) fn register(&mut self, id: NodeId) {
        let registration = node_fixture::registration(SkuId(Uuid::nil()), GPUS);
        let registration = node::Registration { host: format!("node-{id}"), ..registration };
        let command = node::Request::Register { registration: Box::new(registration), probe: None, machine: None };
        self.tell_node(id, &admin(), command).unwrap();
    }

    pub(crate) fn onboard(&mut self, id: NodeId) {
        self.invite(id);
        self.enroll(id, false);
        self.poll(id);
    }

    /// A new identity for a node that lost the one it had.
    pub(crate) fn reinstate(&mut self, id: NodeId) {
        let mut token_sha256 = [0; 32];
        token_sha256[..8].copy_from_slice(&self.next().to_be_bytes());
        let command = node::Request::Reissue(Box::new(node::Reissue {
            token_id: TokenId(Uuid::from_u128(self.counter.into())),
            token_sha256,
            ttl_seconds: None,
            reason: "r".into(),
            revoke_current_certificate: false,
        }));
        self.tell_node(id, &admin(), command).unwrap();
        self.agents.get_mut(&id).unwrap().token = Some(token_sha256);
        self.enroll(id, false);
        self.healthy(id);
    }

    pub(super) fn invite(&mut self, id: NodeId) {
        let mut token_sha256 = [0; 32];
        token_sha256[..8].copy_from_slice(&self.next().to_be_bytes());
        let token_id = TokenId(Uuid::from_u128(self.counter.into()));
        let command = node::Request::IssueToken { token_id, token_sha256, ttl_seconds: None };
        if self.tell_node(id, &admin(), command).is_ok() {
            self.agents.get_mut(&id).unwrap().token = Some(token_sha256);
        }
    }

    pub(super) fn enroll(&mut self, id: NodeId, stale: bool) {
        let Some(token_sha256) = self.agents[&id].token else { return };
        let token_sha256 = if stale { [9; 32] } else { token_sha256 };
        let serial = format!("{:x}", self.next());
        let command = node::Request::Enroll(Box::new(node::Enrollment {
            token_sha256,
            csr_sha256: [1; 32],
            issued: node::CertificateRecord {
                serial: serial.clone(),
                not_after: self.now + TimeDelta::days(3650),
                generation: 0,
                authority: None,
            },
            recovery_public_key: "k".into(),
            boot_id: "boot".into(),
            agent_version: "1".into(),
            protocol: 3,
            inventory: inventory(id, GPUS),
        }));
        if self.tell_node(id, &Principal::Node(id), command).is_ok() {
            assert!(!stale, "a token that was never issued buys nothing");
            *self.bought.entry(token_sha256).or_default() += 1;
            self.agents.get_mut(&id).unwrap().serial = serial;
        }
    }

    pub(super) fn poll(&mut self, id: NodeId) {
        let serial = self.agents[&id].serial.clone();
        if let Ok(node::Reply::Work { orders }) =
            self.tell_node(id, &Principal::Node(id), node::Request::Poll { serial })
        {
            self.agents.get_mut(&id).unwrap().take(orders);
        }
    }

    pub(crate) fn want_at_least(&mut self, minimum: u8) {
        let wanted = (minimum > 0).then(|| (Measurement::Cpu, minimum.into()));
        self.policy.set_minimums(SkuId(Uuid::nil()), ValidationMinimums(wanted.into_iter().collect()));
    }

    pub(crate) fn heartbeat(&mut self, id: NodeId, status: NodeHealthStatus, gpus: u32) {
        self.heartbeat_with(id, node::NodeHealth { status, ..Default::default() }, gpus);
    }

    /// A finding whose tenant has to leave the machine.
    pub(crate) fn heartbeat_with_finding(&mut self, id: NodeId) {
        let found = node::ReportedFinding {
            probe: "disk".into(),
            gpu_uuid: None,
            code: "read_only".into(),
            count: 1,
            first_at: self.now,
            last_at: self.now,
            boot_id: "boot".into(),
            detail: String::new(),
        };
        self.heartbeat_with_findings(id, vec![found]);
    }

    pub(super) fn heartbeat_with_findings(&mut self, id: NodeId, findings: Vec<node::ReportedFinding>) {
        let report = node::FindingReport { sent_at: self.now, findings, is_truncated: false };
        self.heartbeat_with(id, node::NodeHealth { report: Some(report), ..Default::default() }, GPUS);
    }

    fn heartbeat_with(&mut self, id: NodeId, health: node::NodeHealth, gpus: u32) {
        let command = node::Request::Heartbeat {
            serial: self.agents[&id].serial.clone(),
            seen: Box::new(node::AgentContact {
                boot_id: "boot".into(),
                agent_version: "1".into(),
                protocol: 3,
                last_seen_at: self.now,
                silent_at: self.now,
                task_types: None,
                package_digest: None,
                session: None,
                last_heartbeat: None,
            }),
            inventory: Box::new(inventory(id, gpus)),
            health: Box::new(health),
        };
        // A node without an identity is refused; no other command follows.
        let _ = self.tell_node(id, &Principal::Node(id), command);
    }

    pub(crate) fn healthy(&mut self, id: NodeId) {
        self.heartbeat_with_findings(id, Vec::new());
        self.diligent(id, LUCKY);
    }

    pub(super) fn report(&mut self, id: NodeId, which: usize, again: bool) {
        let agent = self.agents.get_mut(&id).unwrap();
        if agent.results.is_empty() {
            return;
        }
        let (task_id, attempt, verdict) = agent.results.remove(which % agent.results.len());
        if again {
            agent.results.push((task_id, attempt, verdict.clone()));
        }
        let serial = agent.serial.clone();
        let before = self.nodes[&id].clone();
        // What a validation measures is below the minimum now and then.
        let others = Measurement::ALL.iter().filter(|it| **it != Measurement::Cpu);
        let not_tested: serde_json::Map<_, _> = others.map(|it| (it.name().to_owned(), json!("no tool"))).collect();
        let measurements = json!({ "cpu_bogo_ops_per_second": self.counter % 16 });
        let output = Some(json!({ "measurements": measurements, "not_tested": not_tested }));
        // Now and then the driver does not show the first GPU of a tenant who has left.
        let gap = match &verdict {
            node::TaskOutcome::Succeeded { proof: Some(tenant) } if self.counter.is_multiple_of(4) => {
                before.tenancy.holds.get(tenant)
            }
            _ => None,
        };
        let unproved = gap.and_then(|hold| hold.placed.devices.first()).map(|device| {
            let gpus = BTreeMap::from([(device.uuid.clone(), "lost".to_owned())]);
            Box::new(node::ProofGap { checked_at: self.now - TimeDelta::seconds(1), gpus })
        });
        let command = node::Request::Report { serial, task_id, attempt, verdict, output, unproved };
        match self.tell_node(id, &Principal::Node(id), command) {
            Ok(_) => {}
            // Reported twice, or too late: the agent drops it in both cases.
            // An enrollment that expires during the first validation voids the certificate.
            Err(
                node::Rejection::TaskUnknown
                | node::Rejection::StaleAttempt { .. }
                | node::Rejection::Removed
                | node::Rejection::CertificateUnknown,
            ) => {
                assert_eq!(self.nodes[&id], before, "a rejection changes nothing");
            }
            Err(other) => panic!("{other}"),
        }
    }

    pub(super) fn diligent(&mut self, id: NodeId, luck: u8) {
        self.poll(id);
        let now = self.now;
        let agent = self.agents.get_mut(&id).unwrap();
        while !agent.taken.is_empty() {
            agent.work(0, luck, now);
        }
        while !self.agents[&id].results.is_empty() {
            self.report(id, 0, false);
        }
    }
}

fn inventory(id: NodeId, gpus: u32) -> node::ReportedInventory {
    // One of the machines has no device isolation.
    let isolates_devices = id.0.as_u128() != 2;
    node::ReportedInventory { isolates_devices, ..node_fixture::reported_inventory(id.0.as_u128(), gpus) }
}
