use super::*;
use serde_json::json;

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds)
}

fn id(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(number))
}

fn node(number: u128, sku: &str, region: &str, is_expected: bool) -> FleetNode {
    let sku_id = Uuid::from_u128(sku.len() as u128);
    FleetNode { id: id(number), sku_id, sku: sku.into(), region_code: region.into(), is_expected }
}

/// A node of two GPUs, each with half its memory used and 300 W.
fn sample(received_at: DateTime<Utc>, cpu: f32, cores: u32, gpu_percents: [u32; 2]) -> NodeSample {
    let gpu = |(index, percent): (usize, u32)| GpuSample {
        uuid: format!("GPU-{index}"),
        model: "H100".into(),
        memory_mib: 80_000,
        utilization_percent: Some(percent),
        memory_used_mib: Some(40_000),
        temperature_celsius: Some(50 + percent / 10),
        power_milliwatts: Some(300_000),
    };
    NodeSample {
        received_at,
        cpu_cores: cores,
        cpu_percent: Some(cpu),
        memory_mib: 1000,
        memory_used_mib: Some(100),
        storage_gib: 50,
        storage_used_gib: None,
        gpus: gpu_percents.into_iter().enumerate().map(gpu).collect(),
    }
}

fn samples(of: &[(u128, NodeSample)]) -> FleetSamples {
    let mut samples = FleetSamples::default();
    samples.merge(of.iter().map(|(number, sample)| (id(*number), sample.summary())));
    samples
}

#[test]
fn loads_are_added_up_by_sku_and_region_and_means_are_weighted() {
    let nodes =
        [node(1, "a", "eu", true), node(2, "a", "eu", true), node(3, "a", "us", true), node(4, "b", "eu", false)];
    let loads = [
        (1, sample(at(90), 10.0, 10, [0, 100])),
        (2, sample(at(95), 50.0, 30, [40, 60])),
        (3, sample(at(100), 1.0, 1, [7, 7])),
    ];
    let report = report(&nodes, &samples(&loads), at(100), TimeDelta::seconds(90));
    assert_eq!(report.data_age, Some(DataAge { oldest_seconds: 10.0, newest_seconds: 0.0 }));
    let shown = serde_json::to_value(&report.items).unwrap();
    assert_eq!(shown.as_array().unwrap().len(), 3);
    let first = &shown[0];
    assert_eq!((&first["sku"], &first["region_code"]), (&json!("a"), &json!("eu")));
    assert_eq!((&first["nodes"], &first["reporting"], &first["silent"]), (&json!(2), &json!(2), &json!(0)));
    assert_eq!(first["cpu"], json!({"cores": 40, "utilization_percent": 40.0}));
    assert_eq!(first["memory"], json!({"total_mib": 2000, "used_mib": 200}));
    assert_eq!(first["storage"], json!({"total_gib": 100, "used_gib": null}), "what none measures is null");
    let gpus = json!({
        "count": 4, "utilization_percent": 50.0, "memory_total_mib": 320_000, "memory_used_mib": 160_000,
        "temperature_celsius_max": 60, "power_watts": 1200.0,
    });
    assert_eq!(first["gpus"], gpus);
    assert_eq!(shown[2]["gpus"]["utilization_percent"], json!(null), "no node of this SKU reports");
}

#[test]
fn node_without_data_of_three_heartbeats_is_silent_and_its_old_load_is_not_counted() {
    let nodes =
        [node(1, "a", "eu", true), node(2, "a", "eu", true), node(3, "a", "eu", false), node(4, "a", "eu", true)];
    let loads = [(1, sample(at(9), 99.0, 8, [99, 99])), (2, sample(at(10), 5.0, 8, [1, 1]))];
    let report = report(&nodes, &samples(&loads), at(100), TimeDelta::seconds(90));
    let silent: Vec<_> = report.silent_nodes.nodes.iter().map(|node| (node.node_id, node.last_at)).collect();
    assert_eq!(silent, [(id(1).0, Some(at(9))), (id(4).0, None)]);
    assert_eq!((report.items[0].reporting, report.items[0].silent), (1, 2));
    assert_eq!(report.items[0].cpu.utilization_percent, Some(5.0));
}

#[test]
fn silent_nodes_over_the_bound_are_counted_and_the_first_are_named() {
    let nodes: Vec<_> = (0..1000).rev().map(|number| node(number, "a", "eu", true)).collect();
    let report = report(&nodes, &FleetSamples::default(), at(0), TimeDelta::seconds(90));
    assert_eq!((report.silent_nodes.count, report.silent_nodes.nodes.len()), (1000, SILENT_NODES_SHOWN));
    assert_eq!(report.silent_nodes.nodes[99].node_id, id(99).0);
    assert_eq!(report.data_age, None);
}

#[test]
fn newer_sample_wins_where_two_members_know_a_node() {
    let (old, new) = (sample(at(1), 1.0, 8, [1, 1]).summary(), sample(at(2), 2.0, 8, [2, 2]).summary());
    for order in [[&old, &new], [&new, &old]] {
        let mut merged = FleetSamples::default();
        for summary in order {
            merged.merge([(id(1), summary.clone())]);
        }
        assert_eq!(merged.nodes[&id(1)], new);
    }
}

#[test]
fn parts_of_a_member_are_all_its_nodes_and_each_once() {
    let fleet = FleetTelemetry::default();
    for number in 0..1000 {
        fleet.record(id(number), sample(at(0), 1.0, 1, [0, 0]));
    }
    let mut seen: Vec<_> = (0..16).flat_map(|part| fleet.summaries(part, 16)).map(|(id, _)| id).collect();
    seen.sort();
    assert_eq!(seen, (0..1000).map(id).collect::<Vec<_>>());
    assert!(fleet.summaries(16, 16).is_empty());
}

#[test]
fn samples_are_dropped_after_the_retention_and_over_the_bound() {
    let fleet = FleetTelemetry::default();
    for number in 0..=NODES_MAX as u128 {
        fleet.record(id(number), sample(at(0), 1.0, 1, [0, 0]));
    }
    let stored = |fleet: &FleetTelemetry| fleet.0.lock().unwrap().len();
    assert_eq!(stored(&fleet), NODES_MAX);
    assert_eq!(fleet.sample(id(NODES_MAX as u128)), None, "the one over the bound");
    // A known node is replaced all the same, and an unknown one is stored once old ones can go.
    fleet.record(id(0), sample(at(9), 1.0, 1, [0, 0]));
    assert_eq!(fleet.sample(id(0)).unwrap().received_at, at(9));
    fleet.record(id(NODES_MAX as u128), sample(at(3605), 1.0, 1, [0, 0]));
    assert_eq!(stored(&fleet), 2);
    fleet.expire(at(3610));
    assert_eq!(stored(&fleet), 1);
}
