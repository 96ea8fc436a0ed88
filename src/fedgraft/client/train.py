"""How a client trains: the shared part, with a private part, a second model of its own, or only some coordinates."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgraft.aggregate.clusters import Clusters
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext, model_vector
from fedgraft.client.observe import OBSERVATIONS
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.device import Device, fetch
from fedgraft.core.messages import Request, unpack_bits
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import Bound, EditSpace, select
from fedgraft.local.adaptive_start import AdaptiveStart
from fedgraft.local.corrections import Correction, proximal
from fedgraft.local.loss_scale import LOSS_SCALE
from fedgraft.local.self_weight import split_aside
from fedgraft.local.train import LocalTraining, Trained, train
from fedgraft.local.update_links import Sending, run_chain
from fedgraft.metrics.evaluate import Evaluation, evaluate, evaluate_with_sums


@dataclass(frozen=True)
class LocalOutcome:
    """What local training gives, before it is encoded or added to a secure sum."""

    update: Tensor
    trained: Trained
    scalars: Mapping[str, float]
    evidence: Mapping[str, Tensor]
    memory: dict[str, Tensor]
    """The client's memory after the round."""


def train_locally(request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> LocalOutcome:
    """Train from the request's model, make the observations that the algorithm wants, and return the update with them.

    The client's new memory is part of the outcome; `memory` is not changed. The context's network is left with trained
    weights.
    """
    request, cluster_choice = choose_cluster_model(request, algorithm, context)
    start = model_vector(request)
    new_memory = dict(memory)
    if context.private is not None:
        values, trained = _train_with_private_part(request, algorithm, context, new_memory)
        update = values - start
    elif "active" in request.auxiliary:
        update, trained = _train_active_coordinates(request, algorithm, context, memory)
    else:
        update, trained = _train_shared_part(request, algorithm, context, memory, new_memory)
    new_memory |= trained.closing.memory
    if algorithm.client_state.optimizer:
        for name, tensor in trained.state.items():
            new_memory[f"optimizer/{name}"] = fetch(tensor)
    scalars: dict[str, float] = {}
    evidence: dict[str, Tensor] = {}
    for wanted in algorithm.wants:
        numbers, tensors = OBSERVATIONS[wanted.name](wanted, request, context)
        scalars |= numbers
        evidence |= tensors
    if algorithm.client_state.second_model is not None:
        new_memory["personal"] = _train_second_model(request, algorithm, context, memory)
    sending = Sending(trained.effective_steps, request.settings, context.space.trained)
    update, reported = run_chain(algorithm.update, update, sending)
    return LocalOutcome(update, trained, scalars | cluster_choice | reported, evidence, new_memory)


def _train_shared_part(
    request: Request,
    algorithm: Algorithm,
    context: ClientContext,
    memory: ClientMemory,
    new_memory: dict[str, Tensor],
) -> tuple[Tensor, Trained]:
    """Return the update of the whole edit space and the training's outcome.

    Training starts from the common model, or with FedALA from a blend with the client's last one. `new_memory` is
    changed in place: FedALA stores its weights `keep` and the trained model in it.
    """
    start = model_vector(request)
    adaptive_start = algorithm.client_state.start
    bound = context.bind(context.space)
    bound.load(start)
    if adaptive_start is not None:
        new_memory |= _learn_adaptive_start(request, adaptive_start, context, bound, memory)
        bound.load(adaptive_start.blend(start, new_memory))
    trained = _fit(request, algorithm, context, bound, memory, "train")
    update = (trained.values - start)[: context.sent]  # without the buffers, where updates do not carry them
    if adaptive_start is not None:
        new_memory["previous_model"] = trained.values.clone()
    return update, trained


def _fit(
    request: Request, algorithm: Algorithm, context: ClientContext, bound: Bound, memory: ClientMemory, purpose: str
) -> Trained:
    """Train the bound coordinates in place on this client's training rows; return loss, steps and what training left.

    `purpose` ("train", "private", "personal", "finetune") names the random streams, with round and client. The learning
    rate is the request's.
    """
    place = (purpose, request.round, request.client)
    learning_rate = float(request.settings["lr"])
    local = algorithm.local.of(request.client)
    head_learning_rate = request.settings.get("head_lr")
    if head_learning_rate is not None:
        local = replace(local, head_lr=float(head_learning_rate))
    training_rows = context.rows(request.client)
    if algorithm.client_state.aside:
        training_rows, _ = split_aside(training_rows, algorithm.client_state.aside, context.seed, request.client)
    progress = None
    if context.progress is not None:
        progress = context.progress(purpose)
    records = None
    if algorithm.privacy.records is not None:
        model = hashlib.sha256(fetch(bound.values).numpy().tobytes()).hexdigest()
        where = "\x1f".join(map(str, (request.run, model, *place)))
        records = algorithm.privacy.records.training(len(training_rows), local, where, context.seed, context.noise_key)
    return train(
        context.network,
        bound,
        context.examples,
        training_rows,
        local,
        lambda step: learning_rate,
        torch_stream(context.seed, "shuffle", *place),
        torch_stream(context.seed, "augment", *place),
        algorithm.loss,
        request.auxiliary,
        memory,
        _optimizer_state(algorithm, memory),
        context.class_counts,
        progress,
        records,
    )


def _optimizer_state(algorithm: Algorithm, memory: ClientMemory) -> dict[str, Tensor] | None:
    """Return a copy of the last round's optimizer state, where clients keep it; steps change it in place."""
    if not algorithm.client_state.optimizer:
        return None
    state = {}
    for name, tensor in memory.items():
        if name.startswith("optimizer/"):
            state[name.removeprefix("optimizer/")] = tensor.clone()
    return state


def choose_cluster_model(
    request: Request, algorithm: Algorithm, context: ClientContext
) -> tuple[Request, dict[str, float]]:
    """Return the request with the cluster model of least loss on this client's images, and {"cluster": its number}.

    Without clusters the request is returned as it is, with {}. Measuring leaves the last cluster's model in the
    network. Before the first round the models are equal and the
    request carries none; the number is drawn at random then, because clusters have to begin somewhere.
    """
    if not isinstance(algorithm.aggregate, Clusters):
        return request, {}
    if "clusters" not in request.auxiliary:
        generator = torch_stream(context.seed, "cluster", request.client)
        clusters = algorithm.aggregate.reports["cluster"] + 1
        drawn = torch.rand(1, generator=generator).item() * clusters
        return request, {"cluster": float(int(drawn))}
    rows = context.rows(request.client)
    mean_model = model_vector(request)
    offsets = request.auxiliary["clusters"]
    losses = []
    for offset in offsets:
        context.load_model(mean_model + offset)
        losses.append(evaluate(context.network, context.examples, rows).loss)
    best = min(range(len(losses)), key=lambda cluster: (math.isnan(losses[cluster]), losses[cluster]))
    other_tensors = {name: t for name, t in request.auxiliary.items() if name != "clusters"}
    chosen = replace(request, vector=mean_model + offsets[best], auxiliary=other_tensors)
    return chosen, {"cluster": float(best)}


def _learn_adaptive_start(
    request: Request, rule: AdaptiveStart, context: ClientContext, bound: Bound, memory: ClientMemory
) -> dict[str, Tensor]:
    """FedALA: return {"keep": by coordinate how much of its last model this client keeps}; {} in its first round.

    Only the last `rule.blocks` blocks and the head are learned. `bound` holds the common model, at the end again.
    `memory` is only read: the caller stores the result.
    """
    if "previous_model" not in memory:
        return {}
    network = context.network
    learnable = torch.zeros(bound.trained, dtype=torch.bool)
    for part, begin, end in context.space.trained_ranges:
        learnable[begin:end] = network.block_of(part.name) >= network.depth - rule.blocks
    generator = torch_stream(context.seed, "adaptive_start", request.round, request.client)
    rows = context.rows(request.client)
    learnable = Device(bound.values.device).put(learnable)
    return {"keep": rule.learn(network, bound, learnable, context.examples, rows, memory, generator)}


def _train_active_coordinates(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Tensor, Trained]:
    """Train only the coordinates marked in the request's bit mask `active`; return their update and the outcome.

    The network's weights and the cached binding are replaced, `memory` is only read.
    """
    active = unpack_bits(request.auxiliary["active"], context.space.trained)
    context.forget_binding()
    context.space.scatter(model_vector(request), context.network)
    bound = context.bind(context.space.restrict(active))
    start = model_vector(request)[: context.space.trained][active]
    trained = _fit(request, algorithm, context, bound, memory, "train")
    return trained.values - start, trained


def _train_with_private_part(
    request: Request, algorithm: Algorithm, context: ClientContext, new_memory: dict[str, Tensor]
) -> tuple[Tensor, Trained]:
    """Train the shared and the private part together (FedPer), or the private part first (FedRep).

    Return the values of the shared part after training, not their change, and the outcome. The private values are
    stored in `new_memory["private"]`, in place; both parts of the network keep their trained values.
    """
    assert context.private is not None
    context.space.scatter(model_vector(request), context.network)
    private_values = new_memory.get("private", context.private_start)
    assert private_values is not None
    context.private.scatter(private_values, context.network)
    if algorithm.client_state.alternate:
        bound = context.bind(context.private)
        bound.load(private_values)
        own = _fit(request, algorithm, context, bound, _loss_scale_of(new_memory), "private")
        new_memory["private"] = own.values.clone()
        bound = context.bind(context.space)
        bound.load(model_vector(request))
        trained = _fit(request, algorithm, context, bound, new_memory, "train")
        return trained.values, trained
    parts = (*context.space.parts, *context.private.parts)
    buffers = (*context.space.buffers, *context.private.buffers)
    joint_space = EditSpace(parts, buffers)
    values = joint_space.gather(context.network)
    bound = context.bind(joint_space)
    bound.load(values)
    trained = _fit(request, algorithm, context, bound, new_memory, "train")
    new_memory["private"] = context.private.gather(context.network)
    return context.space.gather(context.network), trained


def _train_second_model(request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> Tensor:
    """Ditto: return the client's personal model after training it with a pull towards the common one.

    It stays in the network. `memory` is only read: the caller stores the result.
    """
    common = model_vector(request)
    bound = context.bind(context.space)
    bound.load(memory.get("personal", common))
    pull = algorithm.client_state.second_model or 0.0
    local = replace(algorithm.local, correction=proximal_to(common[: bound.trained], pull))
    trained = _fit(request, replace(algorithm, local=local), context, bound, _loss_scale_of(memory), "personal")
    return trained.values.clone()


def _loss_scale_of(memory: ClientMemory) -> ClientMemory:
    """Return of a client's memory only the loss scale: for training that must not see the rest."""
    return {name: tensor for name, tensor in memory.items() if name == LOSS_SCALE}


def proximal_to(anchor: Tensor, pull: float) -> Correction:
    """Return the proximal correction that pulls towards `anchor` (trained,) instead of the starting point."""
    correction = proximal(pull)
    return replace(correction, prepare=lambda start, auxiliary, memory: {"start": anchor})


def evaluate_finetuned(
    request: Request, algorithm: Algorithm, context: ClientContext, rows: Tensor
) -> tuple[Evaluation, dict[str, Tensor]]:
    """Fine-tune the network's present weights on the client's training data and measure them on its test images.

    Return the evaluation and the sums of `metrics.scores`. `rows` are the client's test rows; epochs, rate, batch size
    and part (head, body or both) are settings of the request. Every weight is put back bit for bit.
    """
    network = context.network
    is_finetuned = {
        "head": lambda name: network.block_of(name) > network.depth,
        "body": lambda name: network.block_of(name) <= network.depth,
        "both": lambda name: True,
    }
    part = str(request.settings.get("finetune_part", "both"))
    space = select(network, is_finetuned[part])
    values_before = space.gather(network)
    bound = context.bind(space)
    epochs = int(request.settings["finetune_epochs"])
    batch_size = int(request.settings.get("finetune_batch", 50))
    learning_rate = request.settings.get("finetune_lr", 1e-3)
    finetuning = Algorithm("finetune", loss=algorithm.loss, local=LocalTraining(epochs=epochs, batch_size=batch_size))
    request = replace(request, settings={**request.settings, "lr": learning_rate}, auxiliary={})
    _fit(request, finetuning, context, bound, {}, "finetune")
    assert context.tests is not None
    measured = evaluate_with_sums(network, context.tests, rows, scores=bool(request.settings.get("scores")))
    space.scatter(values_before, network)
    return measured
