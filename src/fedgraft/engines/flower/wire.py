"""fedgraft's messages as Flower's: a flat byte string in one array, and a few plain words beside it.

Flower pays per array, so an order or a reply is one array of bytes, whatever it holds; only the opened edit space
travels as a second one, once per node. What arrives is of untrusted origin: `take` gives only values of the right
type and never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

HELLO = "query.hello"
ORDER = "train.order"
_STYPE = "fedgraft"


def as_record(data: bytes) -> ArrayRecord:
    """Bytes as one flat array; the same record may go into many messages, and is then hashed and stored once."""
    return ArrayRecord({"bytes": Array("uint8", (len(data),), _STYPE, data)})


def put(parts: Mapping[str, ArrayRecord], settings: Mapping[str, Any]) -> RecordDict:
    """A message's content."""
    return RecordDict({**parts, "words": ConfigRecord(dict(settings))})


def take(content: RecordDict) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The byte strings and the words of a message; what is not there or of another kind is left out."""
    settings = content.get("words")
    parts = {}
    for name, record in content.items():
        array = record.get("bytes") if isinstance(record, ArrayRecord) else None
        if array is not None and array.stype == _STYPE:
            parts[name] = array.data
    return parts, dict(settings) if isinstance(settings, ConfigRecord) else {}


def whole_number(settings: Mapping[str, Any], name: str, default: int = -1) -> int:
    """A word that must be a whole number."""
    value = settings.get(name)
    return value if type(value) is int else default


def text(settings: Mapping[str, Any], name: str) -> str:
    """A word that must be text, as one line that a log bears and a terminal only prints."""
    value = settings.get(name)
    return plain(value) if isinstance(value, str) else ""


def plain(sentence: str) -> str:
    """Somebody's words without what would move a cursor or begin a line of its own."""
    return "".join(letter if letter.isprintable() else " " for letter in sentence[:500])


def names(settings: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A word that must be a list of texts; control characters in them are taken out."""
    value = settings.get(name)
    return tuple(map(plain, value)) if isinstance(value, list) and all(isinstance(one, str) for one in value) else ()


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """A ServerApp that runs `main`."""
    app = ServerApp()
    app.main()(main)
    return app


def simulate(server: ServerApp, client: ClientApp, nodes: int) -> None:
    """Run both apps in Flower's simulation, with Ray workers of one core each in place of nodes."""
    from flwr.simulation import run_simulation

    run_simulation(server, client, nodes, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
