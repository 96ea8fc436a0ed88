"""The paths a GPU would take, on a CPU: autocast, a loss scale per client, tensors that follow the network's device."""

from __future__ import annotations

import pytest
import torch
from tests.support.toy import ToyNetwork

from fedgraft.core.device import HOST, Device, choose_devices
from fedgraft.core.errors import FedgraftError
from fedgraft.core.space import select
from fedgraft.data.examples import FeatureExamples
from fedgraft.local import train as training
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
    # The scale starts at 2^16, as is usual; half precision may skip a step or two until it is low enough.
    assert 0 < float((mixed - plain).abs().max()) < (0.5 if amp == "float16" else 0.05)


def test_an_overflow_moves_nothing_and_each_client_starts_with_its_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision ends at 65,504: a gradient beyond that is skipped, with a lower scale for the next step."""
    start = select(ToyNetwork(), lambda n: True).gather(ToyNetwork())  # type: ignore[arg-type]
    rule = LocalTraining(4, batch_size=8, amp="float16")
    stuck, _ = fit(rule, scale=1e6)
    assert torch.equal(stuck, start)
    moved, _ = fit(rule)  # the client before has not lowered the scale of this one
    assert not torch.equal(moved, start)
    monkeypatch.setattr(training.torch, "isfinite", lambda t: torch.ones_like(t, dtype=torch.bool))
    broken, _ = fit(rule, scale=1e6)  # without the check the weights are lost
    assert not bool((broken.abs() < float("inf")).all())


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
