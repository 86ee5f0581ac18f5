"""What type checkers see of an editable install: every error in a user's script, and no other."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
from areax import models
from areax.adapters import hf
from areax.core import losses, metrics, optim, packing, step
from areax.recipes import grpo
from areax.recipes.shared.rl_options import Rollout
from areax.rollout import client
from areax.rollout.types import Completion, Sample, Sampling, sampled, supervised

config, params = hf.load("model", dtype="float32")
hf.load(3)  # wrong
hf.load("model", dtyp="float32")  # wrong

losses.GRPO(clip_high=0.3, kl={"coef": 0.1}, advantage={"std": "none"}, surrogate=lambda spec, now: (now.adv_BT, None))
losses.GRPO(clip_hihg=0.3)  # wrong
losses.GRPO(clip_high="0.3")  # wrong
losses.DAPO(advantage={"sdt": "none"})  # wrong
losses.DrGRPO(denominator="tokens")  # wrong
losses.CISPO(surrogate=3)  # wrong
losses.DPO(beta=1, score="mean")
losses.DPO(betta=0.1)  # wrong
losses.KTO(beta="0.1")  # wrong
losses.PerToken(lambda logp_BT, batch: -logp_BT, reduce="sum")
losses.PerToken("mean")  # wrong
optim.Optimizer(lr="1e-6")  # wrong
step.no_gradient()  # wrong

done = Completion([3], [-1.0], [0], "stop")
sample = sampled([1, 2], done, temperature=1.0, reward=1.0, prompt=7)
sampled([1, 2], done, temperature=1.0, grup=7)  # wrong
sampled([1, 2], done)  # wrong
supervised([1, 2], [3], label="good")  # wrong
Sample(token=[1, 2])  # wrong
Sampling(temperature="cold")  # wrong
batch = packing.pack([sample], 4096)
packing.pack([sample], "4096")  # wrong
packing.pack([sample], 4096, row=8)  # wrong
models.score(params, batch, config=config, temprature=1.0)  # wrong
numbers = metrics.numbers({})
numbers["loss"].upper()  # wrong

options = grpo.Config("model", "rows.jsonl", "reward.py:f", rollout=Rollout(groups=4))
grpo.Config("model", "rows.jsonl", "reward.py:f", stepz=3)  # wrong
grpo.Config("model", "rows.jsonl", "reward.py:f", rollout=Rollout(groups="4"))  # wrong


async def cell() -> None:
    summary = await grpo.run(options)
    summary["steps"]
    grpo.run(options)["steps"]  # wrong
    async with client.connect(["http://127.0.0.1:30000"]) as fleet:
        completion = await fleet.generate([1, 2], max_new_tokens=5)
        completion.tokens
        await fleet.generate([1, 2], max_tokens=5)  # wrong
        fleet.generate([1, 2]).tokens  # wrong
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what git knows, in a folder of another name."""
    path = tmp_path / "my fork"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.splitlines():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, path / name)
    return path


def built(checkout, hook):
    """The wheel that pip asks setuptools for, without a network."""
    program = f"from setuptools import build_meta; print('made', build_meta.{hook}('..'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(checkout.parent / re.search("^made (.*)", done.stdout, re.M)[1])


@pytest.mark.slow
def test_a_wheel_has_the_package_and_not_what_builds_it(checkout):
    names = [name for name in built(checkout, "build_wheel").namelist() if name.endswith(".py")]
    own = {f"areax/{file.relative_to(checkout)}" for file in (checkout / "core").glob("*.py")}
    assert own <= set(names) and all(name.startswith("areax/") for name in names) and "areax/setup.py" not in names


@pytest.mark.long
def test_a_type_checker_finds_the_errors_of_a_users_script(tmp_path, checkout):
    """`pip install -e` of a checkout of any name, then mypy on the script in another folder."""
    own = tmp_path / "environment"
    venv.create(own)
    python = str(own / "bin/python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = lambda *command, **at: subprocess.run(command, env=environment, capture_output=True, text=True, **at)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    built(checkout, "build_editable").extractall(packages)
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # the dependencies
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = run(
        sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", str(tmp_path / "cache"),
        "--ignore-missing-imports", "--no-error-summary", "script.py", cwd=tmp_path,
    )  # fmt: skip
    wrong = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")]
    errors = {int(number) for number in re.findall(r"^script\.py:(\d+): error:", found.stdout, re.M)}
    assert len(wrong) == 26 and sorted(errors) == wrong, found.stdout + found.stderr
    assert "site-packages" not in found.stdout and str(checkout) not in found.stdout, found.stdout
    imported = run(python, "-c", "import areax; print(areax.__file__)", cwd=tmp_path)
    assert Path(imported.stdout.strip()).resolve() == checkout / "__init__.py"
