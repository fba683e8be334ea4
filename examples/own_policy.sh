#!/bin/sh
# Train a policy on your own data with your own verifier, and release it.
#
#     sh examples/own_policy.sh
set -eu

graftwork policy create adder --data examples/sums.jsonl --verifier python:examples.verifier:judge \
    --steps 12 --lr 0.002
graftwork adapt adder
graftwork ls adder

# The newest revision goes through the effect probe and the offline score. Nobody asks the policy yet, so
# there is nobody to try a canary on.
newest=$(graftwork ls adder --limit 1 --json | python -c 'import json, sys
print(json.load(sys.stdin)["revisions"][0]["digest"])')
graftwork release "adder@$newest" --skip-canary "The policy has no users yet."
graftwork ls adder
