"""Only `make test-compilers` puts the compilers of chips where Python finds them."""

import os

collect_ignore = [] if os.environ.get("AREAX_COMPILERS") else ["test_compilers.py", "test_plans.py"]
