#!/usr/bin/env bash
# What this machine can build, found by compiling and linking a few lines: a package manager knows only what it
# installed itself.
#
#   scripts/probe.sh --key     a number that changes when the compilers or their flags change
#   scripts/probe.sh FILE      writes the answers to FILE as make variables, says what is off and why;
#                              exit 2 when something is missing without which nothing can be built
#
# scripts/setup.sh sources it for the functions. CXX, NVCC, MPICXX, CPPFLAGS and LDFLAGS are obeyed.

CXX=${CXX:-g++}
NVCC=${NVCC:-$(command -v nvcc || { [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] && echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; } || true)}
MPICXX=${MPICXX:-$(command -v mpicxx.openmpi || command -v mpicxx || true)}
# One binary for A100 (sm_80), H100 and H200 (sm_90a: wgmma and TMA), and PTX for what comes later.
NVCC_ARCH="-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=compute_80"

# Compiles and links standard input as C++20; flags follow. Output and messages go to $work/NAME{,.log}.
try_cxx() {
  local name=$1
  shift
  # shellcheck disable=SC2086
  $CXX -std=c++20 -x c++ ${CPPFLAGS:-} - -x none ${LDFLAGS:-} -o "$work/$name" "$@" >"$work/$name.log" 2>&1
}

# Every probe_NAME succeeds, and may print a version, when NAME can be used.
probe_cxx() {
  try_cxx cxx <<'SOURCE' && $CXX -dumpfullversion -dumpversion
#include <bit>
#include <concepts>
#if !defined(__clang__) && defined(__GNUC__) && __GNUC__ < 12
#error "g++ 12 or newer"
#endif
int main() { return std::bit_cast<int>(0.0F); }
SOURCE
}
probe_openmp() {
  try_cxx openmp -fopenmp <<'SOURCE'
#include <omp.h>
int main() { int n = 0;
#pragma omp parallel for reduction(+ : n)
  for (int i = 0; i < 9; ++i) n += i;
  return n + omp_get_max_threads() == 0; }
SOURCE
}
probe_cli11() {
  try_cxx cli11 <<'SOURCE' && "$work/cli11"
#include <CLI/Version.hpp>
#include <cstdio>
#if !__has_include(<CLI/CLI.hpp>)  // reading all of it takes seconds
#error "CLI/CLI.hpp"
#endif
#if CLI11_VERSION_MAJOR < 2 || (CLI11_VERSION_MAJOR == 2 && CLI11_VERSION_MINOR < 1)
#error "CLI11 2.1 or newer"
#endif
int main() { std::puts(CLI11_VERSION); }
SOURCE
}
probe_json() {
  try_cxx json <<'SOURCE' && "$work/json"
#include <nlohmann/json_fwd.hpp>
#include <nlohmann/detail/macro_scope.hpp>
#include <cstdio>
using json = nlohmann::ordered_json;  // since 3.9
int main() { std::printf("%d.%d.%d\n", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR, NLOHMANN_JSON_VERSION_PATCH); }
SOURCE
}
probe_xxhash() {
  try_cxx xxhash -lxxhash <<'SOURCE' && "$work/xxhash"
#include <xxhash.h>
#include <cstdio>
int main() { std::printf("%d.%d.%d\n", XXH_VERSION_MAJOR, XXH_VERSION_MINOR, XXH_VERSION_RELEASE); return XXH3_64bits("a", 1) == 0; }
SOURCE
}
probe_gtest() {
  try_cxx gtest -lgtest -lpthread <<'SOURCE'
#include <gtest/internal/gtest-port.h>  // reading all of gtest.h takes seconds
#ifndef GTEST_FLAG_SET
#error "GoogleTest 1.12 or newer"
#endif
namespace testing { void InitGoogleTest(); }
int main(int n, char**) { if (n > 1) testing::InitGoogleTest(); }
SOURCE
}
probe_mpi() {
  [ -n "$MPICXX" ] || return 1
  # The C++ bindings were removed from the standard; their headers only slow a build down.
  CXX=$MPICXX CPPFLAGS="${CPPFLAGS:-} -DOMPI_SKIP_MPICXX" try_cxx mpi <<'SOURCE' || return 1
#include <mpi.h>
#include <cstdio>
#ifndef OMPI_MAJOR_VERSION
#error "an MPI that is not Open MPI"
#endif
int main() { std::printf("%d.%d.%d\n", OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION); int yes; return MPI_Initialized(&yes); }
SOURCE
  "$work/mpi"
}
# The same through nvcc, which knows where CUDA's headers and libraries are. SUFFIX cpp: no device code, faster.
try_nvcc() {
  local name=$1 suffix=$2
  shift 2
  [ -n "$NVCC" ] || return 1
  cat >"$work/$name.$suffix"
  # shellcheck disable=SC2086
  $NVCC -std=c++20 -ccbin $CXX ${LDFLAGS:+-Xcompiler="$LDFLAGS"} "$work/$name.$suffix" -o "$work/$name" "$@" >"$work/$name.log" 2>&1
}
probe_nvcc() {
  # shellcheck disable=SC2086
  try_nvcc nvcc cu $NVCC_ARCH --threads 3 <<'SOURCE' && $NVCC --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'
#include <bit>
#include <cuda_bf16.h>
__global__ void twice(__nv_bfloat16* x) { x[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x]; }
int main() { twice<<<1, 32>>>(nullptr); return static_cast<int>(cudaGetLastError()); }
SOURCE
}
probe_cublaslt() {
  try_nvcc cublaslt cpp -lcublasLt <<'SOURCE'
#include <cublasLt.h>
int main() { return static_cast<int>(cublasLtGetVersion()); }
SOURCE
}
probe_nccl() {
  try_nvcc nccl cpp -lnccl <<'SOURCE' || return 1
#include <nccl.h>
#include <cstdio>
#if NCCL_VERSION_CODE < 21800
#error "NCCL 2.18 or newer"
#endif
int main(int n, char**) { std::printf("%d.%d.%d\n", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH); int v = 0; return n > 1 ? static_cast<int>(ncclGetVersion(&v)) : 0; }
SOURCE
  "$work/nccl" 2>/dev/null || true
}

all_probes="cxx openmp cli11 json xxhash gtest mpi nvcc cublaslt nccl"
required="cxx openmp cli11 json xxhash"  # of the binary; the tests also want gtest

# Runs the named probes side by side; `found NAME` and `version NAME` then answer.
run_probes() {
  work=$(mktemp -d "${TMPDIR:-/tmp}/kinoe-probe.XXXXXX") || exit 2
  trap 'rm -rf "$work"' EXIT
  local name
  for name in "$@"; do
    { probe_"$name" >"$work/$name.version" && : >"$work/$name.found"; } </dev/null 2>/dev/null &
  done
  wait
}
found() { [ -e "$work/$1.found" ]; }
version() { head -n 1 "$work/$1.version"; }

short_name_of() {
  case $1 in
    cxx) echo "$CXX" ;;
    openmp) echo "OpenMP" ;;
    *) title_of "$1" | sed 's/ [0-9.]* or newer$//' ;;
  esac
}
title_of() {
  case $1 in
    cxx) echo "a C++20 compiler ($CXX), g++ 12 or newer" ;;
    openmp) echo "OpenMP ($CXX -fopenmp)" ;;
    cli11) echo "CLI11 2.1 or newer" ;;
    json) echo "nlohmann-json 3.9 or newer" ;;
    xxhash) echo "xxHash" ;;
    gtest) echo "GoogleTest 1.12 or newer" ;;
    mpi) echo "Open MPI" ;;
    nvcc) echo "nvcc" ;;
    cublaslt) echo "cuBLASLt" ;;
    nccl) echo "NCCL 2.18 or newer" ;;
  esac
}

# What a missing NAME switches off; nothing is said of what depends on something else that is missing.
consequence_of() {
  case $1 in
    gtest) echo "the tests can not be built (scripts/setup.sh installs it)" ;;
    mpi) echo "one process only (scripts/setup.sh installs it)" ;;
    nvcc)
      if [ -z "$NVCC" ]; then
        echo "CPU only"
      else
        echo "$NVCC can not build for sm_80 and sm_90a (CUDA 12 or newer, a host compiler it knows): CPU only"
      fi ;;
    cublaslt) found nvcc && echo "no GPU code is built: CPU only" ;;
    nccl) found nvcc && found cublaslt && echo "one GPU per run" ;;
  esac
}

key() {
  {
    echo "$CXX|$NVCC|$MPICXX|${CPPFLAGS:-}|${LDFLAGS:-}"
    # shellcheck disable=SC2086
    stat -L -c '%n %Y' "$(command -v ${CXX%% *})" ${NVCC:+"$NVCC"} ${MPICXX:+"$MPICXX"} "${BASH_SOURCE[0]}" 2>/dev/null
  } | cksum | tr ' ' '-'
}

# One line of what was found, one line for everything that is off.
report() {
  local name line="" word
  for name in $all_probes; do found "$name" && line="$line, $(short_name_of "$name")$(version "$name" | sed 's/^/ /')"; done
  echo "found: ${line#, }"
  for name in $all_probes; do
    found "$name" && continue
    word=$(consequence_of "$name")
    [ -z "$word" ] || echo "missing: $(title_of "$name"): $word"
  done
}

write_probe_file() {
  local file=$1 name missing=""
  mkdir -p "$(dirname "$file")"
  {
    echo "# Written by scripts/probe.sh; remove it to look again."
    echo "PROBE_KEY := $(key)"
    for name in $all_probes; do
      echo "HAVE_$(echo "$name" | tr '[:lower:]' '[:upper:]') := $(found "$name" && echo 1)"
    done
    echo "NVCC := $NVCC"
    echo "NVCC_ARCH := $NVCC_ARCH"
    if found mpi; then
      echo "MPI_CPPFLAGS := -DOMPI_SKIP_MPICXX $($MPICXX --showme:compile)"
      echo "MPI_LIBS := $($MPICXX --showme:link | sed 's/-lmpi_cxx//')"
    fi
  } >"$file.new"
  report
  for name in $required; do found "$name" || missing="$missing, $(title_of "$name")"; done
  if [ -n "$missing" ]; then
    rm -f "$file.new"
    echo "missing: ${missing#, }. Run scripts/setup.sh, which installs what is missing." >&2
    return 2
  fi
  mv "$file.new" "$file"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  case ${1:-} in
    --key) key ;;
    "" | -*) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
    *)
      # shellcheck disable=SC2086
      run_probes $all_probes
      write_probe_file "$1" ;;
  esac
fi
