"""Only `make test-compilers` puts the compilers of chips where Python finds them."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # also of the processes that compile
collect_ignore_glob = [] if os.environ.get("AREAX_COMPILERS") else ["test_*.py"]
