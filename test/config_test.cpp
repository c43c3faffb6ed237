// The command line and its mistakes, in words.
#include "trainer/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "kernels/common/nearest.h"
#include "trainer/config_options.h"
#include "trainer/model_config.h"
#include "trainer/monitor.h"
#include "trainer/schedule.h"

namespace kinoe {
namespace {

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;

CommandLine parse(const Strings& args) {
  std::vector<const char*> argv = {"train_gpt"};
  for (const std::string& arg : args) argv.push_back(arg.c_str());
  return parse_command_line(static_cast<int>(argv.size()), argv.data());
}

template <class Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ExitCode::usage) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "";
}
std::string refusal(const Strings& args) {
  return refusal_of([&] { parse(args); });
}

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << "'" << (text) << "'"

std::string temporary_file(const std::string& name, const std::string& text) {
  const fs::path dir = fs::path(testing::TempDir()) / "config_test";
  fs::create_directories(dir);
  std::ofstream(dir / name) << text;
  return (dir / name).string();
}

/// Every option of training away from its default.
const Strings kEverything = {"--data",    "a.txt",          "b*.bin:0.5", "--val-data",
                             "c.bin",     "--model",        "gpt2-124m",  "--out",
                             "runs/x",    "--save-every",   "10",         "--tokens",
                             "1.5M",      "--seed",         "7",          "--lr",
                             "3e-4",      "--global-batch", "32",         "--micro-batch",
                             "5",         "--seq-len",      "128",        "--schedule",
                             "wsd",       "--warmup-steps", "3",          "--min-lr-frac",
                             "0.25",      "--weight-decay", "0.05",       "--beta1",
                             "0.8",       "--beta2",        "0.99",       "--eps",
                             "1e-9",      "--grad-clip",    "0.5",        "--adam-state",
                             "bf16",      "--eval-every",   "20",         "--eval-batches",
                             "4",         "--sample-every", "30",         "--device",
                             "cuda",      "--dtype",        "fp32",       "--recompute",
                             "light",     "--log-format",   "json",       "--gemm-trace",
                             "--dry-run", "--zero",         "0",          "--determinism",
                             "topology",  "--expect-ranks", "3",          "--launch-timeout",
                             "50",        "--hang-timeout", "60"};

TEST(Config, WithoutArgumentsItTrainsWithDefaults) {
  const CommandLine c = parse({});
  EXPECT_EQ(c.action, Action::train);
  EXPECT_EQ(c.run, RunConfig{});
  EXPECT_EQ(c.run.model, "");
  EXPECT_TRUE(c.run.data.empty());
}

TEST(Config, EveryOptionReachesItsField) {
  const RunConfig c = parse(kEverything).run;
  EXPECT_EQ(c.data, (Strings{"a.txt", "b*.bin:0.5"}));
  EXPECT_EQ(c.val_data, Strings{"c.bin"});
  EXPECT_EQ(c.model, "gpt2-124m");
  EXPECT_EQ(c.out, "runs/x");
  EXPECT_EQ(c.save_every, 10);
  EXPECT_EQ(c.steps, std::nullopt);
  EXPECT_EQ(c.tokens, 1'500'000);
  EXPECT_EQ(c.global_batch, 32);
  EXPECT_EQ(c.micro_batch, 5);
  EXPECT_EQ(c.seq_len, 128);
  EXPECT_EQ(c.seed, 7);
  EXPECT_EQ(c.lr, 3e-4);
  EXPECT_EQ(c.schedule, "wsd");
  EXPECT_EQ(c.warmup_tokens, std::nullopt);
  EXPECT_EQ(c.warmup_steps, 3);
  EXPECT_EQ(c.min_lr_frac, 0.25);
  EXPECT_EQ(c.weight_decay, 0.05);
  EXPECT_EQ(c.beta1, 0.8);
  EXPECT_EQ(c.beta2, 0.99);
  EXPECT_EQ(c.eps, 1e-9);
  EXPECT_EQ(c.grad_clip, 0.5);
  EXPECT_EQ(c.adam_state, DType::bf16);
  EXPECT_EQ(c.eval_every, 20);
  EXPECT_EQ(c.eval_batches, 4);
  EXPECT_EQ(c.sample_every, 30);
  EXPECT_EQ(c.device, DeviceChoice::cuda);
  EXPECT_EQ(c.dtype, DType::f32);
  EXPECT_EQ(c.recompute, "light");
  EXPECT_EQ(c.log_format, "json");
  EXPECT_TRUE(c.gemm_trace);
  EXPECT_TRUE(c.dry_run);
  EXPECT_EQ(c.zero, 0);
  EXPECT_EQ(c.determinism, "topology");
  EXPECT_EQ(c.expect_ranks, 3);
  EXPECT_EQ(c.launch_timeout, 50);
  EXPECT_EQ(c.hang_timeout, 60);
  EXPECT_EQ(parse({"--steps", "5", "--warmup-tokens", "64k"}).run.steps, 5);
  EXPECT_EQ(parse({"--steps", "5", "--warmup-tokens", "64k"}).run.warmup_tokens, 64'000);
  EXPECT_EQ(parse({"--lr=0.5"}).run.lr, 0.5);
}

TEST(Config, PathsAreTakenAsTheyStand) {
  EXPECT_EQ(parse({"--data", "a", "--val-data", "v", "--data", "b"}).run.data, (Strings{"a", "b"}));
  EXPECT_EQ(parse({"--data", "a b, c"}).run.data, Strings{"a b, c"});
  // A glob in brackets is no list.
  EXPECT_EQ(parse({"--data", "[0-9]*[0-9]", "x"}).run.data, (Strings{"./[0-9]*[0-9]", "x"}));
  EXPECT_EQ(parse({"--data=[ab]"}).run.data, Strings{"./[ab]"});
  EXPECT_EQ(parse({"--val-data", "[a,b]"}).run.val_data, Strings{"./[a,b]"});
}

TEST(Config, TomlReadsBackToAnEqualConfiguration) {
  RunConfig odd = parse(kEverything).run;
  odd.data = {"with \"quotes\" and \\", "line\nend", "a,b", "[c]"};
  odd.lr = 0.1 + 0.2;
  odd.eps = 1.2345678901234567e-9;
  odd.grad_clip = 0;
  odd.seed = INT64_MAX;
  RunConfig resolved;
  resolve(resolved, {.parameters = 1000, .max_positions = 256});
  RunConfig steps;
  steps.steps = 3;
  steps.warmup_tokens = 0;
  steps.recompute = "block";
  for (const RunConfig& config : {RunConfig{}, parse(kEverything).run, odd, resolved, steps}) {
    EXPECT_EQ(run_config_from_toml(to_toml(config), "t"), config) << to_toml(config);
    const std::string file = temporary_file("config.toml", to_toml(config));
    EXPECT_EQ(parse({"--config", file}).run, config) << to_toml(config);
  }
}

TEST(Config, TheCommandLineWinsOverTheFile) {
  const std::string file =
      temporary_file("win.toml",
                     "steps = 100\nwarmup-tokens = 5000\nlr = 0.5\ndata = [\"a\", \"b\"]\n"
                     "tokens-typo = 1\n");
  EXPECT_CONTAINS(refusal({"--config", file}), "line 5: unknown option 'tokens-typo'; nearest known: tokens");
  const std::string good =
      temporary_file("good.toml", "steps = 100\nwarmup-tokens = 5000\nlr = 0.5\ndata = [\"a\", \"b\"]\n");
  RunConfig c = parse({"--lr", "0.25", "--config", good, "--data", "c"}).run;
  EXPECT_EQ(c.steps, 100);
  EXPECT_EQ(c.lr, 0.25);
  EXPECT_EQ(c.data, Strings{"c"});
  // Also where it says the same in another unit.
  c = parse({"--config", good, "--tokens", "1M", "--warmup-steps", "7"}).run;
  EXPECT_EQ(c.steps, std::nullopt);
  EXPECT_EQ(c.tokens, 1'000'000);
  EXPECT_EQ(c.warmup_tokens, std::nullopt);
  EXPECT_EQ(c.warmup_steps, 7);
}

TEST(Config, FilesAcceptCountsAsStringsAndFloats) {
  EXPECT_EQ(run_config_from_toml("tokens = \"600B\"", "t").tokens, 600'000'000'000);
  EXPECT_EQ(run_config_from_toml("tokens = 600e9", "t").tokens, 600'000'000'000);
  EXPECT_EQ(run_config_from_toml("steps = 1_000", "t").steps, 1000);
  EXPECT_EQ(run_config_from_toml("data = \"one.txt\"", "t").data, Strings{"one.txt"});
  EXPECT_TRUE(run_config_from_toml("dry-run = true", "t").dry_run);
  EXPECT_FALSE(run_config_from_toml("dry-run = false", "t").dry_run);
}

TEST(Config, MistakesInFilesNameFileAndLine) {
  const auto read = [](const std::string& text) {
    return refusal_of([&] { run_config_from_toml(text, "run.toml"); });
  };
  EXPECT_CONTAINS(read("# x\nlr = nan"), "run.toml line 2: lr: expected a finite number above 0");
  EXPECT_CONTAINS(read("stpes = 5"), "run.toml line 1: unknown option 'stpes'; nearest known: steps");
  EXPECT_CONTAINS(read("config = \"other.toml\""), "unknown option 'config'");
  EXPECT_CONTAINS(read("steps = 5\ntokens = 5"), "say the same thing");
  EXPECT_CONTAINS(read("steps = [5]"), "expected one value");
  EXPECT_CONTAINS(read("dry-run = 1"), "expected true or false");
  EXPECT_CONTAINS(read("model = \"\""), "empty");
  EXPECT_CONTAINS(read("data = [\"a\", \"\"]"), "empty");
  EXPECT_CONTAINS(read("data = []"), "empty list");  // it would train on the stories
  EXPECT_CONTAINS(read("\xEF\xBB\xBFstpes = 5"), "line 1: unknown option 'stpes'");  // a byte order mark
  EXPECT_CONTAINS(refusal({"--config", "/nowhere/x.toml"}), "/nowhere/x.toml does not exist");
  EXPECT_CONTAINS(refusal({"--config", testing::TempDir()}), "expected a TOML file");
}

TEST(Config, UnknownOptionsAreRefusedWithTheNearestName) {
  EXPECT_CONTAINS(refusal({"--stpes", "5"}), "unknown option --stpes; nearest known: --steps");
  EXPECT_CONTAINS(refusal({"--learning_rate=1"}), "unknown option --learning_rate; nearest known: --lr");
  EXPECT_CONTAINS(refusal({"--seq_len", "5"}), "nearest known: --seq-len");
  EXPECT_CONTAINS(refusal({"--wramup-steps", "5"}), "nearest known: --warmup-steps");
  EXPECT_CONTAINS(refusal({"--confg", "x"}), "nearest known: --config");
  EXPECT_CONTAINS(refusal({"-steps", "5"}), "unknown option -steps; nearest known: --steps");
  EXPECT_CONTAINS(refusal({"smaple", "x"}), "unknown command 'smaple'; nearest known: sample");
  EXPECT_CONTAINS(refusal({"data.txt"}), "unknown command 'data.txt'");
  EXPECT_CONTAINS(refusal({"sample", "x", "--promt", "y"}),
                  "unknown option --promt; nearest known: --prompt");
  EXPECT_CONTAINS(refusal({"eval", "x", "y"}), "unexpected argument 'y'");
}

// Nothing is accepted and then ignored: what later work brings is unknown today.
TEST(Config, OptionsThatDoNotWorkYetAreUnknown) {
  const std::string help = parse({"--help"}).text;
  for (const char* name : {"on-nan", "max-minutes", "shard-group"}) {
    EXPECT_CONTAINS(refusal({std::string("--") + name, "1"}), cat("unknown option --", name));
    EXPECT_EQ(help.find(cat("--", name)), std::string::npos) << name;
  }
  for (const char* name : {"plan", "preflight"})
    EXPECT_CONTAINS(refusal({name}), cat("unknown command '", name));
}

TEST(Config, InspectTakesAPathAndItsOwnOptions) {
  const CommandLine all = parse({"inspect", "a.bin", "--full", "--offset", "64k", "--vocab", "50257"});
  EXPECT_EQ(all.action, Action::inspect);
  InspectConfig expected;
  expected.path = "a.bin";
  expected.full = true;
  expected.offset = 64000;
  expected.vocab = 50257;
  EXPECT_EQ(all.inspect, expected);
  EXPECT_CONTAINS(refusal({"inspect", "a.bin", "--offset", "-1"}), "--offset");
  EXPECT_CONTAINS(refusal({"--steps", "3", "inspect", "a.bin"}), "before the command inspect");
  EXPECT_CONTAINS(refusal({"inspect", "a.bin", "--steps", "3"}), "--steps");
}

TEST(Config, AnOptionGivenTwiceIsRefused) {
  EXPECT_CONTAINS(refusal({"--steps", "1", "--steps", "2"}), "--steps is given more than once");
}

TEST(Config, RangesAreChecked) {
  const std::vector<std::pair<std::string, Strings>> wrong = {
      {"lr", {"nan", "inf", "-inf", "-1", "0", "1e-60", "1e60", "x", "1e-3x", "", "--steps"}},
      {"beta1", {"1", "1.5", "-0.1", "nan", "0.999999999999"}},
      {"beta2", {"1", "nan"}},
      {"eps", {"0", "-1e-8", "nan", "1e-60"}},
      {"weight-decay", {"-0.1", "nan", "inf"}},
      {"min-lr-frac", {"-0.1", "1.1", "nan"}},
      {"grad-clip", {"-1", "nan", "inf"}},
      {"steps", {"0", "-5", "1.5", "ten", "1e30", "64q", "nan"}},
      {"tokens", {"0", "-1"}},
      {"global-batch", {"0", "-1"}},
      {"micro-batch", {"0", "-1"}},
      {"seq-len", {"0", "-1"}},
      {"seed", {"-1"}},
      {"warmup-steps", {"-1"}},
      {"warmup-tokens", {"-1"}},
      {"save-every", {"-1"}},
      {"eval-every", {"-1"}},
      {"eval-batches", {"-1"}},
      {"sample-every", {"-1"}},
      {"schedule", {"cosin", "COSINE", ""}},
      {"device", {"gpu", "cuda:1"}},
      {"dtype", {"fp16", "float32"}},
      {"adam-state", {"fp8"}},
      {"recompute", {"full"}},
      {"determinism", {"ranks"}},
      {"zero", {"2", "-1", "one"}},
      {"expect-ranks", {"0", "-1"}},
      {"launch-timeout", {"0"}},
      {"hang-timeout", {"0"}},
      {"log-format", {"text"}},
      {"dry-run", {"maybe"}},
  };
  for (const auto& [name, values] : wrong)
    for (const std::string& value : values)
      EXPECT_CONTAINS(refusal({cat("--", name, value.starts_with("--") ? " " : "=", value)}),
                      cat("--", name));
  EXPECT_CONTAINS(refusal({"--lr", "--steps", "5"}), "--lr: expected a finite number above 0, got '--steps'");
  EXPECT_CONTAINS(refusal({"--lr"}), "--lr");
  EXPECT_CONTAINS(refusal({"--steps", "1", "--steps", "2"}), "--steps");
  EXPECT_CONTAINS(refusal({"--data"}), "--data");
  EXPECT_EQ(refusal({"--beta1", "0", "--grad-clip", "0", "--weight-decay", "0", "--min-lr-frac", "1"}), "");
  EXPECT_EQ(refusal({"--save-every", "0", "--eval-every", "0", "--eval-batches", "0", "--warmup-steps", "0"}),
            "");
}

TEST(Config, TwoWaysToSayTheSameExcludeEachOther) {
  EXPECT_CONTAINS(refusal({"--steps", "5", "--tokens", "5"}), "--steps and --tokens say the same thing");
  EXPECT_CONTAINS(refusal({"--warmup-tokens", "5", "--warmup-steps", "5"}), "say the same thing");
}

TEST(Config, Counts) {
  const std::vector<std::pair<const char*, int64_t>> good = {{"0", 0},
                                                             {"1000", 1000},
                                                             {"64k", 64'000},
                                                             {"64K", 64'000},
                                                             {"1.5M", 1'500'000},
                                                             {"600B", 600'000'000'000},
                                                             {"600G", 600'000'000'000},
                                                             {"600e9", 600'000'000'000},
                                                             {"1.2T", 1'200'000'000'000},
                                                             {"1e3k", 1'000'000},
                                                             {"1.50k", 1500},
                                                             {".5k", 500},
                                                             {"2.", 2},
                                                             {"1.000", 1},
                                                             {"10e-1", 1},
                                                             {"+7", 7},
                                                             {"9007199254740993", 9007199254740993},
                                                             {"9223372036854775807", INT64_MAX},
                                                             {"0e99999999999", 0},
                                                             {"1.0005M", 1'000'500}};
  for (const auto& [text, value] : good) EXPECT_EQ(parse_count(text, "x", 0), value) << text;
  for (const char* bad : {"",
                          ".",
                          "k",
                          "1kk",
                          "1 000",
                          "1,000",
                          "1m",
                          "1b",
                          "0x10",
                          "1.5",
                          "1.2345k",
                          "1e",
                          "1e-1",
                          "e5",
                          "1e5.5",
                          "9223372036854775808",
                          "10000000T",
                          "2e19",
                          "20000000000000000000",
                          "1e400",
                          "nan",
                          "inf",
                          "--1",
                          "-1",
                          "1k "})
    EXPECT_CONTAINS(refusal_of([&] { parse_count(bad, "x", 0); }),
                    "x: expected a whole number of at least 0");
  EXPECT_EQ(parse_count("-3", "x", -5), -3);
  EXPECT_CONTAINS(refusal_of([] { parse_count("1", "x", 2); }), "at least 2");
  EXPECT_EQ(refusal({"--launch-timeout", "10s"}),
            "--launch-timeout: expected a whole number of seconds of at least 1, got '10s'");
}

TEST(Config, HelpListsEveryOptionOnceInItsGroupWithItsDefault) {
  for (const Strings& args : {Strings{"--help"}, Strings{"-h"}, Strings{"--steps", "5", "--help"}}) {
    const CommandLine c = parse(args);
    EXPECT_EQ(c.action, Action::help);
    std::set<std::string> groups;
    for (const Option<RunConfig>& option : run_options()) {
      EXPECT_CONTAINS(c.text,
                      "\n  --" + option.name + (option.arity == Arity::flag ? " " : " " + option.metavar));
      groups.insert(option.group);
      EXPECT_CONTAINS(c.text, "\n" + option.group + ":\n");
    }
    const std::set<std::string> wanted = {
        "Data",      "Model",      "Run directory",        "Length and batch",
        "Optimizer", "Evaluation", "Hardware and numbers", "Ranks",
        "Reports"};
    EXPECT_EQ(groups, wanted);
    EXPECT_CONTAINS(c.text, "(default: 0.95)");
    EXPECT_CONTAINS(c.text, "(default: cosine)");
    EXPECT_CONTAINS(c.text, "--config FILE");
    for (size_t begin = 0, end; (end = c.text.find('\n', begin)) != std::string::npos; begin = end + 1)
      EXPECT_LE(end - begin, 110U) << c.text.substr(begin, end - begin);
  }
  const std::string help = parse({"--help"}).text;
  for (const std::string& preset : preset_names()) EXPECT_CONTAINS(help, preset);
  for (const char* part : {"5 a rank was lost", "75 stopped on request", "scripts/run_mpi.sh 8 ",
                           "train_gpt eval --help", "--hang-timeout SECONDS"})
    EXPECT_CONTAINS(help, part);
  EXPECT_CONTAINS(parse({"inspect", "--help"}).text, "1 where they differ");
  EXPECT_CONTAINS(parse({"sample", "--help"}).text, "--top-p X");
  EXPECT_EQ(parse({"sample", "--help"}).text.find("--weight-decay"), std::string::npos);
  EXPECT_CONTAINS(parse({"eval", "--help"}).text, "--val-data PATH");
}

TEST(Config, SampleAndEval) {
  CommandLine c = parse({"sample", "runs/a"});
  EXPECT_EQ(c.action, Action::sample);
  EXPECT_EQ(c.sample.directory, "runs/a");
  EXPECT_EQ(c.sample.prompt, "\n\n");
  c = parse({"sample", "--prompt", "[INST] -x", "runs/a", "--max-tokens", "1k", "--temperature", "0",
             "--top-k", "5", "--top-p", "0.9", "--seed", "3", "--device", "cpu", "--dtype", "fp32"});
  const SampleConfig sample = {.directory = "runs/a",
                               .prompt = "[INST] -x",
                               .max_tokens = 1000,
                               .temperature = 0,
                               .top_k = 5,
                               .top_p = 0.9,
                               .seed = 3,
                               .device = DeviceChoice::cpu,
                               .dtype = DType::f32};
  EXPECT_EQ(c.sample, sample);
  EXPECT_EQ(parse({"sample", "d", "--prompt", "[a,b]"}).sample.prompt, "[a,b]");
  EXPECT_EQ(parse({"sample", "d", "--prompt", "-1"}).sample.prompt, "-1");

  c = parse({"eval", "runs/a/checkpoints/step_1", "--val-data", "x", "y", "--seq-len", "64", "--micro-batch",
             "3", "--eval-batches", "9"});
  EXPECT_EQ(c.action, Action::eval);
  const EvalConfig eval = {.directory = "runs/a/checkpoints/step_1",
                           .val_data = {"x", "y"},
                           .seq_len = 64,
                           .micro_batch = 3,
                           .eval_batches = 9,
                           .device = DeviceChoice::automatic,
                           .dtype = std::nullopt};
  EXPECT_EQ(c.eval, eval);

  EXPECT_CONTAINS(refusal({"sample"}), "expected a directory");
  EXPECT_CONTAINS(refusal({"eval", "--val-data", "x"}), "expected a directory");
  EXPECT_CONTAINS(refusal({"--steps", "5", "sample", "x"}), "--steps stands before the command sample");
  EXPECT_CONTAINS(refusal({"--config", "x", "eval", "x"}), "--config stands before the command eval");
  EXPECT_CONTAINS(refusal({"sample", "x", "--top-p", "0"}), "--top-p");
  EXPECT_CONTAINS(refusal({"sample", "x", "--top-p", "1.01"}), "--top-p");
  EXPECT_CONTAINS(refusal({"sample", "x", "--temperature", "-1"}), "--temperature");
  EXPECT_CONTAINS(refusal({"sample", "x", "--max-tokens", "0"}), "--max-tokens");
}

// The words are spelled again in the leaves that give them meaning.
TEST(Config, WordsAgreeWithTheOtherLeaves) {
  for (const std::string& name : schedule_names()) EXPECT_EQ(parse({"--schedule", name}).run.schedule, name);
  for (const char* name : {"line", "megatron", "json"}) {
    EXPECT_EQ(parse({"--log-format", name}).run.log_format, name);
    EXPECT_TRUE(parse_log_format(name).has_value()) << name;
  }
}

TEST(Config, NearestName) {
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("stpes", "steps"), 1U);
  EXPECT_EQ(edit_distance("abc", "abc"), 0U);
  EXPECT_EQ(nearest_name("x", {}), "");
  EXPECT_EQ(nearest_name("aab", {"zzz", "aaa", "aac"}), "aaa");
  // Not mistyped, another word: what has one in common, or is its initials.
  EXPECT_EQ(nearest_name("--batch_size", {"--schedule", "--micro-batch"}), "--micro-batch");
  EXPECT_EQ(nearest_name("--learning-rate", {"--val-data", "--lr"}), "--lr");
  EXPECT_EQ(nearest_name("gpt2", {"tiny", "gpt2-124m"}), "gpt2-124m");
  EXPECT_EQ(nearest_name("--stpes", {"--save-steps", "--steps"}), "--steps");
}

}  // namespace
}  // namespace kinoe
