"""A private run that is resumed goes on with its own noise: a second sample of a round would cost privacy again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedgraft.experiment import run as running
from fedgraft.experiment.config import load

WORDS = [
    "model.name=tiny", "data.image_size=16", "data.source=digits", "data.limit=200", "partition.clients=8",
    "model.head=random", "algorithm.weigh=uniform", "rounds.total=4", "rounds.evaluate_every=0",
    "rounds.checkpoint_every=2", "rounds.sampling=poisson", "local.steps=1", "workers=1",
    "protects.privacy.noise=0.8", "protects.privacy.secret=true",
]  # fmt: skip


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
        inner.setattr(running, "publish", lambda *a, **k: None)
        if stop is None:
            running.run(load(None, WORDS), folder, console=False)
        else:
            with pytest.raises(RuntimeError, match="dark"):
                running.run(load(None, WORDS), folder, console=False)
    return seen


@pytest.mark.parametrize("broken", [False, True])
def test_a_repeated_round_releases_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Rounds 1 to 3, death, rounds 3 and 4 from the checkpoint of round 2. Planted bug: the key is not kept."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    if broken:
        monkeypatch.setattr(running._Run, "_secret_key", lambda self: None)
    first = released(tmp_path / "run", monkeypatch, stop=3)
    again = released(tmp_path / "run", monkeypatch, stop=None)
    assert sorted(first) == [1, 2, 3] and sorted(again) == [3, 4]
    assert (first[3] == again[3]) != broken


def test_two_runs_do_not_share_their_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    one, two = (released(tmp_path / name, monkeypatch, stop=1) for name in ("one", "two"))
    assert one[1] != two[1]
