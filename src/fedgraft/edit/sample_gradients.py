"""Sums of squared per-sample gradients, computed layer by layer during one backward pass.

A forward hook stores a layer's input x and a tensor hook receives the gradient δ of its output; together they give
the gradient of each sample, which is squared, added and discarded before the next layer is reached. The weights
themselves require no gradient, so a pass costs about as much as plain training and stores one layer at a time.
Known layers have their own rule (`layer_rules`); parameters of any other module (class token, position embedding,
layer scale, fused attention) are scored by running that one module again, sample by sample.
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
def scoring_mode(network: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Put the network in eval mode without gradients and yield its parameters; flags and `.grad` are restored."""
    parameters = dict(network.named_parameters())
    training_flags = {module: module.training for module in network.modules()}
    gradient_states = {}
    for name, parameter in parameters.items():
        gradient_states[name] = (parameter.requires_grad, parameter.grad)
    network.eval()
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        yield parameters
    finally:
        for module, training in training_flags.items():
            module.training = training
        for name, parameter in parameters.items():
            requires_grad, gradient = gradient_states[name]
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


class SampleSquares:
    """Adds Σ_n (∂ℓ_n/∂θ_i)² of every scored parameter to `sums`, one backward pass at a time, while `watching`.

    `names` are the parameters to score; None: all.
    """

    def __init__(self, network: nn.Module, names: Iterable[str] | None = None) -> None:
        self._network = network
        self._parameters = dict(network.named_parameters())
        self.sums = {name: torch.zeros_like(self._parameters[name]) for name in scorable_names(network, names)}
        self._owned = _owners(network, self.sums)  # module name -> its scored parameters, by their name inside it
        self._calls: dict[str, _Call] = {}  # the arguments of each module in the present pass
        self._checked_entries: set[int] = set()
        self._hooks_off = False  # while a module is run again
        self._keep_inputs = False  # whether another backward pass follows

    @contextmanager
    def watching(self) -> Iterator[SampleSquares]:
        """Register the hooks and enter scoring mode; both are undone at the end."""
        with scoring_mode(self._network), ExitStack() as hooks:
            for owner in self._owned:
                module = self._network.get_submodule(owner)
                hooks.callback(module.register_forward_hook(self._hook(owner), with_kwargs=True).remove)
            yield self

    def forward(self, call: Callable[[Tensor, int], Tensor], inputs: Tensor, entry: int = 0) -> Tensor:
        """Return the logits (B, classes) of a batch that `call(inputs, entry)` computes, ready for `backward`."""
        self._samples = len(inputs)
        self._calls.clear()
        with torch.enable_grad(), torch.autocast(inputs.device.type, enabled=False):
            logits = call(inputs, entry)
            if entry not in self._checked_entries:
                self._checked_entries.add(entry)
                self._refuse_bypassed(call, inputs[:1], entry)
        return logits

    def backward(self, logits: Tensor, gradient: Tensor, keep: bool = False) -> None:
        """Add the squares for one gradient of the logits (B, classes) to `sums`.

        `keep` if another `backward` follows.
        """
        self._keep_inputs = keep
        if logits.requires_grad:  # otherwise no scored parameter lies between the inputs and the logits
            with torch.autocast(logits.device.type, enabled=False):  # the squares are computed inside the pass
                torch.autograd.backward(logits, gradient, retain_graph=keep)

    def _hook(self, owner: str) -> Callable[..., Any]:
        """Return the forward hook of a module: store its arguments and watch the gradient of its output."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            """Store the module's arguments and register `_add_squares` on the gradient of its first output."""
            if self._hooks_off or not torch.is_grad_enabled():
                return None
            if owner in self._calls:
                raise FedgraftError(
                    "E-EDIT-MODULE-TWICE",
                    f"module {owner!r} runs twice in one pass, so its gradients cannot be separated",
                    "leave its parameters out of the scores",
                    module=owner,
                )
            self._calls[owner] = _Call(args, kwargs)
            single = isinstance(output, Tensor)
            if single:
                first = output
                others: tuple[Any, ...] = ()
            else:
                first = output[0]
                others = tuple(output[1:])
            if not first.requires_grad:  # all before is fixed: the graph begins here (a clone may be changed in place)
                first = first.detach().requires_grad_().clone()
            first.register_hook(lambda delta: self._add_squares(owner, delta))
            for other in others:
                if isinstance(other, Tensor) and other.requires_grad:
                    other.register_hook(_refuse_second_output(owner))
            if single:
                return first
            return type(output)((first, *others))

        return hook

    @torch.no_grad()
    def _add_squares(self, owner: str, delta: Tensor) -> None:
        """Add the squares of a module's parameters to `sums` for the gradient `delta` of its output; release its input.

        `owner` is the module's name.
        """
        if self._keep_inputs:
            call = self._calls[owner]
        else:
            call = self._calls.pop(owner)
        if call.changed():
            raise FedgraftError(
                "E-EDIT-MODULE-INPUT",
                f"the input of module {owner!r} is changed in place after it was used",
                "leave its parameters out of the scores",
                module=owner,
            )
        module = self._network.get_submodule(owner)
        inside = self._owned[owner]
        # A rule covers a module's own parameters; names with a dot lie inside an opaque module.
        rule = None
        if not any("." in key for key in inside):
            rule = rule_of(module)
        if rule is None:
            self._run_again(owner, call, self._by_sample(owner, delta))
        else:
            sums = {key: self.sums[name] for key, name in inside.items()}
            rule(module, self._by_sample(owner, call.tensors[0]), delta, sums)

    def _by_sample(self, owner: str, tensor: Tensor) -> Tensor:
        """Return the tensor, or raise if its first dimension is not the batch; `owner` names the module in errors."""
        if tensor.ndim == 0 or tensor.shape[0] != self._samples:
            raise FedgraftError(
                "E-EDIT-MODULE-BATCH",
                f"module {owner!r} uses a tensor of shape {tuple(tensor.shape)} for a batch of {self._samples}, "
                "so its first dimension does not count the samples",
                "leave its parameters out of the scores",
                module=owner,
            )
        return tensor

    def _run_again(self, owner: str, call: _Call, delta: Tensor) -> None:
        """Run one module again, one sample at a time, and add the squares of parameters that have no rule to `sums`.

        `call` holds the module's arguments in the pass, `delta` (B, ...) is the gradient of its output.
        """
        module = self._network.get_submodule(owner)
        inside = self._owned[owner]
        leaves = {key: self._parameters[name].detach().requires_grad_() for key, name in inside.items()}
        self._hooks_off = True
        try:
            for n in range(self._samples):
                args = []
                for value in call.args:
                    args.append(self._sample(value, n))
                kwargs = {}
                for key, value in call.kwargs.items():
                    kwargs[key] = self._sample(value, n)
                with torch.enable_grad():
                    output = torch.func.functional_call(module, leaves, tuple(args), kwargs)
                if not isinstance(output, Tensor):
                    output = output[0]
                gradients = torch.autograd.grad(output, list(leaves.values()), delta[n : n + 1], allow_unused=True)
                for key, gradient in zip(leaves, gradients, strict=True):
                    if gradient is not None:
                        self.sums[inside[key]].addcmul_(gradient, gradient)
        finally:
            self._hooks_off = False

    def _sample(self, value: Any, n: int) -> Any:
        """Return sample n of a batched tensor as a batch of one; any other argument is returned unchanged."""
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == self._samples:
            return value[n : n + 1].detach()
        return value

    def _refuse_bypassed(self, call: Callable[[Tensor, int], Tensor], inputs: Tensor, entry: int) -> None:
        """Raise an error if weights are used without calling their module: their scores would wrongly be zero."""
        silent: list[str] = []  # parameters of modules that did not run
        for owner in sorted(self._owned.keys() - self._calls.keys()):
            silent.extend(self._owned[owner].values())
        if not silent:
            return
        parameters = []
        for name in silent:
            parameters.append(self._parameters[name].requires_grad_())
        self._hooks_off = True
        try:
            output = call(inputs, entry)
            if not output.requires_grad:
                return
            gradients = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
            for name, gradient in zip(silent, gradients, strict=True):
                if gradient is not None:
                    raise FedgraftError(
                        "E-EDIT-MODULE-BYPASSED",
                        f"parameter {name!r} is used without calling its module, so its per-sample gradients "
                        "cannot be computed",
                        "call the module or leave the parameter out",
                        name=name,
                    )
        finally:
            self._hooks_off = False
            for parameter in parameters:
                parameter.requires_grad_(False)


class _Call:
    """The arguments of one module call, and whether they were changed in place since."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]

    def changed(self) -> bool:
        return self._versions != self._present_versions()


def _refuse_second_output(owner: str) -> Callable[[Tensor], None]:
    """Return a hook that raises an error when a gradient reaches another output than the first."""

    def refuse(delta: Tensor) -> None:
        raise FedgraftError(
            "E-EDIT-MODULE-OUTPUTS",
            f"module {owner!r} is used through more than its first output",
            "leave its parameters out of the scores",
            module=owner,
        )

    return refuse


def _owners(network: nn.Module, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the modules to watch, each with its parameters: names inside the module to names in the network.

    A parameter is watched at the module that contains it, or at an opaque module around that.
    """
    opaque = [name for name, module in network.named_modules() if isinstance(module, OPAQUE)]
    owned: dict[str, dict[str, str]] = {}
    for name in names:
        owner = name.rpartition(".")[0]
        for candidate in opaque:
            if candidate == "" or name.startswith(f"{candidate}."):
                owner = candidate
                break
        inner_name = name
        if owner:
            inner_name = name[len(owner) + 1 :]
        owned.setdefault(owner, {})[inner_name] = name
    return owned


def scorable_names(network: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """Return the names of the parameters to score (all by default); raise an error where scores would be wrong."""
    parameters = dict(network.named_parameters())
    if names is None:
        selected = list(parameters)
    else:
        selected = list(dict.fromkeys(names))
    uses = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    for name in selected:
        if name not in parameters:
            raise FedgraftError(
                "E-EDIT-SCORE-NAME",
                f"the network has no parameter {name!r} to score",
                "name parameters of this network",
                name=name,
            )
        if parameters[name].dtype not in (torch.float32, torch.float64):
            raise FedgraftError(
                "E-EDIT-SCORE-TYPE",
                f"parameter {name!r} is {parameters[name].dtype}, too coarse for squared gradients",
                "load the network in float32",
                name=name,
            )
        if uses[id(parameters[name])] > 1:
            raise FedgraftError(
                "E-EDIT-SCORE-SHARED",
                f"parameter {name!r} is shared by several modules",
                "leave it out of the scores",
                name=name,
            )
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise FedgraftError(
                "E-EDIT-SCORE-BATCH-NORM",
                f"{name!r} normalises over the batch in eval mode too, so samples have no gradient of their own",
                "use batch norm with running statistics, or another norm",
                name=name,
            )
    return selected
