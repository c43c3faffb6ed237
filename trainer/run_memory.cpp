// What a run takes, and what would fit where it does not.
#include "trainer/run_memory.h"

#include "dataloader/loader.h"
#include "trainer/sample.h"

namespace kinoe {
namespace {

/// Ends with the memory table printed and a configuration that fits, where this one does not.
void require_memory(const RunConfig& config, const DeviceInfo& device, int sharing,
                    const std::function<size_t(const RunConfig&)>& bytes_of) {
  const size_t needed = bytes_of(config), free = device.free_bytes / static_cast<size_t>(sharing);
  if (needed <= free) return;
  const Fitting fitting = find_fitting(config, bytes_of, free);
  const std::string begin =
      cat("this run needs ", mebibytes(needed), " and ", device.name, " has ", mebibytes(free), " free",
          sharing > 1 ? cat(" for each of the ", sharing, " ranks on this host") : "", "; ");
  if (fitting.fits)
    fail(ExitCode::usage, begin, "it fits with ", fitting.options, " (", mebibytes(fitting.bytes), ")");
  fail(ExitCode::usage, begin,
       fitting.options.empty() ? "it cannot be made smaller"
                               : cat("even with ", fitting.options, " it needs ", mebibytes(fitting.bytes)),
       "; use a smaller model or --seq-len, or a device with more memory");
}

}  // namespace

OptimizerSettings optimizer_settings(const RunConfig& config) {
  OptimizerSettings settings;
  settings.beta1 = static_cast<float>(config.beta1);
  settings.beta2 = static_cast<float>(config.beta2);
  settings.eps = static_cast<float>(config.eps);
  settings.weight_decay = static_cast<float>(config.weight_decay);
  settings.grad_clip = config.grad_clip;
  settings.moments = config.adam_state;
  settings.seed = static_cast<uint64_t>(config.seed);
  return settings;
}

RunMemory take_run_memory(Arena& arena, Model& model, const RunConfig& config, const ShardLayout& layout,
                          bool with_eval) {
  RunMemory memory;
  take_constants(arena, model);
  memory.parameters =
      take_parameters(arena, model, optimizer_settings(config), layout,
                      config.determinism == "topology" ? GradientSum::fixed_point : GradientSum::floating);
  WorkShape shape;
  shape.batch = config.micro_batch.value();
  shape.length = config.seq_len.value();
  shape.recompute = config.recompute == "block"   ? Recompute::block
                    : config.recompute == "light" ? Recompute::light
                                                  : Recompute::none;
  shape.document_mask = config.document_mask;
  memory.acts = take_activations(arena, model, shape);
  if (with_eval) {
    shape.training = false;
    memory.eval = take_activations(arena, model, shape);
  }
  if (config.sample_every.value() > 0)
    memory.sampling = arena.take(
        "sampling", DType::i32, {static_cast<int64_t>(Sampler::bytes(model, 1, config.seq_len.value()) / 4)});
  return memory;
}

MemoryPlan check_memory(std::FILE* out, const RunSetup& setup, Model& model, const ShardLayout& layout,
                        const Device& device, size_t held_before, const Arena& planned,
                        size_t checkpoint_bytes, const RankCounts& ranks) {
  const bool with_eval = setup.data.validation.has_value();
  const DeviceInfo info = device.info();
  const auto feed_bytes = [&](const RunConfig& c) {
    return Loader::buffer_bytes(c.micro_batch.value(), c.seq_len.value(), c.document_mask) *
           (with_eval ? 2 : 1);
  };
  print_run(out, setup.config, setup.model, info, ranks, *setup.data.training,
            with_eval ? &*setup.data.validation : nullptr);
  std::vector<Arena::Group> host = {{"data buffers (host)", feed_bytes(setup.config)}};
  if (checkpoint_bytes > 0) host.push_back({"checkpoint buffers (host)", checkpoint_bytes});
  MemoryPlan plan = plan_memory(planned, device, held_before, host);
  print_memory(out, plan, ranks.ranks);
  std::fflush(out);
  require_memory(setup.config, info, model.backend == Backend::cpu ? ranks.here : 1,
                 [&](const RunConfig& other) {
                   Arena arena;
                   take_run_memory(arena, model, other, layout, with_eval);
                   return arena.used() + (model.backend == Backend::cpu ? feed_bytes(other) : 0);
                 });
  return plan;
}

}  // namespace kinoe
