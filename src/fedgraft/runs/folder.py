"""The folder of a run, to be written: a kill at any moment loses nothing that a resumed run would not repeat.

`run.json` holds the config's digest and the status of the run; `metrics.jsonl` has one JSON object per round; a lock
keeps a second process out. On resume the metrics are cut back to the checkpoint's round, so the finished file equals an
unbroken run's except for the fields that hold times.
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
from fedgraft.core.files import drop_incomplete_line, json_ready, logging_to, make_folder
from fedgraft.core.store import LockTaken, locked, write_all, write_text
from fedgraft.report.run_record import RunRecord

if TYPE_CHECKING:
    from torch import Tensor

    from fedgraft.runs.checkpoint import Checkpoint

log = logging.getLogger(__name__)

_LEFT_BY_CREATE = {".lock", "config.toml", ".config.toml.tmp", ".run.json.tmp"}  # by a kill in the middle of it
_SYNC_EVERY = 2.0  # seconds; a written line survives kill -9 at once, a power cut after this long
_LOCK_TIMEOUT = 1.0  # seconds; those who only read take the lock for a moment


class RunFolder(RunRecord):
    """The folder of one run, to be written; everything that changes it happens inside `writing()`."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self._metrics: int | None = None  # file descriptor, while writing
        self._synced = 0.0
        self._end = ("interrupted", "")  # status and reason to record when writing ends without an error

    @classmethod
    def create(cls, path: Path | str, config_text: str, config_digest: str) -> RunFolder:
        """Return the folder `path` as that of this config, created if need be, with `config_text` as its config.toml.

        Raises if the folder holds something else, or a run with another `config_digest`.
        """
        run = cls(path)
        make_folder(run.path, "--folder")
        with run._locked():
            if not (run.path / "run.json").exists():
                if any(entry.name not in _LEFT_BY_CREATE for entry in run.path.iterdir()):
                    raise FedgraftError(
                        "E-RUN-FOLDER-TAKEN",
                        f"the folder {run.path} is not empty and holds no run",
                        "choose another run name",
                        path=str(run.path),
                    )
                write_text(run.path / "config.toml", config_text)
                run._write_json("run.json", {"config_digest": config_digest, "status": "interrupted"})
            if run.config_digest != config_digest:
                raise FedgraftError(
                    "E-RUN-FOLDER-FOREIGN",
                    f"the folder {run.path} belongs to a run of another config",
                    "choose another run name or delete it",
                    path=str(run.path),
                )
            run.figures.mkdir(exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
        return run

    @contextlib.contextmanager
    def writing(self, console: bool = True) -> Iterator[None]:
        """Lock the folder, write its log (and with `console` the terminal's), and record how the run ended.

        The metrics can be written inside the block only.
        """
        with self._locked(), logging_to(self.path / "log.txt", console):
            self._end = ("interrupted", "")
            self._set_status("running")
            self._record_environment()
            drop_incomplete_line(self.metrics_path)
            self._metrics = os.open(self.metrics_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                yield
            except (KeyboardInterrupt, SystemExit):  # Flower turns its signals into an exit
                self._record_failure("interrupted")
                raise
            except BaseException as error:
                # Only an unexpected error needs its traceback; one for people is one sentence.
                is_unexpected = not isinstance(error, FedgraftError)
                log.error("the run failed: %s", error, exc_info=is_unexpected)
                self._record_failure("failed", f"{type(error).__name__}: {error}")
                raise
            else:
                self._set_status(*self._end)
            finally:
                os.close(self._metrics)
                self._metrics = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one round to the metrics in one write; numbers JSON cannot hold (NaN, infinity) become null."""
        data = json.dumps(json_ready(line), separators=(",", ":")).encode() + b"\n"
        descriptor = self._writable()
        size_before = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, data)
        except OSError as error:
            os.ftruncate(descriptor, size_before)  # half a line would spoil the next one
            raise self._not_written(error) from error
        if time.monotonic() - self._synced > _SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """Flush the metrics to the disk."""
        try:
            os.fsync(self._writable())
        except OSError as error:
            raise self._not_written(error) from error
        self._synced = time.monotonic()

    def rewind(self, round: int | None) -> None:
        """Delete the lines of later rounds than `round` from metrics.jsonl; None deletes them all."""
        texts = []
        for line in self.metrics():
            if round is not None and line.get("round", 0) <= round:
                texts.append(json.dumps(line, separators=(",", ":")) + "\n")
        replaced = self._writable()
        write_text(self.metrics_path, "".join(texts))
        os.close(replaced)
        self._metrics = os.open(self.metrics_path, os.O_WRONLY | os.O_APPEND)

    def save_checkpoint(
        self,
        round: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        best: float | None = None,
        keep_best: int = 3,
    ) -> Path:
        """Write a checkpoint of the state after a round, bound to this folder's config, and return its path.

        `best` is the score it is ranked by; None: it has none. All but the last few and the best `keep_best` are
        deleted. The metrics are flushed to the disk first.
        """
        from fedgraft.runs import checkpoint  # torch is not needed to look at a run

        self.sync()
        meta = {**meta, "config_digest": self.config_digest}
        return checkpoint.save(self.checkpoints, round, tensors, meta, best=best, keep_best=keep_best)

    def resume(self, check: Callable[[Checkpoint], None] | None = None) -> Checkpoint | None:
        """Return the newest good checkpoint, and cut the metrics in the folder back to its round.

        None: from the beginning. `check` may refuse a checkpoint with `BadCheckpoint`.
        """
        from fedgraft.runs import checkpoint

        latest = checkpoint.load_latest(self.checkpoints, self.config_digest, check)
        if latest is None:
            self.rewind(None)
        else:
            self.rewind(latest.round)
        return latest

    def reopen_if_damaged(self) -> None:
        """Mark a finished run as interrupted if its last checkpoint is missing or damaged, so that it can be continued.

        It then ends in the same bytes.
        """
        from fedgraft.runs import checkpoint

        latest = checkpoint.load_latest(self.checkpoints, self.config_digest)
        if self.status == "finished" and (latest is None or latest.skipped):
            with self._locked():
                self._set_status("interrupted")

    def become(self, config_text: str, config_digest: str) -> None:
        """Make the folder that of a run with another config, interrupted so far; its checkpoints must belong to it."""
        with self._locked():
            write_text(self.path / "config.toml", config_text)
            self._write_json("run.json", {"config_digest": config_digest, "status": "interrupted"})

    def finish(self, summary: Mapping[str, Any], stopped: str = "") -> None:
        """Write the final results; a run that ends without them counts as interrupted.

        `stopped` is the reason of a callback that ended the run early; such a run can be continued.
        """
        self.sync()
        self._write_json("summary.json", json_ready(summary))
        if stopped:
            self._end = ("stopped", stopped)
        else:
            self._end = ("finished", "")

    def _not_written(self, error: OSError) -> FedgraftError:
        """Return the error for metrics that could not be written."""
        return FedgraftError(
            "E-RUN-METRICS-WRITE",
            f"{self.metrics_path} could not be written ({error.strerror})",
            "make room and resume the run",
            path=str(self.metrics_path),
        )

    def _record_failure(self, status: str, reason: str = "") -> None:
        """Write the status and reason of a run that did not finish; if that fails, it counts as interrupted."""
        with contextlib.suppress(FedgraftError):  # the error that ended the run is the one to report
            self._set_status(status, reason)

    def _writable(self) -> int:
        """Return the descriptor of the open metrics file; raise outside `writing()`."""
        if self._metrics is None:
            raise FedgraftError(
                "E-RUN-FOLDER-CLOSED",
                f"the run folder {self.path} is not open for writing",
                "use `with folder.writing():`",
                path=str(self.path),
            )
        return self._metrics

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock; raise an error that names the process which has it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / ".lock", _LOCK_TIMEOUT))
            except LockTaken as error:
                raise FedgraftError(
                    "E-RUN-FOLDER-IN-USE",
                    f"the run folder {self.path} is in use by process {error.owner}",
                    "wait for it or choose another run name",
                    path=str(self.path),
                    process=error.owner,
                ) from error
            yield

    def _record_environment(self) -> None:
        """Write the facts about this machine; a resumed run adds them to those of its first start."""
        from fedgraft.runs import environment

        now = environment.machine_facts()
        first = self.environment()
        if not first:
            self._write_json("environment.json", now)
            return
        changes = environment.differences(first, now)
        if changes:
            log.warning("resumed in another environment, so the last bits may differ: %s", "; ".join(changes))
        first["resumed"] = [*first.get("resumed", []), now]
        self._write_json("environment.json", first)

    def _set_status(self, status: str, reason: str = "") -> None:
        """Write the status into run.json, with a reason where there is one."""
        state = {"config_digest": self.config_digest, "status": status}
        if reason:
            state["reason"] = reason
        self._write_json("run.json", state)

    def _write_json(self, name: str, value: Any) -> None:
        """Replace the JSON file `name` of the folder."""
        write_text(self.path / name, json.dumps(value, indent=2) + "\n")
