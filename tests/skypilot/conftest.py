"""Only `make test-skypilot` names the Python of an environment with SkyPilot."""

import os

collect_ignore = [] if os.environ.get("AREAX_SKYPILOT_PYTHON") else ["test_skypilot.py"]
