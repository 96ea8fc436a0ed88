"""Sums of squared per-sample gradients, taken layer by layer while one backward pass runs.

A forward hook keeps a layer's input x and a tensor hook receives the gradient δ of its output; together they give
the gradient of each sample, which is squared, added and dropped before the next layer is reached. The weights
themselves ask for no gradient, so a pass costs about as much as plain training and holds one layer at a time.
Known layers have a rule of their own; parameters of any other module (class token, position embedding, layer
scale, fused attention) are found by running that one module again, sample by sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.edit.layer_rules import OPAQUE, rule_of


@contextmanager
def settled(network: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters, in eval mode and with no gradient asked for; flags and `.grad` come back afterwards."""
    parameters = dict(network.named_parameters())
    flags = {module: module.training for module in network.modules()}
    asked = {name: (parameter.requires_grad, parameter.grad) for name, parameter in parameters.items()}
    network.eval()
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        yield parameters
    finally:
        for module, training in flags.items():
            module.training = training
        for name, parameter in parameters.items():
            parameter.requires_grad_(asked[name][0])
            parameter.grad = asked[name][1]


class SampleSquares:
    """Adds Σ_n (∂ℓ_n/∂θ_i)² of every wanted parameter to `sums`, one backward pass at a time, while `watching`."""

    def __init__(self, network: nn.Module, names: Iterable[str] | None = None) -> None:
        self._network = network
        self._parameters = dict(network.named_parameters())
        self.sums = {name: torch.zeros_like(self._parameters[name]) for name in wanted_names(network, names)}
        self._owned = _owners(network, self.sums)  # module name -> its wanted parameters, by their name inside it
        self._held: dict[str, _Call] = {}  # what each module was called with in the present pass
        self._checked: set[int] = set()
        self._quiet = False  # hooks do nothing while a module is run again
        self._keep = False  # whether the inputs are needed for another backward pass

    @contextmanager
    def watching(self) -> Iterator[SampleSquares]:
        """Hooks on, network settled; both undone at the end."""
        with settled(self._network), ExitStack() as hooks:
            for owner in self._owned:
                module = self._network.get_submodule(owner)
                hooks.callback(module.register_forward_hook(self._hook(owner), with_kwargs=True).remove)
            yield self

    def forward(self, call: Callable[[Tensor, int], Tensor], inputs: Tensor, entry: int = 0) -> Tensor:
        """Logits (B, classes) of a batch, ready for `backward`."""
        self._samples = len(inputs)
        self._held.clear()
        with torch.enable_grad(), torch.autocast(inputs.device.type, enabled=False):
            logits = call(inputs, entry)
            if entry not in self._checked:
                self._checked.add(entry)
                self._refuse_bypassed(call, inputs[:1], entry)
        return logits

    def backward(self, logits: Tensor, gradient: Tensor, keep: bool = False) -> None:
        """Add the squares for one gradient of the logits (B, classes); `keep` if another one follows."""
        self._keep = keep
        if logits.requires_grad:  # otherwise nothing wanted lies between the inputs and the logits
            with torch.autocast(logits.device.type, enabled=False):  # the squares are computed inside the pass
                torch.autograd.backward(logits, gradient, retain_graph=keep)

    def _hook(self, owner: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self._quiet or not torch.is_grad_enabled():
                return None
            if owner in self._held:
                raise FedgraftError(f"module {owner!r} runs twice in one pass, so its gradients cannot be separated")
            self._held[owner] = _Call(args, kwargs)
            first, rest = (output, ()) if isinstance(output, Tensor) else (output[0], tuple(output[1:]))
            if not first.requires_grad:  # all before is fixed: the graph begins here (a clone may be changed in place)
                first = first.detach().requires_grad_().clone()
            first.register_hook(lambda delta: self._square(owner, delta))
            for other in rest:
                if isinstance(other, Tensor) and other.requires_grad:
                    other.register_hook(_refuse_second_output(owner))
            return first if isinstance(output, Tensor) else type(output)((first, *rest))

        return hook

    @torch.no_grad()
    def _square(self, owner: str, delta: Tensor) -> None:
        """The gradient of a module's output has arrived: add its parameters' squares, then let its input go."""
        called = self._held[owner] if self._keep else self._held.pop(owner)
        if called.changed():
            raise FedgraftError(f"the input of module {owner!r} is changed in place after it was used")
        module, inside = self._network.get_submodule(owner), self._owned[owner]
        # A rule covers a module's own parameters; names with a dot lie inside an opaque module.
        rule = None if any("." in key for key in inside) else rule_of(module)
        if rule is None:
            self._again(owner, called, self._by_sample(owner, delta))
        else:
            rule(module, self._by_sample(owner, called.tensors[0]), delta, {k: self.sums[n] for k, n in inside.items()})

    def _by_sample(self, owner: str, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != self._samples:
            raise FedgraftError(
                f"module {owner!r} sees a tensor of {tuple(tensor.shape)} for a batch of {self._samples}: "
                "its first dimension must count the samples"
            )
        return tensor

    def _again(self, owner: str, called: _Call, delta: Tensor) -> None:
        """Run one module again, one sample at a time, for the gradients of parameters that have no rule."""
        module, inside = self._network.get_submodule(owner), self._owned[owner]
        leaves = {key: self._parameters[name].detach().requires_grad_() for key, name in inside.items()}

        def one(value: Any, n: int) -> Any:
            batched = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == self._samples
            return value[n : n + 1].detach() if batched else value

        self._quiet = True
        try:
            for n in range(self._samples):
                with torch.enable_grad():
                    output = torch.func.functional_call(
                        module,
                        leaves,
                        tuple(one(a, n) for a in called.args),
                        {k: one(v, n) for k, v in called.kwargs.items()},
                    )
                output = output if isinstance(output, Tensor) else output[0]
                found = torch.autograd.grad(output, list(leaves.values()), delta[n : n + 1], allow_unused=True)
                for key, gradient in zip(leaves, found, strict=True):
                    if gradient is not None:
                        self.sums[inside[key]].addcmul_(gradient, gradient)
        finally:
            self._quiet = False

    def _refuse_bypassed(self, call: Callable[[Tensor, int], Tensor], inputs: Tensor, entry: int) -> None:
        """A module that did not run has gradient zero, unless its weights are used without calling it."""
        silent = [
            name for owner in sorted(self._owned.keys() - self._held.keys()) for name in self._owned[owner].values()
        ]
        if not silent:
            return
        parameters = [self._parameters[name].requires_grad_() for name in silent]
        self._quiet = True
        try:
            output = call(inputs, entry)
            if output.requires_grad:
                found = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
                used = [name for name, gradient in zip(silent, found, strict=True) if gradient is not None]
                if used:
                    raise FedgraftError(
                        f"parameter {used[0]!r} is used without calling its module, so its per-sample "
                        "gradients cannot be seen; call the module or leave the parameter out"
                    )
        finally:
            self._quiet = False
            for parameter in parameters:
                parameter.requires_grad_(False)


class _Call:
    """The arguments of one module call, and whether they are still what they were."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._versions = [tensor._version for tensor in self.tensors]

    def changed(self) -> bool:
        return self._versions != [tensor._version for tensor in self.tensors]


def _refuse_second_output(owner: str) -> Callable[[Tensor], None]:
    def refuse(delta: Tensor) -> None:
        raise FedgraftError(f"module {owner!r} is used through more than its first output; leave its parameters out")

    return refuse


def _owners(network: nn.Module, wanted: Iterable[str]) -> dict[str, dict[str, str]]:
    """The module to watch for each parameter: the one that holds it, or an opaque one around that."""
    opaque = [name for name, module in network.named_modules() if isinstance(module, OPAQUE)]
    owned: dict[str, dict[str, str]] = {}
    for name in wanted:
        outer = [o for o in opaque if name.startswith(f"{o}." if o else "")]
        owner = outer[0] if outer else name.rpartition(".")[0]
        owned.setdefault(owner, {})[name[len(owner) + 1 :] if owner else name] = name
    return owned


def wanted_names(network: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """The parameters to score (all by default), refusing what would give wrong numbers silently."""
    parameters = dict(network.named_parameters())
    wanted = list(parameters) if names is None else list(dict.fromkeys(names))
    uses = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    for name in wanted:
        if name not in parameters:
            raise FedgraftError(f"the network has no parameter {name!r} to score")
        if parameters[name].dtype not in (torch.float32, torch.float64):
            raise FedgraftError(f"parameter {name!r} is {parameters[name].dtype}: squared gradients need float32")
        if uses[id(parameters[name])] > 1:
            raise FedgraftError(f"parameter {name!r} is shared by several modules; leave it out of the scores")
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise FedgraftError(f"{name!r} normalises over the batch in eval mode too, so samples have no own gradient")
    return wanted
