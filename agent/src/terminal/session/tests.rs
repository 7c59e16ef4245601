use super::super::recording::Spools;
use super::super::{ShellCommand, start_child};
use super::*;
use uuid::Uuid;
use wire::recording::RecordTerms;

/// Longer than remaining output is awaited.
const IDLE: Duration = Duration::from_millis(600);
const TIMEOUT: Duration = Duration::from_secs(60);

/// A session, and the messages that its stream would carry.
struct TestSession {
    stream: mpsc::Sender<StreamMessage>,
    events: mpsc::Receiver<TerminalEvent>,
    /// Output that arrived.
    shown: Vec<u8>,
    over: CancellationToken,
    _folder: tempfile::TempDir,
}

impl TestSession {
    /// Runs this on a terminal that does not change what is written to it.
    fn of(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shell = ShellCommand {
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), format!("stty raw -echo; {script}")],
            launcher: Vec::new(),
            user: None,
            folder: folder.path().to_owned(),
            environment: vec![("PATH".to_owned(), std::env::var("PATH").unwrap())],
        };
        let spool = Spools::new(folder.path(), 1 << 20).begin(Uuid::from_u128(1));
        let recorder = Recorder::new(spool, RecordTerms::default(), (80, 24));
        let (stream, inbox) = mpsc::channel(16);
        let (outbox, events) = mpsc::channel(2);
        let over = CancellationToken::new();
        let ends = SessionCancellation {
            over: over.clone(),
            stop: CancellationToken::new(),
            released: CancellationToken::new(),
        };
        let parts = start_child(&shell, recorder).unwrap();
        tokio::spawn(Session::new(parts, inbox, outbox, Duration::from_secs(3600), ends).run());
        Self { stream, events, shown: Vec::new(), over, _folder: folder }
    }

    async fn send(&self, command: TerminalCommand) {
        self.stream.send(StreamMessage::Received(command)).await.unwrap();
    }

    async fn attach(&self, attachment: u32, from: Option<u64>) {
        self.send(TerminalCommand::Attach { attachment, from }).await;
    }

    async fn next_event(&mut self) -> TerminalEvent {
        timeout(TIMEOUT, self.events.recv()).await.expect("an event in time").expect("the session runs")
    }

    /// Receives output without gaps, until another message arrives.
    async fn drain_output(&mut self) -> TerminalEvent {
        loop {
            match self.next_event().await {
                TerminalEvent::Output { position, bytes, .. } if !bytes.is_empty() => {
                    assert_eq!(position, self.shown.len() as u64);
                    self.shown.extend(bytes);
                }
                other => return other,
            }
        }
    }

    /// Receives output as long as any arrives. Returns whether it is complete.
    async fn drain_until_idle(&mut self) -> bool {
        let mut is_all = false;
        while let Ok(Some(TerminalEvent::Output { bytes, .. })) = timeout(IDLE, self.events.recv()).await {
            is_all = bytes.is_empty();
            self.shown.extend(bytes);
        }
        is_all
    }

    /// Receives output until a whole window of it, from this position on, has arrived and no more does.
    async fn drain_window(&mut self, from: u64) {
        while (self.shown.len() as u64) < from + OUTPUT_WINDOW {
            let TerminalEvent::Output { bytes, .. } = self.next_event().await else {
                panic!("another event than output")
            };
            self.shown.extend(bytes);
        }
        self.drain_until_idle().await;
    }

    async fn is_attached(&mut self, attachment: u32, position: u64) {
        assert_eq!(self.next_event().await, TerminalEvent::Attached { attachment, position, lost: 0 });
        assert_eq!(self.next_event().await, TerminalEvent::Recording { mode: RecordMode::Off });
    }
}

/// Asks at this position whether all output has arrived.
fn all_output_arrived(attachment: u32, position: u64) -> TerminalEvent {
    TerminalEvent::Output { attachment, position, bytes: Vec::new() }
}

const fn exited(code: i32) -> TerminalEvent {
    TerminalEvent::Exited { exit: ProgramExit::Code(code) }
}

#[tokio::test(flavor = "multi_thread")]
async fn output_left_in_the_terminal_is_read_after_a_long_stall() {
    // Each ends at another position between a full window and a full terminal.
    let each = (132_000_usize..200_000).step_by(4000).map(|size| async move {
        let mut session = TestSession::of(&format!("head -c {size} /dev/zero | tr '\\0' x"));
        session.attach(1, None).await;
        session.is_attached(1, 0).await;
        if !session.drain_until_idle().await {
            session.send(TerminalCommand::Ack { attachment: 1, position: session.shown.len() as u64 }).await;
            assert_eq!(
                session.drain_output().await,
                all_output_arrived(1, size as u64),
                "{} of {size} came",
                session.shown.len()
            );
        }
        assert_eq!(session.shown.len(), size);
    });
    futures::future::join_all(each).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn background_writer_does_not_delay_the_end() {
    let mut session = TestSession::of("trap '' HUP; yes & sleep 0.1; exit 4");
    session.attach(1, None).await;
    let end = timeout(TIMEOUT, async {
        loop {
            match session.next_event().await {
                TerminalEvent::Output { bytes, position, .. } if bytes.is_empty() => break position,
                TerminalEvent::Output { bytes, position, .. } => {
                    let position = position + bytes.len() as u64;
                    session.send(TerminalCommand::Ack { attachment: 1, position }).await;
                }
                _ => {}
            }
        }
    });
    let position = end.await.expect("it comes to an end");
    session.send(TerminalCommand::Received { attachment: 1, position }).await;
    assert_eq!(session.next_event().await, exited(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn session_outlives_its_program_until_the_user_confirms_all_output() {
    let mut session = TestSession::of("echo made; exit 3");
    session.attach(1, None).await;
    session.is_attached(1, 0).await;
    assert_eq!(session.drain_output().await, all_output_arrived(1, 5));
    // What was written to a socket is acknowledged, and may not have arrived.
    session.send(TerminalCommand::Ack { attachment: 1, position: 5 }).await;
    assert!(timeout(3 * IDLE, session.events.recv()).await.is_err(), "no user has confirmed the output");
    // The user attaches again, over this stream and over the next.
    session.attach(2, Some(0)).await;
    session.shown.clear();
    session.is_attached(2, 0).await;
    assert_eq!(session.drain_output().await, all_output_arrived(2, 5));
    session.stream.send(StreamMessage::Cut).await.unwrap();
    session.attach(3, Some(2)).await;
    session.shown.truncate(2);
    session.is_attached(3, 2).await;
    assert_eq!(session.drain_output().await, all_output_arrived(3, 5));
    assert_eq!(session.shown, b"made\n");
    session.send(TerminalCommand::Received { attachment: 1, position: 5 }).await;
    session.send(TerminalCommand::Received { attachment: 3, position: 4 }).await;
    assert!(timeout(IDLE, session.events.recv()).await.is_err(), "only a former attachment has confirmed all output");
    session.send(TerminalCommand::Received { attachment: 3, position: 5 }).await;
    assert_eq!(session.next_event().await, exited(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn output_waits_for_a_user_whose_stream_was_cut_and_not_for_one_who_detached() {
    let mut session = TestSession::of("head -c 3000000 /dev/zero; sleep 60");
    session.attach(1, None).await;
    session.is_attached(1, 0).await;
    session.drain_window(0).await;
    let shown = session.shown.len() as u64;
    assert!((OUTPUT_WINDOW..OUTPUT_WINDOW + 2 * 16 * 1024).contains(&shown), "{shown}");
    session.stream.send(StreamMessage::Cut).await.unwrap();
    // Long enough to write more than is retained.
    sleep(2 * IDLE).await;
    session.attach(2, Some(shown)).await;
    session.is_attached(2, shown).await;
    session.drain_window(shown).await;
    let shown = session.shown.len() as u64;
    // A busy machine takes longer to write more than is retained.
    for attachment in 3..40 {
        session.send(TerminalCommand::Detach { attachment: attachment - 1 }).await;
        sleep(2 * IDLE).await;
        session.attach(attachment, Some(shown)).await;
        // Output for the attachment before may come first.
        let lost = loop {
            if let TerminalEvent::Attached { attachment: answered, lost, .. } = session.next_event().await
                && answered == attachment
            {
                break lost;
            }
        };
        if lost > 0 {
            return;
        }
    }
    panic!("the program has not gone on without its user");
}

#[tokio::test(flavor = "multi_thread")]
async fn user_who_attaches_during_the_end_receives_missing_output_then_the_exit() {
    let mut session = TestSession::of("echo made; exit 3");
    session.attach(1, None).await;
    session.is_attached(1, 0).await;
    assert_eq!(session.drain_output().await, all_output_arrived(1, 5));
    session.send(TerminalCommand::Received { attachment: 1, position: 5 }).await;
    assert_eq!(session.next_event().await, exited(3));
    session.stream.send(StreamMessage::Cut).await.unwrap();
    while session.events.try_recv().is_ok() {}
    session.attach(1, Some(0)).await;
    session.shown.clear();
    let mut next = session.next_event().await;
    while next == exited(3) {
        next = session.next_event().await;
    }
    assert_eq!(next, TerminalEvent::Attached { attachment: 1, position: 0, lost: 0 });
    assert_eq!(session.next_event().await, TerminalEvent::Recording { mode: RecordMode::Off });
    assert_eq!(session.drain_output().await, all_output_arrived(1, 5));
    assert_eq!((session.next_event().await, session.shown.as_slice()), (exited(3), &b"made\n"[..]));
    session.send(TerminalCommand::Close).await;
    timeout(TIMEOUT, session.over.cancelled()).await.expect("it is over");
}

#[tokio::test(flavor = "multi_thread")]
async fn input_to_an_exited_program_is_still_acknowledged() {
    // A background process holds the terminal open, and reads nothing.
    let mut session = TestSession::of("trap '' HUP; sleep 5 & exit 0");
    session.attach(1, None).await;
    session.is_attached(1, 0).await;
    assert_eq!(session.drain_output().await, all_output_arrived(1, 0));
    for n in 1..=2 {
        for _ in 0..4 {
            session.send(TerminalCommand::Input { attachment: 1, bytes: vec![b'x'; INPUT_WINDOW as usize / 4] }).await;
        }
        let mut taken = 0;
        while taken < n * INPUT_WINDOW {
            let TerminalEvent::Taken { bytes, .. } = session.next_event().await else {
                panic!("another event than output")
            };
            taken = bytes;
        }
    }
}
