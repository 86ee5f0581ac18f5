"""Evaluation of a checkpoint: held-out rows, a workflow and a reward, on generation servers."""

import asyncio
import contextlib
import functools
from dataclasses import dataclass

import numpy as np

from areax.adapters import tokenizer
from areax.recipes import common
from areax.rollout import client, executor, local, names, rewards
from areax.rollout.workflows import Sampling


@dataclass(frozen=True)
class Config:
    """Evaluation of a checkpoint.

    Attributes:
      model: Hugging Face directory with weights and tokenizer; with `servers`, the tokenizer alone is read.
      data: rows with "prompt" or "messages", and what the reward needs: a file, a folder, or a hub name.
      row: `module:function` or `file.py:function` that turns a record of the data into a row; "" = records are rows.
      reward: `module:function` or `file.py:function`, called as f(text, row) in worker processes.
      workflow: `module:function`, called as f(generate, row, tokenizer=, reward=, sampling=).
      servers: addresses of generation servers; none = one is started on this machine with `model`.
      serve: of the server started here.
      samples: completions a row.
      limit: rows to evaluate; 0 = all.
      max_concurrent: most rows in flight.
      sampling: greedy unless told otherwise.
      reward_workers: processes that compute rewards.
      reward_timeout_s: seconds that one may take; the completion then counts as unscorable.
      seed: of sampling.
    """

    model: str
    data: str
    reward: str
    row: str = ""
    workflow: str = "areax.rollout.workflows:single_turn"
    servers: tuple[str, ...] = ()
    serve: local.Serve = local.Serve()
    samples: int = 1
    limit: int = 0
    max_concurrent: int = 64
    sampling: Sampling = Sampling(temperature=0.0)
    reward_workers: int = 1
    reward_timeout_s: float = 10.0
    seed: int = 0


def main(config: Config) -> dict:
    """Returns {"accuracy": mean reward, "rows", "samples", "unscorable", "truncated", "length", "stderr"}."""
    return asyncio.run(evaluate(config))


async def evaluate(config: Config) -> dict:
    tokens, rows = tokenizer.load(config.model), common.read_rows(config.data, config.row, config.limit or None)
    workflow = names.resolve(config.workflow)
    names.resolve(config.reward)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        urls = config.servers or [await enter(local.server(config.model, config.serve))]
        fleet = await enter(client.connect(urls, concurrency=config.max_concurrent * config.samples))
        reward = await enter(
            rewards.pool(config.reward, workers=config.reward_workers, timeout_s=config.reward_timeout_s)
        )
        groups = await executor.rollouts(
            functools.partial(workflow, tokenizer=tokens, reward=reward, sampling=config.sampling),
            fleet.generate, rows, group_size=config.samples, max_concurrent=config.max_concurrent,
            seed=config.seed if fleet.seeded else None,
        )  # fmt: skip
    samples = [s for group in groups for s in group]
    reward_R = np.array([np.nanmean([s.reward for s in g]) for g in groups if any(s.reward == s.reward for s in g)])
    return {
        "accuracy": float(reward_R.mean()) if len(reward_R) else None,
        "stderr": float(reward_R.std(ddof=1) / len(reward_R) ** 0.5) if len(reward_R) > 1 else None,
        "rows": len(rows),
        "samples": len(samples),
        "unscorable": int(sum(s.reward != s.reward for s in samples)),
        "truncated": float(np.mean([s.finish == "length" for s in samples])) if samples else None,
        "length": float(np.mean([s.mask.sum() for s in samples])) if samples else None,
    }
