"""FedAlignAvg: the weights are what the definition says, the degenerate cases are FedAvg, and a liar gains little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.svcca import svcca
from tests.support.tiny import Open, without_pictures
from tests.support.toy import Toy, ToyExamples
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import Answers
from fedgraft.config.load import load
from fedgraft.core.messages import Request, Response
from fedgraft.edit.dense import head
from fedgraft.local.features import hidden
from fedgraft.local.train import LocalTraining
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run
from fedgraft.runs.open_run import make_probe, open_run
from fedgraft.runs.setup import setup_of
from fedgraft.server import sample as server
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.round import run_round

LOCAL = LocalTraining(3, batch_size=6)
SMALL: dict[str, Any] = {"keep": 3, "top": 3, "probe": 64, "local": LOCAL}
TINY = [
    "data.source=synthetic",
    "data.count=400",
    "data.classes=4",
    "model.name=tiny",
    "partition.clients=10",
    "rounds.fraction=1.0",
    "workers=1",
    "local.steps=1",
    "local.batch_size=8",
    "rounds.total=1",
    "model.head=random",
    "trainable.kind=body",
    "algorithm.name=fedalign",
    "algorithm.keep=4",
    "algorithm.top=4",
    "algorithm.probe=40",
    "rounds.evaluate_every=0",
]


def everyone(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, clients=5, per_round=5, schedule=lambda t, n, h: 0.1, **options)


def weights(toy: Toy) -> Tensor:
    """The shares of the last round."""
    return torch.tensor(toy.summary.record["clients"]["weight"], dtype=torch.float64)


def by_hand(toy: Toy, gamma: float = 1.0) -> Tensor:
    """n_k · (mean over layers of s_k)^γ, normalised; no cap."""
    scores = torch.tensor(list(toy.summary.record["alignment"].values()), dtype=torch.float64).mean(0)
    raw = torch.tensor([20.0, 18, 16, 14, 12], dtype=torch.float64) * scores**gamma
    return raw / raw.sum()


# ---- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 8.0])
def test_weights_are_examples_times_a_power_of_the_score(gamma: float) -> None:
    toy = everyone(zoo.fedalign(gamma=gamma, **SMALL))
    toy.run(1)
    torch.testing.assert_close(weights(toy), by_hand(toy, gamma))
    assert len({round(float(w), 6) for w in by_hand(toy, gamma) / by_hand(toy, 0.0)}) == 5  # scores differ


def test_the_score_is_svcca_with_the_model_the_round_began_with() -> None:
    toy = everyone(zoo.fedalign(**SMALL))
    before, probe = toy.state.vector.clone(), toy.context.probe
    assert probe is not None
    responses = list(
        toy.engine.exchange(server.instruct(toy.algorithm, toy.federation, toy.state, [2], toy.space.digest))
    )
    rows = torch.arange(len(probe))

    def layer(vector: Tensor, until: int) -> Tensor:
        toy.space.scatter(vector, toy.network)
        with torch.no_grad():
            return toy.network.features(probe.batch(rows), 0, until)

    update = responses[0].update
    assert update is not None
    for name, until in (("middle", 1), ("late", 2)):
        expected = svcca(layer(before + update.arrays["values"], until), layer(before, until), 3, 3).value
        assert responses[0].scalars[f"alignment:{name}"] == pytest.approx(expected, abs=1e-6)


def test_only_numbers_leave_the_client() -> None:
    toy = everyone(zoo.fedalign(**SMALL))
    (response,) = toy.engine.exchange(server.instruct(toy.algorithm, toy.federation, toy.state, [0], toy.space.digest))
    assert set(response.scalars) == {"alignment:early", "alignment:middle", "alignment:late"}
    assert not response.evidence and not response.sums


# ---- degenerate cases ------------------------------------------------------------------------------------------------


def same_clients(algorithm: Any) -> Toy:
    """Clients of different sizes that all hold copies of one example and see it one at a time."""
    toy = everyone(algorithm)
    toy.context.rows = lambda k: torch.zeros(20 - 2 * k, dtype=torch.int64)
    return toy


@pytest.mark.parametrize("align", ["client", "random"])
def test_identical_clients_are_fedavg_to_the_bit(align: str) -> None:
    training = LocalTraining(3, batch_size=1)
    aligned = same_clients(zoo.fedalign(align=align, **SMALL | {"local": training}))
    plain = same_clients(zoo.fedavg(local=training))
    assert torch.equal(aligned.run(3).vector, plain.run(3).vector)
    if align == "client":
        assert torch.equal(weights(aligned), weights(plain))


def test_exponent_zero_is_fedavg_to_the_bit() -> None:
    aligned, plain = everyone(zoo.fedalign(gamma=0.0, **SMALL)), everyone(zoo.fedavg(local=LOCAL))
    assert torch.equal(aligned.run(3).vector, plain.run(3).vector)
    other = everyone(zoo.fedalign(gamma=8.0, **SMALL))
    assert not torch.equal(other.run(3).vector, plain.state.vector)


def test_the_control_deals_the_same_weights_to_other_clients() -> None:
    real, control = everyone(zoo.fedalign(**SMALL)), everyone(zoo.fedalign(align="random", **SMALL))
    real.run(1), control.run(1)
    # Dealt anew they are added up in another order, so their shares may differ in the last bit.
    torch.testing.assert_close(weights(real).sort().values, weights(control).sort().values, rtol=1e-14, atol=0)
    assert not torch.equal(weights(real), weights(control))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_frozen_body_is_refused() -> None:
    with raises("E-ALGORITHM-COMBINATION"):
        zoo.fedalign(trainable=head())


def test_too_few_probe_rows_are_refused() -> None:
    toy = everyone(zoo.fedalign(**SMALL | {"keep": 6}))
    toy.context.probe = ToyExamples(13, seed=3)
    with raises("E-AGGREGATE-SVCCA-EXAMPLES", directions=6, examples=13):
        toy.run(1)
    toy = everyone(zoo.fedalign(**SMALL | {"keep": 6}))
    toy.context.probe = ToyExamples(14, seed=3)
    toy.run(1)


def test_too_few_validation_images_are_refused() -> None:
    setup = setup_of(load(None, [*TINY, "algorithm.probe=50"]))
    with raises("E-RUN-PROBE-SIZE", needed=50, available=40):
        make_probe(setup, 0)


def test_probe_and_clients_images_enter_where_nothing_before_them_is_trained_or_looked_at() -> None:
    """The last block trains: a probe for it enters there, one for an early layer before; the same is seen."""
    last, pixels = ["trainable.kind=last_blocks", "trainable.blocks=1"], "data.cache_features=false"
    for layers, entry in ((("block1.mlp",), 1), (("block0.mlp", "block1.mlp"), 0)):
        words = [*TINY, *last, f"algorithm.layers={list(layers)}".replace("'", '"')]
        cached, plain = (
            open_run(setup_of(load(None, overrides)), None).context for overrides in (words, [*words, pixels])
        )
        assert (cached.examples.entry, cached.probe.entry) == (1, entry) and plain.probe.entry == 0
        seen = [hidden(opened.network, layers, opened.probe) for opened in (cached, plain)]
        torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-5)


# ---- liars -----------------------------------------------------------------------------------------------------------


class Boasting:
    """An engine in which client 0 claims the best score and more examples than all others together."""

    def __init__(self, engine: Any, scalars: bool = True) -> None:
        self.engine, self.scalars, self.memory = engine, scalars, engine.memory

    def exchange(self, requests: Sequence[Request]) -> Iterator[Response]:
        for response in self.engine.exchange(requests):
            if response.client == 0:
                best = dict.fromkeys(response.scalars, 1.0)
                best |= {"alignment:early": 1.0} if self.scalars else {}
                response = replace(response, examples=10**9, scalars=best)
            yield response


def tiny_server(*overrides: str) -> Open:
    return Open(load(None, [*TINY, "algorithm.align=server", *overrides]))


def record_with_liar(setup: Open, **federation: Any) -> dict[str, Any]:
    engine, about = Boasting(setup.engine(), scalars=False), replace(setup.setup.federation, **federation)
    _, summary = run_round(setup.algorithm, about, setup.begin(), engine, setup.server_context)
    return dict(summary.record)


def test_a_liar_that_claims_more_examples_than_anybody_holds_is_dropped() -> None:
    record = record_with_liar(tiny_server())
    assert [drop["client"] for drop in record["dropped"]] == [0] and "claims 1000000000" in str(record["dropped"])
    setup = tiny_server()  # the broken variant: nobody knows who holds how much, and nobody asks
    setup.server_context = replace(setup.server_context, example_counts=ExampleCounts())
    broken = record_with_liar(setup, largest=1)["clients"]
    assert broken["weight"][broken["ids"].index(0)] > 0.99


def test_the_server_takes_no_score_from_a_client() -> None:
    setup = tiny_server()
    engine, federation = Boasting(setup.engine()), setup.setup.federation
    _, summary = run_round(setup.algorithm, federation, setup.begin(), engine, setup.server_context)
    assert [drop["client"] for drop in summary.record["dropped"]] == [0]


def test_nobody_counts_as_more_examples_than_the_cap() -> None:
    toy = everyone(zoo.fedalign(cap=12.0, gamma=0.0, **SMALL))  # of 20, 18, 16, 14 and 12
    toy.run(1)
    torch.testing.assert_close(weights(toy), torch.full((5,), 0.2, dtype=torch.float64))


def test_the_server_scores_a_distorted_change_lower() -> None:
    """What a client cannot talk away: its change is measured, on images it does not know."""
    setup = tiny_server()
    start = setup.space.gather(setup.network)
    noise = torch.randn(len(start), generator=torch.Generator().manual_seed(0))
    answers = Answers((0, 1), torch.ones(2, dtype=torch.float64), [1e-3 * noise, 0.3 * noise], start=start, round=4)
    align = setup.server_context.align
    scores = align(answers)
    assert scores.shape == (2, 3) and bool((scores[0] > scores[1]).all())
    again, other = align(answers), align(replace(answers, round=5))
    assert torch.equal(scores, again) and not torch.equal(scores, other)  # the probe rotates


@pytest.mark.parametrize("align", ["client", "server", "random"])
def test_each_mode_runs_from_a_config(tmp_path: Path, align: str) -> None:
    with without_pictures():
        summary = run(load(None, [*TINY, f"algorithm.align={align}"]), tmp_path / "run", console=False)
    assert summary["rounds"] == 1
    scores = RunFolder.open(tmp_path / "run").metrics()[1]["alignment"]  # whoever measured them, the figures see them
    assert set(scores) == {"early", "middle", "late"} and all(0 <= s <= 1 for layer in scores.values() for s in layer)
