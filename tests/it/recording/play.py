"""Plays a recording back: asciinema's own reader gives the events, pyte (a terminal in Python) draws them. Says what can be seen."""

import json
import sys

import pyte
from asciinema import asciicast

with asciicast.open_from_url(sys.argv[1]) as cast:
    header = cast.v2_header
    screen = pyte.Screen(header["width"], header["height"])
    terminal = pyte.Stream(screen)
    output, sizes, markers, times = [], [], [], []
    for time, kind, data in cast.events():
        times.append(time)
        if kind == "o":
            output.append(data)
            terminal.feed(data)
        elif kind == "r":
            columns, rows = (int(part) for part in data.split("x"))
            screen.resize(rows, columns)
            sizes.append(data)
        elif kind == "m":
            markers.append(data)
        else:
            sys.exit(f"an event of kind {kind!r}")

print(
    json.dumps(
        {
            "header": header,
            "output": "".join(output),
            "sizes": sizes,
            "markers": markers,
            "in_order": times == sorted(times),
            "screen": screen.display,
            "colours": [[screen.buffer[y][x].fg for x in range(screen.columns)] for y in range(screen.lines)],
        }
    )
)
