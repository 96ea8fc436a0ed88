"""One thing that a server may ask of a client, described in one object.

An `Action` holds everything there is to know about a request of its name: which fields the request carries, what the
client computes, how the answer is laid out as a secure sum, which answers cannot be true, what an owner's policy needs
to know, and what a progress display calls it. The client's dispatch, the authorization of requests, the server's
validation, the node and the progress display all read it from here; there is no second table of actions.

To add an action, put a file into `client/actions/` that defines an `Action` and lists it in `ACTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext, empty_response
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Network
from fedgraft.privacy.secagg.ring import Segment, Summand, segments_of


class RunPhase(StrEnum):
    """The part of a run in which an action is requested; it decides which network and data a client works on."""

    HEAD = "head"
    """Before the first round: a head is made on the untouched backbone."""
    CALIBRATION = "calibration"
    """Before the first round: what trains is chosen by scores or gradients."""
    TRAINING = "training"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class SumScope:
    """What server and client both know of a secure sum; each derives the sum's layout (`Action.layout`) from it."""

    settings: Mapping[str, Scalar]
    """The settings of the request."""
    network: Network | None = None
    algorithm: Algorithm | None = None
    length: int = 0
    """Coordinates of a training update."""
    trained: int = 0
    """Coordinates that train; the others of an update are buffers."""


Work = Callable[[Request, Algorithm, ClientContext, ClientMemory], tuple[Response, ClientMemory]]
Summed = Callable[[Request, Algorithm, ClientContext, ClientMemory], tuple[Mapping[str, Tensor], ClientMemory]]
Layout = Callable[[SumScope], tuple[Segment, ...]]
ModelField = Literal["none", "edit_space", "all_weights"]


def _no_tensors(network: Network) -> Mapping[str, tuple[int, ...]]:
    return {}


def _no_summands(network: Network, settings: Mapping[str, Scalar]) -> Mapping[str, Summand]:
    return {}


def _nothing_implausible(response: Response) -> str:
    return ""


def _training_rows(request: Request) -> str:
    return "train"


def _no_canonical_form(request: Request, context: ClientContext) -> Mapping[str, Scalar]:
    """Return the settings as they are, without `sums`: requests with different settings ask different questions."""
    return {name: value for name, value in request.settings.items() if name != "sums"}


def _nothing_further(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Accept every request whose declared fields are right."""


@dataclass(frozen=True)
class Action:
    """One kind of request that a server may send: its fields, the client's work, its layout as a secure sum, its label.

    The files of `client/actions/` make the instances; clients and servers read them and never change them.
    """

    name: str
    phase: RunPhase
    progress_label: str
    work: Work
    """Carry the request out in the clear: return the response and the client's new memory."""

    # Fields of the request.
    settings: Mapping[str, type] = field(default_factory=dict)
    """Settings that a request must carry, with their types."""
    model: ModelField = "none"
    """The vector that a request must carry: none, the edit space's values, or all weights of the network."""
    tensors: Callable[[Network], Mapping[str, tuple[int, ...]]] = _no_tensors
    """Further tensors that a request must carry, with their shapes."""
    tensor_names: tuple[str, ...] = ()
    """Names of further tensors whose shape follows from the request; `validate` looks at it."""
    validate: Callable[[Request, Algorithm, ClientContext], None] = _nothing_further
    """Raise `Refused` for what the declarations above cannot say."""

    # The answer as a sum.
    summands: Callable[[Network, Mapping[str, Scalar]], Mapping[str, Summand]] = _no_summands
    """Named sums of an answer in the clear."""
    layout: Layout | None = None
    """Segments of the secure sum; None: the answer cannot be hidden in a sum."""
    summed: Summed | None = None
    """What the client adds to the secure sum, and its new memory."""
    implausible: Callable[[Response], str] = _nothing_implausible
    """Return a sentence on what cannot be true of a response in the clear, or "" for a plausible one."""

    # What a policy needs to know.
    shown_alone: bool = False
    """The answer is given in the clear even where secure aggregation is on, because an honest run needs it so."""
    split: Callable[[Request], str] = _training_rows
    """Return which rows an answer is about: "train", "validation" or "test"."""
    splits: tuple[str, ...] = ("validation", "test")
    """What the setting `split` of a request may be, where it carries one."""
    canonical: Callable[[Request, ClientContext], Mapping[str, Scalar]] = _no_canonical_form
    """Return the settings in canonical form: requests with the same answer have the same.

    The ledger of the data (`DataLedger`) counts questions by it, so that nothing is asked again under another number.
    """
    images: Callable[[Request, ClientContext], int] | None = None
    """Count the images that an answer is about, where an owner may ask for a smallest number."""

    @property
    def in_rounds(self) -> bool:
        """Whether the action belongs to the rounds; all others are asked before or between them."""
        return self.phase is RunPhase.TRAINING


def sum_action(
    name: str,
    compute: Callable[[Request, ClientContext], dict[str, Tensor]],
    summands: Callable[[Network, Mapping[str, Scalar]], Mapping[str, Summand]],
    *,
    phase: RunPhase,
    progress_label: str,
    settings: Mapping[str, type] | None = None,
    model: ModelField = "none",
    tensors: Callable[[Network], Mapping[str, tuple[int, ...]]] = _no_tensors,
    validate: Callable[[Request, Algorithm, ClientContext], None] = _nothing_further,
    implausible: Callable[[Response], str] = _nothing_implausible,
    split: Callable[[Request], str] = _training_rows,
    canonical: Callable[[Request, ClientContext], Mapping[str, Scalar]] = _no_canonical_form,
) -> Action:
    """Return an action whose response is `compute`'s named sums, in the clear or inside a secure sum.

    Args:
        name: the action's name in requests.
        compute: the client's work: returns the named tensors that the server adds up over the clients. It changes no
            client memory.
        summands: returns shape, dtype and range of each of those tensors, from the network and the request's settings.

    The other arguments are the fields of `Action` of the same name.
    """

    def work(
        request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
    ) -> tuple[Response, ClientMemory]:
        """Return the response with the sums in the clear, and the client's memory as it was."""
        response = replace(empty_response(request, context), sums=compute(request, context))
        return response, memory

    def summed(
        request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
    ) -> tuple[Mapping[str, Tensor], ClientMemory]:
        return compute(request, context), memory

    def layout(scope: SumScope) -> tuple[Segment, ...]:
        assert scope.network is not None
        return segments_of(summands(scope.network, scope.settings))

    return Action(
        name,
        phase,
        progress_label,
        work,
        settings=settings or {},
        model=model,
        tensors=tensors,
        validate=validate,
        summands=summands,
        layout=layout,
        summed=summed,
        implausible=implausible,
        split=split,
        canonical=canonical,
    )
