"""What the host says of images: the order of patches, attention windows, places, positions with axes, and refusals."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
import vlm
from transformers import vision_utils

from areax import models
from areax.models import vision
from areax.models.vision import Media

GRIDS = [(1, 6, 10), (1, 4, 4), (2, 2, 14), (1, 10, 6), (3, 8, 8)]
TOWERS = {name: models.with_vision(models.config_from_hf({"model_type": name, **case})).vision
          for name, case in vlm.CASES.items()}  # fmt: skip


def numbered(grids, tower):
    """Images whose patches are numbered, in the processor's order."""
    found, start = [], 0
    for grid in grids:
        n = int(np.prod(grid))
        patches = np.broadcast_to(np.arange(start, start + n, dtype=np.float32)[:, None], (n, tower.pixels))
        found.append(Media(patches, grid))
        start += n
    return found


def row(grids, tower):
    """The tokens of images with text around each."""
    tokens = [1]
    for grid in grids:
        tokens += [*[tower.image] * (int(np.prod(grid)) // tower.unit), 2, 3]
    return np.array([tokens], np.int32)


def test_patches_are_in_the_order_of_windows_and_features_find_their_tokens():
    tower = TOWERS["qwen2_5_vl"]
    tokens, grids = row(GRIDS, tower), torch.tensor(GRIDS)
    got = vision.arrange(tokens, np.ones_like(tokens), [numbered(GRIDS, tower)], tower)
    index, bounds = vision_utils.get_vision_window_index(grids, 2, tower.window * tower.patch, tower.patch)
    order = (4 * index[:, None] + torch.arange(4)).flatten().numpy()
    count = len(order)
    assert got["patch"].shape == (1, 384, 24) and count == 60 + 16 + 56 + 60 + 192 == 384
    np.testing.assert_array_equal(got["patch"][0, :count, 0], order)
    np.testing.assert_array_equal(got["feature"][tokens == tower.image], np.argsort(index.numpy()))
    assert (got["feature"][tokens != tower.image] == -1).all()
    np.testing.assert_array_equal(np.flatnonzero(np.diff(got["patch_window"][0], prepend=0)), bounds[:-1])
    frames = vision_utils.get_vision_cu_seqlens(grids)
    np.testing.assert_array_equal(np.flatnonzero(np.diff(got["patch_frame"][0], prepend=0)), frames[:-1])
    places = vision_utils.get_vision_position_ids(grids, 2).numpy()
    np.testing.assert_array_equal(got["patch_place"][0, :, :2], places[order])


def test_learnt_places_are_interpolated_as_in_transformers():
    tower = TOWERS["qwen3_vl"]
    grids = [*GRIDS, (1, 2, 2)]
    tokens = row(grids, tower)
    got = vision.arrange(tokens, np.ones_like(tokens), [numbered(grids, tower)], tower)
    index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor(grids), 5, "bilinear", True, 2
    )
    table = np.random.default_rng(0).normal(size=(25, 7)).astype(np.float32)
    wanted = (table[index] * weight[..., None].numpy()).sum(1)
    made = np.asarray(vision.tower.learnt_places(table, got["patch_place"]))[0, : len(wanted)]
    np.testing.assert_allclose(made, wanted, atol=1e-5)
    np.testing.assert_array_equal(got["patch"][0, : len(wanted), 0], np.arange(len(wanted)))  # without windows
    assert "patch_window" not in got


@pytest.mark.parametrize("name", vlm.CASES)
def test_positions_are_those_of_transformers(name):
    config = transformers.AutoConfig.for_model(name, **vlm.CASES[name])
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(config).model
    for tokens, seen in vlm.sequences(name):
        got, delta = vision.positions(tokens, seen, TOWERS[name])
        given = vlm.inputs(tokens, seen)
        if not seen:
            np.testing.assert_array_equal(got, np.tile(np.arange(len(tokens))[:, None], 3))
            assert delta == 0
            continue
        kept = {key: x for key, x in given.items() if "pixel" not in key}
        wanted, their_delta = theirs.get_rope_index(**kept)
        np.testing.assert_array_equal(got.T, wanted[:, 0])
        assert delta == their_delta.item()


def test_a_packed_row_has_each_sequence_s_own_positions_and_its_features_in_turn():
    tower, found = TOWERS["qwen3_vl"], vlm.sequences("qwen3_vl")
    tokens = np.concatenate([tokens for tokens, _ in found])[None]
    segment = np.repeat(np.arange(1, 5), [len(tokens) for tokens, _ in found])[None]
    tokens, segment = (np.pad(x, ((0, 1), (0, 3))) for x in (tokens, segment))
    got = vision.arrange(tokens, segment, [[one for _, seen in found for one in seen], []], tower, 200)
    wanted = np.concatenate([vision.positions(*each, tower)[0] for each in found])
    np.testing.assert_array_equal(got["axis_position"][0, : len(wanted)], wanted)
    assert not got["axis_position"][0, len(wanted) :].any() and not got["axis_position"][1].any()
    feature = got["feature"][0]
    np.testing.assert_array_equal(feature[feature >= 0], np.arange((feature >= 0).sum()))
    assert (got["feature"][1] == -1).all() and got["patch"].shape == (2, 200, 24) and not got["patch"][1].any()
    pixels = np.concatenate([one.patches for _, seen in found for one in seen])
    np.testing.assert_array_equal(got["patch"][0, : len(pixels)], pixels)


def bad(**changes):
    tower = TOWERS["qwen3_vl"]
    tokens = row([(1, 4, 4)], tower)
    given = dict(token_BT=tokens, segment_BT=np.ones_like(tokens), media=[[vlm.media((1, 4, 4), 0)]], tower=tower)
    return given | changes


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(media=[]), "1 rows need as many lists of images, got 0"),
        (dict(patches=12), "rows of 12 patches must hold those of every row's images, at most 16"),
        (dict(patches=18), "patches must be a multiple of 4, got 18"),
        (dict(media=[[Media(np.zeros((15, 24)), (1, 3, 5))]]), r"multiples of 2, got \(1, 3, 5\)"),
        (dict(media=[[Media(np.zeros((15, 24)), (1, 4, 4))]]), r"16 patches of 24 numbers, got \(15, 24\)"),
        (dict(media=[[Media(np.zeros((16, 25)), (1, 4, 4))]]), r"16 patches of 24 numbers, got \(16, 25\)"),
        (dict(media=[[vlm.media((1, 4, 6), 0)]]), "got 6 features and 4 tokens in row 0"),
        (dict(token_BT=np.array([[1, 57, 57, 2, 57, 57, 3]])), "needs t h w / 4 tokens 57 or 58 in its place"),
        (dict(segment_BT=np.array([[1, 1, 1, 2, 2, 2, 2]])), "needs t h w / 4 tokens 57 or 58 in its place"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, words):
    with pytest.raises(ValueError, match=f"images: .*{words}") as raised:
        vision.arrange(**bad(**changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("qwen3_vl", dict(depth=0), "depth of vision_config must be a whole number of 1 to 10,000, got 0"),
        (
            "qwen3_vl",
            dict(hidden_size=50),
            "hidden_size of vision_config must be a multiple of 4 num_heads, 24, got 50",
        ),
        ("qwen3_vl", dict(hidden_act="silu"), "hidden_act of vision_config must be 'gelu_pytorch_tanh', got 'silu'"),
        ("qwen3_vl", dict(out_hidden_size=41), "out_hidden_size of vision_config must be 40, got 41"),
        ("qwen3_vl", dict(num_position_embeddings=24), "num_position_embeddings must be a square number, got 24"),
        ("qwen3_vl", dict(deepstack_visual_indexes=[4]), "different layers among 0 to 3, got .4."),
        ("qwen3_vl", dict(deepstack_visual_indexes=[0, 1, 2, 3]), "at most one for each of 3 layers"),
        ("qwen2_5_vl", dict(window_size=10), "window_size must be a multiple of .*, 4, got 10"),
        ("qwen2_5_vl", dict(tokens_per_second=0), "tokens_per_second of vision_config must be a number above 0, got 0"),
    ],
)
def test_options_of_towers_are_refused_by_name(name, changes, words):
    case = vlm.CASES[name]
    source = {"model_type": name, **case, "vision_config": {**case["vision_config"], **changes}}
    config = models.config_from_hf(source)  # is of the text model alone, which does not care
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        models.with_vision(config)


def test_a_model_without_a_tower_says_so():
    with pytest.raises(ValueError, match="model_type must be one with a vision tower, qwen2_5_vl, .*, got 'qwen3'"):
        models.with_vision(models.config_from_hf({"model_type": "qwen3", **vlm.TEXT}))
    config = models.config_from_hf({"model_type": "qwen3_vl", **vlm.CASES["qwen3_vl"]})
    with pytest.raises(ValueError, match="reads no images"):
        models.with_vision(dataclasses.replace(config, score_head=models.ScoreHead()))
    source = {"model_type": "qwen3_vl", **vlm.CASES["qwen3_vl"], "vision_config": None}
    with pytest.raises(ValueError, match="qwen3_vl needs vision_config, the tower's options, got None"):
        models.with_vision(models.config_from_hf(source))
