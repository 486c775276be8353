"""Writes the pages that are made from the code: docs/errors.md, docs/run-file.md, docs/doctor.md, docs/metrics.md and
docs/limits.md; and from what a command measured: docs/fuzzing.md.

The rule: whoever changes the catalogue or the manifest runs `python tools/docs.py`; a test compares.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry

from nolocod.doctor.findings import CHECKS
from nolocod.errors import RETIRED, Entry, LocalError, NolocodError, RemoteError
from nolocod.identity import PeerId
from nolocod.node.config import NodeConfig
from nolocod.observe.events import ExchangeEnded, Started, Troubled
from nolocod.observe.metrics import Metrics
from nolocod.observe.run.metrics import RunMetrics
from nolocod.observe.run.report import RunReport
from nolocod.observe.status.http import REQUEST_LINES
from nolocod.p2p.discovery.address_book import CAPACITY
from nolocod.p2p.exchange import contribution_file, contributions
from nolocod.p2p.exchange import recent_receipts as recent
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.host import HostLimits
from nolocod.p2p.libp2p_patches import MAX_LINE as MAX_LINE_OF_NAMES
from nolocod.p2p.limits.connection_manager import ARRIVALS
from nolocod.p2p.limits.rate_limits import ALL, Rate
from nolocod.p2p.membership.heartbeat import MAX_HEARTBEAT
from nolocod.p2p.nat.autonat import AutoNatLimits
from nolocod.p2p.registry import records
from nolocod.p2p.settings import Relaying
from nolocod.p2p.snapshots.client import ROOM
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport import yamux_limits
from nolocod.p2p.transport.buffers import HeldMemory
from nolocod.p2p.transport.noise import MAX_HANDSHAKE
from nolocod.p2p.transport.yamux_limits import MuxLimits
from nolocod.proto.limits import SLOWEST_DISK, Limits, most_bytes
from nolocod.proto.receipt import MAX_LINE
from nolocod.run import manifest
from nolocod.run.announcements import MAX_ANNOUNCEMENT
from nolocod.run.data import Section
from nolocod.run.owners import Owners
from nolocod.trainer.checkpoint import KEPT
from nolocod.watch import observer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

DOCS = Path(__file__).resolve().parent.parent / "docs"

_ERRORS_HEAD = """\
# Errors

Made by `python tools/docs.py` from `nolocod/errors/`; do not edit.

Every failure that this program knows has a code that never changes its meaning. A *local* error is this
machine's: the command ends with the exit status given. A *remote* error is a peer's: it costs that peer
one stream, and this node goes on.
"""

_RUN_FILE_HEAD = """\
# The run file

Made by `python tools/docs.py` from `nolocod/run/manifest.py` and `data.py`; do not edit.

A run is described by a TOML file, which `nolocod start` signs and hands to everybody who joins. Keys
outside a table come first. A key that is misspelt, or a value out of bounds, is refused with its line.
"""

_DOCTOR_HEAD = """\
# The doctor

Made by `python tools/docs.py` from `nolocod/doctor/findings.py`; do not edit.

`nolocod doctor` finds out what keeps this machine from a run, before a node is started or beside one that runs. It
takes the flags of `join` that matter for it (`--data-dir`, `--bootstrap`, `--listen`, `--announce`, `--no-upnp`,
`--network-key`, `--allow`, `--invite`, `--data`, `--devices`), takes at most 40 s, writes nothing into the data
directory, and leaves a running node alone: it then goes by an identity and a port of its own, and asks the node's
status for what only the node can know.

Each check is *ok*, *warn* (a node can live with it), *fail* (it cannot), or *skipped*, with the reason. The exit
status is 1 if any fails, else 0; `--json` prints one object: `version`, `ok`, and `checks`, a list with `code`,
`name`, `status`, `found`, and where there is something to say `remedy`, `about` (an address) and `error` (a code of
[errors.md](errors.md)). Where several bootstrap addresses are given and one is good, the others' failures are
warnings.

A code never changes its meaning.
"""


_METRICS_HEAD = """\
# Metrics

Made by `python tools/docs.py` from `nolocod/observe/metrics.py`; do not edit.

Every node serves these at `/metrics` in Prometheus' text format. A label's values are few and fixed: no peer's id and no
text that a peer chose is ever one. Counters begin at 0 with the process. Beside these are the Python client's own:
`process_*` (memory, processor time, open files, start time) and `python_*`, of the network process; the trainer is
another process.

[operations.md](operations.md) says how they are scraped, watched and turned into alerts.
"""
_RUN_METRICS_HEAD = """
An observer (`nolocod watch`) serves these of a whole run, from `nolocod/observe/run/metrics.py`:
"""
_MANY = {"code": "a code of [errors.md](errors.md), or other", "version": "", "run_name": "", "run_id": ""}
"""Labels whose values are not listed, and what stands there instead."""


_FUZZING_HEAD = """\
# Fuzzing

Made by `python tools/docs.py` from `docs/fuzzing.json`; do not edit.

What `python -m tests.fuzz --seconds N --json docs/fuzzing.json` measured last: every parser of foreign bytes under atheris
(libFuzzer). Coverage is the edges of nolocod's bytecode and the outcomes of its comparisons that inputs reached; parsers
that are compiled (protobuf, msgspec, safetensors) are not seen into. A finding is an exception that a parser does not
promise, an input of more than 20 seconds, or a process of more than 400 MiB (900 with torch). Inputs that reached
something new are in `tests/fuzz/corpus`, and are tried again by the tests.
"""

_LIMITS_HEAD = """\
# Limits

Made by `python tools/docs.py` from the code; do not edit.

What peers, and time, may take of a node at most: the value, the file below `nolocod/` (or the flag) that sets it, and the test
at the bound. Defaults of flags are in `commands/node.py`.
"""


@dataclass(frozen=True)
class Bound:
    """One row of the page of limits."""

    of: str
    what: str
    value: str
    where: str
    test: str


@dataclass(frozen=True)
class Key:
    """One key of the run file, as the page shows it."""

    name: str
    type: str
    default: str
    text: str


def errors_page() -> str:
    """docs/errors.md."""
    lines = [_ERRORS_HEAD, "## Local errors", "", "| code | error | remedy | exit status |", "|---|---|---|---|"]
    local = entries(LocalError)
    lines += [f"| {one.code} | {one.title} | {_cell(one.remedy)} | {one.exit_status} |" for one in local]
    lines += ["", "## Remote errors", "", "| code | error | remedy |", "|---|---|---|"]
    lines += [f"| {one.code} | {one.title} | {_cell(one.remedy)} |" for one in entries(RemoteError) if one not in local]
    lines += ["", "## Retired codes", "", *(f"{code}: {about}." for code, about in RETIRED.items())]
    defect = NolocodError.entry
    lines += ["", "## Defects", "", f"{defect.code}, {defect.title} (exit status {defect.exit_status}): {defect.remedy}", ""]
    return "\n".join(lines)


def entries(base: type[NolocodError]) -> list[Entry]:
    """The catalogue's rows for `base` and all errors below it that `nolocod.errors` defines, by code."""
    return sorted({one.entry for one in classes(base)}, key=lambda entry: entry.code)


def classes(base: type[NolocodError]) -> list[type[NolocodError]]:
    """`base` and the classes below it that `nolocod.errors` defines."""
    below = [one for child in base.__subclasses__() if child.__module__ == base.__module__ for one in classes(child)]
    return [base, *below]


def run_file_page() -> str:
    """docs/run-file.md."""
    lines = [_RUN_FILE_HEAD]
    lines += _table("Keys outside a table", "", keys_of(manifest.Manifest))
    for name, section in _tables().items():
        summary = " ".join((section.__doc__ or "").split())
        lines += _table(f"`[{name}]`", summary, keys_of(section))
    return "\n".join(lines)


def doctor_page() -> str:
    """docs/doctor.md."""
    lines = [_DOCTOR_HEAD, "| code | check | all right if | else | at most |", "|---|---|---|---|---|"]
    for one in CHECKS.values():
        lines.append(f"| {one.code} | {one.name} | {_cell(one.asks)} | {_cell(one.remedy)} | {one.seconds:.0f} s |")
    return "\n".join([*lines, ""])


def metrics_page() -> str:
    """docs/metrics.md."""
    registry = CollectorRegistry()
    metrics = Metrics(lambda: 0, registry)
    anybody = PeerId("12D3KooWanybody")
    metrics.follow(Started(anybody, "", "", (), ""))
    for code in ("NLC-125", "NLC-202"):  # labels show once they have a value
        metrics.follow(Troubled(code, ""))
        metrics.follow(ExchangeEnded(anybody, "", False, "aborted", 0, 0, 0.0, code))
    run = RunMetrics(lambda: RunReport(release="", run_id="", run_name="", owner="", access="", watched=0.0))
    tables = [_METRICS_HEAD, *_metric_rows(registry.collect()), _RUN_METRICS_HEAD, *_metric_rows(run.collect()), ""]
    return "\n".join(tables)


def _metric_rows(families: Iterable[Metric]) -> list[str]:
    lines = ["| metric | type | labels | |", "|---|---|---|---|"]
    for family in families:
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        values: dict[str, list[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le" and value not in values.setdefault(label, []):
                    values[label].append(value)
        labels = [_label(label, known) for label, known in values.items()]
        kind = "gauge" if family.type == "info" else family.type
        lines.append(f"| `{name}` | {kind} | {'; '.join(labels)} | {_cell(family.documentation)} |")
    return lines


def _label(name: str, values: list[str]) -> str:
    text = _MANY.get(name, ", ".join(values))
    return f"`{name}`: {text}" if text else f"`{name}`"


def bounds() -> list[Bound]:
    """Every bound that the page names, with its value as the code has it."""
    host, mux, wire, timing = HostLimits(), MuxLimits(), Limits(), Timing()
    asked, held = AutoNatLimits(), inspect.signature(HeldMemory).parameters
    receipts = inspect.signature(ReceiptStore).parameters["limit"].default
    return [
        Bound("connections", "at once", f"{host.connections}", "`--max-connections`", "so_many_connections_and_no_more"),
        Bound(
            "connections",
            "of these opened by others",
            f"{host.connections - host.connections // 4}",
            "`ConnectionManager`",
            "a_quarter_is_left_for_those_that_we_open",
        ),
        Bound(
            "connections",
            "opened by one address group",
            f"{host.inbound.per_source}",
            "`--max-per-address`",
            "so_many_of_one_group_of_addresses",
        ),
        Bound(
            "streams",
            "opened by a peer, per connection",
            f"{host.streams_per_connection}",
            "`HostLimits`",
            "streams_open_at_once_have_a_limit",
        ),
        Bound(
            "connections",
            "opened by one address group, a second; at once",
            _rate(ARRIVALS),
            "`ARRIVALS`",
            "who_comes_too_often_waits_whatever_it_closed_again",
        ),
        Bound(
            "streams",
            "opened by a peer, a second; at once",
            _rate(ALL),
            "`StreamLimiter`",
            "streams_beyond_a_rate_are_refused_before_they_are_negotiated",
        ),
        Bound(
            "streams",
            "of one of our protocols, per peer",
            f"{host.streams_per_peer}",
            "`HostLimits`",
            "a_peer_may_have_so_many_streams_and_no_more",
        ),
        Bound(
            "tasks",
            "follow streams and connections: a flood is refused",
            "",
            "`HostLimits`",
            "a_flood_of_streams_is_refused_and_harms_no_other",
        ),
        Bound(
            "time",
            "chunks of an exchange: bytes over a minute, ours and the partner's",
            f"{wire.least(1 << 30):,.0f}, or a tenth of the message",
            "`Limits.least`",
            "a_trickle_is_a_stall_whatever_the_size",
        ),
        Bound(
            "time",
            "the partner's snapshot; its inspection, on top of bytes under way",
            f"half of our inner phase each, between 20 s (and the message at {SLOWEST_DISK / 1e6:.0f} MB/s) and "
            f"{wire.snapshot_seconds:.0f} s; "
            "three inner steps like ours where that is more, or of the partner, by its word, up to a phase; half of it for a "
            "newcomer, whose word counts for a quarter of a phase; a quarter where time was lost",
            "`Limits.paced`",
            "how_long_a_partner_is_waited_for_follows_from_its_steps_and_ours",
        ),
        Bound(
            "time",
            "all chunks of an exchange, both ways",
            f"{wire.exchange_seconds:.0f} s, or those of the message at {wire.slowest_rate / 1000:.0f} kB/s",
            "`Limits.whole`",
            "a_slow_line_has_the_time_that_its_bytes_take_and_a_trickle_not_for_ever",
        ),
        Bound(
            "time",
            "a broken exchange that waits to be resumed",
            f"{wire.resume_seconds:.0f} to {wire.longest_resume_seconds:.0f} s, by its bytes",
            "`Limits.resume`",
            "a_large_exchange_outlives_a_line_that_is_cut_for_minutes",
        ),
        Bound(
            "time",
            "exchanges that come to nothing",
            "a sixteenth of ours",
            "`outer/wasted.py`",
            "who_takes_our_time_for_nothing_gets_a_sixteenth_of_it",
        ),
        Bound(
            "connections",
            "records and frames of one that carry nothing, a second",
            f"{yamux_limits.PER_SECOND}; {yamux_limits.BURST} at once; {_bytes(yamux_limits.PAYS)} of content pay for one",
            "`Overhead`",
            "frames_that_carry_nothing_are_read_at_a_thousand_a_second",
        ),
        Bound(
            "memory",
            "receive windows beyond their first size, per connection",
            _bytes(mux.windows),
            "`MuxLimits`",
            "the_window_grows_and_all_windows_together_have_a_limit",
        ),
        *(
            Bound("memory", f"held for {who} together", _bytes(held[name].default), "`HeldMemory`", f"{test}")
            for who, name, test in (
                ("all peers", "most", "the_connection_that_holds_most_ends_when_all_together_hold_too_much"),
                (
                    "strangers",
                    "most_of_strangers",
                    "strangers_together_have_their_share_and_push_out_neither_partners_nor_who_holds_little",
                ),
            )
        ),
        Bound("memory", "members known", f"{timing.capacity}", "`Timing.capacity`", "the_table_is_bounded_and_keeps_the_fresh"),
        Bound(
            "messages",
            "a line of multistream-select",
            _bytes(MAX_LINE_OF_NAMES),
            "`libp2p_patches`",
            "an_announced_length_is_believed_by_nobody",
        ),
        Bound("messages", "of a handshake", _bytes(MAX_HANDSHAKE), "`noise.py`", "a_proof_with_a_huge_key_is_not_looked_at"),
        *(
            Bound("messages", what, _bytes(most_bytes([name])), "`proto/limits.py`", "each_message_has_a_limit_of_its_own")
            for what, name in (
                ("the first on a stream", "offer"),
                ("one with a reason", "refuse"),
                ("a verdict on an exchange", "commit"),
                ("gossip", "gossip"),
                ("an offer of weights", "snapshot_offer"),
            )
        ),
        Bound("messages", "a chunk", _bytes(wire.chunk_bytes), "`Limits`", "no_head_passes_a_limit_or_raises_anything_else"),
        Bound("messages", "a heartbeat", _bytes(MAX_HEARTBEAT), "`MAX_HEARTBEAT`", "what_no_honest_node_sends_is_refused"),
        Bound(
            "messages",
            "a manifest",
            _bytes(manifest.MAX_MANIFEST_BYTES),
            "`MAX_MANIFEST_BYTES`",
            "an_oversized_manifest_is_refused_before_it_is_parsed",
        ),
        Bound("messages", "an announcement", _bytes(MAX_ANNOUNCEMENT), "`MAX_ANNOUNCEMENT`", "what_no_owner_says_is_refused"),
        Bound(
            "memory",
            "announcements held; of one address group; waiting; waiting of one peer",
            f"{records.CAPACITY}, {records.PER_GROUP}, {records.PENDING}, {records.PER_CARRIER}",
            "`registry/records.py`",
            "who_is_held_keeps_its_place_and_a_group_has_so_many",
        ),
        Bound("messages", "a receipt that is passed on", _bytes(recent.MAX_RECEIPT), "`MAX_RECEIPT`", "a_receipt_has_a_size"),
        Bound(
            "messages",
            "receipts in an answer",
            f"{recent.PER_MESSAGE}",
            "`p2p/exchange/recent_receipts.py`",
            "more_than_anybody_tells_is_refused_unread",
        ),
        Bound(
            "memory",
            "members whose newest receipt is held, for an hour",
            f"{recent.CAPACITY}",
            "`p2p/exchange/recent_receipts.py`",
            "what_is_held_ends_after_an_hour_and_has_a_limit",
        ),
        Bound(
            "memory",
            "pairs whose last exchange an observer keeps, for an hour",
            f"{observer.PAIRS}",
            "`watch/observer.py`",
            "the_last_exchange_of_each_pair_is_shown_though_nodes_hold_the_newest_of_each_member",
        ),
        Bound(
            "memory",
            "nodes whose contributions are counted; partners of each that are told apart",
            f"{contributions.PEERS}, {contributions.PARTNERS}",
            "`p2p/exchange/contributions.py`",
            "what_is_held_of_nodes_and_of_partners_has_a_limit",
        ),
        Bound(
            "messages",
            "receipts in a file of contributions",
            f"{contribution_file.MOST:,}",
            "`p2p/exchange/contribution_file.py`",
            "a_file_has_at_most_so_many_receipts",
        ),
        Bound("messages", "a line of a receipt", _bytes(MAX_LINE), "`proto/receipt.py`", "an_endless_line_is_not_read_whole"),
        Bound(
            "relaying",
            "reservations",
            f"{Relaying.reservations}",
            "`--relay-peers`",
            "a_reservation_ends_with_its_holders_connection_and_makes_room",
        ),
        Bound(
            "relaying",
            "of these for strangers, and of circuits (runs by invitation: none)",
            "an eighth",
            "`Relay.strangers`",
            "members_take_the_reservations_of_strangers_and_partners_those_of_members",
        ),
        Bound("relaying", "circuits at once", f"{Relaying.circuits}", "`p2p/settings.py`", "no_more_circuits_than_allowed"),
        Bound(
            "relaying",
            "all circuits together",
            f"{_bytes(Relaying.rate)}/s",
            "`--relay-rate`",
            "circuits_keep_to_one_rate_and_share_it",
        ),
        Bound(
            "dialling back",
            "questions a minute, of one peer and of all",
            f"{asked.per_peer}, {asked.in_all}",
            "`AutoNatLimits`",
            "questions_are_rationed_per_peer_and_in_all",
        ),
        Bound(
            "weights for others",
            "newcomers served at once",
            f"{NodeConfig.max_uploads}",
            "`--max-uploads`",
            "slots_are_counted_and_freed",
        ),
        Bound(
            "descriptors",
            "files of weights kept open between requests",
            "",
            "`snapshots/server.py`",
            "files_kept_open_are_bounded",
        ),
        Bound("disk", "receipts: two files of about", _bytes(receipts), "`ReceiptStore`", "two_files_bound_what_is_kept"),
        Bound("disk", "votes whose outcome is not known", "16", "`ReceiptStore`", "so_many_votes_are_kept_and_no_more"),
        Bound("disk", "checkpoints kept", f"{KEPT}", "`checkpoint.KEPT`", "two_are_kept_and_left_overs_removed"),
        Bound(
            "disk",
            "weights for newcomers: snapshots kept",
            "1",
            "`OwnSnapshot`",
            "one_snapshot_lies_on_the_disk_however_many_newcomers_went_away",
        ),
        Bound(
            "disk",
            "a snapshot that is fetched",
            f"the run's, and {_bytes(ROOM)}",
            "`snapshots/client.py`",
            "weights_of_another_size_than_the_runs_are_not_begun",
        ),
        Bound(
            "disk",
            "peers remembered",
            f"{CAPACITY}",
            "`address_book.CAPACITY`",
            "it_keeps_those_seen_last_and_some_of_those_before",
        ),
        Bound(
            "messages",
            "lines of a request to the status page",
            f"{REQUEST_LINES}",
            "`http.py`",
            "a_request_of_very_many_lines_is_refused_before_they_are_parsed",
        ),
        Bound("logs", "the same line a minute, then a count", "", "`logs.py`", "repeats_are_folded_into_a_count"),
    ]


def limits_page() -> str:
    """docs/limits.md."""
    lines = [_LIMITS_HEAD, "| of | what | at most | set in | test |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.of} | {one.what} | {one.value or 'bounded'} | {_home(one.where)} | `test_{one.test}` |" for one in bounds()
    ]
    return "\n".join([*lines, ""])


def _home(where: str) -> str:
    """The file, below `nolocod/`, of what `where` names in code marks: a flag, a file, or a name and what it has."""
    name = where.strip("`")
    if name.startswith("--"):
        return where
    package = Path(manifest.__file__).parents[1]
    first = name.partition(".")[0]
    made = re.compile(rf"^(class {first}\b|{first}\b.* = )", re.MULTILINE)
    found = sorted(
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if f"/{path.relative_to(package).as_posix()}".endswith((f"/{name}", f"/{first}.py"))
        or made.search(path.read_text("utf-8"))
    )
    if len(found) != 1:
        raise ValueError(f"{where} is in {found}")
    return f"`{found[0]}`" if name.endswith(".py") or name == first == Path(found[0]).stem else f"`{found[0]}` ({name})"


def fuzzing_page() -> str:
    """docs/fuzzing.md, from docs/fuzzing.json."""
    results = json.loads((DOCS / "fuzzing.json").read_text(encoding="utf-8"))
    total = {key: round(sum(one[key] for one in results)) for key in ("executions", "seconds", "processor_seconds")}
    found = sum(len(one["findings"]) for one in results)
    told = (
        f"{len(results)} targets, {total['executions']:,} executions, {total['seconds'] / 60:.0f} minutes by the clock, "
        f"of which the processor gave {total['processor_seconds'] / 60:.0f}; "
        f"{found or 'no'} findings."
    )
    lines = [
        _FUZZING_HEAD,
        told,
        "",
        "| target | executions | coverage | peak memory | by the clock | of the processor | findings |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for one in results:
        times = f"{one['seconds']} s | {one['processor_seconds']:.0f} s"
        figures = f"{one['executions']:,} | {one['coverage']} | {one['peak_mib']} MiB | {times}"
        lines.append(f"| `{one['target']}` | {figures} | {_cell(', '.join(one['findings']))} |")
    return "\n".join([*lines, ""])


def _rate(rate: Rate) -> str:
    return f"{rate.per_second:g}, {rate.burst:g}"


def _bytes(count: int) -> str:
    """A size in binary units where it is whole in them."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def keys_of(section: type[msgspec.Struct]) -> list[Key]:
    """The keys of one table with the docstrings below them; retired keys, and those that no run file has, are left out."""
    texts = _docstrings(section)
    hints = get_type_hints(section, include_extras=True)
    keys = []
    for field in msgspec.structs.fields(section):
        if field.name in ("owner", "format", "base", *manifest.RETIRED) or field.name in _tables():
            continue
        default = "required" if field.required else _literal(field.default)
        keys.append(Key(field.name, type_text(hints[field.name]), default, texts.get(field.name, "")))
    return keys


def type_text(annotation: Any) -> str:  # noqa: ANN401  # whatever stands in an annotation
    """A type in the words of TOML, with its bounds."""
    info = msgspec.inspect.type_info(annotation)
    match info:
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(_literal(value) for value in values)
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(_plain_type(one) for one in types if not isinstance(one, msgspec.inspect.NoneType))
        case _:
            return _plain_type(info)


def _plain_type(info: msgspec.inspect.Type) -> str:
    if isinstance(info, msgspec.inspect.VarTupleType):
        return f"list of {_plain_type(info.item_type)}"
    if isinstance(info, msgspec.inspect.StructType):
        return "table"
    names = {"IntType": "integer", "FloatType": "number", "StrType": "string", "BoolType": "boolean", "DictType": "table"}
    name = names[type(info).__name__]
    bounds = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "pattern": "matching"}
    known = [f"{sign} {getattr(info, key)}" for key, sign in bounds.items() if getattr(info, key, None) is not None]
    return f"{name} {', '.join(known)}" if known else name


def _tables() -> dict[str, type[msgspec.Struct]]:
    hints = {name: (*get_args(hint), hint)[0] for name, hint in get_type_hints(manifest.Manifest).items()}  # without "or none"
    kinds = Section, Owners
    return {name: hint for name, hint in hints.items() if inspect.isclass(hint) and issubclass(hint, kinds)}


def _docstrings(section: type[msgspec.Struct]) -> dict[str, str]:
    """The string literals that follow the fields in the source."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def _table(title: str, summary: str, keys: list[Key]) -> list[str]:
    rows = [f"| `{key.name}` | {_cell(key.type)} | {_cell(key.default)} | {_cell(key.text)} |" for key in keys]
    return [
        f"## {title}",
        "",
        *([summary, ""] if summary else []),
        "| key | value | default | |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _literal(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return f'`"{value}"`'
        case _:
            return f"{value}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {
    "errors.md": errors_page,
    "run-file.md": run_file_page,
    "doctor.md": doctor_page,
    "limits.md": limits_page,
    "fuzzing.md": fuzzing_page,
    "metrics.md": metrics_page,
}


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
