"""What the drawings of the notebook share: a sheet to draw on, and their place in the notebook."""

import base64
import io
from pathlib import Path

import nbformat
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "nf4_triton.ipynb"
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREY = "#666666"  # labels, and what stands in the background
INK = "#222222"
PALE = {BLUE: "#E3EFF7", ORANGE: "#FBE3D2", GREY: "#F4F4F4"}


class Sheet:
    """A white sheet, 1000 pixels wide; lengths are inches, y goes up from `low` to `high`."""

    def __init__(self, width, low, high):
        self.figure = Figure(figsize=(width, high - low), dpi=1000 / width)
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(low, high))
        self.axes.axis("off")

    def text(self, x, y, string, size=9.5, color=INK, ha="left", mono=False, **more):
        """Where the text ends."""
        more |= {"family": "DejaVu Sans Mono" if mono else "DejaVu Sans", "zorder": 4}
        artist = self.axes.text(x, y, string, size=size, color=color, ha=ha, **more)
        return artist.get_window_extent().x1 / self.figure.dpi

    def box(self, x, y, width, height, color, fill=None):
        edge, z = {GREY: ("#BBBBBB", 1), BLUE: (BLUE, 2), ORANGE: (ORANGE, 3)}[color]
        looks = {"ec": edge, "fc": fill or PALE[color], "lw": 0.9, "zorder": z}
        self.axes.add_patch(Rectangle((x, y), width, height, **looks))

    def arrow(self, *points, color=ORANGE, width=1.6):
        self.axes.plot(*zip(*points[:-1]), color=color, lw=width, solid_joinstyle="miter", zorder=4)
        style = {"arrowstyle": "-|>,head_width=0.2,head_length=0.42", "color": color, "lw": width}
        style |= {"shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", points[-1], points[-2], arrowprops=style, zorder=4)

    def png(self):
        drawn, png = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, facecolor="white")
        image = Image.open(drawn).convert("RGB").quantize(64)  # a third of the bytes
        image.save(png, "png", optimize=True)
        return png.getvalue()


def attach(name, png, notebook=NOTEBOOK):
    """The picture becomes an attachment of the one cell that shows it; nothing else changes."""
    content = nbformat.read(notebook, as_version=nbformat.NO_CONVERT)
    showing = []
    for cell in content.cells:
        if cell.cell_type == "markdown" and f"attachment:{name}" in cell.source:
            showing.append(cell)
    if len(showing) != 1:
        found = f"{len(showing)} of {notebook.name}'s cells show attachment:{name}"
        raise SystemExit(f"expected one, but {found}; nothing was attached")
    attachments = showing[0].setdefault("attachments", {})
    attachments[name] = {"image/png": base64.b64encode(png).decode()}
    nbformat.write(content, notebook)


def main(name, png, arguments):
    """Into results/ and the notebook; or, where an argument names a file, there alone."""
    if arguments:
        Path(arguments[0]).write_bytes(png)
    else:
        (ROOT / "results" / name).write_bytes(png)
        attach(name, png)
