"""Models are modules: each family has `config`, `to_hf`, `table`, `embed` and `block`; what follows serves them all."""

from ..parallel import rules
from .families import FAMILIES
from .transformer import Run, Scores, backbone, forward, head, score, value


def config_from_hf(hf: dict):
    """The Config of any supported family from a parsed config.json.

    Raises:
      ValueError: a model_type that is not supported, or an option that is not implemented.
    """
    name = hf.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"config.json: model_type must be one of {', '.join(sorted(FAMILIES))}, got {name!r}")
    return FAMILIES[name].config(hf)


def config_to_hf(config) -> dict:
    """The config.json of a Config."""
    return FAMILIES[config.family].to_hf(config)


def table(config):
    """The Param table of a Config."""
    return FAMILIES[config.family].table(config)


def explain(config, mesh, dtype="float32") -> str:
    """How a model lies on a mesh: path, shape, split and bytes a device of each weight. Raises as `rules.of_params`."""
    return rules.explain(table(config), mesh, dtype=dtype)


__all__ = [
    "FAMILIES", "Run", "Scores", "backbone", "config_from_hf", "config_to_hf", "explain", "forward", "head", "score",
    "table", "value",
]  # fmt: skip
