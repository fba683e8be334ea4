#!/bin/sh
# Teach a real language model a style from 200 example conversations, and ask it before and after.
#
#     make try-real
set -eu

examples=$(dirname "$0")/pirate.jsonl
state=.graftwork/try-real
# State of its own, and new: nothing of it gets into your policies.
rm -rf "$state"
mkdir -p "$state"
cat > "$state/params.yaml" << 'END'
base:
  name: smollm2-135m
suites_dir: suites
END
export GRAFTWORK_PARAMS="$state/params.yaml"
graftwork up
trap 'graftwork down' EXIT
graftwork policy create pirate --data "$examples" --items 40 --max-tokens 48 \
  --epochs 1 --lr 0.0005
graftwork adapt pirate
digest=$(graftwork ls pirate --limit 1 --json |
  python -c 'import json, sys; print(json.load(sys.stdin)["revisions"][0]["digest"])')
# None of these questions is among the examples.
for question in "What is a mountain?" "How do I bake a cake?" "Why do we sneeze?"; do
  echo
  echo "$question"
  echo "$question" | graftwork chat "pirate@$digest" --compare
done
