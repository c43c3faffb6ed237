// `train_gpt inspect` on checkpoints and runs: what one holds, and where two begin to differ.
#include "test/resume_program.h"

namespace kinoe {
namespace {

class InspectCheckpoint : public ResumeProgramTest {
 protected:
  void expect_shows(const std::vector<std::string>& parts, const std::vector<std::string>& arguments,
                    int code = 0) const {
    const Outcome got = run(arguments);
    EXPECT_EQ(got.code, code) << got.output;
    for (const std::string& part : parts)
      EXPECT_NE(got.output.find(part), std::string::npos) << "no '" << part << "' in\n" << got.output;
  }
};

TEST_F(InspectCheckpoint, OneOfThem) {
  make_half_a_run("run");
  expect_code(kStopped, run(go_on("run", {"--lr", "0.02", "--override", "lr", "--stop-after", "25"})));
  const std::string checkpoint = "run/checkpoints/step_00000025";
  const std::vector<std::string> parts = {
      "step                   25\n",
      "samples                100\n",
      "tokens                 800 of 1,280\n",
      "data                   a.bin: 1 file, 417 tokens",
      "m                      20 tensors of F32",
      "in trainer/optimizer-m.safetensors",
      "masters                are the weights, which are fp32",
      "changed                after step 20: lr from 0.01 to 0.02",
      "warmup-tokens          160",
      "hash of the weights    " + state("run", "step_00000025")["weights_hash"].get<std::string>()};
  expect_shows(parts, {"inspect", checkpoint});
  expect_shows(parts, {"inspect", "run"});
  expect_shows({"checksums              all ", "bytes are right"}, {"inspect", checkpoint, "--full"});
  flip(checkpoint + "/trainer/optimizer-v.safetensors");
  EXPECT_EQ(run({"inspect", checkpoint}).code, 0) << "only --full reads the numbers";
  const Outcome damaged = run({"inspect", checkpoint, "--full"});
  EXPECT_EQ(damaged.code, kCheckpoint);
  EXPECT_NE(
      damaged.output.find("train_gpt: error: " + checkpoint + "/trainer/optimizer-v.safetensors: tensor "),
      std::string::npos)
      << damaged.output;
}

constexpr int kDiffer = 1;

TEST_F(InspectCheckpoint, TwoOfThem) {
  make_half_a_run("run");
  fs::copy(path("run"), path("copy"), fs::copy_options::recursive);
  expect_shows(
      {"weights                equal\n", "m                      equal\n", "v                      equal\n"},
      {"inspect", "run/checkpoints/step_00000020", "copy/checkpoints/step_00000020"});
  expect_shows(
      {"step                   10 and 20\n", "tokens                 320 and 640\n",
       "weights                first in model.embed_tokens.weight, element ", "elements differ, by "},
      {"inspect", "run/checkpoints/step_00000010", "run/checkpoints/step_00000020"}, kDiffer);
  // The first differing step of two runs: another rate after the warm-up shows in the weights of step 1, a stop does not show.
  expect_code(0, run(go_on("run")));
  expect_shows({"equal                  20 steps\n", "only in the second     20 steps\n"},
               {"inspect", "copy", "run"}, kDiffer);
  fs::copy(path("run"), path("same"), fs::copy_options::recursive);
  expect_shows({"equal                  40 steps\n"}, {"inspect", "run", "same"});
  expect_code(0, run(go_on("copy", {"--weight-decay", "0.5", "--override", "weight-decay"})));
  const Outcome got = run({"inspect", "run", "copy"});
  EXPECT_NE(got.output.find("first difference       step 21\n"), std::string::npos) << got.output;
  EXPECT_EQ(got.code, kDiffer) << got.output;
  EXPECT_NE(got.output.find("equal before it        20 steps\n"), std::string::npos) << got.output;
  // The loss of step 21 is that of the weights before it.
  EXPECT_EQ(got.output.find("\n  loss "), std::string::npos) << got.output;
  EXPECT_NE(got.output.find("\n  hash of the weights "), std::string::npos) << got.output;
  expect_shows({"weight-decay           0.1 and 0.5\n"},
               {"inspect", "run/checkpoints/step_00000040", "copy/checkpoints/step_00000040"}, kDiffer);

  expect_code(kStopped, run(start("other", "untied.json", {"--stop-after", "20"})));
  expect_shows({"models", "tie_word_embeddings"},
               {"inspect", "run/checkpoints/step_00000020", "other/checkpoints/step_00000020"}, kDiffer);
  expect_error(kUsage, {"inspect run", "two checkpoints", "two runs"},
               {"inspect", "run", "run/checkpoints/step_00000020"});
  expect_error(kUsage, {"inspect a.bin"}, {"inspect", "a.bin", "a.bin"});
}

}  // namespace
}  // namespace kinoe
