"""The figures of a reproduction, from its runs: curves with a band over seeds, lines over a setting, bars, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgraft.metrics.statistics import summarise
from fedgraft.runs.folder import RunFolder
from reproduction import drawing as figures
from reproduction.drawing.palette import to_palette
from reproduction.drawing.ranking import Arm
from reproduction.drawing.representations import draw_of_run
from reproduction.preset import Cell, Figure, level_of, picked
from reproduction.reproduce import MEASURES, Found, numbers
from reproduction.statistics import paired

_CURVES = {
    "accuracy": "validation accuracy (%)",
    "loss": "validation loss",
    "personal_curve": "mean client accuracy (%)",
}
"""What the lines of metrics.jsonl are called."""
_SPREAD = {figures.curves: "bands", figures.panels: "bands", figures.bars: "lines on bars"}
"""What shows how far seeds lie apart."""
Line = tuple[list[Any], list[float], list[float]]


def draw_all(found: Found, folder: Path, formats: Sequence[str] = ("png",)) -> list[tuple[Figure, Path]]:
    """Every figure there is data for, as PNG; in the other formats beside it."""
    made = []
    for figure in found.work.preset.figures:
        path = folder / f"{figure.name or figure.kind}.png"
        if _draw(figure, found, path):
            to_palette(path)
            made.append((figure, path))
            for other in formats:
                if other != "png":
                    _draw(figure, found, path.with_suffix(f".{other}"))
    return made


def _draw(figure: Figure, found: Found, path: Path) -> bool:
    kind = figures.FIGURES[figure.kind]
    texts: dict[str, Any] = {key: text for key in ("title", "xlabel") if (text := getattr(figure, key))}
    if kind.draw in (figures.pipelines_schematic, figures.fedshibu_schematic):
        figures.draw(figure.kind, path, **texts)
        return True
    here = picked(found.work.preset, found.cells, figure.where)
    here = [cell for cell in here if cell.label in found.folders or cell.label in found.values]
    if not here:
        return False
    if figure.run:
        run = next(iter(found.folders[here[0].label].values()))
        return draw_of_run(figure.run, run, path, **{**figures.texts_of(figure.kind), **texts})
    data: Any
    if figure.reference:
        texts["levels"] = _levels_of(figure, found, here)
        here = [cell for cell in here if cell.levels[-1] not in figure.reference]
    if figure.x != "round":
        texts["ylabel"] = found.title(figure.y)
    elif figure.y in _CURVES:
        texts["ylabel"] = _CURVES[figure.y]
    if kind.draw is figures.ranking:
        texts["ylabel"] = found.title(found.work.preset.measure)
        data = _arms(figure, found, here)
    elif kind.draw in (figures.bars, figures.scatter_front):
        measure = figure.y if figure.y in MEASURES and kind.draw is figures.bars else found.work.preset.measure
        texts["ylabel"] = found.title(measure)
        if kind.draw is figures.bars:
            texts["xlabel"] = figure.lines or found.work.preset.axes[-1].name
        elif figure.x != "round":
            texts["xlabel"] = found.title(figure.x)
        data = (_bars if kind.draw is figures.bars else _points)(figure, found, here, measure)
    elif figure.panels:
        split = {
            level: picked(found.work.preset, here, {figure.panels: level}) for level in _levels(found, figure.panels)
        }
        data = {name: _series(figure, found, part) for name, part in split.items() if part}
    else:
        data = _series(figure, found, here)
    if not data:
        return False
    if kind.draw in _SPREAD and len(found.work.seeds) > 1:
        label = texts.get("xlabel") or kind.xlabel
        texts["xlabel"] = f"{label}\n{_SPREAD[kind.draw]}: standard deviation over seeds"
    figures.draw(figure.kind, path, data, **texts)
    return True


def _levels_of(figure: Figure, found: Found, cells: Sequence[Cell]) -> dict[str, float]:
    """Heights of the level lines by name; one of another measure than the preset's says so."""
    made = {}
    for cell in cells:
        level = cell.levels[-1]
        if level in figure.reference and (seen := numbers(found.measured(cell.label, figure.reference[level]))):
            same = figure.reference[level] in {found.work.preset.measure, "best"}
            name = level if same else f"{level}: {found.title(figure.reference[level])}"
            made[name] = summarise(seen).mean
    return made


def _levels(found: Found, axis: str) -> list[str]:
    return list(dict.fromkeys(level_of(found.work.preset, cell, axis) for cell in found.cells))


def _name(figure: Figure, found: Found, cell: Cell) -> str:
    """The name of a cell's line: its level on the line axis, or all levels the figure does not fix."""
    if figure.lines:
        return level_of(found.work.preset, cell, figure.lines)
    fixed = {*figure.where, figure.panels, figure.x}
    free = [axis.name for axis in found.work.preset.axes if axis.name not in fixed]
    return ", ".join(level_of(found.work.preset, cell, axis) for axis in free) or found.work.name


def _series(figure: Figure, found: Found, cells: Sequence[Cell]) -> dict[str, Line]:
    if figure.x == "round":
        lines = {
            _name(figure, found, cell): curve_of(list(found.folders[cell.label].values()), figure.y) for cell in cells
        }
        return {name: line for name, line in lines.items() if line[0]}
    made: dict[str, Line] = {}
    for cell in cells:
        values = numbers(found.measured(cell.label, figure.y))
        if values:
            x, y, spread = made.setdefault(_name(figure, found, cell), ([], [], []))
            stats = summarise(values)
            x.append(level_of(found.work.preset, cell, figure.x))
            y.append(stats.mean)
            spread.append(stats.std)
    # Words on the axis stand in the order in which they first appear: the line with all of them comes first.
    return dict(sorted(made.items(), key=lambda line: -len(line[1][0])))


def curve_of(folders: Sequence[Path], key: str) -> Line:
    """Rounds, mean and standard deviation over seeds of one metric; as long as the shortest run."""
    runs = []
    for folder in folders:
        lines = RunFolder.open(folder).metrics()
        if key == "personal_curve":
            runs.append([(line["round"], 100 * line["personal"]["mean"]) for line in lines if line.get("personal")])
        else:
            factor = 100 if key == "accuracy" else 1
            runs.append([(line["round"], factor * line[key]) for line in lines if line.get(key) is not None])
    length = min(map(len, runs), default=0)
    stats = [summarise([run[i][1] for run in runs]) for i in range(length)]
    return [runs[0][i][0] for i in range(length)], [s.mean for s in stats], [s.std for s in stats]


def _bars(
    figure: Figure, found: Found, cells: Sequence[Cell], measure: str
) -> dict[str, dict[str, tuple[float, float]]]:
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for cell in cells:
        if values := numbers(found.measured(cell.label, measure)):
            stats = summarise(values)
            group = level_of(found.work.preset, cell, figure.panels) if figure.panels else ""
            groups.setdefault(group, {})[_name(figure, found, cell)] = (stats.mean, stats.std)
    return groups


def _arms(figure: Figure, found: Found, cells: Sequence[Cell]) -> dict[str, Arm]:
    """By name: the preset's measure with Student's interval over seeds, megabytes and seconds."""
    arms = {}
    for cell in cells:
        reached = paired(found.measured(cell.label, found.work.preset.measure))
        if reached is None:
            continue
        low, high = reached.interval() if reached.judgeable else (reached.value, reached.value)
        spent = {m: numbers(found.measured(cell.label, m)) for m in ("megabytes", "seconds")}
        costs = {found.title(m): summarise(values).mean if values else None for m, values in spent.items()}
        arms[_name(figure, found, cell)] = Arm((reached.value, low, high), costs)
    return arms


def _points(figure: Figure, found: Found, cells: Sequence[Cell], measure: str) -> dict[str, tuple[float, float]]:
    points = {}
    for cell in cells:
        gain, cost = (
            numbers(found.measured(cell.label, m)) for m in (measure, "megabytes" if figure.x == "round" else figure.x)
        )
        if gain and cost:
            points[_name(figure, found, cell)] = (summarise(cost).mean, summarise(gain).mean)
    return points
