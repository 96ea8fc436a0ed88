"""Compiled training steps: near the plain ones, the same bytes after a stop, refused where nothing can compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.tiny import Open, same_bits, tensors_of, tiny, without_pictures
from torch import Tensor

from fedgraft.core.device import HOST, Device
from fedgraft.core.errors import FedgraftError
from fedgraft.engines.packed import packing_obstacle
from fedgraft.local import compiled
from fedgraft.local.train import LocalTraining
from fedgraft.runs.loop import _Run, run

OPTIONS = ("trainable.kind=last_blocks", "trainable.blocks=1", "local.compile=true")


def tensors_after(folder: Path, *options: str) -> dict[str, Tensor]:
    torch._dynamo.reset()  # as in a new process
    compiled._compiled.clear()
    with without_pictures():
        run(tiny(*options), folder, console=False)
    return tensors_of(folder)


@pytest.mark.deploy
def test_a_stopped_run_ends_in_the_same_bytes_and_near_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tensors_after(tmp_path / "whole", *OPTIONS)
    plain_round = _Run._one_round

    def one_round(self: _Run, state):  # type: ignore[no-untyped-def]
        if state.round == 1:
            raise KeyboardInterrupt
        return plain_round(self, state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_Run, "_one_round", one_round)
        tensors_after(tmp_path / "stopped", *OPTIONS)
    assert same_bits(tensors_after(tmp_path / "stopped", *OPTIONS), whole)
    plain = tensors_after(tmp_path / "plain", *OPTIONS[:2])
    torch.testing.assert_close(whole["vector"], plain["vector"], rtol=1e-4, atol=1e-4)


def test_it_is_refused_where_nothing_can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(FedgraftError) as caught:
        Open(tiny(*OPTIONS))
    assert caught.value.code == "E-LOCAL-COMPILER"
    monkeypatch.setattr(compiled.shutil, "which", lambda name: f"/usr/bin/{name}")
    compiled.require_compiler(HOST)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FedgraftError, match="triton"):
        compiled.require_compiler(Device(torch.device("meta")))


def test_a_repeated_backward_pass_is_refused_and_clients_are_not_packed() -> None:
    with pytest.raises(FedgraftError) as caught:
        LocalTraining(compile=True, amp="float16")
    assert caught.value.code == "E-LOCAL-COMPILE"
    job = Open(tiny("trainable.kind=lora"))
    assert packing_obstacle(job.algorithm, job.context) is None
    job = Open(tiny("trainable.kind=lora", "local.compile=true"))
    assert "local.compile" in (packing_obstacle(job.algorithm, job.context) or "")
