"""Input that cannot work: one line, exit code 2, before anything starts, and no output directory."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import tiny

from areax.adapters import cli, hf, tokenizer
from areax.recipes.shared import rows
from areax.rollout.processes import memory

GOOD = {"prompt": "1+1", "answer": "2", "completion": "2", "chosen": "2", "rejected": "3"}
REPLY = {name: GOOD[name] for name in ("answer", "completion", "chosen", "rejected")}
USER = {"role": "user", "content": "1+1"}
CODE = {
    "reward.py": "def reward(text, row): return 1.0",
    "raises.py": "raise RuntimeError('no\\nway')",
    "exits.py": "import sys\nsys.exit(3)",
    "short.py": "def reward(text): return 1.0",
    "long.py": "def reward(text, row, more): return 1.0",
    "number.py": "reward = 3",
    "rows.py": "def key(record): return record['question']\ndef number(record): return 3\n"
    "def leaves(record): raise SystemExit(4)\ndef none(record): return None",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("bad")
    tiny.model(path / "model")
    plain = tokenizer.load(path / "model")
    plain.chat_template = None
    config, params = hf.load(path / "model")
    hf.save(path / "plain", config, params, tokenizer=plain)
    tiny.rows(path / "good.jsonl", [GOOD] * 3)
    tiny.rows(path / "told.jsonl", [{**GOOD, "teacher_prompt": "1+" * 20}])
    for name, text in CODE.items():
        (path / name).write_text(text)
    return path


def words(place, recipe, *more, **changes):
    """The arguments of a recipe that would run, with other options after them."""
    given = {
        "model": place / "model", "data": place / "good.jsonl", "out": place / "out", "length": 32, "rows": 1,
        "steps": 1, "reward": f"{place}/reward.py:reward", "teacher": place / "model",
    }  # fmt: skip
    given |= {"groups": 2, "group-size": 2, "sampling.max-new-tokens": 8} if recipe == "grpo" else {"batch": 2}
    given |= changes
    unknown = {"grpo": {"teacher"}, "distill": {"reward"}}.get(recipe, {"teacher", "reward"})
    options = [word for name, value in given.items() if name not in unknown for word in (f"--{name}", str(value))]
    return ["train", recipe, *options, *map(str, more)]


def line(capsys, place, arguments):
    """The one line of arguments that must be refused."""
    assert cli.main([str(word) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and not out, err
    assert not (place / "out").exists()
    return err


ROWS = {  # a row -> what is wrong with it
    "prompt": [
        ({**REPLY, "prompt": 3}, "'prompt' must be a text, got 3"),
        ({**REPLY, "prompt": True}, "'prompt' must be a text, got True"),
        ({**REPLY, "prompt": {"a": 1}}, "'prompt' must be a text, got {'a': 1}"),
        ({**REPLY, "prompt": ["a"]}, "'prompt' must be a text, got ['a']"),
        ({**REPLY, "prompt": [USER]}, "'prompt' must be a text, got [{'role'"),
        ({**REPLY, "prompt": float("nan")}, "'prompt' must be a text, got nan"),
        ({**REPLY, "prompt": None}, "a row needs either 'prompt' or 'messages', got the fields"),
        (REPLY, "a row needs either 'prompt' or 'messages', got the fields"),
        ({}, "a row needs either 'prompt' or 'messages', got the fields []"),
        ({**GOOD, "messages": [USER]}, "a row needs either 'prompt' or 'messages', got the fields"),
        ({**REPLY, "prompt": "1\ud800"}, "texts must be Unicode, got the lone surrogate '\\ud800'"),
        ({**GOOD, "answer": "\udfff"}, "texts must be Unicode, got the lone surrogate '\\udfff'"),
        ({**REPLY, "prompt": "1é"}, "the tokenizer has no token for 'é' in '1é'"),
        ({**REPLY, "prompt": "1" * 99}, "a prompt must leave room for a completion within 32 tokens, got 107"),
    ],
    "messages": [
        ({**REPLY, "messages": "1+1"}, "'messages' must be a list of messages, got '1+1'"),
        ({**REPLY, "messages": USER}, "'messages' must be a list of messages, got {'role'"),
        ({**REPLY, "messages": 3}, "'messages' must be a list of messages, got 3"),
        ({**REPLY, "messages": [None]}, "a message needs a role and a content, got None"),
        ({**REPLY, "messages": ["1"]}, "a message needs a role and a content, got 1"),
        ({**REPLY, "messages": [{"content": "1"}]}, "a message needs a role and a content, got {'content'"),
        ({**REPLY, "messages": [{"role": 3, "content": "1"}]}, "a message needs a role and a content, got {'role': 3"),
        (
            {**REPLY, "messages": [{"role": "", "content": "1"}]},
            "a message needs a role and a content, got {'role': ''",
        ),
        ({**REPLY, "messages": [{"role": "robot", "content": "1"}]}, "has no token for 'robt' in 'robot'"),
        ({**REPLY, "messages": [{"role": "user"}]}, "a message needs a role and a content, a text, got"),
        ({**REPLY, "messages": [{**USER, "content": 3}]}, "a message needs a role and a content, a text, got"),
        ({**REPLY, "messages": [{**USER, "content": None}]}, "a message needs a role and a content, a text, got"),
        (
            {**REPLY, "messages": [{**USER, "content": [{"type": "audio", "text": "1"}]}]},
            "must be text or an image, got 'audio'",
        ),
        ({**REPLY, "messages": [USER, {"role": "assistant", "tool_calls": 3}]}, "tool_calls must be a list"),
        ({**REPLY, "messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "tool_calls must be a list"),
    ],
    "completion": [
        ({"prompt": "1"}, "a demonstration needs a completion, got the fields ['prompt']"),
        ({"prompt": "1", "response": "2"}, "needs a completion, got the fields ['prompt', 'response']; --row can"),
        ({"prompt": "1", "completion": 3}, "a completion must be a text, or one message of the assistant, got 3"),
        ({"prompt": "1", "completion": None}, "a demonstration needs a completion"),
        ({"prompt": "1", "completion": "1\ud800"}, "texts must be Unicode"),
        ({"prompt": "1", "completion": "é"}, "the tokenizer has no token for 'é'"),
        ({"prompt": "1", "completion": "1" * 99}, "a row must fit in --length 32 tokens, got 109; or use --too-long"),
        (
            {"messages": [USER]},
            "the assistant's answer to a prompt, got 1, the last with role 'user'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "1"}, USER, USER]},
            "got 4, the last with role 'user'; add the answer, or leave out what follows it",
        ),
        ({"messages": "12"}, "'messages' must be a list of messages, got '12'"),
        ({"messages": [3]}, "a message needs a role and a content, got 3"),
    ],
    "pair": [
        ({"prompt": "1", "chosen": "1"}, "DPO: every row needs a text 'rejected'"),
        ({"prompt": "1", "chosen": 3, "rejected": "1"}, "DPO: every row needs a text 'chosen'"),
        ({"prompt": 3, "chosen": "1", "rejected": "2"}, "DPO: every row needs a 'prompt' or 'messages'"),
        ({"prompt": "1", "chosen": "1" * 99, "rejected": "2"}, "a row must fit in --length 32 tokens, got"),
        ({"messages": [None], "chosen": "1", "rejected": "2"}, "a message needs a role and a content, got None"),
    ],
}
RECIPE = {"prompt": "grpo", "messages": "grpo", "completion": "sft", "pair": "dpo"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("recipe", "row", "message"), [(RECIPE[kind], *case) for kind, cases in ROWS.items() for case in cases]
)
def test_a_bad_row_is_one_line_with_its_place(capsys, place, tmp_path, recipe, row, message):
    """The second of a file whose first is good; a run of one step would perhaps not have met it."""
    data = tiny.rows(tmp_path / "rows.jsonl", [GOOD, row])
    said = line(capsys, place, words(place, recipe, data=data))
    assert said.startswith(f"{data}:2: ") and message in said


LINE = json.dumps(GOOD).encode()
FILES = [
    ("rows.jsonl", b"[1]\n", "rows.jsonl:1: a row must be a JSON object, got list"),
    ("rows.jsonl", b'"a"\n', "rows.jsonl:1: a row must be a JSON object, got str"),
    ("rows.jsonl", b"3\n", "rows.jsonl:1: a row must be a JSON object, got int"),
    ("rows.jsonl", b"null\n", "rows.jsonl:1: a row must be a JSON object, got NoneType"),
    ("rows.jsonl", LINE + b"\n" + LINE[:9], "rows.jsonl:2: not JSON: "),
    ("rows.jsonl", LINE + b",\n", "rows.jsonl:1: not JSON: Extra data"),
    ("rows.jsonl", LINE + LINE, "rows.jsonl:1: not JSON: Extra data"),
    ("rows.jsonl", b"<html>", "rows.jsonl:1: not JSON: Expecting value, at column 1"),
    ("rows.jsonl", bytes(99), "rows.jsonl:1: not JSON: "),
    ("rows.jsonl", bytes(range(128, 256)), "rows.jsonl:1: not UTF-8"),
    ("rows.jsonl", '{"prompt": "é"}'.encode("latin-1"), "rows.jsonl:1: not UTF-8"),
    ("rows.jsonl", LINE.decode().encode("utf-16"), "rows.jsonl:1: not UTF-8: invalid start byte"),
    ("rows.jsonl", b"[" * 100_000, "rows.jsonl:1: not JSON that can be read: nested too deep"),
    ("rows.jsonl", b'{"prompt": ' * 50_000, "rows.jsonl:1: not JSON that can be read: nested too deep"),
    ("rows.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}", "rows.jsonl:1: not JSON that can be read: Exceeds the limit"),
    ("rows.jsonl", b"", "the data set is empty"),
    ("rows.jsonl", b"\n\n", "the data set is empty"),
    ("rows.json", LINE, "rows.json: must hold a list of objects, got dict"),
    ("rows.json", b"[" * 100_000, "rows.json: not JSON that can be read: nested too deep"),
    ("rows.json", b"[3]", "rows.json: entry 1: a row must be a JSON object, got int"),
    ("rows.parquet", b"PAR1", "rows.parquet: not a readable Parquet file"),
    ("rows.jsonl.gz", b"no such thing", "rows.jsonl.gz: damaged or half-written"),
    ("rows.jsonl.gz", gzip.compress(LINE * 99, mtime=0)[:-9], "rows.jsonl.gz: damaged or half-written"),
    ("rows.jsonl.zst", b"no such thing", "rows.jsonl.zst: damaged or half-written"),
    ("rows.txt", b"a", "a file must end in .jsonl, "),
    ("saved/state.json", b"{", "not a folder that `save_to_disk` wrote completely"),
    ("saved/dataset_dict.json", b"{}", "not a folder that `save_to_disk` wrote completely"),
    ("folder/train.jsonl", b"{", "folder/train.jsonl:1: not JSON: "),
    ("folder/other.jsonl", b"{", "no train.jsonl, .json or .parquet in the folder"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=range(len(FILES)))
def test_a_bad_file_is_one_line(capsys, place, tmp_path, name, content, message):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    data = file if file.parent == tmp_path else file.parent
    assert message in line(capsys, place, words(place, "sft", data=data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("nowhere.jsonl", "no such file or folder, got nowhere.jsonl"),
        ("/dev/null", "no such file or folder, got /dev/null"),
        ("a\0b.jsonl", "no such file or folder, got a"),
        ("", "needs a file, a folder or a data set on the hub, got ''"),
    ],
)
def test_missing_data_is_one_line(capsys, place, data, message):
    assert message in line(capsys, place, words(place, "sft", data=data))


@pytest.mark.parametrize("recipe", ["grpo", "sft", "dpo", "distill"])
def test_messages_without_a_chat_template_are_refused(capsys, place, tmp_path, recipe):
    data = tiny.rows(tmp_path / "rows.jsonl", [{**REPLY, "messages": [USER]}])
    said = line(capsys, place, words(place, recipe, data=data, model=place / "plain", teacher=place / "plain"))
    assert said.startswith(f"{data}:1: messages: the tokenizer has no chat template")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("reward", "raises.py:reward", "raises.py: its import ends with RuntimeError: no way (raises.py:1)"),
        ("reward", "exits.py:reward", "exits.py: its import ends with SystemExit: 3 (exits.py:2)"),
        ("reward", "nowhere.py:reward", "nowhere.py: there is no such file"),
        ("reward", "short.py:reward", "must be callable as reward(text, row), got (text): too many positional"),
        ("reward", "long.py:reward", "must be callable as reward(text, row), got (text, row, more): missing"),
        ("reward", "number.py:reward", "number.py:reward: must be a function, got int"),
        ("workflow", "exits.py:workflow", "exits.py: its import ends with SystemExit: 3"),
        ("workflow", "reward.py:reward", "must be a function that takes `generate`, or an agent"),
        ("row", "raises.py:row", "raises.py: its import ends with RuntimeError: no way"),
        ("row", "rows.py:key", "good.jsonl:1: --row {place}/rows.py:key: KeyError: 'question' (rows.py:1)"),
        ("row", "rows.py:number", "must return a row, which is a dict, or None, got int"),
        ("row", "rows.py:leaves", "SystemExit: 4 (rows.py:3)"),
        ("row", "rows.py:none", "all 3 rows are left out, by {place}/rows.py:none; at least one is needed"),
    ],
)
def test_functions_that_do_not_work_are_one_line(capsys, place, option, name, message):
    said = line(capsys, place, words(place, "grpo", **{option: f"{place}/{name}"}))
    assert message.format(place=place) in said


@pytest.mark.parametrize("recipe", ["grpo", "sft", "rewardmodel", "distill"])
def test_a_model_without_weights_may_start_from_new_ones(capsys, place, tmp_path, recipe):
    shutil.copytree(place / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    said = line(capsys, place, words(place, recipe, model=tmp_path / "model"))
    assert said.startswith(f"--model {tmp_path}/model: needs weights") and "new ones with --init random" in said


OPTIONS = {
    "sft": [
        ("--optim.lr nan", "--optim.lr must be at least 0 and finite, got nan"),
        ("--optim.lr inf", "--optim.lr must be at least 0 and finite, got inf"),
        ("--optim.clip nan", "--optim.clip must be at least 0 and finite, got nan"),
        ("--optim.warmup -1", "--optim.warmup must be at least 0 and finite, got -1"),
        ("--optim.steps 9", "--optim.steps is the length of a cosine or linear --optim.schedule, got 9 with"),
        ("--track.prometheus-host ::1", "--track.prometheus-host needs --track.prometheus, a port, got ::1 alone"),
        ("--optim.steps -1", "--optim.steps must be at least 0 and finite, got -1"),
        ("--optim.schedule cosine --optim.warmup 9", "--optim.warmup must be below the 1 optimiser steps of a cosine"),
        ("--optim.b1 2", "--optim.b1 must be at least 0 and below 1, got 2.0"),
        ("--optim.eps -1", "--optim.eps must be at least 0 and finite, got -1.0"),
        ("--lora.rank -1", "--lora.rank must be at least 0 and alpha above 0 and finite, got -1"),
        ("--lora.rank 2 --lora.alpha inf", "alpha above 0 and finite, got 2 and inf"),
        ("--balance.load inf", "--balance.load must be at least 0 and finite, got inf"),
        ("--balance.bias nan", "--balance.bias must be at least 0 and finite, got nan"),
        ("--balance.bias 0.1", "--balance.bias needs a model that chooses experts with a bias, such as"),
        ("--balance.bias 0.1 --lora.rank 2", "--balance.bias 0.1 would move a weight under the adapters, which stay"),
        ("--run.head-chunk 0", "--run.head-chunk must be at least 1, or None, got 0"),
        ("--steps -5", "--steps must be at least 0, got -5"),
        ("--seed -1", "--seed must be at least 0, got -1"),
        (f"--seed {1 << 63}", f"--seed must be at most {(1 << 63) - 1}, got {1 << 63}"),
        ("--batch 0", "--batch must be at least 1, got 0"),
        ("--rows 0", "--rows must be at least 1, got 0"),
        (f"--batch {10**10}", f"--batch {10**10} must fit into {{memory}} GB of memory, got at least 200,000 GB"),
        (f"--rows {10**10}", f"--rows {10**10} of --length 32 must fit into {{memory}} GB of memory, got at least"),
        ("--length 1", "--length must be at least 2, got 1"),
        ("--length 65", "--length must be at most 64, the context of"),
        ("--limit -1", "--limit must be at least 0, got -1"),
        ("--save-every -1", "--save-every must be at least 0, got -1"),
        ("--save-minutes -1", "--save-minutes must be at least 0 and finite, got -1.0"),
        ("--evaluate-every -1", "--evaluate-every must be at least 0, got -1"),
        ("--evaluate-every 2", "--evaluate-every 2 needs --heldout, rows to evaluate on, got none"),
        ("--out {place}/good.jsonl", "--out must be a directory, got"),
        ("--out {place}/good.jsonl/a/b", "--out must be a directory, got"),
        ("--out {place}/a[1]/run", "--out must have no [ in its path, which Orbax takes for a pattern, got"),
        ("--out /proc/run", "--out must be a directory that can be written to, got /proc/run"),
    ],
    "dpo": [
        ("--objective.score odds", 'dpo: --objective.reference must be False with score "odds", got True'),
        ("--objective.beta nan", "--objective.beta must be at least 0, got nan"),
        ("--balance.bias 0.1", "--balance.bias needs a model that chooses experts with a bias, such as"),
        ("--steps -1", "--steps must be at least 0, got -1"),
        ("--evaluate-every 2", "--evaluate-every 2 needs --heldout"),
    ],
    "distill": [("--objective.beta 0.3", "--objective.beta must be 0.5 unless divergence is js, got 0.3")],
    "grpo": [
        ("--optim.lr nan", "--optim.lr must be at least 0 and finite, got nan"),
        ("--objective.clip-low nan", "--objective.clip-low must be between 0 and 1, got nan"),
        ("--objective.shaping.scale nan", "--objective.shaping.scale must be a number, got nan"),
        ("--steps -1", "--steps must be at least 0, got -1"),
        ("--seed -1", "--seed must be at least 0, got -1"),
        ("--eta -1", "--eta must be at least 0, got -1"),
        ("--groups 0", "--groups must be at least 1, got 0"),
        ("--group-size 0", "--group-size must be at least 1, got 0"),
        (f"--groups {10**10}", f"--groups {10**10} of --group-size 2 must fit into {{memory}} GB of memory"),
        (f"--rows {10**10}", f"--rows {10**10} of --length 32 must fit into {{memory}} GB of memory"),
        (f"--reward-workers {10**8}", f"--reward-workers {10**8} must fit into {{memory}} GB of memory"),
        (f"--serve.count {10**8}", f"--serve.count {10**8} must fit into {{memory}} GB of memory"),
        (f"--heldout-samples {10**10}", f"--heldout-samples {10**10} must fit into {{memory}} GB of memory"),
        ("--max-concurrent 0", "--max-concurrent must be at least 1, got 0"),
        ("--max-prompt -1", "--max-prompt must be at least 0, got -1"),
        ("--sampling.max-new-tokens 0", "--sampling.max-new-tokens must be at least 1, got 0"),
        ("--sampling.temperature 0", "--sampling.temperature must be above 0, got 0"),
        ("--sampling.temperature -1", "--sampling.temperature must be at least 0 and finite, got -1.0"),
        ("--sampling.top-p 2", "--sampling.top-p must be above 0 and at most 1, got 2.0"),
        ("--sampling.top-k 5", "--sampling.top-k must be -1: training needs samples from the full distribution, got 5"),
        ("--sampling.sampling-mask", "--sampling.top-k must be at least 1 with --sampling.sampling-mask"),
        (
            "--sampling.sampling-mask --sampling.top-k 5 --distill-coef 1 --teacher {place}/model",
            "--sampling.sampling-mask trains on a part of the vocabulary, where --teachers, --self-distillation",
        ),
        (
            "--sampling.top-logprobs 8",
            "--sampling.top-logprobs, such as 128, and --objective.score-centering, which reads them, are needed "
            "together, got 8 and false",
        ),
        ("--sampling.top-logprobs 8 --sampling.top-k 5 --sampling.sampling-mask", "top-logprobs must be 0 with"),
        (
            "--sampling.top-logprobs 65 --objective.score-centering --objective.correction.proximal behaviour --eta 0",
            "--sampling.top-logprobs must be at most 32, the tokens of the model's vocabulary, got 65",
        ),
        (
            "--sampling.sampling-mask --sampling.top-k 2000",
            "--sampling.top-k must be at most 1024, the most that servers started here report in a mask, got 2000",
        ),
        (
            "--objective.advantage.mean optimal_value --objective.advantage.std none",
            "--objective.advantage.mean optimal_value: rows must have 'reference_rewards', a list of the rewards that",
        ),
        ("--episode-seats 64", "--episode-seats must be numbers from 0 to 63, got (64,)"),
        ("--episode-seats 1 1", "--episode-seats must be at least two seats, to compare, or none, got (1, 1)"),
        ("--sampling.stop-token-ids -1", "--sampling.stop-token-ids must be token ids, got (-1,)"),
        ("--reward-workers 0", "--reward-workers must be at least 1, got 0"),
        ("--reward-timeout-s 0", "--reward-timeout-s must be above 0 and finite, got 0.0"),
        ("--reward-timeout-s inf", "--reward-timeout-s must be above 0 and finite, got inf"),
        ("--balance.bias 0.1", "--balance.bias needs a model that chooses experts with a bias, such as"),
        ("--balance.bias 0.1 --lora.rank 2", "--balance.bias 0.1 would move a weight under the adapters, which stay"),
        ("--critic.warmup -1", "--critic.warmup must be at least 0, got -1"),
        ("--critic.warmup 3 --critic.optim.lr 1", "GRPO has none, got --critic.warmup 3, --critic.optim.lr 1.0; use"),
        ("--distill.temperature 0.7", "needs --distill-coef above 0 and a --teacher to learn from, got --distill.temp"),
        ("--distill.top-k 5 --teacher {place}/model --objective.advantage.teacher 1", "got --distill.top-k 5 without"),
        ("--self-distillation", "name one of --teacher, --teachers and --self-distillation where"),
        (
            "--data {place}/told.jsonl --self-distillation --distill-coef 1",
            "what a teacher reads must leave room for a completion within 32 tokens, got ",
        ),
        ("--objective.kl.horizon 3", "--objective.kl.horizon must be 10 without a target to adapt to, got 3"),
        ("--curriculum.target 0.4", "--curriculum.target must be left out with order shuffled, which has none"),
        ("--curriculum.order easy_first --curriculum.field a --curriculum.memory 0.1", "--curriculum.memory must be"),
        ("--agent.style llama --agent.timeout-s 3", "is not, got --agent.style llama, --agent.timeout-s 3.0;"),
        ("--reference-mix 0.5", "--reference-mix needs --reference-every, batches between updates, got 0.5 alone"),
        ("--objective.tau-pos 3", "grpo: --objective.*: the surrogate clip does not use --objective.tau-pos, got 3.0"),
        ("--agent.discount 0.5", "grpo: --agent.discount needs --agent.rows interactions, got 0.5"),
        ("--critic.objective.clip -1", "grpo: --critic.objective.clip must be at least 0, got -1.0"),
        ("--optim.schedule linear", "--optim.warmup must be below the 1 optimiser steps of a linear schedule, got 10"),
        ("--group-size 1", "--group-size must be at least 2 with --objective.advantage.mean group: a completion that"),
        ("--group-size 1 --groups 1 --objective.advantage.mean batch --objective.advantage.std batch",
         "--group-size must be at least 2 with --objective.advantage.mean batch"),
        ("--save-every -1", "--save-every must be at least 0, got -1"),
        ("--save-minutes inf", "--save-minutes must be at least 0 and finite, got inf"),
        ("--completion-timeout-s 0", "--completion-timeout-s must be above 0, got 0.0"),
        ("--server-timeout-s inf", "--server-timeout-s must be above 0 and finite, got inf"),
        ("--samples-every -1", "--samples-every must be at least 0, got -1"),
        ("--evaluate-every 2", "--evaluate-every 2 needs --heldout, rows to evaluate on, got none"),
        ("--length 65", "--length must be at most 64, the context of"),
        ("--serve.slots -1", "--serve.slots must be at least 1, or 0 = by device, got -1"),
        ("--serve.draft 65", "--serve.draft must be at most the context, 32 tokens, got 65; lower it"),
        ("--serve.context 1", "--serve.context must be at least 2, or 0 = as long as needed, got 1"),
        ("--serve.context 8", "a prompt must leave room for a completion within 8 tokens, got 11"),
        (
            "--sampling.max-new-tokens 600 --serve.context 64",
            "prompt and completion must fit in --serve.context 64 (at most the model's), got 11 tokens and "
            "--sampling.max-new-tokens 600; lower it",
        ),
        ("--serve.dtype float8", "--serve.dtype must be one of auto, float32, bfloat16, float16, got 'float8'"),
        ("--servers http://a --serve.slots 4", "--serve.* are for servers that are started here, got --serve.slots 4"),
        ("--servers a", "--servers: must be an address such as http://127.0.0.1:30000, got 'a'"),
        ("--servers http://a:99999", "--servers: must be an address such as"),
        ("--servers http://a http://a", "--servers must differ, got http://a http://a"),
        ("--published {place}/good.jsonl", "--published must be a directory, got"),
        ("--workflow-options {{\"a\":1}}", "--workflow-options: areax.rollout.workflows:single_turn takes"),
        ("--heldout {place}/nowhere.jsonl", "no such file or folder"),
    ],
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("recipe", "more", "message"), [(recipe, *case) for recipe, cases in OPTIONS.items() for case in cases]
)
def test_an_option_that_cannot_work_is_one_line(capsys, place, recipe, more, message):
    """With the option's name, and not where its dataclass is."""
    said = line(capsys, place, words(place, recipe, *more.format(place=place).split()))
    assert message.replace("{memory}", f"{memory.of_machine() / 1e9:.0f}") in said and not re.search(
        r"Options\(|datasets\.|training\.|\b[A-Z]\w+: (?!cannot)", said
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--samples 0", "--samples must be at least 1, got 0"),
        (f"--samples {10**10}", f"--samples {10**10} must fit into"),
        (f"--reward-workers {10**8}", f"--reward-workers {10**8} must fit into"),
        ("--seed -1", "--seed must be at least 0, got -1"),
        ("--max-concurrent 0", "--max-concurrent must be at least 1, got 0"),
        ("--sampling.temperature nan", "--sampling.temperature must be at least 0 and finite, got nan"),
        ("--servers http://a --serve.context 64", "--serve.* are for servers that are started here"),
        ("--serve.inside", "--serve.inside is for a trainer's process"),
        ("--serve.context 8", "a prompt must leave room for a completion within 8 tokens"),
        ("--sampling.max-new-tokens 54", "prompt and completion must fit in --serve.context 64 (at most the model's)"),
        ("--samples 2", "--samples 2 needs --sampling.temperature above 0, got 0: greedy completions are equal"),
    ],
)
def test_an_evaluation_is_checked_alike(capsys, place, more, message):
    arguments = ["eval", "--model", place / "model", "--data", place / "good.jsonl"]
    arguments += ["--sampling.max-new-tokens", 8, *more.split()]
    assert message in line(capsys, place, [*arguments, "--reward", f"{place}/reward.py:reward"])


def test_bad_rows_may_be_left_out_and_are_counted(capsys, tmp_path):
    """Lines, records and rows alike, in a demonstration's or an episode's data."""
    (tmp_path / "own.py").write_text(
        "def row(record):\n    if record.get('prompt') == '3':\n        raise KeyError('three')\n    return record"
    )
    lines = [LINE.decode(), "{half", "[1]", '{"prompt": "3"}', '{"prompt": 4}', '{"prompt": "\\ud800"}', LINE.decode()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    source, row = str(tmp_path / "rows.jsonl"), f"{tmp_path}/own.py:row"
    check = rows.prompts(tokenizer.byte_level(), "areax.rollout.workflows:single_turn")
    assert rows.read(source, row, check=check, bad="skip") == [GOOD, GOOD]
    assert capsys.readouterr().err == (
        f"5 of 7 rows are left out, bad (--bad-rows skip), the first: {source}:2: not JSON: Expecting property name "
        "enclosed in double quotes, at column 2\n"
    )
    assert rows.read(source, row, check=check, bad="skip", quiet=True) == [GOOD, GOOD]
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="rows.jsonl:2: not JSON"):
        rows.read(source, row, check=check)
    (tmp_path / "rows.jsonl").write_text("{half\n[1]\n")
    with pytest.raises(
        ValueError, match="all 2 rows are left out, bad .*, the first: .*:1: not JSON: .*; at least one"
    ):
        rows.read(source, bad="skip")


KNOWN = {  # records without --row -> (what makes rows of them, a field of the row)
    "gsm8k": ({"question": "1+1", "answer": "It is 2.\n#### 2"}, "areax.rollout.tasks.gsm8k:row", ("answer", "2")),
    "pair": ({"query": "1+1", "response": "2"}, "areax.adapters.data.formats:prompt_answer", ("completion", "2")),
    "row": ({"prompt": "1+1", "completion": "2"}, "", ("prompt", "1+1")),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_formats_need_no_row_function_and_are_said(capsys, tmp_path, name):
    record, function, (field, value) = KNOWN[name]
    source = str(tiny.rows(tmp_path / "rows.jsonl", [record] * 3))
    check = rows.prompts(tokenizer.byte_level(), "areax.rollout.workflows:single_turn")
    made = rows.read(source, check=check, recognise=True)
    assert len(made) == 3 and made[0][field] == value and made[0]["prompt"]
    said = f"{source}: rows are made of the fields {sorted(record)} by --row {function}\n" if function else ""
    assert capsys.readouterr().err == said
    assert rows.read(source, check=check, recognise=True, quiet=True) == made and not capsys.readouterr().err
    if function:
        assert rows.read(source, function, check=check) == made
        assert rows.read(source) == [record] * 3  # for workflows that read their rows as they like
        assert capsys.readouterr().err.endswith(f"records as they are; --row {function} makes prompts of them\n")


@pytest.mark.parametrize("recipe", ["grpo", "sft", "dpo", "distill"])
def test_records_of_no_known_format_name_their_fields_and_the_way_out(capsys, place, tmp_path, recipe):
    data = tiny.rows(tmp_path / "rows.jsonl", [{"text": "1+1", "label": 2}])
    said = line(capsys, place, words(place, recipe, data=data))
    assert said.startswith(f"{data}:1: a row needs either 'prompt' or 'messages', got the fields ['label', 'text']; ")
    assert "question/answer, " in said and said.endswith("and --row FILE.py:FUNCTION converts other records\n")


def test_rows_of_other_workflows_are_theirs(place):
    tokens = tokenizer.load(place / "model")
    environment = "areax.rollout.workflows.environments:play"
    assert rows.prompts(tokens, environment)({"level": 3}) is None
    with pytest.raises(ValueError, match="needs either 'prompt' or 'messages'"):
        rows.prompts(tokens, environment, most=9)({"level": 3})


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "train grpo --model {place}/model --reward {place}/exits.py:r --data {place}/good.jsonl --length 32",
            "SystemExit: 3",
        ),
        (
            "eval --model {place}/model --reward {place}/reward.py:reward --data owner/name",
            "the hub, http://127.0.0.1:9,",
        ),
        ("eval --model owner/name --reward {place}/reward.py:reward --data {place}/good.jsonl", "does not answer"),
    ],
)
def test_the_command_itself_is_as_quick(place, command, message):
    """Without HF_HUB_OFFLINE, at an address where no hub answers: its clients alone would try for most of a minute."""
    environ = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    arguments = [sys.executable, "-m", "areax", *command.format(place=place).split()]
    done = subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=40, cwd=place)
    [line] = [line for line in done.stderr.splitlines() if ": importing libraries" not in line]
    assert done.returncode == 2 and message in line
    assert not done.stdout and not (place / "runs").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--rows train", "--rows must be heldout or dev, got train"),
        ("--seed -1", "--seed must be at least 0, got -1"),
        ("--eta -1", "--eta must be at least 0, got -1"),
        ("--sft-steps -1", "--sft-steps must be at least 0, got -1"),
        ("--error-rate 2", "--error-rate must be from 0 to 1, got 2.0"),
        ("--sft-lr nan", "--sft-lr must be a number, got nan"),
    ],
)
def test_the_demo_is_checked_alike(capsys, place, more, message):
    assert message in line(capsys, place, ["demo", "--out", place / "out", *more.split()])


OPTIONS = [  # of config.json, and what is wrong with it
    *[(name, value, "must be a whole number above 0") for name, value in (
        ("hidden_size", -1), ("hidden_size", "32"), ("hidden_size", None), ("num_attention_heads", 0),
        ("vocab_size", True), ("vocab_size", 10**30), ("max_position_embeddings", 0),
        ("max_position_embeddings", None),
    )],
    *[("num_hidden_layers", value, "must be a whole number of 1 to 10,000") for value in (2.5, None, 10**8)],
    *[(name, value, "must be a finite number") for name, value in (
        ("rms_norm_eps", "x"), ("rms_norm_eps", None), ("rms_norm_eps", float("inf")), ("rms_norm_eps", 10**400),
        ("initializer_range", None), ("initializer_range", float("nan")),
    )],
    *[(name, 1.5, "must be true, false or null") for name in ("tie_word_embeddings", "attention_bias")],
    ("model_type", [], "must be one of deepseek_v2, "),
    ("architectures", 3, "must be a list of texts, or null"),
    ("layer_types", [[]], "must be a list of texts, or null"),
    *[("eos_token_id", x, "must be a token's id, a list of them, or null") for x in ({}, [[1]], "x", -1, 2**39)],
    *[("dtype", x, "must be one of float32, bfloat16, float16, float64, or null") for x in ("int32", 7, "float8")],
    ("text_config", 5, "must be options, or null"),
    ("num_key_value_heads", 3, "num_attention_heads must be a multiple of num_key_value_heads, got 2 and 3"),
    *[("head_dim", value, f"head_dim must be even, above 0 and at most 10000, got {value}") for value in (15, 2**31)],
    ("pad_token_id", "x", "must be a whole number or null"),
    ("pad_token_id", 32, "pad_token_id must be below vocab_size 32, or null, got 32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), OPTIONS)
def test_a_model_with_an_impossible_option_is_one_line(capsys, place, tmp_path, name, value, message):
    source = json.loads((place / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**source, name: value}))
    said = line(capsys, place, ["plan", "sft", "--model", tmp_path, "--length", "32"])
    assert said.startswith(f"{tmp_path}/config.json: ") and name in said and message in said


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": ["linear"]}, "longrope or proportional, got ['linear'], which is not implemented"),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]},
         "short_factor must be 8 numbers, half of the 16 entries of a head that turn, got 1"),
        ({"rope_type": "linear", "factor": 10**400}, "factor of rope_type linear must be a number above 0"),
    ],
)  # fmt: skip
def test_impossible_rope_scaling_is_one_line(capsys, place, tmp_path, scaling, message):
    source = json.loads((place / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**source, "rope_scaling": scaling, "rope_parameters": None}))
    assert message in line(capsys, place, ["plan", "sft", "--model", tmp_path, "--length", "32"])


def test_an_impossible_stop_token_is_one_line(capsys, place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [[2]]}')
    said = line(capsys, place, ["convert", tmp_path / "model", place / "out"])
    assert f"{tmp_path}/model/generation_config.json: eos_token_id must be a token's id" in said


@pytest.mark.parametrize("recipe", ["grpo", "sft", "dpo", "distill"])
def test_the_tokenizer_of_another_model_is_one_line(capsys, place, tmp_path, recipe):
    """Its ids beyond the vocabulary would be clipped to the last token."""
    shutil.copytree(place / "model", tmp_path / "model")
    tokenizer.save(tokenizer.byte_level(), tmp_path / "model")
    said = line(capsys, place, words(place, recipe, model=tmp_path / "model", teacher=tmp_path / "model"))
    assert "good.jsonl:1: token ids must be below 32, the model's vocab_size, got " in said
