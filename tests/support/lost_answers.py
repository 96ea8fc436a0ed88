"""A node that loses its finished answers, if the file that LOSES names exists; and doors without their guards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def take_node() -> None:
    """This node loses an answer each time that the file appears: `whole`, the second `half`, or `always` again."""
    from fedgraft.deploy.server_link import ServerLink, Unreachable

    answer = ServerLink.answer
    blocks = __import__("fedgraft.deploy.server_link", fromlist=["_blocks"])._blocks
    trigger = Path(os.environ["LOSES"])

    def half(data: bytes, start: int) -> Any:
        middle = start + (len(data) - start) // 2
        yield from blocks(data[:middle], start)
        raise ConnectionResetError("the line is cut here")

    def losing(link: ServerLink, message: str, settings: dict[str, Any], data: bytes) -> None:
        import fedgraft.deploy.server_link as module

        how = trigger.read_text() if data and trigger.exists() else ""
        if how and how != "always":
            trigger.unlink()
        if how in ("whole", "always"):
            return
        module._blocks = half if how == "half" else blocks
        try:
            answer(link, message, settings, data)
        except Unreachable:
            module._blocks = blocks
            raise

    ServerLink.answer = losing  # type: ignore[method-assign]


def deliver_once() -> None:
    """The broken variant: this door hands out a message once, and waits for its answer whatever its node does."""
    from fedgraft.deploy.mailbox import Letter, Mailbox

    def next_letter(mailbox: Mailbox, node: int) -> Letter | None:
        for name in mailbox.queues.get(node, ()):
            letter = mailbox.letters[name]
            if not letter.deliveries:
                letter.deliveries = 1
                return letter
        return None

    Mailbox.next_letter = next_letter  # type: ignore[method-assign]


def unbound_door() -> None:
    """The broken variant: this door takes answers of any size."""
    from fedgraft.deploy.mailbox import Mailbox

    begin = Mailbox.begin_answer

    def begin_any(mailbox: Mailbox, *parts: Any) -> int:
        mailbox.limit = 1 << 40
        return begin(mailbox, *parts)

    Mailbox.begin_answer = begin_any  # type: ignore[method-assign]
