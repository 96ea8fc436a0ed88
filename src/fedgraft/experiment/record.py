"""The run folder: everything one run leaves behind, written so that a kill at any moment loses nothing that counts.

`run.json` says whose folder it is (the config's digest) and how the run stands; `metrics.jsonl` has one JSON object per
round; a lock keeps a second process out. On resume the metrics are cut back to the checkpoint's round, so the
finished file equals an unbroken run's except for the fields that hold times.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.errors import FedgraftError
from fedgraft.experiment import checkpoint, environment
from fedgraft.experiment.checkpoint import Checkpoint, write_atomic

log = logging.getLogger(__name__)

TIMING = ("seconds", "time")
"""Fields of a metrics line that two equal runs do not share."""
_BEGINNINGS = {".lock", "config.toml", ".config.toml.tmp", ".run.json.tmp"}  # what a kill during `create` leaves
_SYNC_EVERY = 2.0  # seconds; a written line survives kill -9 at once, a power cut after this long


@dataclass(frozen=True)
class RunInfo:
    """One row of `fedgraft list`."""

    name: str
    path: Path
    status: str
    """`running`, `finished`, `interrupted` or `failed`."""
    round: int | None
    best: float | None
    """Best validation accuracy so far."""
    test: float | None
    bytes: int
    seconds: float
    config_digest: str


class RunFolder:
    """The folder of one run. Reading needs nothing; writing happens inside `writing()`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.report = self.path / "report.html"
        self._metrics: int | None = None  # file descriptor, while writing
        self._synced = 0.0
        self._finished = False

    @classmethod
    def create(cls, path: Path | str, config_text: str, config_digest: str) -> RunFolder:
        """Make the folder for this config, or return it if it is already this config's; another's is refused."""
        run = cls(path)
        run.path.mkdir(parents=True, exist_ok=True)
        with run._locked():
            if not (run.path / "run.json").exists():
                if any(entry.name not in _BEGINNINGS for entry in run.path.iterdir()):
                    raise FedgraftError(
                        f"the folder {run.path} is not empty and holds no run; choose another run name."
                    )
                _write(run.path / "config.toml", config_text)
                run._write_json("run.json", {"config_digest": config_digest, "status": "interrupted"})
            if run.config_digest != config_digest:
                raise FedgraftError(
                    f"the folder {run.path} belongs to a run of another config; choose another run name or delete it."
                )
            run.figures.mkdir(exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run folder."""
        run = cls(path)
        if not (run.path / "run.json").is_file():
            raise FedgraftError(f"there is no run in {run.path}; `fedgraft list` shows the runs there are.")
        return run

    @property
    def config_digest(self) -> str:
        """The digest of the config this folder belongs to."""
        return str(self._read_json("run.json").get("config_digest", ""))

    @property
    def config_text(self) -> str:
        """The resolved config as TOML."""
        return (self.path / "config.toml").read_text(encoding="utf-8")

    @property
    def status(self) -> str:
        """`running`, `finished`, `interrupted` or `failed`; a run that was killed counts as interrupted."""
        status = str(self._read_json("run.json").get("status", "interrupted"))
        return "interrupted" if status == "running" and not _is_locked(self.path / ".lock") else status

    @property
    def reason(self) -> str:
        """Why a failed run failed."""
        return str(self._read_json("run.json").get("reason", ""))

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds so far."""
        return read_metrics(self.metrics_path)

    def summary(self) -> dict[str, Any]:
        """The final results; empty while there are none."""
        return self._read_json("summary.json")

    def environment(self) -> dict[str, Any]:
        """Facts of the first start; those of later ones are under `resumed`."""
        return self._read_json("environment.json")

    @contextlib.contextmanager
    def writing(self, console: bool = True) -> Iterator[None]:
        """Own the folder: lock it, log into it (and to `rich.get_console()`), and leave behind how the run ended."""
        with self._locked(), logging_to(self.path / "log.txt", console):
            self._finished = False
            self._set_status("running")
            self._note_environment()
            _repair(self.metrics_path)
            self._metrics = os.open(self.metrics_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                yield
            except KeyboardInterrupt:
                self._set_status("interrupted")
                raise
            except BaseException as error:
                # Only a surprise needs its traceback; an error meant for people is one sentence.
                log.error("the run failed: %s", error, exc_info=not isinstance(error, FedgraftError))
                self._set_status("failed", f"{type(error).__name__}: {error}")
                raise
            else:
                self._set_status("finished" if self._finished else "interrupted")
            finally:
                os.close(self._metrics)
                self._metrics = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one round to the metrics in one write; numbers JSON cannot hold (NaN, infinity) become null."""
        view = memoryview(json.dumps(plain(line), separators=(",", ":")).encode() + b"\n")
        descriptor = self._writable()
        before = os.fstat(descriptor).st_size
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError as error:
            os.ftruncate(descriptor, before)  # half a line would spoil the next one
            raise FedgraftError(
                f"{self.metrics_path} could not be written ({error.strerror}); make room and resume the run."
            ) from error
        if time.monotonic() - self._synced > _SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """Flush the metrics to the disk."""
        os.fsync(self._writable())
        self._synced = time.monotonic()

    def rewind(self, round: int | None) -> None:
        """Drop the metrics of later rounds than this one; None drops them all."""
        kept = [] if round is None else [line for line in self.metrics() if line.get("round", 0) <= round]
        old = self._writable()
        _write(self.metrics_path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))
        os.close(old)
        self._metrics = os.open(self.metrics_path, os.O_WRONLY | os.O_APPEND)

    def save_checkpoint(
        self, round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], best: float | None = None
    ) -> Path:
        """Store the state after a round, the metrics up to it first, bound to this folder's config."""
        self.sync()
        bound = {**meta, "config_digest": self.config_digest}
        return checkpoint.save(self.checkpoints, round, tensors, bound, best=best)

    def resume(self) -> Checkpoint | None:
        """The newest good checkpoint, with the metrics cut back to its round; None means from the beginning."""
        found = checkpoint.load_latest(self.checkpoints, self.config_digest)
        self.rewind(None if found is None else found.round)
        return found

    def best_checkpoint(self) -> Checkpoint | None:
        """The stored checkpoint with the best validation value."""
        return checkpoint.load_best(self.checkpoints, self.config_digest)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final results; a run that ends without them counts as interrupted."""
        self.sync()
        self._write_json("summary.json", plain(summary))
        self._finished = True

    def _writable(self) -> int:
        if self._metrics is None:
            raise FedgraftError(f"the run folder {self.path} is not open for writing; use `with folder.writing():`.")
        return self._metrics

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _take(descriptor):
                owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
                raise FedgraftError(
                    f"the run folder {self.path} is in use by process {owner}; wait for it or choose another run name."
                )
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def _note_environment(self) -> None:
        now, before = environment.facts(), self.environment()
        if before:
            before["resumed"] = [*before.get("resumed", []), now]
            if changed := environment.differences(before, now):
                log.warning("resumed on other ground, so the last bits may differ: %s", "; ".join(changed))
        self._write_json("environment.json", before or now)

    def _set_status(self, status: str, reason: str = "") -> None:
        state = {"config_digest": self.config_digest, "status": status}
        self._write_json("run.json", {**state, "reason": reason} if reason else state)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise FedgraftError(f"{path} is damaged: it is not JSON; delete it or restore the run folder.") from error

    def _write_json(self, name: str, value: Any) -> None:
        _write(self.path / name, json.dumps(value, indent=2) + "\n")


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


def list_runs(root: Path | str) -> list[RunInfo]:
    """Every run below a folder, by name."""
    root = Path(root)
    return [describe(RunFolder(path.parent), root) for path in sorted(root.glob("**/run.json"))]


def describe(run: RunFolder, root: Path | None = None) -> RunInfo:
    """How one run stands, from its metrics and its summary."""
    lines, summary = run.metrics(), run.summary()
    scores = [line["accuracy"] for line in lines if line.get("accuracy") is not None]
    spent = [line.get("seconds") or {} for line in lines]
    seconds = sum(sum(s.values()) if isinstance(s, dict) else s for s in spent)
    return RunInfo(
        name=run.path.relative_to(root).as_posix() if root and root != run.path else run.path.name,
        path=run.path,
        status=run.status,
        round=lines[-1].get("round") if lines else None,
        best=max(scores, default=None),
        test=(summary.get("test") or {}).get("accuracy"),
        bytes=sum((line.get("bytes_up") or 0) + (line.get("bytes_down") or 0) for line in lines),
        seconds=float(summary.get("seconds") or seconds),
        config_digest=run.config_digest,
    )


@contextlib.contextmanager
def logging_to(path: Path, console: bool = True) -> Iterator[None]:
    """Send this library's log to a file as `timestamp | level | message`, and to the terminal if wanted."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(message)s"))
    handlers: list[logging.Handler] = [file]
    if console:
        from rich.logging import RichHandler

        handlers.append(RichHandler(show_path=False, show_level=True, markup=False, level=logging.INFO))
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
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, [text.encode()])
    except OSError as error:
        raise FedgraftError(f"{path} could not be written ({error.strerror}); make room or allow it.") from error


def _repair(path: Path) -> None:
    """Cut off a torn last line, so that the next one does not continue it."""
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _take(descriptor: int) -> bool:
    """Lock for good; a reader that only looks holds the lock for a moment, so try for a second."""
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def _is_locked(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
