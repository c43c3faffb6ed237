// Loader: micro-batches of a Dataset in host memory, prepared by a thread while the device computes.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#include "dataloader/dataset.h"
#include "kernels/common/device.h"

namespace kinoe {

/// Rows `valid_rows` and above are padding: tokens 0, targets -1 (ignored). A batch without any target is legal:
/// target_tokens is 0 and nobody may divide by it.
struct Batch {
  const int32_t* tokens = nullptr;   // [rows, seq_len]
  const int32_t* targets = nullptr;  // [rows, seq_len]; -1: ignored
  // With a document mask [rows, seq_len], else null: first position, and one past the last, of each position's document within
  // its row. A padding row is one document.
  const int32_t* doc_start = nullptr;
  const int32_t* doc_end = nullptr;
  int64_t rows = 0;
  int64_t seq_len = 0;
  int64_t first_sample = 0;
  int64_t valid_rows = 0;
  int64_t target_tokens = 0;  // number of targets that are not -1
};

class Loader {
 public:
  /// A batch stays untouched until this many further fetches have been made: on the GPU, its upload must have passed by then.
  static constexpr int kHeld = 2;
  /// At most this many batches are prepared ahead.
  static constexpr int kAhead = 2;

  /// Host memory for all buffers, to be allocated with Memory::pinned(backend, ...).
  static size_t buffer_bytes(int64_t rows, int64_t seq_len, bool document_mask);

  /// `dataset` must outlive the loader. `rows` is the fixed micro-batch size; `buffers` holds buffer_bytes() at least.
  Loader(const Dataset& dataset, int64_t rows, Memory buffers);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Samples [first_sample, first_sample + valid_rows), 0 <= valid_rows <= rows. If it is the next prefetched one it is waited for;
  /// otherwise what was prefetched is dropped. What went wrong in the thread is thrown here.
  const Batch& fetch(int64_t first_sample, int64_t valid_rows);

  /// Announces a later fetch; call it in the order of the fetches to come. A hint: false (nothing queued) when kAhead
  /// batches are queued already.
  bool prefetch(int64_t first_sample, int64_t valid_rows);

  /// Milliseconds the last fetch waited for data.
  [[nodiscard]] double data_wait_ms() const { return data_wait_ms_; }

 private:
  static constexpr int kSlots = kHeld + kAhead;
  struct Slot {
    Batch batch;
    int32_t* tokens = nullptr;
    int32_t* targets = nullptr;
    int32_t* doc_start = nullptr;
    int32_t* doc_end = nullptr;
    bool ready = false;
    std::exception_ptr error;
  };
  void work();
  void fill(Slot& slot) const;

  const Dataset& dataset_;
  Memory buffers_;
  std::array<Slot, kSlots> slots_;
  double data_wait_ms_ = 0;

  // Shared with the thread, under mutex_. Slots form a ring: [head_, head_ + queued_) are announced and not yet fetched.
  std::mutex mutex_;
  std::condition_variable changed_;
  int head_ = 0;
  int queued_ = 0;
  int filling_ = -1;  // slot the thread writes just now
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace kinoe
