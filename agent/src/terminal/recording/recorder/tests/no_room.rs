//! No room in the spool, or a disk that hangs.

use super::*;

#[tokio::test]
async fn strict_without_room_shows_nothing_and_resumes_without_loss() {
    let mut stage = stage(RecordMode::Strict, MIB, 8 * 1024);
    let long = "x".repeat(3000);
    assert_eq!(stage.record(&long).await, shown(&long));
    stage.recorder.output(long.as_bytes());
    assert_eq!(timeout(SOON, stage.recorder.next_event()).await.ok(), None, "there is no room");
    assert!(!stage.recorder.has_room() && !stage.recorder.is_flushed());
    assert_eq!(stage.send().len(), 2);
    assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(long.clone().into_bytes()));
    stage.recorder.finish().await;
    assert_eq!(stage.send(), [output(&long), FrameContent::End(RecordingEnd::Session)]);
}

#[tokio::test]
async fn best_effort_shows_all_output_and_records_the_gap() {
    let mut stage = stage(RecordMode::BestEffort, MIB, 8 * 1024);
    let long = "x".repeat(3000);
    for _ in 0..3 {
        assert_eq!(stage.record(&long).await, shown(&long));
    }
    stage.send();
    assert_eq!(stage.record("after").await, shown("after"));
    stage.recorder.finish().await;
    let sent = stage.send();
    assert_eq!(sent, [FrameContent::Gap { bytes: 6000 }, output("after"), FrameContent::End(RecordingEnd::Session)]);
}

#[tokio::test]
async fn single_bytes_during_a_disk_hang_become_valid_chunks() {
    let mut stage = stage(RecordMode::BestEffort, 64 * MIB, 8 * MIB);
    stage.recorder.output(b"begun ");
    stage.hang_disk();
    let bytes = stage.fill_with_single_bytes();
    (0..10_000).for_each(|n| stage.recorder.resize(80 + n % 2, 24));
    stage.recorder.finish().await;
    assert_eq!(stage.recorded_text(), format!("begun {}", "x".repeat(bytes)));
}

#[tokio::test]
async fn strict_retries_failed_output_in_order_as_valid_chunks() {
    let mut stage = stage(RecordMode::Strict, 64 * MIB, 80 * 1024);
    let first = stage.fill_with_single_bytes();
    assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(vec![b'x'; first]));
    let second = stage.fill_with_single_bytes();
    stage.hang_disk();
    let third = stage.fill_with_single_bytes();
    assert_eq!(timeout(SOON, stage.recorder.next_event()).await.ok(), None, "there is no room");
    assert!(!stage.recorder.has_room() && !stage.recorder.is_flushed() && stage.recorder.is_busy());
    let mut recorded = stage.recorded_text();
    assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(vec![b'x'; second]));
    recorded += &stage.recorded_text();
    stage.recorder.writer.as_mut().unwrap().close();
    recorded += &stage.recorded_text();
    assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(vec![b'x'; third]));
    stage.recorder.finish().await;
    recorded += &stage.recorded_text();
    assert_eq!(recorded, "x".repeat(first + second + third), "each once");
}

#[tokio::test]
async fn best_effort_recording_on_a_full_spool_starts_later_with_a_gap() {
    for room_comes in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let spools = Spools::new(folder.path(), 8 * 8 * 1024);
        let others = fill(&spools);
        let mut stage = with(folder, &spools, RecordMode::BestEffort, MIB);
        assert!(matches!(stage.recorder.begin(), Err(SpoolError::NoRoom)));
        assert_eq!(stage.recorder.mode(), RecordMode::BestEffort, "it is tried again");
        assert_eq!(stage.record("unseen").await, shown("unseen"));
        let mut expected = vec![FrameContent::Begin { columns: 80, rows: 24 }, FrameContent::Gap { bytes: 6 }];
        if room_comes {
            others.iter().for_each(|spool| spool.remove());
            assert_eq!(stage.record("seen").await, shown("seen"));
            expected.push(output("seen"));
        }
        stage.recorder.finish().await;
        expected.push(FrameContent::End(RecordingEnd::Session));
        assert_eq!(stage.send(), expected);
    }
}
