# Two images, for hosts with an NVIDIA driver for CUDA 13 (580 or newer):
#
#   docker build --target trainer -t areax .
#   docker build --target sglang -t areax-sglang .
#
# They share a folder for published weights and communicate over HTTP; the host network keeps addresses simple:
#
#   docker run --gpus '"device=0"' --network host --ipc host -v /dev/shm:/dev/shm -v $PWD/models:/models areax-sglang \
#     --model-path /models/Qwen3-8B --port 30000
#   docker run --gpus '"device=1"' --network host --ipc host -v /dev/shm:/dev/shm -v $PWD/models:/models -v $PWD/runs:/runs areax \
#     train grpo --help
#
# On one host, publish to a folder in /dev/shm: a push is then a copy in memory. On several hosts, publish to a shared
# file system and give SGLang an address of the private network with `--host`, and a key (docs/servers.md).
# For a TPU use `python:3.12-slim` instead of the CUDA base and `.[tpu]` instead of `.[cuda]`.

FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base
# PYTHONSAFEPATH keeps the working directory off sys.path: no file in it can shadow a module.
ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/venv/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

# JAX ships its own CUDA libraries; the base image only makes the driver visible.
FROM base AS trainer
COPY . /srv/areax
RUN pip install "/srv/areax[cuda]" -c /srv/areax/constraints.txt
ENV JAX_COMPILATION_CACHE_DIR=/var/cache/jax
WORKDIR /runs
ENTRYPOINT ["areax"]
CMD ["--help"]

# SGLang pins torch and transformers, and compiles kernels at start-up: it gets its own environment and a compiler.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS sglang
ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/venv/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv ca-certificates build-essential libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
RUN pip install "sglang==0.5.23"
EXPOSE 30000
ENTRYPOINT ["python", "-m", "sglang.launch_server"]
CMD ["--help"]
