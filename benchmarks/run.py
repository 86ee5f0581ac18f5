"""Compares areax with peers on the same models, weights and work, in one run on one machine.

    python run.py [--quick | --check] [CASE | CASE/MODEL | PATTERN ...]

Each side of a case runs in a separate process, a peer's in a separate environment if needed. Sides take turns, areax
first, so that changes of load or clock frequency affect all of them; waiting sides are blocked. The first repetitions,
two or of a real model one, which compile, are not counted. Work that takes less than a second is repeated back to back,
equally often on all sides, like steps in a training run; of a real model it is not. Ratios are of median wall times,
above 1 if areax is better. CPU-seconds and the largest memory are recorded as well, of all processes of a side, and how
many cores other programs used: above 0.1, wall times mean little. Writes results.json and the table in RESULTS.md,
keeping cases that were not selected.

A case is a module: `PEERS` lists the peers of each model, `work(model)` returns units and FLOPs of a repetition, `ours`
and a function named like each peer return, for a checkpoint, the function to repeat; its results are compared.

--quick measures only areax, with few repetitions, and writes nothing. Without named cases, it measures M only in
training, varlen only in random order, and no pushes.

--check writes nothing either: it compares with the last committed ratios, and exits with 1 if one fell by more than
TOLERANCE, or if the sides of a case no longer compute the same. A ratio fell if its confidence interval lies entirely
below, and again when measured a second time: on a busy machine, one run means little.
"""

import argparse
import contextlib
import fnmatch
import importlib
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import real
import side

HERE = Path(__file__).parent
CASES = (
    "train", "sft", "sft_32", "sft_lora", "logprob", "varlen_random", "varlen_sorted", "generate", "generate_4",
    "generate_1", "continuous", "grpo", "grpo_recipe", "trie_long", "trie_short", "trie_agent", "push", "objective",
    "product_train", "product_head", "read",
)  # fmt: skip
PYTHON = {  # of peers incompatible with our packages
    "tunix": HERE.parent / ".venv-bench" / "bin" / "python",  # by `make bench-env`, the other by `make test-llama-cpp`
    "llama_cpp": Path(os.environ.get("AREAX_LLAMA_CPP_PYTHON", HERE.parent / ".venv-llama-cpp" / "bin" / "python")),
}
REPETITIONS = {"M": 7, "S": 15, "MoE": 9, "R": 3, "R-bf16": 3, "R-int8": 3, None: 15}
QUICK = 3
SECOND, MAX_TIMES = 1.0, 10  # short work is repeated for about a second of areax's time, at most 10 times
LONG = 30.0  # seconds of all sides together, from which on two repetitions are enough
# Left out of quick runs unless selected: slow, or for areax alone the same as another case.
SLOW = ("logprob", "M"), ("generate", "M"), ("objective", "M"), ("push", None), ("varlen_sorted", "S")
TOLERANCE = 0.15  # relative to a committed ratio; medians of a case vary by up to a tenth between runs
AGREEMENT = 0.99  # minimum agreement of the results of a case's sides
CACHE = "JAX_COMPILATION_CACHE_DIR"  # unset for sides: it may have programs compiled for another number of cores
TABLE = "<!-- table: written by run.py -->", "<!-- end of table -->"


class Side:
    """A running side.py."""

    def __init__(self, case: str, model: str | None, name: str, folder: str):
        self.name = f"{case} {model or ''} {name}"
        self.process = subprocess.Popen(
            [PYTHON.get(name, sys.executable), HERE / "side.py", case, model or "", name, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={k: v for k, v in os.environ.items() if k != CACHE} | {"TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}; its output is above")
        return json.loads(line)

    def repeat(self, times: int) -> dict:
        time.sleep(0.1)  # until threads of the previous side stop spinning
        self.process.stdin.write(f"{times}\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> dict:
        self.process.stdin.close()
        last = self.answer()
        self.process.wait()
        return last

    def stop(self) -> None:
        with self.process:  # closes its pipes and waits for it
            self.process.kill()


def measure(case: str, model: str | None, folder: str, repetitions: int, peers) -> list[dict]:
    """Measures a case: its rows for results.json, one per peer; without peers one row of areax only."""
    module = importlib.import_module(case)
    units, flops = module.work(model)
    with contextlib.ExitStack() as stack:
        sides, first = {}, {}
        for name in ("ours", *peers):  # one after the other: they measure the machine's limit
            sides[name] = Side(case, model, name, folder)
            stack.callback(sides[name].stop)
            first[name] = sides[name].answer()
        done: dict[str, list] = {name: [] for name in sides}
        times, warm = 1, 2 if peers and model not in real.KINDS else 1
        for i in itertools.count():
            for name, one in sides.items():
                done[name].append(one.repeat(times))
            if peers and i == 1 == warm - 1:
                times = min(max(1, round(SECOND / done["ours"][i]["wall"])), MAX_TIMES)
            if i == warm - 1:
                turn = times * sum(results[-1]["wall"] for results in done.values())
                repetitions = min(repetitions, 2) if turn > LONG else repetitions
                about = f"about {repetitions * turn:.0f} s for {repetitions} repetitions"
                print(f"{case} {model or ''}: {about}", file=sys.stderr, flush=True)
            if i == warm - 1 + repetitions:
                break
        done = {name: results[warm:] for name, results in done.items()}
        last = {name: one.end() for name, one in sides.items()}
    details = {
        name: detail(done[name], last[name]["peak_mb"], flops, (first[name]["limit"], last[name]["limit"]))
        for name in sides
    }
    ours = {"case": case, "model": model, "unit": module.UNIT, "repetitions": repetitions, "times": times}
    ours |= {"ours": units / details["ours"]["seconds"], "ours_details": details["ours"]}
    rows = []
    for peer in peers:
        row = {"case": case, "model": model, "peer": peer, "ours": ours["ours"]}
        row |= {"theirs": units / details[peer]["seconds"], "unit": module.UNIT}
        row["ratio"] = row["ours"] / row["theirs"]
        row["ratio_interval"] = interval([b["wall"] / a["wall"] for a, b in zip(done["ours"], done[peer], strict=True)])
        row["cpu_ratio"] = details[peer]["cpu_seconds"] / details["ours"]["cpu_seconds"]
        row |= {"repetitions": repetitions, "times": times}
        row["others"] = max(r["others"] for name in ("ours", peer) for r in done[name])
        row["agreement"] = agreement(done["ours"][-1]["result"], done[peer][-1]["result"])
        row |= {"ours_details": details["ours"], "theirs_details": details[peer]}
        rows.append(row | origin(first[peer]["versions"]))
    return rows or [ours | origin({})]


def detail(done: list[dict], peak_mb: float, flops: float | None, limits) -> dict:
    """Statistics of a side: seconds of its repetitions, memory, and its share of the library's matmul limit."""
    wall = [r["wall"] for r in done]
    details = {
        "seconds": statistics.median(wall), "seconds_min": min(wall), "seconds_max": max(wall),
        "cpu_seconds": statistics.median(r["cpu"] for r in done), "peak_mb": peak_mb,
    }  # fmt: skip
    if flops and all(limits):
        details["limit_gflops"] = max(limits)
        details["limit_share"] = flops / details["seconds"] / 1e9 / details["limit_gflops"]
    return details


def interval(values) -> tuple[float, float]:
    """Confidence interval of the median from order statistics, distribution-free; 95 % with at least six values."""
    n, k, outside = len(values), 0, 0.0
    while (outside := outside + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    k = max(k, 1)
    return sorted(values)[k - 1], sorted(values)[n - k]


def origin(versions: dict[str, str] | None = None) -> dict:
    """Versions, date and machine of a measurement; `versions` are those of the peer's packages."""
    return {
        "versions": side.versions("ours") | (versions or {}),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}",
    }


def agreement(a, b) -> float:
    """Agreement of two results, 1 if equal: share of equal tokens, or 1 - relative difference of a number."""
    if isinstance(a, list):
        return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
    return 1 - abs(a - b) / max(abs(a), abs(b))


def table(rows) -> str:
    lines = [
        "| case | model | peer | ours | theirs | ratio | CPU ratio | s per repetition, ours (min to max) | theirs | "
        "share of own matmul limit | peak MB | agreement | others' cores |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ours, theirs = r["ours_details"], r["theirs_details"]
        share = " / ".join(f"{d['limit_share']:.2f}" if "limit_share" in d else "" for d in (ours, theirs)).strip(" /")
        cells = [
            r["case"], r["model"] or "", r["peer"], f"{figure(r['ours'])} {r['unit']}", figure(r["theirs"]),
            f"**{r['ratio']:.2f}**", f"{r['cpu_ratio']:.2f}", spread(ours), spread(theirs), share,
            f"{ours['peak_mb']:.0f} / {theirs['peak_mb']:.0f}", f"{r['agreement']:.4f}", f"{r['others']:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table_alone(rows) -> str:
    """`table` for a run without peers."""
    lines = [
        "| case | model | areax | s per repetition (min to max) | share of matmul limit | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        d = r["ours_details"]
        share = f"{d['limit_share']:.2f}" if "limit_share" in d else ""
        cells = [
            r["case"],
            r["model"] or "",
            f"{figure(r['ours'])} {r['unit']}",
            spread(d),
            share,
            f"{d['peak_mb']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.2f}"


def spread(d: dict) -> str:
    return f"{d['seconds']:.3g} ({d['seconds_min']:.3g} to {d['seconds_max']:.3g})"


def name(row: dict) -> tuple:
    """Key of a row: a new row replaces one with the same key."""
    return row["case"], row["model"], row["peer"]


def merged(rows) -> list[dict]:
    """Earlier rows with these added or replaced, in the order of cases and models."""
    page = HERE / "results.json"
    old = json.loads(page.read_text()) if page.exists() else []
    all_ = list(({name(row): row for row in old} | {name(row): row for row in rows}).values())
    at = lambda value, values: values.index(value) if value in values else len(values)
    return sorted(all_, key=lambda row: (at(row["case"], CASES), at(row["model"], list(REPETITIONS))))


def origins(rows) -> dict[str, list[str]]:
    """{date, machine and versions of a measurement: its cases}."""
    found: dict[str, list[str]] = {}
    for row in rows:
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        cases = found.setdefault(f"Measured {row['date']} on {row['machine']}; {versions}", [])
        cases.append(" ".join(filter(None, (row["case"], row["model"]))))
    return found


def store(rows) -> None:
    """Stores rows in results.json, and those that compare two sides in the table of RESULTS.md."""
    rows = merged(rows)
    (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    rows = [row for row in rows if "ours_details" in row]
    page = HERE / "RESULTS.md"
    begin, end = TABLE
    before, rest = page.read_text().split(begin)
    head = "\n".join(f"{where}: {', '.join(cases)}." for where, cases in origins(rows).items())
    page.write_text(f"{before}{begin}\n{head}\n\n{table(rows)}\n{end}{rest.split(end)[1]}")


def measured(pairs, *, quick: bool = False) -> list[dict]:
    """Measures these (case, model) pairs and returns their rows, printing each as it is completed."""
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for case, model in pairs:
            module = importlib.import_module(case)
            folder = Path(root, model or module.SOURCE)
            if not folder.exists():
                subprocess.run([sys.executable, HERE / "sizes.py", folder.name, folder], check=True)
            peers = () if quick else module.PEERS[model]
            new = measure(case, model, str(folder), QUICK if quick else REPETITIONS[model], peers)
            for row in new:
                print(json.dumps(row), flush=True)
            rows += new
    return rows


def committed() -> list[dict]:
    """The rows of results.json as last committed."""
    shown = subprocess.run(["git", "show", "HEAD:./results.json"], cwd=HERE, capture_output=True, text=True)
    if shown.returncode:
        sys.exit(f"run.py: --check needs the git history of results.json, got: {shown.stderr.strip()}")
    return json.loads(shown.stdout)


def fallen(rows, before) -> dict[tuple, str]:
    """{key of a row: problem}: its ratio fell compared with `before`, or its sides disagree."""
    ratios = {name(row): row["ratio"] for row in before}
    found = {}
    for row in rows:
        at = " ".join(filter(None, (row["case"], row["model"]))) + f" vs {row['peer']}"
        old = ratios.get(name(row))
        if row["agreement"] < AGREEMENT:
            found[name(row)] = f"{at}: both sides must compute the same to {AGREEMENT}, got {row['agreement']:.4f}"
        elif old is None:
            print(f"{at}: ratio {row['ratio']:.2f}, no committed one to compare with")
        elif row["ratio_interval"][1] < (1 - TOLERANCE) * old:
            less = 1 - row["ratio"] / old
            found[name(row)] = f"{at}: ratio {row['ratio']:.2f}, {less:.0%} below the committed {old:.2f}"
    return found


def check(pairs) -> int:
    """Returns exit code 1 if a ratio fell twice or results disagree, else 0."""
    before = committed()
    first = measured(pairs)
    low = fallen(first, before)
    again = measured(sorted({key[:2] for key in low}, key=pairs.index)) if low else []
    low = {key: problem for key, problem in fallen(again, before).items() if key in low}
    print(table(first + again))
    print("\n".join(low.values()) or f"no ratio fell by more than {TOLERANCE:.0%}")
    return 1 if low else 0


def pairs_of(wanted: list[str]) -> list[tuple[str, str | None]]:
    """The selected (case, model) pairs: a case means all its models, a pattern such as "*/R*" all pairs that match.
    Nothing selected means all but those of a real model, whose files have to be fetched."""
    models = {case: list(importlib.import_module(case).PEERS) for case in CASES}
    pairs = [(case, model) for case in CASES for model in models[case]]
    found = [pair for pair in pairs if pair[1] not in real.KINDS] if not wanted else []
    for name in wanted:
        case = name.partition("/")[0]
        matching = [(c, m) for c, m in pairs if name == c or fnmatch.fnmatchcase(f"{c}/{m}", name)]
        if not matching:
            known = ", ".join(f"{case}/{m}" for m in models.get(case, ()) if m) or ", ".join(CASES)
            sys.exit(f"run.py: a case must be one of {known}, got {name}")
        found += matching
    return list(dict.fromkeys(found))


def main(arguments) -> None:
    what, _, how = __doc__.partition("    python run.py")
    parser = argparse.ArgumentParser(
        prog="run.py", description=what, epilog=how.split("\n", 1)[1].strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    which = "with /MODEL for one of its models, or */R* for all of the real model; none = all but those"
    parser.add_argument("case", nargs="*", help=f"{', '.join(CASES)}; {which}")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="only areax, in a few minutes")
    mode.add_argument("--check", action="store_true", help="compare with the last committed ratios")
    options = parser.parse_args(arguments)
    pairs, quick = pairs_of(options.case), options.quick
    if quick:
        print(table_alone(measured([pair for pair in pairs if options.case or pair not in SLOW], quick=True)))
        return
    needed = {peer for case, model in pairs for peer in importlib.import_module(case).PEERS[model]}
    if missing := [peer for peer, python in PYTHON.items() if peer in needed and not python.exists()]:
        sys.exit(
            f"run.py: {', '.join(missing)} has no environment to run in; create it with `make bench-env`, that of "
            "llama_cpp with `make test-llama-cpp`, or name its Python in AREAX_LLAMA_CPP_PYTHON"
        )
    if options.check:
        sys.exit(check(pairs))
    rows = measured(pairs)
    print(table(rows))
    store(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
