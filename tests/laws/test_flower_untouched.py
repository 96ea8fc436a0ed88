"""Flower stays as it is: nothing in fedgraft assigns to its modules or classes, neither in its text nor as it runs."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "fedgraft"


# ---- the text --------------------------------------------------------------------------------------------------------


def flower_names(tree: ast.AST) -> set[str]:
    """Return the names that an import of flwr binds anywhere in a file, and those assigned from one of them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.asname or "flwr" for alias in node.names if alias.name.split(".")[0] == "flwr"}
    grown = True
    while grown:  # command = importlib.import_module("flwr..."), client = connection.FleetHttpClient
        grown = False
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not (_is_reference(node.value, names) or _imports_flower(node.value)):
                continue
            for target in targets:
                if isinstance(target, ast.Name) and target.id not in names:
                    names.add(target.id)
                    grown = True
    return names


def _is_reference(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression is a name of Flower's or an attribute of one, and no call."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def _imports_flower(node: ast.AST) -> bool:
    """Return whether an expression imports a module of Flower by its name."""
    if not isinstance(node, ast.Call):
        return False
    words = [word.value for word in ast.walk(node) if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return any(word.split(".")[0] == "flwr" for word in words) and "import" in ast.unparse(node.func)


def assignments(text: str) -> list[str]:
    """Return what a file assigns into modules, classes and functions of Flower."""
    tree = ast.parse(text)
    names = flower_names(tree)
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and _is_reference(target.value, names):
                found.append(ast.unparse(target))
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            changes = called in ("setattr", "delattr") or called.endswith((".setattr", ".patch", "patch.object"))
            if changes and (_is_reference(node.args[0], names) or "flwr" in ast.unparse(node.args[0])):
                found.append(ast.unparse(node))
    return found


def test_no_source_assigns_into_flower() -> None:
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        changes = assignments(path.read_text(encoding="utf-8"))
        if changes:
            found[str(path)] = changes
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "from flwr.supernode import start_client_internal as loop\nloop.time = 3",
        "import importlib\ncommand = importlib.import_module('flwr.superlink')\ncommand.subprocess = 3",
        "from flwr.x import y\nclient = y.Client\nclient.Activate = 3",
        "def f():\n    from flwr.app import Array\n    Array.inflate = 3",
        "from flwr.app import Array\nsetattr(Array, 'inflate', 3)",
        "import flwr.app\nflwr.app.Array.inflate = 3",
        "from flwr.common import constant\nconstant.TABLE['a'] = 3",
        "from unittest import mock\nmock.patch('flwr.app.Array')",
        "from flwr.app import Array\ndel Array.inflate",
    ],
)
def test_the_check_sees_a_patch(text: str) -> None:
    assert assignments(text)


def test_the_check_lets_uses_pass() -> None:
    assert not assignments("from flwr.app import Array\nx = Array(3)\nx.y = 4\nself.client = Array.z()\nArray.go(1)")


# ---- as it runs ------------------------------------------------------------------------------------------------------


def fingerprint() -> dict[str, tuple[object, ...]]:
    """Return of every loaded module of Flower what its attributes and those of its classes are."""
    seen: dict[str, tuple[object, ...]] = {}
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] == "flwr" and "_pb2" not in name:
            seen |= _attributes(name, vars(module))
    return seen


def _attributes(name: str, table: object) -> dict[str, tuple[object, ...]]:
    """Return the identity of each attribute, with the code and defaults of functions; classes by their own."""
    seen: dict[str, tuple[object, ...]] = {}
    for key, value in sorted(dict(table).items()):  # type: ignore[call-overload]
        if key.startswith("__") or key in ("_abc_impl", "registered_exit_handlers"):
            continue
        seen[f"{name}.{key}"] = (id(value),)
        if isinstance(value, FunctionType):
            seen[f"{name}.{key}"] = (id(value), id(value.__code__), repr(value.__defaults__))
        if isinstance(value, type) and value.__module__.split(".")[0] == "flwr" and value.__module__ == name:
            seen |= _attributes(f"{name}.{key}", vars(value))
        if isinstance(value, int | float | str | tuple):
            seen[f"{name}.{key}"] = (repr(value),)
    return seen


FLOWER_MODULES = ["flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.supercore.control", "flwr.superlink.main"]
FLOWER_MODULES += ["flwr.supernode.start_client_internal", "flwr.superlink.servicer.fleet.fleet_handlers"]
FLOWER_MODULES += ["flwr.superlink.grid", "flwr.supernode.fleet_http_connection", "flwr.superlink.extensions"]


def load_everything() -> None:
    """Import all of fedgraft that knows Flower, and the modules of Flower that were once changed."""
    import fedgraft.deploy
    import fedgraft.engines.flower

    for name in FLOWER_MODULES:
        importlib.import_module(name)
    for package in (fedgraft.deploy, fedgraft.engines.flower):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


@pytest.mark.slow
@pytest.mark.parametrize("patched", [False, True])
def test_flower_is_the_same_after_use(patched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules before and after a message through the door and one through Flower's own apps; a patch is seen."""
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    load_everything()
    before = fingerprint()
    assert len(before) > 1000
    exchange_once(tmp_path)
    if patched:
        module = importlib.import_module("flwr.supernode.start_client_internal")
        monkeypatch.setattr(module, "_pull_and_store_message", lambda: None)
    after = fingerprint()
    changed = {name for name in before if after.get(name) != before[name]}
    assert bool(changed) == patched, changed


def exchange_once(tmp_path: Path) -> None:
    """Let a node answer a message through the door, with this process as server, node and run."""
    from tests.unit.deploy.test_door import NODE, Node, Server, arrivals, transport

    from fedgraft.deploy.control import app_bundle
    from fedgraft.deploy.keys import make_node_key
    from fedgraft.deploy.server_link import ServerLink
    from fedgraft.engines.flower.transport import HELLO, Outgoing

    assert app_bundle()
    server = Server(tmp_path)
    try:
        private, _ = make_node_key(tmp_path / "node", "north")
        node = Node(ServerLink(f"127.0.0.1:{server.port}", server.authority, private))
        node.loop.connect()
        carrier = transport(server)
        ids = carrier.push([Outgoing(NODE, HELLO, {}, {})])
        node.step()
        assert arrivals(carrier, ids)
        carrier.door.close()
    finally:
        server.close()
