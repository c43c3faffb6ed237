#!/usr/bin/env python3
"""Loads checkpoint directories in transformers as they stand and compares: logits, and 200 greedy tokens for models of bytes.

    check_hf.py BUILD_DIR CHECKPOINT...      BUILD_DIR: build/host, with train_gpt and hf_logits (make build/host/hf_logits)

Needs torch, transformers, safetensors. Exit 1 if logits differ by more than 1e-4 or greedy text differs.
"""
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
from transformers import AutoModelForCausalLM

failed = False
build, checkpoints = sys.argv[1], sys.argv[2:]
for path in checkpoints:
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
    length = min(200, getattr(model.config, "max_position_embeddings", 1024))
    tokens = np.random.default_rng(5).integers(0, model.config.vocab_size, length, dtype=np.int32)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        tokens.tofile(os.path.join(folder, "tokens"))
        subprocess.run([os.path.join(build, "hf_logits"), path, os.path.join(folder, "tokens"), os.path.join(folder, "logits")], check=True)
        ours = np.fromfile(os.path.join(folder, "logits"), np.float32).reshape(length, -1)
        theirs = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    worst = float(np.abs(ours - theirs).max())
    line = f"{path}: {type(model).__name__}, {length} positions, largest logit difference {worst:.2e} of {np.abs(theirs).max():.1f}"
    ok = worst <= 1e-4
    if model.config.vocab_size == 256:
        prompt, count = "In 15", min(200, length - 8)
        text = subprocess.run([os.path.join(build, "train_gpt"), "sample", path, "--prompt", prompt, "--max-tokens", str(count), "--temperature",
                               "0", "--device", "cpu"], check=True, capture_output=True).stdout[: len(prompt) + count]
        ids = list(prompt.encode())
        with torch.no_grad():
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        same = bytes(ids) == text
        ok = ok and same
        line += f", {count} greedy bytes {'equal' if same else 'DIFFERENT'}"
    print(line + ("" if ok else "  FAILED"))
    failed = failed or not ok
sys.exit(failed)
