"""The plan of a run before it starts: what will train, how many steps, how many bytes."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import torch

from fedgraft.algorithms.algorithm import vary
from fedgraft.client.actions import action_named
from fedgraft.config.agreement import HEAD_ASKS
from fedgraft.config.build import budget
from fedgraft.config.load import Config
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Payload, Response, wire_size
from fedgraft.core.progress import phase
from fedgraft.edit.sparse import Sparse
from fedgraft.report.display import size
from fedgraft.runs.engines import Engines
from fedgraft.runs.open_run import open_run
from fedgraft.runs.reporting import describe
from fedgraft.runs.setup import SECRET_BYTES, Circumstances, RunSetup, parts_from_config
from fedgraft.runs.warnings import warnings_for
from fedgraft.server import sample as server


def check(setup: RunSetup) -> None:
    """Refuse what cannot work before anything is computed or written: the same for a run and for its plan."""
    data = setup.task.data
    _ = setup.probe_size  # more than are held out are refused
    if data.classes < 2:
        raise FedgraftError(f"the data has one class only ({data.dataset.classes[0]}); there is nothing to tell apart.")
    account = budget(setup.config, setup.algorithm, 0)
    if account is not None:
        with phase("privacy account"):
            account.check()
    for _ in (setup.task.train_images, setup.task.test_images):  # makes the pixels, and refuses files that give none
        pass


def plan(config: Config) -> list[str]:
    """Lines for `--dry-run`. Bytes are exact for one message; totals assume that everyone answers."""
    parts = parts_from_config(config)
    trainable = parts.algorithm.trainable
    if isinstance(trainable, Sparse):  # any mask of this size will do: a plan must not wait for scores
        random_mask = replace(trainable, strategy="random", per_client=False, merge="score_mean")
        parts = replace(parts, algorithm=vary(parts.algorithm, trainable=random_mask))
    setup = RunSetup.build(parts, Circumstances(secret=os.urandom(SECRET_BYTES)))  # nothing of a plan is released
    check(setup)
    engines = Engines(setup)
    opened = open_run(setup, engines)
    data, federation, algorithm, space = setup.task.data, setup.federation, setup.algorithm, opened.space
    state = server.start(algorithm, space.gather(setup.task.network), space.trained)
    requests = server.instruct(algorithm, federation, state, [0], space.digest)
    layout = algorithm.compression.layout(opened.context.sent)
    arrays = {name: torch.empty(count, dtype=dtype, device="meta") for name, (dtype, count) in layout.items()}
    payload = Payload(algorithm.compression.name, opened.context.sent, arrays)
    down, up = wire_size(requests[0]), wire_size(Response(federation.run, 0, 0, space.digest, 1, payload))
    times, sizes = federation.per_round * config.rounds.total, data.partition.sizes()
    steps = sum(algorithm.local.steps_for(int(n)) for n in sizes) / len(sizes)
    return [
        describe(setup, opened),
        f"data: {config.data.source}, {len(data.train_rows):,} training, {len(data.validation_rows):,} validation, "
        f"{len(data.dataset.test.labels):,} test images; clients hold {int(min(sizes)):,} to {int(max(sizes)):,}",
        f"local work: {steps:.3g} steps of {algorithm.local.batch_size} images a client and round, "
        f"{steps * times:,.0f} steps in all",
        f"bytes: {size(down)} down and {size(up)} up per client and round; {size(down * times)} down and "
        f"{size(up * times)} up in all{_head_bytes(setup)}",
        *(f"warning: {text}" for text in warnings_for(setup, opened, engines)),
    ]


def _head_bytes(setup: RunSetup) -> str:
    """What the sums that make the head take, where they do: of few rounds more than everything else."""
    each, network, repeated = 0, setup.task.network, {"head_gradient": setup.config.model.probe_steps}
    for action in HEAD_ASKS[setup.algorithm.closed_form or setup.config.head]:
        sums = action_named(action).summands(network, {}).values()
        each += repeated.get(action, 1) * sum(math.prod(one.shape) * one.dtype.itemsize for one in sums)
    return f"; before the first round about {size(each * len(setup.head_clients))} up for the head" if each else ""
