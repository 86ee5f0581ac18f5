#!/usr/bin/env bash
# install.sh DIR: makes a virtual environment in which the real SGLang serves on a CPU; 3.3 GB, or 6 with the CUDA build of torch.
#
# SGLang's own requirements ask for CUDA builds that a CPU cannot load. So torch comes first, with what it needs,
# and then the complete list of requirements.txt with nothing resolved and nothing added.
set -euo pipefail
target=${1:?usage: install.sh DIR}
list=$(dirname "$0")/requirements.txt
"${PYTHON:-python3}" -m venv "$target"
install() { "$target/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
install "$(grep '^torch==' "$list")"
install --no-deps -r "$list"
"$target/bin/python" "$(dirname "$0")/serve.py" --version
