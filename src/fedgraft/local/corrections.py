"""Local corrections: terms that a client adds to its gradient to reduce client drift.

FedProx (Li et al. 2020), SCAFFOLD (Karimireddy et al. 2020) and FedDyn (Acar et al. 2021). All act on the flat vector
of active coordinates. A correction is three functions: `prepare` before the first step, `adjust` on each gradient (in
place), `finish` after the last step, which returns the vectors that the client stores and the auxiliary vectors that it
sends (they are summed without weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedgraft.core.capabilities import NOTHING, Capabilities, Capability

Vectors = Mapping[str, Tensor]

REMEMBERS: Capabilities = frozenset(
    {Capability.FIXED_COORDINATES, Capability.STABLE_MODEL, Capability.SEPARATE_CLIENTS, Capability.SAME_START}
)
"""What a correction requires that stores a vector from round to round, whose counterpart moves with every step."""
KNOWN_STEPS: Capabilities = frozenset({Capability.KNOWN_DISPLACEMENT, Capability.ONE_RATE, Capability.SEPARATE_CLIENTS})
"""What a correction requires that divides by the number of effective steps."""


@dataclass(frozen=True)
class Closing:
    """The result of a correction after the last step: new entries of the client's memory, and vectors to send."""

    memory: Vectors = field(default_factory=dict)
    sums: Vectors = field(default_factory=dict)


@dataclass(frozen=True)
class Correction:
    """`prepare(start, auxiliary, memory) -> context`, `adjust(gradient, values, context)`, `finish(...) -> Closing`."""

    name: str
    prepare: Callable[[Tensor, Vectors, Vectors], dict[str, Tensor]]
    adjust: Callable[[Tensor, Tensor, Vectors], None]
    finish: Callable[[Tensor, Vectors, float], Closing]
    """`finish(values, context, effective_steps)`; effective_steps is Σ of learning rates times the optimizer's gain."""
    sends: tuple[str, ...] = ()
    """Names of the auxiliary vectors in the response, each of the trained length."""
    receives: tuple[str, ...] = ()
    """Names of the auxiliary vectors that the request must carry."""
    needs: Capabilities = frozenset({Capability.SEPARATE_CLIENTS})
    """What it requires beyond that which follows from the other fields: `REMEMBERS` if it stores a vector from round
    to round, `KNOWN_STEPS` if it divides by `effective_steps`."""
    provides: ClassVar[Capabilities] = NOTHING

    @property
    def requires(self) -> Capabilities:
        """All capabilities that a run must have: `needs`, and what follows from auxiliary vectors."""
        required = self.needs
        if self.sends:
            required |= {Capability.AUXILIARY_SUMS}
        if self.receives:
            required |= {Capability.COMMON_MODEL, Capability.SAME_START}
        return required


def none() -> Correction:
    """Return the correction of plain local training, which changes nothing."""
    return Correction("none", lambda s, a, m: {}, lambda g, v, c: None, lambda v, c, r: Closing(), needs=NOTHING)


def proximal(mu: float) -> Correction:
    """Return FedProx: the loss gains μ/2·‖y−x‖², so the gradient gains μ(y−x)."""
    if mu == 0:
        return none()

    def adjust(gradient: Tensor, values: Tensor, context: Vectors) -> None:
        """Add μ(y−x) to the gradient, in place."""
        gradient.add_(values - context["start"], alpha=mu)

    needs = frozenset({Capability.GRADIENT_VECTORS})  # the same for the vectors of several clients, one below the other
    return Correction("proximal", lambda s, a, m: {"start": s}, adjust, lambda v, c, r: Closing(), needs=needs)


def control_variates() -> Correction:
    """Return SCAFFOLD (option II): g − c_k + c; afterwards c_k ← c_k − c + (x−y)/effective_steps."""

    def prepare(start: Tensor, auxiliary: Vectors, memory: Vectors) -> dict[str, Tensor]:
        """Return the start, the client's and the common control variate (zero at first), and their difference."""
        own = memory.get("control", torch.zeros_like(start))
        return {"start": start, "own": own, "common": auxiliary["control"], "shift": auxiliary["control"] - own}

    def adjust(gradient: Tensor, values: Tensor, context: Vectors) -> None:
        gradient.add_(context["shift"])

    def finish(values: Tensor, context: Vectors, effective_steps: float) -> Closing:
        """Return the client's new control variate for its memory, and its change to send."""
        own = context["own"] - context["common"] + (context["start"] - values) / effective_steps
        return Closing({"control": own}, {"control": own - context["own"]})

    needs = KNOWN_STEPS | REMEMBERS
    return Correction("control_variates", prepare, adjust, finish, ("control",), ("control",), needs)


def dynamic(alpha: float) -> Correction:
    """Return FedDyn: the loss gains −⟨g_k, y⟩ + α/2·‖y−x‖²; afterwards g_k ← g_k − α(y−x)."""

    def prepare(start: Tensor, auxiliary: Vectors, memory: Vectors) -> dict[str, Tensor]:
        """Return the start and the client's dual variable (zero at first)."""
        return {"start": start, "dual": memory.get("dual", torch.zeros_like(start))}

    def adjust(gradient: Tensor, values: Tensor, context: Vectors) -> None:
        gradient.sub_(context["dual"]).add_(values - context["start"], alpha=alpha)

    def finish(values: Tensor, context: Vectors, effective_steps: float) -> Closing:
        return Closing({"dual": context["dual"] - alpha * (values - context["start"])})

    return Correction("dynamic", prepare, adjust, finish, needs=REMEMBERS)
