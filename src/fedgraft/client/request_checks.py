"""Checks of single fields of a request; each raises `Refused` with a sentence that says nothing of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from fedgraft.aggregate.codecs import is_finite
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request
from fedgraft.privacy.secagg.plan import DISPUTE, STAGES

SECURE_STAGES = frozenset(f"secure.{stage}" for stage in (*STAGES, DISPUTE))
"""Actions that are stages of a secure sum: their answers show nothing of one client."""


def is_secure_stage(request: Request) -> bool:
    """Return whether the request is one stage of a secure sum."""
    return request.action in SECURE_STAGES


def requested_name(request: Request) -> str:
    """Return what a request is for: its action, or what the secure sum it belongs to adds up."""
    if is_secure_stage(request):
        return str(request.settings.get("sums", ""))
    return request.action


def require_settings(request: Request, declared: Mapping[str, type]) -> None:
    """Raise `Refused` for a request that lacks one of the declared settings or has it with another type.

    A setting declared as a number may be an int or a float, but neither a bool nor NaN.
    """
    for name, expected_type in declared.items():
        value = request.settings.get(name)
        if expected_type is str:
            right_type = isinstance(value, str)
        else:
            right_type = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        if not right_type:
            raise Refused(f"the setting {name!r} of the request is missing or has the wrong type", "request")


def require_tensor(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise `Refused` for a tensor that is missing, of another shape, not floating-point or not finite.

    `name` is for the error.
    """
    if tensor is None or not tensor.is_floating_point() or tuple(tensor.shape) != shape:
        raise Refused(f"{name} of the request is missing or has another shape than here", "request")
    if not is_finite(tensor):
        raise Refused(f"{name} of the request has values that are not finite", "request")
