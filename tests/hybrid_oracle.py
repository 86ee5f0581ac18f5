"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next in float64, one sequence at a time, from a checkpoint's tensors.

Delta nets run token by token (arXiv:2412.06464), attention is dense. Tensors are torch's, for their gradients.
"""

import torch
from torch import sigmoid
from torch.nn.functional import silu, softplus


def logits(hf, w, token_T):
    """[T, V], given config.json, with all options stated, and the tensors by name."""
    x_TD = w["model.embed_tokens.weight"][token_T]
    for i, kind in enumerate(hf["layer_types"]):
        of_layer = f"model.layers.{i}."
        own = {name.removeprefix(of_layer).removesuffix(".weight"): x for name, x in w.items()
               if name.startswith(of_layer)}  # fmt: skip
        h_TD = norm(x_TD, 1 + own["input_layernorm"], hf)
        x_TD = x_TD + {"linear_attention": delta_net, "full_attention": attention}[kind](h_TD, own, hf)
        h_TD = norm(x_TD, 1 + own["post_attention_layernorm"], hf)
        x_TD = x_TD + (mixture if "mlp.gate" in own else mlp)(h_TD, own, hf)
    head = w["model.embed_tokens.weight" if hf["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x_TD, 1 + w["model.norm.weight"], hf) @ head.T


def norm(x, weight, hf):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + hf["rms_norm_eps"]) * weight


def delta_net(h_TD, w, hf):
    T, G, N = len(h_TD), hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    K, V = hf["linear_key_head_dim"], hf["linear_value_head_dim"]
    if "linear_attn.in_proj_qkvz" in w:  # rows are grouped by key head
        qkvz = (h_TD @ w["linear_attn.in_proj_qkvz"].T).reshape(T, G, -1)
        q, k, v, z = (x.reshape(T, -1) for x in qkvz.split([K, K, N // G * V, N // G * V], -1))
        b, a = (x.reshape(T, N) for x in (h_TD @ w["linear_attn.in_proj_ba"].T).reshape(T, G, -1).split(N // G, -1))
        qkv = torch.cat([q, k, v], -1)
    else:
        qkv, z, b, a = (h_TD @ w[f"linear_attn.in_proj_{name}"].T for name in ("qkv", "z", "b", "a"))
    taps_CW = w["linear_attn.conv1d"][:, 0]
    before = torch.cat([torch.zeros(taps_CW.shape[1] - 1, len(taps_CW), dtype=qkv.dtype), qkv])
    qkv = silu(sum(before[i : i + T] * taps_CW[:, i] for i in range(taps_CW.shape[1])))
    q, k, v = qkv.split([G * K, G * K, N * V], -1)
    unit = lambda x: x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)
    q, k = (unit(x.reshape(T, G, K)).repeat_interleave(N // G, 1) for x in (q, k))
    beta, decay = sigmoid(b), torch.exp(-torch.exp(w["linear_attn.A_log"]) * softplus(a + w["linear_attn.dt_bias"]))
    S, out = torch.zeros(N, K, V, dtype=qkv.dtype), []
    for t in range(T):
        S = decay[t][:, None, None] * S
        error = v[t].reshape(N, V) - (S * k[t][:, :, None]).sum(1)
        S = S + k[t][:, :, None] * (beta[t][:, None] * error)[:, None]
        out.append((S * q[t][:, :, None]).sum(1) / K**0.5)
    y = norm(torch.stack(out), w["linear_attn.norm"], hf) * silu(z.reshape(T, N, V))
    return y.reshape(T, -1) @ w["linear_attn.out_proj"].T


def attention(h_TD, w, hf):
    T, N, G, H = len(h_TD), hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
    project = lambda name: h_TD @ w[f"self_attn.{name}"].T + w.get(f"self_attn.{name}.bias", 0)
    q, gate = project("q_proj").reshape(T, N, 2 * H).split(H, -1)
    k, v = (project(name).reshape(T, G, H) for name in ("k_proj", "v_proj"))
    q = rotated(norm(q, 1 + w["self_attn.q_norm"], hf), hf)
    k = rotated(norm(k, 1 + w["self_attn.k_norm"], hf), hf).repeat_interleave(N // G, 1)
    scores = torch.einsum("tnh,snh->nts", q, k) / H**0.5
    later = torch.triu(torch.ones(T, T, dtype=bool), 1)
    share = torch.softmax(scores.masked_fill(later, -torch.inf), -1)
    out = torch.einsum("nts,snh->tnh", share, v.repeat_interleave(N // G, 1)) * sigmoid(gate)
    return out.reshape(T, -1) @ w["self_attn.o_proj"].T + w.get("self_attn.o_proj.bias", 0)


def rotated(x_TNH, hf):
    rope = hf["rope_parameters"]
    half = int(x_TNH.shape[-1] * rope["partial_rotary_factor"]) // 2
    speed = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (torch.arange(len(x_TNH))[:, None] * speed)[:, None]
    a, b, rest = x_TNH[..., :half], x_TNH[..., half : 2 * half], x_TNH[..., 2 * half :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


def mlp(h_TD, w, hf, at="mlp"):
    gate, up, down = (w[f"{at}.{name}_proj"] for name in ("gate", "up", "down"))
    return (silu(h_TD @ gate.T) * (h_TD @ up.T)) @ down.T


def mixture(h_TD, w, hf):
    share = torch.softmax(h_TD @ w["mlp.gate"].T, -1)
    best, chosen = share.topk(hf["num_experts_per_tok"])
    if hf.get("norm_topk_prob", True):
        best = best / best.sum(-1, keepdim=True)
    out = sigmoid(h_TD @ w["mlp.shared_expert_gate"].T) * mlp(h_TD, w, hf, "mlp.shared_expert")
    for e in range(hf["num_experts"]):
        own = torch.where(chosen == e, best, 0).sum(-1, keepdim=True)
        out = out + own * mlp(h_TD, w, hf, f"mlp.experts.{e}")
    return out
