// Rows of the operations that work element by element, or logit by logit: GELU, SwiGLU, cross-entropy, and those on
// flat ranges: AdamW, the norm's partial sums, casts, sums in fixed point.
#include <algorithm>
#include <cmath>

#include "dev/bench/cases.h"
#include "dev/bench/reference.h"
#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/crossentropy.h"
#include "kernels/fixed_point.h"
#include "kernels/global_norm.h"

namespace kinoe::bench {
namespace {

constexpr int64_t kFirstElements = 4096;  // compared, of a flat range

Prepared prepare_gelu_forward(Workspace& w, DType type, const optest::ActivationCase& c) {
  const GeluForward a = {.out = w.output(type, {c.rows, c.columns}),
                         .x = w.random(type, {c.rows, c.columns})};
  const auto run = [&w, a] { gelu_forward(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    Part x = first_rows(w, a.x), out(kFirstRows.count, a.out.columns());
    gelu_forward({}, {.out = out.tensor(), .x = x.tensor()});
    return first_rows(w, a.out).error_against(out);
  };
  return {run, error};
}

Prepared prepare_gelu_backward(Workspace& w, DType type, const optest::ActivationCase& c) {
  const GeluBackward a = {.dx = w.output(type, {c.rows, c.columns}),
                          .d_out = w.random(type, {c.rows, c.columns}, kGradients),
                          .x = w.random(type, {c.rows, c.columns})};
  const auto run = [&w, a] { gelu_backward(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    Part x = first_rows(w, a.x), d_out = first_rows(w, a.d_out), dx(kFirstRows.count, a.dx.columns());
    gelu_backward({}, {.dx = dx.tensor(), .d_out = d_out.tensor(), .x = x.tensor()});
    return first_rows(w, a.dx).error_against(dx);
  };
  return {run, error};
}

Prepared prepare_swiglu_forward(Workspace& w, DType type, const optest::ActivationCase& c) {
  const SwigluForward a = {.out = w.output(type, {c.rows, c.columns}),
                           .gate_up = w.random(type, {c.rows, 2 * c.columns})};
  const auto run = [&w, a] { swiglu_forward(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    Part gate_up = first_rows(w, a.gate_up), out(kFirstRows.count, a.out.columns());
    swiglu_forward({}, {.out = out.tensor(), .gate_up = gate_up.tensor()});
    return first_rows(w, a.out).error_against(out);
  };
  return {run, error};
}

Prepared prepare_swiglu_backward(Workspace& w, DType type, const optest::ActivationCase& c) {
  const SwigluBackward a = {.d_gate_up = w.output(type, {c.rows, 2 * c.columns}),
                            .d_out = w.random(type, {c.rows, c.columns}, kGradients),
                            .gate_up = w.random(type, {c.rows, 2 * c.columns})};
  const auto run = [&w, a] { swiglu_backward(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    Part gate_up = first_rows(w, a.gate_up), d_out = first_rows(w, a.d_out);
    Part d_gate_up(kFirstRows.count, a.d_gate_up.columns());
    swiglu_backward({},
                    {.d_gate_up = d_gate_up.tensor(), .d_out = d_out.tensor(), .gate_up = gate_up.tensor()});
    return first_rows(w, a.d_gate_up).error_against(d_gate_up);
  };
  return {run, error};
}

Prepared prepare_cross_entropy(Workspace& w, DType type, const optest::CrossEntropyCase& c) {
  CHECK(c.targets == optest::Targets::all, c.label(), ": every row of a benchmark has a target");
  // So wide that the softmax weighs as much in the error as the targets' -1.
  const CrossEntropy a = {.logits = w.watched(w.random(type, {c.rows, c.pitch}, normal(3))),
                          .targets = w.ids({c.rows}, c.vocab),
                          .losses = w.output(DType::f32, {c.rows}),
                          .vocab_size = c.vocab,
                          .d_loss = 1.0F / static_cast<float>(c.rows),
                          .with_gradient = true,
                          .bad_target = w.zeros(DType::i64, {1})};
  const auto run = [&w, a] { cross_entropy(w.context(), a); };
  const auto error = [&w, a, run] {
    Part logits = first_rows(w, a.logits), losses(1, kFirstRows.count);
    std::vector<int32_t> targets = read_ints(w, a.targets, kFirstRows.count);
    int64_t bad = 0;
    run();
    cross_entropy({}, {.logits = logits.tensor(),
                       .targets = {targets.data(), DType::i32, {kFirstRows.count}},
                       .losses = losses.flat(),
                       .vocab_size = a.vocab_size,
                       .d_loss = a.d_loss,
                       .with_gradient = true,
                       .bad_target = {&bad, DType::i64, {1}}});
    return worst({first_rows(w, a.logits).error_against(logits),
                  Part::leading(w, a.losses, kFirstRows.count).error_against(losses)});
  };
  return {run, error, [&w, a] { w.refill(a.logits); }};
}

AdamW adamw_arguments(Workspace& w, const optest::AdamWCase& c) {
  const DType moments = c.bf16_moments ? DType::bf16 : DType::f32;
  const std::vector<AdamWSegment> segments = {
      {.begin = 0, .end = c.n, .tensor_key = stable_key("bench"), .first_index = 0, .weight_decay = 0.1F}};
  StepState state;
  state.grad_scale = 1;
  return {.masters = w.watched(w.random(DType::f32, {c.n}, kWeights)),
          .m = w.watched(w.random(moments, {c.n}, kGradients)),
          .v = w.watched(w.random(moments, {c.n}, uniform(0.5e-6, 1.5e-6))),
          .gradients = w.random(DType::f32, {c.n}, kGradients),
          .weights = c.bf16_weights ? w.output(DType::bf16, {c.n}) : Tensor{},
          .segments = w.structs(segments),
          .segment_count = 1,
          .state = w.structs(std::vector<StepState>{state}),
          .lr = 3e-4F,
          .beta1 = 0.9F,
          .beta2 = 0.95F,
          .eps = 1e-8F,
          .t = 1000,
          .rounding_seed = 1};
}

Prepared prepare_adamw(Workspace& w, const optest::AdamWCase& c) {
  const AdamW a = adamw_arguments(w, c);
  const auto run = [&w, a] { adamw(w.context(), a); };
  const auto error = [&w, a, run] {
    const int64_t n = std::min(kFirstElements, a.masters.size());
    const auto leading = [&](const Tensor& t) { return Part::leading(w, t, n); };
    Part masters = leading(a.masters), m = leading(a.m), v = leading(a.v), gradients = leading(a.gradients);
    std::vector<AdamWSegment> segment = {
        {.begin = 0, .end = n, .tensor_key = stable_key("bench"), .first_index = 0, .weight_decay = 0.1F}};
    std::vector<int32_t> state = read_ints(w, a.state, a.state.size());
    run();
    AdamW twin = a;
    twin.masters = masters.flat();
    twin.m = m.flat();
    twin.v = v.flat();
    twin.gradients = gradients.flat();
    twin.weights = {};
    twin.segments = {segment.data(), DType::i32, {static_cast<int64_t>(sizeof(AdamWSegment) / 4)}};
    twin.state = {state.data(), DType::i32, {static_cast<int64_t>(state.size())}};
    adamw({}, twin);
    return worst({leading(a.masters).error_against(masters), leading(a.m).error_against(m),
                  leading(a.v).error_against(v), a.weights ? leading(a.weights).error_against(masters) : 0});
  };
  return {run, error};
}

Prepared prepare_norm_partials(Workspace& w, int64_t n) {
  const NormPartials a = {.partials = w.output(DType::f64, {(n + kChunk - 1) / kChunk}),
                          .gradients = w.random(DType::f32, {n}, kGradients)};
  const auto run = [&w, a] { norm_partials(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    const int64_t chunks = a.gradients.size() / kChunk < 16 ? 1 : 16;
    Part gradients = Part::leading(w, a.gradients, std::min(chunks * kChunk, a.gradients.size())),
         sums(1, chunks);
    norm_partials({}, {.partials = sums.flat(), .gradients = gradients.flat()});
    return Part::leading(w, a.partials, chunks).error_against(sums);
  };
  return {run, error};
}

Prepared prepare_cast(Workspace& w, DType from, DType to, int64_t n) {
  const Cast a = {.to = w.output(to, {n}), .from = w.random(from, {n})};
  const auto run = [&w, a] { cast(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    const int64_t count = std::min(kFirstElements, a.from.size());
    Part exact = Part::leading(w, a.from, count), wide(1, count);
    cast({}, {.to = wide.flat(), .from = exact.flat()});
    return Part::leading(w, a.to, count).error_against(wide);
  };
  return {run, error};
}

/// Of the bits: the twin gets the same fp32.
Prepared prepare_fixed_point_add(Workspace& w, bool store, int64_t n) {
  const FixedPointAdd a = {.sums = w.zeros(DType::i64, {n}),
                           .values = w.random(DType::f32, {n}, kGradients),
                           .store = store,
                           .limit = gradient_limit(64),
                           .overflow = w.zeros(DType::i64, {1})};
  const auto run = [&w, a] { fixed_point_add(w.context(), a); };
  const auto error = [&w, a, run] {
    const int64_t count = std::min(kFirstElements, a.values.size());
    std::vector<int64_t> expected = read_elements<int64_t>(w, a.sums, count);
    std::vector<float> values = read_elements<float>(w, a.values, count);
    int64_t overflow = 0;
    run();
    FixedPointAdd twin = a;
    twin.sums = {expected.data(), DType::i64, {count}};
    twin.values = {values.data(), DType::f32, {count}};
    twin.overflow = {&overflow, DType::i64, {1}};
    fixed_point_add({}, twin);
    const std::vector<int64_t> sums = read_elements<int64_t>(w, a.sums, count);
    double difference = 0, size = 0;
    for (size_t i = 0; i < sums.size(); ++i) {
      difference += std::abs(static_cast<double>(sums[i] - expected[i]));
      size += std::abs(static_cast<double>(expected[i]));
    }
    return difference / size;
  };
  return {run, error};
}

Prepared prepare_fixed_point_to_float(Workspace& w, int64_t n) {
  const FixedPointToFloat a = {.values = w.output(DType::f32, {n}), .sums = w.zeros(DType::i64, {n})};
  const Tensor gradients = w.random(DType::f32, {n}, kGradients);
  fixed_point_add(w.context(), {.sums = a.sums,
                                .values = gradients,
                                .store = true,
                                .limit = gradient_limit(1),
                                .overflow = w.zeros(DType::i64, {1})});
  const auto run = [&w, a] { fixed_point_to_float(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    const int64_t count = std::min(kFirstElements, a.values.size());
    std::vector<int64_t> sums = read_elements<int64_t>(w, a.sums, count);
    Part wide(1, count);
    fixed_point_to_float({}, {.values = wide.flat(), .sums = {sums.data(), DType::i64, {count}}});
    return Part::leading(w, a.values, count).error_against(wide);
  };
  return {run, error};
}

std::string elements(int64_t n) { return cat("n=", n); }

}  // namespace

void add_gelu(Cases& cases, const std::string& model, DType type, const optest::ActivationCase& c) {
  const std::string shape = without_first_word(c.label());
  cases.push_back({"gelu_forward", model, shape, gelu_forward_cost(c.rows, c.columns, size_of(type)),
                   [=](Workspace& w) { return prepare_gelu_forward(w, type, c); }});
  cases.push_back({"gelu_backward", model, shape, gelu_backward_cost(c.rows, c.columns, size_of(type)),
                   [=](Workspace& w) { return prepare_gelu_backward(w, type, c); }});
}

void add_swiglu(Cases& cases, const std::string& model, DType type, const optest::ActivationCase& c) {
  const std::string shape = without_first_word(c.label());
  cases.push_back({"swiglu_forward", model, shape, swiglu_forward_cost(c.rows, c.columns, size_of(type)),
                   [=](Workspace& w) { return prepare_swiglu_forward(w, type, c); }});
  cases.push_back({"swiglu_backward", model, shape, swiglu_backward_cost(c.rows, c.columns, size_of(type)),
                   [=](Workspace& w) { return prepare_swiglu_backward(w, type, c); }});
}

void add_cross_entropy(Cases& cases, const std::string& model, DType type,
                       const optest::CrossEntropyCase& c) {
  cases.push_back({"cross_entropy", model, without_first_word(c.label()),
                   cross_entropy_cost(c.rows, c.vocab, size_of(type), true),
                   [=](Workspace& w) { return prepare_cross_entropy(w, type, c); }});
}

void add_adamw(Cases& cases, const std::string& model, const optest::AdamWCase& c) {
  cases.push_back({"adamw", model, without_first_word(c.label()),
                   adamw_cost(c.n, c.bf16_moments ? 2 : 4, c.bf16_weights),
                   [=](Workspace& w) { return prepare_adamw(w, c); }});
}

void add_norm_partials(Cases& cases, const std::string& model, int64_t n) {
  cases.push_back({"norm_partials", model, elements(n), norm_partials_cost(n),
                   [=](Workspace& w) { return prepare_norm_partials(w, n); }});
}

void add_casts(Cases& cases, const std::string& model, int64_t n) {
  for (const DType from : {DType::f32, DType::bf16}) {
    const DType to = from == DType::f32 ? DType::bf16 : DType::f32;
    cases.push_back({"cast", model, cat(name_of(from), " to ", name_of(to), " ", elements(n)),
                     cast_cost(n, size_of(from), size_of(to)),
                     [=](Workspace& w) { return prepare_cast(w, from, to, n); }});
  }
}

void add_fixed_point(Cases& cases, const std::string& model, int64_t n) {
  for (const bool store : {true, false})
    cases.push_back({"fixed_point_add", model, cat(store ? "store " : "add ", elements(n)),
                     fixed_point_add_cost(n, store),
                     [=](Workspace& w) { return prepare_fixed_point_add(w, store, n); }});
  cases.push_back({"fixed_point_to_float", model, elements(n), fixed_point_to_float_cost(n),
                   [=](Workspace& w) { return prepare_fixed_point_to_float(w, n); }});
}

}  // namespace kinoe::bench
