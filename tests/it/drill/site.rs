//! The topology of `deploy/ha` with backups: Postgres under Patroni, NATS and replicas three times each, behind HAProxy; its loss, and its restore as
//! the page about it says.

use crate::backup::block;
use crate::restore_gate::{refusal, run};
use local_servers::nats::NatsUser;
use local_servers::process::ChildProcess;
use persistence::pool::PoolConfig;
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use supervisors::dev::replica::member;
use supervisors::process_roles::parse_roles;
use tests::cluster::backup_machine::{
    BackupMachine, make_empty_data, output_of, wait_until_archived, wait_until_recovered,
};
use tests::cluster::client::Client;
use tests::cluster::haproxy::HaproxyAddresses;
use tests::cluster::nats_cluster::NatsCluster;
use tests::cluster::patroni::PatroniCluster;
use tests::cluster::{NodeHandle, TestCluster};

const PAGE: &str = "deploy/docs/src/operator/backup.md";
const REPLICAS: usize = 3;
pub(super) const SKU: &str = "h100";

/// The running site. The order of the fields is the order in which a drop stops them.
pub(super) struct Site {
    _haproxy: ChildProcess,
    pub(super) cluster: TestCluster,
    /// One for each server of Postgres, with one repository.
    machines: Vec<BackupMachine>,
    pub(super) database: PatroniCluster,
    nats: NatsCluster,
    pub(super) balancer: HaproxyAddresses,
    /// The nodes that can be rented.
    pub(super) nodes: Vec<NodeHandle>,
    folder: tempfile::TempDir,
}

/// How a restore went.
pub(super) struct RestoreTimes {
    /// pgBackRest's own: the check of the repository, and the restore.
    pub(super) pgbackrest: Duration,
    /// Until Postgres had recovered.
    pub(super) recovered: Duration,
    /// Until a commit had a standby.
    pub(super) replicated: Duration,
}

impl Site {
    pub(super) async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let first = BackupMachine::new();
        let others = [first.beside(), first.beside()];
        let mut machines: Vec<_> = [first].into_iter().chain(others).collect();
        let environments: Vec<_> = machines.iter().map(|machine| machine.environment().clone()).collect();
        let database = PatroniCluster::start_with(&environments).await.unwrap();
        for (server, machine) in machines.iter_mut().enumerate() {
            machine.configure(&database.backed_up(server).await.unwrap());
        }
        let names: Vec<_> = (1..=REPLICAS).map(|number| format!("replica-{number}")).collect();
        let roles = parse_roles("all").unwrap();
        let users = names.iter().map(|name| member(name, &roles)).chain([NatsUser::operator("operator")]).collect();
        let nats = NatsCluster::start(folder.path(), users).unwrap();
        let balancer = HaproxyAddresses::on_free_ports().unwrap();

        database.expect_control(&block(PAGE, "With high availability", "sh,patroni")).await;
        database.wait_healthy().await.unwrap();
        let mut builder = TestCluster::builder()
            .replicas(REPLICAS)
            .with_processor()
            .variable("SVC_DATABASE_URL", &database.url())
            .variable("SVC_DATABASE_CA_PATH", &database.ca_path().display().to_string())
            .variable("SVC_NATS_CA_PATH", &nats.ca_path().display().to_string())
            .variable("SVC_NATS_STREAM_REPLICAS", "3")
            .variable("SVC_MIGRATE_ON_START", "true")
            .variable("SVC_PUBLIC_URL", &balancer.public_url())
            .variable("SVC_NODE_PUBLIC_URL", &balancer.node_url());
        for (index, name) in names.iter().enumerate() {
            builder = builder.variable_of(index, "SVC_NATS_URL", &nats.url(name).unwrap());
        }
        let mut cluster = builder.start().await;
        let haproxy = balancer.start(&cluster.replicas, database.folder()).unwrap();
        for (client, name) in [(&mut cluster.admin, "admin"), (&mut cluster.user, "user")] {
            let token = cluster.identity.token_of(name).unwrap().expose_secret().to_owned();
            *client = Client::new(cluster.authority.certificate_path(), &balancer.public_url(), Some(token));
        }
        cluster.admin.wait_until("/api/v1/admin/runtime/cluster", "the balancer has replicas", |_| true).await;
        let mut site =
            Self { _haproxy: haproxy, cluster, machines, database, nats, balancer, nodes: Vec::new(), folder };
        site.open_pool().await;
        site
    }

    async fn open_pool(&mut self) {
        let config = PoolConfig::new(self.database.url().into(), Some(self.database.ca_path().to_owned()));
        self.cluster.pool = persistence::pool::open(&config).unwrap();
    }

    /// Has so many nodes that can be rented.
    pub(super) async fn complete_nodes(&mut self, count: usize) {
        while self.nodes.len() < count {
            let node = self.cluster.node(SKU).await;
            self.nodes.push(node);
        }
    }

    /// The first backup as the page says, or another one by the timer's command.
    pub(super) async fn back_up(&self, is_first: bool) {
        let leader = self.database.leader().await.expect("there is a primary");
        let script =
            if is_first { block(PAGE, "The first backup", "sh,postgres") } else { "gpuaas-backup diff".to_owned() };
        self.machines[leader].expect(&script).await;
        if is_first {
            let standby = (leader + 1) % REPLICAS;
            let printed = self.machines[standby].expect("gpuaas-backup full").await;
            assert!(printed.contains("this server is a standby"), "{printed}");
        }
    }

    /// Waits until what was acknowledged before this call is in the archive, and a commit after it: a recovery to a time ends before the
    /// first commit that is later.
    pub(super) async fn archive(&self) {
        let leader = self.database.leader().await.expect("there is a primary");
        let pool = self.database.superuser(leader);
        sqlx::query("SELECT pg_current_xact_id()").execute(&pool).await.unwrap();
        wait_until_archived(&pool).await;
    }

    /// The end of every machine with a database or, where `with_nats`, a bus, with all their data. Replicas cannot go on.
    pub(super) async fn lose_data(&mut self, with_nats: bool) -> usize {
        let leader = self.database.leader().await.expect("there is a primary");
        self.database.lose_data().unwrap();
        if with_nats {
            for server in &mut self.nats.servers {
                server.kill9();
            }
            for server in &mut self.nats.servers {
                server.lose_store().unwrap();
            }
        }
        leader
    }

    /// Restores the database on this machine as the page says, and gives it its standbys.
    pub(super) async fn restore(&mut self, server: usize, target: &str, with_nats: bool) -> RestoreTimes {
        let began = Instant::now();
        for index in 0..REPLICAS {
            self.cluster.kill9_replica(index);
        }
        if with_nats {
            for nats in &mut self.nats.servers {
                nats.start().unwrap();
            }
        }
        make_empty_data(&self.database.data_folder(server));
        let (code, printed) =
            self.machines[server].run(&block(PAGE, "Restore", "sh,postgres"), &[("TARGET", target)]).await;
        assert_eq!(code, Some(0), "{printed}");
        let pgbackrest = began.elapsed();
        let mut alone = self.database.servers[server].start_restored().unwrap();
        wait_until_recovered(&self.database.superuser(server), alone.log()).await;
        alone.stop(Duration::from_secs(60)).await;
        let recovered = began.elapsed();
        // What Patroni knows is of the cluster that was lost.
        let leader = self.database.name(server).to_owned();
        let removing = block(PAGE, "With high availability", "sh,patroni-restore");
        self.database.expect_control_with(&removing, &[("OLD_PRIMARY", &leader)]).await;
        self.database.servers[server].start().unwrap();
        self.database.wait_for_leader(server).await.unwrap();
        for other in (0..REPLICAS).filter(|other| *other != server) {
            self.database.servers[other].start().unwrap();
        }
        self.database.wait_for_members(2).await.unwrap();
        self.open_pool().await;
        RestoreTimes { pgbackrest, recovered, replicated: began.elapsed() }
    }

    /// What a replica says that is started too early.
    pub(super) async fn refusal(&mut self) -> String {
        refusal(&mut self.cluster.replicas[0]).await
    }

    /// Copies of the nodes' state, a folder for each node.
    pub(super) async fn copy_nodes(&self) -> PathBuf {
        let copies = self.folder.path().join("nodes");
        let _ = fs::remove_dir_all(&copies);
        for node in &self.nodes {
            let copying = r#"mkdir -p "$0" && cp -r "$1" "$0""#;
            let mut command = Command::new("sh");
            command.args(["-c", copying]).arg(copies.join(&node.name));
            command.arg(self.cluster.agent_folder(node).join("state/allocations"));
            let (code, printed) = output_of(command).await;
            assert_eq!(code, Some(0), "{printed}");
        }
        copies
    }

    /// `gpuaas recover-report`, and its exit status.
    pub(super) async fn recover_report(&self, nodes: &std::path::Path) -> (Option<i32>, Value) {
        let (nodes, operator) = (nodes.display().to_string(), self.nats.url("operator").unwrap());
        let arguments = ["recover-report", "--nodes", &nodes, "--nats-url", &operator, "--output", "json"];
        let output = self.cluster.replicas[0].command(&arguments).output().await.unwrap();
        let report = serde_json::from_slice(&output.stdout);
        (output.status.code(), report.unwrap_or_else(|error| panic!("{error}: {output:?}")))
    }

    pub(super) async fn begin_incarnation(&self) {
        let (code, printed) = run(&self.cluster.replicas[0], &["begin-incarnation"]).await;
        assert!(code == Some(0) && printed.contains("members may start"), "{printed}");
    }

    pub(super) async fn start_replicas(&mut self) {
        let starting = self.cluster.replicas.iter_mut().map(supervisors::dev::replica::Replica::start_again);
        futures::future::try_join_all(starting).await.unwrap();
    }
}
