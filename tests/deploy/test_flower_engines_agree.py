"""The same algorithm in this process and on a real Flower deployment gives the same bytes.

One SuperLink and three SuperNodes run as processes of their own; every algorithm is a run on them. Caches are apart,
so the head of step 0 and the mask are really made by the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.flower_local import LocalFederation
from torch import Tensor

from fedgraft.config.load import Config, load
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.loop import run

pytest.importorskip("flwr", reason="needs the extra 'flower'")
pytestmark = [pytest.mark.slow, pytest.mark.deploy]

BASE = [
    "model.name=tiny",
    "data.source=digits",
    "data.limit=200",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "rounds.evaluate_every=0",
    "local.steps=2",
    "local.batch_size=16",
    "local.lr=0.01",
    "model.head=random",
    "trainable.kind=everything",
]
CASES = {
    "fedavg": ["model.head=ridge", "partition.kind=dirichlet"],
    "sparse": ["trainable.kind=sparse", "trainable.sparse.samples=24", "trainable.sparse.calibration=oneshot"],
    "fedprox": ["algorithm.name=fedprox", "algorithm.mu=0.1"],
    "scaffold": ["algorithm.name=scaffold", "local.momentum=0"],
    "fedbabu": ["algorithm.name=fedbabu", "trainable.kind=body"],
    "fedshibu": ["algorithm.name=fedshibu", "trainable.kind=body", "algorithm.samples=16"],
    "fedalign": ["algorithm.name=fedalign", "algorithm.probe=32", "algorithm.keep=8", "algorithm.top=4"],
    "lora": ["trainable.kind=lora", "trainable.lora.rank=2"],
    "secure": ["privacy.aggregation=secure"],
}
AT_ONCE = 3  # as many as a node keeps in memory


def config(name: str) -> Config:
    return load(None, [*BASE, *CASES[name], f"name={name}"])


def final(folder: Path) -> dict[str, Tensor]:
    """Return a run's results: the common vector, personal models, the server rule's state; not the clients' memory."""
    checkpoint = load_latest(folder / "checkpoints")
    assert checkpoint is not None
    results = ("vector", "personal/", "rule/", "best/", "head", "edit/")
    return {name: t for name, t in checkpoint.tensors.items() if name.startswith(results)}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The run folders of all cases, made by one deployment."""
    pytest.importorskip("cryptography", reason="needs the extra 'secure'")
    scratch = tmp_path_factory.mktemp("flower")
    folders = {name: scratch / "runs" / name for name in CASES}
    with LocalFederation(scratch) as federation:
        names = list(CASES)
        for first in range(0, len(names), AT_ONCE):
            runs = {name: federation.submit(config(name), folders[name]) for name in names[first : first + AT_ONCE]}
            for name, number in runs.items():
                assert federation.wait(number, 600) == "completed", (name, federation.status(number), federation.logs())
        yield folders


@pytest.mark.parametrize("name", CASES)
def test_engines_agree(name: str, deployed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    run(config(name), tmp_path / "run", console=False)
    here = final(tmp_path / "run")
    there = final(deployed[name])
    assert here.keys() == there.keys()
    for key, tensor in here.items():
        assert torch.equal(tensor, there[key]), key
    assert not torch.equal(here["vector"], start_of(tmp_path / "run")), "the runs agree because nothing moved"


def start_of(folder: Path) -> Tensor:
    from fedgraft.runs.checkpoint import listing
    from fedgraft.runs.checkpoint import load as load_file

    return load_file(listing(folder / "checkpoints")[0]).tensors["vector"]


def test_the_server_never_holds_a_clients_memory(deployed: dict[str, Path]) -> None:
    checkpoint = load_latest(deployed["scaffold"] / "checkpoints")
    assert checkpoint is not None
    memory = {name: t for name, t in checkpoint.tensors.items() if name.startswith("memory/")}
    assert memory and all(name.endswith("/step") and t.numel() == 1 for name, t in memory.items())


def test_a_deployed_run_leaves_the_same_folder(deployed: dict[str, Path]) -> None:
    names = {p.name for p in deployed["fedavg"].iterdir()}
    assert {"config.toml", "metrics.jsonl", "summary.json", "report.html", "run.json", "checkpoints"} <= names
