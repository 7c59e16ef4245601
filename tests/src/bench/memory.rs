//! The memory of a process for each of many connections or sessions.

use anyhow::Context;

/// The resident memory of a process, in KiB.
///
/// # Errors
/// If the process is gone.
pub fn resident_kib(pid: u32) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the process has no memory")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// The slope of the regression line.
#[must_use]
pub fn slope(points: &[(f64, f64)]) -> f64 {
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let covariance: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    covariance / points.iter().map(|point| (point.0 - x).powi(2)).sum::<f64>()
}
