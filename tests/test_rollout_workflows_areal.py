"""Workflows written for AReaL give the same samples as ours."""

import asyncio
import math
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from test_rollout_workflows_multi_turn import SAMPLING, TOKENS, learnt, policy

from areax.rollout import object_path, rewards
from areax.rollout.rewards import Score
from areax.rollout.types import Completion
from areax.rollout.workflows import areal, resolve

HERE = __file__.replace("test_rollout_workflows_areal.py", "areal_workflows.py")
ROW = {"messages": [{"role": "user", "content": "2 + 2"}], "answer": "4"}


async def right(text, row, **_):
    return int(text == row["answer"])


def play(name, texts, **options):
    generate, heard = policy(*texts)

    async def main():
        how = dict(tokenizer=TOKENS, reward=right, sampling=SAMPLING, options=options)
        async with resolve.bind(f"{HERE}:{name}", **how) as workflow:
            return await workflow(generate, ROW)

    return asyncio.run(main()), heard


def test_a_single_turn_workflow_with_several_samples():
    samples, heard = play("SingleTurn", ["4", "no idea"], n_samples=2)
    assert [s.reward for s in samples] == [1.0, 0.0] and heard[0] == heard[1]
    assert [learnt(s) for s in samples] == ["4<|im_end|>", "no idea<|im_end|>"]
    for s in samples:
        assert set(s.version[s.mask]) == {3} and set(s.logp[s.mask]) == {-0.5} and s.temperature == 1.0
        assert set(s.version[~s.mask]) == {-1} and set(s.logp[~s.mask]) == {0.0}


def test_a_workflow_that_retries_over_several_turns():
    [s], heard = play("Retry", ["5", "4"])
    assert s.reward == 0.5 and learnt(s) == "5<|im_end|>4<|im_end|>"
    assert heard[1].startswith(heard[0] + "5<|im_end|>") and "wrong, again" in heard[1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"versions": None}, "must have input_ids.* but lacks versions"),
        ({"rewards": [1.0, 2.0]}, "rewards must be one per row, got 2 for 1 rows"),
        ({"logprobs": [[0.0]]}, r"logprobs must be \[rows, T\] as input_ids \(1, 2\), got \(1, 1\)"),
    ],
)
def test_incomplete_results_are_refused(changes, message):
    whole = {
        "input_ids": [[1, 2]],
        "loss_mask": [[0, 1]],
        "logprobs": [[0, -1.0]],
        "versions": [[-1, 0]],
        "rewards": [1],
    }
    result = {name: value for name, value in (whole | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        areal.samples(result, 1.0, ROW)


def test_padded_rows_are_trimmed():
    row = lambda n: {name: np.full((1, n), n) for name in ("input_ids", "loss_mask", "logprobs", "versions")} | {
        "attention_mask": np.ones((1, n), bool), "rewards": np.array([n]),
    }  # fmt: skip
    samples = areal.samples(areal.concat_padded_tensors([row(2), row(5)]), 1.0, ROW)
    assert [s.tokens.tolist() for s in samples] == [[2, 2], [5] * 5] and [s.reward for s in samples] == [2, 5]


def test_requests_are_checked():
    generate, _ = policy("x")
    engine = areal.InferenceEngine(generate)
    for changes in ({"n_samples": 2}, {"max_tokens": 3}):
        how = areal.GenerationHyperparameters(**changes)
        with pytest.raises(ValueError, match="n_samples must be 1 and leave room"):
            asyncio.run(engine.agenerate(areal.ModelRequest(input_ids=[1, 2, 3], gconfig=how)))


# -- the contributor guides --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guides(tmp_path_factory):
    """The folder of the guides' code with its imports replaced by the command in docs/train-an-agent.md."""
    tests, folder = Path(__file__).parent, tmp_path_factory.mktemp("areal")
    [program] = re.findall(r"sed -i '(.*?)'", (tests.parent / "docs" / "train-an-agent.md").read_text())
    for name in ("areal_skills", "areal_skill_rewards"):
        with open(folder / f"{name.removeprefix('areal_')}.py", "w") as file:
            subprocess.run(["sed", program, tests / f"{name}.py"], stdout=file, check=True)
    return folder


@pytest.fixture(scope="module")
def skills(guides):
    return guides / "skills.py"


@pytest.fixture(scope="module")
def own(guides):
    return guides / "skill_rewards.py"


def run_skill(path, name, texts, row, *, reward=right, sampling=SAMPLING, **options):
    generate, heard = policy(*texts)

    async def main():
        how = dict(tokenizer=TOKENS, reward=reward, sampling=sampling, options=options)
        async with resolve.bind(f"{path}:{name}", **how) as workflow:
            return [await workflow(generate, row) for _ in texts]

    return asyncio.run(main()), heard


@pytest.mark.parametrize("row", [ROW, {"prompt": "2 + 2", "answer": "4"}])
def test_the_guides_workflow_runs_with_only_its_imports_changed(skills, row):
    async def exact(text, row, *, prompt, prompt_ids, completion_ids):
        assert TOKENS.decode(prompt_ids) == prompt and TOKENS.decode(completion_ids) == text
        return float(text == f"{row['answer']}<|im_end|>")

    episodes, heard = run_skill(skills, "OneAnswer", ["4", "5"], row, reward=exact)
    for [s], text, reward in zip(episodes, ["4", "5"], [1.0, 0.0], strict=True):
        assert s.reward == reward and learnt(s) == f"{text}<|im_end|>" == s.info["text"] and s.finish == "stop"
        assert TOKENS.decode(s.tokens[~s.mask].tolist()) == heard[0] and "2 + 2" in heard[0]
        assert set(s.version[s.mask]) == {3} and set(s.logp[s.mask]) == {-0.5} and s.temperature == 1.0
        assert set(s.version[~s.mask]) == {-1} and set(s.logp[~s.mask]) == {0.0}


DONE = [([1, 2], Completion([3], [-0.25], [7], "stop")), ([1, 2], Completion([3], [-0.5], [8], "stop"))]
ONE = {"input_ids": [1, 2], "output_ids": [3], "reward": 0.5}


def test_each_prompt_and_answer_takes_a_request_of_its_own():
    two = {"input_ids": np.array([[1, 2], [1, 2]]), "output_ids": np.array([[3], [3]]), "rewards": np.array([0.0, 1.0])}
    first, second = areal.samples(two, 1.0, ROW, DONE)
    assert first.tokens.tolist() == [1, 2, 3] and first.mask.tolist() == [False, False, True]
    assert [s.logp.tolist() for s in (first, second)] == [[0, 0, -0.25], [0, 0, -0.5]]
    assert [s.version.tolist() for s in (first, second)] == [[-1, -1, 7], [-1, -1, 8]]
    assert [s.reward for s in (first, second)] == [0, 1]
    [one] = areal.samples(ONE, 1.0, ROW, DONE)
    assert one.version.tolist() == [-1, -1, 7] and one.reward == 0.5


def test_a_row_without_a_batch_axis_is_one_row():
    one = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [0, 0, -1.0], "versions": [-1, -1, 4]}
    [s] = areal.samples(one | {"reward": np.float32(1)}, 1.0, ROW)
    assert s.tokens.tolist() == [1, 2, 3] and s.version.tolist() == [-1, -1, 4] and s.reward == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"output_ids": [3, 4]}, "must be the tokens of one of its requests, .* got 2 and 2 tokens that are not"),
        ({"input_ids": [1, 2, 3]}, "got 3 and 1 tokens that are not"),
        ({"input_ids": [[1, 2]] * 3, "output_ids": [[3]] * 3}, "got 2 and 1 tokens that are not"),
        ({"input_ids": [[1, 2]], "output_ids": [[3], [3]]}, "one answer per prompt in input_ids, got 2 for 1"),
        ({"reward": None}, "or input_ids, output_ids and rewards, but lacks rewards"),
        ({"reward": [1.0, 2.0]}, "one per row, got 2 for 1 rows"),
        ({"loss_mask": [0, 0, 1]}, "but lacks logprobs, versions"),
    ],
)
def test_prompts_and_answers_of_no_request_are_refused(changes, message):
    result = {name: value for name, value in (ONE | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        areal.samples(result, 1.0, ROW, DONE)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name, scores",
    [
        ("boxed", {r"so \boxed{4}": 1.0, "4": 1.0, "5": 0.0}),
        ("in_brackets", {"it is [2 x] or [4]": 1.0, "[ 4 ]": 1.0, "4": 0.0}),
        ("counted", {"I count [4]": 1.0, "[four]": 0.0}),
    ],
)
def test_the_guides_rewards_run_as_they_are(own, name, scores):
    async def main():
        async with rewards.pool(f"{own}:{name}", workers=1) as reward:
            given = dict(prompt="2 + 2", prompt_ids=[1], completion_ids=[2])
            return [await reward(text, {**ROW, "prompt": "2 + 2"}, **given) for text in scores]

    assert asyncio.run(main()) == [Score(value) for value in scores.values()]


@pytest.fixture(scope="module")
def functions(own):
    return object_path.module(str(own))


def test_a_workflow_shares_a_session_and_has_a_reward_of_its_own(skills, own):
    async def main():
        async def page(request):
            return web.Response(text="2 + 2")

        app = web.Application()
        app.router.add_get("/", page)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        row = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/", "answer": "4", "completions": "taken"}
        generate, heard = policy("4", "5")
        how = dict(tokenizer=TOKENS, reward=right, sampling=SAMPLING, options={"own": f"{own}:two_arguments"})
        async with resolve.bind(f"{skills}:WithAPage", **how) as workflow:
            samples = [await workflow(generate, row) for _ in range(2)]
        await runner.cleanup()
        return samples, heard

    samples, heard = asyncio.run(main())
    assert [s.reward for [s] in samples] == [1.0, 0.0] and heard == ["2 + 2"] * 2
    assert [learnt(s) for [s] in samples] == ["4<|im_end|>", "5<|im_end|>"]


def test_clients_that_nothing_would_close_are_refused():
    context = areal.workflow_context
    with pytest.raises(ValueError, match="must be called in an episode"):
        asyncio.run(context.get_aiohttp_session())
    with pytest.raises(ValueError, match="must be get_aiohttp_session"):
        asyncio.run(context.get_httpx_client())


def test_the_guides_agent_runs_as_it_is(skills, own):
    episodes, _ = run_skill(skills, "Agent", ["4", r"\boxed{5}"], ROW, own=f"{own}:boxed")
    assert [[s.reward for s in samples] for samples in episodes] == [[1.0], [0.0]]


def test_an_argument_that_no_option_gives_is_refused(skills):
    with pytest.raises(ValueError, match="skills.py:Agent needs own, got none; give it in --workflow-options"):
        run_skill(skills, "Agent", ["4"], ROW)


@pytest.mark.slow
def test_a_wrapped_reward_runs_in_a_process_and_a_hung_one_ends_with_it(functions):
    async def main():
        hung = areal.AsyncRewardWrapper(functions.hangs, timeout_seconds=0.2, max_workers=1, max_retries=0)
        async with areal.workflow_context.opened() as shared:
            play = areal.workflow_context.within(shared, lambda generate, row: hung("", row, [], []))
            pids = [await play(None, "pid") for _ in range(2)]
            late = await play(None, "hang")
            pids.append(await play(None, "pid"))
        assert math.isnan(late) and pids[0] == pids[1] != pids[2]  # the worker that hung is gone
        for pid in pids[1:]:  # another process, which ended with the workflow at the latest
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)

    asyncio.run(main())


def test_wrapped_coroutines_have_a_timeout_and_the_runs_reward_has_its_own():
    async def slow(prompt, completions, **data):
        await asyncio.sleep(0.1)
        return data["n"]

    async def reward(text, row, **context):
        return await slow(None, text, n=row["n"])

    for wrapped, late in ((slow, True), (areal.RunReward(reward), False)):
        value = asyncio.run(areal.AsyncRewardWrapper(wrapped, timeout_seconds=0.01)("", "", prompt="taken", n=3))
        assert math.isnan(value) if late else value == 3
    assert asyncio.run(areal.AsyncRewardWrapper(slow)("", "", n=3)) == 3


def test_a_reward_that_workers_cannot_import_is_refused():
    for function in (lambda *_, **__: 1.0, policy("x")[0].__call__):
        with pytest.raises(ValueError, match="must be a function at the top level of a module or file"):
            areal.AsyncRewardWrapper(function)


@pytest.mark.slow
def test_a_wrapped_reward_that_never_works_ends_the_run(functions):
    async def main():
        wrapped = areal.AsyncRewardWrapper(functions.raises, max_retries=0)
        async with areal.workflow_context.opened() as shared:
            play = areal.workflow_context.within(shared, lambda generate, row: wrapped("", "", **row))
            return await asyncio.gather(*(play(None, ROW) for _ in range(9)), return_exceptions=True)

    ends = [made for made in asyncio.run(main()) if isinstance(made, Exception)]  # which calls come last may differ
    assert ends and re.search(
        r"skill_rewards.py:raises: the first 8 calls all failed, the last: KeyError: 'answer' \(skill_rewards.py:",
        str(ends[0]),
    )


@pytest.mark.parametrize(
    "imports, message",
    [
        (
            "from areal.api.workflow_api import RolloutWorkflow",
            "No module named 'areal'.*; import AReaL's names from areax",
        ),
        (
            "from areax.rollout.workflows.areal import logging, stats_tracker",
            "AReaL's stats_tracker is not here: a reward that returns a dict of named parts .*; take it out",
        ),
        ("from areax.rollout.workflows.areal import nonsense", "cannot import name 'nonsense'"),
    ],
)
def test_imports_that_are_not_here_say_what_to_do(tmp_path, imports, message):
    (tmp_path / "mine.py").write_text(f"{imports}\n\n\nclass Mine(RolloutWorkflow):\n    pass\n")
    with pytest.raises(ValueError, match=message):
        resolve.check(f"{tmp_path}/mine.py:Mine", {})


def test_workflows_with_images_are_refused():
    with pytest.raises(ValueError, match="workflows with a processor do not run here.*single_turn"):
        play("Seeing", ["4"])
    episode = areal.workflow(object(), TOKENS)
    with pytest.raises(ValueError, match="read text alone here, got a row with images"):
        asyncio.run(episode(policy()[0], {"prompt": "a", "image": b"", "images": [b"x"]}))
