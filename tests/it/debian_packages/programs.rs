//! The programs in the packages: they are as large as they may be, and name no folder of the machine; and of the same programs the same packages
//! are made everywhere.

use super::{FIRST, Repository};
use crate::external_tools::{root, run, tools};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

/// The time of a commit.
const COMMITTED: (&str, &str) = ("SOURCE_DATE_EPOCH", "1767225600");

/// The same command in another checkout, time zone and language, and with files that no other user may read.
async fn run_elsewhere(command: &Command, checkout: &Path) {
    let mut elsewhere = Command::new("sh");
    elsewhere
        .args(["-c", "umask 077 && exec \"$@\"", "sh"])
        .arg(checkout.join("deploy/package"))
        .args(command.get_args());
    elsewhere.env_remove("CARGO_TARGET_DIR");
    elsewhere.envs([COMMITTED, ("TZ", "Pacific/Kiritimati"), ("LC_ALL", "C"), ("LANGUAGE", "de")]);
    run(elsewhere).await;
}

/// The files of this checkout in another folder, with other times and modes.
async fn copy_checkout(to: &Path) {
    let copy = "umask 077 && git ls-files -z --cached --others --exclude-standard --deduplicate | \
                xargs -0 sh -c 'for file; do [ ! -e \"$file\" ] || printf \"%s\\0\" \"$file\"; done' sh | \
                xargs -0 cp --parents --no-dereference --target-directory \"$1\"";
    std::fs::create_dir_all(to.join(".dev")).unwrap();
    let mut shell = Command::new("bash");
    shell.args(["-euo", "pipefail", "-c", copy, "bash"]).arg(to).current_dir(root());
    run(shell).await;
    symlink(tools(), to.join(".dev/tools")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn same_programs_make_the_same_packages_in_any_checkout_time_zone_language_and_umask() {
    let repository = Repository::new().await;
    let mut first = repository.build_command("@first", FIRST, &[]);
    first.env(COMMITTED.0, COMMITTED.1);
    run(first).await;
    let packages = repository.digests("first");
    assert_eq!(packages.len(), 3, "{packages:?}");

    let checkout = repository.path("checkout");
    copy_checkout(&checkout).await;
    // Two runs at once: the second one waits for what the first one has staged.
    let again = [("@again", &["gpuaas", "gpuaas-agent", "gpuctl"][..]), ("@beside", &["gpuctl"][..])]
        .map(|(to, packages)| repository.build_command(to, FIRST, packages));
    futures::future::join_all(again.iter().map(|build| run_elsewhere(build, &checkout))).await;
    assert_eq!(repository.digests("again"), packages);
    for (name, digest) in repository.digests("beside") {
        assert_eq!(packages.get(&name), Some(&digest), "{name} differs");
    }
}

/// A function of `deploy/lib.sh` with these arguments.
fn call(function: &str, argument: &Path) -> (Output, String) {
    let mut shell = Command::new("bash");
    shell
        .args(["-euo", "pipefail", "-c", ". deploy/lib.sh; \"$@\"", "bash", function])
        .arg(argument)
        .current_dir(root());
    let output = shell.output().unwrap();
    let printed = String::from_utf8([&output.stdout[..], &output.stderr[..]].concat()).unwrap();
    (output, printed)
}

#[test]
fn program_over_its_bound_is_named_with_its_excess_and_others_are_printed() {
    let folder = tempfile::tempdir().unwrap();
    // The files have a length and no content.
    for (program, bytes, is_within, says) in [
        ("gpuaas", 40_000_000, true, "gpuaas has 40.0 MB, of 40.0 MB at most"),
        ("gpuaas", 40_000_001, false, "TOO LARGE: gpuaas has 0.1 MB more than its bound"),
        ("gpuaas", 61_300_000, false, "TOO LARGE: gpuaas has 21.3 MB more than its bound"),
        ("gpuctl", 61_300_000, true, "gpuctl has 61.3 MB"),
    ] {
        let file = folder.path().join(program);
        std::fs::File::create(&file).unwrap().set_len(bytes).unwrap();
        let (output, printed) = call("print_size", &file);
        assert!(
            output.status.success() == is_within && printed.contains(says),
            "{program} of {bytes} bytes: {printed}"
        );
    }
}

#[test]
fn program_that_names_a_folder_of_the_machine_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("gpuctl");
    for (text, is_clean) in [
        ("/gpuaas/edge/cli/src/main.rs".to_owned(), true),
        (format!("{}/edge/cli/src/main.rs", root().display()), false),
    ] {
        std::fs::write(&program, format!("\0{text}\0")).unwrap();
        let (output, printed) = call("expect_no_paths", &program);
        assert!(output.status.success() == is_clean, "{text}: {printed}");
        assert!(is_clean || printed.contains("its digest holds for this machine alone"), "{printed}");
    }
}
