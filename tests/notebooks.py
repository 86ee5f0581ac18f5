"""Executes the notebooks of examples/; `make examples` writes their outputs in place."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # for a cell
PATH = re.compile(r"(?<![\w./<])/[\w.-]+/")  # an absolute one
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
METADATA = {  # without the version of the Python that executed it
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(notebook: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new kernel, which works in `folder` and keeps its own files there.

    Raises:
      ValueError: it is no notebook.
      CellExecutionError: a cell raised.
      CellTimeoutError: a cell took longer than SECONDS.
      DeadKernelError: a cell ended the kernel.
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
        book, timeout=SECONDS, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    manager = client.create_kernel_manager()
    with tempfile.TemporaryDirectory() as sockets:  # whose paths must be short
        manager.transport, manager.connection_file = "ipc", f"{sockets}/kernel.json"
        client.execute(env=environment)
    book.metadata = nbformat.from_dict(METADATA)
    return book


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell printed, and the text of what it showed."""
    return [output["text"] if "text" in output else output["data"]["text/plain"] for output in cell.outputs]


def paths(book: nbformat.NotebookNode) -> list[str]:
    """The absolute paths, of some machine, in the outputs of a notebook."""
    return [path for cell in book.cells if cell.cell_type == "code" for path in PATH.findall("\n".join(texts(cell)))]


def write(notebook: Path) -> None:
    """Executes a notebook, and writes it with its outputs.

    Raises:
      ValueError: its outputs have a path of this machine; else as `execute`.
    """
    with tempfile.TemporaryDirectory() as folder:
        book = execute(notebook, Path(folder))
    if found := paths(book):
        raise ValueError(f"outputs must have no path of a machine, got {', '.join(found)}...; print names")
    new = ROOT / ".cache" / notebook.name
    new.parent.mkdir(exist_ok=True)
    nbformat.write(book, new)
    new.replace(notebook)


def main() -> int:
    for notebook in NOTEBOOKS:
        try:
            write(notebook)
        except CellExecutionError as error:
            wrong = f"a cell raised {error.ename}: {error.evalue}\n{error.traceback}"
        except CellTimeoutError:
            wrong = f"a cell must end within {SECONDS} s, got one that does not"
        except (DeadKernelError, ValueError, OSError) as error:
            wrong = str(error)
        else:
            print(notebook.relative_to(ROOT), flush=True)
            continue
        print(f"{wrong}\nexamples: {notebook}: {wrong.splitlines()[0][:300]}; it was not written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
