#!/usr/bin/env bash
# Real text from the machine itself: gathers the sources and documents of installed Python packages, trains a tokenizer on them,
# writes shards (scripts/prepare_data.py), trains GPT-2 124M for one pass over about 52 M tokens, trains the same with PyTorch
# (dev/peers/torch_gpt.py: same shards, order, initial weights and schedule), and prints both curves side by side and samples.
# Under 9 minutes on one H200 with 16 cores; needs no network. Everything it makes is in FOLDER.
#
#   dev/real_text.sh FOLDER
#
# In the environment: PYTHON (an interpreter with tokenizers and torch; default python3), SOURCES (default: its site-packages),
# BINARY (default: builds build/cuda/train_gpt), DEVICE, and for a smaller run STEPS BATCH LENGTH VOCAB SHAPE="layers width heads".
set -u
[ $# -eq 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$1" && folder=$(realpath "$1") || exit 2
python=${PYTHON:-python3} device=${DEVICE:-cuda} steps=${STEPS:-800} batch=${BATCH:-64} length=${LENGTH:-1024} vocab=${VOCAB:-32768}
read -r layers width heads <<<"${SHAPE:-12 768 12}"
eval_every=$(((steps + 7) / 8))
export PYTHONUNBUFFERED=1
begin=$SECONDS
say() { echo "--- $((SECONDS - begin)) s: $*"; }
die() { say "$*"; exit 1; }

# The build runs beside the tokenizer.
building=""
binary=${BINARY:-build/cuda/train_gpt}
if [ -z "${BINARY:-}" ]; then
  make binary -j"$(nproc)" >"$folder/build.log" 2>&1 &
  building=$!
fi

# One document each, in a fixed order; up to 450 MB of files that are text.
sources=${SOURCES:-$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')}
"$python" - "$sources" "$folder/list" <<'PY' || die "no text below $sources"
import os, sys
found = []
for top, folders, names in os.walk(sys.argv[1]):
    folders.sort()
    for name in sorted(names):
        path = os.path.join(top, name)
        if name.endswith((".py", ".pyi", ".h", ".txt", ".md", ".rst")) and os.path.isfile(path) and not os.path.islink(path):
            size = os.path.getsize(path)
            if 200 <= size <= 1 << 20:
                found.append((path, size))
total, kept = 0, []
for path, size in found:
    if total + size <= 450e6:
        kept.append(path)
        total += size
open(sys.argv[2], "w").write("\n".join(kept))
print(f"{len(kept):,} files, {total / 1e6:.0f} MB")
sys.exit(not kept)
PY
rm -rf "$folder/data"
"$python" scripts/prepare_data.py --out "$folder/data" --train-tokenizer "$vocab" --train-bytes 150M --val-fraction 0.03 \
  --files-from "$folder/list" || die "prepare_data.py failed"
[ -z "$building" ] || wait $building || die "the build failed, see $folder/build.log"
say "data ready"

cat >"$folder/config.json" <<JSON
{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": $vocab, "n_layer": $layers, "n_embd": $width,
 "n_head": $heads, "n_positions": $length, "bos_token_id": 0, "eos_token_id": 0}
JSON
schedule="--steps $steps --global-batch $batch --micro-batch $batch --seq-len $length --lr 6e-4 --warmup-steps $((steps / 20)) --min-lr-frac 0.1
  --eval-every $eval_every --eval-batches 20 --seed 1"
rm -rf "$folder/run"
# shellcheck disable=SC2086
"$binary" --device "$device" --model "$folder/config.json" --data "$folder/data/train_000000.bin" --val-data "$folder/data/val_000000.bin" \
  $schedule --save-every 0 --sample-every 0 --out "$folder/run" >"$folder/train.log" 2>&1 || die "$(tail -n 1 "$folder/train.log")"
say "trained"
rm -f "$folder/torch.jsonl"
if "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  # shellcheck disable=SC2086
  timeout 300 "$python" dev/peers/torch_gpt.py --model "{\"kind\": \"gpt2\", \"layers\": $layers, \"hidden\": $width, \"heads\": $heads}" --vocab "$vocab" \
    --data "$folder/data/train_000000.bin" --val-data "$folder/data/val_000000.bin" $schedule --out "$folder/torch.jsonl" >"$folder/torch.log" 2>&1
  say "PyTorch: $(tail -n 1 "$folder/torch.log")"
else
  say "no PyTorch with CUDA: ours alone"
fi

"$python" - "$folder" "$eval_every" <<'PY' | tee "$folder/curves.txt"
import json, os, statistics, sys
folder, every = sys.argv[1], int(sys.argv[2])
def curves(name):
    path = os.path.join(folder, name)
    rows = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    return ({r["step"]: r["loss"] for r in rows if "step_ms" in r}, {r["step"]: r["val_loss"] for r in rows if "val_loss" in r},
            [r["tokens_per_s"] for r in rows if "step_ms" in r])
(ours, ours_val, speed), (torch, torch_val, torch_speed) = curves("run/metrics.jsonl"), curves("torch.jsonl")
def show(value):
    return f"{value:9.4f}" if value is not None else "        -"
def mean(losses, step):  # of the 20 steps that end here
    part = [losses[s] for s in range(max(1, step - 19), step + 1) if s in losses]
    return statistics.mean(part) if part else None
print("  step | training: ours  PyTorch difference | validation: ours  PyTorch difference")
for step in range(every, max(ours) + 1, every):
    a, b, c, d = mean(ours, step), mean(torch, step), ours_val.get(step), torch_val.get(step)
    print(f"{step:6} |     {show(a)}{show(b)} {show(a - b if a and b else None)}  |       {show(c)}{show(d)} {show(c - d if c and d else None)}")
print("training: mean of 20 steps, nats per token; tokens/s, median: ours "
      f"{statistics.median(speed):,.0f}" + (f", PyTorch {statistics.median(torch_speed):,.0f}" if torch_speed else ""))
PY

"$python" - "$folder" "$binary" "$device" <<'PY' | tee "$folder/samples.txt"
import subprocess, sys, tokenizers
folder, binary, device = sys.argv[1:]
tokenizer = tokenizers.Tokenizer.from_file(folder + "/data/tokenizer.json")
for seed, prompt in enumerate(("def load(path):\n", "import numpy as np\n\n", "class Parser:\n    \"\"\"", "Installation\n============\n\n"), 1):
    ids = ",".join(map(str, tokenizer.encode(prompt).ids))
    out = subprocess.run([binary, "sample", folder + "/run", "--device", device, "--prompt-ids", ids, "--max-tokens", "120",
                          "--temperature", "0.8", "--top-p", "0.95", "--seed", str(seed)], capture_output=True, text=True, check=True).stdout
    text = tokenizer.decode([int(i) for i in out.split()], skip_special_tokens=False).split("<|endoftext|>")[0]
    print(f"--- sample {seed}\n{prompt}{text}")
PY
say "done"
