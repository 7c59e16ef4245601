//! `gpuctl recordings play`: plays a recording in the user's terminal, at its original speed.

use super::{ASCIICAST, WHAT, asciicast};
use crate::api::Api;
use crate::completion;
use crate::download;
use crate::duration;
use crate::failure::{ExitStatus, Failure};
use crate::output::print_raw;
use crate::printable::plain;
use crate::resource_ref::{RECORDING, Ref};
use crate::sanitize::Sanitizer;
use crate::terminal::io_threads;
use crate::terminal::raw_mode::{RawMode, discard_typed, size};
use serde::Deserialize;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, IsTerminal as _, Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

/// The longest line of a recording.
const MAX_LINE_BYTES: u64 = 4 * 1024 * 1024;
const CTRL_C: u8 = 3;

#[derive(Debug, clap::Args)]
pub(crate) struct PlayArgs {
    #[arg(add = completion::of(&RECORDING))]
    recording: Ref,
    /// The speed, as a multiple of the recorded one.
    #[arg(long, value_name = "TIMES", default_value = "1", value_parser = speed)]
    speed: f64,
    /// Wait no longer than this where nothing happens (`2s`).
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    idle_limit: Option<Duration>,
}

fn speed(text: &str) -> Result<f64, String> {
    let speed = text.parse().ok().filter(|speed| (0.1..=1000.0).contains(speed));
    speed.ok_or_else(|| "a number from 0.1 to 1000".to_owned())
}

/// The first line (asciicast v2).
#[derive(Debug, Deserialize)]
struct Header {
    width: u16,
    height: u16,
}

/// A key that controls the player.
enum PlayerKey {
    Pause,
    End,
}

pub(crate) async fn run(args: PlayArgs, api: &Api) -> Result<(), Failure> {
    let recording = &args.recording;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::usage("a recording is played in a terminal")
            .next(format!("Keep it in a file: gpuctl recordings download {recording}")));
    }
    let mut lines = BufReader::new(fetch(api, recording.id(&RECORDING, api).await?).await?);
    let header: Header =
        read_line(&mut lines)?.and_then(|line| serde_json::from_str(&line).ok()).ok_or_else(unreadable)?;
    let (columns, rows) = size(io::stdout());
    if columns < header.width || rows < header.height {
        let (width, height) = (header.width, header.height);
        api.out.notice(&format!("It was shown on {width} x {height}, and this terminal is {columns} x {rows}."));
    }
    let taken = |error: io::Error| Failure::new(ExitStatus::Failed, format!("the terminal cannot be used: {error}"));
    let raw = RawMode::begin(io::stdin()).map_err(taken)?;
    let player = Player::new(&args).map_err(taken)?;
    let played = player.play(&mut lines).await;
    // The terminal is restored before anything is printed, and input that was typed during playback is discarded, so that it does not run
    // as a command.
    raw.reset_modes();
    discard_typed(io::stdin());
    drop(raw);
    played.map(|()| print_raw("\r\n"))
}

/// Downloads the whole recording to an unlinked file, so that a pause does not hold the connection open.
async fn fetch(api: &Api, recording: Uuid) -> Result<File, Failure> {
    let failed = |error: io::Error| Failure::new(ExitStatus::Failed, format!("no room for the recording: {error}"));
    let mut answer = api.open(&asciicast(recording), ASCIICAST).await?;
    let path = std::env::temp_dir().join(format!("gpuctl-{}.cast", Uuid::new_v4()));
    let mut file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
    std::fs::remove_file(&path).map_err(failed)?;
    download::copy(&mut answer, WHAT, &mut file).await?;
    file.rewind().map_err(failed)?;
    Ok(file)
}

fn unreadable() -> Failure {
    Failure::unusable_answer("the recording is no asciicast v2")
}

fn read_line(lines: &mut impl BufRead) -> Result<Option<String>, Failure> {
    let mut line = String::new();
    let read = lines.take(MAX_LINE_BYTES).read_line(&mut line).map_err(|_| unreadable())?;
    Ok((read > 0).then_some(line))
}

struct Player {
    speed: f64,
    idle_limit: Duration,
    sanitizer: Sanitizer,
    keys: mpsc::Receiver<Vec<u8>>,
    ends: [Signal; 2],
    /// The position in the recording's own time.
    played: Duration,
    /// When the next event is due.
    due: Instant,
}

impl Player {
    fn new(args: &PlayArgs) -> io::Result<Self> {
        Ok(Self {
            speed: args.speed,
            idle_limit: args.idle_limit.unwrap_or(Duration::MAX),
            sanitizer: Sanitizer::default(),
            keys: io_threads::read_input(),
            ends: [signal(SignalKind::terminate())?, signal(SignalKind::hangup())?],
            played: Duration::ZERO,
            due: Instant::now(),
        })
    }

    async fn play(mut self, lines: &mut impl BufRead) -> Result<(), Failure> {
        while let Some(line) = read_line(lines)? {
            let (at, kind, data): (f64, String, String) = serde_json::from_str(&line).map_err(|_| unreadable())?;
            let at = Duration::try_from_secs_f64(at).map_err(|_| unreadable())?;
            let pause = at.saturating_sub(self.played).min(self.idle_limit);
            self.played = self.played.max(at);
            self.due += pause.div_f64(self.speed);
            if !self.wait().await {
                return Ok(());
            }
            let shown = match kind.as_str() {
                "o" => self.sanitizer.sanitize(&data),
                "m" => format!("\r\n[{}]\r\n", plain(&data)).into_bytes(),
                // Resize events are ignored: the terminal keeps its size.
                _ => continue,
            };
            let mut out = io::stdout().lock();
            let drawn = out.write_all(&shown).and_then(|()| out.flush());
            drawn.map_err(|error| Failure::new(ExitStatus::Failed, format!("the terminal is gone: {error}")))?;
        }
        Ok(())
    }

    /// Waits until the next event is due. `false`: the user ended the playback.
    async fn wait(&mut self) -> bool {
        loop {
            let due = self.due;
            tokio::select! {
                biased;
                key = self.key() => match key {
                    PlayerKey::End => return false,
                    PlayerKey::Pause => {
                        let paused = Instant::now();
                        if matches!(self.key().await, PlayerKey::End) {
                            return false;
                        }
                        self.due += paused.elapsed();
                    }
                },
                () = sleep_until(due) => return true,
            }
        }
    }

    async fn key(&mut self) -> PlayerKey {
        let [terminate, hangup] = &mut self.ends;
        loop {
            let typed = tokio::select! {
                typed = self.keys.recv() => typed,
                _ = terminate.recv() => None,
                _ = hangup.recv() => None,
            };
            let Some(typed) = typed else { return PlayerKey::End };
            for byte in typed {
                match byte {
                    b' ' => return PlayerKey::Pause,
                    b'q' | CTRL_C => return PlayerKey::End,
                    _ => {}
                }
            }
        }
    }
}
