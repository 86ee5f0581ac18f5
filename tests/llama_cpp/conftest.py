"""Only `make test-llama-cpp` names the Python of an environment with llama.cpp."""

import os

collect_ignore = [] if os.environ.get("AREAX_LLAMA_CPP_PYTHON") else ["test_llama_cpp.py"]
