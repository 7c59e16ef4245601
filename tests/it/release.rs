//! `deploy/release` in a checkout of its own, which has the files of this one.

use crate::external_tools::{root, run, tools};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use tests::skipped_tests::report_skipped;

const VERSION: &str = env!("CARGO_PKG_VERSION");
const PROGRAMS: [&str; 5] = ["gpuaas", "gpuaas-agent", "gpuaas-log-collector", "gpuaas-telemetry-edge", "gpuctl"];

/// A checkout in which this version can be released.
struct Checkout {
    folder: tempfile::TempDir,
}

impl Checkout {
    /// `None` where this checkout has no history back to the previous release.
    async fn new() -> Option<Self> {
        let it = Self { folder: tempfile::Builder::new().prefix("gpuaas-release-").tempdir().unwrap() };
        let source = it.source();
        let copied = format!(
            "commit=$(sed -n 's/^commit = \"\\(.*\\)\"$/\\1/p' deploy/releases.toml)
             git cat-file -e \"$commit^{{commit}}\" || exit 0
             git clone --quiet --shared --no-checkout . {source}
             git ls-files -z --cached --others --exclude-standard --deduplicate |
                 xargs -0 sh -c 'for file; do [ ! -e \"$file\" ] || printf \"%s\\0\" \"$file\"; done' sh |
                 xargs -0 cp --archive --parents --target-directory {source}
             echo copied",
            source = source.display()
        );
        let mut shell = Command::new("bash");
        shell.args(["-euo", "pipefail", "-c", &copied]).current_dir(root());
        if !run(shell).await.lines().any(|line| line == "copied") {
            report_skipped(
                "it needs the history of this checkout, back to the previous release in deploy/releases.toml",
            );
            return None;
        }
        fs::create_dir(source.join(".dev")).unwrap();
        symlink(tools(), source.join(".dev/tools")).unwrap();
        let changelog = fs::read_to_string(source.join("CHANGELOG.md")).unwrap();
        if !changelog.contains(&format!("## [{VERSION}]")) {
            let released = format!("## [Unreleased]\n\n## [{VERSION}] - 2026-01-02");
            fs::write(source.join("CHANGELOG.md"), changelog.replacen("## [Unreleased]", &released, 1)).unwrap();
        }
        let commit =
            "git config user.name a && git config user.email a@example.com && git add --all && git commit --quiet -m a";
        it.shell(&format!("{commit} && git tag --delete v{VERSION} || true")).await;
        Some(it)
    }

    fn source(&self) -> PathBuf {
        self.folder.path().join("source")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    async fn shell(&self, command: &str) -> String {
        let mut shell = Command::new("bash");
        shell.args(["-euo", "pipefail", "-c", command]).current_dir(self.source());
        run(shell).await
    }

    /// `deploy/release` with these arguments: whether it succeeds, and what it prints.
    async fn release(&self, arguments: &str) -> (bool, String) {
        let command = format!("deploy/release {arguments} && echo released || echo \"ended with $?\"");
        let printed = self.shell(&command).await;
        (printed.lines().any(|line| line == "released"), printed)
    }

    async fn expect_refusal(&self, arguments: &str, why: &str) {
        let (released, printed) = self.release(arguments).await;
        assert!(!released && printed.contains(why), "{arguments}: not refused for {why:?}: {printed}");
    }

    /// An OpenPGP key of packages, as the book says.
    async fn make_key(&self) {
        self.shell(
            "export GNUPGHOME=$PWD/../gnupg && mkdir -m 700 ../gnupg && \
             gpg --batch --quiet --passphrase '' --quick-generate-key packages ed25519 sign never && \
             gpg --batch --quiet --export-secret-keys > ../packages.key && gpgconf --kill all",
        )
        .await;
    }

    /// The programs of a release, all of them `gpuctl`, with a list of dependencies as `cargo auditable` writes it.
    async fn make_programs(&self) {
        let test = std::env::current_exe().unwrap();
        let gpuctl = local_servers::private_files::find_sibling(&test, "gpuctl").unwrap();
        let list = json!({ "packages": [
            { "name": "gpuctl", "version": VERSION, "source": "local", "dependencies": [1], "root": true },
            { "name": "serde", "version": "1.0.229", "source": "registry" },
        ] });
        let mut compressed = ZlibEncoder::new(Vec::new(), Compression::default());
        compressed.write_all(list.to_string().as_bytes()).unwrap();
        fs::write(self.path("list"), compressed.finish().unwrap()).unwrap();
        fs::create_dir(self.path("programs")).unwrap();
        for program in PROGRAMS {
            let mut objcopy = Command::new("objcopy");
            objcopy.arg(format!("--add-section=.dep-v0={}", self.path("list").display()));
            run({
                objcopy.arg(&gpuctl).arg(self.path("programs").join(program));
                objcopy
            })
            .await;
        }
    }
}

fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn release_is_refused_until_version_changelog_and_checkout_fit() {
    let Some(checkout) = Checkout::new().await else { return };
    let (released, printed) = checkout.release("check").await;
    assert!(released && printed.contains(&format!("{VERSION} can be released")), "{printed}");

    let version =
        |to: &str| format!("sed -i '/^.workspace.package/,/^$/s/^version = .*/version = \"{to}\"/' Cargo.toml");
    let releases = |from: &str, to: &str| format!("sed -i 's/^{from} = .*/{from} = \"{to}\"/' deploy/releases.toml");
    let heading = |to: &str| format!("sed -i 's/^## \\[{VERSION}\\].*/{to}/' CHANGELOG.md");
    let faults = [
        (version("0.0.1"), "the version 0.0.1 is not later than"),
        (version("1.2"), "the version is '1.2'; it must be three numbers"),
        (version("99.0.0"), "Cargo.lock: it has not the version 99.0.0"),
        (version("99.0.0"), "CHANGELOG.md: there is no section '## [99.0.0] - YYYY-MM-DD'"),
        (releases("commit", &"0".repeat(40)), "of the previous release is not in this checkout"),
        (releases("version", "0.0.9"), "is not 0.0.9"),
        (heading(&format!("## [{VERSION}]")), "has no date"),
        (heading(&format!("## [{VERSION}] - 2026-13-01")), "has no date"),
        (heading(&format!("## [{VERSION}] - 9999-01-01")), "is in the future"),
        (heading(&format!("## [{VERSION}] - 2026-01-02\\n\\n## [0.0.0]")), "says nothing"),
        (heading(&format!("- New.\\n\\n## [{VERSION}] - 2026-01-02")), "there are lines below [Unreleased]"),
        ("sed -i '/^## \\[Unreleased\\]/d' CHANGELOG.md".to_owned(), "there is no section '## [Unreleased]'"),
        ("touch stray".to_owned(), "the checkout is not clean; commit or remove: stray"),
        (format!("git tag v{VERSION} HEAD~1"), "that version is released"),
        (
            "git branch before && git checkout --quiet --orphan alone && git commit --quiet -m alone".to_owned(),
            "is not before this one",
        ),
    ];
    for (fault, why) in faults {
        checkout.shell(&fault).await;
        checkout.expect_refusal("check", why).await;
        let undo = format!(
            "git checkout --quiet --force \"$(git rev-parse --quiet --verify before || git rev-parse HEAD)\" && \
             git clean --quiet --force && git tag --delete v{VERSION} >/dev/null 2>&1 || true"
        );
        checkout.shell(&undo).await;
    }
    let (released, printed) = checkout.release("check").await;
    assert!(released, "every fault was undone: {printed}");

    // All at once, and nothing is made.
    checkout.shell(&format!("touch stray && {}", version("0.0.1"))).await;
    checkout.make_key().await;
    let (_, printed) = checkout.release("make --only packages --out ../out --key ../packages.key").await;
    assert!(printed.contains("stray") && printed.contains("is not later than"), "{printed}");
    assert!(!checkout.path("out").exists() && !checkout.path("out.new").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn work_on_the_next_version_begins_with_the_tagged_release_as_its_previous_one() {
    let Some(checkout) = Checkout::new().await else { return };
    checkout.expect_refusal("next 99.0.0", &format!("there is no tag v{VERSION}")).await;
    checkout.shell(&format!("git tag v{VERSION}")).await;
    checkout.expect_refusal("next 0.0.1", &format!("0.0.1 is not later than {VERSION}")).await;
    checkout.expect_refusal("next 99.0", "name the next version").await;
    let commit = checkout.shell("git rev-parse HEAD").await;
    let (done, printed) = checkout.release("next 99.0.0").await;
    assert!(done, "{printed}");
    let releases = fs::read_to_string(checkout.source().join("deploy/releases.toml")).unwrap();
    assert!(releases.contains(&format!("version = \"{VERSION}\"\ncommit = \"{}\"", commit.trim())), "{releases}");
    let changed = checkout.shell("git diff --name-only").await;
    assert_eq!(changed.lines().collect::<Vec<_>>(), ["Cargo.lock", "Cargo.toml", "deploy/releases.toml"]);
    // Nothing but the versions of the workspace's own crates.
    let lock = checkout.shell("git diff --unified=0 Cargo.lock | grep '^[+-][^+-]' | sort --unique").await;
    assert_eq!(lock, format!("+version = \"99.0.0\"\n-version = \"{VERSION}\"\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn release_has_bills_of_materials_and_debug_symbols_and_what_is_altered_is_found() {
    let Some(checkout) = Checkout::new().await else { return };
    checkout.make_key().await;
    checkout.make_programs().await;
    let make = "make --only packages --programs ../programs --key ../packages.key";
    checkout.expect_refusal(&format!("{make} --out .."), "is there already").await;
    let (made, printed) = checkout.release(&format!("{make} --out ../out")).await;
    assert!(made, "{printed}");
    let out = checkout.path("out");
    assert!(!checkout.path("out.new").exists());
    let expected =
        ["NOTES.md", "SHA256SUMS", "SHA256SUMS.asc", "apt", "gpuaas.asc", "packages", "release.toml", "sbom"];
    assert_eq!(names(&out), expected.map(str::to_owned).into());
    let packages = names(&out.join("packages"));
    for package in ["gpuaas", "gpuaas-agent", "gpuctl"] {
        for package in [package.to_owned(), format!("{package}-dbgsym")] {
            let begin = format!("{package}_{VERSION}-1_");
            assert!(packages.iter().any(|name| name.starts_with(&begin)), "{package} is missing: {packages:?}");
        }
    }
    assert_eq!(names(&out.join("sbom")), PROGRAMS.map(|program| format!("{program}.cdx.json")).into());
    let bill: Value = serde_json::from_slice(&fs::read(out.join("sbom/gpuctl.cdx.json")).unwrap()).unwrap();
    assert_eq!(bill["bomFormat"], "CycloneDX", "{bill:#}");
    assert!(bill.to_string().contains("pkg:cargo/serde@1.0.229"), "{bill:#}");
    let commit = checkout.shell("git rev-parse HEAD").await;
    let facts = fs::read_to_string(out.join("release.toml")).unwrap();
    assert!(facts.contains(&format!("version = \"{VERSION}\"\ncommit = \"{}\"", commit.trim())), "{facts}");
    assert!(fs::read_to_string(out.join("NOTES.md")).unwrap().starts_with("### "));

    // Debuggers find the symbols of a packaged program by its build id, and the program has none.
    let unpacked = checkout
        .shell(
            "cd .. && mkdir unpacked && for package in out/packages/gpuctl*.deb; do dpkg-deb --extract $package unpacked; done
             readelf --notes --wide unpacked/usr/bin/gpuctl | sed -n 's/.*Build ID: //p'
             readelf --section-headers --wide unpacked/usr/bin/gpuctl",
        )
        .await;
    let id = unpacked.lines().next().unwrap();
    assert!(
        !unpacked.contains(".symtab") && !unpacked.contains(".debug_line") && unpacked.contains(".dep-v0"),
        "{unpacked}"
    );
    let symbols = format!("../unpacked/usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]);
    let lines = checkout
        .shell(&format!("nm --defined-only {symbols} | awk '/gpuctl4main/ {{ print $1 }}' | addr2line --exe {symbols}"))
        .await;
    assert!(lines.contains("edge/cli/src/main.rs:"), "{lines}");

    let verify = "verify --release ../out --public-key ../out/gpuaas.asc";
    let (verified, printed) = checkout.release(verify).await;
    assert!(verified && printed.contains("signature and checksums are right"), "{printed}");
    for (alteration, why) in [
        ("echo >> ../out/NOTES.md", "files of the release are not those that were signed"),
        ("touch ../out/packages/more.deb", "files are not signed: packages/more.deb"),
        ("sed -i 1d ../out/SHA256SUMS", "SHA256SUMS is not signed by"),
    ] {
        checkout.shell(&format!("rm -rf ../whole && cp -a ../out ../whole && {alteration}")).await;
        checkout.expect_refusal(verify, why).await;
        checkout.shell("rm -rf ../out && mv ../whole ../out").await;
    }
}
