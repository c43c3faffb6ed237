#!/usr/bin/env bash
# All that is checked without running anything: formatting, clang-tidy on host code, layers, scripts. Every stage runs
# even when one before it failed; exit 1 if any did. `make lint` calls it after scripts/setup.sh --lint.
set -u
cd "$(dirname "$0")/.." || exit 2
failures=""

stage() {  # NAME COMMAND...
  local name=$1 begin=$SECONDS
  shift
  if "$@"; then
    echo "lint: $name: clean, $((SECONDS - begin)) s"
  else
    echo "lint: $name: FAILED, $((SECONDS - begin)) s"
    failures="$failures $name"
  fi
}

sources() { find kernels dataloader trainer test dev train_gpt.cu -type f \( "$@" \) 2>/dev/null | LC_ALL=C sort; }

# Versions of clang-format disagree about lambdas; the repository is as version 14 wants it, and another version can
# not judge.
format() {
  local tool
  tool=$(command -v clang-format-14 || command -v clang-format)
  case $("$tool" --version) in
    *" 14."*) ;;
    *) echo "lint: NOT CHECKED: $("$tool" --version), but the formatting is that of clang-format 14"; return 0 ;;
  esac
  sources -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs -d '\n' -r "$tool" --dry-run --Werror
}

# Tests are left to the compiler's warnings: GoogleTest's macros would take half of the time.
tidy() {
  local openmp optional="" nvcc without='^$'
  # What uses MPI and NCCL can be looked at where their headers are.
  optional=$(sed -n 's/^MPI_CPPFLAGS := //p' build/probe.mk)
  [ -n "$optional" ] || without='_mpi\.cpp$'
  nvcc=$(sed -n 's/^NVCC := //p' build/probe.mk)
  if grep -q '^HAVE_NCCL := 1' build/probe.mk; then optional="$optional -isystem $(dirname "$(realpath "$nvcc")")/../include"; else without="$without|_nccl\.cpp$"; fi
  openmp=$(${CXX:-g++} -print-file-name=include)  # omp.h of the compiler that builds
  command -v clang-tidy >/dev/null || { echo "clang-tidy was not found"; return 1; }
  { sources -name '*.cpp' | grep -v '^test/' | grep -vE "$without"; ls train_gpt.cu; } |
    xargs -d '\n' -P "$(nproc)" -I FILE bash -c '
      out=$(clang-tidy --quiet "$1" -- -x c++ -std=c++20 -fopenmp -idirafter "$2" -I. -DKINOE_WITH_CUDA=0 $3 2>&1) || {
        printf "%s\n" "$out" | grep -v " warnings\{0,1\} \(generated\|treated as\)"
        exit 1
      }' tidy FILE "$openmp" "$optional"
}

layers() { scripts/check_layers.sh --self-test && scripts/check_layers.sh; }

shell_syntax() {
  local file code=0
  for file in scripts/*.sh scripts/*.sbatch .ci/run $(find test dev -name '*.sh' 2>/dev/null); do
    bash -n "$file" || code=1
    [ -x "$file" ] || { echo "$file is not executable"; code=1; }
  done
  return $code
}

stage format format
stage tidy tidy
stage layers layers
stage shell shell_syntax
if [ -n "$failures" ]; then
  echo "lint: FAILED:$failures"
  exit 1
fi
echo "lint: clean"
