//! What all benchmarks share: ours and the baseline in turns within one run, the median of their ratios, a table for people and
//! `target/bench/NAME.json` for machines.

pub mod caller;
pub mod encrypted;
pub mod memory;
pub mod postgres;

use anyhow::{Context, ensure};
use comfy_table::{Table, presets};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a benchmark takes: rounds of so many seconds for each thing that is measured. `BENCH_ROUNDS` and `BENCH_SECONDS`
/// shorten a look; figures that are compared come from the defaults (of seconds: 4, where the benchmark does not say another).
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub rounds: usize,
    pub each: Duration,
}

impl Plan {
    /// # Errors
    /// Where one of the variables is not a number.
    pub fn from_environment() -> anyhow::Result<Self> {
        Self::of_seconds(4.0)
    }

    /// The same, where each thing takes another time unless told.
    ///
    /// # Errors
    /// Where one of the variables is not a number.
    pub fn of_seconds(default: f64) -> anyhow::Result<Self> {
        let number = |name: &str, default: f64| match std::env::var(name) {
            Ok(text) => text.parse::<f64>().with_context(|| format!("{name}={text} is not a number")),
            Err(_) => Ok(default),
        };
        let rounds = number("BENCH_ROUNDS", 5.0)?.max(1.0) as usize;
        Ok(Self { rounds, each: Duration::from_secs_f64(number("BENCH_SECONDS", default)?.max(0.1)) })
    }
}

/// What was measured in turns: one value of each in every round, so that whatever slows the machine slows both.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    ours: Vec<f64>,
    baseline: Vec<f64>,
}

impl Turns {
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
pub struct Report {
    pub name: &'static str,
    pub unit: &'static str,
    pub ours: f64,
    pub baseline_name: &'static str,
    pub baseline: f64,
    pub ratio: f64,
    /// Whatever else was measured, by a name that ends in its unit.
    pub figures: Map<String, Value>,
    pub conditions: Map<String, Value>,
}

impl Report {
    #[must_use]
    pub fn new(name: &'static str, unit: &'static str, baseline_name: &'static str, turns: &Turns) -> Self {
        let (ours, baseline, ratio) = (turns.ours(), turns.baseline(), turns.ratio());
        Self { name, unit, ours, baseline_name, baseline, ratio, figures: Map::new(), conditions: machine() }
    }

    #[must_use]
    pub fn figure(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.figures.insert(name.into(), value.into());
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
            "figures": self.figures,
            "conditions": self.conditions,
        })
    }

    /// Prints the table and writes the file.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn publish(&self) -> anyhow::Result<()> {
        let folder = target_folder()?.join("bench");
        std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let path = folder.join(format!("{}.json", self.name));
        let text = serde_json::to_string_pretty(&self.to_json())?;
        std::fs::write(&path, text + "\n").with_context(|| format!("writing {}", path.display()))?;

        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header([self.name, self.unit]);
        table.add_row(["ours".to_owned(), show(&json!(rounded(self.ours)))]);
        table.add_row([self.baseline_name.to_owned(), show(&json!(rounded(self.baseline)))]);
        table.add_row(["ratio (median of the rounds)".to_owned(), format!("{:.1}", self.ratio)]);
        for (name, value) in &self.figures {
            table.add_row([name.clone(), show(value)]);
        }
        for (name, value) in &self.conditions {
            table.add_row([format!("({name})"), show(value)]);
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "{table}\nwritten to {}", path.display())?;
        Ok(())
    }
}

/// To three places: what is beyond them is noise.
#[must_use]
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn show(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

/// What the machine is, as far as it matters to a figure.
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

/// `target/release`, whatever profile this is built in.
///
/// # Errors
/// Where it is not built.
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

/// The release build, unless this is a look at how a benchmark itself works: `BENCH_PROGRAMS` names another folder.
///
/// # Errors
/// Where it is not there.
pub fn programs() -> anyhow::Result<PathBuf> {
    match std::env::var_os("BENCH_PROGRAMS") {
        Some(folder) => Ok(Path::new(&folder).canonicalize()?),
        None => release_build(),
    }
}

/// How many a variable asks for, in place of the usual number.
///
/// # Errors
/// Where it is no number.
pub fn fewer(variable: &str) -> anyhow::Result<Option<usize>> {
    let asked = std::env::var(variable).ok();
    asked.map(|text| text.parse().with_context(|| format!("{variable}={text} is no number"))).transpose()
}

/// The build folder that this program lies in.
fn target_folder() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("where this program lies")?;
    let folder = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    folder.map(PathBuf::from).context("this program does not lie in a build folder")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_the_median_of_the_rounds_and_not_of_the_sums() {
        let mut turns = Turns::default();
        for (ours, baseline) in [(80.0, 10.0), (8.0, 4.0), (90.0, 10.0)] {
            turns.round(ours, baseline);
        }
        assert!((turns.ratio() - 8.0).abs() < 1e-9);
        assert!((turns.ours() - 80.0).abs() < 1e-9);
        assert!((median(&[1.0, 2.0, 4.0, 8.0]) - 3.0).abs() < 1e-9);
        assert!(median(&[]).abs() < 1e-9);
    }

    #[test]
    fn the_file_has_the_agreed_shape() {
        let mut turns = Turns::default();
        turns.round(10.0, 4.0);
        let json = Report::new("x", "transitions/s", "pgbench", &turns).figure("p50_ms", 1.5).to_json();
        assert_eq!(json["ours"], 10.0);
        assert_eq!(json["baseline"], json!({"name": "pgbench", "value": 4.0}));
        assert_eq!(json["ratio"], 2.5);
        assert_eq!(json["figures"]["p50_ms"], 1.5);
        assert!(json["conditions"]["cores"].as_u64().is_some_and(|cores| cores > 0));
    }
}
