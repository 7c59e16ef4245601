//! What replicas count: the restarts of their workers, and their metrics, which are pages in the Prometheus text format, parsed as strictly as
//! the strictest parser does.

use super::{TestCluster, WAIT_TIMEOUT};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Every sample by its name and labels.
pub struct MetricsPage {
    pub text: String,
    samples: BTreeMap<(String, BTreeMap<String, String>), f64>,
    /// The names of its metrics.
    pub families: BTreeSet<String>,
}

impl TestCluster {
    /// The metrics of a replica that runs.
    pub async fn metrics_of(&self, replica: usize) -> MetricsPage {
        MetricsPage::parse(&self.operator_at(replica).get("/metrics").await.text)
    }

    /// The sum of a metric over all replicas, which run.
    pub async fn metric_total(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let mut sum = 0.0;
        for replica in 0..self.replicas.len() {
            sum += self.metrics_of(replica).await.value(name, labels).unwrap_or(0.0);
        }
        sum
    }

    /// Waits until a replica's metrics satisfy the condition, and returns them.
    pub async fn wait_for_metrics(&self, replica: usize, wanted: impl Fn(&MetricsPage) -> bool) -> MetricsPage {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let page = self.metrics_of(replica).await;
            if wanted(&page) {
                return page;
            }
            assert!(Instant::now() < until, "not in time: {}", page.text);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// How often each member has restarted this worker, by the member's name. A member that answers late is missing.
    pub async fn restarts_of(&self, worker: &str) -> BTreeMap<String, u64> {
        let tree = self.admin.get("/api/v1/admin/runtime/tree").await.ok();
        let members = tree["members"].as_array().expect("a tree has members").iter();
        let restarts = |member: &Value| {
            let row = member["workers"].as_array()?.iter().find(|row| row["name"] == worker)?;
            Some((member["name"].as_str()?.to_owned(), row["restarts"].as_u64()?))
        };
        members.filter_map(restarts).collect()
    }
}

impl MetricsPage {
    /// # Panics
    /// If the page does not conform to the format.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        assert!(text.ends_with('\n'), "the last line has an end");
        let mut page = Self { text: text.to_owned(), samples: BTreeMap::new(), families: BTreeSet::new() };
        let (mut helped, mut types) = (BTreeSet::new(), BTreeMap::new());
        let mut family = String::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap_or_else(|| panic!("no help: {line}"));
                assert!(!help.is_empty() && helped.insert(name.to_owned()), "helped twice: {line}");
                family = name.to_owned();
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap_or_else(|| panic!("no type: {line}"));
                assert_eq!(name, family, "the type follows its help: {line}");
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert!(
                    kind != "counter" || name.ends_with("_total") || name.starts_with("process_"),
                    "a counter ends in _total: {line}"
                );
                assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "typed twice: {line}");
            } else {
                let (name, labels, value) = sample(line);
                let is_histogram = types.get(&family).is_some_and(|kind| kind == "histogram");
                let suffix = name.strip_prefix(&family).unwrap_or_else(|| panic!("{line} stands under {family}"));
                let allowed: &[&str] = if is_histogram { &["_bucket", "_sum", "_count"] } else { &[""] };
                assert!(allowed.contains(&suffix), "{line} stands under {family}");
                assert!(page.samples.insert((name, labels), value).is_none(), "a series stands twice: {line}");
            }
        }
        assert_eq!(helped, types.keys().cloned().collect(), "every family has a help and a type");
        page.expect_whole_histograms(&types);
        page.families = helped;
        page
    }

    fn expect_whole_histograms(&self, types: &BTreeMap<String, String>) {
        for name in types.iter().filter(|(_, kind)| *kind == "histogram").map(|(name, _)| name) {
            let mut series: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
            for ((_, labels), value) in
                self.samples.iter().filter(|((sample, _), _)| *sample == format!("{name}_bucket"))
            {
                let mut labels = labels.clone();
                let bound = labels.remove("le").unwrap_or_else(|| panic!("a bucket of {name} has no bound"));
                let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap() };
                series.entry(labels).or_default().push((bound, *value));
            }
            for (labels, mut buckets) in series {
                buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
                assert!(buckets.windows(2).all(|two| two[0].1 <= two[1].1), "{name}{labels:?} is not cumulative");
                let last = buckets.last().unwrap();
                let count = self.samples.get(&(format!("{name}_count"), labels)).copied();
                assert_eq!((last.0, Some(last.1)), (f64::INFINITY, count), "{name} does not end with all");
            }
        }
    }

    /// The sum of the samples with this name and these labels; `None` if there is none.
    #[must_use]
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let is_wanted =
            |found: &BTreeMap<String, String>| labels.iter().all(|(k, v)| found.get(*k).is_some_and(|it| it == v));
        let found: Vec<f64> = self
            .samples
            .iter()
            .filter(|((it, found), _)| it == name && is_wanted(found))
            .map(|(_, value)| *value)
            .collect();
        (!found.is_empty()).then(|| found.iter().sum())
    }

    /// The metric without labels of this name, which has to be there.
    #[must_use]
    pub fn number(&self, name: &str) -> f64 {
        self.value(name, &[]).unwrap_or_else(|| panic!("there is no {name}: {}", self.text))
    }

    /// Each series, by its name and labels.
    #[must_use]
    pub fn series(&self) -> BTreeSet<String> {
        self.samples.keys().map(|(name, labels)| format!("{name}{labels:?}")).collect()
    }

    /// Whether there is a metric family of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.value(name, &[]).or_else(|| self.value(&format!("{name}_count"), &[])).is_some()
    }
}

fn is_name(name: &str) -> bool {
    name.bytes().next().is_some_and(|first| first.is_ascii_lowercase() || first == b'_')
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

fn sample(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line}"));
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}').unwrap_or_else(|| panic!("open labels: {line}"))),
        None => (series, ""),
    };
    assert!(is_name(name), "{line}");
    let mut found = BTreeMap::new();
    let mut rest = labels;
    while !rest.is_empty() {
        let (label, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("no label: {line}"));
        // None of our values contains a quote.
        let (value, after) = after.split_once('"').unwrap_or_else(|| panic!("open value: {line}"));
        assert!(is_name(label) && !value.contains('\\'), "{line}");
        assert!(found.insert(label.to_owned(), value.to_owned()).is_none(), "a label stands twice: {line}");
        rest = after.strip_prefix(',').unwrap_or(after);
    }
    (name.to_owned(), found, value.parse().unwrap_or_else(|_| panic!("no number: {line}")))
}

#[cfg(test)]
mod tests {
    use super::MetricsPage;

    #[test]
    fn invalid_metrics_page_is_refused() {
        let good = "# HELP a_total A.\n# TYPE a_total counter\na_total{k=\"v\"} 1\n";
        assert_eq!(MetricsPage::parse(good).value("a_total", &[("k", "v")]), Some(1.0));
        for bad in [
            "a_total 1\n",
            "# HELP a A.\n# TYPE a counter\na 1\n",
            "# HELP a_total A.\n# TYPE a_total counter\na_total 1\na_total 2\n",
            "# HELP a_total A.\n# TYPE a_total counter\nb_total 1\n",
            "# HELP a_total A.\na_total 1\n",
            "# HELP h H.\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\n",
            "# HELP h H.\n# TYPE h histogram\nh_bucket{le=\"1\"} 1\nh_sum 1\nh_count 1\n",
        ] {
            assert!(std::panic::catch_unwind(|| MetricsPage::parse(bad)).is_err(), "{bad}");
        }
    }
}
