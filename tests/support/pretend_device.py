"""A pretend accelerator: host memory under torch's spare device key, which refuses what CUDA refuses and counts.

No machine of the gate has a GPU. A tensor on the device `pretend` wraps a CPU tensor and is computed by the CPU's own
kernels, so results are the CPU's bit for bit. What it adds are the rules of an accelerator:

- tensors of two devices do not meet in one operation (a CPU scalar of no dimension may, and so may a CPU index in
  `x[index]`, which costs an upload);
- `numpy()` and iteration over memory are for the CPU;
- a generator of the CPU draws nothing on the device;
- a forked child cannot use it;
- autocast casts as CUDA's does.

`COUNTS` says how often data went up, went down, and how often the program waited for the device. What it cannot show:
races between streams, pinned memory, TF32, running out of memory, speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
DEVICES = 2
"""How many of them this machine pretends to have."""


@dataclass
class Counts:
    """What happened between the processor and the device."""

    uploads: int = 0
    """Copies of host tensors to the device."""
    downloads: int = 0
    """Copies of device tensors to the host."""
    waits: int = 0
    """Times the program needed a value, and so had to wait for the device; every download is one."""
    launches: int = 0
    """Computations on the device."""

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.uploads - other.uploads,
            self.downloads - other.downloads,
            self.waits - other.waits,
            self.launches - other.launches,
        )


COUNTS = Counts()
"""Since the program began; `counted` gives those of a block."""
TRACES: list[Callable[[str, str], None]] = []
"""Called with (kind of event, operation) at each upload, download and wait; for finding out where they come from."""
_owner = os.getpid()


@contextmanager
def counted() -> Iterator[Counts]:
    """Give the counts of this block, complete once the block has ended."""
    before = replace(COUNTS)
    inside = Counts()
    yield inside
    difference = COUNTS - before
    inside.uploads, inside.downloads = difference.uploads, difference.downloads
    inside.waits, inside.launches = difference.waits, difference.launches


def _note(kind: str, operation: str) -> None:
    setattr(COUNTS, kind, getattr(COUNTS, kind) + 1)
    for trace in TRACES:
        trace(kind, operation)


class DeviceTensor(torch.Tensor):
    """A tensor on the pretend device: `raw` is the CPU tensor that it wraps."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor, index: int = 0) -> DeviceTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=f"{NAME}:{index}",
        )
        wrapper.raw = raw
        return wrapper  # type: ignore[no-any-return]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.raw!r}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        with torch.no_grad():
            copied: Tensor = DeviceTensor(self.raw.clone(), self.device.index or 0)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor of the pretend device cannot be sent to another process")

    def numpy(self, **options: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of what is wrapped, for those who count bytes."""
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: Tensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        assert isinstance(other, DeviceTensor), "data of another device"
        self.raw = other.raw  # the wrapper took over sizes and strides; what it wraps is a Python attribute

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # a wrapper made there could not be viewed
            with torch.inference_mode(False), torch.no_grad():
                return _dispatch(operation, args, dict(kwargs or {}))
        return _dispatch(operation, args, dict(kwargs or {}))


_COPIES = {"aten::_to_copy", "aten::copy_"}
_INDEX = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::index_put"}
_DATA_DEPENDENT = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::is_nonzero",
    "aten::bincount",
    "aten::histc",
    "aten::multinomial",
    "aten::repeat_interleave",
    "aten::linalg_eigh",
    "aten::_linalg_eigh",
    "aten::_linalg_svd",
}
"""Operations after which CUDA knows a size or a status only by waiting."""


def _raw(value: Any) -> Any:
    """Return the wrapped CPU tensor of a device tensor, and anything else as it is."""
    if isinstance(value, DeviceTensor):
        return value.raw
    return value


def _alive() -> None:
    if os.getpid() != _owner:
        raise RuntimeError(f"Cannot re-initialize {NAME} in forked subprocess: use the 'spawn' start method")


def _dispatch(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Check one operation as CUDA would, count it, and compute it on the wrapped tensors."""
    _alive()
    name = operation.name().partition(".")[0]
    if name in _COPIES:
        return _copy(name, operation, args, kwargs)
    if name == "aten::_has_compatible_shallow_copy_type":  # a question, which modules ask when they move
        return all(isinstance(arg, DeviceTensor) for arg in args)
    leaves: list[Any] = []
    raw_args = [_unwrapped(value, leaves) for value in args]
    raw_kwargs = {key: _unwrapped(value, leaves) for key, value in kwargs.items()}
    index = _device_index(name, leaves, args)
    if name == "aten::_local_scalar_dense":
        _note("waits", name)
        return args[0].raw.item()
    if name in _DATA_DEPENDENT or (name in _INDEX and _boolean(args[1])):
        _note("waits", name)
    if not operation.is_view:
        COUNTS.launches += 1
    if raw_kwargs.get("device") is not None:
        wanted = torch.device(raw_kwargs["device"])
        raw_kwargs["device"] = torch.device("cpu")
        if wanted.type == "cpu":
            return operation(*raw_args, **raw_kwargs)
    result = operation(*raw_args, **raw_kwargs)
    mutated: dict[int, DeviceTensor] = {}
    if operation._schema.is_mutable:
        for leaf in leaves:
            if isinstance(leaf, DeviceTensor):
                mutated[id(leaf.raw)] = leaf
                if leaf.raw.shape != leaf.shape:  # an `out=` that was too small: the wrapper takes over the sizes
                    torch.Tensor.data.__set__(leaf, DeviceTensor(leaf.raw, index))  # type: ignore[attr-defined]
    return _wrapped(result, index, mutated)


def _unwrapped(value: Any, leaves: list[Any]) -> Any:
    """Return an argument with raw tensors; tensors and generators in it are added to `leaves`."""
    if isinstance(value, DeviceTensor):
        leaves.append(value)
        return value.raw
    if isinstance(value, Tensor | torch.Generator):
        leaves.append(value)
    elif isinstance(value, list | tuple):
        return type(value)([_unwrapped(item, leaves) for item in value])
    return value


def _wrapped(result: Any, index: int, mutated: dict[int, DeviceTensor]) -> Any:
    """Return a result with tensors of the device; what an operation changed in place stays the same object."""
    if isinstance(result, Tensor):
        same = mutated.get(id(result))
        return DeviceTensor(result, index) if same is None else same
    if isinstance(result, list | tuple):
        return type(result)([_wrapped(item, index, mutated) for item in result])
    return result


def _device_index(name: str, leaves: list[Any], args: Any) -> int:
    """Return the number of the device that computes; raise where CUDA would refuse the arguments."""
    indices = {leaf.device.index or 0 for leaf in leaves if isinstance(leaf, DeviceTensor)}
    if len(indices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME}:0 and {NAME}:1! ({name})")
    for leaf in leaves:
        if isinstance(leaf, torch.Generator) and leaf.device.type != NAME:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{leaf.device.type}' ({name})")
        if not isinstance(leaf, Tensor) or isinstance(leaf, DeviceTensor) or leaf.dim() == 0:
            continue
        is_index = name in _INDEX and any(leaf is given for given in args[1]) and isinstance(args[0], DeviceTensor)
        if not is_index:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
                f"({name})"
            )
        _note("uploads", name)
        _note("waits", name)
    return indices.pop() if indices else 0


def _boolean(given: Any) -> bool:
    """Return whether an index of `x[index]` is a mask, whose number of hits only the device knows."""
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in given)


def _copy(name: str, operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy between devices or on one, and count what crosses."""
    if name == "aten::copy_":
        target, source = args[0], args[1]
        _cross(name, source, target)
        _raw(target).copy_(_raw(source))
        return target
    source = args[0]
    device = kwargs.pop("device", None)
    stays = device is None or torch.device(device).type == NAME
    raw = operation(_raw(source), **kwargs)
    index = source.device.index or 0
    if not stays:
        _note("downloads", name)
        _note("waits", name)
        return raw
    if device is not None and torch.device(device).index is not None:
        index = torch.device(device).index
    COUNTS.launches += 1
    return DeviceTensor(raw, index)


def _cross(name: str, source: Tensor, target: Tensor) -> None:
    """Count one copy from a tensor into another."""
    from_device = isinstance(source, DeviceTensor)
    to_device = isinstance(target, DeviceTensor)
    if to_device and not from_device:
        _note("uploads", name)
    elif from_device and not to_device:
        _note("downloads", name)
        _note("waits", name)
    else:
        COUNTS.launches += 1


# ---- autocast, as CUDA's --------------------------------------------------------------------------------------------

_LOWER = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "scaled_dot_product_attention", "conv1d", "conv2d")
_LOWER_OVERLOADS = ("conv2d.padding", "einsum", "addbmm", "mv")
_FLOAT32 = (
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "cross_entropy_loss",
    "nll_loss",
    "exp",
    "log",
    "pow.Tensor_Scalar",
)
_FLOAT32_MORE = (
    "mse_loss",
    "kl_div",
    "sum",
    "sum.dim_IntList",
    "norm.Scalar",
    "cumsum",
    "group_norm",
    "cosine_similarity",
)


def _casting(overload: Any, lower: bool) -> Callable[..., Any]:
    """Return the autocast kernel of an operation: its floating-point tensors cast to the lower precision or float32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wanted = torch.get_autocast_dtype(NAME) if lower else torch.float32

        def cast(value: Any) -> Any:
            on_device = isinstance(value, Tensor) and value.device.type == NAME
            if not on_device or not value.is_floating_point() or value.dtype == torch.float64:
                return value
            return value.to(wanted)

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return overload(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))

    return kernel


class _Module:
    """What torch asks a device's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return DEVICES

    def _is_in_bad_fork(self) -> bool:
        return os.getpid() != _owner

    def manual_seed_all(self, seed: int) -> None:
        """The device draws nothing of its own."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_device_name(self, device: object = None) -> str:
        return "pretend accelerator"


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    _alive()
    options = {} if memory_format is None else {"memory_format": memory_format}
    return DeviceTensor(torch.empty(size, dtype=dtype, **options), (device.index or 0) if device else 0)


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    _alive()
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype), (device.index or 0) if device else 0)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy for `torch.tensor(..., device=...)`, which comes here without passing the wrapper."""
    _alive()
    _cross("aten::_copy_from", source, target)
    _raw(target).copy_(_raw(source))
    return target


def _install() -> list[torch.library.Library]:
    """Register the device with torch, once in a process."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    backend = torch.library.Library("aten", "IMPL", "PrivateUse1")
    backend.impl("empty.memory_format", _empty)
    backend.impl("empty_strided", _empty_strided)
    backend.impl("_copy_from", _copy_from)
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)  # operations that autocast leaves as they are
    autocast = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, lower in (((*_LOWER, *_LOWER_OVERLOADS), True), ((*_FLOAT32, *_FLOAT32_MORE), False)):
        for name in names:
            packet, _, variant = name.partition(".")
            overload = getattr(getattr(torch.ops.aten, packet), variant or "default")
            autocast.impl(name, _casting(overload, lower))
    return [backend, others, autocast]


_libraries = _install()


def loaded() -> None:
    """For torch's entry point of devices: importing this module has installed it."""
