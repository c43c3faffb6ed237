#!/usr/bin/env python3
"""Compares this program with PyTorch and transformers: logits, loss, every gradient, ten AdamW steps, and what it writes.

    parity.py BUILD            random tiny models of every family; BUILD: build/host, with train_gpt and parity_dump
    parity.py BUILD DIR...     model directories (checkpoints of runs): logits and 200 greedy tokens

`make parity` makes the environment and calls this. The reference computes in float64 from the float32 weights. An error is
||ours - theirs|| / ||theirs|| of one tensor; exit 1 if one is 1e-4 or more, or if a model broken on purpose is not seen.

transformers 4.38 computes GPT-2, Llama, Mistral and Qwen2. It does not know Qwen3, Llama 3's rope_scaling and heads of another size than
hidden_size / num_attention_heads: there its Llama gets the attention below, written from the definitions.
"""
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM)

BAR = 1e-4
BATCH, LENGTH, VOCAB = 2, 600, 300  # beyond position 512: a wrong rotary layout shows late
PROMPT, GREEDY = 60, 200
STEPS, LEARNING_RATE = 10, 1e-3
EPSILON = 1e-3  # large, so that another one shows


# ---- What transformers 4.38 lacks ------------------------------------------------------------------------------------


class HeadNorm(torch.nn.Module):
    """RMSNorm over one head: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_frequencies(config, size):
    """theta^(-2i/D), stretched as rope_scaling of type llama3 says: wavelengths beyond the original context are divided by the
    factor, short ones stay, those between are blended (H. Touvron et al., the code released with Llama 3.1)."""
    scaling = config.get("rope_scaling")
    result = []
    for i in range(size // 2):
        f = config["rope_theta"] ** (-2.0 * i / size)
        if scaling:
            original, low, high = scaling["original_max_position_embeddings"], scaling["low_freq_factor"], scaling["high_freq_factor"]
            length = 2 * math.pi / f
            if length > original / low:
                f /= scaling["factor"]
            elif length > original / high:
                smooth = (original / length - low) / (high - low)
                f = (1 - smooth) * f / scaling["factor"] + smooth * f
        result.append(f)
    return torch.tensor(result, dtype=torch.float64)


class Attention(torch.nn.Module):
    """Causal attention with grouped keys and values, any head size, norms of query and key heads if asked for."""

    def __init__(self, config, norms):
        super().__init__()
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        hidden, bias = config["hidden_size"], config.get("attention_bias", False)
        self.size = config.get("head_dim") or hidden // self.heads
        self.frequencies = rotary_frequencies(config, self.size)
        self.q_proj = torch.nn.Linear(hidden, self.heads * self.size, bias=bias)
        self.k_proj = torch.nn.Linear(hidden, self.groups * self.size, bias=bias)
        self.v_proj = torch.nn.Linear(hidden, self.groups * self.size, bias=bias)
        self.o_proj = torch.nn.Linear(self.heads * self.size, hidden, bias=bias)
        self.q_norm = HeadNorm(self.size, config["rms_norm_eps"]) if norms else torch.nn.Identity()
        self.k_norm = HeadNorm(self.size, config["rms_norm_eps"]) if norms else torch.nn.Identity()

    def rotate(self, x):  # [B, T, heads, D]
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * self.frequencies
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def forward(self, hidden_states, **_):
        shape = (*hidden_states.shape[:2], -1, self.size)
        q = self.rotate(self.q_norm(self.q_proj(hidden_states).view(shape)))
        k = self.rotate(self.k_norm(self.k_proj(hidden_states).view(shape)))
        v = self.v_proj(hidden_states).view(shape)
        k, v = (x.repeat_interleave(self.heads // self.groups, dim=2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.size)
        length = shape[1]
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
        return self.o_proj(out.flatten(2)), None, None


def own_model(config):
    """Llama of transformers around the attention above, from the keys of a config.json."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
            "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    model = LlamaForCausalLM(LlamaConfig(use_cache=False, attn_implementation="eager", **{k: config[k] for k in keys}))
    for layer in model.model.layers:
        layer.self_attn = Attention(config, norms=config["model_type"] == "qwen3")
    return model


def is_own(config):
    size = config.get("head_dim") or 0
    other_size = size and size != config["hidden_size"] // config["num_attention_heads"]
    return config["model_type"] == "qwen3" or bool(config.get("rope_scaling")) or bool(other_size)


def read_config(folder):
    with open(os.path.join(folder, "config.json")) as file:
        return json.load(file)


def load_reference(folder):
    """The model in a directory, in float64."""
    config = read_config(folder)
    if not is_own(config):
        return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").double().eval()
    model, state = own_model(config), {}
    for name in sorted(os.listdir(folder)):
        if name.startswith("model") and name.endswith(".safetensors"):
            state.update(load_file(os.path.join(folder, name)))
    missing, unexpected = model.load_state_dict(state, strict=False)
    expected = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    if missing != expected or unexpected:
        sys.exit(f"{folder}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.double().eval()


# ---- The families ----------------------------------------------------------------------------------------------------

COMMON = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=640, rope_theta=10000.0, rms_norm_eps=EPSILON, bos_token_id=0, eos_token_id=0)
EAGER = dict(use_cache=False, attn_implementation="eager")


def own(model_type, **changes):
    config = {**COMMON, "model_type": model_type, "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[model_type]],
              "hidden_act": "silu", "tie_word_embeddings": False, **changes}
    return own_model(config), config


SCALING = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
FAMILIES = {
    "gpt2": lambda: (GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=640, n_embd=48, n_layer=2, n_head=4, layer_norm_epsilon=EPSILON,
                                                bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **EAGER)), None),
    "llama": lambda: (LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **COMMON, **EAGER)), None),
    "llama tied, biases": lambda: (LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, attention_bias=True, **COMMON, **EAGER)), None),
    "llama head_dim": lambda: own("llama", head_dim=20),
    "llama rope_scaling": lambda: own("llama", rope_scaling=SCALING),
    "mistral": lambda: (MistralForCausalLM(MistralConfig(tie_word_embeddings=False, sliding_window=None, **COMMON, **EAGER)), None),
    "qwen2": lambda: (Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **COMMON, **EAGER)), None),
    "qwen3": lambda: own("qwen3", head_dim=16, tie_word_embeddings=True),
}


def make_model(family, folder):
    """A random model as transformers saves it."""
    torch.set_default_dtype(torch.float32)
    model, config = FAMILIES[family]()
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.15)
            if p.ndim == 1 and name.endswith("weight"):
                p.add_(1.0)  # norms: away from 1, so that a wrong one shows
    model.save_pretrained(folder, safe_serialization=True)
    if config:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)


# ---- Comparison ------------------------------------------------------------------------------------------------------


def distance(ours, theirs):
    """Relative L2 error; NaN is infinitely far, a zero reference is compared absolutely."""
    ours, theirs = np.asarray(ours, np.float64).ravel(), np.asarray(theirs, np.float64).ravel()
    if ours.shape != theirs.shape:
        return math.inf
    size = np.linalg.norm(theirs)
    error = np.linalg.norm(ours - theirs) / (size if size > 0 else 1.0)
    return float(error) if np.isfinite(error) else math.inf


class Report:
    """The largest error of every quantity, and where it is."""

    def __init__(self):
        self.rows, self.failed = [], False

    def add(self, family, quantity, errors):
        name, worst = max(errors.items(), key=lambda item: item[1])
        self.failed = self.failed or not worst < BAR
        self.rows.append((family, quantity, worst, name if len(errors) > 1 else ""))

    def say(self, family, quantity, good, text):
        self.failed = self.failed or not good
        self.rows.append((family, quantity, text, "" if good else "WRONG"))

    def print(self):
        print(f"{'family':20} | {'quantity':28} | largest relative error")
        for family, quantity, worst, name in self.rows:
            number = f"{worst:.1e}" if isinstance(worst, float) else worst
            bad = isinstance(worst, float) and not worst < BAR
            print(f"{family:20} | {quantity:28} | {number} {name}{'  ABOVE ' + format(BAR, '.0e') if bad else ''}")


def without_key_bias(name, values):
    """GPT-2's attention bias is q | k | v. Softmax is blind to a constant added to all scores of a query, so the gradient of the key
    bias is zero in exact arithmetic: what is left is rounding, which Adam divides by its own size."""
    values = np.asarray(values)
    if not name.endswith("attn.c_attn.bias"):
        return values, None
    q, k, v = np.split(values, 3)
    return np.concatenate((q, v)), k


def reference_training(model, tokens, targets):
    """Loss, gradients, the losses of ten AdamW steps and the weights after them."""

    def loss_of():
        logits = model(tokens).logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), ignore_index=-1)

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=LEARNING_RATE,
                                  betas=(0.9, 0.95), eps=1e-8)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, gradients, {name: p.detach().numpy() for name, p in model.named_parameters()}


def ours(build, source, inputs, out, *mode):
    subprocess.run([os.path.join(build, "parity_dump"), source, inputs, out, *mode], check=True)
    return load_numpy(os.path.join(out, "result.safetensors"))


def write_inputs(path, tokens, targets, prompt):
    save_numpy({"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32), "prompt": prompt.astype(np.int32)}, path)


def compare_logits(report, family, words, got, theirs):
    report.add(family, words, {"": distance(got["logits"], theirs)})
    late = np.arange(len(theirs)) % LENGTH >= 512
    report.add(family, words + ", position >= 512", {"": distance(got["logits"][late], theirs[late])})


def equal_greedy(model, prompt, greedy):
    """How many of our tokens are the most probable ones to the reference, each after all those before it."""
    ids = np.concatenate((prompt, greedy)).astype(np.int64)
    with torch.no_grad():
        best = model(torch.from_numpy(ids)[None]).logits[0].argmax(-1).numpy()
    return int((best[len(prompt) - 1 : -1] == greedy).sum())


def compare_family(build, folder, family, report):
    source = os.path.join(folder, "model")
    make_model(family, source)
    draw = np.random.default_rng(5)
    tokens, targets = draw.integers(0, VOCAB, (2, BATCH, LENGTH))
    targets[0, 3] = targets[1, LENGTH - 1] = -1
    prompt = draw.integers(0, VOCAB, PROMPT)
    inputs = os.path.join(folder, "inputs.safetensors")
    write_inputs(inputs, tokens, targets, prompt)
    got = ours(build, source, inputs, os.path.join(folder, "result"), "train")

    model = load_reference(source)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.reshape(-1, VOCAB).numpy()
    compare_logits(report, family, "logits", got, logits)
    losses, gradients, after = reference_training(model, torch.from_numpy(tokens), torch.from_numpy(targets))
    report.add(family, "loss", {"": distance(got["loss"], [losses[0]])})

    errors, key_bias = {}, 0.0
    for name, theirs in gradients.items():
        a, k = without_key_bias(name, got["grad." + name])
        errors[name] = distance(a, without_key_bias(name, theirs)[0])
        if k is not None:
            key_bias = max(key_bias, float(np.abs(k).max()))
    report.add(family, "gradients", errors)
    if family == "gpt2":
        scale = max(float(np.abs(g).max()) for g in gradients.values())
        report.say(family, "gradient of the key bias", key_bias < BAR * scale, f"{key_bias:.1e} absolute (0 in exact arithmetic)")
    report.add(family, "losses of 10 AdamW steps", {"": distance(got["losses"], losses)})
    report.add(family, "weights after 10 steps", {
        name: distance(without_key_bias(name, got["after." + name])[0], without_key_bias(name, theirs)[0]) for name, theirs in after.items()})

    # What the program writes: two steps of its own from these weights.
    text = os.path.join(folder, "text.txt")
    with open(text, "w") as file:
        file.write("".join(f"line {i} of a text\n" for i in range(100)))
    run = os.path.join(folder, "run")
    subprocess.run([os.path.join(build, "train_gpt"), "--device", "cpu", "--init-from", source, "--data", text, "--seq-len", "64", "--steps", "2",
                    "--global-batch", "2", "--micro-batch", "2", "--eval-every", "0", "--sample-every", "0", "--out", run],
                   check=True, stdout=subprocess.DEVNULL)
    written = os.path.join(run, "checkpoints", "step_00000002")
    got = ours(build, written, inputs, os.path.join(folder, "again"), "greedy")
    model = load_reference(written)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.reshape(-1, VOCAB).numpy()
    compare_logits(report, family, "written: logits", got, logits)
    same = equal_greedy(model, prompt, got["greedy"])
    report.say(family, "written: greedy tokens", same == GREEDY, f"{same} of {GREEDY} equal")


# ---- Broken on purpose -----------------------------------------------------------------------------------------------
#
# Each rewrites the directory that the program reads, so that it computes what it would compute with that mistake in its code.


def per_layer(state, ending, change):
    for name in [n for n in state if n.endswith(ending)]:
        state[name] = change(state[name]).contiguous()


def break_rope(state, config):
    """Pairs (2i, 2i + 1) instead of (i, i + D/2)."""
    size = config["hidden_size"] // config["num_attention_heads"]
    order = torch.arange(size).view(2, size // 2).t().reshape(-1)
    for ending in ("q_proj.weight", "k_proj.weight"):
        per_layer(state, ending, lambda w: w.view(-1, size, w.shape[1])[:, order].reshape(w.shape))


def break_gqa(state, config):
    """Query head h reads key head h mod 2 instead of h div 2."""
    size = config["hidden_size"] // config["num_attention_heads"]
    order = torch.tensor([0, 2, 1, 3])
    per_layer(state, "q_proj.weight", lambda w: w.view(4, size, -1)[order].reshape(w.shape))
    per_layer(state, "o_proj.weight", lambda w: w.view(w.shape[0], 4, size)[:, order].reshape(w.shape))


def break_epsilon(state, config):
    config["rms_norm_eps"] = 1e-6


def break_head(state, config):
    """A head of its own where it is tied."""
    config["tie_word_embeddings"] = False
    state["lm_head.weight"] = torch.roll(state["model.embed_tokens.weight"], 1, 0).contiguous()


def break_bias(state, config):
    state["model.layers.1.self_attn.v_proj.bias"].zero_()


BREAKS = [("RoPE's layout", "llama", break_rope), ("the GQA mapping", "llama", break_gqa), ("a norm's epsilon", "llama", break_epsilon),
          ("the tied head", "qwen2", break_head), ("a bias", "qwen2", break_bias)]


def must_be_seen(build, folder, words, family, change):
    """True if the mistake is above the bar."""
    source, broken, inputs = (os.path.join(folder, name) for name in ("model", "broken", "inputs.safetensors"))
    make_model(family, source)
    shutil.copytree(source, broken)
    state, config = load_file(os.path.join(source, "model.safetensors")), read_config(source)
    change(state, config)
    save_file(state, os.path.join(broken, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(broken, "config.json"), "w") as file:
        json.dump(config, file)
    tokens = np.random.default_rng(5).integers(0, VOCAB, (BATCH, LENGTH))
    write_inputs(inputs, tokens, tokens, tokens[0, :400])
    got = ours(build, broken, inputs, os.path.join(folder, "result"))
    with torch.no_grad():
        logits = load_reference(source)(torch.from_numpy(tokens)).logits.reshape(-1, VOCAB).numpy()
    error = distance(got["logits"], logits)
    print(f"{words:20} | {family:28} | {error:.1e}{'' if error >= BAR else '  NOT SEEN'}")
    return error >= BAR


def compare_directory(build, folder, path):
    """True if a directory gives the same logits and greedy tokens there and here."""
    model = load_reference(path)
    positions = getattr(model.config, "max_position_embeddings", 1024)
    length, vocab = min(600, positions), model.config.vocab_size
    tokens = np.random.default_rng(5).integers(0, vocab, (1, length))
    prompt = tokens[0, : max(1, min(PROMPT, positions - GREEDY))]
    inputs = os.path.join(folder, "inputs.safetensors")
    write_inputs(inputs, tokens, tokens, prompt)
    got = ours(build, path, inputs, os.path.join(folder, "result"), "greedy")
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits[0].numpy()
    error, greedy = distance(got["logits"], logits), got["greedy"][: positions - len(prompt)]
    same = equal_greedy(model, prompt, greedy)
    good = error < BAR and same == len(greedy)
    print(f"{path}: {type(model).__name__}, {length} positions, logits {error:.1e}, {same} of {len(greedy)} greedy tokens equal"
          f"{'' if good else '  FAILED'}")
    return good


def main():
    build, paths = sys.argv[1], sys.argv[2:]
    torch.manual_seed(20260101)
    torch.set_default_dtype(torch.float64)
    report, good = Report(), True
    for item in paths or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            if paths:
                good = compare_directory(build, folder, item) and good
            else:
                print(f"parity: {item}", file=sys.stderr, flush=True)
                compare_family(build, folder, item, report)
    if not paths:
        report.print()
        print(f"\n{'broken on purpose':20} | {'in':28} | error of the logits, must be above {BAR:.0e}")
        for words, family, change in BREAKS:
            with tempfile.TemporaryDirectory() as folder:
                good = must_be_seen(build, folder, words, family, change) and good
    sys.exit(0 if good and not report.failed else 1)


if __name__ == "__main__":
    main()
