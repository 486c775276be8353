# One node. The layers above the base: torch, numba and what they need, which change seldom; then everything else. Builds with and
# without BuildKit.
#
#   docker build -t nolocod .                                                          for NVIDIA's GPUs, on x86
#   docker build -t nolocod --build-arg TORCH_INDEX=<index with CPU builds of torch> .     without one
#   docker build -t nolocod --build-arg EXTRAS='[datasets]' .       also for runs on parquet files and hub data sets
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS torch
# Empty: the package index's own build, for CUDA on x86. Else an index with another one, for example for CPUs only.
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY constraints.txt ./
RUN python -m venv /opt/torch \
    && /opt/torch/bin/pip install --quiet -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
        "$(grep '^torch==' constraints.txt)" \
    && /opt/torch/bin/pip install --quiet -c constraints.txt numpy numba \
    && rm -rf /opt/torch/lib/python3*/site-packages/pip*

FROM torch AS node
# Some of libp2p's packages come as sources only.
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends gcc libc6-dev libgmp-dev >/dev/null \
    && rm -rf /var/lib/apt/lists/*
ARG EXTRAS=
ENV PIP_CONSTRAINT=/build/constraints.txt
COPY pyproject.toml README.md ./
COPY nolocod/__init__.py nolocod/
# Packages before sources: a change of ours builds the last step again and no more.
RUN python -m venv /opt/nolocod \
    && ls -d /opt/torch/lib/python3*/site-packages >"$(echo /opt/nolocod/lib/python3*/site-packages)/torch.pth" \
    && /opt/nolocod/bin/pip install --quiet --no-compile ".${EXTRAS}" \
    && /opt/nolocod/bin/pip uninstall --quiet --yes nolocod
COPY nolocod nolocod
COPY deploy/image/prune.sh deploy/image/healthy.py ./
RUN /opt/nolocod/bin/pip install --quiet --no-compile --no-deps . \
    && install -m 0755 healthy.py /opt/nolocod/bin/nolocod-healthy \
    && sh prune.sh /opt/nolocod

FROM ${PYTHON_IMAGE}
COPY --from=torch /opt/torch /opt/torch
COPY --from=node /opt/nolocod /opt/nolocod
ENV PATH=/opt/nolocod/bin:$PATH NOLOCOD_HOME=/data HF_HOME=/data/cache/hub HOME=/data \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Mode 0700, as the daemon would make it. A new volume takes owner and mode from here; the testnet's lies at /rendezvous.
RUN groupadd --gid 10001 nolocod \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin nolocod \
    && install -d -m 0700 -o nolocod -g nolocod /data /rendezvous \
    && nolocod --version
USER 10001:10001
WORKDIR /data
VOLUME /data
# https://github.com/opencontainers/image-spec/blob/main/annotations.md; the last step, so that a new revision builds it alone.
ARG PYTHON_IMAGE
ARG REVISION=
ARG CREATED=
LABEL org.opencontainers.image.title=nolocod \
    org.opencontainers.image.description="A peer-to-peer training daemon for volunteers" \
    org.opencontainers.image.version=0.1.0 \
    org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.base.name=${PYTHON_IMAGE} \
    org.opencontainers.image.revision=${REVISION} \
    org.opencontainers.image.created=${CREATED}
# 4001 for peers; the pages' port is the owner's choice (--http).
EXPOSE 4001
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s CMD ["nolocod-healthy", "/healthz"]
# SIGTERM ends the exchange under way and writes a checkpoint; give it 30 seconds (docker run --stop-timeout 30).
STOPSIGNAL SIGTERM
ENTRYPOINT ["nolocod"]
CMD ["--help"]
