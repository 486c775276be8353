"""Who may import whom. The table below is the architecture; the code is held to it.

Imports inside functions count too. Imports for types only (under TYPE_CHECKING) are free: they bind
nothing at run time.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parent.parent / "nolocod"


@dataclass(frozen=True)
class Layer:
    """What one layer may import: layers of ours, and packages that are not ours or Python's."""

    ours: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    """Modules of the standard library that it must do without."""


def layer(ours: str = "", packages: str = "", never: str = "") -> Layer:
    return Layer(frozenset(ours.split()), frozenset(packages.split()), frozenset(never.split()))


TORCH = "torch transformers safetensors tokenizers datasets huggingface_hub pyarrow numpy"
SANS_IO = "trio asyncio socket select selectors ssl time datetime random secrets threading os pathlib subprocess"

LAYERS = {
    "errors": layer(),
    "identity": layer("errors", "base58 cryptography"),
    "events": layer("identity"),
    "terms": layer("events identity", "blake3 msgspec"),
    "manifest": layer("errors identity", "msgspec blake3"),
    "config": layer("errors identity"),
    "presets": layer("errors manifest", "msgspec"),
    "disk": layer("errors"),
    "processes": layer(),
    "pages": layer("disk errors"),
    "datadir": layer("config disk errors identity manifest"),
    "access": layer("proto errors identity", "google blake3", SANS_IO),
    "papers": layer("access config datadir disk errors identity manifest", "msgspec blake3"),
    "evidence": layer("proto disk errors identity"),
    "backup": layer("disk errors identity", "cryptography"),
    "outer": layer("", "torch"),
    "codec": layer("errors manifest", "torch blake3"),
    "metrics": layer("errors events identity", "prometheus_client"),
    "logs": layer("events identity"),
    "status": layer("config datadir disk errors events identity logs", "h11 msgspec rich trio trio_typing"),
    "proto": layer("errors identity terms", "google cryptography blake3", SANS_IO),
    "rounds": layer("events terms errors identity", "trio", "socket time random"),
    "p2p": layer(
        "proto manifest config disk events terms errors identity access papers",
        "libp2p miniupnpc multiaddr trio trio_typing msgspec psutil blake3 google cryptography noise",
    ),
    "sim.learner": layer("sim presets manifest identity terms trainer", "msgspec torch"),
    "sim": layer("evidence p2p proto rounds events terms errors identity", "trio msgspec blake3"),
    # Models of times and of walks: no training, no network.
    "lab.results": layer("errors", "msgspec"),
    "lab.scaling": layer("lab.crowds", "numpy"),
    "lab.crowds": layer("lab.results sim"),
    "lab.walks": layer("outer", "torch"),
    "lab.figures": layer("lab.compare lab.scaling lab.spread lab.walks errors", "matplotlib"),
    "trainer": layer("outer codec manifest config disk errors events terms identity", f"{TORCH} msgspec blake3 psutil"),
    # The doctor's child, which may try what the trainer would do.
    "doctor.training": layer("doctor.findings trainer manifest errors", "torch msgspec psutil"),
    # The parent's side of the trainer lives in the network process, which never imports torch.
    "trainer.process": layer("trainer.pipe trainer.boxes errors events terms identity manifest", "trio trio_typing msgspec"),
    "trainer.pipe": layer("errors events terms manifest", "msgspec"),
    "trainer.boxes": layer("errors terms"),
    "survey": layer("events", "trio"),
    "schedule": layer("config errors events", "psutil trio"),
    "stint": layer("schedule config errors events identity manifest rounds terms trainer.process", "trio trio_typing"),
    "supervisor": layer("events", "trio"),
    "daemon": layer(
        "supervisor survey schedule stint rounds p2p trainer.process trainer.pipe trainer.boxes metrics status config datadir "
        "manifest identity events terms errors logs",
        "trio trio_typing",
    ),
    # The one measurement that needs stock py-libp2p, and a certificate, to have something beside ours.
    "benchmarks.carriers": layer("benchmarks.relayed config identity p2p", "cryptography libp2p multiaddr trio"),
}
TOP = frozenset({"cli", "commands", "__main__", "terminal", "testnet", "benchmarks", "lab", "doctor", "soak"})
"""What people call: it may import anything of ours. Only `cli` and `commands` print."""
TOP_PACKAGES = frozenset({"trio", "msgspec", "rich", "prometheus_client", "psutil"})


@dataclass(frozen=True)
class Import:
    line: int
    target: str
    """A dotted module name; "nolocod.x" for ours."""


def imports(node: ast.AST, ours: frozenset[str]) -> Iterator[Import]:
    """All imports at and below `node` that run; `ours` are the names of our own modules."""
    match node:
        case ast.Import():
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        case ast.ImportFrom():
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield Import(node.lineno, whole if whole in ours else base)
        case _:
            only_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            for child in node.orelse if isinstance(node, ast.If) and only_types else ast.iter_child_nodes(node):
                yield from imports(child, ours)


def layer_of(module: str, names: frozenset[str]) -> str | None:
    """The longest of `names` that is `module` ("p2p.host") or a package above it."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in names), None)


def forbidden(module: str, target: str) -> str | None:
    """Why `module` ("p2p.host") may not import `target` ("nolocod.outer.loop", "torch"); None if it may."""
    name = layer_of(module, frozenset(LAYERS) | TOP)
    if name is None:
        return "this module belongs to no layer; give it a row in LAYERS"
    if target.startswith("."):
        return "imports are absolute"
    root, _, inner = target.partition(".")
    if root == "nolocod":
        free = name in TOP or inner == "" or layer_of(inner, frozenset({name})) is not None
        allowed = free or layer_of(inner, LAYERS[name].ours) is not None
        return None if allowed else f"{name} may import only: {' '.join(sorted(LAYERS[name].ours)) or 'nothing of ours'}"
    if root in sys.stdlib_module_names:
        return f"{name} does without {root}" if name not in TOP and root in LAYERS[name].never else None
    packages = TOP_PACKAGES if name in TOP else LAYERS[name].packages
    return None if root in packages else f"{name} may import only the packages: {' '.join(sorted(packages)) or 'none'}"


def violations(package: Path) -> list[str]:
    """One line per forbidden import or print below `package`."""
    files = {path: module_name(path, package) for path in sorted(package.rglob("*.py")) if not path.stem.endswith("_pb2")}
    ours = frozenset(f"nolocod.{name}" for name in files.values()) | {"nolocod.proto.nolocod_pb2"}
    found = []
    for path, module in files.items():
        if module == "":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        shown = path.relative_to(package.parent)
        for one in imports(tree, ours):
            reason = forbidden(module, one.target)
            if reason:
                found.append(f"{shown}:{one.line} imports {one.target}: {reason}")
        if module.partition(".")[0] not in ("cli", "commands"):
            found += [f"{shown}:{line} prints: only cli and commands do" for line in prints(tree)]
    return found


def module_name(path: Path, package: Path) -> str:
    """ "p2p.host" for nolocod/p2p/host.py, "p2p" for its __init__, "" for the package's own."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def prints(tree: ast.AST) -> list[int]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_every_module_keeps_to_its_layer() -> None:
    found = violations(PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_every_row_of_the_table_is_about_a_module_that_exists() -> None:
    rows = {*LAYERS, *TOP}
    present = {module_name(path, PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert rows <= present, f"rows without a module: {rows - present}"


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("rounds", "import libp2p", "nolocod/rounds.py:1 imports libp2p: rounds may import only the packages: trio"),
        ("rounds", "x = 1\ndef f():\n    import torch", "nolocod/rounds.py:3 imports torch"),
        ("rounds", "from nolocod.p2p import host", "nolocod/rounds.py:1 imports nolocod.p2p: rounds may import only"),
        ("p2p/host", "from nolocod import rounds", "nolocod/p2p/host.py:1 imports nolocod.outer.loop"),
        ("proto/exchange", "import time", "nolocod/proto/exchange.py:1 imports time: proto does without time"),
        ("trainer/process", "from nolocod.trainer.model import load", "imports nolocod.trainer.model"),
        ("trainer/model", "import libp2p.host", "imports libp2p.host"),
        ("metrics", "from . import errors", "imports .: imports are absolute"),
        ("cli", "import torch", "imports torch: cli may import only the packages: msgspec"),
        ("config", "if TYPE_CHECKING:\n    import trio\nelse:\n    import torch", "nolocod/config.py:4 imports torch"),
        ("newcomer", "import os", "belongs to no layer"),
        ("logs", "print('hello')", "nolocod/logs.py:1 prints: only cli and commands do"),
    ],
)
def test_the_checker_catches(tmp_path: Path, module: str, source: str, message: str) -> None:
    package = tmp_path / "nolocod"
    (package / "p2p").mkdir(parents=True)
    (package / "rounds.py").touch()
    path = package / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    (found,) = violations(package)
    assert message in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rounds", "import trio\nfrom nolocod import __version__\nfrom nolocod.proto.types import Offer"),
        ("config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nolocod.p2p import host\n    import torch"),
        ("daemon", "from nolocod.trainer.process import TrainerProcess"),
        ("trainer/worker", "def main():\n    import torch\n    from nolocod.trainer.model import load"),
        ("cli", "from nolocod.p2p import host\nprint('hello')"),
    ],
)
def test_the_checker_lets_pass(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / "nolocod" / f"{module}.py"
    path.parent.mkdir(parents=True)
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
    """What the network process may import: everything but the trainer's own side."""
    names = [module_name(path, PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    return [f"nolocod.{name}" for name in names if name not in ("", "__main__") and not _may_use_torch(name)]


def _may_use_torch(name: str) -> bool:
    if layer_of(name, frozenset({"lab"})):  # no part of a node
        return True
    row = layer_of(name, frozenset(LAYERS) | TOP)
    return row in LAYERS and "torch" in LAYERS[str(row)].packages and name != "trainer"


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
