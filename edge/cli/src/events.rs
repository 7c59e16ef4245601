//! An allocation's transitions as they happen: server-sent events, taken up again after the last one where the stream is cut.

use crate::api::Api;
use crate::failure::{Ended, Failure, chain};
use serde_json::Value;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The stream says something every 15 s.
const SILENT_AFTER: Duration = Duration::from_secs(45);
/// For how long a stream that was cut is looked for.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_LAST: Duration = Duration::from_secs(5);
/// An event is no longer, and neither is a line.
const LONGEST: usize = 256 * 1024;

/// The transitions of one allocation, each once.
pub(crate) struct Transitions<'a> {
    api: &'a Api,
    path: String,
    last: Option<String>,
    ready: VecDeque<Value>,
    open: Option<Open>,
}

struct Open {
    answer: reqwest::Response,
    parser: Parser,
}

impl<'a> Transitions<'a> {
    pub(crate) fn of(api: &'a Api, allocation: Uuid) -> Self {
        let path = format!("/api/v1/allocations/{allocation}/events");
        Self { api, path, last: None, ready: VecDeque::new(), open: None }
    }

    /// Those after this generation of the allocation.
    #[must_use]
    pub(crate) fn after(mut self, generation: i64) -> Self {
        self.last = Some(generation.max(0).to_string());
        self
    }

    /// The next one. After `released` there is none: whoever asks then waits in vain.
    pub(crate) async fn next(&mut self) -> Result<Value, Failure> {
        let mut lost_at: Option<Instant> = None;
        let mut pause = PAUSE_FIRST;
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            let read = match &mut self.open {
                Some(open) => open.read(&mut self.last, &mut self.ready).await,
                None => self.begin().await,
            };
            let failure = match read {
                Ok(Read::Begun) => continue,
                Ok(Read::More) => {
                    lost_at = None;
                    continue;
                }
                Err(Lost::Again(failure)) => failure,
                Err(Lost::ForGood(failure)) => return Err(failure),
            };
            self.open = None;
            if lost_at.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                return Err(failure);
            }
            let asked = failure.answer.and_then(|answer| answer.retry_after);
            tokio::time::sleep(asked.unwrap_or(pause).min(PATIENCE)).await;
            pause = (pause * 2).min(PAUSE_LAST);
        }
    }

    async fn begin(&mut self) -> Result<Read, Lost> {
        let answer =
            self.api.stream(&self.path, self.last.as_deref()).await.map_err(|failure| match failure.ended {
                Ended::Network | Ended::Server | Ended::RateLimited => Lost::Again(failure),
                // The token was renewed just now, where it could be.
                Ended::LoggedOut if failure.answer.is_some() => Lost::Again(failure),
                _ => Lost::ForGood(failure),
            })?;
        self.open = Some(Open { answer, parser: Parser::default() });
        Ok(Read::Begun)
    }
}

enum Read {
    Begun,
    More,
}

enum Lost {
    Again(Failure),
    ForGood(Failure),
}

impl Open {
    async fn read(&mut self, last: &mut Option<String>, ready: &mut VecDeque<Value>) -> Result<Read, Lost> {
        let cut = |why: &str| Lost::Again(Failure::new(Ended::Network, format!("the stream of events is cut: {why}")));
        let chunk = tokio::time::timeout(SILENT_AFTER, self.answer.chunk()).await.map_err(|_| cut("silence"))?;
        let chunk = chunk.map_err(|error| cut(&chain(&error)))?.ok_or_else(|| cut("it ended"))?;
        let wrong = |why: &str| Lost::ForGood(Failure::new(Ended::Server, format!("the stream of events is {why}")));
        for event in self.parser.feed(&chunk).map_err(|TooLong| wrong("endless"))? {
            if event.name != "transition" {
                continue;
            }
            let said: Value = serde_json::from_str(&event.data).map_err(|_| wrong("no JSON"))?;
            *last = event.id.or_else(|| last.take());
            ready.push_back(said);
        }
        Ok(Read::More)
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

/// Bytes into events.
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
            if self.line.len() + self.data.len() > LONGEST {
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
            // A comment, or something that a later server says.
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
    fn events_are_the_same_however_they_are_cut_up() {
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
    fn a_line_or_an_event_without_end_is_refused() {
        let mut parser = Parser::default();
        assert_eq!(parser.feed(&vec![b'x'; LONGEST + 1]), Err(TooLong));
        let mut parser = Parser::default();
        let endless = "data: 0123456789\n".repeat(LONGEST / 8);
        assert_eq!(parser.feed(endless.as_bytes()), Err(TooLong));
    }
}
