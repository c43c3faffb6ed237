// A ring of host buffers and the thread that fills it.
#include "dataloader/loader.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "kernels/common/check.h"

namespace kinoe {
namespace {

// Buffers start at multiples of a cache line, so that vector loads and copies are aligned whatever the shape.
int64_t padded_tokens(int64_t rows, int64_t seq_len) { return (rows * seq_len + 63) / 64 * 64; }

}  // namespace

size_t Loader::buffer_bytes(int64_t rows, int64_t seq_len, bool document_mask) {
  const int64_t arrays = document_mask ? 4 : 2;
  return static_cast<size_t>(arrays * kSlots * padded_tokens(rows, seq_len)) * sizeof(int32_t);
}

Loader::Loader(const Dataset& dataset, int64_t rows, Memory buffers)
    : dataset_(dataset), buffers_(std::move(buffers)) {
  const int64_t seq_len = dataset.seq_len();
  const bool documents = dataset.document_mask();
  CHECK(rows > 0 && buffers_.bytes() >= buffer_bytes(rows, seq_len, documents), "loader of ", rows,
        " rows with ", buffers_.bytes(), " bytes of buffers");
  auto* memory = static_cast<int32_t*>(buffers_.data());
  const auto take = [&] {
    int32_t* array = memory;
    memory += padded_tokens(rows, seq_len);
    return array;
  };
  for (Slot& slot : slots_) {
    slot.batch.tokens = slot.tokens = take();
    slot.batch.targets = slot.targets = take();
    if (documents) {
      slot.batch.doc_start = slot.doc_start = take();
      slot.batch.doc_end = slot.doc_end = take();
    }
    slot.batch.rows = rows;
    slot.batch.seq_len = seq_len;
  }
  thread_ = std::thread([this] { work(); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool Loader::prefetch(int64_t first_sample, int64_t valid_rows) {
  const std::lock_guard lock(mutex_);
  if (queued_ == kAhead) return false;
  Slot& slot = slots_[static_cast<size_t>((head_ + queued_) % kSlots)];
  CHECK(valid_rows >= 0 && valid_rows <= slot.batch.rows, valid_rows, " valid rows in a batch of ",
        slot.batch.rows);
  slot.batch.first_sample = first_sample;
  slot.batch.valid_rows = valid_rows;
  slot.ready = false;
  slot.error = nullptr;
  ++queued_;
  changed_.notify_all();
  return true;
}

const Batch& Loader::fetch(int64_t first_sample, int64_t valid_rows) {
  const auto start = std::chrono::steady_clock::now();
  bool expected = false;
  {
    std::unique_lock lock(mutex_);
    const Batch& head = slots_[static_cast<size_t>(head_)].batch;
    expected = queued_ > 0 && head.first_sample == first_sample && head.valid_rows == valid_rows;
    if (!expected) {
      queued_ = 0;
      changed_.wait(lock, [this] { return filling_ < 0; });
    }
  }
  if (!expected) prefetch(first_sample, valid_rows);
  std::unique_lock lock(mutex_);
  Slot& slot = slots_[static_cast<size_t>(head_)];
  changed_.wait(lock, [&] { return slot.ready; });
  head_ = (head_ + 1) % kSlots;
  --queued_;
  changed_.notify_all();
  data_wait_ms_ = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  if (slot.error) std::rethrow_exception(slot.error);
  return slot.batch;
}

void Loader::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto next_unready = [this] {
      for (int i = 0; i < queued_; ++i) {
        const int index = (head_ + i) % kSlots;
        if (!slots_[static_cast<size_t>(index)].ready) return index;
      }
      return -1;
    };
    changed_.wait(lock, [&] { return stop_ || next_unready() >= 0; });
    if (stop_) return;
    filling_ = next_unready();
    Slot& slot = slots_[static_cast<size_t>(filling_)];
    lock.unlock();
    try {
      fill(slot);
    } catch (...) {
      slot.error = std::current_exception();
    }
    lock.lock();
    slot.ready = true;
    filling_ = -1;
    changed_.notify_all();
  }
}

void Loader::fill(Slot& slot) const {
  Batch& batch = slot.batch;
  const int64_t seq_len = batch.seq_len;
  for (int64_t row = 0; row < batch.valid_rows; ++row) dataset_.will_need(batch.first_sample + row);
  std::vector<int32_t> sample(static_cast<size_t>(seq_len) + 1);
  for (int64_t row = 0; row < batch.valid_rows; ++row) {
    dataset_.read(batch.first_sample + row, sample.data());
    std::copy_n(sample.data(), seq_len, slot.tokens + row * seq_len);
    std::copy_n(sample.data() + 1, seq_len, slot.targets + row * seq_len);
    if (slot.doc_start != nullptr)
      dataset_.find_documents(batch.first_sample + row, sample.data(), slot.doc_start + row * seq_len,
                              slot.doc_end + row * seq_len);
  }
  const int64_t valid = batch.valid_rows * seq_len;
  std::fill(slot.tokens + valid, slot.tokens + batch.rows * seq_len, 0);
  std::fill(slot.targets + valid, slot.targets + batch.rows * seq_len, -1);
  if (slot.doc_start != nullptr) {
    std::fill(slot.doc_start + valid, slot.doc_start + batch.rows * seq_len, 0);
    std::fill(slot.doc_end + valid, slot.doc_end + batch.rows * seq_len, static_cast<int32_t>(seq_len));
  }
  batch.target_tokens = valid;
}

}  // namespace kinoe
