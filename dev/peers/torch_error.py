#!/usr/bin/env python3
"""Errors of this project's operations beside PyTorch's, both against fp64 on the same inputs.

    build/cuda/dump_operations FOLDER && dev/peers/torch_error.py FOLDER [--device cuda]

Reads what dev/dump_operations.cpp wrote. PyTorch takes the inputs in the type they are stored in, with the calls of
dev/peers/torch_gpt.py, and once more in fp64; gradients are its own. The error is the relative L2 distance from fp64. Rows of
ours that are stored in fp32 (losses, weight gradients) are compared with what PyTorch returns for bf16 inputs.
Exit code 1 when an error is more than 1.5 x PyTorch's; results in fp32 are also right within 1e-5.
"""
import argparse
import json
import math
import pathlib
import sys

import torch
import torch.nn.functional as F

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
BAR, FP32_BAR = 1.5, 1e-5


def read(path, device):
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, info in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + x for x in info["data_offsets"])
            flat = torch.frombuffer(data[begin:end], dtype=DTYPES[info["dtype"]])
            tensors[name] = flat.reshape(info["shape"]).to(device)
    return tensors


def with_gradients(function, leaves, d_out, dtype):
    """The function's result and the gradients of its leaves, computed in dtype."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


# ---- Every operation: the names of its results, and PyTorch's as a function of the dtype ----------------------------------

def layernorm(t):
    leaves = [t["x"], t["weight"], t["bias"]]
    return ["out", "d_x", "d_weight", "d_bias"], lambda dtype: with_gradients(
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5), leaves, t["d_out"], dtype)


def rmsnorm(t):
    return ["out", "d_x", "d_weight"], lambda dtype: with_gradients(
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5), [t["x"], t["weight"]], t["d_out"], dtype)


def gelu(t):
    return ["out", "d_x"], lambda dtype: with_gradients(lambda x: F.gelu(x, approximate="tanh"), [t["x"]], t["d_out"], dtype)


def swiglu(t):
    def function(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    return ["out", "d_x"], lambda dtype: with_gradients(function, [t["x"]], t["d_out"], dtype)


def matmul(t):
    bias = ["bias"] if "bias" in t else []
    leaves = [t[name] for name in ["x", "weight"] + bias]
    return ["out", "d_x", "d_weight"] + ["d_" + b for b in bias], lambda dtype: with_gradients(F.linear, leaves, t["d_out"], dtype)


def embedding(t):
    tokens = t["tokens"].long()
    return ["out", "d_weight", "d_positions"], lambda dtype: with_gradients(
        lambda w, p: F.embedding(tokens, w) + p, [t["weight"], t["positions"]], t["d_out"], dtype)


def rope(t):
    half, heads, dim = t["table"].shape[1] // 2, int(t["rotated_heads"]), t["table"].shape[1]

    def function(x):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (torch.cat([part, part], 1).to(wide)[:, None] for part in (t["table"][:, :half], t["table"][:, half:]))
        x = x.unflatten(-1, (-1, dim))
        q, v = x[..., :heads, :], x[..., heads:, :]
        turned = torch.cat([-q[..., half:], q[..., :half]], -1)
        return torch.cat([(q.to(wide) * cos + turned.to(wide) * sin).to(x.dtype), v], -2).flatten(-2)
    return ["out", "d_x"], lambda dtype: with_gradients(function, [t["x"]], t["d_out"], dtype)


def crossentropy(t):
    vocab, targets = int(t["vocab"]), t["targets"].long()
    assert not t["d_logits"][:, vocab:].any(), "the gradient of the padding is not zero"
    t["d_logits"] = t["d_logits"][:, :vocab]
    n = len(targets)

    def function(x):
        return F.cross_entropy(x if x.dtype == torch.float64 else x.float(), targets, reduction="none")
    return ["losses", "d_logits"], lambda dtype: with_gradients(
        function, [t["logits"][:, :vocab]], torch.full((n,), 1 / n, device=targets.device), dtype)


def attention(t):
    heads, columns = t["lse"].shape[1], t["out"].shape[2]
    dim = columns // heads
    kv = (t["qkv"].shape[2] - columns) // 2
    t["dq"], t["dk"], t["dv"] = t["d_qkv"].split([columns, kv, kv], 2)

    def function(q, k, v):
        q, k, v = (x.unflatten(-1, (-1, dim)).transpose(1, 2) for x in (q, k, v))
        if q.dtype == torch.float64:
            k, v = (x.repeat_interleave(heads * dim // kv, 1) for x in (k, v))
            scores = (q @ k.transpose(2, 3)) / math.sqrt(dim)
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            out = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != columns)
        return out.transpose(1, 2).flatten(2)
    leaves = t["qkv"].split([columns, kv, kv], 2)
    return ["out", "dq", "dk", "dv"], lambda dtype: with_gradients(function, leaves, t["d_out"], dtype)


def distance(x, exact):
    return float(torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact))


def main():
    a = argparse.ArgumentParser()
    a.add_argument("folder")
    a.add_argument("--device", default="cuda")
    o = a.parse_args()
    paths = sorted(pathlib.Path(o.folder).glob("*.safetensors"))
    worst, count, failed = (0.0, "nothing"), 0, not paths
    print(f"{'operation':<34} {'result':<12} {'ours':>9} {'torch':>9} {'ratio':>7}")
    for path in paths:
        operation = path.stem.split(" ", 1)[1]
        tensors = read(path, o.device)
        names, function = globals()[operation.split()[0]](tensors)
        for name, theirs, exact in zip(names, function(tensors["d_out" if "d_out" in tensors else "logits"].dtype), function(torch.float64)):
            ours, torchs = distance(tensors[name], exact), distance(theirs, exact)
            ratio = ours / torchs if torchs else (0.0 if ours == 0 else math.inf)
            exact_enough = tensors[name].dtype == torch.float32 and ours <= FP32_BAR
            good = exact_enough or ratio <= BAR
            print(f"{operation:<34} {name:<12} {ours:9.2e} {torchs:9.2e} {ratio:7.3f}{'' if good else '  FAILED'}")
            failed, count = failed or not good, count + 1
            if not exact_enough and not ratio <= worst[0]:
                worst = (ratio, f"{operation} {name}")
        del tensors, function
    print(f"{count} results of {len(paths)} operations, worst ratio {worst[0]:.3f} ({worst[1]})")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
