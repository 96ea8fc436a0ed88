"""Makes a real node slow: every training takes so many seconds more, given by client in SLOW ("0.4,0.4,0.4,4")."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.deployed_stops import describe


def take_node() -> None:
    """Let this worker sleep before each training."""
    from fedgraft.engines.flower import node_link

    serve = node_link.serve
    seconds = [float(word) for word in os.environ["SLOW"].split(",")]

    def slow(address: Path, owner: int, carry_out: Callable[[Any], Any], **more: Any) -> None:
        def answer(request: Any) -> Any:
            if describe(request) in ("train", "train_ahead"):
                time.sleep(seconds[request.client])
            return carry_out(request)

        serve(address, owner, answer, **more)

    node_link.serve = slow
