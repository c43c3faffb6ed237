// A run of one rank: every sum is its only summand. The other ranks' code path at the price of a copy.
#include "trainer/collectives.h"

namespace kinoe {
namespace {

class Self : public Collectives {
 public:
  explicit Self(const Options& options) : Collectives(0, 1, options) {}

  void follow(const Context& ctx) override { ctx_ = ctx; }
  void await(const Context& ctx, Mark mark) override {
    CHECK(mark <= traffic().calls, "mark ", mark, " of ", traffic().calls, " calls");
    CHECK(ctx.backend == Backend::cpu || ctx.stream == ctx_.stream,
          "one rank's copies run on the stream given to follow() and can be awaited there");
    if (ctx.backend == Backend::cpu) synchronize(ctx_);
  }

 protected:
  void queue_all_reduce(const Tensor& /*buffer*/) override {}
  void queue_reduce_scatter(const Tensor& mine, const Tensor& all) override {
    copy(ctx_, mine.data, all.data, mine.bytes());
  }
  void queue_all_gather(const Tensor& all, const Tensor& mine) override {
    copy(ctx_, all.data, mine.data, mine.bytes());
  }

 private:
  Context ctx_;
};

}  // namespace

std::unique_ptr<Collectives> collectives_self(const Collectives::Options& options) {
  return std::make_unique<Self>(options);
}

}  // namespace kinoe
