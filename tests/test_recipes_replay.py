"""`areax replay`: runs recomputed from their journals, and what other objectives make of their batches."""

import functools
import json
import shutil
import sqlite3

import jax
import numpy as np
import pytest
import servers
import test_recipes_grpo as runs
import tiny

from areax import models
from areax.adapters import cli, hf
from areax.adapters.report import build
from areax.adapters.tracking import run_dir
from areax.core import losses, packing
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.recipes import grpo, replay
from areax.recipes.shared import recorded
from areax.rollout.journal import codec, reading, store
from areax.rollout.tasks import arithmetic


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with runs: "fresh" (eta 0, two epochs of two minibatches) and "stale" (eta 1)."""
    path = tmp_path_factory.mktemp("replay")
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", arithmetic.splits()["train"][:40])
    (path / "rewards.py").write_text("def score(text, row):\n    return sum(c.isdigit() for c in text) / 4\n")
    with servers.embedded(path / "model", slots=8, context=64) as remote:
        (path / "url").write_text(remote.url)
        grpo.main(runs.config(path, "fresh", steps=4, save_every=2, minibatches=2, epochs=2))
        grpo.main(runs.config(path, "stale", steps=4, eta=1, shuffle_rewards=True))
        yield path


def run(capsys, *words):
    """(exit code, summary) of a replay."""
    code = cli.main(["replay", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_run_is_recomputed_bit_by_bit(place, capsys):
    assert cli.main(["replay", str(place / "fresh")]) == 0
    head, *steps, end = capsys.readouterr().out.splitlines()
    assert head == f"{place}/fresh: steps 1 to 4, from {place}/model" and len(steps) == 4
    pushed = recorded.read(place / "fresh").pushed
    for step, line in enumerate(steps, 1):
        assert line.startswith(f"step {step}  equal  {pushed[step]}, ")
        assert line.endswith(", the saved state") == (step in (2, 4))
    assert end.startswith("steps 1 to 4 are the run's, bit for bit: 4 versions that were pushed, ")
    code, found = run(capsys, place / "stale")
    assert code == 0 and found["versions"] == 4 and found["metrics"] > 100 and found["states"].keys() == {"4"}
    ages = [line["staleness_max"] for line in recorded.read(place / "stale").metrics.values()]
    assert max(ages) == 1


@pytest.mark.slow
def test_a_replay_begins_at_a_saved_state(place, capsys):
    code, found = run(capsys, place / "fresh", "--from", 3)
    assert code == 0 and (found["from"], found["to"]) == (2, 4) and found["versions"] == 2


def changed(run, copy, version, change):
    """Copies a run, with the samples of a batch changed in its journal."""
    shutil.copytree(run, copy)
    with reading.opened(copy) as journal:
        batch = journal.read(version)
    samples = change([sample for group in batch.groups for sample in group])
    with sqlite3.connect(copy / store.FILE) as db:
        cursor, sizes = db.execute("SELECT cursor, sizes FROM batches WHERE version = ?", (version,)).fetchone()
        data = codec.packed(samples, exact=True)
        row = data, store._hash(data, (version, cursor, sizes)), version
        db.execute("UPDATE batches SET samples = ?, hash = ? WHERE version = ?", row)
    return copy


@pytest.mark.slow
def test_a_lost_line_of_metrics_leaves_weights_to_compare(place, capsys, tmp_path):
    shutil.copytree(place / "fresh", tmp_path / "run")
    file = tmp_path / "run" / run_dir.METRICS
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] != 1))
    code, found = run(capsys, tmp_path / "run", "--to", 2)
    assert code == 0 and found["versions"] == 2


def test_options_of_a_run_that_went_back_before_their_change(tmp_path):
    """From an older state, or from the beginning, with the newer options."""
    (tmp_path / run_dir.METRICS).write_text('{"kind": "grpo", "step": 1}\n')
    change = {"kind": "options", "version": 6, "former": "config.1.json"}
    push = lambda *versions: [{"kind": "push", "label": f"{v}-abc"} for v in versions]

    def changes(*events):
        (tmp_path / "events.jsonl").write_text("".join(json.dumps({"at": 0, **one}) + "\n" for one in events))
        return recorded.read(tmp_path).changes

    before = [*push(5, 6), change, *push(6, 7)]
    assert changes(*before) == [(6, "config.1.json")]
    assert changes(*before, *push(3, 4, 8)) == [(3, "config.1.json")]
    assert recorded.options(recorded.read(tmp_path), 3, 8) == [(3, tmp_path / "config.json")]
    back = {"kind": "options", "version": 3, "former": "config.2.json"}
    assert changes(*before, back, *push(3, 4, 8)) == [(3, "config.1.json")]
    assert changes(*before, *push(0, 1)) == [(0, "config.1.json")]
    assert recorded.options(recorded.read(tmp_path), 0, 8) == [(0, tmp_path / "config.json")]


@pytest.mark.slow
def test_a_flipped_reward_differs_from_its_step_on(place, capsys):
    flip = lambda samples: [samples[0].replace(rewards=((len(samples[0].tokens) - 1, 2.0),)), *samples[1:]]
    copy = changed(place / "fresh", place / "flipped", 2, flip)
    assert cli.main(["replay", str(copy)]) == 1
    _, *steps, first, last = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in steps] == ["equal", "equal", "differs", "differs"]
    assert "weights 3-" in steps[2] and "pushed were 3-" in steps[2] and " metrics: " in steps[2]
    assert first.startswith("2 of 4 steps differ, the first: step 3  differs  weights 3-")
    assert last.startswith("the state of step 4: weights are at most ") and last.endswith(" of their norm")
    code, found = run(capsys, copy)
    distance = found["states"]["4"]
    assert code == 1 and found["first_difference"] == 3 and 1e-5 < distance["relative"] < 0.1
    assert found["states"]["2"] == {"equal": True, "most": 0, "relative": 0}


@pytest.mark.slow
def test_a_computation_in_another_dtype_reports_its_distance(place, capsys):
    code, found = run(capsys, place / "stale", "--run.dtype", "bfloat16")
    assert code == 1 and found["first_difference"] == 1 and 0 < found["states"]["4"]["relative"] < 0.1


def gradient(place, samples, objective):
    """The gradient of an objective by samples at the first weights, as one vector; without a recipe's functions."""
    settings, params = hf.load(place / "model")
    score = functools.partial(models.score, config=settings, run=models.Run(dtype="float32"))
    batch = packing.pack(samples, 32)
    rows = range(batch.token_BT.shape[0])
    micro = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
    scores = jax.tree.map(lambda *x: np.stack(x), *(score(params, micro(batch, i)) for i in rows))
    ready = objective.prepare(batch, scores)
    loss = lambda params: sum(objective.loss(score(params, micro(ready, i)), micro(ready, i))[0] for i in rows)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.jit(jax.grad(loss))(params))])


@pytest.mark.long
def test_other_objectives_are_compared_at_the_run_s_weights(place, capsys, tmp_path):
    own = "--objective.name", "grpo", "--objective.advantage.std", "none"
    assert run(capsys, place / "fresh", *own, "--to", 2, "--out", tmp_path / "own")[0] == 0
    for line in run_dir.read_lines(tmp_path / "own" / run_dir.REPLAY):
        assert line["equal"] and abs(line["gradient_cosine"] - 1) < 1e-6 and abs(line["update_cosine"] - 1) < 1e-6
        assert line["own_clip_fraction"] == line["other_clip_fraction"] and line["own_ess"] == line["other_ess"]
    assert cli.main(["replay", str(place / "fresh"), "--objective.name=gspo", "--to", "2", "--out", str(tmp_path)]) == 0
    _, legend, head, *rows, end = capsys.readouterr().out.splitlines()
    assert legend == replay.LEGEND and len(rows) == 2
    assert head.split()[:6] == ["step", "gradient", "cos", "own", "|g|", "other"]
    found = [*run_dir.read_lines(tmp_path / run_dir.REPLAY)]
    assert [line["step"] for line in found] == [1, 2] and all(line["update_cosine"] < 1 for line in found)
    with reading.opened(place / "fresh") as journal:
        samples = [sample for group in journal.read(0).groups[:2] for sample in group]
    objectives = GRPO(advantage={"std": "none"}), losses.GSPO()
    one, two = (gradient(place, samples, objective).astype(np.float64) for objective in objectives)
    norms = np.linalg.norm(one), np.linalg.norm(two)
    assert found[0]["gradient_cosine"] == pytest.approx(one @ two / np.prod(norms), abs=1e-5)
    assert found[0]["gradient_cosine"] < 0.9999
    assert (found[0]["own_gradient_norm"], found[0]["other_gradient_norm"]) == pytest.approx(norms, rel=1e-4)


@pytest.mark.slow
def test_another_optimiser_has_the_same_gradient(place, capsys, tmp_path):
    code, _ = run(capsys, place / "stale", "--optim.name", "sgd", "--optim.b2", 0.95, "--to", 2, "--out", tmp_path)
    assert code == 0
    for line in run_dir.read_lines(tmp_path / run_dir.REPLAY):
        assert abs(line["gradient_cosine"] - 1) < 1e-6 and line["update_cosine"] < 0.9
    page = build.report(tmp_path).read_text()
    assert "Another objective" in page and "gradient_cosine" in page


@pytest.mark.slow
def test_a_run_that_went_on_with_other_options_is_replayed_in_parts(place, capsys):
    tiny.cut_off(place / "fresh", place / "parts", 2)
    grpo.main(runs.config(place, "parts", steps=4, minibatches=2, epochs=2, optim=Optimizer(lr=1e-3)))
    capsys.readouterr()
    assert cli.main(["replay", str(place / "parts")]) == 2
    assert capsys.readouterr().err == (
        f"{place}/parts: went on from step 2 with other options, in config.json: replay one part of it, --to 2 or "
        "--from 2\n"
    )
    assert run(capsys, place / "parts", "--to", 2)[0] == run(capsys, place / "parts", "--from", 2)[0] == 0


def emptied(place, name, *statements):
    """A copy of a run, with statements executed on its journal."""
    shutil.copytree(place / "fresh", place / name)
    with sqlite3.connect(place / name / store.FILE) as db:
        for statement in statements:
            db.execute(statement)
    return place / name


@pytest.mark.slow
def test_wrong_use_is_one_line(place, capsys, tmp_path):
    def said(*words):
        assert cli.main(["replay", *map(str, words)]) == 2
        *progress, line = capsys.readouterr().err.splitlines()
        assert all(" ..." in said for said in progress), progress
        return line

    assert said() == "areax replay: needs the directory of a run as first argument, such as runs/grpo"
    assert said("--json") == said()
    assert "must be the directory of a run of areax train grpo" in said(tmp_path)
    assert "did you mean dapo?" in said(place / "fresh", "--objective.name", "dapoo")
    assert "did you mean --optim.lr?" in said(place / "fresh", "--optim.lrr", "1")
    assert "steps up to 4, the last that was logged, can be replayed, got --from 0 --to 9" in said(
        place / "fresh", "--to", 9
    )
    assert "--lora.rank must be the run's, 0, whose weights are compared, got 4" in said(
        place / "fresh", "--lora.rank", 4
    )
    assert "PPO needs a critic" in said(place / "fresh", "--objective.name", "ppo")
    assert said(place / "fresh", "--base", tmp_path / "gone").endswith("if it has moved, name its place with --base")
    pruned = emptied(place, "pruned", "DELETE FROM batches WHERE version < 2")
    assert "has no batch of step 1, " in (line := said(pruned)) and line.endswith("kept, with --from 2")
    damaged = emptied(place, "damaged", "UPDATE batches SET samples = x'00' WHERE version = 0")
    assert said(damaged, "--to", 1).endswith("the batch of version 0 cannot be used: its bytes changed")
    (place / "pruned" / store.FILE).write_bytes(b"no database")
    assert "journal.db: it is damaged, or no journal" in said(pruned)
    (place / "pruned" / store.FILE).unlink()
    assert "unless --journal is off, got none" in said(pruned)


@pytest.mark.long
def test_critics_references_adapters_and_adaptive_penalties_are_recomputed(place, capsys, tmp_path):
    penalty = {"coef": 0.1, "target": 0.01}
    rich = losses.PPO(kl=penalty)
    grpo.main(runs.config(place, "rich", steps=4, save_every=2, objective=rich, reference_every=2, minibatches=2))
    assert run(capsys, place / "rich")[0] == 0
    assert run(capsys, place / "rich", "--from", 2, "--objective.clip-high", 0.2, "--out", tmp_path)[0] == 0
    for line in run_dir.read_lines(tmp_path / run_dir.REPLAY):
        assert abs(line["gradient_cosine"] - 1) < 1e-6 and abs(line["update_cosine"] - 1) < 1e-6
        assert line["own_kl"] == pytest.approx(line["other_kl"], rel=1e-6)
    grpo.main(runs.config(place, "lora", lora=Lora(rank=2), save_every=2))
    code, found = run(capsys, place / "lora")
    assert code == 0 and found["states"]
