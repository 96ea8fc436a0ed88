"""The config: TOML and `key=value` words in, validated options out, or one sentence about what is wrong.

Config stops at the door: `build.py` turns it into the parts that work.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedgraft.config.describe import annotation_of, describe_options, known_keys
from fedgraft.config.options import Config
from fedgraft.core.arguments import OTHER_NAMES
from fedgraft.core.device_choice import AUTO
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "Config",
    "describe_options",
    "from_folder",
    "known_keys",
    "load",
    "merge",
    "to_toml",
    "validate",
]


def load(path: Path | None = None, overrides: list[str] | None = None, base: dict[str, Any] | None = None) -> Config:
    """Return the validated config of three layers: the table `base`, the TOML file `path`, `key=value` words.

    Of two layers with the same option the later one wins: `overrides` over the file, the file over `base`.
    """
    table: dict[str, Any] = dict(base or {})
    if path is not None:
        table = merge(table, read_toml(path))
    return validate(merge(table, parse_overrides(overrides or [])))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise FedgraftError("E-CONFIG-FILE", f"there is no config file {path}.", path=str(path)) from None
    except OSError as error:
        message = f"the config file {path} cannot be read: {error.strerror}."
        raise FedgraftError("E-CONFIG-FILE", message, path=str(path)) from None
    except UnicodeDecodeError:
        raise FedgraftError(
            "E-CONFIG-TOML",
            f"{path} is not valid TOML: it is no text",
            "an archive of images must be unpacked",
            path=str(path),
        ) from None
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, or an integer without end
        raise FedgraftError("E-CONFIG-TOML", f"{path} is not valid TOML: {error}.", path=str(path)) from None


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return several `key=value` words as one table; the last one wins."""
    table: dict[str, Any] = {}
    for word in words:
        table = merge(table, parse_override(word))
    return table


def parse_override(word: str) -> dict[str, Any]:
    """Return `local.lr=0.1` as a nested table; the value is TOML, or a plain word."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise FedgraftError(
            "E-CONFIG-OVERRIDE",
            f"{word!r} is not of the form key=value",
            "write for example local.lr=0.01",
            word=word,
        )
    table: Any = _override_value(key, text)
    for part in reversed(key.strip().split(".")):
        table = {part: table}
    return table


def _override_value(key: str, text: str) -> Any:
    """Return the value of a `key=value` word.

    `none` means the default, unless it is a word of the option itself or the option is always a word
    (`schedule.kind=none`). Words with commas are a list where the option is
    one: `metrics=auroc,f1`.
    """
    annotation = annotation_of(key)
    own_words = str(annotation)
    if text in ("true", "false") and f"'{text}'" in own_words:
        return text
    if text == "none" and annotation is str:
        return text
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except ValueError:
        pass
    if text in ("None", "null") or (text == "none" and "'none'" not in own_words):
        return None
    if own_words.startswith("tuple[") and text:
        return [word.strip() for word in text.split(",")]
    return text


def merge(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Return a new table with the keys of both, inner tables merged too; where both have a value, `right` wins."""
    merged = dict(left)
    for key, value in right.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def validate(table: dict[str, Any]) -> Config:
    """Return the table as a config, or raise one sentence about the first thing that is wrong."""
    _require_usual_integers(table)
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise _first_mistake(error) from None


LARGEST_INTEGER = 2**63 - 1
"""Larger integers are refused: no option needs them, and arithmetic with floats would fail."""


def _require_usual_integers(value: Any, key: str = "") -> None:
    """Raise for an integer of the table that does not fit into 64 bits."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _require_usual_integers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_usual_integers(inner, key)
    elif type(value) is int and not -LARGEST_INTEGER <= value <= LARGEST_INTEGER:
        raise FedgraftError(
            "E-CONFIG-NUMBER", f"the number of {key!r} is too large", "use one of at most 18 digits", option=key
        )


def _first_mistake(error: ValidationError) -> FedgraftError:
    """Return the error about the first mistake of a config; unknown options are all named at once."""
    unknown = []
    for mistake in error.errors():
        if mistake["type"] == "extra_forbidden":
            unknown.append(_option_of(mistake["loc"]))
    if unknown:
        return _unknown_options(unknown)
    mistake = error.errors()[0]
    key = _option_of(mistake["loc"])
    if mistake["type"] in {"model_type", "model_attributes_type"}:
        inside = ", ".join(known for known in known_keys() if known.startswith(key + "."))
        return FedgraftError(
            "E-CONFIG-TABLE", f"{key!r} is a table of options", f"set one of {inside[:300]}", option=key
        )
    reason = mistake["msg"].removeprefix("Value error, ")
    if not key:
        return FedgraftError("E-CONFIG-OPTIONS", f"{reason}.")
    if mistake["type"] != "value_error":
        reason += f" (got {repr(mistake['input'])[:80]}){_nearest_value(mistake)}"
    return FedgraftError("E-CONFIG-VALUE", f"{key}: {reason}.", option=key, value=mistake["input"])


def _nearest_value(mistake: ErrorDetails) -> str:
    """Return "; the nearest one is ..." where an option has a list of values and one of them is near; else ""."""
    if mistake["type"] != "literal_error":
        return ""
    values = re.findall("'([^']+)'", str(mistake.get("ctx", {}).get("expected", "")))
    nearest = difflib.get_close_matches(str(mistake["input"]).lower(), values, n=1, cutoff=0.5)
    return f"; the nearest one is {nearest[0]!r}" if nearest else ""


def _option_of(place: Sequence[int | str]) -> str:
    """Return the full name of an option from its place in the tables: "local.lr"."""
    return ".".join(str(part) for part in place)


def _unknown_options(keys: Sequence[str]) -> FedgraftError:
    """Return the error about options that do not exist; its hint names for each the one that was probably meant."""
    quoted = ", ".join(repr(key) for key in keys)
    sentence = f"there is no option {quoted}" if len(keys) == 1 else f"there are no options {quoted}"
    suggestions = []
    for key in keys:
        likely = _likely_option(key)
        if likely:
            suggestions.append(repr(likely))
    hint = "`fedgraft options --all` lists them"
    if len(suggestions) == 1:
        hint = f"the nearest one is {suggestions[0]}"
    elif suggestions:
        hint = f"the nearest ones are {', '.join(suggestions)}"
    return FedgraftError("E-CONFIG-UNKNOWN-OPTION", sentence, hint, option=keys[0], options=list(keys))


def _likely_option(key: str) -> str:
    """Return the option that an unknown one was probably meant to be; "" if none is near."""
    names = known_keys()
    table, _, word = key.rpartition(".")
    meant_word = OTHER_NAMES.get(word.lower())
    if meant_word is None and not table:
        meant_word = word
    if meant_word is not None:
        for name in names:
            same_table = not table or name.rpartition(".")[0].startswith(table)
            if name.rpartition(".")[2] == meant_word and same_table:
                return name
    tables = {name.rpartition(".")[0] for name in names if "." in name}
    nearest = difflib.get_close_matches(key, [*names, *sorted(tables)], n=1, cutoff=0.5)
    return nearest[0] if nearest else ""


def to_toml(config: Config) -> str:
    """Return the resolved config as TOML; options that are None are left out, which means their default."""
    import tomli_w

    return tomli_w.dumps(config.table)


def changes(config: Config) -> list[str]:
    """Return the options of a config that differ from the defaults, as `key = value`."""
    defaults = _flat(load().table)
    changed = []
    for key, value in _flat(config.table).items():
        if defaults.get(key) != value:
            changed.append(f"{key} = {json.dumps(value)}")
    return changed


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with full names ("local.lr") as keys; `prefix` begins them."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def from_folder(folder: Path) -> Config:
    """Return the config of the run in `folder`; raise if there is none or this version cannot read it."""
    path = folder / "config.toml"
    if not path.is_file():
        raise FedgraftError(
            "E-CONFIG-NO-RUN", f"there is no run in {folder}", "`fedgraft list` shows the runs", path=str(folder)
        )
    try:
        # Where the run was made says nothing about where its folder is opened now.
        return load(path, [f"device={AUTO}"])
    except FedgraftError as error:
        raise FedgraftError(
            "E-CONFIG-VERSION",
            f"{path} is no config of this version of fedgraft ({str(error).rstrip('.')})",
            "use the version that environment.json beside it names, or start a new run",
            path=str(path),
        ) from error
