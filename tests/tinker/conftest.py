"""A server of areax in a process of its own, for clients of Tinker's API that have an environment without areax."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

os.environ.update(
    TINKER_API_KEY="tml-test", HF_HUB_OFFLINE="1", NO_PROXY="127.0.0.1", JAX_PLATFORMS="cpu", TINKER_TELEMETRY="0"
)
import tinker  # noqa: E402 (reads the environment)

PROGRAM = Path(__file__).parent / "program.py"


class Server:
    """The server of a folder; it can be killed, and starts again at the same folder."""

    def __init__(self, folder):
        self.folder, self.process, self.url, self.port = folder, None, "", "0"

    def start(self):
        command = [os.environ["AREAX_PYTHON"], str(PROGRAM), "out", self.port, os.environ.get("AREAX_RECORD", "")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.folder)
        line = self.process.stdout.readline()
        assert line.startswith("http://"), line
        self.url = line.split()[0]
        self.port = self.url.rpartition(":")[2]

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server"))
    made.start()
    os.chdir(made.folder)  # where the model's name is its folder
    yield made
    made.end()


@contextlib.contextmanager
def opened(url):
    """A client; those that can say that a session has ended do."""
    with contextlib.ExitStack() as stack:
        service = tinker.ServiceClient(base_url=url)
        yield stack.enter_context(service) if hasattr(service, "__enter__") else service


@pytest.fixture(scope="session")
def connect(server):
    return lambda: opened(server.url)


@pytest.fixture(scope="session")
def client(connect):
    with connect() as service:
        yield service
