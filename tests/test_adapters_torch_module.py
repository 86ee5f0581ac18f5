"""The torch module beside transformers' of the same weights: names, outputs, gradients, memory, and what is refused."""

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
import tiny_families
import torch
import transformers

from areax import models
from areax.adapters import hf
from areax.adapters import torch as state_dicts
from areax.adapters.torch.module import Model, params

V, T = 32, 12
SHARED = dict(
    vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, initializer_range=0.3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
KINDS = {
    "qwen3": dict(tie_word_embeddings=True),
    "phi3": dict(tie_word_embeddings=False, partial_rotary_factor=1.0),
    "glm4_moe": dict(
        tie_word_embeddings=False, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
        first_k_dense_replace=1, n_group=1, topk_group=1, use_qk_norm=True,
    ),
}  # fmt: skip
TINY = dict(
    vocab_size=7, hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=2, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4, norm_topk_prob=True)
IDS = torch.from_numpy(np.random.default_rng(0).integers(0, V, (2, T)))
QUERY = "model.layers.1.self_attn.q_proj.weight"


@functools.cache
def transformer(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SHARED | KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.state_dict().values():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape)
    return model


def loaded(kind="qwen3", **run):
    theirs = transformer(kind)
    config = models.config_from_hf(theirs.config.to_dict())
    return Model(*state_dicts.from_state_dict(config, theirs.state_dict()), models.Run(**run))


@pytest.fixture(params=KINDS)
def pair(request):
    theirs = transformer(request.param)
    theirs.zero_grad()
    return loaded(request.param), theirs


def assert_close(got, wanted, tolerance=1e-4):
    assert (got - wanted).abs().max() <= tolerance * max(1, wanted.abs().max())


def assert_equal_gradients(ours, theirs):
    wanted = {name: weight.grad for name, weight in theirs.named_parameters()}
    got = {name: weight.grad for name, weight in ours.named_parameters()}
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (got[name] - grad).abs().max() <= 1e-4 * grad.abs().max(), name


@pytest.mark.sweep
@pytest.mark.parametrize("family", [name for name in tiny_families.FAMILIES if name != "kimi_k2"])
def test_names_are_those_of_transformers_and_weights_go_both_ways(family):
    config = tiny_families.config(family)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**models.config_to_hf(config))
        )
    weights = tiny.weights(models.table(config), 0.1)
    ours = Model(config, weights)
    assert jax.tree.all(jax.tree.map(np.array_equal, params(ours), weights))
    sizes = lambda tensors: {name: tuple(x.shape) for name, x in tensors}
    assert sizes(ours.state_dict().items()) == sizes(theirs.state_dict().items())
    for duplicates in (False, True):
        named = [dict(model.named_parameters(remove_duplicate=duplicates)) for model in (ours, theirs)]
        assert named[0].keys() == named[1].keys()


@pytest.mark.sweep
def test_state_dicts_are_interchangeable(pair, tmp_path):
    ours, theirs = pair
    other = copy.deepcopy(theirs)
    with torch.no_grad():
        for weight in ours.parameters():
            weight.mul_(1.5)
    other.load_state_dict(ours.state_dict())
    assert_close(ours(IDS).logits, other(IDS).logits)
    ours.load_state_dict(theirs.state_dict())
    assert_close(ours(IDS).logits, theirs(IDS).logits)
    read = transformers.AutoModelForCausalLM.from_pretrained(ours.save_pretrained(tmp_path / "saved"))
    assert all(torch.equal(x, theirs.state_dict()[name]) for name, x in read.state_dict().items())


@pytest.mark.slow
@pytest.mark.sweep
def test_losses_and_gradients_are_those_of_transformers(pair):
    ours, theirs = pair
    labels = IDS.masked_fill(torch.arange(T) < 4, -100)
    got, wanted = ours(IDS, labels=labels), theirs(IDS, labels=labels)
    assert got.logits is None
    assert_close(got.loss, wanted.loss, 1e-5)
    got.loss.backward()
    wanted.loss.backward()
    assert_equal_gradients(ours, theirs)
    ours.zero_grad()
    both = ours(IDS, labels=labels, skip_logits=False)
    assert_close(both.loss, wanted.loss, 1e-5)
    assert_close(both.logits, wanted.logits)
    both.loss.backward()
    assert_equal_gradients(ours, theirs)
    whole = {"num_items_in_batch": torch.tensor(100)}
    for training in (True, False):
        for model in pair:
            model.train(training)
        assert_close(ours(IDS, labels=labels, **whole).loss, theirs(IDS, labels=labels, **whole).loss, 1e-5)
    theirs.train()


@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_nothing(left):
    ours, theirs = loaded(), transformer("qwen3")
    alone = theirs(IDS[:1, :7], labels=IDS[:1, :7])
    pad = lambda x, value: torch.nn.functional.pad(x, (5, 0) if left else (0, 5), value=value)
    padded = dict(input_ids=pad(IDS[:1, :7], 3), attention_mask=pad(torch.ones(1, 7), 0), labels=pad(IDS[:1, :7], -100))
    padded["attention_mask"] = padded["attention_mask"].long()
    got, wanted = ours(**padded, skip_logits=False), theirs(**padded)
    own = slice(5, None) if left else slice(7)
    assert_close(got.logits[:, own], alone.logits)
    assert_close(got.logits[:, own], wanted.logits[:, own])
    assert_close(got.loss, alone.loss, 1e-5)
    assert_close(ours(**padded).loss, alone.loss, 1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["segments", "positions"])
def test_packed_rows_are_separate_sequences(how):
    ours, theirs = loaded(), transformer("qwen3")
    lengths = 5, 4
    parts = IDS[0, : sum(lengths)].split(lengths)
    row = torch.cat([*parts, torch.zeros(3, dtype=torch.int64)])[None] if how == "segments" else torch.cat(parts)[None]
    segments = torch.tensor([[1] * 5 + [2] * 4 + [0] * 3])
    more = (
        dict(segment_ids=segments) if how == "segments" else dict(position_ids=torch.tensor([[*range(5), *range(4)]]))
    )
    labels = torch.where(segments[:, : row.shape[1]] > 0, row, -100)
    got = ours(row, labels=labels, **more, skip_logits=False)
    wanted = [theirs(part[None], labels=part[None]) for part in parts]
    assert_close(got.logits[:, :9], torch.cat([each.logits for each in wanted], 1))
    mean = (4 * wanted[0].loss + 3 * wanted[1].loss) / 7
    assert_close(got.loss, mean, 1e-5)
    assert_close(ours(row, labels=labels, **more).loss, mean, 1e-5)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("labelled", [False, True])
def test_gradcheck(more, labelled):
    """All entries of the Jacobian by differences in float64; with experts a random combination of them."""
    with jax.enable_x64(True):
        config = models.config_from_hf({"model_type": "qwen3_moe" if more else "qwen3", **TINY, **more})
        weights = tiny.weights(models.table(config), 0.3)
        model = Model(config, jax.tree.map(lambda x: np.asarray(x, np.float64), weights), models.Run(remat="none"))
        names, values = zip(*model.named_parameters(), strict=True)
        ids = torch.tensor([[1, 2, 3, 4, 0]])

        def computed(*values):
            given = dict(zip(names, values, strict=True)), (ids,), {"labels": ids if labelled else None}
            out = torch.func.functional_call(model, *given)
            return out.loss if labelled else out.logits

        assert {value.dtype for value in values} == {torch.float64}
        assert torch.autograd.gradcheck(computed, values, fast_mode=bool(more) or not labelled)


def kept_by(model):
    """(loss, shapes of what torch keeps for its gradient besides the weights)."""
    kept: list = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = model(IDS, labels=IDS).loss
    weights = {x.data_ptr() for x in [*model.parameters(), *model.buffers()]}
    return loss, [tuple(x.shape) for x in kept if x.data_ptr() not in weights]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_only_what_is_kept(remat):
    model, theirs = loaded(remat=remat), transformer("qwen3")
    loss, shapes = kept_by(model)
    of_layers = [shape for shape in shapes if shape[:1] == (SHARED["num_hidden_layers"],)]
    assert (of_layers == [(3, 2, T, 16)]) == (remat == "full")  # their inputs
    loss.backward()
    theirs.zero_grad()
    theirs(IDS, labels=IDS).loss.backward()
    assert_equal_gradients(model, theirs)


@pytest.mark.long
def test_frozen_weights_are_not_differentiated():
    model, theirs = loaded("glm4_moe"), transformer("glm4_moe")
    inputs = (2, 2, T, 16)  # of the layers with experts
    assert inputs in kept_by(model)[1]
    for tensor in [*model.model.layers.parameters(), *model.model.embed_tokens.parameters()]:
        tensor.requires_grad_(False)
    loss, shapes = kept_by(model)
    assert inputs not in shapes  # there is no backward pass through layers
    loss.backward()
    theirs.zero_grad()
    theirs(IDS, labels=IDS).loss.backward()
    named = dict(model.named_parameters())
    assert {name for name, x in named.items() if x.grad is not None} == {"model.norm.weight", "lm_head.weight"}
    assert_close(model.lm_head.weight.grad, theirs.lm_head.weight.grad)
    name = QUERY.replace("1", "2")
    named[name].requires_grad_()
    model(IDS, labels=IDS).loss.backward()
    assert_close(named[name].grad, theirs.get_parameter(name).grad)
    assert named[QUERY].grad is None  # of the same array


def test_layers_are_a_list_and_parts_show_their_shapes():
    model, theirs = loaded("glm4_moe"), transformer("glm4_moe")
    assert len(model.model.layers) == len(theirs.model.layers)
    shapes = lambda layer: {name: x.shape for name, x in layer.named_parameters()}
    assert [*map(shapes, model.model.layers)] == [*map(shapes, theirs.model.layers)]
    assert "(q_proj): Weights(weight: [16, 16])" in repr(model)
    model.model.layers[:2].requires_grad_(False)
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    early = ("model.layers.0.", "model.layers.1.")
    assert trained == {name for name, _ in model.named_parameters() if not name.startswith(early)}


def test_without_gradients_only_the_forward_pass_runs():
    model = loaded()
    for _ in range(2):
        loss, shapes = kept_by(model)
        assert loss.requires_grad and shapes
        with torch.no_grad():
            loss, shapes = kept_by(model)
        assert not loss.requires_grad and not shapes
    model.requires_grad_(False)
    loss, shapes = kept_by(model)
    assert not loss.requires_grad and not shapes


def test_weights_are_shared_with_jax():
    model = loaded()
    tree, memory = params(model), {x.data_ptr() for x in model.parameters()}
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)} < memory  # of the first layer of each stack
    wanted = model(IDS).logits
    jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: 0 * x, tree), donate_argnums=0)(tree))
    assert torch.equal(model(IDS).logits, wanted)  # what torch owns is not donated


@pytest.mark.slow
def test_an_optimiser_changes_what_areax_computes_and_saves(tmp_path):
    model = loaded()
    before = model(IDS).logits.detach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    after = model(IDS).logits.detach()
    assert (after - before).abs().max() > 0.1
    ours = jax.jit(models.forward, static_argnames="config")
    assert np.abs(ours(params(model), IDS.numpy(), config=model.settings) - after.numpy()).max() <= 1e-4
    path = model.save_pretrained(tmp_path / "saved", dtype="float32")
    config, saved = hf.load(path)
    assert jax.tree.all(jax.tree.map(np.array_equal, saved, params(model)))
    assert np.abs(ours(saved, IDS.numpy(), config=config) - after.numpy()).max() <= 1e-4
    assert torch.equal(Model(*hf.mapped(path)[:2])(IDS).logits, after)


def test_gradients_may_be_changed_in_place():
    model = loaded()

    def gradients():
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return {name: x.grad for name, x in model.named_parameters()}

    first = gradients()
    wanted = {name: x.clone() for name, x in first.items()}
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    for x in first.values():
        x.fill_(7)
    second = gradients()
    assert all(torch.equal(x, wanted[name]) for name, x in second.items())
    assert all(torch.equal(x, weights[name]) for name, x in model.named_parameters())
    model(IDS, labels=IDS).loss.backward()  # added to the first
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    norm = torch.stack([x.norm() for x in wanted.values()]).norm()
    for name, x in model.named_parameters():
        torch.testing.assert_close(x.grad, wanted[name] / norm * 1e-3, rtol=1e-3, atol=1e-9)
    logits = model(IDS).logits
    logits.div_(2).sum().backward()


def test_a_backward_pass_refuses_weights_that_were_changed():
    model = loaded()
    loss = model(IDS, labels=IDS).loss
    with torch.no_grad():
        model.get_parameter(QUERY).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_is_freed_unless_it_is_retained():
    model = loaded()
    loss = model(IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    once = model.get_parameter(QUERY).grad.clone()
    loss.backward()
    torch.testing.assert_close(model.get_parameter(QUERY).grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="cannot be differentiated again, got create_graph=True"):
        model(IDS, labels=IDS).loss.backward(create_graph=True)


@pytest.mark.slow
def test_weights_that_moved_are_copied_or_placed_again():
    model = loaded()
    wanted = model(IDS).logits
    assert torch.equal(copy.deepcopy(model)(IDS).logits, wanted)
    other = loaded()
    other.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    assert torch.equal(other(IDS).logits, wanted)
    narrow = loaded().bfloat16()
    shared = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params(narrow))}
    assert shared < {x.data_ptr() for x in narrow.parameters()}
    narrow(IDS, labels=IDS).loss.backward()
    assert narrow.get_parameter(QUERY).grad.dtype == torch.bfloat16
    theirs = copy.deepcopy(transformer("qwen3")).bfloat16()
    assert_close(narrow(IDS).logits, theirs(IDS).logits.float(), 0.05)
    mixed = loaded(dtype="bfloat16")
    mixed(IDS, labels=IDS).loss.backward()
    assert mixed.get_parameter(QUERY).grad.dtype == torch.float32
    assert_close(mixed(IDS).logits, theirs(IDS).logits.float(), 0.05)


ONES = torch.ones_like(IDS)
LATE = ONES.clone()
LATE[0, 3] = 0
HALF = ONES.clone()
HALF[:, 8:] = 0


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(input_ids=IDS[0]), r"input_ids: must be \[rows, tokens\], got \[12\]"),
        (dict(input_ids=IDS + 1), "input_ids: tokens must be in the vocabulary of 32, got 32"),
        (dict(input_ids=IDS[:0]), r"input_ids: must have a row and a token, got \[0, 12\]"),
        (dict(input_ids=IDS + 2**32), "input_ids: must be 32-bit integers, got 42949"),
        (dict(labels=IDS + 2**32), "labels: must be 32-bit integers, got 42949"),
        (dict(labels=IDS - 1), "labels: tokens must be in the vocabulary of 32, got -1"),
        (dict(attention_mask=LATE), "attention_mask: zeros must be padding at one end of a row, got some between"),
        (dict(attention_mask=ONES[:, None]), r"attention_mask: must be \[2, 12\] as input_ids, got \[2, 1, 12\]"),
        (dict(attention_mask=ONES.float()), "attention_mask: must hold integers, got torch.float32"),
        (dict(segment_ids=ONES - 2), "segment_ids: must be at least 0, which is padding, got -1"),
        (dict(attention_mask=HALF, segment_ids=ONES), "attention_mask: must be left out with segment_ids"),
        (dict(attention_mask=HALF, labels=IDS), "labels: must be -100 at padding, got 8 other labels there"),
    ],
)
def test_wrong_rows_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        loaded()(**dict(input_ids=IDS) | given)


def test_a_tied_head_stays_tied():
    """Whatever replaces tensors: state dicts would otherwise keep a head that does not train."""
    model, state = loaded(), {name: x.clone() for name, x in transformer("qwen3").state_dict().items()}
    model.load_state_dict(state, assign=True)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        assert one.lm_head.weight is one.model.embed_tokens.weight
        tensors = {x.data_ptr() for x in one.parameters()}
        assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params(one))} < tensors  # none is copied
    changed = {name: x * 1.5 for name, x in model.named_parameters()}
    wanted = torch.func.functional_call(copy.deepcopy(transformer("qwen3")), changed, (IDS,)).logits
    assert_close(torch.func.functional_call(model, changed, (IDS,)).logits, wanted)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(ValueError, match="lm_head.weight and model.embed_tokens.weight must be one parameter"):
        model(IDS)


def test_torch_can_compute_again_what_a_backward_pass_needs():
    model, theirs = loaded(), transformer("qwen3")
    theirs.zero_grad()
    again = torch.utils.checkpoint.checkpoint(lambda ids: model(ids, labels=ids).loss, IDS, use_reentrant=False)
    again.backward()
    theirs(IDS, labels=IDS).loss.backward()
    assert_close(model.get_parameter(QUERY).grad, theirs.get_parameter(QUERY).grad)


@pytest.mark.slow
def test_it_runs_compiled_pickled_and_without_autograd(tmp_path):
    model = loaded()
    wanted = model(IDS).logits
    torch.save(model, tmp_path / "model")
    assert torch.equal(torch.load(tmp_path / "model", weights_only=False)(IDS).logits, wanted)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, wanted)
    compiled = torch.compile(model, backend="eager")  # torch leaves it to JAX
    compiled(IDS, labels=IDS).loss.backward()
    assert torch.equal(compiled(IDS).logits, wanted) and model.get_parameter(QUERY).grad is not None


def test_a_backbone_gets_the_names_of_a_causal_model():
    theirs = transformer("qwen3")
    state = {name.removeprefix("model."): x for name, x in theirs.model.state_dict().items()}
    config, weights = state_dicts.from_state_dict(models.config_from_hf(theirs.config.to_dict()), state)
    assert config.prefix == "" and Model(config, weights).state_dict().keys() == theirs.state_dict().keys()


def test_what_jax_cannot_take_is_refused():
    with pytest.raises(ValueError, match="must be where JAX computes, got meta and cpu"):
        loaded().to("meta")(IDS)
    with pytest.raises(ValueError, match="torch.float64 need .*x64.*, JAX has float32"):
        loaded().double()(IDS)
    mixed = loaded()
    mixed.get_submodule("model.layers.1").bfloat16()
    with pytest.raises(ValueError, match="must have one dtype, got .'torch.bfloat16', 'torch.float32'"):
        mixed(IDS)
    config = models.config_from_hf(transformer("qwen3").config.to_dict())
    with pytest.raises(ValueError, match="neither a vision tower nor a score head"):
        Model(dataclasses.replace(config, score_head=models.ScoreHead()), {})
    with pytest.raises(ValueError, match="Model: the parameters must match the config, got missing embed, norm"):
        Model(config, transformer("qwen3").state_dict())
