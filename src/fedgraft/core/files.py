"""The pieces a run folder is written with: whole files, the metrics' lines, the log and the lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError

log = logging.getLogger(__name__)

TIMING = ("seconds", "time")
"""Fields of a metrics line that two equal runs do not share."""


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a metrics file, or of a run folder's; a torn last line is left out."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    *whole, _torn = path.read_bytes().split(b"\n")  # what follows the last line end was never finished
    for number, text in enumerate(whole, 1):
        try:
            lines.append(dict(json.loads(text)))
        except (ValueError, TypeError):
            log.warning("line %d of %s cannot be read and is left out", number, path)
    return lines


def without_timing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines without the fields that differ between two equal runs."""
    return [{key: value for key, value in line.items() if key not in TIMING} for line in lines]


class _LogFile(logging.FileHandler):
    """A log that a full disk ends, and nothing else: the run says in its own words what could not be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the line."""

    def close(self) -> None:
        """Close the file; lines that do not fit any more are lost."""
        with contextlib.suppress(OSError):
            super().close()


class _Told(logging.Formatter):
    """What a person reads while it happens: the sentence, and whether it is a warning; times are in the file."""

    def format(self, record: logging.LogRecord) -> str:
        """One line for the terminal."""
        return ("warning: " if record.levelno >= logging.WARNING else "") + super().format(record)


@contextlib.contextmanager
def logging_to(path: Path, console: bool = True) -> Iterator[None]:
    """Send this library's log to a file as `timestamp | level | message`, and to the terminal if wanted."""
    file = _LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(message)s"))
    handlers: list[logging.Handler] = [file]
    if console:
        from rich.logging import RichHandler

        handlers.append(RichHandler(show_time=False, show_level=False, show_path=False, level=logging.INFO))
        handlers[-1].setFormatter(_Told())
        handlers[-1].addFilter(lambda record: record.name != "fedgraft.phases")  # the terminal shows them by itself
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


def plain(value: Any) -> Any:
    """The value as JSON can hold it: scalars of other libraries become Python's, NaN and infinity become None."""
    if (kind := type(value)) is float:  # a round has hundreds of these, so they come first
        return value if math.isfinite(value) else None
    if kind is int or kind is str:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def write_atomic(path: Path, chunks: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Put a file in its place whole or not at all; an `OSError` or an interrupt leaves nothing behind."""
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 - one spelling for all steps of the write
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable: it lives in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_place(path: Path, option: str) -> None:
    """Refuse a folder that could not be made or written to, before work starts; nothing is made."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "nothing can be written there" if there.is_dir() else "it is a file"
        raise FedgraftError(
            f"the folder {path} cannot be made in {there}: {why}; allow it, or give another with {option}."
        )


def make_folder(path: Path, option: str) -> None:
    """Make a folder with those above it; `option` names another place to the user."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedgraftError(
            f"the folder {path} cannot be made ({error.strerror}); make room, allow it, or give another with {option}."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file by this text, whole or not at all."""
    try:
        write_atomic(path, [text.encode()])
    except OSError as error:
        raise FedgraftError(f"{path} could not be written ({error.strerror}); make room or allow it.") from error


def keep(path: Path, write: Callable[[Path], object]) -> None:
    """Put a file into a cache that several processes share, whole or not at all; `write` makes it."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FedgraftError(f"{path} could not be written ({error.strerror}); make room or allow it.") from error


def repair(path: Path) -> None:
    """Cut off a torn last line, so that the next one does not continue it."""
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def take_lock(descriptor: int) -> bool:
    """Lock for good; a reader that only looks holds the lock for a moment, so try for a second."""
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
