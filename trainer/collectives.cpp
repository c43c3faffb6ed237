// What all implementations share: the contract's checks, the numbers of the calls, what they send.
#include "trainer/collectives.h"

namespace kinoe {
namespace {

void check_summable(const char* what, const Tensor& t) {
  CHECK(t.dtype == DType::f32 || t.dtype == DType::f64 || t.dtype == DType::i64 || t.dtype == DType::u64,
        what, " adds fp32, fp64, int64 and uint64, not ", name_of(t.dtype));
}

/// `part` of every rank makes up `whole`, elsewhere in memory.
void check_parts(const char* what, int ranks, const Tensor& part, const Tensor& whole) {
  CHECK(part.dtype == whole.dtype, what, " of ", name_of(part.dtype), " parts and ", name_of(whole.dtype));
  CHECK(whole.size() >= ranks * part.size(), what, " of ", ranks, " parts of ", part.size(), " elements and ",
        whole.size(), " in all");
  const auto p = reinterpret_cast<uintptr_t>(part.data), w = reinterpret_cast<uintptr_t>(whole.data);
  const size_t used = static_cast<size_t>(ranks) * part.bytes();
  CHECK(p + part.bytes() <= w || w + used <= p, what, ": a rank's part overlaps the whole");
}

}  // namespace

Collectives::Collectives(int rank, int ranks, const Options& options)
    : rank_(rank), ranks_(ranks), reached_(options.reached) {
  CHECK(ranks >= 1 && rank >= 0 && rank < ranks, "rank ", rank, " of ", ranks);
  CHECK(options.piece_elements >= 1, "pieces of ", options.piece_elements, " elements");
}

void Collectives::begin(const char* what, int64_t bytes) {
  ++traffic_.calls;
  traffic_.bytes += bytes;
  if (reached_) reached_(what, traffic_.calls);
}

void Collectives::all_reduce(const Tensor& buffer) {
  check_summable("all-reduce", buffer);
  begin("all-reduce", static_cast<int64_t>(buffer.bytes()) * 2 * (ranks_ - 1) / ranks_);
  if (buffer.size() > 0) queue_all_reduce(buffer);
}

void Collectives::reduce_scatter(const Tensor& mine, const Tensor& all) {
  check_summable("reduce-scatter", mine);
  check_parts("reduce-scatter", ranks_, mine, all);
  begin("reduce-scatter", (ranks_ - 1) * static_cast<int64_t>(mine.bytes()));
  if (mine.size() > 0) queue_reduce_scatter(mine, all);
}

void Collectives::all_gather(const Tensor& all, const Tensor& mine) {
  check_parts("all-gather", ranks_, mine, all);
  begin("all-gather", (ranks_ - 1) * static_cast<int64_t>(mine.bytes()));
  if (mine.size() > 0) queue_all_gather(all, mine);
}

}  // namespace kinoe
