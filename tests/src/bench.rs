//! The common part of all benchmarks: ours and the baseline in turns within one run, the median of their ratios, a table for people and
//! `target/bench/NAME.json` for machines.

pub mod cpu_time;
pub mod http_client;
pub mod memory;
pub mod postgres;
pub mod rentals;

use crate::cluster::TestCluster;
use anyhow::{Context, ensure};
use comfy_table::{Table, presets};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The length of a benchmark: rounds, and seconds for each measurement of a round. `BENCH_ROUNDS` and `BENCH_SECONDS`
/// shorten a trial run; results that are compared come from the defaults (4 seconds, unless the benchmark sets another).
#[derive(Clone, Copy, Debug)]
pub struct MeasurementPlan {
    pub rounds: usize,
    pub each: Duration,
}

impl MeasurementPlan {
    /// # Errors
    /// If one of the variables is not a number.
    pub fn from_environment() -> anyhow::Result<Self> {
        Self::of_seconds(4.0)
    }

    /// As [`MeasurementPlan::from_environment`], with another default of the seconds.
    ///
    /// # Errors
    /// If one of the variables is not a number.
    pub fn of_seconds(default: f64) -> anyhow::Result<Self> {
        let number = |name: &str, default: f64| match std::env::var(name) {
            Ok(text) => text.parse::<f64>().with_context(|| format!("{name}={text} is not a number")),
            Err(_) => Ok(default),
        };
        let rounds = number("BENCH_ROUNDS", 5.0)?.max(1.0) as usize;
        Ok(Self { rounds, each: Duration::from_secs_f64(number("BENCH_SECONDS", default)?.max(0.1)) })
    }
}

/// Measurements in turns: one value of each in every round, so that a slow machine slows down both.
#[derive(Clone, Debug, Default)]
pub struct PairedSamples {
    ours: Vec<f64>,
    baseline: Vec<f64>,
}

impl PairedSamples {
    pub fn round(&mut self, ours: f64, baseline: f64) {
        self.ours.push(ours);
        self.baseline.push(baseline);
    }

    #[must_use]
    pub fn ours(&self) -> f64 {
        median(&self.ours)
    }

    #[must_use]
    pub fn baseline(&self) -> f64 {
        median(&self.baseline)
    }

    /// The median of the rounds' ratios: not the ratio of the medians, since a round's two values belong together.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        let ratios: Vec<f64> = self.ours.iter().zip(&self.baseline).map(|(ours, baseline)| ours / baseline).collect();
        median(&ratios)
    }
}

/// The middle value; of an even number, the mean of the two in the middle. Zero of nothing.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// A benchmark's result.
#[derive(Clone, Debug)]
pub struct BenchReport {
    pub name: &'static str,
    pub unit: &'static str,
    pub ours: f64,
    pub baseline_name: &'static str,
    pub baseline: f64,
    pub ratio: f64,
    /// Further measurements, by a name that ends in its unit.
    pub metrics: Map<String, Value>,
    pub conditions: Map<String, Value>,
}

impl BenchReport {
    #[must_use]
    pub fn new(name: &'static str, unit: &'static str, baseline_name: &'static str, turns: &PairedSamples) -> Self {
        let (ours, baseline, ratio) = (turns.ours(), turns.baseline(), turns.ratio());
        Self { name, unit, ours, baseline_name, baseline, ratio, metrics: Map::new(), conditions: machine() }
    }

    #[must_use]
    pub fn metric(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.metrics.insert(name.into(), value.into());
        self
    }

    #[must_use]
    pub fn condition(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.conditions.insert(name.into(), value.into());
        self
    }

    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "unit": self.unit,
            "ours": rounded(self.ours),
            "baseline": {"name": self.baseline_name, "value": rounded(self.baseline)},
            "ratio": rounded(self.ratio),
            "figures": self.metrics,
            "conditions": self.conditions,
        })
    }

    /// Prints the table and writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn publish(&self) -> anyhow::Result<()> {
        let folder = target_folder()?.join("bench");
        std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let path = folder.join(format!("{}.json", self.name));
        let text = serde_json::to_string_pretty(&self.to_json())?;
        std::fs::write(&path, text + "\n").with_context(|| format!("writing {}", path.display()))?;

        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header([self.name, self.unit]);
        table.add_row(["ours".to_owned(), display(&json!(rounded(self.ours)))]);
        table.add_row([self.baseline_name.to_owned(), display(&json!(rounded(self.baseline)))]);
        table.add_row(["ratio (median of the rounds)".to_owned(), format!("{:.1}", self.ratio)]);
        for (name, value) in &self.metrics {
            table.add_row([name.clone(), display(value)]);
        }
        for (name, value) in &self.conditions {
            table.add_row([format!("({name})"), display(value)]);
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "{table}\nwritten to {}", path.display())?;
        Ok(())
    }
}

/// Rounds to three decimal places: the rest is noise.
#[must_use]
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn display(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

/// The machine's properties that matter to a measurement.
fn machine() -> Map<String, Value> {
    let mut conditions = Map::new();
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    conditions.insert("cores".to_owned(), json!(cores));
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if let Some(model) = cpu.lines().find_map(|line| line.strip_prefix("model name")) {
        conditions.insert("cpu".to_owned(), json!(model.trim_start_matches([' ', '\t', ':'])));
    }
    let build = if cfg!(debug_assertions) { "debug: these figures say nothing" } else { "release" };
    conditions.insert("build".to_owned(), json!(build));
    conditions
}

/// `target/release`, independent of this program's profile.
///
/// # Errors
/// If it is not built.
pub fn release_build() -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe()?;
    let folder = this.parent().and_then(Path::parent).context("this program does not lie in a build folder")?;
    ensure!(
        folder.join("gpuaas").is_file(),
        "{}/gpuaas is missing: run `cargo build --release --bins`",
        folder.display()
    );
    Ok(folder.to_owned())
}

/// The release build; `BENCH_PROGRAMS` names another folder, to try out a benchmark itself.
///
/// # Errors
/// If it does not exist.
pub fn programs() -> anyhow::Result<PathBuf> {
    match std::env::var_os("BENCH_PROGRAMS") {
        Some(folder) => Ok(Path::new(&folder).canonicalize()?),
        None => release_build(),
    }
}

/// Runs a benchmark on two threads.
///
/// # Errors
/// Those of the benchmark, or if there are no threads.
pub fn block_on(benchmark: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(benchmark)
}

/// Raises the limit of open files to the most that is allowed, and returns it.
///
/// # Errors
/// If it cannot be raised.
pub fn raise_open_files() -> anyhow::Result<u64> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    Ok(most)
}

/// Ends the cluster and publishes the report. A failed benchmark keeps the cluster's folder and prints its path.
///
/// # Errors
/// If the report cannot be written.
///
/// # Panics
/// If the benchmark failed.
pub async fn conclude(cluster: TestCluster, measured: anyhow::Result<BenchReport>) -> anyhow::Result<()> {
    let report = measured.unwrap_or_else(|error| panic!("{error:?}"));
    cluster.shutdown().await;
    report.publish()
}

/// The number that a variable sets instead of the default.
///
/// # Errors
/// If it is no number.
pub fn count_from_env(variable: &str) -> anyhow::Result<Option<usize>> {
    let asked = std::env::var(variable).ok();
    asked.map(|text| text.parse().with_context(|| format!("{variable}={text} is no number"))).transpose()
}

/// The build folder of this program.
fn target_folder() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("where this program lies")?;
    let folder = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    folder.map(PathBuf::from).context("this program does not lie in a build folder")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_the_median_of_the_rounds_and_not_of_the_sums() {
        let mut turns = PairedSamples::default();
        for (ours, baseline) in [(80.0, 10.0), (8.0, 4.0), (90.0, 10.0)] {
            turns.round(ours, baseline);
        }
        assert!((turns.ratio() - 8.0).abs() < 1e-9);
        assert!((turns.ours() - 80.0).abs() < 1e-9);
        assert!((median(&[1.0, 2.0, 4.0, 8.0]) - 3.0).abs() < 1e-9);
        assert!(median(&[]).abs() < 1e-9);
    }

    #[test]
    fn report_has_the_documented_json_shape() {
        let mut turns = PairedSamples::default();
        turns.round(10.0, 4.0);
        let json = BenchReport::new("x", "transitions/s", "pgbench", &turns).metric("p50_ms", 1.5).to_json();
        assert_eq!(json["ours"], 10.0);
        assert_eq!(json["baseline"], json!({"name": "pgbench", "value": 4.0}));
        assert_eq!(json["ratio"], 2.5);
        assert_eq!(json["figures"]["p50_ms"], 1.5);
        assert!(json["conditions"]["cores"].as_u64().is_some_and(|cores| cores > 0));
    }
}
