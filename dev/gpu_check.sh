#!/usr/bin/env bash
# Everything that only a GPU can show, on one machine with a GPU and nvcc: tests, determinism, memory, speed and loss beside
# PyTorch. A short table is printed last; FOLDER gets logs.tgz and bench.csv. All stages take about 27 minutes on an H200 with
# 16 cores.
#
#   dev/gpu_check.sh FOLDER [STAGE...]
#
# Stages: build tests errors sanitize broken start graphs memory determinism resume recompute parity (or parity-124m, parity-llama) speed bench, and on a
# machine with two GPUs ranks ranks-resume ranks-speed ranks-faults (dev/gpu_ranks.sh, 10 minutes more); all of them when none is named. On request: epilogues,
# tune. PyTorch's parts are left out, with a word, where python3 has no torch.
# Models for `speed`: SPEED="gpt2-124m ..." (default: all); rows for `bench`: BENCH=REGEX; tests for `sanitize`: SANITIZE=FILTER.
set -u
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$1/logs" && top=$(realpath "$1") || exit 2
folder=$top/logs
shift
stages=${*:-build tests errors sanitize broken start graphs memory determinism resume recompute parity speed bench ranks ranks-resume ranks-speed ranks-faults}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
binary=build/cuda/train_gpt tests=build/cuda/kinoe_tests table="" failures=0

row() { table="$table$(printf '%-34s %s' "$1" "$2")"$'\n'; echo "--- $1: $2"; }
must() { if [ "$1" -eq 0 ]; then row "$2" "ok${3:+, $3}"; else failures=$((failures + 1)); row "$2" "FAILED${3:+, $3}"; fi; }
have_torch() { python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; }

# 80 M tokens (or TOKENS) with a Zipf distribution: cheap to make, not uniform, so that the embedding's backward meets frequent tokens.
shard() {  # VOCABULARY FILE
  python3 - "$1" "$2" "${TOKENS:-80000000}" <<'PY'
import sys, numpy as np
vocab, path, tokens = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
r = np.random.default_rng(1)
t = (r.zipf(1.3, tokens) % vocab).astype(np.uint16 if vocab <= 65536 else np.uint32)
h = np.zeros(256, np.int32)
h[:3] = (20240520, 1, len(t)) if vocab <= 65536 else (20240801, 7, len(t))
with open(path, "wb") as f:
    f.write(h.tobytes()); f.write(t.tobytes())
PY
}
data() { local vocab=$1 file=$work/tokens-$1.bin; [ -e "$file" ] || shard "$vocab" "$file"; echo "$file"; }
hashes() { grep -o '"weights_hash":"[0-9a-f]*"' "$1/metrics.jsonl" | md5sum | cut -c1-12; }
quiet="--device cuda --eval-every 0 --sample-every 0"

# shellcheck source-path=SCRIPTDIR source=gpu_ranks.sh
. dev/gpu_ranks.sh

train() {  # NAME OPTIONS...: on RANKS GPUs (default: 1), options of saving in SAVES; a run in $work/NAME, its console in FOLDER/NAME.log, its metrics in FOLDER/NAME.jsonl
  local name=$1; shift
  rm -rf "${work:?}/$name"
  ranks "${RANKS:-1}" "$binary" $quiet ${SAVES:---no-checkpoints} --out "$work/$name" "$@" >"$folder/$name.log" 2>&1
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
  make binary tests -j"$(nproc)" >"$folder/build.log" 2>&1 && make build/cuda/{bench_kernels,dump_operations} -j"$(nproc)" >>"$folder/build.log" 2>&1
  must $? build "$((SECONDS - begin)) s, $(grep -c 'warning' "$folder/build.log") warnings"
}

stage_tests() {
  KINOE_BINARY=$PWD/$binary timeout 400 "$tests" --gtest_filter='*Gpu*:*gpu*' >"$folder/tests.log" 2>&1
  must $? "GPU tests" "$(grep -E '^\[  (PASSED|FAILED)  \] [0-9]+ test' "$folder/tests.log" | tr -d '[]' | tr -s ' ' | paste -sd, )"
  grep -A4 'Failure$' "$folder/tests.log" | head -30
}

stage_errors() {
  have_torch || { row errors "skipped: python3 has no torch with CUDA"; return; }
  build/cuda/dump_operations "$work/operations" >"$folder/errors.txt" 2>&1 && python3 dev/peers/torch_error.py "$work/operations" >"$folder/errors.txt" 2>&1
  local code=$?
  grep FAILED "$folder/errors.txt"
  must $code "error no worse than 1.5 x PyTorch's" "$(tail -1 "$folder/errors.txt")"
  rm -rf "$work/operations"
}

# Every operation's tests but those of large shapes, and a whole model's gradients. The three tools share the GPU, each in
# several processes, so the test that wants its memory alone is left out, and so is NCCL's, whose kernels are not ours and wait
# for each other. Racecheck is the slowest by far: it leaves out the library's kernels, whole models, attention's longest test,
# and the matrix products, at which the tool (of CUDA 13.0) ends with an internal error, "failed to handle a hardware exception".
# Initcheck does not see what cuBLASLt's bf16 products write, and says of all that reads it that nothing did: MemoryContentGpu
# shows instead that no result depends on what memory held.
small_tests='*Gpu.*:*GoldenTest.LossAndEveryGradient*gpu*-*TwoToThe31*:*AtTrainingShapes*:*EveryBf16NumberIsRight:AttentionGpu.Bf16*:AttentionGpu.Fp32*:AttentionGpu.Scores*:AdamWGpu.Repeats:GlobalNormGpu.Repeats:MatmulGpu.Repeats:MatmulGpu.Equals*:*HostDoesNotWait*:DeviceMemoryGpu.*:*CollectivesGpu*'
stage_sanitize() {
  command -v compute-sanitizer >/dev/null || { row sanitize "skipped: no compute-sanitizer"; return; }
  local tool shard log filter only processes=5
  for tool in memcheck racecheck initcheck; do
    filter=$small_tests only=""
    [ $tool = racecheck ] && filter="$filter:*GoldenTest*:GraphsGpu.*:MatmulGpu.*:AttentionGpu.SameBitsEveryRun" only="--kernel-regex kns=kinoe"
    [ $tool = initcheck ] && filter="$filter:GraphsGpu.TrainingHas*"
    for ((shard = 0; shard < processes; ++shard)); do
      log=$folder/sanitize-$tool-$shard
      {
        OMP_NUM_THREADS=2 GTEST_TOTAL_SHARDS=$processes GTEST_SHARD_INDEX=$shard timeout -k 5 "${SANITIZE_LIMIT:-240}" \
          compute-sanitizer --tool $tool $only --error-exitcode 9 "$tests" --gtest_filter="${SANITIZE:-$filter}" >"$log.log" 2>&1
        echo $? >"$log.code"
      } &
    done
  done
  wait
  for tool in memcheck racecheck initcheck; do
    log=$folder/sanitize-$tool
    [ "$(sort -u "$log"-?.code)" = 0 ] && grep -q '^\[       OK' "$log"-?.log
    must $? "compute-sanitizer $tool" "$(cat "$log"-?.log | grep -c '^\[       OK') tests passed, $(grep -hE '(ERROR|RACECHECK) SUMMARY' "$log"-?.log |
      sed 's/=* *//' | sort | uniq -c | tr -s ' ' | paste -sd, )$(
        for ((shard = 0; shard < processes; ++shard)); do
          [ "$(cat "$log-$shard.code")" = 0 ] || echo "; code $(cat "$log-$shard.code") in $(grep '^\[ RUN' "$log-$shard.log" | tail -1 | tr -d '[]')"
        done)"
  done
}

# The tests must notice broken kernels: each break is one edit in a copy of the tree, whose test has to fail.
breaks=(
  "kernels/attention_forward.cuh|if (tile == mine.diagonal .. tile < mine.clear) {|if (tile == mine.diagonal) {|AttentionGpu.Bf16IsAsClose*"
  "kernels/attention_backward.cuh|if (step.tile < mine.clear_from .. step.tile >= mine.clear_to) {|if (step.tile < mine.clear_from) {|AttentionGpu.Bf16IsAsClose*"
  "kernels/norm_backward.cu|wait_copies<kAhead>();|wait_copies<kAhead + 1>();|NormGpu.EqualsTheCpuAtAllShapes"
  "trainer/model.cpp|word(piece.accumulate) . |0 + |GraphsGpu.TrainingHasTheSameBits*"
)
stage_broken() {
  local i file from to filter tree code
  for i in "${!breaks[@]}"; do
    IFS='|' read -r file from to filter <<<"${breaks[i]}"
    tree=$work/broken-$i
    mkdir -p "$tree/build" && cp -a Makefile scripts kernels dataloader trainer test dev train_gpt.cu "$tree" && cp -a build/cuda build/probe.mk "$tree/build"
    sed -i "s/$from/$to/" "$tree/$file"
    cmp -s "$file" "$tree/$file" && echo "the break of $file changes nothing" >"$folder/broken-$i.log"
    make -C "$tree" build/cuda/kinoe_tests -j"$(nproc)" >"$folder/broken-$i-build.log" 2>&1 &
  done
  wait
  for i in "${!breaks[@]}"; do
    IFS='|' read -r file from to filter <<<"${breaks[i]}"
    "$tests" --gtest_filter="$filter" >"$folder/broken-$i-before.log" 2>&1
    code=$?
    [ -e "$folder/broken-$i.log" ] || timeout 60 "$work/broken-$i/build/cuda/kinoe_tests" --gtest_filter="$filter" >"$folder/broken-$i.log" 2>&1
    [ $? -eq 1 ] && [ $code -eq 0 ] && grep -q '^\[  FAILED  \]' "$folder/broken-$i.log"
    must $? "a broken $(basename "$file") is seen" "$filter: $(grep -c 'Failure$' "$folder/broken-$i.log") failed expectations, before $(grep -c 'Failure$' "$folder/broken-$i-before.log")"
  done
}

m124="--model gpt2-124m --seq-len 1024 --global-batch 64 --micro-batch 64"

# From the command to the record of the first step: with an empty cache of algorithms, and with what that run left. The system's
# own file cache is as it is: run the stage twice to see the second start of a day.
stage_start() {
  local tokens kind bar begin end run
  tokens=$(data 50257)
  rm -rf "$work/cache"
  for kind in cold:20 warm:5; do
    bar=${kind#*:} kind=${kind%:*} run=$work/start-${kind%:*}
    begin=$(date +%s.%N)
    XDG_CACHE_HOME=$work/cache "$binary" $quiet --no-checkpoints --out "$run" $m124 --data "$tokens" --steps 1 >"$folder/start-$kind.log" 2>&1 &
    until grep -qs '"loss"' "$run/metrics.jsonl" || ! kill -0 $! 2>/dev/null; do sleep 0.02; done
    end=$(date +%s.%N)
    wait $! || { tail -3 "$folder/start-$kind.log"; must 1 "start $kind"; continue; }
    python3 -c 'import sys; b, e, bar = map(float, sys.argv[1:]); print(f"{e - b:.2f} s (bar {bar:.0f})"); sys.exit(e - b > bar)' "$begin" "$end" "$bar" >"$folder/start-$kind.txt"
    must $? "start to first step, 124M, $kind" "$(cat "$folder/start-$kind.txt"), step 1 took $(median "$run/metrics.jsonl" step_ms 0) ms"
    rm -rf "$run"
  done
}

# Layers as graphs and launch by launch: the same bits, and what it is worth where kernels are short.
stage_graphs() {
  local tokens batch graphs
  tokens=$(data 50257)
  for batch in 1 4 16 64; do
    for graphs in 0 1; do
      KINOE_GRAPHS=$graphs train "graphs-$batch-$graphs" --model gpt2-124m --seq-len 1024 --data "$tokens" \
        --micro-batch $batch --global-batch $((2 * batch)) --steps 30
    done
    [ "$(hashes "$work/graphs-$batch-0")" = "$(hashes "$work/graphs-$batch-1")" ]
    must $? "graphs, 124M, mb $batch x 2" "$(median "$folder/graphs-$batch-0.jsonl" tokens_per_s 5) tok/s without, $(median "$folder/graphs-$batch-1.jsonl" tokens_per_s 5) with"
  done
}

stage_determinism() {
  train once $m124 --data "$(data 50257)" --steps 50 && train twice $m124 --data "$(data 50257)" --steps 50
  [ $? -eq 0 ] && [ "$(hashes "$work/once")" = "$(hashes "$work/twice")" ]
  must $? "50 steps twice, 124M, mb 64" "hash of hashes $(hashes "$work/once") $(hashes "$work/twice")"
}

# Bits across a stop, and what saving and loading a large model costs beside dd on the same disk.
stage_resume() {
  local tokens code
  tokens=$(data 50257)
  train straight $m124 --data "$tokens" --steps 40 || { must 1 "40 steps = 20 + 20, 124M, mb 64"; return; }
  SAVES="--save-every 0" train parts $m124 --data "$tokens" --steps 40 --stop-after 20
  [ $? -eq 75 ] && "$binary" --out "$work/parts" --resume must >"$folder/parts-2.log" 2>&1
  code=$?
  cp "$work/parts/metrics.jsonl" "$folder/parts.jsonl" 2>/dev/null
  [ $code -eq 0 ] && [ "$(hashes "$work/straight")" = "$(hashes "$work/parts")" ]
  must $? "40 steps = 20 + 20, 124M, mb 64" "hash of hashes $(hashes "$work/straight") $(hashes "$work/parts")"
  rm -rf "${work:?}/straight" "$work/parts"

  dd if=/dev/zero of="$work/dd" bs=8M count=1024 conv=fsync 2>"$folder/dd.log"
  rm -f "$work/dd"
  SAVES="--save-every 20" train large --model gpt2-1558m --seq-len 1024 --global-batch 16 --micro-batch 16 --data "$tokens" --steps 100 --stop-after 40
  [ $? -eq 75 ]
  must $? "1558M saves" "$(python3 - "$folder/large.jsonl" "$folder/dd.log" <<'PY'
import json, re, sys
saves = [r for r in map(json.loads, open(sys.argv[1])) if "save_ms" in r]
dd = re.search(r"([0-9.]+) s, ", open(sys.argv[2]).read()).group(1)
rate = 8 * 2**30 / float(dd) / 1e9
print(f"{saves[0]['save_bytes']/1e9:.1f} GB; " + "; ".join(f"step {r['step']}: stall {r['save_stall_ms']:.0f} ms, {r['save_bytes']/r['save_ms']/1e6:.2f} GB/s" for r in saves) + f"; dd with fsync {rate:.2f} GB/s")
PY
)"
  timeout 100 "$binary" --out "$work/large" --resume must --stop-after 41 --save-every 0 >"$folder/large-2.log" 2>&1
  [ $? -eq 75 ]
  must $? "1558M goes on" "$(grep -o '[0-9.]* MiB read and checked in.*' "$folder/large-2.log")"
  rm -rf "${work:?}/large"
}

# What the device used at most against the total of the printed plan.
stage_memory() {
  local name options vocab planned peak
  while read -r name vocab options; do
    train "memory-$name" --data "$(data "$vocab")" --steps 3 $options || { must 1 "memory $name"; continue; }
    planned=$(grep -oE '^  total +[0-9.]+ MiB' "$folder/memory-$name.log" | grep -oE '[0-9.]+')
    peak=$(grep -o '"mem_peak_bytes":[0-9]*' "$folder/memory-$name.jsonl" | cut -d: -f2 | sort -n | tail -1)
    python3 -c 'import sys; p, u = float(sys.argv[1]), float(sys.argv[2]) / 2**20; print(f"planned {p:,.0f} MiB, used {u:,.0f} MiB at most, {100 * (u / p - 1):+.2f} %"); sys.exit(abs(u / p - 1) > 0.03)' \
      "$planned" "$peak" >"$folder/memory-$name.txt" 2>&1
    must $? "memory $name" "$(cat "$folder/memory-$name.txt"), $(grep -E '^  (CUDA context|matrix products) ' "$folder/memory-$name.log" | tr -s ' ' | paste -sd,)"
  done <<MODELS
124m 50257 $m124
124m-block 50257 $m124 --recompute block
124m-accumulating 50257 --model gpt2-124m --seq-len 1024 --global-batch 32 --micro-batch 16
1558m 50257 --model gpt2-1558m --seq-len 1024 --global-batch 16 --micro-batch 16
8b 128256 --model llama3-8b --seq-len 4096 --global-batch 2 --micro-batch 1 --adam-state bf16
MODELS
}

stage_recompute() {
  local mode
  for mode in none light block; do train "recompute-$mode" $m124 --data "$(data 50257)" --steps 5 --recompute $mode; done
  [ "$(hashes "$work/recompute-none")" = "$(hashes "$work/recompute-light")" ] &&
    [ "$(hashes "$work/recompute-none")" = "$(hashes "$work/recompute-block")" ]
  must $? "recompute none = light = block" "$(for mode in none light block; do grep -oE 'total +[0-9.]+ MiB' "$folder/recompute-$mode.log" | tr -s ' '; done | paste -sd, )"
}

# The loss of 300 steps beside PyTorch's, from the same initial weights and batches.
parity_one() {  # NAME OUR-MODEL TORCH-MODEL
  local name=parity-$1 tokens options="--seq-len 1024 --global-batch 64 --micro-batch 64 --steps 300 --lr 6e-4 --warmup-steps 20"
  have_torch || { row "$name" "skipped: python3 has no torch with CUDA"; return; }
  tokens=$(data 50257)
  train "$name" --model "$2" --data "$tokens" $options
  timeout 240 python3 dev/peers/torch_gpt.py --model "$3" --vocab 50257 --data "$tokens" $options --out "$folder/$name-torch.jsonl" >"$folder/$name-torch.log" 2>&1
  python3 - "$folder/$name.jsonl" "$folder/$name-torch.jsonl" >"$folder/$name.txt" 2>&1 <<'PY'
import json, sys
a, b = ([json.loads(line)["loss"] for line in open(p) if "step_ms" in line] for p in sys.argv[1:3])
d = [x - y for x, y in zip(a, b)]
last = d[-50:]
print(f"mean difference {sum(d)/len(d):+.5f}, last 50 {sum(last)/len(last):+.5f}, mean |d| {sum(map(abs, d))/len(d):.5f} over {len(d)} steps")
sys.exit(len(d) != 300 or abs(sum(d)/len(d)) > 0.01 or abs(sum(last)/len(last)) > 0.01)
PY
  must $? "loss beside PyTorch, $1" "$(tail -1 "$folder/$name.txt")"
}
stage_parity_124m() { parity_one 124m gpt2-124m gpt2-124m; }

# Of 114 M parameters: grouped queries, RoPE, SwiGLU, RMSNorm, tied embeddings.
stage_parity_llama() {
  cat >"$work/llama.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50257, "hidden_size": 768, "intermediate_size": 2048,
 "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
 "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": true}
JSON
  parity_one llama "$work/llama.json" '{"kind": "llama", "layers": 12, "hidden": 768, "heads": 12, "kv_heads": 4, "head_dim": 64, "ffn": 2048, "tied": true}'
}
stage_parity() { stage_parity_124m; stage_parity_llama; }

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
  timeout 200 build/cuda/bench_kernels --device cuda ${BENCH:+--filter "$BENCH"} --csv "$folder/bench.csv" >"$folder/bench.txt" 2>&1
  must $? "bench_kernels" "$(grep -c , "$folder/bench.csv" 2>/dev/null) rows"
}

# Not among the default stages: figures for decisions. They print their tables themselves.
table_of() {  # PROGRAM
  make "build/cuda/$1" -j"$(nproc)" >"$folder/$1-build.log" 2>&1 && timeout 150 "build/cuda/$1" >"$folder/$1.txt" 2>&1
  local code=$?
  cat "$folder/$1.txt"
  must $code "$1" "$(wc -l <"$folder/$1.txt") lines"
}
stage_epilogues() { table_of bench_epilogues; }
stage_tune() { table_of bench_attention; }

for stage in $stages; do
  begin=$SECONDS
  "stage_${stage//-/_}"
  echo "=== $stage: $((SECONDS - begin)) s"
done
cp "$folder/bench.csv" "$top" 2>/dev/null
tar czf "$top/logs.tgz" -C "$top" logs && rm -rf "$folder"
echo
echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%F), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null)"
printf '%s' "$table"
exit $((failures > 0))
