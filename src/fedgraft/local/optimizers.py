"""Optimizers on the flat vector of active coordinates: SparseSGDM and SparseAdamW.

The vector contains trained coordinates only, so the state has the size of the edit, not of the network; decay,
momentum and clipping cannot reach a frozen coordinate because it is not there. On a dense space these are the usual
SGD with momentum and AdamW (Loshchilov and Hutter 2019), step for step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgraft.core.capabilities import NOTHING, Capabilities, Capability
from fedgraft.core.device import Device, fetch
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import NotNegative, Rest, in_range

OptimizerState = dict[str, Tensor]


@dataclass(frozen=True)
class Optimizer:
    """`init(size)` returns the initial state, `step(values, gradient, state, lr)` updates values and state in place."""

    name: str
    init: Callable[[int], OptimizerState]
    step: Callable[[Tensor, Tensor, OptimizerState, float], None]
    effective_steps: Callable[[int], float] | None = None
    """Displacement after n steps of a constant unit gradient at lr 1; None if it is not a fixed number."""
    heavy_ball: float | None = None
    """β if a step is v ← βv+g, θ ← θ−ηv and nothing else, which an engine may fold into its matrix products."""
    adaptive: bool = False
    """Each coordinate moves by about the learning rate, however small its gradient."""
    requires: Capabilities = frozenset({Capability.SEPARATE_CLIENTS})
    """Nothing if the vectors of several clients may be stepped as one long vector; `GRADIENT_VECTORS` if they may, but
    not by a product that computes the gradient at the same time."""
    host_state: frozenset[str] = frozenset({"steps"})
    """Entries of the state that the program reads at every step: they stay on the host, so that nobody waits."""
    instead: str = "local.optimizer='sgdm'"
    """The setting for an optimizer with a known displacement."""

    @property
    def provides(self) -> Capabilities:
        """`KNOWN_DISPLACEMENT` if `effective_steps` is a fixed number."""
        if self.effective_steps is None:
            return NOTHING
        return frozenset({Capability.KNOWN_DISPLACEMENT})


@in_range
def sgdm(
    momentum: Rest = 0.9,
    weight_decay: NotNegative = 0.0,
    nesterov: bool = False,
    dampening: Rest = 0.0,
    decoupled: bool = False,
) -> Optimizer:
    """Return SGD with momentum: g+λθ, v ← βv+(1−τ)g (first step v=g), θ ← θ−η(v or g+βv).

    Args:
        momentum: β, the share of the last velocity
        weight_decay: λ; also of adamw
        nesterov: look one step ahead
        dampening: τ, reduces the gradient in the velocity
        decoupled: decay the weights themselves instead of adding to the gradient
    """

    def init(size: int) -> OptimizerState:
        """Return a velocity of zeros; no state without momentum."""
        if not momentum:
            return {}
        return {"velocity": torch.zeros(size), "steps": torch.zeros(1, device="cpu")}

    def step(values: Tensor, gradient: Tensor, state: OptimizerState, lr: float) -> None:
        """Step the values and the state in place; the gradient may be changed too."""
        if weight_decay and decoupled:
            values.mul_(1 - lr * weight_decay)
        elif weight_decay:
            gradient.add_(values, alpha=weight_decay)
        if not momentum:
            values.sub_(gradient, alpha=lr)
            return
        velocity = state["velocity"]
        gain = 1.0
        if state["steps"].item():  # the first step is not dampened
            gain = 1 - dampening
        velocity.mul_(momentum).add_(gradient, alpha=gain)
        state["steps"] += 1
        if nesterov:
            values.sub_(gradient, alpha=lr)
            values.sub_(velocity, alpha=lr * momentum)
        else:
            values.sub_(velocity, alpha=lr)

    def effective_steps(steps: int) -> float:
        """Return the displacement after so many steps of a constant unit gradient at learning rate 1."""
        # Mass of the gradients' coefficients in the total displacement, from a zero buffer.
        gains = [(1 - momentum**i) / (1 - momentum) for i in range(1, steps + 2)]
        if nesterov:
            return sum(gains[1:])
        return sum(gains[:-1])

    displacement: Callable[[int], float] | None = effective_steps
    if dampening:
        displacement = None
    heavy_ball: float | None = momentum
    if weight_decay or nesterov or dampening:
        heavy_ball = None
    return Optimizer(
        "sgdm", init, step, displacement, heavy_ball, requires=NOTHING, instead="no dampening (local.dampening=0)"
    )


def adamw(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> Optimizer:
    """Return AdamW with decoupled decay; each coordinate moves by about lr, however small its gradient."""

    def init(size: int) -> OptimizerState:
        return {"first": torch.zeros(size), "second": torch.zeros(size), "steps": torch.zeros(1, device="cpu")}

    def step(values: Tensor, gradient: Tensor, state: OptimizerState, lr: float) -> None:
        """Step the values and the state in place."""
        state["steps"] += 1
        t = state["steps"].item()
        state["first"].lerp_(gradient, 1 - beta1)
        state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        values.mul_(1 - lr * weight_decay)
        denominator = (state["second"] / (1 - beta2**t)).sqrt_().add_(eps)
        values.addcdiv_(state["first"], denominator, value=-lr / (1 - beta1**t))

    return Optimizer("adamw", init, step, adaptive=True, requires=frozenset({Capability.GRADIENT_VECTORS}))


def state_on(optimizer: Optimizer, state: OptimizerState, device: Device) -> OptimizerState:
    """Return a state with its vectors on this device, and what the program reads on the host."""
    placed = {}
    for name, tensor in state.items():
        if name.rpartition("/")[2] in optimizer.host_state:
            placed[name] = fetch(tensor)
        else:
            placed[name] = device.put(tensor)
    return placed


def new_state(optimizer: Optimizer, size: int, device: Device) -> OptimizerState:
    """Return the initial state for so many values, made on this device."""
    with device.making():
        state = optimizer.init(size)
    return state_on(optimizer, state, device)


def clip_(gradient: Tensor, limit: float) -> Tensor:
    """Scale the gradient to at most `limit` in norm, in place; return the norm before, on the gradient's device."""
    norm = torch.linalg.vector_norm(gradient)
    if Device(gradient.device).is_host:
        if float(norm) > limit:
            gradient.mul_(limit / float(norm))
        return norm
    # On a device the decision is a number too, because reading the norm would be a wait in every step.
    wide = norm.to(Device(gradient.device).widest)
    gradient.mul_(torch.where(wide > limit, limit / wide, 1.0).to(gradient.dtype))
    return norm


def clip_each_(gradients: Tensor, limit: float) -> None:
    """Scale each client's gradient (c, n) to at most `limit` in norm, in place; nobody waits for the norms."""
    norms = torch.linalg.vector_norm(gradients, dim=1).to(Device(gradients.device).widest)
    factors = torch.where(norms > limit, limit / norms, 1.0)
    gradients.mul_(factors.to(gradients.dtype).unsqueeze(1))


def typed_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer, built with its defaults if it is a name or a function ("adamw", `adamw`)."""
    by_name: dict[str, Callable[[], Optimizer]] = {"sgdm": sgdm, "sgd": sgdm, "adamw": adamw}
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str) and optimizer.lower() in by_name:
        return by_name[optimizer.lower()]()
    for make in by_name.values():
        if optimizer is make:
            return make()
    raise FedgraftError(
        "E-LOCAL-OPTIMIZER",
        f"{getattr(optimizer, '__name__', optimizer)!r} is no optimizer of clients",
        "give 'sgdm', 'adamw', or an fedgraft.local.optimizers.Optimizer of your own",
    )
