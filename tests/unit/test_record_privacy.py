"""Record-level differential privacy: against a plain loop, its noise, its account, an attack, and what is refused."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import pld
from tests.support.errors import raises
from tests.support.machines import Machines
from tests.support.tiny import CNN
from tests.support.toy import Toy, ToyNetwork, batch_norm_network, random_mask
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.client.policy import Policy
from fedgraft.config.agreement import broken_rules
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, load
from fedgraft.core.space import masked
from fedgraft.deploy.deployed import run_deployed
from fedgraft.deploy.node import account_of_run
from fedgraft.edit.dense import head
from fedgraft.edit.low_rank import LowRank
from fedgraft.engines.packed import Packed
from fedgraft.local import train as train_module
from fedgraft.local.losses import cross_entropy, one_vs_all
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining
from fedgraft.privacy import records as records_module
from fedgraft.privacy.dp import Mechanism
from fedgraft.privacy.protection import DifferentialPrivacy, private, record_private, secure
from fedgraft.privacy.records import RecordPrivacy, RecordSteps, clipped_sum
from fedgraft.runs import checkpoint
from fedgraft.runs.loop import run
from fedgraft.runs.plan import plan_run

LOCAL = LocalTraining(steps=3, batch_size=6, optimizer=sgdm(0.9))
FULL: dict[str, Any] = {"clients": 3, "per_round": 3}


def config_local(config: Config) -> LocalTraining:
    """Return the local training of a config's algorithm."""
    return build_algorithm(config).local


def private_run(record: RecordPrivacy, rounds: int = 2, algorithm: Algorithm | None = None, **options: Any) -> Toy:
    """Return the toy after so many rounds of record-private training."""
    toy = Toy(record_private(algorithm or zoo.fedavg(local=LOCAL), record), **(FULL | options))
    if rounds:
        toy.run(rounds)
        assert not toy.summary.rejections
    return toy


def plain_round(toy: Toy, start: Tensor, client: int, round_number: int, clip: float) -> Tensor:
    """Return a client's vector after one round by a loop over images, without noise; `start` is the common model."""
    rows = toy.context.rows(client)
    vector = start.clone()
    velocity = torch.zeros_like(vector)
    sent = LOCAL.batch_size / len(rows)
    record = toy.algorithm.privacy.records
    assert record is not None
    model = hashlib.sha256(start.numpy().tobytes()).hexdigest()
    place = "\x1f".join(map(str, ("toy", model, "train", round_number, client)))
    steps = RecordSteps(clip, 0.0, min(1.0, sent), 3, len(rows), records_module.simulation_key(7), place)
    for step in range(3):
        total = torch.zeros_like(vector)
        for row in steps.batch(rows, step):
            toy.space.scatter(vector, toy.network)
            toy.network.zero_grad()
            for parameter in toy.network.parameters():
                parameter.requires_grad_(True)
            logits = toy.network(toy.examples.inputs[row][None])
            torch.nn.functional.cross_entropy(logits, toy.examples.labels[row][None]).backward()
            gradient = torch.zeros_like(vector)
            for part, begin, end in toy.space.ranges:
                whole = dict(toy.network.named_parameters())[part.name].grad
                assert whole is not None
                flat = whole.reshape(-1)
                gradient[begin:end] = flat if part.index is None else flat[part.index]
            total += gradient * min(1.0, clip / float(gradient.norm()))
        mean = total / min(6, len(rows))
        velocity = mean if step == 0 else 0.9 * velocity + mean
        vector = vector - 0.05 * velocity
    return vector


@pytest.mark.parametrize("kind", ["everything", "head", "sparse", "lora"])
def test_without_noise_it_is_a_plain_loop_over_images(kind: str) -> None:
    algorithm = zoo.fedavg(local=LOCAL)
    options: dict[str, Any] = {}
    if kind == "head":
        algorithm = vary(algorithm, trainable=head())
    if kind == "lora":
        algorithm = vary(algorithm, trainable=LowRank(2, 4.0, ("1",)))
    if kind == "sparse":
        options["space"] = masked(ToyNetwork(), random_mask(ToyNetwork(), 0.4))
    toy = private_run(RecordPrivacy(2, clip=0.7, noise=0.0), 0, algorithm, **options)
    for round_number in range(2):
        start = toy.state.vector.clone()
        weights = [len(toy.context.rows(client)) for client in range(3)]
        expected = torch.zeros_like(start, dtype=torch.float64)
        for client, weight in enumerate(weights):
            expected += weight * plain_round(toy, start, client, round_number, 0.7).double()
        toy.context.forget_binding()
        toy.run(1)
        torch.testing.assert_close(toy.state.vector, (expected / sum(weights)).float(), rtol=1e-5, atol=1e-6)


def test_noise_has_the_deviation_of_the_account() -> None:
    steps = RecordSteps(0.5, 2.0, 0.25, 1, 80, b"k" * 32, "place")
    noisy = steps.noised(torch.zeros(20_000), 0)
    assert float(noisy.std()) == pytest.approx(2.0 * 0.5 / 20, rel=0.03)  # over the expected batch of 20
    assert abs(float(noisy.mean())) < 4 * 0.05 / math.sqrt(20_000)
    assert not torch.equal(noisy, steps.noised(torch.zeros(20_000), 1))
    other_sum = steps.noised(torch.ones(20_000), 0) - 1 / 20
    assert not torch.allclose(noisy, other_sum, atol=1e-3)  # else the difference of two sums would be without noise
    sizes = [len(steps.batch(torch.arange(80), step)) for step in range(400)]
    assert sum(sizes) / 400 == pytest.approx(20, rel=0.05) and len(set(sizes)) > 10


def test_the_account_is_that_of_dp_accounting() -> None:
    account = RecordPrivacy(20, noise=1.1, delta=1e-5).account(400, LOCAL)
    accountant = pld.PLDAccountant()
    step = dp_accounting.PoissonSampledDpEvent(6 / 400, dp_accounting.GaussianDpEvent(1.1))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, 20 * 3))
    assert account.epsilon(20) == accountant.get_epsilon(1e-5)
    assert account.epsilon(10) < account.epsilon(20) < account.unamplified(20)
    found = RecordPrivacy(20, epsilon=2.0).account(400, LOCAL)
    assert 1.9 < found.epsilon(20) <= 2.0
    more = RecordPrivacy(20, epsilon=2.0).account(4000, LOCAL)
    assert more.noise < found.noise and more.epsilon(20) <= 2.0  # more images need less noise for the same epsilon
    with raises("E-PRIVACY-DELTA"):
        RecordPrivacy(20, noise=1.0, delta=1e-3).account(400, LOCAL)


def one_image_moves_the_sum_by_the_bound(rule: Callable[[Tensor, float], Tensor]) -> None:
    """Add one image with a huge gradient: the sum moves by the clipping bound at most."""
    draw = torch.Generator().manual_seed(0)
    others = torch.randn(9, 30, generator=draw)
    for length in (0.1, 1.0, 1e6, math.inf):
        image = torch.full((1, 30), length)
        moved = rule(torch.cat([others, image]), 0.8) - rule(others, 0.8)
        assert float(moved.norm()) <= 0.8 * (1 + 1e-6)


def test_no_image_moves_a_sum_by_more_than_the_bound() -> None:
    one_image_moves_the_sum_by_the_bound(clipped_sum)

    def clip_the_mean(gradients: Tensor, bound: float) -> Tensor:
        """The mistake that is made: the batch's mean is clipped, not its images."""
        mean = gradients.double().mean(0)
        return mean * min(1.0, bound / float(mean.norm())) * len(gradients)

    with pytest.raises(AssertionError):
        one_image_moves_the_sum_by_the_bound(clip_the_mean)


def update_moves_at_most(limit: float) -> None:
    """A planted image: relabelled, it changes a client's update by no more than its clipped gradients can."""
    record = RecordPrivacy(1, clip=0.01, noise=0.0)
    algorithm = zoo.fedavg(local=replace(LOCAL, steps=1, batch_size=20, optimizer=sgdm(0.0)))
    vectors = []
    for label in (0, 2):
        toy = Toy(record_private(algorithm, record), clients=1, per_round=1)
        toy.examples.labels = toy.examples.labels.clone()
        toy.examples.labels[0] = label
        toy.examples.inputs = toy.examples.inputs.clone()
        toy.examples.inputs[0] *= 1000  # an outlier with a large gradient
        vectors.append(toy.run(1).vector)
    assert float((vectors[0] - vectors[1]).norm()) <= limit


def test_a_planted_image_moves_an_update_by_what_the_account_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 0.05 * 2 * 0.01 / 20 * 1.01  # rate, two gradients of the bound, expected batch: all twenty images
    update_moves_at_most(limit)
    monkeypatch.setattr(train_module, "clipped_sum", lambda gradients, bound: gradients.double().sum(0))
    with pytest.raises(AssertionError):
        update_moves_at_most(limit)


def test_it_composes_with_secure_sums_and_is_the_same_every_time() -> None:
    pytest.importorskip("cryptography")
    record = RecordPrivacy(2, clip=0.5, noise=0.5)
    clear = private_run(record)
    assert torch.equal(clear.state.vector, private_run(record).state.vector)
    other = private_run(replace(record, secret=True, key=b"s" * 32))
    assert not torch.equal(clear.state.vector, other.state.vector)
    hidden = private_run(record, 1, secure(zoo.fedavg(local=LOCAL)))  # one round: draws follow from the model
    torch.testing.assert_close(hidden.state.vector, private_run(record, 1).state.vector, rtol=1e-4, atol=1e-5)
    plain = Toy(zoo.fedavg(local=LOCAL), **FULL)
    assert not torch.allclose(plain.run(2).vector, clear.state.vector, atol=1e-3)
    # A node draws from its own secret, unless the config asks for repeatable noise.
    steps = [
        replace(record, secret=choice).training(60, LOCAL, "place", 7, b"n" * 32).key for choice in (None, True, False)
    ]
    assert steps[0] == steps[1] == b"n" * 32 and steps[2] == records_module.simulation_key(7)


def test_statistics_are_fixed_and_clients_trained_one_by_one() -> None:
    record = RecordPrivacy(1, noise=1.0)
    algorithm = record_private(zoo.fedavg(local=LOCAL), record)
    assert algorithm.privacy.keeps_statistics_fixed
    toy = Toy(algorithm, network=batch_norm_network)
    engine = Packed(algorithm, toy.context, 2)
    assert engine.reason is not None and "record-level" in engine.reason


def test_what_noise_on_gradients_does_not_cover_is_refused() -> None:
    record = RecordPrivacy(2, noise=1.0)
    refused = {
        "moon": zoo.moon(),
        "fedlc": zoo.fedlc(),
        "fedper": zoo.fedper(),
        "ditto": zoo.ditto(),
        "fedala": zoo.fedala(),
        "fedshibu": zoo.fedshibu(),
        "fedalign": zoo.fedalign(),
        "fed3r": zoo.fed3r(),
        "class weights": vary(zoo.fedavg(), loss=cross_entropy(class_weights="own")),
        "positives": vary(zoo.fedavg(), loss=one_vs_all(positives="own")),
        "balanced": vary(zoo.fedavg(), sampling="balanced"),
        "mixup": vary(zoo.fedavg(), mixup=0.2),
    }
    for name, algorithm in refused.items():
        with raises("E-PRIVACY-RECORDS"):
            record_private(algorithm, record)
            pytest.fail(name)
    with raises("E-PRIVACY-UNITS"):
        dp = DifferentialPrivacy(Mechanism(1.0, 0.5, 4))
        record_private(private(vary(zoo.fedavg(), weighting=zoo.scaffold().weighting), dp), record)
    for allowed in (zoo.fedprox(), zoo.scaffold(), zoo.fedadam(), zoo.fednova(), zoo.feddyn()):
        private_run(record, 1, vary(allowed, steps=3, batch_size=6))


def test_an_owners_policy_names_the_unit() -> None:
    """An epsilon for clients is not kept by noise for single images; one for images says so, and is compared."""
    words = ["partition.clients=4", "trainable.kind=head", "privacy.dp.unit=record"]
    config = load(None, [*words, "privacy.dp.epsilon=8"])
    algorithm = build_algorithm(config)
    for policy in (Policy(epsilon=8.0), Policy(lifetime_epsilon=8.0)):
        assert [line.partition(":")[0] for line in broken_rules(policy, config, algorithm)] == ["unit"]
    assert not broken_rules(Policy(unit="record", epsilon=8.0), config, algorithm)
    assert broken_rules(Policy(unit="record", epsilon=7.0), config, algorithm) == ["epsilon: epsilon is 8"]
    by_noise = load(None, [*words, "privacy.dp.noise=1.0"])
    broken = broken_rules(Policy(unit="record", epsilon=8.0), by_noise, build_algorithm(by_noise))
    assert len(broken) == 1 and broken[0].startswith("epsilon:")
    expected = RecordPrivacy(20, noise=1.0).account(400, algorithm.local).epsilon(20)
    assert account_of_run(by_noise, 400, 0) == (expected, 1e-5)  # what the node's ledger is charged with


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["privacy.dp.noise_source=distributed", "privacy.aggregation=secure"], "E-CONFIG-DP-RECORDS"),
        (["privacy.dp.adaptive=true"], "E-CONFIG-DP-RECORDS"),
        (["model.head=ridge"], "E-CONFIG-DP-NOT-COVERED"),
        (["model.dropout=0.1"], "E-CONFIG-DP-NOT-COVERED"),
        (["personal.evaluate=end"], "E-CONFIG-DP-NOT-COVERED"),
        (["algorithm.name=moon"], "E-PRIVACY-RECORDS"),
        (["loss.class_weights=own"], "E-PRIVACY-RECORDS"),
    ],
)
def test_configs_that_the_account_does_not_cover_are_refused(words: list[str], code: str) -> None:
    base = ["partition.clients=4", "privacy.dp.unit=record", "privacy.dp.noise=1.0"]
    with raises(code):
        build_algorithm(load(None, [*base, *words]))


SMALL = [CNN, "data.source=synthetic", "data.count=200", "partition.clients=3", "rounds.total=2", "rounds.fraction=1.0"]
SMALL += ["trainable.kind=head", "privacy.dp.unit=record", "privacy.dp.noise=2.0", "local.batch_size=16", "workers=1"]


@pytest.mark.slow
def test_a_run_tells_the_account_of_every_client(tmp_path: Path) -> None:
    config = load(None, SMALL)
    privacy = run(config, tmp_path / "run")["privacy"]
    assert privacy["unit"] == "record" and privacy["repeatable_noise"] and len(privacy["clients"]) == 3
    for account in privacy["clients"].values():
        expected = RecordPrivacy(2, noise=2.0).account(account["images"], config_local(config)).epsilon(2)
        assert account["epsilon"] == expected and account["steps"] == 8
    assert privacy["epsilon"] == max(account["epsilon"] for account in privacy["clients"].values())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Privacy of single images" in page
    assert any(
        line.startswith("privacy: epsilon") and "record (one training image" in line for line in plan_run(config)
    )


@pytest.mark.slow
def test_nodes_draw_from_secrets_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With repeatable noise a deployment has the simulation's bytes; by default it has noise that nobody can know."""
    vectors = {}
    for secret in ("false", "none"):
        words = SMALL if secret == "none" else [*SMALL, "privacy.dp.secret=false"]
        config = load(None, words)
        run(config, tmp_path / f"here {secret}")
        nodes = Machines(config, tmp_path / f"there {secret}", tmp_path / f"keys {secret}", monkeypatch)
        summary = run_deployed(config, tmp_path / f"there {secret}", nodes)
        assert summary["privacy"]["repeatable_noise"] == (secret == "false")
        for place in ("here", "there"):
            latest = checkpoint.load_latest(tmp_path / f"{place} {secret}" / "checkpoints", config.digest)
            assert latest is not None
            vectors[place, secret] = latest.tensors["vector"]
    assert torch.equal(vectors["here", "false"], vectors["there", "false"])
    assert not torch.allclose(vectors["here", "none"], vectors["there", "none"], atol=1e-4)
