//! What `node.validate` with load measures, what a SKU wants of it, and the judgement (decision 0056).

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt;

/// The most tests of a report that are stored, and the most characters of what it says about each.
const MAX_TESTS: usize = 24;
const MAX_TEXT: usize = 200;
/// The most characters of a judgement.
const MAX_REASON: usize = 1000;

/// How thoroughly a machine is tested, the stricter one later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum ValidationLevel {
    /// About ten seconds.
    Quick,
    /// Minutes, on all CPUs and half of the free memory.
    Deep,
}

impl ValidationLevel {
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

macro_rules! measurements {
    ($($variant:ident $name:literal: $what:literal;)+) => {
        /// A measurement of a machine. Its name ends in the unit.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Measurement {
            $(#[doc = $what] #[serde(rename = $name)] $variant,)+
        }

        impl Measurement {
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// What is measured.
            #[must_use]
            pub const fn what(self) -> &'static str {
                match self { $(Self::$variant => $what),+ }
            }
        }
    };
}

impl Measurement {
    const fn is_of_gpu(self) -> bool {
        match self {
            Self::GpuMemory | Self::GpuFromHost | Self::GpuToHost | Self::GpuPcieLanes | Self::GpuPcieGeneration => {
                true
            }
            Self::Cpu | Self::AllCpus | Self::Memory | Self::DiskWrite | Self::DiskRead => false,
        }
    }

    /// The levels that measure it: this one and stricter ones. What both measure is the same quantity, so that one minimum holds for both.
    const fn lowest_level(self) -> ValidationLevel {
        match self {
            Self::AllCpus => ValidationLevel::Deep,
            Self::Cpu
            | Self::Memory
            | Self::DiskWrite
            | Self::DiskRead
            | Self::GpuMemory
            | Self::GpuFromHost
            | Self::GpuToHost
            | Self::GpuPcieLanes
            | Self::GpuPcieGeneration => ValidationLevel::Quick,
        }
    }
}

measurements! {
    Cpu "cpu_bogo_ops_per_second": "operations of stress-ng on one CPU while the others are idle";
    AllCpus "all_cpus_bogo_ops_per_second": "operations of stress-ng on all CPUs together, by a deep validation alone";
    Memory "memory_mib_per_second": "reading or writing the memory by one CPU, the lower of both";
    DiskWrite "disk_write_mib_per_second": "writing a file in order, past the page cache";
    DiskRead "disk_read_mib_per_second": "reading that file";
    GpuMemory "gpu_memory_mib_per_second": "copying within the memory of the slowest GPU";
    GpuFromHost "gpu_from_host_mib_per_second": "copying from the machine's memory to the slowest GPU";
    GpuToHost "gpu_to_host_mib_per_second": "copying from the slowest GPU to the machine's memory";
    GpuPcieLanes "gpu_pcie_lanes": "PCIe lanes of the GPU that has the fewest";
    GpuPcieGeneration "gpu_pcie_generation": "PCIe generation of the slowest link, under load";
}

impl fmt::Display for Measurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The least that a machine of a SKU has to reach, by measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValidationMinimums(pub BTreeMap<Measurement, u64>);

impl ValidationMinimums {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those of measurements of GPUs.
    #[must_use]
    pub fn of_gpus(&self) -> Self {
        Self(self.0.iter().filter(|(it, _)| it.is_of_gpu()).map(|(it, minimum)| (*it, *minimum)).collect())
    }
}

/// What the agent reports of a validation with load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationReport {
    pub measurements: BTreeMap<Measurement, u64>,
    /// Tests that were not made, with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub not_tested: BTreeMap<String, String>,
    /// Tests that found a fault, or whose tool failed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failed: BTreeMap<String, String>,
}

impl ValidationReport {
    /// Reads the output of the task. What this release does not know is left out; an agent without such a report has measured nothing.
    #[must_use]
    pub fn read(output: Option<&Value>) -> Self {
        let field = |name| output.and_then(|it| it.get(name)).and_then(Value::as_object);
        let measured = |it: &Measurement| Some((*it, field("measurements")?.get(it.name())?.as_u64()?));
        Self {
            measurements: Measurement::ALL.iter().filter_map(measured).collect(),
            not_tested: bounded(field("not_tested")),
            failed: bounded(field("failed")),
        }
    }

    /// Why it shows nothing about the machine; `None` where it has an answer for every test of the level. A test that was not made has a reason.
    #[must_use]
    pub fn gap(&self, level: ValidationLevel) -> Option<String> {
        // The agent tests no further behind some failures.
        if !self.failed.is_empty() {
            return None;
        }
        let is_answered =
            |it: &&Measurement| self.measurements.contains_key(it) || self.not_tested.contains_key(it.name());
        // Agents of earlier releases do not know what was added since: that is a shortfall where the SKU has a minimum, and no gap.
        let expected = Measurement::ALL.iter().filter(|it| !matches!(it, Measurement::AllCpus));
        let missing: Vec<_> = expected.filter(|it| !is_answered(it)).map(|it| it.name()).collect();
        (!missing.is_empty()).then(|| {
            let (level, missing) = (level.name(), missing.join(", "));
            format!("the report of the {level} validation has nothing about {missing}: look at the log of the agent, and update an older one")
        })
    }

    /// Why the machine is not fit for tenants; empty where it is. Minimums of what the level does not measure do not apply.
    #[must_use]
    pub fn shortfalls(&self, level: ValidationLevel, minimums: &ValidationMinimums) -> Vec<String> {
        let failed = self.failed.iter().map(|(test, why)| format!("{test}: {why}"));
        let wanted = minimums.0.iter().filter(|(it, _)| it.lowest_level() <= level);
        let short = wanted.filter_map(|(it, minimum)| match self.measurements.get(it) {
            Some(measured) if measured >= minimum => None,
            Some(measured) => Some(format!("{it} is {measured}, and the SKU wants at least {minimum}")),
            // The failure is among those above.
            None if self.failed.contains_key(it.name()) => None,
            None => {
                let why = self.not_tested.get(it.name()).map_or("the agent did not report it", String::as_str);
                Some(format!("{it} was not tested ({why}), and the SKU wants at least {minimum}"))
            }
        });
        failed.chain(short).collect()
    }
}

/// The reasons as one text.
#[must_use]
pub fn reason(shortfalls: &[String]) -> String {
    shortened(&shortfalls.join("; "), MAX_REASON)
}

fn bounded(tests: Option<&Map<String, Value>>) -> BTreeMap<String, String> {
    let tests = tests.into_iter().flatten().take(MAX_TESTS);
    let text = |value: &Value| shortened(value.as_str().unwrap_or("no reason"), MAX_TEXT);
    tests.map(|(name, why)| (shortened(name, 64), text(why))).collect()
}

fn shortened(text: &str, most: usize) -> String {
    text.chars().take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fmt::Write as _;

    const QUICK: ValidationLevel = ValidationLevel::Quick;

    fn minimums(of: &[(Measurement, u64)]) -> ValidationMinimums {
        ValidationMinimums(of.iter().copied().collect())
    }

    #[test]
    fn the_table_of_measurements_is_as_reviewed() {
        let mut table = String::new();
        for it in Measurement::ALL {
            writeln!(table, "{it}: {}", it.what()).unwrap();
            assert_eq!(serde_json::to_string(it).unwrap(), format!("{:?}", it.name()));
        }
        insta::assert_snapshot!(table, @r"
        cpu_bogo_ops_per_second: operations of stress-ng on one CPU while the others are idle
        all_cpus_bogo_ops_per_second: operations of stress-ng on all CPUs together, by a deep validation alone
        memory_mib_per_second: reading or writing the memory by one CPU, the lower of both
        disk_write_mib_per_second: writing a file in order, past the page cache
        disk_read_mib_per_second: reading that file
        gpu_memory_mib_per_second: copying within the memory of the slowest GPU
        gpu_from_host_mib_per_second: copying from the machine's memory to the slowest GPU
        gpu_to_host_mib_per_second: copying from the slowest GPU to the machine's memory
        gpu_pcie_lanes: PCIe lanes of the GPU that has the fewest
        gpu_pcie_generation: PCIe generation of the slowest link, under load
        ");
    }

    #[test]
    fn machine_is_fit_from_its_minimum_on() {
        let report = ValidationReport::read(Some(&json!({ "measurements": { "disk_read_mib_per_second": 500 } })));
        let of = |minimum| report.shortfalls(QUICK, &minimums(&[(Measurement::DiskRead, minimum)]));
        assert_eq!((of(499), of(500)), (vec![], vec![]));
        assert_eq!(of(501), ["disk_read_mib_per_second is 500, and the SKU wants at least 501"]);
    }

    #[test]
    fn what_was_not_tested_is_a_shortfall_only_where_the_sku_wants_it() {
        let report = ValidationReport::read(Some(&json!({ "not_tested": { "cpu_bogo_ops_per_second": "no tool" } })));
        assert_eq!(report.shortfalls(QUICK, &ValidationMinimums::default()), Vec::<String>::new());
        let wanted = report.shortfalls(QUICK, &minimums(&[(Measurement::Cpu, 1), (Measurement::Memory, 1)]));
        assert!(wanted[0].contains("was not tested (no tool)"), "{wanted:?}");
        assert!(wanted[1].contains("the agent did not report it"), "{wanted:?}");
    }

    #[test]
    fn minimum_of_all_cpus_counts_for_deep_validations_alone() {
        let wanted = minimums(&[(Measurement::AllCpus, 90)]);
        let report = ValidationReport::read(Some(&json!({ "measurements": { "all_cpus_bogo_ops_per_second": 89 } })));
        let short = ["all_cpus_bogo_ops_per_second is 89, and the SKU wants at least 90"];
        assert_eq!(report.shortfalls(ValidationLevel::Deep, &wanted), short);
        assert_eq!(report.shortfalls(QUICK, &wanted), Vec::<String>::new());
        // An agent of an earlier release does not measure it.
        let others = Measurement::ALL.iter().filter(|it| **it != Measurement::AllCpus);
        let not_tested: Map<_, _> = others.map(|it| (it.name().to_owned(), json!("no tool"))).collect();
        let earlier = ValidationReport::read(Some(&json!({ "not_tested": not_tested })));
        for level in [QUICK, ValidationLevel::Deep] {
            assert_eq!(earlier.gap(level), None);
        }
        let short = earlier.shortfalls(ValidationLevel::Deep, &wanted);
        assert!(short[0].contains("the agent did not report it"), "{short:?}");
        assert_eq!(earlier.shortfalls(QUICK, &wanted), Vec::<String>::new());
    }

    #[test]
    fn failed_test_is_a_shortfall_without_any_minimum_and_named_once() {
        let report = ValidationReport::read(Some(&json!({ "failed": { "cpu_bogo_ops_per_second": "it hung" } })));
        let wanted = minimums(&[(Measurement::Cpu, 1)]);
        assert_eq!(report.shortfalls(QUICK, &ValidationMinimums::default()), ["cpu_bogo_ops_per_second: it hung"]);
        assert_eq!(report.shortfalls(QUICK, &wanted), ["cpu_bogo_ops_per_second: it hung"]);
    }

    #[test]
    fn hostile_output_of_an_agent_is_bounded_and_never_a_measurement() {
        let many: Map<String, Value> = (0..1000).map(|n| (format!("{n}"), json!("x".repeat(10_000)))).collect();
        let output = json!({
            "measurements": { "cpu_bogo_ops_per_second": -1, "memory_mib_per_second": "9", "disk_read_mib_per_second": 1.5, "unknown": 3 },
            "failed": many,
            "not_tested": [1, 2],
        });
        let report = ValidationReport::read(Some(&output));
        assert_eq!((report.measurements.len(), report.failed.len(), report.not_tested.len()), (0, MAX_TESTS, 0));
        let reason = reason(&report.shortfalls(QUICK, &ValidationMinimums::default()));
        assert_eq!(reason.chars().count(), MAX_REASON);
        assert_eq!(ValidationReport::read(Some(&json!({ "cut_off": true }))), ValidationReport::default());
        assert_eq!(ValidationReport::read(None), ValidationReport::default());
    }
}
