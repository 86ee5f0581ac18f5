"""Score heads of classifiers and reward models: scores, gradients and files are those of transformers."""

import functools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
import tiny_families
import torch
import transformers
from transformers.models.auto import modeling_auto

from areax import models
from areax.adapters import cli, hf, safetensors
from areax.core import packing
from areax.models import lora
from areax.parallel import batches, mesh, rules
from areax.rollout.engine import checkpoint
from areax.rollout.types import supervised

V = 48
SIZES = dict(
    vocab_size=V, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=64, tie_word_embeddings=False,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LENGTHS = (7, 13, 1, 9)
NAMES = {0: "bad", 1: "neutral", 2: "good"}
LABELS = dict(id2label=NAMES, label2id={name: i for i, name in NAMES.items()})
CASES = [  # family, transformers' class, what its config.json says of the head
    ("qwen2", "Token", LABELS),
    ("qwen3", "Token", {}),  # 2 labels, which transformers does not write
    ("qwen3", "Token", dict(num_labels=1)),
    ("qwen3", "Token", dict(num_labels=3, token_classification_bias=False)),
    ("llama", "Sequence", LABELS),
    ("gemma2", "Token", dict(num_labels=5)),
    ("mistral", "Sequence", {}),
]


def reference(family, kind, **more):
    """A classifier of transformers."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | more)
    if family == "gemma2":
        config.head_dim = config.query_pre_attn_scalar = 8
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config).eval()
    return biased(model)


def biased(model):
    """Biases that are not 0, and scores that are not small."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias"):
                x += torch.randn(x.shape)
            elif name.startswith(("score.", "v_head.")):
                x *= 3
    return model


def sequences():
    rng = np.random.default_rng(1)
    return [rng.integers(3, V, n) for n in LENGTHS]


def batch():
    """The sequences in two packed rows."""
    rows = [supervised(tokens[:0], tokens) for tokens in sequences()]
    return jax.tree.map(lambda x: x[0], packing.pack(rows, 16, rows=2))


def apart(x_BTY, packed):
    """What a packed row has of each sequence."""
    rows, found = packed, {}
    for b, j in zip(*np.nonzero(rows.sample_BJ >= 0), strict=True):
        found[int(rows.sample_BJ[b, j])] = x_BTY[b][rows.segment_BT[b] == j + 1]
    return [np.asarray(found[i]) for i in range(len(LENGTHS))]


@functools.partial(jax.jit, static_argnames="config")
def ours(params, packed, weight_BTY, config):
    """(scores, gradient of their weighted sum)."""

    def loss(params):
        x_BTY = models.classify(params, packed, config=config).label_BTY
        return (x_BTY * weight_BTY).sum(), x_BTY

    gradient, x_BTY = jax.grad(loss, has_aux=True)(params)
    return x_BTY, gradient


def compare(config, params, module, head):
    """Packed rows compute the scores and gradients that `head` of torch computes of each sequence alone."""
    packed = batch()
    weight_BTY = np.random.default_rng(2).standard_normal((*packed.token_BT.shape, config.score_head.labels))
    weight_BTY = np.where(packed.segment_BT[..., None] > 0, weight_BTY, 0).astype(np.float32)
    got_BTY, gradient = ours(params, packed, weight_BTY, config)
    module.zero_grad()
    wanted = [head(torch.from_numpy(tokens)[None])[0] for tokens in sequences()]
    sum((x * torch.from_numpy(w)).sum() for x, w in zip(wanted, apart(weight_BTY, packed), strict=True)).backward()
    everything = np.concatenate([x.detach().numpy() for x in wanted])
    assert everything.std() >= 0.5
    worst = np.abs(np.concatenate(apart(got_BTY, packed)) - everything).max()
    assert worst <= 1e-5 * everything.std(), worst
    found = dict(zip(*hf.to_tensors(config, gradient, "float32"), strict=True))
    named = {name: x.grad.numpy() for name, x in module.named_parameters() if x.grad is not None}
    assert named.keys() == found.keys() - {"lm_head.weight"}
    for name, g in named.items():
        assert np.abs(found[name] - g).max() <= 1e-5 * np.abs(g).max(), name


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family, kind, said", CASES, ids=str)
def test_classifiers_are_those_of_transformers(family, kind, said, tmp_path):
    model = reference(family, kind, **said)
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    bias = kind == "Token" and said.get("token_classification_bias", True)
    assert config.score_head == models.ScoreHead(model.num_labels, bias=bias)
    compare(config, params, model, lambda ids: model.score(model.model(ids, use_cache=False).last_hidden_state))
    hf.save(tmp_path / "ours", config, params)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    written = json.loads((tmp_path / "ours/config.json").read_text())
    tied = model.config.tie_word_embeddings
    assert (written["architectures"], written["tie_word_embeddings"]) == ([type(model).__name__], tied)
    before, after = safetensors.read(tmp_path / "theirs"), safetensors.read(tmp_path / "ours")
    assert before.keys() == after.keys() and all(np.array_equal(x, after[name]) for name, x in before.items())
    assert (again.config.id2label, again.config.label2id) == (model.config.id2label, model.config.label2id)
    hf.save(tmp_path / "again", *hf.load(tmp_path / "ours"))
    assert files(tmp_path / "ours") == files(tmp_path / "again")


KINDS = {
    "Token": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "Sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
CLASSES = [(family, kind) for kind, names in KINDS.items() for family in tiny_families.FAMILIES if family in names]


@pytest.mark.wide
@pytest.mark.parametrize("family, kind", CLASSES)
def test_classifiers_of_every_family(family, kind, tmp_path):
    """Tensors come and go through files bit by bit; scores are those of transformers."""
    torch.manual_seed(0)
    options = tiny_families.hf(family, pad_token_id=0, **LABELS)
    settings = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    model = biased(getattr(transformers, f"AutoModelFor{kind}Classification").from_config(settings).eval())
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    assert config.score_head == models.ScoreHead(3, bias=kind == "Token")
    token_BT = np.random.default_rng(3).integers(3, V, (1, 12))
    rows = jax.tree.map(lambda x: x[0], packing.pack([supervised([], token_BT[0])], 12, rows=1))
    got_BTY = jax.jit(lambda params: models.classify(params, rows, config=config).label_BTY)(params)
    with torch.no_grad():
        wanted = model.score(model.model(torch.from_numpy(token_BT), use_cache=False).last_hidden_state).numpy()
    assert np.abs(got_BTY - wanted).max() <= 1e-4 * wanted.std()
    hf.save(tmp_path / "ours", config, params)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.slow
def test_sequence_classifiers_have_their_scores_at_the_last_token(tmp_path):
    model = reference("llama", "Sequence", **LABELS)
    model.save_pretrained(tmp_path)
    config, params = hf.load(tmp_path)
    packed = batch()
    got = apart(ours(params, packed, np.zeros((2, 16, 3), np.float32), config)[0], packed)
    with torch.no_grad():
        wanted = [model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy() for tokens in sequences()]
    np.testing.assert_allclose([x[-1] for x in got], wanted, atol=1e-5 * np.std(wanted))


class TwoLayers(torch.nn.Module):
    """A reward model of Qwen2.5-Math: a hidden layer and a ReLU before the scores."""

    def __init__(self, config, labels):
        super().__init__()
        D = config.hidden_size
        self.model = transformers.AutoModel.from_config(config)
        self.score = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.ReLU(), torch.nn.Linear(D, labels))


class ValueHead(torch.nn.Module):
    """A process reward model of Skywork: TRL's value head."""

    def __init__(self, config, labels):
        super().__init__()
        self.model = transformers.AutoModel.from_config(config)
        self.v_head = torch.nn.Module()
        self.v_head.summary = torch.nn.Linear(config.hidden_size, labels)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "made, architecture, labels",
    [
        (TwoLayers, "Qwen2ForProcessRewardModel", 2),
        (TwoLayers, "Qwen2ForRewardModel", 1),
        (ValueHead, "Qwen2ForPrmModel", 1),
    ],
)
def test_reward_models_with_code_of_their_own(made, architecture, labels, tmp_path):
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model("qwen2", **SIZES)
    module = biased(made(settings, labels).eval())
    told = settings.to_dict() | {"architectures": [architecture], "auto_map": {"AutoModel": "modeling_qwen2_rm.X"}}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text(json.dumps(told, default=str))
    held = {name: x.numpy() for name, x in module.state_dict().items()}
    held["lm_head.weight"] = np.ones((V, 24), np.float32)  # these checkpoints keep the one that they were made from
    safetensors.write(tmp_path / "theirs", held, held.values())
    config, params = hf.load(tmp_path / "theirs")
    assert config.score_head == models.ScoreHead(labels, bias=True, hidden=made is TwoLayers)
    head = getattr(module, "score", None) or module.v_head.summary
    scored = lambda ids: head(module.model(ids, use_cache=False).last_hidden_state)
    if made is TwoLayers:
        compare(config, params, module, scored)
    else:  # whose exports have transformers' names
        got = ours(params, batch(), np.zeros((2, 16, 1), np.float32), config)[0]
        with torch.no_grad():
            wanted = np.concatenate([scored(torch.from_numpy(tokens)[None])[0].numpy() for tokens in sequences()])
        np.testing.assert_allclose(np.concatenate(apart(got, batch())), wanted, atol=1e-5 * wanted.std())
    hf.save(tmp_path / "ours", config, params)
    written, stored = json.loads((tmp_path / "ours/config.json").read_text()), safetensors.read(tmp_path / "ours")
    if made is TwoLayers:
        assert written["architectures"] == [architecture] and written["auto_map"] == told["auto_map"]
    else:
        assert written["architectures"] == ["Qwen2ForTokenClassification"]
        held = {name.replace("v_head.summary", "score"): x for name, x in held.items()}
    assert stored.keys() == held.keys() and all(np.array_equal(stored[name], x) for name, x in held.items())
    hf.save(tmp_path / "again", *hf.load(tmp_path / "ours"))
    assert files(tmp_path / "ours") == files(tmp_path / "again")


def scored(path, head, **said):
    """A Qwen3 with this head in a folder, and what else its config.json says."""
    config, params = hf.load(tiny.model(path / "base"), init_missing=("score",), score_head=head)
    hf.save(path / "model", config, params)
    (path / "model/manifest.json").unlink()
    change(path / "model", **said)
    return path / "model"


def change(path, **said):
    told = json.loads((path / "config.json").read_text()) | said
    (path / "config.json").write_text(json.dumps({name: x for name, x in told.items() if x != "gone"}))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "said, words",
    [
        (dict(architectures=["Qwen3ForSequenceClassification"]), "unexpected score.bias"),
        (dict(token_classification_bias=False), "unexpected score.bias"),
        (dict(id2label="gone", num_labels="gone"), r"score.weight must be \[2, 32\] by config.json, got \[3, 32\]"),
        (dict(id2label="gone", num_labels=4), r"score.weight must be \[4, 32\] by config.json, got \[3, 32\]"),
        (dict(num_labels=4), "num_labels must be the number of labels in id2label, 3, got 4"),
        (dict(id2label={"0": "a", "2": "b"}), 'id2label must name labels "0", "1", ...'),
        (dict(id2label={}), 'id2label must name labels "0", "1", ...'),
        (dict(id2label={"0": 1}), "id2label must be texts by label, or null, got {'0': 1}"),
        (dict(id2label=["a"]), "id2label must be texts by label, or null"),
        (dict(num_labels=0), "num_labels must be a whole number of 1 to 10,000, or null, got 0"),
        (dict(num_labels=1 << 40), "num_labels must be a whole number of 1 to 10,000, or null"),
        (dict(num_labels=True), "num_labels must be a whole number of 1 to 10,000, or null, got True"),
        (dict(token_classification_bias="no"), "token_classification_bias must be true, false or null, got 'no'"),
    ],
)
def test_heads_that_config_json_does_not_state_are_refused(tmp_path, said, words):
    path = scored(tmp_path, models.ScoreHead(3, bias=True))
    assert hf.load(path)[0].score_head == models.ScoreHead(3, bias=True)
    change(path, **said)
    with pytest.raises(ValueError, match=words) as error:
        hf.load(path)
    assert "\n" not in str(error.value)


def test_a_head_needs_all_of_its_tensors(tmp_path):
    path = scored(tmp_path, models.ScoreHead(3))
    change(path, architectures=["Qwen3ForTokenClassification"])
    with pytest.raises(ValueError, match=r"missing score.bias$"):
        hf.load(path)
    with pytest.raises(ValueError, match=r"missing score.bias$"):  # there is a head, and no other is made
        hf.load(path, init_missing=("score",))
    change(tmp_path / "base", architectures=["Qwen3ForTokenClassification"])
    with pytest.raises(ValueError, match=r"missing score.weight, score.bias \(init_missing=\('score',\) initialises"):
        hf.load(tmp_path / "base")
    config, params = hf.load(tmp_path / "base", init_missing=("score",))
    assert params["score"].shape == (2, 32) and params["score_bias"].shape == (2,)


def test_a_classifier_without_an_output_head_predicts_no_tokens(tmp_path):
    model = reference("qwen2", "Token")
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    assert not config.output_head and not config.tied and "head" not in params
    for of in (lambda: models.forward(params, batch().token_BT, config=config),
               lambda: models.score(params, batch(), config=config)):  # fmt: skip
        with pytest.raises(ValueError, match="a classifier has no output head; its scores are read by models.classify"):
            of()
    with pytest.raises(ValueError, match="must have an output head to generate text, got a classifier without"):
        checkpoint.read_weights(str(tmp_path / "theirs"), "float32")
    config, params = hf.load(tmp_path / "theirs", init_missing=("head",))
    assert config.output_head and params["head"].shape == (V, 24)
    assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "converted")]) == 0
    assert safetensors.read(tmp_path / "converted").keys() == safetensors.read(tmp_path / "theirs").keys()


def test_without_an_architecture_tensors_decide(tmp_path):
    path = scored(tmp_path, models.ScoreHead(3, bias=True), architectures="gone", num_labels="gone", id2label="gone")
    assert hf.load(path)[0].score_head == models.ScoreHead(3, bias=True)


@pytest.mark.slow
def test_a_value_is_the_score_of_the_only_label():
    config = models.config_from_hf({**tiny.HF, "vocab_size": V})
    out = {}
    for labels in (1, 2):
        one = replace(config, score_head=models.ScoreHead(labels, bias=True))
        params = tiny.weights(models.table(one), 0.2)
        out[labels] = jax.jit(lambda params, one=one: models.classify(params, batch(), config=one))(params).label_BTY
        if labels == 1:
            value_BT = jax.jit(lambda params: models.value(params, batch(), config=one))(params).value_BT  # noqa: B023
            beside_BT = jax.jit(lambda params: models.score(params, batch(), config=one))(params).value_BT  # noqa: B023
            np.testing.assert_array_equal(out[1][..., 0], value_BT)
            np.testing.assert_allclose(beside_BT, value_BT, atol=1e-5)
        else:
            with pytest.raises(ValueError, match="value: needs a score head of one label, got 2; classify gives"):
                models.value(params, batch(), config=one)
            assert models.score(params, batch(), config=one).value_BT is None


@pytest.mark.slow
def test_scores_over_adapters_are_those_of_the_merged_model():
    config = models.config_from_hf({**tiny.HF, "vocab_size": V})
    config = replace(config, score_head=models.ScoreHead(3, bias=True))
    table, spec = models.table(config), lora.Lora(rank=4)
    params, adapters = tiny.weights(table, 0.2), tiny.weights(lora.table(table, spec), 0.2, seed=1)
    none = np.zeros((2, 16, 3), np.float32)
    got, wanted, plain = (
        ours(each, batch(), none, config)[0]
        for each in (lora.join(params, adapters, spec), lora.merge(params, adapters, spec), params)
    )
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert np.abs(got - plain).max() > 0.1


def test_a_head_with_a_hidden_layer_needs_an_architecture():
    config = replace(models.config_from_hf({**tiny.HF, "vocab_size": V}), score_head=models.ScoreHead(3, True, True))
    with pytest.raises(ValueError, match="save: no architecture of Qwen3 has a score head with a hidden layer and 3"):
        hf.save("unused", config, tiny.weights(models.table(config), 0.2))


@pytest.mark.slow
def test_scores_on_a_mesh_are_those_of_one_device():
    config = models.config_from_hf({**tiny.HF, "vocab_size": V})
    config = replace(config, score_head=models.ScoreHead(3, bias=True, hidden=True))
    params, packed = tiny.weights(models.table(config), 0.2), batch()
    weight_BTY = np.random.default_rng(2).standard_normal((2, 16, 3)).astype(np.float32)
    wanted_BTY, gradient = ours(params, packed, weight_BTY, config)
    on = mesh.make(mesh.Layout(fsdp=2, cp=2, tp=2))
    with jax.set_mesh(on):
        placed = jax.device_put(params, rules.of_params(models.table(config), on))
        one = jax.tree.map(lambda x: x[None], packed)
        rows = jax.tree.map(lambda x: x[0], batches.batch(one, on))
        got_BTY, parts = ours(placed, rows, weight_BTY, config)
    np.testing.assert_allclose(got_BTY, wanted_BTY, atol=1e-5)
    for name in ("score", "score_bias", "score_hidden", "score_hidden_bias", "embed"):
        np.testing.assert_allclose(parts[name], gradient[name], atol=1e-5 * np.abs(gradient[name]).max())
