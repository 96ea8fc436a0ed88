"""What a studio that may act does: plan, start, stop, resume, evaluate and release runs, each as a `fedgraft` command.

Every command is a process in a group of its own, with the words of the form as its arguments; no shell is involved.
Only processes that this studio started can be stopped by it. They go on when the studio ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.config import presets
from fedgraft.config.load import Config, load
from fedgraft.core.errors import FedgraftError
from fedgraft.report.run_index import run_name

PLAN_SECONDS = 120.0
"""How long a plan may take."""
_WORD = re.compile(r"[a-z][a-z0-9_]*(\.[A-Za-z0-9_]+)*=[^\x00]*")
_OUTPUT = 20_000  # characters of a command's output that are shown
_MOST_WORDS = 300


@dataclass
class Job:
    """One command that the studio started."""

    identity: str
    title: str
    run: str
    """The run's name below the studio's folder."""
    process: subprocess.Popen[bytes]
    output: Path
    began: float
    has_run: bool
    """Whether it works on one run, and not on the whole federation."""

    def as_json(self) -> dict[str, Any]:
        """Return the job's state and the end of its output."""
        text = ""
        with contextlib.suppress(OSError):
            text = self.output.read_text(errors="replace")[-_OUTPUT:]
        return {
            "id": self.identity,
            "title": self.title,
            "run": self.run,
            "has_run": self.has_run,
            "code": self.process.poll(),
            "seconds": time.time() - self.began,
            "output": text,
        }


class Actions:
    """Starts commands on runs below `root` and remembers them."""

    has_form = True
    """Whether a run starts from a form of options."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._outputs = Path(tempfile.mkdtemp(prefix="fedgraft-studio-"))

    def jobs(self) -> list[dict[str, Any]]:
        """Return the commands started so far, the newest first."""
        with self._lock:
            jobs = list(self._jobs.values())
        return [job.as_json() for job in reversed(jobs)]

    def plan(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `fedgraft run --dry-run` prints for the options of the form: `text`, and `ok`."""
        words = self._words(request)
        self._config(request)
        return self._dry_run(words)

    def _dry_run(self, words: Sequence[str]) -> dict[str, Any]:
        """Return what `fedgraft run --dry-run` prints for these arguments: `text`, and `ok`."""
        command = [*_command("run"), *words, "--dry-run"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=PLAN_SECONDS, check=False, env=_environment())
        except subprocess.TimeoutExpired:
            raise FedgraftError(
                "E-STUDIO-PLAN-TIME", f"the plan took longer than {PLAN_SECONDS:g} s", "start the run without it"
            ) from None
        text = (done.stdout + done.stderr).decode(errors="replace")[-_OUTPUT:]
        return {"ok": done.returncode == 0, "text": text}

    def start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run with the options of the form, in a new folder; return its job."""
        words = self._words(request)
        config = self._config(request)
        folder = self._new_folder(config)
        command = [*_command("run"), *words, "--folder", str(folder), "--quiet"]
        return self._spawn(f"run {config.name}", folder, command)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Continue the run in a folder; return its job."""
        return self._spawn(f"resume {folder.name}", folder, [*_command("resume"), str(folder), "--quiet"])

    def evaluate(self, folder: Path) -> dict[str, Any]:
        """Measure the model of the run in a folder on its test images; return its job."""
        return self._spawn(f"evaluate {folder.name}", folder, [*_command("evaluate"), str(folder)])

    def release(self, folder: Path) -> dict[str, Any]:
        """Judge the model of the run in a folder before it leaves, by `fedgraft release`; return its job."""
        return self._spawn(f"release {folder.name}", folder, [*_command("release"), str(folder)])

    def stop(self, run: str) -> dict[str, Any]:
        """Interrupt the command of this studio that works on a run, which saves its state; return its job."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.run == run and job.process.poll() is None]
        if not jobs:
            raise FedgraftError(
                "E-STUDIO-NOT-OURS",
                f"this studio did not start a command that works on {run}",
                "press Ctrl-C where it was started",
                run=run,
            )
        job = jobs[-1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGINT)
        return job.as_json()

    def _spawn(self, title: str, folder: Path, command: Sequence[str]) -> dict[str, Any]:
        """Start a command that works on the run in `folder`; refuse a second one at the same time."""
        run = self._name(folder)
        with self._lock:
            for job in self._jobs.values():
                if job.run == run and job.process.poll() is None:
                    raise FedgraftError("E-STUDIO-BUSY", f"{job.title} still runs", "wait for it or stop it", run=run)
            identity = secrets.token_hex(6)
            output = self._outputs / f"{identity}.txt"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=_environment(),
                )
            job = Job(
                identity, title, run, process, output, time.time(), self.has_form or (folder / "run.json").is_file()
            )
            self._jobs[identity] = job
        return job.as_json()

    def _name(self, folder: Path) -> str:
        """Return the name of the run in a folder, as the list has it."""
        return run_name(folder, self.root)

    def _words(self, request: Mapping[str, Any]) -> list[str]:
        """Return the arguments of `fedgraft run` that the form stands for; refuse what is no `key=value`."""
        words: list[str] = []
        preset = request.get("preset") or ""
        if preset:
            presets.text(str(preset))  # raises unless it is one
            words.append(str(preset))
        options = request.get("options") or {}
        if not isinstance(options, Mapping) or len(options) > _MOST_WORDS:
            raise FedgraftError("E-STUDIO-FORM", "the options of the form are not a table", "reload the page")
        for key, value in options.items():
            word = f"{key}={value}"
            if not _WORD.fullmatch(word):
                raise FedgraftError("E-STUDIO-FORM", f"{word[:80]!r} is no option", "use the names of the form")
            words.append(word)
        return words

    def _config(self, request: Mapping[str, Any]) -> Config:
        """Return the config of the form; raise the first mistake in it."""
        words = self._words(request)
        preset = request.get("preset") or ""
        if preset:
            return load(None, words[1:], presets.table(str(preset)))
        return load(None, words)

    def _new_folder(self, config: Config) -> Path:
        """Return a folder below the studio's that no run has yet."""
        base = self.root / f"{config.name}-{config.digest}"
        folder = base
        number = 1
        while folder.exists():
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        return folder


class FederationActions(Actions):
    """Actions on the federation in `root`: the same ones, each as a `fedgraft deploy` command.

    Its config is what the owners agreed to, so a run starts with that and there is no form of options.
    """

    has_form = False

    def plan(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `fedgraft run --dry-run` prints for the federation's config: `text`, and `ok`."""
        return self._dry_run([str(self.root / "config.toml")])

    def start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start the federation's run on the connected nodes; return its job."""
        return self._spawn("submit the run", self.root, [*_command("deploy", "submit"), str(self.root)])

    def preflight(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the nodes for a preflight; return its job."""
        page = self.root / "preflight" / "page"
        command = [*_command("deploy", "preflight"), str(self.root), "--out", str(page)]
        return self._spawn("preflight", self.root, command)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Continue a run of the federation; return its job."""
        command = [*_command("deploy", "submit"), str(self.root), "--folder", str(folder), "--resume"]
        return self._spawn(f"resume {folder.name}", folder, command)

    def evaluate(self, folder: Path) -> dict[str, Any]:
        """Measure the model of a run on every node's own test images; return its job."""
        command = [*_command("deploy", "evaluate"), str(self.root), str(folder)]
        return self._spawn(f"evaluate {folder.name}", folder, command)

    def release(self, folder: Path) -> dict[str, Any]:
        """Judge the model of a run before it leaves, from counts of every node; return its job."""
        command = [*_command("deploy", "release"), str(self.root), str(folder)]
        return self._spawn(f"release {folder.name}", folder, command)

    def stop(self, run: str) -> dict[str, Any]:
        """Stop the federation's latest run, whoever started it; the server and the nodes go on. Return the job."""
        command = [*_command("deploy", "stop"), str(self.root), "--run"]
        return self._spawn("stop the run", self.root / "stop", command)


def _command(*names: str) -> list[str]:
    """Return the beginning of a `fedgraft` command, with this process's Python."""
    return [sys.executable, "-m", "fedgraft", *names]


def _environment() -> dict[str, str]:
    """Return the environment of a command: its output is for a page, not for a terminal."""
    return {**os.environ, "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
