"""Calibration through the engine, masks kept and resumed, clients' own masks, adaptive sparsity, low-rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny
from tests.support.tiny import Open, without_pictures
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.aggregate.codecs import decode
from fedgraft.config.load import load
from fedgraft.core.messages import unpack_bits
from fedgraft.core.state import EVERYONE
from fedgraft.edit.lora import merge_lora
from fedgraft.edit.masks import Mask, jaccard
from fedgraft.edit.sparse import Sparse
from fedgraft.edit.trainable import frozen_early
from fedgraft.engines.in_process import InProcess
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.runs import adapted as finished
from fedgraft.runs import checkpoint
from fedgraft.runs import loop as running
from fedgraft.runs.centralized import run_centralized
from fedgraft.runs.deliver import export_run
from fedgraft.runs.engines import Engines
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.open_run import FederationAsk

EAGER = ["trainable.sparse.adaptive_drift=1e9", "trainable.sparse.adaptive_patience=1"]
"""Every round counts as calm, so adaptive sparsity rises each time."""
OVERRIDES = [
    *tiny.OVERRIDES,
    "rounds.total=4",
    "rounds.evaluate_every=2",
    "local.weight_decay=0.01",
    "trainable.kind=sparse",
    "trainable.sparse.sparsity=0.9",
    "trainable.sparse.samples=60",
    "trainable.sparse.rounds=2",
    "rounds.checkpoint_every=1",
    "trainable.head_too=false",
]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """No figures and no report, which play no part here."""
    with without_pictures():
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, where it looks at what is kept."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(*overrides: str) -> Open:
    """A job, ready for round 1."""
    return Open(load(None, [*OVERRIDES, *overrides]))


def base(opened_run: Any) -> VisionNetwork:
    """The network a job began with."""
    return finished.Adapted(opened_run.setup, opened_run.opened, torch.zeros(0)).base().eval()


def brute_force(opened_run: Open, rows: Tensor) -> dict[str, Tensor]:
    """Squared gradients of the loss, sample by sample with plain autograd, summed and divided by their number."""
    network = base(opened_run)
    parameters = dict(network.named_parameters())
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for row in rows:
        loss = cross_entropy(
            network(opened_run.task.eval_images.batch(row[None])), opened_run.task.train_images.labels[row][None]
        )
        for name, grad in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
            total[name] += grad.double().square()
    return {name: tensor / len(rows) for name, tensor in total.items()}


@pytest.mark.slow
def test_scores_are_the_central_ones() -> None:
    setup = opened('trainable.sparse.labels="true"', "trainable.sparse.calibration=oneshot")
    kind, ask = setup.setup.algorithm.trainable, FederationAsk(setup.setup, Engines(setup.setup))
    assert isinstance(kind, Sparse)
    by_layer = kind._scores(base(setup), ask, 1)
    wanted = brute_force(setup, setup.data.train_rows)
    assert set(by_layer) == {name for name in wanted if ".layers." in name}
    for name, scores in by_layer.items():
        if name.endswith("k_proj.bias"):  # without effect: what is there is rounding
            assert float(scores.max()) < 1e-9 * float(wanted[name.replace("k_proj", "q_proj")].max())
            continue
        torch.testing.assert_close(scores.double(), wanted[name], rtol=2e-3, atol=1e-6 * float(wanted[name].max()))
    some = brute_force(setup, setup.data.rows(0))  # the planted mistake: one client's data instead of everyone's
    assert any(
        not torch.allclose(by_layer[n].double(), some[n], rtol=2e-3, atol=1e-6 * float(some[n].max())) for n in by_layer
    )


@pytest.mark.slow
def test_the_mask_is_the_central_one() -> None:
    setup = opened(
        'trainable.sparse.labels="true"',
        "trainable.sparse.calibration=oneshot",
        "trainable.sparse.strategy=most_sensitive",
    )
    wanted = brute_force(setup, setup.data.train_rows)
    flat = torch.cat([wanted[name].view(-1) for name in setup.mask])
    best = torch.zeros(len(flat), dtype=torch.bool)
    best[flat.topk(setup.mask.count).indices] = True
    sizes = [tensor.numel() for tensor in setup.mask.values()]
    shaped = zip(setup.mask, best.split(sizes), strict=True)
    central = Mask({name: part.view(setup.mask[name].shape) for name, part in shaped})
    assert jaccard(setup.mask, central) > 0.995  # the rest are scores equal up to rounding
    assert jaccard(opened('trainable.sparse.labels="true"').mask, central) < 0.5  # least sensitive is another one


def test_calibrating_leaves_the_network_alone() -> None:
    setup = opened("trainable.sparse.soft=0.1", "trainable.sparse.rounds=3")
    start = dict(base(setup).named_parameters())
    assert all(torch.equal(p, start[n]) for n, p in setup.network.named_parameters())


@pytest.mark.slow
def test_a_mask_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[int] = []
    scores = Sparse._scores
    monkeypatch.setattr(Sparse, "_scores", lambda self, n, a, draw: (draws.append(draw), scores(self, n, a, draw))[1])
    first = opened().mask
    assert draws == [1, 2]
    assert opened().mask == first and opened("local.lr=0.5").mask == first and len(draws) == 2
    for word in ("seed=1", "trainable.sparse.sparsity=0.8", "model.ridge=2.0", "partition.clients=2"):
        before = len(draws)
        assert opened(word).mask != first and len(draws) > before  # another network, recipe or partition: another mask
    for path in (cache / "edits").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    before = len(draws)
    assert opened().mask == first and len(draws) == before + 2  # a damaged one is made anew


def interrupted(folder: Path, overrides: list[str], after: int) -> None:
    """Run until Ctrl-C comes in the middle of a round."""
    step, done = running.run_round, []

    def stop(*arguments: Any) -> Any:
        done.append(1)
        if len(done) > after:
            raise KeyboardInterrupt
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "run_round", stop)
        with pytest.raises(KeyboardInterrupt):
            running.run(load(None, overrides), folder, console=False)


def last(folder: Path) -> checkpoint.Checkpoint:
    record = RunFolder.open(folder)
    latest = checkpoint.load_latest(record.checkpoints, record.config_digest)
    assert latest is not None
    return latest


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [["trainable.head_too=true"], ["trainable.sparse.per_client=true"], ["trainable.sparse.adaptive_start=0.5"]],
)
def test_resuming_keeps_the_mask(
    overrides: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*OVERRIDES, *overrides, *EAGER]
    running.run(load(None, overrides), tmp_path / "whole", console=False)
    interrupted(tmp_path / "broken", overrides, after=2)
    for path in (cache / "edits").glob("*"):
        path.unlink()  # the checkpoint alone must do
    monkeypatch.setattr(Sparse, "_scores", lambda self, *a: pytest.fail("calibrated again"))
    before = last(tmp_path / "broken")
    assert before.round == 2
    running.run(load(None, overrides), tmp_path / "broken", console=False)
    whole, broken = last(tmp_path / "whole"), last(tmp_path / "broken")
    assert whole.tensors.keys() == broken.tensors.keys() and whole.meta["space"] == broken.meta["space"]
    assert any(name.startswith("edit/mask") for name in whole.tensors)
    assert all(torch.equal(whole.tensors[name], broken.tensors[name]) for name in whole.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["count", "zero"])
def test_own_masks_are_averaged_as_asked(fill: str) -> None:
    setup = opened("trainable.sparse.per_client=true", f"trainable.sparse.fill={fill}", "rounds.total=1", "workers=1")
    masks = {
        k: unpack_bits(bits, setup.space.trained) for k, bits in setup.opened.trainable.active(setup.begin()).items()
    }
    assert len(masks) == 3
    k = round(0.1 * setup.mask.total)
    assert all(int(mask.sum()) == k for mask in masks.values()) and setup.space.trained > k
    assert torch.stack(list(masks.values())).any(0).all()  # the space is exactly the union
    responses = []
    exchange = InProcess.exchange

    def listening(self: InProcess, requests: Any) -> Any:
        responses.extend(exchange(self, requests))
        return list(responses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcess, "exchange", listening)
        before, after = setup.rounds(1)
    total, weight = torch.zeros(2, setup.space.trained, dtype=torch.float64)
    for response in responses:
        assert response.update is not None and response.update.length == k  # only its own coordinates travel
        update = decode(response.update, setup.algorithm.compression, k).double()
        total[masks[response.client]] += response.examples * update
        weight[masks[response.client]] += response.examples
    everyone = sum(response.examples for response in responses)
    step = total / (weight if fill == "count" else everyone)
    torch.testing.assert_close(after.vector.double(), before.vector.double() + step, rtol=1e-6, atol=1e-8)
    other = total / (everyone if fill == "count" else weight)  # the planted mistake: the other rule
    assert not torch.allclose(after.vector.double(), before.vector.double() + other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("strategy", ["lowest_magnitude", "highest_magnitude"])
def test_own_masks_by_magnitude_go_by_magnitude(strategy: str) -> None:
    own = opened("trainable.sparse.per_client=true", f"trainable.sparse.strategy={strategy}")
    assert own.mask == opened(f"trainable.sparse.strategy={strategy}").mask  # weights are the same for every client


@pytest.mark.slow
@pytest.mark.parametrize("merge_rule", ["vote", "union", "intersection"])
def test_merged_masks(merge_rule: str) -> None:
    setup = opened(
        f"trainable.sparse.merge={merge_rule}", "trainable.head_too=true", "trainable.sparse.per_client=false"
    )
    own = opened("trainable.sparse.per_client=true", "trainable.head_too=true")
    dense = sum(p.numel() for p in setup.network.head.parameters())
    budget = round(0.1 * (setup.mask.total - dense))
    count = setup.mask.count - dense  # the head is trained whole and takes nothing from the budget
    assert setup.mask["head.weight"].all()
    assert {"vote": count == budget, "union": count > budget, "intersection": 0 < count < budget}[merge_rule]
    if merge_rule == "union":
        assert setup.mask == own.mask


def test_a_vote_stays_inside_the_scope() -> None:
    """Votes are counted over what may be masked, not over tensors that are only trained densely."""
    setup = opened("trainable.sparse.merge=vote", 'trainable.sparse.scope=["qk"]', 'trainable.sparse.dense=["norm"]')
    for name, tensor in setup.mask.items():
        assert tensor.all() if "norm" in name else ".q_proj." in name or ".k_proj." in name


def test_whole_tensors_are_trained_beside_frozen_blocks() -> None:
    """What is named trains whole though its blocks are frozen; a keyword is about the blocks that are not."""
    dense = 'trainable.sparse.dense=["*cls_token","*position_embeddings","norm"]'
    setup = opened("trainable.freeze_blocks=1", dense)
    trained = {name for name, tensor in setup.mask.items() if tensor.all()}
    early = {name for name, _ in setup.network.named_parameters() if frozen_early(setup.network, name, 1)}
    named = {name for name in early if name.endswith(("cls_token", "position_embeddings"))}
    assert len(named) == 2 and early & set(setup.mask) == named <= trained
    assert any("norm" in name for name in trained) and any("norm" in name for name in early)


def test_a_single_batch_is_drawn_and_has_the_size_that_is_asked_for() -> None:
    """Absolute gradients of one batch of each client: another seed draws another, another size scores others."""
    single = ("trainable.sparse.labels=single_batch", "trainable.sparse.calibration=oneshot")
    small = opened(*single, "trainable.sparse.batch=4").mask
    assert small == opened(*single, "trainable.sparse.batch=4").mask
    assert small != opened(*single, "trainable.sparse.batch=12").mask
    assert small != opened(*single, "trainable.sparse.batch=4", "seed=5").mask
    assert small.count == opened(*single, "trainable.sparse.batch=12").mask.count


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "fedadam"])
@pytest.mark.parametrize("strategy", ["least_sensitive", "highest_magnitude"])
@pytest.mark.parametrize("head_too", [False, True])
def test_adaptive_sparsity_shrinks_and_leavers_rest(strategy: str, head_too: bool, algorithm: str) -> None:
    overrides = [
        f"trainable.sparse.strategy={strategy}",
        f"trainable.head_too={str(head_too).lower()}",
        *EAGER,
        f"algorithm.name={algorithm}",
    ]
    setup = opened("trainable.sparse.adaptive_start=0.6", "trainable.sparse.sparsity=0.9", *overrides)
    head = sum(p.numel() for p in setup.network.head.parameters()) if head_too else 0
    total = setup.mask.total - head
    states, active_in = list(setup.rounds(5)), setup.server_context.active
    assert active_in is not None
    active = [unpack_bits(active_in(state)[EVERYONE], setup.space.trained) for state in states]
    counts = [int(a.sum()) - head for a in active]
    assert counts == [round(share * total) for share in (0.4, 0.3, 0.2, 0.1, 0.1, 0.1)]
    for t in range(5):
        assert not (active[t + 1] & ~active[t]).any()  # nobody comes back
        gone = ~active[t]
        assert torch.equal(states[t + 1].vector[gone], states[t].vector[gone])
        moved = states[t + 1].vector[active[t]] != states[t].vector[active[t]]
        assert float(moved.float().mean()) > 0.95
    if head_too:
        where = setup.space.slices()
        assert active[-1][where["head.weight"]].all() and active[-1][where["head.bias"]].all()


def test_adaptive_sparsity_waits_for_calm() -> None:
    setup = opened("trainable.sparse.adaptive_start=0.6")
    state, active_in = setup.begin(), setup.server_context.active
    assert active_in is not None
    wild, calm = replace(state, drifts=(2.0,) * 5), replace(state, drifts=(2.0, 0.1, 0.1))
    sizes = [int(unpack_bits(active_in(s)[EVERYONE], setup.space.trained).sum()) for s in (state, wild, calm)]
    assert sizes[0] == sizes[1] > sizes[2]


def test_update_norms_are_matched() -> None:
    setup = opened("trainable.match_norm=1000000", "trainable.sparse.strategy=lowest_magnitude")
    network, rows = base(setup), setup.data.validation_rows[:256]
    loss = cross_entropy(network(setup.task.eval_images.batch(rows)), setup.task.train_images.labels[rows])
    names = [name for name, _ in network.named_parameters() if name.startswith("backbone.")]
    grads = dict(zip(names, torch.autograd.grad(loss, [network.get_parameter(n) for n in names]), strict=True))
    dense = torch.sqrt(sum(g.double().square().sum() for g in grads.values()))
    sparse = torch.sqrt(sum(grads[name][chosen].double().square().sum() for name, chosen in setup.mask.items()))
    factor = setup.server_context.rate_factor
    assert factor == pytest.approx(float(dense / sparse), rel=1e-4) and factor > 1.4
    rate = setup.server_context.learning_rate(setup.setup.federation, setup.begin())
    assert rate == pytest.approx(0.02 * factor)
    capped = opened("trainable.match_norm=1.25", "trainable.sparse.strategy=lowest_magnitude")
    assert capped.server_context.rate_factor == 1.25 and opened().server_context.rate_factor == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mean", "frozen_a", "alternate", "stack", "residual"])
def test_low_rank_runs_to_a_plain_model(mode: str, tmp_path: Path) -> None:
    lora = [
        "trainable.kind=lora",
        "trainable.lora.rank=2",
        f"trainable.lora.aggregate={mode}",
        "local.lr=0.005",
        "model.head=random",
    ]
    summary = running.run(load(None, [*OVERRIDES, *lora, "trainable.head_too=true"]), tmp_path / "run", console=False)
    setup = finished.adapted(tmp_path / "run")
    task = setup.setup.task
    images = task.eval_images.batch(task.data.train_rows[:24])
    with torch.no_grad():
        factored = setup.network.eval()(images)
        merge_lora(setup.network)
        merged = setup.network.eval()(images)
        start = base(setup)
        untouched = start(images)
    torch.testing.assert_close(merged, factored, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged, untouched, rtol=1e-3, atol=1e-3)
    export_run(tmp_path / "run", tmp_path / "model")
    again = load_network(tmp_path / "model", None)
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in start.named_parameters()]
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(images), merged, rtol=1e-6, atol=1e-6)
    head, factors = 330, 4 * 2 * (32 + 32)  # coordinates: Q and V of two blocks, rank 2
    sent = head + (factors // 2 if mode in ("frozen_a", "alternate") else factors)
    assert (
        4 * sent < (summary["bytes_up"] - summary.get("bytes_up_outside_rounds", 0)) / (4 * 3) < 4 * sent + 600
    )  # four rounds of three clients, headers beside


@pytest.mark.slow
def test_central_runs_use_the_same_mask(tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "centralized.kind=finetune", "centralized.epochs=2"]
    summary = run_centralized(load(None, overrides), tmp_path / "run", console=False)
    setup = finished.adapted(tmp_path / "run")
    mask = setup.opened.trainable.mask
    assert mask is not None and summary["edited"]["coordinates"] == mask.count
    start = dict(base(setup).named_parameters())
    frozen = [(p == start[n])[~mask[n]].all() for n, p in setup.network.named_parameters() if n in mask]
    assert len(frozen) == len(mask) and all(frozen)
