"""The single-turn workflow on a real tokenizer with a chat template."""

import asyncio
import dataclasses
import functools
import inspect
import math

import numpy as np
import pytest

from areax.adapters import tokenizer as tokenizers
from areax.core import losses, packing
from areax.rollout import client
from areax.rollout.chat import template
from areax.rollout.rewards import Score
from areax.rollout.scheduling.episodes import rollouts
from areax.rollout.tasks import gsm8k
from areax.rollout.types import Completion, Sampling, sampled, supervised
from areax.rollout.workflows import multi_turn, single_turn

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<end>", "<user>", "<system>", "<assistant>"]
    vocabulary = {token: i for i, token in enumerate([*special, *"0123456789+ "])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<end>", additional_special_tokens=special[1:], chat_template=TEMPLATE
    )


def answer(tokenizer, text, asked=None):
    async def generate(tokens, **sampling):
        if asked is not None:
            asked.append((tokens, sampling))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return Completion(ids, [-0.5] * len(ids), [3] * len(ids), "stop")

    return generate


async def exact(text, row, *, prompt, prompt_ids, completion_ids):
    assert prompt.endswith("<assistant>") and len(prompt_ids) > 0 and len(completion_ids) > 0
    return {"exact": float(text == row["answer"]), "length": len(text) / 10}


def test_the_sample_is_prompt_completion_and_reward(tokenizer):
    asked, row = [], {"prompt": "2+3", "answer": "5"}
    sampling = Sampling(temperature=0.7, max_new_tokens=4)
    workflow = functools.partial(single_turn, tokenizer=tokenizer, reward=exact, sampling=sampling)
    [[sample]] = asyncio.run(rollouts(workflow, answer(tokenizer, "5<end>", asked), [row], seed=None))
    prompt = tokenizer.encode("<user>2+3<end><assistant>", add_special_tokens=False)
    assert asked == [(prompt, dataclasses.asdict(sampling))]
    assert sample.tokens.tolist() == [*prompt, *tokenizer.encode("5<end>", add_special_tokens=False)]
    n = len(prompt)
    assert sample.mask.tolist() == [False] * n + [True] * 2
    np.testing.assert_array_equal(sample.logp, np.float32([0.0] * n + [-0.5] * 2))
    assert sample.version.tolist() == [-1] * n + [3] * 2
    assert sample.temperature == 0.7 and sample.finish == "stop"
    assert sample.reward == 1.1 and sample.rewards == ((n + 1, 1.1),)
    assert sample.components == {"exact": 1.0, "length": 0.1}
    assert sample.info["text"] == "5" and sample.info["row"] == row
    assert sample.info["prompt"] == "<user>2+3<end><assistant>"


def test_the_prompt_of_a_sample_is_its_id_and_not_its_tokens():
    done = Completion([3], [-1.0], [0], "stop")
    sample = sampled([1, 2], done, temperature=1.0, prompt=7)
    assert sample.prompt == 7 and sample.tokens.tolist() == [1, 2, 3]
    assert supervised([1, 2], [3], prompt=7).prompt == 7


def test_an_unscorable_completion_keeps_its_sample(tokenizer):
    async def unknown(text, row, **context):
        return Score(math.nan)

    workflow = single_turn(
        answer(tokenizer, "5"), {"prompt": "2"}, tokenizer=tokenizer, reward=unknown, sampling=Sampling()
    )
    assert math.isnan(asyncio.run(workflow).reward)


STEPS = "1+2 3+ 5"  # steps end with a blank, the last with the text


async def by_step(text, row, **context):
    ends = [at + 1 for at, c in enumerate(text) if c == " "] + [len(text)]
    return [(end, 0.5 - i) for i, end in enumerate(ends)]


def process(tokenizer):
    workflow = single_turn(
        answer(tokenizer, f"{STEPS}<end>"), {"prompt": "2"}, tokenizer=tokenizer, reward=by_step, sampling=Sampling()
    )
    return asyncio.run(workflow)


def test_rewards_of_steps_are_at_their_last_tokens(tokenizer):
    """That of the last step at the stop token, where that of a whole completion is."""
    sample = process(tokenizer)
    n = int(sample.mask.argmax())
    assert sample.rewards == ((n + 3, 0.5), (n + 6, -0.5), (n + 8, -1.5)) and sample.reward == -1.5
    assert tokenizer.decode(sample.tokens[n + 3]) == tokenizer.decode(sample.tokens[n + 6]) == " "


@pytest.mark.slow
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8)])
def test_advantages_and_returns_use_the_rewards_of_steps(tokenizer, gamma, lam):
    """Of GAE with a critic, and of discounted returns, in float64 token by token."""
    samples = [process(tokenizer), process(tokenizer)]
    batch = packing.pack(samples, 64, rows=1)
    value_BT = np.random.default_rng(0).standard_normal(batch.token_BT.shape)
    sampler = dict(correction=dict(proximal="behaviour"))
    gae = losses.PPO(advantage=dict(gamma=gamma, lam=lam, whiten="none"), **sampler)
    gae = gae.prepare(batch.replace(value_BT=value_BT))
    plain = dict(credit="return", mean="none", std="none", whiten="none", gamma=gamma)
    returned = losses.REINFORCE(advantage=plain, **sampler).prepare(batch)
    for j in (1, 2):
        own = np.flatnonzero((batch.segment_BT[0, 0] == j) & batch.mask_BT[0, 0])  # predicts each sampled token
        reward, value = np.zeros(len(own)), value_BT[0, 0, own]
        reward[[3, 6, 8]] = 0.5, -0.5, -1.5
        adv, wanted, after = 0.0, [], []
        total = 0.0
        for t in reversed(range(len(own))):
            ahead = value[t + 1] if t + 1 < len(own) else 0.0
            adv = reward[t] + gamma * ahead - value[t] + gamma * lam * adv
            total = reward[t] + gamma * total
            wanted.append(adv)
            after.append(total)
        np.testing.assert_allclose(gae.adv_BT[0, 0, own], wanted[::-1], atol=1e-5)
        np.testing.assert_allclose(gae.return_BT[0, 0, own], wanted[::-1] + value, atol=1e-5)
        np.testing.assert_allclose(returned.adv_BT[0, 0, own], after[::-1], atol=1e-5)


def test_messages_are_used_unchanged(tokenizer):
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2+3"}]
    want = "<system>1<end><user>2+3<end><assistant>"
    assert tokenizer.decode(template.prompt(tokenizer, {"messages": messages})) == want


@pytest.mark.parametrize("row", [{"question": "2+3"}, {"prompt": "2", "messages": []}])
def test_a_row_without_an_unambiguous_prompt_is_refused(tokenizer, row):
    with pytest.raises(ValueError, match="a row needs either 'prompt' or 'messages', got the fields"):
        template.prompt(tokenizer, row)


def test_a_refused_prompt_names_its_row(tokenizer):
    async def generate(tokens, **sampling):
        raise ValueError("the prompt has 5 tokens, the context 4")

    workflow = single_turn(
        generate, {"id": "r9", "prompt": "2"}, tokenizer=tokenizer, reward=exact, sampling=Sampling()
    )
    with pytest.raises(ValueError, match="^single_turn: the prompt has 5 .* context 4; row id 'r9'$"):
        asyncio.run(workflow)


def test_sampling_has_the_names_and_defaults_of_the_client():
    parameters = inspect.signature(client.Fleet.generate).parameters
    for name, value in Sampling(max_new_tokens=parameters["max_new_tokens"].default).arguments().items():
        assert parameters[name].default == value


@pytest.mark.parametrize(
    "said, finish, wanted",
    [
        ("Is it 8?", "length", 0.0),  # still a thought
        ("Is it 7?</think>It is 8.", "length", 1.0),
        ("Is it 7?</think>It is 8.", "stop", 1.0),
        ("It is 8.", "stop", 1.0),  # an answer that was learnt without a thought
    ],
)
def test_a_thought_that_the_prompt_opened_and_the_limit_cut_is_no_answer(said, finish, wanted):
    tokens = tokenizers.byte_level()
    tokens.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    row, seen = {"prompt": "3 + 5", "answer": "8"}, []

    async def generate(prompt, **sampling):
        ids = tokens.encode(said) + [tokens.eos_token_id] * (finish == "stop")
        return Completion(ids, [-0.5] * len(ids), [0] * len(ids), finish)

    async def reward(text, row, **_):
        seen.append(text)
        return gsm8k.reward(text, row)

    how = {"tokenizer": tokens, "sampling": Sampling(), "reward": reward}
    assert asyncio.run(single_turn(generate, row, **how)).reward == wanted
    [sample] = asyncio.run(multi_turn.multi_turn(generate, row, turns=1, **how))
    assert sample.reward == wanted and seen[0] == seen[1] and seen[0].endswith(said)

    async def steps(text, row, **_):
        return [(text.index("8") + 1, 1.0), (len(text), 0.5)]

    sample = asyncio.run(single_turn(generate, row, **{**how, "reward": steps}))
    start = int(sample.mask.argmax())
    assert sample.rewards == ((start + said.index("8"), 1.0), (len(sample.tokens) - 1, 0.5))
