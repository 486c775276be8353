"""From nothing to a node that keeps running: three questions, or their flags, and an entry for the service manager."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nolocod.commands import node
from nolocod.errors import DataDirInUseError, NoBootstrapError, NotRunningError, ServiceError, UsageError, WrongRunError
from nolocod.identity import load_or_create
from nolocod.node import autostart, data_directory
from nolocod.node.settings import LiveSettings, read_settings
from nolocod.paths import DataDir
from nolocod.run.manifest import stored_manifest

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from nolocod.commands import Commands
    from nolocod.node.autostart import Service
    from nolocod.p2p.settings import MeshSettings
    from nolocod.run.manifest import Sealed

T = TypeVar("T")

_USES = {
    "all": {},
    "half": {"duty": "50%", "nice": "19"},
    "idle": {"pause-when-used": "10m", "nice": "19"},
}
"""How much of the machine, as settings of `nolocod set`."""
_OF_USE = ("duty", "threads", "nice", "pause-when-used")
"""Settings that an answer takes back where it does not name them."""
_UP_WITHIN = 60.0
_NOT_TOLD = {"help", "name", "run", "bootstrap", "invite", "network_key", "data_dir", "use", "autostart", "remove", "json"}
"""Options that are answered otherwise: the invitation and the network's key are kept in the data directory by then."""


def add_to(commands: Commands) -> None:
    """up."""
    about = (
        "Join a run and keep running without a terminal: asks which run, how much of this machine, and whether to start with "
        "the machine, and writes a systemd user unit (a launchd agent on macOS, a task of Windows in WSL)."
    )
    example = "nolocod up verse --bootstrap /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW… --use half --autostart yes"
    up = commands.add_here("up", _up, about, example)
    up.set_defaults(parser=up)
    add = up.add_argument
    use = "how much of this machine: all, half, idle (while nobody uses it), or settings: 'duty=30%% threads=2'"
    add("--use", metavar="SHARE", help=use)
    add("--autostart", metavar="yes|no", help="start with the machine")
    add("--remove", action="store_true", help="stop the node and take the entry away; the data directory stays")
    add("--json", action="store_true", help="print one JSON object")
    node.join_options(up)


def _up(options: argparse.Namespace) -> None:
    options.data_dir = options.data_dir.expanduser().absolute()
    if options.remove:
        _remove(options)
        return
    paths, here = DataDir(options.data_dir), partial(autostart.service, env=os.environ, platform=sys.platform)
    with suppress(NotRunningError):
        running = data_directory.find_running(paths)
        if not here(paths, (), start=False).file.exists():  # nor could the entry's node start
            raise DataDirInUseError(f"{paths.root} is held by process {running.pid}.", remedy="Stop it first, with Ctrl-C.")
    stored = stored_manifest(paths)
    asked = options.name or options.bootstrap or options.invite
    if stored is None and not asked:
        _which(options, paths)
    told = _answer(options.use, "--use", "How much of this machine? all, half, idle, or settings like duty=30% threads=2", _use)
    start = _answer(options.autostart, "--autostart", "Start with the machine? yes or no", _yes)
    if stored is None or asked:
        node.find(options)
    config = node.node_config(options)
    sealed = stored if stored is not None and not (options.invite or options.network_key) else _found(config.mesh, options)
    if not sealed.run_id.startswith(options.run):
        raise WrongRunError(f"{paths.root} belongs to run {sealed.manifest.name} ({sealed.run_id[:12]}).")
    if sealed.manifest.data.from_node and options.data is None and sys.stdin.isatty():
        options.data = _answer(None, "--data", "Which text of yours may it train on? A file or a folder", _path)
    sealed.manifest.data.check_given(options.data)
    command = _command(options, sealed, founded=stored is not None)
    service = here(paths, command, start=start)
    data_directory.make(paths)
    LiveSettings(config.settings, paths.settings).change(dict.fromkeys(_OF_USE, "") | told)
    failed = autostart.install(service)
    http = _wait(service, paths) if service.managed else ""
    if options.json:
        fields = {"run_id": sealed.run_id, "run_name": sealed.manifest.name, "file": str(service.file), "command": command}
        print(json.dumps(fields | {"autostart": start, "http": http, "refused": failed}))
        return
    print(f"{service.file}: run {sealed.manifest.name} ({sealed.run_id[:12]}) in {paths.root}")
    for line in failed:
        print(f"`{line}` was refused: the node starts when you log in", file=sys.stderr)
    if not service.managed:
        print(f"{service.manager} is not here. Start the node yourself:", f"  {shlex.join(command)}", sep="\n")
        return
    print(f"the node runs: http://{http}")
    print("see it: nolocod status; change it: nolocod set; end it: nolocod up --remove")


def _remove(options: argparse.Namespace) -> None:
    service = autostart.service(DataDir(options.data_dir), (), os.environ, sys.platform, start=False)
    failed = autostart.remove(service)
    if options.json:
        print(json.dumps({"file": str(service.file), "removed": failed is not None, "refused": failed or []}))
        return
    for line in failed or ():
        print(f"`{line}` was refused: the node may still run", file=sys.stderr)
    print(f"{service.file}: {'there is none' if failed is None else 'removed; the data directory is kept'}")


def _answer(given: str | None, flag: str, question: str, read: Callable[[str], T]) -> T:
    """What `read` makes of the flag, or of the answer; a bad answer is asked again."""
    if given is not None:
        return read(given)
    while sys.stdin.isatty():
        print(f"{question}: ", end="", file=sys.stderr, flush=True)
        try:
            return read(input().strip())
        except UsageError as error:
            print(error.cause, file=sys.stderr)
        except EOFError:
            break
    raise UsageError(f"{flag} is missing, and nobody can be asked here.", remedy=f"{question}: give {flag}.")


def _which(options: argparse.Namespace, paths: DataDir) -> None:
    """Ask for the run: one of those that are announced, if a node is known that can be asked for them, or any."""
    from nolocod.commands.registry import bootstraps, line, listed

    runs = []
    if sys.stdin.isatty():
        with suppress(UsageError, NoBootstrapError):
            runs = [one for one in listed(bootstraps((), paths)) if not one.said.withdrawn]
    for number, one in enumerate(runs, 1):
        print(f"{number}. {line(one)}", file=sys.stderr)

    def read(text: str) -> None:
        if text.isdecimal() and 0 < int(text) <= len(runs):
            said = runs[int(text) - 1].said
            options.run, options.bootstrap = said.run_id, list(said.addresses)
        elif not text:
            raise UsageError("that names no run.")
        else:
            options.name = text

    by_number = f"a number from 1 to {len(runs)}, " if runs else ""
    _answer(None, "NAME or LINK", f"Which run? {by_number}its link (nolocod:…), or the address of one of its nodes", read)


def _use(text: str) -> dict[str, str]:
    told: dict[str, str] = {}
    for word in text.split() or [""]:
        key, equals, value = word.partition("=")
        if not equals and key not in _USES:
            raise UsageError(
                f"--use {word!r} is none of {', '.join(_USES)}, nor KEY=VALUE.", remedy="See `nolocod set --help`."
            )
        told |= {key: value} if equals else _USES[key]
    read_settings(told, flag="--use ")
    return told


def _yes(text: str) -> bool:
    if text.lower() not in ("yes", "no", "y", "n"):
        raise UsageError(f"--autostart {text!r} is neither yes nor no.")
    return text.lower().startswith("y")


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _found(mesh: MeshSettings, options: argparse.Namespace) -> Sealed:
    """The run as its nodes tell it; nothing but an identity, and what came with an invitation, is kept of it."""
    import trio

    from nolocod.watch.service import seeking

    async def look() -> Sealed:
        async with seeking(mesh, lambda _: None) as (seeker, run_id):
            options.bootstrap = [f"{where}/p2p/{peer}" for peer, (where, *_) in seeker.bootstrap]
            return await seeker.find(run_id)

    with data_directory.hold(mesh.paths):
        return trio.run(look)


def _command(options: argparse.Namespace, sealed: Sealed, *, founded: bool) -> list[str]:
    """The whole command line of the node, with the flags that were given; paths are absolute."""
    root = options.data_dir
    words = [sys.executable, "-P", "-m", "nolocod"]  # -P: what lies in the folder it starts in is not imported
    if founded and load_or_create(DataDir(root).identity).peer_id == sealed.manifest.owner:
        words += ["start", f"--data-dir={root}"]
    else:
        words += ["join", f"--data-dir={root}", f"--run={sealed.run_id}", *(f"--bootstrap={one}" for one in options.bootstrap)]
    for action in options.parser._actions:
        value = getattr(options, action.dest, action.default)
        if action.dest in _NOT_TOLD or value == action.default:
            continue
        for one in value if isinstance(value, list) else [value]:
            text = one.expanduser().absolute() if isinstance(one, Path) else one
            words.append(action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]}={text}")
    return words


def _wait(service: Service, paths: DataDir) -> str:
    """Where the node serves its pages, once it does. ServiceError if it does not in time."""
    end = time.monotonic() + _UP_WITHIN
    while time.monotonic() < end:
        with suppress(NotRunningError):
            return data_directory.find_running(paths).http
        time.sleep(0.3)
    cause = f"the node has not come up within {_UP_WITHIN:.0f} s; {service.manager} tries it again."
    raise ServiceError(cause, remedy=f"See `{service.log}`.")
