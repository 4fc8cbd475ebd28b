"""Draws what the host asks in a kept call, before the start and while the GPU works.

python tools/draw_call.py            writes results/call.png, and attaches it to the notebook
python tools/draw_call.py FILE.png   writes FILE.png alone
"""

import sys

from drawing import BLUE, GREY, INK, ORANGE, Sheet, main

HOST, GPU, HEIGHT = 1.55, 0.35, 0.62  # the lanes' lower edges, and how high a box is


def draw():
    sheet = Sheet(8.6, 0.25, 2.75)
    text, box, arrow = sheet.text, sheet.box, sheet.arrow

    def question(x, width, title, first, second):
        box(x, HOST, width, HEIGHT, GREY)
        text(x + width / 2, HOST + HEIGHT + 0.1, title, 9.5, INK, "center", weight="bold")
        text(x + width / 2, HOST + 0.37, first, 9, INK, "center")
        text(x + width / 2, HOST + 0.14, second, 9, INK, "center")

    def if_not(x, *lines):
        arrow((x, HOST), (x, HOST - 0.28))
        for i, line in enumerate(lines):
            text(x + 0.1, HOST - 0.2 - 0.2 * i, line, 9, ORANGE)

    text(8.5, 2.58, "time runs to the right; not to scale", 8.5, GREY, "right")
    for y, lane in ((HOST, "host"), (GPU, "GPU")):
        text(0.1, y + HEIGHT / 2 - 0.05, lane, 10, GREY, weight="bold")
    question(
        0.75,
        2.3,
        "Is the memory there?",
        "addresses of weight and tables;",
        "torch.compile's guard",
    )
    if_not(1.0, "no: it starts at another address,", "or a new launch is made")
    box(3.25, HOST, 1.05, HEIGHT, BLUE)
    text(3.775, HOST + HEIGHT + 0.1, "Start.", 9.5, BLUE, "center", weight="bold")
    text(3.775, HOST + 0.37, "allocate out,", 9, INK, "center")
    text(3.775, HOST + 0.14, "enqueue", 9, INK, "center")
    question(
        4.5,
        2.75,
        "Does it still mean the same?",
        "the state's fields and tables;",
        "no profiler, no dispatch mode",
    )
    if_not(4.95, "no: out is dropped, and a new launch made")
    box(7.45, HOST, 1.05, HEIGHT, BLUE, "white")
    text(7.975, HOST + 0.255, "return out", 9.5, INK, "center")
    for x in (3.05, 4.3, 7.25):
        arrow((x, HOST + HEIGHT / 2), (x + 0.2, HOST + HEIGHT / 2), color=BLUE, width=1.2)

    arrow((4.1, HOST), (4.1, GPU + HEIGHT / 2), (4.5, GPU + HEIGHT / 2), color=BLUE, width=1.2)
    box(4.5, GPU, 3.6, HEIGHT, BLUE)
    text(6.3, GPU + 0.255, "the kernel decodes the weight into out", 9.5, INK, "center")
    return sheet.png()


if __name__ == "__main__":
    main("call.png", draw(), sys.argv[1:])
