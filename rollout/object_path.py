"""Resolves object paths, `package.module:name` or `path/to/file.py:name`, by which functions are sent to processes.

A function sent by its path needs no pickling, and the process that resolves it loads only what the function's own
module imports.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from .processes.printable import one_line

FILES = "areax_file_"  # begins the names of modules loaded from files
LONGEST = 2000  # characters of an error message
HOW = "write 'package.module:function' or 'path/to/file.py:function'"


def resolve(name: str) -> Callable:
    """Loads the function or class at the path `name`; the same object for the same name within a process.

    Raises:
      ValueError: as `load_object`, or the object is not callable.
    """
    if not callable(found := load_object(name)):
        raise ValueError(f"{name}: must be a function, got {type(found).__name__}")
    return found


def of(function: Any) -> str:
    """The object path of a function, by which `resolve` finds it in another process.

    Raises:
      ValueError: it is not at the top level of a module.
    """
    name, place = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    holder = sys.modules.get(place)
    if getattr(holder, name, None) is not function:
        raise ValueError(
            f"{name or type(function).__name__}: must be a function at the top level of a module or file, which worker "
            "processes import, got one that is not; define it there with def"
        )
    file = getattr(holder, "__file__", None)
    return f"{file}:{name}" if file and (place == "__main__" or place.startswith(FILES)) else f"{place}:{name}"


def load_object(name: str) -> Any:
    """Loads the object at the path `name`.

    Raises:
      ValueError: one line: a malformed name, a missing file, module or attribute, or a module that cannot be imported,
        whatever its code raises meanwhile.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ValueError(f"{name!r} does not name a function; {HOW}")
    loaded = module(place)
    function = getattr(loaded, attribute, None)
    if function is None:
        public = [key for key, value in vars(loaded).items() if callable(value) and key[0] != "_"]
        near = difflib.get_close_matches(attribute, public, n=3) or sorted(public)[:5]
        hint = f"did you mean {', '.join(near)}?" if near else "it defines no functions"
        raise ValueError(f"{name}: there is no {attribute!r} in {place}; {hint}")
    return function


def module(place: str) -> ModuleType:
    """Imports the module at a dotted name or at a path ending in `.py`; a file runs once per process.

    A file's module is registered in `sys.modules` under a name derived from its absolute path, so that dataclasses
    work and its objects can be unpickled in any process that has resolved the same file.
    """
    is_file = place.endswith(".py")
    if not is_file and not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(f"{place!r} is neither a module nor a path ending in .py; {HOW}")
    if is_file and not Path(place).is_file():
        raise ValueError(f"{place}: there is no such file (looked in {Path.cwd()})")
    try:
        return _file(Path(place)) if is_file else importlib.import_module(place)
    except (ImportError, SyntaxError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not is_file and f"{place}.".startswith(f"{missing}."):
            raise ValueError(
                f"{place}: there is no module {missing!r}; is it installed? (a file is named by its path, with .py)"
            ) from None
        raise ValueError(f"{place}: cannot be imported ({one_line(error)})") from error
    except (Exception, SystemExit) as error:  # of the module's own code, which may do anything
        file = str(Path(place).resolve()) if is_file else None
        raise ValueError(f"{place}: its import ends with {line(error, file)}") from error


def line(error: BaseException, function: Any = None) -> str:
    """Formats an exception in one line: type, message, and its last position in a file, if any.

    Args:
      function: whose file that is, or the file itself; None = any.
    """
    frames = traceback.extract_tb(error.__traceback__)
    file = inspect.unwrap(function).__code__.co_filename if inspect.isfunction(function) else function
    relevant = [frame for frame in frames if frame.filename == file] or frames
    place = f" ({Path(relevant[-1].filename).name}:{relevant[-1].lineno})" if relevant else ""
    return f"{type(error).__name__}: {one_line(error)[:LONGEST]}{place}"


def row(row: object, limit: int = 120) -> str:
    """Describes a data row for error messages: its id if it has one, else its beginning."""
    if isinstance(row, dict) and "id" in row:
        return f"row id {row['id']!r}"
    try:
        text = " ".join(repr(row).split())
    except RecursionError:
        text = f"nested too deep, with the fields {sorted(row)}" if isinstance(row, dict) else "nested too deep"
    return f"row {text if len(text) <= limit else text[: limit - 3] + '...'}"


def _file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"{FILES}{path.stem}_{xxhash.xxh3_64_hexdigest(bytes(path))[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # before it runs: dataclasses look up their module
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]  # a partly executed module must not be found next time
        raise
    return loaded
