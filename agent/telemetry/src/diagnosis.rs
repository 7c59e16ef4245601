//! Diagnoses: checks that run at once, each within its limit, and what they found. `gpuaas doctor` and `gpuaas-agent doctor` print them.

pub mod machine;
pub mod unit;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::pin::Pin;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The length of a summary or an action, in characters: errors of other programs are of any length.
const LONGEST_TEXT: usize = 600;
/// How many findings of one check are shown.
const MOST_FINDINGS: usize = 100;

/// How much a finding matters. The number is the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DiagnosticLevel {
    Ok = 0,
    /// The service runs, and something should be changed.
    Warning = 1,
    /// The service does not run as it is, or loses what it has acknowledged.
    Error = 2,
}

impl DiagnosticLevel {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// What a check found, and what an operator does about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiagnosticFinding {
    pub level: DiagnosticLevel,
    pub summary: String,
    /// `None` where nothing has to be done.
    pub action: Option<String>,
}

impl DiagnosticFinding {
    #[must_use]
    pub fn ok(summary: impl AsRef<str>) -> Self {
        Self { level: DiagnosticLevel::Ok, summary: plain(summary.as_ref()), action: None }
    }

    #[must_use]
    pub fn warning<S: AsRef<str>, A: AsRef<str>>(summary: S, action: A) -> Self {
        Self::problem(DiagnosticLevel::Warning, summary.as_ref(), action.as_ref())
    }

    #[must_use]
    pub fn error<S: AsRef<str>, A: AsRef<str>>(summary: S, action: A) -> Self {
        Self::problem(DiagnosticLevel::Error, summary.as_ref(), action.as_ref())
    }

    fn problem(level: DiagnosticLevel, summary: &str, action: &str) -> Self {
        Self { level, summary: plain(summary), action: Some(plain(action)) }
    }
}

/// On one line, without control characters, of a bounded length.
fn plain(text: &str) -> String {
    let line = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    let mut plain: String = line.chars().filter(|letter| !letter.is_control()).take(LONGEST_TEXT).collect();
    if line.chars().count() > LONGEST_TEXT {
        plain.push('…');
    }
    plain
}

type Examination = Pin<Box<dyn Future<Output = Vec<DiagnosticFinding>> + Send>>;

/// One row of a table of checks.
pub struct DiagnosticCheck {
    name: &'static str,
    /// What it looks at, in a few words.
    subject: &'static str,
    limit: Duration,
    /// What to do where it does not end within its limit.
    if_late: &'static str,
    examination: Examination,
}

impl DiagnosticCheck {
    pub fn new(
        name: &'static str,
        subject: &'static str,
        limit: Duration,
        if_late: &'static str,
        examination: impl Future<Output = Vec<DiagnosticFinding>> + Send + 'static,
    ) -> Self {
        Self { name, subject, limit, if_late, examination: Box::pin(examination) }
    }

    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// A check that blocks its thread, as reading a file of a dead network file system does.
    pub fn blocking(
        name: &'static str,
        subject: &'static str,
        limit: Duration,
        if_late: &'static str,
        examine: impl FnOnce() -> Vec<DiagnosticFinding> + Send + 'static,
    ) -> Self {
        let examination = async move { tokio::task::spawn_blocking(examine).await.unwrap_or_else(|_| vec![failed()]) };
        Self::new(name, subject, limit, if_late, examination)
    }
}

fn failed() -> DiagnosticFinding {
    DiagnosticFinding::error("the check itself failed", "report this, with what standard error says")
}

/// The findings of one check.
#[derive(Clone, Debug)]
pub struct CheckFindings {
    pub check: &'static str,
    pub subject: &'static str,
    pub took: Duration,
    pub findings: Vec<DiagnosticFinding>,
}

/// The findings of all checks, in the order of their table.
#[derive(Clone, Debug)]
pub struct DiagnosticReport {
    pub program: &'static str,
    pub version: &'static str,
    pub at: DateTime<Utc>,
    pub checks: Vec<CheckFindings>,
}

/// Runs the checks at once and returns when the last one has ended or is late. A check that hangs is left behind; it ends with the process.
#[must_use]
pub fn examine(program: &'static str, version: &'static str, checks: Vec<DiagnosticCheck>) -> DiagnosticReport {
    let at = Utc::now();
    let late: Vec<_> = checks.iter().map(|check| (check.name, check.subject)).collect();
    let (sender, receiver) = mpsc::channel();
    // In a runtime of its own, which is not awaited: a blocked thread would hold the end of the caller's.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let examined = match runtime {
        Ok(runtime) => {
            let running = runtime.spawn(async move {
                let running: Vec<_> = checks.into_iter().map(|check| tokio::spawn(within_limit(check))).collect();
                let mut examined = Vec::new();
                for check in running {
                    examined.push(check.await);
                }
                let _ = sender.send(examined);
            });
            let examined = receiver.recv().unwrap_or_default();
            drop(running);
            runtime.shutdown_background();
            examined
        }
        Err(_) => Vec::new(),
    };
    let mut examined = examined.into_iter();
    let checks = late.into_iter().map(|(check, subject)| {
        let failed = CheckFindings { check, subject, took: Duration::ZERO, findings: vec![failed()] };
        examined.next().and_then(Result::ok).unwrap_or(failed)
    });
    DiagnosticReport { program, version, at, checks: checks.collect() }
}

async fn within_limit(check: DiagnosticCheck) -> CheckFindings {
    let DiagnosticCheck { name, subject, limit, if_late, examination } = check;
    let began = Instant::now();
    // In a task of its own: one that panics is a finding.
    let mut findings = match tokio::time::timeout(limit, tokio::spawn(examination)).await {
        Ok(Ok(findings)) => findings,
        Ok(Err(_)) => vec![failed()],
        Err(_) => {
            let summary = format!("no result within {} s", limit.as_secs());
            vec![DiagnosticFinding::error(summary, if_late)]
        }
    };
    findings.truncate(MOST_FINDINGS);
    CheckFindings { check: name, subject, took: began.elapsed(), findings }
}

impl DiagnosticReport {
    /// That of the worst finding.
    #[must_use]
    pub fn level(&self) -> DiagnosticLevel {
        let levels = self.checks.iter().flat_map(|check| &check.findings).map(|finding| finding.level);
        levels.max().unwrap_or(DiagnosticLevel::Ok)
    }

    /// For people: a line for each finding, and below it what to do.
    #[must_use]
    pub fn as_text(&self) -> String {
        let mut text = String::new();
        let width = self.checks.iter().map(|check| check.check.len()).max().unwrap_or_default();
        let mut counts = [0_usize; 3];
        for check in &self.checks {
            for (n, finding) in check.findings.iter().enumerate() {
                counts[finding.level as usize] += 1;
                let _ = writeln!(text, "{:<7}  {:<width$}  {}", finding.level.name(), check.check, finding.summary);
                // Once below all findings in a row that it is for.
                let next = check.findings.get(n + 1).and_then(|next| next.action.as_ref());
                if let Some(action) = finding.action.as_ref().filter(|action| next != Some(action)) {
                    let _ = writeln!(text, "{:<7}  {:<width$}    -> {action}", "", "");
                }
            }
        }
        let [ok, warnings, errors] = counts;
        let _ = writeln!(text, "errors: {errors}, warnings: {warnings}, ok: {ok}");
        text
    }

    /// For programs.
    #[must_use]
    pub fn as_json(&self) -> Value {
        let finding = |finding: &DiagnosticFinding| json!({ "level": finding.level.name(), "summary": finding.summary, "action": finding.action });
        let check = |check: &CheckFindings| {
            json!({
                "check": check.check,
                "subject": check.subject,
                "took_ms": u64::try_from(check.took.as_millis()).unwrap_or(u64::MAX),
                "findings": check.findings.iter().map(finding).collect::<Vec<_>>(),
            })
        };
        json!({
            "program": self.program,
            "version": self.version,
            "at": self.at,
            "level": self.level().name(),
            "checks": self.checks.iter().map(check).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(60);

    fn ok() -> Vec<DiagnosticFinding> {
        vec![DiagnosticFinding::ok("all is well")]
    }

    #[test]
    fn check_that_hangs_is_a_finding_and_the_others_are_complete() {
        let (gate, blocked) = mpsc::channel::<()>();
        let checks = vec![
            DiagnosticCheck::new("waits", "a future", SHORT, "start it", std::future::pending()),
            DiagnosticCheck::blocking("blocks", "a thread", SHORT, "mount it", move || {
                let _ = blocked.recv();
                ok()
            }),
            DiagnosticCheck::new("panics", "a defect", LONG, "", async { unreachable!("a defect of the check") }),
            DiagnosticCheck::new("ends", "a result", LONG, "", async { ok() }),
        ];
        let report = examine("gpuaas", "1.0.0", checks);
        let found: Vec<_> = report.checks.iter().map(|it| (it.check, it.findings[0].clone())).collect();
        assert_eq!(found[0], ("waits", DiagnosticFinding::error("no result within 0 s", "start it")));
        assert_eq!(found[1], ("blocks", DiagnosticFinding::error("no result within 0 s", "mount it")));
        assert_eq!((found[2].0, &found[2].1), ("panics", &failed()));
        assert_eq!(found[3], ("ends", DiagnosticFinding::ok("all is well")));
        assert_eq!(report.level(), DiagnosticLevel::Error);
        drop(gate);
    }

    #[test]
    fn action_of_several_findings_in_a_row_is_printed_once_below_them() {
        let missing = |name: &str| DiagnosticFinding::error(format!("{name} is missing"), "install the bundle again");
        let findings =
            vec![missing("A"), missing("B"), DiagnosticFinding::error("C is wrong", "correct it"), missing("D")];
        let check = DiagnosticCheck::new("settings", "a subject", LONG, "", async move { findings });
        let report = examine("gpuaas", "1.0.0", vec![check]);
        let expected = "error    settings  A is missing\nerror    settings  B is missing\n                     -> install the bundle again\n\
                        error    settings  C is wrong\n                     -> correct it\n\
                        error    settings  D is missing\n                     -> install the bundle again\n\
                        errors: 4, warnings: 0, ok: 0\n";
        assert_eq!(report.as_text(), expected);
        let actions = report.as_json()["checks"][0]["findings"].as_array().unwrap().clone();
        assert!(actions.iter().all(|finding| finding["action"].is_string()), "a program needs none of the others");
    }

    #[test]
    fn report_names_the_action_below_each_problem_and_is_as_bad_as_its_worst_finding() {
        let check = |name, level: fn() -> DiagnosticFinding| {
            DiagnosticCheck::new(name, "a subject", LONG, "", async move { vec![level()] })
        };
        let warns = || DiagnosticFinding::warning("the disk\nis\u{1b}[31m full", "remove files");
        let report = examine("gpuaas", "1.0.0", vec![check("first", warns), check("second", || ok().remove(0))]);
        assert_eq!(report.level(), DiagnosticLevel::Warning);
        let expected = "warning  first   the disk; is[31m full\n                   -> remove files\nok       second  all is well\n\
                        errors: 0, warnings: 1, ok: 1\n";
        assert_eq!(report.as_text(), expected);
        let json = report.as_json();
        assert_eq!(json["level"], "warning");
        assert_eq!(json["checks"][0]["findings"][0]["action"], "remove files");
        assert_eq!(json["checks"][1]["findings"][0]["action"], Value::Null);
        assert_eq!(plain(&"x".repeat(1000)).chars().count(), LONGEST_TEXT + 1);
    }
}
