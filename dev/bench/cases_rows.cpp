// Rows of the operations around the residual stream: embedding, norm, QK-norm, RoPE.
#include <cmath>

#include "dev/bench/cases.h"
#include "dev/bench/reference.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "kernels/qk_norm.h"
#include "kernels/rope.h"

namespace kinoe::bench {
namespace {

NormForward norm_arguments(Workspace& w, DType type, const optest::NormCase& c) {
  const int64_t n = c.rows, columns = c.columns;
  return {.out = w.output(type, {n, columns}),
          .residual_out = c.branch ? w.output(type, {n, columns}) : Tensor{},
          .residual = w.random(type, {n, columns}),
          .branch = c.branch ? w.random(type, {n, columns}) : Tensor{},
          .weight = w.random(type, {columns}),
          .bias = c.bias ? w.random(type, {columns}) : Tensor{},
          .mean = c.rms ? Tensor{} : w.output(DType::f32, {n}),
          .rstd = w.output(DType::f32, {n})};
}

Prepared prepare_norm_forward(Workspace& w, DType type, const optest::NormCase& c) {
  const NormForward a = norm_arguments(w, type, c);
  const auto run = [&w, a] { norm_forward(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    Part residual = first_rows(w, a.residual), weight = Part::leading(w, a.weight, a.weight.size());
    Part out(kFirstRows.count, a.out.columns()), r = out, rstd(1, kFirstRows.count), mean = rstd, branch = r,
                                                 bias = weight;
    if (a.branch) branch = first_rows(w, a.branch);
    if (a.bias) bias = Part::leading(w, a.bias, a.bias.size());
    norm_forward({}, {.out = out.tensor(),
                      .residual_out = a.branch ? r.tensor() : Tensor{},
                      .residual = residual.tensor(),
                      .branch = a.branch ? branch.tensor() : Tensor{},
                      .weight = weight.flat(),
                      .bias = a.bias ? bias.flat() : Tensor{},
                      .mean = a.mean ? mean.flat() : Tensor{},
                      .rstd = rstd.flat(),
                      .eps = a.eps});
    return worst({first_rows(w, a.out).error_against(out),
                  Part::leading(w, a.rstd, kFirstRows.count).error_against(rstd),
                  a.mean ? Part::leading(w, a.mean, kFirstRows.count).error_against(mean) : 0,
                  a.branch ? first_rows(w, a.residual_out).error_against(r) : 0});
  };
  return {run, error};
}

/// The twin on a part of the rows (its d_residual counts) or of the columns (its d_weight and d_bias do).
struct NormBackwardPart {
  Part d_residual, d_weight, d_bias;
};
NormBackwardPart norm_backward_twin(Workspace& w, const NormBackward& a, Span rows, Span columns) {
  Part d_in = Part::of(w, a.d_residual_in, rows, {columns}), d_out = Part::of(w, a.d_out, rows, {columns});
  Part residual = Part::of(w, a.residual, rows, {columns}), rstd = Part::leading(w, a.rstd, rows.count);
  Part weight = Part::leading(w, a.weight, columns.count), mean = rstd;
  if (a.mean) mean = Part::leading(w, a.mean, rows.count);
  NormBackwardPart out{Part(rows.count, columns.count), Part(1, columns.count), Part(1, columns.count)};
  HostScratch scratch(norm_backward_scratch_bytes(Backend::cpu, rows.count, columns.count));
  norm_backward({}, {.d_residual = out.d_residual.tensor(),
                     .d_residual_in = d_in.tensor(),
                     .d_weight = out.d_weight.flat(),
                     .d_bias = a.d_bias ? out.d_bias.flat() : Tensor{},
                     .d_out = d_out.tensor(),
                     .residual = residual.tensor(),
                     .weight = weight.flat(),
                     .mean = a.mean ? mean.flat() : Tensor{},
                     .rstd = rstd.flat(),
                     .scratch = scratch.tensor()});
  return out;
}

Prepared prepare_norm_backward(Workspace& w, DType type, const optest::NormCase& c) {
  const NormForward forward = norm_arguments(w, type, c);
  norm_forward(w.context(), forward);
  const int64_t n = c.rows, columns = c.columns;
  const NormBackward a = {.d_residual = w.output(type, {n, columns}),
                          .d_residual_in = w.random(type, {n, columns}, kGradients),
                          .d_weight = w.output(DType::f32, {columns}),
                          .d_bias = c.bias ? w.output(DType::f32, {columns}) : Tensor{},
                          .d_out = w.random(type, {n, columns}, kGradients),
                          .residual = c.branch ? forward.residual_out : forward.residual,
                          .weight = forward.weight,
                          .mean = forward.mean,
                          .rstd = forward.rstd,
                          .scratch = w.scratch(norm_backward_scratch_bytes(w.context().backend, n, columns))};
  const auto run = [&w, a] { norm_backward(w.context(), a); };
  const auto error = [&w, a, run] {
    run();
    const NormBackwardPart rows = norm_backward_twin(w, a, kFirstRows, {0, a.weight.size()});
    const NormBackwardPart sums = norm_backward_twin(w, a, all_rows(a.d_out), kFirstColumns);
    return worst({first_rows(w, a.d_residual).error_against(rows.d_residual),
                  Part::leading(w, a.d_weight, kFirstColumns.count).error_against(sums.d_weight),
                  a.d_bias ? Part::leading(w, a.d_bias, kFirstColumns.count).error_against(sums.d_bias) : 0});
  };
  return {run, error};
}

/// Rows of frequent tokens come from the cache, which the cost does not know: the share of the copy may exceed 100 %.
Prepared prepare_embedding_forward(Workspace& w, DType type, const optest::EmbeddingCase& c) {
  const EmbeddingForward a = {
      .out = w.output(type, {c.batch, c.length, c.channels}),
      .tokens = w.ids({c.batch, c.length}, c.vocab),
      .token_table = w.random(type, {c.vocab, c.channels}, kWeights),
      .position_table = c.positions ? w.random(type, {c.length, c.channels}, kWeights) : Tensor{},
      .vocab_size = c.vocab,
      .bad_token = w.zeros(DType::i64, {1})};
  const auto run = [&w, a] { embedding_forward(w.context(), a); };
  const auto error = [&w, a, c, run] {
    run();
    Part table = first_columns(w, a.token_table), positions(c.length, kFirstColumns.count);
    if (c.positions) positions = first_columns(w, a.position_table);
    std::vector<int32_t> tokens = read_ints(w, a.tokens, a.tokens.size());
    Part out(c.batch * c.length, kFirstColumns.count);
    int64_t bad = 0;
    embedding_forward({}, {.out = out.tensor().view({c.batch, c.length, kFirstColumns.count}),
                           .tokens = {tokens.data(), DType::i32, {c.batch, c.length}},
                           .token_table = table.tensor(),
                           .position_table = c.positions ? positions.tensor() : Tensor{},
                           .vocab_size = c.vocab,
                           .bad_token = {&bad, DType::i64, {1}}});
    return first_columns(w, a.out).error_against(out);
  };
  return {run, error};
}

Prepared prepare_embedding_backward(Workspace& w, DType type, const optest::EmbeddingCase& c) {
  const int64_t n = c.batch * c.length;
  const EmbeddingBackward a = {
      .d_token_table = w.output(DType::f32, {c.vocab, c.channels}),
      .d_position_table = c.positions ? w.output(DType::f32, {c.length, c.channels}) : Tensor{},
      .d_out = w.random(type, {c.batch, c.length, c.channels}, kGradients),
      .tokens = w.ids({c.batch, c.length}, c.vocab),
      .vocab_size = c.vocab,
      .scratch = w.scratch(embedding_backward_scratch_bytes(w.context().backend, n, c.channels, c.vocab))};
  const auto run = [&w, a] { embedding_backward(w.context(), a); };
  const auto error = [&w, a, c, n, run] {
    run();
    Part d_out = first_columns(w, a.d_out);
    std::vector<int32_t> tokens = read_ints(w, a.tokens, n);
    Part table(c.vocab, kFirstColumns.count), positions(c.length, kFirstColumns.count);
    HostScratch scratch(embedding_backward_scratch_bytes(Backend::cpu, n, kFirstColumns.count, c.vocab));
    embedding_backward({}, {.d_token_table = table.tensor(),
                            .d_position_table = c.positions ? positions.tensor() : Tensor{},
                            .d_out = d_out.tensor().view({c.batch, c.length, kFirstColumns.count}),
                            .tokens = {tokens.data(), DType::i32, {c.batch, c.length}},
                            .vocab_size = c.vocab,
                            .scratch = scratch.tensor()});
    return worst({first_columns(w, a.d_token_table).error_against(table),
                  c.positions ? first_columns(w, a.d_position_table).error_against(positions) : 0});
  };
  return {run, error};
}

Prepared prepare_rope(Workspace& w, DType type, const optest::RopeCase& c) {
  const int64_t d = c.head_dim, columns = (c.heads + 2 * c.kv_heads) * d;
  // Frequencies of Llama 3 without its scaling; the time does not depend on them.
  std::vector<double> frequencies;
  for (int64_t i = 0; i < d / 2; ++i)
    frequencies.push_back(std::pow(500000.0, -2.0 * static_cast<double>(i) / static_cast<double>(d)));
  const std::vector<float> table = make_rope_table<float>(c.length, frequencies);
  const Rope a = {.qkv = w.watched(w.random(type, {c.batch, c.length, columns})),
                  .table = w.from_host(DType::f32, {c.length, d}, table.data()),
                  .heads = c.heads,
                  .kv_heads = c.kv_heads};
  const auto run = [&w, a] { rope(w.context(), a); };
  const auto error = [&w, a, run] {
    // The rows are the first positions of the first sequence.
    Part qkv = first_rows(w, a.qkv), table_part = first_rows(w, a.table);
    run();
    rope({}, {.qkv = qkv.sequence(), .table = table_part.tensor(), .heads = a.heads, .kv_heads = a.kv_heads});
    return first_rows(w, a.qkv).error_against(qkv);
  };
  return {run, error};
}

/// In place: a second call norms what the first has normed, which takes the same time.
Prepared prepare_qk_norm_forward(Workspace& w, DType type, const optest::QkNormCase& c) {
  const int64_t d = c.head_dim, columns = (c.heads + 2 * c.kv_heads) * d;
  const QkNormForward a = {.qkv = w.watched(w.random(type, {c.tokens, columns})),
                           .raw = w.output(type, {c.tokens, (c.heads + c.kv_heads) * d}),
                           .q_weight = w.random(type, {d}),
                           .k_weight = w.random(type, {d}),
                           .heads = c.heads,
                           .kv_heads = c.kv_heads};
  const auto run = [&w, a] { qk_norm_forward(w.context(), a); };
  const auto error = [&w, a, run] {
    Part qkv = first_rows(w, a.qkv), q_weight = Part::of(w, a.q_weight, {0, 1}),
         k_weight = Part::of(w, a.k_weight, {0, 1});
    run();
    qk_norm_forward({}, {.qkv = qkv.tensor(),
                         .raw = {},
                         .q_weight = q_weight.flat(),
                         .k_weight = k_weight.flat(),
                         .heads = a.heads,
                         .kv_heads = a.kv_heads});
    return first_rows(w, a.qkv).error_against(qkv);
  };
  return {run, error};
}

/// The gradients shrink or grow from call to call, by a factor near 1: the benchmark gives them back before each.
Prepared prepare_qk_norm_backward(Workspace& w, DType type, const optest::QkNormCase& c) {
  const int64_t d = c.head_dim, columns = (c.heads + 2 * c.kv_heads) * d;
  const QkNormBackward a = {
      .d_qkv = w.watched(w.random(type, {c.tokens, columns}, kGradients)),
      .d_q_weight = w.output(DType::f32, {d}),
      .d_k_weight = w.output(DType::f32, {d}),
      .raw = w.random(type, {c.tokens, (c.heads + c.kv_heads) * d}),
      .q_weight = w.random(type, {d}),
      .k_weight = w.random(type, {d}),
      .heads = c.heads,
      .kv_heads = c.kv_heads,
      .scratch = w.scratch(qk_norm_backward_scratch_bytes(w.context().backend, c.tokens, d))};
  const auto run = [&w, a] { qk_norm_backward(w.context(), a); };
  const auto error = [&w, a, c, d, run] {
    Part d_qkv = Part::of(w, a.d_qkv, all_rows(a.d_qkv)), raw = Part::of(w, a.raw, all_rows(a.raw)),
         q_weight = Part::of(w, a.q_weight, {0, 1}), k_weight = Part::of(w, a.k_weight, {0, 1});
    Part d_q(1, d), d_k(1, d);
    HostScratch scratch(qk_norm_backward_scratch_bytes(Backend::cpu, c.tokens, d));
    run();
    qk_norm_backward({}, {.d_qkv = d_qkv.tensor(),
                          .d_q_weight = d_q.flat(),
                          .d_k_weight = d_k.flat(),
                          .raw = raw.tensor(),
                          .q_weight = q_weight.flat(),
                          .k_weight = k_weight.flat(),
                          .heads = a.heads,
                          .kv_heads = a.kv_heads,
                          .scratch = scratch.tensor()});
    return worst({Part::of(w, a.d_qkv, all_rows(a.d_qkv)).error_against(d_qkv),
                  Part::leading(w, a.d_q_weight, d).error_against(d_q),
                  Part::leading(w, a.d_k_weight, d).error_against(d_k)});
  };
  return {run, error, [&w, a] { w.refill(a.d_qkv); }};
}

}  // namespace

void add_embedding(Cases& cases, const std::string& model, DType type, const optest::EmbeddingCase& c) {
  const int64_t n = c.batch * c.length;
  const std::string shape = without_first_word(c.label());
  cases.push_back({"embedding_forward", model, shape, embedding_forward_cost(n, c.channels, size_of(type)),
                   [=](Workspace& w) { return prepare_embedding_forward(w, type, c); }});
  cases.push_back({"embedding_backward", model, shape, embedding_backward_cost(n, c.channels, size_of(type)),
                   [=](Workspace& w) { return prepare_embedding_backward(w, type, c); }});
}

void add_norm(Cases& cases, const std::string& model, DType type, const optest::NormCase& c) {
  const size_t element = size_of(type);
  cases.push_back({"norm_forward", model, c.label(), norm_forward_cost(c.rows, c.columns, element, c.branch),
                   [=](Workspace& w) { return prepare_norm_forward(w, type, c); }});
  cases.push_back({"norm_backward", model, c.label(), norm_backward_cost(c.rows, c.columns, element),
                   [=](Workspace& w) { return prepare_norm_backward(w, type, c); }});
}

void add_qk_norm(Cases& cases, const std::string& model, DType type, const optest::QkNormCase& c) {
  const int64_t heads = c.heads + c.kv_heads;
  const std::string shape = without_first_word(c.label());
  cases.push_back({"qk_norm_forward", model, shape,
                   qk_norm_forward_cost(c.tokens, heads, c.head_dim, size_of(type), true),
                   [=](Workspace& w) { return prepare_qk_norm_forward(w, type, c); }});
  cases.push_back({"qk_norm_backward", model, shape,
                   qk_norm_backward_cost(c.tokens, heads, c.head_dim, size_of(type)),
                   [=](Workspace& w) { return prepare_qk_norm_backward(w, type, c); }});
}

void add_rope(Cases& cases, const std::string& model, DType type, const optest::RopeCase& c) {
  cases.push_back({"rope", model, without_first_word(c.label()),
                   rope_cost(c.batch * c.length, c.heads, c.kv_heads, c.head_dim, size_of(type)),
                   [=](Workspace& w) { return prepare_rope(w, type, c); }});
}

}  // namespace kinoe::bench
