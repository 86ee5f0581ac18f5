"""The command line. Invalid input prints one line and exits with code 2, a failed check with 1."""

import contextlib
import dataclasses
import difflib
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro

from ..core import origin
from ..rollout.chat import formats
from ..rollout.processes.printable import one_line, printable
from ..rollout.servers.engine_options import DEFAULTS, EngineOptions
from ..service import options as service_options
from .command_line import parse
from .command_line.options import UNPREFIXED
from .runtime import log_lines

TROUBLE = 3  # exit code of a run that --stop-on ended at an alarm or a metric that is not a number
RECIPES = ("sft", "grpo", "preference", "distill", "prm")
HOST, PORT = "127.0.0.1", 6006  # of `report --serve`
SHOWN = ("steps", "complete", "accuracy", "checkpoint", "report")  # at a run's end


def train(recipe: str, *options: str) -> int:
    """Train with a recipe, an algorithm or your own file: areax train grpo --model DIR --data ROWS ...

    Recipes are sft, grpo, preference, distill and prm; an algorithm such as dapo or dpo is grpo or preference with that
    objective. A file must define a `Config` dataclass and `main(config)`.
    """
    with _importing(f"train {recipe}", options):
        module, settings = _recipe(recipe, "train")
    given = parse.instance(module.Config, settings) if settings else None
    first = getattr(module, "FIRST_OPTIONS", ())
    summary = module.main(parse.parse(module.Config, options, f"areax train {recipe}", given, first))
    if isinstance(summary, dict) and summary:
        _show(_short(summary), False)
        if summary.get("complete") is False:  # stopped by a signal or --stop-on; progress is saved
            done, why = summary.get("steps", 0), summary.get("stopped_on", "")
            words = f"stopped after {done} step{'s' * (done != 1)}{why and f', --stop-on {why}'}"
            print(f"areax train {recipe}: {words}; the same command goes on", file=sys.stderr)
            return (TROUBLE if summary["trouble"] else 0) if why else 130
    return 0


def plan(recipe: str, *options: str) -> int:
    """Estimate whether a run fits and what it costs, without devices: areax plan RECIPE --model DIR ..."""
    with _importing(f"plan {recipe}", options):
        import jax

        from .commands import plan, suggest

        module, settings = _recipe(recipe, "plan")
    jax.config.update("jax_platforms", "cpu")  # none is used, and they may belong to a run
    # Options that a plan does not need (data, reward) are not required.
    empty = lambda field: "" if field.type in (str, "str") and field.name != "model" else tyro.MISSING
    given = parse.instance(module.Config, settings, empty)
    fields = [
        (name, Annotated[type(default), UNPREFIXED], dataclasses.field(default=default))
        for name, default in (("recipe", given), ("plan", plan.Options()))
    ]
    both = dataclasses.make_dataclass("Plan", fields, namespace={"__doc__": plan.__doc__})
    chosen = parse.parse(both, options, f"areax plan {recipe}", first=plan.FIRST_OPTIONS)
    made, show = (suggest.suggest, suggest.show) if chosen.plan.suggest else (plan.plan, plan.show)
    report = made(chosen.recipe, chosen.plan)
    print(json.dumps(report, indent=2) if chosen.plan.json else show(report))
    return 0 if report["fits"] and report.get("agrees", True) else 1


@contextlib.contextmanager
def _importing(command: str, options: Sequence[str] = ()) -> Iterator[None]:
    """Says that a command is importing JAX and what else it needs: seconds, on a busy machine a minute.

    Says nothing if JAX is imported already, or help is asked for.
    """
    if "jax" in sys.modules or {"-h", "--help", "--help-all"} & {*options}:
        yield
        return
    from .tracking import progress

    words = f"areax {command}: importing libraries"
    progress.say(f"{words} ...")
    with progress.reminding(words):
        yield


def _algorithms() -> dict:
    """{algorithm: (recipe, preset of the objective)}."""
    from ..core import losses

    recipes: dict[str, dict] = {"grpo": losses.POLICIES, "preference": losses.PREFERENCES}
    return {name.lower(): (recipe, preset) for recipe, presets in recipes.items() for name, preset in presets.items()}


def _recipe(recipe: str, command: str):
    """(module of a recipe, settings that override its Config's defaults)."""
    from ..rollout import object_path

    settings: dict = {}
    _check_recipe(recipe, command)
    if recipe in RECIPES:
        module = importlib.import_module(f"areax.recipes.{recipe}")
    elif recipe.endswith(".py"):
        module = object_path.module(recipe)
    else:
        base, preset = _algorithms()[recipe]
        module, settings = importlib.import_module(f"areax.recipes.{base}"), {"objective": preset()}
    for name in ("Config", "main"):
        if not hasattr(module, name):
            raise ValueError(f"{recipe}: a recipe must define `Config` and `main(config)`, got no {name}")
    return module, settings


def _check_recipe(recipe: str, command: str) -> None:
    """Raises ValueError unless it is a recipe, an algorithm, or the name of a file."""
    if recipe in RECIPES or recipe.endswith(".py") or recipe in (algorithms := _algorithms()):
        return
    known = [*RECIPES, *(name for name in algorithms if name not in RECIPES)]
    near = difflib.get_close_matches(recipe.lower(), known, 1)
    raise ValueError(
        f"areax {command}: recipe must be one of {', '.join(known)} or a file ending in .py, got {recipe!r}"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def demo(*options: str) -> int:
    """Train a small model from scratch, improve it by asynchronous RL, and write a checkpoint and a report."""
    with _importing("demo", options):
        from ..recipes import demo

    return demo.main(parse.parse(demo.Config, options, "areax demo"))


def serve(
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    host: str = "127.0.0.1",
    port: int = 30000,
    engine: Annotated[EngineOptions, UNPREFIXED] = DEFAULTS,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    api_key: str | None = None,
    style: formats.Name | None = None,
    reasoning: bool = True,
    bench: bool = False,
    join: str = "",
) -> int:
    """Serve a checkpoint over HTTP with SGLang's, OpenAI's and Anthropic's APIs (docs/serve.md).

    Args:
      path: Hugging Face directory with weights and tokenizer, a model on the hub, or a GGUF file.
      host: address to listen on; one that other machines can reach needs a key.
      port: 0 = any free port; the line printed when the server is ready begins with its URL.
      dtype: dtype of weights and computation; auto = bfloat16 on accelerators, float32 on a CPU.
      api_key: key that requests must send as `Authorization: Bearer KEY`. Arguments can be read by every user of the
        machine: set AREAX_SERVER_KEY instead, or AREAX_SERVER_KEY_FILE to a file with it.
      style: the model's format of reasoning and tool calls, plain = none; default: that of its chat template.
      reasoning: return text between <think> and </think> as reasoning, not as part of the answer.
      bench: measure speed instead: print tokens per second for 1, 2, 4, ... requests at a time, up to the slots, and
        exit.
      join: address of a run with --servers join+http://HOST:PORT, at which to register while it serves, with the key in
        AREAX_FLEET_KEY.
    """
    with _importing("serve"):
        from ..rollout.engine import server
    from ..rollout.processes import keys
    from .runtime import blas, compile_cache, hub, malloc
    from .tracking import progress

    malloc.keep_memory()  # steps then reuse each other's memory
    blas.one_thread()
    compile_cache.keep()
    key = keys.read(keys.SERVER) if api_key is None else api_key
    path = hub.folder(path, weights=True)
    if bench:
        server.benchmark(path, engine, dtype=dtype)
        return 0
    server.serve(
        path, engine, host=host, port=port, dtype=dtype, api_key=key, style=style or "", reasoning=reasoning,
        loading=progress.reminding(f"loading {path}"), join=join,
    )  # fmt: skip
    return 0


def tinker(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    options: Annotated[service_options.Options, UNPREFIXED] = service_options.DEFAULTS,
    engine: Annotated[EngineOptions, UNPREFIXED] = DEFAULTS,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> int:
    """Serve Tinker's training API: clients of it train adapters of one model, and sample from them (docs/tinker.md).

    Args:
      model: Hugging Face directory with weights and tokenizer, a model on the hub, or a GGUF file.
      host: address to listen on; one that other machines can reach needs keys: AREAX_TINKER_KEYS, separated by spaces,
        or AREAX_TINKER_KEYS_FILE, a file with them. Clients demand that keys begin with tml-.
      port: 0 = any free port; the line printed when the server is ready begins with its URL.
      dtype: dtype of the computation; auto = bfloat16 on accelerators, float32 on a CPU.
    """
    with _importing("tinker"):
        from ..service import server
    from ..rollout.processes import keys
    from .runtime import blas, compile_cache, hub, malloc
    from .tracking import progress

    malloc.keep_memory()
    blas.one_thread()
    compile_cache.keep()
    given = (keys.read(server.KEYS) or "").split()
    server.serve(
        hub.folder(model, weights=True), model, options, engine, host=host, port=port, keys=given, dtype=dtype,
        loading=progress.reminding(f"loading {model}"),
    )  # fmt: skip
    return 0


def convert(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    step: int | None = None,
    merge: bool = False,
    extract: int = 0,
    base: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    shard_size: str = "5GB",
    experts: Literal["apart", "fused"] = "apart",
    embeddings: Literal["tied", "untied"] | None = None,
    gguf: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] | None = None,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Write a checkpoint from another, from a run's saved state or from adapters; validated, tensor by tensor.

    Args:
      source: Hugging Face directory, or a model on the hub; a run's directory; a PEFT directory; a GGUF file.
      destination: new directory, written atomically; with --gguf a new file.
      step: of a run, the step whose state is written; default: the newest.
      merge: writes the base model with a PEFT directory's adapters, or those of a run, merged.
      extract: writes adapters of this rank instead, closest to the difference to --base, as a PEFT directory.
      base: the base of adapters, or the model that a run started from; default: where these say.
      dtype: dtype of the written tensors; default: the source's, of quantised ones bfloat16.
      shard_size: most bytes of a file.
      experts: a tensor for each expert's matrix, which every reader takes, or one for those of a layer, as transformers
        5 holds them.
      embeddings: writes tied embeddings a second time as the output head, or leaves out a head that equals them.
      gguf: writes a GGUF file for llama.cpp and others, with its weights in this type.
      json_: print a summary as JSON.
    """
    with _importing("convert"):
        import jax

        from .commands import convert
    from .tracking import progress, run_dir

    if destination.endswith(".gguf") and gguf is None:
        raise ValueError(f"convert: {destination} needs --gguf, which says how weights are stored, such as --gguf q8_0")
    jax.config.update("jax_platforms", "cpu")  # devices may belong to a run
    run = run_dir.folder(source)
    if run is None:
        if step is not None:
            raise ValueError(f"convert: --step needs a run's directory, got {source}; leave it out")
        with progress.reminding(f"converting {source}"):
            report = convert.convert(
                source, destination, dtype, shard_size=shard_size, experts=experts, embeddings=embeddings, merge=merge,
                extract=extract, base=base, gguf_kind=gguf,
            )  # fmt: skip
    else:
        if extract:
            raise ValueError(f"convert: --extract needs a checkpoint, got the run {source}; convert that first")
        from ..recipes.shared import run_export
        from .commands import files

        how = files.Files(dtype, shard_size, experts, embeddings, gguf)
        with progress.reminding(f"converting {source}"):
            report = run_export.convert(run, destination, step, merge=merge, base=base, files=how)
    _show(report, json_)
    return 0


def check(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    against: Literal["torch"] | None = None,
    gradients: bool = False,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Check a checkpoint's names, shapes, hashes and finite values; with --against torch also its logits.

    Args:
      source: Hugging Face directory, a model on the hub, or a GGUF file.
      against: "torch" compares logits with transformers, in fp32.
      gradients: with --against torch, compares gradients of all weights, too.
      json_: print the results as JSON.
    """
    from .commands import check

    report = check.check(source, against, gradients)
    _show(report, json_)
    return 0 if report["ok"] else 1


def inspect(
    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    tensors: bool = False,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Say what a checkpoint, an adapter or a run's directory holds and what areax can do with it; reads headers only.

    Args:
      path: Hugging Face directory, or a model on the hub, which is downloaded; a GGUF file; a PEFT directory; a run's
        directory.
      tensors: list every tensor; else those that layers and experts have alike once.
      json_: print the results as JSON.
    """
    import jax

    from .commands import inspect

    jax.config.update("jax_platforms", "cpu")
    report = inspect.inspect(path, tensors)
    print(json.dumps(report, indent=2) if json_ else inspect.show(report))
    return 0


def diff(
    one: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    other: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Compare two checkpoints or adapters: tensors that changed and by how much, options; exits with 1 if they differ.

    Args:
      one: Hugging Face or PEFT directory, or a model on the hub.
      other: another.
      json_: print the results as JSON.
    """
    from .commands import diff

    report = diff.diff(one, other)
    print(json.dumps(report, indent=2) if json_ else diff.show(report))
    return 0 if report["equal"] else 1


def eval(*options: str) -> int:
    """Evaluate a checkpoint on rows with a reward: areax eval --model PATH --data ROWS --reward NAME."""
    with _importing("eval", options):
        from ..recipes import eval

    config = parse.parse(eval.Config, options, "areax eval")
    results = eval.main(config)
    _show(results, config.json)
    return 0 if results["scored_rows"] else 1


def report(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    other: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN2]")] = "",
    out: str | None = None,
    serve: bool = False,
    host: str = HOST,
    port: int = PORT,
    tensorboard: str = "",
    wandb: str = "",
    trackio: str = "",
    mlflow: str = "",
    swanlab: str = "",
) -> int:
    """Write an HTML report with curves, histograms and samples of a run, or follow it in a browser with --serve.

    Args:
      run: directory of a run, such as runs/demo.
      other: with --serve, another run: its curves are drawn over those of the first.
      out: file to write; None = report.html in the run's directory.
      serve: serve the page, which follows the run while it goes on, and writes nothing (docs/metrics.md).
      host: with --serve, address to listen on; one that other machines can reach needs a key in AREAX_REPORT_KEY.
      port: with --serve; 0 = any free port.
      tensorboard: folder to export metrics to as TensorBoard event files, replacing those in it.
      wandb: Weights & Biases project to export metrics to.
      trackio: trackio project to export metrics to.
      mlflow: MLflow experiment to export metrics to.
      swanlab: SwanLab project to export metrics to.
    """
    from .report import build as report
    from .tracking import sinks

    projects = {"wandb": wandb, "trackio": trackio, "mlflow": mlflow, "swanlab": swanlab}
    if serve:
        from ..recipes import recorded_samples
        from ..rollout.processes import keys
        from .report import live

        if out or tensorboard or any(projects.values()):
            named = ", ".join(f"--{name}" for name in ("out", "tensorboard", *projects))
            raise ValueError(f"report: --serve writes nothing; leave out {named}")
        paths = [Path(path) for path in (run, other) if path]
        live.serve(paths, recorded_samples.Samples, host=host, port=port, key=keys.read(keys.REPORT))
        return 0
    if (host, port) != (HOST, PORT):
        raise ValueError("report: --host and --port are for --serve; add it, or leave them out")
    if other:
        raise ValueError(f"report: a second run, {other}, needs --serve: a page is of one run")
    if tensorboard or any(projects.values()):
        sinks.copy(run, tensorboard=tensorboard, **projects)
    print(report.report(run, out))
    return 0


def replay(run: str, *options: str) -> int:
    """Recompute a run of train grpo from its journal and compare, also with another objective: areax replay RUN ...

    RUN is the run's directory. Exits with 1 unless every step is the run's, bit for bit.
    """
    with _importing("replay", options):
        from ..recipes import replay
    return replay.main(run, options)


def new(
    kind: Annotated[Literal["workflow", "reward", "dataset", "recipe"], tyro.conf.Positional],
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    out: str = ".",
) -> int:
    """Write a working workflow, reward, data set or recipe to start from, and its test: areax new reward my_reward.

    Args:
      kind: what to write.
      name: name of the file, and of the workflow or reward in it.
      out: folder for NAME.py and test_NAME.py.
    """
    from .commands import scaffold as new

    files, commands = new.new(kind, name, out)
    print(*(f"wrote {file}" for file in files), "try:", *(f"  {command}" for command in commands), sep="\n")
    return 0


def simulate(*options: str) -> int:
    """Simulate the step time of asynchronous RL, to choose eta and the split of devices; no devices needed."""
    from ..rollout.simulation import simulate
    from .tracking import progress

    config = parse.parse(simulate.Config, options, "areax simulate")
    every, outcomes = simulate.settings(config), []
    with progress.steps("simulate", len(every)) as tick:
        for setting in every:
            outcomes.append(simulate.simulate(*setting))
            tick(len(outcomes))
    print(json.dumps(simulate.report(outcomes), indent=2) if config.json else simulate.show(config, outcomes))
    return 0


def launch(*options: str) -> int:
    """Launch several processes of a command and its servers, here or on a cluster: areax launch ... -- train ..."""
    from . import launch

    at = options.index("--") if "--" in options else len(options)
    config = parse.parse(launch.Config, options[:at], "areax launch")
    command = list(options[at + 1 :])
    if not command:
        raise ValueError("areax launch: needs a command after --, as in areax launch --servers 2 -- train grpo ...")
    launch.check_servers(config, command)
    urls = [f"http://127.0.0.1:{1 + i}" for i in range(config.servers)]  # in place of those that the command will get
    words = [*command, "--servers", *urls] if urls else command
    if urls and config.on != "local" and launch.option(command, "--push.bucket"):
        words += ["--stagers", *urls]
    _check(words, config.on == "local")
    return launch.launch(config, command)


def _check(command: list[str], here: bool) -> None:
    """Raises ValueError if a command that other processes will run would refuse its options.

    A user's own recipe may exist only on the machines that will run it, and is not checked. Where that holds for a
    `--config` file, only the names of options are checked.

    Args:
      here: this machine runs the command.
    """
    name, *options = command
    function, prog = _command(name), f"areax {name}"
    target, given, first = function, None, ()
    if function is train:
        recipe, options = _recipe_of(name, options), options[1:]
        _check_recipe(recipe, name)
        if recipe.endswith(".py"):
            return
        with _importing(f"launch -- train {recipe}", options):
            module, settings = _recipe(recipe, name)
        target, prog, first = module.Config, f"{prog} {recipe}", module.FIRST_OPTIONS
        given = parse.instance(target, settings) if settings else None
    elif function in (demo, eval):
        with _importing(f"launch -- {name}", options):
            target = importlib.import_module(f"areax.recipes.{name}").Config
    elif function in FORWARDING:
        return
    if here or all(map(os.path.exists, parse.config_files(options))):
        parse.parsed(target, options, prog, given, first)
    elif isinstance(target, type):
        parse.check_names(target, options, prog, given)


def doctor() -> int:
    """Say what is installed, which devices and kernels work, and what is missing; exits with 1 if one is broken."""
    from .commands import doctor

    return doctor.doctor()


COMMANDS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        train, plan, simulate, demo, serve, tinker, convert, check, inspect, diff, eval, report, replay, new, launch,
        doctor,
    )
}  # fmt: skip
FORWARDING = (train, plan, simulate, demo, eval, replay, launch)  # commands that parse their options with a Config


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    log_lines.keep_printable()
    try:
        try:
            with _exits_shown():
                return _main(argv)
        finally:
            if sys.stdout:  # None if it was closed
                sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has gone, as in `areax --help | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at exit
        return 128 + signal.SIGPIPE


@contextlib.contextmanager
def _exits_shown() -> Iterator[None]:
    """Makes os._exit, by which code of a user would end this process as if all were well, say where it is called and
    end with another code than 0."""
    leave, own = os._exit, os.getpid()

    def shown(status: int) -> NoReturn:
        caller = sys._getframe(1)
        if os.getpid() == own and not origin.ours(caller):
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            print(
                f"{where}: os._exit({status}) ended the command at once, without what it does at its end",
                file=sys.stderr,
                flush=True,
            )
            status = status or 1
        leave(status)

    os._exit = shown
    try:
        yield
    finally:
        os._exit = leave


def _main(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # such as that there is no PyTorch
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: areax COMMAND ...\n")
        for name, function in COMMANDS.items():
            print(f"  {name:10}{(function.__doc__ or '').strip().splitlines()[0]}")
        print("\nFor details: areax COMMAND --help")
        return 0 if argv else 2
    if argv[0] == "--version":
        from .. import __version__

        print(f"areax {__version__}")
        return 0
    try:
        command = _command(argv[0])
        if command in FORWARDING:
            return _forward(command, argv[1:])
        return parse.parse(command, argv[1:], f"areax {argv[0]}")
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _unread():
            raise
        print(_one_line_of(error), file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not origin.raised_here(error):
            raise
        print(_one_line_of(error), file=sys.stderr)
        return 1


def _command(name: str) -> Callable:
    if command := COMMANDS.get(name):
        return command
    near = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}"
    if name in RECIPES or name in _algorithms():
        hint = f"did you mean areax train {name}?"
    raise ValueError(f"areax: unknown command {name!r}; {hint}")


def _unread() -> bool:
    """Whether nobody reads the standard output any more."""
    outputs = select.poll()
    outputs.register(sys.stdout, 0)
    return bool(outputs.poll(0))


def _forward(command, arguments: list[str]) -> int:
    if command is replay:
        if arguments and arguments[0].startswith("--help"):
            arguments = ["RUN", *arguments]
        if not arguments or arguments[0].startswith("-"):
            raise ValueError("areax replay: needs the directory of a run as first argument, such as runs/grpo")
    if command not in (train, plan):
        return command(*arguments)
    if arguments and arguments[0] in ("-h", "--help"):
        known = dict.fromkeys([*RECIPES, *_algorithms()])
        print(f"usage: areax {command.__name__} {{{','.join(known)},FILE.py}} ...\n\n{cleandoc(command.__doc__)}")
        return 0
    return command(_recipe_of(command.__name__, arguments), *arguments[1:])


def _recipe_of(name: str, arguments: list[str]) -> str:
    """The recipe among the arguments of `train` or `plan`."""
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            f"areax {name}: needs a recipe as first argument: {', '.join(RECIPES)} or a file ending in .py"
        )
    return arguments[0]


def _one_line_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return printable(f"{error.filename}: {error.strerror}")
    text = one_line(error)
    if len(text) > log_lines.LONGEST:  # what to do stands at its end
        half = log_lines.LONGEST // 2
        text = f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"
    return text


def _short(summary: dict) -> dict:
    """What a run prints at its end of a summary.json; a summary that was not written to a file is printed in full."""
    if "report" not in summary:
        return summary
    heldout = [name for name, value in summary.items() if name.startswith("heldout") and isinstance(value, float)]
    heldout = [name for name in heldout if not name.endswith("_max")]
    sets = {name: value for name, value in (summary.get("evaluation") or {}).items() if name.endswith("/accuracy")}
    return sets | {name: summary[name] for name in (*heldout, *SHOWN) if summary.get(name) is not None}


def _show(report: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2, default=str))
        return
    for name, value in report.items():
        value = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
        if isinstance(value, dict):
            value = ", ".join(f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in value.items())
        print(f"{name}: {value:.4g}" if isinstance(value, float) else printable(f"{name}: {value}"))


if __name__ == "__main__":
    sys.exit(main())
