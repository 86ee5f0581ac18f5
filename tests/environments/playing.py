"""Plays adapters with a scripted policy."""

import asyncio
import contextlib
import json

from fidelity import SAMPLING
from gateways import TOKENS

from areax.recipes.shared import environments
from areax.rollout import rewards
from areax.rollout.scheduling import episodes
from areax.rollout.workflows import agents, regroup, resolve
from areax.rollout.workflows import environments as worlds


def call(name, /, **arguments):
    """The text of a call of a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(env, policy, row, **options):
    """The samples of an episode of `--env`."""
    found = environments.named(env, "")
    return await worlds.play(
        policy, row, tokenizer=TOKENS, sampling=SAMPLING, world=found.world, name=env,
        options=found.options | options.pop("own", {}), **options,
    )  # fmt: skip


def played(env, policy, row, **options):
    return asyncio.run(play(env, policy, row, **options))


@contextlib.asynccontextmanager
async def agent(env, timeout_s=60.0, **options):
    """Yields a function of a policy and a row, the samples of a group of an agent's `--env`."""
    found = environments.named(env, json.dumps(options))
    how = dict(tokenizer=TOKENS, reward=rewards.none, sampling=SAMPLING, options=found.options)
    async with resolve.bind(found.own, **how, agent=agents.Options(timeout_s=timeout_s)) as workflow:
        of = regroup.of(workflow)

        async def group(policy, row, size=1):
            return await episodes.group(workflow, policy, row, prompt=0, size=size, seed=None, regroup=of)

        yield group


def acted(env, policy, row, size=1, **options):
    """The samples of a group of an agent's `--env`."""

    async def main():
        async with agent(env, **options) as group:
            return await group(policy, row, size)

    return asyncio.run(main())
