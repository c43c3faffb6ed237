#!/usr/bin/env bash
# Feeds damaged files to every reader of test/fuzz/readers.h, SECONDS in all, one after the other. Inputs that reach
# something new are kept in build/fuzz/found/READER, so that the next run goes on from there; what breaks a reader is
# kept beside it as crash-*, timeout-*, oom-* and is a failure. The same bytes under test/fuzz/corpus/READER become a test.
#
#   scripts/fuzz.sh build/fuzz/fuzz_readers SECONDS [READER...]
set -u
cd "$(dirname "$0")/.." || exit 2
[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' scripts/fuzz.sh; exit 2; }
fuzzer=$1 seconds=$2
shift 2
readers=${*:-$(ls test/fuzz/corpus)}
each=$((seconds / $(wc -w <<<"$readers")))
failed=""
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm  # a file is written for each input
for reader in $readers; do
  found=build/fuzz/found/$reader
  mkdir -p "$found"
  # An input above 4 KiB reaches nothing that a shorter one does not; ten seconds (of a busy machine) or 512 MiB for one are a fault.
  KINOE_FUZZ_READER=$reader "$fuzzer" -max_total_time=$((each > 0 ? each : 1)) -max_len=4096 -timeout=10 -rss_limit_mb=512 \
    -malloc_limit_mb=64 -print_final_stats=1 -artifact_prefix="$found-" "$found" "test/fuzz/corpus/$reader" >"$found.log" 2>&1
  code=$?
  echo "fuzz: $reader: $(sed -n 's/^stat::number_of_executed_units: *//p' "$found.log") inputs in $each s, $(find "$found" -type f | wc -l) kept$([ $code -eq 0 ] || echo ", FAILED")"
  [ $code -eq 0 ] || { failed="$failed $reader"; grep -E 'ERROR|error|Error|what\(\)|SUMMARY|Test unit written' "$found.log" | head -n 12; }
done
[ -z "$failed" ] || { echo "fuzz: FAILED:$failed; the whole story is in build/fuzz/found/*.log"; exit 1; }
