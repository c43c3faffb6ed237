// What every operation makes of random inputs, for dev/peers/torch_error.py: one safetensors file for each operation and
// shape, holding inputs and outputs in the types of training.
//
//   dump_operations FOLDER [cpu|cuda]      default cuda: bf16; on the CPU fp32
//
// The error of an operation means little by itself, since rounding the result to bf16 already costs 0.17 %. Beside what
// PyTorch makes of the same inputs it does. Inputs are those of a training step in size: activations and their
// neighbours of deviation 1, weights of 0.02, gradients of 0.001.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "dev/bench/workspace.h"
#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/crossentropy.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "trainer/safetensors.h"

namespace kinoe::bench {
namespace {

class Dump {
 public:
  Dump(std::string folder, const Context& ctx)
      : work(ctx),
        type(ctx.backend == Backend::cuda ? DType::bf16 : DType::f32),
        folder_(std::move(folder)),
        files_(posix_files()) {
    files_->make_directory(folder_);
  }

  /// The tensor as it is now.
  void add(const std::string& name, const Tensor& tensor) {
    const std::vector<int64_t> shape(tensor.dims.begin(), tensor.dims.begin() + tensor.ndim);
    infos_.push_back({name, to_file_dtype(tensor.dtype), shape});
    contents_.emplace_back(tensor.bytes());
    download(work.context(), contents_.back().data(), tensor.data, tensor.bytes());
    synchronize(work.context());
  }
  /// Writes what was added as FOLDER/<number> <operation>.safetensors and frees the tensors.
  void write(const std::string& operation) {
    const std::string stem = cat(number_ < 10 ? "0" : "", number_, " ", operation);
    write_safetensors(*files_, folder_, plan_safetensors(infos_, stem),
                      [&](size_t tensor, uint64_t offset, void* to, size_t bytes) {
                        std::memcpy(to, contents_[tensor].data() + offset, bytes);
                      });
    ++number_;
    infos_.clear();
    contents_.clear();
    work.clear();
  }

  Workspace work;
  const DType type;

 private:
  std::string folder_;
  std::unique_ptr<Files> files_;
  int number_ = 0;
  std::vector<TensorInfo> infos_;
  std::vector<std::vector<char>> contents_;
};

void dump_norm(Dump& d, int64_t n, int64_t c, bool rms) {
  Workspace& w = d.work;
  const NormForward f = {.out = w.output(d.type, {n, c}),
                         .residual_out = {},
                         .residual = w.random(d.type, {n, c}),
                         .branch = {},
                         .weight = w.random(d.type, {c}),
                         .bias = rms ? Tensor{} : w.random(d.type, {c}),
                         .mean = rms ? Tensor{} : w.output(DType::f32, {n}),
                         .rstd = w.output(DType::f32, {n})};
  norm_forward(w.context(), f);
  const NormBackward b = {.d_residual = w.output(d.type, {n, c}),
                          .d_residual_in = {},
                          .d_weight = w.output(DType::f32, {c}),
                          .d_bias = rms ? Tensor{} : w.output(DType::f32, {c}),
                          .d_out = w.random(d.type, {n, c}, kGradients),
                          .residual = f.residual,
                          .weight = f.weight,
                          .mean = f.mean,
                          .rstd = f.rstd,
                          .scratch = w.scratch(norm_backward_scratch_bytes(w.context().backend, n, c))};
  norm_backward(w.context(), b);
  d.add("x", f.residual);
  d.add("weight", f.weight);
  if (f.bias) d.add("bias", f.bias);
  d.add("out", f.out);
  d.add("d_out", b.d_out);
  d.add("d_x", b.d_residual);
  d.add("d_weight", b.d_weight);
  if (b.d_bias) d.add("d_bias", b.d_bias);
  d.write(cat(rms ? "rmsnorm" : "layernorm", " N=", n, " C=", c));
}

void dump_activation(Dump& d, int64_t n, int64_t f, bool gated) {
  Workspace& w = d.work;
  const Tensor x = w.random(d.type, {n, gated ? 2 * f : f}), d_out = w.random(d.type, {n, f}, kGradients);
  const Tensor out = w.output(d.type, {n, f}), d_x = w.output(d.type, {n, gated ? 2 * f : f});
  if (gated) {
    swiglu_forward(w.context(), {.out = out, .gate_up = x});
    swiglu_backward(w.context(), {.d_gate_up = d_x, .d_out = d_out, .gate_up = x});
  } else {
    gelu_forward(w.context(), {.out = out, .x = x});
    gelu_backward(w.context(), {.dx = d_x, .d_out = d_out, .x = x});
  }
  d.add("x", x);
  d.add("d_out", d_out);
  d.add("out", out);
  d.add("d_x", d_x);
  d.write(cat(gated ? "swiglu" : "gelu", " N=", n, " F=", f));
}

void dump_attention(Dump& d, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads, int64_t dim) {
  Workspace& w = d.work;
  const int64_t columns = (heads + 2 * kv_heads) * dim;
  const AttentionForward f = {.out = w.output(d.type, {batch, length, heads * dim}),
                              .lse = w.output(DType::f32, {batch, heads, length}),
                              .qkv = w.random(d.type, {batch, length, columns}),
                              .doc_start = {},
                              .heads = heads,
                              .kv_heads = kv_heads,
                              .scale = 1.0F / std::sqrt(static_cast<float>(dim))};
  attention_forward(w.context(), f);
  const AttentionBackward b = {.d_qkv = w.output(d.type, {batch, length, columns}),
                               .d_out = w.random(d.type, {batch, length, heads * dim}, kGradients),
                               .out = f.out,
                               .lse = f.lse,
                               .qkv = f.qkv,
                               .doc_start = {},
                               .doc_end = {},
                               .heads = heads,
                               .kv_heads = kv_heads,
                               .scale = f.scale,
                               .scratch = w.scratch(attention_backward_scratch_bytes(
                                   w.context().backend, d.type, batch, length, heads, kv_heads, dim))};
  attention_backward(w.context(), b);
  d.add("qkv", f.qkv);
  d.add("d_out", b.d_out);
  d.add("out", f.out);
  d.add("lse", f.lse);
  d.add("d_qkv", b.d_qkv);
  d.write(cat("attention T=", length, " H=", heads, ":", kv_heads, " D=", dim));
}

void dump_rope(Dump& d, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads, int64_t dim) {
  Workspace& w = d.work;
  std::vector<double> frequencies;
  for (int64_t i = 0; i < dim / 2; ++i)
    frequencies.push_back(std::pow(500000.0, -2.0 * static_cast<double>(i) / static_cast<double>(dim)));
  const std::vector<float> table = make_rope_table<float>(length, frequencies);
  const Tensor qkv = w.random(d.type, {batch, length, (heads + 2 * kv_heads) * dim});
  const Tensor on_device = w.from_host(DType::f32, {length, dim}, table.data());
  d.add("table", on_device);
  for (const bool backward : {false, true}) {
    d.add(backward ? "d_out" : "x", qkv);
    rope(w.context(),
         {.qkv = qkv, .table = on_device, .heads = heads, .kv_heads = kv_heads, .backward = backward});
    d.add(backward ? "d_x" : "out", qkv);
  }
  // Queries and keys alone are rotated: their number of heads cannot be read off the shapes.
  const int64_t rotated = heads + kv_heads;
  d.add("rotated_heads", w.from_host(DType::i64, {1}, &rotated));
  d.write(cat("rope T=", length, " H=", heads, ":", kv_heads, " D=", dim));
}

void dump_cross_entropy(Dump& d, int64_t n, int64_t vocab, int64_t pitch) {
  Workspace& w = d.work;
  const CrossEntropy a = {.logits = w.random(d.type, {n, pitch}, normal(3)),
                          .targets = w.ids({n}, vocab),
                          .losses = w.output(DType::f32, {n}),
                          .vocab_size = vocab,
                          .d_loss = 1.0F / static_cast<float>(n),
                          .with_gradient = true,
                          .bad_target = w.zeros(DType::i64, {1})};
  d.add("logits", a.logits);
  cross_entropy(w.context(), a);
  d.add("targets", a.targets);
  d.add("losses", a.losses);
  d.add("d_logits", a.logits);
  d.add("vocab", w.from_host(DType::i64, {1}, &vocab));
  d.write(cat("crossentropy N=", n, " V=", vocab));
}

void dump_matmul(Dump& d, int64_t n, int64_t o, int64_t c, bool bias) {
  Workspace& w = d.work;
  const auto layout = WeightLayout::out_in;
  const Tensor x = w.random(d.type, {n, c}), weight = w.random(d.type, {o, c}, kWeights);
  const Tensor add = bias ? w.random(d.type, {o}, kWeights) : Tensor{}, y = w.output(d.type, {n, o});
  matmul_forward(w.context(), {.y = y, .x = x, .weight = weight, .bias = add, .layout = layout});
  const Tensor dy = w.random(d.type, {n, o}, kGradients), dx = w.output(d.type, {n, c});
  matmul_dgrad(w.context(), {.dx = dx, .dy = dy, .weight = weight, .layout = layout});
  const MatmulWgrad g = {.d_weight = w.output(DType::f32, {o, c}),
                         .d_bias = bias ? w.output(DType::f32, {o}) : Tensor{},
                         .dy = dy,
                         .x = x,
                         .layout = layout,
                         .scratch = w.scratch(matmul_wgrad_scratch_bytes(w.context().backend, n, o, bias))};
  matmul_wgrad(w.context(), g);
  d.add("x", x);
  d.add("weight", weight);
  if (bias) d.add("bias", add);
  d.add("out", y);
  d.add("d_out", dy);
  d.add("d_x", dx);
  d.add("d_weight", g.d_weight);
  if (bias) d.add("d_bias", g.d_bias);
  d.write(cat("matmul N=", n, " O=", o, " C=", c, bias ? " bias" : ""));
}

void dump_embedding(Dump& d, int64_t batch, int64_t length, int64_t c, int64_t vocab) {
  Workspace& w = d.work;
  const EmbeddingForward f = {.out = w.output(d.type, {batch, length, c}),
                              .tokens = w.ids({batch, length}, vocab),
                              .token_table = w.random(d.type, {vocab, c}, kWeights),
                              .position_table = w.random(d.type, {length, c}, kWeights),
                              .vocab_size = vocab,
                              .bad_token = w.zeros(DType::i64, {1})};
  embedding_forward(w.context(), f);
  const EmbeddingBackward b = {
      .d_token_table = w.output(DType::f32, {vocab, c}),
      .d_position_table = w.output(DType::f32, {length, c}),
      .d_out = w.random(d.type, {batch, length, c}, kGradients),
      .tokens = f.tokens,
      .vocab_size = vocab,
      .scratch = w.scratch(embedding_backward_scratch_bytes(w.context().backend, batch * length, c, vocab))};
  embedding_backward(w.context(), b);
  d.add("tokens", f.tokens);
  d.add("weight", f.token_table);
  d.add("positions", f.position_table);
  d.add("out", f.out);
  d.add("d_out", b.d_out);
  d.add("d_weight", b.d_token_table);
  d.add("d_positions", b.d_position_table);
  d.write(cat("embedding N=", batch * length, " C=", c, " V=", vocab));
}

void run(const std::string& folder, bool gpu) {
  const std::unique_ptr<Device> device = gpu ? Device::gpu(0) : Device::cpu();
  Dump d(folder, device->context());
  const int64_t full = gpu ? 1 : 16;  // a CPU takes a part of the rows
  dump_embedding(d, 8 / std::min<int64_t>(full, 8), 1024, 768, 50257);
  dump_norm(d, 8192 / full, 768, false);
  dump_norm(d, 4096 / full, 1600, false);
  dump_norm(d, 4096 / full, 4096, true);
  dump_matmul(d, 4096 / full, 768, 3072, true);
  dump_matmul(d, 2048 / full, 4096, 4096, false);
  dump_rope(d, 1, 4096 / full, 32, 8, 128);
  dump_attention(d, 2, 1024 / full, 12, 12, 64);
  dump_attention(d, 1, 1000 / full, 6, 3, 80);
  dump_attention(d, 1, 1000 / full, 4, 4, 96);
  dump_attention(d, 1, 2048 / full, 32, 8, 128);
  dump_activation(d, 4096 / full, 3072, false);
  dump_activation(d, 2048 / full, 14336, true);
  dump_cross_entropy(d, 1024 / full, 50257, 50304);
  dump_cross_entropy(d, 512 / full, 128256, 128256);
}

}  // namespace
}  // namespace kinoe::bench

int main(int argc, char** argv) {
  try {
    if (argc < 2 || argc > 3 ||
        (argc == 3 && std::strcmp(argv[2], "cpu") != 0 && std::strcmp(argv[2], "cuda") != 0)) {
      std::fprintf(stderr, "usage: dump_operations FOLDER [cpu|cuda]\n");
      return static_cast<int>(kinoe::ExitCode::usage);
    }
    kinoe::bench::run(argv[1], argc < 3 || std::strcmp(argv[2], "cuda") == 0);
    return 0;
  } catch (const kinoe::Error& error) {
    std::fprintf(stderr, "dump_operations: error: %s\n", error.what());
    return static_cast<int>(error.code);
  }
}
