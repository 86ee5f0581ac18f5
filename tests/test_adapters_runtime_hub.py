"""Models by names on the hub: from its cache without network, downloaded from a server, or one line if neither."""

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny
from huggingface_hub import constants

from areax.adapters import cli, hf, tokenizer
from areax.adapters.runtime import hub

NAME = "owner/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "model"
    tiny.model(path)
    (path / "manifest.json").unlink()
    return path


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache of the hub, which is offline."""
    path = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    return path


def cached(model, cache, *names):
    """The folder of the model in the cache, as the hub's client lays it out; of it only the files named, if any are."""
    place = cache / f"models--{NAME.replace('/', '--')}"
    folder = place / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(COMMIT)
    for file in model.iterdir():
        if not names or file.name in names:
            shutil.copyfile(file, folder / file.name)
    return folder


def test_a_path_is_itself(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/tiny").mkdir(parents=True)
    for path in (NAME, "model", "./a/b", "/a/b", "a/b/c", tmp_path / "a"):  # a folder of that name wins
        assert hub.folder(path) == os.fspath(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/owner/tiny", "~/a", Path("~/a")):
        assert hub.folder(path) == os.fspath(path).replace("~", str(tmp_path))


def test_the_folder_of_a_run_is_refused_with_that_of_its_model(tmp_path):
    """As its own config.json has options, all a command could say was that they name no family."""
    (tmp_path / "state").mkdir()
    assert hub.folder(tmp_path) == str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path}: .*got the folder of a run; name its model, {tmp_path}/model,"):
        hub.folder(tmp_path)


def test_what_cannot_be_a_path_is_one_line(capsys, tmp_path):
    rows = tiny.rows(tmp_path / "rows.jsonl", [ROW] * 4)
    for name in ("~nosuchuser/tiny", "owner/" + "x" * 300):
        words = ["train", "sft", "--model", name, "--data", str(rows), "--out", str(tmp_path / "out")]
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert name in said and said.count("\n") == 1, said


def test_a_cached_model_needs_no_network(cache, model):
    folder = cached(model, cache)
    assert hub.folder(NAME) == hub.folder(NAME, weights=True) == str(folder)
    assert tokenizer.load(NAME).get_vocab() == tokenizer.load(model).get_vocab()


def test_a_copy_without_weights_is_enough_for_what_reads_none(cache, model):
    folder = cached(model, cache, "config.json")
    assert hub.folder(NAME) == str(folder)
    with pytest.raises(ValueError, match="owner/tiny: no such folder here, and no complete copy in the hub's cache"):
        hub.folder(NAME, weights=True)
    with pytest.raises(ValueError, match="owner/tiny: no such folder here, and no complete copy"):
        tokenizer.load(NAME)
    shutil.rmtree(cache)
    folder = cached(model, cache, "config.json", "tokenizer.json", "tokenizer_config.json")
    (folder / hub.INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ValueError, match="no complete copy"):
        hub.folder(NAME, weights=True)
    shutil.copyfile(model / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    assert hub.folder(NAME, weights=True) == str(folder)


TRAIN = "--data ROWS --steps 1 --batch 2 --rows 1 --length 32 --out OUT"
COMMANDS = {
    "sft": f"train sft --model NAME {TRAIN}",
    "dpo": f"train dpo --model NAME {TRAIN}",
    "rewardmodel": f"train rewardmodel --model NAME {TRAIN}",
    "distill": f"train distill --model NAME --teacher NAME {TRAIN}",
    "plan": "plan sft --model NAME --length 32",
    "check": "check NAME",
    "convert": "convert NAME OUT",
}
ROW = {"prompt": "1+1", "answer": "2", "completion": "2", "chosen": "2", "rejected": "3"}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.wide] * (name == "dpo")) for name in COMMANDS  # the recipe of rewardmodel
])  # fmt: skip
def test_commands_take_the_names_of_models(capsys, cache, model, tmp_path, name):
    folder = cached(model, cache)
    rows = tiny.rows(tmp_path / "rows.jsonl", [ROW] * 4)
    places = {"NAME": NAME, "ROWS": str(rows), "OUT": str(tmp_path / "out")}
    assert cli.main([places.get(word, word) for word in COMMANDS[name].split()]) == 0, capsys.readouterr().err
    if name == "convert":
        assert hf.load(tmp_path / "out")[0] == hf.load(folder)[0]


def run(words, **environment):
    environ = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"} | environment
    return subprocess.run(
        [sys.executable, "-m", "areax", *words], env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.mark.long
def test_runs_and_evaluations_start_servers_of_them(cache, model, tmp_path):
    """In processes of their own, which start `areax serve`."""
    cached(model, cache)
    rows = tiny.rows(tmp_path / "rows.jsonl", [ROW] * 4)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    both = f"--model {NAME} --data {rows} --reward areax.rollout.rewards.match:exact --sampling.max-new-tokens 2"
    done = run(["eval", *both.split(), "--serve.context", "64", "--json"], **offline)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 4
    more = f"--steps 1 --groups 2 --group-size 2 --rows 2 --length 32 --lora.rank 2 --out {tmp_path}/out"
    done = run(["train", "grpo", *both.split(), *more.split(), "--serve.inside", "--serve.context", "64"], **offline)
    assert done.returncode == 0, done.stderr
    # adapters name their base as the user did
    assert json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    assert json.loads((tmp_path / "out/config.json").read_text())["model"] == NAME
    missing = run(["serve", "owner/other", "--port", "0"], **offline)
    assert missing.returncode == 2 and "\nowner/other: no such folder here, and no complete" in missing.stderr


@contextlib.contextmanager
def answering(model, name=NAME):
    """A hub on loopback that has one model; other names are 404."""
    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            path = self.path.partition("?")[0]
            if path == f"/api/models/{name}/revision/main":
                files = [{"rfilename": file.name} for file in model.iterdir()]
                return self.answer(json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode())
            if path == f"/api/models/{name}/tree/{COMMIT}":
                files = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                    for file in model.iterdir()
                ]
                return self.answer(json.dumps(files).encode())
            file = model / path.rpartition("/")[2]
            if path.startswith(f"/{name}/resolve/") and file.is_file():
                return self.answer(file.read_bytes(), etag=f'"{file.name}"')
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def answer(self, body, etag=""):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("X-Repo-Commit", COMMIT)
            if etag:
                self.send_header("ETag", etag)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.long
def test_a_model_that_is_not_cached_is_downloaded_once(model, tmp_path):
    with answering(model) as (url, asked):
        environment = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        plan = ["plan", "sft", "--model", NAME, "--length", "32"]
        first = run(plan, **environment)
        assert first.returncode == 0, first.stderr
        assert not any("safetensors" in path for path in asked)  # a plan needs no weights
        count = len(asked)
        assert run(plan, **environment).returncode == 0 and len(asked) == count  # the cache is enough
        check = run(["check", NAME], **environment)
        assert check.returncode == 0, check.stderr
        assert any("model.safetensors" in path for path in asked)


@pytest.mark.slow
def test_a_model_with_pickles_alone_is_one_line(model, tmp_path):
    shutil.copytree(model, tmp_path / "old")
    (tmp_path / "old/model.safetensors").rename(tmp_path / "old/pytorch_model.bin")
    with answering(tmp_path / "old") as (url, asked):
        done = run(["check", NAME], HF_ENDPOINT=url, HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_DISABLE_XET="1")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]  # after the client's progress
    assert last.startswith(f"{NAME}: weights must be in safetensors, of which the hub has none; fetch all files")
    assert not any(path.endswith(".bin") for path in asked)


@pytest.mark.long
def test_a_name_that_is_nowhere_is_one_line_within_seconds(model, tmp_path):
    with answering(model) as (url, _):
        began = time.monotonic()
        for words in (["check", "owner/other"], ["plan", "sft", "--model", "owner/other", "--length", "32"]):
            done = run(words, HF_ENDPOINT=url, HF_HUB_CACHE=str(tmp_path))
            [line] = [line for line in done.stderr.splitlines() if ": importing libraries" not in line]
            assert done.returncode == 2 and line.startswith(
                f"owner/other: neither a folder here nor a model that the hub, {url}, gives: "
            )
    done = run(["check", "owner/other"], HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_CACHE=str(tmp_path))
    assert done.returncode == 2 and "the hub, http://127.0.0.1:9, does not answer" in done.stderr
    assert time.monotonic() - began < 60
