//! Logins in shared homes: file systems without locks, without room, or that are read-only.

use super::*;
use rustix::io::Errno;
use std::io;

fn without_locks(store: &Store) -> Store {
    let mut store = store.clone();
    store.calls.lock = |_| Err(Errno::NOSYS);
    store.calls.try_lock = |_| Err(Errno::NOSYS);
    store
}

fn without_room(store: &Store) -> Store {
    let mut store = store.clone();
    store.calls.create = |_| Err(io::Error::from(io::ErrorKind::StorageFull));
    store
}

async fn run(command_line: &[&str], server: &str, store: &Store) -> Result<u8, Failure> {
    let arguments = <crate::Arguments as clap::Parser>::try_parse_from(command_line).unwrap();
    let (server, store) = (Some(server.to_owned()), store.clone());
    let connection = Connection { server, ca_bundle: None, token: None, key: None, store, out: OUT };
    crate::execute(arguments.command, connection).await
}

const LOGIN: [&str; 6] = ["gpuctl", "login", "--service-account", "sa-key", "--client-secret", "its-secret"];

#[tokio::test]
async fn login_renewal_and_logout_work_on_a_file_system_without_locks() {
    let issuer = Rotating::default();
    let server = issuer.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let store = without_locks(&Store::new(folder.path().to_owned(), "default").unwrap());
    run(&LOGIN, &server, &store).await.unwrap();
    let (_, login) = stored_session(folder.path(), &server, -5);
    // The token endpoint of the person's login has counted the one of the service account.
    let login = Login { refresh_token: Some("refresh-1".to_owned().into()), ..login };
    store.write(&login).unwrap();
    api(&store, &login).get("/api/v1/things", &[]).await.unwrap();
    let now = store.read().unwrap().unwrap();
    assert_eq!(now.refresh_token.unwrap().expose_secret(), "refresh-2");
    run(&["gpuctl", "logout"], &server, &store).await.unwrap();
    assert!(store.read().unwrap().is_none());
}

#[tokio::test]
async fn login_that_could_not_be_stored_does_not_begin() {
    let issuer = Rotating::default();
    let server = issuer.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let store = without_room(&Store::new(folder.path().to_owned(), "default").unwrap());
    let failure = run(&LOGIN, &server, &store).await.unwrap_err();
    assert_eq!((failure.exit_status, issuer.renewed()), (ExitStatus::Failed, 0), "{failure}");
    assert!(failure.next.as_deref().unwrap_or_default().contains("XDG_CONFIG_HOME"), "{failure}");
}

#[tokio::test]
async fn refresh_token_whose_successor_could_not_be_stored_is_not_spent() {
    let provider = Rotating::default();
    let server = provider.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let (store, login) = stored_session(folder.path(), &server, -5);
    let failure = api(&without_room(&store), &login).get("/api/v1/things", &[]).await.unwrap_err();
    assert_eq!((failure.exit_status, provider.renewed()), (ExitStatus::Failed, 0), "{failure}");
    // With room again, the login goes on.
    api(&store, &login).get("/api/v1/things", &[]).await.unwrap();
    assert_eq!(provider.renewed(), 1);
}

#[tokio::test]
async fn service_account_works_from_a_home_without_room() {
    let issuer = Rotating::default();
    let server = issuer.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().to_owned(), "default").unwrap();
    run(&LOGIN, &server, &store).await.unwrap();
    let mut login = store.read().unwrap().unwrap();
    login.expires_at = Some(Utc::now() - TimeDelta::seconds(5));
    api(&without_room(&store), &login).get("/api/v1/things", &[]).await.unwrap();
    assert_eq!(issuer.renewed(), 2);
}

#[tokio::test]
async fn refresh_token_that_another_process_spent_is_replaced_by_its_successor() {
    let provider = Rotating::default();
    let server = provider.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let (store, login) = stored_session(folder.path(), &server, -5);
    // Both processes read the first refresh token; without a lock neither waits for the other.
    let apis: Vec<Api> = (0..2).map(|_| api(&without_locks(&store), &login)).collect();
    for answer in futures::future::join_all(apis.iter().map(|api| api.get("/api/v1/things", &[]))).await {
        answer.unwrap();
    }
    assert_eq!(provider.renewed(), 1);
    assert_eq!(store.read().unwrap().unwrap().refresh_token.unwrap().expose_secret(), "refresh-1");
}
