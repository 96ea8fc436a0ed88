"""The data of a report's charts from a run's metrics: series, units and bands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedgraft.report.values import label, seconds_of

Lines = Sequence[Mapping[str, Any]]
"""The lines of metrics.jsonl, one per round."""
Chart = dict[str, Any]
"""Title, unit, label of the x axis, and series, as the page's script reads them."""
Points = dict[str, Any]
"""One series: its name, x, y, and `low` and `high` of its band if it has one."""
Getter = Callable[[Mapping[str, Any]], float | None]
"""Returns one number of a line; None if the round has none."""
_POINTS = 1500
"""More points per series than this would only make the page heavy; the CSV has them all."""


def run_charts(lines: Lines, best: int | None = None) -> list[Chart]:
    """Return the main charts of one run as the page's script reads them; charts without a number are left out.

    `best` is the round that is marked in the accuracy.
    """
    accuracy = _chart("Accuracy", " %", _line("validation", lines, _percent("accuracy")), _personal(lines))
    accuracy["best"] = best
    charts = [
        accuracy,
        _chart("Loss", "", _line("validation", lines, _value("loss")), _training_loss(lines)),
        _traffic(lines),
    ]
    return [chart for chart in charts if chart["series"]]


def training_charts(lines: Lines) -> list[Chart]:
    """Return the charts of local training in one run, as `run_charts` returns the main ones."""
    clients = "clients (mean, min-max)"
    applied = _line("applied", lines, _value("update_norm"))
    charts = [
        _chart("Norm of the update", "", applied, _over_clients(clients, lines, "norm")),
        _chart("Distance of the clients' updates from their mean", "", _over_clients(clients, lines, "drift")),
        _chart("Cosine of the clients' updates to their mean", "", _over_clients(clients, lines, "cosine")),
        _chart("Representation drift, 1 - SVCCA", "", *_alignment(lines)),
        _chart("Time per round", " s", *_seconds_by_phase(lines)),
    ]
    rates = {line.get("lr") for line in lines} - {None}
    if len(rates) > 1:  # a constant one is in the config
        charts.append(_chart("Learning rate", "", _line("learning rate", lines, _value("lr"))))
    return [chart for chart in charts if chart["series"]]


def bars_of_layers(layers: Lines) -> list[Chart]:
    """Return the chart of the share of each layer that trains, in percent; none without layers."""
    if not layers:
        return []
    shares = [_short(100 * layer["trained"] / max(1, layer["of"])) for layer in layers]
    names = [str(layer["name"]) for layer in layers]
    series = [{"name": "trained", "y": shares}]
    return [{"kind": "bars", "title": "Weights that train", "unit": " %", "categories": names, "series": series}]


def account_charts(account: Lines) -> list[Chart]:
    """Return the chart of the privacy account over rounds, beside its limit; none without an account."""
    if not account:
        return []
    spent = _line("epsilon spent", account, _value("epsilon"))
    limit = _line("limit", account, _value("target"))
    return [_chart(f"Epsilon at delta {account[-1].get('delta', 0):.2g}", "", spent, limit)]


AXES = {"round": "round", "megabytes": "MB up and down", "seconds": "seconds"}
"""What curves of several runs may be drawn over, with the label of the axis."""


def compare_charts(runs: Mapping[str, Lines], over: str = "round") -> list[Chart]:
    """Return the overlaid curves of several runs, one series per run, over one of `AXES`."""
    charts = [
        _overlay(runs, "Validation accuracy", " %", _percent("accuracy"), over),
        _overlay(runs, "Validation loss", "", _value("loss"), over),
        _overlay(runs, "Training loss", "", _value("train_loss"), over),
        _overlay(runs, "Norm of the update", "", _value("update_norm"), over),
        _overlay(runs, "Mean accuracy of personal models", " %", _percent("personal", "mean"), over),
        _overlay(runs, "Time per round", " s", lambda line: seconds_of(line) or None, over),
    ]
    if over == "round":
        against_traffic = _overlay(runs, "Accuracy against traffic", " %", _percent("accuracy"), "megabytes")
        charts.insert(1, against_traffic)
    return [chart for chart in charts if chart["series"]]


def _overlay(runs: Mapping[str, Lines], title: str, unit: str, get: Getter, over: str) -> Chart:
    """Return the chart of one number, which `get` reads from a line, over `over` in several runs."""
    series = []
    for name, lines in runs.items():
        series.append(_thinned_series(name, positions(lines, over), [get(line) for line in lines]))
    chart = _chart(title, unit, *series)
    chart["xlabel"] = AXES[over]
    return chart


def positions(lines: Lines, over: str) -> list[float]:
    """Return where each line stands on an axis: its round, or the megabytes or seconds up to its end."""
    if over == "round":
        return [line.get("round", i) for i, line in enumerate(lines)]
    places = []
    total = 0.0
    for line in lines:
        if over == "megabytes":
            total += ((_get(line, "bytes_up") or 0) + (_get(line, "bytes_down") or 0)) / 1e6
        else:
            total += seconds_of(line)
        places.append(total)
    return places


def _chart(title: str, unit: str, *series: Points | None) -> Chart:
    """Return a chart over rounds; missing series are left out."""
    present = [points for points in series if points is not None]
    return {"title": title, "xlabel": "round", "unit": unit, "series": present}


def _series(name: str, lines: Lines, y: Sequence[float | None], band: Sequence[Any] = ()) -> Points | None:
    """Return a series over rounds, without rounds that have no number; None if no round has one.

    `y` has one value for each line, `band` one (low, high); an empty band: none is drawn.
    """
    rounds = [line.get("round", i) for i, line in enumerate(lines)]
    return _thinned_series(name, rounds, y, band)


def _thinned_series(
    name: str, x: Sequence[float], y: Sequence[float | None], band: Sequence[Any] = ()
) -> Points | None:
    """Return at most about `_POINTS` points of a series, its extremes among them; None without a number.

    `x`, `y` and `band`, (low, high), have one entry for each point; points without `y` are left out.
    """
    present = [i for i, value in enumerate(y) if value is not None]
    if not present:
        return None
    chosen = thinned(present, y, band)
    points: Points = {"name": name, "x": [], "y": []}
    if band:
        points |= {"low": [], "high": []}
    for i in chosen:
        points["x"].append(_short(x[i]))
        points["y"].append(_short(y[i]))
        if band:
            low, high = band[i]
            points["low"].append(_short(low))
            points["high"].append(_short(high))
    return points


def thinned(present: Sequence[int], y: Sequence[Any], band: Sequence[Any] = (), limit: int = _POINTS) -> list[int]:
    """Return at most about `limit` of the indices `present`, so that no extreme of the curve is lost.

    The curve is cut into pieces; of each the lowest and the highest value stay, and with a `band` of (low, high) its
    lowest low and its highest high. The first and the last index always stay.
    """
    if len(present) <= limit:
        return list(present)
    extremes = 2
    if band:
        extremes = 4
    pieces = max(1, limit // extremes)
    chosen = {present[0], present[-1]}
    for piece in range(pieces):
        indices = present[piece * len(present) // pieces : (piece + 1) * len(present) // pieces]
        chosen.add(min(indices, key=y.__getitem__))
        chosen.add(max(indices, key=y.__getitem__))
        if band:
            banded = [i for i in indices if band[i][0] is not None]
            if banded:
                chosen.add(min(banded, key=lambda i: band[i][0]))
                chosen.add(max(banded, key=lambda i: band[i][1]))
    return sorted(chosen)


def _line(name: str, lines: Lines, get: Getter) -> Points | None:
    """Return the series `name` of one number over rounds, which `get` reads from a line; None if no round has it."""
    return _series(name, lines, [get(line) for line in lines])


def _over_clients(name: str, lines: Lines, field: str) -> Points | None:
    """Return the series `name`: mean and range over clients of the list `field` under "clients" in each line."""
    by_round = []
    for line in lines:
        by_round.append(_get(line, "clients", field) or [])
    return _mean_and_range(name, lines, by_round)


def _training_loss(lines: Lines) -> Points | None:
    """Return the training loss, with its min-max band over clients if they report theirs in the same rounds."""
    losses = []
    bands: list[tuple[float | None, float | None]] = []
    for line in lines:
        loss = _get(line, "train_loss")
        clients = _get(line, "clients", "loss") or []
        if None in clients:
            clients = [value for value in clients if value is not None]
        losses.append(loss)
        if clients:
            bands.append((min(clients), max(clients)))
        else:
            bands.append((None, None))
    for loss, (low, _) in zip(losses, bands, strict=True):
        if (loss is None) != (low is None):
            return _series("training", lines, losses)
    return _series("training (min-max over clients)", lines, losses, bands)


def _alignment(lines: Lines) -> list[Points | None]:
    """Return one series of representation drift for each layer."""
    layers: dict[str, None] = {}
    for line in lines:
        if line.get("alignment"):
            layers |= dict.fromkeys(line["alignment"])
    series = []
    for layer in layers:
        drift = []
        for line in lines:
            scores = _get(line, "alignment", layer) or []
            drift.append([1 - score for score in scores])
        series.append(_mean_and_range(layer, lines, drift))
    return series


def _seconds_by_phase(lines: Lines) -> list[Points | None]:
    """Return one series of seconds for each phase of a round."""
    phases: dict[str, None] = {}
    for line in lines:
        seconds = line.get("seconds")
        if isinstance(seconds, dict) and not seconds.keys() <= phases.keys():
            phases |= dict.fromkeys(seconds)
    series = []
    for phase in phases:
        series.append(_line(label(phase), lines, _value("seconds", phase)))
    return series


def _mean_and_range(name: str, lines: Lines, by_round: Sequence[Sequence[Any]]) -> Points | None:
    """Return the mean over a round's clients with a band from minimum to maximum.

    `by_round` holds the clients' values for each line.
    """
    means: list[float | None] = []
    bands: list[tuple[float | None, float | None]] = []
    for values in by_round:
        present = values
        if None in values:
            present = [value for value in values if value is not None]
        if present:
            means.append(sum(present) / len(present))
            bands.append((min(present), max(present)))
        else:
            means.append(None)
            bands.append((None, None))
    return _series(name, lines, means, bands)


def _personal(lines: Lines) -> Points | None:
    """Return the mean accuracy of personal models with its min-max band."""
    if not any("personal" in line for line in lines):
        return None
    mean = _percent("personal", "mean")
    low = _percent("personal", "min")
    high = _percent("personal", "max")
    means = []
    bands = []
    for line in lines:
        means.append(mean(line))
        bands.append((low(line), high(line)))
    return _series("personal models", lines, means, bands)


def _traffic(lines: Lines) -> Chart:
    """Return the chart of bytes sent so far in both directions.

    If both directions agree to a hundredth, one series stands for both instead of covering the other.
    """
    up = _cumulative(lines, "bytes_up")
    down = _cumulative(lines, "bytes_down")
    largest = max([*up, *down], default=0)
    scale = 1e6
    unit = " MB"
    if largest >= 1e9:
        scale = 1e9
        unit = " GB"
    alike = all(abs(a - b) <= 0.01 * largest for a, b in zip(up, down, strict=True))
    directions = {"up": up, "down": down}
    if alike:
        directions = {"up, and as much down": up}
    series = []
    for name, sums in directions.items():
        if any(sums):
            series.append(_series(name, lines, [count / scale for count in sums]))
    return _chart("Sent so far", unit, *series)


def _cumulative(lines: Lines, key: str) -> list[int]:
    """Return, for each line, the sum of the count `key` up to it."""
    sums = []
    total = 0
    for line in lines:
        total += _get(line, key) or 0
        sums.append(total)
    return sums


def _get(line: Mapping[str, Any], *keys: str) -> Any:
    """Return the value under nested keys; None if one is missing."""
    value: Any = line.get(keys[0])
    for key in keys[1:]:
        if not isinstance(value, dict):  # as JSON has it; asking for any mapping takes five times as long
            return None
        value = value.get(key)
    return value


def _value(*keys: str) -> Getter:
    """Return the getter of the number under nested keys."""
    return lambda line: _get(line, *keys)


def _percent(*keys: str) -> Getter:
    """Return the getter of the share under nested keys, in percent."""

    def get(line: Mapping[str, Any]) -> float | None:
        """Return the share of a line in percent; None if it has none."""
        share = _get(line, *keys)
        if share is None:
            return None
        return float(100 * share)

    return get


def _short(value: float | None) -> float | None:
    """Return a number with six significant digits."""
    if value is None:
        return None
    return float(f"{value:.6g}")
