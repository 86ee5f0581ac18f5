"""Prints what SkyPilot makes of task files, a line of JSON each; without files, its schemas of tasks and parts."""

import json
import sys

import sky
from sky.utils import schemas


def read(path):
    try:
        task = sky.Task.from_yaml(path)
        for storage in task.storage_mounts.values():
            storage._validate_storage_spec(storage.name)  # as `sky launch` does before it looks for the bucket
    except (ValueError, sky.exceptions.StorageError) as error:
        return {"refused": " ".join(str(error).split())}
    [resources] = task.resources
    return {
        "nodes": task.num_nodes, "cpus": resources.cpus, "accelerators": resources.accelerators,
        "mounts": {path: [one.source, one.mode.value] for path, one in task.storage_mounts.items()},
        "secrets": sorted(task.secrets),
    }  # fmt: skip


if sys.argv[1:]:
    for path in sys.argv[1:]:
        print(json.dumps(read(path)))
else:
    parts = {"task": schemas.get_task_schema(), "resources": schemas.get_resources_schema()}
    print(json.dumps({"version": sky.__version__, **parts, "storage": schemas.get_storage_schema()}))
