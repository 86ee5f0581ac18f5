"""Two AReaL workflows; only their imports were changed to ours."""

import uuid

import torch

from areax.rollout.workflows.areal import (
    AsyncRewardWrapper,
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    concat_padded_tensors,
)


class SingleTurn(RolloutWorkflow):
    """A single turn with `n_samples` answers."""

    def __init__(self, reward_fn, gconfig: GenerationHyperparameters, tokenizer, n_samples: int = 1):
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=n_samples)
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data):
        prompt = self.tokenizer.apply_chat_template(
            data["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        rows = []
        for _ in range(self.gconfig.n_samples):
            req = ModelRequest(
                rid=uuid.uuid4().hex,
                input_ids=prompt,
                gconfig=self.gconfig.new(n_samples=1),
                tokenizer=self.tokenizer,
            )
            resp: ModelResponse = await engine.agenerate(req)
            reward = await self.async_reward_fn(
                self.tokenizer.decode(resp.input_tokens),
                self.tokenizer.decode(resp.output_tokens, skip_special_tokens=True),
                resp.input_tokens,
                resp.output_tokens,
                **data,
            )
            ids = resp.input_tokens + resp.output_tokens
            row = dict(
                input_ids=torch.tensor(ids),
                loss_mask=torch.tensor([0] * resp.input_len + [1] * resp.output_len),
                logprobs=torch.tensor([0.0] * resp.input_len + resp.output_logprobs),
                versions=torch.tensor([-1] * resp.input_len + resp.output_versions),
                attention_mask=torch.ones(len(ids), dtype=torch.bool),
                rewards=torch.tensor(reward),
            )
            rows.append({name: value.unsqueeze(0) for name, value in row.items()})
        return concat_padded_tensors(rows)


class Retry(RolloutWorkflow):
    """Retries until the reward is not 0, discounting later rewards."""

    def __init__(self, reward_fn, gconfig, tokenizer, max_turns: int = 3, turn_discount: float = 0.5):
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self.max_turns, self.turn_discount = max_turns, turn_discount
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)
        said = [{"role": "assistant", "content": "some answer"}]
        before = tokenizer.apply_chat_template(said, tokenize=True, return_dict=False)
        said.append({"role": "user", "content": "wrong, again"})
        after = tokenizer.apply_chat_template(said, tokenize=True, add_generation_prompt=True, return_dict=False)
        self.again = after[len(before) :]

    async def arun_episode(self, engine, data):
        ids = self.tokenizer.apply_chat_template(
            data["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        seq, mask, logprobs, versions = [], [], [], []
        discount, reward = 1.0, 0
        for turn in range(self.max_turns):
            resp = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig))
            new = resp.input_len - len(seq)
            seq = resp.input_tokens + resp.output_tokens
            mask += [0] * new + [1] * resp.output_len
            logprobs += [0.0] * new + resp.output_logprobs
            versions += [-1] * new + resp.output_versions
            text = self.tokenizer.decode(resp.output_tokens, skip_special_tokens=True)
            reward = await self.async_reward_fn("", text, resp.input_tokens, resp.output_tokens, **data)
            if reward or resp.stop_reason != "stop" or turn == self.max_turns - 1:
                break
            discount *= self.turn_discount
            ids = seq + self.again
        if engine.get_version() < 0:
            return None
        return dict(
            input_ids=torch.tensor([seq]), loss_mask=torch.tensor([mask]), logprobs=torch.tensor([logprobs]),
            versions=torch.tensor([versions]), rewards=torch.tensor([reward * discount]),
        )  # fmt: skip


class Seeing(SingleTurn):
    """Reads images with a processor of transformers."""

    def __init__(self, reward_fn, gconfig, tokenizer, processor):
        super().__init__(reward_fn, gconfig, tokenizer)
