#!/usr/bin/env bash
# Runs PyPI's lm-eval with its local-completions model against `serve` and `up`, and compares every score and answer:
#   lm-eval.sh [MODEL]      default: tiny
# The task is of our own making (internal/chaos/testdata/lm_eval); nothing is asked of a hub. Tokens come from the
# server (lm-eval's "remote" tokenizer), prompts are scored with echo and logprobs. lm-eval and what it needs take about
# 760 MB; they go into .cache/lm-eval. Notes the outcome in docs/runs.md.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-tiny}
venv=.cache/lm-eval
[ -x "$venv/bin/lm_eval" ] || { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check 'lm-eval==0.4.13' tenacity; }
go build -o bin/metronome ./cmd/metronome
work=$(mktemp -d)
pids=()
trap 'for p in "${pids[@]}"; do kill "$p" 2>/dev/null || true; done; rm -rf "$work"' EXIT
"$venv/bin/python" internal/chaos/testdata/lm_eval/make_tasks.py "$work/tasks"

ready() { # FILE KEY: the address in a ready line, once it is there
  for _ in $(seq 600); do
    python3 -c 'import json,sys; print(json.loads(open(sys.argv[1]).readline())[sys.argv[2]])' "$1" "$2" 2>/dev/null && return
    sleep 0.1
  done
  echo "lm-eval: no ready line in $1" >&2
  return 1
}
bin/metronome serve "$model" --listen 127.0.0.1:0 --json >"$work/serve" 2>"$work/serve.log" & pids+=($!)
bin/metronome up "$model" --port 0 --json >"$work/up" 2>"$work/up.log" & pids+=($!)

evaluate() { # NAME URL
  HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME="$work/hf" OPENAI_API_KEY=none "$venv/bin/lm_eval" run --model local-completions \
    --model_args "model=$model,base_url=$2/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_length=512,tokenized_requests=True" \
    --include_path "$work/tasks" --tasks own_choice,own_words --log_samples --output_path "$work/out-$1" >"$work/$1.out" 2>&1 || { cat "$work/$1.out"; return 1; }
}
verdict=ok
{
  evaluate serve "$(ready "$work/serve" http)" && evaluate up "$(ready "$work/up" router)" &&
    "$venv/bin/python" internal/chaos/testdata/lm_eval/compare.py "$work/out-serve" "$work/out-up"
} 2>&1 | tee "$work/said" || verdict=FAILED
scripts/record.sh "lm-eval $model" $verdict "$work/said" '(own_[a-z]+ |serve and up agree).+'
[ $verdict = ok ]
