//! `deploy/package repository` where an earlier run was interrupted.

use super::{KEY, Repository};
use crate::external_tools::run;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tests::skipped_tests::report_skipped;

/// A package of random bytes, which takes a second to make.
async fn make_package(repository: &Repository, version: &str) {
    run(repository.shell(&format!(
        "mkdir -p tree/DEBIAN tree/opt packages && head -c 200000 /dev/urandom > tree/opt/a && \
         printf 'Package: a\\nVersion: {version}\\nArchitecture: %s\\nMaintainer: a <a@example.com>\\nDescription: a\\n' \
         $(dpkg --print-architecture) > tree/DEBIAN/control && dpkg-deb -Zgzip -z1 --root-owner-group --build tree packages"
    )))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn repository_whose_disk_was_full_or_whose_run_was_killed_is_completed_by_the_next_run() {
    let repository = Repository::new().await;
    make_package(&repository, "1").await;
    let disk = repository.path("apt");
    if mount(Some("none"), &disk, Some("tmpfs"), MsFlags::empty(), Some("size=64k")).is_err() {
        return report_skipped("it needs root, for a small file system of its own");
    }
    let key = format!("@{KEY}.key");
    let mut publish = repository.package(&["repository", "--to", "@apt", "--packages", "@packages", "--key", &key]);
    let full = publish.output().unwrap();
    let remounted = mount(None::<&str>, &disk, None::<&str>, MsFlags::MS_REMOUNT, Some("size=8m"));
    let again = publish.output().unwrap();
    let pool = repository.digests("apt/pool/main");
    // The indexes of before are in the old folder: killed between the moves.
    let killed =
        run(repository.shell("cd apt && ls dists/stable/main/binary-*/by-hash/SHA256 && mv dists dists.old")).await;
    make_package(&repository, "2").await;
    let completed = publish.output().unwrap();
    let indexes = run(repository.shell("cd apt && ls dists/stable/main/binary-*/by-hash/SHA256 && ls -d dists*")).await;
    umount2(&disk, MntFlags::MNT_DETACH).unwrap();

    remounted.unwrap();
    let printed = String::from_utf8_lossy(&full.stderr);
    assert!(!full.status.success() && printed.contains("No space left on device"), "{printed}");
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    let packages = repository.digests("packages");
    assert!(pool.len() == 1 && pool.iter().all(|(name, digest)| packages.get(name) == Some(digest)), "{pool:?}");
    assert!(completed.status.success(), "{}", String::from_utf8_lossy(&completed.stderr));
    for index in killed.lines() {
        assert!(indexes.contains(index), "{index} is gone: {indexes}");
    }
    assert!(indexes.ends_with("\ndists\n"), "{indexes}");
}
