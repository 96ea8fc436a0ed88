"""The rule that chooses an engine, as a table; and that a run follows it, says so, and gives the promised bytes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.support.tiny import Open, without_pictures

from fedgraft.config.load import load
from fedgraft.engines import choice
from fedgraft.engines.batched import Batched
from fedgraft.engines.choice import Packing, choose_engine
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.pool import Pool
from fedgraft.runs.loop import run

NO = "the optimizer is adamw, not sgdm"
MUCH = 1e12
TABLE = [
    # wanted, workers, obstacle, work, accelerators, clients -> mode, workers
    (("auto", 0, None, 0.0, 0, 10), ("batched", 1)),
    (("auto", 3, None, 0.0, 0, 10), ("batched", 1)),  # the number of workers never decides the bytes
    (("auto", 0, NO, 0.0, 0, 10), ("in_process", 1)),
    (("auto", 2, NO, 0.0, 0, 10), ("pool", 2)),
    (("auto", 0, NO, MUCH, 0, 10), ("pool", 4)),
    (("auto", 0, NO, MUCH, 0, 2), ("pool", 2)),  # no more workers than clients
    (("auto", 0, NO, MUCH, 0, 1), ("in_process", 1)),
    (("auto", 1, NO, MUCH, 0, 10), ("in_process", 1)),
    (("auto", 0, NO, choice.WORTH / 2, 0, 10), ("in_process", 1)),  # not worth a message
    (("auto", 2, NO, choice.WORTH / 2, 0, 10), ("pool", 2)),  # unless asked for
    (("auto", 0, NO, MUCH, 1, 10), ("in_process", 1)),  # one process for one GPU
    (("auto", 0, NO, MUCH, 2, 10), ("pool", 2)),  # and one for each of two
    (("auto", 0, NO, MUCH, 2, 1), ("in_process", 1)),
    (("auto", 3, NO, MUCH, 2, 10), ("pool", 3)),
    (("reference", 0, None, 0.0, 0, 10), ("in_process", 1)),
    (("reference", 0, None, MUCH, 0, 10), ("pool", 4)),
    (("reference", 5, None, MUCH, 0, 10), ("pool", 5)),
    (("batched", 0, None, 0.0, 0, 10), ("batched", 1)),
    (("batched", 0, NO, MUCH, 0, 10), ("batched", 1)),
]


@pytest.mark.parametrize(("given", "expected"), TABLE)
def test_the_rule(given: tuple, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cores", lambda: 4)
    found = choose_engine(*given)
    assert (found.mode, found.workers) == expected
    assert (given[2] or "") in found.why or given[0] == "reference"


def test_the_number_of_workers_never_moves_a_run_between_modes_of_other_bytes() -> None:
    """The config's digest leaves workers out, so for all of them a run is batched, or for none."""
    for wanted in ("auto", "reference", "batched"):
        for obstacle in (None, NO):
            modes = {choose_engine(wanted, n, obstacle, 0.0).mode == "batched" for n in range(5)}
            assert len(modes) == 1

    def naive(wanted: str, workers: int, obstacle: str | None, work: float) -> str:
        return "pool" if workers > 1 else choose_engine(wanted, workers, obstacle, work).mode  # type: ignore[arg-type]

    assert len({naive("auto", n, None, 0.0) == "batched" for n in range(5)}) == 2  # the check sees such a rule


PACKS = [
    # pack, accelerators, obstacle to packs, clients that fit -> mode, clients of a pack
    (("auto", 0, None, 8), ("pool", 1)),  # a CPU has nothing to win
    (("auto", 1, None, 8), ("packed", 8)),
    (("auto", 1, None, 80), ("packed", 10)),  # no more than take part
    (("auto", 1, None, 1), ("in_process", 1)),
    (("auto", 1, "dropout draws by client", 8), ("in_process", 1)),
    (("auto", 2, None, 8), ("pool", 1)),  # clients are spread over the devices instead
    ((5, 0, None, 1), ("packed", 5)),  # a number is the owner's word
    ((1, 1, None, 8), ("in_process", 1)),
    (("off", 1, None, 8), ("in_process", 1)),
]


@pytest.mark.parametrize(("given", "expected"), PACKS)
def test_the_rule_of_packs(given: tuple, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cores", lambda: 4)
    pack, devices, obstacle, fitting = given
    found = choose_engine("auto", 0, NO, MUCH, devices, 10, Packing(pack, obstacle, fitting))
    assert (found.mode, found.pack) == expected
    refused = devices and pack == "auto" and expected[0] != "packed"
    assert ("not packed, because" in found.why) == bool(refused)
    assert choose_engine("reference", 0, NO, MUCH, devices, 10, Packing(pack, obstacle, fitting)).mode != "packed"


SMALL = ["partition.clients=4", "rounds.total=2", "data.limit=200"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "kind", "said"),
    [
        ([], Batched, "engine: batched, all clients"),
        (["engine=reference"], InProcess, "engine: reference, one process as configured"),
        (["local.optimizer=adamw"], InProcess, "not batched, because the optimizer adamw"),
        (["trainable.kind=last_blocks", "trainable.blocks=1", "workers=2"], Pool, "engine: reference, workers=2"),
        (
            ["trainable.kind=last_blocks", "trainable.blocks=1", "engine=batched"],
            Batched,
            "batched, one by one, because batching",
        ),
        (["engine=batched", "local.clip=1.0"], Batched, "one by one, because local training with local.clip=1.0"),
        (['data.augment=["flip","jitter"]', "workers=1"], InProcess, "features are not cached: data.augment has"),
    ],
)
def test_a_run_follows_the_rule_and_says_so(
    overrides: list[str], kind: type, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with caplog.at_level(logging.INFO, "fedgraft"):
            found = Open(load(None, [*SMALL, *overrides]))
            assert type(found.engine()) is kind
            found.engines.close()
        assert any(said in record.message for record in caplog.records), caplog.text
    finally:
        torch.set_num_threads(before)


def final(tmp_path: Path, *overrides: str) -> float:
    config = load(None, [*SMALL, "model.name=tiny", "data.image_size=16", "local.lr=0.05", *overrides])
    with without_pictures():
        return float(run(config, tmp_path / "-".join(overrides), console=False)["test"]["loss"])


@pytest.mark.slow
def test_modes_agree(tmp_path: Path) -> None:
    """Same bits where promised (any number of workers), else the same within float tolerance."""
    auto, reference = final(tmp_path), final(tmp_path, "engine=reference")
    assert auto == pytest.approx(reference, rel=1e-5)
    assert final(tmp_path, "engine=reference", "workers=2") == reference
    body = ("trainable.kind=last_blocks", "trainable.blocks=1")
    assert final(tmp_path, *body, "workers=2") == final(tmp_path, *body, "workers=1")
