"""The options of a config as people see them: their names, and a line of meaning for each."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from fedgraft.config.options import Config
from fedgraft.config.section import ChoiceSection
from fedgraft.core.declared import REQUIRED, Declared

COMMON = (
    "name",
    "seed",
    "metrics",
    "select",
    "device",
    "workers",
    "data.source",
    "data.path",
    "data.validation",
    "data.image_size",
    "data.augment",
    "data.limit",
    "partition.kind",
    "partition.column",
    "partition.clients",
    "partition.classes_per_client",
    "partition.alpha",
    "partition.without",
    "partition.joins",
    "partition.leaves",
    "model.name",
    "model.dropout",
    "model.head",
    "trainable.kind",
    "trainable.blocks",
    "trainable.freeze_blocks",
    "trainable.head_too",
    "trainable.sparse.strategy",
    "trainable.sparse.sparsity",
    "trainable.sparse.scope",
    "trainable.sparse.samples",
    "trainable.sparse.rounds",
    "trainable.lora.rank",
    "trainable.lora.targets",
    "trainable.lora.aggregate",
    "local.steps",
    "local.epochs",
    "local.batch_size",
    "local.lr",
    "local.head_lr",
    "local.optimizer",
    "local.momentum",
    "local.weight_decay",
    "local.amp",
    "loss.name",
    "loss.class_weights",
    "schedule.kind",
    "algorithm.name",
    "algorithm.mu",
    "algorithm.server_lr",
    "algorithm.robust",
    "rounds.total",
    "rounds.fraction",
    "rounds.evaluate_every",
    "rounds.patience",
    "personal.evaluate",
    "compression.codec",
    "privacy.aggregation",
    "privacy.dp.epsilon",
    "privacy.dp.clip",
)
"""The options that most people need; `fedgraft options` shows these, and `--all` the others too."""


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the table class in an option's annotation, also inside a union such as `Table | None`.

    None if it has none.
    """
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def known_keys(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    """Return the full names of the options of `section` (default: of the whole config); `prefix` begins the names."""
    keys: list[str] = []
    table = section or Config
    for name, field in table.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            keys.append(prefix + name)
        else:
            keys += known_keys(inner, f"{prefix}{name}.")
    if issubclass(table, ChoiceSection):
        keys += [prefix + name for name in _options_by_name(table)]
    return keys


def annotation_of(key: str) -> Any:
    """Return the type annotation of the option `key` ("local.lr"); None if there is no such option."""
    section: type[BaseModel] | None = Config
    annotation: Any = None
    for part in key.strip().split("."):
        if section is None or part not in section.model_fields:
            return None
        annotation = section.model_fields[part].annotation
        section = section_of(annotation)
    return annotation


def describe_options(common_only: bool = False) -> list[str]:
    """Return a line for each option, with its key, default and meaning, under a heading for each table.

    With `common_only`, only the options in `COMMON`.
    """
    return _describe_section(Config, "", common_only)


def _describe_section(section: type[BaseModel], prefix: str, common_only: bool) -> list[str]:
    """Return the lines of the options of `section` and of the tables inside it; `prefix` begins their keys."""
    lines: list[str] = []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            inside = _describe_section(inner, f"{prefix}{name}.", common_only)
            if inside:
                lines += ["", f"[{prefix}{name}]  {(inner.__doc__ or '').strip().splitlines()[0]}", *inside]
        elif not common_only or prefix + name in COMMON:
            lines.append(_line(prefix + name, field.default, field.description or "", field.annotation))
    if issubclass(section, ChoiceSection):
        for name, owners in _options_by_name(section).items():
            if not common_only or prefix + name in COMMON:
                lines += _lines_of_choice(prefix + name, owners)
    return lines


def _line(key: str, default: Any, description: str, annotation: Any) -> str:
    """Return the line of one option: `key`, its default, its description, and the words that it takes."""
    shown_default = "none"
    if default is not None and default is not REQUIRED:
        shown_default = json.dumps(default, ensure_ascii=False)
    parts = [part for part in (description, _choices(annotation)) if part]
    return f"  {key} = {shown_default}  {'; '.join(parts)}".rstrip()


def _options_by_name(section: type[ChoiceSection]) -> dict[str, dict[str, Declared]]:
    """Return the options beside the word that chooses a function: option name -> function name -> declaration."""
    by_name: dict[str, dict[str, Declared]] = {}
    for function, options in section.functions().items():
        for option in options:
            by_name.setdefault(option.name, {})[function] = option
    return by_name


def _lines_of_choice(key: str, owners: dict[str, Declared]) -> list[str]:
    """Return the lines of an option that several functions have: one for those with the same default and meaning.

    `key` is the option's full name, `owners` its declaration by function.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for function, option in owners.items():
        groups.setdefault((json.dumps(option.default), option.description), []).append(function)
    lines = []
    for functions in groups.values():
        option = owners[functions[0]]
        description = f"{', '.join(functions)}: {option.description}"
        lines.append(_line(key, option.default, description, option.annotation))
    return lines


def _choices(annotation: Any) -> str:
    """Return the words that an option of this annotation takes, as "one of a, b"; "" if it takes others too."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    for inner in get_args(annotation):
        words = _choices(inner)
        if words and get_origin(annotation) is tuple:
            return words.replace("one of", "any of")
        if words:
            return words
    return ""


def option_fields() -> list[dict[str, Any]]:
    """Return every option as a form needs it, in the order of the config.

    Each has `key`, `section` (its heading), `input` (choice, switch, number or text), `choices`, `suggestions` (words
    that it takes beside registered ones), `default` as text, `description`, and whether it is `common`.
    """
    return _section_fields(Config, "", "The run")


def _section_fields(section: type[BaseModel], prefix: str, heading: str) -> list[dict[str, Any]]:
    """Return the fields of the options of `section` and of the tables inside it; `prefix` begins their keys."""
    fields: list[dict[str, Any]] = []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            title = (inner.__doc__ or name).strip().splitlines()[0]
            fields += _section_fields(inner, f"{prefix}{name}.", title)
        else:
            shown = _field(prefix + name, heading, field.default, field.description or "", field.annotation)
            if issubclass(section, ChoiceSection) and name == section.chosen_by:
                shown["suggestions"] = sorted(section.functions())
            fields.append(shown)
    if issubclass(section, ChoiceSection):
        for name, owners in _options_by_name(section).items():
            option = next(iter(owners.values()))
            description = f"{', '.join(owners)}: {option.description}"
            fields.append(_field(prefix + name, heading, option.default, description, option.annotation))
    return fields


def _field(key: str, heading: str, default: Any, description: str, annotation: Any) -> dict[str, Any]:
    """Return one option as a form needs it."""
    default_text = ""
    if default is not None and default is not REQUIRED and "PydanticUndefined" not in repr(default):
        default_text = default
        if not isinstance(default, str):
            default_text = json.dumps(default, ensure_ascii=False)
    choices = _words(annotation)
    return {
        "key": key,
        "section": heading,
        "input": _input_of(annotation, choices),
        "choices": choices,
        "suggestions": [],
        "default": default_text,
        "description": description,
        "common": key in COMMON,
    }


def _words(annotation: Any) -> list[str]:
    """Return the words of which an option of this annotation takes one; none if it takes others or several."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    if get_origin(annotation) is tuple:
        return []
    words: list[str] = []
    for inner in get_args(annotation):
        words += _words(inner)
    return words


def _input_of(annotation: Any, choices: list[str]) -> str:
    """Return the kind of input that an option of this annotation needs in a form."""
    plain = {argument for argument in (annotation, *get_args(annotation)) if argument is not type(None)}
    if choices and not plain & {str, int, float}:
        return "choice"
    if bool in plain:
        return "switch"
    if plain & {int, float} and str not in plain:
        return "number"
    return "text"
