"""What a run is made of, by content: under the same path there may be other weights, another tokenizer or reward.

A run keeps hashes of it with its state, and does not go on with others in silence.
"""

import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from areax.adapters import orbax
from areax.adapters.runtime import hub
from areax.parallel.multihost import processes
from areax.recipes.shared import resume

HOLD = {"model": "weights", "teacher": "weights", "critic.model": "weights", "reward": "code", "workflow": "code"}
TRAINED_WITH = "lora.alpha", "lora.rslora", "lora.base"  # with others the adapters of a state are another policy
WEIGHTS = "*.safetensors", "config.json"
TEXTS = (  # which two tokenizers with the same vocabulary may split in two ways
    "The quick brown fox jumps over 1,234,567 lazy dogs.",
    "  def f(x):\n\treturn x**2  # \u00e9\u00df\u4f60\u597d\n\n",
    "2.5e-3 + 17 = ?  \\boxed{\\frac{1}{2}}",
    "I'm sure they'd've said: \u201cna\u00efve caf\u00e9\u201d\u2026 \U0001f600",
)


def same(config: Any, tokens: Any, *, frozen: bool, quiet: bool) -> dict[str, str]:
    """The hashes to keep with the state, {} in `quiet` processes; all processes of a job call it.

    Args:
      frozen: whether weights of --model are used that the state does not hold.

    Raises:
      ValueError: as `check`; in all processes.
    """
    found: dict[str, str] = {}
    with processes.failing_together(lambda: None):
        if not quiet:
            found = of(config, tokens)
            check(config, found, frozen)
    return found


def of(config: Any, tokens: Any) -> dict[str, str]:
    """{name: hash} of what the options of a run name, and of its tokenizer and chat template.

    Weights that are gone are left out, because a run that has read them can do without; so is code of areax itself.
    """
    options = resume.options(config)
    named = {name: options.get(name) or "" for name in HOLD}
    if options.get("init") == "random":
        named["model"] = ""
    made = {name: (_weights if HOLD[name] == "weights" else _code)(value) for name, value in named.items() if value}
    encoded = [tokens.encode(text, add_special_tokens=False) for text in TEXTS]
    made["tokenizer"] = _hash(repr([sorted(tokens.get_vocab().items()), encoded]).encode())
    made["chat template"] = _hash(repr(tokens.chat_template or "").encode())
    return {name: value for name, value in made.items() if value}


def check(config: Any, now: Mapping[str, str], frozen: bool) -> None:
    """Refuses to go on from the newest state in `config.out` with other contents; arguments as of `same`.

    With a changed option a run goes on, and says so, but for frozen weights, without which its state is of no use.

    Raises:
      ValueError: another content under the same option; other frozen weights; another scale or base of adapters.
    """
    newest = orbax.newest(Path(config.out) / "state")
    if not newest:
        return
    cursor = newest[1] or {}
    then = cursor.get("rollout", cursor).get("contents") or {}
    options, changed = resume.options(config), {name: former for name, former, _ in resume.changed(config)}
    instead = f"give the former, or name another --out than {config.out}"
    for name in TRAINED_WITH:
        if name in changed and options["lora.rank"]:
            raise ValueError(
                f"--{name}: must be the run's, {changed[name]}, with which its adapters were trained, got "
                f"{options[name]}; {instead}"
            )
    for name, value in now.items():
        kept = name in changed and not (name == "model" and frozen)
        if kept or then.get(name, value) == value:
            continue
        what = f"--{name} {options[name]}: {HOLD[name]}" if name in HOLD else f"--model {options['model']}: {name}"
        raise ValueError(f"{what} must be as when the run began, with hash {then[name]}, got {value}; {instead}")


def _weights(model: str) -> str:
    """The hash of all weights and of the config, whatever the files are called; "" if the weights are gone."""
    folder = Path(hub.folder(model))
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    if not any(file.suffix == ".safetensors" for file in files):
        return ""
    with ThreadPoolExecutor() as threads:
        return _hash(repr(list(threads.map(hub.content, files))).encode())


def _code(path: str) -> str:
    """The hash of the file that an object path names; "" for a command, and for areax's own code."""
    place = path.rpartition(":")[0]
    if not place.endswith(".py"):
        top, *inner = place.split(".")
        spec = importlib.util.find_spec(top) if top and top != "areax" else None  # of an inner module it would import
        if inner and spec:
            files = (Path(root, *inner) for root in spec.submodule_search_locations or ())
            found = [f for file in files for f in (file.with_suffix(".py"), file / "__init__.py") if f.is_file()]
            place = str(found[0]) if found else ""
        else:
            place = spec.origin or "" if spec else ""
    return hub.content(place) if place and Path(place).is_file() else ""


def _hash(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
