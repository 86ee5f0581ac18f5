"""What `--trie auto` makes of a run's rows, for plans and training scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import models
from ...core.trie_packing import aligned
from ...models.attention import backends
from ...parallel.planner.tries import Tries, of_groups

UNKNOWN = (  # where a plan does not know what samples share
    "planned as if samples shared no tokens; if they do, a step takes less time: give --sample-tokens their mean "
    "length times the trie_ratio of a run"
)


def refusal(config: Any, settings: Sequence[Any], align: int) -> str:
    """Why a run cannot have tries; "" = it can.

    Args:
      config: options with length, run and mesh, and perhaps self_distillation.
      settings: the Configs of all models that see the batches.
      align: as in `packing.pack_tries`.
    """
    if any(each.vision for each in settings):
        return "rows have images"
    if getattr(config, "self_distillation", False):
        return "--self-distillation has rows of the teacher's own beside the student's"
    if config.mesh.cp > 1 and config.run.cp == "ring":
        return "--run.cp ring cannot split tries; gather and ulysses can"
    if config.mesh.cp > 1 and config.length % align:
        return f"--length must be a multiple of {align} for tries of recurrent layers over cp, got {config.length}"
    if config.run.attention != "auto" and not backends.BACKENDS[config.run.attention].tree:
        able = " and ".join(name for name, has in backends.BACKENDS.items() if has.tree)
        return f"--run.attention {config.run.attention} cannot compute tries; {able} can"
    return ""


def planned(config: Any, settings: Sequence[Any], chunk: int, tokens: int) -> tuple[Tries | None, str]:
    """The tries that a plan assumes, and what it says about them; (None, "") with `--trie off`.

    Only recipes with groups say what samples share, their prompt: `tokens` less --sampling.max-new-tokens. Others are
    planned as if samples shared nothing.

    Args:
      config, settings: as for `refusal`.
      chunk: tokens per chunk of recurrent layers on the chip.
      tokens: mean tokens per sample.
    """
    if getattr(config, "trie", "off") == "off":
        return None, ""
    align = chunk if any(models.trie_alignment(each) > 1 for each in settings) else 1
    if reason := refusal(config, settings, align):
        return None, f"planned without tries, because {reason}"
    if not hasattr(config, "group_size"):
        return None, UNKNOWN
    group, new = config.group_size, min(config.sampling.max_new_tokens, tokens)
    groups = max(1, config.groups // config.minibatches)
    found = of_groups(groups, group, tokens - new, new, aligned(config.length, align), align)
    if found:
        some = f"{found.most} of " if found.stems > 1 else ""
        fits = ", as many as fit a row" if some else ""
        of = f"{some}its {group} samples{fits}; in all {found.ratio:.0%} of the samples' tokens are computed"
        return found, f"a prompt is computed once for {of}"
    if 2 * tokens > config.length:
        reason = f"a row of {config.length} tokens holds one sample of {tokens}; --sample-tokens says how long they are"
    elif new == tokens:
        most = config.sampling.max_new_tokens
        reason = f"--sampling.max-new-tokens {most} leaves nothing of --sample-tokens {tokens} for a prompt"
    else:
        reason = f"{group} samples with prompts of {tokens - new} and completions of {new} tokens share too little"
    return None, f"planned without tries, because {reason}"
