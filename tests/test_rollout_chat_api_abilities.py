"""What requests for effort and verbosity mean for the chat templates of several families."""

from pathlib import Path

import pytest
import trl

from areax.adapters import tokenizer
from areax.rollout.chat import template
from areax.rollout.chat.api import abilities
from areax.rollout.chat.fields import Refused

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
REFUSED = "refused"
MEANT = {  # template: effort -> variables
    "gptoss": {
        None: {}, "low": {"reasoning_effort": "low"}, "medium": {"reasoning_effort": "medium"},
        "high": {"reasoning_effort": "high"}, "none": REFUSED, "minimal": REFUSED, "xhigh": REFUSED,
    },
    "qwen3_8": {
        None: {}, "low": {"reasoning_effort": "low"}, "xhigh": {"reasoning_effort": "xhigh"}, "high": REFUSED,
        "none": {"enable_thinking": False},
    },
    "qwen3": {None: {}, "none": {"enable_thinking": False}, "low": {"enable_thinking": True}, "lo": REFUSED},
    "qwen2_5": {None: {}, "none": {}, "medium": {}, "low": REFUSED, "high": REFUSED},
}  # fmt: skip


def tokens(name):
    made = tokenizer.byte_level()
    made.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return made


@pytest.mark.parametrize("name", MEANT)
def test_an_effort_sets_what_the_template_reads(name):
    model = tokens(name)
    can = abilities.of(model)
    written = lambda **variables: template.render(model, [{"role": "user", "content": "?"}], (), variables, ask=True)
    for effort, meant in MEANT[name].items():
        if meant == REFUSED:
            with pytest.raises(Refused, match="^reasoning_effort: "):
                can.effort(effort, "reasoning_effort")
        else:
            assert can.effort(effort, "reasoning_effort") == meant
            written(**meant)
    if MEANT[name].get("none") == {"enable_thinking": False}:
        assert written(**can.effort("none", "effort")) != written()
    assert can.verbosities("medium", "verbosity") == can.verbosities(None, "verbosity") == {}


def test_anthropics_default_asks_for_nothing():
    can = abilities.of(tokens("qwen2_5"))
    assert can.effort("high", "effort", "high") == {}
    with pytest.raises(Refused):
        can.effort("medium", "effort", "high")


def test_a_model_that_always_reasons_cannot_be_asked_not_to():
    model = tokenizer.byte_level()
    model.chat_template = "{{ messages[0].content }}<think>"
    can = abilities.of(model)
    with pytest.raises(Refused, match="no switch"):
        can.effort("none", "effort")
    assert can.effort("medium", "effort") == {}


def test_a_server_without_a_tokenizer_has_no_switches():
    assert abilities.of(None) == abilities.Abilities()
