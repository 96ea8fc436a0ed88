"""What the figure of an answer shows: the endpoints that have a short name, and the cells its question pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from reproduction.answers import Part, is_accuracy
from reproduction.drawing.answer import Interval, Panel, Point, Shown, answer
from reproduction.preset import combinations
from reproduction.question import Endpoint, Picture, Question
from reproduction.reproduce import numbers
from reproduction.statistics import Series, paired
from reproduction.verdicts import Verdict

Told = Sequence[tuple[Endpoint, Verdict]]


def draw_answer(path: Path, question: Question, parts: Mapping[str, Part], told: Told) -> bool:
    """Draw the figure of an answer; False: nothing was measured that it could show."""
    effects = shown_effects(told)
    panels = []
    if question.picture is not None:
        panels = pictured(question.picture, parts[question.picture.part])
    if effects or panels:
        answer(path, effects, panels, question.title)
    return bool(effects or panels)


def shown_effects(told: Told) -> list[Shown]:
    """The effects in points of endpoints that have a short name, the primary ones first."""
    made = []
    for primary in (True, False):
        for endpoint, verdict in told:
            in_points = not endpoint.ratio and is_accuracy(endpoint.measure)
            if endpoint.primary != primary or not endpoint.short or not in_points:
                continue
            if verdict.value is None or verdict.low is None or verdict.high is None:
                continue
            effect = (verdict.value, verdict.low, verdict.high)
            made.append(Shown(endpoint.short, effect, endpoint.margin, verdict.word, primary))
    return made


def pictured(picture: Picture, part: Part) -> list[Panel]:
    """The panels of a picture; none where no cell of it was measured."""
    axes = [axis.name for axis in part.preset.axes]
    cells = []
    for levels in combinations(part.preset, "laptop"):
        have = dict(zip(axes, levels, strict=True))
        if all(have[axis] == level for axis, level in picture.where.items()) and not set(levels) & set(picture.leave):
            cells.append(have)
    groups = [""]
    if picture.panels:
        groups = list(dict.fromkeys(have[picture.panels] for have in cells))
    panels = []
    for group in groups:
        mine = [have for have in cells if not group or have[picture.panels] == group]
        panel = _panel(picture, part, mine, group or picture.title)
        if panel is not None:
            panels.append(panel)
    return panels


def _panel(picture: Picture, part: Part, cells: Sequence[Mapping[str, str]], title: str) -> Panel | None:
    measure = picture.measure or part.preset.measure
    named = (picture.where, picture.panels)
    if not picture.x:
        rows = {}
        for have in cells:
            interval = interval_of(part.series("/".join(have.values()), measure))
            if interval is not None:
                rows[_name(have, named)] = interval
        return Panel(title, picture.xlabel, "", rows=rows) if rows else None
    series: dict[str, list[Point]] = {}
    if picture.x == "megabytes":
        for have in cells:
            label = "/".join(have.values())
            interval = interval_of(part.series(label, measure))
            sent = numbers(part.series(label, "megabytes"))
            if interval is not None and sent:
                series[_name(have, named)] = [(sent[0], interval)]
        made = Panel(title, picture.xlabel, picture.ylabel, series, picture.log, joined=False)
        return made if series else None
    for line in dict.fromkeys(have[picture.lines] for have in cells):
        points: list[Point] = []
        mine = [have for have in cells if have[picture.lines] == line]
        for level in dict.fromkeys(have[picture.x] for have in mine):
            here = [have for have in mine if have[picture.x] == level]
            interval = _best(part.series("/".join(have.values()), measure) for have in here)
            if interval is not None:
                points.append((_number_or_name(level), interval))
        if points:
            series[line] = points
    return Panel(title, picture.xlabel, picture.ylabel, series, picture.log) if series else None


def _name(have: Mapping[str, str], named: tuple[Mapping[str, str], str]) -> str:
    """Name a cell by the levels that its panel does not say already."""
    where, panels = named
    return ", ".join(level for axis, level in have.items() if axis not in where and axis != panels)


def _number_or_name(level: str) -> float | str:
    try:
        return float(level)
    except ValueError:
        return level


def _best(every: Iterable[Series]) -> Interval | None:
    """The interval of the highest mean: of one series itself, of several the one that an arm was tuned to."""
    found = [interval for series in every if (interval := interval_of(series)) is not None]
    return max(found) if found else None


def interval_of(series: Series) -> Interval | None:
    """The mean over seeds with Student's 95 % interval, cut at 0 and 100; without a spread the number alone."""
    effect = paired(series)
    if effect is None:
        return None
    low, high = effect.interval() if effect.judgeable else (effect.value, effect.value)
    return effect.value, max(low, 0.0), min(high, 100.0)
