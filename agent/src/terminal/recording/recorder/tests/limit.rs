//! A recording that is full, or that the control plane refuses.

use super::*;

#[tokio::test]
async fn full_or_refused_recording_ends_and_ends_a_strict_session() {
    for (mode, refused) in [
        (RecordMode::BestEffort, false),
        (RecordMode::Strict, false),
        (RecordMode::BestEffort, true),
        (RecordMode::Strict, true),
    ] {
        let mut stage = stage(mode, 8 * 1024, MIB);
        if refused {
            stage.spool.refuse();
        }
        let long = "x".repeat(5000);
        let first = stage.record(&long).await;
        if mode == RecordMode::Strict {
            assert_eq!(first, Some(RecorderEvent::MustEnd), "and {long:.3} is not shown");
        } else {
            assert_eq!(first, shown(&long));
            assert_eq!(stage.recorder.next_event().await, RecorderEvent::Ended);
            assert_eq!(stage.record("more").await, shown("more"));
        }
        assert_eq!(stage.recorder.mode(), RecordMode::Off);
        timeout(TIMEOUT, stage.recorder.finish()).await.unwrap();
        let lost = if mode == RecordMode::Strict { None } else { Some(FrameContent::Gap { bytes: 5000 }) };
        let end =
            [Some(FrameContent::Begin { columns: 80, rows: 24 }), lost, Some(FrameContent::End(RecordingEnd::Full))];
        let expected: Vec<FrameContent> = if refused { Vec::new() } else { end.into_iter().flatten().collect() };
        assert_eq!(stage.send(), expected, "{mode:?}");
    }
}

/// A best-effort recording that has reached its limit, and has reported it.
async fn full() -> TestRecorder {
    let mut stage = stage(RecordMode::BestEffort, 8 * 1024, MIB);
    let long = "x".repeat(5000);
    assert_eq!(stage.record(&long).await, shown(&long));
    assert_eq!(stage.recorder.next_event().await, RecorderEvent::Ended);
    assert_eq!(stage.record("more").await, shown("more"));
    stage
}

#[tokio::test]
async fn session_switched_to_strict_without_a_recording_ends() {
    let mut stage = full().await;
    assert!(!stage.recorder.change(RecordTerms { mode: RecordMode::Strict, most_bytes: 8 * 1024 }));
    assert!(stage.recorder.is_busy());
    assert_eq!(stage.record("unrecorded").await, Some(RecorderEvent::MustEnd), "and that is not shown");
    let mut unwanted = refused().await;
    unwanted.recorder.change(RecordTerms { mode: RecordMode::Strict, most_bytes: MIB });
    assert_eq!(unwanted.recorder.next_event().await, RecorderEvent::MustEnd, "an unwanted recording does not continue");
}

async fn refused() -> TestRecorder {
    let mut stage = stage(RecordMode::BestEffort, 8 * 1024, MIB);
    stage.spool.refuse();
    assert_eq!(stage.record("unwanted").await, shown("unwanted"));
    assert_eq!(stage.recorder.next_event().await, RecorderEvent::Ended);
    stage
}

#[tokio::test]
async fn full_recording_resumes_after_the_limit_is_raised_with_a_gap() {
    for mode in [RecordMode::BestEffort, RecordMode::Strict] {
        let mut stage = full().await;
        assert_eq!(stage.recorder.mode(), RecordMode::Off);
        assert!(stage.recorder.change(RecordTerms { mode, most_bytes: MIB }));
        assert_eq!(stage.recorder.mode(), mode);
        assert_eq!(stage.record("after").await, shown("after"));
        stage.recorder.finish().await;
        let begin = FrameContent::Begin { columns: 80, rows: 24 };
        assert_eq!(
            stage.send(),
            [begin, FrameContent::Gap { bytes: 5004 }, output("after"), FrameContent::End(RecordingEnd::Session)]
        );
    }
}

#[tokio::test]
async fn limit_raised_during_a_write_does_not_end_the_recording() {
    for mode in [RecordMode::BestEffort, RecordMode::Strict] {
        let mut stage = stage(mode, 8 * 1024, MIB);
        let long = "x".repeat(5000);
        stage.recorder.output(long.as_bytes());
        stage.hang_disk();
        assert!(!stage.recorder.change(RecordTerms { mode, most_bytes: MIB }));
        assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(long.into_bytes()));
        assert_eq!(stage.record("after").await, shown("after"));
        stage.recorder.finish().await;
        let is_strict = mode == RecordMode::Strict;
        assert_eq!(stage.recorded_text(), if is_strict { "x".repeat(5000) + "after" } else { "after".to_owned() });
    }
}
