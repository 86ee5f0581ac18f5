"""LoRA adapters in PEFT's format: the same logits and gradients both ways, also for the merged model."""

import dataclasses
import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers

from areax import models
from areax.adapters import hf, safetensors
from areax.adapters import peft as adapters_in_files
from areax.models import lora
from areax.parallel import mesh, rules

pytestmark = [  # PEFT warns about transformers 5 and about parameter patterns, which it does apply
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

COMMON = dict(
    vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.3, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[0])
CASES = {
    "qwen2": COMMON,
    "qwen3_moe": COMMON | EXPERTS | dict(head_dim=12),
    "qwen2_moe": COMMON | EXPERTS | dict(shared_expert_intermediate_size=28),
    "mixtral": COMMON | dict(num_local_experts=4, num_experts_per_tok=2),
}
ALL = ("*",)  # routers too
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 13))


@cache
def torch_base(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **CASES[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval().state_dict()


def torch_model(family):
    """A new model with the same weights: PEFT modifies the one it is given."""
    config = transformers.AutoConfig.for_model(family, **CASES[family])
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    made.load_state_dict(torch_base(family))
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """family -> (config, weights), as areax reads them from files."""

    @cache
    def load(family):
        path = tmp_path_factory.mktemp(family)
        torch_model(family).save_pretrained(path)
        return hf.load(path)

    return load


def drawn(config, spec):
    return tiny.weights(lora.table(models.table(config), spec), 0.3, seed=1)


def ours(config, params):
    return np.asarray(jax.jit(partial(models.forward, config=config))(params, TOKENS))


def theirs(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS), use_cache=False).logits.numpy()


def same(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("family", CASES)
def test_saved_adapters_give_the_same_outputs_in_peft_and_merged(family, base, tmp_path):
    import peft  # takes longer than all other imports of the tests: not in workers without these tests

    config, params = base(family)
    spec = lora.Lora(rank=3, alpha=5, targets=ALL, rslora=family == "qwen3_moe")
    adapters = drawn(config, spec)
    joined = lora.join(params, adapters, spec)
    logits = ours(config, joined)
    assert np.abs(logits - ours(config, params)).max() > 0.1 * np.abs(logits).max()
    adapters_in_files.save(tmp_path / "adapter", config, adapters, spec, base="some/model")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "some/model"
    same(theirs(peft.PeftModel.from_pretrained(torch_model(family), tmp_path / "adapter")), logits)
    hf.save(tmp_path / "merged", config, joined)
    same(theirs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits)
    copies = hf.host_copy(config, joined)
    for x, y in zip(*map(jax.tree.leaves, (copies, lora.merge(params, adapters, spec))), strict=True):
        np.testing.assert_array_equal(x, y)
    again, read = adapters_in_files.load(tmp_path / "adapter", config)
    assert dataclasses.replace(again, targets=ALL) == spec
    for x, y in zip(*map(jax.tree.leaves, (read, adapters)), strict=True):
        np.testing.assert_array_equal(x, y)


PROJECTIONS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
MADE = {  # what users pass to PEFT
    "qwen2": ("qwen2", dict(target_modules=PROJECTIONS, use_rslora=True)),
    "qwen2 one": ("qwen2", dict(target_modules=["o_proj"])),
    "qwen3_moe, fused by PEFT": ("qwen3_moe", dict(target_modules=PROJECTIONS)),
    "qwen3_moe, as parameters": (
        "qwen3_moe",
        dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    "qwen2_moe, down alone": ("qwen2_moe", dict(target_modules=["k_proj"], target_parameters=["experts.down_proj"])),
}


def trained(family, options):
    """PEFT adapters with both factors non-zero."""
    import peft

    model = peft.get_peft_model(torch_model(family), peft.LoraConfig(r=2, lora_alpha=3, **options)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_adapters_saved_by_peft_give_the_same_outputs(name, base, tmp_path):
    family, options = MADE[name]
    config, params = base(family)
    model = trained(family, options)
    model.save_pretrained(tmp_path)
    spec, adapters = adapters_in_files.load(tmp_path, config)
    logits = theirs(model)
    same(ours(config, lora.join(params, adapters, spec)), logits)
    assert np.abs(ours(config, params) - logits).max() > 0.1 * np.abs(logits).max()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_gradients_equal_those_of_torch(family, base, tmp_path):
    import peft

    config, params = base(family)
    spec = lora.Lora(rank=3, alpha=5)
    adapters = drawn(config, spec)
    adapters_in_files.save(tmp_path, config, adapters, spec)
    model = peft.PeftModel.from_pretrained(torch_model(family), tmp_path, is_trainable=True).eval()
    token = torch.tensor(TOKENS)
    logits = model(token[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), token[:, 1:].flatten()).backward()
    wanted = {name.replace(".default", ""): p.grad.numpy() for name, p in model.named_parameters() if "lora_" in name}

    @jax.jit
    @jax.grad
    def gradient(adapters):
        logits_BTV = models.forward(lora.join(params, adapters, spec), TOKENS[:, :-1], config=config)
        logp_BTV = jax.nn.log_softmax(logits_BTV)
        return -jnp.mean(jnp.take_along_axis(logp_BTV, TOKENS[:, 1:, None], -1))

    specs, arrays = hf.tensors_of(lora.table(models.table(config), spec), config.prefix, gradient(adapters), "float32")
    got = dict(zip(specs, arrays, strict=True))
    wanted = {key: x for name, whole in wanted.items() for key, x in one_by_one(name, whole, rank=3).items()}
    assert got.keys() == wanted.keys()
    for key, x in wanted.items():
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(got[key], x, atol=1e-4 * np.abs(x).max(), err_msg=key)


def one_by_one(name, x, rank, E=4, F=20):
    """PEFT's fused gradient of all experts, split by hand; gate and up are fused in the inner adapter."""
    stem, factor, _ = name.rsplit(".", 2)
    if ".experts" not in stem:
        return {name: x}
    inner = stem.endswith(".base_layer")
    stem, out = stem.removesuffix(".base_layer"), {}
    for i, each in enumerate(("gate_proj", "up_proj") if inner else ("down_proj",)):
        for e in range(E):
            if factor == "lora_A":
                whole = x.reshape(E, -1, x.shape[1])[e]
                part = whole[i * rank : (i + 1) * rank]
            else:
                whole = x.reshape(len(x), -1, E)[:, :, e]
                rows = slice(i * F, (i + 1) * F) if inner else slice(None)
                part = whole[rows, i * rank : (i + 1) * rank]
            out[f"{stem}.{e}.{each}.{factor}.weight"] = part
    return out


@pytest.mark.slow
def test_adapters_load_onto_a_mesh(base, tmp_path):
    config, _ = base("qwen2")
    spec = lora.Lora(rank=2, targets=("q", "down"))
    adapters, on = drawn(config, spec), mesh.make(mesh.Layout(fsdp=4, tp=2))
    adapters_in_files.save(tmp_path, config, adapters, spec)
    _, read = adapters_in_files.load(tmp_path, config, mesh=on)
    wanted = rules.of_params(lora.table(models.table(config), spec), on)
    for x, y, sharding in zip(*map(jax.tree.leaves, (read, adapters, wanted)), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding == sharding


def test_adapters_that_peft_cannot_represent_are_refused(base, tmp_path):
    config, _ = base("qwen3_moe")
    spec = lora.Lora(rank=2, targets=("expert_gate",))
    with pytest.raises(ValueError, match="must be of expert_down, expert_gate, expert_up, or only of expert_down"):
        adapters_in_files.save(tmp_path / "no", config, drawn(config, spec), spec)
    assert not (tmp_path / "no").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    spec = lora.Lora(rank=2, targets=("q",))
    with pytest.raises(ValueError, match="contains files other than a checkpoint"):
        adapters_in_files.save(tmp_path / "other", config, drawn(config, spec), spec)


def test_bad_adapters_give_a_one_line_error(base, tmp_path):
    config, _ = base("qwen2")
    spec = lora.Lora(rank=2, alpha=4, targets=("q", "up"))
    with pytest.raises(ValueError, match="adapters need .*, got no adapter_model.safetensors"):
        adapters_in_files.load(tmp_path, config)
    adapters_in_files.save(tmp_path, config, drawn(config, spec), spec)
    adapters_in_files.save(tmp_path, config, drawn(config, spec), spec)  # replaces an adapter
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    for changes, said in (
        (dict(peft_type="IA3"), "peft_type must be LORA, got 'IA3'"),
        (dict(use_dora=True), "use_dora is not implemented, got True; merge"),
        (dict(bias="all"), "bias is not implemented, got 'all'"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save is not implemented"),
        (dict(fan_in_fan_out=True), "fan_in_fan_out is not implemented"),
        (dict(rank_pattern={"q_proj": 4}), "must have the same rank and alpha, got rank_pattern {'q_proj': 4}"),
        (dict(init_lora_weights="pissa"), "got 'pissa'; others may change the base"),
        *((dict(r=r), "adapter_config.json: r, the rank, must be a whole number above 0") for r in (0, True, 2.5, "2")),
        *(
            (dict(lora_alpha=alpha), "adapter_config.json: lora_alpha must be a finite number above 0")
            for alpha in (0, True, "4", float("inf"), float("nan"), 10**400)
        ),
        *((dict(use_rslora=value), "use_rslora must be true or false") for value in ("no", 1)),
        (dict(r=3), r"q_proj.lora_A.weight must be \[3, 24\].*, got \[2, 24\]"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | changes))
        with pytest.raises(ValueError, match=said):
            adapters_in_files.load(tmp_path, config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(about | dict(lora_dropout=0.1)))
    assert adapters_in_files.load(tmp_path, config)[0] == spec  # used in training only
    tensors = {name: np.array(x) for name, x in safetensors.read(tmp_path / "adapter_model.safetensors").items()}
    first = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    for changed, said in (
        ({k: x for k, x in tensors.items() if k != first}, f"missing {first}"),
        (tensors | {"base_model.model.lm_head.weight": tensors[first]}, "unexpected base_model.model.lm_head.weight"),
        ({k: x for k, x in tensors.items() if "layers.1" not in k}, "missing .*layers.1"),
        ({"x": tensors[first]}, "must hold adapters of a qwen2, got x"),
        (tensors | {first: tensors[first].reshape(-1)}, f"{first} must be a matrix, got"),
        (tensors | {first: tensors[first] * np.float32("nan")}, f"numbers of {first} are not finite"),
    ):
        entries = {name: safetensors.describe(name, x) for name, x in changed.items()}
        safetensors.write_file(tmp_path / "adapter_model.safetensors", entries, changed.values())
        with pytest.raises(ValueError, match=said):
            adapters_in_files.load(tmp_path, config)
