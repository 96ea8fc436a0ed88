"""The digest that binds a secure sum to one request: every client of the sum signs it."""

from __future__ import annotations

import hashlib
import json

from torch import Tensor

from fedgraft.core.messages import Request
from fedgraft.privacy.secagg.client import payload_digest


def request_digest(request: Request) -> str:
    """Return a digest of everything in a request: action, space, all settings, the model, further vectors.

    Run, number and clients are in the plan itself. What a stage adds (`plan`, `data:...`) is not part of the request.
    """
    plain = json.dumps([request.space, sorted(request.settings.items())], separators=(",", ":"))
    return hashlib.sha256(f"{plain}\x1e{payload_digest(carried_tensors(request))}".encode()).hexdigest()


def carried_tensors(request: Request) -> dict[str, Tensor]:
    """Return the model (under "") and the further tensors of a request, without what a stage adds to them."""
    tensors = {}
    for name, tensor in request.auxiliary.items():
        if name != "plan" and not name.startswith("data:"):
            tensors[name] = tensor
    if request.vector is not None:
        tensors[""] = request.vector
    return tensors
