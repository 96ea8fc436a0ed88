"""Files of run folders: lines of metrics, the log, and places that can be written to. `store` writes them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError

log = logging.getLogger(__name__)

TIMING = ("seconds", "time")
"""Fields of a metrics line that differ between two equal runs."""


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, or of a run folder's; an incomplete last line is left out."""
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    *complete, _rest = path.read_bytes().split(b"\n")  # text behind the last line end is an unfinished write
    for number, text in enumerate(complete, 1):
        try:
            lines.append(dict(json.loads(text)))
        except (ValueError, TypeError):
            log.warning("line %d of %s cannot be read and is left out", number, path)
    return lines


def without_timing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without the fields that differ between two equal runs."""
    return [_without_fields(line, TIMING) for line in lines]


def _without_fields(line: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Return a copy of the line without these fields."""
    rest = dict(line)
    for field in fields:
        rest.pop(field, None)
    return rest


class _LogFile(logging.FileHandler):
    """A log file that drops lines on a full disk without an error; the run itself reports what it could not write."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line."""

    def close(self) -> None:
        """Close the file; buffered lines that no longer fit are lost."""
        with contextlib.suppress(OSError):
            super().close()


class _TerminalFormatter(logging.Formatter):
    """Log lines for the terminal: the message, with a prefix for warnings; times are in the file."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line for the terminal."""
        line = super().format(record)
        if record.levelno >= logging.WARNING:
            line = f"warning: {line}"
        return line


@contextlib.contextmanager
def logging_to(path: Path, console: bool = True) -> Iterator[None]:
    """Write this library's log to a file as `timestamp | level | message`, and to the terminal if `console`."""
    file = _LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(message)s"))
    handlers: list[logging.Handler] = [file]
    if console:
        from rich.logging import RichHandler

        terminal = RichHandler(show_time=False, show_level=False, show_path=False, level=logging.INFO)
        terminal.setFormatter(_TerminalFormatter())
        terminal.addFilter(lambda record: record.name != "fedgraft.phases")  # the terminal has a display of its own
        handlers.append(terminal)
    logger = logging.getLogger("fedgraft")
    before = logger.level
    logger.setLevel(min(before or logging.INFO, logging.INFO))
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(before)


def json_ready(value: Any) -> Any:
    """Return the value as JSON can store it: scalars of other libraries become Python's, NaN and infinity None."""
    kind = type(value)
    if kind is float:  # a round has hundreds of these, so they come first
        return _finite_or_none(value)
    if kind is int or kind is str:
        return value
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if hasattr(value, "tolist"):
        return json_ready(value.tolist())
    if isinstance(value, float):
        return _finite_or_none(value)
    if isinstance(value, str | int | bool | None):
        return value
    return str(value)


def _finite_or_none(value: float) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON cannot hold."""
    if math.isfinite(value):
        return value
    return None


def flatten(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a nested mapping with `outer.inner` keys; `above` begins them, and lists stay unchanged."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = str(key)
        if above:
            name = f"{above}.{key}"
        if isinstance(item, Mapping):
            flat |= flatten(item, name)
        else:
            flat[name] = item
    return flat


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_place(path: Path, option: str) -> None:
    """Raise an error if a folder could not be created or written to; nothing is created.

    `option` is the option by which the user can choose another place, for the hint.
    """
    existing = nearest_existing(path)
    if not existing.is_dir():
        reason = "it is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = "nothing can be written there"
    else:
        return
    raise FedgraftError(
        "E-CORE-FOLDER",
        f"the folder {path} cannot be made in {existing}: {reason}",
        f"allow it, or give another with {option}",
        path=str(path),
    )


def make_folder(path: Path, option: str) -> None:
    """Create a folder with its parents; raise if that is not possible.

    `option` is the option by which the user can choose another place, for the hint.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedgraftError(
            "E-CORE-FOLDER",
            f"the folder {path} cannot be made ({error.strerror})",
            f"make room, allow it, or give another with {option}",
            path=str(path),
        ) from error


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner can enter, with its parents; an existing one is closed to others."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)


def drop_incomplete_line(path: Path) -> None:
    """Cut an incomplete last line off a text file, in place, so that the next one does not continue it."""
    if not path.is_file():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
