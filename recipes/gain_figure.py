"""The README's first picture: each site alone, federated and pooled, from `worth.json` of runs of several seeds.

python recipes/gain_figure.py docs/images/gain.png balanced_accuracy RUN RUN RUN
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from fedgraft.report.figures import canvas

MODELS = {
    "alone": ("each site alone", "#999999"),
    "federated": ("federated", "#0072B2"),
    "pooled": ("pooled", "#009E73"),
}
"""Models of a worth page with their names and colours, from left to right."""
WIDTH = 0.24  # of a group of three, which takes 1


def values_of(runs: Sequence[Path], metric: str) -> dict[str, dict[str, list[float]]]:
    """Return by site and model the value of each run in percent."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for site in json.loads((run / "worth" / "worth.json").read_text())[metric]:
            label = f"{site['name']}\n{site['images']:,} test images"
            for model in MODELS:
                value = 100 * site["models"][model]["value"]
                values.setdefault(label, {}).setdefault(model, []).append(value)
    return values


def draw(path: Path, metric: str, runs: Sequence[Path]) -> Path:
    """Draw bars of the mean over the runs, one standard deviation to each side, and a point for each run."""
    values = values_of(runs, metric)
    with canvas(path, "", (9.0, 3.4)) as figure:
        axes = figure.subplots()
        for position, (model, (name, colour)) in enumerate(MODELS.items()):
            places = [site + (position - 1) * WIDTH for site in range(len(values))]
            means = [mean(by_model[model]) for by_model in values.values()]
            spread = [stdev(by_model[model]) for by_model in values.values()]
            axes.bar(places, means, WIDTH * 0.94, color=colour, label=name)
            axes.errorbar(places, means, spread, fmt="none", ecolor="#333333", capsize=3, linewidth=1)
            for place, by_model in zip(places, values.values(), strict=True):
                axes.plot([place] * len(runs), by_model[model], ".", color="#333333", markersize=4)
        axes.set_xticks(range(len(values)), list(values))
        axes.set_ylabel(f"{metric.replace('_', ' ')} (%)")
        axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=len(MODELS), frameon=False)
    for label, by_model in values.items():
        cells = [f"{name} {mean(by_model[name]):.1f} ± {stdev(by_model[name]):.1f}" for name in MODELS]
        print(f"{label.splitlines()[0]}: {', '.join(cells)}")
    return path


if __name__ == "__main__":
    target, chosen, *folders = sys.argv[1:]
    print(draw(Path(target), chosen, [Path(folder) for folder in folders]))
