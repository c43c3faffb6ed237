// The tables of a run as text.
#include "trainer/tables.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <vector>

#include "trainer/flops.h"

namespace kinoe {

std::string grouped(int64_t n) {
  std::string digits = std::to_string(n);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string counted(int64_t n, const std::string& noun) {
  return grouped(n) + " " + noun + (n == 1 ? "" : "s");
}

std::string mebibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string duration(double seconds) {
  char text[32];
  if (seconds < 1)
    std::snprintf(text, sizeof(text), seconds < 0.01 ? "%.2g ms" : "%.0f ms", seconds * 1e3);
  else
    std::snprintf(text, sizeof(text), "%.1f s", seconds);
  return text;
}

namespace {

void print_row(std::FILE* out, const std::string& name, const std::string& value) {
  std::fprintf(out, "  %-22s %s\n", name.c_str(), value.c_str());
}

}  // namespace

void print_row(const std::string& name, const std::string& value) { print_row(stdout, name, value); }

MemoryPlan plan_memory(const Arena& plan, const Device& device, size_t held,
                       const std::vector<Arena::Group>& host) {
  MemoryPlan result;
  if (device.context().backend == Backend::cuda) {
    const size_t workspace = std::min(held, device.workspace_bytes());
    result.rows = {{"CUDA context", held - workspace}, {"matrix products", workspace}};
    result.host = host;
  } else {
    result.rows = {{"program", held}};
    result.rows.insert(result.rows.end(), host.begin(), host.end());
  }
  result.rows.insert(result.rows.end(), plan.groups().begin(), plan.groups().end());
  for (const Arena::Group& row : result.rows) result.total += row.bytes;
  return result;
}

void print_memory(std::FILE* out, const MemoryPlan& plan, int ranks) {
  std::fprintf(out, ranks > 1 ? "memory (each rank)\n" : "memory\n");
  for (const Arena::Group& row : plan.rows) print_row(out, row.name, mebibytes(row.bytes));
  print_row(out, "total", mebibytes(plan.total));
  for (const Arena::Group& row : plan.host) print_row(out, row.name, mebibytes(row.bytes));
}

void print_run(std::FILE* out, const RunConfig& config, const ModelConfig& model, const DeviceInfo& device,
               const RankCounts& ranks, const Dataset& training, const Dataset* validation) {
  const TokenFlops flops = training_flops(model, config.seq_len.value());
  const std::vector<double> epochs = training.epochs(config.steps.value() * config.global_batch.value());
  std::fprintf(out, "run\n");
  print_row(out, "model",
            cat(config.model, ": ", model.layers, " layers, width ", model.hidden, ", ", model.heads,
                " heads (", model.kv_heads, " key/value), MLP ", model.ffn, ", vocabulary ", model.vocab_size,
                model.tied ? ", tied" : ""));
  print_row(out, "parameters", grouped(model.parameter_count()));
  print_row(out, "device", cat(device.name, ", ", name_of(config.dtype.value())));
  if (ranks.ranks > 1)
    print_row(out, "ranks",
              cat(ranks.ranks, " on ", counted(ranks.hosts, "host"), ", ZeRO ", config.zero, ", determinism ",
                  config.determinism));
  else if (config.determinism != RunConfig().determinism)
    print_row(out, "ranks", cat("1, determinism ", config.determinism));
  print_row(out, "training data",
            cat(config.data.empty() ? "built-in stories, " : "", grouped(training.tokens()), " tokens, ",
                grouped(training.samples()), " sequences of ", config.seq_len.value()));
  if (validation != nullptr)
    print_row(out, "validation data",
              cat(grouped(validation->tokens()), " tokens, ", grouped(validation->samples()), " sequences"));
  print_row(out, "steps",
            cat(grouped(config.steps.value()), " of ", config.global_batch.value(), " sequences (",
                grouped(config.tokens_per_step()), " tokens), micro-batch ", config.micro_batch.value()));
  print_row(
      out, "tokens",
      cat(grouped(config.total_tokens()), ", ", *std::max_element(epochs.begin(), epochs.end()), " epochs"));
  print_row(out, "learning rate",
            cat(config.lr.value(), " ", config.schedule, ", warm-up ", grouped(config.warmup_tokens.value()),
                " tokens, down to ", config.min_lr_frac, " of it"));
  const std::optional<Peak> peak = peak_flops(device.name, config.dtype.value());
  print_row(out, "peak", peak ? peak->source : "unknown for this device: no MFU is given");
  print_row(out, "FLOPs",
            cat(flops.causal, " per token, ", flops.causal * static_cast<double>(config.total_tokens()),
                " in all"));
}

}  // namespace kinoe
