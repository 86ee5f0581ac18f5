"""SGLang's own server on a CPU: `python serve.py --model-path DIR --port PORT [any SGLang option]`.

Runs in the environment of install.sh, takes about a minute to start and 2 GB of memory. Good for all
that the HTTP contract says (requests, weight updates, versions, pausing, log-probabilities); says
nothing about speed or GPU kernels. Options on the command line win over OPTIONS.

SGLang spawns its workers, and each runs this file again up to the guard at its end: that is how they
come to know the stand-in and the operators below.
"""

import os
import sys
from pathlib import Path

OPTIONS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--attention-backend": "torch_native",
    "--context-length": "1024",
    "--max-total-tokens": "8192",
    "--mem-fraction-static": "0.05",
    "--host": "127.0.0.1",
}

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent / "stubs"))

import torch  # noqa: E402

# torchvision's compiled half is built for CUDA and does not load beside a CPU torch. Its Python half,
# which transformers imports, only needs these two operators declared; no text model calls them.
torchvision = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    torchvision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def unpinned(make):
    """`make` without page-locked memory, which only a machine with an accelerator has; SGLang's adapters ask for it."""
    return lambda *args, pin_memory=False, **options: make(*args, **options)


for maker in ("tensor", "empty", "zeros"):
    setattr(torch, maker, unpinned(getattr(torch, maker)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor


def main(arguments):
    import sglang

    if arguments == ["--version"]:
        print(f"SGLang {sglang.__version__} on torch {torch.__version__}")
        return

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    defaults = [word for option in OPTIONS.items() for word in option]
    load_plugins()
    try:
        run_server(prepare_server_args([*defaults, "--skip-server-warmup", *arguments]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
