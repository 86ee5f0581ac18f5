"""Only `make test-hosts` runs these tests: they need root, iproute2, util-linux and /dev/net/tun."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
collect_ignore_glob = [] if os.environ.get("AREAX_HOSTS") else ["test_*.py"]


@pytest.fixture(scope="session")
def network(tmp_path_factory):
    from network import Network

    made = Network(tmp_path_factory.mktemp("hosts"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def hosts(network):
    """Hosts by their letters, which boot when they are named and end after the test."""
    try:
        yield network
    finally:
        network.stop()
