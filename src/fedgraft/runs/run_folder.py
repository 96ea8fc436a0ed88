"""The run folder: everything one run leaves behind, written so that a kill at any moment loses nothing that counts.

`run.json` says whose folder it is (the config's digest) and how the run stands; `metrics.jsonl` has one JSON object per
round; a lock keeps a second process out. On resume the metrics are cut back to the checkpoint's round, so the
finished file equals an unbroken run's except for the fields that hold times.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.errors import FedgraftError
from fedgraft.runs.files import is_locked, logging_to, make_folder, plain, read_metrics, repair, take_lock, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from fedgraft.runs.checkpoint import Checkpoint

log = logging.getLogger(__name__)

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
        make_folder(run.path, "--folder")
        with run._locked():
            if not (run.path / "run.json").exists():
                if any(entry.name not in _BEGINNINGS for entry in run.path.iterdir()):
                    raise FedgraftError(
                        f"the folder {run.path} is not empty and holds no run; choose another run name."
                    )
                write_text(run.path / "config.toml", config_text)
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
        return "interrupted" if status == "running" and not is_locked(self.path / ".lock") else status

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
            repair(self.metrics_path)
            self._metrics = os.open(self.metrics_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                yield
            except (KeyboardInterrupt, SystemExit):  # told to end; Flower turns its signals into an exit
                self._note_end("interrupted")
                raise
            except BaseException as error:
                # Only a surprise needs its traceback; an error meant for people is one sentence.
                log.error("the run failed: %s", error, exc_info=not isinstance(error, FedgraftError))
                self._note_end("failed", f"{type(error).__name__}: {error}")
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
            raise self._full(error) from error
        if time.monotonic() - self._synced > _SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """Flush the metrics to the disk."""
        try:
            os.fsync(self._writable())
        except OSError as error:
            raise self._full(error) from error
        self._synced = time.monotonic()

    def rewind(self, round: int | None) -> None:
        """Drop the metrics of later rounds than this one; None drops them all."""
        kept = [] if round is None else [line for line in self.metrics() if line.get("round", 0) <= round]
        old = self._writable()
        write_text(self.metrics_path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))
        os.close(old)
        self._metrics = os.open(self.metrics_path, os.O_WRONLY | os.O_APPEND)

    def save_checkpoint(
        self, round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], best: float | None = None
    ) -> Path:
        """Store the state after a round, the metrics up to it first, bound to this folder's config."""
        self.sync()
        bound = {**meta, "config_digest": self.config_digest}
        from fedgraft.runs import checkpoint  # torch is not needed to look at a run

        return checkpoint.save(self.checkpoints, round, tensors, bound, best=best)

    def resume(self, check: Callable[[Checkpoint], None] | None = None) -> Checkpoint | None:
        """The newest good checkpoint, with the metrics cut back to its round; None means from the beginning."""
        from fedgraft.runs import checkpoint

        found = checkpoint.load_latest(self.checkpoints, self.config_digest, check)
        self.rewind(None if found is None else found.round)
        return found

    def mend(self) -> None:
        """Let a finished run whose last checkpoint is gone or damaged be continued: the same bytes come again."""
        from fedgraft.runs import checkpoint

        found = checkpoint.load_latest(self.checkpoints, self.config_digest)
        if self.status == "finished" and (found is None or found.skipped):
            with self._locked():
                self._set_status("interrupted")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final results; a run that ends without them counts as interrupted."""
        self.sync()
        self._write_json("summary.json", plain(summary))
        self._finished = True

    def _full(self, error: OSError) -> FedgraftError:
        return FedgraftError(
            f"{self.metrics_path} could not be written ({error.strerror}); make room and resume the run."
        )

    def _note_end(self, status: str, reason: str = "") -> None:
        """How a run ended that did not finish; where even that cannot be written it counts as interrupted."""
        with contextlib.suppress(FedgraftError):  # what ended the run is what its user must read
            self._set_status(status, reason)

    def _writable(self) -> int:
        if self._metrics is None:
            raise FedgraftError(f"the run folder {self.path} is not open for writing; use `with folder.writing():`.")
        return self._metrics

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not take_lock(descriptor):
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
        from fedgraft.runs import environment

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
        except (ValueError, TypeError, RecursionError) as error:
            raise FedgraftError(f"{path} is damaged: it is not JSON; delete it or restore the run folder.") from error

    def _write_json(self, name: str, value: Any) -> None:
        write_text(self.path / name, json.dumps(value, indent=2) + "\n")


def list_runs(root: Path | str) -> list[RunInfo]:
    """Every run below a folder, by name, without those a run made inside itself; an unreadable one is warned of."""
    root, found = Path(root), list[RunInfo]()
    for path in sorted(root.glob("**/run.json")):
        inside = any((above / "run.json").exists() for above in path.parents[1 : len(path.relative_to(root).parts)])
        try:
            found += [] if inside else [describe(RunFolder(path.parent), None, root)]
        except FedgraftError as error:
            log.warning("left out of the list: %s", error)
    return found


def describe(run: RunFolder, lines: Sequence[Mapping[str, Any]] | None = None, root: Path | None = None) -> RunInfo:
    """How one run stands, from its metrics (read unless given) and its summary; named by its path below `root`."""
    lines, summary = run.metrics() if lines is None else lines, run.summary()
    scores = [line["accuracy"] for line in lines if line.get("accuracy") is not None]
    spent = [line.get("seconds") or {} for line in lines]
    seconds = sum(sum(s.values()) if isinstance(s, dict) else s for s in spent)
    counts = [summary] if "bytes_up" in summary else lines  # the summary's also hold what was sent outside the rounds
    return RunInfo(
        name=run.path.relative_to(root).as_posix() if root and root != run.path else run.path.name,
        path=run.path,
        status=run.status,
        round=lines[-1].get("round") if lines else None,
        best=(summary.get("validation") or {}).get("accuracy", max(scores, default=None)),
        test=(summary.get("test") or {}).get("accuracy"),
        bytes=sum((one.get("bytes_up") or 0) + (one.get("bytes_down") or 0) for one in counts),
        seconds=float(summary.get("seconds") or seconds),
        config_digest=run.config_digest,
    )
