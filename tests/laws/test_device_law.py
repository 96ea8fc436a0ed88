"""One module moves tensors between host and device and reads numbers back: `core/device.py`.

The law reads the source of the rooms that compute. A `.cpu()`, `.item()`, `.cuda()`, `.pin_memory()` or `.to(device)`
in them is a transfer or a wait that nobody counted. `tests/devices/test_counts.py` holds the same by counting.
"""

from __future__ import annotations

import ast
from pathlib import Path

import fedgraft

SOURCE = Path(fedgraft.__file__).parent
ROOMS = ("local", "edit", "engines", "client", "metrics", "aggregate", "data/feature_cache.py", "core/space.py")
ROOMS += ("core/device.py", "models/network.py", "models/families.py", "runs/head_init.py", "runs/open_run.py")
MOVES = {"cpu", "cuda", "item", "pin_memory"}
PLACING = ("engines/pool.py", "models/network.py")
"""Files that move a whole network, once: a worker when it begins, and `VisionNetwork.place`."""
ALLOWED = {
    "core/device.py": "it is the module",
    "local/optimizers.py": "counters of steps live on the host (`Optimizer.host_state`)",
    "metrics/scores.py": "its callers bring logits to the host, and users may hand it others",
    "metrics/metrics.py": "sums over images, once per evaluation",
    "metrics/raw.py": "labels of a whole evaluation, once",
    "client/train.py": "a number drawn on the host for a cluster",
}


def moves(text: str) -> list[str]:
    """Return each call in this source that moves a tensor or waits for one, as `line: call`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if name in MOVES and not node.args:
            found.append(f"{node.lineno}: .{name}()")
        elif name == "to" and any(_names_a_device(argument) for argument in [*node.args, *node.keywords]):
            found.append(f"{node.lineno}: .to(...)")
    return found


def _names_a_device(argument: ast.AST) -> bool:
    """Return whether an argument of `.to` is a device and not a type of numbers."""
    if isinstance(argument, ast.keyword):
        return argument.arg == "device"
    if isinstance(argument, ast.Constant):
        return isinstance(argument.value, str)
    if isinstance(argument, ast.Attribute):
        return "device" in argument.attr
    return isinstance(argument, ast.Name) and "device" in argument.id


def test_only_one_module_moves_tensors() -> None:
    files = []
    for room in ROOMS:
        place = SOURCE / room
        files += [place] if place.is_file() else sorted(place.rglob("*.py"))
    strays = {}
    for path in files:
        name = path.relative_to(SOURCE).as_posix()
        found = moves(path.read_text())
        if name in PLACING:
            found = found[1:]
        if found and name not in ALLOWED:
            strays[name] = found
    assert not strays
    for name in ALLOWED:  # an exception that nothing needs any more is taken off the list
        assert moves((SOURCE / name).read_text()), name


def test_the_law_sees_what_it_forbids() -> None:
    assert len(moves("a.cpu(); b.item(); c.pin_memory()")) == 3
    assert len(moves("x.to(device); x.to(y.device); x.to('cuda'); x.to(device=d)")) == 4
    assert not moves("x.to(torch.float64); self.item(3); x.to(device.widest)")
