"""Consistency checks between two real processes of two devices: what they name, and what they leave alone."""

import json
from pathlib import Path

import job_program
import jobs
import pytest
import tiny

from areax.adapters import orbax
from areax.parallel.multihost import agreement

PROGRAM = str(Path(job_program.__file__))
WANTED = {  # the end of each error
    "nothing": "",
    "option": "optim.lr is 100.0 in process 1, 10000.0 in process 0; start all with the same command and files",
    "row": f"rows[7].answer is ...{'x' * 20}y{'x' * 39}... in process 1, ...{'x' * 60}... in process 0; start all",
    "array": "x.numbers is int64[4000] with hash ",
    "type": "loss is <class '__main__.Other'> in process 1, <class '__main__.One'> in process 0;",
    "set": "",
    "object array": "",
    "picture": "",
    "other picture": "x is uint8[4, 4] with hash ",
    "jax array": "x is float32[5000] with hash ",
    "order": "",
    "absent": "b is absent in process 1, 2 in process 0;",
    "equal replicas": "",
    "one replica": "must be equal, got c.0 that differs between processes 0 and 1; go on from the last saved state",
    "no replicas": "",
    "state": "processes: replicas of a state that is to be saved must be equal, got c that differs between processes 0",
}


@pytest.mark.mesh
def test_what_differs_is_named_in_every_process(tmp_path):
    first = jobs.run([PROGRAM, "disagree", str(tmp_path / "state")], 2, tmp_path, devices=2)
    said = [json.loads(text.split("RESULT ")[1]) for text in (first, (tmp_path / "1.log").read_text())]
    assert said[0] == said[1] and said[0].keys() == WANTED.keys()
    for name, end in WANTED.items():
        assert end in said[0][name] if end else said[0][name] == "", said[0][name]
    assert orbax.versions(tmp_path / "state") == []
    assert "all need the same rows, got different ones in process 1 than in process 0: " in said[0]["row"]


@pytest.mark.mesh
def test_models_that_differ_are_named_whatever_they_are_for(tmp_path):
    for i in range(2):
        tiny.model(tmp_path / f"{i}/settings", rms_norm_eps=10.0 ** (i - 6))
        tiny.model(tmp_path / f"{i}/weights", seed=i)
    first = jobs.run([PROGRAM, "find_others", str(tmp_path)], 2, tmp_path / "logs")
    for what, said in json.loads(first.split("RESULT ")[1]).items():
        named = what.partition(" ")[0]
        assert said.startswith(f"processes: all need the same {named} in {tmp_path}/0/{named}, got different"), said
        assert ("config.json.rms_norm_eps is 1e-05 in process 1, 1e-06 in" in said) == (named == "settings"), said


@pytest.mark.long
def test_other_software_in_one_process_is_refused(tmp_path):
    words = [PROGRAM, "disagree", str(tmp_path / "state")]
    other = f"""
import runpy, sys, jax
jax.__version__, sys.argv = "0.0.1", {words}
runpy.run_path({PROGRAM!r}, run_name="__main__")
"""
    running = jobs.start([words, ["-c", other]], tmp_path, devices=2)
    try:
        codes = [process.wait(120) for process in running]
    finally:
        jobs.end(running)
    assert codes == [3, 2]
    line = "processes: all need the same software and devices, got jax 0.0.1 in process 1, "
    assert all(line in (tmp_path / f"{i}.log").read_text() for i in range(2))


def test_an_editors_link_beside_the_code_is_left_out(tmp_path, monkeypatch):
    code = tmp_path / "core"
    code.mkdir()
    (code / "__init__.py").write_text("")
    monkeypatch.setattr(agreement, "__file__", str(tmp_path / "parallel/multihost/agreement.py"))
    before = agreement._software.__wrapped__()
    (code / ".#step.py").symlink_to("somebody@somewhere:1")  # as Emacs does while a file is edited
    assert agreement._software.__wrapped__() == before
