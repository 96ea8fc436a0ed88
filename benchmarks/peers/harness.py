"""Environments by package name, runs in turn, results as JSON files that can be completed later.

A result is `runs/benchmarks/results/WORKLOAD/PEER/REPEAT.json`; what is there with the same key is not run again. A
peer that cannot be installed or run leaves `error.json` with the reason, and the page says so.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import Measured, watch
from benchmarks.peers.shared.protocol import Workload
from benchmarks.peers.workloads import SHORT, Spec, config_of, prepare

HERE = Path(__file__).resolve().parent
OURS = ("fedgraft", "bare")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def cache() -> Path:
    """Where the peers' environments are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedgraft" / "benchmarks"


def environment(peer: str) -> Path:
    """The peer's Python, its environment created when it is missing or its requirements have changed."""
    if peer in OURS:
        return Path(sys.executable)
    wanted = {name: HERE / peer / name for name in ("requirements.txt", "no-deps.txt")}
    text = "".join(path.read_text() for path in wanted.values() if path.exists())
    home, python = cache() / peer, cache() / peer / "bin" / "python"
    stamp = home / "ready"
    if stamp.exists() and stamp.read_text() == text:
        return python
    print(f"{peer}: creating {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    env = {**os.environ, "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    _do([sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), str(home)], env)
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python)] if uv else []
    install = install or [str(python), "-m", "pip", "install", "--quiet"]
    _do([*install, "-r", str(wanted["requirements.txt"])], env)
    if wanted["no-deps.txt"].exists():  # packages that ask for more than they need
        _do([*install, "--no-deps", "-r", str(wanted["no-deps.txt"])], env)
    stamp.write_text(text)
    return python


class Failed(Exception):
    """A peer that does not install or run, with the reason in one line."""


def _do(command: list[str], env: dict[str, str]) -> None:
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    if found.returncode:
        raise Failed(last_line(found.stderr))


def last_line(text: str) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def key_of(workload: Workload, peer: str) -> str:
    """What must be equal for a stored result to count: the work and the peer's versions."""
    pins = HERE / peer / "requirements.txt"
    text = json.dumps(asdict(replace(workload, data="", backbone=None)), sort_keys=True)
    return hashlib.blake2b((text + (pins.read_text() if pins.exists() else "")).encode(), digest_size=8).hexdigest()


def run_one(spec: Spec, peer: str, workload: Workload, root: Path, timeout: float) -> dict[str, Any]:
    """One run of one peer in a fresh folder; returns its result with what it cost."""
    python = environment(peer)
    folder = root / "work" / spec.name / peer
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "workload.json").write_text(json.dumps(asdict(workload)))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    env |= {**QUIET, "FLWR_HOME": str(folder / "flwr")}
    if workload.cores != os.cpu_count():
        env["OMP_NUM_THREADS"] = str(workload.cores)
    if peer in OURS:
        env["FEDGRAFT_CACHE"] = str(own_cache(spec, folder, root))
        _write_config(spec, workload, folder, root)
    done = watch([str(python), str(HERE / peer / "run.py"), str(folder)], env, folder / "log.txt", timeout)
    result = folder / "result.json"
    if not result.exists() or done.code:
        said = last_line((folder / "log.txt").read_text(errors="replace"))
        raise Failed(f"exit code {done.code}: {f'ended after {timeout:.0f} s' if done.code == -9 else said}")
    return {**json.loads(result.read_text()), **cost(done), "key": key_of(workload, peer), "of": spec.rounds}


def own_cache(spec: Spec, folder: Path, root: Path) -> Path:
    """fedgraft's cache: images are there, as they are for peers. A frozen backbone begins without features."""
    kept = root / "data" / "cache"
    if spec.group != "frozen":
        return kept
    fresh = folder / "cache"
    fresh.mkdir()
    (fresh / "stores").symlink_to((kept / "stores").resolve())
    return fresh


def _write_config(spec: Spec, workload: Workload, folder: Path, root: Path) -> None:
    from fedgraft.config.load import Config, to_toml

    tables = config_of(spec, workload.rounds, root / "data" / spec.name)
    (folder / "config.toml").write_text(to_toml(Config.model_validate(tables)))


def cost(done: Measured) -> dict[str, Any]:
    """What the harness saw of a run."""
    return {
        "seconds": done.seconds,
        "peak_mb": done.peak_mb,
        "cpu_seconds": done.cpu_seconds,
        "other_load": done.other_load,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def check(result: dict[str, Any], workload: Workload) -> None:
    """Refuse a result that is not of this work: other data, or another number of steps."""
    if result["digest"] != workload.digest:
        raise Failed("it worked on other data")
    if result["rounds"] != workload.rounds or result["steps"] != workload.total_steps:
        raise Failed(f"it took {result['steps']} steps in {result['rounds']} rounds, not {workload.total_steps}")


@dataclass(frozen=True)
class Plan:
    """How the workloads are run."""

    repeats: int
    quick: bool
    fresh: bool
    timeout: float
    cores: int
    until: float = math.inf
    """A time of `time.time` at which everything ends; what is there by then is the result."""


def bench(specs: list[Spec], plan: Plan, root: Path, after: Callable[[], object] = lambda: None) -> None:
    """All runs that are not there yet: repeat by repeat of everything, within a repeat every peer in turn.

    `after` is called when a repeat of a workload is done.
    """
    work = {spec.name: prepare(spec, root / "data" / spec.name, plan.cores) for spec in specs}
    for repeat in range(plan.repeats):
        for spec in specs:
            turn = [*OURS, *spec.peers]
            for peer in turn[repeat % len(turn) :] + turn[: repeat % len(turn)]:
                if time.time() > plan.until:
                    print("no time left", flush=True)
                    return
                _turn(spec, peer, replace(work[spec.name], rounds=spec.rounds_of(peer, plan.quick)), repeat, root, plan)
            if repeat == 0 and plan.quick and spec.complete:  # as many rounds as the peers do, for the accuracy alone
                _turn(spec, "fedgraft", replace(work[spec.name], rounds=spec.measured), SHORT, root, plan)
            after()


def _turn(spec: Spec, peer: str, workload: Workload, repeat: int | str, root: Path, plan: Plan) -> None:
    context = root / "results" / spec.name / peer
    file, error = context / f"{repeat}.json", context / "error.json"
    if not plan.fresh and file.exists() and json.loads(file.read_text())["key"] == key_of(workload, peer):
        return
    context.mkdir(parents=True, exist_ok=True)
    try:
        result = run_one(spec, peer, workload, root, min(plan.timeout, plan.until - time.time()))
        if peer != "bare":
            check(result, workload)
    except Failed as reason:
        if time.time() >= plan.until:  # it was ended, which says nothing about it
            return
        error.write_text(json.dumps({"reason": str(reason)}))
        print(f"{spec.name} {peer}: failed: {reason}", flush=True)
        return
    error.unlink(missing_ok=True)
    file.write_text(json.dumps(result))
    print(
        f"{spec.name} {peer} {repeat}: {result['seconds']:.1f} s, others {result['other_load']:.2f} cores", flush=True
    )
