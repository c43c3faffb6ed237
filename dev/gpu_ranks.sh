#!/usr/bin/env bash
# Stages of gpu_check.sh for a machine with two GPUs: bits, speed and faults of runs of several ranks. It is sourced by that script, whose
# row, must, train and data it uses. Ranks are started with the variables that torchrun sets, so that no MPI is needed.
# shellcheck disable=SC2154,SC2086,SC2046

two_gpus() {  # STAGE
  [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')" -ge 2 ] && return
  row "$1" "left out: this needs two GPUs"
  return 1
}

port=$((20000 + $$ % 20000))
rank_environment() {  # RANK RANKS: in words for `env`
  echo "RANK=$1 WORLD_SIZE=$2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=$2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port"
}
ranks() {  # N COMMAND...: the exit code of all ranks, 1 where they differ; a run that hangs is ended
  local n=$1 rank pid code all="" pids=()
  shift
  [ "$n" -gt 1 ] || { "$@"; return; }
  port=$((port + 1))
  for ((rank = 0; rank < n; ++rank)); do
    env $(rank_environment $rank "$n") timeout -k 5 "${RANKS_LIMIT:-120}" "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid"
    code=$?
    all=${all:-$code}
    [ $code -eq "$all" ] || all=1
  done
  return "$all"
}

same_steps() {  # STEPS METRICS METRICS...: loss, lr and weights_hash of all steps from 1 to STEPS are equal
  python3 - "$@" <<'PY'
import json, sys
steps, (first, *others) = int(sys.argv[1]), [
    {r["step"]: (r["loss"], r["lr"], r["weights_hash"]) for r in map(json.loads, open(path)) if "weights_hash" in r} for path in sys.argv[2:]]
equal = [sum(s in first and first[s] == other.get(s) for s in range(1, steps + 1)) for other in others]
print(f"loss, lr and weights_hash equal in {' and '.join(map(str, equal))} of {steps} steps")
sys.exit(min(equal) < steps)
PY
}

topology() {  # NAME VOCABULARY OPTIONS...
  local name=$1 code text="a run failed" options
  options="--data $(data "$2") --steps 10 --determinism topology"
  shift 2
  options="$options $*"
  train "topology-$name-1" $options && RANKS=2 train "topology-$name-zero0" $options --zero 0 && RANKS=2 train "topology-$name-zero1" $options --zero 1 &&
    text=$(same_steps 10 "$folder/topology-$name"-{1,zero0,zero1}.jsonl)
  code=$?
  must $code "topology, $name: 1 GPU = 2 = 2 (ZeRO 1)" "$text"
}

# Global batches of 5 and 3 micro-batches: two GPUs cannot share them evenly.
stage_ranks() {
  local code text full="--model gpt2-124m --seq-len 1024 --micro-batch 64 --global-batch 128 --steps 200"
  two_gpus ranks || return
  topology 124m 50257 --model gpt2-124m --seq-len 1024 --micro-batch 16 --global-batch 80
  topology 1558m 50257 --model gpt2-1558m --seq-len 1024 --micro-batch 4 --global-batch 12
  topology llama3-1b 128256 --model llama3-1b --seq-len 2048 --micro-batch 2 --global-batch 6

  text="a run failed"
  RANKS=2 train ranks-once --data "$(data 50257)" $full &&
    RANKS=2 train ranks-twice --data "$(data 50257)" $full &&
    text=$(same_steps 200 "$folder"/ranks-{once,twice}.jsonl)
  code=$?
  must $code "200 steps twice on 2 GPUs, 124M, mb 64" "$text"
}

# Saved by two ranks, gone on with by one.
stage_ranks_resume() {
  local code text options="--determinism topology --model gpt2-124m --seq-len 1024 --micro-batch 16 --global-batch 80 --steps 10"
  two_gpus ranks-resume || return
  options="--data $(data 50257) $options"
  train topology-straight $options
  text="a run failed"
  RANKS=2 SAVES="--save-every 0" train topology-parts $options --stop-after 5
  [ $? -eq 75 ] && "$binary" --out "$work/topology-parts" --resume must >"$folder/topology-parts-2.log" 2>&1 &&
    cp "$work/topology-parts/metrics.jsonl" "$folder/topology-parts.jsonl" && text=$(same_steps 10 "$folder"/topology-{straight,parts}.jsonl)
  code=$?
  must $code "5 steps on 2 GPUs + 5 on 1 = 10 on 1" "$text"
  rm -rf "${work:?}/topology-parts"
}

scaling() {  # BAR SKIP ONE TWO...: medians of the steps after SKIP; of the runs on two GPUs the faster one must reach BAR % of twice one GPU
  python3 - "$@" <<'PY'
import json, os, statistics, sys
bar, skip, (one, *two) = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
rows = {path: [r for r in map(json.loads, open(path)) if "step_ms" in r and r["step"] > skip] for path in (one, *two)}
def median(path, key):
    values = [r[key] for r in rows[path] if r.get(key) is not None]
    return statistics.median(values) if values else None
base, text, best = median(one, "tokens_per_s"), [], 0.0
for path in two:
    rate, wait = median(path, "tokens_per_s"), median(path, "comm_wait_ms")
    percent = 100 * rate / (2 * base)
    best = max(best, percent)
    text.append(f"{os.path.basename(path)[:-6]} {rate:,.0f} tok/s = {percent:.1f} %" + ("" if wait is None else f", comm_wait {wait:.2f} of {median(path, 'step_ms'):.1f} ms"))
print(f"one GPU {base:,.0f} tok/s; " + "; ".join(text) + f" of twice that (bar {bar:g})")
sys.exit(best < bar)
PY
}
cost() {  # BAR SKIP RUN TOPOLOGY: how much longer a step of the second one is
  python3 - "$@" <<'PY'
import json, statistics, sys
bar, skip = float(sys.argv[1]), int(sys.argv[2])
run, topology = (statistics.median(r["step_ms"] for r in map(json.loads, open(path)) if "step_ms" in r and r["step"] > skip) for path in sys.argv[3:])
print(f"{run:.1f} and {topology:.1f} ms a step, {100 * (topology / run - 1):+.1f} %" + (f" (bar {bar:g})" if bar else ""))
sys.exit(bar > 0 and topology > run * (1 + bar / 100))
PY
}

torch_speed() {  # RANKS NAME OPTIONS...
  local n=$1 name=$2
  shift 2
  RANKS_LIMIT=240 ranks "$n" timeout 240 python3 dev/peers/torch_gpt.py $([ "$n" -gt 1 ] && echo --ddp) --model gpt2-124m --random-init --seq-len 1024 --micro-batch 64 \
    --out "$folder/$name.jsonl" "$@" >"$folder/$name.log" 2>&1 || { tail -3 "$folder/$name.log"; return 1; }
}

stage_ranks_speed() {
  local tokens zero n text code bar options="--model gpt2-124m --seq-len 1024 --micro-batch 64"
  two_gpus ranks-speed || return
  tokens=$(data 50257)
  while read -r name sequences steps bar; do
    train "$name-1" $options --data "$tokens" --global-batch "$sequences" --steps "$steps"
    for zero in 0 1; do RANKS=2 train "$name-zero$zero" $options --data "$tokens" --global-batch $((2 * sequences)) --steps "$steps" --zero $zero; done
    text=$(scaling "$bar" 4 "$folder/$name"-{1,zero0,zero1}.jsonl)
    must $? "$name, 124M, mb 64" "$text"
    have_torch || { row "$name, PyTorch" "skipped: python3 has no torch with CUDA"; continue; }
    torch_speed 1 "$name-torch-1" --data "$tokens" --global-batch "$sequences" --steps "$steps" &&
      torch_speed 2 "$name-torch-ddp" --data "$tokens" --global-batch $((2 * sequences)) --steps "$steps" && text=$(scaling 0 4 "$folder/$name"-torch-{1,ddp}.jsonl)
    code=$?
    must $code "$name, PyTorch" "$text"
  done <<'RUNS'
speed2 64 30 95
speed2-accumulating 512 12 99
RUNS

  RANKS=2 train speed2-topology $options --data "$tokens" --global-batch 1024 --steps 12 --determinism topology
  text=$(cost 8 4 "$folder"/speed2-{accumulating-zero1,topology}.jsonl)
  must $? "topology beside run, 124M, mb 64 x 8" "$text"
  options="--model llama3-1b --seq-len 4096 --micro-batch 4 --global-batch 32 --steps 9"
  tokens=$(data 128256)
  RANKS=2 train speed2-1b $options --data "$tokens" && RANKS=2 train speed2-1b-topology $options --data "$tokens" --determinism topology &&
    text=$(cost 0 4 "$folder"/speed2-1b{,-topology}.jsonl)
  code=$?
  must $code "topology beside run, 1B, mb 4 x 4" "$text"
}

fault() {  # SIGNAL RANK: in the middle of a step of 0.9 s; the other rank ends within 60 s, with exit code 5, and says who is gone
  local signal=$1 victim=$2 other=$((1 - $2)) name=fault-$1-$2 rank began took code pids=()
  rm -rf "${work:?}/$name"
  port=$((port + 1))
  for rank in 0 1; do
    env $(rank_environment $rank 2) "$binary" $quiet --no-checkpoints --out "$work/$name" --model gpt2-124m --seq-len 1024 --micro-batch 64 --global-batch 1024 \
      --data "$(data 50257)" --steps 1000 >"$folder/$name-$rank.log" 2>&1 &
    pids+=($!)
  done
  began=$SECONDS
  until [ "$(grep -s '"loss"' "$work/$name/metrics.jsonl" | wc -l)" -ge 3 ] || [ $((SECONDS - began)) -ge 40 ] || ! kill -0 "${pids[0]}" 2>/dev/null; do sleep 0.1; done
  kill "-$signal" "${pids[victim]}"
  began=$SECONDS
  while kill -0 "${pids[other]}" 2>/dev/null && [ $((SECONDS - began)) -lt 65 ]; do sleep 0.1; done
  took=$((SECONDS - began))
  kill -KILL "${pids[@]}" 2>/dev/null
  wait "${pids[victim]}"
  wait "${pids[other]}"
  code=$?
  [ $code -eq 5 ] && [ $took -le 60 ] && grep -q "rank $victim" "$folder/$name-$other.log"
  must $? "SIG$signal of rank $victim" "the other ended after $took s with code $code: $(grep 'error' "$folder/$name-$other.log" | tail -1)"
}
stage_ranks_faults() {
  two_gpus ranks-faults || return
  fault KILL 1
  fault STOP 1
  fault KILL 0
}
