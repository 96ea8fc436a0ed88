"""A node whose finished answer is lost between its process and the node, if the file that LOSES names exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def take_helper() -> None:
    """The processes of this helper lose one answer for each time that the file appears: the second half of it."""
    from flwr.supernode.runtime import run_clientapp

    push = run_clientapp.push_message
    trigger = Path(os.environ["LOSES"])

    def losing(client: Any, message: Any, context: Any) -> None:
        if message.metadata.message_type.startswith("train") and trigger.exists():
            half = trigger.read_text() == "half"
            trigger.unlink()
            if half:
                run_clientapp.push_objects = _broken
                push(client, message, context)
            _broken()
        push(client, message, context)

    run_clientapp.push_message = losing


def _broken(*parts: Any, **more: Any) -> None:
    raise RuntimeError("the answer is lost here")


def take_guard() -> None:
    """The broken variant: this node waits for its answer as Flower's own does."""
    from fedgraft.deploy import inflight

    setattr(inflight, "push_or_give_up", lambda push, sleep: push)  # noqa: B010  # a function of another type
