"""The real server is tested where AREAX_VLLM_PYTHON names the Python of an environment with vLLM."""

import os

collect_ignore = [] if os.environ.get("AREAX_VLLM_PYTHON") else ["test_real.py"]
