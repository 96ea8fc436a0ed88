"""The config: TOML and `key=value` words in, validated options out, or one sentence about what is wrong.

Config stops at the door: `build.py` turns it into the parts that work.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fedgraft.config.options import Config
from fedgraft.core.errors import FedgraftError

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
    """A config from a TOML file (or a preset's table) and `key=value` words, validated as a whole."""
    table: dict[str, Any] = dict(base or {})
    if path is not None:
        table = merge(table, read_toml(path))
    return validate(merge(table, parse_overrides(overrides or [])))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise FedgraftError(f"there is no config file {path}") from None
    except OSError as error:
        raise FedgraftError(f"the config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FedgraftError(f"{path} is not valid TOML: it is no text; an archive of images must be unpacked") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FedgraftError(f"{path} is not valid TOML: {error}") from None


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Several such words as one table; the last one wins."""
    table: dict[str, Any] = {}
    for word in words:
        table = merge(table, parse_override(word))
    return table


def parse_override(word: str) -> dict[str, Any]:
    """`local.lr=0.1` as a nested table; the value is TOML, or a plain word."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise FedgraftError(f"{word!r} is not of the form key=value, for example local.lr=0.01")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        empty = text in {"None", "null"} or (text == "none" and "'none'" not in str(_annotation(key)))
        value = None if empty else text
    table: Any = value
    for part in reversed(key.strip().split(".")):
        table = {part: table}
    return table


def _annotation(key: str) -> Any:
    """The type of an option, None where there is no such option."""
    section: type[BaseModel] | None = Config
    found: Any = None
    for part in key.strip().split("."):
        if section is None or part not in section.model_fields:
            return None
        found = section.model_fields[part].annotation
        section = section_of(found)
    return found


def merge(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Tables joined key by key; the right one wins."""
    both = dict(left)
    for key, value in right.items():
        old = both.get(key)
        both[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def validate(table: dict[str, Any]) -> Config:
    """The table as a config, or one sentence about the first thing that is wrong."""
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise FedgraftError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        tables = {key.rpartition(".")[0]: None for key in known_keys() if "." in key}
        close = difflib.get_close_matches(where, [*known_keys(), *tables], n=1, cutoff=0.5)
        told = f"the nearest one is {close[0]!r}" if close else "`fedgraft options` lists them"
        return f"there is no option {where!r}; {told}."
    if first["type"] in {"model_type", "model_attributes_type"}:
        inside = ", ".join(key for key in known_keys() if key.startswith(where + "."))
        return f"{where!r} is a table of options; set one of {inside[:300]}."
    got = "" if first["type"] == "value_error" else f" (got {first['input']!r})"
    return f"{where}: {first['msg'].removeprefix('Value error, ')}{got}." if where else f"{first['msg']}."


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The table behind an option, if it is one (or may be one, or None)."""
    kinds = [annotation, *get_args(annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def known_keys(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    """Every option by its full name."""
    found: list[str] = []
    for name, info in (section or Config).model_fields.items():
        inner = section_of(info.annotation)
        found += [prefix + name] if inner is None else known_keys(inner, f"{prefix}{name}.")
    return found


def to_toml(config: Config) -> str:
    """The resolved config as TOML; options that are None are left out, which means their default."""
    import tomli_w

    return tomli_w.dumps(config.table)


def changes(config: Config) -> list[str]:
    """Where a config differs from the defaults, as `key = value`."""
    usual = _flat(load().table)
    return [f"{key} = {json.dumps(value)}" for key, value in _flat(config.table).items() if usual.get(key) != value]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def from_folder(folder: Path) -> Config:
    """The config of an existing run."""
    if not (folder / "config.toml").is_file():
        raise FedgraftError(f"there is no run in {folder}; `fedgraft list` shows the runs there are.")
    try:
        return load(folder / "config.toml")
    except FedgraftError as error:
        raise FedgraftError(
            f"{folder / 'config.toml'} is no config of this version of fedgraft ({str(error).rstrip('.')}); use the "
            "version that environment.json beside it names, or start a new run."
        ) from error


def describe_options(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    """Every option: its key, default and meaning."""
    lines: list[str] = []
    for name, info in (section or Config).model_fields.items():
        inner = section_of(info.annotation)
        if inner is not None:
            lines += ["", f"[{prefix}{name}]  {(inner.__doc__ or '').strip().splitlines()[0]}"]
            lines += describe_options(inner, f"{prefix}{name}.")
        else:
            default = "none" if info.default is None else json.dumps(info.default, ensure_ascii=False)
            told = "; ".join(filter(None, (info.description, _choices(info.annotation))))
            lines.append(f"  {prefix}{name} = {default}  {told}".rstrip())
    return lines


def _choices(annotation: Any) -> str:
    """The words that an option takes, where only some are known."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    found = next(filter(None, map(_choices, get_args(annotation))), "")
    return found.replace("one of", "any of") if get_origin(annotation) is tuple else found
