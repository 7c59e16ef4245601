use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use nix::mount::{MsFlags, mount, umount};
use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::gpu_probe::DEFAULT_DEADLINE;
use crate::gpus::GpuSimulation;
use crate::terminal::skipped_tests;

const QUICK: ValidationLoad = ValidationLoad { level: LoadLevel::Quick, load_seconds: 0, gpu_uuid: None };

/// A machine with these tools, each a shell script.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn with(tools: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, script) in tools {
            let program = folder.path().join(name);
            fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self { folder }
    }

    fn validator(&self) -> Validator {
        Validator::new(self.folder.path().to_owned(), self.folder.path().to_owned())
    }

    fn report(&self) -> LoadReport {
        self.validator().report(&QUICK, &Gpus::Absent { why: "none here".into() })
    }
}

/// The real programs, where `deploy/test --tools` has put them.
fn real_tools() -> Option<PathBuf> {
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map(|folder| PathBuf::from(folder).join("loads/bin"));
    tools.filter(|folder| folder.join("fio").is_file())
}

#[test]
fn real_tools_measure_cpu_memory_and_disk_and_leave_no_file() {
    let Some(programs) = real_tools() else {
        return skipped_tests::report_skipped("stress-ng and fio are not in GPUAAS_TOOLS_DIR");
    };
    // Not in memory: that is no disk.
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let validator = Validator::new(programs, folder.path().to_owned());
    // A machine that is busy with other tests does not finish each test in time.
    let reports = (0..5).map(|_| validator.report(&QUICK, &Gpus::Absent { why: "none here".into() }));
    let is_done = |report: &LoadReport| report.measurements.len() == 4 || !report.failed.is_empty();
    let mut reports = reports.inspect(|report| eprintln!("{report:?}"));
    let report = reports.find(is_done).expect("a validation is finished in five attempts");
    assert_eq!(report.failed, BTreeMap::new());
    for name in
        ["cpu_bogo_ops_per_second", "memory_mib_per_second", "disk_write_mib_per_second", "disk_read_mib_per_second"]
    {
        assert!(report.measurements.get(name).is_some_and(|measurement| *measurement > 0), "{name}: {report:?}");
    }
    assert_eq!(report.not_tested["gpu_pattern"], "none here");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "a file is left");
}

#[test]
fn disk_that_is_nearly_full_is_not_tested_and_one_that_fills_up_meanwhile_is_a_failure() {
    let Some(programs) = real_tools() else {
        return skipped_tests::report_skipped("stress-ng and fio are not in GPUAAS_TOOLS_DIR");
    };
    let folder = tempfile::tempdir().unwrap();
    let small = MsFlags::empty();
    if mount(Some("none"), folder.path(), Some("tmpfs"), small, Some("size=16m")).is_err() {
        return skipped_tests::report_skipped("it needs root, for a small file system of its own");
    }
    let tools = Tools { programs: &programs, folder: folder.path() };
    let budget = Budget::of(&QUICK);
    let nearly_full = fio::write(&tools, &budget);
    let filled = fio::fill(&tools, 64 * MIB);
    umount(folder.path()).unwrap();
    assert!(matches!(&nearly_full, Err(ToolError::NotTested(why)) if why.contains("16 MiB free")), "{nearly_full:?}");
    let filled = filled.unwrap_err().to_string();
    assert!(filled.contains("No space left"), "{filled}");
}

#[test]
fn tools_that_are_missing_fail_nothing() {
    let report = Bench::with(&[]).report();
    assert_eq!((report.measurements.len(), report.failed.len()), (0, 0), "{report:?}");
    assert!(report.not_tested["cpu_bogo_ops_per_second"].contains("stress-ng is not installed"), "{report:?}");
    assert!(report.not_tested["disk_write_mib_per_second"].contains("fio is not installed"), "{report:?}");
}

#[test]
fn tools_that_print_garbage_or_fail_are_failures() {
    let report =
        Bench::with(&[("stress-ng", "echo metrics:; echo nothing"), ("fio", "echo full >&2; exit 1")]).report();
    assert!(report.failed["cpu_bogo_ops_per_second"].contains("not as expected"), "{report:?}");
    assert!(report.failed["memory_mib_per_second"].contains("not as expected"), "{report:?}");
    assert_eq!(report.failed["disk_write_mib_per_second"], "fio ended with status 1: full");
    assert!(report.not_tested["disk_read_mib_per_second"].contains("nothing was written"), "{report:?}");
}

#[test]
fn file_of_a_killed_validation_is_removed_by_the_next_agent() {
    let bench = Bench::with(&[]);
    let left = bench.folder.path().join(DATA_FILE);
    fs::write(&left, "left").unwrap();
    bench.validator();
    let begun = std::time::Instant::now();
    while left.exists() {
        assert!(begun.elapsed().as_secs() < 60, "it is still there");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn no_load_is_applied_while_a_tenant_is_there() {
    let bench = Bench::with(&[("stress-ng", r#"touch "$(dirname "$0")/ran""#)]);
    let checked = json!({ "allocations": [Uuid::nil()] }).as_object().unwrap().clone();
    let gpus = Gpus::Absent { why: "none".into() };
    let refused = bench.validator().run(&QUICK, checked, &gpus).unwrap_err();
    assert_eq!(refused.code, "tenants_present");
    assert!(!bench.folder.path().join("ran").exists(), "the load was applied");
    let empty = json!({ "allocations": [] }).as_object().unwrap().clone();
    let output = bench.validator().run(&QUICK, empty, &gpus).unwrap();
    assert_eq!((&output["level"], &output["allocations"]), (&json!("quick"), &json!([])));
    assert!(bench.folder.path().join("ran").exists());
}

#[test]
fn two_validations_run_one_after_the_other() {
    // A load that sees another fails.
    let script = r#"cd "$(dirname "$0")"; mkdir busy || { echo two >&2; exit 1; }; sleep 0.2; rmdir busy; echo"#;
    let bench = Bench::with(&[("stress-ng", script)]);
    let validator = Arc::new(bench.validator());
    let gpus = Arc::new(Gpus::detect(
        Uuid::nil(),
        Some(&GpuSimulation { count: 1, model: "H100".into(), memory_mib: 1 }),
        DEFAULT_DEADLINE,
    ));
    let run = || {
        let (validator, gpus) = (Arc::clone(&validator), Arc::clone(&gpus));
        std::thread::spawn(move || validator.run(&QUICK, TaskOutput::new(), &gpus).unwrap())
    };
    for run in [run(), run()] {
        let output = run.join().unwrap();
        let failed = output["failed"]["cpu_bogo_ops_per_second"].as_str().unwrap();
        assert!(failed.contains("not as expected"), "{failed}");
    }
}

#[test]
fn deep_validation_is_bounded_and_uses_every_cpu() {
    let deep = |load_seconds| Budget::of(&ValidationLoad { level: LoadLevel::Deep, load_seconds, gpu_uuid: None });
    let all = |it: &Budget| it.cpu + it.all_cpus + it.memory + it.memory_pattern + it.disk * 2 + it.gpus;
    assert_eq!(all(&deep(100)), Duration::from_secs(100));
    assert!(all(&deep(u32::MAX)) <= Duration::from_secs(3600));
    assert!(all(&Budget::of(&QUICK)) < Duration::from_secs(10));
    assert_eq!(Budget::of(&QUICK).workers, 1);
    assert_eq!(deep(3600).cpu, Budget::of(&QUICK).cpu, "one minimum holds for both levels");
}

#[test]
fn one_cpu_is_measured_alike_at_both_levels_and_all_of_them_by_a_deep_one() {
    // A stress-ng whose operations per second are 100 for each worker, and 90 where they have company. It notes how it was called.
    let script = r#"folder=$(dirname "$0"); echo "$*" >>"$folder/calls"
        case $1 in
            --cpu) [ "$2" -gt 1 ] && ops=$(($2 * 90)) || ops=100
                printf 'metrics:\n    - stressor: cpu\n      bogo-ops: 1\n      bogo-ops-per-second-real-time: %s.5\n' "$ops" ;;
            *) exit 1 ;;
        esac"#;
    let bench = Bench::with(&[("stress-ng", script)]);
    let calls = || fs::read_to_string(bench.folder.path().join("calls")).unwrap();
    let of_cpus =
        |calls: &str| calls.lines().filter(|it| it.starts_with("--cpu")).map(str::to_owned).collect::<Vec<_>>();
    let quick = bench.report();
    let in_quick = of_cpus(&calls());
    fs::remove_file(bench.folder.path().join("calls")).unwrap();
    let load = ValidationLoad { level: LoadLevel::Deep, load_seconds: 30, gpu_uuid: None };
    let deep = bench.validator().report(&load, &Gpus::Absent { why: "none here".into() });
    let in_deep = of_cpus(&calls());
    assert_eq!(
        (quick.measurements["cpu_bogo_ops_per_second"], deep.measurements["cpu_bogo_ops_per_second"]),
        (100, 100)
    );
    assert_eq!((in_quick.len(), in_deep.len()), (1, 2), "{in_deep:?}");
    assert_eq!(in_deep[0], in_quick[0]);
    assert!(!quick.measurements.contains_key("all_cpus_bogo_ops_per_second"), "{quick:?}");
    let cpus = std::thread::available_parallelism().unwrap().get() as u64;
    let together = if cpus > 1 { cpus * 90 } else { 100 };
    assert_eq!(deep.measurements["all_cpus_bogo_ops_per_second"], together);
}
