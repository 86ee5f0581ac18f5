"""Multi-turn workflows with a scripted policy: the next message, the rewards, and what is trained on."""

import asyncio
import functools
import json
import math
from pathlib import Path

import pytest
import trl

from areax.adapters import tokenizer
from areax.core import observation
from areax.rollout.chat import observations
from areax.rollout.chat.session import Session
from areax.rollout.types import Completion, Sampling
from areax.rollout.workflows import multi_turn, single_turn

TOKENS = tokenizer.byte_level()
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
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


def watched(workflow, texts, row, tokens=TOKENS, **options):
    """The samples of an episode whose observations are marked."""
    bound = functools.partial(workflow, tokenizer=tokens, sampling=SAMPLING, **options)
    return asyncio.run(observations.marked(bound, policy(*texts)[0], row))


def observed(sample):
    """What is marked as each kind."""
    kind, number = sample.arrays["observation"]
    assert kind == "target" and not number[sample.mask].any()
    return {name: TOKENS.decode(sample.tokens[number == i].tolist()) for i, name in enumerate(observations.KINDS, 1)}


def test_what_tools_and_users_answer_is_marked_and_nothing_else():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": %s}}\n</tool_call>'
    row = {"prompt": "user 2 + 2", "answer": "4"}
    tools = dict(reward=right, tools=[f"{__file__}:add"], style="qwen")
    [sample] = watched(multi_turn.tool_loop, [call % "2", call % '"x"', "4"], row, **tools)
    wrong = "error: arguments of add: $.b: 'x' is not of type 'integer'"
    assert observed(sample) == {"tool": "4", "error": wrong, "user": ""}
    [sample] = watched(multi_turn.tool_loop, [call % "2" + call % "3", "5"], row, **tools)
    assert observed(sample) == {"tool": "45", "error": "", "user": ""}
    for said in ("user", "assistant", "Encore é\n\u00a0once ?", " spaced\n", "é€😀" * 200 + "!"):
        [sample] = watched(multi_turn.multi_turn, ["3", "5", "4"], row, reward=right, feedback=said)
        assert observed(sample) == {"tool": "", "error": "", "user": 2 * said.strip()}
    [sample] = watched(multi_turn.multi_turn, ["4"], row, reward=right)
    assert observed(sample) == {"tool": "", "error": "", "user": ""}
    [plain], _ = play(multi_turn.multi_turn, ["3", "4"], row, reward=right)
    assert plain.arrays == {}


def test_a_template_may_write_answers_of_tools_as_json_and_rewrite_earlier_turns():
    tokens = tokenizer.byte_level()
    tokens.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('.')[-1] }}{% elif loop.index > 1 and "
        "m.role == 'user' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {"prompt": "2 + 2", "answer": "4"}
    said = dict(reward=right, feedback='no: "2"\nis 2')
    samples = watched(multi_turn.multi_turn, ["hm.3", "hm.5", "4"], row, tokens, **said)
    kinds = [observed(sample)["user"] for sample in samples]
    assert kinds == ["", *2 * ['"no: \\"2\\"\\nis 2"']]  # each row has what is new in it


@pytest.mark.parametrize("name", ["deepseekv3", "glm4moe", "lfm2", "llama3_1", "qwen3", "qwen3_5_think", "smolvlm"])
def test_observations_are_found_in_what_templates_of_models_write(name):
    """Also in rows that begin anew because the template rewrites the turns before."""
    tokens = tokenizer.byte_level()
    tokens.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    tokens.bos_token = "<|im_start|>"
    said = {"tool": 'one "a"\n<b> two', "error": "error: no", "user": " bye\n"}

    async def episode(generate, row):
        session, messages = Session(generate, tokens, sampling=SAMPLING), [{"role": "user", "content": "2 + 2"}]
        for kind, text in said.items():
            x = await session.ask(messages)
            role = {"role": "tool", "name": "add"} if kind != "user" else {"role": kind}
            messages += [x.answer.message(), {**role, "content": text}]
        await session.ask(messages)
        session.set_reward(1.0)
        return session.samples()

    samples = asyncio.run(observations.marked(episode, policy("a", "b", "c", "d")[0], {}))
    found = {kind: "".join(observed(sample)[kind] for sample in samples) for kind in said}
    written = json.dumps(said["tool"]) if name == "llama3_1" else said["tool"]
    assert found == {"tool": written, "error": "error: no", "user": "bye"}


def test_each_row_of_an_interaction_has_the_observation_that_it_answers():
    generate, _ = policy("3", "5", "4")

    async def episode(generate, row):
        session = Session(generate, TOKENS, sampling=SAMPLING)
        messages = [{"role": "user", "content": "2 + 2"}]
        for said in ("one", "two", "three"):
            x = await session.ask(messages)
            messages += [x.answer.message(), {"role": "tool", "content": said}]
        session.set_reward(1.0)
        return session.samples(style="interactions")

    samples = asyncio.run(observations.marked(episode, generate, {}))
    assert [observed(sample)["tool"] for sample in samples] == ["", "one", "two"]


def test_a_workflow_of_one_turn_has_no_observations():
    bound = functools.partial(single_turn, tokenizer=TOKENS, sampling=SAMPLING, reward=right)
    with pytest.raises(ValueError, match="--objective.observation.coef: the workflow must mark observations, got sam"):
        asyncio.run(observations.marked(bound, policy("4")[0], {"prompt": "2 + 2", "answer": "4"}))


def test_kinds_of_observations_have_the_numbers_that_the_objective_reads():
    assert observations.KINDS == observation.KINDS
