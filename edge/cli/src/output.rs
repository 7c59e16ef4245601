//! Output of results on standard output: tables for people, JSON for scripts. Notices go to standard error.

use crate::amount::with_amounts;
use crate::failure::{ExitStatus, Failure};
use crate::printable::{cell, value_alone};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use std::io::{self, IsTerminal as _, Write as _};

/// How results are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OutputFormat {
    #[default]
    Table,
    // The service's own JSON, one value; `--follow` prints one a line.
    Json,
}

/// A column of a list, or a line of a single resource: its title, and the JSON pointer of its value (RFC 6901).
pub(crate) type Column = (&'static str, &'static str);

/// The format of results, and whether notices are printed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub(crate) format: OutputFormat,
    pub(crate) quiet: bool,
}

impl Output {
    pub(crate) const fn is_json(self) -> bool {
        matches!(self.format, OutputFormat::Json)
    }

    /// Prints one resource.
    pub(crate) fn show(self, it: &Value, lines: &[Column]) -> Result<(), Failure> {
        if self.is_json() { self.json(it) } else { self.line(&fields_text(it, lines)) }
    }

    /// Prints a page of resources: `{"items": […], "next_page": …}`.
    pub(crate) fn list(self, page: &Value, columns: &[Column]) -> Result<(), Failure> {
        if self.is_json() {
            return self.json(page);
        }
        let items = page["items"].as_array().map_or(&[][..], Vec::as_slice);
        if items.is_empty() {
            self.notice("There are none.");
            return Ok(());
        }
        self.line(&table_text(items, columns))?;
        if !page["next_page"].is_null() {
            self.notice("There are more; --limit shows them.");
        }
        Ok(())
    }

    /// Prints a table below a resource, where it has rows.
    pub(crate) fn rows_below(self, rows: &Value, columns: &[Column]) -> Result<(), Failure> {
        if rows.as_array().is_some_and(|rows| !rows.is_empty()) {
            self.line("")?;
            self.list(&json!({ "items": rows, "next_page": null }), columns)?;
        }
        Ok(())
    }

    /// Prints the result of a change: a sentence for people, the service's response for scripts.
    pub(crate) fn done(self, answer: &Value, sentence: &str) -> Result<(), Failure> {
        if self.is_json() { self.json(answer) } else { self.line(sentence) }
    }

    pub(crate) fn json(self, value: &Value) -> Result<(), Failure> {
        let text = if io::stdout().is_terminal() { format!("{value:#}") } else { value.to_string() };
        self.line(&text)
    }

    /// Prints a line of the result itself.
    pub(crate) fn line(self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|error| match error.kind() {
            // The reader has closed the pipe, as `head` does.
            io::ErrorKind::BrokenPipe => std::process::exit(0),
            _ => Failure::new(ExitStatus::Failed, format!("the result cannot be written: {error}"))
                .next("Make room there, or write it elsewhere. A change that the command makes is made."),
        })
    }

    /// Prints a notice beside the result, unless `--quiet` is set.
    pub(crate) fn notice(self, text: &str) {
        if !self.quiet {
            print_error(text);
        }
    }

    /// Prints what the user has to do before the command can go on. `is_done`: it was done for them, so that it is a mere notice.
    pub(crate) fn instruction(self, text: &str, is_done: bool) {
        if self.shows_instruction(is_done) {
            print_error(text);
        }
    }

    const fn shows_instruction(self, is_done: bool) -> bool {
        !self.quiet || !is_done
    }
}

/// Prints a failure. A closed standard error is ignored.
pub(crate) fn print_error(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints a text with its own line breaks, in a raw terminal.
pub(crate) fn print_raw(text: &str) {
    let mut out = io::stderr().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Rows under titles, with amounts in their currency.
pub(crate) fn table_text(items: &[Value], columns: &[Column]) -> String {
    let mut table = plain_table();
    table.set_header(columns.iter().map(|(title, _)| *title));
    for item in items {
        let item = with_amounts(item);
        table.add_row(columns.iter().map(|(_, path)| value_at(&item, path)));
    }
    table_to_text(table)
}

/// A title and a value per line, with amounts in their currency; absent values are left out.
pub(crate) fn fields_text(it: &Value, lines: &[Column]) -> String {
    let it = with_amounts(it);
    let mut table = plain_table();
    let is_there = |value: &Value| !value.is_null() && value.as_object().is_none_or(|fields| !fields.is_empty());
    for (title, path) in lines.iter().filter(|(_, path)| it.pointer(path).is_some_and(is_there)) {
        table.add_row([(*title).to_owned(), it.pointer(path).map_or_else(String::new, value_alone)]);
    }
    table_to_text(table)
}

fn table_to_text(mut table: Table) -> String {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

fn plain_table() -> Table {
    let mut table = Table::new();
    // No frames and no wrapping, so that the text can be selected and processed by shell tools.
    table.load_style(presets::NOTHING);
    table
}

fn value_at(it: &Value, path: &str) -> String {
    it.pointer(path).map_or_else(|| "-".to_owned(), cell)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn quiet_hides_an_instruction_that_was_carried_out_and_no_other() {
        let shows = |quiet, is_done| Output { format: OutputFormat::Table, quiet }.shows_instruction(is_done);
        assert_eq!(
            [shows(false, false), shows(false, true), shows(true, false), shows(true, true)],
            [true, true, true, false]
        );
    }

    /// A notice that bypasses [`Output::notice`] is printed with `--quiet`, too.
    #[test]
    fn quiet_is_bypassed_by_failures_and_raw_terminals_alone() {
        let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut left = vec![sources.clone()];
        let mut callers = Vec::new();
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            if ["print_error(", "print_raw(", "eprint"].iter().any(|call| text.contains(call)) {
                callers.push(path.strip_prefix(&sources).unwrap().to_str().unwrap().to_owned());
            }
        }
        callers.sort();
        let expected = ["main.rs", "output.rs", "recordings/play.rs", "terminal/session.rs", "usage_error.rs"];
        assert_eq!(callers, expected);
    }

    #[test]
    fn list_is_a_table_for_shell_tools() {
        let items = [
            json!({ "id": "0198", "state": "active", "gpu": { "count": 8 } }),
            json!({ "id": "0199", "state": "release_failed" }),
        ];
        insta::assert_snapshot!(table_text(&items, &[("ID", "/id"), ("GPUS", "/gpu/count"), ("STATE", "/state")]), @r"
         ID    GPUS  STATE
         0198  8     active
         0199  -     release_failed
        ");
        let page = format!("https://pay.example/c/{}#end", "x".repeat(500));
        let shown = fields_text(&json!({ "url": page }), &[("pay at", "/url")]);
        assert!(shown.contains(&page), "an address that is cut leads nowhere: {shown}");
        insta::assert_snapshot!(fields_text(&items[0], &[("id", "/id"), ("GPUs", "/gpu/count"), ("node", "/node_id")]), @r"
         id    0198
         GPUs  8
        ");
    }
}
