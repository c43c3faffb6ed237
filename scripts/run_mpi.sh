#!/usr/bin/env bash
# Trains with several ranks, started by Open MPI's mpirun.
#
#   scripts/run_mpi.sh N [train_gpt options]              N ranks on this host (one per GPU)
#   HOSTS=a:8,b:8 scripts/run_mpi.sh 16 [options]         over several hosts, at most so many ranks on each
#
# Ends with the exit code of the run (0 finished, 75 stopped with a checkpoint, 5 a rank was lost, ...: README.md), or with
# 128 + n when signal n (Ctrl-C: 2) stopped it, which saves nothing. It starts nothing again: a script around it may do
# so, with --resume auto, on 5 and 75. MPIRUN and KINOE_BINARY name other programs than `mpirun` and train_gpt beside
# this script; MPIRUN_OPTIONS are given to mpirun (as words).
#
# --enable-recovery lets the ranks that are left say who was lost; mpirun alone would kill them first. With it mpirun
# itself always ends with 0, so every rank reports its own code on standard error, where this script picks it up.
set -u

here=$(cd "$(dirname "$0")/.." && pwd)
ranks=${1:-}
if [[ ! $ranks =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0"
  exit 2
fi
shift
out="" previous=""
for argument in "$@"; do
  case $previous$argument in --out=*) out=${argument#--out=} ;; --out?*) out=$argument ;; esac
  [ "$argument" = --out ] && previous=--out || previous=""
done
binary=${KINOE_BINARY:-$here/train_gpt}
mpirun=${MPIRUN:-mpirun}
[ -x "$binary" ] || { echo "run_mpi.sh: error: no program at $binary; run make" >&2; exit 2; }
command -v "$mpirun" >/dev/null || { echo "run_mpi.sh: error: no $mpirun here; scripts/setup.sh installs Open MPI" >&2; exit 2; }

options=(--enable-recovery --bind-to none -n "$ranks")
if [ "$(id -u)" = 0 ]; then options+=(--allow-run-as-root); fi
per_host=$ranks
if [ -n "${HOSTS:-}" ]; then
  options+=(--host "$HOSTS")
  per_host=${HOSTS%%,*}
  per_host=${per_host#*:}
  [[ $per_host =~ ^[1-9][0-9]*$ ]] || per_host=1
  # mpirun counts a host without a number as one place; HOST:* leaves the number open.
  places=0
  IFS=, read -ra entries <<<"$HOSTS"
  for entry in "${entries[@]}"; do
    case $entry in *:*) here_places=${entry##*:} ;; *) here_places=1 ;; esac
    [[ $here_places =~ ^[0-9]+$ ]] || { places=$ranks && break; }
    places=$((places + 10#$here_places))
  done
  if [ "$places" -lt "$ranks" ] && [[ ! ${MPIRUN_OPTIONS:-} =~ [oO][vV][eE][rR][sS][uU][bB] ]]; then
    echo "run_mpi.sh: error: HOSTS offers $places places for $ranks ranks; give each host its number, as in HOSTS=a:8,b:8" >&2
    exit 2
  fi
elif [ "$ranks" -gt "$(nproc)" ]; then
  # More ranks than cores: each must give way while it waits.
  options+=(--oversubscribe --mca mpi_yield_when_idle 1)
else
  options+=(--oversubscribe)  # hyperthreads and containers: mpirun counts fewer cores than nproc
fi
# mpirun shows every rank a terminal; a log should have no progress bar.
[ -t 1 ] || export TERM=dumb
# The cores of a host are shared by its ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((per_host < $(nproc) ? $(nproc) / per_host : 1))}
while read -r name; do options+=(-x "$name"); done < <(compgen -e | grep -E '^(OMP|NCCL|KINOE|CUDA)_|^(PATH|LD_LIBRARY_PATH|TERM)$')
read -ra more <<<"${MPIRUN_OPTIONS:-}"

# Runs on every rank. mpirun signals whole process groups: the shell only has to live until the program has ended.
# shellcheck disable=SC2016
rank='trap : INT TERM HUP USR1 USR2 CONT; exec 4>&2; { "$@" 2>&4 4>&-; } 2>/dev/null; code=$?; echo "kinoe-rank $OMPI_COMM_WORLD_RANK $code" >&2; exit $code'

# A file without a name: it goes with the last process that has it open, however that ends.
file=$(mktemp "${TMPDIR:-/tmp}/kinoe-codes.XXXXXX") && exec 5<>"$file" && rm "$file" || exit 2
codes=/dev/fd/5
# Open MPI 4 complains to itself when a process ends in the middle of a run (PMIX; memory of a process that is gone, ESRCH
# = 3); it means nothing to a reader. sed and not awk, which would hold lines back.
exec 3> >(trap '' INT TERM HUP; exec sed -u -E -e '/^kinoe-rank [0-9]+ [0-9]+$/ { s/^kinoe-rank //; w '"$codes" -e 'd }' \
  -e '/^[OP]RTE (was unable to reliably start|has lost communication)/ { h; s/.*/unreachable/; w '"$codes" -e 'x }' \
  -e '/PMIX ERROR: .*pmix_event_notification/ d' -e '/Read -1, expected [0-9]+, errno = 3$/ d' >&2)
filter=$!
# In a session of its own: a signal from the terminal reaches mpirun once, through this script.
setsid "$mpirun" "${options[@]}" ${more[@]+"${more[@]}"} bash -c "$rank" kinoe-rank "$binary" "$@" 2>&3 3>&- 5>&- &
pid=$!
exec 3>&-
stopped=""
for signal in INT TERM HUP; do
  # shellcheck disable=SC2064
  trap "stopped=$signal; kill -$signal $pid 2>/dev/null" "$signal"
done
for signal in USR1 USR2; do
  # shellcheck disable=SC2064
  trap "kill -$signal $pid 2>/dev/null" "$signal"
done
list_codes() { awk '/^[0-9]/ { printf "%srank %d with %d", (NR > 1 ? ", " : ""), $1, $2 } END { print " (128 and more: by a signal)" }' "$codes"; }
# A stopped process hears nothing, and mpirun would wait for it: once ranks have failed, the rest gets this long. mpirun in
# turn waits for ever for a host that hears nothing, and at times after all ranks of several hosts have ended.
(while sleep 1; kill -0 "$pid" 2>/dev/null; do
  ended=$(grep -cE '^[0-9]' "$codes")
  if [ "$ended" -ge "$ranks" ] || grep -E '^[0-9]' "$codes" | grep -qvE ' (0|75)$'; then
    sleep $((ended < ranks ? 8 : 2))
    [ "$(grep -cE '^[0-9]' "$codes")" -lt "$ranks" ] && kill -0 "$pid" && echo "run_mpi.sh: ended: $(list_codes); the other ranks are stopped now" >&4
    kill -TERM "$pid"
    sleep 15
    [ "$ended" -lt "$ranks" ] && kill -0 "$pid" && echo "run_mpi.sh: mpirun waits for hosts that do not answer and is killed; processes may be left on them" >&4
    kill -KILL "$pid"
    break
  fi
done) 4>&2 >/dev/null 2>&1 &
watcher=$!
while wait "$pid" 2>/dev/null; status=$?; kill -0 "$pid" 2>/dev/null; do :; done
kill "$watcher" 2>/dev/null
wait "$filter"

# Rank 0 knows how the run ended, unless it is the one that was lost: then what the others say. "none": no rank said anything.
code=$(awk '
  $1 == "0" && $2 < 128 { first = $2; known = 1 }
  /^[1-9]/ && $2 < 128 && $2 > others { others = $2 }
  /^[0-9]/ { some = 1 }
  /^unreachable/ { far = 1 }
  END { print known ? first : others ? others : far ? "far" : some ? "signal" : "none" }' "$codes")
if [ -n "$stopped" ] && [[ ! $code =~ ^(0|75)$ ]]; then
  newest=""
  [ -z "$out" ] || newest=$(find "$out/checkpoints" -maxdepth 1 -name 'step_*' 2>/dev/null | grep 'step_[0-9]*$' | sort | tail -n 1)
  if [ -n "$newest" ]; then
    newest="the newest checkpoint is $newest: go on with --resume auto"
  elif [ -n "$out" ]; then
    newest="there is no checkpoint yet"
  else
    newest="--out DIR --resume auto goes on from the newest checkpoint"
  fi
  echo "run_mpi.sh: stopped by SIG$stopped, nothing was saved by that; $newest" >&2
  exit $((128 + $(kill -l "$stopped")))
fi
case $code in
  signal) echo "run_mpi.sh: error: ended: $(list_codes)" >&2 && code=5 ;;
  far) echo "run_mpi.sh: error: mpirun does not reach every host, see above; each must let this one in by ssh without a password" >&2 && code=5 ;;
  none)
    if [ "$status" -ge 128 ] || [ "$status" -eq 0 ]; then
      echo "run_mpi.sh: error: mpirun ended (exit code $status; 137: killed) before any rank said how it ended" >&2 && code=5
    else  # its options, for instance: it would refuse them again
      echo "run_mpi.sh: error: mpirun did not start the ranks (exit code $status); it says why above" >&2 && code=2
    fi ;;
esac
exit "$code"
