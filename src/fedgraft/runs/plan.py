"""The plan of a run before it starts: what will train, how many steps, how many bytes."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import torch

from fedgraft.algorithms.algorithm import vary
from fedgraft.client.actions import action_named
from fedgraft.config.agreement import HEAD_ACTIONS
from fedgraft.config.build import budget
from fedgraft.config.load import Config
from fedgraft.core.device import Device
from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import UNKNOWN, are_label_sets
from fedgraft.core.messages import Payload, Response, Scalar, wire_size
from fedgraft.core.progress import phase
from fedgraft.data.pixels.store import ImageStore
from fedgraft.data.sources.assemble import Store
from fedgraft.edit.sparse import Sparse
from fedgraft.local.memory import one_thread
from fedgraft.report.values import clock, format_epsilon, size
from fedgraft.runs.engines import Engines
from fedgraft.runs.estimate import Estimate, estimate_run, require_room, require_room_for_models
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.reporting import images_of_clients, setup_line
from fedgraft.runs.saving import records_account
from fedgraft.runs.setup import SECRET_BYTES, Circumstances, RunParts, RunSetup, parts_from_config
from fedgraft.runs.warnings import warnings_for
from fedgraft.server import sample as server

DECODED_BY_PLAN = 2_000
"""Number of images up to which a plan decodes all of them."""


def check_setup(setup: RunSetup) -> None:
    """Raise an error for a run that cannot work, before anything is computed or written: for a run and for its plan."""
    data = setup.task.data
    _ = setup.probe_size  # refuses a probe that is larger than the validation images
    if data.classes < 2:
        raise FedgraftError(
            "E-RUN-ONE-CLASS",
            f"the data has one class only ({data.dataset.classes[0]})",
            "there is nothing to tell apart",
        )
    account = budget(setup.config, setup.algorithm, 0)
    if account is not None:
        with phase("privacy account"):
            account.check()
    record = setup.algorithm.privacy.records
    if record is not None:
        with phase("privacy account of each client's images"):
            records_account(setup.algorithm, setup.config.rounds.total, images_of_clients(setup))
    # Decodes the images, and refuses files that cannot be decoded.
    _ = setup.task.train_images
    _ = setup.task.test_images


def plan_run(config: Config) -> list[str]:
    """Return the lines of `--dry-run`: what trains, the data, the local work, bytes, memory, disk, time, and warnings.

    The network and the data are loaded; a few images are decoded and trained on, to measure memory and time. Bytes are
    exact for one message; totals assume that every client answers. A run that cannot fit is refused.
    """
    with one_thread():  # as the run itself computes
        return _plan_lines(config)


def _plan_lines(config: Config) -> list[str]:
    """Return the lines of the plan, computed on one thread."""
    parts = _without_stored_images(_without_calibration(parts_from_config(config)))
    setup = RunSetup.build(parts, Circumstances(secret=os.urandom(SECRET_BYTES)))  # nothing of a plan is released
    check_setup(setup)
    engines = Engines(setup)
    opened = open_run(setup, engines)
    data = setup.task.data
    sizes = data.partition.sizes()
    local = setup.algorithm.local
    steps = sum(local.steps_for(int(images)) for images in sizes) / len(sizes)
    exchanges = setup.federation.per_round * config.rounds.total
    down, up = _message_bytes(setup, opened)
    lines = [setup_line(setup, opened)]
    if data.label_sets:
        lines.append(_findings_line(setup))
    if setup.algorithm.privacy.records is not None:
        lines.append(_records_line(setup))
    lines += [
        f"data: {config.data.source}, {len(data.train_rows):,} training, {len(data.validation_rows):,} validation, "
        f"{len(data.dataset.test.labels):,} test images; clients hold {int(min(sizes)):,} to {int(max(sizes)):,}",
        f"local work: {steps:.3g} steps of {local.batch_size} images a client and round, "
        f"{steps * exchanges:,.0f} steps in all",
        f"bytes: {size(down)} down and {size(up)} up per client and round; {size(down * exchanges)} down and "
        f"{size(up * exchanges)} up in all{_head_bytes(setup)}",
        _device_line(setup, engines, opened),
        f"engine: {engines.choice(setup.algorithm, opened.context).why}",
    ]
    require_room_for_models(setup, opened, Path.cwd())
    estimate = estimate_run(setup, opened, engines)
    require_room(estimate, Path.cwd())
    lines += _estimate_lines(estimate)
    for warning in warnings_for(setup, opened, engines):
        lines.append(f"warning: {warning}")
    return lines


def _records_line(setup: RunSetup) -> str:
    """Return what the account of single images will be: the largest epsilon, and the noise of the clients."""
    account = records_account(setup.algorithm, setup.config.rounds.total, images_of_clients(setup))
    noises = [client["noise"] for client in account["clients"].values() if client["images"]]
    return (
        f"privacy: epsilon {format_epsilon(account['epsilon'])} at most, at delta {account['delta']:.2g}, for each "
        f"record (one training image of a client); noise multipliers {min(noises):.3g} to {max(noises):.3g} by client"
    )


def _findings_line(setup: RunSetup) -> str:
    """Return what is special of sets of findings: how many there are, the loss, the metrics, unknown labels."""
    findings = setup.task.data.dataset.train.findings
    assert findings is not None
    unknown = float((findings == -1).mean()) if findings.size else 0.0
    measured = ", ".join(setup.config.metrics) or "none but accuracy (all known labels of an image right)"
    return (
        f"labels: sets of {findings.shape[1]} findings, {100 * unknown:.3g} % unknown and left out; the loss is "
        f"{setup.algorithm.loss.name}; metrics: {measured}"
    )


def _device_line(setup: RunSetup, engines: Engines, opened: OpenRun) -> str:
    """Return where the run computes: this process, and each worker."""
    choice = engines.choice(setup.algorithm, opened.context)
    line = f"device: {Device.of(setup.task.network).torch_device}"
    if choice.mode != "pool":
        return line
    places = []
    for number in range(choice.workers):
        places.append(f"worker {number} on {setup.devices.of_worker(number)}")
    return f"{line} for evaluation; {', '.join(places)}"


def _estimate_lines(estimate: Estimate) -> list[str]:
    """Return what the run will need of memory, disk and time, as lines of the plan."""
    memory = f"memory: about {size(estimate.host_bytes)}"
    if estimate.device_bytes:
        memory += f", and {size(estimate.device_bytes)} on the device"
    lines = [memory]
    if estimate.disk_bytes:
        parts = [f"{size(count)} for {purpose}" for purpose, count in estimate.disk_bytes.items()]
        lines.append(f"disk: at most {', '.join(parts)}")
    longest = sorted(estimate.seconds.items(), key=lambda item: -item[1])
    parts = [f"{purpose} {clock(seconds)}" for purpose, seconds in longest if seconds >= 1]
    time_line = f"time: about {clock(estimate.total_seconds)} on this machine"
    if len(parts) > 1:
        time_line += f" ({', '.join(parts)})"
    lines.append(time_line)
    return lines


def _without_calibration(parts: RunParts) -> RunParts:
    """Return the parts with a random mask of the same size: a plan must not wait for scores."""
    trainable = parts.algorithm.trainable
    if not isinstance(trainable, Sparse):
        return parts
    random_mask = replace(trainable, strategy="random", per_client=False, merge="score_mean")
    return replace(parts, algorithm=vary(parts.algorithm, trainable=random_mask))


def _without_stored_images(parts: RunParts) -> RunParts:
    """Return the parts whose images are decoded one by one as the plan needs them, where there are many.

    A plan must not wait until all images are decoded, nor fill the disk. Of few images all are decoded, so that the
    plan refuses those that cannot be read.
    """
    data = parts.task.data
    dataset = replace(
        data.dataset, train=_decoded_when_used(data.dataset.train), test=_decoded_when_used(data.dataset.test)
    )
    return replace(parts, task=replace(parts.task, data=replace(data, dataset=dataset)))


def _decoded_when_used(store: Store) -> Store:
    """Return the store, without stored pixels if it has many images."""
    if isinstance(store, ImageStore) and len(store) > DECODED_BY_PLAN:
        return replace(store, keeps_pixels=False)
    return store


def _message_bytes(setup: RunSetup, opened: OpenRun) -> tuple[int, int]:
    """Return the bytes of one request and of one response of a round."""
    algorithm = setup.algorithm
    space = opened.space
    state = server.start(algorithm, space.gather(setup.task.network), space.trained)
    requests = server.instruct(algorithm, setup.federation, state, [0], space.digest)
    sent = opened.context.sent
    arrays = {}
    for name, (dtype, count) in algorithm.compression.layout(sent).items():
        arrays[name] = torch.empty(count, dtype=dtype, device="meta")
    payload = Payload(algorithm.compression.name, sent, arrays)
    response = Response(setup.federation.run, 0, 0, space.digest, 1, payload)
    return wire_size(requests[0]), wire_size(response)


def _unknown_findings(setup: RunSetup) -> list[int]:
    """Return the numbers of the findings that some training images do not say, as far as they are known here."""
    labels = setup.task.train_images.labels
    if not are_label_sets(labels):
        return []
    return torch.nonzero((labels == UNKNOWN).any(0)).view(-1).tolist()


def _head_bytes(setup: RunSetup) -> str:
    """Return what the sums that make the head take, if there are some: in a short run most of the traffic."""
    bytes_per_client = 0
    for action in HEAD_ACTIONS[setup.algorithm.closed_form or setup.config.head]:
        repetitions = 1
        settings: dict[str, Scalar] = {}
        if action == "head_gradient":
            repetitions = setup.config.model.probe_steps
        if action == "unknown_statistics":
            findings = _unknown_findings(setup)
            repetitions = min(1, len(findings))
            settings["findings"] = ",".join(map(str, findings or [0]))
        for field in action_named(action).summands(setup.task.network, settings).values():
            bytes_per_client += repetitions * math.prod(field.shape) * field.dtype.itemsize
    if not bytes_per_client:
        return ""
    return f"; before the first round about {size(bytes_per_client * len(setup.head_clients))} up for the head"
