"""Plays adapters with a scripted policy."""

import asyncio
import json

from fidelity import SAMPLING
from gateways import TOKENS

from areax.recipes.shared import environments
from areax.rollout.workflows import environments as worlds


def call(name, **arguments):
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
