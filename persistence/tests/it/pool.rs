//! Connections whose user or password is renewed while the process runs.

use crate::test_store::TestStore;
use local_servers::test_database::TestDatabase;
use persistence::Reads;
use persistence::pool::{ConnectionError, PoolConfig, check_connection, open, renew_credentials};
use secrecy::ExposeSecret as _;
use sqlx::{AssertSqlSafe, PgPool};
use std::time::Duration;

/// A role of this database that may do what its owner may.
async fn create_role(db: &TestDatabase, role: &str, password: &str) {
    let statement = format!("CREATE ROLE {role} LOGIN PASSWORD '{password}' IN ROLE CURRENT_USER");
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(&db.pool).await.unwrap();
}

/// The database, as this role with this password.
fn config(db: &TestDatabase, role: &str, password: &str) -> PoolConfig {
    let of_owner = db.url();
    let (_, address) = of_owner.expose_secret().rsplit_once('@').expect("the URL has a user");
    let url = format!("postgres://{role}:{password}@{address}");
    PoolConfig::new(url.into(), Some(db.ca_path().to_owned()))
}

async fn user(pool: &PgPool) -> Result<String, sqlx::Error> {
    sqlx::query_scalar("SELECT session_user::text").fetch_one(pool).await
}

#[tokio::test]
async fn renewed_password_is_used_by_new_connections_and_open_ones_stay() {
    let store = TestStore::new().await;
    let role = format!("renewed_{}", uuid::Uuid::new_v4().simple());
    create_role(&store.db, &role, "first").await;
    let current = config(&store.db, &role, "first");
    let pool = open(&current).unwrap();
    let mut held = pool.acquire().await.unwrap();

    let change = format!("ALTER ROLE {role} PASSWORD 'second'");
    sqlx::raw_sql(AssertSqlSafe(change)).execute(&store.db.pool).await.unwrap();
    let reads = Reads::new(pool.clone());
    assert!(user(&pool).await.is_err(), "the server takes the old password");
    assert!(reads.counts().await.is_err(), "the server takes the old password");

    let wrong = renew_credentials(&pool, &current, &config(&store.db, &role, "third")).await;
    assert!(matches!(wrong, Err(ConnectionError::Refused { .. })), "{wrong:?}");
    renew_credentials(&pool, &current, &config(&store.db, &role, "second")).await.unwrap();
    assert_eq!(user(&pool).await.unwrap(), role);
    reads.counts().await.unwrap();
    let is_same: bool = sqlx::query_scalar("SELECT true").fetch_one(&mut *held).await.unwrap();
    assert!(is_same);
}

#[tokio::test]
async fn socket_of_the_proxy_that_others_remove_is_made_again() {
    let store = TestStore::new().await;
    let role = format!("removed_{}", uuid::Uuid::new_v4().simple());
    create_role(&store.db, &role, "password").await;
    let pool = open(&config(&store.db, &role, "password")).unwrap();
    let mut held = pool.acquire().await.unwrap();
    let folder = pool.connect_options().get_socket().expect("it connects through the proxy").clone();
    std::fs::remove_dir_all(&folder).unwrap();
    let is_back = async {
        while user(&pool).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), is_back).await.expect("new connections are made");
    let stays: bool = sqlx::query_scalar("SELECT true").fetch_one(&mut *held).await.unwrap();
    assert!(stays, "open connections stay");
}

/// A function that shadows the server's own of that name, for new sessions of this database, and raises this error.
async fn shadow_set_config(db: &TestDatabase, error: &str) {
    let name = db.name();
    let statement = format!(
        "CREATE SCHEMA IF NOT EXISTS shadow;
         CREATE OR REPLACE FUNCTION shadow.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS $$
         BEGIN {error} END $$;
         ALTER DATABASE {name} SET search_path = shadow, pg_catalog, public"
    );
    db.execute_raw(&statement).await;
}

#[tokio::test]
async fn connection_whose_time_outs_cannot_be_set_is_refused_for_lack_of_resources_too() {
    let store = TestStore::new().await;
    let config = PoolConfig { acquire_timeout: Duration::from_millis(800), ..store.db.pool_config() };
    for code in ["53200", "53100", "25006", "08P01"] {
        shadow_set_config(&store.db, &format!("RAISE EXCEPTION 'a test' USING ERRCODE = '{code}';")).await;
        let pool = open(&config).unwrap();
        assert!(pool.acquire().await.is_err(), "{code}: it serves without its time-outs");
    }
    // The same pool serves as soon as there is memory again.
    let pool = open(&PoolConfig { acquire_timeout: Duration::from_secs(60), ..config }).unwrap();
    let (user, ()) = tokio::join!(user(&pool), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        store.db.execute_raw("DROP FUNCTION shadow.set_config(text, text, boolean)").await;
    });
    user.unwrap();
}

#[tokio::test]
async fn session_that_the_server_closes_while_its_time_outs_are_set_fails_its_first_statement() {
    let store = TestStore::new().await;
    let config = PoolConfig { acquire_timeout: Duration::from_secs(10), ..store.db.pool_config() };
    shadow_set_config(&store.db, "PERFORM pg_terminate_backend(pg_backend_pid()); RETURN '';").await;
    let pool = open(&config).unwrap();
    // The pool logs no error for it.
    let mut connection = pool.acquire().await.expect("it is given out");
    let failed = sqlx::query("SELECT 1").execute(&mut *connection).await;
    assert!(failed.is_err(), "the session is closed");
}

#[tokio::test]
async fn another_database_is_refused_where_credentials_are_renewed() {
    let store = TestStore::new().await;
    let current = store.db.pool_config();
    let options = store.pool().connect_options();
    let elsewhere = current.url.expose_secret().replace(options.get_database().unwrap(), "postgres");
    let other = PoolConfig { url: elsewhere.into(), ..current.clone() };
    let refused = renew_credentials(store.pool(), &current, &other).await;
    assert!(matches!(refused, Err(ConnectionError::AnotherDatabase { .. })), "{refused:?}");
}

#[tokio::test]
async fn database_that_takes_no_writes_is_named_and_an_idle_connection_to_it_is_closed() {
    let store = TestStore::new().await;
    let config = store.db.pool_config();
    check_connection(&config).await.unwrap();
    let pool = open(&PoolConfig { connections: 1, ..config.clone() }).unwrap();
    let backend = "SELECT pg_backend_pid()";
    let mut connection = pool.acquire().await.unwrap();
    let first: i32 = sqlx::query_scalar(backend).fetch_one(&mut *connection).await.unwrap();
    // As it is for a connection whose server has become a standby.
    sqlx::query("SET default_transaction_read_only = on").execute(&mut *connection).await.unwrap();
    drop(connection);
    // It is back a moment later, and then idle for long enough to be looked at.
    while pool.num_idle() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    tokio::time::sleep(std::time::Duration::from_millis(700)).await;
    let second: i32 = sqlx::query_scalar(backend).fetch_one(&pool).await.unwrap();
    assert_ne!(first, second);

    let name: String = sqlx::query_scalar("SELECT current_database()").fetch_one(store.pool()).await.unwrap();
    let alter = format!("ALTER DATABASE {name} SET default_transaction_read_only = on");
    sqlx::raw_sql(AssertSqlSafe(alter)).execute(store.pool()).await.unwrap();
    let refused = check_connection(&config).await;
    assert!(matches!(refused, Err(ConnectionError::ReadOnly { .. })), "{refused:?}");
}
