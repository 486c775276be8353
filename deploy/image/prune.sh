#!/bin/sh
# prune.sh VENV: takes out of the image's environment what no node runs, and compiles what every node imports.
set -eu
packages=$(echo "$1"/lib/python3*/site-packages)

# Never imported: what built it, others' command lines, stubs and compilers, tests, tables of network cards' makers.
"$1/bin/pip" --quiet uninstall --yes hf-xet grpcio mypy-protobuf types-protobuf types-requests \
    typer pydantic pydantic-core
rm -rf "$packages"/pip "$packages"/pip-* "$packages"/setuptools "$packages"/setuptools-* "$packages"/pkg_resources \
    "$packages"/examples "$packages"/Crypto/SelfTest "$packages"/netaddr/eui/*.txt
find "$packages" -depth -type d \( -name tests -o -name test \) -exec rm -rf {} +
find "$packages" -type f -name '*.pyi' -delete
find "$packages" -type f -name '*.so*' -exec strip --strip-unneeded {} +

# Byte code for what is imported at every start and for nothing else: transformers alone has thousands of modules.
"$1/bin/python" -c 'import nolocod.commands.node, nolocod.node.daemon, nolocod.trainer.worker, nolocod.trainer.replica
import transformers; transformers.LlamaForCausalLM'
