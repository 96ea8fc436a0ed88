"""The linear heads of several clients as one stacked tensor, stepped with one batched product for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgraft.core.device import Device
from fedgraft.local.optimizers import Optimizer, new_state


class Stack:
    """The linear heads of c clients in one flat vector: all weights (c, k, d), then all biases (c, k, 1).

    `shape` is (c clients, k classes, d features, b rows of a batch). `gradient` is a second vector of the same length.
    With plain momentum it is the velocity itself: the product that computes the gradient adds it to the decayed
    velocity, which saves a pass over memory. Both vectors are the caller's and are changed in place.
    """

    def __init__(
        self, values: Tensor, gradient: Tensor, shape: tuple[int, int, int, int], optimizer: Optimizer
    ) -> None:
        c, k, d, b = shape
        weights = c * k * d
        self.values = values
        self.gradient = gradient
        self.optimizer = optimizer
        self.weight = values[:weights].view(c, k, d)
        self.bias = values[weights:].view(c, k, 1)
        self.d_weight = gradient[:weights].view(c, k, d)
        self.d_bias = gradient[weights:].view(c, k, 1)
        self.fused = optimizer.heavy_ball is not None
        self.decay = optimizer.heavy_ball or 0.0
        self.ones = values.new_ones(c, b, 1)
        if self.fused:
            self.state = {}
            gradient.zero_()
        else:
            self.state = new_state(optimizer, values.numel(), Device(values.device))

    def step(self, error: Tensor, inputs: Tensor, rate: float, scale: float) -> None:
        """Take one optimizer step for all heads; changes the values, the gradient and the optimizer's state in place.

        `error` (c, k, b) is the gradient at the logits, `inputs` are the features (c, b, d), `rate` is the learning
        rate; the gradient counts `scale` times.
        """
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
