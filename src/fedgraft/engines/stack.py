"""The heads of several clients trained as one: their weights side by side, one product for all."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgraft.local.optimizers import Optimizer


class Stack:
    """The heads of c clients as one flat vector, all weights (c, k, d), then all biases (c, k, 1); batches of b rows.

    A second vector of that shape takes the gradients. Where the optimizer is plain momentum it is the velocity itself:
    the product that makes the gradient adds it to the decayed velocity, so that no pass over memory is spent on it.
    """

    def __init__(
        self, values: Tensor, gradient: Tensor, shape: tuple[int, int, int, int], optimizer: Optimizer
    ) -> None:
        c, k, d, b = shape
        self.values, self.gradient, self.optimizer = values, gradient, optimizer
        self.weight, self.d_weight = (flat[: c * k * d].view(c, k, d) for flat in (values, gradient))
        self.bias, self.d_bias = (flat[c * k * d :].view(c, k, 1) for flat in (values, gradient))
        self.fused = optimizer.heavy_ball is not None
        self.decay = optimizer.heavy_ball or 0.0
        self.state = {} if self.fused else optimizer.init(values.numel())
        self.ones = values.new_ones(c, b, 1)
        if self.fused:
            gradient.zero_()

    def step(self, error: Tensor, inputs: Tensor, rate: float, scale: float) -> None:
        """One step along the gradients that these errors (c, k, b) at the logits mean, all of them times `scale`."""
        if self.fused:  # the velocity stands for 1 / scale times itself, which saves a pass over the errors
            torch.baddbmm(self.d_weight, error, inputs, beta=self.decay, out=self.d_weight)
            # A bias is the weight of an input that is always 1: one product instead of a sum and an addition.
            torch.baddbmm(self.d_bias, error, self.ones, beta=self.decay, out=self.d_bias)
            self.values.sub_(self.gradient, alpha=rate * scale)
        else:
            torch.baddbmm(self.d_weight, error, inputs, beta=0, alpha=scale, out=self.d_weight)  # beta 0 overwrites
            torch.sum(error, 2, keepdim=True, out=self.d_bias)
            self.d_bias.mul_(scale)
            self.optimizer.step(self.values, self.gradient, self.state, rate)
