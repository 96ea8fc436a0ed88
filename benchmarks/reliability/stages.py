"""Node or server gone at every stage of a run on nodes with keys: head initialisation, calibration, secure sums.

The nodes are those of a deployment (ledgers, memories on disk, the same bytes as messages), asked in this process, so
that every stage can be hit exactly; `tests/deploy/test_deploy_kills.py` kills real processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.machines import Machines
from tests.support.tiny import tensors_of, without_pictures

from benchmarks.reliability.outcome import Outcome
from fedgraft.config.load import load
from fedgraft.core.messages import Request
from fedgraft.deploy.deployed import run_deployed
from fedgraft.deploy.node import NodeWorker

SMALL = [
    "model.name=tiny",
    "rounds.total=2",
    "rounds.fraction=1.0",
    "local.steps=1",
    "local.batch_size=8",
    "workers=1",
    "partition.clients=4",
    "rounds.evaluate_every=1",
    "data.source=synthetic",
    "data.count=80",
    "data.classes=3",
    "model.head=ridge",
    "rounds.checkpoint_every=1",
    "rounds.test=false",
    "personal.evaluate=end",
]
SECURE = [*SMALL, "privacy.aggregation=secure", "trainable.kind=sparse"]
FIVE = tuple(f"secure.{one}" for one in ("keys", "shares", "masked", "consistency", "unmask"))
CLEAR = ("greeting", "statistics", "fisher_scores", "train", "evaluate")
HIDDEN = [("secure", stage, sums) for sums in ("statistics", "fisher_scores", "train") for stage in FIVE]
STAGES = [*(("clear", stage, "") for stage in CLEAR), *HIDDEN, ("secure", "evaluate", "")]
VICTIM = 1


class Killed(Machines):
    """Machines of which one dies at a stage: the `server`, a `node` with the order in its hands, or one that is there
    again when it is asked (`restarted`)."""

    stage, sums, who, done = "", "", "", False

    def gather(self) -> None:
        if self._now("greeting", ""):
            self._die()
        super().gather()

    def _now(self, action: str, sums: str) -> bool:
        if self.done or (action, sums) != (self.stage, self.sums):
            return False
        self.done = True
        return True

    def _die(self) -> None:
        if self.who == "server":
            raise KeyboardInterrupt
        self.nodes[VICTIM] = NodeWorker()  # all that the process knew is gone; its files are there

    def deliver(self, request: Request) -> Any:
        if request.client == VICTIM and self._now(request.action, str(request.settings.get("sums", ""))):
            self._die()
            if self.who == "node":
                return VICTIM, "its node failed: it was killed"
        return super().deliver(request)


def _run(overrides: list[str], root: Path, stage: str, sums: str, who: str) -> dict[str, torch.Tensor]:
    """The final tensors of a run in which somebody died at this stage and, if it was the server, was resumed."""
    config = load(None, overrides)
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setenv("FEDGRAFT_CACHE", str(root / "cache"))
        for _ in range(2):
            machines = Killed(config, root / "run", root / "keys", patch)
            machines.stage, machines.sums, machines.who = stage, sums, who
            try:
                run_deployed(config, root / "run", machines)
                break
            except KeyboardInterrupt:
                who = ""
    if stage and who and not machines.done:
        raise AssertionError(f"the run never came to {stage} of {sums}")
    return {n: t for n, t in tensors_of(root / "run").items() if n.startswith(("vector", "rule/"))}


def stages(scale: float) -> Outcome:
    """Every stage once for each who may die; a part of them at a smaller scale."""
    chosen = STAGES[:: max(1, round(1 / scale))]
    whole = {mode: _in_a_folder(overrides, "", "", "") for mode, overrides in MODES.items()}
    wrong, lost, runs, unopened = [], 0, 0, 0
    for mode, stage, sums in chosen:
        for who in ("server", "node", "restarted"):
            runs += 1
            try:
                found = _in_a_folder(MODES[mode], stage, sums, who)
            except Exception as error:
                if who == "node" and sums == "fisher_scores" and getattr(error, "code", "") == "E-SERVER-SUM-ABORTED":
                    unopened += 1  # after the head's sum over all; with one less it would give the lost node away
                    continue
                wrong.append(f"{who} at {stage} {sums}: {type(error).__name__}: {str(error)[:80]}")
                continue
            same = all(torch.equal(t, whole[mode][n]) for n, t in found.items())
            lost += who == "node" and not same
            if who != "node" and not same:
                wrong.append(f"{who} at {stage} {sums}: other bytes")
    broken = _in_a_folder(MODES["clear"], "train", "", "node")
    noticed = not all(torch.equal(t, whole["clear"][n]) for n, t in broken.items())
    return Outcome(
        not wrong,
        f"{runs} runs, server, node or restarted node gone at each of {len(chosen)} stages: "
        f"{runs - len(wrong) - unopened} completed, with the same bytes wherever nobody was lost (in {lost} a node's "
        f"answer was); {unopened} ended with a sum that is not opened, because the head's was over one node more"
        + "".join(f"; {w}" for w in wrong[:5]),
        {"an answer is lost for good": "other bytes" if noticed else "the same bytes"},
        noticed,
        {"runs": runs, "wrong": wrong},
    )


MODES = {"clear": [*SMALL, "trainable.kind=sparse"], "secure": SECURE}


def _in_a_folder(overrides: list[str], stage: str, sums: str, who: str) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as name:
        return _run(overrides, Path(name), stage, sums, who)
