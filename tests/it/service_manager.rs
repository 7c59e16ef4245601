//! A replica's service manager: it is notified when the replica serves and when it begins to end (sd_notify(3)).

use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

/// The lines that a socket receives, in a thread of its own: a full socket would block the sender.
fn receive(socket: UnixDatagram) -> Arc<Mutex<Vec<String>>> {
    let lines = Arc::<Mutex<Vec<String>>>::default();
    let received = Arc::clone(&lines);
    std::thread::spawn(move || {
        let mut text = [0; 4096];
        while let Ok(length) = socket.recv(&mut text) {
            let message = String::from_utf8_lossy(&text[..length]).into_owned();
            received.lock().unwrap().extend(message.lines().map(str::to_owned));
        }
    });
    lines
}

/// Waits for the line, and returns all lines until then.
async fn expect(lines: &Mutex<Vec<String>>, line: &str) -> Vec<String> {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let seen = lines.lock().unwrap().clone();
        if seen.iter().any(|it| it == line) {
            return seen;
        }
        assert!(Instant::now() < until, "{line} was not sent: {seen:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn service_manager_is_notified_when_a_replica_serves_and_when_it_begins_to_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let lines = receive(UnixDatagram::bind(&path).unwrap());
    let cluster = TestCluster::builder().variable("NOTIFY_SOCKET", path.to_str().unwrap()).start().await;
    let serving = expect(&lines, "READY=1").await;
    assert!(!serving.iter().any(|line| line == "STOPPING=1"), "{serving:?}");
    cluster.shutdown().await;
    let ended = expect(&lines, "STOPPING=1").await;
    let count = |wanted: &str| ended.iter().filter(|line| line.as_str() == wanted).count();
    assert_eq!((count("READY=1"), count("STOPPING=1")), (1, 1), "{ended:?}");
}
