#!/usr/bin/env bash
# Compares this program with PyTorch (test/parity/parity.py), in a virtual environment of its own.
#
#   test/parity/run.sh BUILD [DIR...]      BUILD: build/host, with train_gpt and parity_dump; `make parity` makes them
#
# PyTorch is the distribution's (apt, as root), the rest is put into build/parity-venv by pip, once: nothing outside of it is touched.
# Exit 1: an error above the bar. Exit 2: what is needed could not be installed; the last line says what to do.
set -u
cd "$(dirname "$0")/../.." || exit 2
venv=build/parity-venv
python=/usr/bin/python3 # a python of pyenv or conda would not see the distribution's PyTorch
wanted=test/parity/requirements.txt

give_up() {
  echo "parity: $1" >&2
  exit 2
}

has_torch() { "$python" -c 'import torch' 2>/dev/null; }
has_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

if ! has_torch || ! has_venv; then
  command -v apt-get >/dev/null || give_up "there is no apt-get here: install PyTorch for $python, then run the same again"
  [ "$(id -u)" -eq 0 ] || give_up "this needs root once: sudo apt-get install -y python3-torch python3-venv"
  echo "parity: apt-get install python3-torch python3-venv"
  log=$(mktemp) || exit 2
  install() { DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends python3-torch python3-venv >"$log" 2>&1 </dev/null; }
  install || { apt-get -q -o DPkg::Lock::Timeout=300 update >/dev/null 2>&1 && install; } || {
    tail -n 5 "$log" >&2
    give_up "apt-get failed, see above (no network?); then: apt-get install -y python3-torch python3-venv"
  }
  rm -f "$log"
  has_torch || give_up "python3-torch is installed, but $python cannot import it"
fi

if ! cmp -s "$wanted" "$venv/installed.txt"; then
  echo "parity: making $venv"
  rm -rf "$venv"
  "$python" -m venv --system-site-packages "$venv" || give_up "the virtual environment could not be made"
  "$venv/bin/python" -m pip install -q --no-input --disable-pip-version-check -r "$wanted" </dev/null ||
    give_up "pip could not install $wanted into $venv, see above (no network?); run the same again when it can"
  cp "$wanted" "$venv/installed.txt"
fi
HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 exec "$venv/bin/python" test/parity/parity.py "$@"
