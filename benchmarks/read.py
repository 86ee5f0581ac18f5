"""Reading 1 GB of memory with all cores, against one."""

import concurrent.futures
import os

import numpy as np

UNIT, PEERS, COUNT = "GB/s", {"R": ("one_core",)}, 1 << 28


def work(model):
    return COUNT * 4 / 1e9, None


def parts(count: int):
    """Returns a function that reads with `count` threads, and returns the largest number."""
    shares = np.array_split(np.ones(COUNT, np.float32), count)
    pool = concurrent.futures.ThreadPoolExecutor(count)
    return lambda: float(max(pool.map(np.max, shares)))


def ours(folder, model):
    return parts(len(os.sched_getaffinity(0)))


def one_core(folder, model):
    return parts(1)
