"""Every field of a row that the pages name is honoured or refused, in every recipe: none is dropped without a word."""

import asyncio
import datetime
import json
import re
from pathlib import Path

import pytest
import tiny

from areax.adapters import tokenizer
from areax.adapters.data import formats
from areax.core import losses
from areax.recipes import preference, prm
from areax.recipes.shared import offline, probe, rows
from areax.rollout.chat import template
from areax.rollout.fleet import canary
from areax.rollout.types import Completion, Sampling
from areax.rollout.workflows import environments, multi_turn, single_turn

T = tokenizer.byte_level()
T.chat_template = (
    "{{ '<brief>' if brief }}{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ '' + m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = {"role": "user", "content": "Hi?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


def call(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


def written(samples):
    return [T.decode(sample.tokens.tolist()) for sample in samples]


def played(workflow, row, **options):
    """The prompt that a workflow sends."""
    asked = []

    async def generate(tokens, **sampling):
        asked.append(T.decode(tokens))
        return Completion([T.eos_token_id], [-0.5], [0], "stop")

    async def reward(text, row, **context):
        return 1.0

    more = {} if workflow is multi_turn.judged else {"reward": reward}
    asyncio.run(workflow(generate, row, tokenizer=T, sampling=Sampling(), **more, **options))
    return asked[:1]


class Plain:
    """An environment."""

    def reset(self, row):
        return "Hi?"

    def step(self, message):
        return "", 1.0, True


def test_an_environment_honours_variables():
    row = {"chat_template_kwargs": {"brief": True}}

    async def generate(tokens, **sampling):
        assert T.decode(tokens).startswith("<brief>")
        return Completion([T.eos_token_id], [-0.5], [0], "stop")

    how = {"tokenizer": T, "sampling": Sampling(), "world": f"{__file__}:Plain"}
    [sample] = asyncio.run(environments.play(generate, row, **how))
    assert T.decode(sample.tokens.tolist()).startswith("<brief>")
    with pytest.raises(ValueError, match="chat template reads brief"):
        asyncio.run(environments.play(generate, {"chat_template_kwargs": {"x": 1}}, **how))


def paired(objective, row):
    preference.check(row, objective)
    return written(preference.pairs(offline.Demonstrations(T, "last").of, objective, [row, row]))


def distilled(row):
    return written([offline.Demonstrations(T, "last").of(row, offline.completion("distill", row))])


RECIPES = {
    "sft, last": lambda row: written([offline.Demonstrations(T, "last")({**row, "completion": "Yes."})]),
    "sft, all": lambda row: written([offline.Demonstrations(T, "all")({**row, "completion": "Yes."})]),
    "dpo": lambda row: paired(losses.DPO(), {**row, "chosen": "Yes.", "rejected": "No."}),
    "kto": lambda row: paired(losses.KTO(), {**row, "completion": "Yes.", "label": True}),
    "reward model": lambda row: paired(losses.RewardModel(), {**row, "chosen": "Yes.", "rejected": "No."}),
    "reward model, as a reward": lambda row: [T.decode(sum(tokenizer.supervised(T, {**row, "completion": "Y"}), []))],
    "prm": lambda row: written([prm.sample(T, {**row, "completions": ["Yes."], "labels": [1]}, "\n")]),
    "distill": lambda row: distilled({**row, "completion": "Yes."}),
    "rl, eval": lambda row: [template.prompted(T, row).text],
    "single_turn": lambda row: played(single_turn, row),
    "multi_turn": lambda row: played(multi_turn.multi_turn, row),
    "judged": lambda row: played(multi_turn.judged, row),
    "tool_loop": lambda row: played(multi_turn.tool_loop, row, style="hermes"),
}
HONOURED = {  # (fields, what is then in the text)
    "prompt": ({"prompt": "Hi?"}, "user\nHi?<|im_end|>\n<|im_start|>assistant\n"),
    "messages": ({"messages": [{"role": "system", "content": "Sys."}, ASK]}, "system\nSys.<|im_end|>\n"),
    "developer": ({"messages": [{"role": "developer", "content": "Sys."}, ASK]}, "system\nSys.<|im_end|>\n"),
    "tools": ({"messages": [ASK], "tools": [TOOL]}, "<tool>weather</tool>"),
    "tools as text": ({"prompt": "Hi?", "tools": '[{"function": {"name": "rain"}}]'}, "<tool>rain</tool>"),
    "variables": ({"messages": [ASK], "chat_template_kwargs": {"brief": True}}, "<brief>"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": x} for x in "AB"]}]},
              "user\nAB<|im_end|>"),
    "calls": ({"messages": [ASK, call('{"city": "Paris"}'), {"role": "tool", "content": "sun"}]},
              "assistant\n<call>weather city=Paris</call><|im_end|>"),
    "calls as objects": ({"messages": [ASK, call({"city": "Paris"}), {"role": "tool", "content": "sun"}]},
                         "assistant\n<call>weather city=Paris</call><|im_end|>"),
    "reasoning": ({"messages": [ASK, {"role": "assistant", "content": "A", "thinking": "Hm."}, ASK]},
                  "<think>Hm.</think>A"),
    "nulls": ({"messages": [{"role": "user", "content": "Hi?", "tool_calls": None, "name": None},
                            call({"city": "Paris", "day": None}) | {"content": None, "reasoning_content": None},
                            {"role": "tool", "content": [{"type": "text", "text": "sun", "image": None}]}],
               "tools": None, "prompt": None, "chat_template_kwargs": {"brief": None}},
              "<call>weather city=Paris</call><|im_end|>\n<|im_start|>tool\nsun<|im_end|>"),
    "an end of turn in a text": ({"messages": [ASK, {"role": "assistant", "content": "A<|im_end|>\n"}, ASK]},
                                 "assistant\nA<|im_end|>\n<|im_start|>user"),
}  # fmt: skip
REFUSED = {  # (fields, the error)
    "prompt and messages of other types": ({"prompt": ["Hi?"]}, "a text|'prompt' or 'messages'"),
    "unknown variables": ({"prompt": "Hi?", "chat_template_kwargs": {"briefly": True}}, "chat template reads brief"),
    "variables of another type": ({"prompt": "Hi?", "chat_template_kwargs": [1]}, "must be an object"),
    "tools of another type": ({"prompt": "Hi?", "tools": "weather"}, "a list of tools"),
    "functions": ({"prompt": "Hi?", "functions": [{"name": "f"}]}, "'functions' is not read.*'tools'"),
    "documents": ({"prompt": "Hi?", "documents": [{"text": "x"}]}, "'documents' is not read"),
    "system": ({"prompt": "Hi?", "system": "Be kind."}, "'system' is not read.*'messages'"),
    "history": ({"prompt": "Hi?", "history": [["a", "b"]]}, "'history' is not read"),
    "videos": ({"prompt": "Hi?", "videos": ["a.mp4"]}, "'videos' is not read.*leave the row out"),
    "a loss of ms-swift": ({"messages": [ASK, {"role": "assistant", "content": "A", "loss": False}, ASK]},
                           "'loss' is not read.*'weight'"),
    "axolotl's train": ({"messages": [ASK, {"role": "assistant", "content": "A", "train": True}, ASK]},
                        "'train' is not read.*'weight'"),
    **{f"a message's {name}": ({"messages": [ASK, {"role": "assistant", "content": "A", name: 0}, ASK]},
                               f"'{name}' is not read.*'weight'")
       for name in ("loss_scale", "loss_mask", "training", "train_detail")},
    "function_call": ({"messages": [ASK, {"role": "assistant", "function_call": {"name": "f"}}, ASK]},
                      "in tool_calls"),
    "images of a model of text": ({"prompt": "Hi?", "images": ["a.png"]}, "reads no images"),
    "other parts": ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "text or an image, got 'audio'"),
    "arguments that are no object": ({"messages": [ASK, call('{"city": '), ASK]}, "an object or its JSON"),
    "other parts with a text": ({"messages": [{"role": "user", "content": [{"type": "video", "text": "x"}]}]},
                                "text or an image, got 'video'"),
    "arguments that are no JSON": ({"messages": [ASK, call({"day": datetime.date(2020, 1, 2)}), ASK]},
                                   "must be JSON .*date is not JSON|an object or its JSON"),
    "NaN in the text of arguments": ({"messages": [ASK, call('{"x": NaN}'), ASK]}, "an object or its JSON"),
    "tools that are no JSON": ({"prompt": "Hi?", "tools": [{**TOOL, "least": float("nan")}]},
                               r"must be JSON \(Out of range"),
    "tools nested too deep": ({"prompt": "Hi?", "tools": [{"function": {"name": "f", "parameters": nested(450)}}]},
                              "nested at most 100 levels deep"),
    "tools as a text, nested too deep": ({"prompt": "Hi?", "tools": '[{"a": ' * 50_000}, "a list of tools or its JSON"),
    "arguments nested too deep": ({"messages": [ASK, call(nested(450)), ASK]}, "nested at most 100 levels deep"),
    "arguments as a text, nested too deep": ({"messages": [ASK, call('{"a": ' * 50_000), ASK]},
                                             "an object or its JSON"),
    "half a character in arguments": ({"messages": [ASK, call({"city": "\ud800"}), ASK]}, "must be Unicode"),
    "half a character in tools": ({"prompt": "Hi?", "tools": [{"function": {"name": "\ud800"}}]},
                                  "must be Unicode|--workflow-options"),
    "reasoning under two names": ({"messages": [ASK, {**call({}), "thinking": "A", "reasoning": "B"}, ASK]},
                                  "reasoning in one of .*, got different ones"),
    "arguments that are a list": ({"messages": [ASK, call([1]), ASK]}, "an object or its JSON"),
    "a weight": ({"messages": [ASK, {"role": "assistant", "content": "A", "weight": 0.5}, ASK]},
                 "weight must be 0 or 1"),
    "reasoning of another type": ({"messages": [ASK, {"role": "assistant", "content": "A", "thinking": ["x"]}, ASK]},
                                  "reasoning must be a text"),
    "an answer at the end of the prompt": ({"messages": [ASK, {"role": "assistant", "content": "A"}]},
                                           "must end with a message of the user or a tool"),
}  # fmt: skip


def test_a_probe_is_a_whole_prompt_if_that_has_enough_tokens():
    several = [{"prompt": text * n} for text, n in (("a", 3), ("b", 40), ("c", 40))]
    ids = [template.prompt(T, row) for row in several]
    assert probe.prompt(T, several, 999) == (*ids[0], *ids[1]) and len(ids[0]) < probe.ENOUGH
    long = {"prompt": "d" * 150}
    assert T.decode(list(probe.prompt(T, [long, *several], 999))) == template.prompted(T, long).text
    assert len(probe.prompt(T, [{"prompt": "e" * 500}], 999)) == probe.TOKENS
    assert len(probe.prompt(T, [long], 99)) == 99


@pytest.mark.parametrize("recipe", RECIPES)
def test_fields_change_the_prompt(recipe):
    for name, (row, wanted) in HONOURED.items():
        if recipe == "tool_loop" and row.get("tools"):  # which has its own
            with pytest.raises(ValueError, match="calls the tools of --workflow-options, got a row with 'tools'"):
                RECIPES[recipe](row)
            continue
        texts = RECIPES[recipe](row)
        assert texts and all(wanted in text for text in texts), (name, texts)
        assert not any("None" in text for text in texts)


def test_canaries_begin_with_rows_prompts_and_have_one_length_with_room_for_what_is_sampled():
    several = [{"prompt": letter * 40} for letter in "abcdef"]
    ids = [template.prompted(T, row).tokens for row in several]
    made = probe.canaries(T, several, 100, "BF16")
    assert made.dtype == "BF16" and len(made.prompts) == probe.CANARIES
    assert [list(one[: len(own)]) for one, own in zip(made.prompts, ids, strict=False)] == ids[: probe.CANARIES]
    assert {len(one) for one in made.prompts} == {100 - canary.NEW}
    assert probe.canaries(T, [{"question": "?"}], 100, "F32") == ((), "F32")
    assert {len(one) for one in probe.canaries(T, several * 9, 999, "F32").prompts} == {probe.TOKENS}


def test_rows_that_a_workflow_reads_in_its_own_way_need_no_probe():
    clear, own = {"prompt": "Hi?"}, {"prompt": "Hi?", "system": "Be kind."}
    assert T.decode(list(probe.prompt(T, [clear, own], 99))) == template.prompted(T, clear).text
    assert probe.prompt(T, [own], 99) == ()


@pytest.mark.parametrize("recipe", RECIPES)
def test_fields_that_are_not_read_are_refused(recipe):
    for name, (row, message) in REFUSED.items():
        with pytest.raises(ValueError, match=message) as error:
            RECIPES[recipe](row)
        assert "\n" not in str(error.value), name


def test_a_template_that_shows_no_tools_refuses_rows_with_them():
    tokens = tokenizer.byte_level()
    row = {"prompt": "Hi?", "tools": [TOOL]}
    for use in (
        lambda: template.prompted(tokens, row),
        lambda: tokenizer.supervised(tokens, {**row, "completion": "A"}),
    ):
        with pytest.raises(ValueError, match="this model's chat template does not show them"):
            use()


ANSWER = {"role": "assistant", "content": "A"}
OTHER = {**ANSWER, "content": "B"}
CALLED, SAID = ["<call>weather a=1</call><|im_end|>"] * 2, ["A<|im_end|>"] * 2
THOUGHT = ["<think>Hm.</think>A<|im_end|>"] * 2
LEARNT = {  # (row, what is learnt of all turns, and of the last)
    "a call": ({"messages": [ASK, call('{"a": 1}')]}, *CALLED),
    "a completion that is a call": ({"prompt": "Hi?", "completion": call({"a": 1})}, *CALLED),
    "reasoning": ({"prompt": "Hi?", "completion": {**ANSWER, "reasoning": "Hm."}}, *THOUGHT),
    "parts": ({"messages": [ASK, {**ANSWER, "content": [{"type": "text", "text": "A"}]}]}, *SAID),
    "an end of turn": ({"prompt": "Hi?", "completion": "A<|im_end|>"}, *SAID),
    "an end of turn and a line break": ({"prompt": "Hi?", "completion": "A<|im_end|>\n"}, *SAID),
    "two ends": ({"prompt": "Hi?", "completion": "A<|im_end|>\n<|im_end|>"}, *SAID),
    "nothing": ({"messages": [ASK, ANSWER, ASK], "completion": ""}, "A<|im_end|><|im_end|>", "<|im_end|>"),
    "two turns": ({"messages": [ASK, ANSWER, ASK, OTHER]}, "A<|im_end|>B<|im_end|>", "B<|im_end|>"),
    "the same twice": ({"messages": [ASK, ANSWER, ASK, ANSWER]}, "A<|im_end|>" * 2, "A<|im_end|>"),
    "a weight of 0": ({"messages": [ASK, {**OTHER, "weight": 0}, ASK, {**ANSWER, "weight": 1}]}, *SAID),
}  # fmt: skip


@pytest.mark.parametrize("marks", ["none", "turns", "contents"])
@pytest.mark.parametrize("name", LEARNT)
def test_what_is_learnt(name, marks):
    """The same with a template that marks what the assistant generates, also if not its end, as with one that does
    not."""
    (row, *wanted), tokens = LEARNT[name], tokenizer.byte_level()
    body = "{% if m.reasoning_content %}"
    tokens.chat_template = T.chat_template
    if marks != "none":
        head, tail = T.chat_template.split(body)
        said, rest = tail.split("<|im_end|>", 1)
        inner, end = (body + said + "<|im_end|>", "") if marks == "turns" else (body + said, "<|im_end|>")
        tokens.chat_template = (
            head + "{% if m.role == 'assistant' %}{% generation %}" + inner + "{% endgeneration %}{% else %}" + inner
            + "{% endif %}" + end + "{{ '' }}" + rest
        )  # fmt: skip
    for learn, text in zip(("all", "last"), wanted, strict=True):
        made = offline.Demonstrations(tokens, learn)(row)
        assert tokens.decode(made.tokens[made.mask].tolist()) == text


ARGUMENTS = {  # how templates write arguments -> what is learnt of {"city": "Paris"}
    "{{ x.arguments | tojson }}": '{"city": "Paris"}',
    "{{ x.arguments }}": '{"city": "Paris"}',
    "{{ '' + x.arguments }}": '{"city": "Paris"}',
    "{{ x.arguments if x.arguments is string else x.arguments | tojson }}": '{"city": "Paris"}',
    "{% for k, v in x.arguments | items %}{{ k }}={{ v }}{% endfor %}": "city=Paris",
    "{% for k, v in x.arguments.items() %}{{ k }}={{ v }}{% endfor %}": "city=Paris",
}


@pytest.mark.parametrize("style", ARGUMENTS)
def test_arguments_are_given_as_the_template_wants_them(style):
    tokens = tokenizer.byte_level()
    body = "{% for c in m.tool_calls or [] %}{% set x = c.function %}{{ x.name }} " + style + ";{% endfor %}"
    tokens.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + body + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        row = {"messages": [ASK, call(arguments)]}
        row["messages"][1]["tool_calls"] *= 2
        for learn in ("all", "last"):
            made = offline.Demonstrations(tokens, learn)(row)
            wanted = f"weather {ARGUMENTS[style]};" * 2 + "<|im_end|>"
            assert tokens.decode(made.tokens[made.mask].tolist()) == wanted


@pytest.mark.parametrize("learn", ["all", "last"])
def test_nothing_to_learn_is_refused(learn):
    row = {"messages": [ASK, {**ANSWER, "weight": 0}]}
    with pytest.raises(ValueError, match="got weight 0 for each of them"):
        offline.Demonstrations(T, learn)(row)


def test_what_the_template_leaves_out_of_the_last_turn_is_refused():
    tokens = tokenizer.byte_level()
    lost = "leaves out 'Hm.' of the last message"
    for answer, words in ((call("{}"), "tool_calls: .* does not show them"), ({**ANSWER, "thinking": "Hm."}, lost)):
        with pytest.raises(ValueError, match=words):
            tokenizer.supervised(tokens, {"prompt": "Hi?", "completion": answer})


def test_pairs_may_be_messages_or_lists_of_one():
    said = [[{**ANSWER, "thinking": "Hm."}], {"role": "assistant", "content": [{"type": "text", "text": "B"}]}]
    texts = paired(losses.DPO(), {"prompt": "Hi?", "chosen": said[0], "rejected": said[1]})
    assert [text.split("assistant\n")[1] for text in texts[:2]] == ["<think>Hm.</think>A<|im_end|>", "B<|im_end|>"]
    talks = {"prompt": "Hi?", "chosen": [ASK, ANSWER], "rejected": [ASK, OTHER]}
    with pytest.raises(ValueError, match="--row areax.adapters.data.formats:preference reads lists of messages"):
        paired(losses.DPO(), talks)
    read = paired(losses.DPO(), formats.preference(talks))
    assert [text.split("assistant\n")[1] for text in read[:2]] == ["A<|im_end|>", "B<|im_end|>"]


def test_records_of_a_known_form_name_the_function_that_reads_them(tmp_path):
    check = lambda row: template.prompted(T, row).text and None
    for record, name in (({"prompt": [ASK]}, "conversational"), ({"instruction": "Hi?", "output": "A"}, "instruction")):
        source = str(tiny.rows(tmp_path / "rows.jsonl", [record]))
        with pytest.raises(ValueError, match=f"; --row areax.adapters.data.formats:{name} reads such records"):
            rows.read(source, check=check, quiet=True)
    with pytest.raises(ValueError, match="needs either 'prompt' or 'messages', got the fields .'text'.*}$"):
        rows.read(str(tiny.rows(tmp_path / "rows.jsonl", [{"text": "A"}])), check=check, quiet=True)


def test_the_page_names_no_other_fields():
    page = (Path(__file__).parents[1] / "docs/add-a-data-set.md").read_text()
    [section] = re.findall(r"^## Conversations\n(.*?)^## ", page, re.M | re.S)
    named = set(re.findall(r'"([a-z_]+)"', section)) - {"type", "text", "enable_thinking"}
    tried = json.dumps([[row for row, *_ in cases.values()] for cases in (HONOURED, REFUSED, LEARNT)], default=str)
    assert named - set(re.findall(r'"([a-z_]+)"', tried)) == {"chosen", "rejected"}  # which `RECIPES` has
