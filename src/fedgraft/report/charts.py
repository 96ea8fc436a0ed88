"""From a run's metrics to the charts of its report: which lines, in which unit, with which band."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from fedgraft.report.values import label, seconds_of

Lines = Sequence[Mapping[str, Any]]
_POINTS = 1500
"""More points than this per line would only make the page heavy; the CSV has them all."""


def run_charts(lines: Lines, best: int | None = None) -> list[dict[str, Any]]:
    """The charts of one run, with its best round marked; those without a number are left out."""
    phases = dict.fromkeys(key for line in lines for key in _phases(line))
    layers = dict.fromkeys(key for line in lines for key in line.get("alignment") or {})
    applied = _line("applied", lines, _value("update_norm"))
    clients = "clients (mean, least to most)"
    charts = [
        _chart("Accuracy", " %", _line("validation", lines, _percent("accuracy")), _personal(lines)) | {"best": best},
        _chart("Loss", "", _line("validation", lines, _value("loss")), _training(lines)),
        _sent(lines),
    ]
    more = [
        _chart("Norm of the update", "", applied, _clients(clients, lines, "norm")),
        _chart("Distance of the clients' updates from their mean", "", _clients(clients, lines, "drift")),
        _chart("Cosine of the clients' updates to their mean", "", _clients(clients, lines, "cosine")),
        _chart("Representation drift, 1 - SVCCA", "", *(_alignment(lines, layer) for layer in layers)),
        _chart("Time per round", " s", *(_line(label(name), lines, _value("seconds", name)) for name in phases)),
    ]
    if len({line.get("lr") for line in lines} - {None}) > 1:  # a constant one is in the config
        more.append(_chart("Learning rate", "", _line("learning rate", lines, _value("lr"))))
    return [chart for chart in charts + [chart | {"place": "more"} for chart in more] if chart["series"]]


def compare_charts(runs: Mapping[str, Lines]) -> list[dict[str, Any]]:
    """The curves of several runs over each other, one line per run."""
    wanted: list[tuple[str, str, Callable[[Mapping[str, Any]], float | None]]] = [
        ("Validation accuracy", " %", _percent("accuracy")),
        ("Validation loss", "", _value("loss")),
        ("Training loss", "", _value("train_loss")),
        ("Norm of the update", "", _value("update_norm")),
        ("Mean accuracy of personal models", " %", _percent("personal", "mean")),
        ("Time per round", " s", lambda line: seconds_of(line) or None),
    ]
    charts = [_chart(title, unit, *(_line(n, run, get) for n, run in runs.items())) for title, unit, get in wanted]
    charts.insert(1, _chart("Accuracy against traffic", " %", *(_against_bytes(n, run) for n, run in runs.items())))
    charts[1]["xlabel"] = "MB up and down"
    return [chart for chart in charts if chart["series"]]


def _chart(title: str, unit: str, *series: dict[str, Any] | None) -> dict[str, Any]:
    return {"title": title, "xlabel": "round", "unit": unit, "series": [s for s in series if s is not None]}


def _series(name: str, lines: Lines, y: Sequence[float | None], band: Sequence[Any] = ()) -> dict[str, Any] | None:
    """One line over rounds, without the rounds that have no number; None when no round has one."""
    rounds = [line.get("round", i) for i, line in enumerate(lines)]
    return _thin(name, rounds, y, band)


def _thin(name: str, x: Sequence[float], y: Sequence[float | None], band: Sequence[Any] = ()) -> dict[str, Any] | None:
    seen = [i for i, value in enumerate(y) if value is not None]
    if not seen:
        return None
    step = -(-len(seen) // _POINTS)
    kept = sorted({*seen[::step], seen[-1]})
    series = {"name": name, "x": [_short(x[i]) for i in kept], "y": [_short(y[i]) for i in kept]}
    if band:
        series |= {"low": [_short(band[i][0]) for i in kept], "high": [_short(band[i][1]) for i in kept]}
    return series


def _line(name: str, lines: Lines, get: Callable[[Mapping[str, Any]], float | None]) -> dict[str, Any] | None:
    return _series(name, lines, [get(line) for line in lines])


def _clients(name: str, lines: Lines, field: str) -> dict[str, Any] | None:
    return _spread(name, lines, [_get(line, "clients", field) or [] for line in lines])


def _training(lines: Lines) -> dict[str, Any] | None:
    """The training loss, with a band over the clients where they tell theirs."""
    told, clients = _line("training", lines, _value("train_loss")), _clients("", lines, "loss")
    if told is None or clients is None or told["x"] != clients["x"]:
        return told
    return told | {"name": "training (least to most client)", "low": clients["low"], "high": clients["high"]}


def _alignment(lines: Lines, layer: str) -> dict[str, Any] | None:
    return _spread(layer, lines, [[1 - v for v in _get(line, "alignment", layer) or []] for line in lines])


def _spread(name: str, lines: Lines, found: Sequence[Sequence[float | None]]) -> dict[str, Any] | None:
    """The mean over a round's clients with a band from the least to the most."""
    every = [[v for v in values if v is not None] for values in found]
    means = [sum(values) / len(values) if values else None for values in every]
    return _series(name, lines, means, [(min(values, default=None), max(values, default=None)) for values in every])


def _personal(lines: Lines) -> dict[str, Any] | None:
    low, mean, high = ([_percent("personal", key)(line) for line in lines] for key in ("min", "mean", "max"))
    return _series("personal models", lines, mean, list(zip(low, high, strict=True)))


def _against_bytes(name: str, lines: Lines) -> dict[str, Any] | None:
    moved = accumulate((_get(line, "bytes_up") or 0) + (_get(line, "bytes_down") or 0) for line in lines)
    megabytes = [number / 1e6 for number in moved]
    return _thin(name, megabytes, [_percent("accuracy")(line) for line in lines]) if any(megabytes) else None


def _sent(lines: Lines) -> dict[str, Any]:
    """Bytes so far, both ways; where both are the same to a hundredth, one line says so instead of hiding another."""
    up, down = ([*accumulate(_get(line, key) or 0 for line in lines)] for key in ("bytes_up", "bytes_down"))
    most = max([*up, *down], default=0)
    scale, unit = (1e9, " GB") if most >= 1e9 else (1e6, " MB")
    alike = all(abs(a - b) <= 0.01 * most for a, b in zip(up, down, strict=True))
    told = {"up, and as much down": up} if alike else {"up": up, "down": down}
    series = (_series(name, lines, [n / scale for n in sums]) for name, sums in told.items() if any(sums))
    return _chart("Sent so far", unit, *series)


def _get(line: Mapping[str, Any], *keys: str) -> Any:
    """What lies under nested keys; None where one is missing."""
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _value(*keys: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda line: _get(line, *keys)


def _percent(*keys: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda line: None if (share := _get(line, *keys)) is None else 100 * share


def _phases(line: Mapping[str, Any]) -> Mapping[str, Any]:
    seconds = line.get("seconds")
    return seconds if isinstance(seconds, Mapping) else {}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
