// Rows of the operations that multiply matrices: the linear layer's three products, attention forward and backward.
#include <cmath>

#include "dev/bench/cases.h"
#include "dev/bench/reference.h"
#include "kernels/attention.h"
#include "kernels/matmul.h"

namespace kinoe::bench {
namespace {

// ---- The linear layer ---------------------------------------------------------------------------------------------

// The compared part is a corner of the result, which needs strips of both factors.
constexpr int64_t kCorner = 32;
constexpr Span kStrip{0, kCorner};

Tensor weight_of(Workspace& w, DType type, const optest::MatmulCase& c) {
  return c.layout == WeightLayout::out_in ? w.random(type, {c.outputs, c.inputs}, kWeights)
                                          : w.random(type, {c.inputs, c.outputs}, kWeights);
}

/// The strip of a weight that holds its first outputs (or its first inputs).
Part weight_strip(Workspace& w, const Tensor& weight, WeightLayout layout, bool of_outputs) {
  return (layout == WeightLayout::out_in) == of_outputs ? Part::of(w, weight, kStrip)
                                                        : Part::of(w, weight, all_rows(weight), {kStrip});
}

Prepared prepare_matmul_forward(Workspace& w, DType type, const optest::MatmulCase& c) {
  const MatmulForward a = {.y = w.output(type, {c.rows, c.outputs}),
                           .x = w.random(type, {c.rows, c.inputs}),
                           .weight = weight_of(w, type, c),
                           .bias = c.bias ? w.random(type, {c.outputs}, kWeights) : Tensor{},
                           .layout = c.layout};
  const auto run = [&w, a] { matmul_forward(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    Part x = Part::of(w, a.x, kStrip), weight = weight_strip(w, a.weight, a.layout, true);
    Part y(kCorner, kCorner), bias(1, kCorner);
    if (a.bias) bias = Part::leading(w, a.bias, kCorner);
    matmul_forward({}, {.y = y.tensor(),
                        .x = x.tensor(),
                        .weight = weight.tensor(),
                        .bias = a.bias ? bias.flat() : Tensor{},
                        .layout = a.layout});
    return Part::of(w, a.y, kStrip, {kStrip}).error_against(y);
  };
  return {run, error};
}

Prepared prepare_matmul_dgrad(Workspace& w, DType type, const optest::MatmulCase& c, bool through_gelu) {
  const MatmulDgrad a = {.dx = w.output(type, {c.rows, c.inputs}),
                         .dy = w.random(type, {c.rows, c.outputs}, kGradients),
                         .weight = weight_of(w, type, c),
                         .layout = c.layout,
                         .gelu_input = through_gelu ? w.random(type, {c.rows, c.inputs}) : Tensor{}};
  const auto run = [&w, a] { matmul_dgrad(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    Part dy = Part::of(w, a.dy, kStrip), weight = weight_strip(w, a.weight, a.layout, false);
    Part dx(kCorner, kCorner), before(kCorner, kCorner);
    if (a.gelu_input) before = Part::of(w, a.gelu_input, kStrip, {kStrip});
    matmul_dgrad({}, {.dx = dx.tensor(),
                      .dy = dy.tensor(),
                      .weight = weight.tensor(),
                      .layout = a.layout,
                      .gelu_input = a.gelu_input ? before.tensor() : Tensor{}});
    return Part::of(w, a.dx, kStrip, {kStrip}).error_against(dx);
  };
  return {run, error};
}

Prepared prepare_matmul_wgrad(Workspace& w, DType type, const optest::MatmulCase& c) {
  const bool out_in = c.layout == WeightLayout::out_in;
  const MatmulWgrad a = {
      .d_weight = w.output(DType::f32, {out_in ? c.outputs : c.inputs, out_in ? c.inputs : c.outputs}),
      .d_bias = c.bias ? w.output(DType::f32, {c.outputs}) : Tensor{},
      .dy = w.random(type, {c.rows, c.outputs}, kGradients),
      .x = w.random(type, {c.rows, c.inputs}),
      .layout = c.layout,
      .scratch = w.scratch(matmul_wgrad_scratch_bytes(w.context().backend, c.rows, c.outputs, c.bias))};
  const auto run = [&w, a] { matmul_wgrad(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    Part dy = Part::of(w, a.dy, all_rows(a.dy), {kStrip}), x = Part::of(w, a.x, all_rows(a.x), {kStrip});
    Part d_weight(kCorner, kCorner), d_bias(1, kCorner);
    HostScratch scratch(
        matmul_wgrad_scratch_bytes(Backend::cpu, a.dy.rows(), kCorner, static_cast<bool>(a.d_bias)));
    matmul_wgrad({}, {.d_weight = d_weight.tensor(),
                      .d_bias = a.d_bias ? d_bias.flat() : Tensor{},
                      .dy = dy.tensor(),
                      .x = x.tensor(),
                      .layout = a.layout,
                      .scratch = scratch.tensor()});
    return worst({Part::of(w, a.d_weight, kStrip, {kStrip}).error_against(d_weight),
                  a.d_bias ? Part::leading(w, a.d_bias, kCorner).error_against(d_bias) : 0});
  };
  return {run, error};
}

// ---- Attention ----------------------------------------------------------------------------------------------------

AttentionForward attention_arguments(Workspace& w, DType type, const optest::AttentionCase& c) {
  CHECK(!c.documents, c.label(), ": documents are not measured");
  return {.out = w.output(type, {c.batch, c.length, c.heads * c.head_dim}),
          .lse = w.output(DType::f32, {c.batch, c.heads, c.length}),
          .qkv = w.random(type, {c.batch, c.length, (c.heads + 2 * c.kv_heads) * c.head_dim}),
          .doc_start = {},
          .heads = c.heads,
          .kv_heads = c.kv_heads,
          .scale = 1.0F / std::sqrt(static_cast<float>(c.head_dim))};
}

/// The compared part: the first sequence's first key/value head and the queries that read it. It is complete in itself.
struct Group {
  int64_t length, heads;
  std::vector<Span> qkv;  // columns
  std::vector<Span> out;
  [[nodiscard]] Span positions() const { return {0, length}; }
};
Group first_group(const optest::AttentionCase& c) {
  const int64_t heads = c.heads / c.kv_heads, d = c.head_dim;
  return {
      c.length, heads, {{0, heads * d}, {c.heads * d, d}, {(c.heads + c.kv_heads) * d, d}}, {{0, heads * d}}};
}
/// [B, H, T] as rows of positions; the first are those of the group.
Part group_lse(Workspace& w, const Tensor& lse, const Group& g) { return Part::of(w, lse, {0, g.heads}); }

Prepared prepare_attention_forward(Workspace& w, DType type, const optest::AttentionCase& c) {
  const AttentionForward a = attention_arguments(w, type, c);
  const auto run = [&w, a] { attention_forward(w.context(), a); };
  const auto error = [&w, a, run, g = first_group(c)] {
    run();
    Part qkv = Part::of(w, a.qkv, g.positions(), g.qkv), lse(g.heads, g.length);
    Part out(g.length, a.out.columns() / a.kv_heads);
    attention_forward({}, {.out = out.sequence(),
                           .lse = lse.tensor(),
                           .qkv = qkv.sequence(),
                           .doc_start = {},
                           .heads = g.heads,
                           .kv_heads = 1,
                           .scale = a.scale});
    return worst({Part::of(w, a.out, g.positions(), g.out).error_against(out),
                  group_lse(w, a.lse, g).error_against(lse)});
  };
  return {run, error};
}

Prepared prepare_attention_backward(Workspace& w, DType type, const optest::AttentionCase& c) {
  const AttentionForward forward = attention_arguments(w, type, c);
  attention_forward(w.context(), forward);
  const AttentionBackward a = {
      .d_qkv = w.output(type, {c.batch, c.length, forward.qkv.columns()}),
      .d_out = w.random(type, {c.batch, c.length, forward.out.columns()}, kGradients),
      .out = forward.out,
      .lse = forward.lse,
      .qkv = forward.qkv,
      .doc_start = {},
      .doc_end = {},
      .heads = c.heads,
      .kv_heads = c.kv_heads,
      .scale = forward.scale,
      .scratch = w.scratch(attention_backward_scratch_bytes(w.context().backend, type, c.batch, c.length,
                                                            c.heads, c.kv_heads, c.head_dim))};
  const auto run = [&w, a] { attention_backward(w.context(), a); };
  const auto error = [&w, a, run, g = first_group(c), d = c.head_dim] {
    run();
    Part qkv = Part::of(w, a.qkv, g.positions(), g.qkv), lse = group_lse(w, a.lse, g);
    Part out = Part::of(w, a.out, g.positions(), g.out), d_out = Part::of(w, a.d_out, g.positions(), g.out);
    Part d_qkv(g.length, (g.heads + 2) * d);
    HostScratch scratch(
        attention_backward_scratch_bytes(Backend::cpu, DType::f64, 1, g.length, g.heads, 1, d));
    attention_backward({}, {.d_qkv = d_qkv.sequence(),
                            .d_out = d_out.sequence(),
                            .out = out.sequence(),
                            .lse = lse.tensor(),
                            .qkv = qkv.sequence(),
                            .doc_start = {},
                            .doc_end = {},
                            .heads = g.heads,
                            .kv_heads = 1,
                            .scale = a.scale,
                            .scratch = scratch.tensor()});
    // One by one: the gradient of the values is the largest and would hide the others' errors.
    const Part got = Part::of(w, a.d_qkv, g.positions(), g.qkv);
    const auto error_of = [&](Span part) { return got.columns(part).error_against(d_qkv.columns(part)); };
    return worst({error_of({0, g.heads * d}), error_of({g.heads * d, d}), error_of({(g.heads + 1) * d, d})});
  };
  return {run, error};
}

}  // namespace

void add_matmul(Cases& cases, const std::string& model, DType type, const optest::MatmulCase& c) {
  const std::string shape = without_first_word(c.label());
  const Cost cost = matmul_cost(c.rows, c.outputs, c.inputs, size_of(type));
  cases.push_back({"matmul_forward", model, shape, cost,
                   [=](Workspace& w) { return prepare_matmul_forward(w, type, c); }});
  cases.push_back({"matmul_dgrad", model, shape, cost,
                   [=](Workspace& w) { return prepare_matmul_dgrad(w, type, c, false); }});
  cases.push_back(
      {"matmul_wgrad", model, shape, cost, [=](Workspace& w) { return prepare_matmul_wgrad(w, type, c); }});
}

void add_matmul_dgrad_gelu(Cases& cases, const std::string& model, DType type, const optest::MatmulCase& c) {
  cases.push_back({"matmul_dgrad_gelu", model, without_first_word(c.label()),
                   matmul_dgrad_gelu_cost(c.rows, c.outputs, c.inputs, size_of(type)),
                   [=](Workspace& w) { return prepare_matmul_dgrad(w, type, c, true); }});
}

void add_attention(Cases& cases, const std::string& model, DType type, const optest::AttentionCase& c) {
  const std::string shape = without_first_word(c.label());
  const size_t element = size_of(type);
  cases.push_back({"attention_forward", model, shape,
                   attention_forward_cost(c.batch, c.length, c.heads, c.kv_heads, c.head_dim, element),
                   [=](Workspace& w) { return prepare_attention_forward(w, type, c); }});
  cases.push_back({"attention_backward", model, shape,
                   attention_backward_cost(c.batch, c.length, c.heads, c.kv_heads, c.head_dim, element),
                   [=](Workspace& w) { return prepare_attention_backward(w, type, c); }});
}

}  // namespace kinoe::bench
