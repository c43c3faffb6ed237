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

void print_row(const std::string& name, const std::string& value) {
  std::printf("  %-22s %s\n", name.c_str(), value.c_str());
}

void print_memory(const Arena& plan, const std::vector<std::pair<std::string, size_t>>& host) {
  std::printf("memory\n");
  for (const Arena::Group& group : plan.groups()) print_row(group.name, mebibytes(group.bytes));
  size_t total = plan.used();
  for (const auto& [name, bytes] : host) {
    print_row(name, mebibytes(bytes));
    total += bytes;
  }
  print_row("total", mebibytes(total));
}

void print_run(const RunConfig& config, const ModelConfig& model, const DeviceInfo& device,
               const Dataset& training, const Dataset* validation) {
  const TokenFlops flops = training_flops(model, config.seq_len.value());
  const std::vector<double> epochs = training.epochs(config.steps.value() * config.global_batch.value());
  std::printf("run\n");
  print_row("model", cat(config.model, ": ", model.layers, " layers, width ", model.hidden, ", ", model.heads,
                         " heads (", model.kv_heads, " key/value), MLP ", model.ffn, ", vocabulary ",
                         model.vocab_size, model.tied ? ", tied" : ""));
  print_row("parameters", grouped(model.parameter_count()));
  print_row("device", cat(device.name, ", ", name_of(config.dtype.value())));
  print_row("training data",
            cat(config.data.empty() ? "built-in stories, " : "", grouped(training.tokens()), " tokens, ",
                grouped(training.samples()), " sequences of ", config.seq_len.value()));
  if (validation != nullptr)
    print_row("validation data",
              cat(grouped(validation->tokens()), " tokens, ", grouped(validation->samples()), " sequences"));
  print_row("steps",
            cat(grouped(config.steps.value()), " of ", config.global_batch.value(), " sequences (",
                grouped(config.tokens_per_step()), " tokens), micro-batch ", config.micro_batch.value()));
  print_row("tokens", cat(grouped(config.total_tokens()), ", ",
                          *std::max_element(epochs.begin(), epochs.end()), " epochs"));
  print_row("learning rate",
            cat(config.lr.value(), " ", config.schedule, ", warm-up ", grouped(config.warmup_tokens.value()),
                " tokens, down to ", config.min_lr_frac, " of it"));
  const std::optional<Peak> peak = peak_flops(device.name, config.dtype.value());
  print_row("peak", peak ? peak->source : "unknown for this device: no MFU is given");
  print_row("FLOPs", cat(flops.causal, " per token, ",
                         flops.causal * static_cast<double>(config.total_tokens()), " in all"));
}

}  // namespace kinoe
