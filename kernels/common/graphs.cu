// CUDA graphs by stream capture. Capture is of this thread alone: the loader's thread may do what it likes meanwhile.
#include "kernels/common/graphs.h"

#include <cuda_runtime.h>

#include "kernels/common/cuda_util.cuh"

namespace kinoe::cuda {
namespace {

class GraphRecording final : public Recording {
 public:
  GraphRecording(cudaGraph_t graph, cudaStream_t stream) : stream_(stream) {
    CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
  }
  ~GraphRecording() override { cudaGraphExecDestroy(executable_); }
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;

  void replay() override { CUDA_CHECK(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaGraphExec_t executable_ = nullptr;
  cudaStream_t stream_;
};

class GraphRecorder final : public Recorder {
 public:
  explicit GraphRecorder(cudaStream_t stream) : stream_(stream) {}

  std::unique_ptr<Recording> record(const std::function<void()>& work) override {
    CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
      work();
    } catch (...) {
      // The stream must leave capture whatever happened; what was captured so far is of no use.
      if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess && graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
    struct Release {
      cudaGraph_t graph;
      ~Release() { cudaGraphDestroy(graph); }
    } release{graph};
    return std::make_unique<GraphRecording>(graph, stream_);
  }

 private:
  cudaStream_t stream_;
};

}  // namespace

std::unique_ptr<Recorder> make_recorder(const Context& ctx) {
  return std::make_unique<GraphRecorder>(stream_of(ctx));
}

}  // namespace kinoe::cuda
