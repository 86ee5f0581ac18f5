"""Which models fit on which devices, by `areax plan`: writes the tables of docs/devices.md and README, and of docs/zh.

`make device-table` runs it. Each cell follows the plan's own suggestions: `--rows auto`, and the options that make it
fit.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path

import written_parts

from areax.adapters import cli

ROOT = Path(__file__).parents[1]
QWEN3 = dict(model_type="qwen3", vocab_size=151936, head_dim=128, num_key_value_heads=8, max_position_embeddings=40960)
MIXTURE = dict(
    model_type="qwen3_moe", vocab_size=151936, head_dim=128, num_key_value_heads=4, max_position_embeddings=40960,
    num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
)  # fmt: skip
MODELS = {  # as published
    "Qwen3-0.6B": QWEN3 | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                               tie_word_embeddings=True),
    "Qwen3-4B": QWEN3 | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                             tie_word_embeddings=True),
    "Qwen3-8B": QWEN3 | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                             tie_word_embeddings=False),
    "Qwen3-14B": QWEN3 | dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
                              tie_word_embeddings=False),
    "Qwen3-32B": QWEN3 | dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
                              tie_word_embeddings=False),
    "Llama-3.3-70B": dict(model_type="llama", vocab_size=128256, hidden_size=8192, intermediate_size=28672,
                          num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
                          max_position_embeddings=131072, tie_word_embeddings=False),
    "Qwen3-30B-A3B": MIXTURE | dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                                    num_hidden_layers=48, num_attention_heads=32),
    "Qwen3-235B-A22B": MIXTURE | dict(hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
                                      num_hidden_layers=94, num_attention_heads=64),
}  # fmt: skip
CHIPS, DEVICES = ("h100", "h200", "v5p", "v6e"), (1, 8, 64)
PAGES = {  # with the heads of their tables
    "docs/devices.md": "| model | options beside `--model` and `--length 4096` | tokens/s per device |",
    "docs/zh/devices.md": "| 模型 | 除 `--model` 和 `--length 4096` 之外的选项 | 每台设备的 token/s |",
}
READMES = ("README.md", "docs/zh/README.md")
START, END = "<!-- written by make device-table -->", "<!-- end -->"


def planned(folder: Path, options: dict[str, object]) -> dict:
    """The plan of full fine-tuning on sequences of 4,096 tokens."""
    words = [str(word) for pair in options.items() for word in pair if word != ""]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["plan", "sft", "--model", str(folder), "--length", "4096", *words, "--json"])
    return json.loads(out.getvalue())


def speed(report: dict) -> float:
    return report["figures"]["tokens_per_device_per_s"]["value"] if report["fits"] else 0.0


def layouts(name: str, devices: int) -> list[dict[str, object]]:
    """Meshes to try: all devices over fsdp; hosts of 8 over dp; a mixture's experts over a host."""
    found: list[dict[str, object]] = [{"--mesh.fsdp": devices}]
    if devices > 8:
        found.append({"--mesh.dp": devices // 8, "--mesh.fsdp": 8})
    if devices >= 8 and "num_experts" in MODELS[name]:
        found.append({"--mesh.fsdp": devices // 8, "--mesh.ep": 8})
    return found


def best(name: str, folder: Path, chip: str, devices: int) -> tuple[dict[str, object], float]:
    """(options of the fastest plan that fits, with the rows it chooses, and its tokens/s per device); ({}, 0) if none
    fits."""
    found: tuple[dict[str, object], float] = ({}, 0.0)
    for layout in layouts(name, devices):
        options = {"--chip": chip, **layout, "--batch": 16 * devices}
        report = planned(folder, options)
        tried = [(options, report)]
        for each in report["suggested"]:
            if "--mesh.fsdp" not in each:
                saving = options | dict(re.findall(r"(--\S+)(?: ([^-]\S*))?", each))
                tried.append((saving, planned(folder, saving)))
        for each, report in tried:
            if speed(report) > found[1]:
                found = each | {"--rows": report["rows"]}, speed(report)
    return found


def rows(models=MODELS, chips=CHIPS, devices=DEVICES) -> dict[tuple[str, str, int], tuple[str, float]]:
    """{(model, chip, devices): (options as on the command line, tokens/s per device)}."""
    made = {}
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            source = MODELS[name] | {"torch_dtype": "bfloat16"}
            (Path(folder) / "config.json").write_text(json.dumps(source))
            for chip in chips:
                for count in devices:
                    options, tokens = best(name, Path(folder), chip, count)
                    made[name, chip, count] = " ".join(f"{k} {v}".strip() for k, v in options.items()), tokens
    return made


def brief(tokens: float) -> str:
    return "-" if not tokens else f"{tokens / 1000:.3g}k"


def lines(made) -> list[str]:
    """The rows of the pages."""
    return [f"| {name} | `{options}` | {brief(tokens)} |" for (name, *_), (options, tokens) in made.items() if tokens]


def summary(made) -> str:
    """The table of README: tokens/s per device on 1, 8 and 64 of each chip."""
    names, chips = dict.fromkeys(key[0] for key in made), dict.fromkeys(key[1] for key in made)
    cell = lambda name, chip: " / ".join(brief(made[name, chip, count][1]) for count in DEVICES)
    table = ["| | " + " | ".join(chips) + " |", "|---" * (len(chips) + 1) + "|"]
    table += [f"| {name} | " + " | ".join(cell(name, chip) for chip in chips) + " |" for name in names]
    return "\n".join(table) + "\n"


def main() -> int:
    made = rows()
    texts = dict.fromkeys(READMES, summary(made))
    texts |= {page: "\n".join([head, "|---|---|---|", *lines(made), ""]) for page, head in PAGES.items()}
    pages = {ROOT / file: text for file, text in texts.items()}
    changed = {
        page: written_parts.replaced(page.read_text(), START, END, f"\n\n{text}\n") for page, text in pages.items()
    }
    for page, text in changed.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
