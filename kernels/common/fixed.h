// Units of sums kept as integers. The order of integer additions changes no bit, so neither the order of micro-batches
// nor the number of ranks can be seen in such a sum.
#pragma once

namespace kinoe {

/// Of sums of gradients (kernels/fixed_point.h): numbers below 2^12 fit with a bit to spare.
inline constexpr double kGradientUnit = 0x1p-50;

/// Of sums of losses (kernels/crossentropy.h, StepState), in nats. A micro-batch's sum is rounded once: half a unit,
/// 3e-8 nats, whatever the number of its tokens.
inline constexpr double kLossUnit = 0x1p-24;

/// Limit of a micro-batch's mean loss per row, in nats: sums over fewer than 2^25 rows do not wrap. No model that
/// learns comes near it: a uniform guess among a million tokens loses 14 nats.
inline constexpr double kLossLimit = 0x1p14;

}  // namespace kinoe
