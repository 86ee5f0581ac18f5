"""Commands as shell text, for scripts and manifests that a user reviews before they run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .host import LINES, PYTHON

# Placeholders in a server's command, replaced by shell variables; a user's words cannot contain a zero byte.
HOST, PORT = "\0host", "\0port"
PLACEHOLDER = re.compile("(" + "|".join(map(re.escape, (PYTHON, HOST, PORT))) + ")")
LAST = f"""# Prints the end of a process's log: last NAME
last() {{
  echo "areax: the end of $logs/$1.log:"
  tail -n {LINES} "$logs/$1.log" | sed 's/^/  /'
}} >&2"""
# {end}: commands that end $running at SIGTERM, and wait for it
KEEP = """# Runs a command for a node, and restarts it up to three times: keep NAME NODE COMMAND
keep() {{
  local name=$1 node=$2 pause running=
  shift 2
  trap '{end}; exit' TERM
  for pause in 1 2 4 0; do
    "$@" >>"$logs/$name.log" 2>&1 &
    running=$!
    wait "$running"
    echo "areax: $name on $node ended with exit code $?; see $logs/$name.log" >&2
    sleep "$pause"
  done
  echo "areax: $name on $node has failed four times" >&2
  last "$name"
}}"""
_READY = """late=$((SECONDS + {limit})) # then the job ends
for url in {urls}; do
  next=0
  until why=$({python} -c 'import sys, urllib.request as http
direct = http.build_opener(http.ProxyHandler({{}}))
direct.open(sys.argv[1], timeout=10)' "$url/health" 2>&1); do{check}
    if ((SECONDS >= late)); then
      echo "areax: $url did not answer in {limit} s (${{why##*$'\\n'}})" >&2{late}
      exit 1
    fi
    if ((SECONDS >= next)); then
      echo "areax: waiting for $url to answer (${{why##*$'\\n'}})" >&2
      next=$((SECONDS + 60))
    fi
    sleep 1
  done
done"""


def text(words: list[str], indent: int, variables: Mapping[str, str]) -> str:
    """A command as shell text, one option per line.

    Args:
      indent: of all lines but the first.
      variables: {placeholder: shell expression, quoted as needed}.
    """
    shell = ""
    for i, word in enumerate(words):
        parts = re.split(PLACEHOLDER, word)
        shown = "".join(variables.get(part) or shlex.quote(part) for part in parts if part) or "''"
        shell += (" \\\n" + " " * indent if word.startswith("--") else " " if i else "") + shown
    return shell


def ready(urls: str, limit_s: float, *, python: str = "python", check: str = "", late: str = "") -> str:
    """Shell text that waits until servers answer, and says once a minute for which. An image need not have curl.

    Args:
      urls: their addresses, as words of the shell.
      limit_s: time after which it ends with exit code 1.
      check, late: commands that run before each further try, and before that end; may use $url.
    """
    lines = lambda commands, indent: "".join(f"\n{' ' * indent}{line}" for line in commands.splitlines())
    return _READY.format(urls=urls, limit=int(limit_s), python=python, check=lines(check, 4), late=lines(late, 6))


def dump(documents: list[dict[str, Any]], head: str) -> str:
    """YAML documents below a comment; texts of several lines as they are."""
    parts = [yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=10**6) for one in documents]
    return "".join(f"# {line}\n" for line in head.splitlines()) + "---\n".join(parts)


def write(written: str, file: str, then: str) -> int:
    """Prints a text, or writes it to a file that only its owner can read, as it may hold keys. What was there stays
    until the new file is complete; what is no file, such as /dev/stdout, is written to.

    Args:
      then: the command to use the file with, to be printed.
    """
    if not file:
        print(written, end="")
        return 0
    path, data = Path(file), written.encode(errors="surrogateescape")  # bytes of names that are not Unicode
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return 0
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    print(f"wrote {path}; review it, then run: {then} {shlex.quote(str(path))}")
    return 0


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _lines(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _lines)
