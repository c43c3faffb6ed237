#!/usr/bin/env python3
"""Text -> llm.c token shards, on all cores.

    prepare_data.py --out DIR --tokenizer tokenizer.json FILE...      a tokenizer file of Hugging Face, or its directory
    prepare_data.py --out DIR --train-tokenizer 32768 FILE...         first makes a byte-level BPE of that many entries

A FILE is JSONL (.jsonl .ndjson, also .gz or .zst; the text is under --text-key), Parquet (.parquet, column --text-key), or
text: one document, or several with --document-separator. DIR receives train_NNNNNN.bin, val_NNNNNN.bin, tokenizer.json
(with tokenizer_config.json where it was made here) and manifest.json (dev/FORMATS.md). Ids are uint16 where the
vocabulary allows, else uint32; an end-of-text token follows every document. A document is in the validation part if a hash of its text says so: equal texts are in one part.

The output depends on the input and the options, never on the number of workers. Killed at any moment, the same
command goes on from the last recorded point (DIR/progress.json) and ends with the same bytes. A trained tokenizer is as repeatable as
the library makes it: merges are chosen by count, then by id, so the same version gives the same file.

Needs the package tokenizers; xxhash or the system's libxxhash; for .zst zstandard, for Parquet pyarrow.
Exit codes: 0 done, 2 options or a missing package, 3 input.
"""
import argparse
import array
import bisect
import collections
import concurrent.futures.process
import ctypes
import gzip
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import struct
import sys
import time

UNIT_BYTES = 1 << 20  # of input text in one piece of work; part of the meaning of progress.json
LARGEST_DOCUMENT = 256 << 20
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
RECORD_EVERY_S = 2.0


class Fault(Exception):
    def __init__(self, code, message):
        super().__init__(code, message)  # both, so that it can travel from a worker
        self.code, self.message = code, message


def need(package, purpose):
    try:
        return __import__(package)
    except ImportError:
        raise Fault(2, f"{purpose} needs the Python package {package}; install it in a virtual environment: "
                       f"python3 -m venv VENV && VENV/bin/pip install {package}, then run VENV/bin/python {sys.argv[0]}")


# ---- Hashes --------------------------------------------------------------------------------------------------------------

class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def file_hash(path):
    """XXH3's 128 bits of a file's bytes, as 32 hexadecimal digits."""
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        try:
            import xxhash
            return xxhash.xxh3_128(data).hexdigest()
        except ImportError:
            pass
        try:
            function = ctypes.CDLL("libxxhash.so.0").XXH3_128bits
        except OSError:
            need("xxhash", "the manifest")
        function.restype, function.argtypes = Hash128, (ctypes.c_void_p, ctypes.c_size_t)
        view = (ctypes.c_char * len(data)).from_buffer(data)
        result = function(ctypes.addressof(view), len(data))
        del view  # the mapping can not be closed while something points into it
        return f"{result.high:016x}{result.low:016x}"


def fraction_of(text):
    """A number in [0, 1) that only the text decides."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") / 2.0**56


# ---- Input: files -> units of work -> documents --------------------------------------------------------------------------

def open_stream(path):
    """The file behind it (for its position) and the decompressed bytes."""
    raw = open(path, "rb")
    if path.endswith(".gz"):
        return raw, gzip.GzipFile(fileobj=raw)
    if path.endswith(".zst"):
        return raw, need("zstandard", path).ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return raw, raw


def read(path):
    with open(path, "rb") as f:
        return f.read()


def kind_of(path):
    name = path.removesuffix(".gz").removesuffix(".zst")
    if path.endswith(".parquet"):
        return "parquet"
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name != path:
        raise Fault(2, f"{path}: compressed input must be .jsonl.gz or .jsonl.zst; decompress other text first")
    return "text"


def blocks_of(stream, separator):
    """Pieces of about UNIT_BYTES that end with a separator; only the last may lack it."""
    rest = b""
    while True:
        block = stream.read(UNIT_BYTES)
        if not block:
            if rest:
                yield rest
            return
        rest += block
        last = rest.split(separator)[-1]  # from the left, as documents_of does: separators may overlap
        if len(last) < len(rest):
            yield rest[:len(rest) - len(last)]
            rest = last
        elif len(rest) > LARGEST_DOCUMENT:
            raise ValueError(f"no end of a document ({separator!r}) in {len(rest):,} bytes")


def units_of(paths, options):
    """(unit, input bytes before its end), in an order and with borders that only the input decides.

    A unit is ("files", paths), ("lines", path, number of the first line, bytes), ("pieces", path, bytes) or ("texts", path, texts).
    """
    done, group, group_bytes = 0, [], 0
    separator = options["separator"].encode()
    for path in paths:
        kind, size = kind_of(path), os.path.getsize(path)
        if kind == "text" and not separator:
            if size > LARGEST_DOCUMENT:
                raise Fault(3, f"{path}: {size:,} bytes as one document are too many; say where documents end with --document-separator")
            done += size
            group.append(path)
            group_bytes += size
            if group_bytes >= UNIT_BYTES:
                yield ("files", group), done
                group, group_bytes = [], 0
            continue
        if group:
            yield ("files", group), done
            group, group_bytes = [], 0
        try:
            if kind == "parquet":
                need("pyarrow", path)
                import pyarrow.parquet
                file = pyarrow.parquet.ParquetFile(path)
                if options["text_key"] not in file.schema_arrow.names:
                    raise ValueError(f"no column '{options['text_key']}', there are {', '.join(file.schema_arrow.names)}; give --text-key")
                rows = 0
                for batch in file.iter_batches(batch_size=512, columns=[options["text_key"]]):
                    rows += batch.num_rows
                    yield ("texts", path, batch.column(0).to_pylist()), done + size * rows // max(1, file.metadata.num_rows)
            else:
                raw, stream = open_stream(path)
                line = 1
                with raw:
                    for block in blocks_of(stream, b"\n" if kind == "jsonl" else separator):
                        yield (("lines", path, line, block) if kind == "jsonl" else ("pieces", path, block)), done + raw.tell()
                        line += block.count(b"\n") if kind == "jsonl" else 0
        except Fault:
            raise
        except Exception as error:  # each of the three libraries has its own
            raise Fault(3, f"{path}: {error}") from error
        done += size
    if group:
        yield ("files", group), done


def documents_of(unit, options):
    """The documents of a unit as (UTF-8 bytes, text); empty ones are left out."""
    kind = unit[0]
    if kind == "files":
        texts = map(read, unit[1])
    elif kind == "pieces":
        texts = unit[2].split(options["separator"].encode())
    elif kind == "lines":
        texts = (text_of_line(unit[1], unit[2] + i, line, options["text_key"]) for i, line in enumerate(unit[3].split(b"\n")))
    else:
        texts = unit[2]
    for text in texts:
        if text is None:
            continue
        if isinstance(text, str):  # JSON may spell half of a surrogate pair
            data = text.encode("utf-8", "replace")
        else:
            data = text
        if data:
            yield data, data.decode("utf-8", "replace")


def text_of_line(path, number, line, key):
    if not line.strip():
        return None
    try:
        value = json.loads(line)
    except ValueError as error:
        raise Fault(3, f"{path} line {number}: not JSON: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get(key), str):
        there = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise Fault(3, f"{path} line {number}: no text under '{key}', there is {there[:200]}; give --text-key")
    return value[key]


# ---- The tokenizer -------------------------------------------------------------------------------------------------------

def load_tokenizer(path):
    tokenizers = need("tokenizers", "reading a tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:
        raise Fault(2, f"{path}: no tokenizer of the library tokenizers {tokenizers.__version__}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # "<|endoftext|>" written in a document is text and must not end it.
    if not hasattr(tokenizer, "encode_special_tokens"):
        raise Fault(2, f"tokenizers {tokenizers.__version__} is too old; install 0.19 or newer in a virtual environment")
    tokenizer.encode_special_tokens = True
    return tokenizer


def find_end_of_text(tokenizer, path, wanted):
    if wanted is not None:
        found = tokenizer.token_to_id(wanted)
        if found is None and wanted.isdecimal() and tokenizer.id_to_token(int(wanted)) is not None:
            found = int(wanted)
        if found is None:
            raise Fault(2, f"--eot: the tokenizer has neither a token nor an id {wanted}")
        return found
    names = list(END_OF_TEXT)
    config = os.path.join(os.path.dirname(path), "tokenizer_config.json")
    if os.path.exists(config):
        with open(config, encoding="utf-8") as f:
            token = json.load(f).get("eos_token")
        names.insert(0, token["content"] if isinstance(token, dict) else token)
    for name in names:
        if name and tokenizer.token_to_id(name) is not None:
            return tokenizer.token_to_id(name)
    special = [str(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
    raise Fault(2, f"{path}: no known end-of-text token; say which one with --eot"
                   + (f", its special tokens are {' '.join(special[:20])}" if special else ""))


def train_tokenizer(paths, options, path):
    """A byte-level BPE with GPT-2's splitting into words, from the training part; of more than train_bytes an even sample."""
    tokenizers = need("tokenizers", "training a tokenizer")
    if options["train_tokenizer"] < 257:
        raise Fault(2, "--train-tokenizer: 256 bytes and the end-of-text token need 257 entries or more")
    share = options["train_bytes"] / max(1, sum(map(os.path.getsize, paths)))
    first = options["val_fraction"]  # hashes below it are the validation part

    def texts():
        for unit, _ in units_of(paths, options):
            part = [text for data, text in documents_of(unit, options) if first <= fraction_of(data) < first + (1 - first) * share]
            if part:
                yield part

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=options["train_tokenizer"], special_tokens=[END_OF_TEXT[0]], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts(), trainer)
    # Without this file transformers takes the tokenizer class of the model's family, which adds tokens beyond the vocabulary.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT[0], "eos_token": END_OF_TEXT[0],
              "clean_up_tokenization_spaces": False}
    replace_durably(os.path.join(os.path.dirname(path), "tokenizer_config.json"), (json.dumps(config, indent=1) + "\n").encode())
    replace_durably(path, tokenizer.to_str(pretty=True).encode())


# ---- Workers -------------------------------------------------------------------------------------------------------------

def start_worker(parent, tokenizer_path, end_of_text, width, options):
    # A parent that was killed closes no pipe its other children hold: the kernel is asked to end this process with it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = load_tokenizer(tokenizer_path)
    # The fast one does not count characters for offsets that nobody asks for.
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    globals()["worker"] = (encode, end_of_text, "H" if width == 2 else "I", options)


def encode_unit(unit):
    """For "train" and "val": the tokens as bytes, and where in them (in tokens) each document ends. And the number of damaged texts."""
    encode, end_of_text, code, options = globals()["worker"]
    documents, damaged = {"train": [], "val": []}, 0
    for data, text in documents_of(unit, options):
        documents["val" if fraction_of(data) < options["val_fraction"] else "train"].append(text)
        damaged += "\ufffd" in text and "\ufffd".encode() not in data
    result = {}
    for split, texts in documents.items():
        tokens, ends = array.array(code), array.array("q")
        for encoding in encode(texts, add_special_tokens=False) if texts else ():
            tokens.extend(array.array(code, encoding.ids))
            tokens.append(end_of_text)
            ends.append(len(tokens))
        result[split] = (tokens.tobytes(), ends)
    return result, damaged


def in_order(pool, units, ahead):
    """encode_unit over all units, in order, with at most `ahead` of them in memory."""
    waiting = collections.deque()
    for unit, position in units:
        waiting.append((pool.submit(encode_unit, unit), position))
        if len(waiting) >= ahead:
            future, position = waiting.popleft()
            yield future.result(), position
    for future, position in waiting:
        yield future.result(), position


# ---- Output --------------------------------------------------------------------------------------------------------------

def sync_directory(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def replace_durably(path, data):
    with open(path + ".tmp", "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)
    sync_directory(os.path.dirname(path))


class Split:
    """The shards of one split. The last one is NAME.bin.partial until it is full; `state` says how much of it counts."""

    def __init__(self, folder, name, width, shard_tokens, state):
        self.folder, self.name, self.width, self.shard_tokens = folder, name, width, shard_tokens
        self.files, self.tokens, self.documents = state["files"], state["tokens"], state["documents"]
        final, partial = self.path(), self.path() + ".partial"
        if os.path.exists(final):  # it was completed after the state was recorded
            os.replace(final, partial)
        for other in os.listdir(folder):
            stem = other.split(".")[0]
            if stem.startswith(name + "_") and stem >= os.path.basename(partial).split(".")[0] and os.path.join(folder, other) != partial:
                os.remove(os.path.join(folder, other))
        self.out = open(partial, "r+b" if os.path.exists(partial) else "w+b")
        self.out.truncate(1024 + self.tokens * width if self.tokens else 0)
        self.out.seek(0 if not self.tokens else 1024 + self.tokens * width)

    def path(self):
        return os.path.join(self.folder, f"{self.name}_{len(self.files):06}.bin")

    def state(self):
        return {"files": self.files, "tokens": self.tokens, "documents": self.documents}

    def append(self, data, ends):
        at, total = 0, len(data) // self.width
        while at < total:
            count = min(total - at, self.shard_tokens - self.tokens)
            if self.tokens == 0:
                self.out.write(bytes(1024))
            self.out.write(memoryview(data)[at * self.width:(at + count) * self.width])
            self.documents += bisect.bisect_right(ends, at + count) - bisect.bisect_right(ends, at)
            self.tokens += count
            at += count
            if self.tokens == self.shard_tokens:
                self.finish()
                self.out = open(self.path() + ".partial", "w+b")

    def finish(self):
        """Completes the shard if it has tokens, else removes its file."""
        path = self.path()
        if self.tokens:
            magic, version = (20240520, 1) if self.width == 2 else (20240801, 7)
            self.out.seek(0)
            self.out.write(struct.pack("<iiI", magic, version, self.tokens))
        self.sync()
        self.out.close()
        if not self.tokens:
            os.remove(path + ".partial")
            return
        digest = file_hash(path + ".partial")
        os.replace(path + ".partial", path)
        self.files.append({"name": os.path.basename(path), "split": self.name, "bytes": 1024 + self.tokens * self.width,
                           "tokens": self.tokens, "documents": self.documents, "xxh3_128": digest})
        self.tokens = self.documents = 0

    def sync(self):
        self.out.flush()
        os.fsync(self.out.fileno())


class Bar:
    """A line on standard error that rewrites itself; nothing where that is no terminal."""

    def __init__(self, total):
        self.total, self.shown, self.began, self.start = max(1, total), 0.0, time.monotonic(), None

    def show(self, position, tokens, last=False):
        if self.start is None:
            self.start = position
        now = time.monotonic()
        if not sys.stderr.isatty() or (now - self.shown < 0.2 and not last):
            return
        self.shown = now
        part, past = position / self.total, now - self.began
        left = past * (self.total - position) / max(1, position - self.start)
        filled = int(30 * part)
        sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {100 * part:5.1f} % | {tokens:,} tokens | "
                         f"{tokens / max(past, 1e-9) / 1e6:.2f} M/s | {left:,.0f} s left \x1b[K" + ("\n" if last else ""))
        sys.stderr.flush()


# ---- Main ----------------------------------------------------------------------------------------------------------------

def count(text):
    factor = {"k": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:], 1)
    value = float(text[:-1] if factor > 1 else text) * factor
    if value != int(value) or value < 1:
        raise ValueError
    return int(value)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE")
    add("--files-from", metavar="LIST", help="a file of names, one a line, after those of the command line")
    add("--out", required=True, metavar="DIR", help="new, or where the same command was interrupted")
    add("--tokenizer", metavar="FILE|DIR", help="tokenizer.json, or a directory that holds it")
    add("--train-tokenizer", type=count, metavar="N", help="make a tokenizer of N entries from the input")
    add("--train-bytes", type=count, default=200 * 10**6, metavar="N", help="of input for that, an even sample of it (default: 200M)")
    add("--eot", metavar="ID|TOKEN", help="the end-of-text token (default: the tokenizer's own)")
    add("--text-key", default="text", metavar="KEY", help="of JSONL and Parquet (default: text)")
    add("--document-separator", default="", metavar="TEXT", help="ends a document in text files; \\n is a line end")
    add("--val-fraction", type=float, default=0.01, metavar="X", help="of the documents (default: 0.01)")
    add("--shard-tokens", type=count, default=10**8, metavar="N", help="per file (default: 100M)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes (default: one per core)")
    a = parser.parse_args()
    if a.files_from:
        with open(a.files_from, encoding="utf-8", errors="surrogateescape") as f:
            a.files += [line for line in f.read().split("\n") if line]
    if not a.files:
        parser.error("no input files")
    if (a.tokenizer is None) == (a.train_tokenizer is None):
        parser.error("give either --tokenizer or --train-tokenizer")
    if not 0 <= a.val_fraction < 1:
        parser.error("--val-fraction: expected a number from 0 to below 1")
    if a.workers < 1 or a.shard_tokens > 2**32 - 1:
        parser.error("--workers must be 1 or more, --shard-tokens below 2^32")
    a.document_separator = a.document_separator.replace("\\n", "\n")
    return a


def prepare(a):
    for path in a.files:
        if not os.path.isfile(path):
            raise Fault(3, f"{path}: {'a directory; give its files, or a list of them with --files-from' if os.path.isdir(path) else 'no such file'}")
    options = {"text_key": a.text_key, "separator": a.document_separator, "val_fraction": a.val_fraction,
               "train_tokenizer": a.train_tokenizer, "train_bytes": a.train_bytes}
    given = a.tokenizer and (os.path.join(a.tokenizer, "tokenizer.json") if os.path.isdir(a.tokenizer) else a.tokenizer)
    if given and not os.path.isfile(given):
        raise Fault(2, f"{given}: no such file; a tokenizer is a tokenizer.json of the library tokenizers")
    request = {"options": options, "eot": a.eot, "shard_tokens": a.shard_tokens, "unit": UNIT_BYTES,
               "tokenizer": file_hash(given) if given else None,
               "input": hashlib.sha256("\0".join(f"{p} {os.stat(p).st_size} {os.stat(p).st_mtime_ns}" for p in a.files).encode(
                   "utf-8", "surrogateescape")).hexdigest()}
    progress, manifest = (os.path.join(a.out, name) for name in ("progress.json", "manifest.json"))
    state = None
    if os.path.exists(progress):
        with open(progress, encoding="utf-8") as f:
            state = json.load(f)
        if state["request"] != request:
            raise Fault(2, f"{a.out} holds an interrupted run with other options, files or tokenizer; give those again or another --out")
    elif os.path.isdir(a.out) and os.listdir(a.out):
        raise Fault(2, f"{a.out} is finished: it has a manifest.json" if os.path.exists(manifest) else f"{a.out} is not empty; give another --out")
    if state is None:
        os.makedirs(a.out, exist_ok=True)
        empty = {"files": [], "tokens": 0, "documents": 0}
        state = {"request": request, "units": 0, "damaged": 0, "train": empty, "val": dict(empty, files=[])}
        replace_durably(progress, json.dumps(state).encode())

    own = os.path.join(a.out, "tokenizer.json")
    if not os.path.exists(own):
        if given:
            shutil.copyfile(given, own + ".copy")
            os.replace(own + ".copy", own)
        else:
            began = time.monotonic()
            train_tokenizer(a.files, options, own)
            print(f"tokenizer of {a.train_tokenizer:,} entries in {time.monotonic() - began:.1f} s")
    tokenizer = load_tokenizer(own)
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    end_of_text = find_end_of_text(tokenizer, given or own, a.eot)
    width = 2 if vocabulary <= 65536 else 4

    splits = {name: Split(a.out, name, width, a.shard_tokens, state[name]) for name in ("train", "val")}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes do it: they also turn ids into bytes side by side
    began = recorded = time.monotonic()
    first, units, damaged, fresh = state["units"], state["units"], state["damaged"], 0
    if first:
        print(f"going on after {first:,} pieces of work")
    bar = Bar(sum(map(os.path.getsize, a.files)))
    pool = concurrent.futures.ProcessPoolExecutor(
        a.workers, multiprocessing.get_context("spawn"), start_worker, (os.getpid(), own, end_of_text, width, options))
    try:
        for (result, bad), position in in_order(pool, itertools.islice(units_of(a.files, options), first, None), 3 * a.workers + 2):
            for name, (data, ends) in result.items():
                splits[name].append(data, ends)
                fresh += len(data) // width
            units, damaged = units + 1, damaged + bad
            bar.show(position, fresh)
            if time.monotonic() - recorded > RECORD_EVERY_S:
                for split in splits.values():
                    split.sync()
                replace_durably(progress, json.dumps({"request": request, "units": units, "damaged": damaged,
                                                      **{name: split.state() for name, split in splits.items()}}).encode())
                recorded = time.monotonic()
    except concurrent.futures.process.BrokenProcessPool:
        raise Fault(3, "a worker was killed, perhaps for lack of memory: give fewer --workers; the same command goes on from here") from None
    finally:
        pool.shutdown(cancel_futures=True)
    bar.show(bar.total, fresh, last=True)
    for split in splits.values():
        split.finish()
    files = [file for split in splits.values() for file in split.files]
    if not any(file["split"] == "train" for file in files):
        raise Fault(3, "no document of the input is in the training part")
    sync_directory(a.out)
    replace_durably(manifest, (json.dumps({
        "format": "kinoe-data-1",
        "tokenizer": {"file": "tokenizer.json", "xxh3_128": file_hash(own), "vocab_size": vocabulary, "eot_id": end_of_text},
        "files": files}, indent=1) + "\n").encode())
    os.remove(progress)
    for name in splits:
        part = [file for file in files if file["split"] == name]
        print(f"{name}: {sum(f['tokens'] for f in part):,} tokens, {sum(f['documents'] for f in part):,} documents, {len(part)} files")
    if damaged:
        print(f"{damaged:,} documents had bytes that are no UTF-8; U+FFFD stands for them")
    seconds = time.monotonic() - began
    print(f"vocabulary {vocabulary:,}, end of text {end_of_text}, {8 * width}-bit; {fresh:,} tokens in {seconds:.1f} s, "
          f"{fresh / seconds / 1e6:.2f} M tokens/s with {a.workers} workers")


def main():
    try:
        prepare(parse_arguments())
        return 0
    except Fault as fault:
        message, code = fault.message, fault.code
    except OSError as error:
        message, code = str(error), 3
    except KeyboardInterrupt:
        message, code = "interrupted; the same command goes on from here", 130
    sys.stderr.write(f"prepare_data.py: error: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
