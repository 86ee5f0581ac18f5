"""Executes the notebooks of examples/; `make examples` writes their outputs in place."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
METADATA = {  # without the version of the Python that executed it
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(notebook: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new kernel, which works in `folder` and keeps its own files there.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    environment = {name: value for name, value in os.environ.items() if name != "AREAX_GSM8K"}  # reads the fixture
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLCONFIGDIR": str(ROOT / ".cache" / "matplotlib"),
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm has no use for widgets here
    }
    # A first import of matplotlib may warn that it looks for fonts, and keeps what it finds.
    subprocess.run([sys.executable, "-c", "import matplotlib.pyplot"], env=environment, check=True, capture_output=True)
    book = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        book, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    manager = client.create_kernel_manager()
    with tempfile.TemporaryDirectory() as sockets:  # whose paths must be short
        manager.transport, manager.connection_file = "ipc", f"{sockets}/kernel.json"
        client.execute(env=environment)
    book.metadata = nbformat.from_dict(METADATA)
    return book


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            book = execute(notebook, Path(folder))
        nbformat.write(book, notebook)
        print(notebook.relative_to(ROOT), flush=True)
