"""Distillation from files to files: the student comes to say what its teacher says, resumes, and says what is wrong."""

import asyncio
import http.server
import itertools
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
import scripted
import servers
import tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from areax.adapters import cli, hf, safetensors, tokenizer
from areax.adapters.tracking import run_dir
from areax.core.losses import Distill
from areax.core.optim import Optimizer
from areax.models import Run
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.recipes import distill
from areax.recipes.shared import teachers
from areax.rollout.tasks import arithmetic


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("distill")
    tiny.model(path / "student")
    tiny.model(path / "teacher", seed=1, hidden_size=48, num_hidden_layers=1, tie_word_embeddings=False)
    rows = list(itertools.islice(arithmetic.demonstrations(arithmetic.splits()["train"]), 200))
    tiny.rows(path / "rows.jsonl", rows)
    tiny.rows(path / "named.jsonl", [{**row, "teacher": "sums"} for row in rows])
    told = lambda row: {**row, "teacher_prompt": f"{row['completion']}+{row['prompt']}"}
    tiny.rows(path / "told.jsonl", map(told, rows))
    tiny.rows(path / "some.jsonl", [{**(told(row) if i % 2 else row), "teacher": "sums"} for i, row in enumerate(rows)])
    return path


def config(place, out, **changes):
    base = distill.Config(
        model=str(place / "student"), data=str(place / "rows.jsonl"), out=str(place / out), steps=12, batch=8,
        length=64, rows=2, optim=Optimizer(lr=1e-2), teacher=str(place / "teacher"),
    )  # fmt: skip
    return replace(base, **changes)


def test_a_teacher_with_a_shorter_context_is_refused(place, tmp_path):
    """Nothing that it says about tokens behind its context teaches anything."""
    tiny.model(tmp_path / "short", max_position_embeddings=32)
    with pytest.raises(ValueError, match="--length must be at most 32, the context of .*short, got 64"):
        distill.main(config(place, "refused", teacher=str(tmp_path / "short")))


@pytest.mark.long
def test_the_divergence_falls_and_a_resumed_run_equals_an_uninterrupted_one(place):
    held = str(place / "rows.jsonl")
    whole = distill.main(config(place, "whole", heldout=held, save_every=6))
    lines = [line for line in run_dir.read_lines(place / "whole/metrics.jsonl") if "loss" in line]
    assert whole["complete"] and len(lines) == 12
    assert lines[-1]["divergence"] < 0.5 * lines[0]["divergence"]
    assert whole["heldout_divergence"] < 0.5 * lines[0]["divergence"]
    np.testing.assert_allclose(lines[-1]["loss"], lines[-1]["divergence"], rtol=1e-5)
    assert lines[-1]["unusable_fraction"] == 0
    tiny.cut_off(place / "whole", place / "parts", 6)
    distill.main(config(place, "parts"))
    a, b = hf.load(place / "whole/model")[1], hf.load(place / "parts/model")[1]
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.long
@pytest.mark.parametrize("data", ["named", "some"])
def test_a_served_teacher_equals_a_local_one(place, monkeypatch, data):
    """Also where it reads other prompts than the student."""
    spec, name, data = Distill("js", top_k=6), data, str(place / f"{data}.jsonl")
    local = distill.main(config(place, f"local-{name}", steps=3, objective=spec, data=data))
    monkeypatch.setenv("AREAX_TEACHER_KEY", "secret")
    with servers.embedded(place / "teacher", slots=8, context=64, api_key="secret") as remote:
        asked = config(
            place, f"asked-{name}", steps=3, objective=spec, teacher="", data=data,
            teachers=(f"other={remote.url}", f"sums={remote.url}"),
        )  # fmt: skip
        served = distill.main(asked)
        with pytest.raises(ValueError, match="'teacher' must be one of other, sums, got None; row {'prompt'"):
            distill.main(replace(asked, data=str(place / "rows.jsonl"), out=str(place / f"unnamed-{name}")))
    for name in ("loss", "divergence", "nll"):
        np.testing.assert_allclose(served[name], local[name], rtol=1e-4)


@pytest.fixture(scope="module")
def teens(place):
    """A teacher whose tokenizer has 10 to 19 as tokens."""
    tokens = tokenizer.character("0123456789+", words=(*(str(n) for n in range(10, 20)), "user", "system", "assistant"))
    tiny.model(place / "teens", seed=2, vocab_size=len(tokens), eos_token_id=tokens.eos_token_id)
    tokenizer.save(tokens, place / "teens")
    return str(place / "teens")


@pytest.mark.long
def test_a_teacher_may_have_another_tokenizer(place, teens, capsys):
    """Whether local or served; where both have one token, the student comes to say what it says."""
    spec = Distill("js", top_k=6)
    local = distill.main(config(place, "other-local", teacher=teens, objective=spec))
    lines = [line for line in run_dir.read_lines(place / "other-local/metrics.jsonl") if "loss" in line]
    assert lines[-1]["divergence"] < 0.5 * lines[0]["divergence"] and local["complete"]
    assert all(0.5 < line["compared_fraction"] < 1 and line["unaligned_fraction"] == 0 for line in lines)
    np.testing.assert_allclose(local["loss"], local["divergence"] * local["compared_fraction"], rtol=1e-5)
    said = capsys.readouterr().err
    assert said.count("has another tokenizer than the trained model, with ") == 1
    with servers.embedded(teens, slots=8, context=64) as remote:
        asked = dict(teacher="", teachers=(remote.url,), objective=spec)
        served = distill.main(config(place, "other-served", **asked, teacher_tokenizer=teens))
        with pytest.raises(ValueError, match="must have the student's tokenizer, got .* with --teacher-tok"):
            distill.main(config(place, "other-unnamed", **asked))
        other = str(place / "byte")
        tokenizer.save(tokenizer.byte_level(), other)
        with pytest.raises(ValueError, match="must have the tokenizer of --teacher-tokenizer, got .*must be numbers"):
            distill.main(config(place, "other-wrong", **asked, teacher_tokenizer=other))
    for name in ("loss", "divergence", "nll", "compared_fraction"):
        np.testing.assert_allclose(served[name], local[name], rtol=1e-4)
    by_rank = Distill("forward", uld_coef=0.5)
    ranked = distill.main(config(place, "ranked", teacher=teens, objective=by_rank, steps=1))
    plain = distill.main(config(place, "plain", teacher=teens, objective=Distill("forward"), steps=1))
    assert ranked["divergence"] > plain["divergence"]


@pytest.mark.slow
def test_a_teacher_with_other_ids_teaches_the_same(place):
    """Two tokens change places, in its tokenizer and in its weights: of each token the divergence is the same."""
    tiny.model(place / "swapped", seed=1, hidden_size=48, num_hidden_layers=1, tie_word_embeddings=False)
    words = ("user", "system", "assistant")
    tokenizer.save(tokenizer.character("0123456789+", words=words), place / "swapped")
    (place / "swapped/manifest.json").unlink()
    held = {name: np.array(x) for name, x in safetensors.read(place / "swapped").items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name][[5, 6]] = held[name][[6, 5]]
    safetensors.write(place / "swapped", held, held.values())
    for name, spec in {"whole": Distill("js"), "top": Distill("js", top_k=5)}.items():
        plain = distill.main(config(place, f"own-{name}", steps=2, objective=spec))
        other = distill.main(config(place, f"swapped-{name}", steps=2, objective=spec, teacher=str(place / "swapped")))
        assert other["compared_fraction"] == 1
        for key in ("loss", "divergence", "nll", "grad_norm"):
            np.testing.assert_allclose(other[key], plain[key], rtol=1e-5)


@pytest.mark.long
def test_a_student_learns_what_it_says_with_more_to_read(place, capsys):
    """Its own teacher, with adapters, too; where both read the same, nothing is to be learnt."""
    itself = dict(teacher="", self_distillation=True, data=str(place / "told.jsonl"))
    done = distill.main(config(place, "itself", **itself))
    lines = [line for line in run_dir.read_lines(place / "itself/metrics.jsonl") if "loss" in line]
    assert done["complete"] and lines[-1]["divergence"] < 0.5 * lines[0]["divergence"]
    assert "--trie auto has no effect: --self-distillation has rows" in capsys.readouterr().err
    adapted = distill.main(config(place, "adapted", **itself, steps=1, lora=Lora(rank=2)))
    np.testing.assert_allclose(adapted["loss"], lines[0]["loss"], rtol=1e-4)
    fixed = distill.main(config(place, "fixed", teacher=str(place / "student"), data=itself["data"], steps=1))
    np.testing.assert_allclose(fixed["loss"], lines[0]["loss"], rtol=1e-4)
    tiny.rows(place / "same.jsonl", [{"prompt": "1+1", "completion": "2", "teacher_prompt": "1+1"}])
    same = distill.main(config(place, "same", **itself | {"data": str(place / "same.jsonl")}, steps=1))
    assert abs(same["divergence"]) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_the_average_of_a_student_teaches_it_and_survives_a_restart(place, rank):
    itself = dict(teacher="", self_distillation=True, data=str(place / "told.jsonl"), lora=Lora(rank=rank), steps=4)
    follows = itself | dict(average_teacher=True, save_every=2, heldout=str(place / "told.jsonl"))
    rate = config(place, "").optim
    averaged, live = (replace(rate, lr=3e-2, ema=decay) for decay in (0.9, 0.0))
    whole = distill.main(config(place, f"follows-{rank}", **follows, optim=averaged))
    lines = [x for x in run_dir.read_lines(place / f"follows-{rank}/metrics.jsonl") if "loss" in x]
    tiny.cut_off(place / f"follows-{rank}", place / f"again-{rank}", 2)
    again = distill.main(config(place, f"again-{rank}", **follows, optim=averaged))
    assert whole["complete"] and again["loss"] == whole["loss"]
    a, b = (hf.load(place / f"{name}-{rank}/model")[1] for name in ("follows", "again"))
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)
    distill.main(config(place, f"live-{rank}", **itself, optim=live))
    others = [x for x in run_dir.read_lines(place / f"live-{rank}/metrics.jsonl") if "loss" in x]
    assert lines[0]["loss"] == others[0]["loss"]  # the average begins as the student
    assert abs(lines[-1]["loss"] / others[-1]["loss"] - 1) > 1e-3


def test_an_average_that_nobody_keeps_cannot_teach(place):
    for more in (dict(self_distillation=True, teacher=""), dict(optim=Optimizer(ema=0.9))):
        with pytest.raises(ValueError, match="distill: --average-teacher needs --self-distillation and --optim.ema"):
            distill.check(config(place, "kept", average_teacher=True, **more))


def test_rows_that_a_teacher_cannot_read_are_refused(place):
    itself = dict(teacher="", self_distillation=True)
    for row, words in (
        ({}, "--self-distillation needs rows with a 'teacher_prompt' that says more than the prompt, got the fields"),
        ({"teacher_prompt": 5}, "a row's 'teacher_prompt' must be a text or a list of messages, got 5; row {"),
        ({"teacher_prompt": ""}, "a row's 'teacher_prompt' must be a text or a list of messages, got ''; row {"),
        ({"teacher_prompt": "1+" * 40}, "a row must fit in --length 64 tokens, got 90"),
    ):
        tiny.rows(place / "unread.jsonl", [{"prompt": "1+1", "completion": "2", **row}])
        with pytest.raises(ValueError, match=words):
            distill.main(config(place, "unread", **itself, data=str(place / "unread.jsonl")))


def test_teachers_get_their_own_key(place, monkeypatch):
    given = []

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            given.append(self.headers["Authorization"])
            self.send_error(401)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("AREAX_SERVER_KEY", "the servers'")
    monkeypatch.setenv("AREAX_TEACHER_KEY", "the teacher's")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = config(place, "refused", teacher="", teachers=(f"http://127.0.0.1:{server.server_port}",))
        with pytest.raises(ValueError, match="HTTP 401: the key is wrong; set AREAX_TEACHER_KEY to the right one"):
            with distill.served_teachers(asked, None, 10):
                pass
        server.shutdown()
    assert given == ["Bearer the teacher's"]


@pytest.mark.slow
def test_served_teachers_of_other_tokenizers_are_refused(place, tmp_path, capsys):
    """The embedded server, asked by students with its tokenizer, another of the same size, and a larger one."""
    own = tokenizer.load(place / "teacher")

    def meets(tokens):
        asked = config(place, "other", teacher="", teachers=(remote.url,))
        with distill.served_teachers(asked, tokens, 32):
            pass

    with servers.embedded(place / "teacher", slots=2, context=64) as remote:
        meets(own)
        other = tokenizer.character("0123456789*")
        assert len(other) == len(own)
        with pytest.raises(
            ValueError,
            match=r"--teachers http.*: must have the student's tokenizer, got '.' for token .* instead of '.'",
        ):
            meets(other)
        with pytest.raises(ValueError, match="must have the student's tokenizer, got .*must be numbers from 0 to"):
            meets(tokenizer.byte_level())
    assert not capsys.readouterr().err


def test_a_served_teacher_that_reports_no_texts_is_named(place, capsys):
    async def main():
        async with scripted.serving() as state:
            async with teachers.connected((state.url,), tokenizer.load(place / "student")) as fleets:
                assert list(fleets) == [""]

    asyncio.run(main())
    said = capsys.readouterr().err
    assert "whether it has the student's tokenizer is not checked (" in said and said.count("\n") == 1


@pytest.mark.wide
@pytest.mark.mesh
def test_training_is_the_same_on_a_mesh(place):
    one = distill.main(config(place, "one", steps=3, rows=4))
    many = distill.main(config(place, "many", steps=3, rows=4, mesh=Layout(fsdp=2, cp=2, tp=2), run=Run(cp="ring")))
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-4)


def test_incompatible_options_give_a_one_line_error(place):
    url = ("http://127.0.0.1:1",)
    for words, changes in (
        ("name either --teacher, .*, or --teachers, servers, or --self-distillation, got none", dict(teacher="")),
        ("name either --teacher, .* got both", dict(teachers=url)),
        ("name either --teacher, .* got both", dict(self_distillation=True)),
        ("got --objective.top-k 0", dict(teacher="", teachers=url)),
        ("--teachers: an address must have no user, .* got http://...@host;", dict(teachers=("http://ann:x@host",))),
        ("--teacher-tokenizer is for --teachers, servers, got x without", dict(teacher_tokenizer="x")),
        ("--objective.uld-coef compares tokens that only one of two tokenizers", dict(objective=Distill(uld_coef=1.0))),
        ("got --objective.temperature 2", dict(teacher="", teachers=url, objective=Distill(top_k=4, temperature=2.0))),
    ):
        with pytest.raises(ValueError, match=words):
            distill.main(config(place, "bad", **changes))


def test_teachers_of_other_tokenizers_and_vocabularies_are_refused(place):
    tiny.model(place / "other")
    tokenizer.save(tokenizer.character("0123456789*"), place / "other")
    with pytest.raises(ValueError, match=r"the tokenizer has no token for '\+' in "):
        distill.main(config(place, "bad", teacher=str(place / "other")))
    tokenizer.save(tokenizer.byte_level(), place / "other")
    with pytest.raises(ValueError, match="must have a token for each of its tokenizer's 288, got 32"):
        distill.main(config(place, "bad", teacher=str(place / "other")))
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "1": 1, "</s>": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    tokenizer.save(PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>"), place / "other")
    with pytest.raises(ValueError, match="other: has not the trained model's tokenizer, and .* the decoder WordPiece"):
        distill.main(config(place, "bad", teacher=str(place / "other")))
    source = hf.read_config(place / "teacher")
    tiny.model(place / "small", vocab_size=source.vocab - 1)
    with pytest.raises(ValueError, match=f"vocabulary of at least {source.vocab} entries, got {source.vocab - 1}"):
        distill.main(config(place, "bad", teacher=str(place / "small")))
    tiny.rows(place / "no.jsonl", [{"prompt": "1+1"}])
    with pytest.raises(ValueError, match="distill: every row needs a text 'completion'"):
        distill.main(config(place, "bad", data=str(place / "no.jsonl")))


def test_distill_is_a_command(place, capsys, monkeypatch):
    words = ["--model", str(place / "student"), "--data", "rows", "--teachers", "a=http://x", "b=http://y"]
    words += ["--objective.divergence", "js", "--objective.beta", "0.3"]
    seen = []
    monkeypatch.setattr(distill, "main", seen.append)
    assert cli.main(["train", "distill", *words]) == 0
    assert seen[0].objective == Distill("js", beta=0.3) and seen[0].teachers == ("a=http://x", "b=http://y")
    assert cli.main(["plan", "distill", *words, "--length", "64"]) == 0
    assert "fits: " in capsys.readouterr().out
