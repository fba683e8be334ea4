"""Problems to train on and to score with, generated or from JSONL, and the verifiers of their answers."""
