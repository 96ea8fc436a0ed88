"""The carrier of a stock Flower federation: messages travel through the SuperLink, by Flower's own grid.

A request or a response is one flat array of bytes, because Flower pays per array; only the opened edit space (the
tensors from which a node rebuilds the run's edit space) travels as a second one, once per node. Content that is equal
in several messages is hashed and stored once. The grid's own `send_and_receive` sleeps three seconds between two looks,
so messages are pushed and pulled one step at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedgraft.engines.flower.transport import Incoming, NodeTransport, Outgoing, Part, failure_sentence
from fedgraft.engines.flower.wire import as_record, pack_content, unpack_content

_EXPIRED = (3, 4)  # Flower's error codes of a request or a response that exceeded its time to live


class FlowerTransport(NodeTransport):
    """Sends and receives messages on a Flower grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def present(self) -> set[int]:
        """Return the nodes that are connected now."""
        return set(self.grid.get_node_ids())

    def push(self, messages: Sequence[Outgoing]) -> list[str | None]:
        """Send messages and return the message id of each, None for one that Flower did not accept."""
        identities: list[str | None] = []
        if messages:
            identities += self.grid.push_messages(_flower_messages(messages))
        missing = len(messages) - len(identities)
        return identities[: len(messages)] + [None] * missing

    def pull(self, waiting: Iterable[str]) -> list[Incoming]:
        """Return the replies to these message ids that have come by now; does not wait."""
        return [_read(message) for message in self.grid.pull_messages(list(waiting))]


def _flower_messages(messages: Sequence[Outgoing]) -> list[Message]:
    """Return messages as Flower's; a part that several of them share becomes one record."""
    records: dict[int, ArrayRecord] = {}

    def record(part: Part) -> ArrayRecord:
        """Return the record of a part, made once."""
        if id(part) not in records:
            records[id(part)] = as_record(part.data)
        return records[id(part)]

    flower_messages = []
    for message in messages:
        content = pack_content({name: record(part) for name, part in message.parts.items()}, message.settings)
        flower_messages.append(
            Message(content, message.node, message.kind, ttl=message.seconds, group_id=message.group or None)
        )
    return flower_messages


def _read(message: Message) -> Incoming:
    """Return a reply of Flower's, with only values of the right type."""
    metadata = message.metadata
    if message.has_error():
        reason = failure_sentence(str(message.error.reason))
        expired = message.error.code in _EXPIRED
        return Incoming(metadata.reply_to_message_id, metadata.src_node_id, failure=reason, expired=expired)
    parts, settings = unpack_content(message.content)
    plain: Mapping[str, Any] = settings
    return Incoming(metadata.reply_to_message_id, metadata.src_node_id, parts, plain)
