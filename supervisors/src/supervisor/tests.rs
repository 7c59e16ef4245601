use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

const TEST_POLICY: RestartPolicy = RestartPolicy {
    pause: Duration::from_millis(1),
    longest: Duration::from_millis(4),
    intensity: 3,
    window: Duration::from_secs(60),
};

fn row(name: &'static str, parent: &'static str) -> WorkerSpec {
    WorkerSpec {
        name,
        parent,
        restart: TEST_POLICY,
        readiness: ReadinessRule::MustNotPark,
        stop: ShutdownStep::WithParent,
        queue: WorkerQueue::Hidden,
        description: "a test's worker",
    }
}

fn counting(runs: &Arc<AtomicUsize>, end: fn() -> anyhow::Result<()>) -> WorkerTask {
    let runs = Arc::clone(runs);
    Arc::new(move || {
        runs.fetch_add(1, Ordering::SeqCst);
        async move { end() }.boxed()
    })
}

fn endless() -> WorkerTask {
    Arc::new(|| std::future::pending().boxed())
}

async fn until(supervisor: &Supervisor, name: &str, state: WorkerState) -> WorkerRow {
    for _ in 0..2000 {
        let found = supervisor.rows().into_iter().find(|row| row.spec.name == name).unwrap();
        if found.state == state {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("{name} is not {state:?}: {:?}", supervisor.rows());
}

#[tokio::test]
async fn worker_that_keeps_ending_is_parked_with_its_error_and_its_sibling_runs_on() {
    let supervisor = Supervisor::start().await.unwrap();
    let runs = Arc::default();
    supervisor.add(row("sound", "root"), endless());
    supervisor.add(row("broken", "root"), counting(&runs, || anyhow::bail!("out of paper")));
    let parked = until(&supervisor, "broken", WorkerState::Parked).await;
    assert_eq!(parked.last_error.as_deref(), Some("out of paper"));
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    until(&supervisor, "sound", WorkerState::Running).await;
}

#[tokio::test]
async fn panic_of_a_worker_counts_as_a_failure() {
    let supervisor = Supervisor::start().await.unwrap();
    supervisor.add(row("frail", "root"), counting(&Arc::default(), || panic!("cannot go on")));
    let parked = until(&supervisor, "frail", WorkerState::Parked).await;
    assert!(parked.last_error.unwrap().contains("cannot go on"));
}

#[tokio::test]
async fn parked_worker_is_restarted_by_an_operator() {
    let supervisor = Supervisor::start().await.unwrap();
    let runs = Arc::default();
    supervisor.add(row("broken", "root"), counting(&runs, || anyhow::bail!("still")));
    until(&supervisor, "broken", WorkerState::Parked).await;
    assert!(supervisor.restart("broken"));
    until(&supervisor, "broken", WorkerState::Parked).await;
    assert!(runs.load(Ordering::SeqCst) > 3);
    assert!(!supervisor.restart("nobody"));
}

#[tokio::test]
async fn operator_restarts_of_a_worker_or_a_group_are_unbounded_and_never_park_it() {
    let supervisor = Supervisor::start().await.unwrap();
    let runs: [Arc<AtomicUsize>; 2] = Default::default();
    supervisor.group(row("group", "root"));
    for (name, runs) in ["one", "other"].into_iter().zip(&runs) {
        let runs = Arc::clone(runs);
        supervisor.add(
            row(name, "group"),
            Arc::new(move || {
                runs.fetch_add(1, Ordering::SeqCst);
                std::future::pending().boxed()
            }),
        );
    }
    let ran = async |which: usize, times: usize| {
        for _ in 0..2000 {
            if runs[which].load(Ordering::SeqCst) == times {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("{which} ran {} times", runs[which].load(Ordering::SeqCst));
    };
    ran(0, 1).await;
    // More often than it may fail.
    for restarts in 1..=2 * TEST_POLICY.intensity {
        until(&supervisor, "one", WorkerState::Running).await;
        assert!(supervisor.restart("one"));
        ran(0, 1 + restarts).await;
    }
    ran(1, 1).await;
    until(&supervisor, "one", WorkerState::Running).await;
    assert!(supervisor.restart("group"));
    ran(0, 2 + 2 * TEST_POLICY.intensity).await;
    ran(1, 2).await;
    let rows = supervisor.rows();
    assert!(rows.iter().all(|row| row.restartable && row.last_error.is_none()), "{rows:?}");
    supervisor.stop("group").await;
    assert!(!supervisor.restart("group"), "what was stopped in the end stays stopped");
    assert!(supervisor.rows().iter().all(|row| !row.restartable));
}

#[tokio::test]
async fn stopping_a_group_stops_its_children_and_drops_their_tasks() {
    struct RunGuard(Arc<AtomicUsize>);
    impl Drop for RunGuard {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let supervisor = Supervisor::start().await.unwrap();
    let held = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&held);
    supervisor.group(row("group", "root"));
    supervisor.add(
        row("child", "group"),
        Arc::new(move || {
            counter.fetch_add(1, Ordering::SeqCst);
            let held = RunGuard(Arc::clone(&counter));
            async move {
                let _held = held;
                std::future::pending().await
            }
            .boxed()
        }),
    );
    until(&supervisor, "child", WorkerState::Running).await;
    while held.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    supervisor.stop("group").await;
    until(&supervisor, "child", WorkerState::Stopped).await;
    assert_eq!(held.load(Ordering::SeqCst), 0);
}
