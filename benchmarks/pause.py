"""How long generation stands still while the embedded engine gets new weights.

    python benchmarks/pause.py [--model 1GB] [--pushes 5] [--slots 4] [--write]

A server in this process decodes long requests; versions are pushed to it from files, as a run pushes them, beside that.
Between two dispatches the engine delivers tokens and lets requests in; that is the usual gap. The longest gap of a push
is how long generation stood still for it: the pause, the swap, the continuation. Computing prompts anew, which
`retract` has it do and `in_place` does not, is work and told apart. With --write it is case `pause` of results.json.
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
    """(begin, end) of each dispatch and of each time that requests were let in, from now on."""
    from areax.rollout.engine.slots import Slots

    spans: tuple[list, list] = [], []
    for name, its in zip(("step", "enter"), spans, strict=True):
        work = getattr(Slots, name)

        def timed(*arguments, work=work, its=its):
            begin = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                its.append((begin, time.perf_counter()))

        setattr(Slots, name, timed)
    return spans


def gaps(dispatches, entries, begin: float, end: float) -> list[tuple[float, float]]:
    """(seconds that nothing was computed, seconds of prefill) between dispatches of which the first ended after `begin`
    and the second began before `end`."""
    found = []
    for (_, stopped), (went, _) in zip(dispatches, dispatches[1:], strict=False):
        if begin <= went and stopped <= end:
            filling = sum(b - a for a, b in entries if stopped <= a and b <= went)
            found.append((went - stopped - filling, filling))
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
            for i in range(1 + given.pushes):  # the first compiles what retracted requests need
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
            raise RuntimeError("pause.py: a request ended while weights were pushed; raise --tokens")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return found | {"usual_gap_ms": 1e3 * statistics.median(usual), "dispatch_ms": 1e3 * step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="1GB", help="of sizes.py")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1900, help="of a request, which must outlast the pushes")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    import jax

    from areax.adapters import hf
    from areax.adapters.runtime import malloc
    from areax.rollout.engine import in_process
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
            spans = watched()
            with in_process.serving(str(folder), slots=given.slots, context=2048, dtype="float32") as (url, _):
                found = asyncio.run(measure(url, root, spans, given))
        finally:
            shutil.rmtree(root)
    print(f"between dispatches of {found['dispatch_ms']:.0f} ms lie {found['usual_gap_ms']:.2f} ms as a rule")
    for mode in MODES:
        its = found[mode]
        print(
            f"{mode}: stood still for {its['still_ms']:.1f} ms (at most {its['still_max_ms']:.1f}), then prefill "
            f"{its['prefill_ms']:.0f} ms; from the pause call to the answer of continue {its['pause_ms']:.0f} ms; "
            f"the push {its['push_s']:.2f} s"
        )
    if given.write:
        row = {"case": "pause", "model": given.model, "peer": "plain", "unit": "pauses/s"}
        row |= {"ours": 1e3 / found["retract"]["still_ms"], "theirs": 1e3 / found["usual_gap_ms"]}
        run.store([row | {"ratio": row["ours"] / row["theirs"], "details": found} | run.origin()])


if __name__ == "__main__":
    main()
