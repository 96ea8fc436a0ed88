"""TIES, DARE, Fisher merging and FedAWA's weights: by hand, by plain loops, and at their limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import Toy, ToyNetwork
from torch.nn.functional import cross_entropy

from fedgraft import algorithms as zoo
from fedgraft.aggregate.mean import weighted_mean
from fedgraft.aggregate.merging import aligned_weights, dare, fisher_mean, ties
from fedgraft.client.observe import squared_gradients
from fedgraft.core.space import select
from fedgraft.edit import edit_file, task_vectors
from fedgraft.local.train import LocalTraining
from fedgraft.runs.edit_files import MergeRule, add_files


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EVEN = torch.ones(3, dtype=torch.float64)


def test_ties_by_hand() -> None:
    """Keep 3 of 4. Kept: (4, -3, 2, .), (1, ., 3, -2), (-6, 2, ., 1). Signs of the sums: 4+1-6 < 0, -3+2 < 0,
    2+3 > 0, -2+1 < 0. Means of what agrees: -6, -3, (2+3)/2, -2."""
    rows = torch.tensor([[4.0, -3.0, 2.0, 0.1], [1.0, 0.5, 3.0, -2.0], [-6.0, 2.0, 0.3, 1.0]])
    assert ties(rows, EVEN, 0.75).tolist() == [-6.0, -3.0, 2.5, -2.0]


def test_ties_is_a_plain_loop() -> None:
    rows, weights, count = drawn(4, 50), torch.tensor([1.0, 2.0, 3.0, 4.0]), 15
    found = ties(rows, weights, 0.3)
    cut = [sorted(map(abs, row))[-count] for row in rows.tolist()]
    for i, column in enumerate(rows.T.tolist()):
        kept = [(x, w) for x, w, least in zip(column, weights.tolist(), cut, strict=True) if abs(x) >= least]
        sign = sum(x * w for x, w in kept)
        agree = [(x, w) for x, w in kept if x * sign > 0]
        wanted = sum(x * w for x, w in agree) / sum(w for _, w in agree) if agree else 0.0
        assert float(found[i]) == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_ties_of_one_and_of_equals() -> None:
    row = drawn(40)
    assert torch.equal(ties(row[None], EVEN[:1], 1.0), row)
    assert torch.equal(ties(row.repeat(3, 1), EVEN, 1.0), row)
    assert int((ties(row[None], EVEN[:1], 0.25) != 0).sum()) == 10
    with raises("E-CORE-RANGE"):
        ties(row[None], EVEN[:1], 0.0)


def test_dare_is_unbiased_and_drops_its_share() -> None:
    rows = drawn(3, 200)
    draws = torch.stack([dare(rows, EVEN, 0.5, torch.Generator().manual_seed(i)) for i in range(600)])
    error = draws.std(0) / 600**0.5
    assert float(((draws.mean(0) - weighted_mean(rows, EVEN)).abs() / error).max()) < 5
    one = dare(rows[:1], EVEN[:1], 0.9, torch.Generator().manual_seed(0))
    assert 5 <= int((one != 0).sum()) <= 40  # 20 expected of 200
    assert torch.equal(dare(rows, EVEN, 0.0, torch.Generator()), weighted_mean(rows, EVEN))


def test_fisher_by_hand_and_at_its_limits() -> None:
    """Coordinate 0: (3·2 + 1·6) / (3 + 1) = 3. Coordinate 1: nobody knows, the mean of 1 and 5. Equal: the mean."""
    rows, known = torch.tensor([[2.0, 1.0], [6.0, 5.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    assert fisher_mean(rows, EVEN[:2], known).tolist() == [3.0, 3.0]
    many = drawn(3, 30)
    torch.testing.assert_close(fisher_mean(many, EVEN, torch.ones(3, 30)), weighted_mean(many, EVEN))
    assert fisher_mean(rows, EVEN[:2], -known).tolist() == [4.0, 3.0]  # nonsense from a client counts as nothing


def test_the_fisher_information_is_autograds() -> None:
    network = ToyNetwork()
    toy, rows = Toy(zoo.fedavg()), torch.arange(7)
    space = select(network, lambda name: name.startswith("head"))
    found = squared_gradients(network, space.bind(network), toy.examples, rows)
    other, total = ToyNetwork(), torch.zeros(21)
    for row in rows:
        other.zero_grad()
        cross_entropy(other(toy.examples.inputs[row][None]), toy.examples.labels[row][None]).backward()
        total += torch.cat([other.head.weight.grad.view(-1), other.head.bias.grad]).square()  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(found, total / 7, rtol=1e-5, atol=1e-8)


def test_fedawa_trusts_who_goes_along() -> None:
    """Three alike and one against: its weight falls, the loss falls, and without steps nothing changes."""
    base = drawn(60)
    rows = torch.stack([base + 0.3 * drawn(60, seed=1), base + 0.3 * drawn(60, seed=2), base, -base])
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0])
    found = aligned_weights(rows, weights)
    assert float(found.sum()) == pytest.approx(1.0) and float(found[3]) < 0.1 < float(found[:3].min())

    def misfit(share: torch.Tensor) -> float:
        total = (share[:, None] * rows.double()).sum(0)
        return float((share * (1 - torch.nn.functional.cosine_similarity(rows.double(), total[None]))).sum())

    assert misfit(found) < misfit(weights.double() / 4)
    assert torch.equal(aligned_weights(rows, weights, steps=0), weights.double() / 4)
    unlike, more = torch.eye(4), torch.tensor([1.0, 1.0, 1.0, 1.5])  # clients with nothing in common
    assert float(aligned_weights(unlike, more).max()) < 0.5
    assert float(aligned_weights(unlike, more, steps=20).max()) > 0.9  # what many steps come to: one client alone
    alike = aligned_weights(base.repeat(3, 1), torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(alike, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) / 6)  # nobody stands out


@pytest.mark.parametrize("name", ["fedties", "feddare", "fedfisher", "fedawa"])
def test_the_server_needs_each_update(name: str) -> None:
    from fedgraft.algorithms.algorithm import vary
    from fedgraft.privacy.protection import Secure

    with raises("E-ALGORITHM-COMBINATION"):
        vary(zoo.named(name), privacy=Secure())


def edits(folder: Path) -> tuple[list[Path], list[task_vectors.Edit]]:
    network = ToyNetwork()
    space = select(network, lambda name: name.startswith("backbone"))
    made = [
        task_vectors.capture(f"e{i}", network, space, space.gather(network) + 0.1 * drawn(space.size, seed=i))
        for i in range(3)
    ]
    files = [folder / f"{i}.safetensors" for i in range(3)]
    for edit, file in zip(made, files, strict=True):
        edit_file.save_edit(edit, file)
    return files, made


def test_edits_are_merged_as_files(tmp_path: Path) -> None:
    files, made = edits(tmp_path)
    rows = torch.stack([edit.update() for edit in made])
    found = add_files(files, None, tmp_path / "ties", rule=MergeRule("ties", 0.5))
    assert torch.equal(found.values, ties(rows, EVEN, 0.5))
    assert torch.equal(edit_file.load_edit(tmp_path / "ties").values, found.values)
    dare = MergeRule("dare", 0.3, seed=4)
    twice = [add_files(files, None, tmp_path / f"dare{i}", rule=dare).values for i in range(2)]
    assert torch.equal(*twice) and not torch.equal(twice[0], weighted_mean(rows, EVEN))
    assert torch.equal(
        add_files(files, [1, 2, 1], tmp_path / "sum").values, task_vectors.add_edits(made, [1, 2, 1]).values
    )
    with raises("E-RUN-MERGE-RULE", rule="slerp"):
        add_files(files, None, tmp_path / "no", rule=MergeRule("slerp"))
    with raises("E-RUN-MERGE-RUNS", edits=3, runs=0):
        add_files(files, None, tmp_path / "no", rule=MergeRule("fisher"))


@pytest.mark.slow
def test_merged_rounds_train() -> None:
    local = LocalTraining(steps=2, batch_size=6)
    for name in ("fedties", "feddare", "fedfisher", "fedawa"):
        toy = Toy(zoo.named(name, local=local), per_round=5)
        before = toy.loss()
        toy.run(4)
        assert toy.loss() < before, name
