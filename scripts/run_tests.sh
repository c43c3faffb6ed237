#!/usr/bin/env bash
# Runs a GoogleTest binary as one process per core, shows the failures, ends with `N passed, N failed, N skipped`.
#
#   scripts/run_tests.sh build/host/kinoe_tests [GoogleTest options]
#
# Tests that drive the program read its absolute path from KINOE_BINARY (here: train_gpt beside the tests unless it is
# set). Each process has its own TEST_TMPDIR, removed when all went well. A test still running after KINOE_TEST_TIMEOUT
# seconds (default 1200) has failed; so has one that brings its process down, and then the tests that process had not
# reached. Exit 1 on any failure, or when no test ran.
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' scripts/run_tests.sh; exit 2; }
tests=$(realpath "$1")
shift
export KINOE_BINARY=${KINOE_BINARY:-$(dirname "$tests")/train_gpt}

cores=$(nproc)
shards=$cores
limit=${KINOE_TEST_TIMEOUT:-1200}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + shards - 1) / shards))}
export GTEST_TOTAL_SHARDS=$shards GTEST_COLOR=no
if [ -n "${KINOE_SANITIZE:-}" ]; then
  # Asking for more memory than there is must be an error of the program, as it is without the sanitizer.
  export ASAN_OPTIONS=${ASAN_OPTIONS:-allocator_may_return_null=1} UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
fi

top=$(mktemp -d "${TMPDIR:-/tmp}/kinoe-tests.XXXXXX") || exit 1
chmod 755 "$top"  # some tests look at it as an ordinary user
begin=$SECONDS
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; exit 130' INT TERM
for ((shard = 0; shard < shards; ++shard)); do
  mkdir "$top/$shard"
  # The trailing slash: GoogleTest before 1.13 gives it to tests as it is.
  TEST_TMPDIR="$top/$shard/" GTEST_SHARD_INDEX=$shard GTEST_SHARD_STATUS_FILE="$top/$shard.sharded" \
    timeout --kill-after=10 "$limit" "$tests" "$@" >"$top/$shard.log" 2>&1 </dev/null &
  pids+=($!)
done
codes=()
for pid in "${pids[@]}"; do
  wait "$pid"
  codes+=($?)
done

# Tells what a log says: `ok|failed|skipped NAME MILLISECONDS` for each test, `running NAME` for the one that
# never ended, `announced N`. Tests may print without a newline, so results are sought anywhere in a line.
results_of() {
  awk '
    match($0, /\[==========\] Running [0-9]+ tests? from/) { split(substr($0, RSTART), w, " "); print "announced", w[3] }
    match($0, /\[ RUN      \] [^ ]+$/) { split(substr($0, RSTART), w, " "); running = w[4] }
    match($0, /\[(       OK |  FAILED  |  SKIPPED )\] .* \([0-9]+ ms\)$/) {
      text = substr($0, RSTART); split(substr(text, 14), w, /[ ,]/); name = w[1]
      kind = text ~ /^\[       OK/ ? "ok" : text ~ /^\[  FAILED/ ? "failed" : "skipped"
      if (name == running) { match(text, /\([0-9]+ ms\)$/); print kind, name, substr(text, RSTART + 1) + 0; running = "" }
    }
    END { if (running != "") print "running", running }' "$1"
}

# The lines of a log from the start of a test to its end.
output_of() {
  awk -v name="$2" '
    index($0, "[ RUN      ] " name) && $NF == name { inside = 1 }
    inside { print "    " $0 }
    inside && /\[(       OK |  FAILED  |  SKIPPED )\] .* \([0-9]+ ms\)$/ && index($0, "] " name) { exit }' "$1" | head -n 80
}

passed=0 failed=0 skipped=0
for ((shard = 0; shard < shards; ++shard)); do
  log=$top/$shard.log code=${codes[shard]}
  [ "$shard" -eq 0 ] || [ -e "$top/$shard.sharded" ] || { echo "process $shard did not understand sharding: is this a GoogleTest binary?"; failed=$((failed + 1)); }
  results_of "$log" >"$top/$shard.results"
  reported=0 announced=0 shard_failed=0
  while read -r kind name _; do
    case $kind in
      announced) announced=$name ;;
      ok) passed=$((passed + 1)) reported=$((reported + 1)) ;;
      skipped)
        skipped=$((skipped + 1)) reported=$((reported + 1))
        printf '%s\t%s\n' "$(output_of "$log" "$name" | sed -n '/: Skipped$/{n;s/^ *//p;q}')" "$name" >>"$top/skipped" ;;
      failed)
        shard_failed=$((shard_failed + 1)) reported=$((reported + 1))
        echo "FAILED: $name"
        output_of "$log" "$name" ;;
      running)
        shard_failed=$((shard_failed + 1)) reported=$((reported + 1))
        case $code in
          124 | 137) echo "FAILED: $name: still running after $limit s" ;;
          *) echo "FAILED: $name: ended its process (exit status $code)" ;;
        esac
        output_of "$log" "$name" ;;
    esac
  done <"$top/$shard.results"
  if [ "$reported" -lt "$announced" ]; then
    echo "FAILED: $((announced - reported)) tests that process $shard never reached"
    shard_failed=$((shard_failed + announced - reported))
  fi
  if [ "$code" -ne 0 ] && [ "$shard_failed" -eq 0 ]; then
    echo "FAILED: process $shard ended with status $code outside any test:"
    tail -n 20 "$log" | sed 's/^/    /'
    shard_failed=1
  fi
  failed=$((failed + shard_failed))
done

if [ -e "$top/skipped" ]; then
  sort "$top/skipped" | awk -F '\t' '
    function flush() { if (n) print "skipped " n ": " reason ": " names (n > 3 ? " ..." : "") }
    $1 != reason { flush(); reason = $1; n = 0; names = "" }
    { if (n++ < 3) names = names (n > 1 ? ", " : "") $2 }
    END { flush() }'
fi
echo "slowest: $(sort -k3 -n -r "$top"/*.results | awk '/^(ok|failed) / && n++ < 5 { printf "%s%s %.1f s", (n > 1 ? ", " : ""), $2, $3 / 1000 }')"
echo "$((SECONDS - begin)) s in $shards processes"
if [ "$failed" -eq 0 ]; then
  rm -rf "$top"
else
  echo "logs and temporary files of the tests: $top"
fi
if [ $((passed + failed + skipped)) -eq 0 ]; then echo "no test ran"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
