// Collectives between GPUs: NCCL on a stream of its own.
//
// The stream has the highest priority, so that NCCL's few blocks get a multiprocessor as soon as one is free rather than
// after all waiting blocks of the next layer. Events order it against the compute stream in both directions; the host
// waits for neither.
//
// The communicator is a non-blocking one: NCCL would otherwise wait inside its calls, and a rank that never comes would
// hang all others there. So every call may say ncclInProgress, and is polled until it is done or its time is up. After an
// error the communicator is aborted, which also ends NCCL's kernels that wait on the GPU for a peer that is gone.
//
// Same bits every time: NCCL's rings and trees add in an order given by sizes and topology. NVLS, which adds in the
// switch, does not promise that and is off unless the environment says otherwise.
#include <cuda_runtime.h>
#include <nccl.h>
#include <sched.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

#include "trainer/collectives.h"

namespace kinoe {
namespace {

using Clock = std::chrono::steady_clock;

void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) [[unlikely]]
    call_failed(ExitCode::gpu, "CUDA", call,
                cat(cudaGetErrorName(status), " (", cudaGetErrorString(status), ")"), file, line);
}
#define CUDA_CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)

/// `comm` may be null. What NCCL's last words are about is in most cases a peer or the network.
[[noreturn]] void nccl_failed(ncclResult_t status, ncclComm_t comm, const char* call, const char* file,
                              int line) {
  const char* last = ncclGetLastError(comm);
  std::string reason = ncclGetErrorString(status);
  if (last != nullptr && last[0] != '\0') reason += cat(": ", last);
  for (char& c : reason)
    if (c == '\n') c = ' ';
  call_failed(status == ncclUnhandledCudaError ? ExitCode::gpu : ExitCode::rank_lost, "NCCL", call, reason,
              file, line);
}

ncclDataType_t nccl_type(DType type) {
  switch (type) {
    case DType::f32: return ncclFloat32;
    case DType::f64: return ncclFloat64;
    case DType::i64: return ncclInt64;
    case DType::u64: return ncclUint64;
    case DType::bf16:
    case DType::i32: break;
  }
  CHECK(false, "NCCL is not asked to add ", name_of(type));
  return ncclFloat32;
}

/// Runs a function of no arguments at the end of the scope, unless dismissed.
template <class F>
class OnExit {
 public:
  explicit OnExit(F f) : f_(std::move(f)) {}
  ~OnExit() {
    if (armed_) f_();
  }
  OnExit(const OnExit&) = delete;
  OnExit& operator=(const OnExit&) = delete;
  void dismiss() { armed_ = false; }

 private:
  F f_;
  bool armed_ = true;
};

/// An event without timing.
class Point {
 public:
  Point() { CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Point() { cudaEventDestroy(event_); }
  Point(const Point&) = delete;
  Point& operator=(const Point&) = delete;

  void record(cudaStream_t stream) { CUDA_CHECK(cudaEventRecord(event_, stream)); }
  void hold(cudaStream_t stream) const { CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }
  [[nodiscard]] bool passed() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status != cudaErrorNotReady) CUDA_CHECK(status);
    return status == cudaSuccess;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class Stream {
 public:
  Stream() {
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Owns a communicator, and polls it.
class Communicator {
 public:
  Communicator(int rank, int ranks, const ncclUniqueId& id, const Collectives::Options& options)
      : end_timeout_s_(options.init_timeout_s) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    OnExit abort([&] { end(true); });  // no destructor runs when this one throws
    finish(ncclCommInitRankConfig(&comm_, ranks, id, rank, &config), "ncclCommInitRankConfig",
           options.init_timeout_s, __FILE__, __LINE__);
    abort.dismiss();
  }
  ~Communicator() { end(std::uncaught_exceptions() > 0); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Null after an error.
  [[nodiscard]] ncclComm_t get() const {
    CHECK(comm_ != nullptr, "a communicator is used after its error");
    return comm_;
  }

  /// Returns when a call that returned `status` has been done, throws when it failed or took longer than its time.
  void finish(ncclResult_t status, const char* call, double timeout_s, const char* file, int line) {
    if (status == ncclInProgress) status = poll(timeout_s);
    if (status == ncclSuccess) return;
    OnExit abort([&] { end(true); });  // after NCCL's last words have been read
    if (status == ncclInProgress)
      call_failed(
          ExitCode::rank_lost, "NCCL", call,
          cat("not done after ", timeout_s,
              " s: a rank is missing, or the network between the hosts does not carry NCCL's connections "
              "(NCCL_DEBUG=INFO in the environment says more)"),
          file, line);
    nccl_failed(status, comm_, call, file, line);
  }

  /// Throws when something went wrong since the last look.
  void look() {
    ncclResult_t status = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(get(), &status);
    finish(asked != ncclSuccess       ? asked
           : status == ncclInProgress ? ncclSuccess
                                      : status,
           "a collective under way", 0, __FILE__, __LINE__);
  }

 private:
  /// The status once it is another than ncclInProgress, or when the time is up.
  ncclResult_t poll(double timeout_s) const {
    const auto until = Clock::now() + std::chrono::duration<double>(timeout_s);
    ncclResult_t status = ncclInProgress;
    for (int fruitless = 0; status == ncclInProgress && Clock::now() < until; ++fruitless) {
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &status);
      if (asked != ncclSuccess) return asked;
      if (fruitless < 1000)
        sched_yield();  // queuing a call takes microseconds
      else
        std::this_thread::sleep_for(std::chrono::microseconds(200));  // connecting takes the others
    }
    return status;
  }

  /// A regular end waits for what is under way, on all ranks; an abort for nothing.
  void end(bool abort) noexcept {
    if (comm_ == nullptr) return;
    if (!abort) {
      ncclResult_t status = ncclCommFinalize(comm_);
      if (status == ncclInProgress) status = poll(end_timeout_s_);
      abort = status != ncclSuccess || ncclCommDestroy(comm_) != ncclSuccess;
    }
    if (abort) ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  ncclComm_t comm_ = nullptr;
  double end_timeout_s_;
};

class Nccl : public Collectives {
 public:
  Nccl(int rank, int ranks, const ncclUniqueId& id, const Options& options)
      : Collectives(rank, ranks, options),
        call_timeout_s_(options.call_timeout_s),
        comm_(rank, ranks, id, options) {}

  void follow(const Context& ctx) override {
    check_gpu(ctx);
    followed_.record(static_cast<cudaStream_t>(ctx.stream));
    followed_.hold(stream_.get());
  }

  Mark mark() override {
    const Mark number = traffic().calls;
    if (newest().number == number) return number;
    newest_ = (newest_ + 1) % marks_.size();
    newest().number = number;
    newest().point.record(stream_.get());
    return number;
  }

  void await(const Context& ctx, Mark mark) override {
    CHECK(mark <= newest().number, "mark ", mark, " of ", newest().number, " that were made");
    comm_.look();
    if (mark == 0) return;
    // The oldest one that is late enough: a mark may have been overwritten, by a later one.
    size_t slot = newest_;
    for (size_t i = 1; i <= marks_.size(); ++i) {
      slot = (newest_ + i) % marks_.size();
      if (marks_[slot].number >= mark) break;
    }
    if (ctx.backend == Backend::cuda) return marks_[slot].point.hold(static_cast<cudaStream_t>(ctx.stream));
    while (!marks_[slot].point.passed()) {
      comm_.look();
      sched_yield();
    }
  }

  void poke() override { comm_.look(); }

 protected:
  void queue_all_reduce(const Tensor& buffer) override {
    finish(ncclAllReduce(buffer.data, buffer.data, count_of(buffer), nccl_type(buffer.dtype), ncclSum,
                         comm_.get(), stream_.get()),
           "ncclAllReduce", __LINE__);
  }
  void queue_reduce_scatter(const Tensor& mine, const Tensor& all) override {
    finish(ncclReduceScatter(all.data, mine.data, count_of(mine), nccl_type(mine.dtype), ncclSum, comm_.get(),
                             stream_.get()),
           "ncclReduceScatter", __LINE__);
  }
  void queue_all_gather(const Tensor& all, const Tensor& mine) override {
    finish(ncclAllGather(mine.data, all.data, mine.bytes(), ncclUint8, comm_.get(), stream_.get()),
           "ncclAllGather", __LINE__);
  }

 private:
  struct Marked {
    Mark number = 0;
    Point point;
  };

  static void check_gpu(const Context& ctx) {
    CHECK(ctx.backend == Backend::cuda, "NCCL moves numbers in GPU memory only");
  }
  static size_t count_of(const Tensor& t) { return static_cast<size_t>(t.size()); }

  void finish(ncclResult_t status, const char* call, int line) {
    comm_.finish(status, call, call_timeout_s_, __FILE__, line);
  }
  Marked& newest() { return marks_[newest_]; }

  double call_timeout_s_;
  Stream stream_;
  Point followed_;
  std::array<Marked, 256> marks_;  // numbers rise from the slot after the newest one, around to it
  size_t newest_ = 0;
  Communicator comm_;  // the last: it ends first, while the stream is there
};

/// Rank 0's id on all ranks, in hexadecimal on its way.
ncclUniqueId common_id(int rank, const std::function<std::string(const std::string&)>& exchange) {
  static constexpr char kDigits[] = "0123456789abcdef";
  ncclUniqueId id{};
  std::string text;
  if (rank == 0) {
    const ncclResult_t status = ncclGetUniqueId(&id);
    if (status != ncclSuccess) nccl_failed(status, nullptr, "ncclGetUniqueId", __FILE__, __LINE__);
    for (const char c : id.internal) {
      const auto byte = static_cast<unsigned char>(c);
      text += {kDigits[byte / 16], kDigits[byte % 16]};
    }
  }
  text = exchange(text);
  CHECK(text.size() == 2 * sizeof(id.internal), "an NCCL id of ", text.size(), " digits");
  for (size_t i = 0; i < sizeof(id.internal); ++i)
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return id;
}

}  // namespace

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "";
  return cat(version / 10000, ".", version % 10000 / 100, ".", version % 100);
}

std::unique_ptr<Collectives> collectives_nccl(const Context& ctx, int rank, int ranks,
                                              const std::function<std::string(const std::string&)>& exchange,
                                              const Collectives::Options& options) {
  CHECK(ctx.backend == Backend::cuda, "NCCL joins GPUs");
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);  // read by NCCL at its first call
  return std::make_unique<Nccl>(rank, ranks, common_id(rank, exchange), options);
}

}  // namespace kinoe
