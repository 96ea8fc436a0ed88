"""The figures of docs/report: `python -m reproduction.report_figures`, from the kept numbers alone.

`rates.png`: one surface, over the learning rate and over how far a step reaches. `similarity.png`: models per client by
how they are mixed. `masks.png`: what a tenth of the last block gains where it trains, and keeps where edits are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from reproduction.answer_figure import interval_of
from reproduction.answers import Part, read
from reproduction.drawing.answer import Panel, Point, answer

MOMENTUM = 0.9
RATES = ("0.001", "0.003", "0.01", "0.0333", "0.1", "0.3")


def reach(steps: int, momentum: float = MOMENTUM) -> float:
    """Return how far a step reaches on average, in rates: SGD with momentum, begun at rest in every round."""
    velocity = 0.0
    moved = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        moved += velocity
    return moved / steps


def rate_panels(surface: Part) -> list[Panel]:
    """Return the surface IID over the rate itself, and over the rate times what a step reaches."""
    by_rate: dict[str, list[Point]] = {}
    by_reach: dict[str, list[Point]] = {}
    for steps in (1, 4, 8, 16):
        name = f"J={steps}"
        for rate in RATES:
            interval = interval_of(surface.series(f"IID/{name}/{rate}", "last"))
            if interval is not None:
                by_rate.setdefault(name, []).append((float(rate), interval))
                by_reach.setdefault(name, []).append((float(rate) * reach(steps), interval))
    left = Panel("over the learning rate", "learning rate; learning rate x reach of a step", _VALIDATION, by_rate, True)
    right = Panel("over the rate times how far a step of J reaches", "", "", by_reach, True)
    return [left, right]


def similarity_panels(known: Part) -> list[Panel]:
    """Return what every arm reaches at its own fine-tuning rate, on both partitions."""
    panels = []
    for partition in ("s=10", "two groups"):
        rows = {}
        for levels in known.numbers.get("cells", {}):
            here, method = levels.split("/")
            interval = interval_of(known.series(levels, "finetuned"))
            if here == partition and interval is not None:
                rows[method] = interval
        if rows:
            panels.append(
                Panel(partition, "mean client accuracy at each arm's own fine-tuning rate (%)", "", rows=rows)
            )
    return panels


def mask_panels(body: Part) -> list[Panel]:
    """Return what each choice of a tenth reaches where it trains, IID and with ten classes per client."""
    panels = []
    choices: Mapping[str, Sequence[str]] = {
        "IID": ("dense", "highest magnitude", "most sensitive", "LoRA", "random", "head", "least sensitive", "start"),
        "N_c=10": ("dense", "random", "head", "least sensitive"),
    }
    for partition, arms in choices.items():
        rows = {}
        for arm in arms:
            interval = interval_of(body.series(f"{partition}/{arm}", "test"))
            if interval is not None:
                rows[arm] = interval
        if rows:
            panels.append(Panel(partition, "test accuracy after 40 rounds behind a fixed head (%)", "", rows=rows))
    return panels


_VALIDATION = "validation accuracy (%)"


def main(results: Path = Path("docs/results"), out: Path = Path("docs/report")) -> None:
    """Draw what the kept numbers have."""
    kept = read(results)
    figures = {
        "rates.png": (rate_panels(kept["q2"]["surface"]), "One surface, two axes: 800 local steps, IID"),
        "similarity.png": (similarity_panels(kept["q4"]["known"]), "One model per client, by how models are mixed"),
        "masks.png": (mask_panels(kept["q3"]["body"]), "A tenth of the last block, chosen in different ways"),
    }
    for name, (panels, title) in figures.items():
        if panels:
            typer.echo(answer(out / name, [], panels, title))


if __name__ == "__main__":
    typer.run(main)
