"""Which format a model's answers have: declared by what its chat template contains, never guessed.

`parsers.STYLES` reads the formats and `FAMILIES` says which ones each family's own checkpoints have. A template that
shows tools in no declared format is "unknown": calls, tools and forced formats are then refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Name = Literal["qwen", "qwen3_coder", "hermes", "llama", "deepseek", "gpt_oss", "seed_oss", "gemma4", "plain"]
NAMES: tuple[str, ...] = get_args(Name)
UNKNOWN = "unknown"
TOOLS = re.compile(r"\btools\b|\btool_calls\b")  # in a template that shows them


@dataclass(frozen=True)
class Marks:
    """What a chat template of a format contains: all of `has` and none of `lacks`."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


MARKS: Mapping[str, Marks] = {  # "hermes" is another name of "qwen"
    "qwen": Marks(
        ("<tool_call>", "</tool_call>", "arguments"), ("<function=", "<arg_key>", "<invoke name=", "<tool_calls>")
    ),
    "qwen3_coder": Marks(("<tool_call>", "</tool_call>", "<function=", "<parameter=")),
    "llama": Marks(("<|start_header_id|>", "<|eot_id|>", '"parameters": ')),
    "deepseek": Marks(("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>")),
    "gpt_oss": Marks(("<|start|>", "<|channel|>", "<|message|>", "<|end|>")),
    "seed_oss": Marks(("<seed:tool_call>", "</seed:tool_call>", "<function=", "<parameter=", "<seed:think>")),
    "gemma4": Marks(("<|turn>", "<|channel>", "<channel|>", "<|tool_call>")),
}

# model_type -> formats of the family's own checkpoints, oldest first; () = of none that is declared, or not verified.
# "plain" has no calls. A checkpoint's chat template decides, this table only between formats that it fits equally.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "deepseek_v2": (),
    "deepseek_v3": ("deepseek",),
    "gemma2": ("plain",),
    "gemma3_text": ("plain",),
    "gemma4_text": ("gemma4",),  # whose calls, <|tool_call>call:name{...}<tool_call|>, are not read
    "glm4": (),  # a name and JSON in lines of their own
    "glm4_moe": (),  # <tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>
    "gpt_oss": ("gpt_oss",),
    "granite": (),
    "kimi_k2": (),  # <|tool_calls_section_begin|>
    "llama": ("plain", "llama"),  # 3, 3.1
    "llama4_text": (),  # JSON or Python
    "minimax_m2": (),  # <minimax:tool_call>
    "ministral3": (),  # [TOOL_CALLS]
    "mistral": (),  # [TOOL_CALLS]
    "mixtral": (),
    "nemotron_h": ("qwen3_coder",),
    "olmo2": (),
    "olmo3": (),  # <function_calls>, as Python
    "phi3": ("plain",),  # Phi-4-mini has calls
    "qwen2": ("qwen",),
    "qwen2_moe": (),
    "qwen3": ("qwen",),
    "qwen3_5_moe_text": ("qwen3_coder",),
    "qwen3_5_text": ("qwen3_coder",),
    "qwen3_moe": ("qwen", "qwen3_coder"),
    "qwen3_next": ("qwen",),
    "seed_oss": ("seed_oss",),
    "smollm3": (),
}


@functools.lru_cache(maxsize=32)
def style_of(chat_template: str, family: str = "") -> str:
    """The format of the answers that a chat template asks for, one of NAMES, or UNKNOWN.

    Args:
      family: the model_type, if it is known.
    """
    found = [name for name, marks in MARKS.items() if _fits(chat_template, marks)]
    if not found and not TOOLS.search(chat_template):
        return "plain"
    if len(found) > 1:
        found = [name for name in found if name in FAMILIES.get(family, ())]
    return found[0] if len(found) == 1 else UNKNOWN


def _fits(chat_template: str, marks: Marks) -> bool:
    return all(text in chat_template for text in marks.has) and not any(text in chat_template for text in marks.lacks)


def style_for(tokenizer: Any, given: str = "", family: str = "") -> str:
    """`given`, or else the format that the tokenizer's chat template shows, as `style_of`.

    Raises ValueError if `given` is no format.
    """
    if given and given not in (*NAMES, UNKNOWN):
        raise ValueError(f"style must be one of {', '.join(NAMES)}, got {given!r:.80}")
    return given or style_of(str(getattr(tokenizer, "chat_template", None) or ""), family)
