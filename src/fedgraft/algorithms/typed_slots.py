"""Slots as people type them: names and tables become the objects they stand for; other things are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from fedgraft.aggregate.buffering import Rounds
from fedgraft.aggregate.clusters import Clusters
from fedgraft.aggregate.codecs import Codec, codec
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.server_rules import ServerRule
from fedgraft.aggregate.slots import Aggregator, Mixing, Weighting, by_examples, uniform
from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import AGGREGATORS, LOSSES, TRAINABLES
from fedgraft.edit import low_rank, sparse  # noqa: F401 - each writes its kind into TRAINABLES
from fedgraft.edit.trainable import Trainable
from fedgraft.local.losses import Loss
from fedgraft.local.train import LocalTraining
from fedgraft.local.update_links import UpdateLink
from fedgraft.privacy.protection import Privacy


class Slots(TypedDict, total=False):
    """The slots that every algorithm takes by name; see `Algorithm` for what each is."""

    trainable: Trainable | str | None
    loss: Loss | str | None
    local: LocalTraining | Mapping[str, Any] | None
    update: tuple[UpdateLink, ...] | None
    compression: Codec | str | None
    weighting: Weighting | str | None
    aggregate: Aggregator | Mixing | Clusters | str | None
    server: ServerRule | None
    client_state: Any
    privacy: Privacy | None
    rounds: Rounds | None
    fixed_head: bool | None
    download: float | None
    own_kind: bool | None
    closed_form: str | None


SLOTS_HELP = """
Slots, each by its name (`fg.Algorithm` describes all of them):
    trainable: what trains: "head", "body", "everything", "sparse", "lora", or fg.last_blocks(2), fg.sparse(...)
    local: local training: fg.LocalTraining(steps=8, lr=0.01), or a table of its options
    loss: fg.cross_entropy(label_smoothing=0.1), or the name of a loss
    weighting: "examples", "uniform", or a Weighting
    aggregate: the name of a robust rule ("median"), or fg.robust_aggregator("trimmed_mean", attackers=2)
    compression: "values", "half", "int8", "top_k:0.01"
    server: the server's rule
    rounds: fg.buffered(...), else synchronous rounds
    privacy: see fg.secure(algorithm) and fg.private(algorithm, ...)
"""
"""What `help` says of the slots, under the sentence of each algorithm."""

WEIGHTINGS: Mapping[str, Callable[[], Weighting]] = {"examples": by_examples, "uniform": uniform}
"""Weightings by the names that a config has for them."""


def typed_trainable(value: Any) -> Trainable:
    """Return the trainable kind, built with its defaults if it is a name such as "head"."""
    if isinstance(value, str):
        made: Trainable = TRAINABLES.build(value, {})
        return made
    if not isinstance(value, type) and hasattr(value, "kind") and hasattr(value, "open"):
        kind: Trainable = value
        return kind
    raise wrong_slot("trainable", value, "'head', 'sparse' or another name, or fg.last_blocks(2), fg.lora(rank=8)")


def typed_local(value: Any) -> LocalTraining:
    """Return the local training, built if it is a table such as {"steps": 8}."""
    if isinstance(value, Mapping):
        return LocalTraining(**value)
    return _instance("local", value, LocalTraining, "fg.LocalTraining(steps=8) or {'steps': 8}")


def typed_loss(value: Any) -> Loss:
    """Return the loss, built with its defaults if it is a name."""
    if isinstance(value, str):
        made: Loss = LOSSES.build(value, {})
        return made
    return _instance("loss", value, Loss, "fg.cross_entropy(label_smoothing=0.1) or the name of a loss")


def typed_weighting(value: Any) -> Weighting:
    """Return the weighting; "examples" and "uniform" are names of two."""
    if isinstance(value, str) and value in WEIGHTINGS:
        return WEIGHTINGS[value]()
    return _instance("weighting", value, Weighting, "fg.by_examples(), fg.uniform(), 'examples' or 'uniform'")


def typed_compression(value: Any) -> Codec:
    """Return the codec, which may be named: values, half, int8, top_k:0.01."""
    if isinstance(value, str):
        return codec(value)
    if not hasattr(value, "encode"):
        raise wrong_slot("compression", value, "'values', 'half', 'int8' or 'top_k:0.01'")
    coded: Codec = value
    return coded


def typed_aggregate(value: Any) -> Aggregator | Mixing | Clusters:
    """Return the aggregation, which may be a robust rule's name."""
    if isinstance(value, str):
        return robust_aggregator(value)
    if not hasattr(value, "advance"):
        raise wrong_slot("aggregate", value, f"fg.robust_aggregator(...) or one of {', '.join(AGGREGATORS)}")
    aggregate: Aggregator | Mixing | Clusters = value
    return aggregate


def _instance(slot: str, value: Any, kind: type, example: str) -> Any:
    """Return the value if it is of this class; refuse it with an example of what the slot takes."""
    if isinstance(value, kind):
        return value
    raise wrong_slot(slot, value, example)


def wrong_slot(slot: str, value: Any, example: str) -> FedgraftError:
    """Return the error about a value that a slot does not take; `example` says what it takes."""
    what = f"a {type(value).__name__}"
    if isinstance(value, str):
        what = repr(value)
    elif callable(value) and hasattr(value, "__name__"):
        what = f"the function {value.__name__} itself, without ()"
    return FedgraftError(
        "E-ALGORITHM-SLOT-TYPE", f"the slot {slot!r} does not take {what}", f"give {example}", slot=slot
    )


TYPED: Mapping[str, Callable[[Any], Any]] = {
    "trainable": typed_trainable,
    "local": typed_local,
    "loss": typed_loss,
    "weighting": typed_weighting,
    "compression": typed_compression,
    "aggregate": typed_aggregate,
}
"""For each slot that may be named, the function that makes what it holds."""
