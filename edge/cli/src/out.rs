//! Standard output: tables for people, JSON for scripts. Whatever else there is to say goes to standard error.

use crate::failure::{Ended, Failure};
use crate::money::with_amounts;
use crate::text::cell;
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use std::io::{self, IsTerminal as _, Write as _};

/// How results are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    #[default]
    Table,
    // The service's own JSON, one value; `--follow` prints one a line.
    Json,
}

/// A column of a list, or a line of what is shown alone: its title, and where in the JSON its value lies (RFC 6901).
pub(crate) type Column = (&'static str, &'static str);

/// Where results and words go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out {
    pub(crate) format: Format,
    pub(crate) quiet: bool,
}

impl Out {
    pub(crate) const fn is_json(self) -> bool {
        matches!(self.format, Format::Json)
    }

    /// One thing.
    pub(crate) fn show(self, it: &Value, lines: &[Column]) -> Result<(), Failure> {
        if self.is_json() { self.json(it) } else { self.line(&described(it, lines)) }
    }

    /// A page of things: `{"items": […], "next_page": …}`.
    pub(crate) fn list(self, page: &Value, columns: &[Column]) -> Result<(), Failure> {
        if self.is_json() {
            return self.json(page);
        }
        let items = page["items"].as_array().map_or(&[][..], Vec::as_slice);
        if items.is_empty() {
            self.say("There are none.");
            return Ok(());
        }
        self.line(&tabled(items, columns))?;
        if !page["next_page"].is_null() {
            self.say("There are more; --limit shows them.");
        }
        Ok(())
    }

    /// A table under what was shown, where there is one.
    pub(crate) fn rows_below(self, rows: &Value, columns: &[Column]) -> Result<(), Failure> {
        if rows.as_array().is_some_and(|rows| !rows.is_empty()) {
            self.line("")?;
            self.list(&json!({ "items": rows, "next_page": null }), columns)?;
        }
        Ok(())
    }

    /// Something was done: for people a sentence, for scripts the service's answer.
    pub(crate) fn done(self, answer: &Value, sentence: &str) -> Result<(), Failure> {
        if self.is_json() { self.json(answer) } else { self.line(sentence) }
    }

    pub(crate) fn json(self, value: &Value) -> Result<(), Failure> {
        let text = if io::stdout().is_terminal() { format!("{value:#}") } else { value.to_string() };
        self.line(&text)
    }

    /// A line of the result itself.
    pub(crate) fn line(self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|error| match error.kind() {
            // Whoever reads has enough, as `head` has.
            io::ErrorKind::BrokenPipe => std::process::exit(0),
            _ => Failure::new(Ended::Failed, format!("the result cannot be written: {error}")),
        })
    }

    /// A word beside the result, unless it is unwanted.
    pub(crate) fn say(self, text: &str) {
        if !self.quiet {
            say_always(text);
        }
    }
}

/// A word that nobody may miss. That standard error is closed is nothing to fail on.
pub(crate) fn say_always(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// A word with its own line breaks, in a terminal that makes none.
pub(crate) fn say_raw(text: &str) {
    let mut out = io::stderr().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Rows under titles, with amounts in their currency.
pub(crate) fn tabled(items: &[Value], columns: &[Column]) -> String {
    let mut table = plain_table();
    table.set_header(columns.iter().map(|(title, _)| *title));
    for item in items {
        let item = with_amounts(item);
        table.add_row(columns.iter().map(|(_, path)| at(&item, path)));
    }
    printed(table)
}

/// A title and a value a line, with amounts in their currency; what there is nothing of is left out.
pub(crate) fn described(it: &Value, lines: &[Column]) -> String {
    let it = with_amounts(it);
    let mut table = plain_table();
    let is_there = |value: &Value| !value.is_null() && value.as_object().is_none_or(|fields| !fields.is_empty());
    for (title, path) in lines.iter().filter(|(_, path)| it.pointer(path).is_some_and(is_there)) {
        table.add_row([(*title).to_owned(), at(&it, path)]);
    }
    printed(table)
}

fn printed(mut table: Table) -> String {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

fn plain_table() -> Table {
    let mut table = Table::new();
    // No frames, and nothing is wrapped: what is shown can be selected, and cut by the tools of a shell.
    table.load_style(presets::NOTHING);
    table
}

fn at(it: &Value, path: &str) -> String {
    it.pointer(path).map_or_else(|| "-".to_owned(), cell)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_list_is_a_table_that_a_shell_can_cut() {
        let items = [
            json!({ "id": "0198", "state": "active", "gpu": { "count": 8 } }),
            json!({ "id": "0199", "state": "release_failed" }),
        ];
        insta::assert_snapshot!(tabled(&items, &[("ID", "/id"), ("GPUS", "/gpu/count"), ("STATE", "/state")]), @r"
         ID    GPUS  STATE
         0198  8     active
         0199  -     release_failed
        ");
        insta::assert_snapshot!(described(&items[0], &[("id", "/id"), ("GPUs", "/gpu/count"), ("node", "/node_id")]), @r"
         id    0198
         GPUs  8
        ");
    }
}
