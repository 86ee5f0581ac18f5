"""Images in training: batches with a vision tower score as transformers does, and what trains is what should."""

import io
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import torch
import vlm

from areax.adapters import hf, peft, safetensors, tokenizer
from areax.adapters.data import images as readers
from areax.core import kl, losses, optim, packing
from areax.models.lora import Lora
from areax.parallel import mesh
from areax.recipes.shared import learner, rl_options, trainer, vision
from areax.rollout.scheduling import validation
from areax.rollout.types import Image, Sample

NAME, COPY = "qwen3_vl", 61  # a token with the embedding of the one that stands for an image
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 2, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 32, "longest_edge": 400},
}  # fmt: skip


def picture(seed, width, height) -> Image:
    file, pixels = io.BytesIO(), np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return Image(file.getvalue())


WIDE, SMALL = picture(0, 20, 12), picture(1, 8, 16)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path, model = tmp_path_factory.mktemp("images"), vlm.reference(NAME)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[COPY] = table[vlm.IMAGE]
    model.save_pretrained(path)
    (path / readers.FILE).write_text(json.dumps(PROCESSOR))
    tokenizer.save(tokenizer.character("0123456789"), path)
    return path, model


def logp(place, tokens, seen) -> np.ndarray:
    """log-probability of each token by transformers, 0 for the first; sampled image tokens are text."""
    path, model = place
    processor = readers.load(path)
    with torch.no_grad():
        rows = torch.log_softmax(vlm.logits(model, tokens, [processor.media(image) for image in seen]), -1).numpy()
    return np.array([0, *(row[token] for row, token in zip(rows, tokens[1:], strict=False))], np.float32)


def sample(place, seen, answer, number, group=0, drawn=False, reward=0.0) -> Sample:
    """A prompt with images, and an answer sampled at version 0; with `drawn` its third token is that of an image."""
    counts = [readers.load(place[0]).count(image) for image in seen]
    prompt = [1, 2]
    for i, count in enumerate(counts):
        prompt += [vlm.START, *[vlm.IMAGE] * count, vlm.END, 3 + i]
    tokens, n = np.array([*prompt, *answer], np.int32), len(prompt)
    text = tokens.copy()
    if drawn:
        tokens[n + 2], text[n + 2] = vlm.IMAGE, COPY
    mask = np.arange(len(tokens)) >= n
    return Sample(
        tokens, mask, np.where(mask, logp(place, text, seen), 0), np.where(mask, 0, -1).astype(np.int32),
        np.zeros(len(tokens), np.int32), rewards=((len(tokens) - 1, reward),), sample=number, rollout=number,
        group=group, prompt=group, images=seen,
    )  # fmt: skip


def groups(place) -> list[list[Sample]]:
    """Two images, one, and none; the same image in several samples."""
    return [
        [sample(place, (WIDE, SMALL), [5, 9, 11, 7], i, 0, reward=float(i)) for i in range(2)],
        [sample(place, (SMALL,), [8, 4, 20 + i], 2 + i, 1, reward=float(i)) for i in range(2)],
        [sample(place, (), [8, 4, 20 + i, 9, 30], 4 + i, 2, reward=float(i)) for i in range(2)],
    ]


def training(**changes) -> rl_options.Training:
    base = rl_options.Training(
        length=64, rows=2, vision="frozen", optim=optim.Optimizer("sgd", lr=0.5, momentum=0.0, clip=0.0),
        objective=losses.GRPO(),
    )  # fmt: skip
    return replace(base, **changes)


def built(place, **changes) -> trainer.Trainer:
    return trainer.build(training(**changes), rows=2, model=str(place[0]), steps=4)


def moved(place, policy, tmp_path) -> set[str]:
    """Names of the tensors that an export has changed."""
    hf.save(tmp_path, policy.written, learner.weights(policy))
    before, after = safetensors.read(place[0]), safetensors.read(tmp_path)
    assert before.keys() == after.keys()
    return {name for name in before if not np.array_equal(before[name], after[name])}


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("how", ["frozen", "trained"])
def test_a_step_scores_as_transformers_and_moves_what_trains(place, tmp_path, how):
    state = built(place, vision=how)
    report = trainer.train_on_batch(state, groups(place))
    assert report["max_logp_diff"] <= 1e-4
    assert (report["images"], report["image_tokens_sampled"], report["skipped"]) == (6, 0, 0)
    names = {name.startswith("model.visual.") for name in moved(place, state.policy, tmp_path / "out")}
    assert names == ({False} if how == "frozen" else {False, True})


@pytest.mark.long
def test_a_drawn_image_token_is_text_and_not_learnt(place):
    """Its embedding stays, as in a model that has it twice, and its position is the next on all axes."""
    made = groups(place)
    made[0][1] = sample(place, (WIDE, SMALL), [5, 9, 11, 7, 6], 1, 0, drawn=True, reward=1.0)
    made[2][1] = sample(place, (), [5, 9, 11, 7], 5, 2, drawn=True, reward=1.0)
    state = built(place)
    report = trainer.train_on_batch(state, made)
    assert report["image_tokens_sampled"] == 2 and report["max_logp_diff"] > 1e-2  # of the tokens themselves
    cleaned, count = vision.without_image_tokens(made[0], state.reading)
    drawn = np.flatnonzero(made[0][1].mask)[2]
    assert count == 1 and cleaned[0] is made[0][0] and cleaned[1].mask.sum() == 4 and not cleaned[1].mask[drawn]
    batch = packing.pack(cleaned, 64, rows=2)
    [batch] = vision.attach(state.reading, [batch], [vision.of(cleaned)])
    [b] = np.flatnonzero((np.asarray(batch.sample_BJ[0]) == 1).any(-1))
    assert batch.input["feature"][0, b, drawn] == -1 and len(set(batch.input["axis_position"][0, b, drawn])) == 1
    with jax.set_mesh(state.mesh):
        own = replace(state.policy, state=replace(state.policy.state, params=built(place).policy.state.params))
        [_, got] = packing.unpack(np.asarray(learner.scored(own, batch).logp_BT), batch, cleaned)
    wanted = logp(place, np.where(np.arange(len(got)) != drawn, made[0][1].tokens, COPY), made[0][1].images)
    np.testing.assert_allclose(got, np.where(cleaned[1].mask, wanted, 0), atol=1e-4)  # of learnt tokens alone


@pytest.mark.long
def test_adapters_train_over_a_tower_that_stays(place, tmp_path):
    state = built(place, lora=Lora(rank=2, alpha=4.0), objective=losses.GRPO(kl=kl.KL(coef=0.1)))
    report = trainer.train_on_batch(state, groups(place))
    assert report["max_logp_diff"] <= 1e-4 and abs(report["kl"]) < 1e-6  # the reference sees the images, too
    trainer.train_on_batch(state, groups(place))
    names = moved(place, state.policy, tmp_path / "out")
    assert names and not any(name.startswith("model.visual.") for name in names)
    peft.save(tmp_path / "adapter", state.policy.settings, state.policy.state.params, state.policy.adapters)
    keys = safetensors.read(tmp_path / "adapter" / peft.WEIGHTS)
    assert keys and all(key.startswith("base_model.model.model.language_model.layers.") for key in keys)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("how", ["frozen", "trained"])
def test_a_critic_reads_images(place, how):
    """Its values are logits of transformers if its head is a row of the output head."""
    state = built(place, vision=how, objective=losses.PPO())
    critic, made = state.critic, groups(place)[0]
    assert ("vision" in critic.state.params) == (how == "trained")
    head = critic.state.params | {"score": jnp.asarray(place[1].lm_head.weight[10:11].detach().numpy())}
    critic.state = replace(critic.state, params=head)
    [batch] = vision.attach(state.reading, [packing.pack(made, 64, rows=2)], [vision.of(made)])
    with jax.set_mesh(state.mesh):
        value_MBT = np.asarray(learner.scored(critic, batch).value_BT)
    [m, b, j] = np.argwhere(np.asarray(batch.sample_BJ) == 1)[0]
    media = [state.reading.processor.media(image) for image in made[1].images]
    with torch.no_grad():
        wanted = vlm.logits(place[1], made[1].tokens, media)[:, 10].numpy()
    np.testing.assert_allclose(value_MBT[m, b][batch.segment_BT[m, b] == j + 1], wanted, atol=1e-4)
    report = trainer.train_on_batch(state, groups(place))
    assert report["skipped"] == 0 and report["critic_loss"] > 0
    assert not np.array_equal(head["score"], critic.state.params["score"])


@pytest.mark.wide
@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize(
    "layout, more",
    [
        (dict(fsdp=2, tp=2), dict(vision="trained")),
        (dict(dp=2, cp=2), dict(objective=losses.GRPO(kl=kl.KL(coef=0.1)))),
        (dict(fsdp=2, cp=2), dict(lora=Lora(rank=2))),
    ],
    ids=str,
)
def test_a_mesh_takes_the_step_of_one_device(place, layout, more):
    one, many = built(place, **more), built(place, mesh=mesh.Layout(**layout), **more)
    wanted, got = (trainer.train_on_batch(state, groups(place)) for state in (one, many))
    for name in {"loss", "grad_norm", "update_ratio", "max_logp_diff", "kl"} & wanted.keys():
        assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=2e-5), name
    for a, b in zip(*(jax.tree.leaves(learner.whole(state.policy)) for state in (many, one)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(initial=1))


@pytest.mark.wide
@pytest.mark.mesh
def test_a_policy_learns_from_a_teacher_that_sees_the_images(place):
    """The policy itself, from which it does not differ."""
    objective = losses.GRPO(advantage=dict(teacher=0.1))
    state = built(place, teacher=str(place[0]), distill_coef=1.0, objective=objective)
    report = trainer.train_on_batch(state, groups(place))
    assert report["divergence"] == pytest.approx(0, abs=1e-6) and report["max_logp_diff"] <= 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": ()}, r"got \d+ tokens for 0 of 0 images"),
        ({"images": (WIDE, WIDE)}, r"got \d+ tokens for \d+ of 2 images"),
        ({"images": (Image(b"no image"),)}, "8 bytes are no image of PNG"),
        ({"images": (Image(WIDE.data[:200]),)}, "is damaged"),
    ],
)
def test_a_sample_whose_images_do_not_fit_is_refused_at_the_door(place, changes, words):
    check, whole = vision.image_check(built(place).reading), sample(place, (WIDE,), [5, 6, 7], 0, drawn=True)
    made = validation.checked(whole, check_images=check)
    assert made.images == whole.images
    with pytest.raises(ValueError, match=words):
        validation.checked(whole.replace(**changes), check_images=check)
    with pytest.raises(ValueError, match="images must be none, because the model has no vision tower"):
        validation.checked(whole, check_images=vision.image_check(None))


def test_what_cannot_be_is_refused_in_one_line(place):
    [made] = [groups(place)[0]]
    batch = packing.pack(made, 64, rows=2)
    with pytest.raises(ValueError, match="images: this run reads none, .*load the tower with --vision frozen"):
        vision.attach(None, [batch], [vision.of(made)])
    critic = rl_options.CriticOptions(model=str(place[0]))
    with pytest.raises(ValueError, match="--critic.model .*: reads no images, as the policy does; leave it out"):
        built(place, objective=losses.PPO(), critic=critic)
