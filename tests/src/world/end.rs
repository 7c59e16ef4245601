//! The end of a world: was everything left as it should be?

use super::stored::spellings;
use super::{World, logs, plan};
use domain::Shard;
use persistence::Secrets;
use persistence::audit::{AuditKeys, Verify, verify};
use persistence::envelope::KeyRing;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervisors::dev::agents::AgentProcess;
use uuid::Uuid;

/// What a test said would be left behind.
#[derive(Default)]
pub struct Declared {
    pub(super) errors: Vec<String>,
    pub(super) parked: Vec<Uuid>,
    /// The test has changed the audit log behind the service's back.
    pub(super) audit: bool,
}

impl World {
    /// Looks at everything that is left, stops everything in order, and reads the logs.
    ///
    /// # Panics
    /// Where an event has no effect, an entity is parked, a GPU is held twice, a process does not end in order, or a log holds an
    /// undeclared ERROR, a secret or a line that is not as specified.
    pub async fn end(mut self) {
        self.expect_settled().await;
        self.expect_nothing_parked().await;
        self.expect_every_gpu_held_once().await;
        self.expect_audit_verifies().await;
        self.expect_ledger_verifies().await;
        self.expect_no_secret_kept().await;
        self.stop().await;
        self.expect_no_permission_missing();
        self.judge_logs();
        self.ended = true;
    }

    async fn expect_nothing_parked(&self) {
        let tree = self.admin.get("/api/v1/admin/runtime/tree?parked=true").await.ok();
        let parked: Vec<_> = tree["entities"].as_array().expect("a tree has entities").iter().collect();
        let undeclared: Vec<_> = parked
            .into_iter()
            .filter(|entity| !self.declared.parked.iter().any(|id| entity["id"] == id.to_string()))
            .collect();
        assert!(undeclared.is_empty(), "parked, and nobody said so: {undeclared:#?}");
    }

    /// Nobody has changed the audit log, and every row was sealed in time.
    async fn expect_audit_verifies(&self) {
        let ring = KeyRing::load(&self.settings.key_ring_path).expect("the key ring can be read");
        let secrets = Secrets::new(self.pool.clone(), Arc::new(ring));
        let key = supervisors::trust::audit_key(&secrets).await.expect("the audit key can be opened");
        let shards: Vec<i16> = sqlx::query_scalar("SELECT DISTINCT shard FROM audit")
            .fetch_all(&self.pool)
            .await
            .expect("the audit log can be read");
        let what = Verify {
            shards: shards.into_iter().filter_map(|shard| u8::try_from(shard).ok()).map(Shard).collect(),
            keys: AuditKeys::of(&key),
            heads: Vec::new(),
            // A row is dated by the clock of the replica that wrote it, which a test may have put 30 s back.
            unsealed_after: chrono::TimeDelta::seconds(60),
            now: chrono::Utc::now(),
        };
        let report = verify(&self.pool, &what).await.expect("the audit log can be verified");
        assert!(self.declared.audit || report.findings.is_empty(), "the audit log: {:#?}", report.findings);
    }

    /// Every balance is the sum of its entries (I3).
    async fn expect_ledger_verifies(&self) {
        let report = persistence::Reads::new(self.pool.clone()).verify_ledger().await.expect("the ledger can be read");
        assert!(report.holds(), "the ledger: {report:#?}");
    }

    async fn expect_no_secret_kept(&self) {
        let kept = self.everything_kept().await;
        for (what, secret) in self.secrets.iter().cloned().chain(self.keys_of_agents()) {
            for spelling in spellings(&secret) {
                for place in &kept {
                    assert!(!place.text.contains(&spelling), "{what} stands in {}", place.name);
                }
            }
        }
    }

    /// No member published or subscribed to what its roles do not permit. A member that hung for a minute answers too late, and is refused:
    /// permission to answer a message expires (`supervisors::cluster::permissions`).
    fn expect_no_permission_missing(&self) {
        let log = std::fs::read_to_string(self.nats.log()).unwrap_or_default();
        let is_late_answer = |line: &str| line.contains("Publish Violation - Subject \"_INBOX.");
        let violations: Vec<_> =
            log.lines().filter(|line| line.contains("Violation") && !is_late_answer(line)).collect();
        assert!(violations.is_empty(), "NATS refused members: {violations:#?}");
    }

    async fn stop(&mut self) {
        for life in self.agents.values_mut() {
            if let Some(process) = &mut life.process {
                let ran = process.is_running();
                process.stop().await;
                let status = process.exit_status();
                let well = !ran || status.is_some_and(|status| status.success());
                assert!(well, "the agent {} did not end in order: {status:?}", process.name());
            }
        }
        for replica in &mut self.replicas {
            let ran = replica.is_running();
            let began = Instant::now();
            replica.stop().await;
            let status = replica.exit_status();
            let well = !ran || status.is_some_and(|status| status.success());
            assert!(well, "{} did not end in order: {status:?} after {:?}", replica.name(), began.elapsed());
            assert!(
                began.elapsed() < Duration::from_secs(15),
                "{} ended slowly: {:?}",
                replica.name(),
                began.elapsed()
            );
        }
        self.pool.close().await;
        if let Some(payments) = &mut self.payments {
            payments.processor.stop().await;
        }
        self.nats.stop().await;
        self.postgres.stop().await;
    }

    fn log_folders(&self) -> Vec<PathBuf> {
        let servers = [self.nats.log(), self.postgres.log()].map(|log| log.parent().map(PathBuf::from));
        servers.into_iter().flatten().chain([self.logs.clone()]).collect()
    }

    fn judge_logs(&self) {
        for log in logs::read(std::slice::from_ref(&self.logs)) {
            let declared = |line: &&str| self.declared.errors.iter().any(|text| line.contains(text.as_str()));
            let undeclared: Vec<_> = log.errors().into_iter().filter(|line| !declared(line)).collect();
            assert!(undeclared.is_empty(), "{} logged what nobody declared:\n{}", log.name, undeclared.join("\n"));
            let flawed = log.flawed();
            assert!(flawed.is_empty(), "{} logged lines that are not as specified:\n{}", log.name, flawed.join("\n"));
        }
        let secrets = self.secrets.iter().cloned().chain(self.keys_of_agents());
        let logs = logs::read(&self.log_folders());
        for (what, secret) in secrets {
            for log in &logs {
                assert!(!log.text.contains(&secret), "{what} stands in the log of {}", log.name);
            }
        }
        for log in &logs {
            assert!(!log.text.contains("PRIVATE KEY-----"), "a private key stands in the log of {}", log.name);
        }
    }

    /// The private keys that the agents made.
    fn keys_of_agents(&self) -> Vec<(String, String)> {
        let folders = self.agents.values().filter_map(|life| life.process.as_ref()).map(AgentProcess::folder);
        let keys = folders.flat_map(|folder| {
            let identity = std::fs::read_dir(folder.join("state/identity")).into_iter().flatten().flatten();
            let private = identity.map(|entry| entry.path()).filter(|path| is_private(path));
            private.chain([folder.join("node.key")]).collect::<Vec<_>>()
        });
        // An agent that never enrolled has no key.
        keys.filter_map(|path| plan::lines_of("a node's private key", &path).ok()).flatten().collect()
    }

    /// What a failed test shows of its world.
    fn tell(&self) {
        for log in logs::read(std::slice::from_ref(&self.logs)) {
            let lines = log.lines_at_or_above_warn();
            eprintln!("--- {}: its last {} lines of WARN and above", log.name, lines.len().min(25));
            for line in &lines[lines.len().saturating_sub(25)..] {
                eprintln!("{line}");
            }
        }
    }
}

fn is_private(path: &std::path::Path) -> bool {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.contains("PRIVATE KEY-----")
}

impl Drop for World {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if std::thread::panicking() {
            self.tell();
            if let Some(folder) = self.folder.take() {
                eprintln!("--- everything of this world lies in {}", folder.keep().display());
            }
        } else {
            panic!("the world was dropped: end it with `.end().await`, which looks at what is left");
        }
    }
}
