"""LoRA adapters in PEFT's format: the same logits and gradients both ways, also for the merged model."""

import builtins
import dataclasses
import io
import json
import os
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families
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
DELTA = dict(
    head_dim=12, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10,
    layer_types=["linear_attention", "full_attention"], rms_norm_eps=1e-2, initializer_range=0.2,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)  # fmt: skip
SHARED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28)
CASES = {
    "qwen2": COMMON,
    "phi3": COMMON | dict(pad_token_id=None),
    "qwen3_moe": COMMON | EXPERTS | dict(head_dim=12),
    "qwen2_moe": COMMON | EXPERTS | dict(shared_expert_intermediate_size=28),
    "deepseek_v3": COMMON
    | dict(
        num_key_value_heads=2,
        q_lora_rank=14,
        kv_lora_rank=18,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
    ),
    "gemma4_text": COMMON
    | dict(
        head_dim=6,
        global_head_dim=10,
        rms_norm_eps=1e-2,
        hidden_size_per_layer_input=12,
        pad_token_id=None,
        vocab_size_per_layer_input=61,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3_5_text": COMMON | DELTA | dict(linear_num_key_heads=2),
    "qwen3_5_moe_text": COMMON | DELTA | SHARED | dict(linear_num_key_heads=4),
    "qwen3_next": COMMON | DELTA | SHARED | dict(linear_num_key_heads=2, mlp_only_layers=[1]),
    "mixtral": COMMON | dict(num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": COMMON | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, pad_token_id=None),
    "minimax_m2": COMMON | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=12),
    "nemotron_h": COMMON
    | dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        num_hidden_layers=4,
        head_dim=10,
        layer_norm_epsilon=1e-3,
        mamba_num_heads=4,
        mamba_head_dim=10,
        n_groups=2,
        ssm_state_size=6,
        n_routed_experts=4,
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=28,
        moe_latent_size=16,
        pad_token_id=None,
    ),
    "gpt_oss": COMMON | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=12, initializer_range=0.1),
}
ALL = ("*",)  # routers too
TARGETS = {
    **dict.fromkeys(("gpt_oss", "llama4_text"), ("q", "k", "v", "o", "router")),  # their experts are fused
    # PEFT adapts neither convolutions nor what follows Mamba
    "nemotron_h": ("q", "k", "v", "o", "in_*", "*up", "*down", "router"),
}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 13))


def options(family):
    """Those of config.json."""
    return CASES[family] | {"model_type": family} if family in CASES else tiny_families.hf(family)


@cache
def torch_base(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**options(family))
    return transformers.AutoModelForCausalLM.from_config(config).eval().state_dict()


def torch_model(family):
    """A new model with the same weights: PEFT modifies the one it is given."""
    config = transformers.AutoConfig.for_model(**options(family))
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


# These have each way of naming and fusing tensors once. transformers knows no kimi_k2.
USUAL = ("qwen2", "phi3", "qwen3_moe", "deepseek_v3", "gemma4_text", "qwen3_5_text", "gpt_oss")
SAVED = [
    pytest.param(family, marks=[] if family in USUAL else [pytest.mark.slow] * (family in CASES) + [pytest.mark.wide])
    for family in dict.fromkeys([*CASES, *tiny_families.FAMILIES]) if family != "kimi_k2"
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("family", SAVED)
def test_saved_adapters_give_the_same_outputs_in_peft_and_merged(family, base, tmp_path):
    spec = lora.Lora(rank=3, alpha=5, targets=TARGETS.get(family, ALL), rslora=family == "qwen3_moe")
    both_ways(family, spec, base, tmp_path)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "phi3", "qwen3_moe", "qwen3_5_text"])
def test_saved_dora_adapters_give_the_same_outputs_in_peft_and_merged(family, base, tmp_path):
    targets = ("q", "k", "v", "o") if family == "qwen3_moe" else lora.Lora.targets
    both_ways(family, lora.Lora(rank=3, alpha=5, targets=targets, dora=True), base, tmp_path)


def both_ways(family, spec, base, tmp_path):
    """Saves adapters and their merged model, opens them in PEFT and transformers, and reads them again."""
    import peft  # takes longer than all other imports of the tests: not in workers without these tests

    config, params = base(family)
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
    assert dataclasses.replace(again, targets=spec.targets) == spec
    for x, y in zip(*map(jax.tree.leaves, (read, adapters)), strict=True):
        np.testing.assert_array_equal(x, y)


PROJECTIONS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
MADE = {  # what users pass to PEFT
    "qwen2": ("qwen2", dict(target_modules=PROJECTIONS, use_rslora=True)),
    "qwen2 one": ("qwen2", dict(target_modules=["o_proj"])),
    "qwen2 by a pattern": (
        "qwen2",
        dict(target_modules=r".*\.layers\.[01]\..*(q|v|k)_proj", exclude_modules=r".*\.k_proj"),
    ),
    "qwen2, all layers by number": (
        "qwen2",
        dict(target_modules=["q_proj", "o_proj"], layers_to_transform=[0, 1], exclude_modules=["o_proj"]),
    ),
    "qwen2, DoRA": ("qwen2", dict(target_modules=PROJECTIONS, use_dora=True)),
    "phi3, DoRA": ("phi3", dict(target_modules=["qkv_proj", "down_proj"], use_dora=True)),
    "phi3": ("phi3", dict(target_modules=["qkv_proj", "gate_up_proj", "down_proj"], use_rslora=True)),
    "qwen3_moe, fused by PEFT": ("qwen3_moe", dict(target_modules=PROJECTIONS)),
    "qwen3_moe, as parameters": (
        "qwen3_moe",
        dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    "qwen3_5_text": ("qwen3_5_text", dict(target_modules="all-linear")),
    "qwen3_5_text, only attention": ("qwen3_5_text", dict(target_modules=[*PROJECTIONS, "k_proj", "o_proj"])),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        dict(target_modules=["q_proj", "in_proj_qkv", "out_proj"], target_parameters=["experts.down_proj"]),
    ),
    "qwen3_next": ("qwen3_next", dict(target_modules=["q_proj", "in_proj_qkvz", "in_proj_ba"], use_rslora=True)),
    "nemotron_h": (
        "nemotron_h",
        dict(
            target_modules=["in_proj", "q_proj", "o_proj", "fc1_latent_proj"],
            target_parameters=["mixer.experts.up_proj", "mixer.experts.down_proj"],
        ),
    ),
    "nemotron_h, up alone": ("nemotron_h", dict(target_modules=["v_proj"], target_parameters=["experts.up_proj"])),
    "mixtral": (
        "mixtral",
        dict(target_modules=["k_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
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


@pytest.mark.sweep
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


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "phi3", "qwen3_next", "qwen2 DoRA", "phi3 DoRA"])
def test_gradients_equal_those_of_torch(name, base, tmp_path):
    import peft

    family, *dora = name.split()
    config, params = base(family)
    spec = lora.Lora(rank=3, alpha=5, dora=bool(dora))
    adapters = drawn(config, spec)
    adapters_in_files.save(tmp_path, config, adapters, spec)
    model = peft.PeftModel.from_pretrained(torch_model(family), tmp_path, is_trainable=True).eval()
    token = torch.tensor(TOKENS)
    logits = model(token[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), token[:, 1:].flatten()).backward()
    written = lambda name: name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
    wanted = {written(name): p.grad.numpy() for name, p in model.named_parameters() if "lora_" in name}

    @jax.jit
    @jax.grad
    def gradient(adapters):
        logits_BTV = models.forward(lora.join(params, adapters, spec), TOKENS[:, :-1], config=config)
        logp_BTV = jax.nn.log_softmax(logits_BTV)
        return -jnp.mean(jnp.take_along_axis(logp_BTV, TOKENS[:, 1:, None], -1))

    specs, arrays = hf.tensors_of(lora.table(models.table(config), spec), config.prefix, gradient(adapters), "float32")
    got = dict(zip(specs, arrays, strict=True))
    wanted = {key: x for name, whole in wanted.items() for key, x in one_by_one(family, name, whole).items()}
    assert got.keys() == wanted.keys()
    for key, x in wanted.items():
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(got[key], x, atol=1e-4 * np.abs(x).max(), err_msg=key)


def one_by_one(family, name, x, rank=3, E=4, F=20):
    """PEFT's fused gradients, split by hand: of all experts, where gate and up are fused in the inner adapter, and of
    fused modules, of whose B only the blocks are trained."""
    if name.endswith("magnitude_vector"):
        return {name: x}
    stem, factor, _ = name.rsplit(".", 2)
    rows = ROWS.get(family, {}).get(stem.rpartition(".")[2])
    if rows is not None and factor == "lora_B":
        return {name: x.reshape(len(x), -1, rank)[np.arange(len(x)), rows]}
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


PARTS = {"qkv_proj": (24, 12, 12), "gate_up_proj": (32, 32)}  # rows of q, k, v and of gate, up in phi3
# Which part each row of a fused module belongs to: of Qwen3-Next's by attention's head, or by key head.
ROWS = {
    "phi3": {module: np.repeat(range(len(sizes)), sizes) for module, sizes in PARTS.items()},
    "qwen3_next": {
        "q_proj": np.tile(np.repeat([0, 1], 12), 2), "in_proj_qkvz": np.tile(np.repeat(range(4), [6, 6, 20, 20]), 2),
    },
}  # fmt: skip


def saved(path):
    """(adapter_config.json, tensors) of adapters."""
    tensors = safetensors.read(path / "adapter_model.safetensors")
    return json.loads((path / "adapter_config.json").read_text()), {name: np.array(x) for name, x in tensors.items()}


def rewrite(path, tensors):
    """As another program writes them, which knows no manifest."""
    (path / "manifest.json").unlink(missing_ok=True)
    entries = {name: safetensors.describe(name, x) for name, x in tensors.items()}
    safetensors.write_file(path / "adapter_model.safetensors", entries, tensors.values())


def test_two_exports_are_never_mixed(base, tmp_path, monkeypatch):
    """The folder becomes another, with another scale, before any of its files is opened."""
    config, _ = base("qwen2")
    for seed, alpha in enumerate((4, 64)):
        spec = lora.Lora(rank=2, alpha=alpha, targets=("q",))
        tree = tiny.weights(lora.table(models.table(config), spec), 1.0, seed)
        adapters_in_files.save(tmp_path / str(alpha), config, tree, spec)
    first = lambda tree: np.asarray(jax.tree.leaves(tree)[0])
    whole = {alpha: first(adapters_in_files.load(tmp_path / str(alpha), config)[1]) for alpha in (4, 64)}
    point = lambda alpha: ((tmp_path / "next").symlink_to(str(alpha)), os.replace(tmp_path / "next", tmp_path / "now"))
    own, opened = open, 0

    def swapping(path, *args, **options):
        nonlocal opened
        if str(path).startswith(str(tmp_path / "now")):
            opened += 1
            if opened == at:
                point(64)
        return own(path, *args, **options)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", swapping)
    for at in range(1, 5):
        point(4)
        opened = 0
        try:
            spec, tree = adapters_in_files.load(tmp_path / "now", config)
            assert np.array_equal(first(tree), whole[spec.alpha]), at
        except ValueError as error:
            assert "does not match manifest.json; copy" in str(error)
        assert opened in (3, at - 1, at)


def test_adapters_that_changed_since_they_were_saved_are_refused(base, tmp_path):
    """One bit of a tensor, a name, or the scale; adapters without a manifest, as PEFT's, are read as they are."""
    config, _ = base("qwen2")
    spec = lora.Lora(rank=2, alpha=4, targets=("q", "up"))
    adapters_in_files.save(tmp_path, config, drawn(config, spec), spec)
    assert adapters_in_files.verify(tmp_path)
    whole = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    flipped = bytearray(whole["adapter_model.safetensors"])
    flipped[-5] ^= 1
    about = json.loads(whole["adapter_config.json"]) | {"lora_alpha": 5}
    renamed = whole["adapter_model.safetensors"].replace(b"layers.1.self_attn.q_proj", b"layers.2.self_attn.q_proj")
    for name, content, said in (
        ("adapter_model.safetensors", flipped, r"layers\.\d\S+ does not match manifest.json"),
        ("adapter_model.safetensors", renamed, "only in the manifest or only in the files"),
        ("adapter_config.json", json.dumps(about).encode(), "adapter_config.json does not match manifest.json"),
        ("manifest.json", b"{}", "manifest.json must list the tensors"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{said}.*or delete manifest.json if the adapters were changed on purp"):
            adapters_in_files.load(tmp_path, config)
        (tmp_path / name).write_bytes(whole[name])
    adapters_in_files.load(tmp_path, config)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    assert adapters_in_files.load(tmp_path, config)[0].alpha == 5


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("targets", [("q", "v", "up"), ("k",), ("gate", "up", "o")], ids=str)
def test_some_parts_of_fused_modules_have_adapters(targets, base, tmp_path):
    """The others add nothing; the file is as in the form by hand, and read back as it was."""
    import peft

    config, params = base("phi3")
    spec = lora.Lora(rank=2, alpha=3, targets=targets, rslora="up" in targets)
    adapters = drawn(config, spec)
    adapters_in_files.save(tmp_path, config, adapters, spec)
    about, tensors = saved(tmp_path)
    parts = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
    held = {module: [name for name in names if name in targets] for module, names in parts.items()}
    modules = {module: names for module, names in held.items() if names}
    assert about["target_modules"] == sorted([*modules, *(["o_proj"] if "o" in targets else [])])
    assert about["target_modules"] == adapters_in_files.modules(config, spec)
    ranks = {rf".*\.{module}": 2 * len(names) for module, names in modules.items() if len(names) > 1}
    assert about["rank_pattern"] == ranks and about["r"] == 2
    for module, names in modules.items():
        a, b = (tensors[f"base_model.model.model.layers.1.{at(module)}.lora_{factor}.weight"] for factor in "AB")
        stack = adapters["stacks"][0]
        np.testing.assert_array_equal(a, np.concatenate([stack[f"{name}_a"][1] for name in names]))
        wanted, starts = np.zeros(b.shape), np.cumsum([0, *PARTS[module]])
        for i, name in enumerate(names):
            place = parts[module].index(name)
            wanted[starts[place] : starts[place + 1], 2 * i : 2 * i + 2] = stack[f"{name}_b"][1]
        np.testing.assert_array_equal(b, wanted)
    logits = ours(config, lora.join(params, adapters, spec))
    same(theirs(peft.PeftModel.from_pretrained(torch_model("phi3"), tmp_path)), logits)
    again, read = adapters_in_files.load(tmp_path, config)
    assert dataclasses.replace(again, targets=()) == dataclasses.replace(spec, targets=())
    assert set(again.targets) == set(targets)
    for x, y in zip(*map(jax.tree.leaves, (read, adapters)), strict=True):
        np.testing.assert_array_equal(x, y)


def at(module):
    return f"{'self_attn' if module == 'qkv_proj' else 'mlp'}.{module}"


@pytest.mark.slow
def test_published_adapters_of_nemotron_h_have_one_rank(base, tmp_path):
    import peft

    config, params = base("nemotron_h")
    spec = lora.Lora(rank=2, alpha=3)
    adapters = drawn(config, spec)
    path = adapters_in_files.write_published(tmp_path, 4, config, adapters, spec, "base", "v0-label")
    about, _ = saved(path)
    assert about["r"] == 10 and not about["rank_pattern"]  # in_proj has five parts
    logits = ours(config, lora.join(params, adapters, spec))
    same(theirs(peft.PeftModel.from_pretrained(torch_model("nemotron_h"), path)), logits)
    again, read = adapters_in_files.load(path, config)
    same(ours(config, lora.join(params, read, again)), logits)


def test_adapters_of_nemotron_h_that_would_not_come_back_are_refused(tmp_path):
    """PEFT adapts nothing behind Mamba; in a file, adapters of square experts look alike."""
    import peft

    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba"):
        peft.get_peft_model(torch_model("nemotron_h"), peft.LoraConfig(target_modules=["out_proj"]))
    config = models.config_from_hf(CASES["nemotron_h"] | dict(model_type="nemotron_h", moe_intermediate_size=16))
    with pytest.raises(ValueError, match="lora.targets must not have out, out_proj, which PEFT refuses to adapt"):
        adapters_in_files.modules(config, lora.Lora(rank=2, targets=("out",)))
    for targets in (("expert_up", "expert_down"), ("expert_up",)):
        spec = lora.Lora(rank=2, targets=targets)
        adapters_in_files.save(tmp_path, config, drawn(config, spec), spec)
        if len(targets) > 1:
            _, read = adapters_in_files.load(tmp_path, config)
            for x, y in zip(*map(jax.tree.leaves, (read, drawn(config, spec))), strict=True):
                np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="must be of up_proj and down_proj, got one of the two, .*mixer.experts"):
        adapters_in_files.load(tmp_path, config)


def test_fused_adapters_that_were_trained_on_elsewhere(base, tmp_path):
    """Once PEFT has trained the zeros of B, each part needs all of A: ranks differ, and are padded."""
    import peft

    config, params = base("phi3")
    spec = lora.Lora(rank=2, alpha=3)
    adapters_in_files.save(tmp_path, config, drawn(config, spec), spec)
    _, tensors = saved(tmp_path)
    key = f"base_model.model.model.layers.0.{at('qkv_proj')}.lora_B.weight"
    tensors[key] += np.float32(0.1)
    rewrite(tmp_path, tensors)
    again, adapters = adapters_in_files.load(tmp_path, config)
    assert (again.rank, again.alpha) == (6, 9)
    logits = ours(config, lora.join(params, adapters, again))
    same(theirs(peft.PeftModel.from_pretrained(torch_model("phi3"), tmp_path)), logits)


@pytest.mark.slow
def test_published_adapters_of_fused_modules_have_one_rank(base, tmp_path):
    """Servers have no ranks by module; the adapters are still the same function, in PEFT and here."""
    import peft

    config, params = base("phi3")
    spec = lora.Lora(rank=2, alpha=3, rslora=True)
    adapters = drawn(config, spec)
    assert adapters_in_files.exported_rank(config, spec) == 6
    path = adapters_in_files.write_published(tmp_path, 4, config, adapters, spec, "base", "v0-label")
    about, tensors = saved(path)
    assert (about["r"], about["rank_pattern"], about["alpha_pattern"], about["use_rslora"]) == (6, {}, {}, False)
    assert about["target_modules"] == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    assert {x.shape[0 if "lora_A" in name else 1] for name, x in tensors.items()} == {6}
    assert adapters_in_files.verify(path)["base"] == "v0-label"
    logits = ours(config, lora.join(params, adapters, spec))
    same(theirs(peft.PeftModel.from_pretrained(torch_model("phi3"), path)), logits)
    again, read = adapters_in_files.load(path, config)
    same(ours(config, lora.join(params, read, again)), logits)


def test_bad_adapters_of_fused_modules_give_a_one_line_error(base, tmp_path):
    config, _ = base("phi3")
    spec = lora.Lora(rank=2, alpha=4, targets=("q", "k", "v", "up"))
    adapters_in_files.save(tmp_path, config, drawn(config, spec), spec)
    about, tensors = saved(tmp_path)
    a, b = (f"base_model.model.model.layers.1.{at('qkv_proj')}.lora_{factor}.weight" for factor in "AB")
    for changed, said in (
        ({name: x for name, x in tensors.items() if name != b}, f"missing {b}$"),
        (
            {name: x for name, x in tensors.items() if "layers.1" not in name},
            r"missing .*layers.1.*lora_A.weight \(k\)",
        ),
        (
            tensors | {b: tensors[b][1:]},
            rf"{a} and lora_B.weight must be \[rank, 24\] and \[48, rank\].* and \[47, 6\]",
        ),
        (tensors | {a: tensors[a][1:]}, r"got \[5, 24\] and \[48, 6\]"),
    ):
        rewrite(tmp_path, changed)
        with pytest.raises(ValueError, match=said):
            adapters_in_files.load(tmp_path, config)
    rewrite(tmp_path, tensors)
    qkv = r".*\.qkv_proj"
    for patterns in (({qkv: 6}, {}), ({qkv: 6}, {qkv: 8.0}), ({qkv: 5}, {qkv: 10.0}), ({qkv: 0}, {qkv: 0}),
                     ({r".*\.o_proj": 6}, {r".*\.o_proj": 12.0}), ([6], [12])):  # fmt: skip
        options = about | dict(zip(("rank_pattern", "alpha_pattern"), patterns, strict=True))
        (tmp_path / "adapter_config.json").write_text(json.dumps(options))
        with pytest.raises(ValueError, match="must have the same rank and alpha, got rank_pattern"):
            adapters_in_files.load(tmp_path, config)


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
    oss, _ = base("gpt_oss")
    with pytest.raises(ValueError, match="got expert_down, expert_gate, expert_up, which gpt_oss stores fused"):
        adapters_in_files.modules(oss, lora.Lora(rank=2, targets=("q", "expert_*")))
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
    parts = "adapter_model.safetensors", "adapter_config.json"
    for names in (*((name,) for name in parts), parts):  # or what is left of one
        for name in names:
            (tmp_path / name).unlink()
        adapters_in_files.save(tmp_path, config, drawn(config, spec), spec)
    tiny.model(tmp_path / "model")
    for name in ("", "config.json", "model.safetensors"):  # or of a checkpoint, which is not replaced
        (tmp_path / "model" / name).unlink() if name else None
        with pytest.raises(ValueError, match="contains files other than"):
            adapters_in_files.save(tmp_path / "model", config, drawn(config, spec), spec)
    (tmp_path / "manifest.json").unlink()
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    for changes, said in (
        (dict(peft_type="IA3"), "peft_type must be LORA, got 'IA3'"),
        (dict(peft_type="x" * 10**4), r"must be LORA, got 'x{79}$"),
        ({"x" * 10**4: "y" * 10**4}, "x{80} is not implemented, got 'y{79}; merge"),
        (dict(rank_pattern={"q_proj" * 10**4: 4}), r"got rank_pattern {'[q_proj]{78} and alpha_pattern {}; merge"),
        (dict(init_lora_weights="p" * 10**4), "got 'p{79}; others"),
        (dict(use_dora=True), r"must cover their targets in full, got missing \S*q_proj.lora_magnitude_vector"),
        (dict(bias="all"), "bias is not implemented, got 'all'"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save is not implemented"),
        (dict(fan_in_fan_out=True), "fan_in_fan_out is not implemented"),
        (dict(rank_pattern={"q_proj": 4}), "must have the same rank and alpha, got rank_pattern {'q_proj': 4}"),
        (dict(init_lora_weights="pissa"), "got 'pissa'; others may change the base"),
        *(
            (dict(r=r), "adapter_config.json: r, the rank, must be a whole number above 0")
            for r in (0, True, 2.5, "2", 10**9)
        ),
        *(
            (dict(lora_alpha=alpha), "adapter_config.json: lora_alpha must be a number above 0 that float32 holds")
            for alpha in (0, True, "4", float("inf"), float("nan"), 10**400)
        ),
        *(
            (changes, f"adapter_config.json: {name} must not leave out modules .*, got {count}, first {first}")
            for changes, name, count, first in (
                (dict(target_modules=["q_proj"]), "target_modules", 2, "model.layers.0.mlp.up_proj"),
                (dict(target_modules=None), "target_modules", 4, "model.layers.0.mlp.up_proj"),
                (dict(target_modules=r".*layers\.0.*"), "target_modules", 2, "model.layers.1.mlp.up_proj"),
                (dict(exclude_modules=["up_proj"]), "exclude_modules", 2, "model.layers.0.mlp.up_proj"),
                (dict(exclude_modules=r".*\.1\..*"), "exclude_modules", 2, "model.layers.1.mlp.up_proj"),
                (dict(layers_to_transform=[1]), "layers_to_transform", 2, "model.layers.0.mlp.up_proj"),
                (dict(layers_to_transform=0), "layers_to_transform", 2, "model.layers.1.mlp.up_proj"),
                (dict(layers_to_transform=[0, 1], layers_pattern="h"), "layers_to_transform", 4, "model.layers.0"),
            )
        ),
        (dict(target_modules=[1]), "target_modules must be names"),
        (dict(target_modules=5), "target_modules must be names, got 5"),
        (dict(target_modules="(q"), "target_modules must be a regular expression"),
        (dict(layers_to_transform=["0"]), "layers_to_transform must be numbers"),
        (dict(layers_to_transform=[0], layers_pattern="(a+)+"), "layers_pattern must be names of modules"),
        *((dict(use_rslora=value), "use_rslora must be true or false") for value in ("no", 1)),
        (dict(use_dora="no"), "use_dora must be true or false, got 'no'"),
        (dict(r=3), r"q_proj.lora_A.weight must be \[3, 24\].*, got \[2, 24\]"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | changes))
        with pytest.raises(ValueError, match=said):
            adapters_in_files.load(tmp_path, config)
    for changes in (
        dict(lora_dropout=0.1),  # used in training only
        dict(target_modules="all-linear"),
        dict(target_modules=r".*\.(q_proj|up_proj|k_proj)", exclude_modules="lm_head"),
        dict(target_modules=[*about["target_modules"], "k_proj"], exclude_modules=["o_proj"]),
        dict(layers_to_transform=[0, 1], layers_pattern=["layers"]),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(about | changes))
        assert adapters_in_files.load(tmp_path, config)[0] == spec
    tensors = saved(tmp_path)[1]
    first = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    for changed, said in (
        ({k: x for k, x in tensors.items() if k != first}, f"missing {first}"),
        (tensors | {"base_model.model.lm_head.weight": tensors[first]}, "unexpected base_model.model.lm_head.weight"),
        ({k: x for k, x in tensors.items() if "layers.1" not in k}, "missing .*layers.1"),
        ({"x" * 10**4: tensors[first]}, "must hold adapters of a qwen2, got x{200}$"),
        (tensors | {first: tensors[first].reshape(-1)}, f"{first} must be a matrix, got"),
        (tensors | {first: tensors[first] * np.float32("nan")}, f"numbers of {first} are not finite"),
    ):
        rewrite(tmp_path, changed)
        with pytest.raises(ValueError, match=said):
            adapters_in_files.load(tmp_path, config)


def test_dora_that_peft_cannot_hold_is_refused(base, tmp_path):
    """Before a run trains it; a published version too, which no server would load."""
    spec = lambda *targets: lora.Lora(rank=2, targets=targets, dora=True)
    with pytest.raises(ValueError, match="peft: lora.dora must be of modules, got mlp.down_proj.weight, mlp.gate"):
        adapters_in_files.modules(base("qwen3_moe")[0], spec("q", "gate", "up", "down"))
    with pytest.raises(ValueError, match="must be of all parts of a fused module, got q, v of .*qkv_proj.weight;"):
        adapters_in_files.modules(base("phi3")[0], spec("q", "v"))
    config, _ = base("qwen2")
    with pytest.raises(ValueError, match="write_published: servers have no DoRA adapters by name"):
        adapters_in_files.write_published(tmp_path, 1, config, drawn(config, spec("q")), spec("q"), "base", "0" * 32)
    adapters_in_files.save(tmp_path / "adapter", config, drawn(config, spec("q")), spec("q"))
    tensors = saved(tmp_path / "adapter")[1]
    first = "base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector"
    for changed, said in (
        ({k: x for k, x in tensors.items() if k != first}, f"missing {first}"),
        (tensors | {first: tensors[first][None]}, f"{first} must be a vector, got"),
        (tensors | {first: tensors[first][:-1]}, rf"{first} must be \[24\] by config.json, got \[23\]"),
    ):
        rewrite(tmp_path / "adapter", changed)
        with pytest.raises(ValueError, match=said):
            adapters_in_files.load(tmp_path / "adapter", config)
    config, _ = base("phi3")
    spec = lora.Lora(rank=2, dora=True)
    tensors = saved(adapters_in_files.save(tmp_path / "fused", config, drawn(config, spec), spec))[1]
    first = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_magnitude_vector"
    rewrite(tmp_path / "fused", tensors | {first: tensors[first][:-1]})
    with pytest.raises(ValueError, match=rf"{first} must be \[\d+\] by config.json, got"):
        adapters_in_files.load(tmp_path / "fused", config)
