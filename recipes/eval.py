"""Evaluation of a checkpoint: held-out rows, a workflow and a reward, on generation servers."""

import asyncio
import contextlib
from dataclasses import dataclass

import numpy as np

from areax.adapters import hf, tokenizer
from areax.adapters.runtime import compile_cache
from areax.recipes.shared import common, notebook, ranges, rows
from areax.recipes.shared.rl_options import serving_conflicts
from areax.rollout import rewards
from areax.rollout.scheduling import episodes, executor
from areax.rollout.servers import local
from areax.rollout.types import Sampling
from areax.rollout.workflows import agents, resolve


@dataclass(frozen=True)
class Config:
    """Evaluates a checkpoint on rows, with a reward.

    Attributes:
      model: Hugging Face directory: weights, config.json and tokenizer; with `servers` only the tokenizer is read.
      data: rows with "prompt" or "messages", and what the reward needs: a file, a folder, or a data set on the hub.
      row: function from records to rows: `module:function` or `file.py:function`, which returns None to leave a record
        out; `areax.adapters.data.formats:auto` reads the usual formats; "" = records are rows.
      reward: `module:function` or `file.py:function`, called as f(text, row) in worker processes.
      workflow: an episode: `module:function` of `generate` and a row, or an agent (`rollout.workflows.resolve.bind`).
      workflow_options: further arguments of the workflow, a JSON object.
      agent: serving agents that use the OpenAI or Anthropic API.
      servers: addresses of generation servers; none = starts one with `model` on this machine. Their key, if any,
        is in AREAX_SERVER_KEY, or in the file that AREAX_SERVER_KEY_FILE names.
      serve: options of servers that are started here.
      samples: completions per row.
      limit: records to read; 0 = all.
      bad_rows: "stop" ends the command at the first row that cannot be used, "skip" leaves such rows out and prints how
        many.
      max_prompt: longest prompt in tokens; rows with longer ones are left out and counted; 0 = no limit.
      max_concurrent: maximum number of rows in flight.
      sampling: sampling parameters; greedy by default.
      reward_workers: number of processes that compute rewards.
      reward_timeout_s: time limit of one reward, in seconds; after a second attempt the completion is unscorable.
      reward_environment: names of environment variables that rewards may read, in addition to PATH, HOME, LANG and the
        like (docs/add-a-reward.md).
      seed: random seed of sampling.
    """

    model: str
    data: str
    reward: str
    row: str = ""
    workflow: str = "areax.rollout.workflows:single_turn"
    workflow_options: str = ""
    agent: agents.Options = agents.Options()
    servers: tuple[str, ...] = ()
    serve: local.Serve = local.Serve()
    samples: int = 1
    limit: int = 0
    bad_rows: rows.Bad = "stop"
    max_prompt: int = 0
    max_concurrent: int = 64
    sampling: Sampling = Sampling(temperature=0.0)
    reward_workers: int = 1
    reward_timeout_s: float = 10.0
    reward_environment: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self):
        resolve.options(self.workflow_options)
        for reason in (
            *ranges.integers(self, samples=1, limit=0, max_prompt=0, max_concurrent=1, reward_workers=1, seed=0),
            *serving_conflicts(self.servers, self.serve),
        ):
            raise ValueError(reason)
        if self.serve.inside:
            raise ValueError("--serve.inside is for a trainer's process, which an evaluation has not; leave it out")


def main(config: Config) -> dict:
    """Returns {"accuracy": mean reward, "rows", "samples", "unscorable", "truncated", "length", "stderr"}."""
    notebook.refuse_running_loop(config)
    return asyncio.run(run(config))


async def run(config: Config) -> dict:
    """`main` where an event loop is running, as in a notebook."""
    compile_cache.keep()
    return await evaluate(config)


async def evaluate(config: Config) -> dict:
    tokens = tokenizer.load(config.model)
    rewards.check(config.reward)
    resolve.check(config.workflow, resolve.options(config.workflow_options), config.agent)
    room = 0 if config.servers else min(config.serve.context, hf.read_config(config.model).context)
    check = rows.prompts(tokens, config.workflow, most=config.max_prompt, room=room)
    asked = rows.read(config.data, config.row, config.limit, check=check, bad=config.bad_rows)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        fleet = await enter(
            common.fleet(config.servers, config.model, config.serve, concurrency=config.max_concurrent * config.samples)
        )
        reward = await enter(
            rewards.pool(
                config.reward, workers=config.reward_workers, timeout_s=config.reward_timeout_s,
                environment=config.reward_environment,
            )
        )  # fmt: skip
        episode = await enter(
            resolve.bind(
                config.workflow, tokenizer=tokens, reward=reward, sampling=config.sampling, agent=config.agent,
                options=resolve.options(config.workflow_options),
            )
        )  # fmt: skip
        groups = await executor.rollouts(
            episode, fleet.generate, asked, group_size=config.samples, max_concurrent=config.max_concurrent,
            seed=config.seed if fleet.seeded else None,
        )  # fmt: skip
    samples = [s for group in groups for s in group]
    groups = [episodes.one_a_rollout(group) for group in groups]
    values = [np.array([episodes.outcome(s) for s in group]) for group in groups]
    reward_R = np.array([np.nanmean(x) for x in values if not np.isnan(x).all()])
    return {
        "accuracy": float(reward_R.mean()) if len(reward_R) else None,
        "stderr": float(reward_R.std(ddof=1) / len(reward_R) ** 0.5) if len(reward_R) > 1 else None,
        "rows": len(asked),
        "samples": len(samples),
        "unscorable": int(sum(s.reward != s.reward for s in samples)),
        "truncated": float(np.mean([s.finish == "length" for s in samples])) if samples else None,
        "length": float(np.mean([s.mask.sum() for s in samples])) if samples else None,
    }
