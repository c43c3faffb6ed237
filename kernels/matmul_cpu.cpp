// The linear layer on the CPU: its three products are one, with the strides of their matrices exchanged.
//
//   forward:  y[N, O]  = x[N, C] B        B[c, o] = W's element of output o and input c
//   dgrad:    dx[N, C] = dy[N, O] B       B[o, c] = the same element
//   wgrad:    dW[O, C] = dy^T[O, N] x[N, C], or dW[C, O] = x^T[C, N] dy[N, O]: whichever is the weight's layout
//
// kernels/common/gemm_cpu.h has the blocking and the order of the sums.
#include "kernels/matmul.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/common/arguments.h"
#include "kernels/common/cpu.h"
#include "kernels/common/gemm_cpu.h"
#include "kernels/common/simd.h"

namespace kinoe {

namespace {

/// Outputs and inputs of a weight (or its gradient).
struct WeightShape {
  int64_t outputs, inputs;
};

WeightShape shape_of(const char* op, const Tensor& weight, WeightLayout layout) {
  CHECK(weight.ndim == 2, op, ": the weight must have two dimensions, is ", weight.shape());
  return layout == WeightLayout::out_in ? WeightShape{weight.dim(0), weight.dim(1)}
                                        : WeightShape{weight.dim(1), weight.dim(0)};
}

}  // namespace

void check(const MatmulForward& a) {
  const char* op = "matmul_forward";
  const DType type = a.y.dtype;
  require_type({op, "weight", a.weight}, type);
  const auto [outputs, inputs] = shape_of(op, a.weight, a.layout);
  require_matrix({op, "y", a.y}, type, a.y.rows(), outputs);
  require_matrix({op, "x", a.x}, type, a.y.rows(), inputs);
  if (a.bias) require_size({op, "bias", a.bias}, type, outputs);
}

void check(const MatmulDgrad& a) {
  const char* op = "matmul_dgrad";
  const DType type = a.dx.dtype;
  require_type({op, "weight", a.weight}, type);
  const auto [outputs, inputs] = shape_of(op, a.weight, a.layout);
  require_matrix({op, "dx", a.dx}, type, a.dx.rows(), inputs);
  require_matrix({op, "dy", a.dy}, type, a.dx.rows(), outputs);
  if (a.gelu_input) {
    require_matrix({op, "gelu_input", a.gelu_input}, type, a.dx.rows(), inputs);
    CHECK(a.gelu_input.data != a.dx.data || a.dx.size() == 0, op,
          ": gelu_input may not be the memory of dx, which the product fills first");
  }
}

void check(const MatmulWgrad& a) {
  const char* op = "matmul_wgrad";
  const DType type = a.dy.dtype, accumulator = accumulator_of(type);
  require_type({op, "d_weight", a.d_weight}, accumulator);
  const auto [outputs, inputs] = shape_of(op, a.d_weight, a.layout);
  if (a.d_bias) require_size({op, "d_bias", a.d_bias}, accumulator, outputs);
  require_matrix({op, "dy", a.dy}, type, a.dy.rows(), outputs);
  require_matrix({op, "x", a.x}, type, a.dy.rows(), inputs);
}

namespace cpu {

namespace {

/// W^T[C, O] as a matrix of (input, output).
template <class T>
Strided<T> transposed_weight(const T* weight, const WeightShape& shape, WeightLayout layout) {
  return layout == WeightLayout::out_in ? Strided<T>{weight, 1, shape.inputs}
                                        : Strided<T>{weight, shape.outputs, 1};
}

template <class T>
Strided<T> transposed(const Strided<T>& m) {
  return {m.data, m.column, m.row};
}

template <class T>
Strided<T> row_major(const Tensor& matrix) {
  return {matrix.as<T>(), matrix.columns(), 1};
}

constexpr int64_t kSumColumns = 64;  // columns one thread sums at a time
constexpr int64_t kSumRows = 256;    // rows summed from zero before they are added to the total

/// sum[j] (+)= sum_n matrix[n, j] for `columns` <= kSumColumns neighbouring columns.
template <class T>
KINOE_SIMD void sum_columns(T* sum, const T* matrix, int64_t rows, int64_t columns, int64_t pitch,
                            bool accumulate) {
  T total[kSumColumns] = {}, piece[kSumColumns];
  for (int64_t j = 0; j < columns; ++j) total[j] = accumulate ? sum[j] : T{0};
  for (int64_t n0 = 0; n0 < rows; n0 += kSumRows) {
    std::fill(piece, piece + kSumColumns, T{0});
    const int64_t n1 = std::min(n0 + kSumRows, rows);
    if (columns == kSumColumns) {
      for (int64_t n = n0; n < n1; ++n)
        for (int64_t j = 0; j < kSumColumns; ++j) piece[j] += matrix[n * pitch + j];
    } else {
      for (int64_t n = n0; n < n1; ++n)
        for (int64_t j = 0; j < columns; ++j) piece[j] += matrix[n * pitch + j];
    }
    for (int64_t j = 0; j < columns; ++j) total[j] += piece[j];
  }
  for (int64_t j = 0; j < columns; ++j) sum[j] = total[j];
}

template <class T>
void bias_gradient(const MatmulWgrad& args) {
  const int64_t rows = args.dy.rows(), columns = args.dy.columns();
  T* sum = args.d_bias.as<T>();
  const T* dy = args.dy.as<T>();
#pragma omp parallel for schedule(static) if (rows * columns > kParallelWork)
  for (int64_t j = 0; j < columns; j += kSumColumns)
    sum_columns(sum + j, dy + j, rows, std::min(kSumColumns, columns - j), columns, args.accumulate);
}

}  // namespace

void matmul_forward(const Context& /*ctx*/, const MatmulForward& args) {
  check(args);
  with_scalar("matmul_forward", args.y.dtype, [&]<class T>(T) {
    const WeightShape shape = shape_of("matmul_forward", args.weight, args.layout);
    multiply(Product<T>{.rows = args.y.rows(),
                        .columns = shape.outputs,
                        .depth = shape.inputs,
                        .a = row_major<T>(args.x),
                        .b = transposed_weight(args.weight.as<T>(), shape, args.layout),
                        .c = args.y.as<T>(),
                        .c_row = shape.outputs,
                        .bias = args.bias ? args.bias.as<T>() : nullptr});
  });
}

void matmul_dgrad(const Context& ctx, const MatmulDgrad& args) {
  check(args);
  with_scalar("matmul_dgrad", args.dx.dtype, [&]<class T>(T) {
    const WeightShape shape = shape_of("matmul_dgrad", args.weight, args.layout);
    multiply(Product<T>{.rows = args.dx.rows(),
                        .columns = shape.inputs,
                        .depth = shape.outputs,
                        .a = row_major<T>(args.dy),
                        .b = transposed(transposed_weight(args.weight.as<T>(), shape, args.layout)),
                        .c = args.dx.as<T>(),
                        .c_row = shape.inputs});
  });
  if (args.gelu_input) cpu::gelu_backward(ctx, {.dx = args.dx, .d_out = args.dx, .x = args.gelu_input});
}

void matmul_wgrad(const Context& /*ctx*/, const MatmulWgrad& args) {
  check(args);
  with_scalar("matmul_wgrad", args.dy.dtype, [&]<class T>(T) {
    const bool out_in = args.layout == WeightLayout::out_in;
    const Strided<T> dy = row_major<T>(args.dy), x = row_major<T>(args.x);
    multiply(Product<T>{.rows = args.d_weight.dim(0),
                        .columns = args.d_weight.dim(1),
                        .depth = args.dy.rows(),
                        .a = transposed(out_in ? dy : x),
                        .b = out_in ? x : dy,
                        .c = args.d_weight.as<T>(),
                        .c_row = args.d_weight.dim(1),
                        .accumulate = args.accumulate});
    if (args.d_bias) bias_gradient<T>(args);
  });
}

}  // namespace cpu

}  // namespace kinoe
