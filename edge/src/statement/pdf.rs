//! A statement as PDF, to be read and filed: PDF/A-2b, with embedded fonts. It contains the sums of the postings by allocation and kind;
//! the single postings are in the CSV.

use domain::billing_account::Holder;
use domain::money::MicroAmount;
use krilla::color::rgb;
use krilla::configure::{Archival, ConfigurationBuilder};
use krilla::geom::{PathBuilder, Point, Rect};
use krilla::metadata::{DateTime, Metadata};
use krilla::num::NormalizedF32;
use krilla::page::PageSettings;
use krilla::paint::{Fill, FillRule};
use krilla::surface::Surface;
use krilla::text::TextDirection;
use krilla::{Document, SerializeSettings};
use std::collections::BTreeMap;

use super::amount::{exact, rounded};
use super::font::{FACES, Faces, Weight};
use super::{Line, Statement};
use chrono::{Datelike as _, Timelike as _};

pub(crate) const MEDIA_TYPE: &str = "application/pdf";

/// A4, in points.
const PAGE: (f32, f32) = (595.28, 841.89);
const MARGIN: f32 = 48.0;
const BOTTOM: f32 = PAGE.1 - 64.0;
const RIGHT: f32 = PAGE.0 - MARGIN;
const TEXT: f32 = 9.0;
const SMALL: f32 = 7.5;
const LEADING: f32 = 13.0;
/// Where the columns of the table begin; the last one ends at the right margin.
const COLUMNS: [f32; 3] = [MARGIN, 178.0, 398.0];

/// Why the PDF cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PdfError {
    #[error("the built-in fonts cannot be read")]
    Letters,
    #[error("a page has no size")]
    Page,
    #[error("this kind of PDF cannot be made: {0:?}")]
    Kind(krilla::configure::ConfigurationError),
    #[error("the PDF document is refused: {0:?}")]
    Document(krilla::error::KrillaError),
}

/// The statement's pages.
pub(crate) fn printed(statement: &Statement) -> Result<Vec<u8>, PdfError> {
    let faces = FACES.as_ref().ok_or(PdfError::Letters)?;
    let mut layout = Layout { faces, pages: vec![Vec::new()], y: MARGIN + 20.0 };
    layout.head(statement);
    layout.summary(statement);
    layout.lines(statement);
    layout.notes(statement);
    layout.foot(statement);
    let kind = ConfigurationBuilder::new().with_archival_validator(Archival::A2_B).finish().map_err(PdfError::Kind)?;
    let mut document = Document::new_with(SerializeSettings { configuration: kind, ..SerializeSettings::default() });
    for marks in &layout.pages {
        let mut page = document.start_page_with(PageSettings::from_wh(PAGE.0, PAGE.1).ok_or(PdfError::Page)?);
        let mut surface = page.surface();
        marks.iter().for_each(|mark| mark.draw(faces, &mut surface));
        surface.finish();
        page.finish();
    }
    document.set_metadata(described(statement));
    document.finish().map_err(PdfError::Document)
}

fn described(statement: &Statement) -> Metadata {
    let (day, time) = (statement.as_of.date_naive(), statement.as_of.time());
    let small = |number: u32| u8::try_from(number).unwrap_or_default();
    let made = DateTime::new(u16::try_from(day.year()).unwrap_or_default())
        .month(small(day.month()))
        .day(small(day.day()))
        .hour(small(time.hour()))
        .minute(small(time.minute()))
        .second(small(time.second()))
        .utc_offset_hour(0)
        .utc_offset_minute(0);
    Metadata::new()
        .title(format!("Statement of account, {}", statement.month.display_name()))
        .description(format!("Account {}, {}", statement.account, statement.month))
        .language("en".to_owned())
        .creation_date(made)
}

/// Something on a page.
enum Mark {
    Text {
        x: f32,
        y: f32,
        size: f32,
        weight: Weight,
        text: String,
    },
    /// A line across the table.
    Rule {
        y: f32,
        thickness: f32,
    },
}

impl Mark {
    fn draw(&self, faces: &Faces, surface: &mut Surface<'_>) {
        match self {
            Self::Text { x, y, size, weight, text } => {
                surface.set_fill(Some(ink(20)));
                let mut x = *x;
                for run in faces.runs(text, *weight) {
                    let start = Point::from_xy(x, *y);
                    x += run.width(*size);
                    surface.draw_text(start, run.letters.font.clone(), *size, &run.text, false, TextDirection::Auto);
                }
            }
            Self::Rule { y, thickness } => {
                let mut path = PathBuilder::new();
                if let Some(bar) = Rect::from_xywh(MARGIN, *y, RIGHT - MARGIN, *thickness) {
                    path.push_rect(bar);
                }
                surface.set_fill(Some(ink(150)));
                if let Some(path) = path.finish() {
                    surface.draw_path(&path);
                }
            }
        }
    }
}

fn ink(lightness: u8) -> Fill {
    let color = rgb::Color::new(lightness, lightness, lightness);
    Fill { paint: color.into(), opacity: NormalizedF32::ONE, rule: FillRule::default() }
}

/// Pages as they are filled, from the top down.
struct Layout<'a> {
    faces: &'a Faces,
    pages: Vec<Vec<Mark>>,
    y: f32,
}

impl Layout<'_> {
    fn mark(&mut self, mark: Mark) {
        if let Some(page) = self.pages.last_mut() {
            page.push(mark);
        }
    }

    fn text(&mut self, x: f32, size: f32, weight: Weight, text: impl Into<String>) {
        let y = self.y;
        self.mark(Mark::Text { x, y, size, weight, text: text.into() });
    }

    /// Ending at the right margin.
    fn right(&mut self, size: f32, weight: Weight, text: &str) {
        let width = self.width(text, size, weight);
        self.text(RIGHT - width, size, weight, text);
    }

    fn width(&self, text: &str, size: f32, weight: Weight) -> f32 {
        self.faces.runs(text, weight).iter().map(|run| run.width(size)).sum()
    }

    fn rule(&mut self, thickness: f32) {
        let y = self.y - LEADING + 3.5;
        self.mark(Mark::Rule { y, thickness });
    }

    /// Lines of at most that width: a text is broken wherever it is too long.
    fn broken(&self, text: &str, width: f32) -> Vec<String> {
        let (mut lines, mut line) = (Vec::new(), String::new());
        for letter in text.chars() {
            line.push(letter);
            if self.width(&line, TEXT, Weight::Regular) > width {
                line.pop();
                // At the last space, where there is one.
                let rest = line.rfind(' ').map_or_else(String::new, |space| line.split_off(space + 1));
                lines.push(std::mem::replace(&mut line, rest));
                line.push(letter);
            }
        }
        lines.push(line);
        lines
    }

    fn field(&mut self, name: &str, value: &str) {
        self.text(MARGIN, TEXT, Weight::Bold, name);
        for line in self.broken(value, RIGHT - 150.0) {
            self.text(150.0, TEXT, Weight::Regular, line);
            self.y += LEADING;
        }
    }

    fn head(&mut self, it: &Statement) {
        self.text(MARGIN, 18.0, Weight::Bold, "Statement of account");
        self.y += 20.0;
        self.text(MARGIN, 12.0, Weight::Regular, it.month.display_name());
        self.y += 28.0;
        let (whose, id) = match &it.holder {
            Holder::User(id) => ("User", id.as_str()),
            Holder::Org(id) => ("Organisation", id.as_str()),
        };
        self.field(whose, id);
        self.field("Account", &it.account.to_string());
        self.field("Currency", it.currency.as_str());
        let day = |at: domain::Timestamp| at.format("%Y-%m-%d %H:%M:%S UTC").to_string();
        self.field("From", &day(it.month.begins()));
        self.field("Until before", &day(it.month.ends()));
        self.field("As of", &day(it.as_of));
        if !it.is_final() {
            self.field("Not final", "The month is not over: what is posted until its end is added.");
        }
        self.y += LEADING;
    }

    fn amount(&mut self, name: &str, amount: MicroAmount, weight: Weight, it: &Statement) {
        self.text(MARGIN, TEXT, weight, name);
        self.right(TEXT, weight, &exact(amount, &it.currency));
        self.y += LEADING;
    }

    /// From one balance to the other.
    fn summary(&mut self, it: &Statement) {
        self.amount("Opening balance", it.opening.balance, Weight::Bold, it);
        let mut kinds: BTreeMap<&str, MicroAmount> = BTreeMap::new();
        for line in &it.lines {
            let sum = kinds.entry(&line.sum.kind).or_default();
            *sum = sum.plus(line.sum.effect);
        }
        for (kind, effect) in kinds {
            self.amount(&display_name(kind), effect, Weight::Regular, it);
        }
        self.rule(0.5);
        self.amount("Closing balance", it.closing.balance, Weight::Bold, it);
        let whole = format!("{} in whole minor units, rounded down", rounded(it.closing.balance, &it.currency));
        self.right(SMALL, Weight::Regular, &whole);
        self.y += 2.0 * LEADING;
    }

    fn lines(&mut self, it: &Statement) {
        self.titles(it);
        if it.lines.is_empty() {
            self.text(MARGIN, TEXT, Weight::Regular, "Nothing was posted.");
            self.y += LEADING;
        }
        for line in &it.lines {
            if self.y + 2.0 * LEADING > BOTTOM {
                self.turn();
                self.titles(it);
            }
            self.line(line, it);
        }
        self.y += LEADING;
    }

    fn turn(&mut self) {
        self.pages.push(Vec::new());
        self.y = MARGIN + 20.0;
    }

    fn titles(&mut self, it: &Statement) {
        for (x, title) in COLUMNS.into_iter().zip(["What", "Allocation", "Postings"]) {
            self.text(x, TEXT, Weight::Bold, title);
        }
        self.right(TEXT, Weight::Bold, &format!("Amount in {}", it.currency.as_str()));
        self.y += LEADING;
        self.rule(1.0);
        self.y += 2.0;
    }

    fn line(&mut self, line: &Line, it: &Statement) {
        let sum = &line.sum;
        self.text(COLUMNS[0], TEXT, Weight::Regular, display_name(&sum.kind));
        let of = match sum.allocation {
            Some(id) => id.to_string(),
            None if sum.together > 0 => format!("{} more, put together", sum.together),
            None => String::new(),
        };
        self.text(COLUMNS[1], SMALL, Weight::Regular, of);
        self.text(COLUMNS[2], TEXT, Weight::Regular, sum.postings.to_string());
        self.right(TEXT, Weight::Regular, &exact(sum.effect, &it.currency));
        self.y += LEADING - 3.0;
        let day = |at: domain::Timestamp| at.format("%m-%d %H:%M:%S").to_string();
        let while_used =
            sum.used_from.zip(sum.used_until).map(|(from, until)| format!("{} to {}", day(from), day(until)));
        if let Some(rented) = &line.rented {
            let gpus = format!("{} × {}", rented.gpu_count, rented.sku);
            self.text(COLUMNS[0], SMALL, Weight::Regular, gpus);
        }
        self.text(COLUMNS[1], SMALL, Weight::Regular, while_used.unwrap_or_default());
        // What the balance does not include.
        if sum.effect == MicroAmount::ZERO && sum.amount != MicroAmount::ZERO {
            self.right(SMALL, Weight::Regular, &format!("({} at our cost)", exact(sum.amount, &it.currency)));
        }
        self.y += LEADING;
    }

    fn notes(&mut self, it: &Statement) {
        if self.y + 5.0 * LEADING > BOTTOM {
            self.turn();
        }
        let postings = match it.postings() {
            0 => "No posting is in this statement".to_owned(),
            1 => format!("One posting, {} of the account", it.closing.number),
            many => format!("{many} postings, {} to {} of the account", it.opening.number + 1, it.closing.number),
        };
        for note in [
            format!("{postings}. The CSV of this statement has each one."),
            "Amounts are exact: a minor unit is counted in millionths, nothing is rounded where it is charged,"
                .to_owned(),
            "and the opening balance and all amounts above add up to the closing balance, to the last digit."
                .to_owned(),
            "All times are UTC. What was used in one month and posted in the next is in the statement of the next."
                .to_owned(),
        ] {
            self.text(MARGIN, SMALL, Weight::Regular, note);
            self.y += LEADING - 2.0;
        }
    }

    fn foot(&mut self, it: &Statement) {
        let (of, y) = (self.pages.len(), PAGE.1 - 32.0);
        for (number, page) in (1..).zip(&mut self.pages) {
            let text = format!("{} · account {} · page {number} of {of}", it.month, it.account);
            page.push(Mark::Text { x: MARGIN, y, size: SMALL, weight: Weight::Regular, text });
        }
    }
}

/// `usage_credit` is a usage credit.
fn display_name(kind: &str) -> String {
    let mut letters = kind.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters.map(|letter| if letter == '_' { ' ' } else { letter })).collect()
}
