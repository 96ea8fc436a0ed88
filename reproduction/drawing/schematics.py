"""Two drawings without data: the two ways of training side by side (F20), and one round of FedSHIBU (F26)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedgraft.report.figures import INK, PALETTE, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
_FILL = {"data": "#FBE3D3", "model": "#D6E8F4", "server": "#D5EFE6", "result": "#EFEFEF"}


def pipelines_schematic(path: Path | str, title: str = "Centralised and federated training") -> Path:
    """F20: the same pretrained backbone adapted from pooled images, and from updates that clients send."""
    with canvas(path, title, (9.6, 5.4)) as figure:
        axes = _sheet(figure, 96, 50)
        _centralised(axes)
        _federated(axes)
    return Path(path)


def fedshibu_schematic(path: Path | str, title: str = "FedSHIBU: one round") -> Path:
    """F26: bodies travel to the server, are mixed by similarity, and come back, another one for each client."""
    with canvas(path, title, (9.6, 5.0)) as figure:
        axes = _sheet(figure, 96, 46)
        for i, (name, y) in enumerate([("client 1", 32), ("client 2", 18), ("client 3", 4)]):
            axes.text(1, y + 10.4, f"{name}: private images", fontsize=10)
            _box(axes, (1, y), (11, 8.6), f"body $\\theta_{i + 1}$", "model", PALETTE[i])
            _box(axes, (13, y), (9, 8.6), "head\n(fixed)", "result")
            _arrow(axes, (22.6, y + 5.6), (35.4, 24 + (1 - i) * 3.2), PALETTE[i])
        _box(
            axes, (36, 14), (17, 20), "server:\nsimilarity of\nrepresentations\n(CKA), rows\nscaled to sum 1", "server"
        )
        _matrix(axes, (59, 16.5), 5.0)
        _arrow(axes, (53.6, 24), (58.4, 24))
        axes.text(66.5, 33.2, "weights $w_{ij}$", ha="center", fontsize=10)
        for i, y in enumerate([32, 18, 4]):
            _arrow(axes, (74.8, 24 + (1 - i) * 5), (80.4, y + 4.3), PALETTE[i])
            text = f"$\\theta_{i + 1} \\leftarrow$\n$\\Sigma_j w_{{{i + 1}j}}\\,\\theta_j$"
            _box(axes, (81, y), (14, 8.6), text, "model", PALETTE[i])
        axes.text(81, 42.4, "back to each client", fontsize=10)
        axes.text(29, 39.5, "bodies only", ha="center", fontsize=10, style="italic")
    return Path(path)


def _centralised(axes: Axes) -> None:
    axes.text(1, 46.5, "Centralised", fontsize=11, fontweight="bold")
    steps = [("images of\nall owners", "data"), ("train, validation\nand test split", "data")]
    steps += [("pretrained backbone\n+ new head", "model"), ("train head, all,\nor masked weights", "model")]
    for i, (text, kind) in enumerate(steps):
        _box(axes, (1 + 19.5 * i, 36), (16, 8.5), text, kind)
        _arrow(axes, (17.6 + 19.5 * i, 40.2), (20 + 19.5 * i, 40.2))
    _box(axes, (79, 36), (16, 8.5), "best by validation,\ntested once", "result")


def _federated(axes: Axes) -> None:
    axes.text(1, 31, "Federated", fontsize=11, fontweight="bold")
    for i, y in enumerate([21.5, 11.5, 1.5]):
        name = ["client 1", "client 2", "client K"][i]
        _box(axes, (1, y), (16, 7.6), f"{name}: its\nown images", "data")
        _box(axes, (20.5, y), (17, 7.6), "J local steps on\nthe coordinates\nthat may move", "model")
        _arrow(axes, (17.6, y + 3.8), (19.9, y + 3.8))
        _arrow(axes, (38.1, y + 4.8), (52.4, 16.6 + (1 - i) * 2.4))
        _arrow(axes, (52.4, 14.2 + (1 - i) * 2.4), (38.1, y + 2.4), PALETTE[0])
    axes.text(44.5, 27.6, "updates", ha="center", fontsize=10, style="italic")
    axes.text(44.5, 2.2, "model", ha="center", fontsize=10, style="italic", color=PALETTE[0])
    _box(axes, (53, 10), (19, 11), "server: weighted sum\nof updates, then\none step", "server")
    _box(axes, (79, 11.2), (16, 8.5), "best by validation,\ntested once", "result")
    _arrow(axes, (72.6, 15.4), (78.4, 15.4))
    axes.text(62.5, 23, "T rounds", ha="center", fontsize=10, style="italic")


def _sheet(figure: Figure, width: float, height: float) -> Axes:
    axes = figure.add_subplot()
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return axes


def _box(axes: Axes, corner: Point, size: Point, text: str, kind: str, edge: str = "#777777") -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=1.2"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=shape, facecolor=_FILL[kind], edgecolor=edge, linewidth=1.4))
    axes.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", fontsize=9.5, color=INK)


def _arrow(axes: Axes, start: Point, end: Point, colour: str = "#555555") -> None:
    from matplotlib.patches import FancyArrowPatch

    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, linewidth=1.4, color=colour))


def _matrix(axes: Axes, corner: Point, side: float) -> None:
    """A three by three matrix: clients 1 and 2 are alike, client 3 is not."""
    from matplotlib.patches import Rectangle

    weights = [[0.48, 0.40, 0.12], [0.40, 0.48, 0.12], [0.15, 0.15, 0.70]]
    for row, line in enumerate(weights):
        for column, weight in enumerate(line):
            at = (corner[0] + column * side, corner[1] + (2 - row) * side)
            axes.add_patch(Rectangle(at, side, side, facecolor=PALETTE[0], alpha=weight, edgecolor="none"))
            axes.add_patch(Rectangle(at, side, side, facecolor="none", edgecolor="white", linewidth=1.5))
            axes.text(
                at[0] + side / 2, at[1] + side / 2, f".{weight * 100:.0f}", ha="center", va="center", fontsize=9.5
            )
