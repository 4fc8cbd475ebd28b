"""Draws results/warp.png: how a warp is the look-up table, and where a word's scale comes from.

    python tools/draw.py

Blue: thread 5 and what it holds. Orange: the way of its first weight. Grey: what others hold.
"""

import io
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

PICTURE = Path(__file__).resolve().parent.parent / "results" / "warp.png"
BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#666666", "#222222"
PALE = {BLUE: "#E3EFF7", ORANGE: "#FBE3D2", GREY: "#F4F4F4"}
CODE = "–1.00 –0.70 –0.53 –0.39 –0.28 –0.18 –0.09 0.00".split()  # en dashes fit into a lane
CODE += "0.08 0.16 0.25 0.34 0.44 0.56 0.72 1.00".split()
BYTES = (0xA7, 0x3C, 0x5F, 0x08)  # as they lie in memory
NIBBLES = [nibble for byte in BYTES for nibble in (byte >> 4, byte & 0xF)]
WIDTH, HEIGHT = 16.0, 14.0  # a lane is one wide; y goes down from 0
COLUMN, FIRST = WIDTH / 8, WIDTH / 16  # of a weight; the middle of the first
SCALE = (  # x, width, what stands in a box, below it, before it
    (0.0, 3.9, "code2[absmax]", "absmax: 1 per block", ""),
    (5.0, 3.2, "absmax2", "per 256 blocks", "×"),
    (9.3, 2.6, "offset", "per tensor", "+"),
    (13.0, 3.0, "scale", "of 64 weights", "="),
)


class Sheet:
    """White, 1100 pixels wide, with letters that half of that leaves readable."""

    def __init__(self):
        self.figure = Figure(figsize=(10, 10 * HEIGHT / WIDTH), dpi=110)
        self.axes = self.figure.add_axes((0.01, 0, 0.98, 1), xlim=(0, WIDTH), ylim=(-HEIGHT, 0))
        self.axes.axis("off")

    def text(self, x, y, string, color=INK, size=15, ha="center", **more):
        """Where it ends."""
        more |= {"color": color, "size": size, "ha": ha, "va": "center", "zorder": 4}
        extent = self.axes.text(x, y, string, **more).get_window_extent()
        return extent.transformed(self.axes.transData.inverted()).x1

    def heading(self, x, y, string, more):
        end = self.text(x, y, string, BLUE, size=16, ha="left", weight="bold")
        self.text(end + 0.25, y, more, ha="left")

    def box(self, x, y, width, color, string, **more):
        looks = {"ec": color, "fc": PALE[color], "lw": 1.2, "zorder": 1 + (color != GREY)}
        self.axes.add_patch(Rectangle((x, y - 0.45), width, 0.9, **looks))
        self.text(x + width / 2, y - 0.03, string, **more)

    def arrow(self, *points, color=ORANGE):
        looks = {"color": color, "lw": 2}
        self.axes.plot(*zip(*points[:-1]), solid_joinstyle="miter", zorder=3, **looks)
        looks |= {"arrowstyle": "-|>,head_width=0.25,head_length=0.5", "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", points[-1], points[-2], arrowprops=looks)


def draw():
    sheet = Sheet()
    named, lane = NIBBLES[0], NIBBLES[0] + 0.5  # the lane that the first nibble names; its middle

    sheet.heading(0, -0.5, "Thread 5 loads a word:", "a nibble for each of eight weights")
    for i, byte in enumerate(BYTES):
        sheet.text((2 * i + 1) * COLUMN, -1.25, f"byte {i} = 0x{byte:02X}", GREY)
    for i, nibble in enumerate(NIBBLES):
        sheet.box(i * COLUMN, -2.1, COLUMN, BLUE if i else ORANGE, f"{nibble:X}", size=21)
    sheet.arrow((FIRST, -2.55), (FIRST, -3.2), (lane, -3.2), (lane, -4.4))
    sheet.text(FIRST + 0.3, -2.87, f"nibble {named:X} names lane {named}", ORANGE, ha="left")

    sheet.heading(0, -3.85, "The warp is the table:", "lane i holds code[i]")
    sheet.text(lane + 0.5, -3.85, "(lanes 16 to 31: once more)", GREY, ha="left")
    for i, code in enumerate(CODE):
        color = {named: ORANGE, 5: BLUE}.get(i, GREY)
        sheet.box(i, -4.85, 1, color, code, size=13.5)
        sheet.text(i + 0.5, -5.57, str(i), color)
    sheet.arrow((lane, -5.85), (lane, -6.45), (FIRST, -6.45), (FIRST, -7.65))
    sheet.text(FIRST + 0.3, -6.12, "a shuffle hands its entry to lane 5", ORANGE, ha="left")

    sheet.heading(FIRST + 0.3, -7.1, "Eight shuffles", "for eight weights; 32 threads ask at once")
    for i, nibble in enumerate(NIBBLES):
        x, color = i * COLUMN, BLUE if i else ORANGE
        sheet.box(x, -8.1, COLUMN, color, CODE[nibble], size=17)
        sheet.arrow((x + 0.35, -8.55), (x + 0.35, -9.35), color=color)
        sheet.text(x + 0.55, -8.93, "× scale", GREY, ha="left")
        sheet.box(x, -9.8, COLUMN, BLUE, f"weight {i}")
    sheet.heading(0, -10.7, "One store of 16 bytes:", "each fp32 product, rounded to fp16 or bf16")

    sheet.axes.axhline(-11.25, color="#BBBBBB")
    sheet.heading(
        0, -11.8, "Its scale:", "one for a block of 64 weights, the words of eight threads"
    )
    for x, width, inside, below, before in SCALE:
        sheet.box(x, -12.75, width, BLUE if inside == "scale" else GREY, inside)
        sheet.text(x + width / 2, -13.5, below, GREY)
        sheet.text(x - 0.55, -12.75, before, size=18)
    return sheet


def main():
    drawn = io.BytesIO()
    draw().figure.savefig(drawn, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(64).save(PICTURE, optimize=True)  # a third of it


if __name__ == "__main__":
    main()
