#!/usr/bin/env bash
# scripts/run_slurm.sbatch under a real Slurm: a slurmctld, two slurmd (a node each) and a munged of their own, in a
# temporary directory and on their own ports, with nothing of the machine's Slurm touched. Jobs train a tiny model on
# the CPU, meet with what goes wrong, and must end as the script's head says, with the losses of an undisturbed run.
#
#   test/slurm_test.sh [train_gpt]          about a minute; says so and ends with 0 where Slurm is not installed
set -u
cd "$(dirname "$0")/.." || exit 2
program=$(realpath "${1:-build/host/train_gpt}")
[ -x "$program" ] || { echo "no program at $program; run make"; exit 2; }
PATH=$PATH:/usr/sbin:/sbin
for tool in slurmctld slurmd munged sbatch scontrol mpirun; do
  command -v "$tool" >/dev/null || { echo "skipped: there is no $tool here (scripts/setup.sh --slurm)"; exit 0; }
done
for name in $(compgen -e | grep -E '^(SLURM|SBATCH|SRUN|OMPI|PMI)'); do unset "$name"; done

top=$(mktemp -d "${TMPDIR:-/tmp}/kinoe-slurm.XXXXXX") || exit 2
chmod 755 "$top"  # munged wants that nobody else can write where its socket is
begin=$SECONDS failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }
# Pid files are written by the daemons themselves; only those of this directory are ended.
end_daemons() {
  local pids pid
  pids=$(cat "$top"/*.pid 2>/dev/null)
  for pid in $pids; do kill "$pid" 2>/dev/null; done
  for pid in $pids; do
    for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "$pid" 2>/dev/null
  done
}
# shellcheck disable=SC2317
leave() {
  [ -z "${jobs_submitted:-}" ] || { scancel --user="$(id -un)" 2>/dev/null; sleep 1; }
  end_daemons
  if [ "$failures" -eq 0 ]; then rm -rf "$top"; else echo "logs are in $top"; fi
}
trap leave EXIT
trap 'failures=1; exit 130' INT TERM

# --- Slurm --------------------------------------------------------------------------------------------------------------
free_port() {
  local port
  while port=$((20000 + RANDOM % 10000)); (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
  echo "$port"
}
mkdir "$top/state" "$top/spool" "$top/bin" "$top/user"
(umask 077 && head -c 128 /dev/urandom >"$top/munge.key")
munged --key-file="$top/munge.key" --socket="$top/munge.sock" --pid-file="$top/munged.pid" \
  --log-file="$top/munged.log" --seed-file="$top/munge.seed" || { fail "munged does not start"; cat "$top/munged.log"; exit 1; }

# The first node has the name of this host: mpirun then starts its ranks there without asking Slurm. A requeued job waits
# until the credential of its last start has expired, hence the shortest that Slurm takes (5 s). No cgroups: containers
# have none to give.
host=$(hostname -s)
export SLURM_CONF=$top/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=kinoe
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$top/munge.sock,cred_expire=5
SlurmctldPort=$(free_port)
StateSaveLocation=$top/state
SlurmdSpoolDir=$top/spool/%n
SlurmctldPidFile=$top/slurmctld.pid
SlurmdPidFile=$top/slurmd.%n.pid
SlurmctldLogFile=$top/slurmctld.log
SlurmdLogFile=$top/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=64 State=UNKNOWN
NodeName=spare NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=64 State=UNKNOWN
PartitionName=all Nodes=$host,spare Default=YES MaxTime=INFINITE State=UP
CONF
slurmctld -i || { fail "slurmctld does not start"; tail -n 20 "$top/slurmctld.log"; exit 1; }
for node in "$host" spare; do
  mkdir "$top/spool/$node"
  slurmd -N "$node" || { fail "slurmd does not start"; tail -n 20 "$top/slurmd.$node.log"; exit 1; }
done
for _ in $(seq 100); do [ "$(sinfo -h -o %T -p all 2>/dev/null)" = idle ] && break; sleep 0.2; done
[ "$(sinfo -h -o %T -p all)" = idle ] || { fail "the nodes do not come up"; sinfo; tail -n 20 "$top"/slurm*.log; exit 1; }
echo "$(slurmctld -V): up after $((SECONDS - begin)) s"

# --- jobs ---------------------------------------------------------------------------------------------------------------
cat >"$top/user/tiny.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 32,
 "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
 "tie_word_embeddings": true, "torch_dtype": "float32"}
JSON
training=(--model tiny.json --seq-len 32 --steps 300 --global-batch 4 --micro-batch 1 --save-every 50 --keep 9
  --determinism topology --sample-every 0)

# In the program's place: the program, and on a job's first start the TROUBLE that the test asked for.
cat >"$top/bin/trouble" <<'WRAP'
#!/usr/bin/env bash
out=$(sed -E 's/.*--out ([^ ]+).*/\1/' <<<"$*")
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [[ $TROUBLE == always-* ]]; then
  last=$((${OMPI_COMM_WORLD_SIZE:-${SLURM_STEP_NUM_TASKS:-1}} - 1))
  case $TROUBLE in
    stop) exec "$TEST_PROGRAM" "$@" --stop-after 50 ;;
    kill | hang)
      if [ "${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}" = "$last" ]; then
        signal=$([ "$TROUBLE" = kill ] && echo KILL || echo STOP)
        exec 9<> <(:)  # reading from it is a short sleep without a process
        (until [ -d "$out/checkpoints/step_00000050" ]; do read -rt 0.01 -u 9; done; kill -"$signal" $$) >/dev/null 2>&1 &
      fi ;;
    always-sleep) exec sleep 300 ;;
  esac
fi
exec "$TEST_PROGRAM" "$@"
WRAP
# What makes the script take srun.
printf '#!/bin/sh\necho "GPU 0"\n' >"$top/bin/nvidia-smi"
chmod +x "$top/bin/trouble" "$top/bin/nvidia-smi"
# The script as a user of CPUs edits it; sbatch's own options go before what it says.
sed '/--gpus-per-node/d; s/^most_starts=.*/most_starts=2/' scripts/run_slurm.sbatch >"$top/run.sbatch"
mkdir "$top/user/scripts"
cp scripts/run_mpi.sh "$top/user/scripts/"

declare -A job=() told=()
submit() {  # NAME TROUBLE mpirun|srun RANKS [sbatch options]
  local name=$1 trouble=$2 path=$PATH
  [ "$3" = mpirun ] || path=$top/bin:$PATH
  local options=(--nodes=1 --ntasks-per-node="$4" --cpus-per-task=1 --nodelist="$host") device=(--device cpu)
  [ "$3" = mpirun ] || device=()
  shift 4
  job[$name]=$(cd "$top/user" && PATH=$path TROUBLE=$trouble TEST_PROGRAM=$program KINOE_BINARY=$top/bin/trouble OMP_WAIT_POLICY=passive \
    OMPI_MCA_btl_vader_single_copy_mechanism=none \
    sbatch --parsable --job-name="$name" "${options[@]}" "$@" "$top/run.sbatch" --out "runs/$name" "${device[@]}" "${training[@]}" \
    ${hang:+--hang-timeout "$hang"}) || { fail "$name was not submitted"; job[$name]=0; }
  jobs_submitted=1
}
log_of() { cat "$top/user/$1-${job[$1]}.log" 2>/dev/null; }
show() { scontrol show job "${job[$1]}" 2>/dev/null | grep -oE "\b$2=[^ ]*" | head -n 1 | cut -d= -f2; }
until_true() {  # SECONDS COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@"; do [ $SECONDS -lt $end ] || return 1; sleep 0.1; done
}
is_over() { case $(show "$1" JobState) in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE_FAIL | OUT_OF_MEMORY) ;; *) return 1 ;; esac; }
has_saved() { [ -d "$top/user/runs/$1/checkpoints/step_$2" ]; }
has_state() { [ "$(show "$1" JobState)" = "$2" ]; }
records() { grep -o '"step": *[0-9]*,.*' "$top/user/runs/$1/metrics.jsonl" | grep '"weights_hash"' | sed -E 's/"step": *([0-9]+),.*"loss": *([^,]+),.*"weights_hash": *"([^"]+)".*/\1 \2 \3/'; }

expect() {  # NAME STATE EXITCODE RESTARTS [words of its log]
  local name=$1 wanted="$2 $3 $4" got word
  if ! until_true 100 is_over "$name"; then
    fail "$name: still $(show "$name" JobState)"
  else
    got="$(show "$name" JobState) $(show "$name" ExitCode) $(show "$name" Restarts)"
    # shellcheck disable=SC2053
    [[ $got == $wanted ]] || { fail "$name: state, exit code and restarts are $got, not $wanted"; told[$name]=1; }
  fi
  shift 4
  for word in "$@"; do
    log_of "$name" | grep -qE -- "$word" || { fail "$name: nothing in its log like '$word'"; told[$name]=1; }
  done
  [ -z "${told[$name]:-}" ] || log_of "$name" | grep -v '^step .* ms |' | tail -n 40 | sed 's/^/    /'
  [ -n "${told[$name]:-}" ] || echo "ok: $name (after $((SECONDS - begin)) s)"
}
# All steps, each once, with the losses and weights of the undisturbed run; and steps after the first start came from a
# checkpoint.
expect_same_losses() {  # NAME [first digits of the checkpoint's step]
  [ "$(records "$1")" = "$(records straight)" ] || { fail "$1: other losses than the undisturbed run"; diff <(records straight) <(records "$1") | head -n 6; }
  log_of "$1" | grep -qE "going on from runs/$1/checkpoints/step_00000${2:-}[0-9]" || fail "$1: did not go on from a checkpoint"
}

# A checkpoint with one flipped bit.
(cd "$top/user" && "$program" --device cpu --out runs/damaged "${training[@]}" --stop-after 50) >"$top/damaged.log" 2>&1
[ $? -eq 75 ] || { fail "the program does not stop with 75"; tail -n 5 "$top/damaged.log"; }
weights=$top/user/runs/damaged/checkpoints/step_00000050/model.safetensors
byte=$(tail -c 1 "$weights" | od -An -tu1)
printf '%b' "\\x$(printf %x $((byte ^ 1)))" | dd of="$weights" bs=1 seek=$(($(stat -c %s "$weights") - 1)) conv=notrunc status=none

hang=600 submit out_of_time hang mpirun 2
submit straight none mpirun 2
submit stopped stop mpirun 2
submit killed kill mpirun 2
submit damaged none mpirun 2
submit hopeless none srun 2  # no GPU: ranks meet without PMI, then end with 5
submit nothing_saved always-sleep srun 2
submit cancelled always-sleep srun 2
submit killed_srun kill srun 1
submit node_lost hang srun 1 --nodelist=spare

until_true 30 has_state cancelled RUNNING && sleep 1 && scancel "${job[cancelled]}"
until_true 30 has_state nothing_saved RUNNING && sleep 1 && scancel --batch --signal=USR1 "${job[nothing_saved]}"
until_true 40 has_saved node_lost 00000050 || fail "node_lost: no checkpoint"
scontrol update nodename=spare state=down reason=test && until_true 30 has_state node_lost PENDING
scontrol update nodename=spare state=resume 2>/dev/null  # it may have come back by itself

# Once there is a checkpoint the job gets a limit less than two minutes away: the signal comes when Slurm looks next, which
# it does every 30 s. The second start has time enough.
until_true 90 has_saved out_of_time 00000050 || fail "out_of_time: no checkpoint"
IFS=: read -r _ minutes _ <<<"$(show out_of_time RunTime)"
scontrol update jobid="${job[out_of_time]}" timelimit=$((10#$minutes + 2))
until_true 60 has_state out_of_time PENDING || fail "out_of_time: not requeued"
scontrol update jobid="${job[out_of_time]}" timelimit=60

expect straight COMPLETED 0:0 0 'run_slurm: .*finished'
[ "$(records straight | wc -l)" -eq 300 ] || fail "straight: $(records straight | wc -l) steps on record, not 300"
expect stopped COMPLETED 0:0 1 'stopped with a checkpoint: requeued'
expect_same_losses stopped 05
expect killed COMPLETED 0:0 1 'rank 1 .*(lost|gone|ended|closed)' 'a rank was lost \(exit code 5\): requeued'
expect_same_losses killed
expect killed_srun COMPLETED 0:0 1 'a rank was lost \(exit code 137\): requeued'
expect_same_losses killed_srun
expect node_lost COMPLETED 0:0 1
expect_same_losses node_lost
expect damaged FAILED 4:0 0 'model.safetensors' 'exit code 4 would come again, see above: not requeued'
expect hopeless FAILED 1:0 2 "^1 +$host" 'ranks on CPUs add' 'a rank was lost .exit code 5.: requeued' "2 starts in a row have written no checkpoint after 'none'"
expect nothing_saved FAILED 1:0 0 'no checkpoint since this start'
expect cancelled CANCELLED '*' 0 'ended by Slurm'
expect out_of_time COMPLETED 0:0 1 'the time limit is near' 'out of time, newest checkpoint step_00000[0-9]+: requeued'
expect_same_losses out_of_time

echo "$((SECONDS - begin)) s, $failures failed"
[ "$failures" -eq 0 ]
