//! What a tenant's slice allows of devices. Their modes allow everything here, as after another program has changed them.

use tests::cluster::terminal::Terminal;
use tests::skipped_tests::report_skipped;
use tests::systemd_container::SystemdContainer;

/// The tenant's GPU, that of another one, and the kernel's log, to which this writes nothing. Without NVIDIA's driver the GPUs open with
/// another error than that of a device that is denied.
const OPEN_EACH: &str =
    "export LC_ALL=C; cat /dev/nvidia0 /dev/nvidia1 2>&1; tee -a /dev/kernel-log </dev/null 2>&1; true";
const DENIED: &str = "Operation not permitted";

/// A tenant whose GPU is `/dev/nvidia0` opens that one, and no other device, in this terminal. Where systemd cannot enforce rules for
/// devices, the test is reported as not run.
pub(super) async fn expect_only_its_own(container: &SystemdContainer, terminal: &mut Terminal) {
    container.run("mknod -m 666 /dev/nvidia1 c 195 1; mknod -m 666 /dev/kernel-log c 1 11");
    let without_rule = container.run(OPEN_EACH);
    let ruled = format!("systemd-run --quiet --wait --pipe -p DevicePolicy=closed sh -c '{OPEN_EACH}'");
    let with_rule = container.attempt(&ruled).unwrap_or_else(|printed| printed);
    if without_rule.contains(DENIED) || with_rule.matches(DENIED).count() != 3 {
        return report_skipped("systemd enforces no rules for devices here, which needs BPF for control groups");
    }

    terminal.enter(&format!("{OPEN_EACH}; echo open''ed\n")).await;
    terminal.expect_output("opened").await;
    let text = terminal.text();
    assert_eq!(error_of(&text, "nvidia1").as_deref(), Some(DENIED), "{text}");
    assert_eq!(error_of(&text, "kernel-log").as_deref(), Some(DENIED), "{text}");
    assert_eq!(error_of(&text, "nvidia0"), error_of(&without_rule, "nvidia0"), "its own: {text}");
    container.run("rm /dev/nvidia1 /dev/kernel-log");
}

/// What a program has printed of a device that it could not open.
fn error_of(printed: &str, device: &str) -> Option<String> {
    let named = format!(": /dev/{device}: ");
    printed.lines().find_map(|line| Some(line.split_once(&named)?.1.trim().to_owned()))
}
