"""The names that SGLang imports from `sgl_kernel`, whose published builds are for GPUs only.

They serve speculative decoding and kernels of the CPU engine. A dense text model on the
`torch_native` attention backend calls none of them; a call is an error, never a wrong answer.
No submodules on purpose: SGLang looks for `sgl_kernel.scalar_type` and goes on without it.
"""

NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


def _refuse(name):
    def kernel(*_, **__):
        raise RuntimeError(f"sgl_kernel.{name}: not available on the CPU")

    return kernel


globals().update({name: _refuse(name) for name in NAMES})
