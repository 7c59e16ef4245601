//! The layout of the description in its snapshot, for those who review it: what fits in a line is in one line.

use serde::Serialize as _;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};
use std::fmt::Write as _;
use std::io;

/// The most columns of a line that holds more than one value.
const WIDTH: usize = 140;

pub(super) fn laid_out(value: &Value) -> String {
    let mut text = String::new();
    write(&mut text, value, 0);
    text
}

fn write(text: &mut String, value: &Value, indent: usize) {
    let line = one_line(value);
    let column = text.len() - text.rfind('\n').map_or(0, |newline| newline + 1);
    let fits = column + line.chars().count() < WIDTH;
    match value {
        Value::Object(fields) if !fits => {
            text.push('{');
            for (number, (name, value)) in fields.iter().enumerate() {
                begin_line(text, number, indent + 2);
                write!(text, "{}: ", Value::from(name.as_str())).unwrap();
                write(text, value, indent + 2);
            }
            begin_line(text, 0, indent);
            text.push('}');
        }
        Value::Array(items) if !fits => {
            text.push('[');
            for (number, item) in items.iter().enumerate() {
                begin_line(text, number, indent + 2);
                write(text, item, indent + 2);
            }
            begin_line(text, 0, indent);
            text.push(']');
        }
        Value::Object(_) | Value::Array(_) | Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            text.push_str(&line);
        }
    }
}

fn begin_line(text: &mut String, number: usize, indent: usize) {
    let comma = if number == 0 { "" } else { "," };
    write!(text, "{comma}\n{:indent$}", "").unwrap();
}

fn one_line(value: &Value) -> String {
    let mut line = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut line, Spaced)).unwrap();
    String::from_utf8(line).unwrap()
}

/// A space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
