use super::super::recording::Spools;
use super::super::{Shell, spawn};
use super::*;
use uuid::Uuid;
use wire::recording::Terms;

/// Longer than the rest of a program's output is waited for.
const LONG: Duration = Duration::from_millis(600);
const PATIENCE: Duration = Duration::from_secs(20);

/// A session, and what its stream would carry.
struct Stage {
    stream: mpsc::Sender<Heard>,
    said: mpsc::Receiver<Up>,
    /// Output that came.
    shown: Vec<u8>,
    over: CancellationToken,
    _folder: tempfile::TempDir,
}

impl Stage {
    /// Runs this on a terminal that changes nothing of what is written to it.
    fn of(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shell = Shell {
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), format!("stty raw -echo; {script}")],
            launcher: Vec::new(),
            user: None,
            folder: folder.path().to_owned(),
            environment: vec![("PATH".to_owned(), std::env::var("PATH").unwrap())],
        };
        let (pty, child) = spawn(&shell).unwrap();
        let spool = Spools::new(folder.path(), 1 << 20).begin(Uuid::from_u128(1));
        let recorder = Recorder::new(spool, Terms::default(), (80, 24));
        let (stream, heard) = mpsc::channel(16);
        let (say, said) = mpsc::channel(2);
        let over = CancellationToken::new();
        let ends = Ends { over: over.clone(), stop: CancellationToken::new(), given_back: CancellationToken::new() };
        tokio::spawn(Session::new(pty, child, recorder, heard, say, Duration::from_secs(3600), ends).run());
        Self { stream, said, shown: Vec::new(), over, _folder: folder }
    }

    async fn tell(&self, down: Down) {
        self.stream.send(Heard::Said(down)).await.unwrap();
    }

    async fn attach(&self, attachment: u32, from: Option<u64>) {
        self.tell(Down::Attach { attachment, from }).await;
    }

    async fn hears(&mut self) -> Up {
        timeout(PATIENCE, self.said.recv()).await.expect("it says something").expect("it lives")
    }

    /// Takes in output, which comes in one piece, until something else is said.
    async fn hears_out(&mut self) -> Up {
        loop {
            match self.hears().await {
                Up::Output { position, bytes, .. } if !bytes.is_empty() => {
                    assert_eq!(position, self.shown.len() as u64);
                    self.shown.extend(bytes);
                }
                other => return other,
            }
        }
    }

    /// Takes in output for as long as any comes. Whether it is all.
    async fn hears_until_it_rests(&mut self) -> bool {
        let mut is_all = false;
        while let Ok(Some(Up::Output { bytes, .. })) = timeout(LONG, self.said.recv()).await {
            is_all = bytes.is_empty();
            self.shown.extend(bytes);
        }
        is_all
    }

    async fn is_attached(&mut self, attachment: u32, position: u64) {
        assert_eq!(self.hears().await, Up::Attached { attachment, position, lost: 0 });
        assert_eq!(self.hears().await, Up::Recording { mode: Mode::Off });
    }
}

/// Whether all has come, asked at this position.
fn has_all_come(attachment: u32, position: u64) -> Up {
    Up::Output { attachment, position, bytes: Vec::new() }
}

const fn exited(code: i32) -> Up {
    Up::Exited { exit: Exit::Code(code) }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_program_leaves_in_the_terminal_is_read_though_its_reader_has_long_stood_still() {
    // Each ends at another place between a full window and a full terminal.
    let each = (132_000_usize..200_000).step_by(4000).map(|size| async move {
        let mut stage = Stage::of(&format!("head -c {size} /dev/zero | tr '\\0' x"));
        stage.attach(1, None).await;
        stage.is_attached(1, 0).await;
        if !stage.hears_until_it_rests().await {
            stage.tell(Down::Ack { attachment: 1, position: stage.shown.len() as u64 }).await;
            assert_eq!(stage.hears_out().await, has_all_come(1, size as u64), "{} of {size} came", stage.shown.len());
        }
        assert_eq!(stage.shown.len(), size);
    });
    futures::future::join_all(each).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_who_goes_on_writing_in_the_background_holds_no_end_up() {
    let mut stage = Stage::of("trap '' HUP; yes & sleep 0.1; exit 4");
    stage.attach(1, None).await;
    let end = timeout(PATIENCE, async {
        loop {
            match stage.hears().await {
                Up::Output { bytes, position, .. } if bytes.is_empty() => break position,
                Up::Output { bytes, position, .. } => {
                    let position = position + bytes.len() as u64;
                    stage.tell(Down::Ack { attachment: 1, position }).await;
                }
                _ => {}
            }
        }
    });
    let position = end.await.expect("it comes to an end");
    stage.tell(Down::Received { attachment: 1, position }).await;
    assert_eq!(stage.hears().await, exited(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_outlives_its_program_until_all_has_come_to_its_user() {
    let mut stage = Stage::of("echo made; exit 3");
    stage.attach(1, None).await;
    stage.is_attached(1, 0).await;
    assert_eq!(stage.hears_out().await, has_all_come(1, 5));
    // What was written to a socket is acknowledged, and may have come nowhere.
    stage.tell(Down::Ack { attachment: 1, position: 5 }).await;
    assert!(timeout(3 * LONG, stage.said.recv()).await.is_err(), "nobody has said that it came");
    // The user comes back, over this stream and over the next.
    stage.attach(2, Some(0)).await;
    stage.shown.clear();
    stage.is_attached(2, 0).await;
    assert_eq!(stage.hears_out().await, has_all_come(2, 5));
    stage.stream.send(Heard::Cut).await.unwrap();
    stage.attach(3, Some(2)).await;
    stage.shown.truncate(2);
    stage.is_attached(3, 2).await;
    assert_eq!(stage.hears_out().await, has_all_come(3, 5));
    assert_eq!(stage.shown, b"made\n");
    stage.tell(Down::Received { attachment: 1, position: 5 }).await;
    stage.tell(Down::Received { attachment: 3, position: 4 }).await;
    assert!(timeout(LONG, stage.said.recv()).await.is_err(), "it came to nobody who is there");
    stage.tell(Down::Received { attachment: 3, position: 5 }).await;
    assert_eq!(stage.hears().await, exited(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_while_the_end_is_being_said_hears_what_they_lack_and_then_the_end() {
    let mut stage = Stage::of("echo made; exit 3");
    stage.attach(1, None).await;
    stage.is_attached(1, 0).await;
    assert_eq!(stage.hears_out().await, has_all_come(1, 5));
    stage.tell(Down::Received { attachment: 1, position: 5 }).await;
    assert_eq!(stage.hears().await, exited(3));
    stage.stream.send(Heard::Cut).await.unwrap();
    while stage.said.try_recv().is_ok() {}
    stage.attach(1, Some(0)).await;
    stage.shown.clear();
    let mut next = stage.hears().await;
    while next == exited(3) {
        next = stage.hears().await;
    }
    assert_eq!(next, Up::Attached { attachment: 1, position: 0, lost: 0 });
    assert_eq!(stage.hears().await, Up::Recording { mode: Mode::Off });
    assert_eq!(stage.hears_out().await, has_all_come(1, 5));
    assert_eq!((stage.hears().await, stage.shown.as_slice()), (exited(3), &b"made\n"[..]));
    stage.tell(Down::Close).await;
    timeout(PATIENCE, stage.over.cancelled()).await.expect("it is over");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_typed_to_a_program_that_ended_is_taken_from_the_user_all_the_same() {
    // Something in the background holds the terminal open, and reads nothing.
    let mut stage = Stage::of("trap '' HUP; sleep 5 & exit 0");
    stage.attach(1, None).await;
    stage.is_attached(1, 0).await;
    assert_eq!(stage.hears_out().await, has_all_come(1, 0));
    for n in 1..=2 {
        for _ in 0..4 {
            stage.tell(Down::Input { attachment: 1, bytes: vec![b'x'; INPUT_WINDOW as usize / 4] }).await;
        }
        let mut taken = 0;
        while taken < n * INPUT_WINDOW {
            let Up::Taken { bytes, .. } = stage.hears().await else { panic!("it says something else") };
            taken = bytes;
        }
    }
}
