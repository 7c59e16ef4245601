use super::fake::{Answer, FakeRegistry, challenge, endless, redirect, silence};
use super::*;
use axum::response::{IntoResponse as _, Response};
use local_servers::pki::Authority;
use std::sync::Arc;

const NAME: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const ACCOUNT: &str = "Basic cHVsbGVyOnB1bGwtc2VjcmV0";

struct Fixture {
    authority: Authority,
    _folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        crate::testing::install_crypto();
        let folder = tempfile::tempdir().unwrap();
        Self { authority: Authority::create(folder.path()).unwrap(), _folder: folder }
    }

    async fn registry(&self, answer: impl Fn(&str, Option<&str>) -> Response + Send + Sync + 'static) -> FakeRegistry {
        let answer: Box<Answer> = Box::new(answer);
        FakeRegistry::start(&self.authority, answer).await
    }

    /// The relay's client of a registry, with an account and limits that are longer than any pause of the machine.
    fn client(&self, registry: &FakeRegistry) -> PackageRegistry {
        let long = Duration::from_secs(60);
        self.client_within(registry, TimeLimits { head: long, piece: long, blob: long })
    }

    /// The same with short limits.
    fn hasty_client(&self, registry: &FakeRegistry) -> PackageRegistry {
        let second = Duration::from_secs(1);
        self.client_within(registry, TimeLimits { head: 3 * second, piece: second, blob: 3 * second })
    }

    fn client_within(&self, registry: &FakeRegistry, limits: TimeLimits) -> PackageRegistry {
        let reference = format!("localhost:{}/gpuaas/agent", registry.port).parse().unwrap();
        let account = PullAccount { user: "puller".into(), password: SecretString::from("pull-secret") };
        let client = PackageRegistry::new(&reference, Some(self.authority.certificate_pem()), Some(account)).unwrap();
        PackageRegistry { limits, ..client }
    }
}

fn of_account(credential: Option<&str>, answer: impl FnOnce() -> Response) -> Response {
    if credential == Some(ACCOUNT) { answer() } else { challenge("Basic realm=\"packages\"") }
}

async fn blob(client: &PackageRegistry) -> Result<Vec<u8>, String> {
    let (_, body) = client.blob(NAME).await.map_err(|error| error.to_string())?;
    axum::body::to_bytes(body, 1 << 20).await.map(|bytes| bytes.to_vec()).map_err(|error| error.to_string())
}

#[tokio::test]
async fn redirect_of_a_blob_is_followed_over_https_without_the_account_and_of_a_manifest_never() {
    let it = Fixture::new();
    let store = it.registry(|_, _| "content".into_response()).await;
    let to = format!("{}/stored", store.url());
    let registry = it.registry(move |_, credential| of_account(credential, || redirect(to.clone()))).await;
    let client = it.client(&registry);
    let refused = client.manifest(NAME).await.unwrap_err();
    assert!(matches!(refused, RelayError::Redirects(_)), "{refused}");
    assert!(store.requests().is_empty());
    assert_eq!(blob(&client).await.unwrap(), b"content");
    assert_eq!(store.requests(), [("/stored".to_owned(), None)]);
    assert!(registry.requests().iter().any(|(_, credential)| credential.as_deref() == Some(ACCOUNT)));

    let plain = it.registry(|_, _| redirect("http://localhost:1/stored".to_owned())).await;
    let refused = blob(&it.client(&plain)).await.unwrap_err();
    assert!(refused.contains("not to an HTTPS address"), "{refused}");
}

#[tokio::test]
async fn chain_of_redirects_has_an_end() {
    let it = Fixture::new();
    let port = Arc::new(std::sync::OnceLock::new());
    let to = Arc::clone(&port);
    let registry = it.registry(move |_, _| redirect(format!("https://localhost:{}/again", to.get().unwrap()))).await;
    port.set(registry.port).unwrap();
    let refused = blob(&it.client(&registry)).await.unwrap_err();
    assert!(refused.contains("never ends"), "{refused}");
    assert_eq!(registry.requests().len(), 1 + REDIRECTS);
}

#[tokio::test]
async fn account_gets_a_token_from_the_realm_and_the_registry_gets_the_token_alone() {
    let it = Fixture::new();
    let realm =
        it.registry(|_, credential| of_account(credential, || r#"{"token": "pull-token"}"#.into_response())).await;
    let asked =
        format!("Bearer realm=\"{}/token\",service=\"packages\",scope=\"repository:gpuaas/agent:pull\"", realm.url());
    let registry = it
        .registry(move |_, credential| match credential {
            Some("Bearer pull-token") => "content".into_response(),
            _ => challenge(&asked),
        })
        .await;
    assert_eq!(blob(&it.client(&registry)).await.unwrap(), b"content");
    let sent: Vec<_> = registry.requests().into_iter().map(|(_, credential)| credential).collect();
    assert_eq!(sent, [None, Some("Bearer pull-token".to_owned())]);
    assert_eq!(realm.requests(), [("/token".to_owned(), Some(ACCOUNT.to_owned()))]);

    // An answer of a realm that is longer than any token.
    let long =
        it.registry(|_, _| format!("{{\"token\": \"{}\"}}", "x".repeat(REALM_ANSWER_BYTES)).into_response()).await;
    let asked = format!("Bearer realm=\"{}/token\"", long.url());
    let registry = it.registry(move |_, _| challenge(&asked)).await;
    let refused = blob(&it.client(&registry)).await.unwrap_err();
    assert!(refused.contains("more than 65536 bytes"), "{refused}");
    // A list is no answer, whose first item serde would read as the token.
    let list = it.registry(|_, _| r#"["pull-token", null]"#.into_response()).await;
    let asked = format!("Bearer realm=\"{}/token\"", list.url());
    let registry = it.registry(move |_, _| challenge(&asked)).await;
    blob(&it.client(&registry)).await.unwrap_err();
    assert_eq!(registry.requests().len(), 1, "the registry gets no token");
}

#[tokio::test]
async fn registry_that_is_silent_ends_the_request_in_time() {
    let it = Fixture::new();
    let registry = it.registry(|_, _| endless()).await;
    let client = it.hasty_client(&registry);
    let within = Duration::from_secs(60);
    let manifest = timeout(within, client.manifest(NAME)).await.expect("a manifest has a limit");
    assert!(matches!(manifest, Err(RelayError::Slow)), "{manifest:?}");
    let cut = timeout(within, blob(&client)).await.expect("each piece of a blob has a limit");
    assert!(cut.is_err(), "a part of a blob is not all of it: {cut:?}");

    let registry = it.registry(|_, _| silence()).await;
    let answer = timeout(within, it.hasty_client(&registry).manifest(NAME)).await.expect("an answer has a limit");
    assert!(matches!(answer, Err(RelayError::Slow)), "{answer:?}");
}

#[tokio::test]
async fn blob_that_never_ends_is_cut_off_although_its_pieces_are_in_time() {
    let it = Fixture::new();
    let registry = it
        .registry(|_, _| {
            let piece = || async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                Some((Ok::<_, std::io::Error>("piece"), ()))
            };
            Body::from_stream(stream::unfold((), move |()| piece())).into_response()
        })
        .await;
    let client = it.hasty_client(&registry);
    let cut = timeout(Duration::from_secs(60), blob(&client)).await.expect("a blob has a limit");
    assert!(cut.is_err(), "{cut:?}");
}

#[tokio::test]
async fn manifest_is_read_up_to_its_bound_and_refusals_are_distinguished() {
    let it = Fixture::new();
    let most = usize::try_from(MANIFEST_BYTES).unwrap();
    for (bytes, is_read) in [(most, true), (most + 1, false)] {
        let registry = it.registry(move |_, _| vec![b' '; bytes].into_response()).await;
        let read = it.client(&registry).manifest(NAME).await;
        assert_eq!(read.is_ok(), is_read, "{bytes} bytes: {:?}", read.err());
    }
    for (status, code, is_expected) in [
        (404, 404, (|error| matches!(error, RelayError::NotFound)) as fn(&RelayError) -> bool),
        (403, 503, |error| matches!(error, RelayError::Refused(_))),
        (500, 503, |error| matches!(error, RelayError::Status(_))),
        (429, 503, |error| matches!(error, RelayError::Status(_))),
    ] {
        let status = StatusCode::from_u16(status).unwrap();
        let registry = it.registry(move |_, _| status.into_response()).await;
        let error = it.client(&registry).manifest(NAME).await.unwrap_err();
        assert!(is_expected(&error), "{status}: {error}");
        assert_eq!(ApiError::from(error).into_response().status().as_u16(), code, "{status}");
    }
    // An account that the registry does not take is not sent again and again.
    let registry = it.registry(|_, _| challenge("Basic realm=\"packages\"")).await;
    let error = it.client(&registry).manifest(NAME).await.unwrap_err();
    assert!(matches!(error, RelayError::Refused(StatusCode::UNAUTHORIZED)), "{error}");
    assert_eq!(registry.requests().len(), 2);
}
