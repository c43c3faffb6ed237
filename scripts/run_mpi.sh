#!/usr/bin/env bash
# Trains with several ranks, started by Open MPI's mpirun.
#
#   scripts/run_mpi.sh N [train_gpt options]              N ranks on this host (one per GPU)
#   HOSTS=a:8,b:8 scripts/run_mpi.sh 16 [options]         over several hosts, at most so many ranks on each
#
# Ends with the exit code of the run (0 finished, 75 stopped with a checkpoint, 5 a rank was lost, ...: README.md) and
# starts nothing again: a script around it may do so on 75. MPIRUN and KINOE_BINARY name other programs than `mpirun`
# and train_gpt beside this script; MPIRUN_OPTIONS are given to mpirun (as words).
#
# --enable-recovery lets the ranks that are left say who was lost; mpirun alone would kill them first. With it mpirun
# itself always ends with 0, so every rank reports its own code on standard error, where this script picks it up.
set -u

here=$(cd "$(dirname "$0")/.." && pwd)
ranks=${1:-}
if [[ ! $ranks =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi
shift
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

codes=$(mktemp "${TMPDIR:-/tmp}/kinoe-codes.XXXXXX") || exit 2
trap 'rm -f "$codes"' EXIT
# Open MPI 4 complains to itself (PMIX) when a process ends in the middle of a run; it means nothing to a reader. sed and
# not awk, which would hold lines back.
exec 3> >(trap '' INT TERM HUP; exec sed -u -E -e '/^kinoe-rank [0-9]+ [0-9]+$/ { s/^kinoe-rank //; w '"$codes" -e 'd }' \
  -e '/PMIX ERROR: .*pmix_event_notification/ d' >&2)
filter=$!
# In a session of its own: a signal from the terminal reaches mpirun once, through this script.
setsid "$mpirun" "${options[@]}" ${more[@]+"${more[@]}"} bash -c "$rank" kinoe-rank "$binary" "$@" 2>&3 3>&- &
pid=$!
exec 3>&-
for signal in INT TERM HUP USR1 USR2; do
  # shellcheck disable=SC2064
  trap "kill -$signal $pid 2>/dev/null" "$signal"
done
# A stopped process hears nothing, and mpirun would wait for it: once ranks have failed, the rest gets this long.
(while sleep 1; kill -0 "$pid" 2>/dev/null; do
  if grep -qvE ' (0|75)$' "$codes"; then
    sleep 8
    ended=$(awk '{ printf "%srank %d with %d", (NR > 1 ? ", " : ""), $1, $2 }' "$codes")
    kill -TERM "$pid" && echo "run_mpi.sh: ended: $ended (128 and more: by a signal); the other ranks are stopped now" >&4
    break
  fi
done) 4>&2 >/dev/null 2>&1 &
watcher=$!
while wait "$pid"; status=$?; kill -0 "$pid" 2>/dev/null; do :; done
kill "$watcher" 2>/dev/null
wait "$filter"

# Rank 0 knows how the run ended, unless it is the one that was lost: then what the others say.
exit "$(awk -v status="$status" '
  $1 == 0 && $2 < 128 { first = $2; known = 1 }
  $1 != 0 && $2 < 128 && $2 > others { others = $2 }
  END { print known ? first : others ? others : NR ? 5 : status ? status : 5 }' "$codes")"
