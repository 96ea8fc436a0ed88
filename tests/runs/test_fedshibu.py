"""FedSHIBU and FedAvg+CRSM: constant 1 is the mean, constant 0 is nobody, and what happens to those who stay away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.support.tiny import without_pictures
from tests.support.toy import Toy
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.similarity import SIMILARITIES, crsm
from fedgraft.algorithms.personalized import Similarity
from fedgraft.config.load import load
from fedgraft.core.state import ServerState
from fedgraft.local.train import LocalTraining
from fedgraft.runs.loop import run
from fedgraft.runs.setup import setup_of

LOCAL = LocalTraining(3, batch_size=6)
TINY = [
    "data.source=synthetic",
    "data.count=200",
    "data.classes=4",
    "model.name=tiny",
    "partition.clients=4",
    "rounds.fraction=1.0",
    "workers=1",
    "local.steps=2",
    "local.batch_size=8",
    "rounds.total=2",
    "rounds.evaluate_every=0",
    "model.head=random",
    "trainable.kind=body",
    "algorithm.name=fedshibu",
    "algorithm.samples=8",
    "personal.evaluate=end",
]


def shibu(similarity: str = "cka_linear", **options: Any) -> Any:
    return zoo.fedshibu(similarity=similarity, samples=12, probe=64, local=LOCAL, **options)


def everyone(algorithm: Any) -> Toy:
    return Toy(algorithm, clients=5, per_round=5)


def models(state: ServerState) -> Tensor:
    return torch.stack([state.model_of(k) for k in range(5)])


# ---- each similarity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_each_similarity_runs_and_mixes_by_rows_that_sum_to_one(similarity: str) -> None:
    toy = Toy(shibu(similarity, constant=0.3))
    toy.run(2)
    matrix = toy.summary.extra["mixing"]
    assert matrix.shape == (3, 3) and bool((matrix >= 0).all())
    torch.testing.assert_close(matrix.sum(1), torch.ones(3, dtype=torch.float64))
    assert bool(models(toy.state).isfinite().all())


def test_the_config_offers_each_of_them() -> None:
    offered = set(get_args(Similarity))
    assert offered == {*SIMILARITIES, "learned"}  # by the clients, from no matrix of the server's


def test_the_matrix_is_similarity_times_examples() -> None:
    """W_ij = S_ij n_j / Σ_j S_ij n_j, on what the clients showed."""
    toy = everyone(shibu("label_histogram"))
    toy.run(1)
    held = [torch.bincount(toy.examples.labels[toy.context.rows(k)], minlength=3).float() for k in range(5)]
    raw = crsm(held, "label_histogram") * torch.tensor([20.0, 18, 16, 14, 12])
    torch.testing.assert_close(toy.summary.extra["mixing"], raw / raw.sum(1, keepdim=True))


def test_similarities_differ() -> None:
    """They are not all the same function under other names."""
    kinds = [s for s in SIMILARITIES if s != "constant"]
    vectors = {}
    for similarity in kinds:
        toy = everyone(shibu(similarity))
        toy.run(1)
        vectors[similarity] = toy.summary.extra["mixing"]
    alike = [
        (a, b) for i, a in enumerate(kinds) for b in kinds[:i] if torch.allclose(vectors[a], vectors[b], atol=1e-6)
    ]
    # Here a client holds one class, so that label histograms are alike or not at all: that is what groups are.
    assert alike == [("groups", "label_histogram")]


# ---- the two ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_round", [3, 5])
def test_constant_one_is_fedbabu_to_the_bit(per_round: int) -> None:
    mixed = Toy(shibu("constant", constant=1.0, absent="mean"), clients=5, per_round=per_round)
    plain = Toy(zoo.fedbabu(local=LOCAL), clients=5, per_round=per_round)
    for _ in range(4):
        a, b = mixed.run(1), plain.run(1)
        assert torch.equal(a.vector, b.vector)
        assert all(torch.equal(row, b.vector) for row in models(a))


def test_constant_one_on_the_whole_model_is_fedavg_to_the_bit() -> None:
    mixed = everyone(zoo.fedavg_crsm(similarity="constant", constant=1.0, local=LOCAL))
    plain = everyone(zoo.fedavg(local=LOCAL))
    assert torch.equal(mixed.run(3).vector, plain.run(3).vector)
    assert all(torch.equal(row, plain.state.vector) for row in models(mixed.state))


@pytest.mark.parametrize("per_round", [3, 5])
def test_constant_zero_is_local_training_to_the_bit(per_round: int) -> None:
    mixed = Toy(zoo.fedavg_crsm(similarity="constant", constant=0.0, local=LOCAL), clients=5, per_round=per_round)
    alone = Toy(zoo.local_only(local=LOCAL), clients=5, per_round=per_round)
    a, b = mixed.run(4), alone.run(4)
    assert torch.equal(models(a), models(b))
    assert len({tuple(row.tolist()) for row in models(b)}) > 1
    assert alone.summary.record["bytes_up"] == 0 < mixed.summary.record["bytes_up"]


def test_a_constant_between_lies_between() -> None:
    """More sharing, less spread between the clients' models."""
    spread = []
    for c in (0.0, 0.3, 1.0):
        state = everyone(shibu("constant", constant=c)).run(3)
        spread.append(float(models(state).std(0).mean()))
    assert spread[0] > spread[1] > spread[2] == 0.0


# ---- partial participation -------------------------------------------------------------------------------------------


def test_clients_that_stay_away_keep_their_model() -> None:
    toy = Toy(shibu())
    for _ in range(5):
        before = models(toy.state)
        known = set(toy.state.personal)
        state = toy.run(1)
        for k in set(range(5)) - set(toy.summary.cohort):
            expected = before[k] if k in known else state.vector  # one that never came starts where the others are
            assert torch.equal(state.model_of(k), expected)


def test_or_take_the_mean_of_the_others() -> None:
    toy = Toy(shibu(absent="mean"))
    for _ in range(5):
        state = toy.run(1)
        assert set(state.personal) == set(toy.summary.cohort)
        for k in set(range(5)) - set(toy.summary.cohort):
            assert torch.equal(state.model_of(k), state.vector)


def test_the_two_differ() -> None:
    keep, mean = (Toy(shibu(absent=absent)).run(4) for absent in ("keep", "mean"))
    assert not torch.equal(models(keep), models(mean))


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_groups_by_hand() -> None:
    held = [torch.tensor(c) for c in ([4.0, 1, 0, 0], [0.0, 2, 0, 0], [0.0, 0, 3, 0], [0.0, 0, 0, 9], [0.0, 0, 1, 1])]
    expected = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])
    assert torch.equal(crsm(held, "groups"), expected.double())


def only(group: set[int], exchange: Any) -> Any:
    return lambda requests: [response for response in exchange(requests) if response.client in group]


def test_mixing_within_groups_is_fedbabu_in_each_group() -> None:
    """Clients 0 and 3 hold one class, 1 and 4 another, 2 a third: three federations that never meet."""
    mixed = everyone(shibu("groups"))
    for _ in range(3):
        mixed.run(1)
    for group in ({0, 3}, {1, 4}, {2}):
        alone = everyone(zoo.fedbabu(local=LOCAL))
        engine: Any = alone.engine
        engine.exchange = only(group, engine.exchange)
        expected = alone.run(3).vector
        for k in group:
            torch.testing.assert_close(mixed.state.model_of(k), expected, rtol=1e-4, atol=1e-5)
    together = everyone(zoo.fedbabu(local=LOCAL)).run(3).vector
    assert not torch.allclose(mixed.state.model_of(0), together, atol=1e-3)


@pytest.fixture
def quick() -> Iterator[None]:
    with without_pictures():
        yield


def test_the_groups_experiment_from_a_config(tmp_path: Path, quick: None) -> None:
    overrides = [*TINY, "partition.kind=groups", "partition.groups=[[0,1],[2,3]]", "algorithm.similarity=groups"]
    held = torch.from_numpy(setup_of(load(None, overrides)).task.data.histogram()).float()
    block = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).double()
    assert torch.equal(crsm(held, "groups"), block)
    summary = run(load(None, overrides), tmp_path / "run", console=False)
    assert 0 <= summary["personal"]["mean"] <= 1


def test_personal_accuracy_before_and_after_fine_tuning(tmp_path: Path, quick: None) -> None:
    overrides = [*TINY, "personal.finetune_epochs=1", "partition.kind=shards", "partition.shards_per_client=2"]
    summary = run(load(None, overrides), tmp_path / "run", console=False)
    wanted = {"mean", "min", "max", "std", "finetuned_mean", "finetuned_min", "finetuned_max", "finetuned_std"}
    assert wanted <= summary["personal"].keys()
