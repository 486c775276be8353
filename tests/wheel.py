"""Build the wheel, check it, and use it as somebody new would: `python -m tests.wheel`, with `uv` and `twine` on the PATH.

For each Python 3.11 to 3.13 that is found, it installs the wheel into a fresh environment twice, with the newest and with the
oldest dependencies that pyproject.toml allows, and runs commands in it. Torch is left out, as its builds for GPUs take
gigabytes: so it also shows what is said where torch is missing. `--torch REQUIREMENT` installs it at last and trains.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
_NO_TORCH = "torch; sys_platform == 'none'"
"""An override of uv's that takes a package out of what is installed."""


def tracked() -> list[str]:
    """What git has, of this tree."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def build(folder: Path) -> Path:
    """The wheel, built below `folder` from what git has."""
    tree, out = folder / "tree", folder / "out"
    for name in tracked():
        if name.startswith("nolocod/") or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    out.mkdir()
    subprocess.run([sys.executable, "-c", _BUILD, str(out)], cwd=tree, capture_output=True, timeout=300, check=True)
    (path,) = out.glob("nolocod-*.whl")
    return path


class Failed(Exception):
    """Something does not hold."""


def run(*line: str | Path, status: int = 0, **environment: str) -> str:
    """What a command prints. Failed if it ends with another status."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in line], capture_output=True, text=True, timeout=1200, check=False, stdin=subprocess.DEVNULL,
        env={**clean, **environment}, cwd=environment.get("HOME"),
    )  # fmt: skip
    if done.returncode != status:
        raise Failed(f"{' '.join(map(str, line))}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def check(wheel: Path) -> str:
    """What the package index would say of it."""
    return run("twine", "check", "--strict", wheel).strip().splitlines()[-1]


def use(wheel: Path, python: str, resolution: str, folder: Path, torch: str) -> str:
    """Install it into an environment of its own and use it; what it came to, in a line."""
    env, home, without = folder / "env", folder / "home", folder / "without"
    home.mkdir(parents=True)
    without.write_text(_NO_TORCH)
    run("uv", "venv", "--quiet", "--python", python, env)
    into = ("uv", "pip", "install", "--quiet", "--python", env / "bin/python")
    began = time.monotonic()
    run(*into, "--resolution", resolution, "--override", without, wheel)
    took = time.monotonic() - began
    (home / "run.toml").write_text('name = "wheel"\n[model]\nmodel_type = "llama"\n')
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGRUPoSDnRKw5tRDmsdNxaZJUNRLyQYk7hAGXfZBGBcGR"
    for words, status, says in (
        (["--version"], 0, "nolocod 0."),
        (["up", "--help"], 0, "Example: nolocod up"),
        (["completion", "bash"], 0, "complete -"),
        (["id"], 0, "12D3KooW"),
        (["runs"], 2, "NLC-100"),
        (["create", "run.toml"], 1, "NLC-183"),
        (["join", "--bootstrap", nobody], 1, "NLC-183"),
    ):
        said = run(env / "bin/nolocod", *words, status=status, HOME=str(home))
        if says not in said:
            raise Failed(f"nolocod {' '.join(words)} does not say {says}:\n{said}")
    count = len(run("uv", "pip", "freeze", "--quiet", "--python", env / "bin/python").splitlines())
    if not torch:
        return f"{count} packages, installed in {took:.0f} s"
    run(*into, *torch.split())
    run(env / "bin/nolocod", "create", "run.toml", HOME=str(home))
    run(env / "bin/nolocod", "testnet", "--nodes", "2", "--outer-steps", "2", "--model", "tiny", HOME=str(home))
    return f"{count} packages and torch, installed in {took:.0f} s; two nodes have trained"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__)
    parser.add_argument("--torch", default="", metavar="REQUIREMENT", help="and what else `uv pip install` takes")
    parser.add_argument("--python", action="append", metavar="VERSION", help=f"only this one ({', '.join(PYTHONS)})")
    options = parser.parse_args()
    if missing := [name for name in ("uv", "twine") if shutil.which(name) is None]:
        print(f"NOT TESTED: {' and '.join(missing)} not installed (pip install uv twine)")
        return 77
    failed = False
    with tempfile.TemporaryDirectory(prefix="nolocod-wheel-") as folder:
        wheel = build(Path(folder))
        print(f"{wheel.name}, {wheel.stat().st_size / 1e3:.0f} kB: {check(wheel)}", flush=True)
        for python in options.python or PYTHONS:
            for resolution in ("highest", "lowest-direct"):
                try:
                    found = use(wheel, python, resolution, Path(folder) / f"{python}-{resolution}", options.torch)
                except Failed as error:
                    failed, found = True, f"FAILED: {error}"
                print(f"{python}, {resolution}: {found}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
