"""Draws how a warp is the look-up table, and where a word's scale comes from.

python tools/draw_warp.py            writes results/warp.png, and attaches it to the notebook
python tools/draw_warp.py FILE.png   writes FILE.png alone
"""

import sys

from drawing import BLUE, GREY, INK, ORANGE, Sheet, main

CODE = (  # with en dashes: a minus sign is wider than a lane's cell allows
    "–1.0 –0.6962 –0.5251 –0.3949 –0.2844 –0.1848 –0.0911 0.0 "
    "0.0796 0.1609 0.2461 0.3379 0.4407 0.5626 0.7230 1.0"
).split()
BYTES = bytes([0xA7, 0x3C, 0x5F, 0x08])  # as they lie in memory
# Blue: thread 5. Orange: the way of its weight 0. Grey: labels, and what others hold.


def draw():
    low = -1.22  # of the strip below, which was added last
    sheet = Sheet(8.6, low, 4.6)
    text, box, arrow, axes = sheet.text, sheet.box, sheet.arrow, sheet.axes
    left, right, column = 0.1, 8.5, 1.05  # a column for each of the eight weights, two lanes wide
    nibbles = [nibble for byte in BYTES for nibble in (byte >> 4, byte & 0xF)]
    word, chosen = int.from_bytes(BYTES, "little"), nibbles[0]
    first, lane = (
        left + column / 2,
        left + (chosen + 0.5) * column / 2,
    )  # where weight 0 and its lane stand

    end = text(left, 4.39, "Thread 5's word:", color=BLUE, weight="bold")
    text(
        end + 0.07, 4.39, "four bytes in memory order, the first weight of each in its high nibble"
    )
    text(right, 4.39, f"word = 0x{word:08X}", ha="right", mono=True)
    for i, byte in enumerate(BYTES):
        text(
            left + (2 * i + 1) * column,
            4.13,
            f"byte {i} = 0x{byte:02X}",
            9,
            GREY,
            "center",
            mono=True,
        )
    axes.vlines([left + 2 * i * column for i in range(5)], 3.62, 4.05, color=BLUE, lw=2.2, zorder=5)

    arrow((first, 3.62), (first, 3.4))
    start = text(left, 3.2, f"shifted = word >> 4 = 0x{word >> 8:07X}", 10.5, mono=True) + 0.05
    end = text(start, 3.2, f"{chosen:X}", 10.5, mono=True, weight="bold")
    box(start - 0.025, 3.145, end - start + 0.05, 0.21, ORANGE)
    end = text(end + 0.12, 3.2, f"its low 4 bits: 0x{chosen:X} = {chosen}")
    arrow((end + 0.08, 3.25), (lane, 3.25), (lane, 2.7))

    end = text(left, 2.81, "The warp is the table:", weight="bold")
    text(end + 0.07, 2.81, "lane i holds code[i], and lanes 16 to 31 hold it again")
    text(lane + 0.12, 2.81, "Thread 5 is lane 5.", color=BLUE)
    for i, code in enumerate(CODE):
        x, color = left + i * column / 2, {chosen: ORANGE, 5: BLUE}.get(i, GREY)
        box(x, 2.2, column / 2, 0.5, color)
        text(x + column / 4, 2.52, f"lane {i}", 8, color, "center")
        text(x + column / 4, 2.3, code, 8.0, ha="center")

    arrow((lane, 2.2), (lane, 1.85), (first, 1.85), (first, 1.55))
    text(first + 0.1, 1.95, "shfl.sync.idx.b32 $0, entry, shifted, 0x101f, -1", mono=True)
    text(first + 0.1, 1.65, "hands the entry of lane 10 to lane 5; 0x101f: segments of 16 lanes")
    text(lane + 0.12, 1.95, "All 32 threads ask at once,")
    text(lane + 0.12, 1.75, "each for its own nibble.")

    for i, nibble in enumerate(nibbles):
        x, middle, color = left + i * column, first + i * column, BLUE if i else ORANGE
        box(x, 3.62, column, 0.43, color)
        text(x + 0.12, 3.79, f"weight {i}", 9, GREY)
        text(x + 0.87, 3.77, f"{nibble:X}", 13, ha="center", mono=True, weight="bold")
        box(x, 1.2, column, 0.35, color)
        text(middle, 1.325, CODE[nibble], 10.5, ha="center")
        arrow((middle, 1.2), (middle, 0.77), color=color, width=1.2 if i else 1.6)
        text(middle + 0.05, 0.96, "× scale", 8.5, GREY)
        box(x, 0.4, column, 0.37, BLUE, "white")
        text(middle, 0.54, f"weight {i}", ha="center")
    end = text(left, 0.14, "One store of 16 bytes:", color=BLUE, weight="bold")
    text(end + 0.07, 0.14, "each product, in fp32, is rounded once to 16 bits")

    axes.axhline(-0.06, left / 8.6, right / 8.6, color="#BBBBBB", lw=0.9)
    end = text(left, -0.3, "Its scale:", color=BLUE, weight="bold")
    text(
        end + 0.07,
        -0.3,
        "one for a block of 64 weights, the words of eight threads; each thread loads its own",
    )
    top, height = -0.52, 0.4
    middle = top - height / 2
    for i in range(8):
        x, color = left + 0.3 * i, BLUE if i == 5 else GREY
        box(x, top - height, 0.3, height, color)
        bold = "bold" if i == 5 else "normal"
        text(x + 0.15, middle - 0.045, f"{i}", 9.5, color, "center", weight=bold)
    text(left + 1.2, top - height - 0.2, "block 0: words 0 to 7", 8.5, GREY, "center")
    factors = [  # where it begins, its width, what stands before, in, and below it
        (2.85, 0.8, "", "absmax", "a byte per block", BLUE),
        (4.0, 1.25, "", "code2[absmax]", "fp32, one of 256", GREY),
        (5.5, 0.85, "×", "absmax2", "per 256 blocks", GREY),
        (6.6, 0.65, "+", "offset", "per tensor", GREY),
        (7.5, 1.0, "=", "scale", "of 64 weights", BLUE),
    ]
    for x, width, before, inside, below, color in factors:
        box(x, top - height, width, height, color, "white" if inside == "scale" else None)
        bold = "bold" if inside == "scale" else "normal"
        text(x + width / 2, middle - 0.045, inside, 10, INK, "center", weight=bold)
        text(x + width / 2, top - height - 0.2, below, 8.5, GREY, "center")
        text(x - 0.125, middle - 0.05, before, 11, INK, "center")
    arrow((left + 2.4, middle), (2.85, middle), color=BLUE, width=1.2)
    arrow((3.65, middle), (4.0, middle), color=BLUE, width=1.2)

    return sheet.png()


if __name__ == "__main__":
    main("warp.png", draw(), sys.argv[1:])
