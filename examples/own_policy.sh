#!/bin/sh
# Train a policy on your own data with your own verifier, and release it.
#
#     sh examples/own_policy.sh
set -eu

graftwork policy create adder --data examples/sums.jsonl --verifier python:examples.verifier:judge \
    --steps 12 --lr 0.002
graftwork adapt adder
graftwork ls adder

# The newest revision has to pass the effect probe and the offline score. Without users there is no canary.
graftwork release adder --skip-canary "The policy has no users yet."
graftwork ls adder
