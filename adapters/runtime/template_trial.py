"""Renders a chat template for the first time, in a process with limits: it is a program of a checkpoint's author.

The file is run as the program of that process, so it imports nothing of areax.
"""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SECONDS, BYTES, LONGEST = 20, 2**30, 1_000_000  # of processor time, of memory, characters of the longest text
WALL = 6  # times as long it may take, where Python is slow to start
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief."},
        *[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}] * 4,
        {"role": "user", "content": "How are you?"},
    ],
)


@functools.lru_cache(64)
def problem(chat_template: str) -> str:
    """What a chat template must do and does not do, "" if it keeps the limits; one that refuses the conversations, or
    is not valid, keeps them.

    Args:
      chat_template: without `{% generation %}` tags, which are unknown to Jinja.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            input=json.dumps({"path": sys.path, "template": chat_template, "seconds": SECONDS}),
            capture_output=True,
            timeout=WALL * SECONDS,
            encoding="utf-8",
        )
        how = f"exit code {done.returncode} {done.stderr.strip().rpartition(chr(10))[2][:80]}".strip()
    except subprocess.TimeoutExpired:
        how, done = "no end", None
    if not done or done.returncode:
        return f"render {len(CONVERSATIONS)} short conversations within {SECONDS} s and {BYTES >> 20} MiB, got {how}"
    longest = int(done.stdout.split()[-1])
    return f"make at most {LONGEST:,} characters of a few words, got {longest:,}" if longest > LONGEST else ""


def refuse(message: str) -> None:
    """What a template calls for conversations that it does not take."""
    raise ValueError(message)


def main() -> None:
    """Reads {path, template, seconds} from standard input and writes the length of the longest text."""
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"],) * 2)
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, *_, **__: json.dumps(value)
    environment.globals["raise_exception"] = refuse
    variables: Mapping[str, Any] = {"strftime_now": lambda form: form, "bos_token": "", "eos_token": ""}
    longest = 0
    for talk in CONVERSATIONS:
        try:
            rendered = environment.from_string(asked["template"]).render(
                messages=talk, tools=None, documents=None, add_generation_prompt=True, **variables
            )
            longest = max(longest, len(rendered))
        except MemoryError:
            raise
        except Exception:  # of the template, which may ask for more than this
            continue
    print(longest)


if __name__ == "__main__":
    main()
