"""Import rules: dependencies point one way, and only some folders may import heavy libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP = ("core", "parallel", "models", "rollout", "adapters", "service", "recipes")
FILES = [file for top in TOP for file in sorted((ROOT / top).rglob("*.py"))]
[_IMPORTED] = ast.parse((ROOT / "models/families.py").read_text()).body[1:2]
FAMILIES = {"dense", "mixture", "wrappers"} | {alias.name for alias in _IMPORTED.names}
MOST_ENTRIES = {"rollout": 21, "adapters": 20, "models": 13}  # model families are not counted

# Folder or file -> folders and modules of ours that it may import besides its own folder; the longest match applies.
BASE = {"rollout." + name for name in ("types", "errors", "events", "object_path", "processes")}
SERVERS = BASE | {"rollout.servers"}
CHAT = BASE | {"rollout.sandbox", "rollout.rewards", "rollout.chat"}
FLEET = SERVERS | {"rollout.weights", "rollout.fleet"}
MODELS = {"models", "core", "parallel"}
ENGINE = MODELS | {
    "rollout.types",
    "rollout.servers.engine_mesh",
    "rollout.servers.engine_options",
    "rollout.servers.labels",
    "rollout.servers.prefix_routing",
    "rollout.processes",
    "rollout.chat",
    "adapters.hf",
    "adapters.peft",
    "adapters.tokenizer",
    "adapters.data.images",
    "adapters.runtime.malloc",
}
WORKFLOWS = CHAT | FLEET | {"rollout.gateway", "rollout.workflows"}
ANYTHING = set(TOP)
MAY_IMPORT = {
    "core": {"core"},
    "parallel": {"parallel", "core"},
    "models": MODELS,
    "rollout": BASE,
    "rollout/types.py": set(),
    "rollout/errors.py": set(),
    "rollout/sandbox": BASE,
    "rollout/servers": BASE,
    "rollout/rewards": BASE | {"rollout.sandbox"},
    "rollout/tasks": BASE | {"rollout.rewards"},
    "rollout/scheduling": BASE | {"rollout.rewards.signatures", "rollout.journal"},
    "rollout/chat": CHAT,
    "rollout/weights": SERVERS,
    "rollout/fleet": FLEET,
    "rollout/gateway": SERVERS | CHAT,
    "rollout/client.py": FLEET,
    "rollout/workflows": WORKFLOWS,
    "rollout/simulation": FLEET | {"rollout.client", "rollout.loop", "rollout.scheduling"},
    "rollout/engine": ENGINE,
    "rollout/engine/programs": MODELS | {"adapters.hf", "rollout.engine.grammar", "rollout.engine.request"},
    "rollout/engine/routes": ENGINE | {"rollout.engine"},
    "adapters": {
        "adapters",
        "core",
        "parallel",
        "models",
        "rollout.types",
        "rollout.chat.conversation",
        "rollout.chat.demonstration",
        "rollout.chat.images",
        "rollout.chat.template",
        "rollout.servers.engine_mesh",
        "rollout.servers.engine_options",
        "rollout.servers.labels",
        "rollout.processes",
    },
    "adapters/environments": {
        "adapters",
        "rollout.errors",
        "rollout.object_path",
        "rollout.processes",
        "rollout.rewards.signatures",
        "rollout.sandbox",
    },
    "adapters/commands/suggest.py": {"adapters", "parallel", "core", "rollout.simulation"},
    "adapters/commands/programs.py": {"adapters", "core", "parallel", "models", "rollout.engine"},
    "service": MODELS
    | {
        "adapters.hf",
        "adapters.peft",
        "adapters.runtime.atomic_dir",
        "adapters.safetensors",
        "rollout.engine",
        "rollout.processes",
        "rollout.servers.engine_options",
        "rollout.types",
    },
    "service/options.py": set(),
    "adapters/cli.py": ANYTHING,
    "recipes": ANYTHING,
}
VERSION = {"", "__version__"}  # the root itself, which imports nothing
# Files that define torch's classes; no other folder imports them before it runs.
TORCH_CLASSES = {"adapters.torch.function", "adapters.torch.module"}
HEAVY = {
    "torch", "transformers", "datasets", "tokenizers", "orbax", "sglang", "peft", "pyarrow", "pandas", "gguf", "ray",
    "wandb", "trackio", "mlflow", "swanlab",
}  # fmt: skip
NEVER_IN_ROLLOUT = HEAVY | {"jax", "jaxlib", "flax", "optax"}


def worker(name):
    """Whether rollout workers, which have neither JAX nor torch, load a file."""
    return name.startswith("rollout/") and not name.startswith("rollout/engine/")


def shown(file):
    return file.relative_to(ROOT).as_posix()


def modules(node, package):
    """Dotted names that an import statement may load; `package` is that of the file, as a tuple."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = list(package[: len(package) - node.level + 1]) if node.level else []
    base += node.module.split(".") if node.module else []
    # `from a import b`: b may be a module of the package a, or a name in the module a
    return [".".join([*base, alias.name]) for alias in node.names]


def waits(node):
    """Whether importing the file does not run this node: functions, and blocks for type checkers only."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not node.orelse
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def imports(source, package):
    """(line, dotted module, whether it runs when the file is imported) for every import statement."""

    def walk(node, on_import):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from ((child.lineno, name, on_import) for name in modules(child, package))
            yield from walk(child, on_import and not waits(child))

    return list(walk(ast.parse(source), True))


def dotted(name):
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def within(name, allowed):
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def allowed(name):
    """Folders and modules that a file may import."""
    folder = name.rpartition("/")[0]
    parts = [name, *("/".join(folder.split("/")[:n]) for n in range(folder.count("/") + 1, 0, -1))]
    mine = set() if folder == "rollout" else {folder.replace("/", ".")}
    return next(MAY_IMPORT[part] for part in parts if part in MAY_IMPORT) | mine | VERSION


def broken(name, source):
    """Yields the rules that a file violates; `name` is its path, such as `core/packing.py`."""
    folder = name.rpartition("/")[0]
    package = ("areax", *folder.split("/"))
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            ours = relative or any(m.split(".")[0] == "areax" for m in modules(node, package))
            if ours and relative == (folder.split("/")[0] == "recipes"):
                yield f"{name}:{node.lineno}: import ours absolutely in recipes, else relatively"
    for line, module, on_import in imports(source, package):
        top, _, rest = module.partition(".")
        if top == "areax":
            if not within(rest, allowed(name)):
                yield f"{name}:{line}: {folder} may not import {module}"
        elif worker(name) and top in NEVER_IN_ROLLOUT:
            yield f"{name}:{line}: rollout runs without {top}"
        elif on_import and top in HEAVY and not (top == "torch" and dotted(name) in TORCH_CLASSES):
            yield f"{name}:{line}: import {top} inside the function that needs it"
        if on_import and within(rest, TORCH_CLASSES) and folder != "adapters/torch":
            yield f"{name}:{line}: import {module}, which loads torch, inside the function that needs it"


def arrows(sources):
    """Module -> modules of ours that it imports anywhere, including in functions and for type checkers.

    Args:
      sources: path, such as `core/packing.py`, -> source.
    """
    named = {dotted(name): name for name in sources}
    found = {}
    for module, name in named.items():
        loaded = {m.removeprefix("areax.") for _, m, _ in imports(sources[name], ("areax", *name.split("/")[:-1]))}
        found[module] = {m if m in named else m.rpartition(".")[0] for m in loaded} & set(named)
    return found


def circle(arrows):
    """A path from a module back to itself, or None."""
    done = set()

    def walk(module, way):
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in done:
            for other in sorted(arrows[module]):
                if found := walk(other, [*way, module]):
                    return found
            done.add(module)

    return next((found for module in sorted(arrows) if (found := walk(module, []))), None)


def rooms(arrows):
    """The import graph of folders, and of files next to folders."""
    room = lambda module: ".".join(module.split(".")[:2])
    found = {room(module): set() for module in arrows}
    for module, others in arrows.items():
        found[room(module)] |= {room(other) for other in others} - {room(module)}
    return found


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_a_file_imports_only_what_it_may(file):
    assert not list(broken(shown(file), file.read_text()))


def test_there_is_no_import_cycle():
    between = arrows({shown(file): file.read_text() for file in FILES})
    assert len(between) == len(FILES) and sum(map(len, between.values())) > len(FILES)
    assert circle(between) is None
    assert circle(rooms(between)) is None


@pytest.mark.parametrize(
    "a, b",
    [
        ("from . import y", "from . import x"),
        ("from . import y", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .x import f"),
        ("from ..core.y import g", "def g():\n    from areax.core import x"),
    ],
)
def test_an_import_cycle_is_found(a, b):
    between = arrows({"core/x.py": a, "core/y.py": b})
    assert circle(between) == ["core.x", "core.y", "core.x"]
    assert circle(arrows({"core/x.py": a, "core/y.py": ""})) is None


@pytest.mark.parametrize("folder", MOST_ENTRIES)
def test_a_folder_has_few_entries(folder):
    entries = [path for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert len([path for path in entries if path.stem not in FAMILIES]) <= MOST_ENTRIES[folder]


def test_the_file_name_of_the_manifest_is_defined_once():
    holds = lambda file: any(
        isinstance(node, ast.Constant) and node.value == "manifest.json"
        for node in ast.walk(ast.parse(file.read_text()))
    )
    assert [shown(file) for file in FILES if holds(file)] == ["rollout/servers/labels.py"]


def test_the_root_package_imports_nothing():
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
        ("adapters/torch/__init__.py", "import torch"),
        ("adapters/torch/module.py", "import transformers"),
        ("adapters/x.py", "from .torch.module import Model"),
        ("rollout/types.py", "from . import client"),
        ("rollout/x.py", "def f():\n    import jax.numpy as jnp"),
        ("rollout/x.py", "from .engine import server"),
        ("rollout/x.py", "from . import engine"),
        ("rollout/loop.py", "from .fleet import push"),
        ("rollout/servers/x.py", "if TYPE_CHECKING:\n    from ..fleet.fleet import Fleet"),
        ("rollout/weights/x.py", "from ..fleet import push"),
        ("rollout/fleet/x.py", "from .. import client"),
        ("rollout/scheduling/x.py", "from ..servers import types"),
        ("rollout/chat/x.py", "from ..workflows import tools"),
        ("rollout/gateway/x.py", "import jax"),
        ("rollout/x.py", "from ..core import packing"),
        ("rollout/engine/x.py", "from ...adapters.data import datasets"),
        ("rollout/engine/x.py", "from .. import client"),
        ("rollout/engine/programs/x.py", "from ..engine import Engine"),
        ("rollout/engine/programs/x.py", "from ..routes import service"),
        ("service/x.py", "from ..adapters.data import datasets"),
        ("service/x.py", "from ..rollout import client"),
        ("adapters/x.py", "from ..service import server"),
        ("recipes/x.py", "from ..core import losses"),
        ("recipes/x.py", "import transformers"),
    ],
)
def test_a_violation_is_found(name, source):
    assert len(list(broken(name, source))) == 1


@pytest.mark.parametrize(
    "name, source",
    [
        ("core/x.py", "import jax.numpy as jnp\nfrom . import packing\nfrom .batch import Batch"),
        ("models/x.py", "from ..core.param import Param\nfrom ..parallel import vocab"),
        ("adapters/x.py", "def f():\n    import torch\n    from transformers import AutoModel"),
        ("adapters/x.py", "if TYPE_CHECKING:\n    import torch"),
        ("adapters/torch/module.py", "import torch\nfrom . import function"),
        ("adapters/x.py", "def f():\n    from .torch import module"),
        ("adapters/x.py", "from ..rollout.types import Sample\nfrom ..rollout import types"),
        ("adapters/cli.py", "from ..rollout import client\nfrom ..rollout.engine import server"),
        ("rollout/x.py", "import aiohttp\nfrom . import types\nfrom .types import Sample"),
        ("rollout/fleet/x.py", "from ..weights import load\nfrom ..servers.types import State\nfrom . import push"),
        ("rollout/engine/x.py", "import jax\nfrom ..types import Sample\nfrom .programs import decode"),
        ("rollout/engine/routes/x.py", "from ..engine import Engine\nfrom ...chat import fields"),
        ("rollout/engine/x.py", "from ...adapters.hf import load\nfrom ...models import linear"),
        ("service/x.py", "from ..core import step\nfrom ..rollout.engine.engine import Engine\nfrom .log import Log"),
        (
            "recipes/x.py",
            "from areax.rollout import client\nfrom areax.rollout.engine import server",
        ),
    ],
)
def test_an_allowed_import_passes(name, source):
    assert not list(broken(name, source))


def test_rollout_loads_no_accelerator_library():
    """Rollout workers run on machines that have neither JAX nor torch."""
    names = [
        ".".join(("areax", *file.relative_to(ROOT).with_suffix("").parts)) for file in FILES if worker(shown(file))
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*sorted({NEVER_IN_ROLLOUT!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
