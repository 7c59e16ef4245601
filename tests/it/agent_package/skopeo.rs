//! Debian's skopeo, a client of OCI registries that is not ours, reads what ours has pushed.

use super::Fixture;
use crate::external_tools::installed;
use agent_package::manifest::ImageManifest;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tests::package_registry::{PASSWORD, REPOSITORY, USER};
use wire::package::Digest;

/// skopeo, as the account of the registry.
struct Skopeo {
    program: PathBuf,
    folder: tempfile::TempDir,
    registry: String,
}

impl Skopeo {
    fn of(it: &Fixture) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.crt"), it.registry.authority.certificate_pem()).unwrap();
        let registry = format!("docker://localhost:{}/{REPOSITORY}", it.registry.port);
        Self { program: installed("skopeo/usr/bin/skopeo"), folder, registry }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let machine = format!("{}-linux-gnu", std::env::consts::ARCH);
        let root = self.program.ancestors().nth(3).unwrap();
        let libraries = [root.join("usr/lib").join(&machine), root.join("lib").join(&machine)];
        let mut command = Command::new(&self.program);
        command.env_clear().env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap());
        for variable in ["HOME", "TMPDIR", "XDG_RUNTIME_DIR"] {
            command.env(variable, self.folder.path());
        }
        // Its policy is about signatures of another form.
        command.arg("--insecure-policy").args(arguments).output().unwrap()
    }

    /// The standard output of a command that must succeed.
    fn succeeds(&self, arguments: &[&str]) -> Vec<u8> {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    fn inspect(&self, name: &str) -> Vec<u8> {
        let (account, authorities) = (self.account(), self.authorities());
        let from = format!("{}{name}", self.registry);
        self.succeeds(&["inspect", "--raw", "--creds", &account, "--cert-dir", &authorities, &from])
    }

    fn copy(&self, name: &str, to: &str) -> Output {
        let (account, authorities) = (self.account(), self.authorities());
        let from = format!("{}{name}", self.registry);
        let to = format!("oci:{}:copy", self.folder.path().join(to).display());
        self.run(&["copy", "--preserve-digests", "--src-creds", &account, "--src-cert-dir", &authorities, &from, &to])
    }

    fn account(&self) -> String {
        format!("{USER}:{}", PASSWORD.0)
    }

    fn authorities(&self) -> String {
        self.folder.path().display().to_string()
    }
}

/// The digest of the one image in a layout.
fn copied(layout: &Path) -> Digest {
    let index: Value = serde_json::from_slice(&std::fs::read(layout.join("index.json")).unwrap()).unwrap();
    assert_eq!(index["manifests"].as_array().unwrap().len(), 1, "{index}");
    index["manifests"][0]["digest"].as_str().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn second_client_reads_and_copies_the_package_and_its_signature_under_the_same_digests() {
    let it = Fixture::start().await;
    let package = it.publish("1.0.0").await;
    let skopeo = Skopeo::of(&it);
    let by_digest = format!("@{}", package.digest);
    let by_tag = format!(":{}", package.digest.signature_tag());

    let manifest = skopeo.inspect(&by_digest);
    assert_eq!(manifest, package.blob(package.digest));
    let file = skopeo.folder.path().join("manifest.json");
    std::fs::write(&file, &manifest).unwrap();
    let computed = skopeo.succeeds(&["manifest-digest", &file.display().to_string()]);
    assert_eq!(String::from_utf8(computed).unwrap().trim(), package.digest.to_string());
    let signature = Digest::of(&skopeo.inspect(&by_tag));

    for (name, folder, digest) in [(&by_digest, "package", package.digest), (&by_tag, "signature", signature)] {
        let output = skopeo.copy(name, folder);
        assert!(output.status.success(), "{folder}: {}", String::from_utf8_lossy(&output.stderr));
        let layout = skopeo.folder.path().join(folder);
        assert_eq!(copied(&layout), digest, "{folder}");
        let blobs = std::fs::read_dir(layout.join("blobs/sha256")).unwrap().map(|entry| entry.unwrap().path());
        let blobs: Vec<_> = blobs.collect();
        assert!(blobs.len() >= 3, "a manifest, a configuration and content: {blobs:?}");
        for path in blobs {
            let digest = format!("sha256:{}", path.file_name().unwrap().to_str().unwrap()).parse().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), package.blob(digest), "{folder}: {digest}");
        }
    }

    // It verifies, too: an archive that the registry has altered is no copy.
    let (_, _, archive) = ImageManifest::parse_package(&manifest).unwrap();
    let mut altered = package.blob(archive.digest);
    let last = altered.len() - 2;
    altered[last] ^= 1;
    std::fs::write(it.registry.stored(archive.digest), altered).unwrap();
    let output = skopeo.copy(&by_digest, "altered");
    assert!(
        !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("Digest did not match"),
        "{output:?}"
    );
}
