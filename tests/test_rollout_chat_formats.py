"""The format of answers is declared by the chat template; TRL's copies of real templates are the oracle."""

from pathlib import Path

import pytest
import trl

from areax import models
from areax.rollout.chat import formats, parsers

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
OF = {  # the formats of TRL's templates; those that are not here have no tools
    "qwen": "qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl",
    "qwen3_coder": "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra qwen3_5_nothink "
    "qwen3_5_think qwen3_6 qwen3_8",
    "llama": "llama3_1 llama3_2",
    "deepseek": "deepseek_r1_distill deepseekv3",
    "gpt_oss": "gptoss",
    "gemma4": "diffusion_gemma gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5",
    "glm4_moe": "glm4moe",
    "lfm2": "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_v2",
    "unknown": "lfm2 muse_glimmer",  # the first shows tools, and no calls
    "plain": "cohere cohere2 gemma gemma3 idefics3 llama3 llava_next phi3 phi3_5 qwen2_5_vl smolvlm",
}


def template(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.mark.parametrize("style, name", [(style, name) for style, names in OF.items() for name in names.split()])
def test_real_templates_have_the_format_that_they_show(style, name):
    assert formats.style_of(template(name)) == style
    for training in TEMPLATES.glob(f"{name}_training.jinja"):
        assert formats.style_of(training.read_text()) == style


def test_every_template_is_in_the_table():
    known = {name for names in OF.values() for name in names.split()}
    assert {path.stem.removesuffix("_training") for path in TEMPLATES.glob("*.jinja")} <= known


def test_every_family_is_declared():
    assert formats.FAMILIES.keys() == models.FAMILIES.keys()
    assert {name for names in formats.FAMILIES.values() for name in names} <= set(formats.NAMES)
    assert set(parsers.STYLES) == {*formats.NAMES, formats.UNKNOWN} and set(formats.MARKS) < set(formats.NAMES)


@pytest.mark.parametrize(
    "written, style",
    [
        ("{{ messages }}", "plain"),
        ("", "plain"),
        ("{{ tools }}", "unknown"),
        ("<tool_call>{{ tools }}", "unknown"),  # not all of what one of the formats has
        ("<seed:tool_call><function=f><parameter=a></seed:tool_call>{{ tools }}", "unknown"),
        ("<seed:think><seed:tool_call><function=f><parameter=a></seed:tool_call>{{ tools }}", "seed_oss"),
        ("<minimax:tool_call><invoke name=</minimax:tool_call>{{ tools }}", "unknown"),
        ("<tool_call>{{ name }}<arg_key></arg_key></tool_call>{{ arguments }}{{ tools }}", "unknown"),
        ("<tool_call>{{ n }}<arg_key></arg_key><arg_value></arg_value></tool_call>{{ tools }}", "glm4_moe"),
        ('<minimax:tool_call><invoke name=""><parameter name=""></minimax:tool_call>{{ tools }}', "minimax_m2"),
        ('<{{ dsml }}function_calls><{{ dsml }}invoke name="f"><{{ dsml }}parameter name="a">｜DSML｜', "deepseek_v32"),
        ('<{{ dsml }}tool_calls><{{ dsml }}invoke name="f"><{{ dsml }}parameter name="a">｜DSML｜', "deepseek_v4"),
        ("<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|>", "kimi_k2"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS][TOOL_RESULTS]", "mistral"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS][TOOL_RESULTS][THINK][/THINK]", "magistral"),
        ("<functions>{{ tools }}</functions><function_calls></function_calls>", "olmo3"),
        ("Write [func_name1(params_name1=params_value1), func_name2(params)]: {{ tools }}", "pythonic"),
        ("<tool_call>{{ arguments }}</tool_call>{{ tools }}", "qwen"),
        # As Apriel 1.5's and MiniMax M3's, which have the marks of Qwen's besides.
        ("in <tool_call></tool_call> tags: <tool_calls>[{{ arguments }}]</tool_calls>{{ tools }}", "unknown"),
        ("<tool_call>{{ '<invoke name=' }}{{ arguments }}</invoke></tool_call>{{ tools }}", "unknown"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "unknown"),
        ("<|python_tag|>{{ tools }}", "unknown"),
        ("<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>", "gpt_oss"),
    ],
)
def test_a_format_is_not_guessed_by_a_part_of_it(written, style):
    assert formats.style_of(written) == style


def test_the_family_decides_between_formats_that_fit():
    both = "".join(formats.MARKS["llama"].has + formats.MARKS["qwen"].has)
    assert [formats.style_of(both, family) for family in ("", "llama", "qwen3", "gpt_oss")] == [
        "unknown", "llama", "qwen", "unknown"
    ]  # fmt: skip
