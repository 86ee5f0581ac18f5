"""SFT from files to files: learns, resumes exactly, survives Ctrl-C, says what is wrong."""

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import MISSING, fields, replace

import jax
import jobs
import numpy as np
import pytest
import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areax.adapters import cli, hf, orbax, peft, safetensors, tokenizer
from areax.adapters.tracking import run_dir
from areax.adapters.tracking.sinks import Sinks
from areax.core.balance import Balance
from areax.core.optim import Optimizer
from areax.models import lora
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.recipes import demo, distill, eval, grpo, preference, sft
from areax.recipes.shared import learner, offline, offline_options
from areax.recipes.shared import rows as row_reader
from areax.rollout.tasks import arithmetic


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft")
    tiny.model(path / "model")
    train = arithmetic.splits()["train"]
    tiny.rows(path / "rows.jsonl", list(itertools.islice(arithmetic.demonstrations(train), 200)))
    return path


def config(place, out, **changes):
    base = sft.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), out=str(place / out), steps=6, batch=8, length=64,
        rows=4, optim=Optimizer(lr=1e-2),
    )  # fmt: skip
    return replace(base, **changes)


@pytest.mark.slow
def test_a_wrapper_is_trained_and_exported_whole(place, tmp_path):
    """The text model alone moves."""
    model = tiny.wrapped(tiny.model(tmp_path / "model"))
    options = ["--data", f"{place}/rows.jsonl", "--steps", "1", "--batch", "8", "--rows", "4", "--length", "64"]
    assert cli.main(["train", "sft", "--model", str(model), "--out", str(tmp_path / "out"), *options]) == 0
    before, after = safetensors.read(model), safetensors.read(tmp_path / "out/model")
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert before.keys() == after.keys() and same == {*hf.load(model)[0].rest.names}
    assert json.loads((tmp_path / "out/model/config.json").read_text())["model_type"] == "internvl"
    assert (tmp_path / "out/model/processor_config.json").read_bytes() == (model / "processor_config.json").read_bytes()


@pytest.mark.mesh
def test_new_weights_of_a_wrapper_are_its_text_model_alone(place, tmp_path):
    """Nothing draws a vision tower."""
    model = tiny.wrapped(tiny.model(tmp_path / "model"))
    sft.main(config(place, tmp_path / "out", model=str(model), steps=1, init="random"))
    assert json.loads((tmp_path / "out/model/config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize("recipe", [sft, distill, preference, eval, grpo, demo])
def test_main_names_what_to_await_in_a_running_loop(recipe, tmp_path, monkeypatch):
    """Before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    values = {f.name: "x" for f in fields(recipe.Config) if f.default is MISSING and f.default_factory is MISSING}
    name = recipe.__name__.rpartition(".")[2]

    async def cell():
        with pytest.raises(RuntimeError, match=rf"^{name}.main: .*; use: await {name}.run\(config\)$"):
            recipe.main(recipe.Config(**values))

    asyncio.run(cell())
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_run_is_awaited_and_cancelled_between_two_steps(place):
    """The state of a cancelled run is saved; awaited again, the run ends like one that was not cancelled."""

    async def cell():
        running = asyncio.ensure_future(sft.run(config(place, "notebook", steps=1000)))
        metrics = place / "notebook/metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text()):
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        done = json.loads((place / "notebook/summary.json").read_text())["steps"]
        assert 0 < done < 1000
        again = config(place, "notebook", steps=done + 2)
        return await sft.run(again), sft.main, replace(again, out=str(place / "at once"))

    awaited, main, other = asyncio.run(cell())
    assert awaited["complete"]
    main(other)
    weights = (jax.tree.leaves(hf.load(place / out / "model")[1]) for out in ("notebook", "at once"))
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "recipe, own",
    [
        (sft, {"learn": "last", "out": "runs/sft", "batch": 64}),
        (distill, {"teacher": "", "teachers": (), "out": "runs/distill", "batch": 64}),
        (preference, {"out": "", "batch": 32}),
    ],
)
def test_recipes_on_given_rows_share_their_options(recipe, own, capsys):
    """Declared once; a recipe's own defaults and help texts prevail."""
    shared = {field.name for field in fields(offline_options.Options)}
    declared = {name for name in vars(recipe.Config)["__annotations__"] if name in shared}
    assert declared <= {"out", "batch", "optim"} and len(shared) == 28
    made = recipe.Config("model", "data")
    assert {name: getattr(made, name) for name in own} == own
    assert made.optim.lr == (1e-6 if recipe is preference else 1e-5)
    with pytest.raises(SystemExit):
        cli.main(["train", recipe.__name__.rpartition(".")[2], "--help-all"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    help_of = lambda config, name: re.search(rf"^ +{name}: ([^.\n]+)", config.__doc__, re.M)[1]
    assert help_of(offline_options.Options, "length") in text
    assert help_of(preference.Config if recipe is preference else offline_options.Options, "batch") in text


def losses(out):
    return [line["loss"] for line in run_dir.read_lines(out / "metrics.jsonl") if "loss" in line]


def weights(path):
    return [np.asarray(x) for x in jax.tree.leaves(hf.load(path)[1])]


@pytest.fixture(scope="module")
def runs(place):
    """A run of two steps, "parts"; one of six steps from its config.json, "whole"; and the first one taken up, to six.

    "two" is the model of the two steps, and what the recipe said of them. With them, the options of "whole".
    """
    own = config(
        place, "parts", steps=2, heldout=str(place / "rows.jsonl"), track=Sinks(tensorboard=True), save_minutes=1e-9
    )
    said, after = sft.main(own), losses(place / "parts")
    assert orbax.versions(place / "parts/state") == [1, 2]  # the first is saved because of the time
    shutil.copytree(place / "parts/model", place / "two")
    again = ["train", "sft", "--config", str(place / "parts/config.json"), "--steps", "6"]
    assert cli.main([*again, "--out", str(place / "whole")]) == 0
    assert cli.main(again) == 0
    return said, after, replace(own, steps=6)


def test_resumed_equals_uninterrupted(place, runs):
    whole = json.loads((place / "whole/summary.json").read_text())
    assert whole["complete"] and whole["heldout_nll"] > 0 and runs[0]["steps"] == 2
    assert len(losses(place / "whole")) == 6 and losses(place / "whole")[-1] < losses(place / "whole")[0]
    for x, y in zip(weights(place / "whole/model"), weights(place / "parts/model"), strict=True):
        np.testing.assert_array_equal(x, y)
    steps = [line["step"] for line in run_dir.read_lines(place / "parts/metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    board = EventAccumulator(str(place / "parts/tensorboard")).Reload()
    assert [e.step for e in board.Scalars("sft/loss")] == steps


def test_a_runs_own_config_starts_the_same_run(place, runs):
    """Options over it change what they name; the run that wrote it goes on where it stopped."""
    assert losses(place / "whole")[:2] == runs[1] == losses(place / "parts")[:2] and len(losses(place / "parts")) == 6
    steps = lambda name: json.loads((place / "parts" / name).read_text())["steps"]
    assert (steps("config.json"), steps("config.1.json")) == (6, 2) and not (place / "whole/config.1.json").exists()


def test_a_complete_run_keeps_its_options(place, runs):
    """Starting it again with others trains nothing, so config.json says what it was trained with."""
    out = place / "whole"
    before, trained = (out / "config.json").read_text(), losses(out)
    assert cli.main(["train", "sft", "--config", str(out / "config.json"), "--optim.lr", "9"]) == 0
    assert (out / "config.json").read_text() == before and losses(out) == trained


def test_a_complete_run_started_again_does_nothing(place, runs, capsys, monkeypatch):
    """Its own command, also with fewer steps: one line; no model is loaded, no file written. Other rows are refused."""
    shutil.copytree(place / "whole", out := place / "done")
    files = lambda: {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in out.rglob("*") if file.is_file()}
    before, own, rows = files(), replace(runs[2], out=str(out)), (place / "rows.jsonl").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(sft.common, "open_model", lambda *_: pytest.fail("the model was loaded"))
        for steps in (6, 2):
            summary = sft.main(replace(own, steps=steps))
            assert summary["complete"] and summary["checkpoint"] == str(out / "model") and summary["steps"] == 6
            [line] = capsys.readouterr().err.splitlines()
            assert line.startswith(f"{out}: the run is complete after 6 steps, its model is in {out}/model; a higher")
        (place / "rows.jsonl").write_text(rows.partition("\n")[2])
        with pytest.raises(ValueError, match="--data .* must have the 200 rows that the run was started with, got 199"):
            sft.main(own)
    (place / "rows.jsonl").write_text(rows)
    assert files() == before


def test_a_complete_run_knows_its_own_exports(place, runs, capsys, monkeypatch):
    """Those of another run, whole as they are, are written again, and once those of a version that kept no hashes."""

    def loaded(*_):
        raise ValueError("the model was loaded")

    shutil.copytree(place / "whole", out := place / "swapped")
    monkeypatch.setattr(sft.common, "open_model", loaded)
    shutil.rmtree(out / "model")
    shutil.copytree(place / "model", out / "model")
    with pytest.raises(ValueError, match="^the model was loaded"):
        sft.main(replace(runs[2], out=str(out)))
    said = f"{out}/model: must be what the run exported, got another manifest.json; it is written again"
    assert said in capsys.readouterr().err
    shutil.rmtree(out)
    shutil.copytree(place / "whole", out)
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").write_text(json.dumps({**summary, "exports": {}}))
    with pytest.raises(ValueError, match="^the model was loaded"):
        sft.main(replace(runs[2], out=str(out)))


@pytest.mark.long
def test_a_complete_run_whose_model_is_damaged_or_gone_writes_it_again(place, runs, capsys):
    shutil.copytree(place / "whole", out := place / "harmed")
    model = out / "model/model.safetensors"
    whole, own = model.read_bytes(), replace(runs[2], out=str(out))
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert sft.main(own)["complete"] and model.read_bytes() == whole
    assert "does not match manifest.json" in capsys.readouterr().err
    for gone in (lambda: shutil.rmtree(out / "model"), model.unlink):
        gone()
        assert sft.main(own)["complete"] and model.read_bytes() == whole
    assert len(losses(out)) == 6  # nothing was trained


def test_a_run_of_another_recipe_is_not_gone_on_with(place, runs, capsys):
    """It would train its weights with another objective from the middle on, and replace its model."""
    out = place / "whole"
    before, trained = (out / "config.json").read_text(), weights(out / "model")
    options = ["--model", f"{place}/model", "--data", f"{place}/rows.jsonl", "--out", str(out), "--length", "64"]
    code = cli.main(["train", "distill", *options, "--teacher", str(place / "model"), "--batch", "8", "--rows", "4"])
    assert code == 2 and f"--out {out}: holds a run of sft, which distill cannot go on with" in capsys.readouterr().err
    assert (out / "config.json").read_text() == before
    for x, y in zip(weights(out / "model"), trained, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_the_weight_average_is_exported(place, runs, monkeypatch):
    """And goes on from the weights themselves."""
    trained, export = [], learner.export

    def seen(own, *args, **more):
        trained.append([np.asarray(x) for x in jax.tree.leaves(learner.weights(own))])
        return export(own, *args, **more)

    monkeypatch.setattr(learner, "export", seen)
    averages = [weights(place / "model")]
    for steps in (1, 2):
        sft.main(config(place, "average", steps=steps, optim=Optimizer(lr=1e-2, ema=0.75)))
        averages.append(weights(place / "average/model"))
    for old, new, raw in zip(averages, averages[1:], trained, strict=False):
        for a, b, got in zip(old, raw, new, strict=True):
            np.testing.assert_allclose(got, 0.75 * a + 0.25 * b, atol=1e-6)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(averages[0], trained[0], strict=True))
    for a, b in zip(trained[1], weights(place / "two"), strict=True):  # of a run without an average
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.long
def test_an_offloaded_run_resumes_exactly(place):
    """With its masters and 8-bit moments on the host; its options cannot change on the way."""
    optim = Optimizer(lr=1e-2, offload=True, state="float8", gradients="bfloat16")
    one = config(place, "offloaded", steps=4, optim=optim)
    assert sft.main(one)["complete"]
    sft.main(config(place, "offloaded-parts", steps=2, optim=optim))
    again = config(place, "offloaded-parts", steps=4, optim=optim)
    with pytest.raises(ValueError, match="--optim.offload true -> false"):
        sft.main(replace(again, optim=replace(optim, offload=False)))
    sft.main(again)
    assert losses(place / "offloaded")[-1] < losses(place / "offloaded")[0]
    for x, y in zip(weights(place / "offloaded/model"), weights(place / "offloaded-parts/model"), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.mesh
def test_training_is_the_same_on_a_mesh_and_resumes_on_another(place):
    """One option: the numbers stay, and a state saved on one mesh is taken up on the next."""
    one = sft.main(config(place, "one", steps=4))
    sft.main(config(place, "mesh", steps=2, mesh=Layout(fsdp=2, cp=2, tp=2)))
    on = sft.main(config(place, "mesh", steps=4, mesh=Layout(dp=4, tp=2)))
    np.testing.assert_allclose(on["loss"], one["loss"], rtol=1e-4)
    with pytest.raises(ValueError, match=r"--rows must be a multiple of dp x fsdp x ep = 8, got 4"):
        sft.main(config(place, "bad", mesh=Layout(fsdp=8)))
    with pytest.raises(ValueError, match="mesh: dp 16 needs 16 devices, got 8"):
        sft.main(config(place, "bad", rows=16, mesh=Layout(dp=16)))


@pytest.mark.long
def test_experts_can_be_balanced(place):
    """The terms are in the loss and in the log; held-out rows are measured without them."""
    tiny.model(
        place / "mixture", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    mixture = config(place, "balanced", model=str(place / "mixture"), steps=2, heldout=str(place / "rows.jsonl"))
    sft.main(replace(mixture, balance=Balance(load=0.5, z=0.1)))
    told = next(line for line in run_dir.read_lines(place / "balanced/metrics.jsonl") if "loss" in line)
    total = told["nll"] + 0.5 * told["balance_load"] + 0.1 * told["balance_z"]
    np.testing.assert_allclose(told["loss"], total, rtol=1e-4)
    assert told["balance_load"] > 0 and told["expert_load"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_train_over_frozen_weights(place, dora):
    """Resumed as uninterrupted; the model written is the base with the adapters written merged into it."""
    tiny.model(place / "half", torch_dtype="bfloat16")
    spec = Lora(rank=4, alpha=8, targets=("q", "down"), dora=dora)
    heldout, name = str(place / "rows.jsonl"), "dora" if dora else "adapted"
    adapting = config(place, name, model=str(place / "half"), steps=4, lora=spec, heldout=heldout, save_every=2)
    whole = sft.main(adapting)
    when = (place / name / "adapter/manifest.json").stat().st_mtime_ns
    assert sft.main(adapting) == whole and (place / name / "adapter/manifest.json").stat().st_mtime_ns == when
    assert losses(place / name)[-1] < losses(place / name)[0] and whole["heldout_nll"] > 0
    tiny.cut_off(place / name, halves := place / f"halves-{name}", 2)
    sft.main(replace(adapting, out=str(halves)))
    settings, base = hf.load(place / "half", dtype=None)
    assert {x.dtype.name for x in jax.tree.leaves(base)} == {"bfloat16"}
    read, adapters = peft.load(place / name / "adapter", settings)
    assert read == spec
    again = peft.load(halves / "adapter", settings)[1]
    written = hf.load(place / name / "model", dtype=None)[1]
    merged = lora.merge(base, adapters, spec)
    for one, other in ((adapters, again), (merged, written)):
        for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
            np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(written["embed"], base["embed"])
    with pytest.raises(ValueError, match="other options, --lora.rank 4 -> 2, which its state does not fit"):
        sft.main(replace(adapting, out=str(halves), lora=replace(spec, rank=2)))
    change = f"--lora.dora {str(dora).lower()} -> {str(not dora).lower()}"
    with pytest.raises(ValueError, match=f"other options, {change}, which its state does not fit"):
        sft.main(replace(adapting, out=str(halves), lora=replace(spec, dora=not dora)))


def test_adapters_that_could_not_be_written_are_refused_before_training(place):
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    tiny.model(place / "gates", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **experts)
    with pytest.raises(ValueError, match="adapters of experts must be of expert_down, expert_gate, expert_up"):
        sft.main(config(place, "gated", model=str(place / "gates"), lora=Lora(rank=2, targets=("expert_gate",))))
    assert not (place / "gated/state").exists()


@pytest.mark.long
def test_ctrl_c_leaves_a_checkpoint_to_resume_from(place):
    out = place / "stopped"
    command = [
        sys.executable, "-m", "areax", "train", "sft", "--model", str(place / "model"), "--out", str(out),
        "--data", str(place / "rows.jsonl"), "--steps", "100000", "--batch", "8", "--length", "64", "--rows", "4",
        "--save-every", "1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ})
    metrics = out / "metrics.jsonl"
    jobs.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    hf.load(out / "model")
    with orbax.open_store(out / "state") as store:
        stopped = store.latest
    assert stopped >= 3
    done = sft.main(config(place, "stopped", steps=stopped + 1))
    assert done["steps"] == stopped + 1 and done["complete"]


@pytest.mark.slow
def test_ctrl_c_in_the_last_evaluation_ends_it_and_loses_no_step(place, monkeypatch, capsys):
    """The state is saved before, and the run that goes on evaluates."""
    merge, save, seen = offline.common.merge, orbax.Store.save, []

    def saved(store, version, *state):
        seen.append(version)
        return save(store, version, *state)

    def interrupted(*reports):  # at the second batch of held-out rows
        seen.append("batch")
        os.kill(os.getpid(), signal.SIGINT)
        return merge(*reports)

    held = config(place, "held", steps=2, heldout=str(place / "rows.jsonl"))
    with monkeypatch.context() as patch:
        patch.setattr(orbax.Store, "save", saved)
        patch.setattr(offline.common, "merge", interrupted)
        stopped = sft.main(held)
    said = capsys.readouterr().err
    assert said.index("sft 2/2") < said.index("sft evaluating 200 rows")
    assert seen == [2, "batch"] and not stopped["complete"] and "heldout_nll" not in stopped
    done = sft.main(held)
    assert done["complete"] and done["heldout_nll"] > 0


@pytest.mark.slow
def test_a_state_is_saved_after_the_line_of_its_step(place, monkeypatch):
    """A run that is killed then has both, and the resumed one does not lack a line."""
    seen, save = [], orbax.Store.save

    def saved(store, version, *state):
        seen.append((version, len(losses(place / "lines"))))
        return save(store, version, *state)

    monkeypatch.setattr(orbax.Store, "save", saved)
    sft.main(config(place, "lines", steps=3, save_every=1))
    assert seen == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.slow
def test_the_terminal_says_what_a_run_does_and_that_it_learns_nothing(place, capsys):
    sft.main(config(place, "frozen", steps=2, optim=Optimizer(lr=0.0), heldout=str(place / "rows.jsonl")))
    said = capsys.readouterr().err
    for begin in (f"loading {place}/model, ", "sft compiling the first step", "sft evaluating 200 rows", "writing "):
        assert re.search(rf"^{re.escape(begin)}.*\.\.\.$", said, re.M), said
    assert said.count("sft step 1: the weights did not change (update_ratio 0; alarm: update_ratio is 0): look at") == 1
    assert "What to look at" in (place / "frozen/report.html").read_text()


@pytest.mark.long
def test_all_turns_of_a_conversation_are_learnt(place):
    """In one sequence each, at the loss that the turns have one by one."""
    say = lambda *texts: [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, texts, strict=False)
    ]
    talks = [say("1+1", "2", "2+2", "4"), say("3+4", "7", "1+7", "8", "0+0", "0"), say("5+5", "10")]
    tiny.rows(place / "talks.jsonl", [{"messages": talk} for talk in talks])
    parts = [{"messages": talk[:i]} for talk in talks for i in range(2, len(talk) + 1, 2)]
    tiny.rows(place / "turns.jsonl", parts)
    runs = {}
    for name, learn in (("talks", "all"), ("turns", "last")):
        data = str(place / f"{name}.jsonl")
        run = config(place, f"{name}-{learn}", data=data, heldout=data, learn=learn, steps=1)
        runs[name, learn] = sft.main(replace(run, optim=Optimizer(lr=0.0)))["heldout_nll"]
    # 6 answers, of as many tokens either way; answers that are not the last count for nothing under "last"
    assert runs["talks", "all"] == pytest.approx(runs["turns", "last"], rel=1e-5)
    tokens = tokenizer.load(place / "model")
    learnt = lambda learn, talk: offline.Demonstrations(tokens, learn)({"messages": talk}).mask.sum()
    assert [learnt("last", talk) for talk in talks] == [learnt("last", talk[-2:]) for talk in talks]
    assert [learnt("all", talk) // learnt("last", talk) for talk in talks] == [2, 3, 1]


@pytest.mark.slow
def test_too_long_rows_are_refused_or_left_out(place, capsys):
    tiny.rows(place / "long.jsonl", [{"prompt": "1+1", "completion": "2" * n} for n in (1, 30, 2, 40)])
    long = config(place, "long", data=str(place / "long.jsonl"), length=24, steps=2, batch=4)
    with pytest.raises(
        ValueError, match="long.jsonl:2: a row must fit in --length 24 tokens, got 42; or use --too-long drop"
    ):
        sft.main(replace(long, out=str(place / "refused")))
    assert sft.main(replace(long, too_long="drop"))["complete"]
    assert capsys.readouterr().err.splitlines()[0] == "2 of 4 rows are left out, longer than --length 24"
    with pytest.raises(ValueError, match="all 4 rows are left out, longer than --length 8; at least one is needed"):
        sft.main(replace(long, too_long="drop", length=8))


def test_a_row_function_may_skip_records(place, capsys):
    (place / "own.py").write_text("def row(record):\n    return None if record['prompt'] == '1' else record\n")
    tiny.rows(place / "some.jsonl", [{"prompt": str(i), "completion": "2"} for i in range(5)])
    rows = row_reader.read(str(place / "some.jsonl"), f"{place}/own.py:row", 3)
    assert [row["prompt"] for row in rows] == ["0", "2"]
    assert capsys.readouterr().err == f"1 of 3 rows are left out, by {place}/own.py:row\n"
    assert len(row_reader.read(str(place / "some.jsonl"), f"{place}/own.py:row", quiet=True)) == 4
    assert capsys.readouterr().err == ""
    made = row_reader.read(str(place / "some.jsonl"), "areax.adapters.data.formats:auto")
    assert made[0] == {"prompt": "0", "completion": "2", "answer": "2"}


def test_bad_input_gives_a_one_line_error(place):
    tiny.rows(place / "no.jsonl", [{"prompt": "1+1"}])
    with pytest.raises(ValueError, match="completion"):
        sft.main(config(place, "bad", data=str(place / "no.jsonl")))
    with pytest.raises(ValueError, match="must fit in --length 8 tokens"):
        sft.main(config(place, "bad", length=8))
    (place / "file").write_text("")
    with pytest.raises(ValueError, match="--out must be a directory"):
        sft.main(config(place, "file"))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ValueError, match=f"--track.prometheus must be a free port of 127.0.0.1, got {port}"):
            sft.main(config(place, "taken", track=Sinks(prometheus=port)))
    assert not (place / "taken").exists()
