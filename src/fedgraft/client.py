"""What a client does with an order: the same function in this process and on a node far away.

`handle` looks the order's action up in a table. It returns the reply and the client's new memory; nothing else
of the client survives the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedgraft.algorithm import Algorithm, Observe
from fedgraft.contracts import Examples, Network
from fedgraft.edit.fisher import ESTIMATORS, Scores
from fedgraft.edit.masks import Mask
from fedgraft.edit.space import Bound, EditSpace, select
from fedgraft.errors import FedgraftError
from fedgraft.local.corrections import proximal
from fedgraft.local.evaluate import evaluate
from fedgraft.local.train import LocalRule, Trained, train
from fedgraft.messages import Order, Reply, unpack_bits
from fedgraft.randomness import torch_stream
from fedgraft.weigh.similarity import svcca_basis, svcca_of_bases

Memory = Mapping[str, Tensor]


@dataclass
class Workplace:
    """What a machine offers its clients: one network to work with, the edit space, and the data by client."""

    network: Network
    space: EditSpace
    examples: Examples
    rows: Callable[[int], Tensor]
    """A client's training rows."""
    seed: int
    tests: Examples | None = None
    test_rows: Callable[[int], Tensor] | None = None
    """A client's own test rows, for personal evaluation."""
    private: EditSpace | None = None
    """Coordinates each client trains and keeps, such as its own head."""
    private_start: Tensor | None = None
    """Where those start for a client that has not trained yet."""
    probe: Examples | None = None
    """The same inputs on every client, row by row, for comparing representations."""
    choose_mask: Callable[[Callable[[int], Mapping[str, Tensor]]], Mask] | None = None
    """With masks of their own: from scores by round to the client's mask."""
    reference: tuple[object, list[Tensor]] | None = None
    """Bases of the round's starting model on the probe, kept because every client of a round needs the same."""
    sends_buffers: bool = True
    """Whether the tail of the vector (batch-norm statistics) is part of a change; base weights under LoRA are not."""
    _bound: dict[str, Bound] = field(default_factory=dict)
    _active: str = ""

    @property
    def sent(self) -> int:
        """Coordinates of a change."""
        return self.space.size if self.sends_buffers else self.space.trained

    def release(self) -> None:
        """Forget what is bound, because the network is about to be written from outside."""
        self._bound, self._active = {}, ""

    def bind(self, space: EditSpace) -> Bound:
        """The network driven by this space; kept, because binding again costs as much as the network."""
        if self._active != space.digest:
            self._bound = {space.digest: space.bind(self.network)}
            self._active = space.digest
        return self._bound[space.digest]


def handle(order: Order, algorithm: Algorithm, place: Workplace, memory: Memory) -> tuple[Reply, Memory]:
    """Carry out one order. Pure in (order, data, memory): the same input gives the same bytes anywhere."""
    action = ACTIONS.get(order.action)
    if action is None:
        raise FedgraftError(f"client {order.client} was asked for {order.action!r}; it knows {sorted(ACTIONS)}")
    give_stream(place.network, torch_stream(place.seed, "layers", order.action, order.round, order.client))
    return action(order, algorithm, place, memory)


def give_stream(network: Network, generator: torch.Generator) -> None:
    """Let every layer that draws at random (dropout) draw from this generator, never from the global one."""
    for module in network.modules():
        if hasattr(module, "generator"):
            module.generator = generator  # type: ignore[assignment]


def _answer(order: Order, place: Workplace) -> Reply:
    return Reply(order.run, order.round, order.client, order.space, len(place.rows(order.client)))


def _vector(order: Order) -> Tensor:
    if order.vector is None:
        raise FedgraftError(f"client {order.client}, round {order.round}: the order carries no model")
    return order.vector


def _fit(order: Order, place: Workplace, bound: Bound, rule: LocalRule, memory: Memory, purpose: str) -> Trained:
    """Train what is bound on this client's rows, with generators that belong to (round, client, purpose)."""
    where = (purpose, order.round, order.client)
    lr = float(order.settings["lr"])
    return train(
        place.network, bound, place.examples, place.rows(order.client), rule, lambda step: lr,
        torch_stream(place.seed, "shuffle", *where), torch_stream(place.seed, "augment", *where),
        order.auxiliary, memory,
    )  # fmt: skip


def _train(order: Order, algorithm: Algorithm, place: Workplace, memory: Memory) -> tuple[Reply, Memory]:
    """Train locally from the order's vector; answer with the change."""
    start = _vector(order)
    kept = dict(memory)
    if place.private is not None:
        values, result = _train_with_private_part(order, algorithm, place, kept)
        change = values - start
    elif "active" in order.auxiliary:
        change, result = _train_active(order, algorithm, place)
    else:
        bound = place.bind(place.space)
        bound.load(start)
        result = _fit(order, place, bound, algorithm.local, memory, "train")
        change = (bound.values - start)[: place.sent]
    kept |= result.closing.memory
    scalars: dict[str, float] = {}
    if algorithm.scaled_by_reach:
        change /= result.reach
        scalars["tau"] = result.reach
    evidence: dict[str, Tensor] = {}
    for wanted in algorithm.wants:
        numbers, tensors = OBSERVATIONS[wanted.name](wanted, order, place)
        scalars |= numbers
        evidence |= tensors
    if algorithm.keeps.kind == "model":
        kept["personal"] = _train_personal(order, algorithm, place, memory)
    stream = torch_stream(place.seed, "encode", order.round, order.client)
    reply = replace(
        _answer(order, place),
        change=algorithm.sends.encode(change, stream, kept),
        sums=result.closing.sums,
        scalars=scalars,
        evidence=evidence,
        metrics={"loss": result.loss, "steps": float(result.steps)},
    )
    return reply, kept


def _train_active(order: Order, algorithm: Algorithm, place: Workplace) -> tuple[Tensor, Trained]:
    """Train only the coordinates that the order marks as active; the change covers just these."""
    active = unpack_bits(order.auxiliary["active"], place.space.trained)
    place.release()
    place.space.scatter(_vector(order), place.network)
    bound = place.bind(place.space.restrict(active))
    start = bound.values.clone()
    result = _fit(order, place, bound, algorithm.local, {}, "train")
    return bound.values - start, result


def _train_with_private_part(
    order: Order, algorithm: Algorithm, place: Workplace, kept: dict[str, Tensor]
) -> tuple[Tensor, Trained]:
    """FedPer trains the shared and the private part together; FedRep the private part first, then the shared one."""
    assert place.private is not None
    place.space.scatter(_vector(order), place.network)
    own = kept.get("private", place.private_start)
    assert own is not None
    place.private.scatter(own, place.network)
    if algorithm.keeps.alternate:
        bound = place.bind(place.private)
        bound.load(own)
        _fit(order, place, bound, algorithm.local, {}, "private")
        kept["private"] = bound.values.clone()
        bound = place.bind(place.space)
        bound.load(_vector(order))
        result = _fit(order, place, bound, algorithm.local, kept, "train")
        return bound.values, result
    joint = EditSpace((*place.space.parts, *place.private.parts), (*place.space.buffers, *place.private.buffers))
    values = joint.gather(place.network)
    bound = place.bind(joint)
    bound.load(values)
    result = _fit(order, place, bound, algorithm.local, kept, "train")
    kept["private"] = place.private.gather(place.network)
    return place.space.gather(place.network), result


def _train_personal(order: Order, algorithm: Algorithm, place: Workplace, memory: Memory) -> Tensor:
    """Ditto: a second model of one's own, pulled towards the common one with strength λ."""
    common = _vector(order)
    bound = place.bind(place.space)
    bound.load(memory.get("personal", common))
    rule = replace(algorithm.local, correction=proximal_to(common[: bound.trained], algorithm.keeps.pull))
    _fit(order, place, bound, rule, {}, "personal")
    return bound.values.clone()


def proximal_to(anchor: Tensor, pull: float):  # type: ignore[no-untyped-def]
    """The proximal correction with a given anchor instead of the starting point."""
    correction = proximal(pull)
    return replace(correction, prepare=lambda start, auxiliary, memory: {"start": anchor})


def _evaluate(order: Order, algorithm: Algorithm, place: Workplace, memory: Memory) -> tuple[Reply, Memory]:
    """Measure the order's model, or the client's own, on the client's test rows, before and after fine-tuning."""
    if place.tests is None or place.test_rows is None:
        raise FedgraftError(f"client {order.client} has no test rows of its own to evaluate on")
    rows = place.test_rows(order.client)
    vector = memory.get("personal", _vector(order)) if algorithm.keeps.kind == "model" else _vector(order)
    place.space.scatter(vector, place.network)
    if place.private is not None:
        own = memory.get("private", place.private_start)
        assert own is not None
        place.private.scatter(own, place.network)
    before = evaluate(place.network, place.tests, rows)
    metrics = {"loss": before.loss, "accuracy": before.accuracy, "count": float(len(rows))}
    if order.settings.get("finetune_epochs"):
        after = _finetuned(order, place, rows)
        metrics |= {"finetuned_loss": after.loss, "finetuned_accuracy": after.accuracy}
    return replace(_answer(order, place), metrics=metrics), memory


def _finetuned(order: Order, place: Workplace, rows: Tensor):  # type: ignore[no-untyped-def]
    """Fine-tune a copy of the present model on the client's data, measure, and put everything back bit for bit."""
    part = str(order.settings.get("finetune_part", "both"))
    names = {
        "head": lambda n: n.startswith("head."),
        "body": lambda n: not n.startswith("head."),
        "both": lambda n: True,
    }
    space = select(place.network, names[part])
    saved = space.gather(place.network)
    bound = place.bind(space)
    rule = LocalRule(int(order.settings["finetune_epochs"]), "epochs", int(order.settings.get("finetune_batch", 50)))
    order = replace(order, settings={**order.settings, "lr": order.settings.get("finetune_lr", 1e-3)}, auxiliary={})
    _fit(order, place, bound, rule, {}, "finetune")
    assert place.tests is not None
    result = evaluate(place.network, place.tests, rows)
    space.scatter(saved, place.network)
    return result


def _statistics(order: Order, algorithm: Algorithm, place: Workplace, memory: Memory) -> tuple[Reply, Memory]:
    """Step 0: the sums a closed-form head needs (ZᵀZ, ZᵀY, counts). No image and no feature leaves."""
    rows = place.rows(order.client)
    network, width, classes = place.network, place.network.width, place.network.classes
    gram = torch.zeros(width + 1, width + 1, dtype=torch.float64)
    cross = torch.zeros(width + 1, classes, dtype=torch.float64)
    for z, labels in _features(place, rows):
        z = torch.cat([z.double(), torch.ones(len(z), 1, dtype=torch.float64)], 1)
        gram += z.T @ z
        cross.index_add_(1, labels, z.T)
    network.eval()
    return replace(_answer(order, place), sums={"gram": gram, "cross": cross}), memory


def _head_gradient(order: Order, algorithm: Algorithm, place: Workplace, memory: Memory) -> tuple[Reply, Memory]:
    """Step 0 by probe: the sum of loss and gradient of a linear head (classes, width+1) over this client's rows."""
    head = order.auxiliary["head"]
    gradient, loss = torch.zeros_like(head), torch.zeros(1, dtype=head.dtype)
    for z, labels in _features(place, place.rows(order.client)):
        z = torch.cat([z.to(head.dtype), torch.ones(len(z), 1, dtype=head.dtype)], 1)
        logits = z @ head.T
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        error = logits.softmax(1)
        error[torch.arange(len(labels)), labels] -= 1
        gradient += error.T @ z
    return replace(_answer(order, place), sums={"gradient": gradient, "loss": loss}), memory


@torch.inference_mode()
def _feature_batches(place: Workplace, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    place.network.eval()
    out = []
    for picked in rows.split(512):
        z = place.network.features(place.examples.batch(picked), place.examples.entry)
        out.append((z, place.examples.labels[picked]))
    return out


def _features(place: Workplace, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(z.clone(), y) for z, y in _feature_batches(place, rows)]


def _sensitivity(order: Order, algorithm: Algorithm, place: Workplace, memory: Memory) -> tuple[Reply, Memory]:
    """The sums of squared gradients over a share of this client's examples, for the order's weights."""
    scores = _scores(order, place)
    return replace(_answer(order, place), sums={"scores": scores.vector()}), memory


def _own_mask(order: Order, algorithm: Algorithm, place: Workplace, memory: Memory) -> tuple[Reply, Memory]:
    """A mask of the client's own, calibrated on its own examples; only its bits leave."""
    assert place.choose_mask is not None
    space = select(place.network, lambda name: True, buffers=False)
    before = space.gather(place.network)
    space.scatter(_vector(order), place.network)

    def score(round: int) -> Mapping[str, Tensor]:
        again = replace(order, vector=space.gather(place.network), settings={**order.settings, "draw": round})
        return _scores(again, place).mean()

    mask = place.choose_mask(score)
    space.scatter(before, place.network)
    return replace(_answer(order, place), evidence={"mask": mask.bits()}), memory


def _scores(order: Order, place: Workplace) -> Scores:
    """Score with the order's weights; the network gets its own back, bit for bit."""
    s = order.settings
    rows = place.rows(order.client)
    stream = torch_stream(place.seed, "sensitivity", str(s["draw"]), order.client)
    count = max(1, round(float(s["share"]) * len(rows)))
    picked = rows[torch.randperm(len(rows), generator=stream)[:count]].sort().values
    space = select(place.network, lambda name: True, buffers=False)
    before = space.gather(place.network)
    place.release()
    space.scatter(_vector(order), place.network)
    estimator, labels = str(s["estimator"]), str(s["labels"])
    batches = [
        (place.examples.batch(part), place.examples.labels[part], place.examples.entry)
        for part in picked.split(int(s["batch"]))
    ]
    found = ESTIMATORS[estimator](place.network, batches, labels, str(s["names"]).split("\n"), stream)
    space.scatter(before, place.network)
    return found


def _representation(wanted: Observe, order: Order, place: Workplace) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Pooled features of n of the client's own examples, after training."""
    rows = place.rows(order.client)
    stream = torch_stream(place.seed, "representation", order.round, order.client)
    n = int(wanted.options["samples"])
    picks = torch.cat([torch.randperm(len(rows), generator=stream) for _ in range(-(-n // len(rows)))])[:n]
    return {}, {"representation": torch.cat([z for z, _ in _features(place, rows[picks])])}


def _probe(place: Workplace) -> Examples:
    if place.probe is None:
        raise FedgraftError("comparing representations needs a probe: images that every client has, row by row")
    return place.probe


@torch.no_grad()
def hidden(network: Network, layers: tuple[str, ...], examples: Examples) -> list[Tensor]:
    """Outputs of these layers for all examples, tokens averaged, (n, d) each; `early`, `middle`, `late` by default."""
    usual = dict(zip(("early", "middle", "late"), network.default_probe_layers(), strict=False))
    names = [usual.get(layer, layer) for layer in layers]
    network.eval()
    parts = [
        network.activations(examples.batch(rows), names, examples.entry)
        for rows in torch.arange(len(examples)).split(256)
    ]
    return [torch.cat([part[name] for part in parts]) for name in names]


def _alignment(wanted: Observe, order: Order, place: Workplace) -> tuple[dict[str, float], dict[str, Tensor]]:
    """SVCCA of each layer after training with the same layer of the model the round began with; numbers only."""
    layers, keep, top = wanted.options["layers"], int(wanted.options["keep"]), int(wanted.options["top"])
    after = hidden(place.network, layers, _probe(place))
    key = (order.round, layers, keep)
    if place.reference is None or place.reference[0] != key:  # the same for every client of the round
        values = place.space.gather(place.network)
        place.space.scatter(_vector(order), place.network)
        before = [svcca_basis(x, keep) for x in hidden(place.network, layers, _probe(place))]
        place.space.scatter(values, place.network)
        place.reference = (key, before)
    scores = [
        svcca_of_bases(svcca_basis(x, keep), q, top).value for x, q in zip(after, place.reference[1], strict=True)
    ]
    return dict(zip(wanted.scalars, scores, strict=True)), {}


def _probe_representation(
    wanted: Observe, order: Order, place: Workplace
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Pooled features of the shared probe, after training."""
    probe = _probe(place)
    with torch.no_grad():
        place.network.eval()
        parts = [place.network.features(probe.batch(r), probe.entry) for r in torch.arange(len(probe)).split(256)]
    return {}, {"probe_representation": torch.cat(parts)}


def _labels(wanted: Observe, order: Order, place: Workplace) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The client's label histogram: an oracle that a private federation would not give away."""
    labels = place.examples.labels[place.rows(order.client)]
    return {}, {"labels": torch.bincount(labels, minlength=place.network.classes).float()}


OBSERVATIONS: dict[str, Callable[[Observe, Order, Workplace], tuple[dict[str, float], dict[str, Tensor]]]] = {
    "alignment": _alignment,
    "representation": _representation,
    "probe_representation": _probe_representation,
    "labels": _labels,
}

ACTIONS: dict[str, Callable[[Order, Algorithm, Workplace, Memory], tuple[Reply, Memory]]] = {
    "train": _train,
    "evaluate": _evaluate,
    "statistics": _statistics,
    "head_gradient": _head_gradient,
    "sensitivity": _sensitivity,
    "own_mask": _own_mask,
}
