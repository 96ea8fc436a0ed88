"""A worker that sends back what it gets, so that only the transport is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def take_node() -> None:
    """Let this worker echo."""
    from fedgraft.engines.flower import node_link
    from fedgraft.engines.flower.node_link import WorkerResponse

    serve = node_link.serve

    def echoing(address: Path, owner: int, carry_out: Callable[..., Any], **more: Any) -> None:
        def echo(request: Any) -> WorkerResponse:
            if not request.request:
                return WorkerResponse(facts={"client": request.client})
            return WorkerResponse(request.request, request.after)

        serve(address, owner, echo, **more)

    node_link.serve = echoing
