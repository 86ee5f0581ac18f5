"""areax beside its peers on the same models, weights and work, in one run on one machine.

    python run.py [--quick] [case ...]

Each side of a case lives in a process of its own and both take turns, ours first, so that a change in the machine's
load or clock meets both; the side that waits is blocked. The first repetitions are not counted: they compile. Ratios
are of medians by the clock, above 1 where areax is better. CPU-seconds are kept beside it, and how many cores other
programs used meanwhile: above 0.1 the clock says little. Writes results.json and the table in RESULTS.md, where cases
that were not asked for stay as they were; a quick run writes nothing.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CASES = ("train", "logprob", "generate", "varlen_random", "push", "objective")
SIDES = ("ours", "theirs")
REPETITIONS = {"S": 15, "M": 7, None: 15}
QUICK = 3
PACKAGES = {"transformers": ("transformers", "torch"), "plain": ()}
TABLE = "<!-- table: written by run.py -->", "<!-- end of table -->"


class Side:
    """A running side.py."""

    def __init__(self, *arguments):
        self.name = " ".join(arguments)
        self.process = subprocess.Popen(
            [sys.executable, HERE / "side.py", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}; its own words are above")
        return json.loads(line)

    def repeat(self) -> dict:
        time.sleep(0.1)  # threads of the side before stop spinning
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> dict:
        self.process.stdin.close()
        last = self.answer()
        self.process.wait()
        return last

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def measure(case: str, model: str | None, folder: str, repetitions: int) -> dict:
    """One row of results.json."""
    module = importlib.import_module(case)
    units, flops = module.work(model)
    with contextlib.ExitStack() as stack:
        sides, limits = {}, {}
        for name in SIDES:  # one after the other: they probe the machine's limit
            sides[name] = Side(case, model or "", name, folder)
            stack.callback(sides[name].stop)
            limits[name] = [sides[name].answer()["limit"]]
        done: dict[str, list] = {name: [] for name in SIDES}
        for i in range(2 + repetitions):
            for name, side in sides.items():
                repetition = side.repeat()
                if i >= 2:
                    done[name].append(repetition)
        last = {}
        for name, side in sides.items():
            last[name] = side.end()
            limits[name].append(last[name]["limit"])
    row = {"case": case, "model": model, "peer": module.PEER}
    for name in SIDES:
        row[name] = units / statistics.median(r["wall"] for r in done[name])
    row |= {"unit": module.UNIT, "ratio": row["ours"] / row["theirs"], "repetitions": repetitions}
    cpu = {name: statistics.median(r["cpu"] for r in done[name]) for name in SIDES}
    row["cpu_ratio"] = cpu["theirs"] / cpu["ours"]
    row["others"] = max(r["others"] for name in SIDES for r in done[name])
    row["agreement"] = agreement(*(done[name][-1]["result"] for name in SIDES))
    for name in SIDES:
        wall = [r["wall"] for r in done[name]]
        details = {
            "seconds": statistics.median(wall), "seconds_min": min(wall), "seconds_max": max(wall),
            "cpu_seconds": cpu[name], "peak_mb": last[name]["peak_mb"],
        }  # fmt: skip
        if flops:
            details["limit_gflops"] = max(limits[name])
            details["limit_share"] = flops / details["seconds"] / 1e9 / details["limit_gflops"]
        row[f"{name}_details"] = details
    return row | origin(module.PEER)


def origin(peer: str) -> dict:
    """What a row says of where it was measured."""
    return {
        "versions": {name: importlib.metadata.version(name) for name in ("areax", "jax", *PACKAGES[peer])},
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}",
    }


def agreement(a, b) -> float:
    """1 where both sides computed the same: share of equal tokens, or 1 - relative difference of a number."""
    if isinstance(a, list):
        return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
    return 1 - abs(a - b) / max(abs(a), abs(b))


def table(rows) -> str:
    lines = [
        "| case | model | peer | ours | theirs | ratio | CPU ratio | s a repetition, ours (min to max) | theirs | "
        "share of own matmul limit | peak MB | agreement | others' cores |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ours, theirs = r["ours_details"], r["theirs_details"]
        spread = lambda d: f"{d['seconds']:.3g} ({d['seconds_min']:.3g} to {d['seconds_max']:.3g})"
        share = f"{ours['limit_share']:.2f} / {theirs['limit_share']:.2f}" if "limit_share" in ours else ""
        figure = lambda x: f"{x:,.0f}" if x >= 100 else f"{x:.2f}"
        cells = [
            r["case"], r["model"] or "", r["peer"], f"{figure(r['ours'])} {r['unit']}", figure(r["theirs"]),
            f"**{r['ratio']:.2f}**", f"{r['cpu_ratio']:.2f}", spread(ours), spread(theirs), share,
            f"{ours['peak_mb']:.0f} / {theirs['peak_mb']:.0f}", f"{r['agreement']:.4f}", f"{r['others']:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def merged(rows) -> list[dict]:
    """These rows in the place of earlier ones of the same case and model."""
    name = lambda row: (row["case"], row["model"])
    new = {name(row): row for row in rows}
    page = HERE / "results.json"
    old = json.loads(page.read_text()) if page.exists() else []
    kept = [new.pop(name(row), row) for row in old]
    return kept + list(new.values())


def origins(rows) -> dict[str, list[str]]:
    """When, where and with which versions rows were measured, and the cases of each."""
    found: dict[str, list[str]] = {}
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        cases = found.setdefault(f"Measured {row['date']} on {row['machine']}; {versions}", [])
        cases.append(" ".join(filter(None, (row["case"], row["model"]))))
    return found


def store(rows) -> None:
    """Puts rows into results.json, and those of two sides that took turns into the table of RESULTS.md."""
    rows = merged(rows)
    (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    rows = [row for row in rows if "ours_details" in row]
    page = HERE / "RESULTS.md"
    begin, end = TABLE
    before, rest = page.read_text().split(begin)
    head = "\n".join(f"{where}: {', '.join(cases)}." for where, cases in origins(rows).items())
    page.write_text(f"{before}{begin}\n{head}\n\n{table(rows)}\n{end}{rest.split(end)[1]}")


def main(arguments) -> None:
    quick = "--quick" in arguments
    wanted = [a for a in arguments if a != "--quick"]
    if unknown := set(wanted) - set(CASES):
        sys.exit(f"run.py: a case must be one of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for case in wanted or CASES:
            module = importlib.import_module(case)
            for model in module.MODELS:
                if quick and model == "M":
                    continue
                folder = Path(root, model or module.SOURCE)
                if not folder.exists():
                    subprocess.run([sys.executable, HERE / "sizes.py", folder.name, folder], check=True)
                rows.append(measure(case, model, str(folder), QUICK if quick else REPETITIONS[model]))
                print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if not quick:
        store(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
