""".ci/run with a `make` that only says its target, and a clock that only `make` moves."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / ".ci" / "run"
PARTS = (
    "installs lint test test-clients test-tinker test-wheel test-kernels test-docs demo-real-short test-mesh test-slow "
    "demo demo-holds test-cases test-sglang test-environments test-compilers"
).split()
MAKE = """#!/usr/bin/env bash
echo "making $1"
echo "$1" >> made
echo $(($(cat clock) + 100)) > clock
printf 'a byte \\0\\n7 passed in 1.23s\\n'
[ "$1" != "${FAILS:-}" ]
"""


@pytest.fixture
def ci(tmp_path):
    """Runs it in a folder of its own, where every part takes 100 s: (exit code, parts made, lines after the last)."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for name, program in {"make": MAKE, "date": "#!/usr/bin/env bash\ncat clock\n"}.items():
        (tmp_path / "bin" / name).write_text(program)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(**environ):
        (tmp_path / "clock").write_text("1700000000\n")
        (tmp_path / "made").unlink(missing_ok=True)
        environ = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"} | environ
        done = subprocess.run([".ci/run"], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert not done.stderr
        each, _, summary = done.stdout.rpartition("\n\n")
        made = (tmp_path / "made").read_text().split()
        summary = summary.splitlines()
        assert [line.removeprefix("== ") for line in each.splitlines() if " s, " in line] == summary[: len(made)]
        return done.returncode, made, summary

    return run


def test_runs_every_part_in_order_and_says_how_long_each_took(ci):
    code, made, summary = ci()
    assert code == 0 and made == PARTS
    assert summary == [f"ok: make {part}, 100 s, 7 passed in 1.23s" for part in PARTS]


def test_goes_on_after_a_failure_and_then_fails(ci):
    code, made, summary = ci(FAILS="test")
    assert code == 1 and made == PARTS
    assert {line.split(",")[0] for line in summary if not line.startswith("ok")} == {"FAILED: make test"}


@pytest.mark.parametrize("limit, parts", [("300", 3), ("301", 4)])
def test_starts_no_part_after_the_limit_and_names_what_it_left_out(ci, limit, parts):
    code, made, summary = ci(AREAX_CI_SECONDS=limit)
    assert code == 0 and made == PARTS[:parts]
    assert summary[parts:] == [f"left out, {limit} s are over: make {part}" for part in PARTS[parts:]]
    assert ci(AREAX_CI_SECONDS=limit, FAILS="lint")[0] == 1


@pytest.mark.parametrize("seconds", ["1.5", "09", "0", "-1", "x", "9" * 20])
def test_a_limit_that_is_no_number_of_seconds_is_refused(tmp_path, seconds):
    """Instead of no limit, or of no part at all with exit code 0."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci")
    done = subprocess.run(
        [".ci/run"], cwd=tmp_path, env=os.environ | {"AREAX_CI_SECONDS": seconds}, capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"AREAX_CI_SECONDS must be a whole number of seconds from 1, got '{seconds}'")


@pytest.mark.parametrize("name", ["venv", "PYTHON"])
def test_a_variable_of_make_that_is_empty_is_refused(name):
    """An empty venv would be the system's Python."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    for value in ("", " "):
        command = ["make", "-n", "install", f"{name}={value}"]
        done = subprocess.run(command, cwd=RUN.parents[1], env=environ, capture_output=True, text=True)
        said = done.stderr.strip()
        assert done.returncode == 2 and not done.stdout and "\n" not in said
        assert said.endswith(f"{name} must not be empty; leave it out for the default.  Stop.")
