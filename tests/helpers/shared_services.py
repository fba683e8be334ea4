"""Which test files share services that start once: their tests run on one worker, like those of one file."""

# For each session fixture that is an engine or a whole stack, the files that share it.
SHARED = {
    "engine": {
        "tests/bench/checks/test_catalog.py",
        "tests/bench/checks/test_rollback.py",
        "tests/engine/serving/gateway/test_live_apis.py",
        "tests/engine/serving/gateway/test_rollouts.py",
        "tests/engine/serving/gateway/test_samples.py",
        "tests/engine/serving/test_engine.py",
        "tests/engine/serving/test_forked_core.py",
        "tests/engine/serving/test_malformed_engine.py",
        "tests/engine/serving/test_parity.py",
        "tests/engine/training/test_loop.py",
        "tests/engine/verification/test_probe_gate.py",
        "tests/tasks/test_flips.py",
        "tests/tasks/test_general.py",
        "tests/tasks/test_score.py",
    },
    "crowded": {
        "tests/engine/serving/test_end_tokens.py",
        "tests/engine/serving/test_json_logs.py",
        "tests/engine/serving/worker/test_slot_reuse.py",
    },
    "moe_engine": {"tests/engine/serving/test_malformed_moe.py", "tests/engine/serving/test_moe_engine.py"},
    "people": {
        "tests/flows/test_decisions.py",
        "tests/flows/test_faults.py",
        "tests/flows/test_first_policy.py",
        "tests/flows/test_forms.py",
        "tests/flows/test_loop.py",
        "tests/flows/test_methods.py",
        "tests/flows/test_nightly.py",
        "tests/flows/test_pages_and_examples.py",
        "tests/flows/test_recorded_steps.py",
        "tests/flows/test_service_access.py",
    },
}


def group_of(file: str) -> str:
    """Return the fixture that a file shares with others, or else its own path."""
    return next((name for name, files in SHARED.items() if file in files), file)
