//! The event stream of an allocation (server-sent events), resumed after the last event where the connection breaks.

use crate::api::Api;
use crate::failure::{ExitStatus, Failure, chain};
use serde_json::Value;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The server sends a comment every 15 s.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(45);
/// How long a broken stream is retried.
const RETRY_FOR: Duration = Duration::from_secs(60);
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(5);
/// The longest event, and the longest line.
const MAX_EVENT_BYTES: usize = 256 * 1024;

/// The transitions of one allocation, each exactly once.
pub(crate) struct Transitions<'a> {
    api: &'a Api,
    path: String,
    last: Option<String>,
    ready: VecDeque<Value>,
    open: Option<OpenStream>,
}

struct OpenStream {
    answer: reqwest::Response,
    parser: Parser,
}

impl<'a> Transitions<'a> {
    pub(crate) fn of(api: &'a Api, allocation: Uuid) -> Self {
        let path = format!("/api/v1/allocations/{allocation}/events");
        Self { api, path, last: None, ready: VecDeque::new(), open: None }
    }

    /// Only those after this generation of the allocation.
    #[must_use]
    pub(crate) fn after(mut self, generation: i64) -> Self {
        self.last = Some(generation.max(0).to_string());
        self
    }

    /// The next transition. After `released` there is none, and this waits forever.
    pub(crate) async fn next(&mut self) -> Result<Value, Failure> {
        let mut lost_at: Option<Instant> = None;
        let mut pause = FIRST_RETRY_PAUSE;
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            let read = match &mut self.open {
                Some(open) => open.read(&mut self.last, &mut self.ready).await,
                None => self.begin().await,
            };
            let failure = match read {
                Ok(ReadOutcome::Begun) => continue,
                Ok(ReadOutcome::More) => {
                    lost_at = None;
                    continue;
                }
                Err(StreamError::Retryable(failure)) => failure,
                Err(StreamError::Final(failure)) => return Err(failure),
            };
            self.open = None;
            if lost_at.get_or_insert_with(Instant::now).elapsed() > RETRY_FOR {
                return Err(failure);
            }
            let asked = failure.answer.and_then(|answer| answer.retry_after);
            tokio::time::sleep(asked.unwrap_or(pause).min(RETRY_FOR)).await;
            pause = (pause * 2).min(LONGEST_RETRY_PAUSE);
        }
    }

    async fn begin(&mut self) -> Result<ReadOutcome, StreamError> {
        let answer =
            self.api.stream(&self.path, self.last.as_deref()).await.map_err(|failure| match failure.exit_status {
                ExitStatus::Network | ExitStatus::Server | ExitStatus::RateLimited => StreamError::Retryable(failure),
                // The token was renewed just now, where that was possible.
                ExitStatus::LoggedOut if failure.answer.is_some() => StreamError::Retryable(failure),
                _ => StreamError::Final(failure),
            })?;
        self.open = Some(OpenStream { answer, parser: Parser::default() });
        Ok(ReadOutcome::Begun)
    }
}

enum ReadOutcome {
    Begun,
    More,
}

enum StreamError {
    Retryable(Failure),
    Final(Failure),
}

impl OpenStream {
    async fn read(
        &mut self,
        last: &mut Option<String>,
        ready: &mut VecDeque<Value>,
    ) -> Result<ReadOutcome, StreamError> {
        let cut = |why: &str| {
            StreamError::Retryable(Failure::new(ExitStatus::Network, format!("the stream of events is cut: {why}")))
        };
        let chunk = tokio::time::timeout(SILENCE_TIMEOUT, self.answer.chunk()).await.map_err(|_| cut("silence"))?;
        let chunk = chunk.map_err(|error| cut(&chain(&error)))?.ok_or_else(|| cut("it ended"))?;
        let wrong = |why: &str| StreamError::Final(Failure::unusable_answer(format!("the stream of events is {why}")));
        for event in self.parser.feed(&chunk).map_err(|TooLong| wrong("endless"))? {
            if event.name != "transition" {
                continue;
            }
            let data_json: Value = serde_json::from_str(&event.data).map_err(|_| wrong("no JSON"))?;
            *last = event.id.or_else(|| last.take());
            ready.push_back(data_json);
        }
        Ok(ReadOutcome::More)
    }
}

/// One server-sent event (WHATWG HTML, section 9.2).
#[derive(Debug, PartialEq)]
struct Event {
    id: Option<String>,
    name: String,
    data: String,
}

#[derive(Debug, PartialEq)]
struct TooLong;

/// An incremental parser of the event stream.
#[derive(Default)]
struct Parser {
    line: Vec<u8>,
    id: Option<String>,
    name: String,
    data: String,
}

impl Parser {
    fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Event>, TooLong> {
        let mut events = Vec::new();
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
            } else {
                let line = std::mem::take(&mut self.line);
                let line = String::from_utf8_lossy(&line).into_owned();
                events.extend(self.take(line.strip_suffix('\r').unwrap_or(&line)));
            }
            if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                return Err(TooLong);
            }
        }
        Ok(events)
    }

    fn take(&mut self, line: &str) -> Option<Event> {
        if line.is_empty() {
            let (name, data) = (std::mem::take(&mut self.name), std::mem::take(&mut self.data));
            return (!data.is_empty()).then(|| Event { id: self.id.clone(), name, data });
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            "event" => value.clone_into(&mut self.name),
            "data" if self.data.is_empty() => value.clone_into(&mut self.data),
            "data" => {
                self.data.push('\n');
                self.data.push_str(value);
            }
            // A comment, or a field of a later release.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str, at_once: usize) -> Vec<Event> {
        let mut parser = Parser::default();
        text.as_bytes().chunks(at_once).flat_map(|chunk| parser.feed(chunk).unwrap_or_default()).collect()
    }

    #[test]
    fn events_are_parsed_regardless_of_chunk_boundaries() {
        let text = ":waiting\n\nid: 3\nevent: transition\ndata: {\"a\":\ndata: 1}\n\nid:4\r\nevent:other\r\ndata:x\r\n\r\ndata: half";
        let all = parsed(text, text.len());
        assert_eq!(all.len(), 2, "{all:?}");
        assert_eq!((all[0].id.as_deref(), all[0].data.as_str()), (Some("3"), "{\"a\":\n1}"));
        assert_eq!((all[1].id.as_deref(), all[1].name.as_str()), (Some("4"), "other"));
        for at_once in 1..9 {
            assert_eq!(parsed(text, at_once), all, "{at_once} bytes at once");
        }
    }

    #[test]
    fn oversized_line_or_event_is_refused() {
        let mut parser = Parser::default();
        assert_eq!(parser.feed(&vec![b'x'; MAX_EVENT_BYTES + 1]), Err(TooLong));
        let mut parser = Parser::default();
        let endless = "data: 0123456789\n".repeat(MAX_EVENT_BYTES / 8);
        assert_eq!(parser.feed(endless.as_bytes()), Err(TooLong));
    }
}
