#!/usr/bin/env python3
"""Draws the main figures against the best peer, from the tables of compare_peers.py and everyday.py in RESULTS.md.

    python3 chart.py [RESULTS.md] [chart.svg]

Without arguments, the files beside this script. Each row listed in `charted` is one pair of bars, in GB/s.
"""
import html
import os
import re
import sys

here = os.path.dirname(os.path.abspath(__file__))
results = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "RESULTS.md")
target = sys.argv[2] if len(sys.argv) > 2 else os.path.join(here, "chart.svg")

# rows of compare_peers.py: the beginning of a row, how many rows below it the charted row is, and its name in the chart
charted = [
    ("stream 8 GiB, 64 rows", 1, "sequential epochs, rows of 256 KiB"),
    ("register that file in place", 0, "page-locking a file"),
    ("gather 64 x 131072", 0, "gather random rows of 512 B"),
    ("scatter 64 x 131072", 0, "scatter random rows of 512 B"),
    ("gather and scatter at once", 0, "both at once"),
]


def read_table(script):
    with open(results, encoding="utf-8") as file:
        text = file.read()
    found = re.search(f"<!-- {script}: begin -->\\n(.*?)<!-- {script}: end -->", text, re.S)
    if not found:
        sys.exit(f"chart.py: {results} has no table of {script}.py")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.group(1).splitlines()]
    return lines[0][0], lines[2:]


def read_shuffled():
    """The bars of shuffled images with labels, which everyday.py measures in one run."""
    title, rows = read_table("everyday")
    ours = next((row for row in rows if row[0] == "256K+label"), None)
    peer = next((row for row in rows if row[0].startswith("torch") and row[5].startswith("256 KiB")), None)
    if ours is None or peer is None:
        sys.exit(f"chart.py: the table of everyday.py in {results} has no row 256K+label, or no peer of it")
    bar = ("shuffled epochs, 256 KiB and a label", float(ours[2].split()[0]), float(peer[2]), peer[0])
    return title.split(",")[0], bar


title, rows = read_table("compare_peers")
bars = []
for beginning, offset, name in charted:
    index = next((i for i, row in enumerate(rows) if row[0].startswith(beginning)), None)
    if index is None or not rows[index + offset][3]:
        sys.exit(f"chart.py: {results} has no row '{beginning}' with a peer")
    row = rows[index + offset]
    bars.append((name, float(row[1]), float(row[3]), row[5]))
shuffled_date, shuffled = read_shuffled()
bars.insert(1, shuffled)

scale, left, row_height, width = 5.2, 250, 46, 860
height = 60 + row_height * len(bars) + 24
link = float(re.search(r"LINK ([\d.]+)", title).group(1))
parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
         'font-size="13">',
         f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
         '<text x="16" y="24" font-size="15" font-weight="bold">pinflow and the best peer, GB/s (one H200, PCIe Gen5)</text>',
         f'<text x="16" y="{height - 10}" fill="#555">{html.escape(title)}; shuffled: {shuffled_date}. Dashed: the link.</text>']
for i, (name, ours, theirs, peer) in enumerate(bars):
    y = 44 + i * row_height
    parts += [f'<text x="{left - 10}" y="{y + 20}" text-anchor="end">{html.escape(name)}</text>',
              f'<rect x="{left}" y="{y}" width="{ours * scale:.0f}" height="16" fill="#2a6f97"/>',
              f'<text x="{left + ours * scale + 6:.0f}" y="{y + 13}">{ours:.1f}, {ours / theirs:.1f} times</text>',
              f'<rect x="{left}" y="{y + 18}" width="{theirs * scale:.0f}" height="12" fill="#b8c4cc"/>',
              f'<text x="{left + theirs * scale + 6:.0f}" y="{y + 29}" font-size="11" fill="#555">{theirs:.1f} '
              f'{html.escape(peer)}</text>']
x = left + link * scale
parts += [f'<line x1="{x:.0f}" y1="38" x2="{x:.0f}" y2="{height - 26}" stroke="#888" stroke-dasharray="4 3"/>', "</svg>"]
with open(target, "w", encoding="utf-8") as file:
    file.write("\n".join(parts) + "\n")
