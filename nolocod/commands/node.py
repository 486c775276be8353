"""Commands that bring up a node, look at one, or say why it cannot come up."""

from __future__ import annotations

import argparse
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nolocod.commands import bootstrap_option
from nolocod.errors import SettingError, UsageError
from nolocod.node.config import NodeConfig
from nolocod.node.settings import KEYS, Settings, read_settings
from nolocod.p2p.settings import Access, Allowance, MeshSettings, Relaying
from nolocod.paths import DataDir
from nolocod.run.manifest import RUN_ID_DIGITS, stored_manifest
from nolocod.trainer.devices import is_all, named_devices
from nolocod.units import Address, parse_name, parse_rate, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.commands import Commands
    from nolocod.observe.events import Event, Started
    from nolocod.run.manifest import Manifest

_LEAST_DIGITS = 12
_AS_GIVEN = (
    *("http_token", "http_open_metrics", "data", "base", "base_bits", "spare_memory", "compile", "tf32"),
    *("clip_change", "max_uploads"),
    *("checkpoint_every", "linger", "stop_within", "loop"),
)
"""Options that are settings of the same name."""


def add_to(commands: Commands) -> None:
    """start, join, status, set, stop, doctor."""
    about = "Start a node of the run in its data directory, from its last checkpoint if there is one."
    _node_options(commands.add_here("start", _start, about, "nolocod start --data texts/ --listen 0.0.0.0:4001"))
    about = "Join a run through any of its nodes. Later starts need no address."
    join = commands.add_here("join", _join, about, "nolocod join verse --bootstrap /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…")
    join_options(join)
    about = "Show what a running node does, and what it waits for."
    status = commands.add_here("status", _status, about, "nolocod status --watch")
    status.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    status.add_argument("--json", action="store_true", help="print one JSON object (with --watch: one per line)")
    about = "Change what a running node may use of this machine, and when. It holds over restarts; KEY= brings the flag back."
    change = commands.add_here("set", _set, about, "nolocod set duty=50% max-temperature=80 pause-when-used=10m")
    change.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=f"of {', '.join(KEYS)}; none shows what counts")
    change.add_argument("--json", action="store_true", help="print one JSON object")
    about = "Stop a running node in order, and wait until it has ended."
    stop = commands.add_here("stop", _stop, about, "nolocod stop --data-dir /srv/node-1")
    stop.add_argument("--within", type=float, default=120.0, metavar="SECONDS", help="wait for so long (%(default)s)")
    about = "Find out what keeps this machine from joining a run. It changes nothing."
    doctor = commands.add_here("doctor", _doctor, about, "nolocod doctor --bootstrap /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…")
    _reach_options(doctor)
    _training_options(doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")


def join_options(parser: argparse.ArgumentParser) -> None:
    """What `join` is told: which run, and all about this node."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME|LINK", help="an announced run's name (`nolocod runs`), a run's link, or an address")
    add("--run", default="", metavar="ID", help="the run to join, by its id or the first 12 digits of it or more (any run)")
    _node_options(parser)


def _reach_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    bootstrap_option(parser)
    add("--listen", action="append", metavar="HOST:PORT", help="listen for peers here; repeatable (0.0.0.0:0 and [::]:0)")
    add(
        "--announce",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="tell peers this address instead of our own; repeatable",
    )
    add("--no-upnp", action="store_true", help="do not ask the router to forward a port")
    add("--network-key", type=Path, metavar="FILE", help="the key of a private network; it is kept for later starts")
    add(
        "--allow", type=Path, metavar="FILE", help="only these peer ids may connect, one per line; a changed file is read again"
    )
    add("--invite", default="", metavar="TOKEN", help="the token from the run's owner: addresses, network key and admission")


def _training_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, metavar="PATH", help="training text, a file or a folder, where the run leaves it to each node")
    add(
        "--devices",
        "--device",
        default="auto",
        metavar="NAMES",
        help="train on: auto, cpu, cuda:1, mps, several GPUs (0,1 or all), shard:0,1 with a part of the model on each "
        "(so too where one does not fit it), cpu:2 for two processes (%(default)s)",
    )


def _node_options(parser: argparse.ArgumentParser) -> None:
    _reach_options(parser)
    _training_options(parser)
    add = parser.add_argument
    add("--no-relay", action="store_true", help="relay for nobody, and use no relay")
    add("--relay-only", action="store_true", help="show none of our addresses; connect directly only to bootstraps and relays")
    add("--relay-rate", default="20Mbit", metavar="RATE", help="relay at most this much for others (%(default)s)")
    add("--relay-peers", type=int, default=64, metavar="N", help="relay for at most so many peers (%(default)s)")
    add("--base", type=Path, metavar="DIR", help="the model that the run starts from, if it is on this machine already")
    add("--http", default="127.0.0.1:0", metavar="HOST:PORT", help="serve the status page and metrics here (%(default)s)")
    add(
        "--http-token",
        type=Path,
        metavar="FILE",
        help="the token that readers of the pages need (http.token; none on loopback)",
    )
    add("--http-open-metrics", action="store_true", help="let everybody read /metrics without a token")
    add("--threads", metavar="N", help="CPU threads of the trainer (0: torch decides)")
    add("--nice", metavar="N", help="priority of the trainer: 19 lets all other programs go first (0)")
    add("--duty", metavar="SHARE", help="compute in this share of the time, like 50%% (100%%)")
    add("--max-temperature", metavar="C", help="compute less, or pause, above so many °C of the GPU or else the processor")
    add("--max-power", metavar="W", help="compute less, or pause, above so many watts of the GPU")
    add(
        "--base-bits",
        type=int,
        choices=(16, 8, 4),
        default=16,
        help="in which the base beside an adapter lies here (%(default)s)",
    )
    add("--spare-memory", action="store_true", help="compute layers twice, and keep less of them meanwhile")
    add("--compile", action="store_true", help="have torch compile the model's layers, where it can: to load takes longer")
    add("--tf32", action="store_true", help="let an NVIDIA GPU round what it multiplies in float32 (TF32)")
    add(
        "--clip-change",
        type=float,
        metavar="NORM",
        help="tell partners no more of what was trained here than this in one exchange",
    )
    add("--max-uploads", type=int, default=2, metavar="N", help="newcomers that get weights at the same time (%(default)s)")
    add("--max-connections", type=int, default=256, metavar="N", help="connections to peers at the same time (%(default)s)")
    add("--max-per-address", type=int, default=64, metavar="N", help="connections from one /24 or /48 (%(default)s)")
    add("--max-upload", metavar="RATE", help="limit on all connections together, per second, like 20Mbit or 2.5MB")
    add("--max-download", metavar="RATE", help="the same for incoming bytes")
    add("--monthly-budget", metavar="BYTES", help="limit per calendar month (UTC), up and down together, like 200GB")
    add(
        "--hours",
        action="append",
        metavar="HH:MM-HH:MM",
        help="train only in these spans (local time); commas, or repeat",
    )
    on = "store_const"
    add("--pause-on-battery", action=on, const="yes", help="train only on mains power")
    add("--pause-on-metered", action=on, const="yes", help="train only where the network does not cost by the byte")
    add("--pause-when-used", metavar="SPAN", help="train only once nobody has touched the machine for so long, like 10m")
    add("--pause-when-gpu-used", metavar="BYTES", help="train only while others hold less of the GPU's memory, like 1GB")
    add("--checkpoint-every", type=float, metavar="SECONDS", help="time between two checkpoints (60 or more, by their size)")
    add(
        "--linger",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="serve weights for so long after the run's end (%(default)s)",
    )
    add(
        "--stop-within",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="end so soon after SIGTERM, with the last checkpoint on the disk if no new one fits in (%(default)s)",
    )
    add(
        "--name",
        dest="called",
        default="",
        metavar="NAME",
        help="what others see this node called; it is kept for later starts",
    )
    add("--loop", type=_descriptors, help=argparse.SUPPRESS)  # what nolocod/api/swarm.py starts
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="(%(default)s)")
    add("--log-format", default="human", choices=["human", "json"], help="json: one object per line (%(default)s)")


def _descriptors(text: str) -> tuple[int, int]:
    control, memory = map(int, text.split(","))
    return control, memory


def node_config(options: argparse.Namespace) -> NodeConfig:
    bounds = (("max_uploads", 0), ("max_connections", 8), ("max_per_address", 1))
    for name, least in (*bounds, ("checkpoint_every", 0), ("linger", 0), ("stop_within", 5)):
        if not (getattr(options, name) is None or getattr(options, name) >= least):  # NaN is not either
            raise UsageError(f"--{name.replace('_', '-')} cannot be {getattr(options, name):g}.")
    if options.loop is not None and (is_all(options.devices) or len(named_devices(options.devices)) > 1):
        raise UsageError("--devices names several, and a loop of your own trains on the device of its parameters.")
    if options.clip_change is not None and not 0 < options.clip_change < math.inf:
        raise UsageError(
            f"--clip-change cannot be {options.clip_change:g}. It is a length above 0, of the change of all weights."
        )
    connections = {"connections": options.max_connections, "connections_per_address": options.max_per_address}
    return NodeConfig(
        mesh=_mesh_settings(options, **connections, relaying=_relaying(options)),
        http=Address.parse(options.http, "--http"),
        allowance=_allowance(options),
        settings=_settings(options),
        **{name: getattr(options, name) for name in _AS_GIVEN},
    )


def _settings(options: argparse.Namespace) -> Settings:
    given = {key: getattr(options, key.replace("-", "_"), None) for key in KEYS}
    told = {key: ",".join(text) if isinstance(text, list) else text for key, text in given.items()}
    return read_settings({key: text for key, text in told.items() if text is not None})


def _mesh_settings(options: argparse.Namespace, **more: Any) -> MeshSettings:  # noqa: ANN401  # settings by their names
    return MeshSettings(
        data_dir=options.data_dir,
        bootstrap=tuple(options.bootstrap),
        run=getattr(options, "run", "").lower(),  # a flag of `join` alone
        listen=tuple(Address.parse(text, "--listen") for text in options.listen or ()) or MeshSettings.listen,
        announce=tuple(options.announce),
        access=Access(options.network_key, options.allow, options.invite),
        upnp=not options.no_upnp,
        name=parse_name(getattr(options, "called", ""), "--name"),
        **more,
    )


def _relaying(options: argparse.Namespace) -> Relaying:
    if options.no_relay and options.relay_only:
        raise UsageError("--no-relay and --relay-only exclude each other.")
    if options.relay_peers < 0:
        raise UsageError(f"--relay-peers cannot be {options.relay_peers}.", remedy="0 turns relaying off.")
    wanted = not options.no_relay
    return Relaying(
        serve=wanted and options.relay_peers > 0,
        use=wanted,
        only=options.relay_only,
        rate=parse_rate(options.relay_rate, "--relay-rate"),
        reservations=options.relay_peers,
    )


def _allowance(options: argparse.Namespace) -> Allowance:
    return Allowance(
        up=None if options.max_upload is None else parse_rate(options.max_upload, "--max-upload"),
        down=None if options.max_download is None else parse_rate(options.max_download, "--max-download"),
        monthly=None if options.monthly_budget is None else parse_size(options.monthly_budget, "--monthly-budget"),
    )


def _start(options: argparse.Namespace) -> None:
    if stored_manifest(DataDir(options.data_dir)) is None:
        raise UsageError(
            f"{options.data_dir} belongs to no run.",
            remedy="Create one with `nolocod create RUN.toml`, or join one with `nolocod join --bootstrap ADDRESS`.",
        )
    _run(options, may_seed=True)


def _join(options: argparse.Namespace) -> None:
    find(options)
    _run(options, may_seed=False)


def find(options: argparse.Namespace) -> None:
    """Put the run that a name or link means into `options`, and check that a run can be found with them."""
    if options.name is not None:
        from nolocod.commands.registry import found_by

        if options.run:
            raise UsageError("NAME or LINK and --run exclude each other.")
        options.run, options.bootstrap = found_by(options.name, options.bootstrap, DataDir(options.data_dir))
    if not (options.bootstrap or options.invite) and stored_manifest(DataDir(options.data_dir)) is None:
        raise UsageError(
            "a first join needs --bootstrap or --invite.",
            remedy="Ask the owner of the first node for the line that it printed.",
        )
    if options.run and not is_run_id(options.run):
        raise UsageError(
            f"--run {options.run!r} is no run id.",
            remedy=f"A run id has {RUN_ID_DIGITS} hex digits; give all, or the first {_LEAST_DIGITS} or more.",
        )


def is_run_id(text: str) -> bool:
    """Whether it is a run's id, or enough of its beginning."""
    return re.fullmatch(f"[0-9a-fA-F]{{{_LEAST_DIGITS},{RUN_ID_DIGITS}}}", text) is not None


def _run(options: argparse.Namespace, *, may_seed: bool) -> None:
    config = node_config(options)  # before the imports below, which take a second
    from nolocod.trainer.settled import importing

    with importing():
        import trio

        from nolocod.node.daemon import run_node
        from nolocod.observe import logs

    logs.set_up(options.log_level, options.log_format)
    follower = logs.LogFollower()
    # what reads JSON often reads both outputs; the event `started` has what the welcome says
    followers: list[Callable[[Event], None]] = [follower.follow]
    if options.log_format == "human":
        followers.insert(0, partial(welcome, config.paths))

    trio.run(partial(run_node, config, may_seed=may_seed, followers=followers))


def welcome(paths: DataDir, event: Event) -> None:
    """Print who the node is, where its page is, and how others join."""
    from nolocod.observe.events import Started

    if isinstance(event, Started):
        print(f"node {event.peer_id} of run {event.run_name} ({event.run_id[:12]})")
        print(f"status and metrics: http://{event.http}")
        sealed = stored_manifest(paths)
        assert sealed is not None  # a node tells that it has started once it knows its run
        print(*_ways_in(sealed.manifest, paths, event), sep="\n", flush=True)


def _ways_in(manifest: Manifest, paths: DataDir, started: Started) -> list[str]:
    """How others join: lines to paste, or where their token comes from."""
    more = " --data PATH" if manifest.data.from_node else ""
    if manifest.access == "invited":
        ours = manifest.owner == started.peer_id
        source = f"`nolocod invite --data-dir {paths.root}`" if ours else "the run's owner (`nolocod invite`)"
        return [f"others join with a token from {source}:", f"  nolocod join --invite TOKEN{more}"]
    key = " --network-key FILE" if paths.network_key.exists() else ""
    return [
        "others join with:",
        *(f"  nolocod join --bootstrap {address} --run {started.run_id}{key}{more}" for address in started.addresses),
    ]


def _status(options: argparse.Namespace) -> None:
    from nolocod.commands import terminal

    terminal.show_status(DataDir(options.data_dir), watch=options.watch, as_json=options.json)


def _set(options: argparse.Namespace) -> None:
    told = {}
    for setting in options.settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise SettingError(f"{setting!r} is not KEY=VALUE.")
        told[key] = value
    from nolocod.commands import terminal

    terminal.show_limits(DataDir(options.data_dir), told, as_json=options.json)


def _stop(options: argparse.Namespace) -> None:
    from nolocod.node import data_directory

    ended = data_directory.stop(DataDir(options.data_dir), options.within)
    print("stopped" if ended else f"no daemon runs in {options.data_dir}")


def _doctor(options: argparse.Namespace) -> None:
    settings = _mesh_settings(options)
    from nolocod.doctor import show

    if not show.examined(settings, options.devices, options.data, as_json=options.json):
        sys.exit(1)
