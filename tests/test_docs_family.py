"""docs/add-a-family.md, followed to the letter: the model families in its files equal transformers."""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from areax import models
from areax.adapters import hf
from areax.parallel import mesh
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.request import Request, Sampling

GUIDE = Path(__file__).parents[1] / "docs" / "add-a-family.md"
SIZES = dict(
    vocab_size=66, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3, attention_bias=True, max_position_embeddings=64, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
MORE = {
    "arcee": dict(mlp_bias=True),
    "qwen3_next": dict(
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=10, rms_norm_eps=1e-2,
        linear_value_head_dim=14, full_attention_interval=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=20, shared_expert_intermediate_size=28, mlp_only_layers=[0],
    ),
}  # fmt: skip
# Of gradients. Those of transformers' delta rule are up to 2.8e-4 from float64, ours 1.1e-5 (test_models_parity.py).
TOLERANCE = {"arcee": 1e-4, "qwen3_next": 3e-4}
T = 19


def written(name):
    """The guide's file of a family."""
    files = dict(zip(MORE, re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S), strict=True))
    return files[name]


@pytest.fixture(params=MORE)
def family(request, monkeypatch, tmp_path):
    """Registers the guide's file as a family by its entry in the dictionary."""
    path = tmp_path / f"{request.param}.py"
    path.write_text(written(request.param))
    spec = importlib.util.spec_from_file_location(f"areax.models.{request.param}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(models.FAMILIES, request.param, module)
    return request.param


def reference(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | MORE[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.4 * torch.randn(weight.shape)
    return model


@pytest.mark.docs
def test_the_families_of_the_guide_equal_transformers(family, tmp_path):
    model = reference(family)
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    token = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, T))
    logits = model(input_ids=torch.from_numpy(token), use_cache=False).logits
    assert logits.std() >= 1
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.from_numpy(token)[:, 1:].flatten()).backward()

    def loss(params):
        logits_BTV = models.forward(params, token, config=config)
        logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp_BTV, token[:, 1:, None], -1)), logits_BTV

    gradient, got = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(got, logits.detach().numpy(), atol=1e-4)
    wanted = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    _, wanted = hf.from_tensors(config, wanted, "gradients")
    for (name, ours), g in zip(jax.tree.leaves_with_path(gradient), jax.tree.leaves(wanted), strict=True):
        assert np.abs(ours - g).max() <= TOLERANCE[family] * np.abs(g).max(), name

    hf.save(tmp_path / "ours", config, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))

    # decoding and meshes, which the guide says work without further code
    sampling = Sampling(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    engine = Engine(config, params, slots=1, context=32)
    made = [
        t for progress in engine.generate([Request("0", tuple(token[0].tolist()), sampling)]) for t in progress.tokens
    ]
    assert made == model.generate(torch.from_numpy(token[:1]), max_new_tokens=8, do_sample=False)[0, T:].tolist()
    on = mesh.make(mesh.Layout(fsdp=2, cp=1, tp=2), jax.devices()[:4])
    _, spread = hf.load(tmp_path / "theirs", mesh=on)
    with jax.set_mesh(on):
        there = jax.jit(lambda p: models.forward(p, token, config=config))(spread)
    np.testing.assert_allclose(there, got, atol=1e-5)


def test_the_guide_shows_the_file_of_qwen3_next():
    assert written("qwen3_next") == Path(models.families.qwen3_next.__file__).read_text()


def test_the_page_of_models_lists_every_family():
    page = (GUIDE.parent / "models.md").read_text().partition("\n## ")[0]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(models.FAMILIES)


def test_the_tests_of_the_checklist_exist():
    """Each is a function of the file that is named last."""
    listed = GUIDE.read_text().partition("## 6.")[2]
    defined, file = [], ""
    for name, test in re.findall(r"`((?:sglang/)?test_\w+\.py)?(?:::(test_\w+))?`", listed):
        file = name or file
        source = (Path(__file__).parent / file).read_text()
        assert not test or f"\ndef {test}(" in source, f"{file}::{test}"
        defined += [test] if test else []
    assert len(defined) >= 40 and len(set(defined)) >= 38


def test_tests_that_take_all_families_take_all():
    """Those of the checklist's rows that say "all" read the list of families, and so do not miss a new one."""
    rows = re.findall(r"^\| .* \| .* \| (.*) \| (.*) \|$", GUIDE.read_text().partition("## 6.")[2], re.M)
    files = {re.findall(r"`([\w/]+\.py)", tests)[0] for tests, takes in rows if takes.startswith("all")}
    assert len(files) >= 6
    for file in files:
        source = (Path(__file__).parent / file).read_text()
        assert "tiny_families" in source or "models.FAMILIES" in source, file
