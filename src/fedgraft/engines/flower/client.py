"""The ClientApp: takes an order out of a Flower message, has it carried out, and puts the answer into the reply.

What a client remembers never goes through here to the server: on a node it lies in the worker's folder, in a
simulation in Flower's own state of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedgraft.core.errors import FedgraftError
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse
from fedgraft.engines.flower.wire import HELLO, ORDER, as_record, names, put, take, text, whole_number

Slots = MutableMapping[str, bytes]
"""Two places for a client's memory: its present one and the one before."""
Serve = Callable[[WorkerRequest, Slots], WorkerResponse]


class StateSlots(MutableMapping[str, bytes]):
    """A client's memory in Flower's state of a node, one array each."""

    def __init__(self, context: Context) -> None:
        self.state = context.state

    def __getitem__(self, name: str) -> bytes:
        record = self.state[name]
        assert isinstance(record, ArrayRecord)
        return record["bytes"].data

    def __setitem__(self, name: str, data: bytes) -> None:
        self.state[name] = as_record(data)

    def __delitem__(self, name: str) -> None:
        del self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def request_of(message: Message, context: Context, settings: Mapping[str, Any]) -> WorkerRequest:
    """What a message asks of this node, in a run with these settings."""
    arrays, told = take(message.content)
    client = context.node_config.get("partition-id")
    if type(client) is not int or client < 0:
        raise FedgraftError("a node needs to know which client it is: start it with --node-config 'partition-id=0'.")
    return WorkerRequest(
        config=str(settings.get("config", "")),
        folder=str(settings.get("folder", "")),
        client=client,
        run=context.run_id,
        data=str(context.node_config.get("data", "")),
        source=str(context.node_config.get("source", "")),
        after=whole_number(told, "after", 0),
        becomes=whole_number(told, "becomes", 0),
        digest=text(told, "digest"),
        classes=names(told, "classes"),
        request=arrays.get("request", b""),
        opened=arrays.get("opened", b""),
        task=str(settings.get("task", "")),
    )


def client_app(serve: Serve, settings: Mapping[str, Any] | None = None) -> ClientApp:
    """A ClientApp whose orders `serve` carries out; `settings` stand for the run's where Flower gives it none."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        try:
            found = serve(request_of(message, context, settings or context.run_config), StateSlots(context))
        except FedgraftError as error:
            found = WorkerResponse(error=str(error))
        told = {"step": found.step, "need": found.need, "error": found.error[:500], **found.facts}
        arrays = {"response": as_record(found.response)} if found.response else {}
        return Message(put(arrays, told), reply_to=message)

    app.query(HELLO.partition(".")[2])(answer)
    app.train(ORDER.partition(".")[2])(answer)
    return app
