#!/usr/bin/env bash
# What `make demo` runs after building: trains the tiny model on the built-in stories, whose entropy per byte is known,
# shows some of its own stories and where everything is. About half a minute on two cores.
#
# Usage: scripts/demo.sh [train_gpt options]          KINOE_BINARY: the program (default ./train_gpt)
set -euo pipefail
cd "$(dirname "$0")/.."
binary=${KINOE_BINARY:-./train_gpt}

run=runs/demo-$(date +%Y%m%d-%H%M%S)
n=1
while [ -e "$run" ]; do
  n=$((n + 1))
  run=${run%%.*}.$n
done

"$binary" --out "$run" --beta2 0.99 --min-lr-frac 0.01 --eval-every 900 --sample-every 0 --save-every 0 "$@"

echo
echo "Stories by the model after this training:"
for seed in 1 2 3; do
  echo
  "$binary" sample "$run" --seed "$seed" --max-tokens 300 --temperature 0.7 --device "${KINOE_DEVICE:-auto}"
done

cat <<TEXT

The run is in $run: metrics.jsonl, loss.svg (open it in a browser) and a Hugging Face model in checkpoints/.
Next, train on a text of your own:
  ./train_gpt --data my.txt --steps 500
TEXT
