"""Writes tasks in Harbor's format: small programs that do not do what they say, for a policy with a shell to repair.

    python benchmarks/failing_programs.py FOLDER [COUNT] [FIRST]

Each has a function whose sign is not that of its comment; its tests call it with four pairs of numbers. Tasks are
numbered from FIRST on; equal numbers are equal tasks.
"""

import random
import sys
from pathlib import Path

SIGNS = {"sum": "+", "difference": "-", "product": "*", "quotient": "//"}
NAMES = "area", "cost", "fee", "gain", "height", "load", "mass", "price", "rate", "score", "size", "speed", "width"
INSTRUCTION = "The function in /app/{name}.py does not do what its comment says. Repair it."
PROGRAM = "# the {word} of a and b\ndef {name}(a, b):\n    return a {sign} b\n"
TESTS = """#!/bin/bash
said=$(python3 -I -c 'import runpy
function = runpy.run_path("/app/{name}.py")["{name}"]
print([function(a, b) for a, b in {numbers}])')
if [ "$said" = "{right}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SETTINGS = """schema_version = "1.4"

[environment]
docker_image = "python:3.12-slim"
workdir = "/app"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0
"""


def write(folder: Path, number: int) -> None:
    """Writes the task of a number."""
    chance = random.Random(number)
    name, (word, right) = chance.choice(NAMES), chance.choice([*SIGNS.items()])
    wrong = chance.choice([sign for sign in SIGNS.values() if sign != right])
    numbers = [(chance.randint(2, 99), chance.randint(2, 9)) for _ in range(4)]
    results = [eval(f"{a} {right} {b}") for a, b in numbers]
    own = folder / f"{number:06}"
    for path, text in (
        ("task.toml", SETTINGS),
        ("instruction.md", INSTRUCTION.format(name=name)),
        (f"environment/{name}.py", PROGRAM.format(word=word, name=name, sign=wrong)),
        ("tests/test.sh", TESTS.format(name=name, numbers=numbers, right=results)),
        ("solution/solve.sh", f"#!/bin/bash\nsed -i 's|return .*|return a {right} b|' /app/{name}.py\n"),
    ):  # fmt: skip
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text(text)
    for script in ("tests/test.sh", "solution/solve.sh"):
        (own / script).chmod(0o755)


def main(folder: str, count: str = "1000", first: str = "0") -> None:
    for number in range(int(first), int(first) + int(count)):
        write(Path(folder), number)


if __name__ == "__main__":
    main(*sys.argv[1:])
