# One variant as an image, for a CUDA host or a CPU. `slimqwen image build` lays out the context and gives every
# argument; a plain `docker build .` has neither. The base is any Debian or Ubuntu, or an image of Python made of one,
# named by its digest: CUDA's libraries come from the lock, its driver from the host.
ARG BASE_IMAGE
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS system
# A compiler stays in the image: torch.compile and Triton compile what no cache holds, and look for a compiler even
# where a cache holds everything.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 \
    && { command -v python3 || apt-get install --yes --no-install-recommends python3-dev python3-venv; } \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*

FROM system AS environment
ARG PLATFORM
ARG ROOT
ARG PYTHON_VERSION=
# Before the long part: the compile cache fits only the Python version that it was made with.
RUN python3 -c 'import platform, sys; have, want = platform.python_version(), sys.argv[1]; \
    sys.exit(f"error: the base has Python {have}, the compile cache needs {want}; take a base with that" \
    if want and have != want else 0)' "${PYTHON_VERSION}"
WORKDIR ${ROOT}
COPY install/ ./
# wheelhouse: a folder on the host, empty where the build may ask a package index.
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    export PIP_NO_CACHE_DIR=1 \
    && if ls /wheelhouse/*.whl > /dev/null 2>&1; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheelhouse; fi \
    && python3 scripts/install.py --platform "${PLATFORM}" \
    && { .venv/bin/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true; } \
    && rm -rf logs build .venv/uv

# On top of the environment, not beside it: that layer of gigabytes is one for all variants, and never copied.
FROM environment
ARG PLATFORM
ARG ROOT
ARG VARIANT
ARG PORT
ARG COMMIT
ARG DIRTY
ARG CHECKPOINT
COPY variant/ ./
# All that is written at run time lies in .cache: compiled graphs, and its user's home.
RUN .venv/bin/python -m compileall -q slimqwen scripts \
    && install --directory --owner=10001 --group=10001 .cache
ENV PATH=${ROOT}/.venv/bin:${PATH} \
    HOME=${ROOT}/.cache \
    SLIMQWEN_VARIANT=${VARIANT} \
    SLIMQWEN_PLATFORM=${PLATFORM} \
    SLIMQWEN_PORT=${PORT} \
    HF_HUB_OFFLINE=1 \
    DO_NOT_TRACK=1 \
    VLLM_NO_USAGE_STATS=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="slimqwen ${VARIANT} (${PLATFORM})" \
      org.opencontainers.image.revision="${COMMIT}" \
      slimqwen.dirty="${DIRTY}" \
      slimqwen.variant="${VARIANT}" \
      slimqwen.platform="${PLATFORM}" \
      slimqwen.checkpoint="${CHECKPOINT}"
EXPOSE ${PORT}
USER 10001:10001
# 503 until warmed up and while draining. A cold compilation on a GPU takes minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"SLIMQWEN_PORT\"]}/ping', timeout=4)"]
# The shell only fills in what the build decided, and becomes serve.py, which becomes vLLM.
ENTRYPOINT ["/bin/sh", "-c", "exec python scripts/serve.py --variant \"$SLIMQWEN_VARIANT\" --platform \"$SLIMQWEN_PLATFORM\" \"$@\"", "serve"]
