"""`--chat-template-kwargs`: the same prompts as transformers renders, wherever a run renders one."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import servers
import tiny

from areax.adapters import cli, hf, tokenizer
from areax.adapters.command_line import options, parse
from areax.adapters.data import chat_sft
from areax.adapters.tracking import run_dir
from areax.recipes import eval, grpo, sft
from areax.recipes.shared import common
from areax.rollout.chat import template
from areax.rollout.types import Completion, Sampling
from areax.rollout.workflows import agents, multi_turn, resolve

# As Qwen3's: without thinking, every answer begins with an empty thought.
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
OPTION = '{"enable_thinking": false}'
USER = {"role": "user", "content": "1+1"}
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("template")
    tokens = tokenizer.byte_level()
    tokens.chat_template = TEMPLATE
    tiny.model(path / "small", vocab_size=len(tokens), max_position_embeddings=512, eos_token_id=tokens.eos_token_id)
    config, params = hf.load(path / "small")
    hf.save(path / "model", config, params, tokenizer=tokens)
    tiny.rows(path / "rows.jsonl", [{"prompt": "1+1", "answer": "2", "completion": "2"}] * 4)
    (path / "reward.py").write_text("def reward(text, row, prompt): return float(prompt.endswith('</think>\\n\\n'))")
    return path


@pytest.fixture(scope="module")
def tokens(place):
    return common.open_tokenizer(str(place / "model"), OPTION)


def wanted(place, messages, **more):
    plain = tokenizer.load(place / "model")
    return plain.apply_chat_template(messages, tokenize=False, enable_thinking=False, **more)


def test_every_rendering_equals_that_of_transformers(place, tokens):
    asked = wanted(place, [USER], add_generation_prompt=True)
    assert asked.endswith(EMPTY)
    assert tokens.decode(template.prompt(tokens, {"prompt": "1+1"})) == asked
    reply = [USER, {"role": "assistant", "content": "2"}]
    whole = wanted(place, reply).removesuffix("\n")
    for row in ({"prompt": "1+1", "completion": "2"}, {"messages": reply}):
        for learn in ("last", "all"):
            ids, mask = chat_sft.demonstration(tokens, row, learn)
            assert tokens.decode(ids) == whole
            assert tokens.decode(np.array(ids)[mask].tolist()) == "2<|im_end|>"


def test_blocks_of_assistant_tokens_are_rendered_alike(place, tokens):
    made = tokenizer.byte_level()
    made.chat_template = TEMPLATE.replace(
        "{{- message.content + '<|im_end|>\\n' }}",
        "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    )
    tokenizer.bind(made, {"enable_thinking": False})
    ids, _ = chat_sft.demonstration(made, {"prompt": "1+1", "completion": "2"}, "all")
    assert made.decode(ids) == wanted(place, [USER, {"role": "assistant", "content": "2"}]).removesuffix("\n")


@pytest.mark.parametrize("name", ["multi_turn", "tool_loop"])
def test_turns_and_tools_render_with_the_variables(place, tokens, name):
    heard = []

    async def generate(prompt, **sampling):
        heard.append(tokens.decode(prompt))
        said = [*tokens.encode(str(len(heard))), tokens.eos_token_id]
        return Completion(said, [-0.5] * len(said), [0] * len(said), "stop")

    async def reward(text, row, **_):
        return float(text == "2")

    workflow, how = getattr(multi_turn, name), {"style": "qwen"} if name == "tool_loop" else {}
    sampling = Sampling(max_new_tokens=8)
    asyncio.run(workflow(generate, {"prompt": "1+1"}, tokenizer=tokens, reward=reward, sampling=sampling, **how))
    assert heard[0] == wanted(place, [USER], add_generation_prompt=True)
    assert all(prompt.endswith(EMPTY) for prompt in heard) and len(heard) == (2 if name == "multi_turn" else 1)


def test_agents_prompts_have_the_variables_unless_their_request_has(place, tokens, tmp_path):
    (tmp_path / "agent.py").write_text(
        "import httpx\n"
        "async def agent(row, base_url, api_key):\n"
        "    body = {'model': 'm', 'messages': [{'role': 'user', 'content': '1+1'}], **row['more']}\n"
        "    async with httpx.AsyncClient() as http:\n"
        "        done = await http.post(f'{base_url}/chat/completions', json=body,\n"
        "                               headers={'Authorization': f'Bearer {api_key}'})\n"
        "    done.raise_for_status()\n"
        "    return 1.0\n"
    )
    heard = []

    async def generate(prompt, **sampling):
        heard.append(tokens.decode(prompt))
        return Completion([tokens.eos_token_id], [-0.5], [0], "stop")

    async def reward(text, row, **_):
        return 0.0

    async def main():
        bind = resolve.bind(
            f"{tmp_path}/agent.py:agent", tokenizer=tokens, reward=reward, sampling=Sampling(max_new_tokens=8),
            agent=agents.Options(),
        )  # fmt: skip
        async with bind as workflow:
            for more in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
                await workflow(generate, {"prompt": "1+1", "more": more})

    asyncio.run(main())
    assert heard[0] == wanted(place, [USER], add_generation_prompt=True)
    assert heard[1] == heard[0].removesuffix(EMPTY)


@pytest.mark.long
def test_training_and_evaluation_sample_from_these_prompts_and_the_run_records_them(place):
    """The reward is 1 exactly for prompts with the empty thought."""
    with servers.embedded(place / "model", slots=8, context=128) as remote:
        given = dict(
            model=str(place / "model"), data=str(place / "rows.jsonl"), reward=f"{place}/reward.py:reward",
            servers=(remote.url,), sampling=Sampling(max_new_tokens=2),
        )  # fmt: skip
        base = grpo.Config(given.pop("model"), given.pop("data"), given.pop("reward"))
        config = options.replaced(
            base, **given, out=str(place / "run"), steps=1, groups=2, group_size=2, rows=2, length=128,
            heldout=(str(place / "rows.jsonl"),), chat_template_kwargs=OPTION,
        )  # fmt: skip
        assert grpo.main(config)["accuracies"] == {"0": 1.0, "1": 1.0}
        evaluated = eval.Config(
            base.model,
            base.data,
            base.reward,
            servers=(remote.url,),
            sampling=Sampling(temperature=0, max_new_tokens=2),
        )
        assert eval.main(evaluated)["accuracy"] == 0
        assert eval.main(dataclasses.replace(evaluated, chat_template_kwargs=OPTION))["accuracy"] == 1
    [line] = [x for x in run_dir.read_lines(place / "run/metrics.jsonl") if x["kind"] == "grpo"]
    assert line["reward"] == 1
    saved = json.loads((place / "run" / run_dir.CONFIG).read_text())
    assert saved["prompts"]["chat_template_kwargs"] == OPTION
    assert parse.parse(grpo.Config, ["--config", str(place / "run" / run_dir.CONFIG)], "x") == config
    # The exported tokenizer has the model's own template.
    assert tokenizer.load(place / "run/model").chat_template == TEMPLATE


def test_a_file_of_options_may_write_them_as_a_mapping(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: m\ndata: d\nreward: r\nchat_template_kwargs: {enable_thinking: false}\nworkflow-options: {turns: 4}\n"
    )
    got = options.flat(parse.parse(grpo.Config, ["--config", str(tmp_path / "run.yaml")], "x"))
    assert got.chat_template_kwargs == OPTION and got.workflow_options == '{"turns": 4}'
    (tmp_path / "run.yaml").write_text("model: m\ndata: d\nchat_template_kwargs: {enable_thinking: false}\n")
    assert parse.parse(sft.Config, ["--config", str(tmp_path / "run.yaml")], "x").chat_template_kwargs == OPTION


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "--chat-template-kwargs must be a JSON object, such as"),
        ("[1]", "--chat-template-kwargs must be a JSON object, such as '{\"name\": 4}', got '[1]'"),
        ('{"enable_thinkin": false}', "the chat template reads enable_thinking, got enable_thinkin; "),
        ('{"messages": []}', "the chat template reads enable_thinking, got messages; "),
        ('{"add_generation_prompt": false}', "reads enable_thinking, got add_generation_prompt; "),
    ],
)
@pytest.mark.parametrize("command", ["train grpo", "train sft", "train dpo", "train distill", "eval"])
def test_variables_that_the_template_does_not_read_are_one_line(capsys, place, tmp_path, command, given, message):
    words = ["--model", place / "model", "--data", place / "rows.jsonl", "--chat-template-kwargs", given]
    words += ["--reward", f"{place}/reward.py:reward"] if command in ("train grpo", "eval") else []
    words += ["--teacher", place / "model"] if command == "train distill" else []
    words += [] if command == "eval" else ["--out", tmp_path / "out"]
    assert cli.main([*command.split(), *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_variables_that_a_template_reads(place):
    tokens = tokenizer.byte_level()
    with pytest.raises(ValueError, match="the chat template reads no variables, got enable_thinking"):
        tokenizer.bind(tokens, {"enable_thinking": False})
    tokens.chat_template = (
        "{% for m in messages %}{% if m.x %}{% continue %}{% endif %}{{ bos_token }}{% endfor %}{{ a }}"
    )
    assert template.variables_of(tokens) == {"a", "bos_token"} - set(tokens.special_tokens_map)
    tokens.chat_template = None
    with pytest.raises(ValueError, match="the chat template reads no variables"):
        tokenizer.bind(tokens, {"a": 1})
    assert tokenizer.bind(tokens, {}) is tokens
