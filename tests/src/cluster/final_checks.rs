//! The final checks of a test cluster: that its end state is consistent, and its logs are clean.

use super::storage_dump::spellings;
use super::{TestCluster, builder, logs};
use domain::Shard;
use futures::future::join_all;
use local_servers::process::tail;
use persistence::Secrets;
use persistence::audit::{AuditKeys, AuditVerification, verify};
use persistence::envelope_encryption::KeyRing;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use supervisors::dev::agents::AgentProcess;
use supervisors::shutdown::SHUTDOWN_TIMEOUT;
use uuid::Uuid;

/// The findings that a test has declared as expected.
#[derive(Default)]
pub struct ExpectedFindings {
    pub(super) errors: Vec<String>,
    pub(super) parked: Vec<Uuid>,
    /// The test has changed the audit log in the database.
    pub(super) audit: bool,
}

impl TestCluster {
    /// Checks the end state, stops all processes in order, and checks the logs.
    ///
    /// # Panics
    /// If an event has no effect, an entity is parked, a GPU is held twice, a process does not stop in order, a secret is stored, or a log
    /// contains an undeclared ERROR, a secret or a line that is not as specified. What is stored and logged is reported at once.
    pub async fn shutdown(mut self) {
        self.expect_settled().await;
        self.expect_nothing_parked().await;
        self.expect_every_gpu_held_once().await;
        self.expect_audit_verifies().await;
        self.expect_ledger_verifies().await;
        let mut complaints = self.stored_secrets().await;
        self.stop().await;
        self.expect_no_permission_missing();
        complaints.extend(self.complaints_about_logs());
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
        self.ended = true;
    }

    async fn expect_nothing_parked(&self) {
        let tree = self.admin.get("/api/v1/admin/runtime/tree?parked=true").await.ok();
        let parked: Vec<_> = tree["entities"].as_array().expect("a tree has entities").iter().collect();
        let undeclared: Vec<_> = parked
            .into_iter()
            .filter(|entity| !self.declared.parked.iter().any(|id| entity["id"] == id.to_string()))
            .collect();
        assert!(undeclared.is_empty(), "parked and not declared: {undeclared:#?}");
    }

    /// Asserts that the audit log is unchanged and every row was sealed in time.
    async fn expect_audit_verifies(&self) {
        let ring = KeyRing::load(&self.settings.key_ring_path).expect("the key ring can be read");
        let secrets = Secrets::new(self.pool.clone(), Arc::new(ring));
        let key = supervisors::cluster_keys::audit_key(&secrets).await.expect("the audit key can be opened");
        let shards: Vec<i16> = sqlx::query_scalar("SELECT DISTINCT shard FROM audit")
            .fetch_all(&self.pool)
            .await
            .expect("the audit log can be read");
        let what = AuditVerification {
            shards: shards.into_iter().filter_map(|shard| u8::try_from(shard).ok()).map(Shard).collect(),
            keys: AuditKeys::of(&key),
            heads: Vec::new(),
            // A row has the time of the replica that wrote it, whose clock a test may have set 30 s back.
            unsealed_after: chrono::TimeDelta::seconds(60),
            now: chrono::Utc::now(),
        };
        let report = verify(&self.pool, &what).await.expect("the audit log can be verified");
        assert!(self.declared.audit || report.findings.is_empty(), "the audit log: {:#?}", report.findings);
    }

    /// Asserts that every balance is the sum of its postings (I3).
    async fn expect_ledger_verifies(&self) {
        let report = persistence::Reads::new(self.pool.clone()).verify_ledger().await.expect("the ledger can be read");
        assert!(report.holds(), "the ledger: {report:#?}");
    }

    async fn stored_secrets(&self) -> Vec<String> {
        let (stored, mut complaints) = (self.dump_storage().await, Vec::new());
        for (what, secret) in self.secrets.iter().cloned().chain(self.private_keys_of_agents()) {
            let spellings = spellings(&secret);
            let found = stored.iter().filter(|place| spellings.iter().any(|spelling| place.text.contains(spelling)));
            complaints.extend(found.map(|place| format!("{what} is in {}", place.name)));
        }
        complaints
    }

    /// Asserts that no member published or subscribed to what its roles do not permit. A member that hung for a minute replies late, and
    /// is refused: the permission to reply to a message expires (`supervisors::cluster::nats_permissions`).
    fn expect_no_permission_missing(&self) {
        let log = std::fs::read_to_string(self.nats.log()).unwrap_or_default();
        let is_late_answer = |line: &str| line.contains("Publish Violation - Subject \"_INBOX.");
        let violations: Vec<_> =
            log.lines().filter(|line| line.contains("Violation") && !is_late_answer(line)).collect();
        assert!(violations.is_empty(), "NATS refused members: {violations:#?}");
    }

    async fn stop(&mut self) {
        let agents = self.agents.values_mut().filter_map(|agent| agent.process.as_mut());
        join_all(agents.map(async |process| {
            let ran = process.is_running();
            process.stop().await;
            let status = process.exit_status();
            let well = !ran || status.is_some_and(|status| status.success());
            assert!(well, "the agent {} did not end in order: {status:?}", process.name());
        }))
        .await;
        for replica in &mut self.replicas {
            let ran = replica.is_running();
            let began = Instant::now();
            replica.stop().await;
            let status = replica.exit_status();
            let well = !ran || status.is_some_and(|status| status.success());
            let log = tail(&replica.log(), 20);
            assert!(well, "{} did not end in order: {status:?} after {:?}\n{log}", replica.name(), began.elapsed());
            // A shutdown in which a step hangs takes all of that time.
            assert!(
                began.elapsed() < SHUTDOWN_TIMEOUT,
                "{} ended slowly: {:?}; its log ends with:\n{log}",
                replica.name(),
                began.elapsed()
            );
        }
        self.pool.close().await;
        if let Some(payments) = &mut self.payments {
            payments.processor.stop().await;
        }
        self.nats.stop().await;
    }

    fn log_folders(&self) -> Vec<PathBuf> {
        let servers = [self.nats.log(), self.postgres.log()].map(|log| log.parent().map(PathBuf::from));
        servers.into_iter().flatten().chain([self.logs.clone()]).collect()
    }

    fn complaints_about_logs(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        for log in logs::read(std::slice::from_ref(&self.logs)) {
            let declared = |line: &&str| self.declared.errors.iter().any(|text| line.contains(text.as_str()));
            let undeclared: Vec<_> = log.errors().into_iter().filter(|line| !declared(line)).collect();
            if !undeclared.is_empty() {
                complaints.push(format!("{} logged undeclared errors:\n{}", log.name, undeclared.join("\n")));
            }
            let invalid = log.invalid_lines();
            if !invalid.is_empty() {
                complaints.push(format!(
                    "{} logged lines that are not as specified:\n{}",
                    log.name,
                    invalid.join("\n")
                ));
            }
        }
        let mut secrets: Vec<_> = self.secrets.iter().cloned().chain(self.private_keys_of_agents()).collect();
        secrets.push(("a private key".to_owned(), "PRIVATE KEY-----".to_owned()));
        let logs = logs::read(&self.log_folders());
        for (what, secret) in secrets {
            let found = logs.iter().filter(|log| log.text.contains(&secret));
            complaints.extend(found.map(|log| format!("{what} is in the log of {}", log.name)));
        }
        complaints
    }

    /// The private keys of the agents.
    fn private_keys_of_agents(&self) -> Vec<(String, String)> {
        let folders = self.agents.values().filter_map(|agent| agent.process.as_ref()).map(AgentProcess::folder);
        let keys = folders.flat_map(|folder| {
            let identity = std::fs::read_dir(folder.join("state/identity")).into_iter().flatten().flatten();
            let private = identity.map(|entry| entry.path()).filter(|path| is_private(path));
            private.chain([folder.join("node.key")]).collect::<Vec<_>>()
        });
        // An agent that never enrolled has no key.
        keys.filter_map(|path| builder::lines_of("a node's private key", &path).ok()).flatten().collect()
    }

    /// Prints the last warnings of a failed test's processes, the last lines of its servers, and how busy the machine is.
    fn print_warnings(&self) {
        for path in ["/proc/loadavg", "/proc/pressure/cpu", "/proc/pressure/io"] {
            if let Ok(load) = std::fs::read_to_string(path) {
                eprintln!("--- {path}: {}", load.trim_end());
            }
        }
        for log in [self.nats.log(), self.postgres.log()] {
            eprintln!("--- the end of {}\n{}", log.display(), tail(log, 12));
        }
        for log in logs::read(std::slice::from_ref(&self.logs)) {
            let lines = log.warnings_and_errors();
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

impl Drop for TestCluster {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if std::thread::panicking() {
            self.print_warnings();
            if let Some(folder) = self.folder.take() {
                eprintln!("--- the files of this cluster are in {}", folder.keep().display());
            }
        } else {
            panic!("the test cluster was dropped: call `.shutdown().await`, which runs the final checks");
        }
    }
}
