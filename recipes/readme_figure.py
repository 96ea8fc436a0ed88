"""The README's picture from run folders: how validation accuracy climbs by round, and what it cost in megabytes.

python recipes/readme_figure.py docs/images/climb.png "last four blocks=RUN" "a tenth of them=RUN" "head only=RUN"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from fedgraft.report.figures import canvas, label_axes, line_styles, plain_text, plot_lines
from fedgraft.runs.folder import RunFolder


def climb(path: Path, runs: Mapping[str, Path], title: str = "", rounds: int = 20) -> Path:
    """Draw runs beside each other: accuracy by round (the first `rounds`), and by megabytes up and down (all)."""
    by_round, by_bytes = {}, {}
    for name, folder in runs.items():
        lines = RunFolder.open(folder).metrics()
        sent = accumulate((line.get("bytes_up", 0) + line.get("bytes_down", 0)) / 1e6 for line in lines)
        seen = [
            (line["round"], m, 100 * line["accuracy"])
            for line, m in zip(lines, sent, strict=True)
            if line.get("accuracy") is not None
        ]
        early = [(r, a) for r, _, a in seen if r <= rounds]
        if len(early) > 2:  # a line between two points would be no curve
            by_round[name] = tuple(zip(*early, strict=True))
        by_bytes[name] = tuple(zip(*((max(m, 1.0), a) for _, m, a in seen), strict=True))
    with canvas(path, title, (10.0, 3.8)) as figure:
        style = dict(zip(runs, line_styles(), strict=False))
        left, right = figure.subplots(1, 2, sharey=True)
        plot_lines(left, by_round, style)
        handles = plot_lines(right, by_bytes, style)
        right.set_xscale("log")
        right.xaxis.set_major_formatter("{x:,.0f}")
        label_axes(left, "round", "validation accuracy (%)")
        label_axes(right, "megabytes sent, up and down (from 1)", "")
        figure.legend(handles.values(), map(plain_text, handles), loc="outside lower center", ncols=len(handles))
    return path


if __name__ == "__main__":
    target, *words = sys.argv[1:]
    named = dict(word.split("=", 1) for word in words)
    title = "ViT-tiny on CIFAR-100 among 100 clients, ten a round"
    print(climb(Path(target), {name: Path(folder) for name, folder in named.items()}, title))
