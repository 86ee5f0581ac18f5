"""The command line as users see it: exit codes and one-line errors."""

import json
import os
import signal
import socket
import subprocess
import sys

import jax.numpy as jnp
import pytest
import tiny

from areax.adapters import cli, hf
from areax.core import losses
from areax.recipes import grpo


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.model(tmp_path_factory.mktemp("cli") / "model")


def bad(capsys, *argv):
    """Runs a command that must be rejected, and returns its one-line error."""
    assert cli.main([str(a) for a in argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    for name in ("serve", "convert", "check", "report", "eval"):
        with pytest.raises(SystemExit) as exit:
            cli.main([name, "--help"])
        assert not exit.value.code
    assert "--api-key" in capsys.readouterr().out


def test_errors_suggest_the_nearest_name_or_the_valid_values(capsys):
    assert "did you mean train?" in bad(capsys, "trian")
    assert bad(capsys, "dapo").endswith("unknown command 'dapo'; did you mean areax train dapo?\n")
    assert "did you mean grpo?" in bad(capsys, "train", "grp")
    assert "did you mean dapo?" in bad(capsys, "train", "dapoo")
    assert "did you mean --optim.lr?" in bad(capsys, "train", "sft", "--model", "x", "--data", "y", "--optim.lrr", "1")
    assert "--model" in bad(capsys, "train", "sft", "--data", "y")
    assert "abc" in bad(capsys, "train", "sft", "--model", "x", "--data", "y", "--steps", "abc")
    assert "'checkpoint', 'random'" in bad(capsys, "train", "sft", "--model", "x", "--data", "y", "--init", "no")
    assert "needs a recipe" in bad(capsys, "train")
    assert "did you mean grpo?" in bad(capsys, "train", "GRPO")
    assert bad(capsys, "serve") == "areax serve: needs PATH; see areax serve --help\n"
    assert bad(capsys, "convert") == "areax convert: needs SRC, DST; see areax convert --help\n"
    assert bad(capsys, "launch").startswith("areax launch: --processes must be")


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        (
            {"checkpoint": "o/model", "steps": 2, "complete": True, "seconds": 3.5, "heldout_rows": 4, "accuracy": 0.5,
             "counts": {"dropped": 1}, "heldout_loss": 0.25, "heldout_loss_max": 0.5, "report": "o/report.html"},
            "heldout_loss: 0.25\nsteps: 2\ncomplete: True\naccuracy: 0.5\ncheckpoint: o/model\nreport: o/report.html\n",
        ),
        (
            {"report": "r", "steps": 1, "accuracy": 1 / 3, "evaluation": {"a/accuracy": 0.5, "a/rows": 2}},
            "a/accuracy: 0.5\nsteps: 1\naccuracy: 0.3333\nreport: r\n",
        ),
        ({"steps": 2, "mine": [1, 2], "no": []}, "steps: 2\nmine: 1, 2\nno: none\n"),  # no summary.json
    ],
)  # fmt: skip
def test_a_run_ends_with_a_few_lines(capsys, tmp_path, summary, shown):
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    'Mine.'\n"
        f"def main(config):\n    return {summary!r}\n"
    )
    assert cli.main(["train", str(tmp_path / "own.py")]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("done, words", [(1, "1 step"), (3, "3 steps")])
def test_a_stopped_run_says_how_it_goes_on(capsys, tmp_path, done, words):
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    'Mine.'\n"
        f"def main(config):\n    return {{'steps': {done}, 'complete': False, 'report': 'r'}}\n"
    )
    assert cli.main(["train", str(tmp_path / "own.py")]) == 130
    assert capsys.readouterr().err.endswith(f"own.py: stopped after {words}; the same command goes on\n")


@pytest.mark.slow
def test_a_command_without_torch_prints_no_advice_of_transformers(model, tmp_path):
    program = (
        "import sys, importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "from areax.adapters import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    rows = tiny.rows(tmp_path / "rows.jsonl", [{"prompt": "1+1"}])
    words = ["train", "sft", "--model", model, "--data", rows, "--length", 32, "--rows", 1, "--batch", 1, "--steps", 1]
    done = subprocess.run([sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    first, *rest = done.stderr.splitlines()
    [line] = [line for line in rest if not line.startswith(first)]  # which a busy machine says again
    assert first == "areax train sft: importing libraries ..." and "a demonstration needs a completion" in line


def test_what_takes_long_to_import_is_said_once_and_not_with_help(capsys, monkeypatch):
    with cli._importing("train sft", ["--model", "m"]):
        assert capsys.readouterr().err == ""  # it is there
    monkeypatch.delitem(sys.modules, "jax")
    with cli._importing("train sft", ["--help-all"]):
        assert capsys.readouterr().err == ""
    with cli._importing("train sft", ["--model", "m"]):
        assert capsys.readouterr().err == "areax train sft: importing libraries ...\n"


def test_missing_and_truncated_checkpoints(capsys, model, tmp_path):
    assert "nowhere" in bad(capsys, "check", tmp_path / "nowhere")
    assert "nowhere" in bad(capsys, "convert", tmp_path / "nowhere", tmp_path / "out")
    half = tmp_path / "half"
    half.mkdir()
    for file in model.iterdir():
        data = file.read_bytes()
        (half / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    assert "model.safetensors" in bad(capsys, "convert", half, tmp_path / "out")
    assert "model.safetensors" in bad(capsys, "serve", half, "--port", "0")
    assert not (tmp_path / "out").exists()


def test_an_unsupported_architecture_is_named(capsys, model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "mamba" in bad(capsys, "check", other)


def test_serving_to_other_machines_needs_a_key(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("AREAX_SERVER_KEY", raising=False)
    line = bad(capsys, "serve", tmp_path / "nowhere", "--host", "0.0.0.0", "--port", "0")
    assert line.startswith("serve: 0.0.0.0 can be reached from other machines; set AREAX_SERVER_KEY to a key, or ")
    assert "got an empty one" in bad(capsys, "serve", tmp_path / "nowhere", "--api-key", "", "--port", "0")
    monkeypatch.setenv("AREAX_SERVER_KEY", "")
    assert "AREAX_SERVER_KEY: a key must be" in bad(capsys, "serve", tmp_path / "nowhere", "--port", "0")
    monkeypatch.setenv("AREAX_SERVER_KEY", "secret")
    assert "nowhere" in bad(capsys, "serve", tmp_path / "nowhere", "--host", "0.0.0.0", "--port", "0")


def test_a_port_in_use(capsys, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = bad(capsys, "serve", model, "--port", taken.getsockname()[1])
    assert "in use" in line


def test_an_empty_data_set(capsys, model, tmp_path):
    empty = tiny.rows(tmp_path / "empty.jsonl", [])
    arguments = ["--model", model, "--data", empty, "--out", tmp_path / "run", "--length", 64]
    assert "empty" in bad(capsys, "train", "sft", *arguments)


def test_convert_and_check(capsys, model, tmp_path):
    assert cli.main(["convert", str(model), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert cli.main(["check", str(tmp_path / "half"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert cli.main(["check", str(model), "--against", "torch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_failed_check_is_exit_code_1(capsys, tmp_path):
    """Non-finite weights: the checkpoint loads, but fails the check."""
    config, params = hf.load(tiny.model(tmp_path / "model"))
    hf.save(tmp_path / "nan", config, params | {"embed": params["embed"].at[0, 0].set(jnp.nan)})
    assert cli.main(["check", str(tmp_path / "nan")]) == 1
    assert "embed_tokens" in capsys.readouterr().out


def test_a_changed_tensor_is_detected(capsys, model, tmp_path):
    """Names and shapes are unchanged, values are not: the hashes in the manifest differ."""
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in model.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-3] ^= 0x40
        (changed / file.name).write_bytes(bytes(data))
    assert "does not match manifest.json" in bad(capsys, "check", changed)


def test_a_recipe_file_must_exist_and_define_config(capsys, tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert "no Config" in bad(capsys, "train", tmp_path / "empty.py")
    assert "missing.py" in bad(capsys, "train", tmp_path / "missing.py")


def test_an_error_of_any_length_is_a_short_line_with_its_end(capsys, tmp_path):
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n    x: int = 0\n"
        "def main(config):\n    raise ValueError('must be short, got ' + '\\x1b[2J' * 10**6 + '; shorten it')\n"
    )
    err = bad(capsys, "train", tmp_path / "own.py")
    assert err.startswith("must be short, got \\x1b[2J") and err.endswith("; shorten it\n")
    assert len(err) < 2100 and " ... (7,000,031 characters) ... " in err


def test_an_algorithm_name_runs_grpo_with_its_objective(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(grpo, "main", lambda config: seen.append(config.training.objective))
    required = ["--model", "m", "--data", "d", "--reward", "r"]
    for name, preset in losses.POLICIES.items():
        assert cli.main(["train", name.lower(), *required]) == 0
        assert seen[-1] == preset()
    assert cli.main(["train", "gspo", *required, "--objective.clip-high", "0.5"]) == 0
    assert seen[-1] == losses.GSPO(clip_high=0.5)
    unsound = ["--eta", "2", "--objective.correction.proximal", "behaviour"]
    assert "which RLOO with proximal" in bad(capsys, "train", "rloo", *required, *unsound)
    assert cli.main(["train", "rloo", *required, "--eta", "0", *unsound[2:]]) == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_is_no_error(unbuffered):
    """As in `areax --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-m", "areax", "--help"], stdout=writer, stderr=subprocess.PIPE, env=environ, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_help_in_a_terminal_of_one_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert "--api-key" in capsys.readouterr().out and os.environ["COLUMNS"] == "1"


@pytest.mark.parametrize("status", [0, 3])
def test_a_user_s_code_that_leaves_by_os_exit_is_named_and_fails(tmp_path, status):
    (tmp_path / "own.py").write_text(
        "import dataclasses, os\n@dataclasses.dataclass(frozen=True)\nclass Config:\n    pass\n"
        f"def main(config):\n    os._exit({status})\n"
    )
    words = [sys.executable, "-m", "areax", "train", "own.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (status or 1)
    ended = f"{tmp_path}/own.py:6: os._exit({status}) ended the command at once, without what it does at its end"
    assert done.stderr.splitlines()[-1] == ended
