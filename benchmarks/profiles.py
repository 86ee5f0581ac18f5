"""Profiles one repetition of areax's side of a case, per operation, on XLA's CPU backend.

    python profiles.py CASE MODEL [--top 40] [--write]

XLA's profile names operations of the compiled program, whose text says what each was made from. Operations that contain
others (loops, branches) are omitted, so that the rest adds up; with two threads it can add up to twice the wall time.
Profiling costs about 2 us per operation. `--write` stores the table in PROFILES.md, replacing an earlier one.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
HOLDING = ("while", "cond", "call", "conditional")


def trace(case: str, model: str, folder: str, dump: str):
    """(seconds, {operation: [nanoseconds, times]}) of one repetition; the compiled programs go to `dump`."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # programs from the cache are not dumped
    import importlib

    import jax

    once = importlib.import_module(case).ours(folder, model)
    once(), once()
    spent: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    with tempfile.TemporaryDirectory() as root:
        with jax.profiler.trace(root):
            begin = time.perf_counter()
            once()
            seconds = time.perf_counter() - begin
        [page] = Path(root).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(page)).planes:
            for line in plane.lines:
                for event in line.events:
                    spent[event.name][0] += round(event.duration_ns)
                    spent[event.name][1] += 1
    getattr(once, "close", lambda: None)()
    return seconds, dict(spent)


def sources(dump: str) -> dict[str, tuple[str, str]]:
    """{operation: (result shape, what it was made from)} of all compiled programs."""
    found = {}
    for page in Path(dump).glob("*after_optimizations.txt"):
        for name, result, rest in re.findall(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\S+) (.*)$", page.read_text(), re.M):
            origin = re.search(r'op_name="([^"]*)"', rest)
            found[name] = re.sub(r"\{.*", "", result), short(origin[1] if origin else "")
    return found


def short(origin: str) -> str:
    """Forward or backward, and the last names of JAX's path of an operation."""
    way = "backward" if "transpose(" in origin else "forward"
    again = ", recomputed" if "rematted" in origin else ""
    names = [
        name for name in origin.split("/") if not re.match(r"jit|jvp|transpose\(jvp|while|body|closed_call|cond", name)
    ]
    return f"{way}{again}: {' '.join(names[-2:]) or 'no name'}"


def table(seconds: float, spent: dict, origin: dict, top: int) -> str:
    """A table of operations grouped by origin and result, longest first."""
    rows: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
    for name, (nanoseconds, times) in spent.items():
        if name in origin and not name.startswith(HOLDING):
            result, source = origin[name]
            rows[source, result][0] += nanoseconds
            rows[source, result][1] += times
    total = sum(nanoseconds for nanoseconds, _ in rows.values())
    lines = [
        f"{seconds:.3f} s wall time, {total / 1e9:.3f} s in operations.",
        "",
        "| ms | share | times | operation | result |",
        "|---|---|---|---|---|",
    ]
    longest = sorted(rows.items(), key=lambda row: -row[1][0])
    for (source, result), (nanoseconds, times) in longest[:top]:
        lines.append(f"| {nanoseconds / 1e6:.1f} | {nanoseconds / total:.1%} | {times} | {source} | {result} |")
    rest = sum(nanoseconds for _, (nanoseconds, _) in longest[top:])
    return "\n".join([*lines, f"| {rest / 1e6:.1f} | {rest / total:.1%} | | {len(longest[top:])} others | |"])


def store(title: str, text: str) -> None:
    """Writes a section of PROFILES.md, replacing one with the same title."""
    page = HERE / "PROFILES.md"
    head, *parts = re.split(r"^## ", page.read_text(), flags=re.M)
    sections = {part.split("\n", 1)[0]: part.split("\n", 1)[1].strip() for part in parts} | {title: text}
    page.write_text(head + "\n".join(f"## {name}\n\n{body}\n" for name, body in sections.items()))


def main(arguments) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", help="a case module in this folder, such as train")
    parser.add_argument("model", help="S, M or MoE")
    parser.add_argument("--top", type=int, default=40, help="rows of the table")
    parser.add_argument("--write", action="store_true", help="store the table in PROFILES.md")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root, options.model))
        subprocess.run([sys.executable, HERE / "sizes.py", options.model, folder], check=True)
        dump = str(Path(root, "programs"))
        seconds, spent = trace(options.case, options.model, folder, dump)
        text = table(seconds, spent, sources(dump), options.top)
    print(text)
    if options.write:
        import jax

        where = f"{len(os.sched_getaffinity(0))} threads, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
        store(f"{options.case} {options.model}", f"{where}: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
