//! A database that is older than what members have published: nothing starts on it before an incarnation is begun.

use local_servers::postgres::program;
use persistence::envelope_encryption::KeyRing;
use secrecy::ExposeSecret as _;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection, PgPool};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use supervisors::dev::replica::Replica;
use tests::cluster::TestCluster;
use tokio::time::sleep;

/// Runs a subcommand of `gpuaas` with the settings of a replica. Returns its exit status and what it printed.
pub(crate) async fn run(replica: &Replica, arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = replica.command(arguments).output().await.unwrap();
    (status.code(), format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)))
}

/// The error of a replica that does not start.
pub(crate) async fn refusal(replica: &mut Replica) -> String {
    format!("{:#}", replica.start_again().await.expect_err("nothing starts"))
}

/// Waits until the bus has a mark that was raised after this call.
pub(crate) async fn wait_until_marked(cluster: &TestCluster) {
    let mark = "SELECT mark FROM recovery_mark";
    let before: i64 = sqlx::query_scalar(mark).fetch_one(&cluster.pool).await.unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    // A mark is published before the next one is raised.
    while sqlx::query_scalar::<_, i64>(mark).fetch_one(&cluster.pool).await.unwrap() < before + 2 {
        assert!(Instant::now() < until, "the mark is not raised");
        sleep(Duration::from_millis(100)).await;
    }
}

/// A copy of the cluster's database as it is, on the same server.
async fn copy(cluster: &TestCluster, name: &'static str) -> String {
    let db = &cluster.postgres;
    db.execute_raw(&format!("CREATE DATABASE {name}_{}", db.name())).await;
    let source = db.pool_config().url.expose_secret().to_owned();
    let target = source.replace(&format!("/{}?", db.name()), &format!("/{name}_{}?", db.name()));
    let (dump, restore) = (program("pg_dump").unwrap(), program("psql").unwrap());
    let script = r#""$0" --dbname "$1" | "$2" --quiet --no-psqlrc --set=ON_ERROR_STOP=1 --dbname "$3" >/dev/null"#;
    let mut shell = Command::new("bash");
    shell.args(["-o", "pipefail", "-c", script]).arg(dump).arg(source).arg(restore).arg(target);
    let output = tokio::task::spawn_blocking(move || shell.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let copy = db.url().expose_secret().replace(&format!("/{}?", db.name()), &format!("/{name}_{}?", db.name()));
    // As in a backup, no heartbeat is recent.
    execute_at(&copy, "UPDATE member SET beat_at = beat_at - interval '1 minute'").await;
    copy
}

async fn execute_at(url: &str, statement: &'static str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::raw_sql(statement).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn member_of_the_old_database_prevents_an_incarnation_and_ends_when_one_is_begun_all_the_same() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let restored = copy(&cluster, "restored").await;
    wait_until_marked(&cluster).await;
    cluster.replicas[1].stop().await;
    cluster.replicas[1].set_variable("SVC_DATABASE_URL", &restored);
    // On the copy, which another cluster does not have, the second replica does not start while the first one lives elsewhere.
    cluster.allow_error("gpuaas: ");
    let refused = refusal(&mut cluster.replicas[1]).await;
    assert!(refused.contains("exit status: 78") && refused.contains("was restored from a backup"), "{refused}");
    assert!(refused.contains("gpuaas begin-incarnation") && refused.contains("recover-report"), "{refused}");
    let (code, printed) = run(&cluster.replicas[1], &["begin-incarnation"]).await;
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("replica-1 still runs, on another database"), "{printed}");

    // An operator who knows better. The old member publishes once more, and is superseded.
    cluster.allow_error("this member ends");
    let (code, printed) = run(&cluster.replicas[1], &["begin-incarnation", "--without-nats"]).await;
    assert!(code == Some(0) && printed.starts_with("incarnation "), "{printed}");
    cluster.replicas[1].start_again().await.expect("the restored database is admitted");
    let until = Instant::now() + Duration::from_secs(60);
    while cluster.replicas[0].pid().is_some() && cluster.replicas[0].is_running() {
        assert!(Instant::now() < until, "the member of the old database goes on");
        sleep(Duration::from_millis(100)).await;
    }
    let refused = refusal(&mut cluster.replicas[0]).await;
    assert!(refused.contains("exit status: 78") && refused.contains("was restored from a backup"), "{refused}");
    // On the new database it is a member again.
    cluster.replicas[0].set_variable("SVC_DATABASE_URL", &restored);
    cluster.restart_replica(0).await;
    let (socket, port) = cluster.postgres.socket_address();
    let restored = format!("restored_{}", cluster.postgres.name());
    let options =
        PgConnectOptions::new_without_pgpass().socket(socket).port(port).username("gpuaas").database(&restored);
    cluster.pool = PgPool::connect_with(options).await.unwrap();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_of_another_cluster_of_an_older_schema_or_with_another_key_ring_is_named_and_nothing_starts() {
    let mut cluster = TestCluster::start().await;
    let restored = copy(&cluster, "restored").await;
    wait_until_marked(&cluster).await;
    cluster.replicas[0].stop().await;
    let original = cluster.postgres.url().expose_secret().to_owned();
    cluster.replicas[0].set_variable("SVC_DATABASE_URL", &restored);
    cluster.allow_error("gpuaas: ");

    // With another key ring, neither is an incarnation begun nor does anything start after it.
    let right = cluster.settings.key_ring_path.clone();
    let wrong = right.with_file_name("another-key-ring");
    KeyRing::create(&wrong).unwrap();
    cluster.replicas[0].set_variable("SVC_KEK_FILE", wrong.to_str().unwrap());
    for subcommand in [&["begin-incarnation"][..], &["key-ring", "check"]] {
        let (code, printed) = run(&cluster.replicas[0], subcommand).await;
        assert!(code == Some(78) && printed.contains("the key ring does not fit the database"), "{printed}");
    }
    let refused = refusal(&mut cluster.replicas[0]).await;
    assert!(refused.contains("exit status: 78") && refused.contains("the key ring does not fit"), "{refused}");
    cluster.replicas[0].set_variable("SVC_KEK_FILE", right.to_str().unwrap());
    let (code, printed) = run(&cluster.replicas[0], &["key-ring", "check"]).await;
    assert!(code == Some(0) && printed.contains("the key ring fits the database"), "{printed}");

    // Another cluster's: a member of it publishes elsewhere.
    execute_at(&restored, "UPDATE recovery_mark SET cluster_id = gen_random_uuid(), mark = mark + 100000").await;
    let refused = refusal(&mut cluster.replicas[0]).await;
    assert!(refused.contains("exit status: 78") && refused.contains("the database is of cluster"), "{refused}");
    let (code, printed) = run(&cluster.replicas[0], &["begin-incarnation"]).await;
    assert!(code == Some(78) && printed.contains("--force"), "{printed}");

    // The command line names the database, too, as for the other commands.
    cluster.replicas[0].set_variable("SVC_DATABASE_URL", "");
    for subcommand in ["begin-incarnation", "recover-report"] {
        let (code, printed) = run(&cluster.replicas[0], &[subcommand]).await;
        assert!(code == Some(78) && printed.contains("SVC_DATABASE_URL is not set"), "{printed}");
    }
    let (code, printed) = run(&cluster.replicas[0], &["begin-incarnation", "--database-url", &restored]).await;
    assert!(code == Some(78) && printed.contains("--force"), "{printed}");
    let (code, printed) = run(&cluster.replicas[0], &["begin-incarnation", "--database-url", &original]).await;
    assert!(code == Some(0) && printed.contains("nothing was restored since incarnation 0"), "{printed}");
    let operator = cluster.nats.url("operator").unwrap().expose_secret().to_owned();
    let arguments = ["recover-report", "--nats-url", &operator, "--database-url", &original];
    let (code, printed) = run(&cluster.replicas[0], &arguments).await;
    assert!(code == Some(0) && printed.starts_with("the database "), "{printed}");
    cluster.replicas[0].set_variable("SVC_DATABASE_URL", &restored);

    // Older than the schema: of a release before marks.
    let older = "DROP TABLE recovery_mark, backup_record; DELETE FROM _sqlx_migrations WHERE version = 45";
    execute_at(&restored, older).await;
    let refused = refusal(&mut cluster.replicas[0]).await;
    assert!(refused.contains("exit status: 78") && refused.contains("a schema without marks"), "{refused}");
    let (code, printed) = run(&cluster.replicas[0], &["begin-incarnation"]).await;
    assert!(code == Some(78) && printed.contains("run `gpuaas migrate`"), "{printed}");
    let (code, printed) = run(&cluster.replicas[0], &["migrate"]).await;
    assert!(code == Some(0) && printed.contains("0045  expand"), "{printed}");

    // The database of before is as good as it was: nothing was begun on the bus.
    cluster.replicas[0].set_variable("SVC_DATABASE_URL", &original);
    let (code, printed) = run(&cluster.replicas[0], &["begin-incarnation"]).await;
    assert!(code == Some(0) && printed.contains("nothing was restored since incarnation 0"), "{printed}");
    cluster.restart_replica(0).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn moved_database_is_admitted_where_nats_answers_and_refused_where_it_cannot_say() {
    let mut cluster = TestCluster::start().await;
    wait_until_marked(&cluster).await;
    cluster.replicas[0].stop().await;
    // As after a promotion: the last mark was committed on the timeline before.
    cluster.postgres.execute("UPDATE recovery_mark SET timeline = timeline - 1").await;
    cluster.allow_error("gpuaas: ");
    cluster.nats.kill9();
    let refused = refusal(&mut cluster.replicas[0]).await;
    assert!(refused.contains("exit status: 69") && refused.contains("NATS cannot say"), "{refused}");
    cluster.nats.start_again().await.unwrap();
    cluster.restart_replica(0).await;
    cluster.shutdown().await;
}
