"""SGLang's own server on a CPU: `python serve.py --model-path DIR --port PORT [any SGLang option]`.

Runs in the environment of install.sh, takes about a minute to start and 2 GB of memory. Good for all
that the HTTP contract says (requests, weight updates, versions, pausing, log-probabilities); says
nothing about speed or GPU kernels. Options on the command line win over OPTIONS.

SGLang spawns its workers, and each runs this file again up to the guard at its end: that is how they
come to know the stand-in and the operators below.

`python serve.py --many` imports SGLang once, and forks a server for each line of its input, {"options":
[...], "log": PATH}, whose process id it prints: a server takes seconds to start then.
"""

import json
import multiprocessing
import os
import signal
import sys
import traceback
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
os.environ.setdefault("PYTORCH_JIT", "0")  # which would look for the source of the functions replaced below
# Inductor would compile a dozen functions. Its AVX2 code of one (torch 2.13) leaves a token without its
# repetition_penalty; with AVX-512 and uncompiled it is right.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent / "stubs"))

import torch  # noqa: E402

# torchvision's compiled half is built for CUDA and does not load beside a CPU torch. Its Python half,
# which transformers imports, only needs these two operators declared; no text model calls them.
if torch.version.cuda is None:
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


def many():
    # What the workers import, too, so that they need not.
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    # torch_native keeps latent vectors only, and SGLang would ask it to attend to whole keys in a prompt.
    handler.AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang's own choice, "spawn", would import all again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:
        job = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2), os.close(0)
        try:
            main(job["options"])
        except BaseException:
            traceback.print_exc()
        os._exit(0)


if __name__ == "__main__":
    many() if sys.argv[1:] == ["--many"] else main(sys.argv[1:])
