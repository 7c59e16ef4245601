use super::*;
use crate::startup::storage::COMMITTER_LANES;
use crate::supervisor::{WorkerRow, workers_check};
use chrono::Utc;
use edge::app_state::runtime_interface::WorkerState;
use std::collections::BTreeSet;

fn rows(states: &[(&str, WorkerState)]) -> Vec<WorkerRow> {
    let state = |name| states.iter().find(|(named, _)| *named == name).map_or(WorkerState::Running, |(_, it)| *it);
    let row = |row: &TreeRow| WorkerRow {
        spec: row.spec,
        state: state(row.spec.name),
        since: Utc::now(),
        restarts: 0,
        last_error: None,
        restartable: true,
    };
    TREE.iter().map(row).collect()
}

fn names(is_meant: impl Fn(&WorkerSpec) -> bool) -> Vec<&'static str> {
    TREE.iter().filter(|row| is_meant(&row.spec)).map(|row| row.spec.name).collect()
}

#[test]
fn every_row_has_an_earlier_parent_and_a_unique_name() {
    let mut known = BTreeSet::from(["root"]);
    for WorkerSpec { name, parent, .. } in TREE.iter().map(|row| row.spec) {
        assert!(known.contains(parent), "{name} has no parent");
        assert!(known.insert(name), "{name} is listed twice");
    }
}

#[test]
fn shutdown_stops_every_child_of_the_root_once() {
    let stopped: Vec<_> = ShutdownStep::ORDER.into_iter().flat_map(|step| names(|spec| spec.stop == step)).collect();
    let expected = [
        "edge",
        "provisioning",
        "placement-index",
        "accrual",
        "heartbeat",
        "ownership",
        "entities",
        "outbox-relay",
        "notification-relay",
        "policy",
        "keys",
        "metrics",
        "store",
        "cluster",
        "trace-export",
    ];
    assert_eq!(stopped, expected);
    let children: BTreeSet<_> = names(|spec| spec.parent == "root").into_iter().collect();
    let earlier = BTreeSet::from(["heartbeat", "ownership"]);
    assert_eq!(children, stopped.into_iter().filter(|name| !earlier.contains(name)).collect());
}

#[test]
fn every_lane_of_the_store_has_a_row() {
    for lane in 0..COMMITTER_LANES {
        let name = format!("committer-{}", lane + 1);
        assert_eq!(names(|spec| spec.queue == CommitterLane(lane)), [name]);
    }
    let loaders: Vec<_> = (1..=persistence::loader::LANES).map(|lane| format!("loader-{lane}")).collect();
    assert_eq!(names(|spec| spec.name.starts_with("loader-")), loaders);
    let lanes = COMMITTER_LANES + persistence::loader::LANES;
    assert_eq!(names(|spec| spec.readiness == MustRun).len(), lanes);
}

#[test]
fn group_has_children_and_a_row_without_children_has_a_task() {
    for row in TREE {
        let has_children = TREE.iter().any(|below| below.spec.parent == row.spec.name);
        assert!(has_children || !matches!(row.start, Group), "nothing does the work of {}", row.spec.name);
    }
}

#[test]
fn process_is_ready_without_optional_workers_and_while_others_back_off() {
    assert_eq!(workers_check(&rows(&[])), "ok");
    assert_eq!(workers_check(&rows(&[("sweep", WorkerState::Parked), ("timers", WorkerState::BackingOff)])), "ok");
    assert_eq!(workers_check(&rows(&[("timers", WorkerState::Parked)])), "timers is parked");
}

#[test]
fn process_with_a_stopped_lane_is_not_ready() {
    for lane in ["committer-1", "committer-2", "loader-1", "loader-2", "loader-3", "loader-4"] {
        let check = workers_check(&rows(&[(lane, WorkerState::BackingOff)]));
        assert_eq!(check, format!("{lane} is backing_off"));
    }
}

#[test]
fn worker_is_in_the_file_of_its_name_or_the_book_says_in_which() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/workers");
    let page = include_str!("../../../deploy/docs/src/internals/cluster.md");
    let (_, section) = page.split_once("### Which file a row of the tree is in").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let mut others = std::collections::BTreeMap::new();
    for line in section.lines().filter(|line| line.starts_with("| `")) {
        let mut cells = line.split(" | ").map(|cell| cell.split('`').skip(1).step_by(2).collect::<Vec<_>>());
        let (rows, files) = (cells.next().unwrap(), cells.next().unwrap());
        assert!(folder.join(files[0]).is_file(), "there is no {}", files[0]);
        others.extend(rows.into_iter().map(|row| (row, files[0])));
    }
    for row in TREE.iter().filter(|row| !matches!(row.start, Group)) {
        let own = folder.join(format!("{}.rs", row.spec.name.replace('-', "_"))).is_file();
        assert_ne!(own, others.remove(row.spec.name).is_some(), "{} has one file", row.spec.name);
    }
    assert!(others.is_empty(), "these are no rows of the tree: {others:?}");
}
