#!/usr/bin/env bash
# Installs what the build needs and this machine lacks; does nothing when nothing is missing.
#
#   scripts/setup.sh           to build and test
#   scripts/setup.sh --lint    also clang-format and clang-tidy, for `make lint`
#   scripts/setup.sh --fuzz    also clang with libFuzzer, for `make fuzz`
#   scripts/setup.sh --slurm   also Slurm's daemons, for test/slurm_test.sh
#   MPI=0 in the environment   Open MPI is not wanted
#
# What is missing is found by compiling (scripts/probe.sh), so libraries installed by hand count. Packages come from
# apt, as root. CUDA and NCCL are only looked for: they belong to the machine's driver. Exit 2: something is missing
# that this script can not install; the last line says what to run.
set -u
cd "$(dirname "$0")/.." || exit 2
# shellcheck source=scripts/probe.sh
. scripts/probe.sh

lint="" fuzz="" slurm=""
for argument in "$@"; do
  case $argument in
    --lint) lint=1 ;;
    --fuzz) fuzz=1 ;;
    --slurm) slurm=1 ;;
    *) sed -n '2,12s/^# \{0,1\}//p' scripts/setup.sh; exit 2 ;;
  esac
done

package_of() {
  case $1 in
    cxx | openmp) echo g++ ;;
    cli11) echo libcli11-dev ;;
    json) echo nlohmann-json3-dev ;;
    xxhash) echo libxxhash-dev ;;
    gtest) echo libgtest-dev ;;
    mpi) echo libopenmpi-dev openmpi-bin ;;
    # The formatting is that of clang-format 14; newer ones differ (see scripts/lint.sh).
    clang-format) apt-cache policy clang-format-14 2>/dev/null | grep -q '^  Candidate: [^(]' && echo clang-format-14 || echo clang-format ;;
    clang) echo clang libclang-rt-dev ;;
    make | clang-tidy | slurmctld | slurmd) echo "$1" ;;
    munged) echo munge ;;
    sbatch) echo slurm-client ;;
  esac
}

# Fills `missing` (names without which nothing can be built or tested) and `wanted` (names that are of use).
look() {
  local name
  # shellcheck disable=SC2086
  run_probes $all_probes
  missing="" wanted=""
  for name in $required gtest; do found "$name" || missing="$missing $name"; done
  for name in make ${lint:+clang-format clang-tidy} ${slurm:+slurmctld slurmd munged sbatch}; do
    command -v "$name" >/dev/null || command -v "$name-14" >/dev/null || missing="$missing $name"
  done
  [ -z "$fuzz" ] || can_fuzz || missing="$missing clang"
  [ "${MPI:-}" = 0 ] || found mpi || wanted=mpi
}

# clang++ that links libFuzzer and the sanitizers; Debian has them in a package of their own.
can_fuzz() {
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    ${FUZZ_CXX:-clang++} -x c++ - -fsanitize=fuzzer,address,undefined -o "$work/fuzz" 2>/dev/null
}

packages_of() {
  local name
  for name in "$@"; do package_of "$name"; done | tr ' ' '\n' | sort -u | tr '\n' ' '
}

# apt-get install PACKAGES. The lists are fetched, at most once, when they do not know a package or when a download
# fails, since old lists name files that are gone.
updated=""
update() {
  [ -z "$updated" ] || return 1
  updated=1
  run apt-get -q -o DPkg::Lock::Timeout=300 -o APT::Update::Error-Mode=any update
}
install() {
  local package
  for package in "$@"; do
    apt-cache policy "$package" 2>/dev/null | grep -q '^  Candidate: [^(]' || { update; break; }
  done
  run_install "$@" || { update && run_install "$@"; }
}
run_install() { run apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"; }

# Says the command, shows its output only when it fails.
run() {
  local begin=$SECONDS log
  echo "setup: $*"
  log=$(mktemp) || return 1
  if DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1 </dev/null; then
    rm -f "$log"
    [ $((SECONDS - begin)) -lt 5 ] || echo "setup: done in $((SECONDS - begin)) s"
  else
    tail -n 20 "$log" >&2
    rm -f "$log"
    return 1
  fi
}

give_up() {
  local name
  for name in $missing; do echo "setup: missing: $(title_of "$name" | grep . || echo "$name")" >&2; done
  echo "setup: $1" >&2
  exit 2
}

look
if [ -n "$missing$wanted" ]; then
  # shellcheck disable=SC2086
  packages=$(packages_of $missing $wanted)
  sudo=$([ "$(id -u)" -eq 0 ] || echo "sudo ")
  by_hand="${sudo}apt-get update && ${sudo}apt-get install -y $packages"
  if ! command -v apt-get >/dev/null; then
    [ -z "$missing" ] || give_up "there is no apt-get here; install these with this system's own tool, then run the same again"
    echo "setup: without Open MPI: one process only"
  elif [ "$(id -u)" -ne 0 ]; then
    [ -z "$missing" ] || give_up "this needs root; run: $by_hand"
    echo "setup: without Open MPI: one process only. To add it: $by_hand"
  else
    # What is only of use must not stop the rest.
    # shellcheck disable=SC2086,SC2046
    install $packages || { [ -n "$wanted" ] && [ -n "$missing" ] && install $(packages_of $missing); } ||
      [ -z "$missing" ] || give_up "apt-get failed, see above (no network?); once it works run: $by_hand"
    rm -rf "$work"
    hash -r
    MPICXX=$(command -v mpicxx.openmpi || command -v mpicxx || true)
    look
    [ -z "$missing" ] || give_up "installed, but still not usable. With an older g++: apt-get install g++-12, then make CXX=g++-12"
  fi
fi
write_probe_file build/probe.mk
