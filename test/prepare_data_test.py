"""Tests of scripts/prepare_data.py with the library tokenizers; test/prepare_data_test.cpp runs them where that is installed."""
import gzip
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

import tokenizers

SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts")
# Small pieces of work and a record after each: a short run has many moments at which it can be killed.
DRIVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import prepare_data as p
p.UNIT_BYTES, p.RECORD_EVERY_S = 3000, 0
left = int(sys.argv[2])
def counted(function):
    def call(*arguments, **named):
        global left
        left -= 1
        if left == 0: os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call
if left > 0:
    for owner, name in ((os, "replace"), (os, "fsync"), (os, "remove"), (p.Split, "append"), (p.Split, "finish"), (p, "file_hash")):
        setattr(owner, name, counted(getattr(owner, name)))
sys.argv[1:] = sys.argv[3:]
if __name__ == "__main__":
    sys.exit(p.main())
"""


def words(seed, count):
    r = random.Random(seed)
    return " ".join("".join(r.choice("abcdeé語\n") for _ in range(r.randint(1, 7))) for _ in range(count))


def read(path):
    with open(path, "rb") as f:
        return f.read()


def read_shard(path):
    data = read(path)
    magic, version, tokens = struct.unpack("<iiI", data[:12])
    code, width = {(20240520, 1): ("H", 2), (20240801, 7): ("I", 4)}[magic, version]
    assert data[12:1024] == bytes(1012) and len(data) == 1024 + tokens * width
    return list(struct.unpack(f"<{tokens}{code}", data[1024:]))


def contents(folder):
    return {name: read(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}


class PrepareData(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.top)
        self.documents = [words(i, 20 + 37 * i % 200) for i in range(60)] + ["an end <|endoftext|> that is none"]
        self.files = [self.put(f"doc{i:03}.txt", text.encode()) for i, text in enumerate(self.documents)]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(self.documents, tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        tokenizer.enable_padding(length=2048)  # what a file may ask for, and what must not happen
        tokenizer.enable_truncation(5)
        self.tokenizer = self.path("tok/tokenizer.json")
        os.mkdir(self.path("tok"))
        tokenizer.save(self.tokenizer)

    def path(self, name):
        return os.path.join(self.top, name)

    def put(self, name, data):
        with open(self.path(name), "wb") as f:
            f.write(data)
        return self.path(name)

    def prepare(self, out, *arguments, files=None, kill=0, tokenizer=True):
        given = ["--tokenizer", self.tokenizer] if tokenizer else []
        return subprocess.run([sys.executable, "-c", DRIVER, SCRIPTS, str(kill), "--out", self.path(out), "--val-fraction", "0.2",
                               "--shard-tokens", "3000", *given, *arguments, *(self.files if files is None else files)],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)

    def good(self, out, *arguments, **named):
        result = self.prepare(out, *arguments, **named)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(result.stderr, "")  # no progress bar where there is no terminal
        return contents(self.path(out))

    def bad(self, code, part, out, *arguments, **named):
        result = self.prepare(out, *arguments, **named)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertIn(part, result.stderr)

    def tokens(self, out, split):
        names = [n for n in sorted(os.listdir(self.path(out))) if n.startswith(split + "_")]
        return [read_shard(self.path(os.path.join(out, n))) for n in names]

    def expected(self, split):
        """The tokens by the library alone, document by document."""
        tokenizer = tokenizers.Tokenizer.from_file(self.tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        ids = []
        for text in self.documents:
            fraction = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56
            if (fraction < 0.2) == (split == "val"):
                ids += tokenizer.encode(text, add_special_tokens=False).ids + [tokenizer.token_to_id("<|endoftext|>")]
        return ids

    def test_tokens_shards_and_manifest(self):
        self.good("out", "--workers", "2")
        manifest = json.loads(contents(self.path("out"))["manifest.json"])
        self.assertEqual((manifest["format"], manifest["tokenizer"]["vocab_size"], manifest["tokenizer"]["eot_id"]), ("kinoe-data-1", 400, 0))
        documents = 0
        for split in ("train", "val"):
            shards, expected = self.tokens("out", split), self.expected(split)
            self.assertEqual(sum(shards, []), expected)
            self.assertTrue(all(len(s) == 3000 for s in shards[:-1]))
            listed = [f for f in manifest["files"] if f["split"] == split]
            self.assertEqual([f["tokens"] for f in listed], [len(s) for s in shards])
            self.assertEqual([f["documents"] for f in listed], [s.count(0) for s in shards])
            documents += sum(f["documents"] for f in listed)
        self.assertGreater(len(self.tokens("out", "train")), 2)
        self.assertEqual(documents, len(self.documents))
        spec = importlib.util.find_spec("xxhash")
        if spec:
            import xxhash
            for f in manifest["files"]:
                self.assertEqual(f["xxh3_128"], xxhash.xxh3_128(contents(self.path("out"))[f["name"]]).hexdigest())

    def test_any_number_of_workers_and_any_kind_of_file(self):
        one = self.good("one", "--workers", "1")
        self.assertEqual(one, self.good("five", "--workers", "5"))
        lines = "".join(json.dumps({"id": 1, "body": t}) + "\n" for t in self.documents).encode()
        inputs = {"l.jsonl": lines, "l.jsonl.gz": gzip.compress(lines)}
        try:
            import zstandard
            inputs["l.jsonl.zst"] = zstandard.compress(lines)
        except ImportError:
            pass
        files = [self.put(name, data) for name, data in inputs.items()]
        try:
            import pyarrow
            import pyarrow.parquet
            files.append(self.path("l.parquet"))
            pyarrow.parquet.write_table(pyarrow.table({"body": self.documents}), files[-1], row_group_size=7)
        except ImportError:
            pass
        for file in files:
            name = os.path.basename(file)
            self.assertEqual(one, self.good("out-" + name, "--text-key", "body", files=[file]), name)
        separated = self.put("all.txt", "<<>>".join(self.documents).encode())
        self.assertEqual(one, self.good("out-separated", "--document-separator", "<<>>", files=[separated]))

    def test_killed_at_any_moment(self):
        whole = self.good("whole")
        r, runs = random.Random(7), 0
        while True:
            result = self.prepare("killed", "--workers", str(1 + runs % 2), kill=r.randint(3, 40))
            runs += 1
            if result.returncode == 0:
                break
            self.assertEqual(result.returncode, -signal.SIGKILL, result.stdout + result.stderr)
            self.assertLess(runs, 40, "no headway")
        self.assertGreater(runs, 3)
        self.assertEqual(whole, contents(self.path("killed")))
        self.bad(2, "finished", "killed")

    def test_interrupted_with_other_options(self):
        self.assertEqual(self.prepare("out", kill=15).returncode, -signal.SIGKILL)
        self.bad(2, "other options", "out", "--eot", "7")
        self.good("out")

    def test_trained_tokenizer(self):
        for out in "a", "b":
            self.good(out, "--train-tokenizer", "350", tokenizer=False)
        self.assertEqual(contents(self.path("a")), contents(self.path("b")))
        manifest = json.loads(contents(self.path("a"))["manifest.json"])
        self.assertEqual(manifest["tokenizer"]["vocab_size"], 350)
        config = json.loads(contents(self.path("a"))["tokenizer_config.json"])
        self.assertEqual(config["tokenizer_class"], "PreTrainedTokenizerFast")
        self.assertEqual(config["bos_token"], "<|endoftext|>")
        self.assertEqual(config["eos_token"], "<|endoftext|>")
        decoder = tokenizers.Tokenizer.from_file(self.path("a/tokenizer.json"))
        text = decoder.decode(sum(self.tokens("a", "train"), [])[:500], skip_special_tokens=False)
        self.assertTrue("".join(t + "<|endoftext|>" for t in self.documents if t[:9] in text).startswith(text[:100]))

    def test_large_vocabulary(self):
        vocabulary = {f"w{i}": i for i in range(70000)} | {"</s>": 70000, "[UNK]": 70001}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(self.path("large.json"))
        file = self.put("w.txt", b"w1 w69999 w2 other")
        self.good("out", "--tokenizer", self.path("large.json"), "--val-fraction", "0", tokenizer=False, files=[file])
        self.assertEqual(self.tokens("out", "train"), [[1, 69999, 2, 70001, 70000]])
        self.assertEqual(self.tokens("out", "val"), [])

    def test_errors(self):
        self.bad(2, "--eot: the tokenizer has neither", "out", "--eot", "<nothing>")
        self.bad(3, "line 3: no text under 'text', there is other", "a", files=[self.put("k.jsonl", b'{"text":"a"}\n\n{"other":1}\n')])
        self.bad(3, "line 1: not JSON", "b", files=[self.put("j.jsonl", b"{text}\n")])
        self.bad(3, "no such file", "c", files=[self.path("absent")])
        self.bad(3, "z.jsonl.gz", "d", files=[self.put("z.jsonl.gz", gzip.compress(b'{"text":"a"}\n' * 5000)[:-20])])
        self.bad(2, "no tokenizer of the library", "e", "--tokenizer", self.put("t.json", b"{}"), tokenizer=False)
        plain = self.put("plain.json", tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str().encode())
        self.bad(2, "no known end-of-text token", "f", "--tokenizer", plain, tokenizer=False)
        without = "import sys; sys.modules['tokenizers'] = None; sys.argv[1:] = sys.argv[2:]; sys.path.insert(0, %r); import prepare_data as p; sys.exit(p.main())"
        result = subprocess.run([sys.executable, "-c", without % SCRIPTS, "-", "--out", self.path("g"), "--tokenizer", self.tokenizer, *self.files],
                                capture_output=True, text=True, timeout=60)
        self.assertEqual((result.returncode, result.stderr.count("\n")), (2, 1), result.stderr)
        self.assertIn("pip install tokenizers", result.stderr)

    def test_damaged_text_is_counted(self):
        result = self.prepare("out", files=[self.put("d.txt", b"abc \xff\xfe abc"), *self.files])
        self.assertIn("1 documents had bytes that are no UTF-8", result.stdout)


if __name__ == "__main__":
    unittest.main()
