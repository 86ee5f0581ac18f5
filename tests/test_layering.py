"""Who may import what: arrows point one way, and heavy libraries stay behind the borders."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "parallel", "models", "rollout", "rollout/engine", "rollout/gateway", "adapters", "recipes")
FILES = [file for folder in FOLDERS for file in sorted((ROOT / folder).glob("*.py"))]
WORKERS = ("rollout", "rollout/gateway")

ANYTHING = {"core", "parallel", "models", "rollout", "adapters", "recipes"}
MAY_IMPORT = {  # folder or file -> folders and modules of ours; a file's own entry comes first
    "core": {"core"},
    "parallel": {"parallel", "core"},
    "models": {"models", "core", "parallel"},
    "rollout/types.py": set(),
    "rollout": {"rollout"},
    "rollout/gateway": {"rollout"},
    "rollout/engine": {
        "rollout.engine",
        "rollout.text",
        "rollout.types",
        "core",
        "parallel",
        "models",
        "adapters.hf",
        "adapters.peft",
        "adapters.tokenizer",
    },
    "adapters": {"adapters", "core", "parallel", "models", "rollout.types"},
    "adapters/cli.py": ANYTHING,
    "recipes": ANYTHING,
}
VERSION = {"", "__version__"}  # the root itself, which imports nothing
ENGINE = "rollout.engine"  # inside the folder rollout, yet forbidden to it: it needs jax
HEAVY = {"torch", "transformers", "datasets", "tokenizers", "orbax", "sglang", "peft"}
NEVER_IN_ROLLOUT = HEAVY | {"jax", "jaxlib", "flax", "optax"}


def shown(file):
    return file.relative_to(ROOT).as_posix()


def modules(node, package):
    """Dotted names that an import statement may load; `package`: the file's own, as a tuple."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = list(package[: len(package) - node.level + 1]) if node.level else []
    base += node.module.split(".") if node.module else []
    # `from a import b`: b may be a module of the package a, or a name in the module a
    return [".".join([*base, alias.name]) for alias in node.names]


def waits(node):
    """Whether importing a file leaves this part of it alone: functions, and what only type checkers read."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not node.orelse
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def imports(source, package):
    """(line, dotted module, whether it runs on import of the file) for every import statement."""

    def walk(node, on_import):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from ((child.lineno, name, on_import) for name in modules(child, package))
            yield from walk(child, on_import and not waits(child))

    return list(walk(ast.parse(source), True))


def within(name, allowed):
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def broken(name, source):
    """Yields the rules that a file breaks; `name` is its path, such as `core/packing.py`."""
    folder = name.rpartition("/")[0]
    allowed = MAY_IMPORT.get(name, MAY_IMPORT[folder])
    package = ("areax", *folder.split("/"))
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            ours = relative or any(m.split(".")[0] == "areax" for m in modules(node, package))
            if ours and relative == (folder == "recipes"):
                yield f"{name}:{node.lineno}: import ours absolutely in recipes, else relatively"
    for line, module, on_import in imports(source, package):
        top, _, rest = module.partition(".")
        if top == "areax":
            into_engine = folder in WORKERS and within(rest, {ENGINE})
            if into_engine or not within(rest, allowed | VERSION):
                yield f"{name}:{line}: {folder} may not import {module}"
        elif folder in WORKERS and top in NEVER_IN_ROLLOUT:
            yield f"{name}:{line}: rollout runs without {top}"
        elif on_import and top in HEAVY:
            yield f"{name}:{line}: import {top} inside the function that needs it"


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_imports_point_down(file):
    assert not list(broken(shown(file), file.read_text()))


def test_the_root_imports_nothing():
    assert not imports((ROOT / "__init__.py").read_text(), ("areax",))


@pytest.mark.parametrize(
    "name, source",
    [
        ("core/x.py", "from ..models import qwen3"),
        ("core/x.py", "from .. import adapters"),
        ("core/x.py", "from areax.core import packing"),
        ("core/x.py", "def f():\n    from ..rollout import types"),
        ("parallel/x.py", "from ..models.linear import linear"),
        ("models/x.py", "from ..adapters import hf"),
        ("models/x.py", "import torch"),
        ("adapters/x.py", "from ..rollout import client"),
        (
            "adapters/x.py",
            "try:\n    from transformers import AutoConfig\nexcept ImportError:\n    pass",
        ),
        ("adapters/x.py", "class A:\n    import orbax.checkpoint"),
        ("adapters/x.py", "if not TYPE_CHECKING:\n    import torch"),
        ("rollout/types.py", "from . import client"),
        ("rollout/x.py", "def f():\n    import jax.numpy as jnp"),
        ("rollout/x.py", "from .engine import server"),
        ("rollout/x.py", "from . import engine"),
        ("rollout/x.py", "from ..core import packing"),
        ("rollout/engine/x.py", "from ...adapters import datasets"),
        ("rollout/engine/x.py", "from .. import client"),
        ("recipes/x.py", "from ..core import losses"),
        ("recipes/x.py", "import transformers"),
    ],
)
def test_a_broken_rule_is_seen(name, source):
    assert len(list(broken(name, source))) == 1


@pytest.mark.parametrize(
    "name, source",
    [
        ("core/x.py", "import jax.numpy as jnp\nfrom . import packing\nfrom .batch import Batch"),
        ("models/x.py", "from ..core.param import Param\nfrom ..parallel import vocab"),
        ("adapters/x.py", "def f():\n    import torch\n    from transformers import AutoModel"),
        ("adapters/x.py", "if TYPE_CHECKING:\n    import torch"),
        ("adapters/x.py", "from ..rollout.types import Sample\nfrom ..rollout import types"),
        ("adapters/cli.py", "from ..rollout import client\nfrom ..rollout.engine import server"),
        ("rollout/x.py", "import aiohttp\nfrom . import types\nfrom .types import Sample"),
        ("rollout/engine/x.py", "import jax\nfrom ..types import Sample\nfrom . import decode"),
        ("rollout/engine/x.py", "from ...adapters.hf import load\nfrom ...models import linear"),
        (
            "recipes/x.py",
            "from areax.rollout import client\nfrom areax.rollout.engine import server",
        ),
    ],
)
def test_a_lawful_import_passes(name, source):
    assert not list(broken(name, source))


def test_rollout_loads_no_accelerator_library():
    """Rollout workers run on machines that have neither JAX nor torch."""
    files = [file for file in FILES if file.parent.relative_to(ROOT).as_posix() in WORKERS]
    names = [".".join(("areax", *file.relative_to(ROOT).with_suffix("").parts)) for file in files]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*sorted({NEVER_IN_ROLLOUT!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
