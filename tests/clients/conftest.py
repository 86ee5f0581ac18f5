"""A server of areax in a process of its own, for clients that have an environment without areax."""

import os
import subprocess
from pathlib import Path

import pytest

QUIET = {  # else some report, or look something up, elsewhere
    "AI_SDK_LOG_WARNINGS": "false",
    "LANGCHAIN_TRACING_V2": "false", "LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False", "OTEL_SDK_DISABLED": "true", "NO_PROXY": "127.0.0.1",
    "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
os.environ.update(QUIET)


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """The server's address."""
    program = Path(__file__).parent / "program.py"
    command = [os.environ["AREAX_PYTHON"], str(program), str(tmp_path_factory.mktemp("model") / "parrot")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("http://"), line
            yield line.split()[0]
        finally:
            process.terminate()
