"""Halts a real node at a chosen request, so that a process can be killed at that very stage.

Tests write the request into `stop` of the folder that STOPS names; the node's worker that receives it renames the file
to `reached`, and continues when that is gone. A halted worker whose node is dead dies too, as in a power cut.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedgraft.core.messages import Request, unpack

GREETING = "greeting"


def describe(worker_request: Any) -> str:
    """Return what a request is about: a greeting, or an action and what it sums."""
    if not worker_request.request:
        return GREETING
    request = unpack(Request, worker_request.request)
    return f"{request.action} {request.settings.get('sums', '')}".strip()


def take_node() -> None:
    """Let this worker halt at the chosen request."""
    from fedgraft.engines.flower import node_link

    serve = node_link.serve
    folder = Path(os.environ["STOPS"])

    def halting(address: Path, owner: int, carry_out: Callable[[Any], Any], **more: Any) -> None:
        def answer(request: Any) -> Any:
            stop = folder / "stop"
            reached = folder / "reached"
            chosen = json.loads(stop.read_text()) if stop.exists() else None
            if chosen == [request.client, describe(request)]:
                stop.rename(reached)
                while reached.exists() and node_link._alive(owner):
                    time.sleep(0.05)
                if not node_link._alive(owner):
                    os._exit(1)
            return carry_out(request)

        serve(address, owner, answer, **more)

    node_link.serve = halting
