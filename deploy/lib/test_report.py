"""What the report of a test run (JUnit XML, as cargo-nextest writes it) says, for the end of deploy/test.

    test_report.py failed | flaky | slowest | names REPORT
"""

import itertools
import sys
import xml.etree.ElementTree as xml

# A terminal shows that many lines of failures, at most that many of each: the place and the message of a panic.
LINES = 28
LINES_OF_A_FAILURE = 4
WIDTH = 180


def tests(report):
    """Each test of the report: `BINARY NAME`, seconds, the element."""
    for suite in xml.parse(report).getroot().iter("testsuite"):
        for case in suite.iter("testcase"):
            yield f"{suite.get('name')} {case.get('name')}", float(case.get("time") or 0), case


def cause(failure, limit=LINES_OF_A_FAILURE):
    """The first lines of what ended a test: its panic, its error, or how its process ended."""
    lines = itertools.takewhile(lambda line: line.strip() != "stack backtrace:", (failure.text or failure.get("message")).splitlines())
    lines = [line for line in lines if line.strip() and "RUST_BACKTRACE" not in line]
    return "\n".join(f"    {line[:WIDTH]}" for line in lines[:limit])


def failed(report):
    for name, _, case in tests(report):
        failure = case.find("failure")
        failure = case.find("error") if failure is None else failure
        if failure is not None:
            yield name, failure


def print_failed(report):
    rows = list(failed(report))
    print(f"{len(rows)} failed:")
    limit = max(1, min(LINES_OF_A_FAILURE, LINES // max(1, len(rows)) - 1))
    shown = rows[: LINES // (limit + 1)]
    for name, failure in shown:
        print(f"  {name}\n{cause(failure, limit)}")
    if len(shown) < len(rows):
        print(f"  and {len(rows) - len(shown)} more, in the whole output")


def print_flaky(report):
    rows = [(name, case.find("flakyFailure")) for name, _, case in tests(report)]
    rows = [(name, failure) for name, failure in rows if failure is not None]
    if not rows:
        return
    print(f"flaky, {len(rows)} passed at a second or third try" + ("; they are the first thing to mend" if len(rows) > 2 else "") + ":")
    for name, failure in rows:
        print(f"  {name}\n{cause(failure)}")


def print_slowest(report):
    for name, seconds, _ in sorted(tests(report), key=lambda row: -row[1])[:20]:
        print(f"{seconds:8.0f}  {name}")


def print_names(report):
    """The failed tests as arguments of `deploy/test --part tests`; nothing where they are too many for a line."""
    names = [f" '{name}'" for name, _ in failed(report)]
    print("".join(names) if len(names) <= 12 else "", end="")


if __name__ == "__main__":
    commands = {"failed": print_failed, "flaky": print_flaky, "slowest": print_slowest, "names": print_names}
    commands[sys.argv[1]](sys.argv[2])
