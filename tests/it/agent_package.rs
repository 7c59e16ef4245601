//! The agent's package, from a real registry: it is installed whole or not at all, whatever the registry, the disk and the package are like,
//! and a bare machine becomes a node by the bootstrap script alone.

use crate::external_tools::{root, tools};
use agent_package::manifest::ImageManifest;
use agent_package::signature;
use ed25519_dalek::SigningKey;
use local_servers::private_files;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tests::faulty_registry::{FaultyRegistry, RegistryFault};
use tests::package_registry::{
    NEXT_PASSWORD, PASSWORD, PackageLayout, PackageRegistryServer, REPOSITORY, USER, release_key,
};
use tests::skipped_tests::report_skipped;
use uuid::Uuid;
use wire::bundle::{BootstrapBundle, Package, fingerprint};
use wire::package::Digest;
use wire::{PublicKey, SecretToken};

pub(crate) mod bare_machine;
mod hostile_archive;
mod skopeo;

/// A registry with a package, and a machine's folders.
struct Fixture {
    registry: PackageRegistryServer,
    machine: tempfile::TempDir,
}

fn units() -> PathBuf {
    root().join("deploy/systemd")
}

fn installer() -> PathBuf {
    private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-installer").unwrap()
}

impl Fixture {
    async fn start() -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        Self { registry: PackageRegistryServer::start(&tools()).await, machine: tempfile::tempdir().unwrap() }
    }

    /// A small package that is in the registry.
    async fn publish(&self, version: &str) -> PackageLayout {
        let layout = PackageLayout::small(version, &units(), Some(&release_key()));
        self.registry.push(layout.folder.path()).await;
        layout
    }

    fn root(&self) -> PathBuf {
        self.machine.path().join("opt")
    }

    fn bundle(&self, digest: Digest, port: u16) -> BootstrapBundle {
        let ca = self.registry.authority.certificate_pem().to_owned();
        let at = |name: &str| self.machine.path().join(name).display().to_string();
        BootstrapBundle {
            node_id: Uuid::from_u128(5),
            enrollment_token: SecretToken::new("gpuenr_x"),
            api_url: "https://localhost:1".into(),
            task_signing_pubkeys: PublicKey::from(&release_key()).to_string(),
            ca_bundle_path: at("ca.pem"),
            node_cert_ca_bundle_path: at("node-ca.pem"),
            cert_path: at("node.pem"),
            key_path: at("node.key"),
            ca_bundle_fingerprint: fingerprint(&ca),
            ca_bundle_pem: ca,
            package: Package {
                oci_ref: Some(format!("localhost:{port}/{REPOSITORY}")),
                digest: Some(digest.to_string()),
                install_root: Some(self.root().display().to_string()),
                env_file_path: Some(at("agent.env")),
                systemd_unit_name: Some("rented.service".into()),
                release_keys: Some(PublicKey::from(&release_key()).to_string()),
                pull_account: Some(SecretToken::new(format!("{USER}:{}", PASSWORD.0))),
                ..Package::default()
            },
        }
    }

    /// The installer for this package, from the registry at this port.
    fn command(&self, bundle: &BootstrapBundle) -> Command {
        let env_file = self.machine.path().join("bundle.env");
        std::fs::write(&env_file, bundle.to_env_file().unwrap()).unwrap();
        let mut command = Command::new(installer());
        command.arg("--env-file").arg(env_file).arg("--unit-folder").arg(self.machine.path().join("units"));
        command.env_clear().stdin(Stdio::null());
        command
    }

    async fn install(&self, digest: Digest) -> Output {
        self.install_by(self.command(&self.bundle(digest, self.registry.port))).await
    }

    async fn install_by(&self, mut command: Command) -> Output {
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    }

    /// Installs the package from the registry, which must succeed.
    async fn installed(&self, digest: Digest) {
        let output = self.install(digest).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(self.current(), Some(digest));
    }

    fn current(&self) -> Option<Digest> {
        let link = std::fs::read_link(self.root().join("current")).ok()?;
        link.to_str().unwrap().strip_prefix("versions/sha256-").map(|hex| format!("sha256:{hex}").parse().unwrap())
    }

    /// What is below the installation's folder and in the folder of units, with the contents.
    fn state(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        for folder in [self.root(), self.machine.path().join("units")] {
            add_files(&folder, &mut found);
        }
        found.remove(&self.root().join(".lock"));
        found
    }

    /// Asserts that the installer refuses the package with this code, and that nothing of it is there: what was installed before is as it was.
    async fn refuses(&self, command: Command, code: &str) -> String {
        let before = self.state();
        let output = self.install_by(command).await;
        self.is_refused(&before, &output, code)
    }

    fn is_refused(&self, before: &BTreeMap<PathBuf, Vec<u8>>, output: &Output, code: &str) -> String {
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{printed}");
        assert!(printed.starts_with(&format!("gpuaas-installer: {code}: ")), "not {code}: {printed}");
        assert_eq!(&self.state(), before, "{printed}");
        printed
    }
}

/// Files with their contents, links with their targets, and folders.
fn add_files(folder: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if let Ok(target) = std::fs::read_link(&path) {
            found.insert(path, target.into_os_string().into_encoded_bytes());
        } else if path.is_dir() {
            add_files(&path, found);
            found.insert(path, Vec::new());
        } else {
            found.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn package_is_installed_by_its_digest_and_again_without_the_registry() {
    let mut it = Fixture::start().await;
    let first = it.publish("1.0.0").await;
    let second = it.publish("2.0.0").await;
    it.installed(first.digest).await;
    let program = it.root().join("current/bin/gpuaas-agent");
    assert_eq!(std::fs::read_to_string(&program).unwrap(), "#!/bin/sh\necho 1.0.0\n");
    assert_eq!(std::fs::metadata(&program).unwrap().permissions().mode() & 0o7777, 0o755);
    let unit = std::fs::read_to_string(it.machine.path().join("units/rented.service")).unwrap();
    let start = format!("ExecStart={} --env-file {}", program.display(), it.machine.path().join("agent.env").display());
    assert!(unit.contains(&start), "{unit}");
    let collector = std::fs::read_to_string(it.machine.path().join("units/gpuaas-log-collector.service")).unwrap();
    assert!(collector.contains("After=network-online.target rented.service\n"), "{collector}");

    it.installed(second.digest).await;
    assert_eq!(std::fs::read_to_string(&program).unwrap(), "#!/bin/sh\necho 2.0.0\n");

    // What is there and unaltered is not pulled.
    it.registry.stop();
    let before = it.state();
    it.installed(second.digest).await;
    assert_eq!(it.state(), before);
    it.installed(first.digest).await;
    assert_eq!(std::fs::read_to_string(&program).unwrap(), "#!/bin/sh\necho 1.0.0\n");

    // What was altered is pulled.
    std::fs::write(&program, "#!/bin/sh\necho 6.6.6\n").unwrap();
    it.refuses(it.command(&it.bundle(first.digest, it.registry.port)), "registry_unreachable").await;
    it.registry.resume().await;
    it.installed(first.digest).await;
    assert_eq!(std::fs::read_to_string(&program).unwrap(), "#!/bin/sh\necho 1.0.0\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_is_not_what_its_digest_says_is_refused() {
    let it = Fixture::start().await;
    let old = it.publish("1.0.0").await;
    it.installed(old.digest).await;
    it.refuses(it.command(&it.bundle(Digest::of(b"another"), it.registry.port)), "package_not_found").await;

    let new = it.publish("2.0.0").await;
    let command = || it.command(&it.bundle(new.digest, it.registry.port));
    let (_, list, archive) = ImageManifest::parse_package(&new.blob(new.digest)).unwrap();
    for digest in [new.digest, list.digest, archive.digest] {
        let (stored, good) = (it.registry.stored(digest), new.blob(digest));
        let mut altered = good.clone();
        let last = altered.len() - 2;
        altered[last] ^= 1;
        std::fs::write(&stored, &altered).unwrap();
        // The registry itself notices a manifest that it can no longer read.
        let code = if digest == new.digest { "" } else { "digest_mismatch" };
        let before = it.state();
        let output = it.install_by(command()).await;
        if code.is_empty() {
            assert_eq!(output.status.code(), Some(1));
            assert_eq!(it.state(), before);
        } else {
            it.is_refused(&before, &output, code);
        }
        std::fs::write(&stored, &good[..good.len() / 2]).unwrap();
        if digest != new.digest {
            it.refuses(command(), "truncated").await;
        }
        std::fs::write(&stored, [good.as_slice(), b"and more"].concat()).unwrap();
        if digest != new.digest {
            it.refuses(command(), "too_long").await;
        }
        std::fs::write(&stored, &good).unwrap();
    }
    it.installed(new.digest).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn package_without_a_signature_by_a_release_key_is_refused() {
    let it = Fixture::start().await;
    let old = it.publish("1.0.0").await;
    it.installed(old.digest).await;
    let stranger = SigningKey::from_bytes(&[22; 32]);
    for (version, key, code) in [("2.0.0", None, "signature_missing"), ("3.0.0", Some(&stranger), "signature_refused")]
    {
        let layout = PackageLayout::small(version, &units(), key);
        it.registry.push(layout.folder.path()).await;
        it.refuses(it.command(&it.bundle(layout.digest, it.registry.port)), code).await;
    }
    // The signature of another package, which is by the release key.
    let mut layout = PackageLayout::small("4.0.0", &units(), Some(&release_key()));
    let copied = signature::sign(&release_key(), old.digest).unwrap();
    let tag = layout.digest.signature_tag();
    let index = layout.folder.path().join("index.json");
    let mut images: serde_json::Value = serde_json::from_slice(&std::fs::read(&index).unwrap()).unwrap();
    images["manifests"][1] = serde_json::json!({
        "mediaType": agent_package::manifest::MANIFEST_TYPE, "digest": Digest::of(&copied.manifest),
        "size": copied.manifest.len(), "annotations": { "org.opencontainers.image.ref.name": tag },
    });
    for blob in [&copied.manifest, &copied.config, &copied.payload] {
        let path = layout.folder.path().join("blobs/sha256").join(Digest::of(blob).hex());
        std::fs::write(path, blob).unwrap();
    }
    std::fs::write(&index, images.to_string()).unwrap();
    it.registry.push(layout.folder.path()).await;
    it.refuses(it.command(&it.bundle(layout.digest, it.registry.port)), "signature_refused").await;
    // Another release key beside the first one is enough.
    layout = PackageLayout::small("5.0.0", &units(), Some(&stranger));
    it.registry.push(layout.folder.path()).await;
    let mut bundle = it.bundle(layout.digest, it.registry.port);
    let keys = [&release_key(), &stranger].map(|key| PublicKey::from(key).to_string()).join(", ");
    bundle.package.release_keys = Some(keys);
    let output = it.install_by(it.command(&bundle)).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn registry_that_is_down_silent_slow_or_cuts_off_is_named() {
    let mut it = Fixture::start().await;
    let old = it.publish("1.0.0").await;
    it.installed(old.digest).await;
    let new = it.publish("2.0.0").await;
    // What ends by itself is not to meet the deadline, on a machine that is busy.
    for (fault, deadline, code) in [
        (RegistryFault::Silent, "6", "registry_slow"),
        (RegistryFault::Slow, "6", "registry_slow"),
        (RegistryFault::Cut, "60", "truncated"),
    ] {
        let proxy = FaultyRegistry::start(&it.registry, Some(fault)).await;
        let mut command = it.command(&it.bundle(new.digest, proxy.port));
        command.args(["--deadline-seconds", deadline]);
        let began = Instant::now();
        it.refuses(command, code).await;
        // The default is ten minutes.
        assert!(began.elapsed() < Duration::from_secs(60), "{code}: {:?}", began.elapsed());
    }
    // Another authority's certificate is as good as no registry.
    let mut bundle = it.bundle(new.digest, it.registry.port);
    let folder = tempfile::tempdir().unwrap();
    let stranger = local_servers::pki::Authority::create(folder.path()).unwrap();
    bundle.package.registry_ca_pem = Some(stranger.certificate_pem().to_owned());
    it.refuses(it.command(&bundle), "registry_unreachable").await;
    it.registry.stop();
    it.refuses(it.command(&it.bundle(new.digest, it.registry.port)), "registry_unreachable").await;
    it.registry.resume().await;
    it.installed(new.digest).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redirects_are_followed_for_blobs_alone_over_https_and_without_the_credential() {
    let it = Fixture::start().await;
    let old = it.publish("1.0.0").await;
    it.installed(old.digest).await;
    let new = it.publish("2.0.0").await;
    let redirect = |part, to: String| Some(RegistryFault::Redirect { part, to });
    let elsewhere = FaultyRegistry::start(&it.registry, None).await;
    let https = format!("https://localhost:{}", elsewhere.port);

    // A manifest is never elsewhere; a blob is not on HTTP; and a chain has an end.
    for fault in [redirect("manifests", https.clone()), redirect("blobs", "http://localhost:1".to_owned())] {
        let proxy = FaultyRegistry::start(&it.registry, fault).await;
        it.refuses(it.command(&it.bundle(new.digest, proxy.port)), "registry_redirects").await;
    }
    let proxy = FaultyRegistry::start(&it.registry, redirect("blobs", String::new())).await;
    it.refuses(it.command(&it.bundle(new.digest, proxy.port)), "registry_redirects").await;
    assert!(elsewhere.requests().is_empty());

    // This store wants the registry's credential, which it does not get.
    let proxy = FaultyRegistry::start(&it.registry, redirect("blobs", https)).await;
    it.refuses(it.command(&it.bundle(new.digest, proxy.port)), "credential_refused").await;
    let requests = elsewhere.requests();
    assert!(!requests.is_empty() && requests.iter().all(|(_, had_credential)| !had_credential), "{requests:?}");
    assert!(proxy.requests().iter().any(|(_, had_credential)| *had_credential));
}

#[tokio::test(flavor = "multi_thread")]
async fn credential_that_has_expired_is_refused_and_the_version_in_use_stays() {
    let it = Fixture::start().await;
    let old = it.publish("1.0.0").await;
    it.installed(old.digest).await;
    let new = it.publish("2.0.0").await;
    it.registry.set_password(NEXT_PASSWORD.1);
    let printed = it.refuses(it.command(&it.bundle(new.digest, it.registry.port)), "credential_refused").await;
    assert!(printed.contains("new bootstrap script") && !printed.contains(PASSWORD.0), "{printed}");
    let mut bundle = it.bundle(new.digest, it.registry.port);
    bundle.package.pull_account = None;
    it.refuses(it.command(&bundle), "credential_refused").await;
    bundle.package.pull_account = Some(SecretToken::new(format!("{USER}:{}", NEXT_PASSWORD.0)));
    let output = it.install_by(it.command(&bundle)).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(it.current(), Some(new.digest));
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_is_named_and_leaves_the_version_in_use() {
    if !nix::unistd::Uid::effective().is_root() {
        report_skipped("it mounts a small file system, which needs root");
        return;
    }
    let it = Fixture::start().await;
    let old = it.publish("1.0.0").await;
    // Programs that do not compress, of 6 MiB; the file system has room for the archive and a part of them.
    let folder = tempfile::tempdir().unwrap();
    let noise: Vec<u8> = std::iter::repeat_with(rand::random::<u8>).take(3 * 1024 * 1024).collect();
    let programs = agent_package::contents::PROGRAMS.iter().map(|name| folder.path().join(name)).collect::<Vec<_>>();
    programs.iter().for_each(|path| std::fs::write(path, &noise).unwrap());
    let large = PackageLayout::of("2.0.0", programs, &units(), Some(&release_key()));
    it.registry.push(large.folder.path()).await;

    std::fs::create_dir(it.root()).unwrap();
    for (bytes, at) in [("8m", "while the files are written"), ("2m", "while the archive is pulled")] {
        // In a mount namespace of its own, which ends with the command. The first installation is there before the disk is full.
        let in_small_disk = |digests: &[Digest]| {
            let steps: Vec<String> = digests
                .iter()
                .map(|digest| {
                    let env_file = it.machine.path().join(format!("{}.env", digest.hex()));
                    std::fs::write(&env_file, it.bundle(*digest, it.registry.port).to_env_file().unwrap()).unwrap();
                    let units = it.machine.path().join("units");
                    format!(
                        "{} --env-file {} --unit-folder {}",
                        installer().display(),
                        env_file.display(),
                        units.display()
                    )
                })
                .collect();
            let root = it.root().display().to_string();
            // What is there at the end is copied out.
            let copy = it.machine.path().join(format!("after-{bytes}")).display().to_string();
            let script = format!(
                "mount -t tmpfs -o size={bytes} tmpfs {root} && {} && {{ {}; status=$?; cp -a {root} {copy}; exit $status; }}",
                steps[0], steps[1]
            );
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
            command
        };
        let output = it.install_by(in_small_disk(&[old.digest, large.digest])).await;
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(1) && printed.contains("gpuaas-installer: disk_full: "),
            "{at}: {printed}"
        );
        let after = it.machine.path().join(format!("after-{bytes}"));
        let versions: Vec<_> = std::fs::read_dir(after.join("versions")).unwrap().flatten().collect();
        assert_eq!(versions.len(), 1, "{at}: nothing half-installed");
        let current = std::fs::read_to_string(after.join("current/bin/gpuaas-agent")).unwrap();
        assert_eq!(current, "#!/bin/sh\necho 1.0.0\n", "{at}");
    }
}

/// Kills a child of the test when it is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_installer_leaves_nothing_that_the_next_one_does_not_remove() {
    let it = Fixture::start().await;
    let old = it.publish("1.0.0").await;
    it.installed(old.digest).await;
    let new = it.publish("2.0.0").await;
    let proxy = FaultyRegistry::start(&it.registry, Some(RegistryFault::Slow)).await;
    // The list of files is passed slowly, too: two installers at once, and a kill in the middle.
    let mut command = it.command(&it.bundle(new.digest, proxy.port));
    let mut running = Killed(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let until = Instant::now() + Duration::from_secs(60);
    while !proxy.requests().iter().any(|(path, _)| path.contains("/blobs/")) {
        assert!(Instant::now() < until, "no blob is pulled: {:?}", proxy.requests());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let printed = it.refuses(it.command(&it.bundle(new.digest, it.registry.port)), "locked").await;
    assert!(printed.contains("another installation"), "{printed}");
    running.0.kill().unwrap();
    running.0.wait().unwrap();
    assert_eq!(it.current(), Some(old.digest));
    // As a kill at a later step leaves it.
    let unfinished = it.root().join("versions/.new-1");
    std::fs::create_dir(&unfinished).unwrap();
    std::fs::write(unfinished.join("half"), "half").unwrap();
    std::os::unix::fs::symlink("versions/none", it.root().join(".current.new")).unwrap();
    it.installed(new.digest).await;
    let names: Vec<_> = std::fs::read_dir(it.root().join("versions")).unwrap().flatten().collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(!it.root().join(".current.new").is_symlink());
}
