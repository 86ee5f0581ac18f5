"""Runs that are taken up after something was replaced under the same path: one line, nothing touched, and with the
former content they end as if nothing had happened."""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import servers
import tiny

from areax.adapters import cli

ROW = {"prompt": "1+1", "completion": "2", "chosen": "2", "rejected": "3", "answer": "2"}
ROW |= {"completions": ["2", "3"], "labels": [True, False]}
CODE = {
    "own.py": "import helper\ndef reward(text, row):\n    return len(set(text)) * helper.ONE\n",
    "helper.py": "ONE = 1.0\n",
    "rows.py": "def row(record):\n    return {**record, 'made': 1}\n",
    "play.py": "from areax.rollout import workflows\n"
    "async def play(generate, row, *, tokenizer, reward, sampling):\n"
    "    return await workflows.single_turn(generate, row, tokenizer=tokenizer, reward=reward, sampling=sampling)\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models, rows and code; tests run in it."""
    path = tmp_path_factory.mktemp("replaced")
    for seed, name in enumerate(("model", "teacher", "critic", "served")):
        tiny.model(path / name, seed=seed, tie_word_embeddings=False)
        (path / name / "manifest.json").unlink()  # as other tools write them: with it, loading refuses other bytes
    rows = [{**ROW, "prompt": f"{i}+{i}", "id": i} for i in range(8)]
    tiny.rows(path / "rows.jsonl", rows)
    tiny.rows(path / "more.jsonl", rows[:4])
    (path / "folder").mkdir()
    tiny.rows(path / "folder/train.jsonl", rows)
    for name, text in CODE.items():
        (path / name).write_text(text)
    with contextlib.chdir(path), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.setenv("PYTHONPATH", f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")  # of reward workers
        yield path


def words(recipe, out, options):
    """The arguments of a run of two steps in `out`, with these options."""
    given = {"model": "model", "data": "rows.jsonl", "out": out, "steps": 2, "length": 32, "rows": 4, "save-every": 1}
    of_rl = {"groups": 2, "group-size": 2, "max-concurrent": 4, "sampling.max-new-tokens": 4, "eta": 0}
    given |= of_rl | {"reward": "own.py:reward"} if recipe in ("grpo", "ppo") else {"batch": 4}
    given |= {"optim.lr": 1e-2, **options}
    return ["train", recipe, *(str(word) for name, value in given.items() for word in (f"--{name}", value))]


def begun(recipe, out, options):
    """Trains two steps in `out whole`; `out` is the same run, killed in its second step."""
    assert cli.main(words(recipe, f"{out} whole", options)) == 0
    tiny.cut_off(Path(f"{out} whole"), Path(out), 1)
    config = Path(out, "config.json")
    config.write_text(config.read_text().replace(f"{out} whole", out))


def files(path):
    return {file: file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


@contextlib.contextmanager
def in_place(change, path):
    """What is at a path is another content for a while, of the same times."""
    path, kept = Path(path), Path("kept")
    (shutil.copytree if path.is_dir() else shutil.copy2)(path, kept)
    times = {file: file.stat().st_mtime_ns for file in [path, *path.rglob("*")]}
    try:
        change(path)
        for file, time in times.items():
            if file.exists():
                os.utime(file, ns=(time, time))
        yield
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        kept.rename(path)


def bit(folder):
    """One bit of one tensor."""
    file = next(folder.glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def written(name, old, new):
    """Another text in a file of a folder, or in the file."""

    def change(path):
        file = path / name if name else path
        assert old in (text := file.read_text())
        file.write_text(text.replace(old, new, 1))

    return change


def reordered(path):
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def appended(path):
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[0])


def foldered(path):
    """A folder of a data set in place of a file of rows."""
    path.unlink()
    shutil.copytree("folder", path)
    tiny.rows(path / "train.jsonl", [{**ROW, "id": i} for i in range(8)])


def vocabulary(folder):
    """Two tokens change places."""
    file = folder / "tokenizer.json"
    text = file.read_text()
    assert text.count('"0":') == text.count('"1":') == 1
    file.write_text(text.replace('"0":', '"?":').replace('"1":', '"0":').replace('"?":', '"1":'))


def template(folder):
    file = folder / "chat_template.jinja"
    file = file if file.is_file() else folder / "tokenizer_config.json"
    written("", "im_start|>", "im_start|> ")(file)


BASE = {
    "weights": (bit, "model", "--model model: weights must be"),
    "config": (written("config.json", "10000.0", "20000.0"), "model", "--model model: config.json must be"),
    "tokenizer": (vocabulary, "model", "--model model: tokenizer must be"),
    "template": (template, "model", "--model model: chat template must be"),
}
ROWS = {
    "row": (written("", '"2"', '"4"'), "rows.jsonl", "--data rows.jsonl must have the rows that"),
    "order": (reordered, "rows.jsonl", "--data rows.jsonl must have the rows that"),
    "more rows": (appended, "rows.jsonl", "--data rows.jsonl must have the 8 rows that"),
    "a folder of rows": (foldered, "rows.jsonl", "--data rows.jsonl must have the rows that"),
}


def check(recipe, out, options, cases, capsys):
    """Each is refused in one line that names it; then the run goes on, to the bytes of one that nothing happened to."""
    begun(recipe, out, options)
    before = files(out)
    for name, (change, path, said) in cases.items():
        capsys.readouterr()
        with in_place(change, path):
            assert cli.main(words(recipe, out, options)) == 2, name
        lines = [line for line in capsys.readouterr().err.splitlines() if not re.search("loading|rows are", line)]
        assert len(lines) == 1 and said in lines[0] and "or name another --out" in lines[0], (name, lines)
        assert files(out) == before, name
    assert cli.main(words(recipe, out, options)) == 0
    assert exported(out) == exported(f"{out} whole")


def exported(out):
    return {file.name: data for file, data in files(f"{out}/model").items()}


@pytest.mark.slow
def test_supervised(place, capsys):
    check("sft", "sft", {"row": "rows.py:row"}, {
        **BASE, **ROWS, "code of rows": (written("", "1", "2"), "rows.py", "--row rows.py:row: code must be"),
    }, capsys)  # fmt: skip


@pytest.mark.long
def test_a_mixture(place, capsys):
    data = "a=rows.jsonl:3,b=more.jsonl:1"
    check("sft", "mixture", {"data": data}, {
        "row": (written("", '"2"', '"4"'), "more.jsonl", f"--data {data} must have the rows that"),
        "order": (reordered, "more.jsonl", f"--data {data} must have the rows that"),
        "more rows": (appended, "more.jsonl", " must have the run's sources, weights and rows"),
    }, capsys)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["dpo", "rewardmodel", "prm"])
def test_preferences_and_process_rewards(place, capsys, recipe):
    """The base is DPO's reference."""
    check(recipe, recipe, {}, {**BASE, "row": ROWS["row"]}, capsys)


@pytest.mark.long
def test_adapters(place, capsys):
    check("sft", "adapters", {"lora.rank": 2}, BASE, capsys)


@pytest.mark.long
def test_distillation(place, capsys):
    check("distill", "distill", {"teacher": "teacher"}, {
        "weights": BASE["weights"],
        "template": BASE["template"],
        "teacher": (bit, "teacher", "--teacher teacher: weights must be"),
        "its config": (written("config.json", "10000.0", "2.0"), "teacher", "--teacher teacher: config.json must be"),
    }, capsys)  # fmt: skip


@pytest.mark.long
def test_reinforcement_learning(place, capsys):
    """With a reference, a critic, a teacher, and code of its own for rewards, episodes and rows."""
    options = {
        "objective.kl.coef": 0.1, "critic.model": "critic", "teacher": "teacher", "distill-coef": 0.1,
        "workflow": "play.py:play", "row": "rows.py:row",
    }  # fmt: skip
    cases = {
        **BASE, **ROWS,
        "critic": (bit, "critic", "--critic.model critic: weights must be"),
        "teacher": (bit, "teacher", "--teacher teacher: weights must be"),
        "reward": (written("", "return len", "return -len"), "own.py", "--reward own.py:reward: code must be"),
        "a comment": (written("", "\n", "  # as in the paper\n"), "own.py", "--reward own.py:reward: code must be"),
        "helper": (written("", "1.0", "2.0"), "helper.py", "--reward own.py:reward: what its code imports must be"),
        "workflow": (written("", "return", "return  "), "play.py", "--workflow play.py:play: code must be"),
        "rows": (written("", "1", "2"), "rows.py", "--row rows.py:row: code must be"),
    }  # fmt: skip
    with servers.embedded("model", slots=4, context=64) as remote:
        check("ppo", "ppo", {**options, "servers": remote.url}, cases, capsys)


@pytest.mark.long
def test_a_changed_reward_goes_on_as_a_copy_and_says_so(place, capsys):
    """As the line says that refuses it."""
    with servers.embedded("model", slots=4, context=64) as remote:
        options = {"servers": remote.url}
        begun("grpo", "copy", options)
        with in_place(written("", "return len", "return -len"), "own.py"):
            assert cli.main(words("grpo", "copy", options)) == 2
            assert "to go on with this one, name a copy of it by --reward" in capsys.readouterr().err
            shutil.copy("own.py", "newer.py")
            assert cli.main(words("grpo", "copy", {**options, "reward": "newer.py:reward"})) == 0
        assert "--reward own.py:reward -> newer.py:reward" in capsys.readouterr().err
    assert json.loads(Path("copy/summary.json").read_text())["complete"]
    assert exported("copy") != exported("copy whole")


@pytest.mark.long
def test_a_served_teacher(place, capsys):
    """The server says what weights it has; where it is does not count, if the option says so."""
    options = {"objective.top-k": 4}
    with servers.embedded("served", slots=4, context=64) as remote:
        begun("distill", "served run", {**options, "teachers": remote.url})
        other = {**options, "teachers": remote.url}
        remote.ok("/update_weights_from_disk", {"model_path": str(place / "teacher"), "weight_version": "other"})
        before = files("served run")
        assert cli.main(words("distill", "served run", other)) == 2
        [line] = capsys.readouterr().err.splitlines()[-1:]
        assert f"--teachers {remote.url}: weights in layout" in line and "must be as when the run began" in line
        assert files("served run") == before
        remote.ok("/update_weights_from_disk", {"model_path": str(place / "served"), "weight_version": "former"})
        assert cli.main(words("distill", "served run", other)) == 0
    assert exported("served run") == exported("served run whole")
