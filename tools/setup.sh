#!/usr/bin/env bash
# Makes the environment that ./test and ./testnet run in: a virtual environment with the tested versions.
# It is made again when pyproject.toml, constraints.txt, the Python or the place of the checkout change.
#
#   NOLOCOD_VENV          where it lies (default: .venv in the checkout)
#   NOLOCOD_TORCH_INDEX   package index to take torch from, for example one with builds for CPU only
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${NOLOCOD_VENV:-$root/.venv}

fail() {
    echo "setup: $1" >&2
    exit 1
}

python=
for name in python3.13 python3.12 python3.11 python3; do
    if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        python=$name
        break
    fi
done
[ -n "$python" ] || fail "no Python 3.11, 3.12 or 3.13 found. Install one of them and run this again."

stamp=$("$python" - "$root" <<'END'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
parts = [str(root), sys.version, *((root / name).read_text() for name in ("pyproject.toml", "constraints.txt"))]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
END
)
if [ -f "$venv/nolocod-setup" ] && [ "$(cat "$venv/nolocod-setup")" = "$stamp" ]; then
    exit 0
fi

echo "setup: installing into $venv (some minutes, once)" >&2
if [ "$(uname -sm)" = "Linux x86_64" ] && [ -z "${NOLOCOD_TORCH_INDEX:-}" ] && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
    echo "setup: no NVIDIA GPU is seen here, and torch's usual build brings 3 GB for one. To save them, press Ctrl-C and set" >&2
    echo "setup: NOLOCOD_TORCH_INDEX to an index with builds for CPUs (https://pytorch.org/get-started/locally/ shows its URL)." >&2
fi
"$python" -m venv --clear "$venv" >&2 || fail "$python cannot make a virtual environment. On Debian: apt install python3-venv."
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@" >&2; }

# torch first and at exactly one version: resolving a range of it can fetch gigabytes of CUDA libraries.
torch=$(grep '^torch==' "$root/constraints.txt")
pip install -c "$root/constraints.txt" ${NOLOCOD_TORCH_INDEX:+--index-url "$NOLOCOD_TORCH_INDEX"} "$torch" ||
    fail "torch cannot be installed; see pip's message above."
echo "setup: torch is there; now the other packages" >&2
pip install -c "$root/constraints.txt" -e "$root[test,dashboards]" || fail "the packages cannot be installed; see pip's message above."
# The oldest transformers that is allowed, beside the tested one: a test reads run files with it.
pip install --no-deps --target "$venv/oldest" transformers==4.56.2 tokenizers==0.22.0 huggingface-hub==0.36.2 ||
    fail "the oldest transformers cannot be installed; see pip's message above."
echo "$stamp" >"$venv/nolocod-setup"
