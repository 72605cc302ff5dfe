#!/usr/bin/env bash
# Everything that needs a real card, in one run of less than eight minutes.
#
#   bench/hardware.sh OUTPUT
#
# Builds this checkout, runs the demo, the benchmarks, the correctness checks and the tests marked gpu.  Each step has a time limit; a
# step that fails does not stop the others.  OUTPUT gets one JSON or log file a step and summary.md; the table comes last on
# the terminal.  Exit code 1 if a step failed.
#
# WHEELS: a directory of wheels for what this machine lacks, installed without an index.
# BUDGET_S: seconds for everything (465).
# STEPS: only these steps, e.g. STEPS="demo gate".  GPU_TESTS: only these test files.
# The step gangs runs only where there are two cards.
# Steps that run only when STEPS names them: compatibility programs programs_beyond swap checked pairs servers day.  The programs and the day
# want the wheels of gguf, diffusers and tinygrad, and NVSHARE_LLAMA_DIR with llama.cpp's libraries.
# CASES: only these cases of programs and programs_beyond, by group name.  WAYS: only these ways of the day.
#
# The card's memory is never oversubscribed here (the benchmarks of swap set a capacity of a few GiB): device memory only, and managed memory within a limit of 128 MiB a program.
set -uo pipefail
export NVSHARE_MEMORY=device
unset LD_PRELOAD NVSHARE_ENABLE NVSHARE_SIMULATE NVSHARE_SIM_STATE

[ $# -eq 1 ] || { echo "usage: bench/hardware.sh OUTPUT" >&2; exit 2; }
root="$(cd "$(dirname "$0")/.." && pwd)"
mkdir -p "$1"
out="$(cd "$1" && pwd)"
cd "$root"
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export NVSHARE_RUNTIME_DIR="$work/run" PYTHONUNBUFFERED=1
BUDGET_S="${BUDGET_S:-465}"
rows=()
failed=0

# step NAME SECONDS FILE COMMAND...: standard output to FILE, errors to NAME.err
step() {
  local name="$1" limit="$2" file="$3" begin="$SECONDS" rc
  shift 3
  if [ -n "${STEPS:-}" ] && [ "$name" != build ] && [[ " $STEPS " != *" $name "* ]]; then
    return 0
  fi
  local left=$((BUDGET_S - SECONDS))
  [ "$limit" -le "$left" ] || limit="$left"
  if [ "$limit" -le 0 ]; then
    failed=1
    rows+=("| $name | no time left | 0 s | |")
    return 0
  fi
  timeout --signal=TERM --kill-after=10 "$limit" "$@" >"$out/$file" 2>"$out/$name.err"
  rc=$?
  [ -s "$out/$name.err" ] || rm -f "$out/$name.err"
  if [ "$rc" -ne 0 ]; then
    failed=1
    tail -n 5 "$out/$name.err" "$out/$file" 2>/dev/null
  fi
  rows+=("| $name | $([ "$rc" -eq 0 ] && echo ok || echo "failed ($rc)") | $((SECONDS - begin)) s | $file |")
  echo "${rows[-1]}"
}

# named NAME ...: a step that runs only when STEPS names it
named() {
  if [[ " ${STEPS:-} " == *" $1 "* ]]; then step "$@"; fi
}

build() {
  set -e
  if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$work/site" "$WHEELS"/*.whl
  fi
  local cmake=(cmake -S "$root" -B "$work/build" -DNVSHARE_WERROR=ON "-DPython3_EXECUTABLE=$(command -v "$python")")
  command -v ninja >/dev/null && cmake+=(-G Ninja)
  "${cmake[@]}"
  cmake --build "$work/build" --parallel 8
  cmake --install "$work/build" --prefix "$work/prefix"
}

export -f build
export python root work
step build 120 build.log bash -c build
export PYTHONPATH="$root:$work/site${PYTHONPATH:+:$PYTHONPATH}"
export NVSHARE_HOOK_LIBRARY="$work/prefix/nvshare/client_hook/lib/libnvshare_hook.so"
export NVSHARE_SIM_LIBRARY_DIR="$work/prefix/nvshare/simulated_gpu/lib"
export NVSHARE_TEST_BUILD="$work/build"

step machine 20 machine.txt bash -c 'nvidia-smi; uname -a; nproc; "$python" --version
  "$python" -c "
import importlib.metadata as m
for name in (\"torch\", \"cupy-cuda13x\", \"pyzmq\", \"pydantic\", \"numpy\"):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: print(name, \"not installed\")"'
step demo 60 demo.json "$python" -m nvshare.coordinator.cli.demo --seconds 5 --json
step gate 60 gate.json "$python" -m nvshare.bench.gate --json --pairs 7
step handover 40 handover.json "$python" -m nvshare.bench.handover --json --seconds 10
step handover3 40 handover3.json "$python" -m nvshare.bench.handover --json --seconds 8 --programs 3
step correctness 120 correctness.jsonl "$python" -m nvshare.bench.compatibility --json --case torch.eager --case cupy.default --budget 110
step turns 150 turns.json "$python" -m nvshare.bench.pairs --json --ways native,turns --pairs products+products,tiny+tiny,memory+memory --budget 140
if [ "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" -ge 2 ]; then
  step gangs 150 gangs.json "$python" -m nvshare.bench.gangs --json --seconds 3 --repetitions 2
fi
named swap 60 swap.json env NVSHARE_MEMORY=swap "$python" -m nvshare.bench.memory.swap --json
named checked 90 checked.json env NVSHARE_MEMORY=swap "$python" -m nvshare.bench.memory.swap --json --checked 1000
named pairs 480 pairs.json "$python" -m nvshare.bench.pairs --json --budget 440
cases=()
for case in ${CASES:-programs}; do cases+=(--case "$case"); done
programs=("$python" -m nvshare.bench.compatibility --json "${cases[@]}" --budget 440)
named programs_beyond 455 programs_beyond.jsonl "${programs[@]}" --mode beyond
named programs 455 programs.jsonl "${programs[@]}" --mode swap --capacity 24GiB
named servers 320 servers.json "$python" -m nvshare.bench.servers --json
named day 540 day.json "$python" -m nvshare.bench.day --json --budget $((BUDGET_S - SECONDS - 40)) --ways "${WAYS:-all}"
named compatibility 430 compatibility.jsonl "$python" -m nvshare.bench.compatibility --json --budget 410
cat "$out"/{compatibility,programs,programs_beyond}.jsonl >"$work/lines" 2>/dev/null
if [ -s "$work/lines" ]; then
  "$python" -m nvshare.bench.compatibility --from "$work/lines" --markdown "$out/compatibility.md"
fi
# Only pytest itself is needed for these: plugins that the other tests want may be missing here.
if [ -n "${GPU_TESTS:-}" ]; then read -ra marked <<<"$GPU_TESTS"; else
  mapfile -t marked < <(grep -rlE --include='test_*.py' 'mark\.gpu' tests)
fi
step tests 300 tests.log "$python" -m pytest -o addopts=--import-mode=importlib -p no:cacheprovider -m gpu -q "${marked[@]}"

{
  card="$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
  echo "# Run on ${card:-simulated GPUs, because there is no card}"
  echo
  echo "| step | result | time | file |"
  echo "|---|---|---|---|"
  printf '%s\n' "${rows[@]}"
} >"$out/summary.md"
echo
cat "$out/summary.md"
exit "$failed"
