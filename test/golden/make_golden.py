#!/usr/bin/env python3
"""Makes the golden files of test/golden_test.cpp with PyTorch and transformers.

Each folder holds a tiny random model as transformers saves it (config.json, model.safetensors) and golden.safetensors:
  tokens [B, T], targets [B, T] (-1: ignored), logits [B, T, V], loss [1] (mean over targets), grad.<name> per parameter,
  losses [10] and after.<name>: ten AdamW steps on that batch (lr 1e-3, betas 0.9 0.95, eps 1e-8, weight decay 0.1 on
  matrices, gradient norm clipped to 1).

Usage: python3 test/golden/make_golden.py [NAME...]  needs torch, transformers, safetensors
Made with 1.13 and 4.38.2; qwen3 with 2.11 and 5.17. Where transformers has no Qwen3 (before 4.51), the attention of
test/parity/parity.py stands in for it.
Everything is computed in float64 from float32 weights and stored as float32.
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
BATCH, LENGTH, STEPS = 2, 17, 10


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=3, bos_token_id=0,
                                      eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                      attn_implementation="eager"))


def llama(tied):
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                        rope_theta=1000.0, rms_norm_eps=1e-5, tie_word_embeddings=tied, bos_token_id=0,
                                        eos_token_id=0, attn_implementation="eager"))


QWEN = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rope_theta=1000.0, rms_norm_eps=1e-5,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)


def qwen2():
    return Qwen2ForCausalLM(Qwen2Config(attn_implementation="eager", **QWEN))


def qwen3():
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        sys.path.insert(0, os.path.join(HERE, "..", "parity"))
        from parity import own_model
        config = {**QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 12, "hidden_act": "silu"}
        model = own_model(config)
        model.kinoe_config = config
        return model
    return Qwen3ForCausalLM(Qwen3Config(attn_implementation="eager", head_dim=12, **QWEN))


def randomise(model):
    """Norm weights and biases away from 1 and 0, so that a wrong one shows."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.15)
            if p.ndim == 1 and name.endswith("weight"):
                p.add_(1.0)


def loss_of(model, tokens, targets):
    logits = model(tokens).logits
    flat = targets.reshape(-1)
    return logits, torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, ignore_index=-1)


def make(name, model):
    folder = os.path.join(HERE, name)
    os.makedirs(folder, exist_ok=True)
    randomise(model)
    model.save_pretrained(folder, safe_serialization=True)
    if hasattr(model, "kinoe_config"):
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(model.kinoe_config, file, indent=2)
    extra = os.path.join(folder, "generation_config.json")
    if os.path.exists(extra):
        os.remove(extra)

    tokens = torch.randint(0, 61, (BATCH, LENGTH))
    targets = torch.randint(0, 61, (BATCH, LENGTH))
    targets[0, 3] = targets[1, LENGTH - 1] = -1
    model = model.double()
    torch.set_default_dtype(torch.float64)  # of masks that models make as they run
    golden = {"tokens": tokens.int(), "targets": targets.int()}
    logits, loss = loss_of(model, tokens, targets)
    loss.backward()
    golden["logits"] = logits.detach().float().contiguous()
    golden["loss"] = loss.detach().reshape(1).float()
    for key, p in model.named_parameters():
        golden["grad." + key] = p.grad.float().contiguous()

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _, loss = loss_of(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    golden["losses"] = torch.tensor(losses, dtype=torch.float64)
    for key, p in model.named_parameters():
        golden["after." + key] = p.detach().float().contiguous()
    save_file(golden, os.path.join(folder, "golden.safetensors"))
    torch.set_default_dtype(torch.float32)
    print(f"{name}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")


if __name__ == "__main__":
    wanted = sys.argv[1:]
    if not wanted:  # these three share one stream of random numbers
        torch.manual_seed(20260101)
        make("gpt2", gpt2())
        make("llama_untied", llama(tied=False))
        make("llama_tied", llama(tied=True))
    for name, model in {"qwen2": qwen2, "qwen3": qwen3}.items():
        if not wanted or name in wanted:
            torch.manual_seed(20260101)
            make(name, model())
