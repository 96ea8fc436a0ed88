"""Who gains, as a page shows it: from the numbers of `fedgraft worth`, for its own page and for the studio.

The numbers are those of worth.json: by metric, one entry a site with `name`, `images`, `models` (a metric each), `gain`
and `verdict`; a metric has `value`, `low`, `high` and `unit`, or is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.report.run_record import damaged_json
from fedgraft.report.sections import Charts, Grid, Part, Section, Texts
from fedgraft.report.values import label

FILE = "worth.json"
VERDICTS = {"gains": "c2", "loses": "c1", "inconclusive": "c6"}
"""Each verdict with the colour of its points."""
NOTE = (
    "Each number is on the site's own test images, with its 95 % interval. The difference is paired on these images "
    "(bootstrap); if its interval contains zero, it is inconclusive. Federated: the delivered model, of the best "
    "round by validation. Alone: local_only to the last round, where every site trains its copy of the network, "
    "from a head of its own images. Pooled: all images in one place, about as often, which only a simulation can do."
)
Numbers = Mapping[str, Sequence[Mapping[str, Any]]]
Value = Mapping[str, Any] | None


def read_worth(folder: Path) -> dict[str, Any]:
    """Return the numbers of the worth page of the run in `folder`; empty if there is none."""
    path = folder / "worth" / FILE
    if not path.is_file():
        return {}
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
        for metric, sites in numbers.items():
            for site in sites:
                site_row(site, list(site["models"]))
            worth_charts(metric, sites, list(sites[0]["models"]))
        return dict(numbers)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise damaged_json(path, error) from error


def worth_sections(numbers: Numbers, tab: str = "worth") -> list[Section]:
    """Return a section for each metric: the verdicts, the models and the differences as points, and a table."""
    sections = []
    for position, (metric, sites) in enumerate(numbers.items()):
        heading = label(metric)[:1].upper() + label(metric)[1:]
        models = list(sites[0]["models"])
        parts: list[Part] = [
            Texts([verdict_line(metric, sites)]),
            Charts(worth_charts(metric, sites, models), f"worth-{position}"),
            Grid([site_row(site, models) for site in sites]),
        ]
        sections.append(Section(f"{heading} by site", parts, tab=tab))
    if sections:
        sections.append(Section("How to read it", [Texts([NOTE])], tab=tab))
    return sections


def verdict_line(metric: str, sites: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentence that names who gains, who loses, and where the difference is inconclusive."""
    parts = []
    for verdict in VERDICTS:
        names = [str(site["name"]) for site in sites if site["verdict"] == verdict]
        parts.append(f"{verdict}: {', '.join(names) or 'nobody'}")
    return f"By {label(metric)}, federated against alone: {'; '.join(parts)}."


def site_row(site: Mapping[str, Any], models: Sequence[str]) -> dict[str, object]:
    """Return one site's row of the page's table, with a column for each of the models."""
    row: dict[str, object] = {
        "site": str(site["name"]),
        "": str(site["verdict"]),
        "federated minus alone": value_text(site["gain"], "+"),
    }
    for model in models:
        row[model] = value_text(site["models"][model])
    row["test images"] = int(site["images"])
    return row


def worth_charts(metric: str, sites: Sequence[Mapping[str, Any]], models: Sequence[str]) -> list[dict[str, Any]]:
    """Return two charts: each model at each site, and the differences, both with their intervals."""
    names = [str(site["name"]) for site in sites]
    series = []
    for model in models:
        series.append({"name": model, **_points([site["models"][model] for site in sites])})
    gains = [site["gain"] for site in sites]
    colours = [VERDICTS[site["verdict"]] for site in sites]
    unit = ""
    gain_unit = ""
    if any(_is_share(value) for site in sites for value in site["models"].values()):
        unit = " %"
        gain_unit = " points"
    better = ""
    if sites[0].get("less_is_better"):
        better = ", below 0 is better"
    models_chart = {"title": f"{label(metric)} of each model at each site", "unit": unit, "series": series}
    gain_series = {"name": "federated minus alone", **_points(gains), "colours": colours}
    gain_chart = {"title": f"Federated minus alone{better}", "unit": gain_unit, "series": [gain_series], "zero": True}
    charts = []
    for chart in (models_chart, gain_chart):
        charts.append({"kind": "intervals", "categories": names, **chart})
    return charts


def _points(values: Sequence[Value]) -> dict[str, list[float | None]]:
    """Return values and limits as series of a chart, shares as percent; None where there is no value."""
    points: dict[str, list[float | None]] = {"y": [], "low": [], "high": []}
    for value in values:
        for key, name in (("y", "value"), ("low", "low"), ("high", "high")):
            number = None
            if value is not None and value[name] is not None:
                number = _scale(value) * float(value[name])
            points[key].append(number)
    return points


def _is_share(value: Value) -> bool:
    """Return whether a value is a fraction that is shown as percent."""
    return value is not None and value["unit"] in ("%", "points")


def _scale(value: Value) -> float:
    """Return what a value is multiplied by where it is shown."""
    if _is_share(value):
        return 100.0
    return 1.0


def value_text(value: Value, sign: str = "") -> str:
    """Return a number with its interval as text; `sign` "+" writes the sign of positive numbers too."""
    if value is None:
        return "–"
    scale = _scale(value)
    unit = ""
    digits = 2
    if _is_share(value):
        unit = f" {value['unit']}"
        digits = 0
    text = f"{scale * value['value']:{sign}z.{digits}f}{unit}"
    if value["low"] is None or value["high"] is None:
        return text
    return f"{text} ({scale * value['low']:{sign}z.{digits}f} to {scale * value['high']:{sign}z.{digits}f})"
