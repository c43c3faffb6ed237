# Kinoe's build. What is on this machine is found by compiling a few lines (scripts/probe.sh) and remembered in
# build/probe.mk.
#
#   make           ./train_gpt with everything this machine can build: CUDA where there is nvcc
#   make demo      installs what is missing, builds, trains a small GPT and shows what it learned
#   make test      installs what is missing, builds, runs all tests
#   make parity    compares every family with PyTorch, in a virtual environment of its own under build/
#   make bench     builds dev/bench_kernels and times every operation; ARGS="--filter adamw", ARGS=--help
#   make fuzz      feeds damaged files to every reader for FUZZ_SECONDS (default 30) in all; needs clang
#   make lint      formatting, clang-tidy, layers, scripts; warnings are errors
#   make clean     removes build/ and ./train_gpt
#
#   CUDA=0 MPI=0   leave that out, even where it is found        CUDA=1   fail when it is not found (NCCL goes with CUDA)
#   SAN=1          address and undefined-behaviour sanitizers over the program (not the tests' own code), in build/asan; CPU only
#   WERROR=1       warnings are errors (a register spill of a CUDA kernel is a warning)
#   V=1            show the commands
#   CXX NVCC MPICXX CPPFLAGS CXXFLAGS NVCCFLAGS LDFLAGS are obeyed.
#
# The targets above call make again for `binary` and `tests`, so that setting up comes before probing and all cores
# are used without -j.

SHELL := /bin/bash
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

CXX := $(if $(filter default,$(origin CXX)),g++,$(CXX))
export CXX NVCC MPICXX CPPFLAGS LDFLAGS MPI
Q := $(if $(V),,@)

# ---------------------------------------------------------------------------------------------- targets
.PHONY: all demo test parity bench fuzz lint clean binary tests test-objects cuda run-demo run-tests run-parity run-bench
PARALLEL = $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j$(shell nproc))

all:
	@$(MAKE) $(PARALLEL) binary

# Where there is nvcc but no GPU, compiling kernels that nothing here can run would only cost minutes.
HOST_ONLY = $(if $(CUDA),,$(shell [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1 || echo CUDA=0))

demo:
	@scripts/setup.sh
	@$(MAKE) $(PARALLEL) $(HOST_ONLY) run-demo

test:
	@scripts/setup.sh
	@$(MAKE) $(PARALLEL) $(HOST_ONLY) run-tests

bench:
	@$(MAKE) $(PARALLEL) $(HOST_ONLY) run-bench

# Ends with a failure and the damaged file's name when a reader does anything but read or refuse.
FUZZ_SECONDS ?= 30
fuzz:
	@scripts/setup.sh --fuzz
	@$(MAKE) $(PARALLEL) CUDA=0 FUZZ=1 build/fuzz/fuzz_readers
	@scripts/fuzz.sh build/fuzz/fuzz_readers $(FUZZ_SECONDS)

parity:
	@scripts/setup.sh
	@$(MAKE) $(PARALLEL) CUDA=0 run-parity

lint:
	@scripts/setup.sh --lint
	@scripts/lint.sh

clean:
	rm -rf build train_gpt compile_commands.json

# ---------------------------------------------------------------------------------------------- building
ifneq ($(filter build/% binary tests test-objects cuda run-demo run-tests run-parity run-bench,$(MAKECMDGOALS)),)

include build/probe.mk
# Looked at again when the compilers change, or when the tests want a GoogleTest that was not there. (Not by .PHONY:
# make would not read a phony makefile again.)
ifndef MAKE_RESTARTS
ifneq ($(PROBE_KEY),$(shell scripts/probe.sh --key))
build/probe.mk: FORCE
PROBING := 1
endif
ifneq ($(filter tests test-objects cuda run-tests,$(MAKECMDGOALS)),)
ifneq ($(HAVE_GTEST),1)
build/probe.mk: FORCE
endif
endif
endif
build/probe.mk: scripts/probe.sh
	@scripts/probe.sh $@

CUDA_SOURCES := $(wildcard kernels/*.cu kernels/common/*.cu)
CUDA_FOUND := $(and $(HAVE_NVCC),$(HAVE_CUBLASLT))
ifeq ($(CUDA)|$(CUDA_FOUND)|$(PROBING),1||)
$(error CUDA=1, but nvcc with cuBLASLt was not found: put nvcc on the PATH, or give NVCC=/path/to/nvcc)
endif
# The backend as a whole stands and falls with its device layer.
USE_CUDA := $(if $(or $(filter 0,$(CUDA)),$(SAN)),,$(and $(CUDA_FOUND),$(wildcard kernels/common/device.cu)))

VARIANT := $(if $(FUZZ),fuzz,$(if $(SAN),asan,$(if $(USE_CUDA),cuda,host)))
B := build/$(VARIANT)

# The readers need no other process.
USE_MPI := $(if $(or $(filter 0,$(MPI)),$(FUZZ)),,$(HAVE_MPI))
USE_NCCL := $(and $(USE_CUDA),$(HAVE_NCCL))

# An optional part is in files *_PART.cpp, what is said without it in files *_PART_fallback.cpp: one of the two is
# compiled. (CUDA's part is *.cu.)
LEFT_OUT := $(if $(USE_CUDA),%_cuda_fallback.cpp) $(if $(USE_MPI),%_mpi_fallback.cpp,%_mpi.cpp) \
  $(if $(USE_NCCL),%_nccl_fallback.cpp,%_nccl.cpp)
SOURCES := $(wildcard kernels/*.cpp kernels/common/*.cpp dataloader/*.cpp trainer/*.cpp)
SOURCES := $(filter-out $(LEFT_OUT),$(SOURCES))
TEST_SOURCES := $(filter-out $(LEFT_OUT),$(wildcard test/*.cpp)) test/fuzz/readers.cpp
BENCH_SOURCES := $(wildcard dev/bench*.cpp dev/bench/*.cpp)

CUDA_OBJECTS := $(CUDA_SOURCES:%.cu=$B/%.cu.o)
OBJECTS := $(SOURCES:%.cpp=$B/%.o) $(if $(USE_CUDA),$(CUDA_OBJECTS))
FUZZ_OBJECTS := $(patsubst %.cpp,$B/%.o,test/fuzz/fuzz.cpp test/fuzz/readers.cpp \
  $(filter-out dataloader/loader%,$(wildcard dataloader/*.cpp)) $(filter-out trainer/config_resolve.cpp,$(wildcard $(addprefix trainer/,config*.cpp model_config*.cpp safetensors*.cpp files*.cpp))))
TEST_OBJECTS := $(TEST_SOURCES:%.cpp=$(if $(SAN),build/host,$B)/%.o)
BENCH_OBJECTS := $(BENCH_SOURCES:%.cpp=$B/%.o)

OPTIMIZE := -O3
ifdef SAN
# The check of vptr opens a pipe to see whether memory can be read, so that it is wrong where a test leaves no file to open.
OPTIMIZE := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all
# Resolvers of cloned functions run before the sanitizer does.
DEFINES := -DKINOE_NO_SIMD
endif
DEFINES += -DKINOE_WITH_CUDA=$(if $(USE_CUDA),1,0)
# -Wrestrict of g++ 12 is wrong about std::string (GCC bug 105651).
WARNINGS := -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wno-restrict $(if $(WERROR),-Werror)
COMPILE := $(CXX) -std=c++20 $(OPTIMIZE) -fno-math-errno -fno-trapping-math -fopenmp -I. $(DEFINES) $(WARNINGS) $(CPPFLAGS) $(CXXFLAGS)
ifdef FUZZ
# libFuzzer belongs to clang. The readers use no OpenMP, and g++ has judged the warnings.
FUZZ_CXX ?= clang++
COMPILE := $(FUZZ_CXX) -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all \
  -I. -DKINOE_NO_SIMD -DKINOE_WITH_CUDA=0 -w $(CPPFLAGS)
endif
# The tests' own code is run once: optimizing it less saves more time than it costs.
COMPILE_TEST := $(COMPILE:-O3=-O1)
comma := ,
COMPILE_CUDA := $(NVCC) -ccbin $(CXX) -std=c++20 -O3 $(NVCC_ARCH) --threads 3 --expt-relaxed-constexpr -lineinfo \
  -Xptxas=--warn-on-spills $(if $(WERROR),-Werror all-warnings) -I. -DKINOE_WITH_CUDA=1 \
  $(patsubst %,-Xcompiler=%,-fopenmp $(WARNINGS)) $(CPPFLAGS) $(NVCCFLAGS)

COMPILE_CUDA_HOST := $(NVCC) -ccbin $(CXX) -std=c++20 -O3 -I. -DKINOE_WITH_CUDA=1 $(patsubst %,-Xcompiler=%,-fopenmp $(WARNINGS)) $(CPPFLAGS) $(NVCCFLAGS)

LIBS := -lxxhash -lpthread
CUDA_LIB_DIRS := $(wildcard $(addprefix $(realpath $(dir $(NVCC))..)/,lib64 lib))
# nvcc knows where its libraries are; the run path spares the user LD_LIBRARY_PATH.
LINK := $(if $(USE_CUDA),$(NVCC) -ccbin $(CXX) -Xcompiler=-fopenmp $(patsubst %,-Xlinker=-rpath=%,$(firstword $(CUDA_LIB_DIRS))) $(addprefix -Xcompiler=,$(LDFLAGS)),$(CXX) $(OPTIMIZE) -fopenmp $(LDFLAGS))
LIBS += $(if $(USE_CUDA),-lcublasLt -ldl) $(if $(USE_NCCL),-lnccl)
# Options for the linker and for g++ have other names where nvcc links.
LIBS += $(if $(USE_MPI),$(if $(USE_CUDA),$(patsubst -pthread,,$(patsubst -Wl$(comma)%,-Xlinker=%,$(MPI_LIBS))),$(MPI_LIBS)))

binary: $B/train_gpt
	@$(if $(SAN),true,cmp -s $< train_gpt || { rm -f train_gpt; ln $< train_gpt 2>/dev/null || cp $< train_gpt; })
	@echo "built $(if $(SAN),$<,./train_gpt): $(if $(USE_CUDA),CUDA for sm_80$(comma) sm_90a and later,CPU only)$(if $(USE_NCCL),$(comma) NCCL)$(if $(USE_MPI),$(comma) MPI)"

tests: $B/kinoe_tests

test-objects: $(TEST_OBJECTS)

# Every CUDA file, the programs with them and the GPU's tests (not linked with all others: only a GPU can run them): what
# `.ci/run` builds where no GPU is.
cuda: $(CUDA_OBJECTS) $(if $(USE_CUDA),binary $(filter %_gpu_test.o,$(TEST_OBJECTS)) $(addprefix $B/,bench_kernels dump_operations bench_epilogues bench_attention))

run-demo: binary
	@scripts/demo.sh

run-tests: binary tests
	@KINOE_BINARY=$(CURDIR)/$B/train_gpt $(if $(SAN),KINOE_SANITIZE=1) scripts/run_tests.sh $B/kinoe_tests

run-parity: $B/train_gpt $B/parity_dump
	@test/parity/run.sh $B $(ARGS)

run-bench: $B/bench_kernels
	@$B/bench_kernels $(ARGS)

$B/train_gpt: $B/train_gpt.o $(OBJECTS) $B/link.command
	@echo "  LINK  $@"
	$(Q)$(LINK) $(filter %.o,$^) $(LIBS) -o $@

# What test/parity/parity.py compares with PyTorch.
$B/parity_dump: $B/test/parity/dump.o $(OBJECTS) $B/link.command
	@echo "  LINK  $@"
	$(Q)$(LINK) $(filter %.o,$^) $(LIBS) -o $@

$B/bench_kernels: $(BENCH_OBJECTS) $(OBJECTS) $B/link.command
	@echo "  LINK  $@"
	$(Q)$(LINK) $(filter %.o,$^) $(LIBS) -o $@

# Epilogues of cuBLASLt beside kernels, and attention in other tile shapes: make build/cuda/bench_epilogues
$B/bench_epilogues $B/bench_attention: $B/%: $B/dev/%.cu.o $B/dev/bench/measure.o $B/dev/bench/reference.o $B/dev/bench/workspace.o \
    $(OBJECTS) $B/link.command
	@echo "  LINK  $@"
	$(Q)$(LINK) $(filter %.o,$^) $(LIBS) -o $@

# Every operation's inputs and outputs, for dev/peers/torch_error.py: make build/cuda/dump_operations
$B/dump_operations: $B/dev/dump_operations.o $B/dev/bench/workspace.o $(OBJECTS) $B/link.command
	@echo "  LINK  $@"
	$(Q)$(LINK) $(filter %.o,$^) $(LIBS) -o $@

$B/fuzz_readers: $(FUZZ_OBJECTS) $B/link.command
	@echo "  LINK  $@"
	$(Q)$(FUZZ_CXX) -fsanitize=fuzzer,address,undefined $(filter %.o,$^) $(LIBS) -o $@

$B/kinoe_tests: $(OBJECTS) $(TEST_OBJECTS) $B/link.command
	$(if $(HAVE_GTEST),,$(error GoogleTest 1.12 or newer was not found: run scripts/setup.sh))
	@echo "  LINK  $@"
	$(Q)$(LINK) $(filter %.o,$^) -lgtest -lgtest_main $(LIBS) -o $@

# What sanitizers judge is the program; instrumenting the tests' own code would take longer than all else together. Of a
# function that both hold the first one is linked: the program's.
ifdef SAN
$(TEST_OBJECTS): host-test-objects ;
.PHONY: host-test-objects
host-test-objects:
	@$(MAKE) SAN= CUDA=0 test-objects
endif

$B/%.o: %.cpp $B/compile.command
	@echo "  C++   $<"
	@mkdir -p $(@D)
	$(Q)$(COMPILE) $(LEVEL) $(DEFINE_COMMIT) -MMD -MP -c $< -o $@

# Under sanitizers only kernels and stories run long enough to be worth optimizing.
ifdef SAN
$B/trainer/%.o: LEVEL := -O0
endif

# Only what uses MPI and NCCL sees their headers. nvcc knows where CUDA's are, and g++ compiles for it.
$B/%_mpi.o: private COMPILE += $(MPI_CPPFLAGS)
$B/%_mpi.o: private COMPILE_TEST += $(MPI_CPPFLAGS)
$B/%_nccl.o: %_nccl.cpp $B/compile.command
	@echo "  C++   $<"
	@mkdir -p $(@D)
	$(Q)$(COMPILE_CUDA_HOST) -MMD -MP -c $< -o $@

# A run records the commit it was built from.
COMMIT := $(if $(wildcard .git),$(shell git describe --always --dirty --abbrev=12 2>/dev/null))
$B/trainer/monitor_run.o: DEFINE_COMMIT = $(if $(COMMIT),-DKINOE_COMMIT='"$(COMMIT)"')
$B/trainer/monitor_run.o: $B/commit.command

# Reading GoogleTest's header takes longer than compiling many a test, so it is read once. ccache does that by itself.
PRECOMPILED := $(if $(or $(FUZZ),$(findstring ccache,$(CXX))),,$(if $(HAVE_GTEST),$B/test/precompiled.h))
$B/test/precompiled.h.gch: $B/compile.command
	@echo "  C++   gtest/gtest.h"
	@mkdir -p $(@D)
	@echo '#include <gtest/gtest.h>' >$(@:.gch=)
	$(Q)$(COMPILE_TEST) -x c++-header $(@:.gch=) -o $@

$B/test/%.o: test/%.cpp $B/compile.command $(PRECOMPILED:%=%.gch)
	@echo "  C++   $<"
	@mkdir -p $(@D)
	$(Q)$(COMPILE_TEST) $(PRECOMPILED:%=-include %) -MMD -MP -c $< -o $@

# main() is host code whatever its name says; it is compiled the same way with and without nvcc.
$B/train_gpt.o: train_gpt.cu $B/compile.command
	@echo "  C++   $<"
	$(Q)$(COMPILE) -MMD -MP -x c++ -c $< -o $@

# Some thirty kernels of which a GPU runs three: for one architecture only.
$B/dev/bench_attention.cu.o: private COMPILE_CUDA := $(subst $(NVCC_ARCH),-gencode arch=compute_90a$(comma)code=sm_90a,$(COMPILE_CUDA))

$B/%.cu.o: %.cu $B/compile.command
	@echo "  CUDA  $<"
	@mkdir -p $(@D)
	$(Q)$(COMPILE_CUDA) -MMD -MP -c $< -o $@

# Files that hold a command line, rewritten when it changes: what depends on them is then made again.
$B/compile.command: COMMAND = $(COMPILE) $(MPI_CPPFLAGS) $(if $(CUDA_FOUND),$(COMPILE_CUDA))
$B/commit.command: COMMAND = $(COMMIT)
$B/link.command: COMMAND = $(LINK) $(LIBS) $(OBJECTS) $(TEST_OBJECTS) $(BENCH_OBJECTS)
$B/%.command: FORCE
	@mkdir -p $(@D)
	@echo '$(COMMAND)' | cmp -s - $@ || echo '$(COMMAND)' >$@
.PHONY: FORCE

-include $(patsubst %.o,%.d,$(OBJECTS) $(CUDA_OBJECTS) $(TEST_OBJECTS) $(BENCH_OBJECTS) $(FUZZ_OBJECTS) $B/train_gpt.o \
  $B/dev/dump_operations.o $B/dev/bench_epilogues.cu.o $B/dev/bench_attention.cu.o $B/test/parity/dump.o)

endif
