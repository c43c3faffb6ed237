// Defaults that depend on the model and the machine, and the checks that need to know them.
//
// Learning rate and batch by size of model: T. Brown et al., "Language models are few-shot learners", 2020, table 2.1
// (arXiv:2005.14165); below 10 M parameters our own.

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "kernels/common/gpu_driver.h"
#include "trainer/config.h"

namespace kinoe {
namespace {

struct BySize {
  int64_t parameters_below;
  double lr;
  int64_t tokens_per_step;
  int64_t steps;
};
constexpr BySize kBySize[] = {
    {300'000, 6e-3, 512, 3600},
    {10'000'000, 2e-3, 4096, 1000},
    {200'000'000, 6e-4, 1 << 19, 1000},
    {500'000'000, 3e-4, 1 << 19, 1000},
    {1'000'000'000, 2.5e-4, 1 << 19, 1000},
    {2'000'000'000, 2e-4, 1 << 20, 1000},
    {5'000'000'000, 1.6e-4, 1 << 20, 1000},
    {INT64_MAX, 1.2e-4, 1 << 21, 1000},
};
constexpr int64_t kSmall = 10'000'000;  // parameters; up to here a CPU is quick
constexpr int64_t kSmallStep = 4096;    // tokens
constexpr int64_t kDefaultSeqLen = 1024;
constexpr int64_t kMaxDefaultWarmup = 375'000'000;  // tokens, as in the paper

const BySize& by_size(int64_t parameters) {
  return *std::find_if(std::begin(kBySize), std::end(kBySize),
                       [&](const BySize& row) { return parameters < row.parameters_below; });
}

int64_t checked_product(int64_t a, int64_t b, const char* what) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product))
    fail(ExitCode::usage, what, ": ", a, " x ", b, " is above 2^63 - 1; make the run smaller");
  return product;
}

void resolve_seq_len(std::optional<int64_t>& seq_len, const RunFacts& facts) {
  if (!seq_len) seq_len = std::min(facts.max_positions, kDefaultSeqLen);
  if (*seq_len > facts.max_positions)
    fail(ExitCode::usage, "--seq-len ", *seq_len, " is beyond the model's ", facts.max_positions,
         " positions; use at most that");
}

int64_t default_micro_batch(int64_t seq_len, int64_t parameters, Backend backend) {
  const int64_t cpu_tokens = parameters < kSmall ? kSmallStep : 1024;
  return std::max<int64_t>(1, (backend == Backend::cuda ? 16384 : cpu_tokens) / seq_len);
}

/// Positions within a micro-batch are 32-bit numbers in the kernels.
void check_micro_batch(int64_t micro_batch, int64_t seq_len) {
  if (micro_batch > INT32_MAX / seq_len)
    fail(ExitCode::usage, "--micro-batch ", micro_batch, ": with --seq-len ", seq_len, " at most ",
         INT32_MAX / seq_len, " are possible; what does not fit in memory at once belongs in --global-batch");
}

Backend resolve_device(DeviceChoice& device, std::optional<DType>& dtype, const GpuFacts& gpus,
                       std::vector<std::string>& notes) {
  const DeviceDecision decision = choose_device(device, gpus);
  if (!decision.note.empty()) notes.push_back(decision.note);
  device = decision.backend == Backend::cuda ? DeviceChoice::cuda : DeviceChoice::cpu;
  dtype = choose_dtype(dtype, decision.backend);
  return decision.backend;
}

}  // namespace

GpuFacts find_gpus() {
  GpuFacts facts;
  facts.built = KINOE_WITH_CUDA != 0;
  facts.count = gpu_count();
  if (facts.count > 0) {
    const DeviceInfo first = gpu_info(0);
    facts.compute_capability = first.compute_capability;
    facts.name = first.name;
  } else {
    facts.problem = gpu_driver_problem();
  }
  return facts;
}

DeviceDecision choose_device(DeviceChoice wanted, const GpuFacts& gpus) {
  if (wanted == DeviceChoice::cpu) return {Backend::cpu, ""};
  std::string reason, remedy;
  if (!gpus.built) {
    reason = "this build has no CUDA";
    remedy = "build where nvcc is installed";
  } else if (gpus.count == 0) {
    reason = gpus.problem.empty() ? "no GPU is visible" : gpus.problem;
    remedy = gpus.problem.empty() ? "check nvidia-smi and CUDA_VISIBLE_DEVICES"
                                  : "install a driver that fits (nvidia-smi shows what there is)";
  } else if (gpus.compute_capability < kMinComputeCapability) {
    reason = cat(gpus.name, " has compute capability ", gpus.compute_capability / 10, ".",
                 gpus.compute_capability % 10, ", at least ", kMinComputeCapability / 10, ".",
                 kMinComputeCapability % 10, " is needed");
    remedy = "choose another GPU with CUDA_VISIBLE_DEVICES";
  } else {
    return {Backend::cuda, ""};
  }
  if (wanted == DeviceChoice::cuda)
    fail(ExitCode::usage, "--device cuda: ", reason, "; ", remedy, ", or use --device cpu");
  return {Backend::cpu, cat("Computing on the CPU: ", reason, ".")};
}

DType choose_dtype(std::optional<DType> wanted, Backend backend) {
  if (backend == Backend::cuda) return wanted.value_or(DType::bf16);
  if (wanted == DType::bf16)
    fail(ExitCode::usage, "--dtype bf16: the CPU computes in fp32 only; use --dtype fp32 or a GPU");
  return DType::f32;
}

std::vector<std::string> resolve(RunConfig& c, const RunFacts& facts) {
  CHECK(facts.parameters > 0 && facts.max_positions > 0, "facts of the model are missing");
  std::vector<std::string> notes;
  const Backend backend = resolve_device(c.device, c.dtype, facts.gpus, notes);
  if (c.adam_state == DType::bf16 && backend == Backend::cpu)
    fail(ExitCode::usage,
         "--adam-state bf16: the CPU keeps fp32 moments only; use --adam-state fp32 or a GPU");

  if (c.data_start == "continue" && c.init_from.empty())
    fail(ExitCode::usage, "--data-start continue goes with --init-from, a checkpoint of this program");

  const BySize& size = by_size(facts.parameters);
  resolve_seq_len(c.seq_len, facts);
  const bool default_batch = !c.global_batch;
  if (!c.global_batch) c.global_batch = (size.tokens_per_step - 1) / *c.seq_len + 1;
  if (!c.micro_batch) {
    // Every rank a share; but not where the size is part of the result, which must not depend on the ranks.
    const int64_t share =
        c.determinism == "topology" ? *c.global_batch : (*c.global_batch - 1) / facts.ranks + 1;
    c.micro_batch = std::min(share, default_micro_batch(*c.seq_len, facts.parameters, backend));
  }
  check_micro_batch(*c.micro_batch, *c.seq_len);
  // Not where a run goes on: its recorded micro-batch may be part of its bits.
  if (*c.micro_batch > *c.global_batch && facts.schedule_tokens == 0) {
    notes.push_back(cat("A micro-batch of ", *c.micro_batch,
                        " is more than the global batch: ", *c.global_batch, " is taken."));
    c.micro_batch = c.global_batch;
  }
  if (!c.lr) c.lr = size.lr;

  if (const int64_t slots = (*c.global_batch - 1) / *c.micro_batch + 1; slots < facts.ranks)
    notes.push_back(cat("A global batch of ", *c.global_batch, " in micro-batches of ", *c.micro_batch,
                        " is work for ", slots, " of ", facts.ranks,
                        c.determinism == "topology" && facts.schedule_tokens > 0
                            ? " ranks; only --override micro-batch changes that, and the bits differ from "
                              "then on."
                            : " ranks; a smaller --micro-batch gives the others some."));

  const int64_t per_step = checked_product(*c.global_batch, *c.seq_len, "--global-batch x --seq-len");
  if (c.tokens) c.steps = (*c.tokens - 1) / per_step + 1;
  if (!c.steps) c.steps = size.steps;
  c.tokens.reset();
  const int64_t total = checked_product(*c.steps, per_step, "--steps x tokens per step");

  if (c.warmup_steps) {
    if (*c.warmup_steps > *c.steps)
      fail(ExitCode::usage, "--warmup-steps ", *c.warmup_steps, " is longer than the run's ", *c.steps,
           " steps");
    c.warmup_tokens = *c.warmup_steps * per_step;
    c.warmup_steps.reset();
  }
  if (!c.warmup_tokens) c.warmup_tokens = std::min(total / 20, kMaxDefaultWarmup);
  if (*c.warmup_tokens > std::max(total, facts.schedule_tokens))
    fail(ExitCode::usage, "--warmup-tokens ", *c.warmup_tokens, " is longer than the run's ", total,
         " tokens (", *c.steps, " steps of ", per_step, ")");

  const int64_t tenth = std::max<int64_t>(1, *c.steps / 10);
  if (!c.save_every) c.save_every = tenth;
  if (!c.eval_every) c.eval_every = facts.has_validation ? tenth : 0;
  if (*c.eval_every > 0 && !facts.has_validation)
    fail(ExitCode::usage, "--eval-every ", *c.eval_every,
         ": there is nothing to evaluate on; give --val-data");
  if (!c.sample_every) c.sample_every = facts.byte_tokens ? tenth : 0;
  if (*c.sample_every > 0 && !facts.byte_tokens)
    fail(ExitCode::usage, "--sample-every ", *c.sample_every,
         ": samples can be printed only for models of bytes (text data); use 0");

  if (backend == Backend::cpu && default_batch && size.tokens_per_step > kSmallStep)
    notes.push_back(
        cat("A step of ", per_step, " tokens takes long on a CPU; --global-batch 8 makes it shorter."));
  return notes;
}

std::vector<std::string> resolve(EvalConfig& c, const RunFacts& facts) {
  std::vector<std::string> notes;
  const Backend backend = resolve_device(c.device, c.dtype, facts.gpus, notes);
  resolve_seq_len(c.seq_len, facts);
  if (!c.micro_batch) c.micro_batch = default_micro_batch(*c.seq_len, facts.parameters, backend);
  check_micro_batch(*c.micro_batch, *c.seq_len);
  return notes;
}

}  // namespace kinoe
