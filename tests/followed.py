"""Runs to follow in a browser: directories as real runs write them, and the server of their page in a thread."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from areax.adapters.report import live
from areax.adapters.tracking import run_dir
from areax.recipes import recorded_samples
from areax.rollout.processes import http_process


def log(run, step, **more):
    """Logs a step of a run as `grpo` does, with numbers that follow from it."""
    noise = np.random.default_rng(step)
    counts = np.histogram(noise.integers(1, 30, 64), np.arange(0, 33, 4))[0]
    names = (
        "loss",
        "entropy",
        "grad_norm",
        "ess",
        "kl",
        "mismatch_k3",
        "clip_fraction",
        "requests_in_flight",
        "slot_load",
    )
    run.log(
        "grpo", step, reward=min(1.0, step / 40), reward_std=0.4, length=12 + step % 5, length_max=30,
        length_hist={"edges": np.arange(0, 33, 4), "counts": counts}, staleness=0.4, staleness_max=1,
        staleness_hist={"edges": np.arange(3), "counts": [40, 20]}, trainer_idle=0.25 + 0.1 * noise.random(),
        server_busy=0.75, version=step, server_version=step, time_rollout=0.2, time_update=0.3 + 0.1 * noise.random(),
        time_step=0.75, **{name: float(noise.random()) for name in names}, **more,
    )  # fmt: skip


@contextlib.contextmanager
def running(*paths, key=None):
    """Serves the page of these runs' directories in a thread; yields its address."""
    sock = http_process.bind("127.0.0.1", 0)
    made, stop, ready = live.Page(paths, recorded_samples.Samples), threading.Event(), threading.Event()

    async def serve(pool):
        async with http_process.running(http_process.server(live.app(made, pool, key)), sock):
            ready.set()
            await asyncio.to_thread(stop.wait)

    def run():
        with contextlib.closing(sock), ThreadPoolExecutor(1) as pool:
            asyncio.run(serve(pool))
            pool.submit(made.close).result()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        yield http_process.address(sock.getsockname())
    finally:
        stop.set()
        thread.join()


def opened(path, **options):
    """`run_dir.open_run` of a new run."""
    return run_dir.open_run(path, config={"seed": 0, **options})
