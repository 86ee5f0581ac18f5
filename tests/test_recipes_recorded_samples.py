"""Samples for a run's page from its journal, while another thread writes it, with the advantages that the run had."""

import asyncio
import json
import math
import os

import jax
import numpy as np
import pytest

from areax.adapters import tokenizer
from areax.core import losses, packing
from areax.recipes import recorded_advantages, recorded_samples
from areax.rollout.journal import store
from areax.rollout.types import Completion, sampled

ALPHABET = "abcdefgh"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer of characters, and the tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokens = tokenizer.character(ALPHABET)
    tokenizer.save(tokens, folder)
    return folder, tokens


def made(tokens, prompt, k, version, reward, **more):
    """A completion whose first tokens are one version older than its last."""
    ids = lambda text: tokens.encode(text, add_special_tokens=False)
    answer = ids("cdef"[: 2 + k % 3])
    versions = [max(0, version - 1)] + [version] * (len(answer) - 1)
    logp = [-0.5 - i / 4 for i in range(len(answer))]
    more = {"components": {"format": float(k % 2)}, "info": {"prompt": "ab", "text": "cd"}, **more}
    return sampled(
        ids("ab"), Completion(answer, logp, versions, "stop"), temperature=1.0, reward=reward, group=prompt,
        prompt=prompt, rollout=4 * prompt + k, sample=4 * prompt + k, **more,
    )  # fmt: skip


def batch(tokens, version, rewards):
    """Groups with these rewards."""
    return [
        [made(tokens, 8 * version + p, k, version, reward) for k, reward in enumerate(group)]
        for p, group in enumerate(rewards)
    ]


REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, math.nan, 1.0]]


def write(folder, batches, start=0):
    """Records the batches as a run does that goes on from version `start`; yields while its journal is open."""

    async def main():
        async with store.opened(folder, start, {"run": "one"}) as journal:
            for version, groups in enumerate(batches, start):
                journal.close_batch(version, groups, {"batch": version + 1}, ()).result()

    asyncio.run(main())


def configured(folder, model, **more):
    options = {"model": str(model), "data": "x", "reward": "areax.rollout.tasks.arithmetic:reward", **more}
    (folder / "config.json").write_text(json.dumps(options))


def test_a_sample_has_its_tokens_versions_components_and_advantage(tmp_path, model):
    folder, tokens = model
    configured(tmp_path, folder)
    write(tmp_path, [batch(tokens, version, REWARDS) for version in range(3)])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    found = recorded_samples.Samples(tmp_path)
    assert found.steps() == {"grpo": [1, 2, 3]}
    shown = found.rewards("grpo", 3)
    assert shown[0] == REWARDS[0] and shown[1][:2] == [0.0, 0.0] and math.isnan(shown[1][2])
    line = found.line("grpo", 3, 0, 1)
    assert line["prompt"] == "ab" and line["tokens"] == ["c", "d", "e"] and line["version"] == 2
    assert line["version_of_token"] == [1, 2, 2] and line["logp"] == [-0.5, -0.75, -1.0]
    assert line["reward"] == 0.0 and line["components"] == {"format": 1.0} and not line["note"]
    deviation = np.std(REWARDS[0], ddof=1) + 1e-6
    assert line["adv"] == pytest.approx(-0.5 / deviation, rel=1e-5)
    assert line["adv_of_token"] == pytest.approx([-0.5 / deviation] * 3, rel=1e-5)
    unscorable = found.line("grpo", 3, 1, 2)
    assert unscorable["reward"] is None and unscorable["adv"] == 0
    json.dumps(line, allow_nan=False)
    found.close()
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_batches_are_found_as_they_are_recorded_and_the_journal_is_copied_rarely(tmp_path, model, monkeypatch):
    folder, tokens = model
    configured(tmp_path, folder)
    copies = []
    copy = recorded_samples.reading.shutil.copyfile
    monkeypatch.setattr(recorded_samples.reading.shutil, "copyfile", lambda a, b: (copy(a, b), copies.append(a.name)))
    found = recorded_samples.Samples(tmp_path)
    assert found.steps() == {}

    async def main():
        async with store.opened(tmp_path, 0, {"run": "one"}) as journal:
            monkeypatch.setattr(recorded_samples, "SHARE", 0)
            for version in range(2):
                journal.close_batch(version, batch(tokens, version, REWARDS), {}, ()).result()
                assert found.steps() == {"grpo": [*range(1, version + 2)]}
                assert found.line("grpo", version + 1, 1, 3)["tokens"] == ["c", "d"]
            count = len(copies)
            found.steps(), found.line("grpo", 1, 0, 0), found.line("grpo", 2, 0, 0)
            assert len(copies) == count == 4  # database and log, for each batch
            monkeypatch.setattr(recorded_samples, "SHARE", 10**6)
            for version in range(2, 5):
                journal.close_batch(version, batch(tokens, version, REWARDS), {}, ()).result()
                assert found.steps() == {"grpo": [1, 2, 3]} and found.line("grpo", 1, 0, 0)
            assert len(copies) == count + 2  # as long as another one would take too much of the time

    asyncio.run(main())
    found.close()


def test_what_is_missing_is_named_and_the_rest_shown(tmp_path, model):
    _, tokens = model
    write(tmp_path, [batch(tokens, 0, REWARDS)])
    found = recorded_samples.Samples(tmp_path)
    assert found.steps() == {"grpo": [1]}
    line = found.line("grpo", 1, 0, 1)
    ids = tokens.encode("cde", add_special_tokens=False)
    assert line["tokens"] == [f"⟨{i}⟩" for i in ids]  # no tokenizer
    assert line["note"].startswith("Advantages need the run's options") and "adv" not in line
    found.close()


def test_other_kinds_come_from_samples_jsonl_as_it_grows(tmp_path):
    path = tmp_path / "samples.jsonl"
    line = {"kind": "eval", "step": 0, "prompt": "p", "text": "t", "reward": 0.5, "tokens": ["t"], "logp": [-1.0]}
    found = recorded_samples.Samples(tmp_path)
    assert found.steps() == {}
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"reward": None}) + "\n" + '{"kind": "grpo", ')
    assert found.steps() == {"eval": [0]} and found.rewards("eval", 0) == [[0.5, None]]
    with open(path, "a") as file:
        file.write('"step": 10, "tokens": ["x"]}\n')
    assert found.steps() == {"eval": [0], "grpo": [10]} and found.line("grpo", 10, 0, 0)["tokens"] == ["x"]
    (tmp_path / "cut").write_text(json.dumps(line) + "\n" + json.dumps(line | {"text": "t" * 1000}) + "\n")
    os.replace(tmp_path / "cut", path)  # a run that goes on from before, and has already written more
    assert found.steps() == {"eval": [0]} and len(found.line("eval", 0, 0, 1)["text"]) == 1000
    path.write_text(json.dumps(line) + "\n")
    assert found.steps() == {"eval": [0]} and found.line("eval", 0, 0, 0) == line
    with open(path, "a") as file:
        file.write('{"kind": 3}\n')
    with pytest.raises(ValueError, match="samples.jsonl:2: kind must be a text, got 3; remove the line"):
        found.steps()
    found.close()


@pytest.mark.sweep
@pytest.mark.parametrize("name", losses.POLICIES)
def test_advantages_are_those_of_the_run_for_every_objective(model, name):
    _, tokens = model
    objective = losses.POLICIES[name]()
    needs_a_model = objective.needs_values or objective.advantage.teacher or objective.kl.place == "reward"
    if needs_a_model:
        return
    samples = [sample for group in batch(tokens, 3, [[1.0, 0.0, 0.25, 1.0], [0.5] * 4]) for sample in group]
    samples = [s.replace(components={**s.components, "greedy": 0.25}) for s in samples]
    packed = packing.pack(samples, 8, components=objective.advantage.needs)

    class Scores:
        logp_BT = np.where(packed.mask_BT, packed.logp_BT - 0.1, 0)  # of weights that have moved
        entropy_BT = np.ones_like(packed.logp_BT)

    packed = packed.replace(ref_BT=packed.logp_BT).with_scalars(version=3)
    expected = packing.unpack(jax.jit(lambda: objective.prepare(packed, Scores).adv_BT)(), packed, samples)
    for adv, other in zip(recorded_advantages.batch(objective, samples), expected, strict=True):
        np.testing.assert_allclose(adv, other, rtol=1e-6)
    assert any(np.any(adv) for adv in expected)


def test_a_batch_in_minibatches_is_compared_within_each(tmp_path, model):
    folder, tokens = model
    groups = batch(tokens, 0, [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.5]])
    objective = {"training": {"objective": {"advantage": {"mean": "batch", "std": "none"}}, "minibatches": 2}}
    configured(tmp_path, folder, rollout={"groups": 4, "group_size": 2}, **objective)
    found, note = recorded_advantages.of(tmp_path, groups, 0)
    assert note == "" and [adv[-1] for adv in found] == [0.5, -0.5, -0.5, 0.5, 0.125, 0.125, 0.125, -0.375]


@pytest.mark.parametrize("options", [{"credit": "gae", "mean": "none", "std": "none"}, {"teacher": 0.5}])
def test_advantages_that_need_a_model_are_not_shown(tmp_path, model, options):
    folder, tokens = model
    more = {"teacher": str(folder)} if "teacher" in options else {}
    configured(tmp_path, folder, training={"objective": {"advantage": options}, **more})
    found, note = recorded_advantages.of(tmp_path, batch(tokens, 0, REWARDS), 0)
    assert found == [None] * 8 and "critic, teacher or reference" in note
