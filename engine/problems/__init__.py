"""Problems to train on and score with: generated or from JSONL, and the verifiers of their answers."""
