"""What a run will need: counted bytes against known tensors, and refusals of what cannot fit."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple

import pytest
import torch
from tests.support.errors import raises

from fedgraft.config.load import load
from fedgraft.runs import estimate
from fedgraft.runs.engines import Engines
from fedgraft.runs.estimate import Estimate, Linear, StepCosts, estimate_run
from fedgraft.runs.live_bytes import LiveBytes
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.plan import plan_run
from fedgraft.runs.setup import RunSetup, setup_of

BASE = [
    "model.name=tiny",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=120",
    "partition.clients=3",
    "rounds.total=2",
    "workers=1",
]


def opened_run(*overrides: str) -> tuple[RunSetup, OpenRun, Engines]:
    """Return a tiny run with its edit space open."""
    setup = setup_of(load(None, [*BASE, *overrides]))
    engines = Engines(setup)
    return setup, open_run(setup, engines), engines


def test_live_bytes_are_those_of_tensors_that_exist_at_once() -> None:
    weights = torch.ones(1000)
    with LiveBytes([weights]) as live:
        first = weights * 2  # 4,000 bytes
        view = first[:10]
        second = first + 1  # 8,000 in all
        del first, view
        third = second.double()  # 4,000 + 8,000
        del second
        _ = weights[:500]
    assert live.peak == 12_000 and live.now == third.nbytes and live.allocated == 16_000


def test_live_bytes_of_a_training_step_grow_by_what_autograd_saves() -> None:
    layer = torch.nn.Linear(64, 64, bias=False)
    peaks = []
    for count in (2, 4):
        inputs = torch.randn(count, 64)
        with LiveBytes(layer.parameters()) as live:
            layer(inputs).square().sum().backward()
        layer.zero_grad()
        peaks.append(live.peak)
    line = Linear.through(*peaks)
    # The most there is at once: the gradient of the weights, and that of the outputs (256 bytes an image).
    assert 4 * 64 * 64 <= line.fixed <= 4 * 64 * 64 + 100 and line.each == 256
    assert line.at(10) == line.fixed + 10 * line.each


def test_what_a_client_remembers_is_counted_for_every_client() -> None:
    setup, opened, engines = opened_run("algorithm.name=scaffold", "trainable.kind=last_blocks", "trainable.blocks=1")
    control_variate = 4 * opened.space.trained
    costs = estimate._measure_steps(setup, opened)
    assert costs.memory_bytes == control_variate
    needed = estimate_run(setup, opened, engines)
    plain_setup, plain_opened, plain_engines = opened_run("trainable.kind=last_blocks", "trainable.blocks=1")
    plain = estimate_run(plain_setup, plain_opened, plain_engines)
    assert estimate._measure_steps(plain_setup, plain_opened).memory_bytes == 0
    assert needed.disk_bytes["checkpoints"] > plain.disk_bytes["checkpoints"] + 8 * 3 * control_variate - 1
    assert set(needed.seconds) >= {"training", "evaluation"} and needed.device_bytes == 0


def test_memory_grows_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StepCosts(Linear(1e9, 1e8), 1.0, Linear(0, 0), 0.0, Linear(0, 0), 0.0, 0, 0)
    monkeypatch.setattr(estimate, "_measure_steps", lambda setup, opened: costs)
    small = estimate_run(*opened_run("local.batch_size=4"))
    large = estimate_run(*opened_run("local.batch_size=8"))
    assert abs(large.host_bytes - small.host_bytes - 4e8) < 1e8


def test_what_cannot_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, BASE)
    assert any(line.startswith("memory: about") for line in plan_run(config))
    with monkeypatch.context() as patch:
        patch.setattr(estimate, "available_bytes", lambda: 1_000_000)
        with raises("E-RUN-MEMORY", available=1_000_000):
            plan_run(config)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    with raises("E-RUN-DISK", available=1000):
        plan_run(config)


def test_personal_models_that_cannot_fit_are_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name, with the number of models and the size of one, for disk and for memory."""
    monkeypatch.setattr(estimate, "_measure_steps", lambda *given: pytest.fail("a training step was measured"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    bodies = [*BASE, "algorithm.name=fedshibu", "rounds.personal_memory_mb=0"]
    with raises("E-RUN-DISK", available=1000) as caught:
        plan_run(load(None, bodies))
    assert "3 personal models of" in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setattr(estimate, "_measure_steps", lambda *given: pytest.fail("a training step was measured"))
    monkeypatch.setattr(estimate, "available_bytes", lambda: 1000)
    with raises("E-RUN-MEMORY", available=1000):
        plan_run(load(None, bodies))


def test_this_machine_has_memory() -> None:
    assert 1e7 < estimate.resident_bytes() < estimate.available_bytes() <= 2 * os.sysconf("SC_PHYS_PAGES") * 4096
    assert Estimate(1, 0, {}, {"a": 1.0, "b": 2.0}).total_seconds == 3
