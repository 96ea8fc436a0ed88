"""The paths a GPU would take, on a CPU: autocast, a loss scale per client, tensors that follow the network's device."""

from __future__ import annotations

import pytest
import torch
from tests.support.toy import ToyNetwork

from fedgraft.core.device import HOST, Device, choose_devices
from fedgraft.core.errors import FedgraftError
from fedgraft.core.space import select
from fedgraft.data.examples import FeatureExamples
from fedgraft.local import loss_scale
from fedgraft.local.train import LocalTraining, Trained, train


def examples() -> FeatureExamples:
    g = torch.Generator().manual_seed(0)
    return FeatureExamples(torch.randn(24, 5, generator=g), torch.randint(0, 3, (24,), generator=g), 0)


def fit(rule: LocalTraining, scale: float = 1.0) -> tuple[torch.Tensor, Trained]:
    network = ToyNetwork()
    bound = select(network, lambda n: True).bind(network)
    given = examples()
    given.features *= scale
    rows, streams = torch.arange(24), [torch.Generator().manual_seed(k) for k in (1, 2)]
    result = train(network, bound, given, rows, rule, lambda step: 0.05, *streams)
    return bound.values.clone(), result


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_autocast_trains_float32_weights_near_the_plain_way(amp: str) -> None:
    plain, _ = fit(LocalTraining(3, batch_size=8))
    mixed, result = fit(LocalTraining(3, batch_size=8, amp=amp))
    assert mixed.dtype == torch.float32 and result.steps == 3
    assert 0 < float((mixed - plain).abs().max()) < (0.005 if amp == "float16" else 0.05)


def test_a_loss_that_overflows_moves_nothing_and_other_clients_keep_their_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half precision ends at 65,504: features beyond that have no loss, at any scale."""
    start = select(ToyNetwork(), lambda n: True).gather(ToyNetwork())  # type: ignore[arg-type]
    rule = LocalTraining(4, batch_size=8, amp="float16")
    stuck, trained = fit(rule, scale=1e6)
    assert torch.equal(stuck, start) and trained.steps == 0 and trained.nonfinite == 4
    moved, _ = fit(rule)
    assert not torch.equal(moved, start)
    monkeypatch.setattr(loss_scale.torch, "isfinite", lambda t: torch.ones_like(t, dtype=torch.bool))
    broken, _ = fit(rule, scale=1e6)  # without the check the weights are lost
    assert not bool((broken.abs() < float("inf")).all())


def test_steps_whose_loss_is_not_finite_are_counted_in_float32_too() -> None:
    _, trained = fit(LocalTraining(3, batch_size=8), scale=float("inf"))
    assert trained.metrics["nonfinite"] == 3 and "nonfinite" not in fit(LocalTraining(3, batch_size=8))[1].metrics


def test_what_is_moved_keeps_its_values_and_an_unknown_device_is_one_sentence() -> None:
    tensors = {"a": torch.arange(3.0)}
    assert HOST.put_all(tensors)["a"] is tensors["a"]  # nothing is copied in vain
    assert Device(torch.device("meta")).put_all(tensors)["a"].device.type == "meta"
    assert choose_devices("cpu").first.type == "cpu"
    for name in ("cuda", "nonsense"):
        if name == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(FedgraftError, match="device=cpu"):
            choose_devices(name)
