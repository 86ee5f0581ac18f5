"""Multi-turn workflows with a scripted policy: the next message, the rewards, and what is trained on."""

import asyncio
import math

import pytest

from areax.adapters import tokenizer
from areax.rollout.types import Completion, Sampling
from areax.rollout.workflows import multi_turn

TOKENS = tokenizer.byte_level()
SAMPLING = Sampling(max_new_tokens=64)


def policy(*texts):
    """(a `generate` that returns the texts in order, decoded prompts that it received)."""
    left, heard = list(texts), []

    async def generate(prompt, **sampling):
        heard.append(TOKENS.decode(prompt))
        tokens = [*TOKENS.encode(left.pop(0)), TOKENS.eos_token_id]
        return Completion(tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop")

    return generate, heard


async def right(text, row, **_):
    return {"right": float(text == row["answer"])}


def play(workflow, texts, row, **options):
    generate, heard = policy(*texts)
    return asyncio.run(workflow(generate, row, tokenizer=TOKENS, sampling=SAMPLING, **options)), heard


def learnt(sample):
    return TOKENS.decode(sample.tokens[sample.mask].tolist())


@pytest.mark.parametrize("said, wanted", [(["4"], 1.0), (["3", "4"], 0.5), (["3", "5", "6"], 0.0)])
def test_wrong_answers_get_feedback(said, wanted):
    row = {"prompt": "2 + 2", "answer": "4", "feedback": None}
    [sample], heard = play(multi_turn.multi_turn, said, row, reward=right, discount=0.5, feedback="again")
    assert sample.reward == wanted and sample.components == {"right": float(said[-1] == "4")}
    assert learnt(sample) == "".join(f"{text}<|im_end|>" for text in said)
    assert len(heard) == len(said) and all("again" in text for text in heard[1:])
    assert sample.turn[sample.mask].max() == len(said) - 1


@pytest.mark.parametrize(
    "verdict, wanted", [("good.\n8", 0.8), ("great: 12!", math.nan), ("no idea", math.nan), ("wrong:\n0/10", 0.0)]
)
def test_the_verdict_of_a_judge_is_not_trained_on(verdict, wanted):
    [sample], heard = play(multi_turn.judged, ["an answer", verdict], {"prompt": "why?"})
    assert sample.reward == pytest.approx(wanted, nan_ok=True) and learnt(sample) == "an answer<|im_end|>"
    assert "Question:\nwhy?\n\nAnswer:\nan answer" in heard[1] and sample.info["verdict"] == verdict


def test_a_conversation_that_exceeds_the_context_ends():
    async def generate(prompt, **sampling):
        if len(prompt) > 60:
            raise ValueError("the prompt is longer than the context")
        tokens = [*TOKENS.encode("no"), TOKENS.eos_token_id]
        return Completion(tokens, [-0.5] * 3, [3] * 3, "stop")

    how = dict(tokenizer=TOKENS, reward=right, sampling=SAMPLING)
    [sample] = asyncio.run(multi_turn.multi_turn(generate, {"prompt": "2 + 2", "answer": "4"}, **how))
    assert sample.reward == 0.0 and learnt(sample) == "no<|im_end|>"
    with pytest.raises(ValueError, match="longer than the context"):
        asyncio.run(multi_turn.multi_turn(generate, {"prompt": "2" * 99, "answer": "4"}, **how))
    with pytest.raises(ValueError, match="turns: must be an integer of at least 1, got 0"):
        asyncio.run(multi_turn.multi_turn(generate, {"prompt": "2", "answer": "4"}, **how, turns=0))


def add(a: int, b: int) -> int:
    """Adds.

    Args:
      a: one number.
      b: another.
    """
    return a + b


def test_tools_are_called_and_their_results_are_sent_back():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": %s}}\n</tool_call>'
    said = [call % "2", call % '"x"', "4"]
    [sample], heard = play(
        multi_turn.tool_loop,
        said,
        {"prompt": "2 + 2", "answer": "4"},
        reward=right,
        tools=[f"{__file__}:add"],
        style="qwen",
    )
    assert sample.reward == 1.0 and learnt(sample) == "".join(f"{text}<|im_end|>" for text in said)
    assert "tool\n4<|im_end|>" in heard[1] and "tool\nerror: " in heard[2]


def test_the_variables_of_a_row_decide_whether_its_prompt_opens_the_reasoning():
    tokens = tokenizer.byte_level()
    tokens.chat_template += "{% if add_generation_prompt and enable_thinking != false %}<think>\n{% endif %}"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    how = dict(tokenizer=tokens, sampling=SAMPLING, reward=right, tools=[f"{__file__}:add"], style="qwen")
    for variables, said in (({"enable_thinking": False}, ""), ({"enable_thinking": True}, "Add.</think>")):
        generate, heard = policy(f"{said}{call}", f"{said}4")
        row = {"prompt": "2 + 2", "answer": "4", "chat_template_kwargs": variables}
        assert {sample.reward for sample in asyncio.run(multi_turn.tool_loop(generate, row, **how))} == {1.0}
        assert "tool\n4<|im_end|>" in heard[1]


def test_calls_are_read_in_the_format_of_the_chat_template():
    tokens = tokenizer.byte_level()
    tokens.chat_template += """{# tools <|start_header_id|> <|eot_id|> "parameters": #}"""  # as Llama's
    generate, heard = policy('{"name": "add", "parameters": {"a": 2, "b": 2}}', "4")
    row, tools = {"prompt": "2 + 2", "answer": "4"}, [f"{__file__}:add"]
    played = multi_turn.tool_loop(generate, row, tokenizer=tokens, sampling=SAMPLING, reward=right, tools=tools)
    [sample] = asyncio.run(played)
    assert sample.reward == 1.0 and "tool\n4<|im_end|>" in heard[1]
    for shown, style in (("", "plain"), ("{{ tools }}", "unknown")):
        tokens.chat_template = tokenizer.CHAT_TEMPLATE + shown
        with pytest.raises(
            ValueError, match=f"tool_loop: style must be a format of calls, qwen, .* got {style}, by the"
        ):
            asyncio.run(multi_turn.tool_loop(generate, row, tokenizer=tokens, sampling=SAMPLING, reward=right))
