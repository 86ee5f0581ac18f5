"""The RL part of the demo on a local Ray cluster: `areax launch` places two servers and a trainer on two raylets.

Uses the SFT stage of runs/demo if it exists, else runs it first. Writes runs/demo-ray, and checks the results.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import raylets

from areax.adapters.command_line import options
from areax.adapters.report import build
from areax.adapters.tracking import run_dir
from areax.recipes import demo, grpo, sft

OUT = Path("runs/demo-ray")


def words(config, default, prefix="--"):
    """Yields the options that turn `default` into `config`."""
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        name = prefix + field.name.replace("_", "-")
        if value == usual:
            continue
        if field.name in options.groups(type(config)):
            yield from words(value, usual)
        elif dataclasses.is_dataclass(value):
            yield from words(value, usual, f"{name}.")
        else:
            yield from (name, str(value))


def main():
    config = demo.Config(out=str(OUT))
    OUT.mkdir(parents=True, exist_ok=True)
    demo.write_data(config, OUT)
    for old in ("grpo", "logs"):
        shutil.rmtree(OUT / old, ignore_errors=True)
    if not (OUT / "sft" / run_dir.SUMMARY).exists():
        if Path("runs/demo/sft", run_dir.SUMMARY).exists():
            shutil.copytree("runs/demo/sft", OUT / "sft", dirs_exist_ok=True)
        else:
            sft.main(demo.sft_config(config, OUT))
    run = demo.grpo_config(config, OUT, "grpo")
    serve = run.serving.serve
    usual = grpo.Config("", "", "", serving=run.serving)  # the servers belong to the launcher
    began = time.monotonic()
    with raylets.cluster(["--num-cpus", "2"], ["--num-cpus", "1"]) as cluster:
        where = ["--on", "ray", "--ray.address", cluster.address]
        command = [sys.executable, "-m", "areax", "launch", *where, "--servers", "2"]
        command += ["--server.slots", str(serve.slots), "--server.context", str(serve.context)]
        code = subprocess.run(
            [*command, "--logs", str(OUT / "logs"), "--", "train", "grpo", *words(run, usual)]
        ).returncode
    seconds = time.monotonic() - began
    summary = json.loads((OUT / "grpo" / run_dir.SUMMARY).read_text())
    servers = json.loads((OUT / "grpo" / run_dir.CONFIG).read_text())["serving"]["servers"]
    print(build.report(OUT / "grpo"))
    rules = {
        "exit code 0": code == 0,
        "two servers on two nodes": {url.split("/")[2].split(":")[0] for url in servers} == set(raylets.ADDRESSES[:2]),
        "below 55 % after SFT": summary["accuracies"]["0"] < 0.55,
        "at least 90 % after GRPO": summary["accuracy"] >= 0.9,
        "servers have the trainer's version": [x.split("-")[0] for x in summary["server_version"]] == [str(run.steps)],
        "max |d logp| at most 1e-4": summary["max_logp_diff"] <= 1e-4,
        "the checkpoint is there": Path(summary["checkpoint"]).is_dir(),
    }
    for rule, holds in rules.items():
        print("holds " if holds else "BROKEN", rule)
    print(
        f"demo on Ray: {summary['accuracies']['0']:.1%} after SFT, {summary['accuracy']:.1%} after {summary['steps']} "
        f"steps of GRPO, {seconds:.0f} s; {sum(rules.values())} passed, {len(rules) - sum(rules.values())} failed"
    )
    sys.exit(not all(rules.values()))


if __name__ == "__main__":
    main()
