"""The house: which room may import which, what libraries each may use, and that no two modules need each other.

The table of floors is the architecture: a room imports from the floors below it, and from itself. Imports inside
functions count too. Imports for types only (under TYPE_CHECKING) bind nothing at run time; they may not make a circle either.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parent.parent / "nolocod"
MOST_LINES = 400

FLOORS = """
errors
units disk paths
identity
observe.events
proto
run
outer p2p.settings
trainer p2p.limits p2p.timing
p2p.libp2p_patches p2p.lean
p2p.transport
p2p.connections
p2p.host
p2p.keepalive
p2p.nat p2p.discovery p2p.membership
p2p.exchange p2p.registry
p2p.snapshots
p2p.mesh
observe
node
doctor watch api fleet
studies.daemons studies.pages
studies.sim
studies.lab studies.testnet
commands
cli
__main__
"""
"""From the ground up. Rooms on one floor do not import each other."""

LIBRARIES = {
    "libp2p": "p2p",
    "multiaddr": "p2p",
    "noise": "p2p.transport",
    "miniupnpc": "p2p.nat",
    "torch": "outer.step outer.codec trainer studies doctor.training api.optimizer",
    "transformers": "trainer",
    "lm_eval": "trainer.tasks",
    "peft": "trainer",
    "bitsandbytes": "trainer.quantized",
    "tokenizers": "trainer",
    "safetensors": "trainer",
    "datasets": "trainer",
    "fsspec": "trainer",
    "jinja2": "trainer",
    "huggingface_hub": "trainer",
    "pyarrow": "trainer",
    "numpy": "trainer studies outer.codec",
    "numba": "outer.codec.kernels",
    "google": "proto p2p run",
    "prometheus_client": "observe.metrics observe.run.metrics",
    "h11": "observe.status",
    "rich": "observe.status commands studies doctor",
    "shtab": "commands",
    "base58": "identity",
    "cryptography": "identity proto p2p node.identity_backup",
    "blake3": "proto run outer trainer p2p studies.sim",
    "msgspec": "proto run node trainer observe doctor p2p studies commands cli api fleet",
    "pynvml": "node.sensors",
    "psutil": "p2p node trainer doctor watch studies",
    "trio": "outer.loop trainer p2p observe.status node doctor watch studies commands fleet",
    "trio_typing": "trainer p2p observe.status node watch studies",
}
"""Who may use what is not ours and not Python's. The network process has no torch: `test_importing_does_nothing`."""

FORBIDDEN = {
    "proto": "trio asyncio socket select selectors ssl time datetime random secrets threading os subprocess",
    "outer": "socket time random",
}
"""Modules of the standard library that a room must do without: time, chance and sockets are passed in."""
PRINTERS = ("cli", "commands")


def rooms() -> dict[str, int]:
    """Each room and its floor."""
    return {room: number for number, row in enumerate(FLOORS.split("\n")) for room in row.split()}


def imports(node: ast.AST, ours: frozenset[str], types: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted module name) of all imports at and below `node`; `types`: those for types only too."""
    match node:
        case ast.Import():
            yield from ((node.lineno, alias.name) for alias in node.names)
        case ast.ImportFrom():
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in ours else base
        case _:
            only_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            below = node.orelse if isinstance(node, ast.If) and only_types and not types else ast.iter_child_nodes(node)
            for child in below:
                yield from imports(child, ours, types)


def within(module: str, names: str) -> bool:
    """Whether `module` is, or lies below, one of `names`."""
    return any(module == name or module.startswith(f"{name}.") for name in names.split())


def room_of(module: str) -> str | None:
    """The longest room that holds `module` ("p2p.host")."""
    return max((room for room in rooms() if within(module, room)), key=len, default=None)


def forbidden(module: str, target: str) -> str | None:
    """Why `module` ("p2p.host") may not import `target` ("nolocod.outer.loop", "torch"); None if it may."""
    room = room_of(module)
    if room is None:
        return None
    if target.startswith("."):
        return "imports are absolute"
    root, _, inner = target.partition(".")
    if root == "nolocod":
        other = room_of(inner)
        if not inner or other == room or (other is not None and rooms()[other] < rooms()[room]):
            return None
        return f"{other or inner} is not below {room}"
    if root in sys.stdlib_module_names:
        without = any(within(module, one) and root in FORBIDDEN[one].split() for one in FORBIDDEN)
        return f"{room} does without {root}" if without else None
    users = LIBRARIES.get(root, "")
    return None if within(module, users) else f"{root} is used only in: {users or 'nothing of ours'}"


def modules(package: Path) -> dict[str, ast.Module]:
    """All modules but what protoc makes, by name ("p2p.host"; "p2p" for its __init__)."""
    paths = [path for path in sorted(package.rglob("*.py")) if not path.stem.endswith("_pb2")]
    named = {module_name(path, package): path for path in paths}
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in named.items() if name}


def module_name(path: Path, package: Path) -> str:
    """ "p2p.host" for nolocod/p2p/host.py, "p2p" for its __init__, "" for the package's own."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def violations(package: Path) -> list[str]:
    """What breaks the tables above, a line each."""
    trees = modules(package)
    ours = frozenset(f"nolocod.{name}" for name in trees) | {"nolocod.proto.nolocod_pb2"}
    found = []
    for name, tree in trees.items():
        if room_of(name) is None and any(not isinstance(one, ast.Expr) for one in tree.body):  # more than a docstring
            found.append(f"{name}:1 is in no room: give its room a floor")
            continue
        for line, target in imports(tree, ours):
            if reason := forbidden(name, target):
                found.append(f"{name}:{line} imports {target}: {reason}")
        if not within(name, " ".join(PRINTERS)):
            calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
            printing = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
            found += [f"{name}:{call.lineno} prints: only {' and '.join(PRINTERS)} do" for call in printing]
    return found


def circle(package: Path) -> list[str]:
    """Modules that need each other, types included, from one round to itself; empty if there are none."""
    trees = modules(package)
    ours = frozenset(f"nolocod.{name}" for name in trees)
    graph = {f"nolocod.{name}": {target for _, target in imports(tree, ours, types=True)} for name, tree in trees.items()}
    try:
        TopologicalSorter({name: (targets & ours) - {name} for name, targets in graph.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_keeps_to_its_floor() -> None:
    found = violations(PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_no_two_modules_need_each_other() -> None:
    assert circle(PACKAGE) == []


def test_a_circle_is_found_for_types_too(tmp_path: Path) -> None:
    (tmp_path / "nolocod" / "proto").mkdir(parents=True)
    (tmp_path / "nolocod" / "proto" / "one.py").write_text("from nolocod.proto import two")
    two = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nolocod.proto.one import x"
    (tmp_path / "nolocod" / "proto" / "two.py").write_text(two)
    assert set(circle(tmp_path / "nolocod")) == {"nolocod.proto.one", "nolocod.proto.two"}


def test_every_room_exists_and_says_what_belongs_there() -> None:
    trees = modules(PACKAGE)
    assert set(rooms()) <= set(trees), f"rooms without a module: {set(rooms()) - set(trees)}"
    packages = [module_name(path, PACKAGE) for path in PACKAGE.rglob("__init__.py")]
    silent = [name for name in packages if name and "Not here: " not in (ast.get_docstring(trees[name]) or "")]
    assert not silent, f"packages that do not say what belongs there and what does not: {silent}"


def test_no_module_is_too_long() -> None:
    lengths = {str(path): path.read_text().count("\n") for path in PACKAGE.rglob("*.py") if not path.stem.endswith("_pb2")}
    assert not {path: length for path, length in lengths.items() if length > MOST_LINES}


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("outer/loop", "import libp2p", "outer.loop:1 imports libp2p: libp2p is used only in: p2p"),
        ("outer/loop", "x = 1\ndef f():\n    import torch", "outer.loop:3 imports torch"),
        ("outer/loop", "from nolocod.p2p import host", "outer.loop:1 imports nolocod.p2p.host: p2p.host is not below outer"),
        ("p2p/host", "from nolocod.p2p import mesh", "p2p.host:1 imports nolocod.p2p.mesh"),
        ("proto/exchange", "import time", "proto.exchange:1 imports time: proto does without time"),
        ("trainer/model", "import libp2p.host", "imports libp2p.host"),
        ("observe/metrics", "from . import errors", "imports .: imports are absolute"),
        ("cli", "import torch", "imports torch: torch is used only in"),
        ("node/config", "if TYPE_CHECKING:\n    import trio\nelse:\n    import torch", "node.config:4 imports torch"),
        ("newcomer", "import os", "is in no room"),
        ("observe/logs", "print('hello')", "observe.logs:1 prints: only cli and commands do"),
    ],
)
def test_the_checker_catches(tmp_path: Path, module: str, source: str, message: str) -> None:
    package = tmp_path / "nolocod"
    (package / "p2p").mkdir(parents=True)
    for name in ("host", "mesh"):
        (package / "p2p" / f"{name}.py").touch()
    path = package / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    (found,) = violations(package)
    assert message in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("outer/loop", "import trio\nfrom nolocod import __version__\nfrom nolocod.proto.types import Offer"),
        ("units", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nolocod.p2p import host\n    import torch"),
        ("node/daemon", "from nolocod.trainer.process import TrainerProcess"),
        ("trainer/worker", "def main():\n    import torch\n    from nolocod.trainer.model import load"),
        ("cli", "from nolocod.p2p.host import open_host\nprint('hello')"),
    ],
)
def test_the_checker_lets_pass(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / "nolocod" / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert violations(tmp_path / "nolocod") == []


_PROBE = """
import sys, threading
found = []

def hook(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or event in ("socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.mkdir", "os.remove"):
        frame = sys._getframe(1)
        while frame and "site-packages" not in frame.f_code.co_filename:  # what others do is not ours to forbid
            if frame.f_code.co_filename.startswith(sys.argv[1]):
                found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} does {event} {args!r:.80} when imported")
                break
            frame = frame.f_back

sys.addaudithook(hook)
import importlib
for name in sys.argv[2:]:
    importlib.import_module(name)
    if threading.active_count() > 1:
        found.append(f"{name} starts a thread when imported: {threading.enumerate()}")
        break
heavy = {"torch", "transformers", "numpy", "pandas", "pyarrow", "datasets"} & set(sys.modules)
if heavy:
    found.append(f"the network process imports {sorted(heavy)}")
print("\\n".join(found))
"""


def network_modules() -> list[str]:
    """What the network process may import: everything but what computes."""
    computing = "outer.step outer.codec trainer studies doctor.training api.optimizer"
    handle = "trainer.process trainer.pipe trainer.boxes"
    names = [name for name in modules(PACKAGE) if name != "__main__"]
    return [f"nolocod.{name}" for name in names if not within(name, computing) or within(name, handle)]


def probe(package: Path, *modules: str) -> str:
    """Import `modules` in a fresh interpreter; what they did meanwhile, one line each."""
    command = [sys.executable, "-B", "-c", _PROBE, str(package), *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=package.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_does_nothing_and_the_network_process_never_imports_torch() -> None:
    assert probe(PACKAGE, *network_modules()) == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import socket\nsocket.create_server(('127.0.0.1', 0))", "two.py:2 does socket.bind"),
        ("open('left-behind', 'w').close()", "two.py:1 does open"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "starts a thread"),
        ("import numpy", "imports ['numpy']"),
    ],
)
def test_the_probe_catches(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "two.py").write_text(source)
    assert message in probe(tmp_path / "pack", "pack.two")
