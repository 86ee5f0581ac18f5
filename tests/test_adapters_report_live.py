"""The page of runs that go on, over HTTP: what it shows as they grow, and to whom."""

import base64
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse

import followed
import pytest

from areax.adapters import cli
from areax.rollout.processes import http_process

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<b>\u202eabc\u2066\x1b[31m\x00"


def get(url, path="/", **headers):
    """(status, body, headers) of a GET; underscores in the names of headers are hyphens."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def parts(url, *names, since="", **fields):
    """(stamp, {id: HTML}) of sections."""
    query = urllib.parse.urlencode([("since", since), *(("open", name) for name in names), *fields.items()])
    status, body, _ = get(url, f"/parts?{query}")
    assert status == 200
    answer = json.loads(body)
    return answer["stamp"], answer["parts"]


def test_the_page_follows_a_run(tmp_path):
    with followed.opened(tmp_path) as run, followed.running(tmp_path) as url:
        assert "no step is logged yet" in parts(url)[1]["note"]
        for step in range(1, 6):
            followed.log(run, step)
        status, page, headers = get(url)
        assert status == 200 and 'src="/live.js"' in page and "5 steps of grpo" in page
        assert "script-src 'self'" in page and "frame-ancestors 'none'" in headers["content-security-policy"]
        assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
        stamp, made = parts(url, "learning", "asynchrony", "distributions", "time", "look")
        assert made["note"] == "" and all(
            word in made["asynchrony"] for word in ("Idle and busy", "staleness <b>0.4</b>")
        )
        assert "staleness: 0" in made["distributions"] and "waiting for rollout" in made["time"]
        assert parts(url, "learning", since=stamp) == (stamp, {})  # nothing is sent twice
        followed.log(run, 6)
        stamp, made = parts(url, "learning", since=stamp)
        assert made["subtitle"].startswith("6 steps") and "step 6" in made["learning"] and "time" not in made
        assert "There are no samples so far" in parts(url, "samples")[1]["samples"]
        assert get(url, "/live.js")[0] == 200
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "metrics.jsonl", "samples.jsonl"]


def test_a_run_that_has_not_begun_or_is_damaged_or_removed_is_one_line(tmp_path):
    path = tmp_path / "run"
    with followed.running(path) as url:
        assert parts(url)[1]["note"] == f"{path} does not exist yet"
        with followed.opened(path) as run:
            followed.log(run, 1)
        with open(path / "metrics.jsonl", "a") as file:
            file.write('{"step": 2, "kind": "grpo", "rew')
        assert parts(url)[1]["subtitle"].startswith("1 step of grpo")  # a line that is half written is not there yet
        with open(path / "metrics.jsonl", "a") as file:
            file.write('ard": 0.5}\nnot a line\n')
        assert "metrics.jsonl:3: every line must be one JSON object, got" in parts(url)[1]["note"]
        text = (path / "metrics.jsonl").read_text().replace("not a line\n", "")
        (path / "metrics.jsonl").write_text(text)
        _, made = parts(url)
        assert made["note"] == "" and made["subtitle"].startswith("2 steps of grpo")
        with open(path / "metrics.jsonl", "a") as file:
            file.write('{"step": "x", "kind": "grpo"}\n')
        assert "step must be a number, got &#x27;x&#x27;; remove the line" in parts(url)[1]["note"]
        shutil.rmtree(path)
        _, made = parts(url)
        assert "was removed" in made["note"] and made["subtitle"].startswith("2 steps of grpo")


def test_a_run_that_goes_on_from_an_earlier_step_loses_its_later_ones(tmp_path):
    with followed.running(tmp_path) as url:
        with followed.opened(tmp_path) as run:
            for step in range(1, 9):
                followed.log(run, step)
        assert parts(url)[1]["subtitle"].startswith("8 steps")
        with followed.run_dir.open_run(tmp_path, keep={"grpo": 5}):
            assert parts(url)[1]["subtitle"].startswith("5 steps")


def test_the_curves_of_two_runs_share_their_charts(tmp_path):
    for name, steps in (("one", 5), ("two", 9)):
        with followed.opened(tmp_path / name) as run:
            for step in range(1, steps):
                followed.log(run, step, **({"kl_coef": step} if name == "two" else {}))
    with followed.running(tmp_path / "one", tmp_path / "two") as url:
        _, made = parts(url, "learning", "numbers", "other")
        assert re.findall(r'class="line (c.)"', made["other"]) == ["c1"]  # what one run has, is in its colour
        reward = next(card for card in made["learning"].split("<figure") if "<h4>Reward<" in card)
        assert re.findall(r'<text class="name"[^>]*>(.*?)</text>', reward) == ["one", "two"]
        assert re.findall(r'class="line (c.)"', reward) == ["c0", "c1"]
        length = next(card for card in made["learning"].split("<figure") if "<h4>Answer length<" in card)
        assert "one: length" in length and "two: length, largest" in length
        assert made["numbers"].count("metrics of grpo") == 2 and "<h3>two</h3>" in made["numbers"]
        assert "one: 4 steps of grpo" in made["subtitle"] and "two: 8 steps" in made["subtitle"]
        assert "<h1>one and two</h1>" in get(url)[1]


def test_runs_without_a_journal_have_curves(tmp_path):
    with followed.opened(tmp_path) as run:
        for step in range(1, 6):
            run.log("sft", step, nll=3 / step, loss=3 / step, grad_norm=1.0)
    with followed.running(tmp_path) as url:
        _, made = parts(url, "learning", "samples")
        assert "Likelihood loss" in made["learning"] and "no samples so far" in made["samples"]


def test_whatever_a_model_writes_is_text(tmp_path):
    with followed.opened(tmp_path, note=HOSTILE) as run:
        followed.log(run, 1, **{HOSTILE: 1.0})
        for kind, version in (("grpo", 0), ("eval", None)):
            run.sample(
                1, kind=kind, version=version, prompt=HOSTILE, text=HOSTILE, reward=1.0, finish="stop",
                tokens=[HOSTILE, "\ud800"], logp=[-1.0, -2.0], version_of_token=[0, 1], adv=0.5,
            )  # fmt: skip
    with followed.running(tmp_path) as url:
        names = re.findall(r'<div id="([^"]+)">', get(url)[1])
        _, made = parts(url, *names)
        whole = "".join(made.values())
        assert len(made) == len(names) + 2 and "&lt;script&gt;" in made["samples"]
        assert not re.search(r"<script|<img|<b>\W", whole) and not re.search("[\x00\x1b\u202e\u2066]", made["samples"])
        assert all(f"U+{code}" in made["samples"] for code in ("202E", "2066", "001B", "0000"))
        assert "version 0 · advantage 0.5" in made["samples"]
        _, made = parts(url, "samples", kind="eval", step="99", group="7", sample="-1")
        assert "Step 1 of eval" in made["samples"]
        (tmp_path / "journal.db").write_bytes(b"no database" * 100)
        shown = parts(url, "samples")[1]["samples"]
        assert "it is damaged, or no journal" in shown and "Traceback" not in shown and '<form class="choose"' in shown


def test_a_key_is_required_of_every_request(tmp_path):
    basic = lambda key: "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()
    with followed.running(tmp_path, key="the key: is") as url:
        for path in ("/", "/parts", "/live.js"):
            for given in ({}, {"Authorization": "Bearer guess"}, {"Authorization": basic("")},
                          {"Authorization": "Basic %%"}, {"Authorization": "the key: is"}):  # fmt: skip
                status, body, headers = get(url, path, **given)
                assert status == 401 and "AREAX_REPORT_KEY" in body and headers["www-authenticate"].startswith("Basic")
            for given in ("Bearer the key: is", basic("the key: is")):
                assert get(url, path, Authorization=given, Host="trainer:80")[0] == 200


def test_pages_of_other_sites_get_nothing(tmp_path):
    with followed.running(tmp_path) as url:
        port = url.rpartition(":")[2]
        for path in ("/", "/parts", "/live.js"):
            for headers in (
                {"Host": f"attacker.example:{port}"}, {"Host": "127.0.0.1.attacker.example"}, {"Host": "["},
                {"Host": ""}, {"Host": "10.0.0.7"}, {"Origin": "http://attacker.example"},
                {"Sec_Fetch_Site": "cross-site"},
            ):  # fmt: skip
                assert get(url, path, **headers)[0] == 403, headers
            for host in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80", "127.0.0.1"):
                assert get(url, path, Host=host)[0] == 200
        assert get(url, "/../etc/passwd")[0] == get(url, "/config.json")[0] == 404


def test_an_address_of_other_machines_needs_a_key(tmp_path, capsys, monkeypatch):
    """In the words of `areax serve`."""
    with pytest.raises(ValueError) as served:
        http_process.bind_guarded("0.0.0.0", 0, key=None, variable="AREAX_SERVER_KEY", what="serve")
    assert cli.main(["report", "--serve", str(tmp_path), "--host", "0.0.0.0"]) == 2
    words = str(served.value).replace("SERVER", "REPORT").replace("serve:", "report:")
    assert capsys.readouterr().err == f"{words}\n"
    monkeypatch.setenv("AREAX_REPORT_KEY", "")
    assert cli.main(["report", "--serve", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "an empty one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--serve", "RUN", "--out", "x.html"], "--serve writes nothing; leave out --out"),
        (["--serve", "RUN/file"], "needs a run directory, got the file"),
        (["--serve", "RUN", "RUN/file"], "needs a run directory, got the file"),
        (["--serve", "RUN", "RUN/."], "the second run must be another one"),
        (["RUN", "RUN"], "needs --serve: a page is of one run"),
        (["RUN", "--port", "1"], "--host and --port are for --serve"),
    ],
)
def test_other_options_are_refused_in_one_line(tmp_path, capsys, arguments, said):
    (tmp_path / "file").write_text("")
    assert cli.main(["report", *(word.replace("RUN", str(tmp_path)) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_command_serves_until_a_signal(tmp_path):
    with followed.opened(tmp_path) as run:
        followed.log(run, 1)
    command = [sys.executable, "-m", "areax", "report", "--serve", str(tmp_path), f"{tmp_path}/later", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url, _, rest = process.stdout.readline().partition(" ")
        assert rest == f"follows {tmp_path} and {tmp_path}/later (does not exist yet); Ctrl-C ends it\n"
        assert "1 step of grpo" in get(url)[1]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(10) == 0 and process.stderr.read() == ""
