"""Privacy in whole rounds: a resumed run goes on with its own noise, and one client moves a hidden sum by one share."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from torch import Tensor

from fedgraft.algorithms.algorithm import secure_segments, vary
from fedgraft.config.load import load
from fedgraft.core.messages import Request
from fedgraft.privacy.dp import Mechanism, clip
from fedgraft.privacy.protection import DifferentialPrivacy, Secure
from fedgraft.runs import loop as running
from fedgraft.server.secure_sum import SecureSession

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.reliability.privacy import all_counted
from benchmarks.reliability.private_rounds import BOUND, Clients, pair_shift, private
from benchmarks.reliability.private_rounds import released as one_round

OVERRIDES = [
    "model.name=tiny",
    "data.image_size=16",
    "data.source=digits",
    "data.limit=200",
    "partition.clients=8",
    "model.head=random",
    "algorithm.weighting=uniform",
    "rounds.total=4",
    "rounds.evaluate_every=0",
    "rounds.checkpoint_every=2",
    "rounds.sampling=poisson",
    "local.steps=1",
    "workers=1",
    "privacy.dp.noise=0.8",
    "privacy.dp.secret=true",
]


def released(folder: Path, patch: pytest.MonkeyPatch, stop: int | None) -> dict[int, bytes]:
    """Each round's model as it left the server; the run dies in round `stop`, after it has released it."""
    seen: dict[int, bytes] = {}
    real = running.run_round

    def watched(*arguments: Any) -> Any:
        new, summary = real(*arguments)
        seen[new.round] = new.vector.numpy().tobytes()
        if new.round == stop:
            raise RuntimeError("the machine went dark")
        return new, summary

    with patch.context() as inner:
        inner.setattr(running, "run_round", watched)
        inner.setattr(running, "report_run", lambda *a, **k: None)
        if stop is None:
            running.run(load(None, OVERRIDES), folder, console=False)
        else:
            with pytest.raises(RuntimeError, match="dark"):
                running.run(load(None, OVERRIDES), folder, console=False)
    return seen


@pytest.mark.parametrize("broken", [False, True])
def test_a_repeated_round_releases_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Rounds 1 to 3, death, rounds 3 and 4 from the checkpoint of round 2. Planted bug: the key is not kept."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    if broken:
        monkeypatch.setattr(running, "read_or_draw_secret", lambda folder: os.urandom(32))
    first = released(tmp_path / "run", monkeypatch, stop=3)
    again = released(tmp_path / "run", monkeypatch, stop=None)
    assert sorted(first) == [1, 2, 3] and sorted(again) == [3, 4]
    assert (first[3] == again[3]) != broken


def test_two_runs_do_not_share_their_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    one, two = (released(tmp_path / name, monkeypatch, stop=1) for name in ("one", "two"))
    assert one[1] != two[1]


@pytest.mark.parametrize("bound", [True, False])
def test_noise_does_not_cancel_where_a_round_is_repeated_over_other_answers(bound: bool) -> None:
    """Its checkpoint was lost and other clients answer. Planted bug: noise by key and round alone cancels out."""
    algorithm = private(20, 0.25)
    assert algorithm.privacy.dp is not None
    privacy = replace(algorithm.privacy.dp, bound_to_sum=bound)
    algorithm = vary(algorithm, privacy=replace(algorithm.privacy, dp=privacy))
    updates = [torch.full((400,), 0.01 * k) for k in range(4)]
    one, again, other = (one_round(algorithm, updates, lost) for lost in ({}, {}, {3: "train"}))
    assert torch.equal(one, again)
    apart = (one - other) * 5  # the fixed denominator qK
    assert (float(torch.linalg.vector_norm(apart - clip(updates[3], BOUND)[0])) > 1) == bound


@pytest.mark.parametrize("clients", [1, 3])
def test_a_sum_that_is_not_made_gets_the_same_noise(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is summed of one client, nor of three of which two are lost; the deviation is that of every round."""
    stated: list[float] = []
    real = Mechanism.release

    def noted(self: Mechanism, total: Tensor, effective_steps: float, *rest: Any) -> Tensor:
        stated.append(effective_steps)
        return real(self, total, effective_steps, *rest)

    monkeypatch.setattr(Mechanism, "release", noted)
    updates = [torch.zeros(50)] * clients
    for lost in ({}, dict.fromkeys(range(clients - 1), "secure.masked")):
        one_round(private(1000, 0.1, kind="secure"), updates, lost)
    assert stated[0] == stated[1] == BOUND + 50**0.5 / ((2**31 - 1) // 1000)


def test_one_client_of_two_moves_a_hidden_sum_by_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cohort of one is not summed. Planted bug: with everybody counted, the second client brings two shares."""
    assert 0.99 < pair_shift(500) <= 1 + 1e-6
    monkeypatch.setattr(DifferentialPrivacy, "advance_from_sum", all_counted(DifferentialPrivacy.advance_from_sum))
    assert pair_shift(500) == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("broken", [False, True])
def test_a_client_does_not_move_how_the_others_are_rounded(broken: bool) -> None:
    """One that adds nothing is there or not: the same words. Planted bug: a ring that is as wide as the cohort; clients
    see that the plan is not the one of their own algorithm, and give no keys to it."""
    length, algorithm = 300, private(50, 0.1, kind="secure")
    stream = torch.Generator().manual_seed(0)
    updates = [torch.zeros(length), *(torch.randn(length, generator=stream) * 0.02 for _ in range(4))]
    privacy = algorithm.privacy if not broken else Secure(sum_options=algorithm.privacy.sum_options)

    def words(first: int) -> Tensor:
        settings: dict[str, Any] = {"lr": 0.1, "clip": BOUND, "sums": "train", "largest": 5}
        requests = [Request("run", 0, k, "train", "s", torch.zeros(length), {}, settings) for k in range(first, 5)]
        session = SecureSession(privacy, requests, Clients(algorithm, updates, {}).exchange)
        found = session.total(secure_segments(algorithm, length, length, {}))
        return torch.from_numpy(found.words[:length].view("int32"))

    if broken:
        with raises("E-PRIVACY-SUM-TOO-FEW", stage="keys", left=0):
            words(0)
    else:
        assert torch.equal(words(0), words(1))
