"""Mixed precision, attention and batches on a device: near float32 for every kind, repeatable, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.pretend_device import NAME
from tests.support.tiny import CNN, Open, same_bits, tensors_of, tiny, without_pictures
from torch import Tensor

from fedgraft.core.device import CHOICE, Device
from fedgraft.core.files import read_metrics
from fedgraft.core.registry import TRAINABLES
from fedgraft.local import forward_memory, loss_scale
from fedgraft.local.forward_memory import images_at_once
from fedgraft.metrics.evaluate import evaluate
from fedgraft.models import network as networks
from fedgraft.models.backbones import load_network
from fedgraft.runs.loop import _Run, run

BODY = "trainable.kind=last_blocks"


def vector_of(folder: Path, *options: str) -> Tensor:
    with without_pictures():
        run(tiny(*options), folder, console=False)
    return tensors_of(folder)["vector"]


@pytest.mark.deploy
@pytest.mark.parametrize("amp", ["float16", "bfloat16"])
def test_every_kind_stays_near_float32(amp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU and on the device: what rounds of half precision move is what rounds of float32 move, within 10 %."""
    for kind in TRAINABLES:
        options = [f"trainable.kind={kind}", "engine=reference", "rounds.total=1"]
        if kind == "sparse":
            options += ["trainable.sparse.strategy=random"]
        start = Open(tiny(*options)).begin().vector
        exact = vector_of(tmp_path / f"{kind}-exact", *options) - start
        for device in ("cpu", NAME):
            monkeypatch.setenv(CHOICE, device)
            mixed = vector_of(tmp_path / f"{kind}-{device}", *options, f"local.amp={amp}") - start
            monkeypatch.delenv(CHOICE)
            assert mixed.dtype == torch.float32
            assert float((mixed - exact).norm()) < 0.1 * float(exact.norm()), (kind, device)


def test_a_stopped_run_of_float16_ends_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss scale is in the checkpoint with the clients' memories; the rounds say how often it was lowered."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**40)  # overflows at once
    options = (BODY, "local.amp=float16", f"device={NAME}")
    vector_of(tmp_path / "whole", *options)
    plain = _Run._one_round

    def one_round(self: _Run, state):  # type: ignore[no-untyped-def]
        if state.round == 1:
            raise KeyboardInterrupt
        return plain(self, state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_Run, "_one_round", one_round)
        vector_of(tmp_path / "stopped", *options)
    vector_of(tmp_path / "stopped", *options)
    whole, stopped = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "stopped")
    assert same_bits(whole, stopped)
    assert any(loss_scale.LOSS_SCALE in name for name in whole)
    first, second = read_metrics(tmp_path / "whole")[-2:]
    assert sum(first["clients"]["retried"]) > 0 and "retried" not in second["clients"]


@pytest.mark.deploy
def test_fused_attention_on_devices_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = vector_of(tmp_path / "plain", BODY)
    monkeypatch.setattr(networks, "FUSED_ATTENTION", frozenset({NAME}))
    monkeypatch.setenv(CHOICE, NAME)
    job = Open(tiny(BODY))
    assert job.network.backbone.config._attn_implementation == "sdpa"
    fused = vector_of(tmp_path / "fused", BODY)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_batches_without_gradients_are_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    network = load_network("tiny", 10, 16, 0.0, 0)
    assert images_at_once(network, 0, 512) == 512
    monkeypatch.setattr(type(network), "activation_bytes", 230 << 20)  # a ViT-B at 518 pixels
    assert images_at_once(network, 0, 512) == (8 << 30) // (230 << 20)
    assert images_at_once(network, network.depth, 512) == 512  # features alone
    monkeypatch.setattr(forward_memory, "HOST_BYTES", 1)
    assert images_at_once(network, 0, 512) == 1
    assert Device.of(network).is_host and load_network(CNN.partition("=")[2], 10).activation_bytes > 0


@pytest.mark.parametrize("device", ["cpu", NAME])
def test_passes_without_gradients_in_half_precision_are_near_float32_and_stored_as_it(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features, head and validation: another rounding, other names in the cache, and nothing but float32 is kept."""
    monkeypatch.setenv(CHOICE, device)
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    losses, features = {}, {}
    for amp in ("none", "float16"):
        job = Open(tiny(BODY, "trainable.blocks=1", f"model.amp={amp}"))
        rows = job.data.train_rows[:8]
        features[amp] = job.context.examples.batch(rows)
        assert features[amp].dtype == torch.float32
        losses[amp] = evaluate(job.network, job.context.examples, rows).loss
        assert {parameter.dtype for parameter in job.network.parameters()} == {torch.float32}
    gap = (features["float16"] - features["none"]).norm() / features["none"].norm()
    assert 1e-6 < float(gap) < 1e-2  # it was computed in half precision, and is near
    assert losses["float16"] == pytest.approx(losses["none"], rel=0.05) and losses["float16"] != losses["none"]
