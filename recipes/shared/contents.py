"""What a run is made of, by content: under the same path there may be other weights, another tokenizer or reward.

A run keeps hashes of it with its state, and does not go on with others in silence.
"""

import ast
import asyncio
import contextlib
import importlib.util
import json
import shlex
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from areax.adapters import hf, orbax
from areax.adapters.runtime import hub
from areax.parallel.multihost import processes
from areax.recipes.shared import environments, resume, teachers
from areax.rollout.workflows import resolve

# A hash is named by the option, of which this is hashed, or OPTION: WHAT.
HOLD = {
    "model": "weights", "teacher": "weights", "critic.model": "weights", "reward": "code", "workflow": "code",
    "row": "code", "env": "code", "workflow-options": "code", "env-options": "code",
}  # fmt: skip
OF_TOKENIZER = "tokenizer", "tokenizer's rules", "special tokens", "chat template"  # must stay, whatever --model is
OF_FROZEN = "model: config.json", "model"  # must stay while weights of --model are used that the state does not hold
TRAINED_WITH = "lora.alpha", "lora.rslora", "lora.base"  # with others the adapters of a state are another policy
WEIGHTS = "*.safetensors", "config.json"
OF_ADAPTERS = (*TRAINED_WITH, "lora.targets")  # what the state's arrays do not show, kept with their hashes
NONE = "none"  # of a file that is not there
IMPORTED, BEHIND = "what its code imports", "code behind its kind"
INSTALLED = "site-packages", "dist-packages"  # folders of code that is not the user's own
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
      ServerError: a served teacher does not answer, as `client.connect`.
    """
    found: dict[str, str] = {}
    with processes.failing_together(lambda: None):
        if not quiet:
            found = of(config, tokens)
            check(config, found, frozen)
    return found


def of(config: Any, tokens: Any) -> dict[str, str]:
    """{name: hash} of what the options of a run name, and of its tokenizer and chat template; and {"--OPTION": value},
    of adapters also those that they were trained with.

    Weights that are gone are left out, because a run that has read them can do without; so are areax's own code, and
    the weights of served teachers whose servers report no checksums.
    """
    options = resume.options(config)
    named = {name: options[name] for name in HOLD if options.get(name)}
    if "env" in named:  # which stands for both
        named = {name: value for name, value in named.items() if name not in ("workflow", "workflow-options")}
    made: dict[str, str] = {}
    for name, value in named.items():
        if HOLD[name] == "weights":
            made |= _of_model(name, Path(hub.folder(value)), name != "model" or options["init"] != "random")
        else:
            code, *imported = [one for place in _places(name, value) for one in _code(place)] or [""]
            made |= {name: code, f"{name}: {IMPORTED}": _hash(repr(imported)) if imported else NONE}
            if behind := [one for place in _behind_kinds(value) for one in _code(place)] if name == "env" else []:
                made[f"{name}: {BEHIND}"] = _hash(repr(behind))
    made |= _of_tokenizer(tokens)
    if served := options.get("teachers"):
        named["teachers"] = served
        weights = asyncio.run(teachers.weights(served))
        made |= {f"teachers: {what}": _hash(json.dumps(sums, sort_keys=True)) for what, sums in weights.items()}
    made |= {f"--{name}": resume.shown(value) for name, value in named.items()}
    made |= _of_adapters(options) if options.get("lora.rank") else {}
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
    out = f"or name another --out than {config.out}"
    for name in TRAINED_WITH if options.get("lora.rank") else ():
        value, before = (_of_adapters(given)[f"--{name}"] for given in (options, options | changed))
        if (former := then.get(f"--{name}", before)) != value:
            raise ValueError(
                f"--{name}: must be the run's, {former}, with which its adapters were trained, got {value}; give the "
                f"former, {out}"
            )
    if then and "critic.model" in changed and then.get("critic.model") != now.get("critic.model"):
        raise ValueError(
            f"--critic.model: must be the run's, {resume.shown(changed['critic.model'])}, whose critic is in its state "
            f"and goes on, got {resume.shown(options['critic.model'])}; give the former, {out}"
        )
    others = _others(then, now) if any(name.startswith("--") for name in then) else changed
    for name, value in now.items():
        option, what = ("model", name) if name in OF_TOKENIZER else _place(name)
        must = name in OF_TOKENIZER or frozen and name in OF_FROZEN
        if name.startswith("--") or then.get(name, value) == value or option in others and not must:
            continue
        copied = not must and option not in ("teachers", "critic.model")  # a critic is in the state
        instead = f"to go on with this one, name a copy of it by --{option}, " if copied else ""
        raise ValueError(
            f"--{option} {resume.shown(options[option])}: {what} must be as when the run began, with hash "
            f"{then[name]}, got {value}; give the former, {instead}{out}"
        )


def check_start(then: Mapping[str, str], folder: Path, tokens: Any, *, weights: bool, where: str) -> None:
    """Refuses another start than that of the run whose state has the hashes `then`.

    Args:
      folder, tokens: the model that the run is said to have started from, and its tokenizer.
      weights: whether its weights are used; else only what is beside them.
      where: begins the message.

    Raises:
      ValueError: another content, by name.
    """
    for name, value in (_of_model("model", folder, weights) | _of_tokenizer(tokens)).items():
        if value and then.get(name, value) != value:
            what = name if name in OF_TOKENIZER else _place(name)[1]
            raise ValueError(
                f"{where}: {what} of {folder} must be as when the run began, with hash {then[name]}, got {value}; name "
                f"a copy of the former {then.get('--model', 'model')} with --base"
            )


def check_adapters(then: Mapping[str, str], options: Mapping[str, Any], where: str) -> None:
    """Refuses other options of adapters, by name, than those with which the ones in a state with the hashes `then` were
    trained; a state of a former version does not know them.

    Args:
      options: of the run, by the name on the command line.
      where: begins the message.

    Raises ValueError.
    """
    for name, value in _of_adapters(options).items():
        if (former := then.get(name, value)) != value:
            raise ValueError(
                f"{where}: {name[2:]} must be the run's, {former}, with which its adapters were trained, got {value}; "
                "put it back"
            )


def _of_adapters(options: Mapping[str, Any]) -> dict[str, str]:
    """{"--OPTION": value} of what adapters are trained with; a whole alpha is the same number as a float."""
    given = {name: options[name] for name in OF_ADAPTERS}
    return {f"--{name}": resume.shown(float(x) if type(x) is int else x) for name, x in given.items()}


def _of_model(name: str, folder: Path, weights: bool) -> dict[str, str]:
    """The hashes of a checkpoint that the option `name` names; "" of weights that are gone or not asked for."""
    files = hf.SETTINGS if name == "model" else ("config.json",)
    made = {f"{name}: {file}": _content(folder / file) for file in files}
    return made | {name: _weights(folder) if weights else ""}


def _of_tokenizer(tokens: Any) -> dict[str, str]:
    encoded = [tokens.encode(text, add_special_tokens=False) for text in TEXTS]
    return {
        "tokenizer": _hash(repr([sorted(tokens.get_vocab().items()), encoded])),
        "tokenizer's rules": _hash(json.dumps(_rules(tokens, encoded))),
        "special tokens": _hash(repr([sorted(tokens.special_tokens_map.items()), _added(tokens)])),
        "chat template": _hash(repr(tokens.chat_template or "")),
    }


def _place(name: str) -> tuple[str, str]:
    """(option, what is hashed) of a hash's name."""
    option, _, what = name.partition(": ")
    return option, what or HOLD.get(option, "")


def _others(then: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """The options that name something else than when a state was saved, whose config.json may be newer."""
    given = {name for name in (*then, *now) if name.startswith("--")}
    return {name[2:] for name in given if not resume.same(then.get(name, ""), now.get(name, ""))}


def _weights(folder: Path) -> str:
    """The hash of all weights and of the config, whatever the files are called; "" if the weights are gone."""
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    if not any(file.suffix == ".safetensors" for file in files):
        return ""
    with ThreadPoolExecutor() as threads:
        return _hash(repr(list(threads.map(hub.content, files))))


def _rules(tokens: Any, encoded: Iterable[list[int]]) -> list:
    """What else tokenizers with the same vocabulary differ in: order of merges, scores, decoding, special tokens."""
    inner = getattr(tokens, "backend_tokenizer", None)
    model = json.loads(inner.to_str())["model"] if inner else {}
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else []
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ()]
    special = sorted(i for i, token in tokens.added_tokens_decoder.items() if token.special)
    decoded = [tokens.decode(ids, skip_special_tokens=True) for ids in encoded]
    return [scores, merges, decoded, special, tokens.eos_token_id]


def _added(tokens: Any) -> list:
    """Tokens beside the vocabulary's own, which take spaces next to them along, or not."""
    flags = "content", "lstrip", "rstrip", "single_word", "normalized", "special"
    return [(id, *(getattr(one, flag) for flag in flags)) for id, one in sorted(tokens.added_tokens_decoder.items())]


def _places(name: str, value: str) -> list[str]:
    """The object paths in the value of an option: of several environments each; of options in JSON those among its
    texts."""
    if name == "env":
        return [share.env for share in environments.shares(value, "")] or [value]
    return [*_texts(json.loads(value))] if name.endswith("-options") else [value]


def _behind_kinds(env: str) -> list[str]:
    """The object paths behind the kinds of environments, as in inspect_ai:FILE.py:TASK, and modules, as in
    verifiers:MODULE."""
    names = [place.partition(":")[2] for place in _places("env", env)]
    return [name if ":" in name else f"{name.replace('-', '_')}:" for name in names]


def _texts(value: Any) -> Iterator[str]:
    """The texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _code(path: str) -> list[str]:
    """Hashes of the file that an object path names, and of those that it imports, directly or not.

    Of a command it is the first text file that it names: those behind it may be its results. There are none of areax's
    own code.
    """
    if path.startswith(resolve.COMMAND):
        words = shlex.split(path.removeprefix(resolve.COMMAND))
        return [hub.content(word) for word in words if _is_text(Path(word))][:1]
    place = path.rpartition(":")[0]
    files = [Path(place)] if place.endswith(".py") else [*_files(place)][-1:]
    waiting = [file.resolve() for file in files if file.is_file()]
    found = dict.fromkeys(waiting)
    for file in waiting:  # which grows
        new = [other for other in dict.fromkeys(_imported(file)) if other not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return [hub.content(file) for file in waiting]


def _imported(file: Path) -> Iterator[Path]:
    """The user's own files that a Python file imports by statements."""
    library = Path(sysconfig.get_path("stdlib")).resolve()
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):  # for whoever loads it to explain
        return
    found: list[Path] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += (one for alias in node.names for one in _files(alias.name))
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if node.level else None
            names = (".".join(filter(None, (node.module, alias.name))) for alias in node.names)
            found += (one for name in names for one in _files(name, folder))
    for one in map(Path.resolve, found):
        if library not in one.parents and not {*INSTALLED} & {*one.parts}:
            yield one


def _files(name: str, folder: Path | None = None) -> Iterator[Path]:
    """The files of a module, and of the packages that it is in, first; none is imported. None are areax's own.

    Args:
      folder: where a relative import looks.
    """
    top, *inner = name.split(".")
    if folder:
        roots, inner = [str(folder)], [top, *inner]
    else:
        spec = None
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(top) if top and top != "areax" else None  # of an inner one it would import
        if spec is None:
            return
        roots = [*(spec.submodule_search_locations or ())]
        if spec.origin and Path(spec.origin).is_file():
            yield Path(spec.origin)
    for count in range(1, len(inner) + 1):
        ways = (Path(root, *inner[:count]) for root in roots)
        files = (file for way in ways for file in (way.with_suffix(".py"), way / "__init__.py"))
        yield from [file for file in files if file.is_file()][:1]


def _is_text(file: Path) -> bool:
    """Whether a word names a file that can be read, and not a program for this machine, such as an interpreter."""
    try:
        if not file.is_file():
            return False
        with open(file, "rb") as opened:
            return b"\0" not in opened.read(1024)
    except OSError:  # no name of a file, such as a program's text, or not for this user
        return False


def _content(file: Path) -> str:
    return hub.content(file) if file.is_file() else NONE


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
