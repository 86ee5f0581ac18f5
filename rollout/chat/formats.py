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

Name = Literal[
    "qwen", "qwen3_coder", "hermes", "llama", "pythonic", "deepseek", "deepseek_v32", "deepseek_v4", "gpt_oss",
    "seed_oss", "gemma4", "glm4_moe", "kimi_k2", "minimax_m2", "mistral", "magistral", "lfm2", "olmo3", "plain",
]  # fmt: skip
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
    "pythonic": Marks(("[func_name1(params_name1=params_value1",)),
    "deepseek_v32": Marks(("｜DSML｜", "function_calls>", "invoke name=", "parameter name="), ("tool_calls>",)),
    "deepseek_v4": Marks(("｜DSML｜", "tool_calls>", "invoke name=", "parameter name="), ("function_calls>",)),
    "glm4_moe": Marks(("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "kimi_k2": Marks(
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    ),
    "minimax_m2": Marks(("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "<parameter name=")),
    "mistral": Marks(("[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"), ("[THINK]",)),
    "magistral": Marks(("[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[THINK]", "[/THINK]")),
    "lfm2": Marks(("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo3": Marks(("<function_calls>", "</function_calls>", "<functions>"), ("<invoke",)),
}

# model_type -> formats of the family's own checkpoints, oldest first; () = of none that is declared, or not verified.
# "plain" has no calls. A checkpoint's chat template decides, this table only between formats that it fits equally.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "deepseek_v2": (),
    "deepseek_v3": ("deepseek",),  # V3, R1, V3.1; V3.2 is another model_type
    "gemma2": ("plain",),
    "gemma3_text": ("plain",),
    "gemma4_text": ("gemma4",),
    "glm4": (),  # a name and JSON in lines of their own
    "glm4_moe": ("glm4_moe",),
    "gpt_oss": ("gpt_oss",),
    "granite": (),
    "kimi_k2": ("kimi_k2",),
    "llama": ("plain", "llama"),  # 3, 3.1
    "llama4_text": ("pythonic",),  # or JSON behind <|python_start|>, as some of its templates have
    "minimax_m2": ("minimax_m2",),
    "ministral3": ("mistral", "magistral"),
    "mistral": ("mistral", "magistral"),
    "mixtral": (),
    "nemotron_h": ("qwen3_coder",),
    "olmo2": (),
    "olmo3": ("olmo3",),
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
