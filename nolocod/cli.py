"""The command line. Only here is anything printed; only here do errors become exit statuses."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nolocod import __version__, datadir
from nolocod.config import Access, Address, Allowance, DataDir, Hours, NodeConfig, Relaying, parse_rate, parse_size, parse_span
from nolocod.errors import NolocodError, NothingToUseError, NotRunningError, UsageError
from nolocod.events import Started

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nolocod.events import Event
    from nolocod.identity import Identity
    from nolocod.manifest import Sealed


class _Parser(argparse.ArgumentParser):
    """argparse with our one way of saying what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", remedy=f"See `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with 0, or with the status of the error."""
    try:
        parser = _parser()
        options = parser.parse_args(arguments)
        if options.command is None:
            parser.print_help()
            sys.exit(UsageError.entry.exit_status)
        command: Callable[[argparse.Namespace], None] = options.command
        command(options)
    except NolocodError as error:
        _fail(error)
    except BaseExceptionGroup as group:
        leaf = _find(group)
        if leaf is None:
            raise
        _fail(leaf)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `nolocod status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(error: NolocodError) -> NoReturn:
    print(f"error {error.code}: {error.entry.title}", file=sys.stderr)
    print(f"  cause:      {error.cause}", file=sys.stderr)
    print(f"  what to do: {error.remedy}", file=sys.stderr)
    sys.exit(error.exit_status)


def _find(group: BaseExceptionGroup[BaseException]) -> NolocodError | None:
    """The first error of ours in a group that holds nothing else but what it caused."""
    ours, others = group.split(NolocodError)
    if ours is None or (others is not None and others.subgroup(Exception) is not None):
        return None
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, NolocodError) else None


# --- options ------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nolocod", description="Train a model with peers that you never meet.")
    parser.add_argument("--version", action="version", version=f"nolocod {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run)
        return command

    def add_here(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = add(name, run, text)
        command.add_argument(
            "--data-dir",
            type=Path,
            default=Path(os.environ.get("NOLOCOD_HOME", "~/.nolocod")).expanduser(),
            metavar="DIR",
            help="where this node keeps its identity, run and checkpoints (NOLOCOD_HOME, or ~/.nolocod)",
        )
        return command

    create = add_here("create", _create, "Check a run file, sign it, and print the run id.")
    create.add_argument("run_file", type=Path, metavar="RUN.toml")
    _node_options(add_here("start", _start, "Bring up a node of the run that its data directory belongs to."))
    join = add_here("join", _join, "Join a run through any of its nodes.")
    _node_options(join)

    status = add_here("status", _status, "What a running node does and waits for.")
    status.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    status.add_argument("--json", action="store_true", help="one JSON object (a line each with --watch)")
    doctor = add_here("doctor", _doctor, "Find out what keeps this machine from a run; changes nothing.")
    _reach_options(doctor)
    _training_options(doctor)
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    add_here("id", _id, "Print this node's peer id; makes the identity if there is none.")
    _access_commands(add, add_here)
    export = add_here("export", _export, "Write the last checkpoint as a Hugging Face model directory.")
    export.add_argument("into", type=Path, metavar="DIR")
    evaluate = add_here("eval", _eval, "Held-out loss of the last checkpoint.")
    evaluate.add_argument("--data", type=Path, metavar="PATH", help="text on this machine, as for join")
    generate = add_here("generate", _generate, "Let the last checkpoint write text.")
    generate.add_argument("prompt", nargs="?", default="\n")
    generate.add_argument("--tokens", type=int, default=200)
    generate.add_argument("--temperature", type=float, default=0.8)
    generate.add_argument("--seed", type=int, default=0)

    testnet = add("testnet", _testnet, "Train on a local testnet of real daemons, and show it.")
    testnet.add_argument("--nodes", type=int, default=4)
    testnet.add_argument("--outer-steps", type=int, default=40, metavar="N")
    testnet.add_argument("--data", type=Path, metavar="PATH", help="text files or a folder (the standard library's sources)")
    testnet.add_argument("--model", default="small", metavar="NAME|FILE", help="tiny, small, 10m, or a config.json")
    testnet.add_argument("--keep", type=Path, metavar="DIR", help="keep the nodes' directories and logs there")
    testnet.add_argument("--seed", type=int, default=0)
    testnet.add_argument("--report", type=Path, metavar="FILE.json", help="write the summary for programs")
    lab = add("lab", _lab, "Evidence: train by several methods in one process, and compare.")
    lab.add_argument("what", choices=["compare"])
    lab.add_argument("--reduced", action="store_true", help="minutes instead of hours: a smaller model, fewer of everything")
    lab.add_argument("--workers", type=int, default=0, metavar="N", help="trials at once, each on one thread (0: one a core)")
    lab.add_argument("--kept", type=Path, default=Path("docs/evidence.jsonl"), metavar="FILE", help="results, done only once")
    _bench_options(add("bench", _bench, "Measure this program on this machine, each figure beside its baseline."))
    return parser


def _access_commands(add: Callable[..., argparse.ArgumentParser], add_here: Callable[..., argparse.ArgumentParser]) -> None:
    key = add("network-key", _network_key, "Make the key of a private network: all its nodes need the same file.")
    key.add_argument("file", type=Path, metavar="FILE")
    invite = add_here("invite", _invite, "Print a token that lets somebody join the run of this data directory.")
    invite.add_argument(
        "--expires", default="30d", metavar="SPAN", help="when membership ends, like 12h, 30d (the default) or 2w"
    )
    invite.add_argument("--peer", default="", metavar="PEER", help="the only peer id that may use it")
    invite.add_argument("--bootstrap", action="append", default=[], metavar="MULTIADDR", help="instead of the running node's")
    invite.add_argument("--list", action="store_true", help="show what was given out, and make nothing")
    revoke = add_here("revoke", _revoke, "Take back invitations, or the membership of peers.")
    revoke.add_argument("names", nargs="+", metavar="INVITATION|PEER")


def _bench_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", choices=["training", "overlap", "exchange", "transport", "relay", "node", "codecs"])
    add("--model", default="small", metavar="NAME|FILE", help="of training and node")
    add("--seconds", type=float, default=10.0, help="of each measurement of training and node")
    add("--pairs", type=int, default=5, help="how often each is measured, in turn")
    add("--threads", type=int, default=0, help="CPU threads of a trainer (0: torch decides)")
    add("--parameters", default="10m", metavar="N", help="size of the model that is exchanged, such as 100m")
    add("--codec", default="float32", help="by which it is exchanged")
    add("--megabytes", type=int, default=512, help="of each transfer of transport")
    add("--training", action="store_true", help="exchange while inner steps go on")
    add("--json", action="store_true")


def _reach_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--bootstrap", action="append", default=[], metavar="MULTIADDR", help="/ip4/…/tcp/…/p2p/…; may be given again")
    add("--listen", action="append", metavar="HOST:PORT", help="for peers; may be given again (0.0.0.0:0 and [::]:0)")
    add("--announce", action="append", default=[], metavar="MULTIADDR", help="tell peers this address instead")
    add("--no-upnp", action="store_true", help="do not ask the router for a port")
    add("--network-key", type=Path, metavar="FILE", help="what all nodes of a private network share; kept for later starts")
    add("--allow", type=Path, metavar="FILE", help="peer ids that may connect, one a line; read again when it changes")
    add("--invite", default="", metavar="TOKEN", help="what the run's owner gave: bootstraps, key and admission in one")


def _training_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, metavar="PATH", help="training text, for runs that leave it to the node")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")


def _node_options(parser: argparse.ArgumentParser) -> None:
    _reach_options(parser)
    _training_options(parser)
    add = parser.add_argument
    add("--no-relay", action="store_true", help="carry nothing for others, and be carried by nobody")
    add("--relay-only", action="store_true", help="connect straight only to bootstraps and relays")
    add("--relay-rate", default="20Mbit", metavar="RATE", help="what is carried for others at most (%(default)s)")
    add("--relay-peers", type=int, default=64, metavar="N", help="peers that this node carries for at most (%(default)s)")
    add("--http", default="127.0.0.1:0", metavar="HOST:PORT", help="metrics and status; has no password")
    add("--threads", type=int, default=0, help="CPU threads of the trainer (0: torch decides)")
    add("--max-uploads", type=int, default=2, help="newcomers that are given weights at once")
    add("--max-upload", metavar="RATE", help="on all connections together, like 20Mbit or 2.5MB (per second)")
    add("--max-download", metavar="RATE", help="the same for what comes in")
    add("--monthly-budget", metavar="BYTES", help="up and down together per calendar month (UTC), like 200GB")
    add("--hours", action="append", default=[], metavar="HH:MM-HH:MM", help="train only then (local time); comma or again")
    add("--pause-on-battery", action="store_true", help="train only on mains power")
    add("--checkpoint-every", type=float, default=60.0, metavar="SECONDS")
    add("--linger", type=float, default=3600.0, metavar="SECONDS", help="how long to serve weights after the run's end")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def _node_config(options: argparse.Namespace) -> NodeConfig:
    for name, least in (("threads", 0), ("max_uploads", 0), ("checkpoint_every", 0), ("linger", 0)):
        if not getattr(options, name) >= least:  # NaN is not either
            raise UsageError(f"--{name.replace('_', '-')} cannot be {getattr(options, name):g}.")
    return NodeConfig(
        data_dir=options.data_dir,
        bootstrap=tuple(options.bootstrap),
        listen=_listen(options),
        announce=tuple(options.announce),
        http=Address.parse(options.http, "--http"),
        data=options.data,
        device=options.device,
        threads=options.threads,
        max_uploads=options.max_uploads,
        checkpoint_every=options.checkpoint_every,
        linger=options.linger,
        allowance=_allowance(options),
        relaying=_relaying(options),
        access=Access(options.network_key, options.allow, options.invite),
        upnp=not options.no_upnp,
    )


def _listen(options: argparse.Namespace) -> tuple[Address, ...]:
    return tuple(Address.parse(text, "--listen") for text in options.listen or ()) or NodeConfig.listen


def _relaying(options: argparse.Namespace) -> Relaying:
    if options.no_relay and options.relay_only:
        raise UsageError("--no-relay and --relay-only exclude each other.")
    if options.relay_peers < 0:
        raise UsageError(f"--relay-peers cannot be {options.relay_peers}.", remedy="0 carries for nobody.")
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
        hours=tuple(Hours.parse(span, "--hours") for spans in options.hours for span in spans.split(",")),
        pause_on_battery=options.pause_on_battery,
    )


# --- commands -----------------------------------------------------------------------------------------


def _create(options: argparse.Namespace) -> None:
    sealed = datadir.found(DataDir(options.data_dir), options.run_file)
    print(f"run {sealed.manifest.name}, signed by {sealed.manifest.owner}")
    print(f"run id {sealed.run_id}")
    print(f"first node: nolocod start --data-dir {options.data_dir}")


def _start(options: argparse.Namespace) -> None:
    if datadir.stored_manifest(DataDir(options.data_dir)) is None:
        raise UsageError(
            f"{options.data_dir} belongs to no run.",
            remedy="Found one with `nolocod create RUN.toml`, or join one with `nolocod join --bootstrap ADDRESS`.",
        )
    _run(options, may_seed=True)


def _join(options: argparse.Namespace) -> None:
    if not (options.bootstrap or options.invite) and datadir.stored_manifest(DataDir(options.data_dir)) is None:
        raise UsageError("a first join needs --bootstrap or --invite.", remedy="Ask for the line that the first node printed.")
    _run(options, may_seed=False)


def _run(options: argparse.Namespace, *, may_seed: bool) -> None:
    config = _node_config(options)  # before the imports below, which take a second
    import trio

    from nolocod import logs
    from nolocod.daemon import run_node

    logs.set_up(options.log_level)
    follower = logs.LogFollower()

    async def run() -> None:
        await run_node(config, may_seed=may_seed, followers=[_welcome, follower.follow])

    trio.run(run)


def _welcome(event: Event) -> None:
    if isinstance(event, Started):
        print(f"node {event.peer_id} of run {event.run_name} ({event.run_id[:12]})")
        print(f"status and metrics: http://{event.http}")
        print("others join with:")
        for address in event.addresses:
            print(f"  nolocod join --bootstrap {address}", flush=True)


def _status(options: argparse.Namespace) -> None:
    from nolocod import terminal

    terminal.show_status(DataDir(options.data_dir), watch=options.watch, as_json=options.json)


def _doctor(options: argparse.Namespace) -> None:
    config = NodeConfig(
        data_dir=options.data_dir,
        bootstrap=tuple(options.bootstrap),
        listen=_listen(options),
        announce=tuple(options.announce),
        data=options.data,
        device=options.device,
        access=Access(options.network_key, options.allow, options.invite),
        upnp=not options.no_upnp,
    )
    from nolocod.doctor import show

    if not show.examined(config, as_json=options.json):
        sys.exit(1)


def _id(options: argparse.Namespace) -> None:
    from nolocod.identity import load_or_create

    paths = DataDir(options.data_dir)
    datadir.make(paths)
    print(load_or_create(paths.identity).peer_id)


def _network_key(options: argparse.Namespace) -> None:
    from nolocod import papers

    papers.make_network_key(options.file)
    print(f"{options.file}: give it to those who may be in the network, and to nobody else")


def _invite(options: argparse.Namespace) -> None:
    from nolocod import papers
    from nolocod.p2p.addresses import split
    from nolocod.status import client

    paths = DataDir(options.data_dir)
    if options.list:
        for note in papers.issued(paths):
            print(f"{note.id}  until {_day(note.expires)}  {note.peer or 'anybody'}")
        return
    bootstrap = options.bootstrap
    for address in bootstrap:
        split(address)
    if not bootstrap:
        try:
            bootstrap = client.read(datadir.find_running(paths)).addresses
        except NotRunningError:
            print("No node runs here: who uses the token needs --bootstrap as well.", file=sys.stderr)
    sealed, owner = _owned(options)
    grant = papers.Grant(time.time(), parse_span(options.expires, "--expires"), options.peer, tuple(bootstrap))
    note, token = papers.issue(paths, sealed, owner, grant)
    print(f"invitation {note.id}, until {_day(note.expires)}, for {note.peer or 'whoever holds the token'}", file=sys.stderr)
    print(token)


def _revoke(options: argparse.Namespace) -> None:
    from nolocod import papers

    sealed, owner = _owned(options)
    revoked = papers.revoke(DataDir(options.data_dir), sealed, owner, options.names)
    print(f"version {revoked.version}: {len(revoked.invitations)} invitations and {len(revoked.peers)} peers are revoked")
    print("A running node of this data directory tells the others.")


def _owned(options: argparse.Namespace) -> tuple[Sealed, Identity]:
    """The run of the data directory, and the identity that may have founded it."""
    from nolocod.identity import load_or_create

    sealed = datadir.stored_manifest(DataDir(options.data_dir))
    if sealed is None:
        raise UsageError(f"{options.data_dir} belongs to no run.", remedy="Found one with `nolocod create RUN.toml`.")
    return sealed, load_or_create(DataDir(options.data_dir).identity)


def _day(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall))


def _testnet(options: argparse.Namespace) -> None:
    from nolocod import terminal, testnet

    summary = testnet.run(
        testnet.Options(
            nodes=options.nodes,
            outer_steps=options.outer_steps,
            data=options.data,
            model=options.model,
            keep=options.keep,
            seed=options.seed,
        ),
        terminal.swarm_view,
        lambda text: print(text, flush=True),
    )
    if options.report is not None:
        datadir.write_whole(options.report, summary.to_json().encode())
    terminal.show(terminal.summary_table(summary))


def _export(options: argparse.Namespace) -> None:
    from nolocod.trainer import offline

    offline.export(DataDir(options.data_dir), _run_of(options), options.into)
    print(f'AutoModelForCausalLM.from_pretrained("{options.into}")')


def _eval(options: argparse.Namespace) -> None:
    from nolocod.trainer import offline

    print(f"{offline.evaluate(DataDir(options.data_dir), _run_of(options), options.data):.4f}")


def _generate(options: argparse.Namespace) -> None:
    from nolocod.trainer import offline

    if options.tokens < 1 or options.temperature < 0:
        raise UsageError("--tokens must be positive, and --temperature not negative.")
    paths = DataDir(options.data_dir)
    text = offline.generate(paths, _run_of(options), options.prompt, options.tokens, options.temperature, options.seed)
    print(options.prompt + text)


def _run_of(options: argparse.Namespace) -> Sealed:
    """The run of the data directory whose checkpoint a command wants to use."""
    sealed = datadir.stored_manifest(DataDir(options.data_dir))
    if sealed is None:
        raise NothingToUseError(f"{options.data_dir} belongs to no run.")
    return sealed


def _bench(options: argparse.Namespace) -> None:
    from nolocod import benchmarks

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process of a measurement stays behind
    if options.pairs < 1 or options.megabytes < 1 or not options.seconds > 0:
        raise UsageError("--pairs, --seconds and --megabytes must be positive.")
    chosen = benchmarks.Options(
        model=options.model,
        seconds=options.seconds,
        pairs=options.pairs,
        threads=options.threads,
        parameters=benchmarks.parse_parameters(options.parameters),
        codec=options.codec,
        megabytes=options.megabytes,
        training=options.training,
    )
    result = benchmarks.MEASUREMENTS[options.what](chosen, _nothing if options.json else print)
    print(result.to_json() if options.json else result.to_text())


def _lab(options: argparse.Namespace) -> None:
    from nolocod.lab import compare, trials

    if options.workers < 0:
        raise UsageError("--workers cannot be negative.")
    size = compare.REDUCED if options.reduced else compare.FULL
    book = trials.Book(options.kept)
    result = compare.compare(size, book, options.workers or os.cpu_count() or 1, lambda text: print(text, flush=True))
    print(result.to_text())


def _nothing(_: str) -> None:
    """Says nothing."""
