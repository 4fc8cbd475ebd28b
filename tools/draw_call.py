"""Draws what a first call keeps, and what later calls ask before they start the kernel again.

python tools/draw_call.py            writes results/call.png, and attaches it to the notebook
python tools/draw_call.py FILE.png   writes FILE.png alone
"""

import sys

from drawing import BLUE, GREY, INK, ORANGE, Sheet, main

FIRST = (  # where a box begins, its width, its first line, the lines below, its color
    (1.3, 1.3, "read", "tensors, facts", GREY),
    (2.85, 1.3, "check", "everything", GREY),
    (4.4, 1.65, "kernel[grid]", "Triton finds the\nright kernel", GREY),
    (6.4, 2.1, "keep", "facts, guard, addresses,\nthe compiled kernel", ORANGE),
)
LATER = (
    (1.3, 1.3, "1  read", "tensors, facts,\nanew", BLUE),
    (2.85, 1.3, "2  fits?", "facts equal, guard\nagrees, no watcher", BLUE),
    (4.4, 1.65, "3  addresses", "as kept; else memory\nand alignment checked", BLUE),
    (6.25, 1.0, "4  allocate", "a fresh\noutput", BLUE),
    (7.45, 1.05, "5  start", "by Inductor's\nC++ launcher", BLUE),
)
# Blue: what every later call does. Orange: what is kept, and its use. Grey: a first call's rest.


def draw():
    sheet = Sheet(8.6, 0.0, 2.3)
    row(sheet, "A first call", FIRST, bottom=1.52)
    row(sheet, "A later call", LATER, bottom=0.08)
    text, arrow = sheet.text, sheet.arrow
    arrow((7.45, 1.52), (7.45, 1.13), (3.9, 1.13), (3.9, 0.78), color=ORANGE)
    arrow((5.2, 1.13), (5.2, 0.78), color=ORANGE)
    text(5.3, 1.2, "with the layer's QuantState", 9, ORANGE)
    arrow((3.2, 0.78), (3.2, 1.52), color=GREY, width=1.2)
    text(3.1, 1.1, "if not", 9, GREY, "right")
    return sheet.png()


def row(sheet, name, steps, bottom):
    """A call's steps from left to right, with arrows between them."""
    height = 0.7
    middle = bottom + height / 2
    sheet.text(0.1, middle - 0.05, name, color=INK, weight="bold")
    for left, width, title, more, color in steps:
        sheet.box(left, bottom, width, height, color)
        sheet.text(left + width / 2, bottom + 0.49, title, 10, INK, "center", weight="bold")
        sheet.text(left + width / 2, bottom + 0.4, more, 8.5, INK, "center", va="top")
    for (left, width, _, _, color), (following, *_) in zip(steps, steps[1:]):
        sheet.arrow((left + width, middle), (following, middle), color=color, width=1.2)


if __name__ == "__main__":
    main("call.png", draw(), sys.argv[1:])
