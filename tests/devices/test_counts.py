"""Transfers and waits by the counter: none per local step but the batch's upload, a fixed few per client and round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.pretend_device import NAME, TRACES, Counts, counted
from tests.support.tiny import Open, tiny

from fedgraft.core.device import CHOICE
from fedgraft.local import optimizers
from fedgraft.server.round import run_round

BODY = "trainable.kind=last_blocks"
SPARSE = ("trainable.kind=sparse", "trainable.sparse.samples=8", "trainable.sparse.rounds=1")
CLIENTS, STEPS = 3, 3
KINDS: dict[str, tuple[str, ...]] = {
    "last blocks": (BODY,),
    "everything, adamw, clipped": ("trainable.kind=everything", "local.optimizer=adamw", "local.clip=0.01"),
    "sparse": SPARSE,
    "low rank": ("trainable.kind=lora",),
    "head": ("engine=reference",),
    "convolutions": ("model.name=cnn:width=4,size=16", "trainable.kind=everything"),
    "calibrated": ("algorithm.name=fedlc", BODY),
    "bfloat16": (BODY, "local.amp=bfloat16"),
}
BATCH = 2
"""Uploads of a batch: its images and its labels."""


@pytest.fixture(autouse=True)
def on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CHOICE, NAME)
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path.parent / "cache-counts"))
    yield
    TRACES.clear()


def counts_of_a_round(*options: str) -> Counts:
    """What the second round moves, when the network is bound and the index is on the device."""
    job = Open(tiny(f"local.steps={STEPS}", "pack=off", *options))
    engine = job.engine()
    state, _ = run_round(job.algorithm, job.setup.federation, job.begin(), engine, job.server_context)
    with counted() as counts:
        run_round(job.algorithm, job.setup.federation, state, engine, job.server_context)
    return counts


GATE = ("everything, adamw, clipped", "sparse", "bfloat16")
"""Kinds that the gate counts; the others are slow to open and take the same loop."""


@pytest.mark.parametrize(
    "kind", [kind if kind in GATE else pytest.param(kind, marks=pytest.mark.deploy) for kind in KINDS]
)
def test_a_step_waits_for_nothing_and_a_client_moves_its_vector_twice(kind: str) -> None:
    counts = counts_of_a_round(*KINDS[kind])
    classes = int(kind == "calibrated")  # the client's counts of classes, for the margins
    assert counts.uploads == CLIENTS * (1 + classes + BATCH * STEPS)  # the model, and each batch
    assert counts.downloads == counts.waits == CLIENTS  # the trained vector, with the mean loss behind it


def test_memories_cost_one_transfer_each() -> None:
    counts = counts_of_a_round("algorithm.name=scaffold", BODY)
    assert counts.uploads == CLIENTS * (3 + BATCH * STEPS)  # two control variates beside the model
    assert counts.downloads == counts.waits == CLIENTS * 3  # the new one, and its change


def test_clients_of_a_linear_head_share_their_transfers() -> None:
    counts = counts_of_a_round()
    assert counts.waits == counts.downloads == 1  # for the whole chunk: updates with their losses
    assert counts.uploads == 3  # models, labels, features


TEN = ("partition.clients=10", "local.batch_size=4")
PACKED = {"low rank": ("trainable.kind=lora",), "last block": (BODY, "trainable.blocks=1"), "sparse": SPARSE}


@pytest.mark.parametrize(
    "kind", ["last block", *(pytest.param(k, marks=pytest.mark.deploy) for k in PACKED if k != "last block")]
)
def test_packed_clients_launch_at_least_five_times_less_and_share_their_transfers(kind: str) -> None:
    alone, together = (counts_of_a_round(*TEN, *PACKED[kind], f"pack={pack}") for pack in ("off", "auto"))
    assert together.launches * 5 <= alone.launches
    assert together.uploads == 1 + 1 + STEPS  # all models, all labels, the images of a step
    assert together.waits == together.downloads == 1  # all updates with their losses


@pytest.mark.parametrize(("augment", "numbers"), [('["flip","crop","jitter"]', 3), ('["resized_crop"]', 1), ("[]", 0)])
def test_images_go_up_as_bytes_and_are_transformed_there(augment: str, numbers: int) -> None:
    counts = counts_of_a_round(BODY, "trainable.blocks=2", f"data.augment={augment}", "data.cache_features=false")
    assert counts.uploads == CLIENTS * (1 + (BATCH + numbers) * STEPS)  # one more for the numbers of each operation
    assert counts.downloads == counts.waits == CLIENTS


def test_float16_waits_once_a_step_to_know_whether_it_overflowed() -> None:
    assert counts_of_a_round(BODY, "local.amp=float16").waits == CLIENTS * (1 + STEPS)


def reading_norm(gradient: torch.Tensor, limit: float) -> torch.Tensor:
    norm = float(torch.linalg.vector_norm(gradient))
    return gradient.mul_(min(1.0, limit / norm))


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a norm that is read": lambda patch: patch.setattr("fedgraft.local.train.clip_", reading_norm),
    "a counter on the device": lambda patch: patch.setattr(
        optimizers, "state_on", lambda optimizer, state, device: device.put_all(state)
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_counter_sees_a_wait_in_the_loop(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[fault](monkeypatch)
    assert counts_of_a_round(*KINDS["everything, adamw, clipped"]).waits >= CLIENTS * (1 + STEPS)
