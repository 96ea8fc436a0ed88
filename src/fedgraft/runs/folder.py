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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import json_ready, logging_to, make_folder, repair, take_lock, write_text
from fedgraft.report.run_record import RunRecord

if TYPE_CHECKING:
    from torch import Tensor

    from fedgraft.runs.checkpoint import Checkpoint

log = logging.getLogger(__name__)

_BEGINNINGS = {".lock", "config.toml", ".config.toml.tmp", ".run.json.tmp"}  # what a kill during `create` leaves
_SYNC_EVERY = 2.0  # seconds; a written line survives kill -9 at once, a power cut after this long


class RunFolder(RunRecord):
    """The folder of one run, to be written: everything that changes it happens inside `writing()`."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
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
        view = memoryview(json.dumps(json_ready(line), separators=(",", ":")).encode() + b"\n")
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
        self._write_json("summary.json", json_ready(summary))
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

    def _write_json(self, name: str, value: Any) -> None:
        write_text(self.path / name, json.dumps(value, indent=2) + "\n")
