//! Gauges of what there is: entities by state, GPUs by what they are used for, money, findings, and the ends of certificates. No label is an
//! id, so that the number of series does not grow with the number of entities.

use chrono::{DateTime, Utc};
use edge::trust::current_keys::Keys;
use persistence::metrics::registered;
use persistence::queries::{AccountSum, GpuUse, NodeConcerns, StateCount};
use prometheus::{Gauge, GaugeVec, Opts, Registry};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

/// The gauges. Those whose help names shards cover this process's own.
pub struct EntityTotals {
    entities: GroupedGauge<2>,
    gpus: GroupedGauge<3>,
    balances: GroupedGauge<1>,
    accounts: GroupedGauge<2>,
    findings: GroupedGauge<2>,
    certificates_ending: Gauge,
    certificate_ends: GaugeVec,
    ends: Mutex<BTreeMap<&'static str, DateTime<Utc>>>,
}

impl EntityTotals {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| registered(registry, Gauge::new(name, help));
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            registered(registry, GaugeVec::new(Opts::new(name, help), labels))
        };
        let entities = gauges(
            "entities_by_state",
            "Entities of the whole cluster by kind and state; every process exports the same values.",
            &["kind", "state"],
        )?;
        let gpus = gauges(
            "inventory_gpus",
            "GPUs of the nodes in this process's shards: `sold` to a tenant that is set up, `held` by another tenant, `free` for new \
             allocations, or `unavailable`.",
            &["sku", "region", "use"],
        )?;
        let balances = gauges(
            "billing_balance_minor",
            "The sum of the balances of the accounts in this process's shards, in minor units.",
            &["currency"],
        )?;
        let accounts =
            gauges("billing_accounts", "Billing accounts in this process's shards.", &["currency", "state"])?;
        let findings = gauges(
            "inventory_node_findings",
            "Nodes in this process's shards with a finding that is not cleared; `other` is what the table of findings does not have.",
            &["probe", "code"],
        )?;
        Ok(Self {
            entities: GroupedGauge::new(entities),
            gpus: GroupedGauge::new(gpus),
            balances: GroupedGauge::new(balances),
            accounts: GroupedGauge::new(accounts),
            findings: GroupedGauge::new(findings),
            certificates_ending: gauge(
                "inventory_node_certificates_ending",
                "Nodes in service in this process's shards whose certificate ends within an hour, or has ended.",
            )?,
            certificate_ends: gauges(
                "certificate_end_timestamp_seconds",
                "When a certificate of the service ends: `server`, the chain of this process's listeners; `node-ca`, the authority that \
                 certifies nodes.",
                &["certificate"],
            )?,
            ends: Mutex::default(),
        })
    }

    /// Sets the gauge of entities by kind and state.
    pub fn set_entities(&self, counts: &[StateCount]) {
        let value = |it: &StateCount| ([it.kind.as_str().to_owned(), it.state.clone()], it.count as f64);
        self.entities.replace(counts.iter().map(value));
    }

    /// Sets the gauge of GPUs. What is neither sold, held nor free is unavailable.
    pub fn set_gpus(&self, groups: &[GpuUse]) {
        self.gpus.replace(groups.iter().flat_map(|it| {
            let unavailable = it.total.saturating_sub(it.sold + it.held + it.free);
            let used_for = [("sold", it.sold), ("held", it.held), ("free", it.free), ("unavailable", unavailable)];
            used_for
                .map(|(used_for, gpus)| ([it.sku.clone(), it.region_code.clone(), used_for.to_owned()], gpus as f64))
        }));
    }

    /// Sets the gauges of balances and accounts.
    pub fn set_accounts(&self, sums: &[AccountSum]) {
        let mut balances = std::collections::BTreeMap::<_, f64>::new();
        for it in sums {
            *balances.entry([it.currency.clone()]).or_default() += it.balance.get() as f64 / 1e6;
        }
        self.balances.replace(balances);
        self.accounts.replace(sums.iter().map(|it| ([it.currency.clone(), it.state.clone()], it.accounts as f64)));
    }

    /// Sets the gauges of findings and of certificates that nodes have not renewed.
    pub fn set_node_concerns(&self, concerns: &NodeConcerns) {
        let findings = concerns.findings.iter();
        self.findings
            .replace(findings.map(|((probe, code), nodes)| ([(*probe).to_owned(), (*code).to_owned()], *nodes as f64)));
        self.certificates_ending.set(concerns.certificates_ending as f64);
    }

    /// Sets when the chain of this process's listeners ends.
    pub fn set_server_certificate_end(&self, end: DateTime<Utc>) {
        self.set_certificate_end("server", end);
    }

    /// Sets when the authority that certifies nodes ends.
    pub fn set_node_authority_end(&self, keys: &Keys) {
        self.set_certificate_end("node-ca", keys.node.issuing_ends());
    }

    fn set_certificate_end(&self, certificate: &'static str, end: DateTime<Utc>) {
        self.certificate_ends.with_label_values(&[certificate]).set(end.timestamp() as f64);
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).insert(certificate, end);
    }

    /// When each certificate ends.
    pub fn certificate_ends(&self) -> BTreeMap<&'static str, DateTime<Utc>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A gauge by labels whose values are replaced together: a group that is no longer measured is removed.
struct GroupedGauge<const LABELS: usize> {
    gauge: GaugeVec,
    shown: Mutex<BTreeSet<[String; LABELS]>>,
}

impl<const LABELS: usize> GroupedGauge<LABELS> {
    const fn new(gauge: GaugeVec) -> Self {
        Self { gauge, shown: Mutex::new(BTreeSet::new()) }
    }

    fn replace(&self, values: impl IntoIterator<Item = ([String; LABELS], f64)>) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = std::mem::take(&mut *shown);
        for (labels, value) in values {
            self.gauge.with_label_values(&labels).set(value);
            left.remove(&labels);
            shown.insert(labels);
        }
        for labels in left {
            // It was exported; where it is not, nothing is to be removed.
            let _ = self.gauge.remove_label_values(&labels);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::EntityKind;
    use domain::money::MicroAmount;
    use prometheus::TextEncoder;

    fn page(registry: &Registry) -> String {
        TextEncoder::new().encode_to_string(&registry.gather()).unwrap()
    }

    #[test]
    fn state_that_no_entity_is_in_any_more_is_removed() {
        let registry = Registry::new();
        let metrics = EntityTotals::register(&registry).unwrap();
        let count = |state: &str, count| StateCount { kind: EntityKind::Node, state: state.to_owned(), count };
        metrics.set_entities(&[count("active", 3), count("offline", 1)]);
        assert!(page(&registry).contains("entities_by_state{kind=\"node\",state=\"offline\"} 1\n"));
        metrics.set_entities(&[count("active", 4)]);
        let page = page(&registry);
        assert!(page.contains("entities_by_state{kind=\"node\",state=\"active\"} 4\n"), "{page}");
        assert!(!page.contains("offline"), "{page}");
    }

    #[test]
    fn every_gpu_is_counted_once_by_what_it_is_used_for() {
        let registry = Registry::new();
        let metrics = EntityTotals::register(&registry).unwrap();
        let used = |sold, held, free| GpuUse {
            sku: "h100".to_owned(),
            region_code: "eu".to_owned(),
            total: 16,
            sold,
            held,
            free,
        };
        metrics.set_gpus(&[used(5, 2, 1)]);
        let page = page(&registry);
        for (used_for, gpus) in [("sold", 5), ("held", 2), ("free", 1), ("unavailable", 8)] {
            let line = format!("inventory_gpus{{region=\"eu\",sku=\"h100\",use=\"{used_for}\"}} {gpus}\n");
            assert!(page.contains(&line), "{line} {page}");
        }
    }

    #[test]
    fn balances_of_all_states_are_added_up_by_currency() {
        let registry = Registry::new();
        let metrics = EntityTotals::register(&registry).unwrap();
        let sum = |state: &str, balance| AccountSum {
            currency: "usd".to_owned(),
            state: state.to_owned(),
            accounts: 2,
            balance: MicroAmount::of(balance),
        };
        metrics.set_accounts(&[sum("open", 7_500_000), sum("grace", -500_000)]);
        let page = page(&registry);
        assert!(page.contains("billing_balance_minor{currency=\"usd\"} 7\n"), "{page}");
        assert!(page.contains("billing_accounts{currency=\"usd\",state=\"grace\"} 2\n"), "{page}");
    }
}
