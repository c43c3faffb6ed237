#!/usr/bin/env python3
"""PyTorch baseline: the same shapes, initial weights and batches as train_gpt, for speed and loss side by side.

    torch_gpt.py --model gpt2-124m --data train.bin --steps 300 --global-batch 64 --micro-batch 64 --seq-len 1024
                 --lr 6e-4 --warmup-steps 15 --out losses.jsonl [--no-compile] [--pure-bf16]
    torchrun --nproc-per-node 2 torch_gpt.py --ddp ...      one process a GPU, DistributedDataParallel

Weights are fp32 and products run under bf16 autocast (--pure-bf16: weights, gradients and moments all bf16, for models that
would not fit). torch.compile, fused AdamW, scaled_dot_product_attention. The counter RNG, the initial values and the order of the
data are written here a second time, in numpy, from dev/FORMATS.md and kernels/common/rng.h: equal losses check both.
Writes one JSON object a step (step, loss, step_ms, tokens_per_s) and prints a summary with the median of the steps after --skip.

--ddp: the ranks share the global batch, micro-batch by micro-batch; tokens/s are those of all GPUs together, loss the mean over them. Gradients are
reduced bucket by bucket while the backward pass runs, once a step: not in the micro-batches before the last one.
"""
import argparse
import contextlib
import json
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

M32, M64 = np.uint64(0xFFFFFFFF), (1 << 64) - 1

PRESETS = {
    "gpt2-124m": dict(kind="gpt2", layers=12, hidden=768, heads=12),
    "gpt2-355m": dict(kind="gpt2", layers=24, hidden=1024, heads=16),
    "gpt2-774m": dict(kind="gpt2", layers=36, hidden=1280, heads=20),
    "gpt2-1558m": dict(kind="gpt2", layers=48, hidden=1600, heads=25),
    "llama3-1b": dict(kind="llama", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, tied=True),
    "llama3-8b": dict(kind="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, tied=False),
}


# ---- The counter RNG (Philox4x32-10), initial values and data order --------------------------------------------------

def philox(seed, stream, index):
    """Four uint32 words for each of an array of uint64 indices; seed and stream are integers or arrays."""
    index = np.asarray(index, dtype=np.uint64)
    seed, stream = np.uint64(seed & M64), np.uint64(stream & M64)
    k0, k1 = seed & M32, seed >> np.uint64(32)
    c0, c1 = index & M32, index >> np.uint64(32)
    c2, c3 = np.full_like(index, stream & M32), np.full_like(index, stream >> np.uint64(32))
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & M32, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & M32
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & M32, (k1 + np.uint64(0xBB67AE85)) & M32
    return c0, c1, c2, c3


def stable_key(name):
    h = 0xCBF29CE484222325
    for c in name.encode():
        h = ((h ^ c) * 0x100000001B3) & M64
    return h


def mix64(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def uniform(words):
    return (((words >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)).astype(np.float64)


def normal_values(name, size, std, seed):
    out = np.empty((size + 3) // 4 * 4, dtype=np.float32)
    for begin in range(0, len(out) // 4, 1 << 20):
        index = np.arange(begin, min(begin + (1 << 20), len(out) // 4), dtype=np.uint64)
        a, b, c, d = philox(seed, stable_key(name), index)
        part = out[4 * begin:4 * (begin + len(index))].reshape(-1, 4)
        for column, (x, y) in ((0, (a, b)), (2, (c, d))):
            radius, angle = np.sqrt(-2.0 * np.log(uniform(x))), 6.283185307179586 * uniform(y)
            part[:, column] = (radius * np.cos(angle)).astype(np.float32)
            part[:, column + 1] = (radius * np.sin(angle)).astype(np.float32)
    return out[:size] * np.float32(std)


class SampleOrder:
    """Position in the training order -> sample, for a single source."""

    def __init__(self, samples, seed):
        self.samples, self.seed = samples, seed
        self.half = 1
        while self.half < 32 and (1 << (2 * self.half)) < samples:
            self.half += 1

    def key(self, epoch):
        a, b, _, _ = philox(self.seed, stable_key("sample order") ^ mix64(0), np.array([epoch], dtype=np.uint64))
        return (int(a[0]) << 32) | int(b[0])

    def __call__(self, position):
        epoch, position = divmod(position, self.samples)
        key, mask = self.key(epoch), (1 << self.half) - 1
        while True:
            left, right = position >> self.half, position & mask
            for r in range(6):
                left, right = right, left ^ (int(philox(key, r, np.array([right], dtype=np.uint64))[0][0]) & mask)
            position = (left << self.half) | right
            if position < self.samples:
                return position


class Shard:
    def __init__(self, path, length, seed):
        header = np.fromfile(path, dtype=np.int32, count=256)
        width = {20240520: np.uint16, 20240801: np.uint32}[int(header[0])]
        self.tokens = np.memmap(path, dtype=width, mode="r", offset=1024)
        self.length = length
        self.samples = (len(self.tokens) - 1) // length
        self.order = SampleOrder(self.samples, seed)

    def batch(self, first, count, shuffle=True):
        rows = [self.order(first + i) if shuffle else first + i for i in range(count)]
        part = np.stack([self.tokens[r * self.length:r * self.length + self.length + 1] for r in rows]).astype(np.int64)
        return torch.from_numpy(part[:, :-1].copy()), torch.from_numpy(part[:, 1:].copy())


# ---- Models, their parameters named as in Hugging Face's files ----------------------------------------------------------

class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Gpt2(nn.Module):
    def __init__(self, m, vocab, length):
        super().__init__()
        c = m["hidden"]
        self.heads, self.vocab = m["heads"], vocab
        self.wte, self.wpe = nn.Embedding((vocab + 127) // 128 * 128, c), nn.Embedding(length, c)
        self.layers = nn.ModuleList(nn.ModuleDict(dict(
            ln_1=nn.LayerNorm(c), attn=nn.Linear(c, 3 * c), proj=nn.Linear(c, c), ln_2=nn.LayerNorm(c),
            fc=nn.Linear(c, 4 * c), out=nn.Linear(4 * c, c))) for _ in range(m["layers"]))
        self.ln_f = nn.LayerNorm(c)

    def names(self):
        """(Hugging Face name, parameter, rows that exist in files, stored transposed)"""
        yield "transformer.wte.weight", self.wte.weight, self.vocab, False
        yield "transformer.wpe.weight", self.wpe.weight, None, False
        for i, l in enumerate(self.layers):
            at = f"transformer.h.{i}."
            for hf, module in (("ln_1", "ln_1"), ("attn.c_attn", "attn"), ("attn.c_proj", "proj"), ("ln_2", "ln_2"),
                               ("mlp.c_fc", "fc"), ("mlp.c_proj", "out")):
                yield at + hf + ".weight", l[module].weight, None, l[module].weight.ndim == 2
                yield at + hf + ".bias", l[module].bias, None, False
        yield "transformer.ln_f.weight", self.ln_f.weight, None, False
        yield "transformer.ln_f.bias", self.ln_f.bias, None, False

    def forward(self, tokens, targets):
        b, t = tokens.shape
        x = self.wte(tokens) + self.wpe(torch.arange(t, device=tokens.device))
        for l in self.layers:
            q, k, v = l["attn"](l["ln_1"](x)).split(x.shape[-1], dim=2)
            q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
            x = x + l["proj"](y)
            x = x + l["out"](F.gelu(l["fc"](l["ln_2"](x)), approximate="tanh"))
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(mask_padding(logits, self.vocab).view(-1, logits.shape[-1]).float(), targets.view(-1))


class Llama(nn.Module):
    def __init__(self, m, vocab, length, theta=500000.0):
        super().__init__()
        c, d, self.h, self.kv = m["hidden"], m["head_dim"], m["heads"], m["kv_heads"]
        self.d, self.vocab, self.tied = d, vocab, m["tied"]
        self.embed = nn.Embedding((vocab + 127) // 128 * 128, c)
        self.layers = nn.ModuleList(nn.ModuleDict(dict(
            norm1=RMSNorm(c), qkv=nn.Linear(c, (self.h + 2 * self.kv) * d, bias=False), o=nn.Linear(self.h * d, c, bias=False),
            norm2=RMSNorm(c), gate_up=nn.Linear(c, 2 * m["ffn"], bias=False), down=nn.Linear(m["ffn"], c, bias=False)))
            for _ in range(m["layers"]))
        self.norm = RMSNorm(c)
        self.head = None if self.tied else nn.Linear(c, self.embed.weight.shape[0], bias=False)
        angle = torch.arange(length).double()[:, None] * theta ** (-torch.arange(0, d, 2).double() / d)
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, 1).float(), persistent=False)
        self.register_buffer("sin", torch.cat([angle.sin()] * 2, 1).float(), persistent=False)

    def names(self):
        yield "model.embed_tokens.weight", self.embed.weight, self.vocab, False
        for i, l in enumerate(self.layers):
            at, q, kv = f"model.layers.{i}.", self.h * self.d, self.kv * self.d
            yield at + "input_layernorm.weight", l["norm1"].weight, None, False
            w = l["qkv"].weight
            yield at + "self_attn.q_proj.weight", w[:q], None, False
            yield at + "self_attn.k_proj.weight", w[q:q + kv], None, False
            yield at + "self_attn.v_proj.weight", w[q + kv:], None, False
            yield at + "self_attn.o_proj.weight", l["o"].weight, None, False
            yield at + "post_attention_layernorm.weight", l["norm2"].weight, None, False
            f = l["down"].weight.shape[1]
            yield at + "mlp.gate_proj.weight", l["gate_up"].weight[:f], None, False
            yield at + "mlp.up_proj.weight", l["gate_up"].weight[f:], None, False
            yield at + "mlp.down_proj.weight", l["down"].weight, None, False
        yield "model.norm.weight", self.norm.weight, None, False
        if self.head is not None:
            yield "lm_head.weight", self.head.weight, self.vocab, False

    def rotate(self, x):
        half = x.shape[-1] // 2
        t = x.shape[1]
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return (x.float() * self.cos[:t, None] + turned.float() * self.sin[:t, None]).to(x.dtype)

    def forward(self, tokens, targets):
        b, t = tokens.shape
        x = self.embed(tokens)
        for l in self.layers:
            q, k, v = l["qkv"](l["norm1"](x)).view(b, t, self.h + 2 * self.kv, self.d).split([self.h, self.kv, self.kv], 2)
            q, k, v = self.rotate(q).transpose(1, 2), self.rotate(k).transpose(1, 2), v.transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(b, t, -1)
            x = x + l["o"](y)
            gate, up = l["gate_up"](l["norm2"](x)).chunk(2, -1)
            x = x + l["down"](F.silu(gate) * up)
        logits = F.linear(self.norm(x), self.embed.weight if self.tied else self.head.weight)
        return F.cross_entropy(mask_padding(logits, self.vocab).view(-1, logits.shape[-1]).float(), targets.view(-1))


def mask_padding(logits, vocab):
    if logits.shape[-1] == vocab:
        return logits
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= vocab, float("-inf"))


def initialise(model, layers, seed, std=0.02):
    """Normal weights, 1 for norms, 0 for biases; projections into the residual stream divided by sqrt(2 layers)."""
    residual = ("attn.c_proj.weight", "mlp.c_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")
    with torch.no_grad():
        for name, p, rows, transposed in model.names():
            if p.ndim == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            shape = (rows or p.shape[0], p.shape[1])
            shape = shape[::-1] if transposed else shape
            scale = std / math.sqrt(2 * layers) if name.endswith(residual) else std
            values = torch.from_numpy(normal_values(name, shape[0] * shape[1], scale, seed)).view(shape)
            if rows is not None:
                p.zero_()
                p[:rows].copy_(values)
            else:
                p.copy_(values.t() if transposed else values)


# ---- Training -----------------------------------------------------------------------------------------------------------

def main():
    a = argparse.ArgumentParser()
    a.add_argument("--model", required=True, help="a preset, or a JSON object with its fields")
    a.add_argument("--data", required=True)
    a.add_argument("--val-data")
    a.add_argument("--vocab", type=int, default=0, help="default: 50257 for gpt2, 128256 for llama")
    a.add_argument("--steps", type=int, default=20)
    a.add_argument("--global-batch", type=int, default=64)
    a.add_argument("--micro-batch", type=int, default=64)
    a.add_argument("--seq-len", type=int, default=1024)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--lr", type=float, default=6e-4)
    a.add_argument("--min-lr-frac", type=float, default=0.1)
    a.add_argument("--warmup-steps", type=int, default=0)
    a.add_argument("--out", default="")
    a.add_argument("--skip", type=int, default=8, help="steps left out of the median")
    a.add_argument("--eval-every", type=int, default=0)
    a.add_argument("--eval-batches", type=int, default=20)
    a.add_argument("--no-compile", action="store_true")
    a.add_argument("--pure-bf16", action="store_true")
    a.add_argument("--random-init", action="store_true", help="torch's own random numbers: faster to start, for speed only")
    a.add_argument("--ddp", action="store_true", help="one of several processes: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set")
    a.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to see that it runs")
    o = a.parse_args()

    rank, ranks, device = 0, 1, torch.device(o.device)
    if o.ddp:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if o.device == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if o.device == "cuda" else "gloo")
    synchronize = torch.cuda.synchronize if o.device == "cuda" else lambda: None
    if o.global_batch % (o.micro_batch * ranks):
        a.error(f"--global-batch {o.global_batch}: {ranks} x --micro-batch {o.micro_batch} must divide it")
    accumulate = o.global_batch // (o.micro_batch * ranks)

    torch.set_float32_matmul_precision("high")
    m = PRESETS[o.model] if o.model in PRESETS else json.loads(o.model)
    vocab = o.vocab or (50257 if m["kind"] == "gpt2" else 128256)
    with device:
        model = (Gpt2 if m["kind"] == "gpt2" else Llama)(m, vocab, o.seq_len)
    if o.pure_bf16:
        model = model.bfloat16()
    if not o.random_init:
        initialise(model, m["layers"], o.seed)
    else:
        for p in model.parameters():
            torch.nn.init.normal_(p, 0.0, 0.02) if p.ndim > 1 else None
    groups = [dict(params=[p for p in model.parameters() if p.ndim > 1], weight_decay=0.1),
              dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    # torch.compile cuts its graphs at DDP's buckets, so that reducing begins within the backward pass: it has to see DDP. A static
    # graph cannot alternate between micro-batches with and without reducing.
    ddp = DistributedDataParallel(model, device_ids=[device.index] if o.device == "cuda" else None, gradient_as_bucket_view=True, broadcast_buffers=False,
                                  static_graph=o.no_compile and accumulate == 1) if o.ddp else None
    step_model = ddp or model
    step_model = step_model if o.no_compile else torch.compile(step_model)
    shard = Shard(o.data, o.seq_len, o.seed)
    held_out = Shard(o.val_data, o.seq_len, o.seed) if o.val_data else None

    def run(x, y):
        with torch.autocast(o.device, torch.bfloat16, enabled=not o.pure_bf16):
            return step_model(x, y)

    out = open(o.out, "w") if o.out and rank == 0 else None
    times, parts = [], []
    for step in range(1, o.steps + 1):
        batches = [shard.batch((step - 1) * o.global_batch + (i * ranks + rank) * o.micro_batch, o.micro_batch) for i in range(accumulate)]
        if o.device == "cuda":
            batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]  # a loader would have them ready
        synchronize()
        if o.ddp:
            dist.barrier()  # a rank whose batches took longer is not the others' waiting
            synchronize()
        began = time.perf_counter()
        w, total = o.warmup_steps, o.steps
        if step <= w:
            lr = o.lr * step / w
        else:
            p = (step - w) / max(1, total - w)
            lr = o.lr * (o.min_lr_frac + (1 - o.min_lr_frac) * 0.5 * (1 + math.cos(math.pi * p)))
        for g in optimizer.param_groups:
            g["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), device=device)
        for i, (x, y) in enumerate(batches):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with ddp.no_sync() if ddp is not None and i + 1 < accumulate else contextlib.nullcontext():
                loss = run(x, y) / accumulate
                loss.backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        synchronize()
        ms = (time.perf_counter() - began) * 1e3
        if step > o.skip:
            times.append(ms)
        if o.ddp:
            dist.all_reduce(loss_sum)
            loss_sum /= ranks
        record = dict(step=step, loss=loss_sum.item(), step_ms=ms, tokens_per_s=o.global_batch * o.seq_len / ms * 1e3)
        if held_out is not None and o.eval_every and step % o.eval_every == 0:
            with torch.no_grad():
                losses = [run(*(z.to(device) for z in held_out.batch(i * o.micro_batch, o.micro_batch, False))).item()
                          for i in range(min(o.eval_batches, held_out.samples // o.micro_batch))]
            record["val_loss"] = sum(losses) / len(losses)
        if out:
            out.write(json.dumps(record) + "\n")
            out.flush()
    if times and rank == 0:
        median = sorted(times)[len(times) // 2]
        memory = f", peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if o.device == "cuda" else ""
        print(f"torch {torch.__version__} {o.model}, {ranks} x {o.device}: {o.global_batch * o.seq_len / median * 1e3:,.0f} tokens/s, median of "
              f"{len(times)} steps {median:.2f} ms, last loss {record['loss']:.4f}{memory}")
    if o.ddp:
        dist.barrier()  # nobody leaves while another still reduces
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
