"""The file of one experiment: what is varied, what the documents report, what they claim, what is drawn.

A preset is a base config, scales (`paper`, `laptop`, `tiny`) and axes; a cell is one level of each axis. A scale
changes the config before the axes (`config`) and after them (`then`), and may leave levels out (`only`); `skip` leaves
out combinations.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from fedgraft.config.load import Config, merge, validate
from fedgraft.config.options import Section
from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import listed_algorithms

_WORDS = (
    "test|best|last|personal|finetuned|balanced|megabytes|spread|dispersion|rounds_to|seconds|correlation|self_weight"
)
Measure = Annotated[str, Field(pattern=rf"^({_WORDS}|seconds:\w+|at:\d+)$")]
Kind = TypeVar("Kind", bound=Section)
PRESETS = Path(__file__).parent / "presets"
SCALES = ("paper", "laptop", "tiny")
_TINY_DATA = {"source": "digits", "limit": 400, "image_size": 16, "validation": 0.3}
_NETWORKS: dict[str, dict[str, dict[str, Any]]] = {
    "vit": {
        "paper": {"device": "cuda", "model": {"name": "facebook/dino-vits16"}},
        "laptop": {"model": {"name": "nano"}},
        "tiny": {"model": {"name": "tiny"}},
    },
    "resnet": {
        "paper": {"device": "cuda", "model": {"name": "resnet18"}},
        "laptop": {"model": {"name": "resnet18:width=16,norm=group"}},
        "tiny": {"model": {"name": "resnet18:width=4,norm=group"}},
    },
}


class Axis(Section):
    """One thing that is varied: levels by name, each a change of the config (`central`: all in one place)."""

    name: str
    levels: dict[str, dict[str, Any]] = Field(min_length=1)


class Scale(Section):
    """How large the experiment is."""

    core_minutes: float = Field(gt=0, description="for all seeds, tuning included")
    config: dict[str, Any] = Field({})
    then: dict[str, Any] = Field({})
    only: dict[str, list[str]] = Field({})
    target: float | None = Field(None, description="accuracy (%) whose rounds and megabytes are shown")


class Tuning(Section):
    """Learning rates that are tried with seeds of their own, judged on validation after the last round."""

    rates: dict[str, list[float]] = Field(min_length=1, description="by level of `axis`; `*` for the others")
    axis: str = ""
    at: dict[str, str] = Field({}, description="tune only at these levels, and use the rate for all")
    like: dict[str, str] = Field({}, description="levels that take another one's rate: no common loss judges them")
    rounds: float = Field(1.0, gt=0, le=1, description="share of the rounds")
    more_seeds: dict[str, int] = Field({}, description="levels of `axis` judged with so many seeds beside seed 0")
    judge: Literal["loss", "accuracy"] = Field("loss", description="least validation loss, or highest accuracy")
    seeds: list[int] = Field([0], min_length=1, description="seeds that choose; none of them is measured")


class Figure(Section):
    """One figure: its kind, which cells (`where`), and what is on its axes."""

    kind: str
    name: str = ""
    title: str = ""
    where: dict[str, str] = Field({})
    lines: str = Field("", description="the axis whose levels are lines or bars; default: the last one")
    x: str = Field("round", description="round, or an axis; of a scatter what it costs: megabytes unless seconds")
    xlabel: str = Field("", description="where the kind's own does not say what x is")
    reference: dict[str, Measure] = Field({}, description="levels drawn as level lines, and the measure of each")
    y: Measure | Literal["accuracy", "loss", "personal_curve"] = "accuracy"
    panels: str = Field("", description="the axis with one panel for each level")
    run: str = Field("", description="the name of a picture that the first seed's run left")


class Reported(Section):
    """A number a document gives for a cell."""

    cell: str
    value: float
    document: str


class Claim(Section):
    """A statement of a document as a number that can be measured: left - right, or left / right, against `number`."""

    row: int
    text: str
    document: str
    left: str = ""
    right: str = ""
    minus: list[str] = Field([], max_length=2, description="left and right of a difference that is taken away")
    measure: Measure = "test"
    ratio: bool = False
    number: float = 0.0
    expect: Literal["more", "less", "same"] = "more"
    margin: float = Field(1.0, gt=0, description="the smallest effect that matters; for a ratio a factor above 1")
    fact: bool = Field(False, description="follows from the setting and not from seeds: compared as it is")
    scales: list[Literal["paper", "laptop", "tiny"]] = Field(["paper", "laptop", "tiny"])

    @model_validator(mode="after")
    def _factor(self) -> Claim:
        if self.ratio and self.margin <= 1:
            raise ValueError(f"the margin of a ratio is a factor above 1, not {self.margin:g}")
        return self


class Gate(Section):
    """When an experiment counts: its start, and what dense training or sharing must gain."""

    dense: str = ""
    start: str = Field("", description="counts among the arms of every comparison")
    head_only: str = ""
    sharing: list[str] = Field([], max_length=2, description="FedAvg, then local only")
    evaluations: bool = Field(True, description="whether enough evaluations are asked for; not if none is chosen from")

    def cells(self) -> list[str]:
        """Every cell the gate names."""
        return [cell for cell in (self.dense, self.start, self.head_only, *self.sharing) if cell]


class Preset(Section):
    """One experiment."""

    title: str
    question: str
    rows: list[int] = Field(min_length=1)
    network: Literal["vit", "resnet", "given"] = Field("vit", description="given: a folder that is an argument")
    data: Literal["cifar100", "cifar10", "ham10000-sites", "pacs"] = "cifar100"
    seeds: int = Field(3, ge=1)
    first_seed: int = Field(1, ge=1, description="the first measured seed; a surface takes those that choose rates")
    measure: Measure = "test"
    baseline: str = ""
    shows: list[Measure] = Field([], description="further columns of its tables")
    study: str = Field(
        "", description="a function of reproduction/studies.py that carries it out, or changes the cells"
    )
    base: dict[str, Any] = Field({})
    axes: list[Axis] = Field([])
    skip: list[dict[str, list[str]]] = Field([], description="combinations of levels that are left out")
    relative_to: str = Field("", description="a level of the first axis: what share of its number the others keep")
    gate: Gate = Field(default_factory=Gate)
    scales: dict[Literal["paper", "laptop", "tiny"], Scale]
    tuning: Tuning | None = None
    figures: list[Figure] = Field([])
    reported: list[Reported] = Field([])
    others: list[Reported] = Field([], description="numbers that others published of the same setting")
    claims: list[Claim] = Field([])
    notes: list[str] = Field([])
    tables: dict[str, list[dict[str, Any]]] = Field({}, description="the documents' tables of settings, without runs")

    @model_validator(mode="after")
    def _names_exist(self) -> Preset:
        if missing := [scale for scale in SCALES if scale not in self.scales]:
            raise ValueError(f"the scale {missing[0]} is missing")
        axes = {axis.name: set(axis.levels) for axis in self.axes}
        named = [("scale", s.only) for s in self.scales.values()] + [("skip", s) for s in self.skip]
        named += [("figure", {k: [v] for k, v in f.where.items()}) for f in self.figures]
        for what, chosen in named:
            for axis, levels in chosen.items():
                if axis not in axes or not set(levels) <= axes[axis]:
                    raise ValueError(f"a {what} names {axis} {levels}, and there is no such axis or level")
        known = {"/".join(levels) for levels in itertools.product(*(axis.levels for axis in self.axes))}
        cells = [r.cell for r in (*self.reported, *self.others)]
        cells += [c for k in self.claims for c in (k.left, k.right, *k.minus) if c]
        cells += self.gate.cells()
        wrong = [cell for cell in cells if cell not in known and not self.study]
        if wrong:
            raise ValueError(f"there is no cell {wrong[0]!r}; cells are named as {sorted(known)[0]!r}")
        if self.baseline and self.axes and self.baseline not in self.axes[-1].levels:
            raise ValueError(f"the baseline {self.baseline!r} is no level of the last axis")
        if self.relative_to and (len(self.axes) < 2 or self.relative_to not in self.axes[0].levels):
            raise ValueError(
                f"{self.relative_to!r}, which others are relative to, is no level of the first of two axes"
            )
        like = {} if self.tuning is None else self.tuning.like
        if strange := [x for x in (*like, *like.values()) if x not in set().union(*axes.values())]:
            raise ValueError(f"{strange[0]!r} is said to share a rate, and there is no such level")
        return self


class Cell(Section):
    """One setting of a preset at a scale, before seeds and learning rates."""

    levels: tuple[str, ...]
    table: dict[str, Any]
    central: bool = False

    @property
    def label(self) -> str:
        """The levels as one name."""
        return "/".join(self.levels)

    def config(self, **more: Any) -> Config:
        """The config with more keys, such as `seed`."""
        return validate(merge(self.table, more))


def names() -> list[str]:
    """Every preset of the documents' experiments; the six questions are in `question.py`."""
    return sorted(file.stem for file in PRESETS.glob("*.toml") if not re.fullmatch(r"q\d", file.stem))


@functools.lru_cache
def load_preset(name: str) -> Preset:
    """A preset by its name."""
    if name not in names():
        close = difflib.get_close_matches(name, [file.stem for file in PRESETS.glob("*.toml")], n=1, cutoff=0.0)
        raise FedgraftError(
            "E-REPRODUCTION-EXPERIMENT",
            f"there is no experiment {name!r}",
            f"the nearest is {close[0]!r} (see: --list)",
            nearest=close[0],
        )
    return parse((PRESETS / f"{name}.toml").read_text("utf-8"), name)


def parse(text: str, name: str) -> Preset:
    """A preset's text, checked; what is wrong with it is one sentence."""
    preset = checked(Preset, text, name)
    for scale in SCALES:
        cells(preset, scale, name)
    return preset


def checked(kind: type[Kind], text: str, name: str) -> Kind:
    """TOML as a section; what is wrong with it is one sentence."""
    try:
        return kind.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FedgraftError(
            "E-REPRODUCTION-PRESET-TOML", f"the preset {name} is not valid TOML: {error}", preset=name
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "as a whole"
        raise FedgraftError(
            "E-REPRODUCTION-PRESET", f"the preset {name} is wrong at {where}: {first['msg']}", preset=name, where=where
        ) from None


def source(preset: Preset, data: str | None) -> dict[str, Any]:
    """Where the data is: CIFAR in the named folder or the usual places, the others in a folder of their own below."""
    if preset.data.startswith("cifar"):
        return {"source": preset.data, **({} if data is None else {"path": data})}
    return {"source": "parquet", "path": str(Path(data or ".") / preset.data)}


def combinations(preset: Preset, scale: str) -> list[tuple[str, ...]]:
    """The levels of every setting at a scale; no config is made."""
    if not preset.axes:
        return []
    chosen: Scale = preset.scales[scale]  # type: ignore[index]
    every = itertools.product(*(_kept(axis, chosen) for axis in preset.axes))
    return [levels for levels in every if not _skipped(preset, levels)]


def cells(
    preset: Preset,
    scale: str,
    name: str,
    data: str | None = None,
    model: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Every setting at a scale: base, network, scale, then levels, what the scale says last, and the user's changes.

    `model` is the folder of a ViT and takes the place of the one that the scale names.
    """
    chosen: Scale = preset.scales[scale]  # type: ignore[index]
    data_source = _TINY_DATA if scale == "tiny" else source(preset, data)
    start: dict[str, Any] = {"name": name, "data": data_source, "workers": 1}  # runs go side by side, not clients
    # A ResNet is drawn, not loaded, so MODEL says nothing of it.
    named = bool(model) and scale != "tiny" and preset.network in ("given", "vit")
    given = {"model": {"name": model}} if named else {}
    for part in (
        _NETWORKS["resnet" if preset.network == "resnet" else "vit"][scale],
        preset.base,
        chosen.config,
    ):
        start = merge(start, part)
    found, said = [], {key for part in (chosen.config, chosen.then) for key in part.get("algorithm", {})}
    for levels in combinations(preset, scale):
        table = start
        for axis, level in zip(preset.axes, levels, strict=True):
            table = merge(table, axis.levels[level])
        table = _without_foreign_options(merge(merge(table, chosen.then), given), said)
        table = merge(table, changes or {})
        central = bool(table.pop("central", False))
        if central:
            table["name"] = f"{table['name']}-central"
        _check(table, f"the preset {name}, cell {'/'.join(levels)}, scale {scale}")
        found.append(Cell(levels=levels, table=table, central=central))
    return found


def _without_foreign_options(table: dict[str, Any], said: Set[str]) -> dict[str, Any]:
    """What a scale says of algorithms (samples, layers) is for the cells whose algorithm has such an option."""
    if not said:
        return table
    algorithm = table.get("algorithm", {})
    own = _options()[algorithm.get("name", "fedavg")][1]
    return {**table, "algorithm": {key: value for key, value in algorithm.items() if key not in said or key in own}}


@functools.cache  # the zoo's source is read for it, and there are hundreds of cells
def _options() -> dict[str, tuple[str, list[str]]]:
    return listed_algorithms()


def _kept(axis: Axis, scale: Scale) -> list[str]:
    return [level for level in axis.levels if level in scale.only.get(axis.name, axis.levels)]


def _skipped(preset: Preset, levels: tuple[str, ...]) -> bool:
    have = {axis.name: level for axis, level in zip(preset.axes, levels, strict=True)}
    return any(all(have[axis] in out for axis, out in rule.items()) for rule in preset.skip)


def _check(table: dict[str, Any], where: str) -> None:
    try:
        validate(table)
    except FedgraftError as error:
        raise FedgraftError("E-REPRODUCTION-PRESET-CONFIG", f"{where}: {error}", cause=error.code) from None


def level_of(preset: Preset, cell: Cell, axis: str) -> str:
    """The level a cell has on an axis."""
    return cell.levels[[a.name for a in preset.axes].index(axis)]


def picked(preset: Preset, every: list[Cell], where: Mapping[str, str]) -> list[Cell]:
    """The cells with these levels."""
    return [cell for cell in every if all(level_of(preset, cell, axis) == level for axis, level in where.items())]
