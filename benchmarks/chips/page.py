"""CHIPS.md: tables of the rows."""

from collections.abc import Callable

HEAD = """# On accelerators

Written by `make chip` from `chips.json`: one row per step and device. `python benchmarks/chip.py --help` says what is
measured and how to repeat a step. A step that failed says why. `code` is a hash of the code that was measured.
"""
Cell = Callable[[dict], str]


def number(name: str, form: str = ",.0f", per: float = 1) -> Cell:
    """A cell with a figure of the result, empty if there is none."""
    return lambda row: "" if row["result"].get(name) is None else f"{row['result'][name] / per:{form}}"


def setting(name: str) -> Cell:
    return lambda row: f"{value:,}" if isinstance(value := row["settings"][name], int) else value


gigabytes = lambda name: number(name, ".1f", 1e9)
TRAINING = {
    "tokens/s": number("tokens_per_s"), "s a step": number("step_s", ".3f"), "MFU": number("mfu", ".1%"),
    "planned MFU": number("planned_mfu", ".1%"), "peak GB": gigabytes("peak_bytes"),
    "planned peak": gigabytes("planned_peak_bytes"), "first step, s": number("first_s", ".1f"),
}  # fmt: skip
SECTIONS = {  # by the first part of a step's name: (title, text, settings, figures)
    "smoke": (
        "Kernels", "Tests with the accelerator's mark, `pytest -m gpu`.", {"mark": setting("mark")},
        {
            "run": lambda row: str(row["result"]["passed"] + row["result"]["failed"]), "passed": number("passed"),
            "failed": number("failed"), "skipped": number("skipped"),
        },
    ),
    "train": (
        "Training steps",
        "Four sequences of equal length, AdamW, fp32 masters. areax packs them into one row; transformers gets a "
        "batch\nwithout padding, under autocast, with torch's scaled-dot-product attention and fused AdamW. MFU is the "
        "plan's model\nFLOPs over the chip's data sheet peak; recomputation does not count.",
        {name: setting(name) for name in ("shape", "length", "system", "remat", "dtype")}, TRAINING,
    ),
    "trie": (
        "Samples that share their prompt",
        "A GRPO update on one group, as rows of one sample each and as one trie (`--trie auto`), which computes the "
        "prompt\nonce. The gradient is the same but for rounding: its norm in the first step is given. Tokens are "
        "those of the\nsamples.",
        {name: setting(name) for name in ("shape", "samples", "prompt", "completion", "layout", "remat", "dtype")},
        {
            "computed": number("trie_ratio", ".1%"), "tokens/s": number("tokens_per_s"),
            "s a step": number("step_s", ".3f"), "peak GB": gigabytes("peak_bytes"),
            "gradient norm": number("grad_norm", ".4f"), "first step, s": number("first_s", ".1f"),
        },
    ),
    "decode": (
        "Decoding", "The embedded engine with all slots busy; the time includes prefill.",
        {name: setting(name) for name in ("shape", "dtype", "slots", "prompt", "new")},
        {
            "tokens/s": number("tokens_per_s"), "ms a token": number("token_s", ".2f", 1e-3),
            "weights and caches, GB": gigabytes("engine_bytes"), "peak GB": gigabytes("peak_bytes"),
            "first time, s": number("first_s", ".1f"),
        },
    ),
    "grpo": (
        "GRPO with the engine inside",
        "`areax train grpo --serve.inside` with its defaults, or with options that chips.json names; averages leave "
        "out the\nsteps that compile.",
        {"shape": setting("shape"), "options": lambda row: row["step"].split("/")[2]},
        {
            "trained tokens/s": number("tokens_per_s"), "sampled": number("sampled_tokens_per_s"),
            "s a step": number("step_s", ".2f"), "planned s": number("planned_step_s", ".2f"),
            "update": number("update_share", ".0%"),
            "pause for weights, s": number("push_pause_s", ".3f"),
            "largest logp difference": number("max_logp_diff", ".1e"), "peak GB": gigabytes("peak_bytes"),
            "planned peak": gigabytes("planned_peak_bytes"), "first step, s": number("first_step_s", ".1f"),
            "whole run, s": number("seconds", ".0f"),
        },
    ),
    "offload": (
        "Masters and moments in the host's memory",
        "Training steps as of `areax train sft --optim.offload --optim.state float8 --optim.gradients bfloat16`.",
        {name: setting(name) for name in ("shape", "length", "rows", "microbatches", "dtype")},
        {
            "tokens/s": number("tokens_per_s"), "s a step": number("step_s", ".2f"),
            "planned s": number("planned_step_s", ".2f"), "peak GB": gigabytes("peak_bytes"),
            "planned peak": gigabytes("planned_peak_bytes"), "first step, s": number("first_s", ".1f"),
        },
    ),
    "row": (
        "The longest row", "A training step on one row of one sequence, of increasing length until it does not fit.",
        {name: setting(name) for name in ("shape", "length", "remat", "dtype")}, TRAINING,
    ),
}  # fmt: skip


def page(rows: list[dict]) -> str:
    parts = [HEAD]
    for section, (title, about, *columns) in SECTIONS.items():
        if mine := [row for row in rows if row["step"].partition("/")[0] == section]:
            parts += [f"## {title}\n\n{about}\n", table(mine, *columns), *failures(mine)]
    return "\n".join(parts)


def table(rows: list[dict], settings: dict[str, Cell], figures: dict[str, Cell]) -> str:
    failed = any("failed" in row for row in rows)
    names = ["device", *settings, *figures, *(["failure"] if failed else []), "date", "code"]
    lines = [f"| {' | '.join(name.replace('_', ' ') for name in names)} |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [row["device"], *(cell(row) for cell in settings.values())]
        cells += [cell(row) if "result" in row else "" for cell in figures.values()]
        cells += [row.get("failed", "").replace("|", r"\|")] if failed else []
        cells += [row["date"], row["code"][:8]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def failures(rows: list[dict]) -> list[str]:
    """A list of the tests that failed."""
    named = [(row["device"], one) for row in rows for one in row.get("result", {}).get("failures", ())]
    return ["\n".join(f"- {device}: `{one['test']}`: {one['says']}" for device, one in named) + "\n"] if named else []


def line(row: dict) -> str:
    """A row's figures in one line, for the terminal."""
    if "result" not in row:
        return row["failed"]
    *_, figures = SECTIONS[row["step"].partition("/")[0]]
    said = [f"{name} {text}" for name, cell in figures.items() if (text := cell(row))]
    return ", ".join([*said, *([row["failed"]] if "failed" in row else [])])
