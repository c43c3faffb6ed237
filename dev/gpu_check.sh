#!/usr/bin/env bash
# Everything that only a GPU can show, on one machine with a GPU and nvcc: tests, determinism, memory, speed and loss beside
# PyTorch. Logs go to FOLDER, a short table is printed last. All stages take about 15 minutes on an H200 with 16 cores.
#
#   dev/gpu_check.sh FOLDER [STAGE...]      stages: build tests sanitize determinism recompute parity speed bench
#
# PyTorch stages are left out, with a word, where python3 has no torch. Models for `speed`: SPEED="gpt2-124m ..." (default: all).
set -u
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$1" && folder=$(realpath "$1") || exit 2
shift
stages=${*:-build tests sanitize determinism recompute parity speed bench}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
binary=build/cuda/train_gpt tests=build/cuda/kinoe_tests table="" failures=0

row() { table="$table$(printf '%-34s %s' "$1" "$2")"$'\n'; echo "--- $1: $2"; }
must() { if [ "$1" -eq 0 ]; then row "$2" "ok${3:+, $3}"; else failures=$((failures + 1)); row "$2" "FAILED${3:+, $3}"; fi; }
have_torch() { python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; }

# 80 M tokens with a Zipf distribution: cheap to make, not uniform, so that the embedding's backward meets frequent tokens.
shard() {  # VOCABULARY FILE
  python3 - "$1" "$2" <<'PY'
import sys, numpy as np
vocab, path = int(sys.argv[1]), sys.argv[2]
r = np.random.default_rng(1)
t = (r.zipf(1.3, 80_000_000) % vocab).astype(np.uint16 if vocab <= 65536 else np.uint32)
h = np.zeros(256, np.int32)
h[:3] = (20240520, 1, len(t)) if vocab <= 65536 else (20240801, 7, len(t))
with open(path, "wb") as f:
    f.write(h.tobytes()); f.write(t.tobytes())
PY
}
data() { local vocab=$1 file=$work/tokens-$1.bin; [ -e "$file" ] || shard "$vocab" "$file"; echo "$file"; }
hashes() { grep -o '"weights_hash":"[0-9a-f]*"' "$1/metrics.jsonl" | md5sum | cut -c1-12; }
quiet="--device cuda --eval-every 0 --sample-every 0 --save-every 0"

train() {  # NAME OPTIONS...: a run in $work/NAME, its console in FOLDER/NAME.log, its metrics in FOLDER/NAME.jsonl
  local name=$1; shift
  rm -rf "${work:?}/$name"
  "$binary" $quiet --out "$work/$name" "$@" >"$folder/$name.log" 2>&1
  local code=$?
  [ -e "$work/$name/metrics.jsonl" ] && cp "$work/$name/metrics.jsonl" "$folder/$name.jsonl"
  [ $code -eq 0 ] || tail -3 "$folder/$name.log"
  return $code
}
median() {  # FILE KEY SKIP: the median of a key over the steps after SKIP
  python3 - "$@" <<'PY'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
print(f"{statistics.median([r[sys.argv[2]] for r in rows if 'step_ms' in r and r['step'] > int(sys.argv[3])]):.4g}")
PY
}

stage_build() {
  local begin=$SECONDS
  make binary tests -j"$(nproc)" >"$folder/build.log" 2>&1 && make build/cuda/bench_kernels -j"$(nproc)" >>"$folder/build.log" 2>&1
  must $? build "$((SECONDS - begin)) s, $(grep -c 'warning' "$folder/build.log") warnings"
}

stage_tests() {
  KINOE_BINARY=$PWD/$binary timeout 400 "$tests" --gtest_filter='*Gpu*:*gpu*' >"$folder/tests.log" 2>&1
  must $? "GPU tests" "$(grep -E '^\[  (PASSED|FAILED)  \] [0-9]+ test' "$folder/tests.log" | tr -d '[]' | tr -s ' ' | paste -sd, )"
}

stage_sanitize() {
  local tool
  for tool in memcheck racecheck initcheck; do
    timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 "$tests" --gtest_filter="${SANITIZE:-*GoldenTest.LossAndEveryGradient*gpu*:*SmallGpu*}" \
      >"$folder/sanitize-$tool.log" 2>&1
    must $? "compute-sanitizer $tool" "$(grep 'ERROR SUMMARY' "$folder/sanitize-$tool.log" | sed 's/=* *//')"
  done
}

m124="--model gpt2-124m --seq-len 1024 --global-batch 64 --micro-batch 64"
stage_determinism() {
  train once $m124 --data "$(data 50257)" --steps 50 && train twice $m124 --data "$(data 50257)" --steps 50
  [ $? -eq 0 ] && [ "$(hashes "$work/once")" = "$(hashes "$work/twice")" ]
  must $? "50 steps twice, 124M, mb 64" "hash of hashes $(hashes "$work/once") $(hashes "$work/twice")"
}

stage_recompute() {
  local mode
  for mode in none light block; do train "recompute-$mode" $m124 --data "$(data 50257)" --steps 5 --recompute $mode; done
  [ "$(hashes "$work/recompute-none")" = "$(hashes "$work/recompute-light")" ] &&
    [ "$(hashes "$work/recompute-none")" = "$(hashes "$work/recompute-block")" ]
  must $? "recompute none = light = block" "$(for mode in none light block; do grep -oE 'total +[0-9.]+ MiB' "$folder/recompute-$mode.log" | tr -s ' '; done | paste -sd, )"
}

stage_parity() {
  have_torch || { row parity "skipped: python3 has no torch with CUDA"; return; }
  local tokens
  tokens=$(data 50257)
  train parity $m124 --data "$tokens" --steps 300 --lr 6e-4 --warmup-steps 20
  python3 dev/peers/torch_gpt.py --model gpt2-124m --data "$tokens" --steps 300 --lr 6e-4 --warmup-steps 20 --out "$folder/parity-torch.jsonl" >"$folder/parity-torch.log" 2>&1
  python3 - "$folder/parity.jsonl" "$folder/parity-torch.jsonl" >"$folder/parity.txt" 2>&1 <<'PY'
import json, sys
a, b = ([json.loads(line)["loss"] for line in open(p) if "step_ms" in line] for p in sys.argv[1:3])
d = [x - y for x, y in zip(a, b)]
last = d[-50:]
print(f"mean difference {sum(d)/len(d):+.5f}, last 50 {sum(last)/len(last):+.5f}, mean |d| {sum(map(abs, d))/len(d):.5f} over {len(d)} steps")
sys.exit(len(d) != 300 or abs(sum(d)/len(d)) > 0.01 or abs(sum(last)/len(last)) > 0.01)
PY
  must $? "loss beside PyTorch, 124M" "$(tail -1 "$folder/parity.txt")"
}

speed_one() {  # NAME VOCABULARY STEPS "OUR OPTIONS" "TORCH OPTIONS"
  local name=$1 tokens torch="-" ours
  tokens=$(data "$2")
  train "speed-$name" --model "$name" --data "$tokens" --steps "$3" $4 || { must 1 "speed $name"; return; }
  ours=$(median "$folder/speed-$name.jsonl" tokens_per_s 5)
  if have_torch; then
    timeout 240 python3 dev/peers/torch_gpt.py --model "$name" --data "$tokens" --steps "$3" --skip 5 --random-init --out "$folder/speed-$name-torch.jsonl" $5 \
      >"$folder/speed-$name-torch.log" 2>&1 && torch=$(median "$folder/speed-$name-torch.jsonl" tokens_per_s 5)
  fi
  row "speed $name" "$(python3 - "$ours" "$torch" "$(median "$folder/speed-$name.jsonl" mfu 5)" <<'PY'
import sys
ours, torch, mfu = float(sys.argv[1]), sys.argv[2], float(sys.argv[3])
print(f"{ours:,.0f} tok/s, MFU {100*mfu:.1f} %, PyTorch {torch}" + (f", ratio {ours/float(torch):.3f}" if torch != "-" else ""))
PY
)"
}
stage_speed() {
  local model
  for model in ${SPEED:-gpt2-124m gpt2-1558m llama3-1b llama3-8b}; do
    case $model in
      gpt2-124m) speed_one $model 50257 30 "--seq-len 1024 --global-batch 64 --micro-batch 64" "--seq-len 1024 --global-batch 64 --micro-batch 64" ;;
      gpt2-1558m) speed_one $model 50257 16 "--seq-len 1024 --global-batch 16 --micro-batch 16" "--seq-len 1024 --global-batch 16 --micro-batch 16" ;;
      llama3-1b) speed_one $model 128256 20 "--seq-len 4096 --global-batch 4 --micro-batch 4" "--seq-len 4096 --global-batch 4 --micro-batch 4" ;;
      llama3-8b) speed_one $model 128256 10 "--seq-len 4096 --global-batch 8 --micro-batch 1 --adam-state bf16" \
                   "--seq-len 4096 --global-batch 8 --micro-batch 1 --pure-bf16" ;;
    esac
  done
}

stage_bench() {
  [ -x build/cuda/bench_kernels ] || { row bench "skipped: not built"; return; }
  timeout 200 build/cuda/bench_kernels --device cuda --csv "$folder/bench.csv" >"$folder/bench.txt" 2>&1
  must $? "bench_kernels" "$(grep -c , "$folder/bench.csv" 2>/dev/null) rows"
}

for stage in $stages; do
  begin=$SECONDS
  "stage_$stage"
  echo "=== $stage: $((SECONDS - begin)) s"
done
echo
echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%F), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null)"
printf '%s' "$table"
exit $((failures > 0))
