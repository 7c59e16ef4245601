//! A real OCI registry for a test: Debian's docker-registry with TLS and htpasswd, on the loopback; and layouts of the agent's package in it.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use agent_package::build::{Inputs, build};
use agent_package::contents::{PROGRAMS, UNITS};
use agent_package::registry::{Credential, Location, Registry, push_layout};
use ed25519_dalek::SigningKey;
use local_servers::pki::Authority;
use local_servers::ports::free_port;
use local_servers::process::{ChildProcess, Launch};
use secrecy::SecretString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wire::package::{Digest, Reference};

const STARTS_WITHIN: Duration = Duration::from_secs(60);
const PUSHES_WITHIN: Duration = Duration::from_secs(120);
/// The repository of the package.
pub const REPOSITORY: &str = "gpuaas/agent";
pub const USER: &str = "puller";
/// The passwords of the account, before and after a change, with their bcrypt hashes for htpasswd.
pub const PASSWORD: (&str, &str) = ("pull-before", "$2y$04$abcdefghijklmnopqrstuuLSyQHS7BDe8kD5fNdDipdgYXkRNWQPe");
pub const NEXT_PASSWORD: (&str, &str) = ("pull-after", "$2y$04$abcdefghijklmnopqrstuuJ9LEWPq2/FVK8eFxKObkE9V4e/9bwli");

/// A running registry. Dropping it stops it.
pub struct PackageRegistryServer {
    pub authority: Authority,
    pub port: u16,
    process: Option<ChildProcess>,
    program: PathBuf,
    folder: tempfile::TempDir,
}

impl PackageRegistryServer {
    /// `tools` is where `deploy/test --tools` installs.
    pub async fn start(tools: &Path) -> Self {
        let program = tools.join("debian/usr/bin/docker-registry");
        assert!(program.is_file(), "{} is missing: `deploy/test --tools` installs it", program.display());
        let folder = tempfile::Builder::new().prefix("gpuaas-registry-").tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("pki")).unwrap();
        let certificate = authority.server_certificate("registry").unwrap();
        let port = free_port().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let configuration = format!(
            "version: 0.1\nlog: {{ level: warn }}\nstorage: {{ filesystem: {{ rootdirectory: {} }} }}\n\
             http: {{ addr: '127.0.0.1:{port}', secret: a-test, tls: {{ certificate: {}, key: {} }} }}\n\
             auth: {{ htpasswd: {{ realm: packages, path: {} }} }}\n",
            at("data"),
            certificate.certificate_path.display(),
            certificate.key_path.display(),
            at("htpasswd"),
        );
        std::fs::write(at("config.yml"), configuration).unwrap();
        let mut it = Self { authority, port, process: None, program, folder };
        it.set_password(PASSWORD.1);
        it.resume().await;
        it
    }

    /// The repository of the package.
    #[must_use]
    pub fn reference(&self) -> Reference {
        format!("localhost:{}/{REPOSITORY}", self.port).parse().unwrap()
    }

    /// Replaces the account's password, which the registry reads again.
    pub fn set_password(&self, hash: &str) {
        std::fs::write(self.folder.path().join("htpasswd"), format!("{USER}:{hash}\n")).unwrap();
    }

    /// The file in which the registry stores a blob.
    #[must_use]
    pub fn stored(&self, digest: Digest) -> PathBuf {
        let hex = digest.hex();
        let blobs = self.folder.path().join("data/docker/registry/v2/blobs/sha256");
        blobs.join(&hex[..2]).join(&hex).join("data")
    }

    /// Stops the registry; its content stays.
    pub fn stop(&mut self) {
        self.process = None;
    }

    /// Starts the registry again, on the same port.
    pub async fn resume(&mut self) {
        let launch = Launch::new("docker-registry", &self.program, self.folder.path().join("registry.log"));
        self.process = Some(launch.argument("serve").argument(self.folder.path().join("config.yml")).spawn().unwrap());
        let until = Instant::now() + STARTS_WITHIN;
        while tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            assert!(Instant::now() < until, "{}", self.process.as_ref().unwrap().log_tail());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Pushes a layout, as the account with its first password.
    pub async fn push(&self, layout: &Path) {
        let (location, layout) = (self.location(), layout.to_owned());
        let pushing = tokio::task::spawn_blocking(move || {
            let credential = Credential::Account { user: USER.to_owned(), password: SecretString::from(PASSWORD.0) };
            let mut registry = Registry::new(location, None, credential, Instant::now() + PUSHES_WITHIN).unwrap();
            push_layout(&mut registry, &layout).map(drop)
        });
        pushing.await.unwrap().unwrap_or_else(|error| panic!("{error}\n{}", self.process.as_ref().unwrap().log_tail()));
    }

    fn location(&self) -> Location {
        let Reference { registry, repository } = self.reference();
        let base = format!("https://{registry}/v2/{repository}");
        Location { host: registry, base, authorities_pem: self.authority.certificate_pem().to_owned() }
    }
}

/// A layout of the package, in a folder of its own.
pub struct PackageLayout {
    pub digest: Digest,
    pub folder: tempfile::TempDir,
}

/// The release key of tests.
#[must_use]
pub fn release_key() -> SigningKey {
    SigningKey::from_bytes(&[21; 32])
}

impl PackageLayout {
    /// A package of these programs, which are files with the names of [`PROGRAMS`], and the shipped units.
    pub fn of(version: &str, programs: Vec<PathBuf>, units: &Path, key: Option<&SigningKey>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let architecture = std::env::consts::ARCH;
        let inputs = Inputs { version, architecture, programs, units: units.to_owned() };
        let digest = build(&inputs, key, folder.path()).unwrap();
        Self { digest, folder }
    }

    /// A package whose programs are small scripts.
    pub fn small(version: &str, units: &Path, key: Option<&SigningKey>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("#!/bin/sh\necho {version}\n");
        let programs = PROGRAMS.iter().map(|name| folder.path().join(name)).collect::<Vec<_>>();
        programs.iter().for_each(|path| std::fs::write(path, &script).unwrap());
        assert!(UNITS.iter().all(|unit| units.join(unit.name).is_file()));
        Self::of(version, programs, units, key)
    }

    /// A blob of the layout.
    #[must_use]
    pub fn blob(&self, digest: Digest) -> Vec<u8> {
        std::fs::read(self.folder.path().join("blobs/sha256").join(digest.hex())).unwrap()
    }

    /// Replaces the whole layout by this manifest of a package with these blobs, signed.
    pub fn replace(&mut self, manifest: &[u8], blobs: &[&[u8]], key: &SigningKey) {
        use agent_package::manifest::MANIFEST_TYPE;
        self.digest = Digest::of(manifest);
        let signature = agent_package::signature::sign(key, self.digest).unwrap();
        let folder = self.folder.path().join("blobs/sha256");
        let own: [&[u8]; 4] = [manifest, &signature.manifest, &signature.config, &signature.payload];
        for blob in own.iter().chain(blobs) {
            std::fs::write(folder.join(Digest::of(blob).hex()), blob).unwrap();
        }
        let image = |bytes: &[u8], tag: String| {
            let name = "org.opencontainers.image.ref.name";
            serde_json::json!({
                "mediaType": MANIFEST_TYPE, "digest": Digest::of(bytes), "size": bytes.len(), "annotations": { name: tag },
            })
        };
        let index = serde_json::json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [image(manifest, "altered".to_owned()), image(&signature.manifest, self.digest.signature_tag())],
        });
        std::fs::write(self.folder.path().join("index.json"), index.to_string()).unwrap();
    }
}
