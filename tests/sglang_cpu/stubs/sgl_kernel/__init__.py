"""The names that SGLang imports from `sgl_kernel`, whose published builds are for GPUs only.

They serve speculative decoding and kernels of the CPU engine. A dense text model on the
`torch_native` attention backend calls none of them; a call is an error, never a wrong answer.
No submodules on purpose: SGLang looks for `sgl_kernel.scalar_type` and goes on without it.
"""

import torch

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

# Operators that models of vision and of text name when they are imported, and call elsewhere only.
OPERATORS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
library = torch.library.Library("sgl_kernel", "FRAGMENT")
for operator in OPERATORS:
    library.define(f"{operator}(Tensor x) -> Tensor")
