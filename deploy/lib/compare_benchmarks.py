"""Compares the reports of a benchmark that ran at two commits in turns: N.before.json and N.after.json, as tests/src/bench.rs writes them.

    compare_benchmarks.py FOLDER

Prints each measurement's medians and the median of its ratios (after : before) turn by turn, since a slow minute slows down both of a turn.
"""

import json
import pathlib
import re
import statistics
import sys

# By the unit in a name: whether more of it is better. Other measurements, such as sizes of batches, are neither.
MORE_IS_BETTER = {r"/s$|per_s(econd)?(_|$)": True, r"_(ms|us|kib|mib|percent)$|KiB|MiB| ms$": False}
# A ratio within this distance of 1 is the noise of a machine that does other work.
NOISE = 0.05


def measurements(report):
    """The numbers of a report, by name. The one that is compared with a baseline and its ratio to that come first."""
    ours = f"{report['name']}, {report['unit']}"
    numbers = {ours: report["ours"], f"{ours} : {report['baseline']['name']}": report["ratio"], **report["figures"]}
    return {name: value for name, value in numbers.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}


def verdict(name, ratio):
    unit = name.split(" : ")[0]
    more_is_better = next((better for units, better in MORE_IS_BETTER.items() if re.search(units, unit)), None)
    if more_is_better is None or abs(ratio - 1) <= NOISE:
        return ""
    return "better" if (ratio > 1) == more_is_better else "worse"


def compare(folder):
    turns = []
    for before in sorted(folder.glob("*.before.json")):
        after = before.with_name(before.name.replace(".before.", ".after."))
        turns.append(tuple(measurements(json.loads(path.read_text())) for path in (before, after)))
    if not turns:
        sys.exit(f"{folder} has no reports")
    shared = [name for name in turns[0][1] if all(name in before and name in after for before, after in turns)]
    width = max(map(len, shared))
    print(f"{'measurement':{width}} {'before':>12} {'after':>12} {'ratio':>7}")
    for name in shared:
        pairs = [(before[name], after[name]) for before, after in turns]
        ratios = [after / before for before, after in pairs if before]
        middles = [statistics.median(values) for values in zip(*pairs)]
        ratio = statistics.median(ratios) if ratios else None
        text = "" if ratio is None else f"{ratio:7.3f}  {verdict(name, ratio)}"
        print(f"{name:{width}} {middles[0]:12.3f} {middles[1]:12.3f} {text}".rstrip())
    for name in sorted({name for turn in turns for report in turn for name in report} - set(shared)):
        print(f"{name:{width}} is in one of the two alone")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    compare(pathlib.Path(sys.argv[1]))
