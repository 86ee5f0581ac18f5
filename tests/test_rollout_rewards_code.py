"""The code reward: programs are tested in a real sandbox."""

import asyncio

import pytest

from areax.rollout import rewards
from areax.rollout.rewards import code

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
DOUBLE = "for line in open(0):\n    print(2 * int(line))\n"
PAIRS = [{"input": "1\n2\n", "output": "2\n4\n"}, {"input": "21", "output": "42"}]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "text, tests, score",
    [
        (ADD, ASSERTS, 1),
        (ADD, ASSERTS.splitlines(), 1),
        (f"Here:\n```python\n{ADD}```\nDone.", ASSERTS, 1),
        (f"```python\nbad\n```\nno:\n```py\n{ADD}```", ASSERTS, 1),
        (f"```\n{ADD}\nprint('hello')\n```", ASSERTS, 1),
        (f"{ADD}\nif __name__ == '__main__':\n    1 / 0", ASSERTS, 1),
        (ADD.replace("+", "-"), ASSERTS, 0),
        ("I would add them.", ASSERTS, 0),
        ("", ASSERTS, 0),
        ("```python\n```", ASSERTS, 0),
        ("import sys\nsys.exit(0)", ASSERTS, 0),
        ("import os\nos._exit(0)", ASSERTS, 0),
        ("raise SystemExit", ASSERTS, 0),
        ("print('ok')\nraise SystemExit", ASSERTS, 0),
        ("print = lambda *_, **__: None\n" + ADD, ASSERTS, 1),
        ('x = """' + "'{a}' {{" + '"""\n' + ADD, ASSERTS, 1),
        (f"from dataclasses import dataclass\n@dataclass\nclass N:\n    n: 'N | None' = None\nN()\n{ADD}", ASSERTS, 1),
        (f"import pickle\nclass A: pass\npickle.dumps(A())\n{ADD}", f"from solution import add\n{ASSERTS}", 1),
        (f"import io, sys\nsys.stdout = io.StringIO()\n{ADD}", ASSERTS, 1),
        (f"```python\n{DOUBLE}```", PAIRS, 1),
        ("print(input())", PAIRS, 0),
        ("print(2)\nprint(4)", PAIRS, 0),
        (DOUBLE + "raise SystemExit(1)", PAIRS, 0),
    ],
)
def test_the_reward_of_a_program(text, tests, score):
    assert code.reward(text, {"tests": tests}) == score


QUEUED = """
from areax.rollout.rewards import code
from areax.rollout.sandbox import turns
code.SECONDS, turns.AT_ONCE = 1.5, 1

async def reward(text, row):
    return await code.passes(text, row["tests"])
"""


def test_waiting_for_the_sandbox_counts_toward_no_limit(tmp_path):
    """Eight programs of 0.4 s, one after another, take longer than a program, or a call of the pool, may take."""
    (tmp_path / "queued.py").write_text(QUEUED)
    program = f"import time\ntime.sleep(0.4)\n{ADD}"

    async def go():
        async with rewards.pool(f"{tmp_path}/queued.py:reward", workers=1, timeout_s=2.0, retries=0) as reward:
            scores = await asyncio.gather(*(reward(program, {"tests": ASSERTS}) for _ in range(8)))
            [slow] = await asyncio.gather(reward(program.replace("0.4", "4"), {"tests": ASSERTS}))
            return [score.value for score in scores], slow.value, reward.counts["late"]

    assert asyncio.run(go()) == ([1.0] * 8, 0.0, 0)


@pytest.mark.parametrize("text", ["while True: pass", "x = bytearray(4 << 30)", "print('x' * 10_000_000)"])
def test_a_program_that_exceeds_its_limits_scores_0(text, monkeypatch):
    monkeypatch.setattr(code, "SECONDS", 1.5)
    assert code.reward(f"{ADD}\n{text}", {"tests": ASSERTS}) == 0.0
    assert code.reward(f"{DOUBLE}\n{text}", {"tests": PAIRS}) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        None,
        "",
        " ",
        [],
        [""],
        [1],
        {},
        [{"input": "1"}],
        [ASSERTS, PAIRS[0]],
        [{"input": None, "output": "1"}],
        [{"input": "", "output": 1}],
        [{"input": ["1"], "output": ["1"]}],
    ],
)
def test_a_row_without_valid_tests_is_an_error(tests):
    with pytest.raises(ValueError, match="rewards.code: tests must be Python source, a list"):
        code.reward(ADD, {"tests": tests})


def test_the_reward_works_in_a_pool(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from areax.rollout.rewards import code\ncode.SECONDS = 1.5\nreward = code.reward"
    )

    async def main():
        async with rewards.pool(f"{tmp_path}/mine.py:reward", workers=2) as reward:
            texts = [ADD, "while True: pass", ADD.replace("+", "*"), ADD]
            out = await asyncio.gather(*(reward(text, {"tests": ASSERTS}) for text in texts))
            assert [score.value for score in out] == [1.0, 0.0, 0.0, 1.0] and reward.counts["scored"] == 4

    asyncio.run(main())
