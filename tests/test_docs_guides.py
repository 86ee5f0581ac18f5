"""The guides that change nothing in the library, followed to the letter; and the skills made from all guides."""

import contextlib
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import types
from pathlib import Path

import datasets
import gateways
import numpy as np
import PIL.Image
import pytest
import servers
import skills
import tiny
import yaml

from areax import models
from areax.adapters import cli, hf, safetensors, tokenizer
from areax.adapters.tracking import run_dir
from areax.rollout import sandbox
from areax.rollout.servers import local

BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.S)
NAMED = re.compile(r"`([\w/]+\.(?:py|jsonl))`")
# With CI set, Hypothesis has no deadline, which a busy machine would miss.
ENVIRONMENT = {**os.environ, "CI": "true", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

# Runs pytest in each folder, in a copy of a process that has imported everything.
IN_EACH = """
import os, sys
import hypothesis, numpy, pytest

def ends(folder):
    if not (child := os.fork()):
        os._exit(pytest.main(["-p", "no:cacheprovider", "-W", "error", "-q", "-x", folder]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print([ends(folder) for folder in sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random byte-level model."""
    tokens = tokenizer.byte_level()
    config = models.config_from_hf(
        {**tiny.HF, "max_position_embeddings": 1024, "vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id}
    )
    path = tmp_path_factory.mktemp("guides") / "model"
    return hf.save(path, config, tiny.weights(models.table(config), 0.2), tokenizer=tokens)


@pytest.fixture(scope="module")
def url(model):
    with servers.embedded(model) as server:
        yield server.url


@pytest.fixture
def here(tmp_path, monkeypatch, model, url):
    """A folder with only the model. Commands that would start a server share one, since starting takes the longest."""

    @contextlib.asynccontextmanager
    async def shared(*_):
        yield types.SimpleNamespace(urls=[url], restart=None)

    monkeypatch.setattr(local, "servers", shared)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    shutil.copytree(model, "model")


def page(name):
    return (skills.DOCS / f"{name}.md").read_text()


def follow(name):
    """Follows a page: a block with a language is written to the file named last, one without is run."""
    text, at, file = page(name), 0, ""
    for block in BLOCK.finditer(text):
        language, content = block.groups()
        file = ([file] + NAMED.findall(text[at : block.start()]))[-1]
        at = block.end()
        if language:
            assert not Path(file).exists(), file
            Path(file).write_text(content)
        else:
            for line in content.replace("\\\n", "").splitlines():
                run(line)


def run(line):
    """Runs a line of shell that must succeed; `areax` runs in this process."""
    words = shlex.split(line)
    with pytest.MonkeyPatch.context() as patch:
        if words[0] == "PYTHONPATH=.":
            patch.syspath_prepend(str(Path.cwd()))
            words = words[1:]
        if words[0] == "areax":
            assert cli.main(words[1:]) == 0, line
            return
    if words[0] == "python" and words[1].endswith(".py"):
        runpy.run_path(words[1])
        return
    assert words[:3] == ["python", "-m", "pytest"], line
    done = pytest_(*words[3:])
    assert done.returncode == 0, done.stdout


def pytest_(*arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.docs
def test_files_written_by_new_work_unchanged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind in ("workflow", "reward", "dataset", "recipe"):
        assert cli.main(["new", kind, f"my_{kind}", "--out", "mine"]) == 0
        out = capsys.readouterr().out
        assert f"wrote mine/my_{kind}.py\nwrote mine/test_my_{kind}.py\n" in out
        assert (
            f"python -m pytest mine/test_my_{kind}.py  # pip install pytest\n" in out and f" mine/my_{kind}.py" in out
        )
    assert len(list(Path("mine").iterdir())) == 8
    body = Path("mine/my_workflow.py").read_text().partition("async def my_workflow(")[2]
    assert body.count("\n") <= 25
    done = pytest_("-q", "mine")
    assert done.returncode == 0, done.stdout


def test_new_overwrites_nothing_and_refuses_names_that_cannot_be_imported(tmp_path, capsys):
    def refused(*words):
        assert cli.main(["new", *words, "--out", str(tmp_path)]) == 2
        return capsys.readouterr().err

    (tmp_path / "test_mine.py").write_text("# mine")
    assert "test_mine.py already exists" in refused("reward", "mine")
    for name in ("my-reward", "1st", "class", "json", "areax", "../up"):
        assert f"got {name!r}; use my_reward, for example" in refused("reward", name)
    assert "'recipe'" in refused("metric", "mine")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["# mine"]


def scored(out, run=""):
    """Asserts that both evaluation rows and each step of the run have a reward, and that the model was written."""
    assert "samples: 2\nunscorable: 0\n" in out
    if run:
        steps = [line for line in run_dir.read_lines(f"{run}/metrics.jsonl") if line["kind"] == "grpo"]
        assert [math.isfinite(step["reward"]) for step in steps] == [True] * 2
        assert Path(f"{run}/model").is_dir()


@pytest.mark.docs
def test_the_workflow_guide(here, capfd):
    follow("add-a-workflow")
    scored(capfd.readouterr().out, "runs/guess")
    assert Path("runs/guess/report.html").is_file()


@pytest.mark.docs
def test_the_reward_guide(here, capfd):
    follow("add-a-reward")
    scored(capfd.readouterr().out)


@pytest.mark.docs
def test_the_data_set_guide(here, capfd):
    follow("add-a-data-set")
    assert "1 of 3 rows are left out, by desk.py:row" in capfd.readouterr().err
    assert Path("runs/desk/model").is_dir() and Path("runs/tickets/model").is_dir()


@pytest.mark.docs
def test_the_agent_guide(here, capfd):
    follow("train-an-agent")
    scored(capfd.readouterr().out, "runs/clerk")


@pytest.mark.docs
def test_the_environment_guide(here, capfd):
    follow("train-on-an-environment")
    assert "rows: 4\nsamples: 4\nunscorable: 0\n" in capfd.readouterr().out and Path("runs/hotter/model").is_dir()


@pytest.mark.docs
@pytest.mark.skipif(not sandbox.isolation().files, reason="needs namespaces")
def test_the_terminal_guide(here, capfd):
    Path("model/chat_template.jinja").write_text(gateways.TEMPLATE)
    follow("train-in-a-terminal")
    assert "accuracy" in capfd.readouterr().out and Path("runs/terminal/model").is_dir()


@pytest.mark.docs
def test_the_image_guide(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    follow("train-on-images")
    assert "samples: 8\nunscorable: 0\n" in capfd.readouterr().out
    before, *after = (safetensors.read(path) for path in ("model", "runs/sft/model", "runs/grpo/model"))
    for one in after:
        moved = {name for name in before if not np.array_equal(before[name], one[name])}
        assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)
    # The row function reads records as the hub has them, images in a table of `datasets`.
    pictures = [PIL.Image.new("RGB", (24, 24), colour) for colour in ("red", "green")]
    columns = {"images": [[one] for one in pictures], "problem": ["<image>Find x.", "Find y"], "answer": ["2", "1"]}
    features = datasets.Features(
        images=datasets.List(datasets.Image()), problem=datasets.Value("string"), answer=datasets.Value("string")
    )
    datasets.Dataset.from_dict(columns, features).to_parquet("vqa.parquet")
    run(
        "areax eval --model model --data vqa.parquet --row vqa.py:row --sampling.max-new-tokens 4 "
        "--reward areax.rollout.tasks.competition_math:reward"
    )
    assert "samples: 2\nunscorable: 0\n" in capfd.readouterr().out


@pytest.mark.docs
def test_the_tiny_model_of_the_command_line(tmp_path):
    tiny.rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)])
    script = next(content for _, content in BLOCK.findall(page("command-line")) if "--init random" in content)
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=ENVIRONMENT | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    config = hf.load(tmp_path / "runs/tiny/model")[0]
    assert config.layers == 2
    assert config.eos == (2,)  # the tokenizer's


@pytest.mark.docs
def test_the_testing_guide(tmp_path, monkeypatch):
    """The page's test passes, and fails for each of the faults that the page lists."""
    monkeypatch.chdir(tmp_path)
    follow("write-tests")
    own, faults = Path("whiten.py"), re.findall(r"^\| `(.*)` \| `(.*)` \|$", page("write-tests"), re.M)
    right = own.read_text()
    assert len(faults) == 5

    def broken(found, fault):
        assert right.count(found) == 1, found
        folder = Path(tempfile.mkdtemp(dir="."))
        shutil.copy("test_whiten.py", folder)
        (folder / own).write_text(right.replace(found, fault))
        return folder

    folders = [str(broken(*fault)) for fault in faults]
    done = subprocess.run([sys.executable, "-c", IN_EACH, *folders], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str([1] * 5), done.stdout + done.stderr


def test_the_testing_guide_says_how_to_run_the_tests_of_each_mark():
    options = tomllib.loads((skills.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = [line.partition(":")[0] for line in options["markers"] if not line.startswith("sweep:")]  # has no target
    table = dict(re.findall(r"^\| `(\w+)` \| .* \| `(.*)` \|$", page("write-tests"), re.M))
    assert sorted(table) == sorted(marks)
    targets = re.findall(r"^(test-\w+):", (skills.ROOT / "Makefile").read_text(), re.M)
    for mark, command in table.items():
        assert command.removeprefix("make ") in targets or command.endswith(f"python -m pytest -m {mark}"), mark
        assert f"not {mark}" in options["addopts"], mark


@pytest.mark.parametrize("file", sorted(skills.SKILLS.glob("*/SKILL.md")), ids=lambda file: file.parent.name)
def test_a_skill_equals_its_page(file):
    text = file.read_text()
    assert text == skills.skill(file), "run `make skills`"
    matter = yaml.safe_load(text.split("---\n")[1])
    assert matter.keys() == {"name", "description"} and matter["name"] == file.parent.name
    links = re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S))
    assert [link for link in links if not (file.parent / link).exists()] == []
    assert 0 < len(matter["description"]) <= 1024
    for link in re.findall(r"\]\(([^):#]+)\)", BLOCK.sub("", text)):
        assert (file.parent / link).exists(), link


def test_every_guide_is_a_skill_and_is_linked_from_readme_and_agents():
    verbs = "add|commit|create|debug|review|train|translate|upgrade|write"
    guides = {file.stem for file in skills.DOCS.glob("*.md") if re.match(rf"({verbs})-", file.name)}
    assert guides == {file.parent.name for file in skills.SKILLS.glob("*/SKILL.md")}
    for file in ("README.md", "AGENTS.md"):
        text = (skills.ROOT / file).read_text()
        assert not [guide for guide in guides if f"(docs/{guide}.md)" not in text], file
