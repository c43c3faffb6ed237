// Recorded sequences: when work is called, recorded and replayed; what a key tells apart; and on a GPU, training with and
// without graphs to the same bits, and a host that never waits inside a step.
#include "kernels/common/graphs.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>

#include "test/model_harness.h"
#include "test/op_harness.h"

namespace kinoe {
namespace {

/// Notes what happens instead of recording anything.
class NotingRecorder : public Recorder {
 public:
  explicit NotingRecorder(std::vector<std::string>& notes) : notes_(notes) {}
  std::unique_ptr<Recording> record(const std::function<void()>& work) override {
    notes_.emplace_back("record");
    work();
    return std::make_unique<Noting>(notes_);
  }

 private:
  struct Noting : Recording {
    explicit Noting(std::vector<std::string>& notes) : notes_(notes) {}
    void replay() override { notes_.emplace_back("replay"); }
    std::vector<std::string>& notes_;
  };
  std::vector<std::string>& notes_;
};

using Notes = std::vector<std::string>;

TEST(Graphs, RunThenRecordThenReplay) {
  Notes notes;
  Graphs graphs(std::make_unique<NotingRecorder>(notes));
  const auto work = [&] { notes.emplace_back("work"); };
  GraphKey key{};
  graphs.run(key, work);
  EXPECT_EQ(notes, Notes({"work"}));
  graphs.run(key, work);
  EXPECT_EQ(notes, Notes({"work", "record", "work", "replay"}));
  graphs.run(key, work);
  graphs.run(key, work);
  EXPECT_EQ(notes, Notes({"work", "record", "work", "replay", "replay", "replay"}));
  EXPECT_EQ(graphs.recorded(), 1);
  EXPECT_EQ(graphs.replayed(), 3);

  notes.clear();
  for (size_t i = 0; i < key.size(); ++i) {  // another key is another sequence, whatever word differs
    GraphKey other = key;
    other[i] = 1;
    graphs.run(other, work);
  }
  EXPECT_EQ(notes, Notes(key.size(), "work"));
}

TEST(Graphs, AUseThatThrowsDoesNotCount) {
  Notes notes;
  Graphs graphs(std::make_unique<NotingRecorder>(notes));
  bool bad = true;
  const auto work = [&] {
    if (bad) throw std::runtime_error("bad");
    notes.emplace_back("work");
  };
  EXPECT_THROW(graphs.run({}, work), std::runtime_error);
  bad = false;
  graphs.run({}, work);
  bad = true;
  EXPECT_THROW(graphs.run({}, work), std::runtime_error);
  bad = false;
  graphs.run({}, work);
  EXPECT_EQ(notes, Notes({"work", "record", "record", "work", "replay"}));
  EXPECT_EQ(graphs.recorded(), 1);
}

TEST(Graphs, TheCpuHasNone) { EXPECT_EQ(Graphs::on(Context{}), nullptr); }

TEST(Graphs, KeysTellApartWhatALaunchDependsOn) {
  std::array<char, 8> memory{};
  const auto at = [&](size_t i) { return static_cast<void*>(memory.data() + i); };
  Activations acts;
  acts.shape = {.batch = 2, .length = 3, .recompute = Recompute::none, .training = true, .head_rows = 4};
  acts.batch.tokens.data = at(0);
  acts.state.data = at(1);
  const Piece piece{.kind = Piece::backward_layer, .layer = 1, .buckets = {at(2), at(3), at(4), at(5)}};
  std::set<GraphKey> keys{graph_key(acts, piece)};
  size_t expected = 1;
  const auto expect_another = [&](const char* what, const auto& change) {
    Activations a = acts;
    Piece p = piece;
    change(a, p);
    keys.insert(graph_key(a, p));
    EXPECT_EQ(keys.size(), ++expected) << what;
  };
  expect_another("kind", [](Activations&, Piece& p) { p.kind = Piece::forward_layer; });
  expect_another("layer", [](Activations&, Piece& p) { p.layer = 0; });
  for (size_t i = 0; i < piece.buckets.size(); ++i)
    expect_another("bucket", [&](Activations&, Piece& p) { p.buckets[i] = at(7); });
  expect_another("accumulate", [](Activations&, Piece& p) { p.accumulate = true; });
  expect_another("embedding", [](Activations&, Piece& p) { p.accumulate_embedding = true; });
  expect_another("nominal tokens", [](Activations&, Piece& p) { p.nominal_tokens = 6; });
  expect_another("batch", [](Activations& a, Piece&) { a.shape.batch = 3; });
  expect_another("length", [](Activations& a, Piece&) { a.shape.length = 2; });
  expect_another("light", [](Activations& a, Piece&) { a.shape.recompute = Recompute::light; });
  expect_another("block", [](Activations& a, Piece&) { a.shape.recompute = Recompute::block; });
  expect_another("documents", [](Activations& a, Piece&) { a.shape.document_mask = true; });
  expect_another("inference", [](Activations& a, Piece&) { a.shape.training = false; });
  expect_another("head rows", [](Activations& a, Piece&) { a.shape.head_rows = 2; });
  expect_another("tokens", [&](Activations& a, Piece&) { a.batch.tokens.data = at(7); });
  expect_another("state", [&](Activations& a, Piece&) { a.state.data = at(7); });
}

// ---- On a GPU ----------------------------------------------------------------------------------------------------------

struct Trained {
  std::vector<StepState> steps;
  std::vector<double> evaluations;
  int64_t recorded = 0, replayed = 0;
};

constexpr int kSteps = 5, kMicroBatches = 3;

Trained trained(Device& device, const ModelConfig& config, DType dtype, Recompute recompute,
                bool with_graphs) {
  const int64_t b = 2, t = 40;
  ModelRun run(device.context(), config, dtype,
               {.batch = b, .length = t, .recompute = recompute, .training = true, .head_rows = 48});
  const std::unique_ptr<Graphs> graphs = with_graphs ? Graphs::on(run.ctx) : nullptr;
  run.ctx.graphs = graphs.get();
  Trained result;
  for (int step = 1; step <= kSteps; ++step) {
    for (int i = 0; i < kMicroBatches; ++i) {
      const auto seed = static_cast<uint64_t>(step * 10 + i);
      run.micro_batch(random_ids(b * t, config.vocab_size, seed), random_ids(b * t, config.vocab_size, ~seed),
                      i == 0, static_cast<double>(kMicroBatches * b * t));
    }
    run.optimizer->update(run.ctx, run.acts, 1e-3 * step, step, static_cast<double>(kMicroBatches * b * t));
    result.steps.push_back(run.state());
    begin_step(run.ctx, run.acts);
    forward(run.ctx, run.model, run.acts, run.hooks());
    head_loss(run.ctx, run.model, run.acts, run.hooks());
    result.evaluations.push_back(loss_of(run.state()));
  }
  if (graphs) {
    result.recorded = graphs->recorded();
    result.replayed = graphs->replayed();
  }
  return result;
}

TEST(GraphsGpu, TrainingHasTheSameBitsWithAndWithout) {
  KINOE_GPU_OR_SKIP(device);
  if (!Graphs::on(device->context())) GTEST_SKIP() << "KINOE_GRAPHS=0";
  struct Case {
    const char* name;
    ModelConfig config;
    DType dtype;
    Recompute recompute;
  };
  for (const Case& c :
       {Case{"gpt2 fp32", with_heads_of_64(small_gpt2()), DType::f32, Recompute::none},
        Case{"gpt2 bf16", with_heads_of_64(small_gpt2()), DType::bf16, Recompute::none},
        Case{"gpt2 bf16 block", with_heads_of_64(small_gpt2()), DType::bf16, Recompute::block},
        Case{"llama bf16", with_heads_of_64(small_llama(false)), DType::bf16, Recompute::none},
        Case{"tied llama bf16 light", with_heads_of_64(small_llama(true)), DType::bf16, Recompute::light}}) {
    const Trained plain = trained(*device, c.config, c.dtype, c.recompute, false);
    const Trained graphs = trained(*device, c.config, c.dtype, c.recompute, true);
    std::set<uint64_t> hashes;
    for (size_t i = 0; i < plain.steps.size(); ++i) {
      EXPECT_EQ(std::memcmp(&plain.steps[i], &graphs.steps[i], sizeof(StepState)), 0)
          << c.name << ", step " << i + 1 << ": loss " << loss_of(plain.steps[i]) << " and "
          << loss_of(graphs.steps[i]);
      EXPECT_EQ(plain.evaluations[i], graphs.evaluations[i]) << c.name << ", evaluation " << i + 1;
      EXPECT_EQ(plain.steps[i].halted, 0);
      hashes.insert(plain.steps[i].weights_hash);
    }
    EXPECT_EQ(hashes.size(), plain.steps.size()) << c.name << ": the weights did not change";
    // Forward and evaluation of each layer, backward of each with and without accumulation, head and embedding likewise,
    // the head's loss. All but the first use of each are replays.
    const int64_t layers = c.config.layers;
    EXPECT_EQ(graphs.recorded, layers + 2 * (layers + 2) + 1) << c.name;
    const int64_t uses = kSteps * (kMicroBatches * (2 * layers + 2) + layers + 1);
    EXPECT_EQ(graphs.replayed, uses - graphs.recorded) << c.name;
  }
}

TEST(GraphsGpu, TheHostDoesNotWaitInsideAStep) {
  KINOE_GPU_OR_SKIP(device);
  const int64_t b = 2, t = 64;
  const ModelConfig config = with_heads_of_64(small_gpt2());
  for (const bool with_graphs : {false, true}) {
    ModelRun run(device->context(), config, DType::bf16, {.batch = b, .length = t});
    const std::unique_ptr<Graphs> graphs = with_graphs ? Graphs::on(run.ctx) : nullptr;
    run.ctx.graphs = graphs.get();
    const Memory pinned = Memory::pinned(Backend::cuda, sizeof(StepState));
    run.set_batch(random_ids(b * t, config.vocab_size, 1), random_ids(b * t, config.vocab_size, 2));
    const auto step = [&](int64_t number) {
      begin_step(run.ctx, run.acts);
      for (int i = 0; i < 2; ++i) {
        run.begin_micro_batch(i == 0);
        forward(run.ctx, run.model, run.acts, run.hooks());
        backward(run.ctx, run.model, run.acts, run.hooks(), 2.0 * b * t);
      }
      run.optimizer->update(run.ctx, run.acts, 1e-3, number, 2.0 * b * t);
      download(run.ctx, pinned.data(), run.acts.state.data, sizeof(StepState));
    };
    for (int64_t i = 1; i <= 3; ++i) step(i);  // measures products, records graphs
    synchronize(run.ctx);

    // A fifth of a second of work ahead of the step: a host that waits for anything in it waits for all of that.
    const size_t bytes = size_t{2} << 30;
    const Memory ballast = Memory::on(Backend::cuda, bytes);
    Event began(Backend::cuda), ended(Backend::cuda);
    began.record(run.ctx);
    for (int i = 0; i < 400; ++i) fill_zero(run.ctx, ballast.data(), bytes);
    const auto start = std::chrono::steady_clock::now();
    step(4);
    const std::chrono::duration<double, std::milli> host = std::chrono::steady_clock::now() - start;
    ended.record(run.ctx);
    ended.wait();
    const double device_ms = ended.ms_since(began);
    std::printf("             %s graphs: queued in %.2f ms behind %.0f ms of work\n",
                with_graphs ? "with" : "without", host.count(), device_ms);
    EXPECT_GT(device_ms, 100);
    EXPECT_LT(host.count(), device_ms / 3);
  }
}

}  // namespace
}  // namespace kinoe
