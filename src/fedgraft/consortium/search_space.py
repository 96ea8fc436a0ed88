"""The space of a search: options and the values to try, as given by `--over`, and their Optuna distributions."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgraft.config.load import known_keys, parse_override, validate
from fedgraft.core.errors import FedgraftError

Setting = Mapping[str, Any]
"""Values by option, as `{"local.lr": 0.1}`."""


@dataclass(frozen=True)
class Axis:
    """One option and the values to try: listed ones, or a range `linear`, `log` or `int` from low to high."""

    key: str
    values: tuple[Any, ...] = ()
    scale: str = ""
    low: float = 0.0
    high: float = 0.0

    def distribution(self) -> Any:
        """Return the Optuna distribution. Listed values go by position, ordered if they are rising numbers."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.scale == "int":
            return IntDistribution(int(self.low), int(self.high))
        if self.scale:
            return FloatDistribution(self.low, self.high, log=self.scale == "log")
        if all(_is_number(value) for value in self.values) and list(self.values) == sorted(self.values):
            return IntDistribution(0, len(self.values) - 1)
        return CategoricalDistribution(list(range(len(self.values))))

    def to_optuna(self, value: Any) -> Any:
        """Return Optuna's parameter for a value."""
        if self.scale:
            return value
        return self.values.index(value)

    def from_optuna(self, parameter: Any) -> Any:
        """Return the value for Optuna's parameter."""
        if self.scale:
            return parameter
        return self.values[parameter]


def _is_number(value: object) -> bool:
    """Return whether a value is a number and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_axis(text: str) -> Axis:
    """Return the axis of a text: `local.lr=0.01,0.1`, `partition.kind=iid,classes`, or `local.lr=log:0.001:0.1`."""
    key, _, values_text = text.partition("=")
    if key not in known_keys():
        validate(parse_override(f"{key or text}=0"))  # raises an error that suggests the nearest option
    if not values_text:
        raise FedgraftError(
            "E-CONSORTIUM-NO-VALUES",
            f"--over {text} lists no values",
            "write for example --over local.lr=0.01,0.1",
            key=key,
        )
    if key == "seed":
        raise FedgraftError(
            "E-CONSORTIUM-SEED-AXIS", "seeds are averaged over and cannot be searched", "list them in --seeds 0,1,2"
        )
    scale, *ends = values_text.split(":")
    if scale in {"linear", "log", "int"}:
        return _range(key, scale, ends)
    try:
        values = tuple(tomllib.loads(f"x = [{values_text}]")["x"])
    except ValueError:
        values = tuple(_parse_value(key, part.strip()) for part in values_text.split(","))
    return Axis(key, values)


def _parse_value(key: str, text: str) -> Any:
    """Return one value of the option `key`, parsed as an override of it would be."""
    table: Any = parse_override(f"{key}={text}")
    for part in key.split("."):
        table = table[part]
    return table


def _range(key: str, scale: str, ends: Sequence[str]) -> Axis:
    """Return the axis of the option `key` over a range of this scale; raise unless `ends` are two fitting numbers."""
    numbers = []
    for end in ends:
        try:
            numbers.append(float(end))
        except ValueError:
            raise _bad_range(key, scale, ends) from None
    if len(numbers) != 2 or not all(map(math.isfinite, numbers)):
        raise _bad_range(key, scale, ends)
    low, high = numbers
    if low >= high or (scale == "log" and low <= 0):
        raise _bad_range(key, scale, ends)
    if scale == "int" and not (low.is_integer() and high.is_integer()):
        raise _bad_range(key, scale, ends)
    return Axis(key, (), scale, low, high)


def _bad_range(key: str, scale: str, ends: Sequence[str]) -> FedgraftError:
    """Return the error for a range that is not of the form scale:low:high."""
    example = f"{scale}:0.001:0.1"
    if scale == "int":
        example = "int:1:8"
    return FedgraftError(
        "E-CONSORTIUM-RANGE",
        f"the range {key}={':'.join([scale, *ends])} is not of the form {scale}:low:high",
        f"write for example {example}",
        key=key,
    )


def grid_settings(axes: Sequence[Axis]) -> list[Setting]:
    """Return every combination of the axes' values, the last axis fastest; raise for an axis that is a range."""
    for axis in axes:
        if axis.scale:
            raise FedgraftError(
                "E-CONSORTIUM-GRID-RANGE",
                f"a grid needs listed values, and {axis.key} is a range",
                "use --search random or --search optuna",
                key=axis.key,
            )
    keys = [axis.key for axis in axes]
    settings: list[Setting] = []
    for values in itertools.product(*(axis.values for axis in axes)):
        settings.append(dict(zip(keys, values, strict=True)))
    return settings
