"""`areax convert RUN`: what a run would have exported at a step whose state it keeps, from its folder and its model."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areax import models
from areax.adapters import hf, orbax, peft, safetensors
from areax.adapters.command_line import typed
from areax.adapters.command_line.options import by_option
from areax.adapters.commands import merge as merging
from areax.adapters.commands.files import AS_SOURCE, Files, check_new, report
from areax.adapters.runtime import hub
from areax.adapters.tracking import run_dir
from areax.core import losses, param
from areax.models import lora
from areax.parallel.mesh import Layout
from areax.recipes.shared import common, contents, learner, score_head

AVERAGE = "average"  # of `optim.AverageState`
SCORED = {field.name for field in dataclasses.fields(losses.RewardModel)}


def convert(
    run: Path, destination: str | os.PathLike, step: int | None = None, *, merge: bool = False, base: str | None = None,
    files: Files = AS_SOURCE,
) -> dict:  # fmt: skip
    """Writes the model of a saved state as the run itself would have exported it at that step, bit by bit; of a run
    that trains adapters these, as a PEFT folder. The run may be going on.

    Weights are read one of all layers at a time, on the CPU. Merged adapters may differ in the last bit from those that
    another kind of device merged.

    Args:
      step: one whose state is kept; None = the newest.
      merge: of a run that trains adapters, writes the model with these merged.
      base: where the model that the run started from is now; None = where its options say.
      files: how a whole model is written.

    Returns:
      What `convert` returns, and the step.

    Raises:
      ValueError: the state is not kept or damaged, the model that the run started from is gone or another, or the
        state does not fit it.
    """
    check_new(destination, directory=files.gguf is None)
    states = run / run_dir.STATE
    if states.resolve() in Path(destination).resolve().parents:
        raise ValueError(f"convert: {destination} is inside the run's states, {states}; choose another destination")
    options = hf.read_json(run / run_dir.CONFIG)
    spec = _adapters(run, options)
    if spec.rank == 0 and merge:
        raise ValueError(f"convert: --merge needs a run that trains adapters, {run} trains all weights; leave it out")
    if spec.rank and not merge and files != AS_SOURCE:
        raise ValueError(f"convert: adapters are written in float32 in one file, got {files}; merge them with --merge")
    step = orbax.verified(states, step)
    with orbax.opened(states, step) as (arrays, cursor):
        kind = run_dir.recipe(cursor)
        settings, tokens, model = _start(run, options, kind, base)
        known = cursor.get("rollout", cursor).get("contents") or {}
        if spec.rank:
            contents.check_adapters(known, by_option({"lora": run_dir.plain(spec)}), str(run / run_dir.CONFIG))
        used = options.get("init") != "random" and (merge or bool(settings.rest))
        contents.check_start(known, Path(model), tokens, weights=used, where=str(run))
        table = models.table(settings)
        trained = lora.table(table, spec) if spec.rank else table
        params = _params(trained, arrays, str(states / str(step)), "policy." if kind == "grpo" else "")
        if spec.rank:
            params = param.tree_map(lambda _, x: x.read(), trained, params)
        if spec.rank and not merge:
            path = peft.save(destination, settings, params, spec, base=base or options["model"])
        else:
            if merge:
                params = merging.joined(settings, _base(options, model, settings), params, spec)
            path = files.save(destination, settings, params, base=model, tokenizer=tokens)
    return report(run, path) | {"step": step}


def _adapters(run: Path, options: Mapping[str, Any]) -> lora.Lora:
    """The run's options of adapters; raises ValueError for values of another type, or that have another name."""
    values, where = _given(options, "lora"), run / run_dir.CONFIG
    if unknown := values.keys() - {field.name for field in dataclasses.fields(lora.Lora)}:
        raise ValueError(f"{where}: lora must have options of this version of areax, got {', '.join(sorted(unknown))}")
    try:
        typed.check_values(lora.Lora, values)
        return lora.Lora(**values)
    except ValueError as error:
        raise ValueError(f"{where}: lora: {error}; put back what the run wrote") from error


def _given(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The options of a dataclass in a run's config.json."""
    found = run_dir.option(options, name)
    values = found.items() if isinstance(found, Mapping) else ()
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values}


def _start(run: Path, options: Mapping[str, Any], kind: str | None, base: str | None):
    """(Config, tokenizer, folder) of the model that a run started from, as the run read them."""
    named = base or options.get("model")
    if not isinstance(named, str):
        raise ValueError(
            f"{run / run_dir.CONFIG}: needs the option model, got {named!r}; is this a run of areax train?"
        )
    fresh = options.get("init") == "random"
    vision: Any = run_dir.option(options, "vision") or "auto"
    drafts = bool(_given(options, "mtp").get("coef"))
    head = _head(kind, _given(options, "objective"))
    try:
        model = hub.folder(named, weights=not fresh)
        if fresh:
            config = models.text_only(hf.read_config(model))
            config = models.with_mtp(config) if drafts else config
        else:
            new = hf.HEADS if head else ()
            config = hf.loaded_config(model, new, head or score_head.SCALAR, vision != "auto", drafts)
        tokens = common.open_tokenizer(named, run_dir.option(options, "chat_template_kwargs") or "")
    except ValueError as error:
        raise ValueError(
            f"{run}: needs the model that the run started from, {named} ({error}); put it back, or name it with --base"
        ) from error
    if head:
        return score_head.padded(score_head.settings(config, head), tokens), tokens, model
    return learner.written(common.with_tower(config, vision)), tokens, model


def _head(kind: str | None, objective: Mapping[str, Any]) -> models.ScoreHead | None:
    """The new score head of a run that trains a reward model."""
    if kind == "prm":
        return models.ScoreHead(objective["labels"], bias=True)
    return score_head.SCALAR if kind == "preference" and objective.keys() == SCORED else None


def _params(table: param.Table, arrays: Mapping[str, hf.Deferred], where: str, prefix: str):
    """The weights in a state, the averaged ones where the optimiser keeps an average, as `optim.averaged`."""

    def one(leaf: param.Leaf) -> hf.Deferred:
        stored = f"{prefix}params.{leaf.path}"
        if stored not in arrays or arrays[stored].shape != leaf.shape:
            got = f"{list(arrays[stored].shape)}" if stored in arrays else "none"
            raise ValueError(
                f"{where}: {leaf.path} must be {list(leaf.shape)} by the run's options and model, got {got}; name the "
                "model that the run started from with --base"
            )
        return arrays[averages.get(leaf.path, stored)]

    state, within = f"{prefix}opt_state.", f".{AVERAGE}."
    averages = {name.partition(within)[2]: name for name in arrays if name.startswith(state) and within in name}
    return param.tree_map(one, table)


def _base(options: Mapping[str, Any], model: str, settings):
    """The weights under adapters: as they are in files, or drawn as the run drew them."""
    if options.get("init") == "random":
        return common.draw(models.table(settings), options.get("seed", 0), common.open_mesh(Layout(), rows=1, length=1))
    return hf.mapped_tensors(settings, safetensors.read(model), model, None)[1]
