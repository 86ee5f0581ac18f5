"""Versions in parts: each process of a job copies, writes and serves its part of them to stagers (weights/parts.py).

So as many links carry a version as there are hosts, and no process holds, hashes or writes more than its part. A folder
of `--published` or a bucket is to have whole versions, and adapters by name are small: there process 0 does it all.
"""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence

import jax

from areax.adapters import hf
from areax.adapters.runtime import malloc
from areax.models.lora import Lora
from areax.parallel.multihost import agreement, processes
from areax.recipes.shared import learner
from areax.recipes.shared.learner import Learner
from areax.recipes.shared.rl_options import Serving
from areax.rollout.processes import http_process
from areax.rollout.weights import file_server
from areax.rollout.weights.parts import Keeper, Parts, keeping


def possible(options: Serving, adapters: Lora | None) -> bool:
    """Whether versions are in parts: of several processes, if all servers have stagers."""
    whole = options.published or options.push.bucket or adapters
    return jax.process_count() > 1 and bool(options.stagers) and not whole


@contextlib.asynccontextmanager
async def opened(options: Serving, run_on_all: Callable) -> AsyncIterator[Parts]:
    """In process 0: starts the file servers of all processes and yields the source of stagers."""
    async with file_server.serve(http_process.towards(options.stagers[0])) as own:
        yield Parts(own, run_on_all("open_parts", own.key)[1:])


def work(
    policy: Learner, stagers: Sequence[str], dtype: str | None, stack: contextlib.ExitStack
) -> dict[str, Callable]:
    """{name: function} of what all processes call together for versions in parts.

    Args:
      stack: ends the file servers that they start, but that of process 0.
    """
    keepers: list[Keeper] = []

    def open_parts(key: str) -> list[str]:
        """Starts the file servers of the others; returns the addresses by process, that of process 0 empty."""
        if jax.process_index() > 0:
            keepers.append(stack.enter_context(keeping(stagers[0], key, size(policy) // jax.process_count())))
        return agreement.gathered(keepers[0].url if keepers else "")

    def host_part(v: int, kept: Sequence[int]) -> hf.Part:
        """Copies this process's part of version v to the host; the others write and serve theirs from now on.

        Args:
          kept: the versions before that process 0 still has.
        """
        malloc.return_memory()  # of the last step
        part = hf.host_part(policy.written, learner.weights(policy), dtype)
        if keepers:
            write = functools.partial(hf.write_part, config=policy.written, part=part)
            keepers[0].keep(v, write, kept, processes.leave)
        return part

    return {"open_parts": open_parts, "host_part": host_part}


def size(policy: Learner) -> int:
    """Bytes of the weights, in the dtype that they have on the devices."""
    return sum(x.nbytes for x in jax.tree.leaves(learner.weights(policy)))
