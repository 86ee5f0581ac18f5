"""Environments as tinker-cookbook has them: of messages, with tools, and with rewards of a group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import chz
from tinker_cookbook import renderers
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use import ToolResult, build_agent_tool_env, simple_tool_result, tool

CLOSED = []


class Guess(MessageEnv):
    """Two guesses of n + 1."""

    def __init__(self, n, kind):
        self.n, self.kind = n, kind
        self.history = [{"role": "user", "content": f"What is {n} + 1?"}]

    async def initial_observation(self):
        return self.history

    async def step(self, message):
        self.history.append(message)
        right = renderers.get_text_content(message).strip() == str(self.n + 1)
        if self.kind == "broken":
            raise RuntimeError("no such machine")
        if self.kind == "rewrites":
            self.history = [{"role": "user", "content": "Again?"}]
        self.history.append({"role": "user", "content": "No."})
        done = right or len(self.history) > 4
        return MessageStepResult(float(right), done, self.history, {"guesses": 1.0}, {"right": right})


@tool
async def add(a: Annotated[int, "one"], b: Annotated[int, "the other"]) -> ToolResult:
    """Adds two numbers."""
    return simple_tool_result(str(a + b))


def with_tools(n, renderer):
    async def reward(history):
        return float(renderers.get_text_content(history[-1]).strip() == str(n + 1)), {"messages": float(len(history))}

    first = renderer.create_conversation_prefix_with_tools([add.to_spec()], "Use the tool.")
    question = {"role": "user", "content": f"What is {n} + 1?"}
    return build_agent_tool_env(renderer, [add], [*first, question], reward, max_turns=6)


@dataclass(frozen=True)
class Group(EnvGroupBuilder):
    n: int
    kind: str
    size: int
    renderer: renderers.Renderer

    async def make_envs(self) -> Sequence[Env]:
        if self.kind == "tools":
            return [with_tools(self.n, self.renderer) for _ in range(self.size)]
        return [EnvFromMessageEnv(self.renderer, Guess(self.n, self.kind)) for _ in range(self.size)]

    async def compute_group_rewards(self, trajectory_group, env_group):
        """A tenth for each turn, and how many of them were right, by what the environment logged."""
        assert len(trajectory_group) == len(env_group) == 1
        if self.kind != "group":
            return await super().compute_group_rewards(trajectory_group, env_group)
        turns = trajectory_group[0].transitions
        message, end = self.renderer.parse_response(turns[-1].ac.tokens)
        assert end.is_clean and message["role"] == "assistant"
        return [(len(turns) / 10, {"right": float(sum(turn.logs["right"] for turn in turns))})]

    async def cleanup(self):
        CLOSED.append(self.n)


@dataclass
class Data(RLDataset):
    groups: list[Group]
    batch_size: int

    def get_batch(self, index):
        return self.groups[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self):
        return -(-len(self.groups) // self.batch_size)


@chz.chz
class Builder(RLDatasetBuilder):
    batch_size: int
    group_size: int
    model_name_for_tokenizer: str
    renderer_name: str
    kind: str = "guess"
    tested: bool = True

    async def __call__(self):
        renderer = renderers.get_renderer(self.renderer_name, get_tokenizer(self.model_name_for_tokenizer))
        groups = [Group(n, self.kind, self.group_size, renderer) for n in range(8)]
        return Data(groups[:5], self.batch_size), Data(groups[5:], self.batch_size) if self.tested else None
