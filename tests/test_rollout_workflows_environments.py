"""Worlds with a scripted policy: what it sees, what is trained on, and worlds that raise, hang or say nonsense."""

import asyncio
import contextlib
import functools
import json
import logging
import math
import re
import threading
import time

import numpy as np
import pytest
from fidelity import SAMPLING, Policy, exact
from gateways import CALL, FUNCTION, TOKENS

from areax.core import advantages, packing
from areax.rollout import object_path
from areax.rollout.chat import states
from areax.rollout.chat.parsers import Answer, ToolCall
from areax.rollout.chat.trajectory import Interaction
from areax.rollout.errors import ServerError
from areax.rollout.scheduling import episodes
from areax.rollout.workflows import environments, failures, resolve


def loaded(world):
    """The class as a run loads it, by its path."""
    return object_path.load_object(f"{__file__}:{world.__name__}")


def play(policy, world, row=None, **options):
    name = f"{__file__}:{world.__name__}"
    how = dict(tokenizer=TOKENS, sampling=SAMPLING, world=name, **options)
    return asyncio.run(environments.play(policy, row or {"from": 3}, **how))


class Countdown:
    """The right answer is the number below the last observation."""

    closed = 0

    def __init_subclass__(cls):
        cls.closed = 0  # each class counts its own

    def __init__(self, reward=1.0):
        self.reward = reward

    async def reset(self, row):
        self.left = row["from"]
        return str(self.left)

    def step(self, message):
        assert threading.current_thread() is not threading.main_thread(), "a plain function runs in a thread"
        right = message["content"] == str(self.left - 1)
        self.left -= 1
        return str(self.left), right * self.reward, self.left == 0

    def close(self):
        type(self).closed += 1


def test_a_world_rewards_each_answer():
    policy, before = Policy("2", "x", "0"), loaded(Countdown).closed
    [sample] = samples = play(policy, Countdown, options={"reward": 2.0})
    ends = [i for i in np.flatnonzero(sample.tokens == TOKENS.eos_token_id) if sample.mask[i]]
    assert sample.rewards == tuple(zip(ends, (2.0, 0.0, 2.0), strict=True)) and exact(policy, samples)
    assert [text.rsplit("user\n", 1)[1][0] for text in policy.heard] == ["3", "2", "1"]
    assert loaded(Countdown).closed == before + 1


def test_an_episode_ends_after_its_turns():
    policy = Policy("2")
    [sample] = play(policy, Countdown, {"from": 10**6}, turns=3)
    assert len(policy.said) == 3 and sample.reward == 0.0
    with pytest.raises(ValueError, match="turns: must be an integer of at least 1, got 0"):
        play(policy, Countdown, turns=0)


class Rewrites(Countdown):
    """Changes a message that it has returned, and at last says more than any model reads."""

    def reset(self, row):
        self.seen = [{"type": "text", "text": "1+1"}]
        self.left = 3
        return [{"role": "user", "content": self.seen}]

    def step(self, message):
        self.seen[0]["text"] = "9+9"
        self.left -= 1
        return ("more" if self.left else "x" * 10**7), 1.0, False


def test_what_a_world_has_said_stays_and_a_text_too_long_for_any_context_ends_the_episode():
    policy = Policy("2", "2", "2")
    samples = play(policy, Rewrites)
    assert exact(policy, samples) and len(policy.said) == 3
    assert "1+1" in policy.heard[-1] and "9+9" not in policy.heard[-1]


class Exits(Countdown):
    def __init__(self, where):
        self.where = where
        self.leave("init")

    def leave(self, where):
        if where == self.where:
            raise SystemExit(4)

    async def reset(self, row):
        self.leave("reset")
        return await super().reset({"from": 3})

    def step(self, message):
        self.leave("step")
        return super().step(message)


def test_a_world_that_exits_is_named(caplog):
    name = f"{__file__}:Exits"
    for where, what in (("init", "its constructor"), ("reset", "reset")):
        with pytest.raises(ValueError, match=rf"cannot begin: {what}: it exited \(4\)"):
            asyncio.run(environments.check(name, {}, tokenizer=TOKENS, options={"where": where}))
    [sample] = play(Policy("2"), Exits, options={"where": "step"})
    assert math.isnan(sample.reward) and "step: it exited (4)" in caplog.text


class Panic(BaseException):
    """As those of Rust by way of pyo3."""


class Raises(Countdown):
    def __init__(self, kind):
        self.kind = kind

    def step(self, message):
        raise {"panic": Panic, "cancelled": asyncio.CancelledError}[self.kind]("of its own")


@pytest.mark.parametrize("kind", ("panic", "cancelled"))
def test_what_is_no_exception_costs_its_episode_alone(caplog, kind):
    [sample] = play(Policy("2"), Raises, options={"kind": kind})
    assert math.isnan(sample.reward) and f"step: {'Panic' if kind == 'panic' else 'CancelledError'}" in caplog.text


class Floods(Countdown):
    async def reset(self, row):
        return [{"role": "user", "content": "x"}] * 10**6


def test_a_flood_of_messages_and_wrong_options_are_refused_at_once():
    check = lambda world, **how: asyncio.run(
        environments.check(f"{__file__}:{world.__name__}", {"from": 3}, tokenizer=TOKENS, **how)
    )
    with pytest.raises(ValueError, match="reset must return .*it has 1,000,000 messages, of at most 10,000"):
        check(Floods)
    for seconds in (0, -1, math.nan, "ten", True):
        with pytest.raises(ValueError, match="step_timeout_s: must be a number of seconds above 0, got"):
            check(Countdown, step_timeout_s=seconds)
    with pytest.raises(ValueError, match="style must be one of .*, got 'zzz'"):
        check(Countdown, style="zzz")


def test_a_first_observation_without_room_for_an_answer_is_told(caplog):
    for longest, told in ((10**6, False), (2, True)):
        asyncio.run(environments.check(f"{__file__}:Countdown", {"from": 3}, tokenizer=TOKENS, longest=longest))
        assert ("rows at most 2: such episodes are left out" in caplog.text) == told


class Duel:
    """Two players say numbers in turn; at the end the larger one wins."""

    seats = 2

    def reset(self, row):
        self.seat, self.said = row.get("first", 0), {}
        return f"You are {self.seat}."

    def step(self, message):
        self.said[self.seat] = int(message["content"])
        if len(self.said) == 2:
            won = float(self.said[0] > self.said[1])
            return "", [won, {"reward": 1 - won, "late": 1.0}], True
        self.seat = 1 - self.seat
        return f"You are {self.seat}.", None, False


class LongDuel(Duel):
    """Goes on after the first two."""

    def step(self, message):
        seen, rewards, _ = super().step(message)
        self.seat = 1 - self.seat if rewards else self.seat
        return seen or "Again.", rewards, False


def test_each_seat_has_a_conversation_and_a_reward_of_its_own():
    policy = Policy("3", "5")
    samples = play(policy, Duel, {"first": 1})
    assert exact(policy, samples) and [s.seat for s in samples] == [0, 1]
    assert [s.reward for s in samples] == [1.0, 0.0] and samples[1].components == {"late": 1.0}
    assert "You are 1." in policy.heard[0] and "You are 0." not in policy.heard[0]
    assert "You are 0." in policy.heard[1] and "You are 1." not in policy.heard[1]


def test_turns_are_those_of_a_player():
    policy = Policy("3", "5", "4", "6", "1")
    samples = play(policy, LongDuel, turns=2)
    assert len(policy.said) == 4 and exact(policy, samples) and {s.seat for s in samples} == {0, 1}


def test_seats_are_rollouts_that_are_compared_among_themselves():
    workflow = functools.partial(
        environments.play, tokenizer=TOKENS, sampling=SAMPLING, world=f"{__file__}:Duel",
    )  # fmt: skip
    samples = asyncio.run(episodes.group(workflow, Policy("3", "5"), {}, prompt=7, size=4, seed=None))
    assert len({s.rollout for s in samples}) == 8 and {s.weight for s in samples} == {1.0}
    assert {s.prompt for s in samples} == {7} and {s.group for s in samples if not s.seat} == {7}
    groups = [{s.group for s in samples if s.seat == seat} for seat in (0, 1)]
    assert all(len(ids) == 1 for ids in groups) and groups[0] != groups[1]
    batch = packing.pack(samples, 256, rows=8)
    rewards = {s.group: [x.reward for x in samples if x.group == s.group] for s in samples}
    adv = advantages.group(batch.reward_BJ, batch.group_BJ, batch.rollout_BJ, std="none")
    for s in samples:
        assert adv[batch.sample_BJ == s.sample] == pytest.approx(s.reward - np.mean(rewards[s.group]))


def test_seats_of_an_episode_may_be_compared_with_each_other():
    """Hierarchical GRPO (prime-rl's `HierarchicalGRPOAlgorithm`, written anew): the reward less the mean over the
    episode's, of other seats less the mean over the group's."""
    workflow = functools.partial(
        environments.play, tokenizer=TOKENS, sampling=SAMPLING, world=f"{__file__}:Duel",
    )  # fmt: skip
    play = lambda seats: asyncio.run(
        episodes.group(workflow, Policy("3", "5"), {}, prompt=7, size=3, seed=None, episode_seats=seats)
    )
    both, one = play((0, 1)), play((1,))
    assert len({s.group for s in both}) == 3 and len({s.rollout for s in both}) == 6
    assert len({s.group for s in one}) == 4 and {s.group for s in one if not s.seat} == {7}
    batch = packing.pack(both, 256, rows=8)
    adv = advantages.group(batch.reward_BJ, batch.group_BJ, batch.rollout_BJ, std="none")
    for s in both:
        mine = [x.reward for x in both if x.rollout % 2**48 == s.rollout % 2**48]
        assert len(mine) == 2 and adv[batch.sample_BJ == s.sample] == pytest.approx(s.reward - np.mean(mine))


class Rooms:
    """Says where one is: "l" leads from the hall into the room, "r" back."""

    def reset(self, row):
        self.left = 3
        return "hall"

    def step(self, message):
        self.left -= 1
        return "room" if message["content"] == "l" else "hall", 0.0, not self.left


def test_states_are_what_a_world_showed_last():
    workflow = functools.partial(
        environments.play, tokenizer=TOKENS, sampling=SAMPLING, world=f"{__file__}:Rooms",
    )  # fmt: skip
    seen = {}
    for said in ("lrl", "rrl", "lll"):
        [sample] = asyncio.run(states.marked(workflow, Policy(*said), {}))
        kind, state = sample.arrays["state"]
        turns = [{*state[sample.mask & (sample.turn == turn)].tolist()} for turn in range(3)]
        assert kind == "target" and state.dtype == np.int32 and all(len(turn) == 1 for turn in turns)
        assert not state[~sample.mask].any()
        seen[said] = [turn.pop() for turn in turns]
    hall, room, _ = seen["lrl"]
    assert 0 not in (hall, room) and hall != room
    assert seen == {"lrl": [hall, room, hall], "rrl": [hall, hall, hall], "lll": [hall, room, room]}


def test_states_are_the_same_whatever_ids_calls_have():
    """Ids are drawn anew in each episode; what a tool answered, and which was called, are the state."""

    def number(id, content="4", name="add", begins=False):
        first = {"role": "user", "content": "2+2"}
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer = Answer("", tool_calls=(ToolCall(id, name, "{}"),))
        before = Interaction(prompt=(1,), temperature=1.0, messages=(first,), answer=answer)
        messages = first, called, {"role": "tool", "tool_call_id": id, "name": name, "content": content}
        return states.number(
            Interaction(parent=None if begins else before, prompt=(1, 2), temperature=1.0, messages=messages)
        )

    for begins in (False, True):
        assert number("call_1", begins=begins) == number("call_2", begins=begins)
        assert len({number("call_1", x, name, begins) for x in "45" for name in ("add", "take")}) == 4


class Payer(Duel):
    """Pays at once."""

    def __init__(self, rewards, done=True):
        self.rewards, self.done = rewards, done

    def step(self, message):
        return "", self.rewards, self.done


@pytest.mark.parametrize("rewards", [1.0, [1.0], [1.0, 2.0, 3.0], "no"])
def test_rewards_of_another_number_of_players_cost_the_episode(rewards, caplog):
    [sample] = play(Policy("3"), Payer, options={"rewards": rewards})
    assert math.isnan(sample.reward) and "rewards of 2 players must be a list of as many" in caplog.text


def test_a_player_without_an_answer_has_no_reward_but_at_the_end(caplog):
    [sample] = play(Policy("3"), Payer, options={"rewards": [1.0, -1.0]})
    assert (sample.seat, sample.reward) == (0, 1.0)
    [sample] = play(Policy("3"), Payer, options={"rewards": [None, 5.0], "done": False})
    assert math.isnan(sample.reward) and "player 1 has a reward, 5.0, and no answer yet; give None" in caplog.text


class Adder:
    """A world with a tool, messages of its own, named rewards, and a reward at the end alone."""

    tools = ({"type": "function", "function": FUNCTION},)

    def reset(self, row):
        return [{"role": "system", "content": "You add."}, {"role": "user", "content": "1 + 2.5?"}]

    def step(self, message):
        calls = message.get("tool_calls", ())
        if not calls:
            return "", {"right": float(message["content"] == "3.5"), "bonus": 0.5}, True
        value = str(sum(json.loads(calls[0]["function"]["arguments"]).values()))
        self.tools = ()  # read before each answer
        return [{"role": "tool", "tool_call_id": calls[0]["id"], "content": value}], None, False


def test_a_world_has_tools_and_messages():
    policy = Policy(CALL, "3.5")
    samples = play(policy, Adder)
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.5}
    assert samples[0].components == {"right": 1.0, "bonus": 0.5}
    assert "You add." in policy.heard[0] and '"name": "add"' in policy.heard[0]
    assert '"name": "add", "desc' not in policy.heard[1] and "tool\n3.5<|im_end|>" in policy.heard[1]


class Thoughtful(Countdown):
    def step(self, message):
        self.left -= 1
        same = (message["reasoning_content"], message["content"]) == ("[5]?", "[7]")
        return "next", {"same": float(same)}, not self.left


def test_reasoning_is_not_what_a_world_reads():
    policy = Policy("<think>\n[5]?\n</think>\n\n[7]")
    [sample] = samples = play(policy, Thoughtful)
    assert exact(policy, samples) and sample.components == {"same": 3.0}
    assert policy.heard[1].count("<think>") == 1  # the conversation has the answer as it was written


class Silent(Countdown):
    def step(self, message):
        return "again", None, False


def test_an_episode_without_a_reward_has_none():
    [sample] = play(Policy("hm"), Silent, turns=2)
    assert sample.reward == 0.0


class Unsure(Countdown):
    def step(self, message):
        return "again", math.nan, True


def test_a_world_may_say_that_it_cannot_score():
    [sample] = play(Policy("hm"), Unsure)
    assert math.isnan(sample.reward)


class Raising(Countdown):
    def step(self, message):
        return OSError("the board\nis gone") if self.left == 2 else super().step(message)


class Broken(Countdown):
    def step(self, message):
        if self.left == 2:
            raise OSError("the board\nis gone")
        return super().step(message)


class Hanging(Countdown):
    def step(self, message):
        time.sleep(5)


class Nameless(Countdown):
    def step(self, message):
        return {"text": "3"}, 1.0, False


class Rich(Countdown):
    def step(self, message):
        return "3", "much", False


class Liar(list):
    def __len__(self):
        raise RuntimeError("no length")

    __iter__ = __len__


class Vague(float):
    def __float__(self):
        raise RuntimeError("no number")


class Lying(Countdown):
    def step(self, message):
        return Liar("abc")


class Unpriced(Countdown):
    def step(self, message):
        return "3", Vague(1), False


class Stepless(Countdown):
    @property
    def step(self):
        raise RuntimeError("no step")


class Told(Countdown):
    """Returns what the row says, from `reset` or from `step`."""

    def reset(self, row):
        self.tools = row.get("tools", ())
        self.next = row["seen"]
        return "begin" if row.get("later") else self.next

    def step(self, message):
        return self.next, 1.0, False


@pytest.mark.parametrize(
    "seen",
    [
        3, b"x", [], [3], [{"role": "user"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": [3]}],
        [{"role": "user", "content": {"a": 1}}], [{"role": "assistant", "content": "x", "tool_calls": 3}],
        [{"role": "user", "content": "x", "tool_calls": [{}]}], [{"role": "user", "content": "x", "a": {1, 2}}],
        "half a pair: \ud800", [{"role": "user", "content": float("nan")}],
    ],
)  # fmt: skip
def test_nonsense_is_never_a_prompt(seen, caplog):
    with pytest.raises(ServerError, match="Told cannot begin: reset must return a text, or a list of messages, got "):
        play(Policy("x"), Told, {"seen": seen})
    [sample] = play(Policy("x"), Told, {"seen": seen, "later": True})
    assert math.isnan(sample.reward) and "failed: step must return a text, or a list of messages, got " in caplog.text


@pytest.mark.parametrize("tools", [3, ["x"], [{"function": 3}], [{"type": "function"}], [{"function": {"name": 3}}]])
def test_tools_that_are_none_cost_an_episode(tools, caplog):
    assert play(Policy("x"), Told, {"seen": "Hi", "tools": tools}) is None
    assert "Told failed: tools: " in caplog.text and caplog.text.count("\n") == 1


class Leaky(Countdown):
    def close(self):
        raise OSError("still open")


@pytest.mark.parametrize(
    "world, line",
    [
        (Broken, "failed: step: OSError: the board is gone; row {'from': 3}"),
        (Raising, "failed: step must return (observation, reward, whether it is done), got OSError('the board"),
        (Hanging, "failed: step must return within step_timeout_s, 1 s, and did not; raise it in --env-options; row"),
        (Nameless, "failed: step must return a text, or a list of messages, got {'text': '3'}; it is neither; row"),
        (Lying, "failed: step must return (observation, reward, whether it is done), got "),
        (
            Unpriced,
            "failed: step: a reward must be a number, a dict of numbers, a list of (end, reward) pairs or None, ",
        ),
        (Stepless, "failed: step: RuntimeError: no step"),
        (
            Rich,
            "failed: step: a reward must be a number, a dict of numbers, a list of (end, reward) pairs or None",
        ),
    ],
)
def test_a_world_that_fails_costs_its_episode_and_a_line(world, line, caplog):
    policy, before = Policy("2", "1"), loaded(world).closed
    samples = play(policy, world, step_timeout_s=1.0 if world is Hanging else 60.0, name="mine")
    assert all(math.isnan(sample.reward) for sample in samples) and exact(policy, samples)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"environment mine {line}" in caplog.text and loaded(world).closed == before + 1


def test_a_world_that_cannot_be_closed_is_named(caplog):
    [sample] = play(Policy("2", "1", "0"), Leaky)
    assert sample.reward == 3.0 and "Leaky: close: OSError: still open" in caplog.text


class Unmade(Countdown):
    def __init__(self):
        raise ImportError("No module named 'game'")


class Full(Countdown):
    async def reset(self, row):
        raise RuntimeError("capacity reached")


class Endless(Countdown):
    async def reset(self, row):
        await asyncio.sleep(5)


class Mute(Countdown):
    async def reset(self, row):
        return None


@pytest.mark.parametrize(
    "world, line",
    [
        (Unmade, "its constructor: ImportError: No module named 'game'"),
        (Full, "reset: RuntimeError: capacity reached"),
        (Endless, "reset must return within step_timeout_s, 1 s"),
        (Mute, "reset must return a text, or a list of messages, got None; it is neither"),
    ],
)
def test_a_world_that_cannot_begin_is_tried_again_as_a_failing_server_is(world, line):
    with pytest.raises(ServerError) as failed:
        play(Policy("2"), world, step_timeout_s=1.0 if world is Endless else 60.0)
    assert f"{world.__name__} cannot begin: {line}" in str(failed.value) and "\n" not in str(failed.value)


def test_many_failures_in_a_row_end_the_run_with_their_line():
    options = {"world": f"{__file__}:Broken", "name": "mine"}

    async def run(rows):
        how = dict(tokenizer=TOKENS, reward=None, sampling=SAMPLING, options=options)
        async with resolve.bind("areax.rollout.workflows.environments:play", **how) as workflow:
            return [await workflow(Policy("2", "1", "0"), {"from": n}) for n in rows]

    good, bad = 1, 3
    asyncio.run(run([*[bad] * (failures.MOST - 1), good, *[bad] * (failures.MOST - 1)]))
    with pytest.raises(
        ValueError, match="^environment mine: failed 16 times in a row; the last time: step: OSError: the"
    ):
        asyncio.run(run([bad] * failures.MOST))


def test_a_prompt_that_does_not_fit_is_left_out(caplog):
    async def generate(prompt, **sampling):
        raise ValueError("the prompt is longer than the context")

    assert play(generate, Countdown) is None
    assert "its first observation cannot be a prompt: the prompt is longer than the context" in caplog.text


class Slow(Countdown):
    def step(self, message):
        time.sleep(0.2)
        return "", 1.0, True


def test_a_world_blocks_no_other():
    async def together():
        how = dict(tokenizer=TOKENS, sampling=SAMPLING, world=f"{__file__}:Slow")
        begun = time.monotonic()
        await asyncio.gather(*(environments.play(Policy("2"), {"from": 3}, **how) for _ in range(16)))
        return time.monotonic() - begun

    assert asyncio.run(together()) < 16 * 0.2 / 2


@pytest.mark.parametrize(
    "world, how, line",
    [
        (Countdown, {}, ""),
        (Adder, {}, ""),
        (Full, {}, "Full cannot begin: reset: RuntimeError: capacity reached; row {'from': 3}"),
        (
            Countdown,
            {"options": {"rewards": 1}},
            "cannot begin: its constructor: TypeError: Countdown.__init__() got an",
        ),
        (Countdown, {"turns": 0}, "turns: must be an integer of at least 1, got 0"),
        (Adder, {"style": "plain"}, "Adder has tools: style must be a format of calls, qwen, "),
    ],
)
def test_an_environment_is_tried_before_a_run(world, how, line):
    closes = lambda: [loaded(one).closed for one in (Countdown, Full)]
    before = closes()
    tried = environments.check(f"{__file__}:{world.__name__}", {"from": 3}, tokenizer=TOKENS, **how)
    with pytest.raises(ValueError, match=re.escape(line)) if line else contextlib.nullcontext():
        asyncio.run(tried)
    assert closes() == [before[0] + (world is Countdown and not how), before[1] + (world is Full)]
