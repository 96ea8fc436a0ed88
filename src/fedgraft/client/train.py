"""How a client trains: the shared part, with a private part, a second model of its own, or only some coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext, ClientMemory, vector_of
from fedgraft.client.observe import OBSERVATIONS
from fedgraft.core.messages import Request, unpack_bits
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import Bound, EditSpace, select
from fedgraft.local.adaptive_start import AdaptiveStart
from fedgraft.local.corrections import Correction, proximal
from fedgraft.local.self_weight import parted
from fedgraft.local.train import LocalTraining, Trained, train
from fedgraft.local.update_links import Sending, run_chain
from fedgraft.metrics.evaluate import Evaluation, counted, evaluate


def _fit(
    request: Request, algorithm: Algorithm, context: ClientContext, bound: Bound, memory: ClientMemory, purpose: str
) -> Trained:
    """Train what is bound on this client's rows, with generators that belong to (round, client, purpose)."""
    where = (purpose, request.round, request.client)
    lr, head = float(request.settings["lr"]), request.settings.get("head_lr")
    rule = algorithm.local.of(request.client)
    rule = rule if head is None else replace(rule, head_lr=float(head))
    rows, _ = parted(context.rows(request.client), algorithm.client_state.aside, context.seed, request.client)
    return train(
        context.network,
        bound,
        context.examples,
        rows,
        rule,
        lambda step: lr,
        torch_stream(context.seed, "shuffle", *where),
        torch_stream(context.seed, "augment", *where),
        algorithm.loss,
        request.auxiliary,
        memory,
        _optimizer_state(algorithm, memory),
        context.class_counts,
    )


def _optimizer_state(algorithm: Algorithm, memory: ClientMemory) -> dict[str, Tensor] | None:
    """The optimizer's state of the round before, where clients keep it; a copy, because steps change it in place."""
    if not algorithm.client_state.optimizer:
        return None
    return {n.removeprefix("optimizer/"): t.clone() for n, t in memory.items() if n.startswith("optimizer/")}


@dataclass(frozen=True)
class Outcome:
    """What local training gives, before it is encoded in one way or the other."""

    update: Tensor
    result: Trained
    scalars: Mapping[str, float]
    evidence: Mapping[str, Tensor]
    memory: dict[str, Tensor]


def outcome(request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> Outcome:
    """Train locally from the order's vector and make the observations that were asked for."""
    request, choice = with_chosen_model(request, algorithm, context)
    start = vector_of(request)
    kept = dict(memory)
    if context.private is not None:
        values, result = _train_with_private_part(request, algorithm, context, kept)
        update = values - start
    elif "active" in request.auxiliary:
        update, result = _train_active(request, algorithm, context, memory)
    else:
        bound = context.bind(context.space)
        bound.load(start)
        if algorithm.client_state.start is not None:
            kept |= _adapt(request, algorithm.client_state.start, context, bound, memory)
            bound.load(algorithm.client_state.start.blend(start, kept))
        result = _fit(request, algorithm, context, bound, memory, "train")
        update = (bound.values.cpu() - start)[: context.sent]
        kept |= {"previous_model": bound.values.clone().cpu()} if algorithm.client_state.start is not None else {}
    kept |= result.closing.memory
    if algorithm.client_state.optimizer:
        kept |= {f"optimizer/{name}": tensor.cpu() for name, tensor in result.state.items()}
    scalars: dict[str, float] = {}
    evidence: dict[str, Tensor] = {}
    for wanted in algorithm.wants:
        numbers, tensors = OBSERVATIONS[wanted.name](wanted, request, context)
        scalars |= numbers
        evidence |= tensors
    if algorithm.client_state.second_model is not None:
        kept["personal"] = _train_personal(request, algorithm, context, memory)
    sending = Sending(result.effective_steps, request.settings, context.space.trained)
    update, reported = run_chain(algorithm.update, update, sending)
    return Outcome(update, result, scalars | choice | reported, evidence, kept)


def with_chosen_model(
    request: Request, algorithm: Algorithm, context: ClientContext
) -> tuple[Request, dict[str, float]]:
    """Where there are several common models: the order with the one that fits this client's images best, and which.

    While all are still equal, the choice is drawn: clusters have to begin somewhere.
    """
    if not algorithm.aggregate.several:
        return request, {}
    if "clusters" not in request.auxiliary:
        stream = torch_stream(context.seed, "cluster", request.client)
        draw = torch.rand(1, generator=stream).item() * (algorithm.aggregate.reports["cluster"] + 1)
        return request, {"cluster": float(int(draw))}
    rows, vector, losses = context.rows(request.client), vector_of(request), []
    for offset in request.auxiliary["clusters"]:
        context.show(vector + offset)
        losses.append(evaluate(context.network, context.examples, rows).loss)
    best = min(range(len(losses)), key=lambda c: (math.isnan(losses[c]), losses[c]))
    rest = {name: t for name, t in request.auxiliary.items() if name != "clusters"}
    return replace(request, vector=vector + request.auxiliary["clusters"][best], auxiliary=rest), {
        "cluster": float(best)
    }


def _adapt(
    request: Request, rule: AdaptiveStart, context: ClientContext, bound: Bound, memory: ClientMemory
) -> dict[str, Tensor]:
    """FedALA: how much of its last model this client keeps, coordinate by coordinate; nothing in its first round."""
    if "previous_model" not in memory:
        return {}
    network, where = context.network, torch.zeros(bound.trained, dtype=torch.bool)
    for part, begin, end in context.space.ranges[: len(context.space.parts)]:
        where[begin:end] = network.block_of(part.name) >= network.depth - rule.blocks
    stream = torch_stream(context.seed, "adaptive_start", request.round, request.client)
    rows = context.rows(request.client)
    keep = rule.learned(network, bound, where.to(bound.values.device), context.examples, rows, memory, stream)
    return {"keep": keep}


def _train_active(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Tensor, Trained]:
    """Train only the coordinates that the order marks as active; the update covers just these."""
    active = unpack_bits(request.auxiliary["active"], context.space.trained)
    context.release()
    context.space.scatter(vector_of(request), context.network)
    bound = context.bind(context.space.restrict(active))
    start = bound.values.clone()
    result = _fit(request, algorithm, context, bound, memory, "train")
    return (bound.values - start).cpu(), result


def _train_with_private_part(
    request: Request, algorithm: Algorithm, context: ClientContext, kept: dict[str, Tensor]
) -> tuple[Tensor, Trained]:
    """FedPer trains the shared and the private part together; FedRep the private part first, then the shared one."""
    assert context.private is not None
    context.space.scatter(vector_of(request), context.network)
    own = kept.get("private", context.private_start)
    assert own is not None
    context.private.scatter(own, context.network)
    if algorithm.client_state.alternate:
        bound = context.bind(context.private)
        bound.load(own)
        _fit(request, algorithm, context, bound, {}, "private")
        kept["private"] = bound.values.clone().cpu()
        bound = context.bind(context.space)
        bound.load(vector_of(request))
        result = _fit(request, algorithm, context, bound, kept, "train")
        return bound.values.cpu(), result
    joint = EditSpace(
        (*context.space.parts, *context.private.parts), (*context.space.buffers, *context.private.buffers)
    )
    values = joint.gather(context.network)
    bound = context.bind(joint)
    bound.load(values)
    result = _fit(request, algorithm, context, bound, kept, "train")
    kept["private"] = context.private.gather(context.network)
    return context.space.gather(context.network), result


def _train_personal(request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> Tensor:
    """Ditto: a second model of one's own, pulled towards the common one with strength λ."""
    common = vector_of(request)
    bound = context.bind(context.space)
    bound.load(memory.get("personal", common))
    rule = replace(
        algorithm.local, correction=proximal_to(common[: bound.trained], algorithm.client_state.second_model or 0.0)
    )
    _fit(request, replace(algorithm, local=rule), context, bound, {}, "personal")
    return bound.values.clone().cpu()


def proximal_to(anchor: Tensor, pull: float) -> Correction:
    """The proximal correction with a given anchor instead of the starting point."""
    correction = proximal(pull)
    return replace(correction, prepare=lambda start, auxiliary, memory: {"start": anchor})


def finetuned(
    request: Request, algorithm: Algorithm, context: ClientContext, rows: Tensor
) -> tuple[Evaluation, dict[str, Tensor]]:
    """Fine-tune a copy of the present model on the client's data, measure, and put everything back bit for bit."""
    part = str(request.settings.get("finetune_part", "both"))
    network = context.network
    wanted = {
        "head": lambda name: network.block_of(name) > network.depth,
        "body": lambda name: network.block_of(name) <= network.depth,
        "both": lambda name: True,
    }
    space = select(network, wanted[part])
    saved = space.gather(network)
    bound = context.bind(space)
    epochs, batch = int(request.settings["finetune_epochs"]), int(request.settings.get("finetune_batch", 50))
    plain = Algorithm("finetune", loss=algorithm.loss, local=LocalTraining(epochs=epochs, batch_size=batch))
    request = replace(
        request, settings={**request.settings, "lr": request.settings.get("finetune_lr", 1e-3)}, auxiliary={}
    )
    _fit(request, plain, context, bound, {}, "finetune")
    assert context.tests is not None
    result = counted(network, context.tests, rows, scores=bool(request.settings.get("scores")))
    space.scatter(saved, network)
    return result
