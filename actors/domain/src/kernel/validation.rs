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

/// How thoroughly a machine is tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
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

measurements! {
    Cpu "cpu_bogo_ops_per_second": "operations of stress-ng on one CPU";
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

    /// Why the machine is not fit for tenants; empty where it is.
    #[must_use]
    pub fn shortfalls(&self, minimums: &ValidationMinimums) -> Vec<String> {
        let failed = self.failed.iter().map(|(test, why)| format!("{test}: {why}"));
        let short = minimums.0.iter().filter_map(|(it, minimum)| match self.measurements.get(it) {
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
        cpu_bogo_ops_per_second: operations of stress-ng on one CPU
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
        let of = |minimum| report.shortfalls(&minimums(&[(Measurement::DiskRead, minimum)]));
        assert_eq!((of(499), of(500)), (vec![], vec![]));
        assert_eq!(of(501), ["disk_read_mib_per_second is 500, and the SKU wants at least 501"]);
    }

    #[test]
    fn what_was_not_tested_is_a_shortfall_only_where_the_sku_wants_it() {
        let report = ValidationReport::read(Some(&json!({ "not_tested": { "cpu_bogo_ops_per_second": "no tool" } })));
        assert_eq!(report.shortfalls(&ValidationMinimums::default()), Vec::<String>::new());
        let wanted = report.shortfalls(&minimums(&[(Measurement::Cpu, 1), (Measurement::Memory, 1)]));
        assert!(wanted[0].contains("was not tested (no tool)"), "{wanted:?}");
        assert!(wanted[1].contains("the agent did not report it"), "{wanted:?}");
    }

    #[test]
    fn failed_test_is_a_shortfall_without_any_minimum_and_named_once() {
        let report = ValidationReport::read(Some(&json!({ "failed": { "cpu_bogo_ops_per_second": "it hung" } })));
        let wanted = minimums(&[(Measurement::Cpu, 1)]);
        assert_eq!(report.shortfalls(&ValidationMinimums::default()), ["cpu_bogo_ops_per_second: it hung"]);
        assert_eq!(report.shortfalls(&wanted), ["cpu_bogo_ops_per_second: it hung"]);
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
        let reason = reason(&report.shortfalls(&ValidationMinimums::default()));
        assert_eq!(reason.chars().count(), MAX_REASON);
        assert_eq!(ValidationReport::read(Some(&json!({ "cut_off": true }))), ValidationReport::default());
        assert_eq!(ValidationReport::read(None), ValidationReport::default());
    }
}
