//! CPU and memory by stress-ng. Its metrics are read from the YAML that it writes.

use std::ffi::OsString;
use std::time::Duration;

use super::{Budget, Tools};
use crate::bounded_tool::{self, ToolError};

const TOOL: &str = "stress-ng";
/// What it needs in addition to its run time.
const MARGIN: Duration = Duration::from_secs(15);
/// The buffer of the bandwidth test: above most caches.
const BANDWIDTH_BYTES: u64 = 128 * 1024 * 1024;

/// Operations per second of one worker, with the machine to itself.
///
/// # Errors
/// [`ToolError`]
pub(super) fn cpu(tools: &Tools<'_>, budget: &Budget) -> Result<u64, ToolError> {
    cpus(tools, 1, budget.cpu)
}

/// Operations per second of a worker for each CPU, all together: less for each than one alone reaches, since they share power and cache.
///
/// # Errors
/// [`ToolError`]
pub(super) fn all_cpus(tools: &Tools<'_>, budget: &Budget) -> Result<u64, ToolError> {
    cpus(tools, budget.workers, budget.all_cpus)
}

fn cpus(tools: &Tools<'_>, workers: u32, time: Duration) -> Result<u64, ToolError> {
    let metrics = tools.stress(["--cpu".into(), workers.to_string(), "--verify".into()], "cpu", time)?;
    Ok(whole(metric(&metrics, "cpu", "bogo-ops-per-second-real-time")?))
}

/// The bandwidth of the memory: the lower one of reading and writing 64-bit words.
///
/// # Errors
/// [`ToolError`]
pub(super) fn memory(tools: &Tools<'_>, budget: &Budget) -> Result<u64, ToolError> {
    let bytes = format!("{BANDWIDTH_BYTES}b");
    let args = ["--memrate".into(), "1".into(), "--memrate-bytes".into(), bytes];
    let metrics = tools.stress(args, "memrate", budget.memory)?;
    let of = |name| metric(&metrics, "memrate", name).map_err(|error| unfinished(error, &metrics, name));
    Ok(whole(of("read64-mb-per-sec")?.min(of("write64-mb-per-sec")?)))
}

/// Writes patterns into this much memory and reads them back.
///
/// # Errors
/// [`ToolError`]; a word that was read back wrong is one.
pub(super) fn memory_pattern(tools: &Tools<'_>, budget: &Budget, bytes: u64) -> Result<(), ToolError> {
    // Of all workers together: stress-ng divides it among them.
    let all = format!("{bytes}b");
    let args =
        ["--vm".into(), budget.workers.to_string(), "--vm-bytes".into(), all, "--vm-keep".into(), "--verify".into()];
    tools.stress(args, "vm", budget.memory_pattern).map(|_| ())
}

impl Tools<'_> {
    fn stress<const N: usize>(&self, load: [String; N], stressor: &str, time: Duration) -> Result<String, ToolError> {
        let seconds = time.as_secs().max(1).to_string();
        let common = ["--timeout", &seconds, "--metrics", "--yaml", "/dev/stdout", "--oomable"];
        let mut args: Vec<OsString> = load.into_iter().chain(common.map(str::to_owned)).map(OsString::from).collect();
        args.extend(["--temp-path".into(), self.folder.as_os_str().to_owned()]);
        let metrics = bounded_tool::run(self.programs, TOOL, &args, time + MARGIN)?;
        // Without any, the stressor was not run, such as one that was killed for memory.
        metric(&metrics, stressor, "bogo-ops")?;
        Ok(metrics)
    }
}

/// A test that had no time to come to this metric has shown no fault.
fn unfinished(error: ToolError, metrics: &str, name: &str) -> ToolError {
    if metrics.contains(name) {
        return error;
    }
    ToolError::NotTested("the machine was too busy to finish the test in time".to_owned())
}

/// A metric of the one stressor that was run.
fn metric(yaml: &str, stressor: &str, name: &str) -> Result<f64, ToolError> {
    let garbage = |why: String| ToolError::Garbage { tool: TOOL.to_owned(), why };
    let mut lines = yaml.lines().skip_while(|line| line.trim_end() != "metrics:").skip(1);
    let first = lines.next().unwrap_or_default();
    if first.trim() != format!("- stressor: {stressor}") {
        return Err(garbage(format!("it has no metrics of {stressor}")));
    }
    let fields = lines.map_while(|line| line.trim().split_once(": "));
    let mut values = fields.filter(|(key, _)| *key == name).map(|(_, value)| value.trim().parse::<f64>());
    match (values.next(), values.next()) {
        (Some(Ok(value)), None) if value.is_finite() && value >= 0.0 => Ok(value),
        (None, _) => Err(garbage(format!("{stressor} has no {name}"))),
        (Some(_), _) => Err(garbage(format!("{name} of {stressor} is not one number"))),
    }
}

/// A measurement without its fraction. It is finite and not negative, and what is out of range is the largest.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const YAML: &str = "---\nsystem-info:\n      run-by: root\n\nmetrics:\n    - stressor: memrate\n      bogo-ops: 10\n      \
                        read64-mb-per-sec: 22291.970968\n      write64-mb-per-sec: 15973.028470\n\n...\n";

    #[test]
    fn metrics_are_read_from_the_tools_yaml() {
        assert_eq!(metric(YAML, "memrate", "read64-mb-per-sec"), Ok(22291.970968));
        assert_eq!(whole(metric(YAML, "memrate", "write64-mb-per-sec").unwrap()), 15973);
    }

    #[test]
    fn everything_else_is_refused() {
        let wrong = |text: &str| metric(text, "memrate", "bogo-ops").unwrap_err().to_string();
        for text in [
            "",
            "metrics:",
            "metrics:\n    - stressor: cpu\n      bogo-ops: 10",
            "metrics:\n    - stressor: memrate\n      bogo-ops: ten",
            "metrics:\n    - stressor: memrate\n      bogo-ops: NaN",
            "metrics:\n    - stressor: memrate\n      bogo-ops: inf",
            "metrics:\n    - stressor: memrate\n      bogo-ops: -1",
            "metrics:\n    - stressor: memrate\n      bogo-ops: 1\n      bogo-ops: 2",
            "metrics:\n    - stressor: memrate\n...\n      bogo-ops: 2",
        ] {
            assert!(wrong(text).starts_with("the output of stress-ng is not as expected"), "{text}");
        }
    }
}
