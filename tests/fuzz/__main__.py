"""`python -m tests.fuzz --seconds N`: every parser of foreign bytes under atheris (libFuzzer), one after the other.

Needs `pip install atheris`. Each target runs in a process of its own, from its seeds and the corpus in this folder, for
its share of the time; prints executions, coverage and peak memory, and where inputs that broke it were kept. Exit status
1 if any did. A finding is an exception that the parser does not promise, an input that takes longer than `_HANG`
seconds, or memory above `_MEMORY`. "Of them" are the processor's seconds: a busy machine gives fewer. `--keep DIR` keeps
what was found to reach new code, for `--merge`, which brings the least of it that reaches the same into the corpus.
`python -m tests.fuzz hosts` is another thing: tests/fuzz/hosts.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz import hosts
from tests.fuzz.targets import TARGETS, TENSORS

CORPUS = Path(__file__).with_name("corpus")
_HANG = 20
"""Seconds: far more than any input needs, so that a busy machine is not taken for a hang."""
_MEMORY = {False: 400, True: 900}
"""MiB of a whole process, by whether it has torch: what it takes for nothing is 120 and 400."""
_LARGEST_KEPT = 2048
_MOST_KEPT = 32


@dataclass(frozen=True)
class Result:
    """`coverage` is libFuzzer's: edges of nolocod's bytecode, and outcomes of its comparisons, that inputs reached."""

    target: str
    executions: int
    coverage: int
    peak_mib: int
    seconds: int
    processor_seconds: float
    """What of them it was given: on a busy machine this is what counts."""
    broke: bool
    findings: tuple[str, ...] = ()
    last_words: str = ""


def main() -> int:
    if sys.argv[1:2] == ["hosts"]:
        return hosts.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--target", action="append", default=[], metavar="NAME")
    parser.add_argument("--keep", type=Path, default=None, metavar="DIR")
    parser.add_argument("--merge", action="store_true", help="only merge what --keep holds into the corpus")
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="write results there too, beside those of other targets"
    )
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install atheris")
    names = options.target or _names()
    with tempfile.TemporaryDirectory(prefix="nolocod-fuzz-") as made:
        keep = options.keep or Path(made)
        if options.merge:
            for name in [name for name in names if (keep / name).is_dir()]:
                _merge(name, keep)
            return 0
        results = []
        _say(f"{'target':20}{'executions':>12}{'coverage':>10}{'peak MiB':>10}{'seconds':>9}{'of them':>9}")
        for name in names:
            result = _fuzz(name, max(1, options.seconds // len(names)), keep)
            results.append(result)
            if options.json is not None:
                _write(options.json, result)
            broke = f"  BROKE: {result.last_words}" if result.broke else ""
            figures = f"{result.executions:12}{result.coverage:10}{result.peak_mib:10}"
            _say(f"{name:20}{figures}{result.seconds:9}{result.processor_seconds:9}{broke}")
    return int(any(result.broke for result in results))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _write(path: Path, result: Result) -> None:
    """Put `result` among those of other targets that `path` holds."""
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [one for one in held if one["target"] != result.target]
    path.write_text(json.dumps([*kept, asdict(result)], indent=1) + "\n", encoding="utf-8")


def _names() -> list[str]:
    return [*TARGETS, *TENSORS]


def _fuzz(name: str, seconds: int, keep: Path) -> Result:
    folder, findings = keep / name, keep / "findings"
    folder.mkdir(parents=True, exist_ok=True)
    findings.mkdir(exist_ok=True)
    corpus = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    line = [sys.executable, "-m", "tests.fuzz.child", name, str(folder), str(folder), *corpus]
    line += [f"-max_total_time={seconds}", f"-timeout={_HANG}", f"-rss_limit_mb={_MEMORY[name in TENSORS]}"]
    line += ["-print_final_stats=1", f"-artifact_prefix={findings / name}-"]
    began, spent = time.monotonic(), _processor_seconds()
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=seconds + 300, check=False)
    said = done.stderr + done.stdout
    errors = [line for line in said.splitlines() if re.search(r"Error|Exception|ERROR", line)]
    return Result(
        name,
        _number(r"stat::number_of_executed_units:\s*(\d+)", said),
        _number(r"cov: (\d+)", said),
        _number(r"stat::peak_rss_mb:\s*(\d+)", said),
        round(time.monotonic() - began),
        round(_processor_seconds() - spent, 1),
        done.returncode != 0,
        tuple(sorted(path.name for path in findings.glob(f"{name}-*"))),
        " | ".join(errors[:3])[:300] if done.returncode else "",
    )


def _processor_seconds() -> float:
    """Of all children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def _merge(name: str, keep: Path) -> None:
    """Add the fewest inputs of `keep` that reach what neither the seeds nor the corpus do; of those, small ones."""
    target = CORPUS / name
    with tempfile.TemporaryDirectory(prefix="nolocod-merge-") as made:
        known = {path.name for path in target.glob("*")}
        for one in known:
            shutil.copy(target / one, made)
        line = [sys.executable, "-m", "tests.fuzz.child", name, made, "-merge=1", made, str(keep / name)]
        subprocess.run(line, capture_output=True, timeout=1800, check=True)
        new = [path for path in Path(made).iterdir() if path.name not in known and not path.name.startswith("seed-")]
        small = sorted((path.stat().st_size, path) for path in new)
        for size, path in small[:_MOST_KEPT]:
            if 0 < size <= _LARGEST_KEPT:
                target.mkdir(exist_ok=True)
                (target / path.name[:12]).write_bytes(path.read_bytes())
    _say(f"{name}: {len(new)} inputs reach something new, {len(list(target.glob('*')))} are kept")


if __name__ == "__main__":
    sys.exit(main())
