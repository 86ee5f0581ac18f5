"""Which options count as changed when a run goes on."""

import itertools
import types
from pathlib import Path

import jax
import pytest
import tiny

from areax import models
from areax.adapters.tracking import run_dir
from areax.core import optim, param
from areax.models import lora
from areax.recipes import sft
from areax.recipes.shared import resume


def test_another_path_to_the_same_folder_is_no_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    Path("other").mkdir()
    Path("link").symlink_to("model")
    config = lambda model: sft.Config(model=model, data="gone.jsonl", out="run")
    Path("run").mkdir()
    run_dir.write_config(Path("run"), config("model"))
    assert resume.changes(config(str(tmp_path / "model"))) == resume.changes(config("link")) == []
    assert resume.changes(config("other")) == ["--model model -> other"]
    assert resume.changes(config("org/name")) == ["--model model -> org/name"]


def test_the_chat_template_is_written_beside_the_options(tmp_path):
    config = sft.Config(model="m", data="d", out=str(tmp_path))
    for chat, text in (
        ("{{ messages }}\r\n", "{{ messages }}\r\n"),
        ({"tool_use": "{{ tools }}"}, '{\n "tool_use": "{{ tools }}"\n}'),
        (None, ""),
    ):
        resume.write_options(config, 0, types.SimpleNamespace(chat_template=chat))
        assert (tmp_path / "chat_template.jinja").read_bytes().decode() == text


def refusal(config, former, error="the saved state must match: float32 and bfloat16"):
    """What a resume says that a state of `former` refuses."""
    Path(config.out).mkdir(exist_ok=True)
    run_dir.write_config(Path(config.out), former)
    with pytest.raises(ValueError) as caught, resume.restoring(config):
        raise ValueError(error)
    assert error in str(caught.value)
    return str(caught.value)


OPTIMISERS = (
    dict(lr=0.1), dict(schedule="cosine", steps=9), dict(warmup=3), dict(b1=0.5), dict(b2=0.5), dict(eps=1e-3),
    dict(weight_decay=0.1), dict(decay=("matrix",)), dict(clip=0.0), dict(ema=0.9), dict(state="float8"),
    dict(state="bfloat16"), dict(weights="bfloat16"), dict(gradients="bfloat16"), dict(name="sgd"), dict(name="muon"),
    dict(name="sgd", momentum=0.5), dict(name="sgd", momentum=0.0), dict(name="adafactor"),
)  # fmt: skip


def test_a_refused_resume_names_the_options_that_shape_the_state(tmp_path):
    """Those with which weights and moments have other shapes or dtypes, and no others."""
    table = models.table(models.config_from_hf({**tiny.HF, "vocab_size": 32}))
    config = lambda spec: sft.Config(model="m", data="d", out=str(tmp_path / "run"), optim=spec)

    def form(spec):
        optimizer = optim.make_optimizer(spec, table)
        params = jax.eval_shape(lambda p: optim.narrowed(p, table, spec.weights), param.abstract(table))
        return str(jax.tree.flatten_with_path((params, jax.eval_shape(optimizer.init, params)))[0])

    for start, options in itertools.product((dict(), dict(name="sgd")), OPTIMISERS):
        if not (start and {"b1", "b2", "eps"} & set(options)):  # sgd has none of them
            then, now = optim.Optimizer(**start), optim.Optimizer(**start | options)
            said = refusal(config(now), config(then))
            named = {name for name in options if f"--optim.{name.replace('_', '-')} " in said}
            assert bool(named) == (form(then) != form(now)), (start, options, said)


def test_a_refused_resume_names_the_dtype_where_the_state_has_it(tmp_path):
    """Weights under --optim.offload are in the dtype of the computation: on another kind of device, of another one."""
    offload, plain = optim.Optimizer(offload=True), optim.Optimizer()
    config = lambda dtype, spec, **more: sft.Config(
        model="m", data="d", out=str(tmp_path / "run"), optim=spec, run=models.Run(dtype=dtype), **more
    )
    said = refusal(config("float32", offload), config("bfloat16", offload))
    assert "other options, --run.dtype bfloat16 -> float32, which its state does not fit" in said
    assert "--run.dtype" not in refusal(config("float32", plain), config("bfloat16", plain))
    said = refusal(config(None, offload), config(None, offload))
    assert "its state depends on --run.dtype, by default bfloat16 on accelerators and float32 on a CPU" in said
    said = refusal(config(None, plain, lora=lora.Lora(4)), config(None, plain, lora=lora.Lora(2, alpha=3.0)))
    assert "--lora.rank 2 -> 4, which" in said and "alpha" not in said
