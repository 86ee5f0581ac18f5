"""Workflows as AReaL's contributor guides have their readers write them, with imports that a test replaces."""

import uuid
from collections.abc import Callable
from typing import Any

import torch
from areal.api.cli_args import GenerationHyperparameters
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.experimental.openai.types import InteractionWithTokenLogpReward
from areal.infra import workflow_context


class OneAnswer(RolloutWorkflow):
    """The add-workflow guide's: returns prompt, answer and reward of a single request."""

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer, reward_fn: Callable):
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, Any] | None | dict[str, InteractionWithTokenLogpReward]:
        input_ids = self.tokenizer.apply_chat_template(data["messages"], tokenize=True, add_generation_prompt=True)
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=list(input_ids),
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
        )
        resp: ModelResponse = await engine.agenerate(req)
        reward = await self.async_reward_fn(
            self.tokenizer.decode(input_ids),
            self.tokenizer.decode(resp.output_tokens),
            resp.input_tokens,
            resp.output_tokens,
            **data,
        )
        return {
            "input_ids": torch.tensor(resp.input_tokens),
            "output_ids": torch.tensor(resp.output_tokens),
            "reward": torch.tensor(reward),
        }


class WithAPage(OneAnswer):
    """The guide to agent workflows': awaits a page over the shared session, rewards with a function of its own."""

    def __init__(self, gconfig, tokenizer, own: str):
        super().__init__(gconfig, tokenizer, own)

    async def arun_episode(self, engine, data):
        session = await workflow_context.get_aiohttp_session()
        async with session.get(data["url"]) as response:
            page = await response.text()
        resp = await engine.agenerate(ModelRequest(input_ids=self.tokenizer.encode(page), gconfig=self.gconfig))
        text = self.tokenizer.decode(resp.output_tokens, skip_special_tokens=True)
        reward = await self.async_reward_fn(page, text, **data)
        ids = torch.tensor([resp.input_tokens]), torch.tensor([resp.output_tokens])
        return {"input_ids": ids[0], "output_ids": ids[1], "rewards": torch.tensor([reward])}


class Agent:
    """The same guide's agent: takes address and key from the keywords, with a client of its own if there is none."""

    def __init__(self, own: str):
        self.reward = AsyncRewardWrapper(own)

    async def run(self, data, **extra_kwargs):
        from openai import AsyncOpenAI

        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        async with client:
            reply = await client.chat.completions.create(model="any", messages=data["messages"])
        return await self.reward("", reply.choices[0].message.content, None, None, **data)
