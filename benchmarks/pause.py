"""How long generation is paused while the embedded engine loads new weights.

    python benchmarks/pause.py [--model 1GB] [--pushes 5] [--slots 4] [--write]

A server in this process decodes long requests while versions are pushed to it from files, as in a run. Between two
dispatches the engine delivers tokens and admits requests: the usual gap. The longest gap during a push is how long
generation was paused for it: pause, swap and continuation. Recomputing prompts, which `retract` needs and `in_place`
does not, is work and reported separately. --write stores it as case `pause` of results.json.
"""

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import run

HERE = Path(__file__).parent
MODES = ("retract", "in_place")


def watched() -> tuple[list, list]:
    """Starts recording: lists of (begin, end) of each dispatch and of each part of prompts."""
    from areax.rollout.engine.slots import Slots

    spans: tuple[list, list] = [], []
    for name, recorded in zip(("step", "compute_prompts"), spans, strict=True):
        work = getattr(Slots, name)

        def timed(*arguments, work=work, recorded=recorded):
            begin = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                recorded.append((begin, time.perf_counter()))

        setattr(Slots, name, timed)
    return spans


def gaps(dispatches, entries, begin: float, end: float) -> list[tuple[float, float]]:
    """(idle seconds, seconds of prefill) of each gap between two dispatches that overlaps [begin, end]."""
    found = []
    for (_, stopped), (resumed, _) in zip(dispatches, dispatches[1:], strict=False):
        if begin <= resumed and stopped <= end:
            filling = sum(b - a for a, b in entries if stopped <= a and b <= resumed)
            found.append((resumed - stopped - filling, filling))
    return found


async def measure(url: str, root: Path, spans, given) -> dict:
    from areax.rollout import client
    from areax.rollout.fleet.push import push_weights
    from areax.rollout.servers.labels import read_label

    now, found = time.perf_counter, {}
    async with client.connect([url]) as fleet:
        ask = lambda i: fleet.generate([1, 2, 3, i], max_new_tokens=given.tokens, ignore_eos=True, temperature=1.0)
        running = [asyncio.create_task(ask(i)) for i in range(given.slots)]
        while len(spans[0]) < 3:
            await asyncio.sleep(0.01)
        begin, few = now(), len(spans[0])
        while len(spans[0]) < few + 20:
            await asyncio.sleep(0.01)
        usual = [idle for idle, _ in gaps(*spans, begin, now())]
        step = statistics.median(b - a for a, b in spans[0][few:])
        v = 0
        for mode in MODES:
            still, filled, pauses, seconds = [], [], [], []
            for i in range(1 + given.pushes):  # the first compiles programs for retracted requests
                folder = root / str(v)
                report = await push_weights(fleet, folder, read_label(folder / "manifest.json"), mode=mode)
                began, ended = now() - report.total_s, now()
                while spans[0][-1][0] < ended:
                    await asyncio.sleep(0.001)
                v = 1 - v
                if i:
                    idle, filling = max(gaps(*spans, began, now()))
                    still.append(idle), filled.append(filling)
                    pauses.append(report.pause_s), seconds.append(report.total_s)
            found[mode] = {
                "still_ms": 1e3 * statistics.median(still), "still_max_ms": 1e3 * max(still),
                "prefill_ms": 1e3 * statistics.median(filled), "pause_ms": 1e3 * statistics.median(pauses),
                "push_s": statistics.median(seconds),
            }  # fmt: skip
        if any(task.done() for task in running):
            raise RuntimeError("pause.py: a request ended during the pushes; raise --tokens")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return found | {"usual_gap_ms": 1e3 * statistics.median(usual), "dispatch_ms": 1e3 * step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="1GB", help="a model in sizes.py")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1900, help="tokens per request, which must outlast the pushes")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    import jax

    from areax.adapters import hf
    from areax.adapters.runtime import malloc
    from areax.rollout.engine import in_process
    from areax.rollout.servers.engine_options import EngineOptions
    from areax.rollout.weights import store

    malloc.keep_memory()  # as the server and the recipes do
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, given.model)
        subprocess.run([sys.executable, HERE / "sizes.py", given.model, folder], check=True)
        root = Path(tempfile.mkdtemp(dir=store.choose_root((folder / "model.safetensors").stat().st_size)))
        try:
            config, params = hf.load(folder)
            for v in range(2):
                hf.write_published(root, v, config, jax.tree.map(lambda x, v=v: x * (1 + v), params))
            del params
            spans, options = watched(), EngineOptions(slots=given.slots, context=2048)
            with in_process.serving(str(folder), options, dtype="float32") as (url, _):
                found = asyncio.run(measure(url, root, spans, given))
        finally:
            shutil.rmtree(root)
    print(f"usual gap {found['usual_gap_ms']:.2f} ms between dispatches of {found['dispatch_ms']:.0f} ms")
    for mode in MODES:
        result = found[mode]
        print(
            f"{mode}: paused for {result['still_ms']:.1f} ms (at most {result['still_max_ms']:.1f}), then prefill "
            f"{result['prefill_ms']:.0f} ms; from the pause call to the response to continue "
            f"{result['pause_ms']:.0f} ms; the push {result['push_s']:.2f} s"
        )
    if given.write:
        row = {"case": "pause", "model": given.model, "peer": "plain", "unit": "pauses/s"}
        row |= {"ours": 1e3 / found["retract"]["still_ms"], "theirs": 1e3 / found["usual_gap_ms"]}
        run.store([row | {"ratio": row["ours"] / row["theirs"], "details": found} | run.origin()])


if __name__ == "__main__":
    main()
