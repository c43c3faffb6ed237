#!/usr/bin/env python3
"""scripts/prepare_data.py beside the library tokenizers alone: tokens per second on the same text with as many processes.

    prepare_data_speed.py TOKENIZER.json WORKERS FILE...

"Alone" is encode_batch of the same batches of documents, read beforehand, in the same number of processes: no reading, no hashing, no
splitting, no ids taken out, nothing written. Both are run three times in turn; times of starting up are in neither.
Give it 50 MB or more in thousands of documents, on a machine that does nothing else.
"""
import concurrent.futures
import multiprocessing
import os
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts"))
import prepare_data as p


def start(tokenizer, batches, barrier):
    globals()["state"] = (p.load_tokenizer(tokenizer), batches, barrier)


def encode_alone(first):
    tokenizer, batches, barrier = globals()["state"]
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    barrier.wait()
    begin, tokens = time.monotonic(), 0
    for texts in batches[first::barrier.parties]:
        tokens += sum(map(len, encode(texts, add_special_tokens=False)))
    return tokens, time.monotonic() - begin


def main():
    tokenizer, workers, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options = {"text_key": "text", "separator": "", "val_fraction": 0.01}
    batches = [[text for _, text in p.documents_of(unit, options)] for unit, _ in p.units_of(files, options)]
    context = multiprocessing.get_context("spawn")
    rates = {"alone": [], "prepare_data": []}
    for _ in range(3):
        with concurrent.futures.ProcessPoolExecutor(workers, context, start, (tokenizer, batches, context.Barrier(workers))) as pool:
            results = list(pool.map(encode_alone, range(workers)))
        rates["alone"].append(sum(tokens for tokens, _ in results) / max(seconds for _, seconds in results))
        with tempfile.TemporaryDirectory() as folder:
            first = []
            original = p.in_order

            def timed(*arguments):  # from the first result, which waits for the processes to start
                for result in original(*arguments):
                    first.append((time.monotonic(), sum(len(data) // 2 for data, _ in result[0][0].values())))
                    yield result

            p.in_order = timed
            sys.argv[1:] = ["--out", folder + "/out", "--tokenizer", tokenizer, "--workers", str(workers), *files]
            p.prepare(p.parse_arguments())
            p.in_order = original
            skip = min(3 * workers, len(first) // 2)
            rates["prepare_data"].append(sum(n for _, n in first[skip + 1:]) / (first[-1][0] - first[skip][0]))
    alone, ours = statistics.median(rates["alone"]), statistics.median(rates["prepare_data"])
    print({name: [round(rate) for rate in values] for name, values in rates.items()})
    print(f"{workers} processes: prepare_data {ours:,.0f} tokens/s, the library alone {alone:,.0f}, ratio {ours / alone:.3f}")


if __name__ == "__main__":
    main()
