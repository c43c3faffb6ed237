// Sequences of launches that repeat: recorded once, queued as one from then on.
//
// A layer is ten to thirty kernels, and the host needs 2 to 4 us to queue each with everything around it: where the kernels
// take less than that, the GPU waits for the host. A CUDA graph queues the whole sequence in one call and leaves no host
// between its kernels. What is recorded is launches with their arguments, so a sequence repeats only while addresses,
// sizes and scalars do: all that can differ belongs into its key, or into memory of the device.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "kernels/common/device.h"

namespace kinoe {

/// Two calls with equal keys must queue the same launches with the same arguments.
using GraphKey = std::array<uint64_t, 13>;

/// A recorded sequence.
class Recording {
 public:
  Recording() = default;
  virtual ~Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  /// Queues it.
  virtual void replay() = 0;
};

/// Makes recordings on one stream.
class Recorder {
 public:
  Recorder() = default;
  virtual ~Recorder() = default;
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  /// Calls `work`; what it queues is recorded and not run.
  virtual std::unique_ptr<Recording> record(const std::function<void()>& work) = 0;
};

/// The sequences of one model in one allocation: with the memory their addresses go stale.
class Graphs {
 public:
  /// For ctx.graphs. Null, so that everything is queued launch by launch, on the CPU and where the environment says
  /// KINOE_GRAPHS=0 (to compare).
  static std::unique_ptr<Graphs> on(const Context& ctx);

  explicit Graphs(std::unique_ptr<Recorder> recorder) : recorder_(std::move(recorder)) {}

  /// Queues `work`: the first time as it is, since first uses may measure, load modules and wait; the second time it is
  /// recorded; from then on it is replayed and `work` is not called. When `work` throws, the use does not count.
  void run(const GraphKey& key, const std::function<void()>& work);

  [[nodiscard]] int64_t recorded() const { return recorded_; }
  [[nodiscard]] int64_t replayed() const {
    return replayed_;
  }  // the first replay follows the recording at once

 private:
  struct Sequence {
    bool seen = false;
    std::unique_ptr<Recording> recording;
  };
  std::unique_ptr<Recorder> recorder_;
  std::map<GraphKey, Sequence> sequences_;
  int64_t recorded_ = 0;
  int64_t replayed_ = 0;
};

namespace cuda {
/// A Recorder of CUDA graphs on the stream of ctx, a GPU's.
std::unique_ptr<Recorder> make_recorder(const Context& ctx);
}  // namespace cuda

}  // namespace kinoe
